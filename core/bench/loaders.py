"""Lockstep's loader as a contender of `lockstep bench data` and `bench ladder`, and the naive ones of the latter.

A contender is a class: `Loader(folder, sequences, length, sample)` opens the data for batches [sequences, length] from
the run's `sample` on; `take(batches)` makes that number of batches. Those of the ladder have `make(step)` too, which
returns a batch.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.core.backend import Batch
from lockstep.core.bench.made_up import RAW_NAME
from lockstep.core.data.batches import train_batch
from lockstep.core.data.dataset import TokenDataset, TokenSplit
from lockstep.core.data.index import read_index
from lockstep.core.data.loader import Prefetcher
from lockstep.core.data.mixed import JoinedSplit, MixedSampler
from lockstep.core.data.mixture_order import MixtureOrder
from lockstep.core.data.sampler import BlockSampler, Sampler
from lockstep.core.data.split import Split

# Steps ahead of the trainer, the default of data.prefetch.
_AHEAD = 2
# Shares of the data sets of a mixture.
_WEIGHTS = (Fraction("0.5"), Fraction("0.31"), Fraction("0.19"))


class InMemory:
    """Tokens in memory, with each byte checked at opening: the default of a run."""

    verify, memory_limit_bytes = True, 1 << 40

    def __init__(self, folder: Path, sequences: int, length: int, sample: int = 0, seed: int = 0) -> None:
        dataset = TokenDataset.open(folder, verify=self.verify, memory_limit_bytes=self.memory_limit_bytes)
        self._split: Split = dataset.split("train")
        self._sampler: Sampler = BlockSampler(seed, self._split.num_tokens, length)
        self._sequences, self._length, self._sample = sequences, length, sample

    def take(self, batches: int) -> None:
        """Make the next batches."""
        for step in range(batches):
            self.make(step)
        self._sample += batches * self._sequences

    def make(self, step: int) -> Batch:
        """Make the batch of a step after the loader's sample."""
        first = (self._sample + step * self._sequences) * self._length
        return train_batch(self._split, self._sampler, first, self._sequences, self._length)

    def seconds_by_part(self, batches: int) -> dict[str, float]:
        """Return the seconds of a batch that its order, its copy, and the rest take: int32, targets and weights."""
        began = time.perf_counter()
        starts = [self._starts(step) for step in range(batches)]
        ordered = time.perf_counter()
        for each in starts:
            self._split.gather(each, self._length + 1)
        copied = time.perf_counter()
        self._sample += batches * self._sequences
        self.take(batches)
        order, copy, whole = ordered - began, copied - ordered, time.perf_counter() - copied
        parts = {"order": order, "copy": copy, "the rest": whole - order - copy}
        return {name: seconds / batches for name, seconds in parts.items()}

    def _starts(self, step: int) -> NDArray[np.int64]:
        first = (self._sample + step * self._sequences) * self._length
        return self._sampler.window_starts(first, self._sequences, self._length)


class Mapped(InMemory):
    """Tokens in mapped files, read when they are needed; each batch checks that the files are unchanged."""

    verify, memory_limit_bytes = False, 0


class Ahead(InMemory):
    """The batches of `InMemory` through the thread that makes them ahead of the trainer."""

    def take(self, batches: int) -> None:
        """Take the next batches from the thread."""
        with Prefetcher(self.make, 0, batches, _AHEAD) as ready:
            for _ in ready:
                pass
        self._sample += batches * self._sequences


class Mixture(InMemory):
    """The thirds of the tokens as three data sets, mixed by weights that are not equal."""

    def __init__(self, folder: Path, sequences: int, length: int, sample: int = 0, seed: int = 0) -> None:
        super().__init__(folder, sequences, length, sample, seed)
        assert isinstance(self._split, TokenSplit) and self._split.held is not None
        thirds = [TokenSplit([third]) for third in np.array_split(self._split.held, 3)]
        samplers = tuple(BlockSampler(seed, third.num_tokens, length) for third in thirds)
        self._split, self._sampler = JoinedSplit(thirds), MixedSampler(MixtureOrder(_WEIGHTS, seed), samplers)


class MappedTokenByToken:
    """The run's batches, put together token by token in Python from a mapped file: the ladder's first loader."""

    def __init__(self, folder: Path, sequences: int, length: int, sample: int = 0, seed: int = 0) -> None:
        self._tokens = self._open(folder / RAW_NAME, f"<u{read_index(folder).token_bytes}")
        self._sampler = BlockSampler(seed, len(self._tokens), length)
        self._sequences, self._length, self._sample = sequences, length, sample

    def _open(self, path: Path, dtype: str) -> NDArray[np.unsignedinteger]:
        return np.memmap(path, dtype=dtype, mode="r")

    def take(self, batches: int) -> None:
        """Make the next batches."""
        for step in range(batches):
            self.make(step)
        self._sample += batches * self._sequences

    def make(self, step: int) -> Batch:
        """Make the batch of a step after the loader's sample."""
        first = (self._sample + step * self._sequences) * self._length
        tokens, targets = [], []
        for start in self._sampler.window_starts(first, self._sequences, self._length).tolist():
            places = range(start, start + self._length)
            tokens.append([int(self._tokens[place]) for place in places])
            targets.append([int(self._tokens[place + 1]) for place in places])
        made = np.array(tokens, np.int32), np.array(targets, np.int32)
        return Batch(*made, np.ones((self._sequences, self._length), np.float32))


class TokenByToken(MappedTokenByToken):
    """The run's batches, put together token by token from memory, into which the whole file was read."""

    def _open(self, path: Path, dtype: str) -> NDArray[np.unsignedinteger]:
        return np.fromfile(path, dtype=dtype)


class Watched:
    """An endless iterator of batches, each made on request.

    seconds: time to make the last one.
    """

    def __init__(self, make: Callable[[int], Batch]) -> None:
        self._make = make
        self._last: Batch | None = None
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        """Make the batches of steps 0, 1 and so on."""
        for step in itertools.count():
            began = time.perf_counter()
            self._last = self._make(step)
            self.seconds = time.perf_counter() - began
            yield self._last

    def digest(self) -> str:
        """Return a digest of the last batch: tokens, targets and weights."""
        assert self._last is not None
        found = hashlib.sha256()
        for part in (self._last.tokens, self._last.targets, self._last.weights):
            found.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        return found.hexdigest()[:16]

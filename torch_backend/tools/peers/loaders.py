"""Contenders of `lockstep bench data`: loaders as in other trainers. core/bench/loaders.py has their shared code.

Tokens are a file of uint16 numbers without a header, as nanoGPT prepares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.core.bench.made_up import RAW_NAME

WORKERS, PREFETCH = 8, 4


class NanoGPT:
    """`get_batch` of nanoGPT's train.py (github.com/karpathy/nanoGPT, MIT; Karpathy 2022).

    The file is mapped again for each batch, so that pages that were read do not stay in memory. Starts are drawn
    independently, so an epoch repeats some tokens and omits others. Rows are int64.
    """

    def __init__(self, folder: Path, sequences: int, length: int, sample: int = 0) -> None:
        self._path, self._sequences, self._length = folder / RAW_NAME, sequences, length

    def take(self, batches: int) -> None:
        """Make this many batches."""
        for _ in range(batches):
            self._get_batch()

    def _get_batch(self) -> tuple[Tensor, Tensor]:
        data, length = np.memmap(self._path, dtype=np.uint16, mode="r"), self._length
        ix = torch.randint(len(data) - length, (self._sequences,))
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in ix])
        return x, y


class Slices:
    """Slices of a file that is mapped once, with NumPy only: nearly the least work for inputs and targets."""

    def __init__(self, folder: Path, sequences: int, length: int, sample: int = 0) -> None:
        self._data: NDArray[np.uint16] = np.asarray(np.memmap(folder / RAW_NAME, dtype=np.uint16, mode="r"))
        self._sequences, self._length = sequences, length
        self._draw = np.random.default_rng(0)

    def take(self, batches: int) -> None:
        """Make this many batches."""
        for _ in range(batches):
            self._batch()

    def _batch(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        starts = self._draw.integers(0, self._data.size - self._length, self._sequences).tolist()
        windows = np.stack([self._data[start : start + self._length + 1] for start in starts])
        return windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The consecutive windows of the mapped file, int64."""

    def __init__(self, path: Path, length: int) -> None:
        self._data: NDArray[np.uint16] = np.asarray(np.memmap(path, dtype=np.uint16, mode="r"))
        self._length = length

    def __len__(self) -> int:
        return (self._data.size - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self._length
        window = torch.from_numpy(self._data[begin : begin + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]


class Drawn(Sampler[int]):
    """`count` indices below `among`, drawn independently; torch's own sampler would first permute all indices."""

    def __init__(self, among: int) -> None:
        self.among, self.count = among, 0

    def __iter__(self) -> Iterator[int]:
        yield from torch.randint(self.among, (self.count,)).tolist()

    def __len__(self) -> int:
        return self.count


class TorchLoader:
    """torch's DataLoader with 8 worker processes, each 4 batches ahead.

    Each call is an epoch of the requested number of batches, so that workers are idle during the turns of others.
    """

    def __init__(self, folder: Path, sequences: int, length: int, sample: int = 0) -> None:
        windows = Windows(folder / RAW_NAME, length)
        self._drawn, self._sequences = Drawn(len(windows)), sequences
        self._loader = DataLoader(
            windows,
            sequences,
            sampler=self._drawn,
            num_workers=WORKERS,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
        )

    def take(self, batches: int) -> None:
        """Run an epoch of this many batches."""
        self._drawn.count = batches * self._sequences
        for _ in self._loader:
            pass

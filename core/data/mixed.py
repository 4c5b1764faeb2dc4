"""A mixture of prepared data sets: it joins their splits, and orders their samples by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.config.mixture import Part
from lockstep.core.data.dataset import TokenSplit
from lockstep.core.data.mixture_order import MixtureOrder
from lockstep.core.data.sampler import Sampler
from lockstep.core.data.shards import Tokens
from lockstep.core.data.split import Dataset, Split
from lockstep.core.data.tokenizer import TextTokenizer
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import canonical_json

# A position in a mixture is source · STRIDE + the position in the source's split. It does not depend on sizes.
_PLACE_BITS = 48
STRIDE = 1 << _PLACE_BITS


def source_of(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the source of each position in a mixture."""
    return starts >> _PLACE_BITS


class JoinedSplit:
    """The splits of all sources, read by positions in the mixture."""

    def __init__(self, splits: Sequence[Split]) -> None:
        """Join the sources' splits, in their order. If all are in memory, they become parts of one array."""
        self._splits = tuple(splits)
        held = [split.held for split in splits if isinstance(split, TokenSplit)]
        tokens = [part for part in held if part is not None]
        self._joined: TokenSplit | None = None
        if len(tokens) == len(self._splits):
            joined = np.concatenate(tokens)
            self._joined = TokenSplit([joined])
            sizes = np.array([part.size for part in tokens])
            # By source: the end of its tokens in the array, and the offset from positions in the mixture to the array.
            self._ends = np.cumsum(sizes)
            begins = self._ends - sizes
            self._moves = begins - np.arange(len(tokens)) * STRIDE
            for split, begin, end in zip(splits, begins, self._ends, strict=True):
                assert isinstance(split, TokenSplit)
                split.hold(joined[begin:end])

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all sources."""
        if self._joined is not None:
            return self._joined.num_tokens
        return sum(split.num_tokens for split in self._splits)

    def gather(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return windows as `TokenSplit.gather` does. Also raises IndexError for a source that does not exist."""
        sources = source_of(starts)
        if self._joined is not None:
            try:
                ends, moves = self._ends[sources], self._moves[sources]
            except IndexError:
                raise self._no_source(sources) from None
            joined = starts + moves
            if starts.size and int((ends - joined).min()) < length:
                raise IndexError(f"a window of {length} tokens reaches outside its source")
            return self._joined.gather(joined, length)
        places = starts % STRIDE
        if starts.size and not 0 <= int(sources.min()) <= int(sources.max()) < len(self._splits):
            raise self._no_source(sources)
        found = np.flatnonzero(np.bincount(sources, minlength=1)) if starts.size else np.array([0])
        if len(found) == 1:
            return self._splits[found[0]].gather(places, length)
        windows: Tokens | None = None
        for source in found.tolist():
            rows = np.flatnonzero(sources == source)
            part = self._splits[source].gather(places[rows], length)
            if windows is None:
                windows = np.empty((len(starts), length), part.dtype)
            windows[rows] = part
        assert windows is not None
        return windows

    def _no_source(self, sources: NDArray[np.int64]) -> IndexError:
        return IndexError(f"sources {sources.min()} to {sources.max()} of a mixture of {len(self._splits)}")


@dataclass(frozen=True)
class MixedSampler(Sampler):
    """The order of a mixture's blocks: sample i is block j of its source's own order, which continues over epochs.

    Attributes:
        order: gives the source of a sample, and j.
        samplers: the order of each source; all have the same length of blocks.
    """

    order: MixtureOrder
    samplers: tuple[Sampler, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one sampler per weight, and one length of blocks."""
        if len(self.samplers) != len(self.order.weights) or len({sampler.length for sampler in self.samplers}) != 1:
            raise ValueError("a mixture needs one sampler for each weight, all of one length of blocks")

    @cached_property
    def _hash(self) -> int:
        return hash((self.order, self.samplers))

    def __hash__(self) -> int:
        """Return the hash of the fields; it is computed once, because each batch uses it to find cached starts."""
        return self._hash

    @property
    def length(self) -> int:
        """The number of tokens in a block."""
        return self.samplers[0].length

    @property
    def tokens(self) -> int:
        """The number of tokens in all sources."""
        return self._all_tokens if self.ahead else self._count_tokens()

    def _count_tokens(self) -> int:
        return sum(sampler.tokens for sampler in self.samplers)

    @cached_property
    def _all_tokens(self) -> int:
        return self._count_tokens()

    @cached_property
    def ahead(self) -> bool:
        """True if block starts can be computed long before the blocks are read."""
        return all(sampler.ahead for sampler in self.samplers)

    def block_starts(self, run_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first tokens of the run's blocks, int64, as positions in the mixture."""
        if not run_blocks.size:
            return np.empty(0, np.int64)
        first = int(run_blocks[0])
        sources, numbers = self.order.places(first, int(run_blocks[-1]) - first + 1)
        chosen = run_blocks - first
        sources, numbers = sources[chosen], numbers[chosen]
        starts = np.empty(run_blocks.shape, np.int64)
        for source, sampler in enumerate(self.samplers):
            rows = np.flatnonzero(sources == source)
            if rows.size:
                own = numbers[rows]
                begin = int(own[0])
                # Use the source's cached ranges of starts: a few blocks take nearly as long to compute as thousands.
                places = sampler.window_starts(begin * self.length, int(own[-1]) + 1 - begin, self.length)
                starts[rows] = places[own - begin] + source * STRIDE
        return starts

    def epochs(self, samples: int) -> tuple[float, ...]:
        """Return how often each source's tokens are read in the first `samples` samples: (k,) numbers."""
        counts = self.order.counts(samples)
        return tuple(sampler.epochs(count)[0] for sampler, count in zip(self.samplers, counts, strict=True))


class TokenMixture:
    """Prepared data sets with one tokenizer, mixed by weight."""

    def __init__(self, parts: Sequence[Part], sources: Sequence[Dataset]) -> None:
        """Build the mixture from parts and their data sets.

        Raises:
            UserError: two data sets have different tokenizers or the same data; the message names both folders.
        """
        self.parts, self.sources = tuple(parts), tuple(sources)
        first = self.sources[0]
        for source in self.sources:
            ours, theirs = (one.facts()["tokenizer_fingerprint"] for one in (first, source))
            if ours != theirs:
                raise UserError(
                    f"{source.folder} was prepared with another tokenizer than {first.folder} "
                    f"({source.vocab_size:,} and {first.vocab_size:,} tokens): prepare one of them again with "
                    f"--data.tokenizer {first.folder}/tokenizer.json"
                )
        seen: dict[str, Dataset] = {}
        for source in self.sources:
            if (same := seen.setdefault(source.fingerprint, source)) is not source:
                raise UserError(
                    f"{source.folder} and {same.folder} hold the same data: give one of them the sum of both weights"
                )
        # Join the splits here and not at the first batch: several threads may make batches.
        self._splits = {name: JoinedSplit([source.split(name) for source in self.sources]) for name in ("train", "val")}

    @property
    def folder(self) -> Path:
        """The folder of the first source; all sources have the same tokenizer."""
        return self.sources[0].folder

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the sources' fingerprints, in their order, and of their exact shares."""
        total = sum(part.weight for part in self.parts)
        shares = [str(part.weight / total) for part in self.parts]
        identity = {"mixture": [[one.fingerprint, share] for one, share in zip(self.sources, shares, strict=True)]}
        return hashlib.sha256(canonical_json(identity)).hexdigest()

    @property
    def vocab_size(self) -> int:
        """The tokenizer's largest token id, plus one."""
        return self.sources[0].vocab_size

    @property
    def eot_id(self) -> int:
        """The token that ends a document."""
        return self.sources[0].eot_id

    def split(self, name: str) -> JoinedSplit:
        """Return the splits "train" or "val" of all sources, joined. Raises UserError if there is no such split."""
        if name not in self._splits:
            raise UserError(f"a mixture has no split {name!r}; there are train and val")
        return self._splits[name]

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of all sources. Raises UserError if it cannot be read."""
        return self.sources[0].tokenizer()

    def facts(self) -> dict[str, Any]:
        """Return the entries of `Dataset.facts`: sums of sizes, weighted means of other values, and facts by source."""
        total = sum(part.weight for part in self.parts)
        shares = [float(part.weight / total) for part in self.parts]
        each = [source.facts() for source in self.sources]
        sums = ("train_tokens", "train_documents", "val_tokens")
        means = ("val_unigram_entropy", "val_bigram_entropy", "val_bytes_per_token")
        return {
            **each[0],
            "path": ", ".join(f"{part.path}: {part.weight}" for part in self.parts),
            **{key: _sum([facts[key] for facts in each], [1] * len(each)) for key in sums},
            **{key: _sum([facts[key] for facts in each], shares) for key in means},
            "fingerprint": self.fingerprint,
            "sources": [
                {"name": part.name, "weight": str(part.weight), "share": share, **facts}
                for part, share, facts in zip(self.parts, shares, each, strict=True)
            ],
        }

    def origin(self, starts: NDArray[np.int64], length: int) -> dict[str, NDArray[np.int64]]:
        """Return the entries of `Dataset.origin`, and `source_ids`: the number of each window's source, from 0."""
        sources, places = np.divmod(starts, STRIDE)
        documents = np.empty((len(starts), length), np.int64)
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            documents[rows] = self.sources[source].origin(places[rows], length)["document_ids"]
        return {"document_ids": documents, "source_ids": sources}


def _sum(values: Sequence[Any], factors: Sequence[float]) -> Any:
    """Return the sum of values times factors; None if a value is None."""
    if any(value is None for value in values):
        return None
    return sum(value * factor for value, factor in zip(values, factors, strict=True))


def source_names(facts: Mapping[str, Any]) -> list[str]:
    """Return the names of a mixture's sources from the facts in run.json; [] for a single data set."""
    return [source["name"] for source in facts.get("sources", [])]

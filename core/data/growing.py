"""Read a data set while it is prepared or afterwards, with the same samples; its shards are read in groups."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.dataset import TokenDataset, TokenSplit
from lockstep.core.data.index import INDEX_NAME, TOKENIZER_NAME
from lockstep.core.data.origin import document_ids
from lockstep.core.data.plan import PLAN_NAME, Plan, ShardPlan, read_plan
from lockstep.core.data.shards import ShardFile, ShardHeader, Tokens, map_tokens, read_header, verify_shard
from lockstep.core.data.tokenizer import TextTokenizer, load_tokenizer
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import canonical_json
from lockstep.core.files.lock import is_held

Tell = Callable[[str], None]

# Seconds between two searches for a missing file, and seconds without a process that holds the folder after which the
# preparation counts as ended.
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 5.0


class Waiting:
    """A wait for files of a folder that another process prepares."""

    def __init__(self, folder: Path, minutes: float, tell: Tell) -> None:
        """Set the folder and the limit of a wait.

        minutes: limit of the wait for one file. tell: called with one line at the begin and at the end of a wait.
        """
        self._folder, self._seconds, self._tell = folder, 60 * minutes, tell

    def file(self, name: str) -> Path:
        """Wait until a file of the folder exists, and return its path.

        Raises:
            UserError: no process prepares the folder, or the file does not appear in time.
        """
        path = self._folder / name
        if path.is_file():
            return path
        began = held = time.monotonic()
        self._tell(f"waiting for {path}, which is being prepared")
        while not path.is_file():
            now = time.monotonic()
            if is_held(self._folder) is not False:
                held = now
            elif now - held > _GRACE_SECONDS and not path.is_file():
                raise UserError(
                    f"{path} is not there, and no process prepares {self._folder}; "
                    "continue the preparation with the same `lockstep data prepare` command"
                )
            if now - began > self._seconds:
                raise UserError(
                    f"{path} was not written within data.wait_minutes = {self._seconds / 60:g}, "
                    f"though a process holds {self._folder}"
                )
            time.sleep(_LOOK_SECONDS)
        self._tell(f"{path} is there, after {time.monotonic() - began:.0f} s")
        return path


class GrowingShards:
    """The training shards of a folder in preparation. It implements `Shards` and `Split`."""

    def __init__(self, folder: Path, plan: Plan, opened: Callable[[ShardPlan], Tokens]) -> None:
        """Set folder and plan. opened: waits for a shard, verifies it, and maps its tokens."""
        self._folder, self._plan, self._opened = folder, plan, opened
        self._planned = [shard for shard in plan.shards if shard.split == "train"]
        self._parts: list[Tokens] = []
        self._split: TokenSplit | None = None
        # Two threads may read: one prefetches batches, and another makes the batch of a step that is checked.
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """The number of training shards in the plan."""
        return len(self._planned)

    @property
    def finished(self) -> bool:
        """False: the state of the preparation is not tested for each batch."""
        return False

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the shards that were opened so far."""
        return sum(part.size for part in self._parts)

    @property
    def known_tokens(self) -> int:
        """The number of tokens in the shards that were opened so far."""
        return self.num_tokens

    @property
    def expected_tokens(self) -> float:
        """The plan's estimate of the number of tokens in all shards, from the bytes of their text."""
        return sum(shard.text_bytes for shard in self._planned) / self._plan.bytes_per_token

    def tokens_of(self, shard: int) -> int:
        """Return the number of tokens in a shard; wait for it and all shards before it.

        Raises UserError if a wait fails.
        """
        with self._lock:
            while len(self._parts) <= shard:
                self._parts.append(self._opened(self._planned[len(self._parts)]))
                self._split = None
            return self._parts[shard].size

    def gather(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return windows of the shards that were opened, as `TokenSplit.gather` does."""
        with self._lock:
            if self._split is None:
                files = [ShardFile.of(self._folder / shard.file) for shard in self._planned[: len(self._parts)]]
                self._split = TokenSplit(self._parts, files)
            split = self._split
        return split.gather(starts, length)


class FinishedShards:
    """The training shards of a finished folder. It implements `Shards`."""

    finished = True

    def __init__(self, tokens: list[int]) -> None:
        """Set the number of tokens in each shard, in order."""
        self._tokens = tokens
        self.count, self.known_tokens = len(tokens), sum(tokens)
        self.expected_tokens = float(self.known_tokens)

    def tokens_of(self, shard: int) -> int:
        """Return the number of tokens in a shard."""
        return self._tokens[shard]


class PlannedDataset:
    """A prepared folder, finished or not. Its fingerprint is that of its plan, so it is the same before and after."""

    def __init__(
        self, folder: Path, minutes: float, memory_limit_bytes: int, tell: Tell, *, verify: bool = True
    ) -> None:
        """Open a finished folder, or the plan, tokenizer and validation shards of an unfinished one.

        minutes: limit of the wait for a file of an unfinished folder; 0 requires a finished one. verify: for a finished
        folder, see `TokenDataset.open`.

        Raises:
            UserError: a file is missing, damaged, or does not belong to this data; the message names the file.
        """
        self.folder = folder
        self._waiting = Waiting(folder, minutes, tell)
        waits = minutes > 0 and not (folder / INDEX_NAME).is_file()
        whole = None if waits else TokenDataset.open(folder, verify=verify, memory_limit_bytes=memory_limit_bytes)
        self._whole = whole
        if waits:
            self._waiting.file(PLAN_NAME)
        plan = read_plan(folder)
        if plan is None:
            raise UserError(f"{folder} has no {PLAN_NAME}, which data.window_shards needs: it names the shards' order")
        self._plan, self._plan_file = plan, ShardFile.of(folder / PLAN_NAME)
        self._tokenizer = self._read_tokenizer()
        if whole is not None:
            entries = whole.index.train.shards
            if [entry.file for entry in entries] != [s.file for s in plan.shards if s.split == "train"]:
                raise UserError(f"{folder}: {PLAN_NAME} and {INDEX_NAME} name other shards; prepare it with --force")
            self.shards: GrowingShards | FinishedShards = FinishedShards([entry.tokens for entry in entries])
            return
        self.shards = GrowingShards(folder, plan, self._open_shard)
        val = [shard for shard in plan.shards if shard.split == "val"]
        self._val = TokenSplit([self._open_shard(shard) for shard in val], [ShardFile.of(folder / s.file) for s in val])

    @property
    def held_bytes(self) -> int:
        """The bytes of tokens that are in memory and not memory-mapped."""
        return self._whole.held_bytes if self._whole else 0

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the plan: settings, tokenizer, source files, and the documents of each shard."""
        plan = self._plan
        identity = {
            "identity": plan.identity,
            "tokenizer": plan.tokenizer_sha256,
            "files": [[file.name, file.size, file.mtime_ns] for file in plan.listing.files],
            "shards": [[shard.file, shard.split, shard.documents, shard.text_bytes] for shard in plan.shards],
        }
        return hashlib.sha256(canonical_json(identity)).hexdigest()

    @property
    def vocab_size(self) -> int:
        """The tokenizer's largest token id, plus one."""
        return self._tokenizer.vocab_size

    @property
    def eot_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eot_id

    def split(self, name: str) -> TokenSplit | GrowingShards:
        """Return the split "train" or "val". Raises UserError if there is no such split."""
        if self._whole is not None:
            return self._whole.split(name)
        if name == "train" and isinstance(self.shards, GrowingShards):
            return self.shards
        return self._val

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of this data."""
        return self._tokenizer

    def facts(self) -> dict[str, Any]:
        """Return sizes, entropies and fingerprints; None for values that only a finished folder has."""
        if self._whole is not None:
            return {**self._whole.facts(), "fingerprint": self.fingerprint}
        unknown = ("train_tokens", "val_unigram_entropy", "val_bigram_entropy", "val_bytes_per_token")
        return {
            "path": str(self.folder),
            "vocabulary": self.vocab_size,
            "train_documents": sum(shard.documents for shard in self._plan.shards if shard.split == "train"),
            "val_tokens": self._val.num_tokens,
            **dict.fromkeys(unknown),
            "tokenizer_fingerprint": self._plan.tokenizer_sha256,
            "fingerprint": self.fingerprint,
        }

    def origin(self, starts: NDArray[np.int64], length: int) -> dict[str, NDArray[np.int64]]:
        """Return `document_ids`, int64 (B, length), of windows of the training shards that exist."""
        train = [self.folder / shard.file for shard in self._plan.shards if shard.split == "train"]
        return {"document_ids": document_ids([path for path in train if path.is_file()], starts, length)}

    def _read_tokenizer(self) -> TextTokenizer:
        path = self._waiting.file(TOKENIZER_NAME) if self._whole is None else self.folder / TOKENIZER_NAME
        tokenizer = load_tokenizer(path)
        if tokenizer.fingerprint != self._plan.tokenizer_sha256:
            raise UserError(f"{path} is not the tokenizer that {PLAN_NAME} names; prepare the data again with --force")
        return tokenizer

    def _open_shard(self, shard: ShardPlan) -> Tokens:
        """Wait for a shard, verify all its bytes, and map its tokens."""
        path = self._waiting.file(shard.file)
        # If the folder was prepared again, its shards have the same names and other contents.
        self._plan_file.require_unchanged()
        header: ShardHeader = read_header(path)
        if header.documents != shard.documents:
            raise UserError(
                f"the shard {path} is not the one that {PLAN_NAME} names; prepare the data again with --force"
            )
        verify_shard(path, header, self.vocab_size, self.eot_id)
        return map_tokens(path, header)

"""From text to token shards: `lockstep data prepare`, without its output on the screen."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.core.data.catalog import Catalog, Duplicates, RecordRules, read_catalog
from lockstep.core.data.documents import OnBroken
from lockstep.core.data.engines.engine import Engine
from lockstep.core.data.engines.processes import Processes
from lockstep.core.data.entropy import TokenCounts
from lockstep.core.data.index import (
    INDEX_NAME,
    TOKENIZER_NAME,
    DatasetIndex,
    ShardEntry,
    SplitEntry,
    read_index,
    write_index,
)
from lockstep.core.data.plan import Plan, ShardPlan, plan_shards, write_plan
from lockstep.core.data.resume_prepare import damaged_shards, plan_to_continue, remove_files, remove_prepared
from lockstep.core.data.sample import sample_training_text
from lockstep.core.data.shards import ShardHeader, map_tokens, read_header, token_bytes_for, verify_shard
from lockstep.core.data.sources import SourceListing, list_source
from lockstep.core.data.tokenizer import (
    LEAST_VOCABULARY,
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from lockstep.core.data.workers import encode_shards, require_source
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import remove_temporaries, write_atomically
from lockstep.core.files.lock import LOCK_NAME, FolderLock

DEFAULT_VOCAB_SIZE = 32_768

_TOKENIZER_SAMPLE_BYTES = 16 << 20
_MEASURED_BYTES = 1 << 20
# Required disk space / estimated size of the shards: the estimate comes from a sample.
_DISK_MARGIN = 1.2


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of the data set to prepare.

    Attributes:
        out: the folder to write; it is created if it does not exist.
        source: see `lockstep.core.data.sources.list_source`; None is Python's standard library.
        vocab_size: number of tokens of the tokenizer to train, including the end of text; None is 32,768.
        tokenizer: a tokenizer.json to use; not together with `vocab_size`.
        column: the key or column with the text, for JSON lines and parquet.
        val_fraction: fraction of the documents for validation, in (0, 1).
        on_broken, duplicates, max_document_bytes: see `RecordRules`.
        shard_tokens: approximate number of tokens in a shard.
        workers: number of worker processes; the result does not depend on it.
        force: remove the files of earlier preparations in the folder.
    """

    out: str | Path
    source: str | None = None
    vocab_size: int | None = None
    tokenizer: str | Path | None = None
    column: str = "text"
    val_fraction: float = 0.01
    on_broken: OnBroken = "error"
    duplicates: Duplicates = "keep"
    max_document_bytes: int = 0
    shard_tokens: int = 1 << 22
    workers: int = 1
    force: bool = False

    @property
    def rules(self) -> RecordRules:
        """The rules for unusual records."""
        return RecordRules(self.on_broken, self.duplicates, self.max_document_bytes)


@dataclass(frozen=True)
class Progress:
    """Progress of a stage: `done` of `total` bytes of text; both are 0 for a stage without this information."""

    stage: Literal["read", "tokenizer", "encode", "measure"]
    done: int
    total: int


@dataclass(frozen=True)
class PrepareResult:
    """The result of a preparation. up_to_date: True if the folder was already complete; then all shards were kept."""

    folder: Path
    index: DatasetIndex
    up_to_date: bool
    shards_written: int
    shards_kept: int


OnProgress = Callable[[Progress], None]


def prepare(
    settings: PrepareSettings, on_progress: OnProgress | None = None, engine: Engine | None = None
) -> PrepareResult:
    """Convert a source to token shards for `TokenDataset.open`.

    It can be interrupted safely: it writes plan.json, tokenizer.json, the shards and index.json in this order, each
    atomically. A second call with the same settings and source keeps finished files. If all are finished, it changes
    nothing.

    Args:
        settings: the settings.
        on_progress: called from time to time, in this process.
        engine: computes the parts; None is `settings.workers` processes on this machine.

    Raises:
        UserError: invalid settings, a source without text, a folder with other contents, too little space on the disk,
            or another process that prepares the folder.
    """
    _check_settings(settings)
    report = on_progress or (lambda progress: None)
    folder = Path(settings.out).expanduser().absolute()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    _make_folder(folder)
    try:
        with FolderLock(folder):
            return _prepare(settings, folder, report, engine or Processes(settings.workers))
    except UserError:
        _remove_if_nothing_came_of_it(folder, made)
        raise


def _prepare(settings: PrepareSettings, folder: Path, report: OnProgress, engine: Engine) -> PrepareResult:
    """Do the work of `prepare` in a folder that exists and is locked."""
    remove_temporaries(folder)
    given = load_tokenizer(settings.tokenizer) if settings.tokenizer is not None else None
    listing = list_source(settings.source, exclude=folder)
    if listing.in_this_process:
        engine = Processes(1)
    identity = _identity(settings, given)
    plan = None if settings.force else plan_to_continue(folder, identity, listing)
    if plan is None:
        # Test one worker's access to the source now, and not after hours of reading.
        list(engine.map(require_source, listing.files[:1], folder))
        remove_prepared(folder)
        plan = _start(settings, folder, identity, listing, given, report, engine)
    elif (folder / INDEX_NAME).is_file():
        index = read_index(folder)
        if not (damaged := damaged_shards(folder, index)):
            return PrepareResult(folder, index, True, 0, len(plan.shards))
        # Without index.json the folder counts as unfinished, until all shards are repaired.
        remove_files([folder / INDEX_NAME, *damaged])
    return _finish(folder, plan, report, engine)


def _remove_if_nothing_came_of_it(folder: Path, made: list[Path]) -> None:
    """Remove the folders that this call created, the innermost first, if `folder` has nothing but its lock."""
    with contextlib.suppress(OSError):
        if made and [path.name for path in folder.iterdir()] == [LOCK_NAME]:
            (folder / LOCK_NAME).unlink()
            for path in made:
                path.rmdir()


def _check_settings(settings: PrepareSettings) -> None:
    if settings.tokenizer is not None and settings.vocab_size is not None:
        raise UserError("give either a vocabulary size (to train a tokenizer) or a tokenizer, not both")
    if settings.vocab_size is not None and settings.vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size {settings.vocab_size} is too small; {MIN_VOCAB_SIZE} is the least: {LEAST_VOCABULARY}"
        )
    if settings.vocab_size is not None and settings.vocab_size > MAX_VOCAB_SIZE:
        raise UserError(f"vocab_size {settings.vocab_size:,} is too large to train; {MAX_VOCAB_SIZE:,} is the most")
    if not 0.0 < settings.val_fraction < 1.0:
        raise UserError(f"val_fraction {settings.val_fraction} must lie between 0 and 1, for example 0.01")
    if settings.max_document_bytes < 0:
        raise UserError(
            f"max_document_bytes {settings.max_document_bytes} must be a number of bytes, or 0 for no limit"
        )
    if settings.shard_tokens < 1 or settings.workers < 1:
        raise UserError(f"shard_tokens {settings.shard_tokens} and workers {settings.workers} must be at least 1")
    out = Path(settings.out).expanduser()
    if settings.source is not None and Path(settings.source).expanduser().resolve() == out.resolve():
        raise UserError(f"{out} is the source and the folder to prepare: give another folder for the shards")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror or error}") from error


def _identity(settings: PrepareSettings, given: TextTokenizer | None) -> dict[str, Any]:
    """Return the settings that determine the contents, for plan.json and index.json."""
    return {
        "vocab_size": None if given else settings.vocab_size or DEFAULT_VOCAB_SIZE,
        "tokenizer": given.fingerprint if given else None,
        "column": settings.column,
        "val_fraction": settings.val_fraction,
        "shard_tokens": settings.shard_tokens,
        # Only values that are not the default: plans from before these settings existed can then be continued.
        **{name: value for name, value in vars(settings.rules).items() if value != vars(RecordRules())[name]},
    }


def _start(
    settings: PrepareSettings,
    folder: Path,
    identity: dict[str, Any],
    listing: SourceListing,
    given: TextTokenizer | None,
    report: OnProgress,
    engine: Engine,
) -> Plan:
    """Read the source, determine the tokenizer and the shards, and write tokenizer.json and plan.json."""
    total = listing.size
    on_bytes: Callable[[int], None] = lambda done: report(Progress("read", done, total))  # noqa: E731
    catalog = read_catalog(listing, settings.column, settings.val_fraction, on_bytes, settings.rules, engine, folder)
    report(Progress("tokenizer", 0, 0))
    tokenizer, bytes_per_token = _settle_tokenizer(identity, listing, catalog, given)
    plan = Plan(
        identity=identity,
        listing=listing,
        tokenizer_sha256=tokenizer.fingerprint,
        bytes_per_token=bytes_per_token,
        left_out=catalog.counts.content(),
        shards=tuple(plan_shards(catalog, settings.shard_tokens * bytes_per_token)),
    )
    _check_disk(folder, plan.shards, bytes_per_token, token_bytes_for(tokenizer.vocab_size))
    write_plan(folder, plan)
    write_atomically(folder / TOKENIZER_NAME, [tokenizer.content])
    return plan


def _settle_tokenizer(
    identity: dict[str, Any], listing: SourceListing, catalog: Catalog, given: TextTokenizer | None
) -> tuple[TextTokenizer, float]:
    """Return the tokenizer and its bytes per token, measured on an even sample of the training text."""
    budget = _MEASURED_BYTES if given else _TOKENIZER_SAMPLE_BYTES
    sample = list(sample_training_text(listing, identity["column"], catalog, budget))
    tokenizer = given or train_tokenizer(sample, identity["vocab_size"])
    # Take every k-th text, so that the measured texts are as evenly spread as the sample.
    measured = sample[:: max(1, sum(map(len, sample)) // _MEASURED_BYTES)]
    tokens = sum(ids.size + 1 for ids in tokenizer.encode_documents(measured))
    return tokenizer, sum(len(text.encode()) for text in measured) / tokens


def _check_disk(folder: Path, shards: tuple[ShardPlan, ...], bytes_per_token: float, token_bytes: int) -> None:
    text = sum(shard.text_bytes for shard in shards)
    documents = sum(shard.documents for shard in shards)
    needed = int(_DISK_MARGIN * (text / bytes_per_token * token_bytes + documents * (8 + token_bytes)))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"no room on the disk of {folder}: about {needed:,} bytes are needed, {free:,} are free")


def _finish(folder: Path, plan: Plan, report: OnProgress, engine: Engine) -> PrepareResult:
    """Write missing shards, measure the entropies of the validation split, and write the index."""
    tokenizer = load_tokenizer(folder / TOKENIZER_NAME)
    headers = {
        shard.file: header for shard in plan.shards if (header := _kept_header(folder, shard, tokenizer)) is not None
    }
    kept = len(headers)
    # A run that trains at the same time needs the validation shards first, and then the others in their order.
    in_order = sorted(plan.shards, key=lambda shard: shard.split != "val")
    missing = tuple(shard for shard in in_order if shard.file not in headers)
    _check_disk(folder, missing, plan.bytes_per_token, token_bytes_for(tokenizer.vocab_size))
    total = sum(shard.text_bytes for shard in plan.shards)
    done = total - sum(shard.text_bytes for shard in missing)
    report(Progress("encode", done, total))
    for shard, header in encode_shards(missing, folder, plan, engine):
        headers[shard.file] = header
        done += shard.text_bytes
        report(Progress("encode", done, total))
    report(Progress("measure", 0, 0))
    index = _index_of(folder, plan, headers, tokenizer)
    write_index(folder, index)
    return PrepareResult(folder, index, False, len(missing), kept)


def _kept_header(folder: Path, shard: ShardPlan, tokenizer: TextTokenizer) -> ShardHeader | None:
    """Return the header of a shard that exists and is undamaged, else None."""
    path = folder / shard.file
    try:
        header = read_header(path)
        verify_shard(path, header, tokenizer.vocab_size, tokenizer.eot_id)
    except UserError:
        return None
    return header if header.documents == shard.documents else None


def _index_of(folder: Path, plan: Plan, headers: dict[str, ShardHeader], tokenizer: TextTokenizer) -> DatasetIndex:
    entries: dict[str, list[ShardEntry]] = {"train": [], "val": []}
    for shard in plan.shards:
        header = headers[shard.file]
        entry = ShardEntry(shard.file, header.tokens, header.documents, shard.text_bytes, header.sha256)
        entries[shard.split].append(entry)
    counts = TokenCounts(tokenizer.vocab_size)
    for entry in entries["val"]:
        counts.add(map_tokens(folder / entry.file, headers[entry.file]))
    return DatasetIndex(
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        token_bytes=token_bytes_for(tokenizer.vocab_size),
        tokenizer_sha256=tokenizer.fingerprint,
        train=SplitEntry(tuple(entries["train"]), None, None),
        val=SplitEntry(
            tuple(entries["val"]),
            counts.unigram_entropy() if counts.tokens else None,
            counts.bigram_entropy() if counts.tokens > 1 else None,
        ),
        settings=plan.identity,
        source={
            "description": plan.listing.description,
            "files": len(plan.listing.files),
            "bytes": plan.listing.size,
            **plan.left_out,
        },
    )

"""`lockstep data prepare`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.core.config.file import load_config
from lockstep.core.errors import UserError
from lockstep.scripts.shared.arguments import parse

if TYPE_CHECKING:
    from lockstep.core.data.engines.ray_tasks import RayTasks

# More than any cluster needs. Each worker has threads, so a typing error in the number could take the machine down.
_MOST_WORKERS = 4096


@dataclass
class Prepare:
    """Turn text into token shards: `lockstep data prepare CONFIG` prepares the data of a run file.

    Without CONFIG it prepares the default data, the standard library of the running Python, in data/stdlib. Settings
    are flags: --data.source DIR or s3://BUCKET/FOLDER, --data.path OUT, --data.column text, --data.tokenizer FILE,
    --data.val-fraction 0.01, --data.on-broken skip, --data.duplicates drop, --model.vocab-size 4096.
    """

    config: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG]", help_behavior_hint="(default: none)")
    ] = None
    """run file; its [data] and model.vocab_size define the data"""
    workers: int = 0
    """processes that encode; 0 = one per core, with --engine ray one per CPU of the cluster"""
    engine: Literal["local", "ray"] = "local"
    """where text is encoded: in processes of this machine, or by Ray on one or more machines (docs/guide/cluster.md)"""
    ray_address: Annotated[
        str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="(default: RAY_ADDRESS, else this machine)")
    ] = None
    """address of a running Ray: auto, or HOST:PORT of its head"""
    force: bool = False
    """discard earlier preparations in the folder"""


def main(argv: list[str]) -> int:
    """Prepare the data with a progress bar, and print a summary."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from lockstep.core.data.left_out import kept_copies_in_words, left_out_in_words
    from lockstep.core.data.prepare import PrepareSettings, prepare
    from lockstep.core.data.prepare import Progress as Stage
    from lockstep.core.report.text import plural
    from lockstep.core.sinks.lines import tell
    from lockstep.core.sinks.tables import facts
    from lockstep.core.sinks.terminal import open_console

    options, given = parse(Prepare, "data prepare", argv, with_settings=True, shown=_bears_on_data)
    if not 0 <= options.workers <= _MOST_WORKERS:
        raise UserError(
            f"command line: workers = {options.workers}: 1 to {_MOST_WORKERS:,} processes, or 0 for one per core"
        )
    if given.get("data.source") == "":
        raise UserError("command line: data.source = '': no path; leave it out for Python's standard library")
    if options.ray_address is not None and options.engine != "ray":
        raise UserError("command line: --ray-address needs --engine ray")
    config = load_config(options.config, given)
    data = config.data
    settings = PrepareSettings(
        out=data.path,
        source=data.source or None,
        vocab_size=None if data.tokenizer else config.model.vocab_size,
        tokenizer=data.tokenizer or None,
        column=data.column,
        val_fraction=data.val_fraction,
        on_broken=data.on_broken,
        duplicates=data.duplicates,
        max_document_bytes=data.max_document_bytes,
        workers=options.workers or os.cpu_count() or 1,
        force=options.force,
    )
    console = open_console()
    with (
        _engine(options) as engine,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar,
    ):
        tasks: dict[str, TaskID] = {}

        def show(stage: Stage) -> None:
            if stage.stage not in tasks:
                tasks[stage.stage] = bar.add_task(stage.stage)
            bar.update(tasks[stage.stage], completed=stage.done, total=stage.total or None)

        result = prepare(settings, show, engine)
    index = result.index
    written = f"{plural(result.shards_written, 'shard')} written, {result.shards_kept} kept"
    state = "was ready" if result.up_to_date else written
    records = {
        "left out": "; ".join(left_out_in_words(index.source)),
        "kept": "; ".join(kept_copies_in_words(index.source)),
    }
    redone = engine.redone if engine is not None else 0
    found = {
        "state": state,
        **({"lost workers": f"{plural(redone, 'part')} of the work started again"} if redone else {}),
        "documents": f"{index.train.documents:,} to train on, {index.val.documents:,} held out",
        **{name: words for name, words in records.items() if words},
        "tokens": f"{index.train.tokens:,} to train on, {index.val.tokens:,} held out",
        "vocabulary": f"{index.vocab_size:,} tokens",
        "bytes a token": _two(index.val.bytes_per_token),
        "held-out unigram entropy": f"{_two(index.val.unigram_entropy)} nats",
        "held-out bigram entropy": f"{_two(index.val.bigram_entropy)} nats",
        "fingerprint": index.fingerprint[:16],
    }
    tell(console, str(result.folder), "bold")  # a title of the table would be broken at the table's width
    console.print(facts("", found))
    return 0


def _engine(options: Prepare) -> AbstractContextManager[RayTasks | None]:
    """Return the engine that was asked for; None is the processes of the settings."""
    if options.engine == "local":
        return nullcontext()
    from lockstep.core.data.engines.ray_tasks import RayTasks

    return RayTasks(options.workers, options.ray_address)


def _bears_on_data(key: str) -> bool:
    return key.startswith("data.") or key == "model.vocab_size"


def _two(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"

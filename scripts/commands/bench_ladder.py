"""`lockstep bench ladder`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.bench_sides import (
    LOADER_LIMIT,
    LOADER_WARMUP,
    START_LIMIT,
    STEP_LIMIT,
    about,
    check_turns,
    start_loader,
    start_trainer,
)
from lockstep.scripts.shared.installation import shipped_config

if TYPE_CHECKING:
    from typing import IO, Any

    from lockstep.core.bench.turns import Side
    from lockstep.core.config.schema import RunConfig

QUICKSTART = shipped_config("quickstart")
# A document has 1,024 tokens.
LEAST, MOST = 1, 4_000_000


@dataclass
class BenchLadder:
    """Measure the published GPT-2 ladder's six rungs on a run's own step, in turns: `lockstep bench ladder`.

    The rungs: token by token from mmap, tokens in RAM, vectorised batches, torch.compile, bf16, flash attention. All
    rungs read the same batches and must reach the same losses. Ends 0 if every rung was measured, 1 if the losses of
    one differ, 2 if one failed.
    """

    config: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="(default: quickstart.toml)")
    ] = QUICKSTART
    """run file (TOML): model, batch, optimizer; rungs set precision, program and attention"""
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N…", help_behavior_hint="(default: the run's)")] = ()
    """sequence lengths; each has a ladder. The tokens of a step are the run's"""
    rounds: int = 30
    """timed steps of each rung, and timed turns of each loader"""
    warmup: int = 8
    """warm-up steps of each rung"""
    seconds: float = 60.0
    """time limit of a ladder after the warm-up; no round begins after it"""
    threads: int = 0
    """CPU threads of each rung; 0 = one per core"""
    kilotokens: int = 16384
    """size of the generated data set in 1,024 tokens; a token takes four bytes of the temporary folder"""
    json: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench_ladder.json")
    """file of the results; the output of the processes goes into a .log beside it"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """measure nothing; write a Markdown page of the results, and a picture beside it"""


def main(argv: list[str]) -> int:
    """Measure, or write the page."""
    from lockstep.core.bench.files import read_results, write_page
    from lockstep.core.bench.ladder import SCHEMA, SUITE
    from lockstep.core.bench.ladder_page import SHOWS, figure, page

    options, given = parse(BenchLadder, "bench ladder", argv, with_settings=True, shown=_bears_on_it)
    _check(options)
    if options.page:
        results = read_results(options.json, SUITE, SCHEMA)
        write_page(options.page, page(results), figure(results), SHOWS)
        print(options.page)
        return 0
    return measure(options, _ladders(options, given))


def _bears_on_it(key: str) -> bool:
    return key in ("seed", "device") or key.startswith(("model.", "train.", "optim."))


def _check(options: BenchLadder) -> None:
    check_turns(options.rounds, options.warmup, options.seconds, options.threads)
    for length in options.lengths:
        if length < 1:
            raise UserError(f"command line: lengths = {length}: must be a number above 0")
    if not LEAST <= options.kilotokens <= MOST:
        raise UserError(f"command line: kilotokens = {options.kilotokens}: must be a number from {LEAST} to {MOST}")
    check_file("json", options.json)
    check_file("page", options.page)


def _ladders(options: BenchLadder, given: dict[str, str]) -> list[dict[str, RunConfig]]:
    """Return the settings of each rung, for each sequence length. Raises UserError for a run without a ladder."""
    from lockstep.core.bench.ladder import NUMBER, at_length, check_config, settings_of
    from lockstep.core.config.file import load_config
    from lockstep.torch_backend.device import resolve_device

    # The quickstart compiles block by block to start sooner. One program for the whole step is faster.
    scope = {"compile.scope": "model"} if options.config == QUICKSTART else {}
    given = {"train.ranks": "1", **scope, **given}
    config = load_config(options.config, {**given, **settings_of("mmap")})
    given["device"] = resolve_device(config).type
    ladders = []
    for length in options.lengths or (config.train.sequence_length,):
        cut = at_length(config, length)
        rungs = {name: load_config(options.config, {**given, **cut, **settings_of(name)}) for name in NUMBER}
        for rung in rungs.values():
            check_config(rung)
        ladders.append(rungs)
    return ladders


def measure(options: BenchLadder, ladders: list[dict[str, RunConfig]]) -> int:
    """Measure a ladder for each length; the file is written after each."""
    from lockstep.core.bench.ladder import EXPECTED, SCHEMA, SUITE
    from lockstep.core.bench.ladder_page import HEADERS, LOADER_HEADERS, answers, cells, loader_cells
    from lockstep.core.bench.made_up import write_made_up
    from lockstep.core.files.atomic import write_atomically
    from lockstep.core.sinks.lines import tell
    from lockstep.core.sinks.tables import print_fitting
    from lockstep.core.sinks.terminal import open_unwrapped

    console = open_unwrapped()
    config = ladders[0][EXPECTED]
    threads = options.threads or os.cpu_count() or 1
    results: dict[str, Any] = {"schema": SCHEMA, "suite": SUITE, **about(config, threads)}
    results |= {"tokens": 1024 * options.kilotokens, "rows": []}
    with options.json.with_suffix(".log").open("a") as log, tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        write_made_up(Path(folder), results["tokens"], config.model.vocab_size)
        for rungs in ladders:
            results["rows"].append(found := _row(rungs, options, Path(folder), threads, log))
            write_atomically(options.json, [(json.dumps(results, indent=1) + "\n").encode()])
            if found["rungs"]:
                print_fitting(console, found["row"], HEADERS, cells(found))
                print_fitting(console, "", LOADER_HEADERS, loader_cells(found))
            for line in answers(found):
                tell(console, line)
    status = {found["status"] for found in results["rows"]}
    return 2 if "failed" in status else 1 if "not_the_same_work" in status else 0


def _row(rungs: dict[str, RunConfig], options: BenchLadder, folder: Path, threads: int, log: IO[str]) -> dict[str, Any]:
    """Measure the loaders alone, then the rungs. The other rungs are measured even if one cannot start."""
    from lockstep.core.bench.ladder import EXPECTED, loader_of, result, row_name
    from lockstep.core.bench.peers import LOCKSTEP
    from lockstep.core.bench.turns import answers_in_turns

    sides: list[Side] = []
    failed: dict[str, str] = {}
    try:
        loaders = _loaders(rungs[EXPECTED], options, folder, log)
        for name, config in rungs.items():
            data = {"loader": loader_of(name), "folder": str(folder)}
            try:
                sides.append(start_trainer(name, LOCKSTEP, config, threads, log, data=data))
            except UserError as error:
                failed[name] = str(error)
        said = answers_in_turns(sides, options.warmup, options.rounds, options.seconds, STEP_LIMIT)
        memory = {side.name: side.ask("end", START_LIMIT)["memory"] for side in sides}
    except UserError as error:
        return {"row": row_name(rungs[EXPECTED]), "status": "failed", "reason": str(error), "rungs": {}, "loaders": {}}
    finally:
        for side in sides:
            side.close()
    return result(rungs, said, options.warmup, memory, failed, loaders)


def _loaders(config: RunConfig, options: BenchLadder, folder: Path, log: IO[str]) -> dict[str, list[float]]:
    """Return seconds of a batch by turn, of each loader alone."""
    from lockstep.core.bench.ladder import RUNGS
    from lockstep.core.bench.turns import answers_in_turns

    shape = config.train.batch_size, config.train.sequence_length
    sides: list[Side] = []
    try:
        for rung in RUNGS:
            if rung.loader:
                sides.append(start_loader(rung.name, rung.loader, folder, shape, [], log))
        said = answers_in_turns(sides, LOADER_WARMUP, options.rounds, options.seconds, LOADER_LIMIT)
    finally:
        for side in sides:
            side.close()
    return {name: [answer["seconds"] for answer in found[LOADER_WARMUP:]] for name, found in said.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`lockstep bench data`."""

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
from lockstep.scripts.shared.bench_sides import LOADER_LIMIT, LOADER_WARMUP, start_loader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO, Any

    from lockstep.core.bench.peers import Contender
    from lockstep.core.bench.turns import Side

# A document has 1,024 tokens, and the largest batch must fit.
LEAST, MOST = 2_000, 4_000_000


@dataclass
class BenchData:
    """Time how fast batches are made, beside nanoGPT's get_batch, mmap slices and a DataLoader: `lockstep bench data`.

    All contenders share one core and take turns. Two more times are measured: to the first batch, and to resume at
    sample 10⁹ of a virtual data set of that size. Ends 0 if all was measured, 2 otherwise.
    """

    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: all)")] = ()
    """any of 16x128, 64x1024, 512x1024: sequences × tokens of a batch"""
    without: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: nobody)")] = ()
    """contenders to leave out: any of lockstep-ahead, lockstep-mapped, lockstep-mixture, mmap, nanogpt, dataloader"""
    rounds: int = 15
    """timed turns of each contender"""
    seconds: float = 30.0
    """time limit of a row after its warm-up; no round begins after it"""
    kilotokens: int = 65536
    """size of the generated data set in 1,024 tokens; a token takes four bytes of the temporary folder"""
    json: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench_data.json")
    """file of the results; the output of the processes goes into a .log beside it"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """measure nothing; write a Markdown page of the results, and a picture beside it"""


def main(argv: list[str]) -> int:
    """Measure, or write the page."""
    from lockstep.core.bench.data import CONTENDERS, ROWS, SCHEMA, SHOWS, SUITE, figure, page
    from lockstep.core.bench.files import read_results, write_page

    options, _ = parse(BenchData, "bench data", argv, with_settings=False)
    _check(options, tuple(ROWS), [one.name for one in CONTENDERS if one.name != "lockstep"])
    if options.page:
        results = read_results(options.json, SUITE, SCHEMA)
        write_page(options.page, page(results), figure(results), SHOWS)
        print(options.page)
        return 0
    return measure(options, options.rows or tuple(ROWS), [one for one in CONTENDERS if one.name not in options.without])


def _check(options: BenchData, rows: Sequence[str], names: Sequence[str]) -> None:
    for row in options.rows:
        if row not in rows:
            raise UserError(f"command line: rows: {row or repr(row)} is not a row; they are {', '.join(rows)}")
    for name in options.without:
        if name not in names:
            raise UserError(
                f"command line: without: {name or repr(name)} is not a contender; they are {', '.join(names)}"
            )
    if not 1 <= options.rounds <= 10_000:
        raise UserError(f"command line: rounds = {options.rounds}: must be a number from 1 to 10000")
    if not 0 < options.seconds < float("inf"):
        raise UserError(f"command line: seconds = {options.seconds}: must be a number above 0")
    if not LEAST <= options.kilotokens <= MOST:
        raise UserError(f"command line: kilotokens = {options.kilotokens}: must be a number from {LEAST} to {MOST}")
    check_file("json", options.json)
    check_file("page", options.page)


def measure(options: BenchData, rows: Sequence[str], contenders: Sequence[Contender]) -> int:
    """Measure row by row, then first batches; the file is written after each."""
    from lockstep.core.bench.data import HEADERS, SCHEMA, SUITE, answers, cells
    from lockstep.core.bench.made_up import write_made_up
    from lockstep.core.files.atomic import write_atomically
    from lockstep.core.sinks.lines import tell
    from lockstep.core.sinks.tables import print_fitting
    from lockstep.core.sinks.terminal import open_unwrapped

    def keep() -> None:
        write_atomically(options.json, [(json.dumps(results, indent=1) + "\n").encode()])

    console = open_unwrapped()
    results: dict[str, Any] = {"schema": SCHEMA, "suite": SUITE, **_about(), "tokens": 1024 * options.kilotokens}
    results |= {"rows": [], "first": {}, "resume": {"reason": "not begun"}}
    with options.json.with_suffix(".log").open("a") as log, tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        write_made_up(data, results["tokens"])
        for row in rows:
            results["rows"].append(found := _row(row, options, data, contenders, log))
            keep()
            if found["status"] == "measured":
                print_fitting(console, row, HEADERS, cells(found))
            for line in answers(found):
                tell(console, line)
        failed = any(found["status"] != "measured" for found in results["rows"])
        try:
            results["first"] = _first(options, data, contenders, log)
            keep()
            results["resume"] = _resume(options, Path(folder) / "paper", log)
        except UserError as error:
            results["resume"] = {"reason": str(error)}
            tell(console, str(error))
            failed = True
        keep()
    for line in _first_lines(results):
        tell(console, line)
    return 2 if failed else 0


def _row(row: str, options: BenchData, data: Path, contenders: Sequence[Contender], log: IO[str]) -> dict[str, Any]:
    from lockstep.core.bench.data import ROWS, result
    from lockstep.core.bench.turns import answers_in_turns

    sides: list[Side] = []
    try:
        for one in contenders:
            sides.append(start_loader(one.name, one.program, data, ROWS[row], [], log))
        said = answers_in_turns(sides, LOADER_WARMUP, options.rounds, options.seconds, LOADER_LIMIT)
        parts = next(side for side in sides if side.name == "lockstep").ask("parts", LOADER_LIMIT)["parts"]
        return result(row, {name: answers[LOADER_WARMUP:] for name, answers in said.items()}, parts)
    except UserError as error:
        return {"row": row, "status": "failed", "reason": str(error)}
    finally:
        for side in sides:
            side.close()


def _first(options: BenchData, data: Path, contenders: Sequence[Contender], log: IO[str]) -> dict[str, Any]:
    """Return by contender the seconds to the first batch, and how many of them opened the data."""
    from lockstep.core.bench.data import FIRST, ROWS
    from lockstep.core.bench.turns import answers_in_turns

    sides: list[Side] = []
    try:
        for one in contenders:
            seeds = _seeds(options) if one.ours else []
            sides.append(start_loader(one.name, one.program, data, ROWS[FIRST], seeds, log))
        said = answers_in_turns(sides, LOADER_WARMUP, options.rounds, options.seconds, LOADER_LIMIT, "first 0")
    finally:
        for side in sides:
            side.close()
    return {
        name: {key: [answer[key] for answer in answers[LOADER_WARMUP:]] for key in ("seconds", "opened")}
        for name, answers in said.items()
    }


def _resume(options: BenchData, folder: Path, log: IO[str]) -> dict[str, Any]:
    """Return seconds to the first batch of a virtual data set, by the sample at which the run resumes."""
    from lockstep.core.bench.data import CONTENDERS, FIRST, PAPER_SAMPLES, RESUMED_AT, ROWS
    from lockstep.core.bench.made_up import write_on_paper

    folder.mkdir()
    write_on_paper(folder, PAPER_SAMPLES * ROWS[FIRST][1] + 1)
    mapped = next(one for one in CONTENDERS if one.name == "lockstep-mapped")
    seeds = _seeds(options, len(RESUMED_AT))
    side = start_loader(mapped.name, mapped.program, folder, ROWS[FIRST], seeds, log)
    at: dict[str, list[float]] = {str(sample): [] for sample in RESUMED_AT}
    try:
        for number in range(LOADER_WARMUP + options.rounds):
            for sample in RESUMED_AT:
                seconds = side.ask(f"first {sample}", LOADER_LIMIT)["seconds"]
                if number >= LOADER_WARMUP:
                    at[str(sample)].append(seconds)
    finally:
        side.close()
    return {"samples": PAPER_SAMPLES, "at": at}


def _seeds(options: BenchData, each: int = 1) -> list[int]:
    """Return seeds of orders, one for each first batch that a contender makes."""
    return list(range((LOADER_WARMUP + options.rounds) * each))


def _first_lines(results: dict[str, Any]) -> list[str]:
    from statistics import median

    from lockstep.core.bench.data import milliseconds

    first = ", ".join(f"{name} {milliseconds(median(of['seconds']))}" for name, of in results["first"].items())
    at = results["resume"].get("at", {})
    resumed = ", ".join(f"{int(sample):,}: {milliseconds(median(seconds))}" for sample, seconds in at.items())
    return [f"first batch: {first}"] * bool(first) + [f"first batch after a resume at sample {resumed}"] * bool(resumed)


def _about() -> dict[str, Any]:
    import platform

    import numpy as np

    from lockstep.torch_backend.tools.bench import versions

    device = {"kind": "cpu", "name": f"{platform.machine()} CPU", "cores": os.cpu_count()}
    return {"device": device, "versions": {**versions(), "numpy": np.__version__}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

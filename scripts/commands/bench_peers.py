"""`lockstep bench peers`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.bench_sides import START_LIMIT, STEP_LIMIT, about, check_turns, start_trainer
from lockstep.scripts.shared.installation import shipped_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO, Any

    from lockstep.core.bench.peers import Contender
    from lockstep.core.bench.turns import Side

MODELS = tuple(shipped_config(name) for name in ("quickstart", "peers/25m", "peers/100m"))
# A peer keeps libgomp's default for idle threads, as its users do. Lockstep uses the setting of scripts/cli.py.
LIBGOMP_SPINS = "300000"
LIBRARIES = ("transformers", "accelerate", "torchtitan")


@dataclass
class BenchPeers:
    """Train the same model beside Hugging Face's Trainer, torchtitan and a nanoGPT-like loop, in turns.

    All start from the same weights and read the same tokens. Their losses must agree, or the row is not compared. Ends
    0 if every row was measured, 1 if the losses of one differ, 2 if one failed. A peer that is not installed is named
    in every table: pip install 'lockstep[peers]' for Hugging Face's, 'lockstep[torchtitan]' for torchtitan.
    """

    configs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="CONFIG …", help_behavior_hint="(default: quickstart, peers/25m and peers/100m .toml)"),
    ] = MODELS
    """run files (TOML) with model, batch and optimizer; rows set precision and program"""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: all)")] = ()
    """any of fp32-eager, bf16-eager, fp32-compiled, bf16-compiled"""
    without: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: nobody)")] = ()
    """contenders to leave out: any of lockstep-blas, nanogpt, hugging-face, torchtitan"""
    rounds: int = 30
    """timed steps of each contender in a row"""
    warmup: int = 8
    """warm-up steps of each contender; their losses are compared"""
    seconds: float = 240.0
    """time limit of a row after the warm-up; no round begins after it"""
    threads: int = 0
    """CPU threads of each contender; 0 = one per core"""
    json: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench_peers.json")
    """file of the results; the output of the processes goes into a .log beside it"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """measure nothing; write a Markdown page of the results"""


def main(argv: list[str]) -> int:
    """Measure the rows, or write the page."""
    from lockstep.core.bench.files import read_results, write_page
    from lockstep.core.bench.peers import ROWS, SCHEMA, SHOWS, SUITE, check_comparable, drawn, page
    from lockstep.core.config.file import load_config

    options, given = parse(BenchPeers, "bench peers", argv, with_settings=True, shown=_bears_on_it)
    _check(options)
    if options.page:
        results = read_results(options.json, SUITE, SCHEMA)
        write_page(options.page, page(results, options.json.name), drawn(results), SHOWS)
        print(options.page)
        return 0
    contenders, absent = _contenders(options.without)
    # One program for the whole model is fastest. The quickstart compiles block by block to start sooner.
    given = {"device": "cpu", "train.ranks": "1", "compile.scope": "model", **given}
    rows = list(options.rows or ROWS)
    for path in options.configs:
        for row in rows:
            check_comparable(load_config(path, {**given, **ROWS[row]}))
    return measure(options, given, rows, contenders, absent)


def _bears_on_it(key: str) -> bool:
    return key in ("seed", "device") or key.startswith(("model.", "train.", "optim."))


def _check(options: BenchPeers) -> None:
    from lockstep.core.bench.peers import ROWS

    for row in options.rows:
        if row not in ROWS:
            raise UserError(f"command line: rows: {row or repr(row)} is not a row; they are {', '.join(ROWS)}")
    check_turns(options.rounds, options.warmup, options.seconds, options.threads)
    if not options.configs:
        raise UserError("command line: configs: name at least one run file")
    check_file("json", options.json)
    check_file("page", options.page)


def _contenders(without: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders, and why others are left out. Raises UserError for an unknown name or no contender."""
    from lockstep.core.bench.peers import CONTENDERS

    names = [contender.name for contender in CONTENDERS if contender.name != "lockstep"]
    for name in without:
        if name not in names:
            raise UserError(
                f"command line: without: {name or repr(name)} is not a contender; they are {', '.join(names)}"
            )
    found, absent = [], {}
    for contender in CONTENDERS:
        if contender.name in without:
            continue
        if any(find_spec(name) is None for name in contender.needs):
            absent[contender.name] = f"not installed (pip install 'lockstep[{contender.extra}]')"
        else:
            found.append(contender)
    if all(contender.ours for contender in found):
        raise UserError("command line: without: no contender is left; leave fewer out")
    return found, absent


def measure(
    options: BenchPeers,
    given: dict[str, str],
    rows: list[str],
    contenders: Sequence[Contender],
    absent: dict[str, str],
) -> int:
    """Measure model by model and row by row; the file is written after each row."""
    from lockstep.core.bench.peers import HEADERS, ROWS, SCHEMA, SUITE, answers, cells, size, taking_part
    from lockstep.core.config.file import load_config
    from lockstep.core.files.atomic import write_atomically
    from lockstep.core.model.budget import parameter_count
    from lockstep.core.sinks.lines import tell
    from lockstep.core.sinks.tables import print_fitting
    from lockstep.core.sinks.terminal import open_unwrapped

    console = open_unwrapped()
    threads = options.threads or os.cpu_count() or 1
    config = load_config(options.configs[0], {**given, **ROWS[rows[0]]})
    facts = about(config, threads, LIBRARIES)
    models: list[dict[str, Any]] = []
    results = {"schema": SCHEMA, "suite": SUITE, **{key: facts[key] for key in ("device", "versions")}}
    results |= {"absent": absent, "models": models}
    for name, why in absent.items():
        tell(console, f"{name}: {why}")
    with options.json.with_suffix(".log").open("a") as log:
        for path in options.configs:
            config = load_config(path, {**given, **ROWS[rows[0]]})
            settings = about(config, threads)["config"]
            models.append({"config": settings, "parameters": parameter_count(config.model), "rows": []})
            for row in rows:
                part = taking_part(row, config.device, contenders)
                found = _row(row, path, options, given, part, threads, log)
                models[-1]["rows"].append(found)
                write_atomically(options.json, [(json.dumps(results, indent=1) + "\n").encode()])
                title = f"{size(models[-1])}, {row}"
                if found["status"] != "measured":
                    tell(console, f"{title}: {found['status'].replace('_', ' ')}: {found['reason']}")
                if found.get("contenders"):
                    print_fitting(console, title, HEADERS, cells(found))
                for line in answers(found):
                    tell(console, line)
    status = {found["status"] for model in models for found in model["rows"]}
    return 2 if "failed" in status else 1 if "not_the_same_work" in status else 0


def _row(
    row: str,
    path: Path,
    options: BenchPeers,
    given: dict[str, str],
    part: Sequence[Contender],
    threads: int,
    log: IO[str],
) -> dict[str, Any]:
    from lockstep.core.bench.peers import ROWS, result
    from lockstep.core.bench.turns import in_turns
    from lockstep.core.config.file import load_config

    sides: list[Side] = []
    try:
        for one in part:
            config = load_config(path, {**given, **ROWS[row], **one.settings})
            own = {} if one.ours else {"GOMP_SPINCOUNT": LIBGOMP_SPINS}
            sides.append(start_trainer(one.name, one.program, config, threads, log, own))
        taken, losses = in_turns(sides, options.warmup, options.rounds, options.seconds, STEP_LIMIT)
        memory = {side.name: side.ask("end", START_LIMIT)["memory"] for side in sides}
    except UserError as error:
        return {"row": row, "status": "failed", "reason": str(error)}
    finally:
        for side in sides:
            side.close()
    return result(row, load_config(path, {**given, **ROWS[row]}), part, taken, losses, memory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

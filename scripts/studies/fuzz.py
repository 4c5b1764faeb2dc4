"""Fuzz run files and the command line: each case is a valid run or one clear message, never a traceback. Resumable.

    python -m lockstep.scripts.studies.fuzz           run the missing ones of 10,000 cases, write docs/results/fuzz.md
    python -m lockstep.scripts.studies.fuzz --page    only write the page from the finished chunks

Root can read every file, so run it without that capability: `setpriv --bounding-set=-dac_override,-dac_read_search
python -m lockstep.scripts.studies.fuzz`.

Cases come in chunks; each has a seed of its own and is a line of docs/results/fuzz.jsonl, so that an interrupted search
continues where it stopped. Lines of other code (by a digest of the schema and of the cases) are not counted. Ends 1 if
a case had a forbidden outcome.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tyro

from lockstep.core.config.file import settings
from lockstep.core.files.jsonl import JsonLines, read_lines

# pyproject.toml allows this study to import tests: it draws the same cases as the tests.
from lockstep.parity_tests.cli.fuzz import cases
from lockstep.parity_tests.cli.fuzz.judge import OUTCOMES, judge
from lockstep.parity_tests.cli.fuzz.sandbox import Sandbox
from lockstep.scripts.studies.repository import ROOT

RESULTS, PAGE = ROOT / "docs/results/fuzz.jsonl", ROOT / "docs/results/fuzz.md"
CHUNK = 500
MEMORY = 6 << 30
LIBRARIES = ("hypothesis", "tyro", "pydantic", "torch")


@dataclass
class Fuzz:
    """Run the missing cases, then write the page."""

    cases: int = 10_000
    """total number of cases"""
    page: bool = False
    """run nothing"""


def digest() -> str:
    """Return the digest of the settings, and of the code that draws and judges the cases."""
    folder = Path(cases.__file__).parent
    code = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    schema = repr([(key, field.annotation, field.metadata) for key, field in settings().items()])
    # The memory address of a validator changes in each process.
    schema = re.sub(r" at 0x[0-9a-f]+", "", schema)
    return hashlib.sha256(code + schema.encode()).hexdigest()[:16]


def run_chunk(sandbox: Sandbox, seed: int) -> dict[str, Any]:
    """Draw a chunk's cases, run and judge each; return the chunk's line."""
    found: Counter[tuple[str, str]] = Counter()
    wrong: list[dict[str, Any]] = []
    lines: set[str] = set()
    slowest = 0.0

    def take(case: cases.Case) -> None:
        nonlocal slowest
        left = sandbox.run(case)
        outcome, why = judge(case, left)
        found[case.kind, outcome] += 1
        slowest = max(slowest, left.seconds)
        lines.update(left.done.err.splitlines())
        if outcome == "WRONG":
            wrong.append({"why": why[:600], "case": ascii(case)[:1000]})

    started = time.perf_counter()
    cases.draw_cases(seed, CHUNK, take)
    return {
        "seed": seed,
        "digest": digest(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "outcomes": [[kind, outcome, count] for (kind, outcome), count in sorted(found.items())],
        "messages": len(lines),
        "wrong": wrong,
        "slowest": round(slowest, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "unreadable": sandbox.is_bound,
    }


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines made by the present code."""
    now = digest()
    return [line for line in lines if line["digest"] == now]


def page(lines: list[dict[str, Any]]) -> str:
    """Return docs/results/fuzz.md."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for kind, outcome, count in line["outcomes"]:
            counts[kind, outcome] += count
    kinds = [kind for kind in cases.KINDS if any(k == kind for k, _ in counts)]
    total, wrong = sum(counts.values()), sum(line_count for (_, o), line_count in counts.items() if o == "WRONG")
    versions = ", ".join(f"{name} {version.split('+')[0]}" for name, version in lines[-1]["versions"].items())
    minutes = sum(line["seconds"] for line in lines) / 60
    rows = [[kind, *(f"{counts[kind, o]:,}" for o in OUTCOMES)] for kind in kinds]
    rows.append(["**all**", *(f"**{sum(counts[k, o] for k in kinds):,}**" for o in OUTCOMES)])
    messages = sum(line["messages"] for line in lines)
    return "\n".join(
        [
            "# Run files and the command line, fuzzed",
            "",
            "Made by `python -m lockstep.scripts.studies.fuzz` (resumable; a line of [fuzz.jsonl](fuzz.jsonl) is "
            f"{CHUNK} "
            "cases of one "
            f"seed) with {versions}, Python {platform.python_version()}, {minutes:.0f} minutes, "
            f"one process at a time, under a limit of {MEMORY >> 30} GiB of address space, "
            f"slowest case {max(x['slowest'] for x in lines):.0f} s. "
            + (
                "File permissions held."
                if all(line["unreadable"] for line in lines)
                else "Run as root, for whom no file is unreadable."
            ),
            "",
            f"**{total:,} cases, {wrong} wrong.** {messages:,} different lines of refusal, counted by chunk.",
            "",
            "| cases | " + " | ".join(OUTCOMES) + " |",
            "|---|" + "---|" * len(OUTCOMES),
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            TEXT,
        ]
    )


TEXT = """- done: exit code 0, or 130 after the flag that Ctrl-C sets; what it left is whole.
- accepted: nothing was wrong, and it was cut short where the work begins.
- disagreed: exit code 1.
- shown: help, or a table.
- refused: exit code 2; every line on stderr begins with `lockstep: `, names the flag, key or file, has no more than 300
  characters, none of them invisible, and no name of a Python class; no file was made or changed.
- WRONG: anything else, such as a traceback, an error that nobody foresaw, 60 seconds without an end.

Cases are drawn by hypothesis from the schema of the settings (parity_tests/cli/fuzz/cases.py), so that a new setting is
covered as it comes: values within, on and beside their bounds and far out, NaN, numbers of thousands of digits, control
characters; settings that a rule ties together, each right by itself; broken TOML of all kinds, `base` in circles; flags
in every spelling, cut, doubled, without their value, of other commands; every command on paths that are missing, of the
wrong kind, too long, unreadable, circular, on pipes and devices; runs and capsules that are broken; odd environments,
closed and full stdout, other locales.

Cut short: no case trains more than two steps; three quarters of the valid runs stop before the first, and nearly all
checks before the reference starts. `torch.compile` hands the program back, the bench's worker times nothing, no fault
is planted, wandb is not installed, and no run is checked by a worker. Not covered: CUDA, torchrun, the network.

A test shows that the search can fail (parity_tests/cli/test_fuzz.py): without the rules over several settings, with one
refusal raised as another exception, or with a run that is left half made, it finds cases that are WRONG.

## What it found

Earlier rounds found these; each was mended where it arose, and the round that is counted above is of the mended code.
The cases stay in the pool.

| what was done | what came of it before |
|---|---|
| `report RUN --out DEVICE` or a pipe, as root | the device was replaced by a file |
| a flag with the value `None` | it was taken for not given, silently |
| stdout read by nobody (`\\| head`) | exit code 1, which means that a check disagreed |
| `--help` on a terminal of two columns | no end |
| `--help` with stdout closed | an exception out of tyro |
| `--json` or `--page` on a pipe that nobody reads | no end, after all the work |
| a narrow terminal | tyro's boxes were cut, and so was what was read out of them; options are text to tyro now |
| `--overwrite=no` | was `--overwrite`, and a run file `no` |
| a pipe, `/dev/zero` or a file of gigabytes as a run file | no end, or all memory |
| `model.layers` of 2^31 with FP8 | no end: every layer's name was made |
| a model, a batch or validation batches larger than the machine's memory | allocation failed somewhere |
| whole numbers of more than 4,300 digits, brackets 3,000 deep in a run file | an exception out of tomllib |
| `data.seed` of 2^64, a name of 300 characters, a path too long or with a null character | an exception of Python's |
| control characters, line breaks and very long words in what was given | stood in the message as they were |
| `WORLD_SIZE` or `RANK` that are no numbers | an exception of Python's |
| stdout on a full disk, or in an encoding without `×` | an exception |
| a run refused after its directory was made | the folder above it stayed |
| `--tyro-print-completion x`, `--candidate .:X`, `--candidate nowhere:X` | names of Python classes |
| `bench step` with a bad run file | a log file was left, after a wait for the worker |
| `bench parity --threads -1`, `--repeats 0`; `faults --recipe` | an exception of Python's |
| `faults` on a run file that a fault's own settings do not go with | an exception of pydantic's |
"""


def main() -> int:
    """Run what is missing, then write the page; 1 if anything was wrong."""
    options = tyro.cli(Fuzz, description=__doc__)
    done = counted(read_lines(RESULTS))
    missing = sorted(set(range((options.cases + CHUNK - 1) // CHUNK)) - {line["seed"] for line in done})
    if missing and not options.page:
        # A case that takes all memory must fail without exhausting the machine's memory.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        results = JsonLines(RESULTS)
        with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
            sandbox = Sandbox(Path(folder))
            for seed in missing:
                line = run_chunk(sandbox, seed)
                results.append(line)
                print(f"chunk {seed}: {len(line['wrong'])} wrong, {line['seconds']} s", file=sys.stderr, flush=True)
        results.close()
        done = counted(read_lines(RESULTS))
    if done:
        PAGE.write_text(page(sorted(done, key=lambda line: line["seed"])))
    for line in done:
        for one in line["wrong"]:
            print(f"seed {line['seed']}: {one['why']}\n    {one['case']}", file=sys.stderr)
    return int(any(line["wrong"] for line in done))


if __name__ == "__main__":
    sys.exit(main())

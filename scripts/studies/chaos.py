"""Kill small runs by SIGKILL at random moments, and check that they survive: a hundred kills. Resumable.

    python -m lockstep.scripts.studies.chaos --jobs 2    run the missing rounds, then write docs/results/chaos.md
    python -m lockstep.scripts.studies.chaos --page      only write the page from the finished rounds

A round starts or resumes `lockstep`, kills it at a random moment, and checks the files on the disk. Rounds follow each
other on one run until it ends; then it is compared with a run that was never killed. The phase of a kill is read from
the disk, not from the planned moment. Rounds are lines of docs/results/chaos.jsonl, written after their run has ended
and was compared, so that an interrupted search continues where it stopped.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import tyro

from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.scripts.studies.chaos_lives import DataLife, Life, Line, ReportLife, TrainingLife, make_ground
from lockstep.scripts.studies.chaos_process import MODULE
from lockstep.scripts.studies.repository import ROOT

RESULTS, PAGE, WORK = ROOT / "docs/results/chaos.jsonl", ROOT / "docs/results/chaos.md", ROOT / ".cache/chaos"

# The aims of a hundred rounds.
MIX = {
    "opening": 10,
    "training": 20,
    "writing": 20,
    "sealing": 12,
    "manifest": 8,
    "deleting": 6,
    "ranks": 10,
    "preparing": 9,
    "reporting": 5,
}
# Rounds per chain; a kind without an entry has one run of one rank.
TOGETHER = {"ranks": 5, "preparing": 3, "reporting": 5}
OTHERS = 8


@dataclass(frozen=True)
class Chaos:
    """Choose the trials to run."""

    rounds: int = 100
    """number of kills to count"""
    jobs: int = 2
    """runs at a time"""
    seed: int = 0
    """seed of the draws"""
    page: bool = False
    """only write the page"""
    work: Path = WORK
    """folder of the runs; it is emptied"""
    results: Path = RESULTS
    """file of the results, one line per round"""
    out: Path = PAGE
    """page to write"""


@dataclass(frozen=True)
class Chain:
    """A chain of consecutive rounds."""

    name: str
    kind: str
    aims: tuple[str, ...]
    seed: int


def chains(rounds: int, seed: int) -> list[Chain]:
    """Return the plan: `rounds` rounds in the shares of `MIX`, as chains."""
    random = Random(seed)
    drawn: list[str] = []
    while len(drawn) < rounds:
        deck = [aim for aim, count in MIX.items() for _ in range(count)]
        random.shuffle(deck)
        drawn += deck
    by_kind: dict[str, list[str]] = {}
    for aim in drawn[:rounds]:
        by_kind.setdefault(aim if aim in TOGETHER else "training", []).append(aim)
    found = []
    for kind, aims in sorted(by_kind.items()):
        size = TOGETHER.get(kind, OTHERS)
        for number, at in enumerate(range(0, len(aims), size)):
            found.append(Chain(f"{kind}-{number}", kind, tuple(aims[at : at + size]), seed * 10_000 + 100 * number))
    return found


def run_chain(chain: Chain, work: Path, module: str = MODULE) -> list[Line]:
    """Run all rounds of a chain on as many runs as they take; each run is finished and compared."""
    started = time.perf_counter()
    random = Random(f"{chain.name}/{chain.seed}")
    found: list[Line] = []
    aims = list(chain.aims)
    lives = 0
    while aims:
        life = _begin(chain, lives, work, module)
        lives += 1
        problems: list[str] = []
        while aims and not life.over and not problems:
            aim = random.choice(("training", "writing", "sealing")) if aims[0] == "ranks" else aims[0]
            line = life.round(aim, random)
            if line is not None:
                aims.pop(0)
                problems = line["problems"]
                found.append(line | {"chain": chain.name, "life": life.seed})
        if not problems:
            found.append(life.end() | {"chain": chain.name, "life": life.seed})
        shutil.rmtree(life.folder)
    seconds = round(time.perf_counter() - started, 1)
    return [*found, {"what": "chain", "chain": chain.name, "seconds": seconds}]


def _begin(chain: Chain, number: int, work: Path, module: str) -> Life:
    folder, seed = work / f"{chain.name}-{number}", chain.seed + number
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ground = work / "ground"
    if chain.kind == "preparing":
        return DataLife(folder, ground, seed, module)
    if chain.kind == "reporting":
        return ReportLife(folder, ground, seed, module)
    return TrainingLife(folder, ground, seed, module, ranks=2 if chain.kind == "ranks" else 1)


# The page

FOUND = """\
## What it has found

Earlier rounds of it found, and these are mended:

- A start that was killed left its own folder, or the run that it was to replace, hidden beside the run for good
  (`.NAME.PID.new`, `.NAME.PID.old`). The next start clears them away; a run whose place had not been taken is put back.
- A resume that was killed after it had moved later records to `branches/NNN`, and before run.json said so, left that
  branch unlisted, and the next one was written over it: records were lost. The next resume now ends what was cut short.
- Ranks made the group for checkpoints at the first checkpoint, where rank 0 waited for a dead one (an hour, or until
  torchrun ended it after 30 s). They make it when they join.

These are known, and change nothing:

- A checkpoint that had got its name when the kill came, and was not told of yet, has no line in `checkpoints.jsonl`.
- A `lockstep report` that is killed leaves `.report.html.PID.lockstep-tmp` in the run until somebody resumes that.
- A rank that dies while ranks join is waited for, for up to a minute (under torchrun 30 s).
"""

ROWS = {
    "starting": "a run being started: folder made, no step yet",
    "going on": "a run being opened and set back to its checkpoint",
    "training": "training steps, no checkpoint under way",
    "files": "a checkpoint's files being written",
    "manifest": "the manifest being written",
    "rename": "the manifest written, the folder not renamed",
    "renamed": "the folder renamed, the checkpoint not yet told of",
    "deleting": "an older checkpoint being deleted",
    "rank 0": "two ranks, rank 0 killed",
    "rank 1": "two ranks, rank 1 killed",
    "preparing": "data preparation",
    "prepared": "data preparation, the index written",
    "reporting": "a report being written",
    "reported": "a report written",
    "not to be read": "what could not be read afterwards",
}
# A leftover has a name that is not a checkpoint's.
CHECKPOINT = ("files", "manifest", "rename")
SEAL = ("manifest", "rename")


def page(found: Sequence[Line], words: str) -> str:
    """Return docs/results/chaos.md."""
    kills = [line for line in found if line["what"] == "kill"]
    ends = [line for line in found if line["what"] == "end"]
    bad = {(line["chain"], line["life"]) for line in [*kills, *ends] if line["problems"]}
    text = [
        "# SIGKILL at any moment",
        "",
        words,
        "",
        "| killed during | kills | restarted from a checkpoint, anew | steps done again, mean | outcome |",
        "|---|---|---|---|---|",
    ]
    for row, said in ROWS.items():
        if not (of := [line for line in kills if line["phase"] == row]):
            continue
        text.append(f"| {said} | {len(of)} | {_restarts(of)} | {_again(of)} | {_outcome(of, bad)} |")
    restarts = f"{_restarts(kills)} | {_again(kills)}"
    text += [f"| **all** | {len(kills)} | {restarts} | {_outcome(kills, bad)} |", ""]
    runs = Counter(line["kind"] for line in ends)
    text += [
        f"Kills inside a checkpoint's writing: {_count(kills, CHECKPOINT)}, of which at the manifest or the rename: "
        f"{_count(kills, SEAL)}. Compared at their end: runs of one rank {runs['training']}, of two {runs['ranks']}, "
        f"data sets {runs['preparing']}, reports {runs['reporting']}. "
        f"Torn last lines of records.jsonl: {sum(line.get('torn', False) for line in kills)}.",
        "",
    ]
    if ended := sorted(line["seconds_to_end"] for line in kills if "seconds_to_end" in line):
        text += [
            "When one of two ranks was killed, the other one and torchrun had ended by themselves "
            f"{ended[len(ended) // 2]:.1f} s later (median; at most {ended[-1]:.1f} s).",
            "",
        ]
    problems = [
        f"- {x['chain']}, {x.get('operation') or 'at its end'}: {p}" for x in found for p in x.get("problems", ())
    ]
    return "\n".join([*text, *(["## Problems", "", *problems, ""] if problems else []), FOUND])


def _count(kills: Sequence[Line], rows: Sequence[str]) -> int:
    return sum(line["phase"] in rows for line in kills)


def _restarts(kills: Sequence[Line]) -> str:
    trained = [line for line in kills if "committed" in line]
    if not trained:
        return ""
    resumed = sum(line["committed"] is not None for line in trained)
    return f"{resumed}, {len(trained) - resumed}"


def _again(kills: Sequence[Line]) -> str:
    lost = [line["records"] - (line["committed"] or 0) for line in kills if "committed" in line]
    return f"{sum(lost) / len(lost):.1f}" if lost else ""


def _outcome(kills: Sequence[Line], bad: set[tuple[str, int]]) -> str:
    failed = sum((line["chain"], line["life"]) in bad for line in kills)
    return f"{failed} not equal" if failed else "bit-equal"


def words(found: Sequence[Line]) -> str:
    """Return the first paragraph of the page."""
    seconds = sum(line["seconds"] for line in found if line["what"] == "chain")
    return (
        "Made by `python -m lockstep.scripts.studies.chaos` (resumable; its lines are [chaos.jsonl](chaos.jsonl)) with "
        f"torch {version('torch').split('+')[0]} on {platform.machine()} ({platform.system()}, CPU, "
        f"{os.cpu_count()} cores), {seconds:,.0f} s in all, two jobs at a time. The run: a Llama of two blocks, "
        "hidden 64, eager, 160 steps, a checkpoint every 10 and at each lower validation loss, which is measured every "
        "6; `checkpoint.keep` 2.\n\n"
        "A round starts `lockstep` or goes on with `--resume`, and kills the process with SIGKILL: before a file "
        "operation, drawn at random, or up to a drawn time after it. Then every folder that is named as a checkpoint "
        "must verify and hold, bit for bit, the state of the run that was never killed at that step; the last two, and "
        "that of the lowest validation loss, must be there; records must be the first lines of that run's (tokens' "
        "digest, loss, learning rate, gradient norm, clip coefficient, validation loss); no process may be left. The "
        "next start must go on from the last committed checkpoint. At the end weights, optimizer state, records and "
        "the checkpoints that are kept must be those of the run that was never killed, `run.json` must list each "
        "branch, and no record that was ever on the disk may be lost. Data sets and reports are compared byte by byte. "
        "A kill is counted where the disk shows that it fell, and once its run has ended."
    )


def lines(path: Path, plan: Sequence[Chain]) -> list[Line]:
    """Read the finished chains of this plan."""
    names = {chain.name for chain in plan}
    found = [line for line in read_lines(path) if line["chain"] in names]
    done = {line["chain"] for line in found if line["what"] == "chain"}
    return [line for line in found if line["chain"] in done]


def missing(plan: Sequence[Chain], found: Sequence[Line]) -> Iterator[Chain]:
    """Yield the unfinished chains."""
    done = {line["chain"] for line in found}
    yield from (chain for chain in plan if chain.name not in done)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing rounds, then write the page; 1 if any check failed."""
    options = tyro.cli(Chaos, description=__doc__, args=arguments)
    plan = chains(options.rounds, options.seed)
    if not options.page and (todo := list(missing(plan, lines(options.results, plan)))):
        make_ground(options.work / "ground")
        results = JsonLines(options.results)
        with ThreadPoolExecutor(options.jobs) as pool:
            for done in as_completed([pool.submit(partial(run_chain, chain, options.work)) for chain in todo]):
                for line in done.result():
                    results.append(line)
                    print(_told(line), file=sys.stderr, flush=True)
        results.close()
    found = lines(options.results, plan)
    options.out.write_text(page(found, words(found)), encoding="utf-8")
    return int(any(line.get("problems") for line in found))


def _told(line: Line) -> str:
    said: dict[str, Any] = {key: value for key, value in line.items() if key not in ("what", "chain", "life")}
    return f"{line['chain']}: {line['what']} {said}"


if __name__ == "__main__":
    sys.exit(main())

"""Run sweeps of a small model: undisturbed, killed, pruned, on Ray and with a planted fault.

Writes docs/results/sweep.md.

    python -m lockstep.scripts.studies.sweep                 the missing sweeps, then the page
    python -m lockstep.scripts.studies.sweep --page-only     the page alone
    python -m lockstep.scripts.studies.sweep --pictures      pages of the sweeps in `folder`, in a headless Chromium
"""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

from lockstep.core.sweep.page import PAGE as PAGE_NAME
from lockstep.core.sweep.results import RESULTS
from lockstep.scripts.studies.browser import open_browser
from lockstep.scripts.studies.repository import ROOT
from lockstep.scripts.studies.tiny_workspace import write_workspace
from lockstep.scripts.studies.wrong_above import LIMIT

ROWS, PAGE = ROOT / "docs/results/sweep.json", ROOT / "docs/results/sweep.md"
PLANTED = ROOT / "scripts/studies/wrong_above.py"
SPACE = ("--vary", "optim.peak-lr=3e-4:1e-1:log", "--vary", "optim.weight-decay=0,0.1")
COMMON = (
    *("--train.steps", "60", "--optim.warmup-steps", "6", "--eval.every", "10", "--checkpoint.every", "10"),
    *("--log.memory-every", "0", "--log.attention-logits-every", "0", "--log.spike-sigma", "0", "--threads", "1"),
)
MEDIAN = ("--pruner", "median")
# The path of the planted backend's file, without the folders of the machine that made the page.
_SHORT_PATHS = r"document.body.innerHTML = document.body.innerHTML.replace(/[^ >]*\/(parity_tests\/)/g, '$1')"
# By picture: the sweep whose page it shows, the id of the top section, and its height.
PICTURES = {"sweep.png": ("fault", "", 1750), "sweep_widths.png": ("widths", "widths", 560)}
FOUND = (
    "The first run of `killed` found a race, which is mended: where the sweep was killed while a trial's process was "
    "still loading, the next call began a second one, and took its refusal (the run is being written) for a failure."
)


@dataclass(frozen=True)
class Part:
    """A sweep of the study. words: after the run file. kills: the trials to kill, before the sweep itself is killed."""

    name: str
    words: tuple[str, ...]
    kills: int = 0


PARTS = (
    Part("unharmed", (*SPACE, "--trials", "12")),
    Part("killed", (*SPACE, "--trials", "12", "--jobs", "3"), kills=2),
    Part(
        "fault",
        (
            *(*SPACE, "--trials", "4", "--jobs", "2", "--parity.every", "30", "--parity.queue", "4"),
            *("--backend", f"{PLANTED}:WrongAbove"),
        ),
    ),
    Part(
        "widths",
        (
            *("--vary", "optim.peak-lr=2e-3,4e-3,8e-3,1.6e-2,3.2e-2,6.4e-2,1.28e-1,2.56e-1"),
            *("--widths", "32,64", "--jobs", "2"),
        ),
    ),
    Part("median, two jobs", (*SPACE, "--trials", "12", *MEDIAN, "--jobs", "2")),
    Part("median, three jobs, killed", (*SPACE, "--trials", "12", *MEDIAN, "--jobs", "3"), kills=2),
    Part("Ray", (*SPACE, "--trials", "12", "--engine", "ray", "--jobs", "2")),
)


def _folder_of(part: Part) -> str:
    return part.name.replace(", ", "_").replace(" ", "_")


def _make(part: Part, workspace: Path, seed: int = 0) -> dict[str, Any]:
    """Run a sweep to its end; the processes of some trials, and then its own process, are killed before that."""
    out = Path("sweeps") / _folder_of(part)
    words = ["sweep", "tiny.toml", *part.words, *COMMON, "--out", str(out)]
    begin, killed = time.perf_counter(), []
    draw = random.Random(seed)
    # No trial is pruned before step 20, so every trial reaches this step.
    most = 18 if "--pruner" in words else 45
    process = _start(words, workspace)
    for trial in sorted(draw.sample(range(2, 10), part.kills)):
        step = draw.randrange(5, most)
        if _kill_trial(process, workspace / out / "trials" / f"trial_{trial:03d}", step):
            killed.append({"trial": trial, "step": step})
    if part.kills:
        time.sleep(draw.uniform(0, 5))
        if process.poll() is not None:
            raise SystemExit(f"{part.name}: the sweep ended before it could be killed")
        process.kill()
        process.wait()
        killed.append({"sweep": True})
        process = _start(words, workspace)
    code = process.wait()
    results = json.loads((workspace / out / RESULTS).read_text())
    for trial in results["trials"]:
        trial["command"] = ""
    shown = shlex.join([word.replace(str(ROOT) + "/", "") for word in words])
    return {"code": code, "killed": killed, "seconds": time.perf_counter() - begin, "line": shown, **results}


def _start(words: Sequence[str], workspace: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_WAIT_POLICY": "passive"}
    with (workspace / "study.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words], cwd=workspace, env=environment, stdout=log, stderr=log
        )


def _kill_trial(sweep: subprocess.Popen[bytes], run: Path, step: int) -> bool:
    """Kill the process of a trial (SIGKILL) after it has recorded `steps` steps; False if the sweep ended before."""
    records = run / "records.jsonl"
    while sweep.poll() is None:
        if records.exists() and records.read_bytes().count(b"\n") >= step:
            for pid in _processes(run.name):
                os.kill(pid, signal.SIGKILL)
            return True
        time.sleep(0.02)
    return False


def _processes(name: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and any(name.encode() in word for word in words):
            yield int(folder.name)


def take_pictures(folder: Path) -> None:
    """Write pictures of the sweeps' pages into docs/results. Raises SystemExit if a page's console has messages."""
    with open_browser() as browser:
        browser.theme("light")
        for name, (part, section, height) in PICTURES.items():
            if not (folder / "sweeps" / part / PAGE_NAME).is_file():
                print(f"{name} stays: {folder} does not hold the sweep {part}")
                continue
            browser.size(1300, height)
            browser.go((folder / "sweeps" / part / "sweep.html").as_uri())
            browser.run(_SHORT_PATHS)
            if section:
                browser.run(f"document.getElementById('{section}').scrollIntoView()")
            browser.picture(PAGE.parent / name)
            if said := browser.complaints():
                raise SystemExit(f"{part}: {said}")


# The page


def page(found: Mapping[str, Any]) -> str:
    """Return the page over all sweeps that were made."""
    parts = found["parts"]
    lines = [
        "# Sweeps: killed, pruned, placed by Ray, and with a fault in one region",
        f"Made by `python -m lockstep.scripts.studies.sweep` on {found['machine']}; {found['versions']}. Other work "
        "ran beside. Each sweep tries a model of 93,248 parameters (two blocks "
        "of width 64) for 60 steps of 128 tokens on the heads of modules of Python's standard library.",
        "![The page of the sweep with the planted fault](sweep.png)",
        "## The same results, whatever happens on the way",
    ]
    lines += [_comparison(parts), _verdicts(parts), FOUND]
    if "fault" in parts:
        lines += ["## A fault in one region never wins", *_fault(parts["fault"])]
    pruned = [name for name in parts if name.startswith("median")]
    if pruned:
        lines += ["## What was pruned", _pruned(parts[pruned[0]])]
    if "widths" in parts:
        lines += ["## Optimum against width", _widths(parts["widths"])]
        lines.append("![The section of the sweep's page on widths](sweep_widths.png)")
    lines += ["## The commands", "\n".join(["```", *(f"lockstep {one['line']}" for one in parts.values()), "```"])]
    return "\n\n".join(map(_in_lines, lines)) + "\n"


def _in_lines(part: str) -> str:
    """Break a paragraph into lines; tables, lists, pictures and code stay."""
    return part if part[0] in "|*!`#" else "\n".join(textwrap.fill(line, 150) for line in part.split("\n"))


def _comparison(parts: Mapping[str, Any]) -> str:
    lines = ["| sweep | killed on the way | complete | pruned | marked | best trial | its loss |"]
    lines.append("|---|---|--:|--:|--:|---|--:|")
    for name, one in parts.items():
        states = [trial["state"] for trial in one["trials"]]
        killed = ", ".join(
            "the sweep itself" if "sweep" in kill else f"trial {kill['trial']} after step {kill['step']}"
            for kill in one["killed"]
        )
        best = one["arms"][0]["best"]
        value = next((trial["value"] for trial in one["trials"] if trial["trial"] == best), None)
        loss = "–" if value is None else f"{value:.6f}"
        counts = " | ".join(str(states.count(state)) for state in ("complete", "pruned", "marked"))
        lines.append(f"| {name} | {killed or 'none'} | {counts} | {best} | {loss} |")
    return "\n".join(lines)


def _verdicts(parts: Mapping[str, Any]) -> str:
    pairs = [
        ("unharmed", "killed"),
        ("unharmed", "Ray"),
        ("median, two jobs", "median, three jobs, killed"),
    ]
    lines = []
    for first, second in pairs:
        if first not in parts or second not in parts:
            lines.append(f"* {first} and {second}: not measured yet.")
        else:
            same = _bits(parts[first]) == _bits(parts[second])
            said = "every trial has the same state, loss and reports, bit for bit" if same else "they differ"
            lines.append(f"* {first} and {second}: {said}.")
    return "\n".join(lines)


def _bits(one: Mapping[str, Any]) -> list[Any]:
    keys = ("trial", "settings", "state", "value", "step", "why", "reports")
    return [[trial[key] for key in keys] for trial in one["trials"]]


def _fault(one: Mapping[str, Any]) -> list[str]:
    rows = sorted(one["trials"], key=lambda trial: (trial["value"] is None, trial["value"]))
    marked = [trial for trial in rows if trial["state"] == "marked"]
    above = [trial for trial in rows if float(trial["settings"]["optim.peak_lr"]) > LIMIT]
    lines = [
        f"The trainer multiplies one gradient by 1.05 where the learning rate is above {LIMIT:g}, which Adam hides "
        f"from the loss. {len(marked)} trials are marked; {len(above)} lie there, and {len(rows) - len(above)} "
        f"elsewhere. The lowest loss of all is {rows[0]['trial']}'s, {rows[0]['value']:.4f}, which is "
        f"{rows[0]['state']}; the winner is {one['arms'][0]['best']}. The command ends with exit code {one['code']}.",
        "| trial | peak-lr | weight decay | loss | checks | |\n|---|--:|--:|--:|---|---|\n"
        + "\n".join(
            f"| {t['trial']} | {t['settings']['optim.peak_lr']} | {t['settings']['optim.weight_decay']} | "
            f"{'–' if t['value'] is None else format(t['value'], '.4f')} | {t['checks']['agreed']} of "
            f"{t['checks']['due']} agreed, {len(t['checks']['disagreed'])} disagreed | {t['state']} |"
            for t in rows
        ),
    ]
    return lines


def _pruned(one: Mapping[str, Any]) -> str:
    there = [trial for trial in one["trials"] if trial["state"] == "pruned"]
    return "\n".join(
        f"* {trial['trial']} (peak-lr {trial['settings']['optim.peak_lr']}): {trial['why']}" for trial in there
    )


def _widths(one: Mapping[str, Any]) -> str:
    tried = sorted({float(trial["settings"]["optim.peak_lr"]) for trial in one["trials"]})
    at_end = [str(arm["width"]) for arm in one["arms"] if arm["learning_rate"]["best"] in (tried[0], tried[-1])]
    lines = [
        "The matrices' learning rate is peak-lr × first width / width (`optim.base_width`). Tried at each width: "
        f"{', '.join(f'{rate:g}' for rate in tried)}."
        + (
            f" The best of width {', '.join(at_end)} is the last rate tried, so its optimum is not bounded."
            if at_end
            else " The best rate of every width lies between the first and the last, so the grid encloses it."
        )
        + (
            " An interval has no bounds where the losses leave room for a curve without a minimum."
            if any(arm["learning_rate"]["low"] is None for arm in one["arms"])
            else ""
        ),
        "| width | best trial's peak-lr | fitted optimum | 95 % interval | trials in the fit |\n|--:|--:|--:|---|--:|",
    ]
    for arm in one["arms"]:
        rate = arm["learning_rate"]
        low, high = (rate[key] for key in ("low", "high"))
        interval = "no bounds" if low is None or high is None else f"{low:.2g} … {high:.2g}"
        fitted = "–" if rate["rate"] is None else f"{rate['rate']:.3g}"
        lines[-1] += f"\n| {arm['width']} | {rate['best']:g} | {fitted} | {interval} | {rate['used']} of {rate['of']} |"
    return "\n\n".join(lines)


def main(page_only: bool = False, pictures: bool = False, folder: Path = Path("sweep_study")) -> None:
    """Run the missing sweeps in `folder`, then write the page; or take pictures of the existing sweeps."""
    if pictures:
        take_pictures(folder.resolve())
        return
    found = json.loads(ROWS.read_text()) if ROWS.exists() else {"parts": {}}
    if not page_only:
        found["machine"] = f"two cores of {_processor()} ({platform.system()})"
        found["versions"] = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "optuna", "ray"))
        if not folder.exists():
            file = write_workspace(folder.resolve())
            subprocess.run(
                [sys.executable, "-m", "lockstep", "data", "prepare", str(file), "--workers", "1"], check=True
            )
        for part in PARTS:
            if part.name not in found["parts"]:
                made = {**found["parts"], part.name: _make(part, folder.resolve())}
                found["parts"] = {one.name: made[one.name] for one in PARTS if one.name in made}
                ROWS.write_text(json.dumps(found, indent=1) + "\n")
                print(part.name, f"{found['parts'][part.name]['seconds']:.0f} s", flush=True)
    PAGE.write_text(page(found))


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))

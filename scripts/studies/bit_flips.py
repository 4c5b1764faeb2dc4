"""Damage files of a run and of its data at random, resume the run, and count wrong results. Resumable.

    python -m lockstep.scripts.studies.bit_flips              1,000 trials, then the page; ends 1 if any was wrong
    python -m lockstep.scripts.studies.bit_flips --only 17    one trial again, with its output
    python -m lockstep.scripts.studies.bit_flips --page       only write docs/results/bit_flips.md from the trials

A trial copies a small run that stopped at step 8 of 8 with its last checkpoints at steps 5 and 6. It flips one bit,
overwrites one byte or truncates a file at a random place, and resumes the copy as a user does: `lockstep train
--resume`. The trial's number determines the damage. The run is made once and kept with the trials in .cache/bit_flips;
--fresh starts over.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import random
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import tyro

from lockstep.core.backend import Arrays, State
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.core.run.directory import RunDir
from lockstep.core.run.layout import CHECKS, CONFIG, INFO, RECORDS
from lockstep.scripts import cli
from lockstep.scripts.studies.repository import ROOT

FOLDER, PAGE = ROOT / ".cache/bit_flips", ROOT / "docs/results/bit_flips.md"
DATA, RUN, WHOLE, TRIALS = Path("data"), Path("runs/tiny"), Path("uninterrupted"), "trials.jsonl"

SEED = 5
STEPS, KEPT = 8, (5, 6)
# Checks are due at steps 1 and 5, so that parity.jsonl has lines and no resume waits for a reference.
RUN_FILE = f"""
name = "tiny"
[model]
vocab_size = 300
hidden = 16
layers = 1
heads = 2
kv_heads = 1
ffn_hidden = 32
[data]
path = "{DATA}"
source = "text"
val_fraction = 0.2
[train]
steps = {STEPS}
batch_size = 2
micro_batch_size = 1
sequence_length = 16
[optim]
warmup_steps = 2
[compile]
enabled = false
[checkpoint]
every = 1
keep = {STEPS}
[parity]
every = 5
[log]
norms_every = 0
fp32_loss_every = 0
"""

How = Literal["bit", "byte", "cut"]
Lines = Mapping[str, Mapping[int, Mapping[str, Any]]]
TIMING = ("seconds", "tokens_per_second", "mfu", "host")
REFUSED, FELL_BACK, TOLD, NO_EFFECT, WRONG = "refused", "fell back", "told", "no effect", "WRONG"
OUTCOMES = {
    REFUSED: "ended 2 with one line that names the file",
    FELL_BACK: "said that a checkpoint was passed over, went on from the one before, ended with the same bits",
    TOLD: "said which lines or steps are lost, used none of it, ended with the same bits (and with 2 where fewer than "
    "half of the checks are left)",
    NO_EFFECT: "said nothing, and weights, records, checks, run.json and settings are those of the undamaged run: "
    "white space, or records later than the checkpoint cut short, which a resume drops in any case",
    WRONG: "anything else",
}


def kind_of(path: Path) -> str | None:
    """Return the kind of file that the page counts.

    None for a file that is not damaged. path: in the trial's folder.
    """
    if path.is_relative_to(RUN / "checkpoints"):
        if not _of_step(path.relative_to(RUN / "checkpoints").parts[0], KEPT[-1]):
            return None  # the one before is read only if this one is damaged
        if "manifest" in path.name:
            return "checkpoint: manifest"
        return "checkpoint: extra.json" if path.suffix == ".json" else "checkpoint: tensors"
    if path.parent == DATA:
        named = {"index.json": "data: index.json", "tokenizer.json": "data: tokenizer.json"}
        return "data: shard" if path.suffix == ".bin" else named.get(path.name)
    return path.name if path.parent == RUN and path.name in (RECORDS, CHECKS, INFO, CONFIG) else None


def _of_step(folder: str, step: int) -> bool:
    return folder.rpartition("_")[2].lstrip("0") == str(step)


@dataclass(frozen=True)
class Damage:
    """The damage to one file. at: position of the byte. byte: its new value; None truncates the file there."""

    path: Path
    at: int
    byte: int | None

    def __str__(self) -> str:
        done = "the file ends at" if self.byte is None else f"{self.byte:#04x} at"
        return f"{self.path}: {done} byte {self.at}"

    def inflict(self, folder: Path) -> None:
        """Damage the file under `folder`."""
        whole = (folder / self.path).read_bytes()
        rest = b"" if self.byte is None else bytes([self.byte]) + whole[self.at + 1 :]
        (folder / self.path).write_bytes(whole[: self.at] + rest)


@dataclass(frozen=True)
class End:
    """The contents of a run directory. resumed: from this step. info: run.json, without times.

    lines, set_aside: of records.jsonl and parity.jsonl, and of all branches, by file and step.
    """

    state: State
    resumed: int
    lines: Lines
    set_aside: Lines
    info: Mapping[str, Any]
    settings: RunConfig


@dataclass(frozen=True)
class Told:
    """The end of a resume: its exit code and its output."""

    code: int
    out: str
    err: str


class Trials:
    """The undamaged run, a copy to damage, and the end of an uninterrupted run."""

    def __init__(self, folder: Path) -> None:
        """Open the base run. Raises UserError if it cannot be made, or another version of Lockstep made it."""
        self.folder, self.base, self.work = folder, folder / "base", folder / "work"
        if not self.base.exists():
            make_run(folder)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.base, self.work)
        files = sorted(path.relative_to(self.base) for path in self.base.rglob("*") if path.is_file())
        self.files: dict[str, list[Path]] = {}
        for path in files:
            if kind := kind_of(path):
                self.files.setdefault(kind, []).append(path)
        told = self.resume()
        if told.code:
            raise UserError(f"the undamaged run does not resume: {told.err.strip()}; begin anew with --fresh")
        self.whole, self.expected = end_of(self.base / WHOLE), end_of(self.work / RUN)
        parity = self.whole.settings.parity.model_copy(update={"every": 0})
        self.settings = self.whole.settings.model_copy(update={"parity": parity})
        if wrong := self.difference(self.expected, told=False, cut=False):
            raise UserError(f"the undamaged run does not resume as it should: {wrong}")

    def draw(self, number: int) -> Damage:
        """Draw the damage of a trial."""
        chance = random.Random(f"{SEED}/{number}")
        kinds = sorted(self.files)
        path = chance.choice(self.files[kinds[number % len(kinds)]])
        how: How = chance.choice(("bit", "byte", "cut"))
        whole = (self.base / path).read_bytes()
        at = chance.randrange(len(whole))
        if how == "cut":
            return Damage(path, at, None)
        if how == "bit":
            return Damage(path, at, whole[at] ^ (1 << chance.randrange(8)))
        return Damage(path, at, chance.choice([byte for byte in range(256) if byte != whole[at]]))

    def trial(self, damage: Damage) -> tuple[str, str, Told]:
        """Return (outcome, reason or message, output)."""
        shutil.rmtree(self.work / RUN)
        shutil.copytree(self.base / RUN, self.work / RUN)
        damage.inflict(self.work)
        told = self.resume()
        try:
            return (*self.judge(damage, told), told)
        finally:
            shutil.copyfile(self.base / damage.path, self.work / damage.path)

    def resume(self) -> Told:
        """Run `lockstep train --resume` in this process; the first step is unchecked, as a reference takes long."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.work), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.run(["train", "--resume", str(RUN), "--parity.every", "0"])
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                code = -1
                err.write(f"{type(error).__name__}: {error}")
        return Told(code, out.getvalue(), err.getvalue())

    def judge(self, damage: Damage, told: Told) -> tuple[str, str]:
        """Return (outcome, reason or message)."""
        name, said = damage.path.name, [line for line in told.out.splitlines() if damage.path.name in line]
        # The run reached its end, and its record has fewer than half of its checks.
        unchecked = told.code == 2 and len(told.err.splitlines()) == 1 and f"{CHECKS} has no line" in told.err
        if told.code == 2 and not unchecked:
            one = len(told.err.splitlines()) == 1 and name in told.err and "traceback in" not in told.err
            return (REFUSED if one else WRONG), told.err.strip()
        if (told.code != 0 or told.err) and not unchecked:
            return WRONG, f"ended {told.code}: {told.err.strip()}"
        try:
            end = end_of(self.work / RUN)
        except UserError as error:
            return WRONG, f"ended 0 and cannot be read: {error}"
        if wrong := self.difference(end, told=bool(said), cut=damage.byte is None):
            return WRONG, wrong
        if not said:
            return NO_EFFECT, ""
        return (FELL_BACK if "passed over" in said[0] else TOLD), said[0]

    def difference(self, end: End, told: bool, cut: bool) -> str:
        """Describe an unexpected difference, if there is one; lines may be lost if the user was warned."""
        if not same_state(end.state, self.whole.state):
            return "the weights, moments or step differ"
        if end.settings != self.settings:
            return "the settings differ"
        if end.info != self.expected.info:
            return "run.json differs"
        for name, written in self.whole.lines.items():
            for step, line in end.lines[name].items():
                # The steps that the resume repeated took another time than before.
                timing = TIMING if step > end.resumed else ()
                if without(line, timing) != without(written.get(step, {}), timing):
                    return f"{name} holds what was never written, at step {step}"
            later = {step for step in written if step > end.resumed}
            if any(line != written.get(step) for step, line in end.set_aside[name].items()):
                return f"a branch's {name} holds what was never written"
            if end.lines[name].keys() != written.keys() and not told:
                return f"{name} lacks lines without a warning"
            # A crash also leaves a file that ends early. Lines after the checkpoint are dropped from the run in any
            # case.
            if end.set_aside[name].keys() != later and not (told or cut):
                return f"a branch's {name} lacks lines without a warning"
        return ""


def make_run(folder: Path) -> None:
    """Make text, data and the run under `folder`/base, completely or not at all.

    Raises UserError if a command fails.
    """
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    (made / "text").mkdir(parents=True)
    for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:12]:
        (made / "text" / f"{module.stem}.txt").write_bytes(module.read_bytes()[:1500])
    (made / "tiny.toml").write_text(RUN_FILE)
    printed = io.StringIO()
    with contextlib.chdir(made), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for words in (["data", "prepare", "tiny.toml", "--workers", "1"], ["train", "tiny.toml"]):
            if cli.run(words):
                raise UserError(f"lockstep {' '.join(words)}: {printed.getvalue().splitlines()[-1]}")
    shutil.copytree(made / RUN, made / WHOLE)
    with RunDir.open(made / RUN, write=True) as run:
        run.update_info(finished=False)
        for path in run.checkpoints():
            if not any(_of_step(path.name, step) for step in KEPT):
                shutil.rmtree(path)
    made.rename(folder / "base")


def end_of(path: Path) -> End:
    """Read a run directory. Raises UserError if anything in it is damaged."""
    run = RunDir.open(path)
    state, _, _ = run.load_latest(_refuse)
    names = (RECORDS, CHECKS)
    return End(
        state,
        run.info["resumes"][-1]["step"] if run.info["resumes"] else 0,
        {name: by_step([path / name]) for name in names},
        {name: by_step(sorted(path.glob(f"branches/*/{name}"))) for name in names},
        without(run.info, ("resumes", "branches", "damaged")),
        run.config,
    )


def by_step(files: Iterable[Path]) -> dict[int, dict[str, Any]]:
    """Return the lines of files by their step."""
    return {line["step"]: line for file in files for line in read_lines(file)}


def without(tree: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the mapping less these keys."""
    return {key: value for key, value in tree.items() if key not in keys}


def _refuse(text: str) -> None:
    raise UserError(text)


def same_state(one: State, other: State) -> bool:
    """Return whether two states hold the same bits."""

    def same(left: Arrays, right: Arrays) -> bool:
        return left.keys() == right.keys() and all(
            left[name].dtype == a.dtype and left[name].tobytes() == a.tobytes() for name, a in right.items()
        )

    return (
        (one.step, dict(one.scalars)) == (other.step, dict(other.scalars))
        and one.optimizer.keys() == other.optimizer.keys()
        and same(one.params, other.params)
        and all(same(one.optimizer[kind], arrays) for kind, arrays in other.optimizer.items())
    )


@dataclass
class BitFlips:
    """Damage files of a run at random, resume it, and count the outcomes."""

    trials: int = 1000
    """number of trials, drawn from the fixed seed"""
    only: int | None = None
    """run this one trial and show its output"""
    fresh: bool = False
    """discard earlier trials, and make the run again"""
    page: bool = False
    """only write the page"""
    minutes: float = 0.0
    """time limit; 0 = none. A later call continues"""
    folder: Path = FOLDER
    """folder of the run and the trials"""


def run_trials(trials: Trials, numbers: Iterable[int], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the line of each trial."""
    for number in numbers:
        damage, started = trials.draw(number), time.perf_counter()
        outcome, said, _ = trials.trial(damage)
        if outcome == WRONG:
            tell(f"trial {number}: {WRONG}: {damage}: {said}")
        yield {
            "trial": number,
            "kind": kind_of(damage.path),
            "damage": str(damage),
            "outcome": outcome,
            "said": said,
            "seconds": round(time.perf_counter() - started, 3),
        }


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return docs/results/bit_flips.md."""
    counts = Counter((line["kind"], line["outcome"]) for line in lines)
    kinds = sorted({line["kind"] for line in lines})
    row = "| {} |" + " {} |" * (1 + len(OUTCOMES))
    text = [
        "# Damaged files: is a resumed run ever wrong?",
        "",
        f"Made by `python -m lockstep.scripts.studies.bit_flips --trials {len(lines)}` (seed {SEED}, one process, "
        f"{sum(line['seconds'] for line in lines) / 60:.1f} minutes) with torch {torch.__version__.split('+')[0]}, "
        f"Python {platform.python_version()} on {platform.machine()} ({platform.system()}), CPU.",
        "",
        f"A small run stands after step {STEPS} of {STEPS}, its last checkpoints are of steps {KEPT[0]} and {KEPT[1]}. "
        "Each trial damages one file, of checkpoints the last one's: it flips one bit, overwrites one byte, or cuts "
        "the file at a random place. Then it resumes the run with `lockstep train --resume`, and compares what is left "
        "with a run that was not interrupted.",
        "",
        *(f"- **{outcome}**: {meaning}" for outcome, meaning in OUTCOMES.items()),
        "",
        row.format("damaged", "trials", *OUTCOMES),
        "|---|" + "---|" * (1 + len(OUTCOMES)),
    ]
    for kind in kinds:
        found = [counts[kind, outcome] for outcome in OUTCOMES]
        text.append(row.format(f"`{kind}`", sum(found), *found))
    found = [sum(counts[kind, outcome] for kind in kinds) for outcome in OUTCOMES]
    text += [row.format("**all**", *(f"**{n}**" for n in (sum(found), *found))), "", "## Messages", ""]
    for kind, outcome in sorted(counts):
        first = next(line for line in lines if (line["kind"], line["outcome"]) == (kind, outcome))
        if first["said"]:
            text += [f"- `{first['damage']}`: {outcome}", "", "  ```text", f"  {first['said']}", "  ```"]
    return "\n".join([*text, ""])


def main() -> int:
    """Run the missing trials, then write the page."""
    options = tyro.cli(BitFlips, description=__doc__)
    if options.fresh:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    results = options.folder / TRIALS
    try:
        if options.only is not None:
            trials = Trials(options.folder)
            damage = trials.draw(options.only)
            outcome, said, told = trials.trial(damage)
            print(f"{damage}: {outcome}: {said}\n{told.out}{told.err}")
            return int(outcome == WRONG)
        done = {line["trial"] for line in read_lines(results)}
        missing = [number for number in range(options.trials) if number not in done]
        if missing and not options.page:
            lines, end = JsonLines(results), time.perf_counter() + 60 * (options.minutes or float("inf"))
            for line in run_trials(Trials(options.folder), missing, tell):
                lines.append(line)
                if line["trial"] % 100 == 99:
                    tell(f"{line['trial'] + 1} trials")
                if time.perf_counter() > end:
                    break
            lines.close()
        tried = [line for line in read_lines(results) if line["trial"] < options.trials]
    except UserError as error:
        tell(f"bit_flips: {error}")
        return 2
    if not tried:
        tell("bit_flips: nothing was tried yet")
        return 2
    if options.folder == FOLDER:
        PAGE.write_text(page(tried))
    else:
        print(page(tried))
    return int(any(line["outcome"] == WRONG for line in tried))


if __name__ == "__main__":
    sys.exit(main())

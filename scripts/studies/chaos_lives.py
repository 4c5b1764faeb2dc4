"""Kill runs, preparations and reports for scripts/studies/chaos.py, and check the state that they leave."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import (
    MANIFEST,
    checkpoint_step,
    folder_name,
    list_checkpoints,
    load_checkpoint,
    verify_checkpoint,
)
from lockstep.core.data.dataset import TokenDataset
from lockstep.core.data.index import INDEX_NAME
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines
from lockstep.core.files.lock import LOCK_NAME
from lockstep.core.run.checkpoints import BEST
from lockstep.core.run.layout import CHECKPOINTS, INFO, RECORDS, SAVED
from lockstep.scripts.studies.chaos_process import LINGERS, PLAIN, Ended, command, run_to_end, start
from lockstep.scripts.studies.killed_at import Moment

Line = dict[str, Any]

STRAIGHT, KEEP = "straight", 2
RUN_FILE = f"""
device = "cpu"
[model]
vocab_size = 300
hidden = 64
layers = 2
heads = 4
kv_heads = 2
ffn_hidden = 128
[train]
steps = 160
batch_size = 4
micro_batch_size = 2
sequence_length = 32
[optim]
warmup_steps = 10
[compile]
enabled = false
[checkpoint]
every = 10
keep = {KEEP}
[eval]
every = 6
batches = 1
[log]
norms_every = 5
fp32_loss_every = 0
"""
# The fields of a record that depend on the clock or the host.
TIMES = ("seconds", "tokens_per_second", "mfu", "host")


@dataclass(frozen=True)
class Aim:
    """Operations at which a round aims, as `Moment` counts them.

    times, further, delay: upper limits of the draws; delay in seconds. outside: share of kills that come from another
    process after the delay; the others come directly before the operation. slowly: as in `Moment`, for kills from
    outside.
    """

    start: str
    times: int = 1
    further: int = 0
    delay: float = 5e-3
    outside: float = 0.5
    slowly: bool = True


AIMS = {
    "opening": Aim("^(write|mkdir|rename)", further=45),
    "training": Aim(r"^rename .*(\.new \S+|/run\.json)$", delay=1.5, outside=1.0, slowly=False),
    "writing": Aim(r"^mkdir \S*/\.?step_\d+\S*$", times=4, further=9),
    "sealing": Aim(r"^write \S*/manifest\.json$", times=4, further=8),
    "manifest": Aim(r"^write \S*/manifest\.json$", times=4, delay=2e-3, outside=1.0),
    "deleting": Aim(r"^rename \S*/step_\d+ \S*\.old$", times=3, further=5),
    "preparing": Aim("^(write|mkdir|rename)", further=40, delay=0.1, slowly=False),
    "reporting": Aim("^write .*report", further=1),
}


def make_ground(ground: Path) -> None:
    """Make text (the heads of some standard-library modules), its data set, a run file, and a run of seed 0."""
    shutil.rmtree(ground, ignore_errors=True)
    (ground / "text").mkdir(parents=True)
    for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:30]:
        head = module.read_bytes()[:4000].decode(errors="ignore")
        (ground / "text" / f"{module.stem}.txt").write_text(head, encoding="utf-8")
    (ground / "run.toml").write_text(RUN_FILE, encoding="utf-8")
    run_to_end(prepare_words(PLAIN, ground, ground / "data", 1), ground)
    train_straight(ground, ground / STRAIGHT, 0)


def train_words(module: str, ground: Path, run: Path, seed: int, ranks: int = 1) -> list[str]:
    """Return the command of a process that trains a new run."""
    words = ["train", str(ground / "run.toml"), "--data.path", str(ground / "data"), "--out", str(run.parent)]
    words += ["--name", run.name, "--seed", str(seed), "--train.ranks", str(ranks)]
    return command(module, words, ranks)


def train_straight(ground: Path, run: Path, seed: int, ranks: int = 1) -> None:
    """Train an undisturbed run.

    It keeps all its checkpoints, so that every checkpoint of another run can be compared.
    """
    run_to_end([*train_words(PLAIN, ground, run, seed, ranks), "--checkpoint.keep", "1000"], run.parent)


def prepare_words(module: str, ground: Path, data: Path, workers: int) -> list[str]:
    """Return the command of a process that prepares a data set."""
    words = [
        "data",
        "prepare",
        "--data.source",
        str(ground / "text"),
        "--data.path",
        str(data),
        "--workers",
        str(workers),
    ]
    return command(module, [*words, "--model.vocab-size", "300", "--data.val-fraction", "0.2"])


class Life(ABC):
    """A product of `lockstep` that is killed repeatedly and compared with one that was never killed.

    folder: its own folder. place: the folder in it whose file operations are counted. over: whether it ended by itself.
    """

    kind: str
    place: Path
    victim = 0
    over = False
    _failed: str | None = None

    def __init__(self, folder: Path, seed: int, module: str) -> None:
        self.folder, self.seed, self.module = folder, seed, module

    def round(self, aim: str, random: Random) -> Line | None:
        """Start it, kill it and check the disk; None if it ended before it was killed."""
        about = AIMS[aim]
        outside = self.victim != 0 or random.random() < about.outside
        moment = Moment(
            folder=str(self.place),
            told=str(self.folder / "told"),
            start=about.start,
            times=random.randint(1, about.times),
            further=random.randint(0, about.further),
            at_once=not outside,
            slowly=outside and about.slowly,
        )
        delay = random.uniform(0, about.delay) if outside else 0.0
        ended = self._go(moment, delay)
        if ended.operation is None:
            return None
        self.found = {"phase": "not to be read"}
        try:
            problems = list(self.look(ended))
        except (UserError, OSError, ValueError, KeyError) as error:
            problems = [f"it cannot be read: {error}"]
        if ended.left:
            problems.append(f"{len(ended.left)} processes were still there {LINGERS:.0f} s later")
        return {
            "what": "kill",
            "aim": aim,
            "operation": _without_numbers(ended.operation),
            "delay_ms": round(1e3 * delay, 2) if outside else None,
            **self.found,
            "problems": problems,
        }

    def end(self) -> Line:
        """Run it to its end, and compare."""
        if not self.over:
            self._go(None, 0.0)
        problems = [self._failed] if self._failed else list(self.compare())
        return {"what": "end", "kind": self.kind, "problems": problems}

    def _go(self, moment: Moment | None, delay: float) -> Ended:
        ended = start(self.words(), self.folder, moment, delay, self.victim)
        if ended.operation is None:
            self.over = True
            said = ended.said[-500:].strip().replace(str(self.folder), "")
            self._failed = f"exit code {ended.code}: {said}" if ended.code else None
        return ended

    # The findings of `look`, as in the lines of the results; `phase` is the phase of the kill.
    found: Line

    @abstractmethod
    def words(self) -> list[str]:
        """Return the command of the process that makes or continues it."""

    @abstractmethod
    def look(self, ended: Ended) -> Iterator[str]:
        """Set `found` after a kill, and yield each failed check."""

    @abstractmethod
    def compare(self) -> Iterator[str]:
        """Yield, at its end, the differences from the undisturbed life."""


class TrainingLife(Life):
    """A run.

    seed: of its weights. ranks: two are launched by torchrun and killed in turn.
    """

    def __init__(self, folder: Path, ground: Path, seed: int, module: str, ranks: int = 1) -> None:
        super().__init__(folder, seed, module)
        self.kind = "training" if ranks == 1 else "ranks"
        self.place = folder / "runs"
        self._ground, self._ranks = ground, ranks
        self._run, self._straight = self.place / "killed", folder / STRAIGHT
        self._seen: set[bytes] = set()
        self._before = Disk.of(self._run)
        if seed == 0 and ranks == 1:
            self._straight = ground / STRAIGHT
        else:
            train_straight(ground, self._straight, seed, ranks)
        self._expected = [_trained(line) for line in read_lines(self._straight / RECORDS)]
        self._steps = [checkpoint_step(path) or 0 for path in list_checkpoints(self._straight / CHECKPOINTS)]

    def words(self) -> list[str]:
        """Resume from the last checkpoint; without one, begin anew."""
        self._before = Disk.of(self._run)
        if self._before.committed:
            return command(self.module, ["train", "--resume", str(self._run)], self._ranks)
        return [*train_words(self.module, self._ground, self._run, self.seed, self._ranks), "--overwrite"]

    def look(self, ended: Ended) -> Iterator[str]:
        """Compare checkpoints, records and the list of resumes."""
        before, now = self._before, Disk.of(self._run)
        self.found = {
            "phase": f"rank {self.victim}" if self._ranks > 1 else now.phase(before),
            "records": len(now.lines),
            "torn": now.torn,
            "committed": now.committed[-1] if now.committed else None,
        }
        if self._ranks > 1:
            self.found["seconds_to_end"] = round(ended.seconds_to_end, 1)
            self.victim = 1 - self.victim
        if now.inode != before.inode:
            self._seen.clear()
        self._seen.update(now.lines)
        yield from self._wrong(now)
        if before.committed and now.resumes[: len(before.resumes)] != before.resumes:
            yield "run.json has lost a resume"
        for step in now.resumes[len(before.resumes) :] if before.committed else ():
            if step != before.committed[-1]:
                yield f"it went on from step {step}; the last committed checkpoint was of step {before.committed[-1]}"

    def compare(self) -> Iterator[str]:
        """Compare records, checkpoints, leftovers and branches, and check that no record was lost."""
        now = Disk.of(self._run)
        yield from self._wrong(now)
        if len(now.lines) != len(self._expected) or not now.info.get("finished"):
            yield f"it ended with {len(now.lines)} records, finished: {now.info.get('finished')}"
        if list(now.committed) != (kept := self._kept(self._steps[-1])):
            yield f"checkpoints of steps {list(now.committed)} are there, not of {kept}"
        if left := _left_over(self.place):
            yield f"left over: {', '.join(left)}"
        there = {line for path in self._run.glob(f"branches/*/{RECORDS}") for line in path.read_bytes().splitlines()}
        if lost := self._seen - there - set(now.lines):
            yield f"{len(lost)} records that were on the disk are in no branch"
        told = {branch["path"]: branch["records"] for branch in now.info["branches"]}
        branches = {
            str(path.relative_to(self._run)): len(read_lines(path / RECORDS)) for path in self._run.glob("branches/*")
        }
        if told != branches:
            yield f"run.json lists the branches {told}; there are {branches}"

    def _wrong(self, now: Disk) -> Iterator[str]:
        """List the differences from the undisturbed run, up to the present step."""
        for ours, theirs in zip(now.records, self._expected, strict=False):
            if ours != theirs:
                differ = [key for key in theirs if ours.get(key) != theirs[key]]
                yield f"the record of step {theirs['step']} differs in {', '.join(differ)}"
                break
        if len(now.records) > len(self._expected):
            yield "there are too many records"
        for step in now.committed:
            yield from self._differences(step)
        if now.committed and (gone := set(self._kept(now.committed[-1])) - set(now.committed)):
            yield f"the checkpoints of steps {sorted(gone)} are gone"
        if now.committed and now.committed[-1] > len(now.records):
            yield f"there are {len(now.records)} records, and a checkpoint of step {now.committed[-1]}"

    def _differences(self, step: int) -> Iterator[str]:
        folders = [run / CHECKPOINTS / folder_name(step) for run in (self._run, self._straight)]
        try:
            (ours, extra), (theirs, expected) = (load_checkpoint(folder) for folder in folders)
        except UserError as error:
            yield f"the checkpoint of step {step}: {str(error).replace(str(self.folder), '')}"
            return
        if differ := sorted(_unequal(ours, theirs)):
            yield f"the checkpoint of step {step} differs in {', '.join(differ[:3])} and others, {len(differ)} in all"
        for key in ("tokens_seen", "data_fingerprint"):
            if extra[key] != expected[key]:
                yield f"the checkpoint of step {step} differs in {key}"

    def _kept(self, newest: int) -> list[int]:
        """Return the steps whose checkpoints must exist if `newest` is the last one."""
        made = [step for step in self._steps if step <= newest]
        scores = [(r["metrics"][BEST], r["step"]) for r in self._expected[:newest] if BEST in r["metrics"]]
        return sorted({*made[-KEEP:], *[step for _, step in sorted(scores)[:1]]})


@dataclass(frozen=True)
class Disk:
    """The state of a run on the disk.

    inode: of its folder; 0 if there is none. lines: complete lines of records.jsonl; records: their contents. torn:
    whether one more has begun. committed: steps of folders named as checkpoints. told: steps in checkpoints.jsonl.
    hidden: names of folders being written or deleted beside the checkpoints; sealed: those with a manifest, and whether
    it is complete.
    """

    inode: int
    lines: tuple[bytes, ...]
    records: tuple[Line, ...]
    torn: bool
    committed: tuple[int, ...]
    told: tuple[int, ...]
    hidden: frozenset[str]
    sealed: Mapping[str, bool]
    info: Mapping[str, Any]

    @property
    def resumes(self) -> list[int]:
        """Steps from which it was resumed."""
        return [resume["step"] for resume in self.info.get("resumes", [])]

    @classmethod
    def of(cls, run: Path) -> Disk:
        """Read the present contents of a run's folder."""
        if not run.is_dir():
            return cls(0, (), (), False, (), (), frozenset(), {}, {})
        records = run / RECORDS
        lines = records.read_bytes().split(b"\n") if records.exists() else [b""]
        folder = run / CHECKPOINTS
        hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
        return cls(
            run.stat().st_ino,
            tuple(lines[:-1]),
            tuple(map(_trained, read_lines(records))),
            bool(lines[-1]),
            tuple(checkpoint_step(path) or 0 for path in list_checkpoints(folder)),
            tuple(line["step"] for line in read_lines(run / SAVED)),
            frozenset(path.name for path in hidden),
            {path.name: _verifies(path) for path in hidden if (path / MANIFEST).exists()},
            json.loads((run / INFO).read_text(encoding="utf-8")),
        )

    def phase(self, before: Disk) -> str:
        """Name the phase of a kill that leaves this state, as a row of the page."""
        for name in self.hidden - before.hidden:
            if name.endswith(".old"):
                return "deleting"
            return "files" if name not in self.sealed else "rename" if self.sealed[name] else "manifest"
        if before.committed and len(self.resumes) == len(before.resumes):
            return "going on"
        if not self.lines and not self.committed:
            return "starting"
        fresh = self.committed and self.committed[-1] not in (*self.told, *before.committed)
        return "renamed" if fresh else "training"


class DataLife(Life):
    """A data set, by one process or by two workers."""

    kind = "preparing"

    def __init__(self, folder: Path, ground: Path, seed: int, module: str) -> None:
        super().__init__(folder, seed, module)
        self.place, self._ground = folder / "data", ground

    def words(self) -> list[str]:
        """Prepare, or continue a preparation."""
        return prepare_words(self.module, self._ground, self.place, 1 + self.seed % 2)

    def look(self, ended: Ended) -> Iterator[str]:
        """Check that a folder with an index is finished, and that any other is refused."""
        files = _files(self.place)
        self.found = {"phase": "prepared" if INDEX_NAME in files else "preparing", "files": len(files)}
        if INDEX_NAME in files:
            yield from self.compare()
            return
        try:
            TokenDataset.open(self.place)
        except UserError:
            return
        yield "an unfinished data set was opened"

    def compare(self) -> Iterator[str]:
        """Compare every byte."""
        ours, theirs = _files(self.place), _files(self._ground / "data")
        if differ := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
            yield f"{', '.join(differ)} differ"


BEGUN = ".report.html.*"


class ReportLife(Life):
    """A report of a finished run that replaces an older one."""

    kind = "reporting"

    def __init__(self, folder: Path, ground: Path, seed: int, module: str) -> None:
        super().__init__(folder, seed, module)
        self.place = folder / "run"
        shutil.copytree(ground / STRAIGHT, self.place, ignore=shutil.ignore_patterns(CHECKPOINTS))
        run_to_end(command(PLAIN, ["report", str(self.place)]), folder)
        self._file = self.place / "report.html"
        self._expected, self._old = self._file.read_bytes(), b"an older report"

    def words(self) -> list[str]:
        """Write it."""
        self._file.write_bytes(self._old)
        for begun in self.place.glob(BEGUN):
            begun.unlink()
        return command(self.module, ["report", str(self.place)])

    def look(self, ended: Ended) -> Iterator[str]:
        """Check that the report is the old one or the new one."""
        begun = [path.stat().st_size for path in self.place.glob(BEGUN)]
        self.found = {"phase": "reporting" if begun else "reported", "bytes": max(begun, default=None)}
        if self._file.read_bytes() not in (self._old, self._expected):
            yield "report.html is neither the old one nor the new one"

    def compare(self) -> Iterator[str]:
        """Compare every byte."""
        if self._file.read_bytes() != self._expected:
            yield "report.html differs"


def _trained(record: Line) -> Line:
    return {key: value for key, value in record.items() if key not in TIMES}


def _unequal(ours: State, theirs: State) -> Iterator[str]:
    """Yield names of tensors and scalars that differ in a bit, or exist in only one of the two."""
    kinds = [{"params": state.params, **state.optimizer, "scalars": state.scalars} for state in (ours, theirs)]
    for kind in sorted(kinds[0].keys() | kinds[1].keys()):
        one, other = (state.get(kind, {}) for state in kinds)
        for name in one.keys() | other.keys():
            if name not in one or name not in other or not _same(one[name], other[name]):
                yield f"{kind}/{name}"


def _same(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _verifies(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except UserError:
        return False
    return True


def _files(folder: Path) -> dict[str, bytes]:
    """Return all files except the lock, by their path in the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _left_over(folder: Path) -> list[str]:
    """List hidden files except the lock, without the process's number."""
    hidden = (path for path in folder.rglob(".*") if path.name != LOCK_NAME)
    return sorted(_without_numbers(str(path.relative_to(folder))) for path in hidden)


def _without_numbers(text: str) -> str:
    """Replace process numbers, which stand between dots, by PID."""
    return re.sub(r"\.\d+\.", ".PID.", text)

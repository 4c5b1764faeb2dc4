"""The run directory: resolved configuration, run.json, records, checks and checkpoints.

Everything in it can be read without Lockstep (TOML, JSON, safetensors). One process writes; any number may read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lockstep.core.backend import State, StepRecord
from lockstep.core.checkpoint.format import (
    CorruptCheckpoint,
    Pending,
    Read,
    WritingState,
    begin_checkpoint,
    folder_name,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    read_random,
    remove_left_overs,
    verify_checkpoint,
)
from lockstep.core.config.auto import BEFORE, ON_CPU, on_cpu, settled
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import ParityConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import links_out, remove_temporaries
from lockstep.core.files.jsonl import Cut, DamagedLine, JsonLines, damage, in_ranges, read_lines
from lockstep.core.files.lock import FolderLock
from lockstep.core.files.parents import remove_parents
from lockstep.core.files.paths import quoted
from lockstep.core.run.create import create_folder
from lockstep.core.run.history import BRANCH, CHECKED, LEFT, VALUES, VERSION, branch_of, settings_at, values_of
from lockstep.core.run.history import line as resumes_of_line
from lockstep.core.run.info import CHANGED, SETTINGS, STOPPED, read_info, require_unchanged, settings_of, write_info
from lockstep.core.run.layout import (
    CHECKPOINTS,
    CHECKS,
    CONFIG,
    EVIDENCE,
    INFO,
    LINES,
    LISTED,
    OBSERVATIONS,
    RECORDS,
    SAVED,
    is_run,
    observation_files,
    step_of,
)
from lockstep.core.run.resume import Changes
from lockstep.core.run.rollback import set_back
from lockstep.core.versions import version_of

# Where W&B keeps its own files, among them links to its logs elsewhere.
WANDB = "wandb"
NO_CHANGES = Changes()


class RunDir:
    """A run directory. `create` and `open(…, write=True)` hold its lock until `close`; `open` alone only reads."""

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        info: Mapping[str, Any],
        lock: FolderLock | None,
        changes: Changes = NO_CHANGES,
    ) -> None:
        self.path = path
        self._changes = changes
        self._configs: dict[tuple[str | None, tuple[tuple[str, str], ...]], RunConfig] = {}
        self._view: Callable[[RunConfig], RunConfig] = lambda config: config
        self._info = dict(info)
        # As in config.toml, with the changes of resumes; in `config`, `auto` is replaced by its value.
        self.asked = config
        self.config = self.settled(config)
        self._lock = lock
        self._place = os.stat(path) if lock else None
        self._records = JsonLines(path / RECORDS) if lock else None
        self._checks = JsonLines(path / CHECKS) if lock else None
        self._saved = JsonLines(path / SAVED) if lock else None
        # The folders that `create` made above the directory, outermost first.
        self._parents: list[Path] = []

    @classmethod
    def create(cls, path: Path, config: RunConfig, info: Mapping[str, Any], overwrite: bool = False) -> Self:
        """Make a new run directory with config.toml and run.json, and hold its lock (core/run/create.py).

        Raises:
            UserError: `path` is in use, or cannot be written.
        """
        described = {"name": config.name, "created": _now(), "finished": False, "resumes": [], "branches": []}
        described |= {STOPPED: None, SETTINGS: settings_of(config), ON_CPU: on_cpu(config), **info}
        lock, parents = create_folder(path, config, described, overwrite)
        run = cls(path, config, described, lock)
        run._parents = parents
        return run

    @classmethod
    def open(cls, path: Path, write: bool = False, changes: Changes = NO_CHANGES, done: int | None = None) -> Self:
        """Open an existing run to read, or with `write` to go on with it (takes the lock, clears left-overs away).

        changes: by which it is to go on otherwise; `resume_from` notes them in run.json. done: after how many steps;
        None for all. Its configuration is config.toml with the settings that were changed since it was made and are in
        force there.

        Raises UserError if it is not a run, config.toml or run.json is not what was written, or another process writes
        it.
        """
        if not is_run(path):
            raise UserError(f"{path} is not a run directory: it has no {CONFIG} and {INFO}; {LISTED}")
        if write and (link := next(links_out(path, WANDB), None)):
            raise UserError(
                f"{link} leads to {os.path.realpath(link)}, outside the run: a run is written in its own folder alone; "
                "put there what the link stands for"
            )
        lock = FolderLock(path) if write else None
        try:
            info = read_info(path / INFO)
            require_unchanged(path / CONFIG, info)
            config = load_config(path / CONFIG, {**settings_at(info, done), **changes.settings})
            if write:
                remove_temporaries(path)
                remove_left_overs(path / CHECKPOINTS)
                shutil.rmtree(path / EVIDENCE, ignore_errors=True)
            return cls(path, config, info, lock, changes)
        except BaseException:
            if lock:
                lock.release()
            raise

    # run.json

    @property
    def info(self) -> Mapping[str, Any]:
        """The contents of run.json."""
        return self._info

    def config_at(self, step: int, device: str | None = None) -> RunConfig:
        """Return the configuration in force at step `step` of the run: branches that were begun on purpose change it.

        device: instead of the run's; choices for `auto` follow it. Raises UserError if config.toml cannot be read.
        """
        settings = settings_at(self._info, step - 1)
        if settings == settings_at(self._info) and device in (None, self.config.device):
            return self.config
        key = device, tuple(sorted(settings.items()))
        if key not in self._configs:
            asked = load_config(self.path / CONFIG, settings)
            asked = asked.model_copy(update={"device": device or asked.device})
            self._configs[key] = self._view(self.settled(asked))
        return self._configs[key]

    def read_through(self, view: Callable[[RunConfig], RunConfig]) -> None:
        """Apply `view` to every configuration read from this run; it changes only what concerns the reader."""
        self.config, self._view = view(self.config), view
        self._configs.clear()

    def settled(self, config: RunConfig) -> RunConfig:
        """Return `config` with what `auto` has stood for since this run was made in its place (core/config/auto.py)."""
        return settled(config, config.device, self._info.get(ON_CPU, BEFORE))

    def update_info(self, **changes: Any) -> None:
        """Change keys of run.json, atomically."""
        self._writer()
        changed = self._info | changes
        write_info(self.path / INFO, changed)
        self._info = changed

    def finish(self) -> None:
        """Set `finished`: all steps are done."""
        self.update_info(finished=True)

    def note_stop(self, how: str, said: str) -> None:
        """Write down how training ended before all steps were done (`ENDINGS`), for whoever lists runs.

        A disk that refuses is no further error: then the run stands as one that was killed.
        """
        with contextlib.suppress(UserError):
            self.update_info(**{STOPPED: {"how": how, "said": said, "time": _now()}})

    def discard(self) -> None:
        """Remove the directory of a run that has not begun, and parents that were made for it.

        Raises RuntimeError if a step was recorded.
        """
        self._writer()
        if self.records():
            raise RuntimeError(f"{self.path} has records")
        shutil.rmtree(self.path, ignore_errors=True)
        remove_parents(self._parents)
        self.close()

    # Records and checks

    def append_record(self, record: StepRecord) -> None:
        """Append a line to records.jsonl, with the number of the branch if one was begun on purpose."""
        self._writer()
        assert self._records is not None
        branch = branch_of(self._info)
        told = {BRANCH: branch} if branch > 1 else {}
        plain = {"mfu": dict(record.mfu), "metrics": dict(record.metrics), "host": dict(record.host)}
        self._records.append(asdict(record) | plain | told)

    def append_check(self, line: Mapping[str, Any]) -> None:
        """Append a line to parity.jsonl: `Check.to_json()`, or the reason why a check was skipped."""
        self._writer()
        assert self._checks is not None
        self._checks.append(line)

    def append_saved(self, line: Mapping[str, Any]) -> None:
        """Append a line to checkpoints.jsonl: `Saved` of core/run/checkpoints.py."""
        self._writer()
        assert self._saved is not None
        self._saved.append(line)

    def take_history(self, other: RunDir, step: int) -> None:
        """Append another run's records, checks and checkpoints' lines up to a step."""
        self._writer()
        lines = {RECORDS: self._records, CHECKS: self._checks, SAVED: self._saved}
        for name, file in lines.items():
            assert file is not None
            for line in read_lines(other.path / name):
                if line.get("step", 0) <= step:
                    file.append(line)

    def records(self) -> list[dict[str, Any]]:
        """Read the lines of records.jsonl; a torn last line is left out. Raises UserError if another is damaged."""
        return self._read(RECORDS)

    def checks(self) -> list[dict[str, Any]]:
        """Read the lines of parity.jsonl; a torn last line is left out. Raises UserError if another is damaged."""
        return self._read(CHECKS)

    def checks_due(self, last: int) -> list[int]:
        """Return the steps up to `last` at which a check was due, by the `parity.every` that each step was made with.

        The first step after a resume is one of them, whatever the interval.
        Raises UserError if config.toml cannot be read.
        """
        made_with = load_config(self.path / CONFIG).parity.every
        spans = [(after, int(text)) for after, text in values_of(self._info, "parity.every", str(made_with))]
        ends = [after for after, _ in spans[1:]] + [last]
        after_resumes = {resume["step"] + 1 for resume in resumes_of_line(self._info) if CHECKED in resume}
        return [
            step
            for (after, every), end in zip(spans, ends, strict=True)
            for step in range(after + 1, min(end, last) + 1)
            if ParityConfig(every=every).due(step) or (every and step in after_resumes)
        ]

    def observations(self) -> dict[int, Path]:
        """Map each step to the file of what was observed in it."""
        return observation_files(self.path / OBSERVATIONS)

    def _read(self, name: str) -> list[dict[str, Any]]:
        try:
            return read_lines(self.path / name)
        except DamagedLine as error:
            raise UserError(f"{error}; lockstep train --resume {quoted(self.path)} sets it aside") from error

    def resume_from(self, step: int, warn: Callable[[str], None] = warnings.warn) -> None:
        """Set the directory back to its contents after `step`, and note the resume in run.json.

        Records, checks, observations, spikes and checkpoints of later steps belong to another future. They are moved to
        branches/NNN/, where nothing prunes them, and run.json lists them under `branches`; a branch that is begun on
        purpose leaves such a folder in any case, and is the one of the next number. Damaged lines are moved to
        damaged/NNN/ and listed under `damaged`; `warn` is called for them, and for steps whose lines are missing.
        Raises UserError if the disk refuses.
        """
        self._writer()
        assert self._records is not None and self._checks is not None and self._saved is not None
        for file in (self._records, self._checks, self._saved):
            file.close()
        # If an interrupted rollback has made them, they exist already; no step was trained since.
        branch, aside = (self._next(kind) for kind in ("branches", "damaged"))
        try:
            cuts = set_back(self.path, step, branch, aside, LINES, begins_branch=bool(self._changes.branch))
        except OSError as error:
            raise UserError(f"cannot set {self.path} back to step {step}: {error.strerror or error}") from error
        finally:
            self._records, self._checks, self._saved = (JsonLines(self.path / name) for name in LINES)
        for said in self._losses(step, cuts, aside):
            warn(said)
        resumed: dict[str, Any] = {"step": step, "time": _now(), CHECKED: True}
        changes: dict[str, Any] = {}
        if self._changes.settings:
            resumed[CHANGED] = dict(self._changes.settings)
        if branch.exists():
            left = {"from_step": step, **_contents(branch, self.path)}
            changes["branches"] = [*self._info.get("branches", []), left]
            resumed[LEFT] = left["path"]
        if self._changes.branch:
            resumed[BRANCH] = len(changes["branches"]) + 1
            resumed[VALUES] = {key: list(values) for key, values in self._changes.branch.items()}
            resumed[VERSION] = version_of("lockstep")
        self._changes = NO_CHANGES
        changes["resumes"] = [*self._info.get("resumes", []), resumed]
        if (settings := settings_at(changes)) or CHANGED in self._info:
            changes[CHANGED] = settings
        if aside.exists():
            lost = {
                "path": str(aside.relative_to(self.path)),
                "records": list(cuts[RECORDS].damaged),
                "checks": list(cuts[CHECKS].damaged),
            }
            changes["damaged"] = [*self._info.get("damaged", []), lost]
        self.update_info(**changes, **{STOPPED: None}, finished=False)

    def _next(self, kind: str) -> Path:
        return self.path / kind / f"{len(self._info.get(kind, [])) + 1:03d}"

    def _losses(self, step: int, cuts: Mapping[str, Cut], aside: Path) -> Iterator[str]:
        """Describe the lines that a resume from `step` has lost."""
        for name, cut in cuts.items():
            if cut.damaged:
                yield f"{damage(self.path / name, list(cut.damaged))}; set aside in {aside / name} and not used"
        made = range(1, step + 1)
        if lost := [n for n in made if n not in cuts[RECORDS].steps]:
            yield f"{self.path / RECORDS}: no record is left of {_steps(lost)}, made before"
        if lost := [n for n in self.checks_due(step) if n not in cuts[CHECKS].steps]:
            yield (
                f"{self.path / CHECKS}: nothing is left of the checks that were due at {_steps(lost)}: "
                "lost, or under way when the run stopped"
            )

    # Checkpoints

    def checkpoint_of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, which need not exist."""
        return self.path / CHECKPOINTS / folder_name(step)

    def commit_checkpoint(self, pending: Pending, spare: int | None = None, best: int | None = None) -> Path:
        """Move a checkpoint to its place, then delete those that the configuration does not keep.

        best: step of the lowest validation loss, kept if `checkpoint.best` is set. spare: a step; the last checkpoint
        at or before it is kept besides, and all later ones. Raises UserError if the disk refuses.
        """
        self._writer()
        path, kept = pending.commit(), self.config.checkpoint
        # Imported weights follow from no seed.
        first = 0 if self.config.initial == "imported" else None
        stay = {best if kept.best else None, first}
        try:
            prune_checkpoints(self.path / CHECKPOINTS, kept.keep, kept.keep_every, stay, spare)
        except OSError as error:
            self._writer()
            raise UserError(f"cannot delete an old checkpoint of {self.path}: {error.strerror or error}") from error
        return path

    def save_checkpoint(self, state: State, extra: Mapping[str, Any], spare: int | None = None) -> Path:
        """Write a state to checkpoints/step_NNNNNN at once, then delete as `commit_checkpoint` does."""
        final = self.checkpoint_of(state.step)
        pending = begin_checkpoint(final, state.step, lambda folder: WritingState(state, folder), extra)
        return self.commit_checkpoint(pending, spare)

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint folders, oldest first. Nothing is verified."""
        return list_checkpoints(self.path / CHECKPOINTS)

    def latest_checkpoint(self) -> Path | None:
        """Return the last checkpoint, not verified; None if there is none."""
        return next(reversed(self.checkpoints()), None)

    def load_latest(
        self, warn: Callable[[str], None], read: Read | None = None, step: int | None = None
    ) -> tuple[State, dict[str, Any], dict[str, np.ndarray]]:
        """Return state, extra and random states of the last intact checkpoint; `warn` gets each one passed over.

        read: as `load_checkpoint` takes it. step: that checkpoint and no other. Raises UserError if there is none.
        """
        path = self.checkpoint(warn, step)
        state, extra = load_checkpoint(path, read)
        return state, extra, read_random(path)

    def checkpoint(self, warn: Callable[[str], None], step: int | None = None) -> Path:
        """Return the last intact checkpoint, or that of `step`, not verified. Raises UserError if there is none."""
        return self.last_intact(warn) if step is None else self.checkpoint_after(step)

    def checkpoint_after(self, step: int) -> Path:
        """Return the checkpoint of `step`, not verified. Raises UserError that lists the others if it is missing."""
        found = {step_of(path): path for path in self.checkpoints()}
        if step not in found:
            there = f"its checkpoints are of steps {in_ranges(found)}" if found else "it has no checkpoint"
            raise UserError(f"{self.path} has no checkpoint of step {step}: {there}")
        return found[step]

    def last_intact(self, warn: Callable[[str], None]) -> Path:
        """Return the last checkpoint whose files are intact; `warn` is called with each one passed over.

        Raises UserError if there is none.
        """
        found = self.checkpoints()
        for path in reversed(found):
            try:
                verify_checkpoint(path)
                return path
            except CorruptCheckpoint as error:
                warn(f"checkpoint passed over: {error}")
        raise UserError(
            f"{self.path} has no {'intact ' if found else ''}checkpoint to go on from: begin again with --overwrite"
        )

    # Lifetime

    def close(self) -> None:
        """Close the files and give the lock back; a second call does nothing."""
        for file in (self._records, self._checks, self._saved):
            if file:
                file.close()
        self._records = self._checks = self._saved = None
        if self._lock:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writer(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.path} was opened to read, or is closed")
        try:
            here = self._place is not None and os.path.samestat(self._place, os.stat(self.path))
        except OSError:
            here = False
        if not here:  # what lies there now, if anything, is not this run's
            raise UserError(
                f"{self.path} was moved or deleted while the run wrote it; what it wrote is where that went"
            )


def _contents(branch: Path, run: Path) -> dict[str, Any]:
    """Return the entry of a branch in run.json."""
    return {
        "path": str(branch.relative_to(run)),
        "records": len(read_lines(branch / RECORDS)),
        "checks": len(read_lines(branch / CHECKS)),
        "checkpoints": [step_of(path) for path in list_checkpoints(branch)],
    }


def _steps(numbers: list[int]) -> str:
    return f"step{'' if len(numbers) == 1 else 's'} {in_ranges(numbers)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

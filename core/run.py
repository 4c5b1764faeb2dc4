"""The run directory: resolved configuration, what the run says of itself, records, checks and checkpoints.

Everything in it can be read without Lockstep (TOML, JSON, safetensors). One process writes; any number may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from core import checkpoint
from core.atomic import remove_temporaries, write_atomically
from core.backend import State, StepRecord
from core.config import RunConfig
from core.config_file import dump_config, load_config
from core.errors import UserError
from core.jsonl import JsonLines, cut_after, read_lines
from core.lock import FolderLock

CONFIG, INFO, RECORDS, CHECKS, CHECKPOINTS = "config.toml", "run.json", "records.jsonl", "parity.jsonl", "checkpoints"
SETTINGS = "settings"
OBSERVATIONS, CAPSULES, SAVED = "observations", "capsules", "checkpoints.jsonl"


class RunDir:
    """A run directory. `create` and `open(…, write=True)` hold its lock until `close`; `open` alone only reads."""

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        info: Mapping[str, Any],
        lock: FolderLock | None,
        changed: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._changed = dict(changed or {})
        self.config = config
        self._info = dict(info)
        self._lock = lock
        self._records = JsonLines(path / RECORDS) if lock else None
        self._checks = JsonLines(path / CHECKS) if lock else None
        self._saved = JsonLines(path / SAVED) if lock else None

    @staticmethod
    def check_free(path: Path, overwrite: bool) -> bool:
        """Whether an earlier run lies at `path`. Raises UserError if a new one cannot take its place."""
        occupied = path.is_dir() and any(path.iterdir())
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            raise UserError(f"{path} is a file, not a folder for a run")
        if occupied and not is_run(path):
            raise UserError(f"{path} is not empty and not a run: choose another name")
        if occupied and not overwrite:
            raise UserError(f"{path} holds a run already: --overwrite replaces it, --resume {path} goes on with it")
        return occupied

    @classmethod
    def create(cls, path: Path, config: RunConfig, info: Mapping[str, Any], overwrite: bool = False) -> Self:
        """Make a new run directory with config.toml and run.json, and hold its lock.

        It is put together beside `path` and renamed, so a start that fails leaves nothing, not even new parents.
        `overwrite` replaces an earlier run, and never a folder that is not a run. What a killed process left beside
        `path` is cleared away.

        Raises:
            UserError: `path` is in use, or cannot be written.
        """
        _clear_beside(path)
        occupied = cls.check_free(path, overwrite)
        beside = path.with_name(f".{path.name}.{os.getpid()}.new")
        replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
        described = {"name": config.name, "created": _now(), "finished": False, "resumes": [], "branches": []}
        old_lock = lock = None
        new_parents: list[Path] = []
        done = False
        try:
            old_lock = FolderLock(path) if occupied else None
            new_parents = _make_parents(path.parent)
            beside.mkdir()
            lock = FolderLock(beside)
            (beside / CONFIG).write_text(dump_config(config), encoding="utf-8")
            _write_json(beside / INFO, described | dict(info))
            (beside / CHECKPOINTS).mkdir()
            if occupied:
                os.rename(path, replaced)
            os.rename(beside, path)
            done = True
        except OSError as error:
            raise UserError(f"cannot make {path}: {error.strerror or error}") from error
        finally:
            if old_lock:
                old_lock.release()
            if not done:
                if lock:
                    lock.release()
                if replaced.exists() and not path.exists():
                    os.rename(replaced, path)
                shutil.rmtree(beside, ignore_errors=True)
                for parent in reversed(new_parents):
                    with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                        parent.rmdir()
            shutil.rmtree(replaced, ignore_errors=True)
        return cls(path, config, described | dict(info), lock)

    @classmethod
    def open(cls, path: Path, write: bool = False, settings: Mapping[str, str] | None = None) -> Self:
        """Open an existing run to read, or with `write` to go on with it (takes the lock, clears left-overs away).

        settings: dotted key → text, by which it is to go on otherwise; `resume_from` notes them in run.json. Its
        configuration is config.toml with all settings that were changed since it was made.

        Raises UserError if it is not a run, is damaged, or another process writes it.
        """
        if not is_run(path):
            raise UserError(f"{path} is not a run directory: it has no {CONFIG} and {INFO}")
        lock = FolderLock(path) if write else None
        try:
            info = _read_json(path / INFO)
            changed = dict(settings or {})
            config = load_config(path / CONFIG, {**info.get(SETTINGS, {}), **changed})
            if write:
                remove_temporaries(path)
                checkpoint.remove_left_overs(path / CHECKPOINTS)
            return cls(path, config, info, lock, changed)
        except BaseException:
            if lock:
                lock.release()
            raise

    # What the run says of itself

    @property
    def info(self) -> Mapping[str, Any]:
        """The contents of run.json."""
        return self._info

    def update_info(self, **changes: Any) -> None:
        """Change keys of run.json, atomically."""
        self._writer()
        changed = self._info | changes
        _write_json(self.path / INFO, changed)
        self._info = changed

    def finish(self) -> None:
        """Set `finished`: all steps are done."""
        self.update_info(finished=True)

    def discard(self) -> None:
        """Remove the directory of a run that has not begun. Raises RuntimeError if a step was recorded."""
        self._writer()
        if self.records():
            raise RuntimeError(f"{self.path} has records")
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    # Records and checks

    def append_record(self, record: StepRecord) -> None:
        """Append a line to records.jsonl."""
        self._writer()
        assert self._records is not None
        self._records.append(asdict(record) | {"mfu": dict(record.mfu), "metrics": dict(record.metrics)})

    def append_check(self, line: Mapping[str, Any]) -> None:
        """Append a line to parity.jsonl: `Check.to_json()`, or what says why a check was skipped."""
        self._writer()
        assert self._checks is not None
        self._checks.append(line)

    def append_saved(self, line: Mapping[str, Any]) -> None:
        """Append a line to checkpoints.jsonl: `Saved` of core/checkpointer.py."""
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
        """The lines of records.jsonl; a torn last line is left out."""
        return read_lines(self.path / RECORDS)

    def checks(self) -> list[dict[str, Any]]:
        """The lines of parity.jsonl; a torn last line is left out."""
        return read_lines(self.path / CHECKS)

    def resume_from(self, step: int) -> None:
        """Make the directory what it was after `step`, before going on from there, and note the resume in run.json.

        Records, checks and checkpoints of later steps belong to another future. They are moved to
        branches/NNN/, where nothing prunes them, and run.json lists them under `branches`.
        """
        self._writer()
        assert self._records is not None and self._checks is not None and self._saved is not None
        for file in (self._records, self._checks, self._saved):
            file.close()
        branches = list(self._info.get("branches", []))
        # Made by a setting back that was cut short, it is there already; no step was trained since.
        branch = self.path / "branches" / f"{len(branches) + 1:03d}"
        late = [p for p in checkpoint.list_checkpoints(self.path / CHECKPOINTS) if _step(p) > step]
        try:
            branch.mkdir(parents=True, exist_ok=True)
            remove_temporaries(branch)
            for name in (RECORDS, CHECKS, SAVED):
                cut_after(self.path / name, step, branch / name)
            for folder in late:
                os.rename(folder, branch / folder.name)
            if any(branch.iterdir()):
                branches.append({"from_step": step, **_contents(branch, self.path)})
            else:
                branch.rmdir()
                with contextlib.suppress(OSError):
                    branch.parent.rmdir()
        except OSError as error:
            raise UserError(f"cannot set {self.path} back to step {step}: {error.strerror or error}") from error
        finally:
            self._records, self._checks, self._saved = (
                JsonLines(self.path / name) for name in (RECORDS, CHECKS, SAVED)
            )
        told: dict[str, Any] = {}
        resumed: dict[str, Any] = {"step": step, "time": _now()}
        if self._changed:
            resumed[SETTINGS] = self._changed
            told[SETTINGS] = {**self._info.get(SETTINGS, {}), **self._changed}
        self._changed = {}
        resumes = [*self._info.get("resumes", []), resumed]
        self.update_info(branches=branches, resumes=resumes, finished=False, **told)

    # Checkpoints

    def checkpoint_of(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would."""
        return self.path / CHECKPOINTS / checkpoint.folder_name(step)

    def commit_checkpoint(self, pending: checkpoint.Pending, spare: int | None = None, best: int | None = None) -> Path:
        """Put a checkpoint in its place, then delete those that the configuration does not keep.

        best: step of the lowest validation loss, kept if `checkpoint.best` says so. spare: a step; the last checkpoint
        at or before it is kept besides, and all later ones. Raises UserError if the disk refuses.
        """
        self._writer()
        path, kept = pending.commit(), self.config.checkpoint
        checkpoint.prune_checkpoints(
            self.path / CHECKPOINTS, kept.keep, kept.keep_every, best if kept.best else None, spare
        )
        return path

    def save_checkpoint(self, state: State, extra: Mapping[str, Any], spare: int | None = None) -> Path:
        """Write a state to checkpoints/step_NNNNNN at once, then delete as `commit_checkpoint` does."""
        final = self.checkpoint_of(state.step)
        pending = checkpoint.begin_checkpoint(
            final, state.step, lambda folder: checkpoint.WritingState(state, folder), extra
        )
        return self.commit_checkpoint(pending, spare)

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first. Nothing is verified."""
        return checkpoint.list_checkpoints(self.path / CHECKPOINTS)

    def latest_checkpoint(self) -> Path | None:
        """The last checkpoint, not verified; None if there is none."""
        return next(reversed(self.checkpoints()), None)

    def load_latest(
        self, warn: Callable[[str], None], read: checkpoint.Read | None = None
    ) -> tuple[State, dict[str, Any], dict[str, np.ndarray]]:
        """State, extra and random states of the last intact checkpoint; `warn` is told of each one passed over.

        read: as `load_checkpoint` takes it. Raises UserError if there is none.
        """
        path = self.last_intact(warn)
        state, extra = checkpoint.load_checkpoint(path, read)
        return state, extra, checkpoint.read_random(path)

    def last_intact(self, warn: Callable[[str], None]) -> Path:
        """The last checkpoint whose files are what was written; `warn` is told of each one passed over.

        Raises UserError if there is none.
        """
        found = self.checkpoints()
        for path in reversed(found):
            try:
                checkpoint.verify_checkpoint(path)
                return path
            except checkpoint.CorruptCheckpoint as error:
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


def is_run(path: Path) -> bool:
    """Whether a folder calls itself a run."""
    return (path / CONFIG).is_file() and (path / INFO).is_file()


def _contents(branch: Path, run: Path) -> dict[str, Any]:
    """What run.json says of a branch."""
    return {
        "path": str(branch.relative_to(run)),
        "records": len(read_lines(branch / RECORDS)),
        "checks": len(read_lines(branch / CHECKS)),
        "checkpoints": [_step(path) for path in checkpoint.list_checkpoints(branch)],
    }


def _step(path: Path) -> int:
    step = checkpoint.checkpoint_step(path)
    assert step is not None
    return step


def _clear_beside(path: Path) -> None:
    """Delete what a killed `create` left beside `path`; a run whose place was to be taken and was not is put back."""
    left_over = re.compile(rf"\.{re.escape(path.name)}\.\d+\.(new|old)")
    try:
        found = [entry for entry in path.parent.iterdir() if left_over.fullmatch(entry.name)]
    except OSError:
        return  # nothing can be made there, which `create` will say
    for folder in found:
        try:
            lock = FolderLock(folder)
        except UserError:
            continue  # its process is at work
        if folder.suffix == ".old" and is_run(folder) and not path.exists():
            os.rename(folder, path)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _make_parents(folder: Path) -> list[Path]:
    """Make `folder` and what is missing above it; returns what was made, outermost first. All or nothing."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    made: list[Path] = []
    try:
        for parent in reversed(missing):
            parent.mkdir()
            made.append(parent)
    except OSError:
        for parent in reversed(made):
            parent.rmdir()
        raise
    return made


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: not a JSON object")
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

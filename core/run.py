"""The run directory: resolved configuration, what the run says of itself, records, checks and checkpoints.

Everything in it can be read without Lockstep (TOML, JSON, safetensors). One process writes; any number may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from core import checkpoint
from core.atomic import remove_temporaries, write_atomically
from core.backend import State, StepRecord
from core.config import RunConfig
from core.config_file import dump_config, load_config
from core.errors import UserError
from core.jsonl import JsonLines, cut_after, read_lines
from core.lock import FolderLock

CONFIG, INFO, RECORDS, CHECKS, CHECKPOINTS = "config.toml", "run.json", "records.jsonl", "parity.jsonl", "checkpoints"
OBSERVATIONS, CAPSULES = "observations", "capsules"


class RunDir:
    """A run directory. `create` and `open(…, write=True)` hold its lock until `close`; `open` alone only reads."""

    def __init__(self, path: Path, config: RunConfig, info: Mapping[str, Any], lock: FolderLock | None) -> None:
        self.path = path
        self.config = config
        self._info = dict(info)
        self._lock = lock
        self._records = JsonLines(path / RECORDS) if lock else None
        self._checks = JsonLines(path / CHECKS) if lock else None
        # What `create` made above the directory, outermost first.
        self._parents: list[Path] = []

    @staticmethod
    def check_free(path: Path, overwrite: bool) -> bool:
        """Whether an earlier run lies at `path`. Raises UserError if a new one cannot take its place."""
        occupied = path.is_dir() and any(path.iterdir())
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            raise UserError(f"{path} is a file, not a folder for a run")
        if occupied and not _is_run(path):
            raise UserError(f"{path} is not empty and not a run: choose another name")
        if occupied and not overwrite:
            raise UserError(f"{path} holds a run already: --overwrite replaces it, --resume {path} goes on with it")
        return occupied

    @classmethod
    def create(cls, path: Path, config: RunConfig, info: Mapping[str, Any], overwrite: bool = False) -> Self:
        """Make a new run directory with config.toml and run.json, and hold its lock.

        It is put together beside `path` and renamed, so a start that fails leaves nothing, not even new parents.
        `overwrite` replaces an earlier run, and never a folder that is not a run.

        Raises:
            UserError: `path` is in use, or cannot be written.
        """
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
                _remove_parents(new_parents)
            shutil.rmtree(replaced, ignore_errors=True)
        run = cls(path, config, described | dict(info), lock)
        run._parents = new_parents
        return run

    @classmethod
    def open(cls, path: Path, write: bool = False) -> Self:
        """Open an existing run to read, or with `write` to go on with it (takes the lock, clears left-overs away).

        Raises UserError if it is not a run, is damaged, or another process writes it.
        """
        if not _is_run(path):
            raise UserError(f"{path} is not a run directory: it has no {CONFIG} and {INFO}")
        config = load_config(path / CONFIG)
        lock = FolderLock(path) if write else None
        try:
            info = _read_json(path / INFO)
            if write:
                remove_temporaries(path)
                checkpoint.remove_left_overs(path / CHECKPOINTS)
            return cls(path, config, info, lock)
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
        """Remove the directory of a run that has not begun, and parents that were made for it.

        Raises RuntimeError if a step was recorded.
        """
        self._writer()
        if self.records():
            raise RuntimeError(f"{self.path} has records")
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_parents(self._parents)
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
        assert self._records is not None and self._checks is not None
        self._records.close()
        self._checks.close()
        branches = list(self._info.get("branches", []))
        branch = self.path / "branches" / f"{len(branches) + 1:03d}"
        late = [p for p in checkpoint.list_checkpoints(self.path / CHECKPOINTS) if _step(p) > step]
        try:
            branch.mkdir(parents=True, exist_ok=True)
            moved = [cut_after(self.path / name, step, branch / name) for name in (RECORDS, CHECKS)]
            for folder in late:
                os.rename(folder, branch / folder.name)
            if not any(branch.iterdir()):
                branch.rmdir()
                with contextlib.suppress(OSError):
                    branch.parent.rmdir()
        except OSError as error:
            raise UserError(f"cannot set {self.path} back to step {step}: {error.strerror or error}") from error
        finally:
            self._records, self._checks = JsonLines(self.path / RECORDS), JsonLines(self.path / CHECKS)
        if any(moved) or late:
            branches.append(
                {
                    "from_step": step,
                    "path": str(branch.relative_to(self.path)),
                    "records": moved[0],
                    "checks": moved[1],
                    "checkpoints": [_step(p) for p in late],
                }
            )
        resumes = [*self._info.get("resumes", []), {"step": step, "time": _now()}]
        self.update_info(branches=branches, resumes=resumes, finished=False)

    # Checkpoints

    def save_checkpoint(self, state: State, extra: Mapping[str, Any], spare: int | None = None) -> Path:
        """Write checkpoints/step_NNNNNN, then delete all but the last `checkpoint.keep` of the configuration.

        spare: a step; the last checkpoint at or before it is kept besides, and all later ones.
        """
        self._writer()
        path = checkpoint.save_checkpoint(self.path / CHECKPOINTS, state, extra)
        checkpoint.prune_checkpoints(self.path / CHECKPOINTS, self.config.checkpoint.keep, spare)
        return path

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first. Nothing is verified."""
        return checkpoint.list_checkpoints(self.path / CHECKPOINTS)

    def latest_checkpoint(self) -> Path | None:
        """The last checkpoint, not verified; None if there is none."""
        return next(reversed(self.checkpoints()), None)

    def load_checkpoint(self, path: Path) -> tuple[State, dict[str, Any]]:
        """Verify and read one checkpoint. Raises checkpoint.CorruptCheckpoint (a UserError) that names the file."""
        return checkpoint.load_checkpoint(path)

    def load_latest(self, warn: Callable[[str], None]) -> tuple[State, dict[str, Any]]:
        """The last checkpoint that is intact; `warn` is told of each one that was passed over.

        Raises UserError if there is none.
        """
        found = self.checkpoints()
        for path in reversed(found):
            try:
                return checkpoint.load_checkpoint(path)
            except checkpoint.CorruptCheckpoint as error:
                warn(f"checkpoint passed over: {error}")
        raise UserError(
            f"{self.path} has no {'intact ' if found else ''}checkpoint to go on from: begin again with --overwrite"
        )

    # Lifetime

    def close(self) -> None:
        """Close the files and give the lock back; a second call does nothing."""
        for file in (self._records, self._checks):
            if file:
                file.close()
        self._records = self._checks = None
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


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / INFO).is_file()


def _step(path: Path) -> int:
    step = checkpoint.checkpoint_step(path)
    assert step is not None
    return step


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


def _remove_parents(made: list[Path]) -> None:
    for parent in reversed(made):
        with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
            parent.rmdir()


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

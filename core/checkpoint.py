"""Checkpoints as folders: safetensors, JSON, and a manifest of sizes and SHA-256. Whole or absent; no pickle."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from core.backend import State
from core.errors import UserError

SCHEMA = 1
MANIFEST = "manifest.json"
EXTRA = "extra.json"
PARAMS = "params"

_FOLDER = re.compile(r"step_(\d{6,})")
_KIND = re.compile(r"[A-Za-z0-9_]+")


class CorruptCheckpoint(UserError):
    """A checkpoint that is not what was written: says which file, and in what way."""


def folder_name(step: int) -> str:
    """`step_000500`."""
    return f"step_{step:06d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step that a folder's name stands for, or None if it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first. Nothing is verified."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(found)]


def save_checkpoint(folder: Path, state: State, extra: Mapping[str, Any]) -> Path:
    """Write `state` and `extra` to `folder`/step_NNNNNN and return that path; one of the same step is replaced.

    Files are written into a folder beside it, flushed to the disk, and the folder is renamed when all is there.
    Raises UserError if the disk refuses (full, not writable); then nothing is left behind.
    """
    final = folder / folder_name(state.step)
    aside = folder / f".{final.name}.{os.getpid()}.tmp"
    replaced = folder / f".{final.name}.{os.getpid()}.old"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write_files(aside, state, extra)
        if final.exists():
            os.rename(final, replaced)
        os.rename(aside, final)
        _flush(folder)
    except OSError as error:
        raise UserError(f"cannot write the checkpoint {final}: {error.strerror or error}") from error
    finally:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        for left_over in (aside, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
    return final


def load_checkpoint(folder: Path) -> tuple[State, dict[str, Any]]:
    """Verify every file against the manifest and return (state, extra). Raises CorruptCheckpoint."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    manifest = _read_manifest(folder)
    for name, entry in manifest["files"].items():
        _verify(folder / name, entry)
    try:
        tensors = {
            Path(name).stem: load_file(folder / name) for name in manifest["files"] if name.endswith(".safetensors")
        }
        extra = json.loads((folder / EXTRA).read_text(encoding="utf-8"))
        params = tensors.pop(PARAMS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{folder}: {error}") from error
    return State(manifest["step"], params, tensors, manifest.get("scalars", {})), extra


def prune_checkpoints(folder: Path, keep: int, spare: int | None = None) -> list[Path]:
    """Delete all but the last `keep` checkpoints; returns what was deleted.

    spare: a step; the last checkpoint at or before it stays, and so does every later one, whatever their age.
    """
    found = list_checkpoints(folder)
    old = found[:-keep]
    if spare is not None:
        vouched = [checkpoint_step(path) or 0 for path in found if (checkpoint_step(path) or 0) <= spare]
        old = [path for path in old if vouched and (checkpoint_step(path) or 0) < vouched[-1]]
    for path in old:
        # Renamed first: a deletion that is cut short must not leave something that looks like a checkpoint.
        doomed = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def remove_left_overs(folder: Path) -> None:
    """Delete what a killed process left half-written or half-deleted. The caller holds the run's lock."""
    for pattern in (".step_*.tmp", ".step_*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _write_files(folder: Path, state: State, extra: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    for kind, arrays in {PARAMS: state.params, **state.optimizer}.items():
        if not _KIND.fullmatch(kind) or (kind == PARAMS and arrays is not state.params):
            raise ValueError(f"{kind!r} cannot be the name of optimizer state: letters, digits and _, not {PARAMS!r}")
        contiguous = {name: np.ascontiguousarray(a).reshape(np.shape(a)) for name, a in arrays.items()}
        try:
            save_file(contiguous, folder / f"{kind}.safetensors")
        except SafetensorError as error:  # what the disk says, in safetensors' words
            raise OSError(str(error)) from error
    (folder / EXTRA).write_text(json.dumps(extra, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    body = {"schema": SCHEMA, "step": state.step, "files": files}
    if state.scalars:
        body["scalars"] = dict(state.scalars)
    (folder / MANIFEST).write_text(json.dumps({**body, "sha256": _seal(body)}, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        _flush(path)
    _flush(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        seal = manifest.pop("sha256")
        intact = seal == _seal(manifest)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CorruptCheckpoint(f"{path} was damaged after it was written")
    if manifest["schema"] != SCHEMA:
        raise CorruptCheckpoint(f"{path} has schema {manifest['schema']}; this Lockstep reads {SCHEMA}")
    if checkpoint_step(folder) not in (None, manifest["step"]):
        raise CorruptCheckpoint(f"{path} is of step {manifest['step']}: the folder was renamed")
    return dict(manifest)


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise CorruptCheckpoint(f"{path} has {size} bytes; {entry['size']} were written")
        if _sha256(path) != entry["sha256"]:
            raise CorruptCheckpoint(f"{path} was damaged after it was written (its SHA-256 differs)")
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror or error}") from error


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

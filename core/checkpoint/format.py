"""Checkpoints as folders: safetensors, JSON, and a manifest of sizes and SHA-256. Whole or absent; no pickle.

A session may write its own state (`Writes` in core/backend.py) in its framework's format while training continues.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays, NotSupported, Session, State, Writing
from lockstep.core.capabilities import Reads, Writes, ask
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import is_inside, require_file
from lockstep.core.files.paths import quoted

SCHEMA = 2
MANIFEST = "manifest.json"
EXTRA = "extra.json"
RANDOM = "random.safetensors"
PARAMS = "params"
# The format of tensors that this module reads itself.
SAFETENSORS = "safetensors"

_FOLDER = re.compile(r"step_(\d{6,})")
_KIND = re.compile(r"[A-Za-z0-9_]+")
# The key of a file's metadata under which torch.distributed.checkpoint writes the part of a tensor that it holds.
_SHARDS = "DCP_SHARDING_INFO"

# A function that reads tensors of a framework's format from a checkpoint's folder.
Read = Callable[[Path], State]
# A function that takes over the state in a checkpoint's folder: (folder, step, scalars).
Restore = Callable[[Path, int, Mapping[str, float]], None]


class CorruptCheckpoint(UserError):
    """A checkpoint that differs from its manifest. The message names the file and the fault."""


class PoisonedState(UserError):
    """A state with numbers that are not finite, for which no checkpoint is written."""


def folder_name(step: int) -> str:
    """Return `step_000500`."""
    return f"step_{step:06d}"


def checkpoint_step(folder: Path) -> int | None:
    """Return the step in a folder's name, or None if it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders by step, oldest first. Nothing is verified."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(found)]


class Pending:
    """A checkpoint that is being written under a temporary name; `commit` renames it.

    Made by `begin_checkpoint`. step: of its state. bytes: of all its files, 0 until `commit` has written them.
    """

    def __init__(self, final: Path, step: int, extra: Mapping[str, Any], random: Arrays) -> None:
        self.step, self.final, self.bytes = step, final, 0
        self._aside = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        self._extra, self._random = extra, random
        self._writing: Writing | None = None

    def begin(self, write: Callable[[Path], Writing]) -> None:
        """Start the write with `write`. Raises UserError if the disk refuses."""
        try:
            # Without parents, so that a run deleted in the meantime is not recreated.
            self._aside.parent.mkdir(exist_ok=True)
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir()
            self._writing = write(self._aside)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            if self._writing is None:
                self.drop()

    def commit(self) -> Path:
        """Wait for the files, flush them to the disk, and rename the folder; one of the same step is replaced.

        Raises PoisonedState, and UserError if the disk refuses (full, not writable); then nothing is left behind.
        """
        assert self._writing is not None
        folder = self.final.parent
        replaced = folder / f".{self.final.name}.{os.getpid()}.old"
        try:
            if odd := self._writing.not_finite():
                more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
                raise PoisonedState(
                    f"no checkpoint is made of step {self.step}: {odd[0]}{more} holds numbers that are not finite"
                )
            self._writing.wait()
            if self._random:
                _save(self._aside / RANDOM, self._random)
            _seal_folder(self._aside, self._writing, self._extra)
            # Measured under its temporary name: once it has its own, anyone may move or delete it.
            self.bytes = sum(path.stat().st_size for path in self._aside.rglob("*") if path.is_file())
            if self.final.exists():
                os.rename(self.final, replaced)
            os.rename(self._aside, self.final)
            _flush(folder)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            if replaced.exists() and not self.final.exists():
                os.rename(replaced, self.final)
            shutil.rmtree(replaced, ignore_errors=True)
            self.drop()
        return self.final

    def drop(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def _refused(self, error: OSError) -> UserError:
        return UserError(f"cannot write the checkpoint {self.final}: {error.strerror or error}")


def begin_checkpoint(
    final: Path, step: int, write: Callable[[Path], Writing], extra: Mapping[str, Any], random: Arrays | None = None
) -> Pending:
    """Begin the checkpoint `final`: when this returns, the state may change, and `commit` can run in another thread.

    extra: further contents, as JSON. random: states of random number generators, as arrays by name.
    """
    pending = Pending(final, step, extra, random or {})
    pending.begin(write)
    return pending


def writer_of(session: Session) -> Callable[[Path], Writing]:
    """Return a function that begins to write a session's state into a folder, by the session itself if it can."""
    try:
        return ask(session, Writes).write
    except NotSupported:
        return lambda folder: WritingState(session.state(), folder)


def reader_of(session: Session | None) -> Read | None:
    """Return the reader of the session's own checkpoint format; None if it has none."""
    try:
        return ask(session, Reads).read
    except NotSupported:
        return None


class WritingState:
    """A canonical state on its way into a folder: a file of safetensors for the weights and for each kind of moment."""

    format = SAFETENSORS

    def __init__(self, state: State, folder: Path) -> None:
        for kind in state.optimizer:
            if not _KIND.fullmatch(kind) or f"{kind}.safetensors" in (f"{PARAMS}.safetensors", RANDOM):
                raise ValueError(
                    f"{kind!r} cannot be the name of optimizer state: letters, digits and _, not {PARAMS!r}"
                )
        self.step, self.scalars = state.step, state.scalars
        self._state, self._folder = state, folder

    def not_finite(self) -> Sequence[str]:
        """Do nothing: a given state is kept unchanged, as a capsule needs it."""
        return ()

    def wait(self) -> None:
        """Write the files."""
        for kind, arrays in {PARAMS: self._state.params, **self._state.optimizer}.items():
            _save(self._folder / f"{kind}.safetensors", arrays)


def save_checkpoint(folder: Path, state: State, extra: Mapping[str, Any]) -> Path:
    """Write a state and `extra` to `folder`/step_NNNNNN and return that path, at once. Raises UserError."""
    final = folder / folder_name(state.step)
    return begin_checkpoint(final, state.step, lambda aside: WritingState(state, aside), extra).commit()


def load_checkpoint(folder: Path, read: Read | None = None) -> tuple[State, dict[str, Any]]:
    """Verify every file against the manifest and return (state, extra).

    read: for tensors of another format than safetensors (`Session.read`). Raises CorruptCheckpoint, and UserError if
    such a format has no `read`.
    """
    from safetensors import SafetensorError

    manifest = verify_checkpoint(folder)
    try:
        extra = json.loads((folder / EXTRA).read_text(encoding="utf-8"))
        if manifest["format"] == SAFETENSORS:
            return read_state(folder, manifest["step"], manifest.get("scalars", {})), extra
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{folder}: {error}") from error
    if read is None:
        raise UserError(
            f"{folder} holds tensors as {manifest['format']} writes them; make safetensors of it first: "
            f"lockstep convert {quoted(folder)} FOLDER --to safetensors"
        )
    return replace(read(folder), step=manifest["step"], scalars=manifest.get("scalars", {})), extra


def restore_checkpoint(folder: Path, restore: Restore) -> tuple[int, dict[str, Any]]:
    """Verify every file and let a session read what it needs itself (`Restores`); returns (step, extra).

    Raises as `load_checkpoint` does, and what `restore` raises.
    """
    manifest = verify_checkpoint(folder)
    if manifest["format"] != SAFETENSORS:
        state, extra = load_checkpoint(folder)  # its error names the remedy
        return state.step, extra
    restore(folder, manifest["step"], manifest.get("scalars", {}))
    return manifest["step"], json.loads((folder / EXTRA).read_text(encoding="utf-8"))


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Return its manifest, once every file is found to be what was written. Raises CorruptCheckpoint."""
    manifest = _read_manifest(folder)
    for name, entry in manifest["files"].items():
        if not is_inside(name):
            raise CorruptCheckpoint(f"{folder / MANIFEST} names {name!r}, which is not a file of this folder")
        _verify(folder / name, entry)
    return manifest


def read_state(folder: Path, step: int, scalars: Mapping[str, float]) -> State:
    """Read the state in a folder's safetensors.

    A file is `KIND.safetensors` with tensors by parameter, or has tensors named KIND/PARAMETER, whole or in parts, as
    torch.distributed.checkpoint writes them. Raises ValueError if parts are missing, KeyError without weights.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    parts: dict[str, list[tuple[list[int], np.ndarray]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name == RANDOM:
            continue
        tensors, offsets = _load(path)
        if offsets is None:
            require_names(path.stem, *tensors)
            found[path.stem] = tensors
        else:
            for name, tensor in tensors.items():
                parts.setdefault(name, []).append((offsets[name], tensor))
    for name, of_tensor in parts.items():
        kind, _, parameter = name.partition("/")
        require_names(kind, parameter)
        found.setdefault(kind, {})[parameter] = _joined(name, of_tensor)
    return State(step, found.pop(PARAMS), found, dict(scalars))


def require_names(kind: str, *parameters: str) -> None:
    """Raise ValueError unless these can be names in a state, since files and keys of stores have these names."""
    for name in parameters:
        if not name or "/" in name:
            raise ValueError(f"{name!r} cannot be the name of a parameter")
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} cannot be the name of optimizer state")


def read_random(folder: Path) -> dict[str, np.ndarray]:
    """Read the states of random number generators in a checkpoint, by name; none if none were saved."""
    path = folder / RANDOM
    return _load(path)[0] if path.exists() else {}


def prune_checkpoints(
    folder: Path, keep: int, every: int = 0, besides: Collection[int | None] = (), spare: int | None = None
) -> list[Path]:
    """Delete all but the last `keep` checkpoints; returns what was deleted.

    every: those of its multiples stay (0: none). besides: steps that stay. spare: a step; the last checkpoint at or
    before it stays, and so does every later one.
    """
    found = {checkpoint_step(path) or 0: path for path in list_checkpoints(folder)}
    stays = {*list(found)[-keep:], *besides}
    if every:
        stays |= {step for step in found if step % every == 0}
    if spare is not None:
        vouched = max((step for step in found if step <= spare), default=0)
        stays |= {step for step in found if step >= vouched}
    old = [path for step, path in found.items() if step not in stays]
    for path in old:
        # Renamed first, so that an interrupted deletion does not leave a folder with a checkpoint's name.
        doomed = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def remove_left_overs(folder: Path) -> None:
    """Delete folders that a killed process left half-written or half-deleted. The caller holds the run's lock."""
    for pattern in (".step_*.tmp", ".step_*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _save(path: Path, arrays: Arrays) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(a).reshape(np.shape(a)) for name, a in arrays.items()}
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(contiguous, path)
        path.chmod(mode)  # safetensors makes it readable only by the owner
    except SafetensorError as error:  # the disk's error, in safetensors' words
        raise OSError(str(error)) from error


def _load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, list[int]] | None]:
    """Return tensors by name, and where each begins in its whole, if the file's metadata allows parts."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, offsets_of(file)  # noqa: SIM118 - not a mapping


def offsets_of(file: Any) -> dict[str, list[int]] | None:
    """Return the offset of each tensor of an open safetensors file in the whole tensor; None if it holds no parts.

    Raises ValueError if its metadata lacks it.
    """
    shards = (file.metadata() or {}).get(_SHARDS)
    if shards is None:
        return None
    try:
        return {name: [*map(operator.index, e["saved_offsets"])] for name, e in json.loads(shards).items()}
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{_SHARDS} in its metadata does not give the offsets of parts: {error}") from error


def _joined(name: str, parts: list[tuple[list[int], np.ndarray]]) -> np.ndarray:
    if len(parts) == 1 and not any(parts[0][0]):
        return parts[0][1]
    ends = np.array([np.add(offset, part.shape) for offset, part in parts])
    shape = ends.max(axis=0).tolist()
    # Checked before memory is allocated: the offsets come from the file.
    if sum(part.size for _, part in parts) != math.prod(shape):
        raise ValueError(f"parts of {name} are missing")
    whole = np.empty(shape, parts[0][1].dtype)
    for offset, part in parts:
        whole[tuple(slice(at, at + n) for at, n in zip(offset, part.shape, strict=True))] = part
    return whole


def _seal_folder(folder: Path, writing: Writing, extra: Mapping[str, Any]) -> None:
    """Write extra and manifest, and flush everything to the disk."""
    (folder / EXTRA).write_text(json.dumps(extra, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    there = sorted(folder.rglob("*"))
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in there
        if path.is_file()
    }
    body = {"schema": SCHEMA, "step": writing.step, "format": writing.format, "files": files}
    if writing.scalars:
        body["scalars"] = dict(writing.scalars)
    (folder / MANIFEST).write_text(json.dumps({**body, "sha256": _seal(body)}, indent=2) + "\n", encoding="utf-8")
    for path in (*there, folder / MANIFEST, folder):
        _flush(path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    require_file(path)
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
    require_file(path)
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

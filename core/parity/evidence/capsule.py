"""Capsules: one step packed so that it can be judged again elsewhere.

    step_000040/
      about.json     schema, step, versions, candidate and reference, machine, sizes and SHA-256 of the files below,
                     SHA-256 of the evidence's index
      config.toml    the run's configuration; settings of `auto` on the CPU are replaced by the value in force
      record.json    the record that the step returned
      verdict.json   `Check.to_json()`
      batch.npz      `batch.tokens` …, `tapped.tokens` …: int32 (B, S); weights float32 (B, S);
                     `….documents` int32 (B, S) if attention uses them; `probe.…` in capsules of earlier versions
      state/         weights and optimizer state before the step, as a checkpoint
      evidence/      the evidence that was judged: `evidence.json`, and tensors of each segment of the model with their
                     index (core/parity/evidence/store.py); absent in capsules of the first version
      stage.npz      tensors of the origin stage, for repro.py
      repro.py       the stage's call and its FP64 result, without Lockstep

Every file is readable without Lockstep (TOML, JSON, npz, safetensors). repro.py may be edited; it has no checksum.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays, Batch, State, StepRecord
from lockstep.core.checkpoint.format import folder_name, list_checkpoints, load_checkpoint, save_checkpoint
from lockstep.core.config.auto import BEFORE, moved, settled
from lockstep.core.config.file import dump_config, load_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import canonical_json, read_whole
from lockstep.core.files.npz import arrays_of
from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.index import INDEX
from lockstep.core.parity.evidence.saved import save_evidence, store_of
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.run.layout import is_run

SCHEMA = 1
ABOUT, CONFIG, RECORD, VERDICT, BATCH = "about.json", "config.toml", "record.json", "verdict.json", "batch.npz"
STATE, STAGE, REPRO, EVIDENCE = "state", "stage.npz", "repro.py", "evidence"
SEALED = (CONFIG, RECORD, VERDICT, BATCH, STAGE)
BATCHES = ("batch", "tapped")


@dataclass(frozen=True)
class Capsule:
    """The contents of a capsule.

    thorough: whether the check was thorough.
    verdict: JSON of the check that was made when the capsule was written.
    about: contents of about.json without its seal.
    evidence: folder of the evidence that this check judged (`open_evidence`); None if the capsule has none.
    """

    path: Path
    config: RunConfig
    state: State
    batch: Batch
    tapped: Batch
    thorough: bool
    record: StepRecord
    verdict: Mapping[str, Any]
    about: Mapping[str, Any]
    evidence: Path | None = None

    @property
    def step(self) -> int:
        """Number of the step, counted from 1."""
        return self.record.step

    @property
    def given_probe(self) -> Batch | None:
        """The argument `probe` of `gather` for the same check: None if it was thorough."""
        return None if self.thorough else self.tapped


def write_capsule(
    folder: Path,
    evidence: Evidence,
    check: Check,
    config: RunConfig,
    candidate: str,
    reference: str,
    versions: Mapping[str, str],
    machine: Mapping[str, Any] | None = None,
) -> Path:
    """Write the capsule `folder`/step_NNNNNN, named after the checked step, and return its path.

    In a run directory, a capsule of the same step is replaced, because a resumed run has repeated this step. In other
    folders it is kept, and the new one is step_NNNNNN-2, or the first free name of this form. Evidence in a folder is
    moved into the capsule; evidence in memory is saved.

    candidate, reference: names of the backends, as in core/load_backend.py (or `torch`, `jax`).
    versions: name → version of each library that affects results.
    machine: description of the machine that made the step.

    The capsule is written under another name and renamed when it is complete. Raises UserError if writing fails (disk
    full, not writable); then nothing is left.
    """
    final = _place(folder, evidence.record.step)
    aside = folder / f".{final.name}.{os.getpid()}.tmp"
    replaced = folder / f".{final.name}.{os.getpid()}.old"
    script = repro(evidence, check, config, versions)
    batches = {f"{b}.{key}": array for b in BATCHES for key, array in getattr(evidence, b).arrays.items()}
    files = {
        CONFIG: dump_config(settled(config, config.device)).encode(),
        RECORD: _json(asdict(evidence.record)),
        VERDICT: _json(check.to_json()),
        BATCH: _npz(batches),
        STAGE: _npz(script.tensors),
    }
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "step": evidence.record.step,
        "candidate": candidate,
        "reference": reference,
        "versions": dict(versions),
        "machine": dict(machine or {}),
        "due": evidence.due,
        "end_of_text": evidence.batch.end_of_text,
        "thorough": evidence.thorough,
        "files": {name: {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for name, raw in files.items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        save_checkpoint(aside / STATE, evidence.before, {})
        store = _keep(evidence, aside / EVIDENCE)
        about[EVIDENCE] = hashlib.sha256(read_whole(store.folder / INDEX)).hexdigest()
        sealed = {**about, "seal": _seal(about)}
        for name, raw in {**files, REPRO: script.script.encode(), ABOUT: _json(sealed)}.items():
            with (aside / name).open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
        if final.exists():
            os.rename(final, replaced)
        os.rename(aside, final)
        store.folder = final / EVIDENCE
    except UserError as error:  # the error contains the name of the temporary folder
        raise UserError(f"cannot write the capsule {final}: {str(error).rpartition(': ')[2]}") from error
    except OSError as error:
        raise UserError(f"cannot write the capsule {final}: {error.strerror or error}") from error
    finally:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        for left_over in (aside, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
    return final


def _place(folder: Path, step: int) -> Path:
    named = folder / folder_name(step)
    if is_run(folder.parent) or not named.exists():
        return named
    others = (folder / f"{named.name}-{number}" for number in count(2))
    return next(other for other in others if not other.exists())


def _keep(evidence: Evidence, folder: Path) -> FolderStore:
    """Write the evidence into `folder` and flush it to the disk. A finished folder is moved as it is."""
    store = store_of(evidence)
    if store is None:
        store = FolderStore.create(folder)
        save_evidence(evidence, store)
    else:
        if not store.finished:
            save_evidence(evidence, store)
        store.move(folder)
    store.flush()
    return store


def is_capsule(path: Path) -> bool:
    """Return whether a folder has the files of a capsule."""
    return (path / ABOUT).is_file() and not (path / "run.json").exists()


def read_capsule(path: Path) -> Capsule:
    """Verify and read a capsule. Raises UserError that names a missing or damaged file, or one of another schema."""
    about = _read_about(path)
    if other := set(about["files"]) ^ {*SEALED}:
        raise UserError(f"{path / ABOUT} names other files than a capsule has: {', '.join(map(repr, sorted(other)))}")
    raw = {name: _verified(path / name, entry) for name, entry in about["files"].items()}
    states = list_checkpoints(path / STATE)
    if len(states) != 1:
        raise UserError(f"{path / STATE} must hold the state before the step; it holds {len(states)} states")
    state, _ = load_checkpoint(states[0])
    config = load_config(path / CONFIG)
    arrays = arrays_of(raw[BATCH], path / BATCH)
    kept = _evidence(path, about)
    name = BATCH
    try:
        end_of_text = about.get("end_of_text")
        batch, tapped = (_batch(arrays, name, end_of_text) for name in BATCHES)
        for one in (batch, tapped):
            one.require_tokens_below(config.model.vocab_size)
        thorough = about.get("thorough")
        if thorough is None:  # earlier versions probed the whole batch in a thorough check
            thorough = _batch(arrays, "probe", end_of_text).digest() == batch.digest()
        name = RECORD
        record = StepRecord(**json.loads(raw[name]))
        name = VERDICT
        verdict = json.loads(raw[name])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path / name} is not valid content of a capsule: {type(error).__name__}: {error}") from error
    config = load_config(path / CONFIG)
    # Earlier versions packed `auto` on the CPU without the value in force.
    config = settled(moved(config), config.device, BEFORE)
    return Capsule(path, config, state, batch, tapped, bool(thorough), record, verdict, about, kept)


def other_versions(capsule: Capsule, here: Mapping[str, str]) -> list[str]:
    """List `torch 2.12.0 then, 2.13.0 here` for each package of `here` with another version: a warning, not an error.

    A capsule of an earlier version has only the versions of its trainer.
    """
    then = capsule.about["versions"]
    return [
        f"{name} {then[name]} then, {version} here" if name in then else f"{name} not noted then, {version} here"
        for name, version in sorted(here.items())
        if then.get(name) != version
    ]


def _read_about(path: Path) -> dict[str, Any]:
    file = path / ABOUT
    try:
        about = json.loads(file.read_bytes())
        seal = about.pop("seal")
        schema = about["schema"]
    except FileNotFoundError:
        raise UserError(f"{path} is not a capsule: it has no {ABOUT}") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{file} was damaged after it was written") from None
    if schema != SCHEMA:
        raise UserError(
            f"{file} has schema {schema}; this Lockstep reads {SCHEMA}: replay it with the one that wrote it"
        )
    if seal != _seal(about):
        raise UserError(f"{file} was damaged after it was written")
    return dict(about)


def _evidence(path: Path, about: Mapping[str, Any]) -> Path | None:
    """Return the folder of the capsule's evidence after verifying its index. The index has digests of all tensors."""
    if EVIDENCE not in about:
        return None
    folder = path / EVIDENCE
    if folder.is_symlink() or (folder / INDEX).is_symlink():
        raise UserError(f"{folder} is a link: a capsule must contain its evidence")
    if hashlib.sha256(read_whole(folder / INDEX)).hexdigest() != about[EVIDENCE]:
        raise UserError(f"{folder / INDEX} was damaged after it was written (its SHA-256 differs)")
    return folder


def _verified(path: Path, entry: Mapping[str, Any]) -> bytes:
    raw = read_whole(path)
    if len(raw) != entry["size"] or hashlib.sha256(raw).hexdigest() != entry["sha256"]:
        raise UserError(f"{path} was damaged after it was written (its size or SHA-256 differs)")
    return raw


def _npz(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy types the keywords as the positional ones
    return buffer.getvalue()


def _batch(arrays: Arrays, name: str, end_of_text: int | None) -> Batch:
    tokens, targets, weights = (arrays[f"{name}.{key}"] for key in ("tokens", "targets", "weights"))
    return Batch(tokens, targets, weights, arrays.get(f"{name}.documents"), end_of_text)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, default=dict) + "\n").encode()


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(json.loads(_json(body)))).hexdigest()

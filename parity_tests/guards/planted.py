"""Run directories, capsules and spikes from an attacker: complete, with valid digests, and with a program inside."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.checkpoint import format as checkpoint
from lockstep.core.config.file import dump_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence import capsule
from lockstep.core.parity.modes import rerun
from lockstep.core.run.directory import RunDir
from lockstep.core.run.info import read_info, write_info
from lockstep.core.train.spikes import SCHEMA
from lockstep.parity_tests.tiny import text_batch, tiny_config

RAN = "ran"
# Running this program, as a module or from a pickle, creates the file RAN beside it.
PROGRAM = f"""
from pathlib import Path

Path(__file__).with_name({RAN!r}).write_text("")
"""
CONFIG = tiny_config("bf16", train={"sequence_length": 32})


class Runs:
    """An object whose unpickling creates a file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def plant(folder: Path, name: str = "mine.py") -> str:
    """Write a program into `folder`; return its name as a backend, `FILE.py:NAME`."""
    (folder / name).write_text(PROGRAM)
    return f"{folder / name}:Mine"


def ran(folder: Path) -> bool:
    """Return whether a planted program below `folder` was run, and delete its mark."""
    found = list(folder.rglob(RAN))
    for path in found:
        path.unlink()
    return bool(found)


def planted_run(made: Path, path: Path, **info: Any) -> Path:
    """Copy a run, and add a program that its run.json names as the backend; return the copy."""
    shutil.copytree(made, path)
    write_info(path / "run.json", {**read_info(path / "run.json"), "backend": plant(path), **info})
    return path


def planted_spike(run: Path, step: int) -> Path:
    """Write a loss spike of a run, in the format of core/train/spikes.py."""
    made = RunDir.open(run)
    batch = text_batch(made.config, step)
    folder = run / "spikes" / checkpoint.folder_name(step)
    folder.mkdir(parents=True)
    about = {"schema": SCHEMA, "step": step, "loss": 9.0, "record": {}, "digest": batch.digest()}
    (folder / "about.json").write_text(json.dumps(about))
    (folder / "batch.npz").write_bytes(capsule._npz(batch.arrays))
    return folder


def planted_capsule(path: Path, config: RunConfig = CONFIG, candidate: Any = None, **files: bytes) -> Path:
    """Write a capsule with a program that its about.json names as the candidate.

    files: contents that replace the capsule's own files, by the name without its ending.
    """
    state = rerun.initial_state(config)
    batch = text_batch(config)
    record = StepRecord(1, 5.0, 128.0, 1e-3, 1.0, 0.25, batch.digest(), 128)
    arrays = {f"{b}.{key}": array for b in capsule.BATCHES for key, array in batch.arrays.items()}
    own = {
        capsule.CONFIG: dump_config(config).encode(),
        capsule.RECORD: json.dumps(asdict(record)).encode(),
        capsule.VERDICT: json.dumps({"verdict": "disagreed", "origin": None}).encode(),
        capsule.BATCH: capsule._npz(arrays),
        capsule.STAGE: capsule._npz({}),
    }
    own |= {name: files[stem] for name in own if (stem := name.partition(".")[0]) in files}
    path.mkdir(parents=True)
    for name, raw in own.items():
        (path / name).write_bytes(raw)
    checkpoint.save_checkpoint(path / capsule.STATE, state, {})
    about = {
        "schema": capsule.SCHEMA,
        "step": 1,
        "candidate": candidate or plant(path),
        "reference": "jax",
        "thorough": True,
    }
    entries = {name: {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for name, raw in own.items()}
    seal_capsule(path, about | {"versions": {}, "machine": {}, "due": batch.digest(), "files": entries})
    return path


def seal_capsule(path: Path, about: Mapping[str, Any]) -> None:
    """Write about.json with a valid seal (digest)."""
    body = {key: value for key, value in about.items() if key != "seal"}
    (path / capsule.ABOUT).write_text(json.dumps({**body, "seal": capsule._seal(body)}))


def seal_checkpoint(folder: Path, **changes: Any) -> None:
    """Write a checkpoint's manifest again, for the files that are in the folder now."""
    body = {key: value for key, value in json.loads((folder / checkpoint.MANIFEST).read_text()).items()}
    del body["sha256"]
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != checkpoint.MANIFEST]
    body["files"] = {
        p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "sha256": checkpoint._sha256(p)} for p in files
    }
    body |= changes
    (folder / checkpoint.MANIFEST).write_text(json.dumps({**body, "sha256": checkpoint._seal(body)}))


def batch_arrays(batch: Batch) -> dict[str, Any]:
    """Return the arrays of a capsule's batch.npz."""
    return {f"{b}.{key}": array for b in capsule.BATCHES for key, array in batch.arrays.items()}

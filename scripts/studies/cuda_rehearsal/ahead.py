"""Compile the programs of `lockstep bench step` above the stand-in, so that a rented GPU's minutes go into steps.

    python -m lockstep.scripts.studies.cuda_rehearsal.ahead [--rows NAME…] [--jobs N]

Run it with the GPU machine's Python: on that machine while the GPU has other work, or on one with the same versions and
no GPU. Each row runs one step in a process of its own, `jobs` at a time. Programs go to Inductor's cache
(TORCHINDUCTOR_CACHE_DIR, if it is set), from which the bench loads them. gcc and nm build the stand-in.

Inductor keys its cache by the device's name: the GPU's name if there is one, else --name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.core.bench.rows import Row, chosen
from lockstep.core.config.file import load_config
from lockstep.scripts.commands.bench_step import CONFIGS
from lockstep.scripts.studies.cuda_rehearsal.build import build, preloaded, site_packages
from lockstep.scripts.studies.repository import ROOT

WORKER = "lockstep.scripts.studies.cuda_rehearsal.ahead_worker"


@dataclass(frozen=True)
class Arguments:
    """Choose the rows to compile and the folders.

    rows: names of the bench's rows; empty = all compiled ones. timeout: seconds per row. name: the device's name.
    """

    config: Path = CONFIGS["cuda"]
    rows: tuple[str, ...] = ()
    jobs: int = max(1, (os.cpu_count() or 2) // 2)
    timeout: int = 600
    cache: Path = ROOT / ".cache/cuda_rehearsal"
    name: str = "NVIDIA H100 80GB HBM3"


def main(arguments: Arguments) -> None:
    """Compile the chosen rows in order; print for each its duration or the reason of its failure."""
    python = Path(sys.executable)
    library = build(site_packages(python), arguments.cache.absolute() / "standin-ahead")
    name = _real_device() or arguments.name
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = sorted(chosen(arguments.rows), key=lambda row: (*arguments.rows, row.name).index(row.name))
        for said in pool.map(lambda row: _compile(row, library, name, arguments), rows):
            print(said, flush=True)


def _real_device() -> str | None:
    """Return the name of this machine's first GPU by its driver; None without one."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or None


def _compile(row: Row, library: Path, name: str, arguments: Arguments) -> str:
    """Compile one row, and return a line about it."""
    config = load_config(arguments.config, row.overrides("cuda"))
    if not config.compile.enabled:
        return f"{row.name}: nothing to compile"
    # More memory than any row takes: the bench itself reports a row that does not fit.
    variables = os.environ | preloaded(library, 400_000_000_000, name)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        command = [str(Path(sys.executable)), "-P", "-m", WORKER]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(config.model_dump(mode="json")),
                env=variables,
                cwd=ROOT,
                stdout=said,
                stderr=said,
                text=True,
                timeout=arguments.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{row.name}: no end within {arguments.timeout} s"
        said.seek(0)
        last = (said.read().strip().splitlines() or [f"ended by {done.returncode}"])[-1]
    return f"{row.name}: {time.monotonic() - started:.0f} s: {last}"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))

"""Check the families with `lockstep parity`: eager and compiled, FP32 and bf16. Writes docs/results/families.md.

python -m lockstep.scripts.studies.families            the missing cells, then the page
python -m lockstep.scripts.studies.families --page     the page alone
python -m lockstep.scripts.studies.families --device cuda [--page]    on a GPU: families_cuda.jsonl and .md
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import tyro

from lockstep.core.config.file import load_config
from lockstep.core.model.budget import parameter_count
from lockstep.core.model.families import FAMILIES
from lockstep.scripts.studies.parity_matrix import nearness
from lockstep.scripts.studies.repository import ROOT

# By device: its page, and its rows beside it under the same name.
PAGES = {"cpu": ROOT / "docs/results/families.md", "cuda": ROOT / "docs/results/families_cuda.md"}
CONFIG, STEPS = "configs/quickstart.toml", 2
PROGRAMS, POLICIES = ("eager", "compiled"), ("fp32", "bf16")
# A model of two blocks; windows and caps have an effect on its sequences of 64 tokens and on its first scores.
SMALL = {
    "model.layers": "2",
    "model.hidden": "128",
    "model.heads": "4",
    "model.kv-heads": "2",
    "model.ffn-hidden": "256",
    "train.sequence-length": "64",
    "train.batch-size": "16",
    "train.micro-batch-size": "8",
    "loss.chunk": "100",
}
OF_FAMILY = {
    "llama": {"model.rope-factor": "8", "model.rope-original": "64"},
    "gpt2": {"model.kv-heads": "4", "model.positions": "80"},
    "qwen2": {},
    "qwen3": {"model.head-width": "40"},
    "mistral": {"model.window": "20"},
    "gemma2": {
        "model.head-width": "40",
        "model.window": "20",
        "model.attention-cap": "0.5",
        "model.attention-scale": "0.2",
        "model.logits-cap": "0.5",
    },
}

Cell = tuple[str, str, str]


def settings(cell: Cell, device: str) -> dict[str, str]:
    """Return the settings of a cell (family, program, policy), as on the command line."""
    family, program, policy = cell
    of_cell = {
        "model.family": family,
        "precision.policy": policy,
        "compile.enabled": str(program == "compiled").lower(),
        "device": device,
    }
    return {**SMALL, **of_cell, **OF_FAMILY[family]}


def run(cell: Cell, device: str) -> dict[str, Any]:
    """Return one row: the check's verdict, its comparisons, the comparison nearest to its bound, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdict.json"
        flags = [f"--{key}={value}" for key, value in settings(cell, device).items()]
        command = [sys.executable, "-m", "lockstep", "parity", CONFIG, f"--steps={STEPS}", "--quick", f"--json={file}"]
        started = time.perf_counter()
        done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True)
        row: dict[str, Any] = {"cell": list(cell), "seconds": round(time.perf_counter() - started, 1)}
        if done.returncode == 2 or not file.exists():
            return row | {"verdict": "could not", "why": (done.stderr.strip().splitlines() or ["no verdict"])[-1]}
        verdict = json.loads(file.read_text(encoding="utf-8"))
    origin = verdict["origin"]
    why = f"{origin['stage']} ({origin['phase']}) at {origin['tap']}" if origin else ""
    near = max(map(nearness, verdict["stages"]))
    found = {"comparisons": len(verdict["stages"]), "nearest": near, "not_exercised": verdict["not_exercised"]}
    made = {} if device == "cpu" else {"machine": machine(device)}
    return row | {"verdict": verdict["verdict"], "why": why, **found, **made}


def machine(device: str) -> str:
    """Name the device and the versions."""
    if device == "cpu":
        name = f"{platform.machine()} {platform.system()}, CPU"
    else:
        import torch

        name = f"one {torch.cuda.get_device_name()}"
    return f"torch {version('torch').split('+')[0]}, jax {version('jax')}, {name}"


def page(rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """Return the page of a device."""
    lines_of, argument = PAGES[device].with_suffix(".jsonl").name, "" if device == "cpu" else f" --device {device}"
    machines = sorted({row["machine"] for row in rows if "machine" in row}) or [machine("cpu")]
    by_cell = {tuple(row["cell"]): row for row in rows}
    agreed = sum(row["verdict"] == "agreed" for row in by_cell.values())
    lines = [
        "# Families of models",
        "",
        f"Made by `python -m lockstep.scripts.studies.families{argument}` (resumable; rows: [{lines_of}]({lines_of})): "
        f"{agreed} of {len(CELLS)} cells agree. Each is `lockstep parity {CONFIG} --steps {STEPS} --quick` with a "
        "model of two blocks, two micro-batches of [8, 64] tokens and the settings of its family below. Several cells "
        f"ran at a time. {'; '.join(machines)}.",
        "",
        "| family | program | precision | verdict | comparisons | nearest to a bound on the distance | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        said = ("not run", "", "", "")
        if (row := by_cell.get(cell)) is not None:
            verdict = row["verdict"] + (f": {row['why']}" if row["why"] else "")
            if row.get("not_exercised"):
                verdict += f"; not exercised: {', '.join(row['not_exercised'])}"
            said = verdict, row.get("comparisons", ""), f"{row.get('nearest', 0):.2f}", f"{row['seconds']:.0f} s"
        lines.append(f"| {' | '.join(map(str, (*cell, *said)))} |")
    lines += ["", "| family | settings |", "|---|---|"]
    for family, own in OF_FAMILY.items():
        lines.append(f"| {family} | {' '.join(f'`--{key} {value}`' for key, value in own.items())} |")
    lines += ["", "The run files of published models (configs/families) have the published numbers of parameters:", ""]
    lines += ["| run file | family | parameters |", "|---|---|---|"]
    for path in sorted((ROOT / "configs/families").glob("*.toml")):
        model = load_config(path).model
        lines.append(f"| {path.name} | {model.family} | {parameter_count(model):,} |")
    return "\n".join([*lines, ""])


CELLS: list[Cell] = list(itertools.product(FAMILIES, PROGRAMS, POLICIES))


@dataclass
class Families:
    """Run the missing cells, and write the page."""

    page: bool = False
    """only write the page from the finished rows"""
    jobs: int = 2
    """number of cells at a time; each computes on one thread"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device of the candidate; the reference runs on the CPU"""


def main() -> int:
    """Run the cells, write each row at once, write the page; 0 if every cell agrees."""
    options = tyro.cli(Families)
    at = PAGES[options.device]
    lines = at.with_suffix(".jsonl")
    there = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    rows = [row for row in there if row["verdict"] == "agreed" and tuple(row["cell"]) in CELLS]
    if not options.page:
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = {tuple(row["cell"]) for row in rows}
        left = [cell for cell in CELLS if cell not in done]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for row in pool.imap_unordered(partial(run, device=options.device), left):
                rows.append(row)
                lines.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
                print(*row["cell"], row["verdict"], row["why"], f"{row['seconds']:.0f} s", flush=True)
    at.write_text(page(rows if not options.page else there, options.device), encoding="utf-8")
    return int(sum(row["verdict"] == "agreed" for row in rows) < len(CELLS))


if __name__ == "__main__":
    sys.exit(main())

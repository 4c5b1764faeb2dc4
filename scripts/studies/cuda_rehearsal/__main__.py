"""Rehearse the trainer's H100 step without an H100. Writes docs/results/cuda_rehearsal.jsonl and .md.

    python -m lockstep.scripts.studies.cuda_rehearsal --python V/bin/python            the missing cases, then the page
    python -m lockstep.scripts.studies.cuda_rehearsal --page                           the page alone
    python -m lockstep.scripts.studies.cuda_rehearsal --python V/bin/python --only "policy; head torch"

V: an environment with a CUDA build of torch and the packages of pyproject.toml but JAX's; no GPU, no driver. gcc and nm
build the stand-in in --cache. A case is one line with torch's version; to run it again, delete its line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.scripts.studies.cuda_rehearsal.build import build, environment, site_packages
from lockstep.scripts.studies.cuda_rehearsal.cases import RUNS, Case, cases
from lockstep.scripts.studies.cuda_rehearsal.page import page
from lockstep.scripts.studies.repository import ROOT

LINES = ROOT / "docs/results/cuda_rehearsal.jsonl"
WORKER = "lockstep.scripts.studies.cuda_rehearsal.worker"


@dataclass(frozen=True)
class Arguments:
    """Choose the cases to run.

    only: parts of the names of cases, separated by semicolons; empty = all. timeout: seconds per case.
    """

    python: Path | None = None
    page: bool = False
    only: str = ""
    cache: Path = ROOT / ".cache/cuda_rehearsal"
    lines: Path = LINES
    timeout: int = 3600


def main(arguments: Arguments) -> None:
    """Run the cases that have no line yet under this torch, and write the page."""
    if arguments.python is not None and not arguments.page:
        _run(arguments, arguments.python.absolute())
    arguments.lines.with_suffix(".md").write_text(page(read_lines(arguments.lines)), encoding="utf-8")


def _run(arguments: Arguments, python: Path) -> None:
    site = site_packages(python)
    version = next(site.glob("torch-*.dist-info")).name.removeprefix("torch-").removesuffix(".dist-info")
    library = build(site, arguments.cache.absolute() / f"standin-{version}")
    there = {(line["case"], line["environment"]) for line in read_lines(arguments.lines)}
    wanted = [part.strip() for part in arguments.only.split(";") if part.strip()]
    for case in cases():
        if (case.name, version) in there or (wanted and not any(part in case.name for part in wanted)):
            continue
        found = {"case": case.name, "group": case.group, "environment": version}
        found = trimmed(found | run_case(case, python, library, arguments))
        lines = JsonLines(arguments.lines)
        lines.append(found)
        lines.close()
        print(f"{'ran' if found['ran'] else 'no '}  {case.name}  {found.get('error', '')[:200]}", flush=True)


def run_case(case: Case, python: Path, library: Path, arguments: Arguments) -> dict[str, Any]:
    """Run one case with empty compiler caches; with several ranks, return the first rank's line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps(case.asked()))
        variables = os.environ | environment(library, folder, case.memory) | {"PYTHONPATH": str(ROOT / "src")}
        if "deterministic" in case.settings:
            variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", "-m"]
        command = [str(python), "-m", *(launcher if case.ranks > 1 else []), WORKER]
        said, result = folder / "said", folder / "result.json"
        with said.open("w") as errors:
            process = subprocess.Popen(
                [*command, str(folder / "asked.json"), str(result)],
                env=variables,
                cwd=ROOT,
                stdout=errors,
                stderr=errors,
            )
            try:
                code = process.wait(arguments.timeout)
            except subprocess.TimeoutExpired:
                return {"ran": False, "error": f"no end within {arguments.timeout} s"}
            finally:
                # torchrun then ends its ranks.
                process.terminate()
                process.wait()
        if not result.exists():
            last = (said.read_text(errors="replace").strip().splitlines() or [""])[-1]
            return {"ran": False, "error": f"ended by {_signal(code)}: {last[:200]}"}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def trimmed(line: dict[str, Any]) -> dict[str, Any]:
    """Remove this machine's folders and, except in the runs, names of kernels: the page needs only their number."""
    if not line["ran"]:
        return {**line, "error": re.sub(r"(/[\w.+-]+)+/", "", line["error"])}
    if line["group"] == RUNS:
        return line
    return {key: value for key, value in line.items() if key not in ("kernels", "triton", "generated")}


def _signal(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))

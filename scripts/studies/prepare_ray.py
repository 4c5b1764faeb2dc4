"""Measure a preparation over Ray on this machine: seconds by the number of workers, and kills.

    python -m lockstep.scripts.studies.prepare_ray                  measures all; writes docs/results/prepare_ray.json
    python -m lockstep.scripts.studies.prepare_ray --rows kills     only some rows; earlier rows are kept
    python -m lockstep.scripts.studies.prepare_ray --page           writes docs/results/prepare_ray.md from it

Text is made from Python's standard library. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.bench.files import read_results
from lockstep.core.data.prepare import PrepareSettings, prepare
from lockstep.core.data.sources import list_source
from lockstep.core.files.atomic import write_atomically
from lockstep.core.versions import version_of
from lockstep.scripts.studies.repository import ROOT

SUITE, SCHEMA = "prepare_ray", 1
FILE = ROOT / "docs/results/prepare_ray.json"
MB = 10**6
SETTINGS: dict[str, Any] = {"vocab_size": 1024, "val_fraction": 0.1}


def main(argv: list[str]) -> int:
    """Measure the rows, or write the page."""
    measures: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
        "workers": measure_workers,
        "kills": measure_kills,
        "drivers": measure_drivers,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=measures, default=list(measures))
    parser.add_argument("--size", type=int, default=8, help="size in MB of the text whose preparation is timed")
    parser.add_argument("--kills", type=int, default=10, help="number of kills of a worker, and of the command")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page beside the JSON")
    options = parser.parse_args(argv)
    if options.page:
        options.json.with_suffix(".md").write_text(page(read_results(options.json, SUITE, SCHEMA)))
        return 0
    results = read_results(options.json, SUITE, SCHEMA) if options.json.is_file() else {}
    versions = {name: version_of(name) for name in ("ray", "tokenizers", "pyarrow", "numpy")}
    device = {"name": f"{platform.machine()} CPU", "cores": os.cpu_count()}
    load = min(round(os.getloadavg()[0]), results.get("load", 1000))
    results |= {"load": load, "schema": SCHEMA, "suite": SUITE, "device": device}
    results["versions"] = {"python": platform.python_version(), **versions}
    # Ray puts a socket below it, so its name must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = str(Path(folder, "r"))
        for row in options.rows:
            results[row] = measures[row](Path(folder), options)
            write_atomically(options.json, [(json.dumps(results, indent=1) + "\n").encode()])
            print(row, json.dumps(results[row]), flush=True)
    return 0


def measure_workers(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the processes of this machine and Ray, each with 1, 2 and 4 workers, on the same text."""
    source = write_text(folder / "large", options.size * MB)
    rows, seen = [], set()
    for engine in ("local", "ray"):
        for workers in (1, 2, 4):
            out = folder / "out"
            found = run({"out": out, "source": source, "workers": workers, "engine": engine, "shard_tokens": 200_000})
            seen.add(digest(out))
            rows.append({"engine": engine, "workers": workers, "seconds": found["seconds"], "start": found["start"]})
            shutil.rmtree(out)
    bytes_ = sum(path.stat().st_size for path in source.iterdir())
    return [{**row, "bytes": bytes_, "equal": len(seen) == 1} for row in rows]


def measure_kills(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill one of four workers at a random point of each preparation; compare with one that was left alone."""
    source, expected, shards = _undisturbed(folder)
    draw, rows = random.Random(0), []
    for _ in range(options.kills):
        at = draw.randrange(shards - 3)
        found = run({"out": folder / "killed", "source": source, "workers": 4, "kill": [at], "shard_tokens": 20_000})
        equal = digest(folder / "killed") == expected
        rows.append({"at": at, "of": shards, "redone": found["redone"], "seconds": found["seconds"], "equal": equal})
        shutil.rmtree(folder / "killed")
    return rows


def measure_drivers(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill the command itself when a random number of shards is there, start it again, and compare."""
    source, expected, shards = _undisturbed(folder)
    draw, rows = random.Random(1), []
    for _ in range(options.kills):
        at, out = draw.randrange(1, shards - 3), folder / "killed"
        arguments = {"out": out, "source": source, "workers": 4, "shard_tokens": 20_000}
        process = subprocess.Popen(_command(arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob("*.bin"))) < at:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = run(arguments)
        row = {"at": at, "of": shards, "kept": found["kept"], "written": found["written"]}
        rows.append({**row, "equal": digest(out) == expected})
        shutil.rmtree(out)
    return rows


def write_text(folder: Path, size: int) -> Path:
    """Write JSON lines of `size` bytes of text together, in eight files, no two documents equal; return `folder`."""
    texts = [Path(file.path).read_bytes().decode("utf-8", "ignore") for file in list_source(None).files]
    folder.mkdir(exist_ok=True)
    number = 0
    for part in range(8):
        written = 0
        with open(folder / f"{part}.jsonl", "w", encoding="utf-8") as file:
            while written < size // 8:
                text = f"# {number}\n{texts[number % len(texts)][:20_000]}"
                written += file.write(json.dumps({"text": text}) + "\n")
                number += 1
    return folder


def run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what scripts/studies/on_ray.py reports."""
    done = subprocess.run(_command(arguments), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def digest(folder: Path) -> str:
    """Return the SHA-256 of all files of a preparation, by name."""
    files = [*folder.glob("*.bin"), folder / "index.json", folder / "plan.json", folder / "tokenizer.json"]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def page(results: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    device, versions, rows = results["device"], results["versions"], results["workers"]
    kills, drivers = results.get("kills", []), results.get("drivers", [])
    same = "gave the same bytes" if all(row["equal"] for row in rows) else "did NOT give the same bytes"
    lines = [
        "# A preparation over Ray",
        "",
        "`python -m lockstep.scripts.studies.prepare_ray`; why Ray, and how it is used, stands in",
        "[cluster.md](../guide/cluster.md).",
        "",
        f"{device['cores']} cores ({device['name']}), {', '.join(f'{name} {v}' for name, v in versions.items())}.",
        f"All on one machine, beside other programs that kept its cores busy (a load of {results['load']} and more):",
        "the times are many times those of a quiet machine and show no scaling. They are here for the equal bytes.",
        "",
        "## Seconds by the number of workers",
        "",
        f"{rows[0]['bytes'] / MB:.0f} MB of JSON lines, a vocabulary of {SETTINGS['vocab_size']:,}.",
        f"All {len(rows)} {same}.",
        "",
        "| engine | workers | seconds | of them before the first shard is begun |",
        "|---|--:|--:|--:|",
        *(f"| {row['engine']} | {row['workers']} | {row['seconds']:.1f} | {row['start']:.1f} |" for row in rows),
        "",
        "Before the first shard the source is read once and the tokenizer trained; with Ray, its start is in it.",
        "",
        *(_kills(kills) if kills else ["Kills of a worker: not measured (`--rows kills`).", ""]),
        *(_drivers(drivers) if drivers else ["Kills of the command: not measured (`--rows drivers`)."]),
    ]
    return "\n".join(lines) + "\n"


def _kills(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## One of four workers killed",
        "",
        "SIGKILL in the midst of a shard, at a random point:",
        f"{sum(row['equal'] for row in rows)} of {len(rows)} preparations ended with the bytes of one left alone.",
        "",
        "| after shard | of | parts begun again | equal bytes |",
        "|--:|--:|--:|---|",
        *(f"| {row['at']} | {row['of']} | {row['redone']} | {_yes(row['equal'])} |" for row in rows),
        "",
    ]


def _drivers(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## The command killed and started again",
        "",
        "SIGKILL to the command when so many shards were there, then the same command once more:",
        f"{sum(row['equal'] for row in rows)} of {len(rows)} ended with the same bytes.",
        "",
        "| shards there | of | kept by the second start | written by it | equal bytes |",
        "|--:|--:|--:|--:|---|",
        *(f"| {row['at']} | {row['of']} | {row['kept']} | {row['written']} | {_yes(row['equal'])} |" for row in rows),
    ]


def _yes(equal: bool) -> str:
    return "yes" if equal else "NO"


def _undisturbed(folder: Path) -> tuple[Path, str, int]:
    source, out = folder / "small", folder / "alone"
    if not out.exists():
        write_text(source, MB)
        prepare(PrepareSettings(out, str(source), shard_tokens=20_000, **SETTINGS))
    return source, digest(out), len(list(out.glob("*.bin")))


def _command(arguments: dict[str, Any]) -> list[str]:
    text = json.dumps(SETTINGS | arguments, default=str)
    return [sys.executable, "-m", "lockstep.scripts.studies.on_ray", text]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

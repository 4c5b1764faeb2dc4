"""Measure the start of a run, and `lockstep data prepare`: docs/results/start.md.

    python -m lockstep.scripts.studies.start --before CHECKOUT     # from the command to its first record
    python -m lockstep.scripts.studies.start --page docs/results/start.md

CHECKOUT is a clone at the commit to compare with; it uses this checkout's data and environment. Both are started in
turns, each time with a new run folder: cold, with empty caches of torch.compile and JAX, and warm, with the caches of
the start before. Preparing is measured beside plain `tokenizers` on the same files, also in turns.

The JSON: {"schema", "suite", "device", "versions", "commits": {"before", "now"}, "rows": [{"program", "caches", "runs":
{"before": [RUN], "now": [RUN]}}], "prepare": {"bytes", "ours": [{PART: seconds}], "plain": {WAY: [seconds]}}}. A RUN
has "phases" (seconds by name, whose sum is the total), "cpu" (seconds of the trainer's process), "loss" and
"grad_norm".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.bench.bars import Bar, Panel, picture
from lockstep.core.bench.files import read_results, write_page
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.scripts.studies.repository import ROOT
from lockstep.scripts.studies.start_marks import PHASES

SCHEMA, SUITE = 1, "start"
CONFIG = "configs/quickstart.toml"
PROGRAMS = {"compiled": [], "eager": ["--compile.enabled", "false"]}
# Cold before warm: the warm starts use the caches of the last cold start.
CACHES = "cold", "warm"
LIMIT = 900.0
SIDES = "before", "now"
# Ways to call plain `tokenizers`, with its threads on all cores: documents per call, and the method.
PLAIN = {
    "encode_batch, 64 documents a call": (64, "encode_batch"),
    "encode_batch, all documents in a call": (1 << 30, "encode_batch"),
    "encode_batch_fast, all documents in a call": (1 << 30, "encode_batch_fast"),
}


def main(argv: list[str]) -> int:
    """Measure rows, or write the page."""
    parser = argparse.ArgumentParser(description="Measure the time of a run's start.")
    parser.add_argument("rows", nargs="*", help="rows to measure: PROGRAM-CACHES, or prepare (default: all)")
    parser.add_argument("--before", type=Path, help="a clone at the commit to compare with")
    parser.add_argument("--runs", type=int, default=5, help="number of starts of each checkout, in turns")
    parser.add_argument("--cold", type=int, default=2, help="number of cold starts, which take longer")
    parser.add_argument(
        "--caches", type=Path, help="folder that keeps the caches for another call (default: none are kept)"
    )
    parser.add_argument("--json", type=Path, default=Path("start.json"))
    parser.add_argument("--page", type=Path, help="measure nothing; write the page and its picture")
    options = parser.parse_args(argv)
    if options.page:
        results = read_results(options.json, SUITE, SCHEMA)
        write_page(options.page, page(results), figure(results), SHOWS)
        return 0
    checkouts = {"before": options.before, "now": ROOT}
    if options.before is None:
        raise UserError("name a clone to compare with: --before CHECKOUT")
    names = options.rows or [*(f"{program}-{caches}" for program in PROGRAMS for caches in CACHES), "prepare"]
    results = read_results(options.json, SUITE, SCHEMA) if options.json.is_file() else _about(checkouts)
    with tempfile.TemporaryDirectory(prefix="lockstep-start-") as folder:
        for name in names:
            if name == "prepare":
                results["prepare"] = _prepare(options.runs, Path(folder))
            else:
                program, _, caches = name.partition("-")
                count = options.cold if caches == "cold" else options.runs
                where = options.caches or Path(folder, "caches"), Path(folder, "runs")
                row = {"program": program, "caches": caches, "runs": _row(program, caches, count, checkouts, *where)}
                kept = [old for old in results["rows"] if (old["program"], old["caches"]) != (program, caches)]
                results["rows"] = [*kept, row]
            write_atomically(options.json, [(json.dumps(results, indent=1) + "\n").encode()])
    return 0


def _about(checkouts: dict[str, Path]) -> dict[str, Any]:
    from lockstep.torch_backend.tools.bench import versions

    def commit(checkout: Path) -> str:
        git = ["git", "-C", str(checkout)]
        found = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return found.stdout.strip() + ("+" if changed.stdout else "")

    return {
        "schema": SCHEMA,
        "suite": SUITE,
        "device": {"name": f"{platform.machine()} CPU", "cores": os.cpu_count()},
        "versions": versions(),
        "commits": {side: commit(checkout) for side, checkout in checkouts.items()},
        "rows": [],
        "prepare": None,
    }


def _row(
    program: str, caches: str, count: int, checkouts: dict[str, Path], kept_in: Path, out: Path
) -> dict[str, list[Any]]:
    """Start each checkout `count` times, in turns; a warm row begins with an uncounted start of each."""
    runs: dict[str, list[Any]] = {side: [] for side in SIDES}
    for number in range(count + (caches == "warm")):
        for side in SIDES:
            kept = kept_in / side / program
            if caches == "cold":
                shutil.rmtree(kept, ignore_errors=True)
            run = [CONFIG, "--data.path", str(ROOT / "data/stdlib"), *PROGRAMS[program]]
            found = first_record(checkouts[side], kept, out, run)
            print(program, caches, side, f"{sum(found['phases'].values()):.2f} s, CPU {found['cpu']:.2f} s", flush=True)
            if caches == "cold" or number:
                runs[side].append(found)
    return runs


def first_record(checkout: Path, caches: Path, runs: Path, run: Sequence[str]) -> dict[str, Any]:
    """Start `lockstep train` until its first record, and return a RUN as start_marks.py wrote it.

    caches: folder of torch.compile's and JAX's caches. runs: folder for the run, removed first. run: run file and
    flags. Raises UserError if there was no record.
    """
    shutil.rmtree(runs, ignore_errors=True)
    out = runs.with_suffix(".json")
    out.unlink(missing_ok=True)
    for name in ("inductor", "jax"):
        (caches / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "JAX_COMPILATION_CACHE_DIR": str(caches / "jax"),
    }
    marks = ROOT / "scripts/studies/start_marks.py"
    with out.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-P", str(marks), str(out), str(time.monotonic()), "train", *run, "--out", str(runs)]
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not out.is_file():
        raise UserError(f"no first record: {out.with_suffix('.log').read_text()[-2000:]}")
    return dict(json.loads(out.read_text()))


def _prepare(rounds: int, folder: Path) -> dict[str, Any]:
    """Prepare the standard library `rounds` times, and encode the same files by plain `tokenizers`, in turns."""
    from lockstep.core.data.sources import list_source

    size = list_source(None).size
    ours: list[dict[str, float]] = []
    plain: dict[str, list[float]] = {way: [] for way in PLAIN}
    for _ in range(rounds):
        shutil.rmtree(folder / "data", ignore_errors=True)
        ours.append(_call(f"ours({str(folder / 'data')!r})"))
        for way in PLAIN:
            plain[way].append(_call(f"plain({str(folder / 'data')!r}, {way!r})"))
        print("prepare", ours[-1], {way: round(seconds[-1], 2) for way, seconds in plain.items()}, flush=True)
    return {"bytes": size, "ours": ours, "plain": plain}


def _call(expression: str) -> Any:
    """Evaluate a call of a function of this module in a process of its own, with the library's threads on all cores."""
    code = f"import json; from lockstep.scripts.studies.start import *; print(json.dumps({expression}))"
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{expression}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def ours(folder: str) -> dict[str, float]:
    """Prepare the standard library into a folder; return the seconds of each part, whose sum is the total."""
    from lockstep.core.data import prepare as module

    parts: dict[str, float] = {}

    def timed(name: str, part: str) -> None:
        true: Callable[..., Any] = getattr(module, name)

        def call(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            found = true(*given, **named)
            # A generator's time counts for the code that iterates over it.
            found = list(found) if name in ("sample_training_text", "encode_shards") else found
            parts[part] = parts.get(part, 0.0) + time.perf_counter() - begun
            return found

        setattr(module, name, call)

    timed("list_source", "list")
    timed("read_catalog", "read and split")
    timed("sample_training_text", "sample")
    timed("train_tokenizer", "train the tokenizer")
    timed("encode_shards", "encode, pack, digest, write")
    timed("_index_of", "measure the held-out part")
    begun = time.perf_counter()
    module.prepare(module.PrepareSettings(out=folder, vocab_size=4096, workers=os.cpu_count() or 1))
    parts["other"] = time.perf_counter() - begun - sum(parts.values())
    return parts


def plain(folder: str, way: str) -> float:
    """Return seconds in which plain `tokenizers` encodes the texts of the standard library, which are in memory."""
    from tokenizers import Tokenizer

    from lockstep.core.data.documents import read_documents
    from lockstep.core.data.sources import list_source

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = [one.text for file in list_source(None).files for one in read_documents(file, "text") if one.text]
    size, method = PLAIN[way]
    encode = getattr(tokenizer, method)
    begun = time.perf_counter()
    for first in range(0, len(texts), size):
        for encoding in encode(texts[first : first + size], add_special_tokens=False):
            encoding.ids  # noqa: B018 - reading the list is the measured work
    return time.perf_counter() - begun


SHOWS = "Bars: seconds from the command to the first record, before and now, and the phases of a warm compiled start"


def _total(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [sum(run["phases"].values()) for run in runs]


def _ratio(row: dict[str, Any], of: Callable[[dict[str, Any]], float]) -> list[float]:
    """Return now / before, by turn."""
    pairs = zip(row["runs"]["now"], row["runs"]["before"], strict=True)
    return [of(now) / of(before) for now, before in pairs]


def _whole(run: dict[str, Any]) -> float:
    return float(sum(run["phases"].values()))


def figure(results: dict[str, Any]) -> str:
    """Return docs/results/start.svg."""
    panels = []
    for row in results["rows"]:
        bars = []
        for side in SIDES:
            seconds = _total(row["runs"][side])
            middle, ours = statistics.median(seconds), side == "now"
            name = f"{side}, {results['commits'][side]}"
            bars.append(Bar(name, middle, f"{middle:.1f} s", ours, min(seconds), max(seconds)))
        panels.append(Panel(f"{row['program']}, {row['caches']} caches: seconds to the first record", bars))
    for row in results["rows"]:
        if (row["program"], row["caches"]) == ("compiled", "warm"):
            bars = [
                Bar(phase, value, f"{value:.2f} s", True)
                for phase in PHASES
                if (value := statistics.median(run["phases"][phase] for run in row["runs"]["now"])) > 0
            ]
            panels.append(Panel("compiled, warm caches, now: where the seconds go", bars))
    return picture("From `lockstep train` to the first record", "Lines: fastest and slowest start", panels)


def page(results: dict[str, Any]) -> str:
    """Return docs/results/start.md, without its picture."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    device, commits = results["device"], results["commits"]
    lines = [
        "# The start of a run",
        "",
        f"Measured by `python -m lockstep.scripts.studies.start --before CHECKOUT`, CHECKOUT a clone at "
        f"{commits['before']}; made from [start.json](start.json) by the same with `--page`. The quickstart, checked "
        f"at step 1. {device['name']}, {device['cores']} cores; {versions}. Before and now are started in turns.",
        "",
        "Cold: empty caches of torch.compile and of JAX. Warm: those that an earlier start left. CPU: seconds of the "
        "trainer's process until its first record, which other work on the machine changes less than the clock.",
        "",
        f"| program | caches | before ({commits['before']}) | now | now / before, by turn | CPU before | CPU now "
        "| ratio | starts |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        seconds = {side: _total(row["runs"][side]) for side in SIDES}
        cpu = {side: statistics.median(run["cpu"] for run in row["runs"][side]) for side in SIDES}
        words = [f"{statistics.median(of):.1f} s ({min(of):.1f} to {max(of):.1f})" for of in seconds.values()]
        shares = _ratio(row, _whole)
        clock = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        used = f"{statistics.median(_ratio(row, lambda run: float(run['cpu']))):.2f}"
        cells = [*words, clock, f"{cpu['before']:.1f} s", f"{cpu['now']:.1f} s", used, str(len(seconds["now"]))]
        lines.append(f"| {row['program']} | {row['caches']} | {' | '.join(cells)} |")
    lines += ["", *_same_words(results["rows"]), "", "## Where the seconds go", ""]
    lines += ["Medians of each phase, before → now. The phases of a start add up to it.", ""]
    names = [f"{row['program']}, {row['caches']}" for row in results["rows"]]
    lines += [f"| phase | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for phase in PHASES:
        cells = [
            " → ".join(f"{statistics.median(run['phases'][phase] for run in row['runs'][side]):.2f}" for side in SIDES)
            for row in results["rows"]
        ]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_prepare_words(results["prepare"])])


def _same_words(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines on whether first steps of before and now agree in every bit of loss and gradient norm."""
    differing = [
        f"{row['program']}, {row['caches']}"
        for row in rows
        if len({(run["loss"], run["grad_norm"]) for side in SIDES for run in row["runs"][side]}) > 1
    ]
    said = f"differ in {'; '.join(differing)}" if differing else "are the same bits in all starts of a row"
    return [f"Loss and gradient norm of the first step {said}."]


def _prepare_words(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    megabytes = found["bytes"] / 1e6
    ours = {part: statistics.median(run[part] for run in found["ours"]) for part in found["ours"][0]}
    encode = [run["encode, pack, digest, write"] for run in found["ours"]]
    lines = [
        "## `lockstep data prepare`",
        "",
        f"The standard library, {megabytes:.1f} MB, with a tokenizer trained for it; medians of {len(encode)} turns.",
        "",
        "| part | seconds | MB/s |",
        "|---|--:|--:|",
    ]
    whole = statistics.median(sum(run.values()) for run in found["ours"])
    rows = {**ours, "**all**": whole}
    lines += [f"| {part} | {seconds:.2f} | {megabytes / max(seconds, 1e-9):,.1f} |" for part, seconds in rows.items()]
    lines += [
        "",
        "Beside plain `tokenizers` on all cores, which has the texts in memory and writes nothing. Lockstep's encoding "
        "starts its processes, reads the files again, packs, digests and writes the shards.",
        "",
        "| | seconds | MB/s | Lockstep's MB/s / it, by turn |",
        "|---|--:|--:|--:|",
        f"| Lockstep, one process a core | {statistics.median(encode):.2f} | "
        f"{megabytes / statistics.median(encode):.2f} | |",
    ]
    for way, seconds in found["plain"].items():
        times = [theirs / own for theirs, own in zip(seconds, encode, strict=True)]
        middle = statistics.median(seconds)
        spread = f"{statistics.median(times):.2f}× ({min(times):.2f} to {max(times):.2f})"
        lines.append(f"| {way} | {middle:.2f} | {megabytes / middle:.2f} | {spread} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure `lockstep data prepare` at scale: speed and memory by the size of the source, kinds of files, kills.

    python -m lockstep.scripts.studies.prepare                    measures all; writes docs/results/prepare.json
    python -m lockstep.scripts.studies.prepare --rows sizes --sizes 2000    of it a part; earlier rows stay
    python -m lockstep.scripts.studies.prepare --page             writes docs/results/prepare.md from it

The text is made from Python's standard library: slices of its files, each with a line of its own before it, so that no
two documents are equal. An hour on two cores, most of it the encoding of 2 GB.
"""

from __future__ import annotations

import argparse
import gzip
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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.core.bench.files import read_results
from lockstep.core.files.atomic import write_atomically
from lockstep.scripts.studies.prepare_page import SIZES, page
from lockstep.scripts.studies.repository import ROOT

SUITE, SCHEMA = "prepare", 1
FILE = ROOT / "docs/results/prepare.json"
# Text that is encoded beside plain `tokenizers`: of one shard, and of several for each core; and in how many turns.
TURNS = {10: 3, 100: 2}
KINDS = ("jsonl", "jsonl.gz", "parquet", "txt")
MB = 10**6
KILLS = 30
# How often the memory of a tree of processes is measured, in seconds.
EVERY = 0.5
VOCABULARY = 4096


def main(argv: list[str]) -> int:
    """Measure the rows, or write the page."""
    measures: dict[str, Callable[[Path, list[int]], Any]] = {
        "kills": measure_kills,
        "documents": measure_documents,
        "kinds": measure_kinds,
        "tokenizers": measure_tokenizers,
        "words": measure_words,
        "sizes": measure_sizes,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=measures, default=list(measures))
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES), help="MB, of sizes, words")
    parser.add_argument("--folder", type=Path, help="where text and shards lie meanwhile (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--page", action="store_true", help="measure nothing: write the page beside the JSON")
    options = parser.parse_args(argv)
    if options.page:
        options.json.with_suffix(".md").write_text(page(read_results(options.json, SUITE, SCHEMA)))
        return 0
    results = read_results(options.json, SUITE, SCHEMA) if options.json.is_file() else {}
    results |= {"schema": SCHEMA, "suite": SUITE, **_about()}
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-prepare-", dir=options.folder) as folder:
        for row in options.rows:
            load = os.getloadavg()[0]
            found = measures[row](Path(folder), options.sizes)
            if row in ("sizes", "words"):
                kept = [one for one in results.get(row, []) if one["size"] not in options.sizes]
                found = sorted([*kept, *found], key=lambda one: int(one["size"]))
            results[row] = found
            results.setdefault("load", {})[row] = round(load, 1)
            write_atomically(options.json, [(json.dumps(results, indent=1) + "\n").encode()])
            print(row, json.dumps(results[row]), flush=True)
    return 0


def _about() -> dict[str, Any]:
    from importlib.metadata import version

    versions = {name: version(name) for name in ("tokenizers", "pyarrow", "numpy", "fsspec")}
    return {
        "device": {"name": f"{platform.machine()} CPU", "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **versions},
    }


def documents(size: int, seed: int = 0) -> Iterator[str]:
    """Yield texts that are together `size` bytes or a little more, and each another one."""
    from lockstep.core.data.sources import list_source

    draw = random.Random(seed)
    texts = [Path(file.path).read_bytes().decode("utf-8", "ignore") for file in list_source(None).files]
    texts = [text for text in texts if len(text) > 2000]
    done = number = 0
    while done < size:
        text = draw.choice(texts)
        begin = draw.randrange(len(text) - 1000)
        document = f"# document {number} of {seed}\n{text[begin : begin + draw.randint(500, 20_000)]}"
        yield document
        done += len(document.encode())
        number += 1


def write_lines(folder: Path, size: int, files: int = 4) -> Path:
    """Write `size` bytes of documents as JSON lines into files of a folder."""
    folder.mkdir()
    for number in range(files):
        with (folder / f"part-{number}.jsonl").open("w") as out:
            for text in documents(size // files, number):
                out.write(json.dumps({"text": text}) + "\n")
    return folder


def write_kind(kind: str, path: Path, size: int) -> None:
    """Write one file of `kind`: of parquet a single group of rows, of plain text a single document."""
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"text": pa.array(documents(size), pa.large_string())})
        pq.write_table(table, path, row_group_size=1 << 40)
        return
    with gzip.open(path, "wt", 1) if kind.endswith("gz") else path.open("w") as out:
        for text in documents(size):
            out.write(f"{text}\n" if kind == "txt" else json.dumps({"text": text}) + "\n")


def run(expression: str) -> dict[str, Any]:
    """Evaluate a call of a function of this module in a process of its own; add the peak memory of it and its children.

    `peak` is in bytes, of all its processes together: proportional set sizes, in which a page that several share is
    counted once.
    """
    code = f"""
import json
from lockstep.scripts.studies.prepare import *
if __name__ == "__main__":
    print(json.dumps({expression}))
"""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "out"), "w+") as out:
        script = Path(folder, "run.py")
        script.write_text(code)
        process = subprocess.Popen([sys.executable, "-P", str(script)], stdout=out, start_new_session=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(EVERY)
        if process.returncode:
            raise RuntimeError(f"{expression} ended with {process.returncode}")
        out.seek(0)
        return {**json.loads(out.read()), "peak": peak}


def _tree_bytes(session: int) -> int:
    """Return the memory of all processes of a session, in bytes."""
    total = 0
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            if int((place / "stat").read_text().rsplit(")", 1)[1].split()[3]) == session:
                lines = (place / "smaps_rollup").read_text().splitlines()
                total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, IndexError):
            continue
    return total


def prepared(source: str, out: str, workers: int, tokenizer: str | None = None) -> dict[str, Any]:
    """Prepare, with a given tokenizer or a trained one; return seconds of each stage."""
    from lockstep.core.data.prepare import PrepareSettings, Progress, prepare

    seconds: dict[str, float] = {}
    stage, since = "read", time.perf_counter()

    def on_progress(progress: Progress) -> None:
        nonlocal stage, since
        now = time.perf_counter()
        # A report of reading comes at the end of a file, those of the other stages at their beginning.
        seconds[stage] = seconds.get(stage, 0.0) + now - since
        stage, since = progress.stage, now

    vocabulary = None if tokenizer else VOCABULARY
    settings = PrepareSettings(out, source, vocabulary, tokenizer=tokenizer, workers=workers)
    index = prepare(settings, on_progress).index
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - since
    text = index.train.text_bytes + index.val.text_bytes
    tokens = index.train.tokens + index.val.tokens
    return {"seconds": seconds, "text": text, "tokens": tokens, "shards": len(index.train.shards)}


def cataloged(source: str) -> dict[str, Any]:
    """Read a source once, and plan its shards; return seconds and documents."""
    from lockstep.core.data.catalog import read_catalog
    from lockstep.core.data.plan import plan_shards
    from lockstep.core.data.sources import list_source

    begun = time.perf_counter()
    catalog = read_catalog(list_source(source), "text", 0.01, lambda done: None)
    seconds = time.perf_counter() - begun
    shards = len(list(plan_shards(catalog, 1 << 24)))
    text = int(catalog.text_bytes.sum())
    return {"seconds": seconds, "text": text, "documents": len(catalog.file), "shards": shards}


def encoded(source: str, tokenizer: str, way: str) -> dict[str, Any]:
    """Encode a source's texts, which are in memory, by plain `tokenizers` on all cores; seconds."""
    from tokenizers import Tokenizer

    from lockstep.core.data.documents import read_documents
    from lockstep.core.data.sources import list_source

    plain = Tokenizer.from_file(tokenizer)
    texts = [one.text or "" for file in list_source(source).files for one in read_documents(file, "text")]
    encode = getattr(plain, way)
    begun = time.perf_counter()
    for first in range(0, len(texts), 64):
        for encoding in encode(texts[first : first + 64], add_special_tokens=False):
            encoding.ids  # noqa: B018 - the list is the result
    return {"seconds": time.perf_counter() - begun, "text": sum(len(text.encode()) for text in texts)}


def measure_sizes(folder: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """Prepare sources of each size, with a process a core, and a tokenizer that is trained."""
    return _sizes(folder, sizes, None)


def measure_words(folder: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """Prepare sources of each size with a tokenizer of whole words, which is faster than one of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Counter(word for text in documents(2 * MB) for word in text.split())
    vocabulary = {word: number for number, word in enumerate(["<unk>", *dict(words.most_common(VOCABULARY - 2))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "words.json"))
    return _sizes(folder, sizes, folder / "words.json")


def _sizes(folder: Path, sizes: list[int], tokenizer: Path | None) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        source = write_lines(folder / "source", size * MB)
        out = folder / "out"
        given = None if tokenizer is None else str(tokenizer)
        found = run(f"prepared({str(source)!r}, {str(out)!r}, {os.cpu_count()}, {given!r})")
        rows.append({"size": size, **found, "load": round(os.getloadavg()[1], 1)})
        print(rows[-1], flush=True)
        shutil.rmtree(source)
        shutil.rmtree(out)
    return rows


def measure_kinds(folder: Path, _: list[int]) -> list[dict[str, Any]]:
    """Read one file of each kind and size for the catalogue."""
    rows = []
    for kind in KINDS:
        for size in SIZES[:2]:
            path = folder / f"one.{kind}"
            write_kind(kind, path, size * MB)
            rows.append({"kind": kind, "size": size, **run(f"cataloged({str(path)!r})")})
            print(rows[-1], flush=True)
            path.unlink()
    return rows


def measure_documents(folder: Path, _: list[int]) -> list[dict[str, Any]]:
    """Read as many bytes in few documents and in many."""
    rows = []
    for count in (10_000, 3_000_000):
        path = folder / "many.jsonl"
        with path.open("w") as out:
            for number in range(count):
                out.write(json.dumps({"text": f"{number} ".ljust(120 * MB // count, "x")}) + "\n")
        rows.append(run(f"cataloged({str(path)!r})"))
        path.unlink()
    return rows


def measure_tokenizers(folder: Path, _: list[int]) -> list[dict[str, Any]]:
    """Encode the same text by Lockstep and by plain `tokenizers`, in turns."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    rows = []
    for size, turns in TURNS.items():
        source, out = write_lines(folder / "little", size * MB), folder / "little-out"
        for _turn in range(turns):
            shutil.rmtree(out, ignore_errors=True)
            ours = run(f"prepared({str(source)!r}, {str(out)!r}, {os.cpu_count()})")
            ways = ("encode_batch", "encode_batch_fast")
            plain = {
                way: run(f"encoded({str(source)!r}, {str(out / 'tokenizer.json')!r}, {way!r})")["seconds"]
                for way in ways
            }
            rows.append({"size": size, "text": ours["text"], "ours": ours["seconds"]["encode"], **plain})
            rows[-1]["shards"] = ours["shards"]
            print(rows[-1], flush=True)
        shutil.rmtree(source)
    return rows


def measure_kills(folder: Path, _: list[int]) -> dict[str, Any]:
    """Kill all processes of preparations at random times, prepare again, and compare every byte."""
    source = write_lines(folder / "killed", MB // 2)
    command = [sys.executable, "-m", "lockstep", "data", "prepare", "--data.source", str(source)]
    command += ["--model.vocab-size", "500", "--workers", "2", "--data.path"]
    begun = time.perf_counter()
    _small(command, folder / "unharmed")
    whole = time.perf_counter() - begun
    expected = _digests(folder / "unharmed")
    draw = random.Random(0)
    rows = []
    for number in range(KILLS):
        out = folder / f"killed-{number}"
        at = draw.uniform(0.2, 1.0) * whole
        killed = _small(command, out, at)
        found = sorted(path.name for path in out.glob("*")) if out.exists() else []
        _small(command, out)
        rows.append({"at": at, "killed": killed, "files": len(found), "equal": _digests(out) == expected})
        print(rows[-1], flush=True)
        shutil.rmtree(out)
    return {"seconds": whole, "shards": sum(name.endswith(".bin") for name in expected), "kills": rows}


def _small(command: list[str], out: Path, at: float | None = None) -> bool:
    """Prepare with small shards, and kill all of it after `at` seconds; return whether it was killed."""
    code = "import dataclasses; from lockstep.core.data import prepare as m; from lockstep.scripts import cli; "
    code += "true = m.prepare; small = lambda s, *a: true(dataclasses.replace(s, shard_tokens=1 << 14), *a); "
    code += "m.prepare = small; cli.main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *command[3:], str(out)],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(at)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    if process.returncode:
        raise RuntimeError(f"a preparation ended with {process.returncode}")
    return False


def _digests(folder: Path) -> dict[str, str]:
    names = ["index.json", "tokenizer.json", "plan.json", *sorted(path.name for path in folder.glob("*.bin"))]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""docs/results/prepare.md, from what scripts/studies/prepare.py measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

MB = 1e6
# Sources that are prepared, in MB.
SIZES = (100, 500, 2000)
_KINDS = {
    "jsonl": "JSON lines",
    "jsonl.gz": "JSON lines, gzipped",
    "parquet": "parquet, one group of rows",
    "txt": "plain text, one document",
}


def page(results: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    device = results["device"]
    load = ", ".join(f"{part} {value:g}" for part, value in results.get("load", {}).items())
    lines = [
        "# Preparing data at scale",
        "",
        f"Measured by `python -m lockstep.scripts.studies.prepare`; made from [prepare.json](prepare.json) by the same "
        f"with `--page`. {device['name']}, {device['cores']} cores; {versions}. Contenders that are compared "
        "took turns."
        + (
            f" The machine's load when a part began: {load}. Where a load is above the number of cores, other "
            "programs ran beside the preparation and made it slower."
            if load
            else ""
        ),
        "",
        "The text is made from Python's standard library: slices of 0.5 to 20 kB of its files, each with a line of its "
        "own, so that no two documents are equal. MB are 10⁶ bytes of text. Memory is that of all processes together "
        "at its peak, looked at every half second: proportional set sizes, in which a shared page counts once.",
    ]
    parts: dict[str, Callable[[Any], list[str]]] = {
        "sizes": _sizes,
        "words": _words,
        "kinds": _kinds,
        "documents": _documents,
        "tokenizers": _tokenizers,
        "kills": _kills,
    }
    for name, part in parts.items():
        if name in results:
            lines += ["", *part(results[name])]
    if missing := _missing(results, parts):
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _missing(results: dict[str, Any], parts: Iterable[str]) -> list[str]:
    """Return the rows of the study that are not there, as `--rows` and `--sizes` name them."""
    absent = [f"`--rows {name}`" for name in parts if name not in results]
    for name in ("sizes", "words"):
        there = {row["size"] for row in results.get(name, [])}
        absent += [f"`--rows {name} --sizes {size}`" for size in SIZES if there and size not in there]
    return absent


def _sizes(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## From 100 MB to 2 GB",
        "",
        "Four files of JSON lines, a tokenizer of 4,096 tokens trained on a sample of 16 MB, one worker a core. `load` "
        "is the machine's, the mean of the five minutes before a row ended: above 2, other programs had cores, too.",
        "",
        *_table(rows),
    ]


def _words(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "The same with a tokenizer of whole words that the user brings (`data.tokenizer`). It encodes faster. Stages "
        "and memory are the same, except for the tokenizer's own.",
        "",
        *_table(rows),
    ]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| source | read | tokenizer | encode | all | encode, MB/s | tokens | shards | peak memory | load |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{row['size']:,} MB"]
        cells += [f"{seconds[stage]:,.1f} s" for stage in ("read", "tokenizer", "encode")]
        cells += [f"{sum(seconds.values()):,.1f} s", f"{row['text'] / MB / seconds['encode']:.2f}"]
        cells += [f"{row['tokens']:,}", f"{row['shards']:,}", f"{row['peak'] / MB:,.0f} MB"]
        lines.append(f"| {' | '.join([*cells, str(row['load'])])} |")
    return lines


def _kinds(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Reading one long file",
        "",
        "The first reading, of one process: places, lengths and hashes of all documents, and the plan of the shards.",
        "",
        "| file | source | seconds | MB/s | peak memory |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        speed = row["text"] / MB / row["seconds"]
        cells = [_KINDS[row["kind"]], f"{row['size']:,} MB", f"{row['seconds']:.1f} s", f"{speed:,.0f}"]
        lines.append(f"| {' | '.join(cells)} | {row['peak'] / MB:,.0f} MB |")
    return lines


def _documents(rows: list[dict[str, Any]]) -> list[str]:
    few, many = rows
    each = (many["peak"] - few["peak"]) / (many["documents"] - few["documents"])
    return [
        "## What grows with the number of documents",
        "",
        f"The catalogue is an array of a few numbers a document. 120 MB in {few['documents']:,} documents: "
        f"{few['peak'] / MB:,.0f} MB at the peak; in {many['documents']:,}: {many['peak'] / MB:,.0f} MB. The peak "
        f"grows by {each:.0f} bytes a document, while copies are looked for and shards are planned.",
    ]


def _tokenizers(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Beside plain `tokenizers`",
        "",
        "All cores, in turns. Plain `tokenizers` has the texts in memory, 64 a call, and writes nothing. Lockstep "
        "starts its processes, reads the files again, packs, digests and writes.",
        "",
        "| text | | median seconds | MB/s | Lockstep's MB/s / it, by turn |",
        "|--:|---|--:|--:|--:|",
    ]
    for size in sorted({row["size"] for row in rows}):
        turns = [row for row in rows if row["size"] == size]
        shards = turns[0]["shards"]
        ours = f"Lockstep, {shards} shard{'s' if shards > 1 else ''} to train on"
        for name in ("ours", "encode_batch", "encode_batch_fast"):
            seconds = statistics.median(row[name] for row in turns)
            times = [row[name] / row["ours"] for row in turns]
            spread = f"{statistics.median(times):.2f}× ({min(times):.2f} to {max(times):.2f})" if name != "ours" else ""
            shown = ours if name == "ours" else f"`{name}`"
            speed = turns[0]["text"] / MB / seconds
            lines.append(f"| {size} MB | {shown} | {seconds:.1f} | {speed:.2f} | {spread} |")
    return lines


def _kills(found: dict[str, Any]) -> list[str]:
    kills = found["kills"]
    equal = sum(row["equal"] for row in kills)
    begun = [row["files"] for row in kills if row["killed"]]
    return [
        "## Killed at random points",
        "",
        f"0.5 MB in {found['shards']} shards, two workers. All processes are killed at a random time, and the command "
        f"is given again. {equal} of {len(kills)} folders are then equal to that of an unharmed preparation, byte for "
        f"byte (index, plan, tokenizer, shards). {len(begun)} were killed before their end, with "
        f"{min(begun, default=0)} to {max(begun, default=0)} files in the folder.",
    ]

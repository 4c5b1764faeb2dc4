"""docs/results/prepare.md, from what scripts/studies/prepare.py measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

MB = 1e6
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
    lines = [
        "# Preparing data at scale",
        "",
        f"Measured by `python -m lockstep.scripts.studies.prepare`; made from [prepare.json](prepare.json) by the same "
        f"with `--page`. {device['name']}, {device['cores']} cores; {versions}. {results.get('beside', '')}".rstrip(),
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
    return "\n".join(lines) + "\n"


def _sizes(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## From 100 MB to 2 GB",
        "",
        "Four files of JSON lines, a tokenizer of 4,096 tokens trained on a sample of 16 MB, one worker a core.",
        "",
        *_table(rows),
    ]


def _words(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "The same with a tokenizer of whole words that is brought along (`data.tokenizer`), which encodes ten times as "
        "fast: all stages and the same memory, but for the tokenizer's own.",
        "",
        *_table(rows),
    ]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| source | read | tokenizer | encode | all | encode, MB/s | tokens | shards | peak memory |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{row['size']:,} MB"]
        cells += [f"{seconds[stage]:,.1f} s" for stage in ("read", "tokenizer", "encode")]
        cells += [f"{sum(seconds.values()):,.1f} s", f"{row['text'] / MB / seconds['encode']:.2f}"]
        cells += [f"{row['tokens']:,}", f"{row['shards']:,}", f"{row['peak'] / MB:,.0f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
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
        f"{rows[0]['text'] / MB:.0f} MB, all cores, in {len(rows)} turns. Plain `tokenizers` has the texts in memory, "
        "64 a call, and writes nothing. Lockstep starts its processes, reads the files again, packs, digests and "
        "writes.",
        "",
        "| | seconds | MB/s | Lockstep's MB/s / it, by turn |",
        "|---|--:|--:|--:|",
    ]
    for name in ("ours", "encode_batch", "encode_batch_fast"):
        seconds = statistics.median(row[name] for row in rows)
        times = [row[name] / row["ours"] for row in rows]
        spread = f"{statistics.median(times):.2f}× ({min(times):.2f} to {max(times):.2f})" if name != "ours" else ""
        shown = "Lockstep, one process a core" if name == "ours" else f"`{name}`"
        lines.append(f"| {shown} | {seconds:.1f} | {rows[0]['text'] / MB / seconds:.2f} | {spread} |")
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

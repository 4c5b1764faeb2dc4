"""docs/results/real_bugs.md from the rows of `lockstep museum --all --json docs/results/real_bugs.jsonl`.

python -m lockstep.scripts.studies.real_bugs
"""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import tyro

from lockstep.scripts.commands.museum import verdict
from lockstep.scripts.museum.exhibit import Exhibit, exhibits
from lockstep.scripts.museum.repro import repro_of
from lockstep.scripts.studies.repository import ROOT

ROWS, PAGE = ROOT / "docs/results/real_bugs.jsonl", ROOT / "docs/results/real_bugs.md"
REPROS = "../../scripts/museum/repros"
WIDTH = 160
Row = Mapping[str, Any]


def page(rows: Sequence[Row]) -> str:
    """Return docs/results/real_bugs.md. Raises ValueError for rows of unknown exhibits or versions."""
    known, by_name = exhibits(), {row["exhibit"]: row for row in rows}
    if by_name.keys() != known.keys():
        raise ValueError(f"rows and exhibits differ: {sorted(by_name.keys() ^ known.keys())}")
    for name, one in known.items():
        row = by_name[name]
        if (tuple(row["packages"]), tuple(row["fixed_packages"])) != (one.packages, one.fixed):
            raise ValueError(f"{name}: the row is of {row['packages']}")
    caught = sum(row["caught"] for row in rows)
    unfixed = [one.name for one in known.values() if repro_of(one.name)]
    intro = (
        f"Silent bugs that shipped, run from the released packages: {caught} of {len(known)} are caught in the first "
        "step in which they act, and the fixed version of each agrees. Where nothing is fixed, the second run "
        "works around the bug. Made by `python -m lockstep.scripts.studies.real_bugs` from "
        "[real_bugs.jsonl](real_bugs.jsonl), which this command writes:"
    )
    made = (
        f"torch {version('torch').split('+')[0]}, Python {platform.python_version()}, {platform.machine()} "
        f"{platform.system()}, CPU, one thread. torch and Lockstep are those of the present environment; packages "
        "of an exhibit come before them on the path. Models have random weights, and texts are from Python's "
        "standard library. *Lines* counts the lines of the loop that use Lockstep, with its import; the loops "
        "are in "
        "[scripts/museum/loops](../../scripts/museum/loops)."
    )
    lines = [
        "# Real bugs",
        "",
        *filled(intro),
        "",
        "```",
        "lockstep museum --all --install --json docs/results/real_bugs.jsonl",
        "```",
        "",
        *filled(made),
        "",
        "| exhibit | with the bug | said | fixed in | said | lines | caught |",
        "|---|---|---|---|---|--:|---|",
    ]
    lines += [table_row(one, by_name[name]) for name, one in known.items()]
    lines += [
        "",
        *filled(
            f"Unfixed in the newest version that was tried ({len(unfixed)}): a script for the package's "
            "maintainers needs no Lockstep, prints the wrong and the right value, and ends with 1 while the "
            "bug exists. "
            "`lockstep museum NAME --repro FOLDER` writes it."
        ),
    ]
    for name, one in known.items():
        lines += ["", *about(one, by_name[name])]
    return "\n".join([*lines, ""])


def table_row(one: Exhibit, row: Row) -> str:
    """Return one row of the table."""
    fixed = "unfixed" if one.unfixed else "gone" if one.gone else one.version("fixed")
    cells = [
        f"[{one.name}](#{one.name})", one.version("shipped"), verdict(row["shipped"]), fixed, verdict(row["fixed"]),
        row["shipped"]["lines"], "yes" if row["caught"] else "no",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def about(one: Exhibit, row: Row) -> Iterator[str]:
    """Return an exhibit's part of the page."""
    shipped, fixed = row["shipped"], row["fixed"]
    yield f"## {one.name}"
    yield ""
    links = [f"[{'/'.join(one.link.split('/')[3:5])}#{one.link.rsplit('/', 1)[1]}]({one.link})"] if one.link else []
    links += [f"[script for its maintainers]({REPROS}/{one.name}.py)"] if repro_of(one.name) else []
    sides = f"{one.version('shipped')}; " + (
        f"beside it: {one.mended}" if one.is_mended else f"fixed in {one.version('fixed')}"
    )
    yield from filled(f"**{one.title}.** {sides}. {', '.join(links)}".strip())
    yield ""
    yield from filled(" ".join(one.what.split()))
    yield ""
    if shown := shown_by(shipped, fixed, "beside it" if one.is_mended else "fixed"):
        yield from filled(shown)
        yield ""
    if one.missed:
        yield from filled(f"Missed: {one.missed}")
        yield ""
    yield "```"
    yield from said(shipped["words"])
    yield "```"


def shown_by(shipped: Row, fixed: Row, other: str) -> str:
    """Return the losses, or the numbers that reveal the bug."""
    if shipped["losses"]:
        first, last = (
            f"{s['losses'][at]:.4g} with the bug, {f['losses'][at]:.4g} {other}"
            for s, f, at in ((shipped, fixed, 0), (shipped, fixed, -1))
        )
        count = len(shipped["losses"])
        held = f"{shipped['held_out']:.4f} with the bug, {fixed['held_out']:.4f} {other}"
        return f"Loss of the log, value 1: {first}; value {count}: {last}. Held-out loss at the end: {held}."
    parts = [f"{key} {x:.2%} with the bug, {fixed['shown'][key]:.2g} {other}" for key, x in shipped["shown"].items()]
    right = "Measured: " if "output" in shipped["stages"] else "The output, and so the loss, is what it should be: "
    return f"{right}{'; '.join(parts)}." if parts else ""


def said(words: str) -> Iterator[str]:
    """Return Lockstep's output, with long lines broken."""
    for line in words.splitlines():
        yield from textwrap.wrap(line, 120, subsequent_indent="  ") or [""]


def filled(text: str) -> list[str]:
    """Return a paragraph in lines of the page's width."""
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write the page; 0 if everything is as expected."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    order = list(exhibits())
    rows.sort(key=lambda row: order.index(row["exhibit"]) if row["exhibit"] in order else -1)
    PAGE.write_text(page(rows), encoding="utf-8")
    print(PAGE)
    return 0 if all(row["as_expected"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))

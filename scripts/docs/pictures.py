"""Write the pictures of docs/pictures: `python -m lockstep.scripts.docs.pictures`.

`idea.svg` explains candidate, twin and truth. `rooms.svg` shows the folders and which may import which. `verdict.svg`
shows the terminal of a real check, from the recorded output in verdict.txt; `--record` runs that check again and
records its output. `cost.svg` shows the measured cost of checks, from docs/results/bench_parity.json. The studies make
the pictures of other results.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
from html import escape
from pathlib import Path

from lockstep.core.bench.bars import Bar, Panel, picture
from lockstep.scripts.docs.pages import DOCS, PICTURES

# Colours that readers can distinguish in both schemes, also with colour blindness (Okabe and Ito 2008).
INK, MUTED, BLUE, GREEN, RED, ORANGE = "#1d2433", "#5b6472", "#0072b2", "#00805a", "#c8400a", "#b87400"
RECORDED = PICTURES / "verdict.txt"
# The check that verdict.svg shows, from a folder in which `lockstep demo` has run.
CHECK = ("parity", "lockstep-demo/demo.toml", "--steps", "1")
CANDIDATE = "parity_tests/faults/attention.py:RopeInBf16"
COSTS = DOCS / "results/bench_parity.json"


def text(
    x: float, y: float, words: str, size: int = 15, colour: str = INK, anchor: str = "middle", bold: bool = False
) -> str:
    """Return a line of text; x, y in pixels, y at the baseline."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def rule(x1: float, x2: float, y: float, colour: str, width: float = 3) -> str:
    """Return a level line from x1 to x2."""
    return f'<line x1="{x1:g}" y1="{y:g}" x2="{x2:g}" y2="{y:g}" stroke="{colour}" stroke-width="{width:g}"/>'


def dot(x: float, y: float, colour: str) -> str:
    """Return a filled circle."""
    return f'<circle cx="{x:g}" cy="{y:g}" r="7" fill="{colour}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a rounded frame with a light ground."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{colour}" fill-opacity="0.09" '
        f'stroke="{colour}" stroke-width="1.6"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = MUTED) -> str:
    """Return a line with a head at (x2, y2)."""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.8" '
        f'marker-end="url(#head)"/>'
    )


def drawing(width: int, height: int, title: str, *parts: str) -> str:
    """Return a whole SVG with a white ground, so that it is readable on any page."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{MUTED}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def idea() -> str:
    """Draw one stage computed three times, and the two errors that are compared."""
    columns = [
        (150, "candidate", "the trainer: torch, bf16", RED, "c"),
        (450, "twin", "JAX, the same bf16 casts", BLUE, "w"),
        (750, "truth", "JAX in FP64", GREEN, "t"),
    ]
    parts = [text(450, 34, "The same stage, from the same inputs, computed three times", 18, bold=True)]
    for x, name, about, colour, letter in columns:
        parts += [
            box(x - 120, 56, 240, 78, colour),
            text(x, 88, f"{name}  {letter}", 19, colour, bold=True),
            text(x, 114, about, 14, MUTED),
        ]
    # Points on one line: the truth, and both results at their distances from it.
    zero, unit, y, low = 160.0, 190.0, 206.0, 292.0
    for row, name, colour, far, said in (
        (y, "honest", RED, 1.04, "excess near 1: an error as large as honest rounding makes"),
        (low, "RoPE in bf16", RED, 2.9, "excess far above 1: this stage is wrong"),
    ):
        parts += [
            text(24, row + 5, name, 14, INK, "start", bold=True),
            rule(zero, zero + 3.15 * unit, row, "#c3c7ce", 1),
            rule(zero, zero + far * unit, row - 16, colour),
            rule(zero, zero + unit, row + 16, BLUE),
            dot(zero, row, GREEN),
            dot(zero + unit, row, BLUE),
            dot(zero + far * unit, row, colour),
            text(zero + unit + 14, row + 22, "‖w − t‖", 13, BLUE, "start"),
            text(zero + far * unit + 14, row - 12, "‖c − t‖", 13, colour, "start"),
            text(860, row + 34, said, 14, INK, "end"),
        ]
    parts.append(
        text(
            450,
            380,
            "excess = ‖c − t‖ / ‖w − t‖, near 1 for an honest trainer at any precision and depth",
            16,
            bold=True,
        )
    )
    return drawing(900, 404, "Candidate, twin and truth", *parts)


def rooms() -> str:
    """Draw the folders as boxes, and arrows from each to what it imports."""
    inside = "model as data · configuration · data · training loop · plan · report · parity engine"
    parts = [
        text(450, 32, "An arrow points from a folder to what it imports; nothing points back", 17, bold=True),
        box(40, 56, 390, 78, ORANGE),
        text(235, 88, "scripts/", 18, ORANGE, bold=True),
        text(235, 114, "commands; the one place that chooses a backend", 14, MUTED),
        box(470, 56, 390, 78, ORANGE),
        text(665, 88, "parity_tests/", 18, ORANGE, bold=True),
        text(665, 114, "tests across backends; the planted faults", 14, MUTED),
        box(40, 196, 390, 78, RED),
        text(235, 228, "torch_backend/", 18, RED, bold=True),
        text(235, 254, "the training step in PyTorch", 14, MUTED),
        box(470, 196, 390, 78, BLUE),
        text(665, 228, "jax_backend/", 18, BLUE, bold=True),
        text(665, 254, "the same step in JAX: twin and truth", 14, MUTED),
        box(40, 336, 820, 104, GREEN),
        text(450, 368, "core/", 18, GREEN, bold=True),
        text(450, 394, inside, 14, MUTED),
        text(450, 418, "imports neither torch nor jax", 14, MUTED),
    ]
    for x in (200, 700):
        parts += [arrow(x, 134, x, 194), arrow(x, 274, x, 334)]
    parts += [arrow(330, 134, 560, 194), arrow(570, 134, 340, 194)]
    return drawing(900, 460, "The rooms and their imports", *parts)


class _Terminal(io.StringIO):
    """A stream that records output as a colour terminal would get it."""

    def isatty(self) -> bool:
        return True


def record() -> str:
    """Run the check of verdict.svg again in a terminal of 80 columns; return the command and its output."""
    from lockstep.scripts.cli import run

    os.environ["COLUMNS"] = "80"
    terminal = _Terminal()
    with contextlib.redirect_stdout(terminal):
        code = run([*CHECK, "--candidate", CANDIDATE])
    if code != 1:
        raise SystemExit(f"the check ended with {code}; the planted fault makes it end with 1")
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n]*\r(?!\n)", "", terminal.getvalue())
    return f"$ lockstep {' '.join(CHECK)} \\\n    --candidate {CANDIDATE}\n{shortened(printed)}"


def shortened(printed: str) -> str:
    """Return the verdict, and the strain of the stages down to the last wrong one."""
    lines = printed.rstrip().split("\n")
    first = next(at for at, line in enumerate(lines) if line.startswith("verdict: "))
    last = max(at for at, line in enumerate(lines) if "wrong: " in line)
    return "\n".join(["…", *lines[first : last + 1], "…", ""])


def verdict(recorded: str) -> str:
    """Draw a terminal with the recorded output, 80 columns wide."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    # rich records its output; the file itself is discarded.
    console = Console(record=True, width=82, force_terminal=True, file=io.StringIO())
    for line in recorded.rstrip("\n").split("\n"):
        style = (
            "bold"
            if line.startswith("$ ")
            else "bold red"
            if "disagreed" in line or line.startswith("first bad")
            else ""
        )
        console.print(Text(line, style=style))
    drawn = console.export_svg(title="lockstep parity", theme=MONOKAI, unique_id="verdict")
    # Use the reader's own monospace font instead of one loaded from the network.
    begin, end = drawn.index("@font-face"), drawn.rindex("@font-face")
    end = drawn.index("}", end) + 1
    return drawn[:begin] + drawn[end:]


def cost(measured: str) -> str:
    """Draw what checks cost the quickstart, by mode and by part, from the JSON of `lockstep bench parity`."""
    found = json.loads(measured)
    (modes,) = (model["modes"] for model in found["models"] if model["name"] == "quickstart")
    added = [
        Bar(name.replace(" N", f" {found['every']} steps"), 100 * mode["more"], f"+{mode['more']:.1%}", ours=True)
        for name, mode in modes.items()
        if mode["more"] > 0
    ]
    parts = [
        Bar(name.replace(" every N", ""), steps, f"{steps:.3g} steps")
        for name, steps in found["steps"].items()
        if name != "training step"
    ]
    machine, versions = found["machine"], found["versions"]
    below = f"quickstart on {machine['cores']} CPU cores, torch {versions['torch']}, jax {versions['jax']}"
    panels = [Panel("Time added to a run", added), Panel("One part by itself, in training steps", parts)]
    return picture("The cost of a check", below, panels)


def pictures() -> dict[Path, str]:
    """Return every picture by its file."""
    return {
        PICTURES / "cost.svg": cost(COSTS.read_text(encoding="utf-8")),
        PICTURES / "idea.svg": idea(),
        PICTURES / "rooms.svg": rooms(),
        PICTURES / "verdict.svg": verdict(RECORDED.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the pictures of docs/pictures.")
    parser.add_argument("--record", action="store_true", help="run the check of verdict.svg again (minutes)")
    if parser.parse_args().record:
        RECORDED.write_text(record(), encoding="utf-8")
    for file, drawn in pictures().items():
        file.write_text(drawn, encoding="utf-8")

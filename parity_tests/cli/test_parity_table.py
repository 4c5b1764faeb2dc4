"""The verdict's table shows at any width which stages are right; a pipe gets all of it, in whole lines."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from lockstep.core.parity.measures.verdict import Check, Finding, Measure, Scope
from lockstep.core.sinks.terminal import open_console, open_unwrapped
from lockstep.scripts.shared.parity_table import print_verdict

TAP = "blocks.11.mlp.down_proj.weight"
NOTE = "the gradient of the residual stream is twice as large as the reference's; " * 3


def finding(stage: str, phase: str, scope: Scope, value: float, tap: str = TAP) -> Finding:
    measure = Measure("relative_distance", value, None, 1.234e-5, "a bound that was calibrated")
    layer = None if tap == stage else 11
    return Finding(stage, tap, phase, layer, scope, (measure,), 10, note="" if value < 1e-5 else NOTE)


CHECK = Check(
    step=7,
    findings=(
        finding("gate", "forward", "local", 1e-6),
        finding("down_proj", "backward", "local", 2e-5),
        finding("down_proj", "backward", "end_to_end", 3e-5),
        finding("attn", "backward", "end_to_end", 3e-5),
        finding("clip_coefficient", "update", "end_to_end", 1e-6, "clip_coefficient"),
        finding("update", "update", "over_steps", 1e-6),
    ),
    not_covered=(),
)
VERDICTS = {
    "gate": {"ok"},
    "down_proj": {"1 origin", "1 contaminated"},
    "attn": {"1 contaminated"},
    "clip_coefficient": {"ok"},
    "update": {"ok"},
}


def shown(console: Console) -> list[str]:
    with console.capture() as caught:
        print_verdict(console, [CHECK], "bf16/eager")
    return caught.get().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_every_row_says_whether_it_is_right_and_nothing_is_cut(width: int) -> None:
    lines = shown(open_console(width))
    end = next(i for i, line in enumerate(lines) if line.startswith("verdict: "))
    table = lines[:end]
    assert max(map(len, table)) <= width and "…" not in "".join(table)
    rows = [re.split("  +", line.replace("│", "  ").strip()) for line in table]
    for stage, verdicts in VERDICTS.items():
        assert {" ".join(row[: row.index(stage)]).strip() for row in rows if stage in row[:2]} == verdicts, table
    letters = "".join("".join(table).split())
    assert all(word in letters for word in ("forward", "backward", "update", "owninput", "endtoend", "oversteps"))


def test_a_file_or_a_pipe_gets_whole_cells_and_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console = open_unwrapped()
    assert not console.is_terminal
    lines = shown(console)
    row = next(line for line in lines if "gate" in line)
    assert TAP in row and "relative distance 1e-06 (≤ 1.23e-05)" in row
    first = next(line for line in lines if line.startswith("first bad step 7; origin: down_proj (backward"))
    assert first.endswith(NOTE.rstrip())
    assert any(line.startswith("  contaminated: 2 comparisons that only inherited wrong inputs") for line in lines)


def test_a_terminal_breaks_no_line_of_the_verdict_either() -> None:
    lines = shown(open_console(80))
    assert any(line.startswith("first bad step 7") and line.endswith(NOTE.rstrip()) for line in lines)

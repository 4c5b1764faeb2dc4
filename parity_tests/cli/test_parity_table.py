"""The verdict shows at any width which stages are right and how near to their bounds; a pipe gets whole lines."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from lockstep.core.parity.measures.verdict import Check, Finding, Measure, Scope
from lockstep.core.sinks.lines import bar
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


def shown(console: Console, verbose: bool = True, check: Check = CHECK) -> list[str]:
    with console.capture() as caught:
        print_verdict(console, [check], "bf16/eager", verbose)
    return caught.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140])
def test_every_row_says_whether_it_is_right_and_nothing_is_cut(width: int) -> None:
    lines = shown(open_console(width))
    begin = next(i for i, line in enumerate(lines) if line.startswith("The worst of each stage"))
    table = lines[begin:]
    assert max(map(len, table)) <= width and "…" not in "".join(table)
    rows = [re.split("  +", line.replace("│", "  ").strip()) for line in table]
    for stage, verdicts in VERDICTS.items():
        assert {" ".join(row[: row.index(stage)]).strip() for row in rows if stage in row[:2]} == verdicts, table
    text = "\n".join(table)
    assert all(words in text for words in ("forward", "backward", "update", "own input", "end to end", "over steps"))
    assert text.count(TAP) == 5, "no name is cut"


def test_a_file_or_a_pipe_gets_whole_cells_and_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console = open_unwrapped()
    assert not console.is_terminal
    lines = shown(console)
    row = next(line for line in lines if "gate" in line and TAP in line)
    assert "relative distance 1e-06 (≤ 1.23e-05)" in row
    first = next(line for line in lines if line.startswith("first bad step 7; origin: down_proj (backward"))
    assert first.endswith(NOTE.rstrip())
    assert any(line.startswith("  contaminated: 2 comparisons that only inherited wrong inputs") for line in lines)


@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_breaks_lines_between_words(width: int, verbose: bool) -> None:
    """A line in a pipe stands here in several, word for word."""
    lines = shown(open_console(width), verbose)
    assert [line for line in lines if len(line) > width] == []
    whole = next(line for line in shown(open_console(10_000), verbose) if line.startswith("first bad step 7"))
    begin = next(i for i, line in enumerate(lines) if line.startswith("first bad step 7"))
    assert " ".join(" ".join(lines[begin:]).split()).startswith(" ".join(whole.split()))


def test_the_verdict_comes_first_then_what_disagreed_then_every_stage_with_a_bar() -> None:
    lines = shown(open_console(80), verbose=False)
    assert lines[0] == "verdict: disagreed"
    assert lines[1].startswith("first bad step 7; origin: down_proj (backward")
    assert "  relative distance 2e-05 (≤ 1.23e-05): a bound that was calibrated" in lines
    begin = next(i for i, line in enumerate(lines) if line.startswith("strain of each stage"))
    bars = lines[begin + 1 : begin + 1 + len(VERDICTS)]
    assert [line.split()[0] for line in bars] == ["gate", "down_proj", "attn", "clip_coefficient", "update"]
    strain = {line.split()[0]: line for line in bars}
    assert "█" in strain["gate"] and "  8 %  forward, relative distance" in strain["gate"]
    # Its own error is smaller than the inherited one, and is the one to look at.
    assert " ×1.62  wrong: backward, relative distance" in strain["down_proj"]
    assert " ×2.43  inherited: backward, relative distance" in strain["attn"]
    assert "The worst of each stage" not in "\n".join(lines) and "--verbose" in lines[-1]


def test_bars_are_ascii_where_the_terminal_has_no_blocks() -> None:
    text = io.TextIOWrapper(io.BytesIO(), "ascii", errors="backslashreplace")
    console = Console(file=text, width=80)
    print_verdict(console, [CHECK], "bf16/eager")
    text.seek(0)
    row = next(line for line in text.read().splitlines() if line.startswith("  down_proj "))
    assert set(row.split()[1]) == {"#"}


def test_a_finding_that_compared_nothing_has_a_bar_too() -> None:
    empty = Check(1, (Finding("attn", "attn", "forward", 1, "local", (), 0), *CHECK.findings[:1]), ())
    for verbose in (True, False):
        lines = shown(open_console(80), verbose, empty)
        assert any("broken  wrong: forward, nothing was compared" in line for line in lines)


def test_a_name_without_room_for_a_bar_beside_it_has_a_line_of_its_own() -> None:
    stage = "aten.an_operation_whose_name_is_longer_than_what_is_left"
    check = Check(1, (finding(stage, "forward", "local", 2e-5),), ())
    lines = shown(open_console(60), False, check)
    assert f"  {stage}" in lines and max(map(len, lines)) <= 60


# Bars


def test_a_bar_shows_a_share_and_never_nothing_for_something() -> None:
    assert [bar(share, 4, False) for share in (0, 1e-9, 0.5, 0.53, 1, 40, math.inf)] == [
        "    ", "▏   ", "██  ", "██▏ ", "████", "████", "████"
    ]  # fmt: skip
    assert [bar(share, 4, True) for share in (0, 1e-9, 0.5, 2)] == ["    ", "#   ", "##  ", "####"]

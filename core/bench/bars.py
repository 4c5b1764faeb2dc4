"""Draw panels of horizontal bars, each with its value in words and its interval, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

OURS, THEIRS = "#2b7bba", "#b9c0c7"
_FONT = "font-family='Helvetica, Arial, sans-serif'"
# In pixels: the picture's width, room for names to the left and for values to the right of the longest bar.
_WIDTH, _NAMES, _VALUES = 820, 268, 168
# Characters of a bold name for which there is room. Longer names are squeezed into it.
_LONGEST = 40
_BAR, _STEP, _TITLE, _GAP, _HEAD = 16, 23, 26, 16, 58


@dataclass(frozen=True)
class Bar:
    """A bar. value: its length, in the panel's unit. text: beside it. low, high: its interval, if known."""

    name: str
    value: float
    text: str
    ours: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """A panel: bars that share a scale from 0."""

    title: str
    bars: Sequence[Bar]


def picture(title: str, below: str, panels: Sequence[Panel]) -> str:
    """Return the panels below one another, under a title and a line of words; the longest bar of each has full width.

    Raises ValueError if a panel has no bar, or a value is not positive.
    """
    height = _HEAD + sum(_TITLE + _STEP * len(panel.bars) + _GAP for panel in panels)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' "
        f"viewBox='0 0 {_WIDTH} {height}' {_FONT} font-size='13' fill='#222'>",
        f"<rect width='{_WIDTH}' height='{height}' fill='white'/>",
        f"<text x='12' y='24' font-size='16' font-weight='bold'>{escape(title)}</text>",
        f"<text x='12' y='44' fill='#555'>{escape(below)}</text>",
    ]
    y = _HEAD
    for panel in panels:
        parts += _panel(panel, y)
        y += _TITLE + _STEP * len(panel.bars) + _GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, y: int) -> Iterator[str]:
    if not panel.bars or min(bar.value for bar in panel.bars) <= 0:
        raise ValueError(f"{panel.title}: bars of positive values are drawn")
    scale = (_WIDTH - _NAMES - _VALUES) / max(max(bar.value, bar.high or 0) for bar in panel.bars)
    yield f"<text x='12' y='{y + 16}' font-weight='bold'>{escape(panel.title)}</text>"
    for number, bar in enumerate(panel.bars):
        yield from _bar(bar, scale, y + _TITLE + number * _STEP)


def _bar(bar: Bar, scale: float, y: int) -> Iterator[str]:
    middle, end = y + _BAR / 2, _NAMES + max(bar.value, bar.high or 0) * scale
    weight = " font-weight='bold'" if bar.ours else ""
    squeezed = f" textLength='{_NAMES - 12}' lengthAdjust='spacingAndGlyphs'" if len(bar.name) > _LONGEST else ""
    yield f"<text x='{_NAMES - 8}' y='{y + 13}' text-anchor='end'{weight}{squeezed}>{escape(bar.name)}</text>"
    wide = max(bar.value * scale, 1.0)
    colour = OURS if bar.ours else THEIRS
    yield f"<rect x='{_NAMES}' y='{y}' width='{wide:.1f}' height='{_BAR}' fill='{colour}'/>"
    if bar.low is not None and bar.high is not None:
        low, high = _NAMES + bar.low * scale, _NAMES + bar.high * scale
        yield f"<path d='M{low:.1f} {middle}H{high:.1f}M{low:.1f} {y + 4}v8M{high:.1f} {y + 4}v8' stroke='#222'/>"
    yield f"<text x='{end + 8:.1f}' y='{y + 13}'{weight}>{escape(bar.text)}</text>"

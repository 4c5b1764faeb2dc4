"""Axes of a chart as SVG, in the colours of the report's page: drawn here, so that the page needs no script."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.core.report.text import esc, number

WIDTH, HEIGHT = 520, 320
# Room for labels, in units of the drawing.
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
# Logarithms of the smallest and the largest number that has all its digits.
_LEAST, _MOST = math.log(sys.float_info.min), math.log(sys.float_info.max)


@dataclass(frozen=True)
class Axis:
    """An axis, which places values between two ends. low, high: values there. log: spaced by the logarithm."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value; one beyond an end is put at that end."""
        inside = min(max(value, self.low), self.high)
        share = (_scaled(inside, self.log) - _scaled(self.low, self.log)) / (
            _scaled(self.high, self.log) - _scaled(self.low, self.log)
        )
        return self.begin + share * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        """Return some round values."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def axis(values: Iterable[float], begin: float, end: float, log: bool = False, room: float = 0.06) -> Axis:
    """Return an axis that holds finite values, with some room at both ends."""
    found = [value for value in values if math.isfinite(value) and (not log or value > 0)] or [1.0]
    low, high = min(found), max(found)
    if log:
        # By logarithms: between 1e-300 and 1e300 the ratio is no number.
        more = max((math.log(high) - math.log(low)) * room, math.log(1.1))
        ends = max(math.log(low) - more, _LEAST), min(math.log(high) + more, _MOST)
        return Axis(math.exp(ends[0]), math.exp(ends[1]), begin, end, True)
    more = (high - low) * room or abs(high) * room or 1.0
    return Axis(low - more, high + more, begin, end)


def frame(
    x: Axis, y: Axis, x_title: str, y_title: str, body: Sequence[str], x_ticks: Sequence[float] | None = None
) -> str:
    """Return a chart: its grid, labels and titles, and `body` between them. x_ticks: instead of the axis's own."""
    bottom = HEIGHT - BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{esc(y_title)} by {esc(x_title)}">']
    for tick in y.ticks:
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(LEFT - 7, at + 4, number(tick, 4), "end"))
    for tick in x.ticks if x_ticks is None else x_ticks:
        at = x.at(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(text(at, bottom + 15, number(tick, 3), "middle"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_title, "middle"))
    return "\n".join([*parts, *body, "</svg>"])


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a label."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{esc(words)}</text>'


def line(points: Sequence[tuple[float, float]], style: str, said: str = "") -> str:
    """Return a polyline through places; said: its tooltip."""
    if not points:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" style="fill:none;{style}">{title(said)}</path>'


def dot(x: float, y: float, style: str, said: str = "", radius: float = 4.5) -> str:
    """Return a round mark."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="{style}">{title(said)}</circle>'


def cross(x: float, y: float, style: str, said: str = "") -> str:
    """Return a mark of two strokes."""
    path = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
    return f'<path d="{path}" style="fill:none;stroke-width:2;{style}">{title(said)}</path>'


def title(said: str) -> str:
    """Return a tooltip."""
    return f"<title>{esc(said)}</title>" if said else ""


def _scaled(value: float, log: bool) -> float:
    return math.log(value) if log else value


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 5, 10) if m * base >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high) - math.log10(low)
    parts = (1, 2, 3, 5, 7) if decades < 1.2 else (1, 2, 5) if decades < 2.2 else (1,)
    every = max(1, math.ceil(decades / 6))
    exponents = range(math.floor(math.log10(low)), min(math.ceil(math.log10(high)), sys.float_info.max_10_exp) + 1)
    found = [part * 10.0**e for e in exponents if e % every == 0 for part in parts]
    return [value for value in found if low <= value <= high]

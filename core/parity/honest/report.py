"""Report a check as data and as a table of 80 columns, and define the error of a failed one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.core.parity.honest.judged import Judged
from lockstep.core.parity.honest.measures import GIVEN
from lockstep.core.parity.measures.verdict import Measure

WIDTH = 80
NAME = 17
COLUMNS = ("excess", "largest", "line", "gain", "distance", "unequal")


@dataclass(frozen=True)
class Report:
    """The result of `assert_honest`: one `Judged` for each output and gradient. `print(report)` shows the table.

    dtype: as the user gave it.
    draws: number of draws.
    notes: parts that were not compared.
    """

    dtype: str
    draws: int
    results: tuple[Judged, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether every result is honest."""
        return all(one.ok for one in self.results)

    def __getitem__(self, name: str) -> Judged:
        """Return one result by its name in the table."""
        return next(one for one in self.results if one.name == name)

    def __str__(self) -> str:
        wrong = [one.name for one in self.results if not one.ok]
        verdict = f"NOT HONEST: {', '.join(wrong)}" if wrong else "honest"
        head = textwrap.wrap(f"mine beside plain at {self.dtype}, {self.draws} draws: {verdict}", WIDTH)
        table = f"{'':{NAME}}" + "".join(f"{name:>10}" for name in COLUMNS)
        lines = [*head, table]
        for one in self.results:
            lines += _lines(one)
        return "\n".join([*lines, *(line for note in self.notes for line in textwrap.wrap(f"note: {note}", WIDTH))])


class NotHonest(AssertionError):
    """The error that `assert_honest` raises. `report` holds the measurements."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def _lines(one: Judged) -> Iterator[str]:
    name = one.name if len(one.name) < NAME else one.name[: NAME - 2] + "…"
    if one.measured is None:
        yield f"{name:{NAME}}" + ("WRONG" if one.failures else "")
    else:
        by_name = {m.name: m for m in one.measured.measures}
        lines = [by_name[n] for n in ("lengths", "row", "column") if n in by_name]
        line = max(lines, key=lambda m: m.strain, default=None)
        of = {"excess": by_name["excess"], "largest": by_name["largest"], "line": line, "gain": by_name["gain"]}
        d = one.measured.distances
        shown = [_number(m.value, n) if m else "" for n, m in of.items()]
        shown += [_number(d.twin_distance, "distance"), f"{d.unequal:.0%}"]
        yield f"{name:{NAME}}" + "".join(f"{cell:>10}" for cell in shown) + ("" if one.ok else "  !")
        most = [_bound(m) for m in of.values()]
        yield f"{'  at most':{NAME}}" + "".join(f"{cell:>10}" for cell in most)
        yield from _broken(one, by_name)
    if one.untold:
        yield from _wrapped(f"not judged: {one.untold}")
    for failure in one.failures:
        yield from _wrapped(f"WRONG {failure}")
    if one.at is not None:
        index, draw, mine, plain, truth = one.at
        where = f"[{', '.join(map(str, index))}]" + (f" of draw {draw}" if draw else "")
        yield from _wrapped(f"worst {where}: mine {mine:.6g}, plain {plain:.6g}, truth {truth:.6g}")
    for note in one.notes:
        yield from _wrapped(note)
    if one.default is not None:
        yield from _wrapped(f"assert_close {one.default[1]}")


def _broken(one: Judged, by_name: dict[str, Measure]) -> Iterator[str]:
    """Yield lines that name the broken measures, and the basis of the worst bound, or of bounds given by the user."""
    if one.broken:
        worst = by_name[one.broken[0]]
        yield from _wrapped(f"WRONG in {', '.join(one.broken)}")
        yield from _wrapped(f"{worst.name} {_number(worst.value, worst.name)}, at most {_bound(worst)} = {worst.basis}")
    for m in by_name.values():
        if m.basis.startswith(GIVEN):
            yield from _wrapped(f"{m.name} {m.basis}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _bound(m: Measure | None) -> str:
    return _number(m.high, m.name).lstrip("+") if m is not None and m.high is not None else ""


def _number(x: float, name: str) -> str:
    if name == "gain":
        return f"{x:+.1e}" if x else "0"
    return f"{x:.2f}" if x < 100 else f"{x:.2g}" if x >= 1e5 else f"{x:.0f}"

"""The parity checks of a run, from `parity.jsonl`: counts, the worst of each stage, the heatmap's cells."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import UserError
from core.parity.verdict import Measure
from core.report.read import json_lines

VERDICTS = ("agreed", "disagreed", "could_not", "skipped")
BASES_LIMIT = 100_000  # characters of basis text that the page carries
BOUNDS_LIMIT = 8_000  # different bounds that the page carries
ELSEWHERE = "too many different bounds to carry here; see parity.jsonl"


@dataclass(frozen=True)
class RowKey:
    """A row of the heatmap: one tap of one stage in one scope (`repeat` tells doubles of a check apart)."""

    stage: str
    tap: str
    phase: str
    layer: int | None
    scope: str
    repeat: int = 0


@dataclass(frozen=True)
class StageWorst:
    """The finding of a stage that came nearest to its bound, or furthest beyond it, over all checks."""

    key: RowKey
    step: int
    ok: bool
    strain: float
    measure: Measure | None
    note: str


@dataclass
class StageSummary:
    """A stage over all checks: its worst finding, the columns compared and broken, and since when."""

    worst: StageWorst
    checks: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    first_broken: int | None = None


@dataclass
class Cells:
    """The heatmap's cells as they are read, by row and column number."""

    row: array[int] = field(default_factory=lambda: array("l"))
    column: array[int] = field(default_factory=lambda: array("l"))
    broken: array[int] = field(default_factory=lambda: array("b"))
    meta: array[int] = field(default_factory=lambda: array("l"))
    unequal: array[float] = field(default_factory=lambda: array("d"))  # -1: there is no twin


@dataclass
class MeasureCells:
    """One measure's values over the cells that have it, by position in `Cells`."""

    cell: array[int] = field(default_factory=lambda: array("l"))
    value: array[float] = field(default_factory=lambda: array("d"))
    bound: array[int] = field(default_factory=lambda: array("l"))
    broken: array[int] = field(default_factory=lambda: array("b"))


@dataclass
class Checks:
    """Everything that the page says about the checks of a run."""

    lines: list[tuple[int, str, int]] = field(default_factory=list)  # (step, verdict, broken findings)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    not_covered: Counter[str] = field(default_factory=Counter)
    first_bad_step: int | None = None
    origin: Mapping[str, Any] | None = None
    stages: dict[str, StageSummary] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)  # of the heatmap's columns
    rows: dict[RowKey, int] = field(default_factory=dict)
    order: list[RowKey] = field(default_factory=list)
    cells: Cells = field(default_factory=Cells)
    measures: dict[str, MeasureCells] = field(default_factory=dict)
    bounds: dict[tuple[float | None, float | None, int], int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    metas: dict[tuple[int, str], int] = field(default_factory=dict)
    _last_keys: list[RowKey] = field(default_factory=list)
    _bases_size: int = 0

    @property
    def verdict(self) -> str:
        """As `core.parity.verdict.overall` has it; `not_checked` if no check was ever due."""
        if not self.lines:
            return "not_checked"
        if self.counts["disagreed"]:
            return "disagreed"
        return "agreed" if self.counts["agreed"] and not self.counts["could_not"] else "could_not"

    def add(self, check: Mapping[str, Any]) -> None:
        """Take in one line. Raises KeyError, TypeError or ValueError if it is not a check."""
        step, verdict = int(check["step"]), str(check["verdict"])
        if verdict not in VERDICTS:
            raise ValueError(f"verdict {verdict!r} is none of {', '.join(VERDICTS)}")
        findings = check.get("stages", [])
        if verdict == "agreed" and not findings:
            verdict = "could_not"  # nothing was compared
        bad = sum(not f["ok"] for f in findings)
        if bad:
            verdict = "disagreed"
        self.counts[verdict] += 1
        self.lines.append((step, verdict, bad))
        if verdict == "skipped":
            self.reasons[str(check.get("reason", "no reason given"))] += 1
        self.not_covered.update(str(item) for item in check.get("not_covered", []))
        if verdict == "disagreed" and (self.first_bad_step is None or step < self.first_bad_step):
            self.first_bad_step, self.origin = step, check.get("origin")
        if findings:
            self._add_findings(step, findings)

    def _add_findings(self, step: int, findings: Iterable[Mapping[str, Any]]) -> None:
        column, keys, cells = len(self.steps), [], self.cells
        self.steps.append(step)
        doubles: Counter[RowKey] = Counter()
        for finding in findings:
            key = RowKey(
                str(finding["stage"]),
                str(finding["tap"]),
                str(finding["phase"]),
                finding["layer"],
                str(finding["scope"]),
            )
            doubles[key] += 1
            if doubles[key] > 1:
                key = RowKey(key.stage, key.tap, key.phase, key.layer, key.scope, doubles[key] - 1)
            keys.append(key)
            row = self.rows.setdefault(key, len(self.rows))
            measures = [_measure(m) for m in finding["measures"]]
            cell, unequal, note = len(cells.row), finding.get("unequal"), str(finding.get("note", ""))
            cells.row.append(row)
            cells.column.append(column)
            cells.broken.append(not finding["ok"])
            cells.meta.append(self.metas.setdefault((int(finding["size"]), note), len(self.metas)))
            cells.unequal.append(-1.0 if unequal is None else float(unequal))
            for measure in measures:
                found = self.measures.setdefault(measure.name, MeasureCells())
                found.cell.append(cell)
                found.value.append(measure.value)
                found.bound.append(self._bound(measure))
                found.broken.append(not measure.ok)
            self._judge(key, step, column, bool(finding["ok"]), measures, note)
        if keys != self._last_keys:
            _merge(self.order, keys)
            self._last_keys = keys

    def _judge(
        self,
        key: RowKey,
        step: int,
        column: int,
        ok: bool,
        measures: list[Measure],
        note: str,
    ) -> None:
        measure = max(measures, key=lambda m: m.strain) if measures else None
        worst = StageWorst(key, step, ok, measure.strain if measure else float("inf"), measure, note)
        stage = self.stages.setdefault(key.stage, StageSummary(worst))
        stage.checks.add(column)
        if not ok:
            stage.broken.add(column)
            stage.first_broken = step if stage.first_broken is None else min(step, stage.first_broken)
        if (not ok, worst.strain) > (not stage.worst.ok, stage.worst.strain):
            stage.worst = worst

    def _bound(self, measure: Measure) -> int:
        basis = measure.basis
        if basis not in self.bases and self._bases_size + len(basis) > BASES_LIMIT:
            basis = ELSEWHERE
        if basis not in self.bases:
            self._bases_size += len(basis)
        number = self.bases.setdefault(basis, len(self.bases))
        bound = (measure.low, measure.high, number)
        if bound not in self.bounds and len(self.bounds) >= BOUNDS_LIMIT:
            bound = (None, None, self.bases.setdefault(ELSEWHERE, len(self.bases)))
        return self.bounds.setdefault(bound, len(self.bounds))


def read_checks(path: Path, notes: list[str]) -> Checks:
    """All checks in `path`; none without a file. Raises UserError that names a line that is no check."""
    checks = Checks()
    for number, check in json_lines(path, notes) if path.is_file() else _none():
        try:
            checks.add(check)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{path}, line {number}: not a check ({reason})") from error
    return checks


def _none() -> Iterator[tuple[int, dict[str, Any]]]:
    return iter(())


def _measure(tree: Mapping[str, Any]) -> Measure:
    low, high = tree.get("low"), tree.get("high")
    return Measure(
        str(tree["name"]),
        float(tree["value"]),
        None if low is None else float(low),
        None if high is None else float(high),
        str(tree.get("basis", "")),
    )


def _merge(order: list[RowKey], keys: list[RowKey]) -> None:
    """Insert what is new in `keys` into `order`, each after its predecessor: the chain's order stands."""
    known = set(order)
    place = -1
    for key in keys:
        if key in known:
            place = order.index(key)
        else:
            place += 1
            order.insert(place, key)
            known.add(key)

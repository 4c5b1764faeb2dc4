"""The parity checks of a run, from `parity.jsonl`: counts, the first bad step, the heatmap's cells."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.report.read import json_lines

Json = Mapping[str, Any]

VERDICTS = ("agreed", "disagreed", "could_not", "skipped")
SCHEMAS = (1, 2)
BASES_LIMIT = 100_000  # characters of basis text that the page carries word for word
NUMBER = re.compile(r"\d[\d.]*(e[+-]?\d+)?")

# The states of a heatmap's cell: nothing there, held, inherited what was wrong, wrong by itself, the origin named.
ABSENT, HELD, CONTAMINATED, ORIGIN, NAMED = range(5)
# A strain is one byte: `AT_BOUND` is 1, the bound itself, `PER_DECADE` up is ten times that, `BEYOND` is infinite.
AT_BOUND, PER_DECADE, BEYOND = 127, 42, 255


@dataclass(frozen=True)
class RowKey:
    """A comparison: a tap of one stage in one phase and scope (`repeat` distinguishes doubles of a check)."""

    stage: str
    tap: str
    phase: str
    layer: int | None
    scope: str
    repeat: int = 0


@dataclass(frozen=True)
class Worst:
    """A comparison and the measure of it that came nearest to its bound, or furthest beyond it."""

    key: RowKey
    step: int
    ok: bool
    strain: float
    measure: Measure | None
    note: str = ""

    def beats(self, other: Worst | None) -> bool:
        """Return whether this is worse: broken before held, then by strain."""
        return other is None or (not self.ok, self.strain) > (not other.ok, other.strain)


@dataclass
class StageSummary:
    """A stage in one phase over all checks: its worst comparison, columns compared and broken, and since when."""

    worst: Worst
    checks: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    first_broken: int | None = None


@dataclass(frozen=True)
class BadStep:
    """The first step that disagreed.

    origin:  {stage, tap, phase, layer} as the line has it. origins: every link that is wrong by itself, in order.
    key, measures, note: of the comparison that `origin` names, None and empty if the line does not hold it.
    roles:   comparisons by `HELD`, `CONTAMINATED`, `ORIGIN` and `NAMED`.
    fitting: settings that were not declared and fit better, as `key = value`; empty without any. fits: whether the
             whole step agrees under them.
    """

    step: int
    origin: Json | None
    origins: tuple[Json, ...]
    cause: str
    key: RowKey | None
    measures: tuple[Measure, ...]
    note: str
    roles: Mapping[int, int]
    fitting: str = ""
    fits: bool = False


@dataclass
class Cells:
    """The comparisons as they are read, by row and column number."""

    row: array[int] = field(default_factory=lambda: array("l"))
    column: array[int] = field(default_factory=lambda: array("l"))
    state: array[int] = field(default_factory=lambda: array("B"))
    strain: array[int] = field(default_factory=lambda: array("B"))
    meta: array[int] = field(default_factory=lambda: array("l"))
    unequal: array[float] = field(default_factory=lambda: array("d"))  # -1: there is no twin


@dataclass
class MeasureCells:
    """A measure's values and bounds over the cells that have it, by position in `Cells`; an open side is NaN."""

    cell: array[int] = field(default_factory=lambda: array("l"))
    value: array[float] = field(default_factory=lambda: array("d"))
    low: array[float] = field(default_factory=lambda: array("d"))
    high: array[float] = field(default_factory=lambda: array("d"))
    basis: array[int] = field(default_factory=lambda: array("l"))
    broken: array[int] = field(default_factory=lambda: array("b"))


@dataclass
class Checks:
    """The contents of the page about the checks of a run."""

    lines: list[tuple[int, str, int]] = field(default_factory=list)  # (step, verdict, broken comparisons)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    not_covered: Counter[str] = field(default_factory=Counter)
    not_exercised: tuple[str, ...] | None = None  # levers that no check exercised; None before the first check
    unread: Counter[str] = field(default_factory=Counter)  # schema → lines that this page cannot read
    damaged: int = 0  # lines that are not what was written, here or set aside by a resume: nobody knows their verdicts
    first_bad: BadStep | None = None
    compared: Counter[str] = field(default_factory=Counter)  # scope → comparisons over all checks
    worst: dict[str, Worst] = field(default_factory=dict)  # by scope
    stages: dict[tuple[str, str], StageSummary] = field(default_factory=dict)  # by (phase, stage)
    steps: list[int] = field(default_factory=list)  # of the columns
    rows: dict[RowKey, int] = field(default_factory=dict)
    cells: Cells = field(default_factory=Cells)
    measures: dict[str, MeasureCells] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    metas: dict[tuple[int, str], int] = field(default_factory=dict)
    _bases_size: int = 0

    @property
    def verdict(self) -> str:
        """The verdict by `lockstep.core.parity.measures.verdict.overall`; `not_checked` if no check was ever due."""
        if self.counts["disagreed"]:
            return "disagreed"
        if self.unread or self.damaged:
            return "could_not"
        if not self.lines:
            return "not_checked"
        return "agreed" if self.counts["agreed"] and not self.counts["could_not"] else "could_not"

    def add(self, check: Json) -> None:
        """Take in one line. Raises KeyError, TypeError or ValueError if it is not a check."""
        schema = check.get("schema", SCHEMAS[-1])
        if schema not in SCHEMAS:
            self.unread[str(schema)] += 1
            return
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
        if findings:
            idle = [str(item) for item in check.get("not_exercised", [])]
            before = idle if self.not_exercised is None else self.not_exercised
            self.not_exercised = tuple(lever for lever in before if lever in idle)
        roles, named = _roles(check, findings)
        if verdict == "disagreed" and (self.first_bad is None or step < self.first_bad.step):
            self.first_bad = _bad_step(step, check, roles, findings[named] if named is not None else None)
        if findings:
            self._add_findings(step, findings, roles)

    def _add_findings(self, step: int, findings: Sequence[Json], roles: Sequence[int]) -> None:
        column, cells = len(self.steps), self.cells
        self.steps.append(step)
        doubles: Counter[RowKey] = Counter()
        for finding, role in zip(findings, roles, strict=True):
            key = _key(finding)
            doubles[key] += 1
            if doubles[key] > 1:
                key = RowKey(key.stage, key.tap, key.phase, key.layer, key.scope, doubles[key] - 1)
            measures = [_measure(m) for m in finding["measures"]]
            ok, unequal, note = bool(finding["ok"]), finding.get("unequal"), str(finding.get("note") or "")
            worst = _worst(key, step, ok, measures, note)
            cell = len(cells.row)
            cells.row.append(self.rows.setdefault(key, len(self.rows)))
            cells.column.append(column)
            cells.state.append(role)
            cells.strain.append(strain_code(worst.strain, ok))
            cells.meta.append(self.metas.setdefault((int(finding["size"]), note), len(self.metas)))
            cells.unequal.append(-1.0 if unequal is None else float(unequal))
            for measure in measures:
                found = self.measures.setdefault(measure.name, MeasureCells())
                found.cell.append(cell)
                found.value.append(measure.value)
                found.low.append(math.nan if measure.low is None else measure.low)
                found.high.append(math.nan if measure.high is None else measure.high)
                found.basis.append(self._basis(measure.basis))
                found.broken.append(not measure.ok)
            self._judge(worst, column)

    def _judge(self, worst: Worst, column: int) -> None:
        key = worst.key
        self.compared[key.scope] += 1
        if worst.beats(self.worst.get(key.scope)):
            self.worst[key.scope] = worst
        stage = self.stages.setdefault((key.phase, key.stage), StageSummary(worst))
        stage.checks.add(column)
        if not worst.ok:
            stage.broken.add(column)
            stage.first_broken = worst.step if stage.first_broken is None else min(worst.step, stage.first_broken)
        if worst.beats(stage.worst):
            stage.worst = worst

    def _basis(self, basis: str) -> int:
        """Return the number of a basis; beyond `BASES_LIMIT` its figures are left out, so that few texts are left."""
        if basis not in self.bases:
            if self._bases_size + len(basis) > BASES_LIMIT:
                basis = f"{NUMBER.sub('#', basis)[:200]} (figures: parity.jsonl)"
            self._bases_size += len(basis) * (basis not in self.bases)
        return self.bases.setdefault(basis, len(self.bases))


def read_checks(path: Path, about: Json, notes: list[str]) -> Checks:
    """Return all checks in `path`; none without a file. about: run.json.

    Raises UserError that names a line that is intact and no check.
    """
    checks = Checks()
    damaged: list[int] = []
    for number, check in json_lines(path, notes, damaged):
        try:
            checks.add(check)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{path}, line {number}: not a check ({reason})") from error
    checks.damaged = len(damaged) + sum(len(lost["checks"]) for lost in about.get("damaged", []))
    for schema, lines in checks.unread.items():
        notes.append(f"{lines} lines of {path.name} are of schema {schema}, which this page cannot read.")
    return checks


def strain_code(strain: float, ok: bool) -> int:
    """Encode a strain as one byte: at most `AT_BOUND` if and only if the comparison held."""
    if not math.isfinite(strain):
        return BEYOND
    place = AT_BOUND + round(PER_DECADE * math.log10(strain)) if strain > 0 else 1
    return min(max(place, 1), AT_BOUND) if ok else min(max(place, AT_BOUND + 1), BEYOND - 1)


def _key(finding: Json) -> RowKey:
    layer = finding["layer"]
    return RowKey(
        str(finding["stage"]),
        str(finding["tap"]),
        str(finding["phase"]),
        None if layer is None else int(layer),
        str(finding["scope"]),
    )


def _measure(tree: Json) -> Measure:
    low, high = tree.get("low"), tree.get("high")
    return Measure(
        str(tree["name"]),
        float(tree["value"]),
        None if low is None else float(low),
        None if high is None else float(high),
        str(tree.get("basis", "")),
    )


def _worst(key: RowKey, step: int, ok: bool, measures: Sequence[Measure], note: str) -> Worst:
    measure = max(measures, key=lambda m: m.strain) if measures else None
    return Worst(key, step, ok, measure.strain if measure else math.inf, measure, note)


def _roles(check: Json, findings: Sequence[Json]) -> tuple[list[int], int | None]:
    """Return each finding's role, and the index of the origin; lines of schema 1 do not have roles."""
    origin = check.get("origin") or {}
    by_itself = any(not f["ok"] and f["scope"] != "end_to_end" for f in findings)
    roles: list[int] = []
    named: int | None = None
    for place, finding in enumerate(findings):
        if finding["ok"]:
            roles.append(HELD)
            continue
        role = finding.get("role")
        inherited = by_itself and finding["scope"] == "end_to_end" if role is None else role == "contaminated"
        roles.append(CONTAMINATED if inherited else ORIGIN)
        if named is None and not inherited and all(finding[k] == origin.get(k) for k in ("stage", "tap", "phase")):
            named = place
            roles[-1] = NAMED
    return roles, named


def _table(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _bad_step(step: int, check: Json, roles: Sequence[int], named: Json | None) -> BadStep:
    origin, fitting = check.get("origin"), _table(check.get("fitting"))
    settings = _table(fitting.get("settings"))
    return BadStep(
        step=step,
        origin=origin,
        origins=tuple(check.get("origins") or ([origin] if origin else [])),
        cause=str(check.get("cause") or ""),
        key=_key(named) if named else None,
        measures=tuple(_measure(m) for m in named["measures"]) if named else (),
        note=str(named.get("note") or "") if named else "",
        roles=Counter(roles),
        fitting=", ".join(f"{key} = {value!r}" for key, value in settings.items()),
        fits=bool(fitting.get("agrees")),
    )

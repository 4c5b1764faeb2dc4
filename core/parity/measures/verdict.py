"""Findings and verdicts as data: the measured number, its bound, the bound's basis, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.core.parity.reference.stages import is_operation, place

SCHEMA = 2

# Stages that compute no tensor. Agreement in these stages alone is no evidence about the arithmetic.
BOOKKEEPING = frozenset(
    {"tokens", "weights", "clip_coefficient", "learning_rate", "step_count", "record", "checkpoint"}
)

Outcome = Literal["agreed", "disagreed", "could_not"]
Scope = Literal["local", "end_to_end", "over_steps"]


@dataclass(frozen=True)
class Measure:
    """A measured number, its allowed interval (None = open on that side), and the basis of the interval in words."""

    name: str
    value: float
    low: float | None
    high: float | None
    basis: str

    @property
    def ok(self) -> bool:
        """Return whether the value is in its interval; NaN never is."""
        if math.isnan(self.value):
            return False
        return (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)

    @property
    def strain(self) -> float:
        """The value relative to its bound; above 1 the bound is broken. Findings are ordered by it."""
        if math.isnan(self.value):
            return math.inf
        if self.name == "excess" and self.low and self.high and self.low < 1 < self.high:
            # For a ratio, half and double are equally far from 1.
            if self.value <= 0:
                return math.inf
            return math.log(self.value) / math.log(self.high if self.value >= 1 else self.low)
        if self.low is not None and self.low <= 0:
            # Signed, around 0.
            reach = self.high if self.value >= 0 else self.low
            return 0.0 if reach is None else _ratio(abs(self.value), abs(reach))
        above = _ratio(self.value, self.high) if self.high is not None else 0.0
        below = _ratio(self.low, self.value) if self.low else 0.0
        return max(above, below)


def _ratio(a: float, b: float) -> float:
    if b <= 0:
        return math.inf if a > 0 else 0.0
    return a / b


# Prefixes of taps that are means: over all parameters or checks; over layers, followed by the tensor; over whole
# matrices.
OVER_ALL, OVER_LAYERS, OVER_MATRICES = "geometric mean", "mean over layers of ", "median over matrices"


@dataclass(frozen=True)
class Finding:
    """The comparison of one tap.

    stage: name of a stage in core/parity/reference/stages.py.
    tap: canonical name.
    phase: `forward`, `backward`, `update`, `data` or `state`.
    layer: number of the block, or None.
    scope: `local` if the reference computed from the candidate's own inputs to the stage; `end_to_end` if it started
    from the weights and the batch; `over_steps` for a bias summed over the checks so far.
    size: count of numbers compared.
    unequal: share of them whose bits differ from the twin's; None if unknown.
    """

    stage: str
    tap: str
    phase: str
    layer: int | None
    scope: Scope
    measures: tuple[Measure, ...]
    size: int
    unequal: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Return whether every measure holds. A finding without measures compared nothing and does not hold."""
        return bool(self.measures) and self.size > 0 and all(m.ok for m in self.measures)

    @property
    def is_mean(self) -> bool:
        """Return whether this is a mean of comparisons. Each of these locates a fault better than their mean."""
        return self.tap.startswith((OVER_ALL, OVER_LAYERS, OVER_MATRICES))

    @property
    def worst(self) -> Measure:
        """The measure nearest to its bound, or furthest beyond it."""
        return max(self.measures, key=lambda m: m.strain)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping. Infinities and NaN become strings, because JSON has none."""
        tree = asdict(self) | {"ok": self.ok}
        tree["measures"] = [{k: _json_number(v) for k, v in asdict(m).items()} | {"ok": m.ok} for m in self.measures]
        return tree


@dataclass(frozen=True)
class Fitting:
    """Casts, or an attention kernel, that fit a step better than the declared ones.

    settings, declared: setting's dotted key → value that fits, and declared value.
    agrees: whether the whole step agrees with these settings.
    left: the origin that remains with them, or None.
    """

    settings: Mapping[str, str]
    declared: Mapping[str, str]
    agrees: bool
    left: Finding | None

    def to_json(self) -> dict[str, Any]:
        """Return the settings for a verdict's JSON."""
        said = {"settings": dict(self.settings), "declared": dict(self.declared)}
        return {**said, "agrees": self.agrees, "left": _origin_json(self.left)}


@dataclass(frozen=True)
class Check:
    """The findings of one checked step.

    seconds: wall time of the check.
    cause: common cause of broken findings in words, or None.
    not_exercised: levers of the run without effect on the compared numbers (core/parity/judge/exercised.py).
    fitting: other casts that fit a step that disagreed (core/parity/diagnose/fitting.py).
    """

    step: int
    findings: tuple[Finding, ...]
    not_covered: tuple[str, ...]
    seconds: float = 0.0
    cause: str | None = None
    not_exercised: tuple[str, ...] = ()
    fitting: Fitting | None = None

    @property
    def verdict(self) -> Outcome:
        """The verdict: `disagreed` if a finding fails, `could_not` if no computed value was compared, else `agreed`."""
        if not all(f.ok for f in self.findings):
            return "disagreed"
        return "agreed" if any(f.stage not in BOOKKEEPING for f in self.findings) else "could_not"

    @property
    def origins(self) -> tuple[Finding, ...]:
        """The broken links in the order of the chain, one finding each: stages that are wrong from their own inputs.

        A finding that is broken end to end is an origin only if no local link is broken, because it inherits earlier
        errors.
        """
        broken = [f for f in self.findings if not f.ok]
        by_themselves = [f for f in broken if f.scope != "end_to_end"] or broken
        links: dict[tuple[Any, ...], Finding] = {}
        for finding in sorted(by_themselves, key=lambda f: (place(f.stage, f.phase, f.layer), f.is_mean)):
            # Single operations share a place in the chain, so each operation of each module is a link.
            own = (finding.stage, finding.tap) if is_operation(finding.stage) else ()
            links.setdefault((*place(finding.stage, finding.phase, finding.layer), *own), finding)
        return tuple(links.values())

    @property
    def origin(self) -> Finding | None:
        """The first broken link of the chain."""
        return next(iter(self.origins), None)

    def role(self, finding: Finding) -> str | None:
        """Return `origin` for a broken link, `contaminated` if only its inputs were wrong, None if it holds."""
        if finding.ok:
            return None
        local = any(not f.ok and f.scope != "end_to_end" for f in self.findings)
        return "contaminated" if local and finding.scope == "end_to_end" else "origin"

    @property
    def worst(self) -> Finding | None:
        """The finding nearest to its bound, or furthest beyond it."""
        return max(self.findings, key=lambda f: f.worst.strain if f.measures else math.inf, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return one line of `parity.jsonl` as a mapping."""
        return {
            "schema": SCHEMA,
            "step": self.step,
            "verdict": self.verdict,
            "origin": _origin_json(self.origin),
            "origins": [_origin_json(f) for f in self.origins],
            "cause": self.cause,
            "fitting": self.fitting.to_json() if self.fitting else None,
            "stages": [f.to_json() | {"role": self.role(f)} for f in self.findings],
            "not_covered": list(self.not_covered),
            "not_exercised": list(self.not_exercised),
            "seconds": self.seconds,
        }


def verdict_json(checks: Sequence[Check], **context: Any) -> dict[str, Any]:
    """Return the verdict over several checked steps, with the documented keys of `--json`."""
    first = next((c for c in checks if c.verdict == "disagreed"), None)
    outcome = overall(checks)
    return {
        "schema": SCHEMA,
        "verdict": outcome,
        "first_bad_step": first.step if first else None,
        "origin": _origin_json(first.origin) if first else None,
        "cause": first.cause if first else None,
        "fitting": first.fitting.to_json() if first and first.fitting else None,
        **context,
        "stages": [f.to_json() | {"role": c.role(f), "step": c.step} for c in checks for f in c.findings],
        "not_covered": sorted({item for c in checks for item in c.not_covered}),
        "not_exercised": list(never_exercised(checks)),
        "origins": [_origin_json(f) for f in first.origins] if first else [],
        "steps": [c.step for c in checks],
        "seconds": sum(c.seconds for c in checks),
    }


def overall(checks: Sequence[Check]) -> Outcome:
    """Return `disagreed` if any check did, `could_not` if one compared nothing or there are none, else `agreed`."""
    if any(c.verdict == "disagreed" for c in checks):
        return "disagreed"
    if not checks or any(c.verdict == "could_not" for c in checks):
        return "could_not"
    return "agreed"


def never_exercised(checks: Sequence[Check]) -> tuple[str, ...]:
    """List the levers that no check exercised, in the order of the first check."""
    first, *others = [c.not_exercised for c in checks] or [()]
    return tuple(lever for lever in first if all(lever in other for other in others))


def _origin_json(finding: Finding | None) -> dict[str, Any] | None:
    if finding is None:
        return None
    return {"stage": finding.stage, "tap": finding.tap, "phase": finding.phase, "layer": finding.layer}


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

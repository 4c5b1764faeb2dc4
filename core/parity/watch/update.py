"""Judge the update of one step of a user's loop: moments, weights and hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.measures import calibrated_bounds, scalar_bounds
from lockstep.core.parity.measures.distances import Distances, distances
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.watch.findings import exact, few, layer_in
from lockstep.core.parity.watch.library_rules import RULES
from lockstep.core.parity.watch.snapshot import Snapshot
from lockstep.core.parity.watch.step import Step
from lockstep.core.parity.watch.uncovered import Uncovered
from lockstep.core.parity.watch.update_rules import EPSILON, EXACT, OF_SUMS, Arithmetic, Rule

# `p + Δ` has an error of half an ulp of p. Allow this many ulp of ‖p‖/‖Δ‖.
ULPS_OF_WEIGHTS = 4.0
# An update by factored moments has three sums over a tensor: the norm of the weights, the factors, and its own norm.
SUMS = 3


def skipped_by_scaler(step: Step) -> str:
    """Return the reason why a step without an update is correct: its gradients are not finite. Empty otherwise."""
    finite = all(np.isfinite(g).all() for g in step.grads.values())
    if finite or not step.fired or any(step.fired):
        return ""
    return "gradients are not finite and optimizer.step() was skipped, as a GradScaler does while it adjusts its scale"


def update(step: Step, skipped: str, missing: Uncovered) -> Iterator[Finding]:
    """Compare moments and update with the rule's, applied to the candidate's own gradients, state and hyperparameters.

    skipped: the reason why this step has no update, or empty. Errors are relative to the update.
    """
    if skipped:
        missing.skip("update", skipped)
        return
    for before, after, rule, kind, fired in zip(
        step.before, step.after, step.rules, step.kinds, step.fired, strict=True
    ):
        counted = sum(after.steps.get(n, 0) != before.steps.get(n, 0) + 1 for n in before.grads if n in after.steps)
        basis = "one optimizer step inside the block, counted once for every parameter with a gradient"
        note = f"optimizer.step() ran {fired} times" if fired != 1 else ""
        yield exact("step_count", "step", counted + (fired != 1), 1, basis, note, "update")
        idle = [n for n in before.params if n not in before.grads]
        if idle and fired == 1:
            moved = [n for n in idle if not np.array_equal(before.params[n], after.params[n], equal_nan=True)]
            basis = "parameters without a gradient do not change"
            yield exact("update", "without gradient", len(moved), len(idle), basis, few(moved))
        if fired != 1:
            missing.append("update: judged only with exactly one optimizer.step() inside the block")
        elif rule is None:
            missing.skip("update", f"{kind} has no rule")
            missing.append(f"update: no rule for {kind} (known: {', '.join(RULES)}; rule= names one, or is a function)")
        else:
            for name in before.grads:
                yield from _updated(name, before, after, rule, step.dtypes[name], missing)


def _updated(
    name: str, before: Snapshot, after: Snapshot, rule: Rule, dtype: str, missing: Uncovered
) -> Iterator[Finding]:
    p, g = before.params[name].astype(np.float64), before.grads[name].astype(np.float64)
    if not np.isfinite(g).all():
        missing.append(f"update of {name}: its gradient is not finite")
        return
    old = {kind: by_name[name].astype(np.float64) for kind, by_name in before.moments.items() if name in by_name}
    count = int(before.steps.get(name, 0)) + 1
    group = before.groups[name] | {"dtype": dtype, "in_codes": name in after.coded}
    w, t = (rule(p, g, old, count, group, a) for a in (Arithmetic.of(dtype), EXACT))
    stream: type[np.floating] = np.float64 if dtype == "float64" else np.float32
    for kind, moment in t.moments.items():
        found = after.moments.get(kind, {}).get(name)
        tap = f"{kind}/{name}"
        if found is None:
            yield exact("moments", tap, 1, p.size, "the optimizer stores its rule's moments", "not stored", "update")
            continue
        band = t.kinds.get(kind, "exp_avg_sq" if kind.endswith("_sq") else "exp_avg")
        d = distances(found.astype(np.float64), w.moments[kind], moment, stream)
        yield _local("moments", tap, band, d, moment, dtype, 0.0)
    moves = [x - p for x in (after.params[name].astype(np.float64), w.param, t.param)]
    d = distances(moves[0], moves[1], moves[2], stream)
    lost = float(np.mean((moves[1] == 0) & (moves[2] != 0)))
    note = f"{lost:.0%} of the update is below half an ulp of {dtype} weights and vanishes" if lost > 0.5 else ""
    size = float(np.linalg.norm(moves[2]))
    of_weights = ULPS_OF_WEIGHTS * EPSILON[dtype] * (float(np.linalg.norm(p)) / size if size else 0.0)
    yield _local("update", name, t.kinds.get("update", "update"), d, p, dtype, of_weights, note)


def _local(
    stage: str, tap: str, band: str, d: Distances, x: np.ndarray, dtype: str, of_weights: float, note: str = ""
) -> Finding:
    """Compare a moment or an update with its bounds.

    band: the kind of its calibrated bounds, or OF_SUMS.
    x: a tensor of its shape.
    of_weights: the relative error that the rounding of the weights adds.
    """
    if dtype == "float64":
        basis = f"FP64: {calibrated_bounds.FP64_LIMIT:.0e}, and {ULPS_OF_WEIGHTS:g} ulp of the weights for an update"
        most = calibrated_bounds.FP64_LIMIT + of_weights
        found: tuple[Measure, ...] = (Measure("relative_error", d.relative_error, None, most, basis),)
    elif band == OF_SUMS:
        terms, words = scalar_bounds.norm_bound(x.size)
        basis = f"{SUMS} sums ({words}) in {dtype}, and {ULPS_OF_WEIGHTS:g} ulp of the weights for an update"
        most = SUMS * terms * EPSILON[dtype] + of_weights
        found = (Measure("relative_error", d.relative_error, None, most, basis),)
    else:
        found = calibrated_bounds.measures("fp32/eager", band, d, calibrated_bounds.independent(x.shape))
    return Finding(
        stage=stage, tap=tap, phase="update", layer=layer_in(tap), scope="local", measures=found, size=x.size,
        unequal=d.unequal, note=note,
    )  # fmt: skip


def check_declared(declared: Any, optimizers: Sequence[Any]) -> None:
    """Raise UserError for a declared hyperparameter that no optimizer has.

    A function as declaration is not checked here.
    """
    known = {key for optimizer in optimizers for group in optimizer.param_groups for key in group}
    if isinstance(declared, Mapping) and (unknown := sorted(set(declared) - known)):
        raise UserError(f"declared= names {unknown[0]!r}, which is no hyperparameter of the optimizer")


def hyperparameters(step: Step, declared: Any, missing: Uncovered) -> Iterator[Finding]:
    """Compare the optimizer's hyperparameters with the user's declaration. Raises UserError for an unknown name."""
    if declared is None:
        missing.append("hyperparameters: read from the optimizer and not compared (declared= compares them)")
        return
    wrong: dict[str, list[str]] = {}
    for before in step.before:
        for name, group in before.groups.items():
            due = declared(name, step.number) if callable(declared) else declared
            for key, value in due.items():
                if key not in group:
                    raise UserError(f"declared= names {key!r}, which is no hyperparameter of the optimizer of {name}")
                if group[key] != value:
                    wrong.setdefault(f"{key} {group[key]!r}, declared {value!r}", []).append(name)
    note = "; ".join(f"{what}: {few(names)}" for what, names in wrong.items())
    count = sum(map(len, wrong.values()))
    size = max(sum(len(before.groups) for before in step.before), 1)
    stage = "learning_rate" if wrong and all(what.startswith("lr ") for what in wrong) else "update"
    yield exact(stage, "hyperparameters", count, size, "equal to the declared numbers", note, "update")

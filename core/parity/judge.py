"""The judgement of one step: evidence from a candidate against twin and truth of a reference, stage by stage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from core.backend import Arrays, Backend, NotSupported, Session
from core.config import CompileConfig, PrecisionConfig, RunConfig
from core.init import init_parameters
from core.names import Shape, layer_of, parameter_shapes
from core.parity import bands, scalars
from core.parity.evidence import Evidence
from core.parity.excess import Distances, distances
from core.parity.stages import PHASES, forward_stages
from core.parity.verdict import Check, Finding, Measure, Scope
from core.schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Reference:
    """Two sessions of one reference: the twin at the candidate's declared precision, the truth in FP64.

    bound: (recipe, kind, distances, numbers) → measures with their bounds; calibration puts a recorder here.
    """

    config: RunConfig
    twin: Session
    truth: Session
    bound: Callable[[str, str, Distances, int], tuple[Measure, ...]] = bands.measures

    @classmethod
    def open(cls, backend: Backend, config: RunConfig) -> Reference:
        """Open both sessions of `backend`, uncompiled; under fp64 the truth is the twin."""
        plain = config.model_copy(update={"compile": CompileConfig(enabled=False)})
        twin = backend.open(plain)
        if config.precision.policy == "fp64":
            return cls(config, twin, twin)
        return cls(config, twin, backend.open(plain.model_copy(update={"precision": PrecisionConfig(policy="fp64")})))

    def close(self) -> None:
        """Close both sessions."""
        self.twin.close()
        if self.truth is not self.twin:
            self.truth.close()


def judge(evidence: Evidence, reference: Reference) -> Check:
    """Compare every link of the chain that the evidence covers, in the chain's order."""
    started = time.perf_counter()
    findings: list[Finding] = []
    missing = list(evidence.not_covered)
    for part in (_data, _weights, _forward, _losses_and_gradients, _scalars, _update):
        try:
            findings.extend(part(evidence, reference))
        except NotSupported as reason:
            missing.append(f"{part.__name__.strip('_').replace('_', ' ')}: {reason}")
        if part is _weights and not findings[-1].ok and findings[-1].tap == "names":
            missing.append("all that follows from the weights: the reference has no such parameters")
            break
    if reference.config.compile.enabled and evidence.taps:
        missing.append(
            "forward stages inside the compiled program: they were observed in the same model's eager program"
        )
    return Check(
        evidence.record.step, tuple(findings), tuple(missing), time.perf_counter() - started + evidence.seconds
    )


def finding(
    stage: str,
    tap: str,
    scope: Scope,
    found: tuple[Measure, ...],
    size: int,
    unequal: float | None = None,
    note: str = "",
) -> Finding:
    """A finding with its stage's phase and its tap's layer."""
    return Finding(stage, tap, PHASES[stage], layer_of(tap), scope, found, size, unequal, note)


def _exact(stage: str, tap: str, mismatches: int, size: int, basis: str, note: str = "") -> Finding:
    return finding(stage, tap, "local", (Measure("mismatches", float(mismatches), None, 0.0, basis),), size, note=note)


def _data(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    same = evidence.record.digest == evidence.batch.digest()
    basis = "equal bits, by SHA-256"
    yield _exact("tokens", "tokens", 0 if same else 1, evidence.batch.tokens.size, basis)


def _weights(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Names and shapes of weights and moments always; at step 0, the weights' bits against core/init.py."""
    shapes, params = parameter_shapes(reference.config.model), evidence.before.params
    wrong: dict[str, None] = {}
    for state in (evidence.before, evidence.after):
        wrong |= dict.fromkeys(_differing(state.params, shapes))
        for kind in MOMENTS:
            wrong |= dict.fromkeys(f"{kind}/{name}" for name in _differing(state.optimizer.get(kind, {}), shapes))
    yield _exact(
        "weights",
        "names",
        len(wrong),
        len(shapes),
        "equal names and shapes",
        ", ".join(list(wrong)[:5]),
    )
    if evidence.before.step == 0 and not wrong:
        initial = init_parameters(reference.config.model, reference.config.seed)
        differ = {name: int(np.count_nonzero(params[name] != values)) for name, values in initial.items()}
        basis = "equal bits, with core/init.py"
        note = ", ".join(name for name, count in differ.items() if count)
        yield _exact("weights", "initial", sum(differ.values()), sum(v.size for v in initial.values()), basis, note)


def _differing(arrays: Arrays, shapes: Mapping[str, Shape]) -> list[str]:
    """Names that are missing, too many, or of another shape."""
    return sorted(
        n
        for n in shapes.keys() | arrays.keys()
        if n not in shapes or n not in arrays or tuple(np.shape(arrays[n])) != shapes[n]
    )


def _compare(
    reference: Reference, stage: str, kind: str, tap: str, scope: Scope, c: np.ndarray, w: np.ndarray, t: np.ndarray
) -> Finding:
    if c.shape != t.shape:
        note = f"candidate {c.shape}, reference {t.shape}"
        return _exact(stage, tap, 1, t.size, "shapes must be equal", note)
    stream = np.float64 if reference.config.precision.policy == "fp64" else np.float32
    d = distances(c, w, t, stream)
    return finding(
        stage,
        tap,
        scope,
        reference.bound(bands.recipe(reference.config), kind, d, bands.independent(t.shape)),
        t.size,
        d.unequal,
    )


def _forward(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Each forward stage from the candidate's own inputs to it."""
    if not evidence.taps:
        return
    for stage in forward_stages(reference.config.model):
        if stage.id == "nll":
            continue  # the probe's NLL is judged end to end, and the loss from it
        if absent := [t for t in (*stage.taps.values(), stage.tap) if t not in evidence.taps]:
            yield _exact(
                stage.id,
                stage.tap,
                len(absent),
                len(absent),
                "every tap that was asked for is there",
                ", ".join(absent),
            )
            continue
        inputs = {role: evidence.taps[tap] for role, tap in stage.taps.items()}
        inputs |= {role: evidence.before.params[name] for role, name in stage.params.items()}
        inputs |= {"tokens": evidence.tapped.tokens} if "tokens" in stage.batch else {}
        w, t = (s.run_stage(stage.id, inputs)["out"] for s in (reference.twin, reference.truth))
        yield _compare(reference, stage.id, f"local/{stage.id}", stage.tap, "local", evidence.taps[stage.tap], w, t)


def _losses_and_gradients(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Per-token NLL and every parameter gradient end to end; the loss from the candidate's own NLL."""
    if evidence.probed is None:
        return
    reference.twin.load(evidence.before)
    w = reference.twin.gradients(evidence.probe)
    t = w
    if reference.truth is not reference.twin:
        reference.truth.load(evidence.before)
        t = reference.truth.gradients(evidence.probe)
    c = evidence.probed
    yield _compare(reference, "nll", "nll", "nll", "end_to_end", c.nll, w.nll, t.nll)
    if c.nll.shape == t.nll.shape:
        yield finding("loss", "loss", "local", (scalars.loss(c.loss, c.nll, evidence.probe),), 1)
    absent = sorted(t.grads.keys() ^ c.grads.keys())
    yield _exact(
        "gradients", "names", len(absent), len(t.grads), "every parameter has a gradient", ", ".join(absent[:5])
    )
    excesses: list[float] = []
    for name in t.grads:
        if name in c.grads:
            found = _compare(
                reference,
                "gradients",
                bands.gradient_kind(name),
                name,
                "end_to_end",
                c.grads[name],
                w.grads[name],
                t.grads[name],
            )
            excesses += [m.value for m in found.measures if m.name == "excess"]
            yield found
    if excesses:
        mean = math.exp(math.fsum(math.log(max(e, 1e-300)) for e in excesses) / len(excesses))
        together = Distances(mean, 0.0, 0.0, 0.0, 0.0, 0.0)
        numbers = sum(g.size for g in t.grads.values())
        bounds = reference.bound(bands.recipe(reference.config), "gradients/together", together, numbers)
        only = tuple(m for m in bounds if m.name == "excess")
        yield finding("gradients", "geometric mean", "end_to_end", only, len(excesses))


def _scalars(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    config, record = reference.config, evidence.record
    dtype: np.dtype[np.floating] = np.dtype(np.float64 if config.precision.policy == "fp64" else np.float32)
    if stepped := evidence.stepped:
        if stepped.nll.shape == evidence.batch.targets.shape:
            of_step = scalars.loss(record.loss, stepped.nll, evidence.batch)
            yield finding("loss", "loss_of_step", "local", (of_step,), 1)
        norm = scalars.gradient_norm(record.grad_norm, stepped.grads)
        yield finding("grad_norm", "grad_norm", "local", (norm,), 1)
    coefficient = scalars.clip_coefficient(record.clip_coefficient, record.grad_norm, config.optim, dtype)
    yield finding("clip_coefficient", "clip_coefficient", "local", (coefficient,), 1)
    due = learning_rate(config.optim, evidence.before.step + 1, config.train.steps)
    yield finding("learning_rate", "learning_rate", "local", (scalars.learning_rate(record.lr, due),), 1)


def _update(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Moments and update from the candidate's own gradients, state and coefficient, relative to the update."""
    config, before, after = reference.config, evidence.before, evidence.after
    steps = before.step + 1
    counted = _exact(
        "step_count", "step", 0 if after.step == evidence.record.step == steps else 1, 1, "one step is one step"
    )
    grads = evidence.stepped.grads if evidence.stepped else {}
    if _differing(grads, {n: p.shape for n, p in before.params.items()}):
        yield counted
        return
    inputs: dict[str, np.ndarray] = {
        "step": np.asarray(before.step),
        "coefficient": np.asarray(evidence.record.clip_coefficient),
        "lr": np.asarray(learning_rate(config.optim, steps, config.train.steps)),
    }
    for prefix, arrays in {"params": before.params, "grads": grads, **before.optimizer}.items():
        inputs |= {f"{prefix}/{name}": array for name, array in arrays.items()}
    w, t = reference.twin.run_stage("update", inputs), reference.truth.run_stage("update", inputs)
    for kind in MOMENTS:
        for name in before.params:
            key = f"{kind}/{name}"
            yield _compare(reference, "moments", kind, key, "local", after.optimizer[kind][name], w[key], t[key])
    for name, old in before.params.items():
        c64, w64, t64 = (
            new.astype(np.float64) - old for new in (after.params[name], w[f"params/{name}"], t[f"params/{name}"])
        )
        yield _compare(reference, "update", "update", name, "local", c64, w64, t64)
    yield counted

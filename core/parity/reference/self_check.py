"""Check the reference before it judges a candidate. A wrong one rejects honest trainers and accepts faulty ones.

The reference opens a small model of the run's kind (tied or not, biases, grouped heads, ε, θ, optimizer) and is checked
by

* closed forms of every stage and of an AdamW step, in FP64 (core/parity/reference/closed_forms.py);
* its own differences: the gradients of each stage against (f(x + h·v) − f(x − h·v)) / 2h;
* causality by gradient, through the whole model: no gradient from a later position or another sequence, nor from
  another document under a document mask;
* its model against its own stages: the value at each tap must be the stage's result from the earlier taps;
* its declared precision: FP32 products are FP32 (TF32 has 10 bits of mantissa, and is JAX's default on GPUs), and under
  a narrower policy exactly the matrix products are rounded, by about as much as this format rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.backend import Backend, Batch, NotSupported
from lockstep.core.capabilities import RunsStages, ask
from lockstep.core.components.precision import FORMATS, POLICIES
from lockstep.core.config.schema import CompileConfig, PrecisionConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.graph import KINDS
from lockstep.core.model.names import GRADIENT, cancelled, parameter_shapes
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.place import return_large_blocks
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.compare import Reference, relative_difference
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.reference.closed_forms import DOCUMENTS, FORMS, LENGTH, ROWS, Subject, drawn
from lockstep.core.parity.reference.stages import chain, rounds_operands, shared_tensors, stages_of

# Central differences with h = 2⁻¹⁶ have an error of h² = 2e-10 times a third derivative, and of ε/h = 1e-11 from
# rounding.
WIDTH, DIFFERENCE_LIMIT = 2.0**-16, 1e-7
# Rounding normal numbers to unit roundoff u gives a relative error of 0.42·u (root mean square). Rounding operands and
# product gives 0.73·u. Below a quarter of u, no narrower format is in force, TF32 and FP16 (u/8) included. The backward
# pass of attention has seven roundings, some of which cancel, and stays below 4·u.
MOST_ROUNDOFFS, LEAST_ROUNDOFFS = 4.0, 0.25
# 1 + 2⁻¹² needs 12 bits of mantissa. FP32 has 23, TF32 has 10.
TF32_PROBE = 1.0 + 2.0**-12


@dataclass(frozen=True)
class ReferenceCheck:
    """The result of the reference's self-check: its findings, and the checks that were not possible, in words."""

    findings: tuple[Finding, ...]
    not_covered: tuple[str, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The failed findings, in the order of the checks."""
        return tuple(f for f in self.findings if not f.ok)


def require_sound(reference: Backend, config: RunConfig) -> ReferenceCheck:
    """Call `check_reference`. Raises UserError that names the first failed check."""
    check = check_reference(reference, config)
    if check.wrong:
        first, *others = check.wrong
        said = f"{first.stage}, {first.phase}: {first.tap}: {first.worst.name} {first.worst.value:.1e}"
        bounds = f"at most {first.worst.high:.1e}" if first.worst.high is not None else ""
        if first.worst.low is not None and first.worst.value < first.worst.low:
            bounds = f"at least {first.worst.low:.1e}"
        rest = f", and {len(others)} more of {len(check.findings)}" if others else ""
        raise UserError(f"the reference is wrong, so it does not judge: {said} ({bounds}: {first.worst.basis}){rest}")
    return check


def sound_reference(backend: Backend, config: RunConfig) -> Reference:
    """Open a reference and run its self-check. Raises UserError that names the first failed check."""
    return_large_blocks(config)
    opened = Reference.open(backend, config)
    try:
        return self_checked(opened, backend)
    except BaseException:
        opened.close()
        raise


def self_checked(opened: Reference, backend: Backend) -> Reference:
    """Return an opened reference after its self-check. Raises UserError as `require_sound`, on every rank."""
    not_asked = opened.ranks.of_first(lambda: require_sound(backend, opened.config).not_covered)
    return replace(opened, not_asked=not_asked)


def check_reference(reference: Backend, config: RunConfig) -> ReferenceCheck:
    """Run all checks of a reference. Parts that raise NotSupported, or models that it cannot open, are not covered."""
    subjects = Subjects(reference, small(config))
    questions: tuple[tuple[str, Callable[[Subjects], Iterator[Finding]]], ...] = (
        ("closed forms", _closed_forms),
        ("derivatives", _derivatives),
        ("causality by gradient", _causality),
        ("the model against its stages", _wiring),
        ("the declared precision", _precision),
    )
    found: list[Finding] = []
    missing: list[str] = []
    for what, question in questions:
        try:
            found += list(question(subjects))
        except NotSupported as reason:
            missing.append(f"{what} of the reference: {reason}")
        except Exception as error:  # a foreign reference; the check itself reports what it does not support
            missing.append(f"{what} of the reference: {_said(error)}")
    subjects.close()
    return ReferenceCheck(tuple(found), tuple(missing))


def small(config: RunConfig) -> RunConfig:
    """Return a run of the same kind, with a model of two layers and some thousand parameters."""
    model = config.model
    heads = 4
    kv_heads = {model.heads: heads, 1: 1}.get(model.kv_heads, 2)
    sizes = {"vocab_size": 40, "hidden": 32, "layers": 2, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": 24}
    # A head width other than hidden / heads is kept. A window ends inside the sequences.
    sizes |= {"head_width": 12 if model.head_width else 0, "window": 3 if model.window else 0, "positions": LENGTH + 1}
    train = {"batch_size": ROWS, "micro_batch_size": ROWS, "sequence_length": LENGTH, "ranks": 1, "curriculum": ""}
    return config.model_copy(
        update={
            "model": model.model_copy(update=sizes),
            "train": config.train.model_copy(update=train),
            "compile": CompileConfig(enabled=False),
        }
    )


class Subjects:
    """Sessions of the reference at a small model, one for each policy, opened at first use."""

    def __init__(self, reference: Backend, config: RunConfig) -> None:
        self.policy = config.precision.policy
        self._reference, self._config = reference, config
        self._opened: dict[str, Subject] = {}

    def at(self, policy: str) -> Subject:
        """Return the session at a policy.

        Raises NotSupported if the reference cannot open it or does not run stages.
        """
        if policy not in self._opened:
            precision = PrecisionConfig.model_validate({"policy": policy})
            config = self._config.model_copy(update={"precision": precision})
            try:
                session = self._reference.open(config)
            except Exception as error:  # a foreign reference, which may support no other model than the run's
                raise NotSupported(f"it opens no small model at {policy}: {_said(error)}") from error
            ask(session, RunsStages)
            if differ := sorted(session.state().params.keys() ^ parameter_shapes(config.model).keys()):
                raise NotSupported(f"its parameters have other names: {', '.join(differ[:3])}")
            self._opened[policy] = Subject(session, config)
        return self._opened[policy]

    def close(self) -> None:
        """Close the opened sessions."""
        for subject in self._opened.values():
            subject.session.close()


def _closed_forms(subjects: Subjects) -> Iterator[Finding]:
    truth = subjects.at("fp64")
    basis = "a closed form, in FP64"
    for form in FORMS:
        for stage, what, answer, due in form(truth):
            yield _finding(stage, what, relative_difference(answer, due), calibrated_bounds.FP64_LIMIT, basis, due.size)


def _derivatives(subjects: Subjects) -> Iterator[Finding]:
    truth = subjects.at("fp64")
    basis = "central differences of its own forward pass, in FP64"
    for name, stage in truth.stages().items():
        inputs = drawn(truth, stage)
        sent = truth.session.run_stage(name, inputs)
        for role in (*stage.reads, *stage.params):
            if f"grad/{role}" not in sent:
                raise NotSupported(f"it gives no gradients of {name}")
            direction = np.random.default_rng(2).standard_normal(np.shape(inputs[role]))
            sides = [truth.run(name, **{**inputs, role: inputs[role] + h * direction}) for h in (WIDTH, -WIDTH)]
            along = (sides[0] - sides[1]) / (2 * WIDTH)
            due, grad = float(np.vdot(inputs["grad"], along)), sent[f"grad/{role}"].astype(np.float64)
            scale = float(np.linalg.norm(inputs["grad"]) * np.linalg.norm(along))
            off = abs(float(np.vdot(grad, direction)) - due) / scale
            yield _finding(name, f"gradient of {role}", off, DIFFERENCE_LIMIT, basis, grad.size, "backward")


def _causality(subjects: Subjects) -> Iterator[Finding]:
    """Check causality with the loss of one position: later positions and the other sequence get zero gradients.

    Under a document mask, positions of earlier documents get zeros too.
    """
    truth = subjects.at("fp64")
    masked = truth.config.attention.document_mask
    at = LENGTH // 2
    weights = np.zeros((ROWS, LENGTH), np.float32)
    weights[0, at] = 1.0
    grad = truth.session.observe(_batch(truth.config, weights), [GRADIENT + "embed"])[GRADIENT + "embed"]
    reached = np.any(grad != 0, axis=-1)
    due = np.zeros_like(reached)
    due[0, : at + 1] = DOCUMENTS[0, : at + 1] == DOCUMENTS[0, at] if masked else True
    before = "earlier ones of its document" if masked else "earlier ones"
    basis = f"the gradient of the loss at a position reaches this position and {before}, and nothing else"
    wrong = Measure("mismatches", float(np.count_nonzero(reached != due)), None, 0.0, basis)
    yield Finding("attn", "causality by gradient", "backward", None, "local", (wrong,), due.size)


def _batch(config: RunConfig, weights: np.ndarray) -> Batch:
    """Return a batch of different tokens, with documents if the run uses them."""
    tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
    documents = DOCUMENTS if config.attention.needs_documents else None
    return Batch(tokens, tokens[:, ::-1].copy(), weights, documents)


def _wiring(subjects: Subjects) -> Iterator[Finding]:
    """Check every stage of every layer from its input taps, and its gradients."""
    truth = subjects.at("fp64")
    params = truth.session.state().params
    batch = uneven_weights(_batch(truth.config, np.ones((ROWS, LENGTH), np.float32)), 0)
    taps = truth.session.observe(batch, observed_names(truth.config))
    if unseen := [one.tap for one in stages_of(truth.config) if one.tap not in taps]:
        raise NotSupported(f"it shows no {unseen[0]}")
    # Shared tensors have several consumers, and a value that is 0 in exact arithmetic has no digits to compare.
    shared = {one.name for one in shared_tensors(truth.config)} | cancelled(truth.config.model).keys()
    basis = "the model's own stage on the model's own taps, in FP64"
    for stage in stages_of(truth.config):
        inputs = {role: taps[tap] for role, tap in stage.reads.items()} | {"grad": taps[GRADIENT + stage.tap]}
        inputs |= {role: params[name] for role, name in stage.params.items()}
        made = truth.session.run_stage(stage.id, inputs | {role: batch.arrays[role] for role in stage.batch})
        off = relative_difference(taps[stage.tap], made["out"])
        yield _finding(
            stage.id, stage.tap, off, calibrated_bounds.FP64_LIMIT, basis, made["out"].size, layer=stage.layer
        )
        for role in (*stage.reads, *stage.params):
            if (name := stage.sends(role)) not in shared:
                sent = made[f"grad/{role}"]
                off = relative_difference(taps[GRADIENT + name], sent)
                what = f"{stage.tap}, gradient of {role}"
                yield _finding(
                    stage.id, what, off, calibrated_bounds.FP64_LIMIT, basis, sent.size, "backward", layer=stage.layer
                )


def _precision(subjects: Subjects) -> Iterator[Finding]:
    """Compare every stage at the declared precision, and in the stream dtype, with FP64 on the same inputs."""
    policy = subjects.policy
    truth = subjects.at("fp64")
    if POLICIES[policy].exact:
        return
    yield from _not_tf32(subjects.at("fp32"))
    declared = subjects.at(policy)
    stages = truth.stages()
    chosen = POLICIES[policy]
    unit_of_all = FORMATS[chosen.operand].roundoff if chosen.rounds else None
    variants = [(name, name, unit_of_all) for name in stages]
    if chosen.fp8:
        in_fp8 = [name for name, stage in stages.items() if KINDS[stage.kind].in_fp8]
        variants += [(name, f"{name}/fp8", FORMATS["fp8"].roundoff) for name in in_fp8]
    for name, variant, unit in variants:
        # FP32 values, so that both sides get the same bits.
        drawn_at = drawn(truth, stages[name])
        inputs = {r: a.astype(np.float32) if a.dtype == np.float64 else a for r, a in drawn_at.items()}
        given = inputs
        if variant != name and chosen.fp8 == "delayed":
            given = inputs | {"amax": np.array([np.abs(inputs[role]).max() for role in ("x", "weight", "grad")])}
        answers, due = declared.session.run_stage(variant, given), truth.session.run_stage(name, inputs)
        for key in due:
            rounded = unit is not None and rounds_operands(name) and key != "grad/bias"
            high = MOST_ROUNDOFFS * unit if rounded and unit else calibrated_bounds.FP32_LIMIT
            low = LEAST_ROUNDOFFS * unit if rounded and unit else None
            what = f"{policy}: {'output' if key == 'out' else 'gradient of ' + key.removeprefix('grad/')}"
            basis = f"operands rounded to {variant.partition('/')[2] or policy}" if rounded else "FP32 throughout"
            off = relative_difference(answers[key], due[key])
            phase = None if key == "out" else "backward"
            yield _finding(name, what, off, high, basis, due[key].size, phase, low)


def _not_tf32(subject: Subject) -> Iterator[Finding]:
    """Check for TF32: a unit vector times 1 + 2⁻¹² keeps every FP32 bit through a matrix product."""
    for name, stage in subject.stages().items():
        if "weight" not in stage.params or not rounds_operands(name) or stage.kind == "library_head":
            continue
        shapes = subject.shapes(stage)
        x, weight = np.full(shapes["x"], 0.0, np.float32), np.ones(shapes["weight"], np.float32)
        x[..., 0] = TF32_PROBE
        bias = {"bias": np.zeros(shapes["bias"], np.float32)} if "bias" in shapes else {}
        off = float(np.max(np.abs(subject.run(name, x=x, weight=weight, **bias) - TF32_PROBE)))
        basis = "1 + 2⁻¹² through an FP32 product; TF32 would give 1"
        yield _finding(name, "TF32 probe", off, math.ulp(1.0) * 2.0**29, basis, x.size)


def _finding(
    stage: str,
    what: str,
    off: float,
    high: float,
    basis: str,
    size: int,
    phase: str | None = None,
    low: float | None = None,
    layer: int | None = None,
) -> Finding:
    measure = Measure("relative_error", off, low, high, basis)
    return Finding(stage, what, phase or chain().phases[stage], layer, "local", (measure,), size)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

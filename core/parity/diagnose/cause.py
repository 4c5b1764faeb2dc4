"""Find the cause of a disagreement: run the flagged step again with one setting changed at a time.

If the origin disappears under a change, and was examined, the fault depends on the changed setting: "disappears without
torch.compile". `VARIATIONS` is the table of changes. If a change does not apply, the reason is given. If the origin
also disappears with nothing changed, no change is the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.core.backend import Backend, NotSupported
from lockstep.core.checkpoint.taken_over import require_taken_over
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import PrecisionConfig, RecomputeConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.same_bits import different
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.in_a_row import TAPS
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check, Finding
from lockstep.core.parity.reference.stages import library_heads
from lockstep.core.train.skipped_steps import as_its_own

NO_DIFFERENCE = "made no difference to the candidate"
# The cause if a step repeats its bits but differs from the run's own step.
OUTSIDE = "depended on something outside the state that the session shows, which loading resets, or on hardware"
# Every variation starts from a loaded state.
CONTROL = "with nothing changed"
NOT_FROM_ITS_STATE = f"a fresh start from the state before the step does not show it: as it ran, the step {OUTSIDE}"


@dataclass(frozen=True)
class Variation:
    """A change of the configuration.

    words: its name, as it follows "disappears …".
    apply: returns the changed configuration, or the reason why the change does not apply.
    touches: stages that are computed differently; empty for all. Another stage, judged from its own inputs, does not
    change.
    """

    words: str
    apply: Callable[[RunConfig], RunConfig | str]
    touches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cause:
    """The outcome of the variations.

    tried: (change, outcome). The origin `vanishes`, `stays`, or stays and no bit changes (NO_DIFFERENCE); otherwise the
    reason why the outcome is unknown.
    """

    words: str
    tried: list[tuple[str, str]] = field(default_factory=list)


def _eager(config: RunConfig) -> RunConfig | str:
    return _compile(config, enabled=False) if config.compile.enabled else "the program is eager already"


def _aot_eager(config: RunConfig) -> RunConfig | str:
    if not config.compile.enabled or config.compile.backend == "aot_eager":
        return "no code is generated already"
    return _compile(config, backend="aot_eager")


def _one_micro_batch(config: RunConfig) -> RunConfig | str:
    if config.train.accumulation == 1:
        return "there is one micro-batch already"
    whole = config.train.batch_size // config.train.ranks
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": whole})})


def _one_rank(config: RunConfig) -> RunConfig | str:
    if config.train.ranks == 1:
        return "there is one rank already"
    return config.model_copy(update={"train": config.train.model_copy(update={"ranks": 1})})


def _fp32(config: RunConfig) -> RunConfig | str:
    if not config.precision.chosen.rounds:
        return "nothing is rounded to a narrow format already"
    return config.model_copy(update={"precision": PrecisionConfig(policy="fp32")})


def _compile(config: RunConfig, **changes: bool | str) -> RunConfig:
    return config.model_copy(update={"compile": config.compile.model_copy(update=changes)})


def _bf16(config: RunConfig) -> RunConfig | str:
    if config.precision.fp8 is None:
        return "there is no FP8 already"
    return config.model_copy(update={"precision": PrecisionConfig(policy="bf16")})


def _all_kept(config: RunConfig) -> RunConfig | str:
    if config.recompute == RecomputeConfig():
        return "nothing is recomputed already"
    return config.model_copy(update={"recompute": RecomputeConfig()})


def _full_loss(config: RunConfig) -> RunConfig | str:
    if config.loss.chosen.whole:
        return "the logits are already computed at once"
    return config.model_copy(update={"loss": config.loss.model_copy(update={"head": "full"})})


def _fp32_logits(config: RunConfig) -> RunConfig | str:
    return "every policy leaves the logits in FP32 already"


def _math_attention(config: RunConfig) -> RunConfig | str:
    if config.attention.chosen.written_out:
        return "attention is written out already"
    return config.model_copy(update={"attention": config.attention.model_copy(update={"kernel": "math"})})


def _flash_attention(config: RunConfig) -> RunConfig | str:
    if not config.attention.chosen.written_out:
        return "attention is already a fused kernel"
    return config.model_copy(update={"attention": config.attention.model_copy(update={"kernel": "flash"})})


VARIATIONS = (
    Variation("without torch.compile", _eager),
    Variation("under torch.compile without generated code (aot_eager)", _aot_eager),
    Variation("with one micro-batch", _one_micro_batch),
    Variation("in FP32", _fp32),
    Variation("without FP8", _bf16),
    Variation("without activation checkpointing", _all_kept),
    Variation("with FP32 logits", _fp32_logits),
    Variation("with the full loss instead of the chunked one", _full_loss, ("logits", "nll", *library_heads(), "loss")),
    Variation("on one rank", _one_rank),
    Variation("with another attention kernel (math)", _math_attention, ("attn",)),
    Variation("with another attention kernel (flash)", _flash_attention, ("attn",)),
)


def find_cause(
    backend: Backend,
    reference: Backend,
    config: RunConfig,
    evidence: Evidence,
    check: Check | None = None,
    variations: tuple[Variation, ...] = VARIATIONS,
) -> Cause:
    """Try every variation on the step of `evidence`.

    check: the verdict on this evidence; if None, the evidence is judged again.
    A variation that cannot be opened or judged (no such device, no bounds for its recipe) is listed with the reason,
    and does not count as evidence.
    """
    # A variation changes one setting, so `auto` keeps the value in force.
    config = settled(config, config.device)
    if check is None:
        check = _judged(reference, config, evidence)
    if check.origin is None:
        return Cause("there is nothing to explain: the step agrees")
    tried: list[tuple[str, str]] = []
    for variation in variations:
        changed = variation.apply(config)
        local = check.origin.scope == "local" and check.origin.stage not in ("compiler", "gradients", "accumulation")
        if local and variation.touches and check.origin.stage not in variation.touches:
            changed = f"{check.origin.stage} is computed as before"
        outcome = changed if isinstance(changed, str) else _outcome(backend, reference, changed, evidence, check.origin)
        tried.append((variation.words, outcome))
    gone = [words for words, outcome in tried if outcome == "vanishes"]
    kept = [words for words, outcome in tried if outcome == "stays"]
    idle = [words for words, outcome in tried if outcome == NO_DIFFERENCE]
    if gone and not idle:  # if some variation changes no bit, it is the control
        control = _outcome(backend, reference, config, evidence, check.origin)
        if control == "vanishes":
            tried.append((CONTROL, control))
            return Cause("; ".join([NOT_FROM_ITS_STATE, *filter(None, [decoded(check)])]), tried)
    if gone:
        said = f"disappears {' and '.join(gone)}"
    elif kept:
        said = f"present in every variation tried: {', '.join(kept)}"
    else:
        said = "no variation changed the candidate" if idle else "no variation could be tried"
    parts = [said] + ([f"present {', '.join(kept)}"] if gone and kept else [])
    parts += [f"{NO_DIFFERENCE}: {', '.join(idle)}"] if idle else []
    parts += [decoded(check)] if decoded(check) else []
    return Cause("; ".join(parts), tried)


def decoded(check: Check) -> str:
    """Return the decoder's note (core/parity/measures/decode.py) at the origin, or the most common one of its stage."""
    origin = check.origin
    if origin is None or origin.note:
        return origin.note if origin else ""
    same = (f for f in check.findings if not f.ok and (f.stage, f.phase) == (origin.stage, origin.phase))
    notes = Counter(f.note for f in same if f.note)
    return notes.most_common(1)[0][0] if notes else ""


def _outcome(backend: Backend, reference: Backend, changed: RunConfig, evidence: Evidence, origin: Finding) -> str:
    """Return `vanishes`, `stays`, NO_DIFFERENCE (it stays and no bit changes), or why it could not be tried."""
    try:
        session = backend.open(changed)
        try:
            before = as_its_own(changed, evidence.before)
            session.load(before)
            require_taken_over(session, changed, before, "the state before the step")
            given = evidence.given_probe, evidence.given_norms, evidence.due, evidence.given_tapped
            again = gather(session, changed, evidence.batch, *given)
            check = _judged(reference, changed, again)
        finally:
            session.close()
    except (NotSupported, UserError) as reason:
        return f"could not be tried: {str(reason).splitlines()[0]}"
    except Exception as error:  # a candidate is foreign code, and this configuration is new to it
        said = next(iter(str(error).splitlines()), "")
        return f"could not be tried: {type(error).__name__}: {said}"
    if any(_link(found) == _link(origin) for found in check.origins):
        return "stays" if next(different(evidence, again), None) else NO_DIFFERENCE
    examined = any(_link(found) == _link(origin) and found.scope == origin.scope for found in check.findings)
    if check.verdict == "agreed" or (examined and check.verdict == "disagreed"):
        return "vanishes"
    return "could not be tried: the origin was not examined"


def _judged(reference: Backend, config: RunConfig, evidence: Evidence) -> Check:
    opened = Reference.open(reference, config)
    try:
        return judge(evidence, opened)
    finally:
        opened.close()


def _link(finding: Finding) -> tuple[str, str, int | None, bool]:
    """Return the link of a finding, and whether it is about two steps in a row.

    Under compile, `compiler` corresponds to `gradients` of an eager program. A step that depends on something outside
    its state is wrong in a link as it ran, and in two steps after a load.
    """
    stage = "gradients" if finding.stage == "compiler" else finding.stage
    return stage, finding.phase, finding.layer, finding.tap in TAPS.values()

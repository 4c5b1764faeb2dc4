"""List the levers of a run without effect in a check. Agreement does not cover them.

For example, a document mask masks nothing if no sequence holds two documents, and clipping changes nothing below its
norm. A trainer without these levers computes the same step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.attention_logits import ATTENTION_LOGITS
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.in_a_row import LEFT_OUT
from lockstep.core.parity.evidence.probe import has_end_of_text, sequences_of_several_documents
from lockstep.core.parity.judge.own_step import part_repeated
from lockstep.core.train.fp8_amax import key, layers
from lockstep.core.train.loss_scale import SCALE


def not_exercised(evidence: Evidence, config: RunConfig) -> dict[str, str]:
    """Map each lever that is on but had no effect on the compared numbers to the reason.

    The reason is empty if `not_covered` already has it.
    """
    return dict(_not_exercised(evidence, config))


def _not_exercised(evidence: Evidence, config: RunConfig) -> Iterator[tuple[str, str]]:
    attention, train, record = config.attention, config.train, evidence.record
    number = part_repeated(evidence, config)
    own = evidence.batch if number is None else evidence.batch.cut(train)[number]
    compared = (own, evidence.weighted)
    if attention.needs_documents and not any(sequences_of_several_documents(batch).size for batch in compared):
        why = "no sequence that was compared holds two documents"
        if attention.document_mask:
            yield "document mask", why
        if attention.reset_positions:
            yield "positions that begin anew", why
    length = evidence.batch.tokens.shape[1]
    if config.model.window >= length:
        yield "attention window", f"sequences of {length:,} tokens are not longer than model.window"
    yield from _attention_cap(evidence, config)
    if own.end_of_text is not None and not any(map(has_end_of_text, compared)):
        yield "end of text", "no compared token ends a document"
    for other in sorted({*train.lengths} - {length}):
        yield f"sequences of {other:,} tokens", f"sequences of this step have {length:,}"
    if not evidence.own:
        yield "accumulation", "the step is one micro-batch" if train.accumulation == 1 else ""
    if train.ranks > 1 and evidence.reduced is None and not evidence.own:
        yield "reduction over ranks", ""
    limit = config.optim.clip_norm
    if limit > 0 and record.clip_coefficient >= 1:
        yield "clipping", f"the gradients' norm {record.grad_norm:.3g} is not above clip_norm = {limit:g}"
    # Only the first step of a run is repeated as a later one with small gradients. Between the checks of a run, the
    # clip coefficient of each record is compared with its norm (core/train/held_record.py).
    first = evidence.thorough and not evidence.before.step
    if first and limit > 0 and not any(one.grad_norm <= limit for one in (record, *evidence.later)):
        yield "gradients below clip_norm", f"the gradients' norm {record.grad_norm:.3g} is above clip_norm = {limit:g}"
    made = not evidence.not_finite and evidence.after.updates > evidence.before.updates
    tries = LEFT_OUT in evidence.in_a_row
    if train.on_not_finite == "skip" and made and not tries:
        yield "leaving a step out", "all of the step was finite"
    scale = evidence.before.scalars.get(SCALE)
    if scale is not None and evidence.after.scalars.get(SCALE) == scale:
        # In a run's first check, the scale grows in a later step and falls in a step that is not finite.
        untried = [what for what, tried in (("growth", evidence.moved), ("fall", tries)) if not tried]
        if untried:
            yield f"a {untried[0] if len(untried) == 1 else 'change'} of the loss scale", f"it stayed {scale:g}"
    length = config.precision.fp8_history
    oldest = [evidence.before.scalars.get(key(layer, "weight", length - 1), 0.0) for layer in layers(config)]
    if oldest and not all(oldest) and not evidence.moved:
        yield "a full history of amaxes", f"fewer than {length} steps were made before this one"
    if config.eval.every and not evidence.thorough and evidence.held_out is None:
        yield "validation", "none is due after this step"
    if record.lr == 0:
        yield "update", "the learning rate is 0"


def _attention_cap(evidence: Evidence, config: RunConfig) -> Iterator[tuple[str, str]]:
    """Report a cap without effect: for small s, cap·tanh(s / cap) = s·(1 − (s / cap)² / 3), which rounds to s."""
    cap, shown = config.model.attention_cap, evidence.evaluated.get(ATTENTION_LOGITS)
    if not cap or shown is None:
        return
    largest = float(np.abs(shown).max())
    if (largest / cap) ** 2 / 3 < FORMATS[config.precision.operand].roundoff:
        yield "attention cap", f"the largest score {largest:.3g} is far below model.attention_cap = {cap:g}"

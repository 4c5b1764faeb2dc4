"""Run the passes of a check before its step, from the same state."""

from __future__ import annotations

from contextlib import suppress

from lockstep.core.backend import NotSupported
from lockstep.core.parity.evidence.amaxes import amaxes_of_pass, amaxes_of_taps
from lockstep.core.parity.evidence.attention_logits import shown_attention_logits
from lockstep.core.parity.evidence.cached_logits import sampled_logits
from lockstep.core.parity.evidence.evaluation import Likeliest, evaluated, policies_of
from lockstep.core.parity.evidence.gathering import Gathering
from lockstep.core.parity.evidence.into_store import gradients_into
from lockstep.core.parity.evidence.loss_weights import reweighted_batches
from lockstep.core.parity.evidence.parts import has_parts, parts_apart, parts_of_step, sketched
from lockstep.core.parity.evidence.read_back import reading_back
from lockstep.core.parity.evidence.scales import scaled_as_in_step
from lockstep.core.parity.evidence.sums import accumulate, reduce
from lockstep.core.parity.evidence.taps import look
from lockstep.core.streams import step_stream
from lockstep.core.train.fp8_amax import layers


def before_step(found: Gathering) -> None:
    """Run all passes before the step, in this order.

    The step's micro-batches come first. If a session does not clear gradients, those of the last pass are in the next
    result.
    """
    _observe_parts(found)
    _observe_reweighted(found)
    _probe(found)
    _have_step_show_gradients(found)
    likeliest = _show_taps(found)
    if found.thorough:
        found.changed.note("gradients and taps")
    _evaluate(found, likeliest)
    _sum_up(found)
    found.changed.note("gradients of several micro-batches" if found.thorough else "gradients, taps and evaluation")


def _observe_parts(found: Gathering) -> None:
    """Observe the gradients of the step's micro-batches in separate passes, unless the step itself shows them."""
    session, config, batch = found.session, found.config, found.batch
    several = has_parts(config, batch)
    # A thorough check has time for separate passes, which find faults that depend on the position of a micro-batch in
    # the step.
    if several and not found.thorough:
        found.shows_parts = parts_of_step(session, config)
    if several and found.shows_parts is None:
        found.own, found.own_amaxes = parts_apart(session, config, found.before, batch, found.missing)
    elif found.thorough and config.train.ranks == 1 and layers(config):
        _, found.own_amaxes = parts_apart(session, config, found.before, batch, found.missing)


def _observe_reweighted(found: Gathering) -> None:
    """Observe the gradients of the first micro-batch with other loss weights, in a thorough check."""
    config, first = found.config, found.micros[0]
    observed = found.own or not has_parts(config, found.batch)
    if found.thorough and config.train.ranks == 1 and observed and first.weights.any():
        with suppress(NotSupported), scaled_as_in_step(found.session, config, found.before, found.batch):
            found.reweighted = tuple(sketched(found.session, one) for one in reweighted_batches(first))


def _probe(found: Gathering) -> None:
    """Compute the gradients of the examined micro-batch, and read back its inputs.

    Its loss weights are uneven. Most batches have weights of 1, which are equal in every row.
    """
    # Several ranks share a single micro-batch in other ways than a step.
    read_back = reading_back(found.session, []) if found.config.train.ranks == 1 else None
    try:
        found.probed = gradients_into(found.store, "probed", found.session, found.tapped)
    except NotSupported as reason:
        found.missing.append(f"gradients and per-token NLL: {reason}")
    of_probe = read_back(found.tapped) if read_back else {}
    found.misread = {f"{name} of the examined micro-batch": count for name, count in of_probe.items()}
    if found.probed is not None:
        found.probed_amaxes = amaxes_of_pass(found.session, found.config, found.missing)


def _have_step_show_gradients(found: Gathering) -> None:
    """Request the step's own gradients if the session can show them. A separate computation would cost a whole step."""
    if found.probed is None:
        return
    with suppress(NotSupported):
        found.in_passing = step_stream(found.session)
    if found.in_passing is None:
        found.stepped = gradients_into(found.store, "stepped", found.session, found.batch)


def _show_taps(found: Gathering) -> Likeliest:
    """Read the taps of the examined micro-batch. Returns the likeliest tokens by its logits, for the evaluation."""
    likeliest = Likeliest()
    found.taps = look(found.session, found.config, found.tapped, found.missing, found.store, likeliest.note)
    found.tapped_amaxes = amaxes_of_taps(found.session, found.config)
    return likeliest


def _evaluate(found: Gathering, likeliest: Likeliest) -> None:
    """Score the examined sequences. A thorough check also computes logits as sampling does."""
    session, config, tapped, missing = found.session, found.config, found.tapped, found.missing
    scores = dict(evaluated(session, tapped, likeliest, policies_of(config, found.thorough), missing))
    if found.thorough:
        scores |= shown_attention_logits(session, config, tapped, missing)
        found.changed.note("evaluation")
        scores |= sampled_logits(session, config, tapped, found.taps, missing)
        found.changed.note("sampling")
    found.evaluated = scores


def _sum_up(found: Gathering) -> None:
    """Sum the gradients of several micro-batches, on one rank and over ranks, in a thorough check."""
    session, config, before, micros = found.session, found.config, found.before, found.micros
    if not found.thorough or found.probed is None:
        return
    if config.train.accumulation > 1:
        found.accumulated = accumulate(session, config, before, micros, found.store)
    if config.train.ranks > 1:
        found.reduced = reduce(session, config, before, micros, found.missing, found.store)

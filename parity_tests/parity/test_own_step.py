"""The step that really runs is judged: its own weights, all its sequences, its own number of micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.backend import NotSupported
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.diagnose.recheck_rows import recheck_rows
from lockstep.core.parity.evidence import recorded
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import reweighted_batches, uneven_weights
from lockstep.core.parity.evidence.saved import open_evidence, save_evidence
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.judge.own_step import OWN, findings, part_repeated, under_other_weights
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import small
from lockstep.parity_tests.faults.catalog import OWN as FAULTS
from lockstep.parity_tests.faults.fault import Fault
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

FOUR = tiny_config("bf16", train={"batch_size": 8})


def checked(session, config=FOUR, training=False, batch=None) -> tuple[Evidence, Check]:
    batch = text_batch(config) if batch is None else batch
    evidence = gather(session, config, batch, recorded.probe_of(batch, config) if training else None)
    return evidence, judge(evidence, Reference.open(JaxBackend(), config))


def of_own(check: Check, stage: str) -> list:
    return [found for found in check.findings if found.stage == stage and OWN in found.note]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_the_step_alone_is_named(fault: Fault) -> None:
    """None of them is wrong with uneven weights, or in three micro-batches."""
    session = fault.make().open(FOUR)
    evidence, check = checked(session)
    _, check = recheck_rows(session, FOUR, evidence, check, Reference.open(JaxBackend(), FOUR))
    assert check.origin is not None
    assert (check.origin.stage, check.origin.phase, check.origin.layer) == fault.origin(FOUR.model.layers)
    if fault.stage != "accumulation":
        assert OWN in check.origin.note


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_found_during_training(fault: Fault) -> None:
    _, check = checked(fault.make().open(FOUR), training=True)
    assert check.verdict == "disagreed" and all(OWN in found.note for found in check.findings if not found.ok)


SMALL = [
    (small.ActivationSlightlyLongWithoutLossMask, ("act", "forward", 0)),
    (small.GradientsSlightlyLongWhereWeightsAreAlike, ("gradients", "backward", None)),
    (small.RowOfQueriesLostWhereWeightsAreAlike, ("gradients", "backward", 1)),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("micros", [1, 2])
def test_an_honest_step_is_the_same_with_other_weights(compiled, policy, micros):
    config = tiny_config(policy, compiled, train={"batch_size": 2 * micros})
    evidence, check = checked(TorchBackend().open(config), config)
    assert check.verdict == "agreed" and len(evidence.reweighted) == 2
    assert all(one.keys() == {f"gradient/{n}" for n in parameter_shapes(config.model)} for one in evidence.reweighted)
    of_nll, of_gradients = of_other_weights(check)
    assert of_nll.worst.value == 0
    assert len(of_gradients) == len(evidence.reweighted[0])
    assert max(found.worst.strain for found in of_gradients) < 0.1


def of_other_weights(check):
    of_nll = [found for found in of_own(check, "nll") if found.worst.name == "unequal"]
    return of_nll[0], [found for found in of_own(check, "gradients") if found.measures[0].name == "relative_error"]


@pytest.mark.parametrize(("candidate", "origin"), SMALL)
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_small_fault_of_the_step_alone_is_named(candidate, origin, policy):
    """The bounds of the reference allow each of them under bf16: the candidate contradicts itself."""
    config = tiny_config(policy, train={"batch_size": 8})
    session, reference = candidate().open(config), Reference.open(JaxBackend(), config)
    evidence = gather(session, config, text_batch(config))
    _, check = recheck_rows(session, config, evidence, judge(evidence, reference), reference)
    assert check.origin is not None
    assert (check.origin.stage, check.origin.phase, check.origin.layer) == origin


def test_a_small_fault_of_the_forward_pass_is_found_during_training():
    session = small.ActivationSlightlyLongWithoutLossMask().open(FOUR)
    _, check = checked(session, training=True)
    assert check.verdict == "disagreed" and check.origin.stage == "nll"


def test_other_weights_are_nearly_the_own():
    batch = text_batch(FOUR)
    several = [*reweighted_batches(batch)]
    for other in several:
        assert np.unique(other.weights).size == 2 and other.weights.max() == 2
        assert other.weights.dtype == batch.weights.dtype
    assert [int(np.argmin(other.weights)) for other in several] == [0, batch.weights.size - 1]
    masked = replace(batch, weights=np.where(np.arange(batch.weights.shape[1]) < 3, 0, batch.weights))
    assert all(np.array_equal(other.weights > 0, masked.weights > 0) for other in reweighted_batches(masked))


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_rounding_that_falls_otherwise_for_one_token_is_no_fault(wrong):
    """The nearest of two counts: what is wrong in both is accused."""
    evidence, _ = checked(TorchBackend().open(FOUR))
    name = f"gradient/{next(iter(parameter_shapes(FOUR.model)))}"
    moved = [one | {name: replace(one[name], sketch=1.003 * one[name].sketch)} for one in evidence.reweighted[:wrong]]
    check = judge(
        replace(evidence, reweighted=(*moved, *evidence.reweighted[wrong:])), Reference.open(JaxBackend(), FOUR)
    )
    assert (check.verdict == "agreed") == (wrong == 1)


@pytest.mark.parametrize(
    ("policy", "error", "agrees"), [("fp32", 4e-3, True), ("fp32", 1e-4, False), ("bf16", 4e-3, False)]
)
def test_gradients_whose_terms_cancel_differ_in_fp32_by_as_much_as_their_errors(policy, error, agrees):
    config = tiny_config(policy, train={"batch_size": 8})
    evidence, _ = checked(TorchBackend().open(config), config)
    reference, name = Reference.open(JaxBackend(), config), f"gradient/{next(iter(parameter_shapes(config.model)))}"
    moved = [one | {name: replace(one[name], sketch=1.003 * one[name].sketch)} for one in evidence.reweighted]
    _, _, repeated = findings(evidence, reference, [])
    assert repeated is not None
    twin = replace(repeated.truth[name], sketch=(1 + error) * repeated.truth[name].sketch)
    repeated = replace(repeated, twin={**repeated.twin, name: twin})
    found = [
        one.ok
        for one in under_other_weights(replace(evidence, reweighted=tuple(moved)), reference, repeated)
        if one.stage == "gradients" and f"gradient/{one.tap}" == name
    ]
    assert found == [agrees]


def test_a_micro_batch_without_any_weight_is_no_fault():
    """Padding alone: by itself it has no mean."""
    batch = text_batch(FOUR)
    weights = batch.weights.copy()
    weights[:2] = 0
    evidence, check = checked(TorchBackend().open(FOUR), batch=replace(batch, weights=weights))
    assert not evidence.reweighted and check.verdict == "agreed", check.origin


def test_a_micro_batch_that_overflows_alone_is_no_fault():
    """FP16's loss scale grows until gradients overflow; a micro-batch alone has larger ones than in its step."""
    config = tiny_config("fp16", train={"batch_size": 4, "micro_batch_size": 2})
    precision = config.precision.model_copy(update={"loss_scale": 2.0**20})
    config = config.model_copy(update={"precision": precision})
    batch, session = text_batch(config, seed=2), TorchBackend().open(config)
    alone = session.gradients(batch.cut(config.train)[0]).grads
    assert not all(np.isfinite(grad).all() for grad in alone.values())
    evidence, check = checked(session, config, batch=batch)
    assert not evidence.not_finite and evidence.after.step == 1
    assert check.verdict == "agreed"


def test_a_micro_batch_that_overflows_in_its_step_is_no_fault_of_the_sum():
    """One of three overflows, and a check during training repeats another one."""
    config = tiny_config("fp16", train={"batch_size": 6, "micro_batch_size": 2})
    precision = config.precision.model_copy(update={"loss_scale": 2.0**21})
    config = config.model_copy(update={"precision": precision})
    batch = text_batch(config)
    evidence, check = checked(TorchBackend().open(config), config, True, batch)
    overflow = [any(one.nonfinite for one in part.values()) for part in evidence.own]
    assert any(overflow) and not overflow[part_repeated(evidence, config)]
    assert check.verdict == "agreed"
    zeroed = {name: np.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) for name, g in evidence.stepped.grads.items()}
    wrong = replace(evidence, stepped=replace(evidence.stepped, grads=zeroed))
    found = judge(wrong, Reference.open(JaxBackend(), config)).findings
    assert any(one.stage == "accumulation" and not one.ok for one in found)


def test_a_session_that_promises_no_bits_is_not_held_to_itself():
    evidence, _ = checked(small.ActivationSlightlyLongWithoutLossMask().open(FOUR))
    check = judge(replace(evidence, taps_keep_bits=False), Reference.open(JaxBackend(), FOUR))
    assert not [found for found in of_own(check, "nll") if found.worst.name == "unequal"]


class _Apart(TorchSession):
    """Its step does not show what each micro-batch adds: checks compute micro-batches apart from it."""

    keep_parts = None  # type: ignore[assignment]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("micros, weights", [(4, "own"), (3, "own"), (4, "uneven")])
def test_an_honest_step_is_the_sum_of_micro_batches_apart(policy, micros, weights):
    """Where shares are powers of two, to a few ulp; else as near as two roundings of one program are."""
    config = tiny_config(policy, train={"batch_size": 2 * micros})
    batch = text_batch(config) if weights == "own" else uneven_weights(text_batch(config), 3)
    evidence, check = checked(_Apart(config), config, training=True, batch=batch)
    assert check.verdict == "agreed" and not evidence.own_in_step, check.origin
    sums = of_own(check, "accumulation")
    assert len(sums) == len(parameter_shapes(config.model))
    exact = policy != "fp16" and (micros, weights) == (4, "own")
    allowed = {found.tap: found.worst.high or 1.0 for found in sums}
    if policy == "bf16" or policy == "fp16":
        assert all((high < 1e-5) == exact for high in allowed.values())
    # A micro-batch less is far outside.
    assert all(high < 0.5 for high in allowed.values())


@pytest.mark.parametrize("policy, micros, weights", [("bf16", 3, "own"), ("fp16", 4, "uneven"), ("fp32", 4, "uneven")])
def test_an_honest_step_is_the_sum_of_what_its_micro_batches_add(policy, micros, weights):
    """To a few ulp, whatever the shares: in the step they are rounded as they are."""
    config = tiny_config(policy, train={"batch_size": 2 * micros})
    batch = text_batch(config) if weights == "own" else uneven_weights(text_batch(config), 3)
    evidence, check = checked(TorchSession(config), config, training=True, batch=batch)
    assert check.verdict == "agreed" and evidence.own_in_step, check.origin
    sums = of_own(check, "accumulation")
    assert len(sums) == len(parameter_shapes(config.model))
    assert all(found.worst.high is not None and found.worst.high < 1e-5 for found in sums)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_that_shows_its_parts_has_the_bits_of_one_that_does_not(compiled):
    config = tiny_config("bf16", compiled, train={"batch_size": 6})
    shown, plain = TorchSession(config), TorchSession(config)
    for seed in range(2):
        batch = text_batch(config, seed)
        shown.keep_parts()
        assert shown.step(batch) == plain.step(batch)
        parts = shown.parts_kept()
        assert [len(part) for part in parts] == [len(parameter_shapes(config.model))] * 3
    assert shown.parts_kept() == ()
    for one, other in zip(shown.parameters.values(), plain.parameters.values(), strict=True):
        assert one.equal(other)


class _WrongInTheThird(TorchSession):
    """The third micro-batch of a step has a loss that is too large, and a reported one that is not."""

    def accumulate(self, batch):
        self._passed = 0
        return super().accumulate(batch)

    def _forward_backward(self, micro, program, total):
        self._passed += 1
        wrong = self._passed == 3

        def too_large(*inputs):
            loss, nll = program(*inputs)
            return loss + 0.5 * (loss - loss.detach()) if wrong else loss, nll

        return super()._forward_backward(micro, too_large, total)


class _MeanOfMeans(TorchSession):
    """Every micro-batch counts alike, whatever its weight; the reported loss is right."""

    def _forward_backward(self, micro, program, total):
        own = super().total_weight(micro) * 4

        def alike(*inputs):
            loss, nll = program(*inputs)
            return loss.detach() + (total / own) * (loss - loss.detach()), nll

        return super()._forward_backward(micro, alike, total)


@pytest.mark.parametrize("session", [_WrongInTheThird, _MeanOfMeans])
def test_what_a_micro_batch_adds_is_held_to_the_reference_in_its_turn(session):
    """Neither is seen in the sum: it is that of its parts."""
    for seed in range(40):
        batch = uneven_weights(text_batch(FOUR, seed), 3)
        if int(batch.digest()[8:16], 16) % 4 == 2:
            break
    evidence, check = checked(session(FOUR), training=True, batch=batch)
    assert part_repeated(evidence, FOUR) == 2
    assert all(found.ok for found in of_own(check, "accumulation"))
    assert not all(found.ok for found in of_own(check, "gradients"))


@pytest.mark.parametrize("micros, weights", [(3, "own"), (4, "uneven")])
def test_a_lost_micro_batch_is_found_where_parts_round_otherwise(micros, weights):
    class Loses(_Apart):
        def accumulate(self, batch):
            lost = len(batch.tokens) > 2
            return super().accumulate(batch.rows(slice(2, None)) if lost else batch)

        def total_weight(self, batch):
            return super().total_weight(batch) * (micros / (micros - 1) if len(batch.tokens) > 2 else 1)

    config = tiny_config("bf16", train={"batch_size": 2 * micros})
    batch = text_batch(config) if weights == "own" else uneven_weights(text_batch(config), 3)
    evidence = gather(Loses(config), config, batch, recorded.probe_of(batch, config))
    nll = gather(TorchBackend().open(config), config, batch, recorded.probe_of(batch, config)).stepped.nll
    evidence = replace(evidence, stepped=replace(evidence.stepped, nll=nll))
    check = judge(evidence, Reference.open(JaxBackend(), config))
    assert any(not found.ok for found in of_own(check, "accumulation"))


def test_a_thorough_check_repeats_the_whole_step_and_one_of_training_a_micro_batch_in_turn():
    evidence, check = checked(TorchBackend().open(FOUR))
    nll, _ = of_own(check, "nll")
    assert nll.size == evidence.batch.tokens.size
    evidence, check = checked(TorchBackend().open(FOUR), training=True)
    nll, _ = of_own(check, "nll")
    assert nll.size == evidence.batch.tokens.size // 4
    assert "the step's own gradients end to end, of 3 of its micro-batches: in other checks" in check.not_covered
    drawn = {part_repeated(replace(evidence, batch=text_batch(FOUR, seed)), FOUR) for seed in range(40)}
    assert drawn == {0, 1, 2, 3}


def test_a_step_of_one_micro_batch_is_held_to_the_reference_itself():
    config = tiny_config("bf16", train={"batch_size": 2})
    evidence, check = checked(TorchBackend().open(config), config, training=True)
    assert evidence.own == () and check.verdict == "agreed"
    names = parameter_shapes(config.model)
    of_layers = {name.split(".", 2)[2] for name in names if name.startswith("blocks.")}
    # Besides each parameter: their names, the mean over all of them, and the means over layers.
    assert len(of_own(check, "gradients")) == len(names) + 2 + len(of_layers)
    turned = {name: -gradient for name, gradient in evidence.stepped.grads.items()}
    wrong = replace(evidence, stepped=replace(evidence.stepped, grads=turned))
    assert not all(found.ok for found in of_own(judge(wrong, Reference.open(JaxBackend(), config)), "gradients"))


class _SilentStep(TorchSession):
    def step(self, batch, *, norms=False):
        shown, self._show_step = self._show_step, None
        try:
            return super().step(batch, norms=norms)
        finally:
            self._show_step = shown


def test_a_step_that_shows_no_gradients_is_computed_again_by_a_thorough_check_alone():
    session = _SilentStep(FOUR)
    evidence, check = checked(session)
    assert check.verdict == "agreed" and any(found.stage == "update" for found in check.findings)
    assert all(np.array_equal(session.state().params[n], p) for n, p in evidence.after.params.items())
    _, check = checked(_SilentStep(FOUR), training=True)
    assert any("the session's step did not show them" in item for item in check.not_covered)


class _Hidden(TorchSession):
    def gradients(self, batch):
        raise NotSupported("its gradients are hidden")


def test_a_candidate_without_gradients_is_not_said_to_agree_in_them():
    _, check = checked(_Hidden(FOUR))
    assert any("its gradients are hidden" in item for item in check.not_covered)
    assert of_own(check, "gradients") == of_own(check, "accumulation") == []


def test_observed_parts_lie_in_the_folder_of_the_evidence(tmp_path):
    store = FolderStore.create(tmp_path / "evidence")
    batch = text_batch(FOUR)
    written = gather(TorchBackend().open(FOUR), FOUR, batch, store=store)
    save_evidence(written, store)
    found = open_evidence(tmp_path / "evidence")
    assert found.thorough and len(found.own) == 4
    for one, other in zip(found.own, written.own, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[n].sketch, other[n].sketch) and one[n].norm == other[n].norm for n in one)

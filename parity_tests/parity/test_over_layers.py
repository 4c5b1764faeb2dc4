"""Means over layers of one tensor's excess: a fault in one kind of layer is no small part of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from lockstep.core.backend import State
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.over_layers import OverLayers
from lockstep.core.parity.measures.compare import finding
from lockstep.core.parity.measures.verdict import Check, Measure
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.small import BlackBox, BlackBoxKeysGradientsInE4m3
from lockstep.parity_tests.parity.test_aggregates import CONFIG
from lockstep.parity_tests.tiny import text_batch
from lockstep.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("in_one_process")


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    with closing(Reference.open(JaxBackend(), CONFIG)) as opened:
        yield opened


@pytest.fixture(scope="module")
def hardly_trained() -> State:
    """Weights under which a fault in the keys' gradients is so small that the mean over all parameters passes."""
    with closing(TorchBackend().open(CONFIG)) as session:
        for step in range(40):
            session.step(text_batch(CONFIG, seed=step))
        return session.state()


def checked(backend: TorchBackend, state: State, reference: Reference) -> Check:
    with closing(backend.open(CONFIG)) as session:
        session.load(state)
        return judge(gather(session, CONFIG, uneven_weights(text_batch(CONFIG, seed=1000), 0)), reference)


def test_what_is_wrong_in_keys_gradients_is_found_by_their_mean_alone(hardly_trained, reference):
    wrong = [f for f in checked(BlackBoxKeysGradientsInE4m3(), hardly_trained, reference).findings if not f.ok]
    assert {f.tap for f in wrong} == {"mean over layers of attn.k_proj.weight"}
    assert {(f.stage, f.scope, f.layer) for f in wrong} == {("gradients", "end_to_end", None)}


def test_an_honest_black_box_agrees_with_a_mean_of_every_layer_s_parameter(hardly_trained, reference):
    check = checked(BlackBox(), hardly_trained, reference)
    assert check.verdict == "agreed"
    parameters = {name.split(".", 2)[2] for name in hardly_trained.params if name.startswith("blocks.")}
    assert {f.tap for f in check.findings if f.tap.startswith("mean over")} == {
        f"mean over layers of {parameter}" for parameter in parameters
    }


def of_layer(layer: int, excess: float):
    measures = (Measure("excess", excess, None, 5.0, "clean"),)
    return finding("q", f"blocks.{layer}.q", "end_to_end", measures, 100, phase="forward")


def test_a_tensor_of_one_layer_has_no_mean_and_an_unmeasured_recipe_none(reference):
    means = OverLayers(reference)
    means.add(of_layer(0, 3.0), "end_to_end/forward/q", 1000)
    assert not list(means.findings())
    means.add(of_layer(1, 3.0), "end_to_end/forward/q", 1000)
    (mean,) = means.findings()
    assert (mean.tap, mean.phase, mean.ok, mean.size) == ("mean over layers of q", "forward", False, 2)
    assert mean.measures[0].value == pytest.approx(3.0)

    unmeasured = OverLayers(reference)
    for layer in range(2):
        unmeasured.add(of_layer(layer, 3.0), "end_to_end/forward/no_such_stage", 1000)
    assert not list(unmeasured.findings())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("casts", ["lockstep", "autocast"])
def test_means_are_held_under_every_plan_of_casts(casts, compiled, reference):
    precision = CONFIG.precision.model_copy(update={"casts": casts})
    program = CONFIG.compile.model_copy(update={"enabled": compiled})
    config = CONFIG.model_copy(update={"precision": precision, "compile": program})
    over_layers = OverLayers(replace(reference, config=config))
    for layer in range(2):
        over_layers.add(of_layer(layer, 3.0), "end_to_end/forward/q", 1000)
    (mean,) = over_layers.findings()
    assert not mean.ok


def test_taps_of_a_run_have_means_of_both_phases(hardly_trained, reference):
    found = {(f.tap, f.phase) for f in checked(TorchBackend(), hardly_trained, reference).findings}
    for tap in ("attn.q_rope", "mlp.act", "mlp_residual"):
        assert {(f"mean over layers of {tap}", "forward"), (f"mean over layers of {tap}", "backward")} <= found

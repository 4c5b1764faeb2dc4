"""The reference's passes one operation at a time give what its model gives at once, and hold no more than a segment."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from lockstep.core.backend import Session
from lockstep.core.components.precision import narrowed
from lockstep.core.config.schema import AttentionConfig, LossConfig, ParallelConfig, RunConfig
from lockstep.core.model.names import GRADIENT, parameter_shapes, tap_names
from lockstep.core.parity.evidence.loss_weights import uneven_weights, weighted_part
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL
from lockstep.core.parity.evidence.probe import probe_of
from lockstep.core.parity.measures.compare import Reference, relative_difference
from lockstep.core.parity.modes.rerun import initial_state
from lockstep.core.parity.reference import chain as chain_module
from lockstep.core.parity.reference.chain import Chain, segments
from lockstep.core.parity.reference.side_by_side import passes
from lockstep.core.parity.reference.stages import stages_of
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.reference.at_once import AtOnce
from lockstep.parity_tests.tiny import text_batch, tiny_config

# FP64 sums in another order.
EXACT = 1e-12


SESSIONS: dict[str, Session] = {}


def opened(config: RunConfig) -> Session:
    """Open a session whose programs the tests of this file share; its weights are the initial ones."""
    key = config.model_dump_json()
    if key not in SESSIONS:
        SESSIONS[key] = JaxBackend().open(config)
    return SESSIONS[key]


def batch_of(config: RunConfig):
    return uneven_weights(text_batch(config), config.seed)


def of_parameters(config: RunConfig) -> list[str]:
    return [PARAMETER + name for name in parameter_shapes(config.model)]


def apart(found: Mapping[str, np.ndarray], due: Mapping[str, np.ndarray]) -> float:
    assert found.keys() == due.keys()
    return max(relative_difference(found[name], due[name]) for name in due)


def whole(config: RunConfig, batch) -> dict[str, np.ndarray]:
    found = opened(config).gradients(batch)
    return {PROBE_NLL: found.nll, **{PARAMETER + name: grad for name, grad in found.grads.items()}}


def chained(config: RunConfig, batch, names, stream=np.float64, **how) -> dict[str, np.ndarray]:
    chain = Chain(opened(config), config, initial_state(config).params, stream, **how)
    given = list(chain.run(batch, names))
    assert len({name for name, _ in given}) == len(given)
    return dict(given)


KINDS = {
    "tied": {},
    "untied": {"tied": False},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "one block": {"layers": 1},
}


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("kept", "head"), [(1 << 28, 1 << 28), (0, 1)], ids=["at once", "again, in chunks"])
def test_gradients_are_those_of_the_model(model, kept, head, monkeypatch):
    monkeypatch.setattr(chain_module, "KEPT_BYTES", kept)
    monkeypatch.setattr(chain_module, "HEAD_BYTES", head)
    # Logits of 32 positions are as large as the head's weights.
    config = tiny_config("fp64", train={"sequence_length": 48}, **model)
    batch = batch_of(config)
    session, runs = opened(config), Counter()
    monkeypatch.setattr(session, "run_stage", lambda *of: runs.update(of[:1]) or JaxSession.run_stage(session, *of))
    found = chained(config, batch, [PROBE_NLL, *of_parameters(config)])
    assert apart(found, whole(config, batch)) < EXACT
    # Forward and back, of each micro-batch or of both its chunks.
    assert runs["logits"] == 2 * len(batch.cut(config.train)) * (1 if kept else 2)


@pytest.mark.parametrize("library", ["", "liger"])
def test_taps_are_those_of_the_model(library):
    config = tiny_config("fp64")
    attention = AttentionConfig(document_mask=True, reset_positions=True)
    config = config.model_copy(update={"attention": attention})
    if library:
        config = config.model_copy(update={"loss": LossConfig(head=library)})
    part = weighted_part(probe_of(batch_of(config).cut(config.train)[0], config))
    written = [one.tap for one in stages_of(config)]
    assert set(written) <= set(tap_names(config.model))
    names = [name for tap in written for name in (tap, GRADIENT + tap)]
    found = chained(config, part, names)
    assert apart(found, opened(config).observe(part, names)) < EXACT


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8_tensorwise"])
def test_a_twin_rounds_as_the_model_does(policy):
    config = tiny_config(policy)
    batch = batch_of(config)
    scale = initial_state(config).scalars.get("loss_scale", 1.0)
    found = chained(config, batch, [PROBE_NLL, *of_parameters(config)], np.float32, fp8=True, scale=scale)
    due = whole(config, batch)
    truth = whole(tiny_config("fp64"), batch)
    assert max(relative_difference(due[name], truth[name]) for name in due) > 1e-4
    for name in due:
        off, honest = relative_difference(found[name], due[name]), relative_difference(due[name], truth[name])
        assert off < max(0.2 * honest, 1e-6), (name, off, honest)


@pytest.mark.parametrize(("dtype", "tied"), [("bf16", True), ("fp16", False)])
def test_ranks_that_sum_in_a_narrow_format_are_followed(dtype, tied):
    config = tiny_config("fp32", train={"ranks": 2}, tied=tied)
    config = config.model_copy(update={"parallel": ParallelConfig(gradient_dtype=dtype)})
    batch = batch_of(config)
    found = chained(config, batch, of_parameters(config), np.float32, ranks=2)
    due = whole(config, batch)
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[dtype]
    for name in of_parameters(config):
        # A sum that lies at a tie is rounded to the other side: few of them.
        assert np.mean(found[name] != due[name]) < 0.01, name
        assert relative_difference(found[name], due[name]) < unit
    plain = chained(config, batch, of_parameters(config), np.float32)
    matrices = [name for name in of_parameters(config) if "_proj" in name]
    assert all(np.mean(plain[name] != due[name]) > 0.5 for name in matrices)


def test_a_number_is_rounded_to_the_nearest_and_ties_to_even():
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.4e38, np.inf, np.nan, 0.0], np.float32)
    due = np.array([1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -np.inf, np.inf, np.nan, 0.0], np.float32)
    np.testing.assert_array_equal(narrowed(x, "bf16"), due)
    assert narrowed(x, "fp32") is x


class Read(Mapping[str, np.ndarray]):
    """Weights that are copied when they are read; `most` is the largest number of bytes that were alive at once."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays, self._alive, self.most = arrays, dict[int, int](), 0

    def __getitem__(self, name: str) -> np.ndarray:
        given = self._arrays[name].copy()
        self._alive[id(given)] = given.nbytes
        weakref.finalize(given, self._alive.pop, id(given))
        self.most = max(self.most, sum(self._alive.values()))
        return given

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def test_the_weights_of_two_segments_are_never_there_together():
    config = tiny_config("fp64", layers=6, tied=False)
    weights = Read(initial_state(config).params)
    session = JaxBackend().open(config)
    for _ in Chain(session, config, weights, np.float64).run(batch_of(config), of_parameters(config)):
        pass
    sizes = [
        sum(weights[name].nbytes for name in {name for one in segment.operations for name in one.params.values()})
        for segment in segments(stages_of(config))
    ]
    assert weights.most <= 2 * max(sizes) < sum(sizes)
    assert "params" not in vars(session), "the reference made weights of its own"


@pytest.mark.parametrize("refused", [None, "attn"])
def test_a_reference_that_runs_no_stages_gives_the_same(refused):
    config = tiny_config("fp32")
    state = initial_state(config)
    part = weighted_part(probe_of(batch_of(config).cut(config.train)[0], config))
    names = [PROBE_NLL, *of_parameters(config), "embed", GRADIENT + "blocks.0.attn.out"]
    due = {made.name: made for made in passes(Reference.open(JaxBackend(), config), state, part, names)}
    found = {made.name: made for made in passes(Reference.open(AtOnce(refused), config), state, part, names)}
    assert found.keys() == due.keys() == set(names)
    for name in names:
        assert relative_difference(found[name].truth, due[name].truth) < EXACT
        assert relative_difference(found[name].twin, due[name].twin) < 1e-5


def test_taps_of_several_micro_batches_are_refused():
    config = tiny_config("fp64")
    with pytest.raises(ValueError, match="one micro-batch"):
        chained(config, batch_of(config), ["embed"])

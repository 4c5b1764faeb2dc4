"""Tensors that are compared a stretch at a time give what they give at once, and no copy of one is made."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from lockstep.core.arrays import part_of
from lockstep.core.config.schema import OptimConfig
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge import update as update_module
from lockstep.core.parity.judge.update import update
from lockstep.core.parity.measures import stretches as stretches_module
from lockstep.core.parity.measures.compare import Comparison, Reference, compare, relative_difference
from lockstep.core.parity.measures.distances import Sums, distances
from lockstep.core.parity.measures.peaks import Norms, PeakSums
from lockstep.core.parity.measures.stretches import stretches
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.parity.plain import plain_distances
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.session import TorchSession


@pytest.fixture(scope="module")
def three():
    rng = np.random.default_rng(0)
    t = rng.standard_normal((700, 900))
    w = (t + 1e-3 * rng.standard_normal(t.shape)).astype(np.float32)
    return (t * 1.0001 + 1e-3 * rng.standard_normal(t.shape)).astype(np.float32), w, t


def test_slices_cover_everything_once():
    cut = list(stretches(1000, 300))
    assert [(s.start, s.stop) for s in cut] == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert list(stretches(0, 300)) == []
    x = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(part_of({"x": x}, "x", slice(2, 7)), np.arange(2.0, 7.0))


def test_sums_of_parts_are_those_of_the_whole(three):
    found, due = distances(*three, np.float32), plain_distances(*three)
    for name, value in due.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    sums = Sums()
    for part in np.array_split(np.arange(three[0].size), 7):
        sums.add(*(x.reshape(-1)[part] for x in three))
    assert sums.distances(np.float32).excess == pytest.approx(found.excess, rel=1e-12)
    e = three[1].astype(np.float64) - three[2]
    assert sums.effective() == pytest.approx(3 * np.square(e).sum() ** 2 / (e**4).sum(), abs=3)
    ratio, residual = sums.along_the_truth()
    c = three[0].astype(np.float64)
    due_ratio = float(np.vdot(c, three[2]) / np.vdot(three[2], three[2]))
    assert ratio == pytest.approx(due_ratio, rel=1e-12)
    off = np.linalg.norm(c - due_ratio * three[2]) / np.linalg.norm(three[2])
    assert residual == pytest.approx(off, rel=1e-9)


def test_stretches_without_a_difference_count_as_the_others(three):
    """Where c is w, neither c − w nor its products are computed."""
    _, w, t = three
    for c in (w, np.where(np.arange(t.shape[0])[:, None] < 100, w, three[0])):
        found, due = distances(c, w, t, np.float32), plain_distances(c, w, t)
        for name, value in due.items():
            assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    endless = w.copy()
    endless[-1, -1] = np.inf
    assert np.isinf(distances(endless, endless, t, np.float32).excess)
    for one, other in ((w, w), (w, -t)):  # of zeros, and of a candidate that is nowhere the twin
        apart, squares = (one - other).astype(np.float64).ravel(), np.square(w - t).ravel()
        sums, without = PeakSums(t.shape), PeakSums(t.shape)
        sums.add(apart, squares, t.ravel())
        without.add(None, squares, t.ravel())
        same = sums.peaks(1e-7, 1e-30, Norms()) == without.peaks(1e-7, 1e-30, Norms())
        assert same == (one is other)


@pytest.mark.parametrize("place", ["candidate", "twin", "truth"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_one_stretch_is_not_finite_in_all(three, place, value):
    sides = {name: x.copy() for name, x in zip(("candidate", "twin", "truth"), three, strict=True)}
    sides[place][-1, -1] = value
    found = distances(**sides, stream=np.float32)
    assert np.isinf([found.excess, found.twin_distance, found.gain_difference]).all()


def test_a_comparison_makes_no_copy_of_its_tensors(three):
    config = tiny_config("bf16")
    reference = Reference.open(JaxBackend(), config).over_a_run()
    big = [np.tile(x, (8, 1)) for x in three]
    compare(reference, "q", "forward/q", "blocks.0.attn.q", "local", *big)
    tracemalloc.start()
    compare(reference, "q", "forward/q", "blocks.0.attn.q", "local", *big)
    relative_difference(big[0], big[1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 8 * stretches_module.STRETCH < 16 * big[2].size


def test_sketches_of_parts_are_those_of_the_whole(three):
    reference = Reference.open(JaxBackend(), tiny_config("fp32")).over_a_run()
    assert reference.over_steps is not None
    seen = []
    reference.over_steps.add = lambda found, kind, size, sketches, stream, gain, common: seen.append(sketches)
    small = [x[:40] for x in three]
    compare(reference, "q", "forward/gate", "a", "local", *small)
    parts = Comparison(reference, "q", "forward/gate", "a", "local", small[0].shape)
    for at in range(0, small[0].size, 1111):
        parts.add(*(x.reshape(-1)[at : at + 1111] for x in small))
    parts.finding()
    if not seen:
        pytest.fail("the comparison did not hold, and nothing was summed")
    for one, other in zip(*seen, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize("optim", [{}, {"name": "adamw8bit", "eight_bit": "torchao"}, {"name": "muon"}])
def test_an_update_by_stretches_is_that_of_the_whole(optim, monkeypatch):
    config = tiny_config("bf16", train={"sequence_length": 16})
    config = config.model_copy(update={"optim": OptimConfig(**config.optim.model_dump() | optim)})
    session = TorchSession(config)
    for seed in range(2):
        evidence = gather(session, config, text_batch(config, seed))
    reference = Reference.open(JaxBackend(), config)
    whole = {(f.stage, f.tap): f for f in update(evidence, reference)}
    assert len(whole) > 2 * len(parameter_shapes(config.model)) and all(f.ok for f in whole.values())
    monkeypatch.setattr(update_module, "LENGTHS", (256, 1024))
    cut = {(f.stage, f.tap): f for f in update(evidence, reference)}
    assert cut.keys() == whole.keys()
    for key, found in cut.items():
        for one, other in zip(found.measures, whole[key].measures, strict=True):
            assert one.value == pytest.approx(other.value, rel=1e-6, abs=1e-12), (key, one.name)


def test_a_wrong_element_in_the_last_stretch_is_found(monkeypatch):
    monkeypatch.setattr(update_module, "LENGTHS", (256, 1024))
    config = tiny_config("bf16", train={"sequence_length": 16})
    evidence = gather(TorchSession(config), config, text_batch(config))
    name = "blocks.1.mlp.down_proj.weight"
    evidence.after.params[name].reshape(-1)[-1] += 0.1
    wrong = [f.tap for f in update(evidence, Reference.open(JaxBackend(), config)) if not f.ok]
    assert wrong == [name]

"""Observations of a tensor, and the file that keeps them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.observations import load, observed, save, sketch_distances
from lockstep.core.parity.measures.distances import distances

ABOUT = {"step": 7, "rows": [0, 3]}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {"a": (60, 70), "b": (5,)}.items()}


def test_statistics():
    x = np.array([[3.0, -4.0], [0.0, 0.0]], np.float32)
    seen = observed(x)
    assert (seen.norm, seen.max_abs, seen.mean, seen.nonfinite, seen.size) == (5.0, 4.0, -0.25, 0, 4)
    x[1] = np.nan, np.inf
    assert observed(x).nonfinite == 2


def test_round_trip_and_numpy_alone_reads_it(tmp_path):
    path = tmp_path / "step_000007.npz"
    kept = {name: observed(x) for name, x in tensors().items()}
    save(path, kept, ABOUT)
    found, about = load(path)
    assert list(found) == list(kept) and about["step"] == 7
    for name, one in kept.items():
        assert np.array_equal(found[name].sketch, one.sketch)
        assert (found[name].norm, found[name].size, found[name].nonfinite) == (one.norm, one.size, one.nonfinite)
    with np.load(path, allow_pickle=False) as file:
        assert file["names"].tolist() == [b"a", b"b"] and file["sketch"].shape == (2, 1021)
        assert json.loads(str(file["about"]))["schema"] == 1


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "foreign", "schema"])
def test_a_damaged_file_is_named(tmp_path, harm):
    path = tmp_path / "step_000007.npz"
    save(path, {name: observed(x) for name, x in tensors().items()}, ABOUT)
    raw = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif harm == "flipped":
        raw[len(raw) // 2] ^= 0xFF
        path.write_bytes(raw)
    elif harm == "foreign":
        np.savez(path, something=np.zeros(3))
    else:
        with np.load(path) as file:
            arrays = dict(file)
        np.savez(path, **{**arrays, "about": np.asarray(json.dumps({"schema": 99}))})
    with pytest.raises(UserError, match=path.name):
        load(path)


def test_distances_of_sketches_are_those_of_the_tensors():
    """Six deviations of √(1/2K) in each of two norms: 19 %."""
    rng = np.random.default_rng(1)
    t = rng.standard_normal((300, 400))
    w, c = t + 1e-3 * rng.standard_normal(t.shape), 1.001 * t + 1e-3 * rng.standard_normal(t.shape)
    whole = distances(c, w, t, np.float32)
    sketched = sketch_distances(observed(c), observed(w), observed(t), np.float32)
    assert sketched.excess == pytest.approx(whole.excess, rel=0.19)
    assert sketched.twin_distance == pytest.approx(whole.twin_distance, rel=0.19)
    assert sketched.gain_difference == pytest.approx(whole.gain_difference, abs=6 * 1.5e-3 / np.sqrt(1021))


def test_what_is_not_finite_breaks_every_measure():
    x = tensors()["a"]
    bad = x.copy()
    bad[3, 3] = np.nan
    assert sketch_distances(observed(bad), observed(x), observed(x), np.float32).excess == np.inf


def test_other_sizes_are_refused():
    a, b = (observed(x) for x in tensors().values())
    with pytest.raises(ValueError, match="sizes"):
        sketch_distances(a, b, b, np.float32)

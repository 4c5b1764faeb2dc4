"""Errors that a tensor's norms hide: an element, a row, a column, a length among rows that cancel, a share of bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.config.schema import OptimConfig
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures import calibrated_bounds, peak_bounds
from lockstep.core.parity.measures.calibrated_bounds import Extremes
from lockstep.core.parity.measures.distances import Sums, distances
from lockstep.core.parity.measures.peak_bounds import Sharp, share_at_least, share_at_most
from lockstep.core.parity.measures.peaks import Norms
from lockstep.core.parity.measures.verdict import OVER_MATRICES
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.small import MuonSlightlyLong
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.scripts.studies.calibrate import add_sharp
from lockstep.torch_backend.backend import TorchBackend

rng = np.random.default_rng(0)
SHAPE = (4, 64, 256)
TRUTH = rng.standard_normal(SHAPE)
TRUTH[0, 3] *= 4  # one token that outweighs the others
ULP = 2.0**-8


def rounded(x: np.ndarray) -> np.ndarray:
    """Round to eight bits of mantissa."""
    _, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(x, 8 - exponent)), exponent - 8)


TWIN = rounded(TRUTH)


def with_ties(share: float) -> np.ndarray:
    """Return the twin, with a share of its elements rounded to the other side."""
    wrong = TWIN.copy()
    at = rng.random(SHAPE) < share
    wrong[at] += np.sign(TRUTH - TWIN)[at] * np.ldexp(1.0, np.frexp(TRUTH)[1] - 8)[at]
    return wrong


def one_element(c: np.ndarray) -> np.ndarray:
    wrong = c.copy()
    wrong[2, 5, 7] *= 1.5
    return wrong


def one_row(c: np.ndarray) -> np.ndarray:
    wrong = c.copy()
    wrong[1, 9] *= 1.05
    return wrong


def one_column(c: np.ndarray) -> np.ndarray:
    wrong = c.copy()
    wrong[..., 17] += 0.05
    return wrong


def too_long(c: np.ndarray) -> np.ndarray:
    return c * 1.0005


def ties_everywhere(c: np.ndarray) -> np.ndarray:
    return with_ties(0.1)


@pytest.fixture
def table(monkeypatch):
    """Set a recipe whose clean runs reproduced their twin but for one element in two thousand."""
    clean = Sharp(0.05, 1.5, 0.2, 0.2, 0.002, 0.0005, 100)
    row = Extremes(0.001, 0.05, 0.005, 100)
    kept = Sharp(4e-4, 7e-4, 3e-4, 3e-4, 1e-5, 0.6, 100)
    found = {kind: replace(row, sharp=clean) for kind in ("forward/q", "forward/attn_norm")}
    found |= {"forward/k": row, "forward/logits": replace(row, sharp=kept)}
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {"bf16/eager": found})


def broken(c: np.ndarray, kind: str = "forward/q") -> set[str]:
    d = distances(c, TWIN, TRUTH, np.float32)
    return {m.name for m in calibrated_bounds.measures("bf16/eager", kind, d, TRUTH.size) if not m.ok}


def test_peaks_are_those_of_the_whole_table():
    c = with_ties(0.01)
    apart, honest = (x.reshape(-1, 256) for x in (c - TWIN, TWIN - TRUTH))
    peaks = distances(c, TWIN, TRUTH, np.float32).peaks
    assert peaks.largest == pytest.approx(np.abs(apart).max() / np.abs(honest).max())
    for axis, found in ((1, peaks.row), (0, peaks.column)):
        norms = [np.linalg.norm(x, axis=axis).max() for x in (apart, honest)]
        assert found == pytest.approx(norms[0] / norms[1])
    t, errors = TRUTH.reshape(-1, 256), [np.square(x).sum(1) for x in (honest, apart)]
    gains = [
        ((apart * t).sum(1) / error).sum() / np.sqrt(len(t) * (np.square(t).sum(1) / error).sum())
        for error in (errors[0], np.maximum(*errors))
    ]
    assert peaks.row_gain == pytest.approx(min(gains, key=abs), rel=1e-6) != gains[0]


@pytest.mark.parametrize("name, at", [("row", 7), ("column", 200)])
def test_a_line_that_is_wrong_is_told_by_its_number(name: str, at: int) -> None:
    wrong = TWIN.reshape(-1, 256).copy()
    wrong[at if name == "row" else ..., ... if name == "row" else at] = 0
    d = distances(wrong.reshape(TWIN.shape), TWIN, TRUTH, np.float32)
    told = {m.name: m.basis for m in calibrated_bounds.measures("bf16/eager", "forward/q", d, TRUTH.size) if not m.ok}
    assert f"; at index {at} of {wrong.shape[name == 'column']}" in told[f"largest_{name}"]
    clean = distances(TWIN, TWIN, TRUTH, np.float32)
    measures = calibrated_bounds.measures("bf16/eager", "forward/q", clean, TRUTH.size)
    assert not any("at index" in m.basis for m in measures)


def test_a_row_that_is_exact_by_chance_decides_no_length() -> None:
    """One token outweighs all others: each row's error is one number times that token, and one of them is near zero."""
    generator = np.random.default_rng(2)
    token, others = generator.standard_normal(96), 0.01 * generator.standard_normal((48, 96))
    truth = np.outer(generator.standard_normal(48), token) + others
    of_twin, of_candidate = generator.standard_normal((2, 48))
    of_twin[14] = 1e-3
    twin = truth + 0.003 * np.outer(of_twin, token)
    of_candidate[14] = np.sign(truth[14] @ token)
    candidate = truth + 0.003 * np.outer(of_candidate, token)
    peaks = distances(candidate, twin, truth, np.float32).peaks
    assert peaks is not None and abs(peaks.row_gain) < 0.1
    # A length that is wrong in every row is one with the errors of all rows, too.
    long = distances(twin + 0.01 * truth, twin, truth, np.float32).peaks
    assert long is not None and long.row_gain > 0.5


def test_parts_that_end_within_rows_give_the_same():
    c, sums = with_ties(0.01), Sums(SHAPE)
    for part in np.split(np.arange(c.size), [100, 1000, 1001, 40_000]):
        sums.add(*(x.reshape(-1)[part] for x in (c, TWIN, TRUTH)))
    found, due = sums.distances(np.float32).peaks, distances(c, TWIN, TRUTH, np.float32).peaks
    assert vars(found) == pytest.approx(vars(due), rel=1e-12)


def test_one_axis_has_no_rows():
    peaks = distances(TWIN.ravel(), TWIN.ravel(), TRUTH.ravel(), np.float32).peaks
    assert (peaks.rows, peaks.row, peaks.column, peaks.row_gain) == (1, 0.0, 0.0, 0.0)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "plant, measure",
    [
        (one_element, "largest_element"),
        (one_row, "largest_row"),
        (one_column, "largest_column"),
        (too_long, "row_gain"),
        (ties_everywhere, "unequal"),
    ],
)
def test_each_measure_sees_what_norms_hide(plant: Callable[[np.ndarray], np.ndarray], measure: str):
    assert broken(with_ties(0.001)) == set()
    assert measure in broken(plant(with_ties(0.001)))
    # A kind that was not measured so keeps its old bounds alone.
    assert measure not in broken(plant(with_ties(0.001)), "forward/k")


@pytest.mark.usefixtures("table")
def test_a_product_that_stays_in_fp32_is_held_to_fp32_s_roundings():
    assert calibrated_bounds.result_of("bf16/eager", "forward/logits") == "kept"
    assert calibrated_bounds.result_of("bf16/eager", "backward/logits/weight") == "kept"
    assert calibrated_bounds.result_of("bf16/eager", "backward/logits/x") == "rounded"
    assert broken(with_ties(0.001), "forward/attn_norm") == set()
    cut = TWIN + rng.uniform(-0.2, 0.2, SHAPE) * np.abs(TWIN - TRUTH).mean()
    assert {"twin_distance", "unequal"} <= broken(cut, "forward/logits")


def test_the_noise_of_a_tensor_is_its_own_in_every_norm():
    noise = np.zeros((8, 16))
    noise[3] = 2.0
    found = Norms.of(noise)
    assert (found.whole, found.largest, found.row, found.column) == (8.0, 2.0, 8.0, 2.0)
    assert found.at_least(Norms.anywhere(1.0), times=5.0) == Norms(8.0, 5.0, 8.0, 5.0)
    sums = Sums((8, 16))
    twin = np.ones((8, 16))
    sums.add(twin + noise, twin, twin)
    assert sums.distances(np.float32).peaks.largest > 1e6
    assert sums.distances(np.float32, found).peaks.largest == pytest.approx(1.0)


@pytest.mark.parametrize("true", [1e-4, 0.01, 0.6, 0.999])
def test_a_share_of_few_numbers_says_little(true: float):
    """A sample of a share lies within its bound, and the share that it proves is no larger than the true one."""
    counts = rng.binomial(1000, true, 10_000) / 1000
    assert max(counts) <= share_at_most(true, 1000)
    assert max(share_at_least(share, 1000) for share in counts) <= true
    assert share_at_most(true, 10**9) == pytest.approx(true, rel=0.05)
    assert share_at_least(true, 10**9) == pytest.approx(true, rel=0.05)
    assert share_at_least(true, 10) == 0.0


def test_extremes_of_a_table_are_read_and_written():
    row = Extremes(0.1, 0.2, 0.3, 5, Sharp(1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 2))
    assert Extremes.from_json(row.to_json()) == row
    old = {"log_excess": 0.1, "distance": 0.2, "gain": 0.3, "draws": 5}
    assert Extremes.from_json(old).to_json() == old
    assert (row | Extremes.from_json(old)).sharp == row.sharp
    assert peak_bounds.LEAST.keys() == {"rounded", "kept", "sum", "same"}


def test_joined_rows_keep_the_most_that_either_reached() -> None:
    rows = {
        "nll": Extremes(0.1, 0.2, 0.3, 5, Sharp(1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 2), over_checks=0.4).to_json(),
        "q": Extremes(0.1, 0.2, 0.3, 5).to_json(),
    }
    more = Extremes(9.0, 9.0, 9.0, 9, Sharp(2.0, 1.0, 3.0, 4.0, 5.0, 0.25, 3), over_checks=0.1)
    add_sharp(rows, {"nll": more, "q": more, "k": more})
    assert rows["nll"] == Extremes(0.1, 0.2, 0.3, 5, Sharp(2.0, 2.0, 3.0, 4.0, 5.0, 0.5, 5), over_checks=0.4).to_json()
    assert rows["q"] == Extremes(0.1, 0.2, 0.3, 5, more.sharp, over_checks=0.1).to_json()
    assert rows["k"] == more.to_json()


def dominated() -> np.ndarray:
    """Return a small matrix in which one element outweighs all others, and lies almost at a tie."""
    truth = np.random.default_rng(1).standard_normal((8, 32)) * 1e-3
    truth[3, 5] = 1.0 + 0.499 * 2.0**-7
    return truth


@pytest.mark.parametrize(("ulps", "accused"), [(1, False), (3, True)])
def test_one_element_at_a_tie_is_no_distance(ulps: int, accused: bool) -> None:
    """An element that outweighs its tensor falls to the other side of a tie; three ulp are none."""
    truth = dominated()
    twin = rounded(truth)
    candidate = twin.copy()
    candidate[3, 5] += ulps * 2.0**-7
    d = distances(candidate, twin, truth, np.float32)
    assert d.twin_distance > 1
    broken = {m.name for m in calibrated_bounds.measures("bf16/eager", "backward/q/weight", d, 54) if not m.ok}
    assert ("twin_distance" in broken) == accused


@pytest.mark.parametrize(("ulps", "accused"), [(1, set()), (3, {"largest_element"})])
@pytest.mark.parametrize("others", [0, 20])
def test_one_element_at_a_tie_is_no_distance_of_its_lines(ulps: int, accused: set[str], others: int) -> None:
    """An element that outweighs its row and column falls to the other side of a tie, and small ones elsewhere do."""
    candidate, twin, truth = outweighed(ulps)
    for place in range(others):
        candidate[8 + 2 * place, 7 + place] = np.nextafter(np.float32(twin[8 + 2 * place, 7 + place]), np.float32(2))
    d = distances(candidate, twin, truth, np.float32)
    assert d.peaks is not None and min(d.peaks.row, d.peaks.column) > 1
    assert (d.peaks.row_of_many, d.peaks.column_of_many) == (0, 0)
    broken = {m.name for m in calibrated_bounds.measures("bf16/eager", "backward/q/weight", d, 4096) if not m.ok}
    assert broken & {"largest_element", "largest_row", "largest_column"} == accused


def outweighed(ulps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    truth = np.random.default_rng(1).standard_normal((64, 64)) * 0.1
    truth[3, 5] = 1.0 + 0.499 * 2.0**-7
    twin = rounded(truth)
    candidate = twin.copy()
    candidate[3, 5] += ulps * 2.0**-7
    return candidate, twin, truth


@pytest.mark.parametrize("axis", [0, 1])
def test_an_element_at_a_tie_hides_no_line_that_is_wrong(axis: int) -> None:
    candidate, twin, truth = outweighed(1)
    lines = candidate.T if axis else candidate
    lines[40] += 9e-4
    d = distances(candidate, twin, truth, np.float32)
    assert d.peaks is not None
    rows, columns = (d.peaks.row, d.peaks.row_of_many), (d.peaks.column, d.peaks.column_of_many)
    name, (value, of_many) = ("column", columns) if axis else ("row", rows)
    assert of_many is not None and of_many < value
    broken = {m.name for m in calibrated_bounds.measures("bf16/eager", "backward/q/weight", d, 4096) if not m.ok}
    assert f"largest_{name}" in broken


def test_unequal_elements_of_lines_are_counted_over_parts() -> None:
    candidate, twin, truth = outweighed(1)
    candidate[40, :3] += 1e-3
    whole = distances(candidate, twin, truth, np.float32).peaks
    sums = Sums(truth.shape)
    for start in range(0, truth.size, 37):
        sums.add(*(x.reshape(-1)[start : start + 37] for x in (candidate, twin, truth)))
    found = sums.distances(np.float32).peaks
    assert found is not None and whole is not None and found.row_of_many == pytest.approx(whole.row_of_many)
    assert whole.row_of_many and not whole.column_of_many


def test_many_elements_at_a_tie_are_a_distance() -> None:
    d = distances(with_ties(0.2), TWIN, TRUTH, np.float32)
    assert peak_bounds.distance_of_ties("rounded", d) == 0


@pytest.mark.parametrize(("candidate", "verdict"), [(TorchBackend, "agreed"), (MuonSlightlyLong, "disagreed")])
def test_an_update_that_is_long_by_less_than_it_rounds_is_seen(candidate: type[TorchBackend], verdict: str) -> None:
    """Muon's steps in bf16 leave an error of 2 % in the update of a matrix, and none in the length of all of them."""
    config = tiny_config()
    config = config.model_copy(update={"optim": OptimConfig(name="muon", warmup_steps=3)})
    check = judge(gather(candidate().open(config), config, text_batch(config)), Reference.open(JaxBackend(), config))
    assert check.verdict == verdict
    wrong = [finding for finding in check.findings if not finding.ok]
    assert {(finding.stage, finding.phase) for finding in wrong} == ({("update", "update")} if wrong else set())
    assert [finding.tap for finding in wrong] == ([OVER_MATRICES] if wrong else [])
    (typical,) = (finding for finding in check.findings if finding.tap == OVER_MATRICES)
    assert typical.size == 14 and (wrong or abs(typical.worst.value) < 1e-3)

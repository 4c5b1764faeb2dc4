"""The links between ranks: what is reduced against what each rank gave, and that all ranks hold the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import Gradients, RankReport, StepRecord
from lockstep.core.model.names import GRADIENT, edge_names, parameter_shapes, tap_names
from lockstep.core.parity.evidence.evidence import Accumulation
from lockstep.core.parity.evidence.sums import shares_of
from lockstep.core.parity.judge import local
from lockstep.core.parity.judge.rank_sums import same_sums
from lockstep.core.parity.measures.verdict import Finding
from lockstep.parity_tests.tiny import text_batch, tiny_config

RECORD = StepRecord(1, 2.0, 4.0, 1e-3, 0.5, 1.0, "d", 8)
SAME = RankReport(RECORD, {"params/a": "1", "params/b": "2"})


def judged(reduced: Accumulation | None = None, ranks: tuple[RankReport, ...] = (), dtype: str = "fp32") -> Any:
    config = tiny_config(train={"ranks": 2})
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"gradient_dtype": dtype})})
    evidence: Any = SimpleNamespace(reduced=reduced, ranks=ranks)
    reference: Any = SimpleNamespace(config=config, stream=np.float32)
    return list(local.reduction(evidence, reference))


def broken(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.stage, f.tap) for f in findings if not f.ok]


@pytest.mark.parametrize("count", [2, 4, 6, 8, 16])
def test_shares_are_powers_of_two_and_uneven(count: int) -> None:
    shares = shares_of(count)
    assert len(shares) == count and sum(shares) == 1
    assert all(np.log2(share).is_integer() for share in shares)
    assert count == 2 or max(shares) > sum(shares) / count


def together(parts: Any, shares: tuple[float, ...], whole: np.ndarray) -> Accumulation:
    batch = text_batch(tiny_config())
    return Accumulation(parts, shares, Gradients(np.zeros(batch.tokens.shape), 0.0, {"a": whole}), batch)


def reduced(change: Callable[[Any], Any] = lambda whole: whole) -> Accumulation:
    rng = np.random.default_rng(0)
    shares = shares_of(4)
    parts = tuple({"a": rng.standard_normal((40, 30)).astype(np.float32)} for _ in shares)
    ranks = [sum(s * p["a"] for s, p in list(zip(shares, parts, strict=True))[r : r + 2]) for r in (0, 2)]
    return together(parts, shares, change(ranks[0] + ranks[1]))


def test_a_sum_in_another_order_is_the_same_sum() -> None:
    assert broken(judged(reduced())) == []


def rounded(array: np.ndarray) -> np.ndarray:
    """To 8 significant bits, as bf16 has them."""
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(np.float32)


def test_bf16_is_allowed_where_it_is_declared() -> None:
    assert broken(judged(reduced(rounded))) == [("reduction", "a")]
    assert broken(judged(reduced(rounded), dtype="bf16")) == []
    assert broken(judged(reduced(rounded), dtype="fp16")) == [("reduction", "a")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_mean_is_no_sum(dtype: str) -> None:
    assert broken(judged(reduced(lambda whole: whole / 2), dtype=dtype)) == [("reduction", "a")]


def test_a_gradient_that_a_rank_lacks() -> None:
    found = reduced()
    assert broken(judged(replace(found, parts=({}, *found.parts[1:])))) == [("reduction", "a")]


def test_ranks_must_hold_the_same_state() -> None:
    assert broken(judged(ranks=(SAME, SAME))) == []
    other = replace(SAME, state={"params/a": "1", "params/b": "3"})
    (finding,) = [f for f in judged(ranks=(SAME, SAME, other)) if not f.ok]
    assert (finding.stage, finding.tap, finding.note) == ("update", "state_of_ranks", "params/b on rank 2")


@pytest.mark.parametrize(
    ("key", "stage"),
    [
        ("digest", "tokens"),
        ("lr", "learning_rate"),
        ("grad_norm", "grad_norm"),
        ("clip_coefficient", "clip_coefficient"),
        ("step", "step_count"),
    ],
)
def test_ranks_must_say_the_same(key: str, stage: str) -> None:
    changed: dict[str, Any] = {key: 3}
    other = replace(SAME, record=replace(RECORD, **changed))
    assert broken(judged(ranks=(SAME, other))) == [(stage, f"{key}_of_ranks")]


def test_ranks_must_have_the_same_sums() -> None:
    summed = replace(SAME, gradients={"a": "1", "blocks.1.b": "2"})
    assert [found.ok for found in same_sums((summed, summed))] == [True]
    other = replace(summed, gradients={"a": "1"})
    wrong = [found for found in same_sums((summed, summed, other)) if not found.ok]
    assert [(f.stage, f.tap) for f in wrong] == [("reduction", "blocks.1.b"), ("reduction", "gradients_of_ranks")]
    assert wrong[0].note == "on rank 2" and wrong[0].layer == 1
    assert not list(same_sums((SAME, SAME))) and not list(same_sums((summed,)))


def test_norms_that_are_nan_on_every_rank_are_the_same() -> None:
    """A step that was left out: every rank reports NaN. One that reports a number has another norm."""
    reports = [
        replace(SAME, record=replace(RECORD, grad_norm=float("nan"), clip_coefficient=float("nan"))) for _ in range(2)
    ]
    assert broken(judged(ranks=tuple(reports))) == []
    assert ("grad_norm", "grad_norm_of_ranks") in broken(judged(ranks=(reports[0], SAME)))


def tapped(*differing: str) -> RankReport:
    """Return the report of a rank whose digests differ from rank 0's at these names."""
    names = [*tap_names(MODEL), *edge_names(MODEL), *parameter_shapes(MODEL)]
    every = {prefix + name: "same" for name in names for prefix in ("", GRADIENT)}
    return replace(SAME, taps=every | dict.fromkeys(differing, "other"))


def after(first: str, *, forward: bool) -> list[str]:
    """Return the names that a difference at `first` reaches: all taps after it, or all gradients before it."""
    taps = list(tap_names(MODEL))
    at = taps.index(first)
    return taps[at:] if forward else [GRADIENT + name for name in taps[:at]]


MODEL = tiny_config().model
Q, UP = "blocks.1.attn.q_rope", "blocks.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        ((), []),
        ((*after(Q, forward=True), *after("nll", forward=False)), [("q_rope", Q, "forward")]),
        ((GRADIENT + UP,), [("up", UP, "backward")]),
        ((GRADIENT + "nll", *after("nll", forward=False)), [("loss", "nll", "backward")]),
        (("no.tap",), [("gradients", "taps_of_ranks", "backward")]),
    ],
    ids=["honest", "forward", "weight", "loss", "unknown"],
)
def test_a_rank_that_computes_otherwise_is_named_with_its_stage(
    differing: tuple[str, ...], named: list[tuple[str, str, str]]
) -> None:
    """The first difference on rank 2 in the chain is named; those that follow from it are no accusation."""
    found = [f for f in judged(ranks=(tapped(), tapped(), tapped(*differing))) if not f.ok]
    assert [(f.stage, f.tap, f.phase) for f in found][: len(named) or None] == named
    assert all(f.note.endswith("on rank 2") for f in found)
    assert len(found) <= 1 or {f.phase for f in found} == {"forward"}


def test_a_rank_on_another_processor_is_not_held_to_rank_0s_bits() -> None:
    """It rounds otherwise, and that is no evidence."""
    other = replace(tapped(Q), processor="another")
    assert [f.tap for f in judged(ranks=(tapped(), other)) if f.stage == "gradients"] == []
    evidence: Any = SimpleNamespace(ranks=(tapped(), other))
    (said,) = local.not_compared(evidence)
    assert said.startswith("stages on rank 1: it computes on another")
    assert broken(judged(ranks=(tapped(), other, tapped(Q)))) == [("q_rope", Q)]


def test_only_some_ranks_rows_are_wrong() -> None:
    """Weights cut over two ranks: a sum that is wrong on rank 1's rows names them, one that is wrong on all none."""
    config = tiny_config(train={"ranks": 2})
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"strategy": "fsdp"})})
    reference: Any = SimpleNamespace(config=config, stream=np.float32)
    right, parts = np.ones((5, 3), np.float32), ({"a": np.ones((5, 3), np.float32)},)
    for rows, note in ((slice(3, 5), "rows 3 to 4 of rank 1 alone"), (slice(0, 5), "")):
        wrong = right.copy()
        wrong[rows] *= 2
        evidence: Any = SimpleNamespace(reduced=together(parts, (1.0,), wrong), ranks=())
        (found,) = local.reduction(evidence, reference)
        assert (found.ok, found.note) == (False, note)

"""Two ranks over gloo are one trainer: what they compute together is what one process computes alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.load_backend import load_backend
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.update import flat
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.ranks import candidates
from lockstep.parity_tests.ranks.harness import RankedSession
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend import session as session_module
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.process_groups import RankError
from lockstep.torch_backend.upload import Uploaded, uploaded

TRAIN = {"batch_size": 8, "micro_batch_size": 2, "sequence_length": 32}


def config_of(policy: str = "fp32", ranks: int = 2, dtype: str = "fp32", compiled: bool = False, **train) -> RunConfig:
    config = tiny_config(policy, compiled, train=TRAIN | {"ranks": ranks} | train)
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"gradient_dtype": dtype})})


def ranked(config: RunConfig, backend: TorchBackend | None = None) -> RankedSession:
    session = (backend or TorchBackend()).open(config)
    assert isinstance(session, RankedSession)
    return session


BATCH = uneven_weights(text_batch(config_of()), 0)


pytestmark = pytest.mark.usefixtures("in_one_process")


@pytest.mark.parametrize(("policy", "within"), [("fp64", 1e-14), ("fp32", 1e-6), ("bf16", 1e-6)])
def test_two_ranks_compute_what_one_computes(policy: str, within: float) -> None:
    """Weights are uneven between the ranks. Measured 1e-16 and 4e-8: sums in another order."""
    two, one = ranked(config_of(policy)).gradients(BATCH), TorchBackend().open(config_of(policy, 1)).gradients(BATCH)
    assert np.array_equal(two.nll, one.nll)
    assert two.loss == pytest.approx(one.loss, rel=1e-15)
    assert two.grads.keys() == one.grads.keys()
    for name, grad in two.grads.items():
        assert relative(grad, one.grads[name]) < within, name


def test_compiled_ranks_compute_what_one_computes() -> None:
    two, one = (TorchBackend().open(config_of("bf16", ranks, compiled=True)) for ranks in (2, 1))
    for _ in range(2):
        ours, theirs = two.gradients(BATCH), one.gradients(BATCH)
        assert np.array_equal(ours.nll, theirs.nll)
        assert max(relative(grad, theirs.grads[name]) for name, grad in ours.grads.items()) < 1e-6
        assert two.step(BATCH).loss == pytest.approx(one.step(BATCH).loss, rel=1e-6)


def test_training_and_loading_keep_ranks_together() -> None:
    session, one = ranked(config_of()), TorchBackend().open(config_of(ranks=1))
    start = session.state()
    first = [session.step(BATCH, norms=True), session.step(BATCH)]
    assert [r.loss for r in first] == pytest.approx([one.step(BATCH).loss for _ in first], rel=1e-6)
    assert first[0].metrics and first[0].digest == BATCH.digest()
    mine, other = session.rank_reports()
    assert mine.state == other.state and len(mine.state) == len(flat(start))
    assert mine.record == other.record == first[1]
    session.load(start)
    record, found = session.step_and_gradients(BATCH)
    assert record.loss == first[0].loss and record.grad_norm == first[0].grad_norm
    assert found is not None and found.nll.shape == BATCH.tokens.shape
    mine, other = session.rank_reports()
    assert mine.state == other.state


def test_gradients_are_reduced_once_a_step() -> None:
    """Two micro-batches a rank: the first's gradients stay, the second takes both along, in one bucket."""
    session = ranked(config_of())
    session.gradients(BATCH)
    assert session.own.ranks is not None
    before = session.own.ranks.calls
    session.gradients(BATCH)
    assert session.own.ranks.calls == before + 1
    session.step(BATCH)
    assert session.own.ranks.calls == before + 2


def test_a_rank_sends_its_own_share_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two sends the first half of a step's sequences, in one piece."""
    sent: list[list[Batch]] = []

    def noting(micros: list[Batch], device: torch.device) -> list[Uploaded]:
        sent.append(list(micros))
        return uploaded(micros, device)

    session = ranked(config_of())
    monkeypatch.setattr(session_module, "uploaded", noting)
    session.step(BATCH)
    (mine,) = sent
    np.testing.assert_array_equal(np.concatenate([micro.tokens for micro in mine]), BATCH.tokens[:4])


def test_what_ranks_cannot_share_rank_0_computes_alone() -> None:
    session, one = ranked(config_of()), TorchBackend().open(config_of(ranks=1))
    micro = BATCH.micro_batches(2)[0]
    assert session.own.ranks is not None
    calls = session.own.ranks.calls
    found, alone = session.gradients(micro), one.gradients(micro)
    assert session.own.ranks.calls == calls
    assert all(np.array_equal(grad, alone.grads[name]) for name, grad in found.grads.items())
    assert found.program.keys() == found.grads.keys()
    with pytest.raises(ValueError, match="no equal number of micro-batches to each of 2 ranks"):
        session.step(micro)


@pytest.mark.parametrize(("dtype", "narrow"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_narrow_gradients_are_cast_summed_and_cast_back(dtype: str, narrow: torch.dtype) -> None:
    found = ranked(config_of(dtype=dtype)).gradients(BATCH)
    plain = TorchBackend().open(config_of(ranks=1))
    halves = []
    for start in (0, 4):
        weights = np.zeros_like(BATCH.weights)
        weights[start : start + 4] = BATCH.weights[start : start + 4]
        share = weights.sum(dtype=np.float64) / BATCH.weights.sum(dtype=np.float64)
        half = plain.gradients(type(BATCH)(BATCH.tokens, BATCH.targets, weights)).grads
        halves.append({name: torch.from_numpy(grad) * share for name, grad in half.items()})
    same = total = 0
    for name, grad in found.grads.items():
        assert np.array_equal(grad, torch.from_numpy(grad).to(narrow).float().numpy()), name
        expected = (halves[0][name].to(narrow) + halves[1][name].to(narrow)).float().numpy()
        same, total = same + int((grad == expected).sum()), total + grad.size
    assert same > 0.99 * total  # the halves above are divided by another number, which moves a few over a boundary


def test_the_reference_rounds_as_narrow_ranks_do() -> None:
    ours, theirs = ranked(config_of(dtype="bf16")).gradients(BATCH), JaxBackend().open(config_of(dtype="bf16"))
    exact = JaxBackend().open(config_of(ranks=1)).gradients(BATCH).grads
    rounded = theirs.gradients(BATCH).grads
    for name, grad in ours.grads.items():
        assert relative(grad, rounded[name]) < relative(exact[name], rounded[name]) / 2, name


def test_each_ranks_own_gradients_add_up() -> None:
    session = ranked(config_of("fp64"))
    whole = session.gradients(BATCH).grads
    parts = session.rank_gradients(BATCH)
    shares = [m.weights.sum(dtype=np.float64) / BATCH.weights.sum(dtype=np.float64) for m in BATCH.micro_batches(2)]
    assert len(parts) == 4
    for name, grad in whole.items():
        assert relative(sum(share * part[name] for share, part in zip(shares, parts, strict=True)), grad) < 1e-13


def test_the_program_is_cut_at_the_buckets() -> None:
    """One graph, captured whole, is cut where DDP's buckets end: so a bucket is sent while others are computed."""
    config = config_of(compiled=True).model_copy(update={"parallel": config_of().parallel})
    wide = config.model_copy(
        update={
            "model": config.model.model_copy(update={"hidden": 128, "ffn_hidden": 512, "vocab_size": 2048}),
            "parallel": config.parallel.model_copy(update={"bucket_mb": 1}),
        }
    )
    session = ranked(wide, candidates.CountsGraphs())
    session.gradients(BATCH.micro_batches(2)[0])
    session.gradients(BATCH)
    own = session.own
    assert isinstance(own, candidates._CountingSession) and own.ranks is not None
    assert len(own.graphs) > 1
    before = own.ranks.calls
    session.gradients(BATCH)
    assert own.ranks.calls - before > 1


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_added_up_in_the_buckets(compiled: bool) -> None:
    """After the first step, whose last backward pass lays the buckets anew, no micro-batch has others of its own."""
    session = ranked(config_of(compiled=compiled), candidates.ShowsPlacesOfGradients())
    own = session.own
    assert isinstance(own, candidates._PlacesOfGradients)
    session.gradients(BATCH)
    buckets = own.places[-1]
    # Each pass beside a step shows its gradients and lets go of them.
    for use in (session.step, session.gradients, session.step):
        use(BATCH)
        assert own.places == [buckets, buckets]
    session.gradients(BATCH.micro_batches(2)[0])
    session.step(BATCH)
    assert own.places == [buckets, buckets]


def test_a_candidate_of_a_file_is_opened_by_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from lockstep.torch_backend.backend import TorchBackend\n"
        "from lockstep.torch_backend.session import TorchSession\n\n\n"
        "class Session(TorchSession):\n    pass\n\n\n"
        "class Mine(TorchBackend):\n    session_class = Session\n"
    )
    session = load_backend(f"{file}:Mine").open(config_of())
    assert isinstance(session, RankedSession) and type(session.own).__name__ == "Session"
    session.step(BATCH)
    assert len({frozenset(report.state.items()) for report in session.rank_reports()}) == 1


# Trouble: each test ends the ranks, and the next one finds new ones.


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (candidates.RaisesOnRankOne, "rank 1: ArithmeticError: out of luck"),
        (candidates.DiesOnRankOne, "rank 1: its process has ended, or the network does not reach it"),
    ],
)
def test_the_trouble_of_a_rank_reaches_rank_0(backend: type[TorchBackend], said: str) -> None:
    session = ranked(config_of(), backend())
    with pytest.raises(RankError, match=said):
        session.step(BATCH)
    with pytest.raises(RankError, match=said):
        session.step(BATCH)
    session.close()
    again = ranked(config_of())
    assert np.isfinite(again.step(BATCH).loss)


def test_a_rank_that_dies_at_the_first_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    session = ranked(config_of(), candidates.DiesOnRankOneAtACheckpoint())
    session.step(text_batch(session.config))
    with pytest.raises(RankError, match="rank 1: its process has ended"):
        session.write(tmp_path)


def test_rank_0s_own_trouble_leaves_nobody_waiting() -> None:
    session = ranked(config_of(), candidates.RaisesOnRankZero())
    with pytest.raises(RuntimeError, match=r"^rank 0 is out of luck$"):
        session.step(BATCH)
    with pytest.raises(RankError, match="rank 0 failed during a step: RuntimeError"):
        session.step(BATCH)


def test_a_rank_that_cannot_open_says_so() -> None:
    with pytest.raises(RankError, match="rank 1: MemoryError: no room"):
        candidates.DoesNotOpenOnRankOne().open(config_of())


def test_what_a_rank_refuses_ends_nothing() -> None:
    session = ranked(config_of(), candidates.RefusesStatesOnRankOne())
    with pytest.raises(RankError, match="rank 1: ValueError: not mine"):
        session.load(session.state())
    with pytest.raises(ValueError, match="keeps exp_avg"):
        session.load(type(session.state())(0, {}, {}))
    session.step(BATCH)

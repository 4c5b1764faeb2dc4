"""Weights, gradients and moments cut over two to four ranks: what one process computes with all of them.

Bounds. Under fp64 a gradient is the same sum in another order: an ulp of 1.1e-16 of its length a summand, of which a
step has four; measured 1.5e-16, allowed 1e-14. Adam divides by its own root mean square, and a state may be off by as
much again a step. Two summands have one order: against DDP on two ranks everything is equal in bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import Session, State
from lockstep.core.checkpoint.format import begin_checkpoint, load_checkpoint, restore_checkpoint, writer_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.names import tap_names
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.update import flat
from lockstep.core.train.finite import NotFinite
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.ranks import sharded as faulty
from lockstep.parity_tests.ranks.harness import RankedSession
from lockstep.parity_tests.ranks.sharded import sharded
from lockstep.parity_tests.tiny import text_batch
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.process_groups import RankError

BATCH = uneven_weights(text_batch(sharded()), 0)
MICRO = BATCH.micro_batches(2)[0]
WITHIN = 1e-14


pytestmark = pytest.mark.usefixtures("in_one_process")


_open: list[RankedSession] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def opened(config: RunConfig, backend: TorchBackend | None = None) -> RankedSession:
    session = (backend or TorchBackend()).open(config)
    assert isinstance(session, RankedSession)
    _open.append(session)
    return session


def alone(config: RunConfig) -> Session:
    train = config.train.model_copy(update={"ranks": 1})
    return TorchBackend().open(config.model_copy(update={"train": train}))


def furthest(one: State, other: State) -> float:
    a, b = flat(one), flat(other)
    assert a.keys() == b.keys()
    return max(0.0 if np.array_equal(a[name], b[name]) else relative(a[name], b[name]) for name in a)


# Not divisible by the ranks: parts are shorter, and of some tensors empty.
ODD: dict[str, Any] = {"vocab_size": 259, "hidden": 8, "heads": 4, "kv_heads": 1, "ffn_hidden": 6}
HEAD, RECOMPUTED = {"loss": {"head": "full"}}, {"recompute": {"parts": "embedding,norms,attention,mlp"}}


@pytest.mark.parametrize(
    "config",
    [
        sharded(),
        sharded(ranks=4, **ODD),
        sharded(tied=False, qkv_bias=True, sections=HEAD),
        sharded(sections=RECOMPUTED),
        sharded(sections={"recompute": {"parts": "block", "keep_products": True}}),
        sharded(sections={"parallel": {"reduce_every_micro_batch": True, "reshard_after_forward": False}}),
        sharded(sections={"optim": {"name": "muon"}}),
    ],
    ids=["plain", "odd", "untied", "recomputed", "block_recomputed", "each", "muon"],
)
def test_parts_compute_what_the_whole_computes(config: RunConfig) -> None:
    parts, one = opened(config), alone(config)
    assert furthest(parts.state(), one.state()) == 0.0
    ours, theirs = parts.gradients(BATCH), one.gradients(BATCH)
    assert ours.grads.keys() == theirs.grads.keys()
    assert max(relative(grad, theirs.grads[name]) for name, grad in ours.grads.items()) < WITHIN
    # Results that rank 0 alone computes have its bits.
    ours, theirs = parts.gradients(MICRO), one.gradients(MICRO)
    assert ours.loss == theirs.loss and all(np.array_equal(g, theirs.grads[n]) for n, g in ours.grads.items())
    for _ in range(2):
        mine, other = parts.step(BATCH, norms=True), one.step(BATCH, norms=True)
        for key in ("loss", "grad_norm", "clip_coefficient"):
            assert getattr(mine, key) == pytest.approx(getattr(other, key), rel=WITHIN)
        assert mine.metrics == pytest.approx(other.metrics, rel=1e-12)
    assert furthest(parts.state(), one.state()) < (WITHIN if not config.model.qkv_bias else 1e-3)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8_rowwise", "fp8_delayed"])
def test_two_ranks_have_the_bits_of_ddp(policy: str) -> None:
    """A sum of two has one order. The norm is one of parts' squares: an ulp of float64, lost in the clipping's cast."""
    scale = {"precision": {"loss_scale": 1024.0}}
    parts, ddp = (opened(sharded(policy, strategy=strategy, sections=scale)) for strategy in ("fsdp", "ddp"))
    for _ in range(2):
        mine, other = parts.step(BATCH), ddp.step(BATCH)
        assert mine.loss == other.loss and mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-14)
    assert furthest(parts.state(), ddp.state()) == 0.0
    own, other_own = parts.rank_gradients(BATCH), ddp.rank_gradients(BATCH)
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(own, other_own, strict=True) for n in b)


def test_gradients_are_reduced_once_a_step_in_the_declared_dtype() -> None:
    narrow = {"gradient_dtype": "bf16"}
    parts = opened(sharded("fp32", sections={"parallel": narrow}))
    ddp = opened(sharded("fp32", strategy="ddp", sections={"parallel": narrow}))
    assert parts.own.ranks is not None
    before = parts.own.ranks.calls
    ours, theirs = parts.gradients(BATCH), ddp.gradients(BATCH)
    assert parts.own.ranks.calls - before == 3  # two blocks and the rest
    assert all(np.array_equal(grad, theirs.grads[name]) for name, grad in ours.grads.items())


def test_what_rank_0_alone_counts_in_is_not_rounded() -> None:
    """A check's micro-batch is no reduction: its gradients are one process's, whatever ranks sum theirs in."""
    config = sharded("bf16", sections={"parallel": {"gradient_dtype": "bf16"}})
    parts, one = opened(config), alone(sharded("bf16"))
    parts.step(BATCH)
    one.load(parts.state())
    ours, theirs = parts.gradients(MICRO), one.gradients(MICRO)
    assert all(np.array_equal(grad, theirs.grads[name]) for name, grad in ours.grads.items())
    taps = ["grad/blocks.0.attn.q_rope", "grad/embed.weight"]
    seen, expected = parts.observe(MICRO, taps), one.observe(MICRO, taps)
    assert all(np.array_equal(seen[name], expected[name]) for name in seen)


def test_what_is_looked_at_is_the_weights_of_now() -> None:
    parts, one = opened(sharded("bf16")), alone(sharded("bf16"))
    taps = ["blocks.1.attn.out", "logits", "grad/blocks.0.attn.q_rope", "grad/embed.weight", "grad/final_norm"]
    start = one.state()
    for _ in range(2):
        ours, theirs = parts.evaluate(MICRO), one.evaluate(MICRO)
        assert np.array_equal(ours["nll"], theirs["nll"]) and np.array_equal(ours["top1"], theirs["top1"])
        text = MICRO.tokens[0]
        assert np.array_equal(parts.next_token_logits(text), one.next_token_logits(text))
        seen, expected = parts.observe(MICRO, taps), one.observe(MICRO, taps)
        assert seen.keys() == expected.keys()
        assert all(np.array_equal(seen[name], expected[name]) for name in seen)
        assert np.array_equal(parts.attention_logits(MICRO), one.attention_logits(MICRO))  # type: ignore[attr-defined]
        kept, other = parts.sketch(MICRO), one.sketch(MICRO)  # type: ignore[attr-defined]
        assert kept.keys() == other.keys()
        assert all(np.array_equal(kept[name].sketch, other[name].sketch) for name in kept)
        one.step(BATCH)
        parts.load(one.state())
    assert furthest(parts.state(), one.state()) == 0.0
    parts.load(start)
    one.load(start)
    assert np.array_equal(parts.evaluate(MICRO)["nll"], one.evaluate(MICRO)["nll"])


def test_compiled_blocks_that_are_computed_again_can_be_looked_at() -> None:
    """A tap records a tensor once: recomputing would be another program, which torch's checkpoint refuses."""
    compiled = {"compile": {"enabled": True, "backend": "aot_eager", "scope": "blocks"}}
    again = sharded("bf16", layers=1, sections=compiled | {"recompute": {"parts": "block"}})
    kept = sharded("bf16", layers=1, sections=compiled)
    names = tap_names(kept.model)
    taps = [*names, *(f"grad/{name}" for name in names)]
    seen, expected = (opened(config).observe(MICRO, taps) for config in (again, kept))
    assert seen.keys() == expected.keys() and all(np.array_equal(seen[name], expected[name]) for name in taps)


def test_blocks_are_compiled_and_the_weights_gathered_around_them() -> None:
    compiled = {"compile": {"enabled": True, "backend": "aot_eager", "scope": "blocks"}}
    parts, ddp = (opened(sharded("bf16", strategy=s, layers=1, sections=compiled)) for s in ("fsdp", "ddp"))
    for _ in range(2):
        assert parts.step(BATCH).loss == ddp.step(BATCH).loss
    assert furthest(parts.state(), ddp.state()) == 0.0


EIGHT = {"optim": {"name": "adamw8bit"}}


def test_eight_bit_moments_are_cut_between_their_blocks() -> None:
    wide = {"hidden": 128, "ffn_hidden": 256, "layers": 1}
    parts, ddp = (opened(sharded("fp32", strategy=s, sections=EIGHT, **wide)) for s in ("fsdp", "ddp"))
    for _ in range(2):
        parts.step(BATCH)
        ddp.step(BATCH)
    state = ddp.state()
    assert furthest(parts.state(), state) == 0.0
    parts.load(state)
    assert furthest(parts.state(), state) == 0.0


def test_eight_bit_moments_that_would_be_cut_within_a_block_are_refused() -> None:
    with pytest.raises(UserError, match=r"^optim.name = 'adamw8bit' over 2 ranks .* part of embed\.weight"):
        TorchBackend().open(sharded("fp32", sections=EIGHT))
    assert furthest(opened(sharded(sections=EIGHT)).state(), alone(sharded()).state()) == 0.0


def test_each_rank_holds_its_part() -> None:
    config = sharded("fp32", ranks=4)
    parts = opened(config, faulty.SaysWhatItHolds())
    parts.step(BATCH)
    held = [int(array[0]) for array in parts.random_state().values()]
    whole = 3 * sum(p.nbytes for p in parts.state().params.values())
    assert len(held) == 4 and sum(held) == whole
    assert max(held) == whole / 4


# Checkpoints


def saved(session: Session, folder: Path) -> Path:
    final = folder / f"step_{session.state().step:06d}"
    return begin_checkpoint(final, session.state().step, writer_of(session), {}).commit()


@pytest.mark.parametrize("odd", [False, True])
def test_a_checkpoint_goes_from_any_ranks_to_any_others(odd: bool, tmp_path: Path) -> None:
    model: dict[str, Any] = ODD if odd else {}
    config = sharded(ranks=4 if odd else 2, **model)
    parts = opened(config)
    parts.step(BATCH)
    state = parts.state()
    path = saved(parts, tmp_path / "parts")
    assert len(list(path.glob("shard-*.safetensors"))) == config.train.ranks
    found, _ = load_checkpoint(path)
    assert furthest(found, state) == 0.0 and found.step == 1
    one = alone(config)
    restore_checkpoint(path, one.restore)  # type: ignore[attr-defined]
    assert furthest(one.state(), state) == 0.0
    _open.pop().close()
    one.step(BATCH)
    for number, writer in enumerate((one, opened(sharded(strategy="ddp", **model)))):
        writer.load(one.state())
        path = saved(writer, tmp_path / f"whole{number}")
        reader = opened(sharded(ranks=2, **model))
        assert restore_checkpoint(path, reader.restore)[0] == 2
        assert furthest(reader.state(), one.state()) == 0.0
        reader.step(BATCH)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    parts = opened(sharded())
    path = saved(parts, tmp_path)
    other = opened(sharded(hidden=32))
    with pytest.raises(ValueError, match=r"embed\.weight has shape \(300, 64\), the model's is \(300, 32\)"):
        restore_checkpoint(path, other.restore)
    next(iter(path.glob("shard-*.safetensors"))).unlink()
    with pytest.raises(UserError, match="is missing"):
        restore_checkpoint(path, parts.restore)


# Faults


@pytest.mark.parametrize(
    "fault",
    [
        faulty.NormOfItsOwnPart,
        faulty.NormsAdded,
        faulty.GradientsAveraged,
        faulty.OneBlockNotReduced,
        faulty.MuonOnParts,
    ],
)
def test_a_step_that_is_wrong_on_parts_is_seen(fault: type[TorchBackend]) -> None:
    config = sharded(sections={"optim": {"name": "muon"}})
    parts, one = opened(config, fault()), alone(config)
    mine, other = parts.step(BATCH), one.step(BATCH)
    agrees = mine.grad_norm == pytest.approx(other.grad_norm, rel=WITHIN)
    assert agrees == (fault is faulty.MuonOnParts)
    # Clipping takes most of a wrong length away again.
    assert furthest(parts.state(), one.state()) > 1e6 * WITHIN


def test_weights_that_stay_gathered_are_seen() -> None:
    parts, one = opened(sharded(), faulty.NeverFreed()), alone(sharded())
    assert np.array_equal(parts.evaluate(MICRO)["nll"], one.evaluate(MICRO)["nll"])
    one.step(BATCH)
    parts.load(one.state())
    assert not np.array_equal(parts.evaluate(MICRO)["nll"], one.evaluate(MICRO)["nll"])


def test_a_part_that_is_not_loaded_is_seen(tmp_path: Path) -> None:
    one = alone(sharded())
    one.step(BATCH)
    path = saved(one, tmp_path)
    parts = opened(sharded(), faulty.OnePartNotLoaded())
    restore_checkpoint(path, parts.restore)
    assert furthest(parts.state(), one.state()) > 1e-6


def test_not_finite_is_placed_on_its_rank() -> None:
    parts = opened(sharded("fp32"), faulty.NanOnRankOne())
    with pytest.raises(NotFinite, match=r"on rank 1 first in the loss \(nan\)"):
        parts.step(BATCH)


def test_the_rank_that_hangs_is_named_with_what_the_others_wait_in() -> None:
    parts = opened(sharded(sections={"parallel": {"timeout_seconds": 4}}), faulty.SleepsBeforeAGather())
    with pytest.raises(RankError) as caught:
        for _ in range(9):
            parts.step(BATCH)
    assert str(caught.value) == (
        "rank 1: no answer within 4 s to `step 1`: it has started the call, but not yet the all-gather of blocks.1"
    )

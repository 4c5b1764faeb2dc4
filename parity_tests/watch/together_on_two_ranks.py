"""Watch loops of two gloo ranks with one verdict, under DistributedDataParallel and FSDP2. Each rank runs this program.

It prints the results of this rank's checks by case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep import watch
from lockstep.core.errors import UserError
from lockstep.core.parity.watch.api import Watcher
from lockstep.parity_tests.watch.own import Batch, Gpt, batches, gpt_loss
from lockstep.torch_backend.watch import ranks

STEPS, CLIP = 2, 0.5


def ddp(own: nn.Module, **_: Any) -> Any:
    return DistributedDataParallel(own)


def fsdp(own: Any, **policy: Any) -> Any:
    for block in own.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(own, mp_policy=MixedPrecisionPolicy(**policy))


def fsdp_narrow_blocks(own: Any, **policy: Any) -> Any:
    for block in own.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(own)


def fsdp_root_alone(own: nn.Module, **policy: Any) -> Any:
    return fully_shard(own, mp_policy=MixedPrecisionPolicy(**policy))


def fsdp_compiled(own: Any, **_: Any) -> Any:
    for i, block in enumerate(own.blocks):
        own.blocks[i] = torch.compile(fully_shard(block), backend="eager")
    return fully_shard(own)


def fsdp_summed(own: nn.Module, **_: Any) -> Any:
    wrapped = fsdp(own)
    for module in wrapped.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            # gloo supports no other.
            module.set_force_sum_reduction_for_comms(True)
    return wrapped


def uneven(rank: int, batch: Batch) -> Batch:
    """Return the batch with fewer targets on rank 1."""
    targets = batch["targets"].clone()
    targets[: 2 * rank] = -1
    return {**batch, "targets": targets}


def counted(parts: Sequence[Batch]) -> list[float]:
    """Return weights of micro-batches by which the sum of their means is the mean over all tokens."""
    counts = [int((part["targets"] >= 0).sum()) for part in parts]
    return [count / sum(counts) for count in counts]


def weighted_by_tokens(batch: Batch, loss: Tensor) -> Tensor:
    """Return the loss weighted so that, after DDP's mean over ranks, it is the mean over the tokens of all ranks."""
    count = (batch["targets"] >= 0).sum()
    total = count.clone()
    dist.all_reduce(total)
    return loss * count / total * dist.get_world_size()


def as_it_is(_: Batch, loss: Tensor) -> Tensor:
    return loss


def clips(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def clips_to_half(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP / 2)


def clips_each_alone(model: Any) -> None:
    """Plant a fault: clip each tensor by its own norm, not by the norm of all."""
    for p in model.parameters():
        nn.utils.clip_grad_norm_([p], CLIP)


def nothing(*_: Any) -> None:
    """Plant no fault."""


def drifts(own: nn.Module, rank: int, step: int) -> None:
    """Plant a fault: from the second step on, rank 1 has other weights."""
    if rank == 1 and step == 1:
        with torch.no_grad():
            next(own.parameters()).mul_(1.0001)


def other_gradient(own: nn.Module, rank: int, step: int) -> None:
    """Plant a fault: change rank 1's gradient of one tensor after the reduction."""
    if rank == 1 and step == 1:
        list(own.parameters())[3].grad.mul_(1.0001)  # type: ignore[union-attr]


def part_of_a_gradient(own: nn.Module, rank: int, step: int) -> None:
    """Plant a fault: rank 1's shard of one gradient is 5 % too large."""
    if rank == 1 and step == 1:
        list(own.parameters())[3].grad.to_local().mul_(1.05)  # type: ignore[union-attr]


def part_of_a_weight(own: nn.Module, rank: int, step: int) -> None:
    """Plant a fault: change rank 1's shard of one weight before the second step."""
    if rank == 1 and step == 1:
        with torch.no_grad():
            list(own.parameters())[3].to_local().mul_(1.0001)  # type: ignore[attr-defined]


def cannot_read(optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Plant a fault: from the second step on, rank 1's optimizer has a state that cannot be copied."""
    if rank == 1 and step == 1:
        first = next(iter(optimizer.state.values()))
        first["broken"] = Unreadable()


class Unreadable:
    """An object with the attributes of a tensor, which raises when it is read."""

    shape, dtype = (2,), torch.float32

    def detach(self) -> Any:
        raise RuntimeError("planted")


def does_not_step(optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Plant a fault: rank 1's optimizer skips the second step."""
    if rank == 1 and step == 1:
        setattr(optimizer, "step", nothing)  # noqa: B010 - a method


def failing(model: Any, batch: Batch) -> Tensor:
    """Return the loss, but raise RuntimeError if the model is not wrapped, as the copy that a check uses."""
    if type(model) is Gpt:
        raise RuntimeError("planted")
    return gpt_loss(model, batch)


class Unsendable(dict[str, Any]):
    """A batch that cannot be sent to another rank."""

    def __reduce__(self) -> Any:
        raise RuntimeError("planted")


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"wrap": ddp},
    "ddp, accumulated": {"wrap": ddp, "parts": 2, "accumulate": "mean", "ranks": "gather"},
    "ddp, tokens": {"wrap": ddp, "make": uneven, "weigh": weighted_by_tokens, "accumulate": counted, "ranks": "gather"},
    "ddp, mean of means": {"wrap": ddp, "make": uneven, "accumulate": counted, "ranks": "gather"},
    "ddp, rank 1 drifts": {"wrap": ddp, "during": drifts},
    "ddp, rank 1's gradient": {"wrap": ddp, "spoil": other_gradient},
    "ddp, rank 1 cannot send": {"wrap": ddp, "make": lambda rank, b: Unsendable(b) if rank else b},
    "ddp, loss fails": {"wrap": ddp, "loss": failing},
    "fsdp": {"wrap": fsdp, "clip": clips, "clip_norm": CLIP},
    "fsdp, root alone": {"wrap": fsdp_root_alone},
    "fsdp, compiled blocks": {"wrap": fsdp_compiled},
    "fsdp, summed": {"wrap": fsdp_summed, "weigh": lambda _, loss: loss / 2},
    "fsdp, bf16": {"wrap": fsdp, "policy": BF16, "clip": clips, "clip_norm": CLIP},
    "fsdp, bf16 sums": {"wrap": fsdp, "policy": {"param_dtype": torch.bfloat16}},
    "fsdp, bf16 blocks": {"wrap": fsdp_narrow_blocks, "policy": BF16 | {"output_dtype": torch.float32}},
    "fsdp, bf16, accumulated": {"wrap": fsdp, "policy": BF16, "parts": 2, "accumulate": "mean"},
    "fsdp, tokens": {"wrap": fsdp, "make": uneven, "weigh": weighted_by_tokens, "accumulate": counted},
    "fsdp, mean of means": {"wrap": fsdp, "make": uneven, "accumulate": counted},
    "fsdp, half the clip": {"wrap": fsdp, "clip": clips_to_half, "clip_norm": CLIP},
    "fsdp, clip by tensor": {"wrap": fsdp, "clip": clips_each_alone, "clip_norm": CLIP},
    "fsdp, eps": {"wrap": fsdp, "optimizer": partial(torch.optim.AdamW, eps=1e-3), "declared": {"eps": 1e-8}},
    "fsdp, part of a gradient": {"wrap": fsdp, "spoil": part_of_a_gradient},
    "fsdp, part of a weight": {"wrap": fsdp, "during": part_of_a_weight},
    "fsdp, rank 1 cannot read": {"wrap": fsdp, "before": cannot_read},
    "fsdp, rank 1 does not step": {"wrap": fsdp, "before": does_not_step},
    "fsdp, one rank dropped": {"wrap": fsdp, "weigh": lambda _, loss: loss * (dist.get_rank() == 0)},
    "fsdp, bf16 declared as fp32": {"wrap": fsdp, "policy": BF16, "precision": "fp32"},
    "fsdp, rank 1 cannot send": {"wrap": fsdp, "make": lambda rank, b: Unsendable(b) if rank else b},
    "fsdp, loss fails": {"wrap": fsdp, "loss": failing},
}


def train(
    rank: int,
    wrap: Callable[..., Any],
    policy: dict[str, Any] | None = None,
    make: Callable[[int, Batch], Batch] = lambda _, batch: batch,
    weigh: Callable[[Batch, Tensor], Tensor] = as_it_is,
    clip: Callable[[Any], None] = nothing,
    spoil: Callable[[nn.Module, int, int], None] = nothing,
    during: Callable[[nn.Module, int, int], None] = nothing,
    before: Callable[[torch.optim.Optimizer, int, int], None] = nothing,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    parts: int = 1,
    loss: Callable[[Any, Batch], Tensor] = gpt_loss,
    every: int = 1,
    asks: Callable[[int, int], bool | None] = lambda rank, step: None,
    **settings: Any,
) -> Watcher:
    """Train with a check at every step; each rank passes its own batch and loss to the watcher."""
    torch.manual_seed(0)
    own = Gpt()
    model = wrap(own, **(policy or {}))
    stepper = optimizer(model.parameters(), lr=1e-2)
    watcher = watch(model, stepper, loss=loss, every=every, **settings)
    data = [make(rank, batch) for batch in batches(STEPS * parts, rank)]
    for step in range(STEPS):
        during(own, rank, step)
        before(stepper, rank, step)
        given, total = data[step * parts : (step + 1) * parts], torch.zeros(())
        for batch in given:
            value = weigh(batch, loss(model, batch)) / parts
            value.backward()
            total += value.detach()
        spoil(own, rank, step)
        with watcher.step(given if "accumulate" in settings else given[0], total, check=asks(rank, step)):
            clip(model)
            stepper.step()
        stepper.zero_grad()
    return watcher


def checks_alone(rank: int) -> str:
    """Let rank 0 check the second step, and rank 1 not; return this rank's headline."""
    watcher = train(rank, ddp, every=100, asks=lambda rank, step: True if step == 1 and rank == 0 else None)
    return watcher.headline


def watches_alone(rank: int) -> str:
    """Let rank 0 call `watch`, and rank 1 not; return the error that rank 0 gets."""
    model, said = ddp(Gpt()), ""
    if rank == 0:
        try:
            watch(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=gpt_loss)
        except UserError as error:
            said = str(error)
    # Both ranks continue training.
    gpt_loss(model, batches(1, rank)[0]).backward()
    return said


APART = {"checks alone": checks_alone, "watches alone": watches_alone}


def apart(name: str, rank: int) -> str:
    """Run a case in which ranks wait for each other for at most two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "MEETING", timedelta(seconds=2))
        return APART[name](rank)


def told(watcher: Watcher) -> dict[str, Any]:
    """Return the results of a watcher that tests read."""
    bad = next((check for check in watcher.checks if check.verdict == "disagreed"), None)
    broken = [f for f in bad.findings if not f.ok] if bad else []
    return {
        "headline": watcher.headline,
        "precision": watcher.precision,
        "step": bad and bad.step,
        "stages": sorted({f.stage for f in broken}),
        "origin": bad and bad.origin and [bad.origin.stage, bad.origin.tap, bad.origin.note],
        "cause": bad and bad.cause,
        "compared": sorted({f"{f.stage}/{f.tap}" for f in watcher.checks[0].findings}),
    }


if __name__ == "__main__":
    number, store, *names = sys.argv[1:]
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(number), world_size=2)
    print(
        json.dumps(
            {
                name: apart(name, int(number)) if name in APART else told(train(int(number), **CASES[name]))
                for name in names or CASES
            }
        )
    )
    dist.destroy_process_group()

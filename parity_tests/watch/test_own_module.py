"""`watch(model, optimizer, loss=fn)`: clean runs agree, faults of what is around the module are caught."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import BatchEncoding

from lockstep import watch
from lockstep.core.errors import UserError
from lockstep.core.parity.watch import memory
from lockstep.core.parity.watch.api import Watcher
from lockstep.parity_tests.watch.own import (
    LENGTH,
    MODELS,
    PRECISIONS,
    VOCAB,
    WIDTH,
    Batch,
    Gpt,
    batches,
    gpt_loss,
    nothing,
    train,
)
from lockstep.torch_backend.watch import own_module, segments
from lockstep.torch_backend.watch.module_copy import copied

CLIP = 0.5


def clip(model: nn.Module) -> None:
    """Clip by a norm in FP32; torch's own function takes it in the format of the gradients."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.float().norm() for g in grads]).norm()
    coefficient = torch.clamp(CLIP / (norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(coefficient)


def eager_compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_clean_run_agrees(name: str, precision: str) -> None:
    watcher = train(name, precision, clip=clip, clip_norm=CLIP)
    assert watcher.headline == "agreed in 3 checks against your own module", watcher
    for check in watcher.checks:
        assert {"loss", "gradients", "update", "clip_coefficient"} <= {f.stage for f in check.findings}
        assert sum(f.stage == "gradients" and f.tap != "names" for f in check.findings) == 28
        assert own_module.OUT_OF_SIGHT in check.not_covered


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_compiled_run_agrees(precision: str) -> None:
    watcher = train("gpt", precision, wrap=eager_compiled)
    assert watcher.headline == "agreed in 3 checks against your own module", watcher


def test_a_run_in_fp64_agrees() -> None:
    model = Gpt().double()
    watcher = train(model=model, data=batches(2), loss=lambda m, b: wide_loss(m, b))
    assert watcher.verdict == "disagreed"  # `gpt_loss` narrows to FP32, where its twin does not
    model = Gpt().double()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, loss=wide_loss)
    (batch,) = batches(1)
    loss = wide_loss(model, batch)
    loss.backward()
    with watcher.step(batch, loss):
        optimizer.step()
    assert watcher.headline == "agreed in 1 checks against your own module", watcher


def wide_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def scaled(name: str, by: float) -> Callable[[nn.Module, int], None]:
    def spoil(model: nn.Module, _: int) -> None:
        grad = dict(model.named_parameters())[name].grad
        assert grad is not None
        grad.mul_(by)

    return spoil


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tensor", ["blocks.1.down.weight", "blocks.0.qkv.weight", "blocks.0.norm2.weight"])
def test_a_gradient_longer_by_a_hundredth_is_caught(tensor: str, precision: str) -> None:
    watcher = train("gpt", precision, 1, spoil=scaled(tensor, 1.01))
    (check,) = watcher.checks
    assert [f.tap for f in check.findings if not f.ok] == [tensor], watcher


@pytest.mark.parametrize("trains", PRECISIONS)
@pytest.mark.parametrize("name", ["gpt2, eager", "gpt2, sdpa"])
def test_a_gradient_of_gpt2_longer_by_a_hundredth_is_caught(name: str, trains: str) -> None:
    tensor = "transformer.h.0.mlp.c_fc.weight"
    watcher = train(name, trains, 1, spoil=scaled(tensor, 1.01))
    assert [f.tap for f in watcher.checks[0].findings if not f.ok] == [tensor], watcher


def test_autocast_inside_the_loss_is_the_twins_as_well() -> None:
    def narrow(model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return gpt_loss(model, batch)

    for spoil in (nothing, scaled("blocks.0.up.weight", 1.05)):
        torch.manual_seed(0)
        model = Gpt()
        optimizer = torch.optim.AdamW(model.parameters())
        watcher = watch(model, optimizer, loss=narrow, precision="bf16")
        (batch,) = batches(1)
        loss = narrow(model, batch)
        loss.backward()
        spoil(model, 0)
        with watcher.step(batch, loss):
            optimizer.step()
        assert watcher.verdict == ("agreed" if spoil is nothing else "disagreed"), watcher


def test_a_check_does_not_compile_anew() -> None:
    """The truth runs the compiled module eagerly, and leaves what was compiled."""
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    watcher = train(wrap=lambda model: torch.compile(model, backend=counted))
    assert watcher.verdict == "agreed" and counted.frame_count == 1


@contextmanager
def narrow_softmax() -> Iterator[None]:
    """Give the candidate alone a kernel with attention's softmax in bf16."""
    own = F.scaled_dot_product_attention

    def kernel(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        return scores.bfloat16().softmax(-1).to(v.dtype) @ v

    F.scaled_dot_product_attention = kernel  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def other_gelu(graph: Any, _: Any) -> Any:
    """Compile with GELU's approximation in place of GELU."""
    for node in graph.graph.nodes:
        if node.target is F.gelu or getattr(node.target, "__name__", "") == "gelu":
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    graph.recompile()
    return graph


def clip_twice(model: nn.Module) -> None:
    clip(model)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP / 2)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "softmax in bf16 in the kernel": ({"during": narrow_softmax}, "loss|gradients"),
    "the compiler's GELU": ({"wrap": lambda m: torch.compile(m, backend=other_gelu)}, "loss|gradients"),
    "clipped twice": ({"clip": clip_twice, "clip_norm": CLIP}, "clip_coefficient"),
    "clipped to another norm": ({"clip": clip, "clip_norm": 2 * CLIP}, "clip_coefficient"),
    "clipping forgotten": ({"clip_norm": CLIP}, "clip_coefficient"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_around_the_module_is_caught(fault: str) -> None:
    settings, stages = FAULTS[fault]
    watcher = train("gpt", "fp32", 1, **settings)
    (check,) = watcher.checks
    assert check.verdict == "disagreed", watcher
    assert check.origin is not None and check.origin.stage in stages.split("|"), watcher


def test_the_kernel_agrees_without_its_fault() -> None:
    """The planted kernel in FP32, and the compiler without a change, are no fault."""
    own = Tensor.bfloat16
    try:
        setattr(Tensor, "bfloat16", Tensor.float)  # noqa: B010
        assert train("gpt", "fp32", 1, during=narrow_softmax).verdict == "agreed"
    finally:
        setattr(Tensor, "bfloat16", own)  # noqa: B010
    assert train("gpt", "fp32", 1, wrap=lambda m: torch.compile(m, backend="eager")).verdict == "agreed"


def test_autocast_that_was_not_declared_is_named() -> None:
    watcher = train("gpt", "autocast", 1, precision="fp32")
    assert watcher.verdict == "disagreed"
    assert "is autocast on" in str(watcher.checks[0].cause)


def test_autocast_in_fp16_is_named() -> None:
    watcher = train("gpt", "fp32", 1, during=lambda: torch.autocast("cpu", torch.float16))
    assert watcher.verdict == "disagreed"
    assert "no twin for FP16 autocast" in str(watcher.checks[0].cause)


# Accumulation


def uneven() -> list[Batch]:
    """Two micro-batches, one of which is nearly all padding."""
    first, second = batches(2)
    second["targets"] = second["targets"].clone()
    second["targets"][:, 2:] = -1
    return [first, second]


def tokens(parts: Any) -> list[float]:
    counts = [int((part["targets"] >= 0).sum()) for part in parts]
    return [count / sum(counts) for count in counts]


def accumulated(weights: Callable[[Any], list[float]], precision: str = "fp32", **settings: Any) -> Watcher:
    """Make steps over two micro-batches, each with its weight in the sum."""
    torch.manual_seed(0)
    model = Gpt().bfloat16() if precision == "bf16 weights" else Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    declared: dict[str, Any] = {"precision": "bf16"} if precision == "autocast" else {}
    watcher = watch(model, optimizer, loss=gpt_loss, every=1, **declared, **settings)
    for _ in range(3):
        parts, total = uneven(), torch.zeros(())
        for part, weight in zip(parts, weights(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                loss = gpt_loss(model, part)
            (loss * weight).backward()
            total += (loss * weight).detach()
        with watcher.step(parts, total):
            optimizer.step()
        optimizer.zero_grad()
    return watcher


HALVES: Callable[[Any], list[float]] = lambda parts: [0.5, 0.5]  # noqa: E731


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("weights", "declared"),
    [(tokens, tokens), (HALVES, "mean"), (lambda parts: [1.0, 1.0], "sum")],
    ids=["by tokens", "mean", "sum"],
)
def test_accumulation_as_declared_agrees(weights: Any, declared: Any, precision: str) -> None:
    watcher = accumulated(weights, precision, accumulate=declared)
    assert watcher.headline == "agreed in 3 checks against your own module", watcher


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_mean_of_uneven_means_is_caught(precision: str) -> None:
    watcher = accumulated(HALVES, precision, accumulate=tokens)
    assert [check.verdict for check in watcher.checks] == ["disagreed"] * 3
    due = {"loss", "gradients"} if precision == "fp32" else {"gradients"}
    assert due <= {f.stage for f in watcher.checks[0].findings if not f.ok}


def test_a_micro_batch_left_out_is_caught() -> None:
    watcher = accumulated(lambda parts: [0.5, 0.0], accumulate="mean")
    assert watcher.verdict == "disagreed"


@pytest.mark.parametrize(
    ("declared", "why"),
    [(lambda parts: [1.0], "1 weights for 2 micro-batches"), (lambda parts: 1 / 0, "ZeroDivisionError")],
    ids=["too few", "fails"],
)
def test_weights_that_cannot_be_had_are_told(declared: Any, why: str) -> None:
    watcher = accumulated(HALVES, accumulate=declared)
    assert watcher.verdict == "could_not" and why in watcher.headline


def test_one_batch_where_a_list_was_declared_is_told() -> None:
    watcher = train(steps=1, accumulate="mean")
    assert watcher.verdict == "could_not"
    assert "step takes the list of the step's micro-batches" in watcher.headline


# Modules that cannot be judged, or not wholly


class WithDropout(Gpt):
    """Dropout as a module, or as a function alone."""

    def __init__(self, functional: bool, p: float = 0.1) -> None:
        super().__init__()
        self.functional, self.rate = functional, p
        self.drop = nn.Dropout(0.0 if functional else p)

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return F.dropout(x, self.rate, self.training) if self.functional else self.drop(x)


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_is_not_judged_and_not_accused(functional: bool) -> None:
    watcher = train(model=WithDropout(functional), on_alarm="stop")
    named = "" if functional else r" (drop (p=0.1))"
    assert f"loss and gradients: not judged (the forward draws random numbers{named}" in watcher.headline
    assert watcher.verdict == "could_not"
    assert {"update", "clip_coefficient"} <= {f.stage for f in watcher.checks[0].findings}


def test_dropout_that_is_off_is_judged() -> None:
    model = WithDropout(True).eval()
    assert train(model=model).headline == "agreed in 3 checks against your own module"


def test_random_numbers_that_do_nothing_are_judged() -> None:
    """As LayerDrop draws, at a rate of 0."""

    class Draws(Gpt):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) if torch.rand([]) >= 0 and np.random.rand() >= 0 else tokens

    assert train(model=Draws()).headline == "agreed in 3 checks against your own module"


class HardCoded(Gpt):
    """Scores a table in bf16, and a norm that casts to FP32."""

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.arange(WIDTH, dtype=torch.bfloat16).cos()
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]] + 0.1 * table
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.to(torch.float32)).to(x.dtype))


def test_a_hard_coded_dtype_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = HardCoded()
    with caplog.at_level(logging.WARNING, "lockstep.watch"):
        watcher = train(model=model, loss=wide_loss)
    assert watcher.verdict == "agreed", watcher
    (text,) = [item for item in watcher.checks[0].not_covered if "requests another dtype" in item]
    assert "HardCoded: arange (bfloat16)" in text and "HardCoded: to (float32)" in text
    assert caplog.text.count("requests another dtype") == 1


def test_a_module_that_hard_codes_nothing_is_not_warned_of() -> None:
    watcher = train(steps=1, loss=wide_loss)
    assert not any("requests another dtype" in item for item in watcher.checks[0].not_covered)


class Narrows(Gpt):
    """Writes FP64 into a tensor of FP32 that it keeps."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        kept = torch.from_numpy(np.zeros(tuple(x.shape), np.float32))
        return kept.copy_(x)


def test_fp64_that_goes_narrow_is_no_truth() -> None:
    watcher = train(model=Narrows(), loss=wide_loss)
    assert watcher.verdict == "could_not"
    assert "narrows FP64, so it gives no FP64 truth: Narrows: copy_ (float32)" in watcher.headline
    # Far finer than bf16, and so good enough there; it is reported all the same.
    watcher = train("gpt", "autocast", model=Narrows(), loss=wide_loss)
    assert watcher.verdict == "agreed", watcher
    assert any("narrows FP64" in item for item in watcher.checks[0].not_covered)


class Locked(Gpt):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_copied_is_not_judged() -> None:
    watcher = train(model=Locked(), on_alarm="stop")
    assert watcher.verdict == "could_not"
    assert "copy.deepcopy of the module failed: TypeError" in watcher.headline
    assert "update" in {f.stage for f in watcher.checks[0].findings}


class Keeps(Gpt):
    """Keeps an activation, which is no leaf of the graph, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((), 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        self.last = super().forward(tokens)
        return self.last * self.scale


def test_a_kept_activation_does_not_hinder_a_copy() -> None:
    assert train(model=Keeps()).headline == "agreed in 3 checks against your own module"


def test_a_forward_put_on_the_instance_is_not_judged() -> None:
    """A function there would run the original's weights, and the copy's get no gradient."""
    model = Gpt()
    original = model.forward
    model.forward = lambda tokens: original(tokens)  # type: ignore[method-assign]
    watcher = train(model=model)
    assert watcher.verdict == "could_not" and "forward was replaced on the instance" in watcher.headline


def test_accelerates_model_is_unwrapped() -> None:
    watcher = train(wrap=lambda model: Accelerator(cpu=True).prepare(model))
    assert watcher.headline == "agreed in 3 checks against your own module", watcher


def test_blocks_that_are_compiled_one_by_one_agree() -> None:
    model = Gpt()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    assert train(model=model).headline == "agreed in 3 checks against your own module"


def test_a_loss_of_another_module_is_told() -> None:
    model = Gpt()
    watcher = train(model=model, loss=lambda _, batch: gpt_loss(model, batch))
    assert watcher.verdict == "could_not"
    # A backward pass there would have written gradients into the model that trains.
    plain = nn.Linear(3, 3).double()
    watcher = watch(plain, torch.optim.SGD(plain.parameters()), loss=lambda _, batch: plain(batch).square().mean())
    x = torch.ones(2, 3, dtype=torch.float64)
    with watcher.step(x, 1.0):
        pass
    assert "loss= uses the model that trains" in watcher.headline
    assert all(p.grad is None for p in plain.parameters())
    watcher = watch(plain, torch.optim.SGD(plain.parameters()), loss=lambda m, batch: batch.sum())
    with watcher.step(x, 1.0):
        pass
    assert "the loss does not depend on the parameters of the module" in watcher.headline


@pytest.mark.parametrize("place", ["before", "during"])
def test_a_module_too_large_for_memory_is_skipped(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "before":
        monkeypatch.setattr(memory, "available_memory_bytes", lambda: 10**6)
    else:
        monkeypatch.setattr(own_module, "available_memory_bytes", lambda: 10**6)
        monkeypatch.setattr(own_module, "LOOK_EVERY", 10**4)
    watcher = train()
    assert watcher.verdict == "could_not" and "memory" in watcher.headline
    assert ("update" in {f.stage for f in watcher.checks[0].findings}) == (place == "during")


def test_a_frozen_and_an_unused_parameter() -> None:
    model = Gpt()
    model.place.weight.requires_grad_(False)
    model.spare = nn.Linear(2, 2)
    watcher = train(model=model)
    assert watcher.headline == "agreed in 3 checks against your own module", watcher
    assert "gradients of 1 frozen parameters: place.weight" in watcher.checks[0].not_covered


def test_a_tied_weight_stays_tied() -> None:
    model = Gpt()
    found: Any = copied(model, {n: p.detach().numpy() for n, p in model.named_parameters()}, torch.float64)
    assert found.head.weight is found.embed.weight and found.embed.weight.dtype == torch.float64
    assert found.embed.weight is not model.embed.weight


class Normed(Gpt):
    """Batch statistics, and their running means in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.batch(super().forward(tokens).flatten(0, 1)).view(*tokens.shape, -1)


def test_buffers_that_a_forward_writes_are_listed() -> None:
    watcher = train(model=Normed())
    assert watcher.verdict == "agreed", watcher
    assert any("buffers that the forward changes" in item for item in watcher.checks[0].not_covered)


def test_hooks_on_gradients_are_listed() -> None:
    model = Gpt()
    model.place.weight.register_hook(lambda grad: 2 * grad)
    watcher = train(model=model, steps=1)
    assert any("hooks on the gradients of parameters: place.weight" in item for item in watcher.checks[0].not_covered)


# The rest of the interface


@dataclass
class Fields:
    """A batch of a class of one's own."""

    tokens: Tensor
    scale: float


@pytest.mark.parametrize("kind", ["encoding", "dataclass", "tuple"])
def test_a_batch_keeps_its_type(kind: str) -> None:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (made,) = batches(1)
    batch: Any = {
        "encoding": BatchEncoding({"input_ids": made["tokens"], "targets": made["targets"]}),
        "dataclass": Fields(made["tokens"], 2.0),
        "tuple": (made["tokens"], [made["targets"], torch.full((), 0.5)]),
    }[kind]

    def loss_of(m: Any, b: Any) -> Tensor:
        assert type(b) is type(batch)
        if kind == "encoding":
            return F.cross_entropy(m(b.input_ids).flatten(0, 1), b["targets"].flatten())
        if kind == "dataclass":
            return m(b.tokens).square().mean() * b.scale
        assert b[1][1].dtype == m.embed.weight.dtype
        return m(b[0]).square().mean() * b[1][1]

    watcher = watch(model, optimizer, loss=loss_of)
    loss = loss_of(model, batch)
    loss.backward()
    with watcher.step(batch, loss):
        optimizer.step()
    assert watcher.verdict == "agreed", watcher


def test_outputs_are_compared() -> None:
    def with_nll(model: Any, batch: Batch) -> Any:
        nll = F.cross_entropy(model(batch["tokens"]).mT, batch["targets"], reduction="none")
        return nll.mean(), {"nll": nll}

    for shift in (0.0, 1e-3):
        torch.manual_seed(0)
        model = Gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watcher = watch(model, optimizer, loss=with_nll)
        (batch,) = batches(1)
        loss, outputs = with_nll(model, batch)
        loss.backward()
        with watcher.step(batch, loss, outputs={"nll": outputs["nll"] + shift}):
            optimizer.step()
        assert [f.tap for f in watcher.checks[0].findings if not f.ok] == (["nll"] if shift else [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": None}, "either loss="),
        ({"reference": lambda p, b: None}, "either loss="),
        ({"loss": "mean"}, "it is a function of the model and a batch"),
        ({"accumulate": "average"}, "it is 'mean', 'sum' or a function"),
        ({"loss": None, "reference": lambda p, b: None, "accumulate": "mean"}, "accumulate= needs loss="),
        ({"names": {"embed.weight": "wte"}}, "names= needs reference="),
        ({"every": 0}, "every=0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(**settings)


def test_watching_changes_nothing() -> None:
    """Weights, gradients, state, buffers and every random state are those of a run without a check."""
    ends = []
    for every in (1, 1000):
        torch.manual_seed(3)
        model = Normed()
        watcher = train(model=model, every=every, start=0 if every == 1 else 1)
        assert len(watcher.checks) == (3 if every == 1 else 0) or watcher.checks[0].step == 2
        ends.append(
            [
                *model.state_dict().values(),
                torch.get_rng_state(),
                torch.tensor(np.random.get_state()[1]),  # type: ignore[index]
            ]
        )
        assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("large", [segments.LARGE, 0], ids=["whole", "by blocks"])
def test_a_copy_is_let_go(large: int, monkeypatch: pytest.MonkeyPatch, frozen_heap: None) -> None:
    monkeypatch.setattr(segments, "LARGE", large)
    copies: list[weakref.ref[nn.Module]] = []

    def noted(*args: Any, **kwargs: Any) -> nn.Module:
        copies.append(weakref.ref(found := copied(*args, **kwargs)))
        return found

    monkeypatch.setattr(own_module, "copied", noted)
    watcher = train()
    gc.collect()
    assert watcher.verdict == "agreed"
    assert len(copies) == 6 and not any(ref() for ref in copies)


def test_a_better_candidate_is_no_disagreement() -> None:
    """Declared in bf16 and computed in FP32, as a kernel with wide sums may be: nearer to the truth than its twin."""
    watcher = train(precision="bf16")
    assert watcher.verdict == "agreed", watcher
    (text,) = [item for item in watcher.checks[0].not_covered if item.startswith("the twin is worse")]
    assert "is the declared precision in force?" in text

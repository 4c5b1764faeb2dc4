"""`watch(..., operations=True)`: every operation from its own inputs. Wrong kernels are named; clean ones agree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from lockstep import watch, watch_operation
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.api import Watcher
from lockstep.core.parity.watch.turns import Turns
from lockstep.parity_tests.watch.own import HEADS, LENGTH, MODELS, VOCAB, WIDTH, Batch, Gpt, batches, gpt_loss, train
from lockstep.scripts.studies.wrong_kernels import (
    KERNELS,
    by_tanh,
    kernel,
    narrow_softmax,
    only_in,
    other_epsilon,
    without_bias,
)
from lockstep.torch_backend.watch import recompute, recorder
from lockstep.torch_backend.watch.judge_operation import JudgeOperation
from lockstep.torch_backend.watch.recompute import BY_JAX, BY_KERNEL, BY_REFERENCE

DECLARED = ("fp32", "autocast")


def gpt2(activation: str = "gelu") -> nn.Module:
    """Hugging Face's, with biases that are not zero and activations as large as trained ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=HEADS, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function=activation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.02)
        elif name.endswith("c_fc.weight"):
            nn.init.normal_(p, std=0.15)
    return model


def checked(trains: str, model: nn.Module | None = None, **settings: Any) -> Watcher:
    given: dict[str, Any] = {"model": model or gpt2(), "operations": True}
    return train("gpt2, eager", trains, 1, **given | settings)


def broken(watcher: Watcher) -> list[Finding]:
    return [f for check in watcher.checks for f in check.findings if not f.ok]


@pytest.mark.parametrize("trains", DECLARED)
@pytest.mark.parametrize("name", MODELS)
def test_a_clean_run_agrees(name: str, trains: str) -> None:
    watcher = train(name, trains, 2, operations=True)
    last = watcher.checks[-1].operations
    assert last is not None and last.so_far == last.of > 80
    assert watcher.headline == f"agreed in 2 checks against your own module; operations: {last.of} of {last.of} judged"
    assert last.ways[BY_JAX] > 0.9 * last.now
    found = {f.stage for f in watcher.checks[0].findings}
    assert {"aten.addmm", "aten.native_layer_norm_backward", "torch.nn.LayerNorm", "operation.parameters"} <= found
    assert all("by " in f.note for f in watcher.checks[0].findings if f.stage.startswith("aten."))
    assert watcher.to_json()["stages"] and watcher.checks[0].to_json()["operations"]["of"] == last.of


@pytest.mark.parametrize("name", MODELS)
def test_with_bf16_weights_torchs_own_bug_is_named_and_nothing_else(name: str) -> None:
    """On a CPU, layer_norm's backward sums the gradients of weight and bias in bf16."""
    watcher = train(name, "bf16 weights", 2, operations=True)
    assert {(f.stage, f.phase) for f in broken(watcher)} == {("aten.native_layer_norm_backward", "backward")}
    assert all(f.note.partition("result ")[2][:1] in "23" for f in broken(watcher))


# Fault, the module that is named first.
FIRST = {
    "GELU by tanh": ("aten.gelu", "transformer.h.0.mlp.act", "forward", "activations.py:"),
    "epsilon": ("aten.native_layer_norm", "transformer.h.0.ln_1", "forward", "modeling_gpt2.py:"),
    "missing bias": ("aten.addmm", "transformer.h.0.attn.c_attn", "forward", "pytorch_utils.py:"),
    "softmax in bf16": ("aten._softmax", "transformer.h.0.attn", "forward", "modeling_gpt2.py:"),
    "bf16 reduction": ("aten.sum", "transformer.h.1.mlp.c_proj", "backward", "pytorch_utils.py:"),
}


@pytest.mark.parametrize("trains", DECLARED)
@pytest.mark.parametrize("fault", KERNELS)
def test_a_wrong_kernel_is_named(fault: str, trains: str) -> None:
    with kernel(fault):
        watcher = checked(trains)
    operation, module, phase, line = FIRST[fault]
    origin = watcher.checks[0].origin
    assert watcher.verdict == "disagreed" and origin is not None
    assert (origin.stage, origin.tap, origin.phase) == (operation, module, phase), watcher
    assert line in origin.note and BY_JAX in origin.note
    assert operation in str(watcher) and module in str(watcher) and line in str(watcher)
    # A module of torch.nn that such a kernel computes is named as well, and nothing else is.
    others = {f.stage for f in broken(watcher)} - {operation}
    assert others <= {"torch.nn.LayerNorm", "transformers.Conv1D", "transformers.GELUActivation"}


@pytest.mark.parametrize("trains", DECLARED)
@pytest.mark.parametrize("name", KERNELS)
def test_another_kernel_that_is_right_agrees(name: str, trains: str) -> None:
    with kernel(name, right=True):
        watcher = checked(trains)
    assert not broken(watcher), watcher


def test_the_truth_and_twin_of_a_copy_run_the_same_wrong_kernel() -> None:
    """A check of the whole module alone, on the machine that trains, agrees."""
    with kernel("missing bias"):
        watcher = checked("fp32", operations=False)
    assert watcher.headline == "agreed in 1 checks against your own module"


@pytest.mark.parametrize("trains", DECLARED)
@pytest.mark.parametrize(
    ("path", "forward", "stage"),
    [
        ("transformer.h.1.mlp.c_fc", without_bias, "transformers.Conv1D"),
        ("transformer.h.1.ln_2", other_epsilon, "torch.nn.LayerNorm"),
        ("transformer.h.1.mlp.act", by_tanh, "transformers.GELUActivation"),
    ],
    ids=["bias", "epsilon", "tanh"],
)
def test_a_module_that_does_not_do_what_it_declares_is_named(path: str, forward: Any, stage: str, trains: str) -> None:
    model = gpt2()
    only_in(model.get_submodule(path), forward)
    watcher = checked(trains, model)
    origin = watcher.checks[0].origin
    assert origin is not None and (origin.stage, origin.tap) == (stage, path), watcher
    assert "as the module declares" in origin.note
    assert {f.tap for f in broken(watcher)} <= {path, f"{path}.bias"}


def test_a_parameter_that_no_operation_reads_is_named() -> None:
    model = Gpt()
    only_in(model.get_submodule("blocks.0.up"), without_bias)
    found = {f.stage: f for f in broken(train("gpt", "fp32", 1, model=model, operations=True))}
    assert found["operation.parameters"].tap == "blocks.0.up.bias"


@pytest.mark.parametrize("trains", DECLARED)
def test_a_softmax_of_a_narrowed_copy_is_named(trains: str) -> None:
    with narrow_softmax():
        watcher = checked(trains)
    assert {(f.stage, f.tap) for f in broken(watcher)} == {("aten._softmax", f"transformer.h.{i}.attn") for i in (0, 1)}
    assert all("it read bfloat16, narrowed from float32 at" in f.note for f in broken(watcher))
    assert "wrong_kernels.py" in broken(watcher)[0].note


def narrow_mean(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1).float()
    losses = F.cross_entropy(logits, batch["targets"].flatten(), reduction="none")
    return losses.bfloat16().mean()


@pytest.mark.parametrize("trains", DECLARED)
def test_a_mean_of_a_narrowed_copy_is_named(trains: str) -> None:
    watcher = train("gpt", trains, 1, operations=True, loss=narrow_mean)
    assert ("aten.mean", "the loss function") in {(f.stage, f.tap) for f in broken(watcher)}


class Noisy(nn.Module):
    """Changes all that a forward can: a running mean, a counter, a tensor that is replaced, random numbers."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.dropout = Gpt(), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(VOCAB)
        self.register_buffer("mean", torch.zeros(VOCAB))
        self.steps, self.last = 0, torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.gpt(tokens))
        self.steps += 1
        self.last = x.detach().mean() * random.random() * np.random.random()
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def state(model: Noisy) -> dict[str, Any]:
    """All that belongs to the user, as bytes."""
    found: dict[str, Any] = {name: x.detach().numpy().tobytes() for name, x in model.state_dict().items()}
    found |= {f"{n}.grad": p.grad.numpy().tobytes() for n, p in model.named_parameters() if p.grad is not None}
    found |= {"steps": model.steps, "last": float(model.last), "hooks": len(model._forward_hooks)}
    found |= {"torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate()}
    return found | {"numpy": str(np.random.get_state(legacy=False))}


def test_nothing_of_the_users_is_changed() -> None:
    torch.manual_seed(0)
    model = Noisy()
    fired: list[Any] = []
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
    watcher = watch(model, optimizer, loss=gpt_loss, operations=True)
    (batch,) = batches(1)
    loss = gpt_loss(model, batch)
    loss.backward()
    before, grads, count = state(model), [p.grad for p in model.parameters()], len(fired)
    kept = {name: x.clone() for name, x in batch.items()}
    watcher.before_step(batch, loss)
    assert state(model) == before and len(fired) == count
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(batch[name], x) for name, x in kept.items())
    optimizer.step()
    check = watcher.after_step()
    assert check is not None and check.operations is not None and check.operations.now > 80
    # The whole module draws random numbers, so only its operations are judged.
    assert not broken(watcher) and any("draws random numbers" in text for text in check.not_judged)
    assert any("aten.bernoulli draws random numbers" in text for text in check.not_covered)


def test_the_run_that_is_watched_has_the_same_bits() -> None:
    def weights(**settings: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Noisy()
        train("gpt", "fp32", 3, model=model, **settings)
        return [x.clone() for x in model.state_dict().values()]

    for one, other in zip(weights(operations=True), weights(operations=False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "all", None])
def test_a_bad_number_is_refused(bad: Any) -> None:
    with pytest.raises(UserError, match="operations="):
        watch(model := Gpt(), torch.optim.SGD(model.parameters()), loss=gpt_loss, operations=bad)


def test_operations_go_with_a_loss() -> None:
    model = Gpt()
    with pytest.raises(UserError, match="needs loss="):
        watch(model, torch.optim.SGD(model.parameters()), reference=lambda p, b: (0.0, {}), operations=True)


def test_a_loss_that_cannot_run_is_listed_and_training_goes_on() -> None:
    def refuses(model: Any, batch: Batch) -> Tensor:
        if next(model.parameters()) is own:
            raise RuntimeError("not on this one")
        return gpt_loss(model, batch)

    torch.manual_seed(0)
    model = Gpt()
    own = next(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, loss=refuses, operations=True)
    (batch,) = batches(1)
    gpt_loss(model, batch).backward()
    with watcher.step(batch, gpt_loss(model, batch)):
        optimizer.step()
    assert "operations: not judged (RuntimeError: not on this one)" in watcher.headline


def test_a_step_of_no_operation_that_can_be_judged_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any) -> Any:
        raise recompute.NotJudged("nothing can")

    monkeypatch.setattr(JudgeOperation, "__call__", cannot)
    watcher = train("gpt", "fp32", 1, operations=True)
    assert "operations: not judged (none of the step's operations could be judged)" in watcher.headline


def test_all_have_their_turn_one_of_each_kind_first() -> None:
    kinds = [("a", "f"), ("a", "f"), ("b", "f"), ("a", "f"), ("b", "f"), ("c", "b")]
    turns = Turns(3)
    turns.see(kinds)
    order = []
    for _ in range(3):
        places = turns.wanted()
        order.append(sorted(places))
        for place in places:
            turns.had(place, kinds[place], place != 1)
        turns.see(kinds)
    assert order == [[0, 2, 5], [1, 3, 4], [0, 1, 2]]
    assert turns.done == {0, 2, 3, 4, 5}
    turns.see(kinds[:4])
    assert turns.wanted() == {0, 1, 2} and not turns.done


def test_a_check_judges_as_many_as_were_asked_for() -> None:
    watcher = train("gpt", "fp32", 3, operations=40)
    counts = [check.operations for check in watcher.checks]
    assert [c.now for c in counts if c] == [40, 40, 40]
    assert [c.so_far for c in counts if c] == [40, 80, min(120, counts[0].of if counts[0] else 0)]


def test_a_fault_of_one_module_is_found_when_its_turn_comes() -> None:
    model = Gpt()
    only_in(model.get_submodule("blocks.1.norm2"), other_epsilon)
    watcher = train("gpt", "fp32", 3, model=model, operations=50)
    verdicts = [[f.tap for f in check.findings if not f.ok] for check in watcher.checks]
    assert ["blocks.1.norm2"] in verdicts and watcher.verdict == "disagreed"


def test_micro_batches_have_their_turn() -> None:
    seen: list[int] = []

    def counting(model: Any, batch: Batch) -> Tensor:
        if next(model.parameters()) is own:
            seen.append(int(batch["tokens"][0, 0]))
        return gpt_loss(model, batch)

    torch.manual_seed(0)
    model = Gpt()
    own = next(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, loss=counting, accumulate="sum", every=1, operations=10)
    parts = batches(2)
    for _ in range(2):
        for part in parts:
            gpt_loss(model, part).backward()
        with watcher.step(parts):
            optimizer.step()
        optimizer.zero_grad()
    first, second = (int(part["tokens"][0, 0]) for part in parts)
    assert seen == [first, first, second]  # the first check counts the operations beforehand


def test_reentrant_checkpointing_is_listed() -> None:
    def checkpointed(model: Any, batch: Batch) -> Tensor:
        x = model.embed(batch["tokens"])
        x = torch.utils.checkpoint.checkpoint(model.blocks[0], x, use_reentrant=reentrant)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), batch["targets"].flatten())

    for reentrant in (True, False):
        watcher = train("gpt", "fp32", 1, operations=True, loss=checkpointed)
        (check,) = watcher.checks
        assert ("operations: not judged (RuntimeError" in watcher.headline) is reentrant
        assert not [f for f in broken(watcher) if "." in f.stage]
        # Operations that the backward pass computes again are judged, in their module.
        again = [f for f in check.findings if f.stage == "aten.addmm" and f.phase == "backward"]
        assert bool(again) is not reentrant and all(f.tap.startswith("blocks.0.") for f in again)


def test_a_run_of_transformers_trainer(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from lockstep import watch_trainer
    from lockstep.parity_tests.watch.adapters.causal import llama, rows

    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, report_to=[], use_cpu=True,
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no",
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = Trainer(model=llama(), args=args, train_dataset=rows(4))
    watcher = watch_trainer(trainer, every=1, operations=True)
    trainer.train()
    assert watcher.verdict == "agreed", watcher
    assert watcher.checks[0].operations is not None and watcher.checks[0].operations.now > 50


class Pictures(nn.Module):
    """Operations that no formula of JAX's has: convolution, batch and group norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.groups, self.head = nn.GroupNorm(2, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens[:, None, :, None].expand(-1, 3, -1, 8).to(self.conv.weight.dtype).sin()
        y = F.max_pool2d(F.leaky_relu(self.norm(self.conv(x))), 2)
        return self.head(self.groups(y).mean((2, 3)))[:, None].expand(-1, LENGTH, -1)


@pytest.mark.parametrize("trains", ["fp32", "autocast", "bf16 weights"])
def test_a_step_of_other_operations_agrees(trains: str) -> None:
    torch.manual_seed(0)
    # One row: on CPUs without bf16 products, torch sums the gradients of a convolution's weight over rows in bf16.
    rows = [{name: x[:1] for name, x in batch.items()} for batch in batches(2)]
    watcher = train("gpt", trains, model=Pictures(), data=rows, operations=True)
    counts = watcher.checks[-1].operations
    assert not [f for f in broken(watcher) if "." in f.stage], watcher
    assert counts is not None and counts.so_far == counts.of and counts.ways["by torch FP64, decomposed"] > 3


def test_a_compiled_run_is_judged_eagerly() -> None:
    from torch.nn.modules.module import _has_any_global_hook

    watcher = train("gpt", "fp32", 2, wrap=lambda m: torch.compile(m, backend="aot_eager"), operations=True)
    assert watcher.verdict == "agreed" and not _has_any_global_hook()


# Operations of one's own


@pytest.fixture
def scale() -> Iterator[Any]:
    """`mylib::scale`, x·by, which a test makes wrong by its `off`."""
    off = {"by": 0.0}

    @torch.library.custom_op("lockstep_test::scale", mutates_args=())
    def op(x: Tensor, by: float) -> Tensor:
        return x * (by + off["by"])

    op.register_autograd(
        lambda ctx, g: (g * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
    )
    yield op, off
    recompute._references.pop("lockstep_test::scale", None)


def scaled_loss(op: Any) -> Any:
    def loss(model: Any, batch: Batch) -> Tensor:
        logits = op(model(batch["tokens"]).flatten(0, 1), 1.5)
        return F.cross_entropy(logits, batch["targets"].flatten())

    return loss


def test_an_operation_without_a_reference_is_listed(scale: Any) -> None:
    watcher = train("gpt", "fp32", 1, operations=True, loss=scaled_loss(scale[0]), precision="fp32")
    text = "1 not judged: no reference for lockstep_test::scale: watch_operation registers one"
    assert any(text in item for item in watcher.checks[0].not_covered), watcher
    assert not any("lockstep_test" in f.stage for f in watcher.checks[0].findings)


@pytest.mark.parametrize("off", [0.0, 1e-5])
def test_a_registered_reference_judges(scale: Any, off: float) -> None:
    op, wrong = scale
    watch_operation("lockstep_test::scale", lambda x, by: x * by)
    wrong["by"] = off
    watcher = train("gpt", "fp32", 1, operations=True, loss=scaled_loss(op))
    (found,) = [f for f in watcher.checks[0].findings if f.stage == "lockstep_test.scale"]
    assert BY_REFERENCE in found.note and found.ok is (off == 0.0)


@pytest.mark.parametrize("name", ["scale", "aten::gelu", "a b::c", "a::"])
def test_a_bad_name_of_an_operation_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="watch_operation"):
        watch_operation(name, lambda x: x)


def test_a_reference_is_a_function() -> None:
    with pytest.raises(UserError, match="its reference is a function"):
        watch_operation("a::b", 3)  # type: ignore[arg-type]


def test_without_jax_torch_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong in every dtype stays hidden where it is itself the truth; a decomposition sees it."""
    monkeypatch.setattr("lockstep.torch_backend.watch.operations.formulas", dict)
    for fault in (None, "missing bias", "softmax in bf16"):
        with kernel(fault) if fault else nullcontext():
            watcher = checked("fp32")
        ways = watcher.checks[0].operations.ways  # type: ignore[union-attr]
        assert BY_JAX not in ways and ways[BY_KERNEL]
        assert (not broken(watcher)) is (fault is None), watcher


def test_a_checks_findings_stay_few() -> None:
    (check,) = train("gpt", "fp32", 1, operations=True).checks
    assert check.operations is not None
    kinds = {(f.stage, f.phase) for f in check.findings if "." in f.stage}
    assert len([f for f in check.findings if "." in f.stage]) == len(kinds) < check.operations.now


# Each part of the check is needed


def test_without_formulas_of_the_kernel_itself_a_fault_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.torch_backend.watch.operations.formulas", dict)
    monkeypatch.setattr(recompute, "decomposition_table", {})
    with kernel("missing bias"):
        assert not [f for f in broken(checked("fp32")) if f.stage == "aten.addmm"]


def test_without_its_turn_a_kind_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAKES", recorder.MAKES | {"_softmax"})
    with kernel("softmax in bf16"):
        assert not broken(checked("fp32"))

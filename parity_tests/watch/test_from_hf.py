"""`watch(model, optimizer, reference=from_hf(model))`: a known family is held to the JAX model, and stage by stage."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lockstep import from_hf, watch
from lockstep.core.errors import UserError
from lockstep.core.hub.families import HUB
from lockstep.core.parity.watch.api import Watcher

NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {
    **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 32},
}
OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": False},
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **OFF},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 12},
    "mistral": {**SIZES, "sliding_window": 5},
    "gemma2": {**SIZES, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
}


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, HUB[name].architecture)
    model = kind(kind.config_class(**{**MODELS[name], **NONE, **more}))
    with torch.no_grad():
        for one, p in model.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if one.endswith("bias") else 0.01)
    return model


def batch_of(seed: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (3, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, : 3 + seed] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def train(model: Any, precision: str = "fp32", steps: int = 2, accumulate: Any = None, **settings: Any) -> Watcher:
    """Make steps of a plain loop, of two micro-batches where gradients are accumulated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = from_hf(model, accumulate=accumulate)
    watcher = watch(model, optimizer, reference=reference, precision=precision, **{"every": 1, **settings})
    for step in range(steps):
        parts = [batch_of(2 * step + number, model.device) for number in range(2 if accumulate else 1)]
        total = 0.0
        for part in parts:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**part).loss / len(parts)
            loss.backward()
            total += loss.item()
        with watcher.step(parts if accumulate else parts[0], total):
            optimizer.step()
        optimizer.zero_grad()
    return watcher


def judged(watcher: Watcher, number: int = 0) -> set[tuple[str, str]]:
    return {(f.stage, f.phase) for f in watcher.checks[number].findings if f.scope == "local"}


STAGES = {
    "llama": {"attn_norm", "q", "q_rope", "attn", "o_proj", "mlp_residual", "act", "final_norm", "logits"},
    "gpt2": {"position", "attn_layer_norm", "v", "attn", "gelu_act", "down_proj", "final_layer_norm"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_clean_model_agrees_with_all_its_stages(name: str) -> None:
    watcher = train(model_of(name))
    assert watcher.headline == "agreed in 2 checks", watcher
    for number in range(2):
        for stage in STAGES.get(name, {"attn", "window_attn"} & {s for s, _ in judged(watcher, number)} or {"no"}):
            assert {(stage, "forward"), (stage, "backward")} <= judged(watcher, number)
    # The reference has each parameter, and each was compared.
    assert len([f for f in watcher.checks[0].findings if f.stage == "gradients"]) >= 21


def test_a_clean_llama_under_autocast_agrees_with_all_its_stages() -> None:
    watcher = train(model_of("llama"), "bf16", accumulate="mean")
    assert watcher.headline == "agreed in 2 checks", watcher
    assert {("q_rope", "forward"), ("attn", "backward"), ("act", "forward")} <= judged(watcher)


def test_gpt2_under_autocast_is_held_by_its_gradients_alone() -> None:
    watcher = train(model_of("gpt2"), "bf16")
    assert watcher.headline == "agreed in 2 checks", watcher
    assert not {stage for stage, _ in judged(watcher)} & STAGES["gpt2"]
    assert any("stages by themselves: the twin does not round as autocast" in s for s in watcher.checks[0].not_covered)


def other_base(model: Any) -> None:
    model.model.rotary_emb.inv_freq = 1e3 ** -(torch.arange(0, 8, 2) / 8)


def other_epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-4


def erf(model: Any) -> None:
    model.transformer.h[1].mlp.act = nn.GELU()


def no_bias(model: Any) -> None:
    layer = model.transformer.h[1].mlp.c_fc
    layer.forward = lambda x: x @ layer.weight


def other_heads(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda m, args, out: out.roll(8, -1))


FAULTS: dict[str, tuple[str, Callable[[Any], None], tuple[str, str, int]]] = {
    "the base of RoPE": ("llama", other_base, ("q_rope", "forward", 0)),
    "an epsilon": ("llama", other_epsilon, ("mlp_norm", "forward", 1)),
    "key-value heads in another order": ("llama", other_heads, ("k", "forward", 0)),
    "GELU by erf": ("gpt2", erf, ("gelu_act", "forward", 1)),
    "a bias that is left out": ("gpt2", no_bias, ("up", "forward", 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_misread_architecture_is_named_in_the_first_step(fault: str) -> None:
    name, change, place = FAULTS[fault]
    model = model_of(name)
    change(model)
    watcher = train(model, steps=1)
    origin = watcher.checks[0].origin
    assert watcher.verdict == "disagreed" and origin is not None
    assert (origin.stage, origin.phase, origin.layer) == place, watcher
    assert any(not f.ok and f.scope == "end_to_end" for f in watcher.checks[0].findings)


def test_a_mean_of_means_is_not_the_mean_over_tokens() -> None:
    assert train(model_of("llama"), accumulate="mean", steps=1).verdict == "agreed"
    watcher = train(model_of("llama"), accumulate="tokens", steps=1)
    assert watcher.verdict == "disagreed"
    assert {f.stage for f in watcher.checks[0].findings if not f.ok} == {"loss", "gradients"}


def test_nothing_is_changed_by_watching() -> None:
    watched, plain = model_of("llama"), model_of("llama")
    train(watched)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(2):
        plain(**batch_of(2 * step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_steps_that_are_not_checked_record_nothing_and_forced_ones_say_so() -> None:
    model = model_of("llama")
    watcher = train(model, steps=2, every=100)
    assert [check.step for check in watcher.checks] == [1] and watcher.reference._recorded is None
    model(**batch_of(9)).loss.backward()
    with watcher.step(batch_of(9), check=True):
        pass
    assert any(line.startswith("stages by themselves: no forward pass") for line in watcher.checks[-1].not_covered)


def test_a_copy_and_a_pickle_of_the_model_are_not_watched() -> None:
    model = model_of("llama")
    watcher = watch(model, torch.optim.AdamW(model.parameters()), reference=from_hf(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(**batch_of(0)).loss.backward()
        assert watcher.reference._recorded is None
    model(**batch_of(0))
    assert watcher.reference._recorded.seen


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -1] = 0
    return {**batch, "attention_mask": mask}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "padding": (padded, "from_hf does not read the batch's attention_mask, unless it holds its default"),
    "no labels": (lambda batch: {"input_ids": batch["input_ids"]}, "the batch has no labels"),
    "no label that counts": (
        lambda batch: {**batch, "labels": torch.full((3, 12), -100)},
        "all labels of the batch are masked",
    ),
    "no mapping": (lambda batch: [batch], "a batch of from_hf is a mapping"),
    "a token beyond the vocabulary": (lambda batch: {**batch, "input_ids": batch["input_ids"] + 90}, "outside the voc"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_that_is_not_read_is_not_judged_and_training_goes_on(case: str) -> None:
    change, said = REFUSED[case]
    model = model_of("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watcher = watch(model, optimizer, reference=from_hf(model))
    model(**batch_of(0)).loss.backward()
    with watcher.step(change(batch_of(0))):
        optimizer.step()
    assert watcher.verdict == "could_not" and said in watcher.headline, watcher


def test_a_forward_pass_that_is_not_of_its_tokens_is_trained_all_the_same() -> None:
    model = model_of("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watcher = watch(model, optimizer, reference=from_hf(model))
    model(**padded(batch_of(0))).loss.backward()
    with watcher.step(padded(batch_of(0))):
        optimizer.step()
    assert watcher.verdict == "could_not"
    assert any("stages by themselves: from_hf does not read" in line for line in watcher.checks[0].not_covered)


def test_models_that_are_not_known_are_refused() -> None:
    with pytest.raises(UserError, match="from_hf needs a model of transformers, and Linear has no transformers config"):
        from_hf(nn.Linear(2, 2))
    small = {"vocab_size": 97, "d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2}
    with pytest.raises(UserError, match=r"architectures = .'T5ForConditionalGeneration'"):
        from_hf(transformers.T5ForConditionalGeneration(transformers.T5Config(**small)))
    with pytest.raises(UserError, match="rope_type = 'linear'"):
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        from_hf(model_of("llama", rope_parameters=rope))
    with pytest.raises(UserError, match="accumulate='sum': it is 'mean' or 'tokens'"):
        from_hf(model_of("llama"), accumulate="sum")  # type: ignore[arg-type]


NOT_JUDGED = {
    "dropout": (lambda: model_of("gpt2", attn_pdrop=0.1), "fp32", "the forward draws random numbers"),
    "weights in bf16": (lambda: model_of("llama").bfloat16(), "bf16", "weights in bfloat16: from_hf supports autocast"),
    "FP64": (lambda: model_of("llama").double(), "fp64", "transformers computes norms, softmax and angles in FP32"),
}


@pytest.mark.parametrize("case", NOT_JUDGED)
def test_what_has_no_twin_is_not_judged(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, precision, said = NOT_JUDGED[case]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watcher = watch(model, optimizer, reference=from_hf(model), precision=precision)
    model(**batch_of(0)).loss.backward()
    with caplog.at_level(logging.WARNING, "lockstep.watch"), watcher.step(batch_of(0)):
        optimizer.step()
    assert watcher.verdict == "could_not" and said in watcher.headline, watcher

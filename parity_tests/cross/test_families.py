"""Every family in both backends: one function, one chain of stages, and faults that are found and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.core.backend import Batch
from lockstep.core.config.schema import AttentionConfig, LossConfig, RunConfig
from lockstep.core.model.families import FAMILIES, graph_of
from lockstep.core.model.names import cancelled, parameter_shapes
from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.reference.self_check import check_reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import shaken_state
from lockstep.parity_tests.faults.planting import in_model, swapped
from lockstep.parity_tests.replay.made import VERSIONS, Accused, run_here
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.attention import Kernel
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import (
    MLP,
    Attention,
    CenteredNorm,
    GeGLU,
    HeadNorm,
    LayerNorm,
    Positions,
    Transformer,
)
from lockstep.torch_backend.tools.generate import Decoder

PACKED = AttentionConfig(document_mask=True, reset_positions=True)
# Sizes that no power of two fits; windows and caps that act on sequences of 33 tokens and small scores.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"rope_factor": 8.0, "rope_original": 16},
    "gpt2": {"positions": 40, "kv_heads": 4},
    "qwen2": {},
    "qwen3": {"head_width": 12, "tied": False},
    "mistral": {"window": 7},
    "gemma2": {"window": 7, "attention_cap": 0.3, "logits_cap": 0.2, "attention_scale": 0.3, "head_width": 12},
}


def config_of(
    family: str, policy: str = "fp64", attention: AttentionConfig | None = None, head: str = "chunked", **model: Any
) -> RunConfig:
    base = tiny_config(policy, train={"sequence_length": 33})
    of_family = base.model.model_copy(update={"family": family} | OPTIONS[family] | model)
    sections = {"model": of_family, "attention": attention or base.attention, "loss": LossConfig(head=head, chunk=19)}
    return RunConfig.model_validate(base.model_copy(update={"device": "cpu", **sections}).model_dump())


def test_every_family_is_tried():
    assert OPTIONS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("attention", [AttentionConfig(), PACKED], ids=["", "packed"])
@pytest.mark.parametrize("family", OPTIONS)
def test_both_backends_compute_one_function(family, attention):
    """Every tap, its gradient and every parameter's gradient in FP64, and logits of a text that grows."""
    config = config_of(family, attention=attention)
    sessions = [backend().open(config) for backend in (TorchBackend, JaxBackend)]
    for session in sessions:
        session.load(shaken_state(config.model))
    batch = uneven_weights(text_batch(config), 3)
    micro = batch.micro_batches(config.train.micro_batch_size)[0]
    ours, theirs = (session.observe(micro, observed_names(config)) for session in sessions)
    without_digits = {f"grad/{name}" for name in cancelled(config.model)}
    for name in ours.keys() - without_digits:
        scale = np.abs(theirs[name]).max()
        assert np.abs(ours[name] - theirs[name]).max() <= 1e-12 * scale, name
    assert {*parameter_shapes(config.model)} == {*sessions[0].gradients(micro).grads}
    text = batch.tokens[0]
    for length in (1, 8, 20):
        ours, theirs = (session.next_token_logits(text[:length]) for session in sessions)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    ours, theirs = (session.attention_logits(micro) for session in sessions)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("family", OPTIONS)
def test_a_cache_of_keys_changes_no_logit(family):
    config = config_of(family, "fp32")
    params = shaken_state(config.model).params
    text = text_batch(config).tokens[0]
    cached, plain = (Decoder(config, params, "cpu", cached) for cached in (True, False))
    for length in range(1, 30):
        ours, theirs = (decoder.next_token_logits(text[:length]) for decoder in (cached, plain))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [AttentionConfig(), PACKED], ids=["", "packed"])
@pytest.mark.parametrize("backend", [TorchBackend, JaxBackend], ids=["torch", "jax"])
@pytest.mark.parametrize("family", OPTIONS)
def test_closed_forms_and_differences_hold(family, backend, attention):
    check = check_reference(backend(), config_of(family, "bf16", attention))
    assert not check.wrong and not check.not_covered
    asked = {one.id for one in graph_of(config_of(family).model).operations}
    assert asked <= {finding.stage for finding in check.findings}


def checked(session: Any, config: RunConfig) -> tuple[Any, Check]:
    # Not a run's first weights, which are those of its seed.
    session.load(replace(shaken_state(config.model), step=1))
    evidence = gather(session, config, uneven_weights(text_batch(config), 1))
    return evidence, judge(evidence, Reference.open(JaxBackend(), config))


class _Erf(MLP):
    def activate(self, up_BSF):
        return F.gelu(up_BSF)


class _ErfGate(GeGLU):
    def activate(self, gate_BSF, up_BSF):
        return F.gelu(gate_BSF) * up_BSF


class _NoMean(LayerNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


class _NoBias(LayerNorm):
    def forward(self, x):
        return super().forward(x) - self.bias


class _PlainGain(CenteredNorm):
    def forward(self, x):
        return super().forward(x) / (1 + self.weight) * self.weight


class _OverAllHeads(HeadNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + self.eps) * self.weight


class _FromOne(Positions):
    def forward(self, x_BSD, places):
        return super().forward(x_BSD, places + 1)


class _NormBehind(Attention):
    """Turns queries and keys before it norms them."""

    def placed(self, x_BSHE, norm, rope, policy, tap, name):
        turned = self.rotate(x_BSHE, rope)
        normed = tap(f"{name}_norm", norm(x_BSHE))
        return tap(f"{name}_rope", norm(turned) + 0 * normed)


def _window(more: int) -> type:
    class WiderWindow(Transformer):
        def places(self, length, documents_BS, policy, start=0):
            self.window += more
            try:
                return super().places(length, documents_BS, policy, start)
            finally:
                self.window -= more

    return WiderWindow


def _kernels(**changes: Any) -> Any:
    def plant(model):
        for block in model.blocks:
            kept = {key: getattr(block.attn.kernel, key) for key in Kernel.__dataclass_fields__}
            block.attn.kernel = Kernel(**(kept | changes))

    return in_model(plant)


class _Uncapped(Transformer):
    def cap(self, logits_BSV):
        return logits_BSV


def _no_scale(model: Transformer) -> None:
    model.embed_scale = model.embed_scale * 1.001


def _whole_uncapped(model: Transformer) -> None:
    model.fused_loss = None
    model.__class__ = _Uncapped


def _all_windows(model):
    model.blocks[1].attn.windowed = True


def _unstretched(model: Transformer) -> None:
    model.stretch = ()
    model.place_rope(model.cos.device)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "GELU by erf": ("gpt2", swapped(MLP, _Erf), "gelu_act"),
    "GELU by erf in the gate": ("gemma2", swapped(GeGLU, _ErfGate), "gated_gelu_act"),
    "LayerNorm that takes no mean away": ("gpt2", swapped(LayerNorm, _NoMean, "blocks.1.mlp_norm"), "mlp_layer_norm"),
    "LayerNorm without its bias": ("gpt2", swapped(LayerNorm, _NoBias, "final_norm"), "final_layer_norm"),
    "positions from one": ("gpt2", swapped(Positions, _FromOne), "position"),
    "gain w for 1 + w": ("gemma2", swapped(CenteredNorm, _PlainGain, "*attn_post_norm"), "attn_post_centered_norm"),
    "embeddings scaled otherwise": ("gemma2", in_model(_no_scale), "embed_scale"),
    "a window of one token more": ("mistral", swapped(Transformer, _window(1)), "window_attn"),
    "a window in every block": ("gemma2", in_model(_all_windows), "attn"),
    "scores without a cap": ("gemma2", _kernels(cap=0.0), "window_attn"),
    "scores by 1/√E": ("gemma2", _kernels(scale=None), "window_attn"),
    "scores and samples without a cap of logits": ("gemma2", swapped(Transformer, _Uncapped), "evaluation"),
    "logits without a cap": ("gemma2", in_model(_whole_uncapped), "logits_cap"),
    "a norm over all heads": ("qwen3", swapped(HeadNorm, _OverAllHeads, "*k_norm"), "k_norm"),
    "norm behind the rotation": ("qwen3", swapped(Attention, _NormBehind, "blocks.1.*"), "q_rope"),
    "frequencies that are not stretched": ("llama", in_model(_unstretched), "q_rope"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_family_is_found_in_its_first_step_and_named(fault):
    family, session_class, stage = FAULTS[fault]
    # GPT-2's packed programs are compiled for the honest run.
    config = config_of(family, attention=PACKED if family == "gpt2" else None)
    _, check = checked(session_class(config), config)
    assert check.origin is not None, "agreed"
    assert (check.origin.stage, check.origin.phase) == (stage, "forward")


# Stages that no plain Llama has.
STAGES = {
    *("position", "embed_scale", "q_norm", "k_norm", "q_rope", "window_attn", "gelu_act", "gated_gelu_act"),
    *("attn_layer_norm", "final_layer_norm", "attn_centered_norm", "mlp_post_centered_norm", "attn", "logits_cap"),
}


@pytest.mark.parametrize("family", OPTIONS)
def test_an_honest_run_agrees_and_its_repro_is_within_rounding(family, tmp_path, capsys):
    config = config_of(family, attention=PACKED)
    evidence, check = checked(TorchBackend().open(config), config)
    assert check.verdict == "agreed"
    own = {one.id for one in graph_of(config.model).operations} & STAGES
    codes: dict[tuple[str, str], int] = {}
    for finding in check.findings:
        key = finding.stage, finding.phase
        if finding.scope == "local" and finding.stage in own and key not in codes:
            others = tuple(one for one in check.findings if one.scope == "local" and one is not finding)
            made = repro(evidence, Accused(check.step, others, (), accused=finding), config, VERSIONS)
            codes[key] = run_here(tmp_path / "_".join(key), made)
    assert {stage for stage, _ in codes} == own
    assert not any(codes.values()), (codes, capsys.readouterr().out)


def test_whole_logits_and_chunks_cap_alike():
    """Losses and gradients, through the program that shows its tensors and the one that does not."""
    micro = uneven_weights(text_batch(config_of("gemma2")), 3).micro_batches(2)[0]
    found = []
    for head in ("full", "chunked"):
        session = TorchBackend().open(config_of("gemma2", head=head))
        session.load(shaken_state(session.config.model))
        grads = session.gradients(micro)
        shown = session.observe(micro, ["logits", "uncapped_logits", "grad/uncapped_logits", "grad/embed"])
        found.append({"nll": grads.nll, **grads.grads, **shown})
    for name, whole in found[0].items():
        np.testing.assert_allclose(found[1][name], whole, rtol=1e-12, atol=1e-12 * np.abs(whole).max(), err_msg=name)


@pytest.mark.parametrize(("window", "idle"), [(7, False), (32, False), (33, True), (1000, True)])
def test_a_window_that_leaves_nothing_out_is_not_exercised(window, idle):
    config = config_of("mistral", window=window)
    _, check = checked(TorchBackend().open(config), config)
    assert check.verdict == "agreed" and ("attention window" in check.not_exercised) == idle


def test_a_cap_far_above_all_scores_is_not_exercised():
    config = config_of("gemma2", attention_cap=1e9)
    _, check = checked(_kernels(cap=0.0)(config), config)
    assert check.verdict == "agreed" and "attention cap" in check.not_exercised


def test_the_bias_of_keys_without_a_rotation_has_no_gradient():
    """All of GPT-2's have none; a rotation, a norm of heads or a cap makes it matter."""
    assert set(cancelled(config_of("gpt2").model)) == {f"blocks.{i}.attn.k_proj.bias" for i in range(2)}
    assert not cancelled(config_of("qwen2").model)
    config = config_of("gpt2")
    session = TorchBackend().open(config)
    session.load(shaken_state(config.model))
    batch = Batch.of({name: array[:2] for name, array in text_batch(config).arrays.items()})
    grads = session.gradients(batch).grads
    assert np.abs(grads["blocks.0.attn.k_proj.bias"]).max() < 1e-12 * np.abs(grads["blocks.0.attn.v_proj.bias"]).max()


def test_a_bias_of_keys_that_gets_a_gradient_all_the_same_is_accused():
    class Leaks(in_model(lambda model: None)):
        def build_model(self):
            model = super().build_model()
            bias = model.blocks[1].attn.k_proj.bias
            bias.register_hook(lambda grad: grad + 1e-6)
            return model

    config = config_of("gpt2")
    _, check = checked(Leaks(config), config)
    assert check.verdict == "disagreed"
    assert "blocks.1.attn.k_proj.bias" in {finding.tap for finding in check.findings if not finding.ok}

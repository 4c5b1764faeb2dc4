"""Both models against an implementation that is not ours: Hugging Face Transformers' Llama, with the same weights.

One misreading of the architecture written twice agrees with itself; it does not agree with this.

Transformers computes RMSNorm, softmax and the angles of RoPE in FP32, whatever dtype the model is in. For the exact
comparison those casts are widened: inside its Llama, `torch.float32` and `torch.float` mean FP64. The code is otherwise
untouched, and a second test takes it as it comes, within what FP32 explains.
"""

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import ALL_BIASES, relative, shaken_state
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.peers.hugging_face import their_config, their_name

VARIANTS = {
    "tied, 2 KV heads": {},
    "untied, 4 KV heads, biases, theta 10^4": {"tied": False, "kv_heads": 4, "rope_theta": 1e4, **ALL_BIASES},
    "untied, 1 KV head, eps 10^-3": {"tied": False, "kv_heads": 1, "norm_eps": 1e-3},
}


class _WideTorch(types.ModuleType):
    """The torch module, except that its names of FP32 mean FP64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def widened(monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "torch", _WideTorch("torch"))


def build_theirs(model, params, length, **other):
    """LlamaForCausalLM in FP64 with our weights under its names."""
    # Not at the top: every test process collects this file, and the import takes three seconds.
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**their_config(model, length), "attn_implementation": "eager"}
    theirs = LlamaForCausalLM(LlamaConfig(**(settings | other))).double()
    weights = {their_name(name): torch.from_numpy(p) for name, p in params.items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if model.tied else [])
    assert model.tied == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)
    return theirs


def run_theirs(theirs, batch):
    """Per-token NLL, logits, and gradients by their name, of the loss Σ weight·nll / Σ weight."""
    logits = theirs(torch.from_numpy(batch.tokens).long()).logits
    targets, weights = torch.from_numpy(batch.targets).long(), torch.from_numpy(batch.weights).double()
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    ((nll * weights).sum() / weights.sum()).backward()
    grads = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    return nll.detach().numpy(), logits.detach().numpy(), grads


@pytest.fixture(scope="module", params=VARIANTS)
def ours(request):
    """Configuration, batch, weights, and by backend the gradients and logits of our two models in FP64."""
    config = tiny_config("fp64", train={"micro_batch_size": 4, "sequence_length": 32}, **VARIANTS[request.param])
    batch = uneven_weights(text_batch(config), 0)
    state = shaken_state(config.model)
    results = {}
    for backend in (TorchBackend(), JaxBackend()):
        session = backend.open(config)
        session.load(state)
        results[backend.name] = session.gradients(batch), session.observe(batch, ["logits"])["logits"]
    return config, batch, state.params, results


def distances_to(results, theirs):
    """By backend, the relative distance of NLL, logits and each gradient."""
    nll, logits, grads = theirs
    apart = {}
    for backend, (found, found_logits) in results.items():
        assert {their_name(name) for name in found.grads} == set(grads)
        of_grads = {name: relative(g, grads[their_name(name)]) for name, g in found.grads.items()}
        apart[backend] = {"nll": relative(found.nll, nll), "logits": relative(found_logits, logits), **of_grads}
    assert len(apart) == 2
    return apart


def too_far(apart, limit):
    return {(backend, name): d for backend, by_name in apart.items() for name, d in by_name.items() if not d < limit}


def test_ours_is_their_function(ours, widened):
    """Measured 3e-15 at most."""
    config, batch, params, results = ours
    theirs = run_theirs(build_theirs(config.model, params, 32), batch)
    assert theirs[0].dtype == np.float64
    assert not too_far(distances_to(results, theirs), 1e-12)


def test_theirs_as_it_comes_differs_by_fp32_alone(ours):
    """Angles up to S rounded to FP32 are off by S·2⁻²⁴, the rest by a few 2⁻²⁴; a gradient doubles it at most."""
    config, batch, params, results = ours
    theirs = run_theirs(build_theirs(config.model, params, 32), batch)
    apart = distances_to(results, theirs)
    assert not too_far(apart, 2 * 32 * 2**-24)
    assert apart["torch"]["nll"] > 1e-10  # the casts are there: what was widened above is no empty word


@pytest.mark.parametrize(
    "other", [{"rms_norm_eps": 2e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}]
)
def test_another_setting_is_seen(ours, widened, other):
    config, batch, params, results = ours
    theirs = run_theirs(build_theirs(config.model, params, 32, **other), batch)
    assert all(by_name["logits"] > 1e-6 for by_name in distances_to(results, theirs).values())


def test_two_heads_exchanged_are_seen(ours, widened):
    config, batch, params, results = ours
    name, size = "blocks.1.attn.q_proj.weight", config.model.head_dim
    heads = params[name].reshape(-1, size, config.model.hidden)
    wrong = {**params, name: heads[[1, 0, *range(2, len(heads))]].reshape(params[name].shape)}
    theirs = run_theirs(build_theirs(config.model, wrong, 32), batch)
    assert all(by_name["logits"] > 1e-4 for by_name in distances_to(results, theirs).values())

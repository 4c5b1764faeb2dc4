"""With the cache and without, the model predicts the same next tokens, and as in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import AttentionConfig, RecomputeConfig
from lockstep.parity_tests.cross.variants import VARIANTS, shaken_state
from lockstep.parity_tests.tiny import text_bytes, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.generate import Cache, Decoder

WINDOW = 24
TRAIN = {"sequence_length": WINDOW}
TOKENS = text_bytes()[1000 : 1000 + WINDOW + 8].astype(np.int32)
POLICIES = ["fp64", "fp32", "bf16", "fp16"]
# One token at first, a prompt, and a prompt that fills the window.
PROMPTS = (1, 9, WINDOW)


def config_of(policy="fp64", variant="tied", **changes):
    return tiny_config(policy, train=TRAIN, **VARIANTS[variant]).model_copy(update=changes)


def logits(config, cached, prompt=1, params=None):
    """Logits after each token from `prompt` on, asked for one after the other; the window slides at its end."""
    params = params or shaken_state(config.model).params
    decoder = Decoder(config, params, "cpu", cached)
    ends = range(prompt, len(TOKENS) + 1)
    return np.stack([decoder.next_token_logits(TOKENS[max(0, end - WINDOW) : end]) for end in ends])


def distances(policy, variant="tied", prompt=1):
    """Largest |cached − uncached|, and of each the largest distance to the same weights' FP64 logits, which they round.

    With `fp64`, the second and third are 0.
    """
    ours, theirs = (logits(config_of(policy, variant), cached, prompt) for cached in (True, False))
    truth = logits(config_of("fp64", variant), False, prompt)
    return (float(np.abs(a - b).max()) for a, b in ((ours, theirs), (ours, truth), (theirs, truth)))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_and_uncached_logits_agree(variant, prompt):
    """In FP64: sums of some hundred numbers of size 1 in another order."""
    apart, *_ = distances("fp64", variant, prompt)
    assert apart <= 1e-12


def agrees(policy, variant="tied", prompt=1) -> bool:
    """Both are roundings of one truth, by the same policy in sums of another order.

    So the cached logits' error is of the size of the uncached ones': at most twice as large, the bound that
    flash-attention's tests put on a kernel's error against a plain version's, and the two no further apart than both
    errors together.
    """
    apart, ours, theirs = distances(policy, variant, prompt)
    return ours <= 2 * theirs and apart <= ours + theirs and theirs > 0


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_under_a_policy_they_differ_by_its_rounding_alone(policy, prompt):
    for variant in VARIANTS:
        assert agrees(policy, variant, prompt), variant


def test_the_cache_is_in_use():
    """Else the comparison would be of a thing with itself."""
    decoder = Decoder(config_of(), shaken_state(config_of().model).params, "cpu")
    seen = []
    trunk = decoder._model.trunk_at
    decoder._model.trunk_at = lambda ids, *more: seen.append(ids.shape[1]) or trunk(ids, *more)
    for end in (5, 6, 7, 5, 6, WINDOW):
        decoder.next_token_logits(TOKENS[:end])
    # Set back to the prompt of five, only its last token is asked anew; what jumps ahead is computed whole.
    assert seen == [5, 1, 1, 1, 1, WINDOW]


def test_another_text_does_not_meet_what_is_cached():
    params = shaken_state(config_of().model).params
    decoder, fresh = (Decoder(config_of(), params, "cpu") for _ in range(2))
    decoder.next_token_logits(TOKENS[:9])
    other = TOKENS[:10].copy()
    other[3] += 1
    assert np.array_equal(decoder.next_token_logits(other), fresh.next_token_logits(other))


@pytest.mark.parametrize("policy", POLICIES)
def test_uncached_logits_are_those_of_training(policy):
    config, state = config_of(policy, "untied-biased"), shaken_state(config_of(policy, "untied-biased").model)
    session = TorchBackend().open(config)
    session.load(state)
    decoder = Decoder(config, state.params, "cpu", cached=False)
    for end in (1, 2, 9, WINDOW):
        assert np.array_equal(decoder.next_token_logits(TOKENS[:end]), session.next_token_logits(TOKENS[:end])), end


SETTINGS = {
    "documents": {"attention": AttentionConfig(document_mask=True, reset_positions=True)},
    "flex": {"attention": AttentionConfig(kernel="flex")},
    "compiled": {"compile": tiny_config(compiled=True).compile},
    "recomputed": {"recompute": RecomputeConfig(parts="block")},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_only_training_needs_changes_nothing(setting, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *a, **k: pytest.fail("something was compiled"))
    params = shaken_state(config_of().model).params
    due = logits(config_of("bf16"), True, params=params)
    assert np.array_equal(logits(config_of("bf16", **SETTINGS[setting]), True, params=params), due)


@pytest.mark.parametrize(("policy", "due"), [("fp8_tensorwise", "bf16"), ("fp8_rowwise", "bf16"), ("tf32", "fp32")])
def test_what_a_token_at_a_time_or_a_cpu_has_not(policy, due):
    params = shaken_state(config_of().model).params
    assert Decoder(config_of(policy), params, "cpu").policy.name == due
    assert np.array_equal(logits(config_of(policy), True, params=params), logits(config_of(due), True, params=params))


# Faults, each of which the comparison must notice


def one_behind(monkeypatch):
    """Store the newest token's keys and values, and do not read them."""
    tap = Cache.tap

    def behind(self, start):
        keep = tap(self, start)
        return lambda name, new: keep(name, new)[:, : max(start, 1)] if name.endswith((".k_rope", ".attn.v")) else new

    monkeypatch.setattr(Cache, "tap", behind)


def one_ahead(monkeypatch):
    """Read a place that nothing was written to as well."""
    tap = Cache.tap

    def ahead(self, start):
        keep = tap(self, start)

        def wide(name, new):
            found = keep(name, new)
            stop = start + new.shape[1] + (1 if start and start + 1 < WINDOW else 0)
            return self._held[name][:, :stop] if name in self._held else found

        return wide

    monkeypatch.setattr(Cache, "tap", ahead)


def wrong_position(monkeypatch):
    """Rotate a token that comes alone as if it stood one place further back."""
    asked = Decoder._logits

    def off(self, tokens, start, tap):
        right = self._model.cos, self._model.sin
        if start:
            self._model.cos, self._model.sin = (table.roll(1, 0) for table in right)
        try:
            return asked(self, tokens, start, tap)
        finally:
            self._model.cos, self._model.sin = right

    monkeypatch.setattr(Decoder, "_logits", off)


def from_the_first_key(monkeypatch):
    """Mask a single query as torch counts: it sees the first key alone."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def first(q, k, v, attn_mask, is_causal, **others):
        return sdpa(q, k, v, attn_mask=attn_mask, is_causal=True, **others)

    monkeypatch.setattr("lockstep.torch_backend.attention.F.scaled_dot_product_attention", first)


@pytest.mark.parametrize("fault", [one_behind, one_ahead, wrong_position, from_the_first_key])
@pytest.mark.parametrize("policy", ["fp64", "bf16"])
def test_a_cache_that_is_wrong_is_noticed(policy, fault, monkeypatch):
    assert policy == "fp64" or agrees(policy)
    fault(monkeypatch)
    if policy == "fp64":
        apart, *_ = distances("fp64")
        assert apart > 1e-6
    else:
        assert not agrees(policy)

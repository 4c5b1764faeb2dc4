"""Small causal language models of transformers, and data of sequences with different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCAB, WIDTH, HEADS, LENGTH = 61, 32, 2, 12


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2_that_shifts() -> nn.Module:
    """Return GPT-2 with `loss_type`, by which Trainer recognises models that shift labels (see test_trainer.py)."""
    model: Any = gpt2()
    model.loss_type = "ForCausalLM"
    return model


MODELS = {"llama": llama, "gpt2": gpt2_that_shifts}


def rows(count: int) -> list[dict[str, Tensor]]:
    """Return `count` sequences of 3 to `LENGTH` tokens, padded on the right. Padding is masked, and is no target."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        ids = torch.randint(1, VOCAB, (LENGTH,), generator=generator)
        real = torch.arange(LENGTH) < 3 + (7 * i) % (LENGTH - 2)
        found.append({"input_ids": ids * real, "attention_mask": real.long(), "labels": torch.where(real, ids, -100)})
    return found

"""Small models and texts that exhibits train: random weights from configurations, text of Python's standard library."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VOCAB, LENGTH, NO_TARGET = 128, 32, -100


def text(length: int = LENGTH) -> Tensor:
    """Return rows of `length` ASCII characters of a standard-library module: [rows, length] of integers below 128."""
    raw = Path(str(inspect.getsourcefile(argparse))).read_bytes()
    ids = torch.frombuffer(bytearray(byte for byte in raw if byte < VOCAB), dtype=torch.uint8).long()
    return ids[: len(ids) // length * length].view(-1, length)


def rows(count: int, kind: str = "text") -> list[dict[str, Tensor]]:
    """Return rows for a causal language model. kind: `text`, all targets, or `prompts` and answers of any length."""
    found = []
    for i, ids in enumerate(text()[:count]):
        labels = ids.clone()
        if kind == "prompts":
            # A prompt of 6 tokens, not a target, then an answer of 2 to 26 tokens; the rest is padding.
            labels[:6] = NO_TARGET
            labels[8 + 7 * i % 25 :] = NO_TARGET
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return found


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the mean cross-entropy of logits [rows, length, vocabulary] against the token that follows."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out(model: Any) -> float:
    """Compute a causal language model's mean loss per token over the text's last 64 rows, from its logits."""
    ids = text()[-64:]
    model.eval()
    loss = next_token_loss(model(input_ids=ids).logits, ids).item()
    model.train()
    return loss


def llama() -> Any:
    """Build a Llama of 40,000 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    """Build a GPT-2 of 33,000 parameters, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(folder: str, **given: Any) -> Any:
    """Return arguments of a Trainer on the CPU that logs every step and prints nothing else."""
    from transformers import TrainingArguments

    quiet: dict[str, Any] = {
        "save_strategy": "no", "report_to": [], "use_cpu": True, "logging_steps": 1, "disable_tqdm": True,
        "dataloader_pin_memory": False, "num_train_epochs": 1, "learning_rate": 3e-3,
    }  # fmt: skip
    return TrainingArguments(output_dir=folder, **(quiet | given))


def logged(trainer: Any) -> list[float]:
    """Return the losses that a Trainer has logged, one per step."""
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]

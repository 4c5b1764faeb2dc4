"""Hugging Face's Llama and torch's own AdamW as a candidate: a trainer that shares no code with Lockstep.

    lockstep parity configs/quickstart.toml --precision.policy fp32 --compile.enabled false \
        --candidate docs/examples/hf_llama.py:HfLlama
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.core.backend import Batch, Gradients, NotSupported, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.init import init_parameters


def hf_name(name: str) -> str:
    """Canonical name → Hugging Face's."""
    renames = {
        "embed.": "model.embed_tokens.",
        "blocks.": "model.layers.",
        "final_norm.": "model.norm.",
        ".attn.": ".self_attn.",
        ".attn_norm.": ".input_layernorm.",
        ".mlp_norm.": ".post_attention_layernorm.",
    }
    for ours, theirs in renames.items():
        name = name.replace(ours, theirs)
    return name


class HfSession:
    """Give a check the state, one step, and the gradients of a batch; refuse the rest by name."""

    def __init__(self, config: RunConfig) -> None:
        m = config.model
        self.config, self.done = config, 0
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=m.vocab_size, hidden_size=m.hidden, num_hidden_layers=m.layers, num_attention_heads=m.heads,
                num_key_value_heads=m.kv_heads, intermediate_size=m.ffn_hidden, rms_norm_eps=m.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta}, tie_word_embeddings=m.tied,
                max_position_embeddings=config.train.sequence_length,
            )
        )  # fmt: skip
        theirs = dict(self.model.named_parameters())
        initial = init_parameters(m, config.seed)
        self.params = {name: theirs[hf_name(name)] for name in initial}
        with torch.no_grad():
            for name, value in initial.items():
                self.params[name].copy_(torch.from_numpy(value))
        decayed = [p for n, p in self.params.items() if "_proj." in n]
        others = [p for n, p in self.params.items() if "_proj." not in n]
        o = config.optim
        groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=o.peak_lr, betas=(o.beta1, o.beta2), eps=o.eps)

    def state(self) -> State:
        moments = {
            kind: {n: _array(self.optimizer.state[p].get(kind, torch.zeros_like(p))) for n, p in self.params.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return State(self.done, {n: _array(p) for n, p in self.params.items()}, moments)

    def load(self, state: State) -> None:
        raise NotSupported("this example only trains from the start")

    def losses(self, micro: Batch) -> torch.Tensor:
        logits = self.model(torch.from_numpy(micro.tokens).long()).logits
        return F.cross_entropy(logits.mT, torch.from_numpy(micro.targets).long(), reduction="none")

    def backward(self, batch: Batch) -> tuple[float, np.ndarray]:
        self.optimizer.zero_grad()
        total, loss, nll = float(batch.weights.sum()), 0.0, []
        for micro in batch.micro_batches(self.config.train.micro_batch_size):
            each = self.losses(micro)
            part = (each * torch.from_numpy(micro.weights)).sum() / total
            part.backward()
            loss += part.item()
            nll.append(_array(each))
        return loss, np.concatenate(nll)

    def gradients(self, batch: Batch) -> Gradients:
        loss, nll = self.backward(batch)
        return Gradients(nll, loss, {n: _array(p.grad) for n, p in self.params.items()})

    def step(self, batch: Batch) -> StepRecord:
        o, steps = self.config.optim, self.config.train.steps
        loss, _ = self.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(list(self.params.values()), o.clip_norm).item()
        self.done += 1
        # optim.schedule = "cosine"; the others are in docs/guide/schedules.md
        after = max(self.done - o.warmup_steps, 0) / max(steps - o.warmup_steps, 1)
        cosine = o.min_lr_ratio + (1 - o.min_lr_ratio) * (1 + math.cos(math.pi * after)) / 2
        lr = o.peak_lr * (self.done / o.warmup_steps if self.done <= o.warmup_steps else cosine)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        coefficient = min(1.0, o.clip_norm / (norm + 1e-6))
        return StepRecord(
            self.done, loss, float(batch.weights.sum()), lr, norm, coefficient, batch.digest(), batch.targets.size
        )

    def observe(self, batch: Batch, taps: list[str]) -> dict[str, np.ndarray]:
        raise NotSupported("the model is a black box")

    def close(self) -> None:
        pass


class HfLlama:
    """The backend: `open` a session on a configuration."""

    name = "hf-llama"

    def open(self, config: RunConfig) -> HfSession:
        return HfSession(config)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()

"""The same trainer under torch.autocast, with taps: each stage of Hugging Face's model is judged by itself.

    lockstep parity configs/quickstart.toml --precision.casts autocast --compile.enabled false \
        --candidate docs/examples/hf_llama_autocast.py:HfLlamaAutocast

Autocast rounds where Lockstep's own trainer does not: `precision.casts` says so (docs/guide/casts.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from hf_llama import HfLlama, HfSession
from transformers.models.llama import modeling_llama

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import GRADIENT

PROJECTIONS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}


class AutocastSession(HfSession):
    """Show taps and their gradients, from hooks on the model's modules."""

    def losses(self, micro: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(torch.from_numpy(micro.tokens).long()).logits
        return F.cross_entropy(logits.float().mT, torch.from_numpy(micro.targets).long(), reduction="none")

    def observe(self, batch: Batch, taps: list[str]) -> dict[str, np.ndarray]:
        seen: dict[str, np.ndarray] = {}

        def note(name: str, x: torch.Tensor) -> torch.Tensor:
            """Keep a tensor, and its gradient, the sum of what all of its readers send back, when that comes."""
            seen[name] = _array(x)
            x.register_hook(lambda grad: seen.__setitem__(GRADIENT + name, _array(grad)))
            return x

        def edge(name: str, x: torch.Tensor) -> torch.Tensor:
            """Give one reader a node of its own, whose gradient is that reader's share."""
            own = x.view_as(x)
            own.register_hook(lambda grad: seen.__setitem__(GRADIENT + name, _array(grad)))
            return own

        self.optimizer.zero_grad()
        with self._hooked(note, edge):
            losses = note("nll", self.losses(batch))
        total = float(batch.weights.sum(dtype=np.float64))
        ((losses.double() * torch.from_numpy(batch.weights).double()).sum() / total).backward()
        seen |= {GRADIENT + name: _array(p.grad) for name, p in self.params.items()}
        return {name: seen[name] for name in taps if name in seen}

    @contextmanager
    def _hooked(self, note, edge) -> Iterator[None]:
        """While the model runs, each module's tensors pass `note` and `edge` under Lockstep's names."""
        model, hooks = self.model.model, []

        def writes(module: torch.nn.Module, name: str) -> None:
            hooks.append(module.register_forward_hook(lambda m, args, out: note(name, out) if _is(out) else None))

        def reads(module: torch.nn.Module, keep) -> None:
            hooks.append(module.register_forward_pre_hook(lambda m, args: (keep(args[0]), *args[1:])))

        writes(model.embed_tokens, "embed")
        for i, layer in enumerate(model.layers):
            at = f"blocks.{i}"
            writes(layer.input_layernorm, f"{at}.attn_norm")
            for short, path in PROJECTIONS.items():
                reads(layer.get_submodule(path), partial(edge, f"{at}.attn.{short}.x"))
                writes(layer.get_submodule(path), f"{at}.attn.{short}")
            reads(layer.self_attn.o_proj, partial(note, f"{at}.attn.out"))
            writes(layer.self_attn.o_proj, f"{at}.attn.o_proj")
            reads(layer.post_attention_layernorm, partial(note, f"{at}.attn_residual"))
            writes(layer.post_attention_layernorm, f"{at}.mlp_norm")
            for short in ("gate", "up"):
                reads(layer.mlp.get_submodule(f"{short}_proj"), partial(edge, f"{at}.mlp.{short}.x"))
                writes(layer.mlp.get_submodule(f"{short}_proj"), f"{at}.mlp.{short}")
            reads(layer.mlp.down_proj, partial(note, f"{at}.mlp.act"))
            writes(layer.mlp.down_proj, f"{at}.mlp.down_proj")
            following = model.layers[i + 1].input_layernorm if i + 1 < len(model.layers) else model.norm
            reads(following, partial(note, f"{at}.mlp_residual"))
        writes(model.norm, "final_norm")
        writes(self.model.lm_head, "logits")
        rotate, layers = modeling_llama.apply_rotary_pos_emb, iter(range(len(model.layers)))

        def rotated(*args, **kwargs):
            at, turned = f"blocks.{next(layers)}.attn", rotate(*args, **kwargs)
            # (B, H, S, E) there, (B, S, H, E) here.
            return tuple(
                note(f"{at}.{name}", x.transpose(1, 2)).transpose(1, 2)
                for name, x in zip(("q_rope", "k_rope"), turned, strict=True)
            )

        modeling_llama.apply_rotary_pos_emb = rotated
        try:
            yield
        finally:
            modeling_llama.apply_rotary_pos_emb = rotate
            for hook in hooks:
                hook.remove()


class HfLlamaAutocast(HfLlama):
    """The backend: `open` a session on a configuration."""

    name = "hf-llama-autocast"

    def open(self, config: RunConfig) -> AutocastSession:
        return AutocastSession(config)


def _is(out: object) -> bool:
    return isinstance(out, torch.Tensor)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()

"""Next-token logits of a run's weights, with a KV cache or without: the model of torch_backend/model.py, run eagerly.

The cache is a tap. The model shows it the keys, turned by their position, and the values of the new tokens on their
way, and goes on with what the tap gives back: those of all tokens. Nothing of the model is written a second time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lockstep.core.components.precision import FORMATS
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import AttentionConfig, CompileConfig, RecomputeConfig, RunConfig
from lockstep.core.model.families import traits_of
from lockstep.torch_backend.device import resolve_device
from lockstep.torch_backend.model import Tap, Transformer, no_tap
from lockstep.torch_backend.precision import policy_of
from lockstep.torch_backend.switches import Switches

# Keys are what attention reads: turned ones, or those of a family without rotations.
KEYS, UNTURNED, VALUES = ".attn.k_rope", ".attn.k", ".attn.v"


class Cache:
    """Keys, (1, S, K, E) or (1, S, K·E), and values (1, S, K·E) of every block, in the dtype that attention takes."""

    def __init__(self, length: int, dtype: torch.dtype, rotary: bool = True) -> None:
        self._length, self._dtype, self._keys = length, dtype, KEYS if rotary else UNTURNED
        self._held: dict[str, Tensor] = {}

    def tap(self, start: int) -> Tap:
        """Return the tap of a pass over tokens that stand at `start` and after it."""

        def keep(name: str, new: Tensor) -> Tensor:
            if not name.endswith((self._keys, VALUES)):
                return new
            if name not in self._held:
                shape = (1, self._length, *new.shape[2:])
                self._held[name] = torch.zeros(shape, dtype=self._dtype, device=new.device)
            stop = start + new.shape[1]
            self._held[name][:, start:stop] = new
            return self._held[name][:, :stop]

        return keep


class Decoder:
    """A decoder: the model of a run, which returns the logits of the next token.

    The program is never compiled, as lengths differ from call to call. Attention runs by the kernel that `auto` stands
    for, cuDNN's apart, which would plan anew for every length. Layers in FP8 are computed under the policy of the rest
    (bf16), as their scales belong to all tokens at once, and tf32 on the CPU as fp32.

    window: tokens that the model was made for. policy: the precision in force. device: where it runs.
    """

    cache_class = Cache

    def __init__(
        self, config: RunConfig, params: Mapping[str, np.ndarray | Tensor], device: str = "auto", cached: bool = True
    ) -> None:
        """Put the weights on the device: auto, cpu, cuda. Weights that are there in the stream dtype are not copied.

        Raises UserError if the device is not there.
        """
        operand = config.precision.operand
        if FORMATS[operand].as_read and (device == "cpu" or not torch.cuda.is_available()):
            operand = "fp32"
        eager = {
            "device": device,
            "deterministic": True,  # leaves out cuDNN's attention
            "precision": config.precision.model_copy(update={"policy": operand}),
            "attention": AttentionConfig(),
            "recompute": RecomputeConfig(),
            "compile": CompileConfig(enabled=False),
        }
        config = config.model_copy(update=eager)
        self.device = resolve_device(config)
        config = settled(config, self.device.type)
        self._switches = Switches(operand, self.device)
        self._switches.set()
        self.policy = policy_of(config)
        with torch.device("meta"):
            self._model = Transformer(config)
        self._model.place_rope(self.device)
        weights = {name: torch.as_tensor(p).to(self.device, self.policy.stream) for name, p in params.items()}
        self._model.load_state_dict(weights, assign=True)
        self.window = len(self._model.cos)
        rotary = traits_of(config.model).rotary
        self._cache = self.cache_class(self.window, self.policy.operand, rotary) if cached else None
        # The tokens whose keys and values are in the cache.
        self._tokens = np.zeros(0, np.int32)

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits (V,) of the token after `tokens`, int32 (n,), 1 ≤ n ≤ window: one document, from position 0.

        With the cache only the last token is computed, where the others are those of the call before; else all are.
        """
        if self._cache is None:
            return self._logits(tokens, 0, no_tap)
        before = len(tokens) - 1
        is_next = 0 < before <= len(self._tokens) and np.array_equal(self._tokens[:before], tokens[:before])
        start = before if is_next else 0
        self._tokens = tokens.copy()
        return self._logits(tokens, start, self._cache.tap(start))

    def _logits(self, tokens: np.ndarray, start: int, tap: Tap) -> np.ndarray:
        """Return logits after the last token, from a pass over the tokens from `start` on: all, or the last alone."""
        model, stop = self._model, len(tokens)
        self._switches.require()
        with torch.inference_mode():
            rope = model.places(stop, None, self.policy, start)
            ids = torch.tensor(tokens[None, start:], dtype=torch.long, device=self.device)
            x_BSD = model.trunk_at(ids, rope, self.policy, tap)[:, -1:]
            logits_V = model.cap(model.logits(x_BSD, self.policy)[0, 0].to(self.policy.stream))
            logits: np.ndarray = logits_V.cpu().numpy()
        return logits

"""Next-token logits from a run's weights, with or without a key-value cache, by torch_backend/model.py in eager mode.

The cache is a tap. The tap receives the rotated keys and the values of the new tokens, stores them, and returns those
of all tokens, with which the model continues. So the model's code is not repeated here.
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

# Taps of the keys that attention reads: rotated ones, or plain ones in a family without RoPE.
KEYS, UNTURNED, VALUES = ".attn.k_rope", ".attn.k", ".attn.v"


class Cache:
    """Keys, (1, S, K, E) or (1, S, K·E), and values (1, S, K·E) of every block, in the operand dtype."""

    def __init__(self, length: int, dtype: torch.dtype, rotary: bool = True) -> None:
        self._length, self._dtype, self._keys = length, dtype, KEYS if rotary else UNTURNED
        self._held: dict[str, Tensor] = {}

    def tap(self, start: int) -> Tap:
        """Return the tap for a pass over tokens at the positions `start` and after."""

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
    """The model of a run, prepared to compute the logits of the next token.

    The program is not compiled, because lengths change from call to call. Attention uses the kernel of `auto`, except
    cuDNN's, which would plan a kernel for every length. Layers in FP8 are computed in bf16, because an FP8 scale
    depends on all tokens. tf32 on the CPU is computed as fp32.

    window: the largest number of tokens. policy: the precision in force. device: the device of the model.
    """

    cache_class = Cache

    def __init__(
        self, config: RunConfig, params: Mapping[str, np.ndarray | Tensor], device: str = "auto", cached: bool = True
    ) -> None:
        """Build the model with weights `params` (canonical name → array or tensor) on a device: auto, cpu or cuda.

        Tensors that are on the device in the stream dtype are not copied. cached: use a key-value cache. Raises
        UserError if the device is missing.
        """
        operand = config.precision.operand
        if FORMATS[operand].as_read and (device == "cpu" or not torch.cuda.is_available()):
            operand = "fp32"
        eager = {
            "device": device,
            "deterministic": True,  # excludes cuDNN's attention
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
        # Tokens with keys and values in the cache.
        self._tokens = np.zeros(0, np.int32)

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits (V,) of the token after `tokens`, int32 (n,), 1 ≤ n ≤ window: one document, from position 0.

        If the cache has all tokens but the last, only the last token is computed; otherwise all are.
        """
        if self._cache is None:
            return self._logits(tokens, 0, no_tap)
        before = len(tokens) - 1
        is_next = 0 < before <= len(self._tokens) and np.array_equal(self._tokens[:before], tokens[:before])
        start = before if is_next else 0
        self._tokens = tokens.copy()
        return self._logits(tokens, start, self._cache.tap(start))

    def _logits(self, tokens: np.ndarray, start: int, tap: Tap) -> np.ndarray:
        """Return logits (V,) after the last token, from a pass over the tokens from position `start` on."""
        model, stop = self._model, len(tokens)
        self._switches.require()
        with torch.inference_mode():
            rope = model.places(stop, None, self.policy, start)
            ids = torch.tensor(tokens[None, start:], dtype=torch.long, device=self.device)
            x_BSD = model.trunk_at(ids, rope, self.policy, tap)[:, -1:]
            logits_V = model.cap(model.logits(x_BSD, self.policy)[0, 0].to(self.policy.stream))
            logits: np.ndarray = logits_V.cpu().numpy()
        return logits

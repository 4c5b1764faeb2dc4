"""Faults in sampling, mostly in the KV cache; training steps and evaluation are right."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Tap
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.generate import KEYS, VALUES, Cache, Decoder


def sampling_with(decoder: type[Decoder]) -> type[TorchSession]:
    """Return a session class that samples with this decoder."""

    class Session(TorchSession):
        decoder_class = decoder

    return Session


class _BehindCache(Cache):
    def tap(self, start: int) -> Tap:
        right = super().tap(start)

        def keep(name: str, new: Tensor) -> Tensor:
            found = right(name, new)
            return found[:, : max(start, 1)] if start and name.endswith((KEYS, VALUES)) else found

        return keep


class _BehindDecoder(Decoder):
    cache_class = _BehindCache


class CacheOnePlaceBehind(TorchBackend):
    """The newest token's keys and values are stored and not seen."""

    session_class = sampling_with(_BehindDecoder)


class _StillDecoder(Decoder):
    def _logits(self, tokens: np.ndarray, start: int, tap: Tap) -> np.ndarray:
        model = self._model
        kept = model.cos, model.sin
        model.cos, model.sin = (table.roll(start, 0) for table in kept)
        try:
            return super()._logits(tokens, start, tap)
        finally:
            model.cos, model.sin = kept


class RopeNotAdvanced(TorchBackend):
    """A token that is computed alone is rotated as the first one."""

    session_class = sampling_with(_StillDecoder)


class _StaleCache(Cache):
    def tap(self, start: int) -> Tap:
        right = super().tap(start)

        def keep(name: str, new: Tensor) -> Tensor:
            stays = start and name.endswith(VALUES)
            return right(name, self._held[name][:, start - 1 : start].to(new.dtype) if stays else new)

        return keep


class _StaleDecoder(Decoder):
    cache_class = _StaleCache


class ValuesStayInTheCache(TorchBackend):
    """The values of a token that is computed alone are those of the one before it."""

    session_class = sampling_with(_StaleDecoder)


class _OtherHeadCache(Cache):
    def tap(self, start: int) -> Tap:
        right = super().tap(start)

        def keep(name: str, new: Tensor) -> Tensor:
            return right(name, new.roll(1, 2) if start and name.endswith(KEYS) else new)

        return keep


class _OtherHeadDecoder(Decoder):
    cache_class = _OtherHeadCache


class KeysOfAnotherHead(TorchBackend):
    """Keys of a token that is computed alone are stored under another head."""

    session_class = sampling_with(_OtherHeadDecoder)


class _PagedCache(Cache):
    def tap(self, start: int) -> Tap:
        right = super().tap(start)

        def keep(name: str, new: Tensor) -> Tensor:
            lost = start and start % 16 == 0 and name.endswith((KEYS, VALUES))
            return right(name, torch.zeros_like(new) if lost else new)

        return keep


class _PagedDecoder(Decoder):
    cache_class = _PagedCache


class FirstTokenOfAPageLost(TorchBackend):
    """The first token of a page of 16, computed alone, is written to the previous page, which is full."""

    session_class = sampling_with(_PagedDecoder)


class _TrustingDecoder(Decoder):
    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        assert self._cache is not None
        before = len(tokens) - 1
        start = before if 0 < before <= len(self._tokens) else 0
        self._tokens = tokens.copy()
        return self._logits(tokens, start, self._cache.tap(start))


class CacheTrustedByItsLength(TorchBackend):
    """A second prompt that is not longer than the first reads the first one's keys and values."""

    session_class = sampling_with(_TrustingDecoder)


class _ScalingSession(TorchSession):
    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        return super().next_token_logits(tokens) * np.float32(1.1)


class SamplesAtAnotherTemperature(TorchBackend):
    """A run samples at a temperature of 1 / 1.1, since its logits are scaled by 1.1; `lockstep sample` is right."""

    session_class = _ScalingSession


class _BehindSession(TorchSession):
    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        return super().next_token_logits(tokens[: max(len(tokens) - 1, 1)])


class SamplesFollowTheTokenBefore(TorchBackend):
    """A run's samples continue from the second to last token; `lockstep sample` is right."""

    session_class = _BehindSession

"""Text written by the model from a prompt, one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def continue_tokens(
    next_logits: Callable[[np.ndarray], np.ndarray],
    prompt: np.ndarray,
    count: int,
    window: int,
    seed: int,
    temperature: float = 0.8,
) -> np.ndarray:
    """Return `count` tokens after `prompt`, int32, from softmax(logits / temperature) over the last `window` tokens.

    Drawn by Gumbel's trick (argmax of logits / temperature − log(−log u)) from a Philox stream of the seed. An empty
    prompt raises ValueError.
    """
    if len(prompt) == 0:
        raise ValueError("a prompt needs at least one token")
    draw = np.random.Generator(np.random.Philox(key=seed))
    tokens = prompt.astype(np.int32)
    for _ in range(count):
        logits = next_logits(tokens[-window:]).astype(np.float64) / temperature
        tokens = np.append(tokens, np.int32(np.argmax(logits + draw.gumbel(size=logits.shape))))
    return tokens[len(prompt) :]

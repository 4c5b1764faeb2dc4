"""Score each token for evaluation. Twin: jax_backend/tools/scores.py."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.torch_backend.loss import negative_log_likelihood
from lockstep.torch_backend.model import Transformer, no_tap
from lockstep.torch_backend.precision import Policy


def scores(
    model: Transformer, chunk: int, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy, *documents_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """Return per-token NLL (B, S) without z-loss, and bool (B, S): the most likely token is the target.

    Logits are computed for `chunk` tokens at a time, with any loss head of the run.
    """
    x_ND = model.trunk(tokens_BS, policy, no_tap, *documents_BS).flatten(0, 1)
    parts = []
    for x, targets in zip(x_ND.split(chunk), targets_BS.flatten().split(chunk), strict=True):
        logits = model.cap(model.logits(x[None], policy)[0])
        parts.append((negative_log_likelihood(logits, targets), logits.argmax(-1) == targets))
    nll, top1 = (torch.cat(each).unflatten(0, targets_BS.shape) for each in zip(*parts, strict=True))
    return nll, top1

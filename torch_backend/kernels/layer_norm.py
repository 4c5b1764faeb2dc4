"""LayerNorm (Ba et al. 2016). Twin: jax_backend/kernels/layer_norm.py."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x − mean) / √(var + eps) · gain + bias, by torch's own kernel: x (…, D), gain and bias (D,)."""
    if x.dtype == gain.dtype:
        return F.layer_norm(x, gain.shape, gain, bias, eps)
    # In `evaluate` under another policy than the run's, the dtypes may differ; the kernel does not promote dtypes.
    return F.layer_norm(x, gain.shape, None, None, eps) * gain + bias

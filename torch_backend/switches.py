"""Torch's switches that change precision: a session sets them as its policy declares, and verifies them later.

The switches are global to the process. A container, a library or a user's script may set them: Accelerate allows TF32
if it compiles, and NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE. A session sets all switches when it opens,
and reads them again before each micro-batch, each update and each program of a check.

If a switch has changed, the run ends. The session does not set it back: steps since the change may have been computed
in another precision than declared, and the same code may change it again. Two sessions of one process may declare
different values (a TF32 trainer and its FP32 reference). If the values of another session are in force, a session sets
its own again.

With reduced-precision reductions, cuBLAS may round the partial sums of a product to bf16 or FP16; its default allows
this. They are disabled here. Split-K stays allowed: without such reductions it only changes the order of FP32 sums.

`set_float32_matmul_precision` writes the precision of matrix products, because it keeps torch's older and newer
switches consistent. The newer switches are read: the older ones raise an error once a newer one was set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.core.components.precision import POLICIES
from lockstep.core.errors import UserError

Values = dict[str, Any]
# Any, because torch's annotations of these modules are incomplete.
BACKENDS: Any = torch.backends
# Kinds of devices that have a switch for autocast.
AUTOCAST = "cpu", "cuda"

# Options of torch.compile that environment variables could otherwise change (torch/_inductor/config.py).
INDUCTOR: Mapping[str, Any] = {
    "use_fast_math": False,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
}
# Environment variables that oneDNN reads once. They allow bf16 in FP32 products on the CPU, whatever torch's switches
# are (oneDNN developer guide, "Primitive Attributes: floating-point math mode").
ONEDNN = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
# With the value 0, NVIDIA's libraries never use TF32, whatever a program requests. No other value is documented.
NVIDIA = "NVIDIA_TF32_OVERRIDE"

# The values that a session of this process set last.
_last: Values = {}


class Switches:
    """The switches of a session. policy: name of its precision policy. device: its device."""

    def __init__(self, policy: str, device: torch.device) -> None:
        self.policy, self._device = policy, device
        products = "tf32" if POLICIES[policy].on_tensor_cores else "ieee"
        cublas = "torch.backends.cuda.matmul."
        self.declared: Values = {
            f"{cublas}fp32_precision": products,
            "torch.backends.mkldnn.matmul.fp32_precision": products,
            "torch.backends.cudnn.conv.fp32_precision": products,
            "torch.backends.cudnn.rnn.fp32_precision": products,
            f"{cublas}allow_bf16_reduced_precision_reduction": False,
            f"{cublas}allow_bf16_reduced_precision_reduction_split_k": True,
            f"{cublas}allow_fp16_reduced_precision_reduction": False,
            f"{cublas}allow_fp16_reduced_precision_reduction_split_k": True,
            f"{cublas}allow_fp16_accumulation": False,
            "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": False,
            **{f"torch.is_autocast_enabled('{kind}')": False for kind in AUTOCAST},
            "torch.set_flush_denormal": False,
        }

    def read(self) -> Values:
        """Return the values in force, by the switch's name."""
        cuda, cudnn = BACKENDS.cuda, BACKENDS.cudnn
        found = (
            cuda.matmul.fp32_precision,
            BACKENDS.mkldnn.matmul.fp32_precision,
            cudnn.conv.fp32_precision,
            cudnn.rnn.fp32_precision,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction_split_k,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_reduced_precision_reduction_split_k,
            cuda.matmul.allow_fp16_accumulation,
            cuda.fp16_bf16_reduction_math_sdp_allowed(),
            *map(torch.is_autocast_enabled, AUTOCAST),
            _flushes(),
        )
        return dict(zip(self.declared, found, strict=True))

    def set(self) -> None:
        """Set all switches. Raises UserError if one does not keep its value, or if the environment overrides one."""
        global _last
        check_environment(self.policy, self._device)
        tf32, cuda, cudnn = POLICIES[self.policy].on_tensor_cores, BACKENDS.cuda, BACKENDS.cudnn
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn.allow_tf32 = tf32
        for operation in (cudnn.conv, cudnn.rnn):
            operation.fp32_precision = "tf32" if tf32 else "ieee"
        cuda.matmul.allow_bf16_reduced_precision_reduction = (False, True)
        cuda.matmul.allow_fp16_reduced_precision_reduction = (False, True)
        cuda.matmul.allow_fp16_accumulation = False
        cuda.allow_fp16_bf16_reduction_math_sdp(False)
        for kind in AUTOCAST:
            torch.set_autocast_enabled(kind, False)
        if _flushes():
            torch.set_flush_denormal(False)
        _last = self.read()
        self._require("could not be set to it")

    def require(self) -> None:
        """Raise UserError if a switch has changed since `set`, except by the `set` of another session."""
        found = self.read()
        if found != self.declared and found == _last:
            self.set()
        else:
            self._require("something in this process changed it after the run was opened", found)

    def _require(self, why: str, found: Values | None = None) -> None:
        for name, value in (found or self.read()).items():
            if value != (due := self.declared[name]):
                raise UserError(f"{name} is {value!r}, and precision.policy = '{self.policy}' declares {due!r}: {why}")


def _flushes() -> bool:
    """Return whether this thread flushes subnormal numbers to 0, as after `torch.set_flush_denormal(True)`."""
    return float.fromhex("0x1p-1074") * 1.0 == 0.0


def check_environment(policy: str, device: torch.device) -> None:
    """Raise UserError if an environment variable sets another precision in a library than a policy declares."""
    for name in ONEDNN:
        if (found := os.environ.get(name, "").upper()) not in ("", "STRICT"):
            raise UserError(
                f"{name}={found}: oneDNN would make FP32 products of narrower numbers than precision.policy = "
                f"'{policy}' declares; unset it"
            )
    found = os.environ.get(NVIDIA, "")
    if device.type == "cuda" and found and (found != "0" or POLICIES[policy].on_tensor_cores):
        what = "forbids TF32" if found == "0" else "may allow TF32"
        raise UserError(f"{NVIDIA}={found} {what}, and precision.policy = '{policy}' declares otherwise; unset it")

"""The device of the reference: JAX's own choice, or the GPU within a share of its memory.

JAX takes its settings when it first searches for devices, once for a process.
"""

from __future__ import annotations

import os
import subprocess

import jax

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.plan.checks import reference_share

# XLA times kernels to choose one, which takes minutes in a check's first programs and gives other choices in each
# process.
FLAGS, NO_TRIALS = "XLA_FLAGS", "--xla_gpu_autotune_level=0"
# The share of a GPU's memory that XLA's allocator may take (jaxlib/xla_client.py); the second name is the older one.
SHARE, OLDER = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
ASK = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
MIB = 1 << 20


def use_device(config: RunConfig) -> None:
    """Move JAX to the GPU, if `parity.reference_device` is `cuda`, within the memory that `parity.device_gb` sets.

    With "cpu" JAX chooses: the CPU under the command `lockstep`, unless JAX_PLATFORMS names another.

    Raises UserError if there is no GPU, or JAX cannot use it or already uses another device in this process.
    """
    if config.parity.reference_device == "cpu":
        return
    count = config.parity.reference_devices
    share = reference_share(config) / (_smallest_memory(count) * count)
    if not {SHARE, OLDER} & os.environ.keys():
        os.environ[SHARE] = f"{min(share, 0.95):.6f}"
    if NO_TRIALS.partition("=")[0] not in (given := os.environ.get(FLAGS, "")):
        os.environ[FLAGS] = f"{given} {NO_TRIALS}".strip()
    # Each unused device would hold a context of its own.
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(count))))
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        said = next(iter(str(error).splitlines()), "")
        raise UserError(f"parity.reference_device = 'cuda', and JAX has no GPU in this process: {said}") from error


def _smallest_memory(count: int) -> float:
    """Return bytes of the smallest of the first `count` GPUs of this process. Raises UserError if there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={','.join(visible.split(',')[:count])}"] if visible else []
    try:
        done = subprocess.run([*ASK, *chosen], capture_output=True, text=True, timeout=60, check=True)
        found = [float(line) * MIB for line in done.stdout.splitlines()[:count]]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = f"nvidia-smi does not report the GPU's memory ({type(error).__name__})"
        raise UserError(f"parity.reference_device = 'cuda': {said}") from error
    if len(found) < count or visible == "":
        seen = 0 if visible == "" else len(found)
        raise UserError(f"parity.reference_device = 'cuda' needs {count} GPUs, and nvidia-smi lists {seen}")
    return min(found)

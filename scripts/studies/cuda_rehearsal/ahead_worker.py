"""Run one step of a configuration above the stand-in, which fills Inductor's cache. Started by ahead.py.

The configuration is read as JSON from stdin. The last line has the number of compiled graphs and of those in the cache.
torch 2.11 does not cache CUDA graphs that recompute attention, since they hold a generator's state
(`graphsafe_run_with_rng_state`); torch 2.13 does.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch._inductor.config

from lockstep.core.config.schema import RunConfig
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.bench import random_batches

CUDNN = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"


def without_cudnn() -> torch.library.Library:
    """Replace cuDNN's attention, which needs a driver, by a function that returns uninitialised tensors.

    They have the shapes and strides for which the surrounding programs are compiled. Valid while the result is kept.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in CUDNN:
        library.impl(name, _undrawn(getattr(torch.ops.aten, name).default), "CUDA")
    return library


def _undrawn(operator: Any) -> Any:
    def give(*arguments: Any, **options: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            outputs = operator(*fake, **options)
        return tuple(
            torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)
            if isinstance(o, torch.Tensor)
            else o
            for o in outputs
        )

    return give


def main() -> None:
    """Read the configuration and run the step."""
    config = RunConfig.model_validate(json.load(sys.stdin))
    # Values have no effect here, and drawing a billion of them takes half a minute.
    TorchSession._initialise = lambda self: None  # type: ignore[method-assign]
    # Inductor times variants of a kernel to choose one. Here the choice is random, so the cache must not keep it for a
    # GPU.
    torch._inductor.config.autotune_local_cache = False
    kept = without_cudnn()
    TorchBackend().open_rank(config).step(random_batches(config, 1)[0])
    del kept
    found = torch._dynamo.utils.counters["inductor"]
    hit, kept_now, refused = (found[f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass"))
    print(f"{hit} graphs were in the cache, {kept_now} are now, {refused} cannot be kept")


if __name__ == "__main__":
    main()

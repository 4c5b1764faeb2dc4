"""Make one step of a configuration above the stand-in: what it compiles stays in Inductor's cache. Started by ahead.py.

The configuration is read as JSON from the input. The last line has how many graphs were compiled, and how many of them
the cache keeps: torch 2.11 refuses graphs for CUDA that compute an attention again, since they hold the state of a
generator (`graphsafe_run_with_rng_state`); torch 2.13 keeps them.
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
    """Replace cuDNN's attention, which needs a driver, by one that returns tensors which nothing computed.

    They have the shapes and strides for which the programs around it are compiled. Valid as long as the result is kept.
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
    """Read the configuration, make the step."""
    config = RunConfig.model_validate(json.load(sys.stdin))
    # Values decide nothing here, and a billion of them take half a minute to draw.
    TorchSession._initialise = lambda self: None  # type: ignore[method-assign]
    # Inductor times variants of a kernel to choose one, which is chance here: a GPU must not find that choice.
    torch._inductor.config.autotune_local_cache = False
    kept = without_cudnn()
    TorchBackend().open_rank(config).step(random_batches(config, 1)[0])
    del kept
    found = torch._dynamo.utils.counters["inductor"]
    hit, kept_now, refused = (found[f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass"))
    print(f"{hit} graphs were in the cache, {kept_now} are now, {refused} cannot be kept")


if __name__ == "__main__":
    main()

"""Lockstep: a language model pretrains in PyTorch while an independent JAX implementation checks the step.

This package is the one import name. In a checkout it holds links to the folders of the repository; installed, the
folders themselves. `watch` checks a training loop of one's own, `assert_honest` a kernel, `ModuleCandidate` makes a
candidate of a module; `python -m lockstep` is the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.core.parity.honest.report import NotHonest as NotHonest
    from lockstep.core.parity.watch.api import Disagreed as Disagreed
    from lockstep.core.parity.watch.api import Watcher as Watcher
    from lockstep.family import from_hf as from_hf
    from lockstep.honest import assert_honest as assert_honest
    from lockstep.torch_backend.candidate.hugging_face import HuggingFaceCandidate as HuggingFaceCandidate
    from lockstep.torch_backend.candidate.layout import fused as fused
    from lockstep.torch_backend.candidate.litgpt import LitGptCandidate as LitGptCandidate
    from lockstep.torch_backend.candidate.module import ModuleCandidate as ModuleCandidate
    from lockstep.torch_backend.watch.adapters.accelerate import watch_accelerate as watch_accelerate
    from lockstep.torch_backend.watch.adapters.lightning import watch_lightning as watch_lightning
    from lockstep.torch_backend.watch.adapters.torchtitan import watch_torchtitan as watch_torchtitan
    from lockstep.torch_backend.watch.adapters.trainer import watch_trainer as watch_trainer
    from lockstep.torch_backend.watch.api import watch as watch
    from lockstep.torch_backend.watch.recompute import watch_operation as watch_operation

__all__ = [
    "Disagreed",
    "HuggingFaceCandidate",
    "LitGptCandidate",
    "ModuleCandidate",
    "NotHonest",
    "Watcher",
    "assert_honest",
    "from_hf",
    "fused",
    "watch",
    "watch_accelerate",
    "watch_lightning",
    "watch_operation",
    "watch_torchtitan",
    "watch_trainer",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing one part of Lockstep does not load the others."""
    if name.startswith("watch"):
        from lockstep.core.parity.watch.formulas import offer

        offer(_jax_formulas)
    if name == "watch":
        from lockstep.torch_backend.watch.api import watch

        return watch
    if name == "watch_operation":
        from lockstep.torch_backend.watch.recompute import watch_operation

        return watch_operation
    if name == "watch_accelerate":
        from lockstep.torch_backend.watch.adapters.accelerate import watch_accelerate

        return watch_accelerate
    if name == "watch_lightning":
        from lockstep.torch_backend.watch.adapters.lightning import watch_lightning

        return watch_lightning
    if name == "watch_torchtitan":
        from lockstep.torch_backend.watch.adapters.torchtitan import watch_torchtitan

        return watch_torchtitan
    if name == "watch_trainer":
        from lockstep.torch_backend.watch.adapters.trainer import watch_trainer

        return watch_trainer
    if name == "ModuleCandidate":
        from lockstep.torch_backend.candidate.module import ModuleCandidate

        return ModuleCandidate
    if name == "fused":
        from lockstep.torch_backend.candidate.layout import fused

        return fused
    if name == "HuggingFaceCandidate":
        from lockstep.torch_backend.candidate.hugging_face import HuggingFaceCandidate

        return HuggingFaceCandidate
    if name == "LitGptCandidate":
        from lockstep.torch_backend.candidate.litgpt import LitGptCandidate

        return LitGptCandidate
    if name == "from_hf":
        from lockstep.family import from_hf

        return from_hf
    if name in ("NotHonest", "assert_honest"):
        from lockstep import honest

        return getattr(honest, name)
    if name in __all__:
        from lockstep.core.parity.watch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _jax_formulas() -> Mapping[str, Callable[..., Any]]:
    """Return JAX's formulas of torch's operations, without a change of JAX's settings for the process."""
    import jax

    config: Any = jax.config
    before = {key: getattr(config, key) for key in ("jax_enable_x64", "jax_default_matmul_precision")}
    from lockstep.jax_backend.operations import OPERATIONS

    for key, value in before.items():
        config.update(key, value)
    return OPERATIONS

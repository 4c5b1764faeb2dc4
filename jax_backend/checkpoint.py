"""Write the reference's state into a checkpoint's folder and read it back, by orbax.

Twin: torch_backend/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import PARAMS
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.groups import moment_names
from lockstep.core.model.names import parameter_shapes

# Arrays by kind and parameter.
Trees = Mapping[str, Mapping[str, Any]]
# The subfolder of a checkpoint into which orbax writes; orbax creates it.
FOLDER = "orbax"


class WritingJax:
    """A state that is being written into a folder. Its arrays were copied to host memory at creation."""

    format = "orbax"

    def __init__(self, step: int, scalars: Mapping[str, float], tree: Trees, folder: Path) -> None:
        import orbax.checkpoint as ocp

        self.step = step
        self.scalars: Mapping[str, float] = dict(scalars)
        flat = {f"{kind}/{name}": array for kind, by_name in tree.items() for name, array in by_name.items()}
        self._odd = [name for name, array in flat.items() if not bool(jnp.isfinite(array).all())]
        self._checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        if not self._odd:
            self._checkpointer.save(folder.absolute() / FOLDER, args=ocp.args.StandardSave(dict(tree)))

    def not_finite(self) -> Sequence[str]:
        """Return names of arrays, by KIND/PARAMETER."""
        return self._odd

    def wait(self) -> None:
        """Block until orbax has written everything. Raises OSError if the disk refuses."""
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:  # tensorstore's errors, which are ValueErrors, and exceptions of threads
            raise OSError(next(iter(str(error).splitlines()), type(error).__name__)) from error
        finally:
            self._checkpointer.close()


def writing(state: State, folder: Path) -> WritingJax:
    """Write a canonical state into a folder, as a session writes its own; return the write in progress."""
    return WritingJax(state.step, state.scalars, {PARAMS: state.params, **state.optimizer}, folder)


def read_state(folder: Path, config: RunConfig) -> State:
    """Read a state as `read` does, for a run of this configuration."""
    shapes = parameter_shapes(config.model)
    dtype = np.float64 if config.precision.exact else np.float32
    kinds = {PARAMS: list(shapes), **moment_names(config)}
    return read(folder, {kind: {n: np.empty(shapes[n], dtype) for n in names} for kind, names in kinds.items()})


def read(folder: Path, like: Trees) -> State:
    """Read the state that orbax wrote into a checkpoint's folder; step and scalars are not in it.

    like: arrays by kind and parameter, for their shapes and dtypes. Raises ValueError if it is another tree.
    """
    import orbax.checkpoint as ocp

    target = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), {kind: dict(tree) for kind, tree in like.items()})
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        try:
            found = checkpointer.restore(folder.absolute() / FOLDER, args=ocp.args.StandardRestore(target))
        except (OSError, KeyError) as error:
            raise ValueError(f"{folder / FOLDER}: {next(iter(str(error).splitlines()), '')}") from error
    return State(0, found.pop(PARAMS), found)

"""A JAX loss function as the reference of `lockstep.watch`: truth in FP64, twin at the candidate's precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.snapshot import Answer

# (parameters by name, batch) → scalar loss, or (loss, outputs) with has_aux.
Loss = Callable[[dict[str, jax.Array], Any], Any]


class JaxReference:
    """Value and gradient of a loss, once as FP64 and once as the candidate rounds. Built by `reference`."""

    def __init__(self, loss: Loss, twin: Loss, has_aux: bool, device: jax.Device) -> None:
        self._loss, self._device, self._looked = loss, device, False
        self._truth, self._twin = (jax.jit(jax.value_and_grad(_named(f, has_aux), has_aux=True)) for f in (loss, twin))

    def truth(self, params: Mapping[str, np.ndarray], batch: Any) -> Answer:
        """Return loss and gradients at float64 parameters. Raises UserError if the function itself narrows FP64."""
        with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.default_device(self._device):
            if not self._looked:
                self._refuse_narrowing(params, batch)
                self._looked = True
            return _answer(self._truth(dict(params), batch))

    def twin(self, params: Mapping[str, np.ndarray], batch: Any) -> Answer:
        """Return loss and gradients at float32 parameters, with x64 disabled, so that `jnp.zeros` is FP32."""
        with jax.enable_x64(False), jax.default_matmul_precision("highest"), jax.default_device(self._device):
            return _answer(self._twin(dict(params), batch))

    def _refuse_narrowing(self, params: Mapping[str, np.ndarray], batch: Any) -> None:
        found = sorted(set(narrowings(jax.make_jaxpr(self._loss)(dict(params), batch).jaxpr)))
        if found:
            raise UserError(
                f"the JAX function narrows FP64 inside ({', '.join(found)}), so it cannot compute the truth: let "
                "it compute in the dtype of its parameters, and pass the function that casts as "
                "reference(..., twin=...)"
            )


def reference(loss: Loss, *, twin: Loss | None = None, has_aux: bool = False, device: str = "cpu") -> JaxReference:
    """Build the reference that `watch` takes, from a loss function in JAX.

    Args:
        loss: `(params, batch) -> loss`. `params` maps the model's parameter names (or those of `names=`) to arrays in
            torch's layout; `batch` is what `watcher.step` was given, torch tensors as numpy arrays. It computes in the
            dtype of its parameters: FP64 for the truth. `lambda p, b: loss(to_my_tree(p), b)` serves any other tree.
        twin: the same function at the candidate's precision, cast for cast, from float32 parameters. Default: `loss`
            itself, run in FP32. A candidate under autocast needs one.
        has_aux: the function returns `(loss, outputs)`; outputs, an array or a dict of arrays (per-token NLL, logits),
            are compared with those that `watcher.step(..., outputs=...)` is given.
        device: JAX platform on which it runs; the CPU takes no memory from the candidate's accelerator.
    """
    return JaxReference(loss, twin or loss, has_aux, jax.devices(device)[0])


def narrowings(jaxpr: Any) -> Iterator[str]:
    """Yield a program's operations from FP64 to narrower floats alone, as `convert_element_type to bfloat16`."""
    for equation in jaxpr.eqns:
        inner = list(_inner(equation.params.values()))
        for program in inner:
            yield from narrowings(program)
        reads = {v.aval.dtype for v in equation.invars if hasattr(v.aval, "dtype")}
        writes = {v.aval.dtype for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)}
        if not inner and np.dtype(np.float64) in reads and writes and np.dtype(np.float64) not in writes:
            yield f"{equation.primitive.name} to {', '.join(sorted(d.name for d in writes))}"
        if not inner and equation.primitive.name == "reduce_precision" and np.dtype(np.float64) in reads:
            yield f"reduce_precision to {equation.params['mantissa_bits']} bits"


def _inner(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, jex.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jex.Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _inner(value)


def _named(loss: Loss, has_aux: bool) -> Callable[[dict[str, jax.Array], Any], tuple[jax.Array, dict[str, jax.Array]]]:
    def f(params: dict[str, jax.Array], batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, outputs = loss(params, batch) if has_aux else (loss(params, batch), {})
        return value, outputs if isinstance(outputs, dict) else {"output": outputs}

    return f


def _answer(found: Any) -> Answer:
    (loss, outputs), grads = found
    return Answer(float(loss), {n: np.array(g) for n, g in grads.items()}, {n: np.array(x) for n, x in outputs.items()})

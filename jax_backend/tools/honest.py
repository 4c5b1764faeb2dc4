"""A JAX function as `assert_honest` calls it: core/parity/honest/function.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.honest.function import Answer, Cotangents, Given, Value
from lockstep.core.parity.watch.snapshot import array_of
from lockstep.jax_backend.watch import narrowings

__tracebackhide__ = True


class JaxFunction:
    """A JAX function on the user's inputs. keywords: the inputs go by name."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Given], keywords: bool) -> None:
        self._function, self._inputs, self._keywords = function, inputs, keywords

    def __call__(
        self, values: Mapping[str, np.ndarray], exact: bool, cotangents: Cotangents, look: bool = False
    ) -> Answer:
        """Implement `Function`. x64 is enabled for FP64's call alone, and products are never made in less."""
        with (
            jax.enable_x64(True) if exact else nullcontext(),
            jax.default_matmul_precision("highest") if exact else nullcontext(),
        ):
            return self._both_ways(values, exact, cotangents, look)

    def _both_ways(self, values: Mapping[str, np.ndarray], exact: bool, cotangents: Cotangents, look: bool) -> Answer:
        arrays = {one.name: self._argument(one, values, exact) for one in self._inputs}
        wanted = {one.name: arrays[one.name] for one in self._inputs if one.differentiate}

        def f(wanted: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
            found = named(self._call({**arrays, **wanted}))
            floating = {name: x for name, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating)}
            return floating, {name: x for name, x in found.items() if name not in floating}

        if not wanted:
            floating, others = f({})
            narrowed = _narrowed(f, {}) if look else ()
            return Answer({n: _value(x) for n, x in (floating | others).items()}, {}, narrowed=narrowed)
        floating, back, others = jax.vjp(f, wanted, has_aux=True)
        outputs = {name: _value(x) for name, x in (floating | others).items()}
        given = cotangents({name: x.shape for name, x in floating.items()})
        if any(name not in floating or floating[name].shape != g.shape for name, g in given.items()):
            return Answer(outputs, dict.fromkeys(wanted), backward=False)
        grads = {n: jnp.asarray(given[n], x.dtype) if n in given else jnp.zeros_like(x) for n, x in floating.items()}
        (found,) = back(grads)
        narrowed = _narrowed(lambda x, g: jax.vjp(f, x, has_aux=True)[1](g), wanted, grads) if look else ()
        return Answer(outputs, {name: _value(found[name]) for name in wanted}, narrowed=narrowed)

    def _call(self, arrays: Mapping[str, Any]) -> Any:
        if self._keywords:
            return self._function(**arrays)
        return self._function(*arrays.values())

    def _argument(self, one: Given, values: Mapping[str, np.ndarray], exact: bool) -> Any:
        if one.values is not None:
            return jnp.asarray(values[one.name], jnp.dtype("float64" if exact else one.dtype))
        is_array = hasattr(one.original, "dtype") and hasattr(one.original, "shape")
        return jnp.asarray(array_of(one.original)) if is_array else one.original


def _narrowed(f: Callable[..., Any], *arguments: Any) -> tuple[str, ...]:
    return tuple(sorted(set(narrowings(jax.make_jaxpr(f)(*arguments).jaxpr))))


def named(result: Any) -> dict[str, jax.Array]:
    """Return the outputs of a function by name; None is not an output.

    Raises UserError for a value that is not an array.
    """
    if isinstance(result, Mapping):
        parts = {str(key): value for key, value in result.items()}
    elif isinstance(result, (tuple, list)):
        parts = {f"output {i}": value for i, value in enumerate(result)}
    else:
        parts = {"output": result}
    for name, value in parts.items():
        if value is not None and not isinstance(value, (jax.Array, np.ndarray)):
            raise UserError(f"a function returned {type(value).__name__} as {name}; outputs are arrays")
    return {name: jnp.asarray(value) for name, value in parts.items() if value is not None}


def _value(x: jax.Array) -> Value:
    found = np.array(x)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return Value(found.astype(np.float64) if floating else found, str(x.dtype))

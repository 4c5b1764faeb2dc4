"""`assert_honest`: a kernel, forward and backward, against the honest error of the function that it stands for.

    from lockstep import assert_honest

    def test_my_norm():
        assert_honest(my_norm, plain_norm, [x, weight], dtype="bf16")

Lockstep's own check of one function: the truth is `plain` in FP64, the honest error that of `plain` at the dtype, and
bounds come from draws of it (core/parity/honest/measures.py). docs/guide/assert_honest.md is the page for users.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.honest.draws import Draws, draws_of
from lockstep.core.parity.honest.function import Function, Given, dtype_named, given
from lockstep.core.parity.honest.judge import judge
from lockstep.core.parity.honest.measures import NAMES
from lockstep.core.parity.honest.report import NotHonest, Report
from lockstep.core.parity.honest.sides import Functions
from lockstep.core.parity.watch.snapshot import array_of

__tracebackhide__ = True

Framework = Literal["torch", "jax"]
FRAMEWORKS = ("torch", "jax")


def assert_honest(
    mine: Callable[..., Any],
    plain: Callable[..., Any],
    inputs: Sequence[Any] | Mapping[str, Any],
    dtype: Any,
    *,
    grad: Any = None,
    differentiate: bool | Sequence[str | int] | None = None,
    keep: Sequence[str | int] = (),
    truth: Callable[..., Any] | None = None,
    draws: int | None = None,
    seed: int = 0,
    bounds: Mapping[str, float] | None = None,
    reason: str = "",
    mine_in: Framework | None = None,
    plain_in: Framework | None = None,
    verbose: bool = False,
) -> Report:
    """Compare `mine` with `plain`, forward and backward, and raise NotHonest unless its error is an honest one.

    Args:
        mine: the function under test: of torch (a module, an autograd.Function, a Triton kernel's wrapper) or of JAX.
        plain: the plain function of the same meaning, which computes in the dtype of its inputs.
        inputs: tensors or arrays of any shapes, by position, or by keyword in a mapping. Floating ones are rounded to
            `dtype`; integers, booleans and whatever is no array go to both as they are.
        dtype: `bf16`, `fp16` or `fp32`, or such a dtype of torch or JAX.
        grad: the gradient of the output; of several, a sequence or a mapping with None for an output that gets none.
            Default: seeded normal numbers.
        differentiate: inputs whose gradients are compared, by name or place; True for all floating ones, False for
            none. Default: those with `requires_grad` if any has it, else all floating ones.
        keep: inputs, by name or place, that keep their own dtype: an FP32 weight beside bf16 activations.
        truth: a function that can run in FP64, where `plain` cannot; called as `plain` is.
        draws: inputs beside the given ones that are tried, these included; 2 or more. Default: 8, 32 of few numbers.
        seed: of draws and random gradients. Nobody else's random state is touched.
        bounds: any of `excess`, `largest`, `row`, `column`, `gain`, in place of the derived ones.
        reason: why; it must come with `bounds`, and is printed.
        mine_in: `torch` or `jax`. Default: `torch` if an input is a torch tensor, else `jax`.
        plain_in: the same of `plain` and `truth`.
        verbose: print the report also where all is well.

    Returns the report. Raises NotHonest, an AssertionError, with the report; UserError if the arguments cannot work,
    `plain` cannot give the truth, or nothing could be compared.
    """
    name = dtype_named(dtype)
    chosen = _bounds(bounds, reason)
    if draws is not None and draws < 2:
        raise UserError(f"draws={draws}: bounds come from one draw beside others, so there are 2 at least")
    values, keywords = _by_name(inputs, mine, plain)
    default: Framework = "torch" if any(_is_torch(x) for x in values.values()) else "jax"
    places = mine_in or default, plain_in or default
    if unknown := [place for place in places if place not in FRAMEWORKS]:
        raise UserError(f"mine_in, plain_in: {unknown[0]!r} is neither 'torch' nor 'jax'")
    wanted = _differentiated(values, differentiate)
    kept = _named(values, keep, "keep")
    prepared = [given(key, x, None if key in kept else name, key in wanted) for key, x in values.items()]
    prepared += _own(mine, plain, truth, places, name, prepared, differentiate)
    numbers = sum(one.values.size for one in prepared if one.values is not None)
    count = draws or draws_of(numbers)
    pairs = ((mine, places[0]), (plain, places[1]), (truth or plain, places[1]))
    functions = Functions(*(_function(f, where, prepared, keywords) for f, where in pairs))
    prepared_draws = Draws(prepared, name, seed, _gradients(grad))
    found = judge(functions, prepared, prepared_draws, count, chosen, reason)
    report = Report(dtype if isinstance(dtype, str) else name, count, found, _notes(prepared))
    if not report.ok:
        raise NotHonest(report)
    if verbose:
        print(report)
    return report


def _function(function: Callable[..., Any], where: str, inputs: Sequence[Given], keywords: bool) -> Function:
    if where == "torch":
        from lockstep.torch_backend.tools.honest import TorchFunction

        return TorchFunction(function, inputs, keywords)
    import jax

    # Importing lockstep.jax_backend changes JAX's settings, for the process; the user's stay.
    config: Any = jax.config
    before = {key: getattr(config, key) for key in ("jax_enable_x64", "jax_default_matmul_precision")}
    from lockstep.jax_backend.tools.honest import JaxFunction

    for key, value in before.items():
        config.update(key, value)
    return JaxFunction(function, inputs, keywords)


def _is_torch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch" or hasattr(x, "requires_grad")


def _by_name(inputs: Any, mine: Callable[..., Any], plain: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Return inputs by name: a mapping's keys, else the names of plain's parameters, or of mine's."""
    if isinstance(inputs, Mapping):
        return dict(inputs), True
    if hasattr(inputs, "dtype") or not isinstance(inputs, Sequence):
        raise UserError("inputs is a sequence or a mapping of tensors; write [x] for one")
    known = _parameters(plain) or _parameters(mine)
    names = [known[i] if i < len(known) else str(i) for i in range(len(inputs))]
    return dict(zip(names, inputs, strict=True)), False


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return names of positional parameters; none of what is written in C."""
    try:
        found = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _floating(values: Mapping[str, Any]) -> set[str]:
    return {n for n, x in values.items() if hasattr(x, "shape") and "float" in str(getattr(x, "dtype", ""))}


def _named(values: Mapping[str, Any], asked: Sequence[str | int], argument: str) -> set[str]:
    """Return floating inputs by name, from names and places. Raises UserError for what is none."""
    names, floating = list(values), _floating(values)
    found = {names[one] if isinstance(one, int) and one < len(names) else str(one) for one in asked}
    if unknown := sorted(found - floating):
        there = ", ".join(sorted(floating))
        raise UserError(f"{argument}= names {unknown[0]}, which is no floating input; there are {there}")
    return found


def _differentiated(values: Mapping[str, Any], asked: bool | Sequence[str | int] | None) -> set[str]:
    floating = _floating(values)
    if asked is None:
        return {n for n in floating if getattr(values[n], "requires_grad", False)} or floating
    if isinstance(asked, bool):
        return floating if asked else set()
    return _named(values, asked, "differentiate")


def _own(
    mine: Any, plain: Any, truth: Any, places: tuple[str, str], dtype: str, inputs: Sequence[Given], asked: Any
) -> list[Given]:
    """Return a torch module's parameters and buffers, which mine and plain then share, as inputs."""
    if places != ("torch", "torch"):
        return []
    from lockstep.torch_backend.tools.honest import own_tensors

    of_mine, of_plain = own_tensors(mine), own_tensors(plain)
    if not of_mine and not of_plain:
        return []
    if of_mine.keys() != of_plain.keys() or (truth is not None and own_tensors(truth).keys() != of_mine.keys()):
        few = sorted(of_mine.keys() ^ of_plain.keys()) or ["truth"]
        raise UserError(
            f"mine and plain have different parameters ({', '.join(few[:3])}): make both modules with the same "
            "names, or hand weights in as inputs of a function"
        )
    if clash := sorted(of_mine.keys() & {one.name for one in inputs}):
        raise UserError(f"{clash[0]} is both an input and a parameter: give inputs other names, by a mapping")
    return [
        given(name, tensor, dtype, differentiated and asked is not False, parameter=True)
        for name, (tensor, differentiated) in of_mine.items()
    ]


def _gradients(grad: Any) -> dict[str, np.ndarray | None]:
    if grad is None:
        return {}
    if isinstance(grad, Mapping):
        parts = {str(key): value for key, value in grad.items()}
    elif isinstance(grad, (tuple, list)):
        parts = {f"output {i}": value for i, value in enumerate(grad)}
    else:
        parts = {"output": grad}
    return {name: None if g is None else array_of(g).astype(np.float64) for name, g in parts.items()}


def _bounds(bounds: Mapping[str, float] | None, reason: str) -> dict[str, float]:
    if not bounds:
        return {}
    if unknown := sorted(set(bounds) - set(NAMES)):
        raise UserError(f"bounds has no {unknown[0]!r}; it takes {', '.join(NAMES)}")
    if not reason.strip():
        raise UserError(
            "bounds= comes with reason=: why this kernel may be further from the truth than plain's roundings"
        )
    return {name: float(value) for name, value in bounds.items()}


def _notes(inputs: Sequence[Given]) -> tuple[str, ...]:
    if any(one.differentiate for one in inputs):
        return ()
    return ("the backward was not compared: no input is differentiated",)

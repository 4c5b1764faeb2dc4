"""Taps of a module: forward hooks record values, and hooks on the tensors record gradients.

A hook does not change what the module computes. An edge is the input of one reader; its tap needs an autograd node of
its own, whose gradient is that reader's part. Only a reader that uses its input once gets such a node: with several
uses, autograd would add the gradients in another order, with other bits.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Operation
from lockstep.core.model.names import GRADIENT, probe_shapes
from lockstep.torch_backend.candidate.layout import HEAD, Layout

View = Callable[[Tensor], Tensor]
# `path`, `path:input` or `path:output`, or a pair with a view: a function that slices or transposes their tensor.
Where = str | tuple[str, View]
Side = Literal["input", "output"]
# (name, tensor, view, own) → the tensor with which the program continues.
See = Callable[..., Any]

# Kinds of operations that are one module; its output is the tap.
MODULES = frozenset({"embedding", "norm", "centered_norm", "layer_norm", "head_norm", "linear", "logits"})
# Norms that are a single autograd node and use their input once. On a CPU, RMSNorm consists of several nodes.
ONE_NODE = (nn.LayerNorm,)
LOGITS, NLL = "logits", "nll"


def as_is(x: Tensor) -> Tensor:
    """Return the tensor unchanged: its layout is the canonical one."""
    return x


def fail(error: Exception) -> None:
    """Raise an error."""
    raise error


def heads_first(x: Tensor) -> Tensor:
    """Transpose (B, H, S, E), the layout of torch's attention, to (B, S, H, E)."""
    return x.transpose(1, 2)


@dataclass(frozen=True)
class Place:
    """The place of a tap: the input or the output of a module.

    view: converts their tensor into the canonical one. own: insert an autograd node of its own, as an edge needs.
    """

    name: str
    module: str
    side: Side
    view: View = as_is
    own: bool = False


@dataclass(frozen=True)
class Call:
    """A function whose results are taps.

    names: (tap, view) of each result, one call after another; the view converts their tensor into the canonical one.
    """

    function: Callable[..., Any]
    names: tuple[tuple[str, View], ...]


class Taps:
    """The taps of one model in one module, for which the layout or the candidate gives a place.

    hidden: the other taps, with the reason. Raises UserError for a tap or a module that does not exist.
    """

    def __init__(
        self,
        model: ModelConfig,
        module: nn.Module,
        layout: Layout,
        given: Mapping[str, Where],
        calls: Mapping[Callable[..., Any], Sequence[str]],
    ) -> None:
        self._model, self._module, self._layout = model, module, layout
        self._paths = dict(module.named_modules(remove_duplicate=False))
        self._graph = graph_of(model)
        self._places: dict[str, Place] = {}
        for name, where in given.items():
            self._given(name, where)
        self._calls = [self._call(function, names) for function, names in calls.items()]
        self._of_modules()
        known = {*self._places, *self._called, NLL, LOGITS}
        self.hidden = {tap: "no module or function is mapped to it" for tap in self._graph.taps}
        self.hidden = {tap: why for tap, why in self.hidden.items() if tap not in known}

    def _given(self, name: str, where: Where) -> None:
        path, view = (where, as_is) if isinstance(where, str) else where
        path, _, side = path.partition(":")
        if side not in ("", "input", "output"):
            raise UserError(
                f"taps: {name}: {side!r} is not an input or output of a module; write {path}:input or {path}:output"
            )
        for layer in range(self._model.layers) if "{i}" in path else (None,):
            tap, at = (self._tap(name, layer), path if layer is None else path.replace("{i}", str(layer)))
            self._require(at, f"taps: {tap}")
            self._places[tap] = Place(tap, at, "input" if side == "input" else "output", view)

    def _tap(self, name: str, layer: int | None) -> str:
        """Return the full name of a tap; inside a block, `name` may omit `blocks.{i}.`.

        Raises UserError if there is no such tap.
        """
        tap = name if layer is None else name.replace("{i}", str(layer))
        tap = tap if layer is None or tap.startswith("blocks.") else f"blocks.{layer}.{tap}"
        if tap not in self._graph.by_tap:
            near = difflib.get_close_matches(tap, self._graph.taps, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"taps: a {self._model.family} model has no tap {tap}{hint}")
        return tap

    def _require(self, path: str, of: str) -> None:
        if path not in self._paths:
            near = difflib.get_close_matches(path, self._paths, n=1)
            raise UserError(f"{of}: the model has no module {path}" + (f"; did you mean {near[0]}?" if near else ""))

    def _call(self, function: Callable[..., Any], names: Sequence[str]) -> Call:
        """Pair a function with the taps that its results are, in order; names of a block repeat for each block."""
        outside = all(name in self._graph.by_tap for name in names)
        layers = (None,) if outside else range(self._model.layers)
        taps = [self._tap(name, layer) for layer in layers for name in names]
        return Call(function, tuple((tap, self._view_of(tap)) for tap in taps))

    def _view_of(self, tap: str) -> View:
        """Return the view of a function's result: functions of heads return (B, H, S, E), as torch's attention does."""
        if len(self._graph.by_tap[tap].width) < 2:
            return as_is
        return lambda x: self._turned(heads_first(x))

    @property
    def _called(self) -> set[str]:
        return {name for call in self._calls for name, _ in call.names}

    def _turned(self, x: Tensor) -> Tensor:
        return x if self._layout.turned is None else x[..., torch.from_numpy(self._layout.turned)]

    def _of_modules(self) -> None:
        """Find the places of taps from the modules of operations: outputs, and inputs from between two modules."""
        known = {*self._places, *self._called}
        at = {one.tap: place for one in self._graph.operations if (place := self._module_of(one)) is not None}
        for one in self._graph.operations:
            if one.tap in at and one.tap not in known:
                path, columns = at[one.tap]
                self._require(path, f"modules: {one.module}")
                self._places[one.tap] = Place(one.tap, path, "output", self._view(one, columns))
        for one in self._graph.operations:
            if one.tap not in at or "x" not in one.reads:
                continue
            (path, columns), read = at[one.tap], one.reads["x"]
            if read not in known and read not in self._places and self._graph.by_tap[read].kind != "embedding":
                self._places[read] = Place(read, path, "input")
            if (edge := one.edges.get("x")) and columns is None and self._reads_once(one, self._paths[path]):
                self._places[edge] = Place(edge, path, "input", own=True)

    def _module_of(self, one: Operation) -> tuple[str, Any] | None:
        if one.kind not in MODULES:
            return None
        return self._layout.modules.get(HEAD if one.kind == "logits" else one.module or "")

    def _view(self, one: Operation, columns: Any) -> View:
        if columns is None:
            return self._turned if one.kind == "head_norm" else as_is
        picked = torch.from_numpy(columns)
        return lambda x: x[..., picked.to(x.device)]

    @staticmethod
    def _reads_once(one: Operation, module: nn.Module) -> bool:
        return one.kind in ("linear", "logits") or type(module) in ONE_NODE

    @contextmanager
    def showing(
        self, shape: tuple[int, ...], take: Callable[[str, Tensor], None], failed: Callable[[Exception], None] = fail
    ) -> Iterator[See]:
        """Call `take(name, tensor)` for each tap and for its gradient, `grad/NAME`, while the context is active.

        Yields a function that records a tensor outside all modules, by name.

        Args:
            shape: shape of the tokens, (B, S).
            take: receives the name and the tensor.
            failed: receives an error, such as a UserError for a tensor of the wrong shape; by default it is raised.
        """
        shapes = probe_shapes(self._model, shape[0], shape[1])
        begun: set[str] = set()

        def give(name: str, under: str, theirs: Tensor, view: View) -> None:
            try:
                found = view(theirs.detach())
                if found.numel() != torch.Size(shapes[name]).numel():
                    raise UserError(f"taps: {name} has shape {tuple(found.shape)} there; ours is {shapes[name]}")
                take(under, found.reshape(shapes[name]))
            except Exception as error:
                failed(error)

        def see(name: str, x: Any, view: View = as_is, own: bool = False) -> Any:
            if name in begun:  # a second forward pass, as in activation checkpointing
                return x
            begun.add(name)
            if not isinstance(x, Tensor):
                failed(UserError(f"taps: {name}: expected a tensor, got {type(x).__name__}"))
                return x
            x = x.view_as(x) if own else x
            if not own:
                give(name, name, x, view)
            if x.requires_grad:
                x.register_hook(lambda grad: give(name, GRADIENT + name, grad, view))
            return x

        with ExitStack() as stack:
            for place in self._places.values():
                hook = self._paths[place.module]
                added = _on_input(hook, place, see) if place.side == "input" else _on_output(hook, place, see)
                stack.callback(added.remove)
            for call in self._calls:
                stack.enter_context(_shown_results(call, self._module, see))
            if LOGITS not in self._places:
                root = Place(LOGITS, "", "output")
                stack.callback(_on_output(self._module, root, see).remove)
            yield see


def _on_input(module: nn.Module, place: Place, see: See) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (see(place.name, args[0], place.view, place.own), *args[1:]), kwargs
        name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), "")
        return args, {**kwargs, name: see(place.name, kwargs[name], place.view, place.own)} if name else kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_output(module: nn.Module, place: Place, see: See) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = getattr(output, LOGITS, output)
        see(place.name, found[0] if isinstance(found, tuple) and found else found, place.view)

    return module.register_forward_hook(hook)


@contextmanager
def _shown_results(call: Call, model: nn.Module, see: See) -> Iterator[None]:
    """Pass the results of the function to `see` while the context is active; the names are used in order.

    The function is replaced in the file that defines it, and in the files that define the modules of `model`.
    """
    function, names = call.function, iter(call.names)

    def shown(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        for x in found if isinstance(found, tuple) else (found,):
            for name, view in islice(names, 1):
                see(name, x, view)
        return found

    files = {function.__module__, *(type(one).__module__ for one in model.modules())}
    name = function.__name__
    holders = [sys.modules[file] for file in files if getattr(sys.modules.get(file), name, None) is function]
    try:
        for holder in holders:
            setattr(holder, name, shown)
        yield
    finally:
        for holder in holders:
            setattr(holder, name, function)

"""The map between the parameters of a candidate's module and canonical parameters, row by row.

In this file, "theirs" is the candidate's module and "ours" is the canonical model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.family import Stored
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Shape
from lockstep.core.model.names import parameter_shapes

PARTS = ("weight", "bias")
# The module of the head, also where the head's weight is the embedding's (tied).
HEAD = "lm_head"


@dataclass(frozen=True)
class Fused:
    """A module of theirs that holds one or several modules of ours. Built by `fused`."""

    ours: tuple[str, ...]
    transposed: bool = False
    by_group: bool = False
    neighbours: bool = False


def fused(*ours: str, transposed: bool = False, by_group: bool = False, neighbours: bool = False) -> Fused:
    """Describe one module of theirs: several modules of ours, rows one after another, or one of ours in another layout.

    Args:
        ours: canonical names of modules, as in `ModuleCandidate.modules`.
        transposed: their weight is (in, out), as in GPT-2's Conv1D.
        by_group: ours are q, k and v, with interleaved heads: for each key-value head its query heads, its key and its
            value, as in GPT-NeoX and old litgpt.
        neighbours: their RoPE rotates rows 2i and 2i + 1 of a head as a pair; ours rotates rows i and i + E/2.
    """
    return Fused(ours, transposed, by_group, neighbours)


@dataclass(frozen=True)
class Placed:
    """A parameter of theirs.

    rows: canonical name → the rows of their tensor that are this parameter, in our order. Each row occurs once.
    """

    theirs: str
    rows: Mapping[str, np.ndarray]
    transposed: bool = False

    @property
    def plain(self) -> bool:
        """True if their tensor is one of our parameters with the same layout."""
        return len(self.rows) == 1 and not self.transposed and not self.moved

    @property
    def moved(self) -> bool:
        """True if rows of one of our parameters are in another order."""
        return any((np.diff(rows) != 1).any() for rows in self.rows.values())

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of their tensor. shapes: canonical name → shape of our parameter."""
        shape = (sum(map(len, self.rows.values())), *shapes[next(iter(self.rows))][1:])
        return shape[::-1] if self.transposed else shape

    def to_ours(self, theirs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (canonical name, array) of each of our parameters in their tensor; a gradient or moment works alike."""
        whole = theirs.T if self.transposed else theirs
        for name, rows in self.rows.items():
            yield name, np.ascontiguousarray(whole[rows])

    def to_theirs(self, ours: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return their tensor, made from our parameters. ours: canonical name → array."""
        parts = {name: ours(name) for name in self.rows}
        first = next(iter(parts.values()))
        whole = np.empty((sum(map(len, self.rows.values())), *first.shape[1:]), first.dtype)
        for name, rows in self.rows.items():
            whole[rows] = parts[name]
        return np.ascontiguousarray(whole.T) if self.transposed else whole


@dataclass(frozen=True)
class Layout:
    """The places of a model's parameters and taps in a module of theirs.

    placed: the parameters. modules: canonical module → (path of their module, columns of its output that are ours);
    None in place of columns: all, in the same order. turned: the order of a head's dimensions where their RoPE rotates
    neighbours, else None.
    """

    placed: tuple[Placed, ...]
    modules: Mapping[str, tuple[str, np.ndarray | None]]
    turned: np.ndarray | None = None


def layout_of_stored(stored: Iterable[Stored], head: str, model: ModelConfig) -> Layout:
    """Build the layout of a family's tensors, as core/hub/families lists them. head: their name for the head."""
    shapes = parameter_shapes(model)
    placed: list[Placed] = []
    modules: dict[str, tuple[str, np.ndarray | None]] = {HEAD: (head.removesuffix(".weight"), None)}
    for one in stored:
        rows = _in_turn(one.ours, shapes)
        placed.append(Placed(one.theirs, rows, one.transposed))
        modules |= _modules_of(one.theirs, rows)
    return Layout(tuple(placed), modules)


def layout_of(given: Mapping[str, str | Sequence[str] | Fused], model: ModelConfig) -> Layout:
    """Build the layout from a map of modules (`ModuleCandidate.modules`).

    Raises UserError if the model has no such name, or if a parameter of the model does not have exactly one place.
    """
    shapes = parameter_shapes(model)
    placed: list[Placed] = []
    modules: dict[str, tuple[str, np.ndarray | None]] = {}
    turned: np.ndarray | None = None
    for path, value in given.items():
        one = value if isinstance(value, Fused) else Fused((value,) if isinstance(value, str) else tuple(value))
        for layer in range(model.layers) if "{i}" in path else (None,):
            theirs, ours = _at(path, layer), tuple(_ours(name, layer) for name in one.ours)
            if ours == (HEAD,):
                modules[HEAD] = theirs, None
            found = [*_placed(theirs, ours, one, shapes, model)]
            if not found and ours != (HEAD,):
                raise UserError(f"modules: {path!r}: {_unknown(ours, shapes, model)}")
            placed += found
            for each in found:
                modules |= _modules_of(each.theirs, each.rows)
        if one.neighbours:
            turned = _turned(model)
    held = [name for one in placed for name in one.rows]
    for name in shapes:
        if held.count(name) != 1:
            where = f"is mapped {held.count(name)} times" if name in held else "is not mapped"
            raise UserError(f"modules: each parameter of the model must be mapped exactly once, and {name} {where}")
    return Layout(tuple(placed), modules, turned)


def _at(path: str, layer: int | None) -> str:
    return path if layer is None else path.replace("{i}", str(layer))


def _ours(name: str, layer: int | None) -> str:
    """Return a canonical name; inside a block, `name` may lack `blocks.{i}.`."""
    if layer is None:
        return name
    name = name.replace("{i}", str(layer))
    return name if name.startswith("blocks.") else f"blocks.{layer}.{name}"


def _unknown(ours: Sequence[str], shapes: Mapping[str, Shape], model: ModelConfig) -> str:
    modules = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
    wrong = next((name for name in ours if name not in modules and name not in shapes), None)
    if wrong is None:
        return f"some of {', '.join(ours)} have a bias, and some have none"
    near = difflib.get_close_matches(wrong, [*modules, HEAD], n=1)
    return f"a {model.family} model has no {wrong}" + (f"; did you mean {near[0]}?" if near else "")


def _placed(
    theirs: str, ours: Sequence[str], how: Fused, shapes: Mapping[str, Shape], model: ModelConfig
) -> Iterator[Placed]:
    """Yield the weight and bias of a module; if `ours` are names of parameters, yield that parameter."""
    if all(name in shapes for name in ours):
        yield Placed(theirs, _rows(ours, how, shapes, model), how.transposed and len(shapes[ours[0]]) > 1)
        return
    for part in PARTS:
        names = tuple(f"{name}.{part}" for name in ours)
        there = [name for name in names if name in shapes]
        if there and len(there) < len(names):
            raise UserError(f"modules: {theirs!r}: {_unknown(ours, shapes, model)}")
        if there:
            transposed = how.transposed and part == "weight"
            yield Placed(f"{theirs}.{part}", _rows(names, how, shapes, model), transposed)


def _rows(names: Sequence[str], how: Fused, shapes: Mapping[str, Shape], model: ModelConfig) -> dict[str, np.ndarray]:
    rows = _by_group(names, model) if how.by_group else _in_turn(names, shapes)
    if how.neighbours:
        order, into_scores = _turned(model), graph_of(model).into_scores
        for name in rows.keys() & into_scores:
            rows[name] = rows[name].reshape(-1, model.head_dim)[:, order].ravel()
    return rows


def _turned(model: ModelConfig) -> np.ndarray:
    """Return (E,): the index of each dimension of our head in a head whose RoPE rotates neighbouring dimensions."""
    return np.arange(model.head_dim).reshape(-1, 2).T.ravel()


def _in_turn(names: Sequence[str], shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    ends = np.cumsum([shapes[name][0] for name in names])
    return {name: np.arange(end - shapes[name][0], end) for name, end in zip(names, ends, strict=True)}


def _by_group(names: Sequence[str], model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the rows of q, k and v in a tensor that has, for each key-value head, its query heads, its key, its value.

    Raises UserError unless there are three names.
    """
    if len(names) != 3:
        raise UserError(f"modules: by_group is for q, k and v, not for {', '.join(names)}")
    queries, wide = model.heads // model.kv_heads, model.head_dim
    groups = np.arange(model.kv_heads * (queries + 2) * wide).reshape(model.kv_heads, queries + 2, wide)
    parts = groups[:, :queries], groups[:, queries], groups[:, queries + 1]
    return {name: part.ravel() for name, part in zip(names, parts, strict=True)}


def _modules_of(theirs: str, rows: Mapping[str, np.ndarray]) -> dict[str, tuple[str, np.ndarray | None]]:
    path, _, part = theirs.rpartition(".")
    if part != "weight":
        return {}
    whole = len(rows) == 1 and not any((np.diff(one) != 1).any() for one in rows.values())
    return {name.removesuffix(".weight"): (path, None if whole else columns) for name, columns in rows.items()}


def parameters_there(
    model: nn.Module, placed: Sequence[Placed], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, nn.Parameter]:
    """Return their parameters by their names.

    Raises UserError if one is missing, is not mapped, is mapped twice, or has another shape than ours.
    """
    there = dict(model.named_parameters(remove_duplicate=False))
    for one in placed:
        ours = ", ".join(one.rows)
        if one.theirs not in there:
            near = difflib.get_close_matches(one.theirs, there, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"modules: {ours}: the model has no parameter {one.theirs}{hint}")
        found, due = tuple(there[one.theirs].shape), one.shape(shapes)
        if found != due:
            raise UserError(f"modules: {one.theirs} has shape {found}; of {ours} it would have {due}")
    mapped = {id(there[one.theirs]) for one in placed}
    if len(mapped) < len(placed):
        raise UserError(
            "modules: two names belong to one parameter of the model: its weights are tied, those of Lockstep are not"
        )
    if left := [name for name, p in there.items() if id(p) not in mapped]:
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        raise UserError(f"modules: the model's parameter {left[0]}{more} is not mapped")
    return {one.theirs: there[one.theirs] for one in placed}

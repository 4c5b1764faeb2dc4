"""The places of a step that a mutant can change, derived from the model's graph and the chain of a step.

Each place carries the origin that a check must name, written down before any mutant is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Graph, Operation
from lockstep.core.model.groups import moment_names
from lockstep.core.model.names import layer_of
from lockstep.core.mutate.conditions import ALWAYS, AMONG_MICRO_BATCHES, ONE_RANK, REGIONS

# Any layer is right: links of the update name the first parameter that is beyond its bound.
ANY = "any"
Origin = tuple[str, str, int | str | None]

# Kinds of places, and in words the thing that is changed there.
KINDS: dict[str, str] = {
    "forward": "what an operation gives",
    "input": "what an operation takes in, a tensor or a parameter",
    "backward": "the gradient that an operation gets for its output, or sends back through one input",
    "gradient": "a parameter's gradient, after the program made it",
    "part": "what one of several micro-batches adds to a parameter's gradient",
    "reduced": "the sum of a parameter's gradients over ranks",
    "scalar": "a number of the step",
    "moment": "a moment after the step",
    "update": "what the step adds to a parameter",
    "batch": "an array of the batch between the session and its program",
    "loader": "an array of the batch that the session is handed",
    "written": "a tensor on its way into a checkpoint",
    "read": "a tensor on its way out of a checkpoint",
    "validation": "the scores of a validation batch",
}
# These do not change the gradients: their effect is measured on the weights after the step or after the next one.
AFTER_GRADIENTS = frozenset({"moment", "update", "written", "read"})
LATER = frozenset({"moment", "written", "read"})
# Scalars that come after the gradients, and the link that each belongs to.
STEP_SCALARS: dict[str, Origin] = {
    "grad_norm": ("grad_norm", "update", None),
    "clip_coefficient": ("clip_coefficient", "update", None),
    "learning_rate": ("learning_rate", "update", None),
    "step_count": ("step_count", "update", None),
    "optimizer.lr": ("update", "update", ANY),
    "optimizer.beta1": ("moments", "update", ANY),
    "optimizer.beta2": ("moments", "update", ANY),
    "optimizer.eps": ("update", "update", ANY),
    "optimizer.weight_decay": ("update", "update", ANY),
}
# Ranks write and read a checkpoint together, and only rank 0 reports its scores.
_OF_ALL_RANKS = ("written", "read", "validation")
_OF_PROGRAM = (ALWAYS, "ones", *AMONG_MICRO_BATCHES, "from-step-3", "resumed", "compiled", "untapped")
_OF_SESSION = (ALWAYS, "from-step-3", "resumed")


@dataclass(frozen=True)
class Place:
    """A place in a step whose tensor or number can be changed.

    name, kind: as in a mutant's id. origin: stage, phase and layer that a check must name. untapped: the link that an
                untapped program which differs from the tapped one belongs to.
    axes:       of the tensor, by name; empty for a number. conditions: under which it can be changed.
    at, after:  the tap in whose passing it is changed, before or after it is shown; empty for what passes no tap.
    parameter:  the parameter that an operation reads, where that is what is changed.
    other:      the place of the same shape whose tensor `other` puts here; empty if there is none.
    integer:    its numbers are ids.
    """

    name: str
    kind: str
    origin: Origin
    axes: tuple[str, ...] = ()
    conditions: tuple[str, ...] = (ALWAYS,)
    at: str = ""
    after: bool = False
    parameter: str = ""
    other: str = ""
    integer: bool = False
    untapped: str = "gradients"

    @property
    def after_gradients(self) -> bool:
        """Return whether the step's gradients are computed before this place."""
        return self.kind in AFTER_GRADIENTS or self.name in STEP_SCALARS

    def origins(self, condition: str) -> tuple[Origin, ...]:
        """Return the origins that are right under a condition, the expected one first.

        A change that a single tapped micro-batch does not have is no link of its chain: what only the untapped program
        does is `compiler` (`gradients` if nothing is compiled), what only one among several micro-batches does is
        `accumulation`. A check that finds the operation all the same has named it better. A sum over the micro-batches
        of several ranks is a sum over micro-batches, too.
        """
        if self.kind == "reduced" or (self.kind == "part" and condition == ONE_RANK):
            return self.origin, ("accumulation", "backward", self.origin[2])
        of_operation = self.kind in ("forward", "input", "backward", "part", "gradient") or self.name == "loss"
        if condition == "untapped":
            return (self.untapped, "backward", ANY), self.origin
        if condition in AMONG_MICRO_BATCHES and of_operation:
            return ("accumulation", "backward", ANY), self.origin
        return (self.origin,)


def names(place: Origin, found: Origin) -> bool:
    """Return whether a check that named `found` has named `place`."""
    return place[:2] == found[:2] and place[2] in (ANY, found[2])


def places(config: RunConfig) -> list[Place]:
    """Return every place of a run's step, in the order of the chain.

    Inside a loss head that makes its gradients itself there is no tensor to change: what is between its input and the
    loss is left out. With several ranks, the places are those that one rank can change by itself, and what they share:
    everything else is as in a run of one.
    """
    graph = graph_of(config.model, config.attention, config.loss)
    program = tuple(c for c in _OF_PROGRAM if config.compile.enabled or c != "compiled")
    if config.train.accumulation < 4:
        program = tuple(c for c in program if c != "many-micro")
    if config.train.accumulation < 2:
        program = tuple(c for c in program if c != "last-micro")
    found = [
        *_of_operations(config, graph, program),
        *_of_loss(program),
        *_of_parameters(config, graph, program),
        *_of_step(),
        *_of_batch(program),
        Place("nll", "validation", ("evaluation", "forward", None), ("row", "position")),
    ]
    if config.train.ranks > 1:
        by_itself = [one for one in found if one.kind not in _OF_ALL_RANKS]
        found = [*map(_on_one_rank, by_itself), *_of_reduction(graph)]
    return [replace(one, untapped="compiler") for one in found] if config.compile.enabled else found


def _on_one_rank(place: Place) -> Place:
    """Return a place as the last rank alone changes it. Its state holds the change after the step.

    No operation gives what another one gave: parameters would lack a gradient, and the other ranks wait for it in vain.
    """
    origin, other = place.origin, "" if place.kind == "forward" else place.other
    if place.kind in ("gradient", "part"):
        origin = ("reduction", "backward", place.origin[2])
    elif place.kind in ("moment", "update") or place.name.startswith("optimizer."):
        origin = ("update", "update", ANY)
    return replace(place, conditions=(ONE_RANK,), origin=origin, other=other)


def _of_reduction(graph: Graph) -> Iterator[Place]:
    for name, p in graph.parameters.items():
        origin = ("reduction", "backward", layer_of(name))
        yield Place(name, "reduced", origin, _parameter_axes(p.shape), (ALWAYS, ONE_RANK))


def _axes(one: Operation) -> tuple[str, ...]:
    return ("row", "position", *(("head", "column") if len(one.width) == 2 else ("column",) * len(one.width)))


def _of_operations(config: RunConfig, graph: Graph, program: tuple[str, ...]) -> Iterator[Place]:
    fused = () if config.loss.chosen.whole else ("logits", "nll")
    by_shape: dict[tuple[int, ...], str] = {}
    regions = (*program, *REGIONS)
    for one in graph.operations:
        if one.id in fused or one.kind == "library_head":
            continue
        forward, backward = (one.id, "forward", one.layer), (one.id, "backward", one.layer)
        axes = _axes(one)
        other = by_shape.get(one.width, "")
        by_shape[one.width] = one.tap
        yield Place(one.tap, "forward", forward, axes, regions, one.tap, other=other)
        yield Place(one.tap, "backward", backward, axes, regions, one.tap)
        for role, read in one.reads.items():
            at = one.edges.get(role, read)
            into = Place(f"{one.tap}.{role}", "input", forward, _axes(graph.by_tap[read]), regions, at, after=True)
            yield into
            yield replace(into, kind="backward", origin=backward)
        for role, parameter in one.parameters.items():
            at = "logits.weight" if one.kind == "logits" else ""
            of = replace(
                Place(f"{one.tap}.{role}", "input", forward, _parameter_axes(parameter.shape), program, at, after=True),
                parameter="" if at else parameter.name,
            )
            yield of
            yield replace(of, kind="backward", origin=backward)
        if one.kind == "norm":
            yield Place(f"{one.tap}.eps", "scalar", forward)


def _parameter_axes(shape: tuple[int, ...]) -> tuple[str, ...]:
    return ("row", "column") if len(shape) == 2 else ("column",)


def _of_loss(program: tuple[str, ...]) -> Iterator[Place]:
    yield Place("loss", "forward", ("loss", "forward", None), (), program)
    yield Place("loss", "backward", ("loss", "backward", None), (), program)
    yield Place("total_weight", "scalar", ("loss", "forward", None), (), ("always", "ones", "from-step-3", "resumed"))


def _of_parameters(config: RunConfig, graph: Graph, program: tuple[str, ...]) -> Iterator[Place]:
    others: dict[str, str] = {}
    for name, p in graph.parameters.items():
        others[name] = next((n for n, o in graph.parameters.items() if n != name and o.shape == p.shape), "")
    among = tuple(c for c in AMONG_MICRO_BATCHES if c in program)
    for name, p in graph.parameters.items():
        axes, layer = _parameter_axes(p.shape), layer_of(name)
        gradients = ("gradients", "backward", layer)
        conditions = (ALWAYS, "ones", *(c for c in among if c == "many-micro"), "from-step-3", "resumed")
        yield Place(name, "gradient", gradients, axes, conditions, other=others[name])
        if among or config.train.ranks > 1:
            yield Place(name, "part", ("accumulation", "backward", layer), axes, among)
        yield Place(name, "update", ("update", "update", layer), axes, _OF_SESSION, other=others[name])
        yield from _of_checkpoint(f"params/{name}", axes)
    for kind, of in moment_names(config).items():
        for name in of:
            axes, layer = _parameter_axes(graph.parameters[name].shape), layer_of(name)
            yield Place(f"{kind}/{name}", "moment", ("moments", "update", layer), axes, _OF_SESSION)
            yield from _of_checkpoint(f"{kind}/{name}", axes)


def _of_checkpoint(name: str, axes: tuple[str, ...]) -> Iterator[Place]:
    for kind in ("written", "read"):
        yield Place(name, kind, ("checkpoint", "state", None), axes)


def _of_step() -> Iterator[Place]:
    for name, origin in STEP_SCALARS.items():
        yield Place(name, "scalar", origin, (), _OF_SESSION)


def _of_batch(program: tuple[str, ...]) -> Iterator[Place]:
    conditions = tuple(c for c in program if c not in ("compiled", "untapped"))
    # A check reads the program's inputs back from the device.
    origin: Origin = ("tokens", "data", None)
    for name in ("tokens", "targets", "weights"):
        integer = name != "weights"
        yield Place(name, "batch", origin, ("row", "position"), conditions, integer=integer)
        yield Place(name, "loader", origin, ("row", "position"), (ALWAYS, "from-step-3"), integer=integer)

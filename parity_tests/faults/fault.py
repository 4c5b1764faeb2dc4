"""Describe a planted fault: its place, the step in which it first acts, and how well it hides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.reference.stages import chain
from lockstep.torch_backend.backend import TorchBackend

Batches = Callable[[int], Batch]

COMPILED = ("fp32/compiled", "bf16/compiled")
BF16 = ("bf16/eager", "bf16/compiled")
NOT_COMPILED = ("fp32/eager", "bf16/eager")
EVERYWHERE = ("fp32/eager", "bf16/eager", *COMPILED)


@dataclass(frozen=True)
class Fault:
    """A planted fault and what a check must say of it. Expectations are written before the fault is first run.

    make:           gives the backend that is wrong; its docstring names the mechanism and where it was met. A `loader`
                    of the class turns the run's batches by step into those of a wrong loader.
    stage, phase, layer: the origin that must be named. A negative layer counts from the last, -1.
    required:       stands among those that `lockstep parity --candidate` is tried with.
    first_step:     the first step in which anything is wrong. within: in so many checks from there it must be found.
    own_weights:    acts only where every loss weight is 1.
    only_compiled:  honest when eager. backward_only: forward values equal bit for bit, some gradient is not.
    loss_moves_less_than: relative change of the loss in the first step in which it acts, or None if it may be large.
    number:         of FAULTS.md, or None for one of our own. cause: a part of the cause that must be named, or None.
    recipes:        precision policies and programs under which it can act. note: how the expected origin follows.
    settings:       of the run that it is planted in, as on the command line: dotted keys → text.
    """

    make: type[TorchBackend]
    stage: str
    phase: str = ""
    layer: int | None = None
    required: bool = False
    first_step: int = 1
    within: int = 1
    only_compiled: bool = False
    backward_only: bool = False
    own_weights: bool = False
    loss_moves_less_than: float | None = None
    number: int | None = None
    cause: str | None = None
    recipes: tuple[str, ...] = EVERYWHERE
    note: str = ""
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.phase:
            object.__setattr__(self, "phase", chain().phases[self.stage])
        if self.only_compiled:
            object.__setattr__(self, "recipes", tuple(r for r in self.recipes if r.endswith("/compiled")))

    @property
    def name(self) -> str:
        """The class's name."""
        return self.make.__name__

    @property
    def mechanism(self) -> str:
        """Return the fault in one sentence."""
        return " ".join((self.make.__doc__ or "").split())

    @property
    def loader(self) -> Callable[[Batches], Batches] | None:
        """Batches by step as they should be → as this fault hands them out; None if the data are not at fault."""
        return getattr(self.make, "loader", None)

    def configured(self, config: RunConfig) -> RunConfig:
        """Return the run with this fault's settings."""
        tree = config.model_dump()
        for key, text in self.settings.items():
            section, _, name = key.rpartition(".")
            (tree[section] if section else tree)[name] = text
        return RunConfig.model_validate(tree) if self.settings else config

    def origin(self, layers: int) -> tuple[str, str, int | None]:
        """Stage, phase and layer that must be named in a model of so many layers."""
        return self.stage, self.phase, None if self.layer is None else self.layer % layers

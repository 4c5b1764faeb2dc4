"""The description of a planted fault: its origin, the first step in which it acts, and the change of the loss."""

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
    """A planted fault, and the origin that a check must name. Write expectations before the first run of the fault.

    make:           the faulty backend's class. Its docstring describes the fault, with a public report of it if there
                    is one. If the class has `loader`, it maps the run's batches by step to those of a faulty loader.
    stage, phase, layer: the origin that a check must name. A negative layer counts from the last, which is -1.
    required:       tests run this fault through `lockstep parity --candidate` as well.
    first_step:     the first step in which anything is wrong.
    within:         the largest number of checks, from first_step on, until one finds the fault.
    own_weights:    the fault acts only if every loss weight is 1.
    only_compiled:  the eager program is right.
    backward_only:  all forward values are right bit for bit; some gradient is wrong.
    loss_moves_less_than: bound on the relative change of the loss in the first step in which the fault acts; None: no
                    bound.
    number:         the entry of FAULTS.md, or None if it has none.
    cause:          a part of the cause that the check must name, or None.
    recipes:        the precision policies and programs ("policy/program") under which the fault can act.
    note:           why the expected origin is this one.
    settings:       changes to the run's configuration, as on the command line: dotted key → text.
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
        """Return the name of the backend's class."""
        return self.make.__name__

    @property
    def mechanism(self) -> str:
        """Return the description of the fault: the docstring of its backend's class."""
        return " ".join((self.make.__doc__ or "").split())

    @property
    def loader(self) -> Callable[[Batches], Batches] | None:
        """Return the function from right batches by step to faulty ones, or None if the loader is right."""
        return getattr(self.make, "loader", None)

    def configured(self, config: RunConfig) -> RunConfig:
        """Return the configuration with this fault's settings."""
        tree = config.model_dump()
        for key, text in self.settings.items():
            section, _, name = key.rpartition(".")
            (tree[section] if section else tree)[name] = text
        return RunConfig.model_validate(tree) if self.settings else config

    def origin(self, layers: int) -> tuple[str, str, int | None]:
        """Return the stage, phase and layer that a check must name in a model of `layers` layers."""
        return self.stage, self.phase, None if self.layer is None else self.layer % layers

"""A family of models under both names, ours and Hugging Face's, as data: settings, tensors, and what must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# As `absent`: the key is required. As `null`: null means the same as a missing key.
REQUIRED, AS_ABSENT = object(), object()


@dataclass(frozen=True)
class Key:
    """A value of `absent` that is read from another key of config.json, times a number."""

    name: str
    times: int = 1


@dataclass(frozen=True)
class Setting:
    """A setting of the model under both names.

    ours: field of `ModelConfig`. theirs: key of config.json; several of ours may share one, and then are equal.
    absent: what the architecture takes where the key is missing. null: our value that theirs writes as null.
    inverse_root: ours is 1/√theirs, a whole number. written: the property of `ModelConfig` that is written in the place
    of the field.
    """

    ours: str
    theirs: str
    absent: Any = REQUIRED
    null: Any = AS_ABSENT
    inverse_root: bool = False
    written: str = ""


@dataclass(frozen=True)
class Fixed:
    """A key of config.json with the one value at which the architecture is our model.

    absent: what the architecture takes where the key is missing or null. or_any: values that mean the same. each: the
    key, where it is there, holds a list, each of whose elements must be `value`.
    """

    theirs: str
    value: Any
    absent: Any = REQUIRED
    or_any: tuple[Any, ...] = ()
    each: bool = False


@dataclass(frozen=True)
class Derived:
    """A key of config.json that follows from the model's property `ours`. Where the key is present, it must agree."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class Stored:
    """A tensor of theirs, made of one or several of ours. `{i}` stands for the block.

    ours: canonical names; their rows follow one another in theirs, as those of q, k and v in a fused projection.
    transposed: theirs is (in, out), as GPT-2's Conv1D keeps it.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def same(theirs: str, ours: str) -> tuple[Stored, ...]:
    """Return weight and bias of one module under both names."""
    return tuple(Stored(f"{theirs}.{part}", (f"{ours}.{part}",)) for part in ("weight", "bias"))


def conv1d(theirs: str, *ours: str) -> tuple[Stored, ...]:
    """Return weight (in, out) and bias of a Conv1D that holds one or several of our linear layers side by side."""
    names = {part: tuple(f"{one}.{part}" for one in ours) for part in ("weight", "bias")}
    return Stored(f"{theirs}.weight", names["weight"], transposed=True), Stored(f"{theirs}.bias", names["bias"])


@dataclass(frozen=True)
class HubFamily:
    """A family of models as Hugging Face has it.

    name: `model.family`. architecture, model_type: as config.json has them. settings: both ways. fixed: values that
    must hold. derived: values that follow. given: fields of ours that the architecture has at one value, without a key.
    layers: `layer_types`, in turns, of an architecture that always has a window.
    theta: RoPE's base where config.json names none (core/hub/rope.py); None without rotary positions. tensors: all that
    some model of the family has; a model has those whose parameters are its own. head: their name of the head, tied or
    not. prefix: of their names, but the head's; files of the trunk alone lack it. constants: endings of tensors that
    old files hold, and which are not read. dropout: keys of rates that act in training alone, and not in our model.
    longest: their key of the longest sequence; empty where a setting of the model holds it.
    """

    name: str
    architecture: str
    model_type: str
    settings: tuple[Setting, ...]
    tensors: tuple[Stored, ...]
    fixed: tuple[Fixed, ...] = ()
    derived: tuple[Derived, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    theta: float | None = None
    head: str = "lm_head.weight"
    prefix: str = "model."
    constants: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()
    longest: str = "max_position_embeddings"
    layers: tuple[str, ...] = ()

    @property
    def known(self) -> frozenset[str]:
        """The fields of `ModelConfig` that config.json expresses."""
        of_rope = {"rope_theta", "rope_factor", "rope_low", "rope_high", "rope_original"}
        rope = of_rope if self.theta is not None else set()
        return frozenset({"family", *rope, *(one.ours for one in self.settings), *self.given})


# Keys that can change a model of any architecture, with the values at which they have no effect.
COMMON: tuple[Fixed, ...] = (
    Fixed("quantization_config", None, None),
    Fixed("auto_map", None, None, ({},)),
    Fixed("pruned_heads", None, None, ({},)),
    Fixed("is_encoder_decoder", False, False),
    Fixed("add_cross_attention", False, False),
)

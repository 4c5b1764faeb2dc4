"""Cast plans: where a model rounds to the operand format outside its matrix products (`precision.casts`).

Lockstep keeps everything but operands in FP32. Autocast, fused kernels and models that keep their residual stream in
bf16 do not, and are right by another declaration. A plan names the choice for each kind of operation. The casts
themselves stand in torch_backend/precision.py and jax_backend/policy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lockstep.core.model.graph import OUTPUT

FP32 = "fp32"
# The formats that a plan may round to: those of operands that are narrower than FP32 on every device.
NARROW = ("bf16", "fp16")

# Each key's values, Lockstep's own first, the operand format written as bf16. FP32: nothing is rounded.
VALUES: dict[str, tuple[str, ...]] = {
    "residual": (FP32, "bf16"),
    "norm": (FP32, "bf16"),
    "linear": (FP32, "bf16"),
    "bias": (FP32, "bf16"),
    "rope": (FP32, "promoted", "after rotation", "bf16"),
    "act": (FP32, "after product", "after silu and product"),
    "logits": (FP32, "bf16"),
    "angles": ("fp64", FP32),
}


@dataclass(frozen=True)
class CastPlan:
    """A plan of casts: where operations round to the operand format, beside the operands and outputs of products.

    A tensor that is kept in the operand format has gradients in it, and so do the inputs of rope and act where these
    round: each gradient that is sent back is rounded, and so is their sum.

    residual: the embedding's output and every sum of the residual stream. norm: what a norm writes, rounded once.
    linear: what linear layers write, rounded by every plan, is kept so, and its gradients are rounded. bias: a linear
    layer's bias is rounded and added before the product's rounding; its gradient is rounded.
    rope: "promoted": operands in bf16 and tables in FP32: the result is FP32, and the gradient of each product is
    rounded; "after rotation": computed in FP32, and the result rounded; "bf16": tables, products and sums are rounded.
    act: "after product": silu(gate) ⊙ up in FP32, and the result rounded; "after silu and product": both rounded.
    logits: the head's product is rounded, and so is the gradient of its weight.
    angles: in which format RoPE multiplies position and frequency. In FP32 an angle of 1,000 is off by 3e-5.
    """

    residual: str = FP32
    norm: str = FP32
    linear: str = FP32
    bias: str = FP32
    rope: str = FP32
    act: str = FP32
    logits: str = FP32
    angles: str = "fp64"

    def rounds(self, key: str) -> bool:
        """Return whether the operations of a key round anything."""
        return bool(getattr(self, key) != VALUES[key][0])

    def keeps(self, what: str) -> bool:
        """Return whether a tensor is kept in the operand format: what a key names, or `rotation`, what RoPE writes."""
        return self.rope in ("after rotation", "bf16") if what == "rotation" else self.rounds(what)

    @property
    def rotates_narrowly(self) -> bool:
        """Return whether RoPE's tables, products and sums are in the operand format."""
        return self.rope == "bf16"

    @property
    def rotates_widely(self) -> bool:
        """Return whether RoPE takes inputs that were rounded up into the stream's format."""
        return self.rope in (FP32, "after rotation")

    @property
    def rounds_rotated_products(self) -> bool:
        """Return whether the gradients of RoPE's products are rounded one by one."""
        return self.rope in ("promoted", "bf16")

    @property
    def rounds_inside_act(self) -> bool:
        """Return whether silu(gate) is rounded before its product."""
        return self.act == "after silu and product"

    @property
    def changed(self) -> dict[str, str]:
        """Key → value of each choice that is not Lockstep's own."""
        return {key: getattr(self, key) for key in VALUES if self.rounds(key)}

    def option(self, kind: str, role: str) -> str:
        """Return the choice by which a kind of operation rounds a result; empty if the plan does not touch it.

        kind: of core/model/graph.py. role: OUTPUT, or the input whose gradient the operation sends back. Gradients that
        a product of the policy rounds by itself need no plan.
        """
        for key in _RESULTS.get((kind, role), ()):
            if self.keeps(key):
                # Attention rounds what it sends to a narrow tensor once, whichever operation wrote that.
                named = "rope" if key == "rotation" else key
                return named if kind == "attention" else f"{named}={getattr(self, named)}"
        return ""


# (kind, role) → the keys that decide whether that result is rounded, the first that rounds.
_RESULTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("embedding", OUTPUT): ("residual",),
    ("sum", OUTPUT): ("residual",),
    ("sum", "y"): ("linear",),
    ("norm", OUTPUT): ("norm",),
    ("norm", "x"): ("residual",),
    ("linear", "bias"): ("bias",),
    ("rope", OUTPUT): ("rotation",),
    ("rope", "x"): ("rope", "linear"),
    ("attention", "k"): ("rotation",),
    ("attention", "v"): ("linear",),
    ("gated", OUTPUT): ("act",),
    ("gated", "gate"): ("act", "linear"),
    ("gated", "up"): ("act", "linear"),
    ("logits", OUTPUT): ("logits",),
    ("logits", "weight"): ("logits",),
    ("nll", "logits"): ("logits",),
}


def kinds_of(key: str) -> frozenset[str]:
    """Return the kinds of operations whose mathematics a key changes."""
    if key == "angles":
        return frozenset({"rope"})
    named = {key, "rotation"} if key == "rope" else {key}
    return frozenset(kind for (kind, _), keys in _RESULTS.items() if named & set(keys))


LOCKSTEP = CastPlan()
# torch.autocast over a model with FP32 weights, as of torch 2.13: linear layers give bf16, and what reads it goes on in
# bf16 or promotes it; embedding, norms and residual stream stay in FP32. Angles as Hugging Face's models make them.
PLANS: dict[str, CastPlan] = {
    "lockstep": LOCKSTEP,
    "autocast": CastPlan(
        linear="bf16", bias="bf16", rope="promoted", act="after silu and product", logits="bf16", angles=FP32
    ),
}


def read_plan(text: str) -> CastPlan:
    """Read a plan from text: the name of a plan, choices as `key=value`, or a name and choices, separated by commas.

    Raises ValueError for what is not understood.
    """
    first, *others = _parts(text)
    named = "=" not in first
    if named and first not in PLANS:
        raise ValueError(f"{first!r} is no plan of casts; the plans are {', '.join(PLANS)}")
    plan = PLANS[first] if named else LOCKSTEP
    for part in others if named else (first, *others):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"{part!r} is no choice: write key=value; a plan's name comes first")
        plan = replace(plan, **{_key(key): _value(key, value)})
    return plan


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] or ["lockstep"]


def _key(key: str) -> str:
    if key not in VALUES:
        raise ValueError(f"{key!r} is nothing that a plan of casts names; it names {', '.join(VALUES)}")
    return key


def _value(key: str, value: str) -> str:
    # A plan calls the operand format bf16, whichever of NARROW the policy takes.
    plain = "bf16" if value in NARROW else value
    if plain not in VALUES[key]:
        *others, last = (repr(known) for known in VALUES[key])
        raise ValueError(f"{key} = {value!r}: must be {', '.join(others)} or {last}")
    return plain


def plan_text(plan: CastPlan, operand: str = "bf16") -> str:
    """Write a plan as `read_plan` reads it: the name of one that has a name, else its choices.

    operand: what the operand format is called.
    """
    named = next((name for name, one in PLANS.items() if one == plan), None)
    choices = (f"{key}={operand if value in NARROW else value}" for key, value in plan.changed.items())
    return named or ", ".join(choices)


def canonical(given: Any) -> Any:
    """Return a setting `precision.casts` as text: a table of choices becomes `key=value`; other values as they are.

    Raises ValueError for a plan that is not understood.
    """
    text = ", ".join(f"{key}={value}" for key, value in given.items()) if isinstance(given, Mapping) else given
    if not isinstance(text, str):
        return given
    read_plan(text)
    return ", ".join(_parts(text))


def choices(operand: str) -> list[str]:
    """Return the keys that a plan may have under a policy whose operands have this format."""
    return list(VALUES) if operand in NARROW else [] if operand == "fp64" else ["angles"]


def problem_with(text: str, operand: str) -> str | None:
    """Return why a plan cannot go with a policy whose operands have this format, or None."""
    changed = read_plan(text).changed
    if not changed:
        return None
    if operand == "fp64":
        return "in FP64 nothing is rounded; take 'lockstep'"
    if operand not in NARROW and changed.keys() != {"angles"}:
        return f"a policy whose operands are {operand} has no narrower format to round to; take 'lockstep'"
    others = [part for part in _parts(text) if part.partition("=")[2].strip() in NARROW and not part.endswith(operand)]
    return f"the operands of the policy are {operand}: {', '.join(others)} names another format" if others else None


assert tuple(VALUES) == tuple(one.name for one in fields(CastPlan))

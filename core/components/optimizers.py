"""Optimizers: by which rule each parameter moves, and what state the rule keeps.

The arithmetic stands in torch_backend/optim.py and jax_backend/optim.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lockstep.core.model.graph import Parameter, Shape

# 8-bit moments are kept in blocks of this many numbers with a scale each (Dettmers et al. 2022, arXiv 2110.02861), and
# small tensors are not.
BLOCK, LEAST_IN_EIGHT_BITS = 256, 4096


class Settings(Protocol):
    """The settings of `OptimConfig` that rules read."""

    @property
    def beta1(self) -> float:
        """Decay of AdamW's first moment."""
        ...

    @property
    def beta2(self) -> float:
        """Decay of AdamW's second moment."""
        ...

    @property
    def momentum(self) -> float:
        """Decay of Muon's momentum."""
        ...

    @property
    def eight_bit(self) -> str:
        """Return the library of the 8-bit optimizer: `torchao` or `bitsandbytes`."""
        ...

    @property
    def ns_dtype(self) -> str:
        """Precision of Newton–Schulz: `bf16` or `fp32`."""
        ...

    @property
    def ns_steps(self) -> int:
        """Iterations of Newton–Schulz."""
        ...


def _no_flops(shape: Shape, settings: Settings) -> float:
    return 0.0


def _no_factors(shape: Shape, settings: Settings, number: int) -> dict[str, float]:
    return {}


def _like_the_rule(what: str, settings: Settings) -> str:
    return what


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which an optimizer updates one parameter.

    name:    of the rule; backends know it by this name.
    title:   in tables.
    moments: kinds of state, each an array of the parameter's shape; names in states and checkpoints.
    reads:   settings of `OptimConfig` that it reads, but for rate and decay.
    moment_bytes: of a number of them; None: those of the master weight.
    bounds:  prefix of the calibrated bounds that its moments and updates are checked against; empty: those of AdamW.
    variant: kind of a moment, or `update`, → its name under that prefix.
    rounded: those that the rule itself rounds to a narrower format than the stream's, by that name.
    flops:   of its matrix products in one update.
    working: what an update of a parameter holds for itself, in copies of the parameter in the stream dtype.
    together: the number of consecutive elements whose update is computed together; None: a matrix as a whole.
    no_twin_on_cuda: why the reference does not round as it does on CUDA, and what has a twin; empty where it does.
    factors: numbers by which its moments or update may be off, by what they are, of update `number`, from 1.
    """

    name: str
    title: str
    moments: tuple[str, ...]
    reads: tuple[str, ...] = ()
    moment_bytes: float | None = None
    bounds: str = ""
    variant: Callable[[str, Settings], str] = _like_the_rule
    rounded: tuple[str, ...] = ()
    flops: Callable[[Shape, Settings], float] = _no_flops
    working: float = 0.0
    together: int | None = 1
    no_twin_on_cuda: str = ""
    factors: Callable[[Shape, Settings, int], Mapping[str, float]] = _no_factors


def _factors_of_adam(shape: Shape, settings: Settings, number: int) -> dict[str, float]:
    """Return 1 − β and the bias corrections, and what the length becomes with those of the update before or after."""

    def corrections(at: int) -> tuple[float, float]:
        return 1.0 - settings.beta1**at, math.sqrt(1.0 - settings.beta2**at)

    first, second = corrections(number)
    found = {
        "1 − β₁": 1.0 - settings.beta1,
        "1 − β₂": 1.0 - settings.beta2,
        "the bias correction 1 − β₁ᵗ": first,
        "the bias correction √(1 − β₂ᵗ)": second,
    }
    for when, other in (("the step before", number - 1), ("the next step", number + 1)):
        if other >= 1:
            of_first, of_second = corrections(other)
            found |= {
                f"the bias correction 1 − β₁ᵗ of {when}": first / of_first,
                f"the bias correction 1 − β₂ᵗ of {when}": of_second / second,
                f"both bias corrections of {when}": first / of_first * of_second / second,
            }
    return found


MOMENTS, OF_ADAM, _EIGHT_BITS = ("exp_avg", "exp_avg_sq"), ("beta1", "beta2", "eps"), 1 + 4 / BLOCK
ADAMW = UpdateRule("adamw", "AdamW", MOMENTS, OF_ADAM, factors=_factors_of_adam)
# A library rounds in its own order even where a tensor's moments stay in FP32.
TORCHAO = UpdateRule("adamw_torchao", "AdamW", MOMENTS, OF_ADAM, factors=_factors_of_adam)
_OTHER_ON_CUDA = (
    "the reference rounds as bitsandbytes' CPU kernel does, and CUDA's rounds otherwise: leave the checks out, or take "
    "optim.eight_bit = 'torchao'"
)
BITSANDBYTES = UpdateRule(
    "adamw_bitsandbytes",
    "AdamW",
    MOMENTS,
    OF_ADAM,
    no_twin_on_cuda=_OTHER_ON_CUDA,
    factors=_factors_of_adam,
)
TORCHAO_8BIT = UpdateRule(
    "adamw8bit_torchao",
    "AdamW, 8-bit",
    MOMENTS,
    OF_ADAM,
    _EIGHT_BITS,
    "adamw8bit",
    rounded=MOMENTS,
    together=BLOCK,
    factors=_factors_of_adam,
)
BITSANDBYTES_8BIT = UpdateRule(
    "adamw8bit_bitsandbytes",
    "AdamW, 8-bit",
    MOMENTS,
    OF_ADAM,
    _EIGHT_BITS,
    "adamw8bit_bnb",
    rounded=MOMENTS,
    together=BLOCK,
    no_twin_on_cuda=_OTHER_ON_CUDA,
    factors=_factors_of_adam,
)


def _newton_schulz(shape: Shape, settings: Settings) -> float:
    """Return FLOPs of Newton–Schulz: 4·r²·c + 2·r³ an iteration on a matrix (r, c), r ≤ c."""
    rows, columns = sorted(shape)
    return settings.ns_steps * (4.0 * rows**2 * columns + 2.0 * rows**3)


def _factors_of_muon(shape: Shape, settings: Settings, number: int) -> dict[str, float]:
    """Return the lengths that an update is given elsewhere, and the parts of its own.

    Its own is 0.2·√max(rows, columns) (Liu et al. 2025, arXiv 2502.16982); Jordan's √max(1, rows/columns).
    """
    rows, columns = shape
    own = 0.2 * math.sqrt(max(shape))
    return {
        "the length 0.2·√max(rows, columns)": own,
        "the length √max(1, rows/columns) for 0.2·√max(rows, columns)": math.sqrt(max(1.0, rows / columns)) / own,
        "√(the longer side / the shorter side)": math.sqrt(max(shape) / min(shape)),
        "0.2": 0.2,
        "√max(rows, columns)": math.sqrt(max(shape)),
        "1 − the momentum": 1.0 - settings.momentum,
    }


def _by_dtype(what: str, settings: Settings) -> str:
    return f"{what}_fp32" if what == "update" and settings.ns_dtype == "fp32" else what


MUON = UpdateRule(
    "muon",
    "Muon",
    ("momentum_buffer",),
    ("momentum", "nesterov", "ns_steps", "ns_dtype"),
    bounds="muon",
    variant=_by_dtype,
    rounded=("update",),
    flops=_newton_schulz,
    # Its update, in FP32 and in two narrow copies and a product.
    working=3.0,
    together=None,
    factors=_factors_of_muon,
)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer by name (`optim.name`).

    rules: all that it has. rule: that of a parameter under these settings. exact: the same under the fp64 policy,
    where nothing is rounded to a narrower format; None: `rule`. fused: its AdamW has a one-kernel step and one of list
    operations (`optim.fused`). eight_bit: it is the one of the library that `optim.eight_bit` names.
    """

    name: str
    rules: tuple[UpdateRule, ...]
    rule: Callable[[Parameter, Settings], UpdateRule]
    exact: Callable[[Parameter, Settings], UpdateRule] | None = None
    fused: bool = True
    eight_bit: bool = False


def _adamw(parameter: Parameter, settings: Settings) -> UpdateRule:
    return ADAMW


def _eight_bit(parameter: Parameter, settings: Settings) -> UpdateRule:
    """Return the 8-bit rule of a parameter; torchao's needs whole blocks, bitsandbytes' last block may be shorter.

    torchao/optim/adam.py, `_new_buffer`; bitsandbytes/optim/optimizer.py, `Optimizer2State.init_state`.
    """
    large = parameter.size >= LEAST_IN_EIGHT_BITS
    if settings.eight_bit == "bitsandbytes":
        return BITSANDBYTES_8BIT if large else BITSANDBYTES
    return TORCHAO_8BIT if large and parameter.size % BLOCK == 0 else TORCHAO


def _muon(parameter: Parameter, settings: Settings) -> UpdateRule:
    """Return Muon's rule for matrices between activations, AdamW's for everything else."""
    return MUON if parameter.group == "matrices" else ADAMW


OPTIMIZERS: dict[str, Optimizer] = {
    found.name: found
    for found in (
        Optimizer("adamw", (ADAMW,), _adamw),
        Optimizer(
            "adamw8bit",
            (TORCHAO_8BIT, BITSANDBYTES_8BIT, TORCHAO, BITSANDBYTES),
            _eight_bit,
            exact=_adamw,
            fused=False,
            eight_bit=True,
        ),
        Optimizer("muon", (MUON, ADAMW), _muon),
    )
}


def all_rules() -> tuple[UpdateRule, ...]:
    """Return the rules of all optimizers that are registered now."""
    return tuple(dict.fromkeys(rule for optimizer in OPTIMIZERS.values() for rule in optimizer.rules))

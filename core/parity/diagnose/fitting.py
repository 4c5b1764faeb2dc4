"""Find casts and an attention kernel that fit the examined stages, if these differ from the declared ones.

A trainer with other roundings than declared is not wrong because of them. Autocast, fused kernels and bf16 residual
streams are correct under another declaration (core/components/cast_plan.py). Each choice is tried on the stages that it
changes, from the candidate's own inputs. Then the whole step is judged with the choices that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from lockstep.core.backend import Backend, NotSupported
from lockstep.core.components.attention_kernels import ATTENTION_KERNELS, AUTO
from lockstep.core.components.cast_plan import PLANS, VALUES, CastPlan, choices, kinds_of, plan_text
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import RunConfig, flatten
from lockstep.core.errors import UserError
from lockstep.core.model.graph import Operation
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.judge import local
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check, Finding, Fitting
from lockstep.core.parity.reference.stages import stages_of

# If one stage depends on two choices, the best values depend on each other. A second round finds them.
ROUNDS = 2
# Number of layers whose stages decide between choices: the first that differs, and one that still differs afterwards.
LAYERS = 2
# Kernels that a twin can reproduce, each with and without grouped queries.
KERNELS = [
    {"kernel": kernel.name, "grouped": grouped}
    for kernel in ATTENTION_KERNELS.values()
    if not kernel.on_cpu and kernel is not AUTO
    for grouped in ("copies", "kernel")
]
# Upper limit of a comparison's ratio to its bound.
MOST = 1e9
SHOWN = ("precision.casts", "attention.kernel", "attention.grouped")


@dataclass(frozen=True)
class Choice:
    """A declaration that may be wrong: casts, or an attention kernel.

    kinds: kinds of operations whose result it changes.
    others: yields configurations with another value of it.
    """

    kinds: frozenset[str]
    others: Callable[[RunConfig], Iterator[RunConfig]]


def with_fitting(check: Check, evidence: Evidence, reference: Reference, backend: Backend) -> Check:
    """Return the check with settings that fit better, if it disagreed and there are such settings.

    reference: the reference of the check.
    backend: opens twins with other settings.
    Nothing is tried if no stage was examined.
    """
    if check.verdict != "disagreed" or not evidence.taps:
        return check
    tried = [choice for choice in _choices(reference.config) if _touched(choice, check, reference.config)]
    if not tried:
        return check
    one_step = replace(reference, over_steps=None)
    try:
        found = reference.ranks.of_first(lambda: _fitting(tried, check, evidence, one_step, backend))
    except (NotSupported, UserError, ValueError):
        return check
    return check if found is None else replace(check, fitting=found)


def _choices(config: RunConfig) -> list[Choice]:
    """Return the choices of a run: the named plans, each key of a plan, and the attention kernel on the CPU."""
    keys = choices(config.precision.operand)
    found = [Choice(kinds_of(key), _casts(key)) for key in keys]
    if set(keys) == set(VALUES):
        found.insert(0, Choice(frozenset().union(*map(kinds_of, keys)), _named))
    return [*found, Choice(frozenset({"attention"}), _kernels)] if config.device != "cuda" else found


def _named(config: RunConfig) -> Iterator[RunConfig]:
    for plan in PLANS.values():
        if plan != config.precision.plan:
            yield _with_plan(config, plan)


def _casts(key: str) -> Callable[[RunConfig], Iterator[RunConfig]]:
    def others(config: RunConfig) -> Iterator[RunConfig]:
        plan = config.precision.plan
        for value in VALUES[key]:
            if value != getattr(plan, key):
                yield _with_plan(config, replace(plan, **{key: value}))

    return others


def _kernels(config: RunConfig) -> Iterator[RunConfig]:
    for kernel in KERNELS:
        attention = config.attention.model_copy(update=kernel)
        if attention != config.attention:
            yield config.model_copy(update={"attention": attention})


def _with_plan(config: RunConfig, plan: CastPlan) -> RunConfig:
    casts = plan_text(plan, config.precision.operand)
    return config.model_copy(update={"precision": config.precision.model_copy(update={"casts": casts})})


def _touched(choice: Choice, check: Check, config: RunConfig) -> bool:
    """Return whether a local comparison fails in a stage that the choice changes."""
    kinds = {one.id: one.kind for one in stages_of(config)}
    return any(not one.ok and one.scope == "local" and kinds.get(one.stage) in choice.kinds for one in check.findings)


def _fitting(
    tried: list[Choice], check: Check, evidence: Evidence, reference: Reference, backend: Backend
) -> Fitting | None:
    declared = reference.config
    first = next((one.layer for one in check.findings if not one.ok and one.layer is not None), None)
    config, layers = _by_name(declared), {None, first}
    kinds = frozenset[str]().union(*(choice.kinds for choice in tried))
    for _ in range(LAYERS):
        config = _searched(tried, config, evidence, reference, backend, layers)
        differs = _differing(declared, config)
        if not differs:
            return None
        with closing(_Twin(reference, backend, config)) as other:
            stages = local.stages(evidence, other.reference, [], lambda stage: stage.kind in kinds)
            wrong = _wrong(stages, kinds, config)
        # A fault in a single layer may look like the rounding of another plan, but all other layers lack this rounding.
        if len(wrong) >= len(_wrong(check.findings, kinds, declared)):
            return None
        left = next((one.layer for one in wrong if one.layer not in layers), None)
        if left is None:
            break
        # Two kernels may give equal bits in the first layer that differs, and other bits in this one.
        layers.add(left)
    with closing(_Twin(reference, backend, config)) as other:
        whole = judge(evidence, other.reference)
    if whole.verdict != "agreed" and _broken(whole) >= _broken(check):
        return None
    was = flatten(declared.model_dump())
    return Fitting(differs, {key: was[key] for key in differs}, whole.verdict == "agreed", whole.origin)


def _wrong(found: Iterable[Finding], kinds: frozenset[str], config: RunConfig) -> list[Finding]:
    """Return the failed local comparisons in stages of these kinds."""
    by_id = {one.id: one.kind for one in stages_of(config)}
    return [one for one in found if not one.ok and one.scope == "local" and by_id.get(one.stage) in kinds]


def _searched(
    tried: list[Choice],
    config: RunConfig,
    evidence: Evidence,
    reference: Reference,
    backend: Backend,
    layers: set[int | None],
) -> RunConfig:
    """Return the configuration with the best value of each choice in turn, judged by the stages of these layers."""
    for _ in range(ROUNDS):
        before = config
        for choice in tried:
            config = _best(choice, config, evidence, reference, backend, layers)
        if config == before:
            break
    return _with_plan(config, _as_named(config.precision.plan, config))


def _differing(declared: RunConfig, config: RunConfig) -> Mapping[str, str]:
    """Return the settings that differ from the declared ones, by dotted key."""
    before, after = (flatten(one.model_dump()) for one in (_by_name(declared), config))
    return {key: after[key] for key in SHOWN if after[key] != before[key]}


def _by_name(config: RunConfig) -> RunConfig:
    """Return the configuration with the attention kernel that `auto` selects, because kernels are compared by name."""
    return settled(config, "cuda" if config.device == "cuda" else "cpu")


def _as_named(plan: CastPlan, config: RunConfig) -> CastPlan:
    """Return the named plan that equals this one in all keys that the model uses, or the plan itself."""
    of_model = {one.kind for one in stages_of(config)}
    if not any("bias" in one.params for one in stages_of(config)):
        of_model.discard("linear")
    keys = [key for key in VALUES if of_model & kinds_of(key)]
    same = (one for one in PLANS.values() if all(getattr(one, key) == getattr(plan, key) for key in keys))
    return next(same, plan)


def _best(
    choice: Choice,
    config: RunConfig,
    evidence: Evidence,
    reference: Reference,
    backend: Backend,
    layers: set[int | None],
) -> RunConfig:
    """Return the configuration with the smallest differences in a choice's stages; of equal ones the present one."""

    def chosen(stage: Operation) -> bool:
        return stage.kind in choice.kinds and stage.layer in layers

    best, least = config, math.inf
    for one in (config, *choice.others(config)):
        with closing(_Twin(reference, backend, one)) as other:
            beyond = sum(map(_beyond, local.stages(evidence, other.reference, [], chosen)))
        if beyond < least:
            best, least = one, beyond
        if not least:
            break
    return best


def _beyond(found: Finding) -> float:
    """Return the logarithm of a comparison's worst ratio to its bound; 0 if it holds."""
    return math.log(min(max(found.worst.strain, 1.0), MOST)) if found.measures else 0.0


def _broken(check: Check) -> int:
    return sum(not one.ok and one.scope == "local" for one in check.findings)


class _Twin:
    """A reference whose twin has other settings, or the declared ones. Its truth is that of the given reference."""

    def __init__(self, reference: Reference, backend: Backend, config: RunConfig) -> None:
        self._declared = config == _by_name(reference.config)
        self.reference = reference if self._declared else reference.with_twin_of(backend, config)

    def close(self) -> None:
        """Close the twin, unless it is the reference's own."""
        if not self._declared:
            self.reference.twin.close()

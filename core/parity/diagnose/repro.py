"""Write a capsule's `repro.py`: a script without Lockstep with one stage's call, its FP64 result, and the disagreement.

The origin stage of a check becomes tensors (`stage.npz`: its inputs, its weights, the candidate's results) and a script
that is assembled from `repro_templates/`. The script runs the framework's call as the trainer does, and the written-out
formula in FP64 and at the declared precision. The error of the latter is the scale of honest rounding. The stored
output is compared with the bounds of the check that raised the alarm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from lockstep.core.arrays import part_of
from lockstep.core.backend import Arrays
from lockstep.core.components.optimizers import ADAMW
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families.transformer import WINDOWED
from lockstep.core.model.graph import Operation
from lockstep.core.model.groups import group_settings, update_rules
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import GRADIENT, groups_of, in_fp8
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.later_steps import as_later_steps
from lockstep.core.parity.judge.later_steps import as_step_of
from lockstep.core.parity.judge.own_step import OWN
from lockstep.core.parity.judge.update import flat
from lockstep.core.parity.measures.compare import FEW_ULPS
from lockstep.core.parity.measures.verdict import Check, Finding
from lockstep.core.parity.reference.stages import Shared, chain, is_library_head, shared_tensors, stages_of
from lockstep.core.train.schedule import learning_rate

# Kind of operation → the template with its call.
CALLS = {
    "embedding": "embed",
    "scale": "embed_scale",
    "position": "position",
    "norm": "norm",
    "centered_norm": "centered_norm",
    "layer_norm": "layer_norm",
    "head_norm": "head_norm",
    "linear": "linear",
    "rope": "rope",
    "attention": "attn",
    "sum": "add",
    "gated": "act",
    "gated_gelu": "gated_gelu",
    "gelu": "gelu",
    "logits": "logits",
    "cap": "cap",
    "nll": "nll",
}


@dataclass(frozen=True)
class Repro:
    """A script, and the tensors that it reads from `stage.npz`."""

    script: str
    tensors: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Parts:
    """The parts of a script.

    templates: names of the templates after the head.
    tensors: contents of `stage.npz`.
    facts: numbers and names that the templates read from FACTS.
    about: text at the head of the script.
    """

    templates: tuple[str, ...]
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""


OPERANDS = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def repro(evidence: Evidence, check: Check, config: RunConfig, versions: Mapping[str, str]) -> Repro:
    """Build the script for the origin of `check`, or for its worst finding if none is broken."""
    origin, device = check.origin or check.worst, "cuda" if config.device == "cuda" else "cpu"
    config = settled(config, device)
    parts = _nothing(check, "nothing was compared") if origin is None else _parts(origin, evidence, check, config)
    where = "no origin" if origin is None else f"{origin.stage} ({origin.phase}) at {origin.tap}"
    facts = {
        "stream": OPERANDS[config.precision.stream],
        "operand": OPERANDS[config.precision.operand],
        "device": device,
        "torch": versions.get("torch", "unknown"),
        "tap": origin.tap if origin else "",
        **parts.facts,
    }
    text = "".join(_template(name) for name in ("head", *parts.templates))
    # A name from foreign code must not end the string literal that contains it.
    words = {"title": _plain(where), "step": str(check.step), "about": "\n".join(map(_plain, parts.about.split("\n")))}
    words["facts"] = json.dumps(facts, indent=1).replace("'''", "'' '")
    script = re.sub(r"\$(title|step|about|facts)", lambda match: words[match[1]], text)
    return Repro(script, {key: np.asarray(array) for key, array in parts.tensors.items()})


def _plain(text: str) -> str:
    """Replace characters that are not allowed in a string of the script."""
    return re.sub(r"[^\w .,:;()/-]", "?", text)


def _template(name: str) -> str:
    return (
        resources.files("lockstep.core.parity.diagnose")
        .joinpath(f"repro_templates/{name}.txt")
        .read_text(encoding="utf-8")
    )


def _parts(origin: Finding, evidence: Evidence, check: Check, config: RunConfig) -> _Parts:
    if [m.name for m in origin.measures] == ["mismatches"] and origin.stage not in ("tokens", "weights", "checkpoint"):
        return _nothing(check, "names, shapes or counts do not fit", _whatever(origin, evidence), off=not origin.ok)
    if is_library_head(origin.stage):
        return _nothing(check, "the roundings of a library's head are not written out in a script")
    call = CALLS.get(chain().kinds.get(origin.stage, ""))
    if call and _in_float8(origin, config):
        why = "the casts of torchao's FP8 layers are not written out in a script"
        return _nothing(check, why, _whatever(origin, evidence))
    if call:
        return _of_stage(origin, evidence, check, config)
    if origin.stage == "loss" and origin.phase == "backward":
        return _loss_backward(evidence)
    if origin.stage in ("loss", "grad_norm", "clip_coefficient", "learning_rate"):
        return _scalar(origin, evidence, config)
    if origin.stage in ("moments", "update"):
        return _update(origin, evidence, check, config)
    if origin.stage in ("gradients", "compiler"):
        return _two_programs(origin, evidence, check)
    if origin.stage == "accumulation" and OWN in origin.note:
        return _nothing(check, "of the step's own micro-batches there are only sketches")
    if origin.stage == "accumulation" and evidence.accumulated:
        parts = {f"part.{i}": part[origin.tap] for i, part in enumerate(evidence.accumulated.parts)}
        whole = {"candidate.whole": evidence.accumulated.whole.grads[origin.tap]}
        facts = {"shares": evidence.accumulated.shares, "ulp": FEW_ULPS}
        return _Parts(("sum",), parts | whole, facts, "Gradients of separate micro-batches, and their sum.")
    if origin.stage == "tokens":
        batch = {f"input.{key}": array for key, array in evidence.batch.arrays.items()}
        return _Parts(("tokens",), batch, {"consumed": evidence.record.digest, "due": evidence.due})
    if origin.stage == "weights" and origin.tap == "initial":
        due, found = init_parameters(config.model, config.seed), evidence.before.params
        name = next((n for n in due if not np.array_equal(due[n], found[n])), next(iter(due)))
        words = "the weights at step 0", f"the weights that follow from the seed (core/model/init.py): {name}"
        return _pair(found[name], due[name], *words, allowed=0.0)
    if origin.stage == "checkpoint" and evidence.reloaded:
        now, then = flat(evidence.reloaded), flat(evidence.after)
        both = [n for n in then if n in now]
        name = next((n for n in both if not np.array_equal(now[n], then[n], equal_nan=True)), both[0])
        words = "after a checkpoint was written, read back and loaded", f"before: {name}"
        return _pair(now[name], then[name], *words, allowed=0.0)
    return _nothing(check, "this link has no tensors of its own", off=not origin.ok)


def _in_float8(origin: Finding, config: RunConfig) -> bool:
    at = origin.stage, origin.layer
    return any(in_fp8(config, stage) for stage in stages_of(config) if (stage.id, stage.layer) == at)


def _of_stage(origin: Finding, evidence: Evidence, check: Check, config: RunConfig) -> _Parts:
    """Build the parts of a script for a stage's forward or backward pass, or for a gradient that several stages sum."""
    model, taps = config.model, evidence.taps
    sums = {shared.name: shared for shared in shared_tensors(config)}
    every = stages_of(config)
    stages = [s for s in every if s.id == origin.stage and s.layer == origin.layer]
    stage = next(iter(stages), None)
    if stage is None or stage.tap not in taps or not all(tap in taps for tap in stage.reads.values()):
        return _nothing(check, "the candidate does not show this stage's tensors")
    if origin.phase == "backward" and origin.tap == stage.tap and origin.tap in sums:
        return _of_sum(sums[origin.tap], evidence, check)
    part = evidence.weighted
    tensors = {f"input.{role}": taps[tap] for role, tap in stage.reads.items()}
    tensors |= {f"input.{role}": evidence.before.params[name] for role, name in stage.params.items()}
    tensors |= {f"input.{role}": part.arrays[role] for role in stage.batch}
    grad = taps.get(GRADIENT + stage.tap)
    if origin.phase == "backward":
        if grad is None:
            return _nothing(check, "the candidate does not show the gradient of this stage's output")
        tensors["grad"] = grad
        tensors |= _sent_back(stage, evidence, sums)
    else:
        tensors["candidate.out"] = taps[stage.tap]
    keys = ["norm_eps", "rope_theta", "rope_factor", "rope_low", "rope_high", "rope_original", "hidden", "heads"]
    keys += ["kv_heads", "head_dim", "score_scale", "attention_cap", "logits_cap"]
    facts = {key: getattr(model, key) for key in keys} | {"kernel": config.attention.kernel}
    facts["window"] = model.window if stage.id == WINDOWED else 0
    facts["limits"] = _limits(stage, origin, check)
    roles = {**stage.reads, **stage.params}
    accused = [f"grad.{role}" for role, total in roles.items() if origin.tap in (total, stage.sends(role))]
    facts["accused"] = accused if origin.phase == "backward" else ["out"]
    scopes = {
        "end_to_end": "\nThe check found it only end to end: from its own inputs this stage may be correct.",
        "over_steps": "\nThe check found a bias summed over steps: in one step it may be within rounding.",
    }
    of = f", of {len(evidence.weighted.tokens)} sequences" if stage.reads else ""
    about = f"Inputs are the candidate's own{of}.{scopes.get(origin.scope, '')}"
    return _Parts(("rounding", CALLS[stage.kind], "stage"), tensors, facts, about)


def _sent_back(stage: Operation, evidence: Evidence, sums: Mapping[str, Shared]) -> dict[str, np.ndarray]:
    """Return the candidate's gradients of a stage's inputs.

    If only a sum is known, add the parts of the other stages.
    """
    found: dict[str, np.ndarray] = {}
    totals = {**stage.reads, **stage.params}
    for role, total in totals.items():
        name = stage.sends(role)
        own = evidence.taps.get(GRADIENT + name)
        others: list[np.ndarray] = []
        if total in sums and (name == total or own is None):
            parts = [(s, edge) for s, _, edge in sums[total].consumers if s.tap != stage.tap]
            shown = [evidence.taps.get(GRADIENT + edge) if edge else _looked_up(s, evidence) for s, edge in parts]
            others = [array for array in shown if array is not None]
            own = evidence.taps.get(GRADIENT + total)
            if own is None or len(others) != len(parts):
                continue  # the part that this stage itself contributes is unknown
            found[f"others.{role}"] = np.sum([a.astype(np.float64) for a in others], 0)
        if own is None:  # no gradient arrived: it is zero
            own = np.zeros_like(evidence.taps[total] if role in stage.reads else evidence.before.params[total])
        found[f"candidate.grad.{role}"] = own
    return found


def _looked_up(stage: Operation, evidence: Evidence) -> np.ndarray | None:
    """Return the look-up's part of a tied table's gradient: the gradient of its output, summed by token.

    Returns None for another stage, whose part requires its call.
    """
    grad = evidence.taps.get(GRADIENT + stage.tap)
    if stage.id != "embed" or grad is None:
        return None
    tokens = evidence.weighted.tokens
    part = np.zeros(evidence.before.params["embed.weight"].shape)
    np.add.at(part, tokens.ravel(), grad.reshape(-1, grad.shape[-1]).astype(np.float64))
    return part


def _of_sum(shared: Shared, evidence: Evidence, check: Check) -> _Parts:
    edges = [edge for _, _, edge in shared.consumers]
    parts = {
        f"part.{edge}": evidence.taps[GRADIENT + edge] for edge in edges if edge and GRADIENT + edge in evidence.taps
    }
    if len(parts) != len(edges):
        return _nothing(check, "not every part of this sum is shown")
    total = evidence.taps.get(GRADIENT + shared.name)
    whole = {} if total is None else {"candidate.whole": total}
    facts = {"shares": [1.0] * len(parts), "ulp": FEW_ULPS}
    return _Parts(("sum",), parts | whole, facts, "Gradients from several stages, and their sum.")


def _limits(stage: Operation, origin: Finding, check: Check) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return the check's bounds by the result that the script compares: `out`, or `grad.ROLE` of the judged tap."""
    judged = {f.tap: f for f in check.findings if (f.stage, f.phase, f.layer) == _link(origin) and f.scope == "local"}
    names: dict[str, tuple[str, ...]] = {"out": (stage.tap,)}
    if origin.phase == "backward":
        names = {f"grad.{r}": (stage.sends(r), total) for r, total in {**stage.reads, **stage.params}.items()}
    found = {key: next((judged[tap] for tap in taps if tap in judged), None) for key, taps in names.items()}
    return {key: _bounds(finding) for key, finding in found.items() if finding is not None}


def _link(finding: Finding) -> tuple[str, str, int | None]:
    return finding.stage, finding.phase, finding.layer


def _bounds(finding: Finding) -> dict[str, tuple[Any, Any]]:
    renamed = {"relative_error": "error"}
    return {renamed.get(m.name, m.name): (m.low, m.high) for m in finding.measures}


def _loss_backward(evidence: Evidence) -> _Parts:
    part = evidence.weighted
    tensors = {"input.weights": part.weights}
    found = evidence.taps.get(GRADIENT + "nll")
    if found is not None and found.shape == part.weights.shape:
        tensors["candidate.out"] = found
    facts = {"total": float(evidence.tapped.weights.sum(dtype=np.float64)), "ulp": FEW_ULPS}
    return _Parts(("loss_backward",), tensors, facts, "The gradient of the loss with respect to each token's NLL.")


def _scalar(origin: Finding, evidence: Evidence, config: RunConfig) -> _Parts:
    record, optim = evidence.record, config.optim
    measure = origin.worst
    tensors: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {"ulp": measure.high}
    dtype = OPERANDS[config.precision.stream]
    if origin.stage == "loss":
        of, batch = evidence.losses[origin.tap]
        assert of is not None
        tensors = {"input.nll": of.nll, "input.weights": batch.weights}
        dtype = of.nll.dtype.name
        facts["stored"] = record.loss if of is evidence.stepped else of.loss
    elif origin.stage == "grad_norm":
        assert evidence.stepped is not None
        tensors = {f"input.{name}": grad for name, grad in evidence.stepped.grads.items()}
        dtype = np.result_type(*evidence.stepped.grads.values()).name
        facts["stored"] = record.grad_norm
    else:
        this = evidence.before.step + 1, record
        number, found = as_later_steps(evidence.later, config).get(origin.tap.removeprefix(origin.stage), this)
    if origin.stage == "clip_coefficient":
        facts |= {"stored": found.clip_coefficient, "norm": found.grad_norm, "clip_norm": optim.clip_norm}
    elif origin.stage == "learning_rate":
        keys = ("peak_lr", "min_lr_ratio", "warmup_steps", "schedule", "decay_share", "decay_shape")
        facts |= {key: getattr(optim, key) for key in keys} | {"stored": found.lr, "steps": config.train.steps}
        facts["number"], dtype = number, "float32"
    return _Parts((origin.stage, "scalar"), tensors, facts | {"dtype": dtype}, "A scalar, recomputed from its inputs.")


def _update(origin: Finding, evidence: Evidence, check: Check, config: RunConfig) -> _Parts:
    if origin.is_mean:
        return _nothing(check, "an error of length in all matrices, smaller than the rounding error of each")
    if later := as_step_of(origin.tap, evidence, config):
        tap, evidence, where, shape = later
        suffix = origin.tap.removeprefix(tap)
    else:
        tap, suffix, where, shape = origin.tap, "", None, ()
    name = tap.rpartition("/")[2]
    before, after, optim = evidence.before, evidence.after, config.optim
    if evidence.stepped is None:
        return _nothing(check, "the candidate does not show its gradients")

    def shown(arrays: Arrays) -> np.ndarray:
        return arrays[name] if where is None else part_of(arrays, name, where).reshape(shape)

    tensors = {"input.parameter": shown(before.params), "input.grad": shown(evidence.stepped.grads)}
    tensors["candidate.parameter"] = shown(after.params)
    rule = update_rules(config)[name]
    for kind in rule.moments:
        made = shown(before.optimizer[kind]), shown(after.optimizer[kind])
        tensors |= {f"input.{kind}": made[0], f"candidate.{kind}": made[1]}
    judged = {(f.stage, f.tap): f for f in check.findings if f.stage in ("moments", "update")}
    keys = {kind: ("moments", f"{kind}/{name}{suffix}") for kind in rule.moments}
    keys["update"] = "update", f"{name}{suffix}"
    settings = group_settings(config, groups_of(config.model)[name])
    facts: dict[str, Any] = {key: getattr(optim, key) for key in rule.reads}
    if not rule.bounds:  # AdamW's script covers the parameters that a library of 8-bit moments keeps in FP32
        facts["fused"] = rule is ADAMW and optim.fused is True
    if rule is ADAMW and evidence.record.adam_in_fp32:
        facts |= {beta: float(np.float32(facts[beta])) for beta in ("beta1", "beta2")}
    facts |= {
        "number": before.updates + 1,
        "lr": learning_rate(optim, before.step + 1, config.train.steps) * settings.lr_factor,
        "coefficient": evidence.record.clip_coefficient,
        "weight_decay": settings.weight_decay,
        "limits": {key: _bounds(judged[found]) for key, found in keys.items() if found in judged},
    }
    about = f"{rule.title} on {name}: state and gradient before the step, and its results."
    return _Parts((f"update_{rule.bounds or 'adamw'}", "update"), tensors, facts, about)


def _two_programs(origin: Finding, evidence: Evidence, check: Check) -> _Parts:
    """Build the parts for a parameter's gradient from two programs of the candidate, or only end to end."""
    name = origin.tap
    micro = evidence.probed
    tapped, raw, given = evidence.taps.get(GRADIENT + name), None, None
    if micro is not None:
        raw, given = micro.program.get(name), micro.grads.get(name)
    measure = next((m for m in origin.measures if m.name in ("ulp", "twin_distance")), None)
    program = "the gradient from the program that trains"
    if origin.scope == "local" and measure is not None and measure.high is not None:
        if measure.name == "ulp" and raw is not None and given is not None:
            allowed = measure.high * float(np.finfo(raw.dtype).eps) * float(np.linalg.norm(raw.astype(np.float64)))
            return _pair(given, raw, f"the session's gradient of {name}", program, allowed)
        one = given if raw is None else raw
        if measure.name == "twin_distance" and one is not None and tapped is not None:
            # The check's distance is in units of the twin's error, so the quotient of the two is this unit.
            apart = float(np.linalg.norm(one.astype(np.float64) - tapped.astype(np.float64)))
            allowed = measure.high * apart / measure.value if measure.value else 0.0
            return _pair(one, tapped, f"{program}: {name}", "the same from the tapped program", allowed)
    why = "the gradient of a parameter end to end: its FP64 result needs the whole model"
    return _nothing(check, why, _whatever(origin, evidence))


def _pair(one: np.ndarray, other: np.ndarray, of_one: str, of_other: str, allowed: float) -> _Parts:
    facts = {"one": of_one, "other": of_other, "allowed": allowed}
    return _Parts(("pair",), {"candidate.one": one, "candidate.other": other}, facts)


def _whatever(origin: Finding, evidence: Evidence) -> dict[str, np.ndarray]:
    """Return the tensors of a tap or parameter that the evidence has, by name."""
    found = {f"candidate.{origin.tap}": evidence.taps.get(origin.tap)}
    found[f"candidate.grad.{origin.tap}"] = evidence.taps.get(GRADIENT + origin.tap)
    if evidence.probed:
        found["candidate.gradient"] = evidence.probed.grads.get(origin.tap)
    return {key: array for key, array in found.items() if array is not None}


def _nothing(check: Check, why: str, tensors: Mapping[str, np.ndarray] | None = None, off: bool = False) -> _Parts:
    """Build a script that only prints the measures of the check.

    why: the reason why there is no call.
    off: whether the measure, a count, shows by itself that the candidate is wrong.
    """
    origin = check.origin or check.worst
    said = [why]
    if origin is not None:
        said += [f"{m.name} {m.value:.6g}, allowed {m.low} to {m.high}: {m.basis}" for m in origin.measures]
        said += [origin.note] if origin.note else []
    return _Parts(
        ("nothing",), tensors or {}, {"said": said, "off": [f"{origin.tap}: {why}"] if off and origin else []}
    )

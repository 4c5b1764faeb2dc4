"""Format numbers for a progress line. Pure functions of their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.core.backend import StepRecord
from lockstep.core.parity.measures.verdict import Check, Finding, Fitting
from lockstep.core.train.loss_scale import FINITE, SCALE, SKIPPED
from lockstep.core.train.metrics import ATTENTION_LOGIT, MEMORY, RECOMPILED, SEQUENCE_LENGTH
from lockstep.core.train.validation import LOSS_OF

SEPARATOR = " · "
# Metrics that `norm_lines` formats.
NORMS = ("update_ratio/", "param_norm/", "grad_norm/", MEMORY)


def count(value: float) -> str:
    """Format three significant digits with k, M, G: 6600 → 6.60k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{_three(value / limit)}{unit}"
    return _three(value)


def duration(seconds: float) -> str:
    """Format seconds as 2h 05m, 3m 20s, 12s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole}s"


def measures(record: StepRecord, val_loss: float | None, mfu: Mapping[str, float]) -> dict[str, str]:
    """Format a step's measures, by name, in the order of a progress line. `val_loss` is the last one known."""
    parts = {"loss": f"loss {record.loss:.4f}"}
    if val_loss is not None:
        parts["val"] = f"val {val_loss:.4f}"
    parts |= {"lr": f"lr {record.lr:.2e}", "grad": f"grad {record.grad_norm:.3g}"}
    parts["pace"] = f"{count(record.tokens_per_second)} tok/s"
    if mfu:
        parts["mfu"] = "MFU " + " ".join(f"{kind} {share:.1%}" for kind, share in mfu.items())
    return parts


# Names of the parts that `fitting` joins, the most important first.
RANKED = ("step", "loss", "pace", "lr", "left", "verdict", "val", "grad", "mfu")


def fitting(parts: Mapping[str, str], width: int) -> str:
    """Join parts, by their names in RANKED, that fit into `width` columns together: less important ones are left out.

    Parts keep their order. The most important one is kept at any width.
    """
    shown: set[str] = set()
    for name in sorted(filter(parts.get, parts), key=RANKED.index):
        line = SEPARATOR.join(parts[each] for each in parts if each in {*shown, name})
        if shown and len(line) > width:
            break
        shown.add(name)
    return SEPARATOR.join(parts[name] for name in parts if name in shown)


def verdicts(agreed: int, judged: int, skipped: int) -> str:
    """Return `parity 3/3 agreed`, `parity 2/3 agreed, 1 skipped`; empty if no check was due yet."""
    parts = [f"parity {agreed}/{judged} agreed"] if judged else []
    if skipped:
        parts.append(f"{skipped} skipped" if judged else f"parity {skipped} skipped")
    return ", ".join(parts)


def check_line(check: Check) -> str:
    """Return the verdict of one checked step, with the origin or the worst measure and its bound."""
    head = f"step {check.step}: parity {headline(check.verdict, check.not_exercised)}"
    finding = check.origin or check.worst
    if finding is None or check.verdict == "could_not":
        what = "nothing" if finding is None else "nothing that the model computes"
        return f"{head}: {what} was compared" + (f" ({check.not_covered[0]}, …)" if check.not_covered else "")
    where = place_of(finding)
    if check.fitting:
        head += f" ({'agrees' if check.fitting.agrees else 'is nearer'} under {_settings(check.fitting.settings)})"
    kind = "origin" if check.origin else "worst of " + _comparisons(check)
    if not finding.measures:
        return f"{head}; {kind}: {where}, nothing was compared"
    m = finding.worst
    return f"{head}; {kind}: {where}, {m.name.replace('_', ' ')} {m.value:.3g} ({bounds(m.low, m.high)})"


def headline(verdict: str, idle: Sequence[str]) -> str:
    """Return `agreed; not exercised: document mask, clipping`. idle: levers that the agreement does not cover."""
    said = f"; not exercised: {', '.join(idle)}" if idle and verdict == "agreed" else ""
    return verdict.replace("_", " ") + said


def fitting_in_words(found: Fitting) -> str:
    """Describe which undeclared casts explain a step that disagreed."""
    there, declared = _settings(found.settings), _settings(found.declared)
    if found.agrees:
        return f"it differs from what is declared, {declared}: every comparison agrees under {there}"
    left = f"; the origin under these is {place_of(found.left)}" if found.left else ""
    return f"stages are nearer to {there} than to what is declared, {declared}{left}"


def _settings(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in values.items())


def place_of(finding: Finding) -> str:
    """Format the place of a finding: `attn backward, layer 3, at blocks.3.attn.q_rope (own input)`."""
    layer = "" if finding.layer is None else f", layer {finding.layer}"
    tap = "" if finding.tap == finding.stage else f", at {finding.tap}"
    scope = {"local": "from its own input", "end_to_end": "end to end", "over_steps": "over steps"}[finding.scope]
    return f"{finding.stage} ({finding.phase}{layer}{tap}, {scope})"


def bounds(low: float | None, high: float | None) -> str:
    """Write an interval in words, as a verdict prints it."""
    if low is None and high is None:
        return "no bound"
    if low is None:
        return f"≤ {high:.3g}"
    if high is None:
        return f"≥ {low:.3g}"
    return f"{low:.3g} … {high:.3g}"


def metric_lines(
    step: int, metrics: Mapping[str, float], before: Mapping[str, float], verbose: bool = True
) -> list[str]:
    """Format the events of a step: a new length, validation, the loss in FP32, a skipped step.

    before: the metrics of the last step. verbose: also metrics at intervals: the loss in FP32, attention logits.
    """
    lines = []
    if metrics.get(SEQUENCE_LENGTH) != before.get(SEQUENCE_LENGTH, metrics.get(SEQUENCE_LENGTH)):
        lines.append(f"step {step}: sequences of {metrics[SEQUENCE_LENGTH]:.0f} tokens from here")
    if "val/loss" in metrics:
        top1 = f", top-1 {metrics['val/top1']:.1%}" if "val/top1" in metrics else ""
        sources = [key for key in metrics if key.startswith(LOSS_OF)]
        each = ", ".join(f"{key.removeprefix(LOSS_OF)} {metrics[key]:.4f}" for key in sources)
        lines.append(f"step {step}: validation loss {metrics['val/loss']:.4f}{top1}" + (f" ({each})" if each else ""))
    if verbose and "fp32/loss" in metrics:
        difference = f", training precision {metrics['fp32/difference']:+.1e}" if "fp32/difference" in metrics else ""
        top1 = f", top-1 {metrics['train/top1']:.1%}" if "train/top1" in metrics else ""
        lines.append(f"step {step}: loss in FP32 {metrics['fp32/loss']:.4f}{difference}{top1} (a slice of the batch)")
    if verbose and (largest := metrics.get(f"{ATTENTION_LOGIT}max")) is not None:
        lines.append(f"step {step}: largest attention logit {largest:.3g}, in {_largest_of(metrics, ATTENTION_LOGIT)}")
    if FINITE in metrics and metrics[SKIPPED] > before.get(SKIPPED, 0) and metrics[FINITE] == 0:
        skipped, scale = int(metrics[SKIPPED]), math.log2(metrics[SCALE])
        lines.append(
            f"step {step}: left out, gradients not finite; {skipped} so far, the loss scale is now 2^{scale:g}"
        )
    if RECOMPILED in metrics:
        count = int(metrics[RECOMPILED])
        lines.append(f"step {step}: recompiled: torch.compile made the step's program anew ({count})")
    return lines


def left_out_line(record: StepRecord) -> str:
    """Format the line of a step that was skipped because it is not finite."""
    so_far = int(record.metrics.get(SKIPPED, 1))
    return f"step {record.step}: left out, not finite: {record.left_out}; {so_far} so far"


def norm_lines(step: int, metrics: Mapping[str, float]) -> list[str]:
    """Return lines for what updates do to weights, for norms by group, and for memory, as far as they are known."""

    def under(prefix: str) -> dict[str, float]:
        return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}

    ratios = ", ".join(f"{group} {value:.1e}" for group, value in under("update_ratio/").items())
    weights, gradients = under("param_norm/"), under("grad_norm/")
    norms = ", ".join(f"{group} {norm:.3g}/{gradients.get(group, math.nan):.2g}" for group, norm in weights.items())
    sizes = ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in under(MEMORY).items())
    said = {"update/weight": ratios, "norms, weights/gradients": norms, "memory": sizes}
    return [f"step {step}: {what}: {text}" for what, text in said.items() if text]


def _largest_of(metrics: Mapping[str, float], prefix: str) -> str:
    return max((k for k in metrics if k.startswith(f"{prefix}blocks.")), key=lambda k: metrics[k]).removeprefix(prefix)


def time_left(seconds: Sequence[float], steps: int) -> str:
    """Format the time of `steps` more steps at the median of `seconds`, the wall times of the last steps."""
    if not seconds or not steps:
        return ""
    return f"{duration(sorted(seconds)[len(seconds) // 2] * steps)} left"


def _comparisons(check: Check) -> str:
    total = len(check.findings)
    return f"{total} comparison" + ("s" if total != 1 else "")


def _three(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"

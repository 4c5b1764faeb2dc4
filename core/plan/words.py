"""A plan as rows of tables, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.budget import flops_per_token, parameter_count, parameter_count_by_group
from lockstep.core.plan.checks import checks_waiting, cost_of_check
from lockstep.core.plan.choices import Choice, micro_batches, own_name
from lockstep.core.plan.estimate import Estimate
from lockstep.core.plan.gpus import Gpu
from lockstep.core.plan.published import PARAMETERS, beside, savings

if TYPE_CHECKING:
    from lockstep.core.plan.data import Reading

Rows = list[list[object]]
CONVENTIONS = {"6N": "6N", "causal": "+ causal attention", "full": "+ full attention"}


def gb(size: float) -> str:
    """Write bytes in GB (10⁹); in MB where that is little."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def model_rows(estimate: Estimate) -> Rows:
    """Return parameters by group, FLOPs a token, the peak."""
    config = estimate.config
    rows: Rows = [["parameters", f"{parameter_count(config.model):,}"]]
    rows += [[f"  {group}", f"{count:,}"] for group, count in parameter_count_by_group(config.model).items()]
    first, *others = config.train.lengths
    flops = flops_per_token(config.model, first)
    rows += [[f"FLOPs a token, {CONVENTIONS[kind]}", f"{value / 1e9:,.3f} G"] for kind, value in flops.items()]
    for length in others:
        of_length = flops_per_token(config.model, length)
        rows.append([f"  at {length} tokens", f"{of_length['causal'] / 1e9:,.3f} G, {of_length['full'] / 1e9:,.3f} G"])
    if estimate.seconds:
        rows.append(["peak", peak_words(estimate)])
    return rows


def peak_words(estimate: Estimate) -> str:
    """Return, in words, the peak that utilisation is relative to."""
    peak = f"{estimate.peak_flops / 1e12:,.1f} TFLOP/s, dense"
    sparse = " (1979 is the sparse one)" if round(estimate.peak_flops / 1e11) == 9894 else ""
    return f"{peak}{sparse}"


def memory_rows(estimate: Estimate) -> Rows:
    """Return the components, what stays between steps, the peak, and what the device must have."""
    found, precision = estimate.memory, estimate.config.precision
    rows: Rows = [[name, gb(size)] for name, size in found.state.items()]
    if precision.plan.changed and estimate.config.compile.enabled:
        rows.insert(0, [f"casts: {precision.casts}", "compiled: of them, residual stream and logits are planned"])
    rows.append(["steady: weights and moments", gb(found.steady)])
    if found.gradients:
        rows.append(["gradients", gb(found.gradients)])
    rows += [[f"activations: {name}", gb(size)] for name, size in found.activations.items() if size]
    rows.append(["activations kept", gb(found.saved)])
    rows.append([f"peak allocated ({found.where})", gb(found.peak)])
    rows.append(["  of it working memory and new gradients", gb(max(0.0, found.working))])
    rows += [[name, gb(size)] for name, size in found.outside.items()]
    there = f" of {gb(estimate.gpu.memory)}" if estimate.gpu.memory else ""
    rows.append(["needed", gb(found.total) + there + ("" if estimate.fits else ": does not fit")])
    for _, other in estimate.pieces if len(estimate.pieces) > 1 else ():
        train = other.config.train
        rows.append([f"needed at [{train.micro_batch_size}, {train.sequence_length}]", gb(other.peak)])
    return rows


def time_rows(estimate: Estimate, price: float) -> Rows:
    """Return a step's parts, tokens a second, utilisation, days and dollars; nothing where rates are not known."""
    time, train = estimate.seconds, estimate.config.train
    if time is None or estimate.tokens_per_second is None or estimate.days is None:
        return []
    rows: Rows = [[name, f"{value:.3f} s"] for name, value in asdict(time).items() if value]
    rows.append(["step", f"{time.step:.3f} s"])
    rows.append(["tokens/s", f"{estimate.tokens_per_second:,.0f}"])
    rows += [[f"MFU, {CONVENTIONS[kind]}", f"{value:.1%}"] for kind, value in estimate.mfu.items()]
    for count, other in estimate.pieces if len(estimate.pieces) > 1 else ():
        at = f"{count:,} steps of [{other.config.train.batch_size}, {other.config.train.sequence_length}]"
        rows.append([at, f"{other.step_seconds:.3f} s each"])
    tokens = train.steps * train.batch_size * train.sequence_length
    rows.append([f"{tokens:,} tokens", f"{estimate.days:,.2f} days on {train.ranks} × {estimate.gpu.title}"])
    rows.append([f"at ${price:g} a GPU hour (an assumption: --price)", f"${estimate.cost(price):,.0f}"])
    return rows


def headline(estimate: Estimate, price: float) -> str:
    """Return the plan in one line: does the run fit, and, where rates are known, its days and dollars."""
    gpu, ranks = estimate.gpu, estimate.config.train.ranks
    fits = "fits" if estimate.fits else "does not fit"
    line = f"{estimate.config.name} {fits}: {estimate.peak / 1e9:,.1f} of {gpu.memory / 1e9:,.1f} GB on {gpu.title}"
    if estimate.days is None:
        return line
    return f"{line}; {estimate.days:,.2f} days on {ranks} GPU{'s'[: ranks > 1]}, ${estimate.cost(price):,.0f}"


def check_rows(config: RunConfig) -> Rows:
    """Return the rows of a check in training and of one of `lockstep parity`: bytes on disk and in memory, seconds."""
    parity, train = config.parity, config.train
    during, thorough = (cost_of_check(config, thorough=one) for one in (False, True))
    every = f"every {parity.every} steps" if parity.every else "none: parity.every = 0"
    rows: Rows = [["during training", every], ["evidence on the disk", gb(during.kept)]]
    rows += [[f"  {what}", gb(size)] for what, size in during.evidence.items()]
    waiting = checks_waiting(config)
    rows.append([f"  of the {waiting} that may wait", gb(waiting * during.disk)])
    rows.append(["host memory: trainer, gathering", gb(during.gathering)])
    rows.append(["host memory: the process that judges", gb(during.judging)])
    rows.append(["device: what the candidate's program shows", f"{gb(during.device)}; by windows {gb(during.least)}"])
    if parity.reference_device != "cpu":
        rows.append(["device: the reference", gb(during.reference)])
    rows.append(["judging on two cores; on a GPU", f"{during.seconds:,.0f} s; not measured"])
    rows.append(["lockstep parity", f"{train.batch_size * train.sequence_length:,} tokens a step"])
    rows.append(["evidence on the disk", gb(thorough.kept)])
    rows.append(["  with the round trip's checkpoint", gb(thorough.disk)])
    rows.append(["host memory beside the candidate's", gb(max(thorough.gathering, thorough.judging))])
    rows.append(["judging on two cores; on a GPU", f"{thorough.seconds:,.0f} s; not measured"])
    return rows


def choice_table(config: RunConfig, found: Sequence[Choice]) -> tuple[list[str], Rows]:
    """Return headers and rows: GB needed by policy and micro-batch; brackets: as configured, !: does not fit."""
    micros = micro_batches(config)
    headers = ["computed again", *(str(micro) for micro in micros), "largest", "that divides", "tokens/s there"]
    rows: Rows = []
    for choice in found:
        cells = [_cell(choice, micro, config) for micro in micros]
        speed = choice.best and choice.best.tokens_per_second
        mark = "→ " if choice.own else ""
        rows.append(
            [
                f"{mark}{choice.name}",
                *cells,
                str(choice.largest or "none"),
                str(choice.largest_dividing or "none"),
                f"{speed:,.0f}" if speed else "",
            ]
        )
    return headers, rows


def _cell(choice: Choice, micro: int, config: RunConfig) -> str:
    estimate = choice.by_micro[micro]
    text = f"{estimate.peak / 1e9:.3g}" if estimate.peak >= 1e8 else f"{estimate.peak / 1e9:.2g}"
    if estimate.peak >= 1e12:
        text = f"{estimate.peak / 1e9:,.0f}"
    text += "" if estimate.fits else "!"
    return f"({text})" if choice.own and micro == config.train.micro_batch_size else text


def is_published_model(config: RunConfig) -> bool:
    """Return whether the run has the shapes of the published figures."""
    return parameter_count(config.model) == PARAMETERS and config.train.sequence_length == 2048


PUBLISHED = ("row", "published GB, reserved", "estimated GB, allocated", "published s", "estimated s", "remark")
SAVED = ("computed again, [16, 2048]", "published", "estimated", "points")


def published_rows(config: RunConfig) -> Rows:
    """Return the published rows beside ours, with the difference."""
    rows: Rows = []
    for row in beside(config):
        theirs = "" if row.theirs is None else f"{row.theirs / 1e9:.1f}"
        more = "" if row.theirs is None else f" ({row.ours / row.theirs - 1:+.0%})"
        seconds = "" if row.our_seconds is None else f"{row.our_seconds:.3f}"
        if row.their_seconds and row.our_seconds:
            seconds += f" ({row.our_seconds / row.their_seconds - 1:+.0%})"
        published = f"{row.their_seconds:.3f}" if row.their_seconds else ""
        rows.append([f"{row.name}: {row.about}", theirs, f"{row.ours / 1e9:.1f}{more}", published, seconds, row.why])
    return rows


def saving_rows(config: RunConfig) -> Rows:
    """Return the published checkpointing table beside ours."""
    return [[s.about, f"{s.theirs:.1%}", f"{s.ours:.1%}", f"{100 * (s.ours - s.theirs):+.1f}"] for s in savings(config)]


READINGS = ("data set", "share", "tokens of this run", "tokens in it", "epochs")


def reading_rows(found: Sequence[Reading]) -> list[tuple[str, ...]]:
    """Return the rows of the table of data sets, under READINGS."""
    return [
        (
            one.name,
            f"{one.share:.1%}",
            f"{one.tokens:,}",
            ("not prepared here" if one.share else "left out") if one.held is None else f"{one.held:,}",
            "–" if one.epochs is None else f"{one.epochs:.3g}" if one.epochs < 1000 else f"{one.epochs:,.0f}",
        )
        for one in found
    ]


def as_data(estimate: Estimate, found: Sequence[Choice], price: float, data: Sequence[Reading]) -> dict[str, Any]:
    """Return the whole plan for `--json`: bytes, seconds, dollars."""
    config, memory = estimate.config, estimate.memory
    return {
        "gpu": _gpu(estimate.gpu),
        "parameters": parameter_count(config.model),
        "parameters_by_group": parameter_count_by_group(config.model),
        "flops_per_token": flops_per_token(config.model, config.train.sequence_length),
        "memory": {**asdict(memory), "steady": memory.steady, "saved": memory.saved, "needed": memory.total},
        "fits": estimate.fits,
        "policy": own_name(config),
        "seconds": estimate.seconds and {**asdict(estimate.seconds), "step": estimate.seconds.step},
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "days": estimate.days,
        "checks": {
            name: {**asdict(cost), "kept": cost.kept, "disk": cost.disk, "seconds": cost.seconds}
            for name, thorough in (("during_training", False), ("thorough", True))
            for cost in [cost_of_check(config, thorough=thorough)]
        },
        "price_per_gpu_hour": price,
        "cost": estimate.cost(price),
        "data": [asdict(one) for one in data],
        "choices": [
            {
                "policy": choice.name,
                "needed_by_micro_batch": {str(micro): one.peak for micro, one in choice.by_micro.items()},
                "largest": choice.largest,
                "largest_dividing": choice.largest_dividing,
                "tokens_per_second": choice.best and choice.best.tokens_per_second,
            }
            for choice in found
        ],
        "published": [asdict(row) for row in beside(config)] if is_published_model(config) else [],
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return asdict(gpu)

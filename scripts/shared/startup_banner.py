"""Describe a run at its start: on the console and in run.json."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.config.curriculum import last_steps
from lockstep.core.config.mixture import all_parts
from lockstep.core.config.schema import RunConfig, TrainConfig
from lockstep.core.data.mixed import source_names
from lockstep.core.model.budget import flops_per_token, parameter_count, parameter_count_by_group
from lockstep.core.model.families import graph_of
from lockstep.core.model.groups import group_settings, update_rules
from lockstep.core.model.names import groups_of
from lockstep.core.parity.measures.calibrated_bounds import recipe_of
from lockstep.core.run.launch import launch_id
from lockstep.core.sinks.tables import GroupRow, facts, losses_to_know, parameter_groups
from lockstep.core.train.schedule import batch_size, decay_steps, sequence_length
from lockstep.core.versions import version_of
from lockstep.scripts.shared.restart import LAUNCH

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.run.data import RunData
    from lockstep.core.run.directory import RunDir

LIBRARIES = ("torch", "jax", "jaxlib", "flax", "optax", "numpy", "tokenizers", "torchao")


def run_info(config: RunConfig, backend: str, about: Mapping[str, Any], data: RunData) -> dict[str, Any]:
    """Return the contents of run.json at the start."""
    return {
        "backend": backend,
        "versions": versions(),
        "hardware": {
            "device": about["device"],
            "cpu_cores": os.cpu_count(),
            "threads": about.get("threads"),
            "machine": platform.machine(),
        },
        "in_force": dict(about["in_force"]),
        "git_commit": git_commit(),
        "parameters": parameter_count(config.model),
        "data": data_facts(data),
        "wandb_id": None,
        LAUNCH: launch_id(),
    }


def data_facts(data: RunData) -> dict[str, Any]:
    """Return the data's entry in run.json: fingerprints, which resumes compare, and sizes and entropies for readers."""
    return data.dataset.facts()


def reading_of(data: RunData) -> str:
    """Return how often a run reads its data, for each data set of a mixture, and which ones are left out."""
    config, facts = data.config, data_facts(data)
    train = config.train
    tokens = train.steps * train.batch_size * train.sequence_length
    epochs = data.sampler.epochs(-(-tokens // train.longest))
    if not (names := source_names(facts)):
        return f"{_tokens(facts['train_tokens'])}: {_epochs(epochs[0])}"
    shares = [source["share"] for source in facts["sources"]]
    read = [f"{name} {share:.1%}, {_epochs(count)}" for name, share, count in zip(names, shares, epochs, strict=True)]
    left_out = [part.name for part in all_parts(config.data.mixture) if not part.weight]
    return "; ".join([*read, *([f"left out, with a weight of zero: {', '.join(left_out)}"] if left_out else [])])


def _tokens(count: int | None) -> str:
    return "still being prepared" if count is None else f"{count:,} tokens"


def _epochs(count: float) -> str:
    return f"{count:.3g} epochs" if count < 1000 else f"{count:,.0f} epochs"


def versions() -> dict[str, str]:
    """Return versions of Python, Lockstep and the libraries that affect numbers."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in ("lockstep", *LIBRARIES)}


def git_commit() -> str | None:
    """Return the commit of Lockstep's checkout, with `+` if it has changes; None outside one or without git.

    A project's repository may surround an installed Lockstep, as one with its environment in `.venv` does. It does not
    track this file, so its commit is not Lockstep's.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    here = Path(__file__).resolve()
    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def precision_of(config: RunConfig, group: str) -> str:
    """Name the dtype of a parameter group's products; for the block linears, how many of them are in FP8."""
    precision = config.precision
    stream = precision.stream
    if group not in ("matrices", "head") and not (group == "embedding" and config.model.tied):
        return stream
    if group == "embedding":
        return stream if stream == precision.operand else f"{stream}; as the head {precision.operand}"
    linears = graph_of(config.model).linears
    narrow = sum(map(precision.is_fp8, linears))
    if group == "head" or not narrow:
        return precision.operand
    return f"{precision.policy}: {narrow} of {len(linears)} linears" + (
        ", others bf16" if narrow < len(linears) else ""
    )


def optimizer_of(config: RunConfig, group: str) -> str:
    """Name the update rules of a parameter group."""
    groups, rules = groups_of(config.model), update_rules(config)
    return " and ".join(dict.fromkeys(rules[name].title for name, of in groups.items() if of == group))


def recomputed_of(config: RunConfig, group: str) -> str:
    """Name the parts of a group's layers that the backward pass recomputes."""
    parts = {"embedding": ("embedding",), "matrices": ("attention", "mlp", "block"), "gains": ("norms", "block")}
    found = [part for part in parts.get(group, ()) if part in config.recompute.chosen]
    return ", ".join(found) or "no"


def sequences_of(train: TrainConfig) -> str:
    """Describe the number of sequences of a step and their length, for each phase of the curriculum."""
    ends = last_steps(train.curriculum, train.steps) or (train.steps,)
    said = [f"{batch_size(train, end)} sequences of {sequence_length(train, end)}" for end in ends]
    if len(ends) > 1:
        said = [f"{words} up to step {end:,}" for words, end in zip(said, ends, strict=True)]
    return ", then ".join(said)


def learning_rate_of(config: RunConfig) -> str:
    """Describe the schedule in words."""
    optim, steps = config.optim, config.train.steps
    falls = {"cosine": "half a cosine", "linear": "a straight line", "wsd": "1 − √ of the share done"}[optim.schedule]
    if optim.schedule == "wsd" and optim.decay_shape == "linear":
        falls = "a straight line"
    parts = [f"{optim.warmup_steps:,} steps of warm-up to {optim.peak_lr:g}"] if optim.warmup_steps else []
    first = steps - decay_steps(optim, steps)
    parts += [f"{optim.peak_lr:g} up to step {first:,}"] if optim.schedule == "wsd" else []
    lowest = optim.peak_lr * optim.min_lr_ratio
    return ", ".join([*parts, f"{falls} down to {lowest:g} at step {steps:,}"])


def flops_of(config: RunConfig, length: int) -> str:
    """Return the FLOPs per token at a sequence length, by convention."""
    by_kind = flops_per_token(config.model, length)
    said = ", ".join(f"{kind} {value / 1e9:.4g}" for kind, value in by_kind.items())
    return f"at {length}: {said}" if len(config.train.lengths) > 1 else said


def print_start(console: Console, run: RunDir, data: RunData, about: Mapping[str, Any]) -> None:
    """Print tables: the settings in force, the parameter groups, and reference losses."""
    config, of_data = run.config, data_facts(data)
    train = config.train
    stream = config.precision.stream
    tokens = train.batch_size * train.sequence_length
    every = config.parity.every
    in_force = {
        "device": f"{about['device']}, {about['backend']} {next(iter(about['versions'].values()))}",
        **about["in_force"],
        "precision": f"matrix products in {config.precision.operand}, all else and the master weights in {stream}"
        + (f"; casts: {config.precision.casts}" if config.precision.plan.changed else ""),
        "a step": f"{tokens:,} tokens: {sequences_of(train)}, "
        f"{train.accumulation} micro-batches{' a rank' if train.ranks > 1 else ''}",
        "learning rate": learning_rate_of(config),
        "the run": f"{train.steps:,} steps, {train.steps * tokens:,} tokens",
        "the data": reading_of(data),
        "GFLOP a token": "; ".join(map(partial(flops_of, config), train.lengths)),
        "parity checks": f"the first step and every {every} steps; bounds of {recipe_of(config)}" if every else "off",
    }
    console.print(facts(f"{config.name}: in force", in_force))
    rows = [
        GroupRow(
            group,
            count,
            **asdict(group_settings(config, group)),
            optimizer=optimizer_of(config, group),
            precision=precision_of(config, group),
            recomputed=recomputed_of(config, group),
        )
        for group, count in parameter_count_by_group(config.model).items()
    ]
    console.print(parameter_groups(rows))
    entropies = {kind: of_data[f"val_{kind}_entropy"] for kind in ("unigram", "bigram")}
    console.print(
        losses_to_know(of_data["vocabulary"], {kind: nats for kind, nats in entropies.items() if nats is not None})
    )

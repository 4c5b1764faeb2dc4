"""`lockstep bench best`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.core.files.paths import quoted
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.installation import HOME

if TYPE_CHECKING:
    from typing import Any

    from lockstep.core.bench.best import Candidate, Prediction, Search, Space
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.plan.gpus import Gpu

DEVICE_LIMIT = 120.0
CHUNKS = (2048, 4096, 8192, 16384)


@dataclass
class BenchBest:
    """Search the fastest configuration of a run within a time limit: `lockstep bench best CONFIG --minutes 9`.

    Micro-batch, activation checkpointing, attention kernel, compilation and loss head are tried; precision is the run
    file's, or searched too with --fp8. Each candidate runs in a process of its own. One that crashes, runs out of
    memory or diverges is dropped, and the reason is listed. Ends 0 with a run file of the winner, 2 if no candidate
    could run.
    """

    config: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="(required)")
    ] = None
    """run file (TOML): model, sequence length, optimizer"""
    minutes: float = 9.0
    """time limit of the search; the candidate that runs when it is reached is stopped"""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: h100; cpu on a CPU)")] = ""
    """GPU whose plan rules candidates out: h100, h100-pcie, h200, a100-80 or cpu"""
    batch: int = 64
    """sequences a step during the search, at most the run file's batch_size"""
    fp8: bool = False
    """also try FP8, tensorwise and rowwise"""
    few: int = 3
    """timed steps of a candidate, after 2 warm-up steps"""
    many: int = 10
    """timed steps of each of the fastest candidates"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("best.toml")
    """run file of the winner, ready for lockstep train; a .json, an .md and a .log are written beside it"""


def main(argv: list[str]) -> int:
    """Search, print, write."""
    from lockstep.core.config.file import load_config
    from lockstep.core.plan import gpu_named

    options, given = parse(BenchBest, "bench best", argv, with_settings=True, shown=_bears_on_it)
    if options.config is None:
        raise UserError("nothing to search for; name a run file: lockstep bench best configs/llama-1b.toml")
    if not (math.isfinite(options.minutes) and options.minutes > 0):
        raise UserError(f"command line: minutes = {options.minutes}: must be a number above 0")
    for name in ("batch", "few", "many"):
        if getattr(options, name) < 1:
            raise UserError(f"command line: {name} = {getattr(options, name)}: must be at least 1")
    check_file("out", options.out)
    if options.gpu:
        gpu_named(options.gpu)
    load_config(options.config, given)
    return find(options, given)


def _bears_on_it(key: str) -> bool:
    return key in ("seed", "device", "precision.policy") or key.startswith(("model.", "optim.")) or "length" in key


class Plan:
    """The planner of `bench best`: lockstep.core.plan as core/bench/best.py uses it (`Predicts`)."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.memory = gpu, gpu.memory

    def __call__(self, config: RunConfig) -> Prediction:
        """Return the memory and the time that `config` needs."""
        from lockstep.core.bench.best import Prediction
        from lockstep.core.plan import fits

        estimate = fits(config, self.gpu)
        return Prediction(estimate.peak, estimate.step_seconds)


def space(config: RunConfig, kind: str, batch: int, fp8: bool) -> Space:
    """Return the levers and their choices. A CPU has fewer: those that take minutes to compile are left out."""
    from lockstep.core.components import precision
    from lockstep.core.components.attention_kernels import ATTENTION_KERNELS
    from lockstep.core.plan.choices import POLICIES

    kernels = ATTENTION_KERNELS.values()
    powers = [2**k for k in range(batch.bit_length()) if batch % 2**k == 0]
    length, lengths = config.train.sequence_length, config.train.lengths
    # The winner trains the whole run: at every length of its curriculum.
    micro = [size for size in powers if all(size * length % other == 0 for other in lengths)]
    policies = {
        name: {
            "recompute.parts": policy.parts,
            "recompute.every": str(policy.every),
            "recompute.keep_products": str(policy.keep_products).lower(),
        }
        for name, policy in POLICIES.items()
        if kind == "cuda" or name in ("none", "block")
    }
    tokens = batch * config.train.sequence_length
    chunks = [chunk for chunk in CHUNKS if chunk <= tokens] or [max(tokens // 2, 1)]
    heads = {f"chunked {chunk}": {"loss.head": "chunked", "loss.chunk": str(chunk)} for chunk in chunks}
    programs = {
        "whole": _program("default", "model"),
        "by blocks": _program("default", "blocks"),
        "CUDA graphs": _program("reduce-overhead", "model"),
        "max-autotune": _program("max-autotune", "model"),
    }
    if kind == "cpu":
        programs = {"eager": {"compile.enabled": "false", "compile.mode": "default"}}
    found: dict[str, Any] = {
        "micro-batch": {str(size): {"train.micro_batch_size": str(size)} for size in reversed(micro)},
        "checkpointing": policies,
        "attention": {one.name: {"attention.kernel": one.name} for one in kernels if kind in one.tried_on},
        "program": programs,
        "head": {**heads, "whole": {"loss.head": "full"}},
    }
    if fp8:
        names = (config.precision.policy, *(name for name, policy in precision.POLICIES.items() if policy.fp8))
        found["precision"] = {name: {"precision.policy": name} for name in dict.fromkeys(names)}
    return found


def _program(mode: str, scope: str) -> dict[str, str]:
    return {
        "compile.enabled": "true",
        "compile.backend": "inductor",
        "compile.mode": mode,
        "compile.scope": scope,
        "recompute.memory_budget": "1.0",
    }


def find(options: BenchBest, given: dict[str, str]) -> int:
    """Search on this machine's device, and write all results to the files."""
    from lockstep.core.bench.best import as_data, candidates, page, search
    from lockstep.core.bench.suite import Worker
    from lockstep.core.config.file import load_config
    from lockstep.core.files.atomic import write_atomically
    from lockstep.core.plan import gpu_named
    from lockstep.core.sinks.terminal import open_console

    started = time.monotonic()
    console = open_console()
    with options.out.with_suffix(".log").open("a") as log:
        ask = Worker([sys.executable, "-P", "-m", "lockstep.scripts.shared.bench_worker"], HOME, log)
        about = ask({"job": "device"}, DEVICE_LIMIT)
        if about["status"] != "measured":
            raise UserError(f"the bench could not read this device: {about['reason']}")
        kind = about["device"]["kind"] if given.get("device") != "cpu" else "cpu"
        config = load_config(options.config, {**given, "device": kind})
        batch = min(options.batch, config.train.batch_size)
        fixed = {**given, "device": kind, "train.batch_size": str(batch), "train.ranks": "1", "train.curriculum": ""}
        gpu = gpu_named(options.gpu or ("cpu" if kind == "cpu" else "h100"))
        found = candidates(
            space(config, kind, batch, options.fp8),
            lambda settings: load_config(options.config, {**fixed, **settings}),
            Plan(gpu),
        )
        total = len(found.candidates) + len(found.pruned)
        console.print(f"{total:,} combinations, {len(found.pruned):,} left out without a run", markup=False)

        def measure(one: Candidate, steps: int, limit: float) -> dict[str, Any]:
            job = {"job": "row", "row": one.name, "config": one.config.model_dump(mode="json")}
            return ask({**job, "warmup": 2, "repeat": steps}, limit)

        def told(one: Candidate, result: dict[str, Any]) -> None:
            said = f"{result['median']:.4g} s" if result["status"] == "measured" else f"{result['reason']}"
            console.print(f"{one.name}: {said}", markup=False, soft_wrap=True)

        seconds = 60 * options.minutes - (time.monotonic() - started)
        search(found, measure, seconds, options.few, options.many, told=told)
    said = {"device": about["device"], "versions": about["versions"], "config": config.name}
    said["command"] = f"lockstep bench best {_shown(options.config)} --minutes {options.minutes:g}"
    data = as_data(found, {**said, "batch": [batch, config.train.sequence_length]})
    write_atomically(options.out.with_suffix(".json"), [(json.dumps(data, indent=1) + "\n").encode()])
    write_atomically(options.out.with_suffix(".md"), [page(data).encode()])
    print(page(data))
    if found.winner is None:
        raise UserError(f"no candidate could be measured; {options.out.with_suffix('.md')} lists the reasons")
    write_atomically(options.out, [run_file(options, given, found).encode()])
    print(f"{options.out}: lockstep train {quoted(options.out)}")
    return 0


def _shown(path: Path | None) -> str:
    """Return a run file's path as it was given; a bundled one's path without the folders of this machine."""
    assert path is not None
    return path.name if path.is_absolute() else str(path)


def run_file(options: BenchBest, given: dict[str, str], found: Search) -> str:
    """Write the winner as a run file: its base, and what differs from it."""
    import tomli_w

    from lockstep.core.config.file import load_config
    from lockstep.core.config.schema import flatten

    assert options.config is not None and found.winner is not None
    won = flatten(found.of(found.winner).config.model_dump(mode="json"))
    base = flatten(load_config(options.config).model_dump(mode="json"))
    # The winner keeps the run's batch of a step: the search varied only its micro-batches.
    kept = {"device", "train.batch_size", "train.ranks", "train.curriculum"} - set(given)
    tree: dict[str, Any] = {"base": os.path.relpath(options.config.resolve(), options.out.resolve().parent)}
    for key, value in won.items():
        if base[key] != value and key not in kept:
            section, _, name = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = value
    header = f"# The fastest of lockstep bench best: {found.of(found.winner).name}\n"
    return header + tomli_w.dumps(tree)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure what clean runs look like, and write core/parity/bands.json and docs/calibration.md.

    python -m scripts.calibrate            all recipes, about twenty minutes on four cores
    python -m scripts.calibrate bf16/eager one recipe; the others are kept

Every draw is a clean torch session judged against the JAX twin and truth, at initial weights and after some training,
over model shapes, seeds and micro-batchings. Data are bytes of the running Python's standard library. Bounds come
from the calibration seeds; the held-out seeds were never looked at when bounds were set, and say how often a clean
run would have been accused.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import sysconfig
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from core.backend import Batch, State
from core.config import CompileConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from core.init import init_parameters
from core.parity import bands
from core.parity.bands import Extremes
from core.parity.evidence import gather, uneven_weights
from core.parity.excess import Distances
from core.parity.judge import Reference, judge
from core.parity.verdict import Measure
from jax_backend.session import JaxBackend
from torch_backend.session import TorchBackend

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("fp32/eager", "fp32/compiled", "bf16/eager", "bf16/compiled")
# Small and wide, tied and not, with and without biases, one to all KV heads, one block of attention's kernel and more.
SHAPES: tuple[tuple[dict[str, Any], dict[str, int]], ...] = (
    (
        {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_hidden": 128},
        {"batch_size": 4, "micro_batch_size": 4, "sequence_length": 64},
    ),
    (
        {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_hidden": 384}
        | {"tied": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"batch_size": 8, "micro_batch_size": 2, "sequence_length": 128},
    ),
    (
        {"hidden": 256, "layers": 6, "heads": 8, "kv_heads": 8, "ffn_hidden": 768},
        {"batch_size": 8, "micro_batch_size": 8, "sequence_length": 128},
    ),
    (
        {"hidden": 192, "layers": 3, "heads": 6, "kv_heads": 1, "ffn_hidden": 512}
        | {"vocab_size": 1000, "rope_theta": 10_000.0, "tied": False},
        {"batch_size": 4, "micro_batch_size": 2, "sequence_length": 320},
    ),
)
CALIBRATION_SEEDS, HELD_OUT_SEEDS = (0, 1, 2, 3, 4, 5), (1000, 1001, 1002)
CHECKS, BETWEEN = 5, 6

Sample = tuple[str, Distances]


def text() -> np.ndarray:
    """Bytes of the standard library's modules, uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


def draw_batch(config: RunConfig, data: np.ndarray, rng: np.random.Generator) -> Batch:
    """Random windows with uneven loss weights."""
    rows, length = config.train.batch_size, config.train.sequence_length
    starts = rng.integers(0, len(data) - length - 1, rows)
    window = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    plain = Batch(window[:, :-1].copy(), window[:, 1:].copy(), np.ones((rows, length), np.float32))
    return uneven_weights(plain, int(rng.integers(2**31)))


def clean_runs(recipe: str, shape: int, seeds: tuple[int, ...], data: np.ndarray) -> dict[int, list[Sample]]:
    """Seed → distances of every comparison of a clean run: `CHECKS` checked steps with `BETWEEN` steps in between."""
    policy, program = recipe.split("/")
    model, train = SHAPES[shape]
    config = RunConfig(
        model=ModelConfig(**({"vocab_size": 256} | model)),
        train=TrainConfig(steps=CHECKS * (BETWEEN + 1), **train),
        optim=OptimConfig(warmup_steps=5),
        precision=PrecisionConfig(policy=policy),
        compile=CompileConfig(enabled=program == "compiled"),
    )
    samples: list[Sample] = []

    def record(recipe: str, kind: str, d: Distances) -> tuple[Measure, ...]:
        samples.append((kind, d))
        return (Measure("excess", d.excess, None, None, "calibration"),)

    torch._dynamo.reset()
    reference = replace(Reference.open(JaxBackend(), config), bound=record)
    session = TorchBackend().open(config)
    by_seed = {}
    for seed in seeds:
        # One reference and one session a shape: only their weights change, their programs stay compiled.
        session.load(initial_state(config, seed))
        seeded = replace(reference, config=config.model_copy(update={"seed": seed}))
        rng = np.random.default_rng(seed)
        for _ in range(CHECKS):
            judge(gather(session, config, draw_batch(config, data, rng)), seeded)
            for _ in range(BETWEEN):
                session.step(draw_batch(config, data, rng))
        by_seed[seed] = samples.copy()
        samples.clear()
    print(f"{recipe}, shape {shape}: {time.perf_counter():.0f} s", file=sys.stderr, flush=True)
    return by_seed


def initial_state(config: RunConfig, seed: int) -> State:
    """Initial weights of a seed, moments at zero."""
    params = init_parameters(config.model, seed)
    return State(
        0, params, {kind: {n: np.zeros_like(p) for n, p in params.items()} for kind in ("exp_avg", "exp_avg_sq")}
    )


def extremes(samples: list[Sample]) -> dict[str, Extremes]:
    """The extremes of each kind of comparison."""
    by_kind: dict[str, list[Distances]] = defaultdict(list)
    for kind, d in samples:
        by_kind[kind].append(d)
    return {
        kind: Extremes(
            log_excess=max(abs(math.log(d.excess)) for d in ds),
            distance=max(d.twin_distance for d in ds),
            gain=max(abs(d.gain_difference) / d.twin_relative_error if d.twin_relative_error else 0.0 for d in ds),
            draws=len(ds),
        )
        for kind, ds in sorted(by_kind.items())
    }


def calibrate(recipe: str) -> tuple[dict[str, Extremes], list[Sample]]:
    """Extremes over the calibration seeds, and every sample of the held-out seeds."""
    data = text()
    runs = [clean_runs(recipe, shape, CALIBRATION_SEEDS + HELD_OUT_SEEDS, data) for shape in range(len(SHAPES))]

    def of(seeds: tuple[int, ...]) -> list[Sample]:
        return [sample for by_seed in runs for seed in seeds for sample in by_seed[seed]]

    return extremes(of(CALIBRATION_SEEDS)), of(HELD_OUT_SEEDS)


def report(recipe: str, clean: dict[str, Extremes], held_out: list[Sample]) -> list[str]:
    """A section of docs/calibration.md: extremes, bounds, and how the held-out draws fared."""
    seen = extremes(held_out)
    accused: dict[str, int] = defaultdict(int)
    for kind, d in held_out:
        accused[kind] += not all(m.ok for m in bands.measures(recipe, kind, d))
    lines = [
        f"## {recipe}",
        "",
        f"Held-out draws: {sum(accused.values())} of {len(held_out)} clean comparisons accused.",
        "",
        "| kind | draws | excess ×/÷ | bound | distance | bound | gain / twin error | bound "
        "| held out: excess ×/÷, accused |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, c in clean.items():
        excess = max(math.exp(bands.MARGIN * c.log_excess), bands.LEAST_EXCESS)
        lines.append(
            f"| {kind} | {c.draws} | {math.exp(c.log_excess):.3f} | {excess:.3f} "
            f"| {c.distance:.3f} | {max(bands.MARGIN * c.distance, bands.LEAST_DISTANCE):.3f} "
            f"| {c.gain:.3f} | {max(bands.MARGIN * c.gain, bands.LEAST_GAIN):.3f} "
            f"| {math.exp(seen[kind].log_excess):.3f}, {accused[kind]} of {seen[kind].draws} |"
        )
    return [*lines, ""]


def main() -> None:
    """Calibrate the recipes named on the command line, or all."""
    chosen = sys.argv[1:] or list(RECIPES)
    path, page = ROOT / "core/parity/bands.json", ROOT / "docs/calibration.json"
    stored = json.loads(path.read_text()) if path.exists() else {"recipes": {}}
    sections = json.loads(page.read_text()) if page.exists() else {}
    for recipe in chosen:
        started = time.perf_counter()
        clean, held_out = calibrate(recipe)
        stored["recipes"][recipe] = {kind: asdict(e) for kind, e in clean.items()}
        path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        bands.table.cache_clear()
        sections[recipe] = report(recipe, clean, held_out)
        page.write_text(json.dumps(sections, indent=1) + "\n")
        print(f"{recipe}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        print("\n".join(sections[recipe]))
    head = [
        "# Calibration: what clean runs look like",
        "",
        f"Made by `python -m scripts.calibrate` with torch {torch.__version__.split('+')[0]} on {platform.machine()} "
        f"({platform.system()}), CPU.",
        f"{len(SHAPES)} model shapes × {len(CALIBRATION_SEEDS)} seeds for the bounds and × {len(HELD_OUT_SEEDS)} other "
        f"seeds held out, {CHECKS} checked steps a run with {BETWEEN} training steps in between, uneven loss weights, "
        "real text as bytes.",
        "",
        f"A bound is the calibration's extreme times {bands.MARGIN:g} on the logarithm of the excess, on the distance "
        f"and on the gain, and never below excess ×/÷ {bands.LEAST_EXCESS}, distance {bands.LEAST_DISTANCE}, gain "
        f"{bands.LEAST_GAIN} of the twin's error.",
        "",
    ]
    (ROOT / "docs/calibration.md").write_text(
        "\n".join(head + [line for r in RECIPES if r in sections for line in sections[r]])
    )


if __name__ == "__main__":
    main()

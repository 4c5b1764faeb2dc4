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
        {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 1, "ffn_hidden": 24, "qkv_bias": True, "mlp_bias": True},
        {"batch_size": 4, "micro_batch_size": 1, "sequence_length": 33},
    ),
    (
        {"hidden": 192, "layers": 3, "heads": 6, "kv_heads": 1, "ffn_hidden": 512}
        | {"vocab_size": 1000, "rope_theta": 10_000.0, "tied": False},
        {"batch_size": 4, "micro_batch_size": 2, "sequence_length": 320},
    ),
)
CALIBRATION_SEEDS, HELD_OUT_SEEDS = (0, 1, 2, 3, 4, 5), (1000, 1001, 1002)
CHECKS, BETWEEN = 5, 6

Sample = tuple[str, Distances, int]


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

    def record(recipe: str, kind: str, d: Distances, size: int) -> tuple[Measure, ...]:
        samples.append((kind, d, size))
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
    """The extremes of each kind of comparison, in units of the scatter of its size."""
    by_kind: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for kind, d, size in samples:
        gain = abs(d.gain_difference) / d.twin_relative_error if d.twin_relative_error else 0.0
        width = bands.scatter(size)
        by_kind[kind].append((abs(math.log(d.excess)) / width, d.twin_distance / width, gain / width))
    found = {}
    for kind, values in sorted(by_kind.items()):
        log_excess, distance, gain = (max(column) for column in zip(*values, strict=True))
        found[kind] = Extremes(log_excess, distance, gain, len(values))
    return found


def calibrate(recipe: str) -> tuple[dict[str, Extremes], list[Sample]]:
    """Extremes over the calibration seeds, and every sample of the held-out seeds."""
    data = text()
    runs = [clean_runs(recipe, shape, CALIBRATION_SEEDS + HELD_OUT_SEEDS, data) for shape in range(len(SHAPES))]

    def of(seeds: tuple[int, ...]) -> list[Sample]:
        return [sample for by_seed in runs for seed in seeds for sample in by_seed[seed]]

    return extremes(of(CALIBRATION_SEEDS)), of(HELD_OUT_SEEDS)


def accused(recipe: str, samples: list[Sample]) -> dict[str, int]:
    """How many clean comparisons of each kind the bounds would have accused."""
    counts = {kind: 0 for kind, _, _ in samples}
    for kind, d, size in samples:
        measures = bands.measures(recipe, kind, d, size)
        if kind == "gradients/together":
            measures = tuple(m for m in measures if m.name == "excess")
        counts[kind] += not all(m.ok for m in measures)
    return counts


def read_table() -> dict[str, Any]:
    """What was measured so far."""
    path = ROOT / "core/parity/bands.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {"recipes": stored.get("recipes", {}), "held_out": stored.get("held_out", {})}


def write_table(table: dict[str, Any]) -> None:
    """Write bands.json, and make the bounds in this process follow it."""
    (ROOT / "core/parity/bands.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    bands.table.cache_clear()


def page(table: dict[str, Any]) -> str:
    """docs/calibration.md."""
    lines = [
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
        f"{bands.LEAST_GAIN} of the twin's error. All are those of a large tensor; for one of n numbers "
        f"distance, gain and the logarithm of the excess are wider by √(1 + {bands.SCATTER_SIZE} / n). "
        f"Under bf16, excess and distance of NLL and gradients have a margin of {bands.MARGIN_END_TO_END:g}.",
        "",
    ]
    for recipe in RECIPES:
        if recipe in table["recipes"] and recipe in table["held_out"]:
            lines += _section(recipe, table["recipes"][recipe], table["held_out"][recipe])
    return "\n".join(lines)


def _section(recipe: str, clean: dict[str, Any], held_out: dict[str, Any]) -> list[str]:
    wrong, draws = sum(h["accused"] for h in held_out.values()), sum(h["draws"] for h in held_out.values())
    lines = [
        f"## {recipe}",
        "",
        f"Held-out draws: {wrong} of {draws} clean comparisons accused.",
        "",
        "| kind | draws | excess ×/÷ | bound | distance | bound | gain / twin's error | bound "
        "| held out: excess ×/÷, accused |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, c in clean.items():
        h, margin = held_out[kind], bands.margin(recipe, kind)
        lines.append(
            f"| {kind} | {c['draws']} "
            f"| {math.exp(c['log_excess']):.3f} | {max(math.exp(margin * c['log_excess']), bands.LEAST_EXCESS):.3f} "
            f"| {c['distance']:.3f} | {max(margin * c['distance'], bands.LEAST_DISTANCE):.3f} "
            f"| {c['gain']:.3f} | {max(bands.MARGIN * c['gain'], bands.LEAST_GAIN):.3f} "
            f"| {math.exp(h['log_excess']):.3f}, {h['accused']} of {h['draws']} |"
        )
    return [*lines, ""]


def main() -> None:
    """Calibrate the recipes named on the command line, or all."""
    for recipe in sys.argv[1:] or RECIPES:
        started = time.perf_counter()
        clean, held_out = calibrate(recipe)
        table = read_table()
        table["recipes"][recipe] = {kind: asdict(e) for kind, e in clean.items()}
        write_table(table)
        wrong = accused(recipe, held_out)
        table["held_out"][recipe] = {k: asdict(e) | {"accused": wrong[k]} for k, e in extremes(held_out).items()}
        write_table(table)
        (ROOT / "docs/calibration.md").write_text(page(table))
        print(
            f"{recipe}: {time.perf_counter() - started:.0f} s, {sum(wrong.values())}/{len(held_out)} held out accused"
        )


if __name__ == "__main__":
    main()

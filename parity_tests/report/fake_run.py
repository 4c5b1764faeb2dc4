"""A made-up run directory like that of a real run, right or faulty, from a seed."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.config.schema import ModelConfig, flatten
from lockstep.core.files.jsonl import sealed_line
from lockstep.core.model.names import layer_of, parameter_shapes
from lockstep.core.parity.judge.bias import Bias
from lockstep.core.parity.judge.judge import in_order
from lockstep.core.parity.measures.verdict import Check, Finding, Measure
from lockstep.core.parity.reference.stages import forward_stages
from lockstep.core.run.info import write_info

MODEL = ModelConfig(layers=4)
FAULT_STEP = 150
LOCAL_DISTANCE = 0.8
SAMPLE = (
    'The meaning of life is to return a list of all the keys.\n    """\n    def keys(self):\n'
    "        return list(self)\n\n</script><script>alert(1)</script> \x1b[31mred\x00 🙂 \u202eesrever"
)
CONFIG = """name = "stdlib-6l"
seed = 0

[model]
vocab_size = 4096
hidden = 256
layers = 6

[data]
path = "data/stdlib"

[train]
steps = 400
batch_size = 16
sequence_length = 128

[optim]
peak_lr = 0.003
warmup_steps = 20
clip_norm = 1.0

[precision]
policy = "bf16"

[parity]
every = 10
"""
NOT_COVERED = ("local checks of 6 of the micro-batch's sequences", "reduction over ranks: one process")
SKIPPED = (40, 230)
BROKEN = "q_rope"


def write_run(
    path: Path,
    *,
    steps: int = 400,
    every: int = 10,
    faulty: bool = False,
    checked: bool = True,
    seed: int = 0,
    model: ModelConfig = MODEL,
) -> Path:
    """Write the files of a run that was checked every `every` steps; return the directory.

    faulty: RoPE is wrong from `FAULT_STEP` on.
    """
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    records = [record(step, steps, rng) for step in range(1, steps + 1)]
    (path / "records.jsonl").write_bytes(b"".join(map(sealed_line, records)))
    write_info(path / "run.json", about())
    (path / "config.toml").write_text(CONFIG, encoding="utf-8")
    if checked:
        lines, sums = check_lines(range(every, steps + 1, every), faulty, rng, model)
        (path / "parity.jsonl").write_bytes(b"".join(map(sealed_line, lines)))
        (path / "observations").mkdir(exist_ok=True)
        np.savez(path / "observations" / "bias.npz", **sums.to_arrays())  # type: ignore[arg-type]
    return path


def record(step: int, steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return one record of records.jsonl."""
    clean = 3.55 + 4.78 * math.exp(-step / 28) * 0.55 + 4.78 * 0.45 * (1 + step / 30) ** -0.9
    loss = clean + rng.normal(0, 0.07)
    warm = min(step / 20, 1.0)
    lr = 3e-3 * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * max(step - 20, 0) / max(steps - 20, 1))))
    norm = (0.42 + 2.4 * math.exp(-step / 25)) * math.exp(rng.normal(0, 0.16))
    seconds = (9.4 if step == 1 else 0.31) * math.exp(rng.normal(0, 0.02))
    metrics: dict[str, float] = {}
    if step % 10 == 0 or step == 1:
        for group, share, ratio in (("embedding", 0.45, 1.0), ("matrices", 0.85, 2.1), ("gains", 0.11, 0.35)):
            metrics[f"grad_norm/{group}"] = norm * share * math.exp(rng.normal(0, 0.05))
            metrics[f"param_norm/{group}"] = 40.0 * share
            metrics[f"update_ratio/{group}"] = lr * ratio * math.exp(rng.normal(0, 0.06))
    if step % 50 == 0:
        metrics["val/loss"] = clean + 0.12
        metrics["val/top1"] = 0.02 + 0.5 * (1 - math.exp(-step / 180))
        metrics["fp32/difference"] = rng.normal(0, 2e-4)
        metrics["fp32/loss"] = loss - metrics["fp32/difference"] + rng.normal(0, 0.05)
    return {
        "step": step,
        "loss": loss,
        "loss_weight": 2048.0,
        "lr": lr,
        "grad_norm": norm,
        "clip_coefficient": min(1.0, 1.0 / norm),
        "digest": f"{step:064x}",
        "tokens": 2048,
        "seconds": seconds,
        "tokens_per_second": 2048 / seconds,
        "mfu": {"6N": 0.41 * 0.31 / seconds, "causal": 0.37 * 0.31 / seconds},
        "metrics": metrics,
        "sample": SAMPLE if step == steps else None,
    }


def about() -> dict[str, Any]:
    """Return the content of run.json."""
    return {
        "name": "stdlib-6l",
        "backend": "torch",
        "created": "2026-03-02T09:14:51+00:00",
        "versions": {"lockstep": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "jax": "0.10.2"},
        "hardware": {"device": "NVIDIA H100 80GB HBM3", "count": 1, "driver": "570.86", "compile": "inductor"},
        "git_commit": "3f1c9a7be2d04455c0ffee1234567890abcdef12",
        "data": {
            "path": "data/stdlib",
            "fingerprint": "9b1d7c5e" * 8,
            "tokenizer_fingerprint": "17aa04cd" * 8,
            "val_unigram_entropy": 6.913,
            "val_bigram_entropy": 4.287,
        },
        "wandb_id": None,
        "parameters": 4_851_968,
        "config": flatten(tomllib.loads(CONFIG)),
    }


def check_lines(
    steps: Iterable[int], faulty: bool, rng: np.random.Generator, model: ModelConfig = MODEL
) -> tuple[list[dict[str, Any]], Bias]:
    """Return the lines of parity.jsonl, some of them skipped checks, and the sums of their local comparisons."""
    lines: list[dict[str, Any]] = []
    sums = Bias()
    for step in steps:
        if step in SKIPPED:
            lines.append({"step": step, "verdict": "skipped", "reason": "the queue was full (2 checks waiting)"})
            continue
        found = in_order([*findings(faulty and step >= FAULT_STEP, rng, model), *biases(sums, rng)])
        bad = any(not f.ok for f in found)
        cause = "disappears with FP32 RoPE tables" if bad else None
        lines.append(Check(step, found, NOT_COVERED, 4.2, cause).to_json())
    return lines, sums


def biases(sums: Bias, rng: np.random.Generator) -> list[Finding]:
    """Return findings over steps for two stages: one right, one with a small systematic error."""
    found = []
    for stage, tap, lean in (("q", "blocks.0.attn.q", 0.0), ("attn_norm", "blocks.1.attn_norm", 0.02)):
        key, n = (stage, "forward", tap), 512
        truth, error = rng.normal(0, 1, n), rng.normal(0, 1e-3, n)
        sums.add(key, 1e-3 * (rng.normal(0, 0.05, n) + lean), error, truth, np.float32, rng.normal(0, 1e-5))
        if measures := sums.measures(key, LOCAL_DISTANCE, 0.5, n):
            found.append(Finding(stage, tap, "forward", layer_of(tap), "over_steps", measures, n))
    return found


def findings(bad: bool, rng: np.random.Generator, model: ModelConfig = MODEL) -> list[Finding]:
    """Return the findings of one check. bad: with a wrong RoPE table and its consequences."""
    found = [exact("tokens", "tokens", "data", 2048), exact("weights", "names", "state", 57)]
    depth = 0.0
    for stage in forward_stages(model):
        wrong = bad and stage.id == BROKEN
        depth += wrong
        for phase in ("forward", "backward"):
            excess = 1.43 if wrong and phase == "forward" else 0.97
            distance = 2.6 if excess > 1 else 0.04
            found.append(tensor(stage.id, stage.tap, phase, "local", jitter(excess, 0.03, rng), distance, rng))
            grown = 1.0 + 0.9 * (1 - math.exp(-depth))
            found.append(tensor(stage.id, stage.tap, phase, "end_to_end", jitter(grown, 0.02, rng), 0.5, rng))
    found += [scalar("loss", "loss", "forward", rng)]
    for name in parameter_shapes(model):
        hit = bad and ("q_proj" in name or "k_proj" in name)
        excess = jitter(3.6 + 0.1 * (layer_of(name) or 0) if hit else 0.98, 0.05, rng)
        note = "length off by the accumulation steps (÷2)" if hit else ""
        found.append(tensor("gradients", name, "backward", "end_to_end", excess, 0.5, rng, note))
        found.append(tensor("update", name, "update", "local", jitter(0.97, 0.03, rng), 0.02, rng))
    return found + [scalar(s, s, "update", rng) for s in ("grad_norm", "clip_coefficient", "learning_rate")]


def jitter(value: float, spread: float, rng: np.random.Generator) -> float:
    return float(value * math.exp(min(max(rng.normal(0, spread), -2.5 * spread), 2.5 * spread)))


def tensor(
    stage: str,
    tap: str,
    phase: str,
    scope: Any,
    excess: float,
    distance: float,
    rng: np.random.Generator,
    note: str = "",
) -> Finding:
    """Return the finding of a tensor. Its bound on the gain depends on the twin's error, and so differs by step."""
    local = scope == "local"
    high = 1.25 if local else 1.45
    basis = f"780 clean draws reached {high**0.5:.3g}, ^2"
    error = float(2e-3 * math.exp(rng.normal(0, 0.3)))
    reach = 0.5 * error
    measures = (
        Measure("excess", excess, 1 / high, high, basis),
        Measure("gain_difference", float(rng.uniform(-0.2, 0.2)) * reach, -reach, reach, f"of the error {error:.1e}"),
        Measure("twin_distance", jitter(distance, 0.2, rng), None, LOCAL_DISTANCE if local else 1.5, basis),
    )
    unequal = min(1.0, jitter(0.004, 0.5, rng) * (60 if excess > high else 1)) if local else None
    return Finding(stage, tap, phase, layer_of(tap), scope, measures, 524_288, unequal, note)


def scalar(stage: str, tap: str, phase: str, rng: np.random.Generator) -> Finding:
    """Return the finding of a number that is recomputed in FP64."""
    ulp = Measure(
        "ulp", float(rng.integers(0, 3)), None, 4.0, "a float32 sum of 2048 terms in pairs: log2(2048) / 3 ulp"
    )
    return Finding(stage, tap, phase, None, "local", (ulp,), 1)


def exact(stage: str, tap: str, phase: str, size: int) -> Finding:
    """Return the finding of an integer tensor of `size` elements, which is compared exactly."""
    return Finding(stage, tap, phase, None, "local", (Measure("mismatches", 0.0, None, 0.0, "exact"),), size)

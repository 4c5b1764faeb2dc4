"""A run directory as a real run would leave it, honest or faulty, made up from a seed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from core.config import ModelConfig
from core.names import group_of, layer_of, parameter_shapes, tap_names
from core.parity.verdict import Check, Finding, Measure

MODEL = ModelConfig()
FAULT_STEP = 150
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
STAGES = {
    "attn_norm": "attn_norm",
    "attn.q": "qkv",
    "attn.k": "qkv",
    "attn.v": "qkv",
    "attn.q_rope": "rope",
    "attn.k_rope": "rope",
    "attn.out": "attention",
    "attn.o_proj": "o_proj",
    "attn_residual": "attn_residual",
    "mlp_norm": "mlp_norm",
    "mlp.gate": "mlp_in",
    "mlp.up": "mlp_in",
    "mlp.act": "activation",
    "mlp.down_proj": "down_proj",
    "mlp_residual": "mlp_residual",
}


def write_run(
    path: Path,
    *,
    steps: int = 400,
    every: int = 10,
    faulty: bool = False,
    checked: bool = True,
    seed: int = 0,
) -> Path:
    """Write the files of one run that was checked each `every` steps; a faulty one breaks RoPE at `FAULT_STEP`."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    records = [record(step, steps, rng) for step in range(1, steps + 1)]
    (path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    (path / "run.json").write_text(json.dumps(about(), indent=2), encoding="utf-8")
    (path / "config.toml").write_text(CONFIG, encoding="utf-8")
    if checked:
        lines = [check_line(step, faulty, rng) for step in range(every, steps + 1, every)]
        (path / "parity.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return path


def record(step: int, steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """One line of records.jsonl."""
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
    """`run.json`."""
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
    }


def check_line(step: int, faulty: bool, rng: np.random.Generator) -> dict[str, Any]:
    """One line of parity.jsonl: skipped at step 40 and 230, else every finding of the chain."""
    if step in (40, 230):
        return {"schema": 1, "step": step, "verdict": "skipped", "reason": "the queue was full (2 checks waiting)"}
    return Check(
        step=step,
        findings=tuple(findings(faulty and step >= FAULT_STEP, rng)),
        not_covered=("checkpoint written and read back", "attention inside the fused kernel"),
        seconds=4.2,
    ).to_json()


def findings(bad: bool, rng: np.random.Generator) -> list[Finding]:
    """The chain of one check; `bad` plants a wrong RoPE table and what follows from it."""
    found = [exact("tokens", "tokens", "data", 2048), exact("targets", "targets", "data", 2048)]
    taps = tap_names(MODEL)
    for tap in taps:
        kind = tap.split(".", 2)[-1] if tap.startswith("blocks.") else tap
        wrong = bad and kind in ("attn.q_rope", "attn.k_rope")
        excess = (1.43 if wrong else 0.97) * math.exp(rng.normal(0, 0.03))
        found.append(tensor(STAGES.get(kind, kind), tap, "forward", "local", excess, 2.6 if wrong else 0.04, rng))
    found.append(scalar("nll", "nll", "forward", rng))
    found.append(scalar("loss", "loss", "forward", rng))
    for depth, tap in enumerate(taps):
        excess = 1.0 + (0.9 * (1 - math.exp(-depth / 12)) if bad and depth > 5 else 0)
        stage = STAGES.get(tap.split(".", 2)[-1], tap)
        found.append(tensor(stage, tap, "forward", "end_to_end", excess * math.exp(rng.normal(0, 0.06)), None, rng))
    for name in reversed(list(parameter_shapes(MODEL))):
        layer = layer_of(name)
        hit = bad and ("q_proj" in name or "k_proj" in name)
        excess = (3.6 + 0.4 * (layer or 0) if hit else 1.5 if bad else 0.98) * math.exp(rng.normal(0, 0.07))
        found.append(tensor("gradients", name, "backward", "end_to_end", excess, None, rng))
    found += [scalar(s, s, "update", rng) for s in ("grad_norm", "clip", "learning_rate")]
    for name in parameter_shapes(MODEL):
        excess = 0.94 * math.exp(rng.normal(0, 0.04))
        found.append(tensor(f"update.{group_of(name)}", name, "update", "local", excess, 0.02, rng))
    return found


def tensor(
    stage: str, tap: str, phase: str, scope: Any, excess: float, distance: float | None, rng: np.random.Generator
) -> Finding:
    """A compared tensor."""
    local = scope == "local"
    high = 1.25 if local else 1.45
    basis = f"1.1 × the worst of 64 clean runs, bf16 inductor, {scope.replace('_', ' ')}"
    measures = [
        Measure("excess", excess, 0.5, high, basis),
        Measure("gain_difference", rng.normal(0, 4e-4), -4e-3, 4e-3, "2 × the worst of 64 clean runs"),
    ]
    if distance is not None:
        value = distance * math.exp(rng.normal(0, 0.4))
        measures.append(Measure("twin_distance", value, None, 1.0, "an honest stage reproduces its twin"))
    unequal = min(1.0, 0.004 * math.exp(rng.normal(0, 0.5)) * (60 if excess > high else 1)) if local else None
    return Finding(stage, tap, phase, layer_of(tap), scope, tuple(measures), 524_288, unequal)


def scalar(stage: str, tap: str, phase: str, rng: np.random.Generator) -> Finding:
    """A number that was recomputed in FP64."""
    ulp = Measure(
        "ulp", float(rng.integers(0, 3)), None, 4.0, "a float32 sum of 2048 terms in pairs: log2(2048) / 3 ulp"
    )
    return Finding(stage, tap, phase, None, "local", (ulp,), 1)


def exact(stage: str, tap: str, phase: str, size: int) -> Finding:
    """Integers, compared one by one."""
    return Finding(stage, tap, phase, None, "local", (Measure("mismatches", 0.0, None, 0.0, "exact"),), size)

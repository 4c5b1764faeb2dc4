"""Measure how often `watch` accuses a clean trainer: foreign trainers × families × precisions. Resumable.

    python -m lockstep.scripts.studies.watch_alarms            run the missing cells, write docs/results/watch_alarms.md
    python -m lockstep.scripts.studies.watch_alarms --device cuda   on a GPU: watch_alarms_cuda.jsonl
    python -m lockstep.scripts.studies.watch_alarms --page     only write the page from the finished cells

A run is a few steps of a small model of transformers, from random weights, on this repository's sources as text. Every
step is checked against the model itself. The run's number determines sizes, rows, clipping, accumulation and schedule.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from lockstep.scripts.studies.repository import ROOT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import watch, watch_accelerate, watch_lightning, watch_trainer
from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.torch_backend.watch.adapters.trainer import one_over_targets, token_losses

# By device: its page, and its lines beside it under the same name.
PAGES = {"cpu": ROOT / "docs/results/watch_alarms.md", "cuda": ROOT / "docs/results/watch_alarms_cuda.md"}
STEPS, VOCABULARY = 4, 257
# Tokens of the shortest row.
LEAST = 3
# In runs with a planted fault one gradient is scaled by this factor.
TOO_LONG = 1.05
# A check counts only if these links were judged.
JUDGED = {"loss", "gradients", "update"}
PRECISIONS = ("fp32", "autocast", "bf16")
PACKAGES = ("torch", "transformers", "accelerate", "lightning")

Rows = list[dict[str, Tensor]]
# Trainer, family, precision, number, and whether a fault is planted.
Cell = tuple[str, str, str, int, bool]


@dataclass(frozen=True)
class Draw:
    """The choices that the number of a run determines. parts: micro-batches per step. rows: per micro-batch."""

    number: int
    hidden: int
    layers: int
    heads: int
    length: int
    rows: int
    parts: int
    clip_norm: float | None
    rate: float
    attention: str
    tied: bool

    @classmethod
    def of(cls, number: int, precision: str) -> Draw:
        """Draw from a number.

        Weights in bf16 are not clipped, because torch rounds their norm to bf16, which a check accuses.
        """
        rng = random.Random(number)
        heads = rng.choice((2, 4))
        drawn = cls(
            number=number,
            hidden=heads * rng.choice((8, 16, 24)),
            layers=rng.choice((1, 2, 3)),
            heads=heads,
            length=rng.choice((9, 16, 33, 64)),
            rows=rng.choice((1, 2, 4)),
            parts=rng.choice((1, 2, 3)),
            clip_norm=rng.choice((None, 0.1, 1.0)),
            rate=rng.choice((1e-4, 1e-3, 1e-2)),
            attention=rng.choice(("eager", "sdpa")),
            tied=rng.random() < 0.5,
        )
        return replace(drawn, clip_norm=None) if precision == "bf16" else drawn


def model_of(family: str, draw: Draw) -> nn.Module:
    """Return a transformers model of a family, with random weights of a fixed seed."""
    import transformers as t

    torch.manual_seed(draw.number)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        # transformers caps scores only in its eager attention
        "attn_implementation": "eager" if family == "gemma2" else draw.attention,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": draw.tied,
    }
    if family == "gpt2":
        config: Any = t.GPT2Config(
            n_positions=draw.length, n_embd=draw.hidden, n_layer=draw.layers, n_head=draw.heads, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, **common,
        )  # fmt: skip
    else:
        kinds = {
            "llama": t.LlamaConfig, "qwen2": t.Qwen2Config, "qwen3": t.Qwen3Config, "mistral": t.MistralConfig,
            "gemma2": t.Gemma2Config,
        }  # fmt: skip
        own: dict[str, Any] = {
            "mistral": {"sliding_window": 7},
            "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": draw.hidden // draw.heads},
        }.get(family, {})
        config = kinds[family](
            hidden_size=draw.hidden, intermediate_size=3 * draw.hidden, num_hidden_layers=draw.layers,
            num_attention_heads=draw.heads, num_key_value_heads=draw.heads // 2, max_position_embeddings=draw.length,
            head_dim=draw.hidden // draw.heads, **common, **own,
        )  # fmt: skip
    model: Any = t.AutoModelForCausalLM.from_config(config)
    model.loss_type = (
        "ForCausalLM"  # of GPT-2, whose Trainer counts labels before they are shifted (docs/guide/watch_trainers.md)
    )
    found: nn.Module = model
    return found


@cache
def text() -> bytes:
    """Return this repository's Python sources."""
    return b"".join(path.read_bytes() for path in sorted((ROOT / "core").rglob("*.py")))


def rows_of(draw: Draw, count: int) -> Rows:
    """Cut rows of text, some shorter than others; padding is masked and not a target.

    Each row begins with different tokens: attention over equal tokens has no gradient, so a fault in it would have no
    effect.
    """
    rng, found = random.Random(draw.number), list[dict[str, Tensor]]()
    while len(found) < count:
        start = rng.randrange(len(text()) - draw.length)
        cut = text()[start : start + draw.length]
        if len(set(cut[:LEAST])) < LEAST:
            continue
        ids, real = torch.tensor(list(cut)), torch.arange(draw.length) < rng.randint(LEAST, draw.length)
        found.append({"input_ids": ids * real, "attention_mask": real.long(), "labels": torch.where(real, ids, -100)})
    return found


def stacked(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Make one micro-batch of rows."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def micro_batches(draw: Draw, device: torch.device) -> list[dict[str, Tensor]]:
    """Make the micro-batches of all steps on a device."""
    rows = rows_of(draw, STEPS * draw.parts * draw.rows)
    parts = [stacked(rows[i : i + draw.rows]) for i in range(0, len(rows), draw.rows)]
    return [{name: x.to(device) for name, x in part.items()} for part in parts]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.parameters()).device


def mean_loss(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the cross-entropy of a micro-batch over its own targets."""
    total = token_losses(model, inputs)
    return total / (inputs["labels"][:, 1:] != -100).sum()


def optimizer_of(model: nn.Module, draw: Draw) -> torch.optim.Optimizer:
    """Make the optimizer of torch that the run's number determines."""
    kinds: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.AdamW(model.parameters(), lr=draw.rate),
        lambda: torch.optim.Adam(model.parameters(), lr=draw.rate),
        lambda: torch.optim.SGD(model.parameters(), lr=10 * draw.rate, momentum=0.9),
        lambda: torch.optim.Adafactor(model.parameters(), lr=draw.rate),
    ]
    return kinds[draw.number % len(kinds)]()


def loop(model: nn.Module, precision: str, draw: Draw) -> Any:
    """Train in a plain loop whose loss is the mean over the tokens of a step."""
    optimizer = optimizer_of(model, draw)
    autocast = precision == "autocast"
    watcher = watch(
        model, optimizer, loss=token_losses, accumulate=one_over_targets, every=1, clip_norm=draw.clip_norm,
        precision="bf16" if autocast else None,
    )  # fmt: skip
    batches = micro_batches(draw, device_of(model))
    for first in range(0, len(batches), draw.parts):
        parts, losses = batches[first : first + draw.parts], []
        for part, weight in zip(parts, one_over_targets(parts), strict=True):
            with torch.autocast(device_of(model).type, torch.bfloat16, enabled=autocast):
                loss = token_losses(model, part) * weight
            loss.backward()
            losses.append(loss.detach())
        with watcher.step(parts, sum(losses)):
            if draw.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), draw.clip_norm)
            optimizer.step()
        optimizer.zero_grad()
    return watcher


def trainer(model: nn.Module, precision: str, draw: Draw) -> Any:
    """Train by transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=draw.rows, gradient_accumulation_steps=draw.parts,
            max_steps=STEPS, max_grad_norm=draw.clip_norm or 0.0, learning_rate=draw.rate, weight_decay=0.1,
            lr_scheduler_type="cosine", warmup_steps=2, bf16=precision == "autocast",
            use_cpu=device_of(model).type == "cpu", report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        rows: Any = rows_of(draw, STEPS * draw.parts * draw.rows)
        own = Trainer(model=model, args=args, train_dataset=rows)
        watcher = watch_trainer(own, every=1)
        own.train()
    return watcher


def accelerate(model: nn.Module, precision: str, draw: Draw) -> Any:
    """Train in a loop with accelerate."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    mixed = "bf16" if precision == "autocast" else "no"
    accelerator = Accelerator(
        cpu=device_of(model).type == "cpu", gradient_accumulation_steps=draw.parts, mixed_precision=mixed
    )
    batches: Any = micro_batches(draw, device_of(model))
    loader: Any = DataLoader(batches, batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model, draw), loader)
    watcher = watch_accelerate(accelerator, model, optimizer, loss=mean_loss, every=1, clip_norm=draw.clip_norm)
    for batch in loader:
        with accelerator.accumulate(model):
            # accelerate applies autocast only to the model's own call
            loss = mean_loss(model, batch)
            accelerator.backward(loss)
            with watcher.step(batch, loss):
                if accelerator.sync_gradients and draw.clip_norm:
                    accelerator.clip_grad_norm_(model.parameters(), draw.clip_norm)
                optimizer.step()
            optimizer.zero_grad()
    return watcher


def lightning(model: nn.Module, precision: str, draw: Draw) -> Any:
    """Train by Lightning's Trainer, with automatic optimisation."""
    import lightning as L  # type: ignore[import-not-found,unused-ignore]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return mean_loss(self.inner, batch)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self, draw)

    watcher = watch_lightning(every=1)
    batches: Any = micro_batches(draw, device_of(model))
    own = L.Trainer(
        callbacks=[watcher], max_steps=STEPS, accelerator="gpu" if device_of(model).type == "cuda" else "cpu",
        devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=draw.parts,
        gradient_clip_val=draw.clip_norm, precision="bf16-mixed" if precision == "autocast" else None,
    )  # fmt: skip
    own.fit(Module(), DataLoader(batches, batch_size=None))
    return watcher


TRAINERS: dict[str, Callable[[nn.Module, str, Draw], Any]] = {
    "loop": loop,
    "Trainer": trainer,
    "accelerate": accelerate,
    "Lightning": lightning,
}
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2")


def plant(model: nn.Module, number: int) -> str:
    """Scale the gradient of one matrix; return its name."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    name, parameter = matrices[number % len(matrices)]
    parameter.register_hook(lambda gradient: gradient * TOO_LONG)
    return name


def run(cell: Cell, device: str) -> dict[str, Any]:
    """Train one cell. Return its row: checks, comparisons and accusations."""
    torch.set_num_threads(1)
    logging.getLogger("lockstep.watch").setLevel(logging.ERROR)
    _forget()
    name, _, precision, number, planted = cell
    model, draw = model_and_draw(cell, device)
    fault = plant(model, number) if planted else ""
    started = time.perf_counter()
    watcher = TRAINERS[name](model, precision, draw)
    whole = [check for check in watcher.checks if {f.stage for f in check.findings} >= JUDGED]
    accused = [
        {"step": check.step, "cause": check.cause, "broken": [f"{f.stage} {f.tap}" for f in check.findings if not f.ok]}
        for check in watcher.checks
        if check.verdict == "disagreed"
    ]
    finite = not accused or planted or not not_finite(cell, device)
    return {
        "cell": list(cell),
        "fault": fault,
        "not_finite": [] if finite else not_finite(cell, device),
        "not_finite_without_cudnn": [] if finite else not_finite(cell, device, cudnn=False),
        "checks": len(whole),
        "left_out": sorted({line for check in watcher.checks for line in check.not_judged}),
        "comparisons": sum(len(check.findings) for check in whole),
        "accused": accused,
        "nearest": nearest(whole),
        "draw": {key: value for key, value in vars(draw).items() if key != "number"},
        "seconds": round(time.perf_counter() - started, 1),
    } | ({} if device == "cpu" else {"machine": machine(device)})


def model_and_draw(cell: Cell, device: str) -> tuple[nn.Module, Draw]:
    """Make the model of a cell on a device, and draw its run."""
    _, family, precision, number, _ = cell
    draw = Draw.of(number, precision)
    model = model_of(family, draw)
    return (model.to(torch.bfloat16) if precision == "bf16" else model).to(device), draw


def not_finite(cell: Cell, device: str, cudnn: bool = True) -> list[str]:
    """Name the gradients of the first step that are not finite without `watch`: an alarm about them is correct.

    cudnn: allow torch to choose cuDNN's attention.
    """
    model, draw = model_and_draw(cell, device)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn and before)
    try:
        for part in micro_batches(draw, torch.device(device))[: draw.parts]:
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=cell[2] == "autocast"):
                loss = mean_loss(model, part)
            loss.backward()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    return [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]


def _forget() -> None:
    """Reset accelerate's state, which otherwise keeps its first settings for the whole process."""
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def nearest(checks: Sequence[Any]) -> float:
    """Return the largest distance of any comparison as a share of its bound."""
    measures = (m for check in checks for f in check.findings for m in f.measures if m.name == "twin_distance")
    return max((m.value / m.high for m in measures if m.high), default=0.0)


def named(row: Mapping[str, Any]) -> bool:
    """Return whether the first step accused the gradient with the fault, and no other gradient."""
    broken = [line for check in row["accused"] if check["step"] == 1 for line in check["broken"]]
    gradients = [line for line in broken if line.startswith("gradients ")]
    return len(gradients) == 1 and gradients[0].endswith(row["fault"])


def page(rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """Return the page of a device."""
    lines_of, argument = PAGES[device].with_suffix(".jsonl").name, "" if device == "cpu" else f" --device {device}"
    machines = sorted({row["machine"] for row in rows if "machine" in row}) or [f"{_packages()}, {machine('cpu')}"]
    right = [row for row in rows if row.get("not_finite")]
    clean = [row for row in rows if not row["fault"] and row not in right]
    faulty = [row for row in rows if row["fault"]]
    checks, accused = sum(row["checks"] for row in clean), sum(len(row["accused"]) for row in clean)
    lines = [
        "# False alarms of `watch`: clean trainers of others that were accused",
        "",
        f"Made by `python -m lockstep.scripts.studies.watch_alarms{argument}` (resumable; its lines are "
        f"[{lines_of}]({lines_of})) with {'; '.join(machines)}. "
        f"**{accused} of {checks:,} checks were accused.** A check is one verdict on one step; it counts if loss, "
        f"gradients and update were judged. Each run is {STEPS} steps of a model of transformers with random weights "
        "(1–3 layers, 16–96 hidden, tied or not, eager or SDPA attention, 9–64 tokens a row, rows of uneven length), 1 "
        "to 3 micro-batches a step, clipped or not (weights in bf16 are not: torch rounds their norm); all steps are "
        "checked against the model itself. `autocast` is bf16 over weights in FP32, `bf16` weights in bf16. So that "
        "the zeros mean something: in "
        f"{len(faulty)} more runs, one of each trainer, family and precision, the gradient of one matrix is "
        f"{TOO_LONG - 1:.0%} too long. **{sum(map(named, faulty))} of them accused that gradient and no other, in the "
        "first step.**",
        "",
        "| trainer | family | fp32 | autocast | bf16 | nearest to a bound on the distance |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, family in itertools.product(TRAINERS, FAMILIES):
        own = [row for row in clean if row["cell"][:2] == [name, family]]
        counts = []
        for precision in PRECISIONS:
            these = [row for row in own if row["cell"][2] == precision]
            counts.append(f"{sum(len(r['accused']) for r in these)} of {sum(r['checks'] for r in these)}")
        near = max((row["nearest"] for row in own), default=0.0)
        lines.append(f"| {name} | {family} | {' | '.join(counts)} | {near:.2f} |")
    if right:
        lines += ["", *map(_of_right, right)]
    if left := sorted({line for row in rows if row not in right for line in row["left_out"]}):
        lines += ["", "Not judged in some run:", "", *(f"* {line}" for line in left)]
    return "\n".join([*lines, ""])


def _of_right(row: Mapping[str, Any]) -> str:
    """Describe a run that was accused for gradients that are not finite, and is not counted above."""
    name, family, precision, number, _ = row["cell"]
    without = "they are not either" if row["not_finite_without_cudnn"] else "all are finite"
    return (
        f"Not counted, as the alarm is right: {name}, {family}, {precision}, run {number}. Without `watch`, "
        f"{len(row['not_finite'])} gradients of its first step are not finite as well; with "
        f"`torch.backends.cuda.enable_cudnn_sdp(False)` {without}."
    )


def machine(device: str) -> str:
    """Name the device and, for a GPU, the versions."""
    if device == "cpu":
        return f"{platform.machine()} {platform.system()}, CPU"
    return f"{_packages()}, one {torch.cuda.get_device_name()}"


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _packages() -> str:
    """Name the libraries' versions, in words."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name).split('+')[0]}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


@dataclass
class WatchAlarms:
    """Run the missing cells, and write the page."""

    page: bool = False
    """only write the page from the finished rows"""
    draws: int = 10
    """number of clean runs of each trainer, family and precision; one more run has a fault"""
    jobs: int = 2
    """number of runs at a time; each computes on one thread"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device of the trainers"""
    minutes: float | None = None
    """time after which no run is started"""


def main() -> int:
    """Run the cells, write each row at once, write the page; 0 if no clean check was accused, and every fault was."""
    options, begun = tyro.cli(WatchAlarms), time.monotonic()
    results = PAGES[options.device].with_suffix(".jsonl")
    rows = read_lines(results) if results.exists() else []
    if not options.page:
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        names = [name for name in TRAINERS if name != "Lightning" or _has("lightning")]
        kinds = list(itertools.product(names, FAMILIES, PRECISIONS))
        numbers = range(options.draws * len(kinds))
        cells: list[Cell] = [(*kinds[n % len(kinds)], n, False) for n in numbers]
        cells += [(*kind, n, True) for n, kind in enumerate(kinds)]
        done = {tuple(row["cell"]) for row in rows}
        writer = JsonLines(results)
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            left = [cell for cell in cells if cell not in done]
            random.Random(0).shuffle(left)
            for row in pool.imap_unordered(partial(run, device=options.device), left):
                writer.append(row)
                rows.append(row)
                said = f"accused: {json.dumps(row['accused'])[:300]}" if row["accused"] else "agreed"
                print(*row["cell"], f"{row['checks']} checks, {said}, {row['seconds']:.0f} s", flush=True)
                if options.minutes is not None and time.monotonic() > begun + 60 * options.minutes:
                    break
        writer.close()
    PAGES[options.device].write_text(page(rows, options.device), encoding="utf-8")
    return int(any(not named(row) if row["fault"] else row["accused"] and not row.get("not_finite") for row in rows))


if __name__ == "__main__":
    sys.exit(main())

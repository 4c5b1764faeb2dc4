"""Measure the memory that `lockstep plan` estimates, on the CPU, and write its tables (docs/results/plan_cpu.md, …).

Run it as `python -m lockstep.scripts.studies.plan_check`.

Each case is a real forward and backward pass; the CPU allocator reports every tensor (torch_backend/tools/plan.py).
Ends 1 if any estimate is more than 10 % off.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence

import torch

from lockstep.core.config.file import load_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.plan import GPUS, fits, words
from lockstep.core.plan.memory import memory
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.tools.plan import measured_peak

ALLOWED = 0.10
# Section → the page that has it, between two marks.
PAGES = {
    "measured": ROOT / "docs/results/plan_cpu.md",
    "savings": ROOT / "docs/results/plan_published.md",
    "published": ROOT / "docs/results/plan_published.md",
    "stages": ROOT / "docs/guide/plan.md",
}
BASE = {
    "device": "cpu",
    "model.vocab_size": "2048",
    "model.hidden": "128",
    "model.layers": "3",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.ffn_hidden": "384",
    "train.steps": "100",
    "train.batch_size": "4",
    "train.micro_batch_size": "4",
    "train.sequence_length": "128",
    "optim.warmup_steps": "0",
    "loss.chunk": "128",
    "log.norms_every": "0",
    # As on CUDA; on the CPU `auto` is `math` for sequences this short.
    "attention.kernel": "flash",
}
POLICIES = ("", "embedding", "norms", "attention", "mlp", "attention,mlp", "block")
# A small vocabulary, so that the peak is in the blocks, not in the head.
BLOCKS = {"loss.head": "chunked", "model.vocab_size": "300", "train.sequence_length": "256"}
WRITTEN_OUT = {"loss.head": "chunked", "model.vocab_size": "300", "attention.kernel": "math"}
EAGER, COMPILED = {"compile.enabled": "false"}, {"compile.enabled": "true"}
OTHERS = (
    {"loss.head": "full", "train.micro_batch_size": "2"},
    {"loss.head": "full", "train.micro_batch_size": "1"},
    {"loss.head": "full", "train.sequence_length": "256"},
    {"loss.head": "full", "recompute.parts": "block", "recompute.every": "2"},
    {"loss.head": "full", "recompute.parts": "block", "recompute.keep_products": "true"},
    {"loss.head": "full", "attention.kernel": "math"},
    *({**WRITTEN_OUT, "recompute.parts": parts} for parts in ("", "attention", "block")),
    {**WRITTEN_OUT, "recompute.parts": "block", "recompute.keep_products": "true"},
    {**WRITTEN_OUT, "recompute.parts": "attention", "recompute.keep_products": "true"},
    {"loss.head": "full", "model.tied": "false"},
    {"loss.head": "full", "precision.policy": "fp64"},
    {**BLOCKS, "model.layers": "8"},
    *({**BLOCKS, "precision.casts": plan} for plan in ("autocast", "norm=bf16", "act=after silu and product")),
    {"loss.head": "full", "precision.casts": "logits=bf16"},
)


def grid() -> Iterator[dict[str, str]]:
    """Yield the changes of every case to BASE: policy × head × precision, and others, eager and compiled."""
    for program in (EAGER, COMPILED):
        for precision in ("bf16", "fp32"):
            for shape in ({"loss.head": "full"}, {"loss.head": "chunked"}, BLOCKS):
                for parts in POLICIES:
                    yield {**program, "precision.policy": precision, **shape, "recompute.parts": parts}
        for other in OTHERS:
            yield {**program, **other}


def config_of(settings: dict[str, str]) -> RunConfig:
    """Return the configuration of a case."""
    return load_config(None, BASE | settings)


def in_words(settings: dict[str, str]) -> str:
    """Write a case for the table."""
    names = {"compile.enabled": {"true": "compiled", "false": "eager"}}
    words = [names.get(key, {}).get(value, f"{key.rpartition('.')[2]} {value}") for key, value in settings.items()]
    return ", ".join(word for word in words if not word.endswith(" "))


def main() -> int:
    """Measure every case; the table goes to docs/results/plan_cpu.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only cases whose words contain this; the page is not written")
    parser.add_argument("--estimates", action="store_true", help="measure nothing; write only the tables of estimates")
    options = parser.parse_args()
    only = options.only
    if options.estimates:
        write(estimates())
        return 0
    rows, worst = [], 0.0
    for settings in grid():
        words = in_words(settings)
        if only not in words:
            continue
        config = config_of(settings)
        estimate, measured = memory(config, GPUS["cpu"]).activation_peak, measured_peak(config)["peak"]
        off = estimate / measured - 1
        worst = max(worst, abs(off))
        rows.append(f"| {words} | {estimate / 1e6:.2f} | {measured / 1e6:.2f} | {off:+.1%} |")
        print(rows[-1], flush=True)
    print(f"{len(rows)} cases, the worst {worst:.1%} off")
    if not only:
        about = f"{len(rows)} cases, the worst {worst:.1%} off; torch {torch.__version__}, {platform.machine()} CPU."
        header = ["| case | estimated MB | measured MB | off |", "|---|---|---|---|"]
        write({**estimates(), "measured": "\n".join([about, "", *header, *rows])})
    return 1 if worst > ALLOWED else 0


def estimates() -> dict[str, str]:
    """Return the sections of PAGES that have estimates alone."""
    config = load_config(ROOT / "configs/llama-1b.toml")
    return {
        "savings": markdown(words.SAVED, words.saving_rows(config)),
        "published": markdown(words.PUBLISHED, words.published_rows(config)),
        "stages": markdown(STAGE, list(map(_stage, STAGES))),
    }


STAGES = ("laptop", "h100x1", "h100x2", "h100x8")
STAGE = (
    "configs/rollout/",
    "GPUs",
    "micro-batch",
    "memory needed",
    "step",
    "tokens/s",
    "days",
    "dollars (assumed price)",
)


def _stage(name: str) -> list[object]:
    file = ROOT / f"configs/rollout/{name}.toml"
    config = load_config(file)
    if config.device == "cpu":
        # `auto` is flash here on a CPU with AVX-512. Thus the page does not depend on the machine that makes it.
        config = load_config(file, {"attention.kernel": "flash"})
    gpu = GPUS["cpu" if config.device == "cpu" else "h100"]
    plan, train = fits(config, gpu), config.train
    cells: list[object] = [f"{name}.toml", f"{train.ranks} × {gpu.name}", train.micro_batch_size, words.gb(plan.peak)]
    if plan.seconds is None:
        return [*cells, "", "", "", ""]
    speed, cost = plan.tokens_per_second or 0.0, plan.cost(gpu.price) or 0.0
    return [*cells, f"{plan.seconds.step:.2f} s", f"{speed:,.0f}", f"{plan.days:.2f}", f"{cost:,.0f}"]


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a table in Markdown."""
    lines = [list(headers), ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def write(sections: dict[str, str]) -> None:
    """Write sections between their marks in their pages."""
    for name, text in sections.items():
        page = PAGES[name].read_text()
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        PAGES[name].write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    sys.exit(main())

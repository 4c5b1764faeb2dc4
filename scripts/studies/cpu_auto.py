"""Compare the choices of `auto` on the CPU: attention kernels by sequence length, and AdamW fused or not.

    python -m lockstep.scripts.studies.cpu_auto            docs/results/cpu_auto.json and .md

The files keep one measurement for each set of instructions that torch's kernels use; a new one replaces its own.

Contenders run the same steps in turns in one process, so that a slow machine slows all of them. A ratio is the median
over rounds of the ratio of a round's two times. One call of each kernel is also timed, and compared with FP64.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import tyro

from lockstep.core.config.auto import SHORT, WIDTHS, has_cpp_compiler
from lockstep.core.config.file import load_config
from lockstep.core.train.process_memory import process_memory
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.attention import Kernel
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.precision import DTYPES
from lockstep.torch_backend.tools.bench import random_batches

RUN, PAGE = ROOT / "configs/quickstart.toml", ROOT / "docs/results/cpu_auto.md"
ROUNDS, WARM = 7, 2
TOKENS = 2048
LENGTHS = (64, 128, 192, 256, 512)
# Torch's kernels, then Lockstep's.
KERNELS = ("flash", "math", "flash_brgemm")
FUSED, FOREACH = ({"attention.kernel": "flash", "optim.fused": fused} for fused in ("true", "false"))
# Heads, their width, and lengths of the calls whose errors are measured.
CALLS, PARTS = ((8, 64, 128), (8, 64, 512), (8, 64, 2048)), ("output", "gradient of q", "of k", "of v")


def kernels_here() -> list[str]:
    """List the kernels that run here."""
    return [name for name in KERNELS if has_cpp_compiler() or name != "flash_brgemm"]


def settings(length: int, compiled: bool, policy: str) -> dict[str, str]:
    """Return the settings of a step of TOKENS tokens in sequences of `length`, all in one micro-batch."""
    count = str(max(1, TOKENS // length))
    return {
        "device": "cpu",
        "precision.policy": policy,
        "compile.enabled": str(compiled).lower(),
        "compile.scope": "model",
        "train.sequence_length": str(length),
        "train.batch_size": count,
        "train.micro_batch_size": count,
        "log.norms_every": "0",
    }


def ratios(common: Mapping[str, str], *each: Mapping[str, str]) -> tuple[list[float], list[float]]:
    """Return milliseconds of each contender's step (medians), and how many times as fast as the first's it is."""
    sessions = [TorchBackend().open(load_config(RUN, {**common, **own})) for own in each]
    (batch,) = random_batches(load_config(RUN, dict(common)), 1)
    times: list[list[float]] = [[] for _ in sessions]
    for number in range(WARM + ROUNDS):
        for session, taken in zip(sessions, times, strict=True):
            started = time.perf_counter()
            session.step(batch)
            if number >= WARM:
                taken.append(time.perf_counter() - started)
    for session in sessions:
        session.close()
    torch._dynamo.reset()
    faster = [statistics.median(a / b for a, b in zip(times[0], taken, strict=True)) for taken in times]
    return [1e3 * statistics.median(taken) for taken in times], faster


def calls(policy: str, heads: int, width: int, length: int) -> dict[str, Any]:
    """Call each kernel on random operands of the policy, forward and backward.

    Returns the length, relative errors from FP64 in the order of PARTS, and milliseconds (medians of turns).
    """
    torch.manual_seed(0)
    *operands, grad = (torch.randn(1, length, heads, width).to(DTYPES[policy]).transpose(1, 2) for _ in range(4))
    kernels = kernels_here()

    def made(kernel: str, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [x.to(dtype).requires_grad_() for x in operands]
        out = Kernel(kernel)(*given)
        return [out.detach(), *torch.autograd.grad(out, given, grad.to(dtype))]

    exact = made("flash", torch.float64)
    taken: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for number in range(WARM + ROUNDS):
        for kernel, times in taken.items():
            started = time.perf_counter()
            made(kernel, grad.dtype)
            if number >= WARM:
                times.append(1e3 * (time.perf_counter() - started))
    errors = {
        kernel: [
            float((x.double() - y).norm() / y.norm()) for x, y in zip(made(kernel, grad.dtype), exact, strict=True)
        ]
        for kernel in kernels
    }
    milliseconds = {kernel: statistics.median(times) for kernel, times in taken.items()}
    return {"policy": policy, "length": length, "errors": errors, "ms": milliseconds}


def peak(common: Mapping[str, str], own: Mapping[str, str]) -> float:
    """Return the peak memory in MB of a process that runs three such steps, above its memory after the imports."""
    code = f"from lockstep.scripts.studies.cpu_auto import child; child({dict(common)!r}, {dict(own)!r})"
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def child(common: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Print the memory of one run."""
    before = process_memory()["resident"]
    session = TorchBackend().open(load_config(RUN, {**common, **own}))
    for batch in random_batches(load_config(RUN, dict(common)), 3):
        session.step(batch)
    print((process_memory()["peak"] - before) / 1e6)


def measure() -> dict[str, Any]:
    """Measure every row of the page."""
    rows = []
    for policy, compiled, lengths in (
        ("bf16", False, LENGTHS),
        ("bf16", True, (128, 512)),
        ("fp32", False, (64, 128, 256, 512)),
        ("fp32", True, (128, 512)),
    ):
        for length in lengths:
            common = settings(length, compiled, policy)
            kernels = kernels_here()
            each = [{"attention.kernel": name, "optim.fused": "true"} for name in kernels]
            taken, faster = ratios(common, *each)
            row: dict[str, Any] = {"policy": policy, "compiled": compiled, "length": length}
            row |= {"ms": dict(zip(kernels, taken, strict=True)), "ratio": dict(zip(kernels, faster, strict=True))}
            if not compiled and length in (128, 256):
                row["mb"] = {name: peak(common, own) for name, own in zip(kernels, each, strict=True)}
            print(row, flush=True)
            rows.append(row)
    taken, faster = ratios(settings(128, False, "bf16"), FOREACH, FUSED)
    return {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rounds": ROUNDS,
        "attention": rows,
        "calls": [calls(policy, *call) for policy in ("bf16", "fp32") for call in CALLS],
        "adamw": {"first": taken[0], "second": taken[1], "ratio": faster[1]},
    }


def page(machines: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the results as Markdown, a section for each set of instructions."""
    lines = [
        "# The choices of `auto` on the CPU",
        "",
        "Generated by `python -m lockstep.scripts.studies.cpu_auto`, once on each kind of machine: the model of "
        f"configs/quickstart.toml (head dimension 32), {TOKENS:,} tokens",
        "a step in one micro-batch. The kernels take the same steps in turns, in one process; × is the median of the "
        "rounds' ratios: how many times as fast",
        "the step is as with `flash`. Memory: the peak of three steps above what the process held before. Milliseconds "
        "depend on what else the machine does,",
        "ratios hardly.",
        "",
        "The rule (core/config/auto.py): `flash_brgemm`, Lockstep's own kernel, without a mask and with a C++ "
        "compiler, for bf16 operands on x86 with bf16 instructions",
        "or without AVX-512, for FP32 on x86 that is not Intel's. Otherwise `math` where operands have two bytes, "
        f"sequences are shorter than {SHORT} tokens and at most",
        f"{WIDTHS} head dimensions long; `flash` elsewhere. On x86 without AVX-512 the limit of tokens does not apply "
        "(narrow_products.md).",
    ]
    for instructions, found in machines.items():
        lines += ["", f"## {instructions}", "", *_section(found)]
    return "\n".join(lines) + "\n"


def _section(found: Mapping[str, Any]) -> list[str]:
    """Write the results of one machine."""
    lines = [
        f"{found['machine']}, torch {found['versions']['torch']}, {found['rounds']} rounds.",
        "",
        f"| policy | program | tokens a sequence |{''.join(f' `{name}`, ms | × |' for name in KERNELS)} MB |",
        f"|---|---|---|{'--:|--:|' * len(KERNELS)}---|",
    ]
    for row in found["attention"]:
        program = "compiled" if row["compiled"] else "eager"
        cells = [
            f"{row['ms'][name]:.0f} | {row['ratio'][name]:.2f}" if name in row["ms"] else "does not run | "
            for name in KERNELS
        ]
        memory = ", ".join(f"{value:,.0f}" for value in row["mb"].values()) if "mb" in row else "not measured"
        lines.append(f"| {row['policy']} | {program} | {row['length']} | {' | '.join(cells)} | {memory} |")
    lines += [
        "",
        "MB: of the kernels in this order.",
        "",
        f"One call, forward and backward, {CALLS[0][0]} heads of {CALLS[0][1]}, random operands, and its relative "
        "errors from FP64. torch's `flash` adds the gradients of k",
        "and v in the operands' format, one block of queries after another; `flash_brgemm` sums them in FP32, as "
        "kernels on CUDA do.",
        "",
        f"| operands | tokens | kernel | ms | {' | '.join(PARTS)} |",
        f"|---|---|---|--:|{'--:|' * len(PARTS)}",
    ]
    for row in found["calls"]:
        for name, values in row["errors"].items():
            cells = [f"{row['ms'][name]:.1f}", *(f"{value:.1e}" for value in values)]
            lines.append(f"| {row['policy']} | {row['length']:,} | `{name}` | {' | '.join(cells)} |")
    adamw = found["adamw"]
    lines += [
        "",
        "A whole eager bf16 step of 128 tokens a sequence with AdamW a list operation at a time: "
        f"{adamw['first']:.0f} ms; with torch's fused one: {adamw['second']:.0f} ms; {adamw['ratio']:.2f}×.",
    ]
    return lines


def main() -> None:
    """Measure this machine, and write both files."""
    results = PAGE.with_suffix(".json")
    machines = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    machines |= {torch.backends.cpu.get_cpu_capability(): measure()}
    results.write_text(json.dumps(machines, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(machines), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

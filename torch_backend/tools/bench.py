"""Measurements of `lockstep bench`, run in a separate process: the device, its rates, and the steps of one row."""

from __future__ import annotations

import gc
import itertools
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.process_memory import process_memory
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels.float8 import FIRST_CAPABILITY
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.switches import Switches

SEED = 0
BATCHES = 4
# By device: side of the square matrices whose product is timed, and number of float32 elements that are copied.
SIDE = {"cuda": 8192, "cpu": 512}
COPIED = {"cuda": 2**28, "cpu": 2**24}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
# Our names → nvidia-smi's names, for constant properties of the device and for readings under load.
FACTS = {"driver": "driver_version", "power_limit_w": "power.limit", "sm_mhz": "clocks.max.sm"}
FACTS |= {"memory_mhz": "clocks.max.memory", "memory_mib": "memory.total"}
LIVE = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "power_w": "power.draw", "temperature_c": "temperature.gpu"}


def device_facts() -> dict[str, Any]:
    """Return the properties of the device that affect speed; a GPU property is None if the driver does not report it.

    On a GPU: kind, name, driver, power limit in W, highest clocks in MHz, and two sizes of memory. `memory_bytes` is
    torch's, without the part that the driver uses; `memory_mib` is nvidia-smi's, with it. On the CPU: kind, name, cores
    and threads.
    """
    if not torch.cuda.is_available():
        name = f"{platform.machine()} CPU"
        return {"kind": "cpu", "name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {"kind": "cuda", "name": torch.cuda.get_device_name(), "memory_bytes": memory_bytes, **ask_driver(FACTS)}


def instructions() -> list[str]:
    """List the instruction sets that affect the speed of products on this CPU; empty if torch does not report them."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if found.get(name)]


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and the libraries that affect speed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    from importlib import metadata

    for name in ("triton", "torchao", "flash_attn_3"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def ask_driver(fields: Mapping[str, str]) -> dict[str, str | float | None]:
    """Read fields of the current device from nvidia-smi. fields: our name → its name; None if it has no value."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    which = getattr(properties, "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
    command += [f"--id=GPU-{which}"] if which else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        said = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
        return {name: _read(name, value) for name, value in zip(fields, said, strict=True)}
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return dict.fromkeys(fields)


def _read(name: str, text: str) -> str | float | None:
    if text.startswith("["):  # [N/A], [Not Supported]
        return None
    return text if name == "driver" else float(text)


def measure_floor(repeat: int = 20) -> dict[str, Any]:
    """Measure the rate of a large product by operand format, in FLOP/s, and the bandwidth of a copy, in bytes/s.

    The bandwidth counts bytes read and bytes written. Each figure is the best of `repeat` measurements, because it
    serves as a lower bound of time. `repetitions` has all measurements, in seconds.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    side, flops = SIDE[kind], 2.0 * SIDE[kind] ** 3
    repetitions = {name: timed(product(name, side, kind), repeat, kind) for name in operands(kind)}
    rates = {name: flops / min(seconds) for name, seconds in repetitions.items()}
    source = torch.ones(COPIED[kind], device=kind)
    target = torch.empty_like(source)
    repetitions["copy"] = timed(lambda: target.copy_(source), repeat, kind)
    moved = 2.0 * source.numel() * source.itemsize
    return {"rates": rates, "bandwidth": moved / min(repetitions["copy"]), "side": side, "repetitions": repetitions}


def operands(kind: str) -> list[str]:
    """List the operand formats of products on this kind of device; TF32 and FP8 are only on CUDA."""
    if kind == "cpu":
        return ["fp32", "bf16", "fp16"]
    return [
        "fp32",
        "tf32",
        "bf16",
        "fp16",
        *(["fp8"] if torch.cuda.get_device_capability() >= FIRST_CAPABILITY else []),
    ]


def product(operand: str, side: int, kind: str) -> Callable[[], Tensor]:
    """Return a function that multiplies two random matrices (side, side); FP8 operands give a bf16 output."""
    torch.manual_seed(SEED)
    left, right = (torch.randn(side, side, device=kind) for _ in range(2))
    if operand == "fp8":
        narrow, one = torch.float8_e4m3fn, torch.ones((), device=kind)
        # cuBLAS requires the right operand in column-major order.
        left, right = left.to(narrow), right.to(narrow).t().contiguous().t()
        return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    left, right = left.to(DTYPES[operand]), right.to(DTYPES[operand])

    switches = Switches(operand, torch.device(kind))
    switches.set()

    def run() -> Tensor:
        switches.require()
        return left @ right

    return run


def timed(run: Callable[[], Any], repeat: int, kind: str, warmup: int = 5) -> list[float]:
    """Return the seconds of each of `repeat` calls after `warmup` calls, by CUDA events on a GPU."""
    for _ in range(warmup):
        run()
    if kind == "cpu":
        taken = []
        for _ in range(repeat):
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
        return taken
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1000 for begin, end in events]


def random_batches(config: RunConfig, count: int = BATCHES) -> list[Batch]:
    """Return batches of random tokens from a fixed seed, with loss weights 1; the tokens do not affect the time."""
    shape = config.train.batch_size, config.train.sequence_length
    draw = np.random.default_rng(SEED)
    batches = []
    for _ in range(count):
        window = draw.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
        batches.append(Batch(window[:, :-1].copy(), window[:, 1:].copy(), np.ones(shape, np.float32)))
    return batches


def measure_steps(config: RunConfig, warmup: int, repeat: int) -> dict[str, Any]:
    """Time `repeat` steps after `warmup` steps that are not counted.

    Batches are made before, and the device is synchronised before and after each step. Raises the errors of the
    session, such as UserError if the row cannot run here, or OutOfMemoryError.
    """
    backend = TorchBackend()
    in_force = dict(backend.describe(config)["in_force"])
    session = backend.open_rank(config)
    cuda = session.device.type == "cuda"
    batches = itertools.cycle(random_batches(config))
    wait = torch.cuda.synchronize if cuda else lambda: None
    seconds: list[float] = []
    loss = math.nan
    for number in range(warmup + repeat):
        if number == warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        batch = next(batches)
        gc.collect()
        wait()
        started = time.perf_counter()
        loss = session.step(batch).loss
        wait()
        seconds.append(time.perf_counter() - started)
    return {
        "in_force": in_force,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "first_step_seconds": seconds[0],
        "seconds": seconds[warmup:],
        "clocks": ask_driver(LIVE) if cuda else {},
        "memory": memory(session, cuda),
        "loss": loss if math.isfinite(loss) else None,
    }


def memory(session: TorchSession, cuda: bool) -> dict[str, int]:
    """Return memory in bytes.

    On CUDA: the maximum reserved and allocated in a step, and `allocated` between steps without gradients. On the CPU:
    the maximum resident set of the process.
    """
    if not cuda:
        return {"peak_rss": int(process_memory()["peak"])}
    found = {"reserved": torch.cuda.max_memory_reserved(), "peak_allocated": torch.cuda.max_memory_allocated()}
    session.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    return {"allocated": torch.cuda.memory_allocated(), **found}

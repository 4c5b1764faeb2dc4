"""A trace of two steps on a GPU, as Kineto writes it, whose results can be computed by hand, in µs.

    program   forward 0-40 · backward 40-80 · optimizer 80-95
    stream 7  gemm 10-30 · attention, from a CUDA graph 30-50 · gemm 60-70 · copy 75-80 · adam 90-98
    stream 20 nccl 45-75

The second step is the same, 100 µs later.
"""

from __future__ import annotations

from typing import Any

START = 5e9
GEMM, ATTENTION, NCCL = "nvjet_tst_128x256_64x4", "flash_fwd_kernel<float>", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
ADAM = "void multi_tensor_apply_kernel<FusedAdamMathFunctor>"
# Name, category, stream, start, stop, time of the launch, and the call that launched it.
WORK = [
    (GEMM, "kernel", 7, 10, 30, 5, "cudaLaunchKernel"),
    (ATTENTION, "kernel", 7, 30, 50, 12, "cudaGraphLaunch"),
    (NCCL, "kernel", 20, 45, 75, 50, "cudaLaunchKernelExC"),
    (GEMM, "kernel", 7, 60, 70, 55, "cudaLaunchKernel"),
    ("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 7, 75, 80, 70, "cudaMemcpyAsync"),
    (ADAM, "kernel", 7, 90, 98, 85, "cudaLaunchKernel"),
]
PARTS = {"forward": (0, 40), "backward": (40, 80), "optimizer": (80, 95), "step": (0, 100), "micro-batch": (0, 80)}


def event(
    name: str, category: str, start: float, stop: float, lane: tuple[int, int] = (1, 1), **arguments: Any
) -> dict:
    """Return one complete event (phase X) of a trace."""
    at = {"ts": START + start, "dur": stop - start, "pid": lane[0], "tid": lane[1]}
    return {"ph": "X", "name": name, "cat": category, **at, "args": arguments}


def gpu_trace() -> dict[str, Any]:
    """Return the trace, with further entries that real traces have: flow arrows, thread names, earlier kernels."""
    found = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 3, "pid": 1, "tid": 1, "ts": START + 5, "cat": "ac2g", "name": "ac2g"},
        event("cudaLaunchKernel", "cuda_runtime", -9, -8, correlation=1000),
        event("of_before", "kernel", -7, 4, (0, 7), correlation=1000),
        event(GEMM, "overhead", 0, 90),
    ]
    for number in range(2):
        shift = 100 * number
        found.append(event(f"ProfilerStep#{number + 5}", "user_annotation", shift, shift + 100))
        found.append(event(f"ProfilerStep#{number + 5}", "gpu_user_annotation", shift + 10, shift + 98, (0, 7)))
        found += [event(f"lockstep.{n}", "user_annotation", a + shift, b + shift) for n, (a, b) in PARTS.items()]
        for index, (name, category, stream, start, stop, asked, call) in enumerate(WORK):
            link = 10 * number + index
            found.append(event(call, "cuda_runtime", asked + shift, asked + shift + 2, correlation=link))
            found.append(
                event(name, category, start + shift, stop + shift, (0, stream), correlation=link, stream=stream)
            )
    return {"schemaVersion": 1, "traceEvents": found[::-1]}


def cpu_trace() -> dict[str, Any]:
    """Return a step of 100 µs: linear of 50 that contains mm of 20, another mm of 10, and 40 without operations."""
    return {
        "traceEvents": [
            event("ProfilerStep#5", "user_annotation", 0, 100),
            event("lockstep.forward", "user_annotation", 0, 60),
            event("aten::linear", "cpu_op", 0, 50),
            event("aten::mm", "cpu_op", 10, 30),
            event("aten::mm", "cpu_op", 50, 60),
            event("aten::mm", "cpu_op", 300, 400),
        ]
    }

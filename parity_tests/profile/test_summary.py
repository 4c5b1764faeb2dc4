"""Summaries of traces whose answers are known, and of an empty one."""

from __future__ import annotations

import gzip
import json

import pytest

import lockstep.core.profile.summary
from lockstep.core.errors import UserError
from lockstep.core.profile.page import page
from lockstep.core.profile.summary import kind_of, summarize
from lockstep.core.profile.trace import events_of, read_trace
from lockstep.parity_tests.profile.made import ADAM, ATTENTION, GEMM, NCCL, cpu_trace, gpu_trace

US = 1e-6


def of(trace):
    return summarize(events_of(trace["traceEvents"]))


def close(value):
    return pytest.approx(value, abs=1e-12)


DUE = {
    "busy_seconds": 78 * US,
    # 0-10, 80-90, 98-110, 180-190, 198-200: 44 in two steps.
    "idle_seconds": 22 * US,
    "compute_seconds": 58 * US,
    "communication_seconds": 30 * US,
    # 50-60 and 70-75.
    "exposed_communication_seconds": 15 * US,
    "exposed_copy_seconds": 5 * US,
    "launches": 5,
    "graph_share": 20 / 88,
}


def wrong(found):
    """List the parts of DUE that the summary of the GPU's trace lacks."""
    return {name for name, value in DUE.items() if found["gpu"][name] != pytest.approx(value, rel=1e-6)}


def test_two_steps_on_a_gpu():
    found = of(gpu_trace())
    assert (found["steps"], found["device"], found["profiled_seconds"]) == (2, "cuda", close(100 * US))
    assert wrong(found) == set()
    assert {name: round(t / US, 3) for name, t in found["parts"].items()} == {
        "forward": 40,
        "backward": 40,
        "optimizer": 15,
        "the rest": 5,
    }
    # The program is in the forward pass while the device waits for its first kernel, and so on.
    assert {name: round(t / US, 3) for name, t in found["gpu"]["idle_by_part"].items()} == {
        "forward": 10,
        "optimizer": 10,
        "the rest": 2,
    }
    assert [(row["count"], round(row["seconds"] / US, 3)) for row in found["gpu"]["gaps"]] == [
        (2, 16),
        (0.5, 6),
        (0, 0),
        (0, 0),
    ]
    assert found["by_kind"] == {
        kind: close(t * US)
        for kind, t in {"communication": 30, "product": 30, "attention": 20, "optimizer": 8, "copy": 5}.items()
    }


def test_what_took_longest_with_the_part_that_asked_for_it():
    rows = {(row["name"], row["part"]): row for row in of(gpu_trace())["top"]}
    assert list(rows)[:2] == [(NCCL, "backward"), (ATTENTION, "forward")]
    # Asked for in the forward pass, and run in it; the second one is the backward pass's.
    assert rows[GEMM, "forward"]["seconds"] == close(20 * US) and rows[GEMM, "backward"]["seconds"] == close(10 * US)
    assert rows[ADAM, "optimizer"] | {"seconds": 0} == {
        "name": ADAM,
        "kind": "optimizer",
        "part": "optimizer",
        "calls": 1,
        "seconds": 0,
        "share": close(0.08),
    }
    assert not any(name == "of_before" for name, _ in rows)


def test_operators_on_the_cpu():
    found = of(cpu_trace())
    assert (found["gpu"], found["device"], found["steps"]) == (None, "cpu", 1)
    rows = {row["name"]: row for row in found["top"]}
    assert rows["aten::linear"]["seconds"] == close(30 * US)
    assert rows["aten::mm"]["seconds"] == close(30 * US) and rows["aten::mm"]["calls"] == 2
    assert found["by_kind"] == {"product": close(60 * US), "outside operators": close(40 * US)}
    assert "No GPU, so no launches" in page("x", found)


def test_a_trace_of_somebody_else_counts_as_one_step():
    events = [e for e in gpu_trace()["traceEvents"] if e["ph"] == "X" and e["cat"] in ("kernel", "cuda_runtime")]
    found = summarize(events_of(events))
    assert (found["steps"], found["parts"]) == (0, {})
    assert found["gpu"]["exposed_communication_seconds"] == close(30 * US)
    assert "no steps of the profiler" in page("x", found)


KINDS = {
    "ncclDevKernel_AllReduce_Sum_f32": "communication",
    "c10d::allreduce_": "communication",
    "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNT": "product",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "product",
    "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16>": "product",
    "aten::mm": "product",
    "aten::addmm": "product",
    "aten::bmm": "product",
    "aten::_scaled_mm": "product",
    "aten::linear": "product",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "triton_poi_fused_mul_silu_0": "compiled",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
    "aten::copy_": "copy",
    "Memset (Device)": "copy",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "other",
    "aten::comment": "other",
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_by_name(name):
    assert kind_of(name) == KINDS[name]


def as_if_streams_did_not_overlap(monkeypatch):
    monkeypatch.setattr(lockstep.core.profile.summary, "union", lambda spans: sorted(spans))


def communication_as_computing(monkeypatch):
    monkeypatch.setattr(
        lockstep.core.profile.summary, "kind_of", lambda name: "other" if "nccl" in name else kind_of(name)
    )


def all_communication_exposed(monkeypatch):
    monkeypatch.setattr(lockstep.core.profile.summary, "difference", lambda ours, theirs: list(ours))


def graphs_not_known(monkeypatch):
    monkeypatch.setattr(lockstep.core.profile.summary, "CALLS", ("cuda_driver",))


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (as_if_streams_did_not_overlap, "busy_seconds"),
        (communication_as_computing, "communication_seconds"),
        (all_communication_exposed, "exposed_communication_seconds"),
        (graphs_not_known, "graph_share"),
    ],
)
def test_a_wrong_count_is_noticed(fault, caught, monkeypatch):
    fault(monkeypatch)
    assert caught in wrong(of(gpu_trace()))


def test_the_words():
    text = page("Profile", of(gpu_trace()) | {"step_seconds": 9e-5, "memory": {"peak": 2e9}, "floor_seconds": 4.5e-5})
    for said in (
        "without the profiler: 90 µs a step",
        "2 times as long",
        "peak 2 GB",
        "22.7 % of their time out of CUDA graphs",
        "communication: 30 µs, of which 15 µs beside no other kernel",
        "gaps between kernels: 2 up to 10 µs (16 µs)",
        "| idle",
    ):
        assert said in text, said


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_read_packed_or_not(tmp_path, packed):
    raw = json.dumps(gpu_trace()).encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert summarize(read_trace(path)) == of(gpu_trace())


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is not JSON"),
        (b"\x1f\x8bxx", "cannot read|is not JSON"),
        (gzip.compress(b"{}", mtime=0)[:-3], "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "no traceEvents"),
        (b"3", "no traceEvents"),
        (b'{"traceEvents": [3]}', "no traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "dur": 1}]}', "no traceEvents"),
        (b'{"traceEvents": []}', "nothing was profiled"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, raw, said):
    path = tmp_path / "trace"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=said) as error:
        read_trace(path)
    assert len(error.value.lines) == 1

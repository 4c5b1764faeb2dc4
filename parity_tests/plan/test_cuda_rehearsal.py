"""scripts/studies/cuda_rehearsal: its log, its roofline and its page, without the stand-in and without CUDA."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lockstep.core.bench.rows import BY_NAME
from lockstep.core.config.file import load_config
from lockstep.core.files.jsonl import read_lines
from lockstep.core.model.budget import optimizer_bytes, parameter_count
from lockstep.core.plan import GPUS, memory
from lockstep.core.plan.seconds import seconds
from lockstep.core.plan.sizes import sizes_of
from lockstep.scripts.studies.cuda_rehearsal import ahead
from lockstep.scripts.studies.cuda_rehearsal.__main__ import LINES, trimmed
from lockstep.scripts.studies.cuda_rehearsal.build import stub_source
from lockstep.scripts.studies.cuda_rehearsal.cases import LEVERS, RUNS, Case, cases
from lockstep.scripts.studies.cuda_rehearsal.log import as_json, kernel_name, math_mode, read_log
from lockstep.scripts.studies.cuda_rehearsal.page import NEAR, off, outcome, page, planned, waits
from lockstep.scripts.studies.cuda_rehearsal.roofline import READINGS, product_seconds, roofline, without_bytes
from lockstep.scripts.studies.repository import ROOT

CASES = {case.name: case for case in cases()}
PLANNED = planned(CASES["1.24B, [64, 2048], bf16"])
# Lines whose memory can be held against the plan.
COMPARED = [(found["case"], found) for found in read_lines(LINES) if found["ran"] and not found["graphs"]]
# A step of two micro-batches, as the stand-in would write it.
LOG = """\
allocate 2097152
h2d 786432
launch _ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_
triton triton_red_fused_1
triton triton_red_fused_1
triton triton_poi_fused_2
product GemmEx m 2048 n 32768 k 8192 batch 1 a 14 b 14 c 14 beta 0 math 16 compute 68
product GemmEx m 2048 n 32768 k 8192 batch 1 a 14 b 14 c 14 beta 0 math 16 compute 68
product LtMatmul m 131072 n 4096 k 2048 batch 1 a 14 b 14 c 0 beta 1 math 0 compute 68
product LtMatmul m 8192 n 32768 k 2048 batch 1 a 28 b 28 c 14 beta 0 math 0 compute 68
memset 3000
d2d 1000
collective AllReduce 500 type 7
stub cublasSaxpy_v2
graph
d2h 24
sync stream
sync event
sync stream
free 2097152
""".splitlines()


def line(**changes: Any) -> dict[str, Any]:
    """Return a line of the study whose step is LOG's."""
    step = read_log(LOG)
    generated = [
        {"name": "triton_red_fused_1", "gb": 3.0, "elements": 4096 * 131072, "passes": 3, "launches": 2},
        {"name": "triton_poi_fused_2", "gb": 1.5, "elements": 1 << 20, "passes": 2, "launches": 4},
        {"name": "by_hand", "gb": 0.0, "elements": 1, "passes": 1, "launches": 7},
    ]
    found = as_json(step) | {"case": "1.24B, [64, 2048], bf16", "group": RUNS, "environment": "2.11.0", "ran": True}
    found |= {"peak_bytes": [70e9, PLANNED, PLANNED], "reserved_bytes": 78e9, "graphs": 0}
    found |= {"seconds": [90.0, 1.0, 1.0], "graphs_compiled": 1, "graph_breaks": 0, "generated": generated}
    return found | {"launches": step.launches, "triton_launches": 3, "triton_gb": 12.0} | changes


def test_the_log_is_counted():
    step = read_log(LOG)
    assert step.synchronisations == {"stream": 2, "event": 1}
    assert step.copies == {"h2d": [1, 786432], "d2h": [1, 24], "d2d": [1, 1000], "memset": [1, 3000]}
    assert step.triton == {"triton_red_fused_1": 2, "triton_poi_fused_2": 1}
    assert step.kernels == {"vectorized_elementwise_kernel CUDAFunctor_add": 1}
    assert (step.graphs, step.captures, step.allocations) == (1, 0, 1)
    assert step.collectives == {"AllReduce": [1, 500]} and step.stubs == {"cublasSaxpy_v2": 1}
    assert step.launches == 1 + 3 + 4
    first = as_json(step)["products"][0]
    assert first["calls"] == 2 and (first["m"], first["n"], first["k"]) == (2048, 32768, 8192)
    assert (first["a"], first["c"], first["math"], first["adds"]) == ("bf16", "bf16", "default, full sums", False)
    assert [product["adds"] for product in as_json(step)["products"]] == [False, True, False]


def test_another_line_is_no_log():
    with pytest.raises(ValueError, match="not a line of the stand-in's log: 'lunch"):
        read_log(["lunch a kernel"])


def test_math_modes_are_named():
    assert (math_mode(0), math_mode(3), math_mode(16 | 2)) == ("default", "tf32", "pedantic, full sums")


def test_kernels_are_named_by_what_they_do():
    flash = "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi64ELi128ELi128ELi4ELb0ELb0EEEEvT_"
    assert kernel_name(flash) == "flash_fwd_kernel Flash_fwd_kernel_traits"
    assert kernel_name("no_symbol_of_cxx") == "no_symbol_of_cxx"


def test_a_product_takes_its_flops_or_its_bytes():
    large = {"m": 4096, "n": 4096, "k": 4096, "batch": 2, "a": "bf16", "b": "bf16", "c": "bf16", "adds": False}
    assert product_seconds(large) == pytest.approx(2 * 2 * 4096**3 / 700e12)
    assert product_seconds(large | {"a": "fp8_e4m3", "b": "fp8_e4m3"}) == pytest.approx(2 * 2 * 4096**3 / 1200e12)
    thin = {"m": 4096, "n": 4096, "k": 1, "batch": 1, "a": "bf16", "b": "bf16", "c": "fp32", "adds": True}
    assert product_seconds(thin) == pytest.approx((2 * 4096 * 2 + 2 * 4 * 4096**2) / 3.0e12)
    with pytest.raises(KeyError):
        product_seconds(large | {"a": "fp64"})


def test_the_roofline_is_the_sum_of_its_items():
    overrides = {"train.batch_size": "64", "train.curriculum": "", "attention.kernel": "flash"}
    config = load_config(ROOT / "configs/llama-1b.toml", overrides)
    found = roofline(line(), config)
    block = 2 * 2.0 * 2048 * 32768 * 8192 / 700e12 + 2.0 * 8192 * 32768 * 2048 / 1200e12
    assert found["block products"] == pytest.approx(block)
    assert found["head products"] == pytest.approx(2.0 * 131072 * 4096 * 2048 / 700e12)
    # Two more passes over FP32 logits.
    assert found["cross-entropy"] == pytest.approx(2 * (3.0e9 + 2 * 4 * 4096 * 131072) / 3.0e12)
    assert found["Triton kernels"] == pytest.approx(4 * 1.5e9 / 3.0e12)
    # Attention as fast as alone: a roofline has no limit of power.
    timed = seconds(config, replace(GPUS["h100"], in_a_step={}))
    assert timed is not None and found["attention"] == timed.attention
    numbers = parameter_count(config.model)
    # Three more micro-batches are added, gradients read for their norm and scaled.
    outside = 3 * 4 * numbers * 3 + 3 * 4 * numbers + optimizer_bytes(config)
    assert found["rest"] == pytest.approx((3000 + 2 * 1000 + outside) / 3.0e12)


def test_a_kernel_written_by_hand_moves_what_it_reads_and_writes():
    """Logits of FP32 once or twice, and their gradient in bf16; a kernel that nobody counted is named."""
    overrides = {"train.batch_size": "64", "train.curriculum": "", "attention.kernel": "flash"}
    config = load_config(ROOT / "configs/llama-1b.toml", overrides)
    for name, bytes_a_logit in (("one_kernel_held", 4 + 2), ("one_kernel_again", 2 * 4 + 2)):
        found = line(generated=[], triton={name: 3, "unknown": 2})
        moved = 3 * bytes_a_logit * 4096 * 131072
        assert roofline(found, config)["cross-entropy"] == pytest.approx(moved / 3.0e12)
        assert without_bytes(found) == {"unknown": 2}


def test_the_roofline_knows_every_kernel_of_the_head():
    source = (ROOT / "torch_backend/kernels/one_kernel_triton.py").read_text()
    assert set(re.findall(r"^def (one_kernel_\w+)", source, re.MULTILINE)) == READINGS.keys()


def test_outcomes():
    bare = Case("x", LEVERS)
    refused = {"ran": False, "error": "UserError: loss.head = 'torch' needs torch 2.13"}
    assert outcome({"ran": True}, bare) == "ran"
    assert outcome(refused, bare) == "FAILED"
    assert outcome(refused, Case("x", LEVERS, refused="needs torch 2.13")) == "refused"
    assert outcome(refused, Case("x", LEVERS, refused="something else")) == "FAILED"
    assert outcome(refused, Case("x", LEVERS, not_shown="why")) == "not shown"


def test_the_page_tells_what_does_not_hold():
    case = "eager: policy bf16"
    bad = line(case=case, group=LEVERS, peak_bytes=[0, 0, planned(CASES[case]) / 0.966])
    assert off(bad | {"plan_bytes": planned(CASES[case])}) == pytest.approx(-0.034) and waits(bad) == 3
    text = page([bad, line(case="eager: head full", ran=False, error="RuntimeError: oh"), line()])
    quiet = "3 synchronisations a step (1 × event, 2 × stream)"
    assert f"- {case} (torch 2.11.0): {quiet}; plan -3.4% from the allocator" in text
    assert "- eager: head full (torch 2.11.0): RuntimeError: oh" in text
    assert "| 2.11.0 | 2 | 0 | 0 | 1 | 1 of 2 | 0 of 2 |" in text
    assert "Launched without known bytes: by_hand × 7." in text


def test_the_page_shows_what_the_lever_takes_off():
    lever = line(case="1.24B, [64, 2048], bf16, head one_kernel", generated=[], triton={"one_kernel_again": 32})
    newer = lever | {"environment": "2.14.0", "triton": {"one_kernel_held": 32}}
    before = "0.0049"  # two launches of the line's reduction, in three passes
    text = page([line(), lever, newer])
    assert f"| bf16, head one_kernel | 2.11.0 | cross-entropy | {before} | 0.0573 |" in text
    assert f"| bf16, head one_kernel | 2.14.0 | cross-entropy | {before} (torch 2.11.0) | 0.0344 |" in text
    assert "reserved, GB |" not in text.partition("item | before | after")[2]
    assert "item | before | after" not in page([line()]) and "item | before | after" not in page([lever])


def test_what_is_known_is_told():
    text = page([line(case="eager: head cce", group=LEVERS, peak_bytes=[0, 0, planned(CASES["eager: head cce"])])])
    assert "2 × stream): cut-cross-entropy reads from the device" in text


def test_a_case_that_was_run_again_counts_once():
    quiet = line(synchronisations={"stream": 1})
    assert "nothing was found" in page([line(), quiet]) and "nothing was found" not in page([quiet, line()])


def test_memory_under_graphs_is_not_held_against_the_plan():
    replayed = line(case="eager: policy bf16", group=LEVERS, peak_bytes=[0, 0, 1], graphs=4, synchronisations={})
    assert "nothing was found" in page([replayed])


def test_levers_keep_no_names_of_kernels():
    assert "kernels" not in trimmed(line(group=LEVERS)) and "products" in trimmed(line(group=LEVERS))
    assert "kernels" in trimmed(line()) and "generated" in trimmed(line())


def test_errors_name_no_folder_of_a_machine():
    failed = line(ran=False, error="OSError: /home/some-one/lib/python3.11/a.py: bf16/eager failed")
    assert trimmed(failed)["error"] == "OSError: a.py: bf16/eager failed"


def test_stubs_note_their_names():
    assert 'int cuB(void) { note("stub cuB"); return 0; }' in stub_source({"cuB", "cuA"}).splitlines()[-1]


def test_rows_are_compiled_ahead_in_the_order_in_which_they_are_named(monkeypatch, tmp_path, capsys):
    asked: list[tuple[str, str]] = []

    def compiled(row, library, name, arguments):
        asked.append((row.name, name))
        return row.name

    monkeypatch.setattr(ahead, "site_packages", lambda python: tmp_path)
    monkeypatch.setattr(ahead, "build", lambda site, folder: tmp_path / "libcuda.so.1")
    monkeypatch.setattr(ahead, "_compile", compiled)
    monkeypatch.setattr(ahead, "_real_device", lambda: None)
    ahead.main(ahead.Arguments(rows=("kept-64", "bf16"), jobs=1))
    assert asked == [("kept-64", "NVIDIA H100 80GB HBM3"), ("bf16", "NVIDIA H100 80GB HBM3")]
    assert capsys.readouterr().out.split() == ["kept-64", "bf16"]


def test_an_eager_row_has_nothing_to_compile(tmp_path):
    assert ahead._compile(BY_NAME["fp32-eager"], tmp_path, "", ahead.Arguments()) == "fp32-eager: nothing to compile"


def test_a_process_that_fails_is_told_by_its_last_line(monkeypatch, tmp_path):
    monkeypatch.setattr(ahead, "WORKER", "lockstep.no_such_module")
    assert "No module named lockstep.no_such_module" in ahead._compile(
        BY_NAME["bf16"], tmp_path / "none", "", ahead.Arguments()
    )


def test_every_case_loads_or_is_refused():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    for case in cases():
        if not case.refused:
            load_config(ROOT / case.run, case.settings)


@pytest.mark.parametrize("name", sorted({name for name, found in COMPARED}))
def test_the_plan_is_near_the_allocator(name):
    for found in (found for case, found in COMPARED if case == name):
        near = abs(planned(CASES[name]) / found["peak_bytes"][-1] - 1) < NEAR
        assert near or CASES[name].known, found["environment"]


def test_fp32_logits_where_they_are_bf16_are_seen(monkeypatch):
    """Restore the former plan, which knew of no cast."""
    (bf16,) = (found for name, found in COMPARED if name == "eager: casts logits=bf16")
    monkeypatch.setattr(memory, "sizes_of", lambda *given: replace(sizes_of(*given), logits=4))
    assert planned(CASES["eager: casts logits=bf16"]) / bf16["peak_bytes"][-1] > 1.09


def test_the_page_is_that_of_the_lines():
    assert LINES.with_suffix(".md").read_text(encoding="utf-8") == page(read_lines(LINES))

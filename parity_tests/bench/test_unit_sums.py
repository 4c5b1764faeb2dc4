"""The study of how matrix units sum: its page agrees with its file, and it measures what it names."""

from __future__ import annotations

import json

import pytest
import torch

from lockstep.scripts.studies import unit_sums


def test_the_page_in_docs_is_what_its_json_says():
    results = json.loads(unit_sums.FILE.read_text())
    assert unit_sums.FILE.with_suffix(".md").read_text() == unit_sums.page(results)
    assert {row["format"] for row in results["sums"]} == unit_sums.PRODUCTS.keys()


def test_a_product_that_rounds_to_the_nearest_has_no_gain():
    found = unit_sums.measure("cpu", "fp32", 48, 32, 512, True)
    assert 0 < found["noise"] < 1e-6 and abs(found["gain"]) < found["noise"] / 10 and "unequal" not in found


def test_sums_that_are_cut_off_are_seen(monkeypatch):
    """Each step of 16 products keeps 16 bits of the sum."""

    def cut(x, y, out):
        total = torch.zeros(len(x), len(y))
        for k in range(0, x.shape[1], 16):
            total += x[:, k : k + 16].float() @ y[:, k : k + 16].float().t()
            total = (total.view(torch.int32) & -(1 << 8)).view(torch.float32)
        return total.to(out)

    whole = unit_sums.PRODUCTS["bf16"]
    monkeypatch.setitem(unit_sums.PRODUCTS, "bf16", unit_sums.Product(whole.operands, cut, None, torch.bfloat16))
    found = unit_sums.measure("cpu", "bf16", 48, 32, 512, False)
    assert found["gain"] < -found["noise"] / 2 and found["noise"] > 1e-5 and found["unequal"] > 0


@pytest.mark.parametrize(("how", "added"), [("cut", 0), ("nearest", 1 << 12)])
def test_how_operands_are_read_is_seen(monkeypatch, how, added):
    def read(x):
        return ((x.view(torch.int32) + added) & -(1 << 13)).view(torch.float32)

    def product(x, y, out):
        return read(x) @ read(y).t()

    whole = unit_sums.PRODUCTS["tf32"]
    monkeypatch.setitem(unit_sums.PRODUCTS, "tf32", unit_sums.Product(whole.operands, product, whole.accumulator))
    # On a GPU it is the switch that makes them TF32's; it is a setting of the whole process.
    monkeypatch.setattr(unit_sums.Switches, "set", lambda self: None)
    found = unit_sums.reading("cpu")
    assert found == {"cut": float(how == "cut"), "nearest": float(how == "nearest")}
    results = json.loads(unit_sums.FILE.read_text()) | {"tf32_reads": found}
    cut, nearest = (f"{100 * share:.3g} %" for share in found.values())
    assert f"TF32's products: {cut} are cut to ten bits, {nearest} are rounded to the nearest." in unit_sums.page(
        results
    )


def test_without_a_gpu_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        unit_sums.main(unit_sums.Arguments(tmp_path / "sums.json"))
    assert not list(tmp_path.iterdir())

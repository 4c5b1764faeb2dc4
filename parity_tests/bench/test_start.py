"""The study of the start (scripts/studies/start.py): a start of a tiny run, and its page from made-up results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.parity_tests.repository import REPO
from lockstep.scripts.cli import run as lockstep
from lockstep.scripts.studies.start import PLAIN, figure, first_record, page
from lockstep.scripts.studies.start_marks import PHASES
from lockstep.scripts.studies.tiny_workspace import write_workspace


def run(seconds: float, cpu: float, loss: float = 8.25) -> dict[str, Any]:
    return {"phases": dict.fromkeys(PHASES, seconds / len(PHASES)), "cpu": cpu, "loss": loss, "grad_norm": 2.5}


def results(**changed: Any) -> dict[str, Any]:
    runs = {"before": [run(10, 12), run(20, 12)], "now": [run(5, 6), run(11, 6)]}
    prepare = {
        "bytes": 30_000_000,
        "ours": [{"read and split": 1.0, "encode, pack, digest, write": 5.0, "other": 0.5}] * 2,
        "plain": {way: [10.0, 8.0] for way in PLAIN},
    }
    return {
        "device": {"name": "a machine", "cores": 2},
        "versions": {"torch": "2"},
        "commits": {"before": "1234567", "now": "89abcde"},
        "rows": [{"program": "compiled", "caches": "warm", "runs": runs | changed}],
        "prepare": prepare,
    }


def test_ratios_are_those_of_starts_in_turn():
    """0.5 and 0.55, whatever else changed between the turns."""
    cells = "10.0 to 20.0) | 8.0 s (5.0 to 11.0) | 0.53 (0.50 to 0.55) | 12.0 s | 6.0 s | 0.50 | 2 |"
    assert cells in page(results())
    assert "are the same bits in all starts of a row" in page(results())


def test_another_loss_is_said():
    assert "differ in compiled, warm" in page(results(now=[run(5, 6), run(11, 6, loss=8.26)]))


def test_preparing_beside_plain_tokenizers():
    text = page(results())
    assert "| read and split | 1.00 | 30.0 |" in text and "| **all** | 6.50 | 4.6 |" in text
    assert "| Lockstep, one process a core | 5.00 | 6.00 | |" in text
    assert "| encode_batch, 64 documents a call | 9.00 | 3.33 | 1.80× (1.60 to 2.00) |" in text


def test_bars_of_before_and_now_and_of_every_phase():
    drawn = figure(results())
    assert "before, 1234567" in drawn and "now, 89abcde" in drawn and "15.0 s" in drawn
    assert all(phase.replace("'", "&#x27;") in drawn for phase in PHASES)


def test_a_start_has_a_time_for_every_phase(tmp_path: Path):
    file = write_workspace(tmp_path / "workspace")
    assert lockstep(["data", "prepare", str(file), "--workers", "1"]) == 0
    found = first_record(REPO, tmp_path / "caches", tmp_path / "runs", [str(file), "--parity.every", "4"])
    assert list(found["phases"]) == list(PHASES)
    assert all(seconds >= 0 for seconds in found["phases"].values())
    assert found["cpu"] > 0 and 5 < found["loss"] < 6

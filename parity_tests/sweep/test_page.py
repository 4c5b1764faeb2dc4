"""The page of a sweep: what was asked for stands on it, and nothing of a run's text is obeyed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.core.config.schema import EvalConfig, ParityConfig
from lockstep.core.sweep.page import build_page
from lockstep.core.sweep.plan import Plan, write_plan
from lockstep.core.sweep.sweep import Sweep
from lockstep.parity_tests.sweep.made_up import BEST, CONFIG, MadeUp, plan

CHECKED = CONFIG.model_copy(update={"parity": ParityConfig(every=10)})
EVIL = "<script>alert(1)</script>"


def page_of(folder: Path, of: Plan, engine: MadeUp) -> str:
    write_plan(folder, of)
    with Sweep(folder, of) as sweep:
        sweep.run(engine, lambda trial: None)
        return build_page(sweep)


def test_everything_that_was_asked_for_is_there(tmp_path: Path) -> None:
    of = plan("optim.peak-lr=4e-4,8e-4,1.6e-3,3e-3,6e-3,1.2e-2,2.4e-2", "optim.weight-decay=0,0.1", config=CHECKED)
    engine = MadeUp(
        wrong=lambda config: config.optim.peak_lr == BEST and not config.optim.weight_decay,
        failing=lambda config: EVIL if config.optim.peak_lr == 4e-4 and not config.optim.weight_decay else "",
    )
    text = page_of(tmp_path / "sweep", of, engine)
    for said in ("Training loss", "Loss against peak-lr", "Settings and loss", "Marked by parity", "Failed", "Ranking"):
        assert said in text
    assert re.search(r"Fitted optimum 0\.003, 95 % interval 0\.00\d+ … 0\.00\d+, from \d+ of 12 trials\.", text)
    assert text.count("<svg") == 3 and "lockstep train" in text and "optim.weight_decay 0.1, loss 4.0010" in text


def test_nothing_of_a_run_is_obeyed(tmp_path: Path) -> None:
    of = plan(f"log.sample-prompt={EVIL},<img src=x onerror=alert(2)>", "optim.peak-lr=1e-3,2e-3")
    text = page_of(tmp_path / "sweep", of, MadeUp(failing=lambda config: EVIL if config.optim.peak_lr > 1e-3 else ""))
    assert "<script>alert" not in text and "<img" not in text and "&lt;script&gt;alert(1)" in text
    assert "default-src 'none'" in text and not re.search(r"(src|href)=.https?:", text)


def test_pruned_trials_say_why_and_an_edge_is_told(tmp_path: Path) -> None:
    text = page_of(tmp_path / "sweep", plan("optim.peak-lr=1e-4:1e-3:log", trials=6, pruner="median"), MadeUp())
    assert "Pruned, and why" in text and re.search(r"is above \d\.\d+, the median of \d finished trials there", text)
    assert "It lies at the edge, the highest rate that was tried" in text and "Not checked by parity" in text


def test_widths_have_their_optimum_against_the_width(tmp_path: Path) -> None:
    of = plan("optim.peak-lr=1e-3,2e-3,3e-3,6e-3,1e-2", widths=(128, 256), width_rule="inverse")
    text = page_of(tmp_path / "sweep", of, MadeUp())
    assert "Optimum against width" in text and "∝ 1/width" in text and "constant" in text
    # The optimal peak-lr is the same at both widths, so the matrices' halves.
    rows = re.findall(r"<tr><td>(128|256)</td><td>([^<]*)</td><td>[^<]*</td><td>([^<]*)</td></tr>", text)
    assert rows == [("128", "0.003", "0.003"), ("256", "0.003", "0.0015")]


def test_a_loss_beyond_the_chart_is_marked_with_its_value(tmp_path: Path) -> None:
    """Its mark lies at the edge, where it would be read as a loss of the axis."""
    rates = ",".join(f"{rate:g}" for rate in (*(1e-3 + 1e-4 * n for n in range(12)), 9e-2))
    text = page_of(
        tmp_path / "sweep",
        plan(f"optim.peak-lr={rates}"),
        MadeUp(loss=lambda config: 9.0 if config.optim.peak_lr == 9e-2 else 4 + config.optim.peak_lr),
    )
    assert re.findall(r">↑ ([^<]*)<", text) == ["9.00"]


def test_a_sweep_whose_trials_failed_early_is_not_said_to_be_unchecked_on_purpose(tmp_path: Path) -> None:
    space, fails = "optim.peak-lr=1e-3,2e-3", MadeUp(failing=lambda config: "step 1: the loss is not finite")
    text = page_of(tmp_path / "checked", plan(space, config=CHECKED), fails)
    assert "no trial has reached a step that is due for a check" in text and "parity.every is 0" not in text
    assert "parity.every is 0 in these trials" in page_of(tmp_path / "unchecked", plan(space), MadeUp())


def test_the_objective_is_the_validation_loss_where_evaluation_is_varied(tmp_path: Path) -> None:
    none = CONFIG.model_copy(update={"eval": EvalConfig(every=0)})
    text = page_of(tmp_path / "varied", plan("eval.every=2,4", config=none), MadeUp())
    assert "validation loss after the last step" in text and "mean training loss" not in text
    assert "mean training loss" in page_of(tmp_path / "none", plan("optim.peak-lr=1e-3", config=none), MadeUp())


# Rates whose ratio, and whose room at the ends of an axis, are no numbers.
FAR_APART = "1e-300,1e-200,1e-100,1,1e100,1e200,1e300"


@pytest.mark.parametrize("rates", [FAR_APART, "1e-320:1e-310:log"])
@pytest.mark.parametrize("slope", [-1, 1])
def test_rates_that_are_further_apart_than_numbers_go_are_drawn(rates: str, slope: int, tmp_path: Path) -> None:
    engine = MadeUp(loss=lambda config: 4.0 + slope * (config.optim.peak_lr > 1))
    text = page_of(tmp_path / "sweep", plan(f"optim.peak-lr={rates}", trials=7), engine)
    assert "Loss against peak-lr" in text and not re.search(r'"-?(nan|inf)', text)


def test_labels_of_the_optimum_stay_in_the_chart(tmp_path: Path) -> None:
    text = page_of(tmp_path / "sweep", plan("optim.peak-lr=1e-4,2e-4,4e-4,8e-4,1.6e-3,3e-3,4e-3"), MadeUp())
    (x, anchor), *_ = re.findall(r'<text x="([^"]*)" y="[^"]*" text-anchor="([^"]*)">optimum', text)
    assert float(x) > 260 and anchor == "end"

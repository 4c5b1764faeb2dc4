"""A sweep gives the same results in any order of its trials and wherever it stops, and a wrong trial never wins."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.config.schema import ParityConfig
from lockstep.core.errors import UserError
from lockstep.core.sweep.journal import JOURNAL
from lockstep.core.sweep.outcome import COMPLETE, FAILED, MARKED, PRUNED
from lockstep.core.sweep.plan import ABOUT, Plan, check_folder, write_plan
from lockstep.core.sweep.plan import CONFIG as CONFIG_FILE
from lockstep.core.sweep.propose import choose
from lockstep.core.sweep.results import RESULTS
from lockstep.core.sweep.space import read_space
from lockstep.core.sweep.sweep import TRIALS, Sweep, check_points, ranking
from lockstep.parity_tests.sweep.made_up import BEST, CONFIG, SPACE, MadeUp, made, outcomes, plan

CHECKED = CONFIG.model_copy(update={"parity": ParityConfig(every=10)})


def backwards(jobs):
    return list(reversed(jobs))


def shuffled(jobs):
    return random.Random(3).sample(list(jobs), len(jobs))


KINDS: dict[str, dict[str, Any]] = {
    "sobol": {"trials": 6},
    "median": {"trials": 9, "pruner": "median"},
    "hyperband": {"trials": 10, "pruner": "hyperband"},
    "tpe": {"trials": 9, "sampler": "tpe", "pruner": "median", "per_round": 3},
    "widths": {"trials": 3, "widths": (128, 256), "width_rule": "inverse"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_results_depend_on_no_order_and_on_no_kill(kind: str, tmp_path: Path) -> None:
    of = plan(**KINDS[kind])
    whole = outcomes(made(tmp_path / "whole", of, MadeUp()))
    assert outcomes(made(tmp_path / "other", of, MadeUp(order=shuffled))) == whole
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "stopped", of, MadeUp(order=backwards, stop_after=5))
    again = MadeUp()
    assert outcomes(made(tmp_path / "stopped", of, again)) == whole
    assert 0 < len(again.made) < len(whole)
    if "pruner" in KINDS[kind]:
        assert {state for _, _, state, *_ in whole} == {COMPLETE, PRUNED}


def test_the_first_trials_are_the_same_however_many_there_are(tmp_path: Path) -> None:
    few = outcomes(made(tmp_path / "a", plan(trials=3), MadeUp()))
    assert check_folder(tmp_path / "a", plan(trials=5))
    grown = made(tmp_path / "a", plan(trials=5), engine := MadeUp())
    assert outcomes(grown)[:3] == few and engine.made == ["trial_003", "trial_004"]
    with pytest.raises(UserError, match="trials only grow"):
        check_folder(tmp_path / "a", plan(trials=4))


def test_a_trial_whose_check_disagreed_never_wins(tmp_path: Path) -> None:
    """The wrong region holds the lowest loss; without the mark it would win."""
    of = plan("optim.peak-lr=1e-3,3e-3,9e-3", config=CHECKED)
    trials = made(tmp_path / "sweep", of, MadeUp(wrong=lambda config: config.optim.peak_lr == BEST))
    lowest = min(trials, key=lambda trial: trial.outcome.value or math.inf)
    assert lowest.point == {"optim.peak_lr": "3e-3"} and lowest.outcome.state == MARKED
    assert lowest not in ranking(trials) and ranking(trials)[0].name == "trial_000"
    assert lowest.outcome.why == "the parity checks of step 1, 10, 20 disagreed"


def test_nor_is_a_right_trial_given_up_for_being_worse_than_a_wrong_one(tmp_path: Path) -> None:
    of = plan(trials=9, pruner="median", config=CHECKED)

    def given_up(name: str, wrong: bool) -> int:
        engine = MadeUp(wrong=lambda config: wrong and config.optim.peak_lr > 1e-3, loss=_lower_above)
        trials = made(tmp_path / name, of, engine)
        return sum(t.outcome.state == PRUNED for t in trials if float(t.point["optim.peak_lr"]) <= 1e-3)

    assert given_up("seen", wrong=True) == 0 < given_up("not seen", wrong=False)


def _lower_above(config):
    return 1.0 if config.optim.peak_lr > 1e-3 else 4.0


def test_a_trial_whose_checks_were_not_made_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.core.run.directory.RunDir.append_check", lambda self, line: None)
    (trial,) = made(tmp_path / "sweep", plan("optim.peak-lr=1e-3", config=CHECKED), MadeUp())
    assert trial.outcome.state == FAILED and "3 due, 0 made, fewer than half" in trial.outcome.why


def test_what_fails_or_diverges_is_kept_and_shown(tmp_path: Path) -> None:
    of = plan("optim.peak-lr=1e-3,3e-3,9e-3")
    engine = MadeUp(
        failing=lambda config: "step 3: the loss is not finite" if config.optim.peak_lr == BEST else "",
        loss=lambda config: math.nan if config.optim.peak_lr > BEST else 4.0,
    )
    trials = made(tmp_path / "sweep", of, engine)
    assert [trial.outcome.state for trial in trials] == [COMPLETE, FAILED, FAILED]
    assert [t.outcome.why for t in trials[1:]] == ["step 3: the loss is not finite", "its last loss is not finite"]
    again = MadeUp()
    assert outcomes(made(tmp_path / "sweep", of, again)) == outcomes(trials) and again.made == []
    assert [t.outcome.state for t in made(tmp_path / "sweep", of, again, retry=True)] == [COMPLETE, COMPLETE, FAILED]
    assert again.made == ["trial_001"]


def test_without_validation_the_last_tenth_of_the_training_loss_counts(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"every": 0})})
    (trial,) = made(tmp_path / "sweep", plan("optim.peak-lr=3e-3", config=config), MadeUp(loss=lambda config: 4.0))
    assert trial.outcome.value == pytest.approx(4 + (0 + 0.1) / 2)
    assert list(trial.outcome.reports) == list(range(2, 21, 2))


# The folder


OTHERS: dict[str, Callable[[], object]] = {
    "vary was 1 optim.peak-lr=1e-3,2e-3": lambda: plan("optim.peak-lr=1e-3,3e-3"),
    "optim.beta1 was 0.9 and is 0.8": lambda: plan(
        "optim.peak-lr=1e-3,2e-3",
        config=CONFIG.model_copy(update={"optim": CONFIG.optim.model_copy(update={"beta1": 0.8})}),
    ),
    "pruner was 'none' and is 'median'": lambda: plan("optim.peak-lr=1e-3,2e-3", pruner="median"),
}


@pytest.mark.parametrize("said", OTHERS)
def test_a_folder_refuses_another_sweep(said: str, tmp_path: Path) -> None:
    of = plan("optim.peak-lr=1e-3,2e-3")
    made(tmp_path / "sweep", of, MadeUp())
    assert check_folder(tmp_path / "sweep", of)
    with pytest.raises(UserError, match="holds another sweep") as error:
        check_folder(tmp_path / "sweep", OTHERS[said]())  # type: ignore[arg-type]
    assert said.replace("vary was 1 ", "vary was ") in str(error.value)


def test_what_is_no_sweep_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no sweep"):
        check_folder(tmp_path, plan())
    with pytest.raises(UserError, match="is a file"):
        check_folder(tmp_path / "file", plan())
    (tmp_path / "empty").mkdir()
    assert not check_folder(tmp_path / "empty", plan())
    write_plan(tmp_path / "empty", plan())
    (tmp_path / "empty" / ABOUT).write_text("{}")
    with pytest.raises(UserError, match="damaged or was edited"):
        check_folder(tmp_path / "empty", plan())


def test_one_process_writes_a_folder(tmp_path: Path) -> None:
    write_plan(tmp_path / "sweep", plan())
    with Sweep(tmp_path / "sweep", plan()), pytest.raises(UserError, match="is being written by another process"):
        Sweep(tmp_path / "sweep", plan())


# By how the configuration that trials are made from was harmed: its new text, and the words of the refusal.
HARMED: dict[str, tuple[Callable[[str], str | None], str]] = {
    "gone": (lambda text: None, "no such run file: .*config.toml"),
    "no TOML": (lambda text: text[:-5] + "[", "config.toml"),
    "another setting": (lambda text: text.replace("peak_lr", "peek_lr"), "did you mean optim.peak_lr"),
    "another value": (lambda text: text.replace("steps = 20", "steps = 21"), "config.toml was changed after the sweep"),
}


@pytest.mark.parametrize("kind", HARMED)
def test_a_configuration_that_was_harmed_is_refused_and_trials_stay(kind: str, tmp_path: Path) -> None:
    """Without it no trial can be read, and a finished sweep would have lost all of them."""
    of = plan("optim.peak-lr=1e-3,2e-3")
    made(tmp_path / "sweep", of, MadeUp())
    change, said = HARMED[kind]
    config = tmp_path / "sweep" / CONFIG_FILE
    text, results = change(config.read_text()), (tmp_path / "sweep" / RESULTS).is_file()
    assert text != config.read_text()
    config.unlink() if text is None else config.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        check_folder(tmp_path / "sweep", of)
    assert len(error.value.lines) == 1 and "name another folder (--out)" in str(error.value)
    assert (tmp_path / "sweep" / RESULTS).is_file() == results


def test_a_trial_whose_last_record_is_lost_is_not_said_to_have_diverged(tmp_path: Path) -> None:
    of = plan("optim.peak-lr=1e-3,2e-3")
    made(tmp_path / "sweep", of, MadeUp())
    records = tmp_path / "sweep" / TRIALS / "trial_000" / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-9])
    lost, whole = made(tmp_path / "sweep", of, MadeUp())
    assert (lost.outcome.state, whole.outcome.state) == (FAILED, COMPLETE)
    assert lost.outcome.why == "its record of step 20 is missing, or has no loss to rank it by"


def test_a_run_that_was_resumed_with_other_settings_is_not_ranked_as_its_trial(tmp_path: Path) -> None:
    of = plan("optim.peak-lr=1e-3,3e-3")
    made(tmp_path / "sweep", of, MadeUp())
    trials = tmp_path / "sweep" / TRIALS
    # The run of the best trial stands in the place of the other one.
    shutil.rmtree(trials / "trial_000")
    shutil.copytree(trials / "trial_001", trials / "trial_000")
    first, second = made(tmp_path / "sweep", of, MadeUp())
    assert (first.outcome.state, second.outcome.state) == (FAILED, COMPLETE)
    assert first.outcome.why == (
        "its run has other settings: optim.peak_lr is 0.003, and the trial has 0.001; remove its folder to make it "
        "again"
    )


def test_a_run_may_settle_what_is_auto(tmp_path: Path) -> None:
    of = plan("device=auto,cpu", config=CONFIG.model_copy(update={"device": "cpu"}))
    (first, second) = made(tmp_path / "sweep", of, MadeUp())
    run = tmp_path / "sweep" / TRIALS / first.name
    shutil.rmtree(run)
    shutil.copytree(run.with_name(second.name), run)
    assert [trial.outcome.state for trial in made(tmp_path / "sweep", of, MadeUp())] == [COMPLETE] * 2


# The journal


def test_a_journal_that_is_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    write_plan(tmp_path / "sweep", plan())
    (tmp_path / "sweep" / JOURNAL).mkdir()
    with pytest.raises(UserError, match=f"cannot open .*{JOURNAL}: Is a directory"):
        Sweep(tmp_path / "sweep", plan())
    # Its lock is given back.
    (tmp_path / "sweep" / JOURNAL).rmdir()
    Sweep(tmp_path / "sweep", plan()).close()


def test_a_journal_that_a_kill_tore_goes_on(tmp_path: Path) -> None:
    of = plan(trials=3)
    whole = outcomes(made(tmp_path / "sweep", of, MadeUp()))
    journal = tmp_path / "sweep" / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:-9])
    (tmp_path / "sweep" / f"{JOURNAL}.lock").symlink_to(journal)
    assert outcomes(made(tmp_path / "sweep", of, MadeUp())) == whole
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_the_journal_of_another_sweep_is_refused(tmp_path: Path) -> None:
    """Its points may all lie in the space, and would be trained in the place of this sweep's."""
    one, other = (Plan(CONFIG, choose(read_space(SPACE), "sobol", 2, seed)) for seed in (0, 1))
    for name, of in (("one", one), ("other", other)):
        made(tmp_path / name, of, MadeUp())
    shutil.copy(tmp_path / "other" / JOURNAL, tmp_path / "one" / JOURNAL)
    with pytest.raises(UserError, match="is the journal of another sweep; put back the one of this sweep, or name"):
        made(tmp_path / "one", one, MadeUp())


def test_a_journal_that_names_no_sweep_goes_on(tmp_path: Path) -> None:
    of = plan(trials=2)
    whole = outcomes(made(tmp_path / "sweep", of, MadeUp()))
    journal = tmp_path / "sweep" / JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if of.identity not in line))
    assert len(journal.read_text().splitlines()) == len(lines) - 1
    assert outcomes(made(tmp_path / "sweep", of, MadeUp())) == whole


def test_a_database_in_the_journals_place_is_refused_and_stays(tmp_path: Path) -> None:
    write_plan(tmp_path / "sweep", plan())
    journal = tmp_path / "sweep" / JOURNAL
    with contextlib.closing(sqlite3.connect(journal)) as database:
        database.execute("create table trials (number integer)")
        database.commit()
    before = journal.read_bytes()
    with pytest.raises(UserError, match=f"{JOURNAL} is damaged: .*; put back the one of this sweep, or name another"):
        made(tmp_path / "sweep", plan(), MadeUp())
    assert journal.read_bytes() == before


def test_a_refused_journal_is_not_written(tmp_path: Path) -> None:
    for name, space in (("one", "optim.peak-lr=1e-3,2e-3"), ("other", "optim.weight-decay=0,0.1")):
        made(tmp_path / name, plan(space), MadeUp())
    journal = tmp_path / "one" / JOURNAL
    shutil.copy(tmp_path / "other" / JOURNAL, journal)
    before = journal.read_bytes()
    with pytest.raises(UserError, match="another sweep"):
        made(tmp_path / "one", plan("optim.peak-lr=1e-3,2e-3"), MadeUp())
    assert journal.read_bytes() == before


BROKEN = {
    "no JSON": ("{", "["),
    "no operation": ('"op_code":0', '"op_code":"__import__(\'os\')"'),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_journal_is_refused(kind: str, tmp_path: Path) -> None:
    of = plan("optim.peak-lr=1e-3")
    made(tmp_path / "sweep", of, MadeUp())
    journal = tmp_path / "sweep" / JOURNAL
    changed = journal.read_text().replace(*BROKEN[kind], 1)
    assert changed != journal.read_text()
    journal.write_text(changed)
    with pytest.raises(UserError, match="is damaged"):
        made(tmp_path / "sweep", of, MadeUp())


def test_a_point_outside_of_the_space_is_refused(tmp_path: Path) -> None:
    of = plan(trials=2)
    made(tmp_path / "sweep", of, MadeUp())
    journal = tmp_path / "sweep" / JOURNAL
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        if "optim.peak_lr" in line.get("params", {}):
            line["params"]["optim.peak_lr"] = 5.0
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="does not lie in the search space"):
        made(tmp_path / "sweep", of, MadeUp())


def test_what_came_of_a_trial_is_read_from_its_run_and_not_from_the_journal(tmp_path: Path) -> None:
    of = plan("optim.peak-lr=1e-3,3e-3")
    whole = outcomes(made(tmp_path / "sweep", of, MadeUp()))
    journal = tmp_path / "sweep" / JOURNAL
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        if line.get("values"):
            line["values"] = [0.0]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes(made(tmp_path / "sweep", of, MadeUp())) == whole


# Refusals before anything begins


def test_a_rule_refuses_a_trial_before_any_begins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    of = plan("model.heads=8,7", "optim.weight-decay=0,0.1")
    with pytest.raises(UserError) as error:
        check_points(of, file, {})
    assert error.value.lines[0].startswith("trial_002 (model.heads 7, optim.weight_decay 0): command line: model.")
    assert not (tmp_path / TRIALS).exists() and not (tmp_path / RESULTS).exists()
    check_points(plan("model.heads=8,4", "optim.weight-decay=0,0.1"), file, {})


def test_what_tpe_draws_and_a_rule_refuses_is_a_trial_that_failed(tmp_path: Path) -> None:
    of = plan("optim.warmup-steps=1:19", "train.steps=10,20", trials=6, sampler="tpe")
    trials = made(tmp_path / "sweep", of, MadeUp())
    refused = [trial for trial in trials if trial.outcome.state == FAILED]
    assert refused and all("warm-up steps do not fit" in trial.outcome.why for trial in refused)
    assert len(ranking(trials)) == 6 - len(refused) > 0

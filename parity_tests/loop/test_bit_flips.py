"""Damaged files never give a wrong run; and were a check to be missing, the trials would say so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.core.files import jsonl
from lockstep.core.run import directory
from lockstep.core.run.layout import CHECKS, CONFIG, INFO, RECORDS
from lockstep.parity_tests.loop.runs import one_line
from lockstep.scripts import cli
from lockstep.scripts.studies import bit_flips
from lockstep.scripts.studies.bit_flips import (
    FELL_BACK,
    NO_EFFECT,
    OUTCOMES,
    REFUSED,
    RUN,
    TOLD,
    WRONG,
    Damage,
    Trials,
)

# Trials take turns over the ten kinds of file.
TRIALS = 30


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("bit_flips"))


def digit_after(trials: Trials, name: str, text: bytes, line: int = 0) -> Damage:
    """Another first digit of what follows `text` in line `line`, from 0, of a file of the run."""
    whole = (trials.base / RUN / name).read_bytes()
    start = sum(map(len, whole.splitlines(keepends=True)[:line]))
    at = whole.index(text, start) + len(text)
    return Damage(RUN / name, at, ord("7") if whole[at] != ord("7") else ord("6"))


def test_trials_of_every_kind(trials: Trials) -> None:
    told: list[str] = []
    lines = list(bit_flips.run_trials(trials, range(TRIALS), told.append))
    assert told == [] and {line["outcome"] for line in lines} <= set(OUTCOMES) - {WRONG}
    assert len({line["kind"] for line in lines}) == 10
    assert {line["outcome"] for line in lines} >= {REFUSED, FELL_BACK, TOLD}
    page = bit_flips.page(lines)
    assert f"| **all** | **{TRIALS}** |" in page and str(trials.folder) not in page


def test_a_trial_is_a_function_of_its_number(trials: Trials) -> None:
    assert [trials.draw(n) for n in range(20)] == [trials.draw(n) for n in range(20)]
    assert len({str(trials.draw(n)) for n in range(20)}) == 20


def test_a_record_that_is_believed_is_wrong(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    damage = digit_after(trials, RECORDS, b'"loss": ', line=1)
    assert trials.trial(damage)[0] == TOLD
    monkeypatch.setattr(jsonl, "_intact", lambda raw: True)
    assert trials.trial(damage)[:2] == (WRONG, "records.jsonl holds what was never written, at step 2")


def test_a_check_that_is_lost_in_silence_is_wrong(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (trials.base / RUN / CHECKS).read_bytes().index(b"\n") + 1
    damage = Damage(RUN / CHECKS, first, None)
    assert trials.trial(damage)[0] == TOLD
    monkeypatch.setattr(directory.RunDir, "_losses", lambda *_: iter(()))
    assert trials.trial(damage)[:2] == (WRONG, "parity.jsonl lacks lines without a warning")


def test_a_setting_that_is_believed_is_wrong(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    damage = digit_after(trials, CONFIG, b"\npeak_lr = 0.00")
    assert "optim.peak_lr was 0.003 and is 0.007" in trials.trial(damage)[1]
    monkeypatch.setattr(directory, "require_unchanged", lambda *_: None)
    assert trials.trial(damage)[:2] == (WRONG, "the weights, moments or step differ")


def test_damage_is_mended_after_each_trial(trials: Trials) -> None:
    nothing = Damage(Path("data/index.json"), len((trials.base / "data/index.json").read_bytes()), None)
    assert trials.trial(nothing)[:2] == (NO_EFFECT, "")


def test_a_resume_without_checks_starts_no_reference(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lockstep.core.parity.modes.shadow.Shadow.__init__", lambda *_: pytest.fail("a reference was started")
    )
    nothing = Damage(Path("data/index.json"), len((trials.base / "data/index.json").read_bytes()), None)
    assert trials.trial(nothing)[0] == NO_EFFECT


@pytest.mark.parametrize("name", [RECORDS, CHECKS, CONFIG, INFO])
def test_replay_and_bisect_refuse_and_a_report_says_so(
    name: str, trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trials.base, tmp_path / "base")
    monkeypatch.chdir(tmp_path / "base")
    text = {RECORDS: b'"loss": ', CHECKS: b'"value": ', CONFIG: b"peak_lr = 0.00", INFO: b'"parameters": '}[name]
    digit_after(trials, name, text).inflict(tmp_path / "base")
    # A replay reads no recorded check.
    for command in ("bisect",) if name == CHECKS else ("replay", "bisect"):
        assert cli.run([command, str(RUN)]) == 2
        said = one_line(capsys.readouterr().err)
        assert name in said and ("--resume runs/tiny sets it aside" in said) is (name in (RECORDS, CHECKS))
    assert cli.run(["report", str(RUN)]) == 0
    assert name in one_line(capsys.readouterr().err)


def test_replay_refuses_observations_that_are_damaged(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trials.base, tmp_path / "base")
    monkeypatch.chdir(tmp_path / "base")
    path = RUN / "observations/step_000001.npz"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert cli.run(["replay", str(RUN), "--step", "1"]) == 2
    assert "step_000001.npz is damaged: " in one_line(capsys.readouterr().err)

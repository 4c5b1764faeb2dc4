"""Run files and the command line under drawn cases: a valid run or one clear message (docs/results/fuzz.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

import lockstep.core.config.file
import lockstep.core.config.rules
import lockstep.scripts.commands.train
from lockstep.core.config.file import settings
from lockstep.parity_tests.cli.fuzz.cases import (
    OUT,
    RUN_FILE,
    TAKES_SETTINGS,
    TRAIN,
    Case,
    cases,
    flag_value,
    options_of,
)
from lockstep.parity_tests.cli.fuzz.judge import judge
from lockstep.parity_tests.cli.fuzz.sandbox import Left, Sandbox
from lockstep.parity_tests.cli.workspace import Done
from lockstep.parity_tests.slow_tests import amount
from lockstep.scripts.cli import COMMANDS


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    yield Sandbox(tmp_path_factory.mktemp("fuzz"))


def outcome(sandbox: Sandbox, *argv: str, through: bool = True, files: tuple[tuple[str, bytes], ...] = ()) -> str:
    case = Case("flags", argv, files=files, through=through)
    return judge(case, sandbox.run(case))[0]


@hypothesis.settings(
    max_examples=amount(12, with_all=200),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(case=cases(own_processes=False))
def test_a_valid_run_or_one_clear_message(sandbox: Sandbox, case: Case) -> None:
    outcome, why = judge(case, sandbox.run(case))
    assert outcome != "WRONG", why


@pytest.mark.parametrize(
    ("due", "argv"),
    [
        ("done", TRAIN),
        ("shown", ("train", "--help")),
        ("shown", ()),
        ("refused", (*TRAIN, "--model.heads", "3")),
        ("refused", (*TRAIN, "--optim.peak-lr", "None")),
        ("refused", (*TRAIN, "--optim.peak-lr", "9" * 5000)),
        ("refused", (*TRAIN, "--data.seed", str(2**64))),
        ("refused", (*TRAIN, "--overwrite=no")),
        ("refused", (*TRAIN, "--name")),
        ("refused", (*TRAIN, "\x1b[31m\n")),
        ("refused", ("report", "runs/tiny", "--out", "pipe")),
        ("refused", ("report", "runs/tiny", "--out", ".")),
        ("refused", ("train", "pipe")),
        ("refused", ("parity", "tiny.toml", "--json", "pipe")),
        ("refused", ("bench", "step", "--page", "pipe")),
        ("refused", ("train", "/dev/zero")),
        ("refused", ("train", "x" * 300)),
        ("refused", ("train", "--tyro-print-completion", "x")),
        ("refused", (*TRAIN, "--precision.policy", "fp8_rowwise", "--model.layers", str(2**31))),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else None,
)
def test_what_some_calls_come_to(sandbox: Sandbox, due: str, argv: tuple[str, ...]) -> None:
    assert outcome(sandbox, *argv) == due


SIZES = ["model.vocab_size", "model.hidden", "model.ffn_hidden", "train.batch_size", "eval.batches"]


@pytest.mark.parametrize("stdout", ["closed", "full", "broken"])
def test_help_that_cannot_be_shown(sandbox: Sandbox, stdout: Any) -> None:
    case = Case("own process", ("train", "--help"), stdout=stdout, own_process=True)
    left = sandbox.run(case)
    assert judge(case, left)[1] == ""
    assert left.code == (0 if stdout == "closed" else 2)


@pytest.mark.parametrize("key", SIZES)
def test_what_no_machine_can_hold_is_refused_by_the_name_of_its_setting(sandbox: Sandbox, key: str) -> None:
    flag = "--" + key.replace("_", "-")
    case = Case("flags", (*TRAIN, flag, str(2**40)), through=True)
    left = sandbox.run(case)
    assert judge(case, left) == ("refused", "")
    assert f"{key}" in left.done.err and "GiB" in left.done.err


@pytest.mark.parametrize(
    "text",
    [b"seed = " + b"9" * 5000, b"seed = " + b"[" * 3000, b".".join([b"a"] * 3000) + b" = 1", b"\xff", b"x" * 3_000_000],
    ids=["digits", "brackets", "dots", "not UTF-8", "too large"],
)
def test_a_run_file_that_cannot_be_read(sandbox: Sandbox, text: bytes) -> None:
    assert outcome(sandbox, "train", RUN_FILE, *OUT, files=((RUN_FILE, text),)) == "refused"


# Without these the search proves nothing: faults that are planted, and must be found.


def test_rules_that_are_gone_are_noticed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep.core.config.rules, "RULES", ())
    assert outcome(sandbox, *TRAIN, "--model.heads", "3") == "WRONG"


def test_another_exception_is_noticed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(ValueError):
        def __init__(self, *lines: str) -> None:
            super().__init__("\n".join(lines))

    monkeypatch.setattr(lockstep.core.config.file, "UserError", Other)
    assert outcome(sandbox, *TRAIN, "--model.heads", "3") == "WRONG"


def test_a_run_that_is_left_half_made_is_noticed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep.scripts.commands.train._Unbegun, "__exit__", lambda *_: None)
    assert outcome(sandbox, *TRAIN, "--log.wandb", "offline") == "WRONG"


RIGHT = Left(Done(2, "", "lockstep: command line: seed = 'x': no\n"), 2, False, False, "", (), (), 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"hung": True},
        {"raised": "ValueError: x"},
        {"changed": ("out/tiny",)},
        {"aside": ("lockstep-x.txt",)},
        {"code": 3},
        {"done": Done(2, "", "")},
        {"done": Done(2, "", "seed = 'x'\n")},
        {"done": Done(2, "", "lockstep: it did not work\n")},
        {"done": Done(2, "", f"lockstep: seed = {'x' * 300}\n")},
        {"done": Done(2, "", "lockstep: seed: KeyError\n")},
        {"done": Done(2, "", "lockstep: seed: \x1b[31m\n")},
        {"done": Done(2, "Traceback (most recent call last)", RIGHT.done.err)},
    ],
    ids=str,
)
def test_the_judge_knows_what_is_wrong(change: dict) -> None:
    case = Case("flags", ("train", "--seed", "x"))
    assert judge(case, RIGHT)[0] == "refused"
    assert judge(case, Left(**{**vars(RIGHT), **change}))[0] == "WRONG"


def test_every_setting_has_values_and_every_command_options() -> None:
    for key in settings():
        assert flag_value(key) is not None
    assert {command: bool(options_of(command)) for command in COMMANDS} == dict.fromkeys(COMMANDS, True)
    assert set(TAKES_SETTINGS) <= set(COMMANDS)


def test_the_drawn_cases_are_of_every_kind_and_come_again() -> None:
    from lockstep.parity_tests.cli.fuzz.cases import KINDS, draw_cases

    first: list[Case] = []
    again: list[Case] = []
    draw_cases(1, 300, first.append)
    draw_cases(1, 300, again.append)
    assert first == again
    assert set(Counter(case.kind for case in first)) == set(KINDS)

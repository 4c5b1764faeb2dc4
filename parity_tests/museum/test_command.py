"""`lockstep museum` on a stub: a package made here that has a bug in one version, and none in the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import UserError
from lockstep.parity_tests.cli.workspace import Done
from lockstep.scripts import cli
from lockstep.scripts.commands import museum
from lockstep.scripts.museum import child
from lockstep.scripts.museum import exhibit as data
from lockstep.scripts.museum import run as running
from lockstep.scripts.museum.environments import folder_of, install
from lockstep.scripts.museum.exhibit import Exhibit
from lockstep.scripts.museum.run import Told, run_exhibit

PACKAGE = "nobody_has_this"
STUB = Exhibit(
    "stub",
    "Gradients are twice too long",
    "https://github.com/nobody/nothing/issues/1",
    (f"{PACKAGE}==1.0",),
    "stub_loop",
    2,
    "It doubles gradients from the second step on.",
    fixed=(f"{PACKAGE}==1.1",),
    settings={"steps": 3},
    stage="gradients",
    words="right direction, 2 times the right length",
)
HERE = "lockstep.parity_tests.museum"


def made(folder: Path, requirement: str, factor: float) -> None:
    """Write a package as pip would have put it there."""
    target = folder_of([requirement], folder)
    assert target is not None
    version = requirement.partition("==")[2]
    (target / PACKAGE).mkdir(parents=True)
    (target / PACKAGE / "__init__.py").write_text(f"FACTOR = {factor}\n")
    about = target / f"{PACKAGE}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    made(folder, STUB.packages[0], 2.0)
    made(folder, STUB.fixed[0], 1.0)
    return folder


def in_this_process(words: list[str], *, cwd: str, env: dict[str, str], **_: Any) -> Any:
    """Do what the command of a side does, without a process and its import of torch."""
    assert words[:3] == [sys.executable, "-m", child.__name__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[2:])
        patch.setattr(sys, "path", [*env["PYTHONPATH"].split(os.pathsep), *sys.path])
        patch.setattr("torch.set_num_threads", lambda count: None)
        patch.chdir(cwd)
        child.main()
        sys.modules.pop(PACKAGE, None)
    return subprocess.CompletedProcess(words, 0, "", "")


@pytest.fixture(scope="module")
def told(environments: Path) -> Iterator[Told]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_this_process)
        found = run_exhibit(STUB, environments, HERE)
    yield found


Call = Callable[..., Done]


@pytest.fixture
def lockstep(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        code = cli.run([str(a) for a in arguments])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return call


def test_the_bug_is_caught_in_the_step_in_which_it_acts_and_the_fixed_version_agrees(told: Told) -> None:
    assert told.caught and told.as_expected
    assert (told.shipped["step"], told.fixed["verdict"]) == (2, "agreed")
    assert told.shipped["versions"] == {PACKAGE: "1.0"} and told.fixed["versions"] == {PACKAGE: "1.1"}
    assert told.shipped["lines"] == 3 and len(told.shipped["losses"]) == 3


def test_each_side_runs_in_a_process_of_its_own(told: Told, environments: Path) -> None:
    apart = run_exhibit(STUB, environments, HERE)
    left_out = {"seconds": 0.0}
    assert {**apart.shipped, **left_out} == {**told.shipped, **left_out}
    assert {**apart.fixed, **left_out} == {**told.fixed, **left_out}


@pytest.mark.parametrize(
    "promised",
    [{"acts_at": 1}, {"stage": "moments"}, {"words": "3 times the right length"}, {"caught": False, "missed": "no"}],
    ids=str,
)
def test_another_promise_than_what_was_said_is_unexpected(told: Told, promised: dict[str, Any]) -> None:
    assert not replace(told, exhibit=replace(STUB, **promised)).as_expected


def test_a_fixed_version_that_disagrees_is_unexpected(told: Told) -> None:
    assert not replace(told, fixed=told.shipped).as_expected


def test_a_miss_that_was_promised_is_expected_and_not_caught(told: Told) -> None:
    missed = replace(told, exhibit=replace(STUB, caught=False, missed="it cannot be seen"), shipped=told.fixed)
    assert missed.as_expected and not missed.caught


def test_the_command_runs_prints_and_records(
    lockstep: Call, told: Told, environments: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data, "exhibits", lambda: {"stub": STUB})
    monkeypatch.setattr(running, "run_exhibit", lambda exhibit, folder: replace(told, exhibit=exhibit))
    (tmp_path / "found.jsonl").write_text('{"exhibit": "stub", "old": 1}\n{"exhibit": "other"}\n')
    done = lockstep("museum", "stub", "--environments", environments, "--json", "found.jsonl")
    assert (done.code, done.err) == (0, ""), done
    assert "step 2       agreed       yes" in done.out and "1 ran, 1 as expected; 0 could not run" in done.out
    assert all(len(line) <= museum.WIDTH for line in done.out.splitlines())
    other, row = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert other == {"exhibit": "other"} and row["caught"] and row["shipped"]["stages"] == ["gradients"]
    wrong = replace(STUB, words="3 times")
    monkeypatch.setattr(data, "exhibits", lambda: {"stub": wrong})
    done = lockstep("museum", "--all", "--environments", environments)
    assert done.code == 1 and "  UNEXPECTED: expected step 2, gradients, '3 times', then agreed" in done.out


def test_a_missing_environment_is_named_and_nothing_is_installed(
    lockstep: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data, "exhibits", lambda: {"stub": STUB})
    done = lockstep("museum", "stub", "--environments", "there")
    assert done.code == 2 and "0 ran" in done.out
    said = " ".join(done.out.split())
    assert f"could not run: stub: {STUB.packages[0]} missing in there; --install puts them there" in said
    assert not (tmp_path / "there").exists()


def test_a_pip_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UserError, match=rf"^pip install {PACKAGE}==1.0: ERROR: No matching distribution") as refused:
        install(STUB.packages, tmp_path / "there")
    assert len(refused.value.lines) == 1 and list(tmp_path.iterdir()) == []


def test_what_a_broken_installation_left_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(words: list[str], **_: Any) -> Any:
        Path(words[words.index("--target") + 1]).mkdir()
        return subprocess.CompletedProcess(words, 1, "", "WARNING: slow\nERROR: no space left\n")

    monkeypatch.setattr(subprocess, "run", half)
    with pytest.raises(UserError, match=rf"^pip install {PACKAGE}==1.0: ERROR: no space left$"):
        install(STUB.packages, tmp_path / "there")
    assert list(tmp_path.iterdir()) == []


def test_a_loop_that_fails_is_one_line(environments: Path) -> None:
    with pytest.raises(UserError, match=rf"^stub, {PACKAGE} 1.0: TypeError: .*no_such"):
        run_exhibit(replace(STUB, settings={"steps": 1, "no_such": 1}), environments, HERE)


def test_another_torch_than_there_is_cannot_be_installed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs torch 1\.0, and the present environment has another version"):
        folder_of(["torch==1.0"], tmp_path)


def test_the_list_names_all_and_which_are_unfixed(lockstep: Call) -> None:
    done = lockstep("museum")
    assert done.code == 0 and all(len(line) <= museum.WIDTH for line in done.out.splitlines())
    for name, one in data.exhibits().items():
        line = next(line for line in done.out.splitlines() if line.startswith(f"{name} "))
        assert line.endswith(" unfixed") == one.unfixed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mean_of_mean",), "no exhibit is named 'mean_of_mean'; did you mean mean_of_means?"),
        (("--all", "mean_of_means"), "command line: all: --all runs every exhibit; leave the names out"),
        (
            ("--all", "--json", "no/where"),
            "command line: json = no/where: cannot write there; name a file in an existing folder",
        ),
        (("mean_of_means", "--repro", "out"), "mean_of_means is fixed, so it has no script for the maintainers"),
    ],
)
def test_what_cannot_be_is_one_line(lockstep: Call, words: tuple[str, ...], said: str) -> None:
    done = lockstep("museum", *words)
    assert (done.code, done.out, done.err) == (2, "", f"lockstep: {said}\n")


def test_scripts_are_written_and_never_over_others(lockstep: Call, tmp_path: Path) -> None:
    done = lockstep("museum", "torch_layer_norm", "--repro", "out")
    assert (done.code, done.out) == (0, "out/torch_layer_norm.py\n")
    assert "lockstep" not in (tmp_path / "out/torch_layer_norm.py").read_text()
    done = lockstep("museum", "--repro", "out")
    assert done.code == 2 and done.err == "lockstep: out/torch_layer_norm.py exists already\n"

"""A name in a run directory or a capsule is data: other code than Lockstep's runs only if the command line names it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core.errors import UserError
from lockstep.core.run.info import read_info, write_info
from lockstep.parity_tests.guards.planted import planted_capsule, planted_run, planted_spike, ran
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.scripts import cli
from lockstep.scripts.shared import backends

SETTINGS = {"train.steps": 3, "checkpoint.every": 2, "checkpoint.keep": 9, "optim.warmup_steps": 1, "device": "cpu"}
SAID = "whose code runs only where the command line names it: lockstep "


@pytest.fixture(scope="module")
def made(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Make an honest run of three steps."""
    folder = Folder(tmp_path_factory.mktemp("made"), tokens)
    assert folder.train("run", SETTINGS) == 0
    return folder


@pytest.fixture
def sent(made: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder as a stranger may send it: a run, a capsule and a spike, whose seals are right."""
    monkeypatch.chdir(tmp_path)
    # A quote in its name: the line to type must be quoted for a shell.
    run = planted_run(made.path / "run", tmp_path / "it's a run")
    planted_spike(run, 2)
    planted_capsule(tmp_path / "capsule")
    return tmp_path


ASKED = {
    "resume": ["train", "--resume", "it's a run"],
    "replay a run": ["replay", "it's a run", "--step", "3", "--reference", "torch"],
    "replay a run on a device": ["replay", "it's a run", "--device", "cpu", "--reference", "torch"],
    "replay a capsule": ["replay", "capsule", "--reference", "torch"],
    "replay a spike": ["replay", "it's a run/spikes/step_000002"],
    "bisect": ["bisect", "it's a run", "--reference", "torch"],
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_planted_program_runs_only_by_the_line_that_the_refusal_prints(
    asked: str, sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(ASKED[asked]) == 2
    said = one_line(capsys.readouterr().err)
    assert not ran(sent)
    _, found, line = said.partition(SAID)
    assert found, said
    words = shlex.split(line)
    flag = "--backend" if words[0] == "train" else "--candidate"
    assert words[:-2] == ASKED[asked] and words[-2] == flag and words[-1].endswith("mine.py:Mine")
    # The program runs if the user names it: the plant is alive, and the line is the one to type.
    assert cli.run(words) == 2 and ran(sent)


# For each command, what it can be given of what somebody sent.
GIVEN = {
    "demo": [["--out", "RUN"], ["--out", "capsule"]],
    "data prepare": [["RUN/config.toml", "--data.source", "RUN", "--data.path", "prepared", "--workers", "1"]],
    "train": [["--resume", "RUN"], ["RUN/config.toml", "--out", "other", "--train.steps", "2"]],
    "sweep": [["RUN/config.toml", "--out", "RUN", "--vary", "optim.peak-lr=1e-3,2e-3"], ["capsule"]],
    "parity": [["RUN"]],
    "replay": [["RUN"], ["RUN/spikes/step_000002"], ["capsule"], ["RUN/checkpoints/step_000002"]],
    "bisect": [["RUN"], ["capsule"]],
    "faults": [["--config", "RUN"], ["RUN"]],
    "mutate": [["RUN"], ["capsule"], ["RUN/config.toml", "--out", "RUN", "--resume", "--only", "no such mutant"]],
    "calibrate": [["RUN"], ["capsule"], ["RUN/config.toml", "--checks", "0"]],
    "museum": [["RUN"], ["--repro", "RUN"], ["--environments", "RUN", "--json", "RUN/run.json", "first_label"]],
    "convert": [["RUN", "there", "--to", "jax"], ["RUN/checkpoints/step_000002", "plain"]],
    "export": [["RUN", "out"], ["RUN/checkpoints/step_000002", "plain_out"], ["capsule", "no_out"]],
    "import": [["RUN", "new"], ["RUN/checkpoints/step_000002", "plain", "--config", "RUN/config.toml"]],
    "report": [["RUN"], ["capsule"], ["RUN", "capsule"], ["RUN", "RUN", "--watch"]],
    "runs": [["."], ["RUN"], [".", "--page", "page.html", "--branches"], [".", "--json", "-", "--sort", "val"]],
    "sample": [["RUN", "--tokens", "2"]],
    "profile": [["RUN"], ["--trace", "RUN/run.json"]],
    "plan": [["RUN/config.toml"], ["capsule/config.toml"]],
    "bench step": [["--json", "RUN/run.json", "--page", "page.md"]],
    "bench best": [["RUN"]],
    "bench peers": [["--json", "RUN/run.json", "--page", "page.md"]],
    "bench data": [["--json", "RUN/run.json", "--page", "page.md"]],
    "bench ladder": [["--json", "RUN/run.json", "--page", "page.md"]],
    "bench parity": [["--json", "RUN/run.json", "--page", "page.md"]],
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_command_runs_what_lies_in_a_run_or_a_capsule(command: str, sent: Path) -> None:
    """A new command belongs into GIVEN, with whatever it reads."""
    for words in GIVEN[command]:
        code = cli.run([*command.split(), *(word.replace("RUN", "it's a run") for word in words)])
        assert code in (0, 1, 2) and not ran(sent), words


NAMES = [
    "torch",
    "jax",
    backends.TRAINER,
    backends.REFERENCE,
]


@pytest.mark.parametrize("name", NAMES)
def test_built_in_backends_are_opened_from_a_file(name: str, tmp_path: Path) -> None:
    maker = backends.Maker(name, tmp_path / "run.json")
    assert maker.named("--candidate", None, []) == name
    assert type(maker.open("--candidate", None, [])).__name__ in ("TorchBackend", "JaxBackend")


# Characters that no line to type may have: a terminal, a shell and a reader would each see something else.
STRANGE = [
    "\x1b]0;x\x07.py:Mine",
    "'" * 100 + ";touch${IFS}ran;.py:Mine",
    "x" * 300 + ".py:Mine",
    "-x.py:Mine",
    "torch ",
    "Torch",
    "mine.py",
    "",
    None,
    7,
    ["a.py:Mine"],
]


@pytest.mark.parametrize("name", STRANGE, ids=repr)
def test_a_name_that_is_none_is_never_a_line_to_type(name: object, tmp_path: Path) -> None:
    with pytest.raises(UserError) as said:
        backends.Maker(name, tmp_path / "run.json").named("--candidate", None, ["replay", "run"])
    text = str(said.value)
    assert "lockstep replay" not in text and "--candidate" in text and text.isprintable()


def test_a_line_to_type_goes_through_a_shell_as_it_was(tmp_path: Path) -> None:
    name = "a b$(touch ran)';\"&.py:Mine"
    with pytest.raises(UserError) as said:
        backends.Maker(name, tmp_path / "run.json").named("--candidate", None, ["replay", "run", "--", "x"])
    line = str(said.value).partition(SAID)[2]
    assert shlex.split(line) == ["replay", "run", "--candidate", name, "--", "x"]


def test_under_torchrun_the_line_is_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError) as said:
        backends.Maker("a.py:A", tmp_path / "run.json").named("--backend", None, ["train", "--resume", "run"])
    line = "torchrun --nproc-per-node 2 -m lockstep train --resume run --backend a.py:A"
    assert str(said.value).endswith(line)


MINE = """
from lockstep.torch_backend.backend import TorchBackend


class Mine(TorchBackend):
    pass
"""


def forget(run: Path, step: int) -> None:
    """Take the checkpoints after `step` away, as if the run had been killed then."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            path.rename(run.parent / f"{run.name} {path.name}")


@pytest.fixture
def own(made: Folder, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a run of the user's own backend, by name, to go on with after step 2."""

    def make(name: str) -> Path:
        run = planted_run(made.path / "run", tmp_path / "own")
        write_info(run / "run.json", {**read_info(run / "run.json"), "backend": name, "finished": False})
        forget(run, 2)
        return run

    return make


def test_a_run_of_ones_own_backend_goes_on_if_it_is_named_also_from_another_place(
    own: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moved.py").write_text(MINE)
    run, moved = own("my_trainer.py:Mine"), f"{tmp_path / 'moved.py'}:Mine"
    assert cli.run(["train", "--resume", str(run)]) == 2
    assert "lockstep train --resume" in one_line(capsys.readouterr().err)
    assert read_info(run / "run.json")["backend"] == "my_trainer.py:Mine"
    assert cli.run(["train", "--resume", str(run), "--backend", moved]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"trained by my_trainer.py:Mine so far, by {moved} from here on" in said
    info = read_info(run / "run.json")
    assert info["backend"] == moved and info["finished"]


@pytest.mark.parametrize(
    ("recorded", "asked"), [("torch", "jax"), ("torch", "mine.py:Mine"), ("mine.py:Mine", "torch"), (None, "jax")]
)
def test_a_run_does_not_pass_to_or_from_a_built_in_backend(
    recorded: str | None, asked: str, own: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = own(recorded)  # type: ignore[arg-type]
    before = (run / "run.json").read_bytes()
    assert cli.run(["train", "--resume", str(run), "--backend", asked]) == 2
    said = one_line(capsys.readouterr().err)
    assert f"cannot continue with {asked}; lockstep convert RUN FOLDER --to torch" in said
    assert (run / "run.json").read_bytes() == before


def test_the_backend_of_a_run_may_be_named_although_it_is_built_in(own: Callable[[str], Path]) -> None:
    assert cli.run(["train", "--resume", str(own("torch")), "--backend", backends.TRAINER]) == 0

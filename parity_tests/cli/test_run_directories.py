"""Run directories that cannot be made, and starts that fail: nothing half-written stays, nothing earlier is lost."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.cli.workspace import trained
from lockstep.scripts.shared import backends


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}


def test_what_lies_in_the_way(refused, run_file: Path, here: Path) -> None:
    (here / "file").write_text("mine")
    (here / "runs").mkdir()
    assert "cannot make file/tiny: Not a directory" in refused("train", run_file, "--out", "file")
    assert "cannot make file/deep/tiny: Not a directory" in refused("train", run_file, "--out", "file/deep")
    assert "cannot make /proc/nowhere/tiny" in refused("train", run_file, "--out", "/proc/nowhere")
    (here / "runs" / "tiny").write_text("mine")
    assert refused("train", run_file) == "runs/tiny is a file, not a folder for a run"
    assert refused("train", run_file, "--overwrite") == "runs/tiny is a file, not a folder for a run"
    (here / "runs" / "tiny").unlink()
    (here / "runs" / "tiny").mkdir()
    (here / "runs" / "tiny" / "mine").write_text("mine")
    assert refused("train", run_file, "--overwrite") == "runs/tiny is not empty and not a run: choose another name"


def test_an_existing_run_stays_until_overwrite(lockstep: Lockstep, refused, run_file: Path, here: Path) -> None:
    assert lockstep("train", run_file, "--train.steps", "4").code == 0
    before = content(here / "runs")
    said = refused("train", run_file)
    assert said == "runs/tiny holds a run already: --overwrite replaces it, --resume runs/tiny goes on with it"
    assert content(here / "runs") == before
    said = refused("parity", run_file, "--capsules", "runs/tiny/capsules")
    assert said.startswith("command line: capsules = runs/tiny/capsules: this folder holds a run's own capsules")
    # Faults of the new run are reported before the old one is touched.
    refused("train", run_file, "--overwrite", "--data.path", "nowhere")
    refused("train", run_file, "--overwrite", "--device", "cuda")
    assert content(here / "runs") == before
    assert lockstep("train", run_file, "--train.steps", "5", "--overwrite").code == 0
    assert len(trained(here / "runs" / "tiny")) == 5


def test_a_resumed_run_keeps_its_name_and_its_place(lockstep: Lockstep, refused, run_file: Path, here: Path) -> None:
    """Paths with a space: the lines to copy are quoted for a shell."""
    assert lockstep("train", run_file, "--train.steps", "4", "--out", "my runs").code == 0
    run, before = Path("my runs/tiny"), content(here / "my runs")
    told = shlex.split(refused("train", run_file, "--out", "my runs").rpartition("replaces it, ")[2])
    assert told[:2] == ["--resume", str(run)]
    for elsewhere in ("runs", "other"):
        said = refused("train", "--resume", run, "--out", elsewhere)
        assert said == f"--out {elsewhere}: --resume continues a run in its own folder, which is in {here / 'my runs'}"
    other = lockstep("train", "--resume", run, "--name", "other")
    assert (other.code, other.out) == (2, "")
    assert other.lines[0] == f"lockstep: {run}: name is 'tiny' in the run, and 'other' was asked for"
    assert content(here / "my runs") == before
    same = lockstep("train", "--resume", run, "--name", "tiny", "--out", here / "my runs")
    assert same.code == 0 and "all steps are done" in same.out


def test_a_device_that_is_not_there(refused, run_file: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "device = 'cuda' was asked for, but torch finds no CUDA device" in refused(
        "train", run_file, "--device", "cuda"
    )


@pytest.mark.parametrize("where", ["Opens", "Steps"])
def test_a_start_that_fails_leaves_nothing(
    lockstep: Lockstep, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A backend that raises when it opens, or in the first step: one line, the traceback in a file, no run."""
    monkeypatch.setitem(backends.BY_NAME, "torch", f"lockstep.parity_tests.cli.candidates:RaisesWhenIt{where}")
    monkeypatch.setenv("TMPDIR", str(here))
    monkeypatch.setattr("tempfile.tempdir", str(here))
    done = lockstep("train", run_file)
    assert done.code == 2
    (line,) = done.lines
    assert line.startswith("lockstep: RuntimeError: no luck (")
    assert "Traceback" not in done.out + done.err
    (kept,) = here.glob("lockstep-*.txt")
    assert str(kept) in line
    assert "RuntimeError: no luck" in kept.read_text() and "Traceback" in kept.read_text()
    assert not (here / "runs" / "tiny").exists()


def test_a_run_that_began_is_kept_when_it_fails(
    lockstep: Lockstep, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends.BY_NAME, "torch", "lockstep.parity_tests.cli.candidates:RaisesInStepFour")
    assert lockstep("train", run_file, "--checkpoint.every", "2").code == 2
    assert [r[0] for r in trained(here / "runs" / "tiny")] == [1, 2, 3]
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert lockstep("train", "--resume", "runs/tiny").code == 0
    assert [r[0] for r in trained(here / "runs" / "tiny")] == list(range(1, 13))


def test_wandb_that_cannot_start_leaves_nothing(
    refused, run_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    (here / "runs").mkdir()
    done = []
    monkeypatch.setattr("lockstep.scripts.shared.startup_banner.print_start", lambda *_: done.append(True))
    assert "pip install 'lockstep[wandb]'" in refused("train", run_file, "--log.wandb", "offline")
    assert done


def damage(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)


def test_a_run_that_was_damaged_cannot_go_on(lockstep: Lockstep, refused, run_file: Path, here: Path) -> None:
    assert lockstep("train", run_file, "--train.steps", "4").code == 0
    run = here / "runs" / "tiny"
    settings = (run / "config.toml").read_text()
    damage(run, "config.toml", settings.replace("hidden = 64", "hidden = 128"))
    said = refused("train", "--resume", run)
    assert "config.toml was changed after the run was made: model.hidden was 64 and is 128; put it back" in said
    damage(run, "config.toml", "x")
    assert "config.toml was changed after the run was made: not TOML" in refused("train", "--resume", run)
    damage(run, "config.toml", settings)
    information = (run / "run.json").read_text()
    damage(run, "run.json", "x")
    assert "run.json is damaged or was edited" in refused("train", "--resume", run)
    damage(run, "run.json", information)
    (weights,) = run.glob("checkpoints/*/*model*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    done = lockstep("train", "--resume", run)
    assert done.code == 2
    assert done.lines == [f"lockstep: {run} has no intact checkpoint to go on from: begin again with --overwrite"]


def test_report_of_what_is_no_run(refused, here: Path) -> None:
    (here / "folder").mkdir()
    assert refused("report", "nowhere") == "nowhere is not a run directory; lockstep runs lists those below runs/"
    assert "no run to report on" in refused("report", "folder")


def test_report_says_where_it_is(lockstep: Lockstep, run_file: Path, here: Path) -> None:
    assert lockstep("train", run_file, "--train.steps", "4").code == 0
    done = lockstep("report", "runs/tiny")
    assert (done.code, done.err, done.out.strip()) == (0, "", "runs/tiny/report.html")
    assert (here / "runs/tiny/report.html").is_file()

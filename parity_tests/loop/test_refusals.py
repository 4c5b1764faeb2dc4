"""`lockstep train` refuses in one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.loop.conftest import prepare
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line
from lockstep.scripts import cli


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Make a finished run over a data set of its own."""
    path = tmp_path_factory.mktemp("refusals")
    own = path / "tokens"
    shutil.copytree(tokens, own)
    folder = Folder(path, own)
    assert folder.train("done", {"train.steps": 4}) == 0
    return folder


@pytest.fixture
def with_other_data(trained: Folder) -> Iterator[Folder]:
    """Let a test replace the data set: it is put back afterwards."""
    aside = trained.data.with_name("aside")
    shutil.copytree(trained.data, aside)
    yield trained
    shutil.rmtree(trained.data)
    aside.rename(trained.data)


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_another_data_set_is_named(with_other_data: Folder, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_other_data
    before = content(folder.path / "done")
    own = folder.path / "tokenizer.json"
    shutil.copy(folder.data / "tokenizer.json", own)
    prepare(text, folder.data, "--data.val-fraction", "0.4", "--data.tokenizer", str(own), "--force")
    capsys.readouterr()
    assert folder.resume("done") == 2
    said = one_line(capsys.readouterr().err)
    assert "made with another data set" in said and str(folder.data) in said
    assert content(folder.path / "done") == before


def test_another_tokenizer_is_named(with_other_data: Folder, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_other_data
    prepare(text, folder.data, "--model.vocab-size", "290", "--force")
    capsys.readouterr()
    assert folder.resume("done") == 2
    said = one_line(capsys.readouterr().err)
    assert (
        "made with another data set" in said and "vocabulary 300, now 290" in said and "tokenizer fingerprint" in said
    )


def test_the_data_set_of_the_checkpoint_counts_too(
    trained: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.path / "done", tmp_path / "done")
    with RunDir.open(tmp_path / "done", write=True) as run:
        state, extra, _ = run.load_latest(lambda text: None)
        run.save_checkpoint(state, extra | {"data_fingerprint": "another"})
    assert Folder(tmp_path, trained.data).resume("done") == 2
    assert "checkpoint was made with another data set" in one_line(capsys.readouterr().err)


def test_data_that_is_gone(with_other_data: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(with_other_data.data)
    with_other_data.data.mkdir()
    assert with_other_data.resume("done") == 2
    assert "holds no prepared data; make it with: lockstep data prepare" in one_line(capsys.readouterr().err)


def test_a_folder_that_is_no_run(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained.resume("tokens") == 2
    assert "is not a run directory" in one_line(capsys.readouterr().err)
    assert trained.resume("nothing-here") == 2
    assert "is not a run directory" in one_line(capsys.readouterr().err)


def test_a_resumed_run_keeps_its_settings(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(trained.path / "done")
    assert trained.resume("done", "--train.batch-size", "8", "--data.seed", "9", "--optim.name", "muon") == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and all(line.startswith("lockstep: ") for line in said)
    assert "data.seed is 0 in the run, and 9 was asked for" in said[0]
    assert "train.batch_size is 4 in the run, and 8 was asked for" in said[1]
    assert "optim.name is 'adamw' in the run, and 'muon' was asked for" in said[2]
    assert "keeps these settings; begin a new run for others" in said[3]
    assert content(trained.path / "done") == before


def test_a_run_file_beside_a_run_must_be_the_run_s(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    other = trained.path / "other.toml"
    own = (trained.path / "done" / "config.toml").read_text()
    other.write_text(own)
    words = ["train", str(other), "--resume", str(trained.path / "done")]
    assert cli.run(words) == 0
    assert "all steps are done" in capsys.readouterr().out
    other.write_text(own.replace("hidden = 64", "hidden = 32"))
    assert cli.run(words) == 2
    assert "model.hidden is 64 in the run, and 32 was asked for" in capsys.readouterr().err.splitlines()[0]
    other.write_text(own.replace("peak_lr = 0.003", "peak_lr = 0.001"))
    assert cli.run(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert "optim.peak_lr is 0.003 in the run, and 0.001 was asked for" in said[0]
    assert "unless they are given as flags, which begins a branch" in said[1]


def test_resume_excludes_a_new_run(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained.resume("done", "--overwrite") == 2
    assert "--resume" in one_line(capsys.readouterr().err)


def test_a_finished_run_says_so(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    records, weights = trained.records("done"), trained.weights("done")
    assert trained.resume("done") == 0
    assert "all steps are done" in capsys.readouterr().out
    assert (trained.records("done"), trained.weights("done")) == (records, weights)
    assert trained.run("done").info["finished"]


def test_a_run_that_another_process_writes(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.open(trained.path / "done", write=True):
        assert trained.resume("done") == 2
    one_line(capsys.readouterr().err)


def test_a_taken_name_needs_overwrite(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained.train("done", {"train.steps": 4}) == 2
    assert "--overwrite replaces it" in one_line(capsys.readouterr().err)


def test_a_launch_of_other_ranks_is_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert folder.train("two") == 2
    assert "torchrun launched 2 processes" in one_line(capsys.readouterr().err)
    assert not (folder.path / "two").exists()


def test_a_run_that_fails_before_its_first_step_leaves_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.torch_backend.session import TorchSession

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(TorchSession, "step", fail)
    assert folder.train("new") == 2
    assert "RuntimeError: out of luck" in one_line(capsys.readouterr().err)
    assert [p.name for p in folder.path.iterdir()] == ["run.toml"]


def test_a_run_that_fails_later_keeps_what_it_has(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.torch_backend.session import TorchSession

    step = TorchSession.step

    def fail(self, batch, *, norms=False):
        if self.steps_done == 6:
            raise RuntimeError("out of luck")
        return step(self, batch, norms=norms)

    monkeypatch.setattr(TorchSession, "step", fail)
    assert folder.train("new", {"checkpoint.every": 5}) == 2
    assert "RuntimeError: out of luck" in one_line(capsys.readouterr().err)
    assert len(folder.records("new")) == 6
    monkeypatch.undo()
    assert folder.resume("new") == 0
    assert [step for step, _ in folder.losses("new")] == list(range(1, STEPS + 1))

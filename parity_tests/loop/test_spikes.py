"""Loss spikes: a planted one is found, its batch is kept and gives the same loss again; clean runs have none."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from lockstep.core.data.dataset import TokenDataset
from lockstep.core.errors import UserError
from lockstep.core.run.data import RunData
from lockstep.core.train import spikes
from lockstep.core.train.spikes import FLOOR, WINDOW, SpikeDetector, expected, read_spike
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.scripts import cli
from lockstep.scripts.shared import backends
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

AT, STEPS = 70, 74
SETTINGS = {"train.steps": STEPS, "checkpoint.every": 60, "optim.peak_lr": 1e-3}


class _Shuffled(TorchSession):
    def to_device(self, batch):
        tokens, targets, weights = super().to_device(batch)
        return tokens, (299 - targets if self.steps_done + 1 == AT else targets), weights


class Shuffled(TorchBackend):
    """At one step the targets are other tokens."""

    session_class = _Shuffled


@pytest.fixture(scope="module")
def planted(tokens, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BY_NAME, "torch", f"{__name__}:Shuffled")
        folder = Folder(tmp_path_factory.mktemp("spikes"), tokens)
        assert folder.train("run", SETTINGS) == 0
    return folder


def folder_of(planted: Folder):
    return planted.path / "run" / "spikes" / f"step_{AT:06d}"


def test_the_planted_one_is_found_and_no_other(planted: Folder) -> None:
    records = planted.records("run")
    assert [r["step"] for r in records if "spike/sigmas" in r["metrics"]] == [AT]
    assert [p.name for p in folder_of(planted).parent.iterdir()] == [f"step_{AT:06d}"]
    assert records[AT - 1]["metrics"]["spike/sigmas"] > 6


def test_a_clean_run_has_none(folder: Folder) -> None:
    assert folder.train("run", SETTINGS) == 0
    assert not any("spike/sigmas" in r["metrics"] for r in folder.records("run"))
    assert not (folder.path / "run" / "spikes").exists()


def test_what_is_kept_is_the_batch_and_can_be_read_without_lockstep(planted: Folder) -> None:
    with np.load(folder_of(planted) / "batch.npz") as file:
        arrays = dict(file)
    about = json.loads((folder_of(planted) / "about.json").read_text())
    run = planted.run("run")
    batch = RunData.open(run.config).batch(AT)
    for name, array in batch.arrays.items():
        np.testing.assert_array_equal(arrays[name], array)
    record = planted.records("run")[AT - 1]
    assert about["step"] == AT and about["digest"] == batch.digest() == record["digest"]
    assert about["loss"] == record["loss"] == about["record"]["loss"]
    assert about["sigmas"] == record["metrics"]["spike/sigmas"]
    assert about["checkpoint_before"] in (0, 60), "that of step 60 may still have been on its way"
    assert arrays["document_ids"].shape == batch.tokens.shape and (np.diff(arrays["document_ids"]) >= 0).all()


@pytest.mark.parametrize("from_start", [False, True])
def test_it_is_replayed_bit_for_bit(planted: Folder, tmp_path, capsys, monkeypatch, from_start: bool) -> None:
    monkeypatch.setitem(backends.BY_NAME, "torch", f"{__name__}:Shuffled")
    run = tmp_path / "run"
    shutil.copytree(planted.path / "run", run)
    if from_start:
        shutil.rmtree(run / "checkpoints")
    verdict = tmp_path / "verdict.json"
    assert cli.run(["replay", str(run / "spikes" / f"step_{AT:06d}"), "--json", str(verdict)]) == 0
    out = capsys.readouterr().out
    assert f"from the state of step {0 if from_start else 60}, after steps {1 if from_start else 61} to {AT - 1}" in out
    assert "bit for bit as recorded" in out
    assert json.loads(verdict.read_text())["verdict"] == "agreed"


def test_one_of_a_line_that_was_left_is_replayed_as_that(planted: Folder, tmp_path, capsys, monkeypatch) -> None:
    """A resume from before it takes it along: what the branch does at this step is another thing."""
    monkeypatch.setitem(backends.BY_NAME, "torch", f"{__name__}:Shuffled")
    folder = Folder(tmp_path, planted.data)
    shutil.copytree(planted.path / "run", tmp_path / "run")
    assert folder.resume("run", "--from-step", "60", "--optim.peak-lr", "1e-4") == 0
    left = tmp_path / "run" / "branches" / "001" / "spikes" / f"step_{AT:06d}"
    assert cli.run(["replay", str(left)]) == 0
    assert cli.run(["replay", str(tmp_path / "run" / "spikes" / left.name)]) == 0
    assert capsys.readouterr().out.count("bit for bit as recorded") == 2


def test_another_program_gives_another_loss(planted: Folder, capsys) -> None:
    """The unbroken trainer on the same batch: not what the run recorded."""
    assert cli.run(["replay", str(folder_of(planted))]) == 1
    assert "not as recorded: loss " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "batch.npz").unlink(), "batch.npz is missing"),
        (lambda path: (path / "batch.npz").write_bytes(b"PK"), "batch.npz is damaged"),
        (lambda path: (path / "about.json").write_text("{"), "about.json is not what was written"),
        (lambda path: (path / "about.json").write_text('{"schema": 9, "step": 1, "record": {}}'), "another schema"),
        (lambda path: np.savez(path / "batch.npz", tokens=np.zeros(3)), "is not a batch"),
    ],
)
def test_damage_is_one_line(planted: Folder, tmp_path, capsys, damage, said: str) -> None:
    shutil.copytree(planted.path / "run", tmp_path / "run")
    path = tmp_path / "run" / "spikes" / f"step_{AT:06d}"
    damage(path)
    assert cli.run(["replay", str(path)]) == 2
    assert said in one_line(capsys.readouterr().err)


def test_another_batch_is_noticed(planted: Folder, tmp_path) -> None:
    path = tmp_path / "spikes" / "step_000001"
    shutil.copytree(folder_of(planted), path)
    arrays = dict(np.load(path / "batch.npz"))
    arrays["tokens"][0, 0] += 1
    np.savez(path / "batch.npz", **arrays)
    with pytest.raises(UserError, match="digests differ"):
        read_spike(path)


def test_it_is_the_kept_batch_that_is_run(planted: Folder, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(backends.BY_NAME, "torch", f"{__name__}:Shuffled")
    shutil.copytree(planted.path / "run", tmp_path / "run")
    path = tmp_path / "run" / "spikes" / f"step_{AT:06d}"
    other = RunData.open(planted.run("run").config).batch(AT + 1)
    np.savez(path / "batch.npz", **other.arrays)  # type: ignore[arg-type]
    about = json.loads((path / "about.json").read_text())
    (path / "about.json").write_text(json.dumps(about | {"digest": other.digest()}))
    assert cli.run(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "another digest" in out and "the data order gives another batch at this step" in out


def test_a_full_disk_stops_nothing(folder: Folder, monkeypatch, capsys) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(backends.BY_NAME, "torch", f"{__name__}:Shuffled")
    monkeypatch.setattr(spikes, "_write", full)
    assert folder.train("run", SETTINGS) == 0
    assert f"step {AT}: loss spike: " in (out := capsys.readouterr().out)
    assert "its batch could not be kept: No space left on device" in out


# The detector


def noisy(count: int, seed: int = 0, slope: float = 0.0) -> list[tuple[int, float]]:
    noise = np.random.default_rng(seed).normal(0, 0.1, count)
    return [(step, 5.0 + slope * step + float(noise[step - 1])) for step in range(1, count + 1)]


def alarms(losses: list[tuple[int, float]], sigma: float = 6.0) -> list[int]:
    detector = SpikeDetector(sigma)
    return [step for step, loss in losses if detector.look(step, loss)]


def test_the_formula_on_numbers_made_by_hand() -> None:
    steps = list(range(1, 6))
    # A line of slope −1 through (3, 10) with deviations 0, 0.5, −0.5, 0.25, 0.
    losses = [12.0, 11.5, 9.5, 9.25, 8.0]
    pairs = [(losses[j] - losses[i]) / (j - i) for i in range(5) for j in range(i + 1, 5)]
    trend = float(np.median(pairs))
    flat = [loss - trend * (step - 3) for step, loss in zip(steps, losses, strict=True)]
    level = float(np.median(flat))
    sigma = 1.4826 * float(np.median([abs(f - level) for f in flat]))
    assert trend < 0 and expected(steps, losses, 6) == (level, sigma)
    rising = [(-1.0) * loss + 30 for loss in losses]
    found, _ = expected(steps, rising, 6)
    assert found == pytest.approx(-level + 30 + 3 * -trend)


def test_quiet_losses_have_a_least_sigma() -> None:
    steps = list(range(WINDOW))
    assert expected(steps, [2.0] * WINDOW, WINDOW) == (2.0, 2.0 * FLOOR)


@pytest.mark.parametrize("slope", [0.0, -0.05, 0.02])
def test_only_what_stands_out_is_a_spike(slope: float) -> None:
    losses = noisy(300, slope=slope)
    assert alarms(losses) == []
    # A falling trend is not extended: half a window of it is missed.
    losses[199] = 200, losses[199][1] + 1.5 + 32 * max(-slope, 0)
    assert alarms(losses) == [200]
    assert alarms(losses, 0.0) == []


def test_nothing_is_a_spike_until_the_window_is_full() -> None:
    losses = noisy(WINDOW + 2)
    losses[WINDOW - 1] = WINDOW, 99.0
    losses[WINDOW] = WINDOW + 1, 99.0
    assert alarms(losses) == [WINDOW + 1]


def test_a_loss_that_is_not_finite_is_passed_over() -> None:
    losses = noisy(200)
    losses[99] = 100, math.nan
    losses[120] = 121, math.inf
    assert alarms(losses) == []


def test_a_resumed_run_knows_the_losses_before() -> None:
    losses = noisy(WINDOW)
    assert SpikeDetector(6.0, losses).look(WINDOW + 1, 9.0) is not None
    assert SpikeDetector(6.0, losses[:-1]).look(WINDOW + 1, 9.0) is None


def test_normal_noise_raises_no_alarm() -> None:
    assert sum(len(alarms(noisy(2_000, seed))) for seed in range(3)) == 0


# Documents


def test_document_ids_count_the_ends_of_text(tokens) -> None:
    dataset = TokenDataset.open(tokens)
    split = dataset.split("train")
    whole = split.gather(np.array([0]), split.num_tokens)[0]
    numbers = np.concatenate([[0], np.cumsum(whole == dataset.eot_id)[:-1]])
    starts = np.array([0, 100, split.num_tokens - 50])
    found = dataset.origin(starts, 50)["document_ids"]
    np.testing.assert_array_equal(found, numbers[starts[:, None] + np.arange(50)])

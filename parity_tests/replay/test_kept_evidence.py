"""A capsule's evidence is judged again without the candidate and without torch, or refused by the name of a file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.disagreement import sound
from lockstep.core.parity.diagnose.recheck_rows import recheck_rows
from lockstep.core.parity.evidence import place
from lockstep.core.parity.evidence.capsule import read_capsule, write_capsule
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.held_out import HeldOut
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.saved import open_evidence, save_evidence
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.modes.replay import judge_capsule
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.guards.planted import seal_capsule
from lockstep.parity_tests.loop.conftest import folder, text, tokens
from lockstep.parity_tests.loop.runs import Folder
from lockstep.parity_tests.replay.made import CONFIG, VERSIONS, Gelu, backend, of_gelu, reference
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.scripts import cli

__all__ = ["folder", "text", "tokens"]
PLACE = {"candidate": "torch", "reference": "jax", "versions": VERSIONS}


@pytest.fixture(scope="module")
def made():
    return of_gelu()


@pytest.fixture
def capsule(tmp_path, made):
    return write_capsule(tmp_path / "capsules", *made, CONFIG, "torch", "jax", VERSIONS)


def gathered(store):
    batch = uneven_weights(text_batch(CONFIG), 0)
    return gather(Gelu(CONFIG), CONFIG, batch, due=batch.digest(), store=store)


def test_it_is_judged_as_it_was(capsule, made):
    found = judge_capsule(read_capsule(capsule), JaxBackend())
    assert found.how == "evidence" and found.notes == ()
    assert found.check.to_json()["stages"] == made[1].to_json()["stages"]


def test_neither_torch_nor_the_candidate_is_loaded(capsule):
    program = (
        "import sys; from lockstep.scripts import cli; code = cli.run(sys.argv[1:]); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch' or 'torch_backend' in m)); sys.exit(code)"
    )
    environment = os.environ | {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", program, "replay", str(capsule)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr
    assert "[as packed, from its evidence]" in done.stdout and done.stdout.splitlines()[-1] == "[]"


def test_a_folder_of_evidence_is_moved_into_the_capsule(tmp_path, made):
    store = FolderStore.create(tmp_path / "gathered")
    evidence = gathered(store)
    inode = (tmp_path / "gathered/blocks.0.safetensors").stat().st_ino
    capsule = write_capsule(tmp_path / "capsules", evidence, made[1], CONFIG, "torch", "jax", VERSIONS)
    assert (capsule / "evidence/blocks.0.safetensors").stat().st_ino == inode
    assert not (tmp_path / "gathered").exists()
    assert np.array_equal(evidence.taps["nll"], made[0].taps["nll"])
    assert judge_capsule(read_capsule(capsule), JaxBackend()).check.origin.stage == "act"


def test_it_is_copied_where_it_cannot_be_renamed(tmp_path, made, monkeypatch):
    store = FolderStore.create(tmp_path / "gathered")
    evidence, rename = gathered(store), os.rename

    def crossing(source, target):
        if str(source).endswith("gathered"):
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", crossing)
    capsule = write_capsule(tmp_path / "capsules", evidence, made[1], CONFIG, "torch", "jax", VERSIONS)
    assert not (tmp_path / "gathered").exists()
    assert open_evidence(capsule / "evidence").record.step == 1


def test_a_large_model_is_judged_from_a_folder_that_goes_but_for_an_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "LARGE", 0)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    kept = []

    def alarm(session, evidence, check):
        kept.append(sound(session, evidence, check, CONFIG, tmp_path / "capsules", **PLACE))
        return check

    for candidate, verdict in ((backend(Gelu), "disagreed"), (backend(Gelu.__base__), "agreed")):
        (check,) = check_steps(candidate, JaxBackend(), CONFIG, [text_batch(CONFIG)], alarm)
        assert check.verdict == verdict
        assert list((tmp_path / "temporary").iterdir()) == []
    (found,) = kept
    assert found.repeated is True and found.differed == ()
    assert judge_capsule(read_capsule(found.capsule), JaxBackend()).check.origin.stage == "act"


def test_an_alarm_during_training_keeps_what_was_judged(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    fault = "lockstep.parity_tests.faults.forward:QueryScaled"
    settings = {"parity.every": 8, "parity.on_alarm": "stop", "precision.policy": "fp64"}
    assert folder.train("run", settings, "--backend", fault) == 1
    run = folder.path / "run"
    packed = run / "capsules" / "step_000001"
    assert (packed / "evidence" / "index.json").is_file() and not (run / "evidence").exists()
    capsys.readouterr()
    assert cli.run(["replay", str(packed)]) == 1
    out = capsys.readouterr().out
    assert "origin q (forward" in out and "the verdict is the one that was packed" in out


def without_evidence(capsule):
    about = json.loads((capsule / "about.json").read_text())
    seal_capsule(capsule, {key: value for key, value in about.items() if key not in ("evidence", "seal")})
    shutil.rmtree(capsule / "evidence")


def test_a_capsule_without_evidence_is_run_again(capsule, capsys):
    without_evidence(capsule)
    assert read_capsule(capsule).evidence is None
    with pytest.raises(UserError, match="holds no evidence"):
        judge_capsule(read_capsule(capsule), JaxBackend())
    assert cli.run(["replay", str(capsule)]) == 0
    assert "[run again by the candidate]" in capsys.readouterr().out


def test_run_again_runs_the_candidate(capsule, capsys):
    assert cli.run(["replay", str(capsule), "--run-again"]) == 0
    assert "[run again by the candidate]" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["index.json", "evidence.json", "blocks.1.safetensors", "head.safetensors"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_names_the_file(capsule, file, how):
    path = capsule / "evidence" / file
    raw = bytearray(path.read_bytes())
    # A byte of the first tensor in safetensors: the last tensors are those of later steps, which no alarm here reads.
    raw[8 + int.from_bytes(raw[:8], "little") if file.endswith(".safetensors") else -9] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(raw if how == "flipped" else raw[:-1])
    with pytest.raises(UserError) as said:
        judge_capsule(read_capsule(capsule), JaxBackend())
    assert file in str(said.value) and "\n" not in str(said.value)


def test_another_index_is_not_taken_for_the_capsules(capsule, tmp_path):
    store = FolderStore.create(tmp_path / "other")
    store.finish()
    shutil.copy(tmp_path / "other/index.json", capsule / "evidence/index.json")
    with pytest.raises(UserError, match=r"index\.json was damaged"):
        read_capsule(capsule)


def test_evidence_elsewhere_is_not_followed(capsule, tmp_path):
    shutil.move(capsule / "evidence", tmp_path / "elsewhere")
    (capsule / "evidence").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        read_capsule(capsule)


@pytest.mark.parametrize("held_out", [False, True])
def test_tokens_are_within_the_vocabulary(capsule, made, held_out):
    index = capsule / "evidence/index.json"
    evidence = open_evidence(capsule / "evidence")
    tokens = evidence.batch.tokens.copy()
    tokens[0, 0] = 10**6
    shutil.rmtree(capsule / "evidence")
    wrong = replace(evidence.batch, tokens=tokens)
    scores = {"nll": np.zeros(tokens.shape, np.float32), "top1": np.zeros(tokens.shape, np.int32)}
    changed = replace(made[0], **({"held_out": HeldOut(wrong, scores, scores)} if held_out else {"batch": wrong}))
    save_evidence(changed, FolderStore.create(capsule / "evidence"))
    about = json.loads((capsule / "about.json").read_text())
    about.pop("seal")
    seal_capsule(capsule, about | {"evidence": hashlib.sha256(index.read_bytes()).hexdigest()})
    with pytest.raises(UserError, match="outside the vocabulary"):
        judge_capsule(read_capsule(capsule), JaxBackend())


def test_what_a_recheck_found_is_kept(tmp_path):
    class Fourth(Gelu):
        """Wrong in the fourth sequence of a micro-batch of six alone."""

        def build_model(self):
            model = super(Gelu, self).build_model()
            right, wrong = model.blocks[0].mlp.activate, super().build_model().blocks[0].mlp.activate

            def activate(gate, up):
                found = right(gate, up).clone()
                found[3:4] = wrong(gate, up)[3:4]
                return found

            model.blocks[0].mlp.activate = activate
            return model

    config = tiny_config("bf16", train={"sequence_length": 32, "batch_size": 6, "micro_batch_size": 6})
    session, store = Fourth(config), FolderStore.create(tmp_path / "gathered")
    evidence = gather(session, config, uneven_weights(text_batch(config), 0), store=store)
    opened = reference(config)
    evidence, check = recheck_rows(session, config, evidence, judge(evidence, opened), opened)
    assert evidence.rechecked and check.origin.stage == "act"
    capsule = read_capsule(write_capsule(tmp_path / "capsules", evidence, check, config, "torch", "jax", VERSIONS))
    assert open_evidence(capsule.evidence).rechecked
    assert judge_capsule(capsule, JaxBackend()).check.origin.stage == "act"

"""A capsule is read as it was written, or refused by the name of the file; what cannot be written leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import stat
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.core.config import auto
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.capsule import other_versions, read_capsule, write_capsule
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.probe import has_end_of_text
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.modes.replay import replay_capsule
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import FAULTS
from lockstep.parity_tests.faults.attention import PackedDocumentsSeeEachOther
from lockstep.parity_tests.faults.state import BlocksExchangedOnLoad
from lockstep.parity_tests.reference.at_once import AtOnce
from lockstep.parity_tests.replay.made import CONFIG, VERSIONS, Gelu, backend, checked, of_gelu, reference
from lockstep.parity_tests.tiny import text_batch


@pytest.fixture(scope="module")
def made():
    return of_gelu()


def write(folder, made):
    evidence, check = made
    return write_capsule(folder, evidence, check, CONFIG, "torch", "jax", VERSIONS, {"device": "cpu"})


@pytest.fixture
def capsule(tmp_path, made):
    return write(tmp_path / "capsules", made)


def test_it_is_read_as_it_was_written(capsule, made):
    evidence, check = made
    found = read_capsule(capsule)
    assert capsule.name == "step_000001" and found.step == 1
    assert len({stat.S_IMODE(path.stat().st_mode) for path in capsule.rglob("*") if path.is_file()}) == 1
    assert found.config == CONFIG
    assert found.batch.digest() == evidence.batch.digest()
    assert found.tapped.digest() == evidence.tapped.digest()
    assert found.record == evidence.record
    assert found.verdict["origin"] == check.to_json()["origin"]
    assert all(np.array_equal(found.state.params[n], a) for n, a in evidence.before.params.items())
    assert found.given_probe is None


def test_it_is_readable_without_lockstep(capsule):
    assert tomllib.loads((capsule / "config.toml").read_text())["model"]["hidden"] == CONFIG.model.hidden
    assert json.loads((capsule / "about.json").read_text())["candidate"] == "torch"
    assert np.load(capsule / "batch.npz", allow_pickle=False)["batch.tokens"].dtype == np.int32
    assert "embed.weight" in load_file(capsule / "state/step_000000/params.safetensors")
    assert "candidate.out" in np.load(capsule / "stage.npz", allow_pickle=False)
    assert "taps/blocks.0.mlp.act" in load_file(capsule / "evidence/blocks.0.safetensors")
    assert json.loads((capsule / "evidence/evidence.json").read_text())["record"]["step"] == 1


def test_documents_are_packed_and_judged_again(tmp_path):
    fault = next(fault for fault in FAULTS if fault.make is PackedDocumentsSeeEachOther)
    config = fault.configured(CONFIG)
    evidence, check = checked(fault.make(), config)
    packed = write_capsule(tmp_path, evidence, check, config, "torch", "jax", VERSIONS)
    found = read_capsule(packed)
    for one, other in ((found.batch, evidence.batch), (found.tapped, evidence.tapped)):
        assert one.documents is not None and one.digest() == other.digest()
    again = replay_capsule(found, fault.make(), JaxBackend())
    assert again.check.origin is not None and again.check.origin.stage == "attn"


def test_which_token_ends_a_document_is_packed_and_the_same_sequences_are_looked_at_again(tmp_path):
    batch = replace(text_batch(CONFIG), end_of_text=0)
    evidence = gather(backend(Gelu).open(CONFIG), CONFIG, batch)
    packed = write(tmp_path, (evidence, judge(evidence, reference())))
    found = read_capsule(packed)
    assert found.batch.end_of_text == found.tapped.end_of_text == 0 and has_end_of_text(found.tapped)
    again = replay_capsule(found, backend(Gelu), JaxBackend())
    assert again.notes == () and again.check.to_json()["stages"] == judge(evidence, reference()).to_json()["stages"]


def test_on_a_machine_without_its_products_it_is_made_with_copies(tmp_path, made, monkeypatch):
    """A capsule has the library that its machine chose, perhaps oneDNN's block product."""
    evidence, check = made
    precision = CONFIG.precision.model_copy(update={"cpu_products": "brgemm"})
    config = CONFIG.model_copy(update={"device": "cpu", "precision": precision})
    packed = write_capsule(tmp_path, evidence, check, config, "torch", "jax", VERSIONS)
    for builds, library in ((True, "brgemm"), (False, "blas")):
        monkeypatch.setattr(auto, "builds_bf16_products", lambda builds=builds: builds)
        assert read_capsule(packed).config.precision.cpu_products == library


def test_its_step_is_judged_as_it_was(capsule, made):
    _, check = made
    again = replay_capsule(read_capsule(capsule), backend(Gelu), JaxBackend())
    assert again.notes == ()
    assert again.check is not None and again.check.to_json()["origin"] == check.to_json()["origin"]


def test_a_mended_candidate_agrees_and_is_said_to_do_otherwise(capsule):
    from lockstep.torch_backend.backend import TorchBackend

    again = replay_capsule(read_capsule(capsule), TorchBackend(), JaxBackend())
    assert again.check is not None and again.check.verdict == "agreed"
    assert "record differs from the packed one: loss" in again.notes[0]


def test_one_of_the_same_step_is_kept(capsule, made):
    (capsule / "repro.py").write_text("# mine")
    others = [write(capsule.parent, made) for _ in range(2)]
    assert [other.name for other in others] == ["step_000001-2", "step_000001-3"]
    assert (capsule / "repro.py").read_text() == "# mine"
    assert read_capsule(others[1]).step == 1
    assert sorted(p.name for p in capsule.parent.iterdir()) == ["step_000001", "step_000001-2", "step_000001-3"]


def test_in_a_run_directory_one_of_the_same_step_is_replaced(tmp_path, made):
    (tmp_path / "config.toml").touch()
    (tmp_path / "run.json").touch()
    capsule = write(tmp_path / "capsules", made)
    (capsule / "repro.py").write_text("# mine")
    assert write(capsule.parent, made) == capsule
    assert (capsule / "repro.py").read_text() != "# mine"
    assert [p.name for p in capsule.parent.iterdir()] == ["step_000001"]


@pytest.mark.parametrize(
    "name",
    ["about.json", "batch.npz", "record.json", "verdict.json", "config.toml", "state/step_000000/exp_avg.safetensors"],
)
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_damage_names_the_file(capsule, name, how):
    file = capsule / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(raw if how == "changed" else raw[: len(raw) // 2])
    with pytest.raises(UserError) as said:
        read_capsule(capsule)
    assert name.split("/")[-1] in str(said.value) and "\n" not in str(said.value)


def test_any_flipped_bit_is_noticed_or_without_effect(capsule, made):
    rng = random.Random(0)
    left_out = ("stage.npz", "repro.py")
    files = [path for path in sorted(capsule.rglob("*")) if path.is_file() and path.name not in left_out]
    # Tensors of the evidence are verified when they are judged (test_kept_evidence.py).
    files = [path for path in files if path.parent.name != "evidence" or path.name == "index.json"]
    noticed = 0
    for _ in range(150):
        file = rng.choice(files)
        whole = file.read_bytes()
        raw = bytearray(whole)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(raw)
        try:
            found = read_capsule(capsule)
            assert found.record == made[0].record and found.batch.digest() == made[0].batch.digest()
            assert found.config == CONFIG and file.suffix == ".json"  # white space
        except UserError as error:
            assert file.name in str(error) and "\n" not in str(error)
            noticed += 1
        file.write_bytes(whole)
    assert noticed > 130


def test_another_schema_is_refused(capsule):
    about = json.loads((capsule / "about.json").read_text())
    (capsule / "about.json").write_text(json.dumps(about | {"schema": 99}))
    with pytest.raises(UserError, match=r"about\.json has schema 99; this Lockstep reads 1"):
        read_capsule(capsule)


def test_other_versions_of_packages_are_named(capsule):
    assert other_versions(read_capsule(capsule), VERSIONS) == []
    here = VERSIONS | {"torch": "2.14.0", "jax": "0.10"}
    assert other_versions(read_capsule(capsule), here) == [
        "jax not noted then, 0.10 here",
        "torch 2.13.0 then, 2.14.0 here",
    ]


@pytest.mark.parametrize("kilobytes", [10, 150])
def test_a_disk_that_refuses_leaves_nothing(tmp_path, made, kilobytes):
    """A limit on the size of files stands for a full disk: writing fails in the midst of one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write the capsule .*step_000001: "):
            write(tmp_path / "capsules", made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "capsules").iterdir()) == []


def test_a_disk_that_is_full_at_last_leaves_nothing(tmp_path, made, monkeypatch):
    """The state is written already; the capsule's own files are not."""
    right, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        right(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write the capsule .*: No space left on device"):
        write(tmp_path / "capsules", made)
    assert list((tmp_path / "capsules").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path, made):
    (tmp_path / "capsules").write_text("a file")
    with pytest.raises(UserError, match="cannot write the capsule"):
        write(tmp_path / "capsules", made)


def test_the_earlier_one_stays_if_a_new_one_fails(capsule, made):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * 1024, hard))
    try:
        with pytest.raises(UserError):
            write(capsule.parent, made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_capsule(capsule).step == 1


def test_a_reference_with_other_names_is_one_line(capsule):
    class Other(AtOnce):
        def open(self, config):
            return super().open(config.model_copy(update={"model": config.model.model_copy(update={"tied": False})}))

    with pytest.raises(UserError, match=r"the reference does not take this state: .*lm_head"):
        replay_capsule(read_capsule(capsule), backend(Gelu), Other())


def test_a_candidate_with_other_names_is_one_line(capsule):
    found = read_capsule(capsule)
    params = {name: array for name, array in found.state.params.items() if name != "final_norm.weight"}
    with pytest.raises(UserError, match=r"the candidate does not take the capsule's state: .*final_norm"):
        replay_capsule(replace(found, state=replace(found.state, params=params)), backend(Gelu), JaxBackend())


def test_a_candidate_that_does_not_take_the_capsules_state_is_refused(capsule):
    with pytest.raises(UserError, match=r"^the session did not take its state back: params/blocks\.0\..* the capsule$"):
        replay_capsule(read_capsule(capsule), BlocksExchangedOnLoad(), JaxBackend())

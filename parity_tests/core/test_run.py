"""The run directory: all or nothing when it is made, line by line while it lives, bit by bit when it is read back."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.backend import StepRecord
from lockstep.core.checkpoint.format import load_checkpoint
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import ParityConfig
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines
from lockstep.core.files.lock import FolderLock
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.core.run_files import CONFIG, assert_same_state, everything_under, record, state
from lockstep.parity_tests.slow_tests import amount


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "runs" / "r", CONFIG, {"backend": "torch", "wandb_id": None}) as run:
        yield run


# Creation


def test_created_run_reads_back(run):
    assert load_config(run.path / "config.toml") == CONFIG
    info = json.loads((run.path / "run.json").read_text())
    assert info["backend"] == "torch" and info["finished"] is False and info["name"] == "r"
    run.update_info(wandb_id="abc")
    run.finish()
    reader = RunDir.open(run.path)
    assert reader.config == CONFIG
    assert reader.info["wandb_id"] == "abc" and reader.info["finished"] is True and reader.info["backend"] == "torch"


def test_existing_run_is_kept_unless_overwritten(run):
    run.append_record(record(1))
    run.close()
    with pytest.raises(UserError, match=r"holds a run already: --overwrite replaces it, --resume .* goes on") as error:
        RunDir.create(run.path, CONFIG, {})
    assert "\n" not in str(error.value)
    assert len(RunDir.open(run.path).records()) == 1
    with RunDir.create(run.path, CONFIG, {}, overwrite=True) as new:
        assert new.records() == []
    assert [p.name for p in run.path.parent.iterdir()] == ["r"]


def test_what_is_not_a_run_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not empty and not a run"):
        RunDir.create(tmp_path, CONFIG, {}, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        RunDir.create(tmp_path / "thesis.tex", CONFIG, {}, overwrite=True)
    assert everything_under(tmp_path) == ["thesis.tex"]


def test_empty_folder_is_taken(tmp_path):
    (tmp_path / "r").mkdir()
    RunDir.create(tmp_path / "r", CONFIG, {}).close()


def test_unwritable_parent_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make"):
        RunDir.create(tmp_path / "file" / "runs" / "r", CONFIG, {})
    assert everything_under(tmp_path) == ["file"]


@pytest.mark.parametrize("occupied", [False, True])
@pytest.mark.parametrize("failing", ["rename", "fsync"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path, monkeypatch, failing, occupied):
    path = tmp_path / "deep" / "runs" / "r"
    if occupied:
        with RunDir.create(path, CONFIG, {"mark": "first"}):
            pass
    before = everything_under(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(UserError, match="No space left on device"):
            RunDir.create(path, CONFIG, {"mark": "second"}, overwrite=True)
    assert everything_under(tmp_path) == before
    if occupied:
        with RunDir.open(path, write=True) as run:
            assert run.info["mark"] == "first"


def test_what_a_killed_start_left_beside_is_cleared(run):
    run.close()
    runs = run.path.parent
    for name in (".r.7.new", ".r.8.old", ".other.9.old", ".r.x.9.old"):
        (runs / name).mkdir()
    with FolderLock(runs / ".r.8.old"):  # its process is at work
        RunDir.create(run.path, CONFIG, {}, overwrite=True).close()
    assert sorted(p.name for p in runs.iterdir()) == [".other.9.old", ".r.8.old", ".r.x.9.old", "r"]


def test_a_run_that_a_killed_start_had_not_replaced_yet_is_put_back(run):
    run.append_record(record(1))
    run.close()
    os.rename(run.path, run.path.with_name(".r.7.old"))
    with pytest.raises(UserError, match="holds a run already"):
        RunDir.create(run.path, CONFIG, {})
    assert [p.name for p in run.path.parent.iterdir()] == ["r"]
    assert len(RunDir.open(run.path).records()) == 1


def test_open_says_what_is_not_a_run(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        RunDir.open(tmp_path)
    with pytest.raises(UserError, match="is not a run directory"):
        RunDir.open(tmp_path / "nowhere")


def test_one_writer(run):
    for attempt in (
        lambda: RunDir.open(run.path, write=True),
        lambda: RunDir.create(run.path, CONFIG, {}, overwrite=True),
    ):
        with pytest.raises(UserError, match=rf"is being written by another process \(pid {os.getpid()}\)"):
            attempt()
    RunDir.open(run.path).close()  # readers are welcome
    run.append_record(record(1))
    run.close()
    RunDir.open(run.path, write=True).close()


def test_a_killed_writer_leaves_no_lock(tmp_path):
    program = (
        "import os; from pathlib import Path; from lockstep.core.config.schema import RunConfig; from "
        "lockstep.core.run.directory "
        "import RunDir\n"
        f"r = RunDir.create(Path({str(tmp_path / 'r')!r}), RunConfig(), {{}}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    RunDir.open(tmp_path / "r", write=True).close()


def test_a_reader_cannot_write(run):
    reader = RunDir.open(run.path)
    for write in (lambda: reader.append_record(record(1)), lambda: reader.update_info(a=1), reader.finish):
        with pytest.raises(RuntimeError, match="opened to read"):
            write()


# Records and checks


def test_records_are_there_before_close(run):
    run.append_record(record(1, metrics={"val/loss": 3.5}, mfu={"6N": 0.4}, sample='a "b"\n[c] é'))
    run.append_record(record(2, loss=float("nan")))
    first, second = RunDir.open(run.path).records()
    assert first["metrics"] == {"val/loss": 3.5} and first["mfu"] == {"6N": 0.4}
    assert first["sample"] == 'a "b"\n[c] é'
    assert set(first) == set(StepRecord.__dataclass_fields__)
    assert second["loss"] != second["loss"]


def test_torn_last_line_is_left_out_and_another_is_an_error(run):
    for step in (1, 2):
        run.append_record(record(step))
    path = run.path / "records.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) // 2 + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [line["step"] for line in run.records()] in ([1], [1, 2])
    path.write_bytes(b"{broken\n" + whole)
    with pytest.raises(UserError, match=r"records.jsonl, line 1: damaged after it was written .*--resume"):
        run.records()


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "los'])
def test_resume_moves_later_steps_out(run, torn):
    for step in range(1, 8):
        run.append_record(record(step))
        run.append_check({"schema": 1, "step": step, "verdict": "agreed"})
    for step in (2, 4, 6):
        run.save_checkpoint(state(step), {})
    run.finish()
    run.close()
    with open(run.path / "records.jsonl", "ab") as file:
        file.write(torn)
    with RunDir.open(run.path, write=True) as again:
        again.resume_from(4)
        assert again.info["finished"] is False
        assert again.info["resumes"][0]["step"] == 4
        assert [line["step"] for line in again.records()] == [1, 2, 3, 4]
        assert [line["step"] for line in again.checks()] == [1, 2, 3, 4]
        assert [p.name for p in again.checkpoints()] == ["step_000002", "step_000004"]
        again.append_record(record(5, loss=1.0))
        assert [line["step"] for line in again.records()] == [1, 2, 3, 4, 5]
        (branch,) = again.info["branches"]
        assert (branch["from_step"], branch["records"], branch["checks"], branch["checkpoints"]) == (4, 3, 3, [6])
        assert_same_state(load_checkpoint(again.path / branch["path"] / "step_000006")[0], state(6))
        assert [line["step"] for line in read_lines(again.path / branch["path"] / "records.jsonl")] == [5, 6, 7]


def test_resume_at_the_end_makes_no_branch(run):
    run.append_record(record(1))
    run.resume_from(1)
    assert run.info["branches"] == [] and not (run.path / "branches").exists()
    run.append_record(record(2))
    assert [line["step"] for line in run.records()] == [1, 2]


CHECKED = CONFIG.model_copy(update={"parity": ParityConfig(every=3)})


def checked_run(path: Path, steps: int = 7) -> RunDir:
    """Make a run with records of steps 1 to 7, checks of 1, 3 and 6, and a checkpoint of step 5."""
    run = RunDir.create(path, CHECKED, {})
    for step in range(1, steps + 1):
        run.append_record(record(step))
        if CHECKED.parity.due(step):
            run.append_check({"schema": 2, "step": step, "verdict": "agreed"})
    run.save_checkpoint(state(5), {})
    run.close()
    return run


def resumed(path: Path, step: int = 5) -> tuple[RunDir, list[str]]:
    warned: list[str] = []
    run = RunDir.open(path, write=True)
    run.resume_from(step, warned.append)
    run.close()
    return run, warned


def spoil(path: Path, *numbers: int) -> list[bytes]:
    """Another loss or verdict in these lines; returns them."""
    lines = path.read_bytes().splitlines(keepends=True)
    for number in numbers:
        lines[number - 1] = lines[number - 1].replace(b"e", b"E", 1)
    path.write_bytes(b"".join(lines))
    return [lines[number - 1] for number in numbers]


def test_an_intact_run_resumes_without_a_warning(tmp_path):
    checked_run(tmp_path / "r")
    run, warned = resumed(tmp_path / "r")
    assert warned == [] and "damaged" not in run.info and not (run.path / "damaged").exists()


def test_damage_before_the_checkpoint_is_told_and_set_aside(tmp_path):
    path = checked_run(tmp_path / "r").path
    records, checks = spoil(path / "records.jsonl", 2, 3), spoil(path / "parity.jsonl", 2)
    run, warned = resumed(path)
    aside = path / "damaged/001"
    assert warned == [
        f"{path}/records.jsonl, lines 2 to 3: damaged after they were written (their crc32 does not match); "
        f"set aside in {aside}/records.jsonl and not used",
        f"{path}/parity.jsonl, line 2: damaged after it was written (its crc32 does not match); "
        f"set aside in {aside}/parity.jsonl and not used",
        f"{path}/records.jsonl: no record is left of steps 2 to 3, made before",
        f"{path}/parity.jsonl: nothing is left of the checks that were due at step 3: "
        "lost, or under way when the run stopped",
    ]
    assert [line["step"] for line in run.records()] == [1, 4, 5]
    assert [line["step"] for line in run.checks()] == [1]
    assert (aside / "records.jsonl").read_bytes() == b"".join(records)
    assert (aside / "parity.jsonl").read_bytes() == b"".join(checks)
    assert RunDir.open(path).info["damaged"] == [{"path": "damaged/001", "records": [2, 3], "checks": [2]}]
    spoil(path / "records.jsonl", 1)
    assert [entry["path"] for entry in resumed(path)[0].info["damaged"]] == ["damaged/001", "damaged/002"]
    assert (aside / "records.jsonl").read_bytes() == b"".join(records)


def test_damage_after_the_checkpoint_costs_nothing(tmp_path):
    path = checked_run(tmp_path / "r").path
    spoil(path / "records.jsonl", 6, 7)
    spoil(path / "parity.jsonl", 3)
    run, warned = resumed(path)
    assert len(warned) == 2 and all("set aside" in text for text in warned)
    assert [line["step"] for line in run.records()] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in run.checks()] == [1, 3]


def test_files_cut_short_before_the_checkpoint_are_told(tmp_path):
    path = checked_run(tmp_path / "r").path
    for name, kept in (("records.jsonl", 3), ("parity.jsonl", 1)):
        lines = (path / name).read_bytes().splitlines(keepends=True)
        (path / name).write_bytes(b"".join(lines[:kept]) + b'{"torn')
    _, warned = resumed(path)
    assert len(warned) == 2
    assert "no record is left of steps 4 to 5" in warned[0] and "due at step 3" in warned[1]


def test_a_resume_that_nobody_listens_to_warns(tmp_path):
    path = checked_run(tmp_path / "r").path
    spoil(path / "records.jsonl", 6)
    with RunDir.open(path, write=True) as run, pytest.warns(UserWarning, match="line 6: damaged"):
        run.resume_from(5)


# run.json


def test_every_changed_byte_of_run_json_is_noticed(tmp_path):
    path = checked_run(tmp_path / "r").path / "run.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), amount(17, with_all=1)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"run.json is damaged or was edited .*; put it back as it was written"):
            RunDir.open(path.parent)
    path.write_bytes(whole)
    assert path.read_text().startswith('{\n  "auto_on_cpu": {')
    RunDir.open(path.parent)


def test_every_changed_byte_of_config_toml_is_noticed_or_without_effect(tmp_path):
    path = checked_run(tmp_path / "r").path / "config.toml"
    whole, refused = path.read_bytes(), 0
    tried = range(0, len(whole), amount(17, with_all=1))
    for at in tried:
        for byte in (whole[at] ^ (1 << at % 8), ord("7")):
            path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            try:
                assert RunDir.open(path.parent).config == CHECKED
            except UserError as error:
                assert "config.toml was changed after the run was made: " in str(error) and "\n" not in str(error)
                refused += 1
    assert refused > len(tried)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("keep = 3", "keep = 2", "checkpoint.keep was 3 and is 2; put it back: run.json holds what it said"),
        ("keep = 3", "", "checkpoint.keep was 3 and is absent; put"),
        ("keep = 3", "keep = 3\nnew = 1", "checkpoint.new was absent and is 1; put"),
        ("[", "[[", "not TOML: "),
    ],
)
def test_config_toml_that_says_something_else_is_named(tmp_path, old, new, said):
    path = checked_run(tmp_path / "r").path
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text("# a comment\n" + text.replace(old, new))
    with pytest.raises(UserError, match=said):
        RunDir.open(path)
    (path / "config.toml").write_text("# a comment\n" + text)
    assert RunDir.open(path).config == CHECKED


class Killed(BaseException):
    """SIGKILL, as far as the disk is concerned."""


@pytest.mark.parametrize("after", range(9))
def test_a_setting_back_that_is_cut_short_is_done_by_the_next(run, monkeypatch, after):
    """It is killed after so many renames; then it trains on, and is set back once more."""
    for step in range(1, 6):
        run.append_record(record(step))
        run.append_check({"schema": 1, "step": step, "verdict": "agreed"})
    for step in (2, 4):
        run.save_checkpoint(state(step), {})
    run.close()
    first = (run.path / "records.jsonl").read_bytes().splitlines()
    done = 0

    def counted(function):
        def rename(*paths):
            nonlocal done
            if done == after:
                raise Killed
            done += 1
            function(*paths)

        return rename

    with monkeypatch.context() as patch, contextlib.suppress(Killed), RunDir.open(run.path, write=True) as again:
        for name in ("rename", "replace"):
            patch.setattr(os, name, counted(getattr(os, name)))
        again.resume_from(2)
    with RunDir.open(run.path, write=True) as again:
        again.resume_from(2)
        again.append_record(record(3, loss=1.0))
    second = (run.path / "records.jsonl").read_bytes().splitlines()
    with RunDir.open(run.path, write=True) as again:
        again.resume_from(2)
        branches = {branch["path"]: branch for branch in again.info["branches"]}
    folders = {str(path.relative_to(run.path)): path for path in (run.path / "branches").iterdir()}
    assert branches.keys() == folders.keys() and len(branches) == 2
    told = {path: [line["step"] for line in read_lines(folder / "records.jsonl")] for path, folder in folders.items()}
    assert {path: len(steps) for path, steps in told.items()} == {p: b["records"] for p, b in branches.items()}
    assert (branches["branches/001"]["checks"], branches["branches/001"]["checkpoints"]) == (3, [4])
    kept = [line for path in run.path.rglob("records.jsonl") for line in path.read_bytes().splitlines()]
    assert sorted(kept) == sorted({*first, *second})
    assert not list(run.path.rglob("*.lockstep-tmp"))


def test_a_run_that_is_discarded_takes_the_parents_along_that_were_made_for_it(tmp_path):
    (tmp_path / "mine").mkdir()
    RunDir.create(tmp_path / "mine" / "new" / "deep" / "r", CONFIG, {}).discard()
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    run = RunDir.create(tmp_path / "mine" / "new" / "r", CONFIG, {})
    (tmp_path / "mine" / "new" / "theirs").touch()
    run.discard()
    assert [path.name for path in (tmp_path / "mine" / "new").iterdir()] == ["theirs"]

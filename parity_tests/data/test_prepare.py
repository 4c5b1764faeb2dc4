"""Preparing is repeatable to the byte, can be interrupted anywhere, and refuses what it cannot do."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.core.data import prepare as prepare_module
from lockstep.core.data.catalog import read_catalog
from lockstep.core.data.dataset import TokenDataset
from lockstep.core.data.entropy import bigram_entropy, unigram_entropy
from lockstep.core.data.plan import read_plan
from lockstep.core.data.prepare import PrepareSettings, prepare
from lockstep.core.data.sample import sample_training_text
from lockstep.core.data.sources import list_source
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import TEMPORARY_SUFFIX
from lockstep.core.files.lock import FolderLock
from lockstep.parity_tests.data.conftest import settings_for, write_texts

REPOSITORY = Path(__file__).resolve().parents[2]


class Stop(Exception):
    """An interruption."""


def contents(folder: Path) -> dict[str, str]:
    """Return a digest per file that belongs to the data."""
    names = ["index.json", "tokenizer.json", *(path.name for path in folder.glob("*.bin"))]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def stop_at(stage, count=0):
    """Return a progress callback that raises at the report number `count` of `stage`."""
    reports = itertools.count()

    def on_progress(progress):
        if progress.stage == stage and next(reports) == count:
            raise Stop

    return on_progress


def decoded(folder: Path, split: str) -> list[str]:
    """Return the documents of a split, as text."""
    opened = TokenDataset.open(folder)
    tokens = opened.split(split)
    if not tokens.num_tokens:
        return []
    (ids,) = tokens.gather(np.array([0]), tokens.num_tokens)
    ends = np.flatnonzero(ids == opened.eot_id)
    assert ends[-1] == ids.size - 1
    tokenizer = opened.tokenizer()
    return [tokenizer.decode(part[part != opened.eot_id]) for part in np.split(ids, ends[:-1] + 1)]


def test_every_document_arrives_once_in_order(prepared, texts):
    train, val = decoded(prepared, "train"), decoded(prepared, "val")
    expected = [path.read_text(encoding="utf-8") for path in sorted(texts.iterdir())]
    assert sorted(train + val) == sorted(expected)
    for found in (train, val):
        assert found == [text for text in expected if text in set(found)]
    assert 2 <= len(val) <= 16  # 8 expected of 40


def test_three_workers_write_the_same_bytes(prepared, texts, tmp_path):
    result = prepare(settings_for(tmp_path / "out", texts, workers=3))
    assert contents(tmp_path / "out") == contents(prepared)
    assert result.shards_written == len(list(prepared.glob("*.bin"))) > 3


def test_the_index_counts_and_measures(prepared):
    opened = TokenDataset.open(prepared)
    index = opened.index
    for name, split in index.splits.items():
        documents = decoded(prepared, name)
        assert split.documents == len(documents)
        assert split.text_bytes == sum(len(text.encode()) for text in documents)
        assert split.tokens == opened.split(name).num_tokens
        assert split.bytes_per_token == split.text_bytes / split.tokens
    (tokens,) = opened.split("val").gather(np.array([0]), index.val.tokens)
    assert index.val.unigram_entropy == unigram_entropy(tokens, 300)
    assert index.val.bigram_entropy == bigram_entropy(tokens, 300)
    assert index.val.unigram_entropy > index.val.bigram_entropy > 0
    # Shards are about as long as was asked for, give or take a document at either end, the last excepted.
    lengths = [shard.tokens for shard in index.train.shards[:-1]]
    assert len(lengths) > 5 and 700 < np.mean(lengths) < 1400


def test_a_second_run_does_nothing(texts, tmp_path, monkeypatch):
    settings = settings_for(tmp_path / "out", texts)
    first = prepare(settings)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name != ".lock"}
    monkeypatch.setattr(prepare_module, "read_catalog", None)
    second = prepare(settings_for(tmp_path / "out", texts, workers=3))
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name != ".lock"}
    assert (first.up_to_date, second.up_to_date, second.shards_written) == (False, True, 0)
    assert second.index == first.index and before == after


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("stage", "count"), [("read", 5), ("tokenizer", 0), ("encode", 0), ("encode", 3), ("measure", 0)]
)
def test_an_interrupted_preparation_goes_on(prepared, texts, tmp_path, workers, stage, count):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare(settings_for(out, texts, workers=workers), stop_at(stage, count))
    assert not (out / "index.json").exists()
    with pytest.raises(UserError, match="not finished"):
        TokenDataset.open(out)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert len(kept) >= (count if stage == "encode" else 0)
    result = prepare(settings_for(out, texts))
    assert result.shards_kept == len(kept)
    assert all((out / name).stat().st_mtime_ns == time_ns for name, time_ns in kept.items())
    assert contents(out) == contents(prepared)


@pytest.mark.parametrize("kept", [-2, 3, -1], ids=["at the plan", "at a shard", "at the index"])
def test_a_killed_preparation_goes_on(prepared, texts, tmp_path, kept):
    shards = len(list(prepared.glob("*.bin")))
    kept = shards if kept == -1 else kept
    out = tmp_path / "out"
    code = f"""
import os, signal
from lockstep.core.files import atomic
from lockstep.core.data.prepare import PrepareSettings, prepare
written = []
flush = atomic.os.fsync
def fsync(descriptor):
    written.append(descriptor)
    # Each file and its folder: plan, tokenizer, shards, index.
    if len(written) == {2 * (kept + 2) + 1}:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)
atomic.os.fsync = fsync
prepare(PrepareSettings({str(out)!r}, {str(texts)!r}, 300, val_fraction=0.2, shard_tokens=1000))
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY)
    assert killed.returncode == -signal.SIGKILL
    assert list(out.glob(f".*{TEMPORARY_SUFFIX}")) and not (out / "index.json").exists()
    result = prepare(settings_for(out, texts))
    assert result.shards_kept == max(kept, 0) and contents(out) == contents(prepared)
    assert not list(out.glob(f".*{TEMPORARY_SUFFIX}"))


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_worker_that_dies_while_another_starts_ends_the_preparation(prepared, texts, tmp_path, monkeypatch, killed):
    started = []
    start = SpawnProcess.start

    def start_and_kill(process):
        start(process)
        started.append(process)
        if len(started) == 3:
            started[killed].kill()
            started[killed].join()

    monkeypatch.setattr(SpawnProcess, "start", start_and_kill)
    out = tmp_path / "out"
    with pytest.raises(UserError, match="a worker process ended before its work"):
        prepare(settings_for(out, texts, workers=3))
    assert len(started) == 3 and not any(process.is_alive() for process in started)
    assert prepare(settings_for(out, texts)).shards_kept > 0 and contents(out) == contents(prepared)


def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    texts = write_texts(tmp_path / "texts", 4)
    fifo = tmp_path / "pids"
    # Two workers that write their number and then sleep; the parent is killed meanwhile.
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import concurrent.futures, multiprocessing, os, time
from lockstep.core.data.encode import start_worker
def sleep(number):
    open({str(fifo)!r} + str(number), "w").write(str(os.getpid()))
    time.sleep(60)
if __name__ == "__main__":
    pool = concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), start_worker)
    list(pool.map(sleep, range(2)))
"""
    )
    parent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    files = [Path(f"{fifo}{number}") for number in range(2)]
    end = time.monotonic() + 20
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < end:
        time.sleep(0.02)
    workers = [int(file.read_text()) for file in files]
    parent.kill()
    parent.wait()
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(alive, workers)) and texts.exists()


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_dies_is_said_in_one_line(texts, tmp_path):
    # Spawned workers run their parent's script again, under another name.
    script = tmp_path / "deadly.py"
    script.write_text(
        f"""
from lockstep.core.data.prepare import PrepareSettings, prepare
from lockstep.core.errors import UserError
if __name__ != "__main__":
    raise SystemExit(3)
try:
    prepare(PrepareSettings({str(tmp_path / "out")!r}, {str(texts)!r}, 300, shard_tokens=1000, workers=2))
except UserError as error:
    print(error)
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.startswith("a worker process ended") and run.returncode == 0
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_damaged_shard_is_written_again(prepared, texts, tmp_path):
    out = shutil.copytree(prepared, tmp_path / "out")
    (out / "train_00001.bin").write_bytes((out / "train_00001.bin").read_bytes()[:-2])
    (out / "val_00000.bin").unlink()
    result = prepare(settings_for(out, texts))
    assert (result.up_to_date, result.shards_written) == (False, 2)
    assert contents(out) == contents(prepared)


def test_a_shard_in_the_place_of_another_is_written_again(prepared, texts, tmp_path):
    out = shutil.copytree(prepared, tmp_path / "out")
    index = TokenDataset.open(prepared).index
    alike = [shard.file for shard in index.train.shards if shard.documents == index.train.shards[0].documents]
    shutil.copy(out / alike[1], out / alike[0])
    assert prepare(settings_for(out, texts)).shards_written == 1
    assert contents(out) == contents(prepared)


def test_a_repair_that_is_interrupted_leaves_no_index(prepared, texts, tmp_path):
    out = shutil.copytree(prepared, tmp_path / "out")
    (out / "train_00001.bin").unlink()
    with pytest.raises(Stop):
        prepare(settings_for(out, texts), stop_at("encode"))
    assert not (out / "index.json").exists()


def test_a_shard_with_damaged_contents_is_not_kept(prepared, texts, tmp_path):
    out = shutil.copytree(prepared, tmp_path / "out")
    (out / "index.json").unlink()
    raw = bytearray((out / "train_00001.bin").read_bytes())
    raw[-5] ^= 1
    (out / "train_00001.bin").write_bytes(raw)
    assert prepare(settings_for(out, texts)).shards_written == 1
    assert contents(out) == contents(prepared)


def test_an_interruption_before_the_plan_leaves_nothing_in_the_way(texts, tmp_path, monkeypatch):
    def stop(folder, plan):
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(prepare_module, "write_plan", stop)
        prepare(settings_for(tmp_path / "out", texts))
    prepare(settings_for(tmp_path / "out", texts))


def test_force_leaves_no_shard_of_before(prepared, texts, tmp_path):
    out = shutil.copytree(prepared, tmp_path / "out")
    index = prepare(settings_for(out, texts, shard_tokens=10_000, force=True)).index
    named = {shard.file for split in index.splits.values() for shard in split.shards}
    assert {path.name for path in out.glob("*.bin")} == named


@pytest.mark.parametrize("name", ["tokenizer.json", "plan.json", "index.json"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_other_damage_is_refused_or_repaired(prepared, texts, tmp_path, name, damage):
    out = shutil.copytree(prepared, tmp_path / "out")
    raw = bytearray((out / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "flipped":
        (out / name).write_bytes(raw)
    else:
        (out / name).unlink()
    try:
        prepare(settings_for(out, texts))
    except UserError as error:
        assert name in str(error) and "--force" in str(error)
        prepare(settings_for(out, texts, force=True))
    assert contents(out) == contents(prepared)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 310}, "vocab_size is 300 there, 310 was asked for"),
        ({"val_fraction": 0.3}, "val_fraction is 0.2 there"),
        ({"shard_tokens": 999}, "shard_tokens is 1000 there"),
        ({"column": "body"}, "column is text there"),
        ({"source": None}, "standard library"),
    ],
)
def test_other_settings_are_refused_and_forced(prepared, texts, tmp_path, changes, says):
    out = shutil.copytree(prepared, tmp_path / "out")
    with pytest.raises(UserError, match=says) as caught:
        prepare(settings_for(out, texts, **changes))
    assert str(out) in str(caught.value) and "\n" not in str(caught.value)
    assert contents(out) == contents(prepared)
    if changes.get("source", texts) is not None:
        (out / "notes.txt").write_text("mine")
        prepare(settings_for(out, texts, force=True, **changes))
        assert contents(out) != contents(prepared)
        assert (out / "notes.txt").read_text() == "mine"


def test_a_changed_source_is_refused(tmp_path):
    texts = write_texts(tmp_path / "texts", 5)
    prepare(settings_for(tmp_path / "out", texts))
    (texts / "doc_003.txt").write_text("other words")
    (texts / "new.txt").write_text("new words")
    with pytest.raises(UserError, match=r"2 files differ, the first is doc_003\.txt"):
        prepare(settings_for(tmp_path / "out", texts))


def test_a_source_that_changes_meanwhile_is_refused(tmp_path):
    texts = write_texts(tmp_path / "texts", 5)

    def change(progress):
        if progress.stage == "encode":
            (texts / "doc_003.txt").write_text("other words")

    with pytest.raises(UserError, match=r"doc_003\.txt was changed"):
        prepare(settings_for(tmp_path / "out", texts), change)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_change_that_keeps_size_and_time_is_noticed_by_the_count(tmp_path):
    texts = write_texts(tmp_path / "texts", 5)

    def change(progress):
        if progress.stage == "encode":
            path = texts / "doc_003.txt"
            status = path.stat()
            path.write_text(" " * status.st_size)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(UserError, match="a source was changed while it was read"):
        prepare(settings_for(tmp_path / "out", texts), change)


def test_the_output_may_lie_inside_the_source(tmp_path):
    write_texts(tmp_path, 5)
    settings = settings_for(tmp_path / "out", tmp_path)
    assert prepare(settings).index.source["files"] == 5
    assert prepare(settings).up_to_date


def test_two_at_a_time_are_refused(prepared, texts):
    with FolderLock(prepared), pytest.raises(UserError, match="is being written by another process"):
        prepare(settings_for(prepared, texts))
    assert prepare(settings_for(prepared, texts)).up_to_date


def test_a_full_disk_is_noticed_before(texts, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="no room on the disk"):
        prepare(settings_for(tmp_path / "out", texts))
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_written(texts, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere"):
        with pytest.raises(UserError, match=str(out)):
            prepare(settings_for(out, texts))


def test_a_folder_with_somebody_elses_files_is_left_alone(texts, tmp_path):
    (tmp_path / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match=r"tokenizer\.json exists already"):
        prepare(settings_for(tmp_path, texts))
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 256}, "256 is too small"),
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"shard_tokens": 0}, "shard_tokens"),
        ({"workers": 0}, "workers"),
        ({"tokenizer": "t.json"}, "not both"),
        ({"tokenizer": "none.json", "vocab_size": None}, "cannot read the tokenizer"),
        ({"source": "nowhere"}, "does not exist"),
    ],
)
def test_settings_that_cannot_be(texts, tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        prepare(settings_for(tmp_path / "out", texts, **changes))


@pytest.mark.parametrize("name", ["texts", "link", "texts/../texts"])
def test_the_source_is_no_folder_to_prepare(tmp_path: Path, name: str) -> None:
    """Its own files would be in the way, or left out as the preparation's."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a text")
    (tmp_path / "link").symlink_to(tmp_path / "texts")
    with pytest.raises(UserError, match="is the source and the folder to prepare: give another folder"):
        prepare(settings_for(tmp_path / "texts", tmp_path / name))
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["a.txt"]


def test_no_text_at_all(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"1 of 2 files: not UTF-8 text \(b.txt\); 1 document: empty \(a.txt\)"):
        prepare(settings_for(tmp_path / "out", tmp_path))


def test_what_is_left_out_is_counted(tmp_path):
    texts = write_texts(tmp_path / "texts", 3)
    (texts / "empty.txt").write_text("")
    (texts / "picture.png").write_bytes(b"\x89PNG\xff")
    (texts / "lines.jsonl").write_text('{"text": "\\ud800"}\n{"text": ""}\n{"text": "fine"}\n')
    source = prepare(settings_for(tmp_path / "out", texts)).index.source
    assert (source["skipped_files"], source["skipped_documents"], source["empty_documents"]) == (1, 1, 2)
    assert source["files"] == 6
    assert source["first_left_out"] == {
        "skipped_files": "picture.png",
        "skipped_documents": "lines.jsonl, at byte 0",
        "empty_documents": "empty.txt",
    }


def test_a_byte_order_mark_is_no_text(tmp_path):
    marked, plain = tmp_path / "marked", tmp_path / "plain"
    for folder, mark in ((marked, "\ufeff"), (plain, "")):
        folder.mkdir()
        (folder / "one.txt").write_text(f"{mark}first\nsecond\nthird\n", encoding="utf-8")
    folders = [prepare(settings_for(folder / "out", folder)).folder for folder in (marked, plain)]
    assert decoded(folders[0], "train") + decoded(folders[0], "val") == ["first\nsecond\n", "third\n"]
    assert len({TokenDataset.open(folder).fingerprint for folder in folders}) == 1
    (marked / "two.txt").write_text("\ufeff", encoding="utf-8")
    assert prepare(settings_for(marked / "out", marked, force=True)).index.source["empty_documents"] == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_json_lines_and_parquet_give_the_documents_of_text_files(prepared, texts, tmp_path, workers):
    documents = [path.read_text(encoding="utf-8") for path in sorted(texts.iterdir())]
    rows = [*documents[:7], "", None, *documents[7:]]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": rows}), tmp_path / "c.parquet", row_group_size=6)
    for number, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.parquet")):
        out = tmp_path / str(number)
        prepare(settings_for(out, tmp_path / name, workers=workers))
        assert TokenDataset.open(out).fingerprint == TokenDataset.open(prepared).fingerprint


def test_the_words_for_the_end_of_text_end_nothing(tmp_path):
    texts = write_texts(tmp_path / "texts", 3)
    (texts / "words.txt").write_text("before <|endoftext|> after")
    prepare(settings_for(tmp_path / "out", texts))
    documents = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")
    assert "before <|endoftext|> after" in documents and len(documents) == 4


def test_a_tokenizer_that_is_brought_along(prepared, texts, tmp_path):
    brought = tmp_path / "tokenizer.json"
    brought.write_text(json.dumps(json.loads((prepared / "tokenizer.json").read_text()), indent=1))
    settings = settings_for(tmp_path / "out", texts, vocab_size=None, tokenizer=brought)
    prepare(settings)
    # The shards of one tokenizer are the same; only how the bytes were cut into shards could differ.
    assert decoded(tmp_path / "out", "train") == decoded(prepared, "train")
    assert (
        TokenDataset.open(tmp_path / "out").index.tokenizer_sha256 == TokenDataset.open(prepared).index.tokenizer_sha256
    )
    assert prepare(settings).up_to_date


@pytest.mark.parametrize("copies", [1, 5])
def test_two_documents_or_more_fill_both_splits(tmp_path, copies):
    # Copies of one document hash alike, so the hash alone would put all into one split.
    for fraction, number in ((1e-9, 0), (1 - 1e-9, 1)):
        folder = tmp_path / f"source{number}"
        folder.mkdir()
        for copy in range(copies):
            (folder / f"a{copy}.txt").write_text("the same words")
        (folder / "z.txt").write_text("the same words" if copies > 1 else "other words")
        index = prepare(settings_for(tmp_path / f"out{number}", folder, val_fraction=fraction)).index
        assert min(index.train.documents, index.val.documents) == 1


def test_a_single_text_is_cut_at_a_line(tmp_path):
    lines = [f"line {number} is é\n" for number in range(100)]
    (tmp_path / "one.txt").write_text("".join(lines))
    index = prepare(settings_for(tmp_path / "out", tmp_path / "one.txt", val_fraction=0.1)).index
    (train,), (val,) = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "val")
    assert train + val == "".join(lines) and train.endswith("\n") and len(val) == pytest.approx(160, abs=40)
    assert index.train.text_bytes + index.val.text_bytes == len("".join(lines).encode())


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_one_document_without_lines_leaves_validation_empty(tmp_path, fraction):
    (tmp_path / "one.txt").write_text("only one line")
    index = prepare(settings_for(tmp_path / "out", tmp_path / "one.txt", val_fraction=fraction)).index
    assert (index.val.tokens, index.val.unigram_entropy, index.val.bytes_per_token) == (0, None, None)
    assert TokenDataset.open(tmp_path / "out").split("val").num_tokens == 0


def test_the_split_of_a_document_does_not_depend_on_the_others(prepared, texts, tmp_path):
    more = shutil.copytree(texts, tmp_path / "more")
    for path in write_texts(tmp_path / "added", 10, seed=1).iterdir():
        shutil.copy(path, more / f"added_{path.name}")
    prepare(settings_for(tmp_path / "out", more))
    assert set(decoded(prepared, "val")) <= set(decoded(tmp_path / "out", "val"))


def test_the_sample_is_bounded_and_even(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(f"{number:02d} " * 700)
    (folder / "long.txt").write_text("".join(f"{number:06d} " for number in range(150_000)))
    listing = list_source(str(folder))
    catalog = read_catalog(listing, "text", 0.01, lambda done: None)
    total = int(catalog.text_bytes[~catalog.is_val].sum())
    for budget in (100_000, 300_000, total, 10 * total):
        sample = list(sample_training_text(listing, "text", catalog, budget))
        size = sum(map(len, sample))
        assert min(budget, total) * 0.8 <= size <= min(budget, total) + 1
    middle = list(sample_training_text(listing, "text", catalog, 300_000))
    # A quarter of the 60 short documents, from all over; and pieces of the long one, from all over.
    short = [int(text[:2]) for text in middle if text[2] == " "]
    assert 8 <= len(short) <= 22 and min(short) < 15 and max(short) > 45
    long = [int(text.split()[1]) for text in middle if text[2] != " "]
    assert len(long) >= 3 and min(long) < 1000 and max(long) > 75_000
    assert sum(map(len, sample)) == total


def test_the_plan_names_every_document_once(prepared):
    plan = read_plan(prepared)
    runs = [run for shard in plan.shards for run in shard.runs]
    assert sorted(file for file, _, _ in runs) == list(range(40))
    assert sum(shard.documents for shard in plan.shards) == 40


def test_progress_goes_up_to_the_total(texts, tmp_path):
    reports = []
    prepare(PrepareSettings(tmp_path / "out", str(texts), 300), reports.append)
    assert [stage for stage, _ in itertools.groupby(report.stage for report in reports)] == [
        "read",
        "tokenizer",
        "encode",
        "measure",
    ]
    for stage in ("read", "encode"):
        done = [report.done for report in reports if report.stage == stage]
        assert done == sorted(done)
        assert [report.total for report in reports if report.stage == stage][-1] == done[-1]

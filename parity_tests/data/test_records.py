"""Records that are no document, or are one twice, are counted by kind and file, with the place of the first."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.core.data import documents
from lockstep.core.data.dataset import TokenDataset
from lockstep.core.data.index import read_index, write_index
from lockstep.core.data.left_out import RecordCounts, kept_copies_in_words, left_out_in_words
from lockstep.core.data.plan import read_plan
from lockstep.core.data.prepare import prepare
from lockstep.core.errors import UserError
from lockstep.parity_tests.data.conftest import settings_for, write_texts
from lockstep.scripts import cli

GOOD = '{"text": "first words"}\n'


def prepared_source(tmp_path, folder, **changes):
    """`source` of the index of a folder, prepared with settings that leave nothing out by themselves."""
    return prepare(settings_for(tmp_path / "out", folder, **changes)).index.source


def rows_with_bad_utf8():
    raw = pa.array([b"good words", b"\xff", b"other words"], pa.binary())
    return pa.table({"text": pa.Array.from_buffers(pa.string(), 3, raw.buffers())})


BROKEN = {
    "no JSON": (b'{"text": \n', "not a line of JSON"),
    "a list": (b"[1]\n", "must be an object, not an array"),
    "no such key": (b'{"body": "x"}\n', "no column 'text'; there are body"),
    "a number": (b'{"text": 3}\n', "must hold text, not a number"),
    "no UTF-8": (b'{"text": "\xff"}\n', "not a line of JSON"),
    "too long a line": (b'{"text": "' + b"x" * 300 + b'"}\n', "a line of more than 256 bytes"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_is_an_error_or_counted(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(documents, "_LONGEST_LINE", 256)
    line, says = BROKEN[kind]
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(GOOD.encode() + line + b'{"text": "last words"}\n' + line)
    with pytest.raises(UserError, match=rf"a\.jsonl, at byte {len(GOOD)}: .*") as error:
        prepare(settings_for(tmp_path / "out", folder))
    assert says in str(error.value) and not (tmp_path / "out").exists()
    index = prepare(settings_for(tmp_path / "out", folder, on_broken="skip")).index
    assert index.source["broken_documents"] == 2 and index.train.documents + index.val.documents == 2
    assert index.source["left_out_by_file"] == {"a.jsonl": {"broken_documents": 2}}
    assert left_out_in_words(index.source) == [f"2 documents: broken (a.jsonl, at byte {len(GOOD)}, …)"]


def test_a_row_of_parquet_that_is_no_text(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    pq.write_table(rows_with_bad_utf8(), folder / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 1: not UTF-8 text"):
        prepare(settings_for(tmp_path / "out", folder))
    source = prepared_source(tmp_path, folder, on_broken="skip")
    assert (source["broken_documents"], source["first_left_out"]) == (1, {"broken_documents": "a.parquet, row 1"})


def test_a_page_of_parquet_whose_checksum_does_not_match_is_an_error(tmp_path):
    """One other letter is still text: nothing but the checksum that the writer stored can tell."""
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [f"sentence number {number}" for number in range(200)]
    table = pa.table({"text": texts})
    pq.write_table(table, folder / "a.parquet", compression="none", use_dictionary=False, write_page_checksum=True)
    raw = (folder / "a.parquet").read_bytes()
    assert raw.count(b"number 150") == 1
    (folder / "a.parquet").write_bytes(raw.replace(b"number 150", b"number 650"))
    for on_broken in ("error", "skip"):
        with pytest.raises(UserError, match=r"a\.parquet: .*checksum"):
            prepare(settings_for(tmp_path / "out", folder, on_broken=on_broken))
        assert not (tmp_path / "out").exists()
    (folder / "a.parquet").write_bytes(raw)
    assert prepare(settings_for(tmp_path / "out", folder)).index.train.documents > 100


def test_another_column_is_an_error_whatever_becomes_of_broken_records(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    pq.write_table(pa.table({"body": ["x"]}), folder / "a.parquet")
    with pytest.raises(UserError, match="no column 'text'; there are body"):
        prepare(settings_for(tmp_path / "out", folder, on_broken="skip"))
    assert not (tmp_path / "out").exists()


def test_nulls_empty_and_overlong_records_are_apart(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [None, " ", "é" * 41, None]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), folder / "b.parquet")
    (folder / "c.txt").write_text("x" * 81)
    (folder / "d.txt").write_text("x" * 80)
    (folder / "e.txt").write_text("é" * 40)
    source = prepared_source(tmp_path, folder, max_document_bytes=80)
    each = {"null_documents": 2, "empty_documents": 1, "overlong_documents": 1}
    overlong = {"overlong_documents": 1}
    assert source["left_out_by_file"] == {"a.jsonl": each, "b.parquet": each, "c.txt": overlong}
    assert (source["null_documents"], source["empty_documents"], source["overlong_documents"]) == (4, 2, 3)
    assert "3 documents: longer than max_document_bytes (a.jsonl, at byte" in "; ".join(left_out_in_words(source))


@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_of_equal_texts_the_first_in_order_is_no_copy(tmp_path, duplicates):
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in ("one", "two", "one", "one", "two ")]
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "a.txt").write_text("one")
    pq.write_table(pa.table({"text": ["three", "two"]}), folder / "c.parquet")
    source = prepared_source(tmp_path, folder, duplicates=duplicates)
    kind = {"keep": "kept_duplicate_documents", "drop": "duplicate_documents"}[duplicates]
    assert source[kind] == 4
    assert source["left_out_by_file"] == {"b.jsonl": {kind: 3}, "c.parquet": {kind: 1}}
    assert source["first_left_out"] == {kind: "b.jsonl, at byte 0"}
    opened = TokenDataset.open(tmp_path / "out")
    assert opened.index.train.documents + opened.index.val.documents == {"keep": 8, "drop": 4}[duplicates]
    words = left_out_in_words(source) if duplicates == "drop" else kept_copies_in_words(source)
    assert words == ["4 documents: copies of an earlier document (b.jsonl, at byte 0, …)"]


def test_without_copies_the_data_is_that_of_a_source_without_them(texts, prepared, tmp_path):
    more = shutil.copytree(texts, tmp_path / "more")
    for path in sorted(texts.iterdir())[::3]:
        shutil.copy(path, more / f"{path.stem}_again.txt")
    out = prepare(settings_for(tmp_path / "out", more, duplicates="drop")).folder
    assert TokenDataset.open(out).fingerprint == TokenDataset.open(prepared).fingerprint


def test_rules_of_records_are_part_of_what_was_prepared(texts, tmp_path):
    prepare(settings_for(tmp_path / "out", texts))
    # With default rules nothing of them is written, as before there were any: such folders go on.
    assert set(read_plan(tmp_path / "out").identity) == {
        "column",
        "shard_tokens",
        "tokenizer",
        "val_fraction",
        "vocab_size",
    }
    for changes, says in (
        ({"duplicates": "drop"}, "duplicates is keep there, drop was asked for"),
        ({"on_broken": "skip"}, "on_broken is error there, skip was asked for"),
        ({"max_document_bytes": 9}, "max_document_bytes is 0 there, 9 was asked for"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(settings_for(tmp_path / "out", texts, **changes))
    prepare(settings_for(tmp_path / "other", texts, duplicates="drop"))
    with pytest.raises(UserError, match="duplicates is drop there, keep was asked for"):
        prepare(settings_for(tmp_path / "other", texts))
    with pytest.raises(UserError, match="max_document_bytes -1 must be"):
        prepare(settings_for(tmp_path / "third", texts, max_document_bytes=-1))


def test_an_index_of_before_these_counts_opens(prepared, tmp_path):
    out = shutil.copytree(prepared, tmp_path / "out")
    index = read_index(out)
    old = {name: index.source[name] for name in ("description", "files", "bytes")}
    old |= {"skipped_files": 1, "skipped_documents": 0, "empty_documents": 2}
    write_index(out, type(index)(**{**vars(index), "source": old}))
    opened = TokenDataset.open(out)
    assert opened.fingerprint == index.fingerprint
    assert left_out_in_words(opened.index.source) == ["1 of 40 files: not UTF-8 text", "2 documents: empty"]
    assert kept_copies_in_words(opened.index.source) == []


def test_the_command_names_kinds_and_places(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text(GOOD + "{\n" + GOOD + '{"text": null}\n{"text": "other words"}\n')
    given = ["data", "prepare", "--data.source", str(folder), "--model.vocab-size", "300", "--workers", "1"]
    assert cli.run([*given, "--data.path", str(tmp_path / "out")]) == 2
    assert "at byte 24: not a line of JSON" in capsys.readouterr().err and not (tmp_path / "out").exists()
    given += ["--data.on-broken", "skip", "--data.duplicates", "drop", "--data.path", str(tmp_path / "out")]
    assert cli.run(given) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "1 document: broken (a.jsonl, at byte 24)",
        "1 document: no text (null) (a.jsonl, at byte 50)",
        "1 document: copies of an earlier document (a.jsonl, at byte 26)",
    ):
        assert words in said


def test_the_tokens_of_a_document_are_its_own(prepared, texts, tmp_path):
    """Beside other documents, in another order and in other shards, a document has the same tokens."""
    other = write_texts(tmp_path / "other", 12, seed=5)
    for number, path in enumerate(sorted(texts.iterdir(), reverse=True)[:15]):
        shutil.copy(path, other / f"a{number:02d}.txt")
    given = {"vocab_size": None, "tokenizer": prepared / "tokenizer.json"}
    out = prepare(settings_for(tmp_path / "out", other, shard_tokens=333, **given)).folder
    found, expected = tokens_of(out), tokens_of(prepared)
    shared = found.keys() & expected.keys()
    assert len(shared) == 15 and len(found) == 27
    assert all(found[text] == expected[text] for text in shared)


def tokens_of(folder):
    """Return the tokens of each document of a folder, by its text."""
    opened = TokenDataset.open(folder)
    tokenizer, found = opened.tokenizer(), {}
    for name in ("train", "val"):
        tokens = opened.split(name)
        (ids,) = tokens.gather(np.array([0]), tokens.num_tokens)
        for part in np.split(ids, np.flatnonzero(ids == opened.eot_id)[:-1] + 1):
            found[tokenizer.decode(part[:-1])] = part.tolist()
    return found


def test_counts_add_up():
    counts = RecordCounts()
    counts.add("empty_documents", "a", "a, row 3")
    counts.add("empty_documents", "b", "b, row 1", 4)
    content = counts.content()
    assert (content["empty_documents"], content["skipped_files"]) == (5, 0) and "null_documents" not in content
    assert content["first_left_out"] == {"empty_documents": "a, row 3"}

"""Every kind of source gives its documents, in an order that only names decide, or one clear refusal."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.core.data.documents import read_documents
from lockstep.core.data.sources import list_source
from lockstep.core.errors import UserError


def read_all(source, column="text", spans=None):
    return [
        document.text for file in list_source(str(source)).files for document in read_documents(file, column, spans)
    ]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b.md", "a/z.py", "a.txt", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [file.name for file in list_source(str(tmp_path)).files] == ["a.txt", "a/z.py", "b.md"]
    assert read_all(tmp_path) == ["a.txt", "a/z.py", "b.md"]


def test_a_glob_and_a_file(tmp_path):
    for name in ("x/one.py", "x/two.txt", "y/three.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_all(f"{tmp_path}/**/*.py") == ["x/one.py", "y/three.py"]
    assert read_all(tmp_path / "x/two.txt") == ["x/two.txt"]


def test_the_output_inside_the_source_is_left_out(tmp_path):
    (tmp_path / "doc.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.json").write_text("{}")
    assert [file.name for file in list_source(str(tmp_path), exclude=tmp_path / "out").files] == ["doc.txt"]


def test_pipes_are_not_opened(tmp_path):
    (tmp_path / "doc.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    assert [file.name for file in list_source(str(tmp_path)).files] == ["doc.txt"]


def test_without_a_source_it_is_the_standard_library():
    listing = list_source(None)
    names = {file.name for file in listing.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert "standard library" in listing.description


@pytest.mark.parametrize("tail", [b"\xff\xfe", b"x" * (1 << 16) + b"\xff"], ids=["in the head", "after the head"])
def test_bytes_that_are_no_text_give_no_text(tmp_path, tail):
    (tmp_path / "a.txt").write_bytes(tail)
    assert read_all(tmp_path) == [None]


def test_a_character_across_the_end_of_the_head_is_text(tmp_path):
    text = "x" * ((1 << 16) - 1) + "é🙂"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert read_all(tmp_path) == [text]


def test_newlines_are_kept_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert read_all(tmp_path) == ["one\r\ntwo\rthree\n"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.l"])
def test_json_lines_whole_and_in_spans(tmp_path, name):
    lines = [{"text": f"line {number} é", "other": number} for number in range(5)] + [{"text": None}]
    raw = b"\n".join(json.dumps(line).encode() for line in lines) + b"\n\n"
    (tmp_path / name).write_bytes(gzip.compress(raw, mtime=0) if name.endswith("gz") else raw)
    (file,) = list_source(str(tmp_path)).files
    documents = list(read_documents(file, "text"))
    assert [document.text for document in documents] == [f"line {number} é" for number in range(5)] + [""]
    spans = [(documents[1].start, documents[2].stop), (documents[4].start, documents[4].stop)]
    assert list(read_documents(file, "text", spans)) == [documents[1], documents[2], documents[4]]


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}\n{"text": "\\ud83d\\ude42"}\n')
    assert read_all(tmp_path) == [None, "🙂"]


@pytest.mark.parametrize("dictionary", [False, True])
def test_parquet_whole_and_in_spans(tmp_path, dictionary):
    column = pa.array([f"row {number}" for number in range(10)] + [None])
    table = pa.table({"body": column.dictionary_encode() if dictionary else column})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert read_all(tmp_path, "body") == [f"row {number}" for number in range(10)] + [""]
    assert read_all(tmp_path, "body", [(1, 5), (8, 9)]) == ["row 1", "row 2", "row 3", "row 4", "row 8"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "a.jsonl, at byte 14: not a line of JSON"),
        ("a.jsonl", b"[1]\n", "must be an object"),
        ("a.jsonl", b'{"body": "x"}\n', "no column 'text'; there are body"),
        ("a.jsonl", b'{"text": 3}\n', "must hold text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "not a line of JSON"),
        ("a.jsonl.gz", b"not gzip", "cannot read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], "cannot read"),
        ("a.parquet", b"PAR1 or not", "not a readable parquet file"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_all(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_parquet_columns_are_checked(tmp_path):
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no column 'text'; there are n"):
        read_all(tmp_path)
    with pytest.raises(UserError, match="must hold text, it holds int64"):
        read_all(tmp_path, "n")
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="2 columns have the name 'text'"):
        read_all(tmp_path)


@pytest.mark.parametrize("source", ["nowhere", "nowhere/*.txt", "."])
def test_a_source_without_files_is_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no file|does not exist"):
        list_source(source)

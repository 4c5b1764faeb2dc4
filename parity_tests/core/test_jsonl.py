"""Files of one JSON object a line: every changed byte of every line is noticed, and a crash costs one line."""

import errno
import json
import math
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import (
    DamagedLine,
    JsonLines,
    cut_after,
    in_ranges,
    read_lines,
    scan_lines,
    sealed_line,
)
from lockstep.parity_tests.repository import REPO

VALUES = [{"step": 1, "loss": 2.5, "sample": "é\u2028\n\x85"}, {"step": 2, "nested": {"a": [1, None]}}, {"step": 3}]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(map(sealed_line, VALUES)))
    return path


def one_changed_byte(whole: bytes, path: Path, at: int, byte: int) -> None:
    path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])


def test_a_line_is_json_with_its_checksum_last():
    line = sealed_line({"loss": 2.5, "text": "é"})
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    assert list(json.loads(line)) == ["loss", "text", "crc32"] and "é".encode() in line
    assert sealed_line({}) == b'{"crc32": "%08x"}\n' % zlib.crc32(b"{")


def test_the_documented_snippet_verifies_a_file(path, monkeypatch, capsys):
    text = (REPO / "docs/guide/run_directory.md").read_text()
    snippet = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(path.parent)
    exec(snippet, {})
    assert capsys.readouterr().out == ""
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 4'))
    exec(snippet, {})
    assert capsys.readouterr().out == "line 2 is damaged\n"


@given(value=st.dictionaries(st.text(), st.none() | st.text() | st.floats() | st.integers() | st.lists(st.text())))
def test_what_is_written_is_read(value, tmp_path_factory):
    value.pop("crc32", None)
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = JsonLines(path)
    lines.append(value)
    lines.append({"step": 1})
    lines.close()
    first, second = read_lines(path)
    assert repr(first) == repr(value) and second == {"step": 1}


def test_numbers_that_are_none_and_half_a_surrogate_pair_survive(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"loss": math.nan, "norm": -math.inf, "text": "\ud800"})
    lines.close()
    (value,) = read_lines(tmp_path / "a.jsonl")
    assert math.isnan(value["loss"]) and value["norm"] == -math.inf and value["text"] == "\ud800"


def test_every_flipped_bit_and_every_changed_byte_is_noticed(path):
    whole = path.read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for at in range(len(whole)):
        line = 1 + sum(end < at for end in ends)
        for byte in {whole[at] ^ (1 << bit) for bit in range(8)} | {0x0A, 0x00, 0x20} - {whole[at]}:
            one_changed_byte(whole, path, at, byte)
            with pytest.raises(DamagedLine, match=rf"records.jsonl, line ({line}|{line + 1}): damaged after"):
                read_lines(path)


def test_a_file_that_ends_anywhere_gives_the_lines_before(path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        # A line that lacks its newline alone is whole.
        assert read_lines(path) == VALUES[: (whole[:size] + b"\n").count(b'"}\n')]


def test_lines_without_a_checksum_and_lines_that_are_no_objects_are_damaged(path):
    intact = path.read_bytes()
    seal = b'"crc32": "%08x"}' % zlib.crc32(b"[1, ")
    for line in (b'{"step": 9}', b"[1]", b"{", b"[1, " + seal, b'"\xff"'):
        path.write_bytes(intact + line + b"\n")
        with pytest.raises(DamagedLine, match="line 4: damaged"):
            read_lines(path)


def test_a_missing_file_has_no_lines_and_a_folder_is_an_error(tmp_path):
    assert read_lines(tmp_path / "nowhere") == []
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        read_lines(tmp_path)


@pytest.mark.parametrize("torn", [b"", b'{"step": 4, "lo', b"\0" * 50])
def test_what_a_crash_left_of_a_line_does_not_spoil_the_next(path, torn):
    path.write_bytes(path.read_bytes() + torn)
    lines = JsonLines(path)
    lines.append({"step": 5})
    lines.close()
    assert read_lines(path) == [*VALUES, {"step": 5}]


def test_a_last_line_that_lost_its_newline_stays(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    JsonLines(path).close()
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-1] + b"\x0b")  # one bit of the newline: no crash leaves this
    JsonLines(path).close()
    with pytest.raises(DamagedLine, match="line 3"):
        read_lines(path)


def test_each_line_is_with_the_operating_system_at_once(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    for n in range(3):
        lines.append({"step": n})
        assert len(read_lines(tmp_path / "a.jsonl")) == n + 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(UserError, match=rf"cannot write /dev/full: {os.strerror(errno.ENOSPC)}"):
        lines.append({"step": 1})
    lines.close()


def test_cut_keeps_moves_and_sets_aside(path, tmp_path):
    spoilt = sealed_line({"step": 2}).replace(b"2", b"3", 1)
    path.write_bytes(spoilt + path.read_bytes() + spoilt + b'{"torn')
    later, damaged = tmp_path / "later/a", tmp_path / "damaged/a"
    cut = cut_after(path, 2, later, damaged)
    assert (cut.steps, cut.moved, cut.damaged) == ({1, 2}, 1, (1, 5))
    assert read_lines(path) == VALUES[:2]
    assert read_lines(later) == VALUES[2:]
    assert damaged.read_bytes() == 2 * spoilt
    whole = path.read_bytes()
    assert cut_after(path, 2, tmp_path / "b", tmp_path / "c").moved == 0
    assert path.read_bytes() == whole and not (tmp_path / "b").exists() and not (tmp_path / "c").exists()


def test_ranges_in_words():
    assert in_ranges([]) == ""
    assert in_ranges([3]) == "3"
    assert in_ranges([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"


def test_scanning_numbers_lines_as_editors_do(path):
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n", 1))
    assert [(line.number, line.value["step"]) for line in scan_lines(path)] == [(1, 1), (3, 2), (4, 3)]

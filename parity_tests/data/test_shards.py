"""A shard holds what was written, and every damage to it is noticed."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.data.shards import (
    map_tokens,
    read_document_starts,
    read_header,
    token_bytes_for,
    verify_shard,
    write_shard,
)
from lockstep.core.errors import UserError
from lockstep.core.files import atomic

EOT = 7


def documents_of(*lengths, token=3):
    return [np.array([token] * (length - 1) + [EOT], dtype=np.uint32) for length in lengths]


@pytest.mark.parametrize(("vocab_size", "expected"), [(257, 2), (65_536, 2), (65_537, 4), (1 << 20, 4)])
def test_small_vocabularies_take_two_bytes(vocab_size, expected):
    assert token_bytes_for(vocab_size) == expected


@pytest.mark.parametrize(("token_bytes", "token"), [(2, 65_535), (4, 65_536), (4, (1 << 31) - 1)])
def test_what_is_written_is_read(tmp_path, token_bytes, token):
    documents = documents_of(3, 1, 5, token=token)
    header = write_shard(tmp_path / "a.bin", documents, token_bytes)
    assert read_header(tmp_path / "a.bin") == header
    assert (header.tokens, header.documents, header.token_bytes) == (9, 3, token_bytes)
    verify_shard(tmp_path / "a.bin", header, token + 1, EOT)
    tokens = map_tokens(tmp_path / "a.bin", header)
    assert tokens.dtype == np.dtype(f"<u{token_bytes}") and not tokens.flags.writeable
    assert np.array_equal(tokens, np.concatenate(documents))
    assert read_document_starts(tmp_path / "a.bin", header).tolist() == [0, 3, 4]


def test_what_does_not_fit_is_not_written(tmp_path):
    for documents in (documents_of(3, token=65_536), [], [np.array([], dtype=np.uint32)], [np.array([-1, EOT])]):
        with pytest.raises(ValueError):
            write_shard(tmp_path / "a.bin", documents, 2)
    assert not list(tmp_path.iterdir())


@given(data=st.data(), token_bytes=st.sampled_from([2, 4]))
@settings(max_examples=150)
def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path_factory, data, token_bytes):
    path = tmp_path_factory.mktemp("shard") / "a.bin"
    header = write_shard(path, documents_of(3, 1, 5), token_bytes)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1), label="size")]
    else:
        bit = data.draw(st.integers(0, 8 * len(raw) - 1), label="bit")
        raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"a\.bin"):
        verify_shard(path, read_header(path), 8, EOT)
    assert header.file_bytes >= len(raw)


def test_sound_checksums_over_wrong_contents_are_noticed(tmp_path):
    path = tmp_path / "a.bin"
    header = write_shard(path, documents_of(3, 2), 2)
    with pytest.raises(UserError, match="outside the vocabulary"):
        verify_shard(path, header, EOT, EOT)
    with pytest.raises(UserError, match="must end with"):
        verify_shard(path, header, 8, 3)


def test_a_file_of_another_size_is_refused_by_its_header(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, documents_of(3, 2), 2)
    raw = path.read_bytes()
    for changed in (raw[:-2], raw + b"\0\0"):
        path.write_bytes(changed)
        with pytest.raises(UserError, match="which differs from its header"):
            read_header(path)


def test_who_reads_the_old_file_goes_on_reading_it(tmp_path):
    path = tmp_path / "a.bin"
    header = write_shard(path, documents_of(3), 2)
    tokens = map_tokens(path, header)
    write_shard(path, documents_of(9, token=4), 2)
    assert tokens.tolist() == [3, 3, EOT]


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_header(tmp_path / "none.bin")
    (tmp_path / "a.bin").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="not a Lockstep token shard"):
        read_header(tmp_path / "a.bin")


def test_another_version_is_named(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, documents_of(3), 2)
    raw = bytearray(path.read_bytes())
    raw[8] = 9
    path.write_bytes(raw)
    with pytest.raises(UserError, match="version 9, this Lockstep reads version 1"):
        read_header(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    header = write_shard(path, documents_of(3), 2)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(UserError, match=r"a\.bin: No space left on device"):
        write_shard(path, documents_of(9), 2)
    assert os.listdir(tmp_path) == ["a.bin"]
    assert read_header(path) == header


def test_sealed_json_notices_what_json_does_not_care_about(tmp_path):
    path = tmp_path / "a.json"
    atomic.write_sealed_json(path, {"a": [1, 2.5, "é"], "b": None}, indent=2)
    assert atomic.read_sealed_json(path, indent=2)["a"] == [1, 2.5, "é"]
    raw = path.read_bytes()
    for changed in (raw + b" ", raw.replace(b"2.5", b"2.50"), raw.replace(b'"b"', b'"c"'), b"", b"[]", b"\xff"):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=r"a\.json is damaged"):
            atomic.read_sealed_json(path, indent=2)

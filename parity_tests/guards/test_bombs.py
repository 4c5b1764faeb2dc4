"""A file takes memory in proportion to its bytes: what it claims to unpack to, or to have room for, is no order."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.core.checkpoint import format as checkpoint
from lockstep.core.data import documents
from lockstep.core.data.documents import read_documents
from lockstep.core.data.sources import list_source
from lockstep.core.errors import UserError
from lockstep.core.files.npz import read_npz
from lockstep.core.parity.evidence.capsule import read_capsule
from lockstep.core.parity.modes.rerun import initial_state
from lockstep.core.profile.trace import read_trace
from lockstep.parity_tests.guards.planted import CONFIG, planted_capsule, seal_checkpoint

MB = 1 << 20
HUGE = 256 * MB


@contextmanager
def little_memory(most: int = 32 * MB) -> Iterator[None]:
    """Fail if what is done in it has taken more than `most` bytes at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak:,} bytes"


def packed(size: int) -> bytes:
    """Return an npz of one array of `size` bytes, in a thousandth of them."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as file, file.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
        for _ in range(size // MB):
            member.write(bytes(MB))
    return raw.getvalue()


def test_an_npz_is_not_unpacked(tmp_path: Path) -> None:
    raw = packed(HUGE)
    assert len(raw) < MB
    (tmp_path / "a.npz").write_bytes(raw)
    with little_memory(), pytest.raises(UserError, match=r"x\.npy is not what was written"):
        read_npz(tmp_path / "a.npz")
    capsule = planted_capsule(tmp_path / "capsule", batch=raw)
    with little_memory(), pytest.raises(UserError, match=r"batch\.npz is damaged"):
        read_capsule(capsule)


def test_members_of_an_npz_do_not_share_their_bytes(tmp_path: Path) -> None:
    """Hundreds of members over one stretch of the file would be hundreds of times its size (Fifield 2019).

    Each header has those after it for its extra field, so that the data of all begin at the same place.
    """
    array = io.BytesIO()
    np.save(array, np.zeros(MB, np.uint8))
    data, headers, directory, names = array.getvalue(), b"", b"", [f"x{number:03d}.npy" for number in range(300)]
    for name in reversed(names):
        sizes = struct.pack("<III", zlib.crc32(data), len(data), len(data))
        header = b"PK\x03\x04" + bytes.fromhex("14000000000000002100") + sizes
        headers = header + struct.pack("<HH", len(name), len(headers)) + name.encode() + headers
    for number, name in enumerate(names):
        at = number * (30 + len(name))
        entry = b"PK\x01\x02" + bytes.fromhex("140014000000000000002100") + sizes
        directory += entry + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, at) + name.encode()
    counts = struct.pack("<HHHHIIH", 0, 0, len(names), len(names), len(directory), len(headers) + len(data), 0)
    (tmp_path / "a.npz").write_bytes(headers + data + directory + b"PK\x05\x06" + counts)
    with little_memory(), pytest.raises(UserError, match="is damaged"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(99999999, 99999999, 99999999)", "(-1,)"])
def test_an_array_has_no_more_numbers_than_its_bytes(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n" + bytes(64)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", header)
    with little_memory(), pytest.raises(UserError, match="is damaged"):
        read_npz(tmp_path / "a.npz")


def test_parts_of_a_tensor_make_no_room_for_those_that_are_missing(tmp_path: Path) -> None:
    folder = checkpoint.save_checkpoint(tmp_path / "checkpoints", initial_state(CONFIG), {})
    for offset in (HUGE, 2**62):
        metadata = {"DCP_SHARDING_INFO": json.dumps({"params/x": {"saved_offsets": [offset]}})}
        save_file({"params/x": np.zeros(3, np.float32)}, folder / "params.safetensors", metadata=metadata)
        seal_checkpoint(folder)
        with little_memory(), pytest.raises(UserError, match=r"parts of params/x are missing"):
            checkpoint.load_checkpoint(folder)


def test_a_trace_is_not_unpacked_beyond_what_traces_are(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "trace.json.gz", "wb") as file:
        for _ in range(HUGE // MB):
            file.write(bytes(MB))
    size = (tmp_path / "trace.json.gz").stat().st_size
    assert size < MB
    with little_memory(3 * 200 * size), pytest.raises(UserError, match="unpacks to more than 200 times its size"):
        read_trace(tmp_path / "trace.json.gz")


def test_a_line_of_packed_json_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_LONGEST_LINE", MB)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as packed:
        packed.write(b'{"text": "')
        for _ in range(64):
            packed.write(b"x" * MB)
        packed.write(b'"}\n')
    (file,) = list_source(str(tmp_path / "a.jsonl.gz")).files
    with little_memory(16 * MB), pytest.raises(UserError, match="a line of more than 1,048,576 bytes"):
        list(read_documents(file, "text"))


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "1" * 10**5], ids=["lists", "objects", "digits"])
def test_json_that_is_too_deep_or_too_long_is_one_line(text: str, tmp_path: Path) -> None:
    capsule = planted_capsule(tmp_path / "capsule", verdict=text.encode())
    with pytest.raises(UserError) as said:
        read_capsule(capsule)
    assert "verdict.json is not valid content of a capsule" in str(said.value)

"""A folder of tensors gives back what was put, is readable by safetensors alone, and refuses what was not written."""

from __future__ import annotations

import json
import os
import pickle
import resource

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import sealed_json
from lockstep.core.parity.evidence import index, store
from lockstep.core.parity.evidence.index import DATA, HEADER, INDEX, digest_of
from lockstep.core.parity.evidence.store import FolderStore, MemoryStore, Stored

RNG = np.random.default_rng(0)
TENSORS: dict[str, np.ndarray] = {
    "blocks.0.a.weight": RNG.standard_normal((7, 5)).astype(np.float32),
    "blocks.0.bf16": np.arange(9, dtype=np.float32).reshape(3, 3) / 8,
    "blocks.11.odd": np.array([1.0, -0.0, np.nan, np.inf, 2**-140], np.float32),
    "embed.weight": RNG.standard_normal((4, 6)),
    "loss": np.asarray(3.5),
    "half": np.arange(3, dtype=np.float16),
    "tokens": np.arange(-3, 3, dtype=np.int32),
    "mask": np.array([True, False, True]),
    "none": np.empty((0, 4), np.float32),
    "turned": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "big-endian": np.arange(4, dtype=">f4"),
    "scalar": np.array(2.5, np.float32),
    "blocks.odd": np.zeros(2, np.uint8),
}


def filled(folder):
    made = FolderStore.create(folder)
    for name, array in TENSORS.items():
        made.put("taps", name, array)
    return made


def same(one, other):
    return one.shape == other.shape and one.dtype == other.dtype.newbyteorder("=") and one.tobytes() == other.tobytes()


@pytest.fixture
def folder(tmp_path):
    filled(tmp_path / "evidence").finish({"evidence.json": b"{}"})
    return tmp_path / "evidence"


@pytest.fixture
def small_pieces(monkeypatch):
    for module in (store, index):
        monkeypatch.setattr(module, "PIECE", 64)


def test_what_was_put_is_read_before_and_after_it_is_finished(tmp_path):
    made = filled(tmp_path / "evidence")
    for name, array in TENSORS.items():
        assert same(made.get("taps", name), np.asarray(array).astype(np.asarray(array).dtype.newbyteorder("=")))
    made.finish()
    opened = FolderStore.open(tmp_path / "evidence")
    assert list(opened.arrays("taps")) == list(TENSORS)
    for name, array in opened.arrays("taps").items():
        assert same(array, np.asarray(TENSORS[name]).astype(array.dtype))
        assert array.flags.writeable and array.flags.aligned


def test_safetensors_alone_reads_every_file(folder):
    files = sorted(folder.glob("*.safetensors"))
    assert [f.name for f in files] == [
        "blocks.0.safetensors",
        "blocks.11.safetensors",
        "embedding.safetensors",
        "head.safetensors",
    ]
    found = {}
    for path in files:
        with safe_open(path, framework="numpy") as file:
            found |= {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - not a mapping
    assert found.keys() == {f"taps/{name}" for name in TENSORS}
    assert found["taps/blocks.0.bf16"] == "BF16" and found["taps/blocks.0.a.weight"] == "F32"
    assert np.array_equal(load_file(files[2])["taps/embed.weight"], TENSORS["embed.weight"])


def test_what_bf16_holds_takes_half_the_room(tmp_path):
    made = FolderStore.create(tmp_path / "evidence")
    made.put("a", "x", np.full(1000, 1.5, np.float32))
    made.put("a", "y", np.full(1000, 1.1, np.float32))
    made.finish()
    assert (tmp_path / "evidence/head.safetensors").stat().st_size == DATA + 2000 + 4000


def test_equal_tensors_are_stored_once(tmp_path):
    made = FolderStore.create(tmp_path / "evidence")
    x = RNG.standard_normal(1000).astype(np.float32)
    for kind in ("before", "after"):
        made.put(kind, "x", x)
    made.put("after", "as a matrix", x.reshape(10, 100))
    made.finish()
    opened = FolderStore.open(tmp_path / "evidence")
    assert opened.digest("before", "x") == opened.digest("after", "x") == digest_of(x)
    assert (tmp_path / "evidence/head.safetensors").stat().st_size == DATA + 8000
    assert opened.get("after", "as a matrix").shape == (10, 100)


def test_a_full_header_begins_another_file(tmp_path):
    made = FolderStore.create(tmp_path / "evidence")
    for number in range(1000):
        made.put("a", f"blocks.3.{number}", np.float64(number))
    made.finish()
    files = sorted(p.name for p in (tmp_path / "evidence").glob("*.safetensors"))
    assert files[:2] == ["blocks.3-1.safetensors", "blocks.3-2.safetensors"] and files[-1] == "blocks.3.safetensors"
    found = {}
    for name in files:
        found |= load_file(tmp_path / "evidence" / name)
    assert all(found[f"a/blocks.3.{n}"] == n for n in range(1000))


def test_a_name_longer_than_a_header_is_refused(tmp_path):
    made = FolderStore.create(tmp_path / "evidence")
    with pytest.raises(UserError, match="File name too long"):
        made.put("a", "x" * HEADER, np.zeros(1))
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_part_is_read_and_verified_without_the_rest(tmp_path, small_pieces, dtype):
    x = (RNG.standard_normal(1000) * (1 if dtype is np.float64 else 2**20)).astype(dtype)
    made = FolderStore.create(tmp_path / "evidence")
    made.put("a", "x", x)
    made.put("a", "bf16", np.arange(100, dtype=np.float32))
    made.finish()
    file = tmp_path / "evidence/head.safetensors"
    raw = bytearray(file.read_bytes())
    raw[DATA + 900 * x.itemsize] ^= 1
    file.write_bytes(raw)
    opened = FolderStore.open(tmp_path / "evidence").arrays("a")
    assert np.array_equal(opened.part("x", 100, 300), x[100:300])
    assert np.array_equal(opened.part("bf16", 33, 35), [33.0, 34.0])
    assert opened.part("x", 5, 5).size == 0 and opened.part("x", 998, 2000).size == 2
    assert opened.shape_of("x") == (1000,) and opened.digest("x") == digest_of(x)
    for read in (lambda: opened.part("x", 880, 901), lambda: opened["x"]):
        with pytest.raises(UserError, match=r"head\.safetensors was damaged"):
            read()


def test_both_stores_give_the_same_digests_and_parts(folder):
    opened, memory = FolderStore.open(folder), MemoryStore()
    for name, array in TENSORS.items():
        memory.put("taps", name, np.asarray(array).astype(np.asarray(array).dtype.newbyteorder("=")))
        assert memory.digest("taps", name) == opened.digest("taps", name)
        assert np.array_equal(memory.part("taps", name, 1, 3), opened.part("taps", name, 1, 3), equal_nan=True)
    for one, why in ((memory, "exists already"), (opened, "is finished: taps/loss cannot be added")):
        with pytest.raises(ValueError, match=why):
            one.put("taps", "loss", np.zeros(1))
        with pytest.raises(KeyError):
            one.get("taps", "absent")


def test_a_tensor_is_put_once(tmp_path):
    made = filled(tmp_path / "evidence")
    with pytest.raises(ValueError, match="taps/loss exists already"):
        made.put("taps", "loss", np.zeros(1))


def test_a_pickle_holds_the_path_alone(folder):
    opened = FolderStore.open(folder)
    raw = pickle.dumps([opened.arrays(kind) for kind in ("taps", "none")])
    assert len(raw) < 1000
    taps, none = pickle.loads(raw)
    assert isinstance(taps, Stored) and taps.store is none.store and not none
    assert taps["loss"] == 3.5 and "loss" in taps and "other" not in taps and len(taps) == len(TENSORS)


def test_without_its_index_a_folder_is_no_evidence(tmp_path):
    filled(tmp_path / "evidence")
    with pytest.raises(UserError, match=r"index\.json"):
        FolderStore.open(tmp_path / "evidence")


@pytest.mark.parametrize("file", ["blocks.0.safetensors", "head.safetensors", "index.json", "evidence.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "gone", "linked"])
def test_damage_names_the_file(folder, tmp_path, file, how):
    path = folder / file
    raw = bytearray(path.read_bytes())
    if how == "flipped":
        raw[-1] ^= 1
        path.write_bytes(raw)
    elif how == "cut":
        path.write_bytes(raw[:-1])
    elif how == "longer":
        path.write_bytes(raw + b"x")
    else:
        path.unlink()
        if how == "linked" and file != INDEX:
            (tmp_path / "elsewhere").write_bytes(raw)
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError) as said:
        opened = FolderStore.open(folder)
        opened.document("evidence.json")
        dict(opened.arrays("taps"))
    assert file in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize("position", [0, 20, DATA - 1])
def test_a_flipped_byte_of_a_header_is_noticed(folder, position):
    path = folder / "blocks.0.safetensors"
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"blocks\.0\.safetensors was damaged after it was written .*header"):
        FolderStore.open(folder)


def test_an_index_of_an_earlier_lockstep_has_no_headers(folder):
    found = json.loads((folder / INDEX).read_text())
    del found["seal"], found["headers"]
    (folder / INDEX).write_bytes(sealed_json(found, None))
    assert set(dict(FolderStore.open(folder).arrays("taps"))) == set(TENSORS)


def test_a_file_that_is_damaged_once_it_is_open_is_noticed(folder):
    opened = FolderStore.open(folder)
    os.truncate(folder / "head.safetensors", DATA + 4)
    with pytest.raises(UserError, match=r"head\.safetensors"):
        dict(opened.arrays("taps"))
    opened.remove()
    with pytest.raises(UserError, match=r"head\.safetensors is missing"):
        opened.get("taps", "loss")


def first(found):
    return found["tensors"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i.update(schema=2),
        lambda i: i.pop("tensors"),
        lambda i: i.update(tensors=7),
        lambda i: i.update(files=[1]),
        lambda i: i["files"].update({"../../etc/passwd": 5}),
        lambda i: i["files"].update({".hidden": 5}),
        lambda i: i["files"].update({"index.json": 5}),
        lambda i: i["files"].update({"absent.safetensors": 5}),
        lambda i: i["files"].update({"head.safetensors": 10**9}),
        lambda i: i.update(headers=[1]),
        lambda i: i["headers"].update({"absent.safetensors": "0" * 64}),
        lambda i: i["headers"].update({"head.safetensors": 5}),
        lambda i: i["documents"].update({"a/b": "0" * 64}),
        lambda i: i["documents"].update({"evidence.json": "zz"}),
        lambda i: first(i).__setitem__(0, 5),
        lambda i: first(i).__setitem__(2, "absent.safetensors"),
        lambda i: first(i).__setitem__(3, "O"),
        lambda i: first(i).__setitem__(4, "F64"),
        lambda i: first(i).__setitem__(4, "BF16") or first(i).__setitem__(3, "I32"),
        lambda i: first(i).__setitem__(5, [7, 10**9]),
        lambda i: first(i).__setitem__(5, [7, -5]),
        lambda i: first(i).__setitem__(5, [-7, -5]),
        lambda i: first(i).__setitem__(5, [7.0, 5]),
        lambda i: first(i).__setitem__(5, "75"),
        lambda i: first(i).__setitem__(6, -8),
        lambda i: first(i).__setitem__(6, 10**30),
        lambda i: first(i).__setitem__(7, []),
        lambda i: first(i).__setitem__(7, ["0" * 64] * 2),
        lambda i: first(i).__setitem__(7, ["A" * 64]),
        lambda i: first(i).append(1),
    ],
)
def test_an_index_that_cannot_be_is_refused(folder, change):
    found = json.loads((folder / INDEX).read_text())
    found.pop("seal")
    change(found)
    (folder / INDEX).write_bytes(sealed_json(found, None))
    with pytest.raises(UserError) as said:
        FolderStore.open(folder)
    assert "\n" not in str(said.value)


def test_a_foreign_index_is_noticed(folder, tmp_path):
    other = FolderStore.create(tmp_path / "other")
    for name, array in TENSORS.items():
        other.put("taps", name, np.asarray(array) + np.asarray(array).dtype.type(1))
    other.finish({"evidence.json": b"{}"})
    (folder / INDEX).write_bytes((tmp_path / "other" / INDEX).read_bytes())
    with pytest.raises(UserError, match="safetensors"):
        dict(FolderStore.open(folder).arrays("taps"))


def test_what_no_file_can_hold_is_refused_and_leaves_nothing(tmp_path):
    made = FolderStore.create(tmp_path / "evidence")
    with pytest.raises(UserError, match="a/x is of dtype object"):
        made.put("a", "x", np.array([None]))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the size of files stands for a full disk: writing fails in the midst of one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    made = FolderStore.create(tmp_path / "evidence")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write the evidence .*evidence: File too large"):
            made.put("a", "x", RNG.standard_normal(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot write the evidence"):
        made.finish()


def test_it_moves_and_its_scratch_is_removed(folder, tmp_path):
    opened = FolderStore.open(folder)
    scratch = opened.scratch()
    scratch.put("sum", "x", np.ones(3))
    assert np.array_equal(scratch.get("sum", "x"), np.ones(3))
    scratch.remove()
    opened.move(tmp_path / "elsewhere")
    opened.flush()
    assert opened.get("taps", "loss") == 3.5 and not folder.exists()
    assert not list((tmp_path / "elsewhere").glob("scratch*"))


def test_reading_keeps_no_pages(tmp_path):
    """Forty tensors of 8 MB are read one after another within 60 MB."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    made = FolderStore.create(tmp_path / "evidence")
    for number in range(40):
        made.put("a", f"{number}", RNG.standard_normal(1 << 20))
    made.finish()
    opened = FolderStore.open(tmp_path / "evidence").arrays("a")
    before = most = resident()
    for array in opened.values():
        array.sum()
        most = max(most, resident())
    assert most - before < 60e6

"""A folder that a thread writes holds what was put, reports a disk's refusal, and takes no more than it has room."""

from __future__ import annotations

import errno
import os
import threading
import time

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence import behind
from lockstep.core.parity.evidence.behind import BehindStore
from lockstep.core.parity.evidence.index import digest_of
from lockstep.core.parity.evidence.place import store_for
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.parity_tests.evidence.test_store import TENSORS, same
from lockstep.parity_tests.tiny import tiny_config

ONES = np.ones(1000)
# Its evidence is too large for memory.
LARGE = tiny_config(vocab_size=100_000)
READS = {
    "get": lambda store: store.get("taps", "x"),
    "part": lambda store: store.part("taps", "x", 0, 1000),
    "digest": lambda store: store.digest("taps", "x") == digest_of(ONES) and ONES,
    "shape": lambda store: np.ones(store.shape("taps", "x")),
    "names": lambda store: list(store.names("taps")) == ["x"] and ONES,
}


def threads() -> int:
    return sum(one.name.startswith("lockstep-evidence") for one in threading.enumerate())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Slow writing down to 50 ms a tensor; return the names of the tensors written, in their order."""
    put, written = FolderStore.put, list[str]()

    def after_a_while(self: FolderStore, kind: str, name: str, array: np.ndarray) -> None:
        time.sleep(0.05)
        put(self, kind, name, array)
        written.append(name)

    monkeypatch.setattr(FolderStore, "put", after_a_while)
    return written


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*of_file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FolderStore, "_append", refused)


def test_it_holds_what_was_put_for_whoever_reads(tmp_path, slow):
    made = BehindStore.create(tmp_path / "evidence")
    native = {name: np.asarray(array, array.dtype.newbyteorder("=")) for name, array in TENSORS.items()}
    for name, array in native.items():
        made.put("taps", name, array)
    assert len(slow) < len(TENSORS)
    assert list(made.arrays("taps")) == list(TENSORS) == slow
    assert all(same(array, made.get("taps", name)) for name, array in native.items())
    made.put("taps", "last", ONES)
    made.finish({"evidence.json": b"{}"})
    made.close()
    opened = FolderStore.open(tmp_path / "evidence")
    assert [*opened.names("taps")] == [*TENSORS, "last"] and same(opened.get("taps", "last"), ONES)


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_waits(tmp_path, slow, read):
    made = BehindStore.create(tmp_path / "evidence")
    for store in (made, made.scratch()):
        store.put("taps", "x", ONES)
        assert np.array_equal(READS[read](store), ONES)
    made.put("taps", "y", ONES)
    made.move(tmp_path / "elsewhere")
    assert slow[-1] == "y"
    made.put("taps", "z", ONES)
    made.flush()
    assert slow == ["x", "x", "y", "z"] and not (tmp_path / "evidence").exists()
    made.close()


def test_no_more_waits_than_there_is_room_for(tmp_path, slow, monkeypatch):
    monkeypatch.setattr(behind, "WAITING_BYTES", 2 * ONES.nbytes)
    made = BehindStore.create(tmp_path / "evidence")
    for number in range(6):
        made.put("taps", f"{number}", ONES)
        assert number - len(slow) < 2
    # One that is larger than the room waits alone.
    made.put("taps", "larger", np.ones(10_000))
    assert len(slow) == 6
    made.close()


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("notices", ["get", "names", "finish", "put"])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, notices, monkeypatch):
    # With room for none, each `put` waits for the one before.
    monkeypatch.setattr(behind, "WAITING_BYTES", 0)
    made = BehindStore.create(tmp_path / "evidence")
    asked = {"get": ("taps", "x"), "names": ("taps",), "finish": (), "put": ("taps", "y", ONES)}[notices]
    with pytest.raises(UserError, match=r"cannot write the evidence .*evidence: No space left on device"):
        made.put("taps", "x", ONES)
        getattr(made, notices)(*asked)
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_evidence_is_refused_behind_too(tmp_path):
    made = BehindStore.create(tmp_path / "evidence")
    made.put("taps", "x", ONES)
    made.put("taps", "x", ONES)
    with pytest.raises(ValueError, match="taps/x exists already"):
        made.get("taps", "x")
    made.close()


def test_a_large_check_writes_behind_and_leaves_neither_folder_nor_thread(slow):
    """Whatever ends it: tensors still wait when the check is left, in its folder and in a scratch of it."""
    before = threads()
    for ended in (False, True):
        try:
            with store_for(LARGE) as store:
                assert isinstance(store, BehindStore)
                folder = store.folder
                for one in (store, store.scratch()):
                    for number in range(4):
                        one.put("taps", f"{number}", ONES)
                if ended:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert not folder.parent.exists() and threads() == before

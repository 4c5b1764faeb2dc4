"""Evidence that several ranks put into one folder: each its rows, and what is read is whole."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import sealed_json
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence import store as stores
from lockstep.core.parity.evidence.index import digest_of
from lockstep.core.parity.evidence.lasting import LastingStore
from lockstep.core.parity.evidence.later_steps import TakesParts
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.measures.drawn_part import parts_of_all
from lockstep.core.run.ranks import rows_of_rank
from lockstep.parity_tests.tiny import tiny_config

WHOLE = np.arange(21, dtype=np.float32).reshape(7, 3) / 3
RANKS = 3


def put_by_all(folder: Path, patience: float = 5.0) -> list[FolderStore]:
    """Make a store a rank, with its rows of one tensor; rank 0 has another by itself, and rank 2 a third."""
    first = FolderStore.create(folder, RANKS, patience)
    made = [first, *(FolderStore.join(folder, rank, RANKS) for rank in range(1, RANKS))]
    for rank, one in enumerate(made):
        one.put("before/params", "a.weight", WHOLE[rows_of_rank(len(WHOLE), rank, RANKS)])
    first.put("taps", "x", WHOLE + 1)
    made[2].put("reduced/2", "a.weight", WHOLE + 2)
    return made


def finish_all(made: list[FolderStore]) -> FolderStore:
    """Finish every rank's part, rank 0's first: it waits for the others."""
    waiting = threading.Thread(target=made[0].finish)
    waiting.start()
    for one in made[1:]:
        one.finish()
    waiting.join()
    assert made[0].finished
    return FolderStore.open(made[0].folder)


def test_rows_of_all_ranks_are_one_tensor(tmp_path: Path) -> None:
    found = finish_all(put_by_all(tmp_path / "evidence"))
    np.testing.assert_array_equal(found.get("before/params", "a.weight"), WHOLE)
    np.testing.assert_array_equal(found.get("taps", "x"), WHOLE + 1)
    np.testing.assert_array_equal(found.get("reduced/2", "a.weight"), WHOLE + 2)
    assert found.shape("before/params", "a.weight") == WHOLE.shape
    assert found.digest("before/params", "a.weight") == digest_of(WHOLE)
    assert found.get("before/params", "a.weight").dtype == WHOLE.dtype
    for start in range(WHOLE.size + 1):
        for stop in range(start, WHOLE.size + 1):
            part = found.part("before/params", "a.weight", start, stop)
            np.testing.assert_array_equal(part, WHOLE.reshape(-1)[start:stop])


@pytest.mark.parametrize("number", range(2, 8))
def test_of_a_later_step_each_rank_keeps_its_rows_of_the_part_that_is_drawn(number: int, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=2500, train={"steps": 20})
    shapes, kept = parameter_shapes(config.model), parts_of_all(config, number - 1)
    where, shape = kept["embed.weight"]
    assert shape != shapes["embed.weight"], "all of it would be kept by chance"
    whole = {name: np.arange(np.prod(of), dtype=np.float32).reshape(of) for name, of in shapes.items()}
    made = [FolderStore.create(tmp_path / "evidence", RANKS, 5.0)]
    made += [FolderStore.join(tmp_path / "evidence", rank, RANKS) for rank in range(1, RANKS)]
    for rank, one in enumerate(made):
        ranks = SimpleNamespace(rank=rank, count=RANKS)
        take = TakesParts(one, config, number, ranks)
        for name, array in whole.items():
            take("params", name, array[rows_of_rank(len(array), rank, RANKS)])
    found = finish_all(made)
    np.testing.assert_array_equal(
        found.get(f"later/{number}/params", "embed.weight"), whole["embed.weight"].reshape(-1)[where].reshape(shape)
    )
    for name, array in whole.items():
        if shapes[name] == kept[name][1]:
            np.testing.assert_array_equal(found.get(f"later/{number}/params", name), array)


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    made = [FolderStore.create(tmp_path / "evidence", RANKS, 5.0)]
    made += [FolderStore.join(tmp_path / "evidence", rank, RANKS) for rank in range(1, RANKS)]
    for rank, one in enumerate(made):
        one.put("before/params", "a.weight", WHOLE[:2][rows_of_rank(2, rank, RANKS)])
    found = finish_all(made)
    np.testing.assert_array_equal(found.get("before/params", "a.weight"), WHOLE[:2])
    assert found.part("before/params", "a.weight", 6, 6).size == 0


def test_what_rank_0_has_put_is_lent_before_it_is_finished(tmp_path: Path) -> None:
    """As ranks do that hold whole weights: rank 0 alone puts them, and all load them."""
    first = FolderStore.create(tmp_path / "evidence", 2, 5.0)
    other = FolderStore.join(tmp_path / "evidence", 1, 2)
    first.put("before/params", "a.weight", WHOLE)
    told: list[object] = []

    class Ranks:
        rank, count = 0, 2

        def of_first(self, compute: Callable[[], object], asked: str = "") -> object:
            told.append(compute() if not told else None)
            return told[0]

        def gather(self, value: object, asked: str = "") -> list[object]:
            return [value]

    ranks = Ranks()
    first.lend(ranks, "before/")  # type: ignore[arg-type]
    other.lend(ranks, "before/")  # type: ignore[arg-type]
    np.testing.assert_array_equal(other.arrays("before/params")["a.weight"], WHOLE)
    assert list(other.arrays("before/params")) == ["a.weight"]
    found = finish_all([first, other])
    assert found.shape("before/params", "a.weight") == WHOLE.shape, "what is lent is put once"


def test_a_rank_whose_disk_refuses_loses_the_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = put_by_all(tmp_path / "evidence")

    def full(descriptor: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stores, "_write", full)
        with pytest.raises(UserError, match="No space left"):
            made[1].put("before/params", "b.weight", WHOLE)
    made[2].finish()
    with pytest.raises(UserError, match="rank 1 could not write its part"):
        made[0].finish()
    assert not (tmp_path / "evidence").exists()


def test_a_rank_that_never_comes_is_waited_for_so_long_alone(tmp_path: Path) -> None:
    made = put_by_all(tmp_path / "evidence", patience=0.1)
    made[1].finish()
    with pytest.raises(UserError, match=r"rank 2 gave no part of the evidence within 0\.1 s"):
        made[0].finish()


def test_a_rank_must_see_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rank 1 does not see .*TMPDIR"):
        FolderStore.join(tmp_path / "elsewhere", 1, 2)


@pytest.mark.parametrize("harm", ["shape", "dtype", "twice"])
def test_parts_that_are_not_of_one_tensor_are_refused(harm: str, tmp_path: Path) -> None:
    finish_all(put_by_all(tmp_path / "evidence"))
    path = tmp_path / "evidence/index.json"
    index = json.loads(path.read_bytes())
    del index["seal"]
    rows = [row for row in index["tensors"] if row[:2] == ["before/params", "a.weight"]]
    assert len(rows) == RANKS
    if harm == "shape":
        rows[1][5] = [9]
    elif harm == "dtype":
        rows[1][3:5] = ["I32", "I32"]
    else:
        index["tensors"].append(rows[1])
    path.write_bytes(sealed_json(index, indent=None))
    with pytest.raises(UserError, match="are not of one tensor"):
        FolderStore.open(tmp_path / "evidence")


def test_behind_training_a_rank_that_loses_its_part_costs_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's disk refuses while its thread writes: its step goes on, and rank 0 reports that the evidence is lost."""
    folder, put = tmp_path / "evidence", FolderStore.put

    def refused(self: FolderStore, kind: str, name: str, array: np.ndarray) -> None:
        if self.rank == 1 and name == "b.weight":
            raise TypeError("no such dtype")
        put(self, kind, name, array)

    monkeypatch.setattr(FolderStore, "put", refused)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        first = LastingStore(lambda: FolderStore.create(folder, 2, 5.0), one, 2)
        second = LastingStore(lambda: FolderStore.join(folder, 1, 2), other, 2)
        for store in (first, second):
            store.put("before/params", "a.weight", WHOLE[:3])
            store.put("before/params", "b.weight", WHOLE[:3])
        other.submit(second.finish_part)
        said = one.submit(first.finish, lambda store: store.finish(), tmp_path / "step").exception()
    assert "rank 1 could not write its part" in str(said)
    assert not folder.exists() and not (tmp_path / "step").exists()

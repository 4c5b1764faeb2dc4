"""npz files: whatever bit is flipped, the arrays are those that were written, or one line reports that they are not."""

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.npz import read_npz

# x is larger than what zipfile reads at once: a header that states less leaves its checksum unread.
ARRAYS = {"names": np.asarray([b"a", b"bcd"]), "x": np.random.default_rng(0).normal(size=(1021, 5))}


@pytest.fixture
def path(tmp_path):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    return tmp_path / "a.npz"


def same(found: dict[str, np.ndarray]) -> bool:
    return found.keys() == ARRAYS.keys() and all(
        found[name].dtype == a.dtype and found[name].shape == a.shape and found[name].tobytes() == a.tobytes()
        for name, a in ARRAYS.items()
    )


def test_every_flipped_bit_is_noticed_or_without_effect(path):
    whole = path.read_bytes()
    noticed = 0
    places = {*range(600), *range(0, len(whole), 199), *range(len(whole) - 250, len(whole))}
    for at in places:
        for bit in {1, at % 8}:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            try:
                assert same(read_npz(path)), (at, bit)
            except UserError as error:
                assert "a.npz is damaged: " in str(error) and "\n" not in str(error)
                noticed += 1
    assert noticed > len(places)


def test_every_place_to_cut_it_short_is_noticed(path):
    whole = path.read_bytes()
    for size in {*range(0, len(whole), 199), *range(len(whole) - 250, len(whole))}:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="is damaged"):
            read_npz(path)


def test_a_missing_file_and_objects_are_refused(tmp_path):
    with pytest.raises(UserError, match="is missing"):
        read_npz(tmp_path / "nowhere.npz")
    np.savez(tmp_path / "o.npz", o=np.asarray([{}], dtype=object))
    with pytest.raises(UserError, match="is damaged: ValueError"):
        read_npz(tmp_path / "o.npz")

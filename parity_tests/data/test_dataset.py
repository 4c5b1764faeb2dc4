"""Windows are the stream's, wherever shards begin, in memory or mapped; damaged folders do not open."""

from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.data import dataset as dataset_module
from lockstep.core.data.dataset import TokenDataset, TokenSplit
from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.errors import UserError


def stream(folder, split):
    """Read the tokens in the plainest way: headers skipped by the index's own counts."""
    index = json.loads((folder / "index.json").read_text())
    return np.concatenate(
        [
            np.frombuffer((folder / shard["file"]).read_bytes()[64 + 8 * shard["documents"] :], dtype="<u2")
            for shard in index["splits"][split]["shards"]
        ]
    )


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    length=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_gather_is_slicing(sizes, length, seed):
    whole = np.random.default_rng(seed).integers(0, 65_536, sum(sizes)).astype(np.uint16)
    split = TokenSplit(np.split(whole, np.cumsum(sizes)[:-1]))
    assert split.num_tokens == whole.size
    length = min(length, whole.size)
    starts = np.random.default_rng(seed + 1).integers(0, whole.size - length + 1, 7)
    found = split.gather(starts, length)
    assert found.dtype == np.uint16 and found.shape == (7, length)
    assert np.array_equal(found, [whole[start : start + length] for start in starts])


def test_gather_refuses_what_is_outside():
    split = TokenSplit([np.arange(5, dtype=np.uint16), np.arange(5, dtype=np.uint16)])
    assert split.gather(np.array([], dtype=np.int64), 3).shape == (0, 3)
    assert split.gather(np.array([0]), 10).shape == (1, 10)
    for starts, length in (([-1], 3), ([8], 3), ([0], 11), ([2**62], 1)):
        with pytest.raises(IndexError, match="reaches outside the split's 10 tokens"):
            split.gather(np.array(starts), length)
    for starts, length in ((np.array([[0]]), 3), (np.array([0.5]), 3), (np.array([0]), 0)):
        with pytest.raises(ValueError):
            split.gather(starts, length)


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["mapped", "in memory"])
def test_a_mapped_shard_that_was_changed_is_named_where_it_is_read(copy, limit):
    split = TokenDataset.open(copy, memory_limit_bytes=limit).split("train")
    start, whole = np.array([0]), split.num_tokens
    before = split.gather(start, whole)
    path = copy / "train_00001.bin"
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)
    if limit:
        assert np.array_equal(split.gather(start, whole), before)
        return
    assert np.array_equal(split.gather(start, 5)[0], before[0, :5])
    with pytest.raises(UserError, match=r"train_00001\.bin was changed while it was in use"):
        split.gather(start, whole)


def test_an_empty_split_has_no_tokens():
    split = TokenSplit([])
    assert split.num_tokens == 0
    with pytest.raises(IndexError):
        split.gather(np.array([0]), 1)


@pytest.mark.parametrize("name", ["train", "val"])
def test_memory_and_mapping_give_the_same(prepared, name):
    held = TokenDataset.open(prepared, memory_limit_bytes=1 << 30).split(name)
    mapped = TokenDataset.open(prepared, memory_limit_bytes=0).split(name)
    assert len(held._parts) == 1 and len(mapped._parts) > 1
    starts = np.arange(held.num_tokens - 300, dtype=np.int64)
    whole = stream(prepared, name)
    assert held.num_tokens == mapped.num_tokens == whole.size
    assert np.array_equal(held.gather(starts, 300), mapped.gather(starts, 300))
    assert np.array_equal(held.gather(starts, 300), np.lib.stride_tricks.sliding_window_view(whole, 300)[:-1])


def test_the_smallest_split_comes_into_memory_first(prepared):
    index = TokenDataset.open(prepared).index
    for tokens in (index.val.tokens, index.train.tokens, index.train.tokens + index.val.tokens - 1):
        opened = TokenDataset.open(prepared, memory_limit_bytes=tokens * index.token_bytes)
        assert len(opened.split("val")._parts) == 1 and len(opened.split("train")._parts) > 1


def test_the_default_limit_is_a_share_of_what_is_available(prepared, monkeypatch):
    assert available_memory_bytes() > 1 << 20
    monkeypatch.setattr(dataset_module, "available_memory_bytes", lambda: 0)
    assert len(TokenDataset.open(prepared).split("train")._parts) > 1


def test_what_opens_describes_itself(prepared, texts):
    opened = TokenDataset.open(prepared)
    tokenizer = opened.tokenizer()
    assert (opened.vocab_size, opened.eot_id) == (tokenizer.vocab_size, tokenizer.eot_id) == (300, 0)
    assert len(opened.fingerprint) == 64
    documents = "".join(tokenizer.decode(stream(prepared, name)) for name in ("train", "val")).split("<|endoftext|>")
    assert sorted(documents[:-1]) == sorted(path.read_text(encoding="utf-8") for path in texts.iterdir())
    with pytest.raises(UserError, match="no split 'test'"):
        opened.split("test")


@pytest.fixture
def copy(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


@pytest.mark.parametrize("name", ["train_00001.bin", "val_00000.bin", "index.json", "tokenizer.json"])
def test_every_flipped_byte_is_refused(copy, name):
    path = copy / name
    raw = path.read_bytes()
    draw = np.random.default_rng(0)
    positions = [0, 9, 12, 16, 24, 32, 64, len(raw) - 1, *draw.integers(0, len(raw), 60)]
    for position in positions:
        damaged = bytearray(raw)
        damaged[position] ^= int(draw.integers(1, 256))
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=name.replace(".", r"\.")) as caught:
            TokenDataset.open(copy)
        assert "\n" not in str(caught.value)
    path.write_bytes(raw)
    TokenDataset.open(copy)


def test_without_verify_only_the_contents_go_unread(copy):
    path = copy / "train_00000.bin"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    TokenDataset.open(copy, verify=False)
    path.write_bytes(raw[:-2])
    with pytest.raises(UserError, match="train_00000"):
        TokenDataset.open(copy, verify=False)


@pytest.mark.parametrize("name", ["train_00000.bin", "index.json", "tokenizer.json"])
def test_missing_files_are_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(UserError, match=name):
        TokenDataset.open(copy)


def test_shards_of_another_preparation_are_refused(copy):
    shutil.copy(copy / "train_00001.bin", copy / "train_00000.bin")
    with pytest.raises(UserError, match=r"train_00000\.bin is not the one"):
        TokenDataset.open(copy)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no data folder"):
        TokenDataset.open(tmp_path / "none")
    with pytest.raises(UserError, match="no index"):
        TokenDataset.open(tmp_path)


def test_another_version_of_the_index_is_named(copy):
    index = json.loads((copy / "index.json").read_text())
    del index["seal"]
    index["format_version"] = 2
    seal = hashlib.sha256(json.dumps(index, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (copy / "index.json").write_text(json.dumps({**index, "seal": seal}, sort_keys=True, indent=2) + "\n")
    with pytest.raises(UserError, match="format version 2"):
        TokenDataset.open(copy)

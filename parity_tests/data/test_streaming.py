"""Long files are read, encoded and counted in pieces: the same bytes, in memory that does not grow with them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.core.data import documents, encode, entropy, sample, shards, tokenizer
from lockstep.core.data.catalog import read_catalog
from lockstep.core.data.documents import line_end, read_documents
from lockstep.core.data.entropy import TokenCounts, bigram_entropy, unigram_entropy
from lockstep.core.data.prepare import prepare
from lockstep.core.data.sources import list_source
from lockstep.core.data.tokenizer import load_tokenizer
from lockstep.parity_tests.data.conftest import settings_for
from lockstep.parity_tests.data.test_prepare import contents
from lockstep.parity_tests.repository import REPO

MB = 1 << 20


def test_small_pieces_give_the_same_bytes(texts, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 7)
    monkeypatch.setattr(tokenizer, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(shards, "_HELD_BYTES", 100)
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(sample, "_DOCUMENTS", 3)
    monkeypatch.setattr(entropy, "_BLOCK_TOKENS", 11)
    prepare(settings_for(tmp_path / "out", texts))
    assert contents(tmp_path / "out") == contents(prepared)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_where_a_text_is_cut_does_not_depend_on_its_chunks(limit):
    text = "ab\ncd é\n\nb\na\n c\nabcdefgh\nij\n"
    whole = list(tokenizer._cut([text], limit))
    assert len(whole) > 2 and "".join(whole) == text and all(len(piece) > limit for piece in whole[:-1])
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert list(tokenizer._cut([text[:first], text[first:second], text[second:]], limit)) == whole


def test_a_document_in_chunks_has_the_tokens_of_the_whole(prepared, monkeypatch):
    monkeypatch.setattr(tokenizer, "_PIECE_CHARACTERS", 50)
    text = "".join(f"def step_{number}(loss):\n    return loss\n" for number in range(40))
    loaded = load_tokenizer(prepared / "tokenizer.json")
    (whole,) = loaded.encode_documents([text])
    parts = list(loaded.encode_chunks([[text[:33], text[33:700], text[700:]], ["next"]]))
    assert [ends for _, ends in parts].count(True) == 2 and len(parts) > 10
    first = next(number for number, (_, ends) in enumerate(parts) if ends)
    assert np.array_equal(np.concatenate([ids for ids, _ in parts[: first + 1]]), whole)


def test_entropies_of_parts_are_the_bits_of_the_whole():
    draw = np.random.default_rng(0)
    tokens = (draw.exponential(9, 5000).astype(np.uint16)) % 50
    counts = TokenCounts(50)
    for part in np.split(tokens, [1, 1, 700, 4999]):
        counts.add(part)
    assert counts.unigram_entropy() == unigram_entropy(tokens, 50)
    assert counts.bigram_entropy() == bigram_entropy(tokens, 50)
    before = tokens[:-1].astype(np.int64)
    pairs = np.unique(before * 50 + tokens[1:], return_counts=True)[1]
    expected = _entropy(pairs) - _entropy(np.bincount(before))
    assert counts.bigram_entropy() == pytest.approx(expected, abs=1e-12)


def _entropy(counts):
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def test_the_end_of_a_line_is_found_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 4)
    raw = b"0123456789\nabcdefghijk\nxyz"
    (tmp_path / "a.txt").write_bytes(raw)
    (file,) = list_source(str(tmp_path / "a.txt")).files
    for wanted in range(len(raw) + 1):
        expected = raw.rfind(b"\n", 0, wanted) + 1 or raw.find(b"\n", wanted) + 1
        assert line_end(file, 0, len(raw), wanted) == expected
    assert line_end(file, 0, 5, 3) is None


@pytest.fixture(scope="module")
def long_files(tmp_path_factory):
    """One file of 24 MB of each kind; of parquet one group of rows, of plain text one document."""
    folder = tmp_path_factory.mktemp("long")
    texts = [f"{number} " + "words of a text that goes on\n" * 100 for number in range(8500)]
    (folder / "a.txt").write_text("".join(texts))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
    # Not compressed, and no dictionary: or else the file would be small.
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", use_dictionary=False, compression="none")
    return folder


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_the_memory_of_reading_does_not_grow_with_the_file(long_files, name):
    listing = list_source(str(long_files / name))
    most = 0

    def watched(file):
        nonlocal most
        for document in read_documents(file, "text"):
            for _ in document.chunks():
                most = max(most, pa.total_allocated_bytes())
            yield document

    tracemalloc.start()
    try:
        catalog = read_catalog(listing, "text", 0.01, lambda done: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert int(catalog.text_bytes.sum()) > 23 * MB and peak < 9 * MB
    before = pa.total_allocated_bytes()
    assert len(list(watched(listing.files[0]))) == (1 if name == "a.txt" else 8500)
    assert most - before < 9 * MB


_RESIDENT = """
import sys
from lockstep.core.data.documents import read_documents
from lockstep.core.data.sources import list_source

def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

before = peak()
for document in read_documents(list_source(sys.argv[1]).files[0], "text"):
    for _ in document.chunks():
        pass
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_that_reads_a_long_text_does_not_grow(tmp_path):
    """Python's own count of memory does not see holes in the heap of the C library."""
    draw = random.Random(0)
    with (tmp_path / "a.txt").open("w") as out:
        while out.tell() < 64 * MB:
            out.write("words of a text that goes on\n" * draw.randint(100, 10_000) + draw.choice(["数据", "🙂", "é"]))
    words = [sys.executable, "-c", _RESIDENT, str(tmp_path / "a.txt")]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 1024


def test_the_memory_of_encoding_does_not_grow_with_a_document(long_files, prepared, tmp_path):
    class Plain:
        vocab_size, eot_id = 300, 0

        def encode_chunks(self, texts):
            for chunks in texts:
                for chunk in chunks:
                    yield np.full(len(chunk), 1, np.uint32), False
                yield np.empty(0, np.uint32), True

    (file,) = list_source(str(long_files / "a.txt")).files
    task = encode.ShardTask(str(tmp_path), "train_00000.bin", "text", 1, ((file, [(0, file.size)]),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_tokenizer_of", lambda folder: Plain())
        patch.setattr(shards, "_HELD_BYTES", MB)
        patch.setattr(shards, "_CHUNK_BYTES", MB)
        tracemalloc.start()
        try:
            header = encode.encode_shard(task)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert header.tokens == file.size + 1 and peak < 12 * MB


def test_pieces_of_the_sample_do_not_depend_on_chunks(tmp_path, monkeypatch):
    text = "".join(f"line {number} is é\n" for number in range(400))
    (tmp_path / "a.txt").write_text(text)
    listing = list_source(str(tmp_path))
    catalog = read_catalog(listing, "text", 0.1, lambda done: None)
    monkeypatch.setattr(sample, "_PIECE_BYTES", 100)
    train = text.encode()[: catalog.stop[0]].decode()
    for budget in (100, 350, 1500):
        monkeypatch.setattr(documents, "_CHUNK_BYTES", MB)
        pieces = list(sample.sample_training_text(listing, "text", catalog, budget))
        assert len(pieces) == budget // 100 and all(piece in train for piece in pieces)
        begins = [len(train) * number // len(pieces) for number in range(len(pieces))]
        assert pieces == [train[begin : begin + len(pieces[0])] for begin in begins]
        monkeypatch.setattr(documents, "_CHUNK_BYTES", 7)
        assert list(sample.sample_training_text(listing, "text", catalog, budget)) == pieces

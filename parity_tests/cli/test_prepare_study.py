"""The study of preparation: its text has no copies, its page shows what was measured, and what was not equal."""

from __future__ import annotations

import subprocess
import sys
import time

from lockstep.scripts.studies import prepare
from lockstep.scripts.studies.prepare_page import page

SECONDS = {"read": 1.0, "tokenizer": 2.0, "encode": 4.0, "measure": 0.5}
SIZE = {
    "size": 100,
    "seconds": SECONDS,
    "text": 100_000_000,
    "tokens": 3,
    "shards": 2,
    "peak": 300_000_000,
    "load": 2.5,
}
KILL = {"at": 1.0, "killed": True, "files": 3, "equal": True}
RESULTS = {
    "versions": {"python": "3.11"},
    "device": {"name": "a CPU", "cores": 2},
    "sizes": [SIZE, {**SIZE, "size": 2000, "peak": 301_000_000}],
    "kinds": [{"kind": "txt", "size": 100, "seconds": 2.0, "text": 100_000_000, "peak": 40_000_000}],
    "documents": [{"peak": 40_000_000, "documents": 1000}, {"peak": 90_000_000, "documents": 1_001_000}],
    "tokenizers": [
        {"size": 30, "text": 30_000_000, "shards": 3, "ours": 10.0, "encode_batch": 15.0, "encode_batch_fast": 9.0}
    ],
    "load": {"sizes": 3.0},
    "kills": {"seconds": 2.0, "shards": 9, "kills": [KILL, {**KILL, "equal": False}, {**KILL, "killed": False}]},
}


def test_the_page_says_what_was_measured():
    text = page(RESULTS)
    assert "| 100 MB | 1.0 s | 2.0 s | 4.0 s | 7.5 s | 25.00 | 3 | 2 | 300 MB | 2.5 |" in text
    assert "| plain text, one document | 100 MB | 2.0 s | 50 | 40 MB |" in text
    assert "50 bytes a document" in text
    assert "when a part began: sizes 3." in text and "| 30 MB | Lockstep, 3 shards to train on | 10.0 | 3.00 |" in text
    assert "1.50× (1.50 to 1.50)" in text and "0.90×" in text
    assert "2 of 3 folders" in text and "2 were killed before their end" in text
    assert "Not measured yet: `--rows words`, `--rows sizes --sizes 500`." in text
    assert "## Beside" not in page({name: value for name, value in RESULTS.items() if name != "tokenizers"})


def test_no_two_documents_are_equal_and_bytes_are_those_asked_for():
    texts = list(prepare.documents(300_000))
    assert len(set(texts)) == len(texts) and 300_000 <= sum(len(text.encode()) for text in texts) < 325_000


def test_the_memory_of_a_tree_is_that_of_its_children_too():
    code = "import subprocess, sys; hold = b'x' * {0}; {1}input()"
    child = f"subprocess.Popen([sys.executable, '-c', {code.format(80_000_000, '')!r}], stdin=0); "
    process = subprocess.Popen(
        [sys.executable, "-c", code.format(40_000_000, child)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        peak, end = 0, time.monotonic() + 60
        while peak < 120_000_000 and time.monotonic() < end:
            peak = max(peak, prepare._tree_bytes(process.pid))
        assert peak >= 120_000_000
    finally:
        process.communicate(b"\n\n")

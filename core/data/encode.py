"""The task of a worker: read the documents of one shard, encode them and write the shard."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.core.data.catalog import expected_documents
from lockstep.core.data.documents import Document, Span
from lockstep.core.data.index import TOKENIZER_NAME
from lockstep.core.data.shards import ShardHeader, ShardWriter, token_bytes_for
from lockstep.core.data.sources import SourceFile
from lockstep.core.data.tokenizer import TextTokenizer, load_tokenizer
from lockstep.core.errors import UserError


@dataclass(frozen=True)
class ShardTask:
    """A worker's task: the file to write, the documents to read, and their expected number."""

    folder: str
    file: str
    column: str
    documents: int
    sources: tuple[tuple[SourceFile, list[Span]], ...]


def encode_shard(task: ShardTask) -> ShardHeader:
    """Write the shard of `task`; its bytes depend only on the task and the tokenizer.

    Raises:
        UserError: a source changed since it was listed, or the shard cannot be written.
    """
    tokenizer = _tokenizer_of(task.folder)
    eot = np.array([tokenizer.eot_id], dtype=np.uint32)
    with ShardWriter(Path(task.folder, task.file), token_bytes_for(tokenizer.vocab_size)) as shard:
        try:
            for ids, ends in tokenizer.encode_chunks(document.chunks() for document in _documents(task)):
                shard.add(np.concatenate([ids, eot]) if ends else ids, ends=ends)
        except UnicodeDecodeError:
            raise UserError(f"a source of {task.file} was changed while it was read; run the command again") from None
        if shard.documents != task.documents:
            raise UserError(
                f"{task.file} should hold {task.documents} documents, {shard.documents} were found: "
                f"a source was changed while it was read, the first is {task.sources[0][0].path}; run the command again"
            )
        return shard.write()


def start_worker(threads: int = 1) -> None:
    """Set up a worker process: limit the tokenizer's threads, end silently on Ctrl-C, and end with the parent."""
    limit_threads(threads)
    # Immediate death is safe, because shards are written atomically. The parent prints the message.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def limit_threads(threads: int) -> None:
    """Limit the tokenizer to `threads` threads in this process; call it before the tokenizer's first use.

    If every worker has tasks, one thread each is best: more threads would compete for the same cores.
    """
    # The tokenizer would start more threads than the machine has cores.
    threads = min(threads, os.cpu_count() or 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@functools.lru_cache(maxsize=1)
def _tokenizer_at(path: str, mtime_ns: int) -> TextTokenizer:
    return load_tokenizer(path)


def _tokenizer_of(folder: str) -> TextTokenizer:
    path = os.path.join(folder, TOKENIZER_NAME)
    # The time of the last change is part of the key, because one process may prepare the same folder twice.
    return _tokenizer_at(path, os.stat(path).st_mtime_ns)


def _documents(task: ShardTask) -> Iterator[Document]:
    for source, spans in task.sources:
        yield from expected_documents(source, task.column, spans)

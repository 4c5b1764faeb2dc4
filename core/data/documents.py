"""Reading documents out of source files, all of them or only those at known places.

A document is known by its span (start, stop) in its file: bytes for plain text and for JSON lines
(uncompressed bytes where the file is gzipped), rows for parquet.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from lockstep.core.data.sources import SourceFile
from lockstep.core.errors import UserError

Span = tuple[int, int]

# Enough to tell a checkpoint or a picture from text without reading gigabytes of it.
_HEAD_BYTES = 1 << 16
# No document is so long; a few compressed bytes can be any number of the same one.
_LONGEST_LINE = 1 << 30


@dataclass(frozen=True)
class Document:
    """A document and its span. `text` is None when its bytes are not valid Unicode."""

    start: int
    stop: int
    text: str | None


def read_documents(file: SourceFile, column: str, spans: Sequence[Span] | None = None) -> Iterator[Document]:
    """Yield the documents of `file` in order.

    Args:
        file: what to read; its kind says how.
        column: the key (JSON lines) or the column (parquet) that holds the text; unused for plain text.
        spans: only what lies in these sorted, disjoint spans; a span may hold many documents. None: all.

    A missing value (null) is yielded as the empty text.

    Raises:
        UserError: the file cannot be read, is not what its name says, or has no such column.
    """
    reader = {"text": _read_text, "jsonl": _read_json_lines, "parquet": _read_parquet}[file.kind]
    try:
        yield from reader(file, column, spans)
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {file.path}: {getattr(error, 'strerror', None) or error}") from error


def _read_text(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document]:
    with open(file.path, "rb") as stream:
        if spans is not None:
            for start, stop in spans:
                stream.seek(start)
                yield Document(start, stop, _decode(stream.read(stop - start)))
            return
        head = stream.read(_HEAD_BYTES)
        if _is_text_head(head):
            raw = head + stream.read()
            # A byte order mark, which some editors write first, is no text.
            start = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
            yield Document(start, len(raw), _decode(raw[start:]))
        else:
            yield Document(0, file.size, None)


def _is_text_head(head: bytes) -> bool:
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character of up to four bytes may be cut by the end of the head.
        return len(head) == _HEAD_BYTES and error.start > _HEAD_BYTES - 4
    return True


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_json_lines(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document]:
    with _open_maybe_gzip(file.path) as stream:
        for start, stop in [(0, None)] if spans is None else spans:
            stream.seek(start)
            position = start
            while stop is None or position < stop:
                line = stream.readline(_LONGEST_LINE + 1)
                if not line:
                    break
                if len(line) > _LONGEST_LINE:
                    raise UserError(f"{file.path}, at byte {position}: a line of more than {_LONGEST_LINE:,} bytes")
                begin, position = position, position + len(line)
                if line.strip():
                    yield Document(begin, position, _json_text(line, column, file.path, begin))


def _open_maybe_gzip(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.lower().endswith(".gz") else open(path, "rb")


def _json_text(line: bytes, column: str, path: str, position: int) -> str | None:
    where = f"{path}, at byte {position}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a line of JSON ({error}); every line must be one JSON object") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a line of JSON lines must be an object, not {_kind(record)}")
    if column not in record:
        raise UserError(f"{where}: no column {column!r}; there are {', '.join(sorted(record)) or 'none'}")
    text = record[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: the column {column!r} must hold text, not {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which no encoding of Unicode can hold.
        return None
    return text


def _kind(value: Any) -> str:
    """Return a JSON value's kind, in words."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _read_parquet(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as parquet:
            _check_column(parquet.schema_arrow, column, file.path)
            first = 0
            for group in range(parquet.num_row_groups):
                stop = first + parquet.metadata.row_group(group).num_rows
                rows = range(first, stop) if spans is None else _rows_within(spans, first, stop)
                if rows:
                    texts = parquet.read_row_group(group, columns=[column], use_threads=False).column(0)
                    for row in rows:
                        yield Document(row, row + 1, texts[row - first].as_py() or "")
                first = stop
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} is not a readable parquet file: {str(error).splitlines()[0]}") from error


def _rows_within(spans: Sequence[Span], first: int, stop: int) -> list[int]:
    return [row for start, end in spans for row in range(max(start, first), min(end, stop))]


def _check_column(schema: Any, column: str, path: str) -> None:
    import pyarrow as pa

    if column not in schema.names:
        raise UserError(f"{path}: no column {column!r}; there are {', '.join(schema.names)}")
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{path}: the column {column!r} must hold text, it holds {kind}")

"""Read documents from source files, all of them or those with given spans.

The span (start, stop) of a document is its position in the file: bytes for plain text and JSON lines (uncompressed
bytes in a gzipped file), rows for parquet.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal, cast

from lockstep.core.data import remote
from lockstep.core.data.sources import SourceFile
from lockstep.core.errors import UserError

Span = tuple[int, int]
OnBroken = Literal["error", "skip"]
# Reasons why a record is not a document; core/data/left_out.py has their descriptions.
Fault = Literal["skipped_documents", "null_documents", "broken_documents"]

# Bytes that are read at a time, from a plain text or from a column of parquet.
_CHUNK_BYTES = 1 << 20
_REMOTE_CHUNK_BYTES = 1 << 22
# Bytes of a plain text that are decoded at a time. Strings of a megabyte change size while they are decoded, and
# fragment glibc's heap: for a plain text of 400 MB the process grew by 107 MB.
_DECODED_BYTES = 1 << 13
# Rows of parquet that are converted to Python strings at a time.
_ROWS = 256
# Limit of a line, in bytes: in a compressed file, a few bytes may expand to a line of any length.
_LONGEST_LINE = 1 << 30


class _BrokenRecord(Exception):
    """An invalid record. The message describes the fault."""


@dataclass(frozen=True)
class Document:
    """A record and its span.

    Attributes:
        start, stop: the span.
        whole: the text, if it is in memory; None if `chunks` reads it, or if there is no text.
        fault: the reason why the record is not a document, or None.
        place: the position of the record, as text for messages.
        read: yields the text of a plain file in pieces; it can be called until the next document is requested.
    """

    start: int
    stop: int
    whole: str | None
    fault: Fault | None = None
    place: str = ""
    read: Callable[[], Iterator[str]] | None = field(default=None, compare=False)

    def chunks(self) -> Iterator[str]:
        """Yield the text in pieces, so that only one piece is in memory.

        Raises:
            UnicodeDecodeError: the bytes of a plain file are not UTF-8.
        """
        if self.read is not None:
            yield from self.read()
        elif self.whole is not None:
            yield self.whole

    @property
    def text(self) -> str | None:
        """The whole text; None if its bytes are not valid Unicode."""
        if self.read is None:
            return self.whole
        try:
            return "".join(self.chunks())
        except UnicodeDecodeError:
            return None


def read_documents(
    file: SourceFile, column: str, spans: Sequence[Span] | None = None, on_broken: OnBroken = "error"
) -> Iterator[Document]:
    """Yield the documents of `file` in order. The memory used does not grow with the file.

    A missing value (null) is yielded as an empty text with the fault `null_documents`.

    Args:
        file: the file; its kind selects the reader.
        column: the key (JSON lines) or the column (parquet) of the text; unused for plain text.
        spans: sorted, disjoint spans to read; a span may contain many documents. None reads the whole file.
        on_broken: for an invalid record, raise an error, or yield a document with the fault `broken_documents`. A
            record is invalid if it is not a JSON object with text in `column`, or if its bytes in a parquet column are
            not UTF-8.

    Raises:
        UserError: the file cannot be read, does not have the format that its name implies, or has no such column.
    """
    reader = {"text": _read_text, "jsonl": _read_json_lines, "parquet": _read_parquet}[file.kind]
    with _readable(file.path):
        for document in reader(file, column, spans):
            if isinstance(document, Document):
                yield document
            elif on_broken == "error":
                raise UserError(f"{document.error}; data.on_broken = 'skip' leaves such records out, and counts them")
            else:
                yield Document(document.start, document.stop, None, "broken_documents", document.place)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Convert an error of reading `path` inside the context to a UserError of one line."""
    try:
        with remote.explained(path):
            yield
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


@dataclass(frozen=True)
class _Broken:
    """An invalid record: its span, its place and a message of one line."""

    start: int
    stop: int
    place: str
    error: str


def _open(path: str) -> IO[bytes]:
    return remote.open_file(path) if remote.protocol_of(path) else open(path, "rb")


def _read_text(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document]:
    with _open(file.path) as stream:
        if spans is None:
            # Skip a byte order mark, which some editors write at the beginning.
            marked = stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
            spans = [(len(codecs.BOM_UTF8) if marked else 0, file.size)]
        for start, stop in spans:
            yield Document(start, stop, None, place=file.name, read=_TextReader(file, stream, start, stop))


@dataclass(frozen=True)
class _TextReader:
    """A reader of the bytes from `start` to `stop` of an open file; each call reads them from the beginning."""

    file: SourceFile
    stream: IO[bytes]
    start: int
    stop: int

    def __call__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = self.start
        while position < self.stop:
            with _readable(self.file.path):
                self.stream.seek(position)
                raw = self.stream.read(min(_CHUNK_BYTES, self.stop - position))
            if not raw:
                raise UserError(
                    f"{self.file.path} was changed while the data was being prepared; run the command again"
                )
            for first in range(0, len(raw), _DECODED_BYTES):
                piece = raw[first : first + _DECODED_BYTES]
                position += len(piece)
                if text := decoder.decode(piece, final=position == self.stop):
                    yield text


def line_end(file: SourceFile, start: int, stop: int, wanted: int) -> int | None:
    """Return the byte after the end of a line of a plain text: of the last line that ends in [start, wanted).

    If no line ends there, return the first end after `wanted`; None if no line ends in [start, stop).
    """
    with _readable(file.path), _open(file.path) as stream:
        upper = wanted
        while upper > start:
            lower = max(start, upper - _CHUNK_BYTES)
            stream.seek(lower)
            if (found := stream.read(upper - lower).rfind(b"\n")) >= 0:
                return lower + found + 1
            upper = lower
        stream.seek(wanted)
        while wanted < stop and (raw := stream.read(min(_CHUNK_BYTES, stop - wanted))):
            if (found := raw.find(b"\n")) >= 0:
                return wanted + found + 1
            wanted += len(raw)
    return None


def _read_json_lines(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document | _Broken]:
    with _open_maybe_gzip(file.path) as stream:
        for start, stop in [(0, None)] if spans is None else spans:
            stream.seek(start)
            position = start
            while stop is None or position < stop:
                line = stream.readline(_LONGEST_LINE + 1)
                if not line:
                    break
                begin, position = position, position + len(line)
                place = f"at byte {begin}"
                if len(line) > _LONGEST_LINE:
                    line = b""
                    position += _to_the_line_end(stream)
                    error = f"{file.path}, {place}: a line of more than {_LONGEST_LINE:,} bytes"
                    yield _Broken(begin, position, f"{file.name}, {place}", error)
                elif line.strip():
                    yield _json_document(line, column, file, begin, position)


def _to_the_line_end(stream: IO[bytes]) -> int:
    """Read to the end of the line, and return the number of bytes read."""
    count = 0
    while rest := stream.readline(_CHUNK_BYTES):
        count += len(rest)
        if rest.endswith(b"\n"):
            break
    return count


def _open_maybe_gzip(path: str) -> IO[bytes]:
    if path.lower().endswith(".gz"):
        packed = gzip.GzipFile(fileobj=(stream := _open(path)), mode="rb")
        # GzipFile closes `myfileobj`, as if it had opened the file itself.
        packed.myfileobj = cast(Any, stream)
        return cast(IO[bytes], packed)
    stream = _open(path)
    # Buffer a file of fsspec, which reads lines slowly, in Python code.
    return io.BufferedReader(cast(io.RawIOBase, stream), _CHUNK_BYTES) if remote.protocol_of(path) else stream


def _json_document(line: bytes, column: str, file: SourceFile, begin: int, end: int) -> Document | _Broken:
    place = f"{file.name}, at byte {begin}"
    try:
        text = _json_text(line, column)
    except _BrokenRecord as error:
        return _Broken(begin, end, place, f"{file.path}, at byte {begin}: {error}")
    if text is None:
        return Document(begin, end, "", "null_documents", place)
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON can contain half of a surrogate pair, which has no UTF-8 encoding.
        return Document(begin, end, None, "skipped_documents", place)
    return Document(begin, end, text, place=place)


def _json_text(line: bytes, column: str) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BrokenRecord(f"not a line of JSON ({error}); every line must be one JSON object") from error
    if not isinstance(record, dict):
        raise _BrokenRecord(f"a line of JSON lines must be an object, not {_kind(record)}")
    if column not in record:
        raise _BrokenRecord(f"no column {column!r}; there are {', '.join(sorted(record)) or 'none'}")
    text = record[column]
    if text is None or isinstance(text, str):
        return text
    raise _BrokenRecord(f"the column {column!r} must hold text, not {_kind(text)}")


def _kind(value: Any) -> str:
    """Return the kind of a JSON value, as text for a message."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _read_parquet(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document | _Broken]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    address = remote.protocol_of(file.path)
    source = remote.open_file(file.path, ranges=True) if address else file.path
    buffer = _REMOTE_CHUNK_BYTES if address else _CHUNK_BYTES
    try:
        # Use a buffer and do not read ahead: otherwise a whole row group, which may be the whole file, is in memory.
        # Verify checksums of pages if the writer stored them: a damaged page may decompress to other text.
        with pq.ParquetFile(source, buffer_size=buffer, pre_buffer=False, page_checksum_verification=True) as parquet:
            _check_column(parquet.schema_arrow, column, file.path)
            first = 0
            for group in range(parquet.num_row_groups):
                stop = first + parquet.metadata.row_group(group).num_rows
                rows = range(first, stop) if spans is None else _rows_within(spans, first, stop)
                if rows:
                    yield from _rows_of_group(parquet, group, first, rows, column, file)
                first = stop
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} is not a readable parquet file: {str(error).splitlines()[0]}") from error


def _rows_of_group(
    parquet: Any, group: int, first: int, rows: Sequence[int], column: str, file: SourceFile
) -> Iterator[Document | _Broken]:
    wanted = iter(rows)
    row = next(wanted)
    for batch in parquet.iter_batches(_ROWS, row_groups=[group], columns=[column], use_threads=False):
        texts = batch.column(0)
        while row < first + len(texts):
            yield _parquet_document(texts[row - first], row, file)
            if (row := next(wanted, -1)) < 0:
                return
        first += len(texts)


def _parquet_document(value: Any, row: int, file: SourceFile) -> Document | _Broken:
    place = f"{file.name}, row {row}"
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return _Broken(row, row + 1, place, f"{file.path}, row {row}: not UTF-8 text ({error.reason})")
    return Document(row, row + 1, text or "", "null_documents" if text is None else None, place)


def _rows_within(spans: Sequence[Span], first: int, stop: int) -> list[int]:
    return [row for start, end in spans for row in range(max(start, first), min(end, stop))]


def _check_column(schema: Any, column: str, path: str) -> None:
    import pyarrow as pa

    if column not in schema.names:
        raise UserError(f"{path}: no column {column!r}; there are {', '.join(schema.names)}")
    if schema.names.count(column) > 1:
        raise UserError(f"{path}: {schema.names.count(column)} columns have the name {column!r}")
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{path}: the column {column!r} must hold text, it holds {kind}")

"""Reading documents out of source files, all of them or only those at known places.

A document is known by its span (start, stop) in its file: bytes for plain text and for JSON lines
(uncompressed bytes where the file is gzipped), rows for parquet.
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
# Why a record gives no document; core/data/left_out.py has them in words.
Fault = Literal["skipped_documents", "null_documents", "broken_documents"]

# Read of a plain text at a time, and of a column of parquet.
_CHUNK_BYTES = 1 << 20
_REMOTE_CHUNK_BYTES = 1 << 22
# Decoded of a plain text at a time. Strings of a megabyte, which grow and shrink as they are decoded, leave holes in
# glibc's heap that fit no later one: the process of a plain text of 400 MB grew by 107 MB.
_DECODED_BYTES = 1 << 13
# Rows of parquet that are Python strings at the same time.
_ROWS = 256
# No document is so long; a few compressed bytes can be any number of the same one.
_LONGEST_LINE = 1 << 30


class _BrokenRecord(Exception):
    """A record that is not what its file should hold; the message names its place."""


@dataclass(frozen=True)
class Document:
    """A record and its span.

    Attributes:
        start, stop: the span.
        whole: the text where it is in memory; None where it is read by `chunks`, or there is none.
        fault: why it is no document, or None.
        place: where it is, for people.
        read: yields the text of a plain file piece by piece, as long as no further document was asked for.
    """

    start: int
    stop: int
    whole: str | None
    fault: Fault | None = None
    place: str = ""
    read: Callable[[], Iterator[str]] | None = field(default=None, compare=False)

    def chunks(self) -> Iterator[str]:
        """Yield the text in pieces, of which only one need be in memory.

        Raises:
            UnicodeDecodeError: the bytes of a plain file are no UTF-8.
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
    """Yield the documents of `file` in order, in memory that does not grow with the file.

    Args:
        file: the file to read, by its kind.
        column: the key (JSON lines) or the column (parquet) that holds the text; unused for plain text.
        spans: only what lies in these sorted, disjoint spans; a span may hold many documents. None: all.
        on_broken: raise an error for a record that is no JSON object with text in `column`, or whose bytes in a column
            of parquet are no UTF-8; or yield a document with the fault `broken_documents`.

    A missing value (null) is yielded as the empty text with the fault `null_documents`.

    Raises:
        UserError: the file cannot be read, is not of the format in its name, or has no such column.
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
    """Raise any error of reading `path`, inside the block, as a one-line UserError."""
    try:
        with remote.explained(path):
            yield
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


@dataclass(frozen=True)
class _Broken:
    """A broken record: its span, its place and the line that names the fault."""

    start: int
    stop: int
    place: str
    error: str


def _open(path: str) -> IO[bytes]:
    return remote.open_file(path) if remote.protocol_of(path) else open(path, "rb")


def _read_text(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document]:
    with _open(file.path) as stream:
        if spans is None:
            # A byte order mark, which some editors write first, is no text.
            marked = stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
            spans = [(len(codecs.BOM_UTF8) if marked else 0, file.size)]
        for start, stop in spans:
            yield Document(start, stop, None, place=file.name, read=_TextReader(file, stream, start, stop))


@dataclass(frozen=True)
class _TextReader:
    """A reader of the bytes from `start` to `stop` of an open file; each call decodes from the first one again."""

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
    """Return where a line of a plain text ends, as a byte of the file: the last end in [start, wanted), else the next.

    None if no line ends in [start, stop).
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
    """Read on to the end of a line, and return how many bytes that were."""
    count = 0
    while rest := stream.readline(_CHUNK_BYTES):
        count += len(rest)
        if rest.endswith(b"\n"):
            break
    return count


def _open_maybe_gzip(path: str) -> IO[bytes]:
    if path.lower().endswith(".gz"):
        packed = gzip.GzipFile(fileobj=(stream := _open(path)), mode="rb")
        # Closed with it, as where gzip opens the file.
        packed.myfileobj = cast(Any, stream)
        return cast(IO[bytes], packed)
    stream = _open(path)
    # A file of fsspec's reads a line in small steps of Python.
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
        # JSON can spell half of a surrogate pair, which no encoding of Unicode can hold.
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
    """Return a JSON value's kind, in words."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _read_parquet(file: SourceFile, column: str, spans: Sequence[Span] | None) -> Iterator[Document | _Broken]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    address = remote.protocol_of(file.path)
    source = remote.open_file(file.path, ranges=True) if address else file.path
    buffer = _REMOTE_CHUNK_BYTES if address else _CHUNK_BYTES
    try:
        # A buffer and no reading ahead: else a group of rows, of which a file may have one, is in memory as a whole.
        # Checksums of pages, where the writer stored them: without them a damaged page may decompress to other text.
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

"""Find the documents: the files behind a folder, a glob, a file, or nothing at all."""

from __future__ import annotations

import glob
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lockstep.core.errors import UserError

Kind = Literal["text", "jsonl", "parquet"]

_JSON_LINES = (".jsonl", ".json.l", ".ndjson")
_JSON_LINES_SUFFIXES = _JSON_LINES + tuple(f"{suffix}.gz" for suffix in _JSON_LINES)
_PARQUET_SUFFIXES = (".parquet", ".pq")
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, as it was when it was listed.

    `name` is the path relative to the source's root, with forward slashes; `size` is in bytes and
    `mtime_ns` in nanoseconds.
    """

    path: str
    name: str
    kind: Kind
    size: int
    mtime_ns: int

    def unchanged(self) -> bool:
        """Return whether the file on the disk still has the size and time that were listed."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class SourceListing:
    """The files of a source, sorted by name. `description` says in words which source it was."""

    description: str
    files: tuple[SourceFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files together, compressed where they are compressed."""
        return sum(file.size for file in self.files)


def list_source(source: str | None, *, exclude: Path | None = None) -> SourceListing:
    """List the files of `source` in an order that depends on nothing but their names.

    Args:
        source: a file, a folder (searched to the bottom; names that begin with a dot are left out), a
            glob (`**` goes down folders), or None for the running Python's standard library.
        exclude: a folder whose contents are left out: the output, which may lie inside the source.

    Raises:
        UserError: nothing is there, or it cannot be read.
    """
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        description = f"standard library of Python {platform.python_version()} ({root})"
        paths = list(_standard_library(root))
    else:
        root, paths = _resolve(source)
        description = str(Path(source).expanduser().absolute())
    if exclude is not None:
        excluded = exclude.absolute()
        paths = [path for path in paths if not path.is_relative_to(excluded)]
    if not paths:
        raise UserError(f"no files in the source {description}; give a folder, a file or a glob with text in it")
    named = sorted((path.relative_to(root).as_posix(), path) for path in set(paths))
    parquet = [name for name, _ in named if kind_of(name) == "parquet"]
    if parquet and find_spec("pyarrow") is None:
        raise UserError(
            f"{parquet[0]} in the source {description} is parquet, which needs pyarrow: pip install pyarrow"
        )
    return SourceListing(description, tuple(_describe(name, path) for name, path in named))


def kind_of(name: str) -> Kind:
    """How a file is read, by its name: JSON lines (also gzipped), parquet, or else plain text."""
    lowered = name.lower()
    if lowered.endswith(_JSON_LINES_SUFFIXES):
        return "jsonl"
    return "parquet" if lowered.endswith(_PARQUET_SUFFIXES) else "text"


def _resolve(source: str) -> tuple[Path, list[Path]]:
    path = Path(source).expanduser().absolute()
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        return path, list(_walk(path))
    if glob.has_magic(source):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = [match for match in matches if match.is_file()]
        if files:
            return Path(os.path.commonpath([file.parent for file in files])), files
        raise UserError(f"no file matches the source {source}; quote the pattern and check the folder in it")
    raise UserError(f"the source {source} does not exist; give a file, a folder or a glob")


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot list the folder {error.filename}: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            # Pipes and sockets are not documents, and opening a pipe would wait for ever.
            if not name.startswith(".") and path.is_file():
                yield path


def _standard_library(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        if not _NOT_STANDARD_LIBRARY.intersection(path.relative_to(root).parts) and path.is_file():
            yield path


def _describe(name: str, path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return SourceFile(str(path), name, kind_of(name), status.st_size, status.st_mtime_ns)

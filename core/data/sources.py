"""List the files of a source: a folder, a glob, a file, a remote address, or Python's standard library."""

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

from lockstep.core.data import remote
from lockstep.core.errors import UserError

Kind = Literal["text", "jsonl", "parquet"]

_JSON_LINES = (".jsonl", ".json.l", ".ndjson")
_JSON_LINES_SUFFIXES = _JSON_LINES + tuple(f"{suffix}.gz" for suffix in _JSON_LINES)
_PARQUET_SUFFIXES = (".parquet", ".pq")
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, at the time of the listing.

    name: path relative to the source's root, with forward slashes. size: bytes. mtime_ns: time of the last change in
    nanoseconds. version: for a remote file, the server's id of this version (an ETag); with a version, `mtime_ns` is 0.
    """

    path: str
    name: str
    kind: Kind
    size: int
    mtime_ns: int
    version: str = ""

    def unchanged(self) -> bool:
        """Return whether the file still has the listed size, and the listed time or version.

        Raises:
            UserError: the server does not answer.
        """
        if remote.protocol_of(self.path):
            found = remote.describe(self.path)
            return (found.size, found.mtime_ns, found.version) == (self.size, self.mtime_ns, self.version)
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class SourceListing:
    """The files of a source, sorted by name. description: the name of the source for messages."""

    description: str
    files: tuple[SourceFile, ...]

    @property
    def size(self) -> int:
        """The total bytes of all files, compressed if the files are compressed."""
        return sum(file.size for file in self.files)

    @property
    def in_this_process(self) -> bool:
        """True if the files are objects of this process (`memory://`), which another process cannot read."""
        return any(remote.protocol_of(file.path) == "memory" for file in self.files)


def list_source(source: str | None, *, exclude: Path | None = None) -> SourceListing:
    """List the files of `source`, sorted by name.

    Args:
        source: a file, a folder (searched with its subfolders, without names that begin with a dot), a glob (`**`
            includes subfolders), a remote address of any of these (`s3://bucket/folder`), or None for the standard
            library of the running Python.
        exclude: a folder whose contents are omitted: the output, which may be inside the source.

    Raises:
        UserError: there are no files, or the source cannot be read.
    """
    if source is not None and remote.protocol_of(source := remote.normalized(source)):
        description, files = _at_address(source)
    else:
        description, files = _of_this_machine(source, exclude)
    if not files:
        raise UserError(f"no files in the source {description}; give a folder, a file or a glob with text in it")
    files.sort(key=lambda file: file.name)
    parquet = [file.name for file in files if file.kind == "parquet"]
    if parquet and find_spec("pyarrow") is None:
        raise UserError(
            f"{parquet[0]} in the source {description} is parquet, which needs pyarrow: pip install pyarrow"
        )
    return SourceListing(description, tuple(files))


def _at_address(source: str) -> tuple[str, list[SourceFile]]:
    root, found = remote.list_files(source)
    files = []
    for file in found:
        name = file.path.removeprefix(root).lstrip("/")
        files.append(SourceFile(file.path, name, kind_of(name), file.size, file.mtime_ns, file.version))
    return source.rstrip("/"), files


def _of_this_machine(source: str | None, exclude: Path | None) -> tuple[str, list[SourceFile]]:
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
    return description, [_describe(path.relative_to(root).as_posix(), path) for path in set(paths)]


def kind_of(name: str) -> Kind:
    """Return the kind of a file from its name: JSON lines (also gzipped), parquet, or plain text for other names."""
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
            # Skip pipes and sockets: opening a pipe would block forever.
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

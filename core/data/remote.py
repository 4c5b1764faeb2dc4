"""Files at remote addresses (`s3://bucket/key`), listed, described and opened by fsspec's file systems.

Each library finds credentials by itself (environment, its own files, the machine's role). Addresses, plans, indexes and
messages never contain credentials.
"""

from __future__ import annotations

import contextlib
import functools
import io
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from glob import has_magic
from typing import IO, Any, cast

from lockstep.core.errors import UserError

# Protocol → the package that fsspec needs for it.
PROTOCOLS = {
    "memory": "fsspec",
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "az": "adlfs",
    "abfs": "adlfs",
}
_LOCAL = ("file", "local")
_S3_LOGIN = "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket"
_GS_LOGIN = "run `gcloud auth application-default login`, or set FSSPEC_GS_TOKEN=anon for a public bucket"
_LOGIN = {
    "s3": _S3_LOGIN,
    "s3a": _S3_LOGIN.replace("_S3_", "_S3A_"),
    "gs": _GS_LOGIN,
    "gcs": _GS_LOGIN.replace("_GS_", "_GCS_"),
    "hf": "run `hf auth login` or set HF_TOKEN",
}


@dataclass(frozen=True)
class _Patience:
    """The timeout of a request in seconds, and its number of attempts."""

    seconds: int
    tries: int


_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

# Keys of a file's description that differ between versions of the file, by library, and keys of its time.
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "md5Hash")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")

# While a source is listed, a server without an answer is an error after a few seconds. Later, timeouts are longer: a
# server that is busy for a moment must not end hours of work.
_CONNECT_SECONDS = 4
_TO_LIST, _TO_READ = _Patience(5, 2), _Patience(20, 5)
# Bytes per request, so that a text file needs few requests.
_REQUEST_BYTES = 1 << 23


@dataclass(frozen=True)
class RemoteFile:
    """The server's description of a file. version: its ETag or a similar id; if it is empty, `mtime_ns` is used."""

    path: str
    size: int
    mtime_ns: int
    version: str


def protocol_of(path: str) -> str | None:
    """Return the protocol of an address; None for a local path."""
    match = _ADDRESS.match(path)
    return match[1] if match else None


def normalized(source: str) -> str:
    """Return the path of a `file://` address, another address with its protocol in lower case, or a local path."""
    match = _ADDRESS.match(source)
    if match is None:
        return source
    protocol, path = match[1].lower(), match[2]
    return path if protocol in _LOCAL else f"{protocol}://{path}"


def list_files(source: str) -> tuple[str, list[RemoteFile]]:
    """List the files at an address: a file, a folder with its subfolders, or a glob. Returns (common root, files).

    Names that begin with a dot are omitted, as in a local folder.

    Raises:
        UserError: an unsupported address, a missing package, or a server that refuses access or cannot be reached.
    """
    with explained(source):
        system = _system(source)
        root = cast(str, system._strip_protocol(source))
        if has_magic(root):
            found = system.glob(root, detail=True)
            files = _shown(found.values(), root)
            root = posixpath.commonpath([posixpath.dirname(info["name"]) for info in files]) if files else root
        elif (info := system.info(root))["type"] == "file":
            root, files = posixpath.dirname(info["name"]), [info]
        else:
            files = _shown(system.find(root, detail=True).values(), root)
            if not files:
                # An empty answer of `find` may be a server's refusal, which `ls` raises.
                system.ls(root)
        listed = [_described(system, info) for info in files]
    return cast(str, system.unstrip_protocol(root)).rstrip("/"), listed


def describe(path: str) -> RemoteFile:
    """Fetch the current description of the file at `path`. Raises UserError if the server refuses or has no file."""
    with explained(path):
        system = _system(path)
        return _described(system, system.info(system._strip_protocol(path)))


def open_file(path: str, *, ranges: bool = False) -> IO[bytes]:
    """Open the file at `path` for reading. ranges: optimise for random access, not for reading in order.

    Raises:
        UserError: the server refuses access, or there is no such file.
    """
    with explained(path):
        system = _system(path, _TO_READ)
        name = system._strip_protocol(path)
        if system.protocol == "memory":
            # The file system's own object has one position, which all readers would share.
            return io.BytesIO(system.cat_file(name))
        caching = {"cache_type": "none"} if ranges else {"cache_type": "readahead", "block_size": _REQUEST_BYTES}
        return cast(IO[bytes], system.open(name, "rb", **caching))


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Convert an error of a file system's library inside the context to a UserError of one line with the remedy.

    Errors of local paths are raised unchanged.
    """
    protocol = protocol_of(path)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each library has its own exceptions
        if protocol is None:
            raise
        raise UserError(_in_words(path, protocol, error)) from error


def _system(path: str, patience: _Patience = _TO_LIST) -> Any:
    protocol, _, rest = path.partition("://")
    if protocol not in PROTOCOLS:
        raise UserError(
            f"{protocol}:// is not read as a source; give s3://, gs://, hf://, az:// or a path of this machine"
        )
    if "@" in rest.split("/", 1)[0]:
        raise UserError(
            f"leave credentials out of the {protocol}:// address, which Lockstep stores; {_login(protocol)}"
        )
    if not rest.strip("/"):
        raise UserError(f"{path} names nothing; give {protocol}://, a bucket, and a path in it")
    return _connected(protocol, patience)


@functools.lru_cache
def _connected(protocol: str, patience: _Patience) -> Any:
    import fsspec

    if protocol == "memory":
        return fsspec.filesystem(protocol)
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol in ("s3", "s3a"):
        of_user = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": patience.seconds}
        # Disable botocore's retries, which would multiply those of s3fs.
        options["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}, **of_user}
    system = fsspec.filesystem(protocol, **options)
    if protocol in ("s3", "s3a"):
        system.retries = patience.tries
    return system


def _described(system: Any, info: dict[str, Any]) -> RemoteFile:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "").strip('"')
    changed = next((info[key] for key in _TIMES if info.get(key)), None)
    # A copy of the same bytes with the same ETag is the same file, so the time is ignored.
    mtime_ns = 0 if version else _nanoseconds(changed)
    return RemoteFile(system.unstrip_protocol(info["name"]), int(info["size"] or 0), mtime_ns, version)


def _nanoseconds(moment: Any) -> int:
    """Convert a library's time (seconds, a datetime, or a datetime as text) to nanoseconds, rounded to microseconds."""
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    seconds = moment.timestamp() if isinstance(moment, datetime) else float(moment or 0)
    return round(seconds * 1e6) * 1000


def _shown(found: Iterable[dict[str, Any]], root: str) -> list[dict[str, Any]]:
    """Return the files of `found`, without files below `root` whose name or folder begins with a dot."""
    return [
        info
        for info in found
        # An object whose name ends with a slash is empty, and represents a folder.
        if info["type"] == "file" and not info["name"].endswith("/") and not _is_hidden(info["name"], root)
    ]


def _is_hidden(name: str, root: str) -> bool:
    # For a glob, test all parts of the name: `*` does not match a leading dot.
    below = name.split("/")[len(root.rstrip("/").split("/")) :] if not has_magic(root) else name.split("/")
    return any(part.startswith(".") for part in below)


def _login(protocol: str) -> str:
    return _LOGIN.get(protocol, "see the documentation of its package for how it finds credentials")


def _in_words(path: str, protocol: str, error: BaseException) -> str:
    """Describe the remedy, and the error by its code or class: its own message may contain parts of a request."""
    if isinstance(error, ImportError):
        return f"{path} needs {PROTOCOLS[protocol]}: pip install {PROTOCOLS[protocol]}"
    chain = list(_causes(error))
    names = " ".join(type(one).__name__ for one in chain)
    code = next(filter(None, map(_code, chain)), "")
    said = code or type(error).__name__
    if re.search("Credential|Auth|Token|Permission|Gated|Forbidden", f"{names} {code}") or code in ("401", "403"):
        return f"access to {path} was refused ({said}): credentials are missing, wrong or expired; {_login(protocol)}"
    if isinstance(error, FileNotFoundError) or re.search("NotFound|NoSuch|404", f"{names} {code}"):
        return f"there is nothing at {path} ({said}); check the address"
    if "FileExpired" in names or "Precondition" in code or code == "412":
        return f"{path} was changed while the data was being prepared; run the command again"
    if re.search("Connect|Timeout|HTTPClient|NameResolution|SSL|gaierror", names):
        variable = {"s3": "AWS_ENDPOINT_URL", "s3a": "AWS_ENDPOINT_URL", "hf": "HF_ENDPOINT"}.get(protocol)
        also = f" and {variable}" if variable else ""
        return f"{path} cannot be reached ({said}); check the network{also}, and run the command again"
    return f"cannot read {path}: {said}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _code(error: BaseException) -> str:
    """Return a server's error code (`ExpiredToken`, 403); "" if there is none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("Error", {}).get("Code", "")
    else:
        found = getattr(error, "code", None) or getattr(response, "status_code", "")
    return str(found) if re.fullmatch("[A-Za-z0-9]{1,40}", str(found)) else ""

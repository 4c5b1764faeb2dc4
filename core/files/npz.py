"""npz files read whole: every byte that counts is under a checksum, and nothing is unpickled or unpacked.

Arrays are stored as they are, so that a file takes no more memory than it has bytes: a few compressed kilobytes would
unpack to any size.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_whole

# By version; 3.0 is for names of fields, of which there are none.
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# Where a zip file without a comment holds its number of members.
_COUNT = slice(-12, -10)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file by name. Raises UserError if it is missing or is not what was written."""
    return arrays_of(read_whole(path), path)


def arrays_of(raw: bytes, path: Path) -> dict[str, np.ndarray]:
    """Return the arrays in the bytes of the npz file at `path`. Raises UserError if they are not what was written."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as members:
            damaged = _unbounded(members, len(raw))
            # numpy reads only as far as an array's header states, so that a damaged header escapes the checksum.
            damaged = damaged or members.testzip()
            # zipfile does not count either: a damaged length in its directory swallows the next member.
            if len(members.namelist()) != int.from_bytes(raw[_COUNT], "little"):
                damaged = "its directory"
        if damaged is None:
            with np.load(io.BytesIO(raw), allow_pickle=False) as file:
                return dict(file)
    except Exception as error:  # zipfile and numpy raise some ten kinds of errors for damaged files
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    raise UserError(f"{path} is damaged: {damaged} is not what was written")


def _unbounded(members: zipfile.ZipFile, size: int) -> str | None:
    """Return the first member that would take more memory than the file's `size`; None if there is none."""
    for member in members.infolist():
        size -= member.file_size
        if member.compress_type != zipfile.ZIP_STORED or size < 0:
            return member.filename
        with members.open(member) as file:
            version = np.lib.format.read_magic(file)
            shape, _, dtype = _HEADERS[version](file)
        if math.prod(shape) * dtype.itemsize > member.file_size:
            return member.filename
    return None

"""npz files read whole: every byte that counts is under a checksum, and nothing is unpickled."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_whole

# Where a zip file without a comment says how many members it has.
_COUNT = slice(-12, -10)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file by name. Raises UserError if it is missing or is not what was written."""
    raw = read_whole(path)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as members:
            # numpy reads no further than an array's own header says, so that a damaged header escapes the checksum.
            damaged = members.testzip()
            # Nor does zipfile count: a damaged length in its directory swallows the next member.
            if len(members.namelist()) != int.from_bytes(raw[_COUNT], "little"):
                damaged = "its directory"
        if damaged is None:
            with np.load(io.BytesIO(raw), allow_pickle=False) as file:
                return dict(file)
    except Exception as error:  # zipfile and numpy raise some ten kinds of what they find in damaged files
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    raise UserError(f"{path} is damaged: {damaged} is not what was written")

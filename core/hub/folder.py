"""Read a Hugging Face folder as untrusted data: config.json and safetensors, with an index or without. No pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import is_inside, leads_out, require_file
from lockstep.core.hub.dtypes import WEIGHTS
from lockstep.core.model.graph import Shape

CONFIG, GENERATION, WEIGHTS_FILE, INDEX = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
# Endings of pickles there.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Ten times the size of the largest known files.
_LARGEST_CONFIG, _LARGEST_INDEX = 1 << 20, 1 << 26
_NAMED = 3


@dataclass(frozen=True)
class Where:
    """The location of a tensor: its file, format as safetensors calls it, and shape."""

    file: Path
    dtype: str
    shape: Shape


class HubFolder:
    """A folder whose files have been examined; a tensor is read on request.

    path: the folder. config: config.json. tensors: their tensors by name. files: of the weights, in order.
    """

    def __init__(self, path: Path) -> None:
        """Read config.json and the headers of the weights.

        Raises UserError that names what is wrong: a file that is missing, cut short, no safetensors, a pickle, or
        elsewhere; a tensor that is not where the index has it, or whose numbers are no floats.
        """
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path} is not a model folder: it needs {CONFIG} and {WEIGHTS_FILE}")
        self.config = read_object(self._file(CONFIG), _LARGEST_CONFIG)
        self._index = self._read_index()
        self.files = self._files()
        self.tensors: dict[str, Where] = {}
        for file in self.files:
            for name, where in _header(file):
                if name in self.tensors:
                    raise UserError(f"{file}: {name} is in {self.tensors[name].file.name} as well")
                self.tensors[name] = where
        self._require_index()
        for name, where in self.tensors.items():
            if where.dtype not in WEIGHTS:
                raise UserError(f"{where.file}: {name} is of {where.dtype}; weights are of {', '.join(WEIGHTS)}")

    def read(self, name: str) -> np.ndarray:
        """Read a tensor as it is in its file. Raises UserError if it can no longer be read."""
        where = self.tensors[name]
        with _opened(where.file) as file:
            found: np.ndarray = file.get_tensor(name)
        return found

    def _file(self, name: str) -> Path:
        path = self.path / name
        if leads_out(path, self.path):
            raise UserError(f"{path} is a link to outside the folder; copy the file into the folder")
        if not path.exists():
            raise UserError(f"{path} is missing")
        if not path.is_file():
            raise UserError(f"cannot read {path}: it is not a regular file")
        return path

    def _read_index(self) -> dict[str, str] | None:
        if not (self.path / INDEX).is_symlink() and not (self.path / INDEX).exists():
            return None
        path = self._file(INDEX)
        if (self.path / WEIGHTS_FILE).exists():
            raise UserError(f"{self.path} holds both {WEIGHTS_FILE} and {INDEX}: remove one of them")
        found = read_object(path, _LARGEST_INDEX).get("weight_map")
        if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
            raise UserError(f"{path}: weight_map must name a file for each tensor")
        for name in dict.fromkeys(found.values()):
            if Path(name).suffix in PICKLES:
                raise UserError(f"{path} names {name}: a pickle is a program and is not read; safetensors are")
            if not is_inside(name) or "\\" in name or "\0" in name:
                raise UserError(f"{path} names {name!r}, which is not a file of this folder")
            if Path(name).suffix != ".safetensors":
                raise UserError(f"{path} names {name}, which is not a safetensors file")
        return found

    def _files(self) -> list[Path]:
        if self._index is not None:
            return [self._file(name) for name in dict.fromkeys(self._index.values())]
        if (self.path / WEIGHTS_FILE).exists() or (self.path / WEIGHTS_FILE).is_symlink():
            return [self._file(WEIGHTS_FILE)]
        pickles = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise UserError(
                f"{self.path} holds its weights as a pickle ({pickles[0]}), which is a program and is not read; "
                f"ask for {WEIGHTS_FILE}"
            )
        raise UserError(f"{self.path} has neither {WEIGHTS_FILE} nor {INDEX}")

    def _require_index(self) -> None:
        if self._index is None:
            return
        for name, file in self._index.items():
            found = self.tensors.get(name)
            if found is None or found.file != self.path / file:
                raise UserError(f"{self.path / INDEX}: {name} is not in {file}")
        if extra := sorted(self.tensors.keys() - self._index.keys()):
            raise UserError(f"{self.tensors[extra[0]].file}: {listed(extra)}: not in {INDEX}")


def listed(names: list[str]) -> str:
    """List the first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def read_object(path: Path, largest: int) -> dict[str, Any]:
    """Read a file that holds one JSON object without NaN, infinities and keys that stand there twice.

    Raises UserError if it does not, or has more bytes than `largest`.
    """
    require_file(path)

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not a JSON number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")
        return found

    try:
        with path.open("rb") as file:
            raw = file.read(largest + 1)
        if len(raw) > largest:
            raise UserError(f"{path} is larger than {largest:,} bytes")
        found = json.loads(raw, parse_constant=refuse, object_pairs_hook=once)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold an object of JSON, not {type(found).__name__}")
    return found


def _header(path: Path) -> Iterator[tuple[str, Where]]:
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            piece = file.get_slice(name)
            yield name, Where(path, piece.get_dtype(), tuple(piece.get_shape()))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import ml_dtypes  # noqa: F401 - makes bf16 a format of numpy's
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged, or is not a safetensors file: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error

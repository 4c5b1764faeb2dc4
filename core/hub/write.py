"""Write a Hugging Face folder of a state's parameters; it is read back and compared before it gets its name."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.tokenizer import TextTokenizer
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import flush_folder
from lockstep.core.files.new_folder import new_folder
from lockstep.core.hub.config import config_of
from lockstep.core.hub.dtypes import NAMES, narrowed
from lockstep.core.hub.families import HUB
from lockstep.core.hub.family import HubFamily
from lockstep.core.hub.folder import CONFIG, GENERATION, INDEX, WEIGHTS_FILE, HubFolder
from lockstep.core.hub.read import HubModel
from lockstep.core.hub.tensors import stored_tensors, to_theirs
from lockstep.core.hub.tokenizer import write_json, write_tokenizer
from lockstep.core.model.families import as_read

# generation_config.json lists at most this many rows without a token; a longer list would exceed the other files.
MOST_SUPPRESSED = 4096


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    architecture: as config.json names it. tensors, numbers: how many were written. files: of weights. rounded: the
    largest relative change of a number by rounding, 0 if all are as they were.
    """

    architecture: str
    tensors: int
    numbers: int
    files: int
    rounded: float


@dataclass
class _Shard:
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    size: int = 0


def require_family(config: RunConfig) -> HubFamily:
    """Return the family of a run as Hugging Face has it. Raises UserError if it has none that is known here."""
    if (family := HUB.get(config.model.family)) is None:
        raise UserError(f"model.family = {config.model.family!r}: only {', '.join(HUB)} can be exported")
    return family


def write_folder(
    path: Path, config: RunConfig, params: Arrays, tokenizer: TextTokenizer, dtype: str, shard_bytes: int
) -> Exported:
    """Write a folder that transformers loads, read it back, and compare every bit.

    dtype: fp32, bf16 or fp64. shard_bytes: of tensors in one file; a larger model has several and an index.
    Raises UserError if the architecture cannot express the model, if `path` is there, if the disk refuses, or if it
    does not come back bit for bit; nothing is left then.
    """
    family = require_family(config)
    settings = config_of(config.model, family, config.train.longest)
    end = tokenizer.eot_id
    with new_folder(path) as folder:
        folder.mkdir()
        files, numbers, tensors, rounded = _write_weights(folder, family, config, params, dtype, shard_bytes)
        # `torch_dtype` is its name before transformers 5.
        formats = {"dtype": NAMES[dtype], "torch_dtype": NAMES[dtype]}
        ends = {"bos_token_id": end, "eos_token_id": end}
        write_json(folder / CONFIG, {**settings, **formats, **ends, "use_cache": True})
        write_json(folder / GENERATION, {**ends, **_suppressed(config.model.vocab_size, tokenizer)})
        write_tokenizer(folder, tokenizer, config.train.longest)
        _require_bits(folder, config, params, dtype)
    return Exported(family.architecture, tensors, numbers, files, rounded)


def _suppressed(rows: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return rows of the vocabulary without a token; `lockstep sample` never draws them."""
    unused = list(range(tokenizer.vocab_size, rows))
    return {"suppress_tokens": unused} if 0 < len(unused) <= MOST_SUPPRESSED else {}


def _write_weights(
    folder: Path, family: HubFamily, config: RunConfig, params: Arrays, dtype: str, shard_bytes: int
) -> tuple[int, int, int, float]:
    """Write the weights; returns the number of files, numbers and tensors, and the largest change by rounding."""
    sizes = {name: np.shape(params[name]) for one in stored_tensors(family, config.model) for name in one.ours}
    width = FORMATS[dtype].bytes
    total = width * sum(int(np.prod(shape)) for shape in sizes.values())
    rounded = 0.0

    def theirs() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal rounded
        for stored in stored_tensors(family, config.model):
            whole = to_theirs(stored, params.__getitem__)
            narrow = narrowed(whole, dtype)
            rounded = max(rounded, _largest_change(stored.theirs, whole, narrow))
            yield stored.theirs, narrow

    if total <= shard_bytes:
        tensors = dict(theirs())
        _save(folder / WEIGHTS_FILE, tensors)
        return 1, total // width, len(tensors), rounded
    places: list[tuple[Path, list[str]]] = []
    for shard in _shards(theirs(), shard_bytes):
        file = folder / f"shard-{len(places):05d}"
        _save(file, shard.tensors)
        places.append((file, list(shard.tensors)))
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(places, 1):
        name = f"model-{number:05d}-of-{len(places):05d}.safetensors"
        file.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    about = {"total_size": total, "total_parameters": total // width}
    write_json(folder / INDEX, {"metadata": about, "weight_map": weight_map})
    return len(places), total // width, len(weight_map), rounded


def _shards(tensors: Iterator[tuple[str, np.ndarray]], most: int) -> Iterator[_Shard]:
    """Yield shards of up to `most` bytes with the tensors in order; a larger tensor has a file of its own."""
    shard = _Shard()
    for name, tensor in tensors:
        if shard.tensors and shard.size + tensor.nbytes > most:
            yield shard
            shard = _Shard()
        shard.tensors[name] = tensor
        shard.size += tensor.nbytes
    yield shard


def _largest_change(name: str, whole: np.ndarray, narrow: np.ndarray) -> float:
    """Return the largest |rounded − number| / |number|. Raises UserError where a number becomes infinite, or was."""
    if not np.isfinite(again := narrow if narrow.dtype == whole.dtype else narrow.astype(np.float64)).all():
        raise UserError(f"{name} holds numbers that are not finite, or not in {narrow.dtype}")
    if again is narrow:
        return 0.0
    size = np.abs(whole.astype(np.float64))
    change = np.abs(again - whole.astype(np.float64))
    return float(np.divide(change, size, out=np.zeros_like(change), where=size > 0).max(initial=0.0))


def _save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors makes it readable only by the owner
        flush_folder(path)
    except SafetensorError as error:  # the disk's error, in safetensors' words
        raise OSError(str(error)) from error


def _require_bits(folder: Path, config: RunConfig, params: Arrays, dtype: str) -> None:
    """Read the folder as untrusted data, and raise UserError unless it is this model bit for bit."""
    found = HubModel.of(HubFolder(folder))
    if as_read(found.model) != as_read(config.model):
        raise UserError(f"{folder / CONFIG} does not describe the model that was written")
    if differing := found.differences({name: narrowed(params[name], dtype) for name in params}):
        raise UserError(f"{folder} does not hold the bits of the checkpoint: {', '.join(differing[:3])}")

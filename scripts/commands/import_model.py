"""`lockstep import`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import announce
from lockstep.scripts.shared.arguments import parse

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.hub.read import HubModel
    from lockstep.core.run.data import RunData

# The key of the import's entry in run.json.
IMPORTED = "imported_from"


@dataclass
class Import:
    """Begin a run from the model in a Hugging Face folder: `lockstep import PATH RUN --config FILE`.

    PATH/config.json sets the model; the run file and the command line set the rest. The weights become the checkpoint
    of step 0, which `lockstep train --resume RUN` continues. The data must be prepared with the folder's tokenizer.
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """folder with config.json, *.safetensors and tokenizer.json"""
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """new run directory"""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the defaults)")] = None
    """run file (TOML) with the settings of data and training; its [model] is not read"""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: in PATH)")] = None
    """the model's tokenizer.json, if PATH does not hold it"""
    backend: Literal["torch", "jax"] = "torch"
    """backend that trains the run"""


def main(argv: list[str]) -> int:
    """Read the folder, make the run beside its place, compare it with the folder bit by bit, and rename it."""
    from lockstep.core.files.new_folder import new_folder
    from lockstep.core.files.paths import quoted
    from lockstep.core.hub.folder import HubFolder
    from lockstep.core.hub.read import HubModel

    options, given = parse(Import, "import", argv, with_settings=True)
    if options.run.exists() or options.run.is_symlink():
        raise UserError(f"{options.run} exists already; name a new run directory")
    found = HubModel.of(HubFolder(options.path))
    config = _config(options, given, found)
    data = _data(options, given, config, found)
    with new_folder(options.run) as place:
        _make(place, options, config, data, found)
    formats = sorted({where.dtype for where in found.folder.tensors.values()})
    announce(
        f"{options.run}: {found.family.architecture}, {len(found.folder.tensors)} tensors ({', '.join(formats)}), "
        "step 0; bit for bit as in the folder"
    )
    for line in found.left_out:
        announce(f"  {line}")
    announce(f"continue with: lockstep train --resume {quoted(options.run)}")
    return 0


def _config(options: Import, given: dict[str, str], found: HubModel) -> RunConfig:
    """Return the run's settings. Raises UserError as `load_config` does, and if a flag contradicts the folder."""
    from lockstep.core.config.file import load_config

    model = {f"model.{name}": value for name, value in found.model.model_dump().items()}
    fixed = {**model, "initial": "imported"}
    if differ := [key for key in given if key in fixed and not _says(given[key], fixed[key])]:
        key = differ[0]
        raise UserError(
            f"command line: {key} = {given[key]}: {options.path} has {_text(fixed[key])}; leave the flag out"
        )
    own = {key: _text(value) for key, value in fixed.items()}
    return load_config(options.config, {"name": options.run.name, **given, **own})


def _says(text: str, value: Any) -> bool:
    """Return whether a flag's text has this value, as 1e4 has the value 10000.0."""
    if isinstance(value, bool | str):
        return text == _text(value)
    try:
        return bool(type(value)(text) == value)
    except ValueError:
        return False


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _data(options: Import, given: dict[str, str], config: RunConfig, found: HubModel) -> RunData:
    """Open the run's data. Raises UserError if it is missing, or was not prepared with the model's tokenizer."""
    import shlex

    from lockstep.core.data.index import INDEX_NAME
    from lockstep.core.data.tokenizer import load_tokenizer
    from lockstep.core.files.atomic import leads_out
    from lockstep.core.hub.tokenizer import FILE
    from lockstep.core.run.data import RunData

    file = options.tokenizer or found.folder.path / FILE
    if not file.is_file():
        raise UserError(f"{file} is missing: name the model's tokenizer.json with --tokenizer FILE")
    if options.tokenizer is None and leads_out(file, found.folder.path):
        raise UserError(f"{file} is a link to outside the folder; copy the file into the folder")
    tokenizer = load_tokenizer(file)
    rows = config.model.vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(f"{file} has {tokenizer.vocab_size:,} tokens, but the model has {rows:,} rows")
    words = ["lockstep", "data", "prepare", *([str(options.config)] if options.config else [])]
    folders = config.data.folders
    folder = next((one for one in folders if not (Path(one) / INDEX_NAME).is_file()), folders[0])
    words += ["--data.path", folder, "--data.tokenizer", str(file)]
    words += [word for key in ("source", "column") if f"data.{key}" in given for word in _flag(key, given)]
    making = f"make it with: {shlex.join(words)}"
    if not (Path(folder) / INDEX_NAME).is_file():
        raise UserError(f"{folder} holds no prepared data; {making}")
    data = RunData.open(config)
    if data.dataset.facts()["tokenizer_fingerprint"] != tokenizer.fingerprint:
        raise UserError(
            f"{folder} was prepared with another tokenizer than {file}; choose another data.path, and {making}"
        )
    return data


def _flag(key: str, given: dict[str, str]) -> list[str]:
    return [f"--data.{key}", given[f"data.{key}"]]


def _make(place: Path, options: Import, asked: RunConfig, data: RunData, found: HubModel) -> None:
    """Make the run at `place`. Raises UserError if it does not hold the folder's bits."""
    import numpy as np

    from lockstep.core.backend import State
    from lockstep.core.checkpoint.format import load_checkpoint
    from lockstep.core.config.auto import settled
    from lockstep.core.model.groups import moment_names
    from lockstep.core.run.directory import RunDir
    from lockstep.core.train.skipped_steps import first_scalars
    from lockstep.scripts.shared.backends import on_its_device, open_named
    from lockstep.scripts.shared.startup_banner import run_info

    backend = open_named(options.backend)
    asked = on_its_device(asked, backend)
    config = settled(asked, asked.device)
    dtype = np.float64 if config.precision.exact else np.float32
    params = dict(found.parameters(dtype))
    moments = {kind: {n: np.zeros_like(params[n]) for n in names} for kind, names in moment_names(config).items()}
    info = run_info(asked, options.backend, backend.describe(config), data)
    info[IMPORTED] = {
        "folder": str(options.path),
        "architecture": found.family.architecture,
        "files": {file.name: _sha256(file) for file in found.folder.files},
    }
    extra = {
        "tokens_seen": 0,
        "data_fingerprint": data.dataset.fingerprint,
        "config": data.config.model_dump(mode="json"),
        "versions": info["versions"],
        "wandb_id": None,
    }
    with RunDir.create(place, asked, info) as run:
        written = run.save_checkpoint(State(0, params, moments, first_scalars(config)), extra)
        state, _ = load_checkpoint(written)
        if differing := found.differences(state.params):
            raise UserError(f"{options.run} does not hold the bits of {options.path}: {', '.join(differing[:3])}")


def _sha256(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""`lockstep export`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import announce
from lockstep.scripts.shared.arguments import parse

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.data.tokenizer import TextTokenizer
    from lockstep.core.hub.write import Exported


@dataclass
class Export:
    """Write a run's model and tokenizer as a folder that Hugging Face's transformers loads.

    Neither Lockstep nor the network is needed for `AutoModelForCausalLM.from_pretrained(OUT)` and
    `AutoTokenizer.from_pretrained(OUT)`. Every bit is read back and compared.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """run directory, or a checkpoint (RUN/checkpoints/step_000100)"""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """new folder"""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the last intact)")] = None
    """which checkpoint of a run"""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """dtype of the tensors; roundings are reported"""
    shard_gb: float = 5.0
    """most GB (10^9 bytes) of tensors in a file; a larger model takes several files and an index"""
    tokenizer: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: in the run's data)")
    ] = None
    """tokenizer.json of the run, if its data is not here"""


def main(argv: list[str]) -> int:
    """Read the checkpoint, write the folder, and print what transformers computes differently."""
    from lockstep.core.checkpoint.format import load_checkpoint
    from lockstep.core.files.paths import quoted
    from lockstep.core.hub.write import require_family, write_folder
    from lockstep.core.model.groups import check_state
    from lockstep.scripts.commands.convert import read_orbax

    options, _ = parse(Export, "export", argv, with_settings=False)
    if not 0 < options.shard_gb < float("inf"):
        raise UserError(f"shard_gb = {options.shard_gb}: must be above 0")
    folder, config, tokenizer = _source(options)
    require_family(config)
    state, _ = load_checkpoint(folder, read_orbax)
    try:
        check_state(config, state)
    except ValueError as error:
        raise UserError(f"{folder} does not fit the run's settings: {error}") from error
    size = int(options.shard_gb * 10**9)
    done = write_folder(options.out, config, state.params, tokenizer, options.dtype, size)
    files = f", {done.files} files" if done.files > 1 else ""
    announce(
        f"{options.out}: {done.architecture}, {done.numbers:,} numbers in {done.tensors} tensors{files}, "
        f"{options.dtype}, step {state.step}; read back bit for bit"
    )
    for line in notes(config, tokenizer, done, options.dtype):
        announce(f"  {line}")
    announce(f"load it with: AutoModelForCausalLM.from_pretrained({str(options.out.resolve())!r})")
    announce(f"train on from it with: lockstep import {quoted(options.out)} RUN --config FILE")
    return 0


def notes(config: RunConfig, tokenizer: TextTokenizer, done: Exported, dtype: str) -> Iterator[str]:
    """Describe in a line each what transformers computes differently from the run."""
    from lockstep.core.hub.write import MOST_SUPPRESSED, require_family

    if done.rounded:
        yield f"rounded to {dtype}: a number changed by up to {done.rounded:.1e} of itself"
    precision = config.precision
    if precision.chosen.rounds or precision.plan.changed or precision.fp8:
        yield (
            f"trained under precision.policy = {precision.policy!r}: transformers computes in the format of the "
            "weights, without those roundings"
        )
    apart = [name for name in ("document_mask", "reset_positions") if getattr(config.attention, name)]
    if apart:
        said = " and ".join(f"attention.{name}" for name in apart)
        yield f"trained with {said}: transformers does not separate documents; pass one document per sequence"
    if config.loss.z_loss:
        yield "trained with loss.z_loss: the loss of transformers does not include it"
    if unused := config.model.vocab_size - tokenizer.vocab_size:
        drawn = "may draw them" if unused > MOST_SUPPRESSED else "draws none of them (generation_config.json)"
        yield f"{unused:,} rows of the vocabulary belong to no token: `generate` {drawn}"
    longest = f"it was trained on sequences of at most {config.train.longest} tokens"
    # GPT-2's own table limits the length.
    yield f"max_position_embeddings: {longest}" if require_family(config).longest else longest


def _source(options: Export) -> tuple[Path, RunConfig, TextTokenizer]:
    """Return the checkpoint's folder, the run's settings and its tokenizer. Raises UserError if one is not there."""
    from lockstep.core.checkpoint.format import MANIFEST
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.layout import LISTED, is_run
    from lockstep.scripts.commands.sample import checkpoint_of, tokenizer_of

    asked = options.run
    if is_run(asked):
        run = RunDir.open(asked)
        return checkpoint_of(run, options.step), run.config, tokenizer_of(run, options.tokenizer)
    if not (asked / MANIFEST).is_file():
        raise UserError(f"{asked} is neither a run directory nor a checkpoint; {LISTED}")
    if options.step is not None:
        raise UserError(f"{asked} is a checkpoint already: --step chooses one of a run")
    if is_run(owner := asked.resolve().parent.parent):
        run = RunDir.open(owner)
        return asked, run.config, tokenizer_of(run, options.tokenizer)
    config = _settings_of(asked)
    return asked, config, _tokenizer_of(asked, config, options.tokenizer)


def _settings_of(checkpoint: Path) -> RunConfig:
    """Read the settings beside a checkpoint's tensors. The files are checked against the checkpoint's manifest."""
    import json

    from pydantic import ValidationError

    from lockstep.core.checkpoint.format import EXTRA, verify_checkpoint
    from lockstep.core.config.schema import RunConfig

    verify_checkpoint(checkpoint)
    path = checkpoint / EXTRA
    try:
        return RunConfig.model_validate(json.loads(path.read_text(encoding="utf-8"))["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = f"{error.error_count()} settings are wrong" if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{path} does not hold the settings of a run: {said}; name the run instead") from None


def _tokenizer_of(checkpoint: Path, config: RunConfig, file: Path | None) -> TextTokenizer:
    from lockstep.core.data.index import TOKENIZER_NAME
    from lockstep.core.data.tokenizer import load_tokenizer

    path = file or Path(config.data.folders[0]) / TOKENIZER_NAME
    if not path.is_file():
        raise UserError(f"{path} is not there: name the tokenizer of {checkpoint} with --tokenizer FILE")
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(f"{path} has {tokenizer.vocab_size:,} tokens, more than the model's rows; name the right one")
    return tokenizer

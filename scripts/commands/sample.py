"""`lockstep sample`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lockstep.core.errors import UserError, printable
from lockstep.core.sinks.lines import complain
from lockstep.core.sinks.visible import visible
from lockstep.scripts.shared.arguments import parse

if TYPE_CHECKING:
    import numpy as np

    from lockstep.core.config.schema import RunConfig
    from lockstep.core.data.tokenizer import TextTokenizer
    from lockstep.core.run.directory import RunDir
    from lockstep.core.sampling.draw import Sampling


@dataclass
class Sample:
    """Write text from a run's checkpoint: `lockstep sample RUN --prompt "…"`.

    Prompt and text go to stdout as they are generated, all else to stderr. The same seed gives the same text. On a
    terminal, control characters in the text are escaped.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """run directory of torch or JAX"""
    prompt: Annotated[str, tyro.conf.arg(help_behavior_hint="(default: empty)")] = ""
    """text to continue; empty = start a new text"""
    tokens: int = 100
    """most tokens to write; the end-of-text token ends a sample"""
    temperature: float = 0.8
    """divisor of the logits; 0 = always the likeliest token"""
    top_k: int = 0
    """draw from this many of the likeliest tokens; 0 = all"""
    top_p: float = 1.0
    """draw from the smallest set of likeliest tokens with this total probability"""
    seed: int = 0
    """of the draws"""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the last intact)")] = None
    """which checkpoint"""
    count: int = 1
    """number of samples, each with draws of its own"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the model; auto: CUDA if there is one"""
    no_cache: bool = False
    """recompute all tokens for each new one, as training does: slower, and equal up to rounding"""
    tokenizer: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: in the run's data)")
    ] = None
    """tokenizer.json of the run, if its data is not here"""


def main(argv: list[str]) -> int:
    """Check the options, read the weights, write the samples."""
    from lockstep.core.checkpoint.format import load_checkpoint
    from lockstep.core.model.groups import check_state
    from lockstep.core.run.directory import RunDir
    from lockstep.core.sampling.draw import Sampling
    from lockstep.scripts.commands.convert import read_orbax

    options, _ = parse(Sample, "sample", argv, with_settings=False)
    for name in ("tokens", "count"):
        if getattr(options, name) < 1:
            raise UserError(f"{name} = {getattr(options, name)}: must be at least 1")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    run = RunDir.open(options.run)
    tokenizer = tokenizer_of(run, options.tokenizer)
    prompt = encoded(options.prompt, tokenizer)
    folder = checkpoint_of(run, options.step)
    state, _ = load_checkpoint(folder, read_orbax)
    try:
        check_state(run.config, state)
    except ValueError as error:
        raise UserError(f"{folder} does not fit the run's settings: {error}") from error
    write(options, run.config, state.params, tokenizer, prompt, sampling)
    return 0


def tokenizer_of(run: RunDir, file: Path | None) -> TextTokenizer:
    """Return the run's own tokenizer. Raises UserError if it is missing or another one."""
    from lockstep.core.data.index import TOKENIZER_NAME
    from lockstep.core.data.tokenizer import load_tokenizer

    path = file or Path(run.config.data.folders[0]) / TOKENIZER_NAME
    if not path.is_file():
        raise UserError(f"{path} is not there: name the run's tokenizer with --tokenizer FILE")
    tokenizer = load_tokenizer(path)
    due = run.info.get("data", {}).get("tokenizer_fingerprint", tokenizer.fingerprint)
    if tokenizer.fingerprint != due or tokenizer.vocab_size > run.config.model.vocab_size:
        raise UserError(f"{path} is not the tokenizer that {run.path} was trained with; name it with --tokenizer FILE")
    return tokenizer


def encoded(prompt: str, tokenizer: TextTokenizer) -> np.ndarray:
    """Encode the prompt; an empty one becomes the end-of-text token, after which texts begin."""
    import numpy as np

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8 and cannot be encoded") from None
    found = list(tokenizer.encode_documents([prompt])[0]) if prompt else []
    return np.asarray(found or [tokenizer.eot_id], np.int32)


def checkpoint_of(run: RunDir, step: int | None) -> Path:
    """Return the checkpoint of a step, or the last intact one. Raises UserError if it is missing."""
    from lockstep.core.checkpoint.format import checkpoint_step

    found = {checkpoint_step(path): path for path in run.checkpoints()}
    if not found:
        raise UserError(f"{run.path} has no checkpoint: one is written when training ends or stops (checkpoint.every)")
    if step is None:
        return run.last_intact(lambda text: complain(printable(text)))
    if step not in found:
        steps = ", ".join(map(str, found))
        raise UserError(f"{run.path} has no checkpoint of step {step}; it has those of step {steps}")
    return found[step]


def write(
    options: Sample, config: RunConfig, params: Any, tokenizer: TextTokenizer, prompt: np.ndarray, sampling: Sampling
) -> None:
    """Write every sample to stdout as it is generated, and its speed to stderr."""
    from lockstep.torch_backend.tools.generate import Decoder

    decoder = Decoder(config, params, options.device, cached=not options.no_cache)
    told = "no cache" if options.no_cache else "KV cache"
    for number in range(options.count):
        if options.count > 1:
            print(f"{'' if number == 0 else chr(10)}--- {number + 1} of {options.count}")
        started = time.perf_counter()
        written, ended = write_one(options, config, decoder, tokenizer, prompt, sampling, number)
        seconds = max(time.perf_counter() - started, 1e-9)
        print(flush=True)
        said = f"{written} tokens, {written / seconds:,.0f} a second: {decoder.policy.name} on {decoder.device}, {told}"
        said += "; the model ended the text" if ended else ""
        if len(prompt) + written - 1 > decoder.window:
            said += f"; beyond {decoder.window} tokens each is computed from the last {decoder.window}"
        complain(said)


def write_one(
    options: Sample,
    config: RunConfig,
    decoder: Any,
    tokenizer: TextTokenizer,
    prompt: np.ndarray,
    sampling: Sampling,
    number: int,
) -> tuple[int, bool]:
    """Write one sample; returns the number of tokens, and whether the model ended the text."""
    from lockstep.core.data.text_stream import TextStream
    from lockstep.core.sampling.draw import write_tokens

    def next_token(tokens: np.ndarray) -> np.ndarray:
        # The model may have more rows than there are tokens. The extra rows were never trained.
        logits: np.ndarray = decoder.next_token_logits(tokens)[: tokenizer.vocab_size]
        return logits

    # The end-of-text token of an empty prompt belongs to the document before.
    lead = int(not options.prompt and config.attention.needs_documents)
    drawn = write_tokens(next_token, prompt, decoder.window, sampling, number, lead)
    stream, written = TextStream(tokenizer.decode), 0
    print(options.prompt, end="", flush=True)
    for token in islice(drawn, options.tokens):
        if token == tokenizer.eot_id:
            print(_shown(stream.end()), end="")
            return written, True
        written += 1
        print(_shown(stream.add(token)), end="", flush=True)
    print(_shown(stream.end()), end="")
    return written, False


def _shown(text: str) -> str:
    """Escape sampled text for a terminal, as the model may be anybody's. Pipes and files get it unchanged."""
    return visible(text) if sys.stdout.isatty() else text

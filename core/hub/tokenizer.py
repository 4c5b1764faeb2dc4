"""The files from which transformers makes a run's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lockstep.core.data.tokenizer import TextTokenizer
from lockstep.core.files.atomic import write_atomically

FILE, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"


def write_tokenizer(folder: Path, tokenizer: TextTokenizer, longest: int) -> None:
    """Write a tokenizer as transformers reads it. longest: tokens of the longest sequence.

    The end of text, which stands between documents, is both its end and its beginning: a text without a prompt begins
    there. Raises UserError if the disk refuses.
    """
    end = tokenizer.decode([tokenizer.eot_id])
    special = {"bos_token": end, "eos_token": end}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    write_atomically(folder / FILE, [tokenizer.content])
    write_json(folder / SETTINGS, settings)
    write_json(folder / SPECIAL, special)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object as JSON, as transformers lays it out. Raises UserError if the disk refuses."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomically(path, [text.encode() + b"\n"])

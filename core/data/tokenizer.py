"""Byte-level BPE tokenizers: trained here, or loaded from a tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.data.grouping import grouped
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import canonical_json, require_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
# The trainer allocates memory for every token before it reads a text, and aborts the process if memory is short.
MAX_VOCAB_SIZE = 1 << 22
LEAST_VOCABULARY = "256 bytes and the end of text"

_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_PIECE_CHARACTERS = 1 << 20
# The end of a line with text on both sides. ByteLevel's pattern (GPT-2's) always ends a word there, and the newline is
# a separate word with or without following text. So a cut there changes no token.
_SAFE_CUT = re.compile(r"\S\n(?=\S)")


class TextTokenizer:
    """A tokenizer, from text to token ids and back. No part of a text is encoded as a special token.

    Attributes:
        vocab_size: the largest id plus one.
        eot_id: the id that ends a document.
        content: the canonical tokenizer JSON; equal tokenizers have equal content.
        fingerprint: SHA-256 of `content`, in hexadecimal.
    """

    def __init__(self, content: bytes, origin: str) -> None:
        """Build the tokenizer from tokenizer JSON. origin: its name for error messages.

        Raises:
            UserError: the content is not a tokenizer, has no end-of-text token, or is not deterministic.
        """
        description = _parse(content, origin)
        eot_text, self.eot_id = _find_end_of_text(description, origin)
        self.content = canonical_json(_without_surprises(description, eot_text, origin))
        self.fingerprint = hashlib.sha256(self.content).hexdigest()
        self._tokenizer = _build(self.content, origin)
        # Otherwise the text "<|endoftext|>" in a document would end the document.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.eot_id in self._tokenizer.encode(eot_text, add_special_tokens=False).ids:
            raise UserError(f"{origin} reads the words {eot_text} as the end of text; make it a special token")

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text to ids, uint32 of shape (tokens,), without an end of text.

        A text of more than 2**20 characters is encoded in pieces that end with a line, to limit memory. This changes no
        token of a byte-level BPE with GPT-2's pattern, as `train_tokenizer` makes.
        """
        documents: list[NDArray[np.uint32]] = []
        parts: list[NDArray[np.uint32]] = []
        for ids, ends in self.encode_chunks([text] for text in texts):
            parts.append(ids)
            if ends:
                documents.append(np.concatenate(parts))
                parts = []
        return documents

    def encode_chunks(self, documents: Iterable[Iterable[str]]) -> Iterator[tuple[NDArray[np.uint32], bool]]:
        """Encode documents given as chunks of text. The memory used does not grow with their number or length.

        Yields (ids, ends) in order: uint32 (tokens,), and True for the last ids of a document. The ids are those of
        `encode_documents` for any division of the text into chunks.
        """
        ends: deque[bool] = deque()

        def pieces() -> Iterator[str]:
            for chunks in documents:
                cut = _cut(chunks, _PIECE_CHARACTERS)
                piece = next(cut)
                for following in cut:
                    ends.append(False)
                    yield piece
                    piece = following
                ends.append(True)
                yield piece

        # The library's encodings are many times as large as the ids, so only few may exist at the same time.
        for group in grouped(pieces(), _PIECE_CHARACTERS):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32), ends.popleft()

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Decode `ids`, shape (tokens,); the end of text is decoded to its name.

        Raises:
            ValueError: an id is outside [0, vocab_size).
        """
        numbers = [int(number) for number in ids]
        if any(not 0 <= number < self.vocab_size for number in numbers):
            raise ValueError(f"token ids must lie in [0, {self.vocab_size})")
        return str(self._tokenizer.decode(numbers, skip_special_tokens=False))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2, Radford et al. 2019).

    `vocab_size` includes the 256 bytes and the end of text (id 0). If the texts give fewer merges, the vocabulary is
    smaller.

    Raises:
        UserError: `vocab_size` is below 257.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"a vocabulary of {vocab_size} is too small; {MIN_VOCAB_SIZE} is the least: {LEAST_VOCABULARY}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer.to_str().encode(), "the trained tokenizer")


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Read a tokenizer.json of the `tokenizers` library.

    Raises:
        UserError: the file cannot be read, or see `TextTokenizer`.
    """
    require_file(Path(path))
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror or error}") from error
    return TextTokenizer(content, str(path))


def _parse(content: bytes, origin: str) -> dict[str, Any]:
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin} is not a tokenizer.json: {error}") from error
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise UserError(f"{origin} is not a tokenizer.json: it has no model")
    return description


def _find_end_of_text(description: dict[str, Any], origin: str) -> tuple[str, int]:
    try:
        added = {token["content"]: int(token["id"]) for token in description.get("added_tokens") or []}
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{origin} is not a tokenizer.json: its added_tokens cannot be read") from error
    for name in _END_OF_TEXT_NAMES:
        if name in added:
            return name, added[name]
    names = ", ".join(_END_OF_TEXT_NAMES)
    raise UserError(f"{origin} has no end-of-text token; it must list one of {names} in added_tokens")


def _without_surprises(description: dict[str, Any], eot_text: str, origin: str) -> dict[str, Any]:
    """Return the tokenizer's JSON without truncation and padding, and with the end of text as a special token."""
    if description["model"].get("dropout"):
        raise UserError(f"{origin} drops merges at random (model.dropout); set it to null")
    added = [
        {**token, "special": True} if token["content"] == eot_text else token for token in description["added_tokens"]
    ]
    return {**description, "truncation": None, "padding": None, "added_tokens": added}


def _build(content: bytes, origin: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{origin} is not a tokenizer.json: {error}") from error


def _cut(chunks: Iterable[str], limit: int) -> Iterator[str]:
    """Yield the text of `chunks` in pieces of at least `limit` characters, except the last.

    Pieces end at positions that no token extends over. The positions do not depend on the division into chunks.
    """
    held, searched = "", limit
    for chunk in chunks:
        held += chunk
        while (match := _SAFE_CUT.search(held, searched)) is not None:
            yield held[: match.end()]
            held, searched = held[match.end() :], limit
        # Search the last two characters again: the next chunk may complete a cut there.
        searched = max(limit, len(held) - 2)
    yield held

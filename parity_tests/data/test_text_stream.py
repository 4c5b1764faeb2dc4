"""Text as it comes is the whole text, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.data.text_stream import TextStream
from lockstep.core.data.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["naïve 日本語 🜚 text, and more text"] * 3, 300)
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


def parts(ids, decode=TOKENIZER.decode):
    stream = TextStream(decode)
    return [*(stream.add(token) for token in ids), stream.end()]


@settings(max_examples=300, derandomize=True)
@given(IDS)
def test_the_parts_are_the_whole(ids):
    """Any tokens, most of which spell no UTF-8."""
    assert "".join(parts(ids)) == TOKENIZER.decode(ids)


@settings(max_examples=100, derandomize=True)
@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=20))
def test_no_half_character_is_given(text):
    ids = TOKENIZER.encode_documents([text])[0]
    said = parts(ids)
    assert "".join(said) == text and not any("\ufffd" in part for part in said)


def test_each_token_is_said_at_once_where_it_can_be():
    ids = TOKENIZER.encode_documents(["a🜚b"])[0]
    assert len(ids) > 3
    assert [part for part in parts(ids) if part] == ["a", "🜚", "b"]


def test_half_a_character_at_the_end_is_said_at_the_end():
    first = TOKENIZER.encode_documents(["🜚"])[0][:1]
    assert parts(first) == ["", "\ufffd"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_decoder_that_strips_a_first_space(count):
    """As SentencePiece's: a token's space is lost where the text begins."""
    words = {1: " one", 2: " two"}

    def decode(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert "".join(parts([1, 2, 2] * count, decode)) == decode([1, 2, 2] * count)

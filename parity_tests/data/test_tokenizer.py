"""The tokenizer gives back the text, never takes text for the end of text, and is the same every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep.core.data.tokenizer as tokenizer_module
from lockstep.core.data.grouping import grouped
from lockstep.core.data.tokenizer import END_OF_TEXT, TextTokenizer, load_tokenizer, train_tokenizer
from lockstep.core.errors import UserError

TEXTS = ["the loss of the step\n", "def step(self):\n    return self.loss\n", "naïve 数据 🙂 tokens tokens"] * 20


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(TEXTS, 320)


def changed(tokenizer, change) -> bytes:
    description = json.loads(tokenizer.content)
    change(description)
    return json.dumps(description).encode()


@given(st.text())
@settings(max_examples=200)
def test_text_comes_back(tokenizer, text):
    (ids,) = tokenizer.encode_documents([text])
    assert ids.dtype == np.uint32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot_id not in ids


def test_the_words_for_the_end_of_text_are_only_words(tokenizer):
    text = f"before {END_OF_TEXT} after{END_OF_TEXT}"
    (ids,) = tokenizer.encode_documents([text])
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot_id]) == END_OF_TEXT


def test_the_vocabulary_is_what_was_asked_or_what_the_text_yields(tokenizer):
    assert train_tokenizer(TEXTS, 270).vocab_size == 270
    assert train_tokenizer(TEXTS, 257).vocab_size == 257
    assert 257 < train_tokenizer(TEXTS, 100_000).vocab_size < 1000
    with pytest.raises(UserError, match="256 is too small"):
        train_tokenizer(TEXTS, 256)


def test_written_and_read_it_is_the_same(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.content)
    again = load_tokenizer(path)
    assert again.fingerprint == tokenizer.fingerprint
    assert [ids.tolist() for ids in again.encode_documents(TEXTS)] == [
        ids.tolist() for ids in tokenizer.encode_documents(TEXTS)
    ]
    # The fingerprint is of the contents, not of the layout.
    path.write_text(json.dumps(json.loads(tokenizer.content), indent=4))
    assert load_tokenizer(path).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(TEXTS, 300).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("threads", ["1", "4"])
def test_training_does_not_depend_on_threads(tokenizer, threads):
    code = (
        f"from lockstep.core.data.tokenizer import train_tokenizer; print(train_tokenizer({TEXTS!r}, 320).fingerprint)"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == tokenizer.fingerprint


@given(st.lists(st.sampled_from(["a", "é", " ", "\n", "\r", "1", ".", "'s", "\t", "\u2028", END_OF_TEXT]), max_size=80))
@settings(max_examples=300)
def test_pieces_encode_as_the_whole(tokenizer, parts):
    text = "".join(parts)
    (whole,) = tokenizer.encode_documents([text])
    pieces = list(tokenizer_module._cut(text, 5))
    assert "".join(pieces) == text
    assert np.array_equal(whole, np.concatenate(tokenizer.encode_documents(pieces)))


def test_long_documents_are_cut(monkeypatch, tokenizer):
    text = "".join(TEXTS)
    (whole,) = tokenizer.encode_documents([text])
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", 50)
    assert len(list(tokenizer_module._cut(text, 50))) > 10
    first, cut, last = tokenizer.encode_documents(["", text, "a"])
    assert first.size == 0 and last.size == 1
    assert np.array_equal(whole, cut)


@given(st.lists(st.text(max_size=9)), st.integers(1, 20))
def test_groups_are_bounded_and_lose_nothing(texts, characters):
    groups = list(grouped(texts, characters))
    assert [text for group in groups for text in group] == texts
    assert all(group and sum(map(len, group[:-1])) < characters for group in groups)
    assert all(sum(map(len, group)) >= characters for group in groups[:-1])


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>"])
def test_other_names_for_the_end_of_text(tokenizer, name):
    content = tokenizer.content.replace(END_OF_TEXT.encode(), name.encode())
    other = TextTokenizer(content, "there")
    assert other.eot_id == tokenizer.eot_id
    assert other.eot_id not in other.encode_documents([f"a{name}b"])[0]


def test_an_end_of_text_that_is_not_marked_special_is_still_not_spelled(tokenizer):
    content = changed(tokenizer, lambda description: description["added_tokens"][0].update(special=False))
    assert TextTokenizer(content, "there").eot_id not in tokenizer.encode_documents([END_OF_TEXT])[0]


def test_truncation_and_padding_are_off(tokenizer):
    def shorten(description):
        description["truncation"] = {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        }

    content = changed(tokenizer, shorten)
    assert TextTokenizer(content, "there").encode_documents(["abcdefgh" * 9])[0].size > 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda description: description.update(added_tokens=[]), "no end-of-text token"),
        (lambda description: description["model"].update(dropout=0.1), "at random"),
        (lambda description: description["model"].update(type="None"), "not a tokenizer.json"),
        (lambda description: description.pop("model"), "not a tokenizer.json"),
        (lambda description: description.update(added_tokens=[3]), "not a tokenizer.json"),
    ],
)
def test_tokenizers_that_cannot_be_used_are_refused(tokenizer, change, says):
    with pytest.raises(UserError, match=says) as caught:
        TextTokenizer(changed(tokenizer, change), "over there")
    assert "over there" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"model": 3}', b'{"model": {}, "added_tokens": null}'])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UserError, match=r"t\.json"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(UserError, match="cannot read"):
        load_tokenizer(tmp_path / "none.json")


def test_ids_outside_the_vocabulary_are_not_decoded(tokenizer):
    for ids in ([-1], [tokenizer.vocab_size]):
        with pytest.raises(ValueError):
            tokenizer.decode(ids)

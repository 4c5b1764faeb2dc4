"""The two model.py diff as one: a reader holds them side by side, and the lines that differ are the framework's."""

from __future__ import annotations

import difflib

import pytest

from lockstep.parity_tests.repository import REPO

# JAX's word → torch's. Words alone: what differs in more than its name stays a difference.
WORDS = {
    "JAX (Flax NNX)": "PyTorch",
    "jax_backend": "torch_backend",
    "nnx.Module": "nn.Module",
    "nnx.Param": "nn.Parameter",
    "nnx.List": "nn.ModuleList",
    "[...]": "",  # the value of an nnx.Param
    "__call__": "forward",
    "jnp": "torch",
    "Array": "Tensor",
    "astype": "to",
    "axis": "dim",
    "repeat(": "repeat_interleave(",
}
LEAST = 0.80


def in_torch_words(source: str) -> list[str]:
    """Return the lines of a file but for blank ones, in torch's words; docstrings and comments count."""
    for word, other in WORDS.items():
        source = source.replace(word, other)
    return [line for line in source.splitlines() if line.strip()]


def compared(torch_source: str, jax_source: str) -> tuple[float, str]:
    """Return 2 · equal lines / lines of both files (difflib's ratio), and the lines that differ."""
    ours, theirs = in_torch_words(torch_source), in_torch_words(jax_source)
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    names = "torch_backend/model.py", "jax_backend/model.py in torch's words"
    different = difflib.unified_diff(ours, theirs, *names, lineterm="", n=0)
    return matcher.ratio(), "\n".join(different)


def sources() -> tuple[str, str]:
    torch_source, jax_source = ((REPO / f"{name}_backend" / "model.py").read_text() for name in ("torch", "jax"))
    return torch_source, jax_source


def test_the_two_models_diff_as_one():
    share, different = compared(*sources())
    assert share >= LEAST, f"{share:.1%} of the lines are equal, and at least {LEAST:.0%} must be:\n{different}"


def test_no_word_is_in_vain():
    """Each word of the table is in JAX's file, and makes lines equal: without it fewer are."""
    torch_source, jax_source = sources()
    whole, _ = compared(torch_source, jax_source)
    for word in WORDS:
        kept = {w: o for w, o in WORDS.items() if w != word}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "WORDS", kept)
            assert compared(torch_source, jax_source)[0] < whole, word


def test_a_model_that_goes_its_own_way_is_seen():
    """Methods of one file written otherwise: their lines are shown, and the share falls below the least."""
    torch_source, jax_source = sources()
    other = jax_source.replace("tap(", "shown(").replace("policy", "precision")
    share, different = compared(torch_source, other)
    assert share < LEAST
    assert 'shown(f"{name}.q"' in different

"""A run's choice by name is one object: nothing else compares or lists names of heads, kernels, policies, optimizers.

Such names stand in core/components, and in the files in which a backend implements a choice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core.components.attention_kernels import ATTENTION_KERNELS
from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.components.optimizers import OPTIMIZERS
from lockstep.core.components.precision import FORMATS, POLICIES
from lockstep.parity_tests.repository import REPO, parsed

PACKAGES = ("core", "torch_backend", "jax_backend", "scripts")
REGISTRIES = (LOSS_HEADS, ATTENTION_KERNELS, OPTIMIZERS, POLICIES)
NAMES = frozenset(name for registry in REGISTRIES for name in registry)
# The holders of such a name: fields of the configuration, and values read from them.
HOLDERS = frozenset({"head", "kernel", "policy", "policies", "optimizer", "operand", "stream", "recipe", "chosen"})
# Attributes of a section or an object: `optim.name`, `self.name`.
NAMED = "name"
# Tables of dtypes and rates by format are no lists of choices.
LISTED = tuple(frozenset(registry) - FORMATS.keys() for registry in REGISTRIES)
# Where a choice is described, or implemented, or is what a study measures.
HOMES = (
    "core/components/",
    "core/parity/reference/closed_forms.py",
    "core/parity/watch/library_rules.py",
    "torch_backend/attention.py",
    "torch_backend/kernels/library_heads.py",
    "torch_backend/optim.py",
    "torch_backend/precision.py",
    "jax_backend/attention.py",
    "jax_backend/kernels/library_heads.py",
    "jax_backend/optim.py",
    "jax_backend/precision.py",
    "scripts/studies/",
)


def texts(node: ast.AST) -> set[str]:
    """Return the texts that stand in an expression."""
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def held(node: ast.AST) -> bool:
    """Return whether an expression reads what holds a name of a choice."""
    read = {
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in ast.walk(node)
        if hasattr(one, "ctx") and isinstance(one, ast.Attribute | ast.Name)
    }
    return bool(read & {*HOLDERS, NAMED})


def begins(node: ast.Call) -> bool:
    """Return whether a call is `x.startswith("fp8…")` of what holds a name, or `endswith`."""
    called = node.func
    if not isinstance(called, ast.Attribute) or called.attr not in ("startswith", "endswith") or not held(called.value):
        return False
    parts = {text.rstrip("/") for argument in node.args for text in texts(argument)} - {""}
    return any(name.startswith(part) or name.endswith(part) for part in parts for name in NAMES)


def found(source: str) -> Iterator[int]:
    """Lines that compare, match, look up or list names of choices."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Compare):
            if held(node) and texts(node) & NAMES:
                yield node.lineno
        elif isinstance(node, ast.Match):
            if held(node.subject) and any(texts(case.pattern) & NAMES for case in node.cases):
                yield node.lineno
        elif isinstance(node, ast.Call):
            if begins(node):
                yield node.lineno
        elif isinstance(node, ast.Dict | ast.Tuple | ast.List | ast.Set):
            members = node.keys if isinstance(node, ast.Dict) else node.elts
            values = {one.value for one in members if isinstance(one, ast.Constant)}
            if any(len(values & names) > 1 for names in LISTED):
                yield node.lineno


def outside(root: Path) -> list[str]:
    """`path:line` of all that stands outside the homes of choices."""
    return [
        f"{file.relative_to(root)}:{line}"
        for package in PACKAGES
        for file in sorted((root / package).rglob("*.py"))
        if not file.relative_to(root).as_posix().startswith(HOMES)
        for line in found(file.read_text())
    ]


def test_choices_are_known_in_one_place():
    assert outside(REPO) == []


@pytest.mark.parametrize(
    "line",
    [
        "if config.loss.head == 'full': pass",
        "late = 'cce' != loss.head",
        "if z_loss and head in ('torch', 'cce'): pass",
        "rows = 2 if z.kernel == 'flex' else 1",
        "plain = config.precision.policy in ('fp32', 'fp64')",
        "narrow = policy.startswith('fp8')",
        "exact = recipe.startswith(('fp32/', 'fp64/'))",
        "muon = config.optim.name == 'muon'",
        "other = (optim.name, device) == ('adamw8bit', 'cuda')",
        "match loss.head:\n    case 'liger': pass",
        "words = {'full': 'all', 'chunked': 'some'}[loss.head]",
        "TRIED = ('cudnn', 'flash')",
        "kernel: Literal['flash', 'math'] = 'flash'",
    ],
)
def test_a_comparison_or_a_list_elsewhere_is_found(tmp_path, line):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "core/plan.py").write_text(f"x = 1\n{line}\n")
    (tmp_path / "core/components").mkdir()
    (tmp_path / "core/components/heads.py").write_text(line)
    assert outside(tmp_path)[0] == "core/plan.py:2"
    assert all(each.startswith("core/plan.py") for each in outside(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        "if config.loss.chosen.library: pass",
        "settings = {'loss.head': 'full'}",
        "DTYPES = {'bf16': 2, 'fp16': 2}",
        "if gradient_dtype != 'fp32': pass",
        "if device == 'auto': pass",
        "BACKENDS = {'torch': 1, 'jax': 2}",
    ],
)
def test_what_is_no_choice_of_these_is_let(line):
    assert list(found(line)) == []

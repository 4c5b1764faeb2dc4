"""A command checks its needs at its start, and every import is a declared dependency."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep.core.data.sources
import lockstep.jax_backend.backend
import lockstep.scripts.shared.needs
from lockstep.core.data.sources import list_source
from lockstep.core.errors import UserError
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.house.imported import loaded_late, third_party
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import tiny_config
from lockstep.scripts import cli
from lockstep.scripts.shared.needs import NEEDS, PARTS, missing

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
# Module → what it is installed by, where the names differ by more than - for _.
INSTALLED_BY = {"orbax": "orbax-checkpoint", "pydantic_core": "pydantic"}
# FlashAttention-3 is built from its repository for a machine's own CUDA; no index has it.
NOT_ON_AN_INDEX = {"flash_attn_interface"}
# Torch's build for CUDA requires the one version that it works with.
BROUGHT_BY_TORCH = {"triton"}
PACKAGES = ("core", "scripts", "torch_backend", "jax_backend")


def named(requirements) -> set[str]:
    return {re.findall(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-") for line in requirements}


REQUIRED = named(PROJECT["dependencies"])
OPTIONAL = set().union(*(named(lines) for name, lines in PROJECT["optional-dependencies"].items() if name != "test"))


def undeclared(root: Path) -> dict[str, str]:
    found = third_party(root, PACKAGES)
    return {
        name: file
        for name, file in found.items()
        if name not in NOT_ON_AN_INDEX | BROUGHT_BY_TORCH
        and INSTALLED_BY.get(name, name.replace("_", "-")) not in REQUIRED | OPTIONAL
    }


def test_every_package_that_is_imported_is_declared():
    assert undeclared(REPO) == {}
    assert {"torch", "jax", "tomli_w", "orbax", "wandb", "liger_kernel"} <= third_party(REPO, PACKAGES).keys()


def test_a_package_that_is_not_declared_is_named(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "core" / "planted.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import attrs\ndef f():\n    from yaml import load\n"
    )
    assert undeclared(tmp_path) == {"yaml": "core/planted.py"}


def test_each_required_package_has_a_tested_version():
    versions = {line.partition("==")[0] for line in (REPO / "constraints.txt").read_text().splitlines()}
    assert versions >= REQUIRED


# Loaded by the backend that a command opens first, or imported with the command itself.
AT_THE_START = {"docstring_parser", "flax", "jax", "numpy", "optax", "pydantic", "torch", "torchao", "tyro"}
# Looked for where a source has parquet in it, where one is at an address, and where a session of JAX is to write
# checkpoints.
ELSEWHERE = {"pyarrow", "fsspec", "orbax"}
# In the modules that a command imports, for work that it does not do: writing a run file, reading a checkpoint or a
# tokenizer.
NOT_USED = {
    "data prepare": {"tomli_w"},
    "export": {"tomli_w"},
    "museum": {"tomli_w"},
    "report": {"safetensors", "tomli_w"},
    "runs": {"safetensors", "tomli_w"},
    "sample": {"tomli_w"},
    "profile": {"tomli_w"},
    "plan": {"tokenizers", "tomli_w"},
    "bench step": {"safetensors", "tomli_w"},
    "bench best": {"safetensors"},
    "bench peers": {"safetensors", "tomli_w"},
    "bench data": {"safetensors", "tomli_w"},
    "bench ladder": {"safetensors", "tomli_w"},
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_what_a_command_loads_late_is_looked_for_at_its_start(command):
    late = loaded_late(REPO, cli.COMMANDS[command][0])
    required = {name for name in late if INSTALLED_BY.get(name, name.replace("_", "-")) in REQUIRED}
    due = required - AT_THE_START - NOT_USED.get(command, set())
    asked = {name.partition(".")[0] for name in NEEDS[command]}
    assert due - ELSEWHERE <= asked <= due


def test_there_is_a_list_for_every_command():
    assert NEEDS.keys() == cli.COMMANDS.keys()


@pytest.fixture
def without(monkeypatch):
    """Hide packages from every search for them."""

    def hide(*names, where=lockstep.scripts.shared.needs):
        real = where.find_spec
        monkeypatch.setattr(where, "find_spec", lambda name: None if name in names else real(name))

    return hide


def test_a_command_that_lacks_something_does_not_begin(without, monkeypatch, capsys):
    without("tomli_w", "rich")
    monkeypatch.setattr(cli, "_command", lambda name: lambda rest: pytest.fail("it began"))
    assert cli.run(["bench", "best", "configs/llama-1b.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "lockstep: bench best: missing packages: rich, tomli-w; install them with: pip install rich tomli-w"
    ]


def test_its_help_is_there_all_the_same(without, monkeypatch):
    without("tomli_w")
    monkeypatch.setattr(cli, "_command", lambda name: lambda rest: 17)
    assert cli.run(["bench", "best", "--help"]) == 17
    assert cli.run(["bench", "step"]) == 17


def test_a_package_inside_one_that_is_not_there_is_missing():
    assert missing(["no_such_package.checkpoint", "json", "json"]) == ["no_such_package.checkpoint"]


def test_parquet_without_pyarrow_is_refused_when_the_source_is_listed(without, tmp_path):
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "two.parquet").write_bytes(b"")
    without("pyarrow", where=lockstep.core.data.sources)
    with pytest.raises(UserError, match=r"two\.parquet in .* is parquet, which needs pyarrow"):
        list_source(str(tmp_path))
    assert list_source(str(tmp_path / "one.txt"))


def test_jax_does_not_train_without_what_writes_its_checkpoints(without):
    without("orbax.checkpoint", where=lockstep.jax_backend.backend)
    with pytest.raises(UserError, match="pip install orbax-checkpoint"):
        JaxBackend().describe(tiny_config())


# gpu_check.sh

GPU_CHECK = ["bash", str(REPO / "scripts" / "gpu_check.sh")]
LATE_IN_PARTS = {
    "parity": ("lockstep.scripts.commands.data_prepare", "lockstep.scripts.commands.parity"),
    "large": ("lockstep.scripts.commands.data_prepare", "lockstep.scripts.commands.parity"),
    "curves": ("lockstep.scripts.commands.data_prepare", "lockstep.scripts.studies.two_curves"),
}


@pytest.mark.parametrize(("arguments", "parts"), [
    ((), ("tests", "parity", "sums", "bench")), *[(("--only", part), (part,)) for part in PARTS]
])  # fmt: skip
def test_gpu_check_says_in_one_line_what_a_python_lacks(arguments, parts, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    done = subprocess.run(
        [*GPU_CHECK, *arguments, str(tmp_path / "out")],
        env=os.environ | {"PYTHON": str(bare)},
        capture_output=True,
        text=True,
    )
    lacking = " ".join(
        lockstep.scripts.shared.needs.DISTRIBUTIONS.get(n, n) for n in dict.fromkeys(n for p in parts for n in PARTS[p])
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line == (
        f"gpu_check: {', '.join(parts)}: missing packages: {lacking.replace(' ', ', ')}; "
        f"install them with: pip install {lacking}"
    )


@pytest.mark.parametrize("part", PARTS)
def test_gpu_check_looks_for_what_its_commands_look_for(part):
    commands = {"parity": ["parity", "data prepare"], "large": ["parity", "data prepare"], "bench": ["bench step"]}
    commands |= {"best_bf16": ["bench best"], "best_fp8": ["bench best"]}
    commands |= {"watch": ["data prepare"], "curves": ["data prepare"]}
    assert {name for command in commands.get(part, []) for name in NEEDS[command]} <= set(PARTS[part])


# XLA


@pytest.mark.parametrize("module", ["lockstep.scripts.cli", "lockstep.jax_backend", "lockstep.jax_backend.watch"])
@pytest.mark.parametrize(("own", "due"), [(None, "false"), ("true", "true")])
def test_jax_leaves_the_trainer_its_memory_unless_somebody_says_otherwise(module, own, due):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    environment = {key: value for key, value in os.environ.items() if key != name} | ({name: own} if own else {})
    code = f"import {module}, os; print(os.environ['{name}'])"
    told = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True)
    assert told.stdout.strip() == due, told.stderr

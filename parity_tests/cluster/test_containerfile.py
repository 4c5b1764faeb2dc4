"""The container file: what it copies is there and enough for an installation, and what it runs is a script."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.parity_tests.cluster.commands import EXAMPLES, IN_THE_CONTAINER
from lockstep.parity_tests.repository import REPO

FILE = EXAMPLES / "Containerfile"
KNOWN = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "WORKDIR"}


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, arguments); a backslash joins lines, and comments are left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest


def problems(text: str, root: Path = REPO) -> Iterator[str]:
    """Yield what is wrong with a container file."""
    names: list[str] = []
    given: list[str] = []
    for name, rest in instructions(text):
        names.append(name)
        if name not in KNOWN:
            yield f"no instruction: {name}"
        elif name == "COPY":
            *sources, target = rest.split()
            yield from (f"not there: {source}" for source in sources if not (root / source).exists())
            if target != "./" and [target] != sources:
                yield f"at another place than in the checkout: {rest}"
        elif name in ("ARG", "ENV"):
            given += re.findall(r"(\w+)=", rest)
        elif name == "WORKDIR" and f"{rest}/" != IN_THE_CONTAINER:
            yield f"the examples look for {IN_THE_CONTAINER}, not for {rest}"
        elif name == "CMD" and not is_command(rest):
            yield f"no command: {rest}"
        elif (
            name == "RUN"
            and subprocess.run(["bash", "-n"], input=rest, text=True, stderr=subprocess.DEVNULL).returncode
        ):
            yield f"no script: {rest}"
        elif name == "RUN" and "pip install" in rest and "--constraint constraints.txt" not in rest:
            yield f"not by the tested versions: {rest}"
        used = re.findall(r"\$\{(\w+)", rest)
        yield from (f"not given before: {variable}" for variable in used if variable not in (*given, "PATH"))
    places = dict(re.findall(r"\b(VIRTUAL_ENV|PATH)=(\S+)", text))
    if not places["PATH"].startswith(f"{places['VIRTUAL_ENV']}/bin:"):
        yield f"the environment is not on the path: {places['PATH']}"
    if names[:2] != ["ARG", "FROM"]:
        yield "begins with no image"


def is_command(text: str) -> bool:
    """Return whether an instruction's words are a JSON list that begins with a command of the project."""
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return words[0] in tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]


def copied() -> list[str]:
    return [source for name, rest in instructions(FILE.read_text()) if name == "COPY" for source in rest.split()[:-1]]


def test_nothing_is_wrong_with_it() -> None:
    assert list(problems(FILE.read_text())) == []


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("COPY core core", "COPY cores core", "not there: cores"),
        ("COPY core core", "COPIE core core", "no instruction: COPIE"),
        ('venv "${VIRTUAL_ENV}"', 'venv "${VIRTUAL_ENV}', "no script"),
        ("--constraint constraints.txt torch", "torch", "not by the tested versions"),
        ("FROM ${BASE}", "RUN true", "begins with no image"),
        ("FROM ${BASE}", "FROM ${BASIS}", "not given before: BASIS"),
        ('".[${EXTRAS}]"', '".[${EXTRA}]"', "not given before: EXTRA"),
        ("COPY core core", "COPY core cores", "at another place than in the checkout: core cores"),
        ("WORKDIR /opt/lockstep", "WORKDIR /opt/lockstp", "the examples look for /opt/lockstep/"),
        ('CMD ["lockstep"', 'CMD ["lockstp"', "no command"),
        ('"--help"]', '"--help"', "no command"),
        ("PATH=/opt/venv/bin", "PATH=/opt/env/bin", "the environment is not on the path"),
    ],
)
def test_a_planted_mistake_is_found(before: str, after: str, found: str) -> None:
    text = FILE.read_text()
    assert before in text
    assert any(problem.startswith(found) for problem in problems(text.replace(before, after)))


def test_every_folder_of_the_package_is_copied() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {name.rstrip("*").split(".")[1] for name in packages if "." in name}
    assert {source.split("/")[0] for source in copied()} >= folders | {
        "src",
        "lockstep",
        "configs",
        "README.md",
        "LICENSE",
    }
    assert all(tracked(source) for source in copied())


def tracked(source: str) -> bool:
    return bool(subprocess.run(["git", "ls-files", source], cwd=REPO, capture_output=True).stdout)


def test_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (given,) = [rest.partition("=")[2] for name, rest in instructions(FILE.read_text()) if rest.startswith("EXTRAS=")]
    assert set(given.split(",")) <= extras.keys()
    for path in (EXAMPLES / "skypilot").glob("*.yaml"):
        (named,) = re.findall(r'"\.\[([a-z,0-9]+)\]"', path.read_text())
        assert set(named.split(",")) <= extras.keys()


def test_what_is_copied_is_enough_for_an_installation(tmp_path: Path) -> None:
    for name, rest in instructions(FILE.read_text()):
        if name == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                place = tmp_path / "image" / (os.path.join(target, source) if target.endswith("/") else target)
                place.parent.mkdir(parents=True, exist_ok=True)
                copy(REPO / source, place)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), "."], cwd=tmp_path / "image", check=True, timeout=300)
    (wheel,) = tmp_path.glob("lockstep-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for path in ("core/data/prepare.py", "scripts/cli.py", "configs/llama-1b.toml", "parity_tests/faults/__init__.py"):
        assert f"lockstep/{path}" in names


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)

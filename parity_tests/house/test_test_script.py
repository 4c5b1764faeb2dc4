"""scripts/test.sh runs every part whatever fails, prints the seconds of each, and ends 0 only if all are clean."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO

TOOLS = {
    "ruff": ("ruff check", "ruff format"),
    "mypy": ("mypy",),
    "lint-imports": ("lint-imports",),
    "python": ("pytest",),
}
PARTS = [part for parts in TOOLS.values() for part in parts]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout in which every tool only notes its arguments and ends with the code in `<tool>.code`."""
    (tmp_path / "scripts/setup").mkdir(parents=True)
    shutil.copy(REPO / "scripts/test.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup/setup_env.sh").write_text("exit 0\n")
    (tmp_path / "scripts/setup/environment.sh").write_text("")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for tool in TOOLS:
        file = tmp_path / ".venv/bin" / tool
        file.write_text(
            f'#!/bin/sh\necho "$@" >>{tool}.calls\necho "{tool} prints this"\n'
            f"exit $(cat {tool}.code 2>/dev/null || echo 0)\n"
        )
        file.chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(checkout / "scripts/test.sh"), *arguments], capture_output=True, text=True)


def parts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Each part of the table at the end, and how it ended."""
    lines = done.stdout.partition("── parts\n")[2].splitlines()
    assert re.fullmatch(r"all +\d+ s", lines.pop())
    found = [re.fullmatch(r"(.+?) +\d+ s   (.+)", line) for line in lines]
    return {match[1]: match[2] for match in found if match}


def test_every_part_is_printed_with_its_seconds(checkout: Path) -> None:
    done = run(checkout, "--all", "-x")
    assert (done.returncode, done.stderr) == (0, "")
    assert parts(done) == dict.fromkeys(PARTS, "clean")
    (call,) = (checkout / "python.calls").read_text().splitlines()
    assert call.startswith("-m pytest -n 2 ") and call.endswith(" --all -x")
    assert all(f"{tool} prints this" in done.stdout for tool in TOOLS)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_part_that_fails_is_named_and_the_others_run(tool: str, checkout: Path) -> None:
    (checkout / f"{tool}.code").write_text("3")
    done = run(checkout)
    assert done.returncode == 1
    failed = dict.fromkeys(TOOLS[tool], "exit code 3")
    assert parts(done) == dict.fromkeys(PARTS, "clean") | failed
    assert done.stderr == f"scripts/test.sh: not clean: {'; '.join(f'{part} (exit code 3)' for part in failed)}\n"


def test_a_part_beside_the_tests_that_is_killed_is_not_clean(checkout: Path) -> None:
    (checkout / ".venv/bin/mypy").write_text("#!/bin/sh\nkill -9 $$\n")
    done = run(checkout)
    assert done.returncode == 1 and parts(done)["mypy"] == "exit code 137"

"""Every `lockstep` command that README, CONTRIBUTING and the guide show is understood by the command line itself.

Options are checked, and settings with the rules between them, on the run file that the command names. The files and the
candidates that a command names must be there, unless a page tells the reader to put his own in their place.
"""

from __future__ import annotations

import importlib
import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.config.file import load_config
from lockstep.core.errors import UserError
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.cli import COMMANDS, run
from lockstep.scripts.docs.pages import fences, written_by_hand

PAGES = [page for page in written_by_hand() if "lockstep" in page.read_text(encoding="utf-8")]
# Options of torchrun and environment variables may stand before it.
_CALL = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .*-m |python -m )?lockstep (.*)$")

# Operators of the shell, which end the words of a command.
_SHELL = ("|", "&", "&&", ">", ";")


class Parsed(BaseException):
    """The command line was understood; raised in place of running the command."""


def commands(text: str) -> list[str]:
    """Return the arguments of each command in a page's fences, and in its blocks that are indented."""
    blocks = [body for language, body in fences(text) if language in ("", "sh", "bash", "console")]
    blocks += [re.sub(r"^ {4}", "", block, flags=re.M) for block in re.findall(r"(?:^ {4}\S.*\n)+", text, re.M)]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [match[1] for line in lines if (match := _CALL.match(line))]
    return list(dict.fromkeys(found))


def wrong(arguments: str) -> str | None:
    """Return what the command line finds wrong with a command, or None."""
    words = list(takewhile(lambda word: word not in _SHELL, shlex.split(arguments, comments=True)))
    if words[:1] == ["--help"]:
        return None
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        return f"{arguments}: no such command"
    module = vars(importlib.import_module(COMMANDS[name][0]))
    real = module["parse"]
    seen: list[Any] = []

    def parse(*given: Any, **more: Any) -> None:
        seen.extend(real(*given, **more))
        raise Parsed

    try:
        module["parse"] = parse
        module["main"](words[len(name.split()) :])
    except Parsed:
        pass
    except UserError as error:
        return f"{arguments}: {'; '.join(error.lines)}"
    finally:
        module["parse"] = real
    options, settings = seen
    return _wrong_files(arguments, words) or _wrong_settings(arguments, options, settings)


def _wrong_files(arguments: str, words: list[str]) -> str | None:
    """Return the first file of this repository that a command names and that is not there."""
    for word in words:
        path = word.partition(":")[0]
        ours = path.startswith(("configs/", "docs/", "parity_tests/")) and not _written(words, word)
        if ours and not (REPO / path).exists():
            return f"{arguments}: there is no {path}"
        if ours and (name := word.partition(":")[2]) and not re.search(rf"\b{name}\b", (REPO / path).read_text()):
            return f"{arguments}: {path} has no {name}"
    return None


def _written(words: list[str], word: str) -> bool:
    """Return whether the command writes the file: the page shows how it came to be."""
    return words[max(words.index(word) - 1, 0)] in ("--json", "--page", "--out")


def _wrong_settings(arguments: str, options: Any, settings: dict[str, str]) -> str | None:
    """Return the first mistake among the settings and the rules between them, on the command's run file or run."""
    file, run_directory = getattr(options, "config", None), getattr(options, "resume", None)
    if isinstance(run_directory, Path):
        # The quickstart's run, and those of the other files, have their files' names.
        file = Path("configs") / f"{run_directory.name}.toml"
    if isinstance(file, Path) and not (REPO / file).is_file():
        return None
    try:
        load_config(REPO / file if file else None, settings)
    except UserError as error:
        return f"{arguments}: {'; '.join(error.lines)}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    assert [said for command in commands(page.read_text(encoding="utf-8")) if (said := wrong(command))] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("parity configs/quickstart.toml --stepz 3", "stepz"),
        ("train configs/quickstart.toml --optim.peek-lr 1e-3", "peek"),
        ("train configs/quickstart.toml --train.batch-size 7", "batch_size"),
        ("plan configs/llama-2b.toml", "there is no configs/llama-2b.toml"),
        ("parity configs/quickstart.toml --candidate parity_tests/faults/nowhere.py:Wrong", "there is no parity_tests"),
        ("parity configs/quickstart.toml --candidate parity_tests/faults/forward.py:Wrong", "has no Wrong"),
        ("pretrain configs/quickstart.toml", "no such command"),
    ],
)
def test_a_planted_mistake_is_seen(command: str, said: str) -> None:
    assert said in str(wrong(command))


def test_commands_of_pages_are_found() -> None:
    page = "```\n$ lockstep plan a.toml  # why\n```\n\n    JAX_PLATFORMS=cuda lockstep parity b \\\n    --steps 1\n"
    assert commands(page) == ["plan a.toml  # why", "parity b  --steps 1"]
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 60


def test_the_plan_of_the_readme_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    (shown,) = [c for c in commands((REPO / "README.md").read_text(encoding="utf-8")) if c.startswith("plan ")]
    assert run(shlex.split(shown, comments=True)) == 0
    assert "1,241,581,568" in capsys.readouterr().out

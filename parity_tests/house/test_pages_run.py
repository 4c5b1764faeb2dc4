"""Commands of README, CONTRIBUTING and the guide run as they stand, in the order of their page.

Each page begins in a folder of its own, as after a clone and the quickstart. Run files there are smaller
(documented.SMALLER), and commands that no machine of the tests can run bear a mark with the reason.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from lockstep.parity_tests.house import documented
from lockstep.parity_tests.house.documented import (
    Command,
    in_process,
    in_shell,
    missing,
    pages_with_commands,
    read_page,
    write_folder,
)
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.slow_tests import NOT_RUN
from lockstep.scripts.cli import run

PAGES = dict(pages_with_commands())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the quickstart's data."""
    folder = write_folder(tmp_path_factory.mktemp("documented") / "lockstep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["data", "prepare", "configs/quickstart.toml", "--workers", "1"]) == 0
    return folder


@pytest.fixture(scope="module")
def finished(prepared: Path) -> Path:
    """Make the quickstart's run there, with its checks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(prepared)
        assert run(["train", "configs/quickstart.toml"]) == 0
    return prepared


def uses_the_quickstart(page: Path) -> bool:
    """Return whether a command of the page reads the quickstart's run, or goes on with it."""
    lines = [command.line for command in PAGES[page].commands if not command.skipped]
    return any("runs/quickstart" in line or "quickstart.sh" in line or "lockstep runs" in line for line in lines)


@pytest.fixture
def folder(page: Path, request, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    prepared = request.getfixturevalue("finished" if uses_the_quickstart(page) else "prepared")
    copied = tmp_path / "lockstep"
    shutil.copytree(prepared, copied, symlinks=True)
    monkeypatch.chdir(copied)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("aside")))
    return copied


def wrong(command: Command, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command; return what is otherwise than the page shows, and then what was printed."""
    capsys.readouterr()
    words = in_process(command)
    if words is None:
        code, printed = in_shell(command, folder)
    else:
        try:
            code = run(words)
        except SystemExit as stop:  # --help
            code = int(stop.code or 0)
        said = capsys.readouterr()
        printed = said.out + said.err
    found = [f"{command.line}: ended with {code}, not {command.ends}"] if code != command.ends else []
    found += [f"{command.line}: did not print: {line}" for line in missing(command.output, printed)]
    return [*found, *printed.splitlines()[-40:]] if found else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_run_as_they_stand(page: Path, folder: Path, capsys, record_property) -> None:
    for reason, count in PAGES[page].skipped().items():
        record_property(f"{NOT_RUN}{reason}", count)
    for name, text in PAGES[page].files.items():
        (folder / name).write_text(text, encoding="utf-8")
    found = [wrong(command, folder, capsys) for command in PAGES[page].commands if not command.skipped]
    assert [line for lines in found for line in lines] == []


# The marks, and what a page must not get wrong

PAGE = """
<!-- ends 1: lockstep parity -->
<!-- not run, needs a GPU: lockstep train -->
```
$ lockstep parity a.toml \\
    --steps 1
…
first bad step 1; excess 3.2
$ lockstep train b.toml
$ lockstep demo
$ echo $?
2
```

<!-- output -->
```
step 1: found
```

<!-- file mine.py -->
```py
x = 1
```

    lockstep plan b.toml   # why

Text, and a mark that is shown: `<!-- not run, takes hours -->`.

<!-- not run, takes hours -->

    lockstep bench data
"""


def test_commands_are_read_with_their_marks() -> None:
    page = read_page(PAGE)
    assert page.mistakes == [] and page.files == {"mine.py": "x = 1\n"}
    parity, train, demo, plan, bench = page.commands
    assert (parity.ends, parity.skipped, parity.output) == (1, None, ("…", "first bad step 1; excess 3.2"))
    assert (train.skipped, demo.ends, demo.output) == ("needs a GPU", 2, ("step 1: found",))
    assert plan.line == "lockstep plan b.toml   # why" and bench.skipped == "takes hours"
    assert page.skipped() == Counter({"needs a GPU": 1, "takes hours": 1})
    assert (in_process(parity), in_process(plan)) == (["parity", "a.toml", "--steps", "1"], ["plan", "b.toml"])


@pytest.mark.parametrize("line", ["lockstep runs a | jq .", "JAX_PLATFORMS=cuda lockstep plan a", "bash a.sh"])
def test_what_needs_a_shell_gets_one(line: str) -> None:
    assert in_process(Command(line)) is None


@pytest.mark.parametrize(
    ("mark", "mistake"),
    [
        ("not run, I have no time", "no such mark"),
        ("ends 1: lockstep trian", "no command of the next block begins so"),
        ("not run, needs a GPU: lockstep plan", "no command of the next block begins so"),
    ],
)
def test_a_wrong_mark_is_a_mistake(mark: str, mistake: str) -> None:
    page = read_page(f"<!-- {mark} -->\n```\nlockstep train a.toml\n```\n")
    assert [found.startswith(mistake) for found in page.mistakes] == [True]
    assert read_page("<!-- not run, takes hours -->\nText.\n").mistakes == ["no block follows: not run, takes hours"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_wrong_mark(page: Path) -> None:
    assert PAGES[page].mistakes == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("lockstep plan configs/quickstart.toml", "ended with 0, not 1"),
        ("lockstep plan configs/nowhere.toml", "ended with 2, not 1"),
        ("echo first bad step 2, origin q_rope; exit 1", "did not print: first bad step 1; origin: q_rope"),
    ],
)
def test_another_exit_code_and_a_line_that_is_not_printed_are_seen(line: str, found: str, tmp_path, capsys) -> None:
    shown = Command(line, ends=1, output=("…", "first bad step 1; origin: q_rope"))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPO)
        assert found in "\n".join(wrong(shown, tmp_path, capsys))


def test_numbers_may_differ_and_words_may_not() -> None:
    printed = "│ ok   │ gradients │ 168 │ relative error 5.967e-15 (≤ 1e-12) │\nstep 3: disagreed"
    assert missing(("…", "│ ok │ gradients │ 24 │ relative error 1.5e-14 (≤ 1e-12) │", "step 1: …"), printed) == []
    assert missing(("step 1: agreed",), printed) == ["step 1: agreed"]


def test_most_commands_run() -> None:
    """The count of those that do not, with the reasons, is what the summary prints."""
    everything = [command for page in PAGES.values() for command in page.commands]
    assert len(everything) > 130 and sum(command.skipped is None for command in everything) > 80


def test_a_smaller_run_file_keeps_its_steps() -> None:
    for name in documented.SMALLER:
        lines = set(documented.smaller(name, Path("text")).splitlines())
        gone = [line for line in (REPO / name).read_text().splitlines() if line not in lines]
        allowed = set(documented.SMALLER[name])
        assert {line.partition(" = ")[0] for line in gone} <= allowed

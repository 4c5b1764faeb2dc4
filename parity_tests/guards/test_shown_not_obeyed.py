"""Text from elsewhere is shown: a terminal, a browser and a reader of Markdown obey nothing in it."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from lockstep.core.bench.files import write_page
from lockstep.core.report.build import build_report
from lockstep.core.report.compare import write_comparison
from lockstep.core.sinks import tables
from lockstep.core.sinks.terminal import open_console
from lockstep.core.sinks.visible import markdown, visible
from lockstep.parity_tests.report import fake_run
from lockstep.parity_tests.report.fake_run import write_run
from lockstep.scripts import cli
from lockstep.scripts.commands import sample
from lockstep.scripts.shared.failures import in_one_line

# Changes the title, writes the clipboard, moves up and writes over the last line, hides, turns the direction around.
COMMANDS = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[1A\x1b[2K\x9b31m\r\b\x7f\u202e\u2066"
MARKUP = "[link=http://evil.example]here[/link] [bold red]agreed[/] :warning:"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_what_a_terminal_obeys_is_escaped() -> None:
    shown = visible(f"a{COMMANDS}b\tc\nd ünï 🙂")
    assert not OBEYED.search(shown) and shown.startswith("a\\x1b]0;title\\x07") and shown.endswith("b\tc\nd ünï 🙂")
    assert visible(shown) == shown


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_prints_text(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a line, as a cell, a title or a header of a table, with and without a style."""
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    console = open_console(400)
    console.file = written = io.StringIO()
    evil = COMMANDS + MARKUP
    console.print(evil)
    console.print(evil, style="bold red", soft_wrap=True)
    console.print(tables.table(evil, (evil, "b"), [(evil, 1)]))
    table = Table(title=evil)
    table.add_column(evil)
    table.add_row(Text(evil, "green"))
    table.add_row(evil)
    console.print(table)
    text = written.getvalue()
    # Colours are the console's own.
    text = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert not OBEYED.search(text)
    words = re.sub("[\\s\u2500-\u257f]", "", text)
    assert words.count(re.sub("\\s", "", MARKUP)) >= 8 and words.count("\\x1b]52;c;") >= 8


def test_no_command_makes_another_console() -> None:
    """But for rich's progress bar, every word on a terminal goes through `open_console`.

    The script that draws the pictures records lines of a file of this repository, and prints to no terminal.
    """
    root = Path(cli.__file__).resolve().parents[1]
    another = re.compile(r"\bConsole\(|rich\.print|from rich import")
    assert another.search("console = Console(highlight=False)")
    made = {
        path.relative_to(root).as_posix()
        for package in ("core", "scripts", "torch_backend", "jax_backend")
        for path in (root / package).rglob("*.py")
        if another.search(path.read_text())
    }
    assert made == {"scripts/docs/pictures.py"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_a_sample_is_shown_by_a_terminal_and_kept_as_it_is_in_a_file(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's model writes whatever it was trained to."""
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    options = sample.Sample(Path("run"), prompt="x", tokens=len(COMMANDS) + 1)
    drawn: Iterator[int] = iter([*range(len(COMMANDS)), -1])
    monkeypatch.setattr("lockstep.core.sampling.draw.write_tokens", lambda *_: drawn)
    sample.write_one(options, _Config(), _Decoder(), _Letters(), None, None, 0)  # type: ignore[arg-type]
    written = out.getvalue()
    assert written == "x" + (visible(COMMANDS) if terminal else COMMANDS)
    assert bool(OBEYED.search(written)) is not terminal


class _Config:
    class attention:
        needs_documents = False


class _Decoder:
    window = 8


class _Letters:
    eot_id, vocab_size = -1, len(COMMANDS)

    def decode(self, ids: list[int]) -> str:
        return "".join(COMMANDS[number] for number in ids)


def test_notes_of_a_report_and_errors_of_libraries_are_one_visible_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = fake_run.about()
    monkeypatch.setattr(
        fake_run, "about", lambda: about | {"damaged": [{"path": COMMANDS, "records": [1], "checks": []}]}
    )
    run = write_run(tmp_path / "run", steps=20)
    assert cli.run(["report", str(run)]) == 0
    said = capsys.readouterr().err
    assert "\\x1b]0;title" in said and not OBEYED.search(said)
    assert not OBEYED.search(in_one_line(ValueError(COMMANDS)))


# Pages


def test_markdown_holds_no_html_and_no_pictures(tmp_path: Path) -> None:
    evil = f"<script>alert(1)</script><img src=x onerror=alert(1)>![x](http://evil.example/x.png){COMMANDS}"
    for text in (markdown(evil), _written(tmp_path / "bench.md", evil)):
        assert "<" not in text and "![" not in text and not OBEYED.search(text)
        assert "alert(1)" in html.unescape(text)


def _written(path: Path, text: str) -> str:
    write_page(path, text)
    return path.read_text()


def test_a_trace_of_somebody_elses_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = f"<img src=x onerror=alert(1)>{COMMANDS}"
    event = {"ph": "X", "name": evil, "cat": "cpu_op", "ts": 1.0, "dur": 5.0, "pid": 1, "tid": 1}
    mark = {"ph": "X", "name": f"lockstep.{evil}", "cat": "user_annotation", "ts": 0.0, "dur": 9.0}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event, mark]}))
    assert cli.run(["profile", "--trace", str(tmp_path / "trace.json"), "--out", str(tmp_path)]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "summary.md").read_text()
    assert "onerror" in said and not OBEYED.search(said)
    assert "onerror" in page and not OBEYED.search(page) and "<" not in page


def test_a_report_runs_no_script_but_its_own(tmp_path: Path) -> None:
    """The policy names the one script by its hash: a browser refuses every other, and every handler in an attribute."""
    one, two = (write_run(tmp_path / name, steps=30, seed=seed) for name, seed in (("a", 0), ("b", 1)))
    for page in (build_report(one), write_comparison([one, two], tmp_path / "c.html").read_text()):
        policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["script-src"] == f"'sha256-{digest}'"
        assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert not re.search(r"\son\w+=", re.sub(r"<script.*?</script>", "", page, flags=re.S))

"""Read the commands of a documentation page and their marks, and make a folder in which they run unchanged.

A mark is an HTML comment above a block, which the rendered page does not show:

    <!-- not run, needs a GPU: lockstep train configs/rollout/h100x1.toml -->   skip commands that begin so
    <!-- not run, takes hours -->                                               skip all commands of the block
    <!-- ends 1: lockstep parity -->                                            expect exit code 1, not 0
    <!-- until Ctrl-C: lockstep report --watch -->                              interrupt after the first line
    <!-- output of another run -->                                              do not compare the output
    <!-- output -->                                                             the block is the last command's output
    <!-- file mine.py -->                                                       the block is a file, which is written
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.parity_tests.repository import REPO

REASONS = (
    "needs a GPU",
    "needs several GPUs",
    "needs a cluster",
    "needs the network",
    "needs a package of an extra",
    "needs a run with a fault",
    "takes hours",
    "changes this machine",
    "names are yours",
    "has a test of its own",
)
# A line that begins with one of these programs is a command. A block that begins otherwise shows something else.
PROGRAMS = ("bash", "lockstep", "mkdocs", "pip", "pipx", "pytest", "python", "torchrun", "uv")
_BLOCK = re.compile(
    r"^ *<!-- (?P<mark>[^\n]*?) -->|^(?P<margin> *)```(?P<language>[\w-]*)[^\n]*\n(?P<fence>.*?)^(?P=margin)```"
    r"|(?P<indented>(?:(?<=\n\n)|(?<=^)) {4}\S[^\n]*\n(?:(?: {4}[^\n]*)?\n)*)",
    re.M | re.S,
)
_BLOCK_LANGUAGES = ("", "sh", "bash", "console")
_BEGINS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)})(?= |$)")


@dataclass(frozen=True)
class Command:
    """A command of a page, its expected end, and the lines of output that the page shows below it."""

    line: str
    ends: int = 0
    skipped: str | None = None
    until_interrupt: bool = False
    output: tuple[str, ...] = ()


@dataclass
class Page:
    """The commands of a page in order, the files that it shows, and the mistakes in its marks."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def skipped(self) -> Counter[str]:
        """Return the number of commands that are not run, by reason."""
        return Counter(one.skipped for one in self.commands if one.skipped)


def read_page(text: str) -> Page:
    """Return the commands of a page, with their marks applied. A mark applies to the next block."""
    page, marks = Page(), list[str]()
    for found in _BLOCK.finditer(text):
        if found["mark"] is not None:
            if re.match(r"(?:not run|ends|until Ctrl-C|output|file)\b", found["mark"]):
                marks.append(found["mark"])
            continue
        margin, body = found["margin"], found["fence"]
        body = found["indented"] if body is None else body
        lines = [line.removeprefix("    " if margin is None else margin) for line in body.splitlines()]
        commands = _commands(lines) if (found["language"] or "") in _BLOCK_LANGUAGES else []
        for mark in [each for each in marks if each.startswith("file ")]:
            marks.remove(mark)
            page.files[mark.removeprefix("file ")] = "\n".join(lines) + "\n"
        if "output" in marks and not commands and page.commands:
            marks.remove("output")
            last = page.commands.pop()
            page.commands.append(replace(last, output=(*last.output, *lines)))
        for mark in marks:
            commands = _marked(mark, commands, page.mistakes)
        marks = []
        page.commands += commands
    page.mistakes += [f"no block follows: {mark}" for mark in marks]
    return page


def _commands(lines: list[str]) -> list[Command]:
    """Return the commands of a block. If a line begins with `$ `, lines that do not are output."""
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    with_output = any(line.startswith("$ ") for line in joined)
    found = list[Command]()
    shows_exit_code = False
    for line in filter(str.strip, joined):
        if shows_exit_code:
            found[-1] = replace(found[-1], ends=int(line))
        shows_exit_code, was = line == "$ echo $?", shows_exit_code
        if was or shows_exit_code:
            continue
        if line.startswith("$ ") if with_output else _BEGINS.match(line):
            found.append(Command(line.removeprefix("$ ").strip()))
        elif with_output and found:
            found[-1] = replace(found[-1], output=(*found[-1].output, line))
    return found


def _marked(mark: str, commands: list[Command], mistakes: list[str]) -> list[Command]:
    """Return the commands with one mark applied to those that it names; append errors to `mistakes`."""
    kind, _, named = mark.partition(": ")
    chosen = [at for at, one in enumerate(commands) if one.line.startswith(named)]
    changes: dict[str, object]
    if kind.startswith("not run, ") and kind.removeprefix("not run, ") in REASONS:
        changes = {"skipped": kind.removeprefix("not run, ")}
    elif re.fullmatch(r"ends \d", kind):
        changes = {"ends": int(kind[-1])}
    elif kind == "until Ctrl-C":
        changes = {"until_interrupt": True}
    elif kind == "output of another run":
        changes = {"output": ()}
    else:
        mistakes.append(f"no such mark: {mark}")
        return commands
    if not chosen:
        mistakes.append(f"no command of the next block begins so: {mark}")
    return [replace(one, **changes) if at in chosen else one for at, one in enumerate(commands)]  # type: ignore[arg-type]


# Output


def skeleton(line: str) -> str:
    """Return a line with each number as # and each run of spaces as one, since these differ between runs."""
    return " ".join(re.sub(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "#", line).split())


def missing(shown: tuple[str, ...], printed: str) -> list[str]:
    """Return the lines that a page shows and that were not printed. `…` in a line matches any text."""
    there = [skeleton(line) for line in printed.splitlines()]
    absent = []
    for line in filter(lambda each: each.strip(" …"), shown):
        parts = [re.escape(part.strip()) for part in skeleton(line).split("…")]
        wanted = re.compile(".*".join(parts))
        if not any(wanted.search(each) for each in there):
            absent.append(line)
    return absent


# The folder

# By run file, the settings that are smaller in the folder than in the repository. All others stay the same: steps,
# intervals of checks and checkpoints, precision.
SMALLER = {
    "configs/quickstart.toml": {
        "vocab_size": "300",
        "hidden": "32",
        "layers": "2",
        "heads": "4",
        "kv_heads": "2",
        "ffn_hidden": "64",
        "batch_size": "4",
        "micro_batch_size": "2",
        "sequence_length": "32",
    },
    "configs/rollout/laptop.toml": {
        "vocab_size": "300",
        "hidden": "32",
        "layers": "2",
        "ffn_hidden": "64",
        "steps": "20",
        "batch_size": "4",
        "micro_batch_size": "2",
        "sequence_length": "32",
        "curriculum": '"32:0.9, 64:0.1"',
    },
}
# Settings that are added to these files: a small text as data, and eager programs, since compiling takes a minute.
ADDED = {
    "configs/quickstart.toml": {"data": 'source = "TEXT"\nval_fraction = 0.2', "compile": "enabled = false"},
    "configs/rollout/laptop.toml": {"data": 'source = "TEXT"\nval_fraction = 0.2', "compile": "enabled = false"},
}
# Beginning of a command → arguments that are added to it. A sweep trains its model many times.
FEWER_STEPS = {"lockstep sweep ": "--train.steps 4 --optim.warmup-steps 1 --eval.every 2 --parity.every 0"}
_SETUP = "#!/usr/bin/env bash\nexit 0 # the tests' own environment is in .venv\n"


def smaller(name: str, source: Path) -> str:
    """Return the text of a run file with the settings of SMALLER and ADDED. source: the text data to train on.

    Raises AssertionError if the run file lacks one of these settings.
    """
    text = (REPO / name).read_text(encoding="utf-8")
    for key, value in SMALLER[name].items():
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.M)
        assert count == 1, f"{name} has {count} lines of {key}"
    for section, lines in ADDED[name].items():
        if f"[{section}]" in text:
            text = text.replace(f"[{section}]\n", f"[{section}]\n{lines}\n")
        else:
            text += f"\n[{section}]\n{lines}\n"
    return text.replace("TEXT", str(source))


def write_folder(folder: Path) -> Path:
    """Make a folder like the repository, with smaller run files and a small text, in which the commands run.

    It also contains `my_texts`, for pages that use the reader's own texts.
    """
    folder.mkdir(parents=True)
    (folder / "parity_tests").symlink_to(REPO / "parity_tests")
    for name in ("docs/examples", "docs/results/incident"):  # copied, not linked: a command writes there
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in sorted((REPO / "configs").rglob("*.toml")):
        name = file.relative_to(REPO).as_posix()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            smaller(name, folder / "text") if name in SMALLER else file.read_text(encoding="utf-8")
        )
    (folder / "scripts/setup").mkdir(parents=True)
    for name in ("scripts/quickstart.sh", "scripts/setup/environment.sh", "scripts/setup/say.sh"):
        (folder / name).symlink_to(REPO / name)
    (folder / "scripts/setup/setup_env.sh").write_text(_SETUP)
    (folder / ".venv/bin").mkdir(parents=True)
    here = Path(sys.executable).parent
    for program in (*PROGRAMS, "python3"):
        if program not in ("bash", "lockstep") and (here / program).exists():
            (folder / ".venv/bin" / program).symlink_to(here / program)
    command = folder / ".venv/bin/lockstep"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lockstep "$@"\n')
    command.chmod(0o755)
    for name in ("text", "my_texts"):
        (folder / name).mkdir()
        for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:30]:
            head = module.read_bytes()[:4000].decode(errors="ignore")
            (folder / name / f"{module.stem}.txt").write_text(head, encoding="utf-8")
    return folder


def scaled(line: str) -> str:
    """Return a command with the arguments of FEWER_STEPS, and then without a comment at its end."""
    begin = next((each for each in FEWER_STEPS if line.startswith(each)), None)
    return f"{line.partition('  #')[0]} {FEWER_STEPS[begin]}" if begin else line


def in_process(command: Command) -> list[str] | None:
    """Return the arguments of a `lockstep` command that can run in this process, or None if it needs a shell."""
    if command.until_interrupt or re.search(r"[|&;<>$*]", re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command.line)):
        return None
    words = shlex.split(scaled(command.line), comments=True)
    return words[1:] if words[0] == "lockstep" else None


# Background jobs of a shell ignore SIGINT, and so do their child processes: restore the default first.
_BASH = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash", "-c", sys.argv[1]])
"""


def in_shell(command: Command, folder: Path, seconds: float = 900) -> tuple[int, str]:
    """Run a command in bash; return its exit code and all its output.

    A command marked `until Ctrl-C` gets SIGINT after its first line.
    """
    paths = {"PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}", "PYTHONPATH": str(REPO / "src")}
    # Unbuffered, so that the first line of a command marked `until Ctrl-C` arrives at once.
    paths |= {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _BASH, scaled(command.line)],
        cwd=folder,
        env=os.environ | paths | {"COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    first = ""
    if command.until_interrupt:
        assert process.stdout is not None
        first = process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
    try:
        rest, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, first + rest


def pages_with_commands() -> Iterator[tuple[Path, Page]]:
    """Yield the path and the content of each page with commands: README, CONTRIBUTING, the index and the guide."""
    from lockstep.scripts.docs.pages import written_by_hand

    for path in written_by_hand():
        page = read_page(path.read_text(encoding="utf-8"))
        if page.commands or page.mistakes:
            yield path, page

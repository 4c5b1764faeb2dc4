"""Commands of a page as it shows them, with the marks beside them, and a folder in which they run as they stand.

A mark is an HTML comment above a block. Readers of the page do not see it; readers of its source do.

    <!-- not run, needs a GPU: lockstep train configs/rollout/h100x1.toml -->   the commands that begin so
    <!-- not run, takes hours -->                                               all of the block
    <!-- ends 1: lockstep parity -->                                            the exit code, 0 without a mark
    <!-- until Ctrl-C: lockstep report --watch -->                              ended after its first line
    <!-- output of another run -->                                              what is shown is an example
    <!-- output -->                                                             of the last command, in its own block
    <!-- file mine.py -->                                                       the block is a file that commands read
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
# The programs whose names begin a command; a block that begins otherwise shows something else.
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
    """Hold a command as it stands, how it is to end, and the lines of output that the page shows below it."""

    line: str
    ends: int = 0
    skipped: str | None = None
    until_interrupt: bool = False
    output: tuple[str, ...] = ()


@dataclass
class Page:
    """Hold the commands of a page in its order, the files that it shows, and what is wrong with its marks."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def skipped(self) -> Counter[str]:
        """Count the commands that do not run, by their reasons."""
        return Counter(one.skipped for one in self.commands if one.skipped)


def read_page(text: str) -> Page:
    """Return the commands of a page with what its marks set. A mark belongs to the next block."""
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
    """Return the commands of a block. Where one begins with `$ `, the other lines are output."""
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
    """Return the commands with what one mark sets on those that it names."""
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
    """Return a line without what differs from run to run: each number is #, each run of spaces is one."""
    return " ".join(re.sub(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "#", line).split())


def missing(shown: tuple[str, ...], printed: str) -> list[str]:
    """Return the lines that a page shows and that were not printed. `…` stands for anything."""
    there = [skeleton(line) for line in printed.splitlines()]
    absent = []
    for line in filter(lambda each: each.strip(" …"), shown):
        parts = [re.escape(part.strip()) for part in skeleton(line).split("…")]
        wanted = re.compile(".*".join(parts))
        if not any(wanted.search(each) for each in there):
            absent.append(line)
    return absent


# The folder

# Settings that are smaller there than in the repository, by run file. All others are as they stand: steps, intervals of
# checks and checkpoints, precision.
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
# Settings that the smaller files have besides: a small text, and eager programs, since a compiler takes a minute.
ADDED = {
    "configs/quickstart.toml": {"data": 'source = "TEXT"\nval_fraction = 0.2', "compile": "enabled = false"},
    "configs/rollout/laptop.toml": {"data": 'source = "TEXT"\nval_fraction = 0.2', "compile": "enabled = false"},
}
# Words that are added to the commands that begin so: a sweep trains its model many times.
FEWER_STEPS = {"lockstep sweep ": "--train.steps 4 --optim.warmup-steps 1 --eval.every 2 --parity.every 0"}
_SETUP = "#!/usr/bin/env bash\nexit 0 # the tests' own environment is in .venv\n"


def smaller(name: str, source: Path) -> str:
    """Return the text of a run file with the numbers of SMALLER and the lines of ADDED. source: the text to train on.

    Raises AssertionError if the file has no such setting any more.
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
    """Make the folder in which a reader types the commands: the repository, with smaller run files and a small text.

    `my_texts` is there too, for pages that tell the reader to bring his own.
    """
    folder.mkdir(parents=True)
    (folder / "parity_tests").symlink_to(REPO / "parity_tests")
    for name in ("docs/examples", "docs/results/incident"):  # copies: a command of a page writes there
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
    """Return a command with the words of FEWER_STEPS; a comment at its end stays out."""
    begin = next((each for each in FEWER_STEPS if line.startswith(each)), None)
    return f"{line.partition('  #')[0]} {FEWER_STEPS[begin]}" if begin else line


def in_process(command: Command) -> list[str] | None:
    """Return the words of a command that the tests' process can run itself, or None: a shell must run it."""
    if command.until_interrupt or re.search(r"[|&;<>$*]", re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command.line)):
        return None
    words = shlex.split(scaled(command.line), comments=True)
    return words[1:] if words[0] == "lockstep" else None


# A shell's background jobs ignore Ctrl-C, and so would all that they start.
_BASH = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash", "-c", sys.argv[1]])
"""


def in_shell(command: Command, folder: Path, seconds: float = 900) -> tuple[int, str]:
    """Run a command in bash; return its exit code and all that it printed. One until Ctrl-C is ended by SIGINT."""
    paths = {"PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}", "PYTHONPATH": str(REPO / "src")}
    # The first line of one until Ctrl-C comes through a pipe as soon as it is printed.
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
    """Yield README, CONTRIBUTING, the index and the pages of the guide that show commands."""
    from lockstep.scripts.docs.pages import written_by_hand

    for path in written_by_hand():
        page = read_page(path.read_text(encoding="utf-8"))
        if page.commands or page.mistakes:
            yield path, page

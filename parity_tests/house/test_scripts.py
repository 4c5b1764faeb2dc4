"""The shell scripts say in plain words what a machine lacks, and end with 2."""

import fcntl
import os
import pty
import shutil
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO

TOOLS = ("bash", "uname", "df", "awk", "dirname", "git", "cat", "mkdir", "tail", "rm", "mv")


@pytest.fixture
def bare(tmp_path):
    """Make a checkout without .venv, and a PATH with only what every system has."""
    checkout, tools = tmp_path / "checkout", tmp_path / "bin"
    (checkout / "scripts/setup").mkdir(parents=True)
    tools.mkdir()
    for name in ("setup_env.sh", "say.sh"):
        shutil.copy(REPO / "scripts/setup" / name, checkout / "scripts/setup")
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    return checkout, tools


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def real_python() -> Path:
    """Return the interpreter under the virtual environment: the scripts meet a machine without one."""
    import sys

    return Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")


def setup_env(bare, *arguments, **environment) -> subprocess.CompletedProcess[str]:
    checkout, tools = bare
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "CXX", "VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run(
        ["bash", str(checkout / "scripts/setup/setup_env.sh"), *arguments],
        env=clean | {"PATH": str(tools)} | environment,
        capture_output=True,
        text=True,
    )


def test_a_complete_machine_passes(bare):
    (bare[1] / "python3").symlink_to(real_python())
    put(bare[1], "clang++", "exit 0")
    done = setup_env(bare, "--check", LOCKSTEP_DISK_GB="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "this machine has what Lockstep needs" in done.stdout


def test_no_compiler(bare):
    (bare[1] / "python3").symlink_to(real_python())
    done = setup_env(bare, "--check", LOCKSTEP_DISK_GB="0")
    assert done.returncode == 2
    assert "no C++ compiler (looked for g++, c++, clang++): torch.compile needs one" in done.stderr
    assert "Python 3.11" not in done.stderr


def test_old_python(bare):
    put(bare[1], "g++", "exit 0")
    put(bare[1], "python3", 'case "$2" in *version_info*) exit 1;; *) echo 3.9.2;; esac')
    done = setup_env(bare, "--check", LOCKSTEP_DISK_GB="0")
    assert done.returncode == 2
    assert "Lockstep needs Python 3.11 or newer; found: python3=3.9.2." in done.stderr
    assert "compiler" not in done.stderr


def test_python_variable_wins_and_is_judged(bare):
    put(bare[1], "g++", "exit 0")
    (bare[1] / "python3").symlink_to(real_python())
    put(bare[1], "old", 'case "$2" in *version_info*) exit 1;; *) echo 3.9.2;; esac')
    done = setup_env(bare, "--check", LOCKSTEP_DISK_GB="0", PYTHON="old")
    assert done.returncode == 2
    assert "PYTHON=old is Python 3.9.2; Lockstep needs Python 3.11 or newer." in done.stderr
    done = setup_env(bare, "--check", LOCKSTEP_DISK_GB="0", PYTHON="not-there")
    assert done.returncode == 2
    assert "PYTHON=not-there does not run." in done.stderr


def test_everything_missing_is_said_at_once(bare):
    done = setup_env(bare, "--check", LOCKSTEP_DISK_GB="100000000")
    assert done.returncode == 2
    assert "found: none" in done.stderr
    assert "no C++ compiler" in done.stderr
    assert "about 100000000 GB are needed" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_headers(bare):
    put(bare[1], "g++", "exit 0")
    put(bare[1], "python3", f'case "$2" in *Python.h*) exit 1;; *) exec {real_python()} "$@";; esac')
    done = setup_env(bare, "--check", LOCKSTEP_DISK_GB="0")
    assert done.returncode == 2
    assert "Python's header files (Python.h) are missing for python3: torch.compile needs them" in done.stderr


def test_a_failed_installation_leaves_no_stamp_and_says_where_its_log_is(bare):
    checkout, tools = bare
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout / name).write_text("")
    for name in ("tee", "grep", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    put(tools, "g++", "exit 0")
    # Stands for a Python whose pip cannot reach a package index.
    put(
        tools,
        "python3",
        f"""case "$*" in
        *"-m venv"*) mkdir -p {checkout}/.venv/bin; ln -sf {tools}/python3 {checkout}/.venv/bin/python;;
        *"-m pip install"*) echo "ERROR: no index"; exit 1;;
        *) exec {real_python()} "$@";; esac""",
    )
    (tools / "ln").symlink_to(shutil.which("ln"))
    done = setup_env(bare, LOCKSTEP_DISK_GB="0")
    assert done.returncode == 2
    assert "ERROR: no index" in done.stderr
    assert "setup_env.log has all. Run this again to go on." in done.stderr
    assert not (checkout / ".venv" / "lockstep.stamp").exists()


TEXT = "runs/quickstart is finished; train again from step 0: scripts/quickstart.sh --fresh"


@pytest.mark.parametrize("width", [40, 80])
def test_on_a_terminal_no_word_is_broken(width):
    """`say` breaks a line between words on a terminal, and prints one line into a pipe."""
    command = ["bash", "-c", f'. {REPO}/scripts/setup/say.sh; say "{TEXT}"']
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    subprocess.run(command, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode().splitlines()
    os.close(ours)
    assert len(shown) > 1 and max(len(line.rstrip()) for line in shown) <= width
    assert " ".join(shown).split() == ["lockstep:", *TEXT.split()]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert piped == f"lockstep: {TEXT}\n"


# quickstart.sh, with a `lockstep` that notes what it is asked for


@pytest.fixture
def quickstart(tmp_path):
    """Return a function that runs quickstart.sh in a checkout whose `lockstep train` ends with a given code."""
    (tmp_path / "scripts/setup").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("quickstart.sh", "setup/environment.sh", "setup/say.sh"):
        shutil.copy(REPO / "scripts" / name, tmp_path / "scripts" / name)
    put(tmp_path / "scripts/setup", "setup_env.sh", "exit 0")
    put(tmp_path / ".venv" / "bin", "python", f'exec {real_python()} "$@"')
    put(
        tmp_path / ".venv" / "bin",
        "lockstep",
        f'echo "$*" >> {tmp_path}/asked; [ "$1" = train ] || exit 0; '
        f'[ -z "$TRAIN_WRITES" ] || echo "$TRAIN_WRITES" > {tmp_path}/runs/quickstart/run.json; exit "$TRAIN_ENDS"',
    )

    def start(*arguments: str, train_ends: int = 0, train_writes: str = "") -> tuple[int, str, list[str]]:
        (tmp_path / "asked").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(tmp_path / "scripts" / "quickstart.sh"), *arguments],
            env=os.environ | {"TRAIN_ENDS": str(train_ends), "TRAIN_WRITES": train_writes},
            capture_output=True,
            text=True,
        )
        asked = tmp_path / "asked"
        return done.returncode, done.stdout + done.stderr, asked.read_text().splitlines() if asked.exists() else []

    start.run = tmp_path / "runs" / "quickstart"
    return start


PREPARE, REPORT = "data prepare configs/quickstart.toml", "report runs/quickstart"
START, RESUME = "train configs/quickstart.toml --overwrite", "train --resume runs/quickstart"


def test_the_first_quickstart_trains(quickstart):
    code, text, asked = quickstart()
    assert (code, asked) == (0, [PREPARE, START, REPORT])
    said, next_ = text.split("lockstep: next:\n")
    assert said.rstrip().endswith("runs/quickstart/report.html")
    assert [line.split("#")[0].split()[:2] for line in next_.splitlines()] == [
        [".venv/bin/lockstep", command] for command in ("demo", "sample", "plan")
    ]
    assert [line for line in next_.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (["agreed"] * 7, "7 of 7 checks against the JAX reference agreed"),
        (["agreed", "disagreed", "skipped"], "1 of 3 checks against the JAX reference agreed, 1 disagreed, 1 skipped"),
        ([], "0 of 0 checks against the JAX reference agreed"),
        (None, "there is no record of checks"),
    ],
)
def test_the_quickstart_ends_with_what_was_shown(quickstart, verdicts, said):
    quickstart.run.mkdir(parents=True)
    if verdicts is not None:
        lines = [f'{{"step": {step}, "verdict": "{verdict}"}}\n' for step, verdict in enumerate(verdicts)]
        (quickstart.run / "parity.jsonl").write_text("".join(lines))
    code, text, _ = quickstart()
    assert code == 0 and f"{said}\n" in text


@pytest.mark.parametrize("finished", ["true", "false", "null", None])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
def test_another_quickstart_does_the_obvious_thing(quickstart, finished, checkpoint, fresh):
    (quickstart.run / "checkpoints").mkdir(parents=True)
    if finished:
        (quickstart.run / "run.json").write_text(f'{{"finished": {finished}}}')
    if checkpoint:
        (quickstart.run / "checkpoints" / "step_000010").mkdir()
    code, text, asked = quickstart(*["--fresh"] * fresh)
    assert code == 0
    if fresh:
        assert asked == [PREPARE, START, REPORT]
    elif finished == "true":
        assert asked == [REPORT]
        assert "is finished" in text and "--fresh" in text
    elif checkpoint:
        assert asked == [PREPARE, RESUME, REPORT]
    else:
        assert asked == [PREPARE, START, REPORT]


def test_a_disagreement_still_gets_its_report(quickstart):
    code, _, asked = quickstart(train_ends=1)
    assert (code, asked[-1]) == (1, REPORT)


def test_a_run_that_was_not_checked_still_gets_its_report(quickstart):
    """Exit code 2 of a run whose steps are all done: fewer than half of its checks were made."""
    quickstart.run.mkdir(parents=True)
    code, _, asked = quickstart(train_ends=2, train_writes='{"finished": true}')
    assert (code, asked[-1]) == (2, REPORT)
    # A new run that cannot start leaves the finished one as it was, whose report is not this run's.
    code, _, asked = quickstart("--fresh", train_ends=2)
    assert (code, asked[-1]) == (2, START)
    code, _, asked = quickstart("--fresh", train_ends=2, train_writes='{"finished": false}')
    assert (code, asked[-1]) == (2, START)


@pytest.mark.parametrize("ends", [2, 130])
def test_a_training_that_stopped_gets_none(quickstart, ends):
    code, text, asked = quickstart(train_ends=ends)
    assert (code, asked[-1]) == (ends, START)
    assert ("goes on from the checkpoint" in text) is (ends == 130)


@pytest.mark.parametrize("words", [("--precision.policy", "fp32"), ("--precision.policy=fp32",)])
def test_a_precision_that_is_named_is_taken(quickstart, words):
    code, _, asked = quickstart(*words)
    assert (code, asked[1]) == (0, f"{START} --precision.policy fp32")
    (quickstart.run / "checkpoints" / "step_000010").mkdir(parents=True)
    code, text, asked = quickstart(*words)
    assert (code, asked) == (2, []) and "keeps its precision; for a new run add --fresh" in text
    assert quickstart("--fresh", *words)[2][1] == f"{START} --precision.policy fp32"


def test_quickstart_refuses_other_arguments(quickstart):
    assert quickstart("--fersh")[::2] == quickstart("--precision.policy")[::2] == (2, [])
    assert quickstart("--help")[::2] == (0, [])


@pytest.mark.parametrize("script", sorted((REPO / "scripts").rglob("*.sh")), ids=lambda path: path.name)
def test_bash_can_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)

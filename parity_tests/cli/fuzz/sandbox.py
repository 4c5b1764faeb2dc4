"""Where cases run: a folder that is the same before each, what cuts long work short, and what was left behind."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from lockstep.parity_tests.cli.fuzz.cases import Case
from lockstep.parity_tests.cli.workspace import REPO, Done
from lockstep.scripts.studies.tiny_workspace import write_workspace

SECONDS = 60
STEPS = 2

CANDIDATE = """
from lockstep.torch_backend.backend import TorchBackend as Good
number = 3
def raises(): raise OSError("no luck")
def exits(): raise SystemExit(0)
"""


class Reached(BaseException):
    """The call was accepted: it came to where its work begins."""


class TooLong(BaseException):
    """The call did not end in time."""


@dataclass(frozen=True)
class Left:
    """The outcome of a call. `code` is None if it was cut short where its work begins, or did not end in time.

    changed: paths of the sandbox that are new, gone or other than before. aside: files in the temporary folder.
    """

    done: Done
    code: int | None
    reached: bool
    hung: bool
    raised: str
    changed: tuple[str, ...]
    aside: tuple[str, ...]
    seconds: float


Listing = dict[str, tuple[int, ...]]


class Sandbox:
    """A folder with a run file, its data, a finished run, broken runs and all kinds of things that are no file."""

    def __init__(self, folder: Path) -> None:
        self._master, self.here, self.aside = folder / "master", folder / "here", folder / "aside"
        self.aside.mkdir()
        self._master.mkdir()
        self._fill(self._master)
        self._put_back()

    def run(self, case: Case) -> Left:
        """One call, in this process or one of its own; then everything is as it was."""
        for name, content in case.files:
            (self.here / name).write_bytes(content)
        before = _listing(self.here)
        started = time.monotonic()
        left = self._process(case) if case.own_process else self._call(case)
        seconds = time.monotonic() - started
        # Python's own, of a candidate's file; the next case's file of that name must not be taken for this one.
        shutil.rmtree(self.here / "__pycache__", ignore_errors=True)
        after = _listing(self.here)
        changed = tuple(sorted(name for name in before | after if before.get(name) != after.get(name)))
        aside = tuple(sorted(path.name for path in self.aside.glob("lockstep-*")))
        if changed:
            self._put_back()
        else:
            for name, _ in case.files:
                (self.here / name).unlink()
        for path in self.aside.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        return Left(*left, changed, aside, seconds)

    @property
    def is_bound(self) -> bool:
        """Return whether file permissions hold for this process; they do not for root."""
        return not os.access(self.here / "unreadable", os.R_OK)

    def _fill(self, here: Path) -> None:
        from lockstep.scripts.cli import run

        with contextlib.chdir(here):
            file = write_workspace(here / "made")
            text = file.read_text().replace(str(here / "made"), ".").replace('"./data"', '"data"')
            (here / "tiny.toml").write_text(text)
            (here / "made" / "text").rename(here / "text")
            shutil.rmtree(here / "made")
            for argv in (
                ["data", "prepare", "tiny.toml", "--workers", "1"],
                ["train", "tiny.toml", "--train.steps", "4", "--checkpoint.every", "2", "--parity.record-every", "2"],
                ["export", "runs/tiny", "hub"],
            ):
                said = _stream("backslashreplace")
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _as_it_was():
                    assert run(argv) == 0, _text(said)
            for name in ("folder", "full", "unwritable", "broken", "broken/capsule"):
                (here / name).mkdir()
            for name in ("file", "full/mine", "unreadable", "unreadable.toml"):
                (here / name).write_text("mine\n")
            for name in ("unreadable", "unreadable.toml"):
                (here / name).chmod(0)
            (here / "unwritable").chmod(0o555)
            (here / "binary").write_bytes(bytes(range(256)) * 20)
            (here / "empty.toml").touch()
            (here / "cand.py").write_text(CANDIDATE)
            (here / "bad.py").write_text("def (")
            (here / "exits.py").write_text("raise SystemExit(0)")
            (here / "loop").symlink_to("loop")
            (here / "dangling").symlink_to("nowhere")
            os.mkfifo(here / "pipe")
            self._break(here / "runs" / "tiny", here / "broken")

    def _break(self, run: Path, broken: Path) -> None:
        damage = {
            "no_config": ("config.toml", None),
            "bad_config": ("config.toml", "seed = -1\n"),
            "bad_info": ("run.json", "[1]"),
            "bad_records": ("records.jsonl", "x\n{}\n"),
            "bad_data": ("config.toml", (run / "config.toml").read_text().replace('path = "data"', 'path = "text"')),
        }
        for name, (file, text) in damage.items():
            shutil.copytree(run, broken / name)
            (broken / name / file).unlink()
            if text is not None:
                (broken / name / file).write_text(text)
        shutil.copytree(run, broken / "no_checkpoint")
        shutil.rmtree(broken / "no_checkpoint" / "checkpoints")
        (broken / "capsule" / "about.json").write_text('{"schema": 1}')

    def _put_back(self) -> None:
        shutil.rmtree(self.here, ignore_errors=True)
        assert not self.here.exists(), "the sandbox cannot be cleared away"
        shutil.copytree(
            self._master, self.here, symlinks=True, ignore=lambda folder, names: ["pipe"], copy_function=_copy
        )
        os.mkfifo(self.here / "pipe")

    # In this process

    def _call(self, case: Case) -> tuple[Done, int | None, bool, bool, str]:
        from lockstep.scripts.cli import run

        out, err = _stream("strict"), _stream("backslashreplace")
        code: int | None = None
        reached = hung = False
        raised = ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(self.here))
            stack.enter_context(_as_it_was())
            stack.enter_context(mock.patch.dict(os.environ, _wanted(case)))
            for name, value in case.environment:
                if value is None:
                    os.environ.pop(name, None)
            stack.enter_context(mock.patch.object(tempfile, "tempdir", str(self.aside)))
            for patch in _cuts(case):
                stack.enter_context(patch)
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(_limited(SECONDS))
            try:
                code = run(list(case.argv))
            except SystemExit as stop:  # --help
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 99
            except Reached:
                reached = True
            except TooLong:
                hung = True
            except BaseException as error:  # what gets here would have been a traceback
                raised = f"{type(error).__name__}: {error}"[:300]
        return Done(-1 if code is None else code, _text(out), _text(err)), code, reached, hung, raised

    # In a process of its own

    def _process(self, case: Case) -> tuple[Done, int | None, bool, bool, str]:
        environment = (
            _environment() | {"TMPDIR": str(self.aside)} | {n: v for n, v in case.environment if v is not None}
        )
        for name, value in case.environment:
            if value is None:
                environment.pop(name, None)
        command = [sys.executable, "-m", "lockstep", *case.argv]
        if case.stdout == "closed":
            command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command]
        stdout: Any = subprocess.PIPE
        if case.stdout == "full":
            stdout = os.open("/dev/full", os.O_WRONLY)
        elif case.stdout == "broken":
            reading, stdout = os.pipe()
            os.close(reading)
        try:
            done = subprocess.run(
                [os.fsencode(word) for word in command],
                cwd=self.here,
                env={name: os.fsencode(value) for name, value in environment.items()},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                timeout=SECONDS * 2,
            )
        except subprocess.TimeoutExpired:
            return Done(-1, "", ""), None, False, True, ""
        finally:
            if isinstance(stdout, int) and stdout != subprocess.PIPE:
                os.close(stdout)
        encoding = "utf-16" if "utf-16" in dict(case.environment).values() else "utf-8"
        said = Done(done.returncode, _decoded(done.stdout or b"", encoding), _decoded(done.stderr, encoding))
        return said, done.returncode, False, False, ""


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"}


def _wanted(case: Case) -> dict[str, str]:
    return {"COLUMNS": "120"} | {name: value for name, value in case.environment if value is not None}


def _stream(errors: str) -> io.TextIOWrapper:
    """As Python opens stdout and stderr: text over bytes, so that what cannot be encoded is noticed."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    return _decoded(stream.buffer.getvalue(), "utf-8") if not stream.closed else ""  # type: ignore[attr-defined]


def _decoded(raw: bytes, encoding: str) -> str:
    return raw.decode(encoding, "backslashreplace")


def _copy(source: str, target: str) -> str:
    """`copy2` that also takes what may not be read."""
    mode = os.stat(source).st_mode
    if not mode & 0o400:
        Path(target).write_text("mine\n")
        os.chmod(target, mode & 0o777)
        return target
    return shutil.copy2(source, target)


def _listing(folder: Path) -> Listing:
    """Kind, size and time of everything in a folder; locks are no content."""
    found: Listing = {}
    waiting = [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.name == ".lock":
                    continue
                status = entry.stat(follow_symlinks=False)
                is_folder = entry.is_dir(follow_symlinks=False)
                about = (
                    (status.st_mode,)
                    if is_folder
                    else (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
                )
                found[os.path.relpath(entry.path, folder)] = about
                if is_folder:
                    waiting.append(entry.path)
    return found


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def ring(signum: int, frame: types.FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Restore the process after a call: modules of candidates, the import path, torch's number of threads."""
    import torch

    modules, path, threads = set(sys.modules), list(sys.path), torch.get_num_threads()
    try:
        yield
    finally:
        for name in set(sys.modules) - modules:
            if name.startswith("lockstep_candidate") or name in ("cand", "bad", "exits", "nowhere"):
                del sys.modules[name]
        sys.path[:] = path
        torch.set_num_threads(threads)


def _reached(*_: object, **__: object) -> Any:
    raise Reached


def _answer(worker: object, job: dict[str, Any], limit: float) -> dict[str, Any]:
    """Stand in for the bench's worker: describe this machine; nothing is timed."""
    if job["job"] != "device":
        raise Reached
    return {"status": "measured", "device": {"kind": "cpu", "name": "cpu"}, "versions": {}}


_getsource = inspect.getsource
_kept_source = functools.cache(_getsource)


def _source(what: Any) -> str:
    """`inspect.getsource`, which tyro calls for every option, once a class: half of the time of a refusal."""
    if getattr(what, "__module__", "") == "types":
        raise OSError("made at run time")
    return _kept_source(what) if isinstance(what, type) else _getsource(what)


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    before = sys.modules.get("wandb")
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]
        if before is not None:
            sys.modules["wandb"] = before


class _After:
    """Says after so many steps that Ctrl-C was pressed."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def is_set(self) -> bool:
        self._left -= 1
        return self._left <= 0


def _cuts(case: Case) -> list[Any]:
    """Return the patches that stand in for long work.

    Always: a run stops after two steps, nothing is compiled, W&B is not installed, Python's whole standard library is
    not prepared, nothing is timed, no fault is planted. Unless the case goes through: no step is made at all.
    """
    import lockstep.scripts.commands.train
    from lockstep.core.data.sources import list_source
    from lockstep.torch_backend.session import TorchSession

    def listed(source: str | None, **options: Any) -> Any:
        return list_source(source, **options) if source is not None else _reached()

    cuts = [
        mock.patch.object(lockstep.scripts.commands.train, "interrupts", lambda: contextlib.nullcontext(_After(STEPS))),
        mock.patch.object(TorchSession, "compiled", lambda self, program: program),
        _without_wandb(),
        mock.patch("inspect.getsource", _source),
        mock.patch("lockstep.core.data.prepare.list_source", listed),
        mock.patch("lockstep.core.bench.suite.Worker.__call__", _answer),
        mock.patch("lockstep.core.bench.turns.Side.__init__", _reached),
        mock.patch("lockstep.scripts.commands.bench_parity.RunData", types.SimpleNamespace(open=_reached)),
        mock.patch("lockstep.scripts.shared.demo_run.claimed", _reached),
        mock.patch("lockstep.scripts.commands.faults.run", _reached),
        mock.patch("lockstep.scripts.commands.mutate.run", _reached),
        mock.patch("lockstep.core.sweep.plan.write_plan", _reached),
        mock.patch("lockstep.scripts.commands.calibrate.open_named", _reached),
        mock.patch("torch.distributed.launcher.api.elastic_launch", _reached),
        mock.patch("lockstep.scripts.commands.profile.batches_of", _reached),
        mock.patch("lockstep.core.live.server.LiveServer.__init__", _reached),
        mock.patch("lockstep.core.parity.modes.shadow.Shadow.__init__", _reached),
    ]
    if not case.through:
        cuts += [
            mock.patch("lockstep.core.train.loop.train", _reached),
            mock.patch("lockstep.core.parity.modes.side_by_side.check_steps", _reached),
            mock.patch("lockstep.core.parity.modes.free_running.drift", _reached),
            mock.patch("lockstep.core.parity.modes.replay.replay_run", _reached),
            mock.patch("lockstep.core.parity.modes.replay.replay_capsule", _reached),
            mock.patch("lockstep.core.parity.modes.bisect.bisect_run", _reached),
            mock.patch("lockstep.scripts.commands.sample.write", _reached),
        ]
    return cuts

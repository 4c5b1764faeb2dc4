"""`lockstep`, the command. Exit codes: 0 done or agreed, 1 disagreed, 2 could not run, 130 after Ctrl-C."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import shutil
import stat
import sys
import tempfile

# Set before torch and jax are loaded. An idle thread spins for about 0.2 ms, then sleeps. An eager step of the
# quickstart (FP32, 2 cores) takes 0.45 s with that; 0.60 s if threads sleep at once, 0.42 s if they spin 14 ms,
# libgomp's default. Beside another busy process, such as the reference: 1.03, 0.82 and about 4 s.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
# The reference must not use the trainer's GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The exit code, once `main` has one.
_codes: list[int] = []


def _end_rank() -> None:
    """End a rank of torchrun's before Python deletes its modules.

    gloo's threads outlive their process group while a session refers to it. A thread that frees the tensors of the last
    operation while Python ends would abort the process (pytorch#190489).
    """
    if _codes and "WORLD_SIZE" in os.environ:
        sys.stderr.flush()
        os._exit(_codes[0])


# Exit handlers that are registered later run earlier.
atexit.register(_end_rank)
# At exit Python searches all objects for cycles, which takes 1 s with torch and JAX loaded. It leaves out frozen ones.
atexit.register(gc.freeze)
# The threads of NumPy's BLAS spin between products and would take cores from torch and JAX.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# By default JAX allocates three quarters of a GPU's memory at once, also on a GPU shared with the trainer.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The reference's programs take longer to compile than to run, so they are kept for the next command, as Inductor's are.
# They are not in the home directory, which machines with other processors may share. Since they are executed as found,
# the folder must be this user's and not writable by others.
_USER = os.getuid() if hasattr(os, "getuid") else "user"
_FOLDER = os.path.join(tempfile.gettempdir(), f"lockstep_jax_{_USER}")
_INDUCTOR = os.path.join(tempfile.gettempdir(), f"lockstep_inductor_{_USER}")


def owned(folder: str) -> bool:
    """Return whether `folder` exists or could be made, and only this user may write to it."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


if owned(_FOLDER):
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _FOLDER)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def own_inductor_cache() -> None:
    """Set the folder in which torch.compile keeps programs, which it unpickles, unless the environment sets it.

    torch's default is a folder with a known name in /tmp, which any user may have made before. If that has happened to
    our folder, the programs go into a new one that is removed when this process ends.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = _INDUCTOR
    if not owned(folder):
        folder = tempfile.mkdtemp(prefix="lockstep_inductor_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


# Modules of scripts/commands by name, so that one command does not import the others.
COMMANDS = {
    "demo": ("lockstep.scripts.commands.demo", "find a planted fault that the loss does not show, in a minute or two"),
    "data prepare": ("lockstep.scripts.commands.data_prepare", "turn text, JSON lines or parquet into token shards"),
    "train": (
        "lockstep.scripts.commands.train",
        "train; --resume RUN continues; --parity.every N checks steps against the reference",
    ),
    "sweep": (
        "lockstep.scripts.commands.sweep",
        "train a run file with many combinations of settings, and rank the results",
    ),
    "parity": ("lockstep.scripts.commands.parity", "check the first steps against the reference"),
    "calibrate": ("lockstep.scripts.commands.calibrate", "measure the bounds of clean checks on this machine"),
    "replay": ("lockstep.scripts.commands.replay", "check a recorded step or a capsule later or on another machine"),
    "bisect": ("lockstep.scripts.commands.bisect", "find a run's first bad step, its origin stage and the cause"),
    "faults": ("lockstep.scripts.commands.faults", "plant the known faults and print the scoreboard"),
    "mutate": (
        "lockstep.scripts.commands.mutate",
        "change the trainer place by place, and count the changes that a check finds",
    ),
    "museum": (
        "lockstep.scripts.commands.museum",
        "run silent bugs of released packages, with the bug and without it",
    ),
    "convert": (
        "lockstep.scripts.commands.convert",
        "convert a checkpoint or a run between torch, JAX and safetensors, bit for bit",
    ),
    "export": (
        "lockstep.scripts.commands.export",
        "write a run's model as a folder that Hugging Face's transformers loads",
    ),
    "import": (
        "lockstep.scripts.commands.import_model",
        "begin a run from the model in a Hugging Face folder",
    ),
    "report": ("lockstep.scripts.commands.report", "write a run's report.html; --watch serves it while the run trains"),
    "runs": (
        "lockstep.scripts.commands.runs",
        "list the runs below a folder: state, loss, verdicts, settings that differ",
    ),
    "sample": ("lockstep.scripts.commands.sample", "generate text from a run's checkpoint"),
    "profile": ("lockstep.scripts.commands.profile", "record three training steps, and show where their time goes"),
    "plan": ("lockstep.scripts.commands.plan", "estimate memory, time and cost of a run before you rent a GPU"),
    "bench step": (
        "lockstep.scripts.commands.bench_step",
        "time whole steps, row by row, beside published figures and the lower bound",
    ),
    "bench best": (
        "lockstep.scripts.commands.bench_best",
        "search the fastest configuration of a run within a time limit",
    ),
    "bench peers": (
        "lockstep.scripts.commands.bench_peers",
        "time the same model in Hugging Face's Trainer, torchtitan and a nanoGPT-like loop",
    ),
    "bench data": (
        "lockstep.scripts.commands.bench_data",
        "time the loading of batches, beside nanoGPT's get_batch, mmap slices and a DataLoader",
    ),
    "bench ladder": (
        "lockstep.scripts.commands.bench_ladder",
        "time six optimisations one by one, from naive batches to flash attention",
    ),
    "bench parity": ("lockstep.scripts.commands.bench_parity", "time a check, in training steps"),
}

HELP = ("-h", "--help", "help")
# First words of two-word commands.
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}


def usage() -> str:
    """Return the overview of the commands, in lines of at most 80 columns."""
    from lockstep.core.sinks.lines import wrapped
    from lockstep.scripts.shared.help_pages import paragraph_width

    width = paragraph_width()
    about = "lockstep: a language model pretrains in PyTorch while an independent JAX implementation checks the step"
    flags = (
        "lockstep COMMAND --help lists its options; every setting of a run file is a flag, as in --optim.peak-lr 1e-3 "
        "(--help-all lists them)"
    )
    codes = "Exit codes: 0 done or agreed · 1 disagreed · 2 could not run (reason in one line) · 130 stopped by Ctrl-C"
    commands = [wrapped(text, width, f"  {name:<14}") for name, (_, text) in COMMANDS.items()]
    usage = ["usage: lockstep COMMAND …"]
    return "\n".join(
        [wrapped(about, width), "", *usage, "", *commands, "", wrapped(flags, width), wrapped(codes, width)]
    )


def main() -> None:
    """Run the `lockstep` command."""
    # Child processes must not import modules from the current folder.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    own_inductor_cache()
    # A closed stream is None, which not every library handles.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the terminal's encoding lacks, as Python does on stderr.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run(sys.argv[1:])
    except SystemExit as stop:  # --help
        code = stop.code if isinstance(stop.code, int) else 0
    _codes.append(_flushed(code))
    sys.exit(_codes[0])


def _flushed(code: int) -> int:
    """Return the exit code after flushing the output. Python would report a failed flush only at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            from lockstep.core.sinks.lines import complain

            complain(_cannot_print(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    return code


def _cannot_print(error: OSError) -> str:
    return f"cannot print to stdout: {error.strerror}"


def run(argv: list[str]) -> int:
    """Run one command; returns its exit code. `--help` of a command raises SystemExit(0), as tyro does."""
    from lockstep.core.errors import UserError
    from lockstep.core.sinks.lines import complain

    try:
        return _run(argv)
    except UserError as error:
        for line in error.lines:
            complain(line)
        return 2
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except BrokenPipeError:
        # Drop buffered output, so that it cannot fail again at exit and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except SystemExit as stop:
        # rich ends with 1 when a pipe is closed; here 1 means that something disagreed.
        if stop.code:
            return 2
        raise
    except Exception as error:
        # An error of a full disk without a file name is stdout's, because files are opened by name.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF) and not error.filename:
            complain(_cannot_print(error))
            return 2
        from lockstep.scripts.shared.failures import in_one_line

        complain(in_one_line(error))
        return 2


def _run(argv: list[str]) -> int:
    from lockstep.core.errors import UserError
    from lockstep.scripts.shared.needs import NEEDS, in_words, missing

    if not argv or argv[0] in HELP or (argv[0] in GROUPS and argv[1:2] and argv[1] in HELP):
        print(usage())
        return 0 if argv else 2
    name = next((" ".join(argv[:n]) for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), None)
    if name is None:
        raise UserError(_no_command(argv))
    rest = argv[len(name.split()) :]
    if not set(rest) & {*HELP[:2], "--help-all"} and (lacking := missing(NEEDS[name])):
        raise UserError(in_words(name, lacking))
    return _command(name)(rest)


def _no_command(argv: list[str]) -> str:
    import difflib

    if argv[0] in GROUPS:
        said = " ".join(argv[:2])
        own = [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]
        if len(argv) == 1 and len(own) > 1:
            return f"{said} is the first word of {len(own)} commands: {', '.join(own)}"
        near = difflib.get_close_matches(said, own, n=1, cutoff=0.0)
    else:
        said = argv[0]
        near = difflib.get_close_matches(said, [*COMMANDS, *GROUPS], n=1)
    hint = f"; did you mean {near[0]}?" if near else "; lockstep --help lists them"
    return f"{said or repr(said)} is not a command{hint}"


def _command(name: str):  # type: ignore[no-untyped-def]
    import importlib

    return importlib.import_module(COMMANDS[name][0]).main


if __name__ == "__main__":
    main()

"""`lockstep`: one command. Exit codes: 0 did it or agreed, 1 disagreed, 2 could not, 130 after Ctrl-C."""

from __future__ import annotations

import os
import sys

# Before torch and jax are loaded: threads that wait must not take the cores of those that work (trainer and reference
# share them), and the reference stays off the GPU that the trainer needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

COMMANDS = {
    "data prepare": ("scripts.prepare", "text, JSON lines or parquet → token shards"),
    "train": ("scripts.train", "train; --resume RUN goes on; --parity.every N checks steps against the reference"),
    "parity": ("scripts.parity", "check the first steps side by side with the reference"),
    "report": ("scripts.report", "write a run's report.html"),
}

USAGE = "\n".join(
    [
        "lockstep: a language model pretrains in PyTorch while an independent JAX implementation checks the step",
        "",
        "usage: lockstep COMMAND …",
        "",
        *(f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items()),
        "",
        "lockstep COMMAND --help lists options; every setting of a run file is a flag, as in --optim.peak-lr 1e-3",
        "Exit codes: 0 did it or agreed · 1 disagreed · 2 could not (one line says why) · 130 stopped by Ctrl-C",
    ]
)


def main() -> None:
    """Entry point of the `lockstep` command."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command; returns its exit code."""
    from core.errors import UserError

    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if argv else 2
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            try:
                return _command(name)(argv[length:])
            except UserError as error:
                for line in str(error).splitlines():
                    print(f"lockstep: {line}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print("lockstep: stopped", file=sys.stderr)
                return 130
            except BrokenPipeError:
                sys.stderr.close()
                return 2
    import difflib

    near = difflib.get_close_matches(argv[0], [*COMMANDS, "data"], n=1)
    if argv[0] == "data":
        near = ["data prepare"]
    print(f"lockstep: {argv[0]} is not a command" + (f"; did you mean {near[0]}?" if near else ""), file=sys.stderr)
    return 2


def _command(name: str):  # type: ignore[no-untyped-def]
    import importlib

    return importlib.import_module(COMMANDS[name][0]).main


if __name__ == "__main__":
    main()

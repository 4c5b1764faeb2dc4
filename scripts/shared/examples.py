"""Commands to try, which `--help` of each command shows before its options."""

from __future__ import annotations

import dataclasses
import inspect
import re

# By command: a line to type, and its effect. A command without an entry shows the first command of its docstring.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "data prepare": (
        ("lockstep data prepare configs/quickstart.toml", "the data of a run file"),
        ("lockstep data prepare --data.source my/ --data.path mine", "your own texts"),
    ),
    "train": (
        ("lockstep train configs/quickstart.toml", "a new run: runs/quickstart"),
        ("lockstep train --resume runs/quickstart", "continue, with the same losses"),
        ("lockstep train mine.toml --parity.every 100", "check every 100th step"),
    ),
    "sweep": (
        ("lockstep sweep configs/quickstart.toml --vary optim.peak-lr=1e-4:3e-3:log", "12 learning rates"),
        ("lockstep sweep mine.toml --vary optim.name=adamw,muon --vary seed=0,1", "every combination"),
    ),
    "parity": (
        ("lockstep parity configs/quickstart.toml", "check two steps of the trainer"),
        ("lockstep parity mine.toml --candidate my_trainer.py:Mine", "check your own trainer"),
    ),
    "calibrate": (("lockstep calibrate configs/quickstart.toml", ""),),
    "replay": (
        ("lockstep replay runs/mine --step 40", "a step of a run"),
        ("lockstep replay runs/mine/capsules/step_000040", "a packed step"),
    ),
    "bisect": (("lockstep bisect runs/mine", ""),),
    "faults": (
        ("lockstep faults RopeInBf16", "one fault"),
        ("lockstep faults", "all of them"),
    ),
    "mutate": (("lockstep mutate configs/mutate.toml", ""),),
    "museum": (("lockstep museum", ""),),
    "convert": (
        ("lockstep convert runs/mine jax-run --to jax", "a run for the other backend"),
        ("lockstep convert runs/mine/checkpoints/step_000100 weights", "plain safetensors"),
    ),
    "export": (("lockstep export runs/quickstart hub", ""),),
    "import": (("lockstep import hub runs/mine --config mine.toml", ""),),
    "runs": (
        ("lockstep runs", "all runs below runs/"),
        ("lockstep runs sweeps/quickstart --sort val", "trials, the best first"),
    ),
    "report": (
        ("lockstep report runs/quickstart", "runs/quickstart/report.html"),
        ("lockstep report runs/one runs/two", "a comparison of both"),
    ),
    "sample": (('lockstep sample runs/quickstart --prompt "def "', ""),),
    "profile": (("lockstep profile configs/quickstart.toml", ""),),
    "plan": (
        ("lockstep plan configs/llama-1b.toml --gpu h100", "memory, days, dollars"),
        ("lockstep plan mine.toml --train.micro-batch-size 4", "with another setting"),
    ),
    "bench step": (("lockstep bench step", ""),),
    "bench best": (("lockstep bench best configs/llama-1b.toml", ""),),
    "bench peers": (("lockstep bench peers", ""),),
    "bench data": (("lockstep bench data", ""),),
    "bench ladder": (("lockstep bench ladder", ""),),
    "bench parity": (("lockstep bench parity", ""),),
    "demo": (("lockstep demo", ""),),
}


def examples_of(name: str, command: type) -> tuple[tuple[str, str], ...]:
    """Return the examples of a command: lines to type, each with its effect.

    A command that is not in EXAMPLES has its docstring's first `lockstep …` in backquotes; else its name with the
    arguments that it requires.
    """
    if name in EXAMPLES:
        return EXAMPLES[name]
    typed = re.search(r"`(lockstep [^`]+)`", " ".join((inspect.getdoc(command) or "").split()))
    needed = [f.name.upper() for f in dataclasses.fields(command) if f.default is dataclasses.MISSING]
    return ((typed[1] if typed else " ".join(["lockstep", name, *needed]), ""),)

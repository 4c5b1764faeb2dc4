"""Backends by name, and the only way in which a name in a file opens a backend.

A name on the command line is trusted: `FILE.py:NAME` and `module:NAME` are imported. A name in a run directory or a
capsule is data: it opens only built-in backends.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.backend import Backend, NotSupported
from lockstep.core.capabilities import Describes, ResolvesKernel, ask
from lockstep.core.config.auto import with_kernel_of_torch
from lockstep.core.config.file import shortened
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.memory import total_memory_bytes
from lockstep.core.errors import UserError, printable
from lockstep.core.model.budget import require_memory
from lockstep.core.run.launch import launched

if TYPE_CHECKING:
    from lockstep.core.parity.evidence.capsule import Capsule
    from lockstep.core.run.directory import RunDir

# By name, as for a user's backend, so that only the chosen one is imported.
TRAINER = "lockstep.torch_backend.backend:TorchBackend"
REFERENCE = "lockstep.jax_backend.backend:JaxBackend"

# Hugging Face's own model of a family, a reference that does not train.
HUGGING_FACE = "lockstep.torch_backend.tools.hugging_face:HuggingFaceBackend"

BY_NAME = {"torch": TRAINER, "jax": REFERENCE, "hf": HUGGING_FACE}
# By the name of a package, as a trainer or candidate. As a reference, `hf` exposes only its whole model.
CANDIDATES = {
    "hf": "lockstep.torch_backend.candidate.hugging_face:HuggingFaceCandidate",
    "litgpt": "lockstep.torch_backend.candidate.litgpt:LitGptCandidate",
}


def open_named(name: str) -> Backend:
    """Open a backend named on the command line or by Lockstep. `Maker` opens a backend named in a file.

    Raises UserError as `load_backend` does.
    """
    from lockstep.core.load_backend import load_backend

    return load_backend(spec(name))


def open_candidate(name: str) -> Backend:
    """Open a trainer or candidate, as `open_named` does."""
    return open_named(CANDIDATES.get(name, name))


def spec(name: str) -> str:
    """Return `module:NAME` for `torch`, `jax` and `hf`; any other name already is `module:NAME` or `FILE.py:NAME`."""
    return BY_NAME.get(name, name)


def is_built_in(name: object) -> bool:
    """Return whether a name, short or in full, is one of Lockstep's own backends."""
    known = (BY_NAME, CANDIDATES)
    return isinstance(name, str) and any(name in names or name in names.values() for names in known)


@dataclass(frozen=True)
class Maker:
    """A factory of the backend that a run's or capsule's file names as its trainer or candidate. file: that file."""

    name: object
    file: Path

    @classmethod
    def of_run(cls, run: RunDir) -> Maker:
        """Return the maker of a run."""
        from lockstep.core.run.layout import INFO

        return cls(run.info.get("backend", "torch"), run.path / INFO)

    @classmethod
    def of_capsule(cls, capsule: Capsule) -> Maker:
        """Return the maker of a capsule's step."""
        from lockstep.core.parity.evidence.capsule import ABOUT

        return cls(capsule.about.get("candidate", "torch"), capsule.path / ABOUT)

    def named(self, flag: str, asked: str | None, words: Sequence[str]) -> str:
        """Return the name of the backend to open: the one on the command line, or a built-in one named in the file.

        flag: the option that names one, `--candidate`. asked: its value, if given. words: the command line after
        `lockstep`. Raises UserError with the command to type if the file names any other backend: its code is not ours,
        and perhaps not the user's.
        """
        if asked is not None:
            return asked
        if is_built_in(self.name):
            return str(self.name)
        if not isinstance(self.name, str) or ":" not in self.name or self.name.startswith("-"):
            raise UserError(f"{self.file}: {shortened(self.name)} names no backend; name one with {flag} BACKEND")
        line = command_line(with_option(words, flag, self.name))
        if printable(line) != line:  # a name that a message must escape may lose its shell quoting
            line = f"add {flag} and that name to the command"
        raise UserError(
            f"{self.file}: made by {shortened(self.name)[1:-1]}, whose code runs only where the command line names it: "
            f"{line}"
        )

    def open(self, flag: str, asked: str | None, words: Sequence[str]) -> Backend:
        """Open the backend that `named` returns. Raises UserError as `named` and `open_named` do."""
        return open_candidate(self.named(flag, asked, words))

    def __str__(self) -> str:
        return str(self.name)


def trainer_of(run: RunDir, asked: str | None, words: Sequence[str]) -> str:
    """Return the name of the backend with which a run goes on.

    asked: `--backend`, None if it was not given. A user's own backend may have moved, so another `FILE.py:NAME` or
    `module:NAME` than the recorded one is accepted. Raises UserError for a change to or from a built-in backend, and as
    `Maker.named` does.
    """
    maker = Maker.of_run(run)
    name = maker.named("--backend", asked, words)
    if spec(name) != spec(str(maker)) and (is_built_in(name) or is_built_in(maker.name)):
        raise UserError(
            f"{run.path} was trained by {shortened(maker.name)} and cannot continue with {name}; lockstep convert "
            "RUN FOLDER --to torch (or jax) makes a run for another backend"
        )
    return name


def with_option(words: Sequence[str], flag: str, value: str) -> list[str]:
    """Add an option to the words of a command line, before `--` where there is one."""
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], flag, value, *words[end:]]


def command_line(words: Sequence[str]) -> str:
    """Return the command to type for these words after `lockstep`, under torchrun if that started this process."""
    place = launched()
    begin = "lockstep" if place is None else f"torchrun --nproc-per-node {place[1]} -m lockstep"
    return f"{begin} {shlex.join(words)}"


def description(backend: Backend, config: RunConfig) -> Mapping[str, Any]:
    """Return a backend's description (`Backend.describe`), or an empty one without that method."""
    try:
        return ask(backend, Describes).describe(config)
    except NotSupported:
        return {}


def resolves_kernel(backend: Backend) -> bool:
    """Return whether a backend runs the kernel for which `attention.kernel = "auto"` stands."""
    try:
        return ask(backend, ResolvesKernel).resolves_kernel
    except NotSupported:
        return False


def on_its_device(config: RunConfig, backend: Backend) -> RunConfig:
    """Return the configuration with `device` resolved: the twin follows the attention kernel of that device.

    `attention.kernel = "auto"` becomes the kernel of torch's own call if the backend has no kernels of Lockstep's.

    Raises UserError if the run cannot fit into this machine's memory.
    """
    kind = description(backend, config).get("device_kind", "cpu")
    config = config.model_copy(update={"device": kind})
    if not resolves_kernel(backend):
        config = with_kernel_of_torch(config, kind)
    require_memory(config, total_memory_bytes())
    return config

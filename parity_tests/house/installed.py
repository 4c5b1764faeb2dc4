"""Build Lockstep, install it into a clean environment, and make a user's project that uses it there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

from lockstep.parity_tests.repository import REPO

FOLDERS = ("configs", "core", "jax_backend", "lockstep", "parity_tests", "scripts", "src", "torch_backend")
FILES = ("LICENSE", "README.md", "pyproject.toml")
# The parts of the repository that a wheel contains.
SHIPPED = (
    "configs",
    "core",
    "jax_backend",
    "parity_tests/faults",
    "scripts/__init__.py",
    "scripts/cli.py",
    "scripts/commands",
    "scripts/museum",
    "scripts/shared",
    "torch_backend",
)
OWN = ("__init__.py", "__main__.py", "family.py", "honest.py", "py.typed")
# Environment variables by which a process of the project could import other modules than the installed ones.
FORGOTTEN = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPYPATH")


def run(*command: object, cwd: Path, code: int = 0, seconds: float = 300, **variables: str) -> str:
    """Run a command without the variables of FORGOTTEN and with `variables`; return all its output.

    Raises AssertionError, with the output, unless the command ends with exit code `code`.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in FORGOTTEN} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def pip(*words: object, cwd: Path) -> None:
    """Run pip without an index, so that it downloads nothing and uses this environment's setuptools."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words, cwd=cwd)


def copy_sources(to: Path) -> Path:
    """Copy the sources of a build, links as links, since a build writes files beside its sources; return the copy."""
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPO / folder, to / folder, symlinks=True, ignore=ignored)
    for file in FILES:
        shutil.copy(REPO / file, to)
    return to


def build_wheel(source: Path, to: Path) -> Path:
    """Build a wheel from a source tree or an sdist; return its path."""
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", to, source, cwd=to.parent)
    (wheel,) = to.glob("*.whl")
    return wheel


def build_sdist(source: Path, to: Path) -> Path:
    """Build an sdist from a source tree, as a build front end does; return its path."""
    program = f"from setuptools import build_meta; print(build_meta.build_sdist({str(to)!r}))"
    run(sys.executable, "-c", program, cwd=source)
    (sdist,) = to.glob("*.tar.gz")
    return sdist


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a wheel, without its dist-info, by path."""
    with ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist() if not name.startswith("lockstep-")}


def shipped(tree: Path) -> dict[str, bytes]:
    """Return the bytes of every file that a wheel of this source tree must contain, by path in the wheel."""
    found = {f"lockstep/{name}": (tree / "lockstep" / name).read_bytes() for name in OWN}
    for place in SHIPPED:
        path = tree / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                found[f"lockstep/{file.relative_to(tree).as_posix()}"] = file.read_bytes()
    return found


def required(root: Path = REPO) -> set[str]:
    """Return the distributions that `pip install .` installs: dependencies without extras, recursively."""
    lines = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    wanted, found = [Requirement(line) for line in lines], dict[str, set[str]]()
    while wanted:
        one = wanted.pop()
        name = one.name.lower().replace("_", "-")
        if name in found and one.extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | one.extras
        try:
            theirs = distribution(name).requires or []
        except PackageNotFoundError:  # an optional dependency, not installed here
            del found[name]
            continue
        wanted += [
            needed
            for needed in map(Requirement, theirs)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *one.extras})
        ]
    return set(found)


def entries(name: str) -> dict[str, Path]:
    """Return the top-level entries of a distribution in site-packages: packages, modules, libraries, metadata."""
    made = distribution(name)
    tops = {file.parts[0] for file in made.files or ()} - {"..", "__pycache__"}
    found = {top: Path(str(made.locate_file(top))) for top in tops}
    return {top: path for top, path in found.items() if path.exists() and path.suffix != ".pth"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the packages that Lockstep requires; `install` adds Lockstep."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        """Make an environment of links to packages of this one, without those of extras (such as pytest).

        It does not contain an editable install of Lockstep either.
        """
        venv.create(folder, symlinks=True)
        made = cls(folder)
        for name in sorted(required()):
            for top, path in entries(name).items():
                if not (made.packages / top).exists():
                    (made.packages / top).symlink_to(path)
        return made

    @property
    def packages(self) -> Path:
        """Return the environment's site-packages."""
        base = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", base))

    @property
    def python(self) -> Path:
        """Return the path of the environment's interpreter."""
        return self.folder / "bin" / "python"

    def install(self, *words: object) -> None:
        """Install a wheel, or a source tree with `-e`."""
        flags = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        pip("--python", self.python, "install", *flags, *words, cwd=self.folder)


PROJECT = {
    "core/__init__.py": "",
    "core/model.py": '''
"""The project's own model. A `core` of Lockstep's on the path would stand in its place."""
from torch import nn

OWNER = "the user"


def make_model():
    return nn.Linear(3, 1)
''',
    "scripts/__init__.py": "",
    "scripts/note.py": """
import os
from pathlib import Path


def note(text):
    with Path(f"opened-{os.environ.get('RANK', 'alone')}.txt").open("a") as file:
        file.write(text)
""",
    "parity_tests/__init__.py": "OWNER = 'the user'\n",
    "torch_backend/__init__.py": "OWNER = 'the user'\n",
    "my_candidate.py": """
import parity_tests
import torch_backend
from core.model import OWNER
from lockstep.torch_backend.backend import TorchBackend
from scripts.note import note


class Mine(TorchBackend):
    def open(self, config):
        assert OWNER == parity_tests.OWNER == torch_backend.OWNER
        note(OWNER)
        return super().open(config)

    def open_rank(self, config):
        note(OWNER)
        return super().open_rank(config)
""",
    "loop.py": """
import torch
from core.model import make_model
from lockstep import watch
from lockstep.jax_backend.watch import reference


def jax_loss(p, batch):
    x, y = (one.astype(p["weight"].dtype) for one in batch)
    return ((x @ p["weight"].T + p["bias"] - y) ** 2).mean()


torch.manual_seed(0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watcher = watch(model, optimizer, reference=reference(jax_loss), every=1)
for _ in range(2):
    batch = torch.randn(8, 3), torch.randn(8, 1)
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    with watcher.step(batch, loss):
        optimizer.step()
    optimizer.zero_grad()
print(watcher.verdict, len(watcher.checks))
""",
    "mine.toml": """
name = "mine"
[model]
vocab_size = 300
hidden = 32
layers = 1
heads = 2
kv_heads = 1
ffn_hidden = 64
[data]
path = "data"
source = "core"
val_fraction = 0.2
[train]
steps = 2
batch_size = 4
micro_batch_size = 2
sequence_length = 16
[optim]
warmup_steps = 1
[compile]
enabled = false
[eval]
every = 0
""",
}


def write_project(folder: Path) -> Path:
    """Write a project under git that has its own `core`, `scripts`, `parity_tests` and `torch_backend`."""
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.lstrip())
    # Text data for training.
    (folder / "core/text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    commit_all(folder)
    return folder


def commit_all(folder: Path) -> None:
    """Make a folder a git repository, with one commit of all its files."""
    git = ("git", "-c", "user.name=U", "-c", "user.email=u@example.org", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Begin")):
        run(*git, *words, cwd=folder)

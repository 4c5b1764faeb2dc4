"""Check before a command begins that the packages it imports late are installed: no ImportError after hours of work.

`python -m lockstep.scripts.shared.needs PART…` does the same for parts of scripts/gpu_check.sh. It needs only Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

# Packages whose name to install differs from the name to import.
DISTRIBUTIONS = {"orbax.checkpoint": "orbax-checkpoint", "ml_dtypes": "ml-dtypes", "tomli_w": "tomli-w"}

_RUN = ("rich", "safetensors", "tokenizers", "tomli_w")
# The backend that a command opens first loads its framework, and a setting that needs an optional package checks for
# it. These are the others.
NEEDS: dict[str, tuple[str, ...]] = {
    "demo": _RUN,
    "data prepare": ("fsspec", "rich", "tokenizers"),
    "train": _RUN,
    "sweep": _RUN,
    "parity": _RUN,
    "calibrate": ("safetensors", "tokenizers", "tomli_w"),
    "replay": _RUN,
    "bisect": _RUN,
    "faults": _RUN,
    "mutate": _RUN,
    "museum": (),
    "convert": ("orbax.checkpoint", "safetensors", "tomli_w"),
    "export": ("ml_dtypes", "orbax.checkpoint", "safetensors", "tokenizers"),
    "import": ("ml_dtypes", "rich", "safetensors", "tokenizers", "tomli_w"),
    "report": (),
    "runs": ("rich",),
    "sample": ("safetensors", "tokenizers"),
    "profile": ("rich", "safetensors", "tokenizers"),
    "plan": ("rich",),
    "bench step": ("rich",),
    "bench best": ("rich", "tomli_w"),
    "bench peers": ("rich",),
    "bench data": ("rich", "tokenizers"),
    "bench ladder": ("rich", "tokenizers"),
    "bench parity": ("safetensors", "tokenizers", "tomli_w"),
}

_BENCH = ("numpy", "pydantic", "rich", "torch", "torchao", "tyro")
_CHECKS = (*_BENCH, "flax", "fsspec", "jax", "optax", "safetensors", "tokenizers", "tomli_w")
# The packages of scripts/gpu_check.sh.
PARTS: dict[str, tuple[str, ...]] = {
    "tests": (*_CHECKS, "pytest"),
    "parity": _CHECKS,
    "sums": _BENCH,
    "bench": _BENCH,
    "large": _CHECKS,
    "watch": (*_CHECKS, "accelerate", "transformers"),
    "best_bf16": (*_BENCH, "tomli_w"),
    "best_fp8": (*_BENCH, "tomli_w"),
    "curves": (*_BENCH, "fsspec", "tokenizers"),
}


def missing(modules: Iterable[str]) -> list[str]:
    """List the names to install of the modules that are missing, each once, in order."""
    return [DISTRIBUTIONS.get(name, name) for name in dict.fromkeys(modules) if not _is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def in_words(what: str, lacking: list[str]) -> str:
    """Return one line with the command that installs the packages."""
    return f"{what}: missing packages: {', '.join(lacking)}; install them with: pip install {' '.join(lacking)}"


def main(parts: list[str]) -> int:
    """Print what this Python lacks for parts of gpu_check.sh; 0 if nothing."""
    lacking = missing(name for part in parts for name in PARTS[part])
    if lacking:
        print(in_words(f"gpu_check: {', '.join(parts)}", lacking), file=sys.stderr)
    return 2 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

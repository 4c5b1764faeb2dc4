"""Keys of the programs that torch.compile may take from its cache without tracing them again.

The cache of AOTAutograd (torch/_functorch/_aot_autograd/autograd_cache.py) keeps a traced and compiled program by the
graph that Dynamo has made. By default it leaves out graphs with custom autograd functions, though their backward is in
the key, and with functions that it does not know; Lockstep's have both. With it, a program that an earlier process has
compiled takes half the time.

The key names a custom operation and does not hold the backward formula that Python has registered for it: after an edit
of the formula the program still has the old one (torch 2.13: a formula of 2·g, edited to 3·g, gives 2·g). So programs
of anybody else's session are always traced; Lockstep's own code has no operation with such a formula, and those of
installed libraries are keyed by what is installed.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

PACKAGE = __name__.rpartition(".")[0]
# Functions that `sdpa_kernel` leaves in a graph; their arguments, names of kernels, are in the graph too.
KNOWN = "torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel"


def is_own(session: type) -> bool:
    """Return whether every class of a session is Lockstep's own, so that no code of anybody else's is traced."""
    own = {"builtins", "typing"}
    return all(one.__module__ in own or one.__module__.startswith(f"{PACKAGE}.") for one in session.__mro__)


def options_of(session: type) -> dict[str, Any]:
    """Return Inductor's options for the programs of a session."""
    if not is_own(session):
        return {}
    return {"unsafe_marked_cacheable_functions": dict.fromkeys(KNOWN, installed())}


def settings_of(session: type) -> dict[str, Any]:
    """Return AOTAutograd's settings while a program of a session is called, which may compile it."""
    own = is_own(session)
    wanted = {"enable_autograd_cache": own, "autograd_cache_allow_custom_autograd_functions": own}
    return {name: value for name, value in wanted.items() if hasattr(torch._functorch.config, name)}


@cache
def installed() -> str:
    """Return a digest of the names and versions of the packages that are installed."""
    folders = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    names = sorted(entry.name for folder in folders for entry in folder.glob("*.dist-info"))
    return sha256("\n".join(names).encode()).hexdigest()

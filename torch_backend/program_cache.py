"""Settings and keys of AOTAutograd's cache of compiled programs.

The cache (torch/_functorch/_aot_autograd/autograd_cache.py) stores a traced and compiled program under a key made from
Dynamo's graph. By default it skips graphs with custom autograd functions, although their backward is part of the key,
and graphs with unknown functions. Lockstep's graphs have both. With the cache, a program that an earlier process has
compiled takes half the time.

For a custom operation, the key has its name but not the backward formula that Python registered for it. After an edit
of the formula, the cache returns the program with the old formula (torch 2.13: after an edit from 2·g to 3·g, the
gradient is still 2·g). Therefore only sessions whose classes are Lockstep's own use the cache. Lockstep has no such
operation, and for those of libraries the key includes the names and versions of installed packages.
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
# Functions that `sdpa_kernel` puts into a graph. Their arguments, the names of kernels, are also in the graph.
KNOWN = "torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel"


def is_own(session: type) -> bool:
    """Return whether every class of a session is Lockstep's own, so that no user code is traced."""
    own = {"builtins", "typing"}
    return all(one.__module__ in own or one.__module__.startswith(f"{PACKAGE}.") for one in session.__mro__)


def options_of(session: type) -> dict[str, Any]:
    """Return Inductor's options for the programs of a session."""
    if not is_own(session):
        return {}
    return {"unsafe_marked_cacheable_functions": dict.fromkeys(KNOWN, installed())}


def settings_of(session: type) -> dict[str, Any]:
    """Return AOTAutograd's settings for a call of a session's program, which may compile it."""
    own = is_own(session)
    wanted = {"enable_autograd_cache": own, "autograd_cache_allow_custom_autograd_functions": own}
    return {name: value for name, value in wanted.items() if hasattr(torch._functorch.config, name)}


@cache
def installed() -> str:
    """Return a SHA-256 of the names and versions of all installed packages."""
    folders = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    names = sorted(entry.name for folder in folders for entry in folder.glob("*.dist-info"))
    return sha256("\n".join(names).encode()).hexdigest()

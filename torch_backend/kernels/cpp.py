"""Build and load the C++ sources of kernels on the CPU at first use, as Inductor builds its own programs."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any


class NotBuilt(Exception):
    """A library cannot be built or loaded. Its text is the last line of the reason."""


PACKING = Path(__file__).with_name("packing.h")


def library(source: Path) -> Any:
    """Build a C++ source once a machine, and load it: Inductor keeps the library in TORCHINDUCTOR_CACHE_DIR.

    The compiler gets one text, PACKING before the source. Raises NotBuilt.
    """
    from torch._inductor.codecache import CppCodeCache

    # Versions of torch with this option find the processor's vector instructions otherwise, which takes 1.4 s.
    named = "needs_vec_isa" in signature(CppCodeCache.load_async).parameters
    options = {"needs_vec_isa": False} if named else {}
    text = "".join(file.read_text(encoding="utf-8") for file in (PACKING, source))
    try:
        loaded: Any = CppCodeCache.load(text, **options)
    except Exception as error:  # the compiler's, the loader's and the file system's
        reason = str(error).strip().splitlines()
        raise NotBuilt(reason[-1] if reason else type(error).__name__) from error
    return loaded

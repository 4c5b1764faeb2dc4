"""Results that torch.compile needs once a process, computed in threads before the first compilation.

For programs of the CPU torch starts a process that loads a library with the CPU's vector instructions (0.6 to 0.8 s).
For the keys of its caches it hashes its own sources (0.2 to 0.3 s). The first compilation would wait for both.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cache

THREAD = "vector instructions"


@cache
def begin(device: str) -> None:
    """Begin the computations that programs of `device` (`cpu`, `cuda`) need. A second call does nothing.

    An error is raised by the compilation that needs the result.
    """
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401  a thread should not import modules

    def instructions() -> None:
        with suppress(Exception):
            cpu_vec_isa.valid_vec_isa_list()

    if device == "cpu":
        threading.Thread(target=instructions, name=THREAD, daemon=True).start()
    # torch 2.11 hashes when it needs the key.
    if hasattr(codecache.torch_key, "prefetch"):
        codecache.torch_key.prefetch()

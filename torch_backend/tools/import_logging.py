"""Imports of torchao and bitsandbytes without their warnings about kernels for other machines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SPEAKERS = ("torchao", "bitsandbytes", "torch.utils._pytree")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silence warnings of these libraries, and torch's about torchao, while the context is active."""
    before = {name: logging.getLogger(name).level for name in SPEAKERS}
    for name in SPEAKERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)

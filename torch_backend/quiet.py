"""torchao without what it says of kernels that it could not load: they are for other machines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SPEAKERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Warnings of torchao's import, and of torch about torchao, are left unsaid inside."""
    before = {name: logging.getLogger(name).level for name in SPEAKERS}
    for name in SPEAKERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)

"""A candidate for `--candidate FILE.py:NAME`: wrong from step 5 on."""

from __future__ import annotations

from lockstep.parity_tests.replay.made import Gelu
from lockstep.torch_backend.backend import TorchBackend


class _From5(Gelu):
    since = 5


class Faulty(TorchBackend):
    """The first block uses GELU in place of SiLU, from step 5 on."""

    session_class = _From5

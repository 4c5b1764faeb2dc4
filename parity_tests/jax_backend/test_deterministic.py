"""`deterministic = true` on a GPU: XLA needs a variable of the environment."""

from __future__ import annotations

import jax
import pytest

from lockstep.core.errors import UserError
from lockstep.jax_backend.backend import XLA_FLAG, JaxBackend
from lockstep.parity_tests.tiny import tiny_config


def test_xla_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = tiny_config().model_copy(update={"deterministic": True})
    JaxBackend().describe(strict)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    JaxBackend().describe(tiny_config())
    with pytest.raises(UserError, match=f"needs XLA_FLAGS={XLA_FLAG} in the environment"):
        JaxBackend().describe(strict)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_foo=1 {XLA_FLAG}")
    JaxBackend().describe(strict)

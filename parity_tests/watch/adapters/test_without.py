"""An adapter whose library is not installed reports it in one line, with the command that installs it."""

from __future__ import annotations

import sys

import pytest

from lockstep import watch_lightning
from lockstep.core.errors import UserError


def test_watch_lightning_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(UserError, match=r"pip install 'lockstep\[lightning\]'"):
        watch_lightning(every=1)


def test_lightnings_own_loss_is_not_run_again_on_the_module() -> None:
    with pytest.raises(UserError, match="give loss= as well"):
        watch_lightning(every=1, operations=True)

"""Reach a Ray that runs, or start one of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.ray_signals import own_sigterm

# The address that stands for a Ray of this machine, which begins with the call and ends with the process.
LOCAL = "local"
_CONNECT_SECONDS = 5.0
# The folder that the package was imported from: not resolved, as a checkout's package is made of links.
_ABOVE_LOCKSTEP = Path(__file__).absolute().parents[2]


def reach_ray(ray: Any, address: str, **of_local: Any) -> None:
    """Connect this process to the Ray at `address` ("auto", "HOST:PORT"), or start one of this machine (LOCAL).

    of_local: arguments of `ray.init` for a Ray that is started.

    Raises:
        UserError: no Ray answers there, or it is another one than this process can use.
    """
    _require_open_port(address)
    if address == LOCAL:
        # Ray's workers have a low priority, so that they leave a machine to its head and its user. Here they are what
        # the user waits for, as processes without Ray are.
        os.environ.setdefault("RAY_worker_niceness", "0")
        more = {"include_dashboard": False, **of_local}
    else:
        more = {}
    try:
        # Ray's workers look for modules first in the folder that this call is made in. From a folder of the user's
        # they could load anybody's modules; from this one they load Lockstep.
        with contextlib.chdir(_ABOVE_LOCKSTEP), own_sigterm():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:
        # No address, another version of Ray or Python, a wrong token, a machine that is too busy: for each Ray has
        # another exception, down to a plain Exception.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot reach Ray at {address}: {first}") from error


def _require_open_port(address: str) -> None:
    """Raise UserError if nothing answers at HOST:PORT: Ray would try for minutes, then end this process."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"cannot reach Ray at {address}: {getattr(error, 'strerror', None) or error}") from error

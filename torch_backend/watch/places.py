"""The place of an operation: its module and the user's line; in the backward pass, those of its forward operation.

autograd numbers its nodes: the operation that runs has made the last one, or none. A node's number leads back to where
it was made, when the node runs in the backward pass.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.core.parity.watch.snapshot import plain_name

OUTSIDE = "the loss function"
# Frames in these folders are not the user's: torch, and Lockstep's own around the user's functions.
OURS = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])


@dataclass(frozen=True)
class Place:
    """A module by its path, its class, and the user's line. backward: while the backward pass runs."""

    module: str
    kind: str
    line: str
    backward: bool


Left = Callable[[nn.Module, Any, Any], None]


class Places:
    """A tracker of the place of the operation that runs now."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, str]] = []
        self._made: dict[int, Place] = {}
        self.ran: set[str] = set()

    def now(self) -> Place:
        """Return the place of the operation that runs."""
        backward = torch._C._current_graph_task_id() != -1
        if backward and not self._stack:
            node = torch._C._current_autograd_node()
            found = self._made.get(node._sequence_nr()) if node is not None else None
            module, kind, line = (found.module, found.kind, found.line) if found else ("the backward pass", "", "")
            return Place(module, kind, line, True)
        module, kind = self._stack[-1] if self._stack else (OUTSIDE, "")
        place = Place(module, kind, _line(), backward)
        # Operations that make no node come after one that did.
        self._made.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return place

    @contextmanager
    def tracked(self, model: nn.Module, left: Left) -> Iterator[None]:
        """Follow the modules whose forward runs. left: called with each, its arguments and its result."""
        names = {id(module): plain_name(name) or type(module).__name__ for name, module in model.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            if id(module) in names:
                self._stack.append((names[id(module)], type(module).__name__))
                self.ran.add(names[id(module)])

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if id(module) in names:
                left(module, args, result)
                self._stack.pop()

        handles = [
            register_module_forward_pre_hook(enter),
            # Without kwargs: when a hook with kwargs is removed, torch 2.13 leaves an entry behind.
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _line() -> str:
    """Return the user's line, `modeling_gpt2.py:123`, with its path from the installed packages or from here."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*OURS, "<")):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _short(file: str) -> str:
    for root in (*INSTALLED, str(Path.cwd())):
        if file.startswith(f"{root}/"):
            return file[len(root) + 1 :]
    return file

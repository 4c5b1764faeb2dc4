"""The place of an operation: its module and the user's line; in the backward pass, those of the forward operation.

autograd numbers its nodes in order. In the forward pass, the place of each operation is stored under the number of the
last node. When a node runs in the backward pass, its number gives the place of its forward operation.
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
# Frames of files in these folders are not the user's: torch's, and Lockstep's.
OURS = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])


@dataclass(frozen=True)
class Place:
    """The place of an operation.

    module: path of the module. kind: its class. line: the user's line. backward: True in the backward pass.
    """

    module: str
    kind: str
    line: str
    backward: bool


Left = Callable[[nn.Module, Any, Any], None]


class Places:
    """A tracker of the place of the current operation."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, str]] = []
        self._made: dict[int, Place] = {}
        self.ran: set[str] = set()

    def now(self) -> Place:
        """Return the place of the current operation."""
        backward = torch._C._current_graph_task_id() != -1
        if backward and not self._stack:
            node = torch._C._current_autograd_node()
            found = self._made.get(node._sequence_nr()) if node is not None else None
            module, kind, line = (found.module, found.kind, found.line) if found else ("the backward pass", "", "")
            return Place(module, kind, line, True)
        module, kind = self._stack[-1] if self._stack else (OUTSIDE, "")
        place = Place(module, kind, _line(), backward)
        # setdefault: later operations without a node have the same number and must not replace the place.
        self._made.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return place

    @contextmanager
    def tracked(self, model: nn.Module, left: Left) -> Iterator[None]:
        """Track the modules whose forward runs. left: called with (module, arguments, result) after each forward."""
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
            # Not with_kwargs: torch 2.13 keeps an entry when such a hook is removed.
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _line() -> str:
    """Return the user's line, `modeling_gpt2.py:123`; the path is relative to site-packages or the current folder."""
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

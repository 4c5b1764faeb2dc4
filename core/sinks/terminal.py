"""The console of every command: it prints text without markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.core.sinks.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

# Columns of a file or a pipe, beyond the width of any table.
_WIDE = 10_000


def open_console(width: int | None = None) -> Console:
    """Open a console for text of any origin: it is not read as markup, and control characters are escaped.

    width: columns; None: the terminal's. It raises BrokenPipeError when its reader has gone, as `print` does: rich's
    own ends the process with exit code 1, which here means that a check disagreed.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        # Escape before layout: rich cuts text that grows after it.
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(visible(text), **how)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return Plain(width=width, highlight=False, markup=False, emoji=False)


def open_unwrapped() -> Console:
    """Open a console as wide as the terminal, or, where the output is a file or a pipe, as wide as any table."""
    console = open_console()
    return console if console.is_terminal else open_console(_WIDE)

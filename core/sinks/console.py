"""The console: a live line on a terminal, plain lines at intervals in a log file, and a table at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lockstep.core.backend import StepRecord
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.run.checkpoints import Saved
from lockstep.core.sinks import phrases, tables
from lockstep.core.sinks.lines import bar, print_if_read, tell
from lockstep.core.sinks.summary import Summary
from lockstep.core.sinks.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Columns of the live line's bar.
SHORTEST_BAR, LONGEST_BAR = 8, 20
# A width beyond that of a step's line with all of its measures.
LONGEST_LINE = 10_000
PACE_STEPS = 50  # wall times for the estimate of the time left


class ConsoleSink:
    """A live line on a terminal; on anything else the first step, about every tenth of the run, and the last.

    total: steps of the run. done: steps that were done before (a resumed run). verbose: also print what is measured at
    an interval: norms, memory, the loss in FP32, attention logits, and at the end where the time went.
    A step's line fits the console: what matters less is left out, and stands in the records. Validation, checks, notes
    and samples get a line of their own in both cases, broken between words on a terminal. Reasons for skipped checks
    that repeat are printed once. When nobody reads any more (the terminal was closed), the words go nowhere and
    training goes on.
    """

    def __init__(self, total: int, done: int = 0, console: Console | None = None, verbose: bool = False) -> None:
        self._console = console or open_console()
        self._total, self._verbose = total, verbose
        self._every = max(1, round(total / 10))
        self._first: int | None = None
        self._last_printed = 0
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._val_loss: float | None = None
        self._agreed = self._judged = self._skipped = 0
        self._reason = ""
        self._latest: StepRecord | None = None
        self._norms: tuple[int, Mapping[str, float]] = 0, {}
        self._summary = Summary()
        self._closed = False
        self._progress: Progress | None = self._bar(done) if self._console.is_terminal else None

    def record(self, record: StepRecord) -> None:
        """Update the live line, or print a line if one is due; then print what was measured besides."""
        before, self._latest = self._latest, record
        if self._first is None:
            self._first = record.step
        else:  # the first step compiles, so its time is not typical
            self._pace.append(record.seconds)
        self._val_loss = record.metrics.get("val/loss", self._val_loss)
        self._summary.add(record)
        before_this = before.metrics if before else {}
        for line in phrases.metric_lines(record.step, record.metrics, before_this, self._verbose):
            self._print(line)
        if record.left_out is not None:
            self._print(phrases.left_out_line(record), "yellow")
        seen = {**record.metrics, **record.host}
        if found := {key: value for key, value in seen.items() if key.startswith(phrases.NORMS)}:
            self._norms = record.step, found
        if record.sample is not None:
            self._print(f"step {record.step}: sample: {record.sample!r}")
        due = record.step in (self._first, self._total) or record.step % self._every == 0
        if self._progress:
            self._progress.update(self._progress.task_ids[0], status=self._live(record))
        elif due:
            self._print_step(record)
        if due and self._verbose and self._norms[1]:
            for line in phrases.norm_lines(*self._norms):
                self._print(line)
            self._norms = 0, {}

    def check(self, check: Check) -> None:
        """Count the verdict and print it: red if it disagreed, yellow if nothing could be compared."""
        self._judged += 1
        self._agreed += check.verdict == "agreed"
        style = {"agreed": "green", "disagreed": "bold red", "could_not": "yellow"}[check.verdict]
        self._print(phrases.check_line(check), style)

    def skipped(self, step: int, reason: str) -> None:
        """Count it and print the reason."""
        self._skipped += 1
        if reason != self._reason:
            self._print(f"step {step}: parity check skipped: {reason}", "yellow")
        self._reason = reason

    def saved(self, saved: Saved) -> None:
        """Print nothing, unless training stood still for longer than a second."""
        if saved.wait_seconds > 1:
            self._print(f"step {saved.step}: training waited {saved.wait_seconds:.1f} s for the checkpoint")

    def note(self, text: str) -> None:
        """Print it."""
        self._print(text)

    def close(self) -> None:
        """Remove the live line; print the last step as a line, then a table of the main figures."""
        if self._closed:
            return
        self._closed = True
        if self._progress:
            self._say(self._progress.stop)
            self._progress = None
        if self._latest and self._latest.step != self._last_printed:
            self._print_step(self._latest)
        if rows := self._summary.rows():
            self._say(lambda: self._console.print(tables.facts("The run", rows)))
        if self._verbose and self._summary.seconds:
            drawn = tables.where_the_time_went(self._summary.seconds)
            self._say(lambda: self._console.print(drawn))
        if verdict := phrases.verdicts(self._agreed, self._judged, self._skipped):
            self._print(verdict, "green" if self._agreed == self._judged and self._judged else "bold red")

    def _bar(self, done: int) -> Progress:
        from rich.progress import Progress, TextColumn

        # The numbers are not markup, in which a `[` would vanish. A table of one column keeps the line in the
        # terminal's width.
        progress = Progress(TextColumn("{task.fields[status]}", markup=False), console=self._console, transient=True)
        progress.add_task("train", status=f"step {done}/{self._total} · compiling the first step")
        progress.start()
        return progress

    def _live(self, record: StepRecord) -> str:
        """Return the live line: the measures that fit, and a bar if there is room for it."""
        # The last column stays free, because some terminals break the line there.
        width = self._console.width - 1
        line = self._line(record, width)
        if (room := width - len(line) - 1) < SHORTEST_BAR:
            return line
        length = min(room, LONGEST_BAR)
        return f"{bar(record.step / self._total, length, self._console.options.ascii_only)} {line}"

    def _line(self, record: StepRecord, width: int) -> str:
        parts = {"step": f"step {record.step}/{self._total}", **phrases.measures(record, self._val_loss, record.mfu)}
        parts["left"] = phrases.time_left(self._pace, self._total - record.step)
        parts["verdict"] = phrases.verdicts(self._agreed, self._judged, self._skipped)
        line = phrases.fitting(parts, width)
        if parts["verdict"] and parts["verdict"] not in line:
            # It may fit without its word.
            line = phrases.fitting(parts | {"verdict": parts["verdict"].removeprefix("parity ")}, width)
        return line

    def _print_step(self, record: StepRecord) -> None:
        self._last_printed = record.step
        self._print(self._line(record, LONGEST_LINE if self._verbose else self._console.width))

    def _print(self, text: str, style: str | None = None) -> None:
        self._say(lambda: tell(self._console, text, style))

    def _say(self, words: Callable[[], None]) -> None:
        print_if_read(self._console, words)

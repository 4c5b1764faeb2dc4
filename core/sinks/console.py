"""The terminal: a live bar for a person who watches, plain lines now and then for a log file."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lockstep.core.backend import StepRecord
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.run.checkpoints import Saved
from lockstep.core.sinks import phrases, tables
from lockstep.core.sinks.terminal import open_console
from lockstep.core.train.metrics import SECONDS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PACE_STEPS = 50  # wall times that the time left is estimated from


class ConsoleSink:
    """A live bar on a terminal; on anything else the first step, about every tenth of the run, and the last.

    total: steps of the run. done: steps that were done before (a resumed run).
    Validation, checks, notes and samples get a line of their own in both cases. Reasons for skipped checks that repeat
    are said once. When nobody reads any more (the terminal was closed), the words go nowhere and training goes on.
    """

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self._console = console or open_console()
        self._total = total
        self._every = max(1, round(total / 10))
        self._first: int | None = None
        self._last_printed = 0
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._val_loss: float | None = None
        self._agreed = self._judged = self._skipped = 0
        self._reason = ""
        self._latest: StepRecord | None = None
        self._norms: tuple[int, Mapping[str, float]] = 0, {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._closed = False
        self._progress: Progress | None = self._bar(done) if self._console.is_terminal else None

    def record(self, record: StepRecord) -> None:
        """Move the bar, or print a line if one is due; then what was measured besides."""
        before, self._latest = self._latest, record
        if self._first is None:
            self._first = record.step
        else:  # the first step compiles, which says nothing about the others
            self._pace.append(record.seconds)
        self._val_loss = record.metrics.get("val/loss", self._val_loss)
        for line in phrases.metric_lines(record.step, record.metrics, before.metrics if before else {}):
            self._print(line)
        if record.left_out is not None:
            self._print(phrases.left_out_line(record), "yellow")
        self._seen(record)
        if record.sample is not None:
            self._print(f"step {record.step}: sample: {record.sample!r}")
        due = record.step in (self._first, self._total) or record.step % self._every == 0
        if self._progress:
            self._progress.update(self._progress.task_ids[0], completed=record.step, status=self._status(record))
        elif due:
            self._print_step(record)
        if due and self._norms[1]:
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
        """Count it and say why."""
        self._skipped += 1
        if reason != self._reason:
            self._print(f"step {step}: parity check skipped: {reason}", "yellow")
        self._reason = reason

    def saved(self, saved: Saved) -> None:
        """Nothing, unless training stood still for longer than a second."""
        if saved.wait_seconds > 1:
            self._print(f"step {saved.step}: training waited {saved.wait_seconds:.1f} s for the checkpoint")

    def note(self, text: str) -> None:
        """Print it."""
        self._print(text)

    def close(self) -> None:
        """Take the bar away and leave its last state as a line; of a run that was cut short, the last step."""
        if self._closed:
            return
        self._closed = True
        if self._progress:
            self._say(self._progress.stop)
            self._progress = None
        if self._latest and self._latest.step != self._last_printed:
            self._print_step(self._latest)
        if self._seconds:
            drawn = tables.where_the_time_went(self._seconds)
            self._say(lambda: self._console.print(drawn))
        if verdict := phrases.verdicts(self._agreed, self._judged, self._skipped):
            self._print(verdict, "green" if self._agreed == self._judged and self._judged else "bold red")

    def _seen(self, record: StepRecord) -> None:
        """Keep what is said later: the last norms and memory, and where the time went."""
        seen = {**record.metrics, **record.host}
        if found := {key: value for key, value in seen.items() if key.startswith(phrases.NORMS)}:
            self._norms = record.step, found
        for key, seconds in record.host.items():
            if key.startswith(SECONDS):
                self._seconds[key.removeprefix(SECONDS)] += seconds

    def _bar(self, done: int) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        # The numbers are not markup: a `[` in them would vanish.
        progress = Progress(
            TextColumn("step", markup=False),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            transient=True,
        )
        progress.add_task("train", total=self._total, completed=done, status="compiling the first step")
        progress.start()
        return progress

    def _status(self, record: StepRecord) -> str:
        parts = phrases.measures(record, self._val_loss, record.mfu)
        parts.append(phrases.time_left(self._pace, self._total - record.step))
        parts.append(phrases.verdicts(self._agreed, self._judged, self._skipped))
        return " · ".join(part for part in parts if part)

    def _print_step(self, record: StepRecord) -> None:
        self._last_printed = record.step
        self._print(f"step {record.step}/{self._total} · {self._status(record)}")

    def _print(self, text: str, style: str | None = None) -> None:
        self._say(lambda: self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True))

    def _say(self, words: Callable[[], None]) -> None:
        try:
            words()
        except OSError:
            # As Python's manual has it for a closed pipe: what is left in buffers must not fail again at the end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._console.file.fileno())
            os.close(nowhere)

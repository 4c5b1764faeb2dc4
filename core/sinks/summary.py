"""Sum up a run for its last lines: rows of the main figures, the most important first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from lockstep.core.backend import StepRecord
from lockstep.core.sinks.phrases import count, duration
from lockstep.core.train.metrics import MEMORY, SECONDS

# Parts of the time that are named.
_PARTS = 3


class Summary:
    """The summary of one process's records; `rows` are names and words.

    seconds: of each part of the time (core/train/time_accounting.py).
    """

    def __init__(self) -> None:
        self._first: StepRecord | None = None
        self._last: StepRecord | None = None
        self._validation: list[tuple[int, float]] = []
        self._largest_norm = 0, 0.0
        self._tokens, self._step_seconds = 0, 0.0
        self._memory: Mapping[str, float] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, record: StepRecord) -> None:
        """Take one optimizer step."""
        if self._first is None:
            self._first = record
        else:  # the first step compiles
            self._tokens, self._step_seconds = self._tokens + record.tokens, self._step_seconds + record.seconds
        self._last = record
        if (loss := record.metrics.get("val/loss")) is not None:
            self._validation.append((record.step, loss))
        if record.grad_norm > self._largest_norm[1]:
            self._largest_norm = record.step, record.grad_norm
        if found := {key: size for key, size in record.host.items() if key.startswith(MEMORY)}:
            self._memory = found
        for key, seconds in record.host.items():
            if key.startswith(SECONDS):
                self.seconds[key.removeprefix(SECONDS)] += seconds

    def rows(self) -> dict[str, str]:
        """Return the table: loss, validation, pace, time, gradient norm, memory; empty before the second step."""
        first, last = self._first, self._last
        if first is None or last is None or first is last:
            return {}
        found = {"loss": f"{last.loss:.4f} at step {last.step}, {first.loss:.4f} at step {first.step}"}
        if self._validation:
            step, loss = min(self._validation, key=lambda item: item[1])
            at_last, last_loss = self._validation[-1]
            lowest = "" if step == at_last else f", lowest {loss:.4f} at step {step}"
            found["validation loss"] = f"{last_loss:.4f} at step {at_last}{lowest}"
        if self._step_seconds:
            found["pace"] = f"{count(self._tokens / self._step_seconds)} tokens/s after the first step"
        if self.seconds:
            total = sum(self.seconds.values())
            ranked = sorted(self.seconds.items(), key=lambda item: -item[1])[:_PARTS]
            parts = ", ".join(f"{part} {spent / (total or 1):.0%}" for part, spent in ranked)
            found["time"] = f"{duration(total)}: {parts}"
        step, norm = self._largest_norm
        found["gradient norm"] = f"{last.grad_norm:.3g}, largest {norm:.3g} at step {step}"
        if last.mfu:
            found["MFU"] = ", ".join(f"{kind} {share:.1%}" for kind, share in last.mfu.items())
        if self._memory:
            found["memory"] = ", ".join(
                f"{key.removeprefix(MEMORY)} {size / 1e9:.2f} GB" for key, size in self._memory.items()
            )
        return found

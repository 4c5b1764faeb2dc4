"""Run `lockstep train` until its first record, and write the seconds of each phase of the start.

scripts/studies/start.py runs this file by its path, also with an older checkout's Lockstep, so it uses only names that
an older version has. Arguments: the file to write, the start time of the process (`time.monotonic`), then those of
`train`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# In order. A phase ends at its mark, so that their sum is the total.
PHASES = (
    "Python, command line, settings",
    "data opened and verified",
    "torch and backend imported",
    "model and optimizer",
    "run folder, tables, reference's process",
    "the step's program, a micro-batch",
    "the tapped program, a micro-batch",
    "the step, its evidence, its record",
)


def main(out: Path, started: float, arguments: list[str]) -> None:
    """Patch marks into the command, run it, and end this process group at the first record."""
    from lockstep.scripts import cli
    from lockstep.scripts.commands import train

    marks: dict[str, float] = {}

    def mark(phase: str) -> None:
        marks[phase] = time.monotonic()

    def before(owner: Any, name: str, phase: str, then: Any = None) -> None:
        true = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            mark(phase)
            if then is not None:
                then()
            return true(*given, **named)

        setattr(owner, name, call)

    def after(owner: Any, name: str, phase: str) -> None:
        true = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            try:
                return true(*given, **named)
            finally:
                mark(phase)

        setattr(owner, name, call)

    def inside() -> None:
        # `_train` imports these when it begins; the session is open by then.
        from lockstep.core.parity.modes.shadow import Shadow
        from lockstep.core.sinks.jsonl import JsonlSink
        from lockstep.torch_backend.session import TorchSession

        before(Shadow, "step", PHASES[4])
        after(TorchSession, "stream_gradients", PHASES[5])
        after(TorchSession, "stream_taps", PHASES[6])
        true = JsonlSink.record

        def record(sink: Any, of: Any) -> None:
            true(sink, of)
            mark(PHASES[7])
            ends = [started, *(marks[phase] for phase in PHASES)]
            seconds = {phase: ends[i + 1] - ends[i] for i, phase in enumerate(PHASES)}
            told = {"phases": seconds, "cpu": time.process_time(), "loss": of.loss, "grad_norm": of.grad_norm}
            part = out.with_suffix(".tmp")
            part.write_text(json.dumps(told))
            part.rename(out)
            os.killpg(0, signal.SIGKILL)

        JsonlSink.record = record  # type: ignore[method-assign, assignment]

    before(train, "open_data", PHASES[0])
    after(train, "open_data", PHASES[1])
    # The names of older versions and of today's.
    for opens in ("open_named", "open_candidate"):
        if hasattr(train, opens):
            after(train, opens, PHASES[2])
    before(train, "_create", PHASES[3])
    before(train, "_train", "begun", inside)
    sys.argv = ["lockstep", *arguments]
    cli.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])

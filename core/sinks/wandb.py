"""Weights & Biases, offline or online. A run imports it only if it uses it, and never stops because of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lockstep.core.backend import StepRecord
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.run.checkpoints import Saved
from lockstep.core.run.directory import RunDir

# The x axis is a value of our own. W&B's own counter only increases, so it would drop a run that resumes from an
# earlier step, and a check that comes some steps late.
STEP = "step"


class WandbSink:
    """A sink that logs to the W&B run whose id stands in run.json, so that a resumed run goes on in the same one.

    warn: called once if logging fails; training goes on without it.
    Raises UserError if wandb is not installed, or the run cannot be opened (no login, no network).
    """

    def __init__(self, run: RunDir, warn: Callable[[str], None]) -> None:
        mode = run.config.log.wandb
        if mode == "disabled":
            raise ValueError("log.wandb is disabled: make no WandbSink")
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"log.wandb = {mode} needs wandb, which is not installed: pip install 'lockstep[wandb]'"
            ) from None
        self._warn = warn
        self._broken = False
        identity = run.info.get("wandb_id")
        try:
            self._run: Any = wandb.init(
                project=run.config.log.wandb_project,
                name=run.config.name,
                id=identity,
                resume="allow",
                dir=str(run.path),
                mode=mode,
                config=run.config.model_dump(),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except Exception as error:  # any failure must be reported before hours are spent
            raise UserError(f"log.wandb = {mode}: Weights & Biases did not start: {error}") from error
        if self._run.id != identity:
            run.update_info(wandb_id=self._run.id)
        self._try(lambda: self._run.define_metric(STEP))
        self._try(lambda: self._run.define_metric("*", step_metric=STEP))

    def record(self, record: StepRecord) -> None:
        """Log the step's numbers under `train/`, the others under their own names."""
        values: dict[str, Any] = {
            STEP: record.step,
            "train/loss": record.loss,
            "train/lr": record.lr,
            "train/grad_norm": record.grad_norm,
            "train/clip_coefficient": record.clip_coefficient,
            "train/tokens_per_second": record.tokens_per_second,
            **{f"mfu/{kind}": share for kind, share in record.mfu.items()},
            **record.metrics,
            **record.host,
        }
        if record.left_out is not None:
            values["train/left_out"] = 1
        if record.sample is not None:
            values["sample"] = record.sample
        self._log(values)

    def check(self, check: Check) -> None:
        """Log the verdict (1 agreed, 0 not) and how near the worst finding is to its bound (1 = at it)."""
        values: dict[str, Any] = {STEP: check.step, "parity/agreed": int(check.verdict == "agreed")}
        worst = check.worst
        if worst is not None and worst.measures and math.isfinite(worst.worst.strain):
            values["parity/worst_strain"] = worst.worst.strain
        self._log(values)

    def skipped(self, step: int, reason: str) -> None:
        """Log that a check did not take place."""
        self._log({STEP: step, "parity/skipped": 1})

    def saved(self, saved: Saved) -> None:
        """Log what a checkpoint cost."""
        seconds = {"checkpoint/wait_seconds": saved.wait_seconds, "checkpoint/write_seconds": saved.write_seconds}
        self._log({STEP: saved.step, **seconds, "checkpoint/bytes": saved.bytes})

    def note(self, text: str) -> None:
        """Do nothing: W&B keeps numbers."""

    def close(self) -> None:
        """Finish the W&B run; a second call does nothing."""
        if self._run is not None:
            self._try(self._run.finish)
            self._run = None

    def _log(self, values: dict[str, Any]) -> None:
        if not self._broken and self._run is not None:
            self._try(lambda: self._run.log(values))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # a failing dashboard must not end a run
            if not self._broken:
                self._warn(f"Weights & Biases failed and is left out from here on: {error}")
            self._broken = True

"""Loss spikes: if a step's loss is far above the loss expected from the last steps, its batch is stored.

    slope_n = max(0, median over pairs i < j of the window of (l_j − l_i) / (s_j − s_i))      (Theil 1950, Sen 1968)
    level   = median of l_i − trend·(s_i − s̄),    trend the same median, not cut at 0
    sigma   = max(1.4826 · median |l_i − trend·(s_i − s̄) − level|, FLOOR · |level|)
    spike   ⇔ l_n > level + slope_n·(s_n − s̄) + log.spike_sigma · sigma

The window is the last WINDOW finite losses l, at steps s with the mean s̄. Medians are robust against spikes in the
window. For a normal distribution, 1.4826 · the median deviation is the standard deviation. Sigma is measured without
the trend. A decreasing trend is not extrapolated beyond the window: a loss decreases ever more slowly, and would be
above its tangent. There are no spikes until the window is full.

    spikes/step_000123/
      batch.npz    tokens, targets int32 (B, S); weights float32 (B, S); documents int32 (B, S) if attention needs them;
                   document_ids int64 (B, S): the document of the training split of each input; for a mixture
                   source_ids int64 (B,): the number of each sequence's data set in data.mixture, from 0
      about.json   step, loss, expected loss, record, digest of the batch, checkpoint before it, command to replay it
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.checkpoint.format import checkpoint_step, folder_name
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_whole
from lockstep.core.files.npz import read_npz
from lockstep.core.files.paths import quoted
from lockstep.core.run.data import RunData
from lockstep.core.run.directory import RunDir
from lockstep.core.run.layout import SPIKES
from lockstep.core.sinks.sink import Sink
from lockstep.core.train.metrics import SPIKE

# The arrays of batch.npz besides a batch.
ORIGIN = ("document_ids", "source_ids")
BATCH, ABOUT, SCHEMA = "batch.npz", "about.json", 1
WINDOW = 64
# Lower limit of sigma / loss, so that small deviations after very steady losses are not spikes.
FLOOR = 1e-3
# Maximum number of stored batches. A batch of a million tokens takes 20 MB, and a diverging run must not fill the disk.
MOST = 32


def expected(steps: Sequence[int], losses: Sequence[float], step: int) -> tuple[float, float]:
    """Return (expected loss at `step`, sigma) from the losses before it, by the formulas above."""
    s, loss = np.asarray(steps, np.float64), np.asarray(losses, np.float64)
    i, j = _pairs(len(s))
    trend = float(np.median((loss[j] - loss[i]) / (s[j] - s[i])))
    flat = loss - trend * (s - s.mean())
    level = float(np.median(flat))
    sigma = max(1.4826 * float(np.median(np.abs(flat - level))), FLOOR * abs(level))
    return level + max(trend, 0.0) * (step - float(s.mean())), sigma


@cache
def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    i, j = np.triu_indices(count, 1)
    return i, j


class SpikeDetector:
    """A detector that receives one loss after another. sigma: number of deviations of a spike; 0 disables it."""

    def __init__(self, sigma: float, before: Iterable[tuple[int, float]] = ()) -> None:
        self._sigma = sigma
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        for step, loss in before:
            self._take(step, loss)

    def look(self, step: int, loss: float) -> tuple[float, float] | None:
        """Return (expected loss, sigma) if this loss is a spike, else None; add the loss to the window."""
        found = None
        if self._sigma and len(self._window) == WINDOW and math.isfinite(loss):
            steps, losses = zip(*self._window, strict=True)
            middle, sigma = expected(steps, losses, step)
            if loss > middle + self._sigma * sigma:
                found = middle, sigma
        self._take(step, loss)
        return found

    def _take(self, step: int, loss: float) -> None:
        if math.isfinite(loss):
            self._window.append((step, loss))


class Spikes:
    """The stored batches of a run: those of spikes, and those of skipped steps."""

    def __init__(self, run: RunDir, data: RunData, first: int) -> None:
        """Read the losses before step `first`, the next step, from the run's records."""
        self._run, self._data = run, data
        before = [(line["step"], line["loss"]) for line in run.records() if line["step"] < first]
        self._detector = SpikeDetector(run.config.log.spike_sigma, before[-WINDOW:])
        self._notes: list[str] = []

    def look(self, record: StepRecord, batch: Batch) -> dict[str, float]:
        """Return the metric of a spike, or {}; store the batch of a spike or of a skipped step."""
        found = self._detector.look(record.step, record.loss)
        if record.left_out is not None and self._run.config.log.spike_sigma:
            self._keep(record, batch, {"why": f"left out: {record.left_out}"}, "")
        if found is None:
            return {}
        middle, sigma = found
        sigmas = (record.loss - middle) / sigma
        about = {"why": "loss spike", "expected_loss": middle, "sigma": sigma, "sigmas": sigmas, "window": WINDOW}
        said = f"loss {record.loss:.4f} is {sigmas:.1f} sigma above {middle:.4f}"
        self._keep(record, batch, about, f"loss spike: {said}; ")
        return {SPIKE: sigmas}

    def tell(self, sinks: Sequence[Sink]) -> None:
        """Report to the sinks the findings since the last call."""
        notes, self._notes = self._notes, []
        for text in notes:
            for sink in sinks:
                sink.note(text)

    def _keep(self, record: StepRecord, batch: Batch, about: dict[str, Any], said: str) -> None:
        folder = self._run.path / SPIKES / folder_name(record.step)
        done = [n for p in self._run.checkpoints() if (n := checkpoint_step(p) or 0) < record.step]
        about = {
            "schema": SCHEMA,
            "step": record.step,
            "loss": record.loss,
            **about,
            "digest": batch.digest(),
            "checkpoint_before": max(done, default=0),
            "replay": f"lockstep replay {quoted(folder)}",
            "record": asdict(record),
        }
        try:
            if len(list(folder.parent.glob("step_*"))) >= MOST and not folder.exists():
                told = f"its batch was not kept: {MOST} are"
            else:
                _write(folder, batch, self._origin(record.step, batch), about)
                told = f"its batch is in {folder}; run it again with: {about['replay']}"
        except OSError as error:
            told = f"its batch could not be kept: {error.strerror or error}"
        self._notes.append(f"step {record.step}: {said}{told}")

    def _origin(self, step: int, batch: Batch) -> dict[str, np.ndarray]:
        """Return the documents of the batch's tokens; {} if the data has other tokens at the step's position."""
        rows, length = batch.tokens.shape
        try:
            starts = self._data.sampler.window_starts((step - 1) * rows * length, rows, length)
            if not np.array_equal(self._data.dataset.split("train").gather(starts, length), batch.tokens):
                return {}
            return self._data.dataset.origin(starts, length)
        except (UserError, ValueError, IndexError):
            return {}


def _write(folder: Path, batch: Batch, origin: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Write a temporary folder, then rename it, so that a full disk leaves no partial one. Raises OSError."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    arrays = dict(batch.arrays) | origin
    raw = io.BytesIO()
    np.savez(raw, **arrays)  # type: ignore[arg-type]  # numpy types the keywords as the positional ones
    try:
        aside.mkdir(parents=True)
        (aside / BATCH).write_bytes(raw.getvalue())
        (aside / ABOUT).write_text(json.dumps(about, indent=1, default=dict) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_spike(path: Path) -> bool:
    """Return whether a folder is a stored spike of a run."""
    return path.parent.name == SPIKES and (path / ABOUT).is_file()


def read_spike(path: Path) -> tuple[dict[str, Any], Batch]:
    """Read a spike's about.json and batch. Raises UserError that names a missing or damaged file."""
    try:
        about = json.loads(read_whole(path / ABOUT))
        known = about["schema"] == SCHEMA and isinstance(about["step"], int) and isinstance(about["record"], dict)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path / ABOUT} is not what was written: {type(error).__name__}: {error}") from error
    if not known:
        raise UserError(f"{path / ABOUT} has another schema than {SCHEMA}: read it with the Lockstep that wrote it")
    arrays = read_npz(path / BATCH)
    try:
        batch = Batch.of({name: array for name, array in arrays.items() if name not in ORIGIN})
    except (TypeError, ValueError) as error:
        raise UserError(f"{path / BATCH} is not a batch: {error}") from error
    if batch.digest() != about.get("digest"):
        raise UserError(f"{path / BATCH} is not the batch that {ABOUT} names: their digests differ")
    return about, batch

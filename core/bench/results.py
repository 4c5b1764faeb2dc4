"""The bench's JSON: series of rows, each series measured on one device, with the same versions and run file.

```
{"schema": 1, "suite": "step", "series": [
  {"device": {…}, "versions": {…}, "config": {…}, "floor": {"rates": {…}, "bandwidth": …, "repetitions": {…}} or null,
   "rows": [{"row": NAME, "status": …, "reason": … or null, "settings": {…}, "tokens": [B, S],
             "micro_batch": …, "wall_seconds": …,
             if measured: "in_force": {…}, "first_step_seconds": …, "seconds": [every repetition], "median": …,
             "min": …, "spread": (max − min) / median, "tokens_per_second": …, "mfu": {…}, "hfu": {…},
             "peak": {"precision": …, "flops": …} or null, "floor_seconds": … or null, "memory": {… bytes},
             "clocks": {…}, "loss": …}]}]}
```
A status is one of STATUSES.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.bench.files import read_results
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.core.model.budget import floor_seconds, hfu, mfu, peak_flops

SCHEMA, SUITE = 1, "step"
# Status → the table's words instead of a figure.
STATUSES = {
    "measured": "",
    "refused": "cannot run here",
    "out_of_memory": "out of memory",
    "does_not_fit": "does not fit",
    "failed": "failed",
    "timed_out": "ran out of time",
}
Series = dict[str, Any]


def load_results(path: Path) -> dict[str, Any]:
    """Read the file; return an empty bench if there is none. Raises UserError if it is not the JSON of this bench."""
    if not path.exists():
        return {"schema": SCHEMA, "suite": SUITE, "series": []}
    found = read_results(path, SUITE, SCHEMA)
    if not isinstance(found.get("series"), list):
        raise UserError(f"{path} holds no series of `lockstep bench {SUITE}`; name another file")
    return found


def save_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write the file whole or not at all. Raises UserError if it cannot be written."""
    write_atomically(path, [(json.dumps(results, indent=1, allow_nan=False) + "\n").encode()])


def series_of(
    results: dict[str, Any], device: Mapping[str, Any], versions: Mapping[str, str], config: Mapping[str, Any]
) -> Series:
    """Return the series of this device, these versions and this run file; a new one if there is none."""
    key = {"device": dict(device), "versions": dict(versions), "config": dict(config)}
    for series in results["series"]:
        if all(series[name] == value for name, value in key.items()):
            found: Series = series
            return found
    made: Series = {**key, "floor": None, "rows": []}
    results["series"].append(made)
    return made


def put(series: Series, result: Mapping[str, Any]) -> None:
    """Add a row's result in place of an earlier one."""
    series["rows"] = [row for row in series["rows"] if row["row"] != result["row"]] + [dict(result)]


def result_of(series: Series, name: str) -> dict[str, Any] | None:
    """Return a row's result; None if there is none."""
    return next((row for row in series["rows"] if row["row"] == name), None)


def figures(
    config: RunConfig, seconds: Sequence[float], device: Mapping[str, Any], floor: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Derive a row's figures from its repetitions."""
    median = statistics.median(seconds)
    length = config.train.sequence_length
    rate = config.train.batch_size * length / median
    policy = config.precision.policy
    peak = peak_flops(device["name"], policy)
    return {
        "median": median,
        "min": min(seconds),
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_second": rate,
        "mfu": mfu(config.model, length, rate, device["name"], policy),
        "hfu": hfu(config, rate, device["name"]),
        "peak": None if peak is None else {"precision": peak[0], "flops": peak[1]},
        "floor_seconds": None if floor is None else floor_seconds(config, floor["rates"], floor["bandwidth"]),
    }

"""Observations: a sketch of 4 KiB and a few statistics of each tensor, in one npz file a step.

The file is readable with `numpy.load(path, allow_pickle=False)` alone. With N tensors it holds `names` (N,) ASCII,
`sketch` (N, 1021), `norm`, `max_abs`, `mean` (N,) float64, `nonfinite`, `size`, `independent` (N,) int64, and `about`,
a JSON object as text, whose `schema` is the version of the format.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.core.files.npz import read_npz
from lockstep.core.parity.evidence.sketch import K, sketch
from lockstep.core.parity.measures.calibrated_bounds import carriers
from lockstep.core.parity.measures.distances import Distances, ratios
from lockstep.core.parity.measures.stretches import Space, stretches, wide

SCHEMA = 1
# Names that are not of the tapped batch, as taps and `grad/TAP` are, but of the probe batch: NLL and parameter
# gradients.
PROBE_NLL, PARAMETER = "nll/probe", "gradient/"
STATISTICS = ("norm", "max_abs", "mean")
COUNTS = ("nonfinite", "size", "independent")


@dataclass(frozen=True)
class Observation:
    """The kept statistics of one tensor.

    sketch: S(x), (K,).
    norm: L2 norm.
    max_abs, mean: over all elements.
    nonfinite: count of elements that are not finite.
    size: count of elements.
    independent: estimate of the number of independent errors (core/parity/measures/calibrated_bounds.py).
    """

    sketch: np.ndarray
    norm: float
    max_abs: float
    mean: float
    nonfinite: int
    size: int
    independent: int


def observed(x: np.ndarray) -> Observation:
    """Observe a floating-point array of any shape, slice by slice. Norm and mean are accumulated in FP64."""
    flat = np.ascontiguousarray(x).reshape(-1)
    total, power, added, largest, finite = sketch(flat[:0]), 0.0, 0.0, 0.0, 0
    space = Space(1)
    with np.errstate(all="ignore"):
        for where in stretches(flat.size):
            part = wide(flat[where], *space.of(where.stop - where.start))
            total += sketch(flat[where], where.start)
            power += float(part @ part)
            added += float(part.sum())
            finite += int(np.count_nonzero(np.isfinite(part)))
            # NaN counts as larger than every number.
            largest = float(np.maximum(largest, np.maximum(part.max(), -part.min())))
        mean = added / flat.size if flat.size else 0.0
        return Observation(
            total, math.sqrt(power), largest, mean, x.size - finite, x.size, carriers(x) if x.size else 0
        )


def sketch_distances(c: Observation, w: Observation, t: Observation, stream: type[np.floating]) -> Distances:
    """Compute the measures of core/parity/measures/distances.py from sketches.

    `unequal` is NaN, because a sketch has no bits of single elements. Raises ValueError if sizes differ.
    """
    if not c.size == w.size == t.size:
        raise ValueError(f"sizes differ: candidate {c.size}, twin {w.size}, truth {t.size}")
    if c.nonfinite or w.nonfinite or t.nonfinite:
        return Distances(np.inf, np.inf, np.inf, np.inf, np.inf, np.nan)
    candidate, twin, truth = (o.sketch.astype(np.float64) for o in (c, w, t))
    return ratios(candidate, twin, truth, stream, np.nan)


def save(path: Path, observations: Mapping[str, Observation], about: Mapping[str, Any]) -> None:
    """Write one npz file, atomically. Raises UserError if writing fails."""
    arrays: dict[str, np.ndarray] = {
        "names": np.asarray(list(observations), dtype=np.bytes_),
        **_columns(observations),
        "about": np.asarray(json.dumps({"schema": SCHEMA, **about})),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy types the keywords as the positional ones
    try:
        write_atomically(path, [buffer.getvalue()])
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def to_arrays(observations: Mapping[str, Observation]) -> dict[str, np.ndarray]:
    """Return observations as numeric arrays: the columns of the npz file, and names as ASCII joined by newlines."""
    return {"names": np.frombuffer("\n".join(observations).encode("ascii"), np.uint8), **_columns(observations)}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Observation]:
    """Return the observations from `to_arrays`. Raises ValueError if the arrays are inconsistent."""
    try:
        names = bytes(arrays["names"].astype(np.uint8)).decode("ascii").split("\n") if arrays["names"].size else []
        return _rows(names, arrays)
    except (KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"no arrays of observations: {error}") from error


def _columns(observations: Mapping[str, Observation]) -> dict[str, np.ndarray]:
    rows = list(observations.values())
    return {
        "sketch": np.stack([o.sketch for o in rows]) if rows else np.zeros((0, K), np.float32),
        **{key: np.asarray([getattr(o, key) for o in rows], np.float64) for key in STATISTICS},
        **{key: np.asarray([getattr(o, key) for o in rows], np.int64) for key in COUNTS},
    }


def _rows(names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> dict[str, Observation]:
    """Rebuild observations.

    Raises ValueError if columns and names differ in length, KeyError if a column is missing.
    """
    columns = [arrays[key] for key in (*STATISTICS, *COUNTS)]
    shapes = {column.shape for column in columns}
    if arrays["sketch"].shape != (len(names), K) or shapes != {(len(names),)}:
        raise ValueError("the arrays of observations do not belong together")
    rows = zip(arrays["sketch"], *(column.tolist() for column in columns), strict=True)
    return {name: Observation(*row) for name, row in zip(names, rows, strict=True)}


def load(path: Path) -> tuple[dict[str, Observation], dict[str, Any]]:
    """Read (observations, about). Raises UserError if the file is missing, damaged or of another schema."""
    arrays = read_npz(path)
    try:
        arrays = {key: arrays[key] for key in ("names", "sketch", *STATISTICS, *COUNTS, "about")}
        about = json.loads(str(arrays["about"]))
        schema = about["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no file of observations: {type(error).__name__}: {error}") from error
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema}; this Lockstep reads {SCHEMA}")
    try:
        return _rows([name.decode("ascii") for name in arrays["names"]], arrays), about
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error

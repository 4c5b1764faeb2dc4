"""The largest errors of a tensor in an element, a row and a column; and the error of its length, from its exact rows.

The norm of a whole tensor hides faults in a small part of it. The norm also hides errors of length if a few rows with
much cancellation have most of the rounding error. With candidate c, twin w and truth t, over rows r and columns s of a
table::

    largest    = max |c − w| / max |w − t|
    row        = max_r ‖c − w‖_r / max_r ‖w − t‖_r          column: the same over s
    of many    = the same over rows, or columns, with more than FEW unequal elements of c and w
    row gain   = Σ_r ⟨c − w, t⟩_r / σ_r² / √(R · Σ_r ‖t‖_r² / σ_r²),  σ_r = ‖w − t‖_r, R rows

The row gain is the generalised least-squares estimate of a common factor of length, in units of its own error (Aitken
1935). The weight of a row is the inverse square of the twin's error in it. Every denominator has the lower limit of
`Distances`. If one token outweighs all others, the error of a row is a single number, which may be near zero by chance.
So a second estimate uses σ_r = max(‖w − t‖_r, ‖c − w‖_r), and the estimate nearer to zero is returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.core.parity.measures.stretches import Space

# If no more elements of a row or column than this are unequal, all of them may lie at a tie, and one may outweigh the
# others.
FEW = 2
# The sums: squares of c − w, w − t and t; then (c − w)·t, by row only.
APART, HONEST, TRUTH, ALONG = range(4)


@dataclass(frozen=True)
class Peaks:
    """The measures of this file.

    rows, columns: size of the table. A tensor of one axis is one row, whose row, column and row gain are 0.
    row_of_many, column_of_many: None if unequal elements were not counted.
    at_row, at_column: number, from 0, of the row or column with the largest ‖c − w‖, among those with more than FEW
    unequal elements if there are any.
    """

    largest: float
    row: float
    column: float
    row_gain: float
    rows: int
    columns: int
    row_of_many: float | None = None
    column_of_many: float | None = None
    at_row: int | None = None
    at_column: int | None = None


@dataclass(frozen=True)
class Norms:
    """L2 norms of a tensor, of its largest element, of its largest row and of its largest column."""

    whole: float = 0.0
    largest: float = 0.0
    row: float = 0.0
    column: float = 0.0

    @classmethod
    def of(cls, x: np.ndarray) -> Norms:
        """Return the norms of an array of any shape, as a table of `table_of`, computed in FP64."""
        table = np.square(x.reshape(table_of(x.shape)), dtype=np.float64)
        rows, columns = table.sum(1), table.sum(0)
        powers = rows.sum(), table.max(initial=0.0), rows.max(initial=0.0), columns.max(initial=0.0)
        return cls(*(math.sqrt(power) for power in powers))

    @classmethod
    def anywhere(cls, whole: float) -> Norms:
        """Return upper bounds of the norms if only the tensor's norm is known: one element may have all of it."""
        return cls(whole, whole, whole, whole)

    def at_least(self, other: Norms, times: float = 1.0) -> Norms:
        """Return the maximum of each norm and `times` the other's."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Norms(*(max(a, times * b) for a, b in pairs))


def table_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns: for a matrix its own, else tokens (the first two axes) and the rest."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    split = 1 if len(shape) == 2 else 2
    return math.prod(shape[:split]), math.prod(shape[split:])


class PeakSums:
    """The sums from which `Peaks` follow. The elements of a tensor are added in row-major order."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._rows, self._columns = table_of(shape)
        self._at, self._space = 0, Space(3)
        self._largest = np.zeros(3)
        self._by_row, self._by_column = np.zeros((4, max(1, self._rows))), np.zeros((3, max(1, self._columns)))
        self._unequal = np.zeros(max(1, self._rows), np.int64), np.zeros(max(1, self._columns), np.int64)

    def add(self, apart: np.ndarray | None, honest_squares: np.ndarray, truth: np.ndarray) -> None:
        """Add the next elements: c − w, or None if it is zero, (w − t)² and t, as flat float64 arrays."""
        of_truth, of_apart, along = self._space.of(truth.size)
        sums = {HONEST: honest_squares, TRUTH: np.square(truth, out=of_truth)}
        if apart is not None:
            sums |= {APART: np.square(apart, out=of_apart), ALONG: np.multiply(apart, truth, out=along)}
        for which, x in sums.items():
            if which != ALONG:
                self._largest[which] = max(self._largest[which], x.max(initial=0.0))
        for row, column, where in self._blocks(truth.size):
            for which, x in sums.items():
                block = x[where].reshape(-1, min(self._columns, where.stop - where.start))
                self._by_row[which, row : row + len(block)] += block.sum(1)
                if which != ALONG:
                    self._by_column[which, column : column + block.shape[1]] += block.sum(0)
                if which == APART:
                    of_rows, of_columns = self._unequal
                    of_rows[row : row + len(block)] += np.count_nonzero(block, axis=1)
                    of_columns[column : column + block.shape[1]] += np.count_nonzero(block, axis=0)
        self._at += truth.size

    def _blocks(self, size: int) -> Iterator[tuple[int, int, slice]]:
        """Cut the elements into the rest of a row, whole rows and the beginning of a row.

        Yields row, column and slice of each.
        """
        start = 0
        while start < size:
            row, column = divmod(self._at + start, self._columns)
            left = size - start
            whole = left // self._columns * self._columns if column == 0 else 0
            length = whole or min(left, self._columns - column)
            yield row, column, slice(start, start + length)
            start += length

    def peaks(self, floor: float, tiny: float, noise: Norms) -> Peaks:
        """Compute the measures.

        floor: lower limit of an error, relative to the truth.
        tiny: absolute lower limit, for a truth of zero.
        noise: norms of an error that is not a fault.
        """
        known = (
            (self._largest, noise.largest),
            (self._by_row.max(1), noise.row),
            (self._by_column.max(1), noise.column),
        )
        largest, row, column = (
            math.sqrt(apart) / max(math.sqrt(honest), floor * math.sqrt(truth), tiny, least)
            for (apart, honest, truth, *_), least in known
        )
        if self._rows == 1 or self._columns == 1:
            return Peaks(largest, 0.0, 0.0, 0.0, self._rows, self._columns)
        of_twin, of_truth, along = self._by_row[1:]
        least = max(floor**2 * float(of_truth.sum()), noise.whole**2) / self._rows
        variance = np.maximum(of_twin, max(least, tiny**2))
        either = np.maximum(variance, self._by_row[APART])
        gain = min((_gain(along, of_truth, of_error) for of_error in (variance, either)), key=abs)
        sums = tuple(zip((self._by_row[APART], self._by_column[APART]), self._unequal, strict=True))
        many_row, many_column = (s * _of_many(*line) for s, line in zip((row, column), sums, strict=True))
        at_row, at_column = (_worst(*line) for line in sums)
        size = self._rows, self._columns
        return Peaks(largest, row, column, gain, *size, many_row, many_column, at_row, at_column)


def _gain(along: np.ndarray, truth: np.ndarray, variance: np.ndarray) -> float:
    """Return the estimate of a common factor of length from these sums by row, in units of its error."""
    power = float((truth / variance).sum())
    return float((along / variance).sum()) / math.sqrt(len(truth) * power) if power else 0.0


def _worst(squares: np.ndarray, unequal: np.ndarray) -> int:
    """Return the number of the line with the largest norm, among lines with more than FEW unequal elements if any."""
    many = unequal > FEW
    return int(np.argmax(np.where(many, squares, -1.0) if many.any() else squares))


def _of_many(squares: np.ndarray, unequal: np.ndarray) -> float:
    """Return the largest norm of a line with more than FEW unequal elements, relative to the largest of all lines."""
    most = squares.max(initial=0.0)
    return math.sqrt(squares[unequal > FEW].max(initial=0.0) / most) if most else 0.0

"""The order of a mixture: a pure function from a sample's number to its source and its number within that source.

Bound. Let L = 2**20 (`PERIOD`), w[s] the share of source s, and count[s](a) its samples among a, …, a + L - 1.

    |count[s](a) - w[s] · L| < 1                     for every source s and every start a >= 0
    |samples of s before b · L - w[s] · b · L| < 1 + ceil(log2(k)) / 2     for every b: shares are exact in the long run

A bound of 1 over windows of *every* length is impossible. Such a sequence is balanced, and for three or more sources
with distinct shares, balanced sequences exist only for special shares, such as 4/7, 2/7, 1/7 (Fraenkel's conjecture,
proven for up to seven letters: Tijdeman 2000; Barát & Varjú 2003). For windows of one length it is possible, as
follows.

Construction. The samples are divided into periods of L slots. w[s] · L = base[s] + rate[s] with 0 <= rate[s] < 1. The
sum of the rates is an integer m: in each period, m of the sources are *chosen*, and have one sample more than base.
One pattern of L slots is repeated. In it a fixed set S* of m sources is chosen, those with the largest rates. If a
period has another set S, each source in S* but not in S gives one of its slots to a source in S but not in S*. A window
that begins at slot r of period b contains this number of samples of source s:

    n[s](b) + (samples of s in the first r slots of period b + 1) - (samples of s in the first r slots of period b)

The patterns of two periods differ only in given slots. All given slots of period b are in the region b mod K of K = 64
regions. In region 0 no slot is given, and S = S*. From one period to the next, the slots given before return in one
region, and other slots are given in a *later* region, or none. So, as r grows, in this order:

    a source of S* that gives in both periods      +1, then -1     it was not chosen: n = base
    a source that receives in both periods         -1, then +1     it was chosen: n = base + 1
    all others change once, or not at all, from their count in one period to that in the next

Each count therefore stays base or base + 1. Both differ from w · L by less than 1 (and base = w · L if rate = 0).
Because S = S* in region 0, the other K - 1 of 64 periods need the rates (K · rate - [in S*]) / (K - 1). They are in
[0, 1]: of k <= K rates with the sum m, the largest m are at least 1/k, and the others at most 1 - 1/k.
`carries_before` chooses these sets.

The pattern is drawn once, in two steps. The first is stratified sampling: the j-th sample of source s gets a time drawn
uniformly from [j / n[s], (j + 1) / n[s]), and slots are in the order of times, so that a batch has nearly its share of
each source. In the second step, each chunk of 1,024 slots is rotated by a random number. Otherwise the first slot of
every eighth would have a source of share 1/2 more often than the others, and so would rows of batches of 512. With the
rotation, no row of a batch and no rank has a source more often than another in expectation. Steps that are exactly L
samples apart have their sources in the same rows, except for given slots.

Every source has a slot in every region. It has at least 256 slots (`LEAST_SHARE`), so one of the strata of its times
is in the middle half of the region's time. Before the rotation, a slot differs from its time by less than k <= 64
slots, because the number of each source's samples before any time differs from its share by at most one. The rotation
of a chunk does not move a slot into another region, because regions consist of whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.core.config.mixture import LEAST_SHARE, MOST_SOURCES
from lockstep.core.data.carries import carries_before
from lockstep.core.data.permutation import mixed

PERIOD = 1 << 20
REGIONS = 64
_CHUNK = 1024


@dataclass(frozen=True)
class Given:
    """A slot of a period that belongs to `receiver`; in the pattern it belongs to `giver`."""

    slot: int
    giver: int
    receiver: int


@dataclass(frozen=True)
class MixtureOrder:
    """The order of the sources.

    Attributes:
        weights: (k,), each above zero; their sum need not be 1.
        seed: seed of the pattern, in [0, 2**64).
    """

    weights: tuple[Fraction, ...]
    seed: int

    def __post_init__(self) -> None:
        """Raise ValueError for weights or a seed for which the bound is not proven."""
        if not 1 <= len(self.weights) <= MOST_SOURCES or min(self.weights) <= 0 or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"1 to {MOST_SOURCES} weights above zero and a seed in [0, 2**64); got {self}")
        if min(self.shares) < LEAST_SHARE:
            raise ValueError(f"every share must be at least {LEAST_SHARE}; got {self.weights}")

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """The weights divided by their sum."""
        total = sum(self.weights, Fraction(0))
        return tuple(weight / total for weight in self.weights)

    @cached_property
    def base(self) -> tuple[int, ...]:
        """The samples of each source in a period in which it is not chosen."""
        return tuple(int(share * PERIOD) for share in self.shares)

    @cached_property
    def rates(self) -> tuple[Fraction, ...]:
        """The fraction of the periods in which each source is chosen."""
        return tuple(share * PERIOD - base for share, base in zip(self.shares, self.base, strict=True))

    @cached_property
    def usual(self) -> tuple[int, ...]:
        """The pattern's choice: 1 for each source of S*, else 0."""
        chosen = PERIOD - sum(self.base)
        largest = sorted(range(len(self.rates)), key=lambda source: (-self.rates[source], source))[:chosen]
        return tuple(int(source in largest) for source in range(len(self.rates)))

    def before(self, period: int) -> tuple[int, ...]:
        """Return the samples of each source in the periods before this one: (k,) integers, in O(k) operations."""
        # Number of earlier periods of region 0: the first of every REGIONS periods.
        plain = -(-period // REGIONS)
        rates = [(REGIONS * rate - usual) / (REGIONS - 1) for rate, usual in zip(self.rates, self.usual, strict=True)]
        # carries_before requires rates below 1. A source with the rate 1 is always chosen, and counted here.
        always = [int(rate) for rate in rates]
        chosen = carries_before([rate - one for rate, one in zip(rates, always, strict=True)], period - plain)
        return tuple(
            period * base + plain * usual + (period - plain) * one + times
            for base, usual, one, times in zip(self.base, self.usual, always, chosen, strict=True)
        )

    def samples(self, period: int) -> tuple[int, ...]:
        """Return the samples of each source in a period: (k,) integers."""
        return tuple(after - now for now, after in zip(self.before(period), self.before(period + 1), strict=True))

    def given(self, period: int) -> tuple[Given, ...]:
        """Return the slots that are given to another source in a period."""
        chosen = [count - base for count, base in zip(self.samples(period), self.base, strict=True)]
        givers = [source for source, usual in enumerate(self.usual) if usual and not chosen[source]]
        receivers = [source for source, usual in enumerate(self.usual) if chosen[source] and not usual]
        pattern = _pattern(self)
        region = period % REGIONS
        return tuple(
            Given(pattern.slot_in_region(giver, region), giver, receiver)
            for giver, receiver in zip(givers, receivers, strict=True)
        )

    def places(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source, and the number within its source, of `count` samples, beginning with number `first`.

        Time and memory depend on `count`, not on `first`.

        Returns:
            (sources, numbers), each int64 (count,).

        Raises:
            ValueError: `first` or `count` is negative.
        """
        if first < 0 or count < 0:
            raise ValueError(f"first {first} and count {count} must not be negative")
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while done < count:
            period, slot = divmod(first + done, PERIOD)
            here = min(count - done, PERIOD - slot)
            self._fill(period, slot, sources[done : done + here], numbers[done : done + here])
            done += here
        return sources, numbers

    def counts(self, upto: int) -> tuple[int, ...]:
        """Return the number of samples of each source among the first `upto`: (k,) integers.

        The time does not grow with `upto`.
        """
        period, slot = divmod(upto, PERIOD)
        pattern, found = _pattern(self), list(_before(self, period))
        for source in range(len(found)):
            found[source] += pattern.before(source, slot)
        for one in _given_in(self, period):
            if one.slot < slot:
                found[one.giver] -= 1
                found[one.receiver] += 1
        return tuple(found)

    def _fill(self, period: int, slot: int, sources: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Write sources and numbers of consecutive samples of one period, the first at `slot`, into two arrays."""
        pattern, end = _pattern(self), slot + len(sources)
        sources[:] = pattern.source[slot:end]
        numbers[:] = pattern.number[slot:end]
        for one in _given_in(self, period):
            if one.slot >= end:
                continue
            after = max(0, one.slot + 1 - slot)
            # The numbers of the giver's later samples decrease by one, the receiver's increase by one.
            numbers[after:] += (sources[after:] == one.receiver).astype(np.int64) - (sources[after:] == one.giver)
            if one.slot >= slot:
                sources[one.slot - slot] = one.receiver
                numbers[one.slot - slot] = pattern.before(one.receiver, one.slot)
        numbers += np.array(_before(self, period))[sources]


class _Pattern:
    """The slots of a period in which S* is chosen.

    source: int8 (PERIOD,), the source of each slot. number: int32 (PERIOD,), the samples of that source before it.
    """

    def __init__(self, samples: tuple[int, ...], seed: int) -> None:
        owners = np.repeat(np.arange(len(samples), dtype=np.int8), samples)
        numbers = np.concatenate([np.arange(count, dtype=np.int32) for count in samples])
        # Random numbers are 32 bits of a hash of the slot's number. FP64 sums and quotients are equal on all machines.
        draws = mixed(np.arange(PERIOD, dtype=np.uint64), seed) >> np.uint64(32)
        times = (numbers + draws * 2.0**-32) / np.array(samples, np.float64)[owners]
        chunks = owners[np.argsort(times, kind="stable")].reshape(-1, _CHUNK)
        turns = mixed(np.arange(PERIOD, PERIOD + len(chunks), dtype=np.uint64), seed) >> np.uint64(32)
        turned = (np.arange(_CHUNK) + turns.astype(np.int64)[:, None]) % _CHUNK
        self.source = np.take_along_axis(chunks, turned, axis=1).ravel()
        self._slots = np.argsort(self.source, kind="stable").astype(np.int32)
        self._first = np.cumsum([0, *samples])
        self.number = np.empty(PERIOD, np.int32)
        self.number[self._slots] = numbers
        self.source.flags.writeable = self.number.flags.writeable = False

    def slots_of(self, source: int) -> NDArray[np.int32]:
        """Return the slots of a source, in order: int32, from 0 to PERIOD - 1."""
        return self._slots[self._first[source] : self._first[source + 1]]

    def before(self, source: int, slot: int) -> int:
        """Return the number of samples of a source in the slots before this one."""
        return int(np.searchsorted(self.slots_of(source), slot))

    def slot_in_region(self, source: int, region: int) -> int:
        """Return the slot that a source gives in a region: its first one there."""
        slots = self.slots_of(source)
        return int(slots[np.searchsorted(slots, region * (PERIOD // REGIONS))])


@lru_cache(maxsize=4)
def _pattern(order: MixtureOrder) -> _Pattern:
    samples = tuple(base + usual for base, usual in zip(order.base, order.usual, strict=True))
    return _Pattern(samples, order.seed)


@lru_cache(maxsize=64)
def _given_in(order: MixtureOrder, period: int) -> tuple[Given, ...]:
    return order.given(period)


@lru_cache(maxsize=64)
def _before(order: MixtureOrder, period: int) -> tuple[int, ...]:
    return order.before(period)

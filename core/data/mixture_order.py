"""The order of a mixture: a pure function from a sample's number to its source and its number within that source.

The bound. Let L = 2**20 (`PERIOD`), w[s] the share of source s, and count[s](a) its samples among a, …, a + L - 1.

    |count[s](a) - w[s] · L| < 1                     for every source s and every start a >= 0
    |samples of s before b · L - w[s] · b · L| < 1 + ceil(log2(k)) / 2     for every b: shares are exact in the long run

A bound of 1 over windows of *every* length is impossible: such a sequence is balanced, and for three or more sources of
distinct shares balanced sequences exist only for special ones, such as 4/7, 2/7, 1/7 (Fraenkel's conjecture, proven for
up to seven letters: Tijdeman 2000; Barát & Varjú 2003). Over windows of one length it is possible, as follows.

Construction. Time is cut into periods of L slots. w[s] · L = base[s] + rate[s] with 0 <= rate[s] < 1, and the rates add
up to an integer m: in each period m of the sources are *chosen* and have one sample more than base. One pattern of L
slots is repeated, in which a fixed set S* of m sources is chosen, those of the largest rates. Where a period's set S
is another one, each source of S* that is not in S gives one of its slots to a source of S that is not in S*. A window
that begins at slot r of period b has of source s

    n[s](b) + (samples of s in the first r slots of period b + 1) - (samples of s in the first r slots of period b)

and the patterns differ only in given slots. All given slots of period b lie in the region b mod K of K = 64 regions,
and nothing is given in region 0, where S = S*. From a period to the next, all slots given before come back in one
region, and others are given in a *later* one, or none is. So as r grows, in this order:

    a source of S* that gives in both periods      +1, then -1     it was not chosen: n = base
    a source that receives in both periods         -1, then +1     it was chosen: n = base + 1
    all others change once, or not at all, from their count in one period to that in the next

so that each count stays base or base + 1 throughout, both less than 1 from w · L (and base = w · L where rate = 0).
Region 0 needs the chosen sets of the other K - 1 periods of 64 at the rates (K · rate - [in S*]) / (K - 1), which lie
in [0, 1]: the largest m of k <= K rates with the sum m are at least 1/k, and the others at most 1 - 1/k.
`carries_before` chooses them.

The pattern is drawn once, in two steps. Stratified sampling: the j-th sample of source s gets a time drawn evenly from
[j / n[s], (j + 1) / n[s]), and slots are in the order of times, so that a batch has nearly its share of each source.
Then each chunk of 1,024 slots is turned by a number drawn for it: otherwise the first slot of every eighth would see a
source of share 1/2 more often than the others do, and so would rows of batches of 512. So no row of a batch, and no
rank, is expected to meet a source more often than another one. Steps that are exactly L samples apart have their
sources at the same rows, but for given slots.

Every source has a slot in every region. It has at least 256 slots (`LEAST_SHARE`), so one of the strata of its times
lies in the middle half of the region's time. Before slots are turned, a slot is off its time by less than k <= 64
slots, since each source's samples before any time are within one of their share. Turning a chunk moves nothing across
a region's border: regions are whole chunks.
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
    """A slot of a period that belongs to `receiver`, and to `giver` in the pattern."""

    slot: int
    giver: int
    receiver: int


@dataclass(frozen=True)
class MixtureOrder:
    """The order of the sources.

    Attributes:
        weights: (k,), each above zero; they need not add up to 1.
        seed: in [0, 2**64); draws the pattern.
    """

    weights: tuple[Fraction, ...]
    seed: int

    def __post_init__(self) -> None:
        """Raise ValueError for weights or a seed for which the order is not proven."""
        if not 1 <= len(self.weights) <= MOST_SOURCES or min(self.weights) <= 0 or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"1 to {MOST_SOURCES} weights above zero and a seed in [0, 2**64); got {self}")
        if min(self.shares) < LEAST_SHARE:
            raise ValueError(f"every share must be at least {LEAST_SHARE}; got {self.weights}")

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """The weights over their sum."""
        total = sum(self.weights, Fraction(0))
        return tuple(weight / total for weight in self.weights)

    @cached_property
    def base(self) -> tuple[int, ...]:
        """Samples of each source in a period where it is not chosen."""
        return tuple(int(share * PERIOD) for share in self.shares)

    @cached_property
    def rates(self) -> tuple[Fraction, ...]:
        """The share of the periods in which each source is chosen."""
        return tuple(share * PERIOD - base for share, base in zip(self.shares, self.base, strict=True))

    @cached_property
    def usual(self) -> tuple[int, ...]:
        """The pattern's choice: 1 for each source of S*, else 0."""
        chosen = PERIOD - sum(self.base)
        largest = sorted(range(len(self.rates)), key=lambda source: (-self.rates[source], source))[:chosen]
        return tuple(int(source in largest) for source in range(len(self.rates)))

    def before(self, period: int) -> tuple[int, ...]:
        """Return the samples of each source in the periods before this one: (k,) integers, in O(k) operations."""
        # Periods of region 0, each of which begins with one.
        plain = -(-period // REGIONS)
        rates = [(REGIONS * rate - usual) / (REGIONS - 1) for rate, usual in zip(self.rates, self.usual, strict=True)]
        # carries_before takes rates below 1: a source that is always chosen is one of its own.
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
        """Return the slots that change hands in a period."""
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
        """Return source, and number within its source, of `count` samples from number `first` on.

        Time and memory are those of the samples that are asked for, wherever they lie.

        Returns:
            int64 (count,) twice.

        Raises:
            ValueError: a negative number.
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
        """Return the samples of each source among the first `upto`: (k,) integers, without counting up to there."""
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
        """Write the places of consecutive samples of one period, the first at `slot`, into two arrays."""
        pattern, end = _pattern(self), slot + len(sources)
        sources[:] = pattern.source[slot:end]
        numbers[:] = pattern.number[slot:end]
        for one in _given_in(self, period):
            if one.slot >= end:
                continue
            after = max(0, one.slot + 1 - slot)
            # The giver's later samples come one earlier, the receiver's one later.
            numbers[after:] += (sources[after:] == one.receiver).astype(np.int64) - (sources[after:] == one.giver)
            if one.slot >= slot:
                sources[one.slot - slot] = one.receiver
                numbers[one.slot - slot] = pattern.before(one.receiver, one.slot)
        numbers += np.array(_before(self, period))[sources]


class _Pattern:
    """The slots of a period in which S* is chosen.

    source: int8 (PERIOD,). number: int32 (PERIOD,): samples of that source before this one.
    """

    def __init__(self, samples: tuple[int, ...], seed: int) -> None:
        owners = np.repeat(np.arange(len(samples), dtype=np.int8), samples)
        numbers = np.concatenate([np.arange(count, dtype=np.int32) for count in samples])
        # 32 bits of a hash of the slot's number; sums and quotients of FP64 are the same on every machine.
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
        """Return how many samples of a source the slots before this one hold."""
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

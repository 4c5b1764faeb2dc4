"""Mixtures: exact over every window of 2**20 samples, a function of the sample's number, in the sources' own orders."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.config.mixture import LEAST_SHARE, all_parts, parts
from lockstep.core.config.schema import DataConfig, EvalConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.core.data import mixture_order
from lockstep.core.data.carries import carries_before
from lockstep.core.data.dataset import TokenSplit
from lockstep.core.data.index import TOKENIZER_NAME
from lockstep.core.data.mixed import STRIDE, JoinedSplit, MixedSampler, source_of
from lockstep.core.data.mixture_order import PERIOD, REGIONS, MixtureOrder
from lockstep.core.data.prepare import prepare
from lockstep.core.data.sampler import BlockSampler
from lockstep.core.errors import UserError
from lockstep.core.run.data import RunData, apportioned
from lockstep.parity_tests.data.conftest import settings_for, write_texts

MIXTURES = [
    ["0.7", "0.3"],
    ["1/3", "0.123456789", "5"],
    ["3", "5", "7", "11", "13"],
    ["1", "2", "3", "5", "7", "11", "13", "17", "19", "23"],
    ["1", "1/4000"],
]
# The first, where slots are given first, where windows of regions end and begin, and one of a very long run.
PERIODS = [0, REGIONS - 1, REGIONS, 10**7]


def order_of(weights, seed: int = 0) -> MixtureOrder:
    return MixtureOrder(tuple(map(Fraction, weights)), seed)


def furthest(order: MixtureOrder, period: int) -> Fraction:
    """Return the largest |samples - share · PERIOD| of any source, over all windows that begin in a period."""
    here, _ = order.places(period * PERIOD, PERIOD)
    there, _ = order.places((period + 1) * PERIOD, PERIOD)
    differ, found = np.flatnonzero(here != there), Fraction(0)
    for source, share in enumerate(order.shares):
        # Counts change only where the two periods differ.
        changes = (there[differ] == source).astype(np.int64) - (here[differ] == source)
        counts = int((here == source).sum()) + np.concatenate([[0], np.cumsum(changes)])
        found = max(found, abs(int(counts.max()) - share * PERIOD), abs(int(counts.min()) - share * PERIOD))
    return found


@pytest.mark.parametrize("weights", MIXTURES, ids=len)
def test_every_window_of_a_period_is_within_one_sample_of_its_weights(weights):
    order = order_of(weights)
    assert max(furthest(order, period) for period in PERIODS) < 1


def test_a_slot_that_comes_back_too_late_is_found(monkeypatch):
    """Regions that run backwards give twice in a window what may be given once."""
    slot_in_region = mixture_order._Pattern.slot_in_region
    backwards = lambda pattern, source, region: slot_in_region(pattern, source, REGIONS - 1 - region)  # noqa: E731
    monkeypatch.setattr(mixture_order._Pattern, "slot_in_region", backwards)
    mixture_order._given_in.cache_clear()
    order = order_of(["5", "7", "11"], seed=77)
    assert max(furthest(order, period) for period in range(5)) > 1
    mixture_order._given_in.cache_clear()


@pytest.mark.parametrize("weights", MIXTURES, ids=len)
def test_shares_are_exact_in_the_long_run(weights):
    order = order_of(weights)
    limit = 1 + Fraction(int(np.ceil(np.log2(len(weights)))), 2)
    for period in [*range(0, 300, 7), 10**4 + 1, 10**6, 10**12]:
        before = order.before(period)
        assert sum(before) == period * PERIOD
        apart = [abs(count - share * period * PERIOD) for count, share in zip(before, order.shares, strict=True)]
        assert max(apart) < limit


@given(
    numerators=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    period=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_carries_are_whole_exclusive_and_near_their_rates(numerators, period):
    rates = [Fraction(number, 100) for number in numerators]
    rates += [Fraction(-sum(numerators) % 100, 100)]
    now, after = carries_before(rates, period), carries_before(rates, period + 1)
    assert sum(now) == sum(rates) * period
    assert all(later - sooner in (0, 1) for sooner, later in zip(now, after, strict=True))
    limit = Fraction(int(np.ceil(np.log2(len(rates)))), 2)
    assert all(abs(count - rate * period) <= limit for count, rate in zip(now, rates, strict=True))


@pytest.mark.parametrize("rates", [["1/2"], ["1/2", "1/3"], ["1"], ["-1/2", "1/2"]])
def test_carries_of_rates_that_cannot_be_are_refused(rates):
    with pytest.raises(ValueError):
        carries_before([Fraction(rate) for rate in rates], 3)


@pytest.mark.parametrize("first", [0, 17, PERIOD - 5, 3 * PERIOD - 2000, 10**9, 10**15])
def test_samples_of_a_source_are_numbered_one_after_another_wherever_one_begins(first):
    order = order_of(["0.5", "0.31", "0.19"])
    sources, numbers = order.places(first, 5000)
    begins, ends = order.counts(first), order.counts(first + 5000)
    for source in range(3):
        assert np.array_equal(numbers[sources == source], np.arange(begins[source], ends[source]))
    # Any part is the slice of the whole.
    part = order.places(first + 1234, 77)
    assert np.array_equal(part[0], sources[1234:1311]) and np.array_equal(part[1], numbers[1234:1311])


def test_numbers_stay_in_order_where_a_slot_changes_hands():
    order = order_of(["3", "5", "7", "11", "13"])
    period, given = next((period, given) for period in range(50) if (given := order.given(period)))
    for one in given:
        first = period * PERIOD + one.slot - 3000
        sources, numbers = order.places(first, 6000)
        assert sources[3000] == one.receiver
        for source in range(5):
            assert (np.diff(numbers[sources == source]) == 1).all()


@pytest.mark.parametrize("batch", [1, 8, 96, 512, 1000])
def test_each_row_of_a_batch_sees_each_source(batch):
    """Rows over 200 batches: no source stays at a row, and each batch has nearly its share of each source."""
    order = order_of(["0.5", "0.25", "0.125", "0.125"])
    sources = order.places(123 * batch, 400 * batch)[0].reshape(400, batch)
    for source, share in enumerate(order.shares):
        rows = (sources == source).mean(axis=0)
        # Six standard deviations of the mean of 400 draws.
        assert (np.abs(rows - float(share)) < 6 * np.sqrt(float(share * (1 - share)) / 400)).all()
        assert np.abs((sources == source).sum(axis=1) - float(share) * batch).max() <= 6


def test_a_source_at_fixed_rows_would_be_seen():
    sources = np.tile([0, 1, 0, 2], 100).reshape(100, 4)
    assert ((sources == 1).mean(axis=0) == [0, 1, 0, 0]).all()


def test_seeds_differ_and_one_source_is_its_own_order():
    first, other = (order_of(["2", "1"], seed).places(0, 1000)[0] for seed in (0, 1))
    assert (first != other).any()
    alone = MixedSampler(order_of(["3"]), (BlockSampler(5, 1000, 8),))
    assert np.array_equal(alone.window_starts(16, 300, 8), BlockSampler(5, 1000, 8).window_starts(16, 300, 8))


def test_orders_that_are_not_proven_are_refused():
    for weights in ([], ["0", "1"], ["1"] * 65, ["1", "1/4099"]):
        with pytest.raises(ValueError):
            order_of(weights)
    assert min(order_of(["1"] * 64).shares) == Fraction(1, 64) and order_of(["4095", "1"]).shares[1] == LEAST_SHARE
    with pytest.raises(ValueError):
        order_of(["1"], -1)
    with pytest.raises(ValueError):
        order_of(["1"]).places(-1, 3)


def counted(tokens: int, base: int) -> TokenSplit:
    return TokenSplit([np.arange(base, base + tokens, dtype=np.uint32)])


def mixed(weights, sizes, block: int = 24, seed: int = 3) -> tuple[MixedSampler, JoinedSplit]:
    samplers = tuple(BlockSampler(seed, size, block) for size in sizes)
    splits = [counted(size, 10**6 * number) for number, size in enumerate(sizes)]
    return MixedSampler(order_of(weights, seed), samplers), JoinedSplit(splits)


@given(cuts=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([1, 2, 4, 8, 24])), max_size=5))
@settings(max_examples=20, deadline=None)
def test_lengths_repeat_nothing_and_lose_nothing_within_each_source(cuts):
    """A run of 200 blocks whose length changes at blocks' ends reads what one of a fixed length reads."""
    sampler, split = mixed(["0.5", "0.31", "0.19"], [24 * 40 + 1, 24 * 200 + 5, 24 * 17 + 2])
    changes = sorted(cuts)
    borders = [0, *(at for at, _ in changes), 200]
    lengths = [24, *(length for _, length in changes)]
    seen = []
    for begin, end, length in zip(borders[:-1], borders[1:], lengths, strict=True):
        starts = sampler.window_starts(begin * 24, (end - begin) * 24 // length, length)
        seen.append(split.gather(starts, length).ravel() if starts.size else np.empty(0, np.uint32))
    assert np.array_equal(np.concatenate(seen), split.gather(sampler.window_starts(0, 200, 24), 24).ravel())


def test_each_source_keeps_its_own_epochs():
    sizes = [24 * 10 + 1, 24 * 300 + 9]
    sampler, split = mixed(["0.5", "0.5"], sizes)
    starts = sampler.window_starts(0, 400, 24)
    for source, size in enumerate(sizes):
        own = starts[source_of(starts) == source] - source * STRIDE
        assert np.array_equal(own, BlockSampler(3, size, 24).window_starts(0, own.size, 24))
    blocks = (starts[source_of(starts) == 0] // 24)[:190].reshape(-1, 10)
    assert (np.sort(blocks, axis=1) == np.arange(10)).all()
    assert sampler.epochs(400) == pytest.approx((20, 200 / 300), rel=0.05)
    windows = split.gather(starts, 25)
    assert (np.diff(windows, axis=1) == 1).all() and ((windows[:, 0] >= 10**6) == source_of(starts)).all()


@pytest.mark.parametrize("held", [True, False])
def test_places_outside_the_mixture_are_refused(held):
    _, split = mixed(["1", "1"], [100, 200])
    if not held:
        # Two parts a source stand for shards that are mapped.
        split = JoinedSplit([TokenSplit([np.arange(50, dtype=np.uint32)] * n) for n in (2, 4)])
    assert split.gather(np.array([97, STRIDE + 197]), 3).shape == (2, 3)
    for place in (2 * STRIDE, STRIDE + 198, 98, STRIDE - 1, -1, -STRIDE):
        with pytest.raises(IndexError):
            split.gather(np.array([0, place]), 3)


def test_a_source_s_blocks_are_placed_once_for_many_batches(monkeypatch):
    """Placing a few blocks takes nearly as long as thousands, so batches read from stretches of each source's own."""
    sampler, _ = mixed(["1", "1"], [24 * 9001, 24 * 9002])
    placed = []
    right = BlockSampler.block_starts
    monkeypatch.setattr(BlockSampler, "block_starts", lambda *of: placed.append(of[1].size) or right(*of))
    for first in range(0, 3 * 4096, 16):
        sampler.window_starts(24 * first, 16, 24)
    assert placed == [4096] * 4
    # Also of the most sources: none is forgotten before its next samples.
    sampler, _ = mixed(["1"] * 64, [24 * (5001 + number) for number in range(64)])
    placed.clear()
    sampler.window_starts(0, 3 * 4096, 24)
    assert placed == [4096] * 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "'a' is not FOLDER:WEIGHT"),
        (":1", "is not FOLDER:WEIGHT"),
        ("a:nan", "a has the weight 'nan'; a weight is a number"),
        ("a:inf", "a weight is a number"),
        ("a:1e9", "a weight is a number"),
        ("a:", "a weight is a number"),
        ("a:-1, b:2", "a has the weight -1; a weight is zero or more"),
        ("a:0, b:0.0", "the weights add up to zero"),
        ("a:1, b:2, ./a:1", "a occurs twice"),
        ("a:1/0", "divides by zero"),
        ("a:1, b:0.0001", "b has a share of 0.0001; the least of a mixture is 1/4096"),
        (", ".join(f"d{number}:1" for number in range(65)), "65 data sets are more than 64"),
        ("a\0b:1", "a"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=said) as error:
        all_parts(text)
    assert "\n" not in str(error.value)


def test_weights_are_taken_exactly_and_zero_is_left_out():
    found = parts("x/data: 0.1, y/data: 1/3, z: 0,")
    assert [(part.name, part.weight) for part in found] == [
        ("x/data", Fraction(1, 10)),
        ("y/data", Fraction(1, 3)),
    ]
    assert parts("") == () and parts("C:/a: 2")[0].path == "C:/a"


def test_held_out_sequences_are_apportioned_by_weight():
    assert apportioned([Fraction(7), Fraction(3)], 10) == [7, 3]
    assert apportioned([Fraction(1), Fraction(1, 1000)], 8) == [7, 1]
    assert sum(apportioned([Fraction(n) for n in (3, 5, 7)], 64)) == 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Three prepared sets of one tokenizer, and a fourth of another."""
    place = tmp_path_factory.mktemp("mixture")
    for number, name in enumerate(("one", "two", "three", "other")):
        texts = write_texts(place / "texts" / name, 12 + 8 * number, seed=number)
        given = {"vocab_size": None, "tokenizer": place / "one" / TOKENIZER_NAME} if name in ("two", "three") else {}
        prepare(settings_for(place / name, texts, **given))
    shutil.copytree(place / "two", place / "twin")
    return place


def config(mixture: str, **data) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=300),
        data=DataConfig(mixture=mixture, **data),
        train=TrainConfig(steps=30, batch_size=8, micro_batch_size=4, sequence_length=16),
        eval=EvalConfig(batches=2),
        optim=OptimConfig(warmup_steps=0),
    )


def test_a_run_reads_its_mixture(folders):
    mixture = f"{folders / 'one'}: 0.5, {folders / 'two'}: 0.25, {folders / 'three'}: 0.25"
    data = RunData.open(config(mixture))
    assert data.held_out is not None and data.held_out.names == ("one", "three", "two")
    assert [len(of) for of in data.held_out.of] == [4, 4] and np.bincount(data.held_out.of.ravel()).tolist() == [
        4,
        2,
        2,
    ]
    facts = data.dataset.facts()
    assert facts["train_tokens"] == sum(source["train_tokens"] for source in facts["sources"])
    assert [source["share"] for source in facts["sources"]] == [0.5, 0.25, 0.25]
    starts = data.sampler.window_starts(0, 8, 16)
    origin = data.dataset.origin(starts, 16)
    assert np.array_equal(origin["source_ids"], source_of(starts)) and origin["document_ids"].shape == (8, 16)
    windows = data.dataset.split("train").gather(starts, 16)
    assert np.array_equal(data.batch(1).tokens, windows)
    # Weights in the same proportions are the same mixture; others, or another order, are another.
    same = RunData.open(config(mixture.replace("0.5", "2").replace("0.25", "1") + f", {folders / 'other'}: 0"))
    assert same.dataset.fingerprint == data.dataset.fingerprint and same.batch(3).digest() == data.batch(3).digest()
    other = RunData.open(config(mixture.replace("0.5", "0.51")))
    assert other.dataset.fingerprint != data.dataset.fingerprint


def test_micro_batches_and_ranks_do_not_move_samples(folders):
    """Sequence i of a step is the same however the step is cut: into micro-batches, and those over ranks."""
    mixture = f"{folders / 'one'}: 2, {folders / 'two'}: 1"
    whole = config(mixture)
    one = RunData.open(whole).batch(5)
    for micro, ranks in ((1, 1), (2, 2), (1, 4)):
        train = whole.train.model_copy(update={"micro_batch_size": micro, "ranks": ranks})
        cut = RunData.open(whole.model_copy(update={"train": train})).batch(5)
        assert cut.digest() == one.digest()


def test_mixtures_of_windows_of_shards(folders):
    mixture = f"{folders / 'one'}: 2, {folders / 'two'}: 1"
    data = RunData.open(config(mixture, window_shards=2))
    again = RunData.open(config(mixture, window_shards=2))
    assert [data.batch(step).digest() for step in (1, 30)] == [again.batch(step).digest() for step in (1, 30)]
    assert data.batch(1).digest() != RunData.open(config(mixture)).batch(1).digest()


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        (
            "{0}/one: 1, {0}/other: 1",
            "other was prepared with another tokenizer than .*one .*--data.tokenizer .*one/tok",
        ),
        ("{0}/one: 1, {0}/none: 1", "there is no data folder .*none"),
        ("{0}/two: 1, {0}/twin: 1", "twin and .*two hold the same data"),
    ],
)
def test_folders_that_do_not_fit_together_are_refused(folders, mixture, said):
    with pytest.raises(UserError, match=said):
        RunData.open(config(mixture.format(folders)))


def test_too_few_held_out_sequences_for_the_sources_are_refused(folders):
    few = config(f"{folders / 'one'}: 1, {folders / 'two'}: 1, {folders / 'three'}: 1")
    few = few.model_copy(
        update={
            "eval": EvalConfig(batches=2),
            "train": few.train.model_copy(update={"micro_batch_size": 1}),
        }
    )
    with pytest.raises(UserError, match=r"2 held-out sequences .* fewer than the 3 data sets"):
        RunData.open(few)

"""Two recipes agree where they are nearer to each other than two seeds are."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lockstep.core.bench.curves import compare, in_words, windows
from lockstep.core.errors import UserError
from lockstep.parity_tests.cli.conftest import here, run_file  # noqa: F401 (fixtures)
from lockstep.scripts.studies import two_curves


def curve(seed, offset=0.0, drift=0.0, noise=0.01):
    steps = np.arange(256)
    draw = np.random.default_rng(seed)
    return 6 + 4 * np.exp(-steps / 60) + 0.15 * seed + draw.normal(0, noise, 256) + offset + drift * steps


SEEDS = {seed: curve(seed) for seed in range(3)}


def test_rounding_agrees():
    rounded = SEEDS[0] + np.random.default_rng(9).normal(0, 0.003, 256)
    found = compare(SEEDS, rounded, 0)
    assert found["agreed"] and all("agreed" in line for line in in_words(found))


@pytest.mark.parametrize("wrong", [{"offset": 0.3}, {"drift": 0.003}])
def test_what_is_farther_than_seeds_does_not(wrong):
    found = compare(SEEDS, curve(0, **wrong), 0)
    assert not found["agreed"] and any("DISAGREED" in line for line in in_words(found))


def test_a_late_rise_is_seen_in_the_last_quarter():
    late = SEEDS[0].copy()
    late[-16:] += 0.4
    found = compare(SEEDS, late, 0)
    assert found["all"]["agreed"] and not found["last_quarter"]["agreed"] and not found["agreed"]


def test_nan_is_no_agreement():
    assert not compare(SEEDS, np.full(256, np.nan), 0)["agreed"]


def test_what_was_not_compared_is_not_agreed():
    for by_seed, other in [
        ({0: SEEDS[0], 1: SEEDS[1]}, SEEDS[0]),
        ({1: SEEDS[0], 2: SEEDS[1], 3: SEEDS[2]}, SEEDS[0]),
        (SEEDS, SEEDS[0][:-1]),
        ({0: [], 1: [], 2: []}, []),
    ]:
        with pytest.raises(UserError):
            compare(by_seed, other, 0)


def test_windows_are_means():
    assert windows([1, 3, 5, 7], 2).tolist() == [2, 6]
    assert windows([1, 2], 16).tolist() == [1, 2]


def test_real_steps(run_file, here, capsys):  # noqa: F811
    """bf16 against FP8, emulated on the CPU, agrees; at another learning rate it does not; curves are kept."""
    files = {
        "fp8": 'policy = "fp8_tensorwise"\n',
        "other": 'policy = "bf16"\n[optim]\npeak_lr = 3e-5\n',
    }
    for name, text in files.items():
        (here / f"{name}.toml").write_text(f'base = "{run_file}"\n[precision]\n{text}')
    short = ["--steps", "8", "--device", "cpu"]
    assert two_curves.main([str(run_file), "fp8.toml", *short]) == 0
    kept = json.loads((here / "curves.json").read_text())
    assert len(kept) == 4 and all(len(losses) == 8 for losses in kept.values())
    assert two_curves.main([str(run_file), "other.toml", *short]) == 1
    after = json.loads((here / "curves.json").read_text())
    assert len(after) == 5 and kept.items() <= after.items()
    capsys.readouterr()
    with pytest.raises(UserError, match="time limit reached before first with seed 0"):
        two_curves.main([str(run_file), "fp8.toml", "--steps", "9", "--device", "cpu", "--minutes", "1e-9"])

"""The settings that a sweep varies: read from the command line, drawn from a seed alone, refused in one clear line."""

from __future__ import annotations

import math

import pytest

from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.sweep.propose import choose, points
from lockstep.core.sweep.space import read_space
from lockstep.core.sweep.widths import read_widths, require_free, settings_of

RATE, DECAY = "optim.peak-lr=1e-4:3e-3:log", "optim.weight-decay=0,0.1"

BAD = {
    "optim.peak-lr": "no values",
    "optim.peak-lr=": "the search space is empty",
    "optim.peak-lr=1e-3,,2e-3": "a value between two commas is empty",
    "optim.peak-lr=1e-3,0.001": "a value stands twice",
    "optim.peek-lr=1e-3,2e-3": "optim.peek_lr is not a setting; did you mean optim.peak_lr?",
    "optim=1,2": "optim is a section, not a value",
    "name=a,b": "name cannot be varied: trials have names of their own",
    "optim.peak-lr=2e-3:1e-3": "the low end 2e-3 is not below the high end 1e-3",
    "optim.peak-lr=1e-3:1e-3": "the low end 1e-3 is not below the high end 1e-3",
    "optim.weight-decay=0:1:log": "a logarithmic range begins above 0, and its low end is 0",
    "optim.peak-lr=0:1:log": "must be greater than 0",
    "optim.peak-lr=1e-3:1:lin": "the scale 'lin' is not known",
    "optim.peak-lr=a:b": "must be a number",
    "optim.peak-lr=nan,1": "must be a finite number",
    "optim.peak-lr=1e-3:inf": "must be a finite number",
    "model.layers=1.5:3": "must be an integer",
    "compile.enabled=0:1": "'0' is no number, and a range has numbers",
    "compile.enabled=yes,perhaps": "must be true or false",
    "optim.name=adamw,sgd": "optim.name = 'sgd'",
    "optim.weight-decay=-0.1:0.1:log": "optim.weight_decay = '-0.1': must be greater than or equal to 0",
    "optim.peak-lr=1e-3:1.0000001e-3": "the ends 1e-3 and 1.0000001e-3 are equal in 6 digits",
    "seed=0:9007199254740993": "a range of whole numbers ends at 9,007,199,254,740,992 (2^53) at most",
}


@pytest.mark.parametrize("text", BAD)
def test_a_space_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as error:
        read_space([text])
    (line,) = error.value.lines
    assert line.startswith("command line: vary = ") and BAD[text] in line


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(UserError) as error:
        read_space(["optim.peek-lr=1,2", RATE, RATE, "optim.peak-lr="])
    assert len(error.value.lines) == 3 and "optim.peak_lr is varied twice" in error.value.lines[1]
    with pytest.raises(UserError, match=r"the search space is empty: say what to vary, as in --vary optim\.peak-lr="):
        read_space([])


def test_a_range_of_integers_holds_integers() -> None:
    (layers,) = read_space(["model.layers=2:6"])
    assert layers.whole and layers.ends == ("2", "6") and layers.holds("3")
    assert not layers.holds("2.5") and not layers.holds("7") and not layers.holds("x")
    drawn = points(choose((layers,), "random", 40, 0), 0, 40)
    assert {point["model.layers"] for point in drawn} == {"2", "3", "4", "5", "6"}


@pytest.mark.parametrize("sampler", ["sobol", "random", "tpe"])
def test_points_follow_from_the_seed_and_from_no_number(sampler: str) -> None:
    varied = read_space([RATE, DECAY])
    drawn = points(choose(varied, sampler, 8, 0), 0, 8)
    assert points(choose(varied, sampler, 5, 0), 0, 5) == drawn[:5] == [*drawn[:3], *drawn[3:5]]
    assert points(choose(varied, sampler, 8, 0), 3, 8) == drawn[3:]
    assert points(choose(varied, sampler, 8, 1), 0, 8) != drawn
    assert all(one.holds(point[one.key]) for point in drawn for one in varied)
    assert len({point["optim.peak_lr"] for point in drawn}) == 8


def test_sobol_covers_a_logarithmic_range_evenly() -> None:
    """Each of 16 equal parts of ln lr holds one of 16 points, as a Sobol sequence has it."""
    varied = read_space([RATE])
    drawn = points(choose(varied, "auto", 16, 0), 0, 16)
    parts = [math.log(float(point["optim.peak_lr"]) / 1e-4) / math.log(30) * 16 for point in drawn]
    assert sorted(map(int, parts)) == list(range(16))


def test_a_grid_is_every_combination() -> None:
    sampling = choose(read_space(["optim.peak-lr=1e-3,2e-3", "optim.weight-decay=0,0.1,0.2"]), "auto", 0, 0)
    drawn = points(sampling, 0, sampling.trials)
    assert sampling.sampler == "grid" and len({tuple(point.values()) for point in drawn}) == sampling.trials == 6
    assert drawn[0] == {"optim.peak_lr": "1e-3", "optim.weight_decay": "0"}
    with pytest.raises(UserError, match="the grid has 6 points"):
        choose(sampling.varied, "grid", 4, 0)
    with pytest.raises(UserError, match=r"sampler = grid: optim\.peak_lr is a range"):
        choose(read_space([RATE]), "grid", 0, 0)


# Widths


def test_a_width_scales_what_depends_on_it_and_keeps_the_head() -> None:
    config = RunConfig(model=ModelConfig(hidden=64, heads=4, kv_heads=2, ffn_hidden=128))
    assert settings_of(config, 128, (64, 128), "inverse") == {
        "model.hidden": "128",
        "model.heads": "8",
        "model.kv_heads": "4",
        "model.ffn_hidden": "256",
        "optim.base_width": "64",
    }
    assert "optim.base_width" not in settings_of(config, 128, (64, 128), "constant")
    with pytest.raises(UserError, match=r"at width 100 model\.heads would be 4 × 100 / 64, which is not whole"):
        settings_of(config, 100, (64, 100), "inverse")


@pytest.mark.parametrize("text", ["64", "64,64", "64,x", "0,64", "64,-128", "64,1e3", ","])
def test_widths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="command line: widths = "):
        read_widths(text)


def test_what_the_widths_decide_is_not_varied() -> None:
    assert read_widths("") == () and read_widths("64, 128") == (64, 128)
    with pytest.raises(UserError, match=r"--widths decides model\.hidden"):
        require_free(read_space(["model.hidden=64,128"]))

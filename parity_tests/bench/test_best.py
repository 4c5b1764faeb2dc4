"""The fastest configuration that works is found, in time, and nothing that fails is chosen."""

from __future__ import annotations

import itertools

import pytest

from lockstep.core.bench.best import Prediction, as_data, candidates, differences, page, search
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.plan import fits
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.commands.bench_best import Plan, space

# Lever → choice → what it multiplies the step's time by.
TIMES = {
    "micro-batch": {"8": 1.0, "4": 1.1, "2": 1.3},
    "attention": {"flash": 1.0, "cudnn": 0.8, "math": 2.0},
    "head": {"chunked": 1.0, "whole": 0.95},
}
SPACE = {lever: {choice: {f"{lever}.{choice}": "x"} for choice in choices} for lever, choices in TIMES.items()}


class Config:
    """Stands for a configuration: the time that a machine would take for it."""

    def __init__(self, settings):
        chosen = [key.split(".") for key in settings]
        self.choices = tuple((lever, choice) for lever, choice in chosen)
        self.seconds = 1.0
        for lever, choice in chosen:
            self.seconds *= TIMES[lever][choice]


class Foresight:
    """A plan without attention kernels. needs: bytes by micro-batch."""

    memory = 80.0

    def __init__(self, **needs):
        self.needs = needs

    def __call__(self, config):
        of = dict(config.choices)
        known = TIMES["micro-batch"][of["micro-batch"]] * TIMES["head"][of["head"]]
        return Prediction(self.needs.get("m" + of["micro-batch"], 10.0), known)


class Machine:
    """Measures: each candidate takes 10 seconds. answers: what some choice makes of every candidate that has it."""

    def __init__(self, **answers):
        self.now, self.asked, self.limits, self.answers = 0.0, [], [], answers

    def clock(self):
        return self.now

    def __call__(self, one, steps, limit):
        self.asked.append((dict(one.choices), steps))
        self.limits.append(limit)
        self.now += min(10.0, limit)
        for _, choice in one.choices:
            if choice in self.answers:
                return dict(self.answers[choice])
        seconds = one.config.seconds
        return {"status": "measured", "seconds": [seconds] * steps, "memory": {"reserved": 9}, "loss": 6.0}


def find(machine, predict=None, seconds=1000.0, **options):
    def configure(settings):
        if "attention.math" in settings and options.get("refuse"):
            raise UserError("no such kernel")
        return Config(settings)

    found = candidates(SPACE, configure, predict or Foresight())
    search(found, machine, seconds, 3, 10, machine.clock)
    return found


def test_neighbours_of_one_that_wins_only_over_more_steps_are_tried_too():
    """Few steps say that cudnn is the fastest; over many flash is, and is so most of all with 2 sequences at a time."""

    class Fickle(Machine):
        def __call__(self, one, steps, limit):
            result = super().__call__(one, steps, limit)
            of = dict(one.choices)
            if of["attention"] == "flash":
                swift = 0.5 if steps == 10 else 0.82
                result["seconds"] = [swift * (0.1 if of["micro-batch"] == "2" else 1.0)] * steps
            return result

    found = find(Fickle())
    assert dict(found.winner)["micro-batch"] == "2" and dict(found.winner)["attention"] == "flash"
    rows = differences(found)
    assert rows and all("seconds" in row for row in rows if row["lever"] == "micro-batch")


def test_the_fastest_is_found_without_measuring_all():
    machine = Machine()
    found = find(machine)
    assert dict(found.winner) == {"micro-batch": "8", "attention": "cudnn", "head": "whole"}
    assert len(found.results) < len(list(itertools.product(*TIMES.values())))
    assert found.ended == "no neighbour of the best was left"
    assert [steps for _, steps in machine.asked][-3:] == [10, 10, 10]  # the leaders, longer
    assert machine.asked[0][0]["micro-batch"] == "8" and machine.asked[0][0]["head"] == "whole"  # the plan's fastest


def test_what_each_choice_is_worth():
    rows = {(row["lever"], row["choice"]): row for row in differences(find(Machine()))}
    assert set(rows) == {
        ("micro-batch", "4"), ("micro-batch", "2"), ("attention", "flash"), ("attention", "math"), ("head", "chunked")
    }  # fmt: skip
    assert rows["attention", "flash"]["slower"] == pytest.approx(0.25)
    assert rows["micro-batch", "2"]["slower"] == pytest.approx(0.3)
    assert all("reason" not in row for row in rows.values())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": "failed", "reason": "its process ended by signal 11"}, "ended by signal 11"),
        ({"status": "out_of_memory", "reason": "CUDA out of memory."}, "out of memory"),
        ({"status": "timed_out", "reason": "did not finish within 9 s"}, "did not finish"),
        ({"status": "measured", "seconds": [0.001] * 3, "memory": {"reserved": 1}, "loss": None}, "not finite"),
        ({"status": "failed", "reason": "NotFinite: loss"}, "not finite"),
    ],
)
def test_what_fails_is_struck_out_with_its_reason_and_never_chosen(answer, said):
    found = find(Machine(cudnn=answer))
    assert dict(found.winner)["attention"] == "flash"
    (row,) = [row for row in differences(found) if row["choice"] == "cudnn"]
    assert said in row["reason"].replace("_", " ")
    assert said in page(as_data(found, ABOUT)).replace("_", " ")


ABOUT = {
    "config": "tiny",
    "command": "lockstep bench best tiny.toml",
    "device": {"name": "a machine"},
    "versions": {"torch": "2.13.0"},
}


def test_one_that_fails_in_the_longer_run_is_not_chosen():
    class Late(Machine):
        def __call__(self, one, steps, limit):
            found = super().__call__(one, steps, limit)
            late = steps == 10 and dict(one.choices)["attention"] == "cudnn"
            return {**found, "loss": None} if late else found

    assert dict(find(Late()).winner)["attention"] == "flash"


def test_where_nothing_works_there_is_no_winner():
    out = {"status": "out_of_memory", "reason": "no memory"}
    found = find(Machine(flash=out, cudnn=out, math=out))
    assert found.winner is None and differences(found) == []
    assert len(found.results) == 18 and "No candidate could be measured." in page(as_data(found, ABOUT))


def test_the_plan_leaves_out_what_does_not_fit_or_is_far_slower():
    found = find(Machine(), Foresight(m8=81.0))
    assert dict(found.winner)["micro-batch"] == "4"
    assert {why for choices, why in found.pruned.items() if ("micro-batch", "8") in choices} == {
        "the plan: does not fit into memory"
    }
    slow = Foresight()
    slow_call = slow.__call__
    found = candidates(SPACE, Config, type("Slow", (), {"memory": 0.0, "__call__": lambda self, c: Prediction(
        1.0, 9.0 if ("micro-batch", "2") in c.choices else slow_call(c).seconds)})())  # fmt: skip
    assert len(found.pruned) == 6 and all("1.5 times as slow" in why for why in found.pruned.values())


def test_a_combination_that_is_no_configuration_says_why():
    found = find(Machine(), refuse=True)
    assert [row["reason"] for row in differences(found) if row["choice"] == "math"] == ["no such kernel"]


@pytest.mark.parametrize("seconds", [25.0, 45.0, 75.0])
def test_the_time_is_kept(seconds):
    machine = Machine()
    found = find(machine, seconds=seconds)
    assert machine.now <= seconds and found.winner is not None and found.ended == "the time was up"
    assert all(limit <= seconds for limit in machine.limits)


def test_a_candidate_that_hangs_ends_with_the_time():
    class Hangs(Machine):
        def __call__(self, one, steps, limit):
            self.now += limit
            return {"status": "timed_out", "reason": f"did not finish within {limit:.0f} s"}

    machine = Hangs()
    found = find(machine, seconds=30.0)
    assert machine.now == 30.0 and found.winner is None


def test_micro_batches_are_whole_at_every_length_of_the_run():
    """At 4,096 tokens a sequence one sequence of 2,048 is half of one."""
    from lockstep.core.config.file import load_config

    found = {
        text: space(load_config(REPO / "configs/llama-1b.toml", {"train.curriculum": text}), "cuda", 8, False)
        for text in ("", "2048:0.9, 4096:0.1")
    }
    assert [list(choices["micro-batch"]) for choices in found.values()] == [["8", "4", "2", "1"], ["8", "4", "2"]]


def test_the_plan_prunes_the_published_run():
    """No policy fits [64, 2048] at once on one H100 without checkpointing; the candidates are those that fit."""
    from lockstep.core.config.file import load_config
    from lockstep.core.plan import gpu_named

    file = REPO / "configs/llama-1b.toml"
    config = load_config(file, {"device": "cuda"})
    small = {lever: dict(list(choices.items())[:3]) for lever, choices in space(config, "cuda", 64, True).items()}
    fixed = {"train.batch_size": "64", "device": "cuda"}
    found = candidates(small, lambda some: load_config(file, {**fixed, **some}), Plan(gpu_named("h100")))
    assert found.pruned and found.candidates
    for one in found.candidates:
        assert isinstance(one.config, RunConfig) and fits(one.config, "h100").fits
    whole = [c for c in found.pruned if ("micro-batch", "64") in c and ("checkpointing", "none") in c]
    assert whole and not any(("micro-batch", "64") in c.choices for c in found.candidates if c.choices in whole)

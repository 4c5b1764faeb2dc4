"""Contenders are compared where they do the same work, and not otherwise."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

from lockstep.core.bench import peers
from lockstep.core.bench.intervals import ratio
from lockstep.core.bench.peers import (
    CONTENDERS,
    Contender,
    answers,
    bound,
    cells,
    check_comparable,
    disagreement,
    drawn,
    page,
    summary,
)
from lockstep.core.bench.turns import Side, in_turns
from lockstep.core.config.file import load_config
from lockstep.core.errors import UserError
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.shared.bench_sides import start_trainer

TINY = REPO / "configs/bench-tiny.toml"
OVERRIDES = {"device": "cpu", "optim.warmup_steps": "0", **peers.ROWS["fp32-eager"]}
LOCKSTEP, BLAS, NANOGPT, HUGGING_FACE, TORCHTITAN = CONTENDERS
NEEDS_TORCHTITAN = pytest.mark.skipif(
    any(find_spec(name) is None for name in TORCHTITAN.needs),
    reason="torchtitan is not installed: lockstep[torchtitan]",
)
FAULTY = "lockstep.parity_tests.bench.faulty_peers"


def race(tmp_path, *contenders, warmup=8, rounds=2, **given):
    """Seconds, losses and memory of contenders at tiny size."""
    sides = []
    with (tmp_path / "log").open("w") as log:
        try:
            for one in contenders:
                config = load_config(TINY, {**OVERRIDES, **given, **one.settings})
                sides.append(start_trainer(one.name, one.program, config, 1, log))
            taken, losses = in_turns(sides, warmup, rounds, 30, 300)
            memory = {side.name: side.ask("end", 60)["memory"] for side in sides}
        finally:
            for side in sides:
                side.close()
    return taken, losses, memory


def config(**given):
    return load_config(TINY, {**OVERRIDES, **given})


BIASES = {"model.tied": "false", "model.qkv_bias": "true", "model.o_bias": "true"}


@pytest.mark.parametrize("given", [{}, BIASES])
def test_all_do_the_same_work(tmp_path, given):
    pytest.importorskip("accelerate")
    contenders = LOCKSTEP, BLAS, NANOGPT, HUGGING_FACE
    taken, losses, memory = race(tmp_path, *contenders, **given)
    assert disagreement(dict.fromkeys(losses, config(**given)), losses) is None
    assert {name: len(found) for name, found in taken.items()} == dict.fromkeys(taken, 2)
    assert all(0 < bytes_ < 2**30 for bytes_ in memory.values()) or not os.path.exists("/proc/self/status")
    found = peers.result("fp32-eager", config(**given), contenders, taken, losses, memory)
    assert found["status"] == "measured" and set(found["ratios"]) == {"nanogpt", "hugging-face"}
    assert len(cells(found)) == 4 and len(answers(found)) == 2


@NEEDS_TORCHTITAN
@pytest.mark.parametrize(
    "given", [{}, BIASES, peers.ROWS["bf16-eager"], peers.ROWS["fp32-compiled"]], ids=["", "biases", "bf16", "compiled"]
)
def test_so_does_torchtitan(tmp_path, given):
    _, losses, _ = race(tmp_path, LOCKSTEP, TORCHTITAN, **given)
    assert disagreement(dict.fromkeys(losses, config(**given)), losses) is None
    assert len(losses["torchtitan"]) == 10 and losses["torchtitan"][-1] < losses["torchtitan"][0]


@NEEDS_TORCHTITAN
@pytest.mark.parametrize("fault", ["torchtitan_with_other_pairs", "torchtitan_without_some_targets"])
def test_a_torchtitan_that_does_other_work_has_no_ratio(tmp_path, fault):
    _, losses, _ = race(tmp_path, LOCKSTEP, Contender("peer", "a peer", f"{FAULTY}:{fault}"), warmup=2, rounds=1)
    assert "step 1: the loss of peer is" in (agree(losses) or "")


@pytest.mark.parametrize(
    ("fault", "step"),
    [("one_token_less", 1), ("other_weights", 1), ("other_rate", 2), ("other_epsilon", 1), ("half_the_loss", 1)],
)
def test_a_peer_that_does_other_work_has_no_ratio(tmp_path, fault, step):
    wrong = Contender("peer", "a peer", f"{FAULTY}:{fault}")
    taken, losses, memory = race(tmp_path, LOCKSTEP, wrong)
    found = peers.result("fp32-eager", config(), [LOCKSTEP, wrong], taken, losses, memory)
    assert found["status"] == "not_the_same_work" and found["ratios"] == {} and answers(found) == []
    said = int(found["reason"].split(":")[0].removeprefix("step "))
    assert said <= step + 3 and "the loss of peer is" in found["reason"]


@pytest.mark.parametrize(("fault", "said"), [("refuses", "peer: no such device"), ("dies", "peer: its process ended")])
def test_a_peer_that_cannot_is_named(tmp_path, fault, said):
    with pytest.raises(UserError, match=said):
        race(tmp_path, Contender("peer", "a peer", f"{FAULTY}:{fault}"))


def test_one_that_hangs_is_ended(tmp_path):
    with (tmp_path / "log").open("w") as log:
        side = Side("peer", [sys.executable, "-c", "import time; time.sleep(60)"], REPO, log, {})
        with pytest.raises(UserError, match="peer: no answer for 1 s"):
            side.ask("go", 1)
        side.close()


class Fake:
    """Answers at once; records the order of its calls."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def ask(self, message, limit):
        self.order.append(self.name)
        return {"seconds": 1.0, "loss": 2.0}


def test_who_begins_moves_on():
    order: list[str] = []
    taken, losses = in_turns([Fake("a", order), Fake("b", order)], 1, 2, 60.0, 1.0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert len(taken["a"]) == 2 and len(losses["a"]) == 3


def test_a_ratio_is_taken_round_by_round():
    """A machine that is slower in some rounds is slower for both: the ratio does not move."""
    ours = [1.0, 5.0, 2.0, 1.5]
    assert ratio(ours, [2 * x for x in ours]) == {"median": 2.0, "low": 2.0, "high": 2.0}
    found = ratio([1.0] * 9, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 3.0])
    assert found["median"] == pytest.approx(1.4) and found["low"] < 1.4 < found["high"]


def agree(losses, **configs):
    return disagreement({name: configs.get(name, config()) for name in losses}, losses)


def test_losses_that_were_not_compared_do_not_agree():
    assert agree({"a": [1.0], "b": []}) == "no losses to compare"
    assert agree({"a": [1.0]}) == "no losses to compare"
    assert "step 1" in (agree({"a": [1.0], "b": [float("nan")]}) or "")
    assert agree({"a": [6.0], "b": [6.0 + 5 * bound(config(), config(), 1)]}) is None


def test_a_side_in_bf16_may_differ_by_its_own_rounding():
    narrow = config(**{"precision.policy": "bf16"})
    allowed = bound(config(), narrow, 1)
    assert bound(config(), config(), 1) < allowed < bound(narrow, narrow, 1)
    losses = {"a": [6.0], "b": [6.0 * (1 + 0.9 * allowed)]}
    assert agree(losses, b=narrow) is None and "step 1" in (agree(losses) or "")


UNKNOWN = {
    "optim.name": "muon",
    "loss.z_loss": "0.1",
    "attention.document_mask": "true",
    "model.qkv_bias": "true",
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_what_the_peers_do_not_know_is_refused(key):
    with pytest.raises(UserError, match=f"the peers do not support {key}"):
        check_comparable(config(**{key: UNKNOWN[key]}))


ABOUT = {"device": {"name": "x86_64 CPU", "cores": 4, "threads": 4}, "versions": {"torch": "2.13.0"}, "absent": {}}


def made_up(*rows):
    """Return results of one model."""
    return {**ABOUT, "models": [{"config": config().model_dump(mode="json"), "parameters": 5_800_000, "rows": [*rows]}]}


def measured(ours, theirs, lean):
    """Return a row in which two peers take `theirs` and `lean` seconds."""
    taken = {"lockstep": ours, "nanogpt": theirs, "torchtitan": lean}
    losses = {name: [6.0, 6.0] for name in taken}
    memory = {"lockstep": 300, "nanogpt": 400, "torchtitan": 200}
    return peers.result("bf16-eager", config(), [LOCKSTEP, NANOGPT, TORCHTITAN], taken, losses, memory)


def test_the_page_says_why_a_row_has_no_figure():
    failed = {"row": "fp32-eager", "status": "failed", "reason": "nanogpt: its process ended"}
    results = made_up(failed)
    written = page(results)
    assert "Failed: nanogpt: its process ended" in written and "4 cores, 4 threads" in written
    assert "| 5.8M | fp32-eager | failed |" in written and drawn(results) == ""


def test_the_summary_names_the_fastest_and_the_leanest_peer():
    results = made_up(measured([1.0, 1.0], [2.0, 2.0], [4.0, 4.0]))
    (line,) = summary(results)
    assert line == ["5.8M", "bf16-eager", "128", "nanogpt", "2.00× (2.00 to 2.00)", "1.50× of torchtitan"]
    written, picture = page(results), drawn(results)
    assert written.index(" | ".join(line)) < written.index("### 5.8M, bf16-eager")
    assert "2.00× of nanogpt" in picture and "5.8M parameters" in picture
    assert "(bench_peers.json) by `lockstep bench peers --page docs/results/bench_peers.md`" in written
    elsewhere = "(other.json) by `lockstep bench peers --json docs/results/other.json --page docs/results/other.md`"
    assert elsewhere in page(results, "other.json")


def test_one_that_is_not_installed_stands_in_every_table():
    results = made_up(measured([1.0], [2.0], [4.0])) | {"absent": {"hugging-face": "not installed (pip install it)"}}
    written = page(results)
    assert "| hugging-face | not installed (pip install it) | | | | |" in written.replace("  ", " ")
    assert "hugging-face: not installed (pip install it)." in written

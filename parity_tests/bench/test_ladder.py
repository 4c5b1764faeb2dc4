"""The ladder: every rung does the same work, a rung that does not has no factor, and a page shows the rest."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lockstep.core.bench import loaders
from lockstep.core.bench.ladder import (
    EXPECTED,
    NUMBER,
    RUNGS,
    at_length,
    check_config,
    loader_of,
    result,
    settings_of,
)
from lockstep.core.bench.ladder_page import HEADERS, answers, cells, figure, loader_cells, page
from lockstep.core.bench.loaders import InMemory, MappedTokenByToken, TokenByToken, Watched
from lockstep.core.bench.made_up import write_made_up
from lockstep.core.config.file import load_config
from lockstep.core.errors import UserError
from lockstep.parity_tests.bench import faulty_loaders
from lockstep.parity_tests.clock import Clock
from lockstep.parity_tests.repository import REPO

TINY = REPO / "configs/bench-tiny.toml"
TOKENS, SHAPE = 1 << 15, (3, 32)
# One is the warm-up.
STEPS = 7


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made_up")
    write_made_up(folder, TOKENS, 512)
    return folder


def config(**given):
    return load_config(TINY, {"device": "cpu", **given})


CONFIGS = {name: config(**settings_of(name)) for name in NUMBER}


def digests(loader):
    watched = Watched(loader.make)
    return [watched.digest() for _, _ in zip(range(STEPS), watched, strict=False)]


@pytest.mark.parametrize("kind", [MappedTokenByToken, TokenByToken])
@pytest.mark.parametrize("vocabulary", [512, 1 << 17])
def test_naive_loaders_make_the_run_s_batches(tmp_path, kind, vocabulary):
    write_made_up(tmp_path, TOKENS, vocabulary)
    expected = InMemory(tmp_path, *SHAPE, sample=5, seed=3)
    naive = kind(tmp_path, *SHAPE, sample=5, seed=3)
    assert digests(naive) == digests(expected)
    naive.take(2), expected.take(2)
    made = naive.make(0)
    assert np.array_equal(made.targets, expected.make(0).targets)
    assert made.tokens.max() > 256 and (vocabulary == 512 or made.tokens.max() >= 1 << 16)


def test_made_up_tokens_are_skewed(made_up):
    """On evenly drawn tokens there is nothing to learn, and a wrong step would hardly move the loss."""
    tokens = InMemory(made_up, 64, 256).make(0).tokens
    assert np.mean(tokens < 64) > 0.4 and tokens.max() > 500


@pytest.mark.parametrize("fault", ["OneStepLate", "OneTokenLate", "SameTargets"])
def test_a_batch_that_is_another_s_has_another_digest(made_up, fault):
    wrong = digests(getattr(faulty_loaders, fault)(made_up, *SHAPE))
    right = digests(InMemory(made_up, *SHAPE))
    assert all(found != expected for found, expected in zip(wrong, right, strict=True))


def test_the_time_of_a_batch_is_watched(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(loaders, "time", clock)
    watched = Watched(lambda step: clock.sleep(20) or InMemory)
    next(iter(watched))
    assert watched.seconds == 20


def test_rungs_keep_what_those_below_have():
    assert settings_of("mmap")["precision.policy"] == "fp32"
    assert settings_of("flash") == {
        "precision.policy": "bf16",
        "compile.enabled": "true",
        "attention.kernel": "flash",
    }
    assert loader_of("flash") == loader_of(EXPECTED) and len({loader_of(name) for name in NUMBER}) == 3
    assert RUNGS[0].published / RUNGS[-1].published == pytest.approx(16)


def said(made_up=None, **faults):
    """Answers of every rung: seconds fall from rung to rung, batches are the rung's own loader's."""
    found = {}
    for name, number in NUMBER.items():
        made = digests(faults.get(name, InMemory)(made_up, *SHAPE)) if made_up else [""] * STEPS
        losses = [6.2 - 0.01 * step for step in range(STEPS)]
        found[name] = [
            {"seconds": 1 / number, "data": 0.1 / number, "batch": digest, "loss": loss}
            for digest, loss in zip(made, losses, strict=True)
        ]
    return found


def measured(answered, failed=(), loaders=None):
    memory = dict.fromkeys(answered, 10**6)
    reasons = dict.fromkeys(failed, "no such kernel")
    loaders = {rung.name: [1e-4 / NUMBER[rung.name]] * 3 for rung in RUNGS if rung.loader}
    return result(CONFIGS, answered, 1, memory, reasons, loaders)


def test_factors_are_those_of_the_rung_below_and_of_the_first():
    found = measured(said())
    assert found["status"] == "measured" and found["row"] == "4x32"
    rungs = found["rungs"]
    assert rungs["mmap"]["over_previous"] is rungs["mmap"]["over_first"] is None
    assert rungs["flash"]["over_previous"]["median"] == pytest.approx(6 / 5)
    assert rungs["flash"]["over_first"]["low"] == pytest.approx(6)
    assert rungs["ram"]["tokens_per_second"] == pytest.approx(4 * 32 * 2)
    assert rungs["ram"]["data_share"] == pytest.approx(0.1) and len(rungs["ram"]["seconds"]) == STEPS - 1


@pytest.mark.parametrize(("rung", "fault"), [("mmap", "OneTokenLate"), ("ram", "OneStepLate"), ("bf16", "OneStepLate")])
def test_a_rung_whose_batches_are_another_s_has_no_factor(made_up, rung, fault):
    found = measured(said(made_up, **{rung: getattr(faulty_loaders, fault)}))
    assert found["status"] == "not_the_same_work"
    assert found["reason"] == f"{rung}: step 1: its batch is not that of rung 3 (vectorised)"
    wrong = {name for name, one in found["rungs"].items() if one["status"] != "measured"}
    assert wrong == {rung}
    assert found["rungs"][rung]["over_previous"] is found["rungs"][rung]["over_first"] is None
    above = RUNGS[NUMBER[rung]].name
    assert found["rungs"][above]["over_previous"] is None
    lines = answers(found)
    assert any("not the same work: step 1" in line for line in lines)
    assert any(line.startswith(f"{NUMBER[above]} ") and "not compared with the rung below" in line for line in lines)


def test_a_rung_with_another_loss_has_no_factor():
    answered = said()
    answered["compile"][2]["loss"] *= 1.001
    found = measured(answered)
    assert found["rungs"]["compile"]["reason"].startswith("step 3: the loss of compile is ")
    assert [one["status"] for one in found["rungs"].values()].count("not_the_same_work") == 1


def test_bf16_may_round_and_fp32_may_not():
    answered = said()
    for name in ("bf16", "flash"):
        answered[name][0]["loss"] *= 1.0003
    assert measured(answered)["status"] == "measured"
    answered["compile"][0]["loss"] *= 1.0003
    assert measured(answered)["status"] == "not_the_same_work"


def test_a_rung_that_cannot_run_does_not_keep_the_others():
    answered = said()
    del answered["flash"]
    found = measured(answered, ["flash"])
    assert found["status"] == "failed" and found["reason"] == "flash: no such kernel"
    assert found["rungs"]["bf16"]["over_first"] is not None
    assert answers(found)[-1] == "6 + flash attention: failed: no such kernel"
    assert cells(found)[-1][:2] == ["6 + flash attention", "failed"]


def test_without_the_rung_that_is_compared_with_nothing_is_measured():
    answered = said()
    del answered[EXPECTED]
    found = measured(answered, [EXPECTED])
    assert {one["status"] for one in found["rungs"].values()} == {"failed", "not_the_same_work"}


def test_what_does_not_help_is_said():
    answered = said()
    for before, after in zip(answered["mmap"], answered["ram"], strict=True):
        after["seconds"] = before["seconds"]
    for answer in answered["flash"]:
        answer["seconds"] = 2.0
    lines = answers(measured(answered))
    assert lines[0] == "2 + tokens in RAM: 1.00× (1.00 to 1.00) of the rung below, no measurable difference"
    assert "of the rung below, slower; 0.50×" in lines[-1] and ", faster; " in lines[1]


def test_few_rounds_tell_nothing():
    found = measured({name: given[:-1] for name, given in said().items()})
    assert all("of 5 rounds, which are too few to tell" in line for line in answers(found))


def test_sequences_of_another_length_have_as_many_tokens():
    cut = config(**at_length(config(), 16))
    assert (cut.train.batch_size, cut.train.micro_batch_size, cut.train.sequence_length) == (8, 4, 16)
    for length in (48, 128, 1000):
        with pytest.raises(UserError, match=f"lengths = {length}: a micro-batch of 2 sequences of 32 tokens"):
            at_length(config(), length)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"attention.document_mask": "true"}, "do not support attention.document_mask"),
        ({"train.ranks": "2"}, "do not support train.ranks = 2"),
        ({"model.vocab_size": "200"}, "model.vocab_size = 200: made-up tokens need 257"),
    ],
)
def test_a_run_without_a_ladder_is_refused(given, refused):
    with pytest.raises(UserError, match=refused):
        check_config(config(**given))


def test_the_page_and_its_picture_show_all():
    failed = {"row": "1x128", "status": "failed", "reason": "no room", "rungs": {}, "loaders": {}}
    device = {"kind": "cpu", "name": "x86_64 CPU", "cores": 2, "threads": 2, "instructions": ["avx2", "amx_bf16"]}
    dumped = config().model_dump(mode="json")
    results = {"device": device, "versions": {"torch": "2"}, "config": dumped, "tokens": TOKENS}
    results["rows"] = [measured(said()), failed]
    written = page(results)
    for words in ("amx_bf16", "## Steps of [4, 32] tokens", "failed: no room", "20,480", "16.00×", "--lengths 32 128"):
        assert words in written, words
    assert len(cells(results["rows"][0])) == 6 and {len(line) for line in cells(results["rows"][0])} == {len(HEADERS)}
    assert loader_cells(results["rows"][0])[1][-1].startswith("2.00×")
    drawn = ElementTree.fromstring(figure(results))
    shown = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert shown.count("6 + flash attention") == 2 and shown.count("3 + vectorised batches") == 3
    assert "327,680 tok/s (2.25×)" in shown
    assert math.isclose(float(drawn.get("width")), 820)

"""Loaders beside one another: each makes batches, Lockstep's are the run's, and the page shows what was measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.core.bench import loaders
from lockstep.core.bench.bars import Bar, Panel, picture
from lockstep.core.bench.data import CONTENDERS, FIRST, PAPER_SAMPLES, RESUMED_AT, ROWS, answers, figure, page, result
from lockstep.core.bench.made_up import RAW_NAME, write_made_up, write_on_paper
from lockstep.core.data.dataset import TokenDataset
from lockstep.scripts.shared import bench_loader
from lockstep.scripts.shared.bench_loader import Contender
from lockstep.torch_backend.tools.peers.loaders import NanoGPT, Slices, TorchLoader, Windows

TOKENS = 1 << 17


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made_up")
    write_made_up(folder, TOKENS)
    return folder


def test_shards_and_the_raw_file_hold_the_same_tokens(made_up):
    dataset = TokenDataset.open(made_up)
    assert np.array_equal(
        dataset.split("train").gather(np.array([0]), TOKENS)[0], np.fromfile(made_up / RAW_NAME, "<u2")
    )


@pytest.mark.parametrize("kind", [loaders.InMemory, loaders.Mapped, loaders.Ahead])
def test_lockstep_s_loaders_make_the_run_s_batches(made_up, kind, monkeypatch):
    made = []
    real = loaders.train_batch
    monkeypatch.setattr(loaders, "train_batch", lambda *given: made.append(real(*given)) or made[-1])
    loader = kind(made_up, 4, 128, sample=8, seed=3)
    loader.take(3)
    loader.take(2)
    monkeypatch.undo()
    expected = loaders.InMemory(made_up, 20, 128, sample=8, seed=3).make(0)
    assert np.array_equal(np.concatenate([batch.tokens for batch in made]), expected.tokens)


def test_parts_of_a_batch_add_up(made_up):
    loader = loaders.InMemory(made_up, 4, 128)
    parts = loader.seconds_by_part(5)
    assert set(parts) == {"order", "copy", "the rest"} and sum(parts.values()) > 0


def test_peers_make_batches_whose_targets_are_the_next_tokens(tmp_path):
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / RAW_NAME)
    for tokens, targets in (
        [part.numpy() for part in NanoGPT(tmp_path, 4, 32)._get_batch()],
        Slices(tmp_path, 4, 32)._batch(),
        [part[None].numpy() for part in Windows(tmp_path / RAW_NAME, 32)[7]],
    ):
        assert tokens.shape in ((4, 32), (1, 32)) and np.array_equal(targets, tokens + 1)
    loader = TorchLoader(tmp_path, 4, 32)
    assert loader._loader.num_workers == 8 and len(loader._loader.dataset) == 59_999 // 32


def test_a_data_set_on_paper_resumes_at_its_far_end(tmp_path):
    write_on_paper(tmp_path, PAPER_SAMPLES * 1024 + 1)
    assert max(RESUMED_AT) + ROWS[FIRST][0] <= PAPER_SAMPLES
    loader = loaders.Mapped(tmp_path, 4, 1024, sample=RESUMED_AT[-1])
    loader.take(1)
    assert (tmp_path / "train_00000.bin").stat().st_blocks * 512 < 1 << 20


def test_a_contender_answers_messages(made_up):
    job = {"folder": str(made_up), "sequences": 4, "length": 128, "turn": 0.002, "seeds": [1, 2]}
    contender = Contender({**job, "program": "lockstep.core.bench.loaders:InMemory"})
    first = contender.answer("first 12")
    assert 0 < first["opened"] < first["seconds"]
    taken = contender.answer("go")
    assert taken["seconds"] > 0 and taken["batches"] >= 1
    assert set(contender.answer("parts")) == {"parts"}


class OnABusyCore:
    """A loader whose batches take 1 ms of a clock of its own, but for its second call, which takes a second."""

    now, calls = 0.0, 0

    def __init__(self, *given):
        pass

    def take(self, batches):
        kind = type(self)
        kind.calls += 1
        kind.now += 1.0 if kind.calls == 2 else 0.001 * batches


def test_a_turn_is_as_long_as_asked_for_whatever_else_the_core_did(monkeypatch, tmp_path):
    monkeypatch.setattr(OnABusyCore, "now", 0.0)
    monkeypatch.setattr(OnABusyCore, "calls", 0)
    monkeypatch.setattr(bench_loader, "time", SimpleNamespace(perf_counter=lambda: OnABusyCore.now))
    job = {"folder": str(tmp_path), "sequences": 4, "length": 128, "turn": 0.05, "seeds": []}
    contender = Contender({**job, "program": f"{__name__}:OnABusyCore"})
    taken = contender.answer("go")
    assert taken["batches"] == 50 and taken["seconds"] == pytest.approx(0.001)


def measured(seconds=1e-4):
    names = [one.name for one in CONTENDERS]
    said = {name: [{"seconds": seconds * (2 if name == "nanogpt" else 1), "batches": 7}] * 3 for name in names}
    rows = [result(row, said, {"order": 1e-6, "copy": 2e-6}) for row in ROWS]
    first = {name: {"seconds": [2e-3] * 3, "opened": [1e-3] * 3} for name in names}
    device = {"name": "x86_64 CPU", "cores": 2}
    resume = {"samples": 1000, "at": {str(sample): [3e-3] * 3 for sample in RESUMED_AT}}
    return {
        "device": device,
        "versions": {"torch": "2"},
        "tokens": TOKENS,
        "rows": rows,
        "first": first,
        "resume": resume,
    }


def test_a_row_compares_each_way_with_each_peer():
    row = measured()["rows"][0]
    assert row["ratios"]["nanogpt"]["lockstep"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert row["contenders"]["nanogpt"]["tokens_per_second"] == pytest.approx(16 * 128 / 2e-4)
    assert len(answers(row)) == 4 and answers(row)[0].startswith("lockstep: 1.00×")
    assert answers({"status": "failed", "reason": "no room"}) == ["failed: no room"]


def test_the_page_and_its_picture_show_all():
    results = measured()
    text = page(results)
    for words in ("[16, 128]", "[512, 1,024]", "20.5M", "1,000,000,000", "order", "2.0 µs"):
        assert words in text, words
    assert max(map(len, text.splitlines())) < 1000
    drawn = ElementTree.fromstring(figure(results))
    said = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert said.count("nanoGPT's get_batch") == 4 and "1,000,000,000" in said
    results["resume"], results["first"] = {"reason": "no such file"}, {}
    assert "Not measured: no such file" in page(results)
    assert "1,000,000,000" not in figure(results)


def test_bars_are_as_long_as_their_values():
    bars = [Bar("a & b", 10.0, "ten"), Bar("c", 5.0, "five", ours=True, low=4.0, high=6.0)]
    drawn = ElementTree.fromstring(picture("title", "below", [Panel("panel", bars)]))
    widths = [float(node.get("width")) for node in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[0] == 2 * widths[1]
    for wrong in ([], [Bar("a", 0.0, "")]):
        with pytest.raises(ValueError, match="panel"):
            picture("title", "below", [Panel("panel", wrong)])


def test_a_long_name_is_squeezed_into_its_room():
    drawn = [picture("title", "below", [Panel("panel", [Bar("a" * n, 1.0, "", ours=True)])]) for n in (40, 41)]
    assert ["textLength" in one for one in drawn] == [False, True]

"""Evidence gathered into a folder is that in memory, field by field, and is judged as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps

import numpy as np
import pytest

from lockstep.core.backend import NotSupported
from lockstep.core.config.sections import RecomputeConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.index import INDEX
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.probe import probe_of
from lockstep.core.parity.evidence.saved import DOCUMENT, open_evidence, save_evidence, store_of
from lockstep.core.parity.evidence.store import FolderStore, NoStore, Stored
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.core.parity.judge.judge import judge
from lockstep.core.streams import Collected
from lockstep.parity_tests.faults.optimizer import ParameterNotInOptimizer
from lockstep.parity_tests.replay.made import CONFIG, reference
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.session import TorchSession

BATCH = uneven_weights(text_batch(CONFIG), 1)


def gathered(session=TorchSession, config=CONFIG, store=None, probe=False):
    batch = replace(uneven_weights(text_batch(config), 1), end_of_text=0)
    found = probe_of(batch.cut(config.train)[0], config) if probe else None
    return gather(session(config), config, batch, found, due=batch.digest(), store=store)


def into(folder, session=TorchSession, config=CONFIG, probe=False):
    store = FolderStore.create(folder)
    return save_evidence(gathered(session, config, store, probe), store)


def same(one, other):
    """Return whether two values hold the same bits, times aside."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return same(np.float64(one).reshape(1), np.float64(other).reshape(1))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if is_dataclass(one):
        names = [f.name for f in fields(one) if f.name != "seconds"]
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "evidence"
    return into(folder), folder


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_folder_holds_what_memory_holds(tmp_path, policy, probe):
    config = tiny_config(policy, train={"sequence_length": 32})
    memory, folder = gathered(config=config, probe=probe), into(tmp_path / "evidence", config=config, probe=probe)
    for found in (folder, open_evidence(tmp_path / "evidence")):
        assert all(
            same(getattr(memory, f.name), getattr(found, f.name)) for f in fields(Evidence) if f.name != "seconds"
        )
        assert isinstance(found.taps, Stored) and isinstance(found.before.params, Stored)
        assert store_of(found) is not None and store_of(memory) is None
    assert {path.name for path in (tmp_path / "evidence").iterdir()} == {
        *("blocks.0.safetensors", "blocks.1.safetensors", "embedding.safetensors", "head.safetensors"),
        *(DOCUMENT, INDEX),
    }


def test_a_folder_alone_is_judged(saved):
    _, folder = saved
    check = judge(open_evidence(folder), reference())
    assert check.verdict == "agreed", check.origin
    assert [f.tap for f in check.findings] == [f.tap for f in judge(gathered(), reference()).findings]
    assert any(f.stage == "accumulation" for f in check.findings)


def test_evidence_in_memory_is_saved_as_well(tmp_path):
    memory = gathered()
    other = replace(memory, taps={"embed": memory.taps["embed"] + 1}, rechecked=True)
    store = FolderStore.create(tmp_path / "evidence")
    assert same(save_evidence(other, store).taps, other.taps)
    found = open_evidence(tmp_path / "evidence")
    assert found.rechecked and same(found.taps, other.taps) and same(found.probed, other.probed)


def test_a_rechecks_taps_lie_beside_the_first_ones(tmp_path):
    store = FolderStore.create(tmp_path / "evidence")
    first = gathered(store=store)
    again = {name: array * 2 for name, array in first.taps.items()}
    assert same(save_evidence(replace(first, taps=again), store).taps, again)


class NotFiniteLoss(TorchSession):
    def accumulate(self, batch):
        loss, nll = super().accumulate(batch)
        return loss * float("nan"), nll


def test_a_step_that_is_not_finite_is_saved(tmp_path):
    found = into(tmp_path / "evidence", NotFiniteLoss, probe=True)
    assert found.not_finite and np.isnan(open_evidence(tmp_path / "evidence").record.loss)
    assert found.stepped is not None and len(found.stepped.grads) == len(found.before.params)


class OtherState(TorchSession):
    def state(self):
        found = super().state()
        return replace(found, params={**found.params, "embed.weight": found.params["embed.weight"] + 1})


class OtherGradients(TorchSession):
    def gradients(self, batch):
        found = super().gradients(batch)
        return replace(found, grads={**found.grads, "embed.weight": found.grads["embed.weight"] + 1})


class OtherTaps(TorchSession):
    def observe(self, batch, taps):
        return {name: array + 1 for name, array in super().observe(batch, taps).items()}


class OtherStep(TorchSession):
    def step_and_gradients(self, batch, *, norms=False):
        record, found = super().step_and_gradients(batch, norms=norms)
        return record, replace(found, grads={name: grad + 1 for name, grad in found.grads.items()})


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (OtherState, lambda e: e.before.params["embed.weight"]),
        (OtherState, lambda e: e.after.params["embed.weight"]),
        (OtherGradients, lambda e: e.probed.grads["embed.weight"]),
        (OtherTaps, lambda e: e.taps["blocks.1.attn.q"]),
        (OtherStep, lambda e: e.stepped.grads["embed.weight"]),
    ],
)
@pytest.mark.parametrize("how", ["subclass", "instance", "wrapped"])
def test_what_a_candidate_overrides_is_what_is_judged(tmp_path, fault, shown, how):
    """One override of a plain method: the streaming one of the base class does not go past it."""
    honest = gathered(probe=True)
    (name,) = (n for n in vars(fault) if not n.startswith("__"))
    own = getattr(fault, name)

    def on_an_instance(config):
        session = Copy(config)
        vars(session)[name] = partial(own, session)
        return session

    class Copy(fault):
        pass

    if how == "wrapped":
        setattr(Copy, name, wraps(getattr(TorchSession, name))(lambda self, *a, **n: own(self, *a, **n)))
    if how == "instance":
        setattr(Copy, name, getattr(TorchSession, name))
    found = into(tmp_path / "evidence", on_an_instance if how == "instance" else Copy, probe=True)
    assert np.array_equal(shown(found), shown(honest) + 1)


@pytest.mark.parametrize("settings", [{}, {"parts": "block"}, {"parts": "block", "keep_products": True}])
def test_taps_that_leave_as_passes_go_by_have_the_bits_of_the_tapped_program(settings):
    config = CONFIG.model_copy(update={"recompute": RecomputeConfig(**settings)})
    session, micro = TorchSession(config), probe_of(BATCH.cut(CONFIG.train)[0], CONFIG)
    session.accumulate(BATCH)
    kept = {name: p.grad.clone() for name, p in session.parameters.items()}
    for names in (observed_names(CONFIG), ["embed", "nll"], ["grad/blocks.0.attn.q", "grad/embed.weight"]):
        passing, whole = Collected(), Collected()
        session.stream_taps(micro, names, passing)
        session._observe_tapped(micro, frozenset(names), whole, lambda value: value)
        assert passing.arrays("taps").keys() == set(names)
        assert same(passing.arrays("taps"), whole.arrays("taps"))
    assert all((p.grad == kept[name]).all() for name, p in session.parameters.items())


def test_what_a_gradient_does_not_reach_is_left_out():
    class Detached(TorchSession):
        def build_model(self):
            model = super().build_model()
            right = model.blocks[1].mlp.activate
            model.blocks[1].mlp.activate = lambda gate, up: right(gate, up).detach()
            return model

    session, micro = Detached(CONFIG), probe_of(BATCH.cut(CONFIG.train)[0], CONFIG)
    names = ["grad/blocks.1.mlp.gate_proj.weight", "grad/blocks.1.mlp.act", "grad/embed.weight"]
    assert session.observe(micro, names).keys() == {"grad/blocks.1.mlp.act", "grad/embed.weight"}


def test_gradients_are_released_as_they_leave():
    session = TorchSession(CONFIG)
    left = []

    def take(kind, name, array):
        if kind == "grads":
            left.append(sum(p.grad is not None for p in session.parameters.values()))

    session.stream_gradients(BATCH, take)
    assert left == list(range(len(left), 0, -1))


def test_a_rank_that_keeps_nothing_takes_part():
    found = gathered(store=NoStore(), probe=True)
    assert found.record.step == 1 and not found.taps and not found.before.params


def test_gathering_clears_no_gradient_that_the_optimizer_would_leave():
    """The gradient of a parameter outside the optimizer grows from pass to pass, and the test must see it."""
    session = ParameterNotInOptimizer().open(CONFIG)
    name = "blocks.1.attn.o_proj.weight"
    once, twice = (session.gradients(BATCH).grads[name].copy() for _ in range(2))
    assert np.array_equal(twice, 2 * once) and once.any()


def test_a_candidate_that_hides_its_gradients_is_gathered(tmp_path):
    class Silent(TorchSession):
        def gradients(self, batch):
            raise NotSupported("no gradients")

    found = into(tmp_path / "evidence", Silent)
    assert found.probed is found.stepped is None and open_evidence(tmp_path / "evidence").probed is None


def change(folder, how):
    """Evidence of the same tensors with another document."""
    store = FolderStore.open(folder)
    document = json.loads(store.document(DOCUMENT))
    how(document)
    return document


@pytest.mark.parametrize(
    "how",
    [
        lambda d: d.update(schema=1),
        lambda d: d.pop("record"),
        lambda d: d["record"].update(loss="high"),
        lambda d: d["record"].pop("step"),
        lambda d: d.update(batch="taps"),
        lambda d: d.update(batch=7),
        lambda d: d["before"].update(step=None),
        lambda d: d["before"]["kinds"].pop("params"),
        lambda d: d["probed"].update(nll="absent"),
        lambda d: d.update(not_covered=5),
        lambda d: d.update(accumulated={"parts": "x"}),
        lambda d: d.update(ranks=[1]),
        lambda d: d.update(end_of_text="<|endoftext|>"),
    ],
)
def test_a_document_that_cannot_be_is_refused(saved, tmp_path, how):
    evidence, folder = saved
    document = change(folder, how)
    store = FolderStore.create(tmp_path / "evidence")
    written = store_of(evidence)
    for kind in written._entries:
        for name in written.names(kind):
            store.put(kind, name, written.get(kind, name))
    store.finish({DOCUMENT: json.dumps(document).encode()})
    with pytest.raises(UserError) as said:
        open_evidence(tmp_path / "evidence")
    assert DOCUMENT in str(said.value) and "\n" not in str(said.value)


def test_no_json_and_no_document_are_refused(tmp_path):
    for number, raw in enumerate((b"{", b"[" * 100_000, b"\xff", b"7")):
        store = FolderStore.create(tmp_path / str(number))
        store.finish({DOCUMENT: raw})
        with pytest.raises(UserError, match="not valid evidence"):
            open_evidence(tmp_path / str(number))
    store = FolderStore.create(tmp_path / "none")
    store.finish()
    with pytest.raises(UserError, match=r"names no evidence\.json"):
        open_evidence(tmp_path / "none")


def test_no_gradients_are_held_while_a_step_is_judged():
    session = TorchSession(CONFIG)
    gathered(lambda config: session)
    assert [name for name, p in session.parameters.items() if p.grad is not None] == []

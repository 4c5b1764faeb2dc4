"""Each fault is planted as declared: honest before it acts, wrong from then on; whom it claims to spare, it spares."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.core.arrays import bit_equal
from lockstep.core.backend import Batch
from lockstep.core.capabilities import ShowsStepGradients, ask
from lockstep.core.checkpoint.format import PoisonedState, begin_checkpoint, load_checkpoint, writer_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import GRADIENT, edge_names, parameter_shapes, tap_names
from lockstep.core.parity.evidence.attention_logits import shown_attention_logits
from lockstep.core.parity.evidence.cached_logits import sampled_logits
from lockstep.core.parity.evidence.evaluation import POLICIES, Likeliest, evaluated
from lockstep.core.parity.evidence.in_a_row import looked
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.update import flat
from lockstep.core.parity.reference.stages import chain
from lockstep.parity_tests.faults import CATALOG, FAULTS, REFERENCE, Fault
from lockstep.parity_tests.faults.data import RESUMED_AT
from lockstep.parity_tests.reference import test_reference_check
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("in_one_process")
EAGER = [fault for fault in FAULTS if not fault.only_compiled]
COMPILED = [fault for fault in FAULTS if fault.only_compiled]
Seen = dict[str, np.ndarray]


def named(fault: Fault) -> str:
    return fault.name


def policy_of(fault: Fault) -> str:
    """bf16 where the fault can act under it."""
    policies = sorted({recipe.partition("/")[0] for recipe in fault.recipes})
    return "bf16" if "bf16" in policies else policies[0]


def batch_of(config: RunConfig, fault: Fault | None, step: int, own_weights: bool = False) -> Batch:
    def right(number: int) -> Batch:
        return text_batch(config, seed=number)

    handed = fault.loader(right) if fault is not None and fault.loader else right
    return handed(step) if own_weights else uneven_weights(handed(step), step)


def steps(
    config: RunConfig, backend: TorchBackend, fault: Fault | None, count: int, own_weights: bool = False
) -> Iterator[tuple[Seen, Seen]]:
    """(forward values, everything else) that a check could see of each step."""
    session = backend.open(config)
    model = config.model
    forward = tap_names(model)
    grads = [GRADIENT + name for name in (*forward, *edge_names(model), *parameter_shapes(model))]
    for step in range(1, count + 1):
        before, batch = session.state(), batch_of(config, fault, step, own_weights)
        of_batch = session.gradients(batch)
        micro = batch.micro_batches(config.train.micro_batch_size)[-1]
        of_micro = session.gradients(micro)
        taps = session.observe(micro, [*forward, *grads])
        likeliest = Likeliest()
        for name, tap in taps.items():
            likeliest.note(name, tap)
        scores = dict(evaluated(session, micro, likeliest, POLICIES, []))
        scores |= sampled_logits(session, config, micro, taps, [])
        attention = shown_attention_logits(session, config, micro, [])
        # As `lockstep parity` requests them.
        record, _ = ask(session, ShowsStepGradients).step_and_gradients(batch, norms=step % 2 == 0)
        values = {"nll": of_batch.nll, "loss": np.asarray(of_batch.loss), "micro nll": of_micro.nll}
        values |= {name: taps[name] for name in forward if name in taps}
        values |= {f"scores/{name}": array for name, array in scores.items()}
        rest = {f"batch/{name}": grad for name, grad in of_batch.grads.items()}
        rest |= {f"micro/{name}": grad for name, grad in of_micro.grads.items()}
        rest |= {name: value for name, value in taps.items() if name.startswith(GRADIENT)}
        rest |= attention
        scalars = ("lr", "grad_norm", "clip_coefficient", "step", "tokens", "loss_weight")
        rest |= {key: np.asarray(getattr(record, key)) for key in scalars}
        rest |= {f"metrics/{name}": np.asarray(value) for name, value in record.metrics.items()}
        rest["digest"] = np.asarray(record.digest)
        rest |= flat(session.state())
        # A check evaluates and samples after its step too.
        looked(session, config, batch)
        rest |= {f"looked at/{name}": array for name, array in flat(session.state()).items()}
        # Through a checkpoint, which is written while the session has another state.
        with tempfile.TemporaryDirectory() as folder:
            pending = begin_checkpoint(Path(folder) / "state", step, writer_of(session), {})
            session.load(before)
            with contextlib.suppress(PoisonedState):
                session.load(load_checkpoint(pending.commit())[0])
        rest |= {f"loaded/{name}": array for name, array in flat(session.state()).items()}
        yield values, rest


@cache
def honest(config: RunConfig, count: int, own_weights: bool = False) -> list[tuple[Seen, Seen]]:
    torch._dynamo.reset()
    return list(steps(config, TorchBackend(), None, count, own_weights))


def differing(one: Seen, other: Seen) -> list[str]:
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not bit_equal(one[name], other[name])
    ]


@pytest.mark.parametrize("fault", EAGER, ids=named)
def test_a_fault_acts_from_its_first_step_on(fault: Fault) -> None:
    config = fault.configured(tiny_config(policy_of(fault)))
    found = list(steps(config, fault.make(), fault, fault.first_step, fault.own_weights))
    right = honest(config, RESUMED_AT, fault.own_weights)[: fault.first_step]
    for (values, rest), (right_values, right_rest) in list(zip(found, right, strict=True))[:-1]:
        assert differing(values, right_values) == []
        assert differing(rest, right_rest) == []
    (values, rest), (right_values, right_rest) = found[-1], right[-1]
    assert differing(values | rest, right_values | right_rest)
    if fault.backward_only:
        assert differing(values, right_values) == []
        assert any("weight" in name for name in differing(rest, right_rest))
    elif fault.phase == "forward":
        assert differing(values, right_values)
    elif fault.phase in ("update", "state"):
        assert fault.stage == "weights" or differing(values, right_values) == []


@pytest.mark.parametrize("fault", COMPILED, ids=named)
def test_what_the_compiler_makes_wrong_is_honest_when_eager(fault: Fault) -> None:
    # A model that writes its own logits takes the whole of them, and the chunked head has other zeros: 0 where whole
    # logits have −0.
    config = tiny_config("bf16")
    config = config.model_copy(update={"loss": config.loss.model_copy(update={"head": "full"})})
    (values, rest), (right_values, right_rest) = next(steps(config, fault.make(), fault, 1)), honest(config, 1)[0]
    assert differing(values | rest, right_values | right_rest) == []


def compiled(backend: TorchBackend, tapped: bool) -> tuple[Seen, Seen]:
    """(forward values, gradients) of one compiled program: the tapped one or, without taps, the one that trains."""
    config = tiny_config("bf16", compiled=True)
    torch._dynamo.reset()
    session = backend.open(config)
    micro = batch_of(config, None, 1).micro_batches(config.train.micro_batch_size)[-1]
    if not tapped:
        found = session.gradients(micro)
        return {"nll": found.nll, "loss": np.asarray(found.loss)}, dict(found.grads)
    forward = tap_names(config.model)
    grads = [GRADIENT + name for name in (*forward, *edge_names(config.model), *parameter_shapes(config.model))]
    taps = session.observe(micro, [*forward, *grads])
    return {name: taps[name] for name in forward}, {name: v for name, v in taps.items() if name not in forward}


@cache
def honest_compiled(tapped: bool) -> tuple[Seen, Seen]:
    return compiled(TorchBackend(), tapped)


@pytest.mark.parametrize("fault", COMPILED, ids=named)
def test_what_the_compiler_makes_wrong_is_wrong_when_compiled(fault: Fault) -> None:
    # The loss is no tap; what only the program without taps does, taps must not show (next test).
    tapped = fault.stage not in ("compiler", "loss")
    (values, grads), (right_values, right_grads) = compiled(fault.make(), tapped), honest_compiled(tapped)
    if fault.backward_only:
        assert differing(values, right_values) == []
        assert differing(grads, right_grads)
    else:
        assert differing(values, right_values)


@pytest.mark.parametrize("fault", [fault for fault in COMPILED if fault.stage == "compiler"], ids=named)
def test_what_only_the_program_without_taps_does_taps_do_not_show(fault: Fault) -> None:
    for found, right in zip(compiled(fault.make(), True), honest_compiled(True), strict=True):
        assert differing(found, right) == []


def test_the_collection_is_as_large_as_it_must_be() -> None:
    assert len(FAULTS) >= 45
    assert sum(fault.backward_only for fault in FAULTS) >= 12
    assert sum(fault.only_compiled for fault in FAULTS) >= 8
    assert sum(fault.loss_moves_less_than is not None and fault.loss_moves_less_than <= 1e-3 for fault in FAULTS) >= 10
    assert set(CATALOG) <= set(FAULTS)


def test_no_two_faults_are_one() -> None:
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []
    same = Counter((fault.mechanism, fault.stage, fault.phase, fault.layer) for fault in FAULTS)
    assert max(same.values()) == 1


def test_every_number_of_the_list_is_planted() -> None:
    planted = {fault.number for fault in FAULTS if fault.number is not None}
    assert planted | {fault.number for fault in REFERENCE} == set(range(1, 35))
    assert all(hasattr(test_reference_check, fault.test) for fault in REFERENCE)


def test_expectations_are_links_of_the_chain() -> None:
    phases = chain().phases
    for fault in FAULTS:
        assert fault.stage in phases
        assert fault.mechanism
        assert fault.phase == phases[fault.stage] or (fault.phase == "backward" and phases[fault.stage] == "forward")
        assert fault.recipes

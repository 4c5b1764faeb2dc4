"""The cost of checks as it is planned, against what a store holds, and the budgets that bound it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.parity.evidence.behind import BehindStore
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.index import DATA
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.place import is_large, store_for
from lockstep.core.parity.evidence.probe import probe_of
from lockstep.core.parity.evidence.saved import save_evidence
from lockstep.core.parity.evidence.store import FolderStore, MemoryStore
from lockstep.core.plan.checks import GB, SCORES, VALIDATION, checks_waiting, cost_of_check, over_budget
from lockstep.core.train.validation import Validation
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.session import TorchSession

# Tensors that bf16 holds, and those that are there already, are written with fewer bytes than are planned.
LEAST = 0.7
OPTIMIZERS = {"bf16": "adamw", "fp32": "adamw8bit", "fp64": "muon", "fp8_rowwise": "adamw"}


def budgeted(config: RunConfig, **budgets: float) -> RunConfig:
    return config.model_copy(update={"parity": config.parity.model_copy(update=budgets)})


def trained(policy: str, **train: Any) -> tuple[TorchSession, RunConfig]:
    """Return a session that has moments, and its configuration."""
    config = tiny_config(policy, train=train)
    config = config.model_copy(update={"optim": OptimConfig(name=OPTIMIZERS[policy], warmup_steps=3)})
    session = TorchSession(config)
    session.step(text_batch(config, 1))
    return session, config


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize(("policy", "micro"), [("bf16", 2), ("fp32", 4), ("fp64", 1), ("fp8_rowwise", 4)])
def test_a_check_writes_what_was_planned_and_no_more(policy: str, micro: int, thorough: bool, tmp_path: Path) -> None:
    session, config = trained(policy, micro_batch_size=micro)
    batch = uneven_weights(text_batch(config), 0)
    probe = None if thorough else probe_of(batch.cut(config.train)[0], config)
    store = FolderStore.create(tmp_path / "evidence")
    save_evidence(gather(session, config, batch, probe, store=store), store)
    written = sum(file.stat().st_size - DATA for file in store.folder.glob("*.safetensors"))
    assert LEAST < written / cost_of_check(config, thorough=thorough).kept <= 1


@pytest.mark.parametrize("policy", ["bf16", "fp64"])
def test_scores_and_cached_logits_take_what_was_planned(policy: str) -> None:
    config = tiny_config(policy, train={"batch_size": 2, "sequence_length": 32})
    evidence = gather(TorchSession(config), config, text_batch(config))
    taken = sum(array.nbytes for array in evidence.evaluated.values())
    assert taken == cost_of_check(config, thorough=True).evidence[SCORES]
    assert VALIDATION not in cost_of_check(config, thorough=True).evidence


@pytest.mark.parametrize("policy", ["bf16", "fp64"])
def test_a_check_during_training_keeps_validation_and_no_cached_logits(policy: str) -> None:
    config = tiny_config(policy, train={"batch_size": 2, "sequence_length": 32})
    validation = Validation([text_batch(config, number) for number in range(config.eval.batches)])
    batch = text_batch(config)
    evidence = gather(TorchSession(config), config, batch, probe_of(batch, config), validation=validation)
    planned, held_out = cost_of_check(config, thorough=False).evidence, evidence.held_out
    assert held_out is not None
    assert sum(array.nbytes for array in evidence.evaluated.values()) == planned[SCORES]
    kept = (*held_out.batch.arrays.values(), *held_out.scores.values(), *held_out.every.values())
    assert sum(array.nbytes for array in kept) == planned[VALIDATION]
    never = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})})
    assert VALIDATION not in cost_of_check(never, thorough=False).evidence


def test_memory_is_that_of_a_segment_whatever_the_depth() -> None:
    costs = [cost_of_check(tiny_config(layers=layers), thorough=False) for layers in (2, 16)]
    assert costs[1].kept > 5 * costs[0].kept
    assert costs[1].judging < 1.01 * costs[0].judging


def test_the_sum_of_a_tied_heads_gradient_waits_for_the_embedding() -> None:
    tied, untied = (
        cost_of_check(tiny_config(vocab_size=300, ffn_hidden=1 << 20, tied=tied), thorough=False).judging
        for tied in (True, False)
    )
    vocabulary = 300 * 64
    assert tied - untied == 12 * vocabulary


def test_fewer_checks_wait_where_the_disk_ends() -> None:
    each = cost_of_check(tiny_config(), thorough=False).disk / GB
    assert [checks_waiting(budgeted(tiny_config(), queue=5, disk_gb=n * each * 1.01)) for n in (0, 1, 3, 9)] == [
        5,
        1,
        3,
        5,
    ]


def test_what_does_not_fit_is_said_with_what_would() -> None:
    config = tiny_config()
    assert over_budget(config, thorough=True) == []
    assert over_budget(budgeted(config, disk_gb=1, memory_gb=2), thorough=True) == []
    (line,) = over_budget(budgeted(config, disk_gb=2, memory_gb=0.5), thorough=True)
    assert line == ("a check of run takes up to 1.1 GB of host memory, and parity.memory_gb is 0.5: 1.1 would do")
    (line,) = over_budget(budgeted(config, disk_gb=1e-4), thorough=True)
    assert line == "a check of run takes up to 0.1 GB on the disk, and parity.disk_gb is 0.0001: 0.1 would do"
    assert over_budget(budgeted(config, disk_gb=2, memory_gb=1.1), thorough=True) == []


def test_evidence_lies_in_a_folder_where_memory_has_no_room_for_it() -> None:
    config = tiny_config()
    cost = cost_of_check(config, thorough=True)
    for memory, kind in ((0.0, MemoryStore), (2.0, MemoryStore), ((cost.judging + cost.kept / 2) / GB, BehindStore)):
        with store_for(budgeted(config, memory_gb=memory)) as store:
            assert type(store) is kind
    assert is_large(tiny_config(vocab_size=100_000))

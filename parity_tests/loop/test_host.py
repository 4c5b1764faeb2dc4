"""Records of the machine: where the time went, and memory."""

from __future__ import annotations

import time

import pytest

from lockstep.core.capabilities import Timed, TimesCompilation, UsesMemory
from lockstep.core.train.process_memory import process_memory
from lockstep.core.train.time_accounting import PARTS
from lockstep.jax_backend.session import JaxSession
from lockstep.parity_tests.loop.runs import Folder
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

pytestmark = pytest.mark.usefixtures("in_one_process")


def seconds(record: dict) -> dict[str, float]:
    return {key.removeprefix("seconds/"): s for key, s in record["host"].items() if key.startswith("seconds/")}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_parts_are_the_time_between_records(folder: Folder, backend: str) -> None:
    settings = {"eval.every": 3, "log.norms_every": 2, "checkpoint.every": 4, "log.memory_every": 5}
    started = time.perf_counter()
    assert folder.train("run", settings, "--backend", backend) == 0
    whole = time.perf_counter() - started
    total = 0.0
    for record in folder.records("run"):
        parts = seconds(record)
        assert set(parts) <= set(PARTS) and all(spent > 0 for spent in parts.values())
        assert {"data", "compute", "optimizer", "other"} <= set(parts)
        # The step as a whole, and what lies between steps.
        assert sum(parts.values()) >= record["seconds"]
        total += sum(parts.values())
        # The checkpoint that follows step 4 is of the time before record 5.
        assert ("memory/peak" in record["host"]) == (record["step"] in (5, 10, 12))
    assert total < whole
    waits = {r["step"]: seconds(r).get("checkpoint", 0.0) for r in folder.records("run")}
    assert min(waits[5], waits[9]) > 10 * min(waits.values())


def test_a_session_tells_of_each_step_once() -> None:
    config = tiny_config("fp64")
    for session in (TorchBackend().open(config), JaxSession(config)):
        assert isinstance(session, Timed) and isinstance(session, UsesMemory)
        assert session.seconds_of_step() == {}
        started = time.perf_counter()
        session.step(text_batch(config), norms=True)
        whole = time.perf_counter() - started
        told = dict(session.seconds_of_step())
        assert told["compute"] > 0 and told["optimizer"] > 0 and sum(told.values()) <= whole
        assert session.seconds_of_step() == {}


def test_compilation_is_no_part_of_a_step() -> None:
    config = tiny_config("fp32", compiled=True, train={"sequence_length": 32})
    session = TorchSession(config)
    assert isinstance(session, TimesCompilation)
    compiled, batch = [session.seconds_compiling()], text_batch(config)
    for _ in range(2):
        started = time.perf_counter()
        session.step(batch)
        whole = time.perf_counter() - started
        compiled.append(session.seconds_compiling())
        assert sum(session.seconds_of_step().values()) <= whole - (compiled[-1] - compiled[-2])
    first, second = compiled[1] - compiled[0], compiled[2] - compiled[1]
    assert first > 0 and second == 0


def test_the_compilation_of_a_run_is_in_its_first_record(folder: Folder) -> None:
    settings = {"compile.enabled": True, "compile.backend": "aot_eager"}
    assert folder.train("run", settings) == 0
    first, *others = (seconds(record) for record in folder.records("run"))
    assert first["compilation"] > 0 and not any("compilation" in parts for parts in others)


def test_norms_and_checks_are_not_the_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(TorchSession):
        def _norms(self, tensors):
            time.sleep(0.05)
            return super()._norms(tensors)

        def hand_over(self, *arguments):
            time.sleep(0.05)
            return super().hand_over(*arguments)

    config = tiny_config("fp32", train={"sequence_length": 32})
    session = Slow(config)
    session.step_and_gradients(text_batch(config), norms=True)
    told = session.seconds_of_step()
    assert told["logging"] >= 0.15 and told["checks"] >= 0.05


def test_two_ranks_tell_what_they_wait_for() -> None:
    config = tiny_config("fp32", train={"batch_size": 4, "micro_batch_size": 1, "sequence_length": 32, "ranks": 2})
    session = TorchBackend().open(config)
    assert isinstance(session, Timed) and isinstance(session, UsesMemory)
    started = time.perf_counter()
    session.step(text_batch(config))
    whole = time.perf_counter() - started
    told = session.seconds_of_step()
    assert told["communication"] > 0 and sum(told.values()) <= whole
    assert session.memory()["peak"] > 0
    session.close()


def test_memory_is_the_processs() -> None:
    before = process_memory()
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    after = process_memory()
    assert after["peak"] >= after["resident"] >= before["resident"] + 48 * 2**20
    del held
    # The kernel counts in batches: a little less than it said a moment before.
    assert process_memory()["peak"] >= before["resident"] + 48 * 2**20

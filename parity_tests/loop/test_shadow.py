"""The trainer's end of the checks during training: honest, faulty, late, failing and dying references."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from lockstep.core.backend import StepRecord
from lockstep.core.config.schema import ParityConfig, RunConfig
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.modes.shadow import Result, Shadow, judge_all, receive_evidence, send_evidence
from lockstep.parity_tests.faults import forward, loss, optimizer, state
from lockstep.parity_tests.loop.runs import alive, equal, wait_until_gone
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

REFERENCES = "lockstep.parity_tests.loop.references"
JAX = "lockstep.jax_backend.backend:JaxBackend"


def checked(every: int = 1, queue: int = 2) -> RunConfig:
    return tiny_config().model_copy(update={"parity": ParityConfig(every=every, queue=queue)})


def step(shadow: Shadow, session: TorchSession, seed: int) -> StepRecord:
    return shadow.step(session, text_batch(session.config, seed), False)


def skipped(results: list[Result]) -> dict[int, str]:
    """Step → reason, each step once."""
    lost = [r for r in results if not isinstance(r, Check)]
    assert len(lost) == len(results) == len(dict(lost))
    return dict(lost)


@pytest.fixture(scope="module")
def reference() -> Iterator[Shadow]:
    """One worker with the JAX reference for several trainers: it takes the state from the evidence."""
    with Shadow(checked(queue=50), JAX) as shadow:
        yield shadow


def test_every_check_of_an_honest_run_agrees_and_changes_nothing(reference: Shadow) -> None:
    session, alone = TorchSession(checked()), TorchSession(checked())
    for seed in range(6):
        record = step(reference, session, seed)
        assert record.seconds > 0
        expected = alone.step(text_batch(alone.config, seed))
        assert (record.loss, record.grad_norm, record.digest) == (expected.loss, expected.grad_norm, expected.digest)
    assert reference.pending
    results = list(reference.drain())
    assert [r.step for r in results if isinstance(r, Check)] == [1, 2, 3, 4, 5, 6]
    assert [r.verdict for r in results if isinstance(r, Check)] == ["agreed"] * 6
    assert reference.pending == 0
    assert list(reference.collect()) == list(reference.drain()) == []
    assert equal(session.state().params, alone.state().params)


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        (forward.QueryScaled, "q"),
        (loss.LossWeightsIgnored, "loss"),
        (loss.OneGradientScaled, "gradients"),
        (optimizer.WrongBeta, "moments"),
        (optimizer.UpdateSwallowed, "update"),
        (state.OtherBatch, "tokens"),
    ],
)
def test_a_fault_is_named(fault: type[TorchBackend], stage: str, reference: Shadow) -> None:
    step(reference, fault().open_rank(checked()), 0)
    (check,) = reference.drain()
    assert isinstance(check, Check)
    assert check.verdict == "disagreed"
    assert check.origin is not None and check.origin.stage == stage


def test_due_at_the_first_step_and_every_n() -> None:
    shadow = Shadow.__new__(Shadow)
    shadow._config = RunConfig(parity=ParityConfig(every=4))
    assert [s for s in range(1, 13) if shadow.due(s)] == [1, 4, 8, 12]
    assert not any(map(ParityConfig().due, range(13)))


def test_a_late_reference_delays_no_step_and_is_skipped_and_counted() -> None:
    session = TorchSession(checked())
    with Shadow(checked(queue=2), f"{REFERENCES}:Late") as shadow:
        began = time.perf_counter()
        results: list[Result] = []
        for seed in range(6):
            step(shadow, session, seed)
            results += shadow.collect()
        assert time.perf_counter() - began < 3
        assert skipped(results) == dict.fromkeys((3, 4, 5, 6), "the reference is still busy with 2 earlier checks")
        assert shadow.pending == 2
        began = time.perf_counter()
        pid = shadow.worker_pid
    assert time.perf_counter() - began < 5
    assert not alive(pid)
    shadow.close()


def test_evidence_larger_than_a_pipe_does_not_hold_the_step_up() -> None:
    big = checked(queue=2).model_copy(update={"model": checked().model.model_copy(update={"vocab_size": 20_000})})
    session = TorchSession(big)
    with Shadow(big, f"{REFERENCES}:Late") as shadow:
        began = time.perf_counter()
        for seed in range(2):
            step(shadow, session, seed)
        assert shadow.pending == 2
        assert time.perf_counter() - began < 5
        os.kill(shadow.worker_pid, signal.SIGKILL)
        lost = skipped(list(shadow.drain()))
    assert list(lost) == [1, 2]


def test_what_is_lost_with_a_killed_worker_is_reported_once() -> None:
    session, alone = TorchSession(checked()), TorchSession(checked())
    with Shadow(checked(queue=2), f"{REFERENCES}:Late") as shadow:
        results: list[Result] = []
        for seed in range(5):
            step(shadow, session, seed)
            alone.step(text_batch(alone.config, seed))
            results += shadow.collect()
            if seed == 0:
                os.kill(shadow.worker_pid, signal.SIGKILL)
                assert wait_until_gone(shadow.worker_pid)
        results += shadow.drain()
        assert list(shadow.drain()) == list(shadow.collect()) == []
    lost = skipped(results)
    assert sorted(lost) == [1, 2, 3, 4, 5]
    assert all("has died (exit code -9); training goes on unchecked" in reason for reason in lost.values())
    assert equal(session.state().params, alone.state().params)


def test_a_reference_that_fails_says_why_in_one_line() -> None:
    session = TorchSession(checked())
    with Shadow(checked(), f"{REFERENCES}:Failing") as shadow:
        step(shadow, session, 0)
        lost = skipped(list(shadow.drain()))
        assert alive(shadow.worker_pid)
        step(shadow, session, 1)
        lost |= skipped(list(shadow.drain()))
        pid = shadow.worker_pid
    assert list(lost) == [1, 2]
    assert all(r.startswith("the reference failed: RuntimeError: no such luck (") for r in lost.values())
    assert "\n" not in lost[1] and "references.py:" in lost[1]
    assert not alive(pid)


def test_a_reference_that_ends_its_process_is_no_reason_to_wait() -> None:
    session = TorchSession(checked())
    with Shadow(checked(), f"{REFERENCES}:Ending") as shadow:
        step(shadow, session, 0)
        assert "exit code 7" in skipped(list(shadow.drain()))[1]


def test_a_reference_that_is_not_there() -> None:
    session = TorchSession(checked())
    with Shadow(checked(), f"{REFERENCES}:Missing") as shadow:
        step(shadow, session, 0)
        assert "has no Missing" in skipped(list(shadow.drain()))[1]


def test_evidence_that_cannot_be_sent_is_lost_and_not_waited_for() -> None:
    class Odd(TorchSession):
        def step(self, batch, *, norms=False):
            record = super().step(batch, norms=norms)
            object.__setattr__(record, "metrics", {"odd": lambda: None})
            return record

    session = Odd(checked())
    with Shadow(checked(), f"{REFERENCES}:Failing") as shadow:
        step(shadow, session, 0)
        began = time.perf_counter()
        assert "could not be sent" in skipped(list(shadow.drain()))[1]
        assert time.perf_counter() - began < 5


@pytest.mark.parametrize("kept", [1, 3, 5, 2000])
def test_evidence_that_breaks_off_is_none_and_no_traceback(kept: int) -> None:
    session = TorchSession(checked())
    evidence = gather(session, session.config, text_batch(session.config, 0))
    read_whole, write_whole = os.pipe()
    out = Connection(write_whole)

    def send() -> None:
        send_evidence(evidence, out)
        out.close()

    sender = threading.Thread(target=send)
    sender.start()
    with open(read_whole, "rb") as pipe:
        sent = pipe.read()
    sender.join()
    read_part, write_part = os.pipe()
    os.write(write_part, sent[:kept])
    os.close(write_part)
    with Connection(read_part) as part:
        assert receive_evidence(part) is None


def test_a_worker_whose_trainer_was_killed_ends_without_a_traceback() -> None:
    session = TorchSession(checked())
    evidence = gather(session, session.config, text_batch(session.config, 0))
    evidence_in, evidence_out = Pipe(duplex=False)
    results_in, results_out = Pipe(duplex=False)
    results_in.close()
    sender = threading.Thread(target=send_evidence, args=(evidence, evidence_out))
    sender.start()
    judge_all(checked(), f"{REFERENCES}:Failing", None, evidence_in, results_out)
    sender.join()


def test_an_exception_ends_the_worker_at_once() -> None:
    with pytest.raises(KeyError), Shadow(checked(), f"{REFERENCES}:Late") as shadow:
        pid = shadow.worker_pid
        raise KeyError
    assert not alive(pid)


def test_seconds_are_those_of_the_step_and_not_of_gathering() -> None:
    class SlowToTell(TorchSession):
        def observe(self, batch, taps):
            time.sleep(0.5)
            return super().observe(batch, taps)

    with Shadow(checked(), f"{REFERENCES}:Failing") as shadow:
        assert 0 < step(shadow, SlowToTell(checked()), 0).seconds < 0.5

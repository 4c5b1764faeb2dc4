"""The trainer's end of the checks during training: honest, faulty, late, failing and dying references."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.backend import StepRecord
from lockstep.core.config.schema import ParityConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.npz import read_npz
from lockstep.core.parity.evidence import lasting
from lockstep.core.parity.evidence import make_step as making
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.recorded import probe_of
from lockstep.core.parity.evidence.saved import save_evidence, store_of
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.modes import shadow as shadow_module
from lockstep.core.parity.modes.shadow import SUMS, SUMS_BEFORE, Result, Shadow, ShadowPart, judge_all
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.core.plan.checks import GB, cost_of_check
from lockstep.core.run.ranks import ONE
from lockstep.parity_tests.clock import Clock
from lockstep.parity_tests.faults import forward, loss, optimizer, state
from lockstep.parity_tests.guards.events import NO_SPACE, Refusing
from lockstep.parity_tests.loop.runs import alive, equal, wait_until_gone
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

REFERENCES = "lockstep.parity_tests.loop.references"
JAX = "lockstep.jax_backend.backend:JaxBackend"
TORCH = "lockstep.torch_backend.backend:TorchBackend"


def checked(every: int = 1, queue: int = 2) -> RunConfig:
    return tiny_config().model_copy(update={"parity": ParityConfig(every=every, queue=queue)})


def step(shadow: Shadow, session: TorchSession, seed: int) -> StepRecord:
    """Make a step whose evidence has been written, and its path sent."""
    record = shadow.step(session, text_batch(session.config, seed), False)
    shadow._writer.submit(int).result()
    return record


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
    shadow._config, shadow._first = RunConfig(parity=ParityConfig(every=4)), 1
    assert [s for s in range(1, 13) if shadow.due(s)] == [1, 4, 8, 12]
    shadow._first = 6
    assert [s for s in range(6, 13) if shadow.due(s)] == [6, 8, 12]
    assert not any(map(ParityConfig().due, range(13)))


def test_a_late_reference_delays_no_step_and_is_skipped_and_counted() -> None:
    session = TorchSession(checked())
    with Shadow(checked(queue=2), f"{REFERENCES}:Late") as shadow:
        results: list[Result] = []
        for seed in range(6):
            step(shadow, session, seed)
            results += shadow.collect()
        assert skipped(results) == dict.fromkeys((3, 4, 5, 6), "the reference is still busy with 2 earlier checks")
        assert shadow.pending == 2
    assert shadow._worker.exitcode == -signal.SIGKILL, "it was not waited for"
    shadow.close()


def with_budget(config: RunConfig, **budgets: float) -> RunConfig:
    return config.model_copy(update={"parity": config.parity.model_copy(update=budgets)})


def test_no_more_checks_wait_than_the_budget_of_the_disk_holds() -> None:
    two = 2.5 * cost_of_check(checked(), thorough=False).disk / GB
    session = TorchSession(checked())
    with Shadow(with_budget(checked(queue=9), disk_gb=two), f"{REFERENCES}:Late") as shadow:
        for seed in range(3):
            step(shadow, session, seed)
        said = f"the reference is still busy with 2 earlier checks; parity.disk_gb = {two:g} has no room for more"
        assert skipped(list(shadow.collect())) == {3: said}
        size = sum(file.stat().st_size for file in shadow._folder.rglob("*.safetensors"))
        assert size <= two * GB


@pytest.mark.parametrize("setting", ["disk_gb", "memory_gb"])
def test_a_run_whose_checks_cannot_keep_its_budget_does_not_begin(setting: str, tmp_path: Path) -> None:
    config = with_budget(checked(), **{setting: 1e-3})
    for part in (
        lambda: Shadow(config, JAX, folder=tmp_path / "evidence"),
        lambda: ShadowPart(config, ONE),
        lambda: next(check_steps(TorchBackend(), TorchBackend(), config, [])),
    ):
        with pytest.raises(UserError, match=rf"and parity\.{setting} is 0\.001: [\d.]+ would do"):
            part()
    assert not list(tmp_path.iterdir())


def test_large_evidence_does_not_hold_the_step_up() -> None:
    big = checked(queue=2).model_copy(update={"model": checked().model.model_copy(update={"vocab_size": 20_000})})
    session = TorchSession(big)
    with Shadow(big, f"{REFERENCES}:Late") as shadow:
        for seed in range(2):
            step(shadow, session, seed)
        assert shadow.pending == 2 and alive(shadow.worker_pid)
        os.kill(shadow.worker_pid, signal.SIGKILL)
        lost = skipped(list(shadow.drain()))
    assert list(lost) == [1, 2] and all("has died (exit code -9)" in reason for reason in lost.values())


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


def test_signals_to_every_process_of_a_run_do_not_end_the_worker() -> None:
    """While the worker starts, and while it waits: a terminal sends SIGINT and SIGHUP, Slurm SIGTERM."""
    session = TorchSession(checked())
    with Shadow(checked(), f"{REFERENCES}:Failing") as shadow:
        for seed in range(2):
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                os.kill(shadow.worker_pid, number)
            step(shadow, session, seed)
            assert "the reference failed" in skipped(list(shadow.drain()))[seed + 1]
        assert alive(shadow.worker_pid)


# Ends without closing the worker.
LEFT_OPEN = f"""
from lockstep.core.parity.modes.shadow import Shadow
from lockstep.parity_tests.tiny import tiny_config

if __name__ == "__main__":
    shadow = Shadow(tiny_config(), "{REFERENCES}:Failing")
    print(shadow.worker_pid, flush=True)
"""


def test_a_trainer_that_ends_without_closing_the_worker_does_not_wait_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert wait_until_gone(int(done.stdout))


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


def test_evidence_that_cannot_be_saved_is_lost_and_not_waited_for() -> None:
    class Odd(TorchSession):
        def step(self, batch, *, norms=False):
            record = super().step(batch, norms=norms)
            object.__setattr__(record, "metrics", {"odd": lambda: None})
            return record

    session = Odd(checked())
    with Shadow(checked(), f"{REFERENCES}:Failing") as shadow:
        step(shadow, session, 0)
        began = time.perf_counter()
        assert "its evidence is lost: TypeError" in skipped(list(shadow.drain()))[1]
        assert time.perf_counter() - began < checked().parity.timeout_seconds / 2


def evidence_in(folder: Path) -> Path:
    session = TorchSession(checked())
    store = FolderStore.create(folder)
    save_evidence(gather(session, session.config, text_batch(session.config, 0), store=store), store)
    return folder


@pytest.mark.parametrize("kept", [1, 3, 5, 40])
def test_a_message_that_breaks_off_ends_the_worker_without_a_traceback(kept: int) -> None:
    evidence_in, evidence_out = Pipe(duplex=False)
    evidence_out.send((1, Path("somewhere")))
    sent = os.read(evidence_in.fileno(), 1000)
    os.write(evidence_out.fileno(), sent[:kept])
    evidence_out.close()
    results_in, results_out = Pipe(duplex=False)
    judge_all(checked(), f"{REFERENCES}:Failing", None, evidence_in, results_out)
    assert not results_in.poll(0)


def test_a_worker_whose_trainer_was_killed_ends_without_a_traceback(tmp_path: Path) -> None:
    incoming, outgoing = Pipe(duplex=False)
    results_in, results_out = Pipe(duplex=False)
    results_in.close()
    outgoing.send((1, evidence_in(tmp_path / "evidence")))
    judge_all(checked(), f"{REFERENCES}:Failing", None, incoming, results_out)


def judged(session: TorchSession, folder: Path, observations: Path, seeds: range) -> list[Result]:
    """Let a worker judge a step of each seed, in this process."""
    evidence_in, evidence_out = Pipe(duplex=False)
    results_in, results_out = Pipe(duplex=False)
    folder.mkdir()
    for seed in seeds:
        store = FolderStore.create(folder / str(seed))
        batch = text_batch(session.config, seed)
        evidence = gather(session, session.config, batch, probe_of(batch, session.config), store=store)
        save_evidence(evidence, store)
        evidence_out.send((evidence.record.step, store.folder))
    evidence_out.close()
    found: list[Result] = []
    reader = threading.Thread(target=lambda: found.extend(results_in.recv() for _ in seeds))
    reader.start()
    judge_all(session.config, JAX, observations, evidence_in, results_out)
    reader.join()
    return found


@pytest.mark.usefixtures("in_one_process")
def test_sums_over_checks_go_on_after_a_resume_from_what_lies_before_it(tmp_path: Path) -> None:
    session, observations = TorchSession(checked()), tmp_path / "observations"

    def sums(name: str = SUMS) -> tuple[int, int, int]:
        arrays = read_npz(observations / name)
        return int(arrays["last_step"]), int(arrays["checks"].max()), int(arrays["mean_checks"].max())

    first = judged(session, tmp_path / "first", observations, range(2))
    assert [one.verdict if isinstance(one, Check) else one for one in first] == ["agreed"] * 2
    assert sums() == (2, 2, 2)
    state = session.state()
    judged(session, tmp_path / "second", observations, range(2, 3))
    assert sums() == (3, 3, 3) and sums(SUMS_BEFORE) == (2, 2, 2)
    # Killed, and resumed after step 2: the newest sums have a step that is made again.
    session.load(state)
    judged(session, tmp_path / "third", observations, range(2, 4))
    assert sums() == (4, 4, 4)
    # The sums of before lie within their bounds, but are of the program whose newest ones do not.
    for name, accused in ((SUMS, True), (SUMS_BEFORE, False)):
        changed: dict[str, Any] = {**read_npz(observations / SUMS), "accused": np.asarray(accused)}
        np.savez(observations / name, **changed)
    judged(session, tmp_path / "mended", observations, range(4, 5))
    assert sums() == (5, 1, 1)
    # From the first step: no sums lie before it.
    judged(TorchSession(checked()), tmp_path / "fourth", observations, range(1))
    assert sums() == (1, 1, 1)


def test_evidence_lies_in_the_folder_until_its_check_is_back(tmp_path: Path) -> None:
    session, folder = TorchSession(checked()), tmp_path / "evidence"
    with Shadow(checked(), f"{REFERENCES}:Failing", folder=folder) as shadow:
        step(shadow, session, 0)
        assert [path.name for path in folder.iterdir()] == ["step_000001"]
        list(shadow.drain())
        assert list(folder.iterdir()) == []
        step(shadow, session, 1)
        os.kill(shadow.worker_pid, signal.SIGKILL)
        list(shadow.drain())
        assert list(folder.iterdir()) == []
        shadow._waiting.add(9)
        (folder / "step_000009").mkdir()
    assert not folder.exists()


def test_evidence_of_an_accused_step_stays_for_its_alarm_alone(reference: Shadow) -> None:
    session = forward.QueryScaled().open_rank(checked())
    step(reference, session, 0)
    (check,) = reference.drain()
    assert isinstance(check, Check) and check.verdict == "disagreed"
    evidence = reference.evidence_of(1)
    assert evidence.record.step == 1 and store_of(evidence)
    assert evidence.before.params["embed.weight"].shape == (300, 64)
    # The same step again, accused again: its evidence is the new one, and stays.
    step(reference, forward.QueryScaled().open_rank(checked()), 0)
    list(reference.drain())
    assert reference.evidence_of(1).record.step == 1
    step(reference, session, 1)
    list(reference.drain())
    with pytest.raises(UserError, match=r"step_000001/index\.json"):
        reference.evidence_of(1)


def flipped(folder: Path) -> None:
    path = folder / "blocks.0.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut(folder: Path) -> None:
    os.truncate(folder / "head.safetensors", 40_000)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (flipped, r"blocks\.0\.safetensors was damaged after it was written"),
        (cut, r"head\.safetensors has 40000 bytes; \d+ were written"),
        (shutil.rmtree, r"index\.json: No such file"),
    ],
)
def test_evidence_that_is_harmed_costs_its_check_alone(
    harm: Callable[[Path], None], why: str, reference: Shadow, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, alone = TorchSession(checked()), TorchSession(checked())

    def harmed(evidence: Evidence, store: FolderStore) -> None:
        save_evidence(evidence, store)
        harm(store.folder)

    with monkeypatch.context() as patch:
        patch.setattr(shadow_module, "save_evidence", harmed)
        if harm is shutil.rmtree:
            patch.setattr(shadow_module, "save_evidence", save_evidence)
            sent = reference._evidence.send

            def removed_first(told: tuple[int, Path]) -> None:
                harm(told[1])
                sent(told)

            patch.setattr(reference._evidence, "send", removed_first)
        step(reference, session, 0)
    lost = skipped(list(reference.drain()))
    assert list(lost) == [1] and re.search(why, lost[1]) and "\n" not in lost[1]
    step(reference, session, 1)
    (check,) = reference.drain()
    assert isinstance(check, Check) and check.verdict == "agreed"
    for seed in range(2):
        alone.step(text_batch(alone.config, seed))
    assert equal(session.state().params, alone.state().params)


def test_a_disk_that_is_full_costs_the_check_and_not_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, alone = TorchSession(checked()), TorchSession(checked())
    disk = Refusing(monkeypatch, str(tmp_path), NO_SPACE)
    with Shadow(checked(), f"{REFERENCES}:Failing", folder=tmp_path / "evidence") as shadow:
        disk.turn(True)
        step(shadow, session, 0)
        disk.turn(False)
        (tmp_path / "evidence").mkdir()
        opened = FolderStore.create

        def full_later(folder: Path) -> FolderStore:
            made = opened(folder)
            disk.turn(True)
            return made

        monkeypatch.setattr(FolderStore, "create", full_later)
        step(shadow, session, 1)
        disk.turn(False)
        lost = skipped(list(shadow.drain()))
        assert list((tmp_path / "evidence").iterdir()) == []
    assert sorted(lost) == [1, 2]
    assert all(why.startswith("its evidence is lost: cannot write the evidence") for why in lost.values())
    assert all(why.endswith("No space left on device") for why in lost.values())
    for seed in range(2):
        alone.step(text_batch(alone.config, seed))
    assert equal(session.state().params, alone.state().params)


def test_an_exception_ends_the_worker_at_once() -> None:
    with pytest.raises(KeyError), Shadow(checked(), f"{REFERENCES}:Late") as shadow:
        pid = shadow.worker_pid
        raise KeyError
    assert not alive(pid)


def test_seconds_are_those_of_the_step_and_not_of_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class SlowToTell(TorchSession):
        def observe(self, batch, taps):
            clock.sleep(500)
            return super().observe(batch, taps)

        def accumulate(self, batch):
            clock.sleep(2)
            return super().accumulate(batch)

    monkeypatch.setattr(making, "time", clock)
    with Shadow(checked(), f"{REFERENCES}:Failing") as shadow:
        assert step(shadow, SlowToTell(checked()), 0).seconds == 2
    assert clock.now > 500


def test_training_does_not_wait_for_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    put, go_on = FolderStore.put, threading.Event()

    def held(self: FolderStore, *tensor: Any) -> None:
        assert go_on.wait(60)
        put(self, *tensor)

    monkeypatch.setattr(FolderStore, "put", held)
    session = TorchSession(checked())
    with Shadow(checked(), JAX) as shadow:
        shadow.step(session, text_batch(session.config, 0), False)
        weights = session.state().params
        session.step(text_batch(session.config, 1))
        assert shadow.pending == 1 and not equal(session.state().params, weights)
        go_on.set()
        (check,) = shadow.drain()
    assert isinstance(check, Check) and check.verdict == "agreed", "the step that was written is the one that was made"


def test_evidence_without_one_of_its_tensors_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    put = FolderStore.put

    def fails_once(self: FolderStore, kind: str, name: str, array: np.ndarray) -> None:
        if (kind, name) == ("taps", "embed"):
            raise RuntimeError("no luck")
        put(self, kind, name, array)

    session = TorchSession(checked())
    # Whichever reference judges the next step: torch needs no compilation.
    with Shadow(checked(), TORCH) as reference:
        with monkeypatch.context() as patch:
            patch.setattr(FolderStore, "put", fails_once)
            step(reference, session, 0)
        assert skipped(list(reference.drain())) == {1: "its evidence is lost: taps/embed: RuntimeError: no luck"}
        step(reference, session, 1)
        (check,) = reference.drain()
    assert isinstance(check, Check) and check.verdict == "agreed"


def test_seconds_are_not_those_of_keeping_the_steps_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    put, clock, kept = lasting.LastingStore.put, Clock(), 0

    def slow(self: lasting.LastingStore, kind: str, *tensor: Any) -> None:
        nonlocal kept
        if kind.startswith("stepped/"):
            clock.sleep(100)
            kept += 1
        put(self, kind, *tensor)

    class TakesTwoSeconds(TorchSession):
        def accumulate(self, batch):
            clock.sleep(2)
            return super().accumulate(batch)

    monkeypatch.setattr(making, "time", clock)
    monkeypatch.setattr(lasting.LastingStore, "put", slow)
    session = TakesTwoSeconds(checked())
    with Shadow(checked(), f"{REFERENCES}:Failing") as shadow:
        assert shadow.step(session, text_batch(session.config, 0), False).seconds == 2
    assert kept > 10 and clock.now >= 2 + 100 * kept

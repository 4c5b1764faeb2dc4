"""A session that takes a stored state over is held to it: whatever door the state came in by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.arrays import rows_of
from lockstep.core.backend import Backend
from lockstep.core.checkpoint.format import save_checkpoint
from lockstep.core.checkpoint.reader import Stored
from lockstep.core.checkpoint.taken_over import require_taken_over, restore_state
from lockstep.core.errors import UserError
from lockstep.core.run.ranks import rows_of_rank
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults import state as faults
from lockstep.parity_tests.loop import takers
from lockstep.parity_tests.loop.runs import STEPS, Folder, one_line
from lockstep.parity_tests.loop.test_elastic import three_steps
from lockstep.parity_tests.ranks import harness
from lockstep.parity_tests.ranks import test_loop as ranks
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

PLACE = "lockstep.parity_tests"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a run's second step, by precision policy."""
    found = {}
    for policy in ("bf16", "fp16"):
        session = TorchBackend().open(tiny_config(policy))
        for seed in range(2):
            session.step(text_batch(tiny_config(policy), seed))
        found[policy] = save_checkpoint(tmp_path_factory.mktemp(policy), session.state(), {})
    return found


def restored(backend: TorchBackend, folder: Path, policy: str = "bf16") -> str | None:
    config = tiny_config(policy)
    scalars = {} if policy == "bf16" else {"loss_scale": 1024.0, "good_steps": 7.0, "skipped_steps": 0.0}
    return restore_state(backend.open(config), config, folder, 2, scalars)


def test_an_honest_session_is_held_to_its_checkpoint(stored: dict[str, Path]) -> None:
    assert restored(TorchBackend(), stored["bf16"]) is None


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (
            faults.BlocksExchangedOnLoad,
            r"params/blocks\.0\.attn\.q_proj\.weight, params/blocks\.1\.attn\.q_proj\.weight differ",
        ),
        (faults.MomentsLostOnLoad, r"exp_avg/embed\.weight, .* and \d+ more differ"),
        (faults.WeightsRoundedOnLoad, r"params/"),
        (faults.StepLostOnLoad, r"step \(0, not 2\), the updates of embed\.weight \(0, not 2\)"),
        (takers.CountsAnUpdateTooMany, r"the updates of embed\.weight \(3, not 2\)"),
    ],
)
def test_what_was_not_taken_over_is_named(fault: type[TorchBackend], named: str, stored: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=rf"^the session did not take its state back: {named}.* from the checkpoint"):
        restored(fault(), stored["bf16"])


def test_a_session_that_shows_no_state_is_said_to(stored: dict[str, Path]) -> None:
    said = restored(takers.ShowsNoState(), stored["bf16"])
    assert said is not None and "could not be compared with the checkpoint" in said and "mine shows no state" in said


def test_a_lost_loss_scale_is_named() -> None:
    config = tiny_config("fp16")
    session = takers.LossScaleLostOnLoad().open(config)
    given = session.state()
    given = replace(given, scalars={**given.scalars, "loss_scale": given.scalars["loss_scale"] / 2})
    session.load(given)
    with pytest.raises(UserError, match=r"loss_scale \(.*, not .*\) differs from a capsule"):
        require_taken_over(session, config, given, "a capsule")


@pytest.mark.parametrize("backend", [TorchBackend(), JaxBackend()])
def test_one_bit_of_one_moment_is_enough(backend: Backend, stored: dict[str, Path]) -> None:
    config = tiny_config()
    session = backend.open(config)
    given = Stored(stored["bf16"]).state(2, {})
    session.load(given)
    assert require_taken_over(session, config, given, "it") is None
    bent = np.array(given.optimizer["exp_avg"]["final_norm.weight"])
    bent.view(np.uint32)[0] ^= 1
    kept = {**given.optimizer, "exp_avg": {**given.optimizer["exp_avg"], "final_norm.weight": bent}}
    with pytest.raises(UserError, match=r": exp_avg/final_norm\.weight differs from it$"):
        require_taken_over(session, config, replace(given, optimizer=kept), "it")
    session.close()


class _SecondOfTwo(ranks.Rank1):
    """Rank 1, which hears that rank 0 holds what it was given."""

    def gather(self, value: Any, asked: str = "") -> list[Any]:
        return [[], value]


class _AmongTwo(takers.RowsMixed().session_class):  # type: ignore[misc]
    peers = _SecondOfTwo(None)


def test_one_rank_that_is_wrong_is_named_on_all(stored: dict[str, Path]) -> None:
    """Rank 0 hears of it as well, and its own session is right."""
    config = tiny_config()
    with pytest.raises(UserError, match=r"^rank 1 did not take its state back: exp_avg/blocks\.1\.mlp\.up_proj"):
        restore_state(_AmongTwo(config), config, stored["bf16"], 2, {})
    honest = TorchBackend().open(config)
    honest.peers = ranks.Rank0(["exp_avg/embed.weight"])  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"^rank 1 did not take its state back: exp_avg/embed\.weight differs"):
        restore_state(honest, config, stored["bf16"], 2, {})


def test_rows_of_a_rank_are_held_to_its_rows_of_the_checkpoint(stored: dict[str, Path]) -> None:
    """A rank that holds the rows of another one has the right shape."""
    given = Stored(stored["bf16"]).state(2, {})
    for rank in range(2):
        right = rows_of(given.params, "embed.weight", rows_of_rank(300, rank, 2))
        assert np.array_equal(right, given.params["embed.weight"][150 * rank : 150 * rank + 150])


@pytest.fixture
def _processes() -> Iterator[None]:
    yield
    harness.let_go()


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize(("taker", "verdict"), [("SettingsForgottenOnRestore", "disagreed"), ("", "agreed")])
def test_the_first_step_after_a_resume_is_checked(
    taker: str, verdict: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's settings are no part of the stored state: the step that follows shows them."""
    three_steps(monkeypatch)
    backend = ["--backend", f"{PLACE}.loop.takers:{taker}"] if taker else []
    assert folder.train("run", {"parity.every": 1000}, *backend) == 130
    folder.resume("run", *backend)
    run = folder.run("run")
    assert [(line["step"], line["verdict"]) for line in run.checks()] == [(1, "agreed"), (4, verdict)]
    assert run.checks_due(STEPS) == [1, 4]
    if taker:
        assert run.checks()[1]["origin"]["stage"] == "moments"


@pytest.mark.usefixtures("in_one_process", "_processes")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_is_refused(
    ranks: int, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, and two over which the weights are cut."""
    settings = {"train.micro_batch_size": 1, "train.ranks": ranks, "parallel.strategy": "fsdp"}
    three_steps(monkeypatch)
    assert folder.train("run", settings, "--backend", f"{PLACE}.loop.takers:RowsMixed") == 130
    harness.let_go()
    capsys.readouterr()
    assert folder.resume("run", "--backend", f"{PLACE}.loop.takers:RowsMixed") == 2
    said = one_line(capsys.readouterr().err)
    assert "did not take its state back: exp_avg/blocks.1.mlp.up_proj.weight differs from" in said
    # Nothing was trained on it.
    assert len(folder.records("run")) == 3 and "step_000003" in said

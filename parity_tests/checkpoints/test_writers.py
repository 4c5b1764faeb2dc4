"""Checkpoints written while training goes on, and read back."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from lockstep.core.backend import Backend, Session
from lockstep.core.checkpoint.format import PoisonedState, begin_checkpoint, load_checkpoint, read_state, writer_of
from lockstep.core.checkpoint.random_state import random_state, restore_random_state
from lockstep.core.checkpoint.reader import opened_checkpoint
from lockstep.core.errors import UserError
from lockstep.core.parity.judge.update import flat
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.stored import stored
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend import checkpoint
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.checkpoint import Writer, WritingTorch, files_of, shares
from lockstep.torch_backend.optim import in_codes
from lockstep.torch_backend.session import TorchSession

pytestmark = pytest.mark.usefixtures("in_one_process")


def opened(backend: Backend, policy: str, ranks: int = 1, optimizer: str = "adamw") -> Session:
    config = tiny_config(policy, train={"ranks": ranks, "micro_batch_size": 1})
    return backend.open(config.model_copy(update={"optim": config.optim.model_copy(update={"name": optimizer})}))


SESSIONS: dict[str, tuple[Backend, str, int, str]] = {
    "torch bf16": (TorchBackend(), "bf16", 1, "adamw"),
    "torch fp64": (TorchBackend(), "fp64", 1, "adamw"),
    "torch fp16, loss scale": (TorchBackend(), "fp16", 1, "adamw"),
    "torch, two ranks": (TorchBackend(), "bf16", 2, "adamw"),
    "torch Muon": (TorchBackend(), "bf16", 1, "muon"),
    "torch 8-bit AdamW": (TorchBackend(), "bf16", 1, "adamw8bit"),
    "jax bf16": (JaxBackend(), "bf16", 1, "adamw"),
    "jax fp64": (JaxBackend(), "fp64", 1, "adamw"),
    "jax fp16, loss scale": (JaxBackend(), "fp16", 1, "adamw"),
    "jax Muon": (JaxBackend(), "bf16", 1, "muon"),
}


@pytest.mark.parametrize("which", SESSIONS)
def test_what_was_written_is_the_state_at_its_beginning(tmp_path: Path, which: str) -> None:
    """The session takes a step between the copy and the writing: bits are those before it."""
    session = opened(*SESSIONS[which])
    batch = text_batch(session.config)  # type: ignore[attr-defined]
    session.step(batch)
    due = flat(session.state())
    config = session.config.model_dump(mode="json")  # type: ignore[attr-defined]
    pending = begin_checkpoint(tmp_path / "one", 1, writer_of(session), {"config": config})
    session.step(batch)
    state = stored(pending.commit())
    found = flat(state)
    assert found.keys() == due.keys()
    for name, array in due.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    # A second one through the same host memory, and back into the session.
    again = stored(begin_checkpoint(tmp_path / "two", 2, writer_of(session), {"config": config}).commit())
    assert again.step == 2 and not np.array_equal(again.params["embed.weight"], state.params["embed.weight"])
    session.load(state)
    assert all(np.array_equal(a, due[name]) for name, a in flat(session.state()).items())
    session.close()


def test_every_rank_writes_its_share(tmp_path: Path) -> None:
    session = opened(TorchBackend(), "bf16", 2)
    path = begin_checkpoint(tmp_path / "c", 0, writer_of(session), {}).commit()
    first, second = (load_file(p) for p in sorted(path.glob("shard-*.safetensors")))
    assert not first.keys() & second.keys()
    assert first.keys() | second.keys() == {n for n in flat(session.state()) if n != "step"}
    sizes = [sum(a.nbytes for a in part.values()) for part in (first, second)]
    assert max(sizes) < 1.1 * min(sizes)
    session.close()


def test_shares_are_even_and_whole() -> None:
    assert shares([5, 3, 3, 1], 2) == [[0, 3], [1, 2]]
    assert shares([1], 3) == [[0], [], []]
    of_rank = shares(list(range(100)), 4)
    assert sorted(n for part in of_rank for n in part) == list(range(100))


def test_a_rank_that_cannot_write_is_named(tmp_path: Path) -> None:
    """Followers write beside their work; what stops one of them is rank 0's to tell, and nothing is left behind."""
    session = opened(TorchBackend(), "bf16", 2)
    folder = tmp_path / "c"

    def write(aside: Path) -> WritingTorch:
        (aside / "shard-00002-model-00001-of-00001.safetensors").mkdir()
        made: WritingTorch = session.write(aside)  # type: ignore[attr-defined]
        return made

    with pytest.raises(UserError, match=r"cannot write the checkpoint .*c: rank 1: Is a directory"):
        begin_checkpoint(folder, 0, write, {}).commit()
    assert list(tmp_path.iterdir()) == []
    assert begin_checkpoint(folder, 0, writer_of(session), {}).commit() == folder
    session.close()


@pytest.mark.parametrize("which", ["torch bf16", "torch, two ranks", "jax bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_checkpoint_is_made_of_numbers_that_are_not_finite(tmp_path: Path, which: str, value: float) -> None:
    """On whichever rank they are written."""
    session = opened(*SESSIONS[which])
    good = session.state()
    for name in ("embed.weight", "blocks.1.mlp_norm.weight"):
        moment = good.optimizer["exp_avg_sq"][name].copy()
        moment.flat[-1] = value
        session.load(
            replace(good, optimizer={**good.optimizer, "exp_avg_sq": {**good.optimizer["exp_avg_sq"], name: moment}})
        )
        with pytest.raises(PoisonedState, match=rf"of step 0: (exp_avg_sq/{name}|a tensor of another rank) holds"):
            begin_checkpoint(tmp_path / "c", 0, writer_of(session), {}).commit()
        assert list(tmp_path.iterdir()) == []
    session.load(good)
    begin_checkpoint(tmp_path / "c", 0, writer_of(session), {}).commit()
    session.close()


def test_no_pickle_is_written(tmp_path: Path) -> None:
    """torch.distributed.checkpoint's usual writer leaves a pickle, `.metadata`."""
    for name, backend in (("torch", TorchBackend()), ("jax", JaxBackend())):
        path = begin_checkpoint(tmp_path / name, 0, writer_of(opened(backend, "bf16")), {}).commit()
        for file in path.rglob("*"):
            assert not file.is_file() or not file.read_bytes().startswith(
                (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"PK")
            )
        assert not list(path.rglob(".metadata"))


def test_orbax_is_not_read_without_its_session(tmp_path: Path) -> None:
    path = begin_checkpoint(tmp_path / "c", 0, writer_of(opened(JaxBackend(), "bf16")), {}).commit()
    assert json.loads((path / "manifest.json").read_text())["format"] == "orbax"
    with pytest.raises(UserError, match=r"as orbax writes them.*lockstep convert"):
        load_checkpoint(path)


def shard(folder: Path, number: int, name: str, part: np.ndarray, offsets: list[int]) -> None:
    """Write a file as torch.distributed.checkpoint does, with a part of a tensor."""
    says = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": offsets}})}
    save_file({name: part}, folder / f"shard-{number:05d}-model-00001-of-00001.safetensors", metadata=says)


def test_parts_of_a_tensor_are_joined(tmp_path: Path) -> None:
    whole = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    for number, (at, part) in enumerate([(0, whole[:2]), (2, whole[2:5]), (5, whole[5:])], 1):
        shard(tmp_path, number, "params/w", part, [at, 0])
    assert np.array_equal(read_state(tmp_path, 0, {}).params["w"], whole)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="parts of params/w are missing"):
        read_state(tmp_path, 0, {})


# Random number generators


class _Drawing(TorchSession):
    def draw(self) -> list[Any]:
        import random

        return [random.random(), random.gauss(0, 1), np.random.standard_normal(), torch.rand(2).tolist()]


def test_what_would_have_been_drawn_is_drawn() -> None:
    session = _Drawing(tiny_config())
    session.draw()
    states = random_state(session)
    due = [session.draw() for _ in range(3)]
    restore_random_state(session, states)
    assert [session.draw() for _ in range(3)] == due
    restore_random_state(session, {name: a for name, a in states.items() if name.startswith("session/")})
    assert session.draw()[3] == due[0][3] and session.draw()[0] != due[1][0]


def test_every_rank_has_its_own() -> None:
    session = opened(TorchBackend(), "bf16", 2)
    states = session.random_state()  # type: ignore[attr-defined]
    assert set(states) == {"0/torch_cpu", "1/torch_cpu"}
    torch.manual_seed(5)
    other = torch.get_rng_state().numpy()
    session.set_random_state({"0/torch_cpu": states["0/torch_cpu"], "1/torch_cpu": other})  # type: ignore[attr-defined]
    found = session.random_state()  # type: ignore[attr-defined]
    assert np.array_equal(found["1/torch_cpu"], other)
    assert np.array_equal(found["0/torch_cpu"], states["0/torch_cpu"])
    # Fewer ranks than there were: the rest is left out. More: those keep theirs.
    session.set_random_state({"0/torch_cpu": other, "7/torch_cpu": other})  # type: ignore[attr-defined]
    assert np.array_equal(session.random_state()["1/torch_cpu"], other)  # type: ignore[attr-defined]
    session.close()


def test_no_file_is_larger_than_what_may_be_made_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed.checkpoint makes a file whole before it writes it."""
    session = opened(TorchBackend(), "bf16")
    due = flat(session.state())
    largest = max(array.nbytes for array in due.values() if isinstance(array, np.ndarray))
    monkeypatch.setattr(checkpoint, "FILE_BYTES", largest // 2)
    path = begin_checkpoint(tmp_path / "c", 0, writer_of(session), {"config": {}}).commit()
    files = list(path.glob("shard-*.safetensors"))
    header = 20_000
    assert len(files) > 10 and max(file.stat().st_size for file in files) < largest + header
    found = flat(stored(path))
    assert found.keys() == due.keys() and all(np.array_equal(found[name], due[name]) for name in due)
    session.close()


def test_files_are_filled_in_order_and_hold_no_more_than_they_may() -> None:
    assert files_of({"a": 3, "b": 3, "c": 1, "d": 9, "e": 1}, 4) == {"a": 1, "b": 2, "c": 2, "d": 3, "e": 4}


def test_eight_bit_moments_are_copied_as_codes_and_scales() -> None:
    session = opened(TorchBackend(), "bf16", optimizer="adamw8bit")
    session.step(text_batch(session.config))  # type: ignore[attr-defined]
    writer = Writer(session)  # type: ignore[arg-type]
    made = writer.begin(Path("unused"))
    moments = [t for name, t in made._tensors.items() if name.startswith("exp_avg/") and in_codes(t)]
    assert moments
    assert all(t.codes.dtype == torch.uint8 and t.codes.shape == t.shape for t in moments)  # type: ignore[attr-defined]
    session.close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists a process's memory maps")
def test_a_checkpoint_that_is_read_a_tensor_at_a_time_is_not_in_memory_as_a_whole(tmp_path: Path) -> None:
    session = opened(TorchBackend(), "bf16")
    path = begin_checkpoint(tmp_path / "c", 0, writer_of(session), {"config": {}}).commit()
    with opened_checkpoint(path) as state:
        assert all(array.size for array in state.params.values())
        assert str(path) not in Path("/proc/self/maps").read_text()
    session.close()


def test_gradients_do_not_lie_beside_the_copy_of_a_state(tmp_path: Path) -> None:
    session = opened(TorchBackend(), "bf16")
    session.step(text_batch(session.config))  # type: ignore[attr-defined]
    begin_checkpoint(tmp_path / "c", 0, writer_of(session), {"config": {}}).commit()
    assert all(p.grad is None for p in session.parameters.values())  # type: ignore[attr-defined]
    session.close()


def test_the_host_memory_of_a_checkpoint_is_let_go_when_another_state_is_taken_over(tmp_path: Path) -> None:
    """A check's round trip would hold the whole state while its step is judged."""
    session = opened(TorchBackend(), "bf16")
    pending = begin_checkpoint(tmp_path / "c", 0, writer_of(session), {"config": {}})
    copies = [weakref.ref(t) for t in session._writer._staged.values()]  # type: ignore[attr-defined]
    session.load(session.state())
    pending.commit()
    gc.collect()
    assert copies and not [one for one in copies if one() is not None]
    session.close()

"""A step sends its batch to the device once and reads from the device once: the host waits for no copy in between.

The CPU cannot wait for itself, so calls are counted: on CUDA each of these stops the host until the stream is done.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.core.backend import Batch
from lockstep.core.config.schema import AttentionConfig, LossConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend import session as session_module
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.upload import Uploaded, on_device, upload, uploaded

CPU = torch.device("cpu")
READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
MAKES = {torch.tensor, torch.as_tensor, torch.asarray}


class Transfers(TorchFunctionMode):
    """Counts what moves data between host and device; the one upload of a step counts as itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moves = func is Tensor.to and any(isinstance(x, torch.device) for x in (*args, *kwargs.values()))
        if func in READS:
            self.found["reads"] += 1
        elif func in MAKES or moves:
            self.found["sends"] += 1
        return func(*args, **kwargs)

    def apart(self, what: str, call: Any) -> Any:
        """Wrap the call and count it as one of `what`; calls inside it are not counted."""

        def run(*args: Any) -> Any:
            self.found[what] += 1
            with torch._C.DisableTorchFunction():
                return call(*args)

        return run


def transfers(session: TorchSession, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the transfers of one step that is not the first. The optimizer keeps its counts of steps on the host."""
    session.step(text_batch(session.config))
    with Transfers() as seen:
        monkeypatch.setattr(session_module, "uploaded", seen.apart("uploads", uploaded))
        monkeypatch.setattr(session.optimizer, "step", seen.apart("updates", session.optimizer.step))
        session.step(text_batch(session.config, 1))
    return dict(seen.found)


def config_of(**settings: Any) -> Any:
    return tiny_config("bf16", layers=1, train={"sequence_length": 32, "batch_size": 8}).model_copy(update=settings)


ONCE = {"uploads": 1, "updates": 1, "reads": 1}


@pytest.mark.parametrize("head", ["full", "chunked"])
def test_a_step_sends_once_and_reads_once(monkeypatch, head):
    config = config_of(loss=LossConfig(head=head, chunk=48))
    assert transfers(TorchBackend().open(config), monkeypatch) == ONCE


def test_documents_are_sent_with_the_rest(monkeypatch):
    config = config_of(attention=AttentionConfig(document_mask=True, reset_positions=True))
    assert transfers(TorchBackend().open(config), monkeypatch) == ONCE


class _AsBefore(TorchSession):
    """Each micro-batch is sent by itself, and what the loss is divided by as well."""

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        tokens, targets = (torch.from_numpy(x).to(self.device, torch.long) for x in (batch.tokens, batch.targets))
        return tokens, targets, torch.from_numpy(batch.weights).to(self.device, self.policy.stream)

    def total_weight(self, batch: Batch) -> Tensor:
        return torch.tensor(batch.weights.sum(dtype=np.float64), dtype=torch.float64, device=self.device)

    def clip_coefficient(self, norm: Tensor) -> Tensor:
        return super().clip_coefficient(norm) if norm.isfinite() else norm


def test_what_was_sent_and_read_before_is_seen(monkeypatch):
    """The negative twin: three copies for each of four micro-batches, the total, and a look at the norm."""
    found = transfers(_AsBefore(config_of()), monkeypatch)
    assert found == ONCE | {"sends": 3 * 4 + 1, "reads": 2}


def test_what_arrives_is_what_was_sent():
    config = config_of(attention=AttentionConfig(document_mask=True))
    batch = uneven_weights(text_batch(config), 1)
    micros = batch.micro_batches(2)
    found = uploaded(micros, CPU)
    assert [type(one) for one in found] == [Uploaded] * 4
    for micro, one in zip(micros, found, strict=True):
        assert one.digest() == micro.digest()
        for name, array in micro.arrays.items():
            there = one.on_device[name]
            assert there.dtype == (torch.float32 if name == "weights" else torch.int64)
            np.testing.assert_array_equal(there.numpy(), array)
            (alone,) = on_device(micro, (name,), CPU)
            assert alone.dtype == there.dtype and torch.equal(alone, there)


def test_arrays_that_lie_apart_in_memory_arrive_whole():
    wide = text_batch(config_of())
    narrow = Batch(*(x[:, 3:17] for x in (wide.tokens, wide.targets, wide.weights)))
    found = upload([narrow], ("targets", "weights"), CPU)
    np.testing.assert_array_equal(found["targets"].numpy(), narrow.targets)
    np.testing.assert_array_equal(found["weights"].numpy(), narrow.weights)


def test_what_is_on_the_device_is_not_sent_again(monkeypatch):
    (one,) = uploaded([text_batch(config_of())], CPU)
    monkeypatch.setattr("lockstep.torch_backend.upload.upload", None)
    assert on_device(one, ("tokens",), CPU)[0] is one.on_device["tokens"]

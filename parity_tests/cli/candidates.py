"""Candidates, as `FILE.py:NAME` or `module:NAME`, that lack a method, return wrong values or raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


def backend(session: type[TorchSession]) -> type[TorchBackend]:
    """Return a backend class whose `open` makes a `session`."""
    return type(session.__name__, (TorchBackend,), {"session_class": session})


class _FourMethods:
    """A session with `state`, `load`, `step` and `gradients` alone, and no base class."""

    def __init__(self, config: RunConfig) -> None:
        self._inner = TorchSession(config)

    def state(self) -> State:
        return self._inner.state()

    def load(self, state: State) -> None:
        self._inner.load(state)

    def step(self, batch: Batch) -> StepRecord:
        return self._inner.step(batch)

    def gradients(self, batch: Batch) -> Gradients:
        return self._inner.gradients(batch)

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        raise NotSupported("mine has no taps")

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        raise NotSupported("mine runs no single stages")

    def close(self) -> None: ...


class FourMethods:
    """A backend without `describe` and `name`, which only the trainer needs."""

    def open(self, config: RunConfig) -> Any:
        return _FourMethods(config)


class Incomplete:
    """A backend whose session lacks required methods."""

    def open(self, config: RunConfig) -> Any:
        return object()


class _Blind(TorchSession):
    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        raise NotSupported("mine has no taps")

    def gradients(self, batch: Batch) -> Gradients:
        raise NotSupported("mine gives no gradients")


class _WithoutGradients(TorchSession):
    def gradients(self, batch: Batch) -> Gradients:
        raise NotSupported("mine gives no gradients")


class _Stateless(TorchSession):
    def state(self) -> State:
        raise NotSupported("mine keeps its state to itself")


def _changed(change: Callable[[Gradients], Gradients]) -> type[TorchBackend]:
    class Changed(TorchSession):
        def gradients(self, batch: Batch) -> Gradients:
            return change(super().gradients(batch))

    return backend(Changed)


def _every(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Gradients], Gradients]:
    return lambda g: replace(g, grads={name: change(array) for name, array in g.grads.items()})


class _NanTaps(TorchSession):
    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        return {name: value * np.float32("nan") for name, value in super().observe(batch, taps).items()}


class _NanRecord(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        nan = float("nan")
        return replace(super().step(batch), loss=float("inf"), grad_norm=nan, clip_coefficient=nan, lr=nan)


class _WithoutMoments(TorchSession):
    def state(self) -> State:
        return replace(super().state(), optimizer={})


class _WithoutOneWeight(TorchSession):
    def state(self) -> State:
        state = super().state()
        return replace(state, params={n: p for n, p in state.params.items() if n != "embed.weight"})


class _RaisesInStep(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        raise RuntimeError("no luck\nand a second line")


class _RaisesInGradients(TorchSession):
    def gradients(self, batch: Batch) -> Gradients:
        raise ValueError


class _RaisesInStepFour(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        if self.steps_done == 3:
            raise RuntimeError("no luck")
        return super().step(batch, norms=norms)


class _WrongThenRaises(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        if self.steps_done == 1:
            raise RuntimeError("no luck")
        return replace(super().step(batch, norms=norms), lr=1.0)


class _Exits(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        raise SystemExit(0)


class RaisesWhenItOpens(TorchBackend):
    """A backend whose `open` raises, as with a GPU driver that is too old."""

    def open(self, config: RunConfig) -> TorchSession:
        raise RuntimeError("no luck\nand a second line")


Blind, WithoutGradients, Stateless = backend(_Blind), backend(_WithoutGradients), backend(_Stateless)
NanGradients = _changed(_every(lambda g: g * np.float32("nan")))
NanLoss = _changed(lambda g: replace(g, loss=float("nan"), nll=g.nll * np.float32("nan")))
OtherNames = _changed(lambda g: replace(g, grads={f"mine.{name}": array for name, array in g.grads.items()}))
Transposed = _changed(_every(lambda g: np.ascontiguousarray(g.T)))
FlatNll = _changed(lambda g: replace(g, nll=g.nll.ravel()))
NoneForGradients = _changed(lambda g: None)  # type: ignore[arg-type, return-value]
NanTaps, NanRecord = backend(_NanTaps), backend(_NanRecord)
WithoutMoments, WithoutOneWeight = backend(_WithoutMoments), backend(_WithoutOneWeight)
RaisesInStep, RaisesInGradients = backend(_RaisesInStep), backend(_RaisesInGradients)
RaisesWhenItSteps, RaisesInStepFour = RaisesInStep, backend(_RaisesInStepFour)
WrongThenRaises, Exits = backend(_WrongThenRaises), backend(_Exits)
a_number = 3


def gives_nothing() -> None: ...


def raises() -> None:
    raise OSError("no gpu")

"""The transformers model of a run's family as an independent reference.

Both backends of Lockstep implement one description of a model, and an error made in both would stay unseen. This
session compares with code written elsewhere. It computes NLL, logits and the gradient of every parameter, in FP32 or
FP64, on the CPU; it has no other taps and no single stages.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.config import config_of
from lockstep.core.hub.families import HUB
from lockstep.core.hub.family import HubFamily
from lockstep.core.hub.tensors import stored_tensors, to_ours, to_theirs
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import parameter_shapes
from lockstep.torch_backend.tools.import_logging import quiet_import

LOGITS = "logits"
# The module of transformers that computes RoPE's frequencies with `torch`.
_ROPE = "transformers.modeling_rope_utils"


class _WideTorch(types.ModuleType):
    """The torch module, except that its names of FP32 mean FP64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def widened(kind: type) -> Iterator[None]:
    """Make `torch.float32` mean FP64 in the file of a model's class while the context is active.

    transformers computes norms, softmax and angles in FP32 for every dtype of the model. Its code is not changed in any
    other way. `Tensor.float` also gives FP64, in the whole process. kind: the model's class.
    """
    modules: list[Any] = [sys.modules[kind.__module__], sys.modules[_ROPE]]
    wide, narrow = _WideTorch("torch"), Tensor.float
    try:
        for module in modules:
            module.torch = wide
        Tensor.float = Tensor.double  # type: ignore[method-assign]
        yield
    finally:
        Tensor.float = narrow  # type: ignore[method-assign]
        for module in modules:
            module.torch = torch


@contextmanager
def default_dtype(exact: bool) -> Iterator[None]:
    """Set torch's default dtype, FP64 if `exact`, else FP32: for tensors made from numbers, such as Gemma's √hidden."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def architecture_of(family: HubFamily) -> Any:
    """Return the transformers class of a family's model. Raises UserError if transformers is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"transformers, which computes {family.architecture}, is not installed: pip install transformers"
        ) from error
    with quiet_import():  # the class's module is imported here, and torchao by it
        return getattr(transformers, family.architecture)


def their_arguments(model: ModelConfig, longest: int) -> dict[str, Any]:
    """Return the arguments of transformers' configuration class. longest: tokens of the longest sequence.

    Raises UserError if the transformers model cannot express the run's model.
    """
    return config_of(model, HUB[model.family], longest)


def their_weights(model: ModelConfig, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert canonical parameters to transformers' tensors, by transformers' names; a tied head has no tensor."""
    arrays = {name: parameter.detach().cpu().numpy() for name, parameter in params.items()}
    stored = stored_tensors(HUB[model.family], model)
    return {one.theirs: torch.from_numpy(to_theirs(one, arrays.__getitem__)) for one in stored}


class HuggingFaceSession:
    """A transformers model with a run's weights, in FP32 or FP64, on the CPU. It cannot train."""

    def __init__(self, config: RunConfig) -> None:
        if (family := HUB.get(config.model.family)) is None:
            raise UserError(f"model.family = {config.model.family!r}: hf computes {', '.join(HUB)}")
        if not (config.precision.chosen.in_fp32 or config.precision.exact):
            raise UserError(
                f"precision.policy = {config.precision.policy!r}: hf computes in fp32 and fp64, without other casts"
            )
        self.config, self._family = config, family
        self._exact = config.precision.exact
        self._dtype = torch.float64 if self._exact else torch.float32
        self._kind = architecture_of(family)
        self._stored = stored_tensors(family, config.model)
        self._shapes = parameter_shapes(config.model)
        arguments = their_arguments(config.model, config.train.longest)
        with self._precision(), default_dtype(self._exact):
            made = self._kind.config_class(**arguments, attn_implementation="eager", use_cache=False)
            self._model = self._kind(made).to(self._dtype).eval()
        theirs = dict(self._model.named_parameters())
        due = {one.theirs for one in self._stored}
        if due != theirs.keys():
            differ = sorted(due ^ theirs.keys())
            raise UserError(
                f"transformers' {family.architecture} has other tensors than expected: {', '.join(differ[:3])}"
            )
        self._theirs: dict[str, Tensor] = theirs
        params = init_parameters(config.model, config.seed)
        self._state = State(0, {}, {})
        self.load(State(0, params, {}))

    def _precision(self) -> Any:
        return widened(self._kind) if self._exact else _as_it_is()

    def state(self) -> State:
        """Return the weights by canonical name; moments are those of the loaded state, and not used."""
        params: dict[str, np.ndarray] = {}
        for one in self._stored:
            params |= dict(to_ours(one, self._theirs[one.theirs].detach().numpy(), self._shapes))
        return State(self._state.step, params, self._state.optimizer, self._state.scalars)

    def load(self, state: State) -> None:
        """Load the weights of a state. Raises ValueError if a shape is not the model's."""
        with torch.no_grad():
            for one in self._stored:
                array = torch.from_numpy(to_theirs(one, state.params.__getitem__))
                if array.shape != self._theirs[one.theirs].shape:
                    raise ValueError(f"{one.theirs} has shape {tuple(array.shape)}")
                self._theirs[one.theirs].copy_(array)
        self._state = State(state.step, {}, state.optimizer, state.scalars)

    def _logits(self, batch: Batch) -> Tensor:
        """Return logits (B, S, V), with the run's treatment of documents in attention and positions."""
        tokens = torch.from_numpy(np.ascontiguousarray(batch.tokens)).long()
        more: dict[str, Any] = {}
        documents = batch.documents_for(self.config.attention)
        if documents is not None:
            ids = torch.from_numpy(np.ascontiguousarray(documents))
            alike = ids[:, :, None] == ids[:, None, :]
            # Always pass a mask: without one, transformers separates documents where positions restart.
            seen = (alike if self.config.attention.document_mask else torch.ones_like(alike)).tril()
            more["attention_mask"] = self._mask(seen)
            if self.config.attention.reset_positions:
                more["position_ids"] = alike.tril(-1).sum(-1)
        found: Tensor = self._model(input_ids=tokens, **more).logits
        return found

    def _mask(self, seen_BST: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mask (B, 1, S, S) that is added to scores, with the window; one mask per layer type if several."""
        place = torch.arange(seen_BST.shape[1])
        near_ST = place[:, None] - place < (self.config.model.window or len(place))
        whole, windowed = (
            torch.zeros(seen.shape, dtype=self._dtype).masked_fill(~seen, torch.finfo(self._dtype).min)[:, None]
            for seen in (seen_BST, seen_BST & near_ST)
        )
        by_type = {"full_attention": whole, "sliding_attention": windowed}
        return by_type if self._family.layers else windowed

    def _nll(self, logits: Tensor, batch: Batch) -> Tensor:
        targets = torch.from_numpy(np.ascontiguousarray(batch.targets)).long()
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        z = self.config.loss.z_loss
        return nll + z * torch.logsumexp(logits, -1).square() if z else nll

    def gradients(self, batch: Batch) -> Gradients:
        """Return per-token NLL, the loss Σ weight·nll / Σ weight, and gradients by canonical name."""
        self._model.zero_grad(set_to_none=True)
        total = float(batch.weights.sum(dtype=np.float64))
        loss, nll = 0.0, []
        with self._precision():
            for micro in batch.cut(self.config.train):
                each = self._nll(self._logits(micro), micro)
                weights = torch.from_numpy(np.ascontiguousarray(micro.weights)).to(each.dtype)
                part = (each * weights).sum() / total
                part.backward()
                loss += part.item()
                nll.append(each.detach().numpy())
        grads: dict[str, np.ndarray] = {}
        for one in self._stored:
            gradient = self._theirs[one.theirs].grad
            assert gradient is not None
            grads |= dict(to_ours(one, gradient.numpy(), self._shapes))
        return Gradients(np.concatenate(nll), loss, {name: grads[name] for name in self._shapes})

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Return the logits. Raises NotSupported if `taps` lacks them: the model has no other taps."""
        if LOGITS not in taps:
            raise NotSupported("hf shows its logits alone")
        with torch.no_grad(), self._precision():
            return {LOGITS: self._logits(batch).numpy()}

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Raise NotSupported: the model runs only as a whole."""
        if stage == "update":
            raise NotSupported("moments and update: hf has no optimizer")
        raise NotSupported("single stages: hf runs the model as a whole")

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Raise NotSupported: this session does not train."""
        raise NotSupported("hf is a reference: it does not train")

    def close(self) -> None:
        """Do nothing: the session holds no resource."""


class HuggingFaceBackend:
    """A backend with the transformers model of the run's family: `lockstep parity CONFIG --reference hf`."""

    name = "hf"

    def open(self, config: RunConfig) -> HuggingFaceSession:
        """Open a session at the initial weights: eager, on the CPU and in one process, whatever the run's settings.

        Raises UserError for an unsupported family or precision, and if transformers is not installed.
        """
        return HuggingFaceSession(config)

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Return versions and the settings in force."""
        import transformers

        return {
            "backend": self.name,
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "device": "cpu",
            "device_kind": "cpu",
            "in_force": {"program": "transformers, eager", "attention": "eager"},
        }

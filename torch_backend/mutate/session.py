"""A torch session with one planted mutant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.backend import Arrays, Batch, State, StepRecord
from lockstep.core.capabilities import Take
from lockstep.core.config.schema import RunConfig
from lockstep.core.mutate.conditions import ONE_RANK
from lockstep.core.mutate.mutant import Mutant
from lockstep.core.mutate.places import Place
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.checkpoint import Writer, WritingTorch
from lockstep.torch_backend.kernels.embedding import embedding
from lockstep.torch_backend.model import Embedding, Tap, Transformer, no_tap
from lockstep.torch_backend.mutate.change import Change, backward, change_of, region, within
from lockstep.torch_backend.optim import moment_of
from lockstep.torch_backend.session import TorchSession

# Scalars of the optimizer's groups: name of the place → key in a group, and index if the value is a tuple.
_SETTINGS = {
    "optimizer.beta1": ("betas", 0),
    "optimizer.beta2": ("betas", 1),
    "optimizer.eps": ("eps", None),
    "optimizer.weight_decay": ("weight_decay", None),
}


class MutatedBackend(TorchBackend):
    """The trainer with one mutant."""

    def __init__(self, mutant: Mutant, place: Place) -> None:
        session = {"mutant": mutant, "place": place, "__doc__": f"The trainer with {mutant}."}
        self.session_class = type("Mutated", (MutatedSession,), session)


class MutatedSession(TorchSession):
    """A TorchSession with one planted `mutant`; `place` describes the position of the mutant."""

    mutant: Mutant
    place: Place
    # Facts that conditions test: (number, count) of the micro-batch, all loss weights are 1, a checkpoint was loaded.
    _micro: tuple[int, int] = (0, 1)
    _ones = False
    _resumed = False
    # True if the condition holds for the program's batch. torch.compile makes one program for each value.
    _acting = False
    _stepping = False

    def __init__(self, config: RunConfig) -> None:
        operator = self.mutant.operator
        made = operator.name not in ("other", "stale", "own")
        self._change: Change = change_of(operator, self.place.axes) if made else lambda x: x
        # Tensors of the last step, which `stale` puts in place of the current ones.
        self._last: dict[str, Any] = {}
        super().__init__(config)
        if self.mutant.kind in ("written", "read"):
            self._writer = _MutatedWriter(self)
        if self.mutant.kind == "part":
            self.parameters[self.place.name].register_hook(self._part)
        if self.mutant.kind == "reduced":
            self.parameters[self.place.name].register_hook(self._add_own)

    def build_model(self) -> Transformer:
        """Build the model; if the mutant is in a parameter or an epsilon, modules read the changed value."""
        model = super().build_model()
        if self.place.parameter:
            path, _, role = self.place.parameter.rpartition(".")
            _read_otherwise(model.get_submodule(path), role, self._of_parameter)
        if self.place.kind == "scalar" and self.place.name.endswith("_norm.eps"):
            norm: Any = model.get_submodule(self.place.name.removesuffix(".eps"))
            norm.eps = self._number(norm.eps)
        return model

    # Conditions

    def _acts(self) -> bool:
        """Return whether the mutant's condition holds now; True for conditions that the program tests."""
        number, count = self._micro
        held = {
            "ones": self._ones,
            "last-micro": count > 1 and number == count - 1,
            "many-micro": count > 3,
            "from-step-3": self.steps_done >= 2,
            "resumed": self._resumed,
            ONE_RANK: self.ranks is not None and self.ranks.rank == self.ranks.count - 1,
        }
        return held.get(self.mutant.condition, True)

    def _about(self, batch: Batch, number: int, count: int) -> None:
        self._micro = number, count
        self._acting = self._acts()

    @property
    def _in_this_program(self) -> bool:
        """True if the mutant acts in the program that is running or being traced."""
        if self.mutant.condition == "untapped" and self._tapping:
            return False
        if self.mutant.condition == "compiled" and not torch.compiler.is_compiling():
            return False
        return self._acting

    _tapping = False

    # The program

    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return loss and per-token NLL, computed with the changed tensor."""
        shown = self.model.tap
        self._tapping = shown is not no_tap
        if not self._in_this_program:
            return super().micro_loss(tokens, targets, weights, total, *documents)
        if self.place.name == "loss":
            loss, nll = super().micro_loss(tokens, targets, weights, total, *documents)
            return self._changed(self._change, loss), nll
        if not self.place.at:
            return super().micro_loss(tokens, targets, weights, total, *documents)
        held = region(self.mutant.condition, tokens)
        self.model.tap = self._planted(shown, within(held, self._change), held)
        try:
            return super().micro_loss(tokens, targets, weights, total, *documents)
        finally:
            self.model.tap = shown

    def _changed(self, change: Change, value: Tensor) -> Tensor:
        return backward(value, change) if self.mutant.kind == "backward" else change(value)

    def _planted(self, shown: Tap, change: Change, held: Tensor | None) -> Tap:
        """Return a tap that calls `shown`, and changes the tensor of the place before or after it."""
        place, operator = self.place, self.mutant.operator.name
        passed: dict[str, Tensor] = {}

        def tap(name: str, value: Tensor) -> Tensor:
            if name == place.at and not place.after:
                if operator == "other":
                    value = within(held, lambda x: passed[place.other].reshape(x.shape))(value)
                else:
                    value = self._changed(change, value)
            value = shown(name, value)
            if name == place.other:
                passed[name] = value
            return self._changed(change, value) if name == place.at and place.after else value

        return tap

    def _of_parameter(self, value: Tensor) -> Tensor:
        """Return the value of a parameter that the operation of the place reads."""
        return self._changed(self._change, value) if self._in_this_program else value

    # Uses of the program by the session

    def stream_taps(self, batch: Batch, taps: Sequence[str], take: Take) -> None:
        """Record the taps of one micro-batch."""
        self._ones = bool((batch.weights == 1).all())
        self._about(batch, 0, 1)
        super().stream_taps(batch, taps, take)

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Accumulate gradients; a mutant in a gradient changes one of them at the end."""
        self._ones = bool((batch.weights == 1).all())
        count = len(batch.cut(self.config.train))
        self._about(batch, 0, count)
        self._micro = -1, count
        self._own = None
        result = super().accumulate(batch)
        self._about(batch, count - 1, count)
        if self.mutant.kind == "gradient" and self._acts():
            self._change_gradient()
        if self._own is not None and self._acts():
            self.parameters[self.place.name].grad = self._own / self.scale
        return result

    def _forward_backward(self, micro: Batch, program: Any, total: Tensor) -> tuple[Tensor, Tensor]:
        number, count = self._micro
        self._about(micro, number + 1, count)
        return super()._forward_backward(micro, program, total)

    def _part(self, gradient: Tensor) -> Tensor:
        # Taps request the gradients of a single micro-batch, which are not part of a sum.
        return self._change(gradient) if self._micro[1] > 1 and self._acting else gradient

    # Sum of this rank's gradients of the parameter, before the reduction over ranks.
    _own: Tensor | None = None

    def _add_own(self, gradient: Tensor) -> None:
        self._own = gradient.clone() if self._own is None else self._own + gradient

    def _change_gradient(self) -> None:
        p, operator = self.parameters[self.place.name], self.mutant.operator.name
        assert p.grad is not None
        if operator == "other":
            other = self.parameters[self.place.other].grad
            assert other is not None
            p.grad = other.clone()
        elif operator == "stale":
            new, p.grad = p.grad, self._last.get("gradient", p.grad).clone()
            if self._stepping:
                self._last["next"] = new.clone()
        else:
            p.grad = self._change(p.grad)

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Run a step; a mutant in a moment, an update or a scalar changes the step's result."""
        acts, at = self._acts(), self.steps_done
        before = {n: p.detach().clone() for n, p in self.parameters.items()} if self.mutant.kind == "update" else {}
        kept = self._moment().clone() if self.mutant.kind == "moment" else None
        self._stepping = True
        try:
            record = super().step(batch, norms=norms)
        finally:
            self._stepping = False
        if "next" in self._last:
            self._last["gradient"] = self._last.pop("next")
        with torch.no_grad():
            if kept is not None and acts:
                moment = self._moment()
                moment.copy_(kept if self.mutant.operator.name == "stale" else self._change(moment))
            if before:
                self._change_update(before, acts)
        if self.place.name == "step_count" and acts:
            self.steps_done = at + (2 if self.mutant.operator.name == "twice" else 0)
            record = replace(record, step=self.steps_done)
        if self.place.name == "learning_rate" and acts:
            record = replace(record, lr=self._number(record.lr))
        return record

    def _moment(self) -> Tensor:
        kind, _, name = self.place.name.partition("/")
        return moment_of(self.optimizer, self.parameters[name], kind)

    def _change_update(self, before: Mapping[str, Tensor], acts: bool) -> None:
        """Change the update that the step added to a parameter; unchanged elements keep their bits."""
        name = self.place.name
        made = {n: self.parameters[n] - before[n] for n in (name, self.place.other) if n}
        wanted = self._change(made[name])
        if self.mutant.operator.name == "other":
            wanted = made[self.place.other]
        if self.mutant.operator.name == "stale":
            wanted = self._last.get("update", made[name])
        self._last["update"] = made[name].clone()
        if acts:
            p = self.parameters[name]
            p.copy_(torch.where(wanted == made[name], p, before[name] + wanted))

    # Numbers of the step

    def _number(self, value: float) -> float:
        return float(self._change(torch.tensor(value, dtype=torch.float64)))

    def _scalar(self, name: str, value: Tensor) -> Tensor:
        return self._change(value) if self.place.name == name and self._acts() else value

    def total_weight(self, batch: Batch) -> Tensor:
        """Return the total loss weight, changed if the mutant is in it."""
        return self._scalar("total_weight", super().total_weight(batch))

    def _global_norm(self, grads: list[Tensor]) -> Tensor:
        return self._scalar("grad_norm", super()._global_norm(grads))

    def clip_coefficient(self, norm: Tensor) -> Tensor:
        """Return the clip coefficient, changed if the mutant is in it."""
        return self._scalar("clip_coefficient", super().clip_coefficient(norm))

    def _update(self, grads: list[Tensor], coefficient: Tensor, lr: float, finite: bool) -> None:
        acts = self._acts()
        if acts and self.place.name in ("learning_rate", "optimizer.lr"):
            lr = self._number(lr)
        key, index = _SETTINGS.get(self.place.name, ("", None))
        right = [group[key] for group in self.optimizer.param_groups] if key and acts else []
        for group, value in zip(self.optimizer.param_groups, right, strict=False):
            if index is None:
                group[key] = self._number(value)
            else:
                group[key] = tuple(self._number(x) if n == index else x for n, x in enumerate(value))
        super()._update(grads, coefficient, lr, finite)
        for group, value in zip(self.optimizer.param_groups, right, strict=False):
            group[key] = value

    # Batch, checkpoint, validation

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, targets and weights on the device; a mutant in the batch changes one of them."""
        arrays = dict(zip(("tokens", "targets", "weights"), super().to_device(batch), strict=True))
        if self.mutant.kind == "batch":
            name = self.place.name
            new = arrays[name]
            if self._acting:
                stale = self._last.get(f"{self.steps_done - 1}/{self._micro[0]}", new)
                of_last = self.mutant.operator.name == "stale" and stale.shape == new.shape
                arrays[name] = stale if of_last else self._change(new)
            if self._stepping:
                self._last[f"{self.steps_done}/{self._micro[0]}"] = new
        return arrays["tokens"], arrays["targets"], arrays["weights"]

    def load(self, state: State) -> None:
        """Load a state; a mutant in the reading of a checkpoint changes one tensor."""
        self._resumed = True
        if self.mutant.kind == "read":
            state = self._read(state)
        super().load(state)

    def _read(self, state: State) -> State:
        kind, _, name = self.place.name.partition("/")
        arrays = state.params if kind == "params" else state.optimizer[kind]
        changed = {**arrays, name: self._change(torch.from_numpy(np.array(arrays[name]))).numpy()}
        if kind == "params":
            return replace(state, params=changed)
        return replace(state, optimizer={**state.optimizer, kind: changed})

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Return the scores of a batch; a mutant in the validation changes the NLL."""
        found = super().evaluate(batch, policy)
        if self.mutant.kind != "validation":
            return found
        return {**found, "nll": self._change(torch.from_numpy(np.array(found["nll"]))).numpy()}


class _MutatedWriter(Writer):
    """A writer of checkpoints; a mutant in the writing changes one tensor of the copy."""

    def begin(self, folder: Path) -> WritingTorch:
        """Copy the state, and change the copy if the mutant is in the writing."""
        made = super().begin(folder)
        session: Any = self._session
        if session.mutant.kind == "written":
            name = session.place.name
            made._tensors[name] = session._change(made._tensors[name].clone())
        return made


def _read_otherwise(module: nn.Module, role: str, change: Callable[[Tensor], Tensor]) -> None:
    """Make `module` read a changed value of its parameter `role`; the parameter itself stays.

    For an embedding, only the look-up reads the changed value: a tied head reads the table unchanged.
    """
    kind = type(module)
    if isinstance(module, Embedding):

        def look_up(self: Any, tokens_BS: Tensor) -> Tensor:
            return embedding(tokens_BS, change(self.weight))

        module.__class__ = type(kind.__name__, (kind,), {"forward": look_up})
        return
    read = property(lambda self: change(self._parameters[role]))
    module.__class__ = type(kind.__name__, (kind,), {role: read})

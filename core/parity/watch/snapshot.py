"""Copy a user's model and optimizer as numpy arrays, for `watch`. No framework is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.components.optimizers import BLOCK
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.fused_kernels import adam_in_fp32
from lockstep.core.parity.watch.uncovered import Uncovered
from lockstep.core.parity.watch.update_rules import IN_FP32

# Attributes that an update rule reads from the optimizer itself and not from its groups.
OF_OPTIMIZER = ("is_adamw", "block_size")

Names = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True)
class Answer:
    """A reference's result: the loss, its gradient by parameter, and other tensors of the forward pass by name."""

    loss: float
    grads: Arrays
    outputs: Arrays = field(default_factory=dict)


class Reference(Protocol):
    """A reference in two precisions.

    `params` has the reference's names. `batch` has numpy arrays in place of tensors.
    """

    def truth(self, params: Mapping[str, np.ndarray], batch: Any) -> Answer:
        """Compute loss and gradients in FP64, from float64 parameters."""
        ...

    def twin(self, params: Mapping[str, np.ndarray], batch: Any) -> Answer:
        """Compute loss and gradients with the candidate's roundings, from float32 parameters. Not called under fp64."""
        ...


@runtime_checkable
class StepReference(Protocol):
    """A reference that takes the step unchanged.

    `params` has the model's own names, in FP32 or wider. `batch` is passed on as it is.
    own: the reference is the model itself, so the twin is the candidate's own program.
    """

    own: bool

    def answers(self, params: Arrays, batch: Any, precision: Any, uncovered: Uncovered) -> tuple[Answer, Answer]:
        """Return truth and twin; under fp64 both are the truth. Raises UserError for what cannot be judged."""
        ...


@runtime_checkable
class ShowsStages(Protocol):
    """A reference that also judges each stage of the model, from the candidate's own input to that stage."""

    def attend(self, due: Callable[[], int | None]) -> None:
        """Start to record the forward passes of the steps that will be checked.

        due: returns the number of the current step, or None if it will not be checked.
        """
        ...

    def stages(self, number: int, params: Arrays, precision: Any, uncovered: Uncovered) -> Sequence[Finding]:
        """Judge the recorded stages of a step. Raises UserError with the reason if they cannot be judged."""
        ...


@dataclass(frozen=True)
class FromCallable:
    """A reference from a numpy function `(params, batch) -> (loss, grads)`, which computes in its parameters' dtype."""

    function: Callable[[dict[str, np.ndarray], Any], tuple[float, Arrays]]

    def truth(self, params: Mapping[str, np.ndarray], batch: Any) -> Answer:
        """Evaluate the function at float64 parameters. Raises UserError unless its gradients are float64."""
        answer = self.twin(params, batch)
        if narrow := sorted(name for name, g in answer.grads.items() if g.dtype != np.float64):
            raise UserError(
                f"the reference's gradients are not float64 where its parameters are: {', '.join(narrow[:3])}; "
                "the truth has to be computed in FP64"
            )
        return answer

    def twin(self, params: Mapping[str, np.ndarray], batch: Any) -> Answer:
        """Evaluate the function at float32 parameters."""
        loss, grads = self.function(dict(params), batch)
        return Answer(float(loss), {name: np.asarray(g) for name, g in grads.items()})


def array_of(tensor: Any) -> np.ndarray:
    """Copy a tensor's values.

    Dtypes that numpy lacks (bfloat16, 8-bit floats) become float32, which represents them exactly.
    A sharded tensor (DTensor) is gathered first, which is a collective call.
    """
    if not hasattr(tensor, "detach"):
        return np.array(tensor)
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if _in_codes(tensor):
        tensor = tensor.dequantize()
    tensor = tensor.detach()
    if dtype_of(tensor) in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())


def _in_codes(tensor: Any) -> bool:
    """Return whether a tensor's class is that of a library which stores numbers as codes, such as torchao."""
    libraries = [kind for kind in type(tensor).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    return any("dequantize" in vars(kind) for kind in libraries)


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's or an array's dtype: `float32`, `bfloat16` and so on."""
    return str(tensor.dtype).rpartition(".")[2]


def batch_as(batch: Any, dtype: type[np.floating]) -> Any:
    """Copy nested mappings, lists and tuples. Tensors become arrays, and floating-point ones get the dtype `dtype`."""
    if isinstance(batch, Mapping) or hasattr(batch, "items"):
        return {key: batch_as(value, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(batch_as(value, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(batch_as(value, dtype) for value in batch)
    if hasattr(batch, "detach") or isinstance(batch, np.ndarray):
        found = array_of(batch)
        return found.astype(dtype) if found.dtype.kind == "f" else found
    return batch


def unwrapped(optimizer: Any) -> Any:
    """Return the innermost optimizer inside the wrappers of accelerate and Lightning.

    Hooks of a wrapper are not called, because its `step` calls the inner optimizer's.
    """
    while hasattr(optimizer, "optimizer") and hasattr(optimizer.optimizer, "param_groups"):
        optimizer = optimizer.optimizer
    return optimizer


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile."""
    return name.replace("_orig_mod.", "")


def parameters_of(model: Any) -> dict[str, Any]:
    """Return the model's parameters by name, each once.

    Prefixes of DistributedDataParallel, DataParallel and torch.compile are removed. Raises UserError if there are none.
    """
    found = {plain_name(name): p for name, p in model.named_parameters()}
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod
    if type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        found = {name.removeprefix("module."): p for name, p in found.items()}
    if not found:
        raise UserError("the model has no parameters: nothing could be compared")
    return found


def renamed(names: Names, own: Sequence[str]) -> dict[str, str]:
    """Map the model's names to the reference's. Raises UserError for an unknown name, or for two that map to one."""
    if isinstance(names, Mapping):
        if unknown := sorted(set(names) - set(own)):
            raise UserError(
                f"names= maps {unknown[0]}, which is no parameter of the model; it has {', '.join(own[:5])}, …"
            )
        found = {name: names.get(name, name) for name in own}
    else:
        found = {name: names(name) if names else name for name in own}
    for name, theirs in found.items():
        if twice := [other for other in own if other != name and found[other] == theirs]:
            raise UserError(f"names= maps both {name} and {twice[0]} to {theirs}")
    return found


@dataclass(frozen=True)
class Snapshot:
    """Copies of parameters, gradients and optimizer state at one moment, by the model's names.

    moments: kind → name → array, for each array of the optimizer's state but its quantisation tables.
    steps: name → the optimizer's step count.
    groups: name → hyperparameters of its optimizer group.
    coded: names whose optimizer state is stored as 8-bit codes.
    """

    params: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    moments: dict[str, dict[str, np.ndarray]]
    steps: dict[str, float]
    groups: dict[str, dict[str, Any]]
    coded: frozenset[str] = frozenset()


def plainly(kind: str, name: str, tensor: Any, make: Callable[[Any], np.ndarray] = array_of) -> np.ndarray:
    """Read a tensor on a single rank. kind: `weights`, `gradients` or a kind of moment."""
    return make(tensor)


def gradients_of(params: Mapping[str, Any], read: Callable[..., np.ndarray] = plainly) -> dict[str, np.ndarray]:
    """Copy the gradients of all parameters that have one, by name. read: reads a tensor, as `plainly`."""
    return {name: read("gradients", name, p.grad) for name, p in params.items() if p.grad is not None}


def snapshot(
    params: Mapping[str, Any],
    optimizers: Sequence[Any],
    read: Callable[..., np.ndarray] = plainly,
    gradients: bool = True,
) -> Snapshot:
    """Copy all that these optimizers read or write in an update. gradients: copy the gradients too."""
    moments: dict[str, dict[str, np.ndarray]] = {}
    steps: dict[str, float] = {}
    groups: dict[str, dict[str, Any]] = {}
    coded: set[str] = set()
    names = {id(p): name for name, p in params.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            hyper = {key: _number(value) for key, value in group.items() if key != "params"}
            hyper |= {key: getattr(optimizer, key) for key in OF_OPTIMIZER if hasattr(optimizer, key)}
            for p in group["params"]:
                if id(p) not in names:
                    continue
                name = names[id(p)]
                in_fp32 = hyper.get("fused") and dtype_of(p) != "float64" and adam_in_fp32(p)
                groups[name] = {**hyper, IN_FP32: True} if in_fp32 else hyper
                # `get`, because an index would add an entry to the optimizer's defaultdict.
                entry = optimizer.state.get(p) or {}
                if any(_in_codes(value) or f"qmap{kind[-1]}" in entry for kind, value in entry.items()):
                    coded.add(name)
                for kind, value in entry.items():
                    if kind == "step":
                        steps[name] = float(value)
                    elif kind.startswith(("qmap", "absmax")) or not hasattr(value, "shape"):
                        continue
                    elif tuple(value.shape) == tuple(p.shape) or len(value.shape):
                        in_codes = f"qmap{kind[-1]}" in entry
                        make = partial(_from_codes, entry, kind) if in_codes else array_of
                        moments.setdefault(kind, {})[name] = read(kind, name, value, make)
    held = {name: params[name] for name in groups}
    weights = {name: read("weights", name, p) for name, p in held.items()}
    return Snapshot(weights, gradients_of(held, read) if gradients else {}, moments, steps, groups, frozenset(coded))


def _from_codes(entry: Mapping[str, Any], kind: str, _: Any = None) -> np.ndarray:
    """Decode a moment of bitsandbytes, `state1` or `state2`, from its codes, its map and the scale of each block."""
    codes, levels, scale = (array_of(entry[f"{what}{kind[-1]}"]) for what in ("state", "qmap", "absmax"))
    flat = levels[codes.reshape(-1)] * scale.repeat(BLOCK)[: codes.size]
    # For a block of zeros, the library stores the code 0 (which means −0.993) and the scale 0, whose product is −0. The
    # moment was 0.
    return flat.reshape(codes.shape) + np.float32(0)


def share_equal(arrays: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Replace each array that has the same bits in the other mapping by the other's array, to save memory."""
    for name, array in arrays.items():
        if isinstance(array, np.ndarray) and _same_bits(array, others.get(name)):
            arrays[name] = others[name]


def _same_bits(a: np.ndarray, b: Any) -> bool:
    if not isinstance(b, np.ndarray) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


def outside(params: Mapping[str, Any], optimizers: Sequence[Any]) -> tuple[list[str], int]:
    """Return trainable parameters that no optimizer holds, and how many tensors of the optimizers the model lacks."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p) for p in params.values()}
    return [n for n, p in params.items() if p.requires_grad and id(p) not in held], len(held - ours)


def _number(value: Any) -> Any:
    """Convert a hyperparameter that is a tensor (under `capturable`) to a float, also inside a tuple."""
    if isinstance(value, tuple):
        return tuple(_number(x) for x in value)
    return float(value) if hasattr(value, "detach") else value

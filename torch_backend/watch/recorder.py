"""Record each operation of a step below autograd and autocast, and pass the selected ones to a judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.findings import exact
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.turns import Kind
from lockstep.torch_backend.watch import declared
from lockstep.torch_backend.watch.places import Place, Places
from lockstep.torch_backend.watch.recompute import Call

# (number in the list of operations, the call, its results, its place, its name in findings, a note)
Judge = Callable[[int, Call, list[Any], Place, str, str], None]

# Operations that compute nothing: views, and (MAKES) new memory or values for Python.
NAMES_ONLY = frozenset(
    {
        "detach", "alias", "lift_fresh", "lift", "_unsafe_view", "_reshape_alias", "view_as_real", "view_as_complex",
    }
)  # fmt: skip
MAKES = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full",
        "new_empty_strided", "zero", "fill", "_local_scalar_dense", "is_nonzero", "equal", "is_same_size", "sym_size",
        "record_stream", "_assert_async", "_has_compatible_shallow_copy_type", "resize", "set_data",
    }
)  # fmt: skip
PLAIN = (Tensor, nn.Parameter, nn.Buffer)
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
# Operations that torch.autocast keeps in FP32 (aten/src/ATen/autocast_mode.h), by their names below autocast.
KEPT_WIDE = frozenset(
    {
        "_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "native_group_norm", "nll_loss_forward",
        "sum", "mean", "var", "std", "linalg_vector_norm", "norm", "exp", "expm1", "log", "log1p", "log2", "log10",
        "logsumexp", "cumsum", "cumprod", "prod", "pow", "rsqrt", "reciprocal", "softplus", "binary_cross_entropy",
        "mse_loss", "smooth_l1_loss", "huber_loss",
    }
)  # fmt: skip


@dataclass
class Casts:
    """A detector of operations that read a narrowed copy, against the declared precision.

    every: no operation may read a narrower copy (fp32). some: the operations that autocast keeps in FP32 may not. seen:
    number of operations examined. The backward pass mirrors the casts of the forward pass, and is not examined.
    """

    every: bool
    some: bool
    seen: int = 0
    _narrowed: Any = field(default_factory=WeakTensorKeyDictionary)
    _broken: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, precision: Precision, model: nn.Module) -> Casts:
        """Build the detector for a model and a precision; with bf16 weights, no operation is declared to be in FP32."""
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        wide = dtypes == {torch.float32}
        return cls(every=precision == "fp32", some=precision == "bf16" and wide)

    def read(self, name: str, stage: str, tensors: list[Tensor], place: Place) -> None:
        """Check that an operation that is declared to be in FP32 reads no narrowed copy."""
        if place.backward or not (self.every or (self.some and name in KEPT_WIDE)):
            return
        self.seen += 1
        for x in tensors:
            if (made := self._narrowed.get(x)) is not None:
                dtype, line = made
                basis = "precision fp32: nothing is computed from a narrower copy" if self.every else (
                    "autocast: this operation is kept in FP32, and reads no narrower copy"
                )  # fmt: skip
                note = f"{place.line}; it read {_name(x.dtype)}, narrowed from {_name(dtype)} at {line}"
                self._broken.append(exact(stage, place.module, 1, x.numel() or 1, basis, note, "forward"))
                return

    def wrote(self, name: str, view: bool, tensors: list[Tensor], results: list[Tensor], place: Place) -> None:
        """Record which results of an operation are narrowed copies."""
        if place.backward or not (self.every or self.some):
            return
        for x in results:
            if name in ("_to_copy", "copy") and x.dtype in NARROW:
                wide = [t.dtype for t in tensors if t.dtype in (torch.float32, torch.float64)]
                if wide:
                    self._narrowed[x] = wide[0], place.line
            elif view and (made := next((m for t in tensors if (m := self._narrowed.get(t))), None)):
                self._narrowed[x] = made

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each violation; without violations, one for all; nothing if no operation was seen."""
        yield from self._broken
        if self.seen and not self._broken:
            basis = "operations that the declared precision keeps wide read no narrower copy"
            yield exact("operation.casts", "all", 0, self.seen, basis, "", "forward")


class Recorder(TorchDispatchMode):
    """A mode that lists the operations that compute, and passes those in `wanted` to `judge`.

    kinds: the listed operations, in order. read: addresses of the memory that operations read. left_out: reason why
    operations are not listed → their number.
    """

    def __init__(self, places: Places, wanted: set[int], judge: Judge, casts: Casts) -> None:
        super().__init__()
        self.places, self._wanted, self._judge, self.casts = places, wanted, judge, casts
        self.kinds: list[Kind] = []
        self.read: set[int] = set()
        self.left_out: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and record it."""
        kwargs = dict(kwargs or {})
        place = self.places.now()
        if not isinstance(func, OpOverload):
            self.left_out[f"{func}, which is no single operation"] += 1
            return func(*args, **kwargs)
        library, _, name = func._schema.name.partition("::")
        name = name.removesuffix("_")
        stage = f"{library}.{name}"
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        view = func.is_view or name in NAMES_ONLY
        if not view:
            self._reads(name, stage, tensors, place)
        turn = not view and name not in MAKES and bool(tensors) and self._can(func, stage, tensors, args)
        if turn:
            number = len(self.kinds)
            self.kinds.append((stage, "backward" if place.backward else "forward", place.kind, _dtypes(tensors)))
        call = None
        if turn and number in self._wanted:
            kept = tree_map_only(Tensor, _kept if func._schema.is_mutable else Tensor.detach, (args, kwargs))
            call = Call(stage, func, *kept)
        result = func(*args, **kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.casts.wrote(name, view, tensors, results, place)
        if call is not None:
            self._judge(number, call, tree_leaves(result), place, stage, "")
        return result

    def left(self, module: nn.Module, args: Any, result: Any) -> None:
        """Record a module after its forward, if its class declares an operation (declared.py)."""
        stage = declared.name_of(module)
        if not stage or torch._C._current_graph_task_id() != -1 or not isinstance(result, Tensor):
            return
        place = self.places.now()
        tensors = [x for x in (*args, *module.parameters(recurse=False)) if isinstance(x, Tensor)]
        if not tensors or not self._can(None, stage, tensors, ()):
            return
        number = len(self.kinds)
        self.kinds.append((stage, "forward", place.kind, _dtypes(tensors)))
        if number in self._wanted:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                call = declared.call_of(module, args, result)
                if call is not None:
                    note = f"as the module declares: {declared.declares(module)}"
                    self._judge(number, call, [result.detach()], place, stage, note)

    def _reads(self, name: str, stage: str, tensors: list[Tensor], place: Place) -> None:
        self.casts.read(name, stage, tensors, place)
        for x in tensors:
            if type(x) in PLAIN and x.layout == torch.strided:
                self.read.add(x.untyped_storage().data_ptr())

    def _can(self, func: Any, stage: str, tensors: list[Tensor], args: Any) -> bool:
        """Return whether an operation can be judged; if not, count the reason."""
        why = ""
        strange = next((x for x in tensors if type(x) not in PLAIN), None)
        if strange is not None:
            why = f"tensors of class {type(strange).__name__}"
        elif any(x.layout != torch.strided or x.is_complex() or x.is_quantized for x in tensors):
            why = "sparse, complex or quantized tensors"
        elif func is not None and _draws(func, args):
            why = f"{stage} draws random numbers"
        elif func is not None and any(argument.is_out for argument in func._schema.arguments):
            why = f"{stage} with out="
        if why:
            self.left_out[why] += 1
        return not why


def _draws(func: Any, args: Any) -> bool:
    """Return whether an operation draws random numbers; attention without dropout does not."""
    names = [argument.name for argument in func._schema.arguments]
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return not ("dropout_p" in names and (len(args) <= (i := names.index("dropout_p")) or args[i] == 0))


def _kept(x: Tensor) -> Tensor:
    return x.detach().clone()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _dtypes(tensors: list[Tensor]) -> str:
    return " ".join(_name(x.dtype) for x in tensors)

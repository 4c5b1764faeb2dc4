"""AdamW, AdamW with 8-bit moments and Muon, with learning rate and decay by group. Twin: jax_backend/optim.py.

Each parameter group has its own lr and λ (core/model/groups.py). AdamW computes in this order and rounds each operation
to FP32 (torch/optim/adamw.py, foreach; the CPU's fused kernel does the same operations in one pass)::

    p ← p · (1 − lr·λ)
    m ← m + (1 − β₁)(g − m)
    v ← β₂·v + (1 − β₂)·g²
    p ← p − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

On CUDA the fused kernel takes β, λ and lr in FP32 (`fused_adam_in_fp32`), and uses fused multiply-adds::

    m ← β₁·m + (g − β₁·g)        v ← β₂·v + (g² − β₂·g²)        p ← p − (lr·λ)·p

With 8-bit moments (torchao/optim/adam.py, `single_param_adam`), lr, λ and both powers of β are FP32 numbers. The weight
is updated with the FP32 moments, which are then rounded to 8 bits::

    p ← p − (lr·λ)·p
    m ← m + (1 − β₁)(g − m)
    v ← v + (1 − β₂)(g² − v)
    p ← p − lr·(m / (1 − β₁ᵗ)) / (√v / √(1 − β₂ᵗ) + ε)
    m, v ← codes and scales of m, v

bitsandbytes rounds in another order (torch_backend/kernels/bitsandbytes_adamw.py).

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon; in torch.optim.Muon's order) updates matrices, AdamW the
other parameters. As in torch, the momentum is an average; Jordan's sum has the same direction::

    b ← b + (1 − μ)(g − b)
    u = b + (μ − 1)(b − g) with Nesterov, else b
    p ← p · (1 − lr·λ)
    p ← p − lr · 0.2·√max(rows, columns) · orthogonal(u)

The factor gives the update the root mean square of AdamW's updates (Liu et al. 2025, arXiv 2502.16982, equation 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.backend import State
from lockstep.core.components.optimizers import BITSANDBYTES, BITSANDBYTES_8BIT, BLOCK, MUON, TORCHAO_8BIT
from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.model.graph import GROUPS
from lockstep.core.model.groups import group_settings, moment_names, update_rules
from lockstep.core.model.names import groups_of
from lockstep.torch_backend.kernels.bitsandbytes_adamw import (
    bitsandbytes_adamw,
    read_moment,
    written_moment,
)
from lockstep.torch_backend.precision import by_fp32, slow
from lockstep.torch_backend.ranks.sharded_tensors import as_part, local, own_rows, rows_of, whole
from lockstep.torch_backend.tools.import_logging import quiet_import

# Newton–Schulz iteration: the coefficients of the quintic, and the smallest divisor of X (Jordan 2024).
A, B, C, LEAST_NORM = 3.4445, -4.7750, 2.0315, 1e-7
# Number of blocks that are converted to 8-bit codes together: a few MB.
BLOCKS_AT_ONCE = 4096
# Elements that are copied to FP64 at once to compute a norm on the CPU: 2 MB.
NORMED_AT_ONCE = 1 << 18
NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Group = dict[str, Any]


def build_optimizer(config: RunConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Build the run's optimizer over the non-empty groups of core/model/names.py.

    Each torch group has its name under `group`, and the factor on the scheduled learning rate under `lr_factor`.
    """
    groups, known = [], groups_of(config.model)
    group_of = {name: known.get(name) or _group_by_shape(name, p) for name, p in parameters.items()}
    for group in GROUPS:
        members = [p for name, p in parameters.items() if group_of[name] == group]
        settings = group_settings(config, group)
        if members:
            groups.append(
                {
                    "params": members,
                    "group": group,
                    "lr_factor": settings.lr_factor,
                    "weight_decay": settings.weight_decay,
                }
            )
    return BUILDERS[config.optim.name].build(config, groups)


def _group_by_shape(name: str, p: nn.Parameter) -> str:
    """Return the group of a parameter without a canonical name: a candidate's own, or one inside its wrapper."""
    if p.ndim > 1:
        return "matrices"
    return "biases" if name.endswith("bias") else "gains"


def _muon(config: RunConfig, groups: list[Group]) -> torch.optim.Optimizer:
    return MuonAndAdamW(config.optim, groups)


def _adamw(config: RunConfig, groups: list[Group]) -> torch.optim.Optimizer:
    return adamw(config.optim, groups)


def _adamw8bit(config: RunConfig, groups: list[Group]) -> torch.optim.Optimizer:
    # The fp64 policy does not round moments to 8 bits.
    if config.precision.exact:
        return adamw(config.optim, groups)
    if config.optim.eight_bit == "bitsandbytes":
        return bitsandbytes_adamw(config.optim, groups)
    return eight_bit_adamw(config, groups)


def _adamw_in_words(config: RunConfig) -> str:
    return f"AdamW ({'fused' if is_fused(config.optim) else 'foreach'})"


def _muon_in_words(config: RunConfig) -> str:
    dtype = "fp64" if config.precision.exact else config.optim.ns_dtype
    return f"Muon (Newton–Schulz in {dtype}) for matrices, {_adamw_in_words(config)} for the rest"


def _adamw8bit_in_words(config: RunConfig) -> str:
    if config.precision.exact:
        return f"{_adamw_in_words(config)}: fp64 rounds no moments to 8 bits"
    from importlib.metadata import version

    library = config.optim.eight_bit
    number = ".".join(version(library).split("+")[0].split(".")[:2])
    compiled = library == "torchao" and step_is_compiled(config)
    return f"AdamW 8-bit ({library} {number}{', compiled' if compiled else ''})"


@dataclass(frozen=True)
class Builder:
    """A builder of an optimizer.

    build: returns the run's optimizer over torch's parameter groups. words: describes it for the table at start.
    """

    build: Callable[[RunConfig, list[Group]], torch.optim.Optimizer]
    words: Callable[[RunConfig], str]


# Builders by the name in core/components/optimizers.py.
BUILDERS: dict[str, Builder] = {
    "adamw": Builder(_adamw, _adamw_in_words),
    "adamw8bit": Builder(_adamw8bit, _adamw8bit_in_words),
    "muon": Builder(_muon, _muon_in_words),
}


def adamw(optim: OptimConfig, groups: list[Group]) -> torch.optim.AdamW:
    """Return torch's AdamW: fused into one kernel, or foreach, one list operation at a time."""
    fused = is_fused(optim)
    betas = optim.beta1, optim.beta2
    return torch.optim.AdamW(
        groups, lr=optim.peak_lr, betas=betas, eps=optim.eps, weight_decay=0.0, foreach=not fused, fused=fused
    )


@cache
def fused_adam_in_fp32(device: torch.device) -> bool:
    """Return whether torch's fused AdamW takes hyperparameters in FP32 on a device, found by an update of one element.

    The CUDA kernel takes FP32 (aten/src/ATen/native/cuda/fused_adam_utils.cuh), the CPU kernel FP64. In FP32,
    1 − 0.999 is smaller by a relative 1.3e-5.
    """
    as_float: dict[str, Any] = {"dtype": torch.float32, "device": device}
    parameter, gradient, first, second = torch.tensor([[0.0], [1.0], [0.0], [0.0]], **as_float)
    with torch.no_grad():
        torch._fused_adamw_(
            [parameter], [gradient], [first], [second], [], [torch.ones((), **as_float)], lr=0.0, beta1=0.9,
            beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    return second.item() < 1e-3 * (1 - 5e-6)


def takes_fp32(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a fused AdamW whose kernel takes its hyperparameters in FP32."""
    first = next((p for group in optimizer.param_groups if group.get("fused") for p in group["params"]), None)
    return first is not None and first.dtype != torch.float64 and fused_adam_in_fp32(first.device)


def is_fused(optim: OptimConfig) -> bool:
    """Return whether AdamW is one fused kernel. `auto` is fused on every supported device."""
    return optim.fused is not False


def eight_bit_adamw(config: RunConfig, groups: list[Group]) -> torch.optim.Optimizer:
    """Return torchao's AdamW8bit. Inductor compiles its step if the run's programs are compiled with Inductor.

    A compiled step is torchao's own. In eager mode, torchao's function is called for a range of blocks at a time,
    because for a whole parameter it allocates a dozen tensors of its size, some of them int64. The update is
    element-wise within a block, so the results are the same.
    """
    with quiet_import():
        from torchao.optim import AdamW8bit
        from torchao.optim.adam import single_param_adam

    class Adam(AdamW8bit):
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            if step_is_compiled(config):
                return super().step(closure)
            for group in self.param_groups:
                rest = (None, group["lr"], *group["betas"], group["weight_decay"], group["eps"], self.is_adamw, False)
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state["exp_avg"] = self._new_buffer(p, True)
                        state["exp_avg_sq"] = self._new_buffer(p, False)
                    state["step"] += 1
                    tensors = [local(one) for one in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
                    for weight, grad, mean, square in _in_stretches(tensors):
                        single_param_adam(weight, grad, state["step"], mean, square, *rest)
            return None

    optim = config.optim
    optimizer: torch.optim.Optimizer = Adam(
        groups, lr=optim.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, block_size=BLOCK
    )
    return optimizer


def _in_stretches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield flat views of ranges of tensors of one shape; if one is not contiguous, yield the whole tensors once."""
    if not all(one.is_contiguous() for one in tensors if not in_codes(one)):
        yield list(tensors)
        return
    at_once = BLOCK * BLOCKS_AT_ONCE
    for start in range(0, tensors[0].numel(), at_once):
        yield [_stretch(one, slice(start, start + at_once)) for one in tensors]


def _stretch(tensor: Any, which: slice) -> Any:
    """Return a flat view of a range of elements; in an 8-bit tensor the range consists of whole blocks."""
    if not in_codes(tensor):
        return tensor.view(-1)[which]
    scale = tensor.scale[which.start // BLOCK : which.stop // BLOCK]
    return type(tensor)(tensor.codes.view(-1)[which], scale, tensor.qmap, tensor.signed, tensor.dtype)


def step_is_compiled(config: RunConfig) -> bool:
    """Return whether torchao's step is compiled; torchao supports only Inductor."""
    return config.compile.enabled and config.compile.backend == "inductor"


class Muon(torch.optim.Optimizer):
    """Muon for matrices (rows, columns), one after another."""

    def __init__(self, optim: OptimConfig, groups: list[Group]) -> None:
        keys = ("momentum", "nesterov", "ns_steps", "ns_dtype")
        super().__init__(groups, {"lr": optim.peak_lr} | {key: getattr(optim, key) for key in keys})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient, once; `closure` is not called."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                grad, buffer = local(p.grad), local(self.state[p]["momentum_buffer"])
                buffer.lerp_(grad, 1 - momentum)
                # Each rank computes the whole update of a sharded matrix, and applies its own rows.
                update = whole(as_part(grad.lerp(buffer, momentum) if group["nesterov"] else buffer, like=p))
                # The fp64 policy iterates in FP64.
                dtype = torch.float64 if p.dtype == torch.float64 else NS_DTYPES[group["ns_dtype"]]
                made = orthogonal(update.to(dtype), group["ns_steps"])
                part = local(p)
                part.mul_(1 - lr * group["weight_decay"])
                part.add_(made[rows_of(p)].to(p.dtype), alpha=-lr * self.length(*p.shape))

    def length(self, rows: int, columns: int) -> float:
        """Return the factor on lr that gives an update the root mean square of AdamW's."""
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """Move the singular values of x (rows, columns) near 1 by Newton–Schulz iteration in the dtype of x.

    X ← a·X + (b·G + c·G²)·X with G = X·Xᵀ, from X / ‖X‖; X is transposed if it has more rows than columns. Each of the
    three products is one call that includes the sum, and is rounded to the dtype once. The norm is not rounded to the
    dtype. torch.optim.Muon rounds it to bf16: that changes all elements by up to 0.4 %, and by another 0.4 % if two
    sums round to different sides of a tie.
    """
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dtype=wide)
    x = (x.to(wide) / norm.clamp(min=LEAST_NORM)).to(x.dtype)
    for _ in range(steps):
        gram = by_fp32(x, x.T) if slow(x) else x @ x.T
        x = _add_scaled_product(x, _add_scaled_product(gram, gram, gram, B, C), x, A, 1.0)
    return x.T if tall else x


def _add_scaled_product(total: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta·total + alpha·left·right, rounded once."""
    if slow(total):
        return torch.addmm(total.float(), left.float(), right.float(), beta=beta, alpha=alpha).to(total.dtype)
    return torch.addmm(total, left, right, beta=beta, alpha=alpha)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the group `matrices` and AdamW for the others: two optimizers with one list of groups and one state."""

    def __init__(self, optim: OptimConfig, groups: list[Group]) -> None:
        matrices = [group for group in groups if group["group"] == "matrices"]
        self.optimizers = (
            Muon(optim, matrices),
            adamw(optim, [group for group in groups if group["group"] != "matrices"]),
        )
        # This optimizer and the two inside it share the group objects and the state.
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        for one in self.optimizers:
            one.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the step of both optimizers; `closure` is not called."""
        for one in self.optimizers:
            one.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate to the scheduled rate `lr` times the group's factor."""
    for group in optimizer.param_groups:
        rate = lr * group["lr_factor"]
        if isinstance(group["lr"], Tensor):  # torchao's
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def in_words(config: RunConfig) -> str:
    """Describe the optimizer of `build_optimizer`, for the table at start."""
    return BUILDERS[config.optim.name].words(config)


def global_norm(grads: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients, a float64 scalar, accumulated in FP64.

    `torch.nn.utils.get_total_norm` accumulates in FP32. On the CPU its error is up to 2,400 ulp (3e-4) for a million
    elements, because squares below half an ulp of the running sum are lost.
    """
    norms = [norm for g in grads for norm in (_norms_of_parts(g) if g.is_cpu else [_norm(g)])]
    return _norm(torch.stack(norms))


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _norms_of_parts(g: Tensor) -> list[Tensor]:
    # On the CPU torch copies a tensor to FP64 before it computes the norm. For 110M elements that takes about twice as
    # long as copies of parts into one buffer.
    wide = g.new_empty(min(g.numel(), NORMED_AT_ONCE), dtype=torch.float64)
    return [_norm(wide[: len(part)].copy_(part)) for part in g.flatten().split(NORMED_AT_ONCE)]


def clip_coefficient(optim: OptimConfig, norm: Tensor) -> Tensor:
    """Return min(1, limit / (norm + 1e-6)), with 1e-6 as in `torch.nn.utils.clip_grad_norm_`; 1 without clipping."""
    if not optim.clip_norm:
        return torch.ones_like(norm)
    return (optim.clip_norm / (norm + 1e-6)).clamp(max=1.0)


def read_moments(
    config: RunConfig, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return moments by kind and canonical name, 8-bit ones decoded to float32; zeros before the first step."""
    return {
        kind: {name: moment_of(optimizer, parameters[name], kind) for name in names}
        for kind, names in moment_names(config).items()
    }


def moment_of(optimizer: torch.optim.Optimizer, p: nn.Parameter, kind: str) -> Tensor:
    """Return one moment of a parameter; an 8-bit one is decoded to float32."""
    value = kept_moment(optimizer, p, kind)
    part = local(value)
    return as_part(numbers_of(part), like=p) if in_codes(part) else value


def kept_moment(optimizer: torch.optim.Optimizer, p: nn.Parameter, kind: str) -> Tensor:
    """Return one moment of a parameter as the optimizer stores it: torchao's stays codes and scales.

    bitsandbytes' is decoded to FP32. Before the first step the moment is zeros.
    """
    entry = optimizer.state[p]
    if "state1" in entry:  # bitsandbytes'
        return read_moment(entry, kind)
    value: Tensor = entry[kind] if kind in entry else torch.zeros_like(p)
    return value.detach()


def begun_moment(config: RunConfig, optimizer: torch.optim.Optimizer, name: str, p: nn.Parameter, kind: str) -> Tensor:
    """Return `kept_moment`; before the first step, the zeros that a load would store, encoded for torchao."""
    if kind not in optimizer.state[p] and update_rules(config)[name] is TORCHAO_8BIT:
        return as_part(eight_bits(torch.zeros_like(local(p.detach())), signed=kind == "exp_avg"), like=p)
    return kept_moment(optimizer, p, kind)


def in_codes(tensor: Tensor) -> bool:
    """Return whether a tensor is torchao's 8-bit tensor of codes and scales."""
    return hasattr(tensor, "codes")


def numbers_of(tensor: Any) -> Any:
    """Decode torchao's 8-bit tensor to float32; return any other tensor unchanged."""
    return tensor.dequantize() if in_codes(tensor) else tensor


def update_counts(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the optimizer's count of updates of each parameter, by name; Muon has no counts."""
    entries = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    return {name: int(entry["step"]) for name, entry in entries.items() if "step" in entry}


def write_moments(
    config: RunConfig, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: State
) -> None:
    """Write a canonical state's moments and step count into the optimizer. Raises KeyError for a missing name."""
    put_moments(
        config,
        optimizer,
        parameters,
        state.updates,
        lambda kind, name: np.array(own_rows(state.optimizer[kind], name, parameters[name])),
    )


def put_moments(
    config: RunConfig,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    updates: int,
    read: Callable[[str, str], np.ndarray],
) -> None:
    """Write moments and a count of updates into the optimizer.

    read: (kind, name) → this rank's part of that moment.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    rules = update_rules(config)
    for name, p in parameters.items():
        # A fused step keeps its count on the device.
        count = torch.tensor(float(updates), device=p.device if fused else "cpu")
        rule = rules[name]
        by_library = rule in (BITSANDBYTES, BITSANDBYTES_8BIT)
        entry: dict[str, Any] = {} if rule is MUON else {"step": updates if by_library else count}
        for kind in rule.moments:
            value = torch.from_numpy(read(kind, name)).to(device=p.device, dtype=p.dtype)
            if by_library:
                entry |= written_moment(optimizer, value, kind, rule is BITSANDBYTES_8BIT)
            else:
                value = eight_bits(value, signed=kind == "exp_avg") if rule is TORCHAO_8BIT else value
                entry[kind] = as_part(value, like=p)
        optimizer.state[p] = entry


def eight_bits(value: Tensor, signed: bool) -> Tensor:
    """Encode `value` (float32) as torchao's 8-bit tensor; a value that was decoded from one is encoded exactly.

    The scale of a block is its largest magnitude, which has the code of 1. But the smallest code of a signed moment is
    −0.993, not −1. If the largest magnitude is negative, the decoded block has a smaller magnitude than its scale. Then
    the scale is that magnitude / 0.993, or one of the two numbers next to it, whichever reproduces the whole block. A
    block that no scale reproduces is quantised as torchao does.
    """
    with quiet_import():
        from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros(value.shape, signed, BLOCK, value.device, value.dtype)
    nearest = _Nearest(state.qmap)
    blocks, codes = value.view(-1, BLOCK), state.codes.view(-1, BLOCK)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        which = slice(start, start + BLOCKS_AT_ONCE)
        codes[which], state.scale[which] = _in_eight_bits(blocks[which], nearest, signed)
    result: Tensor = state
    return result


class _Nearest:
    """A table of the nearest code by a number's leading bits, thirty times as fast as a search of the codes.

    Numbers with equal leading bits differ by at most 0.1 %, and adjacent codes by at least 0.35 %. A number close to a
    code gets that code. A number in the middle between two codes may get either of them.
    """

    # Number of low bits of a float32 that the table ignores; 18 bits stay, 9 of them of the fraction.
    SHIFT = 14

    def __init__(self, qmap: Tensor) -> None:
        self.qmap = qmap
        first = torch.arange(1 << (32 - self.SHIFT), dtype=torch.int32, device=qmap.device) << self.SHIFT
        middle = (first + (1 << (self.SHIFT - 1))).view(torch.float32).nan_to_num(0.0)
        self._codes = torch.bucketize(middle, (qmap[:-1] + qmap[1:]) / 2, out_int32=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the codes of float32 numbers, int32, flat."""
        leading = x.contiguous().view(torch.int32).view(-1) >> self.SHIFT
        return self._codes.index_select(0, leading.bitwise_and_((1 << (32 - self.SHIFT)) - 1))


def _in_eight_bits(blocks: Tensor, nearest: _Nearest, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes (uint8, (N, BLOCK)) and scales (N,) of blocks (N, BLOCK).

    Each candidate for the scale is tried on the blocks that no earlier candidate reproduces. With the right scale, the
    numbers of a block lie at codes, where `nearest` is exact.
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    qmap = nearest.qmap
    scaled, scale = scale_tensor(blocks, BLOCK)
    stretched = scale / -qmap[0] if signed else scale
    up, down = (stretched.nextafter(torch.full_like(stretched, end)) for end in (math.inf, 0.0))
    codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=blocks.device)
    left = torch.arange(len(blocks), device=blocks.device)
    for tried in (scale.clone(), stretched, up, down) if signed else (scale.clone(),):
        wanted, by = blocks[left], tried[left, None]
        found = nearest((wanted / by).float())
        exact = ((qmap.index_select(0, found).view_as(wanted) * by) == wanted).all(1)
        done = left[exact]
        codes[done], scale[done] = found.view_as(wanted)[exact].to(torch.uint8), tried[done]
        left = left[~exact]
        if not len(left):
            return codes, scale
    codes[left] = quantize_8bit_with_qmap(scaled[left], qmap)
    return codes, scale

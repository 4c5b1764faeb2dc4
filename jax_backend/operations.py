"""ATen operations of a transformer, forward and backward, by their formulas: the truth of `watch(operations=True)`.

Each takes an operation's arguments in the order and with the names of its schema (native_functions.yaml of torch), with
arrays for tensors, and computes in the dtype of its floating arrays. It returns an array for each of the operation's
results, or None for one that it does not state. An overload that it does not know raises NotImplementedError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import erf

Result = tuple[Array | None, ...]
Operation = Callable[..., Any]

OPERATIONS: dict[str, Operation] = {}
# torch.nn.functional's reductions by their numbers in a schema.
NONE, MEAN = 0, 1


# Programs that are kept compiled: those of a step of a large model, in two dtypes.
PROGRAMS = 4096


def operation(f: Operation) -> Operation:
    """Register a formula under its operation's name, compiled, on the CPU, with x64 and full products."""

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> tuple[np.ndarray | None, ...]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, np.ndarray)]
        others = tuple(ARRAY if isinstance(x, np.ndarray) else x for x in leaves)
        with (
            jax.enable_x64(True),
            jax.default_matmul_precision("highest"),
            jax.default_device(jax.devices("cpu")[0]),
        ):
            found = _program(f, tree, others, tuple(map(type, others)))(arrays)
            return tuple(None if x is None else np.asarray(x) for x in found)

    OPERATIONS[f.__name__] = run
    return f


# Where an array stands among the arguments that a program is compiled for.
ARRAY = object()


@lru_cache(maxsize=PROGRAMS)
def _program(f: Operation, tree: Any, others: tuple[Any, ...], _: tuple[type, ...]) -> Callable[[list[Any]], Result]:
    """Compile a formula for its arguments but arrays. Their types belong to the key: 1 and 1.0 are equal."""

    def call(arrays: list[Array]) -> Result:
        todo = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(todo) if x is ARRAY else x for x in others])
        found = f(*args, **kwargs)
        return found if isinstance(found, tuple) else (found,)

    return jax.jit(call)


def _axes(dim: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return axes as JAX takes them: all for None and for an empty list."""
    if dim is None:
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim) or None


# Arithmetic


@operation
def add(self: Any, other: Any, *, alpha: float = 1) -> Any:
    """Return self + alpha·other."""
    return jnp.add(self, other if alpha == 1 else other * alpha)


@operation
def sub(self: Any, other: Any, *, alpha: float = 1) -> Any:
    """Return self − alpha·other."""
    return jnp.subtract(self, other if alpha == 1 else other * alpha)


@operation
def rsub(self: Any, other: Any, alpha: float = 1) -> Any:
    """Return other − alpha·self."""
    return jnp.subtract(other, self if alpha == 1 else self * alpha)


@operation
def mul(self: Any, other: Any) -> Any:
    """Return self·other."""
    return jnp.multiply(self, other)


@operation
def div(self: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Return self / other."""
    if rounding_mode is not None:
        raise NotImplementedError(rounding_mode)
    return jnp.divide(self, other)


@operation
def pow(self: Any, exponent: Any) -> Any:
    """Return self to the power of exponent; whole powers by products, as a negative base has no logarithm."""
    if isinstance(exponent, (int, float)) and float(exponent).is_integer():
        return jnp.power(self, int(exponent)) if abs(exponent) > 3 else jax.lax.integer_pow(self, int(exponent))
    return jnp.power(self, exponent)


@operation
def neg(self: Array) -> Array:
    """Return −self."""
    return -self


@operation
def exp(self: Array) -> Array:
    """Return e to the power of self."""
    return jnp.exp(self)


@operation
def log(self: Array) -> Array:
    """Return the natural logarithm."""
    return jnp.log(self)


@operation
def sqrt(self: Array) -> Array:
    """Return the square root."""
    return jnp.sqrt(self)


@operation
def rsqrt(self: Array) -> Array:
    """Return 1 / √self."""
    return 1 / jnp.sqrt(self)


@operation
def reciprocal(self: Array) -> Array:
    """Return 1 / self."""
    return 1 / self


@operation
def sin(self: Array) -> Array:
    """Return the sine."""
    return jnp.sin(self)


@operation
def cos(self: Array) -> Array:
    """Return the cosine."""
    return jnp.cos(self)


@operation
def sum(self: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    """Sum over axes; over all for none."""
    return jnp.sum(self, axis=_axes(dim), keepdims=keepdim)


@operation
def mean(self: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    """Return the mean over axes; over all for none."""
    return jnp.mean(self, axis=_axes(dim), keepdims=keepdim)


@operation
def linalg_vector_norm(
    self: Array, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    """Return the L2 norm over axes."""
    if ord != 2:
        raise NotImplementedError(f"ord={ord}")
    return jnp.sqrt(jnp.sum(self * self, axis=_axes(dim), keepdims=keepdim))


# Products


@operation
def mm(self: Array, mat2: Array) -> Array:
    """Return self @ mat2."""
    return self @ mat2


@operation
def bmm(self: Array, mat2: Array) -> Array:
    """Return self @ mat2 for each of a batch."""
    return self @ mat2


@operation
def addmm(self: Array, mat1: Array, mat2: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    """Return beta·self + alpha·(mat1 @ mat2)."""
    return beta * self + alpha * (mat1 @ mat2)


@operation
def baddbmm(self: Array, batch1: Array, batch2: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    """Return beta·self + alpha·(batch1 @ batch2) for each of a batch; with beta 0, self is not read."""
    product = alpha * (batch1 @ batch2)
    return product if beta == 0 else beta * self + product


# Softmax and loss


@operation
def _softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    """Return exp(x) / Σ exp(x)."""
    return jax.nn.softmax(self, axis=dim)


@operation
def _log_softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    """Return x − log Σ exp(x)."""
    return jax.nn.log_softmax(self, axis=dim)


@operation
def _softmax_backward_data(grad_output: Array, output: Array, dim: int, input_dtype: Any, operands: str = "") -> Array:
    """Return y·(g − Σ g·y). operands: the dtype of the products g·y, which torch's CUDA kernel is given as a tensor.

    Source: aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`.
    """
    product = _as_operand(grad_output * output, operands)
    return product - output * jnp.sum(product, axis=dim, keepdims=True)


@operation
def _log_softmax_backward_data(grad_output: Array, output: Array, dim: int, input_dtype: Any) -> Array:
    """Return g − exp(y)·Σ g."""
    return grad_output - jnp.exp(output) * jnp.sum(grad_output, axis=dim, keepdims=True)


def _targets(self: Array, target: Array, weight: Array | None, ignore_index: int) -> tuple[Array, Array]:
    """Return the class of each row, and its weight: zero where the row is ignored."""
    if self.ndim != 2:
        raise NotImplementedError("one row without a batch")
    counted = target != ignore_index
    classes = jnp.where(counted, target, 0)
    weights = jnp.ones(self.shape[1], self.dtype) if weight is None else weight
    return classes, jnp.where(counted, weights[classes], 0)


@operation
def nll_loss_forward(self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int) -> Result:
    """Return −Σ w·x at the targets, over Σ w where it is a mean, and Σ w."""
    classes, weights = _targets(self, target, weight, ignore_index)
    losses = -weights * jnp.take_along_axis(self, classes[:, None], 1)[:, 0]
    if reduction == NONE:
        return losses, None
    total = jnp.sum(weights)
    return jnp.sum(losses) / (total if reduction == MEAN else 1), total


@operation
def nll_loss_backward(
    grad_output: Array, self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int,
    total_weight: Array,
) -> Array:  # fmt: skip
    """Return −g·w at the targets, over Σ w where the loss is a mean; zero elsewhere."""
    classes, weights = _targets(self, target, weight, ignore_index)
    rows = -weights * (grad_output / total_weight if reduction == MEAN else grad_output)
    return jnp.zeros_like(self).at[jnp.arange(self.shape[0]), classes].set(rows)


# Norms


def _last(x: Array, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(normalized_shape), x.ndim))


@operation
def native_layer_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> Result:
    """Return (x − mean)·rstd·weight + bias, the mean, and rstd = 1 / √(variance + eps)."""
    axes = _last(input, normalized_shape)
    mean = jnp.mean(input, axis=axes, keepdims=True)
    rstd = 1 / jnp.sqrt(jnp.mean((input - mean) ** 2, axis=axes, keepdims=True) + eps)
    y = (input - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


@operation
def native_layer_norm_backward(
    grad_out: Array, input: Array, normalized_shape: Sequence[int], mean: Array, rstd: Array,
    weight: Array | None, bias: Array | None, output_mask: Sequence[bool],
) -> Result:  # fmt: skip
    """Return the gradients of x, weight and bias, with x̂ = (x − mean)·rstd and h = g·weight.

    dx = rstd·(h − mean(h) − x̂·mean(h·x̂)), dweight = Σ g·x̂, dbias = Σ g.
    """
    axes = _last(input, normalized_shape)
    rows = tuple(range(input.ndim - len(normalized_shape)))
    x = (input - mean) * rstd
    h = grad_out if weight is None else grad_out * weight
    inner = jnp.mean(h, axis=axes, keepdims=True) + x * jnp.mean(h * x, axis=axes, keepdims=True)
    dweight = None if weight is None else jnp.sum(grad_out * x, axis=rows)
    return rstd * (h - inner), dweight, None if bias is None else jnp.sum(grad_out, axis=rows)


@operation
def _fused_rms_norm(input: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None) -> Result:
    """Return x·rstd·weight, and rstd = 1 / √(mean(x²) + eps)."""
    if eps is None:
        raise NotImplementedError("eps is that of the input's dtype")
    axes = _last(input, normalized_shape)
    rstd = 1 / jnp.sqrt(jnp.mean(input**2, axis=axes, keepdims=True) + eps)
    y = input * rstd
    return (y if weight is None else y * weight), rstd


@operation
def _fused_rms_norm_backward(
    grad_out: Array, input: Array, normalized_shape: Sequence[int], rstd: Array, weight: Array | None,
    output_mask: Sequence[bool],
) -> Result:  # fmt: skip
    """Return the gradients of x and weight, with h = g·weight: dx = rstd·h − x·rstd³·mean(h·x)."""
    axes = _last(input, normalized_shape)
    rows = tuple(range(input.ndim - len(normalized_shape)))
    h = grad_out if weight is None else grad_out * weight
    dx = rstd * h - input * rstd**3 * jnp.mean(h * input, axis=axes, keepdims=True)
    return dx, None if weight is None else jnp.sum(grad_out * input * rstd, axis=rows)


# Activations

ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "none":
        return x * (1 + erf(x / math.sqrt(2))) / 2
    return x * (1 + jnp.tanh(ROOT * (x + CUBE * x**3))) / 2


@operation
def gelu(self: Array, *, approximate: str = "none") -> Array:
    """Return x·Φ(x), or its approximation by tanh (Hendrycks and Gimpel 2016)."""
    return _gelu(self, approximate)


@operation
def gelu_backward(grad_output: Array, self: Array, *, approximate: str = "none") -> Array:
    """Return g times the derivative of GELU."""
    x = self
    if approximate == "none":
        cdf, pdf = (1 + erf(x / math.sqrt(2))) / 2, jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return grad_output * (cdf + x * pdf)
    t = jnp.tanh(ROOT * (x + CUBE * x**3))
    return grad_output * ((1 + t) / 2 + x * (1 - t * t) / 2 * ROOT * (1 + 3 * CUBE * x * x))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


@operation
def silu(self: Array) -> Array:
    """Return x·σ(x)."""
    return self * _sigmoid(self)


@operation
def silu_backward(grad_output: Array, self: Array) -> Array:
    """Return g·σ(x)·(1 + x·(1 − σ(x)))."""
    s = _sigmoid(self)
    return grad_output * s * (1 + self * (1 - s))


@operation
def sigmoid(self: Array) -> Array:
    """Return 1 / (1 + exp(−x))."""
    return _sigmoid(self)


@operation
def sigmoid_backward(grad_output: Array, output: Array) -> Array:
    """Return g·y·(1 − y)."""
    return grad_output * output * (1 - output)


@operation
def tanh(self: Array) -> Array:
    """Return the hyperbolic tangent."""
    return jnp.tanh(self)


@operation
def tanh_backward(grad_output: Array, output: Array) -> Array:
    """Return g·(1 − y²)."""
    return grad_output * (1 - output * output)


@operation
def relu(self: Array) -> Array:
    """Return max(x, 0)."""
    return jnp.maximum(self, 0)


@operation
def threshold_backward(grad_output: Array, self: Array, threshold: float) -> Array:
    """Return g where x is above the threshold, else zero."""
    return jnp.where(self > threshold, grad_output, 0)


# Attention


def _heads(q: Array, k: Array) -> int:
    """Return how many query heads share a key head."""
    return q.shape[1] // k.shape[1]


def _weights(q: Array, k: Array, causal: bool, mask: Array | None, scale: float | None) -> tuple[Array, Array, float]:
    """Return softmax weights and log-sum-exp of (B, H, S, E) queries and keys, and the scale of their products."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = jnp.einsum("bhse,bhte->bhst", q, k) * factor
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    powers = jnp.exp(scores - top)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers / total, (top + jnp.log(total))[..., 0], factor


def _as_operand(x: Array, operands: str) -> Array:
    """Round the operand of a product to its dtype, where one is named, and go on in the dtype of x.

    XLA takes a conversion there and back out of a program, and leaves `reduce_precision`.
    """
    if not operands:
        return x
    kept = jnp.finfo(operands)
    return jax.lax.reduce_precision(x, kept.nexp, kept.nmant)


@operation
def _scaled_dot_product_flash_attention_for_cpu(
    query: Array, key: Array, value: Array, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Array | None = None, scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return softmax(q·kᵀ·scale + mask)·v of (B, H, S, E), and the log-sum-exp of each row.

    operands: of the second product, weights that are not yet divided by their sum, as flash attention rounds them.
    """
    if dropout_p:
        raise NotImplementedError("dropout")
    groups = _heads(query, key)
    key, value = (jnp.repeat(x, groups, 1) for x in (key, value))
    weights, lse, _ = _weights(query, key, is_causal, attn_mask, scale)
    top = jnp.max(weights, axis=-1, keepdims=True)
    return top * (_as_operand(weights / top, operands) @ value), lse


def _weights_and_scores_backward(
    grad: Array, query: Array, key: Array, value: Array, bias: Array | None, out: Array, causal: bool,
    scale: float | None, dropout: float, operands: str,
) -> tuple[Array, Array, float]:  # fmt: skip
    """Return the weights P, dS = P·(g·vᵀ − Σ g·out), both rounded as operands of products, and the scores' scale.

    Shapes: grad, query, out (B, H, S, E); key (B, H, T, E), repeated for the query heads; value (B, G, T, E), G a
    divisor of H; P and dS (B, H, S, T). Raises NotImplementedError under dropout.
    """
    if dropout:
        raise NotImplementedError("dropout")
    weights, _, factor = _weights(query, key, causal, bias, scale)
    value = jnp.repeat(value, _heads(query, value), 1)
    inner = grad @ value.swapaxes(-1, -2) - jnp.sum(grad * out, axis=-1, keepdims=True)
    return _as_operand(weights, operands), _as_operand(weights * inner, operands), factor


@operation
def _scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out: Array, query: Array, key: Array, value: Array, out: Array, logsumexp: Array, dropout_p: float,
    is_causal: bool, *, attn_mask: Array | None = None, scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return the gradients of q, k and v, with P the weights: dv = Pᵀ·g, dS = P·(g·vᵀ − Σ g·out), dq = dS·k·scale.

    operands: the dtype of P and dS in products, and in which torch's kernel sums the products of blocks of queries, or
    for dq of keys, each of them rounded before it is scaled.
    """
    groups = _heads(query, key)
    key = jnp.repeat(key, groups, 1)
    weights, ds, factor = _weights_and_scores_backward(
        grad_out, query, key, value, attn_mask, out, is_causal, scale, dropout_p, operands
    )
    length = query.shape[2]
    rows = next(size for least, size in QUERIES if length >= least) if operands else length
    dq = _in_blocks(ds, key, 1, KEYS if operands else key.shape[2], factor, operands)
    dk = _in_blocks(ds.swapaxes(-1, -2), query, groups, rows, factor, operands)
    dv = _in_blocks(weights.swapaxes(-1, -2), grad_out, groups, rows, 1.0, operands)
    return dq, dk, dv


def _flash(
    query: Array, key: Array, value: Array, bias: Array | None, causal: bool, scale: float | None, dropout: float,
    operands: str,
) -> tuple[Array, Array]:  # fmt: skip
    """Return what CUDA's attention kernels do, (B, H, S, E), and the log-sum-exp (B, H, S); as on the CPU."""
    if causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError("a causal mask of queries and keys of other lengths")
    out, lse = _scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, attn_mask=bias, scale=scale, operands=operands
    )
    return out, lse


def _flash_backward(
    grad: Array, query: Array, key: Array, value: Array, bias: Array | None, out: Array, causal: bool,
    scale: float | None, dropout: float, operands: str,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the gradients of q, k and v. operands: the dtype of P and dS in products, which are summed in FP32."""
    groups = _heads(query, key)
    key = jnp.repeat(key, groups, 1)
    weights, ds, factor = _weights_and_scores_backward(
        grad, query, key, value, bias, out, causal, scale, dropout, operands
    )
    dq = factor * (ds @ key)
    dk, dv = factor * (ds.swapaxes(-1, -2) @ query), weights.swapaxes(-1, -2) @ grad
    dk, dv = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq, dk, dv


@operation
def _scaled_dot_product_flash_attention(
    query: Array, key: Array, value: Array, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return softmax(q·kᵀ·scale)·v of (B, H, S, E), and the log-sum-exp of each row."""
    return *_flash(query, key, value, None, is_causal, scale, dropout_p, operands), *[None] * 7


@operation
def _scaled_dot_product_flash_attention_backward(
    grad_out: Array, query: Array, key: Array, value: Array, out: Array, logsumexp: Array, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *,
    scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return the gradients of q, k and v."""
    return _flash_backward(grad_out, query, key, value, None, out, is_causal, scale, dropout_p, operands)


@operation
def _scaled_dot_product_cudnn_attention(
    query: Array, key: Array, value: Array, attn_bias: Array | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return softmax(q·kᵀ·scale + bias)·v of (B, H, S, E), and the log-sum-exp of each row, (B, H, S, 1)."""
    out, lse = _flash(query, key, value, attn_bias, is_causal, scale, dropout_p, operands)
    return out, lse[..., None] if compute_log_sumexp else None, *[None] * 7


@operation
def _scaled_dot_product_cudnn_attention_backward(
    grad_out: Array, query: Array, key: Array, value: Array, out: Array, logsumexp: Array, philox_seed: Any,
    philox_offset: Any, attn_bias: Array | None, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, *, scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return the gradients of q, k and v."""
    return _flash_backward(grad_out, query, key, value, attn_bias, out, is_causal, scale, dropout_p, operands)


@operation
def _scaled_dot_product_efficient_attention(
    query: Array, key: Array, value: Array, attn_bias: Array | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return softmax(q·kᵀ·scale + bias)·v of (B, H, S, E); its log-sum-exp is padded with numbers that are not read."""
    out, _ = _flash(query, key, value, attn_bias, is_causal, scale, dropout_p, operands)
    return out, None, None, None


@operation
def _scaled_dot_product_efficient_attention_backward(
    grad_out_: Array, query: Array, key: Array, value: Array, attn_bias: Array | None, out: Array, logsumexp: Array,
    philox_seed: Any, philox_offset: Any, dropout_p: float, grad_input_mask: Any, is_causal: bool = False, *,
    scale: float | None = None, operands: str = "",
) -> Result:  # fmt: skip
    """Return the gradients of q, k and v; none of a bias, for which a mask has no use."""
    return *_flash_backward(grad_out_, query, key, value, attn_bias, out, is_causal, scale, dropout_p, operands), None


# Blocks of torch's kernel on the CPU (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp): of queries, by the least
# length that has them, and of keys.
QUERIES, KEYS = ((768, 256), (192, 64), (0, 32)), 512


def _in_blocks(a: Array, b: Array, groups: int, size: int, factor: float, operands: str) -> Array:
    """Return factor·(a @ b), summed over the heads of a group, and over blocks of the axis between a and b."""
    total = jnp.zeros((), a.dtype)
    for head, at in itertools.product(range(groups), range(0, a.shape[-1], size)):
        left, right = a[:, head::groups, :, at : at + size], b[:, head::groups, at : at + size]
        total = _as_operand(total + factor * _as_operand(left @ right, operands), operands)
    return total


# Tables, and what moves numbers


@operation
def embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    """Return rows of a table."""
    return weight[indices]


@operation
def embedding_dense_backward(
    grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    """Sum the gradients of each row's uses."""
    if scale_grad_by_freq:
        raise NotImplementedError("scale_grad_by_freq")
    width = grad_output.shape[-1]
    flat, rows = indices.reshape(-1), grad_output.reshape(-1, width)
    rows = jnp.where((flat == padding_idx)[:, None], 0, rows)
    return jnp.zeros((num_weights, width), grad_output.dtype).at[flat].add(rows)


@operation
def _to_copy(self: Array, **_: Any) -> Array:
    """Return the same numbers; the caller rounds them to the result's dtype."""
    return self


@operation
def clone(self: Array, **_: Any) -> Array:
    """Return the same numbers."""
    return self


@operation
def copy(self: Array, src: Array, non_blocking: bool = False) -> Array:
    """Return src in the shape of self."""
    return jnp.broadcast_to(src, self.shape)


@operation
def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Join arrays along an axis; an empty one of one axis is left out, as torch does."""
    return jnp.concatenate([x for x in tensors if x.shape != (0,)], dim)


@operation
def stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Join arrays along a new axis."""
    return jnp.stack(tensors, dim)


@operation
def where(condition: Array, self: Any, other: Any) -> Array:
    """Return self where the condition holds, else other."""
    return jnp.where(condition, self, other)


@operation
def masked_fill(self: Array, mask: Array, value: Any) -> Array:
    """Return value where the mask is set, else self."""
    return jnp.where(mask, value, self)


@operation
def slice_backward(grad_output: Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Array:
    """Return the gradient in the place of the slice, zero elsewhere."""
    place: list[Any] = [slice(None)] * len(input_sizes)
    place[dim] = slice(start, end, step)
    return jnp.zeros(tuple(input_sizes), grad_output.dtype).at[tuple(place)].set(grad_output)


@operation
def select_backward(grad_output: Array, input_sizes: Sequence[int], dim: int, index: int) -> Array:
    """Return the gradient in the place of what was selected, zero elsewhere."""
    place: list[Any] = [slice(None)] * len(input_sizes)
    place[dim] = index
    return jnp.zeros(tuple(input_sizes), grad_output.dtype).at[tuple(place)].set(grad_output)

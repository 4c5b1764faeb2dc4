"""Formulas of the memory of Llama's norms, attention and SwiGLU: what their two passes keep and go through.

Read them beside torch_backend/model.py, line by line. A capital is a tensor's bytes: D (n, hidden), K (n,
width of keys), F (n, feed-forward), n tokens of the micro-batch.

**Eager**: autograd keeps what each operation's derivative needs (torch, tools/autograd/derivatives.yaml): inputs of a
product in the operand dtype, a copy of its weight in it, both factors of a product of numbers, silu's input; products
that torch_backend/kernels/recompute_products.py makes again are not among them.

**Fused**: the rule of torch's min-cut partitioner (torch/_functorch/partitioners.py): what feeds a product or an
attention kernel of the backward pass is kept (`ban_recompute_materialized_backward`: it could not be fused there),
results of reductions are kept, and so is the residual stream (`ban_recompute_used_far_apart`); all other pointwise
operations are made again inside the backward pass's own kernels.

torch_backend/tools/plan.py counts both for real; parity_tests/plan holds these formulas to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.model.graph import Operation
from lockstep.core.plan.phase import Phase, Tape
from lockstep.core.plan.products import multiply
from lockstep.core.plan.sizes import Sizes

COPIES = "weights in the operand dtype"


@dataclass(frozen=True)
class Part:
    """Memory of a part of the step: its phases, and what it keeps.

    saved: bytes kept from forward to backward pass, by what they are.

    The forward phase ends with what is saved, the backward phase without it and with the weights' gradients. products:
    bytes that `recompute.keep_products` keeps. entry: what is kept where the part is computed again, its input.
    keeps_entry: that is the tensor which `saved` has for it. again:
    the forward pass the second time, where it is another one. waiting: what follows the backward pass of the whole
    block.
    """

    saved: Mapping[str, float]
    forward: Phase
    backward: Phase
    products: float = 0.0
    entry: float = 0.0
    again: Phase | None = None
    waiting: Phase = field(default_factory=Phase)
    keeps_entry: bool = False


def kernel_saved(z: Sizes, masked: bool) -> dict[str, float]:
    """Return bytes that the attention kernel itself keeps of a micro-batch, one layer.

    flash, cudnn, efficient, fa3, flex: q, k, v and out, K's heads repeated already (`Attention.expand`), and the FP32
    logsumexp a row and head (Dao 2023, arXiv 2307.08691, section 3.1; derivatives.yaml); flex keeps the row's maximum
    as well. math: q and k, scaled, v, and the softmax (S, S) a head, computed in FP32 from operands below it
    (`_scaled_dot_product_attention_math`).
    """
    n, o = z.tokens, z.operand
    mask = {"mask": float(o * n * z.length)} if masked and z.kernel.mask_as_numbers else {}
    if z.kernel.written_out:
        wide = max(o, 4)
        # A cap keeps what its tanh gives, beside the softmax.
        scores = (2.0 if z.capped else 1.0) * wide * z.heads * z.length * n
        return {"qkv": 3.0 * wide * n * z.attended, "scores": scores, **mask}
    return {
        "qkv": 3.0 * o * n * z.attended,
        "out": float(o * n * z.attended),
        "logsumexp": float((8 if o == 8 else 4) * z.kernel.rows * n * z.heads),
        **mask,
    }


def norm(z: Sizes, one: Operation) -> Part:
    """Return one RMSNorm of rows as long as its gain; its input is kept by what wrote it."""
    width, gains = math.prod(one.width), one.parameters["weight"].size
    D, gain = float(z.stream * z.tokens * width), float(z.stream * gains)
    row = float(z.stream * z.tokens * (width // gains))
    forward = Tape()
    if z.fused:
        forward.make(rms=row)
        back = Tape(forward.there)
        back.make(gradient=gain)
        back.free("rms")
        return Part(forward.there, forward.phase, back.phase)
    forward.make(square=D)
    forward.make(rms=row)
    forward.free("square")
    forward.make(out=D)
    forward.free("out")
    back = Tape(forward.there)
    # Not kept (torch_backend/kernels/recompute_products.py): made again for the gain's gradient.
    back.make(normed=D)
    back.make(gradient=gain)
    back.free("normed")
    back.make(d_normed=D)
    back.make(d_rms=D)
    back.free("d_rms")
    back.make(d_square=D)
    back.free("d_square", "d_normed", "rms")
    return Part(forward.there, forward.phase, back.phase)


class _Products:
    """Linear layers on a tape: `z` holds the casts they make."""

    def __init__(self, z: Sizes) -> None:
        self.z = z
        self.c = 1.0 if z.casts else 0.0
        # FP8's own copies: one byte a number.
        self.narrow = 1.0 if z.fp8 else 0.0

    def forward(self, tape: Tape, name: str, into: int, out: int, narrow: bool = False) -> None:
        """Make the tensors of an eager layer: its input's copy and its weight's stay, its output is `name`.

        The output is kept as the plan of casts sets. narrow: its input has the operand dtype and is the caller's, so
        that there is no copy.
        """
        z, n = self.z, self.z.tokens
        if z.casts:
            tape.make(**{f"{name}.x": 0.0 if narrow else float(z.operand * n * into)})
            tape.make(**{f"{name}.w": 0.0 if z.fp8 else float(z.operand * into * out)})
            tape.make(fp8=self.narrow * (n * into + into * out))
            multiply(tape, z, n, into, out, product=float(z.operand * n * out))
            tape.free("fp8")
        if z.casts and z.plan.keeps("linear"):
            tape.free("product")
        tape.make(**{name: float(z.kept("linear") * n * out)})
        tape.free_if("product")

    def backward(
        self, tape: Tape, name: str, into: int, out: int, own: bool, last: bool = True, narrow: bool = False
    ) -> None:
        """Describe the way from d_`name` to d_`name`.x and the weight's gradient.

        own: d_`name` is this layer's to free. last: so is the input, which others of the same input do not need.
        narrow: the input has the operand dtype, and d_`name`.x too.
        """
        z, n = self.z, self.z.tokens
        weight, wide_x = float(z.stream * into * out), float(z.stream * n * into)
        if not z.casts:
            tape.make(**{f"d_{name}.x": wide_x})
            tape.make(**{f"g_{name}": weight})
            if own:
                tape.free(f"d_{name}")
            if last:
                tape.free_if(f"{name}.x")
            return
        tape.make(narrow_d=float(z.operand * n * out))
        if own:
            tape.free(f"d_{name}")
        tape.make(fp8=self.narrow * (n * (into + out) + into * out))
        multiply(tape, z, n, out, into, narrow_x=float(z.operand * n * into))
        multiply(tape, z, out, n, into, narrow_g=float(z.operand * into * out))
        tape.free("fp8", "narrow_d", f"{name}.x", f"{name}.w")
        tape.make(**{f"g_{name}": weight})
        tape.free("narrow_g")
        if narrow:
            tape.free("narrow_x")
            tape.make(**{f"d_{name}.x": float(z.operand * n * into)})
            return
        tape.make(**{f"d_{name}.x": wide_x})
        tape.free("narrow_x")


def attention(z: Sizes, masked: bool, normed_again: bool = False) -> Part:
    """Describe the way from the normed input to the output projection, without the residual sum.

    normed_again: the norm before it is computed again.
    """
    n = z.tokens
    operand, narrow_kv = float(z.operand * n * z.hidden), float(z.operand * n * z.kv)
    kernel = kernel_saved(z, masked)
    products = 2 * operand + 2 * narrow_kv + _of_products(z, kernel)
    if z.fused:
        return _fused_attention(z, kernel, products, _read(z, normed_again))
    D, K = float(z.stream * n * z.hidden), float(z.stream * n * z.kv)
    forward = Tape()
    _attention_forward(forward, z, kernel, D, K)
    back = Tape(forward.there)
    _attention_backward(back, z, kernel, D, K)
    return Part(forward.there, forward.phase, back.phase, products, _input(z), keeps_entry=z.shares)


def _input(z: Sizes) -> float:
    """Return bytes of what a norm writes, in eager."""
    return float(z.kept("norm") * z.tokens * z.hidden)


def _of_products(z: Sizes, kernel: Mapping[str, float]) -> float:
    """Return bytes of the attention kernel's own products: for `math` the scores and their product with v, in FP32."""
    if z.kernel.written_out:
        return kernel["scores"] + float(max(z.operand, 4) * z.tokens * z.hidden)
    return kernel["out"] + kernel["logsumexp"]


def _attention_forward(tape: Tape, z: Sizes, kernel: Mapping[str, float], D: float, K: float) -> None:
    layer, cast, shares = _Products(z), D if z.casts else 0.0, z.shares
    if shares or not z.casts:
        tape.make(**{"qkv.x": _input(z)})
    layer.forward(tape, "q", z.hidden, z.hidden, shares)
    layer.forward(tape, "k", z.hidden, z.kv, shares)
    layer.forward(tape, "v", z.hidden, z.kv, shares)
    # Without a cast the rotated q is the kernel's own.
    tape.make(halves=2 * D, widened=D if z.plan.keeps("linear") else 0.0)
    tape.free("halves", "widened")
    rotated = z.kept("rotation") / z.stream
    tape.make(q_rope=rotated * cast, k_rope=rotated * K)
    tape.make(expanded=cast, widened=K if z.plan.keeps("rotation") else 0.0)
    tape.make(**kernel)
    tape.free("expanded", "widened")
    if "scores" in kernel:
        # The softmax does not overwrite its input.
        tape.make(scratch=kernel["scores"])
        tape.free("scratch")
    if z.casts:
        tape.make(wide_out=D)
        layer.forward(tape, "o", z.hidden, z.hidden)
        tape.free("wide_out")
    else:
        # The output projection reads the kernel's own output, which only the written-out kernel does not keep.
        tape.make(**{"o.x": D if "scores" in kernel else 0.0})
        tape.make(o=D)
    tape.free("o", "q", "k", "v", "q_rope", "k_rope")


def _attention_backward(tape: Tape, z: Sizes, kernel: Mapping[str, float], D: float, K: float) -> None:
    layer, cast, shares = _Products(z), D if z.casts else 0.0, z.shares
    operand = float(z.operand * z.tokens * z.hidden)
    layer.backward(tape, "o", z.hidden, z.hidden, own=False)
    if z.casts:
        tape.make(d_out=operand)
        tape.free("d_o.x")
    if "scores" in kernel:
        # The gradients of the softmax and of its input; in CUDA's kernel, the product of the softmax and its gradient
        # is a further tensor (aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`).
        tape.make(scratch=(2 if z.on_cpu else 3) * kernel["scores"])
        tape.free("scratch")
    tape.make(d_q=operand, d_expanded_k=operand, d_expanded_v=operand)
    tape.free(*kernel)
    tape.free_if("d_out", "d_o.x")
    for name in ("v", "k"):
        tape.make(cast=cast)
        tape.make(**{f"d_{name}": K})
        tape.free(f"d_expanded_{name}", "cast")
    tape.make(cast=cast)
    if z.casts:
        tape.free("d_q")
    # Back through the rotation (torch_backend/kernels/rotary.py).
    tape.make(swapped=D)
    tape.make(joined=D)
    tape.free("swapped", "cast")
    if not z.casts:
        tape.free("d_q")
    tape.make(d_q=0.0)
    layer.backward(tape, "v", z.hidden, z.kv, own=True, last=False, narrow=shares)
    layer.backward(tape, "k", z.hidden, z.kv, own=True, last=False, narrow=shares)
    tape.free("d_k.x")
    layer.backward(tape, "q", z.hidden, z.hidden, own=True, narrow=shares)
    tape.free("joined", "d_q.x", "d_v.x")
    tape.free_if("qkv.x")


def _read(z: Sizes, normed_again: bool) -> float:
    """Return bytes of a normed input that a compiled program keeps; none if no cast follows a recomputed norm."""
    return 0.0 if normed_again and not z.casts else _kept(z, z.hidden)


def _kept(z: Sizes, width: int) -> float:
    """Return bytes that a compiled program keeps of a layer's input, (n, width) in the operand dtype.

    None in FP8: torchao keeps the input from before its cast and casts it again for the weight's gradient
    (torchao/float8/float8_linear.py, `matmul_with_hp_or_float8_args`), so that no product of the backward pass reads
    it, and it is made again like any other pointwise work.
    """
    return 0.0 if z.fp8 else float(z.operand * z.tokens * width)


def _fused_attention(z: Sizes, kernel: Mapping[str, float], products: float, normed: float) -> Part:
    n = z.tokens
    operand, narrow_kv = float(z.operand * n * z.hidden), float(z.operand * n * z.kv)
    read = _kept(z, z.hidden)
    numbers = 2 * z.hidden**2 + 2 * z.hidden * z.kv
    forward = Tape()
    forward.make(**{"qkv.x": normed, COPIES: copies(z, numbers)})
    forward.make(projected=operand + 2 * narrow_kv)
    forward.make(**kernel)
    forward.free("projected")
    if z.kernel.written_out:
        forward.make(scratch=(2 if z.on_cpu else 1) * kernel["scores"])
        forward.free("scratch")
    if (z.casts and not z.autocast) or z.kernel.written_out:
        # The kernel's output goes through the stream dtype: what the output projection reads is a tensor of its own.
        forward.make(**{"o.x": read})
    forward.make(o=operand)
    forward.free("o")
    back = Tape(forward.there)
    back.make(d_o=operand if z.casts else 0.0)
    back.make(d_out=operand)
    back.make(gradients=float(z.stream * z.hidden**2))
    back.free("d_o")
    back.free_if("o.x")
    if z.kernel.written_out:
        back.make(scratch=(2 if z.on_cpu else 1) * kernel["scores"])
        back.free("scratch")
    back.make(d_qkv=3 * operand)
    back.free(*kernel, "d_out")
    back.make(d_projected=operand + 2 * narrow_kv)
    back.free("d_qkv")
    back.make(rest=float(z.stream * (numbers - z.hidden**2)))
    back.make(d_x=3 * operand)
    back.free("d_projected", "d_x", "qkv.x", COPIES)
    return Part(forward.there, forward.phase, back.phase, products)


def mlp(z: Sizes, normed_again: bool = False, recomputed: bool = False) -> Part:
    """Describe SwiGLU from the normed input to the down projection, without the residual sum.

    normed_again: the norm before it is computed again. recomputed: so is this.
    """
    n = z.tokens
    F = float(z.stream * n * z.ffn)
    products = float(z.operand * n * (2 * z.ffn + z.hidden))
    if z.fused:
        kept = _fused_mlp(z, products, _read(z, normed_again))
        return _fused_mlp_again(z, kept) if recomputed else kept
    layer, shares = _Products(z), z.shares
    forward = Tape()
    if shares or not z.casts:
        forward.make(normed=_input(z))
    layer.forward(forward, "gate", z.hidden, z.ffn, shares)
    layer.forward(forward, "up", z.hidden, z.ffn, shares)
    read = _activate(forward, z, F)
    narrow_act = z.casts and z.plan.rounds("act")
    layer.forward(forward, "down", z.ffn, z.hidden, narrow_act)
    forward.free("down")
    forward.free_if("before gate", "before up")
    if z.casts and not narrow_act:
        forward.free("act")
    back = Tape(forward.there)
    layer.backward(back, "down", z.ffn, z.hidden, own=False, narrow=narrow_act)
    back.free_if("act")
    if narrow_act and read == F:
        back.make(widened=F)
        back.free("d_down.x", "widened")
        back.make(**{"d_down.x": F})
    back.make(d_silu=read)
    back.make(d_gate=read)
    back.free("d_silu")
    # silu(gate) is not kept (torch_backend/kernels/recompute_products.py): made again in the place of d_up.
    back.make(d_up=read)
    back.free("d_down.x", "up", "gate")
    for name, last in (("up", False), ("gate", True)):
        if read < float(z.kept("linear") * n * z.ffn):
            back.make(widened=F)
            back.free(f"d_{name}", "widened")
            back.make(**{f"d_{name}": F})
        layer.backward(back, name, z.hidden, z.ffn, own=True, last=last, narrow=shares)
    back.free_if("normed")
    back.free("d_up.x", "d_gate.x")
    return Part(forward.there, forward.phase, back.phase, products, _input(z), keeps_entry=z.shares)


def _activate(tape: Tape, z: Sizes, F: float) -> float:
    """Allocate `act` from `gate` and `up`; leave those that the activation read under their names.

    Returns the bytes of one of these. A layer's output lives on as `before gate` and `before up`, where that is
    another tensor: Python keeps the name.
    """
    written, narrow = float(z.kept("linear") * z.tokens * z.ffn), float(z.operand * z.tokens * z.ffn)
    read = narrow if z.plan.rounds_inside_act else F
    rounds = z.plan.rounds("act")
    if z.casts and (written != read or (rounds and not z.plan.rounds_inside_act)):
        tape.free("gate", "up")
        tape.make(**{"before gate": written, "before up": written})
        if rounds and written == F and read == F:
            tape.make(rounded=2 * narrow)
            tape.make(gate=read, up=read)
            tape.free("rounded")
        else:
            tape.make(gate=read, up=read)
    if rounds and read == F:
        tape.make(wide=F)
        tape.make(act=narrow)
        tape.free("wide")
    else:
        tape.make(act=read)
    return read


def _fused_mlp(z: Sizes, products: float, normed: float) -> Part:
    n, one = z.tokens, z.hidden * z.ffn
    operand, F = float(z.operand * n * z.hidden), float(z.operand * n * z.ffn)
    forward = Tape()
    forward.make(**{"gate.x": normed, COPIES: copies(z, 3 * one)})
    forward.make(gate=F, up=F)
    forward.make(act=_kept(z, z.ffn))
    forward.make(down=operand)
    forward.free("down")
    back = Tape(forward.there)
    back.make(d_down=operand if z.casts else 0.0)
    back.make(g_down=float(z.operand * one))
    back.free("act")
    back.make(d_act=F)
    back.make(wide_g=float((z.stream - z.operand) * one))
    # The gradient of up takes the memory of up.
    back.make(d_gate=F, d_up=0.0)
    back.free("d_act", "gate")
    back.make(d_x=2 * operand)
    back.make(g_gate=float(z.stream * one), g_up=float(z.stream * one))
    back.free("d_down", "up", "d_gate", "d_up", "d_x", "gate.x", COPIES)
    return Part(forward.there, forward.phase, back.phase, products)


def _fused_mlp_again(z: Sizes, kept: Part) -> Part:
    """Return the MLP computed again: silu(gate) is a tensor too; all of this size stay until the block's backward ends.

    Inductor delays weights' gradients (torch/_inductor/memory.py, `reorder_for_peak_memory`), and keeps a buffer
    that the next block takes over (torch/_inductor/codegen/wrapper.py, `FreeIfNotReusedLine`).
    """
    n, one = z.tokens, z.hidden * z.ffn
    operand, F = float(z.operand * n * z.hidden), float(z.operand * n * z.ffn)
    anew = Tape()
    anew.make(x=operand, w=copies(z, 3 * one))
    anew.make(gate=F, up=F)
    anew.make(silu=F, act=F)
    back = Tape(anew.there)
    back.make(d_down=operand if z.casts else 0.0)
    back.make(d_act=F)
    # The gradient of up takes the memory of up.
    back.make(d_gate=F)
    back.make(d_x=2 * operand)
    back.free("d_x", "w")
    after = Tape(back.there)
    after.make(gradients=float(3 * z.stream * one))
    after.free("x", "gate", "up", "silu", "act", "d_act", "d_gate", "d_down")
    return Part(kept.saved, kept.forward, back.phase, kept.products, 0.0, anew.phase, after.phase)


def copies(z: Sizes, numbers: float) -> float:
    """Return bytes of weight copies that a compiled program keeps for its backward pass; none in FP8."""
    return float(z.operand * numbers) if z.casts and not z.fp8 else 0.0

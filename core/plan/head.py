"""The head's memory: logits, loss and their gradients, by `loss.head`. Beside torch_backend/{loss,chunked_loss}.py.

Eager, the loss is computed in FP64 (torch_backend/loss.py): on CUDA of all logits that are there, several tensors of 8
bytes a logit; on the CPU of a cache's worth at a time. Fused, those never leave the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.components.loss_heads import LossHead
from lockstep.core.config.schema import LossConfig
from lockstep.core.plan.phase import Phase, Tape
from lockstep.core.plan.products import multiply
from lockstep.core.plan.sizes import Sizes

# Logits that the CPU widens to FP64 at a time (`AT_A_TIME` in torch_backend/loss.py, to which a test holds it).
AT_A_TIME = 2**17


@dataclass(frozen=True)
class HeadMemory:
    """Memory of a loss head.

    saved: bytes from forward to backward pass. backward ends with the weight's gradient and that of the input.

    late: what follows the rest of the backward pass. Where table and head are one weight and the program is one, the
    compiler joins the head's product to the look-up's gradient by `addmm` (torch/_inductor/fx_passes/post_grad.py), so
    that the logits' gradient stays until the end; not where a cast lies between product and sum, as under bf16 on CUDA.
    logits: bytes of those that are there at a time.
    """

    saved: Mapping[str, float]
    forward: Phase
    backward: Phase
    logits: float
    late: Phase = field(default_factory=Phase)


def head(z: Sizes, loss: LossConfig, tied: bool) -> HeadMemory:
    """Return a run's head, from the final norm's output, (n, D) in the stream dtype, which is the caller's."""
    chosen = loss.chosen
    rows = chosen.rows(z.tokens, z.hidden, z.vocab, loss.chunk)
    if chosen.library:
        return _of_library(z, chosen, rows)
    if chosen.whole:
        if z.fused:
            return _full_fused(z, tied)
        if z.autocast:
            return _functional(z)
        return _full_narrow(z) if z.casts and z.plan.rounds("logits") else _full(z)
    return _in_chunks(z, rows, math.ceil(z.tokens / rows), chosen.one_kernel)


def _full(z: Sizes) -> HeadMemory:
    n, V = z.tokens, z.vocab
    logits, weight = float(z.logits * n * V), float(z.stream * V * z.hidden)
    D, operand = float(z.stream * n * z.hidden), float(z.operand * n * z.hidden)
    forward = Tape()
    forward.make(x=operand if z.casts else D, w=float(z.operand * V * z.hidden) if z.casts else 0.0)
    _copied(forward, z, n)
    forward.make(logits=logits)
    forward.free_if("copies")
    if z.capped_logits:
        # Logits / cap, and its tanh, which stays; the capped logits take the place of the logits.
        forward.make(divided=logits, tanh=logits)
        forward.free("divided")
    _losses(forward, z, n)
    # Beside them the targets, and what the loss is divided by.
    forward.make(logsumexp=24.0 * n + 8)
    back = Tape(forward.there)
    _gradient(back, z, n)
    back.free("logits")
    if z.capped_logits:
        back.make(d_tanh=logits)
        back.free("tanh", "d_tanh")
    if z.casts:
        back.make(narrow=_narrowed(z, n))
    multiply(back, z, n, V, z.hidden, narrow_x=operand if z.casts else 0.0)
    back.make(d_x=D)
    back.free("narrow_x")
    if z.copies:
        back.make(wide=float(z.stream * n * V) + D)
    back.make(gradient=weight)
    back.free_if("wide", "narrow")
    back.free("grad", "x", "w", "logsumexp")
    return HeadMemory(forward.there, forward.phase, back.phase, logits)


def _full_narrow(z: Sizes) -> HeadMemory:
    """Return memory of whole logits in the operand dtype, by a plan of casts: those of a linear layer."""
    n, V = z.tokens, z.vocab
    wide, narrow = float(z.stream * n * V), float(z.operand * n * V)
    # Where a plan keeps what linear layers write in FP32, logits go through it, and their gradient does.
    through = 0.0 if z.plan.keeps("linear") else wide
    x, weight = float(z.operand * n * z.hidden), float(z.operand * V * z.hidden)
    forward = Tape()
    forward.make(x=x, w=weight)
    multiply(forward, z, n, z.hidden, V, product=narrow)
    forward.make(through=through)
    forward.free("product")
    forward.make(logits=narrow)
    forward.free("through")
    _losses(forward, z, n)
    forward.make(logsumexp=24.0 * n + 8)
    back = Tape(forward.there)
    _gradient(back, z, n)
    back.free("logits")
    back.make(through=through)
    back.free("grad")
    back.make(narrow=narrow)
    back.free("through")
    multiply(back, z, n, V, z.hidden, narrow_x=x)
    multiply(back, z, V, n, z.hidden, narrow_g=weight)
    back.free("narrow", "x", "w", "logsumexp")
    back.make(gradient=float(z.stream * V * z.hidden))
    back.free("narrow_g")
    back.make(d_x=float(z.kept("norm") * n * z.hidden))
    back.free("narrow_x")
    return HeadMemory(forward.there, forward.phase, back.phase, narrow)


def _functional(z: Sizes) -> HeadMemory:
    """Return memory of eager `torch.nn.functional.cross_entropy` of whole logits: log softmax, in FP32 at least."""
    n, V = z.tokens, z.vocab
    wide = float(max(4, z.logits) * n * V)
    forward = Tape()
    forward.make(x=float(z.operand * n * z.hidden), w=float(z.operand * V * z.hidden) if z.casts else 0.0)
    forward.make(logits=float(z.logits * n * V), cast=wide if z.casts else 0.0)
    forward.make(log_softmax=wide)
    forward.free("cast")
    back = Tape(forward.there)
    back.make(d_log_softmax=wide)
    back.make(d_logits=wide)
    back.free("d_log_softmax", "log_softmax", "logits")
    back.make(d_x=float(z.stream * n * z.hidden))
    back.make(gradient=float(z.stream * V * z.hidden))
    back.free("d_logits", "x", "w")
    return HeadMemory(forward.there, forward.phase, back.phase, wide)


def _full_fused(z: Sizes, tied: bool) -> HeadMemory:
    n, V = z.tokens, z.vocab
    logits, weight = float(z.logits * n * V), float(z.stream * V * z.hidden)
    D, operand = float(z.stream * n * z.hidden), float(z.operand * n * z.hidden)
    forward = Tape()
    forward.make(x=D if z.on_cpu or not z.casts else operand, w=float(z.operand * V * z.hidden) if z.casts else 0.0)
    if z.copies:
        forward.make(copies=weight)
    forward.make(logits=logits)
    forward.free_if("copies")
    forward.make(logsumexp=8.0 * n)
    back = Tape(forward.there)
    # In place of the logits where it has their dtype; else in the operand dtype, as products read it.
    in_place = z.logits == z.operand
    back.make(grad=0.0 if in_place else float(z.operand * n * V))
    if not in_place:
        back.free("logits")
    back.make(narrow_x=operand if z.casts else 0.0)
    back.make(d_x=D)
    back.free("narrow_x", "w", "logsumexp")
    late = Tape({name: size for name, size in back.there.items() if name != "d_x"})
    if z.copies:
        late.make(wide=float(z.stream * n * V))
        late.free("grad")
    late.make(gradient=weight)
    late.free_if("wide", "logits", "grad")
    late.free("x")
    # Lockstep's own product is no operation of the compiler's, which joins no sum to it.
    if tied and z.whole and (z.copies or not (z.casts or z.by_blocks)):
        return HeadMemory(forward.there, forward.phase, back.phase, logits, late.phase)
    return HeadMemory(forward.there, forward.phase, back.phase + late.phase, logits)


def _narrowed(z: Sizes, rows: int) -> float:
    """Return bytes of the gradient of `rows` rows of logits as products read it; none if it is in that format."""
    return float(z.operand * rows * z.vocab) if z.logits != z.operand else 0.0


def _copied(tape: Tape, z: Sizes, rows: int) -> None:
    if z.copies:
        tape.make(copies=float(z.stream * z.hidden * (rows + z.vocab)))


def _at_a_time(z: Sizes, rows: int) -> int:
    """Return how many of `rows` rows of logits are widened to FP64 at a time."""
    return min(rows, max(1, AT_A_TIME // z.vocab)) if z.on_cpu else rows


def _losses(tape: Tape, z: Sizes, rows: int) -> None:
    """Allocate for eager `losses_and_logsumexp`."""
    wide = 8.0 * _at_a_time(z, rows) * z.vocab
    tape.make(double=wide)
    tape.make(exp=wide)
    tape.free("exp", "double")


def _losses_and_gradient(tape: Tape, z: Sizes, rows: int) -> None:
    """Allocate for eager `losses_and_gradient`, which leaves `grad`; on the CPU it replaces logits without a cap."""
    if z.on_cpu:
        tape.make(grad=float(z.logits * rows * z.vocab) if z.capped_logits else 0.0)
        tape.make(wide=8.0 * _at_a_time(z, rows) * z.vocab)
        tape.free("wide")
        return
    _losses(tape, z, rows)
    _gradient(tape, z, rows)


def _gradient(tape: Tape, z: Sizes, rows: int) -> None:
    """Allocate for eager `logits_gradient`, which leaves `grad`."""
    out = float(z.logits * rows * z.vocab)
    if z.on_cpu:
        tape.make(grad=out)
        tape.make(softmax=8.0 * _at_a_time(z, rows) * z.vocab)
        tape.free("softmax")
        return
    wide = 8.0 * rows * z.vocab
    tape.make(double=wide)
    tape.make(shifted=wide)
    tape.free("double")
    tape.make(softmax=wide)
    tape.free("shifted")
    tape.make(is_target=float(rows * z.vocab))
    tape.make(target=wide)
    tape.make(difference=wide)
    tape.free("target")
    tape.make(scaled=wide)
    tape.free("difference")
    tape.make(grad=out)
    tape.free("scaled", "softmax", "is_target")


def _in_chunks(z: Sizes, rows: int, chunks: int, in_place: bool) -> HeadMemory:
    """Return memory of a head in chunks.

    in_place: the gradient takes the logits' memory, and products add to the weight's gradient where it stands.
    """
    n, V = z.tokens, z.vocab
    logits, narrow = float(z.logits * rows * V), 0.0 if in_place else _narrowed(z, rows)
    weight, D = float(z.stream * V * z.hidden), float(z.stream * n * z.hidden)
    forward = Tape()
    if z.casts:
        forward.make(x=float(z.operand * n * z.hidden), w=float(z.operand * V * z.hidden))
    if z.fused:
        _chunk_fused(forward, z, rows, chunks, in_place)
    else:
        forward.make(g_weight=weight, g_x=D)
        if chunks > 1:
            # Python keeps the previous chunk's tensors until their names are assigned again. On the CPU the gradient is
            # the logits' own tensor.
            forward.make(grad_before=logits, narrow_before=narrow)
            forward.make(of_capped_before=logits if z.capped_logits else 0.0)
        _copied(forward, z, rows)
        forward.make(logits=logits)
        forward.free_if("copies")
        if z.capped_logits:
            forward.make(capped=logits)
        if in_place:
            forward.make(grad=0.0)
        else:
            _losses_and_gradient(forward, z, rows)
        if z.capped_logits:
            # The gradient of the logits, and 1 − tanh².
            forward.make(of_logits=logits, derivative=logits)
            forward.free("derivative")
        forward.free_if("grad_before", "narrow_before", "of_capped_before")
        forward.make(narrow=narrow)
        # The result's own bytes are part of g_x.
        multiply(forward, z, rows, V, z.hidden, of_x=0.0)
        forward.free("of_x")
        if z.copies:
            forward.make(wide=float(z.stream * rows * V))
        forward.make(part=0.0 if in_place or z.by_blocks else weight)
        forward.free_if("wide")
        forward.free("narrow", "part", "grad", "logits")
        forward.free_if("capped", "of_logits")
        forward.make(together=D)
        forward.free("g_x")
    forward.free_if("x", "w")
    back = Tape(forward.there)
    back.make(d_x=D)
    if not z.fused:
        back.make(gradient=weight)
        back.free("g_weight")
    # Fused, the weight's gradient is scaled in place.
    back.free("together")
    once = forward.phase
    # The other chunks move as much and hold no more.
    made = once.made + (chunks - 1) * (2 * logits + narrow + weight)
    return HeadMemory(forward.there, Phase(once.net, once.peak, made), back.phase, logits)


def _chunk_fused(forward: Tape, z: Sizes, rows: int, chunks: int, in_place: bool) -> None:
    n, V = z.tokens, z.vocab
    logits, weight = float(z.logits * rows * V), float(z.stream * V * z.hidden)
    forward.make(together=float(z.operand * n * z.hidden))
    if in_place:
        forward.make(g_weight=weight)
        forward.make(logits=logits)
        forward.free("logits")
        return
    if z.by_blocks:
        forward.make(g_weight=weight)
        forward.make(logits=logits)
        # Without a cast in place of the logits.
        forward.make(grad=float(z.operand * rows * V) if z.casts else 0.0)
        forward.free("grad", "logits")
        return
    if z.copies:
        forward.make(copies=weight + float(z.stream * rows * z.hidden))
    if chunks > 1 and (z.casts or z.on_cpu):
        # Without a cast CUDA's product takes the sum before as what it adds to, and a chunk's logits are gone by then.
        forward.make(before=weight)
    # On the CPU in place of the logits where it has their dtype; a generated kernel for CUDA passes over them several
    # times.
    grad = 0.0 if z.on_cpu and not z.casts else float(z.operand * rows * V)
    if chunks > 2 and logits + grad <= weight:
        # Inductor estimates a sum to be a tensor of its own, and keeps the product before for the next one wherever
        # that stays below its estimate (torch/_inductor/codegen/wrapper.py, `should_reuse_buffer`).
        forward.make(kept=weight)
    forward.make(logits=logits)
    forward.make(grad=grad)
    if z.casts:
        # The wide copy that the CPU's product reads takes the logits' place.
        forward.free("grad" if z.copies else "logits")
    # A sum that moves from one tensor to another.
    forward.free_if("kept")
    forward.make(g_weight=weight)
    forward.free_if("before", "copies", "grad", "logits")


def _of_library(z: Sizes, chosen: LossHead, rows: int) -> HeadMemory:
    """Return a library's head. Its backward pass computes each chunk's logits again, and makes the gradients.

    Their gradients have the operand dtype; the backend scales them in the stream dtype (`_Scaled`).
    """
    n, V = z.tokens, z.vocab
    D, operand = float(z.stream * n * z.hidden), float(z.operand * n * z.hidden)
    weight, narrow = float(z.stream * V * z.hidden), float(z.operand * V * z.hidden)
    chunk = _logits_of_torch(z, rows) if chosen.wide_logits else {"logits": float(z.operand * rows * V)}
    # Only torch's head can be part of one program.
    one_program = z.fused and z.whole
    forward = Tape()
    forward.make(**({"x": operand, "w": narrow} if z.casts else {}))
    of_losses = {name: size for name, size in chunk.items() if name in ("logits", "wide_w", "wide_x")}
    forward.make(**of_losses)
    forward.free(*of_losses)
    forward.make(losses=8.0 * n)
    back = Tape(forward.there)
    if one_program:
        _torch_fused(back, z, chunk, 3 if z.casts and n > rows else 2)
    else:
        back.make(d=operand, sums=float((4 if chosen.wide_sums else z.operand) * V * z.hidden))
        back.make(**chunk)
        back.free(*chunk)
        if chosen.wide_sums:
            back.make(g=narrow)
            back.free("sums")
    back.free_if("x", "w", "losses")
    # The backend's scaling: of the weight's gradient first, each widened where the program is eager.
    widens = z.casts and not one_program
    for gradients, made in ((("g", "sums"), {"gradient": weight}), (("d",), {"d_x": D})):
        if widens:
            back.make(wide=sum(made.values()))
            back.free_if(*gradients)
        back.make(**made)
        back.free_if(*gradients, "wide")
    return HeadMemory(forward.there, forward.phase, back.phase, chunk["logits"])


def _logits_of_torch(z: Sizes, rows: int) -> dict[str, float]:
    """Return what torch holds for a chunk's gradients (torch/nn/modules/linear_cross_entropy.py, `_ChunkContext`).

    Its defaults by device (linear_cross_entropy_options.py, `_AUTO_DEFAULTS`): on CUDA logits in FP32, and their
    gradient narrowed, which the loop holds until it has narrowed the next chunk's; on the CPU everything in FP32. Under
    FP16 CUDA's logits are FP16: the plan is too high there.
    """
    logits, x = float(rows * z.vocab), float(rows * z.hidden)
    if not z.casts:
        return {"logits": z.stream * logits, "target_rows": z.stream * x}
    if z.on_cpu:
        # `sub_` of the sums in FP32 from the narrow ones widens those, and its result is wide at first.
        weight = 4.0 * z.vocab * z.hidden
        sums = {"wide_w": weight, "chunk_sums": weight, "widened": weight, "difference": weight}
        return {"logits": 4 * logits, "wide_x": 4 * x, "wide_d": 4.0 * z.tokens * z.hidden, **sums}
    narrow = z.operand * logits
    held = {"logits": 4 * logits, "wide_x": 4 * x, "target_rows": z.operand * x}
    return held | {"narrow": narrow, "narrow_before": narrow if z.tokens > rows else 0.0}


def _torch_fused(tape: Tape, z: Sizes, chunk: Mapping[str, float], copies: int) -> None:
    """Allocate for torch's head in a compiled program: what its loop overwrites, Inductor copies."""
    weight = float(z.operand * z.vocab * z.hidden)
    copied = {f"logits {number}": chunk["logits"] for number in range(copies)}
    others = {name: size for name, size in chunk.items() if name in ("narrow", "wide_w", "wide_d", "chunk_sums")}
    tape.make(d=float(z.operand * z.tokens * z.hidden), sums=weight, product=weight, **others, **copied)
    tape.free("product", *others, *copied)

"""Rules between settings: conditions on several fields of a run's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lockstep.core.components.attention_kernels import ATTENTION_KERNELS, AUTO
from lockstep.core.components.cast_plan import problem_with, read_plan
from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.components.optimizers import OPTIMIZERS
from lockstep.core.components.precision import FORMATS, POLICIES
from lockstep.core.config.curriculum import pieces, problem
from lockstep.core.config.sections import PARTS, ModelConfig, OptimConfig, listed
from lockstep.core.model.families import FAMILIES, graph_of, traits_of


@dataclass(frozen=True)
class Rule:
    """A condition on several fields. check: takes their values, and returns a message for a violation, or None."""

    keys: tuple[str, ...]
    check: Callable[..., str | None]


def _heads_divide_hidden(hidden: int, heads: int, width: int) -> str | None:
    if not width and hidden % heads:
        return f"{heads} heads do not divide hidden = {hidden}"
    return None


def _heads_are_even(family: str, hidden: int, heads: int, width: int) -> str | None:
    if not width and hidden % heads:
        return None
    width = width or hidden // heads
    if width % 2 and family in FAMILIES and traits_of(ModelConfig(family=family)).rotary:
        return f"a head dimension of {width} is odd; RoPE rotates pairs"
    return None


def _positions_suffice(family: str, positions: int, length: int, curriculum: str) -> str | None:
    if family not in FAMILIES or traits_of(ModelConfig(family=family)).rotary:
        return None
    longest = max([length, *(piece.length for piece in pieces(curriculum))])
    if longest > positions:
        return f"sequences of {longest} tokens need a row for each position, and model.positions = {positions}"
    return None


def _rope_is_stretched_between(factor: float, low: float, high: float) -> str | None:
    if factor > 1 and low >= high:
        return f"model.rope_low = {low:g} must be below model.rope_high = {high:g}"
    return None


def _kernel_caps(cap: float, kernel: str) -> str | None:
    if cap and ATTENTION_KERNELS[kernel] is not AUTO and not ATTENTION_KERNELS[kernel].written_out:
        return f"{kernel} has no cap of scores, and model.attention_cap = {cap:g}; take attention.kernel = 'auto'"
    return None


def _head_caps(cap: float, head: str) -> str | None:
    if cap and not LOSS_HEADS[head].caps:
        return f"the head {head!r} caps no logits, and model.logits_cap = {cap:g}; take loss.head = 'chunked'"
    return None


def _casts_suit_family(casts: str, family: str, window: int) -> str | None:
    if family not in FAMILIES or not read_plan(casts).changed:
        return None
    if window:
        return "checks have no bounds for a window under other casts; take 'lockstep'"
    if not traits_of(ModelConfig(family=family)).as_llama:
        like = [name for name in FAMILIES if traits_of(ModelConfig(family=name)).as_llama]
        return f"plans of casts exist only for Llama's operations ({', '.join(like)}); take 'lockstep'"
    return None


def _kv_heads_divide_heads(heads: int, kv_heads: int) -> str | None:
    return f"{kv_heads} KV heads do not divide {heads} query heads" if heads % kv_heads else None


def _batch_divides(batch: int, ranks: int, micro: int) -> str | None:
    if batch % (ranks * micro):
        return f"{batch} sequences are not a multiple of ranks × micro_batch_size = {ranks} × {micro}"
    return None


def _reference_on_a_gpu_is_bounded(device: str, budget: float) -> str | None:
    if device == "cuda" and not budget:
        return "a reference on the trainer's GPU needs parity.device_gb, its limit for checks there (lockstep plan)"
    return None


def _warmup_fits(warmup: int, steps: int) -> str | None:
    return f"{warmup} warm-up steps do not fit in {steps} steps" if warmup >= steps and warmup else None


def _decay_fits(schedule: str, share: float, warmup: int, steps: int) -> str | None:
    if schedule == "wsd" and warmup + round(share * steps) > steps:
        return f"a decay over {share:g} of {steps} steps begins before the {warmup} warm-up steps are over"
    return None


def _decay_is_asked_for(schedule: str, share: float, shape: str) -> str | None:
    defaults = OptimConfig()
    if schedule != "wsd" and (share, shape) != (defaults.decay_share, defaults.decay_shape):
        return (
            f"{schedule} has no decay_share and no decay_shape: take optim.schedule = 'wsd', or leave them at "
            f"{defaults.decay_share:g} and {defaults.decay_shape!r}"
        )
    return None


def _parts_are_known(text: str, keep_products: bool, every: int) -> str | None:
    parts = listed(text)
    if unknown := [part for part in parts if part not in PARTS]:
        return f"{', '.join(unknown)}: not a part of the model; the parts are {', '.join(PARTS)}"
    inner = [part for part in parts if part in ("norms", "attention", "mlp")]
    if "block" in parts and inner:
        return f"block includes {', '.join(inner)}: name either block or the others"
    if not parts and keep_products:
        return "nothing is recomputed, so recompute.keep_products has nothing to keep; name the parts"
    if every > 1 and set(parts) <= {"embedding"}:
        return f"recompute.every = {every} chooses blocks, but no part of a block is named"
    return None


def _budget_needs_inductor(budget: float, enabled: bool, backend: str) -> str | None:
    if budget < 1 and not (enabled and backend == "inductor"):
        return f"a memory budget of {budget:g} needs the compiler: set compile.enabled = true, backend inductor"
    return None


def _mode_needs_inductor(mode: str, enabled: bool, backend: str) -> str | None:
    if mode != "default" and not (enabled and backend == "inductor"):
        return f"{mode} is a mode of Inductor: set compile.enabled = true and compile.backend = inductor"
    return None


def _mode_suits_device(mode: str, device: str) -> str | None:
    if mode == "reduce-overhead" and device == "cpu":
        return "reduce-overhead replays CUDA graphs, which device = cpu does not have; use mode default"
    return None


def _mode_is_deterministic(mode: str, deterministic: bool) -> str | None:
    if mode == "max-autotune" and deterministic:
        return "max-autotune chooses kernels by measured time, which varies; with deterministic = true use default"
    return None


def _family_is_known(family: str) -> str | None:
    return None if family in FAMILIES else f"{family!r} is not a model family; the families are {', '.join(FAMILIES)}"


def _fp8_layers_are_there(patterns: str, policy: str, family: str, layers: int) -> str | None:
    if POLICIES[policy].fp8 is None or family not in FAMILIES:
        return None
    # The names of linears do not depend on widths.
    names = list(graph_of(ModelConfig(family=family, layers=layers)).linears)
    for pattern in listed(patterns) or [""]:
        if any(fnmatchcase(name, pattern) for name in ("lm_head", "embed")):
            return (
                f"{pattern!r} matches the head or the embedding, which stay out of FP8; name block linears (blocks.*)"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            return f"{pattern!r} matches no block linear; their names are {names[0]} … {names[-1]}"
    return None


def _casts_suit_policy(casts: str, policy: str) -> str | None:
    return problem_with(casts, POLICIES[policy].operand)


def _casts_suit_head(casts: str, head: str) -> str | None:
    if LOSS_HEADS[head].library and read_plan(casts).rounds("logits"):
        return f"the head of {head} has casts of its own and exposes no logits; take 'chunked', or leave logits = fp32"
    return None


def _groups_have_a_twin(grouped: str, device: str) -> str | None:
    if grouped == "kernel" and device == "cuda":
        return "how CUDA's kernels sum the gradients of a group has no twin yet: take 'copies'"
    return None


def _onednn_is_for_the_cpu(products: str, device: str) -> str | None:
    if products == "onednn" and device != "cpu":
        return "oneDNN is for products on the CPU: set device = cpu"
    return None


def _blocks_attend_on_the_cpu(kernel: str, device: str, policy: str) -> str | None:
    chosen = ATTENTION_KERNELS[kernel]
    if chosen.only_cpu and (device != "cpu" or POLICIES[policy].operand not in chosen.operands):
        return f"{kernel} is attention of bf16 and FP32 on the CPU: set device = cpu and a policy of such operands"
    return None


def _blocks_have_no_mask(kernel: str, document_mask: bool, window: int) -> str | None:
    if ATTENTION_KERNELS[kernel].only_cpu and (document_mask or window):
        return f"{kernel} takes no mask, as attention.document_mask and model.window need: take flash or math"
    return None


def _blocks_have_even_heads(kernel: str, hidden: int, heads: int, head_width: int) -> str | None:
    if ATTENTION_KERNELS[kernel].only_cpu and (head_width or hidden // heads) % 2:
        return f"{kernel} multiplies pairs of a head's elements: take an even width, or flash or math"
    return None


def _has_block_products(products: str, device: str, policy: str) -> str | None:
    if products == "brgemm" and (device != "cpu" or not FORMATS[POLICIES[policy].operand].by_blocks):
        return "oneDNN's block product is for FP32 and bf16 on the CPU: set device = cpu and a policy of their operands"
    return None


def _scale_is_a_power_of_two(scale: float) -> str | None:
    if math.frexp(scale)[0] != 0.5 or scale > 2.0**120:
        return f"{scale:g} is not a power of two (up to 2^120): any other scale would round the gradients again"
    return None


def _eight_bits_are_asked_for(library: str, name: str) -> str | None:
    if library != OptimConfig().eight_bit and not OPTIMIZERS[name].eight_bit:
        return f"the 8-bit AdamW of {library} was chosen, but optim.name = {name!r}; take optim.name = 'adamw8bit'"
    return None


def _fused_can_be(fused: bool | str, name: str, policy: str) -> str | None:
    # Under fp64 there are no 8-bit moments, and the optimizer is torch's AdamW.
    if fused != "auto" and not OPTIMIZERS[name].fused and not POLICIES[policy].exact:
        return f"{name} has one implementation; leave optim.fused = 'auto'"
    return None


def _head_has_z_loss(head: str, z_loss: float) -> str | None:
    if z_loss and not LOSS_HEADS[head].z_loss:
        return f"the head of {head} has no z-loss; take loss.head = 'chunked'"
    return None


def _head_suits_policy(head: str, policy: str) -> str | None:
    why = LOSS_HEADS[head].refusal(POLICIES[policy])
    return None if why is None else f"{why}; take 'chunked'"


def _head_suits_program(head: str, enabled: bool, scope: str) -> str | None:
    if LOSS_HEADS[head].reads_on_host and enabled and scope == "model":
        return (
            f"the head of {head} cannot be part of one compiled program (it reads values on the host); "
            "take compile.scope = 'blocks', which leaves the head out of it"
        )
    return None


def _sharded_program_is_of_blocks(strategy: str, enabled: bool, scope: str, mode: str) -> str | None:
    if strategy != "fsdp" or not enabled:
        return None
    if scope == "model":
        return "FSDP gathers weights between blocks, outside any graph; take compile.scope = 'blocks'"
    if mode != "default":
        return "a CUDA graph cannot hold weights that FSDP frees and gathers; take compile.mode = 'default'"
    return None


def _eight_bits_can_be_cut(strategy: str, name: str, eight_bit: str) -> str | None:
    if strategy == "fsdp" and OPTIMIZERS[name].eight_bit and eight_bit == "bitsandbytes":
        return "bitsandbytes' 8-bit optimizer cannot update parts of tensors; take optim.eight_bit = 'torchao'"
    return None


def _reduction_of_each_is_exact(each: bool, strategy: str, gradient_dtype: str) -> str | None:
    if not each:
        return None
    if strategy != "fsdp":
        return "parallel.strategy = 'ddp' sums gradients once a step; take 'fsdp'"
    if gradient_dtype != "fp32":
        return f"every micro-batch would be rounded to {gradient_dtype}; take parallel.gradient_dtype = 'fp32'"
    return None


def _waiting_needs_windows(minutes: float, shards: int) -> str | None:
    if minutes and not shards:
        return "an order over all shards needs all of them; set data.window_shards, which needs only the first ones"
    return None


RULES = (
    Rule(("data.wait_minutes", "data.window_shards"), _waiting_needs_windows),
    Rule(("parallel.strategy", "compile.enabled", "compile.scope", "compile.mode"), _sharded_program_is_of_blocks),
    Rule(("parallel.strategy", "optim.name", "optim.eight_bit"), _eight_bits_can_be_cut),
    Rule(
        ("parallel.reduce_every_micro_batch", "parallel.strategy", "parallel.gradient_dtype"),
        _reduction_of_each_is_exact,
    ),
    Rule(("loss.head", "loss.z_loss"), _head_has_z_loss),
    Rule(("loss.head", "precision.policy"), _head_suits_policy),
    Rule(("loss.head", "compile.enabled", "compile.scope"), _head_suits_program),
    Rule(("optim.eight_bit", "optim.name"), _eight_bits_are_asked_for),
    Rule(("optim.fused", "optim.name", "precision.policy"), _fused_can_be),
    Rule(("precision.cpu_products", "device"), _onednn_is_for_the_cpu),
    Rule(("precision.cpu_products", "device", "precision.policy"), _has_block_products),
    Rule(("attention.grouped", "device"), _groups_have_a_twin),
    Rule(("precision.casts", "precision.policy"), _casts_suit_policy),
    Rule(("precision.casts", "loss.head"), _casts_suit_head),
    Rule(("precision.loss_scale",), _scale_is_a_power_of_two),
    Rule(("recompute.parts", "recompute.keep_products", "recompute.every"), _parts_are_known),
    Rule(("recompute.memory_budget", "compile.enabled", "compile.backend"), _budget_needs_inductor),
    Rule(("compile.mode", "compile.enabled", "compile.backend"), _mode_needs_inductor),
    Rule(("compile.mode", "device"), _mode_suits_device),
    Rule(("compile.mode", "deterministic"), _mode_is_deterministic),
    Rule(("parity.reference_device", "parity.device_gb"), _reference_on_a_gpu_is_bounded),
    Rule(("model.family",), _family_is_known),
    Rule(("precision.fp8_layers", "precision.policy", "model.family", "model.layers"), _fp8_layers_are_there),
    Rule(("model.hidden", "model.heads", "model.head_width"), _heads_divide_hidden),
    Rule(("model.family", "model.hidden", "model.heads", "model.head_width"), _heads_are_even),
    Rule(("model.family", "model.positions", "train.sequence_length", "train.curriculum"), _positions_suffice),
    Rule(("model.rope_factor", "model.rope_low", "model.rope_high"), _rope_is_stretched_between),
    Rule(("model.attention_cap", "attention.kernel"), _kernel_caps),
    Rule(("attention.kernel", "device", "precision.policy"), _blocks_attend_on_the_cpu),
    Rule(("attention.kernel", "attention.document_mask", "model.window"), _blocks_have_no_mask),
    Rule(("attention.kernel", "model.hidden", "model.heads", "model.head_width"), _blocks_have_even_heads),
    Rule(("model.logits_cap", "loss.head"), _head_caps),
    Rule(("precision.casts", "model.family", "model.window"), _casts_suit_family),
    Rule(("model.heads", "model.kv_heads"), _kv_heads_divide_heads),
    Rule(("train.batch_size", "train.ranks", "train.micro_batch_size"), _batch_divides),
    Rule(("train.curriculum", "train.sequence_length", "train.micro_batch_size", "train.steps"), problem),
    Rule(("optim.warmup_steps", "train.steps"), _warmup_fits),
    Rule(
        ("optim.decay_share", "optim.schedule", "optim.warmup_steps", "train.steps"),
        lambda share, schedule, warmup, steps: _decay_fits(schedule, share, warmup, steps),
    ),
    Rule(("optim.schedule", "optim.decay_share", "optim.decay_shape"), _decay_is_asked_for),
)


def broken_rules(flat: Mapping[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    """Return (keys, message) of each broken rule. A rule is checked only if `flat` has all its keys."""
    broken = []
    for rule in RULES:
        if all(key in flat for key in rule.keys):
            message = rule.check(*(flat[key] for key in rule.keys))
            if message:
                broken.append((rule.keys, message))
    return broken

"""The run's configuration: frozen pydantic models, and the rules that tie their fields together.

A run file (core/config/file.py) lists only what differs from these defaults. Derived values are properties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lockstep.core.config.curriculum import pieces, problem
from lockstep.core.files.paths import path_problem

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Interval = Annotated[int, Field(ge=0, description="in optimizer steps; 0 = never")]


def _can_be_a_path(text: str) -> str:
    if problem := path_problem(text):
        raise ValueError(problem)
    return text


PathText = Annotated[str, AfterValidator(_can_be_a_path)]


def _is_a_curriculum(text: str) -> str:
    pieces(text)
    return text


def listed(text: str) -> list[str]:
    """The words of a setting that lists several, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


class Section(BaseModel):
    """A frozen part of the configuration that refuses keys that it does not know, infinities and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Llama 3: RMSNorm, RoPE, grouped-query attention, SwiGLU (Grattafiori et al. 2024, section 3.2)."""

    vocab_size: Positive = Field(4096, description="rows of the embedding; must cover the tokenizer")
    hidden: Positive = Field(256, description="width of the residual stream")
    layers: Annotated[int, Field(gt=0, le=10_000)] = Field(6, description="transformer blocks")
    heads: Positive = Field(8, description="query heads")
    kv_heads: Positive = Field(4, description="key and value heads; heads / kv_heads queries share one")
    ffn_hidden: Positive = Field(768, description="width inside SwiGLU")
    norm_eps: Annotated[float, Field(gt=0)] = Field(1e-5, description="RMSNorm epsilon")
    rope_theta: Annotated[float, Field(gt=1)] = Field(500_000.0, description="RoPE base frequency")
    tied: bool = Field(True, description="the head shares the embedding's weights")
    qkv_bias: bool = Field(False, description="biases on the query, key and value projections")
    o_bias: bool = Field(False, description="bias on attention's output projection")
    mlp_bias: bool = Field(False, description="biases on SwiGLU's projections")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


class DataConfig(Section):
    """Where the token shards are and how they are held."""

    path: PathText = Field("data/stdlib", description="folder that `lockstep data prepare` wrote")
    source: PathText = Field("", description="text to prepare: file, folder or glob; empty = Python's standard library")
    column: str = Field("text", description="key or column of the text in JSON lines and parquet")
    tokenizer: PathText = Field("", description="a tokenizer.json to use; empty = train one of model.vocab_size")
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(0.01, description="share of documents held out")
    seed: Annotated[int, Field(ge=0, lt=2**64)] = Field(0, description="seed of the order of samples")
    memory_limit_gib: Annotated[float, Field(ge=0)] = Field(
        0.0, description="shards are held in RAM up to this size, else memory-mapped; 0 = a quarter of the free memory"
    )
    prefetch: Positive = Field(4, description="batches that the background thread keeps ready")


class TrainConfig(Section):
    """How long, and how a step's batch is cut."""

    steps: Positive = Field(200, description="optimizer steps")
    batch_size: Positive = Field(16, description="sequences an optimizer step, over all ranks")
    micro_batch_size: Positive = Field(16, description="sequences that one rank computes at a time")
    sequence_length: Positive = Field(128, description="tokens a sequence")
    curriculum: Annotated[str, AfterValidator(_is_a_curriculum)] = Field(
        "",
        description="tokens a sequence by share of the steps, at as many tokens a step (`2048:0.9, 4096:0.1`); "
        "sequence_length is one of them, and batch_size and micro_batch_size count sequences of that one; empty = no "
        "other",
    )
    ranks: Positive = Field(1, description="data-parallel processes")
    on_not_finite: Literal["stop", "skip"] = Field(
        "stop", description="a step whose loss or gradients are not finite: end the run, or leave it out and count it"
    )
    skips_in_a_row: Positive = Field(10, description="on_not_finite = skip: so many left out one after another stop it")

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank accumulates in a step."""
        return self.batch_size // (self.ranks * self.micro_batch_size)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every number of tokens a sequence that a step of the run has, in the run's order."""
        return tuple(dict.fromkeys(piece.length for piece in pieces(self.curriculum))) or (self.sequence_length,)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the run."""
        return max(self.lengths)

    def micro_batch_of(self, length: int) -> int:
        """Sequences that one rank computes at a time if they have `length` tokens: as many tokens at any of the run's.

        Of a length that is not the run's, `micro_batch_size`.
        """
        of_run = length in self.lengths
        return self.micro_batch_size * self.sequence_length // length if of_run else self.micro_batch_size


class OptimConfig(Section):
    """Optimizer, schedule (docs/guide/schedules.md), clipping; rate and decay by parameter group (core/model/names.py).

    A group's learning rate is the schedule's times its `…_lr_scale` times what the width and batch rules say.
    """

    name: Literal["adamw", "adamw8bit", "muon"] = Field(
        "adamw", description="AdamW; AdamW with 8-bit moments; Muon for the matrices and AdamW for the rest"
    )
    eight_bit: Literal["torchao", "bitsandbytes"] = Field("torchao", description="adamw8bit: whose 8-bit optimizer")
    fused: bool | Literal["auto"] = Field(
        "auto", description="AdamW in one kernel (CUDA), or a list operation at a time; auto: one kernel on CUDA"
    )
    peak_lr: Annotated[float, Field(gt=0)] = Field(3e-3, description="learning rate at the end of the warm-up")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="last learning rate / peak")
    warmup_steps: Count = Field(20, description="steps of linear warm-up")
    schedule: Literal["cosine", "wsd", "linear"] = Field(
        "cosine", description="after the warm-up: half a cosine; stable, then a decay; a straight line"
    )
    decay_share: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="wsd: share of the steps that decays")
    decay_shape: Literal["linear", "sqrt"] = Field("sqrt", description="wsd: a straight line, or 1 − √(share done)")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay of the first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="decay of the second moment")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="added to √v̂")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="of the group `matrices`")
    embedding_weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="of the embedding, tied head or not")
    head_weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="of an untied head")
    gains_weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="of the norms' gains")
    matrices_lr_scale: Annotated[float, Field(gt=0)] = Field(1.0, description="learning rate of the matrices / lr")
    embedding_lr_scale: Annotated[float, Field(gt=0)] = Field(1.0, description="learning rate of the embedding / lr")
    head_lr_scale: Annotated[float, Field(gt=0)] = Field(1.0, description="learning rate of an untied head / lr")
    gains_lr_scale: Annotated[float, Field(gt=0)] = Field(1.0, description="learning rate of gains and biases / lr")
    base_width: Count = Field(0, description="matrices' rate × base_width / hidden (Yang et al. 2022); 0 = off")
    base_batch: Count = Field(0, description="every rate × √(batch_size / base_batch); 0 = off")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="Muon: decay of the momentum")
    nesterov: bool = Field(True, description="Muon: Nesterov's form of the momentum")
    ns_steps: Annotated[int, Field(gt=0, lt=100)] = Field(5, description="Muon: Newton–Schulz iterations")
    ns_dtype: Literal["bf16", "fp32"] = Field("bf16", description="Muon: precision of the Newton–Schulz iterations")
    clip_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="limit of the global gradient norm; 0 = no clipping"
    )


# Names of a block's linear layers, after `blocks.N.`.
BLOCK_LINEARS = (
    "attn.q_proj",
    "attn.k_proj",
    "attn.v_proj",
    "attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)

Policy = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8_tensorwise", "fp8_rowwise"]


class PrecisionConfig(Section):
    """Which casts the model makes (torch_backend/precision.py and its twin jax_backend/precision.py)."""

    policy: Policy = Field(
        "bf16",
        description="operands of the matrix products; fp64, fp32: no casts; fp8: bf16 but for the block linears",
    )
    cpu_products: Literal["auto", "blas", "onednn"] = Field(
        "auto",
        description="FP32 products on the CPU in eager: of torch's BLAS, or of oneDNN, which sums in another order; "
        "auto: oneDNN's under fp32 and tf32",
    )
    fp8_layers: str = Field("blocks.*", description="block linears in FP8, by name: patterns, separated by commas")
    fp8_fast_accumulation: bool = Field(True, description="FP8 on Hopper: the output's sums in its short accumulator")
    loss_scale: Annotated[float, Field(gt=0)] = Field(65536.0, description="fp16: the first loss scale, a power of two")
    loss_scale_interval: Positive = Field(2000, description="fp16: finite steps after which the loss scale doubles")

    @property
    def operand(self) -> Policy:
        """The policy of every matrix product outside FP8."""
        return "bf16" if self.policy.startswith("fp8") else self.policy

    @property
    def fp8(self) -> Literal["tensorwise", "rowwise"] | None:
        """Which numbers share a scale in FP8: all of a tensor, or those of a row; None without FP8."""
        return {"fp8_tensorwise": "tensorwise", "fp8_rowwise": "rowwise"}.get(self.policy)  # type: ignore[return-value]

    @property
    def couples_sequences(self) -> bool:
        """Whether what becomes of a sequence depends on the others of its micro-batch: FP8's scales are theirs too."""
        return self.fp8 is not None

    def is_fp8(self, module: str) -> bool:
        """Whether a module, by its canonical name, is a linear layer that computes in FP8."""
        is_linear = module.startswith("blocks.") and module.split(".", 2)[2] in BLOCK_LINEARS
        return (
            self.fp8 is not None
            and is_linear
            and any(fnmatchcase(module, pattern) for pattern in listed(self.fp8_layers))
        )


# Whose loss head may stand in for Lockstep's own: torch.nn.functional.linear_cross_entropy, Liger-Kernel,
# cut-cross-entropy.
LIBRARIES = ("torch", "liger", "cce")


class LossConfig(Section):
    """The head: from the final norm's output to the loss."""

    head: Literal["full", "chunked", "torch", "liger", "cce"] = Field(
        "chunked",
        description="whole logits at once; so many tokens' at a time, gradients made in the forward pass; or the head "
        "of torch (2.13), liger-kernel or cut-cross-entropy, without logits (docs/results/library_heads.md)",
    )
    chunk: Positive = Field(4096, description="tokens of a chunk; liger and cce choose their own")
    z_loss: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of logsumexp(logits)² in each token's loss (Chowdhery et al. 2022)"
    )

    @property
    def of_library(self) -> bool:
        """Whether the head is a library's, which shows no logits."""
        return self.head in LIBRARIES


class AttentionConfig(Section):
    """How attention is computed, and what a token may see."""

    kernel: Literal["auto", "cudnn", "flash", "efficient", "math", "fa3", "flex"] = Field(
        "auto", description="which kernel; auto: torch's choice on CPU, cuDNN's on CUDA"
    )
    document_mask: bool = Field(False, description="tokens see their own document only")
    reset_positions: bool = Field(False, description="positions count from 0 in each document")

    @property
    def needs_documents(self) -> bool:
        """Whether a batch must say which document each token belongs to."""
        return self.document_mask or self.reset_positions


class RecomputeConfig(Section):
    """Activation checkpointing: what the backward pass computes again instead of keeping it."""

    parts: str = Field(
        "", description="of embedding, norms, attention, mlp, block; separated by commas; empty = keep everything"
    )
    every: Positive = Field(1, description="in every so-manieth block")
    keep_products: bool = Field(False, description="what matrix products gave is kept all the same (selective)")
    memory_budget: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the activations that the compiler may keep; 1 = its own choice"
    )

    @property
    def chosen(self) -> frozenset[str]:
        """The parts."""
        return frozenset(listed(self.parts))


class CompileConfig(Section):
    """torch.compile of the forward and backward pass, fullgraph."""

    enabled: bool = Field(True, description="compile; off = eager")
    backend: Literal["inductor", "aot_eager"] = Field("inductor", description="aot_eager traces but generates no code")
    scope: Literal["model", "blocks"] = Field("model", description="one program, or one for all blocks and one a rest")
    mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default", description="reduce-overhead: CUDA graphs; max-autotune: with kernels tried out"
    )


class ParallelConfig(Section):
    """Data parallel training over `train.ranks` processes (torchrun)."""

    strategy: Literal["ddp", "fsdp"] = Field(
        "ddp", description="whole weights on every rank, or weights, gradients and moments cut over ranks (FSDP2)"
    )
    reshard_after_forward: bool = Field(
        True, description="fsdp: a block's gathered weights are freed after its forward pass, and gathered again"
    )
    reduce_every_micro_batch: bool = Field(
        False, description="fsdp: gradients are summed after each micro-batch, and no rank keeps whole ones; off: once"
    )
    gradient_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="in which gradients are summed over ranks"
    )
    bucket_mb: Positive = Field(25, description="gradients that are reduced together, in MB")
    timeout_seconds: Positive = Field(
        600, description="a rank that keeps the others waiting for so long is given up; programs are compiled in it"
    )


class EvalConfig(Section):
    """Validation on held-out documents."""

    every: Interval = 50
    batches: Positive = Field(4, description="micro-batches of the validation split")


class CheckpointConfig(Section):
    """Checkpoints: always at the end, on Ctrl-C and SIGTERM, and at these intervals."""

    every: Interval = 0
    keep: Positive = Field(2, description="last checkpoints that are kept")
    keep_every: Interval = Field(0, description="of these steps' multiples all are kept; 0 = none")
    best: bool = Field(True, description="write and keep that of the lowest validation loss")


class ParityConfig(Section):
    """Checks against the reference during training (`lockstep train --parity.every N`)."""

    every: Interval = 0
    queue: Positive = Field(2, description="checks that may wait for the reference; more are skipped and counted")
    record_every: Interval = Field(
        0, description="sketches of a step kept for `lockstep replay`, without a reference; checked steps keep theirs"
    )
    timeout_seconds: Positive = Field(
        1800, description="a reference that gives nothing for so long, with a check to judge, is ended"
    )
    reference_devices: Positive = Field(
        1, description="devices of the reference: sequences, weights and moments are cut over them (JAX)"
    )
    on_alarm: Literal["log", "stop", "roll_back"] = Field(
        "log", description="after a check that disagreed: go on, stop, or stop at the last checkpoint before it"
    )

    def due(self, step: int) -> bool:
        """Whether step `step` is checked: every `every` steps, and step 1."""
        return self.every > 0 and (step % self.every == 0 or step == 1)


class LogConfig(Section):
    """Values that cost something, each at its own interval, and where records go."""

    norms_every: Interval = Field(10, description="parameter, gradient and update norms by group")
    memory_every: Interval = Field(10, description="memory in use, and its peak")
    fp32_loss_every: Interval = Field(50, description="cross-entropy recomputed in FP32 from FP32 weights on a slice")
    fp32_loss_sequences: Positive = Field(8, description="sequences of train.sequence_length in that slice")
    attention_logits_every: Interval = Field(50, description="largest attention logit of each layer on a slice")
    attention_logits_sequences: Positive = Field(2, description="sequences in that slice")
    spike_sigma: Annotated[float, Field(ge=0)] = Field(
        6.0,
        description="a loss so many deviations above the last ones has its batch kept (docs/guide/seeing.md); 0 = off",
    )
    sample_every: Interval = Field(0, description="a text sample from the prompt")
    sample_prompt: str = Field("The meaning of life is ", description="prompt of the sample")
    sample_tokens: Positive = Field(50, description="tokens of the sample")
    nvtx: bool = Field(False, description="NVTX ranges around the parts of a step, for Nsight Systems (torch on CUDA)")
    wandb: Literal["disabled", "offline", "online"] = Field("disabled", description="Weights & Biases")
    wandb_project: str = Field("lockstep", description="project of Weights & Biases")


class RunConfig(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = Field(
        "run", description="name of the run directory"
    )
    seed: Count = Field(0, description="seed of the initial weights")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the torch backend runs")
    deterministic: bool = Field(False, description="the same bits every time: what cannot promise them ends the run")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    precision: PrecisionConfig = PrecisionConfig()
    loss: LossConfig = LossConfig()
    attention: AttentionConfig = AttentionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    compile: CompileConfig = CompileConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parity: ParityConfig = ParityConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _rules_hold(self) -> RunConfig:
        broken = broken_rules(flatten(self.model_dump()))
        if broken:
            raise ValueError("; ".join(f"{keys[0]}: {message}" for keys, message in broken))
        return self


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys. An empty one stays, as a value of its own."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True)
class Rule:
    """A condition over several fields: `check` takes their values and returns what is wrong, or None."""

    keys: tuple[str, ...]
    check: Callable[..., str | None]


def _heads_divide_hidden(hidden: int, heads: int) -> str | None:
    if hidden % heads:
        return f"{heads} heads do not divide hidden = {hidden}"
    if (hidden // heads) % 2:
        return f"a head dimension of {hidden // heads} is odd; RoPE rotates pairs"
    return None


def _kv_heads_divide_heads(heads: int, kv_heads: int) -> str | None:
    return f"{kv_heads} KV heads do not divide {heads} query heads" if heads % kv_heads else None


def _batch_divides(batch: int, ranks: int, micro: int) -> str | None:
    if batch % (ranks * micro):
        return f"{batch} sequences are not divided by ranks × micro_batch_size = {ranks} × {micro}"
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


PARTS = ("embedding", "norms", "attention", "mlp", "block")


def _parts_are_known(text: str, keep_products: bool, every: int) -> str | None:
    parts = listed(text)
    if unknown := [part for part in parts if part not in PARTS]:
        return f"{', '.join(unknown)}: no part of the model; the parts are {', '.join(PARTS)}"
    inner = [part for part in parts if part in ("norms", "attention", "mlp")]
    if "block" in parts and inner:
        return f"block covers {', '.join(inner)}: name the one or the others"
    if not parts and keep_products:
        return "nothing is recomputed, so recompute.keep_products has nothing to keep; name the parts"
    if every > 1 and set(parts) <= {"embedding"}:
        return f"recompute.every = {every} chooses blocks, but no part of a block is named"
    return None


def _budget_needs_inductor(budget: float, enabled: bool, backend: str) -> str | None:
    if budget < 1 and not (enabled and backend == "inductor"):
        return f"a memory budget of {budget:g} is the compiler's business: set compile.enabled = true, backend inductor"
    return None


def _mode_needs_inductor(mode: str, enabled: bool, backend: str) -> str | None:
    if mode != "default" and not (enabled and backend == "inductor"):
        return f"{mode} is a mode of Inductor: set compile.enabled = true and compile.backend = inductor"
    return None


def _mode_suits_device(mode: str, device: str) -> str | None:
    if mode == "reduce-overhead" and device == "cpu":
        return "reduce-overhead replays CUDA graphs, and device = cpu has none; use mode default"
    return None


def _mode_is_deterministic(mode: str, deterministic: bool) -> str | None:
    if mode == "max-autotune" and deterministic:
        return "max-autotune chooses kernels by time, which is never the same; with deterministic = true use default"
    return None


def _fp8_layers_are_there(policy: str, patterns: str, layers: int) -> str | None:
    if not policy.startswith("fp8"):
        return None
    names = [f"blocks.{i}.{linear}" for i in range(layers) for linear in BLOCK_LINEARS]
    for pattern in listed(patterns) or [""]:
        if any(fnmatchcase(name, pattern) for name in ("lm_head", "embed")):
            return (
                f"{pattern!r} matches the head or the embedding, which stay out of FP8; name block linears (blocks.*)"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            return f"{pattern!r} matches no block linear; their names are {names[0]} … {names[-1]}"
    return None


def _onednn_is_for_eager(products: str, device: str, enabled: bool) -> str | None:
    if products == "onednn" and (device != "cpu" or enabled):
        return "oneDNN makes the products of eager runs on the CPU: set device = cpu and compile.enabled = false"
    return None


def _scale_is_a_power_of_two(scale: float) -> str | None:
    if math.frexp(scale)[0] != 0.5 or scale > 2.0**120:
        return f"{scale:g} is not a power of two (up to 2^120): every other scale would round the gradients once more"
    return None


def _eight_bits_are_asked_for(library: str, name: str) -> str | None:
    if library != "torchao" and name != "adamw8bit":
        return f"the 8-bit AdamW of {library} was chosen, but optim.name = {name!r}; take optim.name = 'adamw8bit'"
    return None


def _fused_can_be(fused: bool | str, name: str, device: str) -> str | None:
    if fused == "auto":
        return None
    if name == "adamw8bit":
        return "8-bit AdamW has one implementation; leave optim.fused = 'auto'"
    if fused and device == "cpu":
        return "the fused AdamW is a CUDA kernel, and device = cpu; take optim.fused = 'auto'"
    return None


def _head_has_z_loss(head: str, z_loss: float) -> str | None:
    if z_loss and head in ("torch", "cce"):
        return f"the head of {head} knows no z-loss; take loss.head = 'chunked'"
    return None


def _head_suits_policy(head: str, policy: str) -> str | None:
    if head == "cce" and policy in ("fp64", "fp32", "tf32"):
        return f"cut-cross-entropy has gradients in bf16 and FP16 alone, not under {policy}; take 'chunked'"
    if head == "liger" and policy == "fp64":
        return "Liger's kernel computes in FP32, and fp64 would not be what it says; take 'chunked'"
    return None


def _head_suits_program(head: str, enabled: bool, scope: str) -> str | None:
    if head in ("liger", "cce") and enabled and scope == "model":
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
    if strategy == "fsdp" and name == "adamw8bit" and eight_bit == "bitsandbytes":
        return "bitsandbytes' 8-bit optimizer knows no parts of tensors; take optim.eight_bit = 'torchao'"
    return None


def _reduction_of_each_is_exact(each: bool, strategy: str, gradient_dtype: str) -> str | None:
    if not each:
        return None
    if strategy != "fsdp":
        return "parallel.strategy = 'ddp' sums gradients once a step; take 'fsdp'"
    if gradient_dtype != "fp32":
        return f"every micro-batch would be rounded to {gradient_dtype}; take parallel.gradient_dtype = 'fp32'"
    return None


RULES = (
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
    Rule(("optim.fused", "optim.name", "device"), _fused_can_be),
    Rule(("precision.cpu_products", "device", "compile.enabled"), _onednn_is_for_eager),
    Rule(("precision.loss_scale",), _scale_is_a_power_of_two),
    Rule(("recompute.parts", "recompute.keep_products", "recompute.every"), _parts_are_known),
    Rule(("recompute.memory_budget", "compile.enabled", "compile.backend"), _budget_needs_inductor),
    Rule(("compile.mode", "compile.enabled", "compile.backend"), _mode_needs_inductor),
    Rule(("compile.mode", "device"), _mode_suits_device),
    Rule(("compile.mode", "deterministic"), _mode_is_deterministic),
    Rule(("precision.fp8_layers", "precision.policy", "model.layers"), lambda f, p, n: _fp8_layers_are_there(p, f, n)),
    Rule(("model.hidden", "model.heads"), _heads_divide_hidden),
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
    """(keys, what is wrong) of each rule that does not hold; rules whose keys are not all there are passed over."""
    broken = []
    for rule in RULES:
        if all(key in flat for key in rule.keys):
            message = rule.check(*(flat[key] for key in rule.keys))
            if message:
                broken.append((rule.keys, message))
    return broken

"""The sections of a run's configuration: frozen pydantic models. Derived values are properties."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lockstep.core.components.attention_kernels import ATTENTION_KERNELS, AttentionKernel
from lockstep.core.components.cast_plan import CastPlan, canonical, read_plan
from lockstep.core.components.choice import OneOf
from lockstep.core.components.loss_heads import LOSS_HEADS, LossHead
from lockstep.core.components.optimizers import OPTIMIZERS, Optimizer
from lockstep.core.components.precision import POLICIES, PrecisionPolicy, Recipe
from lockstep.core.config.curriculum import pieces
from lockstep.core.config.mixture import Part, all_parts
from lockstep.core.config.mixture import parts as parts_of_mixture
from lockstep.core.files.paths import path_problem

Positive = Annotated[int, Field(gt=0)]
Gigabytes = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Interval = Annotated[int, Field(ge=0, description="in optimizer steps; 0 = never")]


def _can_be_a_path(text: str) -> str:
    if problem := path_problem(text):
        raise ValueError(problem)
    return text


PathText = Annotated[str, AfterValidator(_can_be_a_path)]


def _is_positive(number: int | str) -> int | str:
    if isinstance(number, int) and number < 1:
        raise ValueError("must be at least 1")
    return number


def _is_a_curriculum(text: str) -> str:
    pieces(text)
    return text


def _is_a_mixture(text: str) -> str:
    all_parts(text)
    return text


def listed(text: str) -> list[str]:
    """Split a setting that lists several words, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


class Section(BaseModel):
    """A frozen part of the configuration. Unknown keys, infinities and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Sizes of the model; its family defines its operations (core/model/families)."""

    family: str = Field(
        "llama",
        description="family, which defines the model's operations: llama, gpt2, qwen2, qwen3, mistral or gemma2",
    )
    vocab_size: Positive = Field(4096, description="rows of the embedding; must cover the tokenizer")
    hidden: Positive = Field(256, description="width of the residual stream")
    layers: Annotated[int, Field(gt=0, le=10_000)] = Field(6, description="transformer blocks")
    heads: Positive = Field(8, description="query heads")
    kv_heads: Positive = Field(4, description="key and value heads; heads / kv_heads queries share one")
    head_width: Count = Field(0, description="width of one head; 0 = hidden / heads")
    ffn_hidden: Positive = Field(768, description="width inside the MLP")
    norm_eps: Annotated[float, Field(gt=0)] = Field(1e-5, description="epsilon of the norms")
    rope_theta: Annotated[float, Field(gt=1)] = Field(500_000.0, description="RoPE base frequency")
    rope_factor: Annotated[float, Field(ge=1)] = Field(
        1.0, description="divisor of RoPE's low frequencies, as in Llama 3.1; 1 = off"
    )
    rope_low: Annotated[float, Field(gt=0)] = Field(
        1.0, description="with rope_factor: frequencies below this many turns in rope_original tokens are fully divided"
    )
    rope_high: Annotated[float, Field(gt=0)] = Field(
        4.0, description="with rope_factor: frequencies above this many turns in rope_original tokens are not divided"
    )
    rope_original: Positive = Field(
        8192, description="with rope_factor: sequence length in tokens of the original model"
    )
    positions: Positive = Field(1024, description="rows of the table of learned positions (gpt2)")
    window: Count = Field(
        0, description="number of tokens that a query sees, itself included (gemma2: in every second block); 0 = all"
    )
    attention_scale: Annotated[float, Field(ge=0)] = Field(
        0.0, description="factor of q·kᵀ in attention's scores; 0 = 1/√(width of one head)"
    )
    attention_cap: Annotated[float, Field(ge=0)] = Field(
        0.0, description="cap of attention's scores: cap·tanh(score / cap); 0 = off"
    )
    logits_cap: Annotated[float, Field(ge=0)] = Field(
        0.0, description="cap of the logits: cap·tanh(logit / cap); 0 = off"
    )
    tied: bool = Field(True, description="the head shares the embedding's weights")
    qkv_bias: bool = Field(False, description="biases on the query, key and value projections")
    o_bias: bool = Field(False, description="bias on attention's output projection")
    mlp_bias: bool = Field(False, description="biases on the MLP's projections")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.head_width or self.hidden // self.heads

    @property
    def score_scale(self) -> float:
        """The factor of attention's scores."""
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)


class DataConfig(Section):
    """The token shards of a run, and their use of memory."""

    path: PathText = Field("data/stdlib", description="folder that `lockstep data prepare` wrote")
    mixture: Annotated[str, AfterValidator(_is_a_mixture)] = Field(
        "",
        description="prepared folders to read in place of path, and the weight of each "
        "(`data/code: 0.7, data/web: 0.3`); empty = path alone",
    )
    source: PathText = Field(
        "",
        description="text to prepare: file, folder, glob or address (s3://…); empty = Python's standard library",
    )
    column: str = Field("text", description="key or column of the text in JSON lines and parquet")
    tokenizer: PathText = Field("", description="a tokenizer.json to use; empty = train one of model.vocab_size")
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(0.01, description="share of the documents for validation")
    on_broken: Literal["error", "skip"] = Field(
        "error",
        description="a record without text (bad JSON, missing key, invalid UTF-8): end, or skip and count it",
    )
    duplicates: Literal["keep", "drop"] = Field(
        "keep",
        description="documents with exactly the text of an earlier one: keep or drop them; they are "
        "counted in both cases",
    )
    max_document_bytes: Count = Field(0, description="longer documents are skipped and counted; 0 = no limit")
    seed: Annotated[int, Field(ge=0, lt=2**64)] = Field(0, description="seed of the order of samples")
    memory_limit_gib: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="shards are loaded into RAM up to this size, else memory-mapped; 0 = a quarter of the free memory",
    )
    window_shards: Count = Field(
        0,
        description="number of consecutive shards within which blocks are shuffled, so that training can begin "
        "before all shards exist; 0 = all",
    )
    wait_minutes: Annotated[float, Field(ge=0)] = Field(
        0.0, description="minutes to wait for a shard that is being prepared; 0 = the data must be finished"
    )
    prefetch: Positive = Field(4, description="batches that the background thread keeps ready")

    @property
    def parts(self) -> tuple[Part, ...]:
        """The data sets of the mixture with a weight above zero; () without a mixture."""
        return parts_of_mixture(self.mixture)

    @property
    def folders(self) -> tuple[str, ...]:
        """The prepared folders that a run reads."""
        return tuple(part.path for part in self.parts) or (self.path,)

    @property
    def title(self) -> str:
        """The name of the data for messages: the folder, or the mixture."""
        return f"the mixture {self.mixture}" if self.mixture else self.path


class TrainConfig(Section):
    """The length of the run, and the division of a step's batch into micro-batches."""

    steps: Positive = Field(200, description="optimizer steps")
    batch_size: Positive = Field(16, description="sequences per optimizer step, over all ranks")
    micro_batch_size: Positive = Field(16, description="sequences that one rank computes at a time")
    sequence_length: Positive = Field(128, description="tokens per sequence")
    curriculum: Annotated[str, AfterValidator(_is_a_curriculum)] = Field(
        "",
        description="sequence lengths, each with its share of the steps (`2048:0.9, 4096:0.1`); tokens per step "
        "stay the same. sequence_length must be one of them; batch_size and micro_batch_size count sequences "
        "of that length. empty = sequence_length alone",
    )
    ranks: Positive = Field(1, description="data-parallel processes")
    on_not_finite: Literal["stop", "skip"] = Field(
        "stop", description="a step whose loss or gradients are not finite: end the run, or skip and count the step"
    )
    skips_in_a_row: Positive = Field(
        10, description="on_not_finite = skip: this many skipped steps in a row end the run"
    )

    @property
    def accumulation(self) -> int:
        """The number of micro-batches that one rank accumulates in a step."""
        return self.batch_size // (self.ranks * self.micro_batch_size)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sequence lengths of the run's steps, in tokens, each once, in the order of the run."""
        return tuple(dict.fromkeys(piece.length for piece in pieces(self.curriculum))) or (self.sequence_length,)

    @property
    def longest(self) -> int:
        """The longest sequence length of the run, in tokens."""
        return max(self.lengths)

    def micro_batch_of(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that one rank computes at a time.

        For each length of the run, a micro-batch has the same number of tokens. For any other length, the result is
        `micro_batch_size`.
        """
        of_run = length in self.lengths
        return self.micro_batch_size * self.sequence_length // length if of_run else self.micro_batch_size


class OptimConfig(Section):
    """The optimizer, the schedule (docs/guide/schedules.md), clipping, and settings by group (core/model/names.py).

    A group's learning rate is the scheduled rate · the group's `…_lr_scale` · the factors of the width and batch rules.
    """

    name: Annotated[str, OneOf(OPTIMIZERS)] = Field(
        "adamw", description="AdamW; AdamW with 8-bit moments; Muon for the matrices and AdamW for the rest"
    )
    eight_bit: Literal["torchao", "bitsandbytes"] = Field(
        "torchao", description="adamw8bit: library of the 8-bit optimizer"
    )
    fused: bool | Literal["auto"] = Field(
        "auto", description="AdamW in one kernel, or one list operation at a time; auto: one kernel"
    )
    peak_lr: Annotated[float, Field(gt=0)] = Field(3e-3, description="learning rate at the end of the warm-up")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="final learning rate / peak")
    warmup_steps: Count = Field(20, description="steps of linear warm-up")
    schedule: Literal["cosine", "wsd", "linear"] = Field(
        "cosine", description="learning rate after the warm-up: half a cosine; constant, then a decay; linear"
    )
    decay_share: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="wsd: share of the steps with a decay")
    decay_shape: Literal["linear", "sqrt"] = Field("sqrt", description="wsd: linear, or 1 − √(share done)")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay of the first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="decay of the second moment")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="added to √v̂")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="weight decay of the group `matrices`")
    embedding_weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight decay of the embedding, also if it is the head"
    )
    head_weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="weight decay of an untied head")
    gains_weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="weight decay of the norms' gains")
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

    @property
    def chosen(self) -> Optimizer:
        """The description of the optimizer."""
        return OPTIMIZERS[self.name]


class PrecisionConfig(Section):
    """The casts of the model (torch_backend/precision.py and its twin jax_backend/precision.py)."""

    policy: Annotated[str, OneOf(POLICIES)] = Field(
        "bf16",
        description="format of the matrix products' operands; fp64, fp32: no casts; fp8: bf16 except in the block "
        "linears",
    )
    casts: Annotated[str, BeforeValidator(canonical)] = Field(
        "lockstep",
        description="other values rounded to the operands' format: lockstep: none; autocast: those of "
        "torch.autocast; or choices such as `residual=bf16, logits=bf16` (docs/guide/casts.md)",
    )
    cpu_products: Literal["auto", "blas", "onednn", "brgemm"] = Field(
        "auto",
        description="library of products with FP32 results on the CPU: blas: torch's; onednn: of FP32 "
        "operands; brgemm: oneDNN's block product, of FP32 or bf16 operands; auto: the faster (docs/guide/levers.md)",
    )
    fp8_layers: str = Field("blocks.*", description="names of block linears in FP8: patterns, separated by commas")
    fp8_fast_accumulation: bool = Field(
        True, description="FP8 on Hopper: sum the output in the tensor cores' short accumulator"
    )
    fp8_history: Positive = Field(
        16, description="fp8_delayed: number of earlier steps whose largest magnitudes set the scales"
    )
    loss_scale: Annotated[float, Field(gt=0)] = Field(65536.0, description="fp16: initial loss scale, a power of two")
    loss_scale_interval: Positive = Field(2000, description="fp16: finite steps after which the loss scale doubles")

    @property
    def chosen(self) -> PrecisionPolicy:
        """The description of the policy."""
        return POLICIES[self.policy]

    @property
    def plan(self) -> CastPlan:
        """The plan of casts."""
        return read_plan(self.casts)

    @property
    def operand(self) -> str:
        """The format of the operands of every matrix product outside FP8."""
        return self.chosen.operand

    @property
    def stream(self) -> str:
        """The format of all tensors except operands of products: `fp32` or `fp64`."""
        return self.chosen.stream

    @property
    def fp8(self) -> Recipe | None:
        """The FP8 recipe, as in `PrecisionPolicy.fp8`; None without FP8."""
        return self.chosen.fp8

    @property
    def exact(self) -> bool:
        """True if all computations are in FP64."""
        return self.chosen.exact

    @property
    def couples_sequences(self) -> bool:
        """True if a sequence's result depends on other sequences of its micro-batch, as with FP8's shared scales."""
        return self.fp8 is not None

    def is_fp8(self, linear: str) -> bool:
        """Return whether a block's linear layer, given by its module's canonical name, computes in FP8."""
        return self.fp8 is not None and any(fnmatchcase(linear, pattern) for pattern in listed(self.fp8_layers))


class LossConfig(Section):
    """The loss head: from the final norm's output to the loss."""

    head: Annotated[str, OneOf(LOSS_HEADS)] = Field(
        "chunked",
        description="loss head: full: all logits at once; chunked, one_kernel: chunk by chunk with gradients in "
        "the forward pass, by generated kernels or one Triton kernel (CUDA); torch (2.13), liger, cce: the "
        "library's head, which exposes no logits (docs/results/library_heads.md)",
    )
    chunk: Positive = Field(4096, description="tokens per chunk; liger and cce use it only in evaluation")
    z_loss: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of logsumexp(logits)² in each token's loss (Chowdhery et al. 2022)"
    )

    @property
    def chosen(self) -> LossHead:
        """The description of the head."""
        return LOSS_HEADS[self.head]

    @property
    def of_library(self) -> bool:
        """True if the head is a library's, which exposes no logits."""
        return self.chosen.library


class AttentionConfig(Section):
    """The attention kernel, and the treatment of documents."""

    kernel: Annotated[str, OneOf(ATTENTION_KERNELS)] = Field(
        "auto",
        description="attention kernel; auto: on the CPU flash_brgemm, math or flash, by machine, length and precision; "
        "on CUDA cuDNN's",
    )
    grouped: Literal["copies", "kernel"] = Field(
        "copies",
        description="grouped queries: copy the keys and values for each query, or let the kernel handle groups "
        "and sum their gradients (torch's enable_gqa, on the CPU)",
    )
    document_mask: bool = Field(False, description="tokens attend only to their own document")
    reset_positions: bool = Field(False, description="positions count from 0 in each document")

    @property
    def chosen(self) -> AttentionKernel:
        """The description of the kernel, or AUTO."""
        return ATTENTION_KERNELS[self.kernel]

    @property
    def needs_documents(self) -> bool:
        """True if a batch must have the document of each token."""
        return self.document_mask or self.reset_positions


# Parts of the model that the backward pass may recompute.
PARTS = ("embedding", "norms", "attention", "mlp", "block")


class RecomputeConfig(Section):
    """Activation checkpointing: the parts of the model that the backward pass recomputes."""

    parts: str = Field(
        "",
        description="parts to recompute: embedding, norms, attention, mlp, block; separated by commas; empty "
        "= keep everything",
    )
    every: Positive = Field(1, description="recompute only every N-th block")
    keep_products: bool = Field(False, description="keep the results of matrix products (selective checkpointing)")
    memory_budget: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the activations that the compiler may keep; 1 = the compiler's own choice"
    )

    @property
    def chosen(self) -> frozenset[str]:
        """The parts to recompute."""
        return frozenset(listed(self.parts))


class CompileConfig(Section):
    """torch.compile of the forward and backward pass, with fullgraph."""

    enabled: bool = Field(True, description="compile the step; off = eager")
    backend: Literal["inductor", "aot_eager"] = Field("inductor", description="aot_eager traces but generates no code")
    scope: Literal["model", "blocks"] = Field(
        "model", description="model: one program; blocks: one program for all blocks, and one for each other part"
    )
    mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default", description="reduce-overhead: CUDA graphs; max-autotune: kernels selected by measured time"
    )


class ParallelConfig(Section):
    """Data-parallel training over `train.ranks` processes (torchrun)."""

    strategy: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="ddp: all weights on every rank; fsdp: weights, gradients and moments sharded over ranks (FSDP2)",
    )
    reshard_after_forward: bool = Field(
        True, description="fsdp: a block's gathered weights are freed after its forward pass, and gathered again"
    )
    reduce_every_micro_batch: bool = Field(
        False,
        description="fsdp: sum gradients after each micro-batch, so that no rank keeps whole ones; off: once a step",
    )
    gradient_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="format in which gradients are summed over ranks"
    )
    bucket_mb: Positive = Field(
        25, description="ddp: MB of gradients that are reduced together; compiled programs are split there"
    )
    timeout_seconds: Positive = Field(
        600, description="time after which a rank that blocks the others counts as lost; compilation must fit into it"
    )


class EvalConfig(Section):
    """Validation on held-out documents."""

    every: Interval = 50
    batches: Positive = Field(4, description="micro-batches of the validation split")


class CheckpointConfig(Section):
    """Checkpoints: always at the end, on Ctrl-C and SIGTERM, and at these intervals."""

    every: Interval = 0
    keep: Positive = Field(2, description="number of latest checkpoints to keep")
    keep_every: Interval = Field(0, description="keep all checkpoints at multiples of this many steps; 0 = none")
    best: bool = Field(True, description="write and keep the checkpoint with the lowest validation loss")


class ParityConfig(Section):
    """Checks against the reference during training (`lockstep train --parity.every N`)."""

    every: Interval = 0
    queue: Positive = Field(
        2, description="maximum number of checks that wait for the reference; others are skipped and counted"
    )
    record_every: Interval = Field(
        0, description="keep sketches of a step's own gradients for `lockstep replay`, without another pass"
    )
    record_taps_every: Interval = Field(
        0,
        description="also keep sketches of a micro-batch's taps and their gradients, by a second forward and "
        "backward pass",
    )
    timeout_seconds: Positive = Field(
        1800, description="time without a result after which a reference with a check to judge is ended"
    )
    reference_device: Literal["cpu", "cuda"] = Field(
        "cpu", description="device of the JAX reference; cuda: the trainer's GPU, within device_gb"
    )
    reference_devices: Positive = Field(
        1, description="number of devices of the JAX reference; sequences, weights and moments are sharded over them"
    )
    update: Annotated[int | Literal["all"], AfterValidator(_is_positive)] = Field(
        "all", description="elements of each tensor whose moments and update a check judges; each check judges others"
    )
    disk_gb: Gigabytes = Field(
        0.0,
        description="maximum GB (10^9) of evidence on the disk, which limits the waiting checks; 0 = no limit",
    )
    memory_gb: Gigabytes = Field(
        0.0, description="maximum GB (10^9) of host memory for a check besides the candidate's own; 0 = no limit"
    )
    device_gb: Gigabytes = Field(
        0.0,
        description="maximum GB (10^9) of GPU memory for a compiled model's taps and a reference there; 0 = no limit",
    )
    on_alarm: Literal["log", "stop", "roll_back"] = Field(
        "log", description="after a check that disagreed: continue, stop, or stop at the last checkpoint before it"
    )

    @property
    def records(self) -> bool:
        """True if observations of steps are stored besides those of checks."""
        return bool(self.record_every or self.record_taps_every)

    def due(self, step: int, first: int = 1) -> bool:
        """Return whether step `step` is checked: every `every` steps, step 1, and `first`, the first of a process."""
        return self.every > 0 and (step % self.every == 0 or step in (1, first))


class LogConfig(Section):
    """Metrics that take time, each with its interval, and the destinations of records."""

    norms_every: Interval = Field(10, description="parameter, gradient and update norms by group")
    memory_every: Interval = Field(10, description="memory in use, and its peak")
    fp32_loss_every: Interval = Field(50, description="cross-entropy recomputed in FP32 from FP32 weights on a slice")
    fp32_loss_sequences: Positive = Field(
        8, description="sequences of train.sequence_length in the slice of fp32_loss_every"
    )
    attention_logits_every: Interval = Field(50, description="largest attention logit of each layer on a slice")
    attention_logits_sequences: Positive = Field(2, description="sequences in the slice of attention_logits_every")
    spike_sigma: Annotated[float, Field(ge=0)] = Field(
        6.0,
        description="keep the batch of a loss this many deviations above the recent ones (docs/guide/seeing.md); "
        "0 = off",
    )
    sample_every: Interval = Field(0, description="write a text sample from the prompt")
    sample_prompt: str = Field("The meaning of life is ", description="prompt of the sample")
    sample_tokens: Positive = Field(50, description="tokens of a sample")
    nvtx: bool = Field(False, description="NVTX ranges around the parts of a step, for Nsight Systems (torch on CUDA)")
    wandb: Literal["disabled", "offline", "online"] = Field("disabled", description="Weights & Biases")
    wandb_project: str = Field("lockstep", description="project of Weights & Biases")

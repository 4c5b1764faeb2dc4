"""torchtitan's Llama 3, trained by its Trainer's own `train_step`, with the same shapes and weights.

From torchtitan 0.3 (github.com/pytorch/torchtitan, BSD): Llama3Model with the fused QKV projection and the complex
RoPE of all its Llamas, CrossEntropyLoss, OptimizersContainer (AdamW, fused), LRSchedulersContainer, its gradient
clipping, its compilation of each block and of the loss, and its garbage collection every 50 steps. Differences from a
run of torchtitan:

- The Trainer's constructor needs an accelerator, a tokenizer and a data loader. A subclass sets the attributes that
  `train_step` reads.
- bf16 is that of torchtitan 0.3 for any number of ranks: FSDP2 with its mixed-precision policy (weights and activations
  in bf16, gradients reduced in FP32), here over a process group of one process. In FP32 that policy has no effect, and
  FSDP2 is omitted, because it costs a few percent of a step.
- Attention is torchtitan's ScaledDotProductAttention. FlexAttention, its default, cannot train on a CPU.
- The loss is not computed in chunks, and no activation is recomputed: both cost time to save memory.
- RoPE is not scaled as in Llama 3.1, and the ε of norms is the run's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.model.graph import GROUPS
from lockstep.core.model.groups import group_settings
from lockstep.core.model.names import groups_of
from lockstep.torch_backend.tools.peers.race import Race, Turn

# Parts of our names → torchtitan's, the longest first. A fused projection is loaded and saved as its three parts.
WORDS = {
    "attn_norm.": "attention_norm.",
    "mlp_norm.": "ffn_norm.",
    "final_norm.": "norm.",
    "attn.q_proj.": "attention.qkv_linear.wq.",
    "attn.k_proj.": "attention.qkv_linear.wk.",
    "attn.v_proj.": "attention.qkv_linear.wv.",
    "attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "blocks.": "layers.",
    "embed.": "tok_embeddings.",
}
# Patterns of torchtitan's names, in order: the first that matches a parameter sets its group.
PATTERNS = {"gains": r"norm\.weight$", "biases": r"\.bias$", "embedding": "tok_embeddings", "head": "lm_head"}


def their_name(name: str) -> str:
    """Convert a canonical parameter name to that of Llama3Model's state dict."""
    for ours, theirs in WORDS.items():
        name = name.replace(ours, theirs)
    return name


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows (H·E, …) of each head: torchtitan's RoPE rotates pairs (2i, 2i + 1), Lockstep's (i, i + E/2)."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def weights(race: Race) -> dict[str, Tensor]:
    """Return the race's weights by the names of Llama3Model's state dict."""
    model, found = race.config.model, {}
    for name, p in race.weights().items():
        heads = {"q_proj": model.heads, "k_proj": model.kv_heads}.get(name.rsplit(".", 2)[-2])
        found[their_name(name)] = in_pairs(p, heads) if heads else p
    if model.tied:
        found["lm_head.weight"] = found["tok_embeddings.weight"]
    return found


def their_config(model: ModelConfig, length: int) -> Any:
    """Return a Llama3Model.Config for sequences of `length` tokens."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=model.hidden, eps=model.norm_eps)

    def block() -> Any:
        attention = make_gqa_config(
            dim=model.hidden,
            n_heads=model.heads,
            n_kv_heads=model.kv_heads,
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=model.head_dim, max_seq_len=length, theta=model.rope_theta),
            fuse_qkv=True,
        )
        attention.qkv_linear.wqkv.bias, attention.wo.bias = model.qkv_bias, model.o_bias
        mlp = make_ffn_config(dim=model.hidden, hidden_dim=model.ffn_hidden, w1_param_init={}, w2w3_param_init={})
        for linear in (mlp.w1, mlp.w2, mlp.w3):
            linear.bias = model.mlp_bias
        return Llama3TransformerBlock.Config(
            attention=attention, feed_forward=mlp, attention_norm=norm(), ffn_norm=norm()
        )

    return Llama3Model.Config(
        dim=model.hidden,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tied,
        tok_embeddings=Embedding.Config(num_embeddings=model.vocab_size, embedding_dim=model.hidden),
        norm=norm(),
        lm_head=Linear.Config(in_features=model.hidden, out_features=model.vocab_size),
        layers=[block() for _ in range(model.layers)],
    )


def build_optimizers(config: RunConfig, model: nn.Module) -> Any:
    """Return an OptimizersContainer with the run's parameter groups."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    optim, present = config.optim, set(groups_of(config.model).values())
    return OptimizersContainer.Config(
        implementation="fused",
        param_groups=[
            ParamGroupConfig(
                pattern=PATTERNS.get(group, ".*"),
                optimizer_name="AdamW",
                optimizer_kwargs={
                    "lr": optim.peak_lr * group_settings(config, group).lr_factor,
                    "betas": (optim.beta1, optim.beta2),
                    "eps": optim.eps,
                    "weight_decay": group_settings(config, group).weight_decay,
                },
            )
            # The first pattern that matches decides. Matrices match any name, and come last.
            for group in sorted(GROUPS, key=lambda group: group not in PATTERNS)
            if group in present
        ],
    ).build(model_parts=[model])


def build(race: Race) -> Any:
    """Return a Trainer with all attributes that `train_step` reads; `found` is the loss of its last step."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config.configs import CompileConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.tools.utils import GarbageCollection
    from torchtitan.trainer import Trainer

    config = race.config
    # Set the device: without an accelerator, torchtitan assumes CUDA.
    parallel_dims.device_type = race.device.type
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    backend = "partial_dtensor"
    set_spmd_backend(backend)
    dims = ParallelDims(1, 1, 1, 1, 1, 1, world_size=1, spmd_backend=backend)
    compiling = CompileConfig(enable=config.compile.enabled)
    their_model = their_config(config.model, config.train.sequence_length)
    model = their_model.build()
    model.load_state_dict(weights(race))
    model.to(race.device)
    if compiling.enable:
        apply_compile(model, compile_config=compiling, parallel_dims=dims)
    if config.precision.chosen.rounds:
        mesh = init_device_mesh(race.device.type, (1,), mesh_dim_names=("fsdp",))
        apply_fsdp_to_decoder(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    optimizers = build_optimizers(config, model)

    class OneProcess(Trainer):  # type: ignore[misc, unused-ignore]
        """Trainer without its constructor."""

        def __init__(self) -> None:
            self.config = SimpleNamespace(
                training=SimpleNamespace(disable_cuda_graphs=True, max_norm=config.optim.clip_norm or float("inf")),
                parallelism=SimpleNamespace(spmd_backend=backend),
            )
            self.device, self.parallel_dims = race.device, dims
            self.model_config, self.model_parts = their_model, [model]
            self.loss_fn = CrossEntropyLoss.Config().build(compile_config=compiling)
            self.optimizers = optimizers
            self.lr_schedulers = LRSchedulersContainer(
                optimizers, lambda done: race.rate(done + 1) / config.optim.peak_lr
            )
            self.metrics_processor = SimpleNamespace(should_log=lambda step: True, log=self.keep)
            self.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
            self.gradient_accumulation_steps = config.train.accumulation
            self.num_pipeline_parallel_microbatches = 1
            self.train_context = get_spmd_context(parallel_dims=dims)
            self.fwd_bwd_fn = self._forward_backward_body
            self.gc_handler = GarbageCollection(gc_freq=50)
            self.step = self.ntokens_seen = 0
            self.found = 0.0

        def keep(self, step: int, loss: float, *rest: Any, **more: Any) -> None:
            self.found = loss

    return OneProcess()


def run(race: Race, turn: Turn) -> None:
    """Train until `turn` raises Over."""
    trainer = build(race)

    def batches() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for micros in itertools.cycle(race.micro_batches()):
            for tokens, targets in micros:
                yield {"input": tokens}, targets

    data = batches()
    turn(None)
    while True:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(data)
        turn(trainer.found)

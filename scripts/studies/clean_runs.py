"""Clean runs of random models, for the calibration and for the search for false alarms.

A draw is a model shape, a batch shape and an optimizer, all functions of a seed. The data are bytes of the running
Python's standard library. Each run is checked at its initial weights and after some training.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from lockstep.core.backend import Batch, State
from lockstep.core.components.cast_plan import NARROW, PLANS, VALUES, CastPlan, plan_text
from lockstep.core.components.precision import POLICIES
from lockstep.core.config.schema import (
    CompileConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    Section,
    TrainConfig,
)
from lockstep.core.data.batches import documents_of
from lockstep.core.model.groups import moment_names
from lockstep.core.model.init import init_parameters
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.probe import probe_of
from lockstep.core.parity.measures.compare import JudgeOfRanks, Reference
from lockstep.core.run.ranks import ONE, Ranks
from lockstep.core.train.loss_scale import first_scale
from lockstep.jax_backend.backend import JaxBackend
from lockstep.torch_backend.backend import TorchBackend


@cache
def text() -> np.ndarray:
    """Return the bytes of the standard library's modules, uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


# `adamw8bit_bnb` needs bitsandbytes.
Optimizer = Literal["adamw", "adamw8bit", "adamw8bit_bnb", "muon"]


def draw_config(
    seed: int, recipe: str, accumulate: bool | None = None, optimizer: Optimizer = "adamw", casts: bool = False
) -> RunConfig:
    """Draw a random run of a recipe (`policy/eager` or `policy/compiled`); the shapes depend on the seed alone.

    One to four layers, 24 to 256 hidden, one to all KV heads, tied or not, biases or not, sequences of 16 to 320
    tokens, one to four micro-batches. accumulate: whether there are several; by default the seed decides. optimizer:
    all but AdamW also draw rates and decay by group, and Muon its own settings. casts: use a random plan of casts, or
    Lockstep's own if there is no narrower format.
    """
    rng = np.random.default_rng([seed, 1])
    heads = int(rng.choice([2, 4, 6, 8]))
    hidden = heads * int(rng.choice([8, 12, 16, 32]))
    micro, parts = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    parts = parts if accumulate is None else max(parts, 2) if accumulate else 1
    bias, tied = rng.random(3) < 0.3, bool(rng.random() < 0.5)
    model = ModelConfig(
        vocab_size=int(rng.choice([256, 300, 512, 1000])),
        hidden=hidden,
        layers=int(rng.integers(1, 5)),
        heads=heads,
        kv_heads=int(rng.choice([k for k in range(1, heads + 1) if heads % k == 0])),
        ffn_hidden=int(rng.integers(16, 513)),
        tied=tied,
        rope_theta=float(rng.choice([1e4, 5e5])),
        norm_eps=float(rng.choice([1e-5, 1e-6])),
        qkv_bias=bool(bias[0]),
        o_bias=bool(bias[1]),
        mlp_bias=bool(bias[2]),
    )
    optim = OptimConfig(
        peak_lr=float(10 ** rng.uniform(-3.5, -2)),
        warmup_steps=int(rng.integers(0, 10)),
        beta2=float(rng.choice([0.95, 0.99, 0.999])),
        weight_decay=float(rng.choice([0.0, 0.1])),
        clip_norm=float(rng.choice([0.0, 0.5, 1.0])),
    )
    if optimizer != "adamw":
        name = optimizer.removesuffix("_bnb")
        library = "bitsandbytes" if name != optimizer else optim.eight_bit
        by_group = _by_group(np.random.default_rng([seed, 3]))
        optim = optim.model_copy(update={"name": name, "eight_bit": library, **by_group})
    length = int(rng.choice([16, 33, 64, 100, 128, 200, 320]))
    policy, program = recipe.split("/")
    narrow = casts and POLICIES[policy].operand in NARROW
    precision = PrecisionConfig(policy=policy, loss_scale=2.0**12, loss_scale_interval=40)
    if narrow:
        plan = draw_plan(seed)
        precision = precision.model_copy(update={"casts": plan_text(plan, precision.operand)})
    return RunConfig(
        seed=seed,
        device="cpu",
        model=model,
        train=TrainConfig(steps=1000, batch_size=micro * parts, micro_batch_size=micro, sequence_length=length),
        optim=optim,
        precision=precision,
        **_levers(np.random.default_rng([seed, 4]), compiled=program == "compiled"),
    )


# All families with stages that a Llama lacks. Mistral stands for the families with a Llama's stages and a window.
OTHER_FAMILIES = ("gpt2", "qwen3", "gemma2", "mistral")


def of_family(config: RunConfig, seed: int, family: str | None = None) -> RunConfig:
    """Turn a drawn run into one of another family, by default each of OTHER_FAMILIES in turn.

    The seed draws its settings.

    Windows are shorter than the sequences, and caps are about as large as the values that they cap.
    """
    rng = np.random.default_rng([seed, 6])
    family = family or OTHER_FAMILIES[seed % len(OTHER_FAMILIES)]
    model, length = config.model, config.train.longest
    changes: dict[str, object] = {"family": family, "positions": length + int(rng.integers(0, 50))}
    if family == "gpt2":
        changes |= {"kv_heads": model.heads, "tied": True}
    if family in ("qwen3", "gemma2"):
        changes["head_width"] = int(rng.choice([0, 8, 16, 24]))
    if family in ("mistral", "gemma2"):
        changes["window"] = int(rng.integers(1, length))
    if family == "gemma2":
        changes |= {
            "attention_cap": float(rng.choice([0.0, 5.0, 50.0])),
            "logits_cap": float(rng.choice([2.0, 30.0])),
            "attention_scale": float(rng.choice([0.0, 0.1, 0.3])),
        }
    if family == "llama":
        changes |= {"rope_factor": float(rng.choice([2.0, 8.0, 32.0])), "rope_original": int(rng.integers(8, length))}
    update = {"model": model.model_copy(update=changes)}
    return RunConfig.model_validate(config.model_copy(update=update).model_dump())


def draw_plan(seed: int) -> CastPlan:
    """Draw a plan of casts: autocast's in every fifth draw, else a choice for each key, rope's and act's in turn."""
    if seed % 5 == 4:
        return PLANS["autocast"]
    rng = np.random.default_rng([seed, 5])
    drawn = {key: str(rng.choice(values)) for key, values in VALUES.items()}
    in_turn = {key: VALUES[key][seed % len(VALUES[key])] for key in ("rope", "act")}
    return CastPlan(**drawn | in_turn)


def _levers(rng: np.random.Generator, compiled: bool) -> dict[str, Section]:
    """Draw settings that change how a step is computed but not its result: chunks, recomputation, programs."""
    parts = str(rng.choice(["", "", "mlp", "norms,attention,mlp", "block"]))
    return {
        "loss": LossConfig(
            head=str(rng.choice(["full", "chunked", "chunked"])), chunk=int(rng.choice([50, 128, 4096]))
        ),
        "recompute": RecomputeConfig(parts=parts, keep_products=bool(parts and rng.random() < 0.3)),
        "compile": CompileConfig(enabled=compiled, scope=str(rng.choice(["model", "model", "blocks"]))),
    }


def _by_group(rng: np.random.Generator) -> dict[str, float | int | bool | str]:
    scales = {f"{group}_lr_scale": float(rng.choice([0.5, 1.0, 2.0])) for group in ("embedding", "head", "gains")}
    decays = {f"{group}_weight_decay": float(rng.choice([0.0, 0.1])) for group in ("embedding", "head", "gains")}
    return {
        **scales,
        **decays,
        "base_width": int(rng.choice([0, 64])),
        "base_batch": int(rng.choice([0, 4])),
        "momentum": float(rng.choice([0.4, 0.9, 0.95])),
        "nesterov": bool(rng.random() < 0.8),
        "ns_steps": int(rng.choice([3, 5])),
        "ns_dtype": str(rng.choice(["bf16", "fp32"])),
    }


def draw_batch(config: RunConfig, rng: np.random.Generator) -> Batch:
    """Draw random windows with uneven loss weights; each line is a document where attention uses them."""
    data, rows, length = text(), config.train.batch_size, config.train.sequence_length
    starts = rng.integers(0, len(data) - length - 1, rows)
    window = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    tokens = window[:, :-1].copy()
    documents = documents_of(tokens, ord("\n")) if config.attention.needs_documents else None
    # The text lacks this token; a check inserts it.
    plain = Batch(tokens, window[:, 1:].copy(), np.ones((rows, length), np.float32), documents, end_of_text=0)
    return uneven_weights(plain, int(rng.integers(2**31)))


def initial_state(config: RunConfig, seed: int) -> State:
    """Return the initial weights of a seed, moments at zero."""
    params = init_parameters(config.model, seed)
    kinds = moment_names(config)
    moments = {kind: {n: np.zeros_like(params[n]) for n in names} for kind, names in kinds.items()}
    return State(0, params, moments, first_scale(config.precision))


def clean_evidence(
    config: RunConfig, reference: Reference, seeds: list[int], checks: int, between: int
) -> Iterator[tuple[int, Evidence, Reference]]:
    """Yield the evidence of `checks` steps of each seed, `between` unchecked steps apart, with its reference.

    One session serves all seeds: only its weights change, and its programs stay compiled. Every third check is made as
    during training, on a single micro-batch.
    """
    torch._dynamo.reset()
    with closing(TorchBackend().open(config)) as session:
        for seed in seeds:
            session.load(initial_state(config, seed))
            seeded = config.model_copy(update={"seed": seed})
            of_seed = replace(reference, config=seeded)
            rng = np.random.default_rng([seed, 2])
            for number in range(checks):
                batch = draw_batch(config, rng)
                if number % 2:  # as in most runs
                    batch = replace(batch, weights=np.ones_like(batch.weights))
                probe = None
                if number % 3 == 2:
                    micro = batch.micro_batches(config.train.micro_batch_size)[0]
                    probe = probe_of(micro, config, int(rng.integers(2**31)))
                yield seed, gather(session, seeded, batch, probe), of_seed
                for _ in range(between):
                    session.step(draw_batch(config, rng))


def open_reference(config: RunConfig, ranks: Ranks = ONE) -> Reference:
    """Open the JAX reference of a draw, on rank 0."""
    if ranks.count == 1:
        return Reference.open(JaxBackend(), config)
    return Reference.open(JudgeOfRanks(JaxBackend() if ranks.rank == 0 else None, ranks), config)

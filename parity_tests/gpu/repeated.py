"""Run deterministic steps on CUDA twice and compare them bit for bit.

A process of its own is needed, since cuBLAS reads the workspace setting once, when it is initialised. Prints one JSON
line per program: its name, and the difference, or the reason why this machine cannot run it.
"""

from __future__ import annotations

import json
import traceback
from importlib.util import find_spec
from typing import Any

import torch

from lockstep.core.backend import State
from lockstep.core.config.schema import AttentionConfig, CompileConfig, LossConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.train.determinism import prove
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.attention import Machine, refusal
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels.float8 import FIRST_CAPABILITY

COMPILED = {"compile": {"enabled": True, "backend": "inductor"}}
PROGRAMS: dict[str, dict[str, Any]] = {
    **{f"attention {kernel}": {"attention": {"kernel": kernel}} for kernel in ("auto", "flash", "efficient", "math")},
    "attention flex": {"attention": {"kernel": "flex"}},
    "attention flex, compiled": {"attention": {"kernel": "flex"}, **COMPILED},
    "documents": {"attention": {"kernel": "efficient", "document_mask": True}},
    **{f"head {head}": {"loss": {"head": head}} for head in ("full", "torch", "liger")},
    **{
        f"policy {policy}": {"policy": policy}
        for policy in ("fp32", "tf32", "fp16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed")
    },
    "compiled": COMPILED,
    "compiled, fp8": {"policy": "fp8_tensorwise", **COMPILED},
    "graphs": {"compile": {**COMPILED["compile"], "mode": "reduce-overhead"}},
    "muon": {"optim": {"name": "muon"}},
    "adamw8bit torchao": {"optim": {"name": "adamw8bit"}},
    "adamw8bit bitsandbytes": {"optim": {"name": "adamw8bit", "eight_bit": "bitsandbytes"}},
    # With 1,024 to 3,072 tokens per micro-batch, torch's kernel of the embedding's gradient has a race.
    "embedding": {"train": {"micro_batch_size": 32, "batch_size": 32}},
}
STEPS = 3


def config_of(changes: dict[str, Any]) -> RunConfig:
    """Return the configuration of the tiny model on CUDA, deterministic, with these settings."""
    changes = dict(changes)
    config = tiny_config(changes.pop("policy", "bf16"), hidden=256, train=changes.pop("train", None))
    classes = {"attention": AttentionConfig, "loss": LossConfig, "compile": CompileConfig}
    made = {key: classes[key](**value) for key, value in changes.items() if key in classes}
    if "optim" in changes:
        made["optim"] = config.optim.model_copy(update=changes["optim"])
    return config.model_copy(update={"device": "cuda", "deterministic": True, **made})


def left_out(config: RunConfig) -> str | None:
    """Return the reason why this machine cannot run `config`; None if it can."""
    if config.precision.fp8 and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        return "no FP8 tensor cores"
    if config.loss.head == "torch" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return "the head of torch is not there"
    if (package := config.loss.chosen.package) and find_spec(package[0]) is None:
        return f"{config.loss.head} is not installed"
    if config.optim.eight_bit == "bitsandbytes" and find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    operand = torch.float32 if config.precision.operand in ("fp32", "tf32") else torch.bfloat16
    return refusal(config.attention, config.model.head_dim, operand, Machine.of(torch.device("cuda")))


def trained(config: RunConfig) -> tuple[list[Any], State]:
    """Return the records and the final state of STEPS steps, after the proof that a deterministic run needs."""
    session = TorchBackend().open(config)
    prove(config, session, text_batch(config, 0), 1)
    return [session.step(text_batch(config, step)) for step in range(STEPS)], session.state()


def same(one: State, other: State) -> bool:
    """Return whether weights and moments are equal bit for bit."""
    trees = [(one.params, other.params), *((one.optimizer[k], other.optimizer[k]) for k in one.optimizer)]
    return all(a[name].tobytes() == b[name].tobytes() for a, b in trees for name in a)


def found(changes: dict[str, Any]) -> dict[str, str]:
    """Return {"skipped": reason}, {"wrong": what differs}, or {} if both runs are equal bit for bit."""
    config = config_of(changes)
    if why := left_out(config):
        return {"skipped": why}
    try:
        (records, state), (again, other) = trained(config), trained(config)
    except UserError as error:
        return {"wrong": str(error)}
    except Exception:
        return {"wrong": traceback.format_exc()}
    return {} if records == again and same(state, other) else {"wrong": f"other bits after {STEPS} steps"}


if __name__ == "__main__":
    for name, changes in PROGRAMS.items():
        print(json.dumps({"name": name, **found(changes)}), flush=True)

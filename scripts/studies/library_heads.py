"""Compare loss heads: the distance of each from FP64, and from the twin that mirrors its casts. Writes a page.

    python -m lockstep.scripts.studies.library_heads                      docs/results/library_heads.md
    TRITON_INTERPRET=1 python -m lockstep.scripts.studies.library_heads   Liger's head too, by Triton's interpreter

Needs torch 2.13 for torch's head, and liger-kernel and triton for Liger's; a missing head is named in the table.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import tyro
from torch import Tensor

from lockstep.core.config.schema import LossConfig
from lockstep.core.errors import UserError
from lockstep.jax_backend.kernels.library_heads import library_nll
from lockstep.jax_backend.precision import POLICIES as TWIN
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.kernels.chunked_loss import chunked_loss
from lockstep.torch_backend.kernels.library_heads import check_head, library_loss
from lockstep.torch_backend.loss import negative_log_likelihood, weighted_mean
from lockstep.torch_backend.precision import POLICIES, head

PAGE = ROOT / "docs/results/library_heads.md"
TOKENS, VOCABULARY, WIDTH = 2048, 4096, 128
# Head, chunk, policy. Liger's head is examined in FP16, because Triton's interpreter truncates to bf16 and a GPU
# rounds.
HEADS = (
    ("full", TOKENS, "bf16"),
    ("chunked", 256, "bf16"),
    ("torch", TOKENS, "bf16"),
    ("torch", 256, "bf16"),
    ("torch", 32, "bf16"),
    ("chunked", 256, "fp16"),
    ("torch", TOKENS, "fp16"),
    ("liger", TOKENS, "fp16"),
    ("cce", TOKENS, "bf16"),
)
TEXT = """# Loss heads of other libraries

`loss.head` = `torch` takes `torch.nn.functional.linear_cross_entropy` (torch 2.13), `liger` Liger-Kernel's fused linear
cross-entropy, `cce` cut-cross-entropy without its filter, which leaves small gradients out. The last two are Triton
kernels, are installed by `pip install 'lockstep[liger]'` or `'lockstep[cce]'`, need CUDA, and stay outside of the
compiled program (`compile.scope = "blocks"`). Lockstep's own `chunked` stays the default: it is as exact as whole
logits.

Roundings of the libraries' heads, which the twin mirrors (jax_backend/kernels/library_heads.py):

- torch's gives each NLL in the operand dtype, and adds the chunks of the weight's gradient up in it: the more chunks,
  the more roundings, up to several times the error of one (below). `loss.chunk` is its chunk.
- Liger's rounds the logits themselves, and the gradient of them twice; it sums in FP32 (`accum_dtype`).
- cut-cross-entropy adds blocks of tokens up in the operand dtype, in the order in which they come: no twin follows
  that.
- All three would be handed gradients of 1 / tokens in the operand dtype, up to 0.4 % off under bf16, the same way for
  every token. Lockstep hands them 1 for the largest loss weight and scales what comes back in FP32, so that weights of
  0 and 1 are exact.
- Cross-entropy itself is FP32, not FP64 as in Lockstep's: a confident token's NLL loses digits.

No library shows its logits: a check has one stage, `torch_head`, from the final norm's output to the NLL, and judges it
from the candidate's own inputs as it does every other. Its bounds were measured ([calibration](calibration.md)); those
of Liger's and cut-cross-entropy's were not, for want of a GPU, so that checks of a run with them are refused until
`python -m lockstep.scripts.studies.calibrate bf16/eager --parts liger_head --device cuda` has measured them.

## Measured

"""

Result = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
# FP16 has its loss scale.
SCALE = {"fp16": 4096.0}


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states (1, N, D), head weight (V, D), targets and weights (1, N), and the sum of the weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5
    targets = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    # One token in four is confident: its target's logit is far above the others.
    x[:, ::4] += 8 * weight[targets[:, ::4]] / weight[targets[:, ::4]].norm(dim=-1, keepdim=True)
    weights = torch.ones(1, TOKENS)
    return x.requires_grad_(), weight.requires_grad_(), targets, weights, weights.double().sum()


def run(how: str, chunk: int, policy: str) -> Result:
    """Return loss, NLL (1, N), gradients of hidden states (1, N, D) and of the weight (V, D), by one head."""
    x, weight, targets, weights, total = inputs()
    scale = SCALE.get(policy, 1.0)
    total = total / scale
    rules, settings = POLICIES[policy], LossConfig.model_validate({"head": how, "chunk": chunk})
    if policy == "fp64":
        x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    if how == "full":
        nll = negative_log_likelihood(head(x, weight, rules), targets)
        loss = weighted_mean(nll, weights, total)
    elif how == "chunked":
        loss, nll = chunked_loss(x, weight, targets, weights, total, rules, 0.0, chunk, None)
    else:
        check_head(settings, torch.device("cpu"))
        loss, nll = library_loss(x, weight, targets, weights, total, rules, settings, lambda _, value: value)
    grads = torch.autograd.grad(loss, (x, weight))
    of_loss, of_nll, *of_grads = (t.detach().numpy() for t in (loss, nll, *grads))
    return of_loss / scale, of_nll, of_grads[0] / scale, of_grads[1] / scale


def twin(how: str, chunk: int, policy: str) -> Result:
    """Compute the same by the reference's mirror of a library's casts."""
    x, weight, targets, weights, total = (t.detach().numpy() for t in inputs())
    settings = LossConfig.model_validate({"head": how, "chunk": chunk})

    def nll(x: jax.Array, weight: jax.Array) -> jax.Array:
        return library_nll(x, weight, jnp.asarray(targets), TWIN[policy], settings)

    found, pull_back = jax.vjp(nll, jnp.asarray(x), jnp.asarray(weight))
    grad_x, grad_weight = pull_back(jnp.asarray(weights / total, found.dtype))
    loss = np.asarray((np.asarray(found, np.float64) * weights).sum() / total)
    return loss, np.asarray(found), np.asarray(grad_x), np.asarray(grad_weight)


def off(one: np.ndarray, due: np.ndarray) -> float:
    """Return ‖one − due‖ / ‖due‖ in FP64."""
    due = due.astype(np.float64)
    return float(np.linalg.norm(one.astype(np.float64) - due) / np.linalg.norm(due))


def row(how: str, chunk: int, policy: str, truth: Result) -> str:
    """Return one line of the table."""
    chunks = f"{TOKENS // chunk}" if how in ("chunked", "torch") else "its own" if how in ("liger", "cce") else "1"
    try:
        found = run(how, chunk, policy)
    except UserError as reason:
        return f"| {how} | {policy} | {chunks} | not measured: {str(reason).partition(';')[0]} | | | | |"
    measured = [off(one, due) for one, due in zip(found, truth, strict=True)]
    apart = "–"
    if how in ("torch", "liger"):
        mirrored = twin(how, chunk, policy)
        apart = f"{max(off(found[i], mirrored[i]) for i in (1, 2, 3)):.0e}"
    return f"| {how} | {policy} | {chunks} | " + " | ".join(f"{value:.1e}" for value in measured) + f" | {apart} |"


def of(package: str) -> str:
    """Return a package and its version, or an empty string if it is not installed."""
    try:
        return f", {package} {version(package)}"
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Measure and write the page."""
    truth = run("full", TOKENS, "fp64")
    rows = []
    for how, chunk, policy in HEADS:
        rows.append(row(how, chunk, policy, truth))
        print(rows[-1], flush=True)
    interpreted = " Triton's kernels by its interpreter." if os.environ.get("TRITON_INTERPRET") else ""
    lines = [
        f"Made by `python -m lockstep.scripts.studies.library_heads`: {TOKENS:,} tokens, {VOCABULARY:,} × {WIDTH} "
        "weight, one "
        "token in "
        f"four confident, torch {torch.__version__.split('+')[0]}, jax {jax.__version__}"
        f"{of('liger-kernel')}{of('triton')}, {platform.machine()} {platform.system()}, CPU.{interpreted} Relative "
        "errors against FP64 of the same weights; last, the largest relative distance from the twin's NLL and "
        "gradients.",
        "",
        "| head | operands | chunks | loss | NLL | gradient of x | gradient of the weight | from its twin |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    PAGE.write_text(TEXT + "\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

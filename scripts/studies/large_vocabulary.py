"""Measure the chunked head at a vocabulary of 131,072: memory by tokens and chunk, and its errors. Writes a page.

python -m lockstep.scripts.studies.large_vocabulary            docs/results/large_vocabulary.md
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import torch
import tyro
from torch import Tensor

from lockstep.core.train.process_memory import process_memory
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.kernels.chunked_loss import chunked_loss
from lockstep.torch_backend.loss import negative_log_likelihood, weighted_mean
from lockstep.torch_backend.precision import POLICIES, head

PAGE = ROOT / "docs/results/large_vocabulary.md"
VOCABULARY, WIDTH, CHUNK = 131_072, 128, 128
# Unit roundoff of FP32: the largest relative error of a correctly rounded number.
ROUNDOFF = 2.0**-24


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states (1, N, D), head weight (V, D), targets and weights (1, N), and the sum of the weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5
    targets = torch.randint(VOCABULARY, (1, tokens), generator=generator)
    # One token in four is confident: its target's logit is far above the others.
    x[:, ::4] += 6 * weight[targets[:, ::4]] / weight[targets[:, ::4]].norm(dim=-1, keepdim=True)
    weights = 0.5 + 0.5 * (torch.arange(tokens) % 2)[None].float()
    return x.requires_grad_(), weight.requires_grad_(), targets, weights, weights.double().sum()


def run(how: str, tokens: int, policy: str, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, per-token NLL (1, N) and gradients of hidden states and weight, by `full` or `chunked`."""
    x, weight, targets, weights, total = inputs(tokens)
    if how == "chunked":
        loss, nll = chunked_loss(x, weight, targets, weights, total, POLICIES[policy], 0.0, chunk, None)
    else:
        nll = negative_log_likelihood(head(x, weight, POLICIES[policy]), targets)
        loss = weighted_mean(nll, weights, total)
    loss.backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), nll.detach(), x.grad, weight.grad


def peak(how: str, tokens: int, chunk: int) -> dict[str, float]:
    """Return peak resident bytes of forward and backward pass in a process of its own, above those of its inputs."""
    code = f"from lockstep.scripts.studies.large_vocabulary import child; child({how!r}, {tokens}, {chunk})"
    # Freed tensors go back to the system at once, so that the memory in use is measured, not glibc's cache.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(how: str, tokens: int, chunk: int) -> None:
    """Print the memory of one run."""
    kept = inputs(tokens)
    before = int(process_memory()["peak"])
    del kept
    run(how, tokens, "bf16", chunk)
    print(json.dumps({"bytes": int(process_memory()["peak"]) - before}))


def errors(tokens: int) -> dict[str, float]:
    """Compare the chunked head in FP32 with FP64: largest error of an NLL in roundoffs, relative error of the rest."""
    loss, nll, grad_x, grad_weight = run("chunked", tokens, "fp32", CHUNK)
    x, weight, targets, weights, total = (t.detach().double() if t.is_floating_point() else t for t in inputs(tokens))
    # FP64 from the same FP32 logits, so that the difference is only the arithmetic of the loss.
    logits = (x[0].float() @ weight.float().T).double()
    exact = logits.logsumexp(-1) - logits.gather(-1, targets[0, :, None])[:, 0]
    softmax = logits.softmax(-1)
    softmax[torch.arange(tokens), targets[0]] -= 1
    grad = softmax * (weights[0] / total)[:, None]
    true_x, true_weight = grad @ weight, grad.T @ x[0]
    return {
        "nll": float(((nll[0].double() - exact).abs() / exact).max() / ROUNDOFF),
        "loss": float((loss - (exact * weights[0]).sum() / total).abs() / loss),
        "grad_x": float((grad_x[0].double() - true_x).norm() / true_x.norm()),
        "grad_weight": float((grad_weight.double() - true_weight).norm() / true_weight.norm()),
    }


def main() -> None:
    """Measure and write the page."""
    rows = []
    for how, tokens, chunk in (
        ("chunked", 512, CHUNK),
        ("chunked", 2048, CHUNK),
        ("chunked", 512, 4 * CHUNK),
        ("full", 512, 512),
    ):
        found = peak(how, tokens, chunk)["bytes"]
        one = chunk * VOCABULARY * 4
        rows.append(
            f"| {how} | {tokens:,} | {chunk if how == 'chunked' else '–'} | {found / 1e6:,.0f} MB "
            f"| {one / 1e6:,.0f} MB | {tokens * VOCABULARY * 4 / 1e6:,.0f} MB |"
        )
        print(rows[-1], flush=True)
    off = errors(512)
    lines = [
        "# A vocabulary of 131,072",
        "",
        "Made by `python -m lockstep.scripts.studies.large_vocabulary`: forward and backward pass of the head alone, "
        f"{VOCABULARY:,} × "
        f"{WIDTH} weight, bf16 operands, eager, torch {torch.__version__.split('+')[0]}, {platform.machine()} "
        f"{platform.system()}, CPU. Peak resident memory of a process of its own, above its inputs'; the weight's "
        f"gradient ({VOCABULARY * WIDTH * 4 / 1e6:,.0f} MB) and copies of the weight are part of it.",
        "",
        "| head | tokens | chunk | peak | FP32 logits of one chunk | of all tokens |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "In FP32 against FP64 from the same logits, 512 tokens, one in four of them of a confident target: an NLL is "
        f"at most {off['nll']:.2f} · 2⁻²⁴ off, the loss {off['loss']:.0e}, the gradient of the hidden states "
        f"{off['grad_x']:.0e} and of the weight {off['grad_weight']:.0e}, relative.",
        "",
    ]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

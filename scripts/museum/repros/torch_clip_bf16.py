"""clip_grad_norm_ of bf16 gradients rounds norms and coefficient to bf16. Exit code 1: the bug is there."""

# python torch_clip_bf16.py

import sys

import torch

parameters = [torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in range(10)]
generator = torch.Generator().manual_seed(0)
for p in parameters:
    p.grad = torch.randn(64, 64, generator=generator).bfloat16()
exact = torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm()
found = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
after = torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm()
print(f"torch {torch.__version__}: norm of the gradients {exact:.6f}, by clip_grad_norm_ {found.double():.6f}")
print(f"clipped to 1.0, their norm is {after:.6f}; each was rounded by at most 0.004, at random")
sys.exit(abs(float(found) / float(exact) - 1) > 1e-5)

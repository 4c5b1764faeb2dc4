"""F.layer_norm on CPU sums the gradients of weight and bias of bf16 inputs in bf16. Exit code 1: the bug is there."""

# python torch_layer_norm.py [ROWS]

import sys

import torch
import torch.nn.functional as F

ROWS, WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536, 64
generator = torch.Generator().manual_seed(0)
x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()
out = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return gradients of weight and bias, computed in this dtype."""
    both = [torch.ones(WIDTH, dtype=dtype).requires_grad_(), torch.zeros(WIDTH, dtype=dtype).requires_grad_()]
    made = F.layer_norm(x.to(dtype), (WIDTH,), weight=both[0], bias=both[1])
    return [gradient.double() for gradient in torch.autograd.grad(made, both, out.to(dtype))]


found, exact = gradients(torch.bfloat16), gradients(torch.float64)
print(f"torch {torch.__version__}, {ROWS} rows of {WIDTH}")
bad = False
for name, a, t in zip(("dweight", "dbias"), found, exact, strict=True):
    error = float((a - t).norm() / t.norm())
    # Summed in FP32 and rounded once to bf16, as on CUDA.
    honest = float((t.float().bfloat16().double() - t).norm() / t.norm())
    print(f"{name}: relative error {error:.2%}; rounded once to bf16: {honest:.2%}")
    bad |= error > 10 * honest
sys.exit(bad)

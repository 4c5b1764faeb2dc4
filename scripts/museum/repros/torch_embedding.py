"""F.embedding on CPU sums a bf16 table's gradient in bf16, place by place. Exit code 1: the bug is there."""

# python torch_embedding.py [TOKENS]

import sys

import torch
import torch.nn.functional as F

TOKENS, WORDS, WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536, 256, 32
generator = torch.Generator().manual_seed(0)
# Word k is 1/k times as frequent as the first.
ids = torch.multinomial(1 / torch.arange(1.0, WORDS + 1), TOKENS, replacement=True, generator=generator)
table = torch.randn(WORDS, WIDTH, generator=generator).bfloat16()
out = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()


def gradient(dtype: torch.dtype) -> torch.Tensor:
    """Compute the table's gradient in this dtype."""
    own = table.to(dtype, copy=True).requires_grad_()
    return torch.autograd.grad(F.embedding(ids, own), own, out.to(dtype))[0].double()


found, exact = gradient(torch.bfloat16), gradient(torch.float64)
error = float((found - exact).norm() / exact.norm())
honest = float((exact.float().bfloat16().double() - exact).norm() / exact.norm())
first = float((found[0] - exact[0]).norm() / exact[0].norm())
print(f"torch {torch.__version__}, {TOKENS} tokens over {WORDS} words")
print(f"relative error {error:.2%}, of the most frequent word {first:.2%}; rounded once to bf16: {honest:.2%}")
sys.exit(error > 10 * honest)

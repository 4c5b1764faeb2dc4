"""The norm of one large FP32 tensor on CPU is too small (pytorch#169237). Exit code 1: the bug is there."""

# python torch_vector_norm.py [NUMBERS]

import sys

import torch

NUMBERS = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000_000
x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
exact = sum(float(part.double().square().sum()) for part in x.split(2**20)) ** 0.5
found = float(torch.linalg.vector_norm(x))
pieces = float(torch.stack([torch.linalg.vector_norm(part) for part in x.split(2**16)]).norm())
print(f"torch {torch.__version__}, {NUMBERS} numbers in FP32")
print(f"vector_norm: relative error {abs(found / exact - 1):.2e}; of pieces of 65,536: {abs(pieces / exact - 1):.2e}")
sys.exit(abs(found / exact - 1) > 1e-5)

"""The JAX reference: the same step, written a second time. Never imports torch.

x64 is enabled because the truth is computed in FP64, and matrix products never use TF32. On a GPU, JAX allocates memory
on demand, because the trainer uses the same GPU, in a run's worker and in a user's loop.
"""

import os

# Read when JAX first searches for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")

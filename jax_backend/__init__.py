"""The JAX reference: the same step, written a second time. Never imports torch.

Doubles are switched on because the truth is computed in FP64, and matrix products are never done in TF32. On a GPU, JAX
takes memory as it needs it: the trainer's is on the same one, in the worker of a run as in a user's loop.
"""

import os

# Read when JAX first searches for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")

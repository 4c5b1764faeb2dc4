"""The JAX reference: the same step, written a second time. Never imports torch.

Doubles are switched on because the truth is computed in FP64, and matrix products are never done in TF32.
"""

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")

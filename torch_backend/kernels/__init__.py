"""Operations of the model from kernels and libraries, and what is applied to the model from outside.

`apply_float8`, `apply_loss_head` and `apply_recompute` change a model of torch_backend/model.py in place; names of
parameters and modules stay.
"""

"""Operations of the model that are kernels or library calls, and functions that change a model from outside.

`apply_float8`, `apply_loss_head` and `apply_recompute` change a model of torch_backend/model.py in place; the names of
its parameters and modules stay.
"""

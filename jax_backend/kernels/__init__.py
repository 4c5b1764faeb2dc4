"""Operations with the roundings of particular libraries and kernels, and changes applied to the model from outside.

`apply_float8` and `apply_loss_head` change a model of jax_backend/model.py in place; names of parameters and modules
stay.
"""

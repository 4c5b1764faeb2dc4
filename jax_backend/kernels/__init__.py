"""Operations with the roundings of particular libraries and kernels."""

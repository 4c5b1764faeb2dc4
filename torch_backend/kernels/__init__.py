"""Operations that the model takes from kernels and libraries, and recomputation."""

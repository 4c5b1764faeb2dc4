// How both of cuBLAS's interfaces note a matrix product: (m, k) · (k, n) → (m, n), `batch` times.
#pragma once
#include "standin.h"
#include <cublas_v2.h>

// a, b, c: cudaDataType of operands and result. math: the handle's mode. compute: cublasComputeType_t.
static inline void note_product(const char *call, long m, long n, long k, long batch, int a, int b, int c, float beta, int math, int compute) {
  note("product %s m %ld n %ld k %ld batch %ld a %d b %d c %d beta %g math %d compute %d", call, m, n, k, batch, a, b, c, beta, math, compute);
}

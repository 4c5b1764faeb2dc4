// cuBLAS: a product is noted with its shape, its formats and the math mode of its handle.
#include "products.h"
#include <stdlib.h>

// A handle is its math mode.
ANSWER cublasStatus_t cublasCreate_v2(cublasHandle_t *h) { *h = calloc(1, 4096); return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasDestroy_v2(cublasHandle_t h) { free(h); return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t mode) { *(int *)h = mode; return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *mode) { *mode = *(int *)h; return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *mode) { *mode = CUBLAS_POINTER_MODE_HOST; return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t mode) { return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) { return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *workspace, size_t bytes) { return CUBLAS_STATUS_SUCCESS; }

static cublasStatus_t product(cublasHandle_t h, const char *call, int m, int n, int k, int batch, int a, int b, int c, float beta, int compute) {
  note_product(call, m, n, k, batch, a, b, c, beta, *(int *)h, compute);
  return CUBLAS_STATUS_SUCCESS;
}

ANSWER cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha, const void *A, cudaDataType at, int lda, const void *B, cudaDataType bt, int ldb, const void *beta, void *C, cudaDataType ct, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return product(h, "GemmEx", m, n, k, 1, at, bt, ct, *(const float *)beta, compute);
}
ANSWER cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha, const void *A, cudaDataType at, int lda, long long sa, const void *B, cudaDataType bt, int ldb, long long sb, const void *beta, void *C, cudaDataType ct, int ldc, long long sc, int batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return product(h, "GemmStridedBatchedEx", m, n, k, batch, at, bt, ct, *(const float *)beta, compute);
}
ANSWER cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha, const float *A, int lda, const float *B, int ldb, const float *beta, float *C, int ldc) {
  return product(h, "Sgemm", m, n, k, 1, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, *beta, CUBLAS_COMPUTE_32F);
}
ANSWER cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha, const float *A, int lda, long long sa, const float *B, int ldb, long long sb, const float *beta, float *C, int ldc, long long sc, int batch) {
  return product(h, "SgemmStridedBatched", m, n, k, batch, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, *beta, CUBLAS_COMPUTE_32F);
}
ANSWER cublasStatus_t cublasDgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double *alpha, const double *A, int lda, const double *B, int ldb, const double *beta, double *C, int ldc) {
  return product(h, "Dgemm", m, n, k, 1, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, *beta, CUBLAS_COMPUTE_64F);
}
ANSWER cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double *alpha, const double *A, int lda, long long sa, const double *B, int ldb, long long sb, const double *beta, double *C, int ldc, long long sc, int batch) {
  return product(h, "DgemmStridedBatched", m, n, k, batch, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, *beta, CUBLAS_COMPUTE_64F);
}

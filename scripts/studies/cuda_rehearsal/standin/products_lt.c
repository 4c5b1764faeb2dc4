// cuBLASLt: layouts and descriptions are kept until the product, which is noted. Its heuristic finds one algorithm.
#include "products.h"
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

struct layout { int type, batch; long rows, columns; };
struct description { int compute, transposed_a, transposed_b; };

#undef cublasLtMatrixLayoutCreate
ANSWER cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows, uint64_t columns, int64_t leading) {
  struct layout *layout = malloc(sizeof *layout);
  *layout = (struct layout){type, 1, rows, columns};
  *made = (cublasLtMatrixLayout_t)layout;
  return CUBLAS_STATUS_SUCCESS;
}
ANSWER cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) { free((void *)layout); return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((struct layout *)layout)->batch = *(const int *)value;
  return CUBLAS_STATUS_SUCCESS;
}
ANSWER cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t compute, cudaDataType_t scale) {
  struct description *description = malloc(sizeof *description);
  *description = (struct description){compute, 0, 0};
  *made = (cublasLtMatmulDesc_t)description;
  return CUBLAS_STATUS_SUCCESS;
}
ANSWER cublasStatus_t cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t description) { free((void *)description); return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t made, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) {
  struct description *description = (struct description *)made;
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) description->transposed_a = *(const int *)value;
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) description->transposed_b = *(const int *)value;
  return CUBLAS_STATUS_SUCCESS;
}
ANSWER cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) { *made = calloc(1, 64); return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t preference) { free((void *)preference); return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes) { return CUBLAS_STATUS_SUCCESS; }
ANSWER cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t preference, int asked, cublasLtMatmulHeuristicResult_t *result, int *found) {
  memset(result, 0, sizeof *result);
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}
ANSWER cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha, const void *A, cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t out, const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes, cudaStream_t s) {
  struct description *description = (struct description *)d;
  struct layout *left = (struct layout *)a, *right = (struct layout *)b, *result = (struct layout *)out;
  long k = description->transposed_a ? left->rows : left->columns;
  note_product("LtMatmul", result->rows, result->columns, k, left->batch, left->type, right->type, result->type, beta ? *(const float *)beta : 0, 0, description->compute);
  return CUBLAS_STATUS_SUCCESS;
}

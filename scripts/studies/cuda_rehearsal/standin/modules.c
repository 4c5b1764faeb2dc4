// The driver's modules: kernels that Triton and torch's own run-time compiler made. The compilers themselves are real.
//
// A module is not read: a function of any name is found in it, and its launch is noted by that name.
#include "standin.h"
#include <dlfcn.h>
#include <string.h>

ANSWER CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = new_handle(); return CUDA_SUCCESS; }
ANSWER CUresult cuModuleLoad(CUmodule *module, const char *path) { *module = new_handle(); return CUDA_SUCCESS; }
ANSWER CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) { *module = new_handle(); return CUDA_SUCCESS; }
ANSWER CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
ANSWER CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)strdup(name); return CUDA_SUCCESS; }
ANSWER CUresult cuFuncGetAttribute(int *v, CUfunction_attribute attribute, CUfunction function) {
  *v = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
ANSWER CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int v) { return CUDA_SUCCESS; }
ANSWER CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache cache) { return CUDA_SUCCESS; }
ANSWER CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *how) { *clusters = 1; return CUDA_SUCCESS; }
ANSWER CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) { *blocks = 2; return CUDA_SUCCESS; }

static CUresult launch(CUfunction function) { note("triton %s", (const char *)function); return CUDA_SUCCESS; }

ANSWER CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void **arguments, void **more) { return launch(function); }
ANSWER CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **more) { return launch(function); }

// Functions that are looked up by name: the stand-in's own; others are noted, and give success.
static CUresult nothing(void) { return CUDA_SUCCESS; }
static void *looked_up(const char *name) {
  void *found = dlsym(RTLD_DEFAULT, name);
  if (!found) note("stub %s", name);
  return found ? found : (void *)nothing;
}
ANSWER CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
  *function = looked_up(name);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
ANSWER cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = looked_up(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// The driver's private tables, which torch's run-time compiler looks into: there are none.
ANSWER CUresult cuGetExportTable(const void **table, const CUuuid *id) { return CUDA_ERROR_NOT_FOUND; }

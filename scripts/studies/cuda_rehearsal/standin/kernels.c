// Kernels that are compiled into torch and the libraries: they register with the runtime and are launched by address.
//
// A launch is noted by the kernel's name, and nothing runs.
#include "standin.h"
#include <stdlib.h>
#include <string.h>

static struct kernel { const void *address; const char *name; } *kernels;
static long count, room;

ANSWER void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
ANSWER void __cudaRegisterFatBinaryEnd(void **handle) {}
ANSWER void __cudaUnregisterFatBinary(void **handle) {}
ANSWER void __cudaRegisterVar(void **handle, char *a, char *b, const char *name, int e, size_t bytes, int c, int g) {}
ANSWER char __cudaInitModule(void **handle) { return 0; }
ANSWER void __cudaRegisterFunction(void **handle, const char *address, char *device_function, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {
  if (count == room) kernels = realloc(kernels, (room = room ? 2 * room : 4096) * sizeof *kernels);
  kernels[count++] = (struct kernel){address, name};
}

static cudaError_t launch(const void *address) {
  if (!is_noting()) return cudaSuccess;
  const char *name = "unknown";
  for (long i = 0; i < count; i++)
    if (kernels[i].address == address) { name = kernels[i].name; break; }
  note("launch %s", name);
  return cudaSuccess;
}

// `kernel<<<grid, block>>>(…)` is a push, the call of a stub that pops, and a launch.
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed[64];
static __thread int depth;
ANSWER unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  pushed[depth].grid = grid;
  pushed[depth].block = block;
  pushed[depth].shared = shared;
  pushed[depth++].stream = stream;
  return 0;
}
ANSWER cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed[--depth].grid;
  *block = pushed[depth].block;
  *shared = pushed[depth].shared;
  *(void **)stream = pushed[depth].stream;
  return cudaSuccess;
}
ANSWER cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *address) { *kernel = (cudaKernel_t)address; return cudaSuccess; }
ANSWER cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) { return launch(kernel); }
ANSWER cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) { return launch(kernel); }
ANSWER cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) { return launch(kernel); }

// Registers and occupancy are those of a middling kernel: host code only chooses grids by them.
ANSWER cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
ANSWER cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int v) { return cudaSuccess; }
ANSWER cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t shared, unsigned flags) { *blocks = 2; return cudaSuccess; }
ANSWER cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) { *blocks = 2; return cudaSuccess; }

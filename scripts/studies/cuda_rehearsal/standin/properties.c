// What the device is: one H100 SXM, by the runtime's and the driver's questions. Its clocks and links are not answered.
#include "standin.h"
#include <stdlib.h>
#include <string.h>

#define VERSION 13000
// A program that is compiled for a device is found again by the device's name.
static const char *device_name(void) {
  const char *asked = getenv("STANDIN_NAME");
  return asked ? asked : "NVIDIA H100 80GB HBM3 (stand-in)";
}

int device_attribute(int attribute) {
  switch (attribute) {
  case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
  case cudaDevAttrMaxBlockDimZ: return 64;
  case cudaDevAttrMaxGridDimX: return 2147483647;
  case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
  case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
  case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
  case cudaDevAttrWarpSize: return 32;
  case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
  case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
  case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
  case cudaDevAttrMultiProcessorCount: return 132;
  case cudaDevAttrComputeCapabilityMajor: return 9;
  case cudaDevAttrComputeCapabilityMinor: return 0;
  case cudaDevAttrL2CacheSize: return 50 << 20;
  case cudaDevAttrClockRate: return 1980000;        // kHz
  case cudaDevAttrMemoryClockRate: return 2619000;  // kHz
  case cudaDevAttrGlobalMemoryBusWidth: return 5120;
  case cudaDevAttrUnifiedAddressing: return 1;
  default: return 0;
  }
}

ANSWER cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  size_t free;
  memset(p, 0, sizeof *p);
  strncpy(p->name, device_name(), sizeof p->name - 1);
  device_memory_left(&free, &p->totalGlobalMem);
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->unifiedAddressing = p->concurrentKernels = 1;
  p->textureAlignment = 512;
  return cudaSuccess;
}

ANSWER cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return cudaSuccess; }
ANSWER cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
ANSWER cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
ANSWER cudaError_t cudaDriverGetVersion(int *v) { *v = VERSION; return cudaSuccess; }
ANSWER cudaError_t cudaRuntimeGetVersion(int *v) { *v = VERSION; return cudaSuccess; }
ANSWER cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int device) { *v = device_attribute(a); return cudaSuccess; }
ANSWER cudaError_t cudaDeviceGetPCIBusId(char *name, int length, int device) { strncpy(name, "0000:00:00.0", length); return cudaSuccess; }
ANSWER cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
ANSWER cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }
ANSWER cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = new_handle(); return cudaSuccess; }

// No call fails but an allocation that does not fit.
ANSWER cudaError_t cudaGetLastError(void) { return cudaSuccess; }
ANSWER cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
ANSWER const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "an error of the stand-in" : "no error"; }
ANSWER const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
ANSWER CUresult cuGetErrorString(CUresult e, const char **words) { *words = "an error of the stand-in"; return CUDA_SUCCESS; }
ANSWER CUresult cuGetErrorName(CUresult e, const char **words) { *words = "STANDIN"; return CUDA_SUCCESS; }

ANSWER CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
ANSWER CUresult cuDriverGetVersion(int *v) { *v = VERSION; return CUDA_SUCCESS; }
ANSWER CUresult cuDeviceGet(CUdevice *device, int number) { *device = 0; return CUDA_SUCCESS; }
ANSWER CUresult cuDeviceGetCount(int *n) { *n = 1; return CUDA_SUCCESS; }
ANSWER CUresult cuDeviceGetName(char *name, int length, CUdevice device) { strncpy(name, device_name(), length); return CUDA_SUCCESS; }
ANSWER CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice device) { *v = device_attribute((int)a); return CUDA_SUCCESS; }

// One context, which is always there.
#define CONTEXT ((CUcontext)0x55)
ANSWER CUresult cuCtxGetCurrent(CUcontext *c) { *c = CONTEXT; return CUDA_SUCCESS; }
ANSWER CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
ANSWER CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
ANSWER CUresult cuCtxPushCurrent_v2(CUcontext c) { return CUDA_SUCCESS; }
ANSWER CUresult cuCtxPopCurrent_v2(CUcontext *c) { if (c) *c = CONTEXT; return CUDA_SUCCESS; }
ANSWER CUresult cuCtxGetLimit(size_t *v, CUlimit limit) { *v = 1 << 20; return CUDA_SUCCESS; }
ANSWER CUresult cuCtxSetLimit(CUlimit limit, size_t v) { return CUDA_SUCCESS; }
ANSWER CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device) { *c = CONTEXT; return CUDA_SUCCESS; }
ANSWER CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }

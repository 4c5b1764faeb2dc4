// Device memory: allocation up to a real limit, and what an address belongs to.
//
// Pages are reserved and not touched, so that 80 GB of a device take nothing of the host's memory. Torch's caching
// allocator above is torch's own. Not answered: virtual memory management (expandable segments) and memory pools.
#include "standin.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// CUDA's context with the kernels of the libraries: an assumption, core/plan/memory.py's CONTEXT.
#define CONTEXT 600000000ull
#define SEGMENTS 65536

static struct { char *begin; size_t bytes; } segments[SEGMENTS];
static int most;  // segments beyond this one were never used
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Bytes of the device: of an H100 SXM as torch reports them, or STANDIN_MEMORY.
static size_t device_bytes(void) {
  const char *asked = getenv("STANDIN_MEMORY");
  return asked && *asked ? strtoull(asked, NULL, 10) : 85017493504ull;
}

static void *reserve(size_t bytes) {
  void *found = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? NULL : found;
}

int take_device_memory(void **address, size_t bytes) {
  int place = 0;
  pthread_mutex_lock(&lock);
  while (place < SEGMENTS && segments[place].begin) place++;
  int refused = used + bytes + CONTEXT > device_bytes() || place == SEGMENTS || !(*address = reserve(bytes));
  if (!refused) {
    segments[place].begin = *address;
    segments[place].bytes = bytes;
    most = place >= most ? place + 1 : most;
    used += bytes;
  }
  pthread_mutex_unlock(&lock);
  note("%s %zu", refused ? "refused" : "allocate", bytes);
  return refused ? cudaErrorMemoryAllocation : cudaSuccess;
}

int give_back_device_memory(void *address) {
  pthread_mutex_lock(&lock);
  for (int i = 0; address && i < most; i++)
    if (segments[i].begin == address) {
      munmap(address, segments[i].bytes ? segments[i].bytes : 1);
      used -= segments[i].bytes;
      segments[i].begin = NULL;
      note("free %zu", segments[i].bytes);
      break;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

int is_device_memory(const void *address) {
  const char *at = address;
  for (int i = 0; i < most; i++)
    if (segments[i].begin && at >= segments[i].begin && at < segments[i].begin + segments[i].bytes) return 1;
  return 0;
}

void device_memory_left(size_t *free, size_t *total) {
  *total = device_bytes();
  *free = *total - CONTEXT - used;
}

ANSWER cudaError_t cudaMalloc(void **address, size_t bytes) { return take_device_memory(address, bytes); }
ANSWER cudaError_t cudaFree(void *address) { return give_back_device_memory(address); }
ANSWER cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t s) { return take_device_memory(address, bytes); }
ANSWER cudaError_t cudaFreeAsync(void *address, cudaStream_t s) { return give_back_device_memory(address); }
ANSWER CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) { return take_device_memory((void **)address, bytes); }
ANSWER CUresult cuMemFree_v2(CUdeviceptr address) { return give_back_device_memory((void *)address); }
ANSWER cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { device_memory_left(free, total); return cudaSuccess; }

// Page-locked memory of the host is plain memory here.
ANSWER cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) { *address = reserve(bytes); return cudaSuccess; }
ANSWER cudaError_t cudaMallocHost(void **address, size_t bytes) { *address = reserve(bytes); return cudaSuccess; }
ANSWER cudaError_t cudaFreeHost(void *address) { return cudaSuccess; }
ANSWER cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) { return cudaSuccess; }
ANSWER cudaError_t cudaHostUnregister(void *address) { return cudaSuccess; }

ANSWER cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  int ours = is_device_memory(address);
  memset(found, 0, sizeof *found);
  found->type = ours ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  found->device = ours ? 0 : cudaInvalidDeviceId;
  found->devicePointer = ours ? (void *)address : NULL;
  found->hostPointer = ours ? NULL : (void *)address;
  return cudaSuccess;
}
ANSWER CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  *(void **)value = (void *)address;
  return CUDA_SUCCESS;
}
// Variables of the device, as kernels' counters are: room for any of them.
ANSWER cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { *address = reserve(65536); return cudaSuccess; }
ANSWER cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind kind) { return cudaSuccess; }

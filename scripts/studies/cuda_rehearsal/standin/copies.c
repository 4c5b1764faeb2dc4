// Copies and fills: small ones are made, since the host reads scalars that it has written; large ones are noted alone.
//
// What a kernel would have written is zero, and so is what a large copy brings to the host.
#include "standin.h"
#include <string.h>

#define SMALL 65536

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream) {
  int to_device = is_device_memory(to), from_device = is_device_memory(from);
  const char *kind = to_device ? (from_device ? "d2d" : "h2d") : (from_device ? "d2h" : "h2h");
  note("%s %zu", kind, bytes);
  if (bytes <= SMALL || !(to_device || from_device)) memcpy(to, from, bytes);
  else if (!to_device) memset(to, 0, bytes);
  return cudaSuccess;
}

static cudaError_t fill(void *to, int value, size_t bytes) {
  note("memset %zu", bytes);
  if (bytes <= SMALL) memset(to, value, bytes);
  return cudaSuccess;
}

ANSWER cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  note("sync copy");
  return copy(to, from, bytes, NULL);
}
ANSWER cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
ANSWER cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
ANSWER cudaError_t cudaMemset(void *to, int value, size_t bytes) { return fill(to, value, bytes); }
ANSWER cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) { return fill(to, value, bytes); }
ANSWER CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) { return fill((void *)to, 0, 4 * count); }
ANSWER cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t pitch_from, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  note("%s %zu", is_device_memory(to) ? (is_device_memory(from) ? "d2d" : "h2d") : "d2h", width * height);
  for (size_t row = 0; width * height <= SMALL && row < height; row++) memcpy((char *)to + row * pitch, (const char *)from + row * pitch_from, width);
  return cudaSuccess;
}

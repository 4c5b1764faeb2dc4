// Streams, events and the calls that make the host wait. Everything is done at once, in the order of the calls.
//
// Times between events are the host's. A race between streams cannot show.
#include "standin.h"
#include <stdlib.h>
#include <time.h>

ANSWER cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = new_handle(); return cudaSuccess; }
ANSWER cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = new_handle(); return cudaSuccess; }
ANSWER cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = new_handle(); return cudaSuccess; }
ANSWER cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
ANSWER cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
ANSWER cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
ANSWER cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return cudaSuccess; }
ANSWER cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *with, unsigned flags) { call(s, cudaSuccess, with); return cudaSuccess; }
ANSWER cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *with) { call(with); return cudaSuccess; }

// What the study counts as synchronisations.
ANSWER cudaError_t cudaStreamSynchronize(cudaStream_t s) { note("sync stream"); return cudaSuccess; }
ANSWER CUresult cuStreamSynchronize(CUstream s) { note("sync stream"); return CUDA_SUCCESS; }
ANSWER cudaError_t cudaDeviceSynchronize(void) { note("sync device"); return cudaSuccess; }
ANSWER CUresult cuCtxSynchronize(void) { note("sync device"); return CUDA_SUCCESS; }
ANSWER cudaError_t cudaEventSynchronize(cudaEvent_t e) { note("sync event"); return cudaSuccess; }

static struct timespec *moment(cudaEvent_t e) { return (struct timespec *)e; }

ANSWER cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = calloc(1, sizeof(struct timespec)); return cudaSuccess; }
ANSWER cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
ANSWER cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; }
ANSWER cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { clock_gettime(CLOCK_MONOTONIC, moment(e)); return cudaSuccess; }
ANSWER cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
ANSWER cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaSuccess; }
ANSWER cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  float between = 1e3f * (moment(to)->tv_sec - moment(from)->tv_sec) + 1e-6f * (moment(to)->tv_nsec - moment(from)->tv_nsec);
  *milliseconds = between > 0 ? between : 1e-3f;
  return cudaSuccess;
}

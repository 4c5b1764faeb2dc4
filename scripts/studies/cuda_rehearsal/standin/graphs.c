// CUDA graphs: a capture is noted and what is called during it is called as ever. A graph holds nothing.
//
// So a replay launches nothing, what must not be called during a capture is not refused, and what the allocator holds
// under graphs is not what it would be.
#include "standin.h"

static int capturing;

static enum cudaStreamCaptureStatus status(void) {
  return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

ANSWER cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *found) { *found = status(); return cudaSuccess; }
// The header names this one by a macro, with a suffix or without.
#undef cudaStreamGetCaptureInfo
ANSWER cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *found, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *found = status();
  if (id) *id = capturing;
  if (graph) *graph = new_handle();
  if (count) *count = 0;
  return cudaSuccess;
}
ANSWER cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  static int captures;
  capturing = ++captures;
  note("capture");
  return cudaSuccess;
}
ANSWER cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) { capturing = 0; *graph = new_handle(); return cudaSuccess; }
ANSWER cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
ANSWER cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { *made = new_handle(); return cudaSuccess; }
ANSWER cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { *made = new_handle(); return cudaSuccess; }
ANSWER cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) { note("graph"); return cudaSuccess; }
ANSWER cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
ANSWER cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaSuccess; }
ANSWER cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = 1; return cudaSuccess; }
ANSWER cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { return cudaSuccess; }

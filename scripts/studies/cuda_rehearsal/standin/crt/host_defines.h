// Stands in for the header of this name, which comes with NVIDIA's compiler and not with a CUDA build of torch: the
// words that decorate CUDA's declarations, as a plain C compiler may read them.
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define CUDA_CB
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __specialization_static static
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline
#define __no_return__
#define __location__(where)

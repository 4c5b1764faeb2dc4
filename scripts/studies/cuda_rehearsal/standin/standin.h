// What the files of the stand-in share. Each file of this folder answers one part of CUDA's interfaces.
#pragma once
#define _GNU_SOURCE
// The headers of half-precision numbers are C++; others want no more of them than their size.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
typedef unsigned short __half;
typedef unsigned short __nv_bfloat16;
#include <cuda_runtime_api.h>
#include <cuda.h>
#include <stddef.h>
#include <stdio.h>

// A function that torch, Triton or a library of CUDA calls.
#define ANSWER __attribute__((visibility("default")))

// log.c: one line, while a log is open.
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
int is_noting(void);

// handles.c: a number that nothing else has; the stand-in's streams, graphs and modules are nothing more.
void *new_handle(void);

// memory.c: addresses that belong to the device.
int take_device_memory(void **address, size_t bytes);
int give_back_device_memory(void *address);
int is_device_memory(const void *address);
void device_memory_left(size_t *free, size_t *total);

// properties.c: the value of a device attribute; the runtime and the driver number them alike.
int device_attribute(int attribute);

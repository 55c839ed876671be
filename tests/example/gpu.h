/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A GPU for a model that computes on the host: device memory, blocking copies and one stream. It uses only the CUDA
 * driver, which it opens at run time (libcuda.so.1, or the library that ZEROD_LIBCUDA names). A real trainer has a
 * framework for this.
 *
 * Failures are reported in a sentence on standard error. Device memory has the type void *, and the host must not
 * dereference it. Call all functions from one thread.
 */

#include <stddef.h>

struct gpu;

/* Binds the calling thread to the GPU. Return: 0 or -errno. Pass *out to gpu_close() in both cases. */
int gpu_open(struct gpu **out, int device);
void gpu_close(struct gpu *gpu); /* NULL is allowed; frees all memory of gpu_alloc() */

/* Return: NULL on failure. One GPU has at most 16 such allocations. */
void *gpu_alloc(struct gpu *gpu, size_t n_bytes);

/* Copies to and from the GPU, after all earlier work on the stream has ended. Return: 0 or -errno. */
int gpu_put(struct gpu *gpu, void *to, const void *from, size_t n_bytes);
int gpu_get(struct gpu *gpu, void *to, const void *from, size_t n_bytes);

/* Return: a CUstream. */
void *gpu_stream(const struct gpu *gpu);

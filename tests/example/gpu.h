/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A GPU for a model that computes on the host: memory, copies that wait, and one stream, by the CUDA driver alone,
 * which is opened at run time (libcuda.so.1, or what ZEROD_LIBCUDA names). A real trainer has a framework for this.
 *
 * Failures are told on standard error in a sentence. Device memory is written as void *, and the host must not follow
 * it. One thread.
 */

#include <stddef.h>

struct gpu;

/* Makes the GPU the calling thread's. Return: 0 or -errno; *out is for gpu_close() in any case. */
int gpu_open(struct gpu **out, int device);
void gpu_close(struct gpu *gpu); /* NULL is fine; frees what gpu_alloc() gave */

/* Return: NULL on failure. At most 16 of them. */
void *gpu_alloc(struct gpu *gpu, size_t n_bytes);

/* To and from the GPU; what was put on the stream before has ended then. */
int gpu_put(struct gpu *gpu, void *to, const void *from, size_t n_bytes);
int gpu_get(struct gpu *gpu, void *to, const void *from, size_t n_bytes);

/* A CUstream. */
void *gpu_stream(const struct gpu *gpu);

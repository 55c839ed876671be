/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The calls of the CUDA driver that a trainer needs: to map the daemon's device memory, to copy into it on the caller's
 * stream, to report the progress of these copies, and to map memory where gathered weights are read. The driver is
 * opened at run time, so libzerod does not link CUDA and works without it. The environment variable ZEROD_LIBCUDA names
 * a library other than libcuda.so.1.
 *
 * Device addresses are pointers that the host must not follow. Every call works in the context that was current in the
 * thread that called cuda_open(), and restores the calling thread's own context, because hooks of a backward run on
 * threads of the framework. A handle is used by one thread at a time. It must not be used in a forked child.
 *
 * Outcomes are 0 or -errno. After an error the handle keeps a sentence with the driver's name of the error.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CUDA_GPU_BYTES = 16, /* of a GPU's UUID */
};

struct cuda;
struct progress_page;

/* is_torch: the sentences use torch's syntax. *out is set except on -ENOMEM, so that cuda_why() can be called. */
int cuda_open(struct cuda **out, bool is_torch);
void cuda_free(struct cuda *cuda); /* NULL is fine; unmap all its mappings before */
const char *cuda_why(const struct cuda *cuda);

/* Return: 0 if the context's GPU is this one. */
int cuda_check_gpu(struct cuda *cuda, const uint8_t gpu[CUDA_GPU_BYTES]);

/* Maps memory that another process has exported. Closes the descriptor, also on failure. */
int cuda_map(struct cuda *cuda, int fd, size_t n_bytes, bool read_only, uint8_t **out);
void cuda_unmap(struct cuda *cuda, uint8_t *base, size_t n_bytes);

int cuda_alloc(struct cuda *cuda, size_t n_bytes, uint8_t **out);
void cuda_release(struct cuda *cuda, uint8_t *memory); /* NULL is fine */

/* Gets the granularity: cuda_create() and cuda_put() need multiples of it. */
int cuda_granularity(struct cuda *cuda, size_t *n_bytes);

/* Reserves addresses without memory; they begin at a multiple of the granularity. */
int cuda_reserve(struct cuda *cuda, size_t n_bytes, uint8_t **out);
void cuda_unreserve(struct cuda *cuda, uint8_t *base, size_t n_bytes); /* NULL is fine; unmap all memory before */

/* Allocates memory of the GPU without an address. -ENOMEM: the GPU has none left. */
int cuda_create(struct cuda *cuda, size_t n_bytes, uint64_t *memory);
void cuda_destroy(struct cuda *cuda, uint64_t memory);

/* Maps the whole memory at reserved addresses, where the GPU may read and write it. -ENOMEM as in cuda_create(). */
int cuda_put(struct cuda *cuda, uint8_t *at, uint64_t memory, size_t n_bytes);
int cuda_take_away(struct cuda *cuda, uint8_t *at, size_t n_bytes); /* unmaps; no work may use it any more */

/* Waits for all work that is on the stream now. */
int cuda_wait(struct cuda *cuda, void *stream);
int cuda_copy(struct cuda *cuda, uint8_t *to, const void *from, size_t n_bytes, void *stream);
int cuda_copy_to_host(struct cuda *cuda, void *to, const void *from, size_t n_bytes, void *stream); /* waits */

/* Lets the GPU write into the page, which must stay until cuda_free(); by then the last point must be written. */
int cuda_open_progress(struct cuda *cuda, struct progress_page *page);

/* Has the stream write the point into the page (core/wire/progress.h), after all earlier points. */
int cuda_say_point(struct cuda *cuda, void *stream, uint64_t point);

/* Waits until all points are written. */
int cuda_wait_for_points(struct cuda *cuda);

/* Creates a stream that neither waits for the default one nor makes it wait. */
int cuda_stream_new(struct cuda *cuda, void **stream);
void cuda_stream_free(struct cuda *cuda, void *stream); /* NULL is fine */

/* Records an event behind the stream's present work. *event: NULL, or an event to be reused. For this process only. */
int cuda_mark(struct cuda *cuda, void **event, void *stream);
int cuda_is_past(struct cuda *cuda, void *event, bool *is_past);
int cuda_wait_until_past(struct cuda *cuda, void *event);
void cuda_event_free(struct cuda *cuda, void *event); /* NULL is fine */

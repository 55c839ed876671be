/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The CUDA driver as far as a trainer's side needs it: mapping the daemon's device memory, copying into it on the
 * caller's stream, saying how far that has come, and memory that comes to lie where gathered weights are read. The
 * driver is opened at run time, so libzerod links nothing of CUDA and works without it; the environment variable
 * ZEROD_LIBCUDA names another library than libcuda.so.1.
 *
 * Device addresses are pointers that the host must not follow. Every call works in the context that was current in the
 * thread that called cuda_open(), and leaves the calling thread with the one that it had: hooks of a backward run on
 * threads of the framework's own. A handle is used by one thread at a time. It must not be used in a forked child.
 *
 * Outcomes are 0 or -errno; why it failed stays in the handle, a sentence with the driver's name of the error.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CUDA_GPU_BYTES = 16, /* of a GPU's UUID */
};

struct cuda;
struct progress_page;

/* is_torch: whose syntax the sentences are in. *out is set in any case but for -ENOMEM, for its cuda_why(). */
int cuda_open(struct cuda **out, bool is_torch);
void cuda_free(struct cuda *cuda); /* NULL is fine; what it has mapped must be unmapped before */
const char *cuda_why(const struct cuda *cuda);

/* Is the context's GPU this one? */
int cuda_check_gpu(struct cuda *cuda, const uint8_t gpu[CUDA_GPU_BYTES]);

/* Maps memory that another process has exported. Takes the descriptor, also on failure. */
int cuda_map(struct cuda *cuda, int fd, size_t n_bytes, bool read_only, uint8_t **out);
void cuda_unmap(struct cuda *cuda, uint8_t *base, size_t n_bytes);

int cuda_alloc(struct cuda *cuda, size_t n_bytes, uint8_t **out);
void cuda_release(struct cuda *cuda, uint8_t *memory); /* NULL is fine */

/* Sizes that a process allocates and maps are multiples of the granularity. */
int cuda_granularity(struct cuda *cuda, size_t *n_bytes);

/* Reserves addresses without memory; they begin at a multiple of the granularity. */
int cuda_reserve(struct cuda *cuda, size_t n_bytes, uint8_t **out);
void cuda_unreserve(struct cuda *cuda, uint8_t *base, size_t n_bytes); /* NULL is fine; no memory is there any more */

/* Allocates memory of the GPU without an address. -ENOMEM: the GPU has none left. */
int cuda_create(struct cuda *cuda, size_t n_bytes, uint64_t *memory);
void cuda_destroy(struct cuda *cuda, uint64_t memory);

/* Maps the whole memory at reserved addresses, where the GPU may read and write it. -ENOMEM as well. */
int cuda_put(struct cuda *cuda, uint8_t *at, uint64_t memory, size_t n_bytes);
int cuda_take_away(struct cuda *cuda, uint8_t *at, size_t n_bytes); /* when no work uses it any more */

/* Waits for all work that was put on the stream so far. */
int cuda_wait(struct cuda *cuda, void *stream);
int cuda_copy(struct cuda *cuda, uint8_t *to, const void *from, size_t n_bytes, void *stream);
int cuda_copy_to_host(struct cuda *cuda, void *to, const void *from, size_t n_bytes, void *stream); /* and waits */

/* Lets the GPU write into this process's memory. It stays until cuda_free(), by when the last point is written. */
int cuda_open_progress(struct cuda *cuda, struct progress_page *page);

/* The stream, when it is there, writes the point into the page (core/wire/progress.h), after those said before. */
int cuda_say_point(struct cuda *cuda, void *stream, uint64_t point);

/* Waits until the last point is written, and so all before it. */
int cuda_wait_for_points(struct cuda *cuda);

/* A stream that neither waits for the default one nor lets it wait. */
int cuda_stream_new(struct cuda *cuda, void **stream);
void cuda_stream_free(struct cuda *cuda, void *stream); /* NULL is fine */

/* A place in the course of a stream: what was put on it so far is past when the event is. *event: NULL, or one to be
 * used again. For this process alone. */
int cuda_mark(struct cuda *cuda, void **event, void *stream);
int cuda_is_past(struct cuda *cuda, void *event, bool *is_past);
int cuda_wait_until_past(struct cuda *cuda, void *event);
void cuda_event_free(struct cuda *cuda, void *event); /* NULL is fine */

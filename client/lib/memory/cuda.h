/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The calls of the CUDA driver that a trainer needs. They map the daemon's device memory, copy into it on the caller's
 * stream, report the progress of these copies, and map memory for gathered weights. The driver is opened at run time,
 * so libzerod does not link CUDA and works without it. The environment variable ZEROD_LIBCUDA names a library other
 * than libcuda.so.1.
 *
 * Device addresses are pointers that the host must not follow. Every call works in the context that was current at
 * cuda_open(), and then restores the calling thread's own context, because hooks of a backward run on threads of the
 * framework. A handle is used by one thread at a time. It must not be used in a forked child.
 *
 * Outcomes are 0 or -errno. After an error the handle keeps a sentence with the driver's name of the error.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CUDA_GPU_BYTES = 16, /* size of a GPU's UUID */
};

struct cuda;
struct progress_page;

/*
 * Opens the driver. is_torch: error sentences use torch's syntax. *out is set except on -ENOMEM, so that cuda_why() can
 * be called.
 */
int cuda_open(struct cuda **out, bool is_torch);
void cuda_free(struct cuda *cuda); /* NULL is fine; unmap all mappings first */
const char *cuda_why(const struct cuda *cuda);

/* Return: 0 if the context's GPU has this UUID. */
int cuda_check_gpu(struct cuda *cuda, const uint8_t gpu[CUDA_GPU_BYTES]);

/* Maps memory that another process has exported. Closes the descriptor, also on failure. */
int cuda_map(struct cuda *cuda, int fd, size_t n_bytes, bool read_only, uint8_t **out);
void cuda_unmap(struct cuda *cuda, uint8_t *base, size_t n_bytes);

int cuda_alloc(struct cuda *cuda, size_t n_bytes, uint8_t **out);
void cuda_release(struct cuda *cuda, uint8_t *memory); /* NULL is fine */

/* Sets *n_bytes to the granularity, of which the sizes for cuda_create() and cuda_put() must be multiples. */
int cuda_granularity(struct cuda *cuda, size_t *n_bytes);

/* Reserves addresses without memory. *out is a multiple of the granularity. */
int cuda_reserve(struct cuda *cuda, size_t n_bytes, uint8_t **out);
void cuda_unreserve(struct cuda *cuda, uint8_t *base, size_t n_bytes); /* NULL is fine; unmap all memory first */

/* Allocates memory of the GPU without an address. Return: -ENOMEM if the GPU has none left. */
int cuda_create(struct cuda *cuda, size_t n_bytes, uint64_t *memory);
void cuda_destroy(struct cuda *cuda, uint64_t memory);

/* Maps all of the memory at reserved addresses, readable and writable by the GPU. Return: -ENOMEM as cuda_create(). */
int cuda_put(struct cuda *cuda, uint8_t *at, uint64_t memory, size_t n_bytes);
int cuda_take_away(struct cuda *cuda, uint8_t *at, size_t n_bytes); /* unmaps; no running work may use it */

/* Waits for all work that is on the stream now. */
int cuda_wait(struct cuda *cuda, void *stream);
int cuda_copy(struct cuda *cuda, uint8_t *to, const void *from, size_t n_bytes, void *stream);
int cuda_copy_to_host(struct cuda *cuda, void *to, const void *from, size_t n_bytes, void *stream); /* waits */

/*
 * Makes the page writable by the GPU. The page must stay until cuda_free(), and the last point must be written before
 * cuda_free().
 */
int cuda_open_progress(struct cuda *cuda, struct progress_page *page);

/* Makes the stream write the point into the page (core/wire/progress.h), after all earlier points. */
int cuda_say_point(struct cuda *cuda, void *stream, uint64_t point);

/* Waits until all points are written. */
int cuda_wait_for_points(struct cuda *cuda);

/* Creates a stream that neither waits for the default one nor makes it wait. */
int cuda_stream_new(struct cuda *cuda, void **stream);
void cuda_stream_free(struct cuda *cuda, void *stream); /* NULL is fine */

/*
 * Records an event after the stream's present work. *event: NULL for a new event, or an event to be reused. Only this
 * process can use the event.
 */
int cuda_mark(struct cuda *cuda, void **event, void *stream);
int cuda_is_past(struct cuda *cuda, void *event, bool *is_past);
int cuda_wait_until_past(struct cuda *cuda, void *event);
void cuda_event_free(struct cuda *cuda, void *event); /* NULL is fine */

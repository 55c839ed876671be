/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The memory of a job's gradients and weights: the operations that differ between host memory and memory of GPUs. A
 * handle uses host_memory until the daemon says that the job is on GPUs.
 *
 * Unless a comment says otherwise, a function returns 0, or fatal after call_fatal().
 */

#include <stddef.h>
#include <stdint.h>

#include "zerod/client.h"

struct reply_done;
struct reply_formed;
struct request_push;
struct wire_segment;

/* Gradients on their way to the daemon. */
struct gradient_ops {
    int (*put)(struct zerod *c, uint8_t *to, const void *from, size_t n_bytes); /* copies on the stream */

    /* Sets push->point to the point that the GPU must reach before the daemon reads the slot. */
    int (*mark)(struct zerod *c, struct request_push *push);

    /* Allocates memory of this process for a gradient that is pushed in parts. Return: NULL after a fatal error. */
    uint8_t *(*alloc)(struct zerod *c, uint32_t param);
    void (*release)(struct zerod *c, uint8_t *memory); /* NULL is fine */

    /*
     * Returns memory outside the ring for a refused duplicate, so that the first push's bytes stay. Return: NULL
     * without memory.
     */
    void *(*scratch)(struct zerod *c, uint32_t param);

    /*
     * Returns a refused duplicate's bytes in host memory. data: the bytes; NULL if they are in scratch(). Return: NULL
     * if scratch() was not called, or after an error.
     */
    const void *(*read_duplicate)(struct zerod *c, uint32_t param, const void *data);

    int (*wait_for_pushes)(struct zerod *c); /* until the copies of all pushes are done */
};

/* Weights, of which in stage 3 only those that are gathered are readable, and write windows. */
struct weight_ops {
    const uint8_t *(*weight)(const struct zerod *c, uint32_t param); /* where the caller reads it */

    /* Updates copies of weights after a step or a window. */
    int (*refresh)(struct zerod *c);

    /*
     * Waits until these parameters, or all, have the new weights. Call it when a step is decided, and the daemon owes
     * the answer (overlap.h).
     */
    int (*await)(struct zerod *c, const unsigned *params, size_t n_params);

    /*
     * Stage 3. count_fitting() returns how many of n parameters one request may gather; check_gathered() checks the
     * daemon's offsets in its pool.
     */
    size_t (*count_fitting)(const struct zerod *c, const unsigned *params, size_t n);
    int (*check_gathered)(struct zerod *c, const unsigned *params, size_t n, const struct reply_done *done);

    /*
     * Stage 3. After show() and then finish(), a gathered parameter is readable. show() may return -ENOMEM, which is
     * not fatal.
     */
    int (*show)(struct zerod *c, uint32_t param, uint64_t pool_offset);
    int (*finish)(struct zerod *c);
    int (*hide)(struct zerod *c, uint32_t param);

    /* Maps the window and sets c->window_base. fd: the daemon's memory, not consumed; -1 if the daemon sent none. */
    int (*open_window)(struct zerod *c, int fd);
    void (*close_window)(struct zerod *c); /* called after c->window_base is set to NULL */
};

/* Shared memory itself. */
struct memory_ops {
    const struct gradient_ops *gradients;
    const struct weight_ops *weights;

    /* Checks, before anything is mapped, that this process can use the daemon's memory. */
    int (*check_gpu)(struct zerod *c, const struct reply_formed *formed);

    /* Maps ring, weights or pool. Takes over fd, also on failure. Return: 0, or a negative errno for why(). */
    int (*map)(struct zerod *c, const struct wire_segment *segment, int fd);
    const char *(*why)(const struct zerod *c, int r);

    /* Checks, after all segments, that nothing is missing. */
    int (*check)(struct zerod *c, const struct reply_formed *formed);

    /* Sets *base and *n_bytes to the memory of zerod_memory(), if there is such memory. */
    void (*share)(const struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes);

    int (*wait)(struct zerod *c); /* until all present work of the caller's stream is done */

    void (*stop)(struct zerod *c);   /* waits for the stream before memory is freed; a forked child drops GPU memory */
    void (*deinit)(struct zerod *c); /* frees ring, weights, pool, window, and memory of the implementation */
};

extern const struct memory_ops host_memory;

/* Opens the driver for a job on GPUs, and makes the handle use GPU memory. After a failure the handle has the error,
 * and still uses host_memory. */
int cuda_memory_open(struct zerod *c);

/* Returns room for a duplicate's bytes in host memory, for both implementations. Return: NULL without memory. */
void *host_memory_scratch(struct zerod *c, uint32_t param);

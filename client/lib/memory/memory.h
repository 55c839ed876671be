/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The memory of a job's gradients and weights: the operations that differ between host memory and memory of GPUs. A
 * handle uses host_memory until the daemon says that the job is on GPUs.
 *
 * Unless a comment says otherwise, the outcome is 0 or a fatal error, which has been noted.
 */

#include <stddef.h>
#include <stdint.h>

#include "zerod/client.h"

struct reply_done;
struct reply_formed;
struct request_push;
struct wire_segment;

struct memory_ops {
    /* ---- forming ---- */

    /* Checks, before anything is mapped, that this process can use the daemon's memory. */
    int (*check_gpu)(struct zerod *c, const struct reply_formed *formed);

    /* Maps ring, weights or pool. Takes over fd, also on failure. Return: 0, or a negative errno for why(). */
    int (*map)(struct zerod *c, const struct wire_segment *segment, int fd);
    const char *(*why)(const struct zerod *c, int r);

    /* Checks, after all segments, that nothing is missing. */
    int (*check)(struct zerod *c, const struct reply_formed *formed);

    /* ---- the caller's stream ---- */

    int (*wait)(struct zerod *c);            /* until all that was put on the stream is done */
    int (*wait_for_pushes)(struct zerod *c); /* until the copies of all pushes are done */

    /* ---- gradients ---- */

    int (*put)(struct zerod *c, uint8_t *to, const void *from, size_t n_bytes); /* copies, on the stream */

    /* Writes into the push the point that the GPU must reach before the slot is read. */
    int (*mark)(struct zerod *c, struct request_push *push);

    /* Allocates memory of this process for a gradient that is pushed in parts. NULL: a fatal error. */
    uint8_t *(*alloc)(struct zerod *c, uint32_t param);
    void (*release)(struct zerod *c, uint8_t *memory); /* NULL is fine */

    /* Returns memory outside the ring for a refused duplicate, to spare the first push's bytes. NULL: no memory. */
    void *(*scratch)(struct zerod *c, uint32_t param);

    /*
     * Returns a duplicate's bytes in host memory. data: NULL if they are in scratch. Return: NULL if there are none, or
     * after an error.
     */
    const void *(*read_duplicate)(struct zerod *c, uint32_t param, const void *data);

    /* ---- weights ---- */

    const uint8_t *(*weight)(const struct zerod *c, uint32_t param); /* the caller's address */

    /* Sets *base and *n_bytes to memory that a caller may register with a GPU's driver, if there is such memory. */
    void (*share)(const struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes);

    /* Updates copies of weights after a step or a window. */
    int (*refresh)(struct zerod *c);

    /*
     * A step is decided, and the daemon owes its answer: waits until these parameters, or all, have the new weights
     * (overlap.h).
     */
    int (*await)(struct zerod *c, const unsigned *params, size_t n_params);

    /*
     * Stage 3. count_fitting() returns how many of n parameters one request may gather; check_gathered() checks the
     * daemon's offsets in its pool.
     */
    size_t (*count_fitting)(const struct zerod *c, const unsigned *params, size_t n);
    int (*check_gathered)(struct zerod *c, const unsigned *params, size_t n, const struct reply_done *done);

    /* Stage 3. show() makes a gathered parameter readable once finish() has returned; -ENOMEM is not fatal. */
    int (*show)(struct zerod *c, uint32_t param, uint64_t pool_offset);
    int (*finish)(struct zerod *c);
    int (*hide)(struct zerod *c, uint32_t param);

    /* ---- write window ---- */

    /* Maps the window and sets c->window_base. fd: of the daemon's memory, not consumed; -1: none came. */
    int (*open_window)(struct zerod *c, int fd);
    void (*close_window)(struct zerod *c); /* c->window_base is NULL already */

    /* ---- end ---- */

    void (*stop)(struct zerod *c);   /* before anything is freed: waits for the stream; in a forked child forgets it */
    void (*deinit)(struct zerod *c); /* frees ring, weights, pool, window and what the implementation has allocated */
};

extern const struct memory_ops host_memory;

/* Opens the driver for a job on GPUs, whose memory the handle has from then on. On failure the error is noted, and the
 * handle still has host_memory. */
int cuda_memory_open(struct zerod *c);

/* Room for a duplicate's bytes in host memory, which both implementations use. NULL: memory is out. */
void *host_memory_scratch(struct zerod *c, uint32_t param);

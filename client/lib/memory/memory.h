/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The memory that a job's gradients and weights lie in: all that the library does differently for host memory and for
 * memory of GPUs. A handle has host_memory until the daemon says that the job is on GPUs.
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

    /* Before anything is mapped: can this process use the memory where the daemon has it? */
    int (*check_gpu)(struct zerod *c, const struct reply_formed *formed);

    /* Maps the ring, the weights or the pool. Takes fd, also on failure. Return: 0, or a negative errno for why(). */
    int (*map)(struct zerod *c, const struct wire_segment *segment, int fd);
    const char *(*why)(const struct zerod *c, int r);

    /* After all segments: is everything there? */
    int (*check)(struct zerod *c, const struct reply_formed *formed);

    /* ---- the caller's stream ---- */

    int (*wait)(struct zerod *c);            /* until all that was put on the stream is done */
    int (*wait_for_pushes)(struct zerod *c); /* until the copies of all pushes are done */

    /* ---- gradients ---- */

    int (*put)(struct zerod *c, uint8_t *to, const void *from, size_t n_bytes); /* copies, on the stream */

    /* Names in the push the point that the GPU must have reached before the slot is read. */
    int (*mark)(struct zerod *c, struct request_push *push);

    /* Memory of this process for a gradient that is pushed in parts, kept until release(). NULL: a fatal error. */
    uint8_t *(*alloc)(struct zerod *c, uint32_t param);
    void (*release)(struct zerod *c, uint8_t *memory); /* NULL is fine */

    /* Room outside the ring for a refused duplicate, whose bytes must not overwrite the first push's. NULL: none. */
    void *(*scratch)(struct zerod *c, uint32_t param);

    /* A duplicate's bytes where the host can read them; data: NULL when they are in scratch. Return: NULL when there
     * are none, or after an error. */
    const void *(*read_duplicate)(struct zerod *c, uint32_t param, const void *data);

    /* ---- weights ---- */

    const uint8_t *(*weight)(const struct zerod *c, uint32_t param); /* where the caller finds it */

    /* Memory that a caller may register with a GPU's driver; left alone when there is none. */
    void (*share)(const struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes);

    /* After a step or a window: copies of weights get the new ones. */
    int (*refresh)(struct zerod *c);

    /* A step is decided, and its answer owed: waits until these parameters have its weights, or for all (overlap.h). */
    int (*await)(struct zerod *c, const unsigned *params, size_t n_params);

    /* Stage 3. How many of n parameters one request may gather; are the daemon's offsets in its pool right? */
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

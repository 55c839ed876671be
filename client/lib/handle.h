/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The handle: the state of one rank in libzerod. These are the files of client/lib. Each calls only files above it in
 * the list, except through the tables of memory/memory.h:
 *
 *   error.c, recorded.c           the last error; requests that the next daemon may need
 *   call.c                        a request and its answer
 *   overlap.c                     a step whose weights are still being written
 *   memory/cuda.c, range.c        the CUDA driver; addresses of gathered weights on a GPU
 *   memory/mapping.c              segments of shared memory
 *   slots.c, strings.c            places in the ring; strings that are sent once
 *   api-report.c, api-state.c     faults that the client has seen; state of parameters
 *   api-weights.c                 weights as the caller sees them; gather and release
 *   written.c, write-fault.c      writes to published weights (E1106); the handler of SIGSEGV (E1106, E1110)
 *   push.c, api-window.c          gradients of a micro-batch; write windows
 *   memory/host-memory.c          the tables for host memory
 *   memory/cuda-memory.c          the tables for memory of GPUs
 *   api-step.c, api-form.c        steps and their abort; declaring and forming
 *   reconnect.c                   Hello; reconnecting after a new daemon has taken over
 *   api-status.c                  the daemon's status, over a second connection
 *   watch.c                       a thread that sends the daemon the process's stacks
 *   handle.c                      connect, close, and facts about the job
 *
 * observe.c is separate: it explains faults without a daemon. Python calls python-hook.c, which calls push.c.
 */

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/lib/call.h"
#include "client/lib/memory/mapping.h"
#include "client/lib/memory/memory.h"
#include "client/lib/overlap.h"
#include "client/lib/slots.h"
#include "client/lib/strings.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "core/wire/wire.h"
#include "kernels/kernels.h"
#include "zerod/client.h"

struct cuda;
struct range;
struct watch;

struct zerod {
    struct call call;

    /* From zerod_connect(). */
    unsigned rank;
    unsigned flags; /* enum zerod_flags */
    bool is_torch;  /* texts use torch's syntax */
    uint64_t incarnation;
    struct { /* from the caller */
        char *run_id, *client, *optimizer;
        double momentum;
        enum wire_on_duplicate on_duplicate;
        bool is_last; /* set by the launcher */
    } wants;
    struct reply_welcome welcome; /* its strings are in run_id and optimizer */
    char *run_id, *optimizer;
    const struct kernels *kernels;

    /* Declaring and forming. */
    struct manifest manifest;
    const void **inits;    /* initial weights per parameter, until formed */
    struct layout *layout; /* when set, the daemon's memory is mapped */
    bool connecting;       /* Hello has not been answered */
    bool forming;          /* zerod_form() runs */
    bool formed;
    bool resumed, init_wanted; /* from Formed */
    struct wire_position position;
    struct wire_position last; /* position of the last ended micro-batch */
    void *blob;
    size_t n_blob_bytes;
    char *status; /* the daemon's last answer to zerod_status() */

    /* Memory. */
    const struct memory_ops *memory;
    struct mapping ring, overflow, credit;
    struct mapping published; /* struct published_page; empty: the daemon has none */
    uint64_t ring_bytes;
    bool past_caches;       /* writes of gradients into the ring bypass the caches */
    struct mapping weights; /* the daemon's segment; stage 3 in host memory: a range for gathered weights */
    uint8_t *host_scratch;
    size_t n_host_scratch_bytes;

    /* Weights. */
    uint8_t *private_weights; /* the copy that the caller sees, or NULL */
    _Atomic int written;      /* state of writes to the weights; see written.c */
    uint32_t *gathered;       /* stage 3: number of gathers per parameter */
    uint8_t *window_base;     /* where the caller writes while a window is open, else NULL */

    /* A job on GPUs (cuda-memory.c). */
    struct cuda *cuda;
    void *stream;          /* computes gradients; NULL: the default one */
    struct mapping pool;   /* stage 3: the last gathered weights, valid until the next message */
    struct range *range;   /* stage 3: the copies of gathered weights */
    struct mapping window; /* host memory, apart from the weights */
    struct mapping progress;
    uint64_t last_point; /* number of the last push's point (progress.h) */
    uint8_t *device_scratch;
    size_t n_device_scratch_bytes;

    /* Micro-batches. */
    bool speculates;             /* from Formed */
    struct wire_hyper *expected; /* zerod_expect(); sent with the next begin of a micro-batch; NULL: nothing to send */
    bool open;                   /* a micro-batch is open */
    uint32_t ordinal;
    uint64_t sequence;
    uint16_t *n_pushed; /* pushes per parameter in the open micro-batch */
    bool *slotted;      /* per parameter: zerod_slot() has returned the place of the next push */
    uint8_t **places;   /* per parameter: memory for a gradient of several parts, or NULL */
    struct slots slots;
    struct strings strings;

    struct watch *watch; /* NULL if it was not started */
};

/* Return: 0, or an error if this call is not allowed now. */
static inline int handle_is_formed(struct zerod *c)
{
    int r = call_check(&c->call);

    return r == 0 && !c->formed ? call_fail(&c->call, -EINVAL, "call zerod_form first") : r;
}

/* For calls that use the daemon or the position: receives the answer of the last step first, if the daemon owes it. */
static inline int handle_check(struct zerod *c)
{
    int r = call_check(&c->call);

    return r == 0 && c->call.owes ? overlap_settle(c) : r;
}

static inline int handle_check_formed(struct zerod *c)
{
    int r = handle_is_formed(c);

    return r == 0 && c->call.owes ? overlap_settle(c) : r;
}

static inline size_t handle_gradient_bytes(const struct zerod *c, uint32_t param)
{
    return c->layout->params[param].n_elems * dtype_size(c->layout->params[param].grad_dtype);
}

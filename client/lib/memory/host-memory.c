/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gradients and weights in host memory. Weights are:
 *
 *   shared     the daemon's weight segment, read-only
 *   private    a copy of the segment, updated before zerod_step() returns
 *   stage 3    a reserved range with a place for each parameter. While a parameter is gathered, the pool's pages are
 *              mapped at its place. Otherwise the place is PROT_NONE, even if the parameter was prefetched
 *
 * A write window maps other memory at these addresses.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/lib/write-fault.h"
#include "client/lib/handle.h"
#include "client/lib/memory/memory.h"
#include "client/lib/api-weights.h"
#include "client/lib/written.h"
#include "core/base/base.h"
#include "core/base/caches.h"
#include "core/base/failpoint.h"
#include "core/wire/wire-reply.h"
#include "kernels/copy.h"

enum { ALLOC_ALIGN_BYTES = 64 };

/* ---- forming ------------------------------------------------------------------------------------------- */

static int host_memory_check_gpu(struct zerod *c, const struct reply_formed *formed)
{
    return 0;
}

static int map_ring(struct zerod *c, int fd, size_t n_bytes)
{
    int r = mapping_init(&c->ring, fd, n_bytes, PROT_READ | PROT_WRITE);

    /* If the rings of all ranks fit into the last-level cache, the daemon reads gradients from the cache. */
    c->past_caches = n_bytes * c->welcome.world_size > caches_last_level_bytes();
    /* Takes the page faults of the ring now, because they would slow a backward down. */
    if (r == 0)
        (void)madvise(c->ring.base, c->ring.n_bytes, MADV_POPULATE_WRITE);
    return r;
}

static int map_weights(struct zerod *c, enum wire_segment_kind kind, int fd, size_t n_bytes)
{
    int r = kind == WIRE_SEGMENT_POOL ? mapping_reserve(&c->weights, fd, n_bytes)
                                      : mapping_init(&c->weights, fd, n_bytes, PROT_READ);
    void *copy;

    if (r < 0)
        return r;
    if (c->welcome.private_weights && !weights_is_stage3(c)) {
        copy = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy == MAP_FAILED)
            return -errno;
        c->private_weights = copy;
    }
    if (!(c->flags & ZEROD_NO_SIGSEGV_HANDLER))
        fault_register(c, weights_visible(c), n_bytes);
    return 0;
}

static int host_memory_map(struct zerod *c, const struct wire_segment *segment, int fd)
{
    bool is_weights = segment->kind == (weights_is_stage3(c) ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS);

    if (!segment->cuda && segment->kind == WIRE_SEGMENT_RING && !c->ring.base)
        return map_ring(c, fd, segment->n_bytes);
    if (!segment->cuda && is_weights && !c->weights.base)
        return map_weights(c, segment->kind, fd, segment->n_bytes);
    close(fd);
    return -EPROTO;
}

static const char *host_memory_why(const struct zerod *c, int r)
{
    return r == -EPROTO ? "the segment differs from its announcement" : strerror(-r);
}

static int host_memory_check(struct zerod *c, const struct reply_formed *formed)
{
    uint64_t held_offset = held_pushes_offset(formed->ring_bytes);
    uint64_t weight_bytes = weights_bytes(c);

    if (formed->ring_bytes > c->ring.n_bytes || c->ring.n_bytes < held_offset + sizeof(struct held_pushes))
        return call_fatal(&c->call, -EPROTO, "zerod sent no ring of %llu bytes",
                          (unsigned long long)formed->ring_bytes);
    if (c->weights.n_bytes < weight_bytes)
        return call_fatal(&c->call, -EPROTO, "zerod sent %zu bytes of weights, expected at least %llu",
                          c->weights.n_bytes, (unsigned long long)weight_bytes);
    c->call.held.shown = (struct held_pushes *)(c->ring.base + held_offset);
    return 0;
}

/* ---- gradients ----------------------------------------------------------------------------------------- */

/* Does not wait, because the host copies at once. */
static int host_memory_wait_for_nothing(struct zerod *c)
{
    return 0;
}

static int host_memory_put(struct zerod *c, uint8_t *to, const void *from, size_t n_bytes)
{
    if (c->past_caches)
        copy_past_caches(to, from, n_bytes);
    else
        memcpy(to, from, n_bytes);
    return 0;
}

static int host_memory_mark(struct zerod *c, struct request_push *push)
{
    return 0;
}

static uint8_t *host_memory_alloc(struct zerod *c, uint32_t param)
{
    void *memory = NULL;
    int r = -posix_memalign(&memory, ALLOC_ALIGN_BYTES, handle_gradient_bytes(c, param));

    if (r == 0)
        return memory;
    call_fatal(&c->call, r, "out of memory");
    return NULL;
}

static void host_memory_release(struct zerod *c, uint8_t *memory)
{
    free(memory);
}

void *host_memory_scratch(struct zerod *c, uint32_t param)
{
    size_t n_bytes = handle_gradient_bytes(c, param) + 1;

    if (n_bytes > c->n_host_scratch_bytes) {
        free(c->host_scratch);
        c->host_scratch = malloc(n_bytes);
        c->n_host_scratch_bytes = c->host_scratch ? n_bytes : 0;
    }
    return c->host_scratch;
}

static const void *host_memory_read_duplicate(struct zerod *c, uint32_t param, const void *data)
{
    return data ? data : c->host_scratch;
}

/* ---- weights ------------------------------------------------------------------------------------------- */

static const uint8_t *host_memory_weight(const struct zerod *c, uint32_t param)
{
    return weights_visible(c) + weights_offset(c, param);
}

static void host_memory_share(const struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes)
{
    if (which == ZEROD_MEMORY_RING) {
        *base = c->ring.base;
        *n_bytes = c->ring_bytes;
    } else if (!weights_is_stage3(c)) {
        *base = weights_visible(c);
        *n_bytes = c->weights.n_bytes;
    }
}

static int host_memory_refresh(struct zerod *c)
{
    if (!c->private_weights)
        return 0;
    (void)mprotect(c->private_weights, c->weights.n_bytes, PROT_READ | PROT_WRITE);
    memcpy(c->private_weights, c->weights.base, c->weights.n_bytes);
    (void)mprotect(c->private_weights, c->weights.n_bytes, PROT_READ);
    written_refreshed(c);
    return 0;
}

/*
 * Waits for all weights if they are private, because all are copied at once, or if there is no published page, as in a
 * job on several nodes.
 */
static int host_memory_await(struct zerod *c, const unsigned *params, size_t n_params)
{
    return c->private_weights || !c->published.base ? overlap_settle(c) : overlap_await(c, params, n_params);
}

/* ---- stage 3 ------------------------------------------------------------------------------------------- */

static size_t mapped_bytes(const struct zerod *c, uint32_t param)
{
    return round_up(weights_param_bytes(c, param), (size_t)sysconf(_SC_PAGESIZE));
}

static size_t host_memory_count_fitting(const struct zerod *c, const unsigned *params, size_t n)
{
    return n;
}

/* Checks nothing, because the range has a place for each parameter. */
static int host_memory_check_gathered(struct zerod *c, const unsigned *params, size_t n, const struct reply_done *done)
{
    return 0;
}

/*
 * Maps a gathered parameter. In a window it does nothing, because the window has all weights;
 * host_memory_close_window() then maps the parameter.
 */
static int host_memory_show(struct zerod *c, uint32_t param, uint64_t pool_offset)
{
    uint64_t offset = weights_offset(c, param);
    size_t n_bytes = mapped_bytes(c, param);

    if (!c->window_base && n_bytes > 0 &&
        mmap(c->weights.base + offset, n_bytes, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_POPULATE, c->weights.fd,
             (off_t)offset) == MAP_FAILED)
        return call_fatal(&c->call, -errno, "mapping a gathered parameter: %s%s", strerror(errno),
                          errno == ENOMEM ? " (vm.max_map_count limits the number of mappings)" : "");
    return 0;
}

static int host_memory_hide(struct zerod *c, uint32_t param)
{
    size_t n_bytes = mapped_bytes(c, param);

    if (!c->window_base && n_bytes > 0)
        (void)mmap(c->weights.base + weights_offset(c, param), n_bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return 0;
}

/* ---- write window -------------------------------------------------------------------------------------- */

/* Rank 0 writes into the daemon's memory. The other ranks write into private copies that nothing reads. */
static int host_memory_open_window(struct zerod *c, int fd)
{
    bool shared = c->rank == 0 && fd >= 0;
    void *base = weights_visible(c);

    if (mmap(base, c->weights.n_bytes, PROT_READ | PROT_WRITE, (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED,
             fd >= 0 ? fd : c->weights.fd, 0) == MAP_FAILED)
        return call_fatal(&c->call, -errno, "mapping the write window: %s", strerror(errno));
    c->window_base = base;
    (void)failpoint("window-mapped");
    return 0;
}

static void host_memory_close_window(struct zerod *c)
{
    void *base = weights_visible(c);

    if (weights_is_stage3(c)) {
        (void)mmap(base, c->weights.n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        for (uint32_t p = 0; p < c->layout->n_params; p++)
            if (c->gathered[p] > 0)
                (void)host_memory_show(c, p, 0);
    } else if (c->private_weights) {
        (void)mmap(base, c->weights.n_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        (void)host_memory_refresh(c);
    } else {
        (void)mmap(base, c->weights.n_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, c->weights.fd, 0);
    }
}

/* ---- end ----------------------------------------------------------------------------------------------- */

static void host_memory_stop(struct zerod *c)
{
}

static void host_memory_deinit(struct zerod *c)
{
    if (c->private_weights)
        munmap(steal_ptr(c->private_weights), c->weights.n_bytes);
    mapping_deinit(&c->weights);
    mapping_deinit(&c->ring);
}

static const struct gradient_ops gradient_ops = {
    .put = host_memory_put,
    .mark = host_memory_mark,
    .alloc = host_memory_alloc,
    .release = host_memory_release,
    .scratch = host_memory_scratch,
    .read_duplicate = host_memory_read_duplicate,
    .wait_for_pushes = host_memory_wait_for_nothing,
};

static const struct weight_ops weight_ops = {
    .weight = host_memory_weight,
    .refresh = host_memory_refresh,
    .await = host_memory_await,
    .count_fitting = host_memory_count_fitting,
    .check_gathered = host_memory_check_gathered,
    .show = host_memory_show,
    .finish = host_memory_wait_for_nothing,
    .hide = host_memory_hide,
    .open_window = host_memory_open_window,
    .close_window = host_memory_close_window,
};

const struct memory_ops host_memory = {
    .gradients = &gradient_ops,
    .weights = &weight_ops,
    .check_gpu = host_memory_check_gpu,
    .map = host_memory_map,
    .why = host_memory_why,
    .check = host_memory_check,
    .wait = host_memory_wait_for_nothing,
    .share = host_memory_share,
    .stop = host_memory_stop,
    .deinit = host_memory_deinit,
};

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gradients and weights in memory of GPUs. The ring is the daemon's device memory. A push copies on the caller's
 * stream, and has a point that the engine waits for (core/wire/progress.h). Weights are this rank's part of the
 * daemon's device memory. In stage 3 weights are in memory of this process (range.h). A gathered parameter is copied to
 * it from the daemon's pool, and again after each change of weights.
 *
 * A write window is host memory, apart from the weights.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/lib/handle.h"
#include "client/lib/memory/cuda.h"
#include "client/lib/memory/memory.h"
#include "client/lib/memory/range.h"
#include "client/lib/api-weights.h"
#include "core/base/base.h"
#include "core/wire/progress.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

enum { POOL_ALIGN_BYTES = 256 }; /* alignment of parameters in the pool, from the protocol */

/* Makes a failure of the driver fatal, because a slot may be half written. Return: r. */
static int failed(struct zerod *c, int r)
{
    return call_fatal(&c->call, r, "the GPU: %s", cuda_why(c->cuda));
}

/* ---- forming ------------------------------------------------------------------------------------------- */

static int cuda_memory_check_gpu(struct zerod *c, const struct reply_formed *formed)
{
    int r = formed->n_gpu_bytes == CUDA_GPU_BYTES ? cuda_check_gpu(c->cuda, formed->gpu) : 0;

    return r == 0 ? 0 : call_fatal(&c->call, r, "%s", cuda_why(c->cuda));
}

static int map_device(struct zerod *c, struct mapping *mapping, int fd, size_t n_bytes, bool read_only)
{
    uint8_t *base;
    int r = cuda_map(c->cuda, fd, n_bytes, read_only, &base);

    if (r == 0)
        *mapping = (struct mapping){.base = base, .n_bytes = n_bytes, .fd = -1};
    return r;
}

static void unmap_device(struct zerod *c, struct mapping *mapping)
{
    if (mapping->base)
        cuda_unmap(c->cuda, mapping->base, mapping->n_bytes);
    *mapping = MAPPING_NULL;
}

static int map_pool(struct zerod *c, int fd, size_t n_bytes)
{
    /* Gathered weights stay below this bound, except for rounding, because fp32 is the widest dtype of a weight. */
    uint64_t bound_bytes = MIN(c->welcome.stage3_max_live_elems, UINT64_MAX / 16) * sizeof(float);
    int r = map_device(c, &c->pool, fd, n_bytes, true);

    return r == 0 ? range_new(&c->range, c->cuda, c->layout, bound_bytes) : r;
}

static int map_progress(struct zerod *c, int fd, size_t n_bytes)
{
    int r = mapping_init(&c->progress, fd, n_bytes, PROT_READ | PROT_WRITE);

    if (r == 0 && n_bytes < sizeof(struct progress_page))
        return -EPROTO;
    return r == 0 ? cuda_open_progress(c->cuda, (struct progress_page *)(void *)c->progress.base) : r;
}

static int cuda_memory_map(struct zerod *c, const struct wire_segment *segment, int fd)
{
    if (segment->cuda && segment->kind == WIRE_SEGMENT_RING && !c->ring.base)
        return map_device(c, &c->ring, fd, segment->n_bytes, false);
    if (segment->cuda && segment->kind == WIRE_SEGMENT_WEIGHTS && !c->weights.base)
        return map_device(c, &c->weights, fd, segment->n_bytes, true);
    if (segment->cuda && segment->kind == WIRE_SEGMENT_POOL && weights_is_stage3(c) && !c->pool.base)
        return map_pool(c, fd, segment->n_bytes);
    if (!segment->cuda && segment->kind == WIRE_SEGMENT_PROGRESS && !c->progress.base)
        return map_progress(c, fd, segment->n_bytes);
    close(fd);
    return -EPROTO;
}

static const char *cuda_memory_why(const struct zerod *c, int r)
{
    return r == -EIO ? cuda_why(c->cuda) : strerror(-r);
}

/* Stage 3: checks that the pool has room for each parameter alone. */
static int check_pool(struct zerod *c)
{
    if (!c->range)
        return call_fatal(&c->call, -EPROTO, "zerod sent no pool for gathered weights");
    for (uint32_t p = 0; p < c->layout->n_params; p++)
        if (round_up(weights_param_bytes(c, p), POOL_ALIGN_BYTES) > c->pool.n_bytes)
            return call_fatal(&c->call, -EPROTO, "zerod's pool of %zu bytes has no room for parameter %u, of %zu bytes",
                              c->pool.n_bytes, p, weights_param_bytes(c, p));
    return 0;
}

static int cuda_memory_check(struct zerod *c, const struct reply_formed *formed)
{
    if (!c->ring.base || c->ring.n_bytes < formed->ring_bytes)
        return call_fatal(&c->call, -EPROTO, "zerod sent no ring");
    if (!c->progress.base)
        return call_fatal(&c->call, -EPROTO, "zerod sent no page for the GPU's progress");
    c->last_point = formed->first_point;
    if (weights_is_stage3(c))
        return check_pool(c);
    if (!c->weights.base && c->layout->weight_bytes > 0)
        return call_fatal(&c->call, -EPROTO, "zerod sent no weights");
    return 0;
}

/* ---- the caller's stream ------------------------------------------------------------------------------- */

static int cuda_memory_wait(struct zerod *c)
{
    int r = cuda_wait(c->cuda, c->stream);

    return r == 0 ? 0 : failed(c, r);
}

static int cuda_memory_wait_for_pushes(struct zerod *c)
{
    return cuda_wait_for_points(c->cuda) == 0 ? 0 : failed(c, -EIO);
}

/* ---- gradients ----------------------------------------------------------------------------------------- */

static int cuda_memory_put(struct zerod *c, uint8_t *to, const void *from, size_t n_bytes)
{
    int r = n_bytes > 0 ? cuda_copy(c->cuda, to, from, n_bytes, c->stream) : 0;

    return r == 0 ? 0 : failed(c, r);
}

/* Makes the stream write a point when the copy is done. */
static int cuda_memory_mark(struct zerod *c, struct request_push *push)
{
    int r = cuda_say_point(c->cuda, c->stream, c->last_point + 1);

    if (r != 0)
        return failed(c, r);
    push->point = ++c->last_point;
    return 0;
}

static uint8_t *cuda_memory_alloc(struct zerod *c, uint32_t param)
{
    uint8_t *memory;
    int r = cuda_alloc(c->cuda, handle_gradient_bytes(c, param), &memory);

    if (r == 0)
        return memory;
    failed(c, r);
    return NULL;
}

static void cuda_memory_release(struct zerod *c, uint8_t *memory)
{
    cuda_release(c->cuda, memory);
}

/* Waits before a scratch that is too small is freed, because work on the stream may still read the old bytes. */
static void *cuda_memory_scratch(struct zerod *c, uint32_t param)
{
    size_t n_bytes = handle_gradient_bytes(c, param) + 1;
    int r = 0;

    if (n_bytes <= c->n_device_scratch_bytes)
        return c->device_scratch;
    r = cuda_wait(c->cuda, c->stream);
    if (r == 0) {
        cuda_release(c->cuda, c->device_scratch);
        c->n_device_scratch_bytes = 0;
        r = cuda_alloc(c->cuda, n_bytes, &c->device_scratch);
    }
    if (r != 0) {
        failed(c, r);
        return NULL;
    }
    c->n_device_scratch_bytes = n_bytes;
    return c->device_scratch;
}

static const void *cuda_memory_read_duplicate(struct zerod *c, uint32_t param, const void *data)
{
    const void *from = data ? data : c->device_scratch;
    void *copy = from ? host_memory_scratch(c, param) : NULL;
    int r;

    if (!copy)
        return NULL;
    r = cuda_copy_to_host(c->cuda, copy, from, handle_gradient_bytes(c, param), c->stream);
    if (r != 0)
        failed(c, r);
    return r == 0 ? copy : NULL;
}

/* ---- weights ------------------------------------------------------------------------------------------- */

static const uint8_t *cuda_memory_weight(const struct zerod *c, uint32_t param)
{
    return c->range ? range_place(c->range, param) : c->weights.base + weights_offset(c, param);
}

static void cuda_memory_share(const struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes)
{
}

static size_t cuda_memory_count_fitting(const struct zerod *c, const unsigned *params, size_t n_params)
{
    size_t n_bytes = 0, n = 0;

    while (n < MIN(n_params, (size_t)WIRE_MAX_POOL_OFFSETS)) {
        n_bytes += round_up(weights_param_bytes(c, params[n]), POOL_ALIGN_BYTES);
        if (n_bytes > c->pool.n_bytes)
            break;
        n++;
    }
    return n; /* at least 1, because check_pool() has checked each parameter */
}

static int cuda_memory_check_gathered(struct zerod *c, const unsigned *params, size_t n, const struct reply_done *done)
{
    if (done->n_pool_offsets != n)
        return call_fatal(&c->call, -EPROTO, "zerod gathered %zu parameters, and said of %zu where they are", n,
                          done->n_pool_offsets);
    for (size_t i = 0; i < n; i++) {
        size_t n_bytes = weights_param_bytes(c, params[i]);
        uint64_t offset = done->pool_offsets[i];

        if (n_bytes > 0 && (offset > c->pool.n_bytes || n_bytes > c->pool.n_bytes - offset))
            return call_fatal(&c->call, -EPROTO,
                              "zerod gathered parameter %u, of %zu bytes, to byte %llu of a pool of %zu bytes",
                              params[i], n_bytes, (unsigned long long)offset, c->pool.n_bytes);
    }
    return 0;
}

static int cuda_memory_show(struct zerod *c, uint32_t param, uint64_t pool_offset)
{
    int r = range_show(c->range, param, c->pool.base + pool_offset);

    if (r == -ENOMEM)
        return call_fail(&c->call, r,
                         "zerod_gather: the GPU has no %zu bytes left for parameter %u, beside %llu bytes of other "
                         "gathered weights: release some of them, or lower stage3_max_live_parameters, which bounds "
                         "what is held",
                         weights_param_bytes(c, param), param, (unsigned long long)range_held_bytes(c->range));
    return r == 0 ? 0 : failed(c, r);
}

/* Return: 0; the call's earlier fatal error; or this one. */
static int cuda_memory_finish(struct zerod *c)
{
    int r = range_finish(c->range);

    return r == 0 || c->call.fatal ? c->call.fatal : failed(c, r);
}

static int cuda_memory_hide(struct zerod *c, uint32_t param)
{
    int r = range_hide(c->range, param, c->stream);

    return r == 0 ? 0 : failed(c, r);
}

/* ---- write window -------------------------------------------------------------------------------------- */

/*
 * Rank 0 writes into the daemon's memory, which holds the weights. The other ranks write into copies that nothing
 * reads. In stage 3 they have no weights to copy, so the daemon sends them a descriptor of its memory too.
 */
static int cuda_memory_open_window(struct zerod *c, int fd)
{
    bool writer = c->rank == 0, copies = !writer && !c->range;
    size_t n_weight_bytes = c->range ? c->layout->range_bytes : c->weights.n_bytes;
    size_t n_bytes = MAX(n_weight_bytes, (size_t)sysconf(_SC_PAGESIZE));
    int flags = writer ? MAP_SHARED : copies ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_PRIVATE;
    void *base;
    int r = 0;

    if (!copies && fd < 0)
        return call_fatal(&c->call, -EPROTO, "zerod sent no write window");
    base = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, flags, copies ? -1 : fd, 0);
    if (base == MAP_FAILED)
        return call_fatal(&c->call, -errno, "mapping the write window: %s", strerror(errno));
    c->window = (struct mapping){.base = base, .n_bytes = n_bytes, .fd = -1};
    c->window_base = base;
    if (copies)
        r = cuda_copy_to_host(c->cuda, base, c->weights.base, c->weights.n_bytes, c->stream);
    return r == 0 ? 0 : failed(c, r);
}

static void cuda_memory_close_window(struct zerod *c)
{
    mapping_deinit(&c->window);
}

/* ---- end ----------------------------------------------------------------------------------------------- */

/*
 * Drops, without freeing it, all memory that only the driver can free, because a forked child must not call the driver.
 */
static void forget(struct zerod *c)
{
    c->ring = c->weights = c->pool = MAPPING_NULL;
    range_forget(steal_ptr(c->range));
    c->device_scratch = NULL;
    for (uint32_t i = 0; c->places && i < c->layout->n_params; i++)
        c->places[i] = NULL;
    c->cuda = NULL;
}

/* Waits for the stream, because its work must not use unmapped memory. */
static void cuda_memory_stop(struct zerod *c)
{
    if (!*c->call.mine) {
        forget(c);
        return;
    }
    (void)cuda_wait(c->cuda, c->stream);
    (void)cuda_wait_for_points(c->cuda); /* for pushes on other streams */
}

static void cuda_memory_deinit(struct zerod *c)
{
    range_free(steal_ptr(c->range));
    mapping_deinit(&c->window);
    unmap_device(c, &c->pool);
    unmap_device(c, &c->weights);
    cuda_release(c->cuda, steal_ptr(c->device_scratch));
    unmap_device(c, &c->ring);
    cuda_free(steal_ptr(c->cuda));
    mapping_deinit(&c->progress);
}

/* Waits for all weights, because the published page does not cover GPUs. */
static int cuda_memory_await(struct zerod *c, const unsigned *params, size_t n_params)
{
    return overlap_settle(c);
}

static const struct gradient_ops gradient_ops = {
    .put = cuda_memory_put,
    .mark = cuda_memory_mark,
    .alloc = cuda_memory_alloc,
    .release = cuda_memory_release,
    .scratch = cuda_memory_scratch,
    .read_duplicate = cuda_memory_read_duplicate,
    .wait_for_pushes = cuda_memory_wait_for_pushes,
};

static const struct weight_ops weight_ops = {
    .weight = cuda_memory_weight,
    .refresh = weights_gather_anew,
    .await = cuda_memory_await,
    .count_fitting = cuda_memory_count_fitting,
    .check_gathered = cuda_memory_check_gathered,
    .show = cuda_memory_show,
    .finish = cuda_memory_finish,
    .hide = cuda_memory_hide,
    .open_window = cuda_memory_open_window,
    .close_window = cuda_memory_close_window,
};

static const struct memory_ops cuda_memory = {
    .gradients = &gradient_ops,
    .weights = &weight_ops,
    .check_gpu = cuda_memory_check_gpu,
    .map = cuda_memory_map,
    .why = cuda_memory_why,
    .check = cuda_memory_check,
    .wait = cuda_memory_wait,
    .share = cuda_memory_share,
    .stop = cuda_memory_stop,
    .deinit = cuda_memory_deinit,
};

int cuda_memory_open(struct zerod *c)
{
    struct cuda *cuda;
    int r = cuda_open(&cuda, c->is_torch);

    if (r != 0) {
        call_fail(&c->call, r, "%s", cuda_why(cuda));
        cuda_free(cuda);
        return r;
    }
    c->cuda = cuda;
    c->memory = &cuda_memory;
    return 0;
}

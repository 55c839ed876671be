/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Weights as the caller sees them: at addresses that never change.
 *
 *   shared     the daemon's weight segment, read-only
 *   private    a copy of it, refreshed before zerod_step() returns
 *   stage 3    a reserved range; a parameter's pool pages are mapped at its place
 *              while it is gathered, PROT_NONE otherwise. A prefetch maps nothing: a read
 *              of what is not gathered stays an error, whatever was prefetched
 *
 *   on a GPU   the daemon's piece of device memory for this rank; in stage 3 memory of this process's own (range.h),
 *              into which a gathered parameter is copied from the daemon's pool, and again whenever weights change
 *
 * In a write window other memory is mapped over the same addresses; of a job on GPUs it is host memory elsewhere.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/lib/handle.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"

enum { POOL_ALIGN_BYTES = 256 }; /* of what lies in the pool, as the protocol has it */

static bool is_stage3(const struct zerod *c)
{
    return c->welcome.stage == 3;
}

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

uint64_t weights_offset(const struct zerod *c, uint32_t param)
{
    const struct layout_param *p = &c->layout->params[param];

    return is_stage3(c) ? p->range_offset_bytes : p->weight_offset_bytes;
}

/* What the caller sees: start of all weights. */
static uint8_t *visible(const struct zerod *c)
{
    return c->private_weights ? c->private_weights : c->weights.base;
}

static int reserve_range(struct zerod *c, int fd, size_t n_bytes)
{
    void *base = mmap(NULL, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    c->weights.fd = fd;
    if (base == MAP_FAILED)
        return -errno;
    c->weights.base = base;
    c->weights.n_bytes = n_bytes;
    return 0;
}

int weights_init(struct zerod *c, enum wire_segment_kind kind, int fd, size_t n_bytes)
{
    void *copy;
    int r =
        kind == WIRE_SEGMENT_POOL ? reserve_range(c, fd, n_bytes) : mapping_init(&c->weights, fd, n_bytes, PROT_READ);

    if (r < 0)
        return r;
    if (c->welcome.private_weights && !is_stage3(c)) {
        copy = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy == MAP_FAILED)
            return -errno;
        c->private_weights = copy;
    }
    if (!(c->flags & ZEROD_NO_SIGSEGV_HANDLER))
        fault_register(c, visible(c), n_bytes);
    return 0;
}

static size_t param_bytes(const struct zerod *c, uint32_t param)
{
    return c->layout->params[param].n_elems * dtype_size(c->layout->params[param].dtype);
}

int weights_init_pool(struct zerod *c, int fd, size_t n_bytes)
{
    /* fp32 is the widest type that a weight may have: what lives at a time is under the bound, but for rounding. */
    uint64_t bound_bytes = MIN(c->welcome.stage3_max_live_elems, UINT64_MAX / 16) * sizeof(float);
    int r = mapping_init_device(&c->pool, c->cuda, fd, n_bytes, true);

    return r == 0 ? range_new(&c->range, c->cuda, c->layout, bound_bytes) : r;
}

int weights_check(struct zerod *c)
{
    if (!c->cuda || !is_stage3(c))
        return c->weights.base || c->layout->weight_bytes == 0 ? 0
                                                               : client_fatal(c, -EPROTO, "zerod sent no weights");
    if (!c->range)
        return client_fatal(c, -EPROTO, "zerod sent no pool for gathered weights");
    for (uint32_t p = 0; p < c->layout->n_params; p++)
        if (round_up(param_bytes(c, p), POOL_ALIGN_BYTES) > c->pool.n_bytes)
            return client_fatal(c, -EPROTO, "zerod's pool of %zu bytes has no room for parameter %u, of %zu bytes",
                                c->pool.n_bytes, p, param_bytes(c, p));
    return 0;
}

void weights_forget_device(struct zerod *c)
{
    c->weights = c->pool = MAPPING_NULL;
    range_forget(steal_ptr(c->range));
}

void weights_deinit(struct zerod *c)
{
    if (c->private_weights)
        munmap(c->private_weights, c->weights.n_bytes);
    c->private_weights = NULL;
    range_free(steal_ptr(c->range));
    mapping_deinit(&c->pool);
    mapping_deinit(&c->window);
    mapping_deinit(&c->weights);
}

static void refresh_private(struct zerod *c)
{
    if (!c->private_weights)
        return;
    (void)mprotect(c->private_weights, c->weights.n_bytes, PROT_READ | PROT_WRITE);
    memcpy(c->private_weights, c->weights.base, c->weights.n_bytes);
    (void)mprotect(c->private_weights, c->weights.n_bytes, PROT_READ);
    atomic_store(&c->written, 0);
}

const void *zerod_weight(struct zerod *c, unsigned param)
{
    if (client_check(c, true) != 0)
        return NULL;
    if (param >= c->layout->n_params) {
        client_fail(c, -EINVAL, "zerod_weight: no parameter %u", param);
        return NULL;
    }
    return c->range ? range_place(c->range, param) : visible(c) + weights_offset(c, param);
}

int zerod_memory(struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes)
{
    int r = client_check(c, true);
    bool is_host = !c->cuda && !(which == ZEROD_MEMORY_WEIGHTS && is_stage3(c));

    if (r == 0 && which != ZEROD_MEMORY_RING && which != ZEROD_MEMORY_WEIGHTS)
        r = client_fail(c, -EINVAL, "zerod_memory: there is no memory %d", (int)which);
    if (r != 0)
        return r;
    *base = NULL;
    *n_bytes = 0;
    if (is_host && which == ZEROD_MEMORY_RING) {
        *base = c->ring.base;
        *n_bytes = c->ring_bytes;
    } else if (is_host) {
        *base = visible(c);
        *n_bytes = c->weights.n_bytes;
    }
    return 0;
}

/* ---- stage 3 ------------------------------------------------------------------------------------------- */

static size_t mapped_bytes(const struct zerod *c, uint32_t param)
{
    return round_up(param_bytes(c, param), page_bytes());
}

static int show_on_host(struct zerod *c, uint32_t param)
{
    uint64_t offset = weights_offset(c, param);
    size_t n_bytes = mapped_bytes(c, param);

    if (n_bytes > 0 && mmap(c->weights.base + offset, n_bytes, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                            c->weights.fd, (off_t)offset) == MAP_FAILED)
        return client_fatal(c, -errno, "mapping a gathered parameter: %s%s", strerror(errno),
                            errno == ENOMEM ? " (vm.max_map_count limits the number of mappings)" : "");
    return 0;
}

/* From the pool, where its copy begins; range_finish() waits for it. Return: 0, -ENOMEM, which is not fatal, or fatal.
 */
static int show_on_gpu(struct zerod *c, uint32_t param, uint64_t pool_offset)
{
    int r = range_show(c->range, param, c->pool.base + pool_offset);

    if (r == -ENOMEM)
        return client_fail(c, r,
                           "zerod_gather: the GPU has no %zu bytes left for parameter %u, beside %llu bytes of other "
                           "gathered weights: release some of them, or lower stage3_max_live_parameters, which bounds "
                           "what is held",
                           param_bytes(c, param), param, (unsigned long long)range_held_bytes(c->range));
    return r == 0 ? 0 : client_cuda_failed(c, r);
}

static void hide_on_host(struct zerod *c, uint32_t param)
{
    size_t n_bytes = mapped_bytes(c, param);

    if (n_bytes > 0)
        (void)mmap(c->weights.base + weights_offset(c, param), n_bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* A window in host memory shows all, at the same addresses, and closing it what is gathered. */
static bool is_shown_by_window(const struct zerod *c)
{
    return c->in_window && !c->cuda;
}

/* One gather less. Return: 0 or fatal. */
static int let_go(struct zerod *c, uint32_t param)
{
    int r = 0;

    if (--c->gathered[param] > 0 || is_shown_by_window(c))
        return 0;
    if (c->range)
        r = range_hide(c->range, param, c->stream);
    else
        hide_on_host(c, param);
    return r == 0 ? 0 : client_cuda_failed(c, r);
}

static int check_ids(struct zerod *c, const char *call, const unsigned *params, size_t n_params)
{
    int r = client_check(c, true);

    for (size_t i = 0; r == 0 && i < n_params; i++)
        if (params[i] >= c->layout->n_params)
            r = client_fail(c, -EINVAL, "%s: no parameter %u", call, params[i]);
    return r;
}

/* Ids travel in packets: any number of them in several. Return: how many of those that are left go into the next. */
static size_t part_of(size_t n_left)
{
    enum { IDS_PER_PACKET = 16384 }; /* at most 5 bytes each */

    return MIN(n_left, (size_t)IDS_PER_PACKET);
}

/* The same for what is gathered: on a GPU no more than the pool has room for. */
static size_t gathered_at_once(const struct zerod *c, const unsigned *params, size_t n_left)
{
    size_t n_bytes = 0, n = 0;

    if (!c->range)
        return part_of(n_left);
    while (n < MIN(n_left, (size_t)WIRE_MAX_POOL_OFFSETS)) {
        n_bytes += round_up(param_bytes(c, params[n]), POOL_ALIGN_BYTES);
        if (n_bytes > c->pool.n_bytes)
            break;
        n++;
    }
    return n; /* weights_check() has seen that there is room for each */
}

static int send_release(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = 0;

    for (size_t i = 0, n; r == 0 && i < n_params; i += n) {
        n = part_of(n_params - i);
        r = MIN(client_send(
                    c, &(struct request){.type = REQUEST_RELEASE, .release = {.params = params + i, .n_params = n}}),
                0);
    }
    return r;
}

/* Return: as client_call(). *offsets live until the next message; NULL in host memory. */
static int ask_for(struct zerod *c, const unsigned *params, size_t n, const uint64_t **offsets)
{
    struct reply reply;
    int r = client_call(c, &(struct request){.type = REQUEST_GATHER, .gather = {.params = params, .n_params = n}},
                        REPLY_DONE, &reply);

    *offsets = NULL;
    if (r != 0 || !c->range)
        return r;
    *offsets = reply.done.pool_offsets;
    if (reply.done.n_pool_offsets != n)
        return client_fatal(c, -EPROTO, "zerod gathered %zu parameters, and said of %zu where they are", n,
                            reply.done.n_pool_offsets);
    for (size_t i = 0; i < n; i++)
        if (param_bytes(c, params[i]) > 0 &&
            ((*offsets)[i] > c->pool.n_bytes || param_bytes(c, params[i]) > c->pool.n_bytes - (*offsets)[i]))
            return client_fatal(
                c, -EPROTO, "zerod gathered parameter %u, of %zu bytes, to byte %llu of a pool of %zu bytes", params[i],
                param_bytes(c, params[i]), (unsigned long long)(*offsets)[i], c->pool.n_bytes);
    return 0;
}

/* Takes back what zerod_gather() could not finish: the first n_shown are counted, the first n_asked the daemon's. */
static int undo_gather(struct zerod *c, const unsigned *params, size_t n_shown, size_t n_asked, int status)
{
    int r = 0;

    if (c->fatal)
        return status;
    for (size_t i = 0; r == 0 && i < n_shown; i++)
        r = let_go(c, params[i]);
    if (r == 0)
        r = send_release(c, params, n_asked);
    return r == 0 ? status : r;
}

/* Counts and shows what one request has brought. *n_shown: how many of it, when not all. Return: as show_on_gpu(). */
static int show_all(struct zerod *c, const unsigned *params, size_t n, const uint64_t *offsets, size_t *n_shown)
{
    int finished, r = 0;

    for (*n_shown = 0; *n_shown < n; ++*n_shown) {
        uint32_t param = params[*n_shown];

        if (c->gathered[param] == 0 && c->range)
            r = show_on_gpu(c, param, offsets[*n_shown]);
        else if (c->gathered[param] == 0 && !is_shown_by_window(c))
            r = show_on_host(c, param);
        if (r != 0)
            break;
        c->gathered[param]++;
    }
    /* Also what was begun before it failed: the next message gives the pool to others. */
    finished = c->range ? range_finish(c->range) : 0;
    return finished == 0 || c->fatal ? r : client_cuda_failed(c, finished);
}

int zerod_gather(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = check_ids(c, "zerod_gather", params, n_params);

    if (r != 0 || !is_stage3(c))
        return r;
    for (size_t i = 0, n, n_shown; i < n_params; i += n) {
        const uint64_t *offsets;

        n = gathered_at_once(c, params + i, n_params - i);
        r = ask_for(c, params + i, n, &offsets);
        if (r != 0)
            return undo_gather(c, params, i, i, r);
        r = show_all(c, params + i, n, offsets, &n_shown);
        if (r != 0)
            return undo_gather(c, params, i + n_shown, i + n, r);
    }
    return 0;
}

int zerod_release(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = check_ids(c, "zerod_release", params, n_params);

    if (r != 0 || !is_stage3(c))
        return r;
    /* Hidden first: the daemon may give the pages to another parameter as soon as it knows. */
    for (size_t i = 0; i < n_params; i++) {
        if (c->gathered[params[i]] == 0) {
            (void)send_release(c, params, i);
            return client_fail(c, -EINVAL, "zerod_release: parameter %u is not gathered, or not as often", params[i]);
        }
        r = let_go(c, params[i]);
        if (r != 0)
            return r;
    }
    return send_release(c, params, n_params);
}

/* Asks once more for what is gathered, and gives that back: it stays gathered as often as it was. */
static int show_again(struct zerod *c, const unsigned *params, size_t n)
{
    const uint64_t *offsets;
    int r;

    /* Another rank may have aborted the step that begins now: here nothing of it was done. */
    do
        r = ask_for(c, params, n, &offsets);
    while (r == ZEROD_ABORTED && !c->fatal);
    if (r == ZEROD_REFUSED && !c->fatal)
        r = client_fatal(c, -EPROTO, "zerod refused to show the new weights of parameters that are gathered");
    if (r != 0)
        return c->fatal;
    for (size_t i = 0; r == 0 && i < n; i++)
        r = range_show(c->range, params[i], c->pool.base + offsets[i]);
    if (r == 0)
        r = range_finish(c->range);
    return r == 0 ? send_release(c, params, n) : client_cuda_failed(c, r);
}

static bool has_gathered(const struct zerod *c)
{
    for (uint32_t p = 0; p < c->layout->n_params; p++)
        if (c->gathered[p] > 0)
            return true;
    return false;
}

static int refresh_gathered(struct zerod *c)
{
    _cleanup_free_ unsigned *held = calloc(c->layout->n_params, sizeof(*held));
    size_t n_held = 0;
    int r = 0;

    if (!held)
        return client_fatal(c, -ENOMEM, "out of memory");
    for (uint32_t p = 0; p < c->layout->n_params; p++)
        if (c->gathered[p] > 0)
            held[n_held++] = p;
    for (size_t i = 0, n; r == 0 && i < n_held; i += n) {
        n = gathered_at_once(c, held + i, n_held - i);
        r = show_again(c, held + i, n);
    }
    return r;
}

int weights_refresh(struct zerod *c)
{
    refresh_private(c);
    return c->range && has_gathered(c) ? refresh_gathered(c) : 0;
}

int zerod_prefetch(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = check_ids(c, "zerod_prefetch", params, n_params);

    if (r != 0 || !is_stage3(c) || n_params == 0)
        return r;
    /* One packet: the daemon would drop a second one while it loads the first. */
    return MIN(client_send(c, &(struct request){.type = REQUEST_PREFETCH,
                                                .prefetch = {.params = params, .n_params = part_of(n_params)}}),
               0);
}

/* ---- write windows ------------------------------------------------------------------------------------- */

/*
 * Rank 0 writes into the daemon's memory, which has the weights; the others into a copy that nobody reads. In stage 3
 * they have no weights to make it of, but get a descriptor of that memory, too.
 */
static int map_host_window(struct zerod *c, int fd)
{
    bool writer = c->rank == 0, copies = !writer && !c->range;
    size_t n_bytes = c->range ? c->layout->range_bytes : c->weights.n_bytes;
    int flags = writer ? MAP_SHARED : copies ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_PRIVATE;
    void *base;
    int r = 0;

    if (!copies && fd < 0)
        return client_fatal(c, -EPROTO, "zerod sent no write window");
    base = mmap(NULL, MAX(n_bytes, page_bytes()), PROT_READ | PROT_WRITE, flags, copies ? -1 : fd, 0);
    if (base == MAP_FAILED)
        return client_fatal(c, -errno, "mapping the write window: %s", strerror(errno));
    c->window = (struct mapping){.base = base, .n_bytes = MAX(n_bytes, page_bytes()), .fd = -1};
    c->in_window = true;
    if (copies)
        r = cuda_copy_to_host(c->cuda, base, c->weights.base, c->weights.n_bytes, c->stream);
    return r == 0 ? 0 : client_cuda_failed(c, r);
}

static int map_window(struct zerod *c, int fd)
{
    bool writer = c->rank == 0;
    int source = fd >= 0 ? fd : c->weights.fd;
    int flags = (writer && fd >= 0 ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED;

    if (mmap(visible(c), c->weights.n_bytes, PROT_READ | PROT_WRITE, flags, source, 0) == MAP_FAILED)
        return client_fatal(c, -errno, "mapping the write window: %s", strerror(errno));
    c->in_window = true;
    (void)failpoint("window-mapped");
    return 0;
}

void weights_close_window(struct zerod *c)
{
    void *base = visible(c);

    if (!c->in_window)
        return;
    c->in_window = false;
    if (c->cuda) {
        mapping_deinit(&c->window);
    } else if (is_stage3(c)) {
        (void)mmap(base, c->weights.n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        for (uint32_t p = 0; p < c->layout->n_params; p++)
            if (c->gathered[p] > 0)
                (void)show_on_host(c, p);
    } else if (c->private_weights) {
        (void)mmap(base, c->weights.n_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        refresh_private(c);
    } else {
        (void)mmap(base, c->weights.n_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, c->weights.fd, 0);
    }
}

int zerod_write_begin(struct zerod *c)
{
    struct reply reply;
    int r = client_check(c, true);
    _cleanup_close_ int fd = -1;

    if (r == 0 && c->in_window)
        r = client_fail(c, -EBUSY, "a write window is open already");
    if (r == 0)
        r = zerod_check_weights(c, NULL); /* the window's memory takes the place of what was written */
    if (r == 0)
        r = client_wait_for_stream(c);
    if (r == 0)
        r = client_call(c, &(struct request){.type = REQUEST_WRITE_BEGIN}, REPLY_DONE, &reply);
    if (r != 0)
        return r;
    c->position = reply.done.position;
    if (reply.done.n_segments > 0)
        fd = steal_fd(&c->in.fds[0]);
    if (fd < 0 && c->rank == 0 && c->layout->weight_bytes > 0)
        return client_fatal(c, -EPROTO, "zerod sent no write window");
    return c->cuda ? map_host_window(c, fd) : map_window(c, fd);
}

static int end_window(struct zerod *c, bool forget)
{
    struct reply reply;
    int r = client_check(c, true);

    if (r == 0)
        r = client_wait_for_stream(c);
    if (r == 0)
        r = client_call(c, &(struct request){.type = REQUEST_WRITE_END, .write_end = {.forget = forget}}, REPLY_DONE,
                        &reply);
    if (r != 0)
        return r;
    c->position = reply.done.position;
    weights_close_window(c);
    return forget ? 0 : weights_refresh(c);
}

int zerod_write_end(struct zerod *c)
{
    return end_window(c, false);
}

int zerod_write_forget(struct zerod *c)
{
    return end_window(c, true);
}

void *zerod_window(struct zerod *c, unsigned param)
{
    if (client_check(c, true) != 0 || !c->in_window || param >= c->layout->n_params)
        return NULL;
    return (c->cuda ? c->window.base : visible(c)) + weights_offset(c, param);
}

/* ---- state --------------------------------------------------------------------------------------------- */

int zerod_read_state(struct zerod *c, unsigned param, enum zerod_state which, void *dst)
{
    struct mapping mapping = MAPPING_NULL;
    struct reply reply;
    uint64_t n_elems;
    int r = client_check(c, true);

    if (r == 0 && (which > ZEROD_STEP_COUNT || (which != ZEROD_GRAD_NORM && param >= c->layout->n_params)))
        r = client_fail(c, -EINVAL, "zerod_read_state: no parameter %u of %u, or no such state", param,
                        c->layout->n_params);
    if (r == 0)
        r = client_call(c,
                        &(struct request){.type = REQUEST_READ_STATE,
                                          .read_state = {.param = param, .kind = (enum wire_state_kind)which}},
                        REPLY_STATE_IS, &reply);
    if (r != 0)
        return r;
    if (which == ZEROD_GRAD_NORM) {
        memcpy(dst, &reply.state_is.norm, sizeof(double));
        return 0;
    }
    if (which == ZEROD_STEP_COUNT) {
        memcpy(dst, &(double){(double)reply.state_is.count}, sizeof(double));
        return 0;
    }
    n_elems = c->layout->params[param].n_elems;
    if (n_elems == 0)
        return 0;
    if (reply.state_is.n_segments == 0 || reply.state_is.n_elems != n_elems ||
        reply.state_is.segments[0].n_bytes < n_elems * sizeof(float))
        return client_fatal(c, -EPROTO, "zerod answered a question for state without all of it");
    r = mapping_init(&mapping, steal_fd(&c->in.fds[0]), reply.state_is.segments[0].n_bytes, PROT_READ);
    if (r < 0)
        return client_fail(c, r, "mapping the state of a parameter: %s", strerror(-r));
    memcpy(dst, mapping.base, n_elems * sizeof(float));
    mapping_deinit(&mapping);
    return 0;
}

/* Return: 0, or why it is no state that could be written. *count is set when it is one. */
static int check_state(struct zerod *c, unsigned param, enum zerod_state which, const void *src, uint64_t *count)
{
    double n = 0;

    if (param >= c->layout->n_params || which > ZEROD_STEP_COUNT || which == ZEROD_GRAD_NORM)
        return client_fail(c, -EINVAL, "zerod_write_state: no parameter %u of %u, or no state that can be written",
                           param, c->layout->n_params);
    if (which == ZEROD_STEP_COUNT)
        memcpy(&n, src, sizeof(n));
    if (!(n >= 0 && n <= 0x1p53) || n != (double)(uint64_t)n)
        return client_fail(c, -EINVAL, "zerod_write_state: a step count of %g; expected a whole number from 0 to 2^53",
                           n);
    *count = (uint64_t)n;
    return 0;
}

/* Whatever becomes of it, the daemon may count what lies there: without the values only the end is left. */
static int fill_place(struct zerod *c, const struct reply_state_is *place, uint64_t n_elems, const void *src)
{
    size_t n_bytes = n_elems * sizeof(float);
    _cleanup_close_ int fd = steal_fd(&c->in.fds[0]);
    void *base;

    if (place->n_elems != n_elems || place->offset_bytes > place->segments[0].n_bytes ||
        n_bytes > place->segments[0].n_bytes - place->offset_bytes)
        return client_fatal(c, -EPROTO, "zerod gave a place for other state than was asked for");
    base = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)place->offset_bytes);
    if (base == MAP_FAILED)
        return client_fatal(c, -errno, "mapping the state to be written: %s", strerror(errno));
    (void)failpoint("state-mapped");
    memcpy(base, src, n_bytes);
    munmap(base, n_bytes);
    return 0;
}

int zerod_write_state(struct zerod *c, unsigned param, enum zerod_state which, const void *src)
{
    struct reply reply;
    uint64_t count = 0;
    int r = client_check(c, true);

    if (r == 0)
        r = check_state(c, param, which, src, &count);
    if (r == 0)
        r = client_call(
            c,
            &(struct request){.type = REQUEST_WRITE_STATE,
                              .write_state = {.param = param, .kind = (enum wire_state_kind)which, .count = count}},
            REPLY_STATE_IS, &reply);
    if (r != 0)
        return r;
    if (which == ZEROD_STEP_COUNT || c->layout->params[param].n_elems == 0 || c->rank != 0)
        return 0; /* there is nothing to fill */
    if (reply.state_is.n_segments == 0)
        return client_fatal(c, -EPROTO, "zerod gave no place for the state to be written");
    return fill_place(c, &reply.state_is, c->layout->params[param].n_elems, src);
}

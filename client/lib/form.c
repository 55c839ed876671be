/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/lib/handle.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"

/* ---- mappings ------------------------------------------------------------------------------------------ */

int mapping_init(struct mapping *mapping, int fd, size_t n_bytes, int protection)
{
    void *base = mmap(NULL, n_bytes, protection, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED) {
        int r = -errno;

        close(fd);
        return r;
    }
    *mapping = (struct mapping){.base = base, .n_bytes = n_bytes, .fd = fd};
    return 0;
}

int mapping_init_device(struct mapping *mapping, struct cuda *cuda, int fd, size_t n_bytes, bool read_only)
{
    uint8_t *base;
    int r = cuda_map(cuda, fd, n_bytes, read_only, &base);

    if (r == 0)
        *mapping = (struct mapping){.base = base, .n_bytes = n_bytes, .fd = -1, .cuda = cuda};
    return r;
}

void mapping_deinit(struct mapping *mapping)
{
    if (mapping->base && mapping->cuda)
        cuda_unmap(mapping->cuda, mapping->base, mapping->n_bytes);
    else if (mapping->base)
        munmap(mapping->base, mapping->n_bytes);
    if (mapping->fd >= 0)
        close(mapping->fd);
    *mapping = MAPPING_NULL;
}

/* ---- declaring ----------------------------------------------------------------------------------------- */

static int declare_one(struct zerod *c, const struct zerod_param *param, size_t index)
{
    struct layout_decl decl = {
        .name = param->name,
        .name_len = param->name_len ? param->name_len
                    : param->name   ? strlen(param->name)
                                    : 0,
        .dtype = (enum dtype)param->dtype,
        .grad_dtype = (enum dtype)param->grad_dtype,
        .group = param->group,
        .trainable = param->trainable,
        .n_dims = param->ndim,
        .shape = param->shape,
    };
    const void **inits;
    int r;

    if (!param->name || decl.name_len == 0 || decl.name_len > WIRE_MAX_NAME_BYTES)
        return client_fail(c, -EINVAL, "parameter %zu: a name has 1 to %d bytes", index, WIRE_MAX_NAME_BYTES);
    if (param->ndim > LAYOUT_MAX_DIMS || (param->ndim > 0 && !param->shape) || param->dtype > ZEROD_F16 ||
        param->grad_dtype > ZEROD_F16 || param->group >= WIRE_MAX_GROUPS)
        return client_fail(c, -EINVAL, "parameter %zu (%.*s): dimensions, dtype or group out of range", index,
                           (int)MIN(decl.name_len, (size_t)80), param->name);
    inits = realloc(c->inits, (c->manifest.n + 1) * sizeof(*inits));
    if (!inits)
        return client_fail(c, -ENOMEM, "out of memory");
    c->inits = inits;
    r = manifest_add(&c->manifest, &decl);
    if (r != 0)
        return client_fail(c, r < 0 ? r : -E2BIG, r < 0 ? "out of memory" : "too many parameters");
    inits[c->manifest.n - 1] = param->init;
    return 0;
}

int zerod_declare(struct zerod *c, const struct zerod_param *params, size_t n_params)
{
    int r = client_check(c, false);

    if (r == 0 && c->formed)
        r = client_fail(c, -EBUSY, "zerod_declare after zerod_form");
    for (size_t i = 0; r == 0 && i < n_params; i++)
        r = declare_one(c, &params[i], c->manifest.n);
    return r;
}

/* The manifest in as many packets as it takes. */
static int send_manifest(struct zerod *c)
{
    uint32_t first = 0;

    while (first < c->manifest.n) {
        size_t n_bytes = 64;
        uint32_t n = 0;
        int r;

        while (first + n < c->manifest.n) {
            size_t more = wire_param_bytes(&c->manifest.decls[first + n]);

            if (n > 0 && n_bytes + more > FRAME_MAX_BYTES)
                break;
            n_bytes += more;
            n++;
        }
        r = client_send(c, &(struct request){.type = REQUEST_DECLARE,
                                             .declare = {.params = &c->manifest.decls[first], .n_params = n}});
        if (r != 0)
            return r;
        first += n;
    }
    return 0;
}

/* ---- forming ------------------------------------------------------------------------------------------- */

static int map_device_segment(struct zerod *c, const struct wire_segment *segment, int fd)
{
    int r = -EPROTO;

    if (c->cuda && segment->kind == WIRE_SEGMENT_RING && !c->ring.base)
        r = mapping_init_device(&c->ring, c->cuda, fd, segment->n_bytes, false);
    else if (c->cuda && segment->kind == WIRE_SEGMENT_WEIGHTS && !c->weights.base)
        r = mapping_init_device(&c->weights, c->cuda, fd, segment->n_bytes, true);
    else if (c->cuda && segment->kind == WIRE_SEGMENT_POOL && c->welcome.stage == 3 && !c->pool.base)
        r = weights_init_pool(c, fd, segment->n_bytes);
    else
        close(fd);
    return r;
}

static int map_segment(struct zerod *c, const struct wire_segment *segment, int fd)
{
    int r;

    if (segment->cuda)
        return map_device_segment(c, segment, fd);
    switch (segment->kind) {
    case WIRE_SEGMENT_RING:
        r = mapping_init(&c->ring, fd, segment->n_bytes, PROT_READ | PROT_WRITE);
        /* Faults in the middle of a backward cost more than touching a bounded ring once, now. */
        if (r == 0)
            (void)madvise(c->ring.base, c->ring.n_bytes, MADV_POPULATE_WRITE);
        return r;
    case WIRE_SEGMENT_OVERFLOW:
        return mapping_init(&c->overflow, fd, segment->n_bytes, PROT_READ | PROT_WRITE);
    case WIRE_SEGMENT_CREDIT:
        return mapping_init(&c->credit, fd, segment->n_bytes, PROT_READ);
    case WIRE_SEGMENT_WEIGHTS:
    case WIRE_SEGMENT_POOL:
        return weights_init(c, segment->kind, fd, segment->n_bytes);
    default:
        close(fd);
        return 0;
    }
}

/* Behind a ring in device memory nothing is told of pushes that wait to be sent: none does. */
static uint64_t ring_needs(const struct zerod *c, const struct reply_formed *formed)
{
    return c->cuda ? formed->ring_bytes : held_pushes_offset(formed->ring_bytes) + sizeof(struct held_pushes);
}

static int map_segments(struct zerod *c, const struct reply_formed *formed)
{
    for (size_t i = 0; i < formed->n_segments; i++) {
        int fd = i < c->in.n_fds ? steal_fd(&c->in.fds[i]) : -1;
        int r = fd < 0 ? -EPROTO : map_segment(c, &formed->segments[i], fd);

        if (r < 0)
            return client_fatal(c, r, "mapping zerod's memory (%llu bytes): %s",
                                (unsigned long long)formed->segments[i].n_bytes,
                                r == -EIO && c->cuda ? cuda_why(c->cuda) : strerror(-r));
    }
    if (!c->ring.base || !c->credit.base || !c->ring.cuda != !c->cuda || c->ring.n_bytes < ring_needs(c, formed))
        return client_fatal(c, -EPROTO, "zerod sent no ring");
    if (!c->cuda)
        (void)madvise(c->ring.base, c->ring.n_bytes, MADV_POPULATE_WRITE);
    return 0;
}

static int take_blob(struct zerod *c, bool has_blob, const uint8_t *blob, size_t n_bytes)
{
    free(steal_ptr(c->blob));
    c->n_blob_bytes = 0;
    if (!has_blob)
        return 0;
    c->blob = malloc(MAX(n_bytes, (size_t)1));
    if (!c->blob)
        return client_fatal(c, -ENOMEM, "out of memory");
    if (n_bytes > 0)
        memcpy(c->blob, blob, n_bytes);
    c->n_blob_bytes = n_bytes;
    return 0;
}

static int check_gpu(struct zerod *c, const struct reply_formed *formed)
{
    int r = 0;

    if (c->cuda && formed->n_gpu_bytes == CUDA_GPU_BYTES)
        r = cuda_check_gpu(c->cuda, formed->gpu);
    return r == 0 ? 0 : client_fatal(c, r, "%s", cuda_why(c->cuda));
}

static int take_formed(struct zerod *c, const struct reply_formed *formed)
{
    uint32_t bad;
    int r =
        layout_new(&c->layout, c->manifest.decls, c->manifest.n, c->welcome.world_size, c->welcome.bucket_elems, &bad);

    if (r != 0)
        return client_fatal(c, r < 0 ? r : -EPROTO, "the layout cannot be computed");
    c->position = formed->position;
    c->last = formed->position;
    c->ring_bytes = formed->ring_bytes;
    c->loss_scale = formed->loss_scale;
    r = take_blob(c, formed->has_blob, formed->blob, formed->n_blob_bytes);
    if (r == 0)
        r = check_gpu(c, formed);
    if (r == 0)
        r = map_segments(c, formed);
    if (r == 0)
        r = weights_check(c);
    return r < 0 ? r : push_init(c, formed->n_tickets);
}

static int copy_init(struct zerod *c, const void *from, size_t n_bytes)
{
    int r;

    if (!c->cuda) {
        memcpy(c->ring.base, from, n_bytes);
        return 0;
    }
    r = cuda_copy(c->cuda, c->ring.base, from, n_bytes, c->stream);
    if (r == 0)
        r = cuda_wait(c->cuda, c->stream);
    return r == 0 ? 0 : client_cuda_failed(c, r);
}

/* One parameter's initial weights, in pieces that fit into the ring. */
static int send_init(struct zerod *c, uint32_t param)
{
    const struct layout_param *p = &c->layout->params[param];
    size_t size = dtype_size(p->dtype);
    uint64_t most = c->ring_bytes / size;

    for (uint64_t start = 0; start < p->n_elems; start += most) {
        uint64_t n = MIN(most, p->n_elems - start);
        struct reply reply;
        int r;

        r = copy_init(c, (const uint8_t *)c->inits[param] + start * size, n * size);
        if (r != 0)
            return r;
        r = client_call(
            c, &(struct request){.type = REQUEST_INIT, .init = {.param = param, .start_elem = start, .n_elems = n}},
            REPLY_DONE, &reply);
        if (r != 0)
            return r;
    }
    return 0;
}

static int get_ready(struct zerod *c, bool init_wanted)
{
    struct reply reply;
    int r = 0;

    for (uint32_t p = 0; r == 0 && init_wanted && p < c->layout->n_params; p++)
        if (c->inits[p])
            r = send_init(c, p);
    if (r == 0)
        r = client_call(c, &(struct request){.type = REQUEST_READY}, REPLY_DONE, &reply);
    if (r != 0 || !reply.done.rewound)
        return r;
    /* The step was aborted between the two answers: begin where it begins. */
    c->position = reply.done.position;
    return take_blob(c, reply.done.has_blob, reply.done.blob, reply.done.n_blob_bytes);
}

/* Before anything is declared, so that the other ranks do not wait for one that cannot come. */
static int open_cuda(struct zerod *c)
{
    struct cuda *cuda;
    int r;

    if (!c->welcome.cuda || c->cuda)
        return 0;
    r = cuda_open(&cuda, c->is_torch);
    if (r != 0) {
        client_fail(c, r, "%s", cuda_why(cuda));
        cuda_free(cuda);
        return r;
    }
    c->cuda = cuda;
    return 0;
}

static int get_formed(struct zerod *c)
{
    struct reply reply;
    int r = open_cuda(c);

    if (r != 0)
        return r;
    r = send_manifest(c);
    if (r >= 0 && !c->fatal)
        r = client_call(c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = c->manifest.n}}, REPLY_FORMED,
                        &reply);
    if (r != 0)
        return r;
    c->resumed = reply.formed.resumed;
    c->init_wanted = reply.formed.init_wanted;
    r = take_formed(c, &reply.formed);
    (void)failpoint("formed");
    return r;
}

int zerod_form(struct zerod *c)
{
    int r = client_check(c, false);

    if (r == 0 && c->formed)
        r = client_fail(c, -EBUSY, "zerod_form was called already");
    if (r == 0 && !c->layout) /* else weights did not come in time, the last time */
        r = get_formed(c);
    if (r == 0)
        r = get_ready(c, c->init_wanted);
    if (r != 0)
        return r;
    c->formed = true;
    free(steal_ptr(c->inits));
    r = weights_refresh(c);
    if (r != 0)
        return r;
    return c->resumed ? ZEROD_RESUMED : 0;
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Zerod assumes that the writes of a killed process's kernel are in memory in the order of the kernel's fences. An
 * update with undo slots depends on that in each of its blocks, so it tests the assumption: a process updates memory
 * with a descriptor and is killed. The interrupted update is launched again, as the next engine does. The bits must be
 * those of equally many undisturbed updates.
 */

#include "bench/gpu.h"
#include "core/base/base.h"
#include "kernels/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    N_KILLS = 8,
    N_QUEUED = 64,
    N_BEGUN = 4, /* updates that end before the process is killed */
    N_ARRAYS = 3,
    ELEM_BYTES = 16, /* p, m, v, acc */
    UNDO_SLOT_BYTES = N_ARRAYS * sizeof(float) * DEVICE_UNDO_GROUP_ELEMS,
};

/* An update. Its arrays and marks are in memory that outlives the killed process. */
struct updates {
    uint64_t n_elems;
    uint32_t n_chunks, n_blocks;
    uint64_t *marks;
    float *arrays; /* p, m and v, one after another */
    struct device_update_list list;
};

static uint64_t elems_of(const struct gpu_options *options)
{
    return options->n_bytes / ELEM_BYTES / DEVICE_CHUNK_ELEMS * DEVICE_CHUNK_ELEMS;
}

static uint32_t blocks_of(const struct gpu_options *options)
{
    return device_update_blocks(device_chunks_count(elems_of(options)));
}

/* Return: the bytes of arrays, slots and marks together. */
static size_t piece_bytes(const struct gpu_options *options)
{
    uint32_t n_blocks = blocks_of(options);

    return gpu_round(elems_of(options) * ELEM_BYTES + device_undo_bytes(n_blocks, UNDO_SLOT_BYTES) +
                     n_blocks * sizeof(uint64_t));
}

/* Makes small numbers, almost all of them different. */
static float *make_values(uint64_t n, uint32_t x)
{
    float *values = calloc(n, sizeof(*values));

    if (!values)
        gpu_fail("no memory");
    for (uint64_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        values[i] = (float)(int32_t)(x ^ x >> 15) * 0x1p-36f;
    }
    return values;
}

/* Makes the update of all elements as one range. begins: whether the arrays get their first values. */
static struct updates make_updates(const struct gpu_options *options, uint8_t *at, bool begins, cudaStream_t stream)
{
    static const struct hyper hyper = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    struct updates all = {.n_elems = elems_of(options), .n_blocks = blocks_of(options), .arrays = (float *)(void *)at};
    float *acc = all.arrays + N_ARRAYS * all.n_elems;
    float *slots = acc + all.n_elems;
    struct device_update_range range = {.p = all.arrays,
                                        .m = all.arrays + all.n_elems,
                                        .v = all.arrays + 2 * all.n_elems,
                                        .acc = acc,
                                        .n_elems = all.n_elems,
                                        .w16_dtype = DTYPE_F32};
    _cleanup_free_ struct device_chunk *chunks = NULL;
    struct update_scalars scalars;

    all.n_chunks = device_chunks_count(all.n_elems);
    all.marks = (uint64_t *)(void *)((uint8_t *)slots + device_undo_bytes(all.n_blocks, UNDO_SLOT_BYTES));
    chunks = calloc(all.n_chunks, sizeof(*chunks));
    if (!chunks)
        gpu_fail("no memory");
    device_chunks_fill(chunks, 0, all.n_elems);
    update_scalars_compute(OPTIMIZER_ADAMW, &hyper, 1, 10, &scalars);
    all.list = (struct device_update_list){
        .ranges = gpu_upload(&range, sizeof(range), stream),
        .chunks = gpu_upload(chunks, all.n_chunks * sizeof(*chunks), stream),
        .scalars = gpu_upload(&scalars, sizeof(scalars), stream),
        .n_chunks = all.n_chunks,
        .optimizer = OPTIMIZER_ADAMW,
        .undo = {.marks = all.marks, .slots = slots, .tag = 1, .slot_bytes = UNDO_SLOT_BYTES}};
    if (begins) {
        _cleanup_free_ float *p = make_values(all.n_elems, 1), *gradient = make_values(all.n_elems, 2);
        float *p_there = gpu_upload(p, all.n_elems * sizeof(*p), stream);
        float *gradient_there = gpu_upload(gradient, all.n_elems * sizeof(*p), stream);

        gpu_check(cudaMemsetAsync(at, 0, piece_bytes(options), stream), "cudaMemsetAsync");
        gpu_check(cudaMemcpyAsync(range.p, p_there, all.n_elems * sizeof(*p), cudaMemcpyDeviceToDevice, stream),
                  "cudaMemcpyAsync");
        gpu_check(cudaMemcpyAsync(acc, gradient_there, all.n_elems * sizeof(*p), cudaMemcpyDeviceToDevice, stream),
                  "cudaMemcpyAsync");
        gpu_finish(stream);
        gpu_check(cudaFree(p_there), "cudaFree");
        gpu_check(cudaFree(gradient_there), "cudaFree");
    }
    return all;
}

static void update(struct updates *all, bool plainly, uint64_t step, cudaStream_t stream)
{
    struct device_update_list list = all->list;

    list.undo.tag = step;
    if (plainly)
        list.undo.marks = NULL;
    gpu_check((cudaError_t)device_update(stream, &list), "device_update");
}

/* Updates until the process is killed, with updates always queued. */
void gpu_updater(const struct gpu_options *options)
{
    size_t n_bytes = piece_bytes(options);
    int fd = gpu_piece_make(n_bytes);
    struct gpu_piece piece = gpu_piece_map(fd, n_bytes);
    cudaStream_t stream = gpu_stream();
    struct updates all;

    gpu_check((cudaError_t)device_load_kernels(), "device_load_kernels");
    all = make_updates(options, piece.at, true, stream);
    gpu_say(STDIN_FILENO, "memory", 6, fd);
    for (uint64_t step = 1;; step++) {
        update(&all, false, step, stream);
        if (step == N_BEGUN)
            gpu_finish(stream);
        if (step == N_BEGUN)
            gpu_say(STDIN_FILENO, "begun", 5, -1);
        if (step % N_QUEUED == 0)
            gpu_finish(stream);
    }
}

/* Finds the interrupted update by its marks. Adds the blocks that had begun and not ended to *n_torn. */
static uint64_t find_step(const struct updates *all, cudaStream_t stream, unsigned *n_torn)
{
    uint64_t *marks = gpu_alloc_host(all->n_blocks * sizeof(*marks)), step = 0;

    gpu_check(cudaMemcpyAsync(marks, all->marks, all->n_blocks * sizeof(*marks), cudaMemcpyDeviceToHost, stream),
              "cudaMemcpyAsync");
    gpu_finish(stream);
    for (uint32_t i = 0; i < all->n_blocks; i++) {
        step = MAX(step, device_undo_tag(marks[i]));
        *n_torn += !device_undo_is_done(marks[i]);
    }
    gpu_check(cudaHostUnregister(marks), "cudaHostUnregister");
    return step;
}

/* Return: the number of elements of p, m and v that differ. */
static uint64_t count_different(const struct updates *all, const struct updates *expected, cudaStream_t stream)
{
    uint64_t n_elems = N_ARRAYS * all->n_elems, n = 0;
    uint32_t *is = gpu_alloc_host(n_elems * sizeof(*is)), *should = gpu_alloc_host(n_elems * sizeof(*should));

    gpu_check(cudaMemcpyAsync(is, all->arrays, n_elems * sizeof(*is), cudaMemcpyDeviceToHost, stream),
              "cudaMemcpyAsync");
    gpu_check(cudaMemcpyAsync(should, expected->arrays, n_elems * sizeof(*is), cudaMemcpyDeviceToHost, stream),
              "cudaMemcpyAsync");
    gpu_finish(stream);
    for (uint64_t i = 0; i < n_elems; i++)
        n += is[i] != should[i];
    gpu_check(cudaHostUnregister(is), "cudaHostUnregister");
    gpu_check(cudaHostUnregister(should), "cudaHostUnregister");
    return n;
}

static void sleep_us(unsigned us)
{
    struct timespec t = {0, us * 1000L};

    nanosleep(&t, NULL);
}

/* Kills one process, a little later than the process before it. Return: the number of elements that differ. */
static uint64_t kill_one(const struct gpu_options *options, unsigned number, cudaStream_t stream, unsigned *n_torn)
{
    size_t n_bytes = piece_bytes(options);
    char bytes[32];
    const char *const argv[] = {"updater", "--bytes", bytes, NULL};
    struct updates all, expected;
    struct gpu_child updater;
    struct gpu_piece piece;
    uint64_t step, n;
    uint8_t *own;
    int fd;

    snprintf(bytes, sizeof(bytes), "%zu", options->n_bytes);
    gpu_child_start(&updater, argv, NULL);
    gpu_hear(updater.fd, &updater.heard);
    fd = steal_fd(&updater.heard.fds[0]);
    gpu_hear(updater.fd, &updater.heard);
    sleep_us(1000 + 637 * number);
    gpu_child_kill(&updater);

    piece = gpu_piece_map(fd, n_bytes);
    close(fd);
    all = make_updates(options, piece.at, false, stream);
    step = find_step(&all, stream, n_torn);
    update(&all, false, step, stream);
    own = gpu_alloc(n_bytes);
    expected = make_updates(options, own, true, stream);
    for (uint64_t i = 1; i <= step; i++)
        update(&expected, true, i, stream);
    gpu_finish(stream);
    n = count_different(&all, &expected, stream);
    gpu_piece_unmap(&piece);
    gpu_check(cudaFree(own), "cudaFree");
    return n;
}

void gpu_updates(const struct gpu_options *options)
{
    cudaStream_t stream = gpu_stream();
    unsigned n_torn = 0;
    uint64_t n = 0;

    gpu_check((cudaError_t)device_load_kernels(), "device_load_kernels");
    for (unsigned i = 0; i < N_KILLS; i++)
        n += kill_one(options, i, stream, &n_torn);
    printf("blocks that were at work when they were killed\t%u of %u\n", n_torn, N_KILLS * blocks_of(options));
    printf("the update goes on\t%s (%" PRIu64 " elements differ)\n", n == 0 ? "to the same bits" : "WRONG", n);
}

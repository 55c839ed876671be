/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Measures the kernels, and copies of equally many bytes. Each line of standard input names a kernel. The program makes
 * fresh gradients, runs that kernel once, and prints the time until the host knows that the kernel has ended. "sample"
 * prints some elements, which shows that the kernels compute something.
 */

#include "bench/gpu.h"
#include "core/base/base.h"
#include "core/layout/layout.h"
#include "kernels/convert.h"
#include "kernels/device.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    POOL_ELEMS = 1 << 20, /* random gradients; each iteration begins at another one, and wraps around */
    POOL_STEP = 8 * 1013, /* elements between the beginnings of two iterations; a multiple of 16 bytes */
    /* 4 x the bytes that AdamW moves per parameter: four arrays read, three written. */
    COPY_FP32 = 4 * 28,
    COPY_BF16 = 4 * 30, /* also writes the 16-bit weight */
    COPY_BF16_MOMENTS = 4 * 20,
    COPY_8BIT = 4 * 12 + 17,    /* a group of 64 elements of a moment has 68 bytes */
    COPY_8BIT_24 = 4 * 10 + 17, /* a master and its weight: 3 bytes are read, 3 written */
    LOSS_SCALE = 2,
};

/* The arrays of all parameters. */
struct arrays {
    float *p;
    void *m, *v; /* in the types of `moments` */
    float *acc;
    uint16_t *w16;
    int8_t *lower; /* NULL: masters are fp32 */
    struct moments_type moments;
};

/* The results of a reduction, for each range. One copy is on the device, one in registered memory for the host. */
struct results {
    struct exact_sum *squares;
    struct position_sum *sums;
    struct device_finding *findings, *overflows;
    uint8_t *all;
    size_t n_bytes;
};

struct bench {
    const struct gpu_options *options;
    cudaStream_t stream;
    uint64_t iteration, n_steps;
    uint32_t n_ranges, n_chunks;
    struct arrays own, imported;
    struct gpu_child owner;
    uint16_t *pool, *grads; /* bf16 */
    uint8_t *copy_from, *copy_to;
    struct device_update_undo undo;
    struct device_chunk *chunks;
    struct device_convert_list widen, widen_imported;
    struct device_update_list update, update16, update_imported, update_bf16_moments, update_8bit, update_8bit_24;
    struct device_reduce_list reduce;
    struct results results, results_there;
    struct update_scalars *scalars, *scalars_there; /* one per parameter */
};

static const struct hyper hyper = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};

/* ---- memory --------------------------------------------------------------------------------------------- */

static size_t arrays_bytes(const struct bench *bench)
{
    return gpu_round((4 * sizeof(float) + sizeof(uint16_t)) * bench->options->n_elems);
}

/* Divides the memory into arrays, one after another. */
static struct arrays arrays_at(const struct bench *bench, void *memory)
{
    float *at = memory;
    uint64_t n = bench->options->n_elems;

    gpu_check(cudaMemsetAsync(at, 0, arrays_bytes(bench), bench->stream), "cudaMemsetAsync");
    return (struct arrays){
        .p = at, .m = at + n, .v = at + 2 * n, .acc = at + 3 * n, .w16 = (uint16_t *)(void *)(at + 4 * n)};
}

static void *zeroes(const struct bench *bench, size_t n_bytes)
{
    void *at = gpu_alloc(n_bytes);

    gpu_check(cudaMemsetAsync(at, 0, n_bytes, bench->stream), "cudaMemsetAsync");
    return at;
}

/* Adds moments of their own type, and lower bytes of masters, to the arrays of `own`. */
static struct arrays narrow_arrays(const struct bench *bench, struct moments_type moments, bool master24)
{
    struct arrays arrays = bench->own;

    arrays.moments = moments;
    arrays.m = zeroes(bench, dtype_bytes(moments.dtype, bench->options->n_elems));
    arrays.v = zeroes(bench, dtype_bytes(moments.dtype, bench->options->n_elems));
    arrays.lower = master24 ? zeroes(bench, bench->options->n_elems) : NULL;
    return arrays;
}

static void copy(struct bench *bench, void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind)
{
    gpu_check(cudaMemcpyAsync(to, from, n_bytes, kind, bench->stream), "cudaMemcpyAsync");
}

/* Fills the array with the pool from `from` on, repeatedly. */
static void fill(struct bench *bench, void *at, size_t n_elems, const uint16_t *from)
{
    uint16_t *to = at;

    for (size_t i = 0; i < n_elems; i += POOL_ELEMS)
        copy(bench, to + i, from, MIN(n_elems - i, (size_t)POOL_ELEMS) * sizeof(*from), cudaMemcpyDeviceToDevice);
}

/* Fills the pool with small numbers of both signs. */
static void make_pool(struct bench *bench)
{
    _cleanup_free_ uint16_t *pool = calloc(2 * POOL_ELEMS, sizeof(*pool));
    uint32_t x = 1;

    if (!pool)
        gpu_fail("no memory");
    for (size_t i = 0; i < POOL_ELEMS; i++) {
        x = x * 1664525u + 1013904223u;
        pool[i] = pool[i + POOL_ELEMS] = bf16_from_f32((float)(int32_t)(x ^ x >> 15) * 0x1p-40f);
    }
    bench->pool = gpu_upload(pool, 2 * POOL_ELEMS * sizeof(*pool), bench->stream);
}

static void make_memory(struct bench *bench)
{
    size_t n_bytes = arrays_bytes(bench), copy_bytes = COPY_BF16 / 8 * bench->options->n_elems;
    char number[32];
    const char *const owner[] = {"owner", "--bytes", number, NULL};
    struct gpu_piece piece;

    bench->own = arrays_at(bench, gpu_alloc(n_bytes));
    snprintf(number, sizeof(number), "%zu", n_bytes);
    gpu_child_start(&bench->owner, owner, NULL);
    piece = gpu_piece_map(gpu_hear(bench->owner.fd, &bench->owner.heard)->fds[0], n_bytes);
    bench->imported = arrays_at(bench, piece.at);

    make_pool(bench);
    bench->grads = gpu_alloc(bench->options->n_elems * sizeof(*bench->grads));
    bench->copy_from = gpu_alloc(copy_bytes);
    bench->copy_to = gpu_alloc(copy_bytes);
    fill(bench, bench->copy_from, copy_bytes / sizeof(*bench->pool), bench->pool);
    bench->scalars = gpu_alloc_host(bench->options->n_params * sizeof(*bench->scalars));
    bench->scalars_there = gpu_alloc(bench->options->n_params * sizeof(*bench->scalars));
}

static struct results results_at(const struct bench *bench, uint8_t *all)
{
    struct results results = {.all = all};
    size_t n = bench->n_ranges;

    results.squares = (struct exact_sum *)(void *)all;
    results.sums = (struct position_sum *)(void *)(results.squares + n);
    results.findings = (struct device_finding *)(void *)(results.sums + n);
    results.overflows = results.findings + n;
    results.n_bytes = (size_t)((uint8_t *)(results.overflows + n) - all);
    return results;
}

/* ---- lists ---------------------------------------------------------------------------------------------- */

/* A range has the length of the engine's ranges: a chunk of the layout, within one parameter. */
struct range {
    uint64_t begin, n_elems;
    uint64_t start; /* the range's first element, counted from the parameter's start */
    uint32_t param;
};

static struct range *make_ranges(struct bench *bench)
{
    uint64_t each = bench->options->n_elems / bench->options->n_params;
    uint32_t per_param = (uint32_t)div_round_up(each, CHUNK_ELEMS);
    struct range *ranges = calloc((size_t)per_param * bench->options->n_params, sizeof(*ranges));

    if (!ranges)
        gpu_fail("no memory");
    bench->n_ranges = per_param * bench->options->n_params;
    for (uint32_t i = 0; i < bench->n_ranges; i++) {
        uint32_t param = i / per_param;
        uint64_t start = (uint64_t)(i % per_param) * CHUNK_ELEMS;

        ranges[i] = (struct range){
            .begin = param * each + start, .n_elems = MIN(each - start, CHUNK_ELEMS), .start = start, .param = param};
    }
    return ranges;
}

static void make_chunks(struct bench *bench, const struct range *ranges)
{
    _cleanup_free_ struct device_chunk *chunks = NULL;

    for (uint32_t i = 0; i < bench->n_ranges; i++)
        bench->n_chunks += device_chunks_count(ranges[i].n_elems);
    chunks = calloc(bench->n_chunks, sizeof(*chunks));
    if (!chunks)
        gpu_fail("no memory");
    for (uint32_t i = 0, at = 0; i < bench->n_ranges; i++)
        at += device_chunks_fill(chunks + at, i, ranges[i].n_elems);
    bench->chunks = gpu_upload(chunks, bench->n_chunks * sizeof(*chunks), bench->stream);
}

static struct device_update_list make_update(struct bench *bench, const struct range *ranges,
                                             const struct arrays *arrays, bool writes_w16)
{
    _cleanup_free_ struct device_update_range *list = calloc(bench->n_ranges, sizeof(*list));

    if (!list)
        gpu_fail("no memory");
    for (uint32_t i = 0; i < bench->n_ranges; i++) {
        size_t moment_at = dtype_bytes(arrays->moments.dtype, ranges[i].begin);

        list[i] = (struct device_update_range){.p = arrays->lower ? NULL : arrays->p + ranges[i].begin,
                                               .m = (uint8_t *)arrays->m + moment_at,
                                               .v = (uint8_t *)arrays->v + moment_at,
                                               .acc = arrays->acc + ranges[i].begin,
                                               .w16 = writes_w16 ? arrays->w16 + ranges[i].begin : NULL,
                                               .lower = arrays->lower ? arrays->lower + ranges[i].begin : NULL,
                                               .n_elems = ranges[i].n_elems,
                                               .start_elem = ranges[i].start,
                                               .scalars = ranges[i].param,
                                               .w16_dtype = writes_w16 ? DTYPE_BF16 : DTYPE_F32};
    }
    return (struct device_update_list){.ranges = gpu_upload(list, bench->n_ranges * sizeof(*list), bench->stream),
                                       .chunks = bench->chunks,
                                       .scalars = bench->scalars_there,
                                       .n_chunks = bench->n_chunks,
                                       .optimizer = OPTIMIZER_ADAMW,
                                       .master24 = arrays->lower != NULL,
                                       .moments = arrays->moments};
}

/* Converts gradients to fp32 in the accumulators, and does nothing else. */
static struct device_convert_list make_widen(struct bench *bench, const struct range *ranges,
                                             const struct arrays *arrays)
{
    _cleanup_free_ struct device_convert_range *list = calloc(bench->n_ranges, sizeof(*list));

    if (!list)
        gpu_fail("no memory");
    for (uint32_t i = 0; i < bench->n_ranges; i++)
        list[i] = (struct device_convert_range){.dst = arrays->acc + ranges[i].begin,
                                                .src = bench->grads + ranges[i].begin,
                                                .n_elems = ranges[i].n_elems,
                                                .dtype = DTYPE_BF16};
    return (struct device_convert_list){.ranges = gpu_upload(list, bench->n_ranges * sizeof(*list), bench->stream),
                                        .chunks = bench->chunks,
                                        .n_chunks = bench->n_chunks};
}

/* Adds one rank's gradients to the accumulators, as the first micro-batch of a step. */
static void make_reduce(struct bench *bench, const struct range *ranges)
{
    _cleanup_free_ struct device_reduce_range *list = calloc(bench->n_ranges, sizeof(*list));
    _cleanup_free_ struct device_leaf *leaves = calloc(bench->n_ranges, sizeof(*leaves));
    _cleanup_free_ struct device_chunk *chunks = calloc(bench->n_chunks, sizeof(*chunks));

    if (!list || !leaves || !chunks)
        gpu_fail("no memory");
    for (uint32_t i = 0; i < bench->n_ranges; i++) {
        const void *data = bench->grads + ranges[i].begin;

        list[i] = (struct device_reduce_range){.out = bench->own.acc + ranges[i].begin,
                                               .n_elems = ranges[i].n_elems,
                                               .start_elem = ranges[i].start,
                                               .first_leaf = i,
                                               .n_leaves = 1,
                                               .dtype = DTYPE_BF16,
                                               .first = 1};
        device_leaves_fill(&leaves[i], &data, 1, NULL);
    }
    bench->results_there = results_at(bench, NULL);
    bench->results = results_at(bench, gpu_alloc_host(bench->results_there.n_bytes));
    bench->results_there = results_at(bench, gpu_alloc(bench->results.n_bytes));
    bench->reduce =
        (struct device_reduce_list){.ranges = gpu_upload(list, bench->n_ranges * sizeof(*list), bench->stream),
                                    .leaves = gpu_upload(leaves, bench->n_ranges * sizeof(*leaves), bench->stream),
                                    .squares = bench->results_there.squares,
                                    .sums = bench->results_there.sums,
                                    .findings = bench->results_there.findings,
                                    .overflows = bench->results_there.overflows,
                                    .n_ranges = bench->n_ranges,
                                    .n_leaves = bench->n_ranges};
    device_reduce_fill(&bench->reduce, list, leaves, chunks);
    bench->reduce.chunks = gpu_upload(chunks, bench->n_chunks * sizeof(*chunks), bench->stream);
}

static void make_undo(struct bench *bench)
{
    uint32_t n_blocks = device_update_blocks(bench->n_chunks), slot_bytes = device_undo_slot_bytes(2, DTYPE_F32);
    size_t n_bytes = n_blocks * sizeof(uint64_t);

    bench->undo = (struct device_update_undo){.marks = gpu_alloc(n_bytes),
                                              .slots = gpu_alloc(device_undo_bytes(n_blocks, slot_bytes)),
                                              .slot_bytes = slot_bytes};
    gpu_check(cudaMemsetAsync(bench->undo.marks, 0, n_bytes, bench->stream), "cudaMemsetAsync");
}

static void make_lists(struct bench *bench)
{
    const struct moments_type bf16 = {DTYPE_BF16, true}, eight = {DTYPE_SIGNED8, true};
    const struct arrays bf16_moments = narrow_arrays(bench, bf16, false);
    const struct arrays eight_bits = narrow_arrays(bench, eight, false), narrowest = narrow_arrays(bench, eight, true);
    _cleanup_free_ struct range *ranges = make_ranges(bench);

    make_chunks(bench, ranges);
    bench->widen = make_widen(bench, ranges, &bench->own);
    bench->widen_imported = make_widen(bench, ranges, &bench->imported);
    bench->update = make_update(bench, ranges, &bench->own, false);
    bench->update16 = make_update(bench, ranges, &bench->own, true);
    bench->update_imported = make_update(bench, ranges, &bench->imported, false);
    bench->update_bf16_moments = make_update(bench, ranges, &bf16_moments, false);
    bench->update_8bit = make_update(bench, ranges, &eight_bits, false);
    bench->update_8bit_24 = make_update(bench, ranges, &narrowest, true);
    make_reduce(bench, ranges);
    make_undo(bench);
}

/* ---- the timed work ------------------------------------------------------------------------------------- */

static void launch(int r, const char *kernel)
{
    gpu_check((cudaError_t)r, kernel);
}

/* factor: the number by which the gradients are multiplied. */
static void put_scalars(struct bench *bench, double factor)
{
    bench->n_steps++;
    for (unsigned i = 0; i < bench->options->n_params; i++) {
        update_scalars_compute(OPTIMIZER_ADAMW, &hyper, factor, bench->n_steps, &bench->scalars[i]);
        bench->scalars[i].rounding_key = update_rounding_key(i, bench->n_steps);
    }
    copy(bench, bench->scalars_there, bench->scalars, bench->options->n_params * sizeof(*bench->scalars),
         cudaMemcpyHostToDevice);
}

/* A kernel, or a copy. */
struct timed {
    const char *name;
    void (*run)(struct bench *bench, const struct timed *timed);
    bool accumulated;    /* its gradients are in the accumulators */
    size_t list;         /* for an update: the offset of its list in struct bench */
    unsigned n_quarters; /* for a copy: 4 x the bytes per parameter; half are read, half are written */
};

static void run_copy(struct bench *bench, const struct timed *timed)
{
    copy(bench, bench->copy_to, bench->copy_from, timed->n_quarters * bench->options->n_elems / 8,
         cudaMemcpyDeviceToDevice);
}

static void run_update(struct bench *bench, const struct timed *timed)
{
    const struct device_update_list *list = (const void *)((const uint8_t *)bench + timed->list);

    launch(device_update(bench->stream, list), "device_update");
}

/* Updates as the engine does, with undo slots. */
static void adamw_undo(struct bench *bench, const struct timed *timed)
{
    struct device_update_list list = bench->update;

    list.undo = bench->undo;
    list.undo.tag = bench->n_steps;
    launch(device_update(bench->stream, &list), "device_update");
}

/* Adds the squares of all ranges without rounding, as the daemon does. Return: the norm, unscaled. */
static double norm(const struct bench *bench)
{
    struct exact_sum total;

    exact_sum_reset(&total);
    for (uint32_t i = 0; i < bench->n_ranges; i++)
        exact_sum_merge(&total, &bench->results.squares[i]);
    exact_sum_carry(&total);
    return sqrt(exact_sum_round(&total)) / LOSS_SCALE;
}

/*
 * Computes 16-bit weights from 16-bit gradients, with all checks of a step: position sums, non-finite values, and the
 * norm, from which the host computes the factor that unscales and clips. The parts run one after another. In a
 * training, the reduction and the transfer of its results to the host overlap with the backward.
 */
static void sequence(struct bench *bench, const struct timed *timed)
{
    double clip;

    launch(device_reduce(bench->stream, &bench->reduce), "device_reduce");
    copy(bench, bench->results.all, bench->results_there.all, bench->results.n_bytes, cudaMemcpyDeviceToHost);
    gpu_finish(bench->stream);
    clip = norm(bench);
    put_scalars(bench, (clip > 1 ? 1 / clip : 1) / LOSS_SCALE);
    launch(device_update(bench->stream, &bench->update16), "device_update");
}

#define COPY(name, n)                                                                                                  \
    {                                                                                                                  \
        name, run_copy, .n_quarters = (n)                                                                              \
    }
#define UPDATE(name, member)                                                                                           \
    {                                                                                                                  \
        name, run_update, .accumulated = true, .list = offsetof(struct bench, member)                                  \
    }

static const struct timed kernels[] = {
    COPY("copy-fp32", COPY_FP32),
    COPY("copy-bf16", COPY_BF16),
    COPY("copy-bf16-moments", COPY_BF16_MOMENTS),
    COPY("copy-8bit", COPY_8BIT),
    COPY("copy-8bit-24", COPY_8BIT_24),
    UPDATE("adamw", update),
    UPDATE("adamw-bf16", update16),
    UPDATE("adamw-bf16-moments", update_bf16_moments),
    UPDATE("adamw-8bit", update_8bit),
    UPDATE("adamw-8bit-24", update_8bit_24),
    UPDATE("adamw-imported", update_imported),
    {"adamw-undo", adamw_undo, .accumulated = true},
    {"sequence", sequence},
};

static void refill(struct bench *bench, const struct timed *kernel)
{
    const uint16_t *from = bench->pool + bench->iteration++ * POOL_STEP % POOL_ELEMS / 8 * 8;

    fill(bench, bench->grads, bench->options->n_elems, from);
    if (kernel->accumulated) {
        launch(device_convert_to_f32(bench->stream, kernel->list == offsetof(struct bench, update_imported)
                                                        ? &bench->widen_imported
                                                        : &bench->widen),
               "device_convert_to_f32");
        put_scalars(bench, 1.0 / LOSS_SCALE);
    }
    gpu_finish(bench->stream);
}

/* ---- answers -------------------------------------------------------------------------------------------- */

static void sample(struct bench *bench)
{
    uint64_t last = bench->options->n_elems - 1;
    float *f = gpu_alloc_host(4 * sizeof(*f) + sizeof(uint16_t));
    uint16_t *w16 = (uint16_t *)(void *)(f + 4);
    const float *from[] = {bench->own.p, bench->own.m, bench->own.v, bench->own.acc};

    for (size_t i = 0; i < ARRAY_SIZE(from); i++)
        copy(bench, f + i, from[i] + last, sizeof(*f), cudaMemcpyDeviceToHost);
    copy(bench, w16, bench->own.w16 + last, sizeof(*w16), cudaMemcpyDeviceToHost);
    gpu_finish(bench->stream);
    printf(
        "{\"p\": %.9g, \"exp_avg\": %.9g, \"exp_avg_sq\": %.9g, \"grad\": %.9g, \"weight\": %.9g, \"steps\": %" PRIu64
        "}\n",
        (double)f[0], (double)f[1], (double)f[2], (double)f[3], (double)f32_from_bf16(*w16), bench->n_steps);
    gpu_check(cudaHostUnregister(f), "cudaHostUnregister");
}

static void answer(struct bench *bench, const char *name)
{
    const struct timed *kernel = kernels;
    uint64_t begin;

    if (strcmp(name, "sample") == 0) {
        sample(bench);
        return;
    }
    while (kernel < kernels + ARRAY_SIZE(kernels) && strcmp(kernel->name, name) != 0)
        kernel++;
    if (kernel == kernels + ARRAY_SIZE(kernels))
        gpu_fail("no kernel is called %s", name);
    refill(bench, kernel);
    begin = gpu_now_ns();
    kernel->run(bench, kernel);
    gpu_finish(bench->stream);
    printf("{\"ms\": %.6f}\n", (double)(gpu_now_ns() - begin) / 1e6);
}

void gpu_kernels(const struct gpu_options *options)
{
    struct bench bench = {.options = options, .stream = gpu_stream()};
    char line[64];

    make_memory(&bench);
    make_lists(&bench);
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = '\0';
        answer(&bench, line);
        fflush(stdout);
    }
    gpu_child_kill(&bench.owner);
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Measures how close the kernels come to the speed of memory. Each kernel is measured in turn with a stream that reads
 * and writes the same arrays in the same ranges on the same threads and computes next to nothing. Also measures the
 * cost of an undo slot: a kernel with a slot against the same kernel without a slot.
 *
 * bench-kernels [--elems N] [--threads T] [--pairs P] [--cpu-time] [--json]
 *
 * --cpu-time uses the mean processor time of the threads instead of the time on the clock. Both are equal on a quiet
 * machine; only processor time is meaningful on a busy machine.
 *
 * Gradients are new for each measurement.
 */

#include "bench/streams.h"

#include "core/base/base.h"
#include "kernels/kernels.h"
#include "kernels/undo.h"

#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    MAX_LEAVES = STREAMS_MAX_LEAVES,
    REDUCE_RANGE_ELEMS = 64 << 10,
    UPDATE_RANGE_ELEMS = 256 << 10,
};

struct row {
    const char *name;
    const char *peer_name;
    double goal;
    bool update;
    unsigned n_leaves; /* leaves of a reduce */
    enum dtype dtype;  /* type of the leaves, or of the 16-bit weights */
    bool undo;         /* the peer is the same kernel without a slot; a reduce adds to old values */
    struct moments_type moments;
    bool master24; /* masters have 24 bits: the 16-bit weights, and bytes instead of p */
};

static const struct row rows[] = {
    {"adamw, fp32", "adam-shaped stream", 0.90, true, 0, DTYPE_F32},
    {"adamw, fp32 and bf16 weights", "adam-shaped stream", 0.90, true, 0, DTYPE_BF16},
    {"adamw, bf16 moments", "stream of their bytes", 0.90, true, 0, DTYPE_F32, false, {DTYPE_BF16}},
    {"adamw, bf16 moments, stochastic", "stream of their bytes", 0.90, true, 0, DTYPE_F32, false, {DTYPE_BF16, true}},
    {"adamw, 8-bit moments", "stream of their bytes", 0.90, true, 0, DTYPE_F32, false, {DTYPE_SIGNED8, true}},
    {"adamw, 8-bit moments, 24-bit masters",
     "stream of their bytes",
     0.90,
     true,
     0,
     DTYPE_BF16,
     false,
     {DTYPE_SIGNED8, true},
     true},
    {"reduce, 2 ranks, fp32", "read-and-sum stream", 0.85, false, 2, DTYPE_F32},
    {"reduce, 4 ranks, fp32", "read-and-sum stream", 0.85, false, 4, DTYPE_F32},
    {"reduce, 2 ranks, bf16", "read-and-sum stream", 0.85, false, 2, DTYPE_BF16},
    {"reduce, 4 ranks, bf16", "read-and-sum stream", 0.85, false, 4, DTYPE_BF16},
    {"undo: adamw, fp32", "the same without", 0.95, true, 0, DTYPE_F32, true},
    {"undo: adamw, fp32 and bf16 weights", "the same without", 0.95, true, 0, DTYPE_BF16, true},
    {"undo: adamw, bf16 moments", "the same without", 0.95, true, 0, DTYPE_F32, true, {DTYPE_BF16}},
    {"undo: adamw, 8-bit moments", "the same without", 0.95, true, 0, DTYPE_F32, true, {DTYPE_SIGNED8, true}},
    {"undo: adamw, 8-bit moments, 24-bit masters",
     "the same without",
     0.95,
     true,
     0,
     DTYPE_BF16,
     true,
     {DTYPE_SIGNED8, true},
     true},
    {"undo: reduce, 2 ranks, fp32", "the same without", 0.95, false, 2, DTYPE_F32, true},
    {"undo: reduce, 2 ranks, bf16", "the same without", 0.95, false, 2, DTYPE_BF16, true},
};

enum task {
    TASK_FILL,
    TASK_PEER,
    TASK_ZEROD,
};

struct bench {
    size_t n_elems;
    unsigned n_threads;
    unsigned n_pairs;
    bool cpu_time;
    bool json;
    const struct kernels *kernels;
    const struct streams *streams;
    float *acc;
    void *array[MAX_LEAVES]; /* leaves; or p, m, v and 16-bit weights */

    /* the threads' present task */
    const struct row *row;
    enum task task;
    uint32_t seed;
    pthread_barrier_t start;
};

struct thread {
    struct bench *bench;
    unsigned index;
    pthread_t id;
    double begin_ms;
    double end_ms;
    double cpu_ms;
    struct undo_slot slot;
};

/* Fills the array with random fp32 numbers of magnitude 2^-17 to 2^-5, or with the upper halves of such numbers
 * (bf16). */
static void fill(void *out, enum dtype dtype, size_t n, uint32_t seed)
{
    uint32_t *f32 = out;
    uint16_t *bf16 = out;

    for (size_t i = 0; i < n; i++) {
        uint32_t h = ((uint32_t)i ^ seed) * 0x9e3779b1u, bits;

        h = (h ^ h >> 15) * 0x85ebca77u;
        h ^= h >> 13;
        bits = (h & 0x807fffff) | (110 + (h >> 23) % 12) << 23;
        if (dtype == DTYPE_F32)
            f32[i] = bits;
        else
            bf16[i] = (uint16_t)(bits >> 16);
    }
}

static void *elem(void *array, enum dtype dtype, size_t at)
{
    return (char *)array + dtype_bytes(dtype, at);
}

static void range_fill(struct bench *bench, size_t at, size_t n)
{
    const struct row *row = bench->row;

    if (row->update)
        fill(bench->acc + at, DTYPE_F32, n, bench->seed + (uint32_t)at);
    for (unsigned leaf = 0; leaf < row->n_leaves; leaf++)
        fill(elem(bench->array[leaf], row->dtype, at), row->dtype, n, bench->seed + (uint32_t)at + leaf * 77);
}

/* slot: NULL: no undo slot */
static void range_update(struct bench *bench, struct undo_slot *slot, size_t at, size_t n)
{
    const struct hyper hyper = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    const struct row *row = bench->row;
    float *p = elem(bench->array[0], DTYPE_F32, at);
    void *m = elem(bench->array[1], row->moments.dtype, at);
    void *v = elem(bench->array[2], moments_dtype_of_square(row->moments), at);
    uint16_t *w16 = row->dtype == DTYPE_F32 ? NULL : elem(bench->array[3], row->dtype, at);
    uint8_t *lower = (uint8_t *)bench->array[0] + at;
    struct update_scalars scalars;

    if (bench->task == TASK_PEER && !row->undo && row->moments.dtype == DTYPE_BF16) {
        bench->streams->adam_bf16((uint32_t *)p, m, v, (const uint32_t *)(bench->acc + at), n);
        return;
    }
    if (bench->task == TASK_PEER && !row->undo && row->master24) {
        bench->streams->adam_24bit(w16, lower, m, v, (const uint32_t *)(bench->acc + at), n);
        return;
    }
    if (bench->task == TASK_PEER && !row->undo && row->moments.dtype == DTYPE_SIGNED8) {
        bench->streams->adam_8bit((uint32_t *)p, m, v, (const uint32_t *)(bench->acc + at), n);
        return;
    }
    if (bench->task == TASK_PEER && !row->undo) {
        bench->streams->adam((uint32_t *)p, m, v, (const uint32_t *)(bench->acc + at), w16, n);
        return;
    }
    update_scalars_compute(OPTIMIZER_ADAMW, &hyper, 0.5, 10, &scalars);
    scalars.rounding_key = update_rounding_key(0, 10);
    bench->kernels->update[OPTIMIZER_ADAMW](&(struct update_args){
        .p = row->master24 ? NULL : p,
        .lower = row->master24 ? (int8_t *)lower : NULL,
        .m = m,
        .v = v,
        .acc = bench->acc + at,
        .w16 = w16,
        .w16_dtype = row->dtype,
        .n_elems = n,
        .moments = row->moments,
        .start_elem = at,
        .k = &scalars,
        .undo = slot,
        .undo_elem = at,
    });
}

static void range_reduce(struct bench *bench, struct undo_slot *slot, size_t at, size_t n)
{
    const struct row *row = bench->row;
    struct position_sum sums[MAX_LEAVES];
    struct reduce_join joins[MAX_LEAVES];
    struct reduce_result result = {.sums = sums};
    const void *leaves[MAX_LEAVES];

    for (unsigned leaf = 0; leaf < row->n_leaves; leaf++)
        leaves[leaf] = elem(bench->array[leaf], row->dtype, at);
    if (bench->task == TASK_PEER && !row->undo) {
        bench->streams->sum(bench->acc + at, leaves, row->n_leaves, row->dtype, n);
        return;
    }
    reduce_joins(NULL, row->n_leaves, joins);
    bench->kernels->reduce(
        &(struct reduce_args){
            .dtype = row->dtype,
            .n_leaves = row->n_leaves,
            .leaves = leaves,
            .joins = joins,
            .acc = bench->acc + at,
            .first = !row->undo,
            .n_elems = n,
            .start_elem = at,
            .undo = slot,
            .undo_elem = at,
        },
        &result);
    if (result.nonfinite || exact_sum_is_zero(&result.squares))
        abort();
}

static double clock_ms(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void *thread_run(void *arg)
{
    struct thread *thread = arg;
    struct bench *bench = thread->bench;
    size_t range = bench->row->update ? UPDATE_RANGE_ELEMS : REDUCE_RANGE_ELEMS;
    struct undo_slot *slot = bench->row->undo && bench->task == TASK_ZEROD ? &thread->slot : NULL;

    pthread_barrier_wait(&bench->start);
    thread->begin_ms = clock_ms(CLOCK_MONOTONIC);
    thread->cpu_ms = -clock_ms(CLOCK_THREAD_CPUTIME_ID);
    for (size_t at = thread->index * range; at < bench->n_elems; at += bench->n_threads * range) {
        size_t n = MIN(range, bench->n_elems - at);

        if (bench->task == TASK_FILL)
            range_fill(bench, at, n);
        else if (bench->row->update)
            range_update(bench, slot, at, n);
        else
            range_reduce(bench, slot, at, n);
    }
    thread->cpu_ms += clock_ms(CLOCK_THREAD_CPUTIME_ID);
    thread->end_ms = clock_ms(CLOCK_MONOTONIC);
    return NULL;
}

/* Return: milliseconds from when the first thread begins, after all are ready, until the last thread has finished. */
static double run(struct bench *bench, enum task task)
{
    _cleanup_free_ struct thread *threads =
        aligned_alloc(_Alignof(struct thread), bench->n_threads * sizeof(*threads));
    double begin_ms = INFINITY, end_ms = 0, cpu_ms = 0;

    bench->task = task;
    if (!threads || pthread_barrier_init(&bench->start, NULL, bench->n_threads + 1) != 0)
        abort();
    for (unsigned i = 0; i < bench->n_threads; i++) {
        threads[i] = (struct thread){.bench = bench, .index = i};
        if (pthread_create(&threads[i].id, NULL, thread_run, &threads[i]) != 0)
            abort();
    }
    pthread_barrier_wait(&bench->start);
    for (unsigned i = 0; i < bench->n_threads; i++) {
        pthread_join(threads[i].id, NULL);
        begin_ms = MIN(begin_ms, threads[i].begin_ms);
        end_ms = MAX(end_ms, threads[i].end_ms);
        cpu_ms += threads[i].cpu_ms / bench->n_threads;
    }
    pthread_barrier_destroy(&bench->start);
    return bench->cpu_time ? cpu_ms : end_ms - begin_ms;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, unsigned n)
{
    qsort(values, n, sizeof(*values), compare);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static void measure(struct bench *bench, const struct row *row, bool last)
{
    _cleanup_free_ double *ms = calloc(2 * bench->n_pairs, sizeof(*ms));
    double *peer = ms, *zerod = ms + bench->n_pairs, ratio;

    if (!ms)
        abort();
    bench->row = row;
    if (row->update) {
        /* sets the weights; moments start at zero */
        fill(bench->array[0], DTYPE_F32, bench->n_elems, 1);
        fill(bench->array[3], DTYPE_BF16, bench->n_elems, 1);
        memset(bench->array[1], 0, bench->n_elems * sizeof(float));
        memset(bench->array[2], 0, bench->n_elems * sizeof(float));
    }
    for (unsigned i = 0; i < 2 * bench->n_pairs; i++) {
        bool peers_turn = (i ^ i >> 1) & 1; /* alternates which side is first, too */

        bench->seed += 0x10001;
        run(bench, TASK_FILL);
        if (peers_turn)
            peer[i / 2] = run(bench, TASK_PEER);
        else
            zerod[i / 2] = run(bench, TASK_ZEROD);
    }
    ratio = median(peer, bench->n_pairs) / median(zerod, bench->n_pairs);
    if (bench->json)
        printf("  {\"name\": \"%s\", \"zerod\": %.2f, \"peer\": %.2f, \"peer_name\": \"%s\", \"unit\": \"ms\", "
               "\"ratio\": %.3f, \"goal\": %.2f, \"holds\": %s}%s\n",
               row->name, median(zerod, bench->n_pairs), median(peer, bench->n_pairs), row->peer_name, ratio, row->goal,
               ratio >= row->goal ? "true" : "false", last ? "" : ",");
    else
        printf("%-30s %8.2f ms   %s %8.2f ms   ratio %.3f, goal %.2f: %s\n", row->name, median(zerod, bench->n_pairs),
               row->peer_name, median(peer, bench->n_pairs), ratio, row->goal,
               ratio >= row->goal ? "holds" : "does not hold");
    fflush(stdout);
}

static int bench_init(struct bench *bench)
{
    size_t n_bytes = bench->n_elems * sizeof(float);
    char err[256];

    if (kernels_select(&bench->kernels, NULL, err, sizeof(err)) < 0 || kernels_assert_float_env(err, sizeof(err)) < 0) {
        fprintf(stderr, "bench-kernels: %s\n", err);
        return -EINVAL;
    }
    bench->streams = streams_of(bench->kernels->isa);
    bench->acc = streams_memory(n_bytes, MAX_LEAVES);
    for (unsigned i = 0; i < MAX_LEAVES; i++)
        bench->array[i] = streams_memory(n_bytes, i);
    for (unsigned i = 0; i < MAX_LEAVES; i++) {
        if (!bench->acc || !bench->array[i]) {
            fprintf(stderr, "bench-kernels: no memory for five arrays of %zu bytes\n", n_bytes);
            return -ENOMEM;
        }
    }
    return 0;
}

/* Return: 0 if the text is a positive number, or -EINVAL. */
static int parse_positive(const char *text, size_t *value)
{
    char *end;
    unsigned long long n = strtoull(text, &end, 10);

    if (*end || n == 0 || n > SIZE_MAX / 64)
        return -EINVAL;
    *value = (size_t)n;
    return 0;
}

static int parse_options(struct bench *bench, int argc, char **argv)
{
    static const struct option options[] = {
        {"elems", required_argument, NULL, 'e'}, {"threads", required_argument, NULL, 't'},
        {"pairs", required_argument, NULL, 'p'}, {"cpu-time", no_argument, NULL, 'c'},
        {"json", no_argument, NULL, 'j'},        {NULL, 0, NULL, 0},
    };
    size_t n_threads = bench->n_threads, n_pairs = bench->n_pairs;
    int c, r = 0;

    while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0 && r == 0) {
        if (c == 'e')
            r = parse_positive(optarg, &bench->n_elems);
        else if (c == 't')
            r = parse_positive(optarg, &n_threads);
        else if (c == 'p')
            r = parse_positive(optarg, &n_pairs);
        else if (c == 'c')
            bench->cpu_time = true;
        else if (c == 'j')
            bench->json = true;
        else
            r = -EINVAL;
    }
    if (r < 0 || optind < argc || n_threads > 1024 || n_pairs > 100000) {
        fprintf(stderr, "usage: bench-kernels [--elems N] [--threads T] [--pairs P] [--cpu-time] [--json]\n");
        return -EINVAL;
    }
    bench->n_threads = (unsigned)n_threads;
    bench->n_pairs = (unsigned)n_pairs;
    return 0;
}

int main(int argc, char **argv)
{
    struct bench bench = {.n_elems = (size_t)64 << 20, .n_threads = 2, .n_pairs = 9};

    if (parse_options(&bench, argc, argv) < 0)
        return 2;
    if (bench_init(&bench) < 0)
        return 1;
    if (bench.json)
        printf("[\n");
    else
        printf("%s, %zu elements, %u threads, medians of %u pairs%s\n", bench.kernels->isa, bench.n_elems,
               bench.n_threads, bench.n_pairs, bench.cpu_time ? ", processor time" : "");
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        measure(&bench, &rows[i], i + 1 == ARRAY_SIZE(rows));
    if (bench.json)
        printf("]\n");
    return 0;
}

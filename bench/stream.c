/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A stream on demand: for each line on standard input, threads go over four arrays of fp32 as an Adam update does: they
 * read all four and write back three. Prints the bytes moved and the time as a line of JSON.
 *
 * bench-stream [--elems N] [--threads T] [--passes P]
 */

#include "bench/streams.h"

#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
    N_ARRAYS = 4,
    N_MOVED = 7, /* four arrays are read, three are written */
    RANGE_ELEMS = 256 << 10,
    MAX_THREADS = 1024,
};

struct bench {
    size_t n_elems, n_threads, n_passes;
    const struct streams *streams;
    uint32_t *array[N_ARRAYS];
    pthread_barrier_t begin, end;
};

struct thread {
    struct bench *bench;
    size_t index;
};

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void go_over(const struct bench *bench, size_t index)
{
    for (size_t at = index * RANGE_ELEMS; at < bench->n_elems; at += bench->n_threads * RANGE_ELEMS) {
        bench->streams->adam(bench->array[0] + at, bench->array[1] + at, bench->array[2] + at, bench->array[3] + at,
                             NULL, MIN((size_t)RANGE_ELEMS, bench->n_elems - at));
    }
}

static void *thread_run(void *arg)
{
    const struct thread *thread = arg;
    struct bench *bench = thread->bench;

    for (;;) {
        pthread_barrier_wait(&bench->begin);
        for (size_t pass = 0; pass < bench->n_passes; pass++)
            go_over(bench, thread->index);
        pthread_barrier_wait(&bench->end);
    }
    return NULL;
}

static int start(struct bench *bench, struct thread *threads)
{
    unsigned n = (unsigned)bench->n_threads + 1;
    const struct kernels *kernels;
    char err[256];

    if (kernels_select(&kernels, NULL, err, sizeof(err)) < 0) {
        fprintf(stderr, "bench-stream: %s\n", err);
        return -1;
    }
    bench->streams = streams_of(kernels->isa);
    for (unsigned i = 0; i < N_ARRAYS; i++) {
        bench->array[i] = streams_memory(bench->n_elems * sizeof(uint32_t), i);
        if (!bench->array[i]) {
            fprintf(stderr, "bench-stream: no memory for %d arrays of %zu elements\n", N_ARRAYS, bench->n_elems);
            return -1;
        }
    }
    if (pthread_barrier_init(&bench->begin, NULL, n) != 0 || pthread_barrier_init(&bench->end, NULL, n) != 0)
        return -1;
    for (size_t i = 0; i < bench->n_threads; i++) {
        pthread_t id;

        threads[i] = (struct thread){.bench = bench, .index = i};
        if (pthread_create(&id, NULL, thread_run, &threads[i]) != 0)
            return -1;
    }
    return 0;
}

static int parse(struct bench *bench, int argc, char **argv)
{
    static const struct option longs[] = {
        {"elems", 1, NULL, 'e'}, {"threads", 1, NULL, 't'}, {"passes", 1, NULL, 'p'}, {0}};
    int c;

    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        size_t value = c == '?' ? 0 : strtoull(optarg, NULL, 10);

        if (value == 0)
            return -1;
        if (c == 'e')
            bench->n_elems = value;
        else if (c == 't')
            bench->n_threads = value;
        else
            bench->n_passes = value;
    }
    return optind == argc && bench->n_threads <= MAX_THREADS ? 0 : -1;
}

int main(int argc, char **argv)
{
    static struct bench bench = {.n_elems = (size_t)64 << 20, .n_threads = 2, .n_passes = 1};
    static struct thread threads[MAX_THREADS];
    char line[64];

    if (parse(&bench, argc, argv) != 0) {
        fprintf(stderr, "usage: bench-stream [--elems N] [--threads T] [--passes P]\n");
        return 64;
    }
    if (start(&bench, threads) != 0)
        return 1;
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        uint64_t begin = now_ns();

        pthread_barrier_wait(&bench.begin);
        pthread_barrier_wait(&bench.end);
        printf("{\"ns\": %" PRIu64 ", \"bytes\": %zu}\n", now_ns() - begin,
               bench.n_passes * bench.n_elems * N_MOVED * sizeof(uint32_t));
        fflush(stdout);
    }
    return 0;
}

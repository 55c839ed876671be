/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The update phase of a step without a daemon: step_update() on the same kind of memory and threads, called in process.
 * For each line on standard input, makes fresh gradients and one update, and prints the update's time as a line of
 * JSON. With the line "record", a recorder runs as in a daemon.
 *
 * bench-update [--elems N] [--params P] [--ranks R] [--threads T]
 */

#include "core/base/base.h"
#include "core/base/recorder.h"
#include "core/base/worker.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"
#include "daemon/step/step.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct bench {
    uint64_t n_elems;
    unsigned n_params, n_ranks, n_threads;
    uint64_t bucket_elems;
    const struct kernels *kernels;
    struct worker_pool *pool;
    struct layout *layout;
    struct state *state;
    struct step *step;
    bool done;
    struct work fill_work;
    uint32_t seed;
};

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void notify(void *userdata)
{
    (void)userdata; /* the main thread waits in worker_pool_wait() */
}

static void set_done(void *userdata, int result)
{
    struct bench *bench = userdata;

    bench->done = true;
}

static void fill_done(struct work *work)
{
    set_done(container_of(work, struct bench, fill_work), 0);
}

static void wait_done(struct bench *bench)
{
    while (!bench->done)
        worker_pool_wait(bench->pool);
    bench->done = false;
}

/* Fills a chunk's gradients with small numbers of both signs, different in each iteration. */
static void fill_run(struct work *work, uint32_t chunk_id)
{
    struct bench *bench = container_of(work, struct bench, fill_work);
    const struct layout_chunk *chunk = &bench->layout->chunks[chunk_id];
    const struct layout_param *param = &bench->layout->params[chunk->param];
    float *acc = state_acc(bench->state, param->bucket, param->offset_elems + chunk->start_elem);

    for (uint32_t i = 0; i < chunk->n_elems; i++) {
        uint32_t x = (i + chunk_id * 40503u) * 2654435761u + bench->seed * 40503u;

        acc[i] = (float)(int32_t)(x ^ x >> 15) * 0x1p-40f;
    }
}

static int make_layout(struct bench *bench)
{
    _cleanup_free_ struct layout_decl *decls = calloc(bench->n_params, sizeof(*decls));
    _cleanup_free_ char *names = calloc(bench->n_params, 32);
    uint64_t shape = bench->n_elems / bench->n_params;
    uint32_t bad;

    if (!decls || !names)
        return -ENOMEM;
    for (unsigned i = 0; i < bench->n_params; i++) {
        int n = snprintf(names + 32 * i, 32, "layers.%u.weight", i);

        decls[i] = (struct layout_decl){
            .name = names + 32 * i, .name_len = (size_t)n, .trainable = true, .n_dims = 1, .shape = &shape};
    }
    return layout_new(&bench->layout, decls, bench->n_params, bench->n_ranks, bench->bucket_elems, &bad);
}

static int init(struct bench *bench)
{
    char why[160];
    int r = kernels_select(&bench->kernels, NULL, why, sizeof(why));

    if (r < 0) {
        fprintf(stderr, "bench-update: %s\n", why);
        return r;
    }
    r = make_layout(bench);
    if (r == 0)
        r = state_new(&bench->state,
                      &(struct state_options){
                          .layout = bench->layout, .stage = 2, .n_ranks = bench->n_ranks, .moments = {true, true}});
    for (uint32_t piece = 0; r == 0 && piece < state_n_reserve_pieces(bench->state); piece++)
        r = state_reserve(bench->state, piece);
    if (r == 0)
        r = step_new(&bench->step, &(struct step_options){.state = bench->state,
                                                          .kernels = bench->kernels,
                                                          .n_local = bench->n_ranks,
                                                          .optimizer = OPTIMIZER_ADAMW});
    if (r != 0)
        fprintf(stderr, "bench-update: %s\n", r < 0 ? strerror(-r) : "no layout for these sizes");
    return r;
}

/* Makes one update with new threads, which end before the recorder stops. Return: 0 or -errno. */
static int iterate(struct bench *bench, bool records)
{
    const struct hyper hyper = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    uint64_t start;
    int r = records ? recorder_start(bench->n_threads) : 0;

    if (r == 0)
        r = worker_pool_new(&bench->pool, bench->n_threads, notify, NULL);
    if (r < 0)
        return r;
    bench->step->pool = bench->pool;
    bench->seed++;
    bench->fill_work = (struct work){.run = fill_run, .done = fill_done, .n_items = bench->layout->n_chunks};
    worker_post(bench->pool, &bench->fill_work);
    wait_done(bench);

    memset(bench->step->contributed, 1, bench->layout->n_params);
    start = now_ns();
    step_update(bench->step, &(struct step_update){.groups = &hyper, .s = 0.5}, set_done, bench);
    wait_done(bench);
    step_commit(bench->step);
    printf("{\"ns\": %" PRIu64 "}\n", now_ns() - start);
    fflush(stdout);
    worker_pool_free(bench->pool);
    recorder_stop();
    return 0;
}

static int parse(struct bench *bench, int argc, char **argv)
{
    static const struct option longs[] = {
        {"elems", 1, NULL, 'e'}, {"params", 1, NULL, 'p'}, {"ranks", 1, NULL, 'r'}, {"threads", 1, NULL, 't'}, {0},
    };
    int c;

    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        uint64_t value = c == '?' ? 0 : strtoull(optarg, NULL, 0);

        if (value == 0)
            return -EINVAL;
        if (c == 'e')
            bench->n_elems = value;
        else if (c == 'p')
            bench->n_params = (unsigned)value;
        else if (c == 'r')
            bench->n_ranks = (unsigned)value;
        else
            bench->n_threads = (unsigned)value;
    }
    return bench->n_ranks > STEP_MAX_RANKS || bench->n_params > bench->n_elems ? -EINVAL : 0;
}

int main(int argc, char **argv)
{
    struct bench bench = {
        .n_elems = UINT64_C(64) << 20, .n_params = 64, .n_ranks = 2, .n_threads = 2, .bucket_elems = 2000000};
    char line[64];

    if (parse(&bench, argc, argv) < 0) {
        fprintf(stderr, "usage: bench-update [--elems N] [--params P] [--ranks R] [--threads T]\n");
        return 64;
    }
    if (init(&bench) != 0)
        return 1;
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        if (iterate(&bench, strcmp(line, "record\n") == 0) < 0)
            return 1;
    }
    step_free(bench.step);
    state_free(bench.state);
    layout_free(bench.layout);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One rank of a golden case, as a trainer of a real daemon:
 *
 *     golden-client CASE.json HOW.json RANK RESULT
 *
 * ZEROD_SOCKET names the daemon. HOW.json has these keys: order (forward, reverse, alternate, random) and seed, for the
 * pushes of a micro-batch; in_place (gradients are written into zerod_slot()); configured (the optimizer's settings are
 * the daemon's, so that steps have no arguments); sleep_ms (before each backward, one number per rank).
 *
 * The result file has the arrays of golden-driver.c. For each step it also has the results of zerod_step() and the
 * weights of one parameter that stays gathered over the step. At the end it has the duration of the slowest push.
 */

#include <errno.h>
#include <inttypes.h>
#include <json-c/json.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <zerod/client.h>

#include "core/base/base.h"
#include "tests/programs/golden-case.h"
#include "tests/programs/trainer-memory.h"

struct push {
    unsigned param, pass;
};

struct rank {
    struct golden_case *c;
    struct json_object *how;
    unsigned rank;
    uint64_t random;
    struct zerod *client;
    void **inits;        /* rank 0: initial weights until the job is formed */
    struct push *pushes; /* of one micro-batch */
    uint8_t *scratch;    /* large enough for any parameter in fp32 */
    uint64_t slowest_push_ns;
    FILE *out;
};

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static struct json_object *get(const struct rank *rank, const char *name)
{
    struct json_object *value = NULL;

    json_object_object_get_ex(rank->how, name, &value);
    return value;
}

/* ---- attaching ----------------------------------------------------------------------------------------- */

static int declare(struct rank *rank, unsigned i)
{
    const struct golden_param *p = &rank->c->params[i];

    if (rank->rank == 0) {
        rank->inits[i] = malloc(p->n_elems * sizeof(float) + 1);
        if (!rank->inits[i])
            return -ENOMEM;
        golden_case_weights(rank->c, i, rank->inits[i]);
    }
    return memory_declare(rank->client, (int)rank->rank,
                          &(struct zerod_param){.name = p->name,
                                                .dtype = (enum zerod_dtype)p->dtype,
                                                .grad_dtype = (enum zerod_dtype)p->grad_dtype,
                                                .ndim = p->n_dims,
                                                .shape = p->shape,
                                                .group = p->group,
                                                .trainable = p->trainable,
                                                .init = rank->inits[i]},
                          p->n_elems * dtype_size(p->dtype));
}

static int attach(struct rank *rank)
{
    int r = zerod_connect(&rank->client, &(struct zerod_options){.rank = (int)rank->rank,
                                                                 .on_duplicate = ZEROD_ON_DUPLICATE_ACCUMULATE,
                                                                 .timeout_ms = 120000});

    for (unsigned i = 0; r == 0 && i < rank->c->n_params; i++)
        r = declare(rank, i);
    return r == 0 ? zerod_form(rank->client) : r;
}

/* ---- a backward ---------------------------------------------------------------------------------------- */

static void reverse(struct push *pushes, unsigned n)
{
    for (unsigned i = 0; i < n / 2; i++) {
        struct push push = pushes[i];

        pushes[i] = pushes[n - 1 - i];
        pushes[n - 1 - i] = push;
    }
}

static void shuffle(struct rank *rank, unsigned n)
{
    for (unsigned i = n; i > 1; i--) {
        unsigned k = (unsigned)golden_random(&rank->random, i);
        struct push push = rank->pushes[i - 1];

        rank->pushes[i - 1] = rank->pushes[k];
        rank->pushes[k] = push;
    }
}

/*
 * Orders the pushes of a micro-batch. A parameter's passes are numbered in the order of its pushes. Return: the number
 * of pushes.
 */
static int order_pushes(struct rank *rank, unsigned step, unsigned micro)
{
    const char *order = json_object_get_string(get(rank, "order"));
    _cleanup_free_ unsigned *n_pushed = calloc(rank->c->n_params, sizeof(*n_pushed));
    struct golden_place at = {.step = step, .micro = micro, .rank = rank->rank};
    struct push *grown;
    unsigned n = 0;

    for (at.param = 0; n_pushed && at.param < rank->c->n_params; at.param++) {
        for (unsigned passes = golden_case_n_passes(rank->c, &at); passes > 0; passes--) {
            grown = realloc(rank->pushes, (n + 1) * sizeof(*grown));
            if (!grown)
                return -ENOMEM;
            rank->pushes = grown;
            rank->pushes[n++].param = at.param;
        }
    }
    if (strcmp(order, "reverse") == 0 || (strcmp(order, "alternate") == 0 && micro % 2))
        reverse(rank->pushes, n);
    else if (strcmp(order, "random") == 0)
        shuffle(rank, n);
    for (unsigned i = 0; n_pushed && i < n; i++)
        rank->pushes[i].pass = n_pushed[rank->pushes[i].param]++;
    return n_pushed ? (int)n : -ENOMEM;
}

static int push(struct rank *rank, const struct golden_place *at)
{
    const struct golden_param *p = &rank->c->params[at->param];
    size_t n_bytes = p->n_elems * dtype_size(p->grad_dtype);
    bool in_place = json_object_get_boolean(get(rank, "in_place"));
    void *dst = rank->scratch;
    uint64_t waited_ns = 0, began_ns;
    int r;

    if (in_place) {
        began_ns = now_ns();
        dst = memory_slot(rank->client, at->param, n_bytes);
        waited_ns = now_ns() - began_ns;
    }
    if (!dst)
        return zerod_error(rank->client)->status;
    golden_case_gradient(rank->c, at, dst);
    began_ns = now_ns();
    r = memory_push(rank->client, &(struct zerod_push){.param = at->param, .data = in_place ? NULL : dst}, n_bytes);
    rank->slowest_push_ns = MAX(rank->slowest_push_ns, waited_ns + now_ns() - began_ns);
    return r;
}

static int run_micro_batch(struct rank *rank, unsigned step, unsigned micro)
{
    struct json_object *sleeps = get(rank, "sleep_ms");
    int n = order_pushes(rank, step, micro), r = n < 0 ? n : zerod_begin_backward(rank->client, NULL);

    if (sleeps) {
        int64_t ms = json_object_get_int64(json_object_array_get_idx(sleeps, rank->rank));

        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
    }
    for (int i = 0; r == 0 && i < n; i++)
        r = push(rank, &(struct golden_place){step, micro, rank->pushes[i].pass, rank->rank, rank->pushes[i].param});
    return r == 0 ? zerod_end_backward(rank->client, NULL, 0) : r;
}

/* ---- a step -------------------------------------------------------------------------------------------- */

static int ask_step(struct rank *rank, unsigned step, struct zerod_step_result *result)
{
    unsigned n_groups = 0;
    _cleanup_free_ struct zerod_hyper *groups = calloc(rank->c->n_groups, sizeof(*groups));
    double max_norm = golden_case_max_norm(rank->c, step);

    if (json_object_get_boolean(get(rank, "configured")))
        return zerod_step(rank->client, NULL, result);
    if (!groups)
        return -ENOMEM;
    for (unsigned i = 0; i < rank->c->n_params; i++)
        n_groups = MAX(n_groups, rank->c->params[i].group + 1);
    for (unsigned g = 0; g < n_groups; g++) {
        struct hyper h = golden_case_hyper(rank->c, g, step);

        groups[g] = (struct zerod_hyper){h.lr,       h.beta1,     h.beta2,    h.eps,     h.weight_decay,
                                         h.momentum, h.dampening, h.lr_decay, h.nesterov};
    }
    return zerod_step(rank->client,
                      &(struct zerod_step_args){.groups = groups,
                                                .n_groups = n_groups,
                                                .max_norm = &max_norm,
                                                .loss_scale = golden_case_loss_scale(rank->c, step)},
                      result);
}

static int write_weights(struct rank *rank, const char *name, unsigned index, unsigned param)
{
    const struct golden_param *p = &rank->c->params[param];

    size_t n_bytes = p->n_elems * dtype_size(p->dtype);

    return golden_write(rank->out, name, index, memory_weight(rank->client, param, n_bytes), n_bytes);
}

static int run_step(struct rank *rank, unsigned step)
{
    unsigned watched = step % rank->c->n_params;
    struct zerod_step_result result = {0};
    uint64_t said[3];
    int r = zerod_gather(rank->client, &watched, 1);

    for (unsigned micro = 0; r == 0 && micro < golden_case_n_micro_batches(rank->c, step); micro++)
        r = run_micro_batch(rank, step, micro);
    if (r == 0)
        r = ask_step(rank, step, &result);
    said[0] = result.epoch;
    said[1] = result.applied;
    said[2] = result.n_missing;
    if (r == 0)
        r = golden_write(rank->out, "norm", step, &result.grad_norm, sizeof(result.grad_norm));
    if (r == 0)
        r = golden_write(rank->out, "said", step, said, sizeof(said));
    if (r == 0)
        r = write_weights(rank, "seen", step, watched);
    return r == 0 ? zerod_release(rank->client, &watched, 1) : r;
}

/* ---- results ------------------------------------------------------------------------------------------- */

static int write_state(struct rank *rank, const char *name, unsigned param, enum zerod_state which)
{
    int r = zerod_read_state(rank->client, param, which, rank->scratch);

    if (r != 0)
        return r;
    return golden_write(rank->out, name, param, rank->scratch, rank->c->params[param].n_elems * sizeof(float));
}

static int write_param(struct rank *rank, unsigned param)
{
    struct optimizer_moments moments = golden_case_moments(rank->c);
    bool trainable = rank->c->params[param].trainable;
    int r = zerod_gather(rank->client, &param, 1);

    if (r == 0)
        r = write_weights(rank, "weights", param, param);
    if (r == 0)
        r = zerod_release(rank->client, &param, 1);
    if (r == 0 && trainable)
        r = write_state(rank, "master", param, ZEROD_MASTER);
    if (r == 0 && trainable && moments.m)
        r = write_state(rank, "exp_avg", param, ZEROD_EXP_AVG);
    if (r == 0 && trainable && moments.v)
        r = write_state(rank, "exp_avg_sq", param, ZEROD_EXP_AVG_SQ);
    return r;
}

static int run(struct rank *rank)
{
    int r = attach(rank);

    for (unsigned step = 0; r == 0 && step < rank->c->n_steps; step++)
        r = run_step(rank, step);
    for (unsigned param = 0; r == 0 && param < rank->c->n_params; param++)
        r = write_param(rank, param);
    if (r == 0)
        r = golden_write(rank->out, "slowest_push_ns", 0, &rank->slowest_push_ns, sizeof(rank->slowest_push_ns));
    if (r == 0)
        r = zerod_leave(rank->client);
    if (r != 0)
        fprintf(stderr, "golden-client: rank %u: %d\n%s\n", rank->rank, r, zerod_error(rank->client)->text);
    return r;
}

/* ---- the program --------------------------------------------------------------------------------------- */

static int rank_init(struct rank *rank, char **argv)
{
    struct golden_case *c = golden_case_read(argv[1]);
    uint64_t most_elems = 1;

    *rank = (struct rank){.c = c, .how = json_object_from_file(argv[2]), .rank = (unsigned)atoi(argv[3])};
    if (!c || !rank->how || !get(rank, "order"))
        return -EINVAL;
    rank->random = json_object_get_uint64(get(rank, "seed")) + rank->rank;
    for (unsigned i = 0; i < c->n_params; i++)
        most_elems = MAX(most_elems, c->params[i].n_elems);
    rank->scratch = malloc(most_elems * sizeof(float));
    rank->inits = calloc(c->n_params, sizeof(*rank->inits));
    rank->out = fopen(argv[4], "we");
    return rank->scratch && rank->inits && rank->out ? 0 : -ENOMEM;
}

static void rank_deinit(struct rank *rank)
{
    zerod_close(rank->client);
    for (unsigned i = 0; rank->inits && i < rank->c->n_params; i++)
        free(rank->inits[i]);
    free(rank->inits);
    free(rank->pushes);
    free(rank->scratch);
    json_object_put(rank->how);
    golden_case_free(rank->c);
    if (rank->out)
        fclose(rank->out);
}

int main(int argc, char **argv)
{
    struct rank rank;
    int r;

    if (argc != 5) {
        fputs("usage: golden-client CASE.json HOW.json RANK RESULT\n", stderr);
        return 2;
    }
    r = rank_init(&rank, argv);
    if (r == 0)
        r = run(&rank);
    if (r == 0 && fclose(steal_ptr(rank.out)) != 0)
        r = -errno;
    rank_deinit(&rank);
    return r != 0;
}

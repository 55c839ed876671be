/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One rank of a training that can be killed anywhere and must still end with the same bits. It works like a careful
 * trainer: all that it computes is a function of zerod's position and of the blob that it stored with its last
 * micro-batch or step. So a repeated micro-batch gives the same bits.
 *
 * The gradients are those of golden/gradients.h. Their seed is stored in the blob, like the position of a data loader.
 * A blob that is lost, too old or too new therefore gives other gradients and other weights, and the test fails.
 *
 * It prints one line on standard output for each event:
 *
 *     start rank R step S micro M attempt A windows W resumed 0|1
 *     weights S HASH                the weights that step S uses
 *     norm S NORM APPLIED LR        result of zerod_step()
 *     gradnorm S NORM               result of zerod_grad_norm()
 *     window S                      a write window was ended
 *     left S                        the rank has left the job, and attaches again
 *     state S.W MASTER EXP_AVG EXP_AVG_SQ COUNTS WEIGHTS
 *                                   before step S, after W windows (--state; one rank of each node)
 *     aborted CODE TEXT             ZEROD_ABORTED, lines of the text joined by " | "; the step is begun again
 *     refused CODE TEXT             ZEROD_REFUSED: exit 3
 *     fatal STATUS TEXT             a fatal error: exit 4
 *     wrong TEXT                    the trainer's own checks: exit 5
 *     final MASTER EXP_AVG EXP_AVG_SQ WEIGHTS
 *     done
 */

#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <time.h>
#include <unistd.h>

#include <zerod/client.h>

#include "tests/golden/gradients.h"
#include "tests/programs/trainer-memory.h"

enum {
    MAX_ACTIONS = 8,
    MAX_PASSES = 3,
    CHUNK = 5,
    MAX_HELD = 6,
    EXIT_REFUSED = 3,
    EXIT_FATAL = 4,
    EXIT_WRONG = 5,
    AGAIN = 100
};

/* Odd sizes, one element, no element, larger than a bucket, mixed types, two groups, one frozen. */
static const struct {
    const char *name;
    enum zerod_dtype dtype, grad_dtype;
    unsigned ndim;
    uint64_t shape[3];
    unsigned group;
    bool frozen;
} model[] = {
    {"embed", ZEROD_F32, ZEROD_F32, 2, {67, 13}, 0, false},
    {"position", ZEROD_F32, ZEROD_F32, 2, {10, 10}, 0, true},
    {"scale", ZEROD_F32, ZEROD_F32, 0, {0}, 0, false},
    {"empty", ZEROD_F32, ZEROD_F32, 2, {0, 4}, 0, false},
    {"block.w1", ZEROD_F32, ZEROD_F32, 2, {129, 33}, 0, false},
    {"block.b1", ZEROD_F32, ZEROD_F32, 1, {129}, 0, false},
    {"block.w2", ZEROD_BF16, ZEROD_BF16, 2, {33, 129}, 0, false},
    {"block.b2", ZEROD_BF16, ZEROD_BF16, 1, {33}, 0, false},
    {"half", ZEROD_F16, ZEROD_F32, 3, {3, 5, 11}, 0, false},
    {"norm.w", ZEROD_F32, ZEROD_F32, 1, {63}, 1, false},
    {"norm.b", ZEROD_F32, ZEROD_F32, 1, {64}, 1, false},
    {"tiny.0", ZEROD_F32, ZEROD_F32, 1, {1}, 0, false},
    {"tiny.1", ZEROD_F32, ZEROD_F32, 1, {2}, 0, false},
    {"tiny.2", ZEROD_F32, ZEROD_F32, 1, {3}, 0, false},
    {"head", ZEROD_F32, ZEROD_F32, 2, {257, 7}, 0, false},
};

enum { N_PARAMS = sizeof(model) / sizeof(model[0]), MAX_ELEMS = 129 * 33 };

enum place { AT_PUSH, AT_END, AT_STEP, AT_WINDOW };

/* --at STEP.MICRO.WHERE:WHAT, an action that is done once. micro is ignored before the step and inside a window. */
struct action {
    uint64_t step;
    unsigned micro;
    enum place place;
    unsigned index; /* AT_PUSH: number of earlier pushes in the micro-batch */
    char what[16];
    unsigned long number;
    bool done;
};

/* The contents of the blob. */
struct progress {
    uint64_t n_done;   /* micro-batches of the whole run */
    uint64_t rng;      /* seed of the next micro-batch's gradients */
    uint64_t rng_step; /* rng at the start of the step, which an abort restores */
};

struct trainer {
    struct zerod_options options;
    uint64_t n_steps, seed, window_every;
    unsigned n_micro, max_windows; /* most windows between two steps */
    bool writes;                   /* also writes state inside windows */
    bool holds;                    /* stage 3: keeps parameters gathered over pushes and steps, as hooks do */
    bool says_state, is_first;     /* is_first: the node's first rank */
    bool leaves;                   /* leaves right after the last step; reads nothing from other nodes */
    uint64_t again_every;          /* leaves and attaches again before every such step; 0: never */
    bool trains_anew;              /* begins another run, an equal one, after the first */
    bool accumulate;
    bool any_blob; /* trains no step, and so needs no blob */
    /* Moments of the optimizer: "m" exp_avg, "v" exp_avg_sq; "muon": exp_avg for matrices, both for others. */
    const char *moments;
    struct action actions[MAX_ACTIONS];
    size_t n_actions;

    struct zerod *client;
    struct progress progress;
    uint64_t hashes[N_PARAMS]; /* of the weights that step hashed_step uses */
    uint64_t hashed_step;
    uint64_t again_step;                      /* last step before which it left */
    unsigned held[MAX_HELD], n_held, n_holds; /* gathered parameters, the oldest first */
    bool differs, omits;                      /* it does not repeat its predecessor's pushes: other bits, or fewer */
    float values[MAX_ELEMS];
    uint8_t bytes[MAX_ELEMS * sizeof(float)];
};

/* ---- what it says -------------------------------------------------------------------------------------- */

static void say_error(const char *word, int number, const char *text)
{
    printf("%s %d ", word, number);
    for (; *text; text++) {
        if (*text == '\n')
            fputs(" | ", stdout);
        else
            putchar(*text);
    }
    putchar('\n');
}

/* Prints the error of a call. Return: the exit status for it. */
static int say_end(const struct trainer *t, int r)
{
    const struct zerod_error *e = zerod_error(t->client);

    if (r == 0)
        return EXIT_SUCCESS;
    if (r == EXIT_WRONG)
        return r;
    say_error(r == ZEROD_REFUSED ? "refused" : "fatal", r == ZEROD_REFUSED ? e->code : r, e->text);
    return r == ZEROD_REFUSED ? EXIT_REFUSED : EXIT_FATAL;
}

static int wrong(const char *text)
{
    printf("wrong %s\n", text);
    return EXIT_WRONG;
}

/* FNV-1a, 64 bits. */
static uint64_t hash(uint64_t h, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data;

    for (size_t i = 0; i < n_bytes; i++)
        h = (h ^ bytes[i]) * UINT64_C(0x100000001b3);
    return h;
}

#define HASH_START UINT64_C(0xcbf29ce484222325)

/* ---- the model ----------------------------------------------------------------------------------------- */

static size_t n_elems(unsigned param)
{
    size_t n = 1;

    for (unsigned i = 0; i < model[param].ndim; i++)
        n *= model[param].shape[i];
    return n;
}

static size_t dtype_bytes(enum zerod_dtype dtype)
{
    return dtype == ZEROD_F32 ? 4 : 2;
}

static size_t weight_bytes(unsigned param)
{
    return n_elems(param) * dtype_bytes(model[param].dtype);
}

/* Fills dst with n values of that key in a dtype. */
static void generate(uint64_t key, enum zerod_dtype dtype, void *dst, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float value = gradient_value(key, i);

        if (dtype == ZEROD_F32)
            ((float *)dst)[i] = value;
        else
            ((uint16_t *)dst)[i] = dtype == ZEROD_BF16 ? gradient_to_bf16(value) : gradient_to_fp16(value);
    }
}

/* Some parameters get no gradient on some ranks, so that their bucket is not full when the backward ends. */
static bool is_missing(const struct trainer *t, uint64_t step, unsigned micro, unsigned param)
{
    return (step + 3 * micro + 5 * param + (unsigned)t->options.rank) % 23 == 7;
}

static unsigned n_passes(const struct trainer *t, uint64_t step, unsigned param)
{
    return t->accumulate && (step + param) % 4 == 0 ? 1 + (unsigned)(step + param) / 4 % MAX_PASSES : 1;
}

/* Return: whether Muon updates the parameter. */
static bool is_muons(const struct trainer *t, unsigned param)
{
    return strcmp(t->moments, "muon") == 0 && model[param].ndim == 2 && !model[param].frozen;
}

/* ---- attaching ----------------------------------------------------------------------------------------- */

static int declare(struct trainer *t)
{
    static _Alignas(4) uint8_t init[N_PARAMS][MAX_ELEMS * sizeof(float)]; /* until the job is formed */

    for (unsigned i = 0; i < N_PARAMS; i++) {
        int r;

        generate(gradient_weights_key(t->seed, i), model[i].dtype, init[i], n_elems(i));
        r = memory_declare(t->client, t->options.rank,
                           &(struct zerod_param){
                               .name = model[i].name,
                               .dtype = model[i].dtype,
                               .grad_dtype = model[i].grad_dtype,
                               .ndim = model[i].ndim,
                               .shape = model[i].shape,
                               .group = model[i].group,
                               .trainable = !model[i].frozen,
                               .muon = is_muons(t, i),
                               .init = t->options.rank == 0 ? init[i] : NULL,
                           },
                           weight_bytes(i));
        if (r)
            return r;
    }
    return 0;
}

/* Reads the last blob of this rank's predecessors. It must agree with zerod's position. */
static int resume(struct trainer *t, struct zerod_position at)
{
    uint64_t n_done = at.step * t->n_micro + at.micro_batch;
    const void *blob;
    size_t n_bytes;
    int r = zerod_user_state(t->client, &blob, &n_bytes);

    if (r)
        return r;
    t->progress = (struct progress){.n_done = n_done, .rng = t->seed, .rng_step = t->seed};
    if (!blob)
        return n_done == 0 || t->any_blob ? 0 : wrong("there is no blob");
    if (n_bytes != sizeof(t->progress))
        return wrong("the blob has another size");
    memcpy(&t->progress, blob, n_bytes);
    return t->progress.n_done == n_done ? 0 : wrong("the blob is of another micro-batch");
}

static int attach(struct trainer *t)
{
    struct zerod_position at;
    int r = zerod_connect(&t->client, &t->options), resumed;

    if (r == 0)
        r = declare(t);
    if (r == 0)
        r = zerod_form(t->client);
    if (r != 0 && r != ZEROD_RESUMED)
        return r;
    resumed = r == ZEROD_RESUMED;
    at = zerod_epoch(t->client);
    /*
     * A successor does not know after which step its predecessor left, so it never leaves and attaches again. Only at
     * step 0 it may, because a rank that resumes there has lost the daemon while the job was formed.
     */
    if (resumed && at.step > 0 && !(t->options.flags & (ZEROD_AGAIN | ZEROD_ANEW))) {
        t->again_every = 0;
        t->trains_anew = false;
    }
    printf("start rank %d step %" PRIu64 " micro %u attempt %u windows %u resumed %d\n", t->options.rank, at.step,
           at.micro_batch, at.attempt, at.n_windows, resumed);
    return resume(t, at);
}

/* Leaves and attaches again from the same process. flag: ZEROD_AGAIN or ZEROD_ANEW. */
static int attach_again(struct trainer *t, unsigned flag)
{
    int r = zerod_leave(t->client);

    if (r)
        return r;
    printf("left %" PRIu64 "\n", zerod_epoch(t->client).step);
    zerod_close(t->client);
    t->client = NULL;
    t->n_held = 0;
    t->hashed_step = UINT64_MAX;
    t->options.flags = (t->options.flags & ~(unsigned)(ZEROD_AGAIN | ZEROD_ANEW)) | flag;
    return attach(t);
}

/* ---- things that happen once --------------------------------------------------------------------------- */

static void sleep_ms(unsigned long ms)
{
    nanosleep(&(struct timespec){.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000}, NULL);
}

/* Forks like a data loader: the child inherits the connection and outlives its parent. */
static void fork_worker(struct trainer *t)
{
    pid_t pid = fork();

    if (pid == 0) {
        int r = zerod_begin_backward(t->client, NULL);

        printf("child %d %d\n", getpid(), r);
        sleep_ms(60000);
        _exit(0);
    }
}

static bool has_moment(const struct trainer *t, enum zerod_state which, unsigned param)
{
    if (strcmp(t->moments, "muon") == 0)
        return which == ZEROD_EXP_AVG || !is_muons(t, param);
    return strchr(t->moments, which == ZEROD_EXP_AVG ? 'm' : 'v') != NULL;
}

/* Writes one state of a parameter into the open window: values of that key, or a step count. */
static int write_state(struct trainer *t, unsigned param, enum zerod_state which, uint64_t key)
{
    double count = (double)(key % 1000);

    if (which == ZEROD_STEP_COUNT)
        return zerod_write_state(t->client, param, which, &count);
    for (size_t i = 0; i < n_elems(param); i++) {
        t->values[i] = gradient_value(key, i) * 0.01F;
        if (which == ZEROD_EXP_AVG_SQ)
            t->values[i] *= t->values[i];
    }
    return zerod_write_state(t->client, param, which, t->values);
}

/* Return: whether window w before that step writes this state. Each window writes another part. */
static bool is_written(uint64_t step, unsigned w, unsigned param, enum zerod_state which)
{
    return (param + 2 * which + w + step) % 5 < 2;
}

static int write_states(struct trainer *t, uint64_t step, unsigned w, uint64_t key)
{
    int r = 0;

    for (unsigned i = 0; r == 0 && i < N_PARAMS; i++) {
        if (model[i].frozen)
            continue;
        for (unsigned which = ZEROD_MASTER; r == 0 && which <= ZEROD_STEP_COUNT; which++)
            if (which != ZEROD_GRAD_NORM && is_written(step, w, i, which) &&
                (which == ZEROD_MASTER || which == ZEROD_STEP_COUNT || has_moment(t, which, i)))
                r = write_state(t, i, which, gradient_mix(key + i * 8 + which));
    }
    return r;
}

/* Writes values inside a window that a successor must not find. */
static int scribble(struct trainer *t)
{
    int r = 0;

    for (unsigned i = 0; i < N_PARAMS; i++)
        if (n_elems(i) > 0)
            memset(zerod_window(t->client, i), 0x33, weight_bytes(i));
    for (unsigned w = 0; r == 0 && t->writes && w < 5; w++)
        r = write_states(t, 0, w, 0x33);
    return r;
}

static int act(struct trainer *t, const struct action *action)
{
    printf("action %s\n", action->what);
    if (strcmp(action->what, "die") == 0)
        kill(getpid(), SIGKILL);
    else if (strcmp(action->what, "stop") == 0)
        kill(getpid(), SIGSTOP);
    else if (strcmp(action->what, "sleep") == 0)
        sleep_ms(action->number);
    else if (strcmp(action->what, "differ") == 0)
        t->differs = true;
    else if (strcmp(action->what, "omit") == 0)
        t->omits = true;
    else if (strcmp(action->what, "scribble") == 0)
        return scribble(t);
    else if (strcmp(action->what, "fork") == 0)
        fork_worker(t);
    else if (strcmp(action->what, "abort") == 0)
        return zerod_abort_step(t->client, "the test wants it so") ? ZEROD_REFUSED : ZEROD_ABORTED;
    else if (strcmp(action->what, "abandon") == 0)
        return zerod_abandon_backward(t->client, "the test wants it so") ?: AGAIN;
    else if (strcmp(action->what, "reconnect") == 0) {
        zerod_close(t->client);
        t->client = NULL;
        return attach(t) ?: AGAIN;
    } else if (strcmp(action->what, "leave") == 0) {
        exit(say_end(t, zerod_leave(t->client)));
    } else {
        return wrong("what is this action?");
    }
    return 0;
}

static int act_at(struct trainer *t, struct zerod_position at, enum place place, unsigned index)
{
    for (size_t i = 0; i < t->n_actions; i++) {
        struct action *action = &t->actions[i];
        int r;

        if (action->done || action->step != at.step || action->place != place || action->index != index ||
            (place <= AT_END && action->micro != at.micro_batch))
            continue;
        action->done = true;
        r = act(t, action);
        if (r)
            return r;
    }
    return 0;
}

/* ---- a step -------------------------------------------------------------------------------------------- */

static void hash_weight(struct trainer *t, unsigned param, uint64_t *h)
{
    const void *weight = memory_weight(t->client, param, weight_bytes(param));

    t->hashes[param] = hash(HASH_START, weight, weight_bytes(param));
    *h = hash(*h, &t->hashes[param], sizeof(t->hashes[param]));
}

/* With --overlap: waits for each parameter on its own, as a forward does. In stage 3 a gather waits for all. */
static int hash_each(struct trainer *t, uint64_t *h)
{
    for (unsigned i = 0; i < N_PARAMS; i++) {
        int r = zerod_wait(t->client, &i, 1);

        if (r)
            return r;
        hash_weight(t, i, h);
    }
    return 0;
}

/* Hashes all weights as a trainer sees them. In stage 3 it gathers a few parameters at a time. */
static int hash_weights(struct trainer *t, uint64_t *h)
{
    unsigned ids[CHUNK];
    struct zerod_job job;

    *h = HASH_START;
    if (t->options.flags & ZEROD_OVERLAP_UPDATE && zerod_job(t->client, &job) == 0 && job.stage != 3)
        return hash_each(t, h);
    for (unsigned first = 0; first < N_PARAMS; first += CHUNK) {
        unsigned n = 0;
        int r;

        while (n < CHUNK && first + n < N_PARAMS) {
            ids[n] = first + n;
            n++;
        }
        r = zerod_gather(t->client, ids, n);
        if (r)
            return r;
        for (unsigned i = 0; i < n; i++)
            hash_weight(t, ids[i], h);
        r = zerod_release(t->client, ids, n);
        if (r)
            return r;
    }
    return 0;
}

/* Releases the parameter that was gathered first. It must have the weights of this step. */
static int let_go(struct trainer *t, uint64_t step)
{
    unsigned param = t->held[0];
    const void *weight = memory_weight(t->client, param, weight_bytes(param));

    if (t->hashed_step == step && hash(HASH_START, weight, weight_bytes(param)) != t->hashes[param])
        return wrong("a parameter that stayed gathered has other weights");
    memmove(&t->held[0], &t->held[1], --t->n_held * sizeof(t->held[0]));
    return zerod_release(t->client, &param, 1);
}

/* Gathers or releases a parameter between pushes, as the hooks of modules do. */
static int hold_some(struct trainer *t, uint64_t step)
{
    uint64_t any = gradient_mix(t->progress.rng + t->n_held + 16 * (uint64_t)t->options.rank + 1024 * ++t->n_holds);
    unsigned param = (unsigned)(any >> 8) % N_PARAMS;
    int r;

    if (!t->holds)
        return 0;
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL); /* stands for computing; daemons also die meanwhile */
    if (any % 2)
        return 0;
    if (t->n_held == MAX_HELD || (t->n_held > 0 && any % 4))
        return let_go(t, step);
    r = zerod_gather(t->client, &param, 1);
    if (r == 0)
        t->held[t->n_held++] = param;
    return r;
}

static int push(struct trainer *t, struct zerod_position at, unsigned param, unsigned pass)
{
    struct gradient_place place = {.seed = t->progress.rng,
                                   .step = at.step,
                                   .micro = at.micro_batch,
                                   .pass = pass,
                                   .rank = (uint64_t)t->options.rank,
                                   .param = param};
    bool in_place = (param + at.step) % 2 == 0;
    size_t n_bytes = n_elems(param) * (model[param].grad_dtype == ZEROD_F32 ? 4 : 2);
    char site[32];
    void *dst = in_place ? memory_slot(t->client, param, n_bytes) : t->bytes;

    if (!dst)
        return zerod_error(t->client)->status ?: wrong("there is no slot");
    generate(gradient_key(&place), model[param].grad_dtype, dst, n_elems(param));
    if (t->differs && n_elems(param) > 0)
        ((uint8_t *)dst)[0] ^= 1;
    snprintf(site, sizeof(site), "kill-trainer.c:%u", param); /* the next daemon needs this string again */
    return memory_push(
        t->client,
        &(struct zerod_push){
            .param = param, .data = in_place ? NULL : dst, .site = site, .flags = t->holds ? ZEROD_PUSH_MORE : 0},
        n_bytes);
}

/* Pushes in an order that differs on each rank and in each micro-batch. Later passes follow the first. */
static int push_all(struct trainer *t, struct zerod_position at)
{
    uint64_t shuffle = gradient_mix(t->progress.rng ^ (uint64_t)t->options.rank);
    unsigned order[N_PARAMS], n_pushed = 0;
    int r;

    for (unsigned i = 0; i < N_PARAMS; i++) {
        unsigned j = (unsigned)((shuffle = gradient_mix(shuffle)) % (i + 1));

        order[i] = order[j];
        order[j] = N_PARAMS - 1 - i;
    }
    for (unsigned pass = 0; pass < MAX_PASSES; pass++) {
        for (unsigned i = 0; i < N_PARAMS; i++) {
            unsigned param = order[i];

            if (model[param].frozen || is_missing(t, at.step, at.micro_batch, param) ||
                pass >= n_passes(t, at.step, param))
                continue;
            r = act_at(t, at, AT_PUSH, n_pushed++);
            if (r == 0)
                r = hold_some(t, at.step);
            if (r == 0 && !t->omits)
                r = push(t, at, param, pass);
            if (r)
                return r;
        }
    }
    return 0;
}

static int run_micro_batch(struct trainer *t, struct zerod_position at)
{
    struct progress after = t->progress;
    int r = zerod_begin_backward(t->client, NULL);

    if (r == 0)
        r = push_all(t, at);
    if (r == 0)
        r = act_at(t, at, AT_END, 0);
    t->differs = t->omits = false;
    if (r)
        return r;
    after.n_done++;
    after.rng = gradient_mix(after.rng);
    r = zerod_end_backward(t->client, &after, sizeof(after));
    if (r == 0)
        t->progress = after;
    return r;
}

/* Rank 0 writes other weights in a window. The writes of other ranks must not count. */
static int run_window(struct trainer *t, struct zerod_position at)
{
    uint64_t step = at.step;
    unsigned w = at.n_windows;
    int r = zerod_write_begin(t->client);

    for (unsigned i = 0; r == 0 && i < N_PARAMS; i++) {
        uint64_t key = gradient_weights_key(t->seed + step + 1000 * w, i);
        uint8_t *dst = zerod_window(t->client, i);

        if (!dst)
            return wrong("there is no window");
        if (t->options.rank != 0 && n_elems(i) > 0)
            memset(dst, 0x55, weight_bytes(i));
        if (t->options.rank == 0 && (i + step + w) % 3 != 0)
            generate(key, model[i].dtype, dst, n_elems(i));
    }
    if (r == 0 && t->writes) /* the daemon checks the writes of other ranks too, but drops them */
        r = write_states(t, step, w, gradient_mix(t->seed + step * 64 + w * 8 + (uint64_t)t->options.rank));
    if (r == 0)
        r = act_at(t, at, AT_WINDOW, 0);
    if (r == 0)
        r = (step / t->window_every + w) % 3 == 2 ? zerod_write_forget(t->client) : zerod_write_end(t->client);
    if (r == 0)
        printf("window %" PRIu64 "\n", step);
    return r;
}

static int finish_step(struct trainer *t, struct zerod_position at)
{
    struct zerod_step_args args = {.found_inf = at.step % 17 == 5};
    struct zerod_step_result result;
    double norm;
    int r = act_at(t, at, AT_STEP, 0);

    if (r == 0 && at.step % 7 == 3) {
        r = zerod_grad_norm(t->client, &norm);
        if (r == 0)
            printf("gradnorm %" PRIu64 " %a\n", at.step, norm);
    }
    if (r)
        return r;
    /* Every other step stores its own blob. After the other steps a successor gets the last micro-batch's blob. */
    t->progress.rng_step = t->progress.rng;
    if (at.step % 2 == 0) {
        t->progress.rng = t->progress.rng_step = gradient_mix(t->progress.rng ^ at.step);
        args.blob = &t->progress;
        args.blob_len = sizeof(t->progress);
    }
    r = zerod_step(t->client, &args, &result);
    if (r)
        return r;
    printf("norm %" PRIu64 " %a %d %a\n", at.step, result.grad_norm, result.applied, result.lr);
    return result.epoch == at.step + 1 ? 0 : wrong("the epoch after the step");
}

static int say_weights(struct trainer *t, struct zerod_position at)
{
    uint64_t h;
    int r = hash_weights(t, &h);

    if (r == 0)
        printf("weights %" PRIu64 " %016" PRIx64 "\n", at.step, h);
    return r;
}

/*
 * Hashes one state. With part it hashes only a part: the parameters that the last window wrote, and some others that
 * depend on the position.
 */
static int hash_state(struct trainer *t, enum zerod_state which, const struct zerod_position *part, uint64_t *h)
{
    *h = HASH_START;
    for (unsigned i = 0; i < N_PARAMS; i++) {
        size_t n_bytes = which == ZEROD_STEP_COUNT ? sizeof(double) : n_elems(i) * sizeof(float);
        int r;

        if ((model[i].frozen && which != ZEROD_MASTER) ||
            ((which == ZEROD_EXP_AVG || which == ZEROD_EXP_AVG_SQ) && !has_moment(t, which, i)))
            continue;
        if (part && which != ZEROD_STEP_COUNT && (i + part->step + part->n_windows) % 4 != 0 &&
            !(part->n_windows > 0 && is_written(part->step, part->n_windows - 1, i, which)))
            continue;
        memset(t->values, 0, sizeof(t->values));
        r = zerod_read_state(t->client, i, which, t->values);
        if (r)
            return r;
        *h = hash(*h, t->values, n_bytes);
    }
    return 0;
}

/* Prints hashes of the job's state before a step. A read takes long, so they cover only a part of the state. */
static int say_state(struct trainer *t, struct zerod_position at)
{
    static const enum zerod_state all[] = {ZEROD_MASTER, ZEROD_EXP_AVG, ZEROD_EXP_AVG_SQ, ZEROD_STEP_COUNT};
    uint64_t h[5];
    int r = 0;

    for (unsigned i = 0; r == 0 && i < 4; i++)
        r = hash_state(t, all[i], &at, &h[i]);
    if (r == 0)
        r = hash_weights(t, &h[4]);
    if (r == 0)
        printf("state %" PRIu64 ".%u %016" PRIx64 " %016" PRIx64 " %016" PRIx64 " %016" PRIx64 " %016" PRIx64 "\n",
               at.step, at.n_windows, h[0], h[1], h[2], h[3], h[4]);
    return r;
}

/* Prints the weights, and perhaps the state, that step at.step uses. */
static int say_where(struct trainer *t, struct zerod_position at)
{
    int r = say_weights(t, at);

    t->hashed_step = r == 0 ? at.step : UINT64_MAX;
    if (r == 0 && t->says_state)
        r = say_state(t, zerod_epoch(t->client));
    return r;
}

/* Return: the number of windows between the previous step and this one. */
static unsigned n_windows(const struct trainer *t, uint64_t step)
{
    if (!t->window_every || step % t->window_every != 0)
        return 0;
    return 1 + (unsigned)(step / t->window_every) % t->max_windows;
}

static int run_windows(struct trainer *t)
{
    struct zerod_position at = zerod_epoch(t->client);
    int r = 0;

    while (r == 0 && at.n_windows < n_windows(t, at.step)) {
        if (t->says_state)
            r = say_state(t, at);
        if (r == 0)
            r = run_window(t, at);
        at = zerod_epoch(t->client);
    }
    return r;
}

static int run_step(struct trainer *t, struct zerod_position at)
{
    /* In some steps the backward follows the update at once. */
    bool late = t->options.flags & ZEROD_OVERLAP_UPDATE && at.step % 3 == 1;
    int r = 0;

    if (at.micro_batch == 0)
        r = run_windows(t);
    if (r == 0 && !late)
        r = say_where(t, at);
    while (r == 0 && zerod_epoch(t->client).micro_batch < t->n_micro)
        r = run_micro_batch(t, zerod_epoch(t->client));
    if (r == 0 && late)
        r = say_where(t, at);
    return r ? r : finish_step(t, at);
}

/* Return: whether to leave and attach again before this step. */
static bool is_to_leave(const struct trainer *t, struct zerod_position at)
{
    return t->again_every && at.step > 0 && at.step % t->again_every == 0 && at.micro_batch == 0 &&
           at.step != t->again_step;
}

static int train(struct trainer *t)
{
    for (;;) {
        struct zerod_position at = zerod_epoch(t->client);
        struct progress before = t->progress;
        int r;

        if (at.step >= t->n_steps)
            return 0;
        if (t->progress.n_done != at.step * t->n_micro + at.micro_batch)
            return wrong("lost count of the micro-batches");
        if (is_to_leave(t, at)) {
            r = attach_again(t, ZEROD_AGAIN);
            if (r)
                return r;
            t->again_step = at.step;
            continue;
        }
        if (at.micro_batch == 0)
            t->progress.rng_step = before.rng_step = t->progress.rng;
        r = run_step(t, at);
        if (r == ZEROD_ABORTED) {
            say_error("aborted", zerod_error(t->client)->code, zerod_error(t->client)->text);
            t->progress = (struct progress){.n_done = zerod_epoch(t->client).step * t->n_micro,
                                            .rng = before.rng_step,
                                            .rng_step = before.rng_step};
        } else if (r && r != AGAIN) {
            return r;
        }
    }
}

/* ---- the end ------------------------------------------------------------------------------------------- */

/* In stage 3 the weights are not read after leaves, because other nodes' daemons may have ended. */
static int say_last_weights(struct trainer *t)
{
    struct zerod_job job;
    int r = zerod_job(t->client, &job);

    if (r || (t->leaves && job.stage == 3))
        return r;
    return say_weights(t, zerod_epoch(t->client));
}

static int say_end_of_run(struct trainer *t)
{
    uint64_t master, exp_avg = 0, exp_avg_sq = 0, weights;
    int r = hash_state(t, ZEROD_MASTER, NULL, &master);

    if (r == 0 && t->says_state)
        r = say_state(t, zerod_epoch(t->client));
    if (r == 0)
        r = hash_state(t, ZEROD_EXP_AVG, NULL, &exp_avg);
    if (r == 0)
        r = hash_state(t, ZEROD_EXP_AVG_SQ, NULL, &exp_avg_sq);
    if (r == 0)
        r = hash_weights(t, &weights);
    if (r == 0)
        printf("final %016" PRIx64 " %016" PRIx64 " %016" PRIx64 " %016" PRIx64 "\n", master, exp_avg, exp_avg_sq,
               weights);
    return r;
}

static int run(struct trainer *t)
{
    int r = train(t);

    if (r == 0)
        r = say_last_weights(t);
    if (r == 0 && !t->leaves)
        r = say_end_of_run(t);
    return r;
}

static int run_all(struct trainer *t)
{
    int r = run(t);

    if (r == 0 && t->trains_anew)
        r = attach_again(t, ZEROD_ANEW);
    if (r == 0 && t->trains_anew)
        r = run(t);
    if (r == 0)
        r = zerod_leave(t->client);
    if (r == 0)
        printf("done\n");
    return r;
}

static bool parse_action(struct trainer *t, const char *text)
{
    struct action *action = &t->actions[t->n_actions];
    char where[16];
    int n = 0;

    if (t->n_actions == MAX_ACTIONS ||
        sscanf(text, "%" SCNu64 ".%u.%15[^:]:%15[^=]%n", &action->step, &action->micro, where, action->what, &n) < 4)
        return false;
    if (text[n] == '=')
        action->number = strtoul(text + n + 1, NULL, 10);
    action->place = strcmp(where, "end") == 0      ? AT_END
                    : strcmp(where, "step") == 0   ? AT_STEP
                    : strcmp(where, "window") == 0 ? AT_WINDOW
                                                   : AT_PUSH;
    if (action->place == AT_PUSH)
        action->index = (unsigned)strtoul(where, NULL, 10);
    t->n_actions++;
    return true;
}

static int parse(struct trainer *t, int argc, char **argv)
{
    static const struct option options[] = {
        {"steps", required_argument, NULL, 's'},
        {"micro", required_argument, NULL, 'm'},
        {"seed", required_argument, NULL, 'e'},
        {"window", required_argument, NULL, 'w'},
        {"accumulate", no_argument, NULL, 'a'},
        {"any-blob", no_argument, NULL, 'b'},
        {"at", required_argument, NULL, 't'},
        {"timeout", required_argument, NULL, 'o'},
        {"moments", required_argument, NULL, 'v'},
        {"overlap", no_argument, NULL, 'l'},
        {"windows", required_argument, NULL, 'W'},
        {"writes", no_argument, NULL, 'i'},
        {"hold", no_argument, NULL, 'h'},
        {"state", no_argument, NULL, 'S'},
        {"leave", no_argument, NULL, 'L'},
        {"again", required_argument, NULL, 'A'},
        {"anew", no_argument, NULL, 'N'},
        {"from-gpu", no_argument, NULL, 'g'}, /* only declares a GPU; this program has none */
        {0},
    };
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 's')
            t->n_steps = strtoull(optarg, NULL, 10);
        else if (option == 'm')
            t->n_micro = (unsigned)strtoul(optarg, NULL, 10);
        else if (option == 'e')
            t->seed = strtoull(optarg, NULL, 10);
        else if (option == 'w')
            t->window_every = strtoull(optarg, NULL, 10);
        else if (option == 'o')
            t->options.timeout_ms = atoi(optarg);
        else if (option == 'v')
            t->moments = optarg;
        else if (option == 'W')
            t->max_windows = (unsigned)strtoul(optarg, NULL, 10);
        else if (option == 'i')
            t->writes = true;
        else if (option == 'h')
            t->holds = true;
        else if (option == 'S')
            t->says_state = t->is_first;
        else if (option == 'L')
            t->leaves = true;
        else if (option == 'A')
            t->again_every = strtoull(optarg, NULL, 10);
        else if (option == 'N')
            t->trains_anew = true;
        else if (option == 'a')
            t->accumulate = true;
        else if (option == 'b')
            t->any_blob = true;
        else if (option == 'l')
            t->options.flags |= ZEROD_OVERLAP_UPDATE;
        else if (option == 'g')
            t->options.flags |= ZEROD_COPIES_FROM_GPU;
        else if (option != 't' || !parse_action(t, optarg))
            return -1;
    }
    return optind == argc && t->n_micro > 0 && t->max_windows > 0 ? 0 : -1;
}

int main(int argc, char **argv)
{
    static struct trainer t = {
        .n_steps = 20, .n_micro = 2, .max_windows = 1, .hashed_step = UINT64_MAX, .seed = 1, .moments = "mv"};
    const char *rank = getenv("RANK"), *local_rank = getenv("LOCAL_RANK") ?: rank;
    int r;

    setvbuf(stdout, NULL, _IOLBF, 0);
    t.options.rank = rank ? atoi(rank) : 0;
    t.is_first = !local_rank || atoi(local_rank) == 0;
    if (parse(&t, argc, argv) < 0) {
        fprintf(stderr,
                "usage: kill-trainer [--steps N] [--micro N] [--seed N] [--window N] [--accumulate] [--any-blob]\n"
                "                    [--windows N] [--writes] [--hold] [--state] [--leave] [--again N] [--anew] "
                "[--overlap] [--from-gpu] "
                "[--timeout MS] "
                "[--moments m|v|mv|none|muon] [--at "
                "STEP.MICRO.(N|end|step|window):ACTION[=N]]...\n");
        return EX_USAGE;
    }
    if (t.accumulate)
        t.options.on_duplicate = ZEROD_ON_DUPLICATE_ACCUMULATE;
    r = attach(&t);
    if (r == 0)
        r = run_all(&t);
    r = say_end(&t, r);
    zerod_close(t.client);
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One rank of the benchmarks. In each iteration it makes fresh gradients, starts together with all ranks, pushes by
 * copy (or from the slot), ends the backward and makes a step. It prints one line of JSON per iteration with
 * CLOCK_MONOTONIC times in ns, which are comparable between processes.
 *
 *     bench-rank --rank R --socket PATH --elems N --params P [--iterations I | --on-demand]
 *                [--buffer-elems B] [--compute-us U] [--in-slot] [--gather]
 *                [--bf16 | --bf16-gradients] [--sleeps --forward-us F --copy-mb-per-s M --spike N]
 *
 * --on-demand: makes an iteration for each line on standard input, so that processes can take turns. The line "sample
 * N" is answered with each N-th weight, if weights are fp32, as a line of JSON.
 * --in-slot: gradients are computed in their slots before an iteration begins, so the ring must have room for all of
 * them. With --on-demand a rank prints "filled" when its slots are filled, and begins at the next line.
 * --buffer-elems: gradients of at most B elements are kept and pushed repeatedly within one iteration, for models with
 * which the machine has no room for the gradients of all ranks.
 * --gather: for stage 3; all parameters are gathered once and never released.
 * --bf16: weights and gradients are bf16; --bf16-gradients: only gradients are bf16. By default both are fp32.
 * --sleeps: needs --in-slot. The rank behaves like a rank with a GPU, which leaves the cores to the daemon, and with
 * overlap_update. It sleeps F us for the forward, in which each parameter waits for its weights and for their copy to
 * the GPU, and --compute-us for each parameter's backward. It pushes a gradient when the copy to the host would be done.
 * The iteration ends when the step is decided. Each direction copies M MB/s. The forward's ns are "forward", because
 * slots are filled after the forward and before "start". The line "wait" waits until all weights are written, and is
 * answered with that time, "there".
 * --spike: each N-th iteration has gradients that are 16 times as large.
 */

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <zerod/client.h>

struct options {
    int rank;
    const char *socket;
    uint64_t n_elems;        /* elements of the model */
    uint64_t n_buffer_elems; /* elements of gradients that are made for each iteration */
    unsigned n_params;       /* parameters of equal size */
    unsigned n_iterations;
    unsigned compute_us; /* pretended backward of each parameter */
    bool in_slot;
    bool on_demand;
    bool gather;
    bool bf16, bf16_gradients;
    bool sleeps;
    unsigned forward_us;
    unsigned copy_mb_per_s; /* 0: copies take no time */
    unsigned spike;         /* 0: no iteration has large gradients */
};

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int fail(const struct zerod *c, const char *what)
{
    fprintf(stderr, "bench-rank: %s: %s\n", what, zerod_error(c)->text);
    return 1;
}

static struct options parse(int argc, char **argv)
{
    static const struct option longs[] = {
        {"rank", 1, NULL, 'r'},
        {"socket", 1, NULL, 's'},
        {"elems", 1, NULL, 'e'},
        {"params", 1, NULL, 'p'},
        {"iterations", 1, NULL, 'i'},
        {"compute-us", 1, NULL, 'c'},
        {"in-slot", 0, NULL, 'd'},
        {"buffer-elems", 1, NULL, 'b'},
        {"on-demand", 0, NULL, 'o'},
        {"gather", 0, NULL, 'g'},
        {"bf16", 0, NULL, 'h'},
        {"bf16-gradients", 0, NULL, 'H'},
        {"sleeps", 0, NULL, 'S'},
        {"forward-us", 1, NULL, 'f'},
        {"copy-mb-per-s", 1, NULL, 'm'},
        {"spike", 1, NULL, 'k'},
        {0},
    };
    struct options o = {.n_elems = 1 << 20, .n_buffer_elems = UINT64_MAX, .n_params = 16, .n_iterations = 5};
    int c;

    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        switch (c) {
        case 'r':
            o.rank = atoi(optarg);
            break;
        case 's':
            o.socket = optarg;
            break;
        case 'e':
            o.n_elems = strtoull(optarg, NULL, 0);
            break;
        case 'p':
            o.n_params = (unsigned)atoi(optarg);
            break;
        case 'i':
            o.n_iterations = (unsigned)atoi(optarg);
            break;
        case 'c':
            o.compute_us = (unsigned)atoi(optarg);
            break;
        case 'd':
            o.in_slot = true;
            break;
        case 'b':
            o.n_buffer_elems = strtoull(optarg, NULL, 0);
            break;
        case 'o':
            o.on_demand = true;
            break;
        case 'g':
            o.gather = true;
            break;
        case 'h':
            o.bf16 = o.bf16_gradients = true;
            break;
        case 'H':
            o.bf16_gradients = true;
            break;
        case 'S':
            o.sleeps = true;
            break;
        case 'f':
            o.forward_us = (unsigned)atoi(optarg);
            break;
        case 'm':
            o.copy_mb_per_s = (unsigned)atoi(optarg);
            break;
        case 'k':
            o.spike = (unsigned)atoi(optarg);
            break;
        default:
            exit(64);
        }
    }
    if (o.n_params == 0 || o.n_elems < o.n_params) {
        fprintf(stderr, "bench-rank: --params is to be from 1 to --elems\n");
        exit(64);
    }
    /* A parameter is pushed in one piece. */
    if (o.n_buffer_elems > o.n_elems)
        o.n_buffer_elems = o.n_elems;
    if (o.n_buffer_elems < o.n_elems / o.n_params)
        o.n_buffer_elems = o.n_elems / o.n_params;
    return o;
}

static int declare(struct zerod *c, const struct options *o)
{
    uint64_t shape = o->n_elems / o->n_params;
    enum zerod_dtype dtype = o->bf16 ? ZEROD_BF16 : ZEROD_F32;
    enum zerod_dtype grad_dtype = o->bf16_gradients ? ZEROD_BF16 : ZEROD_F32;
    char name[32];
    int r;

    for (unsigned i = 0; i < o->n_params; i++) {
        snprintf(name, sizeof(name), "layers.%u.weight", i);
        if (zerod_declare(c,
                          &(struct zerod_param){.name = name,
                                                .ndim = 1,
                                                .shape = &shape,
                                                .dtype = dtype,
                                                .grad_dtype = grad_dtype,
                                                .trainable = true},
                          1) != 0)
            return fail(c, "declare");
    }
    r = zerod_form(c);
    return r == 0 || r == ZEROD_RESUMED ? 0 : fail(c, "form");
}

static int gather_all(struct zerod *c, const struct options *o)
{
    unsigned *params = calloc(o->n_params, sizeof(*params));
    int r = -1;

    for (unsigned i = 0; params && i < o->n_params; i++)
        params[i] = i;
    if (params)
        r = zerod_gather(c, params, o->n_params);
    free(params);
    return r == 0 ? 0 : fail(c, "gather");
}

/* Return: a number of either sign, different for each i and seed. It takes a multiplication and a few shifts. */
static float small_number(uint64_t i, uint64_t seed, float scale)
{
    uint32_t x = (uint32_t)(i * 2654435761u + seed * 40503u);

    return (float)(int32_t)(x ^ x >> 15) * scale;
}

/* Writes n fresh gradient elements, those from `first` on. */
static void fill(void *out, uint64_t first, uint64_t n, bool bf16, uint64_t seed, float scale)
{
    float *fp32 = out;
    uint16_t *halves = out;

    for (uint64_t i = 0; !bf16 && i < n; i++)
        fp32[i] = small_number(first + i, seed, scale);
    for (uint64_t i = 0; bf16 && i < n; i++) {
        float x = small_number(first + i, seed, scale);
        uint32_t bits;

        memcpy(&bits, &x, sizeof(bits));
        halves[i] = (uint16_t)(bits >> 16);
    }
}

enum { SEEDS_PER_ITERATION = 64 }; /* one for each rank */

static float scale_of(const struct options *o, uint64_t seed)
{
    uint64_t iteration = seed / SEEDS_PER_ITERATION;

    return o->spike > 0 && iteration % o->spike == o->spike - 1 ? 0x1p-36f : 0x1p-40f;
}

static size_t elem_bytes(const struct options *o)
{
    return o->bf16_gradients ? 2 : 4;
}

static void pretend_to_compute(unsigned us)
{
    uint64_t until = now_ns() + us * 1000u;

    while (us && now_ns() < until)
        ;
}

static void sleep_until(uint64_t ns)
{
    const struct timespec until = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

static uint64_t copy_ns(const struct options *o, uint64_t n_bytes)
{
    return o->copy_mb_per_s ? n_bytes * 1000u / o->copy_mb_per_s : 0;
}

static int fill_slots(struct zerod *c, const struct options *o, uint64_t seed)
{
    uint64_t n = o->n_elems / o->n_params;
    char line[64];

    zerod_begin_backward(c, NULL);
    for (unsigned i = o->n_params; i-- > 0;) {
        void *slot = zerod_slot(c, i);

        if (!slot)
            return fail(c, "slot");
        fill(slot, i * n, n, o->bf16_gradients, seed, scale_of(o, seed));
    }
    if (o->on_demand) {
        puts("filled");
        fflush(stdout);
    }
    return !o->on_demand || fgets(line, sizeof(line), stdin) ? 0 : 1;
}

struct times {
    uint64_t forward; /* duration */
    uint64_t start, pushed, ended, done;
};

/* Pushes the i-th parameter in the order of the backward. */
static int push_from_slot(struct zerod *c, const struct options *o, unsigned i)
{
    return zerod_push(c, &(struct zerod_push){.param = o->n_params - 1 - i});
}

/* Copies the weights of each parameter and computes with them, as two streams of a GPU do. Return: as zerod_wait(). */
static int sleep_through_forward(struct zerod *c, const struct options *o)
{
    uint64_t copied = now_ns(), computed = copied;
    uint64_t each = copy_ns(o, o->n_elems / o->n_params * (o->bf16 ? 2 : 4));
    int r = 0;

    for (unsigned i = 0; r == 0 && i < o->n_params; i++) {
        uint64_t now;

        r = zerod_wait(c, &i, 1);
        now = now_ns();
        copied = (now > copied ? now : copied) + each;
        computed = (copied > computed ? copied : computed) + o->forward_us * UINT64_C(1000) / o->n_params;
    }
    sleep_until(computed);
    return r;
}

/* Computes and pushes all gradients as a GPU does. A GPU's copies run one after another, during the backward. The rank
 * pushes the gradients whose copies are done before it computes the next one. Return: as zerod_push(). */
static int sleep_through_backward(struct zerod *c, const struct options *o)
{
    uint64_t each = copy_ns(o, o->n_elems / o->n_params * elem_bytes(o)), computed = now_ns(), last = 0;
    uint64_t *copied = calloc(o->n_params, sizeof(*copied)); /* when the copy of each gradient ends */
    unsigned n_pushed = 0;
    int r = copied ? 0 : -ENOMEM;

    for (unsigned i = 0; r == 0 && i < o->n_params; i++) {
        computed += o->compute_us * 1000u;
        sleep_until(computed);
        last = copied[i] = (last > computed ? last : computed) + each;
        for (; r == 0 && n_pushed < i && copied[n_pushed] <= now_ns(); n_pushed++)
            r = push_from_slot(c, o, n_pushed);
    }
    for (; r == 0 && n_pushed < o->n_params; n_pushed++) {
        sleep_until(copied[n_pushed]);
        r = push_from_slot(c, o, n_pushed);
    }
    free(copied);
    return r;
}

/* Return: 0; ZEROD_ABORTED if the step must be begun again; 1 after a failure, which was printed. */
static int try_step(struct zerod *c, const struct options *o, uint8_t *grads, uint64_t seed, struct times *times)
{
    uint64_t n = o->n_elems / o->n_params, n_kept = o->n_buffer_elems / n;
    uint64_t began = now_ns();
    double norm;
    int r = o->sleeps ? sleep_through_forward(c, o) : zerod_grad_norm(c, &norm); /* the ranks start together */

    if (r != 0)
        return r == ZEROD_ABORTED ? r : fail(c, "begin");
    times->forward = now_ns() - began;
    if (o->in_slot && fill_slots(c, o, seed) != 0)
        return 1;
    if (times->start == 0) /* a step that is begun again takes longer */
        times->start = now_ns();
    if (!o->in_slot)
        zerod_begin_backward(c, NULL);
    if (o->sleeps)
        r = sleep_through_backward(c, o);
    for (unsigned i = o->n_params; !o->sleeps && r == 0 && i-- > 0;) {
        pretend_to_compute(o->compute_us);
        r = zerod_push(
            c, &(struct zerod_push){.param = i, .data = o->in_slot ? NULL : grads + i % n_kept * n * elem_bytes(o)});
    }
    times->pushed = now_ns();
    if (r == 0)
        r = zerod_end_backward(c, NULL, 0);
    times->ended = now_ns();
    if (r == 0)
        r = zerod_step(c, NULL, NULL);
    times->done = now_ns();
    return r == 0 || r == ZEROD_ABORTED ? r : fail(c, "step");
}

static int iterate(struct zerod *c, const struct options *o, uint8_t *grads, unsigned iteration)
{
    uint64_t seed = (uint64_t)iteration * SEEDS_PER_ITERATION + (unsigned)o->rank;
    struct times times = {0};
    int r;

    if (!o->in_slot)
        fill(grads, 0, o->n_buffer_elems, o->bf16_gradients, seed, scale_of(o, seed));
    do
        r = try_step(c, o, grads, seed, &times);
    while (r == ZEROD_ABORTED);
    if (r != 0)
        return r;
    printf("{\"iteration\": %u, \"rank\": %d, \"forward\": %" PRIu64 ", \"start\": %" PRIu64 ", \"pushed\": %" PRIu64
           ", \"ended\": %" PRIu64 ", \"done\": %" PRIu64 "}\n",
           iteration, o->rank, times.forward, times.start, times.pushed, times.ended, times.done);
    fflush(stdout);
    return 0;
}

/* Prints each stride-th weight of the model. */
static int say_weights(struct zerod *c, const struct options *o, uint64_t stride)
{
    uint64_t n = o->n_elems / o->n_params;

    if (stride == 0 || o->bf16) {
        fprintf(stderr, "bench-rank: only weights of fp32 are said, each N-th of them\n");
        return 1;
    }
    for (uint64_t i = 0; i < n * o->n_params; i += stride) {
        const float *weight = zerod_weight(c, (unsigned)(i / n));

        if (!weight)
            return fail(c, "weight");
        printf("%s%.9g", i == 0 ? "[" : ", ", weight[i % n]);
    }
    puts("]");
    fflush(stdout);
    return 0;
}

static int wait_for_weights(struct zerod *c)
{
    if (zerod_wait(c, NULL, 0) != 0)
        return fail(c, "wait");
    printf("{\"there\": %" PRIu64 "}\n", now_ns());
    fflush(stdout);
    return 0;
}

static int iterate_on_demand(struct zerod *c, const struct options *o, uint8_t *grads)
{
    unsigned iteration = 0;
    char line[64];
    int r = 0;

    puts("ready");
    fflush(stdout);
    while (r == 0 && fgets(line, sizeof(line), stdin)) {
        if (strncmp(line, "sample ", 7) == 0)
            r = say_weights(c, o, strtoull(line + 7, NULL, 10));
        else if (strcmp(line, "wait\n") == 0)
            r = wait_for_weights(c);
        else
            r = iterate(c, o, grads, iteration++);
    }
    return r;
}

int main(int argc, char **argv)
{
    struct options o = parse(argc, argv);
    struct zerod *c;
    uint8_t *grads = mmap(NULL, o.n_buffer_elems * elem_bytes(&o), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    struct zerod_options options = {
        .rank = o.rank, .socket = o.socket, .flags = o.sleeps ? ZEROD_COPIES_FROM_GPU | ZEROD_OVERLAP_UPDATE : 0};
    int r = 0;

    if (grads == MAP_FAILED || zerod_connect(&c, &options) != 0)
        return fail(NULL, "connect");
    if (declare(c, &o) != 0 || (o.gather && gather_all(c, &o) != 0))
        return 1;
    if (o.on_demand)
        r = iterate_on_demand(c, &o, grads);
    for (unsigned i = 0; r == 0 && !o.on_demand && i < o.n_iterations; i++)
        r = iterate(c, &o, grads, i);
    zerod_leave(c);
    zerod_close(c);
    return r;
}

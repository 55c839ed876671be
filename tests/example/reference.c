/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Does the training of --world-size trainers and a zerod in one process, without trainers or zerod: it computes and
 * sums the gradients of all ranks, and reference_step.c applies them. The weights that it dumps must equal the
 * trainers' weights byte for byte.
 *
 * Each rank runs in its own thread, to save time. The threads share only the weights, which do not change while they
 * run.
 */

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "tests/example/model.h"
#include "tests/example/reference_step.h"
#include "tests/example/task.h"
#include "tests/example/text.h"

#define MAX_RANKS 64

struct reference;

struct reference_rank {
    struct reference *owner;
    unsigned rank;
    struct model *model;
    uint8_t *tokens, *targets;
    float **grads; /* n_params */
    float *grad_memory;
    /* The current micro-batch. */
    uint64_t step;
    unsigned micro_batch;
    double loss;
    int r;
};

struct reference {
    struct task task;
    struct text text;
    unsigned n_ranks;
    uint64_t log_every;
    const char *rates_path; /* NULL: the task's lr in all steps */
    double *rates;          /* n_steps */
    struct reference_rank ranks[MAX_RANKS];
    unsigned n_params;
    struct reference_param *params;
    const float **weights; /* n_params; the same as params[i].weight */
    float *memory;
    FILE *report;
};

/* The hooks enter and leave. They do nothing because all weights are always in memory. */
static int on_segment(void *ctx, unsigned segment)
{
    (void)ctx;
    (void)segment;
    return 0;
}

static int on_grad(void *ctx, unsigned param, float **out)
{
    struct reference_rank *k = ctx;

    *out = k->grads[param];
    return 0;
}

static int on_grad_ready(void *ctx, unsigned param)
{
    (void)ctx;
    (void)param;
    return 0;
}

static int rank_micro_batch(struct reference_rank *k)
{
    const struct reference *f = k->owner;
    const struct task *t = &f->task;
    struct model_hooks hooks = {k, on_segment, on_segment, on_grad, on_grad_ready};
    int r;

    r = text_fill(&f->text,
                  &(struct text_batch){
                      .seed = t->seed,
                      .step = k->step,
                      .micro_batch = k->micro_batch,
                      .rank = k->rank,
                      .n_seqs = t->shape.n_seqs,
                      .seq_len = t->shape.seq_len,
                  },
                  k->tokens, k->targets);
    if (r < 0)
        return r;
    r = model_forward(k->model, f->weights, &hooks, k->tokens, k->targets, &k->loss);
    if (r < 0)
        return r;
    return model_backward(k->model, f->weights, &hooks, 1.0 / t->n_micro_batches);
}

static void *rank_thread(void *arg)
{
    struct reference_rank *k = arg;

    k->r = rank_micro_batch(k);
    return NULL;
}

/* Computes all ranks' gradients of one micro-batch. *loss is the loss of rank 0. */
static int compute(struct reference *f, uint64_t step, unsigned micro_batch, double *loss)
{
    pthread_t threads[MAX_RANKS];
    unsigned n_started = 0;
    int r = 0;

    for (; n_started < f->n_ranks && r == 0; n_started++) {
        f->ranks[n_started].step = step;
        f->ranks[n_started].micro_batch = micro_batch;
        r = -pthread_create(&threads[n_started], NULL, rank_thread, &f->ranks[n_started]);
    }
    if (r < 0)
        n_started--;
    for (unsigned i = 0; i < n_started; i++) {
        pthread_join(threads[i], NULL);
        if (r == 0)
            r = f->ranks[i].r;
    }
    *loss = f->ranks[0].loss;
    return r;
}

static void accumulate(struct reference *f)
{
    const float *grads[MAX_RANKS];

    for (unsigned i = 0; i < f->n_params; i++) {
        for (unsigned k = 0; k < f->n_ranks; k++)
            grads[k] = f->ranks[k].grads[i];
        reference_accumulate(f->params[i].acc, grads, f->n_ranks, f->params[i].n_elems);
    }
}

static int step(struct reference *f, uint64_t number, uint64_t *n_applied)
{
    const struct task *t = &f->task;
    struct reference_adamw adamw = {f->rates[number], t->beta1,    t->beta2,       t->eps,
                                    t->weight_decay,  t->max_norm, *n_applied + 1, f->n_ranks};
    double loss = 0, norm = 0;
    bool applied;

    for (unsigned i = 0; i < f->n_params; i++)
        memset(f->params[i].acc, 0, f->params[i].n_elems * sizeof(float));
    for (unsigned m = 0; m < t->n_micro_batches; m++) {
        double part = 0;
        int r = compute(f, number, m, &part);

        if (r < 0)
            return r;
        accumulate(f);
        loss += part / t->n_micro_batches;
    }
    applied = reference_step(f->params, f->n_params, &adamw, &norm);
    *n_applied += applied;

    report_begin(f->report, "step");
    report_count(f->report, "step", number);
    report_number(f->report, "loss", loss);
    report_number(f->report, "grad_norm", norm);
    report_count(f->report, "applied", applied);
    report_end(f->report);
    if ((number + 1) % f->log_every == 0)
        printf("step %4llu/%llu  loss %.3f\n", (unsigned long long)number + 1, (unsigned long long)t->n_steps, loss);
    return 0;
}

static int rank_prepare(struct reference *f, unsigned rank)
{
    struct reference_rank *k = &f->ranks[rank];
    size_t n_tokens = (size_t)f->task.shape.n_seqs * f->task.shape.seq_len, at = 0;
    int r;

    k->owner = f;
    k->rank = rank;
    r = task_new_model(&f->task, &k->model);
    if (r < 0)
        return r;
    k->tokens = malloc(n_tokens);
    k->targets = malloc(n_tokens);
    k->grads = calloc(model_n_params(k->model), sizeof(*k->grads));
    k->grad_memory = malloc(model_n_elems(k->model) * sizeof(float));
    if (!k->tokens || !k->targets || !k->grads || !k->grad_memory)
        return -ENOMEM;
    for (unsigned i = 0; i < model_n_params(k->model); i++) {
        k->grads[i] = k->grad_memory + at;
        at += model_param(k->model, i)->n_elems;
    }
    return 0;
}

static int params_prepare(struct reference *f)
{
    const struct model *m = f->ranks[0].model;
    size_t n_elems = model_n_elems(m), at = 0;

    f->n_params = model_n_params(m);
    f->params = calloc(f->n_params, sizeof(*f->params));
    f->weights = calloc(f->n_params, sizeof(*f->weights));
    f->memory = calloc(n_elems, 4 * sizeof(float));
    if (!f->params || !f->weights || !f->memory)
        return -ENOMEM;
    for (unsigned i = 0; i < f->n_params; i++) {
        size_t n = model_param(m, i)->n_elems;

        f->params[i] = (struct reference_param){n, f->memory + at, f->memory + n_elems + at,
                                                f->memory + 2 * n_elems + at, f->memory + 3 * n_elems + at};
        f->weights[i] = f->params[i].weight;
        model_init_weights(m, f->task.seed, i, f->params[i].weight);
        at += n;
    }
    return 0;
}

/* Reads the learning rates that the daemon's schedule gave, one number a line for each step. */
static int rates_prepare(struct reference *f)
{
    FILE *file;
    uint64_t n = 0;

    f->rates = calloc(f->task.n_steps, sizeof(*f->rates));
    if (!f->rates)
        return -ENOMEM;
    if (!f->rates_path) {
        while (n < f->task.n_steps)
            f->rates[n++] = f->task.lr;
        return 0;
    }
    file = fopen(f->rates_path, "re");
    if (!file)
        return -errno;
    while (n < f->task.n_steps && fscanf(file, "%lf", &f->rates[n]) == 1)
        n++;
    fclose(file);
    if (n == f->task.n_steps)
        return 0;
    fprintf(stderr, "%s: line %llu: a learning rate for each step is needed\n", f->rates_path,
            (unsigned long long)n + 1);
    return -EINVAL;
}

static int prepare(struct reference *f)
{
    int r = rates_prepare(f);

    if (r == 0)
        r = text_load(&f->text, f->task.text_folder);
    if (r < 0)
        return r;
    if (f->task.report_path) {
        f->report = fopen(f->task.report_path, "ae");
        if (!f->report)
            return -errno;
    }
    for (unsigned k = 0; k < f->n_ranks; k++) {
        r = rank_prepare(f, k);
        if (r < 0)
            return r;
    }
    return params_prepare(f);
}

static void clean_up(struct reference *f)
{
    for (unsigned k = 0; k < f->n_ranks; k++) {
        model_free(f->ranks[k].model);
        free(f->ranks[k].tokens);
        free(f->ranks[k].targets);
        free(f->ranks[k].grads);
        free(f->ranks[k].grad_memory);
    }
    free(f->rates);
    free(f->params);
    free(f->weights);
    free(f->memory);
    text_deinit(&f->text);
    if (f->report)
        fclose(f->report);
}

static int run(struct reference *f)
{
    struct model_hooks hooks = {NULL, on_segment, on_segment, on_grad, on_grad_ready};
    uint64_t n_applied = 0;
    int r = prepare(f);

    for (uint64_t s = 0; r == 0 && s < f->task.n_steps; s++)
        r = step(f, s, &n_applied);
    if (r == 0 && f->task.dump_path)
        r = task_dump(&f->task, f->ranks[0].model, f->weights, &hooks);
    if (r < 0)
        fprintf(stderr, "zerod-example-reference: %s\n", strerror(-r));
    clean_up(f);
    return r;
}

/* Return: 0 to continue, 1 if --help was given, -EINVAL on a wrong option. */
static int parse(struct reference *f, int argc, char **argv)
{
    enum { HELP = 1, WORLD_SIZE, LOG_EVERY, LR_FILE };
    static const struct option options[] = {
        {"help", no_argument, NULL, HELP},
        {"world-size", required_argument, NULL, WORLD_SIZE},
        {"log-every", required_argument, NULL, LOG_EVERY},
        {"lr-file", required_argument, NULL, LR_FILE},
        TASK_LONG_OPTIONS,
        {0},
    };
    uint64_t n = 0;
    int option, r;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case HELP:
            printf("Usage: zerod-example-reference [OPTION]...\n"
                   "Trains as N zerod-example trainers and a zerod would, in one process.\n\n"
                   "  --world-size N       ranks (2)\n"
                   "  --log-every N        steps between two lines (10)\n"
                   "  --lr-file FILE       the learning rate of each step, one a line, instead of --lr\n%s",
                   task_help);
            return 1;
        case WORLD_SIZE:
            r = task_parse_count("world-size", optarg, 1, MAX_RANKS, &n);
            f->n_ranks = (unsigned)n;
            break;
        case LOG_EVERY:
            r = task_parse_count("log-every", optarg, 1, UINT32_MAX, &f->log_every);
            break;
        case LR_FILE:
            f->rates_path = optarg;
            r = 0;
            break;
        default:
            r = option == '?' ? -EINVAL : task_take(&f->task, option, optarg);
        }
        if (r < 0)
            return r;
    }
    if (optind < argc) {
        fprintf(stderr, "zerod-example-reference: what is \"%s\"?\n", argv[optind]);
        return -EINVAL;
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct reference *f = calloc(1, sizeof(*f));
    int r;

    if (!f)
        return EX_OSERR;
    task_init(&f->task);
    f->n_ranks = 2;
    f->log_every = 10;
    setvbuf(stdout, NULL, _IOLBF, 0);
    r = parse(f, argc, argv);
    if (r == 0)
        r = run(f) < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
    else
        r = r < 0 ? EX_USAGE : EXIT_SUCCESS;
    free(f);
    return r;
}

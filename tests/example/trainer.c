/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One rank of a training whose optimizer is in zerod. It reads text, computes losses and gradients (model.c), and
 * leaves the rest to the daemon.
 *
 * Read main() last. Start with attach(), train(), train_step() and train_micro_batch(), in this order. The four hooks
 * before them are what the model calls while it computes. The weights are in zerod's memory and the gradients are
 * written straight into zerod's slots, so this process has no copy of either. With --device cuda weights and gradients
 * are in memory of a GPU; because this model computes on the host, it then needs copies (struct on_gpu).
 *
 * A trainer may be killed at any time and started again with the same options. zerod reports the position to continue
 * from, and a batch depends only on the position.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <time.h>
#include <unistd.h>

#include <zerod/client.h>

#include "tests/example/gpu.h"
#include "tests/example/model.h"
#include "tests/example/task.h"
#include "tests/example/text.h"

/* --provoke-duplicate: the error that one rank makes once, to see zerod's diagnostic. */
struct provocation {
    bool armed;
    uint64_t step;
    const char *name;
    uint64_t rank;
    unsigned param;
    float *kept; /* the parameter's gradient, to be pushed a second time */
};

/*
 * --device cuda. Gradients reach zerod in two ways, as in real trainers. Those of every other parameter are written
 * into zerod's slot. The remaining ones are written into the program's own device memory, and zerod copies them on the
 * stream.
 */
struct on_gpu {
    bool wanted;
    struct gpu *gpu;
    float *host_weights, *host_grad; /* host_weights: all parameters; host_grad: the current one */
    float *grads;                    /* on the GPU, all parameters; first their initial weights */
    float *duplicate;                /* on the GPU, the gradient to be pushed twice */
    size_t *offsets;                 /* first element of each parameter */
};

struct trainer {
    struct task task;
    struct on_gpu on_gpu;
    struct zerod_options options;
    struct provocation provocation;
    uint64_t log_every;

    struct zerod *client;
    struct model *model;
    struct text text;
    uint8_t *tokens, *targets;
    const float **weights; /* zerod's memory, by parameter */
    unsigned *ids;         /* ids[i] = i, so that any run of ids is a list for zerod_gather() */
    float *slot;           /* memory for the gradient that is being computed */
    FILE *report;

    uint64_t n_forwards, n_backwards;
    double loss;          /* of the step so far */
    bool holds_duplicate; /* the duplicate was pushed in the open micro-batch */

    double shown_loss; /* sum since the last printed line */
    uint64_t n_shown;
    double shown_at; /* time of the last printed line in seconds */
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Prints and reports zerod's last error. */
static void tell(struct trainer *t, const char *event)
{
    const struct zerod_error *e = zerod_error(t->client);

    fprintf(stderr, "%s\n", e->text);
    report_begin(t->report, event);
    report_number(t->report, "code", e->code);
    report_string(t->report, "cause_class", e->cause_class);
    report_number(t->report, "rank", (double)e->rank);
    report_number(t->report, "step", (double)e->step);
    report_number(t->report, "micro_batch", (double)e->micro_batch);
    report_count(t->report, "n_params", e->n_params);
    if (e->n_params > 0)
        report_string(t->report, "param", e->params[0]);
    report_string(t->report, "text", e->text);
    report_end(t->report);
}

/*
 * In stage 3 a segment's weights are in memory only between on_enter() and on_leave(). In stages 1 and 2 these hooks do
 * nothing.
 */
static int on_enter(void *ctx, unsigned segment)
{
    struct trainer *t = ctx;
    const struct model_segment *s = model_segment(t->model, segment);

    return zerod_gather(t->client, t->ids + s->first, s->n_params);
}

static int on_leave(void *ctx, unsigned segment)
{
    struct trainer *t = ctx;
    const struct model_segment *s = model_segment(t->model, segment);

    return zerod_release(t->client, t->ids + s->first, s->n_params);
}

/* Makes the model compute the gradient in the slot from which zerod reads it. */
static int on_grad(void *ctx, unsigned param, float **out)
{
    struct trainer *t = ctx;

    if (t->on_gpu.gpu) {
        *out = t->slot = t->on_gpu.host_grad;
        return 0;
    }
    *out = t->slot = zerod_slot(t->client, param);
    if (t->slot)
        return 0;
    return zerod_error(t->client)->status ? zerod_error(t->client)->status : -EPROTO;
}

static int push(struct trainer *t, unsigned param, const float *data)
{
    const struct model_segment *s = model_segment(t->model, model_segment_of(t->model, param));

    return zerod_push(t->client, &(struct zerod_push){
                                     .param = param,
                                     .data = data, /* NULL: the gradient is in the slot */
                                     .segment = s->name,
                                     .call = 1,
                                     .site = s->site,
                                 });
}

static int push_to_gpu(struct trainer *t, unsigned param)
{
    struct on_gpu *g = &t->on_gpu;
    bool in_slot = param % 2 == 0;
    float *to = in_slot ? zerod_slot(t->client, param) : g->grads + g->offsets[param];
    int r;

    if (!to)
        return zerod_error(t->client)->status ? zerod_error(t->client)->status : -EPROTO;
    r = gpu_put(g->gpu, to, t->slot, model_param(t->model, param)->n_elems * sizeof(float));
    return r ? r : push(t, param, in_slot ? NULL : to);
}

/* Pushes the final gradient, so that zerod can add it while the rest of the backward runs. */
static int on_grad_ready(void *ctx, unsigned param)
{
    struct trainer *t = ctx;
    struct provocation *p = &t->provocation;

    if (p->armed && p->param == param)
        memcpy(p->kept, t->slot, model_param(t->model, param)->n_elems * sizeof(float));
    return t->on_gpu.gpu ? push_to_gpu(t, param) : push(t, param, NULL);
}

static struct model_hooks hooks_of(struct trainer *t)
{
    return (struct model_hooks){t, on_enter, on_leave, on_grad, on_grad_ready};
}

/*
 * Declares all parameters. Rank 0 provides the initial weights. zerod reads them until the job is formed, and then has
 * its own weights.
 */
static int declare(struct trainer *t, float *init)
{
    for (unsigned i = 0; i < model_n_params(t->model); i++) {
        const struct model_param *p = model_param(t->model, i);
        int r;

        if (init)
            model_init_weights(t->model, t->task.seed, i, init);
        r = zerod_declare(t->client,
                          &(struct zerod_param){
                              .name = p->name,
                              .dtype = ZEROD_F32,
                              .grad_dtype = ZEROD_F32,
                              .ndim = p->ndim,
                              .shape = p->shape,
                              .trainable = true,
                              .init = init,
                          },
                          1);
        if (r)
            return r;
        init = init ? init + p->n_elems : NULL;
    }
    return 0;
}

/* declare(), with the initial weights on the GPU. */
static int declare_on_gpu(struct trainer *t)
{
    struct on_gpu *g = &t->on_gpu;
    int r;

    for (unsigned i = 0; i < model_n_params(t->model); i++)
        model_init_weights(t->model, t->task.seed, i, g->host_weights + g->offsets[i]);
    r = gpu_put(g->gpu, g->grads, g->host_weights, model_n_elems(t->model) * sizeof(float));
    for (unsigned i = 0; r == 0 && i < model_n_params(t->model); i++) {
        const struct model_param *p = model_param(t->model, i);

        r = zerod_declare(t->client,
                          &(struct zerod_param){
                              .name = p->name,
                              .ndim = p->ndim,
                              .shape = p->shape,
                              .trainable = true,
                              .init = t->options.rank == 0 ? g->grads + g->offsets[i] : NULL,
                          },
                          1);
    }
    return r;
}

/* Local rank n uses the n-th visible GPU. */
static int open_gpu(struct trainer *t)
{
    const char *local_rank = getenv("LOCAL_RANK");
    size_t n_bytes = model_n_elems(t->model) * sizeof(float), offset = 0;
    unsigned n_params = model_n_params(t->model);
    struct on_gpu *g = &t->on_gpu;
    int r = gpu_open(&g->gpu, local_rank ? atoi(local_rank) : t->options.rank);

    if (r)
        return r;
    g->host_weights = malloc(n_bytes);
    g->host_grad = malloc(n_bytes);
    g->offsets = calloc(n_params, sizeof(*g->offsets));
    g->grads = gpu_alloc(g->gpu, n_bytes);
    g->duplicate = gpu_alloc(g->gpu, n_bytes);
    if (!g->host_weights || !g->host_grad || !g->offsets || !g->grads || !g->duplicate)
        return -ENOMEM;
    for (unsigned i = 0; i < n_params; i++) {
        g->offsets[i] = offset;
        offset += model_param(t->model, i)->n_elems;
    }
    return zerod_set_stream(t->client, gpu_stream(g->gpu));
}

/* Copies all weights to the host, because the model computes there. */
static int get_weights(struct trainer *t)
{
    struct on_gpu *g = &t->on_gpu;
    int r = 0;

    for (unsigned i = 0; g->gpu && r == 0 && i < model_n_params(t->model); i++)
        r = gpu_get(g->gpu, g->host_weights + g->offsets[i], zerod_weight(t->client, i),
                    model_param(t->model, i)->n_elems * sizeof(float));
    return r;
}

static int check_device(struct trainer *t)
{
    struct zerod_job job;
    int r = zerod_job(t->client, &job);

    if (r == 0 && job.cuda != t->on_gpu.wanted) {
        fprintf(stderr, "zerod-example: the daemon's job has device: %s; start with --device %s\n",
                job.cuda ? "cuda" : "cpu", job.cuda ? "cuda" : "cpu");
        r = -EINVAL;
    }
    return r == 0 && job.cuda ? open_gpu(t) : r;
}

static int attach(struct trainer *t)
{
    float *init = NULL;
    int r;

    r = zerod_connect(&t->client, &t->options);
    if (r == 0)
        r = check_device(t);
    if (r)
        return r;
    if (t->options.rank == 0 && !t->on_gpu.gpu) {
        init = malloc(model_n_elems(t->model) * sizeof(*init));
        if (!init)
            return -ENOMEM;
    }
    r = t->on_gpu.gpu ? declare_on_gpu(t) : declare(t, init);
    if (r == 0)
        r = zerod_form(t->client); /* waits for the other ranks */
    free(init);
    if (r == ZEROD_RESUMED) {
        struct zerod_position at = zerod_epoch(t->client);

        printf("rank %d: resumed at step %llu, micro-batch %u\n", t->options.rank, (unsigned long long)at.step,
               at.micro_batch);
        r = 0;
    }
    for (unsigned i = 0; r == 0 && i < model_n_params(t->model); i++)
        t->weights[i] = t->on_gpu.gpu ? t->on_gpu.host_weights + t->on_gpu.offsets[i] : zerod_weight(t->client, i);
    return r == 0 ? get_weights(t) : r;
}

/* Pushes one parameter a second time, as a second backward through the same forward does. */
static int provoke(struct trainer *t)
{
    int r;

    t->provocation.armed = false;
    t->holds_duplicate = true;
    t->n_backwards++;
    r = zerod_begin_backward(t->client, &(struct zerod_backward){t->n_forwards, t->n_backwards});
    if (r || !t->on_gpu.gpu)
        return r ? r : push(t, t->provocation.param, t->provocation.kept);
    r = gpu_put(t->on_gpu.gpu, t->on_gpu.duplicate, t->provocation.kept,
                model_param(t->model, t->provocation.param)->n_elems * sizeof(float));
    return r ? r : push(t, t->provocation.param, t->on_gpu.duplicate);
}

/*
 * Ends the micro-batch. Prints and clears the provoked refusal; any other refusal ends the training. The first gradient
 * counts and was complete, so the training continues without loss.
 */
static int end_micro_batch(struct trainer *t, int r)
{
    if (r == 0)
        r = zerod_end_backward(t->client, &t->loss, sizeof(t->loss));
    if (r == ZEROD_REFUSED && t->holds_duplicate) {
        tell(t, "provoked");
        r = zerod_clear_fault(t->client);
        if (r == 0)
            r = zerod_end_backward(t->client, &t->loss, sizeof(t->loss));
    }
    t->holds_duplicate = false;
    return r;
}

static int train_micro_batch(struct trainer *t, uint64_t step, unsigned micro_batch)
{
    const struct task *task = &t->task;
    struct model_hooks hooks = hooks_of(t);
    struct provocation *p = &t->provocation;
    double loss = 0;
    int r;

    r = text_fill(&t->text,
                  &(struct text_batch){
                      .seed = task->seed,
                      .step = step,
                      .micro_batch = micro_batch,
                      .rank = t->options.rank,
                      .n_seqs = task->shape.n_seqs,
                      .seq_len = task->shape.seq_len,
                  },
                  t->tokens, t->targets);
    if (r)
        return r;
    r = model_forward(t->model, t->weights, &hooks, t->tokens, t->targets, &loss);
    if (r)
        return r;
    t->n_forwards++;
    t->loss += loss / task->n_micro_batches;

    r = zerod_begin_backward(t->client, &(struct zerod_backward){t->n_forwards, t->n_backwards});
    if (r)
        return r;
    r = model_backward(t->model, t->weights, &hooks, 1.0 / task->n_micro_batches); /* pushes */
    if (r)
        return r;
    if (p->armed && p->step == step)
        r = provoke(t);
    t->n_backwards++;
    return end_micro_batch(t, r);
}

static void show(struct trainer *t, uint64_t step, const struct zerod_step_result *result)
{
    double at = now();

    report_begin(t->report, "step");
    report_count(t->report, "step", step);
    report_number(t->report, "loss", t->loss);
    report_number(t->report, "grad_norm", result->grad_norm);
    report_count(t->report, "applied", result->applied);
    report_number(t->report, "lr", result->lr);
    report_number(t->report, "seconds", at);
    report_end(t->report);

    t->shown_loss += t->loss;
    t->n_shown++;
    if (t->options.rank == 0 && (step == 0 || (step + 1) % t->log_every == 0 || step + 1 == t->task.n_steps)) {
        printf("step %4llu/%llu  loss %.3f  grad norm %.3f  %.1f steps/s%s\n", (unsigned long long)step + 1,
               (unsigned long long)t->task.n_steps, t->shown_loss / (double)t->n_shown, result->grad_norm,
               (double)t->n_shown / (at - t->shown_at), result->applied ? "" : "  skipped");
        t->shown_loss = 0;
        t->n_shown = 0;
        t->shown_at = at;
    }
}

static int train_step(struct trainer *t, struct zerod_position at)
{
    const struct task *task = &t->task;
    struct zerod_hyper hyper = {
        .lr = task->lr,
        .beta1 = task->beta1,
        .beta2 = task->beta2,
        .eps = task->eps,
        .weight_decay = task->weight_decay,
    };
    /* Without --lr and --clip the daemon's configuration applies. */
    struct zerod_step_args args = {
        .groups = task->lr_given ? &hyper : NULL,
        .n_groups = task->lr_given ? 1 : 0,
        .max_norm = task->max_norm_given ? &task->max_norm : NULL,
    };
    struct zerod_step_result result = {0};
    int r;

    if (at.micro_batch == 0)
        t->loss = 0;
    for (unsigned m = at.micro_batch; m < task->n_micro_batches; m++) {
        r = train_micro_batch(t, at.step, m);
        if (r)
            return r;
    }
    r = zerod_step(t->client, &args, &result); /* waits for the other ranks; then the weights are the new ones */
    if (r == 0)
        r = get_weights(t);
    if (r)
        return r;
    show(t, at.step, &result);
    return 0;
}

static int train(struct trainer *t)
{
    const void *kept;
    size_t n_bytes;
    int r;

    /* A predecessor of this process may have left the step unfinished. It stored the loss with each micro-batch. */
    r = zerod_user_state(t->client, &kept, &n_bytes);
    if (r)
        return r;
    if (kept && n_bytes == sizeof(t->loss))
        memcpy(&t->loss, kept, n_bytes);
    t->shown_at = now();
    for (;;) {
        struct zerod_position at = zerod_epoch(t->client);

        if (at.step >= t->task.n_steps)
            return 0;
        r = train_step(t, at);
        if (r == ZEROD_ABORTED)
            tell(t, "aborted"); /* aborted for all ranks; zerod_epoch() now returns the position to restart from */
        else if (r)
            return r;
    }
}

/* Prepares everything that does not need zerod. */
static int prepare(struct trainer *t)
{
    const struct model_shape *shape = &t->task.shape;
    size_t n_tokens = (size_t)shape->n_seqs * shape->seq_len;
    unsigned n_params;
    int r;

    r = task_new_model(&t->task, &t->model);
    if (r == 0)
        r = text_load(&t->text, t->task.text_folder);
    if (r < 0)
        return r;
    n_params = model_n_params(t->model);
    t->tokens = malloc(n_tokens);
    t->targets = malloc(n_tokens);
    t->weights = calloc(n_params, sizeof(*t->weights));
    t->ids = calloc(n_params, sizeof(*t->ids));
    if (!t->tokens || !t->targets || !t->weights || !t->ids)
        return -ENOMEM;
    for (unsigned i = 0; i < n_params; i++)
        t->ids[i] = i;
    if (t->task.report_path) {
        t->report = fopen(t->task.report_path, "ae");
        if (!t->report)
            return -errno;
    }
    return 0;
}

/* Finds the parameter of --provoke-duplicate. On ranks other than the guilty one it disarms the provocation. */
static int prepare_provocation(struct trainer *t)
{
    struct provocation *p = &t->provocation;
    unsigned i = 0;

    if (!p->armed)
        return 0;
    while (i < model_n_params(t->model) && strcmp(model_param(t->model, i)->name, p->name) != 0)
        i++;
    if (i == model_n_params(t->model)) {
        fprintf(stderr, "--provoke-duplicate: there is no parameter \"%s\"\n", p->name);
        return -EINVAL;
    }
    p->armed = p->rank == (uint64_t)t->options.rank;
    p->param = i;
    p->kept = malloc(model_param(t->model, i)->n_elems * sizeof(float));
    return p->kept ? 0 : -ENOMEM;
}

static void begin_report(struct trainer *t)
{
    report_begin(t->report, "start");
    report_count(t->report, "pid", getpid());
    report_count(t->report, "rank", t->options.rank);
    report_count(t->report, "world_size", zerod_world_size(t->client));
    report_count(t->report, "n_elems", model_n_elems(t->model));
    report_count(t->report, "n_params", model_n_params(t->model));
    report_count(t->report, "step", zerod_epoch(t->client).step);
    report_end(t->report);
    if (t->options.rank == 0)
        printf("%zu parameters in %u tensors, %u ranks, %zu characters of text\n", model_n_elems(t->model),
               model_n_params(t->model), zerod_world_size(t->client), t->text.n_chars);
}

static int run(struct trainer *t)
{
    struct model_hooks hooks = hooks_of(t);
    int r;

    r = attach(t);
    if (r)
        return r;
    begin_report(t);
    r = train(t);
    if (r == 0 && t->task.dump_path)
        r = task_dump(&t->task, t->model, t->weights, &hooks);
    if (r)
        return r;
    report_begin(t->report, "done");
    report_end(t->report);
    return zerod_leave(t->client);
}

static void clean_up(struct trainer *t)
{
    zerod_close(t->client);
    gpu_close(t->on_gpu.gpu);
    free(t->on_gpu.host_weights);
    free(t->on_gpu.host_grad);
    free(t->on_gpu.offsets);
    model_free(t->model);
    text_deinit(&t->text);
    free(t->tokens);
    free(t->targets);
    free(t->weights);
    free(t->ids);
    free(t->provocation.kept);
    if (t->report)
        fclose(t->report);
}

static const char help[] =
    "Usage: zerod-example [OPTION]...\n"
    "One rank of a small language model in training; its optimizer lives in zerod.\n\n"
    "  --socket PATH        of the daemon (environment ZEROD_SOCKET)\n"
    "  --rank N             of this process (environment RANK)\n"
    "  --run-id ID          whose state to resume (environment ZEROD_RUN_ID, or any)\n"
    "  --on-duplicate reject|accumulate|abort_step   (as the daemon is configured)\n"
    "  --provoke-duplicate STEP:PARAMETER[:RANK]     push one gradient twice, show the diagnosis, go on\n"
    "  --device cpu|cuda    where zerod holds gradients and weights, as the daemon is configured (cpu)\n"
    "  --log-every N        steps between two lines of rank 0 (10)\n";

static int parse_provocation(struct provocation *p, char *value)
{
    char *name = strchr(value, ':'), *rank = name ? strchr(name + 1, ':') : NULL;
    int r;

    if (!name) {
        fprintf(stderr, "--provoke-duplicate %s: STEP:PARAMETER[:RANK] is needed\n", value);
        return -EINVAL;
    }
    *name++ = '\0';
    if (rank)
        *rank++ = '\0';
    r = task_parse_count("provoke-duplicate", value, 0, UINT64_MAX, &p->step);
    if (r == 0 && rank)
        r = task_parse_count("provoke-duplicate", rank, 0, INT32_MAX, &p->rank);
    p->name = name;
    p->armed = true;
    return r;
}

static int parse_on_duplicate(struct zerod_options *o, const char *value)
{
    if (strcmp(value, "reject") == 0)
        o->on_duplicate = ZEROD_ON_DUPLICATE_REJECT;
    else if (strcmp(value, "accumulate") == 0)
        o->on_duplicate = ZEROD_ON_DUPLICATE_ACCUMULATE;
    else if (strcmp(value, "abort_step") == 0)
        o->on_duplicate = ZEROD_ON_DUPLICATE_ABORT_STEP;
    else
        o->on_duplicate = ZEROD_ON_DUPLICATE_DEFAULT;
    if (o->on_duplicate != ZEROD_ON_DUPLICATE_DEFAULT)
        return 0;
    fprintf(stderr, "--on-duplicate %s: reject, accumulate or abort_step is needed\n", value);
    return -EINVAL;
}

static int parse_device(struct trainer *t, const char *value)
{
    t->on_gpu.wanted = strcmp(value, "cuda") == 0;
    if (t->on_gpu.wanted || strcmp(value, "cpu") == 0)
        return 0;
    fprintf(stderr, "--device %s: cpu or cuda is needed\n", value);
    return -EINVAL;
}

static int parse_rank(struct trainer *t, const char *value)
{
    uint64_t n;
    int r = task_parse_count("rank", value, 0, INT32_MAX, &n);

    if (r == 0)
        t->options.rank = (int)n;
    return r;
}

enum option_value { HELP = 1, SOCKET, RANK, RUN_ID, ON_DUPLICATE, PROVOKE, LOG_EVERY, DEVICE };

static int parse_one(struct trainer *t, int option, char *value)
{
    switch (option) {
    case SOCKET:
        t->options.socket = value;
        return 0;
    case RANK:
        return parse_rank(t, value);
    case RUN_ID:
        t->options.run_id = value;
        return 0;
    case ON_DUPLICATE:
        return parse_on_duplicate(&t->options, value);
    case PROVOKE:
        return parse_provocation(&t->provocation, value);
    case LOG_EVERY:
        return task_parse_count("log-every", value, 1, UINT32_MAX, &t->log_every);
    case DEVICE:
        return parse_device(t, value);
    case '?':
        return -EINVAL;
    default:
        return task_take(&t->task, option, value);
    }
}

/* Return: 0 to continue, 1 if --help was given, -EINVAL on a wrong option. */
static int parse(struct trainer *t, int argc, char **argv)
{
    static const struct option options[] = {
        {"help", no_argument, NULL, HELP},
        {"socket", required_argument, NULL, SOCKET},
        {"rank", required_argument, NULL, RANK},
        {"run-id", required_argument, NULL, RUN_ID},
        {"on-duplicate", required_argument, NULL, ON_DUPLICATE},
        {"provoke-duplicate", required_argument, NULL, PROVOKE},
        {"log-every", required_argument, NULL, LOG_EVERY},
        {"device", required_argument, NULL, DEVICE},
        TASK_LONG_OPTIONS,
        {0},
    };
    int option, r;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == HELP) {
            printf("%s%s", help, task_help);
            return 1;
        }
        r = parse_one(t, option, optarg);
        if (r < 0)
            return r;
    }
    if (optind < argc) {
        fprintf(stderr, "zerod-example: what is \"%s\"?\n", argv[optind]);
        return -EINVAL;
    }
    /* This process chooses its batches by rank, so it needs the rank before zerod_connect() reads it. */
    if (t->options.rank < 0 && getenv("RANK"))
        return parse_rank(t, getenv("RANK"));
    if (t->options.rank >= 0)
        return 0;
    fprintf(stderr, "zerod-example: --rank, or RANK in the environment, is needed\n");
    return -EINVAL;
}

int main(int argc, char **argv)
{
    struct trainer t = {.options = {.rank = -1, .client = "zerod-example"}, .log_every = 10};
    int r;

    task_init(&t.task);
    setvbuf(stdout, NULL, _IOLBF, 0);
    r = parse(&t, argc, argv);
    if (r)
        return r < 0 ? EX_USAGE : EXIT_SUCCESS;
    r = prepare(&t);
    if (r == 0)
        r = prepare_provocation(&t);
    if (r < 0) {
        fprintf(stderr, "zerod-example: %s\n", strerror(-r));
    } else {
        r = run(&t);
        if (r == ZEROD_REFUSED || r == ZEROD_ABORTED || (r < 0 && zerod_error(t.client)->status == r))
            tell(&t, r == ZEROD_REFUSED ? "refused" : "error");
        else if (r)
            fprintf(stderr, "zerod-example: %s\n", strerror(-r));
    }
    clean_up(&t);
    return r ? EXIT_FAILURE : EXIT_SUCCESS;
}

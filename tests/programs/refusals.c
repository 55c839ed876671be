/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A trainer that executes commands: one rank over libzerod, driven by lines on standard input. So a test decides the
 * order of every rank's calls, right and wrong ones. Each line is answered with one line of JSON: {"r": the call's
 * result, "position": ..., "error": zerod_error() unless r is 0 or 1, and the call's other results}.
 *
 *   connect rank=0 [run=ID] [timeout=MS] [duplicate=reject|accumulate|abort_step] [client=NAME] [interrupt=N]
 *   declare [first=N] [skip=I] [swap=I] [dtype=I] [grad=I] [shape=I] [group=I] [name=I] [freeze=I]   the odd model
 *   many N [elems=M]                     N parameters of M elements, p.0 p.1 ...
 *   param NAME N [bf16]                  one parameter of N elements; %41 in NAME is a byte
 *   huge                                 one parameter of 2^36 elements
 *   form | begin | end [blob=TEXT] | abandon WHY | norm | abort WHY | clear | leave | close
 *   push I [data=none] [value=V at=E] [bytes=N] [dtype=D] [site=S] [segment=S] [task=N] [depth=N] [flags=N]
 *   evidence [exception=T] [raised=T] [swallowed=T] [forward=1] [grad=1] [segment=T segments=N] [site=T]
 *            [forwards=N] [backwards=N] [not_called=I,I] [called=I,I]     _ in a T is a blank
 *   report CODE [params=I,I] [detail=T] | job
 *   pushes [but=I,I] [only=I]            all trainable parameters, in reverse order
 *   flush
 *   step [lr=X] [norm=X] [scale=X] [inf=1] [blob=TEXT]
 *   steps N [micro=M] [from=S]           whole steps, repeated after an abort; gradients as of step S
 *   gather I.. | release I.. | prefetch I.. [times=N]   the first one N times
 *   window | write I VALUE | commit | forget
 *   read I KIND | state [kinds=012] | user   one state, a digest of all states and weights, the blob
 *   put I KIND VALUE                         writes one state inside a window; KIND is a digit, enum zerod_state
 *   save FILE kinds=0124                     states of all trainable parameters into a file
 *   load FILE kinds=0124                     from it, inside a window
 *   touch I | peek I                         writes to, reads a weight; may crash
 *   fork                                     a child that holds the socket and sleeps; its calls return -ECHILD
 *   maps | quit
 *
 * interrupt=N: the interrupt callback ends the wait at its N-th call. SIGUSR1 interrupts a poll().
 */

#include <errno.h>
#include <json.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/base.h"
#include "tests/programs/puppet-model.h"
#include "tests/programs/trainer-memory.h"
#include "zerod/client.h"

enum { MAX_WORDS = 32, MAX_PARAMS = 65536 };

/* A declared parameter, for which gradients are made. */
struct declared {
    char *name;
    size_t name_len;
    int dtype, grad_dtype;
    unsigned n_dims;
    uint64_t shape[2];
    unsigned group;
    bool frozen;
    void *init;
};

struct puppet {
    struct zerod *c;
    unsigned rank;
    struct declared *params;
    uint32_t n_params;
    char *words[MAX_WORDS];
    unsigned n_words;
    json_object *answer;
    unsigned n_asked, interrupt; /* calls of the interrupt callback; the call that ends the wait, 0: none */
};

/* ---- words --------------------------------------------------------------------------------------------- */

static const char *option(const struct puppet *p, const char *key, const char *otherwise)
{
    size_t n = strlen(key);

    for (unsigned i = 1; i < p->n_words; i++)
        if (strncmp(p->words[i], key, n) == 0 && p->words[i][n] == '=')
            return p->words[i] + n + 1;
    return otherwise;
}

static double number(const struct puppet *p, const char *key, double otherwise)
{
    const char *text = option(p, key, NULL);

    return text ? strtod(text, NULL) : otherwise;
}

/* Return: the i-th word after the command, not counting options. */
static const char *word(const struct puppet *p, unsigned i)
{
    for (unsigned k = 1; k < p->n_words; k++)
        if (!strchr(p->words[k], '=') && i-- == 0)
            return p->words[k];
    return "";
}

/* Return: an option's text; each _ in it stands for a blank. */
static const char *sentence(const struct puppet *p, const char *key)
{
    char *text = (char *)option(p, key, NULL);

    for (char *c = text; c && *c; c++)
        if (*c == '_')
            *c = ' ';
    return text;
}

/* Reads an option like "3,5,8". Return: the number of ids. */
static size_t list(const struct puppet *p, const char *key, unsigned ids[MAX_WORDS])
{
    const char *text = option(p, key, NULL);
    size_t n = 0;

    while (text && *text && n < MAX_WORDS) {
        ids[n++] = (unsigned)strtoul(text, (char **)&text, 10);
        text += *text == ',';
    }
    return n;
}

static uint32_t index_word(const struct puppet *p)
{
    return (uint32_t)strtoul(word(p, 0), NULL, 10);
}

static void say(struct puppet *p, const char *key, json_object *value)
{
    json_object_object_add(p->answer, key, value);
}

/* ---- declaring ----------------------------------------------------------------------------------------- */

static uint64_t n_elems(const struct declared *d)
{
    uint64_t n = 1;

    for (unsigned i = 0; i < d->n_dims; i++)
        n *= d->shape[i];
    return n;
}

static struct declared *add(struct puppet *p, const char *name, size_t name_len)
{
    struct declared *d = &p->params[p->n_params++];

    if (p->n_params > MAX_PARAMS)
        abort();
    *d = (struct declared){.name = malloc(name_len + 1), .name_len = name_len};
    memcpy(d->name, name, name_len);
    d->name[name_len] = '\0';
    return d;
}

static int declare(struct puppet *p, uint32_t first)
{
    int r = 0;

    for (uint32_t i = first; r == 0 && i < p->n_params; i++) {
        struct declared *d = &p->params[i];
        uint64_t n = n_elems(d);

        d->init = malloc(n * puppet_dtype_size(d->dtype) + 1);
        for (uint64_t k = 0; k < n; k++)
            puppet_store(d->init, d->dtype, k, puppet_initial(i, k));
        r = memory_declare(p->c, (int)p->rank,
                           &(struct zerod_param){
                               .name = d->name,
                               .name_len = d->name_len,
                               .dtype = (enum zerod_dtype)d->dtype,
                               .grad_dtype = (enum zerod_dtype)d->grad_dtype,
                               .ndim = d->n_dims,
                               .shape = d->shape,
                               .group = d->group,
                               .trainable = !d->frozen,
                               .init = d->init,
                           },
                           n * puppet_dtype_size(d->dtype));
    }
    return r;
}

static int on_declare(struct puppet *p)
{
    uint32_t before = p->n_params, n = (uint32_t)number(p, "first", PUPPET_PARAMS);

    for (uint32_t k = 0; k < n; k++) {
        uint32_t swap = (uint32_t)number(p, "swap", PUPPET_PARAMS);
        uint32_t i = k == swap ? k + 1 : k == swap + 1 ? swap : k;
        const struct puppet_param *m = &puppet_model[i];
        struct declared *d;

        if (k == (uint32_t)number(p, "skip", UINT32_MAX))
            continue;
        d = add(p, m->name, strlen(m->name));
        d->dtype = m->dtype ^ (i == (uint32_t)number(p, "dtype", UINT32_MAX));
        d->grad_dtype = m->grad_dtype ^ (i == (uint32_t)number(p, "grad", UINT32_MAX));
        d->n_dims = m->n_dims;
        memcpy(d->shape, m->shape, sizeof(d->shape));
        d->shape[0] += i == (uint32_t)number(p, "shape", UINT32_MAX);
        d->group = m->group + (i == (uint32_t)number(p, "group", UINT32_MAX));
        d->frozen = m->frozen || i == (uint32_t)number(p, "freeze", UINT32_MAX);
        if (i == (uint32_t)number(p, "name", UINT32_MAX))
            d->name[0] = '?';
    }
    return declare(p, before);
}

static int on_many(struct puppet *p)
{
    uint32_t before = p->n_params, n = index_word(p);
    char name[32];

    for (uint32_t i = 0; i < n; i++) {
        struct declared *d = add(p, name, (size_t)snprintf(name, sizeof(name), "p.%u", i));

        d->n_dims = 1;
        d->shape[0] = (uint64_t)number(p, "elems", 3);
    }
    return declare(p, before);
}

static int on_param(struct puppet *p)
{
    uint32_t before = p->n_params;
    char name[1200];
    size_t n = 0;
    struct declared *d;

    for (const char *c = word(p, 0); *c && n < sizeof(name); c++) {
        char hex[3] = {c[1], c[1] ? c[2] : '\0', '\0'};

        name[n++] = *c == '%' ? (char)strtoul(hex, NULL, 16) : *c;
        c += *c == '%' ? 2 : 0;
    }
    d = add(p, name, n);
    d->n_dims = 1;
    d->shape[0] = strtoull(word(p, 1), NULL, 10);
    d->dtype = d->grad_dtype = strcmp(word(p, 2), "bf16") == 0 ? PUPPET_BF16 : PUPPET_F32;
    return declare(p, before);
}

/* Declares a parameter larger than the memory of any machine. */
static int on_huge(struct puppet *p)
{
    static const uint64_t shape[] = {UINT64_C(1) << 36};

    return zerod_declare(p->c, &(struct zerod_param){.name = "huge", .ndim = 1, .shape = shape, .trainable = true}, 1);
}

static void forget_params(struct puppet *p)
{
    for (uint32_t i = 0; i < p->n_params; i++) {
        free(p->params[i].name);
        free(p->params[i].init);
    }
    p->n_params = 0;
}

/* ---- coming and going ---------------------------------------------------------------------------------- */

static int on_close(struct puppet *p)
{
    zerod_close(steal_ptr(p->c));
    forget_params(p);
    return 0;
}

static void on_signal(int number)
{
    (void)number;
}

static int is_interrupted(void *arg)
{
    struct puppet *p = arg;

    return ++p->n_asked == p->interrupt;
}

static int on_connect(struct puppet *p)
{
    static const char *const policies[] = {"", "reject", "accumulate", "abort_step"};
    const char *policy = option(p, "duplicate", "");
    struct zerod_options options = {
        .rank = (int)number(p, "rank", 0),
        .run_id = option(p, "run", NULL),
        .timeout_ms = (int)number(p, "timeout", 0),
        .client = option(p, "client", NULL),
    };

    on_close(p);
    p->n_asked = 0;
    p->interrupt = (unsigned)number(p, "interrupt", 0);
    if (option(p, "interrupt", NULL)) {
        options.interrupted = is_interrupted;
        options.interrupted_arg = p;
    }
    for (int i = 0; i < 4; i++)
        if (strcmp(policies[i], policy) == 0)
            options.on_duplicate = (enum zerod_on_duplicate)i;
    p->rank = (unsigned)options.rank;
    return zerod_connect(&p->c, &options);
}

static int on_form(struct puppet *p)
{
    return zerod_form(p->c);
}

static int on_leave(struct puppet *p)
{
    return zerod_leave(p->c);
}

static int on_clear(struct puppet *p)
{
    return zerod_clear_fault(p->c);
}

static int on_evidence(struct puppet *p)
{
    unsigned not_called[MAX_WORDS], called[MAX_WORDS];

    return zerod_evidence(p->c, &(struct zerod_evidence){
                                    .exception = sentence(p, "exception"),
                                    .raised_at = sentence(p, "raised"),
                                    .swallowed_by = sentence(p, "swallowed"),
                                    .in_forward = number(p, "forward", 0) != 0,
                                    .requires_grad_changed = number(p, "grad", 0) != 0,
                                    .dead_segment = sentence(p, "segment"),
                                    .n_dead_segments = (unsigned)number(p, "segments", 0),
                                    .site = sentence(p, "site"),
                                    .n_forwards = (uint64_t)number(p, "forwards", 0),
                                    .n_backwards = (uint64_t)number(p, "backwards", 0),
                                    .not_called = not_called,
                                    .n_not_called = list(p, "not_called", not_called),
                                    .called = called,
                                    .n_called = list(p, "called", called),
                                });
}

static int on_report(struct puppet *p)
{
    unsigned params[MAX_WORDS];
    size_t n = list(p, "params", params);

    return zerod_report(p->c, (int)strtol(word(p, 0), NULL, 10), params, n, sentence(p, "detail"));
}

static int on_job(struct puppet *p)
{
    struct zerod_job job = {0};
    int r = zerod_job(p->c, &job);
    const struct {
        const char *name;
        double value;
    } numbers[] = {
        {"world_size", job.world_size},
        {"stage", job.stage},
        {"private_weights", job.private_weights},
        {"on_duplicate", job.on_duplicate},
        {"lr", job.hyper.lr},
        {"beta1", job.hyper.beta1},
        {"beta2", job.hyper.beta2},
        {"eps", job.hyper.eps},
        {"weight_decay", job.hyper.weight_decay},
        {"momentum", job.hyper.momentum},
        {"nesterov", job.hyper.nesterov},
        {"has_scheduler", job.has_scheduler},
        {"max_norm", job.max_norm},
        {"mean", job.mean},
        {"fp16", job.fp16},
        {"accumulation", job.accumulation},
        {"max_live_elems", (double)job.max_live_elems},
    };

    if (r != 0)
        return r;
    say(p, "run_id", json_object_new_string(job.run_id));
    say(p, "optimizer", json_object_new_string(job.optimizer));
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
        say(p, numbers[i].name, json_object_new_double(numbers[i].value));
    return 0;
}

static int on_abort(struct puppet *p)
{
    return zerod_abort_step(p->c, word(p, 0));
}

/* ---- gradients ----------------------------------------------------------------------------------------- */

static int on_begin(struct puppet *p)
{
    return zerod_begin_backward(p->c, NULL);
}

/* Return: the gradient of a parameter at the handle's position. The caller frees it. */
static void *make_gradient(const struct puppet *p, uint32_t i)
{
    const struct declared *d = &p->params[i];
    struct zerod_position at = zerod_epoch(p->c);
    uint64_t n = n_elems(d), step = at.step + (uint64_t)number(p, "from", 0);
    void *data = malloc(n * puppet_dtype_size(d->grad_dtype) + 1);

    for (uint64_t k = 0; k < n; k++)
        puppet_store(data, d->grad_dtype, k, puppet_gradient(step, at.micro_batch, p->rank, i, k));
    return data;
}

static int push(struct puppet *p, uint32_t i)
{
    _cleanup_free_ void *data = i < p->n_params ? make_gradient(p, i) : calloc(1, 16);
    struct zerod_push request = {
        .param = i,
        .data = data,
        .n_bytes = (size_t)number(p, "bytes", 0),
        .dtype_plus_one = (int)number(p, "dtype", 0),
        .site = option(p, "site", NULL),
        .segment = option(p, "segment", NULL),
        .task = (uint64_t)number(p, "task", 0),
        .depth = (uint32_t)number(p, "depth", 0),
        .call = (uint32_t)number(p, "call", 0),
        .flags = (unsigned)number(p, "flags", 0),
    };

    if (option(p, "value", NULL))
        puppet_store(data, p->params[i].grad_dtype, (uint64_t)number(p, "at", 0), (float)number(p, "value", 0));
    return memory_push(p->c, &request,
                       i < p->n_params ? n_elems(&p->params[i]) * puppet_dtype_size(p->params[i].grad_dtype) : 16);
}

static int on_push(struct puppet *p)
{
    return push(p, index_word(p));
}

static int push_all(struct puppet *p)
{
    uint32_t only = (uint32_t)number(p, "only", UINT32_MAX);
    unsigned but[MAX_WORDS];
    size_t n_but = list(p, "but", but);
    int r = 0;

    for (uint32_t i = p->n_params; r == 0 && i-- > 0;) {
        bool wanted = !p->params[i].frozen && (only == UINT32_MAX || i == only);

        for (size_t k = 0; k < n_but; k++)
            wanted = wanted && i != but[k];
        if (wanted)
            r = push(p, i);
    }
    return r;
}

static int on_flush(struct puppet *p)
{
    return zerod_flush(p->c);
}

static int on_end(struct puppet *p)
{
    const char *blob = option(p, "blob", NULL);

    return zerod_end_backward(p->c, blob, blob ? strlen(blob) : 0);
}

static int on_abandon(struct puppet *p)
{
    return zerod_abandon_backward(p->c, word(p, 0));
}

static int step(struct puppet *p, const struct zerod_step_args *args)
{
    struct zerod_step_result result;
    int r = zerod_step(p->c, args, &result);

    if (r == 0) {
        say(p, "applied", json_object_new_boolean(result.applied));
        say(p, "missing", json_object_new_int64(result.n_missing));
        say(p, "scale", json_object_new_double(result.loss_scale));
        say(p, "lr", json_object_new_double(result.lr));
    }
    return r;
}

static int on_step(struct puppet *p)
{
    const char *blob = option(p, "blob", NULL);
    double max_norm = number(p, "norm", 0);
    struct zerod_hyper groups[2] = {
        {.lr = number(p, "lr", 0), .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8},
        {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8},
    };

    return step(p, &(struct zerod_step_args){
                       .groups = option(p, "lr", NULL) ? groups : NULL,
                       .n_groups = 2,
                       .max_norm = option(p, "norm", NULL) ? &max_norm : NULL,
                       .loss_scale = number(p, "scale", 0),
                       .found_inf = number(p, "inf", 0) != 0,
                       .blob = blob,
                       .blob_len = blob ? strlen(blob) : 0,
                   });
}

/* Does the remaining micro-batches of the open step, then the step. */
static int one_step(struct puppet *p, uint32_t n_micro)
{
    int r = 0;

    while (r == 0 && zerod_epoch(p->c).micro_batch < n_micro) {
        r = zerod_begin_backward(p->c, NULL);
        if (r == 0)
            r = push_all(p);
        if (r == 0)
            r = zerod_end_backward(p->c, NULL, 0);
    }
    return r == 0 ? step(p, NULL) : r;
}

static int on_steps(struct puppet *p)
{
    uint64_t until = zerod_epoch(p->c).step + index_word(p);
    int r = 0;

    while ((r == 0 || r == ZEROD_ABORTED) && zerod_epoch(p->c).step < until)
        r = one_step(p, (uint32_t)number(p, "micro", 1));
    return r;
}

static int on_norm(struct puppet *p)
{
    double norm = 0;
    int r = zerod_grad_norm(p->c, &norm);

    if (r == 0)
        say(p, "norm", json_object_new_double(norm));
    return r;
}

/* ---- weights and state --------------------------------------------------------------------------------- */

/* Reads ids like "7 2 2"; with times=N the first id counts N times. Return: the number of ids. */
static size_t ids_of(const struct puppet *p, unsigned **ids)
{
    size_t n_times = (size_t)number(p, "times", 1), n = 0;

    *ids = calloc(n_times + MAX_WORDS, sizeof(**ids));
    for (unsigned i = 0; *word(p, i); i++)
        for (size_t k = 0; k < (i == 0 ? n_times : 1); k++)
            (*ids)[n++] = (unsigned)strtoul(word(p, i), NULL, 10);
    return n;
}

static int on_gather(struct puppet *p)
{
    _cleanup_free_ unsigned *ids = NULL;
    size_t n = ids_of(p, &ids);

    return zerod_gather(p->c, ids, n);
}

static int on_release(struct puppet *p)
{
    _cleanup_free_ unsigned *ids = NULL;
    size_t n = ids_of(p, &ids);

    return zerod_release(p->c, ids, n);
}

static int on_prefetch(struct puppet *p)
{
    _cleanup_free_ unsigned *ids = NULL;
    size_t n = ids_of(p, &ids);

    return zerod_prefetch(p->c, ids, n);
}

static int on_window(struct puppet *p)
{
    return zerod_write_begin(p->c);
}

static int on_write(struct puppet *p)
{
    uint32_t i = index_word(p);
    void *data = zerod_window(p->c, i);

    if (!data)
        return -EINVAL;
    for (uint64_t k = 0; k < n_elems(&p->params[i]); k++)
        puppet_store(data, p->params[i].dtype, k, strtof(word(p, 1), NULL));
    return 0;
}

static int on_commit(struct puppet *p)
{
    return zerod_write_end(p->c);
}

static int on_forget(struct puppet *p)
{
    return zerod_write_forget(p->c);
}

static uint64_t digest(uint64_t hash, const void *data, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * UINT64_C(0x100000001b3); /* FNV-1a */
    return hash;
}

static size_t state_bytes(const struct declared *d, enum zerod_state which)
{
    return which == ZEROD_STEP_COUNT ? sizeof(double) : n_elems(d) * sizeof(float);
}

/*
 * Adds one parameter's states and weights to the digest. The option kinds selects the states, by default master weights
 * and moments.
 */
static int digest_param(struct puppet *p, uint32_t i, uint64_t *hash)
{
    const struct declared *d = &p->params[i];
    uint64_t n = n_elems(d);
    _cleanup_free_ float *state = malloc(n * sizeof(float) + 8);
    int r = 0;

    for (const char *kind = d->frozen ? "0" : option(p, "kinds", "012"); r == 0 && *kind; kind++) {
        enum zerod_state which = (enum zerod_state)(*kind - '0');

        r = zerod_read_state(p->c, i, which, state);
        if (r == 0)
            *hash = digest(*hash, state, state_bytes(d, which));
    }
    if (r == 0)
        r = zerod_gather(p->c, &i, 1);
    if (r == 0 && n > 0)
        *hash = digest(*hash, memory_weight(p->c, i, n * puppet_dtype_size(d->dtype)), n * puppet_dtype_size(d->dtype));
    return r == 0 ? zerod_release(p->c, &i, 1) : r;
}

static int on_state(struct puppet *p)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    char text[32];
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < p->n_params; i++)
        r = digest_param(p, i, &hash);
    snprintf(text, sizeof(text), "%016llx", (unsigned long long)hash);
    say(p, "digest", json_object_new_string(text));
    return r;
}

static int on_read(struct puppet *p)
{
    uint32_t i = index_word(p);
    _cleanup_free_ void *data = malloc((i < p->n_params ? n_elems(&p->params[i]) : 1) * 4 + 8);

    enum zerod_state which = (enum zerod_state)strtol(word(p, 1), NULL, 10);
    int r = zerod_read_state(p->c, i, which, data);

    if (r == 0 && (which == ZEROD_STEP_COUNT || which == ZEROD_GRAD_NORM))
        say(p, "value", json_object_new_double(*(double *)data));
    else if (r == 0 && i < p->n_params && n_elems(&p->params[i]) > 0)
        say(p, "value", json_object_new_double((double)*(float *)data)); /* the first element */
    return r;
}

static int on_put(struct puppet *p)
{
    uint32_t i = index_word(p);
    enum zerod_state which = (enum zerod_state)strtol(word(p, 1), NULL, 10);
    uint64_t n = i < p->n_params ? n_elems(&p->params[i]) : 1;
    double value = strtod(word(p, 2), NULL);
    _cleanup_free_ float *data = malloc(n * sizeof(float) + 8);

    for (uint64_t k = 0; k < n; k++)
        data[k] = (float)value;
    return zerod_write_state(p->c, i, which, which == ZEROD_STEP_COUNT ? (const void *)&value : data);
}

/* Saves these states of all trainable parameters to a file, or loads them from it. */
static int move_states(struct puppet *p, FILE *file, bool save)
{
    int r = file ? 0 : -EIO;

    for (uint32_t i = 0; r == 0 && i < p->n_params; i++) {
        const struct declared *d = &p->params[i];
        _cleanup_free_ void *data = malloc(n_elems(d) * sizeof(float) + 8);

        for (const char *kind = option(p, "kinds", "0124"); r == 0 && !d->frozen && *kind; kind++) {
            enum zerod_state which = (enum zerod_state)(*kind - '0');
            size_t n = state_bytes(d, which);

            if (save)
                r = zerod_read_state(p->c, i, which, data);
            if (r == 0 && (save ? fwrite(data, 1, n, file) : fread(data, 1, n, file)) != n)
                r = -EIO;
            if (r == 0 && !save)
                r = zerod_write_state(p->c, i, which, data);
        }
    }
    if (file && fclose(file) != 0 && r == 0)
        r = -EIO;
    return r;
}

static int on_save(struct puppet *p)
{
    return move_states(p, fopen(word(p, 0), "we"), true);
}

static int on_load(struct puppet *p)
{
    return move_states(p, fopen(word(p, 0), "re"), false);
}

static int on_user(struct puppet *p)
{
    const void *data;
    size_t n;
    int r = zerod_user_state(p->c, &data, &n);

    if (r == 0 && data)
        say(p, "blob", json_object_new_string_len(data, (int)n));
    return r;
}

static int on_touch(struct puppet *p)
{
    *(volatile uint8_t *)(uintptr_t)zerod_weight(p->c, index_word(p)) = 1;
    return 0;
}

static int on_peek(struct puppet *p)
{
    volatile uint8_t seen = *(const uint8_t *)zerod_weight(p->c, index_word(p));

    (void)seen;
    return 0;
}

static int on_fork(struct puppet *p)
{
    pid_t child = fork();

    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, 0);
        signal(SIGTERM, SIG_DFL);
        close(STDIN_FILENO);
        close(STDOUT_FILENO);
        close(STDERR_FILENO);
        for (;;) { /* the child tries to act as the rank; libzerod must refuse */
            if (zerod_step(p->c, NULL, NULL) != -ECHILD || zerod_begin_backward(p->c, NULL) != -ECHILD)
                _exit(1);
            sleep(1);
        }
    }
    say(p, "pid", json_object_new_int64(child));
    return child < 0 ? -errno : 0;
}

/* Lists the daemon's memory that this process has mapped, by name. */
static int on_maps(struct puppet *p)
{
    FILE *file = fopen("/proc/self/maps", "re");
    json_object *list = json_object_new_array();
    char line[512];

    while (file && fgets(line, sizeof(line), file)) {
        char *name = strstr(line, "/memfd:zerod.");

        if (!name)
            continue;
        name[strcspn(name, " \n")] = '\0';
        json_object_array_add(list, json_object_new_string(name + strlen("/memfd:zerod.")));
    }
    fclose(file);
    say(p, "maps", list);
    return 0;
}

static int on_pushes(struct puppet *p)
{
    return push_all(p);
}

/* ---- the conversation ---------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    bool needs_connection;
    int (*run)(struct puppet *p);
} commands[] = {
    {"connect", false, on_connect},  {"close", false, on_close},      {"maps", false, on_maps},
    {"declare", true, on_declare},   {"many", true, on_many},         {"param", true, on_param},
    {"huge", true, on_huge},         {"form", true, on_form},         {"begin", true, on_begin},
    {"push", true, on_push},         {"pushes", true, on_pushes},     {"end", true, on_end},
    {"abandon", true, on_abandon},   {"step", true, on_step},         {"steps", true, on_steps},
    {"norm", true, on_norm},         {"abort", true, on_abort},       {"clear", true, on_clear},
    {"leave", true, on_leave},       {"gather", true, on_gather},     {"release", true, on_release},
    {"window", true, on_window},     {"write", true, on_write},       {"commit", true, on_commit},
    {"forget", true, on_forget},     {"read", true, on_read},         {"state", true, on_state},
    {"user", true, on_user},         {"touch", true, on_touch},       {"peek", true, on_peek},
    {"fork", true, on_fork},         {"job", true, on_job},           {"report", true, on_report},
    {"evidence", true, on_evidence}, {"put", true, on_put},           {"save", true, on_save},
    {"load", true, on_load},         {"prefetch", true, on_prefetch}, {"flush", true, on_flush},
};

static json_object *describe_error(const struct zerod_error *e)
{
    json_object *error = json_object_new_object(), *params = json_object_new_array();

    json_object_object_add(error, "code", json_object_new_int(e->code));
    json_object_object_add(error, "text", json_object_new_string(e->text));
    json_object_object_add(error, "class", json_object_new_string(e->cause_class));
    json_object_object_add(error, "rank", json_object_new_int64(e->rank));
    json_object_object_add(error, "step", json_object_new_int64(e->step));
    json_object_object_add(error, "micro_batch", json_object_new_int64(e->micro_batch));
    json_object_object_add(error, "n_params", json_object_new_int64(e->n_params));
    for (unsigned i = 0; i < MIN(e->n_params, 5u); i++)
        if (e->params[i])
            json_object_array_add(params, json_object_new_string(e->params[i]));
    json_object_object_add(error, "params", params);
    return error;
}

static int run(struct puppet *p)
{
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        if (strcmp(commands[i].name, p->words[0]) == 0)
            return commands[i].needs_connection && !p->c ? -ENOTCONN : commands[i].run(p);
    return -ENOSYS;
}

static void answer(struct puppet *p, int r)
{
    say(p, "r", json_object_new_int(r));
    if (r < 0 || r > ZEROD_RESUMED)
        say(p, "error", describe_error(zerod_error(p->c)));
    if (p->c) {
        struct zerod_position at = zerod_epoch(p->c);
        json_object *position = json_object_new_object();

        json_object_object_add(position, "step", json_object_new_int64((int64_t)at.step));
        json_object_object_add(position, "micro_batch", json_object_new_int64(at.micro_batch));
        json_object_object_add(position, "attempt", json_object_new_int64(at.attempt));
        json_object_object_add(position, "windows", json_object_new_int64(at.n_windows));
        say(p, "position", position);
    }
    puts(json_object_to_json_string_ext(p->answer, JSON_C_TO_STRING_PLAIN));
    fflush(stdout);
}

static void split(struct puppet *p, char *line)
{
    p->n_words = 0;
    for (char *w = strtok(line, " \n"); w && p->n_words < MAX_WORDS; w = strtok(NULL, " \n"))
        p->words[p->n_words++] = w;
}

int main(void)
{
    struct puppet p = {.params = calloc(MAX_PARAMS, sizeof(struct declared))};
    _cleanup_free_ char *line = NULL;
    size_t size = 0;

    prctl(PR_SET_PDEATHSIG, SIGKILL); /* ends with the test that started it */
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_RESTART}, NULL);
    while (p.params && getline(&line, &size, stdin) > 0) {
        split(&p, line);
        if (p.n_words == 0 || strcmp(p.words[0], "quit") == 0)
            break;
        p.answer = json_object_new_object();
        answer(&p, run(&p));
        json_object_put(p.answer);
    }
    on_close(&p);
    free(p.params);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/programs/golden-case.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <json-c/json.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "tests/golden/gradients.h"

/* ---- JSON ---------------------------------------------------------------------------------------------- */

static struct json_object *get(struct json_object *object, const char *name)
{
    struct json_object *value = NULL;

    json_object_object_get_ex(object, name, &value);
    return value;
}

/* If the value is a list, it has one element for each step. Return: the value at the step. */
static struct json_object *at_step(struct json_object *value, unsigned step)
{
    return json_object_is_type(value, json_type_array) ? json_object_array_get_idx(value, step) : value;
}

static double get_double(struct json_object *object, const char *name, unsigned step, double otherwise)
{
    struct json_object *value = at_step(get(object, name), step);

    return value ? json_object_get_double(value) : otherwise;
}

static unsigned get_unsigned(struct json_object *object, const char *name, unsigned otherwise)
{
    struct json_object *value = get(object, name);

    return value ? (unsigned)json_object_get_int64(value) : otherwise;
}

static const char *get_string(struct json_object *object, const char *name, const char *otherwise)
{
    struct json_object *value = get(object, name);

    return value ? json_object_get_string(value) : otherwise;
}

/* Return: the index of the word in the list of n words, or -1. */
static int find_word(const char *word, const char *const *words, int n)
{
    for (int i = 0; i < n; i++)
        if (word && strcmp(word, words[i]) == 0)
            return i;
    return -1;
}

/* ---- reading a case ------------------------------------------------------------------------------------ */

static int read_param(struct golden_param *param, struct json_object *object, unsigned index)
{
    static const char *const dtypes[N_DTYPES] = {"fp32", "bf16", "fp16"};
    struct json_object *shape = get(object, "shape"), *trainable = get(object, "trainable");
    int grad_dtype = find_word(get_string(object, "grad_dtype", "fp32"), dtypes, N_DTYPES);
    int dtype = find_word(get_string(object, "weight_dtype", "fp32"), dtypes, N_DTYPES);

    if (!json_object_is_type(shape, json_type_array) || json_object_array_length(shape) > GOLDEN_MAX_DIMS ||
        grad_dtype < 0 || dtype < 0)
        return -EINVAL;
    snprintf(param->name, sizeof(param->name), "p%u", index);
    param->n_dims = (unsigned)json_object_array_length(shape);
    param->n_elems = 1;
    for (unsigned i = 0; i < param->n_dims; i++) {
        param->shape[i] = json_object_get_uint64(json_object_array_get_idx(shape, i));
        param->n_elems *= param->shape[i];
    }
    param->group = get_unsigned(object, "group", 0);
    param->grad_dtype = (enum dtype)grad_dtype;
    param->dtype = (enum dtype)dtype;
    param->trainable = !trainable || json_object_get_boolean(trainable);
    return 0;
}

static int read_case(struct golden_case *c)
{
    static const char *const optimizers[N_OPTIMIZERS] = {"AdamW", "Adam", "SGD", "Lion", "Adagrad", "Muon"};
    struct json_object *params = get(c->root, "params"), *groups = get(c->root, "groups");
    int optimizer = find_word(get_string(get(c->root, "optimizer"), "type", NULL), optimizers, N_OPTIMIZERS);

    if (optimizer < 0 || !json_object_is_type(params, json_type_array))
        return -EINVAL;
    c->optimizer = (enum optimizer)optimizer;
    c->world_size = get_unsigned(c->root, "world_size", 0);
    c->n_steps = get_unsigned(c->root, "steps", 0);
    c->n_groups = groups ? (unsigned)json_object_array_length(groups) : 1;
    c->seed = json_object_get_uint64(get(c->root, "seed"));
    c->divisor = strcmp(get_string(c->root, "op", "mean"), "mean") == 0 ? c->world_size : 1;
    c->n_params = (unsigned)json_object_array_length(params);
    c->params = calloc(c->n_params, sizeof(*c->params));
    if (!c->params)
        return -ENOMEM;
    for (unsigned i = 0; i < c->n_params; i++)
        if (read_param(&c->params[i], json_object_array_get_idx(params, i), i) < 0)
            return -EINVAL;
    return c->world_size > 0 ? 0 : -EINVAL;
}

struct golden_case *golden_case_read(const char *path)
{
    struct golden_case *c = calloc(1, sizeof(*c));

    if (!c)
        return NULL;
    c->root = json_object_from_file(path);
    if (c->root && read_case(c) == 0)
        return c;
    fprintf(stderr, "%s: %s\n", path, c->root ? "not a case" : json_util_get_last_err());
    golden_case_free(c);
    return NULL;
}

void golden_case_free(struct golden_case *c)
{
    if (!c)
        return;
    json_object_put(c->root);
    free(c->params);
    free(c);
}

/* ---- a step's settings --------------------------------------------------------------------------------- */

unsigned golden_case_n_micro_batches(const struct golden_case *c, unsigned step)
{
    return (unsigned)get_double(c->root, "micro_batches", step, 1);
}

double golden_case_max_norm(const struct golden_case *c, unsigned step)
{
    return get_double(c->root, "max_norm", step, 0);
}

double golden_case_loss_scale(const struct golden_case *c, unsigned step)
{
    return get_double(c->root, "loss_scale", step, 1);
}

static void read_hyper(struct hyper *h, struct json_object *params, unsigned step)
{
    struct json_object *betas = get(params, "betas");

    h->lr = get_double(params, "lr", step, h->lr);
    h->beta1 = betas ? json_object_get_double(json_object_array_get_idx(betas, 0)) : h->beta1;
    h->beta2 = betas ? json_object_get_double(json_object_array_get_idx(betas, 1)) : h->beta2;
    h->eps = get_double(params, "eps", step, h->eps);
    h->weight_decay = get_double(params, "weight_decay", step, h->weight_decay);
    h->momentum = get_double(params, "momentum", step, h->momentum);
    h->dampening = get_double(params, "dampening", step, h->dampening);
    h->lr_decay = get_double(params, "lr_decay", step, h->lr_decay);
    h->nesterov = get_double(params, "nesterov", step, h->nesterov) != 0;
    h->adam_w_mode = get_double(params, "adam_w_mode", step, h->adam_w_mode) != 0;
}

struct hyper golden_case_hyper(const struct golden_case *c, unsigned group, unsigned step)
{
    struct json_object *groups = get(c->root, "groups");
    struct hyper hyper = {.adam_w_mode = true};

    read_hyper(&hyper, get(get(c->root, "optimizer"), "params"), step);
    if (groups)
        read_hyper(&hyper, json_object_array_get_idx(groups, group), step);
    return hyper;
}

struct optimizer_moments golden_case_moments(const struct golden_case *c)
{
    static const char *const names[] = {"fp32",       "bf16",       "bf16-stochastic", "8bit",
                                        "fp32-24bit", "bf16-24bit", "8bit-24bit"};
    static const struct moments_type types[] = {{DTYPE_F32}, {DTYPE_BF16}, {DTYPE_BF16, true},   {DTYPE_SIGNED8, true},
                                                {DTYPE_F32}, {DTYPE_BF16}, {DTYPE_SIGNED8, true}};
    const char *name = get_string(c->root, "moments", "fp32");
    int type = find_word(name, names, ARRAY_SIZE(names));
    struct hyper hyper = {.adam_w_mode = true};
    struct optimizer_moments moments;

    assert(type >= 0);
    read_hyper(&hyper, get(get(c->root, "optimizer"), "params"), 0);
    moments = optimizer_moments(c->optimizer, &hyper);
    moments.type = types[type];
    moments.master24 = strstr(name, "-24bit") != NULL;
    return moments;
}

/* ---- who pushes what ----------------------------------------------------------------------------------- */

static bool has_number(struct json_object *numbers, unsigned number)
{
    if (!json_object_is_type(numbers, json_type_array))
        return (unsigned)json_object_get_int64(numbers) == number;
    for (size_t i = 0; i < json_object_array_length(numbers); i++)
        if ((unsigned)json_object_get_int64(json_object_array_get_idx(numbers, i)) == number)
            return true;
    return false;
}

static bool rule_matches(struct json_object *rule, const struct golden_place *at)
{
    const struct {
        const char *name;
        unsigned number;
    } fields[] = {{"rank", at->rank}, {"step", at->step}, {"micro", at->micro}, {"param", at->param}};

    for (size_t i = 0; i < ARRAY_SIZE(fields); i++) {
        struct json_object *numbers = get(rule, fields[i].name);

        if (numbers && !has_number(numbers, fields[i].number))
            return false;
    }
    return true;
}

unsigned golden_case_n_passes(const struct golden_case *c, const struct golden_place *at)
{
    struct json_object *missing = get(c->root, "missing"), *passes = get(c->root, "passes");
    unsigned n = 1;

    if (!c->params[at->param].trainable)
        return 0;
    for (size_t i = 0; missing && i < json_object_array_length(missing); i++)
        if (rule_matches(json_object_array_get_idx(missing, i), at))
            return 0;
    for (size_t i = 0; passes && i < json_object_array_length(passes); i++) {
        struct json_object *rule = json_object_array_get_idx(passes, i);

        if (rule_matches(rule, at))
            n = get_unsigned(rule, "times", 1);
    }
    return n;
}

static void store(void *dst, enum dtype dtype, uint64_t i, float value)
{
    if (dtype == DTYPE_F32)
        ((float *)dst)[i] = value;
    else
        ((uint16_t *)dst)[i] = dtype == DTYPE_BF16 ? gradient_to_bf16(value) : gradient_to_fp16(value);
}

/* Applies the case's "nonfinite" list to the gradient. Its entries are [step, rank, micro, param, index, value]. */
static void store_nonfinite(const struct golden_case *c, const struct golden_place *at, void *dst)
{
    struct json_object *list = get(c->root, "nonfinite");

    for (size_t i = 0; at->pass == 0 && list && i < json_object_array_length(list); i++) {
        struct json_object *entry = json_object_array_get_idx(list, i), *value = json_object_array_get_idx(entry, 5);
        unsigned place[5];

        for (size_t k = 0; k < ARRAY_SIZE(place); k++)
            place[k] = (unsigned)json_object_get_int64(json_object_array_get_idx(entry, k));
        if (place[0] == at->step && place[1] == at->rank && place[2] == at->micro && place[3] == at->param)
            store(dst, c->params[at->param].grad_dtype, place[4],
                  json_object_is_type(value, json_type_string) ? strtof(json_object_get_string(value), NULL)
                                                               : (float)json_object_get_double(value));
    }
}

void golden_case_gradient(const struct golden_case *c, const struct golden_place *at, void *dst)
{
    const struct golden_param *param = &c->params[at->param];
    uint64_t key = gradient_key(&(struct gradient_place){
        .seed = c->seed, .step = at->step, .micro = at->micro, .pass = at->pass, .rank = at->rank, .param = at->param});

    for (uint64_t i = 0; i < param->n_elems; i++)
        store(dst, param->grad_dtype, i, gradient_value(key, i));
    store_nonfinite(c, at, dst);
}

void golden_case_weights(const struct golden_case *c, unsigned param, void *dst)
{
    uint64_t key = gradient_weights_key(c->seed, param);

    for (uint64_t i = 0; i < c->params[param].n_elems; i++)
        store(dst, c->params[param].dtype, i, gradient_value(key, i));
}

/* ---- results and orders -------------------------------------------------------------------------------- */

int golden_write(FILE *file, const char *name, unsigned index, const void *data, size_t n_bytes)
{
    if (fprintf(file, "%s.%u %zu\n", name, index, n_bytes) < 0 || (n_bytes > 0 && fwrite(data, n_bytes, 1, file) != 1))
        return -EIO;
    return 0;
}

uint64_t golden_random(uint64_t *state, uint64_t n)
{
    *state = gradient_mix(*state);
    return *state % n;
}

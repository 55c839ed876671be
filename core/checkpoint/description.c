/* SPDX-License-Identifier: Apache-2.0 */

/* Prints a description as zerod.json, and parses it. */

#include "core/checkpoint/description.h"

#include <assert.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/json.h"
#include "core/base/strbuf.h"
#include "core/layout/layout.h"

enum { BLOCK_DIGITS = 16 };

/* Names of the types of parameters. */
static const char *const dtype_names[] = {[DTYPE_F32] = "fp32", [DTYPE_BF16] = "bf16", [DTYPE_F16] = "fp16"};

#define SEAL ",\"xxh128_of_the_above\":\""

void description_drop_files(struct description *d)
{
    for (size_t i = 0; i < d->n_files; i++) {
        free(d->files[i].name);
        file_hash_deinit(&d->files[i].hash);
    }
    free(steal_ptr(d->files));
    d->n_files = 0;
}

void description_deinit(struct description *d)
{
    description_drop_files(d);
    for (size_t i = 0; i < d->n_params; i++) {
        free(d->params[i].name);
        free(d->params[i].shape);
    }
    free(d->params);
    free(d->version);
    free(d->job);
    free(d->run);
    free(d->optimizer);
    free(d->configuration);
    *d = (struct description){0};
}

struct description_file *description_add_file(struct description *d)
{
    size_t n = d->n_files;

    if ((n & (n - 1)) == 0) { /* full, because the room is always a power of two */
        struct description_file *files = reallocarray(d->files, MAX(2 * n, (size_t)1), sizeof(*files));

        if (!files)
            return NULL;
        d->files = files;
    }
    d->files[d->n_files] = (struct description_file){0};
    return &d->files[d->n_files++];
}

const struct description_file *description_find(const struct description *d, const char *name)
{
    for (size_t i = 0; i < d->n_files; i++)
        if (strcmp(d->files[i].name, name) == 0)
            return &d->files[i];
    return NULL;
}

/* ---- writing ------------------------------------------------------------------------------------------- */

static struct json_object *scale_object(struct json *j, const struct description_scale *scale)
{
    struct json_object *object = json_new_object(j);

    json_put_bool(j, object, "dynamic", scale->dynamic);
    json_put_double(j, object, "scale", scale->scale);
    json_put_u64(j, object, "hysteresis_left", scale->hysteresis_left);
    json_put_u64(j, object, "steps", scale->n_steps);
    json_put_u64(j, object, "window_start", scale->window_start);
    return object;
}

static struct json_object *params_array(struct json *j, const struct layout *layout)
{
    struct json_object *array = json_new_array(j);

    for (uint32_t i = 0; i < layout->n_params; i++) {
        const struct layout_param *p = &layout->params[i];
        struct json_object *object = json_new_object(j), *shape = json_new_array(j);

        assert((size_t)p->dtype < ARRAY_SIZE(dtype_names));
        json_put_string(j, object, "name", p->name);
        json_put_string(j, object, "dtype", dtype_names[p->dtype]);
        for (uint32_t d = 0; d < p->n_dims; d++)
            json_push_u64(j, shape, p->shape[d]);
        json_put(j, object, "shape", shape);
        json_put_u64(j, object, "group", p->group);
        json_put_bool(j, object, "trainable", p->trainable);
        json_push(j, array, object);
    }
    return array;
}

static struct json_object *file_object(struct json *j, const struct description_file *file)
{
    struct json_object *object = json_new_object(j);
    struct strbuf blocks = {0};

    for (size_t i = 0; i < file->hash.n_blocks; i++)
        strbuf_add(&blocks, "%016" PRIx64, file->hash.blocks[i]);
    json_put_string(j, object, "name", file->name);
    json_put_u64(j, object, "bytes", file->n_bytes);
    json_put_string(j, object, "xxh128", file->hash.whole);
    json_put_string(j, object, "xxh64_of_each_mib", strbuf_text(&blocks));
    j->failed |= blocks.cut;
    strbuf_deinit(&blocks);
    return object;
}

/* Adds the hash of the text, as its last field, to a JSON object. Takes over the text. Return: the new text, or NULL
 * without memory. */
static char *seal(char *text)
{
    size_t n = text ? strlen(text) - 1 : 0; /* without the last brace of the text */
    char *sealed = text ? realloc(text, n + sizeof(SEAL) + HASH_TEXT_BYTES + sizeof("\"}\n")) : NULL;
    char hash[HASH_TEXT_BYTES];

    if (!sealed) {
        free(text);
        return NULL;
    }
    assert(sealed[n] == '}');
    hash_text(hash, sealed, n);
    sprintf(sealed + n, SEAL "%s\"}\n", hash);
    return sealed;
}

void description_put_facts(struct json *j, struct json_object *object, const struct description *d)
{
    json_put_string(j, object, "zerod", d->version);
    json_put_string(j, object, "job", d->job);
    json_put_string(j, object, "run", d->run);
    json_put_u64(j, object, "step", d->step);
    json_put_u64(j, object, "applied_steps", d->n_applied);
    json_put_u64(j, object, "world_size", d->world_size);
    json_put_u64(j, object, "nodes", d->n_nodes);
    json_put_u64(j, object, "stage", d->stage);
    json_put_string(j, object, "optimizer", d->optimizer);
    json_put(j, object, "loss_scale", scale_object(j, &d->loss_scale));
}

char *description_print(const struct description *d, const struct layout *layout)
{
    struct json j = {0};
    struct json_object *root = json_new_object(&j), *files = json_new_array(&j);

    json_put_u64(&j, root, "format", DESCRIPTION_FORMAT);
    description_put_facts(&j, root, d);
    json_put_string(&j, root, "configuration", d->configuration);
    json_put(&j, root, "parameters", params_array(&j, layout));
    for (size_t i = 0; i < d->n_files; i++)
        json_push(&j, files, file_object(&j, &d->files[i]));
    json_put(&j, root, "files", files);
    return seal(json_text(&j, root));
}

/* ---- reading ------------------------------------------------------------------------------------------- */

struct reader {
    char *why;
    size_t why_size;
    int result; /* result of the first failure */
};

static void fail_reading(struct reader *reader, int result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void fail_reading(struct reader *reader, int result, const char *format, ...)
{
    va_list args;

    if (reader->result != 0)
        return;
    reader->result = result;
    va_start(args, format);
    vsnprintf(reader->why, reader->why_size, format, args);
    va_end(args);
}

static struct json_object *get(struct reader *reader, struct json_object *object, const char *key, enum json_type type)
{
    struct json_object *value = NULL;

    if (!json_object_object_get_ex(object, key, &value) || !json_object_is_type(value, type)) {
        fail_reading(reader, -EINVAL, "it lacks \"%s\", or that is no %s", key, json_type_to_name(type));
        return NULL;
    }
    return value;
}

static uint64_t get_u64(struct reader *reader, struct json_object *object, const char *key)
{
    struct json_object *value = get(reader, object, key, json_type_int);

    if (value && json_object_get_int64(value) < 0)
        fail_reading(reader, -EINVAL, "its \"%s\" is negative", key);
    return value ? json_object_get_uint64(value) : 0;
}

static unsigned get_unsigned(struct reader *reader, struct json_object *object, const char *key)
{
    uint64_t value = get_u64(reader, object, key);

    if (value > UINT_MAX)
        fail_reading(reader, -EINVAL, "its \"%s\" is too large", key);
    return (unsigned)value;
}

static char *get_string(struct reader *reader, struct json_object *object, const char *key)
{
    struct json_object *value = get(reader, object, key, json_type_string);
    char *copy = value ? strdup(json_object_get_string(value)) : NULL;

    if (value && !copy)
        fail_reading(reader, -ENOMEM, "no memory");
    return copy;
}

static char *get_optional_string(struct reader *reader, struct json_object *object, const char *key)
{
    struct json_object *value = NULL;

    return json_object_object_get_ex(object, key, &value) && value ? get_string(reader, object, key) : NULL;
}

static double get_double(struct reader *reader, struct json_object *object, const char *key)
{
    struct json_object *value = NULL;

    if (json_object_object_get_ex(object, key, &value) &&
        (json_object_is_type(value, json_type_double) || json_object_is_type(value, json_type_int)) &&
        isfinite(json_object_get_double(value)))
        return json_object_get_double(value);
    fail_reading(reader, -EINVAL, "it lacks \"%s\", or that is no number", key);
    return 0;
}

static void read_scale(struct reader *reader, struct json_object *root, struct description_scale *scale)
{
    struct json_object *object = get(reader, root, "loss_scale", json_type_object), *dynamic;

    if (!object)
        return;
    dynamic = get(reader, object, "dynamic", json_type_boolean);
    *scale = (struct description_scale){
        .dynamic = json_object_get_boolean(dynamic),
        .scale = get_double(reader, object, "scale"),
        .hysteresis_left = get_u64(reader, object, "hysteresis_left"),
        .n_steps = get_u64(reader, object, "steps"),
        .window_start = get_u64(reader, object, "window_start"),
    };
}

static enum dtype find_dtype(struct reader *reader, const char *name)
{
    for (size_t i = 0; name && i < ARRAY_SIZE(dtype_names); i++)
        if (dtype_names[i] && strcmp(name, dtype_names[i]) == 0)
            return (enum dtype)i;
    fail_reading(reader, -EINVAL, "it has a parameter of a type that cannot be");
    return DTYPE_F32;
}

static void read_shape(struct reader *reader, struct json_object *shape, struct description_param *param)
{
    size_t n = json_object_array_length(shape);
    bool fits = n <= LAYOUT_MAX_DIMS;

    param->shape = calloc(n + 1, sizeof(*param->shape));
    if (!param->shape) {
        fail_reading(reader, -ENOMEM, "no memory");
        return;
    }
    param->n_elems = 1;
    param->n_dims = (uint32_t)n;
    for (size_t i = 0; fits && i < n; i++) {
        struct json_object *value = json_object_array_get_idx(shape, i);

        param->shape[i] = json_object_get_uint64(value);
        fits = json_object_is_type(value, json_type_int) && json_object_get_int64(value) >= 0 &&
               !__builtin_mul_overflow(param->n_elems, param->shape[i], &param->n_elems);
    }
    if (!fits)
        fail_reading(reader, -EINVAL, "its parameter \"%.80s\" has a shape that cannot be", param->name);
}

static void read_param(struct reader *reader, struct description_param *param, struct json_object *object)
{
    _cleanup_free_ char *dtype = get_string(reader, object, "dtype");
    struct json_object *shape = get(reader, object, "shape", json_type_array);

    param->name = get_string(reader, object, "name");
    param->trainable = json_object_get_boolean(get(reader, object, "trainable", json_type_boolean));
    param->dtype = find_dtype(reader, dtype);
    if (reader->result == 0)
        read_shape(reader, shape, param);
}

static void read_params(struct reader *reader, struct json_object *root, struct description *d)
{
    struct json_object *params = get(reader, root, "parameters", json_type_array);
    size_t n = params ? json_object_array_length(params) : 0;

    d->params = calloc(n + 1, sizeof(*d->params));
    if (!d->params)
        fail_reading(reader, -ENOMEM, "no memory");
    for (size_t i = 0; reader->result == 0 && i < n; i++)
        read_param(reader, &d->params[d->n_params++], json_object_array_get_idx(params, i));
}

/* Reads the hashes of n_blocks blocks. Return: false if the digits are malformed. */
static bool read_blocks(const char *digits, struct file_hash *hash)
{
    char text[BLOCK_DIGITS + 1] = "", *end;

    if (strspn(digits, "0123456789abcdef") != hash->n_blocks * BLOCK_DIGITS ||
        strlen(digits) != hash->n_blocks * BLOCK_DIGITS)
        return false;
    for (size_t i = 0; i < hash->n_blocks; i++) {
        memcpy(text, digits + i * BLOCK_DIGITS, BLOCK_DIGITS);
        hash->blocks[i] = strtoull(text, &end, 16);
    }
    return true;
}

/* Reads the hash of the whole file. Return: false if the digits do not have the form of hash_text(). */
static bool read_whole(const char *digits, struct file_hash *hash)
{
    snprintf(hash->whole, sizeof(hash->whole), "%s", digits);
    return strlen(digits) == HASH_TEXT_BYTES - 1 && strspn(digits, "0123456789abcdef") == HASH_TEXT_BYTES - 1;
}

/* Return: true if the name leads out of the folder, or cannot be printed. */
static bool is_bad_name(const char *name)
{
    _cleanup_free_ char *clean = json_clean(name);

    return !clean || strcmp(clean, name) != 0 || *name == '\0' || *name == '.' || strchr(name, '/');
}

static void read_file(struct reader *reader, struct description *d, struct json_object *object)
{
    struct description_file *file = description_add_file(d);
    _cleanup_free_ char *whole = NULL, *blocks = NULL;

    if (!file) {
        fail_reading(reader, -ENOMEM, "no memory");
        return;
    }
    file->name = get_string(reader, object, "name");
    file->n_bytes = get_u64(reader, object, "bytes");
    whole = get_string(reader, object, "xxh128");
    blocks = get_string(reader, object, "xxh64_of_each_mib");
    if (reader->result != 0)
        return;
    file->hash.n_blocks = strlen(blocks) / BLOCK_DIGITS;
    file->hash.blocks = calloc(file->hash.n_blocks + 1, sizeof(*file->hash.blocks));
    if (!file->hash.blocks)
        fail_reading(reader, -ENOMEM, "no memory");
    else if (is_bad_name(file->name) || !read_whole(whole, &file->hash) || !read_blocks(blocks, &file->hash) ||
             file->hash.n_blocks != file->n_bytes / HASH_BLOCK_BYTES + (file->n_bytes % HASH_BLOCK_BYTES > 0))
        fail_reading(reader, -EINVAL, "its entry for file \"%.80s\" is invalid", file->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Fails if two files have the same name. */
static void check_file_names(struct reader *reader, const struct description *d)
{
    _cleanup_free_ const char **names = calloc(d->n_files + 1, sizeof(*names));

    if (!names) {
        fail_reading(reader, -ENOMEM, "no memory");
        return;
    }
    for (size_t i = 0; i < d->n_files; i++)
        names[i] = d->files[i].name;
    qsort(names, d->n_files, sizeof(*names), compare_names);
    for (size_t i = 1; i < d->n_files; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            fail_reading(reader, -EINVAL, "its entry for file \"%.80s\" is invalid", names[i]);
}

static void read_root(struct reader *reader, struct json_object *root, struct description *d)
{
    uint64_t format = get_u64(reader, root, "format");
    struct json_object *files;

    if (format != DESCRIPTION_FORMAT)
        fail_reading(reader, -EINVAL, "its format is %" PRIu64 ", and this version of zerod reads format %d", format,
                     DESCRIPTION_FORMAT);
    d->version = get_string(reader, root, "zerod");
    d->job = get_string(reader, root, "job");
    d->run = get_optional_string(reader, root, "run");
    d->step = get_u64(reader, root, "step");
    d->n_applied = get_u64(reader, root, "applied_steps");
    d->world_size = get_unsigned(reader, root, "world_size");
    d->n_nodes = get_unsigned(reader, root, "nodes");
    d->stage = get_unsigned(reader, root, "stage");
    d->optimizer = get_string(reader, root, "optimizer");
    d->configuration = get_string(reader, root, "configuration");
    read_scale(reader, root, &d->loss_scale);
    read_params(reader, root, d);
    files = get(reader, root, "files", json_type_array);
    for (size_t i = 0; reader->result == 0 && i < json_object_array_length(files); i++)
        read_file(reader, d, json_object_array_get_idx(files, i));
    if (reader->result == 0)
        check_file_names(reader, d);
}

/* Return: true if the hash at the end of the text is the hash of the text before it. */
static bool is_sealed(const char *text, size_t n_bytes)
{
    size_t n_seal = strlen(SEAL) + HASH_TEXT_BYTES - 1 + strlen("\"}\n");
    size_t n = n_bytes - n_seal;
    char hash[HASH_TEXT_BYTES];

    if (n_bytes <= n_seal || memcmp(text + n, SEAL, strlen(SEAL)) != 0)
        return false;
    hash_text(hash, text, n);
    return memcmp(text + n + strlen(SEAL), hash, HASH_TEXT_BYTES - 1) == 0 &&
           memcmp(text + n_bytes - 3, "\"}\n", 3) == 0;
}

int description_parse(struct description *out, const char *text, size_t n_bytes, char *why, size_t why_size)
{
    struct json_tokener *tokener = json_tokener_new();
    struct json_object *root = NULL;
    struct reader reader = {.why = why, .why_size = why_size};

    *out = (struct description){0};
    if (!tokener)
        fail_reading(&reader, -ENOMEM, "no memory");
    else if (n_bytes > DESCRIPTION_MAX_BYTES)
        fail_reading(&reader, -EINVAL, "it is too large");
    else if (!is_sealed(text, n_bytes))
        fail_reading(&reader, -EINVAL, "its bytes are not those that were written");
    if (reader.result == 0) {
        json_tokener_set_flags(tokener, JSON_TOKENER_STRICT);
        root = json_tokener_parse_ex(tokener, text, (int)n_bytes);
    }
    if (reader.result == 0 &&
        (!json_object_is_type(root, json_type_object) || json_tokener_get_parse_end(tokener) != n_bytes))
        fail_reading(&reader, -EINVAL, "it is no JSON object");
    if (reader.result == 0)
        read_root(&reader, root, out);
    if (reader.result == 0)
        out->digest = hash_block(text, n_bytes);
    else
        description_deinit(out);
    json_object_put(root);
    json_tokener_free(tokener);
    return reader.result;
}

/* SPDX-License-Identifier: Apache-2.0 */

/* Prints and parses headers of safetensors files, with json-c. */

#include "core/checkpoint/safetensors.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/json.h"

enum {
    DATA_ALIGN_BYTES = 64, /* alignment of the first tensor, which suits every type */
    MAX_DEPTH = 8,         /* maximum depth of the JSON; the format needs 3 */
};

#define METADATA "__metadata__" /* the key of the header that names no tensor */
#define SHARDING "DCP_SHARDING_INFO"
#define STARTS "saved_offsets"

static const char *const dtype_names[] = {
    [DTYPE_F32] = "F32", [DTYPE_BF16] = "BF16", [DTYPE_F16] = "F16", [SAFETENSORS_U8] = "U8"};

void safetensors_deinit(struct safetensors *file)
{
    for (size_t i = 0; i < file->n; i++)
        free(file->tensors[i].name);
    free(file->tensors);
    json_object_put(file->names);
    *file = (struct safetensors){0};
}

/* ---- the table ----------------------------------------------------------------------------------------- */

static size_t element_bytes(int dtype)
{
    assert(dtype >= 0);
    assert(dtype < SAFETENSORS_OTHER);
    return dtype == SAFETENSORS_U8 ? 1 : dtype_size(dtype);
}

/* Adds a name and its index to the object. Return: 0 or -ENOMEM. */
static int put_index(struct json_object *names, const char *name, size_t index)
{
    struct json_object *value = json_object_new_uint64(index);

    if (value && json_object_object_add(names, name, value) == 0)
        return 0;
    json_object_put(value);
    return -ENOMEM;
}

/* Adds a tensor, and takes over its name. Return: 0, -ENOMEM, or SAFETENSORS_E_DUPLICATE. */
static int append_tensor(struct safetensors *file, const struct safetensors_tensor *tensor)
{
    size_t capacity = file->n < file->capacity ? file->capacity : MAX(file->capacity * 2, (size_t)64);
    struct safetensors_tensor *tensors = reallocarray(file->tensors, capacity, sizeof(*tensors));

    if (!file->names)
        file->names = json_object_new_object();
    if (tensors) {
        file->tensors = tensors;
        file->capacity = capacity;
    }
    if (!tensors || !file->names || !tensor->name) {
        free(tensor->name);
        return -ENOMEM;
    }
    if (json_object_object_get_ex(file->names, tensor->name, NULL)) {
        free(tensor->name);
        return SAFETENSORS_E_DUPLICATE;
    }
    if (put_index(file->names, tensor->name, file->n) < 0) {
        free(tensor->name);
        return -ENOMEM;
    }
    assert(file->n < file->capacity);
    file->tensors[file->n++] = *tensor;
    return 0;
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name)
{
    _cleanup_free_ char *clean = json_clean(name);
    struct json_object *index;

    if (!clean || !json_object_object_get_ex(file->names, clean, &index))
        return NULL;
    assert(json_object_get_uint64(index) < file->n);
    return &file->tensors[json_object_get_uint64(index)];
}

size_t safetensors_at(const struct safetensors *file, uint64_t offset_bytes)
{
    size_t first = 0, end = file->n;

    while (first < end) {
        size_t middle = first + (end - first) / 2;

        if (file->tensors[middle].offset_bytes <= offset_bytes)
            first = middle + 1;
        else
            end = middle;
    }
    return first > 0 ? first - 1 : file->n;
}

/* ---- writing ------------------------------------------------------------------------------------------- */

int safetensors_add(struct safetensors *file, const char *name, int dtype, const uint64_t *shape,
                    const uint64_t *starts, uint32_t n_dims)
{
    struct safetensors_tensor tensor = {
        .name = json_clean(name), .dtype = dtype, .n_dims = n_dims, .n_bytes = element_bytes(dtype)};

    assert(n_dims <= LAYOUT_MAX_DIMS);
    if (tensor.name && strcmp(tensor.name, METADATA) == 0) {
        free(tensor.name);
        return SAFETENSORS_E_DUPLICATE;
    }
    for (uint32_t i = 0; i < n_dims; i++) {
        tensor.shape[i] = shape[i];
        tensor.starts[i] = starts ? starts[i] : 0;
        tensor.n_bytes *= shape[i];
    }
    return append_tensor(file, &tensor);
}

static struct json_object *list(struct json *j, const uint64_t *values, uint32_t n)
{
    struct json_object *array = json_new_array(j);

    for (uint32_t i = 0; i < n; i++)
        json_push_u64(j, array, values[i]);
    return array;
}

static void describe_tensor(struct json *j, struct json_object *root, const struct safetensors_tensor *tensor)
{
    struct json_object *object = json_new_object(j);

    assert((size_t)tensor->dtype < ARRAY_SIZE(dtype_names));
    json_put_string(j, object, "dtype", dtype_names[tensor->dtype]);
    json_put(j, object, "shape", list(j, tensor->shape, tensor->n_dims));
    json_put(j, object, "data_offsets",
             list(j, (uint64_t[]){tensor->offset_bytes, tensor->offset_bytes + tensor->n_bytes}, 2));
    json_put(j, root, tensor->name, object); /* the name lives longer than this JSON */
}

/* Adds where each tensor of a sharded file begins in the larger tensor. */
static void print_sharding(struct json *j, struct json_object *metadata, const struct safetensors *file)
{
    struct json inner = {0};
    struct json_object *root = json_new_object(&inner);
    _cleanup_free_ char *text = NULL;

    for (size_t i = 0; i < file->n; i++) {
        const struct safetensors_tensor *tensor = &file->tensors[i];
        struct json_object *object = json_new_object(&inner);

        json_put(&inner, object, STARTS, list(&inner, tensor->starts, tensor->n_dims));
        json_put(&inner, root, tensor->name, object);
    }
    text = json_text(&inner, root);
    json_put_string(j, metadata, SHARDING, text);
    j->failed |= !text;
}

/* Return: the JSON, with offsets from the first tensor's first byte; or NULL without memory. */
static char *print_header(struct safetensors *file)
{
    struct json j = {0};
    struct json_object *root = json_new_object(&j), *metadata = json_new_object(&j);

    json_put_string(&j, metadata, "format", "pt"); /* transformers reads only files with "pt" */
    if (file->sharded)
        print_sharding(&j, metadata, file);
    json_put(&j, root, METADATA, metadata);
    for (size_t i = 0; i < file->n; i++)
        describe_tensor(&j, root, &file->tensors[i]);
    return json_text(&j, root);
}

int safetensors_header(struct safetensors *file, uint8_t **bytes, size_t *n_bytes)
{
    _cleanup_free_ char *text = NULL;
    uint64_t end = 0, length;
    size_t n_text;

    for (size_t i = 0; i < file->n; i++) {
        file->tensors[i].offset_bytes = end;
        end += file->tensors[i].n_bytes;
    }
    text = print_header(file);
    if (!text)
        return -ENOMEM;
    n_text = strlen(text);
    *n_bytes = round_up(SAFETENSORS_LENGTH_BYTES + n_text, DATA_ALIGN_BYTES);
    length = *n_bytes - SAFETENSORS_LENGTH_BYTES;
    if (length > SAFETENSORS_MAX_HEADER_BYTES)
        return SAFETENSORS_E_TOO_LARGE;
    *bytes = malloc(*n_bytes);
    if (!*bytes)
        return -ENOMEM;
    for (unsigned i = 0; i < SAFETENSORS_LENGTH_BYTES; i++)
        (*bytes)[i] = (uint8_t)(length >> 8 * i);
    memset(*bytes + SAFETENSORS_LENGTH_BYTES, ' ', length);
    memcpy(*bytes + SAFETENSORS_LENGTH_BYTES, text, n_text);
    for (size_t i = 0; i < file->n; i++)
        file->tensors[i].offset_bytes += *n_bytes;
    file->file_bytes = *n_bytes + end;
    return 0;
}

/* ---- reading ------------------------------------------------------------------------------------------- */

uint64_t safetensors_header_bytes(const uint8_t *bytes, uint64_t file_bytes)
{
    uint64_t length = 0;

    for (unsigned i = 0; i < SAFETENSORS_LENGTH_BYTES; i++)
        length |= (uint64_t)bytes[i] << 8 * i;
    if (file_bytes < SAFETENSORS_LENGTH_BYTES || length > SAFETENSORS_MAX_HEADER_BYTES ||
        length > file_bytes - SAFETENSORS_LENGTH_BYTES)
        return 0;
    return SAFETENSORS_LENGTH_BYTES + length;
}

/* Return: true if the value is a whole number from 0 to UINT64_MAX - 1. json-c turns larger numbers into UINT64_MAX. */
static bool take_u64(struct json_object *value, uint64_t *out)
{
    if (!json_object_is_type(value, json_type_int) || json_object_get_int64(value) < 0)
        return false;
    *out = json_object_get_uint64(value);
    return *out != UINT64_MAX;
}

static int find_dtype(const char *name)
{
    for (int i = 0; i < SAFETENSORS_OTHER; i++)
        if (strcmp(name, dtype_names[i]) == 0)
            return i;
    return SAFETENSORS_OTHER;
}

/* Reads the shape. Return: false if it is wrong. Tensors of type SAFETENSORS_OTHER may have any shape and size. A shape
 * with a dimension of 0 is empty. */
static bool read_shape(struct json_object *shape, struct safetensors_tensor *tensor)
{
    size_t n = json_object_is_type(shape, json_type_array) ? json_object_array_length(shape) : SIZE_MAX;
    uint64_t n_bytes = tensor->dtype == SAFETENSORS_OTHER ? 1 : element_bytes(tensor->dtype);
    bool is_empty = false, fits = true;

    if (n > LAYOUT_MAX_DIMS)
        return tensor->dtype == SAFETENSORS_OTHER && n != SIZE_MAX;
    tensor->n_dims = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        if (!take_u64(json_object_array_get_idx(shape, i), &tensor->shape[i]))
            return false;
        is_empty |= tensor->shape[i] == 0;
        fits = !__builtin_mul_overflow(n_bytes, tensor->shape[i], &n_bytes) && fits;
    }
    return tensor->dtype == SAFETENSORS_OTHER || (is_empty ? tensor->n_bytes == 0 : fits && n_bytes == tensor->n_bytes);
}

static bool read_tensor(struct json_object *object, struct safetensors_tensor *tensor)
{
    struct json_object *dtype, *shape, *offsets;
    uint64_t begin, end;

    if (!json_object_is_type(object, json_type_object) || !json_object_object_get_ex(object, "dtype", &dtype) ||
        !json_object_is_type(dtype, json_type_string) || !json_object_object_get_ex(object, "shape", &shape) ||
        !json_object_object_get_ex(object, "data_offsets", &offsets) ||
        !json_object_is_type(offsets, json_type_array) || json_object_array_length(offsets) != 2 ||
        !take_u64(json_object_array_get_idx(offsets, 0), &begin) ||
        !take_u64(json_object_array_get_idx(offsets, 1), &end) || begin > end)
        return false;
    tensor->dtype = find_dtype(json_object_get_string(dtype));
    tensor->offset_bytes = begin;
    tensor->n_bytes = end - begin;
    return read_shape(shape, tensor);
}

static int compare_places(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;

    if (x->offset_bytes != y->offset_bytes)
        return x->offset_bytes < y->offset_bytes ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

/* Sorts the tensors by their offsets. Return: true if the tensors fill the file without gaps. */
static bool places_fill(struct safetensors *file, uint64_t data_at)
{
    uint64_t end = data_at;

    if (file->n > 0)
        qsort(file->tensors, file->n, sizeof(*file->tensors), compare_places);
    for (size_t i = 0; i < file->n; i++) {
        struct safetensors_tensor *tensor = &file->tensors[i];

        if (tensor->n_bytes > file->file_bytes || tensor->offset_bytes > file->file_bytes ||
            tensor->offset_bytes + data_at != end)
            return false;
        tensor->offset_bytes = end;
        end += tensor->n_bytes;
    }
    return end == file->file_bytes;
}

static int index_names(struct safetensors *file)
{
    json_object_put(file->names);
    file->names = json_object_new_object();
    for (size_t i = 0; file->names && i < file->n; i++)
        if (put_index(file->names, file->tensors[i].name, i) < 0)
            return -ENOMEM;
    return file->names ? 0 : -ENOMEM;
}

/* json-c keeps only the last of two equal keys, ends keys at a NUL, and accepts 'this' as a string. So the text itself
 * is checked, too. */
struct text_check {
    size_t n_keys;
    bool has_nul, has_single_quotes;
};

static struct text_check check_text(const char *text, size_t n_bytes)
{
    struct text_check check = {0};
    bool quoted = false;

    for (size_t i = 0; i < n_bytes; i++) {
        if (quoted && text[i] == '\\') {
            check.has_nul |= n_bytes - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0;
            i++; /* skip the next character, which does not end the string */
        } else if (text[i] == '"') {
            quoted = !quoted;
        } else if (!quoted && text[i] == ':') {
            check.n_keys++;
        } else if (!quoted && text[i] == '\'') {
            check.has_single_quotes = true;
        }
    }
    return check;
}

static size_t count_keys(struct json_object *value)
{
    size_t n = 0;

    if (json_object_is_type(value, json_type_object)) {
        json_object_object_foreach(value, key, inner)
        {
            (void)key;
            n += 1 + count_keys(inner);
        }
    } else if (json_object_is_type(value, json_type_array)) {
        for (size_t i = 0; i < json_object_array_length(value); i++)
            n += count_keys(json_object_array_get_idx(value, i));
    }
    return n;
}

/* Parses the JSON. Return: an object; or NULL after setting *r, with a message in why for SAFETENSORS_E_INVALID. */
static struct json_object *read_json(const char *text, size_t n_bytes, int *r, char *why, size_t why_size)
{
    struct json_tokener *tokener = json_tokener_new_ex(MAX_DEPTH);
    struct json_object *root = NULL;
    struct text_check check = check_text(text, n_bytes);
    const char *problem = NULL;

    if (!tokener) {
        *r = -ENOMEM;
        return NULL;
    }
    json_tokener_set_flags(tokener, JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8);
    root = json_tokener_parse_ex(tokener, text, (int)n_bytes);
    if (!json_object_is_type(root, json_type_object) || json_tokener_get_parse_end(tokener) != n_bytes ||
        check.has_single_quotes)
        problem = "its header is no JSON object";
    else if (check.has_nul)
        problem = "its header has a NUL in a text";
    else if (check.n_keys != count_keys(root))
        problem = "its header has two values of one name";
    json_tokener_free(tokener);
    if (!problem)
        return root;
    json_object_put(root);
    snprintf(why, why_size, "%s", problem);
    *r = SAFETENSORS_E_INVALID;
    return NULL;
}

static int read_tensors(struct safetensors *file, struct json_object *root, char *why, size_t why_size)
{
    json_object_object_foreach(root, name, object)
    {
        struct safetensors_tensor tensor = {.name = strcmp(name, METADATA) == 0 ? NULL : json_clean(name)};
        int r;

        if (strcmp(name, METADATA) == 0)
            continue;
        if (tensor.name && !read_tensor(object, &tensor)) {
            snprintf(why, why_size, "its header says something of tensor \"%.80s\" that cannot be", tensor.name);
            free(tensor.name);
            return SAFETENSORS_E_INVALID;
        }
        r = append_tensor(file, &tensor);
        if (r == SAFETENSORS_E_DUPLICATE)
            snprintf(why, why_size, "its header has two tensors with names like \"%.80s\"", name);
        if (r != 0)
            return r == SAFETENSORS_E_DUPLICATE ? SAFETENSORS_E_INVALID : r;
    }
    return 0;
}

/* Reads where the tensor begins in the larger tensor. Return: false if its entry is wrong. */
static bool read_starts(struct json_object *root, struct safetensors_tensor *tensor)
{
    struct json_object *object = NULL, *starts = NULL;

    if (!json_object_object_get_ex(root, tensor->name, &object) || !json_object_is_type(object, json_type_object) ||
        !json_object_object_get_ex(object, STARTS, &starts) || !json_object_is_type(starts, json_type_array) ||
        json_object_array_length(starts) != tensor->n_dims)
        return tensor->dtype == SAFETENSORS_OTHER;
    for (uint32_t i = 0; i < tensor->n_dims; i++)
        if (!take_u64(json_object_array_get_idx(starts, i), &tensor->starts[i]))
            return false;
    return true;
}

static int read_sharding(struct safetensors *file, struct json_object *root, char *why, size_t why_size)
{
    struct json_object *metadata = NULL, *text = NULL, *sharding;
    int r = 0;

    if (!json_object_object_get_ex(root, METADATA, &metadata) || !json_object_is_type(metadata, json_type_object) ||
        !json_object_object_get_ex(metadata, SHARDING, &text) || !json_object_is_type(text, json_type_string))
        return 0;
    sharding = read_json(json_object_get_string(text), (size_t)json_object_get_string_len(text), &r, why, why_size);
    if (!sharding) {
        if (r == SAFETENSORS_E_INVALID)
            snprintf(why, why_size, "its header has " SHARDING " that cannot be");
        return r;
    }
    file->sharded = true;
    for (size_t i = 0; r == 0 && i < file->n; i++)
        if (!read_starts(sharding, &file->tensors[i])) {
            snprintf(why, why_size, "its header has an invalid start for tensor \"%.80s\"", file->tensors[i].name);
            r = SAFETENSORS_E_INVALID;
        }
    json_object_put(sharding);
    return r;
}

int safetensors_parse(struct safetensors *out, const uint8_t *bytes, uint64_t n_bytes, uint64_t file_bytes, char *why,
                      size_t why_size)
{
    int r = 0;
    struct json_object *root = read_json((const char *)bytes + SAFETENSORS_LENGTH_BYTES,
                                         n_bytes - SAFETENSORS_LENGTH_BYTES, &r, why, why_size);

    assert(n_bytes >= SAFETENSORS_LENGTH_BYTES); /* n_bytes is a result of safetensors_header_bytes() that is not 0 */
    assert(n_bytes <= file_bytes);
    *out = (struct safetensors){.file_bytes = file_bytes};
    if (r == 0)
        r = read_tensors(out, root, why, why_size);
    if (r == 0)
        r = read_sharding(out, root, why, why_size);
    if (r == 0 && !places_fill(out, n_bytes)) {
        snprintf(why, why_size, "its tensors do not fill it: it was cut short, or has gaps");
        r = SAFETENSORS_E_INVALID;
    }
    if (r == 0)
        r = index_names(out);
    if (r != 0)
        safetensors_deinit(out);
    json_object_put(root);
    return r;
}

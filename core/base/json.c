/* SPDX-License-Identifier: Apache-2.0 */
/* The JSON builder over json-c. */

#include "core/base/json.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/utf8.h"

struct json_object *json_new_object(struct json *j)
{
    struct json_object *object = json_object_new_object();

    if (!object)
        j->failed = true;
    return object;
}

struct json_object *json_new_array(struct json *j)
{
    struct json_object *array = json_object_new_array();

    if (!array)
        j->failed = true;
    return array;
}

void json_put(struct json *j, struct json_object *object, const char *key, struct json_object *value)
{
    if (object && value && json_object_object_add_ex(object, key, value, JSON_C_OBJECT_ADD_CONSTANT_KEY) == 0)
        return;
    json_object_put(value);
    j->failed = true;
}

void json_push(struct json *j, struct json_object *array, struct json_object *value)
{
    if (array && value && json_object_array_add(array, value) == 0)
        return;
    json_object_put(value);
    j->failed = true;
}

void json_put_null(struct json *j, struct json_object *object, const char *key)
{
    /* json-c's null is a NULL pointer, and json_put() treats NULL as a failure. */
    if (!object || json_object_object_add_ex(object, key, NULL, JSON_C_OBJECT_ADD_CONSTANT_KEY) < 0)
        j->failed = true;
}

void json_put_bool(struct json *j, struct json_object *object, const char *key, bool value)
{
    json_put(j, object, key, json_object_new_boolean(value));
}

void json_put_u64(struct json *j, struct json_object *object, const char *key, uint64_t value)
{
    json_put(j, object, key, json_object_new_uint64(value));
}

void json_put_i64(struct json *j, struct json_object *object, const char *key, int64_t value)
{
    json_put(j, object, key, json_object_new_int64(value));
}

void json_put_double(struct json *j, struct json_object *object, const char *key, double value)
{
    char text[32];
    int n_digits;

    if (!isfinite(value)) {
        json_put_null(j, object, key);
        return;
    }
    for (n_digits = 15; n_digits < 17; n_digits++) {
        snprintf(text, sizeof(text), "%.*g", n_digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    snprintf(text, sizeof(text), "%.*g", n_digits, value);
    json_put(j, object, key, json_object_new_double_s(value, text));
}

static struct json_object *string_new(const char *value)
{
    _cleanup_free_ char *clean = json_clean(value);

    return clean ? json_object_new_string(clean) : NULL;
}

void json_put_string(struct json *j, struct json_object *object, const char *key, const char *value)
{
    if (!value)
        json_put_null(j, object, key);
    else
        json_put(j, object, key, string_new(value));
}

void json_push_string(struct json *j, struct json_object *array, const char *value)
{
    json_push(j, array, string_new(value));
}

void json_push_u64(struct json *j, struct json_object *array, uint64_t value)
{
    json_push(j, array, json_object_new_uint64(value));
}

char *json_text(struct json *j, struct json_object *root)
{
    const char *text;
    char *copy = NULL;

    if (root && !j->failed) {
        text = json_object_to_json_string_ext(root, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE);
        copy = text ? strdup(text) : NULL;
    }
    json_object_put(root);
    return copy;
}

char *json_clean(const char *s)
{
    size_t n_bytes = strlen(s), n;
    char *clean = malloc(4 * n_bytes + 1), *end = clean;

    if (!clean)
        return NULL;
    for (; n_bytes > 0; s += n, n_bytes -= n) {
        n = utf8_length(s, n_bytes);
        assert(n <= n_bytes);
        if (n > 0 && (!utf8_is_control(s) || *s == '\n' || *s == '\t')) {
            memcpy(end, s, n);
            end += n;
        } else {
            n = 1;
            end += sprintf(end, "\\x%02x", (unsigned char)*s);
        }
    }
    *end = '\0';
    return clean;
}

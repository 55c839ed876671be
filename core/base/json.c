/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <json-c/json.h>

#include "core/base/base.h"

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
    /* json-c's null is no object, so that json_put() could not tell it from a failure. */
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

/*
 * Length of the well-formed UTF-8 sequence at s, by the table of the Unicode standard (3-7); 0: none, or a
 * control character (U+0080 to U+009F too: terminals obey them).
 */
static size_t utf8_length(const unsigned char *s)
{
    static const struct {
        unsigned char first, last, low, high; /* of the lead byte; of the second byte */
        size_t n;
    } rows[] = {
        {0xc2, 0xc2, 0xa0, 0xbf, 2}, {0xc3, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    size_t i, k;

    if ((*s >= 0x20 && *s < 0x7f) || *s == '\n' || *s == '\t')
        return 1;
    for (i = 0; i < ARRAY_SIZE(rows); i++) {
        if (*s < rows[i].first || *s > rows[i].last || s[1] < rows[i].low || s[1] > rows[i].high)
            continue;
        for (k = 2; k < rows[i].n; k++)
            if ((s[k] & 0xc0) != 0x80)
                return 0;
        return rows[i].n;
    }
    return 0;
}

char *json_clean(const char *s)
{
    const unsigned char *p = (const unsigned char *)s;
    char *clean = malloc(4 * strlen(s) + 1), *end = clean;
    size_t n;

    if (!clean)
        return NULL;
    while (*p) {
        n = utf8_length(p);
        if (n > 0) {
            memcpy(end, p, n);
            end += n;
            p += n;
        } else {
            end += sprintf(end, "\\x%02x", *p++);
        }
    }
    *end = '\0';
    return clean;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Builds JSON. Callers need not check each call: the builder remembers that memory ran out, and json_text() then
 * returns NULL. The tree is json-c's. These functions add what json-c lacks: strings may have any bytes, and a NaN
 * becomes null.
 *
 * Ownership: json_put() takes over the value, also on failure. json_text() takes over the root.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct json_object;

struct json {
    bool failed; /* set when memory runs out, and never cleared */
};

/* Return: a value, or NULL without memory, which json_put() and json_push() then notice. */
struct json_object *json_new_object(struct json *j);
struct json_object *json_new_array(struct json *j);

/* Add a value under key (a literal) of an object, or at the end of an array. */
void json_put(struct json *j, struct json_object *object, const char *key, struct json_object *value);
void json_push(struct json *j, struct json_object *array, struct json_object *value);

void json_put_null(struct json *j, struct json_object *object, const char *key);
void json_put_bool(struct json *j, struct json_object *object, const char *key, bool value);
void json_put_u64(struct json *j, struct json_object *object, const char *key, uint64_t value);
void json_put_i64(struct json *j, struct json_object *object, const char *key, int64_t value);
/* Adds the shortest decimal that reads back as value; null if the value is not finite. */
void json_put_double(struct json *j, struct json_object *object, const char *key, double value);
/* Add a string. NULL becomes null; bytes that are not UTF-8 become \xNN. */
void json_put_string(struct json *j, struct json_object *object, const char *key, const char *value);
void json_push_string(struct json *j, struct json_object *array, const char *value);
void json_push_u64(struct json *j, struct json_object *array, uint64_t value);

/* Return: the root as text in one line, which the caller frees; NULL if any call failed. */
char *json_text(struct json *j, struct json_object *root);

/* Return: s as valid UTF-8 without control characters, except newline and tab. The caller frees it. NULL without
 * memory. */
char *json_clean(const char *s);

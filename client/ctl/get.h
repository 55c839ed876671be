/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reads answers of the daemon. A missing key, as in the answer of an older daemon, reads as NULL, 0 or "-". */

#include <stddef.h>
#include <stdint.h>

#include <json-c/json.h>

#include "client/ctl/table.h"

static inline struct json_object *get(struct json_object *o, const char *key)
{
    return json_object_object_get(o, key);
}

static inline uint64_t get_u64(struct json_object *o, const char *key)
{
    return json_object_get_uint64(get(o, key));
}

static inline double get_double(struct json_object *o, const char *key)
{
    return json_object_get_double(get(o, key));
}

static inline const char *get_string(struct json_object *o, const char *key)
{
    struct json_object *value = get(o, key);

    return value ? json_object_get_string(value) : "-";
}

static inline const char *get_duration(struct json_object *o, const char *key, char *buffer)
{
    return get(o, key) ? print_duration(buffer, get_u64(o, key)) : "-";
}

static inline size_t array_length(struct json_object *array)
{
    return json_object_is_type(array, json_type_array) ? json_object_array_length(array) : 0;
}

/* Return: NULL if there is no such element. */
static inline struct json_object *array_get(struct json_object *array, size_t i)
{
    return i < array_length(array) ? json_object_array_get_idx(array, i) : NULL;
}

/* Return: the number of ranks on the daemon's own node. */
static inline uint64_t n_local(struct json_object *status)
{
    struct json_object *nodes = get(status, "nodes");

    return nodes ? get_u64(array_get(get(nodes, "list"), get_u64(nodes, "node")), "n_ranks")
                 : get_u64(status, "world_size");
}

/* SPDX-License-Identifier: Apache-2.0 */

/* Packs and unpacks a trace for zerodctl: names as JSON, records as base64 of their memory. */

#include "core/trace/trace.h"

#include <string.h>

#include <json-c/json.h>
#include <sodium.h>

#include "core/base/base.h"
#include "core/base/json.h"

enum {
    FORMAT = 1, /* raised when struct record or a key changes its meaning */
    MAX_TRACKS = 1 << 20,
};

static void free_list(char **list, size_t n)
{
    for (size_t i = 0; list && i < n; i++)
        free(list[i]);
    free(list);
}

void trace_deinit(struct trace *trace)
{
    free(trace->job);
    free(trace->version);
    free_list(trace->parcels, trace->n_parcels);
    free_list(trace->waits, trace->n_waits);
    free(trace->records);
    *trace = (struct trace){0};
}

/* ---- packing ------------------------------------------------------------------------------------------- */

static char *encode(const void *bytes, size_t n_bytes)
{
    size_t size = sodium_base64_encoded_len(n_bytes, sodium_base64_VARIANT_ORIGINAL);
    char *text = malloc(size);

    return text ? sodium_bin2base64(text, size, bytes, n_bytes, sodium_base64_VARIANT_ORIGINAL) : NULL;
}

static void put_list(struct json *j, struct json_object *object, const char *key, char *const *list, size_t n)
{
    struct json_object *array = json_new_array(j);

    for (size_t i = 0; i < n; i++)
        json_push_string(j, array, list[i]);
    json_put(j, object, key, array);
}

char *trace_pack(const struct trace *trace)
{
    _cleanup_free_ char *records = encode(trace->records, trace->n_records * sizeof(*trace->records));
    struct json j = {.failed = !records};
    struct json_object *o = json_new_object(&j);

    json_put_u64(&j, o, "format", FORMAT);
    json_put_string(&j, o, "job", trace->job);
    json_put_string(&j, o, "version", trace->version);
    json_put_u64(&j, o, "node", trace->node);
    json_put_u64(&j, o, "n_nodes", trace->n_nodes);
    json_put_u64(&j, o, "first_rank", trace->first_rank);
    json_put_u64(&j, o, "n_ranks", trace->n_ranks);
    json_put_u64(&j, o, "n_workers", trace->n_workers);
    json_put_u64(&j, o, "step", trace->step);
    json_put_u64(&j, o, "oldest_step", trace->oldest);
    json_put_u64(&j, o, "monotonic_ns", trace->monotonic_ns);
    json_put_u64(&j, o, "realtime_ns", trace->realtime_ns);
    put_list(&j, o, "parcels", trace->parcels, trace->n_parcels);
    put_list(&j, o, "waits", trace->waits, trace->n_waits);
    json_put(&j, o, "records", records ? json_object_new_string(records) : NULL);
    return json_text(&j, o);
}

/* ---- unpacking ----------------------------------------------------------------------------------------- */

static uint64_t get_u64(struct json_object *object, const char *key)
{
    return json_object_get_uint64(json_object_object_get(object, key));
}

static char *get_string(struct json_object *object, const char *key)
{
    const char *text = json_object_get_string(json_object_object_get(object, key));

    return strdup(text ? text : "");
}

/* Return: a list, whose strings may be NULL; or NULL without memory, or if the key has no array. */
static char **get_list(struct json_object *object, const char *key, size_t *n)
{
    struct json_object *array = json_object_object_get(object, key);
    char **list;

    if (!json_object_is_type(array, json_type_array) || json_object_array_length(array) > MAX_TRACKS)
        return NULL;
    *n = json_object_array_length(array);
    list = calloc(*n + 1, sizeof(*list));
    for (size_t i = 0; list && i < *n; i++) {
        const char *text = json_object_get_string(json_object_array_get_idx(array, i));

        list[i] = strdup(text ? text : "");
    }
    return list;
}

static const char *get_records(struct trace *trace, struct json_object *object)
{
    struct json_object *text = json_object_object_get(object, "records");
    size_t n_text = json_object_is_type(text, json_type_string) ? (size_t)json_object_get_string_len(text) : 0, n_bytes;

    trace->records = malloc(n_text + 1);
    if (!trace->records)
        return "out of memory";
    if (!json_object_is_type(text, json_type_string) ||
        sodium_base642bin((unsigned char *)trace->records, n_text + 1, json_object_get_string(text), n_text, NULL,
                          &n_bytes, NULL, sodium_base64_VARIANT_ORIGINAL) != 0 ||
        n_bytes % sizeof(*trace->records) != 0)
        return "its records are not base64, or not whole";
    trace->n_records = n_bytes / sizeof(*trace->records);
    return NULL;
}

static const char *unpack(struct trace *trace, struct json_object *object)
{
    const char *why;

    if (!json_object_is_type(object, json_type_object) || get_u64(object, "format") == 0)
        return "it is no trace";
    if (get_u64(object, "format") != FORMAT)
        return "it is of another version: use the zerodctl of the daemon's version";
    trace->job = get_string(object, "job");
    trace->version = get_string(object, "version");
    trace->node = (unsigned)get_u64(object, "node");
    trace->n_nodes = (unsigned)get_u64(object, "n_nodes");
    trace->first_rank = (unsigned)get_u64(object, "first_rank");
    trace->n_ranks = (unsigned)MIN(get_u64(object, "n_ranks"), UINT64_C(65536));
    trace->n_workers = (unsigned)MIN(get_u64(object, "n_workers"), UINT64_C(65536));
    trace->step = get_u64(object, "step");
    trace->oldest = get_u64(object, "oldest_step");
    trace->monotonic_ns = get_u64(object, "monotonic_ns");
    trace->realtime_ns = get_u64(object, "realtime_ns");
    why = get_records(trace, object);
    trace->parcels = get_list(object, "parcels", &trace->n_parcels);
    trace->waits = get_list(object, "waits", &trace->n_waits);
    if (!why && (!trace->parcels || !trace->waits))
        why = "it has no list of parcels, or of what ranks wait for";
    return why;
}

const char *trace_unpack(struct trace *trace, struct json_object *object)
{
    const char *why;

    *trace = (struct trace){0};
    why = unpack(trace, object);
    if (why)
        trace_deinit(trace);
    return why;
}

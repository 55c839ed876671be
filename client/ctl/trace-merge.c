/* SPDX-License-Identifier: Apache-2.0 */

/* Merges another trace into the daemon's trace. */

#include <stdbool.h>
#include <stdlib.h>

#include <json-c/json.h>

#include "client/ctl/trace-command.h"
#include "core/base/base.h"

static struct json_object *commits_of(struct json_object *trace)
{
    return json_object_object_get(json_object_object_get(trace, "zerod"), "commits");
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/*
 * Computes how much later a commit is in `trace` than in `other`, in microseconds, as the median over the common steps.
 * The difference is between the clocks of two machines, because a commit reaches all nodes within the time of a
 * message. Return: false if the traces have no step in common.
 */
static bool find_shift(struct json_object *trace, struct json_object *other, double *shift)
{
    struct json_object *ours = commits_of(trace), *theirs = commits_of(other), *same;
    _cleanup_free_ double *shifts = calloc((size_t)json_object_object_length(theirs) + 1, sizeof(*shifts));
    size_t n = 0;

    json_object_object_foreach(theirs, step, at)
    {
        if (shifts && json_object_object_get_ex(ours, step, &same))
            shifts[n++] = json_object_get_double(same) - json_object_get_double(at);
    }
    if (n == 0)
        return false;
    qsort(shifts, n, sizeof(*shifts), compare_doubles);
    *shift = shifts[n / 2];
    return true;
}

static double base_us(struct json_object *trace)
{
    return (double)json_object_get_int64(json_object_object_get(trace, "baseTimeNanoseconds")) / 1e3;
}

static struct json_object *events_of(struct json_object *trace)
{
    struct json_object *events =
        json_object_is_type(trace, json_type_array) ? trace : json_object_object_get(trace, "traceEvents");

    return json_object_is_type(events, json_type_array) ? events : NULL;
}

static void add_shifted(struct json_object *to, struct json_object *event, double shift)
{
    struct json_object *ts;

    if (json_object_object_get_ex(event, "ts", &ts))
        json_object_object_add(event, "ts", json_object_new_double(json_object_get_double(ts) + shift));
    json_object_array_add(to, json_object_get(event));
}

const char *trace_merge(struct json_object *trace, struct json_object *other)
{
    struct json_object *to = events_of(trace), *from = events_of(other);
    double shift;

    if (!from)
        return "it has no traceEvents";
    if (json_object_is_type(commits_of(other), json_type_object)) {
        if (!find_shift(trace, other, &shift))
            return "it has no step in common with this trace: take both within some steps";
    } else if (base_us(other) > 0) {
        /* Both times are about 1.7e15, so their difference as doubles is exact to a quarter of a microsecond. */
        shift = base_us(other) - base_us(trace);
    } else {
        return "it does not say when it began (baseTimeNanoseconds)";
    }
    for (size_t i = 0; i < json_object_array_length(from); i++)
        add_shifted(to, json_object_array_get_idx(from, i), shift);
    return NULL;
}

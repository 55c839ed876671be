/* SPDX-License-Identifier: Apache-2.0 */

/* Groups that arrive in pieces wait in a list (groups.h). Few wait at a time, because most arrive in one piece. */

#include "daemon/checkpoint/groups.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "kernels/convert.h"

struct waiting_group {
    struct waiting_group *next;
    void *at;
    size_t n; /* elements that have arrived */
    float values[GROUP8_ELEMS];
};

void groups_init(struct groups *groups)
{
    pthread_mutex_init(&groups->lock, NULL);
    groups->first = NULL;
}

void groups_deinit(struct groups *groups)
{
    for (struct waiting_group *group = groups->first, *next; group; group = next) {
        next = group->next;
        free(group);
    }
    pthread_mutex_destroy(&groups->lock);
}

/* Finds or makes the waiting group whose place in the array is `at`. The caller holds the lock. Return: the link to the
 * group, or NULL without memory. */
static struct waiting_group **find_group(struct groups *groups, void *at)
{
    struct waiting_group **link = &groups->first, *group;

    while (*link && (*link)->at != at)
        link = &(*link)->next;
    if (*link)
        return link;
    group = calloc(1, sizeof(*group));
    if (!group)
        return NULL;
    group->at = at;
    group->next = groups->first;
    groups->first = group;
    return &groups->first;
}

/* Adds elements [first, first + n) of a group of n_elems. Stores a complete group. Return: 0 or -ENOMEM. */
static int put_part(struct groups *groups, void *at, enum dtype dtype, size_t n_elems, size_t first, size_t n,
                    const float *values)
{
    struct waiting_group **link, *group;

    assert(n_elems <= GROUP8_ELEMS);
    assert(first + n <= n_elems);
    pthread_mutex_lock(&groups->lock);
    link = find_group(groups, at);
    group = link ? *link : NULL;
    if (group) {
        memcpy(group->values + first, values, n * sizeof(*values));
        group->n += n;
    }
    if (group && group->n == n_elems) {
        convert_from_f32(at, group->values, dtype, n_elems);
        *link = group->next;
        free(group);
    }
    pthread_mutex_unlock(&groups->lock);
    return link ? 0 : -ENOMEM;
}

int groups_put(struct groups *groups, const struct groups_array *array, uint64_t elem, size_t n, const void *src,
               enum dtype src_dtype)
{
    const uint8_t *from = src;
    int r = 0;

    assert(dtype_is_grouped(array->dtype));
    assert(elem + n <= array->n_elems);
    while (n > 0 && r == 0) {
        float values[GROUP8_ELEMS];
        size_t first = elem % GROUP8_ELEMS, n_now = MIN(n, GROUP8_ELEMS - first);
        size_t n_elems = MIN(array->n_elems - (elem - first), (uint64_t)GROUP8_ELEMS);
        uint8_t *at = array->at + dtype_bytes(array->dtype, elem - first);

        convert_to_f32(values, from, src_dtype, n_now);
        if (n_now == n_elems)
            convert_from_f32(at, values, array->dtype, n_elems);
        else
            r = put_part(groups, at, array->dtype, n_elems, first, n_now, values);
        elem += n_now;
        n -= n_now;
        from += n_now * dtype_size(src_dtype);
    }
    return r;
}

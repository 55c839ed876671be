/* SPDX-License-Identifier: Apache-2.0 */

/* Finds the tensors of a job in the files of a checkpoint (targets.h). */

#include "core/checkpoint/targets.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/json.h"
#include "core/checkpoint/sources.h"

/* ---- the table ----------------------------------------------------------------------------------------- */

int targets_init(struct targets *targets, size_t capacity, const char *job)
{
    *targets = (struct targets){.list = calloc(capacity + 1, sizeof(*targets->list)),
                                .by_name = calloc(capacity + 1, sizeof(*targets->by_name)),
                                .capacity = capacity,
                                .job = job};
    return targets->list && targets->by_name ? 0 : -ENOMEM;
}

void targets_deinit(struct targets *targets)
{
    for (size_t i = 0; i < targets->n; i++)
        free(targets->list[i].name);
    free(targets->list);
    free(targets->by_name);
    *targets = (struct targets){0};
}

int targets_add(struct targets *targets, char *name, const struct target *target)
{
    _cleanup_free_ char *original = name;
    struct target *added = &targets->list[targets->n];

    assert(targets->n < targets->capacity);
    assert(target->kind < TENSOR_N_FILES);
    assert(target->end_elem <= target->n_elems);
    assert(target->n_found == 0);
    *added = *target;
    added->name = name ? json_clean(name) : NULL; /* in the form of the headers */
    if (!added->name)
        return -ENOMEM;
    targets->by_name[targets->n++] = added;
    return 0;
}

static int compare_target(enum tensor_file kind, const char *name, const struct target *target)
{
    return kind != target->kind ? (kind < target->kind ? -1 : 1) : strcmp(name, target->name);
}

static int compare_targets(const void *a, const void *b)
{
    const struct target *x = *(struct target *const *)a;

    return compare_target(x->kind, x->name, *(struct target *const *)b);
}

void targets_sort(struct targets *targets)
{
    qsort(targets->by_name, targets->n, sizeof(*targets->by_name), compare_targets);
}

/* Return: the target, or NULL if the job has no such tensor. */
static struct target *find_target(const struct targets *targets, enum tensor_file kind, const char *name)
{
    size_t first = 0, end = targets->n;

    while (first < end) {
        size_t middle = first + (end - first) / 2;
        int order = compare_target(kind, name, targets->by_name[middle]);

        if (order == 0)
            return targets->by_name[middle];
        if (order < 0)
            end = middle;
        else
            first = middle + 1;
    }
    return NULL;
}

/* ---- files --------------------------------------------------------------------------------------------- */

/* Return: true if loading can convert the elements: moments that do not cross the end of a MiB of the file. */
static bool is_converted(const struct safetensors_tensor *tensor, const struct target *target)
{
    return target->is_moment && (tensor->dtype == DTYPE_F32 || tensor->dtype == DTYPE_BF16) &&
           tensor->offset_bytes % dtype_size((enum dtype)tensor->dtype) == 0;
}

/* Finds which elements of the target the tensor has. Return: false if the tensor cannot be a part of the target. */
static bool find_box(const struct safetensors *file, const struct safetensors_tensor *tensor,
                     const struct target *target, struct box *box)
{
    size_t n_bytes = target->n_dims * sizeof(*tensor->shape);

    assert(target->n_dims <= LAYOUT_MAX_DIMS);
    *box = (struct box){0};
    if ((tensor->dtype != target->dtype && !is_converted(tensor, target)) || tensor->n_dims != target->n_dims)
        return false;
    if (target->is_lower && tensor->offset_bytes % sizeof(float) != 0)
        return false;
    if (n_bytes > 0) {
        if (!file->sharded && memcmp(tensor->shape, target->shape, n_bytes) != 0)
            return false;
        memcpy(box->offset, tensor->starts, n_bytes);
        memcpy(box->shape, tensor->shape, n_bytes);
    }
    return box_is_range(target->shape, target->n_dims, box);
}

int targets_place(const struct targets *targets, const struct source *source, const struct safetensors_tensor *tensor,
                  struct target **out, struct box *box, char *why, size_t why_size)
{
    struct target *target = *out = find_target(targets, source->kind, tensor->name);

    if (!target)
        return 0;
    if (!find_box(&source->header, tensor, target, box)) {
        snprintf(why, why_size, "%s has another shape or type there than in %s", target->name, targets->job);
        return -EINVAL;
    }
    target->n_found++;
    target->n_found_elems += box->n_elems;
    return 0;
}

/* The boxes of a tensor are disjoint. So they cover the tensor if they have as many elements as the tensor. */
int targets_check(const struct targets *targets, const struct target *target, bool may_lack, char *why, size_t why_size)
{
    if (target->n_found == 0 && !may_lack)
        snprintf(why, why_size, "it lacks %s, which %s has", target->name, targets->job);
    else if (target->n_found > 0 && target->n_found_elems < target->n_elems)
        snprintf(why, why_size, "it lacks a part of %s", target->name);
    else if (target->n_found_elems > target->n_elems)
        snprintf(why, why_size, "it has a part of %s twice", target->name);
    else
        return 0;
    return -EINVAL;
}

int targets_unknown(const struct targets *targets, const char *name, char *why, size_t why_size)
{
    snprintf(why, why_size, "it has %s, which %s lacks", name, targets->job);
    return -EINVAL;
}

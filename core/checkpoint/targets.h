/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The tensors that a job has in its checkpoints (tensors.h), and a check that a checkpoint's files contain them.
 * Pure. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/box.h"
#include "core/checkpoint/tensors.h"

struct safetensors_tensor;
struct source;

struct target {
    enum tensor_file kind; /* kind of the files that contain it */
    char *name;            /* name in the files; owned */
    int dtype;             /* enum dtype, or SAFETENSORS_* */
    uint32_t n_dims;
    const uint64_t *shape; /* shape in the job; borrowed */
    uint64_t n_elems;
    bool may_lack;                 /* if the tensor is missing, the job begins with zero */
    bool is_moment;                /* converted to the state's type, whatever type the file has */
    bool is_lower;                 /* 24-bit masters: `at` points to lower bytes; another target has the weights */
    uint8_t *at;                   /* the place of first_elem, which begins a group if dtype is grouped */
    uint64_t first_elem, end_elem; /* the elements that this node keeps; none if both are equal */
    uint64_t n_found_elems;        /* number of elements in the boxes that were found */
    size_t n_found;                /* number of boxes that were found */
};

struct targets {
    struct target *list; /* n targets, parameter after parameter */
    size_t n, capacity;
    struct target **by_name; /* n pointers, sorted */
    const char *job;         /* the job's name in messages: "this job" */
};

/* Call targets_deinit() even after a failure. Return: 0 or -ENOMEM. */
int targets_init(struct targets *targets, size_t capacity, const char *job);
void targets_deinit(struct targets *targets);

/* Adds a target, and takes over the name, which may be any text. If name is NULL, returns -ENOMEM. Return: 0 or
 * -ENOMEM. */
int targets_add(struct targets *targets, char *name, const struct target *target);
/* Sorts the targets. Call it after all have been added. */
void targets_sort(struct targets *targets);

/*
 * Finds the target of a tensor in a file, and the box of its elements. *out: NULL if the job has no such tensor.
 * Return: 0, or -EINVAL with a message in why if the tensor cannot be a part of the target.
 */
int targets_place(const struct targets *targets, const struct source *source, const struct safetensors_tensor *tensor,
                  struct target **out, struct box *box, char *why, size_t why_size);

/* Checks a target. Call it after the tensors of all files have been placed. Return: 0, or -EINVAL with a message in why
 * if elements are missing, or occur twice. */
int targets_check(const struct targets *targets, const struct target *target, bool may_lack, char *why,
                  size_t why_size);
/* Writes a message that the job has no tensor of that name. Return: -EINVAL. */
int targets_unknown(const struct targets *targets, const char *name, char *why, size_t why_size);

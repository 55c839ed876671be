/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The tensors that a job has in its checkpoints (tensors.h), and whether the files of one have them. Pure. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/box.h"
#include "core/checkpoint/tensors.h"

struct safetensors_tensor;
struct source;

struct target {
    enum tensor_file kind; /* of the files that have it */
    char *name;            /* there; owned */
    int dtype;             /* enum dtype, or SAFETENSORS_* */
    uint32_t n_dims;
    const uint64_t *shape; /* the job's */
    uint64_t n_elems;
    bool may_lack;                 /* a job can begin without it: with zero */
    bool is_moment;                /* of the state's type, whatever the file has */
    bool is_lower;                 /* masters of 24 bits: at has their lower bytes; the weights come on their own */
    uint8_t *at;                   /* where this node keeps first_elem, with which a group begins if dtype is grouped */
    uint64_t first_elem, end_elem; /* what this node keeps; nothing if they are equal */
    uint64_t n_found_elems;        /* of the boxes that were found */
    size_t n_found;                /* and their number */
};

struct targets {
    struct target *list; /* n, parameter after parameter */
    size_t n, capacity;
    struct target **by_name; /* n, sorted */
    const char *job;         /* as sentences name it: "this job" */
};

/* Return: 0 or -ENOMEM; then, too, targets_deinit() is called. */
int targets_init(struct targets *targets, size_t capacity, const char *job);
void targets_deinit(struct targets *targets);

/* Takes the name, any text, which may be NULL: no memory. Return: 0 or -ENOMEM. */
int targets_add(struct targets *targets, char *name, const struct target *target);
/* All are added. */
void targets_sort(struct targets *targets);

/*
 * Finds the target of a tensor in a file, and which elements of it the tensor is. *out: NULL, the job has no such
 * tensor. Return: 0; or -EINVAL and a sentence: it cannot be a part of it.
 */
int targets_place(const struct targets *targets, const struct source *source, const struct safetensors_tensor *tensor,
                  struct target **out, struct box *box, char *why, size_t why_size);

/* All files were looked at. Return: 0; or -EINVAL and a sentence: it lacks though it may not, or is there twice. */
int targets_check(const struct targets *targets, const struct target *target, bool may_lack, char *why,
                  size_t why_size);
/* Says that the job has no tensor of that name. Return: -EINVAL. */
int targets_unknown(const struct targets *targets, const char *name, char *why, size_t why_size);

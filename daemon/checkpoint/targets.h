/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The tensors that a job has in its checkpoints (core/checkpoint/tensors.h), and where this node keeps their elements:
 * of masters and moments those that it owns; of 16-bit weights, and of fp32 ones in stages 1 and 2, all, because there
 * every node has the weights of all partitions; of frozen parameters all. Pure, but for the state's addresses.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/tensors.h"
#include "kernels/update.h"

struct state;

struct target {
    enum tensor_file kind; /* of the files that have it */
    char *name;            /* there; owned */
    int dtype;             /* enum dtype, or SAFETENSORS_* */
    uint32_t n_dims;
    const uint64_t *shape; /* the layout's */
    uint64_t n_elems;
    bool may_lack;                 /* a job can begin without it: with zero */
    bool is_moment;                /* of the state's type, whatever the file has */
    bool is_lower;                 /* masters of 24 bits: at has their lower bytes; the weights come on their own */
    uint8_t *at;                   /* where this node keeps first_elem, with which a group begins if dtype is grouped */
    uint64_t first_elem, end_elem; /* what this node keeps; nothing if they are equal */
    uint64_t n_found_elems;        /* the reader's: of the boxes that were found */
    size_t n_found;                /* and their number */
};

struct targets {
    struct target *list; /* n, parameter after parameter */
    size_t n;
    struct target **by_name; /* n, sorted */
    float *counts;           /* per parameter: where the counts go */
};

/* The state must outlive them. Return: 0 or -ENOMEM; then, too, targets_deinit() is called. */
int targets_init(struct targets *targets, const struct state *state, enum optimizer optimizer);
void targets_deinit(struct targets *targets);

/* name: as a safetensors header has it. Return: NULL, the job has no such tensor. */
struct target *targets_find(const struct targets *targets, enum tensor_file kind, const char *name);

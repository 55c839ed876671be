/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A case of the golden numbers (tests/golden/README.md) as C programs see it: the same JSON, and
 * what a rank pushes when. What only golden.py needs to know is not checked here: a case
 * goes to both, and golden.py refuses words that it does not know.
 *
 * Owned by one thread. What golden_case_*() return by pointer belongs to the case.
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/dtype.h"
#include "kernels/update.h"

struct json_object;

enum { GOLDEN_MAX_DIMS = 4 };

struct golden_param {
    char name[16]; /* "p3" */
    unsigned n_dims;
    uint64_t shape[GOLDEN_MAX_DIMS];
    uint64_t n_elems;
    uint32_t group;
    enum dtype grad_dtype, dtype;
    bool trainable;
};

struct golden_case {
    struct json_object *root;
    unsigned world_size, n_steps, n_groups, n_params;
    uint64_t seed;
    double divisor; /* world size, or 1 when gradients are summed */
    enum optimizer optimizer;
    struct golden_param *params;
};

/* Where a gradient belongs; all count from 0. */
struct golden_place {
    unsigned step, micro, pass, rank, param;
};

/* Return: NULL, and a line on stderr, when it cannot be read. */
struct golden_case *golden_case_read(const char *path);
void golden_case_free(struct golden_case *c);

/* The settings of one step. */
unsigned golden_case_n_micro_batches(const struct golden_case *c, unsigned step);
double golden_case_max_norm(const struct golden_case *c, unsigned step);
double golden_case_loss_scale(const struct golden_case *c, unsigned step);
struct hyper golden_case_hyper(const struct golden_case *c, unsigned group, unsigned step);

/* The optimizer's own settings, without those of groups: they say which moments exist. */
struct optimizer_moments golden_case_moments(const struct golden_case *c);

/* How often a rank pushes a parameter in a micro-batch; at->pass is not read. */
unsigned golden_case_n_passes(const struct golden_case *c, const struct golden_place *at);

/* The gradient in its dtype, n_elems of it. */
void golden_case_gradient(const struct golden_case *c, const struct golden_place *at, void *dst);

/* Initial weights in their dtype. */
void golden_case_weights(const struct golden_case *c, unsigned param, void *dst);

/*
 * One named array of a result file: a line "name n_bytes", then the bytes. Return: 0 or -errno.
 */
int golden_write(FILE *file, const char *name, unsigned index, const void *data, size_t n_bytes);

/* A small generator for orders, seeded and advanced in place. Return: below n > 0. */
uint64_t golden_random(uint64_t *state, uint64_t n);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A case of the golden numbers (tests/golden/README.md) for C programs: its JSON, and the gradients that a rank pushes.
 * These functions do not check words that only golden.py uses. golden.py reads the same case and refuses words that it
 * does not know.
 *
 * Use a case from one thread. Pointers that golden_case_*() return belong to the case.
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
    double divisor; /* world size, or 1 if gradients are summed */
    enum optimizer optimizer;
    struct golden_param *params;
};

/* The position of a gradient; all counts start at 0. */
struct golden_place {
    unsigned step, micro, pass, rank, param;
};

/* Return: NULL, after a line on stderr, if the case cannot be read. */
struct golden_case *golden_case_read(const char *path);
void golden_case_free(struct golden_case *c);

/* The settings of one step. */
unsigned golden_case_n_micro_batches(const struct golden_case *c, unsigned step);
double golden_case_max_norm(const struct golden_case *c, unsigned step);
double golden_case_loss_scale(const struct golden_case *c, unsigned step);
struct hyper golden_case_hyper(const struct golden_case *c, unsigned group, unsigned step);

/* The optimizer's settings without those of its groups. They decide which moments exist. */
struct optimizer_moments golden_case_moments(const struct golden_case *c);

/* Return: how often a rank pushes a parameter in a micro-batch. Ignores at->pass. */
unsigned golden_case_n_passes(const struct golden_case *c, const struct golden_place *at);

/* Writes the gradient's n_elems values in the parameter's grad_dtype. */
void golden_case_gradient(const struct golden_case *c, const struct golden_place *at, void *dst);

/* Writes the initial weights in the parameter's dtype. */
void golden_case_weights(const struct golden_case *c, unsigned param, void *dst);

/* Writes one named array of a result file: a line "name.index n_bytes", then the bytes. Return: 0 or -errno. */
int golden_write(FILE *file, const char *name, unsigned index, const void *data, size_t n_bytes);

/* A small generator for the order of pushes. Advances *state. Return: a number below n; n must be > 0. */
uint64_t golden_random(uint64_t *state, uint64_t n);

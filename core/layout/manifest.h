/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The manifest of one rank: the parameters that it declares, with names, shapes, dtypes and groups, in order. Owns
 * copies of everything. Pure.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/layout/layout.h"

struct manifest {
    struct layout_decl *decls; /* n; names and shapes owned */
    uint32_t n, capacity;
    uint64_t n_bytes; /* held, for the quota */
};

enum {
    MANIFEST_MAX_PARAMS = 1 << 20, /* a million: 100 times the largest model we know */
    MANIFEST_MAX_BYTES = 256 << 20,
    MANIFEST_E_FULL = 1,
};

/* Adds a copy. Return: 0, -ENOMEM, or MANIFEST_E_FULL. */
int manifest_add(struct manifest *manifest, const struct layout_decl *decl);
void manifest_deinit(struct manifest *manifest);

/* Return: the XXH3 of names, shapes, dtypes, groups, trainable and order, which is equal on all ranks of a job. */
uint64_t manifest_digest(const struct manifest *manifest);

/* Return: the index of the first entry that differs; the shorter length if one is a prefix; UINT32_MAX if both are
 * equal. */
uint32_t manifest_first_difference(const struct manifest *a, const struct manifest *b);

bool manifest_entry_equal(const struct layout_decl *a, const struct layout_decl *b);

/* "layers.0.w [64, 32] bf16, gradient fp32, group 0, trainable" */
void manifest_print_entry(char *dst, size_t size, const struct layout_decl *decl);

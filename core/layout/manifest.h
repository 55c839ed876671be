/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The manifest of one rank: the parameters that it declares, with names, shapes, dtypes and groups, in order. The
 * manifest owns copies of all of these. Pure.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/layout/layout.h"

struct manifest {
    struct layout_decl *decls; /* n entries; owned, with names and shapes */
    uint32_t n, capacity;
    uint64_t n_bytes; /* size of the copies, for the quota */
};

enum {
    MANIFEST_MAX_PARAMS = 1 << 20, /* a million: 100 times as many as the largest model we know */
    MANIFEST_MAX_BYTES = 256 << 20,
    MANIFEST_E_FULL = 1,
};

/* Adds a copy of the declaration. Return: 0, -ENOMEM, or MANIFEST_E_FULL. */
int manifest_add(struct manifest *manifest, const struct layout_decl *decl);
void manifest_deinit(struct manifest *manifest);

/* Return: an XXH3 hash of names, shapes, dtypes, groups, trainable and order. It is equal on all ranks of a job. */
uint64_t manifest_digest(const struct manifest *manifest);

/* Return: the index of the first entry that differs; the length of the shorter manifest if it is a prefix of the other;
 * UINT32_MAX if both are equal. */
uint32_t manifest_first_difference(const struct manifest *a, const struct manifest *b);

bool manifest_entry_equal(const struct layout_decl *a, const struct layout_decl *b);

/* Prints an entry, such as "layers.0.w [64, 32] bf16, gradient fp32, group 0, trainable". */
void manifest_print_entry(char *dst, size_t size, const struct layout_decl *decl);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A rank's user state: bytes that mean something to the trainer alone. */

#include <stddef.h>
#include <stdint.h>

struct blob {
    uint8_t *data; /* owned; NULL: none */
    size_t n_bytes;
};

void blob_reset(struct blob *blob);

/* Replaces the blob by a copy. Without memory the old one stays: a restart then redoes more, which is safe. */
void blob_set(struct blob *blob, const uint8_t *data, size_t n_bytes);

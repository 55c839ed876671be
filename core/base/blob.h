/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A rank's user state: bytes that only the trainer interprets. */

#include <stddef.h>
#include <stdint.h>

struct blob {
    uint8_t *data; /* owned; NULL: none */
    size_t n_bytes;
};

void blob_reset(struct blob *blob);

/* Replaces the blob by a copy of data. Keeps the old blob if memory runs out, which is safe: a restart only repeats
 * more work. */
void blob_set(struct blob *blob, const uint8_t *data, size_t n_bytes);

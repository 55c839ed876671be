/* SPDX-License-Identifier: Apache-2.0 */

/* Blobs: copying, replacing and freeing a rank's user state. */

#include "core/base/blob.h"

#include <string.h>

#include "core/base/base.h"

void blob_reset(struct blob *blob)
{
    free(blob->data);
    *blob = (struct blob){0};
}

void blob_set(struct blob *blob, const uint8_t *data, size_t n_bytes)
{
    uint8_t *copy = malloc(MAX(n_bytes, (size_t)1));

    if (!copy)
        return;
    if (n_bytes > 0)
        memcpy(copy, data, n_bytes);
    free(blob->data);
    *blob = (struct blob){.data = copy, .n_bytes = n_bytes};
}

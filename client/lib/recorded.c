/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps packets of recorded requests (recorded.h) one after the other, so a push costs one copy and no allocation. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/lib/recorded.h"
#include "core/base/base.h"

enum {
    MIN_BYTES = 64 * 1024,
    MAX_IDLE_BYTES = 1 << 20, /* picked: some ten thousand pushes */
};

void recorded_deinit(struct recorded *recorded)
{
    free(recorded->bytes);
    *recorded = (struct recorded){0};
}

static int grow_bytes(struct recorded *recorded, size_t n_bytes)
{
    size_t capacity = MAX(recorded->capacity, (size_t)MIN_BYTES);
    uint8_t *bytes;

    while (capacity < n_bytes)
        capacity *= 2;
    bytes = realloc(recorded->bytes, capacity);
    if (!bytes)
        return -ENOMEM;
    recorded->bytes = bytes;
    recorded->capacity = capacity;
    return 0;
}

int recorded_add(struct recorded *recorded, const uint8_t *packet, uint32_t n_bytes)
{
    size_t end = recorded->n_bytes + sizeof(n_bytes) + n_bytes;

    if (end > recorded->capacity && grow_bytes(recorded, end) < 0)
        return -ENOMEM;
    memcpy(recorded->bytes + recorded->n_bytes, &n_bytes, sizeof(n_bytes));
    memcpy(recorded->bytes + recorded->n_bytes + sizeof(n_bytes), packet, n_bytes);
    recorded->n_bytes = end;
    recorded->n_sent++;
    recorded->n_kept++;
    return 0;
}

void recorded_drop(struct recorded *recorded)
{
    recorded->n_bytes = 0;
    recorded->n_kept = 0;
    if (recorded->capacity <= MAX_IDLE_BYTES)
        return;
    free(steal_ptr(recorded->bytes));
    recorded->capacity = 0;
}

const uint8_t *recorded_next(const struct recorded *recorded, size_t *at, uint32_t *n_bytes)
{
    const uint8_t *packet;

    if (*at == recorded->n_bytes)
        return NULL;
    memcpy(n_bytes, recorded->bytes + *at, sizeof(*n_bytes));
    packet = recorded->bytes + *at + sizeof(*n_bytes);
    *at += sizeof(*n_bytes) + *n_bytes;
    return packet;
}

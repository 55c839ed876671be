/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Any bytes as a packet. A packet that unpacks must pack, and the result must unpack and pack again to the same bytes.
 * A packet that does not unpack must have a reason. Packing may shorten a message, because of cleaned texts, defaults
 * and padded numbers, but never makes it longer.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/*
 * Defines check_KIND() for messages in one direction. They have type TYPE, PREFIX_unpack_KIND() and PREFIX_pack_KIND().
 * NAMES begins all their names, and therefore all reasons.
 */
#define DEFINE_ROUND_TRIP(prefix, kind, type, names)                                                                   \
    static void check_##kind(struct wire_arena *arena, const uint8_t *data, size_t size)                               \
    {                                                                                                                  \
        static uint8_t packet[2][FRAME_MAX_BYTES + 1];                                                                 \
        char why[WIRE_WHY_BYTES] = "";                                                                                 \
        type message;                                                                                                  \
        int n[2], r;                                                                                                   \
                                                                                                                       \
        r = prefix##_unpack_##kind(arena, data, size, &message, why, sizeof(why));                                     \
        assert(r == 0 || (r == WIRE_E_INVALID && strncmp(why, names, strlen(names)) == 0 && strstr(why, ": ")));       \
        if (r)                                                                                                         \
            return;                                                                                                    \
        n[0] = prefix##_pack_##kind(arena, &message, packet[0], sizeof(packet[0]));                                    \
        assert(n[0] > 0);                                                                                              \
        r = prefix##_unpack_##kind(arena, packet[0], (size_t)n[0], &message, why, sizeof(why));                        \
        assert(r == 0);                                                                                                \
        n[1] = prefix##_pack_##kind(arena, &message, packet[1], sizeof(packet[1]));                                    \
        assert(n[1] == n[0] && memcmp(packet[0], packet[1], (size_t)n[0]) == 0);                                       \
    }

/* Defines the fuzzer of both directions of a conversation. */
#define DEFINE_FUZZER(one, other)                                                                                      \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)                                                       \
    {                                                                                                                  \
        static struct wire_arena arena;                                                                                \
                                                                                                                       \
        if (size > FRAME_MAX_BYTES || (!arena.block && wire_arena_init(&arena) < 0))                                   \
            return 0;                                                                                                  \
        check_##one(&arena, data, size);                                                                               \
        check_##other(&arena, data, size);                                                                             \
        return 0;                                                                                                      \
    }

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as a packet, taken for a report of the engine and for a command to it. What unpacks must pack, and that
 * packet must unpack and pack again to the same bytes; what does not unpack must have a reason.
 */

#include <assert.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/engine-wire.h"
#include "daemon/frame.h"
#include "daemon/wire-arena.h"
#include "daemon/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t packet[2][FRAME_MAX_BYTES];
static char why[WIRE_WHY_BYTES];

static void check_report(struct wire_arena *arena, const uint8_t *data, size_t size)
{
    struct engine_report report;
    int n[2], r;

    why[0] = '\0';
    r = engine_unpack_report(arena, data, size, &report, why, sizeof(why));
    assert(r == 0 || (r == WIRE_E_INVALID && strncmp(why, "Engine", 6) == 0 && strstr(why, ": ")));
    if (r)
        return;
    n[0] = engine_pack_report(arena, &report, packet[0], sizeof(packet[0]));
    assert(n[0] > 0);
    r = engine_unpack_report(arena, packet[0], n[0], &report, why, sizeof(why));
    assert(r == 0);
    n[1] = engine_pack_report(arena, &report, packet[1], sizeof(packet[1]));
    assert(n[1] == n[0] && memcmp(packet[0], packet[1], n[0]) == 0);
}

static void check_command(struct wire_arena *arena, const uint8_t *data, size_t size)
{
    struct engine_command command;
    int n[2], r;

    why[0] = '\0';
    r = engine_unpack_command(arena, data, size, &command, why, sizeof(why));
    assert(r == 0 || (r == WIRE_E_INVALID && strncmp(why, "Engine", 6) == 0 && strstr(why, ": ")));
    if (r)
        return;
    n[0] = engine_pack_command(arena, &command, packet[0], sizeof(packet[0]));
    assert(n[0] > 0);
    r = engine_unpack_command(arena, packet[0], n[0], &command, why, sizeof(why));
    assert(r == 0);
    n[1] = engine_pack_command(arena, &command, packet[1], sizeof(packet[1]));
    assert(n[1] == n[0] && memcmp(packet[0], packet[1], n[0]) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct wire_arena arena;

    if (size > FRAME_MAX_BYTES)
        return 0;
    if (!arena.block && wire_arena_init(&arena) < 0)
        return 0;
    check_report(&arena, data, size);
    check_command(&arena, data, size);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as a packet, taken for a request and for a reply. What unpacks must pack, and that packet
 * must unpack and pack again to the same bytes; what does not unpack must have a reason.
 */

#include <assert.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/frame.h"
#include "daemon/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t packet[2][FRAME_MAX_BYTES + 1];
static char why[WIRE_WHY_BYTES];

/* Cleaning and defaults may shorten what came in, padded numbers too; nothing makes a valid message longer.
 */
static void check_request(struct wire_arena *arena, const uint8_t *data, size_t size)
{
    struct request request;
    int n[2], r;

    why[0] = '\0';
    r = wire_unpack_request(arena, data, size, &request, why, sizeof(why));
    assert(r == 0 || (r == WIRE_E_INVALID && strstr(why, ": ")));
    if (r)
        return;
    assert(request_type_name(request.type));
    n[0] = wire_pack_request(arena, &request, packet[0], sizeof(packet[0]));
    assert(n[0] > 0);
    r = wire_unpack_request(arena, packet[0], n[0], &request, why, sizeof(why));
    assert(r == 0);
    n[1] = wire_pack_request(arena, &request, packet[1], sizeof(packet[1]));
    assert(n[1] == n[0] && memcmp(packet[0], packet[1], n[0]) == 0);
}

static void check_reply(struct wire_arena *arena, const uint8_t *data, size_t size)
{
    struct reply reply;
    int n[2], r;

    why[0] = '\0';
    r = wire_unpack_reply(arena, data, size, &reply, why, sizeof(why));
    assert(r == 0 || (r == WIRE_E_INVALID && strstr(why, ": ")));
    if (r)
        return;
    assert(reply_type_name(reply.type));
    n[0] = wire_pack_reply(arena, &reply, packet[0], sizeof(packet[0]));
    assert(n[0] > 0);
    r = wire_unpack_reply(arena, packet[0], n[0], &reply, why, sizeof(why));
    assert(r == 0);
    n[1] = wire_pack_reply(arena, &reply, packet[1], sizeof(packet[1]));
    assert(n[1] == n[0] && memcmp(packet[0], packet[1], n[0]) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct wire_arena arena;

    if (size > FRAME_MAX_BYTES)
        return 0;
    if (!arena.block && wire_arena_init(&arena) < 0)
        return 0;
    check_request(&arena, data, size);
    check_reply(&arena, data, size);
    return 0;
}

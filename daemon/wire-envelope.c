/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/wire-envelope.h"

#include <assert.h>
#include <errno.h>

#include "daemon/wire-arena.h"
#include "daemon/wire.h"

static void *arena_alloc(void *arena, size_t n_bytes)
{
    return wire_arena_alloc(arena, n_bytes);
}

static void arena_free(void *arena, void *p)
{
    (void)arena;
    (void)p;
}

static int decode(const struct wire_envelope *envelope, struct wire_arena *arena, const void *data, size_t n_bytes,
                  unsigned *type, const void **out, struct wire_problem *problem)
{
    ProtobufCAllocator allocator = {.alloc = arena_alloc, .free = arena_free, .allocator_data = arena};
    ProtobufCMessage *message;

    wire_arena_reset(arena);
    message = protobuf_c_message_unpack(envelope->descriptor, &allocator, n_bytes, data);
    if (!message && arena->failure)
        return arena->failure;
    if (!message) {
        wire_problem_set(problem, ": %zu bytes that are not a protobuf message", n_bytes);
        return WIRE_E_INVALID;
    }
    *type = *(const uint32_t *)((const uint8_t *)message + envelope->case_offset);
    if (*type == 0) {
        wire_problem_set(problem, ": no message of kind 1 to %u", envelope->n_types - 1);
        return WIRE_E_INVALID;
    }
    *out = *(void *const *)((const uint8_t *)message + envelope->member_offset);
    return 0;
}

int wire_envelope_unpack(const struct wire_envelope *envelope, struct wire_arena *arena, const void *data,
                         size_t n_bytes, unsigned *type, void *ours, struct wire_problem *problem)
{
    const char *name = envelope->descriptor->short_name;
    const void *message;
    int r;

    r = decode(envelope, arena, data, n_bytes, type, &message, problem);
    if (!r) {
        name = envelope->tables[*type].descriptor->short_name;
        r = wire_table_unpack(&envelope->tables[*type], arena, message, ours, problem);
        if (r == WIRE_E_INVALID)
            wire_problem_prefix(problem, ".");
    }
    if (r == -EMSGSIZE) {
        /* the arena's limit; no message that is meant comes near it */
        wire_problem_set(problem, ": more than %d MiB when unpacked", WIRE_ARENA_MAX_BYTES >> 20);
        r = WIRE_E_INVALID;
    }
    if (r == WIRE_E_INVALID)
        wire_problem_prefix(problem, "%s", name);
    return r;
}

static int pack(const struct wire_envelope *envelope, struct wire_arena *arena, unsigned type, const void *ours,
                void *buffer, size_t size)
{
    const struct wire_table *table = &envelope->tables[type];
    ProtobufCMessage *message, *member;
    int r;

    assert(type > 0 && type < envelope->n_types);

    message = wire_arena_alloc(arena, envelope->descriptor->sizeof_message);
    member = wire_arena_alloc(arena, table->descriptor->sizeof_message);
    if (!message || !member)
        return arena->failure;
    protobuf_c_message_init(envelope->descriptor, message);
    *(uint32_t *)((uint8_t *)message + envelope->case_offset) = type;
    *(void **)((uint8_t *)message + envelope->member_offset) = member;
    r = wire_table_pack(table, arena, ours, member);
    if (r)
        return r;
    if (protobuf_c_message_get_packed_size(message) > size)
        return -EMSGSIZE;
    return (int)protobuf_c_message_pack(message, buffer);
}

int wire_envelope_pack(const struct wire_envelope *envelope, struct wire_arena *arena, unsigned type, const void *ours,
                       void *buffer, size_t size)
{
    struct wire_mark mark = wire_arena_mark(arena);
    int r = pack(envelope, arena, type, ours, buffer, size);

    wire_arena_rewind(arena, mark);
    return r;
}

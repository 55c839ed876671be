/* SPDX-License-Identifier: Apache-2.0 */

/* Packs and unpacks envelopes and single messages, by the tables of wire-rule.h. */

#include "core/wire/wire-envelope.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>

#include "core/base/base.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"

static void *arena_alloc(void *arena, size_t n_bytes)
{
    return wire_arena_alloc(arena, n_bytes);
}

static void arena_free(void *arena, void *p)
{
    (void)arena;
    (void)p;
}

static uint64_t take_varint(const uint8_t **at, const uint8_t *end)
{
    uint64_t v = 0;

    for (unsigned shift = 0; *at < end && shift < 64; shift += 7) {
        uint8_t byte = *(*at)++;

        v |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            break;
    }
    return v;
}

/*
 * Return: the number of messages in a packet. protobuf silently uses the last member if a oneof has several; zerod
 * treats a second member as an error. The bytes have been unpacked before, so they are well-formed.
 */
static unsigned count_kinds(const struct wire_envelope *envelope, const uint8_t *at, const uint8_t *end)
{
    unsigned n_kinds = 0;
    uint64_t key, n;

    while (at < end) {
        key = take_varint(&at, end);
        n_kinds += key >> 3 < envelope->n_types;
        switch (key & 7) {
        case PROTOBUF_C_WIRE_TYPE_VARINT:
            take_varint(&at, end);
            continue;
        case PROTOBUF_C_WIRE_TYPE_64BIT:
            n = 8;
            break;
        case PROTOBUF_C_WIRE_TYPE_32BIT:
            n = 4;
            break;
        default:
            n = take_varint(&at, end);
            break;
        }
        at += MIN(n, (uint64_t)(end - at));
    }
    return n_kinds;
}

/* Return: the type of a decoded envelope, or 0 with the problem. */
static unsigned find_type(const struct wire_envelope *envelope, const ProtobufCMessage *message, const uint8_t *data,
                          size_t n_bytes, struct wire_problem *problem)
{
    unsigned type = *(const uint32_t *)((const uint8_t *)message + envelope->case_offset);
    unsigned n_kinds = count_kinds(envelope, data, data + n_bytes);

    if (type != 0 && n_kinds == 1)
        return type;
    if (type != 0)
        wire_problem_set(problem, ": %u messages in one packet, expected one", n_kinds);
    else if (message->n_unknown_fields > 0)
        wire_problem_set(problem, ": message of kind %" PRIu32 ", expected 1 to %u", message->unknown_fields[0].tag,
                         envelope->n_types - 1);
    else
        wire_problem_set(problem, ": an empty packet, expected one message");
    return 0;
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
    if (!message)
        wire_problem_set(problem, ": %zu bytes that are not a protobuf message", n_bytes);
    else
        *type = find_type(envelope, message, data, n_bytes, problem);
    if (!message || *type == 0)
        return WIRE_E_INVALID;
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
        assert(*type < envelope->n_types);
        name = envelope->tables[*type].descriptor->short_name;
        r = wire_table_unpack(&envelope->tables[*type], arena, message, ours, problem);
        if (r == WIRE_E_INVALID)
            wire_problem_prefix(problem, ".");
    }
    if (r == -EMSGSIZE) {
        /* the arena's limit, which no valid message reaches */
        wire_problem_set(problem, ": more than %d MiB when unpacked", WIRE_ARENA_MAX_BYTES >> 20);
        r = WIRE_E_INVALID;
    }
    if (r == WIRE_E_INVALID)
        wire_problem_prefix(problem, "%s", name);
    return r;
}

/*
 * Return: the most bytes of a packed message that has only numbers, with its envelope; 0 if it has other fields. This
 * bound saves the pass that finds the size. For a Push that pass takes as long as packing.
 */
static size_t bound_numbers(const struct wire_table *table)
{
    enum { KEY = 2, VALUE = 10, ENVELOPE = 8 };

    for (size_t i = 0; i < table->n_rules; i++)
        if (table->rules[i].kind > WIRE_DOUBLE)
            return 0;
    return ENVELOPE + table->n_rules * (KEY + VALUE);
}

static int pack_envelope(const struct wire_envelope *envelope, struct wire_arena *arena, unsigned type,
                         const void *ours, void *buffer, size_t size)
{
    const struct wire_table *table = &envelope->tables[type];
    ProtobufCMessage *message, *member;
    size_t bound, n_bytes;
    int r;

    assert(type > 0 && type < envelope->n_types);
    assert(envelope->n_types == envelope->descriptor->n_fields + 1);

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
    bound = bound_numbers(table);
    if ((bound == 0 || bound > size) && protobuf_c_message_get_packed_size(message) > size)
        return -EMSGSIZE;
    n_bytes = protobuf_c_message_pack(message, buffer);
    assert(n_bytes > 0); /* an empty packet means the end of the connection */
    assert(n_bytes <= size);
    return (int)n_bytes;
}

int wire_envelope_pack(const struct wire_envelope *envelope, struct wire_arena *arena, unsigned type, const void *ours,
                       void *buffer, size_t size)
{
    struct wire_mark mark = wire_arena_mark(arena);
    int r = pack_envelope(envelope, arena, type, ours, buffer, size);

    wire_arena_rewind(arena, mark);
    return r;
}

/* ---- one message without an envelope --------------------------------------------------------------------- */

int wire_message_unpack(const struct wire_table *table, const char *name, struct wire_arena *arena, const void *data,
                        size_t n_bytes, void *ours, struct wire_problem *problem)
{
    ProtobufCAllocator allocator = {.alloc = arena_alloc, .free = arena_free, .allocator_data = arena};
    ProtobufCMessage *message;
    int r;

    wire_arena_reset(arena);
    message = protobuf_c_message_unpack(table->descriptor, &allocator, n_bytes, data);
    if (!message && arena->failure)
        return arena->failure;
    if (!message) {
        wire_problem_set(problem, ": %zu bytes that are not a protobuf message", n_bytes);
        wire_problem_prefix(problem, "%s", name);
        return WIRE_E_INVALID;
    }
    r = wire_table_unpack(table, arena, message, ours, problem);
    if (r == WIRE_E_INVALID)
        wire_problem_prefix(problem, "%s.", name);
    return r;
}

int wire_message_pack(const struct wire_table *table, struct wire_arena *arena, const void *ours, void *buffer,
                      size_t size)
{
    struct wire_mark mark = wire_arena_mark(arena);
    ProtobufCMessage *proto = wire_arena_alloc(arena, table->descriptor->sizeof_message);
    int r = proto ? 0 : arena->failure;

    if (r == 0)
        r = wire_table_pack(table, arena, ours, proto);
    if (r == 0 && protobuf_c_message_get_packed_size(proto) > size)
        r = -EMSGSIZE;
    if (r == 0)
        r = (int)protobuf_c_message_pack(proto, buffer);
    wire_arena_rewind(arena, mark);
    return r;
}

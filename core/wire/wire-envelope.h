/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A message of the proto that holds one of several in a oneof, all that go one way of a conversation: to and from plain
 * structs, by the tables of wire-rule.h. Types are numbered like the fields of the oneof, from 1 without gaps.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/wire/wire-rule.h"

struct wire_envelope {
    const ProtobufCMessageDescriptor *descriptor;
    size_t case_offset, member_offset; /* of the oneof, in protobuf-c's struct */
    const struct wire_table *tables;   /* by type */
    unsigned n_types;                  /* one more than the last */
};

/*
 * A packet to a struct, which points into the arena; ours holds any of them, and is where they all begin. Return: 0,
 * WIRE_E_INVALID with the problem (several messages in one packet are one), -ENOMEM.
 */
int wire_envelope_unpack(const struct wire_envelope *envelope, struct wire_arena *arena, const void *data,
                         size_t n_bytes, unsigned *type, void *ours, struct wire_problem *problem);

/* One message that is no oneof: bytes to a struct, and back. name: of the message, for the problem. */
int wire_message_unpack(const struct wire_table *table, const char *name, struct wire_arena *arena, const void *data,
                        size_t n_bytes, void *ours, struct wire_problem *problem);
int wire_message_pack(const struct wire_table *table, struct wire_arena *arena, const void *ours, void *buffer,
                      size_t size);

/* A struct to a packet. Nothing is kept in the arena. Return: its size, -EMSGSIZE when size is too small, -ENOMEM. */
int wire_envelope_pack(const struct wire_envelope *envelope, struct wire_arena *arena, unsigned type, const void *ours,
                       void *buffer, size_t size);

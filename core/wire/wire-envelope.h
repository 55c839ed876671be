/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An envelope is a message of the proto with one oneof, which has a member for each message in one direction of a
 * protocol. This module converts envelopes to and from plain structs, by the tables of wire-rule.h. Types have the
 * numbers of the oneof's fields, from 1 without gaps.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/wire/wire-rule.h"

struct wire_envelope {
    const ProtobufCMessageDescriptor *descriptor;
    size_t case_offset, member_offset; /* places of the oneof in protobuf-c's struct */
    const struct wire_table *tables;   /* a table for each type */
    unsigned n_types;                  /* the highest type plus 1 */
};

/*
 * Unpacks a packet into a struct that points into the arena. ours: a union of all messages. Return: 0, -ENOMEM, or
 * WIRE_E_INVALID with the problem. A packet with more than one message is a problem.
 */
int wire_envelope_unpack(const struct wire_envelope *envelope, struct wire_arena *arena, const void *data,
                         size_t n_bytes, unsigned *type, void *ours, struct wire_problem *problem);

/* Unpack and pack one message without an envelope. name: the message's name, for the problem. */
int wire_message_unpack(const struct wire_table *table, const char *name, struct wire_arena *arena, const void *data,
                        size_t n_bytes, void *ours, struct wire_problem *problem);
int wire_message_pack(const struct wire_table *table, struct wire_arena *arena, const void *ours, void *buffer,
                      size_t size);

/* Packs a struct. Keeps nothing in the arena. Return: the packet's size, -EMSGSIZE if size is too small, or -ENOMEM. */
int wire_envelope_pack(const struct wire_envelope *envelope, struct wire_arena *arena, unsigned type, const void *ours,
                       void *buffer, size_t size);

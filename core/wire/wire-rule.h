/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A rule describes one field of a message: its places in protobuf-c's struct and in ours, and its allowed values.
 * Unpacking, validation, packing and the sentences about problems use tables of rules, one table for each message.
 *
 * A rule is written U64(Push, request_push, offset_bytes, .multiple_of = 64): message of the proto, our struct, field,
 * limits. The compiler checks that the field has that type on both sides.
 *
 * A limit that is left out allows every value. max is the largest number, or the largest length of texts and bytes in
 * bytes. A WIRE_MULTILINE text may have several lines. A WIRE_CUT text is cut to max when it is packed, so that the
 * receiver does not refuse it.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "core/wire/wire-arena.h"

enum wire_kind {
    /* numbers: need at most 10 bytes when packed */
    WIRE_U32,
    WIRE_U64,
    WIRE_ENUM,
    WIRE_BOOL,
    WIRE_DOUBLE,
    /* kinds of any length */
    WIRE_STRING,
    WIRE_BYTES,
    WIRE_MESSAGE, /* embedded in our struct */
    WIRE_U32S,
    WIRE_U64S,
    WIRE_STRINGS,
    WIRE_MESSAGES,
};

enum {
    WIRE_MULTILINE = 1 << 0, /* newlines and tabs are allowed */
    WIRE_CUT = 1 << 1,       /* cut to max when packed */
    WIRE_FINITE = 1 << 2,
    WIRE_POSITIVE = 1 << 3, /* finite, and not below 0 */
    WIRE_REQUIRED = 1 << 4, /* the message must be present */
};

struct wire_table;

struct wire_rule {
    const char *name;
    enum wire_kind kind;
    unsigned flags;
    uint16_t proto_offset, proto_count_offset; /* places in protobuf-c's struct; its counts are size_t */
    uint16_t offset, count_offset;             /* places in our struct */
    uint16_t n_count_bytes;                    /* size of our count: 4 or 8 */
    uint16_t proto_has_offset, has_offset; /* of has_x (if false, x is 0); 0: no has_x. A WIRE_MESSAGE has only ours */
    uint64_t min, max;                     /* max 0: every value */
    uint64_t max_count;                    /* of a repeated field; 0: every count */
    uint64_t multiple_of;                  /* 0: every value */
    const struct wire_table *table;        /* the table of a message field */
};

/* The problem of a message. The sentence is built from the inside out: the field first, then the structs around it. */
struct wire_problem {
    char *why;
    size_t size;
};

struct wire_table {
    const ProtobufCMessageDescriptor *descriptor;
    size_t n_bytes; /* size of our struct */
    const struct wire_rule *rules;
    size_t n_rules;
    /* Checks rules between fields; may be NULL. Return: false after wire_problem_set(). */
    bool (*check)(const void *ours, struct wire_problem *problem);
};

/* Tables of messages that several protocols use. */
extern const struct wire_table wire_hyper_table, wire_step_table, wire_diagnostic_table;

void wire_problem_set(struct wire_problem *problem, const char *format, ...) __attribute__((format(printf, 2, 3)));
void wire_problem_prefix(struct wire_problem *problem, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Converts protobuf-c's struct to ours. Return: 0, WIRE_E_INVALID with the problem, or the arena's failure. */
int wire_table_unpack(const struct wire_table *table, struct wire_arena *arena, const void *proto, void *ours,
                      struct wire_problem *problem);

/* Converts our struct to protobuf-c's. Borrows strings, bytes and arrays if possible. Return: 0, or the arena's
 * failure. */
int wire_table_pack(const struct wire_table *table, struct wire_arena *arena, const void *ours, void *proto);

#define WIRE_HAS_TYPE(type, member, expected)                                                                          \
    (0 * sizeof(char[__builtin_types_compatible_p(__typeof__(((type *)NULL)->member), expected) ? 1 : -1]))
#define WIRE_HAS_SIZE(type, member, size) (0 * sizeof(char[sizeof(((type *)NULL)->member) == (size) ? 1 : -1]))

#define WIRE_RULE(kind_, M, S, field, ...)                                                                             \
    {                                                                                                                  \
        .name = #field, .kind = kind_, .proto_offset = offsetof(Zerod__V1__##M, field),                                \
        .offset = offsetof(struct S, field), __VA_ARGS__                                                               \
    }
/* A rule whose field has the type proto_type in the proto and the type `type` in our struct. */
#define WIRE_SCALAR(kind_, proto_type, type, M, S, field, ...)                                                         \
    WIRE_RULE(kind_ + WIRE_HAS_TYPE(Zerod__V1__##M, field, proto_type) + WIRE_HAS_TYPE(struct S, field, type), M, S,   \
              field, __VA_ARGS__)
#define WIRE_COUNTED(kind_, M, S, field, count, ...)                                                                   \
    WIRE_RULE(kind_, M, S, field, .count_offset = offsetof(struct S, count),                                           \
              .n_count_bytes = sizeof(((struct S *)NULL)->count), __VA_ARGS__)
#define WIRE_REPEATED(kind_, proto_type, type, M, S, field, count, ...)                                                \
    WIRE_COUNTED(kind_ + WIRE_HAS_TYPE(Zerod__V1__##M, field, proto_type) + WIRE_HAS_TYPE(struct S, field, type), M,   \
                 S, field, count, .proto_count_offset = offsetof(Zerod__V1__##M, n_##field), __VA_ARGS__)

#define U32(M, S, field, ...) WIRE_SCALAR(WIRE_U32, uint32_t, uint32_t, M, S, field, __VA_ARGS__)
#define I64(M, S, field, ...) WIRE_SCALAR(WIRE_U64, int64_t, int64_t, M, S, field, __VA_ARGS__)
#define U64(M, S, field, ...) WIRE_SCALAR(WIRE_U64, uint64_t, uint64_t, M, S, field, __VA_ARGS__)
#define BOOL(M, S, field, ...) WIRE_SCALAR(WIRE_BOOL, protobuf_c_boolean, bool, M, S, field, __VA_ARGS__)
#define DOUBLE(M, S, field, ...) WIRE_SCALAR(WIRE_DOUBLE, double, double, M, S, field, __VA_ARGS__)
#define STRING(M, S, field, ...) WIRE_SCALAR(WIRE_STRING, char *, const char *, M, S, field, __VA_ARGS__)
#define ENUM(M, S, field, ...)                                                                                         \
    WIRE_RULE(WIRE_ENUM + WIRE_HAS_SIZE(Zerod__V1__##M, field, sizeof(int32_t)) +                                      \
                  WIRE_HAS_SIZE(struct S, field, sizeof(int32_t)),                                                     \
              M, S, field, __VA_ARGS__)
#define BYTES(M, S, field, count, ...)                                                                                 \
    WIRE_COUNTED(WIRE_BYTES + WIRE_HAS_TYPE(Zerod__V1__##M, field, ProtobufCBinaryData) +                              \
                     WIRE_HAS_SIZE(struct S, field, sizeof(void *)),                                                   \
                 M, S, field, count, __VA_ARGS__)
#define MESSAGE(M, S, field, ...) WIRE_RULE(WIRE_MESSAGE, M, S, field, __VA_ARGS__)
#define U32S(M, S, field, count, ...)                                                                                  \
    WIRE_REPEATED(WIRE_U32S, uint32_t *, const uint32_t *, M, S, field, count, __VA_ARGS__)
#define U64S(M, S, field, count, ...)                                                                                  \
    WIRE_REPEATED(WIRE_U64S, uint64_t *, const uint64_t *, M, S, field, count, __VA_ARGS__)
#define STRINGS(M, S, field, count, ...)                                                                               \
    WIRE_REPEATED(WIRE_STRINGS, char **, const char *const *, M, S, field, count, __VA_ARGS__)
#define MESSAGES(M, S, field, count, ...)                                                                              \
    WIRE_COUNTED(WIRE_MESSAGES, M, S, field, count, .proto_count_offset = offsetof(Zerod__V1__##M, n_##field),         \
                 __VA_ARGS__)

/* The places of field x's has_x in protobuf-c's struct and in ours. */
#define HAS(M, S, has) .proto_has_offset = offsetof(Zerod__V1__##M, has), .has_offset = offsetof(struct S, has)

#define WIRE_TABLE(M, S, rules_, ...)                                                                                  \
    {                                                                                                                  \
        .descriptor = &zerod__v1__##M##__descriptor, .n_bytes = sizeof(struct S), .rules = rules_,                     \
        .n_rules = ARRAY_SIZE(rules_), __VA_ARGS__                                                                     \
    }

/* SPDX-License-Identifier: Apache-2.0 */

/* Unpacks, validates and packs fields of messages by their rules. */

#include "core/wire/wire-rule.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/utf8.h"
#include "core/wire/wire.h"

/* ---- problems ------------------------------------------------------------------------------------------ */

void wire_problem_set(struct wire_problem *problem, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(problem->why, problem->size, format, args);
    va_end(args);
}

void wire_problem_prefix(struct wire_problem *problem, const char *format, ...)
{
    char prefix[96];
    size_t n, n_why;
    va_list args;

    va_start(args, format);
    vsnprintf(prefix, sizeof(prefix), format, args);
    va_end(args);

    if (problem->size == 0)
        return;
    n = MIN(strlen(prefix), problem->size - 1);
    n_why = MIN(strlen(problem->why), problem->size - 1 - n);
    memmove(problem->why + n, problem->why, n_why);
    memcpy(problem->why, prefix, n);
    problem->why[n + n_why] = '\0';
}

/* ---- texts --------------------------------------------------------------------------------------------- */

/*
 * Return: the offset of the first byte that a string must not contain, or n. proto3 requires UTF-8. zerod also refuses
 * control characters, because logs and terminals show these texts. Names of parameters may contain any bytes, so their
 * fields are bytes, not strings.
 */
static size_t text_check(const char *text, size_t n, unsigned flags)
{
    size_t i = 0, size;

    while (i < n) {
        uint8_t c = (uint8_t)text[i];

        size = utf8_length(text + i, n - i);
        if (size == 0 || c == 0x7f)
            return i;
        if (c < 0x20 && !((flags & WIRE_MULTILINE) && (c == '\n' || c == '\t')))
            return i;
        i += size;
    }
    return n;
}

/* Cuts a valid text of n bytes to max bytes, between characters. */
static void text_cut(char *text, size_t n, size_t max)
{
    size_t end = max - 3;

    assert(max > 3);
    if (n <= max)
        return;
    while (end > 0 && !utf8_begins(text[end]))
        end--;
    memcpy(text + end, "...", 4);
}

/* Return: the text in the form that the rule allows: text itself or a copy; NULL if memory runs out. */
static char *text_clean(const struct wire_rule *rule, struct wire_arena *arena, const char *text)
{
    size_t n, i;
    bool cut;
    char *copy;

    if (!text)
        return (char *)protobuf_c_empty_string;
    n = strlen(text);
    cut = (rule->flags & WIRE_CUT) && n > rule->max;
    i = text_check(text, n, rule->flags);
    if (i == n && !cut)
        return (char *)text;

    copy = wire_arena_alloc(arena, n + 1);
    if (!copy)
        return NULL;
    memcpy(copy, text, n + 1);
    for (; i < n; i += text_check(copy + i, n - i, rule->flags))
        copy[i] = '?';
    if (cut)
        text_cut(copy, n, rule->max);
    return copy;
}

/* ---- checks of one value: the problem is what follows the field's name --------------------------------- */

static int check_number(const struct wire_rule *rule, uint64_t v, struct wire_problem *problem)
{
    if (v >= rule->min && (rule->max == 0 || v <= rule->max) && (rule->multiple_of == 0 || v % rule->multiple_of == 0))
        return 0;
    if (v >= rule->min && (rule->max == 0 || v <= rule->max))
        wire_problem_set(problem, ": %" PRIu64 ", expected a multiple of %" PRIu64, v, rule->multiple_of);
    else if (rule->max == 0)
        wire_problem_set(problem, ": %" PRIu64 ", expected at least %" PRIu64, v, rule->min);
    else
        wire_problem_set(problem, ": %" PRIu64 ", expected %" PRIu64 " to %" PRIu64, v, rule->min, rule->max);
    return WIRE_E_INVALID;
}

/* Checks the number as signed, because a protobuf enum is signed on the wire. */
static int check_enum(const struct wire_rule *rule, int32_t v, struct wire_problem *problem)
{
    if (v >= 0 && (uint64_t)v >= rule->min && (uint64_t)v <= rule->max)
        return 0;
    wire_problem_set(problem, ": %" PRId32 ", expected %" PRIu64 " to %" PRIu64, v, rule->min, rule->max);
    return WIRE_E_INVALID;
}

static int check_double(const struct wire_rule *rule, double v, struct wire_problem *problem)
{
    if ((rule->flags & (WIRE_FINITE | WIRE_POSITIVE)) && !isfinite(v))
        wire_problem_set(problem, ": %g, expected a finite number", v);
    else if ((rule->flags & WIRE_POSITIVE) && v < 0)
        wire_problem_set(problem, ": %g, expected at least 0", v);
    else
        return 0;
    return WIRE_E_INVALID;
}

static int check_length(const struct wire_rule *rule, size_t n, struct wire_problem *problem)
{
    if (n >= rule->min && (rule->max == 0 || n <= rule->max))
        return 0;
    wire_problem_set(problem, ": %zu bytes, expected %" PRIu64 " to %" PRIu64, n, rule->min, rule->max);
    return WIRE_E_INVALID;
}

static int check_count(const struct wire_rule *rule, size_t n, struct wire_problem *problem)
{
    if (rule->max_count == 0 || n <= rule->max_count)
        return 0;
    wire_problem_set(problem, ": %zu values, expected at most %" PRIu64, n, rule->max_count);
    return WIRE_E_INVALID;
}

static int check_text(const struct wire_rule *rule, const char *text, struct wire_problem *problem)
{
    size_t n, i;
    int r;

    /*
     * protobuf-c uses its own constant for a string that was not sent. A string that was sent is in the arena, with a
     * NUL at its end.
     */
    if (text == protobuf_c_empty_string)
        n = 0;
    else
        n = wire_arena_size(text) - 1;
    r = check_length(rule, n, problem);
    if (r)
        return r;
    i = text_check(text, n, rule->flags);
    if (i == n)
        return 0;
    wire_problem_set(problem, ": byte 0x%02x at %zu, expected UTF-8 without control characters", (uint8_t)text[i], i);
    return WIRE_E_INVALID;
}

/* ---- from protobuf-c's struct to ours ------------------------------------------------------------------ */

static void count_store(const struct wire_rule *rule, uint8_t *ours, size_t n)
{
    assert(rule->n_count_bytes == sizeof(uint32_t) || rule->n_count_bytes == sizeof(size_t));
    if (rule->n_count_bytes == sizeof(uint32_t))
        *(uint32_t *)(ours + rule->count_offset) = n;
    else
        *(size_t *)(ours + rule->count_offset) = n;
}

static size_t count_load(const struct wire_rule *rule, const uint8_t *ours)
{
    assert(rule->n_count_bytes == sizeof(uint32_t) || rule->n_count_bytes == sizeof(size_t));
    if (rule->n_count_bytes == sizeof(uint32_t))
        return *(const uint32_t *)(ours + rule->count_offset);
    return *(const size_t *)(ours + rule->count_offset);
}

static int unpack_bytes(const struct wire_rule *rule, const uint8_t *proto, uint8_t *ours, struct wire_problem *problem)
{
    const ProtobufCBinaryData *bytes = (const void *)(proto + rule->proto_offset);

    *(const void **)(ours + rule->offset) = bytes->data;
    count_store(rule, ours, bytes->len);
    return check_length(rule, bytes->len, problem);
}

/* Unpacks an array, which stays at its place in protobuf-c's memory. */
static int unpack_array(const struct wire_rule *rule, const uint8_t *proto, uint8_t *ours, struct wire_problem *problem)
{
    size_t n = *(const size_t *)(proto + rule->proto_count_offset);
    void *array = *(void *const *)(proto + rule->proto_offset);
    int r;

    *(const void **)(ours + rule->offset) = n > 0 ? array : NULL;
    count_store(rule, ours, n);
    r = check_count(rule, n, problem);
    for (size_t i = 0; rule->kind == WIRE_STRINGS && i < n && !r; i++) {
        r = check_text(rule, ((char **)array)[i], problem);
        if (r)
            wire_problem_prefix(problem, "[%zu]", i);
    }
    return r;
}

/* Fills the struct of a message that was not sent: each field gets its default, zero or "". */
static void unpack_absent(const struct wire_table *table, uint8_t *ours)
{
    memset(ours, 0, table->n_bytes);
    for (size_t i = 0; i < table->n_rules; i++) {
        const struct wire_rule *rule = &table->rules[i];

        if (rule->kind == WIRE_STRING)
            *(const char **)(ours + rule->offset) = protobuf_c_empty_string;
        else if (rule->kind == WIRE_MESSAGE)
            unpack_absent(rule->table, ours + rule->offset);
    }
}

static int unpack_message(const struct wire_rule *rule, struct wire_arena *arena, const uint8_t *proto, uint8_t *ours,
                          struct wire_problem *problem)
{
    const void *message = *(void *const *)(proto + rule->proto_offset);
    int r;

    if (rule->has_offset)
        *(bool *)(ours + rule->has_offset) = message;
    if (!message && (rule->flags & WIRE_REQUIRED)) {
        wire_problem_set(problem, ": missing, expected one");
        return WIRE_E_INVALID;
    }
    if (!message) {
        unpack_absent(rule->table, ours + rule->offset);
        return 0;
    }
    r = wire_table_unpack(rule->table, arena, message, ours + rule->offset, problem);
    if (r == WIRE_E_INVALID)
        wire_problem_prefix(problem, ".");
    return r;
}

static int unpack_messages(const struct wire_rule *rule, struct wire_arena *arena, const uint8_t *proto, uint8_t *ours,
                           struct wire_problem *problem)
{
    size_t n = *(const size_t *)(proto + rule->proto_count_offset);
    void *const *messages = *(void **const *)(proto + rule->proto_offset);
    uint8_t *array = NULL;
    int r;

    count_store(rule, ours, n);
    *(void **)(ours + rule->offset) = NULL;
    r = check_count(rule, n, problem);
    if (r || n == 0)
        return r;
    array = wire_arena_alloc(arena, n * rule->table->n_bytes);
    if (!array)
        return arena->failure;
    *(void **)(ours + rule->offset) = array;
    for (size_t i = 0; i < n; i++) {
        r = wire_table_unpack(rule->table, arena, messages[i], array + i * rule->table->n_bytes, problem);
        if (r == WIRE_E_INVALID)
            wire_problem_prefix(problem, "[%zu].", i);
        if (r)
            return r;
    }
    return 0;
}

static int unpack_field(const struct wire_rule *rule, struct wire_arena *arena, const uint8_t *proto, uint8_t *ours,
                        struct wire_problem *problem)
{
    const void *from = proto + rule->proto_offset;
    void *to = ours + rule->offset;

    switch (rule->kind) {
    case WIRE_U32:
        *(uint32_t *)to = *(const uint32_t *)from;
        return check_number(rule, *(const uint32_t *)from, problem);
    case WIRE_U64:
        *(uint64_t *)to = *(const uint64_t *)from;
        return check_number(rule, *(const uint64_t *)from, problem);
    case WIRE_ENUM:
        *(int32_t *)to = *(const int32_t *)from;
        return check_enum(rule, *(const int32_t *)from, problem);
    case WIRE_BOOL:
        *(bool *)to = *(const protobuf_c_boolean *)from;
        return 0;
    case WIRE_DOUBLE:
        *(double *)to = *(const double *)from;
        return check_double(rule, *(const double *)from, problem);
    case WIRE_STRING:
        *(const char **)to = *(char *const *)from;
        return check_text(rule, *(char *const *)from, problem);
    case WIRE_BYTES:
        return unpack_bytes(rule, proto, ours, problem);
    case WIRE_U32S:
    case WIRE_U64S:
    case WIRE_STRINGS:
        return unpack_array(rule, proto, ours, problem);
    case WIRE_MESSAGE:
        return unpack_message(rule, arena, proto, ours, problem);
    case WIRE_MESSAGES:
        return unpack_messages(rule, arena, proto, ours, problem);
    }
    abort();
}

/* Does the field have the value of an unset field? Only for kinds that occur with a has_x. */
static bool field_is_zero(const struct wire_rule *rule, const uint8_t *ours)
{
    assert(rule->kind == WIRE_U32 || rule->kind == WIRE_U64 || rule->kind == WIRE_DOUBLE || rule->kind == WIRE_BYTES);
    switch (rule->kind) {
    case WIRE_U32:
        return *(const uint32_t *)(ours + rule->offset) == 0;
    case WIRE_U64:
        return *(const uint64_t *)(ours + rule->offset) == 0;
    case WIRE_DOUBLE:
        return *(const double *)(ours + rule->offset) == 0;
    case WIRE_BYTES:
        return count_load(rule, ours) == 0;
    default:
        return true;
    }
}

/* Checks that the field is unset if its has_x is false. */
static int check_has(const struct wire_rule *rule, const uint8_t *proto, const uint8_t *ours,
                     struct wire_problem *problem)
{
    if (rule->proto_has_offset == 0 || *(const protobuf_c_boolean *)(proto + rule->proto_has_offset) ||
        field_is_zero(rule, ours))
        return 0;
    wire_problem_set(problem, ": set, expected nothing without has_%s", rule->name);
    return WIRE_E_INVALID;
}

int wire_table_unpack(const struct wire_table *table, struct wire_arena *arena, const void *proto, void *ours,
                      struct wire_problem *problem)
{
    int r;

    for (size_t i = 0; i < table->n_rules; i++) {
        const struct wire_rule *rule = &table->rules[i];

        r = unpack_field(rule, arena, proto, ours, problem);
        if (!r)
            r = check_has(rule, proto, ours, problem);
        if (r == WIRE_E_INVALID)
            wire_problem_prefix(problem, "%s", rule->name);
        if (r)
            return r;
    }
    if (table->check && !table->check(ours, problem))
        return WIRE_E_INVALID;
    return 0;
}

/* ---- from our struct to protobuf-c's ------------------------------------------------------------------- */

static int pack_strings(const struct wire_rule *rule, struct wire_arena *arena, const uint8_t *ours, uint8_t *proto)
{
    const char *const *texts = *(const char *const *const *)(ours + rule->offset);
    size_t n = count_load(rule, ours);
    char **array;

    array = wire_arena_alloc(arena, n * sizeof(*array));
    if (!array)
        return arena->failure;
    *(size_t *)(proto + rule->proto_count_offset) = n;
    *(char ***)(proto + rule->proto_offset) = array;
    for (size_t i = 0; i < n; i++) {
        array[i] = text_clean(rule, arena, texts[i]);
        if (!array[i])
            return arena->failure;
    }
    return 0;
}

/* Packs our struct into a new message in the arena. */
static int pack_message(const struct wire_table *table, struct wire_arena *arena, const uint8_t *ours, void **out)
{
    void *message = wire_arena_alloc(arena, table->descriptor->sizeof_message);

    if (!message)
        return arena->failure;
    *out = message;
    return wire_table_pack(table, arena, ours, message);
}

static int pack_messages(const struct wire_rule *rule, struct wire_arena *arena, const uint8_t *ours, uint8_t *proto)
{
    const uint8_t *from = *(const uint8_t *const *)(ours + rule->offset);
    size_t n = count_load(rule, ours);
    void **array;
    int r;

    array = wire_arena_alloc(arena, n * sizeof(*array));
    if (!array)
        return arena->failure;
    *(size_t *)(proto + rule->proto_count_offset) = n;
    *(void ***)(proto + rule->proto_offset) = array;
    for (size_t i = 0; i < n; i++) {
        r = pack_message(rule->table, arena, from + i * rule->table->n_bytes, &array[i]);
        if (r)
            return r;
    }
    return 0;
}

static int pack_field(const struct wire_rule *rule, struct wire_arena *arena, const uint8_t *ours, uint8_t *proto)
{
    const void *from = ours + rule->offset;
    void *to = proto + rule->proto_offset;

    switch (rule->kind) {
    case WIRE_U32:
    case WIRE_ENUM:
        *(uint32_t *)to = *(const uint32_t *)from;
        return 0;
    case WIRE_U64:
        *(uint64_t *)to = *(const uint64_t *)from;
        return 0;
    case WIRE_BOOL:
        *(protobuf_c_boolean *)to = *(const bool *)from;
        return 0;
    case WIRE_DOUBLE:
        *(double *)to = *(const double *)from;
        return 0;
    case WIRE_STRING:
        *(char **)to = text_clean(rule, arena, *(const char *const *)from);
        return *(char **)to ? 0 : arena->failure;
    case WIRE_BYTES:
        *(ProtobufCBinaryData *)to =
            (ProtobufCBinaryData){.data = *(uint8_t *const *)from, .len = count_load(rule, ours)};
        return 0;
    case WIRE_U32S:
    case WIRE_U64S:
        *(size_t *)(proto + rule->proto_count_offset) = count_load(rule, ours);
        *(void **)to = *(void *const *)from;
        return 0;
    case WIRE_STRINGS:
        return pack_strings(rule, arena, ours, proto);
    case WIRE_MESSAGE:
        return pack_message(rule->table, arena, from, to);
    case WIRE_MESSAGES:
        return pack_messages(rule, arena, ours, proto);
    }
    abort();
}

int wire_table_pack(const struct wire_table *table, struct wire_arena *arena, const void *ours, void *proto)
{
    int r;

    protobuf_c_message_init(table->descriptor, proto);
    for (size_t i = 0; i < table->n_rules; i++) {
        const struct wire_rule *rule = &table->rules[i];

        if (rule->has_offset && !*(const bool *)((const uint8_t *)ours + rule->has_offset))
            continue;
        r = pack_field(rule, arena, ours, proto);
        if (r)
            return r;
    }
    return 0;
}

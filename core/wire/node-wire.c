/* SPDX-License-Identifier: Apache-2.0 */

/* Tables of the protocol between nodes: the allowed contents of each field of a message. */

#include "core/wire/node-wire.h"

#include <stddef.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/wire-envelope.h"
#include "core/wire/wire-rule.h"
#include "proto/nodes.pb-c.h"

enum {
    MAX_TEXT_BYTES = 32 * 1024,  /* diagnostics above this are cut, so that no message is refused */
    MAX_BYTES = 896 * 1024,      /* for a manifest; a value of the rendezvous needs less than 1 KiB for each node */
    MAX_BITS_BYTES = 256 * 1024, /* a bit for each of two million parameters */
};

static const struct wire_rule finding_rules[] = {
    BOOL(NodeFinding, node_finding, found),      BOOL(NodeFinding, node_finding, overflowed),
    U32(NodeFinding, node_finding, micro_batch), U32(NodeFinding, node_finding, param),
    U32(NodeFinding, node_finding, rank),        U64(NodeFinding, node_finding, elem),
    DOUBLE(NodeFinding, node_finding, value),    U64(NodeFinding, node_finding, n_nan),
    U64(NodeFinding, node_finding, n_inf),
};
static const struct wire_table finding_table = WIRE_TABLE(node_finding, node_finding, finding_rules);

static const struct wire_rule verdict_rules[] = {
    BOOL(NodeVerdict, node_verdict, apply),
    DOUBLE(NodeVerdict, node_verdict, norm),
    DOUBLE(NodeVerdict, node_verdict, s),
    DOUBLE(NodeVerdict, node_verdict, norm_scale),
    BOOL(NodeVerdict, node_verdict, nonfinite),
    BOOL(NodeVerdict, node_verdict, found_inf),
    MESSAGES(NodeVerdict, node_verdict, groups, n_groups, .table = &wire_hyper_table, .max_count = WIRE_MAX_GROUPS),
    BYTES(NodeVerdict, node_verdict, pushed_any, n_any_bytes, .max = MAX_BITS_BYTES),
    BYTES(NodeVerdict, node_verdict, pushed_all, n_all_bytes, .max = MAX_BITS_BYTES),
    MESSAGE(NodeVerdict, node_verdict, finding, .table = &finding_table),
};
static const struct wire_table verdict_table = WIRE_TABLE(node_verdict, node_verdict, verdict_rules);

static const struct wire_rule message_rules[] = {
    ENUM(NodeMessage, node_message, kind, .min = NODE_DECLARED, .max = NODE_STACK),
    U64(NodeMessage, node_message, step),
    U32(NodeMessage, node_message, attempt),
    U32(NodeMessage, node_message, generation),
    U64(NodeMessage, node_message, tag),
    U32(NodeMessage, node_message, parcel),
    U32(NodeMessage, node_message, micro_batch),
    U32(NodeMessage, node_message, pass),
    U64S(NodeMessage, node_message, numbers, n_numbers),
    U64(NodeMessage, node_message, digest),
    U32(NodeMessage, node_message, node),
    BOOL(NodeMessage, node_message, has_rank),
    U32(NodeMessage, node_message, rank),
    STRING(NodeMessage, node_message, text, .max = MAX_TEXT_BYTES, .flags = WIRE_CUT | WIRE_MULTILINE),
    BYTES(NodeMessage, node_message, bytes, n_bytes, .max = MAX_BYTES),
    MESSAGE(NodeMessage, node_message, args, .table = &wire_step_table),
    BYTES(NodeMessage, node_message, pushed_any, n_any_bytes, .max = MAX_BITS_BYTES),
    BYTES(NodeMessage, node_message, pushed_all, n_all_bytes, .max = MAX_BITS_BYTES),
    BYTES(NodeMessage, node_message, awaited, n_awaited_bytes, .max = MAX_BITS_BYTES),
    MESSAGE(NodeMessage, node_message, finding, .table = &finding_table),
    MESSAGE(NodeMessage, node_message, verdict, .table = &verdict_table),
    DOUBLE(NodeMessage, node_message, norm),
    U64(NodeMessage, node_message, arrived),
    BOOL(NodeMessage, node_message, proceed),
    BOOL(NodeMessage, node_message, forget),
    STRING(NodeMessage, node_message, reason, .max = MAX_TEXT_BYTES, .flags = WIRE_CUT | WIRE_MULTILINE),
    STRING(NodeMessage, node_message, cause_class, .max = sizeof(((struct diagnostic *)NULL)->cause_class) - 1),
};
static const struct wire_table message_table = WIRE_TABLE(node_message, node_message, message_rules);

_Static_assert((int)NODE_N_KINDS == (int)NODE_STACK + 1, "message_rules has the last kind");
_Static_assert((int)NODE_LOADED == (int)ZEROD__V1__NODE_KIND__NODE_LOADED &&
                   (int)NODE_FORM == (int)ZEROD__V1__NODE_KIND__NODE_FORM &&
                   (int)NODE_STACK == (int)ZEROD__V1__NODE_KIND__NODE_STACK,
               "kinds are numbered as in the proto");
_Static_assert(MAX_BYTES + 2 * MAX_TEXT_BYTES < NODE_MESSAGE_MAX_BYTES, "the largest manifest fits into a message");

int node_unpack(struct wire_arena *arena, const void *data, size_t n_bytes, struct node_message *out, char *why,
                size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};

    return wire_message_unpack(&message_table, "NodeMessage", arena, data, n_bytes, out, &problem);
}

int node_pack(struct wire_arena *arena, const struct node_message *message, void *buffer, size_t size)
{
    return wire_message_pack(&message_table, arena, message, buffer, size);
}

bool node_exact_sum(const struct node_message *message, struct exact_sum *out)
{
    static const uint8_t none[sizeof(out->zero)];
    uint8_t nonfinite, nan;

    if (message->n_bytes != sizeof(*out))
        return false;
    memcpy(&nonfinite, message->bytes + offsetof(struct exact_sum, nonfinite), sizeof(nonfinite));
    memcpy(&nan, message->bytes + offsetof(struct exact_sum, nan), sizeof(nan));
    if (nonfinite > 1 || nan > nonfinite ||
        memcmp(message->bytes + offsetof(struct exact_sum, zero), none, sizeof(none)) != 0)
        return false;
    memcpy(out, message->bytes, sizeof(*out));
    for (unsigned i = 0; i < EXACT_N_LIMBS; i++)
        if (out->limb[i] > UINT32_MAX)
            return false;
    return out->limb[EXACT_N_LIMBS - 1] < UINT32_MAX / NODE_MAX_NODES && out->n_deferred == 0;
}

const char *node_kind_name(enum node_kind kind)
{
    const ProtobufCEnumValue *value =
        protobuf_c_enum_descriptor_get_value(&zerod__v1__node_kind__descriptor, (int)kind);

    return value ? value->name + strlen("NODE_") : "?";
}

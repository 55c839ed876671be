/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as messages between nodes. A message that unpacks must pack, and the result must unpack and pack again to
 * the same bytes. A message that does not unpack must have a reason. Each unpacked message is reported to a leader,
 * which may complain but must not crash, because a node with the key may send anything.
 *
 * The input is a series of messages. Each begins with two bytes of length, and one byte for the node that reports it
 * and whether its step and attempt are corrected.
 */

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/wire/node-wire.h"
#include "daemon/leader/leader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { NODES = 3, AS_IT_IS = 0x80 };

struct heard {
    struct leader *leader;
    uint64_t step;
    uint32_t attempt;
};

static uint8_t packet[2][NODE_MESSAGE_MAX_BYTES];
static char why[256];
static struct wire_arena arena, said;

/* ---- the leader's side --------------------------------------------------------------------------------- */

/* Asserts that each message of the leader can be packed, and unpacked by its receivers. */
static void on_say(void *userdata, const struct node_message *message)
{
    struct heard *heard = userdata;
    struct node_message out;
    int n = node_pack(&said, message, packet[1], sizeof(packet[1]));

    if (n == -EMSGSIZE)
        return; /* the report was as large */
    assert(n > 0);
    n = node_unpack(&said, packet[1], (size_t)n, &out, why, sizeof(why));
    assert(n == 0 && out.kind == message->kind);
    if (message->kind == NODE_VALUE)
        return;
    heard->step = message->step + (message->kind == NODE_COMMIT);
    heard->attempt = message->attempt;
}

static void on_tell(void *userdata, unsigned node, const struct node_message *message)
{
    assert(node < NODES);
    on_say(userdata, message);
}

static void on_decide_again(void *userdata, unsigned node)
{
    (void)userdata;
    assert(node < NODES);
}

static bool on_judge(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                     struct node_message *hold)
{
    double norm = exact_sum_round(&merged->squares);

    (void)userdata;
    hold->finding = merged->finding;
    verdict->apply = norm < 1e6;
    return !merged->finding.found || merged->proceed;
}

static void on_complain(void *userdata, unsigned node, const char *text)
{
    (void)userdata;
    assert(node < NODES && text[0]);
}

static struct layout *make_layout(void)
{
    static const char names[] = "abcde";
    static const uint64_t shapes[][1] = {{100}, {190}, {64}, {64}, {5}};
    struct layout_decl decls[ARRAY_SIZE(shapes)];
    struct layout *layout;
    uint32_t bad;
    int r;

    for (uint32_t i = 0; i < ARRAY_SIZE(shapes); i++)
        decls[i] = (struct layout_decl){.name = &names[i],
                                        .name_len = 1,
                                        .group = i < 2 ? 2 - i : 0,
                                        .trainable = i != 4,
                                        .n_dims = 1,
                                        .shape = shapes[i]};
    r = layout_new(&layout, decls, ARRAY_SIZE(decls), NODES + 1, 256, &bad);
    assert(r == 0 || r == -ENOMEM);
    return r == 0 ? layout : NULL;
}

static void report_all(struct leader *leader, struct node_message message)
{
    for (unsigned i = 0; i < NODES; i++)
        leader_hear(leader, i, &message);
}

/* Return: a leader before its first step. */
static struct leader *start(struct heard *heard, const struct layout *layout, unsigned stage)
{
    static const unsigned n_sources[NODES] = {1, 2, 1};
    struct leader *leader;
    int r = leader_new(&leader, &(struct leader_options){.n_nodes = NODES,
                                                         .n_sources = n_sources,
                                                         .stage = stage,
                                                         .partitions_all = stage == 3,
                                                         .ops = {.say = on_say,
                                                                 .tell = on_tell,
                                                                 .decide_again = on_decide_again,
                                                                 .judge = on_judge,
                                                                 .complain = on_complain,
                                                                 .userdata = heard}});

    if (r < 0)
        return NULL;
    heard->leader = leader;
    report_all(leader, (struct node_message){.kind = NODE_DECLARED, .text = ""});
    r = leader_form(leader, layout);
    assert(r == 0);
    report_all(leader, (struct node_message){.kind = NODE_FORMED, .text = ""});
    report_all(leader, (struct node_message){.kind = NODE_CONNECTED, .generation = 1, .text = ""});
    leader_hear(leader, 0, &(struct node_message){.kind = NODE_WEIGHTS, .text = ""});
    report_all(leader, (struct node_message){.kind = NODE_MOVED, .tag = 1, .text = ""});
    return leader;
}

/* ---- a message ----------------------------------------------------------------------------------------- */

static void check_again(const struct node_message *message)
{
    struct node_message out;
    int n[2], r;

    n[0] = node_pack(&said, message, packet[0], sizeof(packet[0]));
    assert(n[0] > 0 || n[0] == -EMSGSIZE);
    if (n[0] < 0)
        return;
    r = node_unpack(&said, packet[0], (size_t)n[0], &out, why, sizeof(why));
    assert(r == 0);
    n[1] = node_pack(&said, &out, packet[1], sizeof(packet[1]));
    assert(n[1] == n[0] && memcmp(packet[0], packet[1], (size_t)n[0]) == 0);
}

static void hear(struct heard *heard, uint8_t flags, const uint8_t *data, size_t size)
{
    struct node_message message;
    int r;

    why[0] = '\0';
    r = node_unpack(&arena, data, size, &message, why, sizeof(why));
    assert(r == 0 || (r == WIRE_E_INVALID && strncmp(why, "NodeMessage", 11) == 0 && strstr(why, ": ")));
    if (r)
        return;
    check_again(&message);
    if (!(flags & AS_IT_IS)) {
        message.step = heard->step;
        message.attempt = heard->attempt;
    }
    message.node = flags % NODES; /* as in nodes_hear() */
    leader_hear(heard->leader, flags % NODES, &message);
    (void)leader_waits_for(heard->leader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct layout *layout;
    struct heard heard = {0};

    if (!arena.block && (wire_arena_init(&arena) < 0 || wire_arena_init(&said) < 0))
        return 0;
    if (!layout)
        layout = make_layout();
    if (!layout || size == 0 || !start(&heard, layout, 1 + data[0] % 3))
        return 0;
    data++;
    size--;
    while (size >= 3) {
        size_t n = MIN((size_t)data[0] | (size_t)data[1] << 8, size - 3);

        hear(&heard, data[2], data + 3, n);
        data += 3 + n;
        size -= 3 + n;
    }
    leader_free(heard.leader);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tests the leader alone. A test sends the nodes' reports, and compares the leader's messages, one line of text for
 * each, with the expected ones. The last test lets simulated nodes, which report as nodes.c does, run whole steps in
 * random order, with breaks and aborts, and checks the rules that must always hold.
 */

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/wire/device-wire.h"
#include "daemon/exchange/exchange.h"
#include "daemon/leader/leader.h"
#include "tests/group.h"

enum {
    NODES = 3,
    PARCELS = 3,
    SAID_BYTES = 4096,
};

struct fixture {
    struct leader *leader;
    struct layout *layout;
    unsigned n_nodes, stage;
    bool holds; /* whether the judge's next answer holds the step */
    bool skips;
    struct node_finding found; /* the finding that the judge got */
    unsigned n_args;           /* groups in the arguments that the judge got */
    double loss_scale, squares;
    bool found_inf, proceed;
    uint8_t any, all;
    char said[SAID_BYTES];
    size_t n_said;
    uint64_t step;
    uint32_t attempt; /* the last one sent; nodes report with it */
    uint32_t n_backs; /* returns of all ranks that all nodes know of */
};

/* ---- what is said -------------------------------------------------------------------------------------- */

static void note(struct fixture *f, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void note(struct fixture *f, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    f->n_said += (size_t)vsnprintf(f->said + f->n_said, sizeof(f->said) - f->n_said, format, args);
    va_end(args);
    assert_true(f->n_said < sizeof(f->said));
}

static void note_numbers(struct fixture *f, const struct node_message *m)
{
    for (size_t i = 0; i < m->n_numbers; i++)
        note(f, "%s%" PRIu64, i ? "," : " numbers ", m->numbers[i]);
}

static void note_arrived(struct fixture *f, const struct node_message *m)
{
    if (m->arrived)
        note(f, " arrived %" PRIx64, m->arrived);
}

/* Notes the fields that this kind of message uses. */
static void note_details(struct fixture *f, const struct node_message *m)
{
    switch (m->kind) {
    case NODE_FORM:
        note(f, " %" PRIx64 "%s%s", m->digest, m->text[0] ? " run " : "", m->text);
        if (m->pass)
            note(f, " room %u", m->pass);
        break;
    case NODE_REFUSE:
        note(f, "%s %s", m->proceed ? " and form again:" : "", m->text);
        break;
    case NODE_ENGINE:
        note(f, " %u%s%s", m->generation, m->text[0] ? " " : "", m->text);
        if (m->arrived)
            note(f, " answers %" PRIx64, m->arrived & ((1 << NODES) - 1));
        break;
    case NODE_EXCHANGE:
    case NODE_SETTLED:
        note(f, " %" PRIu64 " parcel %u at %u.%u", m->tag, m->parcel, m->micro_batch, m->pass);
        note_numbers(f, m);
        note_arrived(f, m);
        break;
    case NODE_SPREAD:
    case NODE_GATHER:
        note(f, " %" PRIu64, m->tag);
        note_arrived(f, m);
        break;
    case NODE_NORM:
        note(f, " %g", m->norm);
        break;
    case NODE_DECIDED:
        note(f, " %s", m->verdict.apply ? "apply" : "skip");
        break;
    case NODE_HOLD:
        note(f, " param %u", m->finding.param);
        break;
    case NODE_ABORTED:
        note(f, " attempt %u node %u", m->attempt, m->node);
        if (m->has_rank)
            note(f, " rank %u", m->rank);
        note(f, " %s", m->reason && m->reason[0] ? m->reason : m->text);
        break;
    case NODE_SERVE:
        note(f, " %" PRIu64 " node %u fetch %" PRIu64 " kind %u", m->tag, m->node, m->digest, m->pass);
        if (m->pass == FETCH_GATHERED)
            note(f, " for rank %u", m->rank);
        note_numbers(f, m);
        break;
    case NODE_VALUE:
        note(f, " %s of node %u", m->text, m->node);
        break;
    case NODE_MANIFEST:
    case NODE_WITHDRAWN:
        note(f, " of node %u", m->node);
        break;
    case NODE_SAVE:
        note(f, " %" PRIu64 " of step %" PRIu64, m->tag, m->step);
        if (m->parcel > 0)
            note(f, " after %u windows", m->parcel);
        break;
    case NODE_SAVE_END:
        note(f, " %" PRIu64 " %s", m->tag, m->text[0] ? m->text : "whole");
        break;
    case NODE_LOAD:
        if (m->forget)
            note(f, " of step %" PRIu64 " or older", m->digest);
        else
            note(f, " %" PRIu64, m->tag);
        break;
    case NODE_BACK:
        if (m->proceed)
            f->n_backs = m->pass;
        note(f, " node %u%s%s", m->node, m->proceed ? " all" : "", m->forget ? " late" : "");
        break;
    default:
        break;
    }
}

static void on_say(void *userdata, const struct node_message *m)
{
    struct fixture *f = userdata;

    if (m->kind != NODE_VALUE && m->kind != NODE_MANIFEST) { /* VALUE and MANIFEST are forwarded unchanged */
        f->step = m->step + (m->kind == NODE_COMMIT);
        f->attempt = m->attempt;
    }
    note(f, "%s", node_kind_name(m->kind));
    note_details(f, m);
    note(f, "\n");
}

static void on_tell(void *userdata, unsigned node, const struct node_message *m)
{
    note(userdata, "to node %u: %s of step %" PRIu64 "\n", node, node_kind_name(m->kind), m->step);
}

static void on_decide_again(void *userdata, unsigned node)
{
    note(userdata, "to node %u: DECIDED again\n", node);
}

static bool on_judge(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                     struct node_message *hold)
{
    hold->finding = merged->finding;
    struct fixture *f = userdata;
    bool holds = f->holds;

    f->holds = false;
    f->found = merged->finding;
    f->n_args = merged->args ? (unsigned)merged->args->n_groups : 0;
    f->loss_scale = merged->args ? merged->args->loss_scale : -1;
    f->found_inf = merged->args && merged->args->found_inf;
    f->proceed = merged->proceed;
    f->squares = exact_sum_round(&merged->squares);
    f->any = merged->pushed_any[0];
    f->all = merged->pushed_all[0];
    verdict->apply = !f->skips;
    return !holds;
}

static void on_complain(void *userdata, unsigned node, const char *why)
{
    note(userdata, "! node %u: %s\n", node, why);
}

/* Expects exactly these messages since the last call. */
static void expect(struct fixture *f, const char *text)
{
    if (strcmp(f->said, text) != 0)
        fail_msg("expected\n%s\ngot\n%s", text, f->said);
    f->n_said = 0;
    f->said[0] = '\0';
}

/* Expects these messages since the last call, and perhaps others. */
static void fixture_said(struct fixture *f, const char *text)
{
    if (!strstr(f->said, text))
        fail_msg("expected\n%s\nin\n%s", text, f->said);
    f->n_said = 0;
    f->said[0] = '\0';
}

/* ---- reports ------------------------------------------------------------------------------------------- */

static void report(struct fixture *f, unsigned node, struct node_message message)
{
    message.step = f->step;
    message.attempt = f->attempt;
    message.node = node;
    if (message.kind == NODE_ASKED || message.kind == NODE_WANT_NORM || message.kind == NODE_BACK)
        message.pass = f->n_backs;
    if (!message.text)
        message.text = "";
    leader_hear(f->leader, node, &message);
}

static void report_all(struct fixture *f, struct node_message message)
{
    for (unsigned i = 0; i < f->n_nodes; i++)
        report(f, i, message);
}

static void ready(struct fixture *f, unsigned node, uint32_t parcel, uint32_t micro_batch, uint32_t pass)
{
    report(f, node,
           (struct node_message){.kind = NODE_READY, .parcel = parcel, .micro_batch = micro_batch, .pass = pass});
}

/* Reports a parcel ready, with a mask over the node's pieces for each part. */
static void ready_partly(struct fixture *f, unsigned node, uint32_t parcel, const uint64_t *masks, size_t n)
{
    report(f, node, (struct node_message){.kind = NODE_READY, .parcel = parcel, .numbers = masks, .n_numbers = n});
}

static void passed(struct fixture *f, unsigned node, uint32_t micro_batch, uint64_t parcel)
{
    report(f, node,
           (struct node_message){.kind = NODE_PASSED, .micro_batch = micro_batch, .numbers = &parcel, .n_numbers = 1});
}

static void asked(struct fixture *f, unsigned node)
{
    static const uint8_t bits[] = {0xff};

    report(f, node,
           (struct node_message){.kind = NODE_ASKED,
                                 .has_rank = true,
                                 .pushed_any = bits,
                                 .pushed_all = bits,
                                 .n_any_bytes = 1,
                                 .n_all_bytes = 1});
}

/* Reports that all ranks of the node have left. */
static void gone(struct fixture *f, unsigned node)
{
    report(f, node, (struct node_message){.kind = NODE_ASKED});
}

static void back(struct fixture *f, unsigned node, bool all)
{
    report(f, node, (struct node_message){.kind = NODE_BACK, .proceed = all});
}

static void moved(struct fixture *f, unsigned node, uint64_t tag, uint32_t parcel)
{
    report(f, node, (struct node_message){.kind = NODE_MOVED, .tag = tag, .parcel = parcel});
}

static void all_moved(struct fixture *f, uint64_t tag, uint32_t parcel)
{
    for (unsigned i = 0; i < f->n_nodes; i++)
        moved(f, i, tag, parcel);
}

static void connected(struct fixture *f, unsigned node, uint32_t generation, const uint64_t *tags, size_t n)
{
    report(f, node,
           (struct node_message){.kind = NODE_CONNECTED, .generation = generation, .numbers = tags, .n_numbers = n});
}

static void all_connected(struct fixture *f, uint32_t generation)
{
    for (unsigned i = 0; i < f->n_nodes; i++)
        connected(f, i, generation, NULL, 0);
}

static void broken(struct fixture *f, unsigned node, uint32_t generation)
{
    report(f, node, (struct node_message){.kind = NODE_BROKEN, .generation = generation, .text = "it broke"});
}

static void fetch(struct fixture *f, unsigned node, uint64_t id, enum fetch_kind kind, uint64_t param)
{
    report(f, node,
           (struct node_message){.kind = NODE_FETCH, .digest = id, .pass = kind, .numbers = &param, .n_numbers = 1});
}

static void sum(struct fixture *f, unsigned node, double value, const struct node_finding *finding)
{
    struct node_message message = {.kind = NODE_SUM};
    struct exact_sum squares;

    exact_sum_reset(&squares);
    exact_sum_add(&squares, value);
    exact_sum_carry(&squares);
    message.bytes = (const uint8_t *)&squares;
    message.n_bytes = sizeof(squares);
    if (finding)
        message.finding = *finding;
    report(f, node, message);
}

static void all_sum(struct fixture *f)
{
    for (unsigned i = 0; i < f->n_nodes; i++)
        sum(f, i, 1, NULL);
}

/* ---- fixture ------------------------------------------------------------------------------------------- */

/* Parcel 0 has two parts; 1 and 2 have one. The last parameter is frozen. */
static struct layout *make_layout(unsigned world_size)
{
    static const uint64_t shapes[][1] = {{100}, {190}, {64}, {64}, {5}};
    struct layout_decl decls[ARRAY_SIZE(shapes)];
    struct layout *layout;
    char names[ARRAY_SIZE(shapes)][2];
    uint32_t bad;

    for (uint32_t i = 0; i < ARRAY_SIZE(shapes); i++) {
        snprintf(names[i], sizeof(names[i]), "%u", i);
        decls[i] = (struct layout_decl){.name = names[i],
                                        .name_len = 1,
                                        .group = i < 2 ? 2 - i : 0,
                                        .trainable = i != 4,
                                        .n_dims = 1,
                                        .shape = shapes[i]};
    }
    assert_int_equal(layout_new(&layout, decls, ARRAY_SIZE(decls), world_size, 256, &bad), 0);
    return layout;
}

/* Each node has one rank and one piece, except node 1, which has two. */
static void make_leader(struct fixture *f, bool partitions_all, bool loads)
{
    static const unsigned n_sources[] = {1, 2, 1, 1};

    assert_int_equal(leader_new(&f->leader, &(struct leader_options){.n_nodes = f->n_nodes,
                                                                     .n_sources = n_sources,
                                                                     .stage = f->stage,
                                                                     .partitions_all = partitions_all,
                                                                     .loads = loads,
                                                                     .ops = {.say = on_say,
                                                                             .tell = on_tell,
                                                                             .decide_again = on_decide_again,
                                                                             .judge = on_judge,
                                                                             .complain = on_complain,
                                                                             .userdata = f}}),
                     0);
}

static struct fixture *fixture_new(unsigned n_nodes, unsigned stage, bool partitions_all)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    f->n_nodes = n_nodes;
    f->stage = stage;
    f->layout = make_layout(n_nodes + 1);
    assert_int_equal(f->layout->n_parcels, PARCELS);
    make_leader(f, partitions_all, false);
    return f;
}

static void fixture_free(struct fixture *f)
{
    expect(f, "");
    leader_free(f->leader);
    layout_free(f->layout);
    free(f);
}

static void form(struct fixture *f)
{
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 0xd1});
    expect(f, "FORM d1\n");
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report_all(f, (struct node_message){.kind = NODE_FORMED});
    expect(f, "ENGINE 1\n");
    all_connected(f, 1);
    expect(f, "");
    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS});
    expect(f, "SPREAD 1\n");
    all_moved(f, 1, 0);
    expect(f, "TRAIN\n");
}

/* The next tag after start(): three buckets had a tag each when weights were spread, and there was one more. */
enum { FIRST = 5 };

static struct fixture *start(unsigned stage)
{
    struct fixture *f = fixture_new(NODES, stage, false);

    form(f);
    return f;
}

/* start() for stage 3 on GPUs. */
static struct fixture *start_on_gpus(void)
{
    struct fixture *f = fixture_new(NODES, 3, true);

    form(f);
    return f;
}

/* All nodes ask for the step, and report until it is committed. tag is the gathering's, if there is one. */
static void finish_step(struct fixture *f, uint64_t tag)
{
    char said[128];

    for (unsigned i = 0; i < f->n_nodes; i++)
        asked(f, i);
    expect(f, "MEASURE\n");
    all_sum(f);
    expect(f, f->skips ? "DECIDED skip\n" : "DECIDED apply\n");
    for (unsigned i = 0; i + 1 < f->n_nodes; i++)
        report(f, i, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "");
    report(f, f->n_nodes - 1, (struct node_message){.kind = NODE_UPDATED});
    if (f->stage == 3 || f->skips) {
        expect(f, "COMMIT\n");
        return;
    }
    snprintf(said, sizeof(said), "GATHER %" PRIu64 "\n", tag);
    expect(f, said);
    all_moved(f, tag, 0);
    expect(f, "COMMIT\n");
}

/* ---- forming ------------------------------------------------------------------------------------------- */

static void test_forming(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);

    (void)state;
    assert_int_equal(leader_waits_for(f->leader), 7);
    report(f, 1, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    report(f, 0, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    assert_int_equal(leader_waits_for(f->leader), 4);
    report(f, 1, (struct node_message){.kind = NODE_UNDECLARED});
    report(f, 2, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    expect(f, "");
    report(f, 1, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    expect(f, "FORM 1\n");
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report(f, 2, (struct node_message){.kind = NODE_FORMED});
    report(f, 0, (struct node_message){.kind = NODE_FORMED});
    assert_int_equal(leader_waits_for(f->leader), 2);
    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS}); /* before the engines are connected */
    report(f, 1, (struct node_message){.kind = NODE_FORMED});
    expect(f, "ENGINE 1\n");
    connected(f, 0, 1, NULL, 0);
    connected(f, 2, 1, NULL, 0);
    assert_int_equal(leader_waits_for(f->leader), 2);
    connected(f, 1, 1, NULL, 0);
    expect(f, "SPREAD 1\n");
    moved(f, 1, 1, 0);
    moved(f, 0, 1, 0);
    assert_int_equal(leader_waits_for(f->leader), 4);
    expect(f, "");
    moved(f, 2, 1, 0);
    expect(f, "TRAIN\n");
    assert_int_equal(leader_waits_for(f->leader), 7);
    fixture_free(f);
}

/*
 * All nodes get the least room for gradients of GPUs that any node wants. A node that declares again may want another.
 */
static void test_gpu_room(void **state)
{
    static const struct {
        uint32_t wanted[NODES];
        const char *said;
    } cases[] = {{{2, 2, 2}, "FORM 1 room 2\n"},
                 {{2, 1, 2}, "FORM 1 room 1\n"},
                 {{2, 1, 0}, "FORM 1\n"},
                 {{9, 9, 9}, "FORM 1 room 2\n"}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct fixture *f = fixture_new(NODES, 2, false);

        report(f, 1, (struct node_message){.kind = NODE_DECLARED, .digest = 1, .pass = 1});
        report(f, 1, (struct node_message){.kind = NODE_UNDECLARED});
        for (unsigned node = 0; node < NODES; node++)
            report(f, node, (struct node_message){.kind = NODE_DECLARED, .digest = 1, .pass = cases[i].wanted[node]});
        expect(f, cases[i].said);
        fixture_free(f);
    }
}

static void test_unequal(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);

    (void)state;
    report(f, 0, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    report(f, 1, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    report(f, 2, (struct node_message){.kind = NODE_DECLARED, .digest = 0xabc});
    expect(f, "SHOW\n");
    assert_int_equal(leader_waits_for(f->leader), 7);
    report(f, 2, (struct node_message){.kind = NODE_MANIFEST, .node = 2});
    report(f, 0, (struct node_message){.kind = NODE_MANIFEST, .node = 0});
    expect(f, "MANIFEST of node 2\nMANIFEST of node 0\n");
    assert_int_equal(leader_waits_for(f->leader), 2);
    report(f, 1, (struct node_message){.kind = NODE_MANIFEST, .node = 1});
    expect(f, "MANIFEST of node 1\nREFUSE the ranks of node 2 declare other parameters than those of node 0 (digests "
              "0000000000000abc and "
              "0000000000000001)\n");
    assert_int_equal(leader_waits_for(f->leader), 7); /* all nodes form again */
    form(f);
    fixture_free(f);
}

static void declare(struct fixture *f, unsigned node, const char *run_id)
{
    report(f, node, (struct node_message){.kind = NODE_DECLARED, .digest = 1, .text = run_id});
}

/* A job has one run. A node whose ranks name no run id accepts any. */
static void test_runs(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);
    char text[257];

    (void)state;
    declare(f, 0, "");
    declare(f, 2, "monday");
    declare(f, 1, "tuesday");
    expect(f, "REFUSE the ranks of node 2 have the run id monday, those of node 1 have tuesday\n");
    assert_int_equal(leader_waits_for(f->leader), 7);
    memset(text, 'x', 256);
    text[256] = '\0';
    declare(f, 1, text);
    expect(f, "! node 1: DECLARED.text: not a run id\n");
    declare(f, 0, "");
    declare(f, 2, "monday");
    expect(f, "");
    declare(f, 1, "");
    expect(f, "FORM 1 run monday\n");
    fixture_free(f);
}

static void test_cannot_form(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);

    (void)state;
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    expect(f, "FORM 1\n");
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report(f, 0, (struct node_message){.kind = NODE_FORMED});
    report(f, 2, (struct node_message){.kind = NODE_UNFORMED, .text = "no memory"});
    expect(f, "REFUSE no memory\n");
    report(f, 1, (struct node_message){.kind = NODE_UNFORMED, .text = "no memory either"}); /* refused already */
    report(f, 2, (struct node_message){.kind = NODE_FORMED});
    expect(f, "");
    assert_int_equal(leader_form(f->leader, NULL), 0);
    form(f);
    fixture_free(f);
}

/* Reports about a dropped job do not count for the next job. */
static void test_stale_forming(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);

    (void)state;
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    expect(f, "FORM 1\n");
    leader_lose(f->leader, 2, "node 2 is gone");
    expect(f, "REFUSE and form again: node 2 is gone\n");
    report(f, 0, (struct node_message){.kind = NODE_FORMED});
    report(f, 1, (struct node_message){.kind = NODE_FORMED});
    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS});
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    expect(f, "FORM 1\n");
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report(f, 2, (struct node_message){.kind = NODE_FORMED});
    report(f, 1, (struct node_message){.kind = NODE_FORMED});
    expect(f, ""); /* node 0 has not reported it */
    report(f, 0, (struct node_message){.kind = NODE_FORMED});
    expect(f, "ENGINE 1\n");
    all_connected(f, 1);
    expect(f, ""); /* rank 0's weights are not complete */
    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS});
    expect(f, "SPREAD 1\n");
    leader_lose(f->leader, 1, "node 1 is gone");
    expect(f, "REFUSE and form again: node 1 is gone\n");
    fixture_free(f);
}

static void declare_after(struct fixture *f, unsigned node, uint32_t generation)
{
    report(f, node, (struct node_message){.kind = NODE_DECLARED, .digest = 1, .generation = generation});
}

/* A new leader uses no tags and generations that nodes may know from the leader before. */
static void test_new_leader_forms(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);

    (void)state;
    declare_after(f, 1, 7);
    declare_after(f, 2, 6);
    declare_after(f, 0, 0);
    expect(f, "FORM 1\n");
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report_all(f, (struct node_message){.kind = NODE_FORMED});
    expect(f, "ENGINE 8\n");
    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS});
    all_connected(f, 8);
    expect(f, "SPREAD 30064771073\n");                                  /* 7 * 2^32 + 1 */
    report_all(f, (struct node_message){.kind = NODE_MOVED, .tag = 1}); /* the tag of an earlier leader */
    expect(f, "");
    declare_after(f, 1, UINT32_MAX);
    expect(f, "! node 1: DECLARED.generation: there is none after it\n");
    fixture_free(f);
}

/* ---- exchanges ----------------------------------------------------------------------------------------- */

/* A mask has a bit for each piece of all nodes, in rank order. Node 1 has the second and third. */
static void test_masks(void **state)
{
    static const uint64_t of_one[] = {2, 1}, beyond[] = {UINT64_MAX, 0};
    struct fixture *f = start(2);

    (void)state;
    ready(f, 0, 0, 0, 0);
    ready_partly(f, 1, 0, of_one, 2);
    ready(f, 2, 0, 0, 0);
    expect(f, "EXCHANGE 5 parcel 0 at 0.0 numbers 13,11\n");
    all_moved(f, 5, 0);
    expect(f, "SETTLED 5 parcel 0 at 0.0\n");
    report(f, 0, (struct node_message){.kind = NODE_ABORT, .text = "again"});
    expect(f, "ABORTED attempt 1 node 0 again\n");
    ready_partly(f, 0, 0, beyond, 2); /* node 0 has only one piece */
    passed(f, 1, 0, 0);
    passed(f, 2, 0, 0);
    expect(f, "EXCHANGE 6 parcel 0 at 0.0 numbers 1,0\n");
    fixture_free(f);
}

/*
 * After WITHDRAWN, exchanges that were ordered are still ordered in later generations. Other parcels must be reported
 * ready again.
 */
static void test_withdraw(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    ready(f, 0, 1, 0, 0);
    ready(f, 1, 1, 0, 0);
    ready(f, 2, 1, 0, 0);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0\n");
    ready(f, 1, 2, 0, 0);
    report(f, 0, (struct node_message){.kind = NODE_BROKEN, .generation = 1, .text = "it broke"});
    expect(f, "ENGINE 2 it broke\n");
    for (unsigned i = 0; i < 3; i++)
        ready(f, i, 0, 0, 0); /* would be exchanged when the engines are connected */
    report(f, 1, (struct node_message){.kind = NODE_WITHDRAW});
    expect(f, "WITHDRAWN of node 1\n");
    all_connected(f, 2);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0\n");
    ready(f, 0, 2, 0, 0);
    ready(f, 2, 2, 0, 0);
    expect(f, "");
    ready(f, 1, 2, 0, 0);
    ready(f, 1, 0, 0, 0);
    expect(f, "EXCHANGE 7 parcel 2 at 0.0\nEXCHANGE 8 parcel 0 at 0.0\n");
    fixture_free(f);
}

/* In a write window, the leader says which nodes it waits for, and what they must do. */
static void test_window(void **state)
{
    static const uint64_t written[] = {3};
    struct fixture *f = start(2);

    (void)state;
    for (unsigned i = 0; i < NODES; i++)
        report(f, i, (struct node_message){.kind = NODE_WINDOW});
    expect(f, "OPEN\n");
    report(f, 1, (struct node_message){.kind = NODE_WINDOW_END});
    assert_int_equal(leader_waits_for(f->leader), 5);
    assert_string_equal(leader_waits_to(f->leader), "to end the write window");
    report(f, 0, (struct node_message){.kind = NODE_WINDOW_END, .numbers = written, .n_numbers = 1});
    report(f, 2, (struct node_message){.kind = NODE_WINDOW_END});
    expect(f, "WRITE\n");
    assert_int_equal(leader_waits_for(f->leader), 7);
    assert_string_equal(leader_waits_to(f->leader), "to get what was written");
    all_moved(f, 5, 0);
    expect(f, "STORE\n");
    report(f, 2, (struct node_message){.kind = NODE_STORED});
    assert_int_equal(leader_waits_for(f->leader), 3);
    assert_string_equal(leader_waits_to(f->leader), "to store what was written");
    report(f, 0, (struct node_message){.kind = NODE_STORED});
    report(f, 1, (struct node_message){.kind = NODE_STORED});
    expect(f, "GATHER 12\n");
    moved(f, 1, 12, 0);
    assert_int_equal(leader_waits_for(f->leader), 5);
    assert_string_equal(leader_waits_to(f->leader), "to get the weights that were written");
    moved(f, 0, 12, 0);
    moved(f, 2, 12, 0);
    expect(f, "CLOSED\n");
    fixture_free(f);
}

/* A node may have more passes than another, none in a micro-batch, or be in a later micro-batch. */
static void test_passes(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    passed(f, 0, 0, 1);
    ready(f, 0, 1, 1, 0); /* in a later micro-batch */
    ready(f, 1, 1, 0, 0);
    passed(f, 2, 0, 1);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 numbers 6\n");
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    ready(f, 2, 1, 1, 0);
    expect(f, ""); /* node 1 may have another pass of micro-batch 0 */
    ready(f, 1, 1, 0, 1);
    expect(f, "EXCHANGE 6 parcel 1 at 0.1 numbers 6\n");
    passed(f, 1, 0, 1);
    expect(f, "! node 1: PASSED: not the parcel's position\n"); /* this pass of node 1 is being exchanged */
    all_moved(f, 6, 1);
    expect(f, "SETTLED 6 parcel 1 at 0.1\n");
    passed(f, 1, 0, 1);
    expect(f, "");
    ready(f, 1, 1, 1, 0);
    expect(f, "EXCHANGE 7 parcel 1 at 1.0\n");
    ready(f, 0, 2, 0, 0);
    all_moved(f, 7, 1);
    expect(f, "SETTLED 7 parcel 1 at 1.0\n");
    passed(f, 1, 0, 2);
    expect(f, "");
    passed(f, 2, 0, 2);
    expect(f, "EXCHANGE 8 parcel 2 at 0.0 numbers 1\n");
    fixture_free(f);
}

/* A node that asks for the step has no more gradients. */
static void test_asked(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    ready(f, 0, 1, 0, 0);
    asked(f, 2);
    expect(f, "");
    asked(f, 1);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 numbers 1\n");
    asked(f, 0);
    expect(f, "");
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\nMEASURE\n");
    fixture_free(f);
}

/* A rank comes back to a node that has asked for the step without this rank. The step then waits for the node again. */
static void test_back(void **state)
{
    struct fixture *f = start(3);

    (void)state;
    asked(f, 0);
    gone(f, 1);
    back(f, 2, false); /* node 2 has not asked, so its reports stay valid */
    expect(f, "");
    back(f, 1, false);
    expect(f, "BACK node 1\n");
    asked(f, 2);
    assert_int_equal(leader_waits_for(f->leader), 2);
    ready(f, 1, 1, 0, 0);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 numbers 6\n");
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    asked(f, 1);
    expect(f, "MEASURE\n");
    back(f, 1, false); /* the rank attaches after the step */
    expect(f, "");
    all_sum(f);
    expect(f, "DECIDED apply\n");
    back(f, 1, true);
    expect(f, "BACK node 1 all\n");
    report_all(f, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "COMMIT\n");
    fixture_free(f);
}

/* All ranks left. When the first comes back, all count as back, so nothing is added up until all nodes are ready. */
static void test_all_back(void **state)
{
    struct fixture *f = start(3);

    (void)state;
    for (unsigned i = 0; i < f->n_nodes; i++)
        gone(f, i);
    expect(f, "");
    back(f, 2, false);
    expect(f, "BACK node 2 all\n");
    ready(f, 2, 1, 0, 0);
    back(f, 0, false); /* node 0's ranks came back with this */
    expect(f, "");
    ready(f, 0, 1, 0, 0);
    ready(f, 1, 1, 0, 0);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0\n");
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    gone(f, 1);
    back(f, 0, true); /* node 0 knows that the others have left before they report it */
    expect(f, "BACK node 0 all\n");
    f->n_backs--;
    gone(f, 1); /* reported before they know that all are back */
    f->n_backs++;
    ready(f, 0, 1, 0, 1);
    ready(f, 2, 1, 0, 1);
    expect(f, "");
    ready(f, 1, 1, 0, 1);
    expect(f, "EXCHANGE 6 parcel 1 at 0.1\n");
    all_moved(f, 6, 1);
    expect(f, "SETTLED 6 parcel 1 at 0.1\n");
    finish_step(f, 0);
    fixture_free(f);
}

/*
 * A report that all ranks are back counts even if it is of an attempt that was aborted. The same report from another
 * node does not count again.
 */
static void test_all_back_again(void **state)
{
    struct fixture *f = start(3);

    (void)state;
    report(f, 2, (struct node_message){.kind = NODE_ABORT, .text = "is away"});
    expect(f, "ABORTED attempt 1 node 2 is away\n");
    f->attempt = 0;
    back(f, 0, true);
    f->attempt = 1;
    expect(f, "BACK node 0 all\n");
    f->n_backs--;
    back(f, 0, true);
    back(f, 1, true);
    expect(f, "");
    f->n_backs++;
    report_all(f, (struct node_message){.kind = NODE_WINDOW});
    expect(f, "OPEN\n");
    back(f, 1, true);
    expect(f, "BACK node 1 all\n");
    fixture_free(f);
}

/* A node comes back too late if the sum without it is complete or in progress. */
static void test_back_late(void **state)
{
    struct fixture *f = start(3);

    (void)state;
    gone(f, 1);
    ready(f, 0, 1, 0, 0);
    ready(f, 2, 1, 0, 0);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 numbers 9\n");
    back(f, 1, false);
    expect(f, "BACK node 1 late\n");
    gone(f, 1);
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    back(f, 1, false);
    expect(f, "BACK node 1 late\n");
    report(f, 1, (struct node_message){.kind = NODE_ABORT, .text = "is back"});
    expect(f, "ABORTED attempt 1 node 1 is back\n");
    gone(f, 1);
    passed(f, 0, 0, 2);
    passed(f, 2, 0, 2);
    back(f, 1, false);
    expect(f, "BACK node 1 late\n"); /* the other nodes had no gradients and are in the next micro-batch */
    report(f, 2, (struct node_message){.kind = NODE_BACK, .forget = true});
    expect(f, "BACK node 2 late\n"); /* node 2 has added up its own ranks' gradients */
    fixture_free(f);
}

/*
 * Gradients arrive after their sum was made, so they are in no sum. The step is aborted, so that no gradient is lost.
 */
static void test_too_late(void **state)
{
    static const char aborted[] = "ABORTED attempt %u node 2 gradients came after their sum was made\n";
    struct fixture *f = start(2);
    char said[128];

    (void)state;
    for (unsigned when = 0; when < 3; when++) {
        uint64_t tag = FIRST + when;

        ready(f, 0, 1, 0, 0);
        ready(f, 1, 1, 0, 0);
        asked(f, 2);
        snprintf(said, sizeof(said), "EXCHANGE %" PRIu64 " parcel 1 at 0.0 numbers 7\n", tag);
        expect(f, said);
        if (when > 0) {
            all_moved(f, tag, 1);
            snprintf(said, sizeof(said), "SETTLED %" PRIu64 " parcel 1 at 0.0\n", tag);
            expect(f, said);
        }
        if (when > 1) {
            asked(f, 0);
            asked(f, 1);
            expect(f, "MEASURE\n");
        }
        ready(f, 2, when > 1 ? 2 : 1, 0, 0);
        snprintf(said, sizeof(said), aborted, when + 1);
        expect(f, said);
    }
    fixture_free(f);
}

/* ---- the step ------------------------------------------------------------------------------------------ */

/* Nothing is gathered in stage 3, nor after a skipped step. */
static void test_no_gather(void **state)
{
    struct fixture *f = start(3);

    (void)state;
    finish_step(f, 0);
    finish_step(f, 0);
    fixture_free(f);
    f = start(2);
    f->skips = true;
    finish_step(f, 0);
    f->skips = false;
    finish_step(f, FIRST);
    assert_int_equal(f->step, 2);
    fixture_free(f);
}

static void ask_with(struct fixture *f, unsigned node, bool has_rank, unsigned n_groups, const char *bits)
{
    static const struct wire_hyper groups[3] = {{.lr = 1}};

    report(f, node,
           (struct node_message){
               .kind = NODE_ASKED,
               .has_rank = has_rank,
               .proceed = node == 1,
               .args = {.groups = groups, .n_groups = n_groups, .loss_scale = n_groups, .found_inf = node == 2},
               .pushed_any = (const uint8_t *)bits,
               .pushed_all = (const uint8_t *)bits + 1,
               .n_any_bytes = strlen(bits) / 2,
               .n_all_bytes = strlen(bits) / 2});
}

/*
 * The leader merges the arguments of the lowest node that has some, the union and the intersection of all nodes' sets,
 * and the first finding.
 */
static void test_merged(void **state)
{
    static const struct node_finding later = {.found = true, .micro_batch = 1, .param = 0},
                                     first = {.found = true, .micro_batch = 0, .param = 2, .elem = 5},
                                     second = {.found = true, .micro_batch = 0, .param = 2, .elem = 7};
    struct fixture *f = start(2);

    (void)state;
    ask_with(f, 0, false, 1, "\x01\x01");
    ask_with(f, 1, true, 2, "\x06\x03");
    ask_with(f, 2, true, 3, "\x04\x0b");
    expect(f, "MEASURE\n");
    sum(f, 2, 0.5, &second);
    sum(f, 0, 0.25, &later);
    sum(f, 1, 4, &first);
    expect(f, "DECIDED apply\n");
    assert_int_equal(f->n_args, 2);
    assert_true(f->loss_scale == 2 && f->squares == 4.75);
    assert_true(f->found_inf && f->proceed);
    assert_int_equal(f->any, 0x07);
    assert_int_equal(f->all, 0x01);
    assert_true(f->found.found);
    assert_int_equal(f->found.elem, 5);
    fixture_free(f);
}

/* Parameters beyond the end of a node's set were not pushed by its ranks. */
static void test_short_bits(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    ask_with(f, 0, true, 0, "\x01\x01");
    ask_with(f, 1, true, 0, "");
    ask_with(f, 2, true, 0, "\x04\x01");
    all_sum(f);
    expect(f, "MEASURE\nDECIDED apply\n");
    assert_int_equal(f->any, 0x05);
    assert_int_equal(f->all, 0x00);
    fixture_free(f);
}

static void test_norm(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    report(f, 0, (struct node_message){.kind = NODE_WANT_NORM});
    asked(f, 1); /* node 1 asks for the step instead */
    ready(f, 2, 1, 0, 0);
    passed(f, 0, 0, 1);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 numbers 8\n");
    report(f, 2, (struct node_message){.kind = NODE_WANT_NORM});
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\nMEASURE\n");
    sum(f, 0, 9, NULL);
    sum(f, 1, 16, NULL);
    sum(f, 2, 0, NULL);
    expect(f, "NORM 5\n");
    asked(f, 0);
    asked(f, 2);
    expect(f, "");
    asked(f, 1); /* a node that had asked for the step asks again */
    expect(f, "MEASURE\n");
    asked(f, 1);
    expect(f, "! node 1: ASKED: it has asked already\n");
    all_sum(f);
    expect(f, "DECIDED apply\n");
    fixture_free(f);
}

static void test_hold(void **state)
{
    static const struct node_finding bad = {.found = true, .param = 3, .rank = 2};
    struct fixture *f = start(2);

    (void)state;
    for (unsigned i = 0; i < NODES; i++)
        asked(f, i);
    f->holds = true;
    sum(f, 0, 1, NULL);
    sum(f, 1, 1, &bad);
    sum(f, 2, 1, NULL);
    expect(f, "MEASURE\nHOLD param 3\n");
    asked(f, 0);
    asked(f, 2);
    expect(f, "");
    assert_int_equal(leader_waits_for(f->leader), 2);
    asked(f, 1);
    all_sum(f);
    expect(f, "MEASURE\nDECIDED apply\n");
    fixture_free(f);
}

/* ---- abort --------------------------------------------------------------------------------------------- */

static void abort_now(struct fixture *f, unsigned node)
{
    report(f, node, (struct node_message){.kind = NODE_ABORT, .has_rank = true, .rank = 7, .text = "enough"});
}

/* A step can be aborted until it is decided. Reports of the aborted attempt are ignored. */
static void test_abort(void **state)
{
    struct fixture *f = start(2);
    char said[128];

    (void)state;
    for (unsigned when = 0; when < 5; when++) {
        if (when >= 1)
            ready(f, 0, 1, 0, 0);
        if (when >= 2) {
            ready(f, 1, 1, 0, 0);
            ready(f, 2, 1, 0, 0);
        }
        if (when >= 3)
            all_moved(f, FIRST + when - 2, 1);
        for (unsigned i = 0; when >= 4 && i < NODES; i++)
            asked(f, i);
        f->n_said = 0;
        abort_now(f, 1);
        snprintf(said, sizeof(said), "ABORTED attempt %u node 1 rank 7 enough\n", when + 1);
        expect(f, said);
        f->attempt--;
        ready(f, 0, 1, 0, 0);
        ready(f, 1, 1, 0, 0);
        ready(f, 2, 1, 0, 0);
        all_moved(f, FIRST + when - 2, 1);
        for (unsigned i = 0; i < NODES; i++)
            asked(f, i);
        abort_now(f, 2); /* aborted already */
        sum(f, 0, 1, NULL);
        f->attempt++;
        expect(f, "");
    }
    finish_step(f, FIRST + 3);
    fixture_free(f);
}

static void test_decided(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    for (unsigned i = 0; i < NODES; i++)
        asked(f, i);
    all_sum(f);
    expect(f, "MEASURE\nDECIDED apply\n");
    abort_now(f, 0);
    expect(f, "");
    asked(f, 0);
    expect(f, "! node 0: ASKED: it has asked already\n");
    report_all(f, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "GATHER 5\n");
    abort_now(f, 0);
    expect(f, "");
    all_moved(f, 5, 0);
    expect(f, "COMMIT\n");
    f->step--;
    abort_now(f, 0); /* for the committed step */
    f->step++;
    expect(f, "");
    fixture_free(f);
}

/* ---- generations --------------------------------------------------------------------------------------- */

/* When the engine breaks, node 2 has added the sum, node 1 has received it, and node 0 has not. */
static void test_broken_exchange(void **state)
{
    static const uint64_t arrived[] = {FIRST, 77};
    struct fixture *f = start(2);

    (void)state;
    for (unsigned i = 0; i < NODES; i++)
        ready(f, i, 1, 0, 0);
    ready(f, 0, 2, 0, 0);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0\n");
    moved(f, 2, 5, 1);
    broken(f, 0, 1);
    expect(f, "ENGINE 2 it broke\n");
    broken(f, 1, 1); /* reports about generation 1 */
    broken(f, 2, 1);
    ready(f, 1, 2, 0, 0);
    connected(f, 0, 1, NULL, 0);
    connected(f, 0, 2, NULL, 0);
    connected(f, 2, 2, NULL, 0);
    expect(f, "");
    connected(f, 1, 2, arrived, 2);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 arrived 6\n");
    connected(f, 1, 2, arrived, 2);
    expect(f, "! node 1: CONNECTED: the node is already connected in this generation\n");
    broken(f, 1, 2);
    expect(f, "ENGINE 3 it broke\n");
    moved(f, 1, 5, 1); /* bytes that have arrived are added without an engine */
    all_connected(f, 3);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 arrived 6\n");
    moved(f, 0, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    broken(f, 1, 3);
    ready(f, 2, 2, 0, 0);
    expect(f, "ENGINE 4 it broke\n"); /* no EXCHANGE yet, else connected nodes would get it twice */
    all_connected(f, 4);
    expect(f, "EXCHANGE 6 parcel 2 at 0.0\n");
    fixture_free(f);
}

static void test_broken_before(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);
    uint64_t spread = 1;

    (void)state;
    broken(f, 1, 0); /* before the first engine */
    connected(f, 1, 0, NULL, 0);
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 1});
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report_all(f, (struct node_message){.kind = NODE_FORMED});
    expect(f, "FORM 1\nENGINE 1\n");
    connected(f, 0, 1, NULL, 0);
    broken(f, 1, 1);
    connected(f, 2, 1, NULL, 0);
    expect(f, "ENGINE 2 it broke\n");
    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS});
    all_connected(f, 2);
    expect(f, "SPREAD 1\n");
    moved(f, 0, 1, 0);
    broken(f, 0, 2);
    connected(f, 0, 3, NULL, 0);
    connected(f, 1, 3, &spread, 1);
    connected(f, 2, 3, NULL, 0);
    expect(f, "ENGINE 3 it broke\nSPREAD 1 arrived 3\n");
    moved(f, 1, 1, 0);
    moved(f, 2, 1, 0);
    expect(f, "TRAIN\n");
    fixture_free(f);
}

static void test_values(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    report(f, 2, (struct node_message){.kind = NODE_VALUE, .generation = 1, .text = "key"});
    expect(f, "VALUE key of node 2\n");
    report(f, 2, (struct node_message){.kind = NODE_VALUE, .generation = 2, .text = "key"});
    expect(f, "");
    fixture_free(f);
}

/* ---- fetches ------------------------------------------------------------------------------------------- */

static void test_fetch(void **state)
{
    static const uint64_t params[] = {3, 0};
    struct fixture *f = start(3);

    (void)state;
    report(f, 1,
           (struct node_message){
               .kind = NODE_FETCH, .digest = 9, .pass = FETCH_PUBLISHED, .numbers = params, .n_numbers = 2});
    expect(f, "SERVE 5 node 1 fetch 9 kind 3 numbers 3,0\n");
    fetch(f, 0, 1, FETCH_MASTER, 2);
    expect(f, "SERVE 7 node 0 fetch 1 kind 0 numbers 2\n"); /* one tag for each parameter */
    moved(f, 2, 5, 0);                                      /* the node that fetches is node 1 */
    broken(f, 0, 1);
    expect(f, "ENGINE 2 it broke\n");
    fetch(f, 2, 4, FETCH_EXP_AVG, 1);
    expect(f, "");
    moved(f, 0, 7, 0); /* node 0 had got the bytes */
    all_connected(f, 2);
    expect(f, "SERVE 8 node 2 fetch 4 kind 1 numbers 1\nSERVE 5 node 1 fetch 9 kind 3 numbers 3,0\n");
    moved(f, 1, 5, 0);
    moved(f, 2, 8, 0);
    broken(f, 0, 2);
    all_connected(f, 3);
    expect(f, "ENGINE 3 it broke\n");
    fixture_free(f);
}

/* With GPUs, nodes also fetch frozen parameters. GATHERED is for a rank of the node. */
static void test_gathering_fetch(void **state)
{
    static const uint64_t params[] = {4, 0};
    struct node_message message = {
        .kind = NODE_FETCH, .digest = 9, .pass = FETCH_GATHERED, .numbers = params, .n_numbers = 2, .rank = 2};
    uint64_t too_many[DEVICE_MAX_FETCHES + 1] = {0};
    struct fixture *f = start_on_gpus();

    (void)state;
    report(f, 1, message);
    expect(f, "SERVE 5 node 1 fetch 9 kind 4 for rank 2 numbers 4,0\n");
    broken(f, 0, 1);
    expect(f, "ENGINE 2 it broke\n");
    all_connected(f, 2);
    expect(f, "SERVE 5 node 1 fetch 9 kind 4 for rank 2 numbers 4,0\n");
    moved(f, 1, 5, 0);
    fetch(f, 2, 3, FETCH_MASTER, 4); /* frozen */
    expect(f, "SERVE 7 node 2 fetch 3 kind 0 numbers 4\n");
    moved(f, 2, 7, 0);
    for (unsigned rank = 0; rank < NODES + 1; rank += 3) {
        message.rank = rank;
        report(f, 1, message);
        expect(f, "! node 1: FETCH.rank: not of that node\n");
    }
    message.rank = 1;
    message.numbers = too_many;
    message.n_numbers = ARRAY_SIZE(too_many);
    report(f, 1, message);
    expect(f, "! node 1: FETCH.numbers: more parameters than one order takes\n");
    fixture_free(f);
}

/* A fetch that some node cannot do is refused, because it would break the engines in every generation. */
static void test_bad_fetch(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    report(f, 1, (struct node_message){.kind = NODE_FETCH, .digest = 9});
    expect(f, "! node 1: FETCH.numbers: no parameters\n");
    fetch(f, 1, 1, FETCH_MASTER, 5);
    expect(f, "! node 1: FETCH.numbers: no such parameter\n");
    fetch(f, 1, 1, FETCH_MASTER, 4); /* frozen */
    expect(f, "! node 1: FETCH.numbers: no such parameter\n");
    fetch(f, 1, 1, FETCH_PUBLISHED, 0); /* only in stage 3 */
    expect(f, "! node 1: FETCH.pass: no such kind\n");
    fetch(f, 1, 1, FETCH_GATHERED, 0); /* only on GPUs */
    expect(f, "! node 1: FETCH.pass: no such kind\n");
    fetch(f, 1, 1, FETCH_N_KINDS, 0);
    expect(f, "! node 1: FETCH.pass: no such kind\n");
    fixture_free(f);
}

/* ---- losing a node, nonsense --------------------------------------------------------------------------- */

static void test_lost(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    for (unsigned i = 0; i < NODES; i++)
        ready(f, i, 1, 0, 0);
    fetch(f, 0, 1, FETCH_MASTER, 2);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0\nSERVE 6 node 0 fetch 1 kind 0 numbers 2\n");
    leader_lose(f->leader, 1, "it was restarted");
    expect(f, "REFUSE it was restarted\n");
    assert_int_equal(leader_waits_for(f->leader), 7);
    /* The other nodes continue until they get the message. */
    all_moved(f, 5, 1);
    ready(f, 0, 2, 0, 0);
    asked(f, 0);
    abort_now(f, 2);
    fetch(f, 0, 2, FETCH_MASTER, 2);
    broken(f, 0, 1);
    connected(f, 0, 1, NULL, 0);
    expect(f, "");
    leader_lose(f->leader, 2, "this one, too");
    expect(f, "");
    assert_int_equal(leader_form(f->leader, NULL), 0);
    ready(f, 0, 2, 0, 0);
    moved(f, 0, 5, 1);
    fetch(f, 0, 2, FETCH_MASTER, 2);
    expect(f, "");
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 2});
    expect(f, "FORM 2\n");
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report_all(f, (struct node_message){.kind = NODE_FORMED});
    expect(f, "ENGINE 2\n");
    fixture_free(f);
}

static void test_nonsense(void **state)
{
    static const uint64_t masks[] = {1, 1, 1};
    struct fixture *f = start(2);

    (void)state;
    ready(f, 1, PARCELS, 0, 0);
    expect(f, "! node 1: READY.parcel: no such parcel\n");
    ready(f, 1, 0, 0, 1);
    expect(f, "! node 1: READY: not the parcel's next position\n");
    ready(f, 1, 0, 1, 0);
    expect(f, "! node 1: READY: not the parcel's next position\n");
    ready_partly(f, 1, 0, masks, 3);
    expect(f, "! node 1: READY: not the parcel's next position\n");
    ready(f, 1, 0, 0, 0);
    ready(f, 1, 0, 0, 0);
    expect(f, "! node 1: READY: not the parcel's next position\n");
    passed(f, 1, 0, PARCELS);
    expect(f, "! node 1: PASSED: not the parcel's position\n");
    passed(f, 1, 0, UINT64_MAX);
    expect(f, "! node 1: PASSED: not the parcel's position\n");
    passed(f, 1, 1, 2);
    expect(f, "! node 1: PASSED: not the parcel's position\n");
    passed(f, 1, UINT32_MAX, 2);
    expect(f, "! node 1: PASSED: not the parcel's position\n");
    report(f, 1, (struct node_message){.kind = NODE_COMMIT});
    expect(f, "! node 1: a message that node 0 alone may send\n");
    report(f, 1, (struct node_message){.kind = NODE_WEIGHTS});
    expect(f, "! node 1: WEIGHTS: rank 0 is not there\n");
    report(f, 1, (struct node_message){.kind = NODE_UPDATED});
    moved(f, 1, 0, 0);
    moved(f, 0, 0, 0);
    moved(f, 2, 0, 0);
    moved(f, 0, 99, PARCELS);
    expect(f, ""); /* no order is unfinished */
    fixture_free(f);
}

/* A sum that would overflow when it is added to others is invalid. */
static void test_bad_sums(void **state)
{
    struct fixture *f = start(2);
    struct exact_sum bad;

    (void)state;
    for (unsigned i = 0; i < NODES; i++)
        asked(f, i);
    expect(f, "MEASURE\n");
    for (unsigned k = 0; k < 7; k++) {
        uint8_t *bytes = (uint8_t *)&bad;

        exact_sum_reset(&bad);
        if (k == 0)
            bad.limb[EXACT_N_LIMBS - 1] = UINT32_MAX;
        else if (k == 1)
            bad.limb[3] = UINT64_C(1) << 32;
        else if (k == 2)
            bad.n_deferred = 1;
        else if (k == 3)
            bytes[offsetof(struct exact_sum, nonfinite)] = 2;
        else if (k == 4)
            bad.zero[1] = 1;
        else if (k == 6)
            bad.nan = true; /* nan, but marked finite */
        report(f, 1, (struct node_message){.kind = NODE_SUM, .bytes = bytes, .n_bytes = sizeof(bad) - (k == 5)});
        expect(f, "! node 1: SUM.bytes: not an exact sum\n");
    }
    report(f, 1, (struct node_message){.kind = NODE_SUM});
    expect(f, "! node 1: SUM.bytes: not an exact sum\n");
    all_sum(f);
    expect(f, "DECIDED apply\n");
    fixture_free(f);
}

/* ---- daemons that were replaced ------------------------------------------------------------------------ */

#define ABORTED_BY                                                                                                     \
    "ABORTED attempt %u node %u the daemon of node %u was replaced by another one in the midst of the step\n"

/* Expects an abort, and a new generation of engines that answers this set of nodes. */
static void expect_abort(struct fixture *f, uint32_t attempt, unsigned node, uint32_t generation, unsigned answers)
{
    char text[256];
    int n = snprintf(text, sizeof(text), ABORTED_BY, attempt, node, node);

    snprintf(text + n, sizeof(text) - (size_t)n, "ENGINE %u answers %x\n", generation, answers);
    expect(f, text);
    all_connected(f, generation);
    expect(f, "");
}

/* Reports what a node's new daemon has adopted: the step, the node's stand, and whether it has nothing of the step. */
static void kept_at(struct fixture *f, unsigned node, uint64_t step, enum node_stand stand, bool empty)
{
    leader_hear(f->leader, node,
                &(struct node_message){.kind = NODE_KEPT,
                                       .step = step,
                                       .node = node,
                                       .generation = 1,
                                       .pass = stand,
                                       .tag = f->attempt,
                                       .proceed = empty});
}

static void kept(struct fixture *f, unsigned node, enum node_stand stand)
{
    kept_at(f, node, f->step, stand, false);
}

/* Replaces the leader, as node 0's next daemon does. */
static void replace(struct fixture *f, uint64_t step)
{
    leader_free(f->leader);
    f->leader = NULL;
    make_leader(f, false, false);
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    leader_take_over(f->leader, step, true, false);
    assert_int_equal(leader_waits_for(f->leader), 7);
    assert_string_equal(leader_waits_to(f->leader), "to say where it stands");
}

static void decide(struct fixture *f)
{
    for (unsigned i = 0; i < f->n_nodes; i++)
        asked(f, i);
    all_sum(f);
    expect(f, "MEASURE\nDECIDED apply\n");
}

static void test_kept_open(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    ready(f, 0, 0, 0, 0);
    kept(f, 1, NODE_STANDS_OPEN);
    expect_abort(f, 1, 1, 2, 2);
    ready(f, 0, 0, 0, 0); /* kept, because node 1 had nothing of the step */
    kept_at(f, 2, f->step, NODE_STANDS_OPEN, true);
    expect(f, "ENGINE 3 answers 4\n");
    all_connected(f, 3);
    ready(f, 1, 0, 0, 0);
    ready(f, 2, 0, 0, 0);
    expect(f, "EXCHANGE 5 parcel 0 at 0.0\n");
    all_moved(f, 5, 0);
    expect(f, "SETTLED 5 parcel 0 at 0.0\n");
    f->attempt = 0; /* node 2 does not know of the abort */
    kept_at(f, 2, f->step, NODE_STANDS_OPEN, true);
    f->attempt = 1;
    fixture_said(f, "ABORTED attempt 2");
    fixture_free(f);
}

static void test_kept_decided(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    decide(f);
    report(f, 1, (struct node_message){.kind = NODE_UPDATED});
    kept(f, 1, NODE_STANDS_OPEN); /* node 1 does not know that the step is decided */
    expect(f, "to node 1: DECIDED again\nENGINE 2 answers 2\n");
    all_connected(f, 2);
    kept(f, 2, NODE_STANDS_UPDATED); /* node 2's report may be lost */
    expect(f, "ENGINE 3 answers 4\n");
    all_connected(f, 3);
    report(f, 0, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "");
    report(f, 1, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "GATHER 5\n");
    moved(f, 0, 5, 0);
    moved(f, 1, 5, 0);
    kept(f, 1, NODE_STANDS_UPDATED); /* node 1 may lack some of the weights */
    expect(f, "ENGINE 4 answers 2\n");
    all_connected(f, 4);
    expect(f, "GATHER 5 arrived 1\n");
    moved(f, 2, 5, 0);
    expect(f, "");
    moved(f, 1, 5, 0);
    expect(f, "COMMIT\n");
    kept_at(f, 2, f->step - 1, NODE_STANDS_UPDATED, false); /* node 2 does not know of the commit */
    expect(f, "to node 2: COMMIT of step 0\nENGINE 5 answers 4\n");
    kept_at(f, 2, f->step + 1, NODE_STANDS_OPEN, true);
    expect(f, "REFUSE the daemon of node 2 holds step 2 of a run, and node 0 is at step 1\n");
    fixture_free(f);
}

static void test_new_leader(void **state)
{
    struct fixture *f = start(3);

    (void)state;
    replace(f, 0);
    kept(f, 0, NODE_STANDS_OPEN);
    kept_at(f, 1, 0, NODE_STANDS_OPEN, true);
    assert_int_equal(leader_waits_for(f->leader), 4);
    kept_at(f, 2, 0, NODE_STANDS_OPEN, true);
    expect_abort(f, 1, 0, 2, 7);

    replace(f, 0); /* between two steps nothing is lost */
    for (unsigned i = 0; i < NODES; i++)
        kept_at(f, i, 0, NODE_STANDS_OPEN, true);
    expect(f, "ENGINE 2 answers 7\n");
    all_connected(f, 2);
    f->attempt = 1;

    decide(f);
    replace(f, 0);
    kept(f, 2, NODE_STANDS_UPDATED);
    kept(f, 0, NODE_STANDS_DECIDED);
    kept(f, 1, NODE_STANDS_OPEN);
    expect(f, "to node 1: DECIDED again\nENGINE 2 answers 7\n");
    report(f, 0, (struct node_message){.kind = NODE_UPDATED});
    report(f, 1, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "COMMIT\n");

    decide(f); /* step 1: node 2 knows that it is committed, and has begun step 2 */
    replace(f, 1);
    kept(f, 0, NODE_STANDS_UPDATED);
    kept(f, 1, NODE_STANDS_DECIDED);
    leader_hear(f->leader, 2, &(struct node_message){.kind = NODE_KEPT, .step = 2, .generation = 1, .tag = 1});
    fixture_said(f, "to node 0: COMMIT of step 1\nto node 1: COMMIT of step 1\nABORTED attempt 2");
    fixture_free(f);
}

/* A node has all initial weights, but does not know that training has begun. */
static void test_kept_before_the_first_step(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    leader_hear(f->leader, 1,
                &(struct node_message){.kind = NODE_KEPT, .generation = 1, .tag = 0, .proceed = true, .forget = true});
    expect(f, "to node 1: TRAIN of step 0\nENGINE 2 answers 2\n");
    fixture_free(f);
}

/* Daemons die before they know that all ranks are back. So does node 0's. */
static void test_kept_missed_back(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    for (unsigned i = 0; i < f->n_nodes; i++)
        gone(f, i);
    back(f, 0, false);
    expect(f, "BACK node 0 all\n");
    kept_at(f, 1, f->step, NODE_STANDS_OPEN, true);
    expect(f, "to node 1: BACK of step 0\nENGINE 2 answers 2\n");
    all_connected(f, 2);
    report(f, 1, (struct node_message){.kind = NODE_RANK, .rank = 1}); /* from before the return */
    expect(f, "");
    report(f, 1, (struct node_message){.kind = NODE_RANK, .rank = 1, .pass = f->n_backs});
    expect(f, "RANK\n");

    replace(f, 0);
    for (unsigned i = 0; i < f->n_nodes; i++)
        leader_hear(f->leader, i,
                    &(struct node_message){.kind = NODE_KEPT, .generation = 2, .micro_batch = i == 2, .proceed = true});
    expect(f, "to node 0: BACK of step 0\nto node 1: BACK of step 0\nENGINE 3 answers 7\n");
    fixture_free(f);
}

static void test_kept_windows(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    report_all(f, (struct node_message){.kind = NODE_WINDOW});
    expect(f, "OPEN\n");
    report(f, 1, (struct node_message){.kind = NODE_WINDOW_END});
    kept_at(f, 1, 0, NODE_STANDS_OPEN, true); /* node 1 has not opened the window */
    expect(f, "to node 1: OPEN of step 0\nENGINE 2 answers 2\n");
    all_connected(f, 2);
    report(f, 0, (struct node_message){.kind = NODE_WINDOW_END});
    report(f, 2, (struct node_message){.kind = NODE_WINDOW_END});
    expect(f, "");
    report(f, 1, (struct node_message){.kind = NODE_WINDOW_END});
    expect(f, "WRITE\n");
    all_moved(f, 5, 0);
    expect(f, "STORE\n");
    replace(f, 0);
    kept(f, 0, NODE_STANDS_WINDOW); /* does not know of STORE */
    kept(f, 1, NODE_STANDS_STORED);
    kept(f, 2, NODE_STANDS_STORING);
    expect(f, "to node 0: STORE of step 0\nENGINE 2 answers 7\n");
    report(f, 2, (struct node_message){.kind = NODE_STORED});
    report(f, 0, (struct node_message){.kind = NODE_STORED});
    all_connected(f, 2);
    fixture_said(f, "GATHER ");
    all_moved(f, (UINT64_C(2) << 32) + 1, 0);
    expect(f, "CLOSED\n");
    kept(f, 1, NODE_STANDS_STORED); /* does not know of CLOSED */
    expect(f, "to node 1: CLOSED of step 0\nENGINE 3 answers 2\n");
    leader_reconnect(f->leader); /* a link is connected again; no node gets an answer */
    expect(f, "ENGINE 4\n");
    fixture_free(f);
}

/* ---- checkpoints --------------------------------------------------------------------------------------- */

static void want_save(struct fixture *f, unsigned node, uint64_t token)
{
    report(f, node, (struct node_message){.kind = NODE_WANT_SAVE, .tag = token});
}

static void is_saved(struct fixture *f, unsigned node, uint64_t token, const char *why)
{
    report(f, node, (struct node_message){.kind = NODE_SAVED, .tag = token, .text = why});
}

static void is_published(struct fixture *f, uint64_t token)
{
    report(f, 0, (struct node_message){.kind = NODE_SAVED, .tag = token, .proceed = true});
}

static void all_saved(struct fixture *f, uint64_t token)
{
    for (unsigned i = 0; i < f->n_nodes; i++)
        is_saved(f, i, token, "");
    expect(f, "to node 0: PUBLISH of step 0\n");
}

/*
 * SAVE is sent once, even if several nodes want it. The checkpoint is whole when node 0 has published it. Steps
 * continue meanwhile.
 */
static void test_save(void **state)
{
    struct fixture *f = start(2);

    want_save(f, 1, 77);
    expect(f, "SAVE 77 of step 0\n");
    want_save(f, 0, 78);
    want_save(f, 2, 79); /* both do not know of SAVE 77 */
    is_saved(f, 1, 77, "");
    finish_step(f, FIRST);
    is_saved(f, 0, 77, "");
    expect(f, "");
    is_saved(f, 2, 77, "");
    expect(f, "to node 0: PUBLISH of step 0\n");
    report(f, 1, (struct node_message){.kind = NODE_SAVED, .tag = 77, .proceed = true});
    expect(f, "! node 1: SAVED.proceed: node 0 publishes\n");
    is_published(f, 77);
    expect(f, "SAVE_END 77 whole\n");
    is_saved(f, 2, 77, "");
    fixture_free(f);
}

/*
 * A new daemon wants a checkpoint although its predecessor had saved its part. It gets another one only if that one
 * fails.
 */
static void test_save_once_more(void **state)
{
    struct fixture *f = start(2);

    want_save(f, 0, 77);
    expect(f, "SAVE 77 of step 0\n");
    is_saved(f, 1, 77, "");
    want_save(f, 1, 78);
    is_saved(f, 0, 77, "");
    is_saved(f, 2, 77, "");
    expect(f, "to node 0: PUBLISH of step 0\n");
    is_published(f, 77);
    expect(f, "SAVE_END 77 whole\n");
    want_save(f, 1, 79); /* node 1 does not know of the end yet */
    expect(f, "");
    finish_step(f, FIRST);
    want_save(f, 0, 80);
    expect(f, "SAVE 80 of step 1\n");
    is_saved(f, 1, 80, "");
    want_save(f, 1, 81);
    is_saved(f, 2, 80, "no space");
    expect(f, "SAVE_END 80 node 2: no space\nSAVE 81 of step 1\n");
    fixture_free(f);
}

/* A second checkpoint waits for the end of the first. After a failed checkpoint, a node may want another one. */
static void test_save_again(void **state)
{
    struct fixture *f = start(2);

    want_save(f, 0, 77);
    expect(f, "SAVE 77 of step 0\n");
    finish_step(f, FIRST);
    want_save(f, 2, 78);
    is_saved(f, 1, 76, "");
    expect(f, "");
    is_saved(f, 1, 77, "no space");
    expect(f, "SAVE_END 77 node 1: no space\nSAVE 78 of step 1\n");
    is_saved(f, 0, 77, "");
    is_saved(f, 2, 78, "no folder");
    expect(f, "SAVE_END 78 node 2: no folder\n");
    want_save(f, 0, 79);
    expect(f, "SAVE 79 of step 1\n");
    all_saved(f, 79);
    is_saved(f, 0, 79, "not its own");
    expect(f, "SAVE_END 79 node 0: not its own\n");
    want_save(f, 0, 0);
    fixture_free(f);
}

/* A checkpoint does not begin between a decision and its commit, nor in a write window. */
static void test_save_between_steps(void **state)
{
    struct fixture *f = start(3);

    for (unsigned i = 0; i < f->n_nodes; i++)
        asked(f, i);
    expect(f, "MEASURE\n");
    all_sum(f);
    expect(f, "DECIDED apply\n");
    want_save(f, 1, 77);
    expect(f, "");
    report_all(f, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "COMMIT\nSAVE 77 of step 1\n");
    all_saved(f, 77);
    is_published(f, 77);
    expect(f, "SAVE_END 77 whole\n");
    report_all(f, (struct node_message){.kind = NODE_WINDOW});
    expect(f, "OPEN\n");
    want_save(f, 1, 78);
    expect(f, "");
    report_all(f, (struct node_message){.kind = NODE_WINDOW_END, .forget = true});
    expect(f, "CLOSED\nSAVE 78 of step 1 after 1 windows\n");
    fixture_free(f);
}

/* If a daemon is replaced while it saves, its part is lost. */
static void test_save_of_a_replaced_daemon(void **state)
{
    struct fixture *f = start(2);

    want_save(f, 0, 77);
    expect(f, "SAVE 77 of step 0\n");
    is_saved(f, 1, 77, "");
    kept_at(f, 1, 0, NODE_STANDS_OPEN, true);
    fixture_said(f, "ENGINE 2");
    is_saved(f, 0, 77, "");
    kept_at(f, 2, 0, NODE_STANDS_OPEN, true);
    fixture_said(f, "SAVE_END 77 the daemon of node 2 was replaced by another one while it was written\n");
    fixture_free(f);
}

/* ---- daemons that are told to stop ---------------------------------------------------------------------- */

static void ended(struct fixture *f, unsigned node, uint32_t n_windows, bool is_told)
{
    report(f, node, (struct node_message){.kind = NODE_ENDED, .parcel = n_windows, .proceed = is_told});
}

static void commit_step(struct fixture *f)
{
    for (unsigned i = 0; i < f->n_nodes; i++)
        asked(f, i);
    all_sum(f);
    report_all(f, (struct node_message){.kind = NODE_UPDATED});
    fixture_said(f, "COMMIT\n");
}

/* A node may stop when all nodes have ended what was decided. Only the node that wants to stop is told so. */
static void test_stop(void **state)
{
    struct fixture *f = start(3);

    ended(f, 1, 0, true);
    expect(f, "WANT_ENDED\n");
    ended(f, 0, 0, false);
    commit_step(f);
    ended(f, 1, 0, true);
    ended(f, 2, 0, false);
    expect(f, "");
    ended(f, 0, 0, false);
    expect(f, "to node 1: MAY_STOP of step 1\n");
    ended(f, 2, 0, true);
    expect(f, "to node 2: MAY_STOP of step 1\n");
    assert_true(leader_is_left_by(f->leader, 1));
    assert_false(leader_is_left_by(f->leader, 0));
    fixture_free(f);
}

/*
 * When a node has stopped, other engines report that its engine is gone. The leader starts no new engines until that
 * node is back.
 */
static void test_engines_of_a_stop(void **state)
{
    struct fixture *f = start(3);

    report_all(f, (struct node_message){.kind = NODE_ENDED, .proceed = false});
    ended(f, 1, 0, true);
    fixture_said(f, "WANT_ENDED\nto node 1: MAY_STOP of step 0\n");
    report(f, 2, (struct node_message){.kind = NODE_BROKEN, .generation = 1, .text = "the engine of node 2 says: EOF"});
    expect(f, "");
    fetch(f, 0, 1, FETCH_MASTER, 0);
    expect(f, "");
    kept_at(f, 1, 0, NODE_STANDS_OPEN, true);
    fixture_said(f, "ENGINE 2");
    fixture_free(f);
}

/* Node 0 must not stop before a new daemon has reported what it adopted, because no leader could answer it later. */
static void test_stop_before_kept(void **state)
{
    struct fixture *f = start(2);

    want_save(f, 0, 77);
    expect(f, "SAVE 77 of step 0\n");
    report_all(f, (struct node_message){.kind = NODE_ENDED, .proceed = true});
    expect(f, "WANT_ENDED\n");
    all_saved(f, 77);
    leader_meet(f->leader, 1);
    is_published(f, 77);
    expect(f, "SAVE_END 77 whole\n");
    kept_at(f, 1, 0, NODE_STANDS_OPEN, true);
    expect(f, "to node 1: SAVE_END of step 0\nto node 1: WANT_ENDED of step 0\nENGINE 2 answers 2\n");
    ended(f, 1, 0, true);
    fixture_said(f, "to node 0: MAY_STOP of step 0\nto node 1: MAY_STOP of step 0\n");
    fixture_free(f);
}

/* When node 0 may stop, all nodes get MAY_STOP, because they cannot ask later. After that nothing is decided. */
static void test_stop_of_node_0(void **state)
{
    struct fixture *f = start(3);

    report_all(f, (struct node_message){.kind = NODE_WINDOW});
    expect(f, "OPEN\n");
    ended(f, 0, 0, true);
    expect(f, "WANT_ENDED\n");
    report_all(f, (struct node_message){.kind = NODE_WINDOW_END, .forget = true});
    expect(f, "CLOSED\n");
    ended(f, 0, 1, true);
    ended(f, 1, 0, false); /* sent before CLOSED arrived */
    ended(f, 2, 1, false);
    expect(f, "");
    ended(f, 1, 1, false);
    expect(f, "to node 0: MAY_STOP of step 0\nto node 1: MAY_STOP of step 0\nto node 2: MAY_STOP of step 0\n");
    assert_false(leader_is_left_by(f->leader, 1));
    for (unsigned i = 0; i < f->n_nodes; i++)
        asked(f, i);
    expect(f, "");
    fixture_free(f);
}

/* A node's next daemon must report ENDED again. Fetches and a checkpoint end before any node stops. */
static void test_stop_waits(void **state)
{
    struct fixture *f = start(3);

    fetch(f, 1, 1, FETCH_MASTER, 0);
    want_save(f, 2, 77);
    fixture_said(f, "SAVE 77 of step 0\n");
    report_all(f, (struct node_message){.kind = NODE_ENDED, .proceed = true});
    expect(f, "WANT_ENDED\n");
    all_saved(f, 77);
    is_published(f, 77);
    expect(f, "SAVE_END 77 whole\n");
    kept_at(f, 1, 0, NODE_STANDS_OPEN, true);
    expect(f, "to node 1: SAVE_END of step 0\nto node 1: WANT_ENDED of step 0\nENGINE 2 answers 2\n");
    assert_false(leader_is_left_by(f->leader, 1));
    ended(f, 1, 0, false);
    expect(f, "to node 0: MAY_STOP of step 0\nto node 1: MAY_STOP of step 0\nto node 2: MAY_STOP of step 0\n");
    kept_at(f, 2, 0, NODE_STANDS_OPEN, true);
    ended(f, 2, 0, false);
    fixture_said(f, "to node 2: MAY_STOP of step 0\n");
    fixture_free(f);
}

/*
 * Node 0's next daemon knows from its journal that a checkpoint was made. It tells all nodes, because they may not
 * know.
 */
static void test_save_that_the_leader_before_made(void **state)
{
    struct fixture *f = start(2);

    replace(f, 0);
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    leader_take_over(f->leader, 0, true, true);
    for (unsigned i = 0; i < f->n_nodes; i++)
        kept_at(f, i, 0, NODE_STANDS_OPEN, true);
    fixture_said(f, "to node 0: SAVE_END of step 0\nto node 1: SAVE_END of step 0\nto node 2: SAVE_END of step 0\n");
    fixture_free(f);
}

static struct fixture *start_loading(void)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    f->n_nodes = NODES;
    f->stage = 2;
    f->layout = make_layout(f->n_nodes + 1);
    make_leader(f, false, true);
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 0xd1});
    expect(f, "FORM d1\n");
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report_all(f, (struct node_message){.kind = NODE_FORMED});
    expect(f, "ENGINE 1\n");
    return f;
}

static void loaded(struct fixture *f, unsigned node, uint64_t step)
{
    report(f, node, (struct node_message){.kind = NODE_LOADED, .proceed = true, .tag = step});
}

static void loaded_none(struct fixture *f, unsigned node)
{
    report(f, node, (struct node_message){.kind = NODE_LOADED});
}

static void test_load(void **state)
{
    struct fixture *f = start_loading();

    loaded(f, 0, 20);
    loaded(f, 2, 20);
    all_connected(f, 1);
    expect(f, "");
    loaded(f, 1, 20);
    expect(f, "LOAD 1\n");
    broken(f, 1, 1);
    expect(f, "ENGINE 2 it broke\n");
    all_connected(f, 2);
    expect(f, "");
    all_moved(f, 1, 0);
    expect(f, "TRAIN\n");
    assert_int_equal(f->step, 20);
    fixture_free(f);
}

/* Node 1 finds another checkpoint of the same step, because the folder is a different one on that node. */
static void test_load_another(void **state)
{
    struct fixture *f = start_loading();

    all_connected(f, 1);
    loaded(f, 0, 20);
    report(f, 1, (struct node_message){.kind = NODE_LOADED, .proceed = true, .tag = 20, .digest = 7});
    report(f, 2, (struct node_message){.kind = NODE_LOADED, .proceed = true, .tag = 20, .digest = 8});
    expect(
        f,
        "REFUSE node 2 has found another checkpoint of step 20 in checkpoint.dir than node 1: the folder must be one "
        "that all nodes see, such as one of NFS\n");
    fixture_free(f);
}

/* A node that has loaded reports this before node 0 has formed. */
static void test_load_before_form(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);

    leader_free(f->leader);
    make_leader(f, false, true);
    report_all(f, (struct node_message){.kind = NODE_DECLARED, .digest = 0xd1});
    expect(f, "FORM d1\n");
    report(f, 1, (struct node_message){.kind = NODE_FORMED});
    loaded(f, 1, 20);
    assert_int_equal(leader_form(f->leader, f->layout), 0);
    report(f, 0, (struct node_message){.kind = NODE_FORMED});
    report(f, 2, (struct node_message){.kind = NODE_FORMED});
    expect(f, "ENGINE 1\n");
    all_connected(f, 1);
    loaded(f, 0, 20);
    assert_int_equal(leader_waits_for(f->leader), 4);
    assert_string_equal(leader_waits_to(f->leader), "to load the checkpoint");
    loaded(f, 2, 20);
    expect(f, "LOAD 1\n");
    fixture_free(f);
}

static void test_load_none(void **state)
{
    struct fixture *f = start_loading();

    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS});
    for (unsigned i = 0; i < NODES; i++)
        loaded_none(f, i);
    expect(f, "");
    all_connected(f, 1);
    expect(f, "LOAD 0\nSPREAD 1\n");
    all_moved(f, 1, 0);
    expect(f, "TRAIN\n");
    assert_int_equal(f->step, 0);
    fixture_free(f);
}

/* One node cannot read the newest checkpoint, so the others load the one that it has loaded. */
static void test_load_older(void **state)
{
    struct fixture *f = start_loading();

    all_connected(f, 1);
    loaded(f, 0, 20);
    loaded(f, 1, 10);
    loaded(f, 2, 20);
    expect(f, "LOAD of step 10 or older\n");
    loaded(f, 2, 10);
    expect(f, "");
    loaded(f, 0, 10);
    expect(f, "LOAD 1\n");
    fixture_free(f);
}

static void test_load_lacks(void **state)
{
    struct fixture *f = start_loading();

    all_connected(f, 1);
    loaded(f, 0, UINT64_MAX);
    expect(f, "! node 0: LOADED.tag: no such step\n");
    loaded(f, 0, 20);
    loaded(f, 2, 10);
    loaded_none(f, 1);
    expect(f,
           "REFUSE node 1 finds no checkpoint in checkpoint.dir, and node 0 has found that of step 20: the folder must "
           "be one that all nodes see, such as one of NFS\n");
    fixture_free(f);
}

TEST_GROUP(leader)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forming),
        cmocka_unit_test(test_gpu_room),
        cmocka_unit_test(test_unequal),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_cannot_form),
        cmocka_unit_test(test_stale_forming),
        cmocka_unit_test(test_new_leader_forms),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_withdraw),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_passes),
        cmocka_unit_test(test_asked),
        cmocka_unit_test(test_too_late),
        cmocka_unit_test(test_back),
        cmocka_unit_test(test_all_back),
        cmocka_unit_test(test_all_back_again),
        cmocka_unit_test(test_back_late),
        cmocka_unit_test(test_no_gather),
        cmocka_unit_test(test_merged),
        cmocka_unit_test(test_short_bits),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_hold),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_decided),
        cmocka_unit_test(test_broken_exchange),
        cmocka_unit_test(test_broken_before),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_fetch),
        cmocka_unit_test(test_gathering_fetch),
        cmocka_unit_test(test_bad_fetch),
        cmocka_unit_test(test_lost),
        cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_bad_sums),
        cmocka_unit_test(test_kept_open),
        cmocka_unit_test(test_kept_decided),
        cmocka_unit_test(test_new_leader),
        cmocka_unit_test(test_kept_before_the_first_step),
        cmocka_unit_test(test_kept_missed_back),
        cmocka_unit_test(test_kept_windows),
        cmocka_unit_test(test_save),
        cmocka_unit_test(test_save_again),
        cmocka_unit_test(test_save_once_more),
        cmocka_unit_test(test_save_between_steps),
        cmocka_unit_test(test_save_of_a_replaced_daemon),
        cmocka_unit_test(test_save_that_the_leader_before_made),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_engines_of_a_stop),
        cmocka_unit_test(test_stop_before_kept),
        cmocka_unit_test(test_stop_of_node_0),
        cmocka_unit_test(test_stop_waits),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_load_another),
        cmocka_unit_test(test_load_before_form),
        cmocka_unit_test(test_load_none),
        cmocka_unit_test(test_load_older),
        cmocka_unit_test(test_load_lacks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

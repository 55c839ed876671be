/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The leader alone. A test reports for the nodes, and compares the leader's messages, as one line of text each, with
 * the expected ones. The last test lets simulated nodes, which report as nodes.c does, run whole steps in random order,
 * with breaks and aborts, and checks the rules that must always hold.
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
    bool holds; /* the judge's next answer, once */
    bool skips;
    struct node_finding found; /* what the judge was shown */
    unsigned n_args;           /* groups of the arguments that it was shown */
    double loss_scale, squares;
    bool found_inf, proceed;
    uint8_t any, all;
    char said[SAID_BYTES];
    size_t n_said;
    uint64_t step;
    uint32_t attempt; /* as last said: what nodes report with */
    uint32_t n_backs; /* of all ranks, that all nodes have heard */
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

/* Notes only the fields that this kind of message uses. */
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

    if (m->kind != NODE_VALUE && m->kind != NODE_MANIFEST) { /* are passed on as they came */
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

/* Expects that the leader has said this text, and nothing else, since the last call. */
static void expect(struct fixture *f, const char *text)
{
    if (strcmp(f->said, text) != 0)
        fail_msg("expected\n%s\ngot\n%s", text, f->said);
    f->n_said = 0;
    f->said[0] = '\0';
}

/* Expects that the leader has said that, and perhaps more. */
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

/* Part masks over the node's pieces. */
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

/* All ranks of the node have left. */
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

/* Parcels: 0 of two parts, 1 and 2 of one; the last parameter is frozen. */
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

/* Nodes of one rank and piece, but node 1, which has two. */
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

/* Formed; the next tag is FIRST. Three buckets have a tag each when weights are spread, and there is one more. */
enum { FIRST = 5 };

static struct fixture *start(unsigned stage)
{
    struct fixture *f = fixture_new(NODES, stage, false);

    form(f);
    return f;
}

/* Stage 3 on GPUs. */
static struct fixture *start_on_gpus(void)
{
    struct fixture *f = fixture_new(NODES, 3, true);

    form(f);
    return f;
}

/* Everybody asks, and so on to the end. tag: of the gathering, if there is one. */
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
    report(f, 0, (struct node_message){.kind = NODE_WEIGHTS}); /* before the engines are there */
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

/* All nodes get the least room for gradients of GPUs that one wants; a node that declares again may want another one.
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
    assert_int_equal(leader_waits_for(f->leader), 7); /* all begin again */
    form(f);
    fixture_free(f);
}

static void declare(struct fixture *f, unsigned node, const char *run_id)
{
    report(f, node, (struct node_message){.kind = NODE_DECLARED, .digest = 1, .text = run_id});
}

/* One job is one run; a node whose ranks name none is of any. */
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
    report(f, 1, (struct node_message){.kind = NODE_UNFORMED, .text = "no memory either"}); /* it is known */
    report(f, 2, (struct node_message){.kind = NODE_FORMED});
    expect(f, "");
    assert_int_equal(leader_form(f->leader, NULL), 0);
    form(f);
    fixture_free(f);
}

/* A node's reports about a job that was dropped meanwhile do not count for the next job. */
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
    expect(f, ""); /* node 0 is still at it */
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

/* Another leader does not use tags, nor generations, that nodes know from the one before. */
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
    report_all(f, (struct node_message){.kind = NODE_MOVED, .tag = 1}); /* the weights of the leader before */
    expect(f, "");
    declare_after(f, 1, UINT32_MAX);
    expect(f, "! node 1: DECLARED.generation: there is none after it\n");
    fixture_free(f);
}

/* ---- exchanges ----------------------------------------------------------------------------------------- */

/* Masks are over the pieces of all nodes, in rank order: node 1's are the second and third. */
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
    ready_partly(f, 0, 0, beyond, 2); /* it has one piece */
    passed(f, 1, 0, 0);
    passed(f, 2, 0, 0);
    expect(f, "EXCHANGE 6 parcel 0 at 0.0 numbers 1,0\n");
    fixture_free(f);
}

/* Ordered exchanges are expected in later generations, too; the other parcels count as never ready. */
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
        ready(f, i, 0, 0, 0); /* it would move, when the engines are connected */
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

/* Whom node 0 waits for in a write window, and for what. */
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

/* A node may have more passes than another, nothing at all in a micro-batch, or be ahead. */
static void test_passes(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    passed(f, 0, 0, 1);
    ready(f, 0, 1, 1, 0); /* ahead */
    ready(f, 1, 1, 0, 0);
    passed(f, 2, 0, 1);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 numbers 6\n");
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    ready(f, 2, 1, 1, 0);
    expect(f, ""); /* node 1 may have another pass of 0 */
    ready(f, 1, 1, 0, 1);
    expect(f, "EXCHANGE 6 parcel 1 at 0.1 numbers 6\n");
    passed(f, 1, 0, 1);
    expect(f, "! node 1: PASSED: not the parcel's position\n"); /* what it has is under way */
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

/* A node that has asked for the step has no more gradients. */
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

/* A rank of a node that had asked without it: the step waits for it again. */
static void test_back(void **state)
{
    struct fixture *f = start(3);

    (void)state;
    asked(f, 0);
    gone(f, 1);
    back(f, 2, false); /* it has not asked: nothing of it is void */
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
    back(f, 1, false); /* the end of the step lets it in */
    expect(f, "");
    all_sum(f);
    expect(f, "DECIDED apply\n");
    back(f, 1, true);
    expect(f, "BACK node 1 all\n");
    report_all(f, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "COMMIT\n");
    fixture_free(f);
}

/* The first that is back after all had left brings all of them back: nothing is added up without the others. */
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
    back(f, 0, false); /* it was let in with the others */
    expect(f, "");
    ready(f, 0, 1, 0, 0);
    ready(f, 1, 1, 0, 0);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0\n");
    all_moved(f, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    gone(f, 1);
    back(f, 0, true); /* it knows that the others have left, before they have said so here */
    expect(f, "BACK node 0 all\n");
    f->n_backs--;
    gone(f, 1); /* they say so before they have heard that all are back */
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

/* A report that all are back is said, although an abort has overtaken it; reported again, it is not said again. */
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

/* The node comes back when the sum that it would have had a part in is made, or is being made. */
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
    expect(f, "BACK node 1 late\n"); /* nobody had anything: the others are in the next micro-batch */
    report(f, 2, (struct node_message){.kind = NODE_BACK, .forget = true});
    expect(f, "BACK node 2 late\n"); /* what its own ranks had was added up on the node */
    fixture_free(f);
}

/* Gradients come after their sum was made, so they are in no sum. The step is aborted, so that none is lost. */
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

/* In stage 3 there is nothing to gather; nor is there after a skipped step. */
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

/* Merged are: the arguments of the lowest node that has some, the union and the intersection of all nodes' sets, and
 * the first finding. */
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

/* If a node names fewer parameters than others, none of its ranks has pushed the rest. */
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
    asked(f, 1); /* its ranks do not want to know */
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
    asked(f, 1); /* who had asked for the step asks again, too */
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

/* Until the step is decided, wherever it is; what nodes had said of the attempt is void. */
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
        abort_now(f, 2); /* it is */
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
    abort_now(f, 0); /* of the step that is committed */
    f->step++;
    expect(f, "");
    fixture_free(f);
}

/* ---- generations --------------------------------------------------------------------------------------- */

/* Node 1 has got it, node 2 has got it and added it, node 0 neither. */
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
    broken(f, 1, 1); /* of the generation before */
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
    moved(f, 1, 5, 1); /* what had arrived is added without an engine */
    all_connected(f, 3);
    expect(f, "EXCHANGE 5 parcel 1 at 0.0 arrived 6\n");
    moved(f, 0, 5, 1);
    expect(f, "SETTLED 5 parcel 1 at 0.0\n");
    broken(f, 1, 3);
    ready(f, 2, 2, 0, 0);
    expect(f, "ENGINE 4 it broke\n"); /* who is connected would hear it twice */
    all_connected(f, 4);
    expect(f, "EXCHANGE 6 parcel 2 at 0.0\n");
    fixture_free(f);
}

static void test_broken_before(void **state)
{
    struct fixture *f = fixture_new(NODES, 2, false);
    uint64_t spread = 1;

    (void)state;
    broken(f, 1, 0); /* there is none yet */
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
    expect(f, "SERVE 7 node 0 fetch 1 kind 0 numbers 2\n"); /* a tag for each parameter */
    moved(f, 2, 5, 0);                                      /* not who fetches it */
    broken(f, 0, 1);
    expect(f, "ENGINE 2 it broke\n");
    fetch(f, 2, 4, FETCH_EXP_AVG, 1);
    expect(f, "");
    moved(f, 0, 7, 0); /* it had come */
    all_connected(f, 2);
    expect(f, "SERVE 8 node 2 fetch 4 kind 1 numbers 1\nSERVE 5 node 1 fetch 9 kind 3 numbers 3,0\n");
    moved(f, 1, 5, 0);
    moved(f, 2, 8, 0);
    broken(f, 0, 2);
    all_connected(f, 3);
    expect(f, "ENGINE 3 it broke\n");
    fixture_free(f);
}

/* GPUs gather from each other, frozen parameters as well: for a rank that the node has. */
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

/* A fetch that not all nodes can do is refused, because it would break every generation of engines. */
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
    fetch(f, 1, 1, FETCH_PUBLISHED, 0); /* not in this stage */
    expect(f, "! node 1: FETCH.pass: no such kind\n");
    fetch(f, 1, 1, FETCH_GATHERED, 0); /* in host memory */
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
    /* The other nodes continue until they are told. */
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
    expect(f, ""); /* nothing is under way */
    fixture_free(f);
}

/* A sum that could not be added to others' without running over is no sum. */
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
            bad.nan = true; /* and yet finite */
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

/* answers: a set of nodes. */
static void expect_abort(struct fixture *f, uint32_t attempt, unsigned node, uint32_t generation, unsigned answers)
{
    char text[256];
    int n = snprintf(text, sizeof(text), ABORTED_BY, attempt, node, node);

    snprintf(text + n, sizeof(text) - (size_t)n, "ENGINE %u answers %x\n", generation, answers);
    expect(f, text);
    all_connected(f, generation);
    expect(f, "");
}

/* A node that stands so at that step; empty: it has nothing of it. */
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

/* Another leader, which node 0's next daemon makes. */
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
    ready(f, 0, 0, 0, 0); /* others' part of a step of which the node had nothing stays */
    kept_at(f, 2, f->step, NODE_STANDS_OPEN, true);
    expect(f, "ENGINE 3 answers 4\n");
    all_connected(f, 3);
    ready(f, 1, 0, 0, 0);
    ready(f, 2, 0, 0, 0);
    expect(f, "EXCHANGE 5 parcel 0 at 0.0\n");
    all_moved(f, 5, 0);
    expect(f, "SETTLED 5 parcel 0 at 0.0\n");
    f->attempt = 0; /* it has not heard of the abort */
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
    kept(f, 1, NODE_STANDS_OPEN); /* it has not heard of it */
    expect(f, "to node 1: DECIDED again\nENGINE 2 answers 2\n");
    all_connected(f, 2);
    kept(f, 2, NODE_STANDS_UPDATED); /* its report may be lost */
    expect(f, "ENGINE 3 answers 4\n");
    all_connected(f, 3);
    report(f, 0, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "");
    report(f, 1, (struct node_message){.kind = NODE_UPDATED});
    expect(f, "GATHER 5\n");
    moved(f, 0, 5, 0);
    moved(f, 1, 5, 0);
    kept(f, 1, NODE_STANDS_UPDATED); /* it may lack any of the weights */
    expect(f, "ENGINE 4 answers 2\n");
    all_connected(f, 4);
    expect(f, "GATHER 5 arrived 1\n");
    moved(f, 2, 5, 0);
    expect(f, "");
    moved(f, 1, 5, 0);
    expect(f, "COMMIT\n");
    kept_at(f, 2, f->step - 1, NODE_STANDS_UPDATED, false); /* it has missed that */
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

    decide(f); /* step 1: node 2 has heard that it was committed, and has begun the next one */
    replace(f, 1);
    kept(f, 0, NODE_STANDS_UPDATED);
    kept(f, 1, NODE_STANDS_DECIDED);
    leader_hear(f->leader, 2, &(struct node_message){.kind = NODE_KEPT, .step = 2, .generation = 1, .tag = 1});
    fixture_said(f, "to node 0: COMMIT of step 1\nto node 1: COMMIT of step 1\nABORTED attempt 2");
    fixture_free(f);
}

/* A node that has all initial weights, and has not heard that the others have them. */
static void test_kept_before_the_first_step(void **state)
{
    struct fixture *f = start(2);

    (void)state;
    leader_hear(f->leader, 1,
                &(struct node_message){.kind = NODE_KEPT, .generation = 1, .tag = 0, .proceed = true, .forget = true});
    expect(f, "to node 1: TRAIN of step 0\nENGINE 2 answers 2\n");
    fixture_free(f);
}

/* Daemons that died before they heard that all ranks are back, also when node 0's did. */
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
    report(f, 1, (struct node_message){.kind = NODE_RANK, .rank = 1}); /* of before */
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
    kept_at(f, 1, 0, NODE_STANDS_OPEN, true); /* it has not opened it */
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
    kept(f, 0, NODE_STANDS_WINDOW); /* which has not heard that it is to be stored */
    kept(f, 1, NODE_STANDS_STORED);
    kept(f, 2, NODE_STANDS_STORING);
    expect(f, "to node 0: STORE of step 0\nENGINE 2 answers 7\n");
    report(f, 2, (struct node_message){.kind = NODE_STORED});
    report(f, 0, (struct node_message){.kind = NODE_STORED});
    all_connected(f, 2);
    fixture_said(f, "GATHER ");
    all_moved(f, (UINT64_C(2) << 32) + 1, 0);
    expect(f, "CLOSED\n");
    kept(f, 1, NODE_STANDS_STORED); /* it has missed that */
    expect(f, "to node 1: CLOSED of step 0\nENGINE 3 answers 2\n");
    leader_reconnect(f->leader); /* a link is back: that answers nobody */
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

/* It is said once, whoever wants it, and is whole when node 0 has put it together; steps go on meanwhile. */
static void test_save(void **state)
{
    struct fixture *f = start(2);

    want_save(f, 1, 77);
    expect(f, "SAVE 77 of step 0\n");
    want_save(f, 0, 78);
    want_save(f, 2, 79); /* these do not know yet that it is said */
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

/* A daemon that is new wants the one that its predecessor was through with: once more only if that one fails. */
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
    want_save(f, 1, 79); /* it has not heard that yet */
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

/* The next one waits until the one before has ended; of one that failed, another may be wanted. */
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

/* Never between a decision and its commit, nor in a write window. */
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

/* A daemon that is replaced has lost what it was writing, unless it was through. */
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

/* It waits for all nodes to end what was decided, and it alone is told that. */
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

/* The engine of a node that has stopped is gone, which other engines report: nothing is wrong until it is back. */
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

/* Node 0 does not stop before a daemon that is new has said where it stands: nobody could answer it later. */
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

/* All hear it when node 0 stops, as they could ask nobody later; and then nothing is decided any more. */
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
    ended(f, 1, 0, false); /* before it heard CLOSED */
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

/* The next daemon of a node reports ENDED again; fetches and a checkpoint end before anybody stops. */
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

/* Node 0's next daemon knows it from its journal; a node that died, too, may not. */
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

/* Another one of the same step: node 1 sees another folder under that name. */
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

/* A node that has loaded already answers at once, and node 0 hears its own FORM after that. */
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

/* One node cannot read the newest: the others load what it has loaded. */
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

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The leader with simulated nodes, which report as nodes.c and collect.c do, but move no bytes. Runs whole steps under
 * 40 seeds (400 with --full). Each seed has its own order in which messages arrive, engines break and steps are
 * aborted. In any order, these rules must hold:
 * - In the committed attempt, each contribution is in exactly one sum, on every node, in the order of micro-batches and
 * passes.
 * - A parcel has at most one exchange at a time, and all parcels together have at most as many as a node has room for.
 * - All nodes save the same step, between its commit and the next decision.
 * - A node that is told to stop may stop when all nodes have ended what was decided.
 * - The leader never complains about a node, and the run ends.
 */

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/example/random.h"
#include "core/base/base.h"
#include "daemon/exchange/exchange.h"
#include "daemon/leader/leader.h"
#include "tests/group.h"
#include "tests/tiers.h"

enum {
    MAX_NODES = 4,
    PARCELS = NODE_MAX_MOVING + 4,
    MICRO_BATCHES = 3,
    PASSES = 3,
    STEPS = 4,
    MAX_QUEUED = 16384, /* messages in one direction; more than in any run */
    MAX_MOTIONS = 64,
    MAX_TAGS = 16384,
    MAX_SUMS = MICRO_BATCHES * PASSES,
    MAX_EVENTS = 800000,
};

struct mail {
    struct node_message message;
    uint64_t numbers[MAX_MOTIONS];
};

struct queue {
    struct mail *mails;
    size_t first, n;
};

/* A micro-batch, and a parcel's pass in it. */
struct position {
    uint32_t micro_batch, pass;
};

struct motion {
    uint64_t tag;
    enum node_kind kind;
    uint32_t parcel, attempt;
    struct position at;
    uint64_t masks[2];
    bool live, serves, arrived, fetches;
};

struct sum {
    struct position at;
    uint64_t masks[2];
};

struct parcel {
    struct position cursor;
    bool kept, awaited;
    struct sum sums[MAX_SUMS]; /* the added contributions, in order */
    unsigned n_sums;
};

enum node_state { TRAINING, DECIDED, COMMITTING, ABORTING };

struct node {
    struct queue in, out;
    enum node_state state;
    uint64_t step;
    uint32_t attempt, next_attempt, generation;
    bool started, connected, trains, updating;
    bool said_request, fetching, withdraws;
    uint64_t saves; /* the token of the save in progress, or 0 */
    bool publishes; /* node 0: whether all nodes have saved */
    bool is_told, others_stop, said_end, may_stop;
    uint32_t n_micro_batches;                     /* in this step and attempt */
    uint8_t plan[PARCELS][MICRO_BATCHES][PASSES]; /* a bit for each part to push; 0: none in this pass and later ones */
    struct parcel parcels[PARCELS];
    struct motion motions[MAX_MOTIONS];
};

struct model {
    struct leader *leader;
    struct layout *layout;
    unsigned n, stage;
    bool uneven; /* nodes end different numbers of micro-batches; then none asks for the norm */
    struct node nodes[MAX_NODES];
    uint64_t seed, n_random;
    unsigned n_breaks, n_aborts, n_fetches, n_norms, n_withdrawals, n_saves, n_stops; /* how many may still happen */
    uint64_t last_token, saved_step; /* saved_step is the step of the last SAVE */
    bool was_full;                   /* whether NODE_MAX_MOVING parcels were moving */
    uint64_t open_tags[PARCELS];
    uint32_t given[MAX_TAGS][MAX_NODES]; /* the generation in which each engine last got the order with this tag */
};

static uint64_t draw(struct model *m, uint64_t n)
{
    return random_mix(m->seed << 32 ^ m->n_random++) % n;
}

/* ---- messages ------------------------------------------------------------------------------------------ */

static void append(struct model *m, struct queue *queue, const struct node_message *message)
{
    struct mail *mail = &queue->mails[queue->first + queue->n++];

    if (queue->first + queue->n > MAX_QUEUED)
        fail_msg("seed %" PRIu64 ": more messages than a run has", m->seed);
    mail->message = *message;
    assert_true(message->n_numbers <= ARRAY_SIZE(mail->numbers));
    if (message->n_numbers > 0)
        memcpy(mail->numbers, message->numbers, message->n_numbers * sizeof(mail->numbers[0]));
    mail->message.numbers = mail->numbers;
}

static struct mail *take(struct queue *queue)
{
    queue->n--;
    return &queue->mails[queue->first++];
}

static void report(struct model *m, struct node *node, struct node_message message)
{
    message.step = node->step;
    message.attempt = node->attempt;
    message.node = (uint32_t)(node - m->nodes);
    if (!message.text)
        message.text = "";
    append(m, &node->out, &message);
}

/* Asserts that a parcel has at most one exchange at a time. The same exchange may be sent again. */
static void check_said(struct model *m, const struct node_message *message)
{
    uint64_t *open = message->parcel < PARCELS ? &m->open_tags[message->parcel] : NULL;

    if (message->kind == NODE_EXCHANGE) {
        assert_true(*open == 0 || *open == message->tag);
        *open = message->tag;
    } else if (message->kind == NODE_SETTLED) {
        assert_true(*open == message->tag);
        *open = 0;
    } else if (message->kind == NODE_ABORTED) {
        assert_string_equal(message->text, ""); /* a node asked for the abort; there is no other reason */
        memset(m->open_tags, 0, sizeof(m->open_tags));
    } else if (message->kind == NODE_SAVE) {
        m->saved_step = message->step;
    } else if (message->kind == NODE_MEASURE || message->kind == NODE_COMMIT) {
        for (unsigned p = 0; p < PARCELS; p++)
            assert_true(m->open_tags[p] == 0);
    }
}

static void on_say(void *userdata, const struct node_message *message)
{
    struct model *m = userdata;

    check_said(m, message);
    for (unsigned i = 0; i < m->n; i++)
        append(m, &m->nodes[i].in, message);
}

static void on_tell(void *userdata, unsigned node, const struct node_message *message)
{
    struct model *m = userdata;

    assert_true(message->kind == NODE_PUBLISH || message->kind == NODE_MAY_STOP);
    append(m, &m->nodes[node].in, message);
}

static bool on_judge(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                     struct node_message *hold)
{
    (void)hold;
    struct model *m = userdata;

    assert_true(exact_sum_round(&merged->squares) == m->n); /* each node's sum is 1, so none is missing or older */
    verdict->apply = draw(m, 4) > 0;
    return draw(m, 8) > 0;
}

static void on_complain(void *userdata, unsigned node, const char *why)
{
    struct model *m = userdata;

    fail_msg("seed %" PRIu64 ": node %u: %s", m->seed, node, why);
}

/* ---- a node's step ------------------------------------------------------------------------------------- */

static uint32_t n_parts(const struct model *m, unsigned p)
{
    return m->layout->parcels[p].n_parts;
}

/* Plans the pushes of the node's ranks, with different pushes in each attempt. */
static void begin_attempt(struct model *m, struct node *node)
{
    node->state = TRAINING;
    node->said_request = node->withdraws = false;
    node->n_micro_batches = 1 + (uint32_t)(m->uneven ? draw(m, MICRO_BATCHES) : (m->seed + node->step) % MICRO_BATCHES);
    memset(node->plan, 0, sizeof(node->plan));
    memset(node->parcels, 0, sizeof(node->parcels));
    for (unsigned p = 0; p < PARCELS; p++)
        for (uint32_t k = 0; k < node->n_micro_batches; k++)
            for (uint32_t pass = 0; pass < PASSES && draw(m, 3) > (pass == 0 ? 0 : 1); pass++)
                node->plan[p][k][pass] = (uint8_t)(1 + draw(m, (UINT64_C(1) << n_parts(m, p)) - 1));
}

static uint8_t planned(const struct node *node, unsigned p, struct position at)
{
    return at.micro_batch < node->n_micro_batches && at.pass < PASSES ? node->plan[p][at.micro_batch][at.pass] : 0;
}

/* Sets the node's bit in the masks of these parts. Each node has one piece, so it has one bit. */
static void fill_masks(const struct model *m, unsigned p, uint8_t parts, uint64_t bit, uint64_t *masks)
{
    for (uint32_t k = 0; k < n_parts(m, p); k++)
        masks[k] |= parts >> k & 1 ? bit : 0;
}

static void say_ready(struct model *m, struct node *node, unsigned p)
{
    struct position at = node->parcels[p].cursor;
    uint8_t parts = planned(node, p, at);
    uint64_t masks[2] = {0};

    fill_masks(m, p, parts, 1, masks);
    report(m, node,
           (struct node_message){.kind = NODE_READY,
                                 .parcel = p,
                                 .micro_batch = at.micro_batch,
                                 .pass = at.pass,
                                 .numbers = masks,
                                 .n_numbers = parts == (1 << n_parts(m, p)) - 1 ? 0 : n_parts(m, p)});
}

/* Does what collect_parcel() does. Return: whether there was anything to report. */
static bool collect(struct model *m, struct node *node, unsigned p)
{
    struct parcel *parcel = &node->parcels[p];
    struct position at = parcel->cursor;
    uint64_t index = p;

    if (node->state != TRAINING || !node->trains || node->withdraws || parcel->kept ||
        at.micro_batch >= node->n_micro_batches)
        return false;
    if (!planned(node, p, at)) {
        report(m, node,
               (struct node_message){
                   .kind = NODE_PASSED, .micro_batch = at.micro_batch, .numbers = &index, .n_numbers = 1});
        parcel->cursor = (struct position){at.micro_batch + 1, 0};
        return true;
    }
    parcel->kept = true;
    parcel->awaited = false;
    say_ready(m, node, p);
    return true;
}

/*
 * Return: whether everything was summed on this node, so its ranks may ask for the step. Staged sums may still be
 * moving.
 */
static bool has_collected(const struct node *node)
{
    for (unsigned p = 0; p < PARCELS; p++) {
        struct position at = node->parcels[p].cursor;

        at.pass += node->parcels[p].kept;
        for (; at.micro_batch < node->n_micro_batches; at = (struct position){at.micro_batch + 1, 0})
            if (planned(node, p, at))
                return false;
    }
    return true;
}

static bool ask(struct model *m, struct node *node)
{
    static const uint8_t bits[1] = {1};

    if (node->state != TRAINING || !node->trains || node->said_request || node->withdraws || node->fetching ||
        !has_collected(node))
        return false;
    node->said_request = true;
    if (m->n_norms > 0 && draw(m, 2)) {
        m->n_norms--;
        report(m, node, (struct node_message){.kind = NODE_WANT_NORM});
        return true;
    }
    report(m, node,
           (struct node_message){.kind = NODE_ASKED,
                                 .has_rank = true,
                                 .pushed_any = bits,
                                 .pushed_all = bits,
                                 .n_any_bytes = 1,
                                 .n_all_bytes = 1});
    return true;
}

/* ---- motions ------------------------------------------------------------------------------------------- */

static struct motion *add_motion(struct model *m, struct node *node, const struct node_message *message)
{
    struct motion *motion = node->motions;
    unsigned self = (unsigned)(node - m->nodes);

    while (motion < node->motions + MAX_MOTIONS && motion->live)
        motion++;
    assert_true(motion < node->motions + MAX_MOTIONS && message->tag < MAX_TAGS);
    m->given[message->tag][self] = node->generation;
    *motion = (struct motion){.live = true,
                              .tag = message->tag,
                              .kind = message->kind,
                              .parcel = message->parcel,
                              .attempt = node->attempt,
                              .at = {message->micro_batch, message->pass},
                              .serves = message->arrived >> self & 1};
    return motion;
}

/* Asserts that there are slots enough for all parcels that are moving and not yet added. */
static void check_room(struct model *m, const struct node *node)
{
    unsigned n = 0;

    for (unsigned k = 0; k < MAX_MOTIONS; k++)
        n += node->motions[k].live && node->motions[k].kind == NODE_EXCHANGE && !node->motions[k].serves;
    assert_true(n <= NODE_MAX_MOVING);
    m->was_full |= n == NODE_MAX_MOVING;
}

static void hear_exchange(struct model *m, struct node *node, const struct node_message *message)
{
    struct motion *motion = add_motion(m, node, message);
    uint64_t bit = UINT64_C(1) << (node - m->nodes);
    const struct parcel *parcel = &node->parcels[message->parcel];
    bool takes_part = false;

    check_room(m, node);
    for (uint32_t k = 0; k < n_parts(m, message->parcel); k++) {
        motion->masks[k] = message->n_numbers ? message->numbers[k] : (UINT64_C(1) << m->n) - 1;
        takes_part |= (motion->masks[k] & bit) != 0;
    }
    if (takes_part && !motion->serves) /* then the node still has its contribution to send */
        assert_true(parcel->kept && parcel->cursor.micro_batch == motion->at.micro_batch &&
                    parcel->cursor.pass == motion->at.pass);
}

/* Return: whether all engines of the generation got the order, so that its bytes arrive. */
static bool is_everywhere(const struct model *m, const struct node *node, uint64_t tag)
{
    for (unsigned i = 0; i < m->n; i++)
        if (m->given[tag][i] != node->generation)
            return false;
    return true;
}

static void add_sum(struct node *node, const struct motion *motion)
{
    struct parcel *parcel = &node->parcels[motion->parcel];
    struct sum *sum = &parcel->sums[parcel->n_sums++];

    assert_true(parcel->n_sums <= MAX_SUMS);
    sum->at = motion->at;
    memcpy(sum->masks, motion->masks, sizeof(sum->masks));
}

/* Moves the bytes, for which engines are needed, or adds bytes that have arrived, for which they are not. */
static bool progress(struct model *m, struct node *node, struct motion *motion)
{
    bool void_now = motion->attempt != node->attempt || node->state == ABORTING;

    if (!motion->live)
        return false;
    if (!motion->arrived) {
        if (!node->connected || !is_everywhere(m, node, motion->tag))
            return false;
        motion->arrived = true;
        if (motion->serves || (motion->kind == NODE_SERVE && !motion->fetches))
            motion->live = false;
        return true;
    }
    motion->live = false;
    if (motion->kind == NODE_EXCHANGE && !void_now)
        add_sum(node, motion);
    if (motion->fetches)
        node->fetching = false;
    if (motion->kind != NODE_EXCHANGE || motion->attempt == node->attempt)
        report(m, node, (struct node_message){.kind = NODE_MOVED, .tag = motion->tag, .parcel = motion->parcel});
    return true;
}

static void drop_motions(struct node *node)
{
    for (unsigned k = 0; k < MAX_MOTIONS; k++)
        if (!node->motions[k].arrived)
            node->motions[k].live = false;
}

static bool is_exchanging(const struct node *node)
{
    for (unsigned k = 0; k < MAX_MOTIONS; k++)
        if (node->motions[k].live && node->motions[k].kind == NODE_EXCHANGE)
            return true;
    return false;
}

/* ---- what node 0 says ---------------------------------------------------------------------------------- */

static void hear_engine(struct node *node, const struct node_message *message)
{
    if (message->generation <= node->generation)
        return;
    node->generation = message->generation;
    node->started = true;
    node->connected = false;
    drop_motions(node);
}

/* Asserts that the node's sums have all contributions, each once, in order. */
static void check_sums(const struct model *m, const struct node *node)
{
    for (unsigned p = 0; p < PARCELS; p++) {
        unsigned n = 0;

        for (uint32_t k = 0; k < MICRO_BATCHES * PASSES; k++) {
            struct sum expected = {.at = {k / PASSES, k % PASSES}};
            const struct sum *got = &node->parcels[p].sums[n];

            for (unsigned i = 0; i < m->n; i++)
                fill_masks(m, p, planned(&m->nodes[i], p, expected.at), UINT64_C(1) << i, expected.masks);
            if (expected.masks[0] == 0 && expected.masks[1] == 0)
                continue;
            if (n++ == node->parcels[p].n_sums || memcmp(got, &expected, sizeof(expected)) != 0)
                fail_msg("seed %" PRIu64 ": step %" PRIu64 ": node %td: parcel %u: expected %u.%u of %" PRIx64
                         ",%" PRIx64 ", got %u.%u of %" PRIx64 ",%" PRIx64,
                         m->seed, node->step, node - m->nodes, p, expected.at.micro_batch, expected.at.pass,
                         expected.masks[0], expected.masks[1], got->at.micro_batch, got->at.pass, got->masks[0],
                         got->masks[1]);
        }
        assert_int_equal(n, node->parcels[p].n_sums);
    }
}

/* Notes that node 0 expects this exchange from now on, with an engine or without. */
static void await(struct node *node, const struct node_message *message)
{
    struct parcel *parcel = &node->parcels[message->parcel];

    if (parcel->cursor.micro_batch == message->micro_batch && parcel->cursor.pass == message->pass)
        parcel->awaited = true;
}

/* Parcels that an exchange already uses are kept. Other kept parcels are reported ready again, or get new gradients. */
static void hear_withdrawn(struct model *m, struct node *node, const struct node_message *message)
{
    if (message->node != (uint32_t)(node - m->nodes))
        return;
    assert_true(node->withdraws);
    node->withdraws = false;
    for (unsigned p = 0; p < PARCELS; p++) {
        struct parcel *parcel = &node->parcels[p];
        struct position at = parcel->cursor;

        if (!parcel->kept || parcel->awaited)
            continue;
        parcel->kept = draw(m, 2);
        if (parcel->kept)
            say_ready(m, node, p);
        else
            node->plan[p][at.micro_batch][at.pass] = (uint8_t)(1 + draw(m, (UINT64_C(1) << n_parts(m, p)) - 1));
    }
}

static void hear_settled(struct node *node, const struct node_message *message)
{
    struct parcel *parcel = &node->parcels[message->parcel];

    if (!parcel->kept || parcel->cursor.micro_batch != message->micro_batch || parcel->cursor.pass != message->pass)
        return;
    parcel->kept = false;
    parcel->cursor.pass++;
}

static void hear_measure(struct model *m, struct node *node)
{
    struct exact_sum one;

    exact_sum_reset(&one);
    exact_sum_add(&one, 1);
    exact_sum_carry(&one);
    report(m, node, (struct node_message){.kind = NODE_SUM, .bytes = (const uint8_t *)&one, .n_bytes = sizeof(one)});
}

static void hear_serve(struct model *m, struct node *node, const struct node_message *message)
{
    struct motion *motion = add_motion(m, node, message);

    motion->fetches = message->node == (unsigned)(node - m->nodes) && node->fetching;
}

/* Begins to save. The node must have decided on no later step; it may still be committing this one. */
static void hear_save(struct model *m, struct node *node, const struct node_message *message)
{
    assert_int_equal(message->step, m->saved_step);
    assert_int_equal(message->step, node->step + (node->state == COMMITTING));
    assert_int_not_equal(node->state, DECIDED);
    assert_int_equal(node->saves, 0);
    node->saves = message->tag;
}

static void hear_save_end(struct node *node, const struct node_message *message)
{
    assert_int_equal(node->saves, message->tag);
    node->saves = 0;
    node->publishes = false;
}

static void tell_leader(struct model *m, struct node *node)
{
    struct mail *mail = take(&node->out);
    struct exact_sum one;

    if (mail->message.kind == NODE_SUM) { /* the queue did not copy its bytes */
        exact_sum_reset(&one);
        exact_sum_add(&one, 1);
        exact_sum_carry(&one);
        mail->message.bytes = (const uint8_t *)&one;
    }
    leader_hear(m->leader, (unsigned)(node - m->nodes), &mail->message);
}

/* The node's daemon has stopped, with its engine. All its reports arrive, and the next daemon continues. */
static void come_back(struct model *m, struct node *node)
{
    node->is_told = node->may_stop = node->said_end = false;
    node->started = node->connected = false;
    drop_motions(node);
    while (node->out.n > 0)
        tell_leader(m, node);
    leader_meet(m->leader, (unsigned)(node - m->nodes));
    leader_reconnect(m->leader);
}

/* Asserts that no node still works on anything that was decided. */
static void hear_may_stop(struct model *m, struct node *node, const struct node_message *message)
{
    for (unsigned i = 0; i < m->n; i++)
        assert_true(m->nodes[i].step >= message->step);
    assert_int_equal(node->step, message->step);
    assert_false(node->may_stop);
    node->may_stop = true;
    if (!m->nodes[0].is_told)
        come_back(m, node);
}

static bool is_stale(const struct node *node, const struct node_message *message)
{
    return (message->kind == NODE_MEASURE || message->kind == NODE_SETTLED || message->kind == NODE_EXCHANGE ||
            message->kind == NODE_WITHDRAWN) &&
           (message->step != node->step || message->attempt != node->attempt);
}

static void hear_step(struct model *m, struct node *node, const struct node_message *message)
{
    switch (message->kind) {
    case NODE_SETTLED:
        hear_settled(node, message);
        break;
    case NODE_WITHDRAWN:
        hear_withdrawn(m, node, message);
        break;
    case NODE_MEASURE:
        hear_measure(m, node);
        break;
    case NODE_NORM:
    case NODE_HOLD:
        node->said_request = false;
        break;
    case NODE_DECIDED:
        assert_int_equal(node->state, TRAINING);
        check_sums(m, node);
        node->state = DECIDED;
        node->updating = true;
        break;
    case NODE_COMMIT:
        assert_int_equal(node->state, DECIDED);
        node->state = COMMITTING; /* weights that are gathered are copied again */
        break;
    case NODE_ABORTED: /* sent by nodes that have ended the commit, or an earlier abort */
        assert_int_not_equal(node->state, DECIDED);
        if (node->state == TRAINING)
            node->state = ABORTING;
        node->next_attempt = message->attempt;
        break;
    default:
        fail_msg("seed %" PRIu64 ": %s", m->seed, node_kind_name(message->kind));
    }
}

static void obey(struct model *m, struct node *node, const struct mail *mail)
{
    const struct node_message *message = &mail->message;

    if (is_stale(node, message))
        return;
    switch (message->kind) {
    case NODE_FORM:
        report(m, node, (struct node_message){.kind = NODE_FORMED});
        if (node == m->nodes)
            report(m, node, (struct node_message){.kind = NODE_WEIGHTS});
        break;
    case NODE_ENGINE:
        hear_engine(node, message);
        break;
    case NODE_TRAIN:
        node->trains = true;
        break;
    case NODE_EXCHANGE:
        await(node, message);
        if (node->connected)
            hear_exchange(m, node, message);
        break;
    case NODE_SPREAD:
    case NODE_GATHER:
        if (node->connected)
            add_motion(m, node, message);
        break;
    case NODE_SERVE:
        if (node->connected)
            hear_serve(m, node, message);
        break;
    case NODE_SAVE:
        hear_save(m, node, message);
        break;
    case NODE_PUBLISH:
        node->publishes = node->saves == message->tag;
        break;
    case NODE_SAVE_END:
        hear_save_end(node, message);
        break;
    case NODE_WANT_ENDED:
        node->others_stop = true;
        node->said_end = false;
        break;
    case NODE_MAY_STOP:
        hear_may_stop(m, node, message);
        break;
    default:
        hear_step(m, node, message);
        break;
    }
}

/* ---- what may happen ----------------------------------------------------------------------------------- */

static bool finish_commit(struct model *m, struct node *node)
{
    if (node->state != COMMITTING)
        return false;
    node->step++;
    node->said_end = false;
    begin_attempt(m, node);
    if (node->next_attempt > node->attempt)
        node->state = ABORTING;
    return true;
}

static bool finish_abort(struct model *m, struct node *node)
{
    if (node->state != ABORTING || is_exchanging(node))
        return false;
    node->attempt = node->next_attempt;
    begin_attempt(m, node);
    return true;
}

/* An engine connects when all engines of its generation are started. */
static bool connect_engine(struct model *m, struct node *node)
{
    uint64_t tags[ARRAY_SIZE(((struct mail *)NULL)->numbers)];
    size_t n = 0;

    for (unsigned i = 0; i < m->n; i++)
        if (m->nodes[i].generation != node->generation)
            return false;
    if (!node->started || node->connected)
        return false;
    for (unsigned k = 0; k < MAX_MOTIONS && n < ARRAY_SIZE(tags); k++)
        if (node->motions[k].live && !node->motions[k].serves)
            tags[n++] = node->motions[k].tag;
    node->connected = true;
    report(
        m, node,
        (struct node_message){.kind = NODE_CONNECTED, .generation = node->generation, .numbers = tags, .n_numbers = n});
    return true;
}

static bool break_engine(struct model *m, struct node *node)
{
    if (m->n_breaks == 0 || !node->started || draw(m, 24))
        return false;
    m->n_breaks--;
    if (draw(m, 3) == 0) {
        leader_reconnect(m->leader); /* nodes drop their unfinished motions */
        return true;
    }
    node->started = node->connected = false;
    drop_motions(node);
    report(m, node, (struct node_message){.kind = NODE_BROKEN, .generation = node->generation});
    return true;
}

static bool abort_step(struct model *m, struct node *node)
{
    if (m->n_aborts == 0 || !node->trains || node->state != TRAINING || draw(m, 24))
        return false;
    m->n_aborts--;
    report(m, node, (struct node_message){.kind = NODE_ABORT});
    return true;
}

static bool withdraw(struct model *m, struct node *node)
{
    if (m->n_withdrawals == 0 || !node->trains || node->state != TRAINING || node->said_request || node->withdraws ||
        draw(m, 4))
        return false;
    m->n_withdrawals--;
    node->withdraws = true;
    report(m, node, (struct node_message){.kind = NODE_WITHDRAW});
    return true;
}

static bool fetch(struct model *m, struct node *node)
{
    uint64_t param = 0;

    if (m->n_fetches == 0 || !node->trains || node->state != TRAINING || node->said_request || node->fetching)
        return false;
    m->n_fetches--;
    node->fetching = true;
    report(m, node,
           (struct node_message){
               .kind = NODE_FETCH, .digest = 1, .pass = FETCH_MASTER, .numbers = &param, .n_numbers = 1});
    return true;
}

static bool want_save(struct model *m, struct node *node)
{
    if (m->n_saves == 0 || !node->trains || draw(m, node->state == TRAINING ? 256 : 4))
        return false;
    m->n_saves--;
    report(m, node, (struct node_message){.kind = NODE_WANT_SAVE, .tag = ++m->last_token});
    return true;
}

/* Reports that the node has saved its part, or node 0 all parts. The leader must ignore a second report. */
static bool finish_save(struct model *m, struct node *node)
{
    if (!node->saves || draw(m, 4))
        return false;
    report(m, node,
           (struct node_message){.kind = NODE_SAVED,
                                 .tag = node->saves,
                                 .proceed = node->publishes,
                                 .text = draw(m, 16) == 0 ? "no space" : ""});
    return true;
}

static bool all_steps_are_taken(const struct model *m)
{
    for (unsigned i = 0; i < m->n; i++)
        if (m->nodes[i].step < STEPS)
            return false;
    return true;
}

/* Tells node 0 to stop at the end, because nothing is decided after that. Other nodes stop at any time, and return. */
static bool tell_to_stop(struct model *m, struct node *node)
{
    bool is_time = node == m->nodes ? all_steps_are_taken(m) : node->trains && m->n_stops > 0 && draw(m, 256) == 0;

    if (node->is_told || !is_time)
        return false;
    m->n_stops -= node != m->nodes;
    node->is_told = true;
    node->said_end = false;
    return true;
}

static bool report_end(struct model *m, struct node *node)
{
    if (!(node->is_told || node->others_stop) || node->said_end || (node->state != TRAINING && node->state != ABORTING))
        return false;
    node->said_end = true;
    report(m, node, (struct node_message){.kind = NODE_ENDED, .proceed = node->is_told});
    return true;
}

static bool finish_update(struct model *m, struct node *node)
{
    if (!node->updating)
        return false;
    node->updating = false;
    report(m, node, (struct node_message){.kind = NODE_UPDATED});
    return true;
}

static bool deliver(struct model *m, struct node *node, bool to_leader)
{
    if ((to_leader ? node->out.n : node->in.n) == 0)
        return false;
    if (to_leader)
        tell_leader(m, node);
    else
        obey(m, node, take(&node->in));
    return true;
}

enum { ACTS = 15 + PARCELS + MAX_MOTIONS };

static bool act(struct model *m, struct node *node, unsigned number)
{
    switch (number) {
    case 0:
    case 1:
        return deliver(m, node, number == 0);
    case 2:
        return finish_abort(m, node);
    case 3:
        return connect_engine(m, node);
    case 4:
        return break_engine(m, node);
    case 5:
        return abort_step(m, node);
    case 6:
        return fetch(m, node);
    case 7:
        return finish_update(m, node);
    case 8:
        return ask(m, node);
    case 9:
        return finish_commit(m, node);
    case 10:
        return withdraw(m, node);
    case 11:
        return want_save(m, node);
    case 12:
        return finish_save(m, node);
    case 13:
        return tell_to_stop(m, node);
    case 14:
        return report_end(m, node);
    default:
        number -= 15;
        return number < PARCELS ? collect(m, node, number) : progress(m, node, &node->motions[number - PARCELS]);
    }
}

/* Lets one random event happen. Return: false if none is possible. */
static bool happen(struct model *m)
{
    unsigned n = m->n * ACTS, first = (unsigned)draw(m, n);

    if (draw(m, 4) == 0) /* there are many acts and two queues, so messages get a better chance */
        first = (unsigned)(draw(m, m->n) * ACTS + draw(m, 2));
    for (unsigned i = 0; i < n; i++) {
        unsigned k = (first + i) % n;

        if (act(m, &m->nodes[k / ACTS], k % ACTS))
            return true;
    }
    return false;
}

/* ---- a run --------------------------------------------------------------------------------------------- */

/* Parcel 0 has two parts, all others have one. */
static struct layout *make_layout(unsigned world_size)
{
    static const uint64_t shape[1] = {64};
    struct layout_decl decls[PARCELS + 1];
    struct layout *layout;
    char names[PARCELS + 1];
    uint32_t bad;

    for (unsigned i = 0; i < ARRAY_SIZE(decls); i++) {
        names[i] = (char)('a' + i);
        decls[i] = (struct layout_decl){.name = &names[i],
                                        .name_len = 1,
                                        .group = MIN(PARCELS - i, (unsigned)PARCELS - 1),
                                        .trainable = true,
                                        .n_dims = 1,
                                        .shape = shape};
    }
    assert_int_equal(layout_new(&layout, decls, ARRAY_SIZE(decls), world_size, 1024, &bad), 0);
    assert_int_equal(layout->n_parcels, PARCELS);
    return layout;
}

static struct model *model_new(uint64_t seed)
{
    static const unsigned n_sources[MAX_NODES] = {1, 1, 1, 1};
    struct model *m = calloc(1, sizeof(*m));

    assert_non_null(m);
    m->seed = seed;
    m->n = 2 + (unsigned)draw(m, MAX_NODES - 1);
    m->stage = 1 + (unsigned)draw(m, 3);
    m->n_breaks = (unsigned)draw(m, 6);
    m->n_aborts = (unsigned)draw(m, 6);
    m->n_fetches = (unsigned)draw(m, 6);
    m->n_withdrawals = (unsigned)draw(m, 12);
    m->n_saves = (unsigned)draw(m, 12);
    m->n_stops = (unsigned)draw(m, 6);
    m->uneven = draw(m, 2);
    m->n_norms = m->uneven ? 0 : (unsigned)draw(m, 6);
    m->layout = make_layout(m->n);
    assert_int_equal(
        leader_new(
            &m->leader,
            &(struct leader_options){
                .n_nodes = m->n,
                .n_sources = n_sources,
                .stage = m->stage,
                .ops = {.say = on_say, .tell = on_tell, .judge = on_judge, .complain = on_complain, .userdata = m}}),
        0);
    assert_int_equal(leader_form(m->leader, m->layout), 0);
    for (unsigned i = 0; i < m->n; i++) {
        struct node *node = &m->nodes[i];

        node->in.mails = calloc(MAX_QUEUED, sizeof(struct mail));
        node->out.mails = calloc(MAX_QUEUED, sizeof(struct mail));
        assert_true(node->in.mails && node->out.mails);
        begin_attempt(m, node);
        report(m, node, (struct node_message){.kind = NODE_DECLARED});
    }
    return m;
}

static void model_free(struct model *m)
{
    for (unsigned i = 0; i < m->n; i++) {
        free(m->nodes[i].in.mails);
        free(m->nodes[i].out.mails);
    }
    leader_free(m->leader);
    layout_free(m->layout);
    free(m);
}

static bool is_over(const struct model *m)
{
    for (unsigned i = 0; i < m->n; i++)
        if (m->nodes[i].step < STEPS || m->nodes[i].saves || !m->nodes[i].may_stop)
            return false;
    return true;
}

/* Prints the state of all nodes when a run fails. */
static void print(const struct model *m)
{
    print_error("seed %" PRIu64 ", stage %u; the leader waits for %" PRIx64 "\n", m->seed, m->stage,
                leader_waits_for(m->leader));
    for (unsigned i = 0; i < m->n; i++) {
        const struct node *node = &m->nodes[i];

        print_error("node %u: state %d, step %" PRIu64 ".%u, generation %u%s%s%s%s\n", i, (int)node->state, node->step,
                    node->attempt, node->generation, node->connected ? ", connected" : "",
                    node->trains ? ", trains" : "", node->said_request ? ", has asked" : "",
                    node->fetching ? ", fetches" : "");
        for (unsigned p = 0; p < PARCELS; p++)
            print_error("  parcel %u: %u.%u of %u%s\n", p, node->parcels[p].cursor.micro_batch,
                        node->parcels[p].cursor.pass, node->n_micro_batches, node->parcels[p].kept ? ", kept" : "");
        for (unsigned k = 0; k < MAX_MOTIONS; k++)
            if (node->motions[k].live)
                print_error("  %s %" PRIu64 "%s\n", node_kind_name(node->motions[k].kind), node->motions[k].tag,
                            node->motions[k].serves ? ", again" : "");
    }
}

static void run(struct model *m)
{
    for (unsigned i = 0; !is_over(m); i++) {
        bool happened = happen(m);

        if (happened && i < MAX_EVENTS)
            continue;
        print(m);
        fail_msg("seed %" PRIu64 ": %s", m->seed, happened ? "it does not end" : "all wait for something");
    }
}

static void test_runs(void **state)
{
    const unsigned n_seeds = tests_seeds(40, 400);
    unsigned n_full = 0;

    (void)state;
    for (uint64_t seed = 0; seed < n_seeds; seed++) {
        struct model *m = model_new(seed);

        run(m);
        n_full += m->was_full;
        model_free(m);
    }
    assert_true(n_full > n_seeds / 10);
}

TEST_GROUP(leader_model)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

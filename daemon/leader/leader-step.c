/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The step as a transaction. When all nodes have asked for it and no parcel moves, each node adds up its squares. The
 * leader merges the sums, judges them once, and sends the verdict to all nodes. Before the verdict, an abort drops the
 * step on all nodes, and nodes ask again after a norm, a hold, or the return of a rank. After the verdict, the step can
 * only be committed.
 */

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/leader/leader-inside.h"

/* ---- requests ------------------------------------------------------------------------------------------ */

static bool any_asks(const struct leader *leader)
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (leader->nodes[i].step.wants_norm || (leader->nodes[i].step.asked && !leader_is_gone(&leader->nodes[i])))
            return true;
    return false;
}

/* Have all nodes asked, at least one of them with ranks, and is no parcel ready or moving? */
static bool all_are_through(const struct leader *leader)
{
    bool any = false;

    for (unsigned i = 0; i < leader->n_nodes; i++) {
        if (!leader->nodes[i].step.asked && !leader->nodes[i].step.wants_norm)
            return false;
        any |= leader->nodes[i].step.has_args || leader->nodes[i].step.wants_norm;
    }
    if (!any)
        return false;
    for (uint32_t p = 0; p < leader->layout->n_parcels; p++) {
        if (leader->parcels[p].motion.tag)
            return false;
        for (unsigned i = 0; i < leader->n_nodes; i++)
            if (leader->parcels[p].places[i].ready)
                return false;
    }
    return true;
}

void leader_try_step(struct leader *leader)
{
    if (leader->phase != LEADER_TRAINING || leader_ends(leader) || !any_asks(leader) || !all_are_through(leader))
        return;
    assert(leader->exchange.n_moving == 0);
    leader->phase = LEADER_MEASURING;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].step.summed = false;
    leader_say(leader, (struct node_message){.kind = NODE_MEASURE});
}

static uint8_t *copy_bytes(const uint8_t *bytes, size_t n)
{
    uint8_t *copy = malloc(n + 1);

    if (copy && n > 0)
        memcpy(copy, bytes, n);
    return copy;
}

/* Keeps the arguments of a request. Return: true; or false if memory is out and nothing was kept. */
static bool keep_request(struct node *node, const struct node_message *message)
{
    struct wire_hyper *groups = calloc(message->args.n_groups + 1, sizeof(*groups));

    node->step.n_bits_bytes = MIN(message->n_any_bytes, message->n_all_bytes);
    node->step.pushed_any = copy_bytes(message->pushed_any, node->step.n_bits_bytes);
    node->step.pushed_all = copy_bytes(message->pushed_all, node->step.n_bits_bytes);
    node->step.args = message->args;
    node->step.args.groups = groups;
    if (!groups || !node->step.pushed_any || !node->step.pushed_all) {
        leader_forget_request(node);
        return false;
    }
    if (message->args.n_groups > 0)
        memcpy(groups, message->args.groups, message->args.n_groups * sizeof(*groups));
    node->step.has_args = message->has_rank;
    node->step.proceed = message->proceed;
    return true;
}

void leader_hear_request(struct leader *leader, unsigned node, const struct node_message *message)
{
    struct node *n = &leader->nodes[node];

    if (message->pass < leader->n_all_backs)
        return; /* the node asked before it received the last BACK of all ranks, and will ask again */
    if (leader->phase != LEADER_TRAINING || n->step.asked || n->step.wants_norm) {
        leader->ops.complain(leader->ops.userdata, node, "ASKED: it has asked already");
        return;
    }
    leader_forget_request(n);
    if (message->kind == NODE_ASKED && !keep_request(n, message)) {
        leader_give_up(leader, 0, "node 0 is out of memory");
        return;
    }
    n->step.asked = message->kind == NODE_ASKED;
    n->step.wants_norm = message->kind == NODE_WANT_NORM;
    for (uint32_t p = 0; p < leader->layout->n_parcels; p++)
        leader_try_parcel(leader, p);
    leader_try_step(leader);
}

/* ---- ranks that are back ------------------------------------------------------------------------------- */

/* Has a sum been made or begun before the node reported whether it has gradients for it? */
static bool was_passed_over(const struct leader *leader, unsigned node)
{
    for (uint32_t p = 0; p < leader->layout->n_parcels; p++) {
        const struct leader_parcel *parcel = &leader->parcels[p];
        const struct place *place = &parcel->places[node];

        if (place->micro_batch != parcel->micro_batch
                ? place->micro_batch < parcel->micro_batch
                : place->pass < parcel->pass || (parcel->motion.tag && !leader_is_at(place, parcel)))
            return true;
    }
    return false;
}

static bool all_are_gone(const struct leader *leader)
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader_is_gone(&leader->nodes[i]))
            return false;
    return true;
}

/*
 * Handles a rank that left and is back. In LEADER_TRAINING the rank's node asks again, together with the rank. In other
 * phases the rank takes part when the phase ends. If all ranks had left, all of them are expected back, as on one node.
 * BACK is then sent in every phase, even if an abort has overtaken the report, but once, even if several nodes report.
 */
void leader_hear_back(struct leader *leader, unsigned node, const struct node_message *message)
{
    const struct node *n = &leader->nodes[node];
    bool trains = leader->phase == LEADER_TRAINING, is_timely = trains && leader_is_current(leader, message);
    bool all = (message->proceed && message->pass == leader->n_all_backs) || (is_timely && all_are_gone(leader));
    bool late = is_timely && message->forget;

    if (!all && !late && !(is_timely && (n->step.asked || n->step.wants_norm || n->step.wants_window)))
        return;
    for (unsigned i = 0; trains && i < leader->n_nodes; i++) {
        if (!all && i != node)
            continue;
        leader_forget_request(&leader->nodes[i]);
        late |= was_passed_over(leader, i);
    }
    leader->n_all_backs += all;
    leader_say(leader,
               (struct node_message){
                   .kind = NODE_BACK, .node = node, .pass = leader->n_all_backs, .proceed = all, .forget = late});
}

/* ---- sums ---------------------------------------------------------------------------------------------- */

static bool is_before(const struct node_finding *a, const struct node_finding *b)
{
    if (a->micro_batch != b->micro_batch)
        return a->micro_batch < b->micro_batch;
    if (a->param != b->param)
        return a->param < b->param;
    return a->elem < b->elem;
}

static void merge_bits(struct leader_merged *merged, const struct node *node)
{
    for (size_t k = 0; k < merged->n_bits_bytes; k++) {
        merged->pushed_any[k] |= k < node->step.n_bits_bytes ? node->step.pushed_any[k] : 0;
        merged->pushed_all[k] &= k < node->step.n_bits_bytes ? node->step.pushed_all[k] : 0;
    }
}

/* args: memory to which merged->args will point. */
static void merge(const struct leader *leader, struct leader_merged *merged, struct request_step *args)
{
    bool found_inf = false;

    exact_sum_reset(&merged->squares);
    for (unsigned i = 0; i < leader->n_nodes; i++) {
        const struct node *node = &leader->nodes[i];
        struct exact_sum squares = node->squares;

        exact_sum_merge(&merged->squares, &squares);
        if (node->finding.found && (!merged->finding.found || is_before(&node->finding, &merged->finding)))
            merged->finding = node->finding;
        merged->proceed |= node->step.proceed;
        merge_bits(merged, node);
        found_inf |= node->step.args.found_inf;
        if (node->step.has_args && !merged->args) {
            *args = node->step.args;
            merged->args = args;
        }
    }
    args->found_inf = found_inf;
}

/* ---- the verdict --------------------------------------------------------------------------------------- */

/* Sends the norm. Forgets all requests, because each node asks again when it has received the norm. */
static void say_norm(struct leader *leader, const struct exact_sum *squares)
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader_forget_request(&leader->nodes[i]);
    leader->phase = LEADER_TRAINING;
    leader_say(leader, (struct node_message){.kind = NODE_NORM, .norm = sqrt(exact_sum_round(squares))});
}

/* Sends the hold. The rank at fault asks again when it has handled the cause. */
static void say_hold(struct leader *leader, struct node_message hold)
{
    leader->phase = LEADER_TRAINING;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader_forget_request(&leader->nodes[i]); /* each node reports again */
    hold.kind = NODE_HOLD;
    leader_say(leader, hold);
}

static void decide(struct leader *leader, const struct leader_merged *merged)
{
    struct node_verdict verdict = {0};
    struct node_message hold = {0};

    assert(merged->args); /* a node with ranks has asked */
    if (!leader->ops.judge(leader->ops.userdata, merged, &verdict, &hold)) {
        say_hold(leader, hold);
        return;
    }
    verdict.pushed_any = merged->pushed_any;
    verdict.pushed_all = merged->pushed_all;
    verdict.n_any_bytes = verdict.n_all_bytes = merged->n_bits_bytes;
    verdict.finding = merged->finding;
    leader->applies = verdict.apply;
    leader->phase = LEADER_UPDATING;
    leader_say(leader, (struct node_message){.kind = NODE_DECIDED, .verdict = verdict});
}

static void all_are_summed(struct leader *leader)
{
    size_t n = leader->layout->n_params / 8 + 1;
    _cleanup_free_ uint8_t *any = calloc(n, 1), *all = malloc(n);
    struct leader_merged merged = {.pushed_any = any, .pushed_all = all, .n_bits_bytes = n};
    struct request_step args = {0};
    bool wants_norm = false;

    if (!any || !all) {
        leader_give_up(leader, 0, "node 0 is out of memory");
        return;
    }
    memset(all, 0xff, n);
    merge(leader, &merged, &args);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        wants_norm |= leader->nodes[i].step.wants_norm;
    if (wants_norm)
        say_norm(leader, &merged.squares);
    else
        decide(leader, &merged);
}

void leader_hear_sum(struct leader *leader, unsigned node, const struct node_message *message)
{
    struct node *n = &leader->nodes[node];

    if (leader->phase != LEADER_MEASURING)
        return;
    if (!node_exact_sum(message, &n->squares)) {
        leader->ops.complain(leader->ops.userdata, node, "SUM.bytes: not an exact sum");
        return;
    }
    n->finding = message->finding;
    n->step.summed = true;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].step.summed)
            return;
    all_are_summed(leader);
}

/* ---- update and commit --------------------------------------------------------------------------------- */

static void all_are_updated(struct leader *leader)
{
    if (leader->stage == 3 || !leader->applies) {
        leader_commit(leader);
        return;
    }
    leader->phase = LEADER_GATHERING;
    leader_start_motion(leader, &leader->weights, MAX(leader->layout->n_buckets, 1u));
    if (leader_all_are_connected(leader))
        leader_say(leader, (struct node_message){.kind = NODE_GATHER, .tag = leader->weights.tag});
}

void leader_try_updated(struct leader *leader)
{
    assert(leader->phase == LEADER_UPDATING);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].step.updated)
            return;
    all_are_updated(leader);
}

void leader_hear_updated(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (leader->phase != LEADER_UPDATING)
        return;
    leader->nodes[node].step.updated = true;
    leader_try_updated(leader);
}

void leader_commit(struct leader *leader)
{
    assert(leader->phase == LEADER_UPDATING || leader->phase == LEADER_GATHERING);
    assert(leader->exchange.n_moving == 0); /* a gradient that moves would be lost */
    leader_say(leader, (struct node_message){.kind = NODE_COMMIT});
    leader_forget_step(leader);
    leader->weights = (struct motion){0};
    leader->step++;
    leader->n_windows = 0;
    leader->phase = LEADER_TRAINING;
}

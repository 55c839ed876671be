/* SPDX-License-Identifier: Apache-2.0 */

/* Handles reports of nodes, and decides what all nodes do next: forming, fetches, and the end of motions. */

#include "daemon/leader/leader.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/device-wire.h"
#include "daemon/leader/leader-inside.h"

_Static_assert((int)LEADER_MAX_NODES == (int)CONFIG_MAX_NODES, "what config admits, a mask must hold");

static uint64_t all_nodes(const struct leader *leader)
{
    return leader->n_nodes == 64 ? UINT64_MAX : (UINT64_C(1) << leader->n_nodes) - 1;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

int leader_new(struct leader **out, const struct leader_options *options)
{
    struct leader *leader = calloc(1, sizeof(*leader));

    assert(options->n_nodes > 1 && options->n_nodes <= LEADER_MAX_NODES);
    if (!leader)
        return -ENOMEM;
    leader->n_nodes = options->n_nodes;
    leader->stage = options->stage;
    leader->partitions_all = options->partitions_all;
    leader->load.is_on = options->loads;
    leader->ops = options->ops;
    for (unsigned i = 0; i < options->n_nodes; i++) {
        assert(options->n_sources[i] > 0);
        leader->sources.n[i] = options->n_sources[i];
        leader->sources.first[i] = leader->sources.n_all;
        leader->sources.n_all += options->n_sources[i];
    }
    assert(leader->sources.n_all <= 64); /* merge_masks() has a bit for each source */
    *out = leader;
    return 0;
}

void leader_forget_fetches(struct leader *leader, unsigned node)
{
    for (struct leader_fetch **link = &leader->fetches; *link;) {
        struct leader_fetch *fetch = *link;

        if (node < leader->n_nodes && fetch->node != node) {
            link = &fetch->next;
            continue;
        }
        *link = fetch->next;
        free(fetch);
    }
}

static void drop_layout(struct leader *leader)
{
    free(steal_ptr(leader->written.arrays));
    leader_forget_fetches(leader, leader->n_nodes);
    if (leader->exchange.places)
        leader_forget_step(leader);
    free(steal_ptr(leader->parcels));
    free(steal_ptr(leader->exchange.places));
    free(steal_ptr(leader->exchange.queue));
    free(steal_ptr(leader->exchange.masks));
    leader->layout = NULL;
}

void leader_free(struct leader *leader)
{
    if (!leader)
        return;
    drop_layout(leader);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader_forget_request(&leader->nodes[i]);
    free(leader);
}

int leader_form(struct leader *leader, const struct layout *layout)
{
    struct leader_exchange *exchange = &leader->exchange;
    uint32_t most = 0;

    drop_layout(leader);
    assert(exchange->n_moving == 0);
    assert(exchange->n_queued == 0);
    leader->n_all_backs = 0;
    if (!layout)
        return 0;
    leader->parcels = calloc(layout->n_parcels + 1, sizeof(*leader->parcels));
    exchange->places = calloc((size_t)layout->n_parcels * leader->n_nodes + 1, sizeof(*exchange->places));
    for (uint32_t p = 0; p < layout->n_parcels; p++)
        most = MAX(most, layout->parcels[p].n_parts);
    exchange->masks = calloc(most + 1, sizeof(*exchange->masks));
    exchange->queue = calloc(layout->n_parcels + 1, sizeof(*exchange->queue));
    exchange->queue_first = 0;
    if (!leader->parcels || !exchange->places || !exchange->masks || !exchange->queue) {
        drop_layout(leader);
        return -ENOMEM;
    }
    for (uint32_t p = 0; p < layout->n_parcels; p++)
        leader->parcels[p].places = exchange->places + (size_t)p * leader->n_nodes;
    leader->layout = layout;
    return 0;
}

/* ---- motions ------------------------------------------------------------------------------------------- */

/* Notes that the node has finished the motion. Return: true if all nodes have finished it. */
static bool note_moved(struct leader *leader, struct motion *motion, unsigned node)
{
    assert(motion->tag != 0);
    motion->moved |= UINT64_C(1) << node;
    motion->arrived |= motion->moved;
    assert(!(motion->moved & ~all_nodes(leader)));
    return motion->moved == all_nodes(leader);
}

/* ---- forming ------------------------------------------------------------------------------------------- */

static void refuse_saying(struct leader *leader, struct node_message said)
{
    leader->phase = LEADER_DECLARING;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].declared = leader->nodes[i].formed = leader->nodes[i].connected = leader->nodes[i].kept.said =
            false;
    leader->weights = (struct motion){0};
    leader_forget_fetches(leader, leader->n_nodes);
    leader_forget_checkpoints(leader);
    leader_forget_step(leader);
    said.kind = NODE_REFUSE;
    leader_say(leader, said);
}

void leader_refuse(struct leader *leader, unsigned newcomer, const char *text)
{
    refuse_saying(leader, (struct node_message){.node = newcomer, .text = text});
}

void leader_refuse_with(struct leader *leader, unsigned code, const char *text)
{
    refuse_saying(leader, (struct node_message){.tag = code, .text = text});
}

/* Refuses all nodes, with the text of the node that cannot form the job. */
static void refuse_as(struct leader *leader, const struct node_message *message)
{
    refuse_saying(leader, (struct node_message){
                              .has_rank = true, .rank = message->node, .tag = message->tag, .text = message->text});
}

void leader_refuse_without(struct leader *leader, unsigned node, unsigned code, const char *why)
{
    bool any = false;

    for (unsigned i = 0; i < leader->n_nodes; i++)
        any |= leader->nodes[i].declared;
    if (any && leader->phase == LEADER_DECLARING)
        refuse_saying(leader, (struct node_message){.node = node, .has_rank = true, .tag = code, .text = why});
}

/* Makes all nodes show their manifests to all nodes, because each node reports to its ranks which entries differ. */
static void show_manifests(struct leader *leader, const char *why)
{
    leader->phase = LEADER_SHOWING;
    snprintf(leader->differ, sizeof(leader->differ), "%s", why);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].shown = false;
    leader_say(leader, (struct node_message){.kind = NODE_SHOW});
}

static void hear_manifest(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (leader->phase != LEADER_SHOWING)
        return;
    leader->ops.say(leader->ops.userdata, message);
    leader->nodes[node].shown = true;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].shown)
            return;
    leader_refuse(leader, 0, leader->differ);
}

/* Return: the first node that has a run id, or n_nodes if none has. */
static unsigned find_run(const struct leader *leader)
{
    unsigned i = 0;

    while (i < leader->n_nodes && !leader->nodes[i].declaration.run_id[0])
        i++;
    return i;
}

/* Return: true if all nodes may be of one run. Otherwise refuses all nodes and returns false. */
static bool check_runs(struct leader *leader)
{
    unsigned first = find_run(leader);
    char text[2 * WIRE_MAX_RUN_ID_BYTES + 128];

    for (unsigned i = first + 1; i < leader->n_nodes; i++) {
        const char *a = leader->nodes[i].declaration.run_id, *b = leader->nodes[first].declaration.run_id;

        if (!a[0] || strcmp(a, b) == 0)
            continue;
        snprintf(text, sizeof(text), "the ranks of node %u have the run id %s, those of node %u have %s", i, a, first,
                 b);
        leader_refuse_with(leader, E_OTHER_RUN, text);
        return false;
    }
    return true;
}

/* Return: the least room that any node wants. All nodes use it, because the layout depends on the room. */
static uint32_t find_gpu_room(const struct leader *leader)
{
    uint32_t least = CONFIG_GPU_ROOM_MICRO_BATCH;

    for (unsigned i = 0; i < leader->n_nodes; i++)
        least = MIN(least, leader->nodes[i].declaration.gpu_room);
    return least;
}

static void try_form(struct leader *leader)
{
    unsigned first = find_run(leader);
    char text[256];

    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].declared)
            return;
    if (!check_runs(leader))
        return;
    for (unsigned i = 1; i < leader->n_nodes; i++) {
        if (leader->nodes[i].declaration.digest == leader->nodes[0].declaration.digest)
            continue;
        snprintf(text, sizeof(text),
                 "the ranks of node %u declare other parameters than those of node 0 (digests %016" PRIx64
                 " and %016" PRIx64 ")",
                 i, leader->nodes[i].declaration.digest, leader->nodes[0].declaration.digest);
        show_manifests(leader, text);
        return;
    }
    leader->phase = LEADER_FORMING;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].formed = false;
    leader_forget_checkpoints(leader);
    leader->has_weights = false; /* a late report about the dropped job may have set it */
    leader->step = 0;
    leader->attempt = leader->n_windows = 0;
    leader_say(leader,
               (struct node_message){.kind = NODE_FORM,
                                     .digest = leader->nodes[0].declaration.digest,
                                     .pass = find_gpu_room(leader),
                                     .text = first < leader->n_nodes ? leader->nodes[first].declaration.run_id : ""});
}

static void hear_declared(struct leader *leader, unsigned node, const struct node_message *message)
{
    struct node *n = &leader->nodes[node];

    if (strlen(message->text) > WIRE_MAX_RUN_ID_BYTES) {
        leader->ops.complain(leader->ops.userdata, node, "DECLARED.text: not a run id");
        return;
    }
    if (message->generation == UINT32_MAX) {
        leader->ops.complain(leader->ops.userdata, node, "DECLARED.generation: there is none after it");
        return;
    }
    if (message->generation > leader->generation) { /* this leader is new; nodes may report tags of the old leader */
        leader->generation = message->generation;
        leader->last_tag = (uint64_t)leader->generation << 32;
    }
    n->declared = true;
    n->declaration.digest = message->digest;
    n->declaration.gpu_room = message->pass;
    strcpy(n->declaration.run_id, message->text);
    if (leader->phase == LEADER_DECLARING)
        try_form(leader);
}

/* ---- fetches ------------------------------------------------------------------------------------------- */

void leader_say_serve(struct leader *leader, const struct leader_fetch *fetch)
{
    leader_say(leader, (struct node_message){.kind = NODE_SERVE,
                                             .tag = fetch->tag,
                                             .node = fetch->node,
                                             .rank = fetch->rank,
                                             .digest = fetch->id,
                                             .pass = fetch->kind,
                                             .numbers = fetch->params,
                                             .n_numbers = fetch->n_params});
}

/*
 * Checks a fetch before node 0 announces it to all nodes. If a node could not carry out the fetch, every generation of
 * engines would fail. Return: NULL, or why the fetch is not valid.
 */
static const char *check_fetch(const struct leader *leader, unsigned node, const struct node_message *message)
{
    const struct layout *layout = leader->layout;
    bool gathers = message->pass == FETCH_GATHERED;

    if (message->n_numbers == 0)
        return "FETCH.numbers: no parameters";
    if (message->pass >= FETCH_N_KINDS || (message->pass == FETCH_PUBLISHED && leader->stage != 3) ||
        (gathers && !leader->partitions_all))
        return "FETCH.pass: no such kind";
    if (gathers && message->n_numbers > DEVICE_MAX_FETCHES)
        return "FETCH.numbers: more parameters than one order takes";
    if (gathers && message->rank - leader->sources.first[node] >= leader->sources.n[node]) /* each rank is a source */
        return "FETCH.rank: not of that node";
    for (size_t k = 0; k < message->n_numbers; k++)
        if (message->numbers[k] >= layout->n_params ||
            !(layout->params[message->numbers[k]].trainable || leader->partitions_all))
            return "FETCH.numbers: no such parameter";
    return NULL;
}

/* Does this leader know the fetch? A node asks again if its first request may be lost. */
static bool is_known(const struct leader *leader, unsigned node, uint64_t id)
{
    for (const struct leader_fetch *fetch = leader->fetches; fetch; fetch = fetch->next)
        if (fetch->node == node && fetch->id == id)
            return true;
    return false;
}

static void hear_fetch(struct leader *leader, unsigned node, const struct node_message *message)
{
    struct leader_fetch *fetch;
    const char *wrong;

    if (!leader->layout || leader->phase < LEADER_FORMING || is_known(leader, node, message->digest))
        return; /* the job is being dropped, or the node has repeated its request */
    wrong = check_fetch(leader, node, message);
    fetch = wrong ? NULL : malloc(sizeof(*fetch) + message->n_numbers * sizeof(fetch->params[0]));
    if (!fetch) {
        leader->ops.complain(leader->ops.userdata, node, wrong ? wrong : "FETCH: out of memory");
        return;
    }
    *fetch = (struct leader_fetch){.tag = leader->last_tag + 1,
                                   .id = message->digest,
                                   .node = node,
                                   .rank = message->rank,
                                   .kind = message->pass,
                                   .n_params = message->n_numbers,
                                   .next = leader->fetches};
    memcpy(fetch->params, message->numbers, message->n_numbers * sizeof(fetch->params[0]));
    leader->last_tag += message->n_numbers;
    leader->fetches = fetch;
    if (leader_all_are_connected(leader))
        leader_say_serve(leader, fetch); /* else leader_hear_connected() does it */
}

/* Ends the fetch with that tag. Return: false if no fetch has it. */
static bool end_fetch(struct leader *leader, unsigned node, uint64_t tag)
{
    for (struct leader_fetch **link = &leader->fetches; *link; link = &(*link)->next) {
        struct leader_fetch *fetch = *link;

        if (fetch->tag != tag || fetch->node != node)
            continue;
        *link = fetch->next;
        free(fetch);
        return true;
    }
    return false;
}

/* ---- reports ------------------------------------------------------------------------------------------- */

static void weights_have_moved(struct leader *leader)
{
    if (leader->phase == LEADER_GATHERING) {
        leader_commit(leader);
    } else if (leader->phase == LEADER_CLOSING) {
        leader_close_window(leader);
    } else if (leader->phase == LEADER_WRITING) {
        leader->weights = (struct motion){0};
        leader->phase = LEADER_STORING;
        leader_say(leader, (struct node_message){.kind = NODE_STORE});
    } else {
        assert(leader->phase == LEADER_SPREADING);
        leader->weights = (struct motion){0};
        leader->phase = LEADER_TRAINING;
        leader_say(leader, (struct node_message){.kind = NODE_TRAIN});
    }
}

static void hear_moved(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (message->tag == 0 || end_fetch(leader, node, message->tag))
        return;
    if (leader->weights.tag == message->tag) {
        if (!note_moved(leader, &leader->weights, node))
            return;
        weights_have_moved(leader);
        return;
    }
    if (message->parcel >= leader->layout->n_parcels || leader->parcels[message->parcel].motion.tag != message->tag)
        return; /* the motion of an aborted attempt */
    if (note_moved(leader, &leader->parcels[message->parcel].motion, node)) {
        leader_parcel_is_settled(leader, message->parcel);
        leader_try_step(leader);
    }
}

static void hear_undeclared(struct leader *leader, unsigned node, const struct node_message *message)
{
    leader->nodes[node].declared = false;
}

static void hear_unformed(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (leader->phase == LEADER_FORMING || leader->phase == LEADER_STARTING) /* STARTING: the node's GPUs failed */
        refuse_as(leader, message);
}

static void hear_formed(struct leader *leader, unsigned node, const struct node_message *message)
{
    leader->nodes[node].formed = true;
    if (leader->phase == LEADER_FORMING)
        leader_try_start(leader);
}

/* Return: true if the report comes from node 0, which has rank 0. Otherwise complains. */
static bool is_of_rank_0(struct leader *leader, unsigned node, const char *complaint)
{
    if (node != 0)
        leader->ops.complain(leader->ops.userdata, node, complaint);
    return node == 0;
}

static void hear_weights(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (!is_of_rank_0(leader, node, "WEIGHTS: rank 0 is not there"))
        return;
    leader->has_weights = true;
    leader_try_spread(leader);
}

/* Drops the run on all nodes, because an administrator has dropped it on one node. */
static void give_up_run(struct leader *leader, unsigned node)
{
    char text[96];

    if (leader->phase == LEADER_DECLARING)
        return;
    snprintf(text, sizeof(text), "zerodctl drop was called on node %u", node);
    leader_refuse(leader, node, text);
}

/* Ends the run. Node 0, which has rank 0, reports that the ranks of all nodes have left. */
static void hear_end_run(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (message->proceed) {
        give_up_run(leader, node);
        return;
    }
    if (!is_of_rank_0(leader, node, "END_RUN: rank 0 is not there"))
        return;
    if (leader->phase == LEADER_TRAINING || leader->phase == LEADER_WINDOW) /* else node 0 reports it again */
        refuse_saying(leader,
                      (struct node_message){.forget = true, .text = "its ranks have left it, and begin another run"});
}

static void hear_abort(struct leader *leader, unsigned node, const struct node_message *message)
{
    leader_abort_step(leader, message);
}

/* ---- what nodes tell each other ------------------------------------------------------------------------ */

static void pass_on(struct leader *leader, unsigned node, const struct node_message *message)
{
    leader->ops.say(leader->ops.userdata, message);
}

static void hear_value(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (message->generation == leader->generation)
        pass_on(leader, node, message);
}

static void hear_rank(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (message->pass >= leader->n_all_backs) /* else the node has not received the BACK of all ranks */
        pass_on(leader, node, message);
}

/* ---- the table ----------------------------------------------------------------------------------------- */

/* The time when a report is valid. Otherwise it is about an ended run or an aborted attempt, and is ignored. */
enum when { ALWAYS, LAID_OUT, TRAINING, THIS_ATTEMPT };

/* The reports that the leader handles. All other kinds are sent only by node 0 to the nodes. */
static const struct {
    void (*hear)(struct leader *leader, unsigned node, const struct node_message *message);
    enum when when;
} reports[NODE_N_KINDS] = {
    [NODE_DECLARED] = {hear_declared},
    [NODE_UNDECLARED] = {hear_undeclared},
    [NODE_MANIFEST] = {hear_manifest},
    [NODE_FORMED] = {hear_formed},
    [NODE_UNFORMED] = {hear_unformed},
    [NODE_WEIGHTS] = {hear_weights},
    [NODE_END_RUN] = {hear_end_run},
    [NODE_LOADED] = {leader_hear_loaded},
    [NODE_CONNECTED] = {leader_hear_connected},
    [NODE_BROKEN] = {leader_hear_broken},
    [NODE_KEPT] = {leader_hear_kept},
    [NODE_ENDED] = {leader_hear_ended},
    [NODE_WANT_SAVE] = {leader_hear_want_save},
    [NODE_SAVED] = {leader_hear_saved},
    [NODE_VALUE] = {hear_value},
    [NODE_RANK] = {hear_rank},
    [NODE_EVIDENCE] = {pass_on},
    [NODE_LOOK] = {pass_on},
    [NODE_STACK] = {pass_on},
    [NODE_WANT_SQUARES] = {pass_on},
    [NODE_SQUARES] = {pass_on},
    [NODE_FETCH] = {hear_fetch},
    [NODE_MOVED] = {hear_moved, LAID_OUT},
    [NODE_BACK] = {leader_hear_back, TRAINING},
    [NODE_READY] = {leader_hear_ready, THIS_ATTEMPT},
    [NODE_PASSED] = {leader_hear_passed, THIS_ATTEMPT},
    [NODE_WITHDRAW] = {leader_hear_withdraw, THIS_ATTEMPT},
    [NODE_ASKED] = {leader_hear_request, THIS_ATTEMPT},
    [NODE_WANT_NORM] = {leader_hear_request, THIS_ATTEMPT},
    [NODE_SUM] = {leader_hear_sum, THIS_ATTEMPT},
    [NODE_UPDATED] = {leader_hear_updated, THIS_ATTEMPT},
    [NODE_WINDOW] = {leader_hear_window, THIS_ATTEMPT},
    [NODE_WINDOW_END] = {leader_hear_window_end, THIS_ATTEMPT},
    [NODE_STORED] = {leader_hear_stored, THIS_ATTEMPT},
    [NODE_ABORT] = {hear_abort, THIS_ATTEMPT},
};

static bool is_time_for(const struct leader *leader, const struct node_message *message)
{
    enum when when = reports[message->kind].when;

    return (when == ALWAYS || leader->layout) && (when < TRAINING || leader->phase >= LEADER_TRAINING) &&
           (when < THIS_ATTEMPT || leader_is_current(leader, message));
}

void leader_hear(struct leader *leader, unsigned node, const struct node_message *message)
{
    assert(node < leader->n_nodes);
    assert((unsigned)message->kind < NODE_N_KINDS); /* node_unpack() refuses other kinds */
    if (!reports[message->kind].hear)
        leader->ops.complain(leader->ops.userdata, node, "a message that node 0 alone may send");
    else if (is_time_for(leader, message))
        reports[message->kind].hear(leader, node, message);
    leader_try_save(leader);
    leader_try_stop(leader);
}

void leader_lose(struct leader *leader, unsigned node, const char *why)
{
    bool forms =
        leader->phase == LEADER_FORMING || leader->phase == LEADER_STARTING || leader->phase == LEADER_SPREADING;

    assert(node < leader->n_nodes);
    leader->nodes[node].declared = false;
    if (forms) /* no weights can be lost */
        refuse_saying(leader, (struct node_message){.node = node, .proceed = true, .text = why});
    else if (leader->phase != LEADER_DECLARING)
        leader_refuse(leader, node, why);
}

/* ---- nodes that are waited for ------------------------------------------------------------------------- */

/* Return: a mask of the nodes that hold up parcels for which other nodes are ready. */
static uint64_t holding_back(const struct leader *leader)
{
    uint64_t mask = 0;

    for (uint32_t p = 0; leader->layout && p < leader->layout->n_parcels; p++) {
        const struct leader_parcel *parcel = &leader->parcels[p];
        uint64_t unsettled = 0;
        bool any = false;

        for (unsigned i = 0; !parcel->motion.tag && i < leader->n_nodes; i++) {
            any |= leader_is_at(&parcel->places[i], parcel);
            unsettled |= (uint64_t)!leader_is_settled(leader, parcel, i) << i;
        }
        mask |= any ? unsettled : 0;
    }
    return mask;
}

/* Return: a mask of the nodes that have not finished the motion of a parcel. */
static uint64_t receiving(const struct leader *leader)
{
    uint64_t mask = 0;

    for (uint32_t p = 0; leader->layout && p < leader->layout->n_parcels; p++)
        if (leader->parcels[p].motion.tag)
            mask |= all_nodes(leader) & ~leader->parcels[p].motion.moved;
    return mask;
}

uint64_t leader_waits_for(const struct leader *leader)
{
    uint64_t mask = leader->phase == LEADER_TRAINING ? holding_back(leader) : 0;

    if (leader->phase == LEADER_TRAINING && !mask)
        mask = receiving(leader);
    if (mask)
        return mask;
    for (unsigned i = 0; i < leader->n_nodes; i++) {
        const struct node *node = &leader->nodes[i];
        bool waits;

        switch (leader->phase) {
        case LEADER_SHOWING:
            waits = !node->shown;
            break;
        case LEADER_DECLARING:
            waits = !node->declared;
            break;
        case LEADER_RETURNING:
            waits = !node->kept.said;
            break;
        case LEADER_FORMING:
            waits = !node->formed;
            break;
        case LEADER_STARTING:
            waits = !node->connected ||
                    (leader_is_loading(leader) ? !node->checkpoint.said : i == 0 && !leader->has_weights);
            break;
        case LEADER_MEASURING:
            waits = !node->step.summed;
            break;
        case LEADER_UPDATING:
            waits = !node->step.updated;
            break;
        case LEADER_TRAINING:
            waits = !node->step.asked && !node->step.wants_norm && !node->step.wants_window;
            break;
        case LEADER_WINDOW:
            waits = !node->step.ends_window;
            break;
        case LEADER_STORING:
            waits = !node->step.stored;
            break;
        default:
            waits = !(leader->weights.moved >> i & 1);
            break;
        }
        mask |= (uint64_t)waits << i;
    }
    return mask;
}

const char *leader_waits_to(const struct leader *leader)
{
    static const char *const words[] = {
        [LEADER_DECLARING] = "to declare parameters",   [LEADER_SHOWING] = "to show what it declares",
        [LEADER_RETURNING] = "to say where it stands",  [LEADER_FORMING] = "to reserve memory",
        [LEADER_STARTING] = "to connect the engine",    [LEADER_SPREADING] = "to take over initial weights",
        [LEADER_TRAINING] = "to ask for the step",      [LEADER_MEASURING] = "to add up squares",
        [LEADER_UPDATING] = "to update partitions",     [LEADER_GATHERING] = "to get the new weights",
        [LEADER_WINDOW] = "to end the write window",    [LEADER_WRITING] = "to get what was written",
        [LEADER_STORING] = "to store what was written", [LEADER_CLOSING] = "to get the weights that were written",
    };

    _Static_assert(ARRAY_SIZE(words) == LEADER_CLOSING + 1, "a text for each phase");
    if (leader->phase == LEADER_STARTING && leader_all_are_connected(leader) && leader_is_loading(leader))
        return "to load the checkpoint";
    if (leader->phase == LEADER_STARTING && leader_all_are_connected(leader))
        return "to send the initial weights of rank 0";
    if (leader->phase == LEADER_TRAINING && holding_back(leader))
        return "to push gradients, or to end a backward";
    if (leader->phase == LEADER_TRAINING && receiving(leader))
        return "to get gradients that travel";
    return words[leader->phase];
}

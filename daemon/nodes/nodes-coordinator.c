/* SPDX-License-Identifier: Apache-2.0 */

/* The coordinator's tables for a job of several nodes: reports go to node 0, parcels go to the exchange. */

#include <assert.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "daemon/exchange/exchange.h"
#include "daemon/job/job.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/drop.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/nodes/nodes-inside.h"
#include "daemon/nodes/param-norm.h"
#include "daemon/nodes/remote-ranks.h"

static struct nodes *nodes_from(const struct coordinator *c)
{
    return container_of(c, struct nodes, coordinator);
}

/* ---- formation ----------------------------------------------------------------------------------------- */

static void free_nodes(struct coordinator *c)
{
    nodes_free(nodes_from(c));
}

static int form(struct coordinator *c)
{
    return nodes_form(nodes_from(c));
}

/*
 * Counts the pieces of the segments before EXCHANGE_WEIGHTS: staging, and bytes from other nodes. The state reserves
 * the weights. In a job on GPUs, the executor reserves what it needs of these segments.
 */
static uint32_t n_reserve_pieces(const struct coordinator *c)
{
    return segments_n_pieces(exchange_segments(nodes_from(c)->exchange), EXCHANGE_WEIGHTS);
}

static int reserve(struct coordinator *c, uint32_t piece)
{
    return segments_reserve(exchange_segments(nodes_from(c)->exchange), EXCHANGE_WEIGHTS, piece);
}

static struct diagnostic *compare_manifests(struct coordinator *c)
{
    const struct nodes *nodes = nodes_from(c);
    const struct job *job = nodes->job;
    const struct manifest *manifests[STEP_MAX_WORLD] = {NULL};
    unsigned rank = 0;

    assert(job->world.size <= ARRAY_SIZE(manifests));
    if (!nodes_manifest(nodes, 0))
        return NULL;
    for (unsigned node = 0; node < job->config->world.nodes.n_items; node++)
        for (unsigned i = 0; i < job->config->world.nodes.items[node].ranks; i++, rank++)
            manifests[rank] = job_is_own(job, rank) && job->ranks[rank].process.manifest.n > 0
                                  ? &job->ranks[rank].process.manifest
                                  : nodes_manifest(nodes, node);
    assert(rank == job->world.size); /* each rank has one entry */
    return cause_manifest(manifests, job->world.size);
}

static int init(struct coordinator *c, const struct request_init *request, const void *weights)
{
    return exchange_init(nodes_from(c)->exchange, request, weights);
}

static bool anybody_waits(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_FORM)
            return true;
    return false;
}

void nodes_hear_difference(struct nodes *nodes, unsigned node, const char *difference)
{
    struct job *job = nodes->job;
    struct diagnostic *diagnostic;

    if (job->phase != JOB_WAITING || job->run.drop_why)
        return;
    diagnostic = cause_nodes_differ(&(struct evidence_node){
        .at = job_at_forming(NULL),
        .node = node,
        .address = nodes_address_of(nodes, node),
        .why = difference,
        .here = nodes->self,
    });
    nodes_differ(nodes, node, diagnostic->code, diagnostic->text);
    if (anybody_waits(job))
        job_refuse_forming(job, diagnostic);
    else
        diagnostic_unref(diagnostic);
    job_todo(job);
}

static int repeat(struct coordinator *c, const void *packed, size_t n_bytes)
{
    return nodes_repeat(nodes_from(c), packed, n_bytes);
}

/* ---- ranks --------------------------------------------------------------------------------------------- */

static void tell(struct coordinator *c, bool tick)
{
    remote_ranks_tell(nodes_from(c)->remote_ranks, tick);
    nodes_report_end(nodes_from(c));
}

static bool holds_back(const struct coordinator *c)
{
    return nodes_hold_back(nodes_from(c));
}

static bool awaits(const struct coordinator *c, unsigned rank, uint32_t param)
{
    return remote_ranks_awaits(nodes_from(c)->remote_ranks, rank, param);
}

static bool is_cut_off(const struct coordinator *c)
{
    const struct nodes *nodes = nodes_from(c);

    return nodes->self != 0 && nodes->ops.reaches && !nodes->ops.reaches(nodes->ops.userdata, 0);
}

/*
 * Describes the nodes that the job waits for. Node 0 names these nodes. Every other node names node 0, which decides.
 * Return: true if the job waits for another node.
 */
static bool waits_elsewhere(const struct coordinator *c, char *dst, size_t size)
{
    const struct nodes *nodes = nodes_from(c);
    struct nodes_status status = nodes_status(nodes);
    size_t at = 0;

    if (status.node != 0) {
        if (dst)
            snprintf(dst, size, "node 0 (%s), which decides what comes next; it %s", nodes_address_of(nodes, 0),
                     is_cut_off(c) ? "is not reached" : "knows for whom it waits");
        return true;
    }
    for (unsigned i = 1; dst && i < status.n_nodes && at < size - 1; i++)
        if (status.waits_for >> i & 1)
            at += (size_t)snprintf(dst + at, size - at, "%snode %u (%s), %s", at ? "; " : "", i,
                                   nodes_address_of(nodes, i), status.waits_to);
    return status.waits_for & ~UINT64_C(1);
}

/* ---- parcels ------------------------------------------------------------------------------------------- */

static void complete(struct coordinator *c, const struct reduction *reduction)
{
    nodes_ready(nodes_from(c), reduction);
}

static void passed(struct coordinator *c, uint32_t parcel, uint32_t micro_batch)
{
    nodes_passed(nodes_from(c), parcel, micro_batch);
}

static void summed(struct coordinator *c, uint32_t parcel)
{
    exchange_summed(nodes_from(c)->exchange, parcel);
}

static void withdraw(struct coordinator *c)
{
    nodes_withdraw(nodes_from(c));
}

static bool withdraws(const struct coordinator *c)
{
    return nodes_withdraws(nodes_from(c));
}

static bool sends_slots(const struct coordinator *c, uint32_t parcel)
{
    return step_sends_slots(nodes_from(c)->job->step, parcel);
}

static bool owns_any(const struct coordinator *c, uint32_t parcel)
{
    return exchange_owns_any(nodes_from(c)->exchange, parcel);
}

static void lend(struct coordinator *c, uint32_t parcel, struct ring *ring)
{
    exchange_lend(nodes_from(c)->exchange, parcel, ring);
}

static void ring_is_gone(struct coordinator *c, const struct ring *ring)
{
    exchange_ring_is_gone(nodes_from(c)->exchange, ring);
}

static bool is_busy(const struct coordinator *c)
{
    return exchange_is_busy(nodes_from(c)->exchange);
}

/* ---- state between steps ------------------------------------------------------------------------------- */

static int fetch(struct coordinator *c, const struct fetch *what)
{
    return exchange_fetch(nodes_from(c)->exchange, what);
}

static int ask_norm(struct coordinator *c, struct job_rank *rank, uint32_t param)
{
    struct nodes *nodes = nodes_from(c);

    return param_norm_is_here(nodes->job, param) ? 1 : param_norm_ask(nodes, rank, param);
}

/* ---- reports ------------------------------------------------------------------------------------------- */

static void report_forming(struct nodes *nodes, const struct report *report)
{
    switch (report->kind) {
    case REPORT_DECLARED:
        nodes_declared(nodes, report->all_declared);
        break;
    case REPORT_FORMED:
        nodes_formed(nodes);
        break;
    case REPORT_UNFORMED:
        nodes_unformed(nodes, report->unformed.code, report->unformed.why);
        break;
    case REPORT_HAVE_WEIGHTS:
        nodes_have_weights(nodes);
        break;
    case REPORT_LOADED:
        nodes_loaded(nodes, report->loaded.found, report->loaded.step, report->loaded.digest);
        break;
    case REPORT_RESUMED:
        nodes_resumed(nodes);
        break;
    case REPORT_REPLAYS: /* nodes_report() reads survival.replay of the job */
        break;
    case REPORT_ADOPTED:
        nodes_go_on(nodes);
        break;
    case REPORT_DROPPING:
        exchange_cancel(nodes->exchange);
        break;
    case REPORT_DROPPED:
        nodes_drop(nodes);
        break;
    case REPORT_GIVE_UP:
        nodes_report(nodes, (struct node_message){.kind = NODE_END_RUN, .proceed = true});
        if (!nodes->leader) /* node 0 drops when it receives its own report, because the leader needs the layout */
            drop_all(nodes->job);
        break;
    default:
        assert(!"a report of another group");
    }
}

static void report_rank(struct nodes *nodes, const struct report *report)
{
    struct node_message message = {.has_rank = true, .rank = report->place.rank};

    switch (report->kind) {
    case REPORT_BACK:
        nodes_back(nodes, report->back.rank->rank, report->back.all, report->back.late);
        break;
    case REPORT_END_RUN:
        nodes_report(nodes, (struct node_message){.kind = NODE_END_RUN});
        break;
    case REPORT_LOOK:
        message.kind = NODE_LOOK;
        nodes_report(nodes, message);
        break;
    case REPORT_WHERE:
        message.kind = NODE_STACK;
        message.text = report->place.text;
        nodes_report(nodes, message);
        break;
    default:
        assert(!"a report of another group");
    }
}

static void report_step(struct nodes *nodes, const struct report *report)
{
    switch (report->kind) {
    case REPORT_WANT_NORM:
        nodes_want_norm(nodes);
        break;
    case REPORT_ASKED:
        nodes_asked(nodes);
        break;
    case REPORT_UPDATED:
        nodes_updated(nodes);
        break;
    case REPORT_ABORT:
        nodes_abort(nodes, report->abort.rank, report->abort.why, report->abort.reason);
        break;
    default:
        assert(!"a report of another group");
    }
}

static void report_window(struct nodes *nodes, const struct report *report)
{
    switch (report->kind) {
    case REPORT_WANT_WINDOW:
        nodes_want_window(nodes);
        break;
    case REPORT_WINDOW:
        exchange_window(nodes->exchange, report->window);
        break;
    case REPORT_WINDOW_END:
        nodes_end_window(nodes, report->window_end.edits, report->window_end.forget);
        break;
    case REPORT_STORED:
        nodes_stored(nodes);
        break;
    case REPORT_LACKS_MEMORY: /* the abort that follows ends the window on all nodes */
        break;
    default:
        assert(!"a report of another group");
    }
}

_Static_assert(REPORT_SAVED == REPORT_WANT_SAVE + 1, "report_save() takes all other reports for REPORT_SAVED");

static void report_save(struct nodes *nodes, const struct report *report)
{
    if (report->kind == REPORT_WANT_SAVE)
        nodes_want_save(nodes);
    else
        nodes_report(nodes, (struct node_message){.kind = NODE_SAVED,
                                                  .tag = report->saved.token,
                                                  .proceed = report->saved.whole,
                                                  .text = report->saved.why});
}

_Static_assert(REPORT_DEVICE_FAILED == REPORT_DEVICE_READY + 2, "report_device() takes all others for a failure");

/* Reports events of devices. Node 0 decides what follows a failure. */
static void report_device(struct nodes *nodes, const struct report *report)
{
    if (report->kind == REPORT_DEVICE_READY)
        nodes_devices_ready(nodes);
    else if (report->kind == REPORT_DEVICE_PUT)
        nodes_devices_put(nodes, report->put.key, report->put.value, report->put.n_bytes);
    else
        nodes_devices_failed(nodes, report->failed.why);
}

static bool report_to_node_0(struct coordinator *c, const struct report *report)
{
    static void (*const groups[])(struct nodes * nodes, const struct report *report) = {
        [REPORT_DECLARED... REPORT_GIVE_UP] = report_forming,
        [REPORT_BACK... REPORT_WHERE] = report_rank,
        [REPORT_WANT_NORM... REPORT_ABORT] = report_step,
        [REPORT_WANT_WINDOW... REPORT_STORED] = report_window,
        [REPORT_WANT_SAVE... REPORT_SAVED] = report_save,
        [REPORT_DEVICE_READY... REPORT_DEVICE_FAILED] = report_device,
    };

    assert((size_t)report->kind < ARRAY_SIZE(groups) && groups[report->kind]);
    groups[report->kind](nodes_from(c), report);
    return true;
}

/* ---- the tables ---------------------------------------------------------------------------------------- */

static const struct coordinator_ops ops = {
    .free = free_nodes,
    .report = report_to_node_0,
    .tell = tell,
    .form = form,
    .n_reserve_pieces = n_reserve_pieces,
    .reserve = reserve,
    .init = init,
    .compare_manifests = compare_manifests,
    .repeat = repeat,
    .holds_back = holds_back,
    .awaits = awaits,
    .waits_elsewhere = waits_elsewhere,
    .is_cut_off = is_cut_off,
    .fetch = fetch,
    .ask_norm = ask_norm,
};

static const struct parcels_ops parcels = {
    .complete = complete,
    .passed = passed,
    .summed = summed,
    .withdraw = withdraw,
    .withdraws = withdraws,
    .sends_slots = sends_slots,
    .owns_any = owns_any,
    .lend = lend,
    .ring_is_gone = ring_is_gone,
    .is_busy = is_busy,
};

int nodes_join(struct nodes **out, struct job *job, const struct nodes_ops *how)
{
    int r = nodes_new(out, job, how);

    if (r < 0)
        return r;
    (*out)->coordinator = (struct coordinator){.ops = &ops, .parcels = &parcels};
    job_join(job, &(*out)->coordinator);
    return 0;
}

struct nodes *nodes_of(const struct job *job)
{
    return job->coordinator->ops == &ops ? nodes_from(job->coordinator) : NULL;
}

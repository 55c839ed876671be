/* SPDX-License-Identifier: Apache-2.0 */

/* This node's reports to node 0 (proto/nodes.proto). */

#include <assert.h>
#include <sys/random.h>
#include <xxhash.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/layout/manifest.h"
#include "daemon/job/gpu-room.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/transaction/commit.h"
#include "daemon/memory/state-edits.h"
#include "daemon/nodes/nodes-inside.h"

void nodes_declared(struct nodes *nodes, bool declared)
{
    struct job *job = nodes->job;
    bool is_laid_out = job->phase == JOB_INITIALISING;
    uint64_t digest = is_laid_out ? job->kept.digest : manifest_digest(&job->ranks[job->world.first].process.manifest);

    if (nodes->said_declared == declared)
        return;
    nodes->said_declared = declared;
    nodes->said_unformed &= !declared;
    nodes_report(nodes, (struct node_message){
                            .kind = declared ? NODE_DECLARED : NODE_UNDECLARED,
                            .digest = declared ? digest : 0,
                            .generation = nodes->generation,
                            .pass = !declared     ? CONFIG_GPU_ROOM_NONE
                                    : is_laid_out ? job->config->zero.gpu_room
                                                  : gpu_room_wanted(job),
                            .text = declared && job->kept.run_id ? job->kept.run_id : "",
                        });
}

/* Only the first call reports. If GPUs have the state, the job forms the host's memory before the GPUs' memory. */
void nodes_formed(struct nodes *nodes)
{
    if (nodes->said_formed)
        return;
    nodes->said_formed = true;
    nodes_report(nodes, (struct node_message){.kind = NODE_FORMED});
}

void nodes_unformed(struct nodes *nodes, unsigned code, const char *why)
{
    nodes->said_unformed = code != 0; /* the ranks get the failure as a diagnostic */
    nodes_report(nodes, (struct node_message){.kind = NODE_UNFORMED, .tag = code, .text = why});
}

void nodes_evidence(struct nodes *nodes, unsigned rank, const struct request_evidence *evidence, uint64_t *digest)
{
    struct request request = {.type = REQUEST_EVIDENCE};
    _cleanup_free_ uint8_t *bytes = evidence ? malloc(NODE_MESSAGE_MAX_BYTES) : NULL;
    uint64_t last = *digest;
    int n = 0;

    if (bytes) {
        request.evidence = *evidence;
        n = MAX(wire_pack_request(&nodes->said, &request, bytes, NODE_MESSAGE_MAX_BYTES * 3 / 4), 0);
    }
    *digest = n > 0 ? XXH3_64bits(bytes, (size_t)n) : 0;
    if (*digest != last)
        nodes_report(nodes,
                     (struct node_message){
                         .kind = NODE_EVIDENCE, .has_rank = true, .rank = rank, .bytes = bytes, .n_bytes = (size_t)n});
}

void nodes_have_weights(struct nodes *nodes)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_WEIGHTS});
}

/* Reports an abort that no rank has asked for. */
static void ask_for_abort(struct nodes *nodes, const char *why)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_ABORT, .reason = why});
}

/*
 * Return: true if the caller must report the request now; false if it was reported before, or the job will repeat it
 * after ENGINE.
 */
static bool begin_request(struct nodes *nodes)
{
    bool begins = !nodes->said_request && !nodes->said_kept;

    nodes->said_request = true;
    return begins;
}

void nodes_asked(struct nodes *nodes)
{
    size_t n = job_bits_bytes(nodes->job);
    _cleanup_free_ uint8_t *any = malloc(n), *all = malloc(n);
    struct node_message message = {
        .kind = NODE_ASKED, .pass = nodes->job->kept.n_all_backs, .pushed_any = any, .pushed_all = all};

    if (!begin_request(nodes))
        return;
    if (!any || !all) {
        ask_for_abort(nodes, "out of memory for the list of pushed parameters");
        return;
    }
    job_find_pushed(nodes->job, any, all);
    message.n_any_bytes = message.n_all_bytes = n;
    job_describe_request(nodes->job, &message, nodes->verdict);
    nodes_report(nodes, message);
}

void nodes_want_norm(struct nodes *nodes)
{
    if (!begin_request(nodes))
        return;
    nodes_report(nodes, (struct node_message){.kind = NODE_WANT_NORM, .pass = nodes->job->kept.n_all_backs});
}

void nodes_want_window(struct nodes *nodes)
{
    if (!begin_request(nodes))
        return;
    nodes_report(nodes, (struct node_message){.kind = NODE_WINDOW});
}

void nodes_end_window(struct nodes *nodes, const struct state_edits *edits, bool forget)
{
    size_t n = edits ? state_edits_list(edits, NULL) : 0;
    _cleanup_free_ uint64_t *numbers = calloc(n + 1, sizeof(*numbers));

    if (!begin_request(nodes))
        return;
    if (!numbers) {
        ask_for_abort(nodes, "out of memory for the list of what was written");
        return;
    }
    if (edits)
        state_edits_list(edits, numbers);
    nodes_report(nodes,
                 (struct node_message){.kind = NODE_WINDOW_END, .numbers = numbers, .n_numbers = n, .forget = forget});
}

static void report_abort(struct nodes *nodes, int64_t rank, const char *why, const struct diagnostic *reason)
{
    nodes_report(nodes, (struct node_message){
                            .kind = NODE_ABORT,
                            .has_rank = rank >= 0,
                            .rank = (uint32_t)MAX(rank, (int64_t)0),
                            .text = why,
                            .reason = reason ? reason->text : "",
                            .cause_class = reason ? reason->cause_class : "",
                        });
}

void nodes_abort(struct nodes *nodes, int64_t rank, const char *why, struct diagnostic *reason)
{
    struct job *job = nodes->job;

    report_abort(nodes, rank, why, reason);
    if (job->abort.reason)
        diagnostic_unref(reason);
    else
        job->abort.reason = reason; /* kept until node 0 sends ABORTED */
}

/* Node 0 obeys only the first report, because that report begins another attempt. */
void nodes_abort_again(struct nodes *nodes)
{
    const struct job *job = nodes->job;
    const struct diagnostic *reason = job->abort.reason;

    if (reason)
        report_abort(nodes, reason->has_rank ? (int64_t)reason->rank : -1, "", reason);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_ABORT)
            report_abort(nodes, r, job->abort.why ? job->abort.why : "", NULL);
}

void nodes_back(struct nodes *nodes, unsigned rank, bool all, bool late)
{
    assert(job_is_own(nodes->job, rank)); /* hear_back() expects a rank of this node */
    if (!late && (nodes->holds_back || (!nodes->said_request && !all)))
        return;
    nodes->holds_back = true;
    nodes->back = rank;
    nodes->back_waits = nodes->said_kept && !late;
    nodes->job->kept.asks_all_back |= all;
    if (!nodes->back_waits)
        nodes_report(nodes,
                     (struct node_message){
                         .kind = NODE_BACK, .pass = nodes->job->kept.n_all_backs, .proceed = all, .forget = late});
}

/* Has this node reported the end of the open window? Until node 0 answers, no successor begins the window again. */
static bool has_ended_window(const struct nodes *nodes)
{
    return nodes->job->phase == JOB_WINDOW && nodes->said_request;
}

bool nodes_hold_back(const struct nodes *nodes)
{
    /* After KEPT, the step or window that the rank would join may be over. */
    return nodes->holds_back || nodes->job->kept.asks_all_back || nodes->said_kept || has_ended_window(nodes);
}

void nodes_end_request(struct nodes *nodes)
{
    nodes->said_request = nodes->holds_back = nodes->back_waits = false;
}

/* Sets nodes->masks. Return: true if every local rank has pushed every part. */
static bool fill_masks(struct nodes *nodes, const struct reduction *reduction)
{
    const struct step *step = reduction->step;
    uint32_t n_parts = step->layout->parcels[reduction->parcel].n_parts;
    bool whole = true;

    /* Between GPUs, each rank's gradient is sent separately. */
    for (uint32_t k = 0; step->ops->elsewhere && k < n_parts; k++) {
        nodes->masks[k] = reduction->masks[k];
        whole &= (unsigned)__builtin_popcountll(reduction->masks[k]) == step->n_local;
    }
    for (uint32_t k = 0; !step->ops->elsewhere && k < n_parts; k++) {
        nodes->masks[k] = 0;
        for (unsigned i = 0; i < step->n_pieces; i++) {
            unsigned first = step->pieces[i].first - step->first_local;
            uint64_t ranks = ((UINT64_C(2) << (step->pieces[i].n - 1)) - 1) << first;
            bool present = reduction->masks[k] & ranks;

            assert(first + step->pieces[i].n <= step->n_local);
            nodes->masks[k] |= (uint64_t)present << i;
            whole &= present;
        }
    }
    return whole;
}

void nodes_ready(struct nodes *nodes, const struct reduction *reduction)
{
    bool whole = fill_masks(nodes, reduction);

    assert(reduction->step == nodes->job->step);
    assert(reduction->parcel < nodes->job->layout->n_parcels);
    nodes_report(nodes, (struct node_message){
                            .kind = NODE_READY,
                            .parcel = reduction->parcel,
                            .micro_batch = reduction->micro_batch,
                            .pass = reduction->pass,
                            .numbers = nodes->masks,
                            .n_numbers = whole ? 0 : nodes->job->layout->parcels[reduction->parcel].n_parts,
                        });
}

void nodes_withdraw(struct nodes *nodes)
{
    if (nodes->withdraws)
        return;
    nodes->withdraws = true;
    nodes_report(nodes, (struct node_message){.kind = NODE_WITHDRAW});
}

bool nodes_withdraws(const struct nodes *nodes)
{
    return nodes->withdraws;
}

void nodes_parcel_is_moved(void *userdata, uint64_t tag, uint32_t parcel)
{
    struct nodes *nodes = userdata;

    if (nodes->job->phase == JOB_INITIALISING) {
        nodes->job->run.was_spread = true;
        job_record(nodes->job, NULL, JOURNAL_SPREAD, NULL, 0, NULL, 0);
    }
    nodes_report(nodes, (struct node_message){.kind = NODE_MOVED, .tag = tag, .parcel = parcel});
}

void nodes_loaded(struct nodes *nodes, bool found, uint64_t step, uint64_t digest)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_LOADED, .proceed = found, .tag = step, .digest = digest});
}

void nodes_resumed(struct nodes *nodes)
{
    nodes_parcel_is_moved(nodes, nodes->load_tag, 0);
}

/* The token distinguishes saves of the same step, because an earlier save may have failed. */
void nodes_want_save(struct nodes *nodes)
{
    uint64_t token = 0;

    if (nodes->said_want_save)
        return;
    nodes->said_want_save = true;
    while (token == 0)
        if (getrandom(&token, sizeof(token), 0) != sizeof(token))
            token = 0;
    nodes_report(nodes, (struct node_message){.kind = NODE_WANT_SAVE, .tag = token});
}

void nodes_ask_fetch(void *userdata, const struct exchange_service *asked)
{
    nodes_report(userdata, (struct node_message){.kind = NODE_FETCH,
                                                 .digest = asked->id,
                                                 .pass = asked->kind,
                                                 .rank = asked->rank,
                                                 .numbers = asked->params,
                                                 .n_numbers = asked->n_params});
}

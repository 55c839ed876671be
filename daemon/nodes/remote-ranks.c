/* SPDX-License-Identifier: Apache-2.0 */

/* Remote ranks: reports changes of this node's ranks, and keeps other nodes' reports in job->ranks. */

#include "daemon/nodes/remote-ranks.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/evidence.h"
#include "core/wire/wire-evidence.h"
#include "daemon/job/attendance.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/step-args.h"
#include "daemon/nodes/nodes-inside.h"
#include "daemon/nodes/nodes.h"

/* NODE_RANK.numbers, in this order. */
enum {
    HERE,
    LEFT,
    DECLARED,
    ASKED,
    WAIT,
    WAITED_MS,
    SILENT_MS,
    PID,
    LAST_REQUEST, /* 0: none; else its type */
    OPEN,
    N_ENDED,
    N_PUSHED,
    N_NUMBERS,
};

/* The data that was last reported about a rank. */
struct told {
    uint64_t numbers[N_NUMBERS];
    uint64_t step;
    uint32_t attempt;
    uint32_t n_pushed_open;
    uint64_t evidence; /* digest of the evidence; 0: none */
};

struct remote_ranks {
    struct nodes *nodes;
    struct job *job;
    struct told *told; /* per rank of this node */
    uint8_t **awaited; /* per rank of another node: a bit per awaited parameter; NULL outside a backward; owned */
};

int remote_ranks_new(struct remote_ranks **out, struct nodes *nodes)
{
    struct remote_ranks *remote = calloc(1, sizeof(*remote));

    if (!remote)
        return -ENOMEM;
    remote->nodes = nodes;
    remote->job = nodes->job;
    remote->told = calloc(job_n_local(nodes->job), sizeof(*remote->told));
    remote->awaited = calloc(nodes->job->world.size, sizeof(*remote->awaited));
    if (!remote->told || !remote->awaited) {
        remote_ranks_free(remote);
        return -ENOMEM;
    }
    *out = remote;
    return 0;
}

void remote_ranks_free(struct remote_ranks *remote)
{
    if (!remote)
        return;
    for (unsigned r = 0; remote->awaited && r < remote->job->world.size; r++)
        free(remote->awaited[r]);
    free(remote->awaited);
    free(remote->told);
    free(remote);
}

/* ---- telling ------------------------------------------------------------------------------------------- */

/* Finds the type of a request by the pointer to its name, because names of requests are static. */
static unsigned type_of(const char *request)
{
    for (unsigned type = 1; request && type < N_REQUEST_TYPES; type++)
        if (request_type_name((enum request_type)type) == request)
            return type;
    return 0;
}

static void collect_numbers(const struct job *job, const struct job_rank *rank, uint64_t *numbers)
{
    uint64_t now = job_now(job);

    memset(numbers, 0, N_NUMBERS * sizeof(*numbers));
    numbers[HERE] = rank->peer != NULL;
    numbers[LEFT] = rank->kept.left;
    numbers[DECLARED] = rank->process.declared;
    numbers[WAIT] = rank->wait;
    numbers[WAITED_MS] = rank->wait != WAIT_NONE ? (now - rank->wait_ns) / 1000000 : 0;
    numbers[SILENT_MS] = (now - rank->last_ns) / 1000000;
    numbers[PID] = (uint64_t)rank->kept.pid;
    numbers[LAST_REQUEST] = type_of(rank->last_request);
    if (job->layout) {
        const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];

        numbers[ASKED] = ledger->asked;
        numbers[OPEN] = ledger->open;
        numbers[N_ENDED] = ledger->n_ended;
        numbers[N_PUSHED] = ledger->n_pushed;
    }
}

/* Durations change all the time, so they are not compared. */
static bool is_news(const struct told *told, const struct told *now, bool tick)
{
    static const unsigned deciding[] = {HERE, LEFT, DECLARED, ASKED, N_ENDED};
    static const unsigned telling[] = {WAIT, PID, LAST_REQUEST, OPEN};
    bool news =
        told->step != now->step || told->attempt != now->attempt || (tick && told->n_pushed_open != now->n_pushed_open);

    for (size_t i = 0; i < ARRAY_SIZE(deciding); i++)
        news |= told->numbers[deciding[i]] != now->numbers[deciding[i]];
    for (size_t i = 0; tick && i < ARRAY_SIZE(telling); i++)
        news |= told->numbers[telling[i]] != now->numbers[telling[i]];
    return news;
}

static bool all_pushed(const struct job *job, const struct told *now)
{
    return now->numbers[N_PUSHED] == job->layout->n_parts;
}

/*
 * Return: a bit for each parameter, set if the rank must still push the parameter in its backward. NULL if the rank is
 * in no backward, or memory is out.
 */
static uint8_t *list_awaited(const struct job *job, const struct job_rank *rank)
{
    uint8_t *bits = job->layout && job->ledger.ranks[rank->rank].open ? calloc(job_bits_bytes(job), 1) : NULL;

    for (uint32_t p = 0; bits && p < job->layout->n_params; p++)
        bits[p / 8] |= (uint8_t)((unsigned)job_awaits(job, rank, p) << p % 8);
    return bits;
}

static void tell_rank(struct nodes *nodes, const struct job_rank *rank, const struct told *now)
{
    struct job *job = nodes->job;
    struct node_message message = {.kind = NODE_RANK,
                                   .has_rank = true,
                                   .rank = rank->rank,
                                   .pass = job->kept.n_all_backs,
                                   .numbers = now->numbers,
                                   .n_numbers = N_NUMBERS,
                                   .text = rank->kept.client ? rank->kept.client : ""};
    _cleanup_free_ uint8_t *pushed = job->layout ? calloc(job_bits_bytes(job), 1) : NULL;
    _cleanup_free_ uint8_t *awaited = list_awaited(job, rank);
    _cleanup_free_ struct wire_hyper *groups = job->layout ? calloc(job->layout->n_groups, sizeof(*groups)) : NULL;

    for (uint32_t p = 0; pushed && !all_pushed(job, now) && p < job->layout->n_params; p++)
        if (job->layout->params[p].trainable && job_has_pushed(job, rank->rank, p))
            pushed[p / 8] |= (uint8_t)(1 << p % 8);
    if (pushed && !all_pushed(job, now)) {
        message.pushed_any = pushed;
        message.n_any_bytes = job_bits_bytes(job);
    }
    if (awaited) {
        message.awaited = awaited;
        message.n_awaited_bytes = job_bits_bytes(job);
    }
    if (groups && now->numbers[ASKED])
        job_describe_args(job, &rank->request.args, &message.args, groups);
    nodes_report(nodes, message);
}

/* Reports the evidence of a rank, or that the rank's earlier evidence is void. */
static void tell_evidence(struct nodes *nodes, const struct job_rank *rank, uint64_t *digest)
{
    struct job *job = nodes->job;
    _cleanup_free_ uint32_t *ids = NULL;
    struct request_evidence evidence;

    if (rank->step.evidence.present)
        ids = calloc(job->layout->n_params + 1, sizeof(*ids));
    if (ids)
        rank_evidence_describe(&rank->step.evidence, job->layout->n_params, ids, &evidence);
    if (ids || *digest)
        nodes_evidence(nodes, rank->rank, ids ? &evidence : NULL, digest);
}

void remote_ranks_tell(struct remote_ranks *remote, bool tick)
{
    struct job *job = remote->job;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct told *told = &remote->told[r - job->world.first];
        struct told now = {.step = job->layout ? job->ledger.step : 0,
                           .attempt = job->layout ? job->ledger.attempt : 0,
                           .n_pushed_open = job->layout ? job->ledger.ranks[job->ranks[r].rank].n_pushed_open : 0};

        collect_numbers(job, &job->ranks[r], now.numbers);
        if (!is_news(told, &now, tick))
            continue;
        now.evidence = told->evidence;
        if (now.numbers[ASKED])
            tell_evidence(remote->nodes, &job->ranks[r], &now.evidence);
        *told = now;
        tell_rank(remote->nodes, &job->ranks[r], &now);
    }
}

void remote_ranks_repeat(struct remote_ranks *remote)
{
    for (unsigned r = 0; r < job_n_local(remote->job); r++)
        remote->told[r].attempt = UINT32_MAX;
}

/* ---- hearing ------------------------------------------------------------------------------------------- */

static void keep_progress(struct job *job, struct job_rank *rank, const struct node_message *message)
{
    struct ledger_rank *ledger = ledger_mirror(&job->ledger, rank->rank);
    bool all = message->n_any_bytes < job_bits_bytes(job);

    ledger->asked = message->numbers[ASKED];
    ledger->open = message->numbers[OPEN];
    ledger->n_ended = (uint32_t)message->numbers[N_ENDED];
    ledger->n_pushed = (uint32_t)message->numbers[N_PUSHED];
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (job->layout->params[p].trainable)
            ledger->pushed_in_step[layout_last_part(job->layout, p)] = all || (message->pushed_any[p / 8] >> p % 8 & 1);
    if (ledger->asked)
        job_keep_args(job, &rank->request.args, &message->args);
}

static void keep_awaited(struct remote_ranks *remote, const struct node_message *message)
{
    size_t n = message->n_awaited_bytes;
    uint8_t *bits = n > 0 && n == job_bits_bytes(remote->job) ? malloc(n) : NULL;

    assert(!remote->awaited[message->rank]);
    if (bits)
        memcpy(bits, message->awaited, n);
    remote->awaited[message->rank] = bits;
}

bool remote_ranks_awaits(const struct remote_ranks *remote, unsigned rank, uint32_t param)
{
    const uint8_t *bits = remote->awaited[rank];

    assert(rank < remote->job->world.size);
    assert(!bits || param < remote->job->layout->n_params);
    return bits && bits[param / 8] >> param % 8 & 1;
}

void remote_ranks_hear(struct remote_ranks *remote, const struct node_message *message)
{
    struct job *job = remote->job;
    const uint64_t *numbers = message->numbers;
    uint64_t now = job_now(job);
    struct job_rank *rank;
    bool left;

    if (message->rank >= job->world.size || message->n_numbers != N_NUMBERS || numbers[WAIT] > WAIT_ABORT ||
        numbers[LAST_REQUEST] >= N_REQUEST_TYPES || job_is_own(job, message->rank))
        return; /* a node receives its own reports, too */
    rank = &job->ranks[message->rank];
    left = numbers[LEFT] && !rank->kept.left;
    rank->rank = message->rank;
    rank->peer = numbers[HERE] ? rank : NULL; /* only compared with NULL */
    rank->kept.left = numbers[LEFT];
    rank->process.declared = numbers[DECLARED];
    rank->wait = (enum job_wait)numbers[WAIT];
    rank->wait_ns = now - MIN(numbers[WAITED_MS] * 1000000, now);
    rank->last_ns = now - MIN(numbers[SILENT_MS] * 1000000, now);
    rank->kept.pid = (int64_t)numbers[PID];
    rank->last_request = numbers[LAST_REQUEST] ? request_type_name((enum request_type)numbers[LAST_REQUEST]) : NULL;
    free(rank->kept.client);
    rank->kept.client = message->text[0] ? strdup(message->text) : NULL;
    free(steal_ptr(remote->awaited[message->rank]));
    if (job->layout && message->step == job->ledger.step && message->attempt == job->ledger.attempt) {
        keep_progress(job, rank, message);
        keep_awaited(remote, message);
    }
    if (left)
        job_stop_waiting(job);
}

static bool are_params(const struct job *job, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= job->layout->n_params)
            return false;
    return true;
}

void remote_ranks_hear_evidence(struct remote_ranks *remote, unsigned rank, const struct request_evidence *evidence)
{
    struct job *job = remote->job;

    if (!job->layout || rank >= job->world.size || job_is_own(job, rank))
        return;
    rank_evidence_reset(&job->ranks[rank].step.evidence);
    if (evidence && are_params(job, evidence->not_called, evidence->n_not_called) &&
        are_params(job, evidence->called, evidence->n_called))
        rank_evidence_set(&job->ranks[rank].step.evidence, evidence, job->layout->n_params);
}

void remote_ranks_forget(struct remote_ranks *remote)
{
    struct job *job = remote->job;

    for (unsigned r = 0; r < job->world.size; r++)
        if (job_is_own(job, r)) {
            remote->told[r - job->world.first].evidence = 0;
        } else {
            rank_evidence_reset(&job->ranks[r].step.evidence);
            free(steal_ptr(remote->awaited[r]));
        }
}

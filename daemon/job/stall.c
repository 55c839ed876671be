/* SPDX-License-Identifier: Apache-2.0 */

/* Finds ranks that wait too long, and ranks that do not come back. */

#include "daemon/job/stall.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "daemon/job/attendance.h"
#include "daemon/job/rank-lost.h"
#include "daemon/job/look.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/memory/journal.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/ledger/ledger.h"

enum {
    CROSSED_MS = 2000, /* picked: time for other ranks to end a backward */
    MAX_LOOKED_AT = 3, /* picked: maximum number of stacks in a text */
};

static uint64_t median_step_ns(const struct job *job)
{
    uint64_t sorted[ARRAY_SIZE(job->stats.times.recent_ns)];
    unsigned n = MIN(job->stats.times.n_recent, (unsigned)ARRAY_SIZE(sorted));

    for (unsigned i = 0; i < n; i++) {
        unsigned j = i;

        for (; j > 0 && sorted[j - 1] > job->stats.times.recent_ns[i]; j--)
            sorted[j] = sorted[j - 1];
        sorted[j] = job->stats.times.recent_ns[i];
    }
    return n ? sorted[n / 2] : 0;
}

/* Writes the ranks for which pick() holds, as "rank 0, 2". Return: their number. */
static unsigned list_ranks(const struct job *job, bool (*pick)(const struct job *, const struct job_rank *), char *dst,
                           size_t size)
{
    unsigned n = 0;
    size_t at = 0;

    for (unsigned r = 0; r < job->world.size; r++) {
        if (!pick(job, &job->ranks[r]))
            continue;
        at += (size_t)snprintf(dst + MIN(at, size - 1), size - MIN(at, size - 1), "%s%u", n ? ", " : "rank ", r);
        n++;
    }
    return n;
}

static bool is_waiting(const struct job *job, const struct job_rank *rank)
{
    (void)job;
    return rank->wait != WAIT_NONE;
}

/* Has the rank's process left, and does it wait to attach again? */
static bool comes_again(const struct job *job, const struct job_rank *rank)
{
    (void)job;
    return rank->again_ns > 0;
}

/* Do processes that have left wait for rank 0, which decides whether the run continues? */
static bool rank_0_is_awaited(const struct job *job)
{
    bool any = false;

    for (unsigned r = 0; r < job->world.size; r++) {
        if (!job->ranks[r].kept.left)
            return false;
        any |= job->ranks[r].again_ns > 0;
    }
    return any && !job->ranks[0].again_ns;
}

static bool is_blocking(const struct job *job, const struct job_rank *rank)
{
    if (!job->layout)
        return !rank->process.declared || rank->wait != WAIT_FORM;
    if (rank->rank == 0 && rank_0_is_awaited(job))
        return true;
    /* Without initial weights no rank can begin, so the other ranks wait even for a rank that has left. */
    return rank->wait == WAIT_NONE && (!rank->kept.left || !job->kept.has_weights) &&
           !job->ledger.ranks[rank->rank].asked;
}

/* Does the rank wait for an event that can come only after the open window has ended? */
static bool waits_behind_window(const struct job *job, const struct job_rank *rank)
{
    return job->phase == JOB_WINDOW && job_is_collective(rank->wait) && rank->wait != WAIT_WINDOW_BEGIN &&
           rank->wait != WAIT_WINDOW_END;
}

/*
 * Do ranks wait for each other? They do if they wait for different things, and no running work can end a wait. The end
 * of an open window is one of these things, even if no rank has asked for it.
 */
static bool is_deadlocked(const struct job *job)
{
    enum job_wait wait = WAIT_NONE;
    bool differ = false;

    if ((job->phase != JOB_TRAINING && job->phase != JOB_WINDOW) || job->work.n_under_way > 0 || job->work.n_io > 0 ||
        gather_is_busy(job))
        return false;
    for (unsigned r = 0; r < job->world.size; r++) {
        if (is_blocking(job, &job->ranks[r]))
            return false;
        if (job->ranks[r].wait == WAIT_NONE)
            continue;
        differ |= (wait != WAIT_NONE && job->ranks[r].wait != wait) || waits_behind_window(job, &job->ranks[r]);
        wait = job->ranks[r].wait;
    }
    return differ;
}

/* Were all ranks that others wait for attached once, and are all their processes gone? */
static bool all_are_gone(const struct job *job)
{
    bool any = false;

    for (unsigned r = 0; r < job->world.size; r++) {
        const struct job_rank *rank = &job->ranks[r];

        if (!is_blocking(job, rank))
            continue;
        if (rank->peer || !rank->kept.pid)
            return false;
        any = true;
    }
    return any;
}

/*
 * Return: the first waiting rank, or NULL. Attached ranks come first, because processes that have left wait for them.
 */
static const struct job_rank *first_waiting(const struct job *job)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (job->ranks[r].wait != WAIT_NONE)
            return &job->ranks[r];
    for (unsigned r = 0; r < job->world.size; r++)
        if (job->ranks[r].again_ns)
            return &job->ranks[r];
    return NULL;
}

static bool waits_like_first(const struct job *job, const struct job_rank *rank)
{
    return rank->wait != WAIT_NONE && rank->wait == first_waiting(job)->wait;
}

static void describe_blocking(const struct job *job, char *dst, size_t size)
{
    bool deadlocked = is_deadlocked(job);
    size_t at = 0;

    for (unsigned r = 0; r < job->world.size && at < size - 1; r++) {
        const struct job_rank *rank = &job->ranks[r];
        uint64_t ago_ms = (job_now(job) - rank->last_ns) / 1000000;

        if (deadlocked && rank->wait != WAIT_NONE && !waits_like_first(job, rank))
            at += (size_t)snprintf(dst + at, size - at, "%srank %u (pid %" PRId64 ", waits %s)", at ? "; " : "", r,
                                   rank->kept.pid, job_waits_for(job, rank));
        if (!is_blocking(job, rank))
            continue;
        if (!rank->peer)
            at += (size_t)snprintf(dst + at, size - at, "%srank %u (%s)", at ? "; " : "", r,
                                   rank->kept.pid ? "its process is gone" : "never attached");
        else
            at += (size_t)snprintf(dst + at, size - at,
                                   "%srank %u (pid %" PRId64 ", last message %s %" PRIu64 " ms ago)", at ? "; " : "", r,
                                   rank->kept.pid, rank->last_request ? rank->last_request : "none", ago_ms);
    }
    if (deadlocked && at == 0)
        snprintf(dst, size, "the end of the write window that is open");
}

/* Is a step or a window decided? Then no abort can end it. */
static bool is_decided(const struct job *job)
{
    return job->phase == JOB_UPDATING || job->phase == JOB_COMMITTING_WINDOW;
}

/* Has this node done its part of the decided step or window? */
static bool is_done_here(const struct job *job)
{
    return job->work.n_io == 0 && !window_is_busy(job->window);
}

/* Do all ranks of this node wait for other nodes? dst: receives the names of these nodes; may be NULL. */
static bool waits_elsewhere(const struct job *job, char *dst, size_t size)
{
    return (job->phase == JOB_WAITING || job->phase == JOB_TRAINING || (is_decided(job) && is_done_here(job))) &&
           coordinator_waits_elsewhere(job->coordinator, dst, size);
}

const char *job_waits_for(const struct job *job, const struct job_rank *rank)
{
    static const char *const waits[] = {
        [WAIT_FORM] = "to form the job",
        [WAIT_INIT] = "for initial weights",
        [WAIT_READY] = "for initial weights",
        [WAIT_SLOT] = "for a gradient slot",
        [WAIT_END] = "at the end of a micro-batch",
        [WAIT_OTHERS] = "in the step",
        [WAIT_STEP] = "in the step",
        [WAIT_NORM] = "for the gradient norm",
        [WAIT_GATHER] = "for gathered weights",
        [WAIT_READ] = "for state",
        [WAIT_WINDOW_BEGIN] = "to open a write window",
        [WAIT_WINDOW_END] = "to close a write window",
        [WAIT_WRITE] = "for room in a write window",
        [WAIT_SAVE] = "for a checkpoint",
        [WAIT_ABANDON] = "to give up a backward",
        [WAIT_ABORTED] = "for the abort",
        [WAIT_ABORT] = "for the abort",
    };

    _Static_assert(ARRAY_SIZE(waits) == WAITS_N_KINDS, "a text for each kind of wait");
    assert(rank->wait != WAIT_NONE);
    (void)job;
    return waits[rank->wait];
}

/* Have all ranks that others wait for done nothing in this step yet? */
static bool all_are_absent(const struct job *job)
{
    bool any = false;

    for (unsigned r = 0; r < job->world.size; r++) {
        const struct ledger_rank *ledger = &job->ledger.ranks[r];

        if (!is_blocking(job, &job->ranks[r]))
            continue;
        if (ledger->open || ledger->n_ended > 0)
            return false;
        any = true;
    }
    return any;
}

static bool rank_awaits(const struct job *job, unsigned rank, uint32_t param)
{
    bool local = rank >= job->world.first && rank < job->world.end;

    return local ? job_awaits(job, &job->ranks[rank], param) : coordinator_awaits(job->coordinator, rank, param);
}

/*
 * Lists the parameters that the first blocking rank inside a backward has not pushed yet. Return: their number; ids has
 * room for all parameters.
 */
static uint32_t find_awaited(const struct job *job, uint32_t *ids)
{
    uint32_t n = 0;

    for (unsigned r = 0; r < job->world.size; r++) {
        if (!is_blocking(job, &job->ranks[r]) || !job->ledger.ranks[r].open)
            continue;
        for (uint32_t p = 0; p < job->layout->n_params; p++)
            if (rank_awaits(job, r, p))
                ids[n++] = p;
        break;
    }
    return n;
}

/* Is the rank asked for its stack? It is asked if others wait for it, or if it waits for them in another call. */
static bool is_looked_at(const struct job *job, const struct job_rank *rank)
{
    return rank->peer &&
           (is_blocking(job, rank) || (is_deadlocked(job) && rank->wait != WAIT_NONE && !waits_like_first(job, rank)));
}

/*
 * Before a report, asks for the stacks of the ranks that others wait for. Return: whether all have answered or timed
 * out.
 */
static bool has_looked(struct job *job)
{
    bool is_awaited = false;

    for (unsigned r = 0, n = 0; r < job->world.size && n < MAX_LOOKED_AT; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (!is_looked_at(job, rank))
            continue;
        n++;
        is_awaited |= job->stall.has_asked ? look_is_awaited(job, rank) : look_ask(job, rank);
    }
    job->stall.has_asked = true;
    return !is_awaited;
}

/* Return: the stacks of these ranks, as a text that the caller frees. */
static struct strbuf describe_where(struct job *job)
{
    struct strbuf where = {0};

    for (unsigned r = 0, n = 0; r < job->world.size && n < MAX_LOOKED_AT; r++) {
        struct strbuf one = {0};

        if (!is_looked_at(job, &job->ranks[r]))
            continue;
        n++;
        if (look_describe(job, &job->ranks[r], &one))
            strbuf_add(&where, "%s%s", where.n_bytes > 0 ? "\n" : "", strbuf_text(&one));
        strbuf_deinit(&one);
    }
    job->stall.has_asked = false;
    return where;
}

static struct diagnostic *describe_stall(struct job *job, uint64_t since_ms, bool aborted, bool elsewhere)
{
    char ranks[256] = "", waiting[384], blocking[1024] = "";
    const struct job_rank *one = first_waiting(job);
    bool again = one && one->wait == WAIT_NONE;
    struct evidence_at at = {.rank = -1, .step = -1, .micro_batch = -1};
    _cleanup_free_ uint32_t *awaited = job->layout ? calloc(job->layout->n_params + 1, sizeof(*awaited)) : NULL;
    uint32_t n_awaited = awaited ? find_awaited(job, awaited) : 0;
    struct strbuf where = describe_where(job);
    struct diagnostic *diagnostic;

    if (one)
        at = job_at(job, one);
    if (one && one->wait == WAIT_END && at.micro_batch > 0)
        at.micro_batch--; /* the rank waits at the end of that micro-batch, which counts as ended already */
    list_ranks(job, again ? comes_again : is_deadlocked(job) ? waits_like_first : is_waiting, ranks, sizeof(ranks));
    snprintf(waiting, sizeof(waiting), "%s, %s", ranks, again ? "to attach again" : one ? job_waits_for(job, one) : "");
    if (elsewhere)
        (void)waits_elsewhere(job, blocking, sizeof(blocking));
    else
        describe_blocking(job, blocking, sizeof(blocking));
    diagnostic = cause_stalled(&(struct evidence_stall){
        .at = at,
        .waiting = waiting,
        .blocking = blocking,
        .where = where.n_bytes > 0 ? strbuf_text(&where) : NULL,
        .params = awaited,
        .n_params = n_awaited,
        .absent = job->kept.has_weights && all_are_absent(job),
        .since_ms = since_ms,
        .aborted = aborted,
        .forming = !job->kept.has_weights,
        .decided = is_decided(job),
        .deadlocked = is_deadlocked(job),
        .behind_window = is_deadlocked(job) && one && waits_behind_window(job, one),
        .gone = all_are_gone(job),
        .elsewhere = elsewhere,
        .cut_off = coordinator_is_cut_off(job->coordinator),
        .again = again,
    });
    strbuf_deinit(&where);
    return diagnostic;
}

/* Return: the only rank that the others wait for; -1 if there is not exactly one. */
static int64_t find_guilty(const struct job *job)
{
    bool deadlocked = is_deadlocked(job);
    int64_t guilty = -1;

    for (unsigned r = 0; r < job->world.size; r++) {
        if (deadlocked || !is_blocking(job, &job->ranks[r]))
            continue;
        if (guilty >= 0)
            return -1;
        guilty = r;
    }
    return guilty;
}

/*
 * Refuses the waiting ranks without an abort. Called if the step is decided, or only node 0 may abort it. The step
 * continues when the other nodes are back.
 */
static void refuse_waiting(struct job *job, struct diagnostic *diagnostic)
{
    job_keep(job, diagnostic);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait != WAIT_NONE)
            job_refuse(job, &job->ranks[r], diagnostic, false);
}

static void give_up_waiting(struct job *job, uint64_t since_ms, bool elsewhere)
{
    struct diagnostic *diagnostic = describe_stall(job, since_ms, true, elsewhere);

    if (is_decided(job) || (job->kept.has_weights && coordinator_is_cut_off(job->coordinator)))
        refuse_waiting(job, diagnostic);
    else if (job->kept.has_weights)
        job_abort(job, find_guilty(job), diagnostic);
    else
        job_refuse_forming(job, diagnostic); /* there is nothing to abort yet */
}

static void check_stall(struct job *job, uint64_t now)
{
    uint64_t warning_ns = job->config->diagnostics.stall_warning_ms * UINT64_C(1000000);
    uint64_t timeout_ns = job->config->diagnostics.stall_timeout_ms * UINT64_C(1000000);
    uint64_t longest = 0, again = 0; /* again: a wait to attach again, which no abort ends */
    bool blocked = false, cut_off = coordinator_is_cut_off(job->coordinator), elsewhere;

    assert(!job->layout || job->ledger.n_ranks == job->world.size);
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        if (job->ranks[r].wait != WAIT_NONE)
            longest = MAX(longest, now - job->ranks[r].wait_ns);
        if (job->ranks[r].again_ns)
            again = MAX(again, now - job->ranks[r].again_ns);
    }
    for (unsigned r = 0; !is_decided(job) && r < job->world.size; r++)
        blocked |= is_blocking(job, &job->ranks[r]); /* skipped if decided: other nodes' ranks may be answered */
    elsewhere = cut_off || (!blocked && !is_deadlocked(job) && waits_elsewhere(job, NULL, 0));
    if (MAX(longest, again) == 0 || !(blocked || is_deadlocked(job) || elsewhere)) {
        job->stall.interval_ns = 0;
        job->stall.has_asked = false;
        return;
    }
    if (job->abort.reason && !cut_off)
        return; /* an abort was requested, and node 0 must agree */
    /* If ranks wait for other nodes, only node 0 aborts, because it knows which node they wait for. */
    if (timeout_ns && longest > timeout_ns &&
        (is_decided(job) || cut_off || !(elsewhere && job->config->world.node != 0))) {
        if (has_looked(job))
            give_up_waiting(job, longest / 1000000, elsewhere);
        return;
    }
    longest = MAX(longest, again);
    if (!warning_ns || longest < MAX(warning_ns, 3 * median_step_ns(job)))
        return;
    if (job->stall.interval_ns && now - job->stall.reported_ns < job->stall.interval_ns)
        return;
    if (!has_looked(job))
        return;
    job->stall.interval_ns = MAX(job->stall.interval_ns * 2, warning_ns);
    job->stall.reported_ns = now;
    job_keep(job, describe_stall(job, longest / 1000000, false, elsewhere));
}

/*
 * Aborts the step if successors of dead ranks on two nodes wait for each other. When GPUs of several nodes add all
 * ranks' gradients at once, the gradients of a dead rank stay in its ring until all nodes have pushed the same parcels.
 * Its successor is formed only after that. So two ranks that died after they pushed different parcels would block each
 * other's successors.
 */
static void check_crossed(struct job *job, uint64_t now)
{
    if (!job->coordinator->sums_at_once || job->abort.reason)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        const struct job_rank *rank = &job->ranks[r];

        if (rank->wait != WAIT_FORM || !rank->rings[1] || collect_is_done(job, rank) ||
            now - rank->wait_ns < CROSSED_MS * UINT64_C(1000000))
            continue;
        job_abort(job, r,
                  cause_rank_lost(&(struct evidence_lost){
                      .at = job_at(job, rank),
                      .aborted = true,
                      .crossed = true,
                      .waited_ms = CROSSED_MS,
                  }));
        return;
    }
}

static void check_lost(struct job *job, uint64_t now)
{
    uint64_t timeout_ns = job->config->limits.reattach_timeout_ms * UINT64_C(1000000);
    char waiting[256];

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (!rank->kept.lost_ns || rank->peer || now - rank->kept.lost_ns < timeout_ns)
            continue;
        if (list_ranks(job, is_waiting, waiting, sizeof(waiting)) == 0)
            continue;
        rank->kept.lost_ns = now; /* after the abort, the ranks wait the full time again */
        job_abort(job, rank->rank,
                  cause_rank_lost(&(struct evidence_lost){
                      .at = job_at(job, rank),
                      .pid = rank->kept.pid,
                      .aborted = true,
                      .last_message = rank->last_request,
                      .waited_ms = timeout_ns / 1000000,
                  }));
        return;
    }
}

void job_tick(struct job *job)
{
    uint64_t now;

    coordinator_tell(job->coordinator, true);
    rank_lost_tick(job);
    now = job_now(job); /* after rank_lost_tick(), which may have recorded the time of a loss */
    journal_beat(job->run.survival.journal, now);
    check_lost(job, now);
    check_crossed(job, now);
    check_stall(job, now);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_SLOT)
            admit_settle(job, &job->ranks[r]);
    boundary_settle(job);
    save_settle(job);
    waits_look(job, job_now(job));
}

uint64_t job_rest_ns(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait != WAIT_NONE || job->ranks[r].again_ns)
            return 0; /* the wait may stall, and its time-out depends on the other ranks */
    return MIN(rank_lost_rest_ns(job), save_rest_ns(job));
}

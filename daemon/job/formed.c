/* SPDX-License-Identifier: Apache-2.0 */

/* Forms a rank: reserves its ring, and sends the descriptors of its segments with Formed. */

#include "daemon/job/formed.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/base/process-limit.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/budget/budget.h"
#include "core/diagnosis/cause.h"
#include "core/wire/progress.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"

/* A work that reserves the pages of a ring. The rank's process may die before the work ends. */
struct ring_start {
    struct work work;
    struct job *job;
    struct job_rank *rank;
    struct ring *ring;
    int result;
};

static void ring_start_run(struct work *work, uint32_t item)
{
    struct ring_start *start = container_of(work, struct ring_start, work);

    (void)item;
    start->result = segment_reserve(&start->ring->ring, 0, start->ring->ring.n_bytes);
    if (start->result == 0)
        start->result = segment_reserve(&start->ring->credit, 0, start->ring->credit.n_bytes);
    if (start->result == 0 && start->job->run.survival.journal)
        start->result = keep_confirm(KEEP_TIMEOUT_MS);
}

/* Refuses the rank, because it cannot have a ring. r: the reason, a negative errno. */
static void refuse_ring(struct job *job, struct job_rank *rank, int r)
{
    ring_orphan(steal_ptr(rank->rings[0]));
    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){.at = job_at_forming(rank),
                                                   .what = "ring of the rank",
                                                   .unit = "bytes",
                                                   .asked = job->executor->ring_bytes,
                                                   .fix = "free memory on this machine",
                                                   .limit = process_limit_met(r)}));
    if (rank->wait == WAIT_FORM)
        job_is_held(job, rank);
}

static void ring_start_done(struct work *work)
{
    struct ring_start *start = container_of(work, struct ring_start, work);
    struct job *job = start->job;
    struct ring *ring = start->ring;

    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (start->result == 0) {
        ring_credit_page(ring)->n_tickets = ring->n_tickets;
        atomic_store_explicit(&ring_credit_page(ring)->attempt, job->ledger.attempt, memory_order_release);
        ring_set_writing(ring, job->phase == JOB_UPDATING || job->phase == JOB_COMMITTING_WINDOW);
        ring->ready = true;
    } else if (start->rank->rings[0] == ring) {
        refuse_ring(job, start->rank, start->result);
    }
    ring_unhold(ring);
    free(start);
    job_todo(job);
}

static void ring_is_freed(void *userdata, const struct ring *ring)
{
    struct job *job = userdata;

    parcels_ring_is_gone(job->coordinator, ring);
}

static int make_ring(struct job *job, struct job_rank *rank)
{
    return ring_new(&rank->rings[0], &(struct ring_options){
                                         .rank = rank->rank,
                                         .incarnation = rank->kept.incarnation,
                                         .ring_bytes = job->executor->ring_bytes,
                                         .on_device = job->executor->on_gpus,
                                         .overflow_bytes = job->layout->arena_bytes,
                                         .n_parcels = job->layout->n_parcels,
                                         .n_tickets = budget_n_tickets(job->layout->n_parcels),
                                         .freed = ring_is_freed,
                                         .userdata = job,
                                     });
}

/* Makes the rank's ring, and starts to reserve its pages. Return: 0 or -errno. */
static int start_ring(struct job *job, struct job_rank *rank)
{
    _cleanup_free_ struct ring_start *start = calloc(1, sizeof(*start));
    int r;

    assert(rank->kept.incarnation > 0); /* the incarnation is part of the names of the kept segments */
    if (!start)
        return -ENOMEM;
    r = make_ring(job, rank);
    if (r < 0)
        return r;
    start->job = job;
    start->rank = rank;
    start->ring = rank->rings[0];
    start->work = (struct work){.run = ring_start_run, .done = ring_start_done, .n_items = 1};
    ring_hold(start->ring);
    job->work.n_io++;
    worker_post(job->pool, &steal_ptr(start)->work);
    return 0;
}

/*
 * Opens descriptors of the rank's segments. An empty segment has no descriptor, such as the overflow if no parameter is
 * trainable. Return: 0 or -errno.
 */
static int find_segments(const struct job *job, const struct job_rank *rank, struct executor_segments *found, size_t *n)
{
    const struct ring *ring = rank->rings[0];
    struct executor_segments all = {.segments[2] = {.kind = WIRE_SEGMENT_CREDIT, .n_bytes = ring->credit.n_bytes},
                                    .fds = {-1, -1, segment_open_ro(&ring->credit), -1, -1}};
    int r = 0;

    executor_segments(job->executor, rank->rank - job->world.first, ring, &all);
    found->gpu = all.gpu;
    for (size_t i = 0; i < EXECUTOR_SEGMENTS; i++) {
        if (all.segments[i].n_bytes == 0)
            continue;
        if (all.segments[i].kind == WIRE_SEGMENT_PUBLISHED && !rank->process.wants_published) {
            closep(&all.fds[i]);
            continue;
        }
        r = MIN(r, all.fds[i]);
        found->segments[*n] = all.segments[i];
        found->fds[(*n)++] = all.fds[i];
    }
    for (size_t i = 0; r < 0 && i < *n; i++)
        closep(&found->fds[i]);
    return r;
}

static void answer_formed(struct job *job, struct job_rank *rank)
{
    const struct ring *ring = rank->rings[0];
    struct executor_segments found;
    size_t n = 0;
    int r = find_segments(job, rank, &found, &n);

    assert(job->ledger.ranks[rank->rank].incarnation == rank->kept.incarnation); /* else every push is stale */
    if (r < 0) {
        refuse_ring(job, rank, r);
        return;
    }
    job_record(job, rank, JOURNAL_FORMED, NULL, 0, NULL, 0);
    rank->kept.formed = true;
    rank->kept.lost_ns = 0;
    job_answer(
        job, rank,
        &(struct reply){.type = REPLY_FORMED,
                        .formed =
                            {
                                .resumed = rank->kept.resumes,
                                .init_wanted = !job->kept.given_weights && rank->rank == 0,
                                .position = job_position(job, rank),
                                .n_tickets = ring->n_tickets,
                                .ring_bytes = ring->ring_bytes,
                                .digest = job->kept.digest,
                                .first_point = job->executor->on_gpus ? progress_first(rank->kept.incarnation) : 0,
                                .has_blob = rank->blob.data != NULL,
                                .blob = rank->blob.data,
                                .n_blob_bytes = rank->blob.n_bytes,
                                .loss_scale = job_loss_scale(job),
                                .bucket_elems = job->layout->bucket_elems,
                                .speculates = job->config->zero.spare_buckets > 0,
                                .segments = found.segments,
                                .n_segments = n,
                                .gpu = found.gpu,
                                .n_gpu_bytes = found.gpu ? WIRE_GPU_BYTES : 0,
                            }},
        found.fds, n);
}

int formed_find_ring(struct job *job, struct job_rank *rank)
{
    int r = make_ring(job, rank);

    if (r < 0)
        return r;
    rank->rings[0]->ready = rank->rings[0]->replays = true;
    return 0;
}

int formed_again(struct job *job, struct job_rank *rank)
{
    assert(job->run.survival.replay);
    ring_orphan(steal_ptr(rank->rings[1])); /* the predecessor's ended micro-batches are summed */
    rank->kept.formed = rank->process.declared = true;
    rank->kept.resumes = job->kept.has_weights || job->run.was_loaded;
    rank->kept.lost_ns = 0;
    return rank->rings[0] ? 0 : formed_find_ring(job, rank);
}

/*
 * Can the rank take part now? A successor waits until its predecessor's ended micro-batches are reduced, and its
 * predecessor's request for the step is served.
 */
static bool can_take_part(const struct job *job, const struct job_rank *rank)
{
    if (job->phase == JOB_INITIALISING) /* weights of a dead rank 0 must not overwrite its successor's */
        return job->work.n_inits == 0;
    if (coordinator_holds_back(job->coordinator))
        return false;
    return job_is_undecided(job) && !job->ledger.ranks[rank->rank].asked && collect_is_done(job, rank);
}

void formed_settle(struct job *job, struct job_rank *rank)
{
    int r;

    if (rank->wait != WAIT_FORM)
        return;
    if (rank->rings[1] && !collect_is_done(job, rank))
        return; /* the predecessor's ended micro-batches are still to be reduced */
    ring_orphan(steal_ptr(rank->rings[1]));
    if (!rank->rings[0]) {
        r = start_ring(job, rank);
        if (r < 0)
            refuse_ring(job, rank, r);
        return;
    }
    if (rank->rings[0]->ready && can_take_part(job, rank))
        answer_formed(job, rank);
}

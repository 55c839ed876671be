/* SPDX-License-Identifier: Apache-2.0 */

/* A formed rank's segments: its ring is reserved, and Formed hands out the descriptors. */

#include "daemon/job/formed.h"

#include <fcntl.h>

#include "core/base/base.h"
#include "core/base/open-files.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/budget/budget.h"
#include "core/diagnosis/cause.h"
#include "core/layout/plan.h"
#include "core/wire/device-wire.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "daemon/engines/device.h"
#include "daemon/engines/devices.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/ring.h"

/* Reserving the pages of a ring; the rank may be gone before it ends. */
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
}

static uint64_t own_ring_bytes(const struct job *job)
{
    bool overlap = job->config->zero.overlap_comm;

    return job->devices ? plan_device_ring_bytes(job->layout, overlap)
                        : plan_ring_bytes(job->layout, overlap,
                                          budget_ring_holds_all(job->config, job->layout, job_n_local(job)));
}

/* r: why it has none, a negative errno. */
static void refuse_ring(struct job *job, struct job_rank *rank, int r)
{
    ring_orphan(steal_ptr(rank->rings[0]));
    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){.at = job_at_forming(rank),
                                                   .what = "ring of the rank",
                                                   .unit = "bytes",
                                                   .asked = own_ring_bytes(job),
                                                   .fix = "free memory on this machine",
                                                   .open_files = open_files_if_short(r)}));
    if (rank->wait == WAIT_FORM)
        job_is_held(job, rank);
}

static void ring_start_done(struct work *work)
{
    struct ring_start *start = container_of(work, struct ring_start, work);
    struct job *job = start->job;
    struct ring *ring = start->ring;

    job->work.n_io--;
    if (start->result == 0) {
        ring_credit_page(ring)->n_tickets = ring->n_tickets;
        atomic_store_explicit(&ring_credit_page(ring)->attempt, job->ledger.attempt, memory_order_release);
        if (job->phase == JOB_UPDATING || job->phase == JOB_COMMITTING_WINDOW) /* odd while weights are being written */
            atomic_store_explicit(&ring_credit_page(ring)->generation, 1, memory_order_release);
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

/* Return: 0 or -errno. */
static int start_ring(struct job *job, struct job_rank *rank)
{
    _cleanup_free_ struct ring_start *start = calloc(1, sizeof(*start));
    int r;

    if (!start)
        return -ENOMEM;
    r = ring_new(&rank->rings[0], &(struct ring_options){
                                      .rank = rank->rank,
                                      .ring_bytes = own_ring_bytes(job),
                                      .on_device = job->devices != NULL,
                                      .overflow_bytes = job->layout->arena_bytes,
                                      .n_parcels = job->layout->n_parcels,
                                      .n_tickets = budget_n_tickets(job->layout->n_parcels),
                                      .freed = ring_is_freed,
                                      .userdata = job,
                                  });
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

enum { FORMED_SEGMENTS = 4 };

/* Descriptors of a rank's segments, or why there are none: a negative errno. */
static void host_segments(const struct job *job, const struct ring *ring, struct wire_segment *segments, int *fds)
{
    bool stage3 = job->config->zero.stage == 3;
    const struct segment *published = stage3 ? pool_segment(job->gathered) : &job->state->weights;

    segments[0] = (struct wire_segment){.kind = WIRE_SEGMENT_RING, .n_bytes = ring->ring.n_bytes};
    segments[1] = (struct wire_segment){.kind = WIRE_SEGMENT_OVERFLOW, .n_bytes = ring->overflow.n_bytes};
    segments[3] =
        (struct wire_segment){.kind = stage3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS, .n_bytes = published->n_bytes};
    fds[0] = segment_open_rw(&ring->ring);
    fds[1] = segment_open_rw(&ring->overflow);
    fds[3] = segment_open_ro(published);
}

static int duplicate(int fd)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

    return copy < 0 ? -errno : copy;
}

/* A handle of device memory is what it is: nobody can be given less than all of it. */
static void device_segments(const struct job *job, unsigned local, struct wire_segment *segments, int *fds)
{
    const struct device_keep *keep = devices_keep(job->devices);
    bool stage3 = job->config->zero.stage == 3;
    enum device_piece_kind published = stage3 ? DEVICE_POOL : DEVICE_WEIGHTS;

    segments[0] =
        (struct wire_segment){.kind = WIRE_SEGMENT_RING, .n_bytes = keep->n_bytes[local][DEVICE_RING], .cuda = true};
    segments[3] = (struct wire_segment){.kind = stage3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS,
                                        .n_bytes = keep->n_bytes[local][published],
                                        .cuda = true};
    fds[0] = duplicate(keep->fds[local][DEVICE_RING]);
    fds[3] = duplicate(keep->fds[local][published]);
}

static void answer_formed(struct job *job, struct job_rank *rank)
{
    const struct ring *ring = rank->rings[0];
    unsigned local = rank->rank - job->world.first;
    struct wire_segment segments[FORMED_SEGMENTS] = {
        [2] = {.kind = WIRE_SEGMENT_CREDIT, .n_bytes = ring->credit.n_bytes}};
    int fds[FORMED_SEGMENTS] = {-1, -1, segment_open_ro(&ring->credit), -1};
    struct reply reply = {
        .type = REPLY_FORMED,
        .formed =
            {
                .resumed = rank->resumes,
                .init_wanted = !job->run.given_weights && rank->rank == 0,
                .position = job_position(job, rank),
                .n_tickets = ring->n_tickets,
                .ring_bytes = ring->ring_bytes,
                .digest = job->run.digest,
                .has_blob = rank->blob.data != NULL,
                .blob = rank->blob.data,
                .n_blob_bytes = rank->blob.n_bytes,
                .loss_scale = job_loss_scale(job),
                .gpu = job->devices ? devices_keep(job->devices)->gpus[local] : NULL,
                .n_gpu_bytes = job->devices ? WIRE_GPU_BYTES : 0,
            },
    };
    struct wire_segment sent[FORMED_SEGMENTS];
    int sent_fds[FORMED_SEGMENTS];
    size_t n = 0;
    int r = 0;

    if (job->devices)
        device_segments(job, local, segments, fds);
    else
        host_segments(job, ring, segments, fds);
    /* A segment may be empty (no trainable parameter: no overflow): it has no descriptor. */
    for (size_t i = 0; i < ARRAY_SIZE(segments); i++) {
        if (segments[i].n_bytes == 0)
            continue;
        r = MIN(r, fds[i]);
        sent[n] = segments[i];
        sent_fds[n++] = fds[i];
    }
    if (r < 0) {
        for (size_t i = 0; i < n; i++)
            closep(&sent_fds[i]);
        refuse_ring(job, rank, r);
        return;
    }
    reply.formed.segments = sent;
    reply.formed.n_segments = n;
    rank->formed = true;
    rank->lost_ns = 0;
    job_answer(job, rank, &reply, sent_fds, n);
}

/* A successor waits until what its predecessor left behind is settled: ended micro-batches, a request for the step. */
static bool can_take_part(const struct job *job, const struct job_rank *rank)
{
    if (job->phase == JOB_INITIALISING) /* what a rank 0 that died had sent must not come after its successor's */
        return job->work.n_inits == 0;
    if (coordinator_holds_back(job->coordinator))
        return false;
    return (job->phase == JOB_TRAINING || job->phase == JOB_WINDOW) && !job->ledger.ranks[rank->rank].asked &&
           collect_is_done(job, rank);
}

void formed_settle(struct job *job, struct job_rank *rank)
{
    int r;

    if (rank->wait != WAIT_FORM)
        return;
    if (rank->rings[1] && !collect_is_done(job, rank))
        return; /* its predecessor's ended micro-batches are still to be reduced */
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

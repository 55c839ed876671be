/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The way of a push, as far as the loop goes:
 *
 *     is it well formed      parameter, size, dtype               (E1103, E1102)
 *     its slot               opened with the first push into it   (E1403)
 *     the ledger             admits or refuses; refused: nothing else changes
 *     its bucket             when the slot is full it may be complete: collect.c
 *
 * And of those who need a slot and have no room: ring, for a moment; then overflow, then E1401.
 */

#include <inttypes.h>
#include <stdio.h>

#include "daemon/base.h"
#include "daemon/job.h"

/* For a slot of the ring, before overflow is granted. Picked: some slices of the scheduler. */
enum { SLOT_PATIENCE_MS = 15 };

/* ---- opening a micro-batch ----------------------------------------------------------------------------- */

static enum diagnostic_code code_of(int verdict)
{
    switch (verdict) {
    case LEDGER_E_PARAM:
        return E_PARAMETER;
    case LEDGER_E_STALE:
        return E_STALE;
    case LEDGER_E_AFTER_BOUNDARY:
        return E_AFTER_BOUNDARY;
    case LEDGER_E_EARLY:
        return E_EARLY;
    default:
        return E_DUPLICATE;
    }
}

void job_begin_backward(struct job *job, struct job_rank *rank, const struct request_begin_backward *request)
{
    struct ledger_position next = ledger_next(&job->ledger, rank->rank);
    struct push_record record = {.incarnation = rank->incarnation,
                                 .step = request->step,
                                 .micro_batch = request->micro_batch,
                                 .time_ns = job_now(job)};
    char detail[96];
    int r;

    if (request->attempt < job->ledger.attempt || rank->abort_notice)
        return; /* of an aborted attempt; the next answer says so */
    if (request->step == next.step && request->micro_batch == next.micro_batch && !collect_is_done(job, rank) &&
        !job->ledger.ranks[rank->rank].open) {
        job_drop_peer(job, rank, "BeginBackward: the last EndBackward has not been answered yet");
        return;
    }
    r = ledger_begin(&job->ledger, rank->rank, request->step, request->micro_batch);
    rank->n_forwards = request->n_forwards;
    rank->n_backwards = request->n_backwards;
    if (r == LEDGER_ADMITTED)
        return;
    snprintf(detail, sizeof(detail), "backward of step %" PRIu64 ", micro-batch %u", request->step,
             request->micro_batch);
    record.sequence = 1; /* something was asked, though it was no push */
    job_fault_push(job, rank, code_of(r), NULL, &record, detail);
}

/* ---- a push -------------------------------------------------------------------------------------------- */

static struct push_record make_record(const struct job *job, const struct job_rank *rank,
                                      const struct request_push *request)
{
    return (struct push_record){
        .incarnation = rank->incarnation,
        .sequence = request->sequence,
        .step = request->step,
        .task = request->task,
        .time_ns = job_now(job),
        .attempt = request->attempt,
        .micro_batch = request->micro_batch,
        .param = request->param,
        .ordinal = request->ordinal,
        .depth = request->depth,
        .segment = request->segment,
        .call = request->call,
        .site = request->site,
        .flags = request->flags,
    };
}

/* Return: true when the gradient has the declared form; else the fault is noted. */
static bool has_declared_form(struct job *job, struct job_rank *rank, const struct request_push *request,
                              const struct push_record *record)
{
    static const char *const names[] = {"fp32", "bf16", "fp16"};
    const struct layout_param *param;
    uint64_t n_bytes;
    char detail[128];

    if (request->param >= job->layout->n_params || !job->layout->params[request->param].trainable) {
        snprintf(detail, sizeof(detail),
                 request->param >= job->layout->n_params ? "no parameter %u: the manifest has %u"
                                                         : "parameter %u of %u is frozen",
                 request->param, job->layout->n_params);
        job_fault_push(job, rank, E_PARAMETER, NULL, record, detail);
        return false;
    }
    param = &job->layout->params[request->param];
    n_bytes = param->n_elems * dtype_size(param->grad_dtype);
    if ((request->n_bytes && request->n_bytes != n_bytes) ||
        (request->dtype_plus_one && request->dtype_plus_one != param->grad_dtype + 1)) {
        snprintf(detail, sizeof(detail), "expected %" PRIu64 " bytes of %s, got %" PRIu64 " of %s", n_bytes,
                 names[param->grad_dtype], request->n_bytes ? request->n_bytes : n_bytes,
                 names[request->dtype_plus_one ? request->dtype_plus_one - 1 : param->grad_dtype]);
        job_fault_push(job, rank, E_GRADIENT, NULL, record, detail);
        return false;
    }
    return true;
}

/* Return: 0 and *slot (NULL when the push has no data), or positive: the connection is being dropped. */
static int open_slot(struct job *job, struct job_rank *rank, const struct request_push *request,
                     struct ring_slot **slot)
{
    const struct layout_param *param = &job->layout->params[request->param];
    const struct layout_bucket *bucket = &job->layout->buckets[param->bucket];
    int r;

    *slot = NULL;
    if (request->record_only)
        return 0;
    r = ring_open_slot(rank->rings[0],
                       &(struct ring_use){
                           .ticket = request->ticket,
                           .use = request->use,
                           .bucket = param->bucket,
                           .micro_batch = request->micro_batch,
                           .pass = request->pass,
                           .attempt = request->attempt,
                           .offset_bytes = request->offset_bytes,
                           .n_bytes = bucket->n_elems * dtype_size(bucket->grad_dtype),
                           .overflow = request->overflow,
                       },
                       slot);
    /* A retry may name a slot that was reduced and given back long ago. */
    if (r != 0 && request->sequence <= job->ledger.ranks[rank->rank].last_sequence)
        return 0;
    if (r != 0)
        job_drop_peer(job, rank,
                      r == RING_E_TICKET ? "Push.ticket: not free, or in use for another slot"
                                         : "Push.offset_bytes: outside the ring, or not granted");
    return r;
}

static void note_again(struct job *job, struct job_rank *rank, const struct push_record *record)
{
    struct fault *again = &rank->again;

    job->counters.accumulated++;
    if (!again->code) {
        again->code = E_DUPLICATE;
        again->first = ledger_entry(&job->ledger, rank->rank, record->param)->first;
        again->second = *record;
    }
    if (!again->diagnostic)
        job_fault_join(again, record->param);
}

static void admit(struct job *job, struct job_rank *rank, const struct push_record *record, struct ring_slot *slot,
                  uint16_t pass)
{
    uint32_t bucket = job->layout->params[record->param].bucket;

    if (!slot || slot->pass != pass) {
        job_drop_peer(job, rank, slot ? "Push.pass: not the pass of this push" : "Push.record_only: not a duplicate");
        return;
    }
    job->counters.admitted++;
    rank->n_pushes++;
    if (pass > 0)
        note_again(job, rank, record);
    slot->n_pushed++;
    if (slot->n_pushed == job->layout->buckets[bucket].n_params)
        collect_bucket(job, bucket);
}

static void refuse_duplicate(struct job *job, struct job_rank *rank, const struct push_record *record,
                             const struct request_push *request)
{
    const struct ledger_entry *entry = ledger_entry(&job->ledger, rank->rank, record->param);
    bool first = !rank->fault.code;
    uint64_t sum;

    job_fault_push(job, rank, E_DUPLICATE, &entry->first, record, NULL);
    if (first && request->record_only && ledger_find_sum(&job->ledger, rank->rank, record->param, 0, &sum)) {
        rank->fault.sums_known = true;
        rank->fault.sums_equal = sum == request->sum;
    }
    if (rank->on_duplicate == CONFIG_DUPLICATE_ABORT_STEP) {
        job_abort(job, rank->rank, diagnostic_ref(job_fault_diagnostic(job, rank, &rank->fault, false)));
        job_fault_reset(&rank->fault);
    }
}

/* A push that does not belong to the open micro-batch has opened a slot that nothing will come of. */
static void close_empty(struct job_rank *rank, struct ring_slot *slot)
{
    if (slot && slot->n_pushed == 0)
        ring_credit(rank->rings[0], slot);
}

void job_push(struct job *job, struct job_rank *rank, const struct request_push *request)
{
    struct push_record record = make_record(job, rank, request);
    struct ring_slot *slot;
    uint16_t pass = 0;
    int r;

    if (!has_declared_form(job, rank, request, &record) || open_slot(job, rank, request, &slot) != 0)
        return;
    if (rank->abort_notice && request->attempt >= job->ledger.attempt) {
        job_drop_peer(job, rank, "Push.attempt: newer than what this rank was told");
        return;
    }
    if (job->has_learnt && !job->learnt[request->param] && request->attempt == job->ledger.attempt) {
        job_fault_push(job, rank, E_GRAPH_CHANGED, NULL, &record, NULL);
        return;
    }
    r = ledger_push(&job->ledger, rank->rank, &record, &pass);
    switch (r) {
    case LEDGER_ADMITTED:
        admit(job, rank, &record, slot, pass);
        break;
    case LEDGER_REDO:
        if (!slot || slot->pass != pass) {
            job_drop_peer(job, rank, "Push.pass: not the pass of this push");
            break;
        }
        slot->redo = true;
        slot->n_pushed++;
        collect_verify(job, rank, slot, request->param, pass);
        break;
    case LEDGER_RETRY:
        job->counters.retried++;
        close_empty(rank, slot);
        break;
    case LEDGER_DROPPED:
        job->counters.dropped++;
        break;
    case LEDGER_E_DUPLICATE:
        refuse_duplicate(job, rank, &record, request);
        break;
    default:
        close_empty(rank, slot);
        job_fault_push(job, rank, code_of(r), NULL, &record, NULL);
        break;
    }
}

/* ---- room for a slot ----------------------------------------------------------------------------------- */

struct extent_start {
    struct work work;
    struct job *job;
    struct job_rank *rank;
    struct ring *ring;
    uint64_t offset_bytes, n_bytes;
    int result;
};

static uint64_t overflow_bytes(const struct job *job)
{
    uint64_t n = 0;

    for (unsigned r = 0; r < job->world_size; r++)
        for (size_t i = 0; i < ARRAY_SIZE(job->ranks[r].rings); i++)
            n += job->ranks[r].rings[i] ? job->ranks[r].rings[i]->overflow_bytes : 0;
    return n;
}

static void refuse_slot(struct job *job, struct job_rank *rank, uint64_t n_bytes, const char *what, uint64_t allowed)
{
    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){
                  .at = job_at(job, rank),
                  .what = what,
                  .unit = "bytes",
                  .asked = n_bytes,
                  .held = rank->rings[0]->overflow_bytes,
                  .allowed = allowed,
                  .fix = "push parameters in the same order on all ranks, end micro-batches, or raise limits.memory",
              }));
    if (rank->wait == WAIT_SLOT)
        job_is_held(job, rank);
}

/* Room or not: there is nothing left to name a slot by. */
static void refuse_ticket(struct job *job, struct job_rank *rank)
{
    uint32_t n = rank->rings[0]->n_tickets;

    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){
                  .at = job_at(job, rank),
                  .what = "gradient slots at a time",
                  .unit = "slots",
                  .asked = 1,
                  .held = n,
                  .allowed = n,
                  .fix = "push parameters in the same order on all ranks, or end micro-batches: that empties slots",
              }));
    job_is_held(job, rank);
}

static void grant(struct job *job, struct job_rank *rank, bool in_ring, uint64_t offset_bytes)
{
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_SLOT_GRANT,
                   .slot_grant = {.in_ring = in_ring,
                                  .offset_bytes = offset_bytes,
                                  .n_warnings = (uint32_t)job->counters.warnings},
               },
               NULL, 0);
}

static void extent_run(struct work *work, uint32_t item)
{
    struct extent_start *start = container_of(work, struct extent_start, work);

    (void)item;
    start->result = segment_reserve(&start->ring->overflow, start->offset_bytes, start->n_bytes);
}

static uint64_t wanted_bytes(const struct job *job, const struct job_rank *rank)
{
    const struct layout_bucket *bucket = &job->layout->buckets[rank->slot_wanted.bucket];

    return bucket->n_elems * dtype_size(bucket->grad_dtype);
}

static void extent_done(struct work *work)
{
    struct extent_start *start = container_of(work, struct extent_start, work);
    struct job *job = start->job;
    struct job_rank *rank = start->rank;

    job->n_io--;
    ring_reserved(start->ring, start->offset_bytes, start->result == 0);
    if (rank->rings[0] == start->ring) {
        rank->reserving = false;
        if (rank->wait == WAIT_SLOT && start->result == 0 && start->n_bytes >= wanted_bytes(job, rank))
            grant(job, rank, false, start->offset_bytes);
        else if (rank->wait == WAIT_SLOT && start->result == 0)
            admit_settle(job, rank); /* it was for a request that an abort has ended */
        else if (rank->wait == WAIT_SLOT)
            refuse_slot(job, rank, start->n_bytes, "gradient slots (the kernel gave no more memory)", 0);
    }
    ring_unhold(start->ring);
    free(start);
}

static void start_extent(struct job *job, struct job_rank *rank, uint64_t offset_bytes, uint64_t n_bytes)
{
    struct extent_start *start = calloc(1, sizeof(*start));

    if (!start) {
        ring_reserved(rank->rings[0], offset_bytes, false);
        refuse_slot(job, rank, n_bytes, "gradient slots (out of memory)", 0);
        return;
    }
    *start = (struct extent_start){
        .work = {.run = extent_run, .done = extent_done, .n_items = 1},
        .job = job,
        .rank = rank,
        .ring = rank->rings[0],
        .offset_bytes = offset_bytes,
        .n_bytes = n_bytes,
    };
    rank->reserving = true;
    ring_hold(start->ring);
    job->n_io++;
    worker_post(job->pool, &start->work);
}

/* A rank that has completed a later bucket but not this one has a parameter that comes late, or never. */
static bool find_late(const struct job *job, uint32_t *late_rank, uint32_t *late_param)
{
    for (uint32_t b = 0; b + 1 < job->layout->n_buckets; b++) {
        const struct layout_bucket *bucket = &job->layout->buckets[b];

        for (unsigned r = 0; r < job->world_size; r++) {
            const struct ledger_rank *ledger = &job->ledger.ranks[r];
            const struct layout_bucket *next = &job->layout->buckets[b + 1];
            bool later = true;

            for (uint32_t i = 0; i < next->n_params; i++)
                later &= ledger->entries[job->layout->bucket_params[next->first_param + i]].n_pushed > 0;
            for (uint32_t i = 0; later && ledger->open && i < bucket->n_params; i++) {
                *late_param = job->layout->bucket_params[bucket->first_param + i];
                *late_rank = r;
                if (ledger->entries[*late_param].n_pushed == 0)
                    return true;
            }
        }
    }
    return false;
}

static void warn_late(struct job *job)
{
    struct diagnostic *d;
    uint32_t rank, param;

    if (job->overflow_warned_step == job->ledger.step + 1 || !find_late(job, &rank, &param))
        return;
    job->overflow_warned_step = job->ledger.step + 1;
    d = diagnostic_new(E_QUOTA, "gradients wait for a late parameter");
    d->warning = true;
    diagnostic_at(d, rank, (int64_t)job->ledger.step, job->ledger.ranks[rank].n_ended);
    diagnostic_params(d, job->layout, &param, 1);
    diagnostic_field(d, "cause",
                     "the rank has pushed all of a later bucket, but not this parameter: its bucket %u "
                     "stays open, and gradients behind it take further memory",
                     job->layout->params[param].bucket);
    diagnostic_field(d, "fix", "freeze the parameter if it is not used, or declare it where its gradient comes");
    diagnostic_field(d, "state", "nothing was refused; the numbers are the same");
    job_keep(job, diagnostic_finish(d));
}

/* A slot is full, and its bucket waits for ranks that are behind. */
static bool has_full_slot(const struct job *job, const struct ring *ring)
{
    for (uint32_t i = 0; ring->n_held > 0 && i < ring->n_tickets; i++) {
        const struct ring_slot *slot = &ring->slots[i];

        if (slot->held && !slot->overflow && !slot->redo &&
            slot->n_pushed == job->layout->buckets[slot->bucket].n_params)
            return true;
    }
    return false;
}

/*
 * A rank that is ahead by a whole ring gains nothing by more memory when the others are about to follow, and
 * loses time: fresh pages, out of every cache. Once in a micro-batch it finds out that they are not.
 */
static bool is_patient(struct job *job, struct job_rank *rank)
{
    if (rank->impatient || !has_full_slot(job, rank->rings[0]))
        return false;
    rank->impatient = job_now(job) - rank->wait_ns >= SLOT_PATIENCE_MS * UINT64_C(1000000);
    if (!rank->impatient)
        job->ops.soon(job->ops.userdata, SLOT_PATIENCE_MS);
    return !rank->impatient;
}

void admit_settle(struct job *job, struct job_rank *rank)
{
    uint64_t n_bytes = wanted_bytes(job, rank), offset, extent_bytes;
    struct memory_headroom headroom;
    int r;

    if (rank->wait != WAIT_SLOT || rank->reserving || job_is_held(job, rank))
        return;
    if (rank->slot_credited) { /* perhaps after the client looked */
        rank->slot_credited = false;
        grant(job, rank, true, 0);
        return;
    }
    if (ring_credit_is_near(rank->rings[0]) || is_patient(job, rank))
        return;
    if (rank->rings[0]->n_held == rank->rings[0]->n_tickets) {
        refuse_ticket(job, rank);
        return;
    }
    r = ring_grant(rank->rings[0], n_bytes, &offset, &extent_bytes);
    if (r < 0) {
        refuse_slot(job, rank, n_bytes, "gradient slots", rank->rings[0]->overflow.n_bytes);
        return;
    }
    warn_late(job);
    if (r == 0) {
        grant(job, rank, false, offset);
        return;
    }
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (job->memory.used + overflow_bytes(job) > job->memory.limit || extent_bytes > headroom.cgroup_bytes ||
        extent_bytes > headroom.available_bytes) {
        ring_reserved(rank->rings[0], offset, false);
        refuse_slot(job, rank, n_bytes, "gradient slots (limits.memory, cgroup or free memory)", job->memory.limit);
        return;
    }
    start_extent(job, rank, offset, extent_bytes);
}

void job_slot_request(struct job *job, struct job_rank *rank, const struct request_slot_request *request)
{
    if (request->bucket >= job->layout->n_buckets) {
        job_drop_peer(job, rank, "SlotRequest.bucket: no such bucket");
        return;
    }
    rank->slot_wanted = *request;
    job_wait(job, rank, WAIT_SLOT);
    admit_settle(job, rank);
}

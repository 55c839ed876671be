/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The loop thread checks a push in stages:
 *
 *     form               parameter, size, dtype               (E1103, E1102)
 *     slot               opened with the first push into it   (E1403)
 *     ledger             admits or refuses the push; a refusal changes nothing else
 *     parcel             may be complete when the slot is full (collect.c)
 *
 * A large gradient is pushed in parts, in order, one Push each, with no other push in between. The judgement on the
 * first part holds for all parts. If the last parts are not pushed, because there was no room for a slot, the
 * micro-batch is torn. A torn micro-batch can be given up, but not ended.
 *
 * A rank that needs a slot waits a moment for a slot of its ring. Then it gets an extent of overflow memory, or E1401.
 */

#include "daemon/job/transaction/admit.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/progress.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/job/transaction/step-args.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"
#include "kernels/dtype.h"

/*
 * How long a rank waits for a slot of the ring before it gets overflow memory. Picked: longer than ranks usually
 * differ. If the previous wait timed out, only some slices of the scheduler.
 */
enum { SLOT_PATIENCE_MS = 250, SLOT_LITTLE_PATIENCE_MS = 15 };

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
        assert(verdict == LEDGER_E_DUPLICATE);
        return E_DUPLICATE;
    }
}

/* Keeps with what the rank will ask for the step. Wrong hyperparameters are left out: the step will refuse them. */
static void keep_expected(const struct job *job, struct job_rank *rank, const struct request_begin_backward *request)
{
    for (size_t i = 0; i < request->n_groups; i++)
        if (job_check_hyper(job->config, &request->groups[i]))
            return;
    if (request->n_groups > 0)
        job_keep_args(job, &rank->expected,
                      &(struct request_step){.groups = request->groups,
                                             .n_groups = request->n_groups,
                                             .loss_scale = rank->request.args.loss_scale});
}

void job_begin_backward(struct job *job, struct job_rank *rank, const struct request_begin_backward *request)
{
    struct ledger_position next = ledger_next(&job->ledger, rank->rank);
    struct push_record record = {.incarnation = rank->kept.incarnation,
                                 .step = request->step,
                                 .micro_batch = request->micro_batch,
                                 .time_ns = job_now(job)};
    char detail[96];
    int r;

    if (request->attempt < job->ledger.attempt || rank->process.abort_notice)
        return; /* the request is of an aborted attempt; the next answer reports the abort */
    if (request->step == next.step && request->micro_batch == next.micro_batch && !collect_is_done(job, rank) &&
        !job->ledger.ranks[rank->rank].open) {
        job_drop_peer(job, rank, "BeginBackward: the last EndBackward has not been answered yet");
        return;
    }
    r = ledger_begin(&job->ledger, rank->rank, request->step, request->micro_batch);
    rank->kept.n_forwards = request->n_forwards;
    rank->kept.n_backwards = request->n_backwards;
    if (r == LEDGER_ADMITTED) {
        timeline_backward(job, rank);
        phases_begin_backward(rank, record.time_ns);
        keep_expected(job, rank, request);
        return;
    }
    snprintf(detail, sizeof(detail), "backward of step %" PRIu64 ", micro-batch %u", request->step,
             request->micro_batch);
    record.sequence = 1; /* marks the record as present, though it is no push */
    job_fault_push(job, rank, code_of(r), NULL, &record, detail);
}

/* ---- a push -------------------------------------------------------------------------------------------- */

static struct push_record make_record(const struct job *job, const struct job_rank *rank,
                                      const struct request_push *request)
{
    return (struct push_record){
        .incarnation = rank->kept.incarnation,
        .sequence = request->sequence,
        .step = request->step,
        .task = request->task,
        .time_ns = job_now(job),
        .attempt = request->attempt,
        .micro_batch = request->micro_batch,
        .param = request->param,
        .part = request->param < job->layout->n_params ? job->layout->params[request->param].first_part + request->part
                                                       : UINT32_MAX,
        .ordinal = request->ordinal,
        .depth = request->depth,
        .segment = request->segment,
        .call = request->call,
        .site = request->site,
        .flags = request->flags,
    };
}

/* Return: whether the gradient has the declared form. If not, the rank has a fault. */
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

/* Does the parameter have this part, and is it the first or the next part of a gradient? */
static bool is_next_part(const struct job *job, const struct job_rank *rank, const struct request_push *request)
{
    const struct partial_push *partial = &rank->process.partial;

    if (request->part >= job->layout->params[request->param].n_parts)
        return false;
    if (request->attempt < job->ledger.attempt || request->sequence <= job->ledger.ranks[rank->rank].last_sequence)
        return true; /* the ledger will drop the push */
    return request->part == 0 || (request->part == partial->next && request->param == partial->param);
}

static void note_part(const struct job *job, struct job_rank *rank, const struct request_push *request, bool refused)
{
    struct partial_push *partial = &rank->process.partial;

    assert(request->part < job->layout->params[request->param].n_parts);
    if (request->part == 0 && partial->next > 0)
        partial->torn |= !partial->refused;
    partial->param = request->param;
    partial->next = request->part + 1;
    partial->refused = refused;
    if (request->record_only || partial->next == job->layout->params[request->param].n_parts)
        partial->next = 0;
}

/* Return: 0 and *slot (NULL if the push has no data); positive if the connection is being dropped. */
static int open_slot(struct job *job, struct job_rank *rank, const struct request_push *request, uint32_t part,
                     struct ring_slot **slot)
{
    uint32_t parcel = job->layout->parts[part].parcel;
    int r;

    assert(part < job->layout->n_parts);
    *slot = NULL;
    if (request->record_only)
        return 0;
    r = ring_open_slot(rank->rings[0],
                       &(struct ring_use){
                           .ticket = request->ticket,
                           .use = request->use,
                           .parcel = parcel,
                           .micro_batch = request->micro_batch,
                           .pass = request->pass,
                           .attempt = request->attempt,
                           .offset_bytes = request->offset_bytes,
                           .n_bytes = layout_parcel_bytes(job->layout, parcel),
                           .overflow = request->overflow,
                       },
                       slot);
    /* A repeated push may name a slot that was reduced and credited long ago. */
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
    struct fault *again = &rank->process.again;

    job->stats.counters.accumulated++;
    if (!again->code) {
        again->code = E_DUPLICATE;
        again->first = ledger_entry(&job->ledger, rank->rank, record->part)->first;
        again->second = *record;
    }
    if (!again->diagnostic)
        job_fault_join(again, record->param);
}

static void admit_push(struct job *job, struct job_rank *rank, const struct push_record *record, struct ring_slot *slot,
                       uint16_t pass)
{
    const struct layout_part *part = &job->layout->parts[record->part];
    bool last = layout_is_last_part(job->layout, record->part);

    if (!slot || slot->pass != pass) {
        job_drop_peer(job, rank, slot ? "Push.pass: not the pass of this push" : "Push.record_only: not a duplicate");
        return;
    }
    job->kept.n_admitted += last;
    rank->kept.n_pushes += last;
    phases_push(rank, record->time_ns);
    if (pass > 0 && last)
        note_again(job, rank, record);
    assert(!slot->posted); /* a worker would read what the rank still writes */
    assert(slot->n_pushed < job->layout->parcels[part->parcel].n_parts);
    slot->n_pushed++;
    if (slot->n_pushed == job->layout->parcels[part->parcel].n_parts) {
        timeline_pushed(job, rank, part->parcel);
        collect_parcel(job, part->parcel);
    }
}

/* Adds up the sums of the parts, as the client does for a duplicate. Return: false if a sum is not known. */
static bool find_sum(const struct job *job, const struct job_rank *rank, uint32_t param, uint64_t *sum)
{
    const struct layout_param *p = &job->layout->params[param];
    uint64_t of_part;

    *sum = 0;
    for (uint32_t i = 0; i < p->n_parts; i++, *sum += of_part)
        if (!ledger_find_sum(&job->ledger, rank->rank, p->first_part + i, 0, &of_part))
            return false;
    return true;
}

static void refuse_duplicate(struct job *job, struct job_rank *rank, const struct push_record *record,
                             const struct request_push *request)
{
    const struct ledger_entry *entry = ledger_entry(&job->ledger, rank->rank, record->part);
    bool first = !rank->process.fault.code;
    uint64_t sum;

    assert(entry->n_pushed > 0);
    job_fault_push(job, rank, E_DUPLICATE, &entry->first, record, NULL);
    if (first && request->record_only && find_sum(job, rank, record->param, &sum)) {
        rank->process.fault.sums_known = true;
        rank->process.fault.sums_equal = sum == request->sum;
    }
    if (rank->kept.on_duplicate == WIRE_ON_DUPLICATE_ABORT_STEP) {
        job_abort(job, rank->rank, diagnostic_ref(job_fault_diagnostic(job, rank, &rank->process.fault, false)));
        job_fault_reset(&rank->process.fault);
    }
}

/* Credits the slot if it is empty, because only a push that was not admitted has opened it. */
static void close_empty(struct job_rank *rank, struct ring_slot *slot)
{
    if (slot && slot->n_pushed == 0)
        ring_credit(rank->rings[0], slot);
}

/* May the push name that point of the rank's GPU? */
static bool awaits_point(const struct job *job, const struct job_rank *rank, uint64_t point)
{
    uint64_t first = progress_first(rank->kept.incarnation);

    if (!job->executor || !job->executor->on_gpus || point <= first || point > progress_last(first))
        return false;
    return executor_awaits(job->executor, rank->rank - job->world.first, point);
}

void job_push(struct job *job, struct job_rank *rank, const struct request_push *request)
{
    struct push_record record = make_record(job, rank, request);
    struct ring_slot *slot;
    uint16_t pass = 0;
    int r;

    if (!has_declared_form(job, rank, request, &record))
        return;
    if (request->point > 0 && !awaits_point(job, rank, request->point)) {
        job_drop_peer(job, rank, "Push.point: no work waits for this point");
        return;
    }
    if (!is_next_part(job, rank, request)) {
        job_drop_peer(job, rank, "Push.part: not the part that comes next");
        return;
    }
    if (open_slot(job, rank, request, record.part, &slot) != 0)
        return;
    if (slot)
        slot->point = MAX(slot->point, request->point);
    if (rank->process.abort_notice && request->attempt >= job->ledger.attempt) {
        job_drop_peer(job, rank, "Push.attempt: newer than what this rank was told");
        return;
    }
    if (request->part > 0 && rank->process.partial.refused) {
        note_part(job, rank, request, true);
        close_empty(rank, slot);
        return;
    }
    if (job->decision.has_learnt && !job->decision.learnt[request->param] && request->attempt == job->ledger.attempt) {
        note_part(job, rank, request, true);
        job_fault_push(job, rank, E_GRAPH_CHANGED, NULL, &record, NULL);
        return;
    }
    r = ledger_push(&job->ledger, rank->rank, &record, &pass);
    if (r != LEDGER_RETRY && r != LEDGER_DROPPED)
        note_part(job, rank, request, r != LEDGER_ADMITTED && r != LEDGER_REDO);
    switch (r) {
    case LEDGER_ADMITTED:
        admit_push(job, rank, &record, slot, pass);
        break;
    case LEDGER_REDO:
        if (!slot || slot->pass != pass) {
            job_drop_peer(job, rank, "Push.pass: not the pass of this push");
            break;
        }
        assert(slot->n_pushed < job->layout->parcels[slot->parcel].n_parts);
        slot->redo = true;
        slot->n_pushed++;
        collect_verify(job, rank, slot, record.part, pass);
        break;
    case LEDGER_RETRY:
        job->stats.counters.retried++;
        close_empty(rank, slot);
        break;
    case LEDGER_DROPPED:
        job->stats.counters.dropped++;
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

    for (unsigned r = job->world.first; r < job->world.end; r++)
        for (size_t i = 0; i < ARRAY_SIZE(job->ranks[r].rings); i++)
            n += job->ranks[r].rings[i] ? job->ranks[r].rings[i]->overflow_bytes : 0;
    return n;
}

/* Finds a rank and a parameter that the rank has not pushed, although it has pushed all of the next parcel. */
static bool find_late(const struct job *job, uint32_t *late_rank, uint32_t *late_param)
{
    for (uint32_t i = 0; i + 1 < job->layout->n_parcels; i++) {
        const struct layout_parcel *parcel = &job->layout->parcels[i], *next = parcel + 1;

        for (unsigned r = job->world.first; r < job->world.end; r++) {
            const struct ledger_rank *ledger = &job->ledger.ranks[r];
            bool later = true;

            for (uint32_t k = 0; k < next->n_parts; k++)
                later &= ledger->entries[next->first_part + k].n_pushed > 0;
            for (uint32_t k = 0; later && ledger->open && k < parcel->n_parts; k++) {
                *late_param = job->layout->parts[parcel->first_part + k].param;
                *late_rank = r;
                if (ledger->entries[parcel->first_part + k].n_pushed == 0)
                    return true;
            }
        }
    }
    return false;
}

/*
 * Prints what to do when there is no room for gradients. Names the parameter for which the gradients wait, if
 * find_late() finds one.
 */
static void print_fix_of_slots(const struct job *job, char *fix, size_t size)
{
    const struct layout_param *late;
    uint32_t rank, param;
    char name[128];

    if (!find_late(job, &rank, &param)) {
        snprintf(fix, size,
                 "push parameters in the same order on all ranks, end micro-batches, or raise limits.memory");
        return;
    }
    late = &job->layout->params[param];
    layout_print_name(name, sizeof(name), late->name, late->name_len);
    snprintf(fix, size,
             "raise limits.memory: rank %u pushes %s after all of a later bucket, and\n"
             "gradients take memory until it comes; or declare it where it is pushed",
             rank, name);
}

static void refuse_slot(struct job *job, struct job_rank *rank, uint64_t n_bytes, const char *what, uint64_t allowed)
{
    char fix[384];

    print_fix_of_slots(job, fix, sizeof(fix));
    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){
                  .at = job_at(job, rank),
                  .what = what,
                  .unit = "bytes",
                  .asked = n_bytes,
                  .held = rank->rings[0]->overflow_bytes,
                  .allowed = allowed,
                  .fix = fix,
              }));
    if (rank->wait == WAIT_SLOT)
        job_is_held(job, rank);
}

/* Refuses a slot, because all tickets are in use. More memory would not help. */
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
                                  .n_warnings = (uint32_t)job->stats.counters.warnings},
               },
               NULL, 0);
}

/* Grants the extent. Records it first, because the next daemon must know that it is in use. */
static void grant_extent(struct job *job, struct job_rank *rank, uint64_t offset_bytes, uint64_t n_bytes)
{
    job_record(job, rank, JOURNAL_GRANT, &(struct journal_grant){.offset_bytes = offset_bytes, .n_bytes = n_bytes},
               sizeof(struct journal_grant), NULL, 0);
    grant(job, rank, false, offset_bytes);
}

static void extent_run(struct work *work, uint32_t item)
{
    struct extent_start *start = container_of(work, struct extent_start, work);

    (void)item;
    start->result = segment_reserve(&start->ring->overflow, start->offset_bytes, start->n_bytes);
}

static uint64_t wanted_bytes(const struct job *job, const struct job_rank *rank)
{
    const struct request_slot_request *wanted = &rank->extent.wanted;

    assert(wanted->bucket < job->layout->n_buckets);
    return layout_parcel_bytes(job->layout, job->layout->buckets[wanted->bucket].first_parcel + wanted->parcel);
}

static void extent_done(struct work *work)
{
    struct extent_start *start = container_of(work, struct extent_start, work);
    struct job *job = start->job;
    struct job_rank *rank = start->rank;

    assert(job->work.n_io > 0);
    job->work.n_io--;
    ring_reserved(start->ring, start->offset_bytes, start->result == 0);
    if (rank->rings[0] == start->ring) {
        assert(rank->extent.reserving);
        rank->extent.reserving = false;
        if (rank->wait == WAIT_SLOT && start->result == 0 && start->n_bytes >= wanted_bytes(job, rank))
            grant_extent(job, rank, start->offset_bytes, start->n_bytes);
        else if (rank->wait == WAIT_SLOT && start->result == 0)
            admit_settle(job, rank); /* the extent was for an earlier request, which an abort has ended */
        else if (rank->wait == WAIT_SLOT)
            refuse_slot(job, rank, start->n_bytes, "gradient slots (the kernel gave no more memory)", 0);
    }
    ring_unhold(start->ring);
    free(start);
}

static void start_extent(struct job *job, struct job_rank *rank, uint64_t offset_bytes, uint64_t n_bytes)
{
    struct extent_start *start = calloc(1, sizeof(*start));

    assert(!rank->extent.reserving);
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
    rank->extent.reserving = true;
    ring_hold(start->ring);
    job->work.n_io++;
    worker_post(job->pool, &start->work);
}

/* Is there a full slot, whose parcel waits for ranks that are behind? */
static bool has_full_slot(const struct job *job, const struct ring *ring)
{
    for (uint32_t i = 0; ring->n_held > 0 && i < ring->n_tickets; i++) {
        const struct ring_slot *slot = &ring->slots[i];

        if (slot->held && !slot->overflow && !slot->redo &&
            slot->n_pushed == job->layout->parcels[slot->parcel].n_parts)
            return true;
    }
    return false;
}

/*
 * Are the other ranks behind this rank? Return: true if no rank has pushed a part in this micro-batch that this rank
 * has not pushed.
 */
static bool others_follow(const struct job *job, const struct job_rank *rank)
{
    const struct ledger_rank *own = &job->ledger.ranks[rank->rank];

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        const struct ledger_rank *other = &job->ledger.ranks[r];

        for (uint32_t i = 0; other->open && other->n_ended == own->n_ended && i < job->layout->n_parts; i++)
            if (other->entries[i].n_pushed > own->entries[i].n_pushed)
                return false;
    }
    return true;
}

/*
 * Should the rank keep waiting for a slot of the ring? A rank that is a whole ring ahead gains nothing from overflow
 * memory if the others follow soon, and new pages outside every cache cost it time. After one timeout the rank waits no
 * more in that micro-batch, because the others may be waiting for its next push.
 */
static bool is_patient(struct job *job, struct job_rank *rank)
{
    unsigned patience_ms = rank->process.waited_in_vain ? SLOT_LITTLE_PATIENCE_MS : SLOT_PATIENCE_MS;

    if (rank->process.impatient || !has_full_slot(job, rank->rings[0]) || !others_follow(job, rank))
        return false;
    if (job_now(job) - rank->wait_ns >= patience_ms * UINT64_C(1000000))
        rank->process.impatient = rank->process.waited_in_vain = true;
    else
        job->ops.soon(job->ops.userdata, patience_ms);
    return !rank->process.impatient;
}

void admit_settle(struct job *job, struct job_rank *rank)
{
    uint64_t n_bytes = wanted_bytes(job, rank), offset, extent_bytes;
    struct memory_headroom headroom;
    int r;

    if (rank->wait != WAIT_SLOT || rank->extent.reserving || job_is_held(job, rank))
        return;
    if (rank->process.slot_credited) { /* the client may have looked before the credit */
        rank->process.slot_credited = rank->process.waited_in_vain = false;
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
    assert(extent_bytes >= n_bytes);
    if (r == 0) {
        grant_extent(job, rank, offset, extent_bytes);
        return;
    }
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (job->memory.quota.used + overflow_bytes(job) > job->memory.quota.limit ||
        extent_bytes > headroom.cgroup_bytes || extent_bytes > headroom.available_bytes) {
        ring_reserved(rank->rings[0], offset, false);
        refuse_slot(job, rank, n_bytes, "gradient slots (limits.memory, cgroup or free memory)",
                    job->memory.quota.limit);
        return;
    }
    start_extent(job, rank, offset, extent_bytes);
}

void job_slot_request(struct job *job, struct job_rank *rank, const struct request_slot_request *request)
{
    if (request->bucket >= job->layout->n_buckets ||
        request->parcel >= job->layout->buckets[request->bucket].n_parcels) {
        job_drop_peer(job, rank,
                      request->bucket >= job->layout->n_buckets ? "SlotRequest.bucket: no such bucket"
                                                                : "SlotRequest.parcel: no such parcel in the bucket");
        return;
    }
    rank->extent.wanted = *request;
    job_wait(job, rank, WAIT_SLOT);
    admit_settle(job, rank);
}

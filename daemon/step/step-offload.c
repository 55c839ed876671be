/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The update of an offloaded optimizer. Portions (step-offload.h) are copied in, updated, copied back and gathered, in
 * order. Early copies come before all that.
 */

#include "daemon/step/step-offload.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/segment.h"
#include "core/budget/step-sizes.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/devices.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step-device.h"
#include "daemon/step/step.h"

/* The parcels [first, end). When they are updated, the buckets [first_bucket, end_bucket) are complete. */
struct portion {
    uint32_t first, end;
    uint32_t first_bucket, end_bucket;
};

struct slot {
    struct offload *offload;
    bool arrived;
};

/* The early copy of a parcel. Reductions are named by their numbers, which are used once; 0: none. */
struct early {
    uint64_t wanted; /* the sums of this reduction are to be copied */
    uint64_t copied; /* the sums of this reduction are in staging, or on their way */
    bool under_way;
};

struct offload {
    struct step *step;
    struct segment staging;
    uint64_t slot_elems;
    uint64_t *starts; /* n_parcels + 1: owned elements of all earlier parcels */
    struct early *early;
    uint32_t n_early; /* so many first parcels are copied early */
    bool copying;     /* an order of early copies has not ended */
    step_ready ready; /* called when the sums of a parcel have arrived early */
    void *ready_userdata;
    struct portion *portions;
    uint32_t n_portions;
    struct device_move *moves; /* moves of the order that is being made */
    /*
     * Counts of the current update: portions whose read, write-back or gathering was ordered, and portions that are
     * updated.
     */
    uint32_t n_read, n_updated, n_written, n_gathered;
    struct slot slots[OFFLOAD_SLOTS]; /* portion i uses slot i % OFFLOAD_SLOTS */
    unsigned n_orders;                /* unfinished orders, with that of early copies */
    bool in_update;
    bool updating, retrying;
    bool cancelled; /* the job is being dropped, so no new orders are made */
    struct work work, retry;
};

_Static_assert((int)DEVICE_MAX_LOCAL <= (int)DEVICE_MAX_MOVES, "a portion has at least one parcel");

/* ---- portions -------------------------------------------------------------------------------------------- */

/* Return: the elements of the parcel that this node owns, from *start on, counted from the bucket's start. */
static uint64_t parcel_elems(const struct offload *offload, uint32_t parcel, uint64_t *start)
{
    const struct step *step = offload->step;

    return offload_parcel_elems(step->layout, parcel, step->first_local, step->n_local, start);
}

/* Return: the number of parcels in the portion that begins with parcel `first`. */
static uint32_t fill_portion(const struct offload *offload, uint32_t first)
{
    const struct layout *layout = offload->step->layout;
    uint32_t end = first + 1, most = DEVICE_MAX_MOVES / offload->step->n_local;

    while (end < layout->n_parcels && end != offload->n_early && end - first < most &&
           offload->starts[end + 1] - offload->starts[first] <= offload->slot_elems)
        end++;
    return end - first;
}

static uint32_t n_complete(const struct layout *layout, uint32_t end)
{
    return end < layout->n_parcels ? layout->parcels[end].bucket : layout->n_buckets;
}

static void make_portions(struct offload *offload)
{
    const struct layout *layout = offload->step->layout;
    uint64_t start;

    for (uint32_t i = 0; i < layout->n_parcels; i++)
        offload->starts[i + 1] = offload->starts[i] + parcel_elems(offload, i, &start);
    for (uint32_t i = 0; i < layout->n_parcels; offload->n_portions++) {
        struct portion *portion = &offload->portions[offload->n_portions];

        portion->first = i;
        i = portion->end = i + fill_portion(offload, i);
        portion->first_bucket = n_complete(layout, portion->first);
        portion->end_bucket = n_complete(layout, portion->end);
    }
}

/*
 * Return: the offset in staging of a parcel's owned accumulators, in elements. i: the parcel's portion; not used for
 * parcels that are copied early, which have places of their own.
 */
static uint64_t staging_at(const struct offload *offload, uint32_t i, uint32_t parcel)
{
    uint64_t slots = offload->starts[offload->n_early];

    if (parcel < offload->n_early)
        return offload->starts[parcel];
    assert(i < offload->n_portions);
    assert(parcel >= offload->portions[i].first && parcel < offload->portions[i].end);
    assert(offload->starts[parcel + 1] - offload->starts[offload->portions[i].first] <= offload->slot_elems);
    return slots + i % OFFLOAD_SLOTS * offload->slot_elems + offload->starts[parcel] -
           offload->starts[offload->portions[i].first];
}

/* ---- orders ---------------------------------------------------------------------------------------------- */

static void advance(struct offload *offload);

static void skip_item(struct work *work, uint32_t item)
{
    (void)work;
    (void)item;
}

static void retry_done(struct work *work)
{
    struct offload *offload = container_of(work, struct offload, retry);

    offload->retrying = false;
    advance(offload);
}

/* Makes the loop retry later. Call it when there was no memory for an order. */
static void retry(struct offload *offload)
{
    if (offload->retrying)
        return;
    offload->retrying = true;
    offload->retry = (struct work){.run = skip_item, .done = retry_done, .n_items = 1};
    worker_post(offload->step->pool, &offload->retry);
}

/* Handles the end of an order. result < 0: the job is being dropped, so no new orders are made. */
static void end_order(struct offload *offload, int result)
{
    assert(offload->n_orders > 0);
    offload->cancelled |= result < 0;
    offload->n_orders--;
    advance(offload);
}

static void has_arrived(void *userdata, int result)
{
    struct slot *slot = userdata;

    assert(!slot->arrived);
    slot->arrived = result == 0;
    end_order(slot->offload, result);
}

static void is_done(void *userdata, int result)
{
    end_order(userdata, result);
}

/*
 * Return: a move of a rank's slice of a parcel. write: the slice's weights are copied back to their place of the layout
 * on the GPU. Otherwise the slice's accumulators are copied to staging.
 */
static struct device_move make_move(const struct offload *offload, uint32_t i, uint32_t parcel, unsigned local,
                                    bool write)
{
    const struct step *step = offload->step;
    const struct device_keep *keep = devices_keep(step->devices);
    const struct layout_parcel *p = &step->layout->parcels[parcel];
    const struct layout_bucket *bucket = &step->layout->buckets[p->bucket];
    unsigned rank = step->first_local + local;
    const struct device_places *places = &keep->places[local].buckets[p->bucket];
    uint64_t begin, end, start, elem_bytes = write ? dtype_size(bucket->dtype) : sizeof(float);
    struct device_move move = {.write = write, .local_rank = local};

    device_parcel_slice(&keep->plan, parcel, rank, &begin, &end);
    move.n_bytes = (end - begin) * elem_bytes;
    if (write) {
        move.kind = DEVICE_WEIGHTS;
        move.segment = DEVICES_WEIGHTS;
        move.offset_bytes = move.segment_offset_bytes = bucket->weight_offset_bytes + begin * elem_bytes;
    } else {
        move.kind = DEVICE_GRADIENT;
        move.segment = DEVICES_STAGING;
        move.offset_bytes = places->acc + (begin - places->start_elem) * elem_bytes;
        (void)parcel_elems(offload, parcel, &start);
        move.segment_offset_bytes = (staging_at(offload, i, parcel) + begin - start) * elem_bytes;
    }
    return move;
}

/* A copy that is being ordered. */
struct copy {
    struct device_command command;
    uint64_t n_bytes;
};

static void begin_copy(const struct offload *offload, struct copy *copy)
{
    *copy = (struct copy){.command = {.type = DEVICE_COMMAND_COPY, .copy.moves = offload->moves}};
}

/* Adds the moves of a parcel, for make_move(). */
static void add_parcel(struct offload *offload, struct copy *copy, uint32_t i, uint32_t parcel, bool write)
{
    size_t *n_moves = &copy->command.copy.n_moves;

    for (unsigned local = 0; local < offload->step->n_local; local++) {
        struct device_move move = make_move(offload, i, parcel, local, write);

        if (move.n_bytes == 0)
            continue;
        copy->n_bytes += move.n_bytes;
        assert(*n_moves < DEVICE_MAX_MOVES);
        offload->moves[(*n_moves)++] = move;
    }
}

/* Return: 0, 1 if there is nothing to copy, -ENOMEM, or -ECANCELED. */
static int order_copy(struct offload *offload, const struct copy *copy, devices_done done, void *userdata)
{
    int r;

    if (copy->command.copy.n_moves == 0)
        return 1;
    r = devices_order(offload->step->devices, &copy->command, copy->n_bytes, done, userdata);
    if (r == 0)
        offload->n_orders++;
    return r;
}

/* ---- early copies ---------------------------------------------------------------------------------------- */

/* Return: the number of the last reduction of the parcel; 0: the next one is being prepared. */
static uint64_t last_reduction(const struct step *step, uint32_t parcel)
{
    return (step->combinations ? step->combinations : step->reductions)[parcel].op;
}

/* Does the parcel have gradients of the open step? */
static bool has_gradients(const struct step *step, uint32_t parcel)
{
    const struct layout_parcel *p = &step->layout->parcels[parcel];

    for (uint32_t i = p->first_part; i < p->first_part + p->n_parts; i++)
        if (step->begun[i])
            return true;
    return false;
}

/* Are the parcel's sums of the open step, as they are now, in staging or on their way? */
static bool is_copied(const struct offload *offload, uint32_t parcel)
{
    const struct step *step = offload->step;

    return parcel < offload->n_early && offload->early[parcel].copied > 0 &&
           offload->early[parcel].copied == last_reduction(step, parcel) && has_gradients(step, parcel);
}

/* Return: whether the early copy of a parcel of the portion has not ended. */
static bool is_being_copied(const struct offload *offload, const struct portion *portion)
{
    for (uint32_t parcel = portion->first; parcel < portion->end && parcel < offload->n_early; parcel++)
        if (offload->early[parcel].under_way)
            return true;
    return false;
}

static void copy_early(struct offload *offload);

/* Called when the order of early copies has ended. result < 0: it has failed, and the sums may not be copied. */
static void end_early(struct offload *offload, int result)
{
    offload->copying = false;
    for (uint32_t parcel = 0; parcel < offload->n_early; parcel++) {
        struct early *early = &offload->early[parcel];

        if (!early->under_way)
            continue;
        early->under_way = false;
        if (result < 0)
            early->copied = 0;
        else if (!offload->in_update && is_copied(offload, parcel))
            offload->ready(offload->ready_userdata, parcel);
    }
}

static void early_done(void *userdata, int result)
{
    struct offload *offload = userdata;

    (void)failpoint("copied");
    assert(offload->copying);
    end_early(offload, result);
    if (offload->in_update) {
        end_order(offload, result);
        return;
    }
    offload->n_orders--;
    if (result == 0)
        copy_early(offload);
}

/*
 * Copies the sums that are wanted now, in one order. What is wanted later waits for its end, because the engine makes
 * one copy aside at a time.
 */
static void copy_early(struct offload *offload)
{
    enum { MOST_MOVES = DEVICE_MAX_MOVES - DEVICE_MAX_LOCAL }; /* so that another parcel fits */

    struct copy copy;
    int r;

    if (offload->copying || offload->in_update)
        return;
    begin_copy(offload, &copy);
    copy.command.copy.aside = true;
    for (uint32_t p = 0; p < offload->n_early && copy.command.copy.n_moves <= MOST_MOVES; p++) {
        struct early *early = &offload->early[p];

        if (early->wanted > 0 && early->wanted == last_reduction(offload->step, p)) {
            early->copied = early->wanted;
            early->under_way = true;
            add_parcel(offload, &copy, 0, p, false);
        }
        early->wanted = 0;
    }
    r = order_copy(offload, &copy, early_done, offload);
    if (r != 0)
        end_early(offload, r);
    else
        offload->copying = true;
}

static void offload_complete(struct step *step, uint32_t parcel, step_ready ready, void *userdata)
{
    struct offload *offload = step->offload;

    if (parcel >= offload->n_early)
        return;
    /* Workers may be reading an earlier copy of this step, for a speculative update. */
    if (step->speculation && offload->early[parcel].copied > step->opened_op)
        return;
    (void)failpoint("early");
    offload->ready = ready;
    offload->ready_userdata = userdata;
    offload->early[parcel].wanted = last_reduction(step, parcel);
    copy_early(offload);
}

/* ---- copies of an update --------------------------------------------------------------------------------- */

/*
 * Orders the copies of portion i, without sums that are copied already. Return: 0, 1 if there is nothing to copy,
 * -ENOMEM, or -ECANCELED.
 */
static int copy_portion(struct offload *offload, uint32_t i, bool write, devices_done done, void *userdata)
{
    const struct portion *portion = &offload->portions[i];
    struct copy copy;

    begin_copy(offload, &copy);
    for (uint32_t parcel = portion->first; parcel < portion->end; parcel++) {
        if (!write && is_copied(offload, parcel))
            continue;
        if (!write && parcel < offload->n_early)
            offload->early[parcel].copied = 0;
        add_parcel(offload, &copy, i, parcel, write);
    }
    return order_copy(offload, &copy, done, userdata);
}

/*
 * Orders copies of accumulators to free slots. A slot is free again when its portion has been updated. A portion with
 * early copies that have not ended is ordered after their end.
 */
static int read_in(struct offload *offload)
{
    for (; offload->n_read < offload->n_portions && offload->n_read < offload->n_updated + OFFLOAD_SLOTS; offload->n_read++) {
        struct slot *slot = &offload->slots[offload->n_read % OFFLOAD_SLOTS];
        int r;

        slot->arrived = false;
        if (is_being_copied(offload, &offload->portions[offload->n_read]))
            return 0;
        r = copy_portion(offload, offload->n_read, false, has_arrived, slot);
        if (r < 0)
            return r;
        slot->arrived = r > 0;
    }
    return 0;
}

static int write_back(struct offload *offload)
{
    if (offload->step->state->stage == 3) /* weights are rounded from masters when they are gathered */
        offload->n_written = offload->n_updated;
    for (; offload->n_written < offload->n_updated; offload->n_written++) {
        int r = copy_portion(offload, offload->n_written, true, is_done, offload);

        if (r < 0)
            return r;
    }
    return 0;
}

/* Orders the gathering of buckets whose copies back are ordered. The engine carries out orders in sequence. */
static int order_gathering(struct offload *offload)
{
    const struct layout *layout = offload->step->layout;

    for (; offload->n_gathered < offload->n_written; offload->n_gathered++) {
        const struct portion *portion = &offload->portions[offload->n_gathered];
        const struct device_command command = {.type = DEVICE_COMMAND_GATHER,
                                               .gather = {.first_bucket = portion->first_bucket,
                                                          .n_buckets = portion->end_bucket - portion->first_bucket}};
        uint64_t n_bytes = 0;
        int r;

        if (!step_device_gathers(offload->step) || command.gather.n_buckets == 0)
            continue;
        for (uint32_t b = portion->first_bucket; b < portion->end_bucket; b++)
            n_bytes += layout->buckets[b].n_elems * dtype_size(layout->buckets[b].dtype);
        r = devices_order(offload->step->devices, &command, n_bytes, is_done, offload);
        if (r < 0)
            return r;
        offload->n_orders++;
    }
    return 0;
}

/* ---- update ---------------------------------------------------------------------------------------------- */

static uint32_t parcel_of(const struct offload *offload, uint32_t chunk)
{
    const struct layout *layout = offload->step->layout;

    return layout->parts[layout->chunks[chunk].part].parcel;
}

/*
 * Return: the accumulators of a chunk in staging. The chunk is of a parcel that is copied early, or of the portion that
 * is updated next.
 */
static const float *acc_of(const void *userdata, uint32_t id)
{
    const struct offload *offload = userdata;
    const struct layout *layout = offload->step->layout;
    const struct layout_chunk *chunk = &layout->chunks[id];
    uint32_t parcel = parcel_of(offload, id);
    uint64_t elem = layout->params[chunk->param].offset_elems + chunk->start_elem, start, at;

    if (!state_owns(offload->step->state, chunk->rank))
        return NULL; /* the chunk is not updated here */
    (void)parcel_elems(offload, parcel, &start);
    at = staging_at(offload, offload->n_updated, parcel) + elem - start;
    return (const float *)(const void *)offload->staging.map + at;
}

static uint32_t first_chunk(const struct offload *offload)
{
    return offload->step->layout->parcels[offload->portions[offload->n_updated].first].first_chunk;
}

static void portion_update_run(struct work *work, uint32_t item)
{
    const struct offload *offload = container_of(work, struct offload, work);
    struct speculation *speculation = offload->step->speculation;
    uint32_t id = first_chunk(offload) + item, parcel = parcel_of(offload, id);

    if (speculation && parcel < offload->n_early && offload->early[parcel].copied == 0)
        speculation_drop(speculation, id); /* it was made from sums that are not those of the step */
    step_update_chunk(offload->step, id, acc_of(offload, id));
}

static const float *offload_acc(const struct step *step, uint32_t chunk)
{
    return acc_of(step->offload, chunk);
}

static void portion_update_done(struct work *work)
{
    struct offload *offload = container_of(work, struct offload, work);

    assert(offload->updating && offload->n_updated < offload->n_read);
    offload->updating = false;
    offload->n_updated++;
    advance(offload);
}

static void start_update(struct offload *offload)
{
    const struct layout_parcel *parcels = offload->step->layout->parcels;
    const struct portion *portion = &offload->portions[offload->n_updated];

    if (offload->updating || offload->n_updated == offload->n_read ||
        !offload->slots[offload->n_updated % OFFLOAD_SLOTS].arrived)
        return;
    offload->updating = true;
    offload->work = (struct work){.run = portion_update_run, .done = portion_update_done};
    for (uint32_t i = portion->first; i < portion->end; i++)
        offload->work.n_items += parcels[i].n_chunks;
    step_finish_torn_update(offload->step, first_chunk(offload), first_chunk(offload) + offload->work.n_items, acc_of,
                            offload);
    worker_post(offload->step->pool, &offload->work);
}

static void end_update(struct offload *offload, int result)
{
    struct step *step = offload->step;

    assert(offload->in_update);
    offload->in_update = false;
    step->update_done(step->update_userdata, result);
}

/* Ends the cancelled update if its orders and its work have ended. */
static void end_cancelled(struct offload *offload)
{
    if (offload->n_orders == 0 && !offload->updating && !offload->retrying)
        end_update(offload, -ECANCELED);
}

/* Orders all copies and gatherings that are possible now. Return: 0 or -errno. After an error, some are not ordered. */
static int order_all(struct offload *offload)
{
    int r = write_back(offload);

    assert(offload->n_gathered <= offload->n_written);
    assert(offload->n_written <= offload->n_updated && offload->n_updated <= offload->n_read);
    assert(offload->n_read <= offload->n_portions);
    if (r == 0)
        r = order_gathering(offload);
    return r == 0 ? read_in(offload) : r;
}

static void advance(struct offload *offload)
{
    int r = offload->cancelled ? -ECANCELED : order_all(offload);

    if (r == -ECANCELED) {
        offload->cancelled = true;
        end_cancelled(offload);
        return; /* the step may have been freed */
    }
    if (r < 0)
        retry(offload);
    start_update(offload);
    if (offload->n_gathered == offload->n_portions && offload->n_orders == 0 && !offload->retrying)
        end_update(offload, 0);
}

static void offload_update(struct step *step)
{
    struct offload *offload = step->offload;

    assert(offload->n_orders == (offload->copying ? 1 : 0));
    assert(!offload->in_update && !offload->updating && !offload->retrying);
    offload->in_update = true;
    offload->n_read = offload->n_updated = offload->n_written = offload->n_gathered = 0;
    if (offload->n_portions == 0)
        retry(offload); /* advance() would call update_done(), which step_ops.update() must not */
    else
        advance(offload);
}

const struct step_ops step_offload_ops = {.reduce = step_device_reduce,
                                          .update = offload_update,
                                          .complete = offload_complete,
                                          .acc = offload_acc,
                                          .elsewhere = true};

/* ---- life ------------------------------------------------------------------------------------------------ */

int offload_new(struct offload **out, struct step *step, uint32_t early_buckets)
{
    const struct layout *layout = step->layout;
    struct offload *offload = calloc(1, sizeof(*offload));
    uint64_t n_bytes = offload_staging_bytes(layout, step->first_local, step->n_local, early_buckets);
    int r = -ENOMEM;

    if (!offload)
        return -ENOMEM;
    assert(step->n_local > 0 && step->n_local <= DEVICE_MAX_LOCAL);
    offload->step = step;
    offload->staging = SEGMENT_NULL;
    offload->slot_elems = offload_slot_elems(layout, step->first_local, step->n_local);
    while (offload->n_early < layout->n_parcels && layout->parcels[offload->n_early].bucket < early_buckets)
        offload->n_early++;
    for (unsigned i = 0; i < OFFLOAD_SLOTS; i++)
        offload->slots[i].offload = offload;
    offload->starts = calloc((size_t)layout->n_parcels + 1, sizeof(*offload->starts));
    offload->early = calloc(offload->n_early + 1, sizeof(*offload->early));
    offload->portions = calloc((size_t)layout->n_parcels + 1, sizeof(*offload->portions));
    offload->moves = calloc(DEVICE_MAX_MOVES, sizeof(*offload->moves));
    /* A large segment is kept, so that the next daemon need not find so much free memory. Its contents do not count. */
    if (offload->starts && offload->early && offload->portions && offload->moves)
        r = offload->n_early > 0 ? segment_init_kept(&offload->staging, "device.staging", n_bytes)
                                 : segment_init(&offload->staging, "device.gradient", n_bytes);
    if (r < 0) {
        offload_free(offload);
        return r;
    }
    make_portions(offload);
    if (offload->n_early < layout->n_parcels)
        assert((offload->starts[offload->n_early] + OFFLOAD_SLOTS * offload->slot_elems) * sizeof(float) <= n_bytes);
    assert(offload->starts[offload->n_early] * sizeof(float) <= n_bytes);
    *out = offload;
    return 0;
}

void offload_free(struct offload *offload)
{
    if (!offload)
        return;
    segment_deinit(&offload->staging);
    free(offload->starts);
    free(offload->early);
    free(offload->portions);
    free(offload->moves);
    free(offload);
}

int offload_reserve(struct offload *offload)
{
    return segment_reserve(&offload->staging, 0, offload->staging.n_bytes);
}

const struct segment *offload_staging(const struct offload *offload)
{
    return &offload->staging;
}

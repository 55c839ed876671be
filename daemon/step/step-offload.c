/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The update of an offloaded optimizer. Portions (step-offload.h) are copied in, updated, copied back and gathered, in
 * order.
 */

#include "daemon/step/step-offload.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/budget/step-sizes.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/devices.h"
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

struct offload {
    struct step *step;
    struct segment staging;
    uint64_t slot_elems;
    uint64_t *starts; /* n_parcels + 1: elements of all earlier parcels */
    struct portion *portions;
    uint32_t n_portions;
    struct device_move *moves; /* moves of the order that is being made */
    /*
     * Counts of the current update: portions whose read, write-back or gathering was ordered, and portions that are
     * updated.
     */
    uint32_t n_read, n_updated, n_written, n_gathered;
    struct slot slots[OFFLOAD_SLOTS]; /* portion i uses slot i % OFFLOAD_SLOTS */
    unsigned n_orders;                /* unfinished orders */
    bool updating, retrying;
    bool cancelled; /* the job is being dropped, so no new orders are made */
    struct work work, retry;
};

_Static_assert((int)DEVICE_MAX_LOCAL <= (int)DEVICE_MAX_MOVES, "a portion has at least one parcel");

/* ---- portions -------------------------------------------------------------------------------------------- */

/* Return: the number of parcels in the portion that begins with parcel `first`. */
static uint32_t fill_portion(const struct offload *offload, uint32_t first)
{
    const struct layout *layout = offload->step->layout;
    uint32_t end = first + 1, most = DEVICE_MAX_MOVES / offload->step->n_local;

    while (end < layout->n_parcels && end - first < most &&
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

    for (uint32_t i = 0; i < layout->n_parcels; i++)
        offload->starts[i + 1] = offload->starts[i] + layout->parcels[i].n_elems;
    for (uint32_t i = 0; i < layout->n_parcels; offload->n_portions++) {
        struct portion *portion = &offload->portions[offload->n_portions];

        portion->first = i;
        i = portion->end = i + fill_portion(offload, i);
        portion->first_bucket = n_complete(layout, portion->first);
        portion->end_bucket = n_complete(layout, portion->end);
    }
}

/* Return: the offset in staging of a parcel's accumulators, in elements. i: the parcel's portion. */
static uint64_t staging_at(const struct offload *offload, uint32_t i, uint32_t parcel)
{
    assert(i < offload->n_portions);
    assert(parcel >= offload->portions[i].first && parcel < offload->portions[i].end);
    assert(offload->starts[parcel + 1] - offload->starts[offload->portions[i].first] <= offload->slot_elems);
    return i % OFFLOAD_SLOTS * offload->slot_elems + offload->starts[parcel] - offload->starts[offload->portions[i].first];
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
    uint64_t begin, end, elem_bytes = write ? dtype_size(bucket->dtype) : sizeof(float);
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
        move.segment_offset_bytes = (staging_at(offload, i, parcel) + begin - p->offset_elems) * elem_bytes;
    }
    return move;
}

/* Orders the copies of portion i. Return: 0, 1 if there is nothing to copy, -ENOMEM, or -ECANCELED. */
static int order_copy(struct offload *offload, uint32_t i, bool write, devices_done done, void *userdata)
{
    const struct portion *portion = &offload->portions[i];
    struct device_command command = {.type = DEVICE_COMMAND_COPY, .copy.moves = offload->moves};
    uint64_t n_bytes = 0;
    int r;

    for (uint32_t parcel = portion->first; parcel < portion->end; parcel++) {
        for (unsigned local = 0; local < offload->step->n_local; local++) {
            struct device_move move = make_move(offload, i, parcel, local, write);

            if (move.n_bytes == 0)
                continue;
            n_bytes += move.n_bytes;
            assert(command.copy.n_moves < DEVICE_MAX_MOVES);
            offload->moves[command.copy.n_moves++] = move;
        }
    }
    if (command.copy.n_moves == 0)
        return 1;
    r = devices_order(offload->step->devices, &command, n_bytes, done, userdata);
    if (r == 0)
        offload->n_orders++;
    return r;
}

/* Orders copies of accumulators to free slots. A slot is free again when its portion has been updated. */
static int read_in(struct offload *offload)
{
    for (; offload->n_read < offload->n_portions && offload->n_read < offload->n_updated + OFFLOAD_SLOTS; offload->n_read++) {
        struct slot *slot = &offload->slots[offload->n_read % OFFLOAD_SLOTS];
        int r;

        slot->arrived = false;
        r = order_copy(offload, offload->n_read, false, has_arrived, slot);
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
        int r = order_copy(offload, offload->n_written, true, is_done, offload);

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

/* Return: the accumulators of a chunk of the portion that is updated next, in staging. */
static const float *acc_of(const void *userdata, uint32_t id)
{
    const struct offload *offload = userdata;
    const struct layout *layout = offload->step->layout;
    const struct layout_chunk *chunk = &layout->chunks[id];
    uint32_t parcel = layout->parts[chunk->part].parcel;
    uint64_t elem = layout->params[chunk->param].offset_elems + chunk->start_elem;
    uint64_t at = staging_at(offload, offload->n_updated, parcel) + elem - layout->parcels[parcel].offset_elems;

    return (const float *)(const void *)offload->staging.map + at;
}

static uint32_t first_chunk(const struct offload *offload)
{
    return offload->step->layout->parcels[offload->portions[offload->n_updated].first].first_chunk;
}

static void portion_update_run(struct work *work, uint32_t item)
{
    const struct offload *offload = container_of(work, struct offload, work);
    uint32_t id = first_chunk(offload) + item;

    step_update_chunk(offload->step, id, acc_of(offload, id));
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

/* Ends the cancelled update if its orders and its work have ended. */
static void end_cancelled(const struct offload *offload)
{
    struct step *step = offload->step;

    if (offload->n_orders == 0 && !offload->updating && !offload->retrying)
        step->update_done(step->update_userdata, -ECANCELED);
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
    struct step *step = offload->step;
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
        step->update_done(step->update_userdata, 0);
}

static void offload_update(struct step *step)
{
    struct offload *offload = step->offload;

    assert(offload->n_orders == 0 && !offload->updating && !offload->retrying);
    offload->n_read = offload->n_updated = offload->n_written = offload->n_gathered = 0;
    if (offload->n_portions == 0)
        retry(offload); /* advance() would call update_done(), which step_ops.update() must not */
    else
        advance(offload);
}

const struct step_ops step_offload_ops = {.reduce = step_device_reduce, .update = offload_update, .elsewhere = true};

/* ---- life ------------------------------------------------------------------------------------------------ */

int offload_new(struct offload **out, struct step *step)
{
    const struct layout *layout = step->layout;
    struct offload *offload = calloc(1, sizeof(*offload));
    int r = -ENOMEM;

    if (!offload)
        return -ENOMEM;
    assert(step->n_local > 0 && step->n_local <= DEVICE_MAX_LOCAL);
    offload->step = step;
    offload->staging = SEGMENT_NULL;
    offload->slot_elems = offload_slot_elems(layout);
    for (unsigned i = 0; i < OFFLOAD_SLOTS; i++)
        offload->slots[i].offload = offload;
    offload->starts = calloc((size_t)layout->n_parcels + 1, sizeof(*offload->starts));
    offload->portions = calloc((size_t)layout->n_parcels + 1, sizeof(*offload->portions));
    offload->moves = calloc(DEVICE_MAX_MOVES, sizeof(*offload->moves));
    if (offload->starts && offload->portions && offload->moves)
        r = segment_init(&offload->staging, "device.gradient", offload_staging_bytes(layout));
    if (r < 0) {
        offload_free(offload);
        return r;
    }
    make_portions(offload);
    *out = offload;
    return 0;
}

void offload_free(struct offload *offload)
{
    if (!offload)
        return;
    segment_deinit(&offload->staging);
    free(offload->starts);
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

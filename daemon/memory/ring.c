/* SPDX-License-Identifier: Apache-2.0 */

/* Opens, finds and credits the slots of a ring, and grants overflow extents. */

#include "daemon/memory/ring.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/budget/step-sizes.h"

_Static_assert(sizeof(struct ring_slot) == RING_SLOT_BYTES && sizeof(struct ring_extent) == RING_EXTENT_BYTES,
               "as the budget counts them");

/*
 * Reserves addresses for a ring on a GPU. The addresses only name places in the ring. The daemon must not access them,
 * because an access ends the process.
 */
static int make_places(struct ring *ring)
{
    void *places = mmap(NULL, ring->ring_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (places == MAP_FAILED)
        return -errno;
    ring->places = places;
    return 0;
}

static void ring_free(struct ring *ring)
{
    assert(ring->n_readers == 0);
    if (ring->freed)
        ring->freed(ring->userdata, ring);
    if (ring->places)
        munmap(ring->places, ring->ring_bytes);
    segment_deinit(&ring->ring);
    segment_deinit(&ring->overflow);
    segment_deinit(&ring->credit);
    free(ring->slots);
    free(ring->heads);
    free(ring->extents);
    free(ring);
}

int ring_new(struct ring **out, const struct ring_options *options)
{
    struct ring *ring = calloc(1, sizeof(*ring));
    uint64_t n_bytes = held_pushes_offset(options->ring_bytes) + sizeof(struct held_pushes);
    char name[SEGMENT_NAME_BYTES];
    int r = -ENOMEM;

    assert(options->n_tickets < RING_NONE);
    if (!ring)
        return -ENOMEM;
    ring->ring = ring->overflow = ring->credit = SEGMENT_NULL;
    ring->ring_bytes = options->ring_bytes;
    ring->n_tickets = options->n_tickets;
    ring->n_parcels = options->n_parcels;
    ring->slots = calloc(options->n_tickets, sizeof(*ring->slots));
    ring->extents = calloc(options->n_tickets, sizeof(*ring->extents));
    ring->heads = malloc(sizeof(*ring->heads) * MAX(options->n_parcels, 1u));
    if (!ring->slots || !ring->heads || !ring->extents)
        goto fail;
    for (uint32_t b = 0; b < options->n_parcels; b++)
        ring->heads[b] = RING_NONE;

    snprintf(name, sizeof(name), "ring.%u.%" PRIu64, options->rank, options->incarnation);
    if (options->on_device)
        r = make_places(ring);
    else
        r = n_bytes < options->ring_bytes ? -EOVERFLOW : segment_init_written_kept(&ring->ring, name, n_bytes);
    snprintf(name, sizeof(name), "overflow.%u.%" PRIu64, options->rank, options->incarnation);
    if (r == 0 && !options->on_device)
        r = segment_init_written_kept(&ring->overflow, name, options->overflow_bytes);
    snprintf(name, sizeof(name), "credit.%u.%" PRIu64, options->rank, options->incarnation);
    if (r == 0)
        r = segment_init_published_kept(&ring->credit, name, credit_page_bytes(options->n_tickets));
    if (r < 0)
        goto fail;
    ring->freed = options->freed;
    ring->userdata = options->userdata;
    *out = ring;
    return 0;

fail:
    ring_free(ring);
    return r;
}

void ring_hold(struct ring *ring)
{
    ring->n_readers++;
}

void ring_unhold(struct ring *ring)
{
    assert(ring->n_readers > 0);
    ring->n_readers--;
    if (ring->orphaned && ring->n_readers == 0)
        ring_free(ring);
}

void ring_orphan(struct ring *ring)
{
    if (!ring)
        return;
    assert(!ring->orphaned); /* a ring has one owner */
    ring->orphaned = true;
    if (ring->n_readers == 0)
        ring_free(ring);
}

bool ring_is_held_back(const struct ring *ring, uint32_t param)
{
    const struct held_pushes *held;
    uint32_t n;

    if (ring->places) /* the ring is on a GPU and cannot be read */
        return false;
    held = (const struct held_pushes *)(ring->ring.map + held_pushes_offset(ring->ring_bytes));
    n = MIN(atomic_load_explicit(&held->n, memory_order_acquire), (uint32_t)HELD_PUSHES);

    for (uint32_t i = 0; i < n; i++)
        if (atomic_load_explicit(&held->params[i], memory_order_relaxed) == param)
            return true;
    return false;
}

struct credit_page *ring_credit_page(const struct ring *ring)
{
    return (struct credit_page *)ring->credit.map;
}

void ring_set_writing(const struct ring *ring, bool writing)
{
    struct credit_page *page = ring_credit_page(ring);
    uint64_t generation = atomic_load_explicit(&page->generation, memory_order_relaxed);

    if (generation % 2 != writing) /* an earlier daemon may already have written the generation */
        atomic_store_explicit(&page->generation, generation + 1, memory_order_release);
}

static struct ring_extent *find_extent(struct ring *ring, uint64_t offset_bytes)
{
    for (uint32_t i = 0; i < ring->n_extents; i++)
        if (ring->extents[i].offset_bytes == offset_bytes)
            return &ring->extents[i];
    return NULL;
}

/* Return: whether a held slot is in the extent. Searches all slots, because overflow slots are rare. */
static bool holds_slot(const struct ring *ring, const struct ring_extent *extent)
{
    for (uint32_t i = 0; i < ring->n_tickets; i++)
        if (ring->slots[i].held && ring->slots[i].overflow && ring->slots[i].offset_bytes == extent->offset_bytes)
            return true;
    return false;
}

static bool place_is_valid(struct ring *ring, const struct ring_use *use)
{
    const struct ring_extent *extent;

    if (!use->overflow)
        return use->offset_bytes % (ring->places ? 128 : 64) == 0 && use->n_bytes <= ring->ring_bytes &&
               use->offset_bytes <= ring->ring_bytes - use->n_bytes;
    extent = find_extent(ring, use->offset_bytes);
    return extent && extent->busy && !extent->reserving && use->n_bytes <= extent->n_bytes && !holds_slot(ring, extent);
}

/*
 * Return: whether a slot of this parcel, micro-batch, pass and attempt exists. Of two such slots only one would be
 * reduced.
 */
static bool is_open_already(const struct ring *ring, const struct ring_use *use)
{
    const struct ring_slot *slot = ring_find(ring, use->parcel, use->micro_batch, use->pass);

    return slot && slot->attempt == use->attempt;
}

static uint8_t *memory_of(const struct ring *ring, bool overflow)
{
    if (overflow)
        return ring->overflow.map;
    return ring->places ? ring->places : ring->ring.map;
}

int ring_open_slot(struct ring *ring, const struct ring_use *use, struct ring_slot **out)
{
    struct ring_slot *slot;
    uint32_t credits;

    if (use->ticket >= ring->n_tickets)
        return RING_E_TICKET;
    slot = &ring->slots[use->ticket];
    if (slot->held) {
        if (slot->use != use->use || slot->parcel != use->parcel || slot->micro_batch != use->micro_batch ||
            slot->pass != use->pass || slot->attempt != use->attempt || slot->overflow != use->overflow ||
            slot->offset_bytes != use->offset_bytes)
            return RING_E_TICKET;
        *out = slot;
        return 0;
    }
    credits = atomic_load_explicit(&ring_credit_page(ring)->credits[use->ticket], memory_order_relaxed);
    if ((ring->replays ? (int32_t)(credits - use->use) < 0 : use->use != credits) || is_open_already(ring, use))
        return RING_E_TICKET;
    if (!place_is_valid(ring, use))
        return RING_E_PLACE;

    assert(!slot->lent); /* n_lent would count the slot for ever */
    assert(ring->n_held < ring->n_tickets);
    *slot = (struct ring_slot){
        .held = true,
        .overflow = use->overflow,
        .parcel = use->parcel,
        .micro_batch = use->micro_batch,
        .pass = use->pass,
        .attempt = use->attempt,
        .use = use->use,
        .offset_bytes = use->offset_bytes,
        .data = memory_of(ring, use->overflow) + use->offset_bytes,
        .next = ring->heads[use->parcel],
    };
    ring->heads[use->parcel] = use->ticket;
    ring->n_held++;
    *out = slot;
    return 0;
}

struct ring_slot *ring_find(const struct ring *ring, uint32_t parcel, uint32_t micro_batch, uint32_t pass)
{
    assert(parcel < ring->n_parcels);
    for (uint32_t i = ring->heads[parcel]; i != RING_NONE; i = ring->slots[i].next) {
        struct ring_slot *slot = &ring->slots[i];

        if (slot->micro_batch == micro_batch && slot->pass == pass)
            return slot;
    }
    return NULL;
}

static void unlink_slot(struct ring *ring, struct ring_slot *slot)
{
    uint32_t ticket = (uint32_t)(slot - ring->slots);
    uint32_t *link = &ring->heads[slot->parcel];

    assert(ticket < ring->n_tickets);
    while (*link != ticket) {
        assert(*link != RING_NONE);
        link = &ring->slots[*link].next;
    }
    *link = slot->next;
}

void ring_lend(struct ring *ring, struct ring_slot *slot)
{
    assert(slot->held && !slot->lent);
    assert(ring->n_lent < ring->n_held);
    slot->lent = true;
    ring->n_lent++;
}

void ring_credit_lent(struct ring *ring)
{
    for (uint32_t i = 0; ring->n_lent > 0 && i < ring->n_tickets; i++)
        if (ring->slots[i].lent)
            ring_credit(ring, &ring->slots[i]);
    assert(ring->n_lent == 0);
}

static void give_ticket_back(const struct ring *ring, uint32_t ticket, uint32_t use)
{
    _Atomic(uint32_t) *credits = &ring_credit_page(ring)->credits[ticket];

    if ((int32_t)(use - atomic_load_explicit(credits, memory_order_relaxed)) > 0)
        atomic_store_explicit(credits, use, memory_order_release);
}

void ring_credit(struct ring *ring, struct ring_slot *slot)
{
    assert(slot->held);
    assert(ring->n_held > 0);
    assert(ring->n_lent >= slot->lent);
    unlink_slot(ring, slot);
    ring->n_lent -= slot->lent;
    slot->held = false;
    slot->posted = slot->lent = false;
    ring->n_held--;
    if (slot->overflow) {
        struct ring_extent *extent = find_extent(ring, slot->offset_bytes);

        if (extent)
            extent->busy = false;
    }
    (void)failpoint("credit");
    give_ticket_back(ring, (uint32_t)(slot - ring->slots), slot->use + 1);
}

bool ring_credit_is_near(const struct ring *ring)
{
    for (uint32_t i = 0; ring->n_held > 0 && i < ring->n_tickets; i++)
        if (ring->slots[i].held && ring->slots[i].posted && !ring->slots[i].overflow)
            return true;
    return false;
}

/* Finds the lowest gap of n_bytes between extents. Return: the index for the new extent, or RING_NONE. */
static uint32_t find_gap(const struct ring *ring, uint64_t n_bytes, uint64_t *offset)
{
    uint64_t end = 0;

    for (uint32_t i = 0; i < ring->n_extents; i++) {
        assert(ring->extents[i].offset_bytes >= end); /* extents are sorted and do not overlap */
        if (ring->extents[i].offset_bytes - end >= n_bytes) {
            *offset = end;
            return i;
        }
        end = ring->extents[i].offset_bytes + ring->extents[i].n_bytes;
    }
    *offset = end;
    assert(end <= ring->overflow.n_bytes);
    return ring->overflow.n_bytes - end >= n_bytes ? ring->n_extents : RING_NONE;
}

static void remove_extent(struct ring *ring, uint32_t i)
{
    assert(i < ring->n_extents);
    assert(ring->overflow_bytes >= ring->extents[i].n_bytes);
    ring->overflow_bytes -= ring->extents[i].n_bytes;
    ring->n_extents--;
    memmove(&ring->extents[i], &ring->extents[i + 1], (ring->n_extents - i) * sizeof(ring->extents[0]));
}

/* Frees the unused pages between extents i - 1 and i. */
static void punch_gap(struct ring *ring, uint32_t i)
{
    uint64_t start = i > 0 ? ring->extents[i - 1].offset_bytes + ring->extents[i - 1].n_bytes : 0;
    uint64_t end = i < ring->n_extents ? ring->extents[i].offset_bytes : ring->overflow.n_bytes;

    start = round_up(start, page_size());
    end = end / page_size() * page_size();
    if (start < end)
        segment_punch(&ring->overflow, start, end - start);
}

/* Removes idle extents and frees their pages. all: even the extents that were used since the last ring_trim(). */
static void drop_idle(struct ring *ring, bool all)
{
    for (uint32_t i = ring->n_extents; i-- > 0;) {
        struct ring_extent *extent = &ring->extents[i];

        if (extent->busy || (extent->used && !all)) {
            extent->used = extent->busy;
            continue;
        }
        assert(!extent->reserving); /* a worker would reserve pages for the removed extent */
        remove_extent(ring, i);
        punch_gap(ring, i);
    }
}

int ring_grant(struct ring *ring, uint64_t n_bytes, uint64_t *extent_offset, uint64_t *extent_bytes)
{
    uint64_t offset;
    uint32_t at;

    /* Extents are not rounded up to pages, because then thousands of tiny parcels would exceed the overflow bound. */
    n_bytes = round_up(MAX(n_bytes, (uint64_t)1), 64);
    for (uint32_t i = 0; i < ring->n_extents; i++) {
        struct ring_extent *extent = &ring->extents[i];

        /* The size must be equal, because a small parcel must not occupy the extent of a large one. */
        if (extent->busy || extent->n_bytes != n_bytes)
            continue;
        assert(!extent->reserving);
        extent->busy = extent->used = true;
        ring->n_overflows++;
        *extent_offset = extent->offset_bytes;
        *extent_bytes = extent->n_bytes;
        return 0;
    }

    at = ring->n_extents < ring->n_tickets ? find_gap(ring, n_bytes, &offset) : RING_NONE;
    if (at == RING_NONE) {
        /* Idle extents of other sizes may occupy the memory. */
        drop_idle(ring, true);
        at = ring->n_extents < ring->n_tickets ? find_gap(ring, n_bytes, &offset) : RING_NONE;
    }
    if (at == RING_NONE)
        return -ENOSPC;
    memmove(&ring->extents[at + 1], &ring->extents[at], (ring->n_extents - at) * sizeof(ring->extents[0]));
    ring->extents[at] =
        (struct ring_extent){.offset_bytes = offset, .n_bytes = n_bytes, .busy = true, .used = true, .reserving = true};
    ring->n_extents++;
    ring->n_overflows++;
    ring->overflow_bytes += n_bytes;
    *extent_offset = offset;
    *extent_bytes = n_bytes;
    return 1;
}

/*
 * Removes idle extents that overlap the place. Return: the index for the place's extent, or RING_NONE if a busy extent
 * overlaps.
 */
static uint32_t clear_place(struct ring *ring, uint64_t offset_bytes, uint64_t n_bytes)
{
    uint32_t at = 0;

    while (at < ring->n_extents && ring->extents[at].offset_bytes < offset_bytes + n_bytes) {
        const struct ring_extent *extent = &ring->extents[at];

        if (extent->offset_bytes + extent->n_bytes <= offset_bytes)
            at++;
        else if (extent->busy)
            return RING_NONE;
        else
            remove_extent(ring, at);
    }
    return at;
}

int ring_find_grant(struct ring *ring, uint64_t extent_offset, uint64_t extent_bytes)
{
    struct ring_extent *same = find_extent(ring, extent_offset);
    uint32_t at;

    if (same && same->n_bytes == extent_bytes) {
        same->busy = same->used = true;
        return 0;
    }
    if (extent_bytes > ring->overflow.n_bytes || extent_offset > ring->overflow.n_bytes - extent_bytes)
        return -ENOSPC;
    at = clear_place(ring, extent_offset, extent_bytes);
    if (at == RING_NONE || ring->n_extents == ring->n_tickets)
        return -ENOSPC;
    memmove(&ring->extents[at + 1], &ring->extents[at], (ring->n_extents - at) * sizeof(ring->extents[0]));
    ring->extents[at] =
        (struct ring_extent){.offset_bytes = extent_offset, .n_bytes = extent_bytes, .busy = true, .used = true};
    ring->n_extents++;
    assert(at + 1 == ring->n_extents || ring->extents[at + 1].offset_bytes >= extent_offset + extent_bytes);
    ring->overflow_bytes += extent_bytes;
    return 0;
}

void ring_end_replay(struct ring *ring)
{
    ring->replays = false;
    for (uint32_t i = 0; ring->overflow.n_bytes > 0 && i <= ring->n_extents; i++)
        punch_gap(ring, i);
}

void ring_reserved(struct ring *ring, uint64_t extent_offset, bool ok)
{
    struct ring_extent *extent = find_extent(ring, extent_offset);

    assert(extent && extent->reserving);
    assert(extent->busy);
    extent->reserving = false;
    if (!ok)
        remove_extent(ring, (uint32_t)(extent - ring->extents));
}

void ring_reclaim(struct ring *ring)
{
    for (uint32_t i = 0; i < ring->n_extents; i++)
        if (!ring->extents[i].reserving)
            ring->extents[i].busy = false;
    for (uint32_t i = 0; ring->n_held > 0 && i < ring->n_tickets; i++)
        if (ring->slots[i].held && ring->slots[i].overflow)
            find_extent(ring, ring->slots[i].offset_bytes)->busy = true;
}

void ring_trim(struct ring *ring)
{
    drop_idle(ring, false);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The ring of one incarnation of a rank: the shared memory in which its gradients wait to
 * be reduced, and the tickets by which both sides count what is in use.
 *
 * A slot holds the gradients of one parcel (layout.h), micro-batch and pass. The client
 * chooses its place in the ring (or uses an overflow extent that it was
 * granted), names it by a ticket, and may use the ticket again when the credit page says so.
 * Slots of a parcel are found by (parcel, micro-batch, pass).
 *
 * The ring itself is bounds and bookkeeping; what a client writes into its
 * slots, or where it lets them overlap, harms only its own gradients.
 *
 * Overflow extents: pages of the overflow segment that are reserved on demand,
 * kept for the next time, and given back by ring_trim() when a whole step did not need them.
 *
 * In a job on GPUs the ring lies in device memory: it has room for all of a micro-batch, so there is no overflow.
 *
 * Loop thread only, but ring_reserve_overflow().
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "proto/credit.h"

enum {
    RING_NONE = UINT32_MAX,
    RING_E_FULL = 1,   /* the overflow bound is reached */
    RING_E_TICKET = 2, /* a ticket out of range, not free, of another use, or a second one for a parcel and pass */
    RING_E_PLACE = 3,  /* outside the segment, or in no extent that was granted */
};

struct ring_slot {
    bool held;
    bool overflow;
    bool posted; /* its reduction is under way, or it waits for a verdict of the workers */
    bool lent;   /* posted and reduced, but still read by others (ring_lend) */
    bool redo;   /* pushed again by a successor: to be compared, not reduced */
    uint32_t parcel;
    uint32_t micro_batch;
    uint32_t pass;
    uint32_t attempt;
    uint32_t use;
    uint32_t n_pushed;  /* parts in it */
    uint32_t n_pending; /* comparisons under way */
    uint32_t next;      /* next slot of the parcel, or RING_NONE */
    uint64_t offset_bytes;
    uint8_t *data;  /* in a job on GPUs a name for the place, and no memory */
    uint64_t point; /* in a job on GPUs: of the trainer, behind what is in it; 0: none */
};

struct ring_extent {
    uint64_t offset_bytes, n_bytes;
    bool busy; /* granted or holding a slot */
    bool used; /* since the last ring_trim() */
    bool reserving;
};

struct ring {
    struct segment ring, overflow, credit;
    uint8_t *places;     /* in a job on GPUs: as many addresses as the ring has bytes, and no memory behind them */
    uint64_t ring_bytes; /* usable */
    uint32_t n_tickets, n_parcels;
    struct ring_slot *slots;     /* by ticket */
    uint32_t *heads;             /* per parcel: first slot, or RING_NONE */
    struct ring_extent *extents; /* sorted by offset */
    uint32_t n_extents;
    uint64_t overflow_bytes; /* reserved now */
    uint64_t n_overflows;    /* grants since the beginning */
    uint32_t n_held;
    uint32_t n_lent;    /* of those */
    unsigned n_readers; /* workers that still touch it */
    bool ready;         /* its pages are reserved */
    bool replays;       /* slots are opened as they were for an earlier daemon: some were given back since */
    bool orphaned;      /* nobody will ask for it again: freed with the last reader */
    void (*freed)(void *userdata, const struct ring *ring);
    void *userdata;
};

/* The slot that a push names. */
struct ring_use {
    uint32_t ticket, use;
    uint32_t parcel, micro_batch, pass, attempt;
    uint64_t offset_bytes;
    uint64_t n_bytes; /* of the parcel in gradient dtype */
    bool overflow;
};

struct ring_options {
    unsigned rank;
    uint64_t incarnation; /* of the rank: the ring is kept under its name */
    uint64_t ring_bytes;
    uint64_t overflow_bytes; /* the bound: the arena */
    uint32_t n_parcels;
    uint32_t n_tickets;
    bool on_device; /* the ring lies on a GPU, and is not the daemon's to make; there is no overflow */
    void (*freed)(void *userdata, const struct ring *ring); /* before it is; may be NULL */
    void *userdata;
};

/* Pages of ring and credit page are to be reserved by the caller, off the loop. Return: 0 or -errno. */
int ring_new(struct ring **out, const struct ring_options *options);

/* A worker begins / has ended to touch the ring; the last one frees an orphan. Loop thread. */
void ring_hold(struct ring *ring);
void ring_unhold(struct ring *ring);
/* The owner lets go: freed now, or with the last reader. Slots that are held are forgotten. NULL is fine. */
void ring_orphan(struct ring *ring);

struct credit_page *ring_credit_page(const struct ring *ring);

/* The credit page says whether weights are being written. */
void ring_set_writing(const struct ring *ring, bool writing);

/* Does the client say that a push of this parameter waits to be sent with others? For texts only. */
bool ring_is_held_back(const struct ring *ring, uint32_t param);

/* The slot that a push goes to, opened if it is the first of it. Return: 0, RING_E_TICKET, RING_E_PLACE. */
int ring_open_slot(struct ring *ring, const struct ring_use *use, struct ring_slot **out);

struct ring_slot *ring_find(const struct ring *ring, uint32_t parcel, uint32_t micro_batch, uint32_t pass);

/* The slot has been reduced, so its rank need not wait for it; it is given back later. */
void ring_lend(struct ring *ring, struct ring_slot *slot);
/* The rank is gone, and nobody will write into its slots again: those lent are its no more. */
void ring_credit_lent(struct ring *ring);

/* Gives a slot back to the client. Nothing happens to its ticket if an earlier daemon has given the slot back. */
void ring_credit(struct ring *ring, struct ring_slot *slot);

/* True when a slot is on its way back: waiting for it is shorter than reserving an extent. */
bool ring_credit_is_near(const struct ring *ring);

/*
 * An extent of at least n_bytes. Return: 0 and *extent_offset; 1: its pages are to be reserved first, by
 * segment_reserve() off the loop, then ring_reserved(); RING_E_FULL is returned as -ENOSPC.
 */
int ring_grant(struct ring *ring, uint64_t n_bytes, uint64_t *extent_offset, uint64_t *extent_bytes);
void ring_reserved(struct ring *ring, uint64_t extent_offset, bool ok);

/* An earlier daemon has granted that extent. Return: 0 or -ENOSPC. */
int ring_find_grant(struct ring *ring, uint64_t extent_offset, uint64_t extent_bytes);
/* All that an earlier daemon did is repeated: from now on the ring is as any other. */
void ring_end_replay(struct ring *ring);

/* Extents that were granted but hold no slot become free again (the client has nothing open). */
void ring_reclaim(struct ring *ring);

/* Gives back the pages of extents that were not used since the last call. */
void ring_trim(struct ring *ring);

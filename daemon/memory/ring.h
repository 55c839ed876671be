/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The ring of one incarnation of a rank. It is shared memory for gradients that are not reduced yet, with tickets by
 * which client and daemon count the slots in use.
 *
 * A slot holds the gradients of one parcel (layout.h), micro-batch and pass. The client chooses the slot's place in the
 * ring, or uses an overflow extent that the daemon granted. The client names the slot by a ticket. It may use the
 * ticket again when the credit page shows that the daemon has returned the slot. ring_find() finds a slot by (parcel,
 * micro-batch, pass).
 *
 * The daemon checks only bounds and tickets. A client that writes wrong values, or lets its slots overlap, harms only
 * its own gradients.
 *
 * Overflow extents are pages of the overflow segment. They are reserved on demand and kept for reuse. ring_trim() frees
 * the extents that a whole step did not use.
 *
 * In a job on GPUs the ring is in device memory. It has room for a whole micro-batch, so there is no overflow.
 *
 * Loop thread only, except ring_reserve_overflow().
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "proto/credit.h"

enum {
    RING_NONE = UINT32_MAX,
    RING_E_FULL = 1,   /* the overflow bound is reached */
    RING_E_TICKET = 2, /* ticket out of range, in use, stale, or a second ticket for the same gradients */
    RING_E_PLACE = 3,  /* outside the segment, or not in a granted extent */
};

struct ring_slot {
    bool held;
    bool overflow;
    bool posted; /* its reduction was posted to the workers */
    bool lent;   /* reduced but not credited yet; see ring_lend() */
    bool redo;   /* pushed again by a successor process: compared, not reduced */
    uint32_t parcel;
    uint32_t micro_batch;
    uint32_t pass;
    uint32_t attempt;
    uint32_t use;
    uint32_t n_pushed;  /* parts pushed into the slot */
    uint32_t n_pending; /* unfinished comparisons of redo parts */
    uint32_t next;      /* next slot of the parcel, or RING_NONE */
    uint64_t offset_bytes;
    uint8_t *data;  /* in a job on GPUs: an address in `places`, not readable */
    uint64_t point; /* in a job on GPUs: the point (progress.h) after its write; 0: none */
};

struct ring_extent {
    uint64_t offset_bytes, n_bytes;
    bool busy; /* granted or holding a slot */
    bool used; /* was busy since the last ring_trim() */
    bool reserving;
};

struct ring {
    struct segment ring, overflow, credit;
    uint8_t *places;     /* in a job on GPUs: reserved addresses for ring_bytes, without memory */
    uint64_t ring_bytes; /* size of the part that holds slots */
    uint32_t n_tickets, n_parcels;
    struct ring_slot *slots;     /* by ticket */
    uint32_t *heads;             /* per parcel: first slot, or RING_NONE */
    struct ring_extent *extents; /* sorted by offset */
    uint32_t n_extents;
    uint64_t overflow_bytes; /* reserved now */
    uint64_t n_overflows;    /* grants since ring_new() */
    uint32_t n_held;
    uint32_t n_lent;    /* held slots that are lent */
    unsigned n_readers; /* workers that still use the ring */
    bool ready;         /* its pages are reserved */
    bool replays;       /* a replay reopens slots; an earlier daemon may have credited them */
    bool orphaned;      /* has no owner: the last reader frees it */
    void (*freed)(void *userdata, const struct ring *ring);
    void *userdata;
};

/* The slot that a push names. */
struct ring_use {
    uint32_t ticket, use;
    uint32_t parcel, micro_batch, pass, attempt;
    uint64_t offset_bytes;
    uint64_t n_bytes; /* size of the parcel in the gradient dtype */
    bool overflow;
};

struct ring_options {
    unsigned rank;
    uint64_t incarnation; /* incarnation of the rank; part of the segments' names */
    uint64_t ring_bytes;
    uint64_t overflow_bytes; /* size limit of the overflow segment */
    uint32_t n_parcels;
    uint32_t n_tickets;
    bool on_device; /* the ring is on a GPU: the daemon does not make it, and there is no overflow */
    void (*freed)(void *userdata, const struct ring *ring); /* called before the ring is freed; may be NULL */
    void *userdata;
};

/*
 * Makes a ring without pages. The caller reserves the pages of ring and credit page, off the loop thread. Return: 0 or
 * -errno.
 */
int ring_new(struct ring **out, const struct ring_options *options);

/*
 * Count the workers that use the ring. Call them on the loop thread before and after a worker's use. The last
 * ring_unhold() frees an orphaned ring.
 */
void ring_hold(struct ring *ring);
void ring_unhold(struct ring *ring);
/* Frees the ring now, or when the last reader ends. Held slots are lost. NULL is fine. */
void ring_orphan(struct ring *ring);

struct credit_page *ring_credit_page(const struct ring *ring);

/* Writes to the credit page whether weights are being written. */
void ring_set_writing(const struct ring *ring, bool writing);

/*
 * Return: whether the client delays a push of this parameter, to send several pushes together. Used only for texts to
 * the user.
 */
bool ring_is_held_back(const struct ring *ring, uint32_t param);

/*
 * Finds the slot that a push names. If this is the slot's first push, opens the slot. Return: 0, RING_E_TICKET, or
 * RING_E_PLACE.
 */
int ring_open_slot(struct ring *ring, const struct ring_use *use, struct ring_slot **out);

/* Return: the slot, or NULL. */
struct ring_slot *ring_find(const struct ring *ring, uint32_t parcel, uint32_t micro_batch, uint32_t pass);

/*
 * Marks a reduced slot as lent, so that the rank need not wait for it. ring_credit() returns the slot to the client
 * later.
 */
void ring_lend(struct ring *ring, struct ring_slot *slot);
/* Credits all lent slots. Call it when the rank is gone, because then nobody writes to the slots. */
void ring_credit_lent(struct ring *ring);

/* Returns a slot to the client. If an earlier daemon has already returned the slot, the credit page does not change. */
void ring_credit(struct ring *ring, struct ring_slot *slot);

/* Return: whether a slot will be credited soon. Then waiting for this slot is faster than reserving an extent. */
bool ring_credit_is_near(const struct ring *ring);

/*
 * Grants an extent of at least n_bytes. Return: 0, 1, or -ENOSPC if the overflow is full. After 1 the caller reserves
 * the extent's pages by segment_reserve(), off the loop thread, and then calls ring_reserved().
 */
int ring_grant(struct ring *ring, uint64_t n_bytes, uint64_t *extent_offset, uint64_t *extent_bytes);
void ring_reserved(struct ring *ring, uint64_t extent_offset, bool ok);

/* Grants again an extent that an earlier daemon granted. Return: 0 or -ENOSPC. */
int ring_find_grant(struct ring *ring, uint64_t extent_offset, uint64_t extent_bytes);
/* Ends the replay, and frees the overflow pages that no extent uses. */
void ring_end_replay(struct ring *ring);

/* Makes granted extents without a slot idle. Call it when the client will not use them any more. */
void ring_reclaim(struct ring *ring);

/* Frees the extents that were not used since the last call. */
void ring_trim(struct ring *ring);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The ledger records which (step, micro-batch, part, rank) has been pushed, by
 * which process, and when. It is the only judge of duplicates. Pure: input in,
 * verdict out, no I/O, no clock, no allocation inside a step (except the sums of
 * second and later passes).
 *
 * A part is what one push carries (layout.h): the gradient of a parameter, or a share of a large one. For the
 * ledger, parts are numbers without an order.
 *
 * Positions. A position is (step, micro-batch), compared in that order. Per
 * rank the ledger keeps the *last ended* position (none at first), the *open*
 * one (none, or the next), and whether the rank has asked for the step. The
 * next position of a rank is (step of the job, number of micro-batches that the
 * rank has ended in this step). begin() opens it, end() ends it; begin() on the
 * open position is another backward of the same micro-batch and changes
 * nothing.
 *
 * Classifying a position, in this order:
 *   equal to the last ended one                     LEDGER_E_AFTER_BOUNDARY   E1004
 *   of an earlier step, or before the last ended    LEDGER_E_STALE            E1002
 *   nothing open, or beyond the open one            LEDGER_E_EARLY            E1003
 *   otherwise it is the open one.
 * For begin(), "open" in these rules means the next position, opened or not. A
 * rank that has asked for the step may begin no micro-batch (LEDGER_E_EARLY after
 * the first two checks).
 *
 * Judging a push, in this order:
 *   part unknown or not trainable                   LEDGER_E_PARAM            E1103
 *   incarnation is not the rank's                   LEDGER_E_STALE            E1002
 *   attempt older than the job's                    LEDGER_DROPPED            not reported
 *   attempt newer than the job's                    LEDGER_E_EARLY            E1003
 *   sequence <= highest *admitted* of this
 *   incarnation (sequences grow with every push)    LEDGER_RETRY              not reported
 *   the position                                    as above
 *   fewer pushes of the part than a dead
 *   predecessor left behind as posted               LEDGER_REDO               sums are compared
 *   not pushed yet in this micro-batch              LEDGER_ADMITTED, pass 0
 *   pushed, policy accumulate                       LEDGER_ADMITTED, next pass
 *   pushed, otherwise                               LEDGER_E_DUPLICATE        E1001
 * Only ADMITTED and REDO change the ledger; both raise the highest admitted sequence.
 * Sequences count from 1 in each incarnation and continue over abort() and commit().
 * A part has at most 65,535 passes; the next push is LEDGER_E_DUPLICATE
 * under any policy.
 *
 * Passes. The k-th push of a part by a rank in a micro-batch is its pass k
 * (from 0). Passes go from pushed to *posted* in order: the reduction of a
 * posted pass is with the workers, and cannot be withdrawn. Later its 64-bit sum
 * becomes known.
 *
 * Entries. The entries of an ended micro-batch can be read, posted and summed until
 * forget(), or the begin() that opens the next position, clears them (n_pushed_open
 * = 0). Neither clears a predecessor's passes that stand (see below). forget() while
 * a micro-batch is open does nothing.
 *
 * A successor. At attach() with a new incarnation, the posted passes of the open
 * micro-batch *stand*: they stay in the ledger, and the unposted passes leave it. Before
 * a new pass of a part is admitted, the successor must push the part's standing passes
 * again (REDO, in pass order), and their sums are compared. The position is no longer
 * open, but it is the next one, which the successor begins again. Ended micro-batches
 * and a request for the step stay. attach() with the same incarnation changes nothing.
 * Before all standing passes are pushed again, the rank may not ask for the step
 * (LEDGER_E_EARLY), because the sums include passes of a micro-batch that is not ended.
 *
 * abandon() gives up the open micro-batch. If no pass of it is posted, its pushes leave
 * the ledger, nothing is open, and the same position may begin again. If a pass is
 * posted, it returns LEDGER_MUST_ABORT and changes nothing; the caller aborts the
 * step. If nothing is open, it returns 0 and changes nothing.
 *
 * abort() raises the attempt by 1. All pushes and requests of the step leave the ledger, on all
 * ranks. The last ended position becomes what it was when the step opened.
 * commit() raises the step by 1. All pushes and requests of the step leave the ledger. The last
 * ended positions stay.
 *
 * Memory: about (end_rank - first_rank) x n_parts x sizeof(struct ledger_entry).
 */

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/diagnosis/push-record.h"

enum {
    LEDGER_ADMITTED = 0, /* verdict: *pass is the pass index */
    LEDGER_RETRY = 1,    /* already admitted from this incarnation: not reported */
    LEDGER_DROPPED = 2,  /* belongs to an aborted attempt: not reported */
    LEDGER_REDO = 3,     /* a predecessor's push stands: compare sums at *pass, do not add */
    LEDGER_MUST_ABORT = 4,
    LEDGER_E_PARAM = 5,
    LEDGER_E_STALE = 6,
    LEDGER_E_AFTER_BOUNDARY = 7,
    LEDGER_E_EARLY = 8,
    LEDGER_E_DUPLICATE = 9,
    LEDGER_E_INCOMPLETE = 10, /* end(): a successor has not pushed its predecessor's standing passes again */
};

struct ledger_position {
    uint64_t step;
    uint32_t micro_batch;
    bool valid;
};

struct ledger_entry {
    struct push_record first; /* pass 0 */
    uint64_t sum;             /* sum of pass 0, if n_summed > 0 */
    uint64_t *more_sums;      /* sums of passes 1.., owned */
    uint16_t n_pushed;
    uint16_t n_posted;
    uint16_t n_summed;
    uint16_t n_redo; /* passes of a predecessor that are still to be pushed again */
};

struct ledger_rank {
    uint64_t incarnation; /* 0 = never attached */
    uint64_t last_sequence;
    struct ledger_position last_ended;
    struct ledger_position last_ended_at_commit;
    bool open;                    /* the next position has been opened */
    bool asked;                   /* the rank has asked for the step */
    bool accumulate;              /* on_duplicate: accumulate; the caller may change it between micro-batches */
    uint32_t n_ended;             /* micro-batches ended in this step */
    uint32_t n_inherited;         /* of n_ended: ended by earlier incarnations */
    uint32_t n_pushed;            /* parts pushed at least once in this step, this micro-batch included */
    uint32_t n_pushed_open;       /* parts with a push among the entries */
    struct ledger_entry *entries; /* n_parts, of the open micro-batch, or of the last ended one; owned */
    uint8_t *pushed_in_step;      /* n_parts, not 0 when pushed in this step; owned */
};

struct ledger {
    unsigned first_rank, end_rank; /* the ranks of this node */
    unsigned n_ranks;              /* of all nodes */
    uint32_t n_parts;
    uint64_t step;
    uint32_t attempt;
    uint8_t *trainable;        /* n_parts flags; owned copy */
    struct ledger_rank *ranks; /* by rank; other nodes' are mirrored: see ledger_mirror() */
};

/* The ranks of this node are [first, end). All nodes together have n ranks. */
struct ledger_ranks {
    unsigned first, end, n;
};

/* trainable is copied. Return: 0 or -ENOMEM. */
int ledger_init(struct ledger *ledger, struct ledger_ranks ranks, uint32_t n_parts, const uint8_t *trainable,
                bool accumulate);

/*
 * Returns the record of another node's rank in the open step. The caller sets the record's flags and pushed_in_step.
 * The record has no entries.
 */
struct ledger_rank *ledger_mirror(struct ledger *ledger, unsigned rank);
void ledger_deinit(struct ledger *ledger);

/* Return: 0 if the incarnation is the same; 1 if it is new (see "A successor"). */
int ledger_attach(struct ledger *ledger, unsigned rank, uint64_t incarnation);

/* Return: the position that begin() would open. */
struct ledger_position ledger_next(const struct ledger *ledger, unsigned rank);

/* Return: LEDGER_ADMITTED, LEDGER_E_STALE, _EARLY, _AFTER_BOUNDARY. */
int ledger_begin(struct ledger *ledger, unsigned rank, uint64_t step, uint32_t micro_batch);

/* Judges a push. ADMITTED in pass 0 keeps the record. ADMITTED and REDO set *pass. */
int ledger_push(struct ledger *ledger, unsigned rank, const struct push_record *record, uint16_t *pass);

/* Marks the next unposted pass of the part as posted. The part must have one. */
void ledger_post(struct ledger *ledger, unsigned rank, uint32_t part);

/* Sets the sum of the next posted pass that has no sum. The part must have one. Return: 0 or -ENOMEM. */
int ledger_sum(struct ledger *ledger, unsigned rank, uint32_t part, uint64_t sum);

/* Return: true and the sum of that pass, or false if the sum is not known. */
bool ledger_find_sum(const struct ledger *ledger, unsigned rank, uint32_t part, uint16_t pass, uint64_t *sum);

/*
 * Ends the open micro-batch, which must be at that position. Passes that are not posted yet may be posted later,
 * without the rank. The entries leave the ledger with ledger_forget(), which the caller calls when their reductions are
 * done. If nothing is open, the position is classified as for begin(), except that the next position is _EARLY.
 * Return: LEDGER_ADMITTED; LEDGER_RETRY if it is the last ended position; or LEDGER_E_STALE, _EARLY or _INCOMPLETE, and
 * nothing changes.
 */
int ledger_end(struct ledger *ledger, unsigned rank, uint64_t step, uint32_t micro_batch);

/* Clears the entries of the micro-batch that the rank has ended, when they are no longer needed. */
void ledger_forget(struct ledger *ledger, unsigned rank);

/* Return: 0 or LEDGER_MUST_ABORT. */
int ledger_abandon(struct ledger *ledger, unsigned rank);

/*
 * The rank asks for the step. Return: 0; LEDGER_RETRY if it has asked already; LEDGER_E_EARLY while a micro-batch is
 * open, or a predecessor's passes stand.
 */
int ledger_ask(struct ledger *ledger, unsigned rank);

/* Has an earlier incarnation ended micro-batches of this step, or left standing passes that are not pushed again
 * yet? */
bool ledger_inherits(const struct ledger *ledger, unsigned rank);

void ledger_abort(struct ledger *ledger);
void ledger_commit(struct ledger *ledger);

static inline const struct ledger_entry *ledger_entry(const struct ledger *ledger, unsigned rank, uint32_t part)
{
    assert(rank >= ledger->first_rank && rank < ledger->end_rank); /* other nodes' ranks have no entries */
    assert(part < ledger->n_parts);
    return &ledger->ranks[rank].entries[part];
}

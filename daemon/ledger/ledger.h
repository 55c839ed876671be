/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The ledger: which (step, micro-batch, part, rank) has been pushed, by
 * whom, when. It is the only judge of duplicates. Pure: input in, verdict out,
 * no I/O, no clock, no allocation inside a step (but the sums of second and
 * later passes).
 *
 * A part is what one push carries (layout.h): the gradient of a parameter, or a share of a large one. The ledger
 * knows parts by number only, and no order among them.
 *
 * Positions. A position is (step, micro-batch), compared in that order. Per
 * rank the ledger knows the *last ended* position (none at first), the *open*
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
 * For begin() "open" in these rules is the next position, whether it has been
 * opened or not; and a rank that has asked for the step may begin nothing
 * (LEDGER_E_EARLY after the two checks before it).
 *
 * Judging a push, in this order:
 *   part unknown or not trainable                   LEDGER_E_PARAM            E1103
 *   incarnation is not the rank's                   LEDGER_E_STALE            E1002
 *   attempt older than the job's                    LEDGER_DROPPED            silence
 *   attempt newer than the job's                    LEDGER_E_EARLY            E1003
 *   sequence <= highest *admitted* of this
 *   incarnation (sequences grow with every push)    LEDGER_RETRY              silence
 *   the position                                    as above
 *   fewer pushes of the part than a dead
 *   predecessor left behind as posted               LEDGER_REDO               compare
 *   not pushed yet in this micro-batch              LEDGER_ADMITTED, pass 0
 *   pushed, policy accumulate                       LEDGER_ADMITTED, next pass
 *   pushed, otherwise                               LEDGER_E_DUPLICATE        E1001
 * Only ADMITTED and REDO change anything; both raise the highest admitted sequence.
 * Sequences count from 1 in each incarnation and go on over abort() and commit().
 * A part has at most 65,535 passes; the push after them is LEDGER_E_DUPLICATE
 * under any policy.
 *
 * Passes. The k-th push of a part by a rank in a micro-batch is its pass k
 * (from 0). A pass goes from pushed to *posted* (its reduction was handed to the
 * workers and can no longer be withdrawn) in order; later its 64-bit sum becomes known.
 *
 * Entries. Those of an ended micro-batch can be read, posted and summed until
 * forget(), or the begin() that opens the next position, clears them (n_pushed_open
 * = 0). Neither clears what stands of a predecessor; forget() while a micro-batch
 * is open does nothing.
 *
 * A successor. attach() with a new incarnation: passes of the open micro-batch
 * that are posted stand, the others leave the ledger; what stands must be pushed
 * again (REDO, in pass order) to be compared by its sum, before anything new of that
 * part is admitted. The position stays open only in the sense that it is the
 * next one: the successor begins it again. Ended micro-batches and a request
 * for the step stand. attach() with the same incarnation changes nothing. While
 * something stands that was not pushed again, the rank may not ask for the step
 * (LEDGER_E_EARLY): the sums hold passes of a micro-batch that nobody has ended.
 *
 * abandon(): the open micro-batch is given up. Nothing of it posted: its pushes
 * leave the ledger, nothing is open, the same position may begin again. Something posted:
 * LEDGER_MUST_ABORT and nothing changes; the caller aborts the step. Nothing open: 0 and
 * nothing changes.
 *
 * abort(): attempt + 1; everything of the step leaves the ledger on all ranks,
 * requests too; the last ended position becomes what it was when the step
 * opened. commit(): step + 1; the ledger of the step is closed, the last ended
 * positions stay.
 *
 * Memory: about (end_rank - first_rank) x n_parts x sizeof(struct ledger_entry).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/diagnosis/push-record.h"

enum {
    LEDGER_ADMITTED = 0, /* verdict: *pass is the pass index */
    LEDGER_RETRY = 1,    /* already admitted from this incarnation: say nothing */
    LEDGER_DROPPED = 2,  /* belongs to an aborted attempt: say nothing */
    LEDGER_REDO = 3,     /* a predecessor's push stands: compare sums at *pass, do not add */
    LEDGER_MUST_ABORT = 4,
    LEDGER_E_PARAM = 5,
    LEDGER_E_STALE = 6,
    LEDGER_E_AFTER_BOUNDARY = 7,
    LEDGER_E_EARLY = 8,
    LEDGER_E_DUPLICATE = 9,
    LEDGER_E_INCOMPLETE = 10, /* end(): a successor did not push again what stands of its predecessor */
};

struct ledger_position {
    uint64_t step;
    uint32_t micro_batch;
    bool valid;
};

struct ledger_entry {
    struct push_record first; /* pass 0 */
    uint64_t sum;             /* of pass 0, when n_summed > 0 */
    uint64_t *more_sums;      /* of passes 1.., owned */
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
    bool asked;                   /* for the step */
    bool accumulate;              /* on_duplicate: accumulate; the caller may change it between micro-batches */
    uint32_t n_ended;             /* micro-batches ended in this step */
    uint32_t n_inherited;         /* of these, by earlier incarnations */
    uint32_t n_pushed;            /* parts pushed at least once in this step, this micro-batch included */
    uint32_t n_pushed_open;       /* parts with a push among the entries */
    struct ledger_entry *entries; /* n_parts, of the open micro-batch, or of the last ended one; owned */
    uint8_t *pushed_in_step;      /* n_parts, not 0 when pushed in this step; owned */
};

struct ledger {
    unsigned first_rank, end_rank; /* those of this node */
    unsigned n_ranks;              /* in all */
    uint32_t n_parts;
    uint64_t step;
    uint32_t attempt;
    uint8_t *trainable;        /* n_parts flags; owned copy */
    struct ledger_rank *ranks; /* by rank; other nodes' are mirrored: see ledger_mirror() */
};

/* Ranks of this node, [first, end), of n in all. */
struct ledger_ranks {
    unsigned first, end, n;
};

/* trainable is copied. Return: 0 or -ENOMEM. */
int ledger_init(struct ledger *ledger, struct ledger_ranks ranks, uint32_t n_parts, const uint8_t *trainable,
                bool accumulate);

/* What is known of another node's rank in the open step: flags, and pushed_in_step to be filled in. No entries. */
struct ledger_rank *ledger_mirror(struct ledger *ledger, unsigned rank);
void ledger_deinit(struct ledger *ledger);

/* Return: 0 = same incarnation, 1 = a new one (see "A successor"). */
int ledger_attach(struct ledger *ledger, unsigned rank, uint64_t incarnation);

/* The position that begin() would open. */
struct ledger_position ledger_next(const struct ledger *ledger, unsigned rank);

/* Return: LEDGER_ADMITTED, LEDGER_E_STALE, _EARLY, _AFTER_BOUNDARY. */
int ledger_begin(struct ledger *ledger, unsigned rank, uint64_t step, uint32_t micro_batch);

/* Judges a push; on ADMITTED pass 0 keeps the record. *pass is set on ADMITTED and REDO. */
int ledger_push(struct ledger *ledger, unsigned rank, const struct push_record *record, uint16_t *pass);

/* The next unposted pass of the part is posted. Asserts that there is one. */
void ledger_post(struct ledger *ledger, unsigned rank, uint32_t part);

/* The sum of the next posted pass without one is known. Return: 0 or -ENOMEM. */
int ledger_sum(struct ledger *ledger, unsigned rank, uint32_t part, uint64_t sum);

/* Return: true and the sum of that pass when it is known. */
bool ledger_find_sum(const struct ledger *ledger, unsigned rank, uint32_t part, uint16_t pass, uint64_t *sum);

/*
 * Ends the open micro-batch (of that position). All of its passes are taken
 * as posted or to be posted without the rank: the entries leave the ledger only when
 * the caller says that their reductions are done, by ledger_forget().
 * With nothing open the position is classified as for begin(), and the very next one is _EARLY.
 * Return: LEDGER_ADMITTED; LEDGER_RETRY when it is the last ended one;
 * LEDGER_E_STALE, _EARLY, _INCOMPLETE (nothing changes).
 */
int ledger_end(struct ledger *ledger, unsigned rank, uint64_t step, uint32_t micro_batch);

/* The entries of the micro-batch that the rank has ended are no longer needed. */
void ledger_forget(struct ledger *ledger, unsigned rank);

/* Return: 0 or LEDGER_MUST_ABORT. */
int ledger_abandon(struct ledger *ledger, unsigned rank);

/*
 * The rank asks for the step.
 * Return: 0; LEDGER_RETRY when it has; LEDGER_E_EARLY while a micro-batch is open or a predecessor's
 * passes stand.
 */
int ledger_ask(struct ledger *ledger, unsigned rank);

/* Has an earlier incarnation ended micro-batches of this step, or does something stand that was not pushed again? */
bool ledger_inherits(const struct ledger *ledger, unsigned rank);

void ledger_abort(struct ledger *ledger);
void ledger_commit(struct ledger *ledger);

static inline const struct ledger_entry *ledger_entry(const struct ledger *ledger, unsigned rank, uint32_t part)
{
    return &ledger->ranks[rank].entries[part];
}

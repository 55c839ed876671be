/* SPDX-License-Identifier: Apache-2.0 */

/* The ledger records pushes and judges duplicates; ledger.h is its specification. */

#include "daemon/ledger/ledger.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/budget/step-sizes.h"

_Static_assert(sizeof(struct ledger_entry) == LEDGER_ENTRY_BYTES, "as the budget counts it");

/*
 * Bits of pushed_in_step. They are separate because a push of the open micro-batch can still leave the ledger, but a
 * push of an ended one stays until the step is over.
 */
enum {
    PUSHED_ENDED = 1 << 0, /* in a micro-batch that the rank has ended */
    PUSHED_OPEN = 1 << 1,  /* in the open micro-batch, or a predecessor's standing pass */
};

int ledger_init(struct ledger *ledger, struct ledger_ranks ranks, uint32_t n_parts, const uint8_t *trainable,
                bool accumulate)
{
    /* calloc(0) may return NULL although there is memory. */
    size_t n = MAX(n_parts, 1u);

    assert(ranks.first <= ranks.end);
    assert(ranks.end <= ranks.n);
    *ledger = (struct ledger){.n_parts = n_parts, .first_rank = ranks.first};

    ledger->trainable = calloc(n, sizeof(*ledger->trainable));
    ledger->ranks = calloc(MAX(ranks.n, 1u), sizeof(*ledger->ranks));
    if (!ledger->trainable || !ledger->ranks)
        goto no_memory;
    ledger->end_rank = ranks.end;
    ledger->n_ranks = ranks.n;
    if (n_parts)
        memcpy(ledger->trainable, trainable, n_parts * sizeof(*trainable));

    for (unsigned i = 0; i < ranks.n; i++) {
        struct ledger_rank *rank = &ledger->ranks[i];
        bool own = i >= ranks.first && i < ranks.end;

        rank->accumulate = accumulate;
        rank->entries = own ? calloc(n, sizeof(*rank->entries)) : NULL;
        rank->pushed_in_step = calloc(n, sizeof(*rank->pushed_in_step));
        if ((own && !rank->entries) || !rank->pushed_in_step)
            goto no_memory;
    }
    return 0;

no_memory:
    ledger_deinit(ledger);
    return -ENOMEM;
}

void ledger_deinit(struct ledger *ledger)
{
    for (unsigned i = 0; i < ledger->n_ranks; i++) {
        struct ledger_rank *rank = &ledger->ranks[i];

        for (uint32_t p = 0; rank->entries && p < ledger->n_parts; p++)
            free(rank->entries[p].more_sums);
        free(rank->entries);
        free(rank->pushed_in_step);
    }
    free(ledger->ranks);
    free(ledger->trainable);
    *ledger = (struct ledger){};
}

struct ledger_rank *ledger_mirror(struct ledger *ledger, unsigned rank)
{
    assert(rank < ledger->n_ranks && !ledger->ranks[rank].entries);
    return &ledger->ranks[rank];
}

static bool position_equal(struct ledger_position a, struct ledger_position b)
{
    return a.valid && b.valid && a.step == b.step && a.micro_batch == b.micro_batch;
}

static bool position_before(struct ledger_position a, struct ledger_position b)
{
    return a.valid && b.valid && (a.step < b.step || (a.step == b.step && a.micro_batch < b.micro_batch));
}

static struct ledger_position position(uint64_t step, uint32_t micro_batch)
{
    return (struct ledger_position){.step = step, .micro_batch = micro_batch, .valid = true};
}

static struct ledger_rank *get_rank(const struct ledger *ledger, unsigned rank)
{
    assert(rank >= ledger->first_rank && rank < ledger->end_rank);
    return &ledger->ranks[rank];
}

struct ledger_position ledger_next(const struct ledger *ledger, unsigned rank)
{
    return position(ledger->step, get_rank(ledger, rank)->n_ended);
}

/*
 * Classifies a position by the rules in ledger.h. may: whether the next position may be used. Return: ADMITTED for the
 * next position, or an error of these rules.
 */
static int classify_position(const struct ledger *ledger, unsigned rank, struct ledger_position at, bool may)
{
    const struct ledger_rank *r = get_rank(ledger, rank);

    if (position_equal(at, r->last_ended))
        return LEDGER_E_AFTER_BOUNDARY;
    if (at.step < ledger->step || position_before(at, r->last_ended))
        return LEDGER_E_STALE;
    if (!may || position_before(ledger_next(ledger, rank), at))
        return LEDGER_E_EARLY;

    /* No position is between the last ended one and the next one. */
    assert(position_equal(at, ledger_next(ledger, rank)));
    return LEDGER_ADMITTED;
}

/* Removes the part from the entries. */
static void clear_entry(struct ledger_rank *rank, uint32_t part)
{
    struct ledger_entry *entry = &rank->entries[part];

    if (entry->n_pushed == 0)
        return;

    free(entry->more_sums);
    memset(entry, 0, sizeof(*entry));
    assert(rank->n_pushed_open > 0);
    rank->n_pushed_open--;
}

/* Removes the part from the entries, as if it was never pushed. The micro-batch must not be ended. */
static void withdraw_entry(struct ledger_rank *rank, uint32_t part)
{
    clear_entry(rank, part);

    if (rank->pushed_in_step[part] == PUSHED_OPEN) {
        assert(rank->n_pushed > 0);
        rank->n_pushed--;
    }
    rank->pushed_in_step[part] &= (uint8_t)~PUSHED_OPEN;
}

int ledger_attach(struct ledger *ledger, unsigned rank, uint64_t incarnation)
{
    struct ledger_rank *r = get_rank(ledger, rank);

    if (r->incarnation == incarnation)
        return 0;

    r->incarnation = incarnation;
    r->last_sequence = 0;
    r->n_inherited = r->n_ended;

    /* If nothing is open, the entries are of an ended micro-batch, or stand since an earlier incarnation died. */
    if (!r->open)
        return 1;

    for (uint32_t p = 0; p < ledger->n_parts; p++) {
        struct ledger_entry *entry = &r->entries[p];

        assert(entry->n_posted <= entry->n_pushed);
        assert(entry->n_summed <= entry->n_posted); /* no sum is lost, because posted passes stand */
        if (entry->n_posted == 0) {
            withdraw_entry(r, p);
        } else {
            entry->n_pushed = entry->n_posted;
            entry->n_redo = entry->n_posted;
        }
    }
    r->open = false;
    return 1;
}

int ledger_begin(struct ledger *ledger, unsigned rank, uint64_t step, uint32_t micro_batch)
{
    struct ledger_rank *r = get_rank(ledger, rank);
    int verdict = classify_position(ledger, rank, position(step, micro_batch), !r->asked);

    if (verdict != LEDGER_ADMITTED)
        return verdict;

    if (!r->open) {
        ledger_forget(ledger, rank);
        r->open = true;
    }
    return LEDGER_ADMITTED;
}

static void admit_record(struct ledger_rank *rank, const struct push_record *record, uint16_t *pass)
{
    struct ledger_entry *entry = &rank->entries[record->part];
    uint8_t *pushed = &rank->pushed_in_step[record->part];

    assert(entry->n_redo == 0);
    assert(entry->n_pushed < UINT16_MAX);
    *pass = entry->n_pushed++;
    rank->last_sequence = record->sequence;
    if (*pass > 0)
        return;

    entry->first = *record;
    rank->n_pushed_open++;
    if (!*pushed)
        rank->n_pushed++;
    *pushed |= PUSHED_OPEN;
}

int ledger_push(struct ledger *ledger, unsigned rank, const struct push_record *record, uint16_t *pass)
{
    struct ledger_rank *r = get_rank(ledger, rank);
    struct ledger_entry *entry;
    int verdict;

    if (record->part >= ledger->n_parts || !ledger->trainable[record->part])
        return LEDGER_E_PARAM;
    if (record->incarnation != r->incarnation)
        return LEDGER_E_STALE;
    if (record->attempt < ledger->attempt)
        return LEDGER_DROPPED;
    if (record->attempt > ledger->attempt)
        return LEDGER_E_EARLY;
    if (record->sequence <= r->last_sequence)
        return LEDGER_RETRY;

    verdict = classify_position(ledger, rank, position(record->step, record->micro_batch), r->open);
    if (verdict != LEDGER_ADMITTED)
        return verdict;

    entry = &r->entries[record->part];
    if (entry->n_redo > 0) {
        assert(entry->n_redo <= entry->n_pushed);
        *pass = entry->n_pushed - entry->n_redo--;
        r->last_sequence = record->sequence;
        return LEDGER_REDO;
    }
    if (entry->n_pushed > 0 && (!r->accumulate || entry->n_pushed == UINT16_MAX))
        return LEDGER_E_DUPLICATE;

    admit_record(r, record, pass);
    return LEDGER_ADMITTED;
}

static struct ledger_entry *get_entry(const struct ledger *ledger, unsigned rank, uint32_t part)
{
    assert(part < ledger->n_parts);
    return &get_rank(ledger, rank)->entries[part];
}

void ledger_post(struct ledger *ledger, unsigned rank, uint32_t part)
{
    struct ledger_entry *entry = get_entry(ledger, rank, part);

    assert(entry->n_posted < entry->n_pushed);
    entry->n_posted++;
}

/*
 * Makes room for one more sum in more_sums, which has n sums. The array doubles when n reaches a power of two, so its
 * capacity need not be stored.
 */
static int grow_more_sums(struct ledger_entry *entry, size_t n)
{
    uint64_t *sums;

    if (n & (n - 1))
        return 0;

    sums = reallocarray(entry->more_sums, MAX(2 * n, (size_t)1), sizeof(*sums));
    if (!sums)
        return -ENOMEM;
    entry->more_sums = sums;
    return 0;
}

int ledger_sum(struct ledger *ledger, unsigned rank, uint32_t part, uint64_t sum)
{
    struct ledger_entry *entry = get_entry(ledger, rank, part);
    int r;

    assert(entry->n_summed < entry->n_posted);

    if (entry->n_summed == 0) {
        entry->sum = sum;
    } else {
        r = grow_more_sums(entry, entry->n_summed - 1u);
        if (r < 0)
            return r;
        entry->more_sums[entry->n_summed - 1] = sum;
    }
    entry->n_summed++;
    return 0;
}

bool ledger_find_sum(const struct ledger *ledger, unsigned rank, uint32_t part, uint16_t pass, uint64_t *sum)
{
    const struct ledger_entry *entry = get_entry(ledger, rank, part);

    if (pass >= entry->n_summed)
        return false;
    *sum = pass == 0 ? entry->sum : entry->more_sums[pass - 1];
    return true;
}

static bool stands(const struct ledger *ledger, const struct ledger_rank *rank)
{
    for (uint32_t p = 0; rank->n_pushed_open > 0 && p < ledger->n_parts; p++)
        if (rank->entries[p].n_redo > 0)
            return true;
    return false;
}

int ledger_end(struct ledger *ledger, unsigned rank, uint64_t step, uint32_t micro_batch)
{
    struct ledger_rank *r = get_rank(ledger, rank);
    struct ledger_position at = position(step, micro_batch);
    int verdict = classify_position(ledger, rank, at, r->open);

    if (verdict == LEDGER_E_AFTER_BOUNDARY)
        return LEDGER_RETRY;
    if (verdict != LEDGER_ADMITTED)
        return verdict;
    if (stands(ledger, r))
        return LEDGER_E_INCOMPLETE;

    assert(!r->asked); /* a rank asks only when its last micro-batch is ended */
    for (uint32_t p = 0; p < ledger->n_parts; p++)
        if (r->pushed_in_step[p])
            r->pushed_in_step[p] = PUSHED_ENDED;
    r->last_ended = at;
    r->n_ended++;
    r->open = false;
    return LEDGER_ADMITTED;
}

void ledger_forget(struct ledger *ledger, unsigned rank)
{
    struct ledger_rank *r = get_rank(ledger, rank);

    if (r->open || r->n_pushed_open == 0)
        return;

    /* Entries with n_redo > 0 stand from a predecessor, and stay. Entries of an ended micro-batch have n_redo 0. */
    for (uint32_t p = 0; p < ledger->n_parts; p++)
        if (r->entries[p].n_redo == 0)
            clear_entry(r, p);
}

int ledger_abandon(struct ledger *ledger, unsigned rank)
{
    struct ledger_rank *r = get_rank(ledger, rank);

    if (!r->open)
        return 0;

    assert(!r->asked);
    for (uint32_t p = 0; p < ledger->n_parts; p++)
        if (r->entries[p].n_posted > 0)
            return LEDGER_MUST_ABORT;

    for (uint32_t p = 0; p < ledger->n_parts; p++)
        withdraw_entry(r, p);
    r->open = false;
    return 0;
}

int ledger_ask(struct ledger *ledger, unsigned rank)
{
    struct ledger_rank *r = get_rank(ledger, rank);

    if (r->asked)
        return LEDGER_RETRY;
    if (r->open || stands(ledger, r))
        return LEDGER_E_EARLY;

    r->asked = true;
    return 0;
}

bool ledger_inherits(const struct ledger *ledger, unsigned rank)
{
    const struct ledger_rank *r = get_rank(ledger, rank);

    assert(r->n_inherited <= r->n_ended);
    return r->n_inherited > 0 || stands(ledger, r);
}

/* Resets the rank to the state of a rank that has done nothing in this step. */
static void rewind_rank(const struct ledger *ledger, struct ledger_rank *rank)
{
    for (uint32_t p = 0; rank->n_pushed_open > 0 && p < ledger->n_parts; p++)
        clear_entry(rank, p);
    assert(rank->n_pushed_open == 0);
    memset(rank->pushed_in_step, 0, ledger->n_parts * sizeof(*rank->pushed_in_step));
    rank->open = false;
    rank->asked = false;
    rank->n_ended = 0;
    rank->n_inherited = 0;
    rank->n_pushed = 0;
}

void ledger_abort(struct ledger *ledger)
{
    ledger->attempt++;

    for (unsigned i = 0; i < ledger->n_ranks; i++) {
        struct ledger_rank *rank = &ledger->ranks[i];

        rewind_rank(ledger, rank);
        rank->last_ended = rank->last_ended_at_commit;
    }
}

void ledger_commit(struct ledger *ledger)
{
    ledger->step++;

    for (unsigned i = 0; i < ledger->n_ranks; i++) {
        struct ledger_rank *rank = &ledger->ranks[i];

        rewind_rank(ledger, rank);
        rank->last_ended_at_commit = rank->last_ended;
    }
}

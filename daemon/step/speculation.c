/* SPDX-License-Identifier: Apache-2.0 */

/* Updates chunks in their spare places, before the step is decided. */

#include "daemon/step/speculation.h"

#include <assert.h>
#include <sched.h>
#include <stdatomic.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/recorder.h"
#include "core/budget/step-sizes.h"
#include "core/layout/layout.h"
#include "daemon/memory/spare.h"
#include "daemon/step/step-kept.h"
#include "daemon/step/step.h"

enum progress { OPEN, RUNS, WHOLE, VOID };

_Static_assert((int)SPECULATION_CHUNK_BYTES >= sizeof(struct update_scalars) + 2 * sizeof(uint64_t),
               "a word of state->turns, and what is here per chunk");

struct speculated_parcel {
    struct work work;
    struct speculation *speculation;
    uint32_t parcel;
    uint64_t ticket; /* the number of the call */
    bool busy;       /* the work is posted and not done */
    void (*done)(void *userdata);
    void *userdata;
};

struct speculation {
    struct step *step;
    uint64_t n_tickets;             /* each call of speculation_post() has the next number */
    _Atomic(uint64_t) forgotten;    /* tickets up to this one do not count */
    atomic_bool closed;             /* the step is decided */
    _Atomic(uint64_t) *words;       /* per chunk: ticket << 2 | enum progress */
    struct update_scalars *assumed; /* per chunk: the scalars of its last speculative update */
    struct speculated_parcel *parcels;
    _Atomic(uint64_t) n_accepted, n_elems_accepted, n_dropped;
};

int speculation_new(struct speculation **out, struct step *step)
{
    struct speculation *s = calloc(1, sizeof(*s));
    const struct layout *layout = step->layout;

    if (!s)
        return -ENOMEM;
    s->step = step;
    s->words = calloc(layout->n_chunks + 1, sizeof(*s->words));
    s->assumed = calloc(layout->n_chunks + 1, sizeof(*s->assumed));
    s->parcels = calloc(layout->n_parcels + 1, sizeof(*s->parcels));
    if (!s->words || !s->assumed || !s->parcels) {
        speculation_free(s);
        return -ENOMEM;
    }
    *out = s;
    return 0;
}

void speculation_free(struct speculation *s)
{
    if (!s)
        return;
    for (uint32_t p = 0; s->parcels && p < s->step->layout->n_parcels; p++)
        assert(!s->parcels[p].busy);
    free(s->words);
    free(s->assumed);
    free(s->parcels);
    free(s);
}

/* ---- the word of a chunk ------------------------------------------------------------------------------- */

static uint64_t word_of(uint64_t ticket, enum progress progress)
{
    return ticket << 2 | progress;
}

static enum progress progress_of(uint64_t word)
{
    return (enum progress)(word & 3);
}

/* Takes a chunk of the ticket. Return: false if the chunk was dropped. */
static bool begin_chunk(struct speculation *s, uint32_t chunk, uint64_t ticket)
{
    uint64_t word = word_of(ticket, OPEN);

    return atomic_compare_exchange_strong(&s->words[chunk], &word, word_of(ticket, RUNS));
}

/* Waits until no worker updates the chunk speculatively, and lets no worker begin to. Return: its word before. */
static uint64_t end_chunk(struct speculation *s, uint32_t chunk)
{
    uint64_t word = atomic_load(&s->words[chunk]);

    while (progress_of(word) == RUNS || !atomic_compare_exchange_weak(&s->words[chunk], &word, word_of(0, VOID))) {
        sched_yield();
        word = atomic_load(&s->words[chunk]);
    }
    return word;
}

static bool is_whole(const struct speculation *s, uint64_t word)
{
    return progress_of(word) == WHOLE && word >> 2 > atomic_load(&s->forgotten);
}

void speculation_drop(struct speculation *s, uint32_t chunk)
{
    s->n_dropped += is_whole(s, end_chunk(s, chunk));
}

bool speculation_holds(struct speculation *s, uint32_t chunk, const struct update_scalars *scalars)
{
    bool whole = is_whole(s, end_chunk(s, chunk));
    bool holds = whole && update_scalars_equal(&s->assumed[chunk], scalars);

    s->n_accepted += holds;
    s->n_elems_accepted += holds ? s->step->layout->chunks[chunk].n_elems : 0;
    s->n_dropped += whole && !holds;
    return holds;
}

/* ---- updating ------------------------------------------------------------------------------------------ */

/* Updates the chunk from its valid place to its spare place, with the kernel that would update it in place. */
static void update_aside(const struct speculation *s, uint32_t id)
{
    const struct step *step = s->step;
    const struct state_place from = state_place(step->state, id), to = spare_place(step->state, id);
    const struct update_values old = {.p = from.master,
                                      .lower = from.lower,
                                      .m = from.exp_avg,
                                      .v = from.exp_avg_sq,
                                      .w16 = from.weights};
    struct update_args args = step_args_in(step, id, &to);

    (void)failpoint("speculate");
    args.old = &old;
    args.acc = step_ready_acc(step, id);
    args.k = &s->assumed[id];
    step->kernels->update[step_optimizer(step, step->layout->chunks[id].param)](&args);
}

static void speculate(struct work *work, uint32_t item)
{
    const struct speculated_parcel *its = container_of(work, struct speculated_parcel, work);
    struct speculation *s = its->speculation;
    const struct step *step = s->step;
    uint32_t id = step->layout->parcels[its->parcel].first_chunk + item;

    if (atomic_load(&s->closed) || its->ticket <= atomic_load(&s->forgotten) || !begin_chunk(s, id, its->ticket))
        return;
    recorder_work(RECORD_WORK_EARLY, its->parcel, 0);
    update_aside(s, id);
    (void)failpoint("speculated");
    atomic_store(&s->words[id], word_of(its->ticket, WHOLE));
}

static void parcel_is_done(struct work *work)
{
    struct speculated_parcel *its = container_of(work, struct speculated_parcel, work);

    its->busy = false;
    its->done(its->userdata);
}

/* Opens the parcel's chunks that have gradients, and computes their scalars. Return: whether there are any. */
static bool open_chunks(struct speculation *s, const struct layout_parcel *parcel, const struct step_update *expected)
{
    const struct layout_chunk *chunks = s->step->layout->chunks;
    const struct update_scalars *last = NULL;
    uint32_t last_param = 0;

    for (uint32_t c = parcel->first_chunk; c < parcel->first_chunk + parcel->n_chunks; c++) {
        if (!s->step->begun[chunks[c].part] || !spare_has(s->step->state, c))
            continue;
        if (last && last_param == chunks[c].param)
            s->assumed[c] = *last;
        else
            step_scalars(s->step, expected, chunks[c].param, last, last_param, &s->assumed[c]);
        last = &s->assumed[c];
        last_param = chunks[c].param;
        atomic_store(&s->words[c], word_of(s->n_tickets, OPEN));
    }
    return last != NULL;
}

bool speculation_post(struct speculation *s, uint32_t parcel, const struct step_update *expected,
                      void (*done)(void *userdata), void *userdata)
{
    struct speculated_parcel *its = &s->parcels[parcel];
    const struct layout_parcel *layout = &s->step->layout->parcels[parcel];

    if (its->busy)
        return false;
    s->n_tickets++;
    if (!open_chunks(s, layout, expected))
        return false;
    *its = (struct speculated_parcel){
        .work = {.run = speculate, .done = parcel_is_done, .n_items = layout->n_chunks},
        .speculation = s,
        .parcel = parcel,
        .ticket = s->n_tickets,
        .busy = true,
        .done = done,
        .userdata = userdata,
    };
    /* Sums come first, because ranks wait for them. Then the newest parcel comes first, so that what is left at the
     * decision is spread over the whole model, and the next forward waits as little as possible. */
    worker_post_later(s->step->pool, &its->work);
    return true;
}

void speculation_close(struct speculation *s)
{
    atomic_store(&s->closed, true);
}

void speculation_forget(struct speculation *s)
{
    atomic_store(&s->forgotten, s->n_tickets);
    atomic_store(&s->closed, false);
}

struct speculation_counts speculation_counts(const struct speculation *s)
{
    return (struct speculation_counts){
        .n_accepted = s->n_accepted, .n_elems_accepted = s->n_elems_accepted, .n_dropped = s->n_dropped};
}

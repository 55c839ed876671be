/* SPDX-License-Identifier: Apache-2.0 */

/* The recorder's rings. Each has one writer. A reader drops records that were overwritten while it copied them. */

#include "core/base/recorder.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "core/base/base.h"
#include "core/base/worker.h"

enum { WORDS = sizeof(struct record) / sizeof(uint64_t) };

_Static_assert((RECORDER_LOOP_RECORDS & (RECORDER_LOOP_RECORDS - 1)) == 0, "place() masks the number of a record");
_Static_assert((RECORDER_WORKER_RECORDS & (RECORDER_WORKER_RECORDS - 1)) == 0, "place() masks the number of a record");
_Static_assert(N_RECORD_KINDS <= UINT8_MAX, "a record has a byte for its kind");

struct ring {
    _Atomic(uint64_t) n_written; /* number of records ever written */
    uint64_t n_records;          /* room, in records; a power of 2 */
    struct record open;          /* the writer's open record; begin_ns 0: none */
    _Atomic(uint64_t) *words;
};

static struct ring *rings;
static unsigned n_rings;
static _Atomic(uint64_t) open_step;

int recorder_start(unsigned n_workers)
{
    rings = calloc(n_workers + 1, sizeof(*rings));
    if (!rings)
        return -ENOMEM;
    n_rings = n_workers + 1;
    for (unsigned i = 0; i < n_rings; i++) {
        rings[i].n_records = i == 0 ? RECORDER_LOOP_RECORDS : RECORDER_WORKER_RECORDS;
        rings[i].words = calloc(rings[i].n_records * WORDS, sizeof(uint64_t)); /* pages are allocated at first use */
        if (!rings[i].words) {
            recorder_stop();
            return -ENOMEM;
        }
    }
    return 0;
}

void recorder_stop(void)
{
    for (unsigned i = 0; i < n_rings; i++)
        free(rings[i].words);
    free(steal_ptr(rings));
    n_rings = 0;
}

uint64_t recorder_now(void)
{
    struct timespec now;

    if (n_rings == 0)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void recorder_set_step(uint64_t step)
{
    atomic_store_explicit(&open_step, step, memory_order_relaxed);
}

/* Return: the words of the record with this number. */
static _Atomic(uint64_t) *place(const struct ring *ring, uint64_t number)
{
    return &ring->words[(number & (ring->n_records - 1)) * WORDS];
}

static void append_record(struct ring *ring, const struct record *record)
{
    uint64_t number = atomic_load_explicit(&ring->n_written, memory_order_relaxed);
    _Atomic(uint64_t) *to = place(ring, number);
    struct record whole = *record;
    uint64_t words[WORDS];

    whole.step = (uint32_t)atomic_load_explicit(&open_step, memory_order_relaxed);
    whole.thread = (uint16_t)(ring - rings);
    memcpy(words, &whole, sizeof(words));
    /* A reader that sees one of these words also sees n_written, so it knows which records may be half written. */
    for (unsigned i = 0; i < WORDS; i++)
        atomic_store_explicit(&to[i], words[i], memory_order_release);
    atomic_store_explicit(&ring->n_written, number + 1, memory_order_release);
}

/* Return: this thread's ring, or NULL while nothing is recorded. */
static struct ring *own_ring(void)
{
    unsigned number = worker_number();

    return number < n_rings ? &rings[number] : NULL;
}

void recorder_note(const struct record *record)
{
    struct ring *ring = own_ring();

    assert(record->kind < N_RECORD_KINDS);
    if (ring)
        append_record(ring, record);
}

static void close_open(struct ring *ring, uint64_t now_ns)
{
    if (ring->open.begin_ns == 0)
        return;
    ring->open.end_ns = now_ns;
    append_record(ring, &ring->open);
    ring->open.begin_ns = 0;
}

void recorder_work(enum record_kind kind, uint32_t parcel, uint32_t micro_batch)
{
    struct ring *ring = own_ring();
    uint64_t now;

    assert(kind == RECORD_WORK_REDUCE || kind == RECORD_WORK_UPDATE || kind == RECORD_WORK_EARLY);
    if (!ring || (ring->open.begin_ns > 0 && ring->open.kind == kind && ring->open.item == parcel &&
                  ring->open.micro_batch == (uint16_t)micro_batch))
        return;
    now = recorder_now();
    close_open(ring, now);
    ring->open = (struct record){.kind = (uint8_t)kind,
                                 .rank = RECORD_NO_RANK,
                                 .item = parcel,
                                 .micro_batch = (uint16_t)micro_batch,
                                 .begin_ns = now};
}

void recorder_rest(void)
{
    struct ring *ring = own_ring();

    if (ring && ring->open.begin_ns > 0)
        close_open(ring, recorder_now());
}

/* Copies the records of the ring, oldest first. Return: the number of records. */
static size_t copy_ring(const struct ring *ring, struct record *to)
{
    uint64_t end = atomic_load_explicit(&ring->n_written, memory_order_acquire), now, first;
    uint64_t begin = end > ring->n_records ? end - ring->n_records : 0;

    for (uint64_t number = begin; number < end; number++) {
        const _Atomic(uint64_t) *from = place(ring, number);
        uint64_t words[WORDS];

        for (unsigned i = 0; i < WORDS; i++)
            words[i] = atomic_load_explicit(&from[i], memory_order_acquire);
        memcpy(&to[number - begin], words, sizeof(words));
    }
    now = atomic_load_explicit(&ring->n_written, memory_order_relaxed);
    /* The writer may be overwriting one more record now. */
    first = now + 1 > ring->n_records ? now + 1 - ring->n_records : 0;
    if (first <= begin)
        return end - begin;
    first = MIN(first, end);
    memmove(to, &to[first - begin], (end - first) * sizeof(*to));
    return end - first;
}

/* Keeps the records from this step on. Return: their number. */
static size_t keep_from(struct record *records, size_t n, uint32_t step)
{
    size_t kept = 0;

    for (size_t i = 0; i < n; i++)
        if ((int32_t)(records[i].step - step) >= 0)
            records[kept++] = records[i];
    return kept;
}

struct record *recorder_copy(uint64_t n_steps, size_t *n_records, uint64_t *oldest)
{
    uint64_t step = atomic_load_explicit(&open_step, memory_order_relaxed);
    size_t room = 1, n;
    struct record *all;

    *oldest = step - MIN(n_steps, step);
    *n_records = 0;
    for (unsigned i = 0; i < n_rings; i++)
        room += rings[i].n_records;
    all = calloc(room, sizeof(*all));
    for (unsigned i = 0; all && i < n_rings; i++) {
        struct record *own = &all[*n_records];

        n = copy_ring(&rings[i], own);
        /* A ring that has overwritten records may lack the beginning of its oldest step. */
        if (n > 0 && n + 1 >= rings[i].n_records)
            *oldest = MIN(MAX(*oldest, step - (uint32_t)((uint32_t)step - own[0].step) + 1), step);
        *n_records += keep_from(own, n, (uint32_t)*oldest);
        assert(*n_records < room);
    }
    if (all)
        *n_records = keep_from(all, *n_records, (uint32_t)*oldest);
    return all;
}

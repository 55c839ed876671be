/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps the progress of each array of each chunk, and the pool of values that are put aside. */

#include "daemon/memory/snapshot.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/layout/layout.h"
#include "kernels/copy.h"

enum {
    SLOT_BYTES = 64 * 1024, /* picked: an fp32 chunk needs four slots, a small parameter wastes less than one slot */
    NO_SLOT = UINT32_MAX,
    PAUSE_NS = 500 * 1000, /* picked: an update takes tens of milliseconds */
};

_Static_assert(SLOT_BYTES % COPY_LINE_BYTES == 0, "copy_past_caches() writes to slots");

enum progress { UNREAD, HELD, ASIDE, READ };

struct entry {
    _Atomic(uint8_t) progress;
    uint32_t first_slot; /* ASIDE */
};

struct snapshot {
    const struct state *state;
    struct entry *entries; /* SNAPSHOT_N_ARRAYS entries per chunk */

    uint8_t *pool; /* not owned; NULL: no pool */
    size_t n_slots;
    uint32_t *next; /* per slot: the next free slot, or the next slot of the same array */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a slot is free, or an array was read */
    uint32_t first_free;
    size_t n_free;
    _Atomic(size_t) n_least_free;
    _Atomic(unsigned) n_waiting; /* workers in wait_for_slots(); changes with the lock held */
    atomic_bool over;
    _Atomic(uint64_t) waited_ns;
    _Atomic(unsigned) n_putting; /* workers inside snapshot_put_aside() */
};

/* ---- the pool's memory --------------------------------------------------------------------------------- */

struct snapshot_pool {
    uint8_t *map; /* NULL: no slots */
    size_t n_slots;
    atomic_bool stops;
};

int snapshot_pool_new(struct snapshot_pool **out, uint64_t n_bytes)
{
    struct snapshot_pool *pool = calloc(1, sizeof(*pool));

    if (!pool)
        return -ENOMEM;
    pool->n_slots = MIN(n_bytes / SLOT_BYTES, (uint64_t)NO_SLOT - 1);
    if (pool->n_slots > 0)
        pool->map = mmap(NULL, pool->n_slots * SLOT_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pool->map == MAP_FAILED) {
        free(pool);
        return -ENOMEM;
    }
    if (pool->map)
        (void)madvise(pool->map, pool->n_slots * SLOT_BYTES, MADV_HUGEPAGE);
    *out = pool;
    return 0;
}

void snapshot_pool_free(struct snapshot_pool *pool)
{
    if (pool && pool->map)
        munmap(pool->map, pool->n_slots * SLOT_BYTES);
    free(pool);
}

void snapshot_pool_warm(struct snapshot_pool *pool)
{
    enum { PIECE_BYTES = 16 << 20 }; /* picked; between pieces, other threads get the memory map's lock */
    size_t n_bytes = pool->n_slots * SLOT_BYTES;

    for (size_t at = 0; at < n_bytes && !pool->stops; at += PIECE_BYTES)
        (void)madvise(pool->map + at, MIN(n_bytes - at, (size_t)PIECE_BYTES), MADV_POPULATE_WRITE);
}

void snapshot_pool_stop_warming(struct snapshot_pool *pool)
{
    pool->stops = true;
}

void snapshot_pool_rest(struct snapshot_pool *pool)
{
    if (pool->map)
        (void)madvise(pool->map, pool->n_slots * SLOT_BYTES, MADV_FREE);
}

/* ---- life ---------------------------------------------------------------------------------------------- */

/* Return: 0 or -ENOMEM. */
static int make_slots(struct snapshot *s, const struct snapshot_pool *pool)
{
    s->pool = pool->map;
    s->n_slots = s->n_free = pool->n_slots;
    s->n_least_free = pool->n_slots;
    s->first_free = NO_SLOT;
    if (s->n_slots == 0)
        return 0;
    s->next = calloc(s->n_slots, sizeof(*s->next));
    if (!s->next)
        return -ENOMEM;
    for (size_t i = s->n_slots; i-- > 0;) {
        s->next[i] = s->first_free;
        s->first_free = (uint32_t)i;
    }
    return 0;
}

int snapshot_new(struct snapshot **out, const struct state *state, struct snapshot_pool *pool)
{
    struct snapshot *s = calloc(1, sizeof(*s));
    int r;

    assert(!state->snapshot); /* two snapshots would use the same pool */
    if (!s)
        return -ENOMEM;
    s->state = state;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->entries = calloc((size_t)state->layout->n_chunks + 1, sizeof(*s->entries) * SNAPSHOT_N_ARRAYS);
    r = s->entries ? make_slots(s, pool) : -ENOMEM;
    if (r < 0) {
        snapshot_free(s);
        return r;
    }
    *out = s;
    return 0;
}

void snapshot_free(struct snapshot *s)
{
    if (!s)
        return;
    assert(s->n_putting == 0);
    free(s->next);
    free(s->entries);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* ---- arrays -------------------------------------------------------------------------------------------- */

static struct entry *entry_of(const struct snapshot *s, uint32_t chunk, enum snapshot_array array)
{
    assert(chunk < s->state->layout->n_chunks);
    return &s->entries[(size_t)chunk * SNAPSHOT_N_ARRAYS + array];
}

/* Return: the array, or NULL if the chunk does not have it, or another node owns the chunk. */
static uint8_t *array_of(const struct snapshot *s, uint32_t id, enum snapshot_array array)
{
    struct state_place place;

    if (!state_owns(s->state, s->state->layout->chunks[id].rank))
        return NULL;
    place = state_place(s->state, id);
    if (array == SNAPSHOT_WEIGHTS)
        return place.weights;
    return array == SNAPSHOT_LOWER ? (uint8_t *)place.lower
                                   : (uint8_t *)state_place_values(&place, (enum state_kind)array);
}

static size_t chunk_array_bytes(const struct snapshot *s, uint32_t id, enum snapshot_array array)
{
    const struct layout_chunk *chunk = &s->state->layout->chunks[id];

    return snapshot_bytes(s->state, array, chunk->n_elems);
}

/* Sets the entry to HELD if it has the expected progress. Return: whether the entry had it. */
static bool hold_entry(struct entry *entry, uint8_t expected)
{
    return atomic_compare_exchange_strong_explicit(&entry->progress, &expected, HELD, memory_order_acquire,
                                                   memory_order_relaxed);
}

static void set(struct entry *entry, uint8_t progress)
{
    atomic_store_explicit(&entry->progress, progress, memory_order_release);
}

static uint8_t load_progress(struct entry *entry)
{
    return atomic_load_explicit(&entry->progress, memory_order_acquire);
}

/* ---- the pool ------------------------------------------------------------------------------------------ */

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* The caller holds the lock, and n slots are free. Return: the first of n slots. */
static uint32_t take_slots(struct snapshot *s, size_t n)
{
    uint32_t first = s->first_free, last = first;

    assert(n > 0 && n <= s->n_free);
    for (size_t i = 1; i < n; i++)
        last = s->next[last];
    assert(last < s->n_slots);
    s->first_free = s->next[last];
    s->next[last] = NO_SLOT;
    s->n_free -= n;
    if (s->n_free < s->n_least_free)
        s->n_least_free = s->n_free;
    return first;
}

static void give_slots(struct snapshot *s, uint32_t first)
{
    uint32_t last = first;
    size_t n = 1;

    pthread_mutex_lock(&s->lock);
    for (; s->next[last] != NO_SLOT; n++)
        last = s->next[last];
    assert(s->n_free + n <= s->n_slots);
    s->next[last] = s->first_free;
    s->first_free = first;
    s->n_free += n;
    if (s->n_waiting > 0)
        pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* Wakes the waiting workers, because an array was read. */
static void say_changed(struct snapshot *s)
{
    pthread_mutex_lock(&s->lock);
    if (s->n_waiting > 0)
        pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/*
 * Waits until n slots are free, or the array is no longer UNREAD, or reading ends. Return: the first of n slots, or
 * NO_SLOT.
 */
static uint32_t wait_for_slots(struct snapshot *s, struct entry *entry, size_t n)
{
    uint32_t slot = NO_SLOT;
    uint64_t since = 0;

    pthread_mutex_lock(&s->lock);
    while (s->n_free < n && load_progress(entry) == UNREAD && !s->over) {
        since = since ? since : now_ns();
        s->n_waiting++;
        pthread_cond_wait(&s->changed, &s->lock);
        s->n_waiting--;
    }
    if (s->n_free >= n && !s->over)
        slot = take_slots(s, n);
    pthread_mutex_unlock(&s->lock);
    if (since)
        atomic_fetch_add(&s->waited_ns, now_ns() - since);
    return slot;
}

static void to_slots(struct snapshot *s, uint32_t slot, const uint8_t *src, size_t n_bytes)
{
    for (size_t at = 0; at < n_bytes; at += SLOT_BYTES, slot = s->next[slot]) {
        assert(slot < s->n_slots);
        copy_past_caches(s->pool + (size_t)slot * SLOT_BYTES, src + at, MIN(n_bytes - at, (size_t)SLOT_BYTES));
    }
}

static void from_slots(const struct snapshot *s, uint32_t slot, uint8_t *dst, size_t n_bytes)
{
    for (size_t at = 0; at < n_bytes; at += SLOT_BYTES, slot = s->next[slot]) {
        assert(slot < s->n_slots);
        memcpy(dst + at, s->pool + (size_t)slot * SLOT_BYTES, MIN(n_bytes - at, (size_t)SLOT_BYTES));
    }
}

/* ---- verbs --------------------------------------------------------------------------------------------- */

/* Pauses the reader while workers put values aside, unless a worker waits for the reader. */
static void give_way(struct snapshot *s)
{
    while (s->n_putting > 0 && s->n_waiting == 0 && !s->over)
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

void snapshot_read(struct snapshot *s, uint32_t chunk, enum snapshot_array array, void *dst, bool last)
{
    struct entry *entry = entry_of(s, chunk, array);
    const uint8_t *src = array_of(s, chunk, array);
    size_t n_bytes = chunk_array_bytes(s, chunk, array);

    give_way(s);
    for (;;) {
        if (hold_entry(entry, UNREAD)) {
            memcpy(dst, src, n_bytes);
            set(entry, last ? READ : UNREAD);
            break;
        }
        if (hold_entry(entry, ASIDE)) {
            from_slots(s, entry->first_slot, dst, n_bytes);
            if (last)
                give_slots(s, entry->first_slot);
            set(entry, last ? READ : ASIDE);
            break;
        }
        sched_yield();
    }
    say_changed(s);
}

static void put_aside(struct snapshot *s, uint32_t chunk, enum snapshot_array array)
{
    struct entry *entry = entry_of(s, chunk, array);
    const uint8_t *src = array_of(s, chunk, array);
    size_t n_bytes = src ? chunk_array_bytes(s, chunk, array) : 0;
    uint32_t slot;

    while (src && !s->over && load_progress(entry) != READ && load_progress(entry) != ASIDE) {
        if (load_progress(entry) == HELD) {
            sched_yield();
            continue;
        }
        slot = wait_for_slots(s, entry, div_round_up(n_bytes, SLOT_BYTES));
        if (slot == NO_SLOT)
            continue;
        if (!hold_entry(entry, UNREAD)) {
            give_slots(s, slot);
            continue;
        }
        to_slots(s, slot, src, n_bytes);
        entry->first_slot = slot;
        set(entry, ASIDE);
    }
}

void snapshot_put_aside(struct snapshot *s, uint32_t chunk)
{
    (void)failpoint("aside");
    s->n_putting++;
    for (int array = 0; array < SNAPSHOT_N_ARRAYS; array++)
        put_aside(s, chunk, (enum snapshot_array)array);
    s->n_putting--;
}

void snapshot_give_up(struct snapshot *s)
{
    pthread_mutex_lock(&s->lock);
    s->over = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

uint64_t snapshot_waited_ns(const struct snapshot *s)
{
    return atomic_load(&s->waited_ns);
}

uint64_t snapshot_peak_bytes(const struct snapshot *s)
{
    return (s->n_slots - s->n_least_free) * SLOT_BYTES;
}

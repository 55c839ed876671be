/* SPDX-License-Identifier: Apache-2.0 */

/* The journal is one segment: a page of numbers, the base, two heads, two logs. Its pages are reserved on demand. */

#include "daemon/memory/journal.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/base/segment.h"
#include "kernels/undo.h"

#define PAGE_BYTES UINT64_C(65536)
#define BASE_BYTES (UINT64_C(1) << 30)
#define LOG_BYTES (UINT64_C(4) << 30)
#define RESERVE_BYTES (UINT64_C(1) << 20)  /* reserved at a time: these pages are zeroed within 0.3 ms */
#define MAGIC UINT64_C(0x6c616e72756f6a7a) /* "zjournal" */

/* The first page. Its format is fixed, because later versions of the daemon read it. */
struct page {
    uint64_t magic;
    uint32_t version;
    _Atomic(uint32_t) current; /* 0: no head is valid; else 1 + the valid head's index */
    uint64_t mark;             /* random; part of the names of all kept segments */
    _Atomic(uint64_t) base_tail;
    struct {
        uint64_t n_bytes, sum;
    } heads[2];
    _Atomic(uint64_t) tails[2]; /* ends of the logs; log i belongs to head i */
    _Atomic(uint64_t) beat_ns;  /* CLOCK_MONOTONIC */
    _Atomic(uint32_t) check;    /* ~current, or ~ the next value of current; 0: an older version wrote the page */
    uint32_t unused;
};

_Static_assert(sizeof(struct page) == 96, "a later daemon reads it");

struct header {
    uint32_t n_bytes;
    uint16_t type, rank;
    uint64_t time_ns;
};

_Static_assert(sizeof(struct header) == 16, "a later daemon reads it");
_Static_assert(LOG_BYTES - sizeof(struct header) <= UINT32_MAX, "a header has the size of any record that fits");
_Static_assert((int)JOURNAL_N_TYPES <= UINT16_MAX, "a header has any type");
_Static_assert(sizeof(struct journal_attach) == 24 && sizeof(struct journal_grant) == 16, "a later daemon reads them");
_Static_assert(sizeof(struct journal_posted) == 24 && sizeof(struct journal_summed) == 8, "a later daemon reads them");
_Static_assert(sizeof(struct journal_compared) == 24 && sizeof(struct journal_edit) == 24, "a later daemon reads them");

/* A part of the segment. Its pages are reserved as it grows. */
struct area {
    uint64_t start_bytes, n_bytes, reserved_bytes;
};

struct journal {
    struct segment segment;
    struct page *page;
    struct area base, heads[2], logs[2];
    bool given_up;
};

static void make_areas(struct journal *journal)
{
    uint64_t at = PAGE_BYTES;
    struct area *const areas[] = {&journal->base, &journal->heads[0], &journal->heads[1], &journal->logs[0],
                                  &journal->logs[1]};
    const uint64_t sizes[] = {BASE_BYTES, JOURNAL_MAX_HEAD_BYTES, JOURNAL_MAX_HEAD_BYTES, LOG_BYTES, LOG_BYTES};

    for (size_t i = 0; i < ARRAY_SIZE(areas); i++) {
        *areas[i] = (struct area){.start_bytes = at, .n_bytes = sizes[i]};
        at += sizes[i];
    }
    assert(at == PAGE_BYTES + BASE_BYTES + 2 * (uint64_t)JOURNAL_MAX_HEAD_BYTES + 2 * LOG_BYTES);
}

static void begin_page(struct page *page)
{
    page->magic = MAGIC;
    page->version = JOURNAL_VERSION;
    page->check = ~UINT32_C(0);
    while (page->mark == 0)
        if (getrandom(&page->mark, sizeof(page->mark), 0) < 0)
            page->mark = 1; /* no random numbers: a fixed mark suffices for one job at a time */
}

int journal_new(struct journal **out)
{
    struct journal *journal = calloc(1, sizeof(*journal));
    int r;

    if (!journal)
        return -ENOMEM;
    make_areas(journal);
    segments_mark(0);
    r = segment_init_kept(&journal->segment, "journal", journal->logs[1].start_bytes + LOG_BYTES);
    if (r == 0)
        r = segment_reserve(&journal->segment, 0, PAGE_BYTES);
    if (r < 0) {
        journal_free(journal);
        return r;
    }
    journal->page = (struct page *)journal->segment.map;
    if (!journal->segment.found)
        begin_page(journal->page);
    segments_mark(journal->page->mark);
    *out = journal;
    return 0;
}

void journal_free(struct journal *journal)
{
    if (!journal)
        return;
    segment_deinit(&journal->segment);
    free(journal);
}

static uint32_t current(const struct journal *journal)
{
    return atomic_load_explicit(&journal->page->current, memory_order_acquire);
}

bool journal_is_valid(const struct journal *journal)
{
    return journal && journal->page->magic == MAGIC && current(journal) != 0;
}

/*
 * A kill within make_current() is not damage, because either the previous head or the new head with an empty log is
 * valid, and both are complete.
 */
bool journal_is_damaged(const struct journal *journal)
{
    const struct page *page = journal->page;
    uint32_t is = current(journal), said = ~page->check;

    if (page->magic != MAGIC || is > ARRAY_SIZE(page->heads))
        return true;
    if (page->check == 0 || said == is)
        return false;
    return is == 0 || said > ARRAY_SIZE(page->heads) || (said != 0 && page->tails[is - 1] != 0);
}

uint32_t journal_version(const struct journal *journal)
{
    return journal->page->version;
}

/* Stores a word. Stores stay in program order for this process, and for the next daemon if this one is killed. */
static void store_word(_Atomic(uint64_t) *word, uint64_t value)
{
    undo_order();
    atomic_store_explicit(word, value, memory_order_release);
    undo_order();
}

static void put_check(struct journal *journal, uint32_t value)
{
    atomic_store_explicit(&journal->page->check, ~value, memory_order_release);
    undo_order();
}

/*
 * Sets `current`, and `check` to match: `check` before `current` becomes 0, but after `current` becomes a head. So
 * journal_is_damaged() can distinguish damage from a kill between the two stores.
 */
static void make_current(struct journal *journal, uint32_t value)
{
    undo_order();
    if (value == 0)
        put_check(journal, value);
    atomic_store_explicit(&journal->page->current, value, memory_order_release);
    undo_order();
    put_check(journal, value);
}

void journal_clear(struct journal *journal)
{
    if (!journal)
        return;
    make_current(journal, 0);
    store_word(&journal->page->base_tail, 0);
    journal->given_up = false;
    segment_punch(&journal->segment, PAGE_BYTES, journal->segment.n_bytes - PAGE_BYTES);
    make_areas(journal);
}

void journal_give_up(struct journal *journal, int r)
{
    if (!journal || journal->given_up)
        return;
    log_error("no memory for the journal: the job's state will be lost when this daemon ends: %s", strerror(-r));
    journal->given_up = true;
    make_current(journal, 0);
}

/* Reserves pages for the first n_bytes of the area, if they are missing. Return: false if the journal gave up. */
static bool has_pages(struct journal *journal, struct area *area, uint64_t n_bytes)
{
    uint64_t more;
    int r = -EFBIG;

    assert(area->reserved_bytes <= area->n_bytes);
    if (n_bytes <= area->reserved_bytes)
        return true;
    if (n_bytes <= area->n_bytes) {
        more = MIN(round_up(n_bytes - area->reserved_bytes, RESERVE_BYTES), area->n_bytes - area->reserved_bytes);
        r = segment_reserve(&journal->segment, area->start_bytes + area->reserved_bytes, more);
        if (r == 0)
            area->reserved_bytes += more;
        assert(r < 0 || n_bytes <= area->reserved_bytes);
    }
    if (r < 0)
        journal_give_up(journal, r);
    return r == 0;
}

static uint64_t padded(uint64_t n_bytes)
{
    return round_up(n_bytes, 8);
}

static void append_to_area(struct journal *journal, struct area *area, _Atomic(uint64_t) *tail,
                           const struct journal_record *record, const void *more, size_t n_more)
{
    uint64_t at = atomic_load_explicit(tail, memory_order_relaxed);
    uint64_t end = at + sizeof(struct header) + padded(record->n_bytes + n_more);
    struct header header = {.n_bytes = (uint32_t)(record->n_bytes + n_more),
                            .type = (uint16_t)record->type,
                            .rank = (uint16_t)record->rank,
                            .time_ns = record->time_ns};
    uint8_t *to = journal->segment.map + area->start_bytes + at;

    assert(record->type > 0 && record->type < JOURNAL_N_TYPES);
    assert(record->rank <= UINT16_MAX);
    if (journal->given_up || !has_pages(journal, area, end))
        return;
    memcpy(to, &header, sizeof(header));
    if (record->n_bytes > 0)
        memcpy(to + sizeof(header), record->data, record->n_bytes);
    if (n_more > 0)
        memcpy(to + sizeof(header) + record->n_bytes, more, n_more);
    store_word(tail, end);
}

void journal_found(struct journal *journal, enum journal_type type, const void *data, size_t n_bytes)
{
    const struct journal_record record = {.type = type, .data = data, .n_bytes = n_bytes};

    assert(!journal || current(journal) == 0); /* the base is complete when a head is valid */
    if (journal)
        append_to_area(journal, &journal->base, &journal->page->base_tail, &record, NULL, 0);
}

void journal_append(struct journal *journal, const struct journal_record *record, const void *more, size_t n_more)
{
    uint32_t i;

    if (!journal || current(journal) == 0)
        return;
    i = current(journal) - 1;
    assert(i < ARRAY_SIZE(journal->logs));
    append_to_area(journal, &journal->logs[i], &journal->page->tails[i], record, more, n_more);
}

void journal_turn(struct journal *journal, const void *head, size_t n_bytes)
{
    uint32_t i;

    if (!journal || journal->given_up)
        return;
    i = current(journal) == 1 ? 1 : 0; /* the head that is not current */
    if (!has_pages(journal, &journal->heads[i], n_bytes))
        return;
    memcpy(journal->segment.map + journal->heads[i].start_bytes, head, n_bytes);
    journal->page->heads[i].n_bytes = n_bytes;
    journal->page->heads[i].sum = XXH3_64bits(head, n_bytes);
    store_word(&journal->page->tails[i], 0);
    make_current(journal, i + 1);
}

void journal_beat(struct journal *journal, uint64_t now_ns)
{
    if (journal)
        store_word(&journal->page->beat_ns, now_ns);
}

_Atomic(uint64_t) *journal_beat_place(struct journal *journal)
{
    return journal ? &journal->page->beat_ns : NULL;
}

uint64_t journal_last_beat(const struct journal *journal)
{
    return atomic_load_explicit(&journal->page->beat_ns, memory_order_relaxed);
}

const void *journal_head(const struct journal *journal, size_t *n_bytes)
{
    uint32_t i = current(journal) - 1;
    const void *head = journal->segment.map + journal->heads[i].start_bytes;

    *n_bytes = journal->page->heads[i].n_bytes;
    if (*n_bytes > JOURNAL_MAX_HEAD_BYTES || XXH3_64bits(head, *n_bytes) != journal->page->heads[i].sum)
        return NULL;
    return head;
}

static bool read_record(const struct journal *journal, const struct area *area, uint64_t tail, uint64_t *at,
                        struct journal_record *record)
{
    const uint8_t *from = journal->segment.map + area->start_bytes + *at;
    struct header header;

    if (tail > area->n_bytes || *at + sizeof(header) > tail)
        return false;
    memcpy(&header, from, sizeof(header));
    if (padded(header.n_bytes) > tail - *at - sizeof(header))
        return false;
    *record = (struct journal_record){.type = header.type,
                                      .rank = header.rank,
                                      .time_ns = header.time_ns,
                                      .data = from + sizeof(header),
                                      .n_bytes = header.n_bytes};
    *at += sizeof(header) + padded(header.n_bytes);
    return true;
}

bool journal_read_base(const struct journal *journal, uint64_t *at, struct journal_record *record)
{
    return read_record(journal, &journal->base, atomic_load(&journal->page->base_tail), at, record);
}

bool journal_read(const struct journal *journal, uint64_t *at, struct journal_record *record)
{
    uint32_t i = current(journal) - 1;

    return read_record(journal, &journal->logs[i], atomic_load(&journal->page->tails[i]), at, record);
}

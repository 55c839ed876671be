/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The ring: which tickets and places a push may name, that both sides count credits in the same way, and that overflow
 * extents neither overlap nor lose their pages while they are in use. Clients are hostile: they send wrong uses, places
 * outside the segment, and sums that wrap around.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "daemon/memory/ring.h"
#include "tests/golden/gradients.h"
#include "tests/group.h"
#include "tests/programs/held.h"

enum {
    RANK = 3,
    N_TICKETS = 8,
    N_BUCKETS = 4,
    RING_BYTES = 16 * 1024,
    N_OVERFLOW_PAGES = 16,
    SLOT_BYTES = 4096,
};

struct fixture {
    struct ring *ring;
    size_t n_open;
};

static struct ring *make(const struct ring_options *options)
{
    struct ring *ring = NULL;

    assert_int_equal(ring_new(&ring, options), 0);
    assert_non_null(ring);
    assert_int_equal(segment_reserve(&ring->ring, 0, ring->ring.n_bytes), 0);
    assert_int_equal(segment_reserve(&ring->credit, 0, ring->credit.n_bytes), 0);
    return ring;
}

static struct ring_options small_ring(void)
{
    return (struct ring_options){.rank = RANK,
                                 .ring_bytes = RING_BYTES,
                                 .overflow_bytes = N_OVERFLOW_PAGES * page_size(),
                                 .n_parcels = N_BUCKETS,
                                 .n_tickets = N_TICKETS};
}

static int setup(void **state)
{
    static struct fixture f;
    struct ring_options options = small_ring();

    f.n_open = count_fds();
    f.ring = make(&options);
    *state = &f;
    return 0;
}

/* A test that frees the ring sets it to NULL. */
static int teardown(void **state)
{
    struct fixture *f = *state;

    ring_orphan(f->ring);
    return count_fds() == f->n_open && count_maps("memfd:zerod.") == 0 ? 0 : -1;
}

static uint32_t credits_of(const struct ring *ring, uint32_t ticket)
{
    return atomic_load(&ring_credit_page(ring)->credits[ticket]);
}

static void assert_refused(struct ring *ring, const struct ring_use *use, int expected)
{
    struct ring_slot *slot = (struct ring_slot *)ring; /* any address; it is not used */
    uint32_t n_held = ring->n_held;

    assert_int_equal(ring_open_slot(ring, use, &slot), expected);
    assert_ptr_equal(slot, ring);
    assert_int_equal(ring->n_held, n_held);
}

static struct ring_slot *open_slot(struct ring *ring, const struct ring_use *use)
{
    struct ring_slot *slot = NULL;

    assert_int_equal(ring_open_slot(ring, use, &slot), 0);
    assert_ptr_equal(slot, &ring->slots[use->ticket]);
    assert_true(slot->held);
    return slot;
}

/* Return: a use of the ticket, its first, at the start of the ring. */
static struct ring_use use_of(uint32_t ticket, uint32_t parcel, uint32_t micro_batch)
{
    return (struct ring_use){.ticket = ticket, .parcel = parcel, .micro_batch = micro_batch, .n_bytes = SLOT_BYTES};
}

/* ---- making one ---------------------------------------------------------------------------------------- */

static void test_held_pushes(void **state)
{
    const struct ring *ring = ((struct fixture *)*state)->ring;
    struct held_pushes *held = (struct held_pushes *)(ring->ring.map + held_pushes_offset(RING_BYTES));

    assert_true((uint8_t *)(held + 1) <= ring->ring.map + ring->ring.n_bytes);
    assert_false(ring_is_held_back(ring, 0)); /* a new page lists no held pushes */
    held->params[0] = 5;
    held->n = 1;
    assert_true(ring_is_held_back(ring, 5));
    assert_false(ring_is_held_back(ring, 0));
    held->params[HELD_PUSHES - 1] = 9;
    held->n = UINT32_MAX; /* whatever a client writes, nothing beyond the list is read */
    assert_true(ring_is_held_back(ring, 9));
    assert_false(ring_is_held_back(ring, 10));
}

static void test_new(void **state)
{
    const struct ring *ring = ((struct fixture *)*state)->ring;
    struct stat st;

    assert_int_equal(count_maps("/memfd:zerod.ring.3.0 "), 1);
    assert_int_equal(count_maps("/memfd:zerod.overflow.3.0 "), 1);
    assert_int_equal(count_maps("/memfd:zerod.credit.3.0 "), 1);
    assert_int_equal(ring->ring_bytes, RING_BYTES);
    assert_true(ring->ring.n_bytes >= RING_BYTES);
    assert_true(ring->credit.n_bytes >= credit_page_bytes(N_TICKETS));
    assert_int_equal(fstat(ring->overflow.fd, &st), 0);
    assert_int_equal(st.st_blocks, 0); /* the size is only a limit; no memory is allocated */
    for (uint32_t b = 0; b < N_BUCKETS; b++)
        assert_null(ring_find(ring, b, 0, 0));
    for (uint32_t t = 0; t < N_TICKETS; t++)
        assert_int_equal(credits_of(ring, t), 0);
    assert_int_equal(ring->n_held, 0);
    assert_false(ring_credit_is_near(ring));
    ring_orphan(NULL);
    ring_orphan(NULL);
}

/* At each descriptor that cannot be opened, ring_new() fails and leaves nothing behind. */
static void test_new_fails(void **state)
{
    struct ring_options options = small_ring();
    struct ring *ring = NULL;
    struct rlimit before, few;
    int first = dup(0), results[3];

    (void)state;
    close(first); /* the lowest free descriptor */
    assert_true(first > 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    for (unsigned i = 0; i < ARRAY_SIZE(results); i++) {
        few.rlim_cur = (rlim_t)first + i;
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
        results[i] = ring_new(&ring, &options);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
        assert_int_equal(results[i], -EMFILE);
        assert_null(ring);
        assert_int_equal(count_maps("memfd:zerod."), 3); /* the fixture's */
    }
    options.ring_bytes = UINT64_MAX;
    assert_int_equal(ring_new(&ring, &options), -EOVERFLOW);
    assert_null(ring);
}

static void test_without_overflow(void **state)
{
    struct ring_options options = {.ring_bytes = 4096, .n_parcels = 0, .n_tickets = 1};
    struct ring *ring = make(&options);
    uint64_t offset, n_bytes;

    (void)state;
    assert_int_equal(ring_grant(ring, 1, &offset, &n_bytes), -ENOSPC);
    ring_trim(ring);
    ring_reclaim(ring);
    ring_orphan(ring);
}

/* ---- tickets ------------------------------------------------------------------------------------------- */

static void test_open(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    const struct ring_use use = {.ticket = 5,
                                 .parcel = 2,
                                 .micro_batch = 7,
                                 .pass = 1,
                                 .attempt = 4,
                                 .offset_bytes = 8192,
                                 .n_bytes = SLOT_BYTES};
    struct ring_slot *slot = open_slot(ring, &use);

    assert_int_equal(slot->parcel, 2);
    assert_int_equal(slot->micro_batch, 7);
    assert_int_equal(slot->pass, 1);
    assert_int_equal(slot->attempt, 4);
    assert_int_equal(slot->use, 0);
    assert_int_equal(slot->offset_bytes, 8192);
    assert_ptr_equal(slot->data, ring->ring.map + 8192);
    assert_false(slot->overflow);
    assert_false(slot->posted);
    assert_int_equal(slot->n_pushed, 0);
    assert_int_equal(ring->n_held, 1);

    /* A second push into the slot finds the first one's count. */
    slot->n_pushed = 1;
    assert_ptr_equal(open_slot(ring, &use), slot);
    assert_int_equal(slot->n_pushed, 1);
    assert_int_equal(ring->n_held, 1);

    assert_ptr_equal(ring_find(ring, 2, 7, 1), slot);
    assert_null(ring_find(ring, 1, 7, 1));
    assert_null(ring_find(ring, 2, 6, 1));
    assert_null(ring_find(ring, 2, 7, 0));
}

static void test_credit(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    struct ring_use use = use_of(5, 2, 0);
    struct ring_slot *slot = open_slot(ring, &use);

    slot->posted = slot->redo = true;
    slot->n_pushed = 3;
    ring_credit(ring, slot);
    assert_int_equal(ring->n_held, 0);
    assert_null(ring_find(ring, 2, 0, 0));
    for (uint32_t t = 0; t < N_TICKETS; t++)
        assert_int_equal(credits_of(ring, t), t == 5);

    /* The ticket's second use, for another parcel. Nothing of the first use is left. */
    assert_refused(ring, &use, RING_E_TICKET);
    use = use_of(5, 1, 9);
    use.use = 1;
    slot = open_slot(ring, &use);
    assert_false(slot->posted);
    assert_false(slot->redo);
    assert_int_equal(slot->n_pushed, 0);
    assert_int_equal(slot->use, 1);
    assert_ptr_equal(ring_find(ring, 1, 9, 0), slot);
    ring_credit(ring, slot);
    assert_int_equal(credits_of(ring, 5), 2);
}

static void test_wrong_tickets(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    static const uint32_t tickets[] = {N_TICKETS, N_TICKETS + 1, UINT32_MAX};
    static const uint32_t uses[] = {1, 2, UINT32_MAX};
    struct ring_use use;

    for (size_t i = 0; i < ARRAY_SIZE(tickets); i++) {
        use = use_of(tickets[i], 0, 0);
        assert_refused(ring, &use, RING_E_TICKET);
    }
    for (size_t i = 0; i < ARRAY_SIZE(uses); i++) {
        use = use_of(0, 0, 0);
        use.use = uses[i]; /* a later use, or an old one */
        assert_refused(ring, &use, RING_E_TICKET);
    }
    use = use_of(N_TICKETS - 1, N_BUCKETS - 1, 0);
    open_slot(ring, &use);
}

/* While a ticket is in use, a push must name exactly that use. */
static void test_ticket_of_another_use(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    const struct ring_use use = {
        .ticket = 1, .parcel = 1, .micro_batch = 1, .pass = 1, .attempt = 1, .offset_bytes = 64, .n_bytes = SLOT_BYTES};
    struct ring_use others[] = {use, use, use, use, use, use, use};
    struct ring_slot *slot = open_slot(ring, &use);

    others[0].use = 1;
    others[1].parcel = 0;
    others[2].micro_batch = 0;
    others[3].pass = 0;
    others[4].attempt = 0;
    others[5].offset_bytes = 128;
    others[6].overflow = true;
    for (size_t i = 0; i < ARRAY_SIZE(others); i++)
        assert_refused(ring, &others[i], RING_E_TICKET);
    assert_ptr_equal(open_slot(ring, &use), slot);
}

/* Uses count modulo 2^32. */
static void test_uses_wrap(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    struct ring_use use = use_of(2, 0, 0);

    atomic_store(&ring_credit_page(ring)->credits[2], UINT32_MAX);
    assert_refused(ring, &use, RING_E_TICKET);
    use.use = UINT32_MAX;
    ring_credit(ring, open_slot(ring, &use));
    assert_int_equal(credits_of(ring, 2), 0);
    assert_int_equal(credits_of(ring, 3), 0);
    assert_refused(ring, &use, RING_E_TICKET);
    use.use = 0;
    open_slot(ring, &use);
}

/*
 * Each parcel, micro-batch and pass has at most one slot. Of two slots, one would be reduced and the other forgotten.
 */
static void test_one_slot_each(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    struct ring_use use = use_of(0, 1, 1), second = use_of(1, 1, 1);
    struct ring_slot *slot = open_slot(ring, &use);

    assert_refused(ring, &second, RING_E_TICKET);
    second.pass = 1;
    open_slot(ring, &second);
    second = use_of(2, 1, 2);
    open_slot(ring, &second);
    second = use_of(3, 2, 1);
    open_slot(ring, &second);
    assert_ptr_equal(ring_find(ring, 1, 1, 0), slot);

    ring_credit(ring, slot);
    second = use_of(4, 1, 1);
    open_slot(ring, &second);
    assert_int_equal(ring->n_held, 4);
}

/* After an abort, slots of the last attempt may still be held. They do not prevent slots of the new attempt. */
static void test_attempts(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    struct ring_use use = use_of(0, 1, 0);
    struct ring_slot *before = open_slot(ring, &use), *now;

    use.ticket = 1;
    use.attempt = 1;
    now = open_slot(ring, &use);
    assert_ptr_equal(ring_find(ring, 1, 0, 0), now);
    use.ticket = 2;
    assert_refused(ring, &use, RING_E_TICKET);
    ring_credit(ring, before);
    assert_ptr_equal(ring_find(ring, 1, 0, 0), now);
    ring_credit(ring, now);
    assert_null(ring_find(ring, 1, 0, 0));
}

/* Slots of a parcel are returned in any order. */
static void test_credit_order(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    static const uint32_t orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};

    for (uint32_t i = 0; i < ARRAY_SIZE(orders); i++) {
        bool held[3] = {true, true, true};

        for (uint32_t t = 0; t < 3; t++) {
            struct ring_use use = use_of(t, 3, t);

            use.use = i;
            open_slot(ring, &use);
        }
        for (uint32_t k = 0; k < 3; k++) {
            ring_credit(ring, &ring->slots[orders[i][k]]);
            held[orders[i][k]] = false;
            for (uint32_t t = 0; t < 3; t++)
                assert_ptr_equal(ring_find(ring, 3, t, 0), held[t] ? &ring->slots[t] : NULL);
        }
        assert_int_equal(ring->n_held, 0);
    }
}

/* ---- places -------------------------------------------------------------------------------------------- */

static void test_places(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    static const struct {
        uint64_t offset_bytes, n_bytes;
        int expected;
    } places[] = {
        {0, RING_BYTES, 0},
        {RING_BYTES - 64, 64, 0},
        {RING_BYTES - 64, 1, 0},
        {RING_BYTES, 0, 0},
        {0, RING_BYTES + 1, RING_E_PLACE},
        {64, RING_BYTES - 63, RING_E_PLACE},
        {RING_BYTES - 64, 65, RING_E_PLACE},
        {RING_BYTES, 1, RING_E_PLACE},
        {RING_BYTES + 64, 0, RING_E_PLACE},
        {32, 64, RING_E_PLACE}, /* not on a cache line */
        {1, 64, RING_E_PLACE},
        {0, UINT64_MAX, RING_E_PLACE},
        {64, UINT64_MAX - 63, RING_E_PLACE}, /* their sum wraps around to 0 */
        {UINT64_MAX - 63, 64, RING_E_PLACE},
        {UINT64_MAX - 63, 128, RING_E_PLACE},
        {UINT64_C(1) << 63, UINT64_C(1) << 63, RING_E_PLACE},
    };

    for (uint32_t i = 0, use = 0; i < ARRAY_SIZE(places); i++) {
        struct ring_use here = {.use = use, .offset_bytes = places[i].offset_bytes, .n_bytes = places[i].n_bytes};

        if (places[i].expected != 0) {
            assert_refused(ring, &here, places[i].expected);
            continue;
        }
        ring_credit(ring, open_slot(ring, &here));
        use++;
    }
}

/* The segment's last page may extend beyond the ring's end, and no slot may. */
static void test_ring_ends_within_a_page(void **state)
{
    struct ring_options options = small_ring();
    struct ring_use use = {.offset_bytes = 64, .n_bytes = 64};
    struct ring *ring;

    (void)state;
    options.ring_bytes = 100;
    ring = make(&options);
    assert_refused(ring, &use, RING_E_PLACE);
    use.n_bytes = 36;
    open_slot(ring, &use);
    ring_orphan(ring);
}

/* ---- overflow extents ---------------------------------------------------------------------------------- */

/* Grants an extent and reserves its pages. Return: its offset. */
static uint64_t grant(struct ring *ring, uint64_t n_bytes)
{
    uint64_t offset = UINT64_MAX, extent_bytes = 0;
    int r = ring_grant(ring, n_bytes, &offset, &extent_bytes);

    assert_true(r == 0 || r == 1);
    assert_true(extent_bytes >= n_bytes);
    assert_true(extent_bytes <= ring->overflow.n_bytes && offset <= ring->overflow.n_bytes - extent_bytes);
    if (r == 1) {
        assert_int_equal(segment_reserve(&ring->overflow, offset, extent_bytes), 0);
        ring_reserved(ring, offset, true);
    }
    return offset;
}

static void assert_full(struct ring *ring, uint64_t n_bytes)
{
    uint64_t offset = 12345, extent_bytes = 12345;

    assert_int_equal(ring_grant(ring, n_bytes, &offset, &extent_bytes), -ENOSPC);
}

static struct ring_use overflow_use(uint32_t ticket, uint64_t offset, uint64_t n_bytes)
{
    return (struct ring_use){
        .ticket = ticket, .micro_batch = ticket, .overflow = true, .offset_bytes = offset, .n_bytes = n_bytes};
}

static void test_grant(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    uint64_t offset, n_bytes;
    struct ring_slot *slot;
    struct ring_use use;

    assert_int_equal(ring_grant(ring, 1000, &offset, &n_bytes), 1);
    assert_true(n_bytes >= 1000);
    assert_int_equal(ring->overflow_bytes, n_bytes);
    assert_int_equal(ring->n_overflows, 1);
    use = overflow_use(0, offset, 1000);
    assert_refused(ring, &use, RING_E_PLACE); /* not granted to the client yet, because its pages are not reserved */
    assert_int_equal(segment_reserve(&ring->overflow, offset, n_bytes), 0);
    ring_reserved(ring, offset, true);

    use.n_bytes = n_bytes + 1;
    assert_refused(ring, &use, RING_E_PLACE);
    use = overflow_use(0, offset + 64, 64);
    assert_refused(ring, &use, RING_E_PLACE); /* an extent must be named by its start */
    use = overflow_use(0, offset, 1000);
    slot = open_slot(ring, &use);
    assert_ptr_equal(slot->data, ring->overflow.map + offset);
    assert_true(slot->overflow);
    assert_ptr_equal(open_slot(ring, &use), slot);
    use = overflow_use(1, offset, 64);
    assert_refused(ring, &use, RING_E_PLACE); /* the extent has a slot */

    ring_credit(ring, slot);
    assert_int_equal(credits_of(ring, 0), 1);
    assert_refused(ring, &use, RING_E_PLACE); /* the extent was not granted again */
}

/* Extents begin on cache lines, whatever the parcel's size. */
static void test_extents_are_aligned(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    static const uint64_t sizes[] = {1, 63, 64, 65, 1000, 0, 2};

    for (uint32_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        struct ring_use use = overflow_use(i, grant(ring, sizes[i]), sizes[i]);

        open_slot(ring, &use);
        assert_int_equal(use.offset_bytes % 64, 0);
    }
}

static void test_no_extent(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    static const uint64_t offsets[] = {0, 64, 4096, UINT64_MAX - 63, UINT64_MAX};

    for (size_t i = 0; i < ARRAY_SIZE(offsets); i++) {
        struct ring_use use = overflow_use(0, offsets[i], 64);

        assert_refused(ring, &use, RING_E_PLACE);
    }
}

static void test_reserving_fails(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    uint64_t first = grant(ring, 64), second, third = 0, n_bytes;
    struct ring_use use;

    assert_int_equal(ring_grant(ring, 640, &second, &n_bytes), 1);
    ring_reserved(ring, second, false);
    assert_int_equal(ring->overflow_bytes, 64);
    use = overflow_use(0, second, 640);
    assert_refused(ring, &use, RING_E_PLACE);
    assert_int_equal(ring_grant(ring, 640, &third, &n_bytes), 1); /* the failed extent is not kept */
    ring_reserved(ring, third, true);
    use = overflow_use(0, first, 64);
    open_slot(ring, &use);
    use = overflow_use(1, third, 640);
    open_slot(ring, &use);
}

/* Extents are kept for parcels of their size. A small parcel does not get a large one's extent. */
static void test_reuse(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    uint64_t large = grant(ring, 4096), small, again, n_bytes;
    struct ring_use use = overflow_use(0, large, 4096);

    ring_credit(ring, open_slot(ring, &use));
    small = grant(ring, 64);
    assert_int_not_equal(small, large);
    assert_int_equal(ring_grant(ring, 4096, &again, &n_bytes), 0); /* its pages are reserved already */
    assert_int_equal(again, large);
    assert_int_equal(n_bytes, 4096);
    assert_int_equal(ring->n_overflows, 3);
    assert_int_equal(ring->overflow_bytes, 4096 + 64);
    assert_int_equal(ring_grant(ring, 4096, &again, &n_bytes), 1); /* both extents are in use */
    assert_int_not_equal(again, large);
    ring_reserved(ring, again, true);
}

static void test_bound(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    const uint64_t all = ring->overflow.n_bytes, half = all / 2;
    struct ring_use use;
    uint64_t first, second;

    assert_full(ring, all + 1);
    assert_full(ring, UINT64_MAX / 2);
    first = grant(ring, half);
    second = grant(ring, half);
    assert_int_equal(ring->overflow_bytes, all);
    assert_full(ring, 1);
    assert_int_equal(ring->n_overflows, 2);

    /* An idle extent is freed for another size. An extent with a slot, or one that was granted, is not freed. */
    use = overflow_use(0, first, half);
    ring_credit(ring, open_slot(ring, &use));
    assert_full(ring, half + 64);
    use = overflow_use(1, second, half);
    open_slot(ring, &use);
    assert_int_equal(grant(ring, half - 64), first);
    assert_int_equal(grant(ring, 64), first + half - 64);
    assert_full(ring, 1);
    assert_int_equal(ring->overflow_bytes, all);
}

/* There are at most as many extents as tickets, however small the extents are. */
static void test_number_of_extents(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    struct ring_use use;

    for (uint32_t i = 0; i < N_TICKETS; i++) {
        uint64_t offset = grant(ring, 64);

        use = overflow_use(i, offset, 64);
        open_slot(ring, &use);
    }
    assert_full(ring, 64);
    assert_int_equal(ring->overflow_bytes, N_TICKETS * 64);
    ring_credit(ring, &ring->slots[3]);
    grant(ring, 128); /* replaces an idle extent of another size */
    assert_full(ring, 64);
}

static void test_reclaim(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    uint64_t with_slot = grant(ring, 1024), without = grant(ring, 1024), reserving, again, n_bytes;
    struct ring_use use = overflow_use(0, with_slot, 1024);

    open_slot(ring, &use);
    assert_int_equal(ring_grant(ring, 2048, &reserving, &n_bytes), 1);
    ring_reclaim(ring);

    use = overflow_use(1, without, 1024);
    assert_refused(ring, &use, RING_E_PLACE);
    assert_int_equal(ring_grant(ring, 1024, &again, &n_bytes), 0);
    assert_int_equal(again, without);
    assert_int_equal(ring_grant(ring, 2048, &again, &n_bytes), 1); /* not the extent that is being reserved */
    assert_int_not_equal(again, reserving);
    ring_reserved(ring, again, false);
    ring_reserved(ring, reserving, true);
    use = overflow_use(1, reserving, 2048);
    open_slot(ring, &use);
}

/* ---- pages of extents ---------------------------------------------------------------------------------- */

static uint64_t held_pages(const struct ring *ring)
{
    struct stat st;

    assert_int_equal(fstat(ring->overflow.fd, &st), 0);
    return (uint64_t)st.st_blocks * 512 / page_size();
}

/* Opens a slot in the extent and returns it, so that the extent was used in this step. */
static void use_extent(struct ring *ring, uint64_t offset, uint64_t n_bytes)
{
    struct ring_use use = overflow_use(0, offset, n_bytes);

    use.use = credits_of(ring, 0);
    ring_credit(ring, open_slot(ring, &use));
}

static void test_trim(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    const uint64_t page = page_size();
    uint64_t first = grant(ring, 2 * page), second = grant(ring, 3 * page), again, n_bytes;

    use_extent(ring, first, 2 * page);
    use_extent(ring, second, 3 * page);
    ring_trim(ring); /* both were used since the last call */
    assert_int_equal(held_pages(ring), 5);
    assert_int_equal(ring->overflow_bytes, 5 * page);

    assert_int_equal(ring_grant(ring, 2 * page, &again, &n_bytes), 0);
    use_extent(ring, first, 2 * page);
    ring_trim(ring); /* only the first one was used */
    assert_int_equal(held_pages(ring), 2);
    assert_int_equal(ring->overflow_bytes, 2 * page);

    ring_trim(ring);
    assert_int_equal(held_pages(ring), 0);
    assert_int_equal(ring->overflow_bytes, 0);
    assert_int_equal(ring_grant(ring, 2 * page, &again, &n_bytes), 1); /* its pages must be reserved again */
    ring_reserved(ring, again, false);
}

/* An extent that is granted, has a slot, or is being reserved is never trimmed, after any number of steps. */
static void test_trim_spares_the_busy(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    const uint64_t page = page_size();
    uint64_t granted = grant(ring, page), holding = grant(ring, 2 * page), reserving, n_bytes;
    struct ring_use use = overflow_use(0, holding, 2 * page);
    struct ring_slot *slot = open_slot(ring, &use);

    assert_int_equal(ring_grant(ring, 4 * page, &reserving, &n_bytes), 1);
    assert_int_equal(segment_reserve(&ring->overflow, reserving, n_bytes), 0);
    memset(slot->data, 0x5a, 2 * page);
    for (unsigned i = 0; i < 3; i++)
        ring_trim(ring);
    assert_int_equal(held_pages(ring), 7);
    assert_int_equal(slot->data[2 * page - 1], 0x5a);
    ring_reserved(ring, reserving, true);
    use = overflow_use(1, granted, page);
    open_slot(ring, &use);

    /* The slot is returned after the last call, so its extent was used since then. */
    ring_credit(ring, slot);
    ring_trim(ring);
    assert_int_equal(held_pages(ring), 7);
    ring_trim(ring);
    assert_int_equal(held_pages(ring), 5);
}

/* Extents are smaller than pages. A page is freed only when all extents that touch it are idle. */
static void test_trim_shared_pages(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    const uint64_t page = page_size();
    uint64_t before = grant(ring, 64), middle = grant(ring, 2 * page), after = grant(ring, 128);
    struct ring_use uses[] = {overflow_use(1, before, 64), overflow_use(2, after, 128)};

    assert_int_equal(held_pages(ring), 3);
    for (size_t i = 0; i < ARRAY_SIZE(uses); i++)
        memset(open_slot(ring, &uses[i])->data, 0x5a, uses[i].n_bytes);
    use_extent(ring, middle, 2 * page);
    ring_trim(ring);
    ring_trim(ring);
    assert_int_equal(held_pages(ring), 2);
    for (size_t i = 0; i < ARRAY_SIZE(uses); i++)
        for (uint64_t k = 0; k < uses[i].n_bytes; k++)
            assert_int_equal(ring->overflow.map[uses[i].offset_bytes + k], 0x5a);

    for (size_t i = 0; i < ARRAY_SIZE(uses); i++)
        ring_credit(ring, &ring->slots[uses[i].ticket]);
    ring_trim(ring);
    ring_trim(ring);
    assert_int_equal(held_pages(ring), 0);
}

/* ---- extents at random --------------------------------------------------------------------------------- */

/* [ticket]: the extent of its slot. */
struct model {
    bool open[N_TICKETS];
    uint64_t offset[N_TICKETS], n_bytes[N_TICKETS];
};

/* Asserts that no two extents in use overlap, and that the slots have the bytes that were written. */
static void check_model(const struct ring *ring, const struct model *m)
{
    uint64_t sum = 0;

    for (uint32_t a = 0; a < N_TICKETS; a++) {
        if (!m->open[a])
            continue;
        sum += m->n_bytes[a];
        for (uint32_t b = 0; b < a; b++)
            if (m->open[b])
                assert_true(m->offset[a] + m->n_bytes[a] <= m->offset[b] ||
                            m->offset[b] + m->n_bytes[b] <= m->offset[a]);
        for (uint64_t i = 0; i < m->n_bytes[a]; i += 64)
            assert_int_equal(ring->overflow.map[m->offset[a] + i], 1 + a);
    }
    assert_true(ring->overflow_bytes >= sum);
    assert_true(ring->overflow_bytes <= ring->overflow.n_bytes);
}

static void open_at_random(struct ring *ring, struct model *m, uint32_t ticket, uint64_t n_bytes)
{
    uint64_t offset, extent_bytes;
    int r = ring_grant(ring, n_bytes, &offset, &extent_bytes);
    struct ring_use use;

    if (r == -ENOSPC)
        return;
    if (r == 1) {
        assert_int_equal(segment_reserve(&ring->overflow, offset, extent_bytes), 0);
        ring_reserved(ring, offset, true);
    }
    m->open[ticket] = true;
    m->offset[ticket] = offset;
    m->n_bytes[ticket] = extent_bytes;
    use = overflow_use(ticket, offset, n_bytes);
    use.use = credits_of(ring, ticket);
    memset(open_slot(ring, &use)->data, (int)(1 + ticket), extent_bytes);
}

static void test_random_extents(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    struct model m = {0};
    unsigned n_full = 0;

    for (uint64_t i = 0; i < 3000; i++) {
        uint64_t random = gradient_mix(i), n_bytes = 1 + (random >> 8) % (ring->overflow.n_bytes / 3);
        uint32_t ticket = (uint32_t)(random >> 40) % N_TICKETS;

        if (random % 16 == 0) {
            ring_trim(ring);
        } else if (random % 16 == 1) {
            ring_reclaim(ring);
        } else if (m.open[ticket]) {
            ring_credit(ring, &ring->slots[ticket]);
            m.open[ticket] = false;
        } else {
            open_at_random(ring, &m, ticket, random % 16 < 8 ? n_bytes : n_bytes % 4 * 4096);
            n_full += !m.open[ticket];
        }
        check_model(ring, &m);
    }
    assert_true(n_full > 0); /* the limit was reached */
    for (uint32_t t = 0; t < N_TICKETS; t++)
        if (m.open[t])
            ring_credit(ring, &ring->slots[t]);
    ring_trim(ring);
    ring_trim(ring);
    assert_int_equal(ring->overflow_bytes, 0);
    assert_int_equal(held_pages(ring), 0);
}

/* ---- waiting and letting go ---------------------------------------------------------------------------- */

static void test_credit_is_near(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    struct ring_use use = use_of(N_TICKETS - 1, 1, 0), overflow = overflow_use(0, grant(ring, 64), 64);
    struct ring_slot *slot = open_slot(ring, &use), *elsewhere = open_slot(ring, &overflow);

    assert_false(ring_credit_is_near(ring)); /* neither slot is posted */
    elsewhere->posted = true;
    assert_false(ring_credit_is_near(ring)); /* a return of overflow memory makes no room */
    slot->posted = true;
    assert_true(ring_credit_is_near(ring));
    ring_credit(ring, slot);
    assert_false(ring_credit_is_near(ring));
}

/* Slots that were reduced but are still read are lent. Their rank need not wait for them, and each is returned once. */
static void test_lending(void **state)
{
    struct ring *ring = ((struct fixture *)*state)->ring;
    const struct credit_page *page = ring_credit_page(ring);
    struct ring_use uses[] = {use_of(0, 0, 0), use_of(1, 1, 0), use_of(2, 2, 0)};
    struct ring_slot *slots[ARRAY_SIZE(uses)];

    for (size_t i = 0; i < ARRAY_SIZE(uses); i++) {
        uses[i].offset_bytes = i * SLOT_BYTES;
        slots[i] = open_slot(ring, &uses[i]);
        slots[i]->posted = true;
    }
    ring_lend(ring, slots[0]);
    ring_lend(ring, slots[2]);
    assert_int_equal(ring->n_held, 3);
    assert_int_equal(ring->n_lent, 2);
    assert_true(slots[0]->held && slots[0]->lent && !slots[1]->lent);
    assert_int_equal(page->credits[0], 0);

    ring_credit(ring, slots[0]);
    assert_int_equal(ring->n_held, 2);
    assert_int_equal(ring->n_lent, 1);
    assert_false(slots[0]->lent);
    assert_int_equal(page->credits[0], 1);

    ring_credit_lent(ring);
    assert_int_equal(ring->n_held, 1);
    assert_int_equal(ring->n_lent, 0);
    assert_true(slots[1]->held && !slots[2]->held);
    assert_int_equal(page->credits[1], 0);
    assert_int_equal(page->credits[2], 1);
    ring_credit(ring, slots[1]);
}

static void note_freed(void *userdata, const struct ring *ring)
{
    const struct ring **freed = userdata;

    assert_null(*freed);
    *freed = ring;
}

/* freed() is called once, by the last user of the ring. */
static void test_freed(void **state)
{
    const struct ring *freed = NULL, *expected;
    struct ring_options options = small_ring();
    struct ring *ring;

    (void)state;
    options.freed = note_freed;
    options.userdata = &freed;
    expected = ring = make(&options);
    ring_hold(ring);
    ring_orphan(ring);
    assert_null(freed);
    ring_unhold(ring);
    assert_ptr_equal(freed, expected);

    freed = NULL;
    options.ring_bytes = UINT64_MAX;
    assert_true(ring_new(&ring, &options) < 0);
    assert_null(freed); /* the ring was never made */
}

static void test_orphan(void **state)
{
    struct fixture *f = *state;
    struct ring_use use = use_of(0, 0, 0);

    open_slot(f->ring, &use); /* freed with the ring */
    ring_orphan(steal_ptr(f->ring));
    assert_int_equal(count_maps("memfd:zerod."), 0);
}

/* The last reader frees the ring. Until then its memory remains. */
static void test_orphan_with_readers(void **state)
{
    struct fixture *f = *state;
    struct ring *ring = steal_ptr(f->ring);
    struct ring_use use = use_of(0, 0, 0);
    struct ring_slot *slot = open_slot(ring, &use);

    memset(slot->data, 0x5a, SLOT_BYTES);
    ring_hold(ring);
    ring_hold(ring);
    ring_orphan(ring);
    ring_unhold(ring);
    assert_int_equal(count_maps("memfd:zerod."), 3);
    assert_int_equal(slot->data[SLOT_BYTES - 1], 0x5a);
    ring_unhold(ring);
    assert_int_equal(count_maps("memfd:zerod."), 0);
}

static void test_readers_come_and_go(void **state)
{
    struct fixture *f = *state;

    ring_hold(f->ring);
    ring_unhold(f->ring);
    assert_int_equal(count_maps("memfd:zerod."), 3); /* the fixture still owns it */
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

TEST_GROUP(ring)
{
    const struct CMUnitTest tests[] = {
        TEST(test_new),
        TEST(test_held_pushes),
        TEST(test_new_fails),
        TEST(test_without_overflow),
        TEST(test_open),
        TEST(test_credit),
        TEST(test_wrong_tickets),
        TEST(test_ticket_of_another_use),
        TEST(test_uses_wrap),
        TEST(test_one_slot_each),
        TEST(test_attempts),
        TEST(test_credit_order),
        TEST(test_places),
        TEST(test_ring_ends_within_a_page),
        TEST(test_grant),
        TEST(test_extents_are_aligned),
        TEST(test_no_extent),
        TEST(test_reserving_fails),
        TEST(test_reuse),
        TEST(test_bound),
        TEST(test_number_of_extents),
        TEST(test_reclaim),
        TEST(test_trim),
        TEST(test_trim_spares_the_busy),
        TEST(test_trim_shared_pages),
        TEST(test_random_extents),
        TEST(test_credit_is_near),
        TEST(test_lending),
        TEST(test_freed),
        TEST(test_orphan),
        TEST(test_orphan_with_readers),
        TEST(test_readers_come_and_go),
    };

    return cmocka_run_group_tests_name("ring", tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The journal: records are read in the order in which they were written, a turn takes effect at once, and damage is
 * noticed.
 */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/memory/journal.h"
#include "tests/group.h"

static struct journal *make(void)
{
    struct journal *journal;

    assert_int_equal(journal_new(&journal), 0);
    assert_false(journal_is_valid(journal));
    assert_int_equal(journal_version(journal), JOURNAL_VERSION);
    return journal;
}

static void add(struct journal *journal, enum journal_type type, unsigned rank, const char *text, const char *more)
{
    journal_append(journal,
                   &(struct journal_record){
                       .type = type, .rank = rank, .time_ns = 1000 + rank, .data = text, .n_bytes = strlen(text)},
                   more, strlen(more));
}

static void expect(const struct journal *journal, uint64_t *at, enum journal_type type, unsigned rank, const char *text)
{
    struct journal_record record;

    assert_true(journal_read(journal, at, &record));
    assert_int_equal(record.type, type);
    assert_int_equal(record.rank, rank);
    assert_int_equal(record.time_ns, 1000 + rank);
    assert_int_equal(record.n_bytes, strlen(text));
    assert_memory_equal(record.data, text, strlen(text));
    assert_int_equal((uintptr_t)record.data % 8, 0);
}

static void expect_end(const struct journal *journal, uint64_t at)
{
    struct journal_record record;

    assert_false(journal_read(journal, &at, &record));
}

static void expect_head(const struct journal *journal, const char *text)
{
    size_t n_bytes;
    const void *head = journal_head(journal, &n_bytes);

    assert_non_null(head);
    assert_int_equal(n_bytes, strlen(text));
    assert_memory_equal(head, text, n_bytes);
}

static void test_turns(void **state)
{
    struct journal *journal = make();
    uint64_t at = 0;

    (void)state;
    add(journal, JOURNAL_REQUEST, 1, "before the first head", ""); /* before the first turn, so in no log */
    journal_turn(journal, "first", 5);
    assert_true(journal_is_valid(journal));
    expect_head(journal, "first");
    expect_end(journal, 0);
    add(journal, JOURNAL_REQUEST, 1, "one", "");
    add(journal, JOURNAL_GRANT, 2, "", "two and more");
    add(journal, JOURNAL_DETACH, 3, "", "");
    expect(journal, &at, JOURNAL_REQUEST, 1, "one");
    expect(journal, &at, JOURNAL_GRANT, 2, "two and more");
    expect(journal, &at, JOURNAL_DETACH, 3, "");
    expect_end(journal, at);

    for (unsigned i = 0; i < 5; i++) {
        journal_turn(journal, i % 2 ? "odd" : "even, and longer", i % 2 ? 3 : 16);
        expect_head(journal, i % 2 ? "odd" : "even, and longer");
        expect_end(journal, 0);
        add(journal, JOURNAL_REQUEST, i, "of this step", "");
        at = 0;
        expect(journal, &at, JOURNAL_REQUEST, i, "of this step");
        expect_end(journal, at);
    }
    journal_clear(journal);
    assert_false(journal_is_valid(journal));
    journal_turn(journal, "anew", 4);
    expect_head(journal, "anew");
    expect_end(journal, 0);
    journal_free(journal);
}

static void test_base(void **state)
{
    struct journal *journal = make();
    struct journal_record record;
    uint64_t at = 0;

    (void)state;
    journal_found(journal, JOURNAL_CONFIG, "a 1\n", 4);
    journal_found(journal, JOURNAL_DECLARE, "param", 5);
    journal_turn(journal, "head", 4);
    journal_turn(journal, "head", 4); /* a turn keeps the base */
    assert_true(journal_read_base(journal, &at, &record));
    assert_int_equal(record.type, JOURNAL_CONFIG);
    assert_memory_equal(record.data, "a 1\n", 4);
    assert_true(journal_read_base(journal, &at, &record));
    assert_int_equal(record.type, JOURNAL_DECLARE);
    assert_false(journal_read_base(journal, &at, &record));
    journal_free(journal);
}

/* A log that is larger than what is reserved at once. */
static void test_long_log(void **state)
{
    enum { N = 3000, SIZE = 1000 };
    struct journal *journal = make();
    struct journal_record record;
    static char text[SIZE + 1];
    uint64_t at = 0;

    (void)state;
    journal_turn(journal, "head", 4);
    for (unsigned i = 0; i < N; i++) {
        memset(text, 'a' + i % 26, SIZE);
        add(journal, JOURNAL_REQUEST, i % 64, text, "");
    }
    for (unsigned i = 0; i < N; i++) {
        assert_true(journal_read(journal, &at, &record));
        assert_int_equal(record.n_bytes, SIZE);
        assert_int_equal(((const char *)record.data)[SIZE - 1], 'a' + i % 26);
    }
    expect_end(journal, at);
    journal_free(journal);
}

static void test_damage(void **state)
{
    struct journal *journal = make();
    struct journal_record record;
    uint64_t at = 0;
    size_t n_bytes;

    (void)state;
    journal_turn(journal, "head", 4);
    add(journal, JOURNAL_REQUEST, 1, "record", "");
    assert_true(journal_read(journal, &at, &record));
    ((uint32_t *)(uintptr_t)record.data)[-4] = 1000; /* its size, now beyond the written bytes */
    expect_end(journal, 0);
    ((char *)(uintptr_t)journal_head(journal, &n_bytes))[2] = 'x';
    assert_null(journal_head(journal, &n_bytes));
    journal_free(journal);
}

/* The first page as it is in the file. A daemon may be killed between any two of its stores. */
struct first_page {
    uint64_t magic;
    uint32_t version, current;
    uint64_t mark, base_tail, heads[4], tails[2], beat;
    uint32_t check;
};

static struct first_page *first_page(const struct journal *journal)
{
    size_t n_bytes;
    const uint8_t *head;

    /* The first head is behind the page and the base. */
    head = journal_head(journal, &n_bytes);
    return (struct first_page *)(uintptr_t)(head - (UINT64_C(1) << 30) - 65536);
}

static void test_first_page(void **state)
{
    struct journal *journal = make();
    struct first_page *page;

    (void)state;
    assert_false(journal_is_damaged(journal));
    journal_turn(journal, "head", 4);
    page = first_page(journal);
    assert_int_equal(page->current, 1);
    assert_false(journal_is_damaged(journal));
    add(journal, JOURNAL_REQUEST, 1, "record", "");

    page->check = 0; /* by a version that writes no check */
    assert_false(journal_is_damaged(journal));
    page->check = ~UINT32_C(0); /* killed while it cleared the journal */
    assert_false(journal_is_damaged(journal));
    page->check = ~UINT32_C(1);
    page->current = 2; /* killed in the turn */
    assert_false(journal_is_damaged(journal));
    page->tails[1] = 16; /* the other head, whose log has records */
    assert_true(journal_is_damaged(journal));
    page->current = 0;
    assert_true(journal_is_damaged(journal));
    page->current = 7;
    assert_true(journal_is_damaged(journal));
    page->current = 1;
    assert_false(journal_is_damaged(journal));
    page->magic = 0;
    assert_true(journal_is_damaged(journal));
    page->magic = UINT64_C(0x6c616e72756f6a7a);
    journal_give_up(journal, -ENOMEM);
    assert_false(journal_is_damaged(journal));
    journal_clear(journal);
    assert_false(journal_is_damaged(journal));
    journal_free(journal);
}

/* When an event could not be recorded, the journal is invalid until another job is founded. */
static void test_gives_up(void **state)
{
    struct journal *journal = make();

    (void)state;
    journal_found(journal, JOURNAL_CONFIG, "a 1\n", 4);
    journal_turn(journal, "head", 4);
    journal_give_up(journal, -ENOMEM);
    assert_false(journal_is_valid(journal));
    add(journal, JOURNAL_REQUEST, 1, "record", "");
    journal_turn(journal, "head", 4);
    assert_false(journal_is_valid(journal));
    journal_clear(journal);
    journal_found(journal, JOURNAL_CONFIG, "b 1\n", 4);
    journal_turn(journal, "head", 4);
    assert_true(journal_is_valid(journal));
    journal_free(journal);
}

static void test_beat(void **state)
{
    struct journal *journal = make();

    (void)state;
    assert_int_equal(journal_last_beat(journal), 0);
    journal_beat(journal, 42);
    assert_int_equal(journal_last_beat(journal), 42);
    journal_free(journal);
}

/* All calls accept NULL, because a job without a kept journal makes them as well. */
static void test_none(void **state)
{
    (void)state;
    add(NULL, JOURNAL_REQUEST, 1, "record", "");
    journal_found(NULL, JOURNAL_CONFIG, "", 0);
    journal_turn(NULL, "head", 4);
    journal_beat(NULL, 1);
    journal_give_up(NULL, -ENOMEM);
    journal_clear(NULL);
    assert_false(journal_is_valid(NULL));
    journal_free(NULL);
}

TEST_GROUP(journal)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),  cmocka_unit_test(test_base),       cmocka_unit_test(test_long_log),
        cmocka_unit_test(test_damage), cmocka_unit_test(test_gives_up),   cmocka_unit_test(test_beat),
        cmocka_unit_test(test_none),   cmocka_unit_test(test_first_page),
    };

    return cmocka_run_group_tests_name("journal", tests, NULL, NULL);
}

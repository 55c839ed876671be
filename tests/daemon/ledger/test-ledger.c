/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each test is a rule of daemon/ledger/ledger.h, as two arrays: operations, and the expected answer to each. The ledger
 * has two ranks and four parameters. The last parameter is not trainable.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "daemon/ledger/ledger.h"
#include "tests/group.h"

enum {
    N_RANKS = 2,
    N_PARAMS = 4,
    FROZEN = 3, /* the parameter that is not trainable */
};

enum kind {
    OP_ATTACH,
    OP_NEXT,
    OP_BEGIN,
    OP_PUSH,
    OP_POST,
    OP_SUM,
    OP_FIND_SUM,
    OP_END,
    OP_FORGET,
    OP_ABANDON,
    OP_ASK,
    OP_ABORT,
    OP_COMMIT,
    OP_GET,       /* a field of the rank */
    OP_GET_ENTRY, /* a field of an entry */
};

enum field {
    IS_OPEN,
    IS_ASKED,
    N_ENDED,
    N_PUSHED,
    N_PUSHED_OPEN,
    LAST_SEQUENCE,
    LAST_ENDED, /* step x 1000 + micro-batch, or NONE if none has ended */
    IN_STEP,    /* pushed_in_step of a parameter, as 0 or 1 */
    ENTRY_PUSHED,
    ENTRY_POSTED,
    ENTRY_SUMMED,
    ENTRY_REDO,
    ENTRY_FIRST, /* the sequence in the record of pass 0 */
};

struct op {
    enum kind kind;
    unsigned rank;
    uint64_t step;
    uint32_t micro_batch;
    uint64_t incarnation, sequence;
    uint32_t attempt, param;
    enum field field;
    uint64_t value;
};

#define ATTACH(r, inc)                                                                                                 \
    {                                                                                                                  \
        .kind = OP_ATTACH, .rank = r, .incarnation = inc                                                               \
    }
#define NEXT(r)                                                                                                        \
    {                                                                                                                  \
        .kind = OP_NEXT, .rank = r                                                                                     \
    }
#define BEGIN(r, s, m)                                                                                                 \
    {                                                                                                                  \
        .kind = OP_BEGIN, .rank = r, .step = s, .micro_batch = m                                                       \
    }
#define PUSH_FULL(r, inc, att, s, m, seq, p)                                                                           \
    {                                                                                                                  \
        .kind = OP_PUSH, .rank = r, .incarnation = inc, .attempt = att, .step = s, .micro_batch = m, .sequence = seq,  \
        .param = p                                                                                                     \
    }
/* A push of the incarnation 100 + rank, in the first attempt of step 0. */
#define PUSH(r, m, seq, p) PUSH_FULL(r, 100 + (r), 0, 0, m, seq, p)
#define POST(r, p)                                                                                                     \
    {                                                                                                                  \
        .kind = OP_POST, .rank = r, .param = p                                                                         \
    }
#define SUM(r, p, v)                                                                                                   \
    {                                                                                                                  \
        .kind = OP_SUM, .rank = r, .param = p, .value = v                                                              \
    }
#define FIND_SUM(r, p, k)                                                                                              \
    {                                                                                                                  \
        .kind = OP_FIND_SUM, .rank = r, .param = p, .value = k                                                         \
    }
#define END(r, s, m)                                                                                                   \
    {                                                                                                                  \
        .kind = OP_END, .rank = r, .step = s, .micro_batch = m                                                         \
    }
#define FORGET(r)                                                                                                      \
    {                                                                                                                  \
        .kind = OP_FORGET, .rank = r                                                                                   \
    }
#define ABANDON(r)                                                                                                     \
    {                                                                                                                  \
        .kind = OP_ABANDON, .rank = r                                                                                  \
    }
#define ASK(r)                                                                                                         \
    {                                                                                                                  \
        .kind = OP_ASK, .rank = r                                                                                      \
    }
#define ABORT                                                                                                          \
    {                                                                                                                  \
        .kind = OP_ABORT                                                                                               \
    }
#define COMMIT                                                                                                         \
    {                                                                                                                  \
        .kind = OP_COMMIT                                                                                              \
    }
#define GET(r, f)                                                                                                      \
    {                                                                                                                  \
        .kind = OP_GET, .rank = r, .field = f                                                                          \
    }
#define GET_PARAM(r, p, f)                                                                                             \
    {                                                                                                                  \
        .kind = OP_GET_ENTRY, .rank = r, .param = p, .field = f                                                        \
    }

/* Answers other than the ledger's verdicts. */
#define OK 0
#define NONE (-1)
#define ADMITTED(k) (1000 + (k))
#define REDO(k) (2000 + (k))
#define AT(s, m) ((s)*1000 + (m))

static int64_t push(struct ledger *ledger, const struct op *op)
{
    struct push_record record = {
        .incarnation = op->incarnation,
        .attempt = op->attempt,
        .step = op->step,
        .micro_batch = op->micro_batch,
        .sequence = op->sequence,
        .part = op->param,
    };
    uint16_t pass = UINT16_MAX;
    int verdict = ledger_push(ledger, op->rank, &record, &pass);

    if (verdict == LEDGER_ADMITTED)
        return ADMITTED(pass);
    if (verdict == LEDGER_REDO)
        return REDO(pass);
    assert_int_equal(pass, UINT16_MAX);
    return verdict;
}

static int64_t position_of(struct ledger_position at)
{
    return at.valid ? (int64_t)AT(at.step, at.micro_batch) : NONE;
}

static int64_t get(const struct ledger *ledger, const struct op *op)
{
    const struct ledger_rank *rank = &ledger->ranks[op->rank];
    const struct ledger_entry *entry = ledger_entry(ledger, op->rank, op->param);

    switch (op->field) {
    case IS_OPEN:
        return rank->open;
    case IS_ASKED:
        return rank->asked;
    case N_ENDED:
        return rank->n_ended;
    case N_PUSHED:
        return rank->n_pushed;
    case N_PUSHED_OPEN:
        return rank->n_pushed_open;
    case LAST_SEQUENCE:
        return (int64_t)rank->last_sequence;
    case LAST_ENDED:
        return position_of(rank->last_ended);
    case IN_STEP:
        return rank->pushed_in_step[op->param] != 0;
    case ENTRY_PUSHED:
        return entry->n_pushed;
    case ENTRY_POSTED:
        return entry->n_posted;
    case ENTRY_SUMMED:
        return entry->n_summed;
    case ENTRY_REDO:
        return entry->n_redo;
    case ENTRY_FIRST:
        return (int64_t)entry->first.sequence;
    }
    return NONE;
}

static int64_t run(struct ledger *ledger, const struct op *op)
{
    uint64_t sum;

    switch (op->kind) {
    case OP_ATTACH:
        return ledger_attach(ledger, op->rank, op->incarnation);
    case OP_NEXT:
        return position_of(ledger_next(ledger, op->rank));
    case OP_BEGIN:
        return ledger_begin(ledger, op->rank, op->step, op->micro_batch);
    case OP_PUSH:
        return push(ledger, op);
    case OP_POST:
        ledger_post(ledger, op->rank, op->param);
        return OK;
    case OP_SUM:
        return ledger_sum(ledger, op->rank, op->param, op->value);
    case OP_FIND_SUM:
        return ledger_find_sum(ledger, op->rank, op->param, (uint16_t)op->value, &sum) ? (int64_t)sum : NONE;
    case OP_END:
        return ledger_end(ledger, op->rank, op->step, op->micro_batch);
    case OP_FORGET:
        ledger_forget(ledger, op->rank);
        return OK;
    case OP_ABANDON:
        return ledger_abandon(ledger, op->rank);
    case OP_ASK:
        return ledger_ask(ledger, op->rank);
    case OP_ABORT:
        ledger_abort(ledger);
        return OK;
    case OP_COMMIT:
        ledger_commit(ledger);
        return OK;
    case OP_GET:
    case OP_GET_ENTRY:
        return get(ledger, op);
    }
    return NONE;
}

/* Compares the ledger's counts with counts of its entries and flags. */
static void check_counts(const struct ledger *ledger)
{
    for (unsigned r = 0; r < N_RANKS; r++) {
        const struct ledger_rank *rank = &ledger->ranks[r];
        uint32_t n_open = 0, n_step = 0;

        for (uint32_t p = 0; p < N_PARAMS; p++) {
            const struct ledger_entry *entry = &rank->entries[p];

            n_open += entry->n_pushed > 0;
            n_step += rank->pushed_in_step[p] != 0;
            assert_true(entry->n_pushed == 0 || rank->pushed_in_step[p]);
            assert_true(entry->n_pushed >= entry->n_posted && entry->n_posted >= entry->n_summed);
            assert_true(entry->n_redo <= entry->n_posted);
        }
        assert_int_equal(rank->n_pushed_open, n_open);
        assert_int_equal(rank->n_pushed, n_step);
    }
}

static void check(bool accumulate, const struct op *ops, const int64_t *answers, size_t n)
{
    static const uint8_t trainable[N_PARAMS] = {1, 1, 1, 0};
    struct ledger ledger;

    assert_int_equal(
        ledger_init(&ledger, (struct ledger_ranks){.end = N_RANKS, .n = N_RANKS}, N_PARAMS, trainable, accumulate), 0);
    for (size_t i = 0; i < n; i++) {
        int64_t answer = run(&ledger, &ops[i]);

        if (answer != answers[i])
            fail_msg("operation %zu answered %lld, expected %lld", i, (long long)answer, (long long)answers[i]);
        check_counts(&ledger);
    }
    ledger_deinit(&ledger);
}

#define CHECK(accumulate, ops, answers)                                                                                \
    do {                                                                                                               \
        _Static_assert(ARRAY_SIZE(ops) == ARRAY_SIZE(answers), "one answer for each operation");                       \
        check(accumulate, ops, answers, ARRAY_SIZE(ops));                                                              \
    } while (0)

static void test_empty(void **state)
{
    static const struct op ops[] = {
        GET(0, IS_OPEN), GET(0, LAST_ENDED), NEXT(0), NEXT(1), ASK(1), ASK(1), GET(1, IS_ASKED), GET(0, IS_ASKED),
    };
    static const int64_t answers[] = {0, NONE, AT(0, 0), AT(0, 0), OK, LEDGER_RETRY, 1, 0};

    CHECK(false, ops, answers);
}

static void test_begin(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),  BEGIN(0, 0, 1), BEGIN(0, 1, 0), GET(0, IS_OPEN), BEGIN(0, 0, 0),
        GET(0, IS_OPEN), BEGIN(0, 0, 0), BEGIN(0, 0, 1), GET(1, IS_OPEN),
    };
    static const int64_t answers[] = {
        1, LEDGER_E_EARLY, LEDGER_E_EARLY, 0, OK, 1, OK /* another backward */, LEDGER_E_EARLY, 0,
    };

    CHECK(false, ops, answers);
}

/*
 * begin, push and end classify a position in the same way: the last ended one, earlier, beyond the open one, or open.
 */
static void test_positions(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),   BEGIN(0, 0, 0),   END(0, 0, 0),       BEGIN(0, 0, 1),  END(0, 0, 1),     BEGIN(0, 0, 2),
        BEGIN(0, 0, 0),   BEGIN(0, 0, 1),   BEGIN(0, 0, 2),     BEGIN(0, 0, 3),  PUSH(0, 0, 1, 0), PUSH(0, 1, 1, 0),
        PUSH(0, 3, 1, 0), PUSH(0, 2, 1, 0), END(0, 0, 0),       END(0, 0, 1),    END(0, 0, 3),     END(0, 1, 0),
        END(0, 0, 2),     END(0, 0, 2),     GET(0, LAST_ENDED), GET(0, N_ENDED), NEXT(0),
    };
    static const int64_t answers[] = {
        1,
        OK,
        OK,
        OK,
        OK,
        OK,
        LEDGER_E_STALE,
        LEDGER_E_AFTER_BOUNDARY,
        OK,
        LEDGER_E_EARLY,
        LEDGER_E_STALE,
        LEDGER_E_AFTER_BOUNDARY,
        LEDGER_E_EARLY,
        ADMITTED(0),
        LEDGER_E_STALE,
        LEDGER_RETRY,
        LEDGER_E_EARLY,
        LEDGER_E_EARLY,
        OK,
        LEDGER_RETRY,
        AT(0, 2),
        3,
        AT(0, 3),
    };

    CHECK(false, ops, answers);
}

static void test_nothing_open(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100), PUSH(0, 0, 1, 0), PUSH(0, 1, 1, 0), END(0, 0, 0),     END(0, 0, 1),
        ABANDON(0),     FORGET(0),        BEGIN(0, 0, 0),   END(0, 0, 0),     PUSH(0, 1, 1, 0),
        END(0, 0, 1),   END(0, 0, 0),     PUSH(0, 0, 1, 0), GET(0, N_PUSHED),
    };
    static const int64_t answers[] = {
        1,  LEDGER_E_EARLY, LEDGER_E_EARLY, LEDGER_E_EARLY, LEDGER_E_EARLY,          OK, OK, OK,
        OK, LEDGER_E_EARLY, LEDGER_E_EARLY, LEDGER_RETRY,   LEDGER_E_AFTER_BOUNDARY, 0,
    };

    CHECK(false, ops, answers);
}

/* A position of an earlier step is stale, except the last one before the commit, which has just ended. */
static void test_earlier_step(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100), BEGIN(0, 0, 0),   END(0, 0, 0),     BEGIN(0, 0, 1),   END(0, 0, 1),
        ASK(0),         COMMIT,           BEGIN(0, 0, 1),   BEGIN(0, 0, 0),   BEGIN(0, 0, 2),
        END(0, 0, 1),   PUSH(0, 1, 1, 0), PUSH(0, 2, 1, 0), PUSH(0, 0, 1, 0), BEGIN(0, 1, 0),
        NEXT(1),        BEGIN(1, 0, 0),   END(1, 0, 0),     BEGIN(1, 1, 1),   BEGIN(1, 1, 0),
    };
    static const int64_t answers[] = {
        1,
        OK,
        OK,
        OK,
        OK,
        OK,
        OK,
        LEDGER_E_AFTER_BOUNDARY,
        LEDGER_E_STALE,
        LEDGER_E_STALE,
        LEDGER_RETRY,
        LEDGER_E_AFTER_BOUNDARY,
        LEDGER_E_STALE,
        LEDGER_E_STALE,
        OK,
        AT(1, 0),
        LEDGER_E_STALE,
        LEDGER_E_STALE,
        LEDGER_E_EARLY,
        OK,
    };

    CHECK(false, ops, answers);
}

static void test_ask(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100), BEGIN(0, 0, 0), ASK(0),       END(0, 0, 0),   ASK(0), ASK(0),          BEGIN(0, 0, 1),
        BEGIN(0, 0, 2), BEGIN(0, 0, 0), END(0, 0, 1), ATTACH(0, 200), ASK(0), GET(0, IS_OPEN), NEXT(0),
    };
    static const int64_t answers[] = {
        1,
        OK,
        LEDGER_E_EARLY,
        OK,
        OK,
        LEDGER_RETRY,
        LEDGER_E_EARLY,
        LEDGER_E_EARLY,
        LEDGER_E_AFTER_BOUNDARY,
        LEDGER_E_EARLY,
        1,
        LEDGER_RETRY,
        0,
        AT(0, 1),
    };

    CHECK(false, ops, answers);
}

static void test_param(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, FROZEN),
        PUSH(0, 0, 1, N_PARAMS),
        PUSH(0, 0, 1, UINT32_MAX),
        PUSH_FULL(0, 7, 9, 9, 9, 1, FROZEN), /* FROZEN is checked first */
        GET(0, LAST_SEQUENCE),
        PUSH(0, 0, 1, 0),
    };
    static const int64_t answers[] = {
        1, OK, LEDGER_E_PARAM, LEDGER_E_PARAM, LEDGER_E_PARAM, LEDGER_E_PARAM, 0, ADMITTED(0),
    };

    CHECK(false, ops, answers);
}

/* Each push fails several checks, and is answered by the first of them. */
static void test_order_of_checks(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 5, 0),
        ABORT,
        BEGIN(0, 0, 0),
        PUSH_FULL(0, 100, 1, 0, 0, 6, 0),
        PUSH_FULL(0, 99, 0, 0, 1, 5, 0),  /* wrong incarnation, older attempt, known sequence, wrong position */
        PUSH_FULL(0, 99, 2, 0, 1, 5, 0),  /* wrong incarnation, newer attempt */
        PUSH_FULL(0, 100, 0, 0, 1, 5, 0), /* older attempt, known sequence, wrong position */
        PUSH_FULL(0, 100, 2, 0, 0, 5, 0), /* newer attempt, known sequence */
        PUSH_FULL(0, 100, 1, 0, 1, 5, 0), /* known sequence, wrong position */
        PUSH_FULL(0, 100, 1, 0, 1, 7, 0), /* wrong position, duplicate */
        PUSH_FULL(0, 100, 1, 0, 0, 7, 0), /* duplicate */
    };
    static const int64_t answers[] = {
        1,
        OK,
        ADMITTED(0),
        OK,
        OK,
        ADMITTED(0),
        LEDGER_E_STALE,
        LEDGER_E_STALE,
        LEDGER_DROPPED,
        LEDGER_E_EARLY,
        LEDGER_RETRY,
        LEDGER_E_EARLY,
        LEDGER_E_DUPLICATE,
    };

    CHECK(false, ops, answers);
}

static void test_retry(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 3, 0),
        PUSH(0, 0, 3, 0), /* retry of the last push */
        /* retries of older pushes, whether they were admitted or refused */
        PUSH(0, 0, 2, 1),
        PUSH(0, 0, 4, 1),
        GET(0, LAST_SEQUENCE),
        END(0, 0, 0),
        PUSH(0, 0, 4, 1),
        PUSH(0, 0, 5, 1), /* a retry counts as a retry, even after the end */
        GET(0, LAST_SEQUENCE),
    };
    static const int64_t answers[] = {
        1, OK, ADMITTED(0), LEDGER_RETRY, LEDGER_RETRY, ADMITTED(0), 4, OK, LEDGER_RETRY, LEDGER_E_AFTER_BOUNDARY, 4,
    };

    CHECK(false, ops, answers);
}

/* Sequences continue after an abort and a commit, and start again with a new incarnation. */
static void test_sequences(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        PUSH(0, 0, 2, 1),
        ABORT,
        BEGIN(0, 0, 0),
        PUSH_FULL(0, 100, 1, 0, 0, 2, 1),
        PUSH_FULL(0, 100, 1, 0, 0, 3, 1),
        END(0, 0, 0),
        ASK(0),
        COMMIT,
        BEGIN(0, 1, 0),
        PUSH_FULL(0, 100, 1, 1, 0, 3, 1),
        PUSH_FULL(0, 100, 1, 1, 0, 4, 1),
        ATTACH(0, 200),
        GET(0, LAST_SEQUENCE),
        BEGIN(0, 1, 0),
        PUSH_FULL(0, 200, 1, 1, 0, 0, 1),
        PUSH_FULL(0, 200, 1, 1, 0, 1, 1),
        GET(0, LAST_SEQUENCE),
    };
    static const int64_t answers[] = {
        1,  OK, ADMITTED(0),  ADMITTED(0), OK, OK, LEDGER_RETRY, ADMITTED(0),  OK,          OK,
        OK, OK, LEDGER_RETRY, ADMITTED(0), 1,  0,  OK,           LEDGER_RETRY, ADMITTED(0), 1,
    };

    CHECK(false, ops, answers);
}

/* A refused push leaves no trace. The same sequence can be pushed again, and is refused again. */
static void test_duplicate(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        ATTACH(1, 101),
        BEGIN(0, 0, 0),
        BEGIN(1, 0, 0),
        PUSH(0, 0, 1, 2),
        PUSH(0, 0, 2, 2),
        PUSH(0, 0, 2, 2),
        GET(0, LAST_SEQUENCE),
        GET_PARAM(0, 2, ENTRY_PUSHED),
        GET_PARAM(0, 2, ENTRY_FIRST),
        PUSH(1, 0, 1, 2),
        PUSH(0, 0, 3, 1),
        END(0, 0, 0),
        BEGIN(0, 0, 1),
        PUSH(0, 1, 4, 2),
        GET(0, N_PUSHED),
    };
    static const int64_t answers[] = {
        1,           1,  OK, OK,          ADMITTED(0), LEDGER_E_DUPLICATE, LEDGER_E_DUPLICATE, 1, 1, 1, ADMITTED(0),
        ADMITTED(0), OK, OK, ADMITTED(0), 2,
    };

    CHECK(false, ops, answers);
}

static void test_accumulate(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 2),
        PUSH(0, 0, 2, 2),
        PUSH(0, 0, 2, 2),
        PUSH(0, 0, 3, 2),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 4, 2),
        PUSH(0, 0, 5, 0),
        GET_PARAM(0, 2, ENTRY_PUSHED),
        GET_PARAM(0, 2, ENTRY_FIRST),
        GET(0, N_PUSHED),
        GET(0, N_PUSHED_OPEN),
        END(0, 0, 0),
        BEGIN(0, 0, 1),
        PUSH(0, 1, 6, 2),
        GET(0, N_PUSHED),
        GET(0, N_PUSHED_OPEN),
    };
    static const int64_t answers[] = {
        1, OK, ADMITTED(0), ADMITTED(1), LEDGER_RETRY, ADMITTED(2), OK,          ADMITTED(3), ADMITTED(0),
        4, 1,  2,           2,           OK,           OK,          ADMITTED(0), 2,           1,
    };

    CHECK(true, ops, answers);
}

static void test_post_and_sum(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),    BEGIN(0, 0, 0),    PUSH(0, 0, 1, 0),  PUSH(0, 0, 2, 0),  PUSH(0, 0, 3, 0),
        PUSH(0, 0, 4, 0),  POST(0, 0),        POST(0, 0),        SUM(0, 0, 70),     FIND_SUM(0, 0, 0),
        FIND_SUM(0, 0, 1), SUM(0, 0, 71),     POST(0, 0),        POST(0, 0),        SUM(0, 0, 72),
        SUM(0, 0, 73),     FIND_SUM(0, 0, 0), FIND_SUM(0, 0, 1), FIND_SUM(0, 0, 2), FIND_SUM(0, 0, 3),
        FIND_SUM(0, 0, 4), FIND_SUM(0, 1, 0), FIND_SUM(1, 0, 0),
    };
    static const int64_t answers[] = {
        1,  OK, ADMITTED(0), ADMITTED(1), ADMITTED(2), ADMITTED(3), OK, OK, OK,   70,   NONE, OK,
        OK, OK, OK,          OK,          70,          71,          72, 73, NONE, NONE, NONE,
    };

    CHECK(true, ops, answers);
}

/* Ended pushes can be posted, summed and read until forget() or the next begin(). */
static void test_forget(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        PUSH(0, 0, 2, 1),
        FORGET(0),
        GET(0, N_PUSHED_OPEN),
        POST(0, 0),
        END(0, 0, 0),
        POST(0, 1),
        SUM(0, 0, 70),
        SUM(0, 1, 71),
        FIND_SUM(0, 1, 0),
        GET(0, N_PUSHED_OPEN),
        FORGET(0),
        GET(0, N_PUSHED_OPEN),
        FIND_SUM(0, 1, 0),
        GET(0, N_PUSHED),
        GET_PARAM(0, 0, IN_STEP),
        GET_PARAM(0, 2, IN_STEP),
        FORGET(0),
        BEGIN(0, 0, 1),
        PUSH(0, 1, 3, 1),
        END(0, 0, 1),
        GET(0, N_PUSHED_OPEN),
        BEGIN(0, 0, 2),
        GET(0, N_PUSHED_OPEN),
        GET(0, N_PUSHED),
        PUSH(0, 2, 4, 1),
        BEGIN(0, 0, 2),
        GET(0, N_PUSHED_OPEN),
    };
    static const int64_t answers[] = {
        1,    OK, ADMITTED(0), ADMITTED(0), OK, 2,  OK,          OK, OK, OK, OK, 71, 2,           OK, 0,
        NONE, 2,  1,           0,           OK, OK, ADMITTED(0), OK, 1,  OK, 0,  2,  ADMITTED(0), OK, 1,
    };

    CHECK(false, ops, answers);
}

static void test_attach_same(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),   BEGIN(0, 0, 0),   PUSH(0, 0, 1, 0), ATTACH(0, 100),
        PUSH(0, 0, 1, 0), PUSH(0, 0, 2, 1), GET(0, IS_OPEN),  GET(0, N_PUSHED),
    };
    static const int64_t answers[] = {1, OK, ADMITTED(0), 0, LEDGER_RETRY, ADMITTED(0), 1, 2};

    CHECK(false, ops, answers);
}

/* No push of the dead rank was posted, so its successor starts the micro-batch as a new one. */
static void test_successor_of_unposted(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        PUSH(0, 0, 2, 1),
        ATTACH(0, 200),
        GET(0, IS_OPEN),
        GET(0, N_PUSHED),
        GET(0, N_PUSHED_OPEN),
        NEXT(0),
        PUSH(0, 0, 3, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 1, 0),
        BEGIN(0, 0, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 1, 0),
    };
    static const int64_t answers[] = {
        1, OK, ADMITTED(0), ADMITTED(0), 1, 0, 0, 0, AT(0, 0), LEDGER_E_STALE, LEDGER_E_EARLY, OK, ADMITTED(0),
    };

    CHECK(false, ops, answers);
}

/* Posted pushes are kept, and the successor must push them again. A push is a duplicate only after that. */
static void test_redo(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        PUSH(0, 0, 2, 1),
        POST(0, 0),
        ATTACH(0, 200),
        GET(0, N_PUSHED),
        GET_PARAM(0, 0, ENTRY_REDO),
        GET_PARAM(0, 1, ENTRY_PUSHED),
        SUM(0, 0, 70),
        BEGIN(0, 0, 0),
        GET(0, N_PUSHED_OPEN),
        END(0, 0, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 1, 1),
        END(0, 0, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 2, 0),
        FIND_SUM(0, 0, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 2, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 3, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 4, 1),
        GET(0, LAST_SEQUENCE),
        GET_PARAM(0, 0, ENTRY_FIRST),
        END(0, 0, 0),
        GET(0, N_PUSHED),
    };
    static const int64_t answers[] = {
        1,
        OK,
        ADMITTED(0),
        ADMITTED(0),
        OK,
        1,
        1,
        1,
        0,
        OK,
        OK,
        1,
        LEDGER_E_INCOMPLETE,
        ADMITTED(0),
        LEDGER_E_INCOMPLETE,
        REDO(0),
        70,
        LEDGER_RETRY,
        LEDGER_E_DUPLICATE,
        LEDGER_E_DUPLICATE,
        2,
        1,
        OK,
        2,
    };

    CHECK(false, ops, answers);
}

static void test_redo_passes(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        PUSH(0, 0, 2, 0),
        PUSH(0, 0, 3, 0),
        POST(0, 0),
        POST(0, 0),
        SUM(0, 0, 70),
        SUM(0, 0, 71),
        ATTACH(0, 200),
        GET_PARAM(0, 0, ENTRY_PUSHED),
        BEGIN(0, 0, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 1, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 2, 0),
        FIND_SUM(0, 0, 1),
        PUSH_FULL(0, 200, 0, 0, 0, 3, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 4, 0),
        GET_PARAM(0, 0, ENTRY_PUSHED),
        POST(0, 0),
        SUM(0, 0, 72),
        FIND_SUM(0, 0, 2),
    };
    static const int64_t answers[] = {
        1,  OK,      ADMITTED(0), ADMITTED(1), ADMITTED(2), OK,          OK, OK, OK, 1,  2,
        OK, REDO(0), REDO(1),     71,          ADMITTED(2), ADMITTED(3), 4,  OK, OK, 72,
    };

    CHECK(true, ops, answers);
}

/*
 * After two deaths in one micro-batch, all posted pushes must be pushed again, also those that the first successor
 * redid.
 */
static void test_second_successor(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        POST(0, 0),
        ATTACH(0, 200),
        ATTACH(0, 300),
        BEGIN(0, 0, 0),
        PUSH_FULL(0, 300, 0, 0, 0, 1, 0),
        PUSH_FULL(0, 300, 0, 0, 0, 2, 1),
        POST(0, 1),
        PUSH_FULL(0, 300, 0, 0, 0, 3, 2),
        ATTACH(0, 400),
        GET_PARAM(0, 0, ENTRY_REDO),
        GET_PARAM(0, 1, ENTRY_REDO),
        GET_PARAM(0, 2, ENTRY_PUSHED),
        GET(0, N_PUSHED),
        FORGET(0),
        BEGIN(0, 0, 0),
        GET(0, N_PUSHED_OPEN),
        PUSH_FULL(0, 400, 0, 0, 0, 1, 0),
        PUSH_FULL(0, 400, 0, 0, 0, 2, 1),
        PUSH_FULL(0, 400, 0, 0, 0, 3, 2),
        END(0, 0, 0),
    };
    static const int64_t answers[] = {
        1, OK, ADMITTED(0), OK, 1,  1,  OK, REDO(0), ADMITTED(0), OK,          ADMITTED(0), 1,
        1, 1,  0,           2,  OK, OK, 2,  REDO(0), REDO(0),     ADMITTED(0), OK,
    };

    CHECK(false, ops, answers);
}

/* Micro-batches that a rank has ended remain after its death, reduced or not. So does its request for the step. */
static void test_successor_after_end(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        PUSH(0, 0, 2, 1),
        POST(0, 0),
        END(0, 0, 0),
        ATTACH(0, 200),
        NEXT(0),
        GET_PARAM(0, 0, ENTRY_REDO),
        GET_PARAM(0, 1, ENTRY_PUSHED),
        POST(0, 1),
        SUM(0, 1, 71),
        END(0, 0, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 1, 0),
        GET(0, N_PUSHED),
        ASK(0),
        ATTACH(0, 300),
        GET(0, IS_ASKED),
        BEGIN(0, 0, 1),
        FORGET(0),
        GET(0, N_PUSHED),
    };
    static const int64_t answers[] = {
        1,
        OK,
        ADMITTED(0),
        ADMITTED(0),
        OK,
        OK,
        1,
        AT(0, 1),
        0,
        1,
        OK,
        OK,
        LEDGER_RETRY,
        LEDGER_E_AFTER_BOUNDARY,
        2,
        OK,
        1,
        1,
        LEDGER_E_EARLY,
        OK,
        2,
    };

    CHECK(false, ops, answers);
}

/*
 * If a push of the open micro-batch is withdrawn, the parameter still counts as pushed in the step, because an ended
 * micro-batch has it.
 */
static void test_successor_in_second_micro_batch(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),           BEGIN(0, 0, 0),           PUSH(0, 0, 1, 0),      END(0, 0, 0),   BEGIN(0, 0, 1),
        PUSH(0, 1, 2, 0),         PUSH(0, 1, 3, 1),         GET(0, N_PUSHED),      ATTACH(0, 200), GET(0, N_PUSHED),
        GET_PARAM(0, 0, IN_STEP), GET_PARAM(0, 1, IN_STEP), GET(0, N_PUSHED_OPEN), NEXT(0),
    };
    static const int64_t answers[] = {
        1, OK, ADMITTED(0), OK, OK, ADMITTED(0), ADMITTED(0), 2, 1, 1, 1, 0, 0, AT(0, 1),
    };

    CHECK(false, ops, answers);
}

/* If a micro-batch was not ended, its passes must not get into a step. */
static void test_ask_while_something_stands(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100), BEGIN(0, 0, 0), PUSH(0, 0, 1, 0), POST(0, 0), ATTACH(0, 200),
        ABANDON(0),     ASK(0),         BEGIN(0, 0, 0),   ABANDON(0), PUSH_FULL(0, 200, 0, 0, 0, 1, 0),
        ABANDON(0),     ASK(0),         END(0, 0, 0),     ASK(0),
    };
    static const int64_t answers[] = {
        1,
        OK,
        ADMITTED(0),
        OK,
        1,
        OK,
        LEDGER_E_EARLY,
        OK,
        LEDGER_MUST_ABORT,
        REDO(0),
        LEDGER_MUST_ABORT,
        LEDGER_E_EARLY,
        OK,
        OK,
    };

    CHECK(false, ops, answers);
}

static void test_abandon(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),   ABANDON(0),       BEGIN(0, 0, 0),   PUSH(0, 0, 1, 0), END(0, 0, 0),     BEGIN(0, 0, 1),
        PUSH(0, 1, 2, 0), PUSH(0, 1, 3, 1), ABANDON(0),       GET(0, IS_OPEN),  GET(0, N_PUSHED), GET(0, N_PUSHED_OPEN),
        NEXT(0),          ABANDON(0),       PUSH(0, 1, 3, 1), PUSH(0, 1, 4, 1), BEGIN(0, 0, 1),   PUSH(0, 1, 3, 1),
        PUSH(0, 1, 4, 1), POST(0, 1),       ABANDON(0),       GET(0, IS_OPEN),  GET(0, N_PUSHED), PUSH(0, 1, 5, 1),
    };
    static const int64_t answers[] = {
        1,
        OK,
        OK,
        ADMITTED(0),
        OK,
        OK,
        ADMITTED(0),
        ADMITTED(0),
        OK,
        0,
        1,
        0,
        AT(0, 1),
        OK,
        LEDGER_RETRY,
        LEDGER_E_EARLY,
        OK,
        LEDGER_RETRY,
        ADMITTED(0),
        OK,
        LEDGER_MUST_ABORT,
        1,
        2,
        LEDGER_E_DUPLICATE,
    };

    CHECK(false, ops, answers);
}

/* One posted pass of any parameter prevents abandoning, and so does a pass that must be redone. */
static void test_last_param(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        PUSH(0, 0, 2, 2),
        POST(0, 2),
        ABANDON(0),
        ATTACH(0, 200),
        BEGIN(0, 0, 0),
        PUSH_FULL(0, 200, 0, 0, 0, 1, 0),
        END(0, 0, 0),
        GET(0, N_PUSHED_OPEN),
        PUSH_FULL(0, 200, 0, 0, 0, 2, 2),
        END(0, 0, 0),
        FORGET(0),
        GET(0, N_PUSHED_OPEN),
        GET(0, N_PUSHED),
        BEGIN(0, 0, 1),
        PUSH_FULL(0, 200, 0, 0, 1, 3, 2),
        ABANDON(0),
        GET(0, N_PUSHED_OPEN),
        BEGIN(0, 0, 1),
        PUSH_FULL(0, 200, 0, 0, 1, 4, 2),
        ABORT,
        GET(0, N_PUSHED_OPEN),
    };
    static const int64_t answers[] = {
        1,  OK, ADMITTED(0), ADMITTED(0), OK, LEDGER_MUST_ABORT, 1,  OK, ADMITTED(0), LEDGER_E_INCOMPLETE, 2,  REDO(0),
        OK, OK, 0,           2,           OK, ADMITTED(0),       OK, 0,  OK,          ADMITTED(0),         OK, 0,
    };

    CHECK(false, ops, answers);
}

/* The sums of later passes are freed with their entry, by any event that clears the entry. */
static void test_sums_are_forgotten(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),    BEGIN(0, 0, 0), PUSH(0, 0, 1, 0),  PUSH(0, 0, 2, 0),  POST(0, 0),
        POST(0, 0),        SUM(0, 0, 70),  SUM(0, 0, 71),     END(0, 0, 0),      FORGET(0),
        FIND_SUM(0, 0, 1), BEGIN(0, 0, 1), PUSH(0, 1, 3, 0),  PUSH(0, 1, 4, 0),  POST(0, 0),
        POST(0, 0),        SUM(0, 0, 72),  FIND_SUM(0, 0, 0), FIND_SUM(0, 0, 1), SUM(0, 0, 73),
        FIND_SUM(0, 0, 1), ABORT,          FIND_SUM(0, 0, 0), FIND_SUM(0, 0, 1),
    };
    static const int64_t answers[] = {
        1,           OK,          ADMITTED(0), ADMITTED(1), OK, OK, OK,   OK, OK, OK, NONE, OK,
        ADMITTED(0), ADMITTED(1), OK,          OK,          OK, 72, NONE, OK, 73, OK, NONE, NONE,
    };

    CHECK(true, ops, answers);
}

/* Pushes that were ended but not forgotten do not belong to the open micro-batch, so it can be abandoned. */
static void test_abandon_after_end(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        POST(0, 0),
        END(0, 0, 0),
        ABANDON(0),
        GET_PARAM(0, 0, ENTRY_POSTED),
        BEGIN(0, 0, 1),
        ABANDON(0),
        GET(0, N_PUSHED),
        BEGIN(0, 0, 1),
    };
    static const int64_t answers[] = {1, OK, ADMITTED(0), OK, OK, OK, 1, OK, OK, 1, OK};

    CHECK(false, ops, answers);
}

static void test_abort(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        ATTACH(1, 101),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        POST(0, 0),
        SUM(0, 0, 70),
        END(0, 0, 0),
        ASK(0),
        BEGIN(1, 0, 0),
        PUSH(1, 0, 1, 0),
        POST(1, 0),
        ATTACH(1, 201),
        ABORT,
        GET(0, IS_ASKED),
        GET(0, LAST_ENDED),
        GET(0, N_ENDED),
        GET(0, N_PUSHED),
        GET_PARAM(0, 0, IN_STEP),
        NEXT(0),
        GET_PARAM(1, 0, ENTRY_REDO),
        GET(1, N_PUSHED),
        FIND_SUM(0, 0, 0),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 2, 0),
        PUSH_FULL(0, 100, 1, 0, 0, 2, 0),
        BEGIN(1, 0, 0),
        PUSH_FULL(1, 201, 1, 0, 0, 1, 0),
        END(0, 0, 0),
        END(1, 0, 0),
    };
    static const int64_t answers[] = {
        1,           1,  OK,          ADMITTED(0), OK, OK, OK,       OK, OK, ADMITTED(0), OK, 1,
        OK,          0,  NONE,        0,           0,  0,  AT(0, 0), 0,  0,  NONE,        OK, LEDGER_DROPPED,
        ADMITTED(0), OK, ADMITTED(0), OK,          OK,
    };

    CHECK(false, ops, answers);
}

/* An abort returns to the last commit, not to the first step. */
static void test_abort_after_commit(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        BEGIN(0, 0, 0),
        END(0, 0, 0),
        ASK(0),
        COMMIT,
        GET(0, LAST_ENDED),
        GET(0, IS_ASKED),
        GET(0, N_ENDED),
        BEGIN(0, 1, 0),
        PUSH_FULL(0, 100, 0, 1, 0, 1, 0),
        END(0, 1, 0),
        GET(0, LAST_ENDED),
        BEGIN(0, 1, 1),
        ABORT,
        GET(0, LAST_ENDED),
        GET(0, IS_OPEN),
        NEXT(0),
        BEGIN(0, 0, 0),
        END(0, 0, 0),
        BEGIN(0, 1, 0),
        ABORT,
        BEGIN(0, 1, 0),
        PUSH_FULL(0, 100, 1, 1, 0, 2, 0),
        PUSH_FULL(0, 100, 2, 1, 0, 2, 0),
    };
    static const int64_t answers[] = {
        1,
        OK,
        OK,
        OK,
        OK,
        AT(0, 0),
        0,
        0,
        OK,
        ADMITTED(0),
        OK,
        AT(1, 0),
        OK,
        OK,
        AT(0, 0),
        0,
        AT(1, 0),
        LEDGER_E_AFTER_BOUNDARY,
        LEDGER_RETRY,
        OK,
        OK,
        OK,
        LEDGER_DROPPED,
        ADMITTED(0),
    };

    CHECK(false, ops, answers);
}

static void test_commit(void **state)
{
    static const struct op ops[] = {
        ATTACH(0, 100),
        ATTACH(1, 101),
        BEGIN(0, 0, 0),
        PUSH(0, 0, 1, 0),
        POST(0, 0),
        END(0, 0, 0),
        ASK(0),
        ASK(1),
        COMMIT,
        GET(0, IS_ASKED),
        GET(1, IS_ASKED),
        GET(0, N_PUSHED),
        GET(0, N_PUSHED_OPEN),
        GET_PARAM(0, 0, IN_STEP),
        GET(1, LAST_ENDED),
        NEXT(0),
        NEXT(1),
        PUSH_FULL(0, 100, 0, 0, 0, 2, 1),
        BEGIN(0, 1, 0),
        PUSH_FULL(0, 100, 0, 1, 0, 2, 0),
        GET(0, N_PUSHED),
    };
    static const int64_t answers[] = {
        1,  1,           OK, ADMITTED(0), OK, OK,   OK,       OK,       OK,
        0,  0,           0,  0,           0,  NONE, AT(1, 0), AT(1, 0), LEDGER_E_AFTER_BOUNDARY,
        OK, ADMITTED(0), 1,
    };

    CHECK(false, ops, answers);
}

/* A push's record is kept with pass 0. Later passes, refusals and redone pushes do not change it. */
static void test_record(void **state)
{
    static const uint8_t trainable[1] = {1};
    struct push_record record = {
        .incarnation = 7,
        .sequence = 1,
        .task = 29,
        .time_ns = 5,
        .ordinal = 1,
        .depth = 1,
        .segment = 3,
        .call = 2,
        .site = 4,
        .flags = PUSH_NESTED,
    };
    struct push_record first = record;
    struct ledger ledger;
    uint16_t pass;

    assert_int_equal(ledger_init(&ledger, (struct ledger_ranks){.end = 1, .n = 1}, 1, trainable, true), 0);
    ledger_attach(&ledger, 0, 7);
    assert_int_equal(ledger_begin(&ledger, 0, 0, 0), LEDGER_ADMITTED);
    assert_int_equal(ledger_push(&ledger, 0, &record, &pass), LEDGER_ADMITTED);
    record.sequence = 2;
    record.task = 56;
    assert_int_equal(ledger_push(&ledger, 0, &record, &pass), LEDGER_ADMITTED);
    ledger_post(&ledger, 0, 0);
    ledger_attach(&ledger, 0, 8);
    assert_int_equal(ledger_begin(&ledger, 0, 0, 0), LEDGER_ADMITTED);
    record.incarnation = 8;
    assert_int_equal(ledger_push(&ledger, 0, &record, &pass), LEDGER_REDO);
    assert_memory_equal(&ledger_entry(&ledger, 0, 0)->first, &first, sizeof(first));
    ledger_deinit(&ledger);
}

/*
 * A rank inherits the pushes that earlier incarnations ended or that are posted. None of them is inherited in the next
 * step.
 */
static void test_inherited(void **state)
{
    static const uint8_t trainable[1] = {1};
    struct push_record record = {.incarnation = 8, .sequence = 1, .micro_batch = 1};
    struct ledger ledger;
    uint16_t pass;

    (void)state;
    assert_int_equal(ledger_init(&ledger, (struct ledger_ranks){.end = 1, .n = 1}, 1, trainable, true), 0);
    ledger_attach(&ledger, 0, 7);
    assert_int_equal(ledger_begin(&ledger, 0, 0, 0), LEDGER_ADMITTED);
    assert_int_equal(ledger_end(&ledger, 0, 0, 0), LEDGER_ADMITTED);
    ledger_attach(&ledger, 0, 7);
    assert_false(ledger_inherits(&ledger, 0));
    ledger_attach(&ledger, 0, 8);
    assert_true(ledger_inherits(&ledger, 0));
    assert_int_equal(ledger_begin(&ledger, 0, 0, 1), LEDGER_ADMITTED);
    assert_int_equal(ledger_push(&ledger, 0, &record, &pass), LEDGER_ADMITTED);
    ledger_post(&ledger, 0, 0);
    assert_int_equal(ledger.ranks[0].n_inherited, 1);
    ledger_abort(&ledger);
    assert_false(ledger_inherits(&ledger, 0));

    record = (struct push_record){.incarnation = 8, .sequence = 2, .attempt = 1};
    assert_int_equal(ledger_begin(&ledger, 0, 0, 0), LEDGER_ADMITTED);
    assert_int_equal(ledger_push(&ledger, 0, &record, &pass), LEDGER_ADMITTED);
    ledger_post(&ledger, 0, 0);
    assert_false(ledger_inherits(&ledger, 0));
    ledger_attach(&ledger, 0, 9);
    assert_true(ledger_inherits(&ledger, 0)); /* the posted push is inherited */
    ledger_abort(&ledger);
    ledger_deinit(&ledger);
}

/* A parameter can have as many passes as their type can count, each with a sum, and no more. */
static void test_most_passes(void **state)
{
    static const uint8_t trainable[1] = {1};
    struct push_record record = {.incarnation = 7};
    struct ledger ledger;
    uint64_t sum;
    uint16_t pass;

    assert_int_equal(ledger_init(&ledger, (struct ledger_ranks){.end = 1, .n = 1}, 1, trainable, true), 0);
    ledger_attach(&ledger, 0, 7);
    assert_int_equal(ledger_begin(&ledger, 0, 0, 0), LEDGER_ADMITTED);
    for (uint32_t k = 0; k < UINT16_MAX; k++) {
        record.sequence++;
        assert_int_equal(ledger_push(&ledger, 0, &record, &pass), LEDGER_ADMITTED);
        assert_int_equal(pass, k);
        ledger_post(&ledger, 0, 0);
        assert_int_equal(ledger_sum(&ledger, 0, 0, 3 * k + 1), 0);
    }
    record.sequence++;
    assert_int_equal(ledger_push(&ledger, 0, &record, &pass), LEDGER_E_DUPLICATE);
    for (uint32_t k = 0; k < UINT16_MAX; k++) {
        assert_true(ledger_find_sum(&ledger, 0, 0, (uint16_t)k, &sum));
        assert_int_equal(sum, 3 * k + 1);
    }
    assert_false(ledger_find_sum(&ledger, 0, 0, UINT16_MAX, &sum));
    ledger_deinit(&ledger);
}

/* The policy belongs to the rank. It stays for its next incarnation and the next step. */
static void test_policy_of_one_rank(void **state)
{
    static const uint8_t trainable[1] = {1};
    struct ledger ledger;
    uint16_t pass;

    assert_int_equal(ledger_init(&ledger, (struct ledger_ranks){.end = 2, .n = 2}, 1, trainable, false), 0);
    ledger.ranks[1].accumulate = true;
    ledger_attach(&ledger, 0, 7);
    ledger_attach(&ledger, 1, 7);
    ledger_abort(&ledger);
    ledger_commit(&ledger);
    for (unsigned r = 0; r < 2; r++) {
        struct push_record record = {.incarnation = 7, .attempt = 1, .step = 1, .sequence = 1};

        assert_int_equal(ledger_begin(&ledger, r, 1, 0), LEDGER_ADMITTED);
        assert_int_equal(ledger_push(&ledger, r, &record, &pass), LEDGER_ADMITTED);
        record.sequence = 2;
        assert_int_equal(ledger_push(&ledger, r, &record, &pass), r == 1 ? LEDGER_ADMITTED : LEDGER_E_DUPLICATE);
    }
    ledger_deinit(&ledger);
}

static void test_deinit_of_nothing(void **state)
{
    struct ledger ledger = {};

    ledger_deinit(&ledger);
    assert_int_equal(ledger_init(&ledger, (struct ledger_ranks){.end = 3, .n = 3}, 0, NULL, false), 0);
    assert_int_equal(ledger_begin(&ledger, 2, 0, 0), LEDGER_ADMITTED);
    assert_int_equal(ledger_end(&ledger, 2, 0, 0), LEDGER_ADMITTED);
    ledger_deinit(&ledger);
    ledger_deinit(&ledger);
}

TEST_GROUP(ledger)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_begin),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_nothing_open),
        cmocka_unit_test(test_earlier_step),
        cmocka_unit_test(test_ask),
        cmocka_unit_test(test_param),
        cmocka_unit_test(test_order_of_checks),
        cmocka_unit_test(test_retry),
        cmocka_unit_test(test_sequences),
        cmocka_unit_test(test_duplicate),
        cmocka_unit_test(test_accumulate),
        cmocka_unit_test(test_post_and_sum),
        cmocka_unit_test(test_forget),
        cmocka_unit_test(test_attach_same),
        cmocka_unit_test(test_successor_of_unposted),
        cmocka_unit_test(test_redo),
        cmocka_unit_test(test_redo_passes),
        cmocka_unit_test(test_second_successor),
        cmocka_unit_test(test_successor_after_end),
        cmocka_unit_test(test_successor_in_second_micro_batch),
        cmocka_unit_test(test_ask_while_something_stands),
        cmocka_unit_test(test_abandon),
        cmocka_unit_test(test_last_param),
        cmocka_unit_test(test_sums_are_forgotten),
        cmocka_unit_test(test_abandon_after_end),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_abort_after_commit),
        cmocka_unit_test(test_commit),
        cmocka_unit_test(test_record),
        cmocka_unit_test(test_inherited),
        cmocka_unit_test(test_most_passes),
        cmocka_unit_test(test_policy_of_one_rank),
        cmocka_unit_test(test_deinit_of_nothing),
    };

    return cmocka_run_group_tests_name("ledger", tests, NULL, NULL);
}

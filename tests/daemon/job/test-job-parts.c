/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A gradient that is larger than a bucket is pushed in parts. Each part is reduced when all ranks have pushed it. In
 * counts and answers the parts are one gradient: it counts as pushed with its last part, and is refused with its first.
 */

#include <string.h>

#include "core/base/base.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/client-report.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/ring.h"
#include "kernels/kernels.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/group.h"

static const char quiet[] = FIXTURE_QUIET;

enum { LARGE = 7 }; /* the parameter that is larger than a bucket */

static const struct layout_param *large(const struct fixture *f)
{
    return &f->job->layout->params[LARGE];
}

static uint32_t part(const struct fixture *f, uint32_t i)
{
    return large(f)->first_part + i;
}

static const struct parcel_position *position(const struct fixture *f, uint32_t i)
{
    return &f->job->work.parcels[f->job->layout->parts[part(f, i)].parcel].at;
}

static void begin_both(struct fixture *f)
{
    for (unsigned i = 0; i < PEERS; i++)
        peer_begin(&f->peers[i]);
}

/* Pushes all parameters except the large one. */
static void push_others(struct peer *p)
{
    for (uint32_t i = PUPPET_PARAMS; i-- > 0;)
        if (i != LARGE && !puppet_model[i].frozen)
            peer_push(p, i);
}

static void end_both(struct fixture *f)
{
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_end(&f->peers[i]);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
}

/* A rank that pushed some parts has not pushed the gradient. A part that both ranks pushed is reduced. */
static void test_parts(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint64_t n_admitted = f->job->kept.n_admitted;

    (void)userdata;
    assert_int_equal(large(f)->n_parts, 2);
    begin_both(f);
    peer_push_part(a, part(f, 0), false);
    assert_int_equal(f->job->kept.n_admitted, n_admitted);
    assert_false(job_has_pushed(f->job, 0, LARGE));
    assert_int_equal(job_n_pushed_open(f->job, a->rank), 0);
    peer_push_part(a, part(f, 1), false);
    assert_int_equal(f->job->kept.n_admitted, n_admitted + 1);
    assert_true(job_has_pushed(f->job, 0, LARGE));
    assert_int_equal(job_n_pushed_open(f->job, a->rank), 1);
    peer_push_part(b, part(f, 0), false);
    fixture_drain(f);
    assert_int_equal(position(f, 0)->pass, 1);
    assert_int_equal(position(f, 1)->pass, 0);
    peer_push_part(b, part(f, 1), false);
    fixture_drain(f);
    assert_int_equal(position(f, 1)->pass, 1);
    push_others(a);
    push_others(b);
    end_both(f);
    fixture_finish(f);
}

/* Parts must be pushed in order, without another push in between, and with valid numbers. */
static void test_order(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    struct request_push push = {.param = LARGE, .part = 2, .step = 1};

    (void)userdata;
    begin_both(f);
    peer_push_part(a, part(f, 1), false);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    peer_push_part(a, part(f, 0), false);
    peer_push(a, 0);
    peer_push_part(a, part(f, 1), false);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    push.sequence = ++a->sequence;
    job_push(f->job, a->rank, &push);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    push.param = 0;
    push.part = 1;
    job_push(f->job, a->rank, &push);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    fixture_free(f);
}

/* With only some parts pushed, a micro-batch cannot be ended, because they may be in the sums. It can be abandoned. */
static void test_torn(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    begin_both(f);
    peer_push_all(b);
    peer_push_part(a, part(f, 0), false);
    peer_ask_end(a);
    peer_expect_abort(a, "the rest of a large gradient was not pushed");
    peer_ask_end(b);
    peer_expect_abort(b, "the rest of a large gradient was not pushed");

    begin_both(f);
    peer_push_part(a, part(f, 0), false);
    push_others(a); /* other pushes do not help */
    peer_push_all(b);
    peer_ask_end(a);
    peer_expect_abort(a, "the rest of a large gradient was not pushed");
    peer_ask_end(b);
    peer_expect_abort(b, "the rest of a large gradient was not pushed");

    begin_both(f);
    peer_push_part(a, part(f, 0), false); /* not in the sums, because the other rank has not pushed this part */
    job_abandon_backward(f->job, a->rank,
                         &(struct request_abandon_backward){.step = 1, .attempt = 2, .why = "bad batch"});
    peer_expect(a, REPLY_DONE);
    peer_begin(a);
    peer_push_all(a);
    peer_push_all(b);
    end_both(f);
    fixture_finish(f);
}

/* A successor's part is skipped where the predecessor's part was reduced. Its other parts are reduced. */
static void test_successor(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    begin_both(f);
    peer_push_part(b, part(f, 0), false);
    peer_push_all(a);
    fixture_drain(f);
    assert_int_equal(position(f, 0)->pass, 1);
    peer_die(b);
    peer_ask_end(a);
    peer_expect_silence(a);
    peer_return(b, "run");
    peer_begin(b);
    peer_push_all(b);
    peer_ask_end(b);
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
    assert_int_equal(f->job->kept.n_aborts, 0);
    fixture_finish(f);
}

/* Only the first part was reduced, so only this one is compared. It differs. */
static void test_successor_differs(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    begin_both(f);
    peer_push_part(b, part(f, 0), false);
    peer_push_all(a);
    fixture_drain(f);
    peer_die(b);
    peer_return(b, "run");
    peer_begin(b);
    peer_push_other(b, LARGE);
    peer_ask_end(b);
    peer_expect_abort(b, "successor's gradient differs");
    peer_ask_end(a);
    peer_expect_abort(a, "successor's gradient differs");
    fixture_finish(f);
}

/* Return: the sum that libzerod sends with a duplicate. */
static uint64_t sum_of(const struct peer *p)
{
    const struct layout *layout = p->fixture->job->layout;
    uint64_t sum = 0;

    for (uint32_t i = 0; i < layout->params[LARGE].n_parts; i++) {
        const struct layout_part *part = &layout->parts[layout->params[LARGE].first_part + i];
        struct position_sum one = {0};

        position_sum_update(&one, layout->params[LARGE].grad_dtype, p->ring + p->slots[part->parcel].offset_bytes,
                            part->n_elems, part->start_elem);
        sum += position_sum_finish(&one, layout_part_bytes(layout, layout->params[LARGE].first_part + i));
    }
    return sum;
}

/* A duplicate of all parts is refused once. The text says whether all its bits are those of the first push. */
static void test_duplicate(void **userdata)
{
    static const char *const said[] = {"holds other bytes than", "holds the same bytes as"};

    (void)userdata;
    for (unsigned equal = 0; equal < 2; equal++) {
        struct fixture *f = fixture_start(quiet);
        struct peer *a = &f->peers[0];
        struct request_push push = {.param = LARGE, .step = 1, .record_only = true};

        begin_both(f);
        for (unsigned i = 0; i < PEERS; i++)
            peer_push(&f->peers[i], LARGE);
        fixture_drain(f);
        push.sequence = ++a->sequence;
        push.sum = sum_of(a) + !equal;
        job_push(f->job, a->rank, &push);
        peer_ask_end(a);
        peer_expect_refused(a, E_DUPLICATE, false);
        assert_non_null(strstr(a->text, "big.weight"));
        if (!strstr(a->text, said[equal]))
            fail_msg("\"%s\" is not in:\n%s", said[equal], a->text);
        fixture_free(f);
    }
}

/*
 * A client that does not recognise the duplicate pushes all its parts. It is refused once, and its slots are returned.
 */
static void test_duplicate_in_parts(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    begin_both(f);
    peer_push_all(a);
    peer_push_all(b);
    peer_push_again(a, LARGE);
    peer_ask_end(a);
    peer_expect_refused(a, E_DUPLICATE, false);
    assert_int_equal(fixture_n_kept(f, E_DUPLICATE), 1);
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    end_both(f);
    assert_int_equal(a->rank->rings[0]->n_held, 0);
    fixture_finish(f);
}

/* With on_duplicate: accumulate, each part has a second pass. */
static void test_passes(void **userdata)
{
    struct fixture *f = fixture_new("diagnostics: {on_duplicate: accumulate}\n");
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    fixture_form(f, "run");
    begin_both(f);
    peer_push_all(a);
    peer_push_again(a, LARGE);
    peer_push_all(b);
    fixture_drain(f);
    for (uint32_t i = 0; i < large(f)->n_parts; i++)
        assert_int_equal(position(f, i)->pass, 1); /* not done, because the other rank may push again */
    end_both(f);
    for (uint32_t i = 0; i < large(f)->n_parts; i++)
        assert_int_equal(position(f, i)->micro_batch, 1);
    assert_int_equal(f->job->stats.counters.accumulated, 1);
    fixture_free(f);
}

TEST_GROUP(job_parts)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_torn),
        cmocka_unit_test(test_successor),
        cmocka_unit_test(test_successor_differs),
        cmocka_unit_test(test_duplicate),
        cmocka_unit_test(test_duplicate_in_parts),
        cmocka_unit_test(test_passes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The step, when ranks abort it, die and are replaced, or leave and come back. Most tests compare one number:
 * afterwards, weights and optimizer state must have the bits of an undisturbed run.
 */

#include <string.h>

#include "core/base/base.h"
#include "daemon/job/job.h"
#include "daemon/job/model/model.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/collect.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/group.h"

static const char quiet[] = FIXTURE_QUIET;
static const char on_leave_continue[] = "diagnostics: {on_leave: continue}\n";

/* ---- abort --------------------------------------------------------------------------------------------- */

static void test_abort(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint64_t n_dropped = f->job->stats.counters.dropped;

    (void)userdata;
    fixture_micro_batch(f);
    peer_begin(a);
    peer_begin(b);
    peer_push_all(b);
    peer_push_bucket(a, 0);
    peer_ask_end(a);
    job_abort_step(f->job, b->rank, "the loss is not a number");
    peer_expect(b, REPLY_DONE); /* the answer to its own request */
    peer_see_abort(b);
    peer_expect_refused(a, E_RANK_LOST, true);
    assert_non_null(strstr(a->text, "the loss is not a number"));
    for (unsigned i = 0; i < PEERS; i++) {
        assert_int_equal(f->peers[i].at.step, 1);
        assert_int_equal(f->peers[i].at.micro_batch, 0);
        assert_int_equal(f->peers[i].at.attempt, 1);
        assert_int_equal(atomic_load(&f->peers[i].credit->attempt), 1);
    }
    a->at.attempt = 0;
    peer_push_bucket(a, 1); /* a push of the aborted attempt: its rank has not seen the abort */
    a->at.attempt = 1;
    assert_true(f->job->stats.counters.dropped > n_dropped);
    peer_see_abort(a);
    peer_expect_silence(a);
    fixture_finish(f);
}

/* A rank that waits for no answer gets the abort as the answer to its next request. */
static void test_abort_is_told_later(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    peer_begin(b);
    peer_push_all(b);
    job_abort_step(f->job, a->rank, "why not");
    peer_expect(a, REPLY_DONE);
    peer_see_abort(a);
    peer_expect_silence(b);
    peer_ask_end(b);
    peer_expect_abort(b, "why not");
    fixture_finish(f);
}

/* ---- ranks that die ------------------------------------------------------------------------------------ */

/* Rank 1 dies in micro-batch 0 of step 1. Some of its pushes are in the sums. */
static void lose_rank_1(struct fixture *f)
{
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t bucket = fixture_bucket(f, true);

    peer_begin(a);
    peer_begin(b);
    peer_push_bucket(b, bucket);
    peer_push_all(a);
    fixture_drain(f);
    assert_int_equal(f->job->work.parcels[f->job->layout->buckets[bucket].first_parcel].at.pass, 1);
    peer_push(b, fixture_first_param(f, fixture_bucket(f, false))); /* not in the sums */
    peer_die(b);
    assert_int_equal(fixture_n_kept(f, E_RANK_LOST), 1);
    peer_ask_end(a);
    peer_expect_silence(a);
}

static void test_successor(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t bucket = fixture_bucket(f, true);

    (void)userdata;
    lose_rank_1(f);
    assert_int_equal(peer_attach(b, "another run"), E_OTHER_RUN);
    peer_return(b, "run");
    assert_int_equal(f->job->kept.n_reattaches, 1);
    assert_int_equal(b->at.step, 1);
    assert_int_equal(b->at.micro_batch, 0);
    peer_begin(b);
    peer_push_all(b);
    peer_ask_end(b);
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
    assert_true(f->job->stats.counters.redone >= f->job->layout->buckets[bucket].n_params);
    assert_int_equal(f->job->kept.n_aborts, 0);
    fixture_finish(f);
}

/*
 * The successor's gradient differs. The predecessor's cannot be removed from the sums, so the step begins again for all
 * ranks.
 */
static void test_successor_differs(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *b = &f->peers[1];

    (void)userdata;
    lose_rank_1(f);
    peer_return(b, "run");
    peer_begin(b);
    peer_push_other(b, fixture_first_param(f, fixture_bucket(f, true)));
    fixture_drain(f);
    assert_int_equal(f->job->ledger.attempt, 1); /* found at once, when it was compared */
    peer_ask_end(b);
    for (unsigned i = 0; i < PEERS; i++) {
        peer_expect_abort(&f->peers[i], "successor's gradient differs");
        assert_int_equal(f->peers[i].at.attempt, 1);
    }
    fixture_finish(f);
}

/* The successor does not push all that its predecessor did, so its micro-batch is a different one. */
static void test_successor_pushes_less(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *b = &f->peers[1];

    (void)userdata;
    lose_rank_1(f);
    peer_return(b, "run");
    peer_begin(b);
    peer_push(b, fixture_first_param(f, fixture_bucket(f, true)));
    peer_ask_end(b);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect_abort(&f->peers[i], "successor's gradient differs");
    fixture_finish(f);
}

/*
 * A rank asks for the step and dies. Its request still counts, so the step is done without it, and its successor begins
 * with the next one.
 */
static void test_dead_rank_has_asked(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    fixture_micro_batch(f);
    fixture_micro_batch(f);
    peer_ask_step(b);
    peer_die(b);
    assert_int_equal(peer_attach(b, "run"), 0);
    peer_declare(b);
    peer_ask_form(b);
    peer_expect_silence(b); /* until the step that its predecessor asked for is done */
    peer_ask_step(a);
    peer_expect(a, REPLY_STEP_DONE);
    peer_take_formed(b);
    assert_int_equal(b->at.step, 2);
    peer_ready(b);
    peer_expect(b, REPLY_DONE);
    fixture_steps(f, FIXTURE_STEPS - 2, FIXTURE_MICRO);
    assert_int_equal(fixture_bits(f), fixture_undisturbed());
    fixture_free(f);
}

static void test_nobody_comes(void **userdata)
{
    struct fixture *f = fixture_start("limits: {reattach_timeout: 2s}\n"
                                      "diagnostics: {stall_warning: 0, stall_timeout: 0}\n");
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    lose_rank_1(f);
    fixture_tick(f, 1999);
    peer_expect_silence(a);
    fixture_tick(f, 1);
    peer_expect_abort(&f->peers[0], "no successor attached within 2.0 s");
    assert_int_equal(a->at.attempt, 1);
    fixture_tick(f, 5000); /* no rank waits, so no step is aborted */
    assert_int_equal(f->job->ledger.attempt, 1);
    peer_return(b, "run");
    fixture_finish(f);
}

/* ---- ranks that leave ---------------------------------------------------------------------------------- */

static void all_leave_and_return(struct fixture *f)
{
    uint64_t step = f->peers[0].at.step;

    for (unsigned i = 0; i < PEERS; i++)
        peer_leave(&f->peers[i]);
    assert_true(job_is_idle(f->job));
    for (unsigned i = 0; i < PEERS; i++) {
        peer_return(&f->peers[i], "run");
        assert_int_equal(f->peers[i].at.step, step);
    }
}

/* All ranks leave and return between two steps. */
static void test_leave_between_steps(void **userdata)
{
    struct fixture *f = fixture_start(quiet);

    (void)userdata;
    all_leave_and_return(f);
    fixture_finish(f);
}

/*
 * All ranks leave before any has ended the first micro-batch, so nothing of the step is left. In an earlier version,
 * positions moved to micro-batch 1, because ranks that have left end none. Ranks that came back then waited forever at
 * the end of micro-batch 0.
 */
static void test_leave_before_first_end(void **userdata)
{
    struct fixture *f = fixture_start(quiet);

    (void)userdata;
    for (unsigned i = 0; i < PEERS; i++)
        peer_begin(&f->peers[i]);
    peer_push(&f->peers[0], fixture_first_param(f, fixture_bucket(f, true)));
    all_leave_and_return(f);
    for (uint32_t b = 0; b < f->job->layout->n_buckets; b++)
        assert_int_equal(f->job->work.parcels[b].at.micro_batch, 0);
    assert_int_equal(f->peers[0].at.micro_batch, 0);
    assert_int_equal(f->job->kept.n_aborts, 0);
    fixture_finish(f);
}

/* Ended micro-batches are kept. A rank that comes back continues after them. */
static void test_leave_after_first_end(void **userdata)
{
    struct fixture *f = fixture_start(quiet);

    (void)userdata;
    fixture_micro_batch(f);
    all_leave_and_return(f);
    for (unsigned i = 0; i < PEERS; i++)
        assert_int_equal(f->peers[i].at.micro_batch, 1);
    fixture_finish(f);
}

/* All ranks leave inside the second micro-batch, part of which is in the sums. The step begins again. */
static void test_leave_inside(void **userdata)
{
    struct fixture *f = fixture_start(quiet);

    (void)userdata;
    fixture_micro_batch(f);
    for (unsigned i = 0; i < PEERS; i++) {
        peer_begin(&f->peers[i]);
        peer_push_bucket(&f->peers[i], 0);
    }
    fixture_drain(f);
    all_leave_and_return(f);
    for (unsigned i = 0; i < PEERS; i++) {
        assert_int_equal(f->peers[i].at.micro_batch, 0);
        assert_int_equal(f->peers[i].at.attempt, 1);
    }
    fixture_finish(f);
}

/* All ranks leave several times, at different places. */
static void test_leave_often(void **userdata)
{
    struct fixture *f = fixture_start(quiet);

    (void)userdata;
    for (unsigned i = 0; i < 3; i++) {
        all_leave_and_return(f);
        peer_begin(&f->peers[i % PEERS]);
        peer_push(&f->peers[i % PEERS], 0);
        all_leave_and_return(f);
    }
    fixture_micro_batch(f);
    all_leave_and_return(f);
    all_leave_and_return(f);
    fixture_finish(f);
}

static void test_one_leaves_others_stop(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    peer_begin(a);
    peer_push_all(a);
    peer_ask_end(a);
    peer_leave(b);
    peer_expect_refused(a, E_RANK_LOST, false);
    assert_non_null(strstr(a->text, "on_leave"));
    peer_ask_step(a);
    peer_expect_refused(a, E_RANK_LOST, false); /* refused again */
    fixture_free(f);
}

static void test_one_leaves_others_go_on(void **userdata)
{
    struct fixture *f = fixture_start(on_leave_continue);
    struct peer *a = &f->peers[0];

    (void)userdata;
    peer_begin(a);
    peer_push_all(a);
    peer_ask_end(a);
    peer_expect_silence(a);
    peer_leave(&f->peers[1]);
    peer_expect(a, REPLY_DONE);
    peer_ask_step(a);
    peer_expect(a, REPLY_STEP_DONE);
    assert_true(a->reply.step_done.applied);
    assert_int_equal(a->at.step, 2);
    fixture_free(f);
}

/*
 * Rank 1 leaves, rank 0 ends a micro-batch, and rank 1 comes back. The sums are complete without rank 1, and the order
 * of a sum cannot change, so the step begins again for all ranks.
 */
static void test_one_leaves_and_returns(void **userdata)
{
    struct fixture *f = fixture_start(on_leave_continue);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    peer_leave(b);
    peer_begin(a);
    peer_push_all(a);
    peer_ask_end(a);
    peer_expect(a, REPLY_DONE);
    peer_return(b, "run");
    assert_int_equal(b->at.step, 1);
    assert_int_equal(b->at.micro_batch, 0);
    peer_begin(a);
    peer_push_all(a);
    peer_ask_end(a);
    peer_expect_abort(&f->peers[0], "rank 1");
    fixture_finish(f);
}

/* Like test_one_leaves_and_returns(), but rank 0 pushes nothing. Its micro-batch 0 was complete when it ended. */
static void test_one_leaves_and_returns_to_nothing(void **userdata)
{
    struct fixture *f = fixture_start(on_leave_continue);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    peer_leave(b);
    peer_begin(a);
    peer_ask_end(a);
    peer_expect(a, REPLY_DONE);
    peer_return(b, "run");
    peer_ask_end(a);
    peer_expect_abort(&f->peers[0], "rank 1");
    fixture_finish(f);
}

/* Rank 1 leaves, and rank 0 stops with a micro-batch that only rank 0 ended. Then both come back. */
static void test_one_stops_and_all_return(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];

    (void)userdata;
    peer_begin(a);
    peer_push_all(a);
    peer_ask_end(a);
    peer_leave(&f->peers[1]);
    peer_expect_refused(a, E_RANK_LOST, false);
    peer_leave(a);
    for (unsigned i = 0; i < PEERS; i++) {
        peer_return(&f->peers[i], "run");
        assert_int_equal(f->peers[i].at.step, 1);
        assert_int_equal(f->peers[i].at.micro_batch, 0);
    }
    fixture_finish(f);
}

/* The rank missed nothing while it was gone, so the step continues, and no rank is refused. */
static void test_one_leaves_and_returns_in_time(void **userdata)
{
    struct fixture *f = fixture_start(on_leave_continue);

    (void)userdata;
    fixture_micro_batch(f);
    peer_leave(&f->peers[1]);
    peer_return(&f->peers[1], "run");
    assert_int_equal(f->peers[1].at.micro_batch, 1);
    assert_int_equal(f->job->kept.n_aborts, 0);
    fixture_finish(f);
}

TEST_GROUP(job_ranks)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_abort_is_told_later),
        cmocka_unit_test(test_successor),
        cmocka_unit_test(test_successor_differs),
        cmocka_unit_test(test_successor_pushes_less),
        cmocka_unit_test(test_dead_rank_has_asked),
        cmocka_unit_test(test_nobody_comes),
        cmocka_unit_test(test_leave_between_steps),
        cmocka_unit_test(test_leave_before_first_end),
        cmocka_unit_test(test_leave_after_first_end),
        cmocka_unit_test(test_leave_inside),
        cmocka_unit_test(test_leave_often),
        cmocka_unit_test(test_one_leaves_others_stop),
        cmocka_unit_test(test_one_leaves_others_go_on),
        cmocka_unit_test(test_one_leaves_and_returns),
        cmocka_unit_test(test_one_leaves_and_returns_to_nothing),
        cmocka_unit_test(test_one_stops_and_all_return),
        cmocka_unit_test(test_one_leaves_and_returns_in_time),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

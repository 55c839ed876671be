/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A rank dies in the open step, and its successor inherits its pushes. If the predecessor had ended all micro-batches,
 * a successor that continues at its position asks for the step at once. Whatever the predecessor pushed, the run must
 * continue, and its final bits must be those of a run in which no rank died.
 */

#include <math.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/job/model/model.h"
#include "daemon/job/client-report.h"
#include "daemon/job/transaction/boundary.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/group.h"

static const char quiet[] = FIXTURE_QUIET;

/* What rank 1 pushes in a micro-batch: nothing, one bucket, or all. */
enum part { NOTHING, SOME, ALL };

/* Both ranks do a micro-batch. */
static void micro_batch(struct fixture *f, enum part part)
{
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    peer_begin(a);
    peer_begin(b);
    if (part == ALL)
        peer_push_all(b);
    else if (part == SOME)
        peer_push_bucket(b, 0);
    peer_push_all(a);
    peer_ask_end(b);
    peer_ask_end(a);
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
}

static void others_wait(struct fixture *f)
{
    peer_ask_step(&f->peers[0]);
    peer_expect_silence(&f->peers[0]);
}

/* The successor only asks for the step, as its position says. The step must begin again for all ranks. */
static void expect_healed(struct fixture *f, uint32_t n_ended, const char *reason)
{
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    peer_die(b);
    peer_return(b, "run");
    assert_int_equal(b->at.micro_batch, n_ended);
    peer_ask_step(b);
    peer_expect_abort(a, reason);
    peer_expect_abort(b, reason);
    assert_non_null(strstr(a->text, "dead process"));
    assert_int_equal(f->job->kept.n_aborts, 1);
    assert_int_equal(b->at.micro_batch, 0);
}

static void test_nothing_was_pushed(void **userdata)
{
    static const char *const more[] = {FIXTURE_QUIET,
                                       "diagnostics: {on_missing: zero, stall_warning: 0, stall_timeout: 0}\n",
                                       "diagnostics: {on_missing: skip, stall_warning: 0, stall_timeout: 0}\n"};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(more); i++) {
        struct fixture *f = fixture_start(more[i]);

        micro_batch(f, NOTHING);
        others_wait(f);
        peer_ask_step(&f->peers[1]);
        peer_expect_refused(&f->peers[1], E_MISSING, false); /* this process did not push, so it may decide */
        expect_healed(f, 1, "E1005");
        fixture_finish(f);
    }
}

static void test_every_stage(void **userdata)
{
    (void)userdata;
    for (unsigned stage = 1; stage <= 3; stage++) {
        struct fixture *f = fixture_new_with(
            &(struct fixture_options){.world = "{size: 2}", .n = PEERS, .stage = stage, .more = quiet});

        fixture_form(f, "run");
        fixture_steps(f, 1, FIXTURE_MICRO);
        micro_batch(f, NOTHING);
        others_wait(f);
        expect_healed(f, 1, "E1005");
        fixture_steps(f, FIXTURE_STEPS - 1, FIXTURE_MICRO);
        assert_int_equal(f->job->state->progress.epoch, FIXTURE_STEPS);
        fixture_free(f);
    }
}

static void test_some_were_not_pushed(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {on_missing: error, stall_warning: 0, stall_timeout: 0}\n");

    (void)userdata;
    micro_batch(f, SOME);
    others_wait(f);
    expect_healed(f, 1, "E1005");
    fixture_finish(f);
}

/* The successor itself must do the missing micro-batch, so its request is refused. */
static void test_too_few_were_ended(void **userdata)
{
    struct fixture *f = fixture_start("gradient_accumulation_steps: 2\n" FIXTURE_QUIET);
    struct peer *b = &f->peers[1];

    (void)userdata;
    fixture_micro_batch(f);
    peer_die(b);
    peer_return(b, "run");
    peer_ask_step(b);
    peer_expect_refused(b, E_MISSING, false);
    job_clear_fault(f->job, b->rank);
    peer_expect(b, REPLY_DONE);
    assert_int_equal(f->job->kept.n_aborts, 0);
    fixture_finish(f);
}

static void test_too_many_were_ended(void **userdata)
{
    struct fixture *f = fixture_start("gradient_accumulation_steps: 2\n" FIXTURE_QUIET);
    struct peer *b = &f->peers[1];

    (void)userdata;
    micro_batch(f, ALL);
    micro_batch(f, ALL);
    others_wait(f);
    peer_begin(b);
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE);
    expect_healed(f, FIXTURE_MICRO + 1, "E1001");
    fixture_finish(f);
}

/* A program that does one micro-batch in each step, whatever its position, adds one to those of its predecessor. */
static void test_another_is_added_each_time(void **userdata)
{
    struct fixture *f = fixture_start("gradient_accumulation_steps: 2\n" FIXTURE_QUIET);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    micro_batch(f, ALL);
    micro_batch(f, ALL);
    others_wait(f);
    peer_die(b);
    peer_return(b, "run");
    peer_begin(b);
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE);
    peer_ask_step(b);
    peer_expect_abort(a, "E1001");
    peer_expect_abort(b, "E1001");
    fixture_finish(f);
}

/* The predecessor pushed a part of a micro-batch beyond the last. Its successor does not redo that part. */
static void test_part_of_one_too_many_stands(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *b = &f->peers[1];

    (void)userdata;
    micro_batch(f, ALL);
    micro_batch(f, ALL);
    others_wait(f);
    peer_begin(b);
    peer_push_bucket(b, fixture_bucket(f, true)); /* reduced at once, because the other rank has asked for the step */
    fixture_drain(f);
    expect_healed(f, FIXTURE_MICRO, "was not redone");
    fixture_finish(f);
}

static void test_not_finite(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {on_nonfinite: error, stall_warning: 0, stall_timeout: 0}\n");
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    peer_begin(a);
    peer_begin(b);
    peer_push_all(b);
    for (uint32_t parcel = 0; parcel < f->job->layout->n_parcels; parcel++)
        memset(b->ring + b->slots[parcel].offset_bytes, 0xff, 4);
    peer_push_all(a);
    peer_ask_end(a);
    peer_ask_end(b);
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
    others_wait(f);
    peer_ask_step(b);
    peer_expect_refused(b, E_NONFINITE, false);
    expect_healed(f, 1, "E1201");
    fixture_finish(f);
}

/* A rank asked for the step and died. No process is left that could ask with other arguments. */
static void test_asked_with_other_arguments(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    fixture_micro_batch(f);
    fixture_micro_batch(f);
    job_step(f->job, b->rank,
             &(struct request_step){.step = b->at.step, .attempt = b->at.attempt, .has_max_norm = true, .max_norm = 7});
    peer_expect_silence(b);
    peer_ask_step(a);
    peer_expect_refused(a, E_STEP_ARGS, false); /* the arguments of a living rank: this rank may change its own */
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    peer_die(b);
    peer_ask_step(a);
    peer_expect_abort(a, "had asked for the step");
    peer_return(b, "run");
    assert_int_equal(b->at.micro_batch, 0);
    fixture_finish(f);
}

/* A fault in the successor's own part is refused. */
static void test_own_part(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *b = &f->peers[1];

    (void)userdata;
    peer_begin(b);
    peer_push_bucket(b, 0); /* in no sum, because the other rank has not pushed it; so it is forgotten */
    peer_die(b);
    peer_return(b, "run");
    peer_begin(b);
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE);
    peer_ask_step(b);
    peer_expect_refused(b, E_MISSING, false);
    assert_int_equal(f->job->kept.n_aborts, 0);
    fixture_free(f);
}

TEST_GROUP(job_inherited)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_was_pushed),
        cmocka_unit_test(test_every_stage),
        cmocka_unit_test(test_some_were_not_pushed),
        cmocka_unit_test(test_too_few_were_ended),
        cmocka_unit_test(test_too_many_were_ended),
        cmocka_unit_test(test_another_is_added_each_time),
        cmocka_unit_test(test_part_of_one_too_many_stands),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_asked_with_other_arguments),
        cmocka_unit_test(test_own_part),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

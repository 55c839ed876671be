/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each moment of a rank's wait counts once, for the request that waits and for what it waits for. It also counts for
 * the rank that is awaited.
 */

#include "daemon/job/model/waits.h"

#include "core/base/base.h"
#include "daemon/job/job.h"
#include "daemon/job/client-report.h"
#include "daemon/job/stall.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/boundary.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/group.h"

static const char quiet[] = FIXTURE_QUIET;

static void pass(struct fixture *f, unsigned ms)
{
    f->now_ns += ms * UINT64_C(1000000);
}

/* Return: how many milliseconds the rank has waited in this request for this. */
static uint64_t waited(struct fixture *f, unsigned rank, enum job_wait kind, enum wait_for what)
{
    waits_look(f->job, f->now_ns);
    return f->job->ranks[rank].waits.total_ns[kind][what] / 1000000;
}

static uint64_t behind(struct fixture *f, unsigned rank)
{
    waits_look(f->job, f->now_ns);
    return f->job->ranks[rank].waits.behind_total_ns / 1000000;
}

/* Return: all milliseconds that the rank has waited in training. */
static uint64_t waited_at_all(struct fixture *f, unsigned rank)
{
    uint64_t ms = 0;

    for (unsigned kind = WAIT_SLOT; kind < WAITS_N_KINDS; kind++)
        for (unsigned what = 0; what < N_WAIT_FOR; what++)
            ms += waited(f, rank, kind, what);
    return ms;
}

static void assert_last(const struct fixture *f, unsigned wait_ms, unsigned slowest, unsigned behind_ms)
{
    const struct job_times *times = &f->job->stats.times;

    assert_int_equal(times->wait_last_ns, wait_ms * UINT64_C(1000000));
    assert_int_equal(times->slowest_behind_ns, behind_ms * UINT64_C(1000000));
    if (behind_ms > 0)
        assert_int_equal(times->slowest_rank, slowest);
}

static void push(struct peer *p)
{
    peer_begin(p);
    peer_push_all(p);
}

/* One rank loads data slowly. The other waits at the end of each micro-batch, and not in the step. */
static void test_boundary(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    for (unsigned micro_batch = 0; micro_batch < 2; micro_batch++) {
        pass(f, 20);
        push(a);
        peer_ask_end(a);
        pass(f, 280);
        push(b);
        peer_expect(a, REPLY_DONE);
        peer_ask_end(b);
        peer_expect(b, REPLY_DONE);
    }
    fixture_finish_step(f);
    assert_int_equal(waited(f, 0, WAIT_END, WAIT_FOR_RANKS), 560);
    assert_int_equal(waited_at_all(f, 0), 560);
    assert_int_equal(waited_at_all(f, 1), 0);
    assert_int_equal(behind(f, 0), 0);
    assert_int_equal(behind(f, 1), 560);
    assert_last(f, 560, 1, 560);
    fixture_free(f);
}

/* The time in which zerod adds up gradients that both ranks have pushed counts as the daemon's, and for no rank. */
static void test_work(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    push(a);
    peer_ask_end(a);
    pass(f, 10);
    push(b); /* its last gradient, so the sums begin */
    fixture_tick(f, 0);
    pass(f, 40);
    peer_expect(a, REPLY_DONE);
    assert_int_equal(waited(f, 0, WAIT_END, WAIT_FOR_RANKS), 10);
    assert_int_equal(waited(f, 0, WAIT_END, WAIT_FOR_DAEMON), 40);
    assert_int_equal(behind(f, 1), 10);
    pass(f, 5); /* after its last gradient, when no rank needs it */
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE);
    assert_int_equal(behind(f, 1), 10);
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_step(&f->peers[i]);
    pass(f, 70);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_STEP_DONE);
    assert_int_equal(waited(f, 1, WAIT_STEP, WAIT_FOR_DAEMON), 70);
    assert_last(f, 10, 1, 10);
    fixture_free(f);
}

/* A wait counts while it lasts, so a rank that hangs is seen before it arrives. */
static void test_step(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    fixture_micro_batch(f);
    job_grad_norm(f->job, b->rank);
    pass(f, 30);
    job_grad_norm(f->job, a->rank);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
    peer_ask_step(b);
    pass(f, 600000);
    assert_int_equal(waited(f, 1, WAIT_STEP, WAIT_FOR_RANKS), 600000);
    assert_int_equal(behind(f, 0), 600030);
    peer_ask_step(a);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_STEP_DONE);
    assert_int_equal(waited(f, 1, WAIT_NORM, WAIT_FOR_RANKS), 30);
    assert_int_equal(waited_at_all(f, 0), 0);
    assert_last(f, 600030, 0, 600030);
    fixture_finish_step((fixture_micro_batch(f), f));
    assert_last(f, 0, 0, 0);
    fixture_free(f);
}

/* A dead rank without a successor is awaited as well. A rank that has left is not. */
static void test_lost(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {stall_warning: 0, stall_timeout: 0, on_leave: continue}\n");
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    push(a);
    peer_ask_end(a);
    peer_die(b);
    job_settle(f->job);
    pass(f, 100);
    assert_int_equal(behind(f, 1), 100);
    peer_return(b, NULL);
    push(b);
    peer_expect(a, REPLY_DONE);
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE);
    fixture_finish_step(f);
    peer_leave(b);
    job_settle(f->job);
    push(a);
    peer_ask_end(a);
    peer_expect(a, REPLY_DONE);
    pass(f, 1000);
    assert_int_equal(behind(f, 1), 100);
    fixture_free(f);
}

/* The ring is full because the other rank has not pushed. */
static void test_room(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];

    (void)userdata;
    peer_begin(a);
    peer_push_bucket(a, 0);
    peer_ask_slot(a, 1);
    for (unsigned i = 0; i < 3 && a->n_answers == a->n_heard; i++) {
        fixture_tick(f, 300);
        fixture_drain(f);
    }
    peer_expect(a, REPLY_SLOT_GRANT);
    assert_in_range(waited(f, 0, WAIT_SLOT, WAIT_FOR_RANKS), 300, 900);
    assert_int_equal(behind(f, 1), waited(f, 0, WAIT_SLOT, WAIT_FOR_RANKS));
    assert_int_equal(waited_at_all(f, 0), behind(f, 1));
    fixture_free(f);
}

/* While zerod serves a rank's read or write, the others wait. That time does not count as the rank's. */
static void test_served(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    const uint64_t *own_ns = f->job->ranks[1].phases.total_ns;
    uint64_t forward_ns = own_ns[PHASE_FORWARD];

    (void)userdata;
    push(a);
    peer_ask_end(a);
    pass(f, 5);
    job_read_state(f->job, b->rank, &(struct request_read_state){.param = 0, .kind = WIRE_STATE_MASTER});
    pass(f, 50);
    peer_expect(b, REPLY_STATE_IS);
    pass(f, 2);
    push(b);
    peer_expect(a, REPLY_DONE);
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE);
    fixture_finish_step(f);
    assert_int_equal(waited(f, 1, WAIT_READ, WAIT_FOR_DAEMON), 50);
    assert_int_equal(waited(f, 0, WAIT_END, WAIT_FOR_RANKS), 7);
    assert_int_equal(waited(f, 0, WAIT_END, WAIT_FOR_DAEMON), 50);
    assert_int_equal(behind(f, 1), 7);
    assert_int_equal(own_ns[PHASE_FORWARD] - forward_ns, 7000000); /* without the 50 ms */
    fixture_free(f);
}

static void test_window(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    job_write_begin(f->job, b->rank);
    pass(f, 15);
    job_write_begin(f->job, a->rank);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
    job_write_end(f->job, b->rank, &(struct request_write_end){0});
    pass(f, 25);
    job_write_end(f->job, a->rank, &(struct request_write_end){0});
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
    assert_int_equal(waited(f, 1, WAIT_WINDOW_BEGIN, WAIT_FOR_RANKS), 15);
    assert_int_equal(waited(f, 1, WAIT_WINDOW_END, WAIT_FOR_RANKS), 25);
    assert_int_equal(behind(f, 0), 40);
    fixture_free(f);
}

/* A rank that attaches late does not count as slow. */
static void test_forming(void **userdata)
{
    struct fixture *f = fixture_new(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    assert_int_equal(peer_attach(a, "run"), 0);
    peer_declare(a);
    peer_ask_form(a);
    pass(f, 60000);
    assert_int_equal(peer_attach(b, "run"), 0);
    peer_declare(b);
    peer_ask_form(b);
    assert_int_equal(waited(f, 0, WAIT_FORM, WAIT_FOR_RANKS), 60000);
    assert_int_equal(behind(f, 1), 0);
    assert_int_equal(f->job->waits.total_ns, 0);
    for (unsigned i = 0; i < PEERS; i++)
        peer_take_formed(&f->peers[i]);
    fixture_free(f);
}

/* A rank that has the decision computes, so it does not wait, although its answer is still to come. */
static void test_overlap(void **userdata)
{
    struct fixture *f = fixture_new(quiet);

    (void)userdata;
    for (unsigned i = 0; i < PEERS; i++)
        f->peers[i].overlaps = i == 1;
    fixture_form(f, "run");
    fixture_micro_batch(f);
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_step(&f->peers[i]);
    while (f->job->phase == JOB_TRAINING)
        fixture_tick(f, 0);
    assert_int_equal(f->job->phase, JOB_UPDATING);
    pass(f, 90);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_STEP_DONE);
    assert_int_equal(waited(f, 0, WAIT_STEP, WAIT_FOR_DAEMON), 90);
    assert_int_equal(waited_at_all(f, 1), 0);
    fixture_free(f);
}

TEST_GROUP(waits)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_boundary), cmocka_unit_test(test_work),    cmocka_unit_test(test_step),
        cmocka_unit_test(test_lost),     cmocka_unit_test(test_room),    cmocka_unit_test(test_served),
        cmocka_unit_test(test_window),   cmocka_unit_test(test_forming), cmocka_unit_test(test_overlap),
    };

    return cmocka_run_group_tests_name("waits", tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Write windows in which state is written. When the window is committed, all that rank 0 wrote becomes state, or
 * nothing. If the window is forgotten or aborted, or rank 0 dies, no bit changes, and the window's memory is freed.
 */

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "core/base/base.h"
#include "daemon/job/job.h"
#include "daemon/job/model/model.h"
#include "daemon/job/client-report.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/abort.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/group.h"

static const char quiet[] = FIXTURE_QUIET;
enum { EMPTY = 5, BIG = 7, FROZEN = 8, HALF = 9 }; /* parameters of puppet_model */

static void ask_window(struct fixture *f)
{
    for (unsigned i = 0; i < PEERS; i++)
        job_write_begin(f->job, f->peers[i].rank);
}

static void open_window(struct fixture *f)
{
    ask_window(f);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
}

static void end_window(struct fixture *f, bool forget)
{
    for (unsigned i = 0; i < PEERS; i++)
        job_write_end(f->job, f->peers[i].rank, &(struct request_write_end){.forget = forget && i == 0});
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
}

static void ask(struct peer *p, uint32_t param, enum wire_state_kind kind, uint64_t count)
{
    job_write_state(p->fixture->job, p->rank,
                    &(struct request_write_state){.param = param, .kind = kind, .count = count});
}

static float value_of(uint32_t param, enum wire_state_kind kind, uint64_t elem)
{
    return puppet_initial(1000 + 10 * param + kind, elem) + 1.0f;
}

/* Fills the memory that the daemon gave the client for an array. */
static void fill(struct peer *p, uint32_t param, enum wire_state_kind kind)
{
    uint64_t n = puppet_elems(&puppet_model[param]);
    float *values;

    assert_int_equal(p->reply.state_is.n_segments, 1);
    assert_int_equal(p->segments[0].kind, WIRE_SEGMENT_WINDOW_STATE);
    assert_int_equal(p->reply.state_is.n_elems, n);
    assert_true(p->reply.state_is.offset_bytes + n * sizeof(float) <= p->segments[0].n_bytes);
    values = mmap(NULL, n * sizeof(float), PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[0],
                  (off_t)p->reply.state_is.offset_bytes);
    assert_ptr_not_equal(values, MAP_FAILED);
    for (uint64_t i = 0; i < n; i++)
        values[i] = value_of(param, kind, i);
    munmap(values, n * sizeof(float));
}

static void write_array(struct peer *p, uint32_t param, enum wire_state_kind kind)
{
    ask(p, param, kind, 0);
    peer_expect(p, REPLY_STATE_IS);
    fill(p, param, kind);
}

static void write_count(struct peer *p, uint32_t param, uint64_t count)
{
    ask(p, param, WIRE_STATE_STEP_COUNT, count);
    peer_expect(p, REPLY_STATE_IS);
    assert_int_equal(p->reply.state_is.n_segments, 0);
}

static void assert_array(const struct fixture *f, uint32_t param, enum wire_state_kind kind)
{
    const struct layout_param *p = &f->job->layout->params[param];

    for (uint64_t i = 0; i < p->n_elems; i++)
        assert_true(*(float *)state_values(f->job->state, (enum state_kind)kind, p->bucket, p->offset_elems + i) ==
                    value_of(param, kind, i));
}

static uint64_t count_of(const struct fixture *f, uint32_t param)
{
    return f->job->state->progress.counts[param];
}

/* ---- what is written ----------------------------------------------------------------------------------- */

static void test_commit(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint64_t used = f->job->memory.quota.used, before = fixture_bits(f), now;

    (void)userdata;
    open_window(f);
    write_array(a, BIG, WIRE_STATE_EXP_AVG);
    write_array(a, BIG, WIRE_STATE_EXP_AVG_SQ);
    write_array(a, HALF, WIRE_STATE_MASTER);
    write_count(a, HALF, 41);
    write_count(a, EMPTY, 3);
    ask(a, EMPTY, WIRE_STATE_MASTER, 0); /* no elements, so there is no memory to fill */
    peer_expect(a, REPLY_STATE_IS);
    assert_int_equal(a->reply.state_is.n_segments, 0);
    ask(b, BIG, WIRE_STATE_EXP_AVG, 0); /* other ranks' writes are dropped */
    peer_expect(b, REPLY_STATE_IS);
    assert_int_equal(b->reply.state_is.n_segments, 0);
    write_count(b, HALF, 99);
    assert_true(f->job->memory.quota.used > used);
    assert_int_equal(fixture_bits(f), before);
    assert_int_equal(count_of(f, HALF), 1);

    end_window(f, false);
    assert_array(f, BIG, WIRE_STATE_EXP_AVG);
    assert_array(f, BIG, WIRE_STATE_EXP_AVG_SQ);
    assert_array(f, HALF, WIRE_STATE_MASTER);
    for (uint64_t i = 0; i < puppet_elems(&puppet_model[HALF]); i++) {
        uint16_t half = f16_from_f32(value_of(HALF, WIRE_STATE_MASTER, i));

        assert_memory_equal(state_weights(f->job->state, HALF, i), &half, sizeof(half));
    }
    assert_int_equal(count_of(f, HALF), 41);
    assert_int_equal(count_of(f, EMPTY), 3);
    assert_int_equal(count_of(f, BIG), 1);
    assert_int_equal(f->job->memory.quota.used, used);

    /* The next window has none of these values, so its end changes nothing. */
    now = fixture_bits(f);
    open_window(f);
    end_window(f, false);
    assert_int_equal(fixture_bits(f), now);
    fixture_steps(f, 1, 1);
    assert_int_equal(count_of(f, HALF), 42);
    fixture_free(f);
}

/*
 * A second request for an array returns the same place, and the last values count. A written master counts more than
 * the weights in the window.
 */
static void test_last_write_counts(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    uint64_t offset_bytes, charged;

    (void)userdata;
    open_window(f);
    ask(a, BIG, WIRE_STATE_MASTER, 0);
    peer_expect(a, REPLY_STATE_IS);
    offset_bytes = a->reply.state_is.offset_bytes;
    charged = f->job->memory.quota.used;
    write_array(a, BIG, WIRE_STATE_MASTER);
    assert_int_equal(a->reply.state_is.offset_bytes, offset_bytes);
    assert_int_equal(f->job->memory.quota.used, charged);
    write_count(a, BIG, 5);
    write_count(a, BIG, 6);
    end_window(f, false);
    assert_array(f, BIG, WIRE_STATE_MASTER);
    assert_int_equal(count_of(f, BIG), 6);
    fixture_free(f);
}

/* ---- nothing of it ------------------------------------------------------------------------------------- */

static void write_some(struct fixture *f)
{
    for (enum wire_state_kind kind = WIRE_STATE_MASTER; kind <= WIRE_STATE_EXP_AVG_SQ; kind++)
        write_array(&f->peers[0], BIG, kind);
    write_array(&f->peers[0], HALF, WIRE_STATE_MASTER);
    write_count(&f->peers[0], BIG, 77);
}

static void assert_nothing(const struct fixture *f, uint64_t bits, uint64_t used)
{
    assert_int_equal(fixture_bits(f), bits);
    assert_int_equal(count_of(f, BIG), 1);
    assert_int_equal(f->job->memory.quota.used, used);
}

static void test_forget(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    uint64_t bits = fixture_bits(f), used = f->job->memory.quota.used;

    (void)userdata;
    open_window(f);
    write_some(f);
    end_window(f, true);
    assert_nothing(f, bits, used);
    fixture_finish(f);
}

static void test_abort(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint64_t bits = fixture_bits(f), used = f->job->memory.quota.used;

    (void)userdata;
    open_window(f);
    write_some(f);
    job_write_end(f->job, b->rank, &(struct request_write_end){.forget = false});
    job_abort_step(f->job, a->rank, "the checkpoint is damaged");
    peer_expect(a, REPLY_DONE);
    peer_see_abort(a);
    peer_expect_abort(b, "the checkpoint is damaged");
    assert_nothing(f, bits, used);
    fixture_finish(f);
}

/*
 * The step is aborted while pages are being reserved. Rank 0 is told at once, and the window ends when the pages are
 * there.
 */
static void test_abort_while_it_waits(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint64_t bits = fixture_bits(f), used = f->job->memory.quota.used;

    (void)userdata;
    open_window(f);
    write_some(f);
    ask(a, HALF, WIRE_STATE_EXP_AVG, 0);
    job_abort_step(f->job, b->rank, "changed my mind");
    peer_expect(b, REPLY_DONE);
    peer_see_abort(b);
    peer_expect_abort(a, "changed my mind");
    ask_window(f); /* the next window opens after the first has ended */
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
    end_window(f, false);
    assert_nothing(f, bits, used);
    fixture_finish(f);
}

/*
 * Rank 0 dies between two writes, or while it waits for pages. Its successor starts with an empty window and can write
 * again.
 */
static void die_in_window(bool waiting)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint64_t bits = fixture_bits(f), used = f->job->memory.quota.used;

    open_window(f);
    write_some(f);
    if (waiting)
        ask(a, HALF, WIRE_STATE_EXP_AVG, 0);
    job_write_end(f->job, b->rank, &(struct request_write_end){.forget = false});
    peer_die(a);
    peer_return(a, "run");
    ask(a, HALF, WIRE_STATE_EXP_AVG, 0); /* refused before WriteBegin */
    peer_expect_refused(a, E_EARLY, false);
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    job_write_begin(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    assert_int_equal(fixture_bits(f), bits);
    write_count(a, HALF, 12);
    job_write_end(f->job, a->rank, &(struct request_write_end){.forget = false});
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
    assert_int_equal(count_of(f, HALF), 12);
    assert_nothing(f, bits, used);
    fixture_free(f);
}

static void test_rank_0_dies(void **userdata)
{
    (void)userdata;
    die_in_window(false);
    die_in_window(true);
}

/*
 * A rank leaves before the window is opened and comes back while the window is filled with the weights. The rank must
 * not write yet.
 */
static void test_back_in_the_middle(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {on_leave: continue}\n");
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    peer_leave(a);
    job_write_begin(f->job, b->rank);
    job_settle(f->job);
    assert_int_equal(f->job->phase, JOB_WINDOW);
    assert_int_equal(peer_attach(a, "run"), 0);
    ask(a, BIG, WIRE_STATE_MASTER, 0);
    peer_expect_refused(a, E_EARLY, false);
    peer_expect(b, REPLY_DONE);
    fixture_free(f);
}

/* ---- refusals ------------------------------------------------------------------------------------------ */

static void expect_refusal(struct peer *p, unsigned code, const char *part)
{
    peer_expect_refused(p, code, false);
    if (!strstr(p->text, part))
        fail_msg("\"%s\" is not in:\n%s", part, p->text);
    job_write_end(p->fixture->job, p->rank, &(struct request_write_end){.forget = false});
    peer_expect_refused(p, code, false); /* repeated, so that no half of the writes is committed */
    job_clear_fault(p->fixture->job, p->rank);
    peer_expect(p, REPLY_DONE);
}

/* All ranks get the same refusals. */
static void test_refusals(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {stall_warning: 0, stall_timeout: 0}\n"
                                      "optimizer: {type: SGD, params: {lr: 0.1, momentum: 0.9}}\n");
    uint64_t bits = fixture_bits(f), used = f->job->memory.quota.used;

    (void)userdata;
    for (unsigned i = 0; i < PEERS; i++) {
        ask(&f->peers[i], BIG, WIRE_STATE_MASTER, 0);
        expect_refusal(&f->peers[i], E_EARLY, "no write window is open");
    }
    open_window(f);
    for (unsigned i = 0; i < PEERS; i++) {
        struct peer *p = &f->peers[i];

        ask(p, FROZEN, WIRE_STATE_MASTER, 0);
        expect_refusal(p, E_BAD_MESSAGE, "WriteState.param: frozen.table is frozen");
        ask(p, FROZEN, WIRE_STATE_STEP_COUNT, 1);
        expect_refusal(p, E_BAD_MESSAGE, "WriteState.param: frozen.table is frozen");
        ask(p, PUPPET_PARAMS, WIRE_STATE_MASTER, 0);
        expect_refusal(p, E_BAD_MESSAGE, "WriteState.param: 11, expected 0 to 10");
        ask(p, BIG, WIRE_STATE_EXP_AVG_SQ, 0);
        expect_refusal(p, E_BAD_MESSAGE,
                       "WriteState.kind: exp_avg_sq, which the optimizer of this daemon (optimizer.type)");
    }
    end_window(f, false);
    assert_nothing(f, bits, used);
    fixture_free(f);
}

/* With limits.memory, an array that fits is written, and its memory is released with the window. */
static void test_over_quota(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    uint64_t used = f->job->memory.quota.used;

    (void)userdata;
    open_window(f);
    write_array(a, HALF, WIRE_STATE_EXP_AVG);
    f->job->memory.quota.limit = f->job->memory.quota.used + 4096;
    ask(a, BIG, WIRE_STATE_EXP_AVG, 0); /* needs 12,932 bytes */
    expect_refusal(a, E_QUOTA, "raise limits.memory, or write the state in several windows");
    write_array(a, 2, WIRE_STATE_EXP_AVG); /* needs one page */
    end_window(f, false);
    assert_array(f, HALF, WIRE_STATE_EXP_AVG);
    assert_array(f, 2, WIRE_STATE_EXP_AVG);
    assert_int_equal(f->job->memory.quota.used, used);
    f->job->memory.quota.limit = used + 4096; /* too little for a window */
    ask_window(f);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect_refused(&f->peers[i], E_QUOTA, false);
    assert_int_equal(f->job->memory.quota.used, used);
    fixture_free(f);
}

TEST_GROUP(window)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_commit),
        cmocka_unit_test(test_last_write_counts),
        cmocka_unit_test(test_forget),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_abort_while_it_waits),
        cmocka_unit_test(test_rank_0_dies),
        cmocka_unit_test(test_back_in_the_middle),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_over_quota),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

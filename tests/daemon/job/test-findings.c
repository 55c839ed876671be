/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each kind of finding appears when its condition has held for long enough, and disappears when it ends. Jobs that are
 * only unusual have no finding.
 */

#include <limits.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/job/findings.h"
#include "daemon/job/job.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/phases.h"
#include "daemon/job/transaction/abort.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/group.h"

enum { HEAD_WEIGHT = 9, HEAD_BIAS = 10, RANK_STEPS = 50, STEPS = 100 };

static const char quiet[] = FIXTURE_QUIET;

static struct finding only_finding(const struct fixture *f, enum finding_kind kind)
{
    struct findings findings;

    findings_of(f->job, &findings);
    assert_int_equal(findings.n, 1);
    assert_int_equal(findings.list[0].kind, kind);
    return findings.list[0];
}

static void assert_silent(const struct fixture *f)
{
    struct findings findings;

    findings_of(f->job, &findings);
    if (findings.n > 0)
        fail_msg("%s", findings.list[0].text);
}

/* ---- slow ranks ---------------------------------------------------------------------------------------- */

/* How many milliseconds each part of a rank's step takes. */
struct times {
    unsigned forward, backward, rest;
};

/* Sets the peer whose event is next, and the event's time in the step. Return: false if there is none. */
static bool next_event(const struct times *times, const unsigned *n_done, unsigned *peer, unsigned *at_ms)
{
    *peer = 0;
    *at_ms = UINT_MAX;
    for (unsigned i = 0; i < PEERS; i++) {
        const unsigned at[] = {times[i].forward, times[i].forward + times[i].backward,
                               times[i].forward + times[i].backward + times[i].rest};

        if (n_done[i] == ARRAY_SIZE(at) || at[n_done[i]] >= *at_ms)
            continue;
        *peer = i;
        *at_ms = at[n_done[i]];
    }
    return *at_ms < UINT_MAX;
}

static void do_event(struct peer *p, unsigned number)
{
    if (number == 0)
        peer_begin(p);
    else if (number == 1)
        peer_push_all(p);
    else
        peer_ask_end(p);
}

/* Does a step of one micro-batch, in which each rank takes its given time. */
static void timed_step(struct fixture *f, const struct times *times)
{
    uint64_t begin_ns = f->now_ns;
    unsigned n_done[PEERS] = {0}, peer, at_ms;

    while (next_event(times, n_done, &peer, &at_ms)) {
        f->now_ns = begin_ns + at_ms * UINT64_C(1000000);
        do_event(&f->peers[peer], n_done[peer]++);
    }
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_step(&f->peers[i]);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_STEP_DONE);
    fixture_drain(f);
}

static void timed_steps(struct fixture *f, unsigned n, struct times first, struct times second)
{
    const struct times times[PEERS] = {first, second};

    for (unsigned i = 0; i < n; i++)
        timed_step(f, times);
}

static const struct times usual = {40, 50, 10};

static void assert_slow(struct times slow, const char *text)
{
    struct fixture *f = fixture_start(quiet);
    struct finding finding;

    timed_steps(f, RANK_STEPS - 1, usual, slow);
    assert_silent(f);
    timed_steps(f, 3 * STEPS, usual, slow);
    finding = only_finding(f, FINDING_SLOW_RANK);
    assert_int_equal(finding.rank, 1);
    assert_non_null(strstr(finding.text, "rank 1 was the last in each of the last 349 steps: its own work took 130 ms, "
                                         "30 ms more than that of the next slowest rank, mostly "));
    assert_non_null(strstr(finding.text, text));
    timed_steps(f, 1, slow, usual);
    assert_silent(f);
    fixture_free(f);
}

static void test_slow_rank(void **userdata)
{
    (void)userdata;
    assert_slow((struct times){70, 50, 10}, "in its forward");
    assert_slow((struct times){30, 90, 10}, "in its backward");
    assert_slow((struct times){40, 40, 50}, "after its backward");
}

static void test_not_slow(void **userdata)
{
    struct fixture *f = fixture_start(quiet);

    (void)userdata;
    timed_steps(f, STEPS, usual, usual);
    timed_steps(f, 1, usual, (struct times){4000, 50, 10}); /* much slower, but once */
    timed_steps(f, STEPS, usual, usual);
    for (unsigned i = 0; i < STEPS; i++) { /* in turns */
        timed_steps(f, 1, usual, (struct times){80, 50, 10});
        timed_steps(f, 1, (struct times){80, 50, 10}, usual);
    }
    assert_silent(f);
    timed_steps(f, STEPS, usual, (struct times){48, 50, 10}); /* slower by less than a tenth */
    assert_silent(f);
    timed_steps(f, 1, (struct times){80, 50, 10}, usual);
    timed_steps(f, STEPS, (struct times){1, 1, 1}, (struct times){5, 1, 1}); /* slower by less than 5 ms */
    assert_silent(f);
    fixture_free(f);
}

/* Each moment counts for one phase. A rank's time does not count while it waits for others. */
static void test_phases(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    const uint64_t *first = f->job->ranks[0].phases.total_ns, *second = f->job->ranks[1].phases.total_ns;
    uint64_t before[PEERS][N_RANK_PHASES];

    (void)userdata;
    memcpy(before[0], first, sizeof(before[0]));
    memcpy(before[1], second, sizeof(before[1]));
    timed_steps(f, 1, (struct times){4, 5, 1}, (struct times){400, 500, 100});
    assert_int_equal(first[PHASE_FORWARD] - before[0][PHASE_FORWARD], 4000000);
    assert_int_equal(first[PHASE_BACKWARD] - before[0][PHASE_BACKWARD], 5000000);
    assert_int_equal(first[PHASE_REST] - before[0][PHASE_REST], 1000000);
    assert_int_equal(second[PHASE_FORWARD] - before[1][PHASE_FORWARD], 400000000);
    assert_int_equal(second[PHASE_BACKWARD] - before[1][PHASE_BACKWARD], 500000000);
    assert_int_equal(second[PHASE_REST] - before[1][PHASE_REST], 100000000);
    assert_int_equal(first[PHASE_ROOM] + second[PHASE_ROOM], 0);
    fixture_free(f);
}

static void test_room(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    peer_begin(a);
    peer_push_bucket(a, 0);
    peer_ask_slot(a, 1);
    for (unsigned i = 0; i < 3 && a->n_answers == a->n_heard; i++) {
        fixture_tick(f, 300);
        fixture_drain(f);
    }
    peer_expect(a, REPLY_SLOT_GRANT);
    peer_begin(b);
    for (uint32_t p = 0; p < PUPPET_PARAMS; p++)
        if (!puppet_model[p].frozen && f->job->layout->params[p].bucket != 0)
            peer_push(a, p);
    peer_push_all(b);
    peer_ask_end(a);
    peer_ask_end(b);
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
    fixture_finish_step(f);
    assert_int_equal(f->job->ranks[0].phases.total_ns[PHASE_ROOM] % 300000000, 0);
    assert_in_range(f->job->ranks[0].phases.total_ns[PHASE_ROOM], 1, 900000000);
    assert_int_equal(f->job->ranks[0].phases.total_ns[PHASE_BACKWARD], 0);
    fixture_free(f);
}

/* An aborted step counts for no rank. */
static void test_aborted_step(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    uint64_t before = f->job->ranks[1].phases.total_ns[PHASE_FORWARD];
    uint32_t n_in_a_row;

    (void)userdata;
    timed_steps(f, 2, usual, (struct times){80, 50, 10});
    n_in_a_row = f->job->slow.n_in_a_row;
    f->now_ns += 7000000000;
    job_abort_step(f->job, f->peers[0].rank, "why not");
    peer_expect(&f->peers[0], REPLY_DONE);
    peer_see_abort(&f->peers[0]);
    peer_begin(&f->peers[1]);
    peer_push_all(&f->peers[1]);
    peer_ask_end(&f->peers[1]);
    peer_expect_abort(&f->peers[1], "why not");
    timed_steps(f, 1, usual, usual);
    assert_int_equal(f->job->slow.n_in_a_row, n_in_a_row);
    assert_int_equal(f->job->ranks[1].phases.total_ns[PHASE_FORWARD] - before, 160000000);
    fixture_free(f);
}

/* ---- norms of ranks ------------------------------------------------------------------------------------ */

static float large(const struct peer *p, uint32_t param)
{
    (void)param;
    return p->number == 1 ? 1000 : 1;
}

static float larger(const struct peer *p, uint32_t param)
{
    (void)param;
    return p->number == 1 ? 5 : 1;
}

static float nothing_on_rank_0(const struct peer *p, uint32_t param)
{
    (void)param;
    return p->number == 0 ? 0 : 1;
}

static float large_in_turns(const struct peer *p, uint32_t param)
{
    (void)param;
    return p->number == p->at.step / 10 % 2 ? 1000 : 1;
}

static float large_at_times(const struct peer *p, uint32_t param)
{
    (void)param;
    return p->number == 1 && p->at.step % 40 > 0 ? 1000 : 1;
}

static void use(struct fixture *f, float (*factor)(const struct peer *p, uint32_t param))
{
    for (unsigned i = 0; i < PEERS; i++)
        f->peers[i].factor = factor;
}

static void test_rank_norm(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct finding finding;
    unsigned ratio;

    (void)userdata;
    use(f, large);
    fixture_steps(f, RANK_STEPS - 1, 1);
    assert_silent(f);
    fixture_steps(f, 1, 1);
    finding = only_finding(f, FINDING_RANK_NORM);
    assert_int_equal(finding.rank, 1);
    assert_int_equal(sscanf(finding.text, "the gradients of rank 1 were at least %u times as large", &ratio), 1);
    assert_in_range(ratio, 10, 1000);
    assert_non_null(strstr(finding.text, "node in each of the last 50 steps"));
    use(f, NULL);
    fixture_steps(f, 1, 1);
    assert_silent(f);
    fixture_free(f);
}

static void assert_norms_silent(float (*factor)(const struct peer *p, uint32_t param), unsigned n_micro)
{
    struct fixture *f = fixture_start(quiet);

    use(f, factor);
    fixture_steps(f, 2 * STEPS - 1, n_micro);
    assert_silent(f);
    fixture_free(f);
}

static void test_no_rank_norm(void **userdata)
{
    (void)userdata;
    assert_norms_silent(NULL, 2);
    assert_norms_silent(larger, 1);
    assert_norms_silent(nothing_on_rank_0, 1);
    assert_norms_silent(large_in_turns, 1);
    assert_norms_silent(large_at_times, 1);
}

/* ---- zero gradients ------------------------------------------------------------------------------------ */

static float dead_head(const struct peer *p, uint32_t param)
{
    (void)p;
    return param == HEAD_WEIGHT || param == HEAD_BIAS ? 0 : 1;
}

static float dead_head_on_rank_0(const struct peer *p, uint32_t param)
{
    return p->number == 0 && param == HEAD_WEIGHT ? 0 : 1;
}

static float dead_head_in_turns(const struct peer *p, uint32_t param)
{
    return param == HEAD_WEIGHT && p->at.step % 2 == 0 ? 0 : 1;
}

static float dead_everything(const struct peer *p, uint32_t param)
{
    (void)p;
    (void)param;
    return 0;
}

static void test_zero_gradient(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {stall_warning: 0, stall_timeout: 0, unused: [head.bias]}\n");
    struct finding finding;

    (void)userdata;
    use(f, dead_head);
    fixture_steps(f, STEPS - 1, 2);
    assert_silent(f);
    fixture_steps(f, 1, 2);
    finding = only_finding(f, FINDING_ZERO_GRADIENT); /* not head.bias, which the configuration declares unused */
    assert_int_equal(finding.param, HEAD_WEIGHT);
    assert_non_null(strstr(finding.text, "head.weight: the gradient was exactly zero in the last 100 steps"));
    use(f, NULL);
    fixture_steps(f, 1, 1);
    assert_silent(f);
    fixture_free(f);
}

static void test_no_zero_gradient(void **userdata)
{
    static float (*const factors[])(const struct peer *, uint32_t) = {NULL, dead_head_on_rank_0, dead_head_in_turns};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(factors); i++) {
        struct fixture *f = fixture_start(quiet);

        use(f, factors[i]);
        fixture_steps(f, STEPS + 2, 1);
        assert_silent(f);
        fixture_free(f);
    }
}

/* Eight parameters are listed. The last line also says how many more there are. */
static void test_many_zero_gradients(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct findings findings;

    (void)userdata;
    use(f, dead_everything);
    fixture_steps(f, STEPS, 1);
    findings_of(f->job, &findings);
    assert_int_equal(findings.n, 8);
    assert_non_null(strstr(findings.list[0].text, "embed.weight: the gradient"));
    assert_non_null(strstr(findings.list[7].text, ", and 1 more parameter: the gradient"));
    fixture_free(f);
}

/* A parameter that no rank pushes is missing (E1005), and gets no finding. */
static void test_missing_is_not_zero(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {stall_warning: 0, stall_timeout: 0, on_missing: zero}\n");

    (void)userdata;
    for (unsigned step = 0; step < STEPS + 2; step++) {
        for (unsigned i = 0; i < PEERS; i++) {
            peer_begin(&f->peers[i]);
            for (uint32_t p = 0; p < PUPPET_PARAMS; p++)
                if (!puppet_model[p].frozen && p != HEAD_WEIGHT)
                    peer_push(&f->peers[i], p);
        }
        for (unsigned i = 0; i < PEERS; i++)
            peer_ask_end(&f->peers[i]);
        for (unsigned i = 0; i < PEERS; i++)
            peer_expect(&f->peers[i], REPLY_DONE);
        fixture_finish_step(f);
    }
    assert_silent(f);
    fixture_free(f);
}

/* ---- learning rates ------------------------------------------------------------------------------------ */

static void test_zero_lr(void **userdata)
{
    struct fixture *f = fixture_start(FIXTURE_QUIET "optimizer: {type: AdamW, params: {lr: 0}}\n");

    (void)userdata;
    fixture_steps(f, STEPS - 2, 1); /* fixture_start() did one step */
    assert_silent(f);
    fixture_steps(f, 1, 1);
    assert_non_null(strstr(only_finding(f, FINDING_ZERO_LR).text, "was 0 in the last 100 steps"));
    fixture_free(f);
}

static void test_warm_up(void **userdata)
{
    struct fixture *f = fixture_start(FIXTURE_QUIET "optimizer: {type: AdamW, params: {lr: 0.1}}\n"
                                                    "scheduler: {type: WarmupLR, params: {warmup_min_lr: 0, "
                                                    "warmup_max_lr: 0.1, warmup_num_steps: 200}}\n");

    (void)userdata;
    fixture_steps(f, STEPS + 2, 1);
    assert_silent(f);
    fixture_free(f);
}

TEST_GROUP(findings)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slow_rank),
        cmocka_unit_test(test_not_slow),
        cmocka_unit_test(test_phases),
        cmocka_unit_test(test_room),
        cmocka_unit_test(test_aborted_step),
        cmocka_unit_test(test_rank_norm),
        cmocka_unit_test(test_no_rank_norm),
        cmocka_unit_test(test_zero_gradient),
        cmocka_unit_test(test_no_zero_gradient),
        cmocka_unit_test(test_many_zero_gradients),
        cmocka_unit_test(test_missing_is_not_zero),
        cmocka_unit_test(test_zero_lr),
        cmocka_unit_test(test_warm_up),
    };

    return cmocka_run_group_tests_name("findings", tests, NULL, NULL);
}

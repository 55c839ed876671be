/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A parcel's states: the paths from open to settled, the states after an abort and a withdrawal, and a comparison with
 * a model of independent facts, over random events.
 */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "daemon/step/parcel.h"
#include "tests/group.h"

/* Return: a parcel in this state, at its first position. */
static struct parcel parcel_in(enum parcel_state state)
{
    return (struct parcel){.state = state};
}

/* ---- the ways ------------------------------------------------------------------------------------------ */

static void test_one_node(void **unused)
{
    struct parcel parcel = {0};

    (void)unused;
    parcel_complete(&parcel);
    parcel_take(&parcel);
    assert_true(parcel_begin_sum(&parcel));
    assert_false(parcel_begin_sum(&parcel));
    assert_true(parcel_is_kept(&parcel));
    parcel_end_sum(&parcel);
    assert_true(parcel_settle(&parcel));
    assert_false(parcel_is_kept(&parcel));
    assert_true(parcel_is_at(&parcel, 0, 1));
    parcel_pass(&parcel);
    assert_true(parcel_is_at(&parcel, 1, 0));
}

static void test_several_nodes(void **unused)
{
    struct parcel parcel = {0};

    (void)unused;
    assert_false(parcel_await(&parcel)); /* this node has no gradients at the position */
    assert_false(parcel.awaited);
    parcel_complete(&parcel);
    assert_false(parcel_settle(&parcel));
    assert_true(parcel_await(&parcel));
    parcel_take(&parcel);
    assert_false(parcel_await(&parcel)); /* node 0 orders it again after an engine failed */
    assert_true(parcel_begin_sum(&parcel));
    assert_false(parcel_begin_combining(&parcel));
    parcel_end_sum(&parcel);
    assert_true(parcel_begin_combining(&parcel));
    assert_false(parcel_begin_combining(&parcel));
    parcel_end_combining(&parcel);
    assert_true(parcel_settle(&parcel));
}

/* This node's next gradients are complete while the pieces of all nodes are still being added. */
static void test_sum_waits_for_combining(void **unused)
{
    struct parcel parcel = {0};

    (void)unused;
    assert_true(parcel_begin_combining(&parcel));
    parcel_complete(&parcel);
    parcel_take(&parcel);
    assert_false(parcel_begin_sum(&parcel));
    parcel_end_combining(&parcel);
    assert_true(parcel_begin_sum(&parcel));
}

static void test_withdraw(void **unused)
{
    struct parcel promised = parcel_in(PARCEL_PROMISED), taken = parcel_in(PARCEL_TAKEN), awaited = taken;

    (void)unused;
    assert_false(parcel_withdraw(&promised));
    assert_int_equal(promised.state, PARCEL_OPEN);
    assert_true(parcel_withdraw(&taken)); /* taken for the sake of a rank's slots, not ordered by node 0 */
    assert_int_equal(taken.state, PARCEL_TAKEN);
    parcel_await(&awaited);
    assert_false(parcel_withdraw(&awaited)); /* node 0 still expects it */
    assert_int_equal(awaited.state, PARCEL_TAKEN);
}

static void test_abort(void **unused)
{
    struct parcel summing = parcel_in(PARCEL_SUMMING);

    (void)unused;
    for (unsigned state = 0; state < PARCEL_N_STATES; state++) {
        struct parcel parcel = parcel_in((enum parcel_state)state);
        bool busy = state == PARCEL_SUMMING || state == PARCEL_DROPPED;

        parcel_forget(&parcel);
        assert_false(parcel_is_kept(&parcel));
        assert_int_equal(parcel.state, busy ? PARCEL_DROPPED : PARCEL_OPEN);
    }
    parcel_await(&summing);
    parcel_forget(&summing);
    assert_false(parcel_begin_combining(&summing));
    parcel_end_sum(&summing);
    assert_int_equal(summing.state, PARCEL_OPEN);
    assert_false(summing.awaited);
    assert_true(parcel_is_at(&summing, 0, 0));
}

/* ---- errors of the caller ------------------------------------------------------------------------------ */

static bool dies(void (*event)(struct parcel *parcel), struct parcel parcel)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0});
        (void)dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);
        event(&parcel);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_events_out_of_order_fail(void **unused)
{
    static const struct {
        void (*event)(struct parcel *parcel);
        enum parcel_state only, also; /* states in which the event is allowed */
    } events[] = {
        {parcel_pass, PARCEL_OPEN, PARCEL_OPEN},
        {parcel_complete, PARCEL_OPEN, PARCEL_OPEN},
        {parcel_take, PARCEL_PROMISED, PARCEL_PROMISED},
        {parcel_end_sum, PARCEL_SUMMING, PARCEL_DROPPED},
        {parcel_end_combining, PARCEL_N_STATES, PARCEL_N_STATES},
    };

    (void)unused;
    for (size_t i = 0; i < ARRAY_SIZE(events); i++)
        for (unsigned state = 0; state < PARCEL_N_STATES; state++)
            assert_int_equal(dies(events[i].event, parcel_in((enum parcel_state)state)),
                             state != events[i].only && state != events[i].also);
}

/* ---- against a model ----------------------------------------------------------------------------------- */

/* The facts about a parcel as separate flags, without states. */
struct model {
    bool kept, taken, began, summed, awaited, adding, combining;
    uint32_t micro_batch, pass;
};

static void check(const struct parcel *parcel, const struct model *model)
{
    assert_true(parcel_is_at(parcel, model->micro_batch, model->pass));
    assert_int_equal(parcel_is_kept(parcel), model->kept);
    assert_int_equal(parcel->awaited, model->awaited);
    assert_int_equal(parcel->combining, model->combining);
    if (model->kept) {
        assert_int_equal(parcel->state != PARCEL_PROMISED, model->taken);
        assert_int_equal(parcel->state == PARCEL_SUMMED, model->summed);
    }
    assert_int_equal(parcel->state == PARCEL_SUMMING || parcel->state == PARCEL_DROPPED, model->adding);
}

static void begin_sum(struct parcel *parcel, struct model *model)
{
    bool begins = model->kept && model->taken && !model->began && !model->adding && !model->combining;

    assert_int_equal(parcel_begin_sum(parcel), begins);
    if (begins)
        model->began = model->adding = true;
}

static void end_sum(struct parcel *parcel, struct model *model)
{
    if (!model->adding)
        return;
    parcel_end_sum(parcel);
    model->adding = false;
    model->summed = model->kept;
}

static void combine(struct parcel *parcel, struct model *model)
{
    if (model->combining) {
        parcel_end_combining(parcel);
        model->combining = false;
        return;
    }
    assert_int_equal(parcel_begin_combining(parcel), !model->adding);
    model->combining = !model->adding;
}

static void settle(struct parcel *parcel, struct model *model)
{
    bool settles = model->kept && model->summed;

    assert_int_equal(parcel_settle(parcel), settles);
    if (settles) {
        model->kept = model->awaited = false;
        model->pass++;
    }
}

static void await(struct parcel *parcel, struct model *model)
{
    bool takes = model->kept && !model->taken;

    assert_int_equal(parcel_await(parcel), takes);
    model->awaited = model->kept;
    if (takes) { /* the caller does this */
        parcel_take(parcel);
        model->taken = true;
    }
}

static void withdraw(struct parcel *parcel, struct model *model)
{
    assert_int_equal(parcel_withdraw(parcel), model->kept && model->taken && !model->awaited);
    if (!model->awaited)
        model->kept = model->kept && model->taken;
}

static void complete_or_pass(struct parcel *parcel, struct model *model, bool pass)
{
    if (model->kept || model->adding)
        return;
    if (pass) {
        parcel_pass(parcel);
        model->micro_batch++;
        model->pass = 0;
        return;
    }
    parcel_complete(parcel);
    model->kept = true;
    model->taken = model->began = model->summed = false;
}

static void take_early(struct parcel *parcel, struct model *model)
{
    if (!model->kept || model->taken)
        return;
    parcel_take(parcel);
    model->taken = true;
}

static void abort_step(struct parcel *parcel, struct model *model)
{
    parcel_forget(parcel);
    model->kept = model->awaited = false;
}

static void happen(struct parcel *parcel, struct model *model, unsigned event)
{
    switch (event % 16) {
    case 0 ... 2:
        complete_or_pass(parcel, model, false);
        break;
    case 3:
        complete_or_pass(parcel, model, true);
        break;
    case 4 ... 5:
        await(parcel, model);
        break;
    case 6:
        take_early(parcel, model);
        break;
    case 7 ... 8:
        begin_sum(parcel, model);
        break;
    case 9 ... 10:
        end_sum(parcel, model);
        break;
    case 11 ... 12:
        combine(parcel, model);
        break;
    case 13:
        settle(parcel, model);
        break;
    case 14:
        withdraw(parcel, model);
        break;
    default:
        abort_step(parcel, model);
        break;
    }
}

static void test_model(void **unused)
{
    unsigned seen[PARCEL_N_STATES] = {0};

    (void)unused;
    for (unsigned seed = 1; seed <= 200; seed++) {
        struct parcel parcel = {0};
        struct model model = {0};
        unsigned state = seed;

        for (unsigned i = 0; i < 1000; i++) {
            happen(&parcel, &model, (unsigned)rand_r(&state) >> 4);
            check(&parcel, &model);
            seen[parcel.state]++;
        }
    }
    for (unsigned state = 0; state < PARCEL_N_STATES; state++)
        assert_true(seen[state] > 1000);
}

TEST_GROUP(parcel)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_node),
        cmocka_unit_test(test_several_nodes),
        cmocka_unit_test(test_sum_waits_for_combining),
        cmocka_unit_test(test_withdraw),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_events_out_of_order_fail),
        cmocka_unit_test(test_model),
    };

    return cmocka_run_group_tests_name("parcel", tests, NULL, NULL);
}

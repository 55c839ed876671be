/* SPDX-License-Identifier: Apache-2.0 */

/* Stages run in order, wait for their callbacks, fail at the start or later, and are tried again. */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/sequence.h"
#include "tests/group.h"

/* plan has a letter for each stage, which says what the stage returns: w waits, o is over, f fails with -ENOMEM. */
struct run {
    struct sequence sequence;
    const char *plan;
    char log[32]; /* a letter for each stage that began, then '.' if all are over or '!' if one failed */
    int result;
};

static int stage(struct run *run, size_t i)
{
    char c = run->plan[i];

    assert_int_equal(run->sequence.at, i);
    run->log[strlen(run->log)] = (char)('a' + i);
    return c == 'w' ? SEQUENCE_WAITS : c == 'o' ? SEQUENCE_OVER : -ENOMEM;
}

static int stage_a(void *userdata)
{
    return stage(userdata, 0);
}

static int stage_b(void *userdata)
{
    return stage(userdata, 1);
}

static int stage_c(void *userdata)
{
    return stage(userdata, 2);
}

static void ended(void *userdata, int result)
{
    struct run *run = userdata;

    run->log[strlen(run->log)] = result < 0 ? '!' : '.';
    run->result = result;
}

static const sequence_stage stages[] = {stage_a, stage_b, stage_c, NULL};

static struct run begin(const char *plan)
{
    return (struct run){.sequence = {.stages = stages, .ended = ended}, .plan = plan};
}

static void test_all_at_once(void **unused)
{
    struct run run = begin("ooo");

    (void)unused;
    run.sequence.userdata = &run;
    assert_int_equal(sequence_start(&run.sequence), 0);
    assert_string_equal(run.log, "abc.");
}

static void test_waits(void **unused)
{
    struct run run = begin("wow");

    (void)unused;
    run.sequence.userdata = &run;
    assert_int_equal(sequence_start(&run.sequence), 0);
    assert_string_equal(run.log, "a");
    sequence_advance(&run.sequence, 0);
    assert_string_equal(run.log, "abc");
    sequence_done(&run.sequence, 0);
    assert_string_equal(run.log, "abc.");
}

/* If a sequence fails in sequence_start(), only the return value reports it. */
static void test_fails_at_the_start(void **unused)
{
    struct run run = begin("of");

    (void)unused;
    run.sequence.userdata = &run;
    assert_int_equal(sequence_start(&run.sequence), -ENOMEM);
    assert_string_equal(run.log, "ab");
    assert_int_equal(run.sequence.at, 1);
}

static void test_fails_later(void **unused)
{
    struct run run = begin("wfo");

    (void)unused;
    run.sequence.userdata = &run;
    assert_int_equal(sequence_start(&run.sequence), 0);
    sequence_advance(&run.sequence, 0);
    assert_string_equal(run.log, "ab!");
    assert_int_equal(run.result, -ENOMEM);
    run.plan = "woo";
    sequence_run(&run.sequence);
    assert_string_equal(run.log, "ab!bc.");
}

static void test_fails_while_it_waits(void **unused)
{
    struct run run = begin("oww");

    (void)unused;
    run.sequence.userdata = &run;
    assert_int_equal(sequence_start(&run.sequence), 0);
    sequence_advance(&run.sequence, -ECANCELED);
    assert_string_equal(run.log, "ab!");
    assert_int_equal(run.result, -ECANCELED);
    assert_int_equal(run.sequence.at, 1);
}

static void free_run(void *userdata, int result)
{
    struct run *run = userdata;

    assert_int_equal(result, 0);
    free(run);
}

static void test_may_be_freed_at_the_end(void **unused)
{
    struct run *run = malloc(sizeof(*run));

    (void)unused;
    assert_non_null(run);
    *run = begin("wwo");
    run->sequence.userdata = run;
    run->sequence.ended = free_run;
    assert_int_equal(sequence_start(&run->sequence), 0);
    sequence_advance(&run->sequence, 0);
    sequence_advance(&run->sequence, 0);
}

TEST_GROUP(sequence)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_at_once),          cmocka_unit_test(test_waits),
        cmocka_unit_test(test_fails_at_the_start),   cmocka_unit_test(test_fails_later),
        cmocka_unit_test(test_fails_while_it_waits), cmocka_unit_test(test_may_be_freed_at_the_end),
    };

    return cmocka_run_group_tests_name("sequence", tests, NULL, NULL);
}

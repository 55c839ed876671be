/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares the schedules with DeepSpeed's documented behaviour. It is written here a second time in DeepSpeed's form,
 * an object that is stepped after each applied step and counts them. Both must agree exactly, because both compute in
 * double in the same order.
 */

#include "core/base/base.h"
#include "core/config/schedule.h"
#include "tests/group.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* The stepped scheduler. Its parameters are those that a Python program passes. */
struct stepped {
    const char *name;
    bool is_log;
    long warmup_num_steps, total_num_steps;
    double warmup_min_lr, warmup_max_lr, warmup_min_ratio, cos_min_ratio;
    double base_lr;
    long last_batch_iteration;
    double lr; /* what DeepSpeed's optimizer group has now */
};

static double stepped_ramp(const struct stepped *s)
{
    if (s->is_log)
        return (1.0 / log((double)s->warmup_num_steps)) * log((double)(s->last_batch_iteration + 1));
    return (double)s->last_batch_iteration / (double)s->warmup_num_steps;
}

static double stepped_gamma(const struct stepped *s)
{
    if (s->last_batch_iteration < s->warmup_num_steps)
        return stepped_ramp(s);
    if (strcmp(s->name, "WarmupLR") == 0)
        return 1.0;

    long span = s->total_num_steps - s->warmup_num_steps;
    double left = (double)(s->total_num_steps - s->last_batch_iteration);
    double gamma = left / (double)(span > 1 ? span : 1);

    return gamma > 0 ? gamma : 0;
}

static double stepped_cosine(const struct stepped *s)
{
    if (s->last_batch_iteration < s->warmup_num_steps)
        return s->warmup_min_ratio + stepped_ramp(s) * (1.0 - s->warmup_min_ratio);

    long done = s->last_batch_iteration - s->warmup_num_steps + 1;
    long span = s->total_num_steps - s->warmup_num_steps;
    double x = (double)done / (double)(span > 1 ? span : 1);

    x = (1 + cos(M_PI * (x < 1 ? x : 1))) / 2;
    x = s->cos_min_ratio + (1.0 - s->cos_min_ratio) * x;
    return x > 0 ? x : 0;
}

static void stepped_init(struct stepped *s)
{
    if (s->warmup_num_steps < 2)
        s->warmup_num_steps = 2;
    s->last_batch_iteration = -1;
    s->lr = strcmp(s->name, "WarmupCosineLR") == 0 ? 0.0 : s->warmup_min_lr;
}

static void stepped_step(struct stepped *s)
{
    s->last_batch_iteration++;
    if (strcmp(s->name, "WarmupCosineLR") == 0)
        s->lr = s->base_lr * stepped_cosine(s);
    else
        s->lr = s->warmup_min_lr + (s->warmup_max_lr - s->warmup_min_lr) * stepped_gamma(s);
}

static struct schedule schedule_of(struct stepped *s)
{
    static const char *const names[] = {[SCHEDULE_WARMUP] = "WarmupLR",
                                        [SCHEDULE_WARMUP_DECAY] = "WarmupDecayLR",
                                        [SCHEDULE_WARMUP_COSINE] = "WarmupCosineLR"};
    struct schedule schedule = {
        .warmup_type = s->is_log ? SCHEDULE_WARMUP_LOG : SCHEDULE_WARMUP_LINEAR,
        .warmup_num_steps = (uint64_t)s->warmup_num_steps,
        .total_num_steps = (uint64_t)s->total_num_steps,
        .warmup_min_lr = {&s->warmup_min_lr, 1},
        .warmup_max_lr = {&s->warmup_max_lr, 1},
        .warmup_min_ratio = s->warmup_min_ratio,
        .cos_min_ratio = s->cos_min_ratio,
    };

    for (unsigned i = SCHEDULE_WARMUP; i < ARRAY_SIZE(names); i++) {
        if (strcmp(names[i], s->name) == 0)
            schedule.type = i;
    }
    return schedule;
}

static void compare_run(struct stepped s, unsigned n_steps)
{
    struct stepped params = s;
    struct schedule schedule = schedule_of(&params);

    stepped_init(&s);
    for (unsigned n_applied = 0; n_applied < n_steps; n_applied++) {
        double lr = schedule_lr(&schedule, &s.base_lr, 1, 0, n_applied);

        if (lr != s.lr)
            fail_msg("%s, %u steps applied: %.17g instead of %.17g", s.name, n_applied, lr, s.lr);
        stepped_step(&s);
    }
}

static void test_trajectories(void **state)
{
    static const char *const names[] = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
    static const long warmups[] = {1, 2, 3, 10, 100, 400};
    static const long totals[] = {1, 10, 11, 150, 300};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        for (size_t j = 0; j < ARRAY_SIZE(warmups); j++) {
            for (size_t k = 0; k < ARRAY_SIZE(totals); k++) {
                for (int is_log = 0; is_log < 2; is_log++)
                    compare_run((struct stepped){.name = names[i],
                                                 .is_log = is_log,
                                                 .warmup_num_steps = warmups[j],
                                                 .total_num_steps = totals[k],
                                                 .warmup_min_lr = 1e-5,
                                                 .warmup_max_lr = 3e-3,
                                                 .warmup_min_ratio = 0.01,
                                                 .cos_min_ratio = 0.1,
                                                 .base_lr = 2e-3},
                                450);
            }
        }
    }
}

/* Expected values are worked out by hand, to find a mistake that both implementations share. */
static void test_known_points(void **state)
{
    double zero = 0, max = 0.1, base = 0.5;
    struct schedule s = {.type = SCHEDULE_WARMUP_DECAY,
                         .warmup_type = SCHEDULE_WARMUP_LINEAR,
                         .warmup_num_steps = 10,
                         .total_num_steps = 110,
                         .warmup_min_lr = {&zero, 1},
                         .warmup_max_lr = {&max, 1},
                         .cos_min_ratio = 0.2};

    assert_true(schedule_lr(&s, &base, 1, 0, 0) == 0.0);
    assert_true(schedule_lr(&s, &base, 1, 0, 1) == 0.0);
    assert_true(schedule_lr(&s, &base, 1, 0, 6) == 0.05);
    assert_true(schedule_lr(&s, &base, 1, 0, 11) == 0.1);
    assert_true(schedule_lr(&s, &base, 1, 0, 61) == 0.05);
    assert_true(schedule_lr(&s, &base, 1, 0, 111) == 0.0);
    assert_true(schedule_lr(&s, &base, 1, 0, UINT64_C(1) << 50) == 0.0);

    s.type = SCHEDULE_WARMUP_COSINE;
    assert_true(schedule_lr(&s, &base, 1, 0, 0) == 0.0);
    assert_true(schedule_lr(&s, &base, 1, 0, 6) == 0.25);
    assert_true(fabs(schedule_lr(&s, &base, 1, 0, 60) - 0.5 * 0.6) < 1e-15);
    assert_true(schedule_lr(&s, &base, 1, 0, 110) == 0.5 * 0.2);
    assert_true(schedule_lr(&s, &base, 1, 0, UINT64_C(1) << 50) == 0.5 * 0.2);

    s.type = SCHEDULE_WARMUP;
    s.warmup_type = SCHEDULE_WARMUP_LOG;
    s.warmup_num_steps = 16;
    assert_true(fabs(schedule_lr(&s, &base, 1, 0, 4) - 0.1 * 0.5) < 1e-16); /* log 4 / log 16 */
    assert_true(schedule_lr(&s, &base, 1, 0, 17) == 0.1);

    s.type = SCHEDULE_NONE;
    assert_true(schedule_lr(&s, &base, 1, 0, 0) == 0.5);
    assert_true(schedule_lr(&s, &base, 1, 0, 1000) == 0.5);
}

static void test_groups(void **state)
{
    double min[] = {0, 1e-4, 0}, max[] = {0.1, 0.2, 0.4}, base[] = {1.0, 2.0, 3.0};
    struct schedule s = {.type = SCHEDULE_WARMUP,
                         .warmup_type = SCHEDULE_WARMUP_LINEAR,
                         .warmup_num_steps = 4,
                         .warmup_min_lr = {min, 3},
                         .warmup_max_lr = {max, 3}};
    const char *key = NULL;

    assert_int_equal(schedule_check_groups(&s, 3, &key), 0);
    assert_true(schedule_lr(&s, base, 3, 1, 0) == 1e-4);
    assert_true(schedule_lr(&s, base, 3, 2, 3) == 0.2);
    assert_true(schedule_lr(&s, base, 3, 0, 100) == 0.1);

    assert_int_equal(schedule_check_groups(&s, 2, &key), SCHEDULE_E_GROUPS);
    assert_string_equal(key, "scheduler.params.warmup_min_lr");
    s.warmup_min_lr.n_items = 1; /* one number fits any number of groups */
    assert_int_equal(schedule_check_groups(&s, 4, &key), SCHEDULE_E_GROUPS);
    assert_string_equal(key, "scheduler.params.warmup_max_lr");
    s.warmup_max_lr.n_items = 0;
    assert_int_equal(schedule_check_groups(&s, 4, &key), 0);

    /* If warmup_max_lr is not set, each group warms up to its own lr. */
    assert_true(schedule_lr(&s, base, 3, 0, 100) == 1.0);
    assert_true(schedule_lr(&s, base, 3, 2, 3) == 1.5);
    assert_true(schedule_lr(&s, base, 3, 2, 100) == 3.0);

    /* The cosine is relative to each group's own lr. */
    s.type = SCHEDULE_WARMUP_COSINE;
    s.total_num_steps = 100;
    assert_true(schedule_lr(&s, base, 3, 2, 3) == 1.5);
}

TEST_GROUP(schedule)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trajectories),
        cmocka_unit_test(test_known_points),
        cmocka_unit_test(test_groups),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares the dynamic loss scale with DeepSpeed's rules. They are written here a second time with DeepSpeed's
 * variables: an iteration counter, the last iteration that overflowed, and the current hysteresis. Both must agree
 * exactly.
 */

#include "core/base/base.h"
#include "core/config/lossscale.h"
#include "tests/group.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

struct reference {
    double cur_scale, min_scale;
    long cur_iter, last_overflow_iter, scale_window;
    long delayed_shift, cur_hysteresis;
    bool consecutive_hysteresis;
};

/* Return: whether the rules end the run, because the scale overflows at its minimum. */
static bool reference_update(struct reference *ref, bool overflow)
{
    bool stuck = false;

    if (overflow) {
        if (ref->delayed_shift != 1 && ref->cur_hysteresis != 1)
            ref->cur_hysteresis -= 1;
        else if (ref->cur_scale == ref->min_scale)
            stuck = true;
        else
            ref->cur_scale = ref->cur_scale / 2 > ref->min_scale ? ref->cur_scale / 2 : ref->min_scale;
        ref->last_overflow_iter = ref->cur_iter;
    } else {
        long stable_interval = ref->cur_iter - ref->last_overflow_iter - 1;

        if (ref->consecutive_hysteresis)
            ref->cur_hysteresis = ref->delayed_shift;
        if (stable_interval > 0 && stable_interval % ref->scale_window == 0) {
            if (!ref->consecutive_hysteresis)
                ref->cur_hysteresis = ref->delayed_shift;
            ref->cur_scale *= 2;
        }
    }
    ref->cur_iter += 1;
    return stuck;
}

static struct reference reference_of(const struct lossscale_params *params)
{
    return (struct reference){
        .cur_scale = pow(2, params->initial_power),
        .min_scale = params->min_scale,
        .last_overflow_iter = -1,
        .scale_window = (long)params->window,
        .delayed_shift = params->hysteresis,
        .cur_hysteresis = params->hysteresis,
        .consecutive_hysteresis = params->consecutive_hysteresis,
    };
}

/* Return: how many overflows happened at the minimum. */
static unsigned compare_run(const struct lossscale_params *params, unsigned n_steps, unsigned percent)
{
    struct reference ref = reference_of(params);
    struct lossscale ls;
    unsigned n_stuck = 0;

    lossscale_init(&ls, params);
    assert_true(ls.dynamic);
    for (unsigned i = 0; i < n_steps; i++) {
        bool overflow = (unsigned)(rand() % 100) < percent;
        bool stuck = reference_update(&ref, overflow);

        assert_int_equal(lossscale_update(&ls, overflow), stuck ? LOSSSCALE_E_AT_MINIMUM : 0);
        if (ls.scale != ref.cur_scale || ls.hysteresis_left != ref.cur_hysteresis)
            fail_msg("after step %u: scale %g instead of %g, hysteresis %u instead of %ld", i, ls.scale, ref.cur_scale,
                     ls.hysteresis_left, ref.cur_hysteresis);
        n_stuck += stuck;
    }
    return n_stuck;
}

static void test_trajectories(void **state)
{
    static const uint64_t windows[] = {1, 2, 7, 50};
    static const double minima[] = {1, 0.25, 1000};
    static const unsigned percents[] = {0, 3, 30, 70, 100};
    unsigned n_stuck = 0;

    srand(1);
    for (size_t i = 0; i < ARRAY_SIZE(windows); i++) {
        for (size_t j = 0; j < ARRAY_SIZE(minima); j++) {
            for (size_t k = 0; k < ARRAY_SIZE(percents); k++) {
                for (unsigned hysteresis = 1; hysteresis <= 4; hysteresis++) {
                    struct lossscale_params params = {.initial_power = 12,
                                                      .window = windows[i],
                                                      .hysteresis = hysteresis,
                                                      .consecutive_hysteresis = (i + j + k) % 2,
                                                      .min_scale = minima[j]};

                    n_stuck += compare_run(&params, 100, percents[k]);
                    params.consecutive_hysteresis = !params.consecutive_hysteresis;
                    n_stuck += compare_run(&params, 100, percents[k]);
                }
            }
        }
    }
    assert_true(n_stuck > 100); /* overflows at the minimum were frequent */
}

/* The defaults of the section fp16; expected scales worked out by hand. */
static void test_known_points(void **state)
{
    struct lossscale_params params = {.initial_power = 16, .window = 1000, .hysteresis = 2, .min_scale = 1};
    struct lossscale ls;

    lossscale_init(&ls, &params);
    assert_true(ls.scale == 65536);
    lossscale_update(&ls, true);
    assert_true(ls.scale == 65536); /* one of two units of hysteresis is used up */
    lossscale_update(&ls, true);
    assert_true(ls.scale == 32768);
    lossscale_update(&ls, true);
    assert_true(ls.scale == 16384); /* no unit came back */

    for (int i = 0; i < 1000; i++)
        lossscale_update(&ls, false);
    assert_true(ls.scale == 16384);
    lossscale_update(&ls, false);
    assert_true(ls.scale == 32768); /* a window of 1000 has passed */
    lossscale_update(&ls, true);
    assert_true(ls.scale == 32768); /* the hysteresis was full again since the scale doubled */
}

static void test_consecutive_hysteresis(void **state)
{
    struct lossscale_params params = {
        .initial_power = 8, .window = 1000, .hysteresis = 3, .consecutive_hysteresis = true, .min_scale = 1};
    struct lossscale ls;

    lossscale_init(&ls, &params);
    for (int i = 0; i < 10; i++) {
        lossscale_update(&ls, true);
        lossscale_update(&ls, true);
        lossscale_update(&ls, false); /* never three overflows in a row */
    }
    assert_true(ls.scale == 256);
    for (int i = 0; i < 3; i++)
        lossscale_update(&ls, true);
    assert_true(ls.scale == 128);
}

static void test_minimum(void **state)
{
    struct lossscale_params params = {.initial_power = 1, .window = 2, .hysteresis = 1, .min_scale = 1};
    struct lossscale ls;

    lossscale_init(&ls, &params);
    assert_int_equal(lossscale_update(&ls, true), 0);
    assert_true(ls.scale == 1);
    assert_int_equal(lossscale_update(&ls, true), LOSSSCALE_E_AT_MINIMUM);
    assert_int_equal(lossscale_update(&ls, true), LOSSSCALE_E_AT_MINIMUM);
    assert_true(ls.scale == 1);
    for (int i = 0; i < 3; i++)
        assert_int_equal(lossscale_update(&ls, false), 0);
    assert_true(ls.scale == 2); /* the scale recovers from its minimum */
}

static void test_static(void **state)
{
    struct lossscale_params params = {.static_scale = 128, .window = 1, .hysteresis = 1, .min_scale = 1};
    struct lossscale ls;

    lossscale_init(&ls, &params);
    assert_false(ls.dynamic);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(lossscale_update(&ls, i % 3 == 0), 0);
        assert_true(ls.scale == 128);
    }
    lossscale_init_off(&ls);
    assert_int_equal(lossscale_update(&ls, true), 0);
    assert_true(ls.scale == 1);
}

static void test_ceiling(void **state)
{
    struct lossscale_params params = {.initial_power = 60, .window = 1, .hysteresis = 1, .min_scale = 1};
    struct lossscale ls;

    lossscale_init(&ls, &params);
    for (int i = 0; i < 2000; i++)
        lossscale_update(&ls, false);
    assert_true(ls.scale == 0x1p127); /* the largest power of two that fp32 holds */
    lossscale_update(&ls, true);
    assert_true(ls.scale == 0x1p126);
}

TEST_GROUP(lossscale)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trajectories),
        cmocka_unit_test(test_known_points),
        cmocka_unit_test(test_consecutive_hysteresis),
        cmocka_unit_test(test_minimum),
        cmocka_unit_test(test_static),
        cmocka_unit_test(test_ceiling),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

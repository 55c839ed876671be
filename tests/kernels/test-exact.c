/* SPDX-License-Identifier: Apache-2.0 */

/* The exact sum is compared with a number that is kept bit by bit. */

#include "core/base/base.h"
#include "kernels/exact.h"
#include "tests/group.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Random bits: splitmix64, one state per test so that a failure repeats. */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* A number of 1024 bits, one in each byte, the lowest first. The unit is 2^-400. */
struct bits {
    uint8_t bit[1024];
};

static void bits_add(struct bits *sum, double value)
{
    int exponent;
    uint64_t mantissa = (uint64_t)ldexp(frexp(value, &exponent), 53);

    for (int i = 0; value > 0 && i < 53; i++) {
        if (!(mantissa >> i & 1))
            continue;
        for (int at = 400 + exponent - 53 + i; (sum->bit[at] ^= 1) == 0; at++)
            ;
    }
}

static double bits_round(const struct bits *sum)
{
    int top = 1023, unit;
    double value = 0;
    bool half, more = false;

    while (top >= 0 && !sum->bit[top])
        top--;
    if (top < 0)
        return 0;
    unit = MAX(top - 52, 0);
    for (int i = top; i >= unit; i--)
        value = 2 * value + sum->bit[i];
    half = unit > 0 && sum->bit[unit - 1];
    for (int i = 0; i < unit - 1; i++)
        more |= sum->bit[i];
    if (half && (more || sum->bit[unit]))
        value += 1;
    return ldexp(value, unit - 400);
}

static double random_square(uint64_t *seed, int spread)
{
    uint64_t r = next(seed);
    int exponent = spread == 0 ? (int)(r >> 60) : -298 + (int)((r >> 50) % 600);

    return ldexp((double)(next(seed) >> 11), exponent - 53 < -298 ? -298 : exponent - 53);
}

/* Adds values one by one, with bins, and in pieces that are merged in both directions. All results must be exact. */
static void check_exact(const double *values, size_t n)
{
    struct exact_sum one = {0}, forward = {0}, backward = {0}, binned = {0}, piece[7] = {0};
    static struct exact_bins bins;
    struct bits reference = {0};
    double expected;

    exact_bins_init(&bins);
    for (size_t i = 0; i < n; i++) {
        bits_add(&reference, values[i]);
        exact_sum_add(&one, values[i]);
        exact_sum_add(&piece[i % 7], values[n - 1 - i]);
        exact_bins_add(&bins, values[i]);
        if (i % EXACT_BINS_MAX_ADDS == EXACT_BINS_MAX_ADDS - 1)
            exact_bins_flush(&bins, &binned);
    }
    exact_bins_flush(&bins, &binned);
    for (int i = 0; i < 7; i++) {
        exact_sum_merge(&forward, &piece[i]);
        exact_sum_merge(&backward, &piece[6 - i]);
    }
    expected = bits_round(&reference);
    assert_true(exact_sum_round(&one) == expected);
    assert_int_equal(exact_sum_is_zero(&one), expected == 0);
    exact_sum_carry(&one);
    exact_sum_carry(&forward);
    exact_sum_carry(&backward);
    exact_sum_carry(&binned);
    assert_memory_equal(&one, &forward, sizeof(one));
    assert_memory_equal(&one, &backward, sizeof(one));
    assert_memory_equal(&one, &binned, sizeof(one));
    assert_true(exact_sum_round(&one) == expected);
}

static void test_exact_random(void **state)
{
    static double values[5000];
    uint64_t seed = 2;

    for (int round = 0; round < 60; round++) {
        size_t n = round < 50 ? (size_t)(next(&seed) % 40) : ARRAY_SIZE(values);

        for (size_t i = 0; i < n; i++)
            values[i] = random_square(&seed, round % 3);
        check_exact(values, n);
    }
}

static void test_exact_adversarial(void **state)
{
    const double tie = 0x1p-53, tiny = 0x1p-298, huge = 0x1p310;
    const double cases[][4] = {
        {0, 0, 0, 0},
        {tiny, tiny, tiny, 0},
        {1, tie, 0, 0},                          /* half, the even neighbour is below */
        {1 + 0x1p-52, tie, 0, 0},                /* half, the even neighbour is above */
        {1, tie, tiny, 0},                       /* just above half */
        {tiny, 1, tie, 0},                       /* the same in another order */
        {1, 0x1.fffffffffffffp-54, 0x1p-107, 0}, /* exactly half from two parts */
        {1, 0x1.fffffffffffffp-54, 0, 0},        /* just below half */
        {0x1.fffffffffffffp0, tie, 0, 0},        /* rounds up to the next power of two */
        {huge, tiny, huge, huge},                /* 600 bits apart */
        {huge * 1.5, 0x1p258, 0x1p257, tiny},
        {0x1.fffffffffffffp31, 0x1p-21, 0x1p-21, 0}, /* carries through several limbs */
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        check_exact(cases[i], 4);
}

static void test_exact_many(void **state)
{
    struct exact_sum sum = {0}, twice = {0};

    /* all bits from the lowest limb up are set, then one more is added: the carry goes through the whole number */
    for (int e = -298; e < 310; e++)
        exact_sum_add(&sum, ldexp(1, e));
    exact_sum_add(&sum, 0x1p-298);
    assert_true(exact_sum_round(&sum) == 0x1p310);

    /* deferred carries at their limit: a sum that is doubled 45 times stays exact */
    exact_sum_reset(&sum);
    exact_sum_add(&sum, 0x1.fffffffffffffp300);
    for (int i = 0; i < 45; i++) {
        twice = sum;
        exact_sum_merge(&sum, &twice);
    }
    assert_true(exact_sum_round(&sum) == 0x1.fffffffffffffp345);
}

static void test_exact_nonfinite(void **state)
{
    const double values[] = {INFINITY, -INFINITY, (double)NAN, -(double)NAN};
    static struct exact_bins bins;

    for (size_t i = 0; i < ARRAY_SIZE(values); i++) {
        struct exact_sum sum = {0}, merged = {0}, binned = {0};

        exact_sum_add(&sum, 1);
        exact_sum_add(&sum, values[i]);
        exact_sum_merge(&merged, &sum);
        assert_true(sum.nonfinite && merged.nonfinite);
        assert_true(isnan(values[i]) ? isnan(exact_sum_round(&merged)) : exact_sum_round(&merged) == INFINITY);
        assert_false(exact_sum_is_zero(&merged));
        exact_sum_reset(&merged);
        assert_true(exact_sum_is_zero(&merged));
        exact_bins_init(&bins);
        exact_bins_add(&bins, fabs(values[i]));
        exact_bins_flush(&bins, &binned);
        assert_true(binned.nonfinite);
        exact_sum_reset(&binned);
        exact_bins_flush(&bins, &binned);
        assert_true(exact_sum_is_zero(&binned));
    }
}

static void test_may_reach(void **state)
{
    (void)state;
    for (int e = -290; e < 300; e++) {
        struct exact_sum sum = {0};

        assert_false(exact_sum_may_reach(&sum, e));
        exact_sum_add(&sum, ldexp(1.5, e));
        assert_true(exact_sum_may_reach(&sum, e));
        assert_false(exact_sum_may_reach(&sum, e + 65));
        exact_sum_reset(&sum);
        for (unsigned i = 0; i < 8; i++) /* makes some deferred carries */
            exact_sum_add(&sum, ldexp(1.0, e - 3));
        assert_true(exact_sum_may_reach(&sum, e));
        exact_sum_add(&sum, INFINITY);
        assert_true(exact_sum_may_reach(&sum, 383));
    }
}

TEST_GROUP(exact)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_may_reach),         cmocka_unit_test(test_exact_random),
        cmocka_unit_test(test_exact_adversarial), cmocka_unit_test(test_exact_many),
        cmocka_unit_test(test_exact_nonfinite),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

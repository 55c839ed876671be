/* SPDX-License-Identifier: Apache-2.0 */

/* Which values of hyperparameters each optimizer accepts. */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/wire/hyper-check.h"
#include "tests/group.h"

static const struct wire_hyper usual = {
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .momentum = 0.9, .ns_steps = 5};

static void test_usual(void **state)
{
    static const char *const names[] = {"Adam", "AdamW", "SGD", "Lion", "Adagrad", "Muon"};
    struct hyper_problem problem;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        assert_false(hyper_is_wrong(names[i], &usual, &problem));
    assert_false(hyper_is_wrong("AdamW", &(struct wire_hyper){.eps = 1e-8}, &problem)); /* lr 0 freezes a group */
}

static void test_wrong(void **state)
{
    static const struct {
        const char *optimizer, *name;
        size_t offset;
        double value;
    } cases[] = {
        {"AdamW", "lr", offsetof(struct wire_hyper, lr), -0.5},
        {"SGD", "lr", offsetof(struct wire_hyper, lr), NAN},
        {"Lion", "lr", offsetof(struct wire_hyper, lr), 1e300},
        {"Adagrad", "lr", offsetof(struct wire_hyper, lr), INFINITY},
        {"Adam", "beta1", offsetof(struct wire_hyper, beta1), 1},
        {"Lion", "beta2", offsetof(struct wire_hyper, beta2), -0.1},
        {"Adam", "eps", offsetof(struct wire_hyper, eps), 0},
        {"Adagrad", "eps", offsetof(struct wire_hyper, eps), 1e-60},
        {"SGD", "weight_decay", offsetof(struct wire_hyper, weight_decay), -1},
        {"SGD", "momentum", offsetof(struct wire_hyper, momentum), 1.5},
        {"SGD", "momentum", offsetof(struct wire_hyper, momentum), -1},
        {"SGD", "dampening", offsetof(struct wire_hyper, dampening), NAN},
        {"Adagrad", "lr_decay", offsetof(struct wire_hyper, lr_decay), -1e-9},
        {"Muon", "momentum", offsetof(struct wire_hyper, momentum), 1},
        {"Muon", "beta2", offsetof(struct wire_hyper, beta2), 1},
        {"Muon", "ns_coefficients[1]", offsetof(struct wire_hyper, ns_b), 1e300},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct wire_hyper hyper = usual;
        struct hyper_problem problem = {0};

        memcpy((char *)&hyper + cases[i].offset, &cases[i].value, sizeof(double));
        assert_true(hyper_is_wrong(cases[i].optimizer, &hyper, &problem));
        assert_string_equal(problem.name, cases[i].name);
        assert_non_null(problem.expected);
    }
}

static void test_not_read(void **state)
{
    struct wire_hyper hyper = usual;
    struct hyper_problem problem;

    (void)state;
    hyper.momentum = -1;
    hyper.lr_decay = NAN;
    assert_false(hyper_is_wrong("AdamW", &hyper, &problem));
    hyper = usual;
    hyper.beta1 = hyper.eps = -1;
    assert_false(hyper_is_wrong("SGD", &hyper, &problem));
}

static void test_nesterov(void **state)
{
    struct wire_hyper hyper = usual;
    struct hyper_problem problem;

    (void)state;
    hyper.nesterov = true;
    assert_false(hyper_is_wrong("SGD", &hyper, &problem));
    assert_false(hyper_is_wrong("AdamW", &hyper, &problem));
    hyper.dampening = 0.1;
    assert_true(hyper_is_wrong("SGD", &hyper, &problem));
    hyper.dampening = hyper.momentum = 0;
    assert_true(hyper_is_wrong("SGD", &hyper, &problem));
    assert_string_equal(problem.name, "nesterov");
}

static void test_ns_steps(void **state)
{
    struct wire_hyper hyper = usual;
    struct hyper_problem problem;

    (void)state;
    hyper.ns_steps = 0;
    assert_false(hyper_is_wrong("SGD", &hyper, &problem));
    assert_true(hyper_is_wrong("Muon", &hyper, &problem));
    assert_string_equal(problem.name, "ns_steps");
    hyper.ns_steps = 99;
    assert_false(hyper_is_wrong("Muon", &hyper, &problem));
    hyper.ns_steps = 100;
    assert_true(hyper_is_wrong("Muon", &hyper, &problem));
}

static void expect_same(const struct wire_hyper *a, const struct wire_hyper *b)
{
#define SAME(kind, field, plain, text, gives, range, only) assert_true(a->field == b->field);
    HYPER_FIELDS(SAME)
#undef SAME
}

/* hyper_merge() takes the given settings from `wanted`, and the others from the configuration. */
static void test_merge(void **state)
{
    const struct wire_hyper configured = {.lr = 1,
                                          .beta1 = 0.5,
                                          .beta2 = 0.6,
                                          .eps = 1e-3,
                                          .weight_decay = 2,
                                          .ns_a = 3,
                                          .ns_c = 4,
                                          .ns_steps = 5,
                                          .nesterov = true,
                                          .match_rms_adamw = true};
    struct wire_hyper wanted = {.lr = 10, .beta1 = 0.1, .beta2 = 0.2, .eps = 1e-2, .weight_decay = 20, .ns_c = 40},
                      merged;

    (void)state;
    merged = hyper_merge(&configured, &wanted); /* given 0 means that all are given */
    expect_same(&merged, &wanted);
    wanted.given = 1;
    merged = hyper_merge(&configured, &wanted);
    assert_true(merged.lr == 1 && merged.beta1 == 0.5 && merged.weight_decay == 2 && merged.ns_steps == 5);
    assert_true(merged.given == 1 && merged.nesterov && merged.match_rms_adamw);
    wanted.given = WIRE_GIVES_BETAS | WIRE_GIVES_NS_COEFFICIENTS | WIRE_GIVES_NESTEROV;
    merged = hyper_merge(&configured, &wanted);
    assert_true(merged.lr == 1 && merged.beta1 == 0.1 && merged.beta2 == 0.2 && merged.eps == 1e-3);
    assert_true(merged.ns_a == 0 && merged.ns_c == 40 && merged.ns_steps == 5 && !merged.nesterov);
}

TEST_GROUP(hyper_check)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge),    cmocka_unit_test(test_usual),    cmocka_unit_test(test_wrong),
        cmocka_unit_test(test_not_read), cmocka_unit_test(test_nesterov), cmocka_unit_test(test_ns_steps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

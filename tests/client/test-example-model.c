/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares the example model with finite differences. Tests what the example trainer relies on (each gradient once, in
 * backward order, with the same bits in every run), and the arithmetic of the reference.
 */

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/example/model.h"
#include "tests/example/ops.h"
#include "tests/example/random.h"
#include "tests/example/reference_step.h"
#include "tests/example/text.h"

static const struct model_shape SHAPE = {.n_layers = 2, .width = 32, .n_heads = 2, .n_seqs = 3, .seq_len = 16};

/* A model with weights, gradients and one batch. Its hooks record their calls. */
struct fixture {
    struct model *model;
    unsigned n_params;
    float **weights, **grads;
    unsigned *n_ready;     /* [parameter]: how often its gradient was announced */
    unsigned *ready_order; /* parameters in the order of announcement */
    unsigned n_ready_total;
    int entered; /* the segment that the backward is in, or -1 */
    unsigned n_entered;
    int fail_enter_at, fail_grad_at; /* when the hook fails; -1: never */
    uint8_t tokens[3 * 16], targets[3 * 16];
};

static int on_enter(void *ctx, unsigned segment)
{
    struct fixture *f = ctx;

    assert_int_equal(f->entered, -1);
    if ((int)segment == f->fail_enter_at)
        return 3;
    f->entered = (int)segment;
    f->n_entered++;
    return 0;
}

static int on_leave(void *ctx, unsigned segment)
{
    struct fixture *f = ctx;

    assert_int_equal(f->entered, segment);
    f->entered = -1;
    return 0;
}

static int on_grad(void *ctx, unsigned param, float **out)
{
    struct fixture *f = ctx;

    assert_int_equal(model_segment_of(f->model, param), f->entered);
    if ((int)param == f->fail_grad_at)
        return 2;
    /* The old contents must not count. */
    for (size_t e = 0; e < model_param(f->model, param)->n_elems; e++)
        f->grads[param][e] = NAN;
    *out = f->grads[param];
    return 0;
}

static int on_grad_ready(void *ctx, unsigned param)
{
    struct fixture *f = ctx;

    f->n_ready[param]++;
    f->ready_order[f->n_ready_total++ % f->n_params] = param;
    return 0;
}

static struct model_hooks hooks_of(struct fixture *f)
{
    return (struct model_hooks){f, on_enter, on_leave, on_grad, on_grad_ready};
}

static double forward(struct fixture *f)
{
    struct model_hooks hooks = hooks_of(f);
    double loss = NAN;

    assert_int_equal(model_forward(f->model, (const float *const *)f->weights, &hooks, f->tokens, f->targets, &loss),
                     0);
    return loss;
}

static void backward(struct fixture *f, double scale)
{
    struct model_hooks hooks = hooks_of(f);

    assert_int_equal(model_backward(f->model, (const float *const *)f->weights, &hooks, scale), 0);
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_int_equal(model_new(&f->model, &SHAPE), 0);
    f->n_params = model_n_params(f->model);
    f->weights = calloc(f->n_params, sizeof(*f->weights));
    f->grads = calloc(f->n_params, sizeof(*f->grads));
    f->n_ready = calloc(f->n_params, sizeof(*f->n_ready));
    f->ready_order = calloc(f->n_params, sizeof(*f->ready_order));
    f->entered = f->fail_enter_at = f->fail_grad_at = -1;
    for (unsigned i = 0; i < f->n_params; i++) {
        size_t n = model_param(f->model, i)->n_elems;

        f->weights[i] = malloc(n * sizeof(float));
        f->grads[i] = malloc(n * sizeof(float));
        model_init_weights(f->model, 7, i, f->weights[i]);
        /* Larger than initial weights, so that every path has a gradient that is large enough to compare. */
        for (size_t e = 0; e < n; e++)
            f->weights[i][e] += (float)(0.3 * (random_unit(1000 + i, e) - 0.5));
    }
    for (unsigned i = 0; i < sizeof(f->tokens); i++) {
        f->tokens[i] = random_mix(i) % MODEL_VOCABULARY;
        f->targets[i] = random_mix(i + 1000) % MODEL_VOCABULARY;
    }
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    for (unsigned i = 0; i < f->n_params; i++) {
        free(f->weights[i]);
        free(f->grads[i]);
    }
    free(f->weights);
    free(f->grads);
    free(f->n_ready);
    free(f->ready_order);
    model_free(f->model);
    free(f);
    return 0;
}

/* Return: (loss(w + step * direction) - loss(w - step * direction)) / (2 step) of one parameter. Restores w. */
static double slope(struct fixture *f, unsigned param, const float *direction, double step)
{
    size_t n = model_param(f->model, param)->n_elems;
    float *kept = malloc(n * sizeof(float));
    double loss[2];

    memcpy(kept, f->weights[param], n * sizeof(float));
    for (unsigned side = 0; side < 2; side++) {
        for (size_t e = 0; e < n; e++)
            f->weights[param][e] = (float)(kept[e] + (side ? -step : step) * direction[e]);
        loss[side] = forward(f);
    }
    memcpy(f->weights[param], kept, n * sizeof(float));
    free(kept);
    return (loss[0] - loss[1]) / (2 * step);
}

/*
 * Compares slopes with the gradient along two directions. Along the gradient itself, the slope is its length. Along a
 * random direction, a wrong element is found that the first comparison misses.
 */
static void check_param(struct fixture *f, unsigned param)
{
    size_t n = model_param(f->model, param)->n_elems;
    float *direction = malloc(n * sizeof(float));
    double square = 0, dot = 0, length = 0, got;

    for (size_t e = 0; e < n; e++)
        square += (double)f->grads[param][e] * f->grads[param][e];
    assert_true(square > 0);
    for (size_t e = 0; e < n; e++)
        direction[e] = (float)(f->grads[param][e] / sqrt(square));
    got = slope(f, param, direction, 3e-3);
    if (fabs(got - sqrt(square)) > 5e-3 * sqrt(square) + 2e-4)
        fail_msg("%s: slope %g, gradient %g", model_param(f->model, param)->name, got, sqrt(square));

    for (size_t e = 0; e < n; e++) {
        direction[e] = (float)(random_unit(99 + param, e) - 0.5);
        length += (double)direction[e] * direction[e];
    }
    for (size_t e = 0; e < n; e++) {
        direction[e] = (float)(direction[e] / sqrt(length));
        dot += (double)direction[e] * f->grads[param][e];
    }
    got = slope(f, param, direction, 3e-3);
    if (fabs(got - dot) > 5e-3 * sqrt(square) + 2e-4)
        fail_msg("%s: slope %g along a random direction, gradient %g", model_param(f->model, param)->name, got, dot);
    free(direction);
}

static void test_gradients_are_slopes(void **state)
{
    struct fixture *f = *state;

    forward(f);
    backward(f, 1.0);
    for (unsigned i = 0; i < f->n_params; i++)
        check_param(f, i);
}

static void test_scale_is_a_factor(void **state)
{
    struct fixture *f = *state;
    size_t n = model_param(f->model, 0)->n_elems;
    float *whole = malloc(n * sizeof(float));

    forward(f);
    backward(f, 1.0);
    memcpy(whole, f->grads[0], n * sizeof(float));
    backward(f, 0.25);
    /* The factor is a power of two, so the result is exact except for subnormals, and there are none. */
    for (size_t e = 0; e < n; e++)
        assert_true(f->grads[0][e] == 0.25f * whole[e]);
    free(whole);
}

static void test_every_gradient_once_in_backward_order(void **state)
{
    struct fixture *f = *state;
    unsigned last = UINT32_MAX;

    forward(f);
    assert_int_equal(f->n_ready_total, 0);
    backward(f, 1.0);
    assert_int_equal(f->n_ready_total, f->n_params);
    assert_int_equal(f->n_entered, 2 * model_n_segments(f->model));
    assert_int_equal(f->entered, -1);
    for (unsigned i = 0; i < f->n_params; i++) {
        unsigned segment = model_segment_of(f->model, f->ready_order[i]);

        assert_int_equal(f->n_ready[i], 1);
        assert_true(segment <= last);
        last = segment;
    }
}

static void test_same_bits_again(void **state)
{
    struct fixture *f = *state;
    float **first = calloc(f->n_params, sizeof(*first));
    double loss = forward(f);

    backward(f, 1.0);
    for (unsigned i = 0; i < f->n_params; i++) {
        size_t n_bytes = model_param(f->model, i)->n_elems * sizeof(float);

        first[i] = malloc(n_bytes);
        memcpy(first[i], f->grads[i], n_bytes);
    }
    assert_true(forward(f) == loss);
    backward(f, 1.0);
    backward(f, 1.0); /* a second backward through the same activations */
    for (unsigned i = 0; i < f->n_params; i++) {
        assert_memory_equal(first[i], f->grads[i], model_param(f->model, i)->n_elems * sizeof(float));
        free(first[i]);
    }
    free(first);
}

static void test_a_hook_ends_the_pass(void **state)
{
    struct fixture *f = *state;
    struct model_hooks hooks = hooks_of(f);
    const float *const *weights = (const float *const *)f->weights;
    double loss;

    f->fail_enter_at = 2;
    assert_int_equal(model_forward(f->model, weights, &hooks, f->tokens, f->targets, &loss), 3);
    assert_int_equal(f->entered, -1);
    f->fail_enter_at = -1;
    forward(f);
    f->fail_grad_at = 5;
    assert_int_equal(model_backward(f->model, weights, &hooks, 1.0), 2);
    assert_int_equal(f->entered, -1); /* each segment was left */
    assert_int_equal(f->n_ready[5], 0);
    assert_int_equal(f->n_ready[f->n_params - 1], 1);
}

/* Another target at position 3 changes the gradients of positions 0 to 3, and no bit of later positions. */
static void test_no_look_ahead(void **state)
{
    struct fixture *f = *state;
    const unsigned positions = 1, w = SHAPE.width;
    float before[16 * 32];

    forward(f);
    backward(f, 1.0);
    memcpy(before, f->grads[positions], sizeof(before));
    f->targets[3] ^= 1;
    forward(f);
    backward(f, 1.0);
    for (unsigned row = 0; row < SHAPE.seq_len; row++)
        assert_int_equal(memcmp(before + row * w, f->grads[positions] + row * w, w * sizeof(float)) == 0, row > 3);
}

static void test_transpose(void **state)
{
    float in[11 * 20], out[13 * 11];

    (void)state;
    for (unsigned i = 0; i < 11 * 20; i++)
        in[i] = (float)i;
    transpose(out, (struct mat){in, 20, 1}, 11, 13);
    for (unsigned i = 0; i < 11; i++)
        for (unsigned j = 0; j < 13; j++)
            assert_true(out[j * 11 + i] == in[i * 20 + j]);
}

static void test_bad_shapes(void **state)
{
    static const struct model_shape bad[] = {
        {0, 32, 2, 1, 8},       {1, 0, 1, 1, 8},        {1, 36, 2, 1, 8},    {1, 32, 3, 1, 8}, {1, 32, 8, 1, 8},
        {1, 32, 0, 1, 8},       {1, 32, 2, 0, 8},       {1, 32, 2, 1, 12},   {1, 32, 2, 1, 0}, {1, 1 << 20, 2, 1, 8},
        {1, 32, 2, 1 << 20, 8}, {1, 32, 2, 1, 1 << 20}, {1001, 32, 2, 1, 8},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct model *m = NULL;

        assert_int_equal(model_new(&m, &bad[i]), -EINVAL);
        assert_null(m);
    }
}

static double exact(const double *x, size_t n)
{
    struct exact_sum s = {0};

    for (size_t i = 0; i < n; i++)
        exact_sum_add(&s, x[i]);
    return exact_sum_round(&s);
}

static void test_exact_sum(void **state)
{
    const double half_way_up[] = {1.0, 0x1p-53, 0x1p-200};
    const double half_way_down[] = {1.0, 0x1p-53, -0x1p-200};
    const double half_way_even[] = {1.0, 0x1p-53};
    const double half_way_odd[] = {1.0 + 0x1p-52, 0x1p-53};
    const double cancels[] = {0x1p300, 1.0, 0x1p-300, -0x1p300, -1.0};

    (void)state;
    assert_true(exact(NULL, 0) == 0);
    assert_true(exact(half_way_up, 3) == 1.0 + 0x1p-52);
    assert_true(exact(half_way_down, 3) == 1.0);
    assert_true(exact(half_way_even, 2) == 1.0);
    assert_true(exact(half_way_odd, 2) == 1.0 + 0x1p-51);
    assert_true(exact(cancels, 5) == 0x1p-300);
}

/* Any order of the same numbers gives the same bits. */
static void test_exact_sum_has_no_order(void **state)
{
    double x[1000], forth, back;

    (void)state;
    for (unsigned i = 0; i < 1000; i++)
        x[i] = ldexp(random_unit(5, i), (int)(random_mix(i) % 120) - 60);
    forth = exact(x, 1000);
    for (unsigned i = 0; i < 500; i++) {
        double kept = x[i];

        x[i] = x[999 - i];
        x[999 - i] = kept;
    }
    back = exact(x, 1000);
    assert_true(forth == back);
}

/* Any other order of these numbers has another sum. */
static void test_sum_over_ranks_is_a_tree(void **state)
{
    const float g[6] = {0x1p24f, 1.0f, -0x1p24f, 3.0f, 0.5f, 0x1p-3f};
    const float *grads[6];
    float acc;

    (void)state;
    for (unsigned r = 0; r < 6; r++)
        grads[r] = &g[r];
    acc = 10;
    reference_accumulate(&acc, grads, 6, 1);
    assert_true(acc == 10 + (((g[0] + g[1]) + (g[2] + g[3])) + (g[4] + g[5])));
    acc = -0.0f;
    reference_accumulate(&acc, grads, 3, 1);
    assert_true(acc == (g[0] + g[1]) + g[2]);
}

/*
 * One element by hand. AdamW's first step moves the element by lr against the gradient's sign; exp_avg shows the
 * clipping.
 */
static void test_reference_step(void **state)
{
    float weight = 1, acc = 6, exp_avg = 0, exp_avg_sq = 0;
    const struct reference_param param = {1, &weight, &acc, &exp_avg, &exp_avg_sq};
    struct reference_adamw adamw = {0.1, 0.9, 0.99, 0, 0.5, 1.5, 1, 2};
    double norm;

    (void)state;
    assert_true(reference_step(&param, 1, &adamw, &norm));
    assert_true(norm == 3);                  /* norm of the mean over two ranks */
    assert_float_equal(exp_avg, 0.15, 1e-6); /* clipped to 1.5, times 1 - beta1 */
    assert_float_equal(weight, 0.95 - 0.1, 1e-6);

    acc = INFINITY;
    weight = 1;
    assert_false(reference_step(&param, 1, &adamw, &norm));
    assert_true(weight == 1);
}

static void write_file(const char *folder, const char *name, const char *content)
{
    char path[256];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    f = fopen(path, "w");
    assert_non_null(f);
    fputs(content, f);
    fclose(f);
}

static void remove_in(const char *folder, const char *name)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    assert_int_equal(remove(path), 0);
}

static void test_text_is_regular_files_by_name(void **state)
{
    char folder[] = "/tmp/zerod-text-XXXXXX", path[256];
    struct text t;

    (void)state;
    assert_non_null(mkdtemp(folder));
    write_file(folder, "b", "second\xc3\xa9");
    write_file(folder, "B", "first ");
    snprintf(path, sizeof(path), "%s/a", folder);
    assert_int_equal(symlink("b", path), 0);
    snprintf(path, sizeof(path), "%s/c", folder);
    assert_int_equal(mkdir(path, 0700), 0);

    assert_int_equal(text_load(&t, folder), 0);
    assert_int_equal(t.n_chars, 14);
    assert_memory_equal(t.chars, "first second\x7f\x7f", 14);
    text_deinit(&t);

    remove_in(folder, "a");
    remove_in(folder, "b");
    remove_in(folder, "B");
    assert_int_equal(text_load(&t, folder), -ENODATA);
    remove_in(folder, "c");
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(text_load(&t, folder), -ENOENT);
}

static void test_batches(void **state)
{
    uint8_t chars[200], tokens[3][4 * 8], targets[3][4 * 8];
    struct text t = {chars, sizeof(chars)};
    struct text_batch b = {.seed = 1, .step = 2, .micro_batch = 3, .rank = 4, .n_seqs = 4, .seq_len = 8};

    (void)state;
    for (unsigned i = 0; i < sizeof(chars); i++)
        chars[i] = i % 128;
    assert_int_equal(text_fill(&t, &b, tokens[0], targets[0]), 0);
    assert_int_equal(text_fill(&t, &b, tokens[1], targets[1]), 0);
    assert_memory_equal(tokens[0], tokens[1], sizeof(tokens[0]));
    assert_memory_equal(targets[0], targets[1], sizeof(targets[0]));
    for (unsigned i = 0; i < 4 * 8; i++)
        assert_int_equal(targets[0][i], (tokens[0][i] + 1) % 128);
    b.rank = 5;
    assert_int_equal(text_fill(&t, &b, tokens[2], targets[2]), 0);
    assert_memory_not_equal(tokens[0], tokens[2], sizeof(tokens[0]));

    t.n_chars = 9; /* the shortest text with a sequence and its last target */
    assert_int_equal(text_fill(&t, &b, tokens[0], targets[0]), 0);
    assert_memory_equal(tokens[0], chars, 8);
    t.n_chars = 8;
    assert_int_equal(text_fill(&t, &b, tokens[0], targets[0]), -ENODATA);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_gradients_are_slopes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_scale_is_a_factor, setup, teardown),
        cmocka_unit_test_setup_teardown(test_every_gradient_once_in_backward_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_same_bits_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_hook_ends_the_pass, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_look_ahead, setup, teardown),
        cmocka_unit_test(test_bad_shapes),
        cmocka_unit_test(test_transpose),
        cmocka_unit_test(test_exact_sum),
        cmocka_unit_test(test_exact_sum_has_no_order),
        cmocka_unit_test(test_sum_over_ranks_is_a_tree),
        cmocka_unit_test(test_reference_step),
        cmocka_unit_test(test_text_is_regular_files_by_name),
        cmocka_unit_test(test_batches),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

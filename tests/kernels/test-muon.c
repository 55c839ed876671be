/* SPDX-License-Identifier: Apache-2.0 */

/* Muon: the first pass is compared with a loop in plain C, and orthogonalising with products in double. */

#include "core/base/base.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/muon.h"
#include "tests/group.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static float random_value(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005 + 1442695040888963407;
    return (float)((int64_t)*seed >> 40) * 0x1p-20f;
}

static const struct hyper usual = {.lr = 0.02,
                                   .momentum = 0.95,
                                   .eps = 1e-8,
                                   .weight_decay = 0.1,
                                   .ns_coefficients = {3.4445, -4.775, 2.0315},
                                   .ns_steps = 5,
                                   .nesterov = true};

/* ---- the first pass -------------------------------------------------------------------------------------- */

enum { N_ELEMS = 1000 };

static void check_first_pass(const struct kernels *k, bool nesterov, enum dtype dtype)
{
    float acc[N_ELEMS], before[N_ELEMS], m[N_ELEMS], got[N_ELEMS];
    uint16_t narrow[N_ELEMS];
    struct hyper hyper = usual;
    struct update_scalars scalars;
    uint64_t seed = 1;

    hyper.nesterov = nesterov;
    update_scalars_compute(OPTIMIZER_MUON, &hyper, 0.25, 3, &scalars);
    for (size_t i = 0; i < N_ELEMS; i++) {
        acc[i] = before[i] = random_value(&seed);
        m[i] = random_value(&seed);
    }
    convert_from_f32(narrow, m, DTYPE_BF16, N_ELEMS);
    if (dtype == DTYPE_BF16)
        convert_to_f32(m, narrow, DTYPE_BF16, N_ELEMS);
    memcpy(got, m, sizeof(got));
    k->muon_momentum(&(struct update_args){.p = acc,
                                           .acc = acc,
                                           .m = dtype == DTYPE_BF16 ? (void *)narrow : got,
                                           .moments = {.dtype = dtype},
                                           .n_elems = N_ELEMS,
                                           .k = &scalars});
    if (dtype == DTYPE_BF16)
        convert_to_f32(got, narrow, DTYPE_BF16, N_ELEMS);
    for (size_t i = 0; i < N_ELEMS; i++) {
        const float mu = 0.95f, c = (float)(1 - 0.95);
        volatile float g = before[i] * 0.25f, kept = m[i] * mu, added = g * c, sum = kept + added, rounded = sum;
        volatile float again = sum * mu, next = added + again;
        uint16_t bits;

        convert_from_f32(&bits, (float *)&sum, DTYPE_BF16, 1);
        if (dtype == DTYPE_BF16)
            convert_to_f32((float *)&rounded, &bits, DTYPE_BF16, 1);
        assert_true(acc[i] == (nesterov ? next : sum));
        assert_true(got[i] == rounded);
    }
}

static void test_first_pass(void **state)
{
    const struct kernels *k;

    (void)state;
    for (unsigned i = 0; (k = kernels_nth(i)); i++)
        for (unsigned kind = 0; kind < 4; kind++)
            check_first_pass(k, kind % 2, kind / 2 ? DTYPE_BF16 : DTYPE_F32);
}

/* ---- orthogonalising --------------------------------------------------------------------------------------- */

/* c = a b, or a b' if trans. */
static void multiply(double *c, const double *a, const double *b, size_t rows, size_t inner, size_t cols, bool trans)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++) {
            double sum = 0;

            for (size_t k = 0; k < inner; k++)
                sum += a[i * inner + k] * (trans ? b[j * inner + k] : b[k * cols + j]);
            c[i * cols + j] = sum;
        }
}

/* Orthogonalises in double, always from the left: x = (a I + b x x' + c (x x')^2) x. The caller frees the result. */
static double *expected_of(const float *matrix, size_t rows, size_t cols, const struct hyper *hyper)
{
    double *x = calloc(rows * cols, sizeof(double)), *next = calloc(rows * cols, sizeof(double));
    double *gram = calloc(rows * rows, sizeof(double)), *square = calloc(rows * rows, sizeof(double)), *last;
    const double *ns = hyper->ns_coefficients;
    double norm = 0;

    for (size_t i = 0; i < rows * cols; i++)
        norm += (double)matrix[i] * (double)matrix[i];
    norm = fmax(sqrt(norm), hyper->eps);
    for (size_t i = 0; i < rows * cols; i++)
        x[i] = matrix[i] / norm;
    for (unsigned step = 0; step < hyper->ns_steps; step++) {
        multiply(gram, x, x, rows, cols, rows, true);
        multiply(square, gram, gram, rows, rows, rows, true);
        for (size_t i = 0; i < rows * rows; i++)
            gram[i] = ns[1] * gram[i] + ns[2] * square[i] + (i % (rows + 1) == 0 ? ns[0] : 0);
        multiply(next, gram, x, rows, rows, cols, false);
        last = x;
        x = next;
        next = last;
    }
    free(next);
    free(gram);
    free(square);
    return x;
}

static void check_shape(const struct gemm *gemm, size_t rows, size_t cols, float scale, const struct hyper *hyper)
{
    enum { GUARD = 16 };

    const struct muon_shape shape = {.rows = rows, .cols = cols};
    const size_t n = rows * cols, n_scratch = muon_scratch_elems(shape);
    float *matrix = calloc(n, sizeof(float)), *copy = calloc(n, sizeof(float));
    float *scratch = aligned_alloc(64, (n_scratch + GUARD) * sizeof(float));
    _Atomic(uint64_t) n_ended = 0;
    const struct muon_parts parts = {.most = 1, .n_ended = &n_ended};
    const uint64_t n_long = div_round_up(MAX(rows, cols), 256), n_short = div_round_up(MIN(rows, cols), 256);
    const float *got, *again;
    uint64_t seed = rows * 1000 + cols;
    double *expected;

    assert_int_equal(n_scratch % 16, 0);
    for (size_t i = 0; i < n; i++)
        matrix[i] = random_value(&seed) * scale;
    memcpy(copy, matrix, n * sizeof(float));
    memset(scratch, 0x7f, (n_scratch + GUARD) * sizeof(float));
    expected = expected_of(matrix, rows, cols, hyper);

    got = muon_orthogonalize(gemm, shape, matrix, hyper, scratch, &parts);
    /* `most` is so small that each part has 256 slices. */
    assert_int_equal(n_ended, hyper->ns_steps * (2 * n_long + n_short));
    assert_in_range(got - scratch, 0, (ptrdiff_t)(n_scratch - n));
    for (size_t i = 0; i < n; i++)
        assert_true(fabs((double)got[i] - expected[i]) < 2e-4);
    assert_memory_equal(matrix, copy, n * sizeof(float));
    for (size_t i = n_scratch * sizeof(float); i < (n_scratch + GUARD) * sizeof(float); i++)
        assert_int_equal(((uint8_t *)scratch)[i], 0x7f);

    /* A second call gives the same bits, whatever the scratch memory contains. */
    memcpy(copy, got, n * sizeof(float));
    memset(scratch, 0xff, n_scratch * sizeof(float));
    again = muon_orthogonalize(gemm, shape, matrix, hyper, scratch, &parts);
    assert_memory_equal(again, copy, n * sizeof(float));
    free(matrix);
    free(copy);
    free(scratch);
    free(expected);
}

static const struct gemm *load(void)
{
    const struct gemm *gemm, *again;
    char why[256];

    if (gemm_load(&gemm, why, sizeof(why)) < 0)
        fail_msg("%s", why);
    assert_int_equal(gemm_load(&again, why, sizeof(why)), 0);
    assert_ptr_equal(gemm, again);
    return gemm;
}

static void test_orthogonalize(void **state)
{
    static const size_t sides[][2] = {{1, 1},   {1, 7},    {7, 1},    {2, 3},     {16, 16},  {17, 33},  {33, 17},
                                      {64, 65}, {130, 63}, {63, 130}, {100, 100}, {40, 600}, {600, 40}, {300, 300}};
    const struct gemm *gemm = load();
    struct hyper hyper = usual;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(sides); i++) {
        for (unsigned scale = 0; scale < 3; scale++) /* the last scale makes the norm smaller than eps */
            check_shape(gemm, sides[i][0], sides[i][1], (float[]){1, 1e-6f, 1e-20f}[scale], &usual);
        check_shape(gemm, sides[i][0], sides[i][1], 0, &usual);
    }
    hyper.ns_steps = 1;
    hyper.ns_coefficients[0] = 1.5;
    hyper.ns_coefficients[1] = -0.5;
    hyper.ns_coefficients[2] = 0;
    check_shape(gemm, 20, 30, 1, &hyper);
    hyper.ns_steps = 30; /* these coefficients converge, so many steps stay exact */
    check_shape(gemm, 5, 30, 1, &hyper);
}

/* ---- figures ----------------------------------------------------------------------------------------------- */

static void test_lr_factor(void **state)
{
    (void)state;
    assert_true(muon_lr_factor((struct muon_shape){64, 16}, MUON_ORIGINAL) == 2);
    assert_true(muon_lr_factor((struct muon_shape){16, 64}, MUON_ORIGINAL) == 1);
    assert_true(muon_lr_factor((struct muon_shape){16, 64}, MUON_MATCH_RMS_ADAMW) == 0.2 * 8);
    assert_true(muon_lr_factor((struct muon_shape){64, 16}, MUON_MATCH_RMS_ADAMW) == 0.2 * 8);
}

static void test_flops(void **state)
{
    (void)state;
    /* x x' and its square: half of 2 x 10 x 10 x 30 and of 2 x 10^3. The last product: 2 x 10 x 10 x 30. */
    assert_true(muon_flops((struct muon_shape){10, 30}, 1) == 3000 + 1000 + 6000);
    assert_true(muon_flops((struct muon_shape){30, 10}, 5) == 5 * 10000);
}

TEST_GROUP(muon)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_pass),
        cmocka_unit_test(test_orthogonalize),
        cmocka_unit_test(test_lr_factor),
        cmocka_unit_test(test_flops),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

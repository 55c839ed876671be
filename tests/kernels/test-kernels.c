/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reduce and update, with every table of kernels that this CPU can run. They are compared with a second implementation
 * of docs/numerics.md, which computes one element at a time, without regard for speed. All bits must be equal, except
 * that any NaN equals any other NaN.
 */

#include "kernels/group8.h"
#include "kernels/kernels.h"
#include "kernels/master24.h"

#include "tests/group.h"
#include "tests/kernels/kernels-reference.h"

#include <malloc.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* Adds without fusing, reordering or widening by the compiler. */
static float add(volatile float a, volatile float b)
{
    volatile float r = a + b;

    return r;
}

static float sub(volatile float a, volatile float b)
{
    volatile float r = a - b;

    return r;
}

static float mul(volatile float a, volatile float b)
{
    volatile float r = a * b;

    return r;
}

static float quotient(volatile float a, volatile float b)
{
    volatile float r = a / b;

    return r;
}

static float root(volatile float a)
{
    volatile float r = sqrtf(a);

    return r;
}

static void assert_same(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!same(a[i], b[i]))
            fail_msg("element %zu of %zu: %a, expected %a", i, n, (double)a[i], (double)b[i]);
    }
}

/* ---- reduce -------------------------------------------------------------------------------------------- */

enum { MAX_RANKS = 64, N_MAX = 100003, SLACK = 64 };

/* The pushes of all ranks, and the old accumulator. */
struct pushes {
    enum dtype dtype;
    unsigned world;
    bool present[MAX_RANKS];
    char *pushed[MAX_RANKS]; /* n_elems of dtype at an odd multiple of 4 bytes; NULL if absent */
    size_t n_elems;
    float *before; /* the old accumulator */
};

enum values {
    VALUES_USUAL,
    VALUES_WILD, /* all exponents, subnormals, both zeroes; finite, and no sum overflows */
    VALUES_SUBNORMAL,
    VALUES_ZEROES,
    N_VALUES,
};

static float value_of(enum values values, uint64_t r)
{
    uint32_t sign = (uint32_t)r & 0x80000000, mantissa = (uint32_t)(r >> 9) & 0x7fffff;

    switch (values) {
    case VALUES_WILD:
        return r >> 61 ? f32_from_bits(sign | ((uint32_t)(r >> 40) % 245) << 23 | mantissa) : f32_from_bits(sign);
    case VALUES_SUBNORMAL:
        return f32_from_bits(sign | mantissa);
    case VALUES_ZEROES:
        return f32_from_bits(sign);
    default:
        return f32_from_bits(sign | (110 + (uint32_t)(r >> 40) % 12) << 23 | mantissa);
    }
}

static void pushes_init(struct pushes *pushes, enum values values, uint64_t *seed)
{
    for (unsigned r = 0; r < pushes->world; r++) {
        char *memory;

        pushes->pushed[r] = NULL;
        if (!pushes->present[r])
            continue;
        memory = malloc(pushes->n_elems * 4 + SLACK);
        assert_non_null(memory);
        pushes->pushed[r] = memory + 4;
        for (size_t i = 0; i < pushes->n_elems; i++) {
            float value = value_of(values, next(seed));

            /* fp16 overflows at small numbers, so they are limited to keep sums finite */
            if (pushes->dtype == DTYPE_F16 && fabsf(value) > 900)
                value = copysignf(fmodf(value, 900), value);
            convert_from_f32(pushes->pushed[r] + i * dtype_size(pushes->dtype), &value, pushes->dtype, 1);
        }
    }
    pushes->before = malloc(pushes->n_elems * 4 + 1);
    assert_non_null(pushes->before);
    for (size_t i = 0; i < pushes->n_elems; i++)
        pushes->before[i] = add(0, value_of(values, next(seed)));
}

static void pushes_deinit(struct pushes *pushes)
{
    for (unsigned r = 0; r < pushes->world; r++)
        free(pushes->pushed[r] ? pushes->pushed[r] - 4 : NULL);
    free(pushes->before);
}

static float pushed_value(const struct pushes *pushes, unsigned rank, size_t i)
{
    uint16_t h;
    float value;

    if (!pushes->present[rank])
        return 0;
    if (pushes->dtype == DTYPE_F32) {
        memcpy(&value, pushes->pushed[rank] + 4 * i, sizeof(value));
        return value;
    }
    memcpy(&h, pushes->pushed[rank] + 2 * i, sizeof(h));
    return (float)widen_reference(h, pushes->dtype);
}

/* Section 1, word for word. Absent ranks count as +0. */
static float tree_reference(const struct pushes *pushes, unsigned begin, unsigned end, size_t i)
{
    unsigned half = 1;

    if (end - begin == 1)
        return pushed_value(pushes, begin, i);
    while (half * 2 < end - begin)
        half *= 2;
    return add(tree_reference(pushes, begin, begin + half, i), tree_reference(pushes, begin + half, end, i));
}

/* Section 2: the sum of a run's squares. */
static double run_reference(const float *run, size_t n)
{
    volatile double lane[8] = {0}, square;

    for (size_t i = 0; i < n; i++) {
        square = (double)run[i] * (double)run[i];
        lane[i % 8] = lane[i % 8] + square;
    }
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static void reduce_reference(const struct pushes *pushes, bool first, float *acc, struct exact_sum *squares)
{
    exact_sum_reset(squares);
    for (size_t i = 0; i < pushes->n_elems; i++)
        acc[i] = add(first ? 0 : pushes->before[i], tree_reference(pushes, 0, pushes->world, i));
    for (size_t i = 0; i < pushes->n_elems; i += 64)
        exact_sum_add(squares, run_reference(acc + i, MIN(pushes->n_elems - i, 64u)));
    exact_sum_carry(squares);
}

/* Reduces elements [begin, end) of the pushes. acc is the start of the parameter's accumulator. */
static struct reduce_result reduce_range(const struct kernels *k, const struct pushes *pushes, bool first,
                                         bool past_caches, float *acc, size_t begin, size_t end,
                                         struct position_sum *sums)
{
    const void *leaves[MAX_RANKS];
    struct reduce_join joins[MAX_RANKS];
    struct reduce_result result = {.sums = sums};
    struct reduce_args args = {
        .dtype = pushes->dtype,
        .leaves = leaves,
        .joins = joins,
        .acc = acc + begin,
        .first = first,
        .past_caches = past_caches,
        .n_elems = end - begin,
        .start_elem = begin,
    };

    for (unsigned r = 0; r < pushes->world; r++) {
        if (pushes->present[r])
            leaves[args.n_leaves++] = pushes->pushed[r] + begin * dtype_size(pushes->dtype);
    }
    assert_int_equal(reduce_joins(pushes->present, pushes->world, joins), args.n_leaves - 1);
    k->reduce(&args, &result);
    exact_sum_carry(&result.squares);
    return result;
}

/* start_byte is the offset of acc from a multiple of 64. */
static void check_reduce(const struct kernels *k, const struct pushes *pushes, bool first, bool past_caches,
                         size_t start_byte, const float *expected, const struct exact_sum *squares)
{
    _cleanup_free_ char *memory = aligned_alloc(64, round_up(pushes->n_elems * 4 + SLACK, (size_t)64));
    struct position_sum sums[MAX_RANKS], sum;
    struct reduce_result result;
    float *acc = (float *)(void *)(memory + start_byte);
    unsigned leaf = 0;

    memset(memory, 0xee, pushes->n_elems * 4 + SLACK);
    if (!first)
        memcpy(acc, pushes->before, pushes->n_elems * 4);
    result = reduce_range(k, pushes, first, past_caches, acc, 0, pushes->n_elems, sums);
    assert_same(acc, expected, pushes->n_elems);
    assert_memory_equal(&result.squares, squares, sizeof(*squares));
    assert_false(result.nonfinite);
    for (unsigned r = 0; r < pushes->world; r++) {
        if (!pushes->present[r])
            continue;
        sum = position_reference(pushes->dtype, pushes->pushed[r], pushes->n_elems);
        assert_memory_equal(&sums[leaf++], &sum, sizeof(sum));
    }
    for (size_t i = start_byte + pushes->n_elems * 4; i < pushes->n_elems * 4 + SLACK; i++)
        assert_int_equal((unsigned char)memory[i], 0xee);
}

/* Reduces random pushes of a world with every table. */
static void check_world(unsigned world, size_t n_elems, enum values values, unsigned absent_of_8, uint64_t *seed)
{
    struct pushes pushes = {.dtype = (enum dtype)(next(seed) % N_DTYPES), .world = world, .n_elems = n_elems};
    _cleanup_free_ float *expected = malloc(n_elems * 4 + 1);
    const struct kernels *k;
    struct exact_sum squares;

    for (unsigned r = 0; r < world; r++)
        pushes.present[r] = next(seed) % 8 >= absent_of_8;
    pushes.present[next(seed) % world] = true;
    pushes_init(&pushes, values, seed);
    for (int first = 0; first < 2; first++) {
        reduce_reference(&pushes, first, expected, &squares);
        for (unsigned i = 0; (k = kernels_nth(i)); i++)
            for (unsigned how = 0; how < 3; how++)
                check_reduce(k, &pushes, first, how > 0, how == 1 ? 0 : 12, expected, &squares);
    }
    pushes_deinit(&pushes);
}

static void test_reduce(void **state)
{
    uint64_t seed = 6;

    for (unsigned world = 1; world <= 8; world++) {
        for (size_t s = 0; s < ARRAY_SIZE(sizes); s++) {
            for (enum values values = 0; values < N_VALUES; values++) {
                for (unsigned absent = 0; absent < 4 && sizes[s] <= 1024; absent++)
                    check_world(world, sizes[s], values, absent * 2, &seed);
            }
        }
    }
    for (unsigned world = 1; world <= 4; world++)
        check_world(world, N_MAX, VALUES_USUAL, 0, &seed);
    check_world(3, 2048 * 64 + 2 * 64 + 3, VALUES_WILD, 0, &seed); /* more runs than bins can add at once */
    for (unsigned world = 9; world <= MAX_RANKS; world += 11)
        check_world(world, 200, VALUES_WILD, 1, &seed);
}

/* The pieces of a parameter, in any order and with any tables, have the bits and the sums of the whole. */
static void test_reduce_pieces(void **state)
{
    struct pushes pushes = {.dtype = DTYPE_BF16, .world = 4, .present = {true, true, false, true}, .n_elems = 9999};
    static float expected[9999], acc[9999];
    struct exact_sum squares;
    uint64_t seed = 7;

    pushes_init(&pushes, VALUES_WILD, &seed);
    reduce_reference(&pushes, true, expected, &squares);
    for (int round = 0; round < 50; round++) {
        struct position_sum sums[3], totals[3] = {0}, whole;
        struct exact_sum total = {0};
        size_t end, begin;

        memset(acc, 0xff, sizeof(acc));
        for (end = pushes.n_elems; end > 0; end = begin) {
            const struct kernels *k = kernels_nth(next(&seed) & 1);
            struct reduce_result result;

            begin = round_up(end, 64) - 64;
            begin -= MIN(begin, next(&seed) % 60 * 64);
            result = reduce_range(k ? k : kernels_nth(0), &pushes, true, false, acc, begin, end, sums);
            exact_sum_merge(&total, &result.squares);
            for (int leaf = 0; leaf < 3; leaf++)
                position_sum_add(&totals[leaf], &sums[leaf]);
        }
        exact_sum_carry(&total);
        assert_memory_equal(&total, &squares, sizeof(total));
        assert_same(acc, expected, pushes.n_elems);
        whole = position_reference(DTYPE_BF16, pushes.pushed[3], pushes.n_elems);
        assert_memory_equal(&totals[2], &whole, sizeof(whole));
    }
    pushes_deinit(&pushes);
}

/*
 * Findings name the rank with the value that is not finite. Three ranks push 300 bf16 elements, from element 640 on,
 * which are 1.0 at first.
 */
static void check_nonfinite(const struct kernels *k)
{
    const uint16_t one = 0x3f80, inf = 0x7f80, minus_inf = 0xff80, nan = 0x7fc1, big = 0x7f7f;
    uint16_t g[3][300];
    const void *leaves[3] = {g[0], g[1], g[2]};
    const struct reduce_join joins[2] = {{0, 1}, {0, 2}};
    float acc[300] = {0};
    struct reduce_args args = {DTYPE_BF16, 3, leaves, joins, acc, true, 300, 640};
    struct reduce_result result = {0};
    struct reduce_finding found[3], overflow;

    for (int i = 0; i < 900; i++)
        g[i / 300][i % 300] = one;
    k->reduce(&args, &result);
    assert_false(result.nonfinite);

    g[0][299] = nan;
    g[1][7] = inf;
    g[2][7] = minus_inf;
    g[1][250] = nan;
    g[0][100] = g[1][100] = big; /* both finite, but not their sum */
    k->reduce(&args, &result);
    assert_true(result.nonfinite && isnan(exact_sum_round(&result.squares)));
    assert_true(isnan(acc[7]) && isinf(acc[100]) && acc[101] == 3);
    reduce_find_nonfinite(&args, found, &overflow);
    assert_int_equal(found[0].n_nan, 1);
    assert_int_equal(found[0].n_inf, 0);
    assert_int_equal(found[0].first_elem, 640 + 299);
    assert_int_equal(found[1].n_nan, 1);
    assert_int_equal(found[1].n_inf, 1);
    assert_int_equal(found[1].first_elem, 640 + 7);
    assert_true(found[1].first_value == INFINITY && found[2].first_value == -INFINITY);
    assert_int_equal(found[2].n_nan, 0);
    assert_int_equal(found[2].n_inf, 1);
    assert_int_equal(overflow.n_inf, 1);
    assert_int_equal(overflow.n_nan, 0);
    assert_int_equal(overflow.first_elem, 640 + 100);

    /* without a NaN the norm is infinite, as in torch */
    g[0][299] = g[1][250] = one;
    g[2][7] = one;
    k->reduce(&args, &result);
    assert_true(result.nonfinite && exact_sum_round(&result.squares) == INFINITY);
    g[0][299] = g[1][250] = nan;
    g[2][7] = minus_inf;
    k->reduce(&args, &result);

    /* the NaN remains in the accumulator, even if the next contribution is finite */
    for (int i = 0; i < 900; i++)
        g[i / 300][i % 300] = one;
    args.first = false;
    k->reduce(&args, &result);
    assert_true(result.nonfinite && acc[101] == 6);
    reduce_find_nonfinite(&args, found, &overflow);
    assert_int_equal(found[0].n_nan + found[1].n_nan + found[2].n_nan + found[1].n_inf + found[2].n_inf, 0);
    assert_int_equal(overflow.n_nan + overflow.n_inf, 4);
}

static void test_reduce_nonfinite(void **state)
{
    const struct kernels *k;

    for (unsigned i = 0; (k = kernels_nth(i)); i++)
        check_nonfinite(k);
}

/* Asserts the joins of a world. Each leaf is a letter, each join a pair of brackets. */
static void check_joins(unsigned world, const char *absent, const char *expected)
{
    struct reduce_join joins[MAX_RANKS];
    bool present[MAX_RANKS] = {0};
    char text[MAX_RANKS][128], joined[128];
    unsigned n_leaves = 0, n_joins;

    for (unsigned r = 0; r < world; r++) {
        present[r] = !strchr(absent, 'a' + (int)r);
        if (present[r])
            snprintf(text[n_leaves++], sizeof(text[0]), "%c", 'a' + (int)r);
    }
    n_joins = reduce_joins(*absent ? present : NULL, world, joins);
    assert_int_equal(n_joins, n_leaves ? n_leaves - 1 : 0);
    for (unsigned j = 0; j < n_joins; j++) {
        assert_true(joins[j].dst < n_leaves && joins[j].src < n_leaves);
        assert_true((size_t)snprintf(joined, sizeof(joined), "(%.60s%.60s)", text[joins[j].dst], text[joins[j].src]) <
                    sizeof(joined));
        memcpy(text[joins[j].dst], joined, sizeof(joined));
    }
    assert_string_equal(n_leaves ? text[0] : "", expected);
}

static void test_reduce_joins(void **state)
{
    check_joins(1, "", "a");
    check_joins(2, "", "(ab)");
    check_joins(3, "", "((ab)c)");
    check_joins(4, "", "((ab)(cd))");
    check_joins(5, "", "(((ab)(cd))e)");
    check_joins(6, "", "(((ab)(cd))(ef))");
    check_joins(8, "", "(((ab)(cd))((ef)(gh)))");
    check_joins(4, "a", "(b(cd))");
    check_joins(4, "b", "(a(cd))");
    check_joins(4, "cd", "(ab)");
    check_joins(8, "bdf", "((ac)(e(gh)))");
    check_joins(8, "abcdefg", "h");
    check_joins(3, "abc", "");
}

/* ---- update -------------------------------------------------------------------------------------------- */

/* The state of an array over several steps. w16 has 16-bit weights, and the fields below have narrow state. */
struct trajectory {
    float p[1030];
    float m[1030];
    float v[1030];
    uint16_t w16[1030];
    int8_t lower[1030];
    uint16_t m16[1030];
    uint16_t v16[1030];
    struct group8 m8[17], v8[17];
};

static const struct moments_type moments_types[] = {
    {DTYPE_F32}, {DTYPE_BF16}, {DTYPE_BF16, true}, {DTYPE_SIGNED8}, {DTYPE_SIGNED8, true}};

struct optimizer_case {
    enum optimizer optimizer;
    struct hyper hyper;
};

static const struct optimizer_case cases[] = {
    {OPTIMIZER_ADAMW, {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01}},
    {OPTIMIZER_ADAMW, {.lr = 0.3, .beta1 = 0.5, .beta2 = 0.25, .eps = 1e-3}},
    {OPTIMIZER_ADAM, {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .adam_w_mode = true}},
    {OPTIMIZER_ADAM, {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}},
    {OPTIMIZER_SGD, {.lr = 0.1, .weight_decay = 1e-4}},
    {OPTIMIZER_SGD, {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 1e-4}},
    {OPTIMIZER_SGD, {.lr = 0.1, .momentum = 0.9, .nesterov = true}},
    {OPTIMIZER_LION, {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1}},
    {OPTIMIZER_ADAGRAD, {.lr = 0.01, .lr_decay = 0.1, .eps = 1e-10, .weight_decay = 0.02}},
    {OPTIMIZER_MUON, {.lr = 0.02, .momentum = 0.95, .weight_decay = 0.1}}, /* the second pass of Muon */
};

/* Section 4: updates one element. */
static void update_reference(const struct optimizer_case *c, double s, uint64_t t, float acc, float *p, float *m,
                             float *v)
{
    const struct hyper *h = &c->hyper;
    float g = mul(acc, (float)s), lr = (float)h->lr, eps = (float)h->eps, denominator, u;
    double bc1 = 1 - pow(h->beta1, (double)t), bc2 = 1 - pow(h->beta2, (double)t);
    bool decoupled = c->optimizer == OPTIMIZER_ADAMW || c->optimizer == OPTIMIZER_LION ||
                     c->optimizer == OPTIMIZER_MUON || (c->optimizer == OPTIMIZER_ADAM && h->adam_w_mode);

    if (decoupled)
        *p = mul(*p, (float)(1 - h->lr * h->weight_decay));
    else
        g = add(g, mul(*p, (float)h->weight_decay));

    switch (c->optimizer) {
    case OPTIMIZER_SGD:
        if (h->momentum != 0) {
            *m = t == 1 ? g : add(mul(*m, (float)h->momentum), mul(g, (float)(1 - h->dampening)));
            g = h->nesterov ? add(g, mul(*m, (float)h->momentum)) : *m;
        }
        *p = sub(*p, mul(lr, g));
        break;
    case OPTIMIZER_MUON:
        *p = sub(*p, mul(lr, acc));
        break;
    case OPTIMIZER_LION:
        u = add(mul(*m, (float)h->beta1), mul(g, (float)(1 - h->beta1)));
        *p = sub(*p, mul(lr, u > 0 ? 1.0f : u < 0 ? -1.0f : 0.0f));
        *m = add(mul(*m, (float)h->beta2), mul(g, (float)(1 - h->beta2)));
        break;
    case OPTIMIZER_ADAGRAD:
        *v = add(*v, mul(g, g));
        denominator = add(root(*v), eps);
        *p = sub(*p, mul((float)(h->lr / (1 + (double)(t - 1) * h->lr_decay)), quotient(g, denominator)));
        break;
    default:
        *m = add(mul(*m, (float)h->beta1), mul(g, (float)(1 - h->beta1)));
        *v = add(mul(*v, (float)h->beta2), mul(mul(g, g), (float)(1 - h->beta2)));
        denominator = add(mul(root(*v), (float)(1 / sqrt(bc2))), eps);
        *p = sub(*p, mul((float)(h->lr / bc1), quotient(*m, denominator)));
    }
}

/* Section 5: return the bits that are stored, from which the next step reads. draw has 16 bits. */
static uint16_t stored(float x, bool stochastic, uint32_t draw)
{
    uint16_t nearest;
    uint32_t bits;

    convert_from_f32(&nearest, &x, DTYPE_BF16, 1);
    if (!stochastic || isnan(x))
        return nearest;
    memcpy(&bits, &x, sizeof(bits));
    return (uint16_t)((bits + draw) >> 16);
}

static uint32_t mixed(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x85ebca6b;
    x ^= x >> 13;
    x *= 0xc2b2ae35;
    return x ^ x >> 16;
}

static uint32_t key_of(uint32_t param, uint64_t t)
{
    return mixed(mixed(mixed((uint32_t)t) + (uint32_t)(t >> 32)) + param);
}

static uint32_t draw_of(uint32_t param, uint64_t t, uint64_t elem)
{
    return mixed((uint32_t)elem * 0x9e3779b9u ^ key_of(param, t));
}

/* Section 8: return the nine random bits for a master. */
static uint32_t master_draw_of(uint32_t param, uint64_t t, uint64_t elem)
{
    uint64_t number = elem / 64 * 16 + elem % 16;
    uint64_t draw = mixed((uint32_t)number * 0x9e3779b9u ^ ~key_of(param, t));

    return (uint32_t)((draw | draw << 32) >> elem % 64 / 16 * 8 & 0x1ff);
}

/* Section 8: stores a master of the expected trajectory, and reads it again. */
static void store_expected_master(float *p, uint16_t *w, int8_t *r, uint32_t draw)
{
    uint64_t sum = ((uint64_t)f32_bits(*p) + draw % 256) / 256;

    if (isnan(*p))
        sum = (uint64_t)(f32_bits(*p) >> 16 | 0x40) * 256;
    else if (sum % 256 == 128)
        sum = draw / 256 ? sum + 1 : sum - 1;
    *w = (uint16_t)((sum + 128) / 256);
    *r = (int8_t)((int64_t)sum - (int64_t)256 * *w);
    *p = f32_from_bits((uint32_t)(sum * 256));
}

/* Rounds a moment of the expected trajectory to its 16 bits, and widens it for the next step. */
static void store_expected(float *moment, uint16_t *bits, bool stochastic, uint32_t draw)
{
    *bits = stored(*moment, stochastic, draw);
    convert_to_f32(moment, bits, DTYPE_BF16, 1);
}

/*
 * Rounds a moment of the expected trajectory to groups, and asserts that the kernel stored the same. Then copies the
 * kernel's groups to `expected`.
 */
static void expect_groups(const struct group8 *got, struct group8 *expected, float *moment, enum dtype dtype, size_t n,
                          const uint32_t *draws)
{
    static float widened[1030];

    in_groups_reference(moment, n, dtype, draws);
    convert_to_f32(widened, got, dtype, n);
    assert_same(widened, moment, n);
    memcpy(expected, got, n / 64 * sizeof(*got)); /* bytes behind them must not have changed */
    if (n % 64 > 0)
        memcpy(&expected[n / 64], &got[n / 64], offsetof(struct group8, codes) + n % 64);
}

static void trajectory_init(struct trajectory *t, uint64_t *seed)
{
    memset(t, 0, sizeof(*t));
    for (size_t i = 0; i < ARRAY_SIZE(t->p); i++)
        t->p[i] = value_of(i % 16 ? VALUES_USUAL : VALUES_SUBNORMAL, next(seed));
}

/* Return: which moments the kernel changes. */
static struct optimizer_moments moments_of(const struct optimizer_case *c)
{
    return c->optimizer == OPTIMIZER_MUON ? (struct optimizer_moments){0} : optimizer_moments(c->optimizer, &c->hyper);
}

/* With masters of 24 bits the kernel does not write p. Computes p from weights and lower bytes, to compare it. */
static void widen_masters(struct trajectory *got, size_t at, size_t n)
{
    master24_to_f32(got->p + at, (struct master24){.weights = got->w16 + at, .lower = got->lower + at}, n);
}

/* Does steps with the kernel and the reference. The offset makes sure that no array is aligned to more than 4 bytes. */
static void check_update(const struct kernels *k, const struct optimizer_case *c, size_t n, enum dtype w16_dtype,
                         struct moments_type type, bool master24, uint64_t seed)
{
    static struct trajectory got, expected;
    struct optimizer_moments moments = moments_of(c);
    struct update_scalars scalars;
    static float acc[1030];
    const size_t at = 1;
    const uint64_t start_elem = UINT64_C(0xffffff00), param = 3; /* draws repeat after 2^32 elements */
    bool narrow = type.dtype == DTYPE_BF16, grouped = type.dtype == DTYPE_SIGNED8;
    static uint32_t m_draws[1030], v_draws[1030];

    trajectory_init(&got, &seed);
    for (size_t i = at; master24 && i < at + n; i++)
        store_expected_master(&got.p[i], &got.w16[i], &got.lower[i], 0);
    expected = got;
    for (uint64_t t = 1; t <= 3; t++) {
        double s = t == 2 ? 1 / 3.0 : 0.125;
        struct update_args args = {
            .p = master24 ? NULL : got.p + at,
            .lower = master24 ? got.lower + at : NULL,
            .m = !moments.m ? NULL
                 : grouped  ? (void *)got.m8
                 : narrow   ? (void *)(got.m16 + at)
                            : got.m + at,
            .v = !moments.v ? NULL
                 : grouped  ? (void *)got.v8
                 : narrow   ? (void *)(got.v16 + at)
                            : got.v + at,
            .acc = acc + at,
            .w16 = w16_dtype == DTYPE_F32 ? NULL : got.w16 + at,
            .w16_dtype = w16_dtype,
            .n_elems = n,
            .moments = type,
            .start_elem = start_elem,
            .k = &scalars,
        };

        for (size_t i = 0; i < ARRAY_SIZE(acc); i++)
            acc[i] = add(0, value_of((enum values)(next(&seed) % 8 ? 0 : next(&seed) % N_VALUES), next(&seed)));
        for (size_t i = 0; i < ARRAY_SIZE(acc); i++)
            acc[i] = fabsf(acc[i]) > 1e15f ? 1e15f : acc[i]; /* keeps its square finite */
        update_scalars_compute(c->optimizer, &c->hyper, s, t, &scalars);
        scalars.rounding_key = update_rounding_key(param, t);
        if (c->optimizer == OPTIMIZER_MUON)
            scalars.a = (float)c->hyper.lr;
        k->update[c->optimizer](&args);
        for (size_t i = at; i < at + n; i++) {
            uint32_t draw = draw_of(param, t, start_elem + i - at);

            uint32_t of_group = (i - at) % 64 < 32 ? draw : ~draw_of(param, t, start_elem + i - at - 32);

            m_draws[i] = of_group & 0xfffff;
            v_draws[i] = of_group >> 12;
            update_reference(c, s, t, acc[i], &expected.p[i], &expected.m[i], &expected.v[i]);
            if (narrow && moments.m)
                store_expected(&expected.m[i], &expected.m16[i], type.stochastic, draw & 0xffff);
            if (narrow && moments.v)
                store_expected(&expected.v[i], &expected.v16[i], type.stochastic, draw >> 16);
            if (master24)
                store_expected_master(&expected.p[i], &expected.w16[i], &expected.lower[i],
                                      master_draw_of(param, t, start_elem + i - at));
            else if (w16_dtype != DTYPE_F32)
                convert_from_f32(&expected.w16[i], &expected.p[i], w16_dtype, 1);
        }
        if (master24)
            widen_masters(&got, at, n);
        assert_same(got.p, expected.p, ARRAY_SIZE(got.p));
        if (grouped) {
            expect_groups(got.m8, expected.m8, expected.m + at, DTYPE_SIGNED8, moments.m ? n : 0,
                          type.stochastic ? m_draws + at : NULL);
            expect_groups(got.v8, expected.v8, expected.v + at, DTYPE_UNSIGNED8, moments.v ? n : 0,
                          type.stochastic ? v_draws + at : NULL);
        }
        if (narrow || grouped) { /* compared already, in narrow form */
            memcpy(got.m, expected.m, sizeof(got.m));
            memcpy(got.v, expected.v, sizeof(got.v));
        }
        assert_memory_equal(&got, &expected, sizeof(got));
    }
}

static void test_update(void **state)
{
    const struct kernels *k;

    for (unsigned i = 0; (k = kernels_nth(i)); i++) {
        for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
            for (size_t s = 0; s < ARRAY_SIZE(sizes) && sizes[s] <= 1024; s++) {
                for (enum dtype w16_dtype = 0; w16_dtype < N_DTYPES; w16_dtype++)
                    for (size_t m = 0; m < ARRAY_SIZE(moments_types); m++)
                        check_update(k, &cases[c], sizes[s], w16_dtype, moments_types[m], false, 8 + c);
                for (size_t m = 0; m < ARRAY_SIZE(moments_types); m++)
                    check_update(k, &cases[c], sizes[s], DTYPE_BF16, moments_types[m], true, 8 + c);
            }
        }
    }
}

/* A master moves by steps that are smaller than 24 bits can represent, also past values halfway between two weights. */
static void test_small_steps(void **state)
{
    enum { N_STEPS = 3000, N = 640 };
    static const double steps[] = {0.3, 0.7, -0.3, -0.7}; /* in units of the distance of masters above 1 */
    static uint16_t weights[N];
    static int8_t lower[N];
    static float acc[N], masters[N];
    const struct kernels *k;

    for (unsigned isa = 0; (k = kernels_nth(isa)); isa++)
        for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
            double wanted = N_STEPS * steps[i] * 0x1p-15, mean = 0;

            for (size_t e = 0; e < N; e++) {
                weights[e] = 0x3f80;
                lower[e] = 0;
                acc[e] = steps[i] < 0 ? 1 : -1;
            }
            for (uint64_t t = 1; t <= N_STEPS; t++) {
                struct update_scalars scalars = {.s = 1, .lr = (float)(fabs(steps[i]) * 0x1p-15)};

                scalars.rounding_key = update_rounding_key(0, t);
                k->update[OPTIMIZER_SGD](&(struct update_args){
                    .lower = lower, .acc = acc, .w16 = weights, .w16_dtype = DTYPE_BF16, .n_elems = N, .k = &scalars});
            }
            master24_to_f32(masters, (struct master24){.weights = weights, .lower = lower}, N);
            for (size_t e = 0; e < N; e++) {
                mean += ((double)masters[e] - 1) / N;
                assert_int_equal(bf16_from_f32(masters[e]), weights[e]);
            }
            assert_true(fabs(mean - wanted) <= 0.01 * fabs(wanted));
        }
}

static void test_update_moments(void **state)
{
    const unsigned expected[] = {2, 2, 2, 2, 0, 1, 1, 1, 1, 2};

    for (size_t c = 0; c < ARRAY_SIZE(cases); c++)
        assert_int_equal(optimizer_n_moments(cases[c].optimizer, &cases[c].hyper), expected[c]);
    assert_true(optimizer_moments(OPTIMIZER_ADAGRAD, &cases[8].hyper).v);
    assert_true(optimizer_moments(OPTIMIZER_LION, &cases[7].hyper).m);
}

/* ---- the choice of a table ----------------------------------------------------------------------------- */

static void test_select(void **state)
{
    const struct kernels *k = NULL, *last = NULL;
    char err[256] = "";

    unsetenv("ZEROD_ISA");
    for (unsigned i = 0; kernels_nth(i); i++) {
        last = kernels_nth(i);
        assert_int_equal(kernels_select(&k, last->isa, err, sizeof(err)), 0);
        assert_ptr_equal(k, last);
        setenv("ZEROD_ISA", last->isa, 1);
        assert_int_equal(kernels_select(&k, NULL, err, sizeof(err)), 0);
        assert_ptr_equal(k, last);
    }
    assert_string_equal(kernels_nth(0)->isa, "baseline");
    setenv("ZEROD_ISA", "", 1);
    assert_int_equal(kernels_select(&k, NULL, err, sizeof(err)), 0);
    assert_ptr_equal(k, last);
    unsetenv("ZEROD_ISA");
    assert_int_equal(kernels_select(&k, NULL, err, sizeof(err)), 0);
    assert_ptr_equal(k, last);

    setenv("ZEROD_ISA", "sse9", 1);
    assert_int_equal(kernels_select(&k, NULL, err, sizeof(err)), -EINVAL);
    assert_non_null(strstr(err, "ZEROD_ISA: \"sse9\" is not known; this CPU runs: baseline"));
    assert_int_equal(kernels_select(&k, "baseline", err, sizeof(err)), 0); /* the argument is preferred */
    unsetenv("ZEROD_ISA");
#ifdef __x86_64__
    if (strcmp(last->isa, "avx512") != 0) {
        assert_int_equal(kernels_select(&k, "avx512", err, sizeof(err)), -ENOTSUP);
        assert_non_null(strstr(err, "this CPU does not run \"avx512\"; it runs: baseline"));
    }
#endif
}

static void test_float_env(void **state)
{
    char err[256];

    assert_int_equal(kernels_assert_float_env(err, sizeof(err)), 0);
#ifdef __x86_64__
    const unsigned usual = __builtin_ia32_stmxcsr();
    /* flush-to-zero, denormals-are-zero, round down, up, to zero */
    const unsigned bits[] = {0x8000, 0x0040, 0x2000, 0x4000, 0x6000};
    const char *sentences[] = {"flush-to-zero", "denormals-are-zero", "nearest", "nearest", "nearest"};

    for (size_t i = 0; i < ARRAY_SIZE(bits); i++) {
        bool honoured;
        int r;

        __builtin_ia32_ldmxcsr(usual | bits[i]);
        honoured = (__builtin_ia32_stmxcsr() & bits[i]) == bits[i];
        r = kernels_assert_float_env(err, sizeof(err));
        __builtin_ia32_ldmxcsr(usual);
        if (!honoured)
            skip(); /* valgrind's CPU neither flushes nor obeys the rounding mode */
        assert_int_equal(r, -ENOTSUP);
        assert_non_null(strstr(err, sentences[i]));
    }
    assert_int_equal(kernels_assert_float_env(err, sizeof(err)), 0);
#endif
}

TEST_GROUP(kernels)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reduce),           cmocka_unit_test(test_reduce_pieces),
        cmocka_unit_test(test_reduce_nonfinite), cmocka_unit_test(test_reduce_joins),
        cmocka_unit_test(test_update),           cmocka_unit_test(test_update_moments),
        cmocka_unit_test(test_select),           cmocka_unit_test(test_float_env),
        cmocka_unit_test(test_small_steps),
    };

    /*
     * Tests allocate many arrays of about 100 KiB. Mapping and unmapping each of them would take ten times as long as
     * the tests.
     */
    mallopt(M_MMAP_THRESHOLD, 16 << 20);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

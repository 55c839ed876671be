/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The device's kernels are compared with the CPU's. Bits must be equal, any NaN equals any other, and nothing may be
 * written outside of a range. The same tests run twice (device-memory.h): with the kernels compiled for the CPU, and on
 * a GPU if there is one. On the CPU every launch is done twice, with blocks and threads in both orders, because no
 * result may depend on their order. Arrays end exactly at their last element, so that address sanitizer finds reads
 * beyond it.
 */

#include "kernels/device.h"
#include "kernels/kernels.h"
#include "kernels/master24.h"

#include "tests/kernels/device-memory.h"
#include "tests/kernels/kernels-reference.h"
#include "tests/tiers.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void in_both_orders(void (*check)(uint64_t seed), uint64_t seed)
{
    device_order(false);
    check(seed);
    device_order(true);
    check(seed);
    device_order(false);
}

/* ---- arrays -------------------------------------------------------------------------------------------- */

enum {
    GUARD_BYTES = 256,
    GUARD = 0xa5,
};

/*
 * n_bytes at an address `shift` above a multiple of 256. There are guard bytes in front, and also behind if the array
 * is written.
 */
struct array {
    char *data;
    size_t n_bytes;
    size_t shift;
    size_t n_behind;
};

static struct array array_new(size_t n_bytes, size_t shift, bool written)
{
    struct array array = {.n_bytes = n_bytes, .shift = shift, .n_behind = written ? GUARD_BYTES : 0};
    size_t n_all = GUARD_BYTES + shift + n_bytes + array.n_behind;
    void *memory = device_memory_new(n_all);

    memset(memory, GUARD, n_all);
    array.data = (char *)memory + GUARD_BYTES + shift;
    return array;
}

static void array_free(struct array *array)
{
    device_memory_free(array->data - GUARD_BYTES - array->shift);
}

static struct array array_copy(const struct array *from)
{
    struct array array = array_new(from->n_bytes, from->shift, from->n_behind > 0);

    memcpy(array.data, from->data, from->n_bytes);
    return array;
}

static void assert_guarded(const struct array *array)
{
    for (size_t i = 1; i <= GUARD_BYTES + array->shift; i++)
        assert_int_equal((uint8_t)array->data[-(ptrdiff_t)i], GUARD);
    for (size_t i = 0; i < array->n_behind; i++)
        assert_int_equal((uint8_t)array->data[array->n_bytes + i], GUARD);
}

/* Asserts that fp32 arrays have equal bits, where any NaN equals any other. */
static void assert_same_floats(const struct array *array, const struct array *expected)
{
    const float *a = (const float *)(const void *)array->data, *b = (const float *)(const void *)expected->data;

    for (size_t i = 0; i < array->n_bytes / 4; i++) {
        if (!same(a[i], b[i]))
            fail_msg("element %zu of %zu: %a, expected %a", i, array->n_bytes / 4, (double)a[i], (double)b[i]);
    }
    assert_guarded(array);
}

static void assert_same_bytes(const struct array *array, const struct array *expected)
{
    if (array->n_bytes > 0)
        assert_memory_equal(array->data, expected->data, array->n_bytes);
    assert_guarded(array);
}

/* ---- values -------------------------------------------------------------------------------------------- */

enum values {
    VALUES_USUAL,
    VALUES_WILD, /* all exponents, both zeroes, subnormals; some sums overflow */
    VALUES_SUBNORMAL,
    VALUES_ZEROES,
    VALUES_NONFINITE, /* one element in 50 */
    VALUES_NAN,       /* all elements */
    N_VALUES,
};

static float value_of(enum values values, uint64_t r)
{
    static const float strange[] = {NAN, INFINITY, -INFINITY, -NAN};
    uint32_t sign = (uint32_t)r & 0x80000000, mantissa = (uint32_t)(r >> 9) & 0x7fffff;

    switch (values) {
    case VALUES_WILD:
        return r >> 61 ? f32_from_bits(sign | ((uint32_t)(r >> 40) % 255) << 23 | mantissa) : f32_from_bits(sign);
    case VALUES_SUBNORMAL:
        return f32_from_bits(sign | mantissa);
    case VALUES_ZEROES:
        return f32_from_bits(sign);
    case VALUES_NONFINITE:
        if ((r >> 40) % 50 == 0)
            return strange[r % 4];
        break;
    case VALUES_NAN:
        return NAN;
    default:
        break;
    }
    return f32_from_bits(sign | (110 + (uint32_t)(r >> 40) % 12) << 23 | mantissa);
}

static void fill(struct array *array, enum dtype dtype, enum values values, uint64_t *seed)
{
    for (size_t i = 0; i < array->n_bytes / dtype_size(dtype); i++) {
        float value = value_of(values, next(seed));

        convert_from_f32(array->data + i * dtype_size(dtype), &value, dtype, 1);
    }
}

/* Lengths near a run, a unit, a tile of 32 runs, and a chunk. */
static const size_t lengths[] = {0,    1,    3,    7,    8,    63,   64,    65,    128,   200,  2047,
                                 2048, 2049, 8128, 8191, 8192, 8193, 10240, 16384, 16390, 20000};

static size_t a_length(uint64_t *seed)
{
    return lengths[next(seed) % ARRAY_SIZE(lengths)];
}

/* Return: a random shift in bytes, mostly 0. */
static size_t a_shift(size_t elem_bytes, uint64_t *seed)
{
    return next(seed) % 4 ? 0 : next(seed) % 16 * elem_bytes;
}

/* ---- reduce -------------------------------------------------------------------------------------------- */

enum {
    MAX_WORLD = 1024,
    N_REDUCTIONS = 24,
    MAX_CHUNKS = N_REDUCTIONS * 20,
};

/* One range to reduce, with the inputs of both sides. */
struct reduction {
    enum dtype dtype;
    unsigned n_leaves;
    struct array leaves[REDUCE_MAX_LEAVES];
    const void *data[REDUCE_MAX_LEAVES];
    struct reduce_join joins[REDUCE_MAX_LEAVES];
    struct array out, expected;
    bool first;
    size_t n_elems, start_elem;
};

static unsigned choose_ranks(bool *present, uint64_t *seed)
{
    static const unsigned worlds[] = {1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 16, 33, 64, MAX_WORLD};
    unsigned world = worlds[next(seed) % ARRAY_SIZE(worlds)], n = 0;
    unsigned of_sixteen = world == MAX_WORLD ? 1 : next(seed) % 2 ? 16 : 11;

    for (unsigned r = 0; r < world; r++) {
        present[r] = n < REDUCE_MAX_LEAVES && next(seed) % 16 < of_sixteen;
        n += present[r];
    }
    present[0] |= n == 0;
    return world;
}

static void reduction_init(struct reduction *reduction, uint64_t *seed)
{
    enum values values = (enum values)(next(seed) % N_VALUES);
    bool present[MAX_WORLD];
    unsigned world = choose_ranks(present, seed);

    *reduction = (struct reduction){
        .dtype = (enum dtype)(next(seed) % N_DTYPES),
        .first = next(seed) % 2,
        .n_elems = a_length(seed),
        .start_elem = next(seed) % 1000 * 64,
    };
    reduction->n_leaves = reduce_joins(present, world, reduction->joins) + 1;
    for (unsigned leaf = 0; leaf < reduction->n_leaves; leaf++) {
        struct array *array = &reduction->leaves[leaf];
        size_t size = dtype_size(reduction->dtype);

        *array = array_new(reduction->n_elems * size, a_shift(size, seed), false);
        fill(array, reduction->dtype, values, seed);
        reduction->data[leaf] = array->data;
    }
    reduction->out = array_new(reduction->n_elems * 4, a_shift(4, seed), true);
    fill(&reduction->out, DTYPE_F32, VALUES_USUAL, seed);
    reduction->expected = array_copy(&reduction->out);
}

static void reduction_deinit(struct reduction *reduction)
{
    for (unsigned leaf = 0; leaf < reduction->n_leaves; leaf++)
        array_free(&reduction->leaves[leaf]);
    array_free(&reduction->out);
    array_free(&reduction->expected);
}

/* Ranges, leaves and chunks of several reductions, and their results, which begin with arbitrary bits. */
struct reductions {
    struct reduction each[N_REDUCTIONS];
    struct device_reduce_range ranges[N_REDUCTIONS];
    struct device_leaf leaves[N_REDUCTIONS * REDUCE_MAX_LEAVES];
    struct device_chunk chunks[MAX_CHUNKS];
    struct exact_sum squares[N_REDUCTIONS];
    struct position_sum *sums; /* one for each leaf, and no more, for address sanitizer */
    struct device_finding findings[N_REDUCTIONS * REDUCE_MAX_LEAVES], overflows[N_REDUCTIONS];
    struct device_reduce_list list;
};

static void reductions_init(struct reductions *all, bool want_sums, uint64_t *seed)
{
    struct device_reduce_list *list = &all->list;
    uint32_t n_chunks = 0;

    memset(all, 0xee, sizeof(*all));
    *list = (struct device_reduce_list){.ranges = all->ranges,
                                        .leaves = all->leaves,
                                        .chunks = all->chunks,
                                        .squares = all->squares,
                                        .findings = all->findings,
                                        .overflows = all->overflows,
                                        .n_ranges = N_REDUCTIONS};
    for (unsigned i = 0; i < N_REDUCTIONS; i++) {
        struct reduction *reduction = &all->each[i];

        reduction_init(reduction, seed);
        all->ranges[i] = (struct device_reduce_range){
            .out = (float *)(void *)reduction->out.data,
            .n_elems = reduction->n_elems,
            .start_elem = reduction->start_elem,
            .first_leaf = list->n_leaves,
            .n_leaves = (uint16_t)reduction->n_leaves,
            .dtype = (uint8_t)reduction->dtype,
            .first = reduction->first,
        };
        device_leaves_fill(all->leaves + list->n_leaves, reduction->data, reduction->n_leaves, reduction->joins);
        list->n_leaves += reduction->n_leaves;
        n_chunks += device_chunks_count(reduction->n_elems);
        assert_true(n_chunks <= MAX_CHUNKS);
    }
    device_reduce_fill(list, all->ranges, all->leaves, all->chunks);
    assert_int_equal(list->n_chunks, n_chunks);
    all->sums = device_memory_new(list->n_leaves * sizeof(all->sums[0]));
    memset(all->sums, 0xee, list->n_leaves * sizeof(all->sums[0]));
    list->sums = want_sums ? all->sums : NULL;
}

static void reductions_free(struct reductions *all)
{
    for (unsigned i = 0; i < N_REDUCTIONS; i++)
        reduction_deinit(&all->each[i]);
    device_memory_free(all->sums);
    device_memory_free(all);
}

/* Asserts the bound on deferred carries, and carries them. Equal sums then have equal bits. */
static void carry(struct exact_sum *sum)
{
    for (unsigned i = 0; i < EXACT_N_LIMBS; i++)
        assert_true(sum->limb[i] >> 32 <= sum->n_deferred);
    exact_sum_carry(sum);
}

static void assert_same_finding(const struct device_finding *finding, const struct reduce_finding *expected)
{
    struct reduce_finding found;

    device_finding_read(finding, &found);
    assert_int_equal(found.n_nan, expected->n_nan);
    assert_int_equal(found.n_inf, expected->n_inf);
    if (found.n_nan + found.n_inf == 0)
        return;
    assert_int_equal(found.first_elem, expected->first_elem);
    assert_true(same(found.first_value, expected->first_value));
}

/* Compares reduction i with the CPU's. Return: whether it has a value that is not finite. */
static bool check_reduction(struct reductions *all, unsigned i)
{
    struct reduction *reduction = &all->each[i];
    unsigned first_leaf = all->ranges[i].first_leaf;
    struct reduce_finding found[REDUCE_MAX_LEAVES] = {0}, overflow = {0};
    struct position_sum sums[REDUCE_MAX_LEAVES];
    struct reduce_result result = {.sums = sums};
    struct reduce_args args = {
        .dtype = reduction->dtype,
        .n_leaves = reduction->n_leaves,
        .leaves = reduction->data,
        .joins = reduction->joins,
        .acc = (float *)(void *)reduction->expected.data,
        .first = reduction->first,
        .n_elems = reduction->n_elems,
        .start_elem = reduction->start_elem,
    };

    kernels_nth(i % 2 && kernels_nth(1) ? 1 : 0)->reduce(&args, &result);
    assert_same_floats(&reduction->out, &reduction->expected);
    assert_int_equal(all->squares[i].nonfinite, result.nonfinite);
    carry(&result.squares);
    carry(&all->squares[i]);
    assert_memory_equal(&all->squares[i], &result.squares, sizeof(result.squares));
    if (all->list.sums)
        assert_memory_equal(all->sums + first_leaf, sums, reduction->n_leaves * sizeof(sums[0]));
    if (result.nonfinite)
        reduce_find_nonfinite(&args, found, &overflow);
    for (unsigned leaf = 0; leaf < reduction->n_leaves; leaf++)
        assert_same_finding(&all->findings[first_leaf + leaf], &found[leaf]);
    assert_same_finding(&all->overflows[i], &overflow);
    return result.nonfinite;
}

static struct reductions *reductions_new(bool want_sums, uint64_t seed)
{
    struct reductions *all = device_memory_new(sizeof(*all));

    reductions_init(all, want_sums, &seed);
    assert_int_equal(device_reduce(NULL, &all->list), 0);
    assert_int_equal(device_finish(), 0);
    return all;
}

static void check_reductions(uint64_t seed)
{
    struct reductions *all = reductions_new(seed % 4 != 3, seed);
    unsigned n_nonfinite = 0;

    for (unsigned i = 0; i < N_REDUCTIONS; i++)
        n_nonfinite += check_reduction(all, i);
    assert_in_range(n_nonfinite, 1, N_REDUCTIONS - 1);
    reductions_free(all);
}

static void test_reduce(void **state)
{
    for (uint64_t seed = 0; seed < 16; seed++)
        in_both_orders(check_reductions, seed);
}

enum {
    N_PARTIAL = 5000,
};

struct partial_sums {
    uint16_t pushed[4][N_PARTIAL];
    float whole[N_PARTIAL], parts[2][N_PARTIAL], acc[N_PARTIAL];
    struct device_reduce_range ranges[2];
    struct device_leaf leaves[4];
    struct device_chunk chunks[2];
    struct exact_sum squares[2];
    struct device_finding findings[4], overflows[2];
};

/* Return: the CPU's sum of squares over all four ranks at once. */
static struct exact_sum partial_sums_init(struct partial_sums *all, uint64_t seed)
{
    const void *leaves[4] = {all->pushed[0], all->pushed[1], all->pushed[2], all->pushed[3]};
    struct reduce_result result = {0};
    struct reduce_join joins[4];

    for (int i = 0; i < 4 * N_PARTIAL; i++)
        all->pushed[i / N_PARTIAL][i % N_PARTIAL] = bf16_from_f32(value_of(VALUES_USUAL, next(&seed)));
    reduce_joins(NULL, 4, joins);
    kernels_nth(0)->reduce(
        &(struct reduce_args){DTYPE_BF16, 4, leaves, joins, all->whole, true, N_PARTIAL, 0, NULL, 0, false}, &result);
    exact_sum_carry(&result.squares);
    return result.squares;
}

/* Adds as a step does: the partial sums of two nodes' ranks into buffers, then these into an accumulator. */
static void check_partial_sums(uint64_t seed)
{
    struct partial_sums *all = device_memory_new(sizeof(*all));
    struct exact_sum expected = partial_sums_init(all, seed);
    const void *pairs[3][2] = {
        {all->pushed[0], all->pushed[1]}, {all->pushed[2], all->pushed[3]}, {all->parts[0], all->parts[1]}};
    struct device_reduce_list list = {.ranges = all->ranges,
                                      .leaves = all->leaves,
                                      .chunks = all->chunks,
                                      .squares = all->squares,
                                      .findings = all->findings,
                                      .overflows = all->overflows,
                                      .n_ranges = 2,
                                      .n_leaves = 4};
    struct reduce_join join;

    reduce_joins(NULL, 2, &join);
    for (uint32_t i = 0; i < 2; i++) {
        all->ranges[i] = (struct device_reduce_range){.out = all->parts[i],
                                                      .n_elems = N_PARTIAL,
                                                      .first_leaf = 2 * i,
                                                      .n_leaves = 2,
                                                      .dtype = DTYPE_BF16,
                                                      .first = true};
        device_leaves_fill(all->leaves + 2 * i, pairs[i], 2, &join);
    }
    device_reduce_fill(&list, all->ranges, all->leaves, all->chunks);
    assert_int_equal(device_reduce(NULL, &list), 0);
    assert_int_equal(device_finish(), 0);
    device_leaves_fill(all->leaves, pairs[2], 2, &join);
    all->ranges[0] = (struct device_reduce_range){
        .out = all->acc, .n_elems = N_PARTIAL, .n_leaves = 2, .dtype = DTYPE_F32, .first = true};
    list.n_ranges = 1;
    list.n_leaves = 2;
    device_reduce_fill(&list, all->ranges, all->leaves, all->chunks);
    assert_int_equal(device_reduce(NULL, &list), 0);
    assert_int_equal(device_finish(), 0);
    carry(&all->squares[0]);
    assert_memory_equal(all->acc, all->whole, sizeof(all->acc));
    assert_memory_equal(&all->squares[0], &expected, sizeof(expected));
    device_memory_free(all);
}

static void test_partial_sums(void **state)
{
    in_both_orders(check_partial_sums, 3);
}

/* Asserts the order in which the device joins leaves. Each leaf is a letter, each join a pair of brackets. */
static void check_tree(const bool *present, unsigned world)
{
    char waiting[REDUCE_MAX_LEAVES][1024], text[REDUCE_MAX_LEAVES][1024], joined[1024];
    struct reduce_join joins[REDUCE_MAX_LEAVES];
    struct device_leaf leaves[REDUCE_MAX_LEAVES];
    const void *data[REDUCE_MAX_LEAVES] = {0};
    unsigned n_joins = reduce_joins(present, world, joins), n_waiting = 0, most = 0;

    for (unsigned leaf = 0; leaf <= n_joins; leaf++) {
        data[leaf] = &text[leaf];
        snprintf(text[leaf], sizeof(text[leaf]), "%u", leaf);
    }
    device_leaves_fill(leaves, data, n_joins + 1, joins);
    for (unsigned leaf = 0; leaf <= n_joins; leaf++) {
        assert_ptr_equal(leaves[leaf].data, data[leaf]);
        strcpy(waiting[n_waiting++], text[leaf]);
        most = n_waiting > most ? n_waiting : most;
        for (unsigned join = 0; join < leaves[leaf].n_joins; join++, n_waiting--) {
            snprintf(joined, sizeof(joined), "(%.500s %.500s)", waiting[n_waiting - 2], waiting[n_waiting - 1]);
            strcpy(waiting[n_waiting - 2], joined);
        }
    }
    for (unsigned j = 0; j < n_joins; j++) {
        snprintf(joined, sizeof(joined), "(%.500s %.500s)", text[joins[j].dst], text[joins[j].src]);
        strcpy(text[joins[j].dst], joined);
    }
    assert_int_equal(n_waiting, 1);
    assert_string_equal(waiting[0], text[0]);
    assert_true(most <= DEVICE_TREE_DEPTH + 1);
}

static void test_trees(void **state)
{
    static bool present[1 << 16];
    uint64_t seed = 5;

    for (unsigned world = 1; world <= REDUCE_MAX_LEAVES; world++)
        check_tree(NULL, world);
    for (int round = 0; round < 200; round++) {
        bool some[MAX_WORLD];

        check_tree(some, choose_ranks(some, &seed));
    }
    /* the deepest tree: one rank on the left of every split, and the last two */
    for (unsigned left = 1 << 15, at = 0; left > 0; at += left, left /= 2)
        present[at] = true;
    present[(1 << 16) - 1] = true;
    check_tree(present, 1 << 16);
}

/* ---- the 64-bit sums alone ----------------------------------------------------------------------------- */

enum {
    N_POSITIONS = 40,
};

struct positions {
    struct array arrays[N_POSITIONS];
    struct device_position_range ranges[N_POSITIONS];
    struct device_chunk chunks[N_POSITIONS * 3];
    struct position_sum sums[N_POSITIONS];
};

static void check_positions(uint64_t seed)
{
    struct positions *all = device_memory_new(sizeof(*all));
    struct device_position_list list = {
        .ranges = all->ranges, .chunks = all->chunks, .sums = all->sums, .n_ranges = N_POSITIONS};

    memset(all->sums, 0xee, sizeof(all->sums));
    for (unsigned i = 0; i < N_POSITIONS; i++) {
        enum dtype dtype = (enum dtype)(next(&seed) % N_DTYPES);
        size_t n_elems = a_length(&seed), size = dtype_size(dtype);

        all->arrays[i] = array_new(n_elems * size, a_shift(size, &seed), false);
        for (size_t k = 0; k < all->arrays[i].n_bytes; k++)
            all->arrays[i].data[k] = (char)next(&seed);
        all->ranges[i] = (struct device_position_range){
            .data = all->arrays[i].data, .n_elems = n_elems, .start_elem = next(&seed) % 999 * 64, .dtype = dtype};
        list.n_chunks += device_chunks_fill(all->chunks + list.n_chunks, i, n_elems);
    }
    assert_int_equal(device_position_sums(NULL, &list), 0);
    assert_int_equal(device_finish(), 0);
    for (unsigned i = 0; i < N_POSITIONS; i++) {
        struct position_sum expected = {0};

        position_sum_update(&expected, (enum dtype)all->ranges[i].dtype, all->ranges[i].data, all->ranges[i].n_elems,
                            all->ranges[i].start_elem);
        assert_memory_equal(&all->sums[i], &expected, sizeof(expected));
        array_free(&all->arrays[i]);
    }
    device_memory_free(all);
}

static void test_positions(void **state)
{
    for (uint64_t seed = 0; seed < 8; seed++)
        in_both_orders(check_positions, seed);
}

/* ---- update -------------------------------------------------------------------------------------------- */

#define MUON_MOMENTUM ((enum optimizer)DEVICE_MUON_MOMENTUM)

static const struct {
    enum optimizer optimizer;
    struct hyper hyper;
} cases[] = {
    {OPTIMIZER_ADAMW, {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01}},
    {OPTIMIZER_ADAM, {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .adam_w_mode = true}},
    {OPTIMIZER_ADAM, {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}},
    {OPTIMIZER_SGD, {.lr = 0.1, .weight_decay = 1e-4}},
    {OPTIMIZER_SGD, {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 1e-4}},
    {OPTIMIZER_SGD, {.lr = 0.1, .momentum = 0.9, .nesterov = true}},
    {OPTIMIZER_LION, {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1}},
    {OPTIMIZER_ADAGRAD, {.lr = 0.01, .lr_decay = 0.1, .eps = 1e-10, .weight_decay = 0.02}},
    {OPTIMIZER_MUON, {.lr = 0.02, .momentum = 0.95, .weight_decay = 0.1}},
    {MUON_MOMENTUM, {.lr = 0.02, .momentum = 0.95}},
    {MUON_MOMENTUM, {.lr = 0.02, .momentum = 0.95, .nesterov = true}},
};

/* Return: which moments a launch updates. */
static struct optimizer_moments moments_in(enum optimizer optimizer, const struct hyper *hyper)
{
    if (optimizer == OPTIMIZER_MUON || optimizer == MUON_MOMENTUM)
        return (struct optimizer_moments){.m = optimizer == MUON_MOMENTUM};
    return optimizer_moments(optimizer, hyper);
}

static void compute_scalars(enum optimizer optimizer, const struct hyper *hyper, double s, uint64_t t, uint32_t param,
                            struct update_scalars *out)
{
    update_scalars_compute(optimizer == MUON_MOMENTUM ? OPTIMIZER_MUON : optimizer, hyper, s, t, out);
    out->rounding_key = update_rounding_key(param, t);
    if (optimizer == OPTIMIZER_MUON)
        out->a = (float)hyper->lr;
}

static void update_here(const struct kernels *kernels, enum optimizer optimizer, struct update_args *args)
{
    if (optimizer == MUON_MOMENTUM) {
        args->acc = args->p;
        kernels->muon_momentum(args);
    } else {
        kernels->update[optimizer](args);
    }
}

enum {
    N_UPDATES = 20,
};

static const struct moments_type moment_types[] = {
    {.dtype = DTYPE_F32},
    {.dtype = DTYPE_BF16},
    {.dtype = DTYPE_BF16, .stochastic = true},
    {.dtype = DTYPE_SIGNED8, .stochastic = true},
};

enum {
    N_CASES = ARRAY_SIZE(cases),
    N_WIDE_CASES = N_CASES * ARRAY_SIZE(moment_types), /* each case with each type of moments */
    N_ALL_CASES = 2 * N_WIDE_CASES,                    /* each of these with both kinds of masters */
};

static struct moments_type moments_of(uint64_t c)
{
    return moment_types[c / N_CASES % ARRAY_SIZE(moment_types)];
}

static bool is_master24(uint64_t c)
{
    return c / N_WIDE_CASES % 2 && cases[c % N_CASES].optimizer != MUON_MOMENTUM;
}

/* Return: a random first element. Elements are counted modulo 2^32, so the largest start wraps around. */
static uint64_t a_start(uint64_t *seed)
{
    return next(seed) % 2 ? 64 * (next(seed) % 1000) : (UINT64_C(1) << 32) - 64;
}

/* A range's arrays. Arrays that the range does not use are allocated, but not passed to the kernel. */
struct updated {
    struct array p, m, v, w16, lower;
};

struct updates {
    uint64_t marks[N_UPDATES * 3];
    struct updated got[N_UPDATES], expected[N_UPDATES];
    struct array acc[N_UPDATES];
    struct device_update_range ranges[N_UPDATES];
    struct update_scalars scalars[N_UPDATES];
    struct device_chunk chunks[N_UPDATES * 3];
    struct device_update_list list;
};

static struct updated updated_new(size_t n_elems, enum dtype moments, uint64_t *seed)
{
    size_t n_bytes = dtype_bytes(moments, n_elems), align = moments == DTYPE_BF16 ? 2 : 4;
    struct updated updated = {
        .p = array_new(n_elems * 4, a_shift(4, seed), true),
        .m = array_new(n_bytes, a_shift(align, seed), true),
        .v = array_new(n_bytes, a_shift(align, seed), true),
        .w16 = array_new(n_elems * 2, a_shift(2, seed), true),
        .lower = array_new(n_elems, a_shift(1, seed), true),
    };
    struct master24 masters = {(uint16_t *)(void *)updated.w16.data, (int8_t *)updated.lower.data};

    fill(&updated.p, DTYPE_F32, next(seed) % 2 ? VALUES_WILD : VALUES_USUAL, seed);
    master24_from_f32(masters, (const float *)(const void *)updated.p.data, n_elems);
    memset(updated.m.data, 0, updated.m.n_bytes);
    memset(updated.v.data, 0, updated.v.n_bytes);
    return updated;
}

static struct updated updated_copy(const struct updated *from)
{
    return (struct updated){array_copy(&from->p), array_copy(&from->m), array_copy(&from->v), array_copy(&from->w16),
                            array_copy(&from->lower)};
}

static void updated_free(struct updated *updated)
{
    array_free(&updated->p);
    array_free(&updated->m);
    array_free(&updated->v);
    array_free(&updated->w16);
    array_free(&updated->lower);
}

/* Return: the slots of n_blocks blocks, in their exact size for address sanitizer. They begin with arbitrary bits. */
static void *slots_new(uint32_t n_blocks, uint32_t slot_bytes)
{
    size_t n_bytes = device_undo_bytes(n_blocks, slot_bytes);
    void *slots = device_memory_new(n_bytes);

    memset(slots, 0xee, n_bytes);
    return slots;
}

static void updates_init(struct updates *all, uint64_t c, uint64_t *seed)
{
    enum optimizer optimizer = cases[c % N_CASES].optimizer;
    struct optimizer_moments moments = moments_in(optimizer, &cases[c % N_CASES].hyper);
    bool master24 = is_master24(c);

    all->list = (struct device_update_list){.ranges = all->ranges,
                                            .chunks = all->chunks,
                                            .scalars = all->scalars,
                                            .optimizer = optimizer,
                                            .master24 = master24,
                                            .moments = moments_of(c)};
    for (uint32_t i = 0; i < N_UPDATES; i++) {
        enum dtype w16_dtype = optimizer == MUON_MOMENTUM ? DTYPE_F32 : (enum dtype)(next(seed) % N_DTYPES);
        size_t n_elems = a_length(seed);
        struct updated *got = &all->got[i];

        w16_dtype = master24 ? DTYPE_BF16 : w16_dtype;

        *got = updated_new(n_elems, all->list.moments.dtype, seed);
        all->expected[i] = updated_copy(got);
        all->acc[i] = array_new(n_elems * 4, a_shift(4, seed), false);
        all->ranges[i] = (struct device_update_range){
            .p = master24 ? NULL : (float *)(void *)got->p.data,
            .m = moments.m ? got->m.data : NULL,
            .v = moments.v ? got->v.data : NULL,
            .acc = (const float *)(const void *)(optimizer == MUON_MOMENTUM ? got->p : all->acc[i]).data,
            .w16 = w16_dtype == DTYPE_F32 ? NULL : got->w16.data,
            .lower = master24 ? (int8_t *)got->lower.data : NULL,
            .n_elems = n_elems,
            .start_elem = a_start(seed),
            .scalars = N_UPDATES - 1 - i,
            .w16_dtype = w16_dtype,
        };
        all->list.n_chunks += device_chunks_fill(all->chunks + all->list.n_chunks, i, n_elems);
    }
}

static void check_updated(const struct updates *all, uint32_t i)
{
    const struct device_update_range *range = &all->ranges[i];
    const struct updated *expected = &all->expected[i], *got = &all->got[i];
    struct update_args args = {
        .p = range->p ? (float *)(void *)expected->p.data : NULL,
        .m = range->m ? expected->m.data : NULL,
        .v = range->v ? expected->v.data : NULL,
        .acc = range->acc,
        .w16 = range->w16 ? expected->w16.data : NULL,
        .lower = range->lower ? (int8_t *)expected->lower.data : NULL,
        .w16_dtype = (enum dtype)range->w16_dtype,
        .moments = all->list.moments,
        .start_elem = range->start_elem,
        .n_elems = range->n_elems,
        .k = &all->scalars[range->scalars],
    };

    update_here(kernels_nth(i % 2 && kernels_nth(1) ? 1 : 0), all->list.optimizer, &args);
    assert_same_bytes(&got->p, &expected->p);
    assert_same_bytes(&got->m, &expected->m);
    assert_same_bytes(&got->v, &expected->v);
    assert_same_bytes(&got->w16, &expected->w16);
    assert_same_bytes(&got->lower, &expected->lower);
}

static void updates_keep(struct updates *all, const struct hyper *hyper)
{
    const struct optimizer_moments moments = moments_in(all->list.optimizer, hyper);
    const unsigned n_moments = (unsigned)moments.m + moments.v;
    const uint32_t slot_bytes = device_undo_slot_bytes(n_moments, all->list.moments.dtype);
    const uint32_t n_blocks = device_update_blocks(all->list.n_chunks);

    memset(all->marks, 0, sizeof(all->marks));
    all->list.undo = (struct device_update_undo){
        .marks = all->marks, .slots = slots_new(n_blocks, slot_bytes), .slot_bytes = slot_bytes};
}

/* Does three steps, in which a parameter's count differs from its neighbours'. keeps: with undo slots. */
static void check_updates_that(bool keeps, uint64_t seed)
{
    struct updates *all = device_memory_new(sizeof(*all));
    size_t c = seed % N_CASES;

    updates_init(all, seed, &seed);
    if (keeps)
        updates_keep(all, &cases[c].hyper);
    for (uint64_t step = 0; step < 3; step++) {
        all->list.undo.tag = step + 1;
        for (uint32_t i = 0; i < N_UPDATES; i++) {
            compute_scalars(cases[c].optimizer, &cases[c].hyper, step == 1 ? 1 / 3.0 : 0.125, 1 + (step + i) % 4, i,
                            &all->scalars[i]);
            /* squares of wild values overflow, which makes a moment infinite for ever */
            fill(&all->acc[i], DTYPE_F32, (enum values)(next(&seed) % VALUES_NONFINITE), &seed);
        }
        assert_int_equal(device_update(NULL, &all->list), 0);
        assert_int_equal(device_finish(), 0);
        for (uint32_t i = 0; i < N_UPDATES; i++)
            check_updated(all, i);
    }
    for (uint32_t i = 0; i < N_UPDATES; i++) {
        updated_free(&all->got[i]);
        updated_free(&all->expected[i]);
        array_free(&all->acc[i]);
    }
    if (keeps)
        device_memory_free(all->list.undo.slots);
    device_memory_free(all);
}

static void check_updates(uint64_t seed)
{
    check_updates_that(false, seed);
}

static void check_updates_with_slots(uint64_t seed)
{
    check_updates_that(true, seed);
}

static void test_update(void **state)
{
    for (uint64_t seed = 0; seed < N_ALL_CASES; seed++)
        in_both_orders(check_updates, seed);
}

static void test_update_with_slots(void **state)
{
    for (uint64_t seed = 0; seed < N_ALL_CASES; seed++)
        in_both_orders(check_updates_with_slots, seed);
}

/* ---- updates that are killed ---------------------------------------------------------------------------- */

enum {
    MAX_TORN = 2 * DEVICE_UPDATE_BLOCKS + 40, /* ranges of one chunk; some blocks have three */
    TORN_STRIDE = 1152,                       /* elements between the starts of two ranges */
    N_TORN_SCALARS = 3,
    TORN_P = 0,
    TORN_M,
    TORN_V,
    TORN_W16, /* 16-bit elements use half of the room, bytes a quarter */
    TORN_LOWER,
    N_TORN_ARRAYS,
};

static const size_t torn_sizes[] = {2 * DEVICE_UNDO_GROUP_ELEMS + 90, 3, DEVICE_UNDO_GROUP_ELEMS + 2, 64};

/* All arrays of a kind are in one, without gaps. `before` has their contents before each try. */
struct torn {
    struct device_update_list list;
    struct device_update_range *ranges;
    struct device_chunk *chunks;
    struct update_scalars *scalars;
    uint32_t *arrays[N_TORN_ARRAYS], *before[N_TORN_ARRAYS], *expected[N_TORN_ARRAYS];
    float *acc;
    size_t n_bytes; /* size of each array */
    uint64_t tag;
};

static enum dtype torn_dtype(const struct torn *torn, unsigned k)
{
    const enum dtype dtypes[N_TORN_ARRAYS] = {DTYPE_F32, torn->list.moments.dtype,
                                              moments_dtype_of_square(torn->list.moments), DTYPE_BF16};

    return dtypes[k];
}

/* Return: element `at` of array k, or its group. */
static void *torn_elem(const struct torn *torn, uint32_t *const *arrays, unsigned k, size_t at)
{
    enum dtype dtype = torn_dtype(torn, k);

    if (k == TORN_LOWER)
        return (uint8_t *)arrays[k] + at;
    return (uint8_t *)arrays[k] + dtype_bytes(dtype, dtype_is_grouped(dtype) ? at / GROUP8_ELEMS * GROUP8_ELEMS : at);
}

/* Fills array k with positive values, because a v is positive. */
static void torn_fill_array(const struct torn *torn, unsigned k, uint64_t *seed)
{
    enum dtype dtype = torn_dtype(torn, k);
    int8_t *lower = (int8_t *)torn->before[k];
    float x[GROUP8_ELEMS];

    for (size_t i = 0; k == TORN_LOWER && i < torn->n_bytes; i++)
        lower[i] = (int8_t)((int)(next(seed) % 255) - MASTER24_MOST);
    if (k == TORN_LOWER)
        return;

    for (size_t i = 0; i < torn->n_bytes / sizeof(float); i += GROUP8_ELEMS) {
        for (size_t j = 0; j < GROUP8_ELEMS; j++)
            x[j] = fabsf(value_of(VALUES_USUAL, next(seed)));
        kernels_nth(0)->convert_from_f32(torn_elem(torn, torn->before, k, i), x, dtype, GROUP8_ELEMS);
    }
}

static void torn_fill(struct torn *torn, uint64_t *seed)
{
    for (unsigned k = 0; k < N_TORN_ARRAYS; k++) {
        torn->arrays[k] = device_memory_new(torn->n_bytes);
        torn->before[k] = device_memory_new(torn->n_bytes);
        torn->expected[k] = device_memory_new(torn->n_bytes);
        memset(torn->before[k], 0, torn->n_bytes);
        torn_fill_array(torn, k, seed);
        memcpy(torn->expected[k], torn->before[k], torn->n_bytes);
    }
    torn->acc = device_memory_new(torn->n_bytes);
    for (size_t i = 0; i < torn->n_bytes / sizeof(float); i++)
        torn->acc[i] = value_of(VALUES_USUAL, next(seed));
}

/* Return: the first element of range i. Every third range is not aligned. */
static size_t torn_begin(uint32_t i)
{
    return (size_t)i * TORN_STRIDE + (i % 3 == 2);
}

/* Computes the expected results of range i on the CPU. */
static void torn_expect(const struct torn *torn, uint32_t i)
{
    const struct device_update_range *range = &torn->ranges[i];
    size_t at = torn_begin(i);
    struct update_args args = {
        .p = range->p ? torn_elem(torn, torn->expected, TORN_P, at) : NULL,
        .m = range->m ? torn_elem(torn, torn->expected, TORN_M, at) : NULL,
        .v = range->v ? torn_elem(torn, torn->expected, TORN_V, at) : NULL,
        .acc = range->acc,
        .w16 = range->w16 ? torn_elem(torn, torn->expected, TORN_W16, at) : NULL,
        .lower = range->lower ? torn_elem(torn, torn->expected, TORN_LOWER, at) : NULL,
        .w16_dtype = (enum dtype)range->w16_dtype,
        .moments = torn->list.moments,
        .start_elem = range->start_elem,
        .n_elems = range->n_elems,
        .k = &torn->scalars[range->scalars],
    };

    update_here(kernels_nth(0), torn->list.optimizer, &args);
}

static struct torn torn_new(size_t c, uint32_t n_ranges)
{
    const enum optimizer optimizer = cases[c % N_CASES].optimizer;
    struct hyper hyper = cases[c % N_CASES].hyper;
    struct optimizer_moments moments = moments_in(optimizer, &hyper);
    struct torn torn = {.n_bytes = (size_t)n_ranges * TORN_STRIDE * sizeof(float)};
    const uint32_t slot_bytes = device_undo_slot_bytes((unsigned)moments.m + moments.v, moments_of(c).dtype);
    bool master24 = is_master24(c);
    uint64_t seed = c;

    torn.ranges = device_memory_new(n_ranges * sizeof(*torn.ranges));
    torn.chunks = device_memory_new(n_ranges * sizeof(*torn.chunks));
    torn.scalars = device_memory_new(N_TORN_SCALARS * sizeof(*torn.scalars));
    torn.list = (struct device_update_list){.ranges = torn.ranges,
                                            .chunks = torn.chunks,
                                            .scalars = torn.scalars,
                                            .n_chunks = n_ranges,
                                            .optimizer = optimizer,
                                            .master24 = master24,
                                            .moments = moments_of(c)};
    torn_fill(&torn, &seed);
    /* Scalars of a first step, of a later step, and of a later step without momentum. */
    for (unsigned i = 0; i < N_TORN_SCALARS; i++) {
        hyper.momentum = i < 2 ? hyper.momentum : 0;
        compute_scalars(optimizer, &hyper, 0.125, 1 + (i > 0), i, &torn.scalars[i]);
    }
    for (uint32_t i = 0; i < n_ranges; i++) {
        enum dtype w16_dtype = optimizer == MUON_MOMENTUM ? DTYPE_F32 : (enum dtype)(i % N_DTYPES);
        size_t at = torn_begin(i);

        w16_dtype = master24 ? DTYPE_BF16 : w16_dtype;
        torn.ranges[i] = (struct device_update_range){
            .p = master24 ? NULL : torn_elem(&torn, torn.arrays, TORN_P, at),
            .m = moments.m ? torn_elem(&torn, torn.arrays, TORN_M, at) : NULL,
            .v = moments.v ? torn_elem(&torn, torn.arrays, TORN_V, at) : NULL,
            .acc = optimizer == MUON_MOMENTUM ? torn_elem(&torn, torn.arrays, TORN_P, at) : torn.acc + at,
            .w16 = w16_dtype == DTYPE_F32 ? NULL : torn_elem(&torn, torn.arrays, TORN_W16, at),
            .lower = master24 ? torn_elem(&torn, torn.arrays, TORN_LOWER, at) : NULL,
            .n_elems = torn_sizes[i % ARRAY_SIZE(torn_sizes)],
            .start_elem = at / 64 * 64,
            .scalars = i % N_TORN_SCALARS,
            .w16_dtype = w16_dtype,
        };
        torn.chunks[i] = (struct device_chunk){.range = i};
        torn_expect(&torn, i);
    }
    torn.list.undo = (struct device_update_undo){
        .marks = device_memory_new(device_update_blocks(n_ranges) * sizeof(uint64_t)),
        .slots = slots_new(device_update_blocks(n_ranges), slot_bytes),
        .slot_bytes = slot_bytes,
    };
    memset(torn.list.undo.marks, 0, device_update_blocks(n_ranges) * sizeof(uint64_t));
    return torn;
}

static void torn_free(struct torn *torn)
{
    for (unsigned k = 0; k < N_TORN_ARRAYS; k++) {
        device_memory_free(torn->arrays[k]);
        device_memory_free(torn->before[k]);
        device_memory_free(torn->expected[k]);
    }
    device_memory_free(torn->acc);
    device_memory_free(torn->ranges);
    device_memory_free(torn->chunks);
    device_memory_free(torn->scalars);
    device_memory_free(torn->list.undo.marks);
    device_memory_free(torn->list.undo.slots);
}

/* Return: whether the launch ran to its end. */
static bool torn_launch(struct torn *torn, uint64_t n_turns)
{
    (void)device_stop_after(n_turns);
    assert_int_equal(device_update(NULL, &torn->list), 0);
    assert_int_equal(device_finish(), 0);
    return !device_was_stopped();
}

static void torn_check(const struct torn *torn, uint64_t first, uint64_t second)
{
    for (unsigned k = 0; k < N_TORN_ARRAYS; k++)
        if (memcmp(torn->arrays[k], torn->expected[k], torn->n_bytes) != 0)
            fail_msg("array %u differs, killed after %llu turns and after %llu", k, (unsigned long long)first,
                     (unsigned long long)second);
}

/*
 * Runs a new list: kills it, kills it again, and then lets it end. Slots and marks still have the last list's values.
 * Return: whether it was killed the first time.
 */
static bool torn_try(struct torn *torn, uint64_t first, uint64_t second)
{
    bool killed;

    for (unsigned k = 0; k < N_TORN_ARRAYS; k++)
        memcpy(torn->arrays[k], torn->before[k], torn->n_bytes);
    torn->list.undo.tag = ++torn->tag;
    killed = !torn_launch(torn, first);
    if (killed)
        (void)torn_launch(torn, second);
    assert_true(torn_launch(torn, 0));
    torn_check(torn, first, second);
    return killed;
}

/* A few blocks with one chunk each. Kills the list at every n-th turn. */
static void check_killed(uint64_t c)
{
    struct torn torn = torn_new(c, 4);
    uint64_t n = 1, stride = tests_full() ? 1 : 23;

    while (torn_try(&torn, n, 1 + n * 7919 % 1500))
        n += stride;
    assert_true(n > UINT64_C(4) * 5 * 128); /* a chunk of one group has at least five phases */
    torn_free(&torn);
}

/* More chunks than blocks, so that a block uses its slots and marks for several chunks. */
static void check_killed_with_many(uint64_t c)
{
    struct torn torn = torn_new(c, MAX_TORN);
    uint64_t n_all = UINT64_C(128) * MAX_TORN * 5, state = c + 1;

    for (unsigned i = 0; i < (tests_full() ? 8u : 3u); i++)
        (void)torn_try(&torn, 1 + next(&state) % n_all, 1 + next(&state) % n_all);
    /* Kills in the first block, which has three chunks, or in the last one if the order is reversed. */
    for (uint64_t n = 1; n < UINT64_C(128) * 30; n += tests_full() ? 131 : 331)
        assert_true(torn_try(&torn, n, n * 7919 % 4000 + 1));
    torn_free(&torn);
}

/*
 * Return: whether to try a case. Without --full, half of the cases with bf16 moments and a third of those with 24-bit
 * masters are tried.
 */
static bool is_tried(uint64_t c)
{
    bool tried = is_master24(c) ? c % 3 == 2 : c < N_WIDE_CASES;

    return tests_full() || (tried && (moments_of(c).dtype != DTYPE_BF16 || c % 2 == moments_of(c).stochastic));
}

static void need_stops(void)
{
    if (device_stop_after(0))
        return;
    print_message("a kernel on a GPU cannot be ended at a phase\n");
    skip();
}

static void test_killed_updates(void **state)
{
    need_stops();
    for (uint64_t c = 0; c < N_ALL_CASES; c++)
        if (is_tried(c))
            in_both_orders(check_killed, c);
}

static void test_killed_updates_of_many_chunks(void **state)
{
    need_stops();
    for (uint64_t c = 0; c < N_ALL_CASES; c += tests_full() ? 5 : 9)
        in_both_orders(check_killed_with_many, c);
}

/*
 * Asserts that each block uses only its own two slots. The first one has the block's last group with an even number:
 * the masters, and behind them the first moment.
 */
static void torn_check_slots(const struct torn *torn)
{
    const size_t of_block = (size_t)2 * torn->list.undo.slot_bytes;
    const size_t moment_at = DEVICE_UNDO_GROUP_ELEMS * sizeof(float);
    const size_t lower_at = DEVICE_UNDO_GROUP_ELEMS * sizeof(uint16_t);
    const unsigned moment = torn->ranges[0].m ? TORN_M : TORN_V;

    for (uint32_t i = 0; i < torn->list.n_chunks; i++) {
        size_t last = (torn->ranges[i].n_elems - 1) / DEVICE_UNDO_GROUP_ELEMS / 2 * 2 * DEVICE_UNDO_GROUP_ELEMS;
        size_t at = torn_begin(i) + last;
        const uint8_t *slot = (const uint8_t *)torn->list.undo.slots + i * of_block;

        if (torn->ranges[i].lower) {
            assert_memory_equal(slot, torn_elem(torn, torn->before, TORN_W16, at), sizeof(uint16_t));
            assert_memory_equal(slot + lower_at, torn_elem(torn, torn->before, TORN_LOWER, at), 1);
        } else {
            assert_memory_equal(slot, torn_elem(torn, torn->before, TORN_P, at), sizeof(float));
        }
        if (torn->list.optimizer != OPTIMIZER_MUON &&
            (torn->list.optimizer != OPTIMIZER_SGD || torn->scalars[torn->ranges[i].scalars].momentum))
            assert_memory_equal(slot + moment_at, torn_elem(torn, torn->before, moment, at),
                                torn->list.moments.dtype == DTYPE_BF16 ? 2 : 4);
    }
}

/* Return: a master of the first range. */
static float torn_master(const struct torn *torn, size_t at)
{
    const uint16_t *weights = (const uint16_t *)torn->arrays[TORN_W16];

    return torn->ranges[0].lower ? master24_value(weights[at], ((const int8_t *)torn->arrays[TORN_LOWER])[at])
                                 : f32_from_bits(torn->arrays[TORN_P][at]);
}

/* Sets a master in both the input and the expected result. x is a bf16 number. */
static void torn_set_master(const struct torn *torn, size_t at, float x)
{
    uint32_t *const *const both[] = {torn->arrays, torn->expected};

    for (size_t i = 0; i < ARRAY_SIZE(both); i++) {
        if (!torn->ranges[0].lower) {
            both[i][TORN_P][at] = f32_bits(x);
            continue;
        }
        ((uint16_t *)both[i][TORN_W16])[at] = bf16_from_f32(x);
        ((int8_t *)both[i][TORN_LOWER])[at] = 0;
    }
}

/* A list that has ended changes nothing when it is launched again. The next list does, whatever the marks are. */
static void check_again(uint64_t c)
{
    const float x = 0x1p-20f;
    const size_t first = 0, last = torn_sizes[0] - 1;
    struct torn torn = torn_new(c, 8);

    (void)torn_try(&torn, 0, 0);
    torn_check_slots(&torn);
    torn_set_master(&torn, first, x);
    torn_set_master(&torn, last, x);
    assert_true(torn_launch(&torn, 0));
    torn_check(&torn, 0, 0);
    torn.list.undo.tag = DEVICE_UNDO_MAX_TAG;
    assert_true(torn_launch(&torn, 0));
    assert_true(torn_master(&torn, first) != x && torn_master(&torn, last) != x);
    torn_free(&torn);
}

static void test_updates_again(void **state)
{
    for (uint64_t c = 0; c < N_ALL_CASES; c += c < N_WIDE_CASES || tests_full() ? 1 : 3)
        in_both_orders(check_again, c);
}

/* ---- conversion ---------------------------------------------------------------------------------------- */

enum {
    N_CONVERSIONS = 40,
};

struct conversions {
    struct array src[N_CONVERSIONS], dst[N_CONVERSIONS], expected[N_CONVERSIONS];
    struct device_convert_range ranges[N_CONVERSIONS];
    struct device_chunk chunks[N_CONVERSIONS * 9];
    struct device_convert_list list;
};

/* Makes range i. `from` and `to` are sizes of elements. The source has random bits, or all 16-bit values. */
static void conversion_init(struct conversions *all, uint32_t i, enum dtype dtype, bool widening, uint64_t *seed)
{
    size_t n_elems = i < N_DTYPES ? 1 << 16 : a_length(seed);
    size_t from = widening ? dtype_size(dtype) : 4, to = widening ? 4 : dtype_size(dtype);
    struct array *src = &all->src[i];

    *src = array_new(n_elems * from, i < N_DTYPES ? 0 : a_shift(from, seed), false);
    for (size_t k = 0; k < n_elems; k++) {
        uint32_t bits = from == 2 && i < N_DTYPES ? (uint32_t)k : (uint32_t)next(seed);
        float value = value_of((enum values)(k % N_VALUES), next(seed));

        if (from == 4 && k % 2)
            bits = f32_bits(value);
        memcpy(src->data + k * from, &bits, from); /* little-endian */
    }
    all->dst[i] = array_new(n_elems * to, i < N_DTYPES ? 0 : a_shift(to, seed), true);
    all->expected[i] = array_copy(&all->dst[i]);
    all->ranges[i] =
        (struct device_convert_range){.dst = all->dst[i].data, .src = src->data, .n_elems = n_elems, .dtype = dtype};
    all->list.n_chunks += device_chunks_fill(all->chunks + all->list.n_chunks, i, n_elems);
}

static void check_conversions(bool widening, uint64_t seed)
{
    struct conversions *all = device_memory_new(sizeof(*all));

    all->list = (struct device_convert_list){.ranges = all->ranges, .chunks = all->chunks};
    for (uint32_t i = 0; i < N_CONVERSIONS; i++)
        conversion_init(all, i, (enum dtype)(i % N_DTYPES), widening, &seed);
    assert_int_equal((widening ? device_convert_to_f32 : device_convert_from_f32)(NULL, &all->list), 0);
    assert_int_equal(device_finish(), 0);
    for (uint32_t i = 0; i < N_CONVERSIONS; i++) {
        const struct device_convert_range *range = &all->ranges[i];
        const struct kernels *k = kernels_nth(i % 2 && kernels_nth(1) ? 1 : 0);
        void *expected = all->expected[i].data;

        if (widening)
            k->convert_to_f32(expected, range->src, (enum dtype)range->dtype, range->n_elems);
        else
            k->convert_from_f32(expected, range->src, (enum dtype)range->dtype, range->n_elems);
        assert_same_bytes(&all->dst[i], &all->expected[i]);
        array_free(&all->src[i]);
        array_free(&all->dst[i]);
        array_free(&all->expected[i]);
    }
    device_memory_free(all);
}

static void check_widening(uint64_t seed)
{
    check_conversions(true, seed);
}

static void check_narrowing(uint64_t seed)
{
    check_conversions(false, seed);
}

static void test_convert(void **state)
{
    for (uint64_t seed = 0; seed < 3; seed++) {
        in_both_orders(check_widening, seed);
        in_both_orders(check_narrowing, seed);
    }
}

/* ---- Muon: the division by the norm ------------------------------------------------------------------------ */

static void normalize(struct array *x, const struct array *matrix, double eps, bool backwards)
{
    struct array sums = array_new(DEVICE_NORM_SUMS * sizeof(double), 0, true);
    const struct device_normalize list = {.x = (float *)(void *)x->data,
                                          .matrix = (const float *)(const void *)matrix->data,
                                          .sums = (double *)(void *)sums.data,
                                          .n_elems = matrix->n_bytes / sizeof(float),
                                          .eps = eps};

    device_order(backwards);
    assert_int_equal(device_normalize(NULL, &list), 0);
    assert_int_equal(device_finish(), 0);
    device_order(false);
    assert_guarded(&sums);
    array_free(&sums);
}

/* Fills the matrix. Sums of whole numbers have the same bits in any order. */
static void fill_matrix(struct array *matrix, bool whole_numbers, float scale, uint64_t *seed)
{
    float *elems = (float *)(void *)matrix->data;

    for (size_t i = 0; i < matrix->n_bytes / sizeof(float); i++)
        elems[i] = scale * (whole_numbers ? (float)((int)(next(seed) % 64) - 32) : value_of(VALUES_USUAL, next(seed)));
}

static void expect_normalized(struct array *x, const struct array *matrix, double eps)
{
    const float *elems = (const float *)(const void *)matrix->data;
    float *quotients = (float *)(void *)x->data;
    double sum = 0;

    for (size_t i = 0; i < matrix->n_bytes / sizeof(float); i++)
        sum += (double)elems[i] * (double)elems[i];
    for (size_t i = 0; i < matrix->n_bytes / sizeof(float); i++)
        quotients[i] = elems[i] / (float)fmax(sqrt(sum), eps);
}

static void assert_near(const struct array *array, const struct array *expected)
{
    const float *a = (const float *)(const void *)array->data, *b = (const float *)(const void *)expected->data;

    for (size_t i = 0; i < array->n_bytes / sizeof(float); i++)
        assert_true(fabsf(a[i] - b[i]) <= 2e-7f * fabsf(b[i]));
}

static void check_normalize(size_t n_elems, bool whole_numbers, float scale, double eps, uint64_t *seed)
{
    static const size_t shifts[][2] = {{0, 0}, {4, 0}, {0, 8}, {12, 12}};
    struct array matrix = array_new(n_elems * sizeof(float), 0, false), x = array_new(matrix.n_bytes, 0, true);
    struct array expected = array_copy(&x);

    fill_matrix(&matrix, whole_numbers, scale, seed);
    expect_normalized(&expected, &matrix, eps);
    normalize(&x, &matrix, eps, false);
    if (whole_numbers)
        assert_same_bytes(&x, &expected);
    else
        assert_near(&x, &expected);
    /* The bits depend neither on the order of blocks nor on addresses. */
    for (size_t i = 0; i < 2 * ARRAY_SIZE(shifts); i++) {
        struct array from = array_new(matrix.n_bytes, shifts[i / 2][0], false);
        struct array to = array_new(matrix.n_bytes, shifts[i / 2][1], true);

        memcpy(from.data, matrix.data, matrix.n_bytes);
        normalize(&to, &from, eps, i % 2);
        assert_same_bytes(&to, &x);
        array_free(&from);
        array_free(&to);
    }
    array_free(&matrix);
    array_free(&x);
    array_free(&expected);
}

static void test_normalize(void **state)
{
    static const size_t numbers[] = {1, 3, 4, 7, 511, 513, 2047, 2048, 2049, 40001};
    uint64_t seed = 1;

    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        check_normalize(numbers[i], true, 1, 1e-8, &seed);
        check_normalize(numbers[i], false, 1, 1e-8, &seed);
        check_normalize(numbers[i], true, 0x1p-60f, 1e-8, &seed); /* the norm is smaller than eps */
        check_normalize(numbers[i], true, 0, 1e-8, &seed);
    }
    /* The matrix has more tiles of 2048 than DEVICE_NORM_SUMS. */
    check_normalize(2048 * DEVICE_NORM_SUMS + 2050, true, 1, 1e-8, &seed);
}

static void test_load(void **state)
{
    assert_int_equal(device_load_kernels(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reduce),         cmocka_unit_test(test_partial_sums),
        cmocka_unit_test(test_trees),          cmocka_unit_test(test_positions),
        cmocka_unit_test(test_update),         cmocka_unit_test(test_convert),
        cmocka_unit_test(test_load),           cmocka_unit_test(test_update_with_slots),
        cmocka_unit_test(test_killed_updates), cmocka_unit_test(test_killed_updates_of_many_chunks),
        cmocka_unit_test(test_updates_again),  cmocka_unit_test(test_normalize),
    };

    if (!device_open())
        return 77; /* meson's code for a skipped test */
    return cmocka_run_group_tests(tests, NULL, NULL);
}

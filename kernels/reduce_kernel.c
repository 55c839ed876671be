/* SPDX-License-Identifier: Apache-2.0 */
/* The sum over ranks; compiled once per instruction set. */

#include "kernels/isa.h"
#include "kernels/reduce_run.h"
#include "kernels/undo.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/reduce_run_avx2.h"
#define reduce_run reduce_run_avx2
/* Orders stores past the caches before the stores that announce them to other threads. */
#define reduce_order_stores _mm_sfence
#else
#define reduce_run reduce_run_plain
#define reduce_order_stores() ((void)0)
#endif

/* The gradient of an absent rank is not read. The result is exact, because adding its +0 could only turn a -0 into +0.
 * The last addition, to 0.0f or to an accumulator that is never -0, does that anyway. */

/* The unfinished sums of a call. */
struct reduce_state {
    struct exact_bins bins;
    struct position_piece pieces[REDUCE_MAX_LEAVES];
};

/* The data of a call: a range, or the padded copy of its end. */
struct reduce_range {
    float *acc;
    const void *const *leaves;
};

/* Reduces runs begin .. end - 1 of the range, at most EXACT_BINS_MAX_ADDS runs. */
static always_inline void reduce_runs(const struct reduce_args *args, const struct reduce_range *range,
                                      struct reduce_state *state, size_t begin, size_t end, enum dtype dtype,
                                      enum reduce_shape shape, enum reduce_mode mode)
{
    const size_t run_bytes = REDUCE_RUN_ELEMS * dtype_size(dtype);
    const void *leaves[REDUCE_MAX_LEAVES];

    for (size_t run = begin; run < end; run++) {
        float *acc = range->acc + run * REDUCE_RUN_ELEMS;

        for (unsigned leaf = 0; leaf < reduce_shape_leaves(args, shape); leaf++)
            leaves[leaf] = (const char *)range->leaves[leaf] + run * run_bytes;
        if (mode == REDUCE_ADD_SAVED) {
            undo_save(args->undo, 0, acc, REDUCE_RUN_ELEMS);
            undo_mark(args->undo, args->undo_elem + run * REDUCE_RUN_ELEMS, true);
        }
        exact_bins_add(&state->bins, reduce_run(args, acc, leaves, state->pieces, dtype, shape, mode));
        if (mode == REDUCE_ADD_SAVED)
            undo_mark(args->undo, args->undo_elem + (run + 1) * REDUCE_RUN_ELEMS, false);
    }
}

typedef void reduce_runs_fn(const struct reduce_args *args, const struct reduce_range *range,
                            struct reduce_state *state, size_t begin, size_t end);

#define DEFINE_RUNS(dtype, shape, mode)                                                                                \
    static void runs_##dtype##_##shape##_##mode(const struct reduce_args *args, const struct reduce_range *range,      \
                                                struct reduce_state *state, size_t begin, size_t end)                  \
    {                                                                                                                  \
        reduce_runs(args, range, state, begin, end, DTYPE_##dtype, REDUCE_##shape, REDUCE_##mode);                     \
    }
#define DEFINE_SHAPE(dtype, shape)                                                                                     \
    DEFINE_RUNS(dtype, shape, ADD)                                                                                     \
    DEFINE_RUNS(dtype, shape, SET)                                                                                     \
    DEFINE_RUNS(dtype, shape, SET_PAST)                                                                                \
    DEFINE_RUNS(dtype, shape, ADD_SAVED)
#define DEFINE_DTYPE(dtype)                                                                                            \
    DEFINE_SHAPE(dtype, ONE)                                                                                           \
    DEFINE_SHAPE(dtype, TWO)                                                                                           \
    DEFINE_SHAPE(dtype, FOUR)                                                                                          \
    DEFINE_SHAPE(dtype, ANY)

DEFINE_DTYPE(F32)
DEFINE_DTYPE(BF16)
DEFINE_DTYPE(F16)

#define LIST_SHAPE(dtype, shape)                                                                                       \
    [REDUCE_##shape] = {runs_##dtype##_##shape##_ADD, runs_##dtype##_##shape##_SET, runs_##dtype##_##shape##_SET_PAST, \
                        runs_##dtype##_##shape##_ADD_SAVED}
#define LIST_DTYPE(dtype)                                                                                              \
    [DTYPE_##dtype] = {LIST_SHAPE(dtype, ONE), LIST_SHAPE(dtype, TWO), LIST_SHAPE(dtype, FOUR), LIST_SHAPE(dtype, ANY)}

static reduce_runs_fn *const runs_table[N_DTYPES][N_REDUCE_SHAPES][N_REDUCE_MODES] = {
    LIST_DTYPE(F32),
    LIST_DTYPE(BF16),
    LIST_DTYPE(F16),
};

static enum reduce_shape shape_of(const struct reduce_args *args)
{
    const struct reduce_join *joins = args->joins;

    if (args->n_leaves == 1)
        return REDUCE_ONE;
    if (args->n_leaves == 2)
        return REDUCE_TWO;
    /* if the first joins are 0 <- 1 and 2 <- 3, the third is 0 <- 2 */
    if (args->n_leaves == 4 && joins[0].dst == 0 && joins[0].src == 1 && joins[1].dst == 2 && joins[1].src == 3)
        return REDUCE_FOUR;
    return REDUCE_ANY;
}

static enum reduce_mode mode_of(const struct reduce_args *args)
{
    if (!args->first)
        return args->undo ? REDUCE_ADD_SAVED : REDUCE_ADD;
    return args->past_caches && (uintptr_t)args->acc % CACHE_LINE_BYTES == 0 ? REDUCE_SET_PAST : REDUCE_SET;
}

/* Reduces the last n_elems (below 64) of a parameter: a run padded with zeroes, which change no sum. */
static void reduce_tail(const struct reduce_args *args, struct reduce_state *state, size_t n_elems)
{
    reduce_runs_fn *runs = runs_table[args->dtype][shape_of(args)][args->first ? REDUCE_SET : REDUCE_ADD];
    float leaves[REDUCE_MAX_LEAVES][REDUCE_RUN_ELEMS], acc[REDUCE_RUN_ELEMS] = {0};
    const size_t done = args->n_elems - n_elems, size = dtype_size(args->dtype);
    const void *padded[REDUCE_MAX_LEAVES];

    for (unsigned leaf = 0; leaf < args->n_leaves; leaf++) {
        memset(leaves[leaf], 0, sizeof(leaves[leaf]));
        memcpy(leaves[leaf], (const char *)args->leaves[leaf] + done * size, n_elems * size);
        padded[leaf] = leaves[leaf];
    }
    if (!args->first)
        memcpy(acc, args->acc + done, n_elems * sizeof(float));
    runs(args, &(struct reduce_range){.acc = acc, .leaves = padded}, state, 0, 1);
    if (args->undo && !args->first) {
        undo_save(args->undo, 0, args->acc + done, n_elems);
        undo_mark(args->undo, args->undo_elem + done, true);
    }
    memcpy(args->acc + done, acc, n_elems * sizeof(float));
    if (args->undo && !args->first)
        undo_mark(args->undo, args->undo_elem + args->n_elems, false);
}

/* Return: whether any element is NaN. Runs report only that an element is not finite, because that is rare. */
static bool holds_nan(const float *elems, size_t n)
{
    bool found = false;

    for (size_t i = 0; i < n; i++)
        found |= isnan(elems[i]);
    return found;
}

void ISA_FN(reduce)(const struct reduce_args *args, struct reduce_result *result)
{
    const struct reduce_range range = {.acc = args->acc, .leaves = args->leaves};
    size_t n_runs = args->n_elems / REDUCE_RUN_ELEMS, n_left = args->n_elems % REDUCE_RUN_ELEMS, end;
    struct reduce_state state;
    reduce_runs_fn *runs;
    enum reduce_mode mode;

    assert(args->n_leaves >= 1 && args->n_leaves <= REDUCE_MAX_LEAVES);
    assert(args->start_elem % REDUCE_RUN_ELEMS == 0);
    mode = mode_of(args);
    runs = runs_table[args->dtype][shape_of(args)][mode];
    exact_bins_init(&state.bins);
    exact_sum_reset(&result->squares);
    memset(state.pieces, 0, args->n_leaves * sizeof(state.pieces[0]));

    for (size_t begin = 0; begin < n_runs; begin = end) {
        end = n_runs - begin < EXACT_BINS_MAX_ADDS ? n_runs : begin + EXACT_BINS_MAX_ADDS;
        runs(args, &range, &state, begin, end);
        exact_bins_flush(&state.bins, &result->squares);
    }
    if (n_left > 0) {
        reduce_tail(args, &state, n_left);
        exact_bins_flush(&state.bins, &result->squares);
    }
    if (mode == REDUCE_SET_PAST)
        reduce_order_stores();
    result->nonfinite = result->squares.nonfinite;
    result->squares.nan = result->nonfinite && holds_nan(args->acc, args->n_elems);
    for (unsigned leaf = 0; result->sums && leaf < args->n_leaves; leaf++) {
        result->sums[leaf] = (struct position_sum){0};
        position_piece_close(&state.pieces[leaf], args->start_elem / REDUCE_RUN_ELEMS, n_runs + (n_left > 0),
                             &result->sums[leaf]);
    }
}

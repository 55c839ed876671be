/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The sum over ranks, with the bits of reduce_kernel.c. It is one pass over memory. Every leaf is read once, and the
 * accumulator is read and written once, 16 bytes per thread. A tile of 32 runs of 64 elements has three phases:
 *
 *     sums      four threads per run (position.h) add the leaves along the tree and compute the position sums
 *     lanes     four threads per run square the new elements in shared memory: each adds two lanes and joins them
 *     limbs     32 threads, 23 of them for the limbs of the exact sum, each add their digits of the runs' values
 *
 * So limbs and position sums grow in registers. At the end of a chunk they are added to the results with atomics on
 * 64-bit integers, whose order changes nothing.
 *
 * There is a kernel for each type and each tree of enum device_tree, because each needs another number of registers. A
 * single kernel would need the registers of 8 leaves; then a processor would have too few blocks to keep the memory
 * busy with 1 leaf. Whole trees of 1, 2, 4 and 8 leaves are unrolled, with the tree's unfinished sums and the position
 * sums in registers. With 16 leaves the position sums alone would need 192 registers. So all other trees share one
 * kernel, which also handles addresses that are not multiples of 16 bytes. Its unfinished sums are in local memory. It
 * reads the leaves twice: to add them, and for the position sums.
 *
 * If a sum is not finite, the block searches its chunk for the leaf that is the cause. If a whole gradient is NaN, this
 * must not cost an atomic per element. So threads count, the block adds the counts, and one thread adds them to the
 * result.
 *
 * Not measured yet, in comparison with a plain read of as many streams: the share of the memory's speed for 1, 2, 4 and
 * 8 leaves of bf16 and fp32 (the squares cost two double operations and one conversion per element); DEVICE_CHUNK_ELEMS
 * and the launch bounds; the kernel of all other trees with 3 and 16 leaves.
 */

#include "kernels/cuda/position.h"

enum {
    /* With 68, the threads of a warp (four for each of eight runs) read 32 different banks. */
    RUN_STRIDE = RUN_ELEMS + 4,
    LIMB_THREADS = 32,
    N_LIMB_GROUPS = BLOCK_THREADS / LIMB_THREADS,
    GROUP_RUNS = TILE_RUNS / N_LIMB_GROUPS,
    KNOWN_LEAVES = 8, /* the most leaves of a known tree, that is, of an unrolled one */
    GENERAL_SUMS = 4, /* position sums per pass of the general kernel */
};

/* The number of non-finite values, and the first of them. Each thread counts, then the block adds the counts. */
struct find_count {
    uint64_t n_nan;
    uint64_t n_inf;
    uint64_t first; /* as in struct device_finding */
};

/* Shared memory of a block. Its large parts are used at different times. */
struct reduce_board {
    union {
        alignas(UNIT_BYTES) float elems[TILE_RUNS][RUN_STRIDE];
        struct position_board position;
        struct find_count found[BLOCK_THREADS];
    };
    double lanes[TILE_RUNS][4];
    uint64_t limbs[N_LIMB_GROUPS][LIMB_THREADS];
    const char *leaves[KNOWN_LEAVES]; /* addresses of a known tree's leaves */
    bool nonfinite;                   /* an element of the chunk is not finite */
};

/* The data of a block. */
struct reduce_job {
    struct device_reduce_range range;
    const struct device_leaf *leaves;
    struct position_sum *sums; /* position sums of these leaves; NULL: not needed */
    struct exact_sum *squares;
    struct device_finding *findings; /* non-finite values of these leaves */
    struct device_finding *overflow;
    struct extent extent;
};

/* ---- sums ---------------------------------------------------------------------------------------------- */

/* A thread's elements of a stripe, widened. */
template <enum dtype dtype> struct widened {
    float x[unit_elems<dtype>()];
};

template <enum dtype dtype> DEVICE_FN widened<dtype> unit_widen(const struct unit &unit)
{
    widened<dtype> wide;

#pragma unroll
    for (unsigned i = 0; i < unit_elems<dtype>(); i++)
        wide.x[i] = unit_elem<dtype>(unit, i);
    return wide;
}

template <enum dtype dtype> DEVICE_FN widened<dtype> widened_add(const widened<dtype> &a, const widened<dtype> &b)
{
    widened<dtype> sum;

#pragma unroll
    for (unsigned i = 0; i < unit_elems<dtype>(); i++)
        sum.x[i] = a.x[i] + b.x[i];
    return sum;
}

/* Addresses of the leaves of a known tree. They are in registers for up to two leaves. For more leaves they are in
 * shared memory, because addresses of 8 leaves would take so many registers that other values are spilled. */
template <unsigned n> struct known_leaves {
    static constexpr bool in_registers = n <= 2;
    const char *mine[in_registers ? n : 1];
    const char *const *shared;

    DEVICE_MEMBER const char *at(unsigned leaf) const
    {
        return in_global(in_registers ? mine[in_registers ? leaf : 0] : shared[leaf]);
    }
};

/* The sum of n leaves (a power of two) from leaf `first` on. y: each leaf's unfinished position sum. */
template <enum dtype dtype, unsigned first, unsigned n>
DEVICE_FN widened<dtype> tree_known(const struct unit *words, struct unit *y)
{
    if constexpr (n == 1) {
        position_stripe(&y[first], words[first]);
        return unit_widen<dtype>(words[first]);
    } else {
        const widened<dtype> left = tree_known<dtype, first, n / 2>(words, y);

        return widened_add<dtype>(left, tree_known<dtype, first + n / 2, n / 2>(words, y));
    }
}

/* The sum for any tree at any address, also at the end of the parameter. */
template <enum dtype dtype> DEVICE_FN widened<dtype> tree_general(const struct reduce_job &job, uint64_t elem)
{
    widened<dtype> waiting[DEVICE_TREE_DEPTH];
    widened<dtype> sum = {};
    unsigned n_waiting = 0;

    for (unsigned leaf = 0; leaf < job.range.n_leaves; leaf++) {
        const char *at = static_cast<const char *>(in_global(job.leaves[leaf].data)) + elem * elem_bytes<dtype>();

        if (leaf > 0)
            waiting[n_waiting++] = sum;
        sum = unit_widen<dtype>(unit_load_some(at, (job.range.n_elems - elem) * elem_bytes<dtype>()));
        for (unsigned join = 0; join < job.leaves[leaf].n_joins; join++)
            sum = widened_add<dtype>(waiting[--n_waiting], sum);
    }
    return sum;
}

/* Loads the old elements to which a thread's elements of a stripe are added. */
template <enum dtype dtype> DEVICE_FN widened<dtype> load_out(const struct reduce_job &job, uint64_t elem)
{
    widened<dtype> old = {};

    if (job.range.first)
        return old;
#pragma unroll
    for (unsigned i = 0; i < unit_elems<dtype>(); i += 4) {
        const struct quad quad = *reinterpret_cast<const struct quad *>(job.range.out + elem + i);

#pragma unroll
        for (unsigned k = 0; k < 4; k++)
            old.x[i + k] = quad.x[k];
    }
    return old;
}

template <enum dtype dtype> DEVICE_FN void put_elems(float *at, const widened<dtype> &sum)
{
#pragma unroll
    for (unsigned i = 0; i < unit_elems<dtype>(); i += 4)
        *reinterpret_cast<struct quad *>(at + i) = {{sum.x[i], sum.x[i + 1], sum.x[i + 2], sum.x[i + 3]}};
}

/* add_to_out() for a run that the range's end may cut: reads and writes only elements before that end. Return: the
 * sums; after the end they are zero. */
template <enum dtype dtype>
DEVICE_FN widened<dtype> add_to_out_some(const struct reduce_job &job, uint64_t elem, widened<dtype> sum)
{
#pragma unroll
    for (unsigned i = 0; i < unit_elems<dtype>(); i++) {
        float *at = job.range.out + elem + i;

        if (elem + i >= job.range.n_elems)
            continue;
        sum.x[i] = (job.range.first ? 0.0f : *at) + sum.x[i];
        *at = sum.x[i];
    }
    return sum;
}

/* The number of stripes whose loads a thread starts before it adds the first stripe. Fewer leaves allow more
 * stripes. */
template <enum dtype dtype, unsigned n> DEVICE_FN constexpr unsigned stripes_at_once()
{
    return n >= 4 ? 1 : n_stripes<dtype>() * n <= 4 ? n_stripes<dtype>() : 2;
}

/* Adds this thread's part of the complete run at elem, and stores it in out and in shared memory. The leaves' position
 * sums are added to y. */
template <enum dtype dtype, unsigned n>
DEVICE_FN void sum_run_whole(const struct reduce_job &job, const known_leaves<n> &leaves, uint64_t elem, float *run,
                             struct unit (&y)[n])
{
    constexpr unsigned at_once = stripes_at_once<dtype, n>();

    /* With more than one leaf, an unrolled loop would spill registers. */
#pragma unroll(n > 1 ? 1 : n_stripes<dtype>())
    for (unsigned s = 0; s < n_stripes<dtype>(); s += at_once) {
        struct unit words[at_once][n];
        widened<dtype> old[at_once];

#pragma unroll
        for (unsigned i = 0; i < at_once; i++) {
            const uint64_t at = elem + stripe_elem<dtype>(s + i);

#pragma unroll
            for (unsigned leaf = 0; leaf < n; leaf++)
                words[i][leaf] = unit_load(leaves.at(leaf) + at * elem_bytes<dtype>());
            old[i] = load_out<dtype>(job, at);
        }
#pragma unroll
        for (unsigned i = 0; i < at_once; i++) {
            const unsigned at = stripe_elem<dtype>(s + i);
            const widened<dtype> sum = widened_add<dtype>(old[i], tree_known<dtype, 0, n>(words[i], y));

            put_elems<dtype>(job.range.out + elem + at, sum);
            put_elems<dtype>(run + at, sum);
        }
    }
}

/* sum_run_whole() for the run that ends a parameter; elements after the end are zero. */
template <enum dtype dtype, unsigned n>
DEVICE_FN void sum_run_last(const struct reduce_job &job, const known_leaves<n> &leaves, uint64_t elem, float *run,
                            struct unit (&y)[n])
{
#pragma unroll 1
    for (unsigned s = 0; s < n_stripes<dtype>(); s++) {
        const uint64_t at = elem + stripe_elem<dtype>(s);
        const uint64_t n_bytes = at < job.range.n_elems ? (job.range.n_elems - at) * elem_bytes<dtype>() : 0;
        struct unit words[n];

#pragma unroll
        for (unsigned leaf = 0; leaf < n; leaf++)
            words[leaf] = unit_load_some(leaves.at(leaf) + at * elem_bytes<dtype>(), n_bytes);
        put_elems<dtype>(run + stripe_elem<dtype>(s),
                         add_to_out_some<dtype>(job, at, tree_known<dtype, 0, n>(words, y)));
    }
}

template <enum dtype dtype, unsigned n>
DEVICE_FN void sum_run_known(const struct reduce_job &job, const known_leaves<n> &leaves, uint64_t elem, float *run,
                             position_set<n> *lanes)
{
    struct unit y[n] = {};

    if (job.range.n_elems - elem >= RUN_ELEMS)
        sum_run_whole<dtype, n>(job, leaves, elem, run, y);
    else
        sum_run_last<dtype, n>(job, leaves, elem, run, y);
#pragma unroll
    for (unsigned leaf = 0; leaf < n; leaf++)
        position_close(y[leaf], (job.range.start_elem + elem) / RUN_ELEMS, &lanes->leaf[leaf]);
}

template <enum dtype dtype> DEVICE_FN void sum_run_general(const struct reduce_job &job, uint64_t elem, float *run)
{
#pragma unroll 1
    for (unsigned s = 0; s < n_stripes<dtype>(); s++) {
        const unsigned at = stripe_elem<dtype>(s);
        widened<dtype> sum = {};

        if (elem + at < job.range.n_elems)
            sum = add_to_out_some<dtype>(job, elem + at, tree_general<dtype>(job, elem + at));
        put_elems<dtype>(run + at, sum);
    }
}

/* ---- squares: numerics.md, section 2 ------------------------------------------------------------------- */

/* Return: the joined squares of lanes q and q + 4 of a run. */
DEVICE_FN double square_lanes(const float *run, unsigned q)
{
    double low = 0, high = 0;

#pragma unroll
    for (unsigned i = 0; i < RUN_ELEMS; i += 8) {
        low += static_cast<double>(run[i + q]) * static_cast<double>(run[i + q]);
        high += static_cast<double>(run[i + q + 4]) * static_cast<double>(run[i + q + 4]);
    }
    return low + high;
}

DEVICE_FN uint64_t double_bits(double x)
{
    uint64_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

/* Return: the part of `value`, a sum of squares, that exact_sum_add() adds to limb[limb]. If value is not finite, sets
 * a flag and returns 0. */
DEVICE_FN uint64_t exact_digit(double value, unsigned limb, bool *nonfinite, bool *nan)
{
    const uint64_t bits = double_bits(value), integer = EXACT_MANTISSA(bits);
    const unsigned exponent = static_cast<unsigned>(bits >> 52);
    const unsigned position = exponent - EXACT_MIN_EXPONENT, shift = position % 32;

    if (exponent == 0)
        return 0;
    if (exponent > EXACT_MAX_EXPONENT) {
        *nonfinite = true;
        *nan |= value != value;
        return 0;
    }
    switch (limb - position / 32) {
    case 0:
        return static_cast<uint32_t>(integer << shift);
    case 1:
        return integer << shift >> 32;
    case 2:
        return integer >> 1 >> (63 - shift);
    default:
        return 0;
    }
}

/* ---- a chunk ------------------------------------------------------------------------------------------- */

/* Adds the squares of a tile's new elements to each limb thread's digit. */
DEVICE_FN void add_squares(const struct reduce_job &job, unsigned n_runs, struct reduce_board *board,
                           per_thread<uint64_t> &digits)
{
    for (phase threads; threads.next();) {
        const unsigned run = threadIdx.x / 4, q = threadIdx.x % 4;

        if (run < n_runs)
            board->lanes[run][q] = square_lanes(board->elems[run], q);
    }
    for (phase threads; threads.next();) {
        const unsigned limb = threadIdx.x % LIMB_THREADS, group = threadIdx.x / LIMB_THREADS;
        bool nonfinite = false, nan = false;

        for (unsigned run = group * GROUP_RUNS; run < (group + 1) * GROUP_RUNS && run < n_runs; run++) {
            const double *lanes = board->lanes[run];

            digits.mine() += exact_digit((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]), limb, &nonfinite, &nan);
        }
        if (nonfinite && limb == 0)
            board->nonfinite = job.squares->nonfinite = true; /* several threads may write equal flags */
        if (nan && limb == 0)
            job.squares->nan = true;
    }
}

DEVICE_FN void flush_squares(const struct reduce_job &job, struct reduce_board *board, per_thread<uint64_t> &digits)
{
    for (phase threads; threads.next();)
        board->limbs[threadIdx.x / LIMB_THREADS][threadIdx.x % LIMB_THREADS] = digits.mine();
    for (phase threads; threads.next();) {
        const unsigned limb = threadIdx.x;
        uint64_t total = 0;

        if (limb == EXACT_N_LIMBS)
            atomic_add(&job.squares->n_deferred,
                       static_cast<uint32_t>((job.extent.end - job.extent.begin + RUN_ELEMS - 1) / RUN_ELEMS));
        if (limb >= EXACT_N_LIMBS)
            continue;
        for (unsigned group = 0; group < N_LIMB_GROUPS; group++)
            total += board->limbs[group][limb];
        if (total != 0)
            atomic_add(&job.squares->limb[limb], total);
    }
}

/* Computes the position sums of all leaves, which are read once more for this. */
template <enum dtype dtype> DEVICE_FN void sum_positions(const struct reduce_job &job, struct reduce_board *board)
{
    for (unsigned base = 0; base < job.range.n_leaves; base += GENERAL_SUMS) {
        per_thread<position_set<GENERAL_SUMS>> lanes;

        for (phase threads; threads.next();) {
#pragma unroll
            for (unsigned i = 0; i < GENERAL_SUMS; i++) {
                struct position_lanes *mine = &lanes.mine().leaf[i];

                position_reset(mine);
                if (base + i >= job.range.n_leaves)
                    continue;
                for (uint64_t elem = job.extent.begin + threadIdx.x / RUN_THREADS * RUN_ELEMS; elem < job.extent.end;
                     elem += TILE_RUNS * RUN_ELEMS)
                    position_run<dtype>(in_global(job.leaves[base + i].data), elem, job.range.n_elems,
                                        (job.range.start_elem + elem) / RUN_ELEMS, mine);
            }
        }
#pragma unroll
        for (unsigned i = 0; i < GENERAL_SUMS; i++) {
            if (base + i < job.range.n_leaves)
                position_flush(lanes, i, &board->position, &job.sums[base + i]);
        }
    }
}

/* Reduces all tiles. sum_run(elem, run) computes the new elements of a thread's part of a run. */
template <typename sum_type>
DEVICE_FN void reduce_tiles(const struct reduce_job &job, struct reduce_board *board, const sum_type &sum_run)
{
    per_thread<uint64_t> digits;

    for (phase threads; threads.next();) {
        digits.mine() = 0;
        if (threadIdx.x == 0)
            board->nonfinite = false;
    }
#pragma unroll 1
    for (uint64_t tile = job.extent.begin; tile < job.extent.end; tile += TILE_RUNS * RUN_ELEMS) {
        const uint64_t n_runs = (job.extent.end - tile + RUN_ELEMS - 1) / RUN_ELEMS;

        for (phase threads; threads.next();) {
            const unsigned run = threadIdx.x / RUN_THREADS;
            const uint64_t elem = tile + run * RUN_ELEMS;

            if (elem < job.extent.end)
                sum_run(elem, board->elems[run]);
        }
        add_squares(job, n_runs < TILE_RUNS ? static_cast<unsigned>(n_runs) : +TILE_RUNS, board, digits);
    }
    flush_squares(job, board, digits);
}

template <enum dtype dtype, unsigned n>
DEVICE_FN void reduce_chunk_known(const struct reduce_job &job, struct reduce_board *board)
{
    per_thread<position_set<n>> lanes;
    known_leaves<n> leaves = {{}, board->leaves};

    for (unsigned leaf = 0; known_leaves<n>::in_registers && leaf < n; leaf++)
        leaves.mine[leaf] = static_cast<const char *>(job.leaves[leaf].data);
    for (phase threads; threads.next();) {
        if (threadIdx.x < n)
            board->leaves[threadIdx.x] = static_cast<const char *>(job.leaves[threadIdx.x].data);
#pragma unroll
        for (unsigned leaf = 0; leaf < n; leaf++)
            position_reset(&lanes.mine().leaf[leaf]);
    }
    reduce_tiles(job, board,
                 [&](uint64_t elem, float *run) { sum_run_known<dtype, n>(job, leaves, elem, run, &lanes.mine()); });
    if (!job.sums)
        return;
#pragma unroll
    for (unsigned leaf = 0; leaf < n; leaf++)
        position_flush(lanes, leaf, &board->position, &job.sums[leaf]);
}

template <enum dtype dtype>
DEVICE_FN void reduce_chunk_general(const struct reduce_job &job, struct reduce_board *board)
{
    reduce_tiles(job, board, [&](uint64_t elem, float *run) { sum_run_general<dtype>(job, elem, run); });
    if (job.sums)
        sum_positions<dtype>(job, board);
}

/* ---- values that are not finite: the twin of reduce_find_nonfinite() ------------------------------------- */

DEVICE_FN bool value_is_finite(float x)
{
    return (f32_bits(x) >> 23 & 0xff) != 0xff;
}

template <enum dtype dtype> DEVICE_FN float leaf_elem(const struct reduce_job &job, unsigned leaf, uint64_t i)
{
    const void *data = in_global(job.leaves[leaf].data);

    if (dtype == DTYPE_F32)
        return static_cast<const float *>(data)[i];
    return dtype == DTYPE_BF16 ? f32_from_bf16(static_cast<const uint16_t *>(data)[i])
                               : f32_from_f16(static_cast<const uint16_t *>(data)[i]);
}

DEVICE_FN void find_count_value(struct find_count *count, float value, uint64_t elem)
{
    const uint32_t bits = f32_bits(value);
    const bool is_nan = (bits & 0x7fffff) != 0;
    const unsigned kind = is_nan ? DEVICE_NAN : bits >> 31 ? DEVICE_MINUS_INF : DEVICE_INF;

    if (count->n_nan + count->n_inf == 0)
        count->first = ~(elem * 4 + kind);
    if (is_nan)
        count->n_nan++;
    else
        count->n_inf++;
}

/* Counts element i, whose sum is not finite, if this leaf is the cause. Leaf n_leaves is the sum itself. */
template <enum dtype dtype>
DEVICE_FN void find_elem(const struct reduce_job &job, unsigned leaf, uint64_t i, struct find_count *count)
{
    if (leaf < job.range.n_leaves) {
        float value = leaf_elem<dtype>(job, leaf, i);

        if (!value_is_finite(value))
            find_count_value(count, value, job.range.start_elem + i);
        return;
    }
#pragma unroll 1
    for (unsigned other = 0; other < job.range.n_leaves; other++) {
        if (!value_is_finite(leaf_elem<dtype>(job, other, i)))
            return;
    }
    find_count_value(count, job.range.out[i], job.range.start_elem + i);
}

DEVICE_FN void find_flush(const struct find_count *counts, struct device_finding *finding)
{
    struct find_count total = {0, 0, 0};

#pragma unroll 1
    for (unsigned i = 0; i < BLOCK_THREADS; i++) {
        total.n_nan += counts[i].n_nan;
        total.n_inf += counts[i].n_inf;
        total.first = counts[i].first > total.first ? counts[i].first : total.first;
    }
    if (total.n_nan > 0)
        atomic_add(&finding->n_nan, total.n_nan);
    if (total.n_inf > 0)
        atomic_add(&finding->n_inf, total.n_inf);
    if (total.first > 0)
        atomic_max(&finding->first, total.first);
}

/* Finds the chunk's non-finite values. Call it after all threads of the block have written the new elements. */
template <enum dtype dtype> DEVICE_FN void find_nonfinite(const struct reduce_job &job, struct reduce_board *board)
{
#pragma unroll 1
    for (unsigned leaf = 0; leaf <= job.range.n_leaves; leaf++) {
        for (phase threads; threads.next();) {
            struct find_count count = {0, 0, 0};

#pragma unroll 1
            for (uint64_t i = job.extent.begin + threadIdx.x; i < job.extent.end; i += BLOCK_THREADS) {
                if (!value_is_finite(job.range.out[i]))
                    find_elem<dtype>(job, leaf, i, &count);
            }
            board->found[threadIdx.x] = count;
        }
        for (phase threads; threads.next();) {
            if (threadIdx.x == 0)
                find_flush(board->found, leaf < job.range.n_leaves ? &job.findings[leaf] : job.overflow);
        }
    }
}

/* ---- the kernels --------------------------------------------------------------------------------------- */

DEVICE_FN struct reduce_job reduce_job_of(const struct device_reduce_list &list)
{
    const struct device_chunk chunk = in_global(list.chunks)[blockIdx.x];
    struct reduce_job job;

    job.range = in_global(list.ranges)[chunk.range];
    job.range.out = in_global(job.range.out);
    job.leaves = in_global(list.leaves) + job.range.first_leaf;
    job.sums = list.sums ? in_global(list.sums) + job.range.first_leaf : NULL;
    job.squares = in_global(list.squares) + chunk.range;
    job.findings = in_global(list.findings) + job.range.first_leaf;
    job.overflow = in_global(list.overflows) + chunk.range;
    job.extent = chunk_extent(chunk, job.range.n_elems);
    return job;
}

/* The most blocks on a processor without spilled registers. n: the leaves of a known tree, or 0 for any other tree. */
template <enum dtype dtype, unsigned n> DEVICE_FN constexpr unsigned min_blocks()
{
    return n == 1 ? 9 : n == 2 ? 7 : n == 4 && dtype != DTYPE_F16 ? 5 : n == 8 ? 3 : 4;
}

template <enum dtype dtype, unsigned n>
static __global__ void __launch_bounds__(BLOCK_THREADS, min_blocks<dtype, n>()) reduce_kernel(struct device_reduce_list list)
{
    __shared__ struct reduce_board board;
    const struct reduce_job job = reduce_job_of(list);

    if constexpr (n > 0)
        reduce_chunk_known<dtype, n>(job, &board);
    else
        reduce_chunk_general<dtype>(job, &board);
    if (board.nonfinite)
        find_nonfinite<dtype>(job, &board);
}

typedef void reduce_kernel_fn(struct device_reduce_list list);

/* In the order of enum device_tree. */
#define REDUCE_KERNELS(dtype)                                                                                          \
    {                                                                                                                  \
        reduce_kernel<dtype, 1>, reduce_kernel<dtype, 2>, reduce_kernel<dtype, 4>, reduce_kernel<dtype, 8>,            \
            reduce_kernel<dtype, 0>                                                                                    \
    }

/* In the order of enum dtype. */
static reduce_kernel_fn *const reduce_kernels[N_DTYPES][N_DEVICE_TREES] = {
    REDUCE_KERNELS(DTYPE_F32),
    REDUCE_KERNELS(DTYPE_BF16),
    REDUCE_KERNELS(DTYPE_F16),
};

static int clear_results(struct CUstream_st *stream, const struct device_reduce_list *list)
{
    const struct clear_list results = {
        {reinterpret_cast<uint64_t *>(list->squares), reinterpret_cast<uint64_t *>(list->sums),
         reinterpret_cast<uint64_t *>(list->findings), reinterpret_cast<uint64_t *>(list->overflows)},
        {list->n_ranges * (sizeof(struct exact_sum) / 8), list->n_leaves * (sizeof(struct position_sum) / 8),
         list->n_leaves * (sizeof(struct device_finding) / 8), list->n_ranges * (sizeof(struct device_finding) / 8)},
    };

    return device_clear(stream, &results);
}

int device_reduce(struct CUstream_st *stream, const struct device_reduce_list *list)
{
    struct device_reduce_list rest = *list;
    int r = clear_results(stream, list);

    for (unsigned i = 0; r == 0 && i < N_DTYPES * N_DEVICE_TREES; i++) {
        const unsigned dtype = i / N_DEVICE_TREES, tree = i % N_DEVICE_TREES;

        r = device_launch(stream, reduce_kernels[dtype][tree], list->n_chunks_of[dtype][tree], rest);
        rest.chunks += list->n_chunks_of[dtype][tree];
    }
    return r;
}

/* ---- the 64-bit sums alone ----------------------------------------------------------------------------- */

template <enum dtype dtype>
DEVICE_FN void position_chunk(const struct device_position_range &range, const struct extent &extent,
                              per_thread<position_set<1>> &lanes)
{
    for (phase threads; threads.next();) {
        struct position_lanes *mine = &lanes.mine().leaf[0];

        position_reset(mine);
#pragma unroll 1
        for (uint64_t elem = extent.begin + threadIdx.x / RUN_THREADS * RUN_ELEMS; elem < extent.end;
             elem += TILE_RUNS * RUN_ELEMS)
            position_run<dtype>(range.data, elem, range.n_elems, (range.start_elem + elem) / RUN_ELEMS, mine);
    }
}

static __global__ void __launch_bounds__(BLOCK_THREADS) position_kernel(struct device_position_list list)
{
    __shared__ struct position_board board;
    const struct device_chunk chunk = in_global(list.chunks)[blockIdx.x];
    struct device_position_range range = in_global(list.ranges)[chunk.range];
    const struct extent extent = chunk_extent(chunk, range.n_elems);
    per_thread<position_set<1>> lanes;

    range.data = in_global(range.data);

    if (range.dtype == DTYPE_F32)
        position_chunk<DTYPE_F32>(range, extent, lanes);
    else
        position_chunk<DTYPE_BF16>(range, extent, lanes); /* any 16-bit type */
    position_flush(lanes, 0, &board, &in_global(list.sums)[chunk.range]);
}

int device_position_sums(struct CUstream_st *stream, const struct device_position_list *list)
{
    const struct clear_list results = {
        {reinterpret_cast<uint64_t *>(list->sums), NULL},
        {list->n_ranges * (sizeof(struct position_sum) / 8), 0},
    };
    int r = device_clear(stream, &results);

    return r != 0 ? r : device_launch(stream, position_kernel, list->n_chunks, *list);
}

int load_reduce(void)
{
    int r = load_kernels(position_kernel);

    for (unsigned i = 0; r == 0 && i < N_DTYPES * N_DEVICE_TREES; i++)
        r = load_kernel(reduce_kernels[i / N_DEVICE_TREES][i % N_DEVICE_TREES]);
    return r;
}

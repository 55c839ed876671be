/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The sum over ranks, the twin of reduce_kernel.c. A pass over memory: every leaf is read once, the accumulator is
 * read and written once, 16 bytes a thread. A tile, 32 runs of 64 elements, goes through three phases:
 *
 *     sums      four threads a run (position.h) add the leaves along the tree and take the position sums
 *     lanes     the new elements, in shared memory, are squared: four threads a run take two lanes each and join them
 *     limbs     32 threads, of which 23 are limbs of the exact sum, add the runs' values, each its own digit of them
 *
 * so limbs and position sums grow in registers, and only at the end of a chunk are they added to the results, with
 * atomics on 64-bit integers, whose order changes nothing.
 *
 * 1, 2, 4 and 8 leaves that are a whole tree have code of their own, in which the waiting sums of the tree are
 * registers. Other trees, addresses that are no multiple of 16 bytes, and the run that ends a parameter take the
 * general way, with the waiting sums in local memory, and read the leaves twice: once to add them, once for the
 * position sums.
 *
 * No device was at hand. To be measured, beside a plain read of as many streams: the share of the memory's speed for
 * 2, 4 and 8 leaves of bf16 and fp32 (the squares cost two double operations and one conversion an element);
 * whether DEVICE_CHUNK_ELEMS and the launch bounds suit; the general way with 3 and 16 leaves.
 */

#include "kernels/cuda/position.h"

enum {
    /* 68: four threads times eight runs of a warp read 32 different banks. */
    RUN_STRIDE = RUN_ELEMS + 4,
    LIMB_THREADS = 32,
    N_LIMB_GROUPS = BLOCK_THREADS / LIMB_THREADS,
    GROUP_RUNS = TILE_RUNS / N_LIMB_GROUPS,
    GENERAL_SUMS = 4, /* position sums at a time, in the general way */
};

/* Shared memory of a block. */
struct reduce_board {
    alignas(UNIT_BYTES) float elems[TILE_RUNS][RUN_STRIDE];
    double lanes[TILE_RUNS][4];
    uint64_t limbs[N_LIMB_GROUPS][LIMB_THREADS];
    struct position_board position;
};

/* The data that a block works on. */
struct reduce_job {
    struct device_reduce_range range;
    const struct device_leaf *leaves;
    struct position_sum *sums; /* of these leaves; NULL: not wanted */
    struct exact_sum *squares;
    struct extent extent;
    uint64_t fast_end; /* elements before it are whole runs at multiples of 16 bytes, when the tree is a known one */
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

/* Additions that are due after a leaf of a whole tree over a power of two: one for each carry of counting it. */
DEVICE_FN unsigned joins_after(unsigned leaf)
{
    unsigned n = 0;

    for (; leaf % 2; leaf /= 2)
        n++;
    return n;
}

/* The sum of n leaves at an element whose 16 bytes are all there; y is each leaf's position sum under way. */
template <enum dtype dtype, unsigned n>
DEVICE_FN widened<dtype> tree_known(const struct reduce_job &job, uint64_t elem, struct unit *y)
{
    widened<dtype> waiting[n]; /* all places are known when this is unrolled */
    unsigned n_waiting = 0;

#pragma unroll
    for (unsigned leaf = 0; leaf < n; leaf++) {
        const char *at = static_cast<const char *>(job.leaves[leaf].data) + elem * elem_bytes<dtype>();
        const struct unit words = unit_load(at);
        widened<dtype> sum = unit_widen<dtype>(words);

        position_stripe(&y[leaf], words);
#pragma unroll
        for (unsigned join = 0; join < joins_after(leaf); join++)
            sum = widened_add<dtype>(waiting[--n_waiting], sum);
        waiting[n_waiting++] = sum;
    }
    return waiting[0];
}

/* The same for any tree, any address and an end of the parameter. */
template <enum dtype dtype> DEVICE_FN widened<dtype> tree_general(const struct reduce_job &job, uint64_t elem)
{
    widened<dtype> waiting[DEVICE_TREE_DEPTH];
    widened<dtype> sum = {};
    unsigned n_waiting = 0;

    for (unsigned leaf = 0; leaf < job.range.n_leaves; leaf++) {
        const char *at = static_cast<const char *>(job.leaves[leaf].data) + elem * elem_bytes<dtype>();

        if (leaf > 0)
            waiting[n_waiting++] = sum;
        sum = unit_widen<dtype>(unit_load_some(at, (job.range.n_elems - elem) * elem_bytes<dtype>()));
        for (unsigned join = 0; join < job.leaves[leaf].n_joins; join++)
            sum = widened_add<dtype>(waiting[--n_waiting], sum);
    }
    return sum;
}

/* out = 0.0f + sum or out += sum, of elements that are all there. */
template <enum dtype dtype>
DEVICE_FN widened<dtype> add_to_out(const struct reduce_job &job, uint64_t elem, widened<dtype> sum)
{
#pragma unroll
    for (unsigned i = 0; i < unit_elems<dtype>(); i += 4) {
        struct quad *at = reinterpret_cast<struct quad *>(job.range.out + elem + i);
        struct quad old = {{0, 0, 0, 0}};

        if (!job.range.first)
            old = *at;
#pragma unroll
        for (unsigned k = 0; k < 4; k++)
            old.x[k] = sum.x[i + k] = old.x[k] + sum.x[i + k];
        *at = old;
    }
    return sum;
}

/* Behind the range's end nothing is read or written, and the sum is zero. */
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

template <enum dtype dtype> DEVICE_FN void put_elems(float *run, unsigned at, const widened<dtype> &sum)
{
#pragma unroll
    for (unsigned i = 0; i < unit_elems<dtype>(); i += 4)
        *reinterpret_cast<struct quad *>(run + at + i) = {{sum.x[i], sum.x[i + 1], sum.x[i + 2], sum.x[i + 3]}};
}

/* This thread's part of the run at elem, to out, to shared memory, and its position sums. */
template <enum dtype dtype, unsigned n>
DEVICE_FN void sum_run_known(const struct reduce_job &job, uint64_t elem, float *run, position_set<n> *lanes)
{
    struct unit y[n] = {};

#pragma unroll
    for (unsigned s = 0; s < n_stripes<dtype>(); s++) {
        const unsigned at = stripe_elem<dtype>(s);
        widened<dtype> sum = tree_known<dtype, n>(job, elem + at, y);

        put_elems<dtype>(run, at, add_to_out<dtype>(job, elem + at, sum));
    }
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
        put_elems<dtype>(run, at, sum);
    }
}

/* ---- squares: numerics.md, section 2 ------------------------------------------------------------------- */

/* Lanes q and q + 4 of a run, joined. */
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

/*
 * Return: the part that exact_sum_add() adds to limb[limb] for a sum of squares; 0 if value is not finite, and then a
 * flag is set.
 */
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

/* Squares of a tile's new elements: each limb thread's digit grows. */
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
            job.squares->nonfinite = true; /* several may write this and the next, all the same */
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

/* Position sums of the runs from `begin` on, which went the general way. */
template <enum dtype dtype>
DEVICE_FN void sum_positions(const struct reduce_job &job, uint64_t begin, struct reduce_board *board)
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
                for (uint64_t elem = begin + threadIdx.x / RUN_THREADS * RUN_ELEMS; elem < job.extent.end;
                     elem += TILE_RUNS * RUN_ELEMS)
                    position_run<dtype>(job.leaves[base + i].data, elem, job.range.n_elems,
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

/* n: leaves of the known tree, 1 where it is none and fast_end is 0. */
template <enum dtype dtype, unsigned n>
DEVICE_FN void reduce_chunk(const struct reduce_job &job, struct reduce_board *board)
{
    per_thread<position_set<n>> lanes;
    per_thread<uint64_t> digits;

    for (phase threads; threads.next();) {
        digits.mine() = 0;
#pragma unroll
        for (unsigned leaf = 0; leaf < n; leaf++)
            position_reset(&lanes.mine().leaf[leaf]);
    }
#pragma unroll 1
    for (uint64_t tile = job.extent.begin; tile < job.extent.end; tile += TILE_RUNS * RUN_ELEMS) {
        const uint64_t n_runs = (job.extent.end - tile + RUN_ELEMS - 1) / RUN_ELEMS;

        for (phase threads; threads.next();) {
            const unsigned run = threadIdx.x / RUN_THREADS;
            const uint64_t elem = tile + run * RUN_ELEMS;

            if (elem < job.fast_end)
                sum_run_known<dtype, n>(job, elem, board->elems[run], &lanes.mine());
            else if (elem < job.extent.end)
                sum_run_general<dtype>(job, elem, board->elems[run]);
        }
        add_squares(job, n_runs < TILE_RUNS ? static_cast<unsigned>(n_runs) : +TILE_RUNS, board, digits);
    }
    flush_squares(job, board, digits);
    if (!job.sums)
        return;
    if (job.fast_end > job.extent.begin) {
#pragma unroll
        for (unsigned leaf = 0; leaf < n; leaf++)
            position_flush(lanes, leaf, &board->position, &job.sums[leaf]);
    }
    if (job.fast_end < job.extent.end)
        sum_positions<dtype>(job, job.fast_end > job.extent.begin ? job.fast_end : job.extent.begin, board);
}

/* ---- the kernel ---------------------------------------------------------------------------------------- */

DEVICE_FN bool is_known_tree(const struct reduce_job &job)
{
    const unsigned n = job.range.n_leaves;

    if (n != 1 && n != 2 && n != 4 && n != 8)
        return false;
    for (unsigned leaf = 0; leaf < n; leaf++) {
        if (job.leaves[leaf].n_joins != joins_after(leaf) || !is_aligned(job.leaves[leaf].data, UNIT_BYTES))
            return false;
    }
    return is_aligned(job.range.out, UNIT_BYTES);
}

DEVICE_FN struct reduce_job reduce_job_of(const struct device_reduce_list &list)
{
    const struct device_chunk chunk = list.chunks[blockIdx.x];
    struct reduce_job job;

    job.range = list.ranges[chunk.range];
    job.leaves = list.leaves + job.range.first_leaf;
    job.sums = list.sums ? list.sums + job.range.first_leaf : NULL;
    job.squares = &list.squares[chunk.range];
    job.extent = chunk_extent(chunk, job.range.n_elems);
    job.fast_end = 0;
    if (is_known_tree(job))
        job.fast_end = job.extent.end < job.range.n_elems ? job.extent.end : job.range.n_elems / RUN_ELEMS * RUN_ELEMS;
    return job;
}

template <enum dtype dtype> DEVICE_FN void reduce_chunk_of(const struct reduce_job &job, struct reduce_board *board)
{
    switch (job.fast_end == 0 ? 1 : job.range.n_leaves) {
    case 8:
        reduce_chunk<dtype, 8>(job, board);
        break;
    case 4:
        reduce_chunk<dtype, 4>(job, board);
        break;
    case 2:
        reduce_chunk<dtype, 2>(job, board);
        break;
    default:
        reduce_chunk<dtype, 1>(job, board);
    }
}

static __global__ void __launch_bounds__(BLOCK_THREADS, 3) reduce_kernel(struct device_reduce_list list)
{
    __shared__ struct reduce_board board;
    const struct reduce_job job = reduce_job_of(list);

    switch (job.range.dtype) {
    case DTYPE_BF16:
        reduce_chunk_of<DTYPE_BF16>(job, &board);
        break;
    case DTYPE_F16:
        reduce_chunk_of<DTYPE_F16>(job, &board);
        break;
    default:
        reduce_chunk_of<DTYPE_F32>(job, &board);
    }
}

int device_reduce(struct CUstream_st *stream, const struct device_reduce_list *list)
{
    const struct clear_list results = {
        {reinterpret_cast<uint64_t *>(list->squares), reinterpret_cast<uint64_t *>(list->sums)},
        {list->n_ranges * (sizeof(struct exact_sum) / 8), list->n_leaves * (sizeof(struct position_sum) / 8)},
    };
    int r = device_clear(stream, &results);

    return r != 0 ? r : device_launch(stream, reduce_kernel, list->n_chunks, *list);
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
    const struct device_chunk chunk = list.chunks[blockIdx.x];
    const struct device_position_range range = list.ranges[chunk.range];
    const struct extent extent = chunk_extent(chunk, range.n_elems);
    per_thread<position_set<1>> lanes;

    if (range.dtype == DTYPE_F32)
        position_chunk<DTYPE_F32>(range, extent, lanes);
    else
        position_chunk<DTYPE_BF16>(range, extent, lanes); /* any 16 bits */
    position_flush(lanes, 0, &board, &list.sums[chunk.range]);
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
    return load_kernels(reduce_kernel, position_kernel);
}

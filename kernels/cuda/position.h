/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * position_sum.h for a block. Four threads share a run of 64 elements. Of each stripe, thread j reads the j-th 16
 * bytes. These are lanes 2j and 2j + 1, the pair that is rotated together. So a thread computes its lanes alone from
 * the first stripe to the last, and can also use its elements for the sum over ranks.
 */

#include "kernels/cuda/block.h"

enum {
    RUN_ELEMS = POSITION_RUN_ELEMS,
    RUN_THREADS = 4,
    TILE_RUNS = BLOCK_THREADS / RUN_THREADS, /* the runs that a block works on at once */
    THREAD_ELEMS = RUN_ELEMS / RUN_THREADS,
};

template <enum dtype dtype> DEVICE_FN constexpr unsigned n_stripes()
{
    return THREAD_ELEMS / unit_elems<dtype>();
}

/* Return: the number, in the run, of the first element of this thread's part of a stripe. */
template <enum dtype dtype> DEVICE_FN unsigned stripe_elem(unsigned stripe)
{
    return (stripe * RUN_THREADS + threadIdx.x % RUN_THREADS) * unit_elems<dtype>();
}

/* Two lanes of a position sum. */
struct position_lanes {
    uint64_t first[2];
    uint64_t second[2];
};

/* y = rotate(y) + words, which starts at y = 0 */
DEVICE_FN void position_stripe(struct unit *y, const struct unit &words)
{
    const uint64_t low = y->word[0], high = y->word[1];

    y->word[0] = (low >> 40 | high << 24) + words.word[0];
    y->word[1] = (high >> 40 | low << 24) + words.word[1];
}

/* run: the number of the run, counted from the parameter's start */
DEVICE_FN void position_close(const struct unit &y, uint64_t run, struct position_lanes *lanes)
{
    for (unsigned k = 0; k < 2; k++) {
        uint64_t z = y.word[k] ^ y.word[k] >> 29;

        lanes->first[k] += z;
        lanes->second[k] += (run + 1) * z;
    }
}

/* Shared memory of position_flush(). */
struct position_board {
    struct position_lanes lanes[BLOCK_THREADS];
};

/* Adds all threads' lanes of leaf `which` to *sum, with 16 atomic additions per chunk. */
template <typename lanes_type>
DEVICE_FN void position_flush(lanes_type &lanes, unsigned which, struct position_board *board, struct position_sum *sum)
{
    for (phase threads; threads.next();)
        board->lanes[threadIdx.x] = lanes.mine().leaf[which];
    for (phase threads; threads.next();) {
        const unsigned k = threadIdx.x % 8; /* the lane, of first[] or second[] */
        uint64_t total = 0;

        if (threadIdx.x >= 16)
            continue;
        for (unsigned run = 0; run < TILE_RUNS; run++) {
            const struct position_lanes *from = &board->lanes[run * RUN_THREADS + k / 2];

            total += threadIdx.x < 8 ? from->first[k % 2] : from->second[k % 2];
        }
        atomic_add(threadIdx.x < 8 ? &sum->first[k] : &sum->second[k], total);
    }
}

template <unsigned n> struct position_set {
    struct position_lanes leaf[n];
};

DEVICE_FN void position_reset(struct position_lanes *lanes)
{
    *lanes = {{0, 0}, {0, 0}};
}

/* Adds one run, complete or not, at any address. elems: the address of the range's first element. elem: the number of
 * the run's first element in the range. */
template <enum dtype dtype>
DEVICE_FN void position_run(const void *elems, uint64_t elem, uint64_t n_elems, uint64_t run,
                            struct position_lanes *lanes)
{
    const char *bytes = static_cast<const char *>(elems);
    struct unit y = {{0, 0}};

#pragma unroll
    for (unsigned s = 0; s < n_stripes<dtype>(); s++) {
        const uint64_t at = elem + stripe_elem<dtype>(s);

        if (at < n_elems)
            position_stripe(&y, unit_load_some(bytes + at * elem_bytes<dtype>(), (n_elems - at) * elem_bytes<dtype>()));
        else
            position_stripe(&y, {{0, 0}});
    }
    position_close(y, run, lanes);
}

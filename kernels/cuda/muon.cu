/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Muon's division by the Frobenius norm. Each block of the first launch adds the squares of some tiles in double. Each
 * block of the second launch adds the sums of all those blocks, and divides its tiles. Both sums use a fixed tree, so
 * only the length of the matrix decides the bits.
 *
 * Both launches are limited by memory, so a thread has four loads of 16 bytes in flight.
 */

#include "kernels/cuda/block.h"

enum {
    QUAD_ELEMS = 4,
    THREAD_QUADS = 4,
    TILE_ELEMS = BLOCK_THREADS * QUAD_ELEMS * THREAD_QUADS,
};

struct tile {
    struct quad quads[THREAD_QUADS];
};

/* The first element of a thread's quad, counted from the matrix's start. */
DEVICE_FN uint64_t quad_elem(uint64_t tile, unsigned quad)
{
    return tile * TILE_ELEMS + (quad * BLOCK_THREADS + threadIdx.x) * QUAD_ELEMS;
}

/* Loads a quad; elements after the end are zero. */
DEVICE_FN struct quad load_some(const float *matrix, uint64_t elem, uint64_t n_elems)
{
    struct quad quad = {};

#pragma unroll
    for (unsigned i = 0; i < QUAD_ELEMS; i++) {
        if (elem + i < n_elems)
            quad.x[i] = matrix[elem + i];
    }
    return quad;
}

DEVICE_FN void store_some(float *x, uint64_t elem, uint64_t n_elems, const struct quad &quad)
{
#pragma unroll
    for (unsigned i = 0; i < QUAD_ELEMS; i++) {
        if (elem + i < n_elems)
            x[elem + i] = quad.x[i];
    }
}

/* Loads this thread's part of a tile. is_whole: the tile is complete and at a multiple of 16 bytes. */
DEVICE_FN struct tile load_tile(const struct device_normalize &list, uint64_t tile, bool is_whole)
{
    const float *matrix = in_global(list.matrix);
    struct tile mine;

    if (is_whole) {
#pragma unroll
        for (unsigned i = 0; i < THREAD_QUADS; i++)
            mine.quads[i] = *reinterpret_cast<const struct quad *>(matrix + quad_elem(tile, i));
        return mine;
    }
#pragma unroll
    for (unsigned i = 0; i < THREAD_QUADS; i++)
        mine.quads[i] = load_some(matrix, quad_elem(tile, i), list.n_elems);
    return mine;
}

DEVICE_FN bool is_whole(const struct device_normalize &list, uint64_t tile)
{
    return (tile + 1) * TILE_ELEMS <= list.n_elems && is_aligned(list.matrix, UNIT_BYTES) &&
           is_aligned(list.x, UNIT_BYTES);
}

static uint64_t tiles_of(uint64_t n_elems)
{
    return (n_elems + TILE_ELEMS - 1) / TILE_ELEMS;
}

/* A launch has an equal number of blocks on every device, because the number decides the bits. */
static uint32_t blocks_of(uint64_t n_elems)
{
    const uint64_t n = tiles_of(n_elems), most = DEVICE_NORM_SUMS;

    return static_cast<uint32_t>(n < most ? n : most);
}

struct normalize_launch {
    struct device_normalize list;
    uint64_t n_tiles;
    uint32_t n_blocks;
};

/* Adds one value per thread. Afterwards all threads may read the sum in sums[0]. */
DEVICE_FN void add_up(double *sums)
{
    for (unsigned half = BLOCK_THREADS / 2; half > 0; half /= 2) {
        for (phase threads; threads.next();) {
            if (threadIdx.x < half)
                sums[threadIdx.x] += sums[threadIdx.x + half];
        }
    }
}

DEVICE_FN double sum_of_squares(const struct normalize_launch &launch)
{
    double sums[QUAD_ELEMS] = {};

#pragma unroll 1
    for (uint64_t tile = blockIdx.x; tile < launch.n_tiles; tile += launch.n_blocks) {
        const struct tile mine = load_tile(launch.list, tile, is_whole(launch.list, tile));

#pragma unroll
        for (unsigned i = 0; i < THREAD_QUADS * QUAD_ELEMS; i++) {
            const double x = mine.quads[i / QUAD_ELEMS].x[i % QUAD_ELEMS];

            sums[i % QUAD_ELEMS] += x * x;
        }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static __global__ __launch_bounds__(BLOCK_THREADS) void norm_kernel(struct normalize_launch launch)
{
    __shared__ double sums[BLOCK_THREADS];

    for (phase threads; threads.next();)
        sums[threadIdx.x] = sum_of_squares(launch);
    add_up(sums);
    for (phase threads; threads.next();) {
        if (threadIdx.x == 0)
            in_global(launch.list.sums)[blockIdx.x] = sums[0];
    }
}

static __global__ __launch_bounds__(BLOCK_THREADS) void normalize_kernel(struct normalize_launch launch)
{
    __shared__ double sums[BLOCK_THREADS];

    for (phase threads; threads.next();) {
        double sum = 0;

        for (uint32_t i = threadIdx.x; i < launch.n_blocks; i += BLOCK_THREADS)
            sum += in_global(launch.list.sums)[i];
        sums[threadIdx.x] = sum;
    }
    add_up(sums);
    for (phase threads; threads.next();) {
        const double norm = sqrt(sums[0]);
        const float divisor = static_cast<float>(norm > launch.list.eps ? norm : launch.list.eps);

#pragma unroll 1
        for (uint64_t tile = blockIdx.x; tile < launch.n_tiles; tile += launch.n_blocks) {
            const bool whole = is_whole(launch.list, tile);
            struct tile mine = load_tile(launch.list, tile, whole);

#pragma unroll
            for (unsigned i = 0; i < THREAD_QUADS; i++) {
                float *x = in_global(launch.list.x);

#pragma unroll
                for (unsigned k = 0; k < QUAD_ELEMS; k++)
                    mine.quads[i].x[k] = mine.quads[i].x[k] / divisor;
                if (whole)
                    *reinterpret_cast<struct quad *>(x + quad_elem(tile, i)) = mine.quads[i];
                else
                    store_some(x, quad_elem(tile, i), launch.list.n_elems, mine.quads[i]);
            }
        }
    }
}

int device_normalize(struct CUstream_st *stream, const struct device_normalize *list)
{
    const struct normalize_launch launch = {*list, tiles_of(list->n_elems), blocks_of(list->n_elems)};
    int r = device_launch(stream, norm_kernel, launch.n_blocks, launch);

    return r != 0 ? r : device_launch(stream, normalize_kernel, launch.n_blocks, launch);
}

int load_muon(void)
{
    return load_kernels(norm_kernel, normalize_kernel);
}

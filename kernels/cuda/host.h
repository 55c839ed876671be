/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The parts of CUDA that the kernels use, on the CPU, so that the same sources can run without a device. Blocks and
 * threads take turns. A thread runs to the end of a phase (block.h) before the next thread begins that phase; the
 * kernels allow this order, because they wait only between phases. Shared memory is a local variable of the block.
 * Results must not depend on the order of blocks and threads. With emulated_backwards, tests reverse both orders to
 * check that.
 *
 * sim_launch() puts a launch on a stream of the simulated CUDA in tests/sim.
 */

#include <new>
#include <stdint.h>

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(...)

extern "C" {

/* Declared in tests/sim/sim.h. It owns args, even if it fails: it calls free_args once, after the last use of args. */
int sim_launch(struct CUstream_st *stream, void (*run)(void *), void (*free_args)(void *), void *args);

/* Loads a kernel to the current device. Return: 0, or the error that CUDA would return. */
int sim_load(const void *kernel);
/* Ends the process if the launched kernel is not loaded. */
void sim_check_loaded(const void *kernel);

/* The number of turns that the threads of this kernel get before sim_stop() is called; 0: unlimited. */
extern __thread uint64_t sim_turns;
/* Ends the process or the kernel, so it may not return. */
void sim_stop(void);

/* For tests. Set only while no kernel is launched. */
extern bool emulated_backwards;
}

enum {
    BLOCK_THREADS = 128,
};

struct emulated_index {
    unsigned x;
};

/* One variable for all files, because a file may launch the kernels of another file. */
__attribute__((visibility("hidden"))) extern __thread struct emulated_index blockIdx, threadIdx;

class phase
{
    unsigned n_begun = 0;

  public:
    bool next()
    {
        if (sim_turns > 0 && --sim_turns == 0)
            sim_stop();
        threadIdx.x = emulated_backwards ? BLOCK_THREADS - 1 - n_begun : n_begun;
        return n_begun++ < BLOCK_THREADS;
    }
};

typedef class phase warp_phase;

/* Does nothing, because on the CPU the code between phases runs once for all threads of a block. */
static inline void wait_for_block(void)
{
}

template <typename T> class per_thread
{
    T all[BLOCK_THREADS];

  public:
    T &mine()
    {
        return all[threadIdx.x];
    }
};

class sixteen_threads
{
    uint16_t all[BLOCK_THREADS];

  public:
    void set(uint16_t x)
    {
        all[threadIdx.x] = x;
    }

    uint16_t largest() const
    {
        const uint16_t *of = all + threadIdx.x / 16 * 16;
        uint16_t largest = 0;

        for (unsigned i = 0; i < 16; i++)
            largest = of[i] > largest ? of[i] : largest;
        return largest;
    }
};

template <typename T> static inline T *in_global(T *at)
{
    return at;
}

/* Uses an atomic exchange, which orders as much as a fence, because thread sanitizer does not support fences. */
static inline void system_fence(void)
{
    static unsigned word;

    (void)__atomic_exchange_n(&word, 1, __ATOMIC_SEQ_CST);
}

static inline void device_fence(void)
{
    system_fence();
}

static inline struct quad quad_load_once(const float *at)
{
    return *reinterpret_cast<const struct quad *>(at);
}

static inline void quad_store_once(float *at, const struct quad &quad)
{
    *reinterpret_cast<struct quad *>(at) = quad;
}

static inline struct half_quad quad_load_once(const uint16_t *at)
{
    return *reinterpret_cast<const struct half_quad *>(at);
}

static inline void quad_store_once(uint16_t *at, const struct half_quad &quad)
{
    *reinterpret_cast<struct half_quad *>(at) = quad;
}

static inline uint32_t word_load_once(const int8_t *at)
{
    return *reinterpret_cast<const uint32_t *>(at);
}

static inline void word_store_once(int8_t *at, uint32_t word)
{
    *reinterpret_cast<uint32_t *>(at) = word;
}

static inline void atomic_add(uint64_t *at, uint64_t n)
{
    __atomic_fetch_add(at, n, __ATOMIC_RELAXED);
}

static inline void atomic_add(uint32_t *at, uint32_t n)
{
    __atomic_fetch_add(at, n, __ATOMIC_RELAXED);
}

static inline void atomic_max(uint64_t *at, uint64_t n)
{
    uint64_t old = __atomic_load_n(at, __ATOMIC_RELAXED);

    while (old < n && !__atomic_compare_exchange_n(at, &old, n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

template <typename list_type> struct emulated_launch {
    void (*kernel)(list_type list);
    uint32_t n_blocks;
    list_type list;

    static void run(void *args)
    {
        const emulated_launch *launch = static_cast<const emulated_launch *>(args);

        for (uint32_t i = 0; i < launch->n_blocks; i++) {
            blockIdx.x = emulated_backwards ? launch->n_blocks - 1 - i : i;
            launch->kernel(launch->list);
        }
    }

    static void free(void *args)
    {
        delete static_cast<emulated_launch *>(args);
    }
};

template <typename list_type> static int load_kernel(void (*kernel)(list_type list))
{
    return sim_load(reinterpret_cast<const void *>(kernel));
}

template <typename list_type>
static int device_launch(struct CUstream_st *stream, void (*kernel)(list_type list), uint32_t n_blocks,
                         const list_type &list)
{
    using launch_type = emulated_launch<list_type>;
    launch_type *launch;

    if (n_blocks == 0)
        return 0;
    sim_check_loaded(reinterpret_cast<const void *>(kernel));
    launch = new (std::nothrow) launch_type{kernel, n_blocks, list};
    if (!launch)
        return 2; /* cudaErrorMemoryAllocation */
    return sim_launch(stream, launch_type::run, launch_type::free, launch);
}

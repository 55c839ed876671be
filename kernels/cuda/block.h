/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The form of the kernels in this folder. A block of BLOCK_THREADS threads works in phases:
 *
 *     for (phase threads; threads.next();) {
 *         ... the work of one thread, threadIdx.x
 *     }
 *
 * A phase ends in __syncthreads(), so no thread begins a phase before all threads have ended the phase before it. Code
 * between phases is the work of the whole block, equal in every thread. A thread's variables that live from phase to
 * phase are per_thread<>, which are registers on a device. On the CPU, host.h defines the same names as loops.
 *
 * Tensors of every type are read and written in units of 16 bytes, so the CPU's compiler needs -fno-strict-aliasing.
 */

#include "kernels/convert.h"
#include "kernels/device.h"

/* Four fp32 at a multiple of 16 bytes. */
struct alignas(16) quad {
    float x[4];
};

/* Four elements of 16 bits at a multiple of 8 bytes. */
struct alignas(8) half_quad {
    uint16_t x[4];
};

#ifdef __CUDACC__

enum {
    BLOCK_THREADS = 128,
};

class phase
{
    bool begun = false;

  public:
    __device__ __forceinline__ bool next()
    {
        if (begun)
            __syncthreads();
        return begun = !begun;
    }
};

static __device__ __forceinline__ void wait_for_block(void)
{
    __syncthreads();
}

/* A phase in which each warp waits only for itself, not for the block. */
class warp_phase
{
    bool begun = false;

  public:
    __device__ __forceinline__ bool next()
    {
        if (begun)
            __syncwarp();
        return begun = !begun;
    }
};

template <typename T> class per_thread
{
    T one;

  public:
    __device__ __forceinline__ T &mine()
    {
        return one;
    }
};

/* One number per thread. After each of sixteen neighbouring threads has called set(), all of them call largest() in a
 * later phase. It returns the largest of their numbers. */
class sixteen_threads
{
    uint32_t one;

  public:
    __device__ __forceinline__ void set(uint16_t x)
    {
        one = x;
    }

    __device__ __forceinline__ uint16_t largest() const
    {
        uint32_t largest = one;

#pragma unroll
        for (unsigned distance = 8; distance > 0; distance /= 2)
            largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
        return static_cast<uint16_t>(largest);
    }
};

/* Tells nvcc that the pointer, which was read from memory, points to global memory, like all pointers of zerod. */
template <typename T> static __device__ __forceinline__ T *in_global(T *at)
{
    __builtin_assume(__isGlobal(at));
    return at;
}

/* Orders this thread's earlier writes before its later writes, for the host and all devices. */
static __device__ __forceinline__ void system_fence(void)
{
    __threadfence_system();
}

/* Orders this thread's earlier writes before its later writes, for this device. */
static __device__ __forceinline__ void device_fence(void)
{
    __threadfence();
}

/* Loads elements that are used only once, as the first ones that the L2 may evict. */
static __device__ __forceinline__ struct quad quad_load_once(const float *at)
{
    const float4 four = __ldcs(reinterpret_cast<const float4 *>(at));

    return {{four.x, four.y, four.z, four.w}};
}

static __device__ __forceinline__ void quad_store_once(float *at, const struct quad &quad)
{
    __stcs(reinterpret_cast<float4 *>(at), make_float4(quad.x[0], quad.x[1], quad.x[2], quad.x[3]));
}

static __device__ __forceinline__ struct half_quad quad_load_once(const uint16_t *at)
{
    const ushort4 four = __ldcs(reinterpret_cast<const ushort4 *>(at));

    return {{four.x, four.y, four.z, four.w}};
}

static __device__ __forceinline__ void quad_store_once(uint16_t *at, const struct half_quad &quad)
{
    __stcs(reinterpret_cast<ushort4 *>(at), make_ushort4(quad.x[0], quad.x[1], quad.x[2], quad.x[3]));
}

static __device__ __forceinline__ uint32_t word_load_once(const int8_t *at)
{
    return __ldcs(reinterpret_cast<const uint32_t *>(at));
}

static __device__ __forceinline__ void word_store_once(int8_t *at, uint32_t word)
{
    __stcs(reinterpret_cast<uint32_t *>(at), word);
}

static __device__ __forceinline__ void atomic_add(uint64_t *at, uint64_t n)
{
    atomicAdd(reinterpret_cast<unsigned long long *>(at), static_cast<unsigned long long>(n));
}

static __device__ __forceinline__ void atomic_add(uint32_t *at, uint32_t n)
{
    atomicAdd(at, n);
}

static __device__ __forceinline__ void atomic_max(uint64_t *at, uint64_t n)
{
    atomicMax(reinterpret_cast<unsigned long long *>(at), static_cast<unsigned long long>(n));
}

/* Loads the kernel's code. The driver loads the code, or makes it from PTX, when a caller asks for the kernel's
 * attributes. */
template <typename list_type> static int load_kernel(void (*kernel)(list_type list))
{
    struct cudaFuncAttributes attributes;

    return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel));
}

/* Calls cudaLaunchKernel(), because it returns only this launch's error. An error after <<<>>> may be that of an
 * earlier call. */
template <typename list_type>
static int device_launch(struct CUstream_st *stream, void (*kernel)(list_type list), uint32_t n_blocks,
                         const list_type &list)
{
    list_type copy = list;
    void *args[] = {&copy};

    if (n_blocks == 0)
        return 0;
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(n_blocks), dim3(BLOCK_THREADS), args, 0,
                            stream);
}

#define DEVICE_INLINE inline __attribute__((__always_inline__))

#else
#include "kernels/cuda/host.h"

#define DEVICE_INLINE inline /* compiles in half the time of full inlining */
#endif

#define DEVICE_FN static __device__ DEVICE_INLINE
#define DEVICE_MEMBER __device__ DEVICE_INLINE

/* ---- chunks -------------------------------------------------------------------------------------------- */

/* The elements of a chunk, counted from its range's start. */
struct extent {
    uint64_t begin;
    uint64_t end;
};

DEVICE_FN struct extent chunk_extent(struct device_chunk chunk, uint64_t n_elems)
{
    uint64_t begin = static_cast<uint64_t>(chunk.index) * DEVICE_CHUNK_ELEMS;

    return {begin, n_elems - begin < DEVICE_CHUNK_ELEMS ? n_elems : begin + DEVICE_CHUNK_ELEMS};
}

/* ---- units --------------------------------------------------------------------------------------------- */

enum {
    UNIT_BYTES = 16,
};

struct alignas(UNIT_BYTES) unit {
    uint64_t word[2];
};

DEVICE_FN bool is_aligned(const void *at, size_t bytes)
{
    return (reinterpret_cast<uintptr_t>(at) & (bytes - 1)) == 0;
}

DEVICE_FN struct unit unit_load(const void *at)
{
    return *static_cast<const struct unit *>(at);
}

/* Loads a unit from any even address: its first n_bytes (any even number). The unit's other bytes become zero. */
DEVICE_FN struct unit unit_load_some(const void *at, uint64_t n_bytes)
{
    const uint16_t *half = static_cast<const uint16_t *>(at);
    struct unit unit = {{0, 0}};

    if (n_bytes >= UNIT_BYTES && is_aligned(at, UNIT_BYTES))
        return unit_load(at);
    for (unsigned i = 0; i < UNIT_BYTES / 2; i++) {
        if (2 * i < n_bytes)
            unit.word[i / 4] |= static_cast<uint64_t>(half[i]) << i % 4 * 16;
    }
    return unit;
}

template <enum dtype dtype> DEVICE_FN constexpr unsigned elem_bytes()
{
    return dtype == DTYPE_F32 ? 4 : 2;
}

template <enum dtype dtype> DEVICE_FN constexpr unsigned unit_elems()
{
    return UNIT_BYTES / elem_bytes<dtype>();
}

template <enum dtype dtype> DEVICE_FN float unit_elem(const struct unit &unit, unsigned i)
{
    if (dtype == DTYPE_F32)
        return f32_from_bits(static_cast<uint32_t>(unit.word[i / 2 % 2] >> i % 2 * 32));
    if (dtype == DTYPE_BF16)
        return f32_from_bf16(static_cast<uint16_t>(unit.word[i / 4] >> i % 4 * 16));
    return f32_from_f16(static_cast<uint16_t>(unit.word[i / 4] >> i % 4 * 16));
}

/* ---- results ------------------------------------------------------------------------------------------- */

enum {
    CLEAR_ARRAYS = 4,
};

/* Arrays of results that device_clear() sets to zero. An entry whose `words` is NULL is skipped.
 * kernels/cuda/clear.cu */
struct clear_list {
    uint64_t *words[CLEAR_ARRAYS];
    uint64_t n_words[CLEAR_ARRAYS];
};

int device_clear(struct CUstream_st *stream, const struct clear_list *list);

/* ---- loading ------------------------------------------------------------------------------------------- */

/* Return: 0 if all kernels are loaded, or the error of the first that fails. */
template <typename list_type, typename... more_types>
static int load_kernels(void (*kernel)(list_type list), more_types... more)
{
    const int r = load_kernel(kernel);

    if constexpr (sizeof...(more) == 0)
        return r;
    else
        return r != 0 ? r : load_kernels(more...);
}

/* Each loads the kernels of one file; device_load_kernels() calls all of them. */
int load_clear(void);
int load_convert(void);
int load_muon(void);
int load_reduce(void);
int load_update(void);
int load_words(void);

/* SPDX-License-Identifier: Apache-2.0 */

/* Conversion on the device, with the bits of convert_kernel.c: a thread calls the functions of convert.h for four
 * elements. */

#include "kernels/cuda/block.h"

template <enum dtype dtype> DEVICE_FN float widen(uint16_t h)
{
    return dtype == DTYPE_BF16 ? f32_from_bf16(h) : f32_from_f16(h);
}

template <enum dtype dtype> DEVICE_FN uint16_t narrow(float x)
{
    return dtype == DTYPE_BF16 ? bf16_from_f32(x) : f16_from_f32(x);
}

/* The three conversions of an element. fp32 is copied as its bits, so that a NaN does not change. */
struct copy {
    using from = uint32_t;
    using to = uint32_t;

    static __device__ uint32_t elem(uint32_t bits)
    {
        return bits;
    }
};

template <enum dtype dtype> struct to_f32 {
    using from = uint16_t;
    using to = uint32_t;

    static __device__ uint32_t elem(uint16_t h)
    {
        return f32_bits(widen<dtype>(h));
    }
};

template <enum dtype dtype> struct from_f32 {
    using from = uint32_t;
    using to = uint16_t;

    static __device__ uint16_t elem(uint32_t bits)
    {
        return narrow<dtype>(f32_from_bits(bits));
    }
};

template <typename elem_type> struct alignas(4 * sizeof(elem_type)) four_elems {
    elem_type x[4];
};

template <typename way>
DEVICE_FN void convert_chunk(const struct device_convert_range &range, const struct extent &extent)
{
    using four_from = struct four_elems<typename way::from>;
    using four_to = struct four_elems<typename way::to>;
    const typename way::from *src = static_cast<const typename way::from *>(in_global(range.src));
    typename way::to *dst = static_cast<typename way::to *>(in_global(range.dst));
    const bool aligned = is_aligned(src, sizeof(four_from)) && is_aligned(dst, sizeof(four_to));
    const uint64_t fours_end = aligned ? extent.begin + (extent.end - extent.begin) / 4 * 4 : extent.begin;

    for (phase threads; threads.next();) {
#pragma unroll 2
        for (uint64_t i = extent.begin + 4 * threadIdx.x; i < fours_end; i += 4 * BLOCK_THREADS) {
            const four_from in = *reinterpret_cast<const four_from *>(src + i);
            four_to out;

#pragma unroll
            for (unsigned k = 0; k < 4; k++)
                out.x[k] = way::elem(in.x[k]);
            *reinterpret_cast<four_to *>(dst + i) = out;
        }
#pragma unroll 1
        for (uint64_t i = fours_end + threadIdx.x; i < extent.end; i += BLOCK_THREADS)
            dst[i] = way::elem(src[i]);
    }
}

static __global__ void __launch_bounds__(BLOCK_THREADS) to_f32_kernel(struct device_convert_list list)
{
    const struct device_chunk chunk = in_global(list.chunks)[blockIdx.x];
    const struct device_convert_range range = in_global(list.ranges)[chunk.range];

    switch (range.dtype) {
    case DTYPE_BF16:
        convert_chunk<to_f32<DTYPE_BF16>>(range, chunk_extent(chunk, range.n_elems));
        break;
    case DTYPE_F16:
        convert_chunk<to_f32<DTYPE_F16>>(range, chunk_extent(chunk, range.n_elems));
        break;
    default:
        convert_chunk<copy>(range, chunk_extent(chunk, range.n_elems));
    }
}

static __global__ void __launch_bounds__(BLOCK_THREADS) from_f32_kernel(struct device_convert_list list)
{
    const struct device_chunk chunk = in_global(list.chunks)[blockIdx.x];
    const struct device_convert_range range = in_global(list.ranges)[chunk.range];

    switch (range.dtype) {
    case DTYPE_BF16:
        convert_chunk<from_f32<DTYPE_BF16>>(range, chunk_extent(chunk, range.n_elems));
        break;
    case DTYPE_F16:
        convert_chunk<from_f32<DTYPE_F16>>(range, chunk_extent(chunk, range.n_elems));
        break;
    default:
        convert_chunk<copy>(range, chunk_extent(chunk, range.n_elems));
    }
}

int device_convert_to_f32(struct CUstream_st *stream, const struct device_convert_list *list)
{
    return device_launch(stream, to_f32_kernel, list->n_chunks, *list);
}

int device_convert_from_f32(struct CUstream_st *stream, const struct device_convert_list *list)
{
    return device_launch(stream, from_f32_kernel, list->n_chunks, *list);
}

int load_convert(void)
{
    return load_kernels(to_f32_kernel, from_f32_kernel);
}

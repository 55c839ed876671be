/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * For functions of one element that the CPU's kernels and the device's share, so that one text gives both their
 * bits. Plain C that is C++ as well; under nvcc they exist on both sides.
 */

#ifdef __CUDACC__
#define ELEMENT_FN static __host__ __device__ __forceinline__
#else
#define ELEMENT_FN static inline __attribute__((__always_inline__))
#endif

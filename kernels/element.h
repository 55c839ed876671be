/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* For functions of one element that the kernels of the CPU and the device share, so that both compute equal bits. They
 * are C and also C++; under nvcc they exist for host and device. */

#ifdef __CUDACC__
#define ELEMENT_FN static __host__ __device__ __forceinline__
#else
#define ELEMENT_FN static inline __attribute__((__always_inline__))
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Copies values that are not read again soon. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { COPY_ALIGN_BYTES = 16 };

/*
 * memcpy() with stores that bypass the caches: the caches keep their contents, and the memory is not read before it is
 * overwritten. dst: aligned to COPY_ALIGN_BYTES.
 */
static inline void copy_past_caches(void *dst, const void *src, size_t n_bytes)
{
    size_t at = 0;

#ifdef __SSE2__
    for (; at + 64 <= n_bytes; at += 64) {
        const __m128i *from = (const __m128i *)(const void *)((const uint8_t *)src + at);
        __m128i *to = (__m128i *)(void *)((uint8_t *)dst + at);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);

        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    _mm_sfence(); /* orders the stores past the caches before the following stores */
#endif
    memcpy((uint8_t *)dst + at, (const uint8_t *)src + at, n_bytes - at);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Copies values that are not read again soon, with stores that bypass the caches: the caches keep their contents, and
 * the memory is not read before it is overwritten. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

enum { COPY_LINE_BYTES = 64 };

/* Orders stores past the caches before the following stores. */
static inline void copy_order(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Copies one line. dst: aligned to COPY_LINE_BYTES. */
static inline void copy_line_past_caches(uint8_t *dst, const uint8_t *src)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)dst, _mm512_loadu_si512(src));
#elif defined(__SSE2__)
    const __m128i *from = (const __m128i *)(const void *)src;
    __m128i *to = (__m128i *)(void *)dst;
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);

    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
#else
    memcpy(dst, src, COPY_LINE_BYTES);
#endif
}

/* memcpy() past the caches, but for parts of lines at both ends. */
static inline void copy_past_caches(void *dst, const void *src, size_t n_bytes)
{
    size_t at = -(uintptr_t)dst % COPY_LINE_BYTES;

    if (at > n_bytes)
        at = n_bytes;
    memcpy(dst, src, at);
    for (; at + COPY_LINE_BYTES <= n_bytes; at += COPY_LINE_BYTES)
        copy_line_past_caches((uint8_t *)dst + at, (const uint8_t *)src + at);
    copy_order();
    memcpy((uint8_t *)dst + at, (const uint8_t *)src + at, n_bytes - at);
}

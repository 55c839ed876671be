/* SPDX-License-Identifier: Apache-2.0 */

#include "bench/streams.h"

#include "core/base/segment.h"
#include "kernels/convert.h"

#include <string.h>

enum {
    SKEW_BYTES = 64 << 10,
};

#define always_inline inline __attribute__((always_inline))

static always_inline void sum_f32(float *restrict acc, const float *a, const float *b, const float *c, const float *d,
                                  size_t n)
{
    for (size_t i = 0; i < n; i++)
        acc[i] = c ? a[i] + b[i] + c[i] + d[i] : a[i] + b[i];
}

static always_inline void sum_bf16(float *restrict acc, const uint16_t *a, const uint16_t *b, const uint16_t *c,
                                   const uint16_t *d, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float sum = f32_from_bf16(a[i]) + f32_from_bf16(b[i]);

        acc[i] = c ? sum + f32_from_bf16(c[i]) + f32_from_bf16(d[i]) : sum;
    }
}

static always_inline void sum(float *acc, const void *const *leaves, unsigned n_leaves, enum dtype dtype, size_t n)
{
    if (n_leaves == 2 && dtype == DTYPE_F32)
        sum_f32(acc, leaves[0], leaves[1], NULL, NULL, n);
    else if (n_leaves == 4 && dtype == DTYPE_F32)
        sum_f32(acc, leaves[0], leaves[1], leaves[2], leaves[3], n);
    else if (n_leaves == 2)
        sum_bf16(acc, leaves[0], leaves[1], NULL, NULL, n);
    else
        sum_bf16(acc, leaves[0], leaves[1], leaves[2], leaves[3], n);
}

/* Reads four arrays, writes back three of them, and writes the upper halves of one of them to w16 if w16 is given. */
static always_inline void adam(uint32_t *restrict p, uint32_t *restrict m, uint32_t *restrict v,
                               const uint32_t *restrict acc, uint16_t *restrict w16, size_t n)
{
    if (!w16) {
        for (size_t i = 0; i < n; i++) {
            p[i] ^= acc[i] & 1;
            m[i] ^= acc[i] & 1;
            v[i] ^= acc[i] & 1;
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        p[i] ^= acc[i] & 1;
        m[i] ^= acc[i] & 1;
        v[i] ^= acc[i] & 1;
        w16[i] = (uint16_t)(p[i] >> 16);
    }
}

static always_inline void adam_bf16(uint32_t *restrict p, uint16_t *restrict m, uint16_t *restrict v,
                                    const uint32_t *restrict acc, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        p[i] ^= acc[i] & 1;
        m[i] ^= (uint16_t)(acc[i] & 1);
        v[i] ^= (uint16_t)(acc[i] & 1);
    }
}

/* n: complete groups only. */
static always_inline void adam_8bit(uint32_t *restrict p, uint8_t *restrict m, uint8_t *restrict v,
                                    const uint32_t *restrict acc, size_t n)
{
    for (; n >= GROUP8_ELEMS; n -= GROUP8_ELEMS, p += GROUP8_ELEMS, acc += GROUP8_ELEMS) {
        for (size_t i = 0; i < GROUP8_ELEMS; i++)
            p[i] ^= acc[i] & 1;
        for (size_t i = 0; i < GROUP8_BYTES; i++) {
            m[i] ^= 1;
            v[i] ^= 1;
        }
        m += GROUP8_BYTES;
        v += GROUP8_BYTES;
    }
}

static always_inline void adam_24bit(uint16_t *restrict w, uint8_t *restrict lower, uint8_t *restrict m,
                                     uint8_t *restrict v, const uint32_t *restrict acc, size_t n)
{
    for (; n >= GROUP8_ELEMS; n -= GROUP8_ELEMS, w += GROUP8_ELEMS, lower += GROUP8_ELEMS, acc += GROUP8_ELEMS) {
        for (size_t i = 0; i < GROUP8_ELEMS; i++) {
            w[i] ^= (uint16_t)(acc[i] & 1);
            lower[i] ^= (uint8_t)(acc[i] & 1);
        }
        for (size_t i = 0; i < GROUP8_BYTES; i++) {
            m[i] ^= 1;
            v[i] ^= 1;
        }
        m += GROUP8_BYTES;
        v += GROUP8_BYTES;
    }
}

#define DEFINE_STREAMS(name, ...)                                                                                      \
    __VA_ARGS__ static void sum_##name(float *acc, const void *const *leaves, unsigned n_leaves, enum dtype dtype,     \
                                       size_t n)                                                                       \
    {                                                                                                                  \
        sum(acc, leaves, n_leaves, dtype, n);                                                                          \
    }                                                                                                                  \
    __VA_ARGS__ static void adam_##name(uint32_t *p, uint32_t *m, uint32_t *v, const uint32_t *acc, uint16_t *w16,     \
                                        size_t n)                                                                      \
    {                                                                                                                  \
        adam(p, m, v, acc, w16, n);                                                                                    \
    }                                                                                                                  \
    __VA_ARGS__ static void adam_bf16_##name(uint32_t *p, uint16_t *m, uint16_t *v, const uint32_t *acc, size_t n)     \
    {                                                                                                                  \
        adam_bf16(p, m, v, acc, n);                                                                                    \
    }                                                                                                                  \
    __VA_ARGS__ static void adam_8bit_##name(uint32_t *p, uint8_t *m, uint8_t *v, const uint32_t *acc, size_t n)       \
    {                                                                                                                  \
        adam_8bit(p, m, v, acc, n);                                                                                    \
    }                                                                                                                  \
    __VA_ARGS__ static void adam_24bit_##name(uint16_t *w, uint8_t *lower, uint8_t *m, uint8_t *v,                     \
                                              const uint32_t *acc, size_t n)                                           \
    {                                                                                                                  \
        adam_24bit(w, lower, m, v, acc, n);                                                                            \
    }

DEFINE_STREAMS(baseline, )
#ifdef __x86_64__
DEFINE_STREAMS(avx2, __attribute__((target("arch=x86-64-v3"))))
#ifdef __clang__ /* clang does not know prefer-vector-width in a target */
DEFINE_STREAMS(avx512, __attribute__((target("arch=x86-64-v4"))))
#else
DEFINE_STREAMS(avx512, __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))))
#endif
#endif

static const struct streams all_streams[] = {
    {"baseline", sum_baseline, adam_baseline, adam_bf16_baseline, adam_8bit_baseline, adam_24bit_baseline},
#ifdef __x86_64__
    {"avx2", sum_avx2, adam_avx2, adam_bf16_avx2, adam_8bit_avx2, adam_24bit_avx2},
    {"avx512", sum_avx512, adam_avx512, adam_bf16_avx512, adam_8bit_avx512, adam_24bit_avx512},
#endif
};

const struct streams *streams_of(const char *isa)
{
    for (size_t i = 0; i < ARRAY_SIZE(all_streams); i++) {
        if (strcmp(all_streams[i].isa, isa) == 0)
            return &all_streams[i];
    }
    return NULL;
}

/*
 * Return: the memory of the index-th array. Each array begins at another offset, because of the nearest cache: some
 * processors (Zen) confuse lines of arrays that are a multiple of 2^27 bytes apart. Streams and kernels would slow down
 * by up to a half, each by a different amount.
 */
void *streams_memory(size_t n_bytes, unsigned index)
{
    size_t skew = (index + 1) * (size_t)SKEW_BYTES;
    struct segment segment;

    if (segment_init(&segment, "bench-streams", n_bytes + skew) < 0)
        return NULL;
    if (segment_reserve(&segment, 0, n_bytes + skew) < 0) {
        segment_deinit(&segment);
        return NULL;
    }
    memset(segment.map, 1, n_bytes + skew);
    return segment.map + skew;
}

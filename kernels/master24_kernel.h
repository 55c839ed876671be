/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Converts masters of master24.h to and from fp32, at most a group, with loops over its element functions. */

#include "kernels/isa.h"
#include "kernels/master24.h"

#ifdef __AVX2__
#include "kernels/master24_avx2.h"
#endif

static always_inline void widen_masters(float *restrict out, struct master24 in, size_t n)
{
#ifdef __AVX2__
    if (n == MASTER24_GROUP_ELEMS) {
        widen_masters_avx2(out, in);
        return;
    }
#endif
    master24_to_f32(out, in, n);
}

/* Rounds stochastically. draws: MASTER24_DRAWS of them. */
static always_inline void narrow_masters(struct master24 out, const float *restrict in, const uint32_t *restrict draws,
                                         size_t n)
{
    uint16_t *restrict weights = out.weights;
    int8_t *restrict lower = out.lower;

#ifdef __AVX2__
    if (n == MASTER24_GROUP_ELEMS) {
        narrow_masters_avx2(out, in, draws);
        return;
    }
#endif
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = master24_at_random(in[i], master24_round(draws[i % MASTER24_DRAWS], i));

        weights[i] = master24_weight(bits);
        lower[i] = master24_lower(bits);
    }
}

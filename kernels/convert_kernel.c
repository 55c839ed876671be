/* SPDX-License-Identifier: Apache-2.0 */
/* Conversion between fp32 and narrower types; compiled once per instruction set. */

#include "kernels/group8_kernel.h"
#include "kernels/isa.h"
#include "kernels/narrow_kernel.h"

static size_t in_group(size_t n_left)
{
    return n_left < GROUP8_ELEMS ? n_left : GROUP8_ELEMS;
}

void ISA_FN(convert_to_f32)(float *restrict dst, const void *restrict src, enum dtype dtype, size_t n_elems)
{
    const uint16_t *half = src;

    switch (dtype) {
    case DTYPE_BF16:
        for (size_t i = 0; i < n_elems; i++)
            dst[i] = f32_from_bf16(half[i]);
        break;
    case DTYPE_F16:
        for (size_t i = 0; i < n_elems; i++)
            dst[i] = f32_from_f16(half[i]);
        break;
    case DTYPE_SIGNED8:
    case DTYPE_UNSIGNED8:
        for (size_t i = 0; i < n_elems; i += GROUP8_ELEMS)
            widen_group8(dst + i, (const struct group8 *)src + i / GROUP8_ELEMS, dtype, in_group(n_elems - i));
        break;
    default:
        if (n_elems > 0)
            memcpy(dst, src, n_elems * sizeof(float));
    }
}

void ISA_FN(convert_from_f32)(void *restrict dst, const float *restrict src, enum dtype dtype, size_t n_elems)
{
    switch (dtype) {
    case DTYPE_BF16:
        narrow(dst, src, n_elems, DTYPE_BF16);
        break;
    case DTYPE_F16:
        narrow(dst, src, n_elems, DTYPE_F16);
        break;
    case DTYPE_SIGNED8:
    case DTYPE_UNSIGNED8:
        for (size_t i = 0; i < n_elems; i += GROUP8_ELEMS)
            narrow_group8((struct group8 *)dst + i / GROUP8_ELEMS, src + i, dtype, NULL, in_group(n_elems - i));
        break;
    default:
        if (n_elems > 0)
            memcpy(dst, src, n_elems * sizeof(float));
    }
}

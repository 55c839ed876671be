/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The model of the programs that misbehave on purpose. It is small, and odd in every respect: several groups and
 * dtypes, a parameter larger than a bucket of 2,000 elements (pushed in parts), parameters with one and with no
 * element, a name of odd bytes, and a frozen parameter. A gradient is a function of its position in the run, so that a
 * process that repeats a micro-batch pushes equal bits.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tests/example/random.h"
#include "kernels/convert.h"

enum { PUPPET_F32, PUPPET_BF16, PUPPET_F16 };

struct puppet_param {
    const char *name;
    int dtype, grad_dtype;
    unsigned n_dims;
    uint64_t shape[2];
    unsigned group;
    bool frozen;
};

static const struct puppet_param puppet_model[] = {
    {"embed.weight", PUPPET_F32, PUPPET_F32, 2, {50, 16}, 0, false},
    {"h.0.attn.weight", PUPPET_F32, PUPPET_F32, 2, {37, 19}, 0, false},
    {"h.0.attn.bias", PUPPET_F32, PUPPET_F32, 1, {37}, 1, false},
    {"h.0.mlp.weight", PUPPET_BF16, PUPPET_BF16, 2, {19, 37}, 0, false},
    {"h.0.mlp.bias", PUPPET_F32, PUPPET_F32, 0, {0}, 1, false},
    {"h.0.nothing", PUPPET_F32, PUPPET_F32, 2, {0, 5}, 0, false},
    {"odd\n\xff\"name", PUPPET_F32, PUPPET_F32, 1, {7}, 0, false},
    {"big.weight", PUPPET_F32, PUPPET_F32, 2, {61, 53}, 0, false},
    {"frozen.table", PUPPET_BF16, PUPPET_BF16, 1, {33}, 0, true},
    {"head.weight", PUPPET_F16, PUPPET_F32, 2, {16, 50}, 0, false},
    {"head.bias", PUPPET_F32, PUPPET_F16, 1, {50}, 0, false},
};

enum { PUPPET_PARAMS = sizeof(puppet_model) / sizeof(puppet_model[0]) };

static inline size_t puppet_dtype_size(int dtype)
{
    return dtype == PUPPET_F32 ? 4 : 2;
}

static inline uint64_t puppet_elems(const struct puppet_param *param)
{
    uint64_t n = 1;

    for (unsigned i = 0; i < param->n_dims; i++)
        n *= param->shape[i];
    return n;
}

/* Stores x as element i of data, in dtype. */
static inline void puppet_store(void *data, int dtype, uint64_t i, float x)
{
    uint16_t half = dtype == PUPPET_BF16 ? bf16_from_f32(x) : f16_from_f32(x);

    if (dtype == PUPPET_F32)
        memcpy((uint8_t *)data + 4 * i, &x, 4);
    else
        memcpy((uint8_t *)data + 2 * i, &half, 2);
}

/* Return: a value in [-0.5, 0.5). */
static inline float puppet_gradient(uint64_t step, uint32_t micro_batch, unsigned rank, uint32_t param, uint64_t i)
{
    return (float)(random_unit((((step << 8 | micro_batch) << 8 | rank) << 24) | param, i) - 0.5);
}

static inline float puppet_initial(uint32_t param, uint64_t i)
{
    return (float)(random_unit(~(uint64_t)param, i) - 0.5);
}

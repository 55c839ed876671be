/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One function per optimizer for one element, for the kernels of the CPU and the device. The lines of a function are
 * those of docs/numerics.md, section 4. */

#include "kernels/element.h"
#include "kernels/update.h"

#include <math.h>

/* One element. A step does not change m and v if the optimizer has none. */
struct element {
    float p;
    float m;
    float v;
};

/* Return: 32 pseudorandom bits for an element. The elements of a parameter are numbered modulo 2^32 (docs/numerics.md,
 * section 5). */
ELEMENT_FN uint32_t rounding_draw(uint32_t key, uint32_t elem)
{
    return rounding_mix(elem * 0x9e3779b9 ^ key);
}

typedef struct element step_fn(struct element e, float acc, const struct update_scalars *k);

ELEMENT_FN struct element adamw(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    e.p = e.p * k->decay;
    e.m = e.m * k->b1 + g * k->c1;
    e.v = e.v * k->b2 + (g * g) * k->c2;
    e.p = e.p - k->a * (e.m / (sqrtf(e.v) * k->q + k->eps));
    return e;
}

ELEMENT_FN struct element adam_l2(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    g = g + e.p * k->wd;
    e.m = e.m * k->b1 + g * k->c1;
    e.v = e.v * k->b2 + (g * g) * k->c2;
    e.p = e.p - k->a * (e.m / (sqrtf(e.v) * k->q + k->eps));
    return e;
}

ELEMENT_FN struct element sgd(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    g = g + e.p * k->wd;
    e.p = e.p - k->lr * g;
    return e;
}

ELEMENT_FN struct element sgd_momentum(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    g = g + e.p * k->wd;
    e.m = e.m * k->mu + g * k->c;
    g = e.m;
    e.p = e.p - k->lr * g;
    return e;
}

ELEMENT_FN struct element sgd_momentum_first(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    g = g + e.p * k->wd;
    e.m = g;
    e.p = e.p - k->lr * g;
    return e;
}

ELEMENT_FN struct element sgd_nesterov(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    g = g + e.p * k->wd;
    e.m = e.m * k->mu + g * k->c;
    g = g + e.m * k->mu;
    e.p = e.p - k->lr * g;
    return e;
}

ELEMENT_FN struct element sgd_nesterov_first(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    g = g + e.p * k->wd;
    e.m = g;
    g = g + e.m * k->mu;
    e.p = e.p - k->lr * g;
    return e;
}

ELEMENT_FN struct element lion(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s, u, sign;

    e.p = e.p * k->decay;
    u = e.m * k->b1 + g * k->c1;
    sign = (float)((u > 0) - (u < 0)); /* +0 for both zeroes */
    e.p = e.p - k->lr * sign;
    e.m = e.m * k->b2 + g * k->c2;
    return e;
}

/* Muon's first pass. p: the summed gradient; it becomes the matrix to orthogonalise. */
ELEMENT_FN struct element muon_momentum(struct element e, float acc, const struct update_scalars *k)
{
    float g = e.p * k->s;

    (void)acc;
    e.m = e.m * k->mu + g * k->c;
    e.p = e.m;
    return e;
}

ELEMENT_FN struct element muon_nesterov(struct element e, float acc, const struct update_scalars *k)
{
    float g = e.p * k->s;

    (void)acc;
    e.m = e.m * k->mu + g * k->c;
    e.p = g * k->c + e.m * k->mu;
    return e;
}

/* Muon's second pass. acc: the orthogonalised matrix. */
ELEMENT_FN struct element muon(struct element e, float acc, const struct update_scalars *k)
{
    e.p = e.p * k->decay;
    e.p = e.p - k->a * acc;
    return e;
}

ELEMENT_FN struct element adagrad(struct element e, float acc, const struct update_scalars *k)
{
    float g = acc * k->s;

    g = g + e.p * k->wd;
    e.v = e.v + g * g;
    e.p = e.p - k->a * (g / (sqrtf(e.v) + k->eps));
    return e;
}

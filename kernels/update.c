/* SPDX-License-Identifier: Apache-2.0 */
/* The moments of each optimizer, and the scalars that are computed once per parameter and update. */

#include "kernels/update.h"

#include "kernels/convert.h"
#include "kernels/master24.h"
#include "kernels/undo.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

const char *optimizer_name(enum optimizer optimizer)
{
    static const char *const names[N_OPTIMIZERS] = {
        [OPTIMIZER_ADAMW] = "AdamW", [OPTIMIZER_ADAM] = "Adam",       [OPTIMIZER_SGD] = "SGD",
        [OPTIMIZER_LION] = "Lion",   [OPTIMIZER_ADAGRAD] = "Adagrad", [OPTIMIZER_MUON] = "Muon",
    };

    return names[optimizer];
}

enum optimizer optimizer_find(const char *name)
{
    enum optimizer optimizer = 0;

    while (optimizer < N_OPTIMIZERS && strcmp(optimizer_name(optimizer), name) != 0)
        optimizer++;
    return optimizer;
}

struct optimizer_moments optimizer_moments(enum optimizer optimizer, const struct hyper *hyper)
{
    switch (optimizer) {
    case OPTIMIZER_SGD:
        return (struct optimizer_moments){.m = hyper->momentum != 0};
    case OPTIMIZER_LION:
        return (struct optimizer_moments){.m = true};
    case OPTIMIZER_ADAGRAD:
        return (struct optimizer_moments){.v = true};
    default:
        return (struct optimizer_moments){.m = true, .v = true};
    }
}

unsigned optimizer_n_moments(enum optimizer optimizer, const struct hyper *hyper)
{
    struct optimizer_moments moments = optimizer_moments(optimizer, hyper);

    return (unsigned)moments.m + (unsigned)moments.v;
}

/* Restores n elements of a moment from `done` on. */
static void put_back_moment(const struct update_args *args, unsigned array, void *moment, enum dtype dtype, size_t done,
                            size_t n)
{
    float widened[UNDO_GROUP_ELEMS];
    uint8_t *elems = (uint8_t *)moment + dtype_bytes(dtype, done);

    if (dtype == DTYPE_F32) {
        undo_put_back(args->undo, array, (float *)(void *)elems, n);
        return;
    }
    convert_to_f32(widened, elems, dtype, n);
    undo_put_back(args->undo, array, widened, n);
    convert_from_f32(elems, widened, dtype, n);
}

/* Restores n masters from `done` on. Then writes the 16-bit weights of fp32 masters before `done`, because a block
 * writes its weights after its masters. */
static void put_back_masters(const struct update_args *args, size_t done, size_t n)
{
    float widened[UNDO_GROUP_ELEMS];
    uint16_t *w16 = args->w16;

    if (args->lower) {
        struct master24 masters = {.weights = w16 + done, .lower = args->lower + done};

        master24_to_f32(widened, masters, n);
        undo_put_back(args->undo, 0, widened, n);
        master24_from_f32(masters, widened, n); /* exact */
        return;
    }
    undo_put_back(args->undo, 0, args->p + done, n);
    for (size_t i = 0; w16 && i < done; i++)
        w16[i] = args->w16_dtype == DTYPE_BF16 ? bf16_from_f32(args->p[i]) : f16_from_f32(args->p[i]);
}

void update_put_back(struct update_args *args)
{
    size_t done = undo_next_elem(args->undo) - args->undo_elem, n = args->n_elems - done;
    enum dtype m_dtype = args->moments.dtype, v_dtype = moments_dtype_of_square(args->moments);

    n = n < UNDO_GROUP_ELEMS ? n : UNDO_GROUP_ELEMS;
    put_back_masters(args, done, n);
    if (args->m)
        put_back_moment(args, 1, args->m, m_dtype, done, n);
    if (args->v)
        put_back_moment(args, 2, args->v, v_dtype, done, n);
    args->p = args->p ? args->p + done : NULL;
    args->lower = args->lower ? args->lower + done : NULL;
    args->m = args->m ? (uint8_t *)args->m + dtype_bytes(m_dtype, done) : NULL;
    args->v = args->v ? (uint8_t *)args->v + dtype_bytes(v_dtype, done) : NULL;
    args->acc += done;
    args->start_elem += done;
    args->w16 = args->w16 ? (uint16_t *)args->w16 + done : NULL;
    args->n_elems -= done;
    args->undo_elem += done;
}

uint32_t update_rounding_key(uint32_t param, uint64_t t)
{
    return rounding_mix(rounding_mix(rounding_mix((uint32_t)t) + (uint32_t)(t >> 32)) + param);
}

bool update_scalars_equal(const struct update_scalars *a, const struct update_scalars *b)
{
    /* All floats come first, without gaps. memcmp(), because -0 is not 0 here. */
    return memcmp(a, b, offsetof(struct update_scalars, l2)) == 0 && a->l2 == b->l2 && a->momentum == b->momentum &&
           a->first_step == b->first_step && a->nesterov == b->nesterov && a->rounding_key == b->rounding_key;
}

_Static_assert(offsetof(struct update_scalars, l2) == 13 * sizeof(float), "compared by update_scalars_equal()");

void update_scalars_compute(enum optimizer optimizer, const struct hyper *hyper, double s, uint64_t t,
                            struct update_scalars *out)
{
    double steps = (double)t;

    *out = (struct update_scalars){
        .s = (float)s,
        .decay = (float)(1 - hyper->lr * hyper->weight_decay),
        .wd = (float)hyper->weight_decay,
        .lr = (float)hyper->lr,
        .b1 = (float)hyper->beta1,
        .c1 = (float)(1 - hyper->beta1),
        .b2 = (float)hyper->beta2,
        .c2 = (float)(1 - hyper->beta2),
        .eps = (float)hyper->eps,
        .mu = (float)hyper->momentum,
        .c = (float)(1 - hyper->dampening),
        .l2 = optimizer == OPTIMIZER_ADAM && !hyper->adam_w_mode,
        .momentum = hyper->momentum != 0,
        .first_step = t == 1,
        .nesterov = hyper->nesterov,
    };
    if (optimizer == OPTIMIZER_ADAMW || optimizer == OPTIMIZER_ADAM) {
        out->a = (float)(hyper->lr / (1 - pow(hyper->beta1, steps)));
        out->q = (float)(1 / sqrt(1 - pow(hyper->beta2, steps)));
    } else if (optimizer == OPTIMIZER_ADAGRAD) {
        out->a = (float)(hyper->lr / (1 + (steps - 1) * hyper->lr_decay));
    } else if (optimizer == OPTIMIZER_MUON) {
        out->c = (float)(1 - hyper->momentum);
    }
}

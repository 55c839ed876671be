/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The optimizers (docs/numerics.md, section 4): one pass over a range of one parameter's partition unscales and clips
 * the summed gradient, updates master weights and moments, in place or to another place, and writes the 16-bit weights.
 *
 * Moments in bf16 or 8 bits are widened and updated in fp32. The weight is updated with the fp32 moments. Stored
 * moments are rounded to nearest, or stochastically (docs/numerics.md, sections 5 and 6).
 */

#include "kernels/dtype.h"
#include "kernels/element.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct undo_slot; /* undo.h */

enum optimizer {
    OPTIMIZER_ADAMW,
    OPTIMIZER_ADAM, /* equal to ADAMW if hyper.adam_w_mode, else L2 */
    OPTIMIZER_SGD,
    OPTIMIZER_LION,
    OPTIMIZER_ADAGRAD,
    OPTIMIZER_MUON, /* for matrices; AdamW updates the job's other parameters: optimizer_of_param() */
    N_OPTIMIZERS,
};

/* Return: "AdamW" or the like. Adam with decoupled weight decay is AdamW: config_optimizer_name(). */
const char *optimizer_name(enum optimizer optimizer);
/* Return: the optimizer of that name, or N_OPTIMIZERS. */
enum optimizer optimizer_find(const char *name);

/* torch's adjust_lr_fn: the factor of a matrix's learning rate (muon_lr_factor()). */
enum muon_adjust_lr {
    MUON_ORIGINAL,
    MUON_MATCH_RMS_ADAMW,
};

/* A parameter group's settings, as given by the user. Settings that an optimizer does not have are not read. */
struct hyper {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    double momentum;
    double dampening;
    double lr_decay;
    double ns_coefficients[3]; /* Muon's: of the matrix, and of its third and fifth power */
    uint32_t ns_steps;
    enum muon_adjust_lr adjust_lr_fn;
    bool nesterov;
    bool adam_w_mode;
};

/* The scalars of one parameter and step, named as in docs/numerics.md. Computed in double, rounded once. */
struct update_scalars {
    float s; /* clip / (world size x loss scale) */
    float decay;
    float wd;
    float lr;
    float b1;
    float c1;
    float b2;
    float c2;
    float a;
    float q;
    float eps;
    float mu;
    float c;
    bool l2;         /* Adam: adds weight decay to the gradient */
    bool momentum;   /* SGD: mu != 0 */
    bool first_step; /* SGD: t = 1, the momentum buffer becomes the gradient */
    bool nesterov;
    uint32_t rounding_key; /* update_rounding_key(); only stochastic rounding reads it */
};

/* The types of moments in memory. */
struct moments_type {
    enum dtype dtype; /* of exp_avg: DTYPE_F32, DTYPE_BF16 or DTYPE_SIGNED8; of exp_avg_sq: moments_dtype_of_square() */
    bool stochastic;  /* stochastic rounding; never with fp32, always with 8 bits */
};

static inline enum dtype moments_dtype_of_square(struct moments_type type)
{
    return type.dtype == DTYPE_SIGNED8 ? DTYPE_UNSIGNED8 : type.dtype;
}

/* Where the values of a range are; the same arrays as in struct update_args. */
struct update_values {
    const float *p;
    const int8_t *lower;
    const void *m;
    const void *v;
    const void *w16;
};

struct update_args {
    float *p;         /* master weights, read and written; NULL: masters of 24 bits, in w16 and lower (master24.h) */
    int8_t *lower;    /* NULL: master weights are fp32 */
    void *m;          /* exp_avg or momentum buffer, read and written; NULL if the optimizer has none */
    void *v;          /* exp_avg_sq; like m */
    const float *acc; /* summed gradient, not yet scaled */
    void *w16;        /* 16-bit weights, only written, unless they are a part of p; NULL if w16_dtype is DTYPE_F32 */
    enum dtype w16_dtype;
    struct moments_type moments;
    uint64_t start_elem; /* of the range, from the parameter's start; only stochastic rounding reads it */
    size_t n_elems; /* may be 0 */
    const struct update_scalars *k;
    const struct update_values *old; /* NULL: the update is in place; else old values are there, new ones are only
                                        written, past the caches if possible, and there is no slot */
    struct undo_slot *undo; /* NULL: no slot */
    uint64_t undo_elem;     /* the range's first element, in the numbers that the slot counts */
};

/*
 * Call it after the process was killed in an update of the range. Restores the elements saved in args->undo, and
 * shortens args to the rest of the range, which must still be updated (n_elems may become 0). Writes the 16-bit weights
 * before the rest, unless they are a part of the masters. The slot's next element must be in the range or at its end.
 */
void update_put_back(struct update_args *args);

/* Return: the optimizer of a parameter. muon: whether the layout lets Muon update it. */
static inline enum optimizer optimizer_of_param(enum optimizer of_job, bool muon)
{
    return of_job == OPTIMIZER_MUON && !muon ? OPTIMIZER_ADAMW : of_job;
}

/* The moments that an optimizer with these settings has, and the types of the state in memory. In a job with Muon, the
 * struct describes the parameters that Muon does not update; a matrix has no v. */
struct optimizer_moments {
    bool m;
    bool v;
    struct moments_type type;
    bool master24; /* masters of bf16 weights have 24 bits */
};

struct optimizer_moments optimizer_moments(enum optimizer optimizer, const struct hyper *hyper);
unsigned optimizer_n_moments(enum optimizer optimizer, const struct hyper *hyper);

/* A bijection of 32 bits: each bit of the result depends on all bits of x. It is the finalizer of MurmurHash3. */
ELEMENT_FN uint32_t rounding_mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x85ebca6b;
    x = (x ^ x >> 13) * 0xc2b2ae35;
    return x ^ x >> 16;
}

/* Return: the key for rounding_draw(). param: the parameter's number in the layout. t: as for
 * update_scalars_compute(). */
uint32_t update_rounding_key(uint32_t param, uint64_t t);

/* Are all scalars equal, to the bit? */
bool update_scalars_equal(const struct update_scalars *a, const struct update_scalars *b);

/* s: as in numerics.md, section 3. t: the parameter's step count after this step, from 1. */
void update_scalars_compute(enum optimizer optimizer, const struct hyper *hyper, double s, uint64_t t,
                            struct update_scalars *out);

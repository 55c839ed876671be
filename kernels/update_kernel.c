/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizers' loops over elements; compiled once per instruction set. */

#include "kernels/isa.h"
#include "kernels/narrow_kernel.h"
#include "kernels/undo.h"
#include "kernels/update_element.h"

/*
 * One loop around the functions of one element. The compiler turns the loops into vector code: nothing in an
 * element depends on another, and what is the same for all elements is a constant or hoisted out.
 *
 * 16-bit weights are made block by block, while p is in the nearest cache. In the element's own loop, where
 * registers are short and the multipliers busy, they took 12 cycles for 16 elements (bf16) and 55 (fp16) on
 * top of AdamW's 17; so they take 8 and 3.
 */
enum {
    UPDATE_BLOCK_ELEMS = 1024,
};

/* Which arrays a loop reads and writes, beside p; constant where it is inlined. */
struct arrays {
    bool m_read;
    bool m_write;
    bool v;
};

/* Elements in fp32. */
struct elems {
    float *p, *m, *v;
    const float *acc;
};

static always_inline void update_elems(const struct elems *elems, const struct update_scalars *k, step_fn *step,
                                       struct arrays arrays, size_t n)
{
    const float *acc = elems->acc;
    float *p = elems->p, *m = elems->m, *v = elems->v;

    no_overlap for (size_t i = 0; i < n; i++)
    {
        struct element e = {.p = p[i], .m = arrays.m_read ? m[i] : 0, .v = arrays.v ? v[i] : 0};

        e = step(e, acc[i], k);
        p[i] = e.p;
        if (arrays.m_write)
            m[i] = e.m;
        if (arrays.v)
            v[i] = e.v;
    }
}

static always_inline struct elems elems_at(const struct update_args *args, struct arrays arrays, size_t begin)
{
    return (struct elems){.p = args->p + begin,
                          .m = arrays.m_write ? (float *)args->m + begin : NULL,
                          .v = arrays.v ? (float *)args->v + begin : NULL,
                          .acc = args->acc + begin};
}

static always_inline void save(struct undo_slot *undo, const struct elems *elems, struct arrays arrays, size_t n)
{
    undo_save(undo, 0, elems->p, n);
    if (arrays.m_write)
        undo_save(undo, 1, elems->m, n);
    if (arrays.v)
        undo_save(undo, 2, elems->v, n);
}

/* Saves the n elements from begin, at most a group, and updates them. */
static always_inline void update_group(const struct update_args *args, const struct update_scalars *k, step_fn *step,
                                       struct arrays arrays, size_t begin, size_t n)
{
    struct elems elems = elems_at(args, arrays, begin);

    save(args->undo, &elems, arrays, n);
    undo_mark(args->undo, args->undo_elem + begin, true);
    update_elems(&elems, k, step, arrays, n);
    undo_mark(args->undo, args->undo_elem + begin + n, false);
}

static always_inline void widen_bf16(float *restrict out, const uint16_t *restrict in, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = f32_from_bf16(in[i]);
}

/* One draw serves both moments of an element: exp_avg takes the lower half, exp_avg_sq the upper one. */
static always_inline void narrow_at_random(uint16_t *restrict out, const float *restrict in, size_t n, uint32_t first,
                                           uint32_t key, unsigned shift)
{
    for (size_t i = 0; i < n; i++)
        out[i] = bf16_at_random(in[i], rounding_draw(key, first + (uint32_t)i) >> shift);
}

static always_inline void store_moment(const struct update_args *args, uint32_t key, uint16_t *out, const float *in,
                                       size_t begin, size_t n, unsigned shift)
{
    if (args->moments.stochastic)
        narrow_at_random(out, in, n, (uint32_t)(args->start_elem + begin), key, shift);
    else
        narrow_bf16(out, in, n);
}

/* As update_group(), with moments in bf16. A slot has them in fp32, which is exact. */
static always_inline void update_group_bf16(const struct update_args *args, const struct update_scalars *k,
                                            step_fn *step, struct arrays arrays, size_t begin, size_t n)
{
    uint16_t *m16 = arrays.m_write ? (uint16_t *)args->m + begin : NULL;
    uint16_t *v16 = arrays.v ? (uint16_t *)args->v + begin : NULL;
    float m[UNDO_GROUP_ELEMS], v[UNDO_GROUP_ELEMS];
    struct elems elems = {.p = args->p + begin, .m = m, .v = v, .acc = args->acc + begin};

    if (arrays.m_write)
        widen_bf16(m, m16, n);
    if (arrays.v)
        widen_bf16(v, v16, n);
    if (args->undo) {
        save(args->undo, &elems, arrays, n);
        undo_mark(args->undo, args->undo_elem + begin, true);
    }
    update_elems(&elems, k, step, arrays, n);
    if (arrays.m_write)
        store_moment(args, k->rounding_key, m16, m, begin, n, 0);
    if (arrays.v)
        store_moment(args, k->rounding_key, v16, v, begin, n, 16);
    if (args->undo)
        undo_mark(args->undo, args->undo_elem + begin + n, false);
}

typedef void group_fn(const struct update_args *args, const struct update_scalars *k, step_fn *step,
                      struct arrays arrays, size_t begin, size_t n);

static always_inline void update_groups(const struct update_args *args, const struct update_scalars *k, step_fn *step,
                                        struct arrays arrays, group_fn *group, size_t begin, size_t end)
{
    for (; end - begin >= UNDO_GROUP_ELEMS; begin += UNDO_GROUP_ELEMS)
        group(args, k, step, arrays, begin, UNDO_GROUP_ELEMS);
    if (begin < end)
        group(args, k, step, arrays, begin, end - begin);
}

static always_inline void update_block(const struct update_args *args, const struct update_scalars *k, step_fn *step,
                                       struct arrays arrays, size_t begin, size_t end)
{
    struct elems elems = elems_at(args, arrays, begin);

    if (args->moments.dtype == DTYPE_BF16 && (arrays.m_write || arrays.v))
        update_groups(args, k, step, arrays, update_group_bf16, begin, end);
    else if (args->undo)
        update_groups(args, k, step, arrays, update_group, begin, end);
    else
        update_elems(&elems, k, step, arrays, end - begin);
}

static always_inline void update_loop(const struct update_args *args, step_fn *step, struct arrays arrays,
                                      enum dtype w16_dtype)
{
    const struct update_scalars k = *args->k;

    for (size_t begin = 0, end; begin < args->n_elems; begin = end) {
        end = args->n_elems - begin < UPDATE_BLOCK_ELEMS ? args->n_elems : begin + UPDATE_BLOCK_ELEMS;
        update_block(args, &k, step, arrays, begin, end);
        if (w16_dtype != DTYPE_F32)
            narrow((uint16_t *)args->w16 + begin, args->p + begin, end - begin, w16_dtype);
    }
}

static always_inline void update(const struct update_args *args, step_fn *step, struct arrays arrays)
{
    switch (args->w16_dtype) {
    case DTYPE_BF16:
        update_loop(args, step, arrays, DTYPE_BF16);
        break;
    case DTYPE_F16:
        update_loop(args, step, arrays, DTYPE_F16);
        break;
    default:
        update_loop(args, step, arrays, DTYPE_F32);
    }
}

void ISA_FN(update_adamw)(const struct update_args *args)
{
    update(args, adamw, (struct arrays){.m_read = true, .m_write = true, .v = true});
}

void ISA_FN(update_adam)(const struct update_args *args)
{
    if (args->k->l2)
        update(args, adam_l2, (struct arrays){.m_read = true, .m_write = true, .v = true});
    else
        ISA_FN(update_adamw)(args);
}

void ISA_FN(update_sgd)(const struct update_args *args)
{
    const struct arrays first = {.m_write = true}, later = {.m_read = true, .m_write = true};
    const struct update_scalars *k = args->k;

    if (!k->momentum)
        update(args, sgd, (struct arrays){0});
    else if (k->first_step && k->nesterov)
        update(args, sgd_nesterov_first, first);
    else if (k->first_step)
        update(args, sgd_momentum_first, first);
    else if (k->nesterov)
        update(args, sgd_nesterov, later);
    else
        update(args, sgd_momentum, later);
}

void ISA_FN(update_lion)(const struct update_args *args)
{
    update(args, lion, (struct arrays){.m_read = true, .m_write = true});
}

void ISA_FN(update_adagrad)(const struct update_args *args)
{
    update(args, adagrad, (struct arrays){.v = true});
}

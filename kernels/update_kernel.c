/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizers' loops over elements; compiled once per instruction set. */

#include "kernels/group8_kernel.h"
#include "kernels/isa.h"
#include "kernels/master24_kernel.h"
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
    bool master24; /* instead of p: w16 and lower */
};

/* Elements in fp32: where they go, and where they come from, which may be there too. */
struct elems {
    float *p, *m, *v;
    const float *old_p, *old_m, *old_v;
    const float *acc;
};

static always_inline void update_elems(const struct elems *elems, const struct update_scalars *k, step_fn *step,
                                       struct arrays arrays, size_t n)
{
    const float *acc = elems->acc, *old_p = elems->old_p, *old_m = elems->old_m, *old_v = elems->old_v;
    float *p = elems->p, *m = elems->m, *v = elems->v;

    no_overlap for (size_t i = 0; i < n; i++)
    {
        struct element e = {.p = old_p[i], .m = arrays.m_read ? old_m[i] : 0, .v = arrays.v ? old_v[i] : 0};

        e = step(e, acc[i], k);
        p[i] = e.p;
        if (arrays.m_write)
            m[i] = e.m;
        if (arrays.v)
            v[i] = e.v;
    }
}

/* fp32 moments. */
static always_inline struct elems elems_at(const struct update_args *args, struct arrays arrays, size_t begin)
{
    struct elems elems = {.p = arrays.master24 ? NULL : args->p + begin, .acc = args->acc + begin};

    elems.old_p = elems.p;
    elems.old_m = elems.m = arrays.m_write ? (float *)args->m + begin : NULL;
    elems.old_v = elems.v = arrays.v ? (float *)args->v + begin : NULL;
    return elems;
}

/* ---- masters of a group -------------------------------------------------------------------------------- */

/* Where an update of a group reads masters in fp32, and where it writes them, which may be there too. */
struct masters {
    const float *old;
    float *p;
};

static always_inline struct master24 masters_at(const struct update_args *args, size_t begin)
{
    return (struct master24){.weights = (uint16_t *)args->w16 + begin, .lower = args->lower + begin};
}

/* wide, wide_old: room for a group. Saves masters in the slot. Those of 24 bits are widened there, or into wide_old. */
static always_inline struct masters load_masters(const struct update_args *args, struct arrays arrays, float *wide,
                                                 float *wide_old, size_t begin, size_t n)
{
    float *old = args->undo ? args->undo->old[0] : wide_old;

    if (arrays.master24) {
        widen_masters(old, masters_at(args, begin), n);
        return (struct masters){.old = old, .p = wide};
    }
    if (args->undo)
        undo_save(args->undo, 0, args->p + begin, n);
    return (struct masters){.old = args->p + begin, .p = args->p + begin};
}

/* One draw serves four elements. No moment takes draws of this key. */
static always_inline void draw_masters(uint32_t *restrict out, const struct update_args *args,
                                       const struct update_scalars *k, size_t begin)
{
    const uint32_t first = (uint32_t)((args->start_elem + begin) / MASTER24_GROUP_ELEMS * MASTER24_DRAWS);

    for (size_t i = 0; i < MASTER24_DRAWS; i++)
        out[i] = rounding_draw(~k->rounding_key, first + (uint32_t)i);
}

static always_inline void store_masters(const struct update_args *args, const struct update_scalars *k,
                                        struct arrays arrays, const float *restrict p, size_t begin, size_t n)
{
    uint32_t draws[MASTER24_DRAWS];

    if (!arrays.master24)
        return;
    draw_masters(draws, args, k, begin);
    narrow_masters(masters_at(args, begin), p, draws, n);
}

/* ---- fp32 moments -------------------------------------------------------------------------------------- */

static always_inline void mark(const struct update_args *args, size_t elem, bool is_saved)
{
    if (args->undo)
        undo_mark(args->undo, args->undo_elem + elem, is_saved);
}

/* Updates the n elements from begin, at most a group; with a slot, saves them before. */
static always_inline void update_group(const struct update_args *args, const struct update_scalars *k, step_fn *step,
                                       struct arrays arrays, size_t begin, size_t n)
{
    float wide[UNDO_GROUP_ELEMS], wide_old[UNDO_GROUP_ELEMS];
    struct masters masters = load_masters(args, arrays, wide, wide_old, begin, n);
    struct elems elems = elems_at(args, arrays, begin);

    elems.old_p = masters.old;
    elems.p = masters.p;
    if (args->undo && arrays.m_write)
        undo_save(args->undo, 1, elems.m, n);
    if (args->undo && arrays.v)
        undo_save(args->undo, 2, elems.v, n);
    mark(args, begin, true);
    update_elems(&elems, k, step, arrays, n);
    store_masters(args, k, arrays, elems.p, begin, n);
    mark(args, begin + n, false);
}

/* ---- narrow moments -------------------------------------------------------------------------------------- */

static always_inline void widen_bf16(float *restrict out, const uint16_t *restrict in, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = f32_from_bf16(in[i]);
}

/*
 * Moments are rounded without a look for NaNs, which would cost a fifth of the update. One comes from a bf16 NaN, or
 * from infinity - infinity as the processor has it: there the rounding does not carry into the sign.
 */
static always_inline uint16_t narrow_moment(float x, bool stochastic, uint32_t draw)
{
    uint32_t u = f32_bits(x);

    return (uint16_t)((u + (stochastic ? draw & 0xffff : 0x7fff + (u >> 16 & 1))) >> 16);
}

/* For n elements of the range from `begin` on. In the loop of the elements they take more time than here. */
static always_inline void draw(uint32_t *restrict out, const struct update_args *args, const struct update_scalars *k,
                               size_t begin, size_t n)
{
    const uint32_t first = (uint32_t)(args->start_elem + begin);

    for (size_t i = 0; i < n; i++)
        out[i] = rounding_draw(k->rounding_key, first + (uint32_t)i);
}

/*
 * As update_elems(). Both moments are narrowed in the loop of the elements, where that runs beside division and square
 * root. One draw serves both of an element: exp_avg takes the lower half, exp_avg_sq the upper one.
 */
static always_inline void update_elems_bf16(const struct update_args *args, const struct elems *elems,
                                            const struct update_scalars *k, step_fn *step, struct arrays arrays,
                                            bool stochastic, size_t begin, size_t n)
{
    const float *acc = elems->acc, *old_p = elems->old_p, *old_m = elems->old_m, *old_v = elems->old_v;
    uint16_t *m = arrays.m_write ? (uint16_t *)args->m + begin : NULL;
    uint16_t *v = arrays.v ? (uint16_t *)args->v + begin : NULL;
    uint32_t draws[UNDO_GROUP_ELEMS];
    float *p = elems->p;

    if (stochastic)
        draw(draws, args, k, begin, n);
    no_overlap for (size_t i = 0; i < n; i++)
    {
        struct element e = {.p = old_p[i], .m = arrays.m_read ? old_m[i] : 0, .v = arrays.v ? old_v[i] : 0};

        e = step(e, acc[i], k);
        p[i] = e.p;
        if (arrays.m_write)
            m[i] = narrow_moment(e.m, stochastic, stochastic ? draws[i] : 0);
        if (arrays.v)
            v[i] = narrow_moment(e.v, stochastic, stochastic ? draws[i] >> 16 : 0);
    }
}

_Static_assert((int)UNDO_GROUP_ELEMS == (int)GROUP8_ELEMS, "a slot has one group of 8 bits");

/* As update_elems(), of a group of 8-bit moments, which can be narrowed when all of it is there. */
static always_inline void update_elems8(const struct update_args *args, const struct elems *elems,
                                        const struct update_scalars *k, step_fn *step, struct arrays arrays,
                                        bool stochastic, size_t begin, size_t n)
{
    float m[GROUP8_ELEMS], v[GROUP8_ELEMS];
    uint32_t draws[GROUP8_DRAWS], *given = stochastic ? draws : NULL;
    struct elems wide = *elems;

    wide.m = m;
    wide.v = v;
    update_elems(&wide, k, step, arrays, n);
    if (stochastic)
        draw(draws, args, k, begin, GROUP8_DRAWS);
    if (arrays.m_write)
        narrow_group8((struct group8 *)args->m + begin / GROUP8_ELEMS, m, DTYPE_SIGNED8, given, n);
    if (arrays.v)
        narrow_group8((struct group8 *)args->v + begin / GROUP8_ELEMS, v, DTYPE_UNSIGNED8, given, n);
}

typedef void narrow_elems_fn(const struct update_args *args, const struct elems *elems, const struct update_scalars *k,
                             step_fn *step, struct arrays arrays, bool stochastic, size_t begin, size_t n);

static always_inline void load_moment(float *restrict out, const void *restrict moment, enum dtype dtype, size_t begin,
                                      size_t n)
{
    if (dtype == DTYPE_BF16)
        widen_bf16(out, (const uint16_t *)moment + begin, n);
    else
        widen_group8(out, (const struct group8 *)moment + begin / GROUP8_ELEMS, dtype, n);
}

/* As update_group(), with narrow moments. A slot has them in fp32, which is exact, and where they are read. */
static always_inline void update_narrow(const struct update_args *args, const struct update_scalars *k, step_fn *step,
                                        struct arrays arrays, struct moments_type type, narrow_elems_fn *update,
                                        size_t begin, size_t n)
{
    float wide[UNDO_GROUP_ELEMS], wide_old[UNDO_GROUP_ELEMS], wide_m[UNDO_GROUP_ELEMS], wide_v[UNDO_GROUP_ELEMS];
    float *old_m = args->undo ? args->undo->old[1] : wide_m, *old_v = args->undo ? args->undo->old[2] : wide_v;
    struct masters masters = load_masters(args, arrays, wide, wide_old, begin, n);
    struct elems elems = {
        .p = masters.p, .old_p = masters.old, .old_m = old_m, .old_v = old_v, .acc = args->acc + begin};

    if (arrays.m_write)
        load_moment(old_m, args->m, type.dtype, begin, n);
    if (arrays.v)
        load_moment(old_v, args->v, moments_dtype_of_square(type), begin, n);
    mark(args, begin, true);
    if (args->moments.stochastic)
        update(args, &elems, k, step, arrays, true, begin, n);
    else
        update(args, &elems, k, step, arrays, false, begin, n);
    store_masters(args, k, arrays, elems.p, begin, n);
    mark(args, begin + n, false);
}

static always_inline void update_group_bf16(const struct update_args *args, const struct update_scalars *k,
                                            step_fn *step, struct arrays arrays, size_t begin, size_t n)
{
    update_narrow(args, k, step, arrays, (struct moments_type){.dtype = DTYPE_BF16}, update_elems_bf16, begin, n);
}

static always_inline void update_group8(const struct update_args *args, const struct update_scalars *k, step_fn *step,
                                        struct arrays arrays, size_t begin, size_t n)
{
    update_narrow(args, k, step, arrays, (struct moments_type){.dtype = DTYPE_SIGNED8}, update_elems8, begin, n);
}

/* ---- loops ----------------------------------------------------------------------------------------------- */

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
    bool has_moments = arrays.m_write || arrays.v;
    struct elems elems;

    if (args->moments.dtype == DTYPE_BF16 && has_moments) {
        update_groups(args, k, step, arrays, update_group_bf16, begin, end);
    } else if (args->moments.dtype == DTYPE_SIGNED8 && has_moments) {
        update_groups(args, k, step, arrays, update_group8, begin, end);
    } else if (args->undo || arrays.master24) {
        update_groups(args, k, step, arrays, update_group, begin, end);
    } else {
        elems = elems_at(args, arrays, begin);
        update_elems(&elems, k, step, arrays, end - begin);
    }
}

static always_inline void update_loop(const struct update_args *args, step_fn *step, struct arrays arrays,
                                      enum dtype w16_dtype)
{
    const struct update_scalars k = *args->k;

    for (size_t begin = 0, end; begin < args->n_elems; begin = end) {
        end = args->n_elems - begin < UPDATE_BLOCK_ELEMS ? args->n_elems : begin + UPDATE_BLOCK_ELEMS;
        update_block(args, &k, step, arrays, begin, end);
        if (w16_dtype != DTYPE_F32 && !arrays.master24)
            narrow((uint16_t *)args->w16 + begin, args->p + begin, end - begin, w16_dtype);
    }
}

static always_inline void update(const struct update_args *args, step_fn *step, struct arrays arrays)
{
    if (args->lower) {
        arrays.master24 = true;
        update_loop(args, step, arrays, DTYPE_BF16);
        return;
    }
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

void ISA_FN(update_muon)(const struct update_args *args)
{
    update(args, muon, (struct arrays){0});
}

void ISA_FN(muon_momentum)(const struct update_args *args)
{
    const struct arrays arrays = {.m_read = true, .m_write = true};

    if (args->k->nesterov)
        update_loop(args, muon_nesterov, arrays, DTYPE_F32);
    else
        update_loop(args, muon_momentum, arrays, DTYPE_F32);
}

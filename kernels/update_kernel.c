/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizers' loops over elements; compiled once per instruction set. */

#include "kernels/aside_kernel.h"
#include "kernels/group8_kernel.h"
#include "kernels/isa.h"
#include "kernels/master24_kernel.h"
#include "kernels/narrow_kernel.h"
#include "kernels/undo.h"
#include "kernels/update_element.h"

#include <assert.h>

/*
 * Each optimizer has a loop for each type of moments. The compiler turns these loops into vector code: elements do not
 * depend on each other, and common values are constants or hoisted out. For whole groups the loops are inlined, because
 * a call for 64 elements costs AdamW up to 27 ns (Zen 3, gcc 12) in addition to 36. Rare code exists once and calls the
 * loops.
 *
 * 16-bit weights are made block by block, while p is in the nearest cache. In the loop over elements, with few free
 * registers and busy multipliers, they took 12 cycles for 16 elements (bf16) and 55 (fp16) in addition to AdamW's 17;
 * block by block they take 8 and 3.
 */
enum {
    UPDATE_BLOCK_ELEMS = 1024,
};

/* The moments that a loop reads and writes; constant after inlining. */
struct arrays {
    bool m_read;
    bool m_write;
    bool v;
};

/* The elements of a loop. New values may overwrite the old ones. */
struct elems {
    const float *old_p, *old_m, *old_v;
    const float *acc;
    float *p;
    void *m, *v;           /* fp32, or bf16 in the bf16 loops */
    const uint32_t *draws; /* one per element; only the loops with stochastic rounding read them */
};

typedef void elems_fn(const struct elems *elems, const struct update_scalars *k, size_t n);

/* The loops of one step function. Without moments, the bf16 loops are NULL. */
struct loops {
    struct arrays arrays;
    elems_fn *f32;
    elems_fn *bf16;
    elems_fn *bf16_at_random;
};

static always_inline void update_elems(const struct elems *elems, const struct update_scalars *scalars, step_fn *step,
                                       struct arrays arrays, size_t n)
{
    const float *acc = elems->acc, *old_p = elems->old_p, *old_m = elems->old_m, *old_v = elems->old_v;
    const struct update_scalars copy = *scalars, *k = &copy; /* a copy, so that no store of the loop can change it */
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

/* Rounds a moment without a check for NaNs, which would cost a fifth of the update. A NaN here comes from a bf16 NaN or
 * from the processor's infinity - infinity. In both cases, the rounding does not carry into the sign. */
static always_inline uint16_t narrow_moment(float x, bool stochastic, uint32_t draw)
{
    uint32_t u = f32_bits(x);

    return (uint16_t)((u + (stochastic ? draw & 0xffff : 0x7fff + (u >> 16 & 1))) >> 16);
}

/*
 * update_elems() for bf16 moments. Both moments are narrowed in the loop over elements, because narrowing overlaps with
 * division and square root. One draw serves both moments of an element: exp_avg uses the lower half, exp_avg_sq the
 * upper half.
 */
static always_inline void update_elems_bf16(const struct elems *elems, const struct update_scalars *scalars,
                                            step_fn *step, struct arrays arrays, bool stochastic, size_t n)
{
    const float *acc = elems->acc, *old_p = elems->old_p, *old_m = elems->old_m, *old_v = elems->old_v;
    const struct update_scalars copy = *scalars, *k = &copy;
    const uint32_t *draws = elems->draws;
    uint16_t *m = elems->m, *v = elems->v;
    float *p = elems->p;

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

/* LOOPS(step, ARRAYS(...)) defines step_loops, the loops of a step function with moments. */
#define ARRAYS(...) ((struct arrays){__VA_ARGS__})
#define LOOP(name, update, ...)                                                                                        \
    static always_inline void name(const struct elems *elems, const struct update_scalars *k, size_t n)                \
    {                                                                                                                  \
        update(elems, k, __VA_ARGS__, n);                                                                              \
    }
#define LOOPS(step, step_arrays)                                                                                       \
    LOOP(step##_f32, update_elems, step, step_arrays)                                                                  \
    LOOP(step##_bf16, update_elems_bf16, step, step_arrays, false)                                                     \
    LOOP(step##_bf16_at_random, update_elems_bf16, step, step_arrays, true)                                            \
    static const struct loops step##_loops = {step_arrays, step##_f32, step##_bf16, step##_bf16_at_random};
#define LOOPS_WITHOUT_MOMENTS(step)                                                                                    \
    LOOP(step##_f32, update_elems, step, ARRAYS(0))                                                                    \
    static const struct loops step##_loops = {.f32 = step##_f32};

LOOPS(adamw, ARRAYS(.m_read = true, .m_write = true, .v = true))
LOOPS(adam_l2, ARRAYS(.m_read = true, .m_write = true, .v = true))
LOOPS_WITHOUT_MOMENTS(sgd)
LOOPS(sgd_momentum_first, ARRAYS(.m_write = true))
LOOPS(sgd_momentum, ARRAYS(.m_read = true, .m_write = true))
LOOPS(sgd_nesterov_first, ARRAYS(.m_write = true))
LOOPS(sgd_nesterov, ARRAYS(.m_read = true, .m_write = true))
LOOPS(lion, ARRAYS(.m_read = true, .m_write = true))
LOOPS(adagrad, ARRAYS(.v = true))
LOOPS_WITHOUT_MOMENTS(muon)
LOOPS(muon_momentum, ARRAYS(.m_read = true, .m_write = true))
LOOPS(muon_nesterov, ARRAYS(.m_read = true, .m_write = true))

/* ---- masters of a group -------------------------------------------------------------------------------- */

/* The fp32 masters of a group: the old masters that the update reads, and the place of the new masters. Both places may
 * be equal. */
struct masters {
    const float *old;
    float *p;
};

static always_inline struct master24 masters_at(const struct update_args *args, size_t begin)
{
    return (struct master24){.weights = (uint16_t *)args->w16 + begin, .lower = args->lower + begin};
}

/* Loads masters, and saves them in the slot. Masters of 24 bits are widened into the slot, or into wide_old. wide,
 * wide_old: room for a group. */
static always_inline struct masters load_masters(const struct update_args *args, float *wide, float *wide_old,
                                                 size_t begin, size_t n)
{
    float *old = args->undo ? args->undo->old[0] : wide_old;

    if (args->lower) {
        widen_masters(old, masters_at(args, begin), n);
        return (struct masters){.old = old, .p = wide};
    }
    if (args->undo)
        undo_save(args->undo, 0, args->p + begin, n);
    return (struct masters){.old = args->p + begin, .p = args->p + begin};
}

/* Draws for masters; one draw serves four elements. Moments use another key. */
static always_inline void draw_masters(uint32_t *restrict out, const struct update_args *args,
                                       const struct update_scalars *k, size_t begin)
{
    const uint32_t first = (uint32_t)((args->start_elem + begin) / MASTER24_GROUP_ELEMS * MASTER24_DRAWS);

    for (size_t i = 0; i < MASTER24_DRAWS; i++)
        out[i] = rounding_draw(~k->rounding_key, first + (uint32_t)i);
}

static always_inline void store_masters(const struct update_args *args, const struct update_scalars *k,
                                        const float *restrict p, size_t begin, size_t n)
{
    uint32_t draws[MASTER24_DRAWS];

    if (!args->lower)
        return;
    draw_masters(draws, args, k, begin);
    narrow_masters(masters_at(args, begin), p, draws, n);
}

/* ---- groups with fp32 moments --------------------------------------------------------------------------- */

static always_inline struct elems elems_at(const struct update_args *args, struct arrays arrays, size_t begin)
{
    struct elems elems = {.acc = args->acc + begin};

    if (args->p)
        elems.old_p = elems.p = args->p + begin;
    if (arrays.m_write)
        elems.old_m = elems.m = (float *)args->m + begin;
    if (arrays.v)
        elems.old_v = elems.v = (float *)args->v + begin;
    return elems;
}

static always_inline void mark(const struct update_args *args, size_t elem, bool is_saved)
{
    if (args->undo)
        undo_mark(args->undo, args->undo_elem + elem, is_saved);
}

/* Updates n elements from `begin` on, at most a group; with a slot, first saves them. */
static always_inline void update_group(const struct update_args *args, const struct update_scalars *k,
                                       const struct loops *loops, size_t begin, size_t n)
{
    float wide[UNDO_GROUP_ELEMS], wide_old[UNDO_GROUP_ELEMS];
    struct masters masters = load_masters(args, wide, wide_old, begin, n);
    struct elems elems = elems_at(args, loops->arrays, begin);

    elems.old_p = masters.old;
    elems.p = masters.p;
    if (args->undo && loops->arrays.m_write)
        undo_save(args->undo, 1, elems.old_m, n);
    if (args->undo && loops->arrays.v)
        undo_save(args->undo, 2, elems.old_v, n);
    mark(args, begin, true);
    loops->f32(&elems, k, n);
    store_masters(args, k, elems.p, begin, n);
    mark(args, begin + n, false);
}

/* ---- groups with narrow moments -------------------------------------------------------------------------- */

/* Draws for n elements of the range from `begin` on. In the loop over elements, the draws would take more time. */
static always_inline void draw(uint32_t *restrict out, const struct update_args *args, const struct update_scalars *k,
                               size_t begin, size_t n)
{
    const uint32_t first = (uint32_t)(args->start_elem + begin);

    for (size_t i = 0; i < n; i++)
        out[i] = rounding_draw(k->rounding_key, first + (uint32_t)i);
}

static always_inline void update_elems_bf16_of_group(const struct update_args *args, struct elems elems,
                                                     const struct update_scalars *k, const struct loops *loops,
                                                     size_t begin, size_t n)
{
    uint32_t draws[UNDO_GROUP_ELEMS];

    if (loops->arrays.m_write)
        elems.m = (uint16_t *)args->m + begin;
    if (loops->arrays.v)
        elems.v = (uint16_t *)args->v + begin;
    if (!args->moments.stochastic) {
        loops->bf16(&elems, k, n);
        return;
    }
    draw(draws, args, k, begin, n);
    elems.draws = draws;
    loops->bf16_at_random(&elems, k, n);
}

_Static_assert((int)UNDO_GROUP_ELEMS == (int)GROUP8_ELEMS, "a slot has one group of 8 bits");

/* 8-bit moments can be narrowed only when the whole group is computed. */
static always_inline void update_elems8_of_group(const struct update_args *args, struct elems elems,
                                                 const struct update_scalars *k, const struct loops *loops,
                                                 size_t begin, size_t n)
{
    float m[GROUP8_ELEMS], v[GROUP8_ELEMS];
    uint32_t draws[GROUP8_DRAWS], *given = args->moments.stochastic ? draws : NULL;

    elems.m = m;
    elems.v = v;
    loops->f32(&elems, k, n);
    if (given)
        draw(given, args, k, begin, GROUP8_DRAWS);
    if (loops->arrays.m_write)
        narrow_group8((struct group8 *)args->m + begin / GROUP8_ELEMS, m, DTYPE_SIGNED8, given, n);
    if (loops->arrays.v)
        narrow_group8((struct group8 *)args->v + begin / GROUP8_ELEMS, v, DTYPE_UNSIGNED8, given, n);
}

static always_inline void widen_bf16(float *restrict out, const uint16_t *restrict in, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = f32_from_bf16(in[i]);
}

static always_inline void load_moment(float *restrict out, const void *restrict moment, enum dtype dtype, size_t begin,
                                      size_t n)
{
    if (dtype == DTYPE_BF16)
        widen_bf16(out, (const uint16_t *)moment + begin, n);
    else
        widen_group8(out, (const struct group8 *)moment + begin / GROUP8_ELEMS, dtype, n);
}

/* update_group() for narrow moments. A slot holds the moments widened to fp32, which is exact, and the update reads the
 * widened moments. */
static always_inline void update_narrow(const struct update_args *args, const struct update_scalars *k,
                                        const struct loops *loops, struct moments_type type, size_t begin, size_t n)
{
    float wide[UNDO_GROUP_ELEMS], wide_old[UNDO_GROUP_ELEMS], wide_m[UNDO_GROUP_ELEMS], wide_v[UNDO_GROUP_ELEMS];
    float *old_m = args->undo ? args->undo->old[1] : wide_m, *old_v = args->undo ? args->undo->old[2] : wide_v;
    struct masters masters = load_masters(args, wide, wide_old, begin, n);
    struct elems elems = {
        .p = masters.p, .old_p = masters.old, .old_m = old_m, .old_v = old_v, .acc = args->acc + begin};

    if (loops->arrays.m_write)
        load_moment(old_m, args->m, type.dtype, begin, n);
    if (loops->arrays.v)
        load_moment(old_v, args->v, moments_dtype_of_square(type), begin, n);
    mark(args, begin, true);
    if (type.dtype == DTYPE_BF16)
        update_elems_bf16_of_group(args, elems, k, loops, begin, n);
    else
        update_elems8_of_group(args, elems, k, loops, begin, n);
    store_masters(args, k, elems.p, begin, n);
    mark(args, begin + n, false);
}

static always_inline void update_group_bf16(const struct update_args *args, const struct update_scalars *k,
                                            const struct loops *loops, size_t begin, size_t n)
{
    update_narrow(args, k, loops, (struct moments_type){.dtype = DTYPE_BF16}, begin, n);
}

static always_inline void update_group8(const struct update_args *args, const struct update_scalars *k,
                                        const struct loops *loops, size_t begin, size_t n)
{
    update_narrow(args, k, loops, (struct moments_type){.dtype = DTYPE_SIGNED8}, begin, n);
}

/* ---- ranges ---------------------------------------------------------------------------------------------- */

typedef void group_fn(const struct update_args *args, const struct update_scalars *k, const struct loops *loops,
                      size_t begin, size_t n);

/* The last group of a block, which may be shorter. All optimizers share one copy of its code, which calls their
 * loops. */
#define LAST_GROUP(name, group)                                                                                        \
    static __attribute__((noinline)) void name(const struct update_args *args, const struct update_scalars *k,         \
                                               const struct loops *loops, size_t begin, size_t n)                      \
    {                                                                                                                  \
        group(args, k, loops, begin, n);                                                                               \
    }
LAST_GROUP(update_last, update_group)
LAST_GROUP(update_last_bf16, update_group_bf16)
LAST_GROUP(update_last8, update_group8)

static always_inline void update_groups(const struct update_args *args, const struct update_scalars *k,
                                        const struct loops *loops, group_fn *group, group_fn *last, size_t begin,
                                        size_t end)
{
    for (; end - begin >= UNDO_GROUP_ELEMS; begin += UNDO_GROUP_ELEMS)
        group(args, k, loops, begin, UNDO_GROUP_ELEMS);
    if (begin < end)
        last(args, k, loops, begin, end - begin);
}

static always_inline void update_groups_aside(const struct update_args *args, const struct update_scalars *k,
                                              const struct loops *loops, enum dtype m_dtype, group_fn *group,
                                              group_fn *last)
{
    struct aside aside;
    size_t begin = 0, n;

    aside_init(&aside, args);
    for (; args->n_elems - begin >= UNDO_GROUP_ELEMS; begin += UNDO_GROUP_ELEMS) {
        aside_load(&aside, args, m_dtype, begin, UNDO_GROUP_ELEMS);
        group(&aside.args, k, loops, 0, UNDO_GROUP_ELEMS);
        aside_store(&aside, args, m_dtype, begin, UNDO_GROUP_ELEMS);
    }
    n = args->n_elems - begin;
    if (n > 0) {
        aside_load(&aside, args, m_dtype, begin, n);
        last(&aside.args, k, loops, 0, n);
        aside_store(&aside, args, m_dtype, begin, n);
    }
    copy_order();
}

static always_inline enum dtype dtype_of_loops(const struct update_args *args, const struct loops *loops)
{
    return loops->arrays.m_write || loops->arrays.v ? args->moments.dtype : DTYPE_F32;
}

static always_inline void update_aside(const struct update_args *args, const struct update_scalars *k,
                                       const struct loops *loops)
{
    switch (dtype_of_loops(args, loops)) {
    case DTYPE_BF16:
        update_groups_aside(args, k, loops, DTYPE_BF16, update_group_bf16, update_last_bf16);
        break;
    case DTYPE_SIGNED8:
        update_groups_aside(args, k, loops, DTYPE_SIGNED8, update_group8, update_last8);
        break;
    default:
        update_groups_aside(args, k, loops, DTYPE_F32, update_group, update_last);
    }
}

static always_inline void update_block(const struct update_args *args, const struct update_scalars *k,
                                       const struct loops *loops, size_t begin, size_t end)
{
    enum dtype dtype = dtype_of_loops(args, loops);
    struct elems elems;

    if (dtype == DTYPE_BF16) {
        update_groups(args, k, loops, update_group_bf16, update_last_bf16, begin, end);
    } else if (dtype == DTYPE_SIGNED8) {
        update_groups(args, k, loops, update_group8, update_last8, begin, end);
    } else if (args->undo || args->lower) {
        update_groups(args, k, loops, update_group, update_last, begin, end);
    } else {
        elems = elems_at(args, loops->arrays, begin);
        loops->f32(&elems, k, end - begin);
    }
}

static always_inline void update(const struct update_args *args, const struct loops *loops)
{
    const struct update_scalars k = *args->k;

    if (args->old) {
        assert(!args->undo);
        update_aside(args, &k, loops);
        return;
    }
    for (size_t begin = 0, end; begin < args->n_elems; begin = end) {
        end = args->n_elems - begin < UPDATE_BLOCK_ELEMS ? args->n_elems : begin + UPDATE_BLOCK_ELEMS;
        update_block(args, &k, loops, begin, end);
        if (args->w16_dtype != DTYPE_F32 && !args->lower)
            narrow((uint16_t *)args->w16 + begin, args->p + begin, end - begin, args->w16_dtype);
    }
}

/* ---- the optimizers -------------------------------------------------------------------------------------- */

/* Runs updates that are rare, or short compared to the rest of their step. They share one copy of this code, which
 * calls their loops. */
static __attribute__((noinline)) void update_rarely(const struct update_args *args, const struct loops *loops)
{
    update(args, loops);
}

void ISA_FN(update_adamw)(const struct update_args *args)
{
    update(args, &adamw_loops);
}

void ISA_FN(update_adam)(const struct update_args *args)
{
    if (args->k->l2)
        update(args, &adam_l2_loops);
    else
        ISA_FN(update_adamw)(args);
}

void ISA_FN(update_sgd)(const struct update_args *args)
{
    const struct update_scalars *k = args->k;

    if (!k->momentum)
        update(args, &sgd_loops);
    else if (k->first_step)
        update_rarely(args, k->nesterov ? &sgd_nesterov_first_loops : &sgd_momentum_first_loops);
    else if (k->nesterov)
        update(args, &sgd_nesterov_loops);
    else
        update(args, &sgd_momentum_loops);
}

void ISA_FN(update_lion)(const struct update_args *args)
{
    update(args, &lion_loops);
}

void ISA_FN(update_adagrad)(const struct update_args *args)
{
    update(args, &adagrad_loops);
}

void ISA_FN(update_muon)(const struct update_args *args)
{
    update_rarely(args, &muon_loops);
}

void ISA_FN(muon_momentum)(const struct update_args *args)
{
    update_rarely(args, args->k->nesterov ? &muon_nesterov_loops : &muon_momentum_loops);
}

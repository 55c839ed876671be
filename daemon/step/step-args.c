/* SPDX-License-Identifier: Apache-2.0 */

/* The arguments of the kernel that updates a chunk: where its values are, and the scalars of its parameter. */

#include <assert.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"
#include "daemon/step/step.h"
#include "kernels/muon.h"

struct update_args step_args_in(const struct step *step, uint32_t id, const struct state_place *place)
{
    const struct layout_chunk *chunk = &step->layout->chunks[id];
    enum dtype dtype = step->layout->params[chunk->param].dtype;

    return (struct update_args){
        .p = place->master,
        .lower = place->lower,
        .m = place->exp_avg,
        .v = place->exp_avg_sq,
        .w16 = place->weights,
        .w16_dtype = place->weights ? dtype : DTYPE_F32,
        .n_elems = chunk->n_elems,
        .moments = step->state->moments,
        .start_elem = chunk->start_elem,
    };
}

struct update_args step_update_args(const struct step *step, uint32_t id, const float *acc)
{
    struct state_place place = state_place(step->state, id);
    struct update_args args = step_args_in(step, id, &place);

    args.acc = acc;
    args.k = &step->scalars[step->layout->chunks[id].param];
    return args;
}

float *step_acc_here(const struct step *step, uint32_t id)
{
    const struct layout_chunk *chunk = &step->layout->chunks[id];
    const struct layout_param *param = &step->layout->params[chunk->param];

    return state_acc(step->state, param->bucket, param->offset_elems + chunk->start_elem);
}

const float *step_ready_acc(const struct step *step, uint32_t id)
{
    return step->ops->acc ? step->ops->acc(step, id) : step_acc_here(step, id);
}

static float matrix_lr(const struct layout_param *param, const struct hyper *hyper)
{
    struct muon_shape shape = {.rows = param->shape[0], .cols = param->shape[1]};

    return (float)(hyper->lr * muon_lr_factor(shape, hyper->adjust_lr_fn));
}

void step_scalars(const struct step *step, const struct step_update *update, uint32_t param,
                  const struct update_scalars *last, uint32_t last_param, struct update_scalars *out)
{
    const struct layout_param *p = &step->layout->params[param], *before = &step->layout->params[last_param];
    const uint64_t *counts = step->state->progress.counts;

    /* Reuses the scalars, because pow() is slow, and neighbours nearly always share group and count. */
    if (last && before->group == p->group && counts[last_param] == counts[param] && before->muon == p->muon)
        *out = *last;
    else
        update_scalars_compute(step_optimizer(step, param), &update->groups[p->group], update->s, counts[param] + 1,
                               out);
    out->rounding_key = update_rounding_key(param, counts[param] + 1);
    if (p->muon)
        out->a = matrix_lr(p, &update->groups[p->group]);
}

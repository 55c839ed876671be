/* SPDX-License-Identifier: Apache-2.0 */

/* The tensors of this job, and where they are kept (state-targets.h). */

#include "daemon/checkpoint/state-targets.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"

enum { MAX_PER_PARAM = 5 }; /* weights, two moments, master, count */

/* Return: a target for the whole parameter. The caller then sets the elements that this node keeps. */
static struct target whole_param(const struct layout_param *p, enum tensor_file kind, int dtype)
{
    return (struct target){.kind = kind, .dtype = dtype, .n_dims = p->n_dims, .shape = p->shape, .n_elems = p->n_elems};
}

static void keep_all(struct target *target, void *at)
{
    target->at = at;
    target->end_elem = target->n_elems;
}

/* Points the target to the masters or moments that this node owns. */
static void keep_owned(struct target *target, const struct state *state, uint32_t id, enum state_kind kind)
{
    const struct layout_param *p = &state->layout->params[id];
    uint64_t elem;

    state_owned_elems(state, id, &target->first_elem, &target->end_elem);
    if (target->first_elem >= target->end_elem)
        return;
    elem = p->offset_elems + target->first_elem;
    target->is_lower = kind == STATE_MASTER && state_is_master24(state, p->bucket);
    target->at = target->is_lower ? (uint8_t *)state_master24(state, p->bucket, elem).lower
                                  : (uint8_t *)state_values(state, kind, p->bucket, elem);
}

/* Stage 3: points the target to the owned weights that are part of 24-bit masters. */
static void keep_owned_weights(struct target *target, const struct state *state, uint32_t id)
{
    const struct layout_param *p = &state->layout->params[id];

    state_owned_elems(state, id, &target->first_elem, &target->end_elem);
    if (target->first_elem < target->end_elem)
        target->at = (uint8_t *)state_master24(state, p->bucket, p->offset_elems + target->first_elem).weights;
}

static int add_weights_target(struct targets *targets, const struct state *state, uint32_t id)
{
    const struct layout_param *p = &state->layout->params[id];
    struct target target = whole_param(p, tensor_is_of_model(p->name) ? TENSOR_MODEL : TENSOR_OPTIMIZER, p->dtype);

    if (!p->trainable)
        keep_all(&target, state_frozen(state, id));
    else if (state->stage != 3)
        keep_all(&target, state_weights(state, id, 0)); /* of fp32 parameters: the masters of all nodes */
    else if (p->dtype == DTYPE_F32)
        keep_owned(&target, state, id, STATE_MASTER);
    else if (state_is_master24(state, p->bucket))
        keep_owned_weights(&target, state, id);
    return targets_add(targets, strdup(p->name), &target);
}

static int add_values(struct targets *targets, const struct state *state, uint32_t id, enum state_kind kind,
                      const char *key)
{
    const struct layout_param *p = &state->layout->params[id];
    struct target target = whole_param(p, TENSOR_OPTIMIZER, state_dtype(state, kind));

    assert(key); /* the state has no array that the optimizer lacks */
    target.may_lack = target.is_moment = kind != STATE_MASTER;
    keep_owned(&target, state, id, kind);
    return targets_add(targets, tensor_state_name(p->name, key), &target);
}

static int add_count(struct targets *targets, const struct layout_param *p, float *count)
{
    struct target target = {.kind = TENSOR_OPTIMIZER, .dtype = DTYPE_F32, .n_elems = 1, .may_lack = true};

    keep_all(&target, count);
    return targets_add(targets, tensor_state_name(p->name, TENSOR_STEP), &target);
}

static int add_param(struct targets *targets, const struct state *state, enum optimizer optimizer, uint32_t id,
                     float *count)
{
    const struct layout_param *p = &state->layout->params[id];
    int r = add_weights_target(targets, state, id);

    optimizer = optimizer_of_param(optimizer, p->muon);
    if (r < 0 || !p->trainable)
        return r;
    if (state->buckets[p->bucket].exp_avg)
        r = add_values(targets, state, id, STATE_EXP_AVG, tensor_moment_key(optimizer, false));
    if (r == 0 && state->buckets[p->bucket].exp_avg_sq)
        r = add_values(targets, state, id, STATE_EXP_AVG_SQ, tensor_moment_key(optimizer, true));
    if (r == 0 && p->dtype != DTYPE_F32)
        r = add_values(targets, state, id, STATE_MASTER, TENSOR_MASTER);
    return r == 0 ? add_count(targets, p, count) : r;
}

int state_targets_init(struct state_targets *targets, const struct state *state, enum optimizer optimizer)
{
    const struct layout *layout = state->layout;
    int r = targets_init(&targets->all, MAX_PER_PARAM * (size_t)layout->n_params, "this job");

    targets->counts = calloc(layout->n_params, sizeof(*targets->counts));
    if (!targets->counts)
        r = -ENOMEM;
    for (uint32_t i = 0; r == 0 && i < layout->n_params; i++)
        r = add_param(&targets->all, state, optimizer, i, &targets->counts[i]);
    if (r == 0)
        targets_sort(&targets->all);
    return r;
}

void state_targets_deinit(struct state_targets *targets)
{
    targets_deinit(&targets->all);
    free(targets->counts);
    targets->counts = NULL;
}

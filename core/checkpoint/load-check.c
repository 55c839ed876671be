/* SPDX-License-Identifier: Apache-2.0 */

/* Finds whether loading would refuse a checkpoint because of its files (load-check.h). */

#include "core/checkpoint/load-check.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/checkpoint/sources.h"
#include "core/checkpoint/targets.h"
#include "kernels/update.h"

enum { MAX_PER_PARAM = 7 }; /* weights, two moments of each of two optimizers, master, count */

/* ---- the tensors of the job that wrote it --------------------------------------------------------------- */

static struct target whole_param(const struct description_param *p, enum tensor_file kind, int dtype)
{
    return (struct target){.kind = kind, .dtype = dtype, .n_dims = p->n_dims, .shape = p->shape, .n_elems = p->n_elems};
}

static int add_moment(struct targets *targets, const struct description_param *p, const char *key, bool may_lack)
{
    struct target target = whole_param(p, TENSOR_OPTIMIZER, DTYPE_F32);

    target.is_moment = true;
    target.may_lack = may_lack;
    return key ? targets_add(targets, tensor_state_name(p->name, key), &target) : 0;
}

/* Adds both moments of the optimizer. may_lack: zerod.json does not say whether the parameter has them. */
static int add_moments(struct targets *targets, const struct description_param *p, enum optimizer optimizer,
                       bool may_lack)
{
    int r = add_moment(targets, p, tensor_moment_key(optimizer, false), may_lack);

    return r == 0 ? add_moment(targets, p, tensor_moment_key(optimizer, true), may_lack) : r;
}

/* Adds the moments that the parameter may have. Muon updates only matrices, but not all matrices. SGD has no
 * momentum_buffer if its momentum is 0. */
static int add_all_moments(struct targets *targets, const struct description_param *p, enum optimizer optimizer)
{
    bool may_be_muon = optimizer == OPTIMIZER_MUON && p->n_dims == 2;
    int r = 0;

    if (optimizer != OPTIMIZER_MUON || may_be_muon)
        r = add_moments(targets, p, optimizer, may_be_muon || optimizer == OPTIMIZER_SGD);
    if (r == 0 && optimizer == OPTIMIZER_MUON)
        r = add_moments(targets, p, optimizer_of_param(optimizer, false), may_be_muon);
    return r;
}

static int add_param_targets(struct targets *targets, const struct description_param *p, enum optimizer optimizer)
{
    enum tensor_file kind = tensor_is_of_model(p->name) ? TENSOR_MODEL : TENSOR_OPTIMIZER;
    struct target target = whole_param(p, kind, p->dtype);
    int r = targets_add(targets, strdup(p->name), &target);

    if (r < 0 || !p->trainable)
        return r;
    r = add_all_moments(targets, p, optimizer);
    target = whole_param(p, TENSOR_OPTIMIZER, DTYPE_F32);
    if (r == 0 && p->dtype != DTYPE_F32)
        r = targets_add(targets, tensor_state_name(p->name, TENSOR_MASTER), &target);
    target = (struct target){.kind = TENSOR_OPTIMIZER, .dtype = DTYPE_F32, .n_elems = 1};
    return r == 0 ? targets_add(targets, tensor_state_name(p->name, TENSOR_STEP), &target) : r;
}

static int find_targets(struct targets *targets, const struct description *d, char *why, size_t why_size)
{
    enum optimizer optimizer = optimizer_find(d->optimizer);
    int r = targets_init(targets, MAX_PER_PARAM * d->n_params, "its job");

    if (r == 0 && optimizer == N_OPTIMIZERS) {
        snprintf(why, why_size, "it is of a run with %.80s, which this version of zerod does not have", d->optimizer);
        return -EINVAL;
    }
    for (size_t i = 0; r == 0 && i < d->n_params; i++)
        r = add_param_targets(targets, &d->params[i], optimizer);
    if (r < 0)
        snprintf(why, why_size, "no memory");
    else
        targets_sort(targets);
    return r;
}

/* ---- the files ----------------------------------------------------------------------------------------- */

/* Finds the targets of the source's tensors. *unknown: the first tensor that the job does not have. */
static int place_source(const struct targets *targets, const struct source *source, const char **unknown, char *why,
                        size_t why_size)
{
    int r = 0;

    for (size_t i = 0; r == 0 && source->kind != TENSOR_RANKS && i < source->header.n; i++) {
        const struct safetensors_tensor *tensor = &source->header.tensors[i];
        struct target *target;
        struct box box;

        r = targets_place(targets, source, tensor, &target, &box, why, why_size);
        if (!target && !*unknown)
            *unknown = tensor->name;
    }
    return r;
}

static int place_sources(const struct targets *targets, const struct sources *sources, char *why, size_t why_size)
{
    const char *unknown = NULL;
    int r = 0;

    for (size_t i = 0; r == 0 && i < sources->n; i++)
        r = place_source(targets, &sources->list[i], &unknown, why, why_size);
    for (size_t i = 0; r == 0 && i < targets->n; i++)
        r = targets_check(targets, &targets->list[i], targets->list[i].may_lack, why, why_size);
    return r == 0 && unknown ? targets_unknown(targets, unknown, why, why_size) : r;
}

int checkpoint_check(int folder, const struct description *d, char *why, size_t why_size)
{
    struct sources sources;
    struct targets targets = {0};
    int r = sources_open(&sources, folder, d, why, why_size);

    if (r == 0)
        r = find_targets(&targets, d, why, why_size);
    if (r == 0)
        r = place_sources(&targets, &sources, why, why_size);
    targets_deinit(&targets);
    sources_deinit(&sources);
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps and converts the arguments of a request for the step, and finds the hyperparameters and scales of the step. */

#include "daemon/job/transaction/step-args.h"

#include <assert.h>
#include <stdlib.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "core/config/schedule.h"
#include "core/layout/layout.h"
#include "core/wire/hyper-check.h"
#include "core/wire/wire-request.h"
#include "core/wire/wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/memory/state.h"
#include "kernels/update.h"

/* ---- arguments ----------------------------------------------------------------------------------------- */

static_assert((unsigned)WIRE_GIVES_LR == CONFIG_GIVES_LR && (unsigned)WIRE_GIVES_BETAS == CONFIG_GIVES_BETAS &&
                  (unsigned)WIRE_GIVES_START == CONFIG_GIVES_SCHEDULER &&
                  (unsigned)WIRE_GIVES_ADJUST_LR_FN == CONFIG_GIVES_ADJUST_LR_FN,
              "bits of Welcome.configured and of GroupHyper.given");

static_assert(MUON_ORIGINAL == 0 && MUON_MATCH_RMS_ADAMW == 1, "adjust_lr_fn of struct hyper is match_rms_adamw");

struct hyper job_plain_hyper(const struct config *config, const struct wire_hyper *h)
{
#define PLAIN(kind, field, plain, text, gives, range, only) .plain = h->field,
    return (struct hyper){HYPER_FIELDS(PLAIN).adam_w_mode = config->optimizer.hyper.adam_w_mode};
#undef PLAIN
}

struct wire_hyper job_wire_hyper(const struct hyper *h)
{
#define WIRE(kind, field, plain, text, gives, range, only) .field = h->plain,
    return (struct wire_hyper){HYPER_FIELDS(WIRE)};
#undef WIRE
}

void job_describe_args(const struct job *job, const struct step_args *args, struct request_step *request,
                       struct wire_hyper *groups)
{
    assert(!args->groups || args->n_groups == job->layout->n_groups);
    *request = (struct request_step){.has_max_norm = args->has_max_norm,
                                     .max_norm = args->max_norm,
                                     .loss_scale = args->loss_scale,
                                     .found_inf = args->found_inf,
                                     .groups = groups};
    for (uint32_t g = 0; args->groups && g < job->layout->n_groups; g++)
        groups[request->n_groups++] = args->groups[g];
}

void job_keep_args(const struct job *job, struct step_args *args, const struct request_step *request)
{
    free(args->groups);
    *args = (struct step_args){
        .has_max_norm = request->has_max_norm,
        .max_norm = request->max_norm,
        .loss_scale = request->loss_scale,
        .found_inf = request->found_inf,
    };
    if (request->n_groups == job->layout->n_groups)
        args->groups = calloc(request->n_groups, sizeof(*args->groups));
    for (size_t i = 0; args->groups && i < request->n_groups; i++)
        args->groups[args->n_groups++] = request->groups[i];
}

const char *job_check_hyper(const struct config *config, const struct wire_hyper *wanted)
{
    struct wire_hyper configured = job_wire_hyper(&config->optimizer.hyper), h = hyper_merge(&configured, wanted);
    struct hyper_problem problem;

    if (config->optimizer.type == OPTIMIZER_SGD && h.momentum != 0 && configured.momentum == 0)
        return "Step.groups.momentum: the job has no momentum buffer, as optimizer.params.momentum is 0";
    if (hyper_is_wrong(config_optimizer_name(&config->optimizer), &h, &problem))
        return "Step.groups: a hyperparameter is out of range";
    return NULL;
}

/* ---- what follows from them ---------------------------------------------------------------------------- */

double step_divisor(const struct job *job)
{
    return job->config->gradient_allreduce_op == CONFIG_ALLREDUCE_MEAN ? job->world.size : 1;
}

double step_loss_scale(const struct job *job, const struct step_args *args)
{
    return args->loss_scale > 0 ? args->loss_scale : job_loss_scale(job);
}

/* Returns the hyperparameters of a group before the schedule. */
static struct hyper wanted_hyper(const struct config *config, const struct step_args *args, uint32_t group)
{
    struct wire_hyper configured = job_wire_hyper(&config->optimizer.hyper), merged;

    if (!args->groups)
        return config->optimizer.hyper;
    merged = hyper_merge(&configured, &args->groups[group]);
    return job_plain_hyper(config, &merged);
}

/* Does the trainer give a learning rate that the schedule neither sets nor starts from? */
static bool has_own_rate(const struct config *config, const struct step_args *args, uint32_t group)
{
    uint32_t given = args->groups ? args->groups[group].given : 1;

    if (given == 0)
        return true; /* all fields are given */
    if (!(given & WIRE_GIVES_LR))
        return false;
    return !(given & WIRE_GIVES_START) || !schedule_starts_from_lr(&config->scheduler);
}

struct hyper job_hyper(const struct job *job, const struct step_args *args, uint32_t group)
{
    const struct config *config = job->config;
    struct hyper hyper = wanted_hyper(config, args, group);
    double base[WIRE_MAX_GROUPS];

    assert(group < job->layout->n_groups);
    assert(job->layout->n_groups <= WIRE_MAX_GROUPS);
    assert(!args->groups || args->n_groups == job->layout->n_groups);
    if (config->scheduler.type == SCHEDULE_NONE || has_own_rate(config, args, group))
        return hyper;
    for (uint32_t g = 0; g < job->layout->n_groups; g++)
        base[g] = wanted_hyper(config, args, g).lr;
    hyper.lr = schedule_lr(&config->scheduler, base, job->layout->n_groups, group, job->state->progress.n_applied);
    return hyper;
}

double step_expect(const struct job *job, struct hyper *hypers)
{
    const struct job_rank *rank = &job->ranks[job->world.first];
    const struct step_args *last = &rank->request.args; /* of the last step */
    const struct step_args *args = rank->expected.groups ? &rank->expected : last;

    for (uint32_t g = 0; g < job->layout->n_groups; g++)
        hypers[g] = job_hyper(job, args, g);
    return 1.0 / (step_divisor(job) * step_loss_scale(job, args));
}

/* SPDX-License-Identifier: Apache-2.0 */

/* Passes the executor's reports to the job, and its fetches to the coordinator. */

#include "daemon/job/executor-events.h"

#include <assert.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/budget/budget.h"
#include "core/budget/plan.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/diagnosis/evidence.h"
#include "daemon/job/form.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/step/executor.h"

static void on_reserved(void *userdata)
{
    struct job *job = userdata;

    report_progress(job, (struct report){REPORT_FORMED}); /* several nodes: all engines start together after that */
}

static void on_formed(void *userdata)
{
    job_formed(userdata);
}

/*
 * Return: the memory that the job needs on each GPU and on the host of this node. offload: with the state in host
 * memory.
 */
static struct plan_bytes needed(const struct job *job, bool offload)
{
    const struct budget_ranks ranks = {.first_local = job->world.first, .n_local = job_n_local(job)};
    struct config config = *job->config;
    struct plan_options options;
    struct plan_bytes bytes;

    if (offload)
        config.zero.offload_optimizer = CONFIG_OFFLOAD_CPU;
    options = budget_options(&config, job->layout, ranks, job->layout->n_parcels);
    plan_bytes_by_class(job->layout, &options, &bytes);
    bytes.device /= ranks.n_local;
    return bytes;
}

static struct diagnostic *explain_unformed(const struct job *job, const char *why)
{
    struct evidence_device_unformed evidence = {
        .at = {.rank = -1, .step = -1, .micro_batch = -1},
        .why = why,
        .gpu_bytes = needed(job, false).device,
    };
    struct plan_bytes offloaded;

    if (!config_offloads(job->config) && job->config->optimizer.type != OPTIMIZER_MUON) {
        offloaded = needed(job, true);
        evidence.offloaded_gpu_bytes = offloaded.device;
        evidence.offloaded_host_bytes = offloaded.needed;
    }
    return cause_device_unformed(&evidence);
}

static void on_unformed(void *userdata, int result, const char *why)
{
    struct job *job = userdata;

    if (result == -ECANCELED)
        job_todo(job); /* a job that is being dropped waits for this event */
    else
        job_unformed(job, explain_unformed(job, why));
}

/* On several nodes the coordinator waits until the engines of all nodes are ready. */
static void on_ready(void *userdata)
{
    struct job *job = userdata;

    if (job->phase != JOB_RESERVING || job->forming.has_memory)
        report_progress(job, (struct report){REPORT_DEVICE_READY});
}

static void on_failed(void *userdata, uint32_t generation, const char *why)
{
    struct job *job = userdata;

    report_progress(job, (struct report){REPORT_DEVICE_FAILED, .failed = {.generation = generation, .why = why}});
}

static void on_put(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct job *job = userdata;

    report_progress(job, (struct report){REPORT_DEVICE_PUT, .put = {.key = key, .value = value, .n_bytes = n_bytes}});
}

static void on_loaded(void *userdata, int result)
{
    struct job *job = userdata;

    if (result == -ECANCELED && !job->run.drop_why) /* drop_now() cancelled the load */
        return;
    gather_settle(job);
    job_todo(job);
}

static int fetch(void *userdata, const struct fetch *what)
{
    struct job *job = userdata;

    return coordinator_fetch(job->coordinator, what);
}

static void after(void *userdata)
{
    struct job *job = userdata;

    if (!job->coordinator->alone)
        job_todo(job); /* an abort may wait for cancelled work */
    if (job->ops.after)
        job->ops.after(job->ops.userdata);
}

int job_make_executor(struct job *job)
{
    int r = executor_new(&job->executor, &(struct executor_options){
                                             .config = job->config,
                                             .layout = job->layout,
                                             .kernels = job->kernels,
                                             .pool = job->pool,
                                             .loop = job->ops.loop,
                                             .gather_bytes = job->memory.planned.pool,
                                             .several_nodes = !job->coordinator->alone,
                                             .events = {.reserved = on_reserved,
                                                        .formed = on_formed,
                                                        .unformed = on_unformed,
                                                        .ready = on_ready,
                                                        .failed = on_failed,
                                                        .put = on_put,
                                                        .loaded = on_loaded,
                                                        .fetch = fetch,
                                                        .after = after,
                                                        .userdata = job},
                                         });

    if (r < 0)
        return r;
    assert(job->executor->first_rank == job->world.first);
    assert(job->executor->n_local == job_n_local(job));
    job->state = job->executor->state;
    job->step = job->executor->step;
    return 0;
}

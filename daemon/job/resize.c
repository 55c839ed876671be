/* SPDX-License-Identifier: Apache-2.0 */

/* Changes the number of ranks (resize.h). */

#include "daemon/job/resize.h"

#include <assert.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/log.h"
#include "core/base/open-files.h"
#include "core/budget/budget.h"
#include "core/budget/plan.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "core/wire/journal-wire.h"
#include "daemon/job/drop.h"
#include "daemon/job/form.h"
#include "daemon/job/job.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/quota.h"
#include "daemon/step/executor.h"

/* All data that depends on the number of ranks. It is made before the job is changed. */
struct resized {
    struct layout *layout;
    struct plan_bytes planned;
    struct ledger ledger;
    struct parcel *parcels;
    uint32_t *gathered[CONFIG_MAX_LOCAL_RANKS]; /* one array per rank */
};

static_assert((int)CONFIG_MAX_LOCAL_RANKS <= (int)LAYOUT_ROOM_RANKS, "the state has room for all ranks of a node");

/* ---- is the resize allowed? ---------------------------------------------------------------------------- */

static int refuse_resize(char **why, int r, const char *format, ...) __attribute__((format(printf, 3, 4)));

static int refuse_resize(char **why, int r, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    if (vasprintf(why, format, args) < 0)
        *why = NULL;
    va_end(args);
    return *why ? r : -ENOMEM;
}

static int check(const struct job *job, unsigned n_ranks, char **why)
{
    char limit[256];

    if (job->run.survival.holds)
        return refuse_resize(why, RESIZE_E_NOT_ALLOWED, "the daemon holds state that it could not take over: %s",
                             job->run.survival.holds);
    if (!job->coordinator->alone || job->config->device == CONFIG_DEVICE_CUDA)
        return refuse_resize(
            why, RESIZE_E_NOT_ALLOWED,
            "a job %s gets another number of ranks by way of a checkpoint: save one, end the job, and start it "
            "with the other number and checkpoint.load: latest",
            job->coordinator->alone ? "on GPUs" : "of several nodes");
    if (!job->kept.has_weights)
        return refuse_resize(
            why, RESIZE_E_NOT_ALLOWED,
            "there is no state yet that %u ranks could go on with: set world.size, and restart the daemon", n_ranks);
    if (n_ranks > CONFIG_MAX_LOCAL_RANKS)
        return refuse_resize(why, RESIZE_E_NOT_ALLOWED, "%u ranks on one node; allowed: at most %d", n_ranks,
                             CONFIG_MAX_LOCAL_RANKS);
    if (n_ranks > job->config->limits.clients)
        return refuse_resize(why, RESIZE_E_NOT_ALLOWED, "limits.clients lets %u connect, which is fewer than %u ranks",
                             job->config->limits.clients, n_ranks);
    if (job_anybody_is_here(job))
        return refuse_resize(why, RESIZE_E_NOT_ALLOWED,
                             "trainers are still attached: end them first (zerodctl ranks lists them)");
    if (open_files_check(n_ranks, limit, sizeof(limit)) < 0)
        return refuse_resize(why, RESIZE_E_NOT_ALLOWED, "%s", limit);
    if (save_is_busy(job))
        return refuse_resize(why, RESIZE_E_BUSY, "a checkpoint is being written");
    if (!job_is_idle(job))
        return refuse_resize(why, RESIZE_E_BUSY, "a step, or something else of the job, is not at its end");
    return 0;
}

/* Checks only the additional memory, because the job already holds the rest. */
static int check_memory(const struct job *job, const struct plan_bytes *planned, unsigned n_ranks, char **why)
{
    uint64_t now = job->memory.charge.amount;
    uint64_t more = planned->needed > now ? planned->needed - now : 0;
    uint64_t allowed = job->memory.quota.limit - job->memory.quota.used;
    const char *limit = "limits.memory";
    struct memory_headroom headroom;

    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (headroom.cgroup_bytes < allowed) {
        allowed = headroom.cgroup_bytes;
        limit = "the daemon's cgroup";
    }
    if (headroom.available_bytes < allowed) {
        allowed = headroom.available_bytes;
        limit = "this machine (MemAvailable)";
    }
    if (more <= allowed)
        return 0;
    return refuse_resize(why, RESIZE_E_NOT_ALLOWED,
                         "%u ranks need %" PRIu64 " bytes of memory, %" PRIu64
                         " more than %u do, and %s allows only %" PRIu64 " more",
                         n_ranks, planned->needed, more, job->world.size, limit, allowed);
}

/* ---- making the new data ------------------------------------------------------------------------------- */

static void free_resized(struct resized *new)
{
    ledger_deinit(&new->ledger);
    free(new->parcels);
    for (size_t r = 0; r < ARRAY_SIZE(new->gathered); r++)
        free(new->gathered[r]);
    layout_free(new->layout);
}

/* The new ranks begin as successors, so that only the users of the old ranks may attach. */
static int make_new_ranks(const struct job *job, struct resized *new, unsigned n_ranks)
{
    assert(n_ranks <= ARRAY_SIZE(new->gathered));
    for (unsigned r = 0; r < n_ranks; r++) {
        new->gathered[r] = calloc(new->layout->n_params, sizeof(*new->gathered[r]));
        if (!new->gathered[r])
            return -ENOMEM;
        (void)ledger_attach(&new->ledger, r, job->kept.n_incarnations + 1 + r);
    }
    new->ledger.step = job->ledger.step;
    new->ledger.attempt = job->ledger.attempt + 1; /* pushes of the open step are void */
    return 0;
}

static int make_resized(const struct job *job, struct resized *new, unsigned n_ranks)
{
    int r = layout_for_ranks(&new->layout, job->layout, n_ranks);
    struct plan_options options;

    if (r != 0)
        return -ENOMEM;
    options =
        budget_options(job->config, new->layout, (struct budget_ranks){.n_local = n_ranks}, new->layout->n_parcels);
    plan_bytes_by_class(new->layout, &options, &new->planned);
    new->parcels = calloc(new->layout->n_parcels + 1, sizeof(*new->parcels));
    r = new->parcels ? form_ledger(&new->ledger, new->layout, (struct ledger_ranks){.end = n_ranks, .n = n_ranks})
                     : -ENOMEM;
    return r < 0 ? r : make_new_ranks(job, new, n_ranks);
}

/* ---- replacing the old data ---------------------------------------------------------------------------- */

static void log_left_out(const struct job *job)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (job->ranks[r].kept.blob.data) {
            log_notice("what ranks had stored (loader position, random state) is left out: it was that of %u ranks",
                       job->world.size);
            return;
        }
}

static void use_ranks(struct job *job, struct resized *new, unsigned n_ranks)
{
    uint32_t owners[CONFIG_MAX_LOCAL_RANKS];

    for (unsigned r = 0; r < n_ranks; r++)
        owners[r] = job->ranks[MIN(r, job->world.size - 1)].kept.owner;
    log_left_out(job);
    drop_ranks(job, n_ranks);
    for (unsigned r = 0; r < n_ranks; r++) {
        job->ranks[r].kept.owner = owners[r];
        job->ranks[r].kept.incarnation = ++job->kept.n_incarnations;
        assert(new->ledger.ranks[r].incarnation == job->ranks[r].kept.incarnation);
        job->ranks[r].gathers.counts = steal_ptr(new->gathered[r]);
    }
}

static void use(struct job *job, struct resized *new, unsigned n_ranks)
{
    assert(job->work.n_under_way == 0 && job->work.n_io == 0); /* no work reads the data that is replaced */
    assert(job->executor->n_local == n_ranks);
    if (job->phase == JOB_WINDOW)
        window_forget(job); /* no rank is attached that could end the window */
    assert(job->phase == JOB_TRAINING);
    window_free(steal_ptr(job->window));
    use_ranks(job, new, n_ranks);
    job->step = job->executor->step;
    layout_free(job->layout);
    job->layout = steal_ptr(new->layout);
    ledger_deinit(&job->ledger);
    job->ledger = new->ledger;
    new->ledger = (struct ledger){0};
    free(job->work.parcels);
    job->work.parcels = steal_ptr(new->parcels);
    charge_deinit(&job->memory.charge);
    (void)quota_charge(&job->memory.quota, &job->memory.charge, new->planned.needed); /* check_memory() passed */
    job->memory.planned = new->planned;
    job->stats.times.slowest_rank = UINT_MAX; /* the slowest rank was one of the old ranks */
    job->rank_norm = (struct job_rank_norm){0};
    job->slow = (struct job_slow){0};
    job->speculation = (struct job_speculation){.hypers = job->speculation.hypers};
    job->stats.counters.batch_bytes = job->stats.counters.batch_reduced_bytes = 0;
    job_turn(job, TURN_TRAINING);
    job_todo(job);
}

static int resize(struct job *job, unsigned n_ranks, char **why)
{
    struct resized new = {0};
    int r = make_resized(job, &new, n_ranks);

    if (r == 0)
        r = check_memory(job, &new.planned, n_ranks, why);
    if (r == 0)
        r = executor_repartition(job->executor, new.layout, new.planned.pool);
    (void)failpoint("repartitioned");
    if (r == 0)
        use(job, &new, n_ranks);
    free_resized(&new);
    return r;
}

int job_resize(struct job *job, unsigned n_ranks, char **why)
{
    unsigned before = job->world.size;
    int r = check(job, n_ranks, why);

    if (r != 0 || n_ranks == before)
        return r;
    r = resize(job, n_ranks, why);
    if (r == 0)
        log_notice("ranks of the job: %u, before it was %u; the next step is %" PRIu64, n_ranks, before,
                   job->ledger.step);
    return r;
}

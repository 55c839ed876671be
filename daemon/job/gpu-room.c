/* SPDX-License-Identifier: Apache-2.0 */

/* Room for the gradients of models on GPUs (gpu-room.h). */

#include "daemon/job/gpu-room.h"

#include <assert.h>
#include <inttypes.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/budget/budget.h"
#include "core/budget/plan.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/memory/quota.h"

static unsigned n_from_gpu(const struct job *job)
{
    unsigned n = 0;

    for (unsigned r = job->world.first; r < job->world.end; r++)
        n += job->ranks[r].process.from_gpu;
    return n;
}

bool gpu_room_is_for_all(const struct job *job)
{
    return n_from_gpu(job) == job_n_local(job);
}

/* Return: the bytes of host memory that the job needs with that room; 0 if the layout cannot be made. */
static uint64_t needed_with(const struct job *job, enum config_gpu_room room)
{
    const struct manifest *manifest = &job->ranks[job->world.first].process.manifest;
    const struct budget_ranks ranks = {.first_local = job->world.first, .n_local = job_n_local(job)};
    struct config config = *job->config;
    struct layout *layout = NULL;
    struct plan_options options;
    struct plan_bytes bytes;
    uint32_t bad;

    config_choose_gpu_room(&config, room);
    if (layout_new(&layout, manifest->decls, manifest->n, job->world.size, config.zero.reduce_bucket_size, &bad) != 0)
        return 0;
    options = budget_options(&config, layout, ranks, layout->n_parcels);
    plan_bytes_by_class(layout, &options, &bytes);
    layout_free(layout);
    return bytes.needed;
}

bool gpu_room_fits(const struct job *job, uint64_t needed, uint64_t without)
{
    const struct quota *quota = &job->memory.quota;
    uint64_t more = needed > without ? needed - without : 0;
    struct memory_headroom headroom;

    assert(quota->used <= quota->limit);
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    return needed <= quota->limit - quota->used && needed <= UINT64_MAX - more &&
           needed + more <= MIN(headroom.available_bytes, headroom.cgroup_bytes);
}

enum config_gpu_room gpu_room_wanted(struct job *job)
{
    enum config_gpu_room room = CONFIG_GPU_ROOM_MICRO_BATCH;
    uint64_t without;

    assert(!job->layout); /* the room determines the layout */
    job->forming.gpu_room = CONFIG_GPU_ROOM_NONE;
    if (job->config->device != CONFIG_DEVICE_CPU || !gpu_room_is_for_all(job))
        return CONFIG_GPU_ROOM_NONE;
    without = needed_with(job, CONFIG_GPU_ROOM_NONE);
    if (without == 0) /* forming will refuse the job, and give the reason */
        return CONFIG_GPU_ROOM_NONE;
    while (room > CONFIG_GPU_ROOM_NONE && !gpu_room_fits(job, needed_with(job, room), without))
        room--;
    job->forming.gpu_room = room;
    return room;
}

/* ---- log ----------------------------------------------------------------------------------------------- */

static double ring_mib(const struct job *job, bool holds_all)
{
    return (double)plan_ring_bytes(job->layout, job->config->zero.overlap_comm, holds_all) / (1 << 20);
}

static void log_short(const struct job *job)
{
    const char *whose = job->forming.gpu_room > job->config->zero.gpu_room
                            ? "another node has not the memory, or has models in host memory,"
                            : "memory is short";
    bool holds_all = budget_ring_holds_all(job->config, job->layout, job_n_local(job));

    if (job->config->zero.gpu_room == CONFIG_GPU_ROOM_NONE)
        log_line(LOG_WARNING,
                 "the models are on GPUs, but %s for large buckets and rings: as for models in host memory there are "
                 "buckets of up to %" PRIu64 " elements, and a ring of %.1f MiB for each rank; backwards wait for room",
                 whose, job->layout->bucket_elems, ring_mib(job, holds_all));
    else
        log_line(LOG_WARNING,
                 "the models are on GPUs, but %s for rings of %.1f MiB, which hold all gradients of a micro-batch: "
                 "buckets of up to %" PRIu64
                 " elements, and a ring of %.1f MiB for each rank; backwards may wait for room",
                 whose, ring_mib(job, true), job->layout->bucket_elems, ring_mib(job, holds_all));
}

void gpu_room_log(const struct job *job)
{
    unsigned n = n_from_gpu(job), n_local = job_n_local(job);
    bool holds_all = budget_ring_holds_all(job->config, job->layout, n_local);

    if (n == 0 || job->config->device != CONFIG_DEVICE_CPU)
        return;
    if (n < n_local)
        log_notice(
            "the models of %u of %u ranks are on GPUs, the others in host memory: buckets and rings are those of "
            "models in host memory",
            n, n_local);
    else if (job->config->zero.gpu_room == CONFIG_GPU_ROOM_MICRO_BATCH)
        log_notice("the models are on GPUs: %u workers, buckets of up to %" PRIu64
                   " elements, and a ring of %.1f MiB for each rank, %s",
                   config_n_threads(job->config), job->layout->bucket_elems, ring_mib(job, holds_all),
                   holds_all ? "which holds all gradients of a micro-batch" : "because of overlap_comm: false");
    else
        log_short(job);
}

/* SPDX-License-Identifier: Apache-2.0 */

/* Makes traces from the recorder's records and the names of the job's parcels. */

#include "daemon/server/trace-writer.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/base/recorder.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/trace/trace.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/server/service.h"

enum {
    FILE_STEPS = 32, /* picked: enough to show the cause, and a browser opens it at once */
    MAX_FILES = 10,  /* files that one daemon writes */
    PAUSE_S = 10,    /* between files; an abort often follows the loss of a rank, and one file shows both */
};

/* ---- taking a trace ------------------------------------------------------------------------------------ */

static const char *const waits[] = {
    [WAIT_NONE] = "nothing",
    [WAIT_FORM] = "all ranks declare the model",
    [WAIT_INIT] = "initial weights are taken",
    [WAIT_READY] = "all ranks have initial weights",
    [WAIT_SLOT] = "room in its ring",
    [WAIT_END] = "end of the micro-batch",
    [WAIT_OTHERS] = "gradients of other ranks",
    [WAIT_STEP] = "the step",
    [WAIT_NORM] = "the gradient norm",
    [WAIT_GATHER] = "parameters are gathered",
    [WAIT_READ] = "state is read",
    [WAIT_WINDOW_BEGIN] = "a write window begins",
    [WAIT_WINDOW_END] = "a write window ends",
    [WAIT_WRITE] = "state is written",
    [WAIT_SAVE] = "a checkpoint is saved",
    [WAIT_ABANDON] = "a backward is given up",
    [WAIT_ABORTED] = "the step is aborted",
    [WAIT_ABORT] = "the step is aborted",
};

_Static_assert(ARRAY_SIZE(waits) == WAITS_N_KINDS, "each kind of wait has a name");

/* Return: a name such as "bucket 3: head.weight, 11 more", or "bucket 4, piece 2 of 5: embed.weight". */
static char *name_parcel(const struct layout *layout, uint32_t number)
{
    const struct layout_parcel *parcel = &layout->parcels[number];
    const struct layout_bucket *bucket = &layout->buckets[parcel->bucket];
    const struct layout_param *first = &layout->params[layout->bucket_params[bucket->first_param]];
    char printed[128], piece[64] = "", more[32] = "";
    char *name;

    assert(bucket->n_params > 0);
    assert(number - bucket->first_parcel < bucket->n_parcels);
    layout_print_name(printed, sizeof(printed), first->name, first->name_len);
    if (bucket->n_parcels > 1)
        snprintf(piece, sizeof(piece), ", piece %u of %u", number - bucket->first_parcel + 1, bucket->n_parcels);
    if (bucket->n_params > 1)
        snprintf(more, sizeof(more), ", %u more", bucket->n_params - 1);
    return asprintf(&name, "bucket %u%s: %s%s", parcel->bucket, piece, printed, more) < 0 ? NULL : name;
}

static uint64_t realtime_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Takes a trace of the last n_steps steps. Return: 0 or -ENOMEM. After 0 the caller calls trace_deinit(). */
static int take_trace(struct trace *trace, const struct job *job, uint64_t n_steps)
{
    uint32_t n_parcels = job->layout ? job->layout->n_parcels : 0;
    bool complete;

    *trace = (struct trace){
        .job = strdup(job->config->job),
        .version = strdup(service_version()),
        .node = job->config->world.node,
        .n_nodes = (unsigned)MAX(job->config->world.nodes.n_items, (size_t)1),
        .first_rank = job->world.first,
        .n_ranks = job->world.end - job->world.first,
        .n_workers = worker_pool_n_threads(job->pool),
        .step = job->ledger.step,
        .monotonic_ns = recorder_now(),
        .realtime_ns = realtime_ns(),
        .parcels = calloc(n_parcels + 1, sizeof(*trace->parcels)),
        .waits = calloc(ARRAY_SIZE(waits), sizeof(*trace->waits)),
    };
    trace->records = recorder_copy(n_steps, &trace->n_records, &trace->oldest);
    complete = trace->job && trace->version && trace->parcels && trace->waits && trace->records;
    for (; complete && trace->n_waits < ARRAY_SIZE(waits); trace->n_waits++)
        complete = (trace->waits[trace->n_waits] = strdup(waits[trace->n_waits]));
    for (; complete && trace->n_parcels < n_parcels; trace->n_parcels++)
        complete = (trace->parcels[trace->n_parcels] = name_parcel(job->layout, (uint32_t)trace->n_parcels));
    if (complete)
        return 0;
    trace_deinit(trace);
    return -ENOMEM;
}

char *trace_answer(const struct job *job, uint64_t n_steps)
{
    struct trace trace;
    char *text;

    if (take_trace(&trace, job, n_steps) < 0)
        return NULL;
    text = trace_pack(&trace);
    trace_deinit(&trace);
    return text;
}

/* ---- files --------------------------------------------------------------------------------------------- */

struct writing {
    uv_work_t work;
    struct trace trace;
    char *path;
    int result;
};

/*
 * Writes the trace's file, on a libuv thread. Writes under a temporary name first, so that nobody opens an incomplete
 * file.
 */
static void write_file(uv_work_t *work)
{
    struct writing *writing = container_of(work, struct writing, work);
    _cleanup_free_ char *temporary = NULL;
    FILE *file = NULL;

    errno = ENOMEM;
    if (asprintf(&temporary, "%s.new", writing->path) >= 0)
        file = fopen(temporary, "wxe");
    if (!file) {
        writing->result = -errno;
        return;
    }
    trace_print(file, &writing->trace);
    writing->result = flush_file(file);
    fclose(file);
    if (writing->result == 0 && rename(temporary, writing->path) < 0)
        writing->result = -errno;
    if (writing->result < 0)
        unlink(temporary);
}

static void file_is_written(uv_work_t *work, int status)
{
    struct writing *writing = container_of(work, struct writing, work);

    if (status < 0 || writing->result < 0)
        log_error("no trace in %s: %s", writing->path, strerror(status < 0 ? -status : -writing->result));
    else
        log_notice("trace of the last steps: %s (open it at ui.perfetto.dev or chrome://tracing)", writing->path);
    trace_deinit(&writing->trace);
    free(writing->path);
    free(writing);
}

/* Return: true if a rank of this node still trains. Otherwise no trace is needed. */
static bool is_training(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].peer && !job->ranks[r].kept.left)
            return true;
    return false;
}

static bool calls_for_trace(const struct diagnostic *diagnostic)
{
    /* A lost node or engine aborts the open step. */
    return diagnostic->code == E_STALLED || diagnostic->code == E_RANK_LOST; /* aborts have one of these codes */
}

void trace_note(struct trace_files *files, uv_loop_t *loop, const struct job *job, const struct diagnostic *diagnostic)
{
    const char *folder = job->config->diagnostics.trace_dir;
    uint64_t now = service_now_ns();
    struct writing *writing;

    if (!folder || !calls_for_trace(diagnostic) || !is_training(job) || files->n_files >= MAX_FILES ||
        (files->last_ns && now - files->last_ns < PAUSE_S * UINT64_C(1000000000)))
        return;
    writing = calloc(1, sizeof(*writing));
    if (!writing)
        return;
    files->last_ns = now;
    files->n_files++;
    if (asprintf(&writing->path, "%s/%s-node%u-step%" PRIu64 "-E%u-%" PRIu64 ".trace.json", folder, job->config->job,
                 job->config->world.node, job->ledger.step, diagnostic->code, realtime_ns() / 1000000000) < 0)
        writing->path = NULL;
    if (writing->path && take_trace(&writing->trace, job, FILE_STEPS) == 0 &&
        uv_queue_work(loop, &writing->work, write_file, file_is_written) == 0)
        return;
    trace_deinit(&writing->trace);
    free(writing->path);
    free(writing);
}

/* SPDX-License-Identifier: Apache-2.0 */

/* The memory of a job on GPUs outlives the engine that drives them, and the daemon that holds its descriptors. */

#include "daemon/engines/device-keep.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/wire/progress.h"

_Static_assert(sizeof(struct device_facts) ==
                   (DEVICE_N_PIECES + 1) * DEVICE_MAX_LOCAL * 8 + DEVICE_MAX_LOCAL * DEVICE_GPU_BYTES + 2 * 8,
               "no padding");

/* ---- the plan ---------------------------------------------------------------------------------------------- */

/*
 * Makes the plan, or finds the plan of an earlier daemon. Reserves its few pages at once. Return: 0; -EBADFD if the
 * found plan has another layout; or another -errno.
 */
static int make_plan(struct device_keep *keep, const struct device_plan_options *options)
{
    uint64_t n_bytes = device_plan_bytes(options);
    _cleanup_free_ void *plan = calloc(1, n_bytes);
    char why[128];
    int r = plan ? segment_init_kept(&keep->plan_segment, "device.plan", n_bytes) : -ENOMEM;

    if (r < 0)
        return r;
    device_plan_write(options, plan);
    if (keep->plan_segment.found && memcmp(keep->plan_segment.map, plan, n_bytes) != 0)
        return -EBADFD;
    r = segment_reserve(&keep->plan_segment, 0, keep->plan_segment.n_bytes);
    if (r < 0)
        return r;
    memcpy(keep->plan_segment.map, plan, n_bytes);
    r = device_plan_open(&keep->plan, keep->plan_segment.map, keep->plan_segment.n_bytes, why, sizeof(why));
    assert(r == 0); /* device_plan_write() has written it */
    return r;
}

static int make_segments(struct device_keep *keep, const struct device_plan_options *options)
{
    int r = make_plan(keep, options);

    if (r == 0)
        r = segment_init_kept(&keep->inputs_segment, "device.inputs", device_inputs_bytes(&keep->plan));
    if (r == 0)
        r = segment_init_kept(&keep->results_segment, "device.results", device_results_bytes(&keep->plan, NULL));
    if (r == 0)
        r = segment_init_kept(&keep->facts_segment, "device.facts", sizeof(*keep->facts));
    for (unsigned i = 0; r == 0 && i < keep->plan.head->n_local; i++) {
        char name[SEGMENT_NAME_BYTES];

        snprintf(name, sizeof(name), "device.progress.%u", i);
        r = segment_init_written_kept(&keep->progress_segments[i], name, sizeof(struct progress_page));
    }
    return r;
}

/* ---- descriptors ------------------------------------------------------------------------------------------- */

static void print_name(char *dst, size_t size, unsigned local_rank, unsigned kind)
{
    static const char *const kinds[DEVICE_N_PIECES] = {
        [DEVICE_STATE] = "state", [DEVICE_GRADIENT] = "gradient", [DEVICE_WEIGHTS] = "weights",
        [DEVICE_RING] = "ring",   [DEVICE_UNDO] = "undo",         [DEVICE_POOL] = "pool",
    };

    snprintf(dst, size, "device.%s.%u", kinds[kind], local_rank);
}

static int find_pieces(struct device_keep *keep)
{
    char name[SEGMENT_NAME_BYTES];

    for (unsigned i = 0; i < keep->plan.head->n_local; i++)
        for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++) {
            print_name(name, sizeof(name), i, kind);
            keep->fds[i][kind] = segment_find(name);
            if (keep->fds[i][kind] < 0)
                return -ENODATA;
            if (keep->facts->n_bytes[i][kind] < keep->places[i].piece_bytes[kind])
                return -EBADFD;
        }
    return 0;
}

int device_keep_add(struct device_keep *keep, unsigned local_rank, enum device_piece_kind kind, int fd,
                    uint64_t n_bytes)
{
    char name[SEGMENT_NAME_BYTES];

    assert(local_rank < keep->plan.head->n_local);
    assert((unsigned)kind < DEVICE_N_PIECES);
    assert(fd >= 0);
    assert(keep->fds[local_rank][kind] < 0); /* a replaced piece might still be mapped */
    keep->fds[local_rank][kind] = fd;
    keep->facts->n_bytes[local_rank][kind] = n_bytes;
    print_name(name, sizeof(name), local_rank, kind);
    return keep_is_on() ? segment_keep(name, fd) : 0;
}

static void close_pieces(struct device_keep *keep)
{
    char name[SEGMENT_NAME_BYTES];

    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++) {
            if (keep->fds[i][kind] < 0)
                continue;
            closep(&keep->fds[i][kind]);
            print_name(name, sizeof(name), i, kind);
            segment_unkeep(name);
        }
}

/* ---- life -------------------------------------------------------------------------------------------------- */

static int init_keep(struct device_keep *keep, const struct device_plan_options *options)
{
    int r = make_segments(keep, options);

    if (r < 0)
        return r;
    keep->facts = (struct device_facts *)(void *)keep->facts_segment.map;
    for (unsigned i = 0; r == 0 && i < keep->plan.head->n_local; i++)
        r = device_rank_places_init(&keep->places[i], &keep->plan, i);
    if (r < 0)
        return r;
    device_inputs_open(&keep->plan, keep->inputs_segment.map, &keep->inputs);
    device_results_open(&keep->plan, keep->results_segment.map, &keep->results);
    return device_keep_was_found(keep) ? find_pieces(keep) : 0;
}

int device_keep_init(struct device_keep *keep, const struct device_plan_options *options)
{
    int r;

    *keep = (struct device_keep){.plan_segment = SEGMENT_NULL};
    keep->inputs_segment = keep->results_segment = keep->facts_segment = SEGMENT_NULL;
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        keep->progress_segments[i] = SEGMENT_NULL;
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++)
            keep->fds[i][kind] = -1;
    r = init_keep(keep, options);
    if (r < 0)
        device_keep_deinit(keep);
    return r;
}

int device_keep_reserve(const struct device_keep *keep)
{
    int r = segment_reserve(&keep->inputs_segment, 0, keep->inputs_segment.n_bytes);

    if (r == 0)
        r = segment_reserve(&keep->results_segment, 0, keep->results_segment.n_bytes);
    if (r == 0)
        r = segment_reserve(&keep->facts_segment, 0, keep->facts_segment.n_bytes);
    for (unsigned i = 0; r == 0 && i < keep->plan.head->n_local; i++)
        r = segment_reserve(&keep->progress_segments[i], 0, keep->progress_segments[i].n_bytes);
    return r;
}

bool device_keep_was_found(const struct device_keep *keep)
{
    return keep->facts_segment.found;
}

void device_keep_forget_ops(struct device_keep *keep)
{
    assert(!keep->in_use);
    memset(keep->results.reduced, 0, keep->plan.head->n_parcels * sizeof(*keep->results.reduced));
}

void device_keep_let_go(struct device_keep *keep)
{
    close_pieces(keep);
    segment_release_name(&keep->plan_segment);
    segment_release_name(&keep->inputs_segment);
    segment_release_name(&keep->results_segment);
    segment_release_name(&keep->facts_segment);
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        segment_release_name(&keep->progress_segments[i]);
}

void device_keep_deinit(struct device_keep *keep)
{
    assert(!keep->in_use);
    close_pieces(keep);
    segment_deinit(&keep->plan_segment);
    segment_deinit(&keep->inputs_segment);
    segment_deinit(&keep->results_segment);
    segment_deinit(&keep->facts_segment);
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        segment_deinit(&keep->progress_segments[i]);
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        device_rank_places_deinit(&keep->places[i]);
}

/* SPDX-License-Identifier: Apache-2.0 */

/* The memory of a job on GPUs outlives the engine that drives them: the daemon keeps its plan and its descriptors. */

#include "daemon/engines/device-keep.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"

static int make_segment(struct segment *segment, const char *name, uint64_t n_bytes)
{
    int r = segment_init(segment, name, n_bytes);

    return r < 0 ? r : segment_reserve(segment, 0, segment->n_bytes);
}

static int make_segments(struct device_keep *keep, const struct device_plan_options *options)
{
    char why[128];
    int r = make_segment(&keep->plan_segment, "device.plan", device_plan_bytes(options));

    if (r < 0)
        return r;
    device_plan_write(options, keep->plan_segment.map);
    r = device_plan_open(&keep->plan, keep->plan_segment.map, keep->plan_segment.n_bytes, why, sizeof(why));
    assert(r == 0); /* as written */
    r = make_segment(&keep->inputs_segment, "device.inputs", device_inputs_bytes(&keep->plan));
    if (r == 0)
        r = make_segment(&keep->results_segment, "device.results", device_results_bytes(&keep->plan, NULL));
    return r;
}

int device_keep_init(struct device_keep *keep, const struct device_plan_options *options)
{
    int r;

    *keep = (struct device_keep){.plan_segment = SEGMENT_NULL};
    keep->inputs_segment = keep->results_segment = SEGMENT_NULL;
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++)
            keep->fds[i][kind] = -1;
    r = make_segments(keep, options);
    keep->places = calloc(options->layout->n_buckets + 1, sizeof(*keep->places));
    keep->frozen = calloc(options->layout->n_params + 1, sizeof(*keep->frozen));
    if (r == 0 && (!keep->places || !keep->frozen))
        r = -ENOMEM;
    if (r < 0) {
        device_keep_deinit(keep);
        return r;
    }
    device_plan_places(&keep->plan, keep->places, keep->frozen, keep->piece_bytes);
    device_inputs_open(&keep->plan, keep->inputs_segment.map, &keep->inputs);
    device_results_open(&keep->plan, keep->results_segment.map, &keep->results);
    return 0;
}

void device_keep_deinit(struct device_keep *keep)
{
    assert(!keep->in_use);
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++)
            closep(&keep->fds[i][kind]);
    segment_deinit(&keep->plan_segment);
    segment_deinit(&keep->inputs_segment);
    segment_deinit(&keep->results_segment);
    free(keep->places);
    free(keep->frozen);
}

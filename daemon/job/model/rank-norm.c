/* SPDX-License-Identifier: Apache-2.0 */

/* Compares the norms of samples of the ranks' gradients. */

#include "daemon/job/model/rank-norm.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/step/executor.h"
#include "daemon/step/step.h"
#include "kernels/kernels.h"

enum {
    STEPS_UNTIL_SAID = 50, /* steps in a row; picked */
    LEAST_RATIO = 10,      /* ratio of two norms; ranks of one program mostly differ by less */
    LEAST_SCALE = 100,     /* LEAST_RATIO squared: a smaller loss scale does not stand out from other differences */
    BLOCK_ELEMS = 64,
    SHARE = 1024,    /* one of this many elements is read */
    MIN_BLOCKS = 4,  /* for a small parcel: 256 elements */
    MAX_BLOCKS = 64, /* per parcel and rank: 4096 elements, 16 KiB */
};

/* A sample: the same elements of all ranks. */
struct sample {
    double squares[STEP_MAX_RANKS];
    uint32_t n_blocks; /* blocks still to be read */
};

static uint64_t all_ranks(const struct job *job)
{
    return job_n_local(job) < 64 ? (UINT64_C(1) << job_n_local(job)) - 1 : UINT64_MAX;
}

static void add_block(const struct job *job, const struct reduction *reduction, uint32_t part, uint64_t elem,
                      uint64_t n_elems, struct sample *sample)
{
    enum dtype dtype = job->layout->params[job->layout->parts[part].param].grad_dtype;
    uint64_t offset_bytes = layout_part_offset_bytes(job->layout, part) + elem * dtype_size(dtype);
    float values[BLOCK_ELEMS];

    assert(n_elems <= BLOCK_ELEMS);
    assert(elem + n_elems <= job->layout->parts[part].n_elems);
    for (unsigned local = 0; local < job_n_local(job); local++) {
        job->kernels->convert_to_f32(values, reduction->sources[local] + offset_bytes, dtype, n_elems);
        for (uint64_t i = 0; i < n_elems; i++)
            sample->squares[local] += (double)values[i] * values[i];
    }
}

/* Samples blocks of the part at equal distances. The step number decides where the first block begins. */
static void sample_part(const struct job *job, const struct reduction *reduction, uint32_t part, struct sample *sample)
{
    uint64_t n_elems = job->layout->parts[part].n_elems, n_blocks = div_round_up(n_elems, (uint64_t)BLOCK_ELEMS);
    uint64_t n = MIN(div_round_up(n_elems, (uint64_t)SHARE * BLOCK_ELEMS), (uint64_t)sample->n_blocks);

    for (uint64_t i = 0; i < n; i++) {
        uint64_t elem = (i * n_blocks / n + job->ledger.step) % n_blocks * BLOCK_ELEMS;

        assert(elem < n_elems);
        add_block(job, reduction, part, elem, MIN(n_elems - elem, (uint64_t)BLOCK_ELEMS), sample);
    }
    sample->n_blocks -= (uint32_t)n;
}

/*
 * Reads a sample of the parcel. Each step begins with another part, because a parcel may have more parts than a sample
 * has blocks.
 */
static void read_sample(const struct job *job, const struct reduction *reduction, struct sample *sample)
{
    const struct layout_parcel *parcel = &job->layout->parcels[reduction->parcel];
    uint64_t n_blocks = div_round_up(parcel->n_elems, (uint64_t)SHARE * BLOCK_ELEMS);

    sample->n_blocks = (uint32_t)MIN(MAX(n_blocks, (uint64_t)MIN_BLOCKS), (uint64_t)MAX_BLOCKS);
    for (uint32_t i = 0; sample->n_blocks > 0 && i < parcel->n_parts; i++) {
        uint32_t k = (uint32_t)((i + job->ledger.step / job->layout->n_parcels) % parcel->n_parts);

        if (reduction->masks[k] == all_ranks(job))
            sample_part(job, reduction, parcel->first_part + k, sample);
    }
}

/* Finds the rank with the largest norm. Return: false if the sample is unusable: all zeros on a rank, or not finite. */
static bool find_largest(const struct job *job, const struct sample *sample, unsigned *largest)
{
    *largest = 0;
    for (unsigned local = 0; local < job_n_local(job); local++) {
        if (sample->squares[local] == 0 || !isfinite(sample->squares[local]))
            return false;
        if (sample->squares[local] > sample->squares[*largest])
            *largest = local;
    }
    return true;
}

static void say_unscaled(struct job *job, const bool *set, unsigned n_set, unsigned last, double ratio)
{
    job->rank_norm.is_unscaled_said = true;
    job_keep(job, cause_unscaled(&(struct evidence_unscaled){
                      .at = {.layout = job->layout,
                             .rank = n_set == 1 ? (int64_t)last : -1,
                             .step = (int64_t)job->ledger.step,
                             .micro_batch = -1,
                             .client = job_client(job)},
                      .set = set,
                      .world_size = job->world.size,
                      .ratio = ratio,
                      .loss_scale = job_loss_scale(job),
                  }));
}

/*
 * Reports ranks that did not scale their loss: their norms are smaller than the largest one by about the loss scale.
 * Reports none if another norm is neither near the largest one nor smaller by about that factor.
 */
static void find_unscaled(struct job *job, const struct sample *sample, unsigned largest)
{
    _cleanup_free_ bool *set = calloc(job->world.size, sizeof(*set));
    double scale = job_loss_scale(job), least = INFINITY;
    unsigned n_set = 0, last = 0;

    if (!set || job->rank_norm.is_unscaled_said || scale < LEAST_SCALE)
        return;
    for (unsigned local = 0; local < job_n_local(job); local++) {
        double ratio = sqrt(sample->squares[largest] / sample->squares[local]);

        if (ratio <= LEAST_RATIO)
            continue;
        if (ratio < scale / LEAST_RATIO || ratio > scale * LEAST_RATIO)
            return;
        last = job->world.first + local;
        set[last] = true;
        least = fmin(least, ratio);
        n_set++;
    }
    if (n_set > 0)
        say_unscaled(job, set, n_set, last, least);
}

/* Counts a step in which one rank's norm is far larger than every other rank's. */
static void compare_norms(struct job *job, const struct sample *sample, unsigned largest)
{
    struct job_rank_norm *norm = &job->rank_norm;
    double next = 0, ratio;

    for (unsigned local = 0; local < job_n_local(job); local++)
        if (local != largest)
            next = fmax(next, sample->squares[local]);
    assert(next > 0); /* find_largest() accepts no sample with zeros */
    ratio = sqrt(sample->squares[largest] / next);
    if (ratio < LEAST_RATIO || job->world.first + largest != norm->rank)
        norm->n_in_a_row = 0;
    norm->rank = job->world.first + largest;
    if (ratio < LEAST_RATIO)
        return;
    norm->least_ratio = norm->n_in_a_row > 0 ? fmin(norm->least_ratio, ratio) : ratio;
    norm->n_in_a_row++;
}

void rank_norm_look_at(struct job *job, const struct reduction *reduction)
{
    struct sample sample = {.n_blocks = 0};
    unsigned largest;

    assert(job_n_local(job) <= STEP_MAX_RANKS);
    if (job_n_local(job) < 2 || job->executor->on_gpus ||
        reduction->parcel != job->ledger.step % job->layout->n_parcels || reduction->micro_batch > 0 ||
        reduction->pass > 0 || job->rank_norm.looked_at == job->ledger.step + 1)
        return;
    for (unsigned local = 0; local < job_n_local(job); local++)
        if (!reduction->sources[local])
            return;
    job->rank_norm.looked_at = job->ledger.step + 1;
    read_sample(job, reduction, &sample);
    if (!find_largest(job, &sample, &largest))
        return;
    find_unscaled(job, &sample, largest);
    compare_norms(job, &sample, largest);
}

void rank_norm_find(const struct job *job, struct findings *findings)
{
    const struct job_rank_norm *norm = &job->rank_norm;
    struct finding *finding = norm->n_in_a_row >= STEPS_UNTIL_SAID ? findings_add(findings, FINDING_RANK_NORM) : NULL;

    if (!finding)
        return;
    finding->rank = norm->rank;
    snprintf(
        finding->text, sizeof(finding->text),
        "the gradients of rank %u were at least %.0f times as large as those of each other rank of this node in each "
        "of the last %" PRIu32 " steps that were compared: its loss may be a sum and not a mean, its data may not be "
        "scaled as the others', or its batches may be far smaller",
        norm->rank, floor(norm->least_ratio), norm->n_in_a_row);
}

/* SPDX-License-Identifier: Apache-2.0 */

/* Counts the operations that Muon needs in a step, and measures how fast this machine executes them. */

#include "core/budget/muon-cost.h"

#include <assert.h>
#include <time.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "kernels/muon.h"

enum { MEASURED_SIDE = 512 }; /* a side of 1024 is faster by 3 % [2026-11-27, AMD EPYC] */

void muon_cost_count(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned ns_steps,
                     struct muon_cost *out)
{
    *out = (struct muon_cost){0};
    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        double flops;

        if (!layout_owns_matrix(layout, p, first_rank, n_ranks))
            continue;
        flops = muon_flops((struct muon_shape){param->shape[0], param->shape[1]}, ns_steps);
        out->n_matrices++;
        out->n_elems += param->n_elems;
        out->flops += flops;
        out->largest_flops = MAX(out->largest_flops, flops);
    }
}

static double now(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

double muon_cost_measure(const struct gemm *gemm)
{
    const struct muon_shape shape = {MEASURED_SIDE, MEASURED_SIDE};
    const struct hyper hyper = {.ns_coefficients = {1.5, -0.5, 0}, .ns_steps = 2, .eps = 1e-8};
    _cleanup_free_ float *matrix = calloc(shape.rows * shape.cols, sizeof(float));
    _cleanup_free_ float *scratch = aligned_alloc(64, muon_scratch_elems(shape) * sizeof(float));
    double began = 0;

    if (!matrix || !scratch)
        return 0;
    for (uint64_t i = 0; i < shape.rows * shape.cols; i++)
        matrix[i] = (float)((uint32_t)i * 2654435761u >> 16) - 32768;
    for (unsigned i = 0; i < 2; i++) { /* the first run clears pages, and does not count */
        began = now();
        (void)muon_orthogonalize(gemm, shape, matrix, &hyper, scratch, NULL);
    }
    return muon_flops(shape, hyper.ns_steps) / MAX(now() - began, 1e-9);
}

double muon_cost_seconds(const struct muon_cost *cost, double flops_per_second, unsigned n_threads)
{
    assert(flops_per_second > 0);
    assert(n_threads > 0);
    return MAX(cost->flops / MIN(n_threads, (unsigned)GEMM_MAX_CALLERS), cost->largest_flops) / flops_per_second;
}

/* SPDX-License-Identifier: Apache-2.0 */

/* The optimizer step in one process, written from docs/numerics.md. */

#include "tests/example/reference_step.h"

#include <assert.h>
#include <math.h>

#define N_LANES 8
#define RUN 64

/*
 * Shewchuk's growing expansion: each addition is split into its rounded sum and its exact error, and the errors are
 * kept. (J. R. Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997; math.fsum of Python does the same.)
 */
void exact_sum_add(struct exact_sum *s, double x)
{
    unsigned n = 0;

    for (unsigned i = 0; i < s->n_partials; i++) {
        double y = s->partials[i];
        double big = fabs(x) < fabs(y) ? y : x;
        double small = fabs(x) < fabs(y) ? x : y;
        double sum = big + small;
        double error = small - (sum - big);

        if (error != 0)
            s->partials[n++] = error;
        x = sum;
    }
    assert(n < EXACT_SUM_PARTIALS);
    s->partials[n] = x;
    s->n_partials = n + 1;
}

double exact_sum_round(const struct exact_sum *s)
{
    unsigned n = s->n_partials;
    double high, low = 0;

    if (n == 0)
        return 0;
    high = s->partials[--n];
    while (n > 0) {
        double x = high, y = s->partials[--n];

        high = x + y;
        low = y - (high - x);
        if (low != 0)
            break;
    }
    /*
     * If the sum lies half way between two doubles, the sign of the next partial sum decides the rounding, not
     * evenness.
     */
    if (n > 0 && ((low < 0 && s->partials[n - 1] < 0) || (low > 0 && s->partials[n - 1] > 0))) {
        double twice = low * 2, moved = high + twice;

        if (twice == moved - high)
            high = moved;
    }
    return high;
}

/* Sums one element over the ranks first to first + n - 1: left half of the tree + right half. */
static float tree_sum(const float *const *grads, size_t e, unsigned first, unsigned n)
{
    unsigned left = 1;

    if (n == 1)
        return grads[first][e];
    while (left * 2 < n)
        left *= 2;
    return tree_sum(grads, e, first, left) + tree_sum(grads, e, first + left, n - left);
}

void reference_accumulate(float *acc, const float *const *grads, unsigned n_ranks, size_t n_elems)
{
    for (size_t e = 0; e < n_elems; e++)
        acc[e] = acc[e] + tree_sum(grads, e, 0, n_ranks);
}

static double run_squares(const float *acc, size_t n)
{
    double lane[N_LANES] = {0};

    for (size_t i = 0; i < n; i++)
        lane[i % N_LANES] += (double)acc[i] * (double)acc[i];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* Return: the norm of the mean gradient over all parameters, before clipping. */
static double norm_of(const struct reference_param *params, unsigned n_params, unsigned n_ranks)
{
    struct exact_sum total = {0};

    for (unsigned i = 0; i < n_params; i++)
        for (size_t at = 0; at < params[i].n_elems; at += RUN) {
            size_t n = params[i].n_elems - at;
            double squares = run_squares(params[i].acc + at, n < RUN ? n : RUN);

            if (!isfinite(squares))
                return NAN;
            exact_sum_add(&total, squares);
        }
    return sqrt(exact_sum_round(&total)) / n_ranks;
}

static void adamw_update(const struct reference_param *param, const struct reference_adamw *a, float s)
{
    float decay = (float)(1 - a->lr * a->weight_decay);
    float b1 = (float)a->beta1, c1 = (float)(1 - a->beta1);
    float b2 = (float)a->beta2, c2 = (float)(1 - a->beta2);
    float alpha = (float)(a->lr / (1 - pow(a->beta1, (double)a->t)));
    float q = (float)(1 / sqrt(1 - pow(a->beta2, (double)a->t)));
    float eps = (float)a->eps;

    for (size_t e = 0; e < param->n_elems; e++) {
        float g = param->acc[e] * s;
        float p = param->weight[e] * decay;
        float m = param->exp_avg[e] * b1 + g * c1;
        float v = param->exp_avg_sq[e] * b2 + (g * g) * c2;

        param->exp_avg[e] = m;
        param->exp_avg_sq[e] = v;
        param->weight[e] = p - alpha * (m / (sqrtf(v) * q + eps));
    }
}

bool reference_step(const struct reference_param *params, unsigned n_params, const struct reference_adamw *a,
                    double *norm)
{
    double coef = 1;

    *norm = norm_of(params, n_params, a->n_ranks);
    if (!isfinite(*norm))
        return false;
    if (a->max_norm > 0 && a->max_norm / (*norm + 1e-6) < 1)
        coef = a->max_norm / (*norm + 1e-6);
    for (unsigned i = 0; i < n_params; i++)
        adamw_update(&params[i], a, (float)(coef / a->n_ranks));
    return true;
}

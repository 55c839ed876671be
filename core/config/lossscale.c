/* SPDX-License-Identifier: Apache-2.0 */

/* The loss scale follows DeepSpeed's rules, static or dynamic; lossscale.h describes them. */

#include "core/config/lossscale.h"

#include <assert.h>
#include <math.h>

/*
 * Doubling stops at this scale. Trainers hold the scaled loss in fp32, which ends at 2^128, so no run with a loss gets
 * this far. If all gradients are zero, the scale would otherwise double to infinity, and 0 x infinity is NaN.
 */
static const double largest_scale = 0x1p127;

/* Halving stops at this scale at the latest. Below it, fp32 loses bits, and finally gradients would be divided by 0. */
static const double smallest_scale = 0x1p-126;

static double lowest_scale(const struct lossscale *ls)
{
    return fmax(ls->params.min_scale, smallest_scale);
}

void lossscale_init_off(struct lossscale *ls)
{
    *ls = (struct lossscale){.scale = 1.0};
}

void lossscale_init(struct lossscale *ls, const struct lossscale_params *params)
{
    bool dynamic = params->static_scale == 0;

    assert(!dynamic || params->window > 0);
    assert(!dynamic || params->hysteresis > 0);
    *ls = (struct lossscale){
        .params = *params,
        .dynamic = dynamic,
        .scale = dynamic ? ldexp(1.0, (int)params->initial_power) : params->static_scale,
        .hysteresis_left = params->hysteresis,
    };
}

bool lossscale_is_at_minimum(const struct lossscale *ls)
{
    return ls->dynamic && ls->hysteresis_left <= 1 && ls->scale <= lowest_scale(ls);
}

static int lossscale_lower(struct lossscale *ls)
{
    if (ls->hysteresis_left > 1) {
        ls->hysteresis_left--;
        return 0;
    }
    if (lossscale_is_at_minimum(ls))
        return LOSSSCALE_E_AT_MINIMUM;

    /* The last unit of hysteresis is not refilled, so the next overflow halves the scale at once. */
    ls->scale = fmax(ls->scale / 2, lowest_scale(ls));
    return 0;
}

static void lossscale_raise(struct lossscale *ls)
{
    uint64_t n_clean = ls->n_steps - ls->window_start; /* steps without overflow before this step */

    if (ls->params.consecutive_hysteresis)
        ls->hysteresis_left = ls->params.hysteresis;
    if (n_clean == 0 || n_clean % ls->params.window != 0)
        return;

    ls->hysteresis_left = ls->params.hysteresis;
    if (ls->scale < largest_scale)
        ls->scale *= 2;
}

int lossscale_update(struct lossscale *ls, bool overflow)
{
    int r = 0;

    if (!ls->dynamic)
        return 0;

    if (overflow) {
        r = lossscale_lower(ls);
        ls->window_start = ls->n_steps + 1;
    } else {
        lossscale_raise(ls);
    }
    ls->n_steps++;
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The loss scale of fp16 training is static, or dynamic as in DeepSpeed. A dynamic scale stays just below the largest
 * scale that does not overflow. Pure: the caller reports after each decided step whether it overflowed, and reads the
 * scale of the next step. Trainers multiply their loss by the scale, and the step divides by it.
 *
 * Dynamic: the scale starts at 2^initial_power. An overflow uses up one unit of hysteresis; if only one unit is left,
 * the overflow halves the scale instead, but never below min_scale. Steps without overflow are counted from the last
 * overflow. A step without overflow that follows a whole number of windows doubles the scale and refills the hysteresis
 * (so the first doubling comes with step window + 1, the second with step 2 * window + 1). With consecutive_hysteresis
 * every step without overflow refills the hysteresis. Skipped steps count too, because the scale depends on attempts,
 * not on updates.
 */

#include <stdbool.h>
#include <stdint.h>

enum {
    LOSSSCALE_E_AT_MINIMUM = 1, /* E1202: an overflow while the scale is at its minimum */
};

/* The section fp16 of the configuration. */
struct lossscale_params {
    double static_scale;    /* > 0: a static scale; 0: dynamic */
    unsigned initial_power; /* the dynamic scale starts at 2^initial_power */
    uint64_t window;        /* steps without overflow before the step that doubles the scale, at least 1 */
    unsigned hysteresis;    /* overflows until the scale halves, at least 1 */
    bool consecutive_hysteresis;
    double min_scale; /* 0: the minimum is 2^-126 */
};

struct lossscale {
    struct lossscale_params params;
    bool dynamic;
    double scale; /* the scale of the next step */
    unsigned hysteresis_left;
    uint64_t n_steps;      /* steps decided so far, skipped ones included */
    uint64_t window_start; /* the step after the last overflow */
};

/* For training without a loss scale: the scale stays 1. */
void lossscale_init_off(struct lossscale *ls);
void lossscale_init(struct lossscale *ls, const struct lossscale_params *params);

/* Is the scale at its minimum, so that one more overflow cannot lower it? */
bool lossscale_is_at_minimum(const struct lossscale *ls);

/*
 * Updates the scale after a decided step. overflow: the step was skipped because its gradients were not finite. Return:
 * 0, or LOSSSCALE_E_AT_MINIMUM if skipping alone cannot help any more; then the scale is unchanged. A static scale
 * never changes and always returns 0.
 */
int lossscale_update(struct lossscale *ls, bool overflow);

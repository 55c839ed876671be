/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The loss scale of fp16 training: a static figure, or DeepSpeed's dynamic one, which rides just below the
 * largest scale that does not overflow. Pure: told after each decided step whether that step overflowed, it
 * says which scale the next one uses. Trainers multiply their loss by the scale, the step divides by it.
 *
 * Dynamic: the scale starts at 2^initial_power. An overflow takes one unit of hysteresis; with one unit left
 * it halves the scale instead, never below min_scale. A step without overflow that follows a whole number of
 * windows of such steps doubles the scale, and refills the hysteresis (so the first doubling comes with step
 * window + 1, the second with step 2 * window + 1); with consecutive_hysteresis every step without overflow
 * refills it. Skipped steps count in the window, because the scale moves with attempts, not with updates.
 */

#include <stdbool.h>
#include <stdint.h>

enum {
    LOSSSCALE_E_AT_MINIMUM = 1, /* E1202: an overflow while the scale cannot go down any more */
};

/* As in the section fp16 of the configuration. */
struct lossscale_params {
    double static_scale;    /* > 0: this scale, for ever; 0: dynamic */
    unsigned initial_power; /* the dynamic scale starts at 2^initial_power */
    uint64_t window;        /* steps without overflow after which the next one doubles the scale, at least 1 */
    unsigned hysteresis;    /* overflows until it halves, at least 1 */
    bool consecutive_hysteresis;
    double min_scale; /* 0: none of its own */
};

struct lossscale {
    struct lossscale_params params;
    bool dynamic;
    double scale; /* of the next step */
    unsigned hysteresis_left;
    uint64_t n_steps;      /* steps decided so far, skipped ones included */
    uint64_t window_start; /* the step after the last overflow */
};

/* For training without a loss scale: 1, and stays there. */
void lossscale_init_off(struct lossscale *ls);
void lossscale_init(struct lossscale *ls, const struct lossscale_params *params);

/* Would one more overflow find nothing left to lower? */
bool lossscale_is_at_minimum(const struct lossscale *ls);

/*
 * A step was decided with ls->scale; overflow: it was skipped because its gradients were not finite.
 * Return: 0, or LOSSSCALE_E_AT_MINIMUM: skipping alone will not help any more. The scale stays what it was.
 * A static scale never changes and always returns 0.
 */
int lossscale_update(struct lossscale *ls, bool overflow);

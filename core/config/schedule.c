/* SPDX-License-Identifier: Apache-2.0 */

/* Schedules compute the learning rate of a step by DeepSpeed's formulas. */

#include "core/config/schedule.h"

#include "core/base/base.h"

#include <assert.h>
#include <math.h>

static uint64_t warmup_steps(const struct schedule *schedule)
{
    return MAX(schedule->warmup_num_steps, (uint64_t)2); /* with 1 step, log(1) = 0 would be a divisor */
}

/*
 * Return: the position in the warm-up, from 0 to 1. The formulas keep DeepSpeed's order of operations, to get the same
 * bits.
 */
static double warmup_progress(const struct schedule *schedule, uint64_t iteration)
{
    double n_steps = (double)warmup_steps(schedule);

    assert(iteration < warmup_steps(schedule));
    if (schedule->warmup_type == SCHEDULE_WARMUP_LINEAR)
        return (double)iteration / n_steps;
    return 1.0 / log(n_steps) * log((double)iteration + 1.0);
}

/* Return: a value that falls linearly from 1 at the end of the warm-up to 0 at total_num_steps. */
static double decay_progress(const struct schedule *schedule, uint64_t iteration)
{
    double total = (double)schedule->total_num_steps;
    double length = fmax(1.0, total - (double)warmup_steps(schedule));

    assert(iteration >= warmup_steps(schedule));
    return fmax(0.0, (total - (double)iteration) / length);
}

/* Return: the factor of the group's lr. After the last step the factor stays at cos_min_ratio and does not rise
 * again. */
static double cosine_ratio(const struct schedule *schedule, uint64_t iteration)
{
    uint64_t n_warmup = warmup_steps(schedule);
    double min = schedule->cos_min_ratio;
    double length, progress;

    if (iteration < n_warmup) {
        min = schedule->warmup_min_ratio;
        return min + warmup_progress(schedule, iteration) * (1.0 - min);
    }
    length = fmax(1.0, (double)schedule->total_num_steps - (double)n_warmup);
    progress = fmin(1.0, (double)(iteration - n_warmup + 1) / length);
    return fmax(0.0, min + (1.0 - min) * ((1.0 + cos(M_PI * progress)) / 2.0));
}

static double pick(const struct schedule_numbers *numbers, size_t group)
{
    assert(numbers->n_items > 0);
    return numbers->items[numbers->n_items == 1 ? 0 : group];
}

static double linear_lr(const struct schedule *schedule, const double *base_lr, size_t group, uint64_t iteration)
{
    double min = pick(&schedule->warmup_min_lr, group);
    double max = schedule->warmup_max_lr.n_items > 0 ? pick(&schedule->warmup_max_lr, group) : base_lr[group];
    double gamma = 1.0;

    if (iteration < warmup_steps(schedule))
        gamma = warmup_progress(schedule, iteration);
    else if (schedule->type == SCHEDULE_WARMUP_DECAY)
        gamma = decay_progress(schedule, iteration);
    return min + (max - min) * gamma;
}

static bool fits_groups(const struct schedule_numbers *numbers, size_t n_groups)
{
    return numbers->n_items <= 1 || numbers->n_items == n_groups;
}

int schedule_check_groups(const struct schedule *schedule, size_t n_groups, const char **key)
{
    if (!fits_groups(&schedule->warmup_min_lr, n_groups)) {
        *key = "scheduler.params.warmup_min_lr";
        return SCHEDULE_E_GROUPS;
    }
    if (!fits_groups(&schedule->warmup_max_lr, n_groups)) {
        *key = "scheduler.params.warmup_max_lr";
        return SCHEDULE_E_GROUPS;
    }
    return 0;
}

double schedule_lr(const struct schedule *schedule, const double *base_lr, size_t n_groups, size_t group,
                   uint64_t n_applied)
{
    assert(group < n_groups);

    if (schedule->type == SCHEDULE_NONE)
        return base_lr[group];
    if (n_applied == 0)
        return schedule->type == SCHEDULE_WARMUP_COSINE ? 0.0 : pick(&schedule->warmup_min_lr, group);
    if (schedule->type == SCHEDULE_WARMUP_COSINE)
        return base_lr[group] * cosine_ratio(schedule, n_applied - 1);
    return linear_lr(schedule, base_lr, group, n_applied - 1);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Learning rate schedules, DeepSpeed's by name, parameters and formula: WarmupLR, WarmupDecayLR,
 * WarmupCosineLR. Pure functions of the number of steps applied so far: skipped steps do not count, nothing
 * is stored, so a resumed job continues where it was.
 *
 * As in DeepSpeed the very first step runs before the schedule has begun: it uses warmup_min_lr (0 by
 * default), and 0 under WarmupCosineLR.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum schedule_type {
    SCHEDULE_NONE, /* lr stays what the group says */
    SCHEDULE_WARMUP,
    SCHEDULE_WARMUP_DECAY,
    SCHEDULE_WARMUP_COSINE,
};

enum schedule_warmup {
    SCHEDULE_WARMUP_LOG,
    SCHEDULE_WARMUP_LINEAR,
};

enum {
    SCHEDULE_E_GROUPS = 1, /* a list of the schedule has another length than there are groups */
};

/* One number for all groups, or one for each. */
struct schedule_numbers {
    double *items;
    size_t n_items;
};

struct schedule {
    enum schedule_type type;
    enum schedule_warmup warmup_type;
    uint64_t warmup_num_steps;             /* less than 2 is taken as 2, as in DeepSpeed */
    uint64_t total_num_steps;              /* decay, cosine */
    struct schedule_numbers warmup_min_lr; /* warmup, decay */
    struct schedule_numbers warmup_max_lr; /* warmup, decay; warmup alone: empty means each group's lr */
    double warmup_min_ratio;               /* cosine: of the group's lr */
    double cos_min_ratio;                  /* cosine: of the group's lr */
};

/* Call when the job is formed. Return: 0, or SCHEDULE_E_GROUPS and the name of the offending key in *key. */
int schedule_check_groups(const struct schedule *schedule, size_t n_groups, const char **key);

/* Does it start from the groups' lr? Else it has rates of its own. */
static inline bool schedule_starts_from_lr(const struct schedule *schedule)
{
    return schedule->type != SCHEDULE_NONE && schedule->warmup_max_lr.n_items == 0;
}

/*
 * base_lr: each group's lr as configured or declared, n_groups >= 1 of them. n_applied: steps applied before
 * the one that asks. Return: the lr of this group for that step. schedule_check_groups must have passed.
 */
double schedule_lr(const struct schedule *schedule, const double *base_lr, size_t n_groups, size_t group,
                   uint64_t n_applied);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * DeepSpeed's learning rate schedules, with its names, parameters and formulas: WarmupLR, WarmupDecayLR,
 * WarmupCosineLR. They are pure functions of the number of applied steps. Skipped steps do not count. They store
 * nothing, so a resumed job continues with the rate that it had.
 *
 * As in DeepSpeed, the first step runs before the schedule begins. Its rate is warmup_min_lr (0 by default), and 0
 * under WarmupCosineLR.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum schedule_type {
    SCHEDULE_NONE, /* lr stays the group's lr */
    SCHEDULE_WARMUP,
    SCHEDULE_WARMUP_DECAY,
    SCHEDULE_WARMUP_COSINE,
};

enum schedule_warmup {
    SCHEDULE_WARMUP_LOG,
    SCHEDULE_WARMUP_LINEAR,
};

enum {
    SCHEDULE_E_GROUPS = 1, /* a list of the schedule has another length than the number of groups */
};

/* One number for all groups, or one number for each group. */
struct schedule_numbers {
    double *items;
    size_t n_items;
};

struct schedule {
    enum schedule_type type;
    enum schedule_warmup warmup_type;
    uint64_t warmup_num_steps;             /* less than 2 counts as 2, as in DeepSpeed */
    uint64_t total_num_steps;              /* for decay and cosine */
    struct schedule_numbers warmup_min_lr; /* for warmup and decay */
    struct schedule_numbers warmup_max_lr; /* for warmup and decay; empty, with warmup alone: each group's lr */
    double warmup_min_ratio;               /* for cosine: fraction of the group's lr */
    double cos_min_ratio;                  /* for cosine: fraction of the group's lr */
};

/*
 * Checks the schedule when the job is formed. Return: 0, or SCHEDULE_E_GROUPS with the name of the wrong key in *key.
 */
int schedule_check_groups(const struct schedule *schedule, size_t n_groups, const char **key);

/* Does the schedule start from the groups' lr? If not, it has its own rates. */
static inline bool schedule_starts_from_lr(const struct schedule *schedule)
{
    return schedule->type != SCHEDULE_NONE && schedule->warmup_max_lr.n_items == 0;
}

/*
 * Return: the lr of this group for the next step. base_lr: the configured or declared lr of each of n_groups >= 1
 * groups. n_applied: the number of steps applied so far. schedule_check_groups() must have passed.
 */
double schedule_lr(const struct schedule *schedule, const double *base_lr, size_t n_groups, size_t group,
                   uint64_t n_applied);

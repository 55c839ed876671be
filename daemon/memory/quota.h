/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Memory quotas. A quota limits the sum of its charges. A caller charges an amount and then allocates the memory. The
 * charge is a field of the object that needs the memory, and is released with the object. Releasing a charge twice is
 * harmless. The headroom of the machine is the memory that this process can still allocate without being killed.
 */

#include <stdint.h>

struct quota {
    uint64_t limit; /* UINT64_MAX: no limit */
    uint64_t used;
};

struct charge {
    struct quota *quota; /* NULL: nothing charged */
    uint64_t amount;
};

enum {
    QUOTA_E_OVER = 1,
};

#define CHARGE_NULL ((struct charge){0})

/*
 * Charges the amount to the quota. The charge must be empty. Return: 0, or QUOTA_E_OVER if the limit would be exceeded.
 * Then nothing is charged.
 */
int quota_charge(struct quota *quota, struct charge *charge, uint64_t amount);
/* Adds to a charge, which may be empty. Return: 0, or QUOTA_E_OVER. Then the charge does not change. */
int quota_charge_more(struct quota *quota, struct charge *charge, uint64_t amount);
void charge_deinit(struct charge *charge);

/* The source of the tightest bound on memory. */
enum memory_bound {
    MEMORY_BOUND_LIMIT,     /* limits.memory */
    MEMORY_BOUND_AVAILABLE, /* MemAvailable of /proc/meminfo */
    MEMORY_BOUND_CGROUP,    /* limit minus usage of this process's cgroup or an ancestor */
};

struct memory_headroom {
    uint64_t available_bytes; /* MemAvailable */
    uint64_t cgroup_bytes;    /* UINT64_MAX: no cgroup has a limit */
};

/*
 * Reads the headroom from proc_root and cgroup_root, which are "/proc" and "/sys/fs/cgroup" except in tests. A file
 * that cannot be read sets no bound, because a container without /proc/meminfo must not stop a job.
 */
void memory_headroom_read(struct memory_headroom *headroom, const char *proc_root, const char *cgroup_root);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Quotas of memory: a quota has a limit, a charge is a part of it. Charge first, then allocate: the charge lives inside
 * the object that needs the memory and is released with it; releasing twice is fine. Also the headroom of the machine:
 * the memory that this process could still allocate without being killed for it.
 */

#include <stdint.h>

struct quota {
    uint64_t limit; /* UINT64_MAX: none */
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

/* Asserts that charge is empty. Return: 0 or QUOTA_E_OVER, then nothing is charged. */
int quota_charge(struct quota *quota, struct charge *charge, uint64_t amount);
/* Adds to a charge, which may be empty. Return: as quota_charge(); on QUOTA_E_OVER the charge does not change. */
int quota_charge_more(struct quota *quota, struct charge *charge, uint64_t amount);
void charge_deinit(struct charge *charge);

/* Where the tightest bound on memory comes from. */
enum memory_bound {
    MEMORY_BOUND_LIMIT,     /* limits.memory */
    MEMORY_BOUND_AVAILABLE, /* MemAvailable of /proc/meminfo */
    MEMORY_BOUND_CGROUP,    /* limit less usage of this process's cgroup or one above it */
};

struct memory_headroom {
    uint64_t available_bytes; /* MemAvailable */
    uint64_t cgroup_bytes;    /* UINT64_MAX: no limit found */
};

/*
 * Reads proc_root "/proc" and sys_root "/sys/fs/cgroup" (other roots in tests). A file that cannot be read counts as no
 * bound, because a container without /proc/meminfo must not stop a job.
 */
void memory_headroom_read(struct memory_headroom *headroom, const char *proc_root, const char *cgroup_root);

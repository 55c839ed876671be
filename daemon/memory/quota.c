/* SPDX-License-Identifier: Apache-2.0 */

/* Counts charges against a quota's limit, and reads the headroom of the machine. */

#include "daemon/memory/quota.h"

#include <assert.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"

int quota_charge(struct quota *quota, struct charge *charge, uint64_t amount)
{
    assert(!charge->quota);
    return quota_charge_more(quota, charge, amount);
}

int quota_charge_more(struct quota *quota, struct charge *charge, uint64_t amount)
{
    assert(!charge->quota || charge->quota == quota);
    assert(charge->quota || charge->amount == 0);
    assert(quota->used <= quota->limit);
    if (amount > quota->limit - quota->used)
        return QUOTA_E_OVER;
    quota->used += amount;
    charge->quota = quota;
    charge->amount += amount;
    return 0;
}

void charge_deinit(struct charge *charge)
{
    if (charge->quota) {
        assert(charge->quota->used >= charge->amount);
        charge->quota->used -= charge->amount;
    }
    *charge = CHARGE_NULL;
}

static void fclosep(FILE **f)
{
    if (*f)
        fclose(*f);
}

/* Return: the number in the file, or UINT64_MAX if the file has "max" or no number. */
static uint64_t read_number(const char *path)
{
    _cleanup_(fclosep) FILE *f = fopen(path, "re");
    uint64_t value;

    if (!f || fscanf(f, "%" SCNu64, &value) != 1)
        return UINT64_MAX;
    return value;
}

static uint64_t read_available(const char *proc_root)
{
    _cleanup_(fclosep) FILE *f = NULL;
    char path[PATH_MAX], line[256];
    uint64_t kib;

    snprintf(path, sizeof(path), "%s/meminfo", proc_root);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1)
            return kib * 1024;
    return UINT64_MAX;
}

/*
 * Return: the headroom of one cgroup. The kernel's usage includes page cache that can be reclaimed, so inactive file
 * pages are subtracted from it.
 */
static uint64_t folder_headroom(const char *folder, const char *limit_name, const char *usage_name)
{
    _cleanup_(fclosep) FILE *f = NULL;
    char path[PATH_MAX + 64], key[64];
    uint64_t limit, usage, value, reclaimable = 0;

    snprintf(path, sizeof(path), "%s/%s", folder, limit_name);
    limit = read_number(path);
    snprintf(path, sizeof(path), "%s/%s", folder, usage_name);
    usage = read_number(path);
    /* In cgroup v1 a number near the top of int64 means no limit. */
    if (limit >= (UINT64_C(1) << 62) || usage == UINT64_MAX)
        return UINT64_MAX;
    snprintf(path, sizeof(path), "%s/memory.stat", folder);
    f = fopen(path, "re");
    while (f && fscanf(f, "%63s %" SCNu64, key, &value) == 2)
        if (strcmp(key, "inactive_file") == 0 || strcmp(key, "total_inactive_file") == 0)
            reclaimable = MAX(reclaimable, value);
    usage = usage > reclaimable ? usage - reclaimable : 0;
    return limit > usage ? limit - usage : 0;
}

/* Return: the least headroom among this process's cgroup and the ancestors of that cgroup. */
static uint64_t walk_up(const char *root, const char *group, const char *limit_name, const char *usage_name)
{
    char folder[PATH_MAX];
    uint64_t least = UINT64_MAX;
    size_t root_len = strlen(root);
    char *slash;

    if ((size_t)snprintf(folder, sizeof(folder), "%s%s", root, group) >= sizeof(folder))
        return UINT64_MAX;
    for (;;) {
        uint64_t here = folder_headroom(folder, limit_name, usage_name);

        least = MIN(least, here);
        slash = strrchr(folder, '/');
        if (!slash || (size_t)(slash - folder) < root_len)
            return least;
        *slash = '\0';
    }
}

/*
 * Return: the headroom of this process's cgroups. In /proc/self/cgroup the line "0::/a/b" is of cgroup v2, and
 * "9:memory:/a/b" of v1.
 */
static uint64_t read_cgroup(const char *proc_root, const char *cgroup_root)
{
    _cleanup_(fclosep) FILE *f = NULL;
    char path[PATH_MAX], line[PATH_MAX], memory_root[PATH_MAX];
    uint64_t least = UINT64_MAX, here;

    snprintf(path, sizeof(path), "%s/self/cgroup", proc_root);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f)) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;

        if (!group)
            continue;
        *group++ = '\0';
        controllers++;
        group[strcspn(group, "\n")] = '\0';
        if (strcmp(group, "/") == 0)
            *group = '\0';
        if (!*controllers) {
            here = walk_up(cgroup_root, group, "memory.max", "memory.current");
        } else if (strcmp(controllers, "memory") == 0) {
            snprintf(memory_root, sizeof(memory_root), "%s/memory", cgroup_root);
            here = walk_up(memory_root, group, "memory.limit_in_bytes", "memory.usage_in_bytes");
        } else {
            continue;
        }
        least = MIN(least, here);
    }
    return least;
}

void memory_headroom_read(struct memory_headroom *headroom, const char *proc_root, const char *cgroup_root)
{
    headroom->available_bytes = read_available(proc_root);
    headroom->cgroup_bytes = read_cgroup(proc_root, cgroup_root);
}

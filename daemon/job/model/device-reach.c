/* SPDX-License-Identifier: Apache-2.0 */

/* The reason why CUDA does not share a trainer's events with the engine, found in /proc. */

#include "daemon/job/model/device-reach.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/base.h"

/* Has the process another /dev/shm? Return: 1: another one; 0: this process's; negative: that cannot be seen. */
static int has_other_shm(int64_t pid)
{
    static const char shm[] = "/dev/shm";
    char path[64];
    struct stat own, its;

    snprintf(path, sizeof(path), "/proc/%" PRId64 "/root%s", pid, shm);
    if (stat(shm, &own) < 0 || stat(path, &its) < 0)
        return -1;
    return own.st_dev != its.st_dev || own.st_ino != its.st_ino;
}

enum evidence_reach device_reach(int64_t pid, uint32_t uid)
{
    int other = pid > 0 ? has_other_shm(pid) : -1;

    if (other > 0)
        return REACH_OTHER_SHM;
    if (uid != geteuid())
        return REACH_OTHER_USER;
    return other == 0 ? REACH_SAME : REACH_UNKNOWN;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The limit of this process (setrlimit) that made a call fail. */

#include <stdint.h>

struct process_limit {
    enum {
        PROCESS_LIMIT_NONE,
        PROCESS_LIMIT_OPEN_FILES,    /* RLIMIT_NOFILE, ulimit -n */
        PROCESS_LIMIT_ADDRESS_SPACE, /* RLIMIT_AS, ulimit -v; in bytes */
    } kind;
    uint64_t limit;
};

/* Return: the limit that made a call fail. r: the call's negative errno. -ENOMEM counts as the limit of address space
 * if one is set, although memory may also have run out. */
struct process_limit process_limit_met(int r);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The limit of this process (setrlimit) that a failed call has met. */

#include <stdint.h>

struct process_limit {
    enum {
        PROCESS_LIMIT_NONE,
        PROCESS_LIMIT_OPEN_FILES,    /* RLIMIT_NOFILE, ulimit -n */
        PROCESS_LIMIT_ADDRESS_SPACE, /* RLIMIT_AS, ulimit -v; bytes */
    } kind;
    uint64_t limit;
};

/* Return: the limit that a call has met. r: the negative errno of the call, which needed a descriptor or memory. If
 * there is a limit of address space, it is the likely reason for a lack of memory, but not the only one. */
struct process_limit process_limit_met(int r);

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

/* r: the negative errno of a call that wanted a descriptor or memory. Memory can be short for another reason, too, when
 * a limit of address space is set; that one is the likelier. */
struct process_limit process_limit_met(int r);

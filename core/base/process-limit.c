/* SPDX-License-Identifier: Apache-2.0 */

#include "core/base/process-limit.h"

#include <errno.h>
#include <sys/resource.h>

#include "core/base/open-files.h"

struct process_limit process_limit_met(int r)
{
    struct rlimit limit;

    if (r == -EMFILE || r == -ENFILE)
        return (struct process_limit){PROCESS_LIMIT_OPEN_FILES, open_files_limit()};
    if (r == -ENOMEM && getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        return (struct process_limit){PROCESS_LIMIT_ADDRESS_SPACE, limit.rlim_cur};
    return (struct process_limit){PROCESS_LIMIT_NONE, 0};
}

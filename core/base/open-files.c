/* SPDX-License-Identifier: Apache-2.0 */

/* Raises and checks the limit of file descriptors. Starts watches of libuv that fail without aborting the process. */

#include "core/base/open-files.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include "core/base/failpoint.h"

void open_files_raise(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = MIN(limit.rlim_max, (rlim_t)65536);
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

uint64_t open_files_limit(void)
{
    struct rlimit limit;

    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

int open_files_check(unsigned n_ranks, char *why, size_t why_size)
{
    uint64_t limit = open_files_limit(),
             needed = OPEN_FILES_AT_START + OPEN_FILES_FOR_JOB + (uint64_t)n_ranks * OPEN_FILES_PER_RANK;

    if (limit >= needed)
        return 0;
    snprintf(why, why_size,
             "the limit of open files (RLIMIT_NOFILE) is %" PRIu64 ", but a job of %u ranks needs %" PRIu64
             ": raise it with LimitNOFILE= of the unit, or with ulimit -n",
             limit, n_ranks, needed);
    return -EMFILE;
}

static int add_to_epoll(uv_loop_t *loop, int fd)
{
    struct epoll_event event = {.data.fd = fd};
    int r = failpoint("watch");

    if (r < 0)
        return r;
    if (epoll_ctl(uv_backend_fd(loop), EPOLL_CTL_ADD, fd, &event) == 0 || errno == EEXIST)
        return 0;
    return -errno;
}

int open_files_watch(uv_poll_t *poll, int events, uv_poll_cb callback)
{
    int fd, r = uv_fileno((uv_handle_t *)poll, &fd);

    if (r == 0)
        r = uv_poll_start(poll, events, callback);
    if (r < 0)
        return r;
    r = add_to_epoll(poll->loop, fd);
    if (r < 0)
        (void)uv_poll_stop(poll);
    return r;
}

int open_files_watch_stream(uv_stream_t *stream)
{
    int fd, r = uv_fileno((uv_handle_t *)stream, &fd);

    return r < 0 ? r : add_to_epoll(stream->loop, fd);
}

/* SPDX-License-Identifier: Apache-2.0 */

/* The files of --tee. */

#include "client/run/tee.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/base.h"

/* Makes the parent folders of the path. Ignores failures, because open() then fails too. */
static void make_directories(char *path)
{
    for (char *end = strchr(path + 1, '/'); end; end = strchr(end + 1, '/')) {
        *end = '\0';
        (void)mkdir(path, 0775);
        *end = '/';
    }
}

int tee_init(struct tee *tee, uv_loop_t *loop, const struct tee_spec *spec)
{
    _cleanup_close_ int fd = -1;
    struct stat st;
    int r;

    *tee = (struct tee){};
    if (asprintf(&tee->path, "%s/%s.log", spec->directory, spec->name) < 0) {
        tee->path = NULL;
        return -ENOMEM;
    }
    make_directories(tee->path);
    fd = open(tee->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY, 0664);
    if (fd < 0 || fstat(fd, &st) < 0)
        return -errno;
    r = sink_init(&tee->sink, loop, fd, spec->on_drained, spec->context);
    if (r < 0)
        return r;
    tee->fd = steal_fd(&fd);
    tee->is_open = true;
    if (st.st_size > 0)
        tee_say(tee, "run %s begins", spec->run_id);
    return 0;
}

void tee_deinit(struct tee *tee)
{
    if (tee->is_open)
        close(tee->fd);
    free(tee->path);
    *tee = (struct tee){};
}

void tee_say(struct tee *tee, const char *format, ...)
{
    _cleanup_free_ char *text = NULL;
    va_list args;

    if (!tee->is_open)
        return;
    va_start(args, format);
    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    va_end(args);
    if (text)
        sink_printf(&tee->sink, "zerodrun: %s\n", text);
}

int tee_complaint(struct tee *tee)
{
    int r = tee->is_open && !tee->has_complained ? sink_error(&tee->sink) : 0;

    tee->has_complained |= r < 0;
    return r;
}

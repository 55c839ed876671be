/* SPDX-License-Identifier: Apache-2.0 */
#include "client/run/process.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "client/run/sink.h"
#include "core/base/base.h"

/*
 * libuv has no hook between fork and exec, where PR_SET_PDEATHSIG belongs. So what is spawned
 * is zerodrun under this name, which sets it and becomes the program:
 * WRAPPER_NAME, pid of zerodrun, signal, program, arguments.
 */
static const char WRAPPER_NAME[] = "zerodrun:start";

enum {
    WRAPPER_N_ARGS = 3,
};

void child_wrapper(int argc, char **argv)
{
    pid_t parent;
    int r;

    if (argc <= WRAPPER_N_ARGS || strcmp(argv[0], WRAPPER_NAME) != 0)
        return;
    parent = atoi(argv[1]);
    prctl(PR_SET_PDEATHSIG, atoi(argv[2]));
    if (getppid() != parent)
        _exit(128 + SIGKILL); /* zerodrun died before the call above: nobody would tell us */
    execvp(argv[WRAPPER_N_ARGS], argv + WRAPPER_N_ARGS);
    r = errno;
    fprintf(stderr, "zerodrun: cannot run %s: %s%s\n", argv[WRAPPER_N_ARGS], strerror(r),
            fnmatch("*.py", argv[WRAPPER_N_ARGS], 0) == 0 ? "; it takes a program: -- python3 train.py" : "");
    _exit(r == ENOENT ? 127 : 126);
}

/* ---- the end ------------------------------------------------------------------------------------------- */

static void child_closed(uv_handle_t *handle)
{
    struct child *child = handle->data;
    size_t i;

    if (--child->n_handles > 0)
        return;
    for (i = 0; i < ARRAY_SIZE(child->streams); i++)
        lines_deinit(&child->streams[i].lines);
    free(steal_ptr(child->argv));
    free(steal_ptr(child->argv_storage));
    if (child->pid > 0)
        child->spec.on_end(child);
}

static void child_close(struct child *child)
{
    size_t i;

    for (i = 0; i < ARRAY_SIZE(child->streams); i++)
        uv_close((uv_handle_t *)&child->streams[i].pipe, child_closed);
    if (child->has_process)
        uv_close((uv_handle_t *)&child->process, child_closed);
    uv_close((uv_handle_t *)&child->linger, child_closed);
}

/* Whoever is left of the group has had its SIGTERM; a leader's pid is not given away while its group lives.
 */
static void child_finish(struct child *child)
{
    size_t i;

    if (uv_is_closing((uv_handle_t *)&child->process))
        return;
    kill(-child->pid, SIGKILL);
    for (i = 0; i < ARRAY_SIZE(child->streams); i++)
        lines_flush(&child->streams[i].lines);
    child_close(child);
}

static void child_check_end(struct child *child)
{
    if (child->exited && child->streams[0].eof && child->streams[1].eof)
        child_finish(child);
}

static void child_lingered(uv_timer_t *timer)
{
    struct child *child = timer->data;

    /* Not read to the end only because nobody takes the output: that is no stranger holding the pipe. */
    if (child->streams[0].paused || child->streams[1].paused)
        uv_timer_start(timer, child_lingered, CHILD_LINGER_MS, 0);
    else
        child_finish(child);
}

static void child_exit(uv_process_t *process, int64_t exit_status, int term_signal)
{
    struct child *child = process->data;

    child->exited = true;
    child->exit_status = exit_status;
    child->term_signal = term_signal;
    kill(-child->pid, SIGTERM);
    uv_timer_start(&child->linger, child_lingered, CHILD_LINGER_MS, 0);
    child_check_end(child);
}

/* ---- output -------------------------------------------------------------------------------------------- */

static void child_line(void *context, const char *text, size_t n_bytes, bool continued)
{
    struct child_stream *stream = context;
    const char *prefix = stream->child->prefix;

    sink_put(stream->sink, prefix, continued ? 0 : strlen(prefix), text, n_bytes);
}

static void child_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
    struct child_stream *stream = container_of(handle, struct child_stream, pipe);

    *buf = uv_buf_init(stream->data, sizeof(stream->data));
}

static void child_read(uv_stream_t *pipe, ssize_t n, const uv_buf_t *buf)
{
    struct child_stream *stream = container_of(pipe, struct child_stream, pipe);

    if (n < 0) {
        stream->eof = true;
        uv_read_stop(pipe);
        child_check_end(stream->child);
        return;
    }
    lines_feed(&stream->lines, stream->data, n);
    if (sink_is_full(stream->sink)) {
        uv_read_stop(pipe);
        stream->paused = true;
    }
}

void child_resume(struct child *child)
{
    struct child_stream *stream;
    size_t i;

    for (i = 0; child->n_handles > 0 && i < ARRAY_SIZE(child->streams); i++) {
        stream = &child->streams[i];
        if (!stream->paused || uv_is_closing((uv_handle_t *)&stream->pipe))
            continue;
        stream->paused = false;
        uv_read_start((uv_stream_t *)&stream->pipe, child_alloc, child_read);
    }
}

/* ---- the start ----------------------------------------------------------------------------------------- */

static int child_wrap_argv(struct child *child)
{
    size_t n = 0;

    while (child->spec.argv[n])
        n++;
    child->argv = calloc(WRAPPER_N_ARGS + n + 1, sizeof(*child->argv));
    if (!child->argv)
        return -ENOMEM;
    if (asprintf(&child->argv_storage, "%s%c%d%c%d", WRAPPER_NAME, 0, (int)getpid(), 0, child->spec.death_signal) < 0) {
        child->argv_storage = NULL;
        return -ENOMEM;
    }
    child->argv[0] = child->argv_storage;
    child->argv[1] = child->argv[0] + strlen(child->argv[0]) + 1;
    child->argv[2] = child->argv[1] + strlen(child->argv[1]) + 1;
    memcpy(child->argv + WRAPPER_N_ARGS, child->spec.argv, n * sizeof(*child->argv));
    return 0;
}

/* The handle exists afterwards, also on failure. *write_fd: the child's end, the caller's. */
static int child_stream_init(struct child_stream *stream, struct child *child, struct sink *sink, uv_loop_t *loop,
                             int *write_fd)
{
    uv_file fds[2];
    int r;

    stream->child = child;
    stream->sink = sink;
    uv_pipe_init(loop, &stream->pipe, 0);
    stream->pipe.data = child;
    child->n_handles++;
    r = lines_init(&stream->lines, child_line, stream);
    if (r < 0)
        return r;
    /* A real pipe: libuv would make a socket, and a program could not open /dev/stdout. */
    r = uv_pipe(fds, UV_NONBLOCK_PIPE, 0);
    if (r < 0)
        return r;
    *write_fd = fds[1];
    r = uv_pipe_open(&stream->pipe, fds[0]);
    if (r < 0)
        close(fds[0]);
    return r;
}

static int child_spawn(struct child *child, uv_loop_t *loop, const int *write_fds)
{
    uv_stdio_container_t stdio[3] = {
        {.flags = child->spec.keep_stdin ? UV_INHERIT_FD : UV_IGNORE, .data.fd = STDIN_FILENO},
        {.flags = UV_INHERIT_FD, .data.fd = write_fds[0]},
        {.flags = UV_INHERIT_FD, .data.fd = write_fds[1]},
    };
    uv_process_options_t options = {
        .exit_cb = child_exit,
        .file = "/proc/self/exe",
        .args = child->argv,
        .env = child->spec.env,
        .flags = UV_PROCESS_DETACHED,
        .stdio = stdio,
        .stdio_count = ARRAY_SIZE(stdio),
    };

    child->process.data = child;
    child->has_process = true; /* also on failure */
    child->n_handles++;
    return uv_spawn(loop, &child->process, &options);
}

int child_start(struct child *child, uv_loop_t *loop, const struct child_spec *spec)
{
    struct sink *sinks[2] = {spec->out, spec->err};
    int write_fds[2] = {-1, -1}, r, r_stream;
    size_t i;

    memset(child, 0, sizeof(*child));
    child->spec = *spec;
    snprintf(child->prefix, sizeof(child->prefix), "[%s] ", spec->label);
    uv_timer_init(loop, &child->linger);
    child->linger.data = child;
    child->n_handles = 1;
    r = child_wrap_argv(child);
    for (i = 0; i < ARRAY_SIZE(child->streams); i++) {
        r_stream = child_stream_init(&child->streams[i], child, sinks[i], loop, &write_fds[i]);
        r = r < 0 ? r : r_stream;
    }
    if (r == 0)
        r = child_spawn(child, loop, write_fds);
    for (i = 0; i < ARRAY_SIZE(write_fds); i++)
        closep(&write_fds[i]);
    if (r < 0) {
        child_close(child);
        return r;
    }
    child->pid = child->process.pid;
    for (i = 0; i < ARRAY_SIZE(child->streams); i++)
        uv_read_start((uv_stream_t *)&child->streams[i].pipe, child_alloc, child_read);
    return 0;
}

void child_signal(struct child *child, int signum)
{
    if (child_is_alive(child))
        uv_process_kill(&child->process, signum);
}

void child_kill(struct child *child)
{
    if (child->n_handles > 0 && child->has_process && !uv_is_closing((uv_handle_t *)&child->process))
        kill(-child->pid, SIGKILL);
}

int child_exit_code(const struct child *child)
{
    return child->term_signal ? 128 + child->term_signal : (int)child->exit_status;
}

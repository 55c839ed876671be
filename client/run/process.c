/* SPDX-License-Identifier: Apache-2.0 */

/* Starts a process of zerodrun through a wrapper, reads its output, and handles its end. */

#include "client/run/process.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "client/run/plain.h"
#include "client/run/torch-rank.h"
#include "core/base/base.h"

/*
 * PR_SET_PDEATHSIG must be set between fork and exec, where libuv has no hook. So process_start() spawns zerodrun
 * itself under this name. The spawned wrapper sets PR_SET_PDEATHSIG and other attributes, and then executes the
 * program. Arguments of the wrapper: WRAPPER_NAME, pid of zerodrun, signal, limit of open files, program, arguments.
 */
static const char WRAPPER_NAME[] = "zerodrun:start";

enum {
    WRAPPER_N_ARGS = 4,
};

static void wrapper_limit_open_files(uint64_t n)
{
    struct rlimit limit;

    if (n == 0 || getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return;
    limit.rlim_cur = n;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

/* Sets LISTEN_PID, by which the program checks that the inherited descriptors are for itself. */
static void wrapper_set_listen_pid(void)
{
    char text[16];

    if (!getenv("LISTEN_FDS") || getenv("LISTEN_PID")) /* if both are set, they are from zerodrun's own environment */
        return;
    snprintf(text, sizeof(text), "%d", (int)getpid());
    setenv("LISTEN_PID", text, 1);
}

void process_wrapper(int argc, char **argv)
{
    pid_t parent;
    int r;

    if (argc <= WRAPPER_N_ARGS || strcmp(argv[0], WRAPPER_NAME) != 0)
        return;
    parent = atoi(argv[1]);
    prctl(PR_SET_PDEATHSIG, atoi(argv[2]));
    if (getppid() != parent)
        _exit(128 + SIGKILL); /* zerodrun died before prctl(), so no signal would come */
    wrapper_limit_open_files(strtoull(argv[3], NULL, 10));
    wrapper_set_listen_pid();
    execvp(argv[WRAPPER_N_ARGS], argv + WRAPPER_N_ARGS);
    r = errno;
    fprintf(stderr, "zerodrun: cannot run %s: %s%s\n", argv[WRAPPER_N_ARGS], strerror(r),
            fnmatch("*.py", argv[WRAPPER_N_ARGS], 0) == 0 ? "; it takes a program: -- python3 train.py" : "");
    _exit(r == ENOENT ? 127 : 126);
}

/* Draws the bars that have not ended. */
static void stream_draw(struct process_stream *stream)
{
    const char *bar;
    size_t n;

    for (unsigned i = 0; i < LINES_MAX_ROWS; i++) {
        bar = lines_bar(&stream->lines, i, &n);
        if (bar)
            output_draw(&stream->sources[i], bar, n);
        else
            output_erase(&stream->sources[i]);
    }
}

/* ---- the end ------------------------------------------------------------------------------------------- */

static void process_closed(uv_handle_t *handle)
{
    struct process *process = handle->data;
    size_t i;

    if (--process->n_handles > 0)
        return;
    for (i = 0; i < ARRAY_SIZE(process->streams); i++) {
        lines_deinit(&process->streams[i].lines);
        repeats_source_deinit(&process->streams[i].repeats);
    }
    free(steal_ptr(process->argv));
    free(steal_ptr(process->argv_storage));
    if (process->pid > 0)
        process->spec.on_end(process);
}

static void process_close(struct process *process)
{
    size_t i;

    for (i = 0; i < ARRAY_SIZE(process->streams); i++)
        uv_close((uv_handle_t *)&process->streams[i].pipe, process_closed);
    if (process->has_process)
        uv_close((uv_handle_t *)&process->handle, process_closed);
    uv_close((uv_handle_t *)&process->linger, process_closed);
    uv_close((uv_handle_t *)&process->settle, process_closed);
    uv_close((uv_handle_t *)&process->release, process_closed);
}

/* Kills the processes that remain in the group after SIGTERM. The group's number is still the process's pid, which the
 * kernel does not reuse while the group exists. */
static void process_finish(struct process *process)
{
    size_t i;

    if (uv_is_closing((uv_handle_t *)&process->handle))
        return;
    kill(-process->pid, SIGKILL);
    for (i = 0; i < ARRAY_SIZE(process->streams); i++) {
        lines_flush(&process->streams[i].lines);
        repeats_release(&process->streams[i].repeats, uv_now(process->linger.loop));
        stream_draw(&process->streams[i]);
    }
    process_close(process);
}

static void process_check_end(struct process *process)
{
    if (process->exited && process->streams[0].eof && process->streams[1].eof)
        process_finish(process);
}

static void process_lingered(uv_timer_t *timer)
{
    struct process *process = timer->data;

    /* Wait longer while a stream is paused because its sink is full: its output has not ended. */
    if (process->streams[0].paused || process->streams[1].paused)
        uv_timer_start(timer, process_lingered, PROCESS_LINGER_MS, 0);
    else
        process_finish(process);
}

static void process_exit(uv_process_t *handle, int64_t exit_status, int term_signal)
{
    struct process *process = handle->data;

    process->exited = true;
    process->exit_status = exit_status;
    process->term_signal = term_signal;
    kill(-process->pid, SIGTERM);
    process->spec.on_exit(process);
    uv_timer_start(&process->linger, process_lingered, PROCESS_LINGER_MS, 0);
    process_check_end(process);
}

/* ---- output -------------------------------------------------------------------------------------------- */

/* Return: true for unindented lines that Python's faulthandler prints after the error. */
static bool is_of_fault_dump(const char *line)
{
    static const char *const beginnings[] = {"Current thread 0x", "Current thread's C stack trace", "Thread 0x",
                                             "Extension modules: "};

    for (size_t i = 0; i < ARRAY_SIZE(beginnings); i++)
        if (strncmp(line, beginnings[i], strlen(beginnings[i])) == 0)
            return true;
    return false;
}

static void stream_remember(struct process_stream *stream, const char *line, size_t n_bytes)
{
    char text[PROCESS_MESSAGE_BYTES - sizeof("...") + 1];
    bool is_cut = plain_text(text, sizeof(text), line, n_bytes);
    const char *said = text + torch_rank_length(stream->repeats.label, text, strlen(text));

    if (*said && *said != ' ' && !is_of_fault_dump(said))
        snprintf(stream->message, sizeof(stream->message), "%s%s", said, is_cut ? "..." : "");
}

static void stream_put(void *context, const char *text, size_t n_bytes, bool continued)
{
    struct process_stream *stream = context;

    output_line(&stream->sources[0], text, n_bytes, continued);
}

static void process_release(uv_timer_t *timer)
{
    struct process *process = timer->data;

    for (size_t i = 0; i < ARRAY_SIZE(process->streams); i++)
        repeats_release(&process->streams[i].repeats, uv_now(timer->loop));
}

static void process_line(void *context, const char *text, size_t n_bytes, bool continued)
{
    struct process_stream *stream = context;
    uv_timer_t *release = &stream->process->release;

    if (!continued)
        stream_remember(stream, text, n_bytes);
    if (stream->process->spec.log)
        sink_put(stream->process->spec.log, text, n_bytes, NULL, 0);
    repeats_feed(&stream->repeats, text, n_bytes, continued, uv_now(release->loop));
    if (repeats_holds(&stream->repeats))
        uv_timer_start(release, process_release, REPEATS_HOLD_MS, 0);
}

static void process_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
    struct process_stream *stream = container_of(handle, struct process_stream, pipe);

    *buf = uv_buf_init(stream->data, sizeof(stream->data));
}

static bool stream_is_full(struct process_stream *stream)
{
    struct sink *log = stream->process->spec.log;

    return sink_is_full(&stream->sources[0].output->sink) || (log && sink_is_full(log));
}

static void process_settle(uv_timer_t *timer)
{
    struct process *process = timer->data;

    for (size_t i = 0; i < ARRAY_SIZE(process->streams); i++) {
        lines_settle(&process->streams[i].lines);
        stream_draw(&process->streams[i]);
    }
}

static void stream_feed(struct process_stream *stream, size_t n_bytes)
{
    lines_feed(&stream->lines, stream->data, n_bytes);
    stream_draw(stream);
    if (lines_is_below(&stream->lines))
        uv_timer_start(&stream->process->settle, process_settle, PROCESS_SETTLE_MS, 0);
}

static void process_read(uv_stream_t *pipe, ssize_t n, const uv_buf_t *buf)
{
    struct process_stream *stream = container_of(pipe, struct process_stream, pipe);

    if (n < 0) {
        stream->eof = true;
        uv_read_stop(pipe);
        process_check_end(stream->process);
        return;
    }
    stream_feed(stream, (size_t)n);
    if (stream_is_full(stream)) {
        uv_read_stop(pipe);
        stream->paused = true;
    }
}

void process_resume(struct process *process)
{
    struct process_stream *stream;
    size_t i;

    for (i = 0; process->n_handles > 0 && i < ARRAY_SIZE(process->streams); i++) {
        stream = &process->streams[i];
        if (!stream->paused || uv_is_closing((uv_handle_t *)&stream->pipe) || stream_is_full(stream))
            continue;
        stream->paused = false;
        uv_read_start((uv_stream_t *)&stream->pipe, process_alloc, process_read);
    }
}

/* ---- the start ----------------------------------------------------------------------------------------- */

static int process_wrap_argv(struct process *process)
{
    size_t n = 0;

    while (process->spec.argv[n])
        n++;
    process->argv = calloc(WRAPPER_N_ARGS + n + 1, sizeof(*process->argv));
    if (!process->argv)
        return -ENOMEM;
    if (asprintf(&process->argv_storage, "%s%c%d%c%d%c%" PRIu64, WRAPPER_NAME, 0, (int)getpid(), 0,
                 process->spec.death_signal, 0, process->spec.n_open_files) < 0) {
        process->argv_storage = NULL;
        return -ENOMEM;
    }
    process->argv[0] = process->argv_storage;
    for (size_t i = 1; i < WRAPPER_N_ARGS; i++)
        process->argv[i] = process->argv[i - 1] + strlen(process->argv[i - 1]) + 1;
    memcpy(process->argv + WRAPPER_N_ARGS, process->spec.argv, n * sizeof(*process->argv));
    return 0;
}

/* Initialises a stream. Also after a failure the pipe's handle must be closed. *write_fd: the process's end of the
 * pipe, which the caller closes. */
static int process_stream_init(struct process_stream *stream, struct process *process, struct output *output,
                               uv_loop_t *loop, int *write_fd)
{
    bool is_err = stream == &process->streams[1];
    struct repeats *repeats = is_err ? process->spec.err_repeats : process->spec.out_repeats;
    uv_file fds[2];
    int r;

    stream->process = process;
    for (size_t i = 0; i < ARRAY_SIZE(stream->sources); i++)
        output_source_init(&stream->sources[i], output, process->spec.label, process->spec.color);
    uv_pipe_init(loop, &stream->pipe, 0);
    stream->pipe.data = process;
    process->n_handles++;
    repeats_source_init(&stream->repeats, repeats, process->spec.label, stream_put, stream);
    r = lines_init(&stream->lines, process_line, stream);
    if (r < 0)
        return r;
    /* Makes a pipe itself, because libuv would make a socket, which a program cannot open as /dev/stdout. */
    r = uv_pipe(fds, UV_NONBLOCK_PIPE, 0);
    if (r < 0)
        return r;
    *write_fd = fds[1];
    r = uv_pipe_open(&stream->pipe, fds[0]);
    if (r < 0)
        close(fds[0]);
    return r;
}

/*
 * Opens descriptors until all numbers below `end` are in use, so that libuv's pipe gets a higher number than all
 * inherited descriptors. Otherwise an inherited descriptor could replace the pipe in the child, and libuv, which
 * reports the child's failures through the pipe, would write into kept memory.
 */
static int take_numbers(int *taken, int *n, int end)
{
    int fd;

    for (*n = 0;; taken[(*n)++] = fd) {
        fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return -errno;
        if (fd >= end) {
            close(fd);
            return 0;
        }
    }
}

static int spawn_beside(struct process *process, uv_loop_t *loop, const uv_process_options_t *options)
{
    _cleanup_free_ int *taken = calloc((size_t)options->stdio_count, sizeof(*taken));
    int n, r;

    if (!taken)
        return -ENOMEM;
    r = take_numbers(taken, &n, options->stdio_count);
    if (r == 0) {
        process->handle.data = process;
        process->has_process = true; /* also if uv_spawn() fails */
        process->n_handles++;
        r = uv_spawn(loop, &process->handle, options);
    }
    while (n > 0)
        close(taken[--n]);
    return r;
}

static int process_spawn(struct process *process, uv_loop_t *loop, const int *write_fds)
{
    const struct process_spec *spec = &process->spec;
    size_t n_stdio = 3 + spec->n_fds;
    _cleanup_free_ uv_stdio_container_t *stdio = calloc(n_stdio, sizeof(*stdio));
    uv_process_options_t options = {
        .exit_cb = process_exit,
        .file = "/proc/self/exe",
        .args = process->argv,
        .env = spec->env,
        .flags = UV_PROCESS_DETACHED,
        .stdio = stdio,
        .stdio_count = (int)n_stdio,
    };

    if (!stdio)
        return -ENOMEM;
    for (size_t i = 0; i < n_stdio; i++) {
        stdio[i].flags = UV_INHERIT_FD;
        stdio[i].data.fd = i == 0 ? STDIN_FILENO : i < 3 ? write_fds[i - 1] : spec->fds[i - 3];
    }
    if (!spec->keep_stdin)
        stdio[0].flags = UV_IGNORE;
    return spawn_beside(process, loop, &options);
}

int process_start(struct process *process, uv_loop_t *loop, const struct process_spec *spec)
{
    struct output *outputs[2] = {spec->out, spec->err};
    int write_fds[2] = {-1, -1}, r, r_stream;
    size_t i;

    memset(process, 0, sizeof(*process));
    process->spec = *spec;
    uv_timer_init(loop, &process->linger);
    uv_timer_init(loop, &process->settle);
    uv_timer_init(loop, &process->release);
    process->linger.data = process->settle.data = process->release.data = process;
    process->n_handles = 3;
    r = process_wrap_argv(process);
    for (i = 0; i < ARRAY_SIZE(process->streams); i++) {
        r_stream = process_stream_init(&process->streams[i], process, outputs[i], loop, &write_fds[i]);
        r = r < 0 ? r : r_stream;
    }
    if (r == 0)
        r = process_spawn(process, loop, write_fds);
    for (i = 0; i < ARRAY_SIZE(write_fds); i++)
        closep(&write_fds[i]);
    if (r < 0) {
        process_close(process);
        return r;
    }
    process->pid = process->handle.pid;
    for (i = 0; i < ARRAY_SIZE(process->streams); i++)
        uv_read_start((uv_stream_t *)&process->streams[i].pipe, process_alloc, process_read);
    return 0;
}

void process_signal(struct process *process, int signum)
{
    if (process_is_alive(process))
        uv_process_kill(&process->handle, signum);
}

void process_kill(struct process *process)
{
    if (process->n_handles > 0 && process->has_process && !uv_is_closing((uv_handle_t *)&process->handle))
        kill(-process->pid, SIGKILL);
}

int process_exit_code(const struct process *process)
{
    return process->term_signal ? 128 + process->term_signal : (int)process->exit_status;
}

const char *process_last_message(const struct process *process)
{
    return process->streams[1].message[0] ? process->streams[1].message : process->streams[0].message;
}

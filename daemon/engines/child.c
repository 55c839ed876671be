/* SPDX-License-Identifier: Apache-2.0 */
/* A child process with a socketpair: packets, orders with deadlines, and the end of the process. */

#include "daemon/engines/child.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "core/base/base.h"
#include "core/base/open-files.h"
#include "core/base/recorder.h"
#include "core/wire/frame.h"
#include "daemon/engines/last-words.h"

/* Limits of the queue for a child that does not read; picked: 500 orders of the largest size. */
enum { MAX_QUEUED_PACKETS = 64 * 1024, MAX_QUEUED_BYTES = 64 << 20 };

enum {
    EXIT_WAIT_MS = 500, /* from the end of the socket to the end of the process; picked; usually below 10 ms */
    LATE_MS = 500,      /* if a timer is so late, this process did not run, and packets of the child may be unread */
    MIN_ORDERS = 16,
    EXIT_NOT_LOADED = 127, /* status with which the dynamic loader ends a process before its main() */
};

/* The libuv handles. Each one is initialised and closed on its own. */
struct child_handles {
    uv_process_t process;
    uv_poll_t poll, words_poll;
    uv_timer_t timer;
    bool has_process, has_poll, has_words_poll, has_timer;
    unsigned n; /* handles that are not closed yet */
};

/* Orders of which the engine has not reported the end. */
struct child_orders {
    struct child_order *list;
    size_t n, n_allocated;
};

/* The failure of the child, for which failed() is called once. */
struct child_failing {
    bool begun, told;
    char what[CHILD_MAX_WHAT_BYTES + 1];
    bool said; /* `what` is the text of the child itself */
    bool has_tag;
    uint64_t tag;
};

struct child {
    struct child_ops ops;
    uv_loop_t *loop;
    char *program;
    const char *const *further; /* names of variables that the child gets besides kept_variables */
    size_t n_further;
    struct child_handles handles;
    bool runs;
    bool gives_fds;
    int fd, child_fd; /* ends of the socket; child_fd is closed when the child runs */
    int events;       /* the events that poll watches for */
    struct frame_queue queue;
    struct frame_batch batch;   /* if gives_fds is false */
    struct frame_buffer buffer; /* if gives_fds is true */
    struct last_words words;

    bool ready;
    bool eof;    /* the socket has ended */
    bool closed; /* by the owner */
    struct child_failing failure;

    struct traffic *traffic;
    struct child_orders orders;
    uint64_t ready_deadline_ms, exit_deadline_ms;
    uint64_t timer_ms; /* when the timer ends; UINT64_MAX: it does not run */
};

static void on_timer(uv_timer_t *timer);
static void on_poll(uv_poll_t *poll, int status, int events);

bool child_is_over(const struct child *child)
{
    return child->failure.begun || child->closed;
}

bool child_is_ready(const struct child *child)
{
    return child->ready;
}

int64_t child_pid(const struct child *child)
{
    return child->handles.process.pid;
}

/* A process whose first thread has ended is shown as a zombie. It still runs if it has other threads. */
uint64_t child_start_time(int64_t pid)
{
    enum { STAT_BYTES = 1024 };
    char path[64], stat[STAT_BYTES], state = 'Z';
    const char *after_name;
    uint64_t start_time = 0;
    long n_threads = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%" PRId64 "/stat", pid);
    file = fopen(path, "re");
    after_name = file && fgets(stat, sizeof(stat), file) ? strrchr(stat, ')') : NULL;
    if (file)
        fclose(file);
    if (!after_name ||
        sscanf(after_name, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %" SCNu64,
               &state, &n_threads, &start_time) != 3)
        return 0;
    return state == 'Z' && n_threads <= 1 ? 0 : start_time;
}

/* ---- failure -------------------------------------------------------------------------------------------- */

/* Does not use uv_now(), because the loop sets that only once per round. */
static uint64_t now_ms(void)
{
    return uv_hrtime() / 1000000;
}

static void wake_at(struct child *child, uint64_t deadline_ms)
{
    uint64_t now = now_ms();

    if (child->closed || deadline_ms >= child->timer_ms)
        return;
    child->timer_ms = deadline_ms;
    (void)uv_timer_start(&child->handles.timer, on_timer, deadline_ms > now ? deadline_ms - now : 0, 0);
}

static void child_kill(struct child *child)
{
    if (child->runs)
        (void)uv_process_kill(&child->handles.process, SIGKILL);
    if (child->traffic) /* the child reports no further work */
        traffic_stop(child->traffic, uv_hrtime());
}

/* The timer calls failed(), so that failed() never runs during a call by the owner. */
static void begin_failing(struct child *child, const uint64_t *tag)
{
    child->failure.begun = true;
    child->failure.has_tag = tag;
    child->failure.tag = tag ? *tag : 0;
    child_kill(child);
    (void)uv_poll_stop(&child->handles.poll);
    wake_at(child, 0);
}

void child_fail(struct child *child, const uint64_t *tag, const char *format, ...)
{
    va_list args;

    if (child_is_over(child))
        return;
    va_start(args, format);
    vsnprintf(child->failure.what, sizeof(child->failure.what), format, args);
    va_end(args);
    begin_failing(child, tag);
}

void child_say(struct child *child, const uint64_t *tag, const char *what)
{
    child->failure.said |= !child_is_over(child);
    child_fail(child, tag, "%s", what);
}

static void tell_failure(struct child *child)
{
    struct child_failure failure = {.said = child->failure.said,
                                    .what = child->failure.what,
                                    .has_tag = child->failure.has_tag,
                                    .tag = child->failure.tag};

    assert(!child->closed); /* failed() is not called after child_close() */
    if (child->failure.told)
        return;
    child->failure.told = true;
    child->ops.failed(child->ops.userdata, &failure);
}

/* ---- orders under way ----------------------------------------------------------------------------------- */

struct child_order *child_find(struct child *child, uint64_t tag)
{
    for (size_t i = 0; i < child->orders.n; i++)
        if (child->orders.list[i].tag == tag)
            return &child->orders.list[i];
    return NULL;
}

static int grow_orders(struct child *child)
{
    struct child_order *grown;
    size_t n;

    if (child->orders.n < child->orders.n_allocated)
        return 0;
    n = MAX(2 * child->orders.n_allocated, (size_t)MIN_ORDERS);
    grown = reallocarray(child->orders.list, n, sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    child->orders.list = grown;
    child->orders.n_allocated = n;
    return 0;
}

int child_expect(struct child *child, const struct child_order *order, uint32_t timeout_ms)
{
    struct child_order *added;
    int r;

    assert(!child_find(child, order->tag));
    if (child_is_over(child))
        return -EPIPE;
    r = grow_orders(child);
    if (r < 0) {
        child_fail(child, &order->tag, "cannot be given an order: %s", strerror(-r));
        return r;
    }
    assert(child->orders.n < child->orders.n_allocated);
    added = &child->orders.list[child->orders.n++];
    *added = *order;
    added->deadline_ms = now_ms() + timeout_ms + CHILD_GRACE_MS;
    added->began_ns = uv_hrtime();
    wake_at(child, added->deadline_ms);
    if (child->traffic)
        traffic_begin(child->traffic, order->kind, added->began_ns);
    return 0;
}

void child_settle(struct child *child, struct child_order *order, uint64_t n_bytes_sent, uint64_t n_bytes_received)
{
    uint64_t now = uv_hrtime();

    assert(order >= child->orders.list && order < child->orders.list + child->orders.n);
    if (child->traffic)
        traffic_end(child->traffic, order->kind, n_bytes_sent, n_bytes_received, now);
    if (order->kind < N_TRAFFIC)
        recorder_note(&(struct record){.kind = RECORD_COLLECTIVE,
                                       .rank = RECORD_NO_RANK,
                                       .item = order->kind,
                                       .begin_ns = order->began_ns,
                                       .end_ns = now});
    *order = child->orders.list[--child->orders.n];
}

static void check_deadlines(struct child *child)
{
    uint64_t now = now_ms(), next = UINT64_MAX;

    if (child->eof && now >= child->exit_deadline_ms)
        child_fail(child, NULL, "has closed its socket and not ended");
    else if (!child->ready && now >= child->ready_deadline_ms)
        child_fail(child, NULL, "missed its deadline for connecting");
    for (size_t i = 0; i < child->orders.n; i++) {
        if (now >= child->orders.list[i].deadline_ms)
            child_fail(child, &child->orders.list[i].tag, "missed its deadline");
        next = MIN(next, child->orders.list[i].deadline_ms);
    }
    if (child->eof)
        next = MIN(next, child->exit_deadline_ms);
    if (!child->ready)
        next = MIN(next, child->ready_deadline_ms);
    if (!child->failure.begun && next < UINT64_MAX)
        wake_at(child, next);
}

static void on_timer(uv_timer_t *timer)
{
    struct child *child = timer->data;
    uint64_t due_ms = child->timer_ms, now = now_ms();

    child->timer_ms = UINT64_MAX;
    if (child->failure.begun)
        tell_failure(child);
    else if (now > due_ms + LATE_MS)
        wake_at(child, now + 1);
    else
        check_deadlines(child);
}

bool child_note_ready(struct child *child)
{
    if (child->ready)
        child_fail(child, NULL, "has reported twice that it is ready");
    else
        child->ready = true;
    return !child->failure.begun;
}

/* ---- reading -------------------------------------------------------------------------------------------- */

static void serve_packet(struct child *child, const struct frame_packet *packet)
{
    if (packet->status == 0)
        child->ops.packet(child->ops.userdata, packet->data, packet->n_bytes, NULL, 0);
    else
        child_fail(child, NULL, "has sent an invalid report: %s",
                   packet->status == FRAME_E_FDS ? "a descriptor" : "a packet of more than 131071 bytes");
}

/* Notes the end of the socket. The process should end soon; its exit status or signal tells the reason. */
static void note_eof(struct child *child)
{
    child->eof = true;
    (void)uv_poll_stop(&child->handles.poll);
    child->exit_deadline_ms = now_ms() + EXIT_WAIT_MS;
    wake_at(child, child->exit_deadline_ms);
}

/* Serves one packet with its descriptors. Return: true if there may be more to read at once. */
static bool serve_buffer(struct child *child)
{
    struct frame_buffer *buffer = &child->buffer;
    int r = child->eof ? FRAME_AGAIN : frame_receive_fds(child->fd, buffer);

    switch (r) {
    case FRAME_AGAIN:
        return false;
    case FRAME_EOF:
        note_eof(child);
        return false;
    case 0:
        child->ops.packet(child->ops.userdata, buffer->data, buffer->n_bytes, buffer->fds, buffer->n_fds);
        return !child_is_over(child);
    case FRAME_E_FDS:
        child_fail(child, NULL, "has sent an invalid report: more than %d descriptors", FRAME_MAX_FDS);
        return false;
    case FRAME_E_TOO_LARGE:
        child_fail(child, NULL, "has sent an invalid report: a packet of more than 131071 bytes");
        return false;
    default:
        child_fail(child, NULL, "cannot be read from: %s", strerror(-r));
        return false;
    }
}

/* Serves all packets that one call reads. Return: true if there may be more to read at once. */
static bool serve_batch(struct child *child)
{
    struct frame_batch *batch = &child->batch;
    int r;

    if (child->gives_fds)
        return serve_buffer(child);
    r = child->eof ? FRAME_AGAIN : frame_receive(child->fd, batch);
    if (r == FRAME_AGAIN)
        return false;
    if (r < 0)
        child_fail(child, NULL, "cannot be read from: %s", strerror(-r));
    for (size_t i = 0; r == 0 && i < batch->n_packets && !child_is_over(child); i++)
        serve_packet(child, &batch->packets[i]);
    if ((r == FRAME_EOF || batch->eof) && !child_is_over(child))
        note_eof(child);
    return r == 0 && batch->more && !child_is_over(child);
}

/* ---- the handles ---------------------------------------------------------------------------------------- */

static void want_events(struct child *child)
{
    int events = UV_READABLE | (frame_queue_is_empty(&child->queue) ? 0 : UV_WRITABLE), r;

    if (child->eof || child_is_over(child) ||
        (events == child->events && uv_is_active((uv_handle_t *)&child->handles.poll)))
        return;
    child->events = events;
    r = open_files_watch(&child->handles.poll, events, on_poll);
    if (r < 0)
        child_fail(child, NULL, "cannot be watched: %s", strerror(-r));
}

/*
 * If the socket ends while packets are unread, libuv reports an error (UV_EBADF) and stops watching. These packets can
 * still be read, so they are served first.
 */
static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct child *child = poll->data;
    int r;

    if (status < 0)
        events = UV_READABLE;
    for (int round = 0; (events & UV_READABLE) && (round < FRAME_ROUNDS || status < 0); round++)
        if (!serve_batch(child))
            break;
    if (child_is_over(child))
        return;
    if (status < 0 && !child->eof)
        note_eof(child);
    if (!(events & UV_WRITABLE))
        return;
    r = frame_queue_flush(&child->queue, child->fd);
    if (r < 0)
        child_fail(child, NULL, "cannot be written to: %s", strerror(-r));
    else if (r != FRAME_EOF) /* the end of the socket comes as a separate event */
        want_events(child);
}

/* Delivers the packets that a killed process had sent, because the work that they report is done. */
static void serve_late(struct child *child)
{
    struct frame_buffer *buffer = &child->buffer;

    while (child->ops.late && child->gives_fds && child->handles.has_process &&
           frame_receive_fds(child->fd, buffer) == 0)
        child->ops.late(child->ops.userdata, buffer->data, buffer->n_bytes);
}

static void child_free(struct child *child)
{
    assert(child->closed);
    assert(!child->runs); /* freed() tells the owner that the process writes no more */
    serve_late(child);
    last_words_deinit(&child->words);
    closep(&child->fd);
    closep(&child->child_fd);
    frame_queue_deinit(&child->queue);
    frame_batch_deinit(&child->batch);
    frame_buffer_deinit(&child->buffer);
    free(child->program);
    free(child->orders.list);
    child->ops.freed(child->ops.userdata);
    free(child);
}

static void on_closed(uv_handle_t *handle)
{
    struct child *child = handle->data;

    assert(child->handles.n > 0);
    if (--child->handles.n == 0)
        child_free(child);
}

static void on_words(uv_poll_t *poll, int status, int events)
{
    struct child *child = poll->data;

    if (status < 0 || !last_words_read(&child->words))
        (void)uv_poll_stop(poll);
}

/* Fails the child after the dynamic loader has ended the process. The loader wrote its reason to standard error. */
static void fail_unloaded(struct child *child)
{
    (void)last_words_read(&child->words);
    if (child->words.n_bytes == 0)
        child_fail(child, NULL, "exited with status %d", EXIT_NOT_LOADED);
    else
        child_fail(
            child, NULL,
            "could not be loaded (%s): if a library is not found, install it, or set LD_LIBRARY_PATH of zerod to "
            "its folder",
            child->words.line);
}

static void on_process_exit(uv_process_t *process, int64_t status, int signal)
{
    struct child *child = process->data;

    child->runs = false;
    if (child->closed) {
        uv_close((uv_handle_t *)process, on_closed);
        return;
    }
    /* First serves the packets that the process had sent, because they count, and may have the reason of its end. */
    while (!child->failure.begun && serve_batch(child))
        ;
    if (signal > 0)
        child_fail(child, NULL, "was killed by signal %d (%s)", signal, strsignal(signal));
    else if (status == EXIT_NOT_LOADED && !child->ready)
        fail_unloaded(child);
    else
        child_fail(child, NULL, "exited with status %d", (int)status);
}

/* ---- starting ------------------------------------------------------------------------------------------- */

/*
 * The child's environment: the variables by which programs and libraries are found, and the options of sanitizers in
 * tests.
 */
static const char *const kept_variables[] = {"PATH",          "LD_LIBRARY_PATH", "ASAN_OPTIONS",
                                             "UBSAN_OPTIONS", "TSAN_OPTIONS",    "LSAN_OPTIONS"};

static void environment_free(char **environment)
{
    for (size_t i = 0; environment && environment[i]; i++)
        free(environment[i]);
    free(environment);
}
DEFINE_CLEANUP(char **, environment_free);

/* Is the variable (NAME=VALUE) among the names? "X*" names all variables that begin with X. */
static bool is_named(const char *variable, const char *const *names, size_t n_names)
{
    for (size_t i = 0; i < n_names; i++) {
        size_t n = strcspn(names[i], "*");

        if (strncmp(variable, names[i], n) == 0 && (names[i][n] == '*' || variable[n] == '='))
            return true;
    }
    return false;
}

/* Return: a NULL-terminated array, or NULL if memory is out. */
static char **environment_new(const struct child *child)
{
    _cleanup_(environment_freep) char **environment = NULL;
    size_t n = 0;

    while (environ[n])
        n++;
    environment = calloc(n + 1, sizeof(*environment));
    n = 0;
    for (char **variable = environ; environment && *variable; variable++) {
        if (!is_named(*variable, kept_variables, ARRAY_SIZE(kept_variables)) &&
            !is_named(*variable, child->further, child->n_further))
            continue;
        environment[n] = strdup(*variable);
        if (!environment[n++])
            return NULL;
    }
    return steal_ptr(environment);
}

/* Finds an executable in the folder of the running program. path: gets the executable's path, or "". */
static void find_neighbour(const char *name, char *path, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", path, size - 1);
    char *slash;

    path[n > 0 ? n : 0] = '\0';
    slash = strrchr(path, '/');
    if (!slash || (size_t)(slash + 1 - path) + strlen(name) + 1 > size) {
        path[0] = '\0';
        return;
    }
    memcpy(slash + 1, name, strlen(name) + 1);
    if (access(path, X_OK) < 0)
        path[0] = '\0';
}

static char *find_program(const struct child_options *options)
{
    const char *program = options->program ? options->program : getenv(options->variable);
    char neighbour[PATH_MAX];

    if (program && program[0] != '\0')
        return strdup(program);
    find_neighbour(options->name, neighbour, sizeof(neighbour));
    return strdup(neighbour[0] != '\0' ? neighbour : options->name);
}

/* The child's end of the socket becomes descriptor 3 of the process. */
int child_start(struct child *child, char *why, size_t why_size)
{
    _cleanup_(environment_freep) char **environment = environment_new(child);
    char *args[] = {child->program, NULL};
    uv_stdio_container_t stdio[] = {
        {.flags = UV_IGNORE},
        {.flags = UV_IGNORE},
        {.flags = UV_INHERIT_FD, .data = {.fd = child->words.child_fd}},
        {.flags = UV_INHERIT_FD, .data = {.fd = child->child_fd}},
    };
    uv_process_options_t process = {
        .exit_cb = on_process_exit,
        .file = child->program,
        .args = args,
        .env = environment,
        .stdio = stdio,
        .stdio_count = ARRAY_SIZE(stdio),
    };
    int r = environment ? 0 : -ENOMEM;

    assert(!child->handles.has_process);
    if (!r) {
        child->handles.process.data = child;
        r = uv_spawn(child->loop, &child->handles.process, &process);
        child->runs = r == 0;
        child->handles.has_process = true; /* the handle must be closed, even if the start has failed */
        child->handles.n++;
    }
    if (r < 0)
        snprintf(why, why_size, "the engine %s cannot be started: %s", child->program, strerror(-r));
    close(steal_fd(&child->child_fd));
    close(steal_fd(&child->words.child_fd));
    wake_at(child, child->ready_deadline_ms);
    return r;
}

static int watch_words(struct child *child)
{
    int r = uv_poll_init(child->loop, &child->handles.words_poll, child->words.fd);

    if (r < 0)
        return r;
    child->handles.words_poll.data = child;
    child->handles.has_words_poll = true;
    child->handles.n++;
    return open_files_watch(&child->handles.words_poll, UV_READABLE, on_words);
}

static int watch_child(struct child *child)
{
    int r = uv_timer_init(child->loop, &child->handles.timer);

    assert(r == 0); /* libuv always returns 0 */
    child->handles.timer.data = child;
    child->handles.has_timer = true;
    child->handles.n++;
    r = uv_poll_init(child->loop, &child->handles.poll, child->fd);
    if (r < 0)
        return r;
    child->handles.poll.data = child;
    child->handles.has_poll = true;
    child->handles.n++;
    child->events = UV_READABLE;
    r = open_files_watch(&child->handles.poll, child->events, on_poll);
    return r < 0 ? r : watch_words(child);
}

static int allocate(struct child *child, const struct child_options *options)
{
    child->loop = options->loop;
    child->further = options->environment;
    child->n_further = options->n_environment;
    child->gives_fds = options->gives_fds;
    child->timer_ms = UINT64_MAX;
    child->traffic = options->traffic;
    child->ready_deadline_ms = now_ms() + options->ready_timeout_ms + CHILD_GRACE_MS;
    frame_queue_init(&child->queue, MAX_QUEUED_PACKETS, MAX_QUEUED_BYTES);
    child->program = find_program(options);
    if (!child->program)
        return -ENOMEM;
    return child->gives_fds ? frame_buffer_init(&child->buffer) : frame_batch_init(&child->batch);
}

static int make_socket(struct child *child, char *why, size_t why_size)
{
    int pair[2], r;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) < 0) {
        r = -errno;
        snprintf(why, why_size, "no socket for the engine: %s", strerror(-r));
        return r;
    }
    child->fd = pair[0];
    child->child_fd = pair[1];
    r = last_words_init(&child->words);
    if (!r)
        r = watch_child(child);
    if (r < 0)
        snprintf(why, why_size, "the engine cannot be set up: %s", strerror(-r));
    return r;
}

int child_new(struct child **out, const struct child_options *options, char *why, size_t why_size)
{
    struct child *child = calloc(1, sizeof(*child));
    int r = -ENOMEM;

    if (child) {
        child->fd = child->child_fd = -1;
        child->words = LAST_WORDS_NULL;
        child->ops = options->ops;
        r = allocate(child, options);
    }
    if (r < 0)
        snprintf(why, why_size, "no memory for the engine");
    else
        r = make_socket(child, why, why_size);
    *out = child;
    return r;
}

/* ---- sending -------------------------------------------------------------------------------------------- */

int child_send(struct child *child, const void *data, int n_bytes, int *fds, size_t n_fds)
{
    int n = child_is_over(child) ? -EPIPE : n_bytes, r = 0;

    assert(n_bytes != 0); /* an empty command would be lost */
    if (n > 0)
        r = frame_queue_send(&child->queue, child->fd, data, (size_t)n, fds, n_fds);
    for (size_t i = 0; n <= 0 && i < n_fds; i++)
        closep(&fds[i]);
    if (n < 0 || r < 0)
        child_fail(child, NULL, "cannot be given commands: %s", strerror(n < 0 ? -n : -r));
    else if (r == FRAME_E_FULL)
        child_fail(child, NULL, "does not read its commands");
    want_events(child);
    if (n < 0 || r < 0)
        return n < 0 ? n : r;
    return r == 0 ? 0 : r == FRAME_E_FULL ? -ENOBUFS : -EPIPE; /* FRAME_EOF: on_poll or on_process_exit reports it */
}

void child_close(struct child *child)
{
    if (!child)
        return;
    assert(!child->closed);
    child->closed = true;
    child_kill(child);
    if (child->handles.n == 0) {
        child_free(child);
        return;
    }
    if (child->handles.has_timer)
        uv_close((uv_handle_t *)&child->handles.timer, on_closed);
    if (child->handles.has_poll)
        uv_close((uv_handle_t *)&child->handles.poll, on_closed);
    if (child->handles.has_words_poll)
        uv_close((uv_handle_t *)&child->handles.words_poll, on_closed);
    /* If the process still runs, on_process_exit() closes its handle; without it the process would stay a zombie. */
    if (child->handles.has_process && !child->runs)
        uv_close((uv_handle_t *)&child->handles.process, on_closed);
}

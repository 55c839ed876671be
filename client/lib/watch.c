/* SPDX-License-Identifier: Apache-2.0 */

/* The watch sends the daemon the stack of the process (watch.h). */

#include "client/lib/watch.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/lib/handle.h"
#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"

enum {
    RETRY_MS = 1000,  /* pause before the next attempt to connect; picked */
    PYTHON_MS = 1000, /* a running program releases the interpreter lock within 5 ms; picked */
    STACK_BYTES = 256 * 1024,
};

struct watch {
    struct zerod_python python;
    struct sockaddr_un address;
    struct request_hello hello;
    pthread_t thread;
    int stop; /* eventfd */
    int fd;
    struct frame_buffer in;
    struct wire_arena arena;
    uint8_t *out; /* FRAME_MAX_BYTES */
};

/* ---- the stack ----------------------------------------------------------------------------------------- */

/* Only one watch at a time reads the stack, because the process has one Python and one faulthandler. */
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;
static uint64_t n_asked;

/* Return: true if fd is readable within that time. */
static bool is_readable(int fd, int timeout_ms)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};

    return poll(&poll_fd, 1, timeout_ms) > 0;
}

/* Asks the Python thread for the stack's text. Return: false if the thread has not answered in time. */
static bool ask_python(const struct zerod_python *python, char *text, size_t size)
{
    struct {
        uint64_t number;
        char text[WIRE_MAX_STACK_BYTES];
    } answer;
    uint64_t number = ++n_asked;
    ssize_t n;

    if (send(python->asked, &number, sizeof(number), MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        return false;
    while (is_readable(python->asked, PYTHON_MS)) {
        n = recv(python->asked, &answer, sizeof(answer), MSG_DONTWAIT);
        if (n < (ssize_t)sizeof(number))
            return false;
        if (answer.number != number)
            continue; /* the answer to an earlier question */
        snprintf(text, size, "%.*s", (int)((size_t)n - sizeof(number)), answer.text);
        return true;
    }
    return false;
}

/* Return: the handler of the signal, or NULL. */
static void *handler_of(int number)
{
    struct sigaction action;

    if (number <= 0 || sigaction(number, NULL, &action) < 0 || action.sa_handler == SIG_DFL ||
        action.sa_handler == SIG_IGN)
        return NULL;
    return (void *)action.sa_handler;
}

int zerod_unused_signal(void)
{
    struct sigaction action;

    for (int number = SIGRTMAX - 1; number > SIGRTMIN; number--)
        if (sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_DFL)
            return number;
    return 0;
}

/* faulthandler's handler of the signal, which the program may have replaced since. */
static void *_Atomic faulthandler;

/* Makes faulthandler write into its file, and reads the file. Return: the number of bytes, or 0 on failure. */
static size_t dump(const struct zerod_python *python, char *text, size_t size)
{
    ssize_t n;

    if (!faulthandler || handler_of(python->signal) != faulthandler || ftruncate(python->dump, 0) < 0 ||
        lseek(python->dump, 0, SEEK_SET) < 0)
        return 0;
    (void)pthread_kill(pthread_self(), python->signal); /* returns after the handler has returned */
    n = pread(python->dump, text, size - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    return n > 0 ? (size_t)n : 0;
}

/*
 * Return: the path below the folder of installed packages; otherwise the file's name. Does as
 * client/python/zerod/sites.py.
 */
static const char *shorten(const char *file)
{
    static const char *const folders[] = {"site-packages/", "dist-packages/"};

    for (size_t i = 0; i < ARRAY_SIZE(folders); i++)
        if (strstr(file, folders[i]))
            return strstr(file, folders[i]) + strlen(folders[i]);
    return strrchr(file, '/') ? strrchr(file, '/') + 1 : file;
}

/* Adds one line of a stack: ` File "/x/train.py", line 3 in load` becomes " train.py:3 in load". */
static void add_frame(struct strbuf *buf, const char *line, size_t n_bytes)
{
    const char *file;
    char text[1024], *end, *line_number;

    snprintf(text, sizeof(text), "%.*s", (int)n_bytes, line);
    file = strstr(text, "File \"");
    end = file ? strstr(file + 6, "\", line ") : NULL;
    if (!end) {
        strbuf_add(buf, "%s\n", text); /* " ..." means further frames */
        return;
    }
    *end = '\0';
    file += 6;
    line_number = end + strlen("\", line ");
    file = shorten(file);
    end = strchr(line_number, ' ');
    strbuf_add(buf, "  %s:%.*s%s\n", file, end ? (int)(end - line_number) : (int)strlen(line_number), line_number,
               end ? end : "");
}

/* Adds the stacks that faulthandler has written: the main thread's, or those of all other threads. */
static void add_threads(struct strbuf *buf, const char *text, const struct zerod_python *python, bool is_main)
{
    bool takes = false;
    uint64_t thread;

    for (size_t n; *text; text += n + (text[n] == '\n')) {
        const char *number = strstr(text, "hread 0x");

        n = strcspn(text, "\n");
        if (number && number < text + n && *text != ' ') {
            thread = strtoull(number + strlen("hread "), NULL, 16);
            takes = (thread == python->main_thread) == is_main && thread != python->own_thread;
            if (takes && is_main)
                strbuf_add(buf, "main thread, while code in C keeps Python's interpreter lock:\n");
            else if (takes)
                strbuf_add(buf, "thread:\n");
        } else if (takes && n > 0) {
            add_frame(buf, text, n);
        }
    }
}

/* Return: the stack of the process, which the caller frees; "" if the stack is unknown. */
static struct strbuf read_stack(const struct zerod_python *python)
{
    static char text[4 * WIRE_MAX_STACK_BYTES];
    struct strbuf buf = {0};

    pthread_mutex_lock(&looking);
    if (ask_python(python, text, sizeof(text))) {
        strbuf_add(&buf, "%s", text);
    } else if (dump(python, text, sizeof(text)) > 0) {
        add_threads(&buf, text, python, true);
        add_threads(&buf, text, python, false);
    }
    pthread_mutex_unlock(&looking);
    return buf;
}

/* ---- the connection ------------------------------------------------------------------------------------ */

static int send_request(struct watch *watch, const struct request *request)
{
    int n = wire_pack_request(&watch->arena, request, watch->out, FRAME_MAX_BYTES);

    return n < 0 ? n : frame_send(watch->fd, watch->out, (size_t)n, NULL, 0);
}

/* Waits for the socket. Return: false if the watch must stop. */
static bool wait_for_packet(const struct watch *watch, int timeout_ms)
{
    struct pollfd fds[] = {{.fd = watch->stop, .events = POLLIN}, {.fd = watch->fd, .events = POLLIN}};

    return poll(fds, watch->fd < 0 ? 1 : 2, timeout_ms) >= 0 ? !fds[0].revents : errno == EINTR;
}

static int send_stack(struct watch *watch)
{
    struct strbuf stack = read_stack(&watch->python);
    int r = send_request(watch, &(struct request){.type = REQUEST_STACK, .stack = {.text = strbuf_text(&stack)}});

    strbuf_deinit(&stack);
    return r;
}

/* Answers the daemon's questions until the connection breaks. Return: false if the watch must stop. */
static bool serve_connection(struct watch *watch)
{
    char why[WIRE_WHY_BYTES];
    struct reply reply;
    int r = send_request(watch, &(struct request){.type = REQUEST_HELLO, .hello = watch->hello});

    while (r == 0) {
        if (!wait_for_packet(watch, -1))
            return false;
        r = frame_receive_fds(watch->fd, &watch->in);
        if (r == FRAME_AGAIN) {
            r = 0;
            continue;
        }
        if (r == 0)
            r = wire_unpack_reply(&watch->arena, watch->in.data, watch->in.n_bytes, &reply, why, sizeof(why));
        if (r == 0 && reply.type == REPLY_REFUSED)
            return false; /* an older daemon, without watches, has adopted the job */
        if (r == 0)
            r = reply.type == REPLY_LOOK ? send_stack(watch) : -EPROTO;
    }
    return true;
}

/* The thread of the watch. It reconnects when a connection has ended. */
static void *serve_until_stopped(void *userdata)
{
    struct watch *watch = userdata;
    bool goes_on = true;

    while (goes_on) {
        watch->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (watch->fd >= 0 && connect(watch->fd, (const struct sockaddr *)&watch->address, sizeof(watch->address)) == 0)
            goes_on = serve_connection(watch);
        if (watch->fd >= 0) {
            (void)shutdown(watch->fd, SHUT_RDWR); /* because a forked child may hold the socket too */
            close(steal_fd(&watch->fd));
        }
        goes_on = goes_on && wait_for_packet(watch, RETRY_MS);
    }
    return NULL;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void watch_free(struct watch *watch)
{
    if (watch->stop >= 0)
        close(watch->stop);
    frame_buffer_deinit(&watch->in);
    wire_arena_deinit(&watch->arena);
    free(watch->out);
    free(watch);
}

/*
 * Starts the watch's thread. Of all signal handlers only faulthandler's and those of SIGSEGV and SIGBUS run on this
 * thread.
 */
static int start_watching(struct watch *watch)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    int r = pthread_attr_init(&attributes);

    if (r != 0)
        return -r;
    sigfillset(&all);
    for (int i = 0; i < 2; i++) /* a fault in this thread must be reported too */
        sigdelset(&all, (const int[]){SIGSEGV, SIGBUS}[i]);
    if (watch->python.signal > 0)
        sigdelset(&all, watch->python.signal);
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    r = pthread_create(&watch->thread, &attributes, serve_until_stopped, watch);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return -r;
}

int zerod_watch(struct zerod *c, const struct zerod_python *python)
{
    struct watch *watch = c->welcome.looks && !c->watch ? calloc(1, sizeof(*watch)) : NULL;
    int r = watch ? 0 : -ENOTSUP;

    if (r < 0)
        return r;
    if (!faulthandler)
        faulthandler = handler_of(python->signal);
    *watch = (struct watch){
        .python = *python,
        .address = c->call.address,
        .hello = {.version_min = WIRE_VERSION,
                  .version_max = WIRE_VERSION,
                  .role = WIRE_ROLE_WATCH,
                  .rank = c->rank,
                  .run_id = "",
                  .incarnation = c->incarnation,
                  .client = "",
                  .optimizer = ""},
        .stop = eventfd(0, EFD_CLOEXEC),
        .fd = -1,
        .in = FRAME_BUFFER_NULL,
        .arena = WIRE_ARENA_NULL,
        .out = malloc(FRAME_MAX_BYTES),
    };
    if (watch->stop < 0 || !watch->out || frame_buffer_init(&watch->in) < 0 || wire_arena_init(&watch->arena) < 0)
        r = -ENOMEM;
    if (r == 0)
        r = start_watching(watch);
    if (r < 0)
        watch_free(watch);
    else
        c->watch = watch;
    return r;
}

void watch_stop(struct watch *watch)
{
    if (!watch)
        return;
    (void)eventfd_write(watch->stop, 1);
    (void)pthread_join(watch->thread, NULL);
    watch_free(watch);
}

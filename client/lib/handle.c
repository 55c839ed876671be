/* SPDX-License-Identifier: Apache-2.0 */

/* Connects, leaves and closes a handle, and returns facts about its job. */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/lib/write-fault.h"
#include "client/lib/handle.h"
#include "client/lib/push.h"
#include "client/lib/reconnect.h"
#include "client/lib/api-step.h"
#include "client/lib/watch.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/who-may.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

enum { HELLO_MS = 10000 }; /* documented in zerod_options.timeout_ms */

/* For zerod_error(NULL): why the calling thread's last zerod_connect() returned no handle. */
static __thread struct client_error connect_error;

/* ---- errors -------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static int connect_fail(int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    error_print(&connect_error, status, format, args);
    va_end(args);
    return status;
}

const struct zerod_error *zerod_error(const struct zerod *c)
{
    const struct client_error *error = c ? &c->call.error : &connect_error;
    static const struct zerod_error none = {
        .text = "no error", .cause_class = "", .rank = -1, .step = -1, .micro_batch = -1};

    return error->public.text ? &error->public : &none;
}

/* ---- connect ------------------------------------------------------------------------------------------- */

/*
 * Allocates a page that the kernel clears in a forked child, because a system call of getpid() is too slow for each
 * push.
 */
static int watch_forks(struct zerod *c)
{
    size_t n = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED)
        return connect_fail(-ENOMEM, "out of memory");
    c->call.mine = page;
    *c->call.mine = true;
    if (madvise(page, n, MADV_WIPEONFORK) < 0)
        return connect_fail(-errno, "madvise(MADV_WIPEONFORK): %s", strerror(errno));
    return 0;
}

static int connect_fail_errno(const char *path, int error)
{
    char hint[WHO_MAY_BYTES] = "";

    if (error == ENOENT || error == ECONNREFUSED)
        snprintf(hint, sizeof(hint), "; is the daemon running (zerod --config FILE)?");
    else if (error == EACCES || error == EPERM)
        who_may_open(path, hint);
    return connect_fail(-error, "cannot connect to zerod at %s: %s%s", path, strerror(error), hint);
}

static int open_socket(struct zerod *c, const char *path)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};

    if (strlen(path) >= sizeof(sa.sun_path))
        return connect_fail(-ENAMETOOLONG, "socket path of %zu bytes, at most %zu are possible: %s", strlen(path),
                            sizeof(sa.sun_path) - 1, path);
    strcpy(sa.sun_path, path);
    c->call.address = sa;
    c->call.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (c->call.fd < 0 || connect(c->call.fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
        return connect_fail_errno(path, errno);
    return 0;
}

static long number_from(const char *variable)
{
    const char *text = getenv(variable);
    char *end;
    long n = text ? strtol(text, &end, 10) : -1;

    return text && *text && !*end && n >= 0 && n <= INT32_MAX ? n : -1;
}

static int say_hello(struct zerod *c)
{
    struct reply reply;
    int r;

    c->call.mend.on_break = resume_after_break;
    c->call.mend.arg = c;
    /* This limit is used until the daemon has sent its own. */
    c->call.mend.reattach_ms = (uint64_t)(c->call.timeout_ms > 0 ? c->call.timeout_ms : HELLO_MS);
    c->connecting = true;
    r = call_ask(&c->call, &(struct request){.type = REQUEST_HELLO, .hello = resume_hello(c)}, REPLY_WELCOME, &reply);
    if (r == 0)
        r = resume_keep_welcome(c, &reply.welcome);
    c->connecting = false;
    return r;
}

static int init_handle(struct zerod *c, const struct zerod_options *options)
{
    const char *path = options->socket ? options->socket : getenv("ZEROD_SOCKET");
    long rank = options->rank >= 0 ? options->rank : number_from("RANK");
    char why[160];
    int r;

    if (!path || !*path)
        return connect_fail(-EINVAL, "no socket: set zerod_options.socket or the environment variable ZEROD_SOCKET");
    if (rank < 0)
        return connect_fail(-EINVAL, "no rank: set zerod_options.rank or the environment variable RANK");
    c->rank = (unsigned)rank;
    c->flags = options->flags;
    c->call.interrupted = options->interrupted;
    c->call.interrupted_arg = options->interrupted_arg;
    if (call_init(&c->call) < 0 || resume_init(c, options) < 0)
        return connect_fail(-ENOMEM, "out of memory");
    c->is_torch = strcasestr(c->wants.client, "torch") != NULL;
    while (c->incarnation == 0)
        if (getrandom(&c->incarnation, sizeof(c->incarnation), 0) != sizeof(c->incarnation))
            return connect_fail(-EIO, "no random numbers");
    r = kernels_select(&c->kernels, NULL, why, sizeof(why));
    if (r < 0)
        return connect_fail(r, "%s", why);
    return open_socket(c, path);
}

/* Return: true if the daemon answers Hello only after other ranks have left or connected. */
static bool waits_for_others(const struct zerod *c)
{
    return c->flags & (ZEROD_AGAIN | ZEROD_ANEW);
}

static void on_abort(void *arg, const struct wire_position *position)
{
    step_forget(arg, position);
}

int zerod_connect(struct zerod **out, const struct zerod_options *options)
{
    struct zerod *c = calloc(1, sizeof(*c));
    int r;

    *out = NULL;
    error_reset(&connect_error);
    if (!c)
        return connect_fail(-ENOMEM, "out of memory");
    c->call.fd = -1;
    c->call.in = FRAME_BUFFER_NULL;
    c->call.on_abort = on_abort;
    c->call.on_abort_arg = c;
    c->ring = c->overflow = c->credit = c->published = c->weights = c->pool = c->window = c->progress = MAPPING_NULL;
    c->memory = &host_memory;
    r = watch_forks(c);
    if (r == 0)
        r = init_handle(c, options);
    if (r < 0) {
        zerod_close(c);
        return r;
    }
    (void)failpoint("connected");
    c->call.timeout_ms = options->timeout_ms > 0 || waits_for_others(c) ? options->timeout_ms : HELLO_MS;
    r = say_hello(c);
    c->call.timeout_ms = options->timeout_ms;
    if (r < 0) {
        connect_fail(r, "%s", c->call.error.public.text);
        zerod_close(c);
        return r;
    }
    *out = c;
    return r;
}

/* ---- end ----------------------------------------------------------------------------------------------- */

int zerod_leave(struct zerod *c)
{
    struct reply reply;
    int r = handle_check(c);

    if (r == 0)
        r = call_ask(&c->call, &(struct request){.type = REQUEST_LEAVE}, REPLY_DONE, &reply);
    c->call.left = r == 0;
    if (r == 0) /* the rank may attach again, also from this process */
        (void)shutdown(c->call.fd, SHUT_RDWR);
    return r;
}

static void leave_if_done(int status, void *c)
{
    if (status == 0)
        (void)zerod_leave(c);
}

int zerod_leave_at_exit(struct zerod *c)
{
    c->call.interrupted = NULL; /* the callback's owner may not exist at exit */
    return on_exit(leave_if_done, c) == 0 ? 0 : -ENOMEM;
}

void zerod_close(struct zerod *c)
{
    if (!c)
        return;
    if (c->call.mine && *c->call.mine)
        watch_stop(c->watch); /* not in a forked child, which does not have the thread */
    fault_unregister(c);
    /*
     * Shuts the connection down, because a forked child may hold the socket, which would keep the rank attached. A
     * child must not shut its parent's connection down.
     */
    if (c->call.fd >= 0 && *c->call.mine)
        (void)shutdown(c->call.fd, SHUT_RDWR);
    if (c->call.fd >= 0)
        close(steal_fd(&c->call.fd));
    c->memory->stop(c);
    push_deinit(c);
    c->memory->deinit(c);
    mapping_deinit(&c->overflow);
    mapping_deinit(&c->credit);
    mapping_deinit(&c->published);
    layout_free(c->layout);
    manifest_deinit(&c->manifest);
    free(c->inits);
    free(c->expected);
    free(c->gathered);
    free(c->blob);
    free(c->status);
    resume_deinit(c);
    call_deinit(&c->call);
    free(c);
}

/* ---- small calls --------------------------------------------------------------------------------------- */

int zerod_fd(const struct zerod *c)
{
    return c->call.fd;
}

const char *zerod_version(void)
{
    return ZEROD_VERSION;
}

unsigned zerod_world_size(const struct zerod *c)
{
    return c->welcome.world_size;
}

#define FIELD(kind, field, plain, text, gives, range, only) .field = h->field,

int zerod_job(struct zerod *c, struct zerod_job *out)
{
    const struct reply_welcome *w = &c->welcome;
    const struct wire_hyper *h = &w->hyper;

    if (!w->run_id)
        return call_fail(&c->call, -EINVAL, "zerod_job: zerod_connect was refused");
    *out = (struct zerod_job){
        .world_size = w->world_size,
        .stage = w->stage,
        .private_weights = w->private_weights,
        .on_duplicate = (enum zerod_on_duplicate)w->on_duplicate,
        .run_id = w->run_id,
        .optimizer = w->optimizer,
        .hyper = {HYPER_FIELDS(FIELD)},
        .has_scheduler = w->has_scheduler,
        .max_norm = w->max_norm,
        .mean = w->mean,
        .fp16 = w->fp16,
        .accumulation = w->accumulation,
        .max_live_elems = w->stage3_max_live_elems,
        .cuda = w->cuda,
        .configured = w->configured,
        .configured_stage = w->configured_stage ? w->configured_stage : w->stage,
    };
    return 0;
}

#undef FIELD

struct zerod_position zerod_epoch(const struct zerod *c)
{
    return (struct zerod_position){
        .step = c->position.step,
        .micro_batch = c->position.micro_batch,
        .attempt = c->position.attempt,
        .n_windows = c->position.n_windows,
    };
}

double zerod_loss_scale(const struct zerod *c)
{
    return c->call.loss_scale;
}

int zerod_user_state(struct zerod *c, const void **data, size_t *len)
{
    int r = handle_is_formed(c);

    if (r != 0)
        return r;
    *data = c->blob;
    *len = c->n_blob_bytes;
    return 0;
}

int zerod_set_stream(struct zerod *c, void *stream)
{
    int r = call_check(&c->call);

    if (r == 0)
        c->stream = stream;
    return r;
}

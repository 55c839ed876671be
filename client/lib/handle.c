/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "client/lib/handle.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/wire/hyper-check.h"

enum { LISTENER_ENDS_MS = 200 }; /* picked: the sockets of a killed process are closed together */

/* zerod_error(NULL): why the calling thread's last zerod_connect() gave no handle. */
static __thread struct client_error connect_error;

/* ---- errors -------------------------------------------------------------------------------------------- */

static void error_reset(struct client_error *error)
{
    free(error->text);
    free(error->cause_class);
    for (size_t i = 0; i < ARRAY_SIZE(error->params); i++)
        free(error->params[i]);
    for (size_t i = 0; i < ARRAY_SIZE(error->fields); i++) {
        free((char *)error->fields[i].label);
        free((char *)error->fields[i].text);
    }
    memset(error, 0, sizeof(*error));
}

static void error_publish(struct client_error *error, int status)
{
    struct zerod_error *e = &error->public;

    e->status = status;
    e->text = error->text ? error->text : "out of memory";
    e->cause_class = error->cause_class ? error->cause_class : "";
    e->params = (const char *const *)error->params;
    e->fields = error->fields;
}

__attribute__((format(printf, 3, 0))) static void error_print(struct client_error *error, int status,
                                                              const char *format, va_list args)
{
    error_reset(error);
    error->public.rank = error->public.micro_batch = -1;
    error->public.step = -1;
    if (vasprintf(&error->text, format, args) < 0)
        error->text = NULL;
    error_publish(error, status);
}

int client_fail(struct zerod *c, int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    error_print(c ? &c->error : &connect_error, status, format, args);
    va_end(args);
    return status;
}

int client_fatal(struct zerod *c, int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    error_print(&c->error, status, format, args);
    va_end(args);
    c->fatal = status;
    return status;
}

static void error_from_diagnostic(struct client_error *error, int status, const struct wire_diagnostic *d)
{
    struct zerod_error *e = &error->public;

    size_t n = strlen(d->text);

    error_reset(error);
    while (n > 0 && d->text[n - 1] == '\n')
        n--;
    error->text = strndup(d->text, n);
    error->cause_class = strdup(d->cause_class);
    e->code = (int)d->code;
    e->rank = d->has_rank ? (long)d->rank : -1;
    e->step = d->has_step ? (int64_t)d->step : -1;
    e->micro_batch = d->has_micro_batch ? (long)d->micro_batch : -1;
    for (size_t i = 0; i < MIN(d->n_params_named, ARRAY_SIZE(error->params)); i++)
        error->params[i] = strdup(d->params[i]);
    e->n_params = d->n_params_total;
    for (size_t i = 0; i < MIN(d->n_fields, ARRAY_SIZE(error->fields)); i++) {
        error->fields[i].label = strdup(d->fields[i].label);
        error->fields[i].text = strdup(d->fields[i].text);
        e->n_fields++;
    }
    error_publish(error, status);
}

const struct zerod_error *zerod_error(const struct zerod *c)
{
    const struct client_error *error = c ? &c->error : &connect_error;
    static const struct zerod_error none = {
        .text = "no error", .cause_class = "", .rank = -1, .step = -1, .micro_batch = -1};

    return error->public.text ? &error->public : &none;
}

/* ---- one request, one answer --------------------------------------------------------------------------- */

static int64_t now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

/*
 * How long one poll() may last. A signal that comes before it, or that another thread takes, does not end it: so
 * the caller is asked in between, too.
 */
static int poll_ms(const struct zerod *c, int64_t left_ms)
{
    enum { ASK_EVERY_MS = 1000 };

    if (c->interrupted && (left_ms < 0 || left_ms > ASK_EVERY_MS))
        return ASK_EVERY_MS;
    return (int)MIN(left_ms, (int64_t)INT32_MAX);
}

/* Return: 0 when the socket may be ready, or a fatal error. */
static int wait_for(struct zerod *c, short events, int64_t deadline_ms)
{
    struct pollfd pollfd = {.fd = c->fd, .events = events};
    int64_t left = deadline_ms < 0 ? -1 : MAX(deadline_ms - now_ms(), (int64_t)0);
    int ms = poll_ms(c, left), r = poll(&pollfd, 1, ms);

    if (r < 0 && errno != EINTR)
        return client_fatal(c, -errno, "waiting for zerod: %s", strerror(errno));
    if (r <= 0 && c->interrupted && c->interrupted(c->interrupted_arg) != 0)
        return client_fatal(c, -EINTR, "interrupted while %s %s",
                            events == POLLIN ? "waiting for zerod's answer to" : "sending", c->waits_for);
    if (r < 0 || (r == 0 && ms != left))
        return 0;
    if (r == 0)
        return client_fatal(c, -ETIMEDOUT,
                            "zerod did not answer within %d ms; zerodctl status shows who waits for whom",
                            c->timeout_ms);
    return 0;
}

static int64_t deadline(const struct zerod *c)
{
    return c->timeout_ms > 0 ? now_ms() + c->timeout_ms : -1;
}

/* Return: the process that listens at the other end of the socket; 0: unknown. */
static pid_t listener_of(int fd)
{
    struct ucred peer = {0};
    socklen_t n_bytes = sizeof(peer);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes) == 0 ? peer.pid : 0;
}

/*
 * Does the daemon of this connection still take others? Not another one that was started in its place; and of a service
 * manager's socket, which is always there, nobody knows. While a killed daemon's sockets are closed, its listener may be
 * the last: a connection to it ends soon.
 */
static bool is_served(const struct zerod *c)
{
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct pollfd end = {.fd = fd};
    pid_t pid = listener_of(c->fd);

    if (fd < 0 || pid <= 1 || connect(fd, (const struct sockaddr *)&c->address, sizeof(c->address)) < 0)
        return false;
    return listener_of(fd) == pid && poll(&end, 1, LISTENER_ENDS_MS) == 0;
}

/* A daemon that ends closes its socket first. */
static int lost(struct zerod *c)
{
    return client_fatal(c, -ECONNRESET, "%s",
                        is_served(c) ? "zerod has closed this connection alone, and still listens: its log says why"
                                     : "zerod has closed the connection: it was stopped or killed; see its log");
}

/* Packs into out, from *n_bytes on. */
static int pack(struct zerod *c, const struct request *request, size_t *n_bytes, struct frame_packet *packet)
{
    int n = wire_pack_request(&c->arena, request, c->out + *n_bytes, FRAME_MAX_BYTES - *n_bytes);

    c->waits_for = request_type_name(request->type);
    if (n < 0)
        return client_fatal(c, n, "%s does not fit into a packet", request_type_name(request->type));
    *packet = (struct frame_packet){.data = c->out + *n_bytes, .n_bytes = (size_t)n};
    *n_bytes += (size_t)n;
    (void)failpoint_at(request_type_name(request->type), "send");
    return 0;
}

static int send_packets(struct zerod *c, const struct frame_packet *packets, size_t n_packets)
{
    size_t n_sent;
    int r;

    for (;;) {
        r = frame_send_many(c->fd, packets, n_packets, &n_sent);
        if (r == 0) {
            (void)failpoint_at(c->waits_for, "sent");
            return 0;
        }
        if (r == FRAME_EOF)
            return 1; /* the daemon may have said why: the caller reads it */
        if (r < 0)
            return client_fatal(c, r, "sending %s: %s", c->waits_for, strerror(-r));
        r = wait_for(c, POLLOUT, deadline(c));
        if (r < 0)
            return r;
        packets += n_sent;
        n_packets -= n_sent;
    }
}

static int check_left(struct zerod *c)
{
    return c->left ? client_fail(c, -EINVAL, "zerod_leave was called: only zerod_close is left") : 0;
}

/* What a rank that hangs now does not owe. */
static void note_held(struct zerod *c)
{
    struct held_pushes *held = (struct held_pushes *)(c->ring.base + held_pushes_offset(c->ring_bytes));

    if (c->n_held > 0)
        atomic_store_explicit(&held->params[c->n_held - 1], c->held[c->n_held - 1].param, memory_order_relaxed);
    atomic_store_explicit(&held->n, (uint32_t)c->n_held, memory_order_release);
}

int client_flush(struct zerod *c)
{
    struct frame_packet packets[HELD_PUSHES];
    size_t n_bytes = 0, n = c->n_held;
    int r = 0;

    if (n == 0)
        return 0;
    c->n_held = 0;
    c->n_held_grad_bytes = 0;
    for (size_t i = 0; i < n && r == 0; i++)
        r = pack(c, &(struct request){.type = REQUEST_PUSH, .push = c->held[i]}, &n_bytes, &packets[i]);
    if (r == 0)
        r = send_packets(c, packets, n);
    note_held(c);
    return r;
}

int client_hold(struct zerod *c, const struct request_push *push, uint64_t n_grad_bytes)
{
    int r = check_left(c);

    if (r != 0)
        return r;
    c->held[c->n_held++] = *push;
    c->n_held_grad_bytes += n_grad_bytes;
    note_held(c);
    return c->n_held == HELD_PUSHES || c->n_held_grad_bytes >= CLIENT_HOLD_BYTES ? client_flush(c) : 0;
}

int client_send(struct zerod *c, const struct request *request)
{
    struct frame_packet packet;
    size_t n_bytes = 0;
    int r = check_left(c);

    if (r == 0)
        r = client_flush(c);
    if (r == 0)
        r = pack(c, request, &n_bytes, &packet);
    return r == 0 ? send_packets(c, &packet, 1) : r;
}

/* Each segment comes with a descriptor. */
static size_t n_promised(const struct reply *reply)
{
    switch (reply->type) {
    case REPLY_FORMED:
        return reply->formed.n_segments;
    case REPLY_DONE:
        return reply->done.n_segments;
    case REPLY_STATE_IS:
        return reply->state_is.n_segments;
    default:
        return 0;
    }
}

static int receive(struct zerod *c, struct reply *reply)
{
    int64_t until = deadline(c);
    char why[WIRE_WHY_BYTES];
    int r;

    while ((r = frame_receive_fds(c->fd, &c->in)) == FRAME_AGAIN) {
        r = wait_for(c, POLLIN, until);
        if (r < 0)
            return r;
    }
    if (r == FRAME_EOF || r == -ECONNRESET)
        return lost(c);
    if (r == FRAME_E_FDS)
        return client_fatal(c, -EMFILE,
                            "the descriptors of zerod's answer were lost: this process has none left; raise ulimit -n, or "
                            "close files");
    if (r != 0)
        return client_fatal(c, r < 0 ? r : -EPROTO, "receiving from zerod: %s",
                            r < 0 ? strerror(-r) : "a packet of more than 131071 bytes");
    r = wire_unpack_reply(&c->arena, c->in.data, c->in.n_bytes, reply, why, sizeof(why));
    if (r != 0)
        return client_fatal(c, r < 0 ? r : -EPROTO, "zerod's answer is not understood: %s", why);
    if (n_promised(reply) != c->in.n_fds)
        return client_fatal(c, -EPROTO, "zerod's answer promises %zu segments of memory and brings %zu descriptors",
                            n_promised(reply), c->in.n_fds);
    return 0;
}

static int refused(struct zerod *c, const struct reply_refused *refusal)
{
    int status = refusal->aborted ? ZEROD_ABORTED : ZEROD_REFUSED;
    struct wire_position position = refusal->position;
    bool closing = refusal->closing;
    int r = 0;

    error_from_diagnostic(&c->error, status, &refusal->diagnostic);
    if (closing)
        c->fatal = -ECONNABORTED;
    if (!refusal->aborted)
        return status;
    c->position = position;
    weights_close_window(c);
    push_close(c);
    r = client_send(c, &(struct request){.type = REQUEST_ABORT_SEEN, .abort_seen = {.attempt = position.attempt}});
    return r < 0 ? r : r > 0 ? lost(c) : status;
}

int client_call(struct zerod *c, const struct request *request, enum reply_type type, struct reply *reply)
{
    int r = client_send(c, request);

    if (r < 0)
        return r;
    (void)failpoint_at(request_type_name(request->type), "wait");
    r = receive(c, reply);
    if (r < 0)
        return r;
    (void)failpoint_at(request_type_name(request->type), "answered");
    if (reply->type == REPLY_REFUSED)
        return refused(c, &reply->refused);
    if (reply->type == REPLY_DONE && reply->done.loss_scale > 0)
        c->loss_scale = reply->done.loss_scale;
    if (reply->type != type)
        return client_fatal(c, -EPROTO, "zerod answered %s with %s", request_type_name(request->type),
                            reply_type_name(reply->type));
    return 0;
}

int client_cuda_failed(struct zerod *c, int r)
{
    return client_fatal(c, r, "the GPU: %s", cuda_why(c->cuda));
}

int client_wait_for_stream(struct zerod *c)
{
    int r = c->cuda ? cuda_wait(c->cuda, c->stream) : 0;

    return r == 0 ? 0 : client_cuda_failed(c, r);
}

int zerod_set_stream(struct zerod *c, void *stream)
{
    int r = client_check(c, false);

    if (r == 0)
        c->stream = stream;
    return r;
}

/* A push is too short for getpid(), which is a system call. */
static int watch_forks(struct zerod *c)
{
    size_t n = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED)
        return client_fail(NULL, -ENOMEM, "out of memory");
    c->mine = page;
    *c->mine = true;
    if (madvise(page, n, MADV_WIPEONFORK) < 0)
        return client_fail(NULL, -errno, "madvise(MADV_WIPEONFORK): %s", strerror(errno));
    return 0;
}

int client_check(struct zerod *c, bool needs_formed)
{
    if (!*c->mine)
        return -ECHILD;
    if (c->fatal)
        return c->fatal;
    if (needs_formed && !c->formed)
        return client_fail(c, -EINVAL, "call zerod_form first");
    return 0;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static int open_socket(struct zerod *c, const char *path)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};

    if (strlen(path) >= sizeof(sa.sun_path))
        return client_fail(NULL, -ENAMETOOLONG, "socket path of %zu bytes, at most %zu are possible: %s", strlen(path),
                           sizeof(sa.sun_path) - 1, path);
    strcpy(sa.sun_path, path);
    c->address = sa;
    c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
        return client_fail(NULL, -errno, "cannot connect to zerod at %s: %s%s", path, strerror(errno),
                           errno == ENOENT || errno == ECONNREFUSED ? "; is the daemon running (zerod --config FILE)?"
                           : errno == EACCES ? "; your user may not open the socket: listen.mode, listen.allow_groups"
                                             : "");
    return 0;
}

static long number_from(const char *variable)
{
    const char *text = getenv(variable);
    char *end;
    long n = text ? strtol(text, &end, 10) : -1;

    return text && *text && !*end && n >= 0 && n <= INT32_MAX ? n : -1;
}

static int keep_welcome(struct zerod *c, const struct reply_welcome *welcome)
{
    c->welcome = *welcome;
    c->run_id = strdup(welcome->run_id);
    c->optimizer = strdup(welcome->optimizer);
    c->welcome.server = NULL;
    c->welcome.run_id = c->run_id;
    c->welcome.optimizer = c->optimizer;
    return c->run_id && c->optimizer ? 0 : client_fatal(c, -ENOMEM, "out of memory");
}

static const char *client_name(const struct zerod_options *options)
{
    return options->client ? options->client : program_invocation_short_name;
}

static int say_hello(struct zerod *c, const struct zerod_options *options)
{
    const char *run_id = options->run_id ? options->run_id : getenv("ZEROD_RUN_ID");
    struct reply reply;
    int r = client_call(c,
                        &(struct request){
                            .type = REQUEST_HELLO,
                            .hello =
                                {
                                    .version_min = WIRE_VERSION,
                                    .version_max = WIRE_VERSION,
                                    .role = WIRE_ROLE_TRAINER,
                                    .rank = c->rank,
                                    .run_id = run_id ? run_id : "",
                                    .incarnation = c->incarnation,
                                    .on_duplicate = (enum wire_on_duplicate)options->on_duplicate,
                                    .client = client_name(options),
                                    .optimizer = options->optimizer ? options->optimizer : "",
                                    .momentum = options->momentum,
                                },
                        },
                        REPLY_WELCOME, &reply);

    return r == 0 ? keep_welcome(c, &reply.welcome) : r;
}

static int init(struct zerod *c, const struct zerod_options *options)
{
    const char *path = options->socket ? options->socket : getenv("ZEROD_SOCKET");
    long rank = options->rank >= 0 ? options->rank : number_from("RANK");
    char why[160];
    int r;

    if (!path || !*path)
        return client_fail(NULL, -EINVAL,
                           "no socket: set zerod_options.socket or the environment variable ZEROD_SOCKET");
    if (rank < 0)
        return client_fail(NULL, -EINVAL, "no rank: set zerod_options.rank or the environment variable RANK");
    c->rank = (unsigned)rank;
    c->flags = options->flags;
    c->interrupted = options->interrupted;
    c->interrupted_arg = options->interrupted_arg;
    c->is_torch = strcasestr(client_name(options), "torch") != NULL;
    c->out = malloc(FRAME_MAX_BYTES);
    if (!c->out || frame_buffer_init(&c->in) < 0 || wire_arena_init(&c->arena) < 0)
        return client_fail(NULL, -ENOMEM, "out of memory");
    while (c->incarnation == 0)
        if (getrandom(&c->incarnation, sizeof(c->incarnation), 0) != sizeof(c->incarnation))
            return client_fail(NULL, -EIO, "no random numbers");
    r = kernels_select(&c->kernels, NULL, why, sizeof(why));
    if (r < 0)
        return client_fail(NULL, r, "%s", why);
    return open_socket(c, path);
}

int zerod_connect(struct zerod **out, const struct zerod_options *options)
{
    struct zerod *c = calloc(1, sizeof(*c));
    int r;

    *out = NULL;
    error_reset(&connect_error);
    if (!c)
        return client_fail(NULL, -ENOMEM, "out of memory");
    c->fd = -1;
    c->ring = c->overflow = c->credit = c->weights = c->pool = c->window = MAPPING_NULL;
    c->in = FRAME_BUFFER_NULL;
    r = watch_forks(c);
    if (r == 0)
        r = init(c, options);
    if (r < 0) {
        zerod_close(c);
        return r;
    }
    (void)failpoint("connected");
    c->timeout_ms = options->timeout_ms > 0 ? options->timeout_ms : 10000;
    r = say_hello(c, options);
    c->timeout_ms = options->timeout_ms;
    if (r < 0) {
        client_fail(NULL, r, "%s", c->error.public.text);
        zerod_close(c);
        return r;
    }
    *out = c;
    return r;
}

/* What the stream still does with this memory has to end; and a forked child must not call the driver at all. */
static void give_up_gpu(struct zerod *c)
{
    if (!c->cuda)
        return;
    if (*c->mine) {
        (void)cuda_wait(c->cuda, c->stream);
        return;
    }
    c->ring = MAPPING_NULL;
    weights_forget_device(c);
    c->device_scratch = NULL;
    for (uint32_t i = 0; c->places && i < c->layout->n_params; i++)
        c->places[i] = NULL;
    c->cuda = NULL;
}

void zerod_close(struct zerod *c)
{
    if (!c)
        return;
    fault_unregister(c);
    /* A forked child that holds the socket would keep the rank taken; and a child's copy must not end its parent's. */
    if (c->fd >= 0 && *c->mine)
        (void)shutdown(c->fd, SHUT_RDWR);
    if (c->fd >= 0)
        close(c->fd);
    give_up_gpu(c);
    weights_deinit(c);
    push_deinit(c);
    mapping_deinit(&c->ring);
    mapping_deinit(&c->overflow);
    mapping_deinit(&c->credit);
    cuda_free(c->cuda);
    if (c->mine)
        munmap(c->mine, (size_t)sysconf(_SC_PAGESIZE));
    layout_free(c->layout);
    manifest_deinit(&c->manifest);
    free(c->inits);
    free(c->run_id);
    free(c->optimizer);
    free(c->blob);
    free(c->out);
    frame_buffer_deinit(&c->in);
    wire_arena_deinit(&c->arena);
    error_reset(&c->error);
    free(c);
}

/* ---- small calls --------------------------------------------------------------------------------------- */

int zerod_fd(const struct zerod *c)
{
    return c->fd;
}

const char *zerod_version(void)
{
    return ZEROD_VERSION;
}

unsigned zerod_world_size(const struct zerod *c)
{
    return c->welcome.world_size;
}

int zerod_job(struct zerod *c, struct zerod_job *out)
{
    const struct reply_welcome *w = &c->welcome;
    const struct wire_hyper *h = &w->hyper;

    if (!w->run_id)
        return client_fail(c, -EINVAL, "zerod_job: zerod_connect was refused");
    *out = (struct zerod_job){
        .world_size = w->world_size,
        .stage = w->stage,
        .private_weights = w->private_weights,
        .on_duplicate = (enum zerod_on_duplicate)w->on_duplicate,
        .run_id = w->run_id,
        .optimizer = w->optimizer,
        .hyper = {h->lr, h->beta1, h->beta2, h->eps, h->weight_decay, h->momentum, h->dampening, h->lr_decay,
                  h->nesterov},
        .has_scheduler = w->has_scheduler,
        .max_norm = w->max_norm,
        .mean = w->mean,
        .fp16 = w->fp16,
        .accumulation = w->accumulation,
        .max_live_elems = w->stage3_max_live_elems,
        .cuda = w->cuda,
        .configured = w->configured,
    };
    return 0;
}

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
    return c->loss_scale;
}

int zerod_user_state(struct zerod *c, const void **data, size_t *len)
{
    int r = client_check(c, true);

    if (r != 0)
        return r;
    *data = c->blob;
    *len = c->n_blob_bytes;
    return 0;
}

static struct wire_hyper wire_hyper(const struct zerod_hyper *h)
{
    return (struct wire_hyper){h->lr,       h->beta1,     h->beta2,    h->eps,     h->weight_decay,
                               h->momentum, h->dampening, h->lr_decay, h->nesterov};
}

static int check_hypers(struct zerod *c, const struct zerod_step_args *args)
{
    struct hyper_problem problem;

    for (unsigned g = 0; args->groups && g < args->n_groups; g++) {
        struct wire_hyper hyper = wire_hyper(&args->groups[g]);

        if (hyper_is_wrong(c->optimizer, &hyper, &problem))
            return client_fail(c, ZEROD_REFUSED, "zerod_step: %s of parameter group %u is %g; expected %s", problem.name,
                               g, problem.value, problem.expected);
    }
    return 0;
}

/* NaN included. */
static bool is_below_0_or_infinite(double value)
{
    return !(value >= 0) || isinf(value);
}

/* What is refused here was not sent: nothing has happened, and the step can be asked for again. */
static int check_args(struct zerod *c, const struct zerod_step_args *args)
{
    if (args && args->groups && args->n_groups != c->layout->n_groups)
        return client_fail(c, -EINVAL, "zerod_step: n_groups is %u, but %u parameter groups were declared",
                           args->n_groups, c->layout->n_groups);
    if (args && args->blob && args->blob_len > WIRE_MAX_BLOB_BYTES)
        return client_fail(c, -EINVAL, "zerod_step: a blob of %zu bytes; at most %d", args->blob_len,
                           WIRE_MAX_BLOB_BYTES);
    if (args && args->max_norm && is_below_0_or_infinite(*args->max_norm))
        return client_fail(c, ZEROD_REFUSED, "zerod_step: max_norm is %g; expected a finite number of at least 0",
                           *args->max_norm);
    if (args && is_below_0_or_infinite(args->loss_scale))
        return client_fail(c, ZEROD_REFUSED, "zerod_step: loss_scale is %g; expected a finite number of at least 0",
                           args->loss_scale);
    return args ? check_hypers(c, args) : 0;
}

static struct request_step step_request(const struct zerod *c, const struct zerod_step_args *args,
                                        struct wire_hyper *groups)
{
    struct request_step request = {.step = c->position.step, .attempt = c->position.attempt};

    if (!args)
        return request;
    for (unsigned g = 0; args->groups && g < args->n_groups; g++)
        groups[g] = wire_hyper(&args->groups[g]);
    request.groups = groups;
    request.n_groups = args->groups ? args->n_groups : 0;
    request.has_max_norm = args->max_norm != NULL;
    request.max_norm = args->max_norm ? *args->max_norm : 0;
    request.loss_scale = args->loss_scale;
    request.found_inf = args->found_inf;
    request.has_blob = args->blob != NULL;
    request.blob = args->blob;
    request.n_blob_bytes = args->blob ? args->blob_len : 0;
    return request;
}

int zerod_step(struct zerod *c, const struct zerod_step_args *args, struct zerod_step_result *result)
{
    struct wire_hyper groups[WIRE_MAX_GROUPS];
    struct reply reply;
    int r = client_check(c, true);

    if (r == 0)
        r = check_args(c, args);
    if (r == 0)
        r = zerod_check_weights(c, NULL);
    if (r == 0)
        r = client_wait_for_stream(c);
    if (r != 0)
        return r;
    r = client_call(c, &(struct request){.type = REQUEST_STEP, .step = step_request(c, args, groups)}, REPLY_STEP_DONE,
                    &reply);
    if (r != 0)
        return r;
    c->position = reply.step_done.position;
    c->loss_scale = reply.step_done.loss_scale;
    if (result)
        *result = (struct zerod_step_result){
            .epoch = reply.step_done.position.step,
            .applied = reply.step_done.applied,
            .grad_norm = reply.step_done.norm,
            .loss_scale = reply.step_done.loss_scale,
            .lr = reply.step_done.lr,
            .n_missing = reply.step_done.n_missing,
        };
    return weights_refresh(c);
}

int zerod_grad_norm(struct zerod *c, double *norm)
{
    struct reply reply;
    int r = client_check(c, true);

    if (r == 0)
        r = client_call(c, &(struct request){.type = REQUEST_GRAD_NORM}, REPLY_DONE, &reply);
    if (r == 0)
        *norm = reply.done.norm;
    return r;
}

int zerod_abort_step(struct zerod *c, const char *why)
{
    struct client_text room;
    struct reply reply;
    int r = client_check(c, true);

    if (r == 0)
        r = client_call(
            c, &(struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = client_fitting(&room, why)}},
            REPLY_DONE, &reply);
    if (r != 0)
        return r;
    c->position = reply.done.position;
    weights_close_window(c);
    written_forget_reported(c);
    push_close(c);
    r = client_send(c, &(struct request){.type = REQUEST_ABORT_SEEN, .abort_seen = {.attempt = c->position.attempt}});
    return r > 0 ? lost(c) : r;
}

int zerod_clear_fault(struct zerod *c)
{
    struct reply reply;
    int r = client_check(c, false);

    if (r == 0)
        r = client_call(c, &(struct request){.type = REQUEST_CLEAR_FAULT}, REPLY_DONE, &reply);
    if (r == 0)
        written_forget_reported(c);
    return r;
}

int zerod_leave(struct zerod *c)
{
    struct reply reply;
    int r = client_check(c, false);

    if (r == 0)
        r = client_call(c, &(struct request){.type = REQUEST_LEAVE}, REPLY_DONE, &reply);
    c->left = r == 0;
    return r;
}

static void leave_if_done(int status, void *c)
{
    if (status == 0)
        (void)zerod_leave(c);
}

int zerod_leave_at_exit(struct zerod *c)
{
    c->interrupted = NULL; /* whoever was asked is gone by then */
    return on_exit(leave_if_done, c) == 0 ? 0 : -ENOMEM;
}

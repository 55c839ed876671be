/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/client/resume-daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "core/wire/frame.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "core/wire/wire.h"
#include "proto/credit.h"

enum { N_TICKETS = 8, PAGE = 4096, RING_BYTES = 16384, BUCKET_ELEMS = 1024, MAX_STRINGS = 64 };

/* The exit status of a life whose client has hung up. No life follows it. */
enum { HUNG_UP = 2 };

#define NEED(what)                                                                                                     \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "resume-daemon: %s:%d: %s\n", __FILE__, __LINE__, #what);                                  \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Memory that all lives share. */
struct kept {
    struct resume_seen *seen;
    int ring_fd, credit_fd, weights_fd;
    struct credit_page *credit;
    bool *slots; /* [ticket]: whether it was pushed in the open micro-batch */
};

struct life {
    const struct resume_options *options;
    const struct resume_life *plan;
    const struct kept *kept;
    struct resume_seen *seen;
    int listener, fd;
    struct frame_buffer in;
    struct wire_arena arena;
    uint8_t *out;
    struct manifest manifest;
    struct layout *layout;
    bool knows[MAX_STRINGS];
    bool answers; /* whether the current packet is answered */
    uint32_t n_hellos;
    uint64_t n_sent; /* how many requests the client says that it has sent, in Hello */
};

/* ---- answers ------------------------------------------------------------------------------------------- */

static struct wire_position position(const struct life *l)
{
    return (struct wire_position){.step = l->seen->step,
                                  .micro_batch = l->seen->micro_batch,
                                  .attempt = l->seen->attempt,
                                  .n_windows = l->seen->n_windows};
}

static void say(struct life *l, const struct reply *reply, const int *fds, size_t n_fds)
{
    int n = wire_pack_reply(&l->arena, reply, l->out, FRAME_MAX_BYTES);

    NEED(n > 0);
    if (l->answers)
        (void)frame_send(l->fd, l->out, (size_t)n, fds, n_fds);
}

static void say_done(struct life *l)
{
    say(l, &(struct reply){.type = REPLY_DONE, .done = {.position = position(l), .loss_scale = 1}}, NULL, 0);
}

static void say_step_done(struct life *l)
{
    say(l,
        &(struct reply){.type = REPLY_STEP_DONE,
                        .step_done = {.position = position(l), .applied = true, .loss_scale = 1}},
        NULL, 0);
}

static void refuse(struct life *l, uint32_t code, const char *text, bool closing, bool aborted)
{
    say(l,
        &(struct reply){.type = REPLY_REFUSED,
                        .refused = {.diagnostic = {.code = code, .cause_class = "", .title = "", .text = text},
                                    .closing = closing,
                                    .aborted = aborted,
                                    .position = position(l)}},
        NULL, 0);
}

/* ---- hello and forming --------------------------------------------------------------------------------- */

static void welcome(struct life *l, bool resumed, uint64_t n_received)
{
    say(l,
        &(struct reply){.type = REPLY_WELCOME,
                        .welcome = {.version = WIRE_VERSION,
                                    .world_size = l->plan->hello == HELLO_OTHER ? 2 : 1,
                                    .stage = l->options->stage,
                                    .bucket_elems = BUCKET_ELEMS,
                                    .on_duplicate = WIRE_ON_DUPLICATE_REJECT,
                                    .server = "test",
                                    .run_id = "",
                                    .optimizer = "SGD",
                                    .stage3_max_live_elems = 1 << 20,
                                    .resumed = resumed,
                                    .n_received = n_received,
                                    .reattach_ms = l->options->reattach_ms}},
        NULL, 0);
}

/* Answers the last recorded request again, because the client waits for that answer. */
static void answer_last(struct life *l)
{
    l->seen->n_waits++;
    if (l->seen->recorded[l->seen->n_recorded - 1].type == REQUEST_STEP)
        say_step_done(l);
    else
        say_done(l);
}

static void adopt(struct life *l, const struct request_hello *hello)
{
    struct resume_seen *seen = l->seen;

    NEED(hello->n_sent >= seen->n_recorded);
    NEED(!hello->waits || hello->n_sent > 0);
    memset(seen->held, 0, sizeof(seen->held));
    welcome(l, true, seen->n_recorded + (l->plan->hello == HELLO_FOREIGN ? 1000 : 0));
    if (hello->waits && hello->n_sent == seen->n_recorded)
        answer_last(l);
}

/* Begins a job with nothing adopted, for a rank that has no state either. */
static void begin_anew(struct life *l)
{
    struct resume_seen *seen = l->seen;

    seen->n_recorded = seen->step = 0;
    seen->micro_batch = seen->attempt = seen->n_windows = seen->attempt_seen = 0;
    seen->formed = false;
    memset(seen->held, 0, sizeof(seen->held));
    welcome(l, false, 0);
}

static void hello(struct life *l, const struct request_hello *request)
{
    bool as_planned = l->plan->n_hellos == 0 || l->n_hellos < l->plan->n_hellos;

    l->n_hellos++;
    l->seen->n_hellos++;
    NEED(request->incarnation != 0 && request->resumes == l->seen->formed);
    if (as_planned && l->plan->hello == HELLO_TAKEN)
        refuse(l, E_RANK_TAKEN, "E1301 rank taken", true, false);
    else if (as_planned && l->plan->hello == HELLO_DRAINING)
        refuse(l, E_NOT_ALLOWED, "E1402 the job is being drained", true, false);
    else if (request->resumes && l->plan->hello != HELLO_FRESH && l->plan->hello != HELLO_OTHER)
        adopt(l, request);
    else
        begin_anew(l);
}

static void declare(struct life *l, const struct request_declare *request)
{
    for (size_t i = 0; i < request->n_params; i++)
        NEED(manifest_add(&l->manifest, &request->params[i]) == 0);
}

static uint64_t weight_bytes(const struct life *l)
{
    uint64_t n_bytes = l->options->stage == 3 ? l->layout->range_bytes : l->layout->weight_bytes;

    return round_up(MAX(n_bytes, UINT64_C(1)), PAGE);
}

static void form(struct life *l, const struct request_form *request)
{
    struct wire_segment segments[] = {
        {WIRE_SEGMENT_RING, RING_BYTES + PAGE, false},
        {WIRE_SEGMENT_CREDIT, PAGE, false},
        {l->options->stage == 3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS, 0, false},
    };
    uint32_t bad;

    NEED(request->n_params == l->manifest.n && l->manifest.n <= RESUME_MAX_PARAMS);
    NEED(layout_new(&l->layout, l->manifest.decls, l->manifest.n, 1, BUCKET_ELEMS, &bad) == 0);
    segments[2].n_bytes = weight_bytes(l);
    NEED(ftruncate(l->kept->weights_fd, (off_t)segments[2].n_bytes) == 0);
    l->seen->formed = l->answers;
    l->seen->n_formed++;
    say(l,
        &(struct reply){.type = REPLY_FORMED,
                        .formed = {.init_wanted = true,
                                   .position = position(l),
                                   .segments = segments,
                                   .n_segments = ARRAY_SIZE(segments),
                                   .n_tickets = N_TICKETS,
                                   .ring_bytes = RING_BYTES,
                                   .loss_scale = 1}},
        (int[]){l->kept->ring_fd, l->kept->credit_fd, l->kept->weights_fd}, ARRAY_SIZE(segments));
}

/* ---- training ------------------------------------------------------------------------------------------ */

static void push(struct life *l, const struct request_push *request)
{
    NEED(request->segment < MAX_STRINGS && (request->segment == 0 || l->knows[request->segment]));
    NEED(request->site < MAX_STRINGS && l->knows[request->site]);
    if (!request->record_only)
        l->kept->slots[request->ticket] = true;
}

static void credit_all(struct life *l)
{
    for (uint32_t i = 0; i < N_TICKETS; i++)
        if (l->kept->slots[i])
            atomic_fetch_add_explicit(&l->kept->credit->credits[i], 1, memory_order_release);
    memset(l->kept->slots, 0, N_TICKETS * sizeof(*l->kept->slots));
}

static void next_attempt(struct life *l)
{
    credit_all(l);
    l->seen->attempt++;
    l->seen->micro_batch = 0;
}

/* In attempt 1 the step is aborted. The answer says so until the client has seen the abort. */
static void grad_norm(struct life *l)
{
    if (l->seen->attempt == 1)
        next_attempt(l);
    if (l->seen->attempt == 2 && l->seen->attempt_seen < 2)
        refuse(l, E_RANK_LOST, "E1302 step aborted", false, true);
    else
        say_done(l);
}

static void count_held(struct life *l, const uint32_t *params, size_t n, bool more)
{
    for (size_t i = 0; i < n; i++) {
        NEED(params[i] < RESUME_MAX_PARAMS && (more || l->seen->held[params[i]] > 0));
        l->seen->held[params[i]] += more ? 1 : -1;
    }
}

static void open_window(struct life *l)
{
    int fd = memfd_create("window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct wire_segment segment = {WIRE_SEGMENT_WINDOW, 64 * PAGE, false};

    NEED(fd >= 0 && ftruncate(fd, 64 * PAGE) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    say(l,
        &(struct reply){.type = REPLY_DONE,
                        .done = {.position = position(l), .segments = &segment, .n_segments = 1, .loss_scale = 1}},
        &fd, 1);
    close(fd);
}

static void state_is(struct life *l)
{
    say(l, &(struct reply){.type = REPLY_STATE_IS, .state_is = {.norm = 3}}, NULL, 0);
}

static void record(struct life *l, enum request_type type)
{
    struct resume_seen *seen = l->seen;
    size_t n = MIN(l->in.n_bytes, (size_t)RESUME_MAX_BYTES);

    NEED(seen->n_recorded < RESUME_MAX_RECORDED);
    seen->recorded[seen->n_recorded].type = type;
    seen->recorded[seen->n_recorded].n_bytes = (uint32_t)l->in.n_bytes;
    memset(seen->recorded[seen->n_recorded].bytes, 0, RESUME_MAX_BYTES);
    memcpy(seen->recorded[seen->n_recorded++].bytes, l->in.data, n);
}

static void serve_recorded(struct life *l, const struct request *request)
{
    switch (request->type) {
    case REQUEST_PUSH:
        push(l, &request->push);
        return;
    case REQUEST_PUSHES: /* pushes into one slot */
        push(l, &request->pushes.first);
        return;
    case REQUEST_END_BACKWARD:
    case REQUEST_ABANDON_BACKWARD:
        credit_all(l);
        l->seen->micro_batch++;
        return say_done(l);
    case REQUEST_STEP:
        l->seen->step++;
        l->seen->micro_batch = l->seen->n_windows = 0;
        return say_step_done(l);
    case REQUEST_ABORT_STEP:
        next_attempt(l);
        return say_done(l);
    case REQUEST_ABORT_SEEN:
        NEED(request->abort_seen.attempt == l->seen->attempt);
        l->seen->attempt_seen = request->abort_seen.attempt;
        return;
    case REQUEST_READY:
    case REQUEST_CLEAR_FAULT:
    case REQUEST_LEAVE:
        return say_done(l);
    default:
        return;
    }
}

static void serve_unrecorded(struct life *l, const struct request *request)
{
    switch (request->type) {
    case REQUEST_HELLO:
        return hello(l, &request->hello);
    case REQUEST_DECLARE:
        return declare(l, &request->declare);
    case REQUEST_FORM:
        return form(l, &request->form);
    case REQUEST_INIT:
        return say_done(l);
    case REQUEST_INTERN:
        NEED(request->intern.id < MAX_STRINGS);
        l->seen->n_interns++;
        l->knows[request->intern.id] = true;
        return;
    case REQUEST_SLOT_REQUEST:
        credit_all(l);
        return say(l, &(struct reply){.type = REPLY_SLOT_GRANT, .slot_grant = {.in_ring = true}}, NULL, 0);
    case REQUEST_PREFETCH:
        return;
    case REQUEST_GRAD_NORM:
        return grad_norm(l);
    case REQUEST_GATHER:
        /* Without an answer the rank has not gathered the parameters. */
        if (l->answers)
            count_held(l, request->gather.params, request->gather.n_params, true);
        return say_done(l);
    case REQUEST_HELD:
        l->seen->n_held_messages++;
        return count_held(l, request->held.params, request->held.n_params, true);
    case REQUEST_RELEASE:
        return count_held(l, request->release.params, request->release.n_params, false);
    case REQUEST_WRITE_BEGIN:
        return open_window(l);
    case REQUEST_WRITE_END:
        l->seen->n_windows = 1;
        return say_done(l);
    case REQUEST_READ_STATE:
        return state_is(l);
    default:
        NEED(!"a request that is expected");
    }
}

/* ---- processes ----------------------------------------------------------------------------------------- */

static void accept_next(struct life *l)
{
    struct pollfd pollfd = {.fd = l->listener, .events = POLLIN};

    if (l->fd >= 0)
        close(l->fd);
    while (poll(&pollfd, 1, 1) <= 0)
        if (atomic_load(&l->seen->end))
            _exit(HUNG_UP);
    l->fd = accept4(l->listener, NULL, NULL, SOCK_CLOEXEC);
    NEED(l->fd >= 0);
}

/* Waits for a packet. Return: false if the client has hung up. */
static bool receive(struct life *l, struct request *request)
{
    struct pollfd pollfd = {.fd = l->fd, .events = POLLIN};
    char why[WIRE_WHY_BYTES];
    int r;

    while ((r = frame_receive_fds(l->fd, &l->in)) == FRAME_AGAIN)
        (void)poll(&pollfd, 1, -1);
    if (r == FRAME_EOF)
        return false;
    NEED(r == 0);
    wire_arena_reset(&l->arena);
    NEED(wire_unpack_request(&l->arena, l->in.data, l->in.n_bytes, request, why, sizeof(why)) == 0);
    return true;
}

static void end_life(struct life *l)
{
    if (!l->plan->lives_on)
        _exit(0);
    close(l->fd);
    while (!atomic_load(&l->seen->end))
        (void)poll(NULL, 0, 1);
    _exit(0);
}

static void serve(struct life *l)
{
    struct request request;

    for (l->seen->n_packets = 0;;) {
        if (!receive(l, &request)) {
            if (l->n_hellos > 0) /* else the client only asked whether a daemon listens */
                _exit(HUNG_UP);
            accept_next(l);
            continue;
        }
        l->seen->n_packets++;
        l->answers = l->seen->n_packets != l->plan->n_packets || !l->plan->unanswered;
        if (request_is_recorded(request.type)) {
            record(l, request.type);
            serve_recorded(l, &request);
        } else {
            serve_unrecorded(l, &request);
        }
        if (l->seen->n_packets == l->plan->n_packets)
            end_life(l);
        if (request.type == REQUEST_HELLO && l->n_hellos <= l->plan->n_hellos)
            accept_next(l);
    }
}

static void live(const struct resume_options *options, const struct resume_life *plan, const struct kept *kept,
                 int listener)
{
    struct life l = {.options = options,
                     .plan = plan,
                     .kept = kept,
                     .seen = kept->seen,
                     .listener = listener,
                     .fd = -1,
                     .in = FRAME_BUFFER_NULL,
                     .out = malloc(FRAME_MAX_BYTES)};

    NEED(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
    NEED(l.out && frame_buffer_init(&l.in) == 0 && wire_arena_init(&l.arena) == 0);
    NEED(listen(listener, 8) == 0); /* makes this process the peer of new connections */
    atomic_fetch_add(&kept->seen->n_lives, 1);
    accept_next(&l);
    serve(&l);
}

static int bind_to(const char *path)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    (void)unlink(path);
    NEED(listener >= 0 && bind(listener, (struct sockaddr *)&sa, sizeof(sa)) == 0);
    return listener;
}

static void keep(const char *path, const struct resume_options *options, const struct kept *kept, int listener)
{
    for (unsigned i = 0; i < RESUME_MAX_LIVES; i++) {
        const struct resume_life *plan = &options->lives[i];
        int status;
        pid_t pid;

        if (listener < 0)
            listener = bind_to(path);
        pid = fork();
        NEED(pid >= 0);
        if (pid == 0)
            live(options, plan, kept, listener);
        if (plan->unlinks || plan->deaf)
            close(steal_fd(&listener));
        NEED(waitpid(pid, &status, 0) == pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            _exit(WIFEXITED(status) && WEXITSTATUS(status) == HUNG_UP ? 0 : 1);
        if (plan->unlinks)
            (void)unlink(path);
        (void)poll(NULL, 0, (int)plan->after_ms);
    }
    _exit(0);
}

static void *share(const char *name, size_t n_bytes, int *fd)
{
    void *memory;

    *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    NEED(*fd >= 0 && ftruncate(*fd, (off_t)n_bytes) == 0 && fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    NEED(memory != MAP_FAILED);
    return memory;
}

pid_t resume_daemon_start(const char *path, const struct resume_options *options, struct resume_seen **seen)
{
    int seen_fd, slots_fd, listener = bind_to(path);
    struct kept kept;
    pid_t keeper;

    kept.seen = *seen = share("seen", sizeof(**seen), &seen_fd);
    keeper = fork();
    NEED(keeper >= 0);
    if (keeper == 0) {
        NEED(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
        (void)share("ring", RING_BYTES + PAGE, &kept.ring_fd);
        kept.credit = share("credit", PAGE, &kept.credit_fd);
        kept.slots = share("slots", PAGE, &slots_fd);
        (void)share("weights", PAGE, &kept.weights_fd);
        keep(path, options, &kept, listener);
    }
    close(listener);
    close(seen_fd);
    while (atomic_load(&kept.seen->n_lives) == 0)
        (void)poll(NULL, 0, 1);
    return keeper;
}

bool resume_daemon_end(pid_t keeper)
{
    int status;

    return waitpid(keeper, &status, 0) == keeper && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

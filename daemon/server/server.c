/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The server owns the loop, its handles, the job and the service, and runs until a signal or the end of a drained job
 * stops it.
 */

#include "daemon/server/server.h"

#include <assert.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/base/huge-pages.h"
#include "core/base/keep.h"
#include "core/base/log.h"
#include "core/base/notify.h"
#include "core/base/open-files.h"
#include "core/base/recorder.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "daemon/job/adopt.h"
#include "daemon/job/attendance.h"
#include "daemon/job/rank-lost.h"
#include "daemon/job/job.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/stall.h"
#include "daemon/job/state/save.h"
#include "daemon/memory/journal.h"
#include "daemon/nodes/membership.h"
#include "daemon/server/admin.h"
#include "daemon/server/checkpoint-folder.h"
#include "daemon/server/companion.h"
#include "daemon/server/diagnostic-log.h"
#include "daemon/server/dispatch.h"
#include "daemon/server/listener.h"
#include "daemon/server/places.h"
#include "daemon/server/questions.h"
#include "daemon/server/service.h"
#include "daemon/server/session.h"
#include "daemon/server/trace-writer.h"
#include "kernels/gemm.h"

enum {
    TICK_MS = 50,         /* the maximum delay until a time-out is noticed */
    MAX_UNGREETED = 4096, /* connections that have not sent Hello; picked: more than a large job opens at once */
    MAX_ACCEPTS = 64,     /* accepted connections each time the socket is readable */
};

/* Picked: the service manager gets a new status at most this often. */
#define STATUS_EVERY_NS UINT64_C(2000000000)

/* Picked: a stopping daemon waits no longer than this for other nodes. */
#define OTHERS_PATIENCE_NS UINT64_C(10000000000)

/* The tick. It is periodic unless the server rests, because no tick is due within TICK_MS. */
struct ticking {
    uv_timer_t timer;
    uv_timer_t soon;  /* the extra tick that the job wants */
    uv_check_t woken; /* runs after each event */
    bool resting;
    bool rested; /* the server was resting until this tick */
};

/* The watchdog of systemd, and the progress of workers that decides whether it is fed. */
struct watchdog {
    uint64_t timeout_ns; /* 0: there is no watchdog */
    uint64_t fed_ns;
    uint64_t progress; /* of the workers, at the last tick */
    uint64_t stuck_since_ns;
};

/* The last status for the service manager. */
struct sent_status {
    char text[640];
    uint64_t ns; /* when it was sent */
};

/* How the server stops. */
struct stop {
    bool begun;
    bool waits;         /* it will stop after a checkpoint, and after other nodes have completed all decisions */
    bool saves;         /* while waits: a checkpoint is being written first */
    bool is_unsaved;    /* it stops without the checkpoint that should have been written */
    uint64_t heard_ns;  /* while waits: start of the wait for other nodes */
    const char *signal; /* the signal that stops the server; NULL: no signal yet */
};

struct server {
    const struct config *config;
    const struct kernels *kernels;
    uv_loop_t loop;
    uv_poll_t listen_poll;
    uv_poll_t work_poll; /* polls work_fd, which is readable when workers have finished work */
    int work_fd;
    struct ticking tick;
    uv_signal_t sigterm, sigint, sighup;
    struct listener listener;
    struct worker_pool *pool;
    struct job *job;
    struct membership *membership; /* NULL: one node */
    struct service service;        /* shared by all connections */
    bool listening;                /* the listen handle is active */
    struct watchdog watchdog;
    struct sent_status sent_status;
    struct diagnostic_log log;
    struct trace_files traces;
    struct checkpoint_folder folder;
    struct stop stop;
    bool told_sighup;
};

struct service *server_service(struct server *server)
{
    return &server->service;
}

/* ---- sessions ------------------------------------------------------------------------------------------ */

static unsigned n_ungreeted(const struct server *server)
{
    unsigned n = 0;

    for (const struct session *s = server->service.sessions; s; s = s->next)
        n += s->state == SESSION_HELLO && !s->doomed;
    return n;
}

/*
 * Return: whether the job may need all remaining descriptors. fd: the newest descriptor; all lower descriptors are in
 * use.
 */
static bool needs_for_job(const struct server *server, int fd)
{
    const struct job *job = server->job;
    uint64_t needed = job->layout ? OPEN_FILES_FOR_JOB / 2 : OPEN_FILES_FOR_JOB;

    for (unsigned r = job->world.first; r < job->world.end; r++)
        needed += job->ranks[r].peer ? 0 : OPEN_FILES_PER_RANK;
    return (uint64_t)fd + needed >= open_files_limit();
}

static void refuse_connection(struct session *session)
{
    struct evidence_quota evidence = {
        .at = {.rank = -1, .step = -1, .micro_batch = -1}, .what = "connections", .limit = process_limit_met(-EMFILE)};

    session_refuse(session, session_keep(session, cause_quota(&evidence)));
}

static void on_listen(uv_poll_t *handle, int status, int events)
{
    struct server *server = handle->data;

    (void)status;
    (void)events;
    for (int i = 0; i < MAX_ACCEPTS; i++) {
        int fd = listener_accept(&server->listener), r;
        struct session *session;

        if (fd == -EMFILE || fd == -ENFILE || fd == -ENOMEM || fd == -ENOBUFS) {
            /* Stops listening until the next tick, because the socket stays readable and the loop would spin. */
            log_error("cannot accept connections: %s", strerror(-fd));
            uv_poll_stop(&server->listen_poll);
            server->listening = false;
            break;
        }
        if (fd < 0)
            break;
        r = session_new(&session, &server->service, fd);
        if (r < 0)
            log_error("a connection could not be served: %s", strerror(-r));
        else if (needs_for_job(server, fd) && !places_make_room(&server->service, session, false))
            refuse_connection(session);
        else if (n_ungreeted(server) > MAX_UNGREETED)
            (void)places_make_room(&server->service, session, true);
    }
    sessions_reap(&server->service);
}

/* ---- job callbacks ------------------------------------------------------------------------------------- */

static void job_answers(void *userdata, void *peer, const struct reply *reply, int *fds, size_t n_fds)
{
    (void)userdata;
    session_send(peer, reply, fds, n_fds);
}

static void job_drops(void *userdata, void *peer, const struct diagnostic *diagnostic)
{
    (void)userdata;
    if (diagnostic)
        session_refuse(peer, diagnostic);
    else
        session_doom(peer);
}

static void job_logs(void *userdata, const struct diagnostic *diagnostic)
{
    struct server *server = userdata;

    diagnostic_log_put(&server->log, diagnostic, service_now_ns() / 1000000);
    trace_note(&server->traces, &server->loop, server->job, diagnostic);
}

static uint64_t job_clock(void *userdata)
{
    (void)userdata;
    return service_now_ns();
}

static void reap_sessions(void *userdata)
{
    struct server *server = userdata;

    sessions_reap(&server->service);
}

/* ---- questions ----------------------------------------------------------------------------------------- */

static char *answer_question(void *userdata, const char *command, uint32_t *exit_code)
{
    struct server *server = userdata;

    return admin_answer(&server->service, command, exit_code);
}

static void question_moved(struct question *question)
{
    struct session *session = container_of(question, struct session, question);

    session->quiet_ns = service_now_ns();
    session_want_events(session);
}

static void question_failed(struct question *question)
{
    session_doom(container_of(question, struct session, question));
}

/* ---- time ---------------------------------------------------------------------------------------------- */

static void on_tick(uv_timer_t *handle);

static void describe_status(const struct server *server, char *text, size_t size)
{
    static const char *const words[] = {
        [JOB_WAITING] = "waiting for ranks", [JOB_RESERVING] = "forming",
        [JOB_INITIALISING] = "initialising", [JOB_TRAINING] = "training",
        [JOB_UPDATING] = "training",         [JOB_ABORTING] = "aborting a step",
        [JOB_WINDOW] = "write window",       [JOB_COMMITTING_WINDOW] = "write window",
    };
    const struct job *job = server->job;
    unsigned n_here = 0;

    assert((size_t)job->phase < ARRAY_SIZE(words));
    if (job->run.survival.holds) { /* zerodctl status prints the same text */
        snprintf(text, size, "STATUS=holds the state of a run (E1304): %s; zerodctl drop discards it",
                 job->run.survival.holds);
        return;
    }
    for (unsigned r = job->world.first; r < job->world.end; r++)
        n_here += job->ranks[r].peer != NULL;
    snprintf(text, size, "STATUS=%s, %u of %u ranks, step %" PRIu64, words[job_shown_phase(job)], n_here,
             job_n_local(job), job->layout ? job->ledger.step : 0);
}

/* Return: the time until the next status may be sent, or UINT64_MAX if the status has not changed. */
static uint64_t status_rest_ns(const struct server *server, uint64_t now)
{
    char text[sizeof(server->sent_status.text)];

    describe_status(server, text, sizeof(text));
    if (strcmp(text, server->sent_status.text) == 0)
        return UINT64_MAX;
    return STATUS_EVERY_NS - MIN(now - server->sent_status.ns, STATUS_EVERY_NS);
}

static void tell_status(struct server *server, uint64_t now)
{
    if (status_rest_ns(server, now) > 0)
        return;
    server->sent_status.ns = now;
    describe_status(server, server->sent_status.text, sizeof(server->sent_status.text));
    notify_state(server->sent_status.text);
}

/*
 * Feeds the systemd watchdog unless the workers are stuck. Workers are stuck if they have work, but have finished no
 * item for watchdog.timeout_ns.
 */
static void feed_watchdog(struct server *server, uint64_t now)
{
    struct watchdog *watchdog = &server->watchdog;
    uint64_t progress;
    bool busy = worker_pool_progress(server->pool, &progress);

    if (!watchdog->timeout_ns)
        return;
    progress += save_progress(server->job);
    if (!busy || progress != watchdog->progress) {
        watchdog->progress = progress;
        watchdog->stuck_since_ns = now;
    }
    if (now - watchdog->stuck_since_ns > watchdog->timeout_ns || now - watchdog->fed_ns < watchdog->timeout_ns / 4)
        return;
    watchdog->fed_ns = now;
    notify_state("WATCHDOG=1");
}

/* Return: why the checkpoint before the end was not written, or NULL if it was written or not wanted. */
static const char *why_unsaved(const struct server *server)
{
    const struct job *job = server->job;

    if (!server->config->checkpoint.save_on_stop && !server->stop.saves)
        return NULL;
    if (job->run.survival.holds)
        return job->run.survival.holds;
    if (save_is_busy(job))
        return save_waits_for_others(job) ? "the other nodes do not answer" : "it was stopped before that was done";
    return save_failure(job);
}

/* Stops the loop. why: the reason, for the log. */
static void stop_server(struct server *server, const char *why)
{
    const char *unsaved = why_unsaved(server);

    assert(server->stop.waits || !server->stop.saves);
    if (server->stop.begun)
        return;
    server->stop.begun = true;
    server->stop.is_unsaved = unsaved != NULL;
    if (unsaved)
        log_error("stopping; the last step is not saved: %s", unsaved);
    else
        log_notice("stopping: %s", why);
    notify_state("STOPPING=1");
    if (server->job->run.ends && job_has_live_ranks(server->job))
        attendance_end(server->job, server->stop.signal);
    uv_stop(&server->loop);
}

/*
 * Stops the server after the checkpoint that is due or being written, and after other nodes have completed this node's
 * decisions. A second call stops the server at once.
 */
static void stop_or_wait_first(struct server *server, const char *why)
{
    if (server->config->checkpoint.save_on_stop && !server->stop.waits) {
        (void)job_save(server->job);
        job_settle(server->job);
    }
    membership_tell_to_stop(server->membership);
    if (server->stop.waits || (!save_is_busy(server->job) && membership_stop(server->membership) != MEMBERSHIP_WAITS)) {
        stop_server(server, why);
        return;
    }
    server->stop.waits = true;
    server->stop.saves = save_is_busy(server->job);
    log_notice("%s: stopping when %s; a signal stops it at once", why,
               server->stop.saves ? "a checkpoint is written" : "all nodes have ended what was decided");
}

/*
 * Continues stop_or_wait_first(). Stops the server when the waits have ended, or can never end because other nodes have
 * stopped. Until then, extends systemd's time-out.
 */
static void stop_when_over(struct server *server, uint64_t now)
{
    enum membership_stop end = membership_stop(server->membership);
    bool saves, others, in_vain;

    if (!server->stop.waits || server->stop.begun)
        return;
    saves = save_is_busy(server->job);
    others = saves ? save_waits_for_others(server->job) : end != MEMBERSHIP_MAY_STOP;
    if (!others || !server->stop.heard_ns)
        server->stop.heard_ns = now;
    in_vain = now - server->stop.heard_ns > OTHERS_PATIENCE_NS || (!saves && end == MEMBERSHIP_WAITS_IN_VAIN);
    notify_state("EXTEND_TIMEOUT_USEC=30000000");
    if ((saves || others) && !in_vain)
        return;
    stop_server(server, server->stop.saves ? "the checkpoint is written"
                        : in_vain ? "other nodes have not ended what was decided, or have ranks that do not leave"
                                  : "all nodes have ended what was decided");
}

static void listen_again(struct server *server)
{
    server->listening = open_files_watch(&server->listen_poll, UV_READABLE, on_listen) == 0;
}

static uint64_t log_rest_ns(const struct server *server, uint64_t now)
{
    uint64_t until_ms = MIN(diagnostic_log_until_ms(&server->log), log_limit_until_ms(&server->service.closed));

    return until_ms == UINT64_MAX ? UINT64_MAX : until_ms * 1000000 - MIN(now, until_ms * 1000000);
}

static uint64_t watchdog_rest_ns(const struct server *server, uint64_t now)
{
    uint64_t until_ns = server->watchdog.fed_ns + server->watchdog.timeout_ns / 4;

    return server->watchdog.timeout_ns ? until_ns - MIN(now, until_ns) : UINT64_MAX;
}

/* Return: the time until on_tick() has something to do even if no event arrives, or UINT64_MAX if it never has. */
static uint64_t rest_ns(const struct server *server, uint64_t now)
{
    const uint64_t all[] = {watchdog_rest_ns(server, now), log_rest_ns(server, now), status_rest_ns(server, now),
                            places_rest_ns(&server->service, now), job_rest_ns(server->job)};
    uint64_t rest = UINT64_MAX, progress;

    /* Must tick: with several nodes, heartbeats are exchanged several times a second. */
    if (!server->listening || server->stop.waits || server->membership || worker_pool_progress(server->pool, &progress))
        return 0;
    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        rest = MIN(rest, all[i]);
    return rest;
}

/*
 * Stops the periodic tick if the daemon is idle. The tick restarts after the next event, or when on_tick() has
 * something to do.
 */
static void rest_if_idle(struct server *server, uint64_t now)
{
    uint64_t rest = rest_ns(server, now);

    if (rest <= TICK_MS * UINT64_C(1000000))
        return;
    server->tick.resting = true;
    companion_note_end(journal_beat_place(server->job->run.survival.journal));
    if (rest == UINT64_MAX)
        (void)uv_timer_stop(&server->tick.timer);
    else
        (void)uv_timer_start(&server->tick.timer, on_tick, rest / 1000000, TICK_MS);
}

/* Restarts the periodic tick when an event has woken the resting loop. */
static void on_woken(uv_check_t *handle)
{
    struct server *server = handle->data;

    if (!server->tick.resting)
        return;
    server->tick.resting = false;
    server->tick.rested = true;
    companion_note_end(NULL);
    (void)uv_timer_start(&server->tick.timer, on_tick, TICK_MS, TICK_MS);
}

static void on_tick(uv_timer_t *handle)
{
    struct server *server = handle->data;
    uint64_t now = service_now_ns();

    if (server->tick.rested)
        server->watchdog.stuck_since_ns = now; /* until now the workers had nothing to do, so they are not stuck */
    server->tick.rested = false;
    if (!server->listening)
        listen_again(server);
    places_close_silent(&server->service, now);
    job_tick(server->job);
    membership_stay_apart(server->membership, server->job->run.survival.holds != NULL);
    diagnostic_log_flush(&server->log, now / 1000000);
    log_limit_flush(&server->service.closed, now / 1000000);
    tell_status(server, now);
    feed_watchdog(server, now);
    sessions_reap(&server->service);
    stop_when_over(server, now);
    if (server->job->kept.draining && job_is_idle(server->job) && !server->stop.waits)
        stop_or_wait_first(server, "drained: no trainer is left");
    rest_if_idle(server, now);
}

static void on_soon(uv_timer_t *handle)
{
    struct server *server = handle->data;

    job_tick(server->job);
    sessions_reap(&server->service);
}

static void job_wants_tick(void *userdata, unsigned delay_ms)
{
    struct server *server = userdata;

    if (!uv_is_active((uv_handle_t *)&server->tick.soon) || uv_timer_get_due_in(&server->tick.soon) > delay_ms)
        (void)uv_timer_start(&server->tick.soon, on_soon, delay_ms, 0);
}

static void on_work(uv_poll_t *handle, int status, int events)
{
    struct server *server = handle->data;
    eventfd_t n;

    (void)status;
    (void)events;
    (void)eventfd_read(server->work_fd, &n); /* before reaping, because work that ends later is a new event */
    questions_give_way(&server->service.questions);
    worker_pool_reap(server->pool);
    sessions_reap(&server->service);
}

/*
 * Wakes the loop by an eventfd, because uv_async_send() of libuv 1.44 is slow: the woken loop waits until
 * uv_async_send() has returned on the worker. If the loop runs on the worker's processor, it spins, and then yields to
 * every other thread, which took milliseconds.
 */
static void notify_loop(void *userdata)
{
    struct server *server = userdata;

    (void)eventfd_write(server->work_fd, 1); /* fails only after 2^64 unread notifications */
}

static int watch_work(struct server *server)
{
    int r;

    server->work_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->work_fd < 0)
        return -errno;
    r = uv_poll_init(&server->loop, &server->work_poll, server->work_fd);
    return r < 0 ? r : open_files_watch(&server->work_poll, UV_READABLE, on_work);
}

/*
 * Handles SIGTERM and SIGINT. A service manager sends SIGINT if it will start no other daemon and will drop the kept
 * state.
 */
static void on_signal(uv_signal_t *handle, int number)
{
    struct server *server = handle->data;

    server->stop.signal = number == SIGTERM ? "SIGTERM" : "SIGINT";
    server->job->run.ends |= number == SIGINT || !keep_is_on();
    stop_or_wait_first(server, server->stop.signal);
}

/* Logs once that SIGHUP does nothing, because in many services it reloads the configuration. */
static void on_sighup(uv_signal_t *handle, int number)
{
    struct server *server = handle->data;

    (void)number;
    if (!server->told_sighup)
        log_notice("SIGHUP changes nothing: the configuration is read at the start only; restart to change it");
    server->told_sighup = true;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static int start_handles(struct server *server)
{
    int r;

    uv_timer_init(&server->loop, &server->tick.timer);
    uv_timer_init(&server->loop, &server->tick.soon);
    uv_check_init(&server->loop, &server->tick.woken);
    server->tick.soon.data = server;
    uv_signal_init(&server->loop, &server->sigterm);
    uv_signal_init(&server->loop, &server->sigint);
    uv_signal_init(&server->loop, &server->sighup);
    r = uv_poll_init(&server->loop, &server->listen_poll, server->listener.fd);
    if (r < 0)
        return r;
    server->tick.timer.data = server->listen_poll.data = server->tick.woken.data = server;
    server->sigterm.data = server->sigint.data = server->sighup.data = server;
    r = open_files_watch(&server->listen_poll, UV_READABLE, on_listen);
    if (r == 0)
        r = uv_timer_start(&server->tick.timer, on_tick, TICK_MS, TICK_MS);
    if (r == 0)
        r = uv_check_start(&server->tick.woken, on_woken);
    if (r == 0)
        r = uv_signal_start(&server->sigterm, on_signal, SIGTERM);
    if (r == 0)
        r = uv_signal_start(&server->sigint, on_signal, SIGINT);
    if (r == 0)
        r = uv_signal_start(&server->sighup, on_sighup, SIGHUP);
    server->listening = r == 0;
    return r;
}

/* Adopts the run of an earlier daemon. If that fails, holds the run's state until an administrator decides. */
static void take_over(struct server *server)
{
    struct job *job = server->job;
    char why[512] = "";
    int r = job_adopt(job, why, sizeof(why));

    if (r < 0) /* other nodes must not assume that this node has no state */
        membership_stay_apart(server->membership, true);
    if (r == 1)
        log_notice("took over the job from the daemon before, which lived %.1f s ago: run %s, step %" PRIu64
                   ", attempt %u; %u daemons so far",
                   (double)job->run.survival.away_ns / 1e9, job->kept.run_id ? job->kept.run_id : "without a name",
                   job->ledger.step, job->ledger.attempt, job->kept.n_daemons);
}

static int start_server(struct server *server, char *why, size_t why_size)
{
    const struct job_ops ops = {.answer = job_answers,
                                .drop = job_drops,
                                .log = job_logs,
                                .now_ns = job_clock,
                                .soon = job_wants_tick,
                                .after = reap_sessions,
                                .loop = &server->loop,
                                .userdata = server};
    const struct questions_ops questions = {.answer = answer_question,
                                            .moved = question_moved,
                                            .failed = question_failed,
                                            .after = reap_sessions,
                                            .userdata = server};
    const struct gemm *gemm;
    int r;

    r = kernels_select(&server->kernels, NULL, why, why_size);
    if (r < 0)
        return r;
    if (config_needs_openblas(server->config, server->config->optimizer.type))
        r = gemm_load(&gemm, why, why_size);
    if (r < 0)
        return r;
    r = recorder_start(config_n_threads(server->config));
    if (r < 0)
        return r;
    r = worker_pool_new(&server->pool, config_n_threads(server->config), notify_loop, server);
    if (r < 0) {
        snprintf(why, why_size,
                 r == -ENOTSUP ? "the floating point environment flushes subnormals: a library built "
                                 "with -ffast-math is loaded (LD_PRELOAD?)"
                               : "cannot start worker threads: %s",
                 strerror(-r));
        return r;
    }
    server->service.kernels = server->kernels;
    r = job_new(&server->job, server->config, server->kernels, server->pool, &ops);
    server->service.job = server->job;
    if (r == 0 && server->config->world.nodes.n_items > 1)
        r = membership_new(&server->membership,
                           &(struct membership_options){
                               .loop = &server->loop, .job = server->job, .after = reap_sessions, .userdata = server},
                           why, why_size);
    server->service.membership = server->membership;
    if (r == 0)
        r = service_init(&server->service, &questions);
    if (r < 0)
        return r;
    r = listener_init(&server->listener, &server->config->listen, why, why_size);
    if (r == 0) /* after listener_init(), which changes the umask of all threads for a moment */
        r = checkpoint_folder_try(&server->folder, server->job, why, why_size);
    if (r == 0)
        r = start_handles(server);
    if (r == 0)
        take_over(server);
    return r;
}

int server_new(struct server **out, const struct config *config, char *why, size_t why_size)
{
    struct server *server;
    int r;

    open_files_raise();
    r = open_files_check(config_local_ranks(config), why, why_size);
    if (r < 0)
        return r;
    snprintf(why, why_size, "out of memory");
    server = calloc(1, sizeof(*server));
    if (!server)
        return -ENOMEM;
    r = uv_loop_init(&server->loop);
    if (r < 0) {
        snprintf(why, why_size, "cannot start the event loop: %s", uv_strerror(r));
        free(server);
        return r;
    }
    server->config = config;
    server->service.config = config;
    server->service.loop = &server->loop;
    server->service.listener = &server->listener;
    server->service.handle = dispatch_request;
    server->listener = LISTENER_NULL;
    server->work_fd = -1;
    server->service.started_ns = server->watchdog.stuck_since_ns = service_now_ns();
    server->watchdog.timeout_ns = notify_watchdog_us() * 1000;
    server->work_poll.data = server;
    if (config->persist == CONFIG_PERSIST_OFF && !keep_passed_state()) /* passed state must be kept (adopt.h) */
        keep_switch_off();
    r = watch_work(server);
    if (r == 0)
        r = start_server(server, why, why_size);
    if (r < 0) {
        if (keep_is_on())
            listener_leave(&server->listener); /* keeps the path for a later start, which may succeed */
        server_free(server);
        return r;
    }
    assert(server->pool);
    assert(server->job);
    *out = server;
    return 0;
}

/*
 * Closes a handle, unless it is the handle of an engine's process. The engine was killed, and its handle is freed when
 * the process has ended.
 */
static void close_handle(uv_handle_t *handle, void *userdata)
{
    (void)userdata;
    if (!uv_is_closing(handle) && handle->type != UV_PROCESS)
        uv_close(handle, NULL);
}

bool server_may_be_replaced(const struct server *server)
{
    const struct job *job = server->job;

    return job && !job->run.ends && journal_is_valid(job->run.survival.journal) &&
           (server->stop.is_unsaved || job_has_live_ranks(job));
}

void server_free(struct server *server)
{
    if (!server)
        return;
    if (server->job)
        server->job->run.stopping = true;
    /*
     * Stops listening before closing connections, because a trainer whose connection closes checks whether the daemon
     * still listens.
     */
    if (server->listener.fd >= 0 && server->listen_poll.type == UV_POLL)
        uv_close((uv_handle_t *)&server->listen_poll, NULL);
    listener_deinit(&server->listener);
    for (struct session *s = server->service.sessions; s; s = s->next)
        s->doomed = server->service.some_doomed = true;
    sessions_reap(&server->service);
    /* Waits for the end of all work before freeing the job, because the work uses the job. */
    while (server->pool && worker_pool_wait(server->pool) > 0)
        job_settle(server->job);
    sessions_reap(&server->service);
    worker_pool_free(server->pool);
    checkpoint_folder_leave(&server->folder);
    job_free(server->job); /* stops the engine; needs the membership's callbacks */
    membership_close(server->membership);
    uv_walk(&server->loop, close_handle, NULL);
    uv_run(&server->loop, UV_RUN_DEFAULT);
    uv_loop_close(&server->loop);
    if (server->work_fd >= 0)
        close(server->work_fd);
    service_deinit(&server->service);
    recorder_stop();
    free(server);
}

int server_run(struct server *server)
{
    char huge_pages[16];

    huge_pages_mode(huge_pages, sizeof(huge_pages));
    log_notice("ready: job %s, %u ranks, stage %d, %s kernels, %u threads, huge pages %s, socket %s%s",
               server->config->job, server->job->world.size, server->config->zero.stage, server->kernels->isa,
               worker_pool_n_threads(server->pool), huge_pages, server->config->listen.socket,
               keep_is_on() ? "" : "; the job's state is lost if this daemon dies (zerodrun and systemd keep it)");
    tell_status(server, service_now_ns()); /* so that an active unit has a status line */
    notify_state("READY=1");
    uv_run(&server->loop, UV_RUN_DEFAULT);
    return server->stop.is_unsaved;
}

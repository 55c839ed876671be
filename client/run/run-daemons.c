/* SPDX-License-Identifier: Apache-2.0 */

/* The daemons of a run: one, or with --jobs several. */

#include "client/run/run-inside.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

#include "client/run/answers.h"
#include "client/run/attached.h"
#include "core/base/base.h"
#include "core/base/open-files.h"

enum {
    DAEMON_RESTART_MS = 100, /* as in the systemd unit; only if the daemon has run for less than DAEMON_LIVES_MS */
    DAEMON_LIVES_MS = 1000,
};

static void daemon_exited(struct process *process);
static void run_daemon_ended(struct process *process);

void run_init_daemons(struct run *run)
{
    const struct place *place = run->place;

    run->daemons[0] = (struct run_daemon){
        .socket = place->socket, .config_path = place->config_path, .told = place->told, .label = "zerod"};
    for (unsigned i = 1; i < place->n_jobs; i++) {
        const struct place_job *job = &place->more[i - 1];

        run->daemons[i] =
            (struct run_daemon){.socket = job->socket, .config_path = job->config_path, .told = job->told};
        snprintf(run->daemons[i].label, sizeof(run->daemons[i].label), "zerod.%u", i);
    }
    for (unsigned i = 0; i < place->n_jobs; i++)
        run->daemons[i].run = run;
}

/* ---- the start ----------------------------------------------------------------------------------------- */

/* Finds zerod in the folder of zerodrun. Return: a string to be freed, or NULL. */
static char *zerod_beside(void)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char *path;

    if (n < 0)
        return NULL;
    self[n] = '\0';
    *strrchr(self, '/') = '\0';
    if (asprintf(&path, "%s/zerod", self) < 0)
        return NULL;
    if (access(path, X_OK) < 0)
        free(steal_ptr(path));
    return path;
}

/* Sets this daemon's variables in the environment that all daemons share. */
static int run_describe_daemon(struct run_daemon *daemon)
{
    /* A service manager has set these variables for zerodrun, not for the daemon. */
    static const char *const not_its[] = {"NOTIFY_SOCKET", "LISTEN_PID",    "LISTEN_FDS", "LISTEN_FDNAMES",
                                          "WATCHDOG_PID",  "WATCHDOG_USEC", "FDSTORE"};
    struct environment *env = &daemon->run->daemon_env;
    int r = env->vars ? 0 : environment_init(env);

    for (size_t i = 0; r == 0 && i < ARRAY_SIZE(not_its); i++)
        environment_unset(env, not_its[i]);
    return r < 0 || !daemon->is_kept ? r : keeper_describe(&daemon->keeper, env);
}

static int run_start_daemon(struct run_daemon *daemon)
{
    struct run *run = daemon->run;
    _cleanup_free_ char *beside = run->options->zerod_path ? NULL : zerod_beside();
    const char *program = run->options->zerod_path ? run->options->zerod_path : beside ? beside : "zerod";
    char ranks[16], *argv[12] = {(char *)program, (char *)"--config", (char *)daemon->config_path};
    size_t n = 3;
    struct process_spec spec = {
        .argv = argv,
        .label = daemon->label,
        .color = OUTPUT_DAEMON_COLOR,
        .death_signal = SIGINT,
        .fds = daemon->keeper.fds,
        .n_fds = daemon->is_kept ? daemon->keeper.n : 0,
        .n_open_files = run->n_open_files,
        .out = run->output.out,
        .err = run->output.err,
        .out_repeats = &run->output.repeats[0],
        .err_repeats = &run->output.repeats[run->output.has_one_file ? 0 : 1],
        .log = daemon->tee.is_open ? &daemon->tee.sink : NULL,
        .on_exit = daemon_exited,
        .on_end = run_daemon_ended,
        .owner = daemon,
    };
    int r = run_describe_daemon(daemon);

    if (daemon->told.socket) {
        argv[n++] = (char *)"--socket";
        argv[n++] = (char *)daemon->socket;
    }
    if (daemon->told.ranks) {
        snprintf(ranks, sizeof(ranks), "%u", run->place->world_size);
        argv[n++] = (char *)"--ranks";
        argv[n++] = ranks;
    }
    if (run->options->n_restarts == 0 && !run->options->serve)
        argv[n++] = (char *)"--no-successors";
    if (run->options->tee_path) {
        argv[n++] = (char *)"--trace-dir";
        argv[n++] = (char *)run->options->tee_path;
    }
    spec.env = run->daemon_env.vars;
    if (r == 0)
        r = process_start(&daemon->process, &run->loop, &spec);
    if (r < 0) {
        run_error(run, EX_OSERR, "cannot start %s: %s", program, strerror(-r));
        return r;
    }
    if (daemon->is_kept)
        keeper_expect(&daemon->keeper, daemon->process.pid);
    daemon->running = true;
    daemon->is_stopping = false;
    daemon->began_ms = uv_now(&run->loop);
    run->n_daemons++;
    run_note(run, "started %s (pid %d)", program, (int)daemon->process.pid);
    return 0;
}

const struct run_daemon *run_find_silent(const struct run *run)
{
    for (unsigned i = 0; i < run->place->n_jobs; i++)
        if (run->daemons[i].running && !answers_now(run->daemons[i].socket))
            return &run->daemons[i];
    return NULL;
}

static void run_note_of_keeper(void *userdata, const char *text)
{
    struct run_daemon *daemon = userdata;

    run_note(daemon->run, "%s: %s", daemon->label, text);
}

/* Stops the daemon for good. The kept descriptors are closed when zerodrun ends. */
static void daemon_stop(struct run_daemon *daemon)
{
    daemon->is_stopping = true;
    process_signal(&daemon->process, SIGINT);
}

/*
 * Stops a daemon that becomes ready while the run stops. Such a daemon has replaced one that died while it was
 * stopping.
 */
static void daemon_is_ready(void *userdata)
{
    struct run_daemon *daemon = userdata;

    if (daemon->run->state == RUN_STOPPING && !daemon->is_stopping)
        daemon_stop(daemon);
}

/* Extends the grace time of a stopping daemon that still writes a checkpoint. */
static void daemon_needs_time(void *userdata, uint64_t timeout_ms)
{
    struct run_daemon *daemon = userdata;
    struct run *run = daemon->run;

    if (run->state == RUN_STOPPING && uv_timer_get_due_in(&run->grace) < timeout_ms)
        uv_timer_start(&run->grace, run_grace_over, timeout_ms, 0);
}

static const struct keeper_ops keeper_ops = {
    .note = run_note_of_keeper, .ready = daemon_is_ready, .extend = daemon_needs_time};

/* Makes a keeper before the daemon's first start. A daemon without a keeper is never restarted. */
static void run_keep_daemon(struct run_daemon *daemon)
{
    struct run *run = daemon->run;
    int r;

    if (run->options->n_daemon_restarts == 0)
        return;
    open_files_raise(); /* because the kept descriptors need a higher limit */
    r = keeper_init(&daemon->keeper, &run->loop, &keeper_ops, daemon);
    if (r < 0) {
        run_note(run, "%s is not started again when it ends: %s", daemon->label, strerror(-r));
        return;
    }
    uv_timer_init(&run->loop, &daemon->restart);
    daemon->restart.data = daemon;
    daemon->restarts.limit = run->options->n_daemon_restarts;
    daemon->is_kept = true;
}

/*
 * Opens the daemon's --tee file. On several nodes its name has the node's number, because the nodes may share the
 * folder.
 */
static int run_open_tee_of_daemon(struct run_daemon *daemon)
{
    const struct place *place = daemon->run->place;
    char name[64];

    if (place->n_nodes > 1)
        snprintf(name, sizeof(name), "node%u.%s", place->node, daemon->label);
    else
        snprintf(name, sizeof(name), "%s", daemon->label);
    return run_open_tee(daemon->run, &daemon->tee, name);
}

int run_begin_daemon(struct run_daemon *daemon)
{
    struct run *run = daemon->run;
    int r;

    if (answers_now(daemon->socket)) {
        if (!run->options->serve)
            return 0;
        run_error(run, EX_UNAVAILABLE, "a daemon answers on %s already", daemon->socket);
        return -EADDRINUSE;
    }
    run_keep_daemon(daemon);
    r = run_open_tee_of_daemon(daemon);
    return r < 0 ? r : run_start_daemon(daemon);
}

/* ---- the end, and the next start ----------------------------------------------------------------------- */

/* Return: true if the daemon runs, or waits for its restart. */
static bool daemon_is_there(const struct run_daemon *daemon)
{
    return daemon->running || (daemon->is_kept && uv_is_active((const uv_handle_t *)&daemon->restart));
}

/* Finishes the run if all daemons have stopped. */
static void run_check_stopped(struct run *run)
{
    for (unsigned i = 0; i < run->place->n_jobs; i++)
        if (daemon_is_there(&run->daemons[i]))
            return;
    if (run->state == RUN_STOPPING)
        run_finish(run);
}

/*
 * Return: true if the daemon has stopped as requested. A daemon without state may also have died from SIGINT, before it
 * handled signals.
 */
static bool daemon_has_stopped(const struct run_daemon *daemon)
{
    const struct process *process = &daemon->process;
    bool has_state = daemon->is_kept && keeper_holds_state(&daemon->keeper);

    return daemon->is_stopping && (process_exit_code(process) == 0 || (process->term_signal == SIGINT && !has_state));
}

/* While the run stops, a daemon may restart only if a signal has killed it, because this daemon may not have saved its
 * state. A daemon that exits has reported the reason. */
static bool daemon_may_restart(struct run_daemon *daemon)
{
    const struct process *process = &daemon->process;
    const struct run *run = daemon->run;
    bool is_config = !process->term_signal && (process->exit_status == EX_CONFIG || process->exit_status == EX_USAGE);

    if (!daemon->is_kept || daemon->was_killed || run->killing || is_config)
        return false;
    if (run->state != RUN_RUNNING && run->state != RUN_ENDING &&
        !(run->state == RUN_STOPPING && process->term_signal && keeper_holds_state(&daemon->keeper)))
        return false;
    return restarts_are_left(&daemon->restarts, uv_now(&run->loop));
}

static void run_restart_daemon(uv_timer_t *timer)
{
    struct run_daemon *daemon = timer->data;
    struct run *run = daemon->run;

    if (run->state == RUN_STOPPING)
        uv_timer_start(&run->grace, run_grace_over, run->options->grace_ms, 0);
    if (run_start_daemon(daemon) < 0) {
        run_end_ranks(run);
        run_check_stopped(run);
    }
}

static const char *describe_moment(const struct run *run)
{
    if (run->state == RUN_STARTING)
        return "before it accepted connections";
    if (run->state == RUN_STOPPING)
        return "while it was stopping; a checkpoint that it was to write may be missing";
    return run->options->serve ? "while it was serving" : "while ranks were running";
}

/* Records the unexpected end of a daemon that is not restarted. */
static void daemon_note_failure(struct run_daemon *daemon)
{
    struct run *run = daemon->run;
    int code = process_exit_code(&daemon->process);
    const char *when = describe_moment(run);
    char how[96], limit[64] = "";

    run_describe_end(&daemon->process, how, sizeof(how));
    if (daemon->is_kept && !daemon->was_killed && !restarts_are_left(&daemon->restarts, uv_now(&run->loop)))
        snprintf(limit, sizeof(limit), "; no restart is left (%u in 10 minutes)", daemon->restarts.n);
    run_complain(run, "%s (pid %d) %s %s%s", daemon->label, (int)daemon->process.pid, how, when, limit);
    failure_note(&run->failure, code ? code : EX_UNAVAILABLE, &daemon->process, "%s %s %s%s", daemon->label, how, when,
                 limit);
}

static void daemon_exited(struct process *process)
{
    struct run_daemon *daemon = process->spec.owner;

    if (daemon->is_kept)
        keeper_drain(&daemon->keeper);
    if (daemon->run->killing && daemon->was_killed)
        return;
    daemon->is_lost = !daemon_has_stopped(daemon) && !daemon_may_restart(daemon);
    if (daemon->is_lost)
        daemon_note_failure(daemon);
}

static void daemon_restart(struct run_daemon *daemon, const char *how)
{
    struct run *run = daemon->run;
    uint64_t lived_ms = uv_now(&run->loop) - daemon->began_ms;

    (void)restarts_add(&daemon->restarts, uv_now(&run->loop)); /* daemon_exited() has checked the limit */
    run_note(run, "%s (pid %d) %s; restart %u of %u", daemon->label, (int)daemon->process.pid, how, daemon->restarts.n,
             daemon->restarts.limit);
    tee_say(&daemon->tee, "%s %s; restart %u of %u", daemon->label, how, daemon->restarts.n, daemon->restarts.limit);
    uv_timer_start(&daemon->restart, run_restart_daemon, lived_ms < DAEMON_LIVES_MS ? DAEMON_RESTART_MS : 0, 0);
}

static void run_daemon_ended(struct process *process)
{
    struct run_daemon *daemon = process->spec.owner;
    struct run *run = daemon->run;
    char how[96];

    daemon->running = false;
    run->n_daemons--;
    run_describe_end(process, how, sizeof(how));
    if (daemon->is_lost)
        run_end_ranks(run);
    else if (!daemon_has_stopped(daemon) && daemon_may_restart(daemon))
        daemon_restart(daemon, how);
    else if (process_exit_code(process) != 0)
        run_note(run, "%s (pid %d) %s", daemon->label, (int)process->pid, how);
    run_check_stopped(run);
}

/* Stops all daemons. A daemon that waits for its restart gets SIGINT when it is ready. If no state is kept, it is not
 * restarted. */
static void run_tell_daemons_to_stop(struct run *run)
{
    for (unsigned i = 0; i < run->place->n_jobs; i++) {
        struct run_daemon *daemon = &run->daemons[i];

        if (daemon->running)
            daemon_stop(daemon);
        else if (daemon->is_kept && !keeper_holds_state(&daemon->keeper))
            uv_timer_stop(&daemon->restart);
    }
}

void run_stop_daemon(struct run *run)
{
    if (run->state >= RUN_STOPPING)
        return;
    run->state = RUN_STOPPING;
    uv_timer_start(&run->grace, run_grace_over, run->options->grace_ms, 0);
    if (run->daemons[0].running && run->failure.exit_code == 0 && run->interrupted == 0 &&
        attached_nobody(run->daemons[0].socket))
        run_note(run, "no rank has attached to the daemon, so this run did not use zerod: zerod.Optimizer(model), or "
                      "ZerodTrainer, attaches a rank");
    if (run->killing)
        run_kill_daemons(run);
    else
        run_tell_daemons_to_stop(run);
    run_check_stopped(run);
}

void run_kill_daemons(struct run *run)
{
    for (unsigned i = 0; i < run->place->n_jobs; i++) {
        struct run_daemon *daemon = &run->daemons[i];

        daemon->was_killed = true;
        process_kill(&daemon->process);
        if (daemon->is_kept)
            uv_timer_stop(&daemon->restart);
    }
    run_check_stopped(run);
}

void run_close_keepers(struct run *run)
{
    for (unsigned i = 0; i < run->place->n_jobs; i++) {
        if (!run->daemons[i].is_kept)
            continue;
        keeper_close(&run->daemons[i].keeper);
        uv_close((uv_handle_t *)&run->daemons[i].restart, NULL);
    }
}

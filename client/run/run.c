/* SPDX-License-Identifier: Apache-2.0 */

/* A run of zerodrun, from the start of the daemons to the exit status. */

#include "client/run/run.h"

#include <assert.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sysexits.h>

#include "client/run/attached.h"
#include "client/run/process.h"
#include "client/run/environment.h"
#include "client/run/failure.h"
#include "client/run/keeper.h"
#include "client/run/options.h"
#include "client/run/output.h"
#include "client/run/place.h"
#include "client/run/repeats.h"
#include "client/run/restarts.h"
#include "client/run/tee.h"
#include "core/base/open-files.h"
#include "core/config/config.h"

enum {
    PROBE_MS = 20,
    DAEMON_RESTART_MS = 100, /* as the unit of systemd has it; of a daemon that has not lived for a second */
    DAEMON_LIVES_MS = 1000,
    START_TIMEOUT_MS = 30 * 1000, /* picked: a daemon that takes longer to open a socket will not */
    MAX_SINKS = 2 + CONFIG_MAX_LOCAL_RANKS + OPTIONS_MAX_JOBS,
};

enum run_state {
    RUN_STARTING,
    RUN_RUNNING,
    RUN_ENDING,
    RUN_STOPPING,
    RUN_FLUSHING,
};

static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};

struct run;

struct run_rank {
    struct run *run;
    struct process process;
    struct environment env;
    unsigned local;
    char label[24];
    unsigned n_restarts;
    bool running;
    struct tee tee;
};

struct run_daemon {
    struct run *run;
    struct process process;
    const char *socket, *config_path; /* the place's */
    struct place_told told;
    char label[24];
    bool running;
    bool is_lost; /* it has ended for good, before the ranks */
    uint64_t began_ms; /* 0: zerodrun has not started it, because another one answers */
    bool is_kept; /* keeper and restart exist: the daemon may be started again */
    struct keeper keeper;
    struct restarts restarts;
    uv_timer_t restart;
    struct tee tee;
};

struct run {
    const struct run_options *options;
    const struct place *place;
    enum run_state state;
    uv_loop_t loop;
    struct output outputs[2], *out, *err; /* out and err may be one */
    struct repeats repeats[2];            /* of out and err, the first one for both if has_one_file */
    bool has_one_file;                    /* out and err: what stands in one stands in the other */
    struct sink *sinks[MAX_SINKS];        /* n_sinks: all that have to be written before the end */
    size_t n_sinks;
    struct run_rank *ranks; /* place->n_ranks, owned */
    unsigned n_running;
    struct run_daemon daemons[OPTIONS_MAX_JOBS]; /* place->n_jobs */
    unsigned n_daemons;                          /* that run */
    struct environment daemon_env;
    uv_signal_t signals[ARRAY_SIZE(forwarded)];
    uv_timer_t probe, grace;
    uv_timer_t output_grace;  /* runs since the first interruption */
    uint64_t n_written_bytes; /* of all sinks, when output_grace was started */
    uint64_t started_ms;
    uint64_t n_open_files; /* soft limit that zerodrun was started with */
    int interrupted;       /* first of SIGINT, SIGTERM, SIGHUP that we got; 0: none */
    bool killing;          /* a second SIGINT came */
    bool abandoned;        /* the output is dropped: its threads may be in write(2), so nothing can be closed */
    struct failure failure;
};

static void run_note(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void run_complain(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void run_error(struct run *run, int exit_code, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void run_stop_daemon(struct run *run);

__attribute__((format(printf, 3, 0))) static void run_vsay(struct run *run, bool is_error, const char *format,
                                                           va_list args)
{
    _cleanup_free_ char *text = NULL;

    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    else
        output_say(run->err, is_error, text);
}

/* Progress, for those who want it. */
static void run_note(struct run *run, const char *format, ...)
{
    va_list args;

    if (run->options->quiet)
        return;
    va_start(args, format);
    run_vsay(run, false, format, args);
    va_end(args);
}

/* Says an error. */
static void run_complain(struct run *run, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    run_vsay(run, true, format, args);
    va_end(args);
}

/* Says what zerodrun itself could not do: a failure of the run. */
static void run_error(struct run *run, int exit_code, const char *format, ...)
{
    _cleanup_free_ char *text = NULL;
    va_list args;

    va_start(args, format);
    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    va_end(args);
    run_complain(run, "%s", text ? text : strerror(ENOMEM));
    failure_note(&run->failure, exit_code, NULL, "%s", text ? text : strerror(ENOMEM));
}

static void run_describe_end(const struct process *process, char *text, size_t size)
{
    if (process->term_signal)
        snprintf(text, size, "was killed by signal %d (%s)", process->term_signal, strsignal(process->term_signal));
    else
        snprintf(text, size, "exited with %d", (int)process->exit_status);
}

/* ---- the end ------------------------------------------------------------------------------------------- */

static void run_close_keepers(struct run *run)
{
    for (unsigned i = 0; i < run->place->n_jobs; i++) {
        if (!run->daemons[i].is_kept)
            continue;
        keeper_close(&run->daemons[i].keeper);
        uv_close((uv_handle_t *)&run->daemons[i].restart, NULL);
    }
}

static bool run_is_drained(const struct run *run)
{
    for (size_t i = 0; i < run->n_sinks; i++)
        if (!sink_is_drained(run->sinks[i]))
            return false;
    return true;
}

static void run_check_flushed(struct run *run)
{
    size_t i;

    if (run->state != RUN_FLUSHING || !run_is_drained(run))
        return;
    if (uv_is_closing((uv_handle_t *)&run->probe))
        return;
    if (run->abandoned) {
        uv_stop(&run->loop);
        return;
    }
    run_close_keepers(run);
    for (i = 0; i < run->n_sinks; i++)
        sink_close(run->sinks[i]);
    uv_close((uv_handle_t *)&run->probe, NULL);
    uv_close((uv_handle_t *)&run->grace, NULL);
    uv_close((uv_handle_t *)&run->output_grace, NULL);
    for (i = 0; i < ARRAY_SIZE(run->signals); i++)
        uv_close((uv_handle_t *)&run->signals[i], NULL);
}

/* The last line. */
static void run_sum_up(struct run *run)
{
    double seconds = (uv_now(&run->loop) - run->started_ms) / 1e3;
    const char *interrupted = run->interrupted ? ", interrupted" : "";
    char text[FAILURE_TEXT_BYTES];

    if (run->failure.exit_code == 0) {
        run_note(run, "done after %.1f s%s", seconds, interrupted);
    } else if (!run->options->quiet) {
        failure_describe(&run->failure, text, sizeof(text));
        run_complain(run, "failed after %.1f s%s: %s", seconds, interrupted, text);
    }
}

static void run_finish(struct run *run)
{
    run->state = RUN_FLUSHING;
    uv_timer_stop(&run->probe);
    uv_timer_stop(&run->grace);
    run_sum_up(run);
    run_check_flushed(run);
}

static void run_check_tee(struct run *run, struct tee *tee)
{
    int r = tee_complaint(tee);

    if (r < 0)
        run_complain(run, "%s: %s: the rest of the output is not in it", tee->path, strerror(-r));
}

static void run_drained(void *context)
{
    struct run *run = context;
    unsigned i;

    for (i = 0; i < run->place->n_ranks; i++) {
        run_check_tee(run, &run->ranks[i].tee);
        process_resume(&run->ranks[i].process);
    }
    for (i = 0; i < run->place->n_jobs; i++) {
        run_check_tee(run, &run->daemons[i].tee);
        process_resume(&run->daemons[i].process);
    }
    run_check_flushed(run);
}

/* ---- an output that no reader empties ------------------------------------------------------------------ */

static void run_give_up_output(struct run *run)
{
    size_t i;

    run->abandoned = true;
    for (i = 0; i < run->n_sinks; i++)
        if (!sink_is_drained(run->sinks[i]))
            sink_abandon(run->sinks[i]);
    run_note(run, "nobody took the output for %.0f s: the rest of it is dropped", run->options->grace_ms / 1e3);
    run_drained(run);
}

static uint64_t run_n_written_bytes(const struct run *run)
{
    uint64_t n_bytes = 0;

    for (size_t i = 0; i < run->n_sinks; i++)
        n_bytes += sink_n_written_bytes(run->sinks[i]);
    return n_bytes;
}

static void run_check_output(uv_timer_t *timer)
{
    struct run *run = timer->data;
    uint64_t n_bytes = run_n_written_bytes(run);

    if (!run_is_drained(run) && n_bytes == run->n_written_bytes)
        run_give_up_output(run);
    run->n_written_bytes = n_bytes;
}

/* Ranks wait for output that is stuck, and so they cannot end. */
static void run_watch_output(struct run *run)
{
    if (uv_is_active((uv_handle_t *)&run->output_grace))
        return;
    run->n_written_bytes = run_n_written_bytes(run);
    uv_timer_start(&run->output_grace, run_check_output, run->options->grace_ms, run->options->grace_ms);
}

/* ---- killing ------------------------------------------------------------------------------------------- */

static void run_kill(struct run *run)
{
    unsigned i;

    for (i = 0; i < run->place->n_ranks; i++)
        process_kill(&run->ranks[i].process);
    for (i = 0; run->n_running == 0 && i < run->place->n_jobs; i++)
        process_kill(&run->daemons[i].process);
}

static void run_grace_over(uv_timer_t *timer)
{
    struct run *run = timer->data;

    run_note(run, "still running %.0f s after SIGTERM: killed", run->options->grace_ms / 1e3);
    run_kill(run);
}

/* Starts no more ranks, and asks those that run to end. */
static void run_end_ranks(struct run *run)
{
    unsigned i;

    if (run->state >= RUN_ENDING)
        return;
    run->state = RUN_ENDING;
    uv_timer_stop(&run->probe);
    if (run->n_running == 0) {
        run_stop_daemon(run);
        return;
    }
    /* Interrupted ranks are on their way out, perhaps writing a checkpoint: a second signal would cut it off.
     */
    for (i = 0; !run->interrupted && i < run->place->n_ranks; i++)
        process_signal(&run->ranks[i].process, SIGTERM);
    uv_timer_start(&run->grace, run_grace_over, run->options->grace_ms, 0);
}

/* ---- ranks --------------------------------------------------------------------------------------------- */

static void rank_exited(struct process *process);
static void rank_ended(struct process *process);

/* A daemon that was there before this run may get a next one, with successors of its ranks. */
static int rank_describe_restarts(struct run_rank *rank)
{
    const struct run *run = rank->run;

    if (run->daemons[0].began_ms > 0)
        return environment_set(&rank->env, "ZEROD_RESTARTS_LEFT", "%u", run->options->n_restarts - rank->n_restarts);
    environment_unset(&rank->env, "ZEROD_RESTARTS_LEFT");
    return 0;
}

static int rank_start(struct run_rank *rank)
{
    struct run *run = rank->run;
    struct process_spec spec = {
        .argv = run->options->command,
        .label = rank->label,
        .color = output_rank_color(run->place->first_rank + rank->local),
        .death_signal = SIGKILL,
        .keep_stdin = rank->local == 0,
        .n_open_files = run->n_open_files,
        .out = run->out,
        .err = run->err,
        .out_repeats = &run->repeats[0],
        .err_repeats = &run->repeats[run->has_one_file ? 0 : 1],
        .log = rank->tee.is_open ? &rank->tee.sink : NULL,
        .on_exit = rank_exited,
        .on_end = rank_ended,
        .owner = rank,
    };
    int r = environment_set(&rank->env, "ZEROD_RESTART_COUNT", "%u", rank->n_restarts);

    if (r == 0)
        r = rank_describe_restarts(rank);
    spec.env = rank->env.vars; /* not before: it moves as it grows */
    if (r == 0)
        r = process_start(&rank->process, &run->loop, &spec);
    if (r < 0) {
        run_error(run, EX_OSERR, "cannot start rank %s: %s", rank->label, strerror(-r));
        return r;
    }
    rank->running = true;
    run->n_running++;
    return 0;
}

static bool rank_may_restart(const struct run_rank *rank)
{
    const struct run *run = rank->run;

    return run->state == RUN_RUNNING && !run->interrupted && rank->n_restarts < run->options->n_restarts;
}

static void rank_note_failure(struct run_rank *rank)
{
    char how[96];

    run_describe_end(&rank->process, how, sizeof(how));
    failure_note(&rank->run->failure, process_exit_code(&rank->process), &rank->process, "rank %s %s", rank->label,
                 how);
}

/* Which failure is the first is decided now: another rank's output may end before this one's. */
static void rank_exited(struct process *process)
{
    struct run_rank *rank = process->spec.owner;

    if (process_exit_code(process) != 0 && !rank_may_restart(rank))
        rank_note_failure(rank);
}

static void rank_ended(struct process *process)
{
    struct run_rank *rank = process->spec.owner;
    struct run *run = rank->run;
    int code = process_exit_code(process);
    char how[96];

    rank->running = false;
    run->n_running--;
    run_describe_end(process, how, sizeof(how));
    if (code != 0 && rank_may_restart(rank)) {
        rank->n_restarts++;
        run_note(run, "rank %s (pid %d) %s; restart %u of %u", rank->label, (int)process->pid, how, rank->n_restarts,
                 run->options->n_restarts);
        tee_say(&rank->tee, "rank %s %s; restart %u of %u", rank->label, how, rank->n_restarts,
                run->options->n_restarts);
        if (rank_start(rank) < 0)
            run_end_ranks(run);
        return;
    }
    if (code != 0) {
        run_note(run, "rank %s (pid %d) %s", rank->label, (int)process->pid, how);
        rank_note_failure(rank);
        run_end_ranks(run);
    }
    if (run->n_running == 0)
        run_stop_daemon(run);
}

static void run_start_ranks(struct run *run)
{
    unsigned i;

    run->state = RUN_RUNNING;
    uv_timer_stop(&run->probe);
    run_note(run, "starts %u of %u ranks, run %s, socket %s", run->place->n_ranks, run->place->world_size,
             run->place->run_id, run->place->socket ? run->place->socket : "none");
    for (i = 0; i < run->place->n_ranks; i++) {
        if (rank_start(&run->ranks[i]) < 0) {
            run_end_ranks(run);
            return;
        }
    }
}

/* ---- daemon -------------------------------------------------------------------------------------------- */

static void run_stop_daemon(struct run *run)
{
    unsigned i;

    if (run->state >= RUN_STOPPING)
        return;
    run->state = RUN_STOPPING;
    uv_timer_stop(&run->grace);
    for (i = 0; i < run->place->n_jobs; i++)
        if (run->daemons[i].is_kept)
            uv_timer_stop(&run->daemons[i].restart);
    if (run->n_daemons == 0) {
        run_finish(run);
        return;
    }
    if (run->failure.exit_code == 0 && run->interrupted == 0 && attached_nobody(run->daemons[0].socket))
        run_note(run, "no rank has attached to the daemon, so this run did not use zerod: zerod.Optimizer(model), or "
                      "ZerodTrainer, attaches a rank");
    for (i = 0; i < run->place->n_jobs; i++) {
        if (run->killing)
            process_kill(&run->daemons[i].process);
        else
            process_signal(&run->daemons[i].process, SIGTERM);
    }
    uv_timer_start(&run->grace, run_grace_over, run->options->grace_ms, 0);
}

static bool daemon_may_restart(struct run_daemon *daemon)
{
    const struct process *process = &daemon->process;
    const struct run *run = daemon->run;
    bool is_config = !process->term_signal && (process->exit_status == EX_CONFIG || process->exit_status == EX_USAGE);

    return run->state == RUN_RUNNING && !run->killing && daemon->is_kept && !is_config &&
           restarts_are_left(&daemon->restarts, uv_now(&run->loop));
}

static int run_start_daemon(struct run_daemon *daemon);

static void run_restart_daemon(uv_timer_t *timer)
{
    struct run_daemon *daemon = timer->data;

    if (run_start_daemon(daemon) < 0)
        run_end_ranks(daemon->run);
}

/* A daemon ended that was not told to, and is not started again. */
static void daemon_note_failure(struct run_daemon *daemon)
{
    struct run *run = daemon->run;
    int code = process_exit_code(&daemon->process);
    const char *when = run->state == RUN_STARTING ? "before it accepted connections"
                       : run->options->serve      ? "while it was serving"
                                                  : "while ranks were running";
    char how[96], limit[64] = "";

    run_describe_end(&daemon->process, how, sizeof(how));
    if (daemon->is_kept && !restarts_are_left(&daemon->restarts, uv_now(&run->loop)))
        snprintf(limit, sizeof(limit), "; no restart is left (%u in 10 minutes)", daemon->restarts.n);
    run_complain(run, "%s (pid %d) %s %s%s", daemon->label, (int)daemon->process.pid, how, when, limit);
    failure_note(&run->failure, code ? code : EX_UNAVAILABLE, &daemon->process, "%s %s %s%s", daemon->label, how, when,
                 limit);
}

static void daemon_exited(struct process *process)
{
    struct run_daemon *daemon = process->spec.owner;

    daemon->is_lost = daemon->run->state < RUN_STOPPING && !daemon_may_restart(daemon);
    if (daemon->is_lost)
        daemon_note_failure(daemon);
}

static void daemon_restart(struct run_daemon *daemon, const char *how)
{
    struct run *run = daemon->run;
    uint64_t lived_ms = uv_now(&run->loop) - daemon->began_ms;

    (void)restarts_add(&daemon->restarts, uv_now(&run->loop)); /* daemon_exited() has asked */
    run_note(run, "%s (pid %d) %s; restart %u of %u", daemon->label, (int)daemon->process.pid, how, daemon->restarts.n,
             daemon->restarts.limit);
    tee_say(&daemon->tee, "%s %s; restart %u of %u", daemon->label, how, daemon->restarts.n, daemon->restarts.limit);
    uv_timer_start(&daemon->restart, run_restart_daemon, lived_ms < DAEMON_LIVES_MS ? DAEMON_RESTART_MS : 0, 0);
}

static void run_daemon_ended(struct process *process)
{
    struct run_daemon *daemon = process->spec.owner;
    struct run *run = daemon->run;
    int code = process_exit_code(process);
    char how[96];

    daemon->running = false;
    run->n_daemons--;
    run_describe_end(process, how, sizeof(how));
    if (daemon->is_kept)
        keeper_drain(&daemon->keeper);
    if (daemon->is_lost)
        run_end_ranks(run);
    else if (run->state == RUN_RUNNING && !run->killing)
        daemon_restart(daemon, how);
    else if (code != 0)
        run_note(run, "%s (pid %d) %s", daemon->label, (int)process->pid, how);
    if (run->state == RUN_STOPPING && run->n_daemons == 0)
        run_finish(run);
}

/* The zerod in the folder of zerodrun. Return: NULL when there is none, or a string to be freed. */
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

/* Of the environment that all daemons share; each start sets what differs. */
static int run_describe_daemon(struct run_daemon *daemon)
{
    /* A service manager that started zerodrun waits for zerodrun, not for the daemon. */
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
        .death_signal = SIGTERM,
        .fds = daemon->keeper.fds,
        .n_fds = daemon->is_kept ? daemon->keeper.n : 0,
        .n_open_files = run->n_open_files,
        .out = run->out,
        .err = run->err,
        .out_repeats = &run->repeats[0],
        .err_repeats = &run->repeats[run->has_one_file ? 0 : 1],
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
    daemon->began_ms = uv_now(&run->loop);
    run->n_daemons++;
    run_note(run, "started %s (pid %d)", program, (int)daemon->process.pid);
    return 0;
}

/* The first daemon that does not accept connections yet, or NULL. */
static const struct run_daemon *run_find_silent(const struct run *run)
{
    for (unsigned i = 0; i < run->place->n_jobs; i++)
        if (run->daemons[i].running && !place_answers(run->daemons[i].socket))
            return &run->daemons[i];
    return NULL;
}

static void run_begin_running(struct run *run)
{
    if (!run->options->serve) {
        run_start_ranks(run);
        return;
    }
    run->state = RUN_RUNNING;
    uv_timer_stop(&run->probe);
    for (unsigned i = 0; i < run->place->n_jobs; i++)
        run_note(run, "serving on %s until SIGTERM or SIGINT", run->daemons[i].socket);
}

static void run_probe(uv_timer_t *timer)
{
    struct run *run = timer->data;
    const struct run_daemon *silent = run_find_silent(run);

    if (!silent) {
        run_begin_running(run);
    } else if (uv_now(&run->loop) - run->started_ms > START_TIMEOUT_MS) {
        run_error(run, EX_UNAVAILABLE, "zerod does not accept connections on %s after %d s", silent->socket,
                  START_TIMEOUT_MS / 1000);
        run_end_ranks(run);
    }
}

/* ---- signals ------------------------------------------------------------------------------------------- */

static void run_interrupt(struct run *run, int signum)
{
    if (run->state == RUN_FLUSHING) {
        run->abandoned = true;
        uv_stop(&run->loop);
        return;
    }
    if (run->interrupted == SIGINT && signum == SIGINT) {
        run->killing = true;
        run_note(run, "second SIGINT: killing");
        failure_note(&run->failure, 128 + SIGINT, NULL, "the ranks were killed after a second SIGINT");
        run_kill(run);
        return;
    }
    if (!run->interrupted || signum == SIGINT)
        run->interrupted = signum;
    run_watch_output(run);
    if (run->state == RUN_STARTING) {
        run_error(run, 128 + signum, "interrupted while zerod was starting");
        run_end_ranks(run);
    } else if (run->options->serve) {
        run_end_ranks(run);
    }
}

static void run_signal(uv_signal_t *handle, int signum)
{
    struct run *run = handle->data;
    unsigned i;

    if (signum == SIGINT || signum == SIGTERM || signum == SIGHUP)
        run_interrupt(run, signum);
    for (i = 0; !run->killing && i < run->place->n_ranks; i++)
        if (run->ranks[i].running)
            process_signal(&run->ranks[i].process, signum);
}

/* ---- the run ------------------------------------------------------------------------------------------- */

static int run_init_ranks(struct run *run)
{
    struct run_rank *rank;
    unsigned i;
    int r = 0;

    run->ranks = calloc(run->place->n_ranks, sizeof(*run->ranks));
    if (!run->ranks)
        return -ENOMEM;
    for (i = 0; r == 0 && i < run->place->n_ranks; i++) {
        rank = &run->ranks[i];
        rank->run = run;
        rank->local = i;
        snprintf(rank->label, sizeof(rank->label), "%u", run->place->first_rank + i);
        r = environment_init(&rank->env);
        if (r == 0)
            r = place_describe(run->place, i, &rank->env);
    }
    return r;
}

static void run_init_signals(struct run *run)
{
    size_t i;

    signal(SIGPIPE, SIG_IGN);
    for (i = 0; i < ARRAY_SIZE(forwarded); i++) {
        uv_signal_init(&run->loop, &run->signals[i]);
        run->signals[i].data = run;
        uv_signal_start(&run->signals[i], run_signal, forwarded[i]);
    }
}

static int run_init_outputs(struct run *run)
{
    static const int fds[] = {STDOUT_FILENO, STDERR_FILENO};
    size_t n = output_is_shared(STDOUT_FILENO, STDERR_FILENO) ? 1 : ARRAY_SIZE(fds);

    for (size_t i = 0; i < n; i++) {
        int r = output_init(&run->outputs[i], &run->loop, fds[i], run->options->color, run_drained, run);

        if (r < 0)
            return r;
        run->sinks[run->n_sinks++] = &run->outputs[i].sink;
    }
    run->has_one_file = output_is_one_file(STDOUT_FILENO, STDERR_FILENO);
    run->out = &run->outputs[0];
    run->err = &run->outputs[n - 1];
    return 0;
}

static int run_init(struct run *run)
{
    int r = uv_loop_init(&run->loop);

    if (r < 0)
        return r;
    r = run_init_outputs(run);
    if (r < 0)
        return r;
    uv_timer_init(&run->loop, &run->probe);
    uv_timer_init(&run->loop, &run->grace);
    uv_timer_init(&run->loop, &run->output_grace);
    run->output_grace.data = run;
    run->probe.data = run;
    run->grace.data = run;
    run->started_ms = uv_now(&run->loop);
    run->n_open_files = open_files_limit();
    run_init_signals(run);
    return run_init_ranks(run);
}

static void run_init_daemons(struct run *run)
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

static void run_note_of_keeper(void *userdata, const char *text)
{
    struct run_daemon *daemon = userdata;

    run_note(daemon->run, "%s: %s", daemon->label, text);
}

/* The daemon is about to be started for the first time. Without a keeper it runs as well, but only once. */
static void run_keep_daemon(struct run_daemon *daemon)
{
    struct run *run = daemon->run;
    int r;

    if (run->options->n_daemon_restarts == 0)
        return;
    open_files_raise(); /* for what is kept */
    r = keeper_init(&daemon->keeper, &run->loop, run_note_of_keeper, daemon);
    if (r < 0) {
        run_note(run, "%s is not started again when it ends: %s", daemon->label, strerror(-r));
        return;
    }
    uv_timer_init(&run->loop, &daemon->restart);
    daemon->restart.data = daemon;
    daemon->restarts.limit = run->options->n_daemon_restarts;
    daemon->is_kept = true;
}

/* name: of a rank's or a daemon's file. Return: 0, or negative, then a sentence was said. */
static int run_open_tee(struct run *run, struct tee *tee, const char *name)
{
    const struct tee_spec spec = {
        .directory = run->options->tee_path,
        .name = name,
        .run_id = run->place->run_id,
        .on_drained = run_drained,
        .context = run,
    };
    int r = spec.directory ? tee_init(tee, &run->loop, &spec) : 0;

    if (tee->is_open)
        run->sinks[run->n_sinks++] = &tee->sink;
    if (r < 0)
        run_error(run, EX_CANTCREAT, "--tee: cannot write %s: %s", tee->path ? tee->path : name, strerror(-r));
    return r;
}

static int run_open_tees_of_ranks(struct run *run)
{
    char name[32];
    int r = 0;

    for (unsigned i = 0; r == 0 && i < run->place->n_ranks; i++) {
        snprintf(name, sizeof(name), "rank%s", run->ranks[i].label);
        r = run_open_tee(run, &run->ranks[i].tee, name);
    }
    return r;
}

/* The nodes may share the folder. */
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

/* Return: 0, or negative, then a sentence was said. */
static int run_begin_daemon(struct run_daemon *daemon)
{
    struct run *run = daemon->run;
    int r;

    if (place_answers(daemon->socket)) {
        if (!run->options->serve)
            return 0;
        run_error(run, EX_UNAVAILABLE, "a daemon answers on %s already", daemon->socket);
        return -EADDRINUSE;
    }
    run_keep_daemon(daemon);
    r = run_open_tee_of_daemon(daemon);
    return r < 0 ? r : run_start_daemon(daemon);
}

static void run_begin(struct run *run)
{
    int r = run->options->serve ? 0 : run_open_tees_of_ranks(run);

    for (unsigned i = 0; r == 0 && !run->options->no_daemon && i < run->place->n_jobs; i++)
        r = run_begin_daemon(&run->daemons[i]);
    if (r < 0)
        run_end_ranks(run);
    else if (run->n_daemons == 0)
        run_start_ranks(run);
    else
        uv_timer_start(&run->probe, run_probe, PROBE_MS, PROBE_MS);
}

static void run_deinit(struct run *run)
{
    unsigned i;

    for (i = 0; i < run->place->n_ranks; i++) {
        environment_deinit(&run->ranks[i].env);
        tee_deinit(&run->ranks[i].tee);
    }
    for (i = 0; i < run->place->n_jobs; i++)
        tee_deinit(&run->daemons[i].tee);
    environment_deinit(&run->daemon_env);
    for (i = 0; i < ARRAY_SIZE(run->repeats); i++)
        repeats_deinit(&run->repeats[i]);
    free(run->ranks);
}

int run(const struct run_options *options, const struct place *place)
{
    /* Not freed when it failed half way or was abandoned: a thread may still use it, and the process is about
     * to end. */
    struct run *run = calloc(1, sizeof(*run));
    int r, code;

    if (!run)
        return EX_OSERR;
    run->options = options;
    run->place = place;
    run_init_daemons(run);
    r = run_init(run);
    if (r < 0) {
        fprintf(stderr, "zerodrun: %s\n", strerror(-r));
        return EX_OSERR;
    }
    run_begin(run);
    uv_run(&run->loop, UV_RUN_DEFAULT);
    code = run->failure.exit_code;
    if (run->abandoned) {
        for (unsigned i = 0; i < place->n_jobs; i++)
            keeper_remove_socket(&run->daemons[i].keeper);
        return code;
    }
    r = uv_loop_close(&run->loop);
    assert(r == 0);
    run_deinit(run);
    free(run);
    return code;
}

/* SPDX-License-Identifier: Apache-2.0 */

/* A run of zerodrun, from the start of the daemons to the exit status. */

#include "client/run/run.h"

#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "client/run/run-inside.h"
#include "core/base/base.h"
#include "core/base/open-files.h"

enum {
    PROBE_MS = 20,
    START_TIMEOUT_MS = 30 * 1000, /* picked: a daemon that takes longer to open its socket has failed */
};

static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
static_assert(ARRAY_SIZE(forwarded) == RUN_N_FORWARDED, "the handles of all signals");

/* ---- signals ------------------------------------------------------------------------------------------- */

static void run_interrupt(struct run *run, int signum)
{
    if (run->state == RUN_FLUSHING) {
        run->output.abandoned = true;
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

    if (signum != SIGUSR1 && signum != SIGUSR2)
        run_interrupt(run, signum);
    for (i = 0; !run->killing && i < run->place->n_ranks; i++)
        if (run->ranks[i].running)
            process_signal(&run->ranks[i].process, signum);
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

/* ---- the start ----------------------------------------------------------------------------------------- */

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

/* ---- the run ------------------------------------------------------------------------------------------- */

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
    uv_timer_init(&run->loop, &run->output.grace);
    run->output.grace.data = run;
    run->probe.data = run;
    run->grace.data = run;
    run->started_ms = uv_now(&run->loop);
    run->n_open_files = open_files_limit();
    run_init_signals(run);
    return run_init_ranks(run);
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
    for (i = 0; i < ARRAY_SIZE(run->output.repeats); i++)
        repeats_deinit(&run->output.repeats[i]);
    free(run->ranks);
}

int run(const struct run_options *options, const struct place *place)
{
    /* Not freed if run_init() fails or the run is abandoned, because a thread may still use it, and the process ends
     * soon. */
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
    if (run->output.abandoned) {
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

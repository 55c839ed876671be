/* SPDX-License-Identifier: Apache-2.0 */

/* The ranks of a run. */

#include "client/run/run-inside.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "core/base/base.h"

int run_init_ranks(struct run *run)
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

int run_open_tees_of_ranks(struct run *run)
{
    char name[32];
    int r = 0;

    for (unsigned i = 0; r == 0 && i < run->place->n_ranks; i++) {
        snprintf(name, sizeof(name), "rank%s", run->ranks[i].label);
        r = run_open_tee(run, &run->ranks[i].tee, name);
    }
    return r;
}

/* ---- the start ----------------------------------------------------------------------------------------- */

static void rank_exited(struct process *process);
static void rank_ended(struct process *process);

/* Sets ZEROD_RESTARTS_LEFT only if zerodrun has started the daemon. Another daemon may outlive this run, and serve
 * successors of these ranks. */
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
        .out = run->output.out,
        .err = run->output.err,
        .out_repeats = &run->output.repeats[0],
        .err_repeats = &run->output.repeats[run->output.has_one_file ? 0 : 1],
        .log = rank->tee.is_open ? &rank->tee.sink : NULL,
        .on_exit = rank_exited,
        .on_end = rank_ended,
        .owner = rank,
    };
    int r = environment_set(&rank->env, "ZEROD_RESTART_COUNT", "%u", rank->n_restarts);

    if (r == 0)
        r = rank_describe_restarts(rank);
    spec.env = rank->env.vars; /* set after the changes, because the array moves as it grows */
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

void run_start_ranks(struct run *run)
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

/* ---- the end, and the next start ----------------------------------------------------------------------- */

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

/* Records the failure at the exit, because another failed rank's output may end before this rank's. */
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

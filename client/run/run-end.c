/* SPDX-License-Identifier: Apache-2.0 */

/* Ends a run. */

#include "client/run/run-inside.h"

#include <signal.h>

/* ---- killing ------------------------------------------------------------------------------------------- */

void run_kill(struct run *run)
{
    unsigned i;

    for (i = 0; i < run->place->n_ranks; i++)
        process_kill(&run->ranks[i].process);
    if (run->n_running == 0)
        run_kill_daemons(run);
}

void run_grace_over(uv_timer_t *timer)
{
    struct run *run = timer->data;

    run_note(run, "still running %.0f s after %s: killed", run->options->grace_ms / 1e3,
             run->n_running > 0 ? "SIGTERM" : "SIGINT");
    run_kill(run);
}

void run_end_ranks(struct run *run)
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
    /*
     * Ranks that were interrupted are already ending. They may write a checkpoint, which a second signal would abort.
     */
    for (i = 0; !run->interrupted && i < run->place->n_ranks; i++)
        process_signal(&run->ranks[i].process, SIGTERM);
    uv_timer_start(&run->grace, run_grace_over, run->options->grace_ms, 0);
}

/* ---- the end ------------------------------------------------------------------------------------------- */

void run_check_flushed(struct run *run)
{
    size_t i;

    if (run->state != RUN_FLUSHING || !run_is_drained(run))
        return;
    if (uv_is_closing((uv_handle_t *)&run->probe))
        return;
    if (run->output.abandoned) {
        uv_stop(&run->loop);
        return;
    }
    run_close_keepers(run);
    for (i = 0; i < run->output.n_sinks; i++)
        sink_close(run->output.sinks[i]);
    uv_close((uv_handle_t *)&run->probe, NULL);
    uv_close((uv_handle_t *)&run->grace, NULL);
    uv_close((uv_handle_t *)&run->output.grace, NULL);
    for (i = 0; i < ARRAY_SIZE(run->signals); i++)
        uv_close((uv_handle_t *)&run->signals[i], NULL);
}

/* Prints the last line. */
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

void run_finish(struct run *run)
{
    run->state = RUN_FLUSHING;
    uv_timer_stop(&run->probe);
    uv_timer_stop(&run->grace);
    run_sum_up(run);
    run_check_flushed(run);
}

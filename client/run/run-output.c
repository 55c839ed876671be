/* SPDX-License-Identifier: Apache-2.0 */

/* The outputs and files of a run, and the timeout for output without a reader. */

#include "client/run/run-inside.h"

#include <string.h>
#include <sysexits.h>
#include <unistd.h>

bool run_is_drained(const struct run *run)
{
    for (size_t i = 0; i < run->output.n_sinks; i++)
        if (!sink_is_drained(run->output.sinks[i]))
            return false;
    return true;
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

int run_init_outputs(struct run *run)
{
    static const int fds[] = {STDOUT_FILENO, STDERR_FILENO};
    size_t n = output_is_shared(STDOUT_FILENO, STDERR_FILENO) ? 1 : ARRAY_SIZE(fds);

    for (size_t i = 0; i < n; i++) {
        int r = output_init(&run->output.streams[i], &run->loop, fds[i], run->options->color, run_drained, run);

        if (r < 0)
            return r;
        run->output.sinks[run->output.n_sinks++] = &run->output.streams[i].sink;
    }
    run->output.has_one_file = output_is_one_file(STDOUT_FILENO, STDERR_FILENO);
    run->output.out = &run->output.streams[0];
    run->output.err = &run->output.streams[n - 1];
    return 0;
}

int run_open_tee(struct run *run, struct tee *tee, const char *name)
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
        run->output.sinks[run->output.n_sinks++] = &tee->sink;
    if (r < 0)
        run_error(run, EX_CANTCREAT, "--tee: cannot write %s: %s", tee->path ? tee->path : name, strerror(-r));
    return r;
}

/* ---- an output that no reader empties ------------------------------------------------------------------ */

static void run_give_up_output(struct run *run)
{
    size_t i;

    run->output.abandoned = true;
    for (i = 0; i < run->output.n_sinks; i++)
        if (!sink_is_drained(run->output.sinks[i]))
            sink_abandon(run->output.sinks[i]);
    run_note(run, "no reader read the output for %.0f s, so the rest is dropped", run->options->grace_ms / 1e3);
    run_drained(run);
}

static uint64_t run_n_written_bytes(const struct run *run)
{
    uint64_t n_bytes = 0;

    for (size_t i = 0; i < run->output.n_sinks; i++)
        n_bytes += sink_n_written_bytes(run->output.sinks[i]);
    return n_bytes;
}

static void run_check_output(uv_timer_t *timer)
{
    struct run *run = timer->data;
    uint64_t n_bytes = run_n_written_bytes(run);

    if (!run_is_drained(run) && n_bytes == run->output.n_written_bytes)
        run_give_up_output(run);
    run->output.n_written_bytes = n_bytes;
}

void run_watch_output(struct run *run)
{
    if (uv_is_active((uv_handle_t *)&run->output.grace))
        return;
    run->output.n_written_bytes = run_n_written_bytes(run);
    uv_timer_start(&run->output.grace, run_check_output, run->options->grace_ms, run->options->grace_ms);
}

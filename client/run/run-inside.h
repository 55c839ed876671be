/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A run of zerodrun, from the inside; run.h is what others see.
 *
 * The state only rises. Daemons are started first, then, when they answer, the ranks. When the ranks have ended, the
 * daemons are told to end, and when those have ended, what is left of the output is written.
 *
 *     run.c          the start, and signals
 *     run-daemons.c  the daemons: started, kept, started again, stopped
 *     run-ranks.c    the ranks: started, started again
 *     run-end.c      ranks that are asked to end, or killed; the last line; the end of the loop
 *     run-output.c   all that is written to, and how long an output that nobody reads is waited for
 *     run-say.c      lines of zerodrun itself
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/run/environment.h"
#include "client/run/failure.h"
#include "client/run/keeper.h"
#include "client/run/options.h"
#include "client/run/output.h"
#include "client/run/run-place.h"
#include "client/run/process.h"
#include "client/run/repeats.h"
#include "client/run/restarts.h"
#include "client/run/tee.h"
#include "core/config/config.h"

enum {
    RUN_MAX_SINKS = 2 + CONFIG_MAX_LOCAL_RANKS + OPTIONS_MAX_JOBS,
    RUN_N_FORWARDED = 6, /* signals that the ranks get, too */
};

enum run_state {
    RUN_STARTING,
    RUN_RUNNING,
    RUN_ENDING,
    RUN_STOPPING,
    RUN_FLUSHING,
};

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
    bool is_lost;      /* it has ended for good, before it was told to stop, or without stopping as it should */
    bool is_stopping;  /* its present process was sent SIGTERM */
    bool was_killed;   /* zerodrun has given it up */
    uint64_t began_ms; /* 0: zerodrun has not started it, because another one answers */
    bool is_kept;      /* keeper and restart exist: the daemon may be started again */
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
    struct sink *sinks[RUN_MAX_SINKS];    /* n_sinks: all that have to be written before the end */
    size_t n_sinks;
    struct run_rank *ranks; /* place->n_ranks, owned */
    unsigned n_running;
    struct run_daemon daemons[OPTIONS_MAX_JOBS]; /* place->n_jobs */
    unsigned n_daemons;                          /* that run */
    struct environment daemon_env;
    uv_signal_t signals[RUN_N_FORWARDED];
    uv_timer_t probe, grace;
    uv_timer_t output_grace;  /* runs since the first interruption */
    uint64_t n_written_bytes; /* of all sinks, when output_grace was started */
    uint64_t started_ms;
    uint64_t n_open_files; /* soft limit that zerodrun was started with */
    int interrupted;       /* first of SIGINT, SIGTERM, SIGHUP, SIGQUIT that we got; 0: none */
    bool killing;          /* a second SIGINT came */
    bool abandoned;        /* the output is dropped: its threads may be in write(2), so nothing can be closed */
    struct failure failure;
};

/* ---- run-say.c ----------------------------------------------------------------------------------------- */

/* Progress, for those who want it. */
void run_note(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* An error. */
void run_complain(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints an error of zerodrun itself, and makes the run fail with this exit code. */
void run_error(struct run *run, int exit_code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* "exited with 1" */
void run_describe_end(const struct process *process, char *text, size_t size);

/* ---- run-output.c -------------------------------------------------------------------------------------- */

/* Return: 0 or a negative errno. */
int run_init_outputs(struct run *run);
/* name: of a rank's or a daemon's file. Return: 0, or negative, then a sentence was said. */
int run_open_tee(struct run *run, struct tee *tee, const char *name);
bool run_is_drained(const struct run *run);
/* After an interruption. Ranks wait for output that is stuck, and so they cannot end. */
void run_watch_output(struct run *run);

/* ---- run-ranks.c --------------------------------------------------------------------------------------- */

/* Return: 0 or a negative errno. */
int run_init_ranks(struct run *run);
/* Return: 0, or negative, then a sentence was said. */
int run_open_tees_of_ranks(struct run *run);
void run_start_ranks(struct run *run);

/* ---- run-daemons.c ------------------------------------------------------------------------------------- */

void run_init_daemons(struct run *run);
/* Return: 0, also if another daemon answers there; or negative, then a sentence was said. */
int run_begin_daemon(struct run_daemon *daemon);
/* The first daemon that does not accept connections yet, or NULL. */
const struct run_daemon *run_find_silent(const struct run *run);
/* Starts a daemon once more that dies while it stops, as long as its state is kept. */
void run_stop_daemon(struct run *run);
void run_kill_daemons(struct run *run);
void run_close_keepers(struct run *run);

/* ---- run-end.c ----------------------------------------------------------------------------------------- */

/* Starts no more ranks, and asks those that run to end. */
void run_end_ranks(struct run *run);
void run_kill(struct run *run);
/* When run->grace ends. */
void run_grace_over(uv_timer_t *timer);
/* All processes have ended. */
void run_finish(struct run *run);
/* Ends the loop if all output is written. */
void run_check_flushed(struct run *run);

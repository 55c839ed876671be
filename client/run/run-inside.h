/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Declarations for the files that implement run.h.
 *
 * The state never goes back. The daemons start first. When the daemons answer, the ranks start. When the ranks have
 * ended, the daemons are stopped. When the daemons have ended, the remaining output is written.
 *
 *     run.c          the start, and signals
 *     run-daemons.c starts, keeps, restarts and stops the daemons
 *     run-ranks.c    starts and restarts the ranks
 *     run-end.c      ends and kills ranks; the last line; the end of the loop
 *     run-output.c   the outputs and files, and the timeout for an output without a reader
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
    RUN_N_FORWARDED = 6, /* signals that zerodrun forwards to the ranks */
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
    const char *socket, *config_path; /* owned by the place */
    struct place_told told;
    char label[24];
    bool running;
    bool is_lost;      /* the daemon has ended unexpectedly and is not restarted */
    bool is_stopping;  /* zerodrun has sent SIGINT to the present process */
    bool was_killed;   /* zerodrun has sent SIGKILL */
    uint64_t began_ms; /* 0: zerodrun has not started it */
    bool is_kept;      /* keeper and restart exist, so the daemon may be restarted */
    struct keeper keeper;
    struct restarts restarts;
    uv_timer_t restart;
    struct tee tee;
};

/* Where zerodrun and its processes write (run-output.c). */
struct run_output {
    struct output streams[2], *out, *err; /* out and err may be equal */
    struct repeats repeats[2];            /* for out and err; the first one for both if has_one_file */
    bool has_one_file;                    /* out and err are the same file */
    struct sink *sinks[RUN_MAX_SINKS];    /* n_sinks sinks, which are drained before the end */
    size_t n_sinks;
    uv_timer_t grace;         /* starts at the first interruption */
    uint64_t n_written_bytes; /* by all sinks, at the last check of grace */
    bool abandoned;           /* output is dropped; its threads may hang in write(2), so sinks cannot be closed */
};

struct run {
    const struct run_options *options;
    const struct place *place;
    enum run_state state;
    uv_loop_t loop;
    struct run_output output;
    struct run_rank *ranks; /* place->n_ranks, owned */
    unsigned n_running;
    struct run_daemon daemons[OPTIONS_MAX_JOBS]; /* place->n_jobs */
    unsigned n_daemons;                          /* running daemons */
    struct environment daemon_env;
    uv_signal_t signals[RUN_N_FORWARDED];
    uv_timer_t probe, grace;
    uint64_t started_ms;
    uint64_t n_open_files; /* zerodrun's soft limit at its start */
    int interrupted;       /* the first of SIGINT, SIGTERM, SIGHUP, SIGQUIT received; 0: none */
    bool killing;          /* a second SIGINT was received */
    struct failure failure;
};

/* ---- run-say.c ----------------------------------------------------------------------------------------- */

/* Prints progress, except with --quiet. */
void run_note(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints an error. */
void run_complain(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints an error of zerodrun itself, and records it as the run's failure. */
void run_error(struct run *run, int exit_code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Prints "exited with 1" or the like. */
void run_describe_end(const struct process *process, char *text, size_t size);

/* ---- run-output.c -------------------------------------------------------------------------------------- */

/* Return: 0 or a negative errno. */
int run_init_outputs(struct run *run);
/*
 * Opens the --tee file of a rank or daemon. name: the file's name. Return: 0, or a negative errno after an error
 * message.
 */
int run_open_tee(struct run *run, struct tee *tee, const char *name);
bool run_is_drained(const struct run *run);
/*
 * Call it after an interruption. If no reader reads the output for a grace time, the output is dropped, because ranks
 * that wait for its reader cannot end.
 */
void run_watch_output(struct run *run);

/* ---- run-ranks.c --------------------------------------------------------------------------------------- */

/* Return: 0 or a negative errno. */
int run_init_ranks(struct run *run);
/* Return: 0, or a negative errno after an error message. */
int run_open_tees_of_ranks(struct run *run);
void run_start_ranks(struct run *run);

/* ---- run-daemons.c ------------------------------------------------------------------------------------- */

void run_init_daemons(struct run *run);
/* Starts the daemon. Return: 0, also if another daemon answers on the socket; or a negative errno after an error
 * message. */
int run_begin_daemon(struct run_daemon *daemon);
/* Return: the first running daemon that does not accept connections yet, or NULL. */
const struct run_daemon *run_find_silent(const struct run *run);
/* Stops all daemons. A daemon that dies while it stops is restarted if its state is kept. */
void run_stop_daemon(struct run *run);
void run_kill_daemons(struct run *run);
void run_close_keepers(struct run *run);

/* ---- run-end.c ----------------------------------------------------------------------------------------- */

/* Sends SIGTERM to the running ranks, and starts no more ranks. */
void run_end_ranks(struct run *run);
void run_kill(struct run *run);
/* Callback of run->grace: kills the run. */
void run_grace_over(uv_timer_t *timer);
/* Call it when all processes have ended. */
void run_finish(struct run *run);
/* Ends the loop if all output is written. */
void run_check_flushed(struct run *run);

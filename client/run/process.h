/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A rank or daemon that zerodrun has started, with its output. The process leads its own session, so a terminal's
 * Ctrl-C reaches only zerodrun, which forwards the signal. The process dies with zerodrun (PR_SET_PDEATHSIG). After its
 * end zerodrun kills the remaining processes of its group.
 *
 * After process_start(), on_end() is called exactly once, when the process has ended and all its output is read. If a
 * process outside the group still holds the output open, on_end() is called PROCESS_LINGER_MS after the end. After
 * on_end() the process may be started again.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h has a MIN of its own */

#include <uv.h>

#include "client/run/lines.h"
#include "client/run/output.h"
#include "client/run/repeats.h"

struct process;

enum {
    PROCESS_LINGER_MS = 1000,
    PROCESS_READ_BYTES = 16 * 1024,
    PROCESS_SETTLE_MS = 100,     /* a bar ends if the program, below it, pauses for this time */
    PROCESS_MESSAGE_BYTES = 256, /* picked: an error's first line is shorter */
};

struct process_spec {
    char **argv; /* argv[0] is looked up in PATH; process_start() alone uses argv, env, label, color, fds */
    char **env;
    const char *label; /* like "0"; in brackets before each line */
    const char *color; /* colour of the label, from output_rank_color() */
    int death_signal;  /* sent to the process when zerodrun dies */
    bool keep_stdin;   /* false: stdin is /dev/null */
    const int *fds;    /* the process inherits these n_fds as 3, 4, ..., with its own pid as LISTEN_PID */
    size_t n_fds;
    uint64_t n_open_files; /* soft limit of the process (RLIMIT_NOFILE); 0: zerodrun's */
    struct output *out, *err;
    struct repeats *out_repeats, *err_repeats; /* not owned; for out and err; equal if both are one file */
    struct sink *log;                          /* receives all lines of both streams without prefixes; or NULL */
    void (*on_exit)(struct process *process);  /* called at the process's end; on_end() follows at the output's end */
    void (*on_end)(struct process *process);
    void *owner;
};

struct process_stream {
    struct process *process;
    struct output_source sources[LINES_MAX_ROWS]; /* one per bar; the first one also for finished lines */
    uv_pipe_t pipe;
    struct lines lines;
    struct repeats_source repeats;       /* between the lines and the output */
    char message[PROCESS_MESSAGE_BYTES]; /* the last message */
    bool eof, paused;
    char data[PROCESS_READ_BYTES]; /* the read buffer */
};

struct process {
    struct process_spec spec;
    uv_process_t handle;
    uv_timer_t linger, settle;
    uv_timer_t release;               /* releases lines that may repeat another process's */
    struct process_stream streams[2]; /* stdout, stderr */
    char *argv_storage; /* owned */
    char **argv;        /* owned; the spawned command, with zerodrun as a wrapper */
    pid_t pid;          /* of the last start; also the process group */
    bool exited;
    int64_t exit_status;
    int term_signal;    /* 0: no signal ended the process */
    bool has_process;   /* the handle exists */
    unsigned n_handles; /* open handles; 0: the process may be started */
};

/* spec is copied. Return: 0 or a negative errno. After an error on_end() is not called, and the loop must run once more
 * before the process's memory is freed. */
int process_start(struct process *process, uv_loop_t *loop, const struct process_spec *spec);

static inline bool process_is_alive(const struct process *process)
{
    return process->n_handles > 0 && !process->exited;
}

/* Sends a signal to the process, but not to its group. Does nothing after the process's end. */
void process_signal(struct process *process, int signum);

/* Sends SIGKILL to the whole process group. */
void process_kill(struct process *process);

/* Continues to read output, which stops while a sink is full. */
void process_resume(struct process *process);

/* Return: the exit code as in a shell, which is the exit status, or 128 + signal. */
int process_exit_code(const struct process *process);

/* Return: the last line on standard error (else on standard output) that is not indented; "" if there is none. Indented
 * lines are details of the line before them. Torch's "[rank3]: " and control characters are removed; a long line is cut
 * and ends in "...". */
const char *process_last_message(const struct process *process);

/* The second half of process_start(), in the spawned wrapper. main() calls it first. It returns only if this process is
 * not a wrapper. Otherwise it executes the program, or exits with 126 or 127 as a shell does. */
void process_wrapper(int argc, char **argv);

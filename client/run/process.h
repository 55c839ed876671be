/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A process that zerodrun has started, a rank or a daemon, with its output. It leads a session of its own, so that a
 * terminal's Ctrl-C reaches only zerodrun, which passes it on once. It dies with zerodrun (PR_SET_PDEATHSIG), and
 * zerodrun ends what the process leaves behind in its process group.
 *
 * Life: process_start(), then exactly one on_end() when the process has ended and its output is read to the end, or
 * PROCESS_LINGER_MS after the end if another process that left the group still holds the output. After on_end() it may
 * be started again.
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
    PROCESS_SETTLE_MS = 100,     /* a bar whose program pauses for so long below it is at its end */
    PROCESS_MESSAGE_BYTES = 256, /* picked: an error's first line is shorter */
};

struct process_spec {
    char **argv; /* argv[0] is looked up in PATH; argv, env, label, color and fds are used during the start only */
    char **env;
    const char *label; /* "0": what its lines begin with, in brackets */
    const char *color; /* of the label, as output_rank_color() has it */
    int death_signal;  /* that it gets when zerodrun dies */
    bool keep_stdin;   /* else /dev/null */
    const int *fds;    /* n_fds: the process inherits them as 3, 4, ... and LISTEN_PID in its environment is its own */
    size_t n_fds;
    uint64_t n_open_files; /* its soft limit (RLIMIT_NOFILE); 0: zerodrun's */
    struct output *out, *err;
    struct repeats *out_repeats, *err_repeats; /* not owned: texts in the file that out and err write; may be one */
    struct sink *log;                          /* gets all of both, without prefixes; or NULL */
    void (*on_exit)(struct process *process); /* it has ended, its output perhaps not: on_end() comes later */
    void (*on_end)(struct process *process);
    void *owner;
};

struct process_stream {
    struct process *process;
    struct output_source sources[LINES_MAX_ROWS]; /* a bar each; the first has the finished lines, too */
    uv_pipe_t pipe;
    struct lines lines;
    struct repeats_source repeats;       /* between the lines and the output */
    char message[PROCESS_MESSAGE_BYTES]; /* the last one */
    bool eof, paused;
    char data[PROCESS_READ_BYTES]; /* what is being read */
};

struct process {
    struct process_spec spec;
    uv_process_t handle;
    uv_timer_t linger, settle;
    uv_timer_t release;               /* of lines that may repeat another process's */
    struct process_stream streams[2]; /* stdout, stderr */
    char *argv_storage; /* owned */
    char **argv;        /* owned; what is spawned: zerodrun itself as a wrapper */
    pid_t pid;          /* of the last start; leads the process group */
    bool exited;
    int64_t exit_status;
    int term_signal;    /* 0: it exited by itself */
    bool has_process;   /* the handle exists */
    unsigned n_handles; /* still open; 0: may be started */
};

/* spec is copied. Return: 0; or a negative errno: on_end() is not called, and the loop must run once more before the
 * memory of the process is freed. */
int process_start(struct process *process, uv_loop_t *loop, const struct process_spec *spec);

static inline bool process_is_alive(const struct process *process)
{
    return process->n_handles > 0 && !process->exited;
}

/* Signals the process alone, not its helpers; does nothing when it has ended. */
void process_signal(struct process *process, int signum);

/* Sends SIGKILL to all of its process group. */
void process_kill(struct process *process);

/* Continues to read output that waited for a full sink. */
void process_resume(struct process *process);

/* As a shell counts: exit status, or 128 + signal. */
int process_exit_code(const struct process *process);

/* The last line on standard error, else on standard output, that is not indented: indented lines are details of the
 * line before them. Without torch's "[rank3]: " and control characters; a long one is cut, and ends in "...". Return:
 * "" when there is none. */
const char *process_last_message(const struct process *process);

/* The other half of process_start(), called first in main(): in a process that was started as a wrapper it does not
 * return but becomes the program, or exits with 126 or 127 as a shell does. */
void process_wrapper(int argc, char **argv);

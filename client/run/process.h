/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One process of ours with its output: a rank or the daemon. It leads a
 * session of its own, so that a terminal's Ctrl-C reaches only zerodrun, which passes it on once; it dies
 * with zerodrun (PR_SET_PDEATHSIG), and what it leaves behind in its process group is ended after it.
 *
 * Life: child_start(), then exactly one on_end() when the process has ended and
 * its output is read to the end, or CHILD_LINGER_MS after the end when somebody who left the group
 * still holds the output. From then on it may be started again.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h has a MIN of its own */

#include <uv.h>

#include "client/run/lines.h"

struct sink;
struct child;

enum {
    CHILD_LINGER_MS = 1000,
    CHILD_READ_BYTES = 16 * 1024,
};

struct child_spec {
    char **argv; /* argv[0] is looked up in PATH; argv, env and label are used during the start only */
    char **env;
    const char *label; /* "0": what its lines begin with, in brackets */
    int death_signal;  /* that it gets when zerodrun dies */
    bool keep_stdin;   /* else /dev/null */
    struct sink *out, *err;
    void (*on_end)(struct child *child);
    void *owner;
};

struct child_stream {
    struct child *child;
    struct sink *sink;
    uv_pipe_t pipe;
    struct lines lines;
    bool eof, paused;
    char data[CHILD_READ_BYTES]; /* what is being read */
};

struct child {
    struct child_spec spec;
    uv_process_t process;
    uv_timer_t linger;
    struct child_stream streams[2]; /* stdout, stderr */
    char prefix[32];
    char *argv_storage; /* owned */
    char **argv;        /* owned; what is spawned: zerodrun itself as a wrapper */
    pid_t pid;          /* of the last start; leads the process group */
    bool exited;
    int64_t exit_status;
    int term_signal;    /* 0: it exited by itself */
    bool has_process;   /* the handle exists */
    unsigned n_handles; /* still open; 0: may be started */
};

/*
 * spec is copied. Return: 0 or a negative errno; on_end is then not called, and the loop must run once
 * more before the child's memory goes away.
 */
int child_start(struct child *child, uv_loop_t *loop, const struct child_spec *spec);

static inline bool child_is_alive(const struct child *child)
{
    return child->n_handles > 0 && !child->exited;
}

/* To the process alone: its helpers are its own business. Nothing happens when it has ended. */
void child_signal(struct child *child, int signum);
/* SIGKILL for all of its process group. */
void child_kill(struct child *child);

/* Reads on where a full sink has stopped it. */
void child_resume(struct child *child);

/* As a shell counts: exit status, or 128 + signal. */
int child_exit_code(const struct child *child);

/*
 * The other half of child_start(), called first in main(): in a process that was started as a wrapper this
 * does not return but becomes the program, or exits 126 or 127 as a shell would.
 */
void child_wrapper(int argc, char **argv);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* zerodrun's command line as a plain struct. Strings are those of argv. */

#include <stdbool.h>
#include <stdint.h>

#include "client/run/output.h"

enum {
    OPTIONS_DONE = 1,             /* --help, --version: nothing more to do */
    OPTIONS_DEFAULT_GRACE_S = 30, /* as torchrun */
    OPTIONS_MAX_JOBS = 8,
    OPTIONS_DEFAULT_DAEMON_RESTARTS = 3,
};

struct run_options {
    unsigned n_ranks;                                    /* on this node; 0: as the configuration says, else 1 */
    unsigned n_jobs;                                     /* each with a daemon; at least 1 */
    const char *config_path;                             /* NULL: a small one is made */
    const char *more_config_paths[OPTIONS_MAX_JOBS - 1]; /* of the jobs behind the first; NULL: the first's */
    unsigned n_configs;
    const char *socket_path;    /* NULL: the configuration's, else ZEROD_SOCKET, else a private one */
    const char *zerod_path;     /* NULL: beside zerodrun, else in PATH */
    const char *run_id;         /* NULL: ZEROD_RUN_ID, else a random one */
    unsigned n_restarts;        /* of each rank */
    unsigned n_daemon_restarts; /* of each daemon, in 10 minutes; 0: nothing of a daemon is kept */
    uint64_t grace_ms;          /* between SIGTERM and SIGKILL */
    const char *tee_path;       /* of a folder for the output of each process; NULL: none */
    const char *nodes;          /* hosts with commas between them; NULL: as the configuration or Slurm says */
    unsigned n_nodes;           /* 0: likewise */
    int node_rank;              /* this one's number; -1: not given */
    unsigned nodes_port;        /* of the nodes' daemons; 0: the default */
    const char *key_path;       /* of those daemons; NULL: not given */
    const char *master_addr;    /* NULL: node 0's host, on one node 127.0.0.1 */
    unsigned master_port;       /* 0: on several nodes torchrun's, else a free one */
    enum output_color color;
    bool no_daemon, quiet;
    bool serve;     /* daemons without ranks */
    char **command; /* program and arguments, NULL at the end; empty with serve */
};

/* Return: 0, OPTIONS_DONE, or -EX_USAGE, then a sentence is on stderr. */
int options_parse(struct run_options *options, int argc, char **argv);

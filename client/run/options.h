/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* zerodrun's command line, parsed. Strings point into argv. */

#include <stdbool.h>
#include <stdint.h>

#include "client/run/output.h"

enum {
    OPTIONS_DONE = 1,             /* after --help or --version, the program ends */
    OPTIONS_DEFAULT_GRACE_S = 30, /* torchrun's default */
    OPTIONS_MAX_JOBS = 8,
    OPTIONS_DEFAULT_DAEMON_RESTARTS = 3,
};

struct run_options {
    unsigned n_ranks;                                    /* on this node; 0: as in the configuration, else 1 */
    unsigned n_jobs;                                     /* at least 1; each job has its own daemon */
    const char *config_path;                             /* NULL: zerodrun writes a small configuration */
    const char *more_config_paths[OPTIONS_MAX_JOBS - 1]; /* for later jobs; NULL: the first job's */
    unsigned n_configs;
    const char *socket_path;    /* NULL: the configuration's, else ZEROD_SOCKET, else a private one */
    const char *zerod_path;     /* NULL: beside zerodrun, else in PATH */
    const char *run_id;         /* NULL: ZEROD_RUN_ID, else a random one */
    unsigned n_restarts;        /* for each rank */
    unsigned n_daemon_restarts; /* for each daemon, in 10 minutes; 0: no keeper */
    uint64_t grace_ms;          /* between SIGTERM and SIGKILL */
    const char *tee_path;       /* folder for the output files of all processes; NULL: none */
    const char *nodes;          /* hosts, separated by commas; NULL: from the configuration or Slurm */
    unsigned n_nodes;           /* 0: from the configuration or Slurm */
    int node_rank;              /* the number of this node; -1: not given */
    unsigned nodes_port;        /* port of the nodes' daemons; 0: the default */
    const char *key_path;       /* key file of the nodes' daemons; NULL: not given */
    const char *master_addr;    /* NULL: the host of node 0; on one node 127.0.0.1 */
    unsigned master_port;       /* 0: on several nodes torchrun's port, else a free one */
    enum output_color color;
    bool no_daemon, quiet;
    bool serve;     /* start daemons without ranks */
    char **command; /* program and arguments, NULL at the end; empty with serve */
};

/* Return: 0, OPTIONS_DONE, or -EX_USAGE after an error message on stderr. */
int options_parse(struct run_options *options, int argc, char **argv);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The place of a run: its ranks, socket and run id. It may have a private directory, with a socket or a configuration
 * that zerodrun writes.
 */

#include <stdbool.h>

#include "client/run/node-list.h"
#include "client/run/options.h"

struct environment;

/* Keys that the configuration lacks (listen.socket, world.size). zerodrun passes them to the daemon as arguments. */
struct place_told {
    bool socket, ranks;
};

/* A job after the first job, with the same ranks. */
struct place_job {
    char *socket;
    const char *config_path; /* to start a daemon with; NULL: none */
    struct place_told told;
};

struct place {
    unsigned n_ranks; /* on this node */
    unsigned first_rank, world_size;
    unsigned node, n_nodes;
    struct nodes nodes; /* if the configuration lists none */
    char *socket;      /* NULL: none, with --no-daemon */
    char *config_path; /* for the start of a daemon; NULL: none */
    struct place_told told;
    char *directory;   /* private, removed at the end; NULL: none */
    bool made_config;  /* zerodrun wrote config_path into the directory */
    char *run_id;
    char *master_addr;
    unsigned master_port;
    unsigned n_jobs;
    struct place_job more[OPTIONS_MAX_JOBS - 1];
};

/* Return: 0; or -sysexits.h after an error message on stderr. The caller calls place_deinit() in any case. */
int place_init(struct place *place, const struct run_options *options);
void place_deinit(struct place *place);

/* Makes a private directory, whose path is short enough for the path of a socket (107 bytes). Return: the directory's
 * path, to be freed; or NULL after an error message on stderr. */
char *place_make_directory(void);

/* Sets the environment of rank number `local` of this node. Return: 0 or -ENOMEM. */
int place_describe(const struct place *place, unsigned local, struct environment *env);

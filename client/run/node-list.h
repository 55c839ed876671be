/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The nodes of a job whose configuration lists none: from the command line, or from Slurm. */

#include <stdbool.h>

struct run_options;

enum {
    NODES_DEFAULT_PORT = 7700,
};

/* {}: nothing says that there are several nodes. */
struct nodes {
    unsigned n;    /* 0, or at least 2 */
    unsigned node; /* this one */
    char **hosts;  /* n, owned; NULL with --no-daemon, if none were named */
    char *run_id;  /* the same one on all nodes, if Slurm has one; owned, or NULL */
    bool is_from_slurm;
};

/* Return: 0, or -sysexits.h; then a sentence is on stderr. nodes_deinit() in any case. */
int nodes_init(struct nodes *nodes, const struct run_options *options);
void nodes_deinit(struct nodes *nodes);

/*
 * Finds the key file of --key-file, which the daemons of several nodes share. *key_path: absolute, to be freed.
 * Return: 0, or -sysexits.h; then a sentence is on stderr.
 */
int nodes_find_key(const struct nodes *nodes, const struct run_options *options, char **key_path);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The nodes of a job whose configuration lists no nodes, from the command line or from Slurm. */

#include <stdbool.h>

struct run_options;

enum {
    NODES_DEFAULT_PORT = 7700,
};

/* All zero: neither the command line nor Slurm names several nodes. */
struct nodes {
    unsigned n;    /* 0, or at least 2 */
    unsigned node; /* the number of this node */
    char **hosts;  /* n hosts, owned; may be NULL with --no-daemon */
    char *run_id;  /* Slurm's run id, equal on all nodes; owned, or NULL */
    bool is_from_slurm;
};

/* Return: 0; or -sysexits.h after an error message on stderr. The caller calls nodes_deinit() in any case. */
int nodes_init(struct nodes *nodes, const struct run_options *options);
void nodes_deinit(struct nodes *nodes);

/*
 * Finds the file of --key-file, whose key the daemons of all nodes share. *key_path: absolute, to be freed. Return: 0;
 * or -sysexits.h after an error message on stderr.
 */
int nodes_find_key(const struct nodes *nodes, const struct run_options *options, char **key_path);

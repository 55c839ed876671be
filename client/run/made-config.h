/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The configuration that zerodrun writes for a daemon: a small new one, or a copy of a file without nodes, with the
 * nodes added. */

#include <stdbool.h>

struct nodes;

struct made_config {
    const char *path;          /* of the file to write */
    const char *base_path;     /* of the file to which the nodes are added; NULL: write a small configuration */
    const char *socket;        /* for a small configuration */
    unsigned n_ranks;          /* on each node */
    const struct nodes *nodes; /* no nodes if n is 0 */
    unsigned port;             /* of the daemons of all nodes; 0: the default */
    const char *key_path;      /* absolute; only with nodes */
    bool has_collective;       /* the base file has the key */
};

/* Return: 0; or -sysexits.h after an error message on stderr, and the file may exist. */
int made_config_write(const struct made_config *made);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The configuration that zerodrun writes for a daemon: a small one, or a file that lists no nodes with the nodes added.
 */

#include <stdbool.h>

struct nodes;

struct made_config {
    const char *path;          /* of the file to write */
    const char *base_path;     /* of the file to which the nodes are added; NULL: a small configuration */
    const char *socket;        /* of a small one */
    unsigned n_ranks;          /* on each node */
    const struct nodes *nodes; /* none with n == 0 */
    unsigned port;             /* of the nodes' daemons; 0: the default */
    const char *key_path;      /* absolute; with nodes */
    bool has_collective;       /* the base file names one */
};

/* Return: 0, or -sysexits.h; then a sentence is on stderr, and there may be a file. */
int made_config_write(const struct made_config *made);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The configuration that zerodrun writes for a daemon. It is a small new configuration, or a copy of the user's file
 * with the nodes added. */

#include <stdbool.h>

struct nodes;

struct made_config {
    const char *path;          /* path of the file to write */
    const char *base_path;     /* path of the file to copy and add nodes to; NULL: write a small configuration */
    const char *socket;        /* only for a small configuration */
    unsigned n_ranks;          /* ranks on each node */
    const struct nodes *nodes; /* no nodes if n is 0 */
    unsigned port;             /* port of all nodes' daemons; 0: the default */
    const char *key_path;      /* absolute path; only with nodes */
    bool has_collective;       /* the base file has the key "collective" */
};

/* Return: 0; or -sysexits.h after an error message on stderr; then the file may exist. */
int made_config_write(const struct made_config *made);

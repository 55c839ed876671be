/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The nodes of a Slurm step, read from the variables that srun sets. */

#include <stdbool.h>
#include <stdio.h>

struct slurm_step {
    unsigned n_nodes;
    unsigned node;         /* the number of this node */
    const char *node_list; /* may have ranges: node[1-4] */
    const char *job_id, *id;
};

/*
 * Has srun started zerodrun as the only task of this node, on several nodes? Only the step's variables count, because a
 * batch script also has the job's variables and runs on one node.
 */
bool slurm_find_step(struct slurm_step *step);

/* Reads the output of scontrol, one host per line, to its end. *hosts: the hosts with commas between them, to be freed;
 * or NULL. Return: 0, or -1 if there is no host or too many for a job. */
int slurm_read_hosts(FILE *file, char **hosts);

/* Lists the hosts of the step with commas between them; *hosts is to be freed. Return: 0; or -sysexits.h after a
 * sentence on stderr. */
int slurm_list_hosts(const struct slurm_step *step, char **hosts);

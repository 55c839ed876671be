/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The nodes of a Slurm step, read from the variables that srun sets. */

#include <stdbool.h>
#include <stdio.h>

struct slurm_step {
    unsigned n_nodes;
    unsigned node;         /* this one */
    const char *node_list; /* may have ranges, node[1-4] */
    const char *job_id, *id;
};

/*
 * Has srun started zerodrun as the only task of this node, on more than one node? Only the variables of the step count:
 * a batch script has those of the job, too, and runs on one node.
 */
bool slurm_find_step(struct slurm_step *step);

/* Reads the output of scontrol, a host a line, to its end. *hosts: them between commas, to be freed; or NULL. Return:
 * 0; -1: there is no host, or there are too many for a job. */
int slurm_read_hosts(FILE *file, char **hosts);

/* The hosts of the step, between commas, to be freed. Return: 0, or -sysexits.h; then a sentence is on stderr. */
int slurm_list_hosts(const struct slurm_step *step, char **hosts);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The nodes of a Slurm step, read from the variables that srun sets. */

#include <stdbool.h>
#include <stdio.h>

struct slurm_step {
    unsigned n_nodes;
    unsigned node;         /* the number of this node */
    const char *node_list; /* may have ranges, such as node[1-4] */
    const char *job_id, *id;
};

/*
 * Return: true if srun has started one zerodrun on each of several nodes. Reads only variables of a step, because a
 * batch script, which runs on one node, has the job's variables too.
 */
bool slurm_find_step(struct slurm_step *step);

/* Reads all output of scontrol, which has one host per line. *hosts: the hosts, separated by commas, to be freed; or
 * NULL. Return: 0, or -1 if there is no host or too many for a job. */
int slurm_read_hosts(FILE *file, char **hosts);

/* Lists the hosts of the step, separated by commas. The caller frees *hosts. Return: 0; or -sysexits.h after an error
 * message on stderr. */
int slurm_list_hosts(const struct slurm_step *step, char **hosts);

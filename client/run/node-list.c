/* SPDX-License-Identifier: Apache-2.0 */

/* Finds the nodes of a job from --nodes, --nnodes and --node-rank, or from Slurm. */

#include "client/run/node-list.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "client/run/options.h"
#include "client/run/plain.h"
#include "client/run/slurm.h"
#include "core/base/base.h"
#include "core/config/config.h"

enum { HOST_BYTES = 255 }; /* the configuration's limit in world.nodes */

/* Return: true if the host has only characters of DNS names and addresses. */
static bool is_host(const char *host, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        if (!isalnum((unsigned char)host[i]) && !strchr("-._:[]%", host[i]))
            return false;
    return n_bytes > 0 && n_bytes <= HOST_BYTES;
}

/* Splits a list of hosts at commas. Return: 0, or -sysexits.h. */
static int nodes_split(struct nodes *nodes, const char *list)
{
    const char *host = list;
    char said[256];
    size_t n_bytes;

    nodes->hosts = calloc(CONFIG_MAX_NODES, sizeof(*nodes->hosts));
    if (!nodes->hosts)
        return -EX_OSERR;
    for (nodes->n = 0;; host += n_bytes + 1) {
        n_bytes = strcspn(host, ",");
        if (!is_host(host, n_bytes) || nodes->n == CONFIG_MAX_NODES) {
            plain_text(said, sizeof(said), list, strlen(list));
            fprintf(stderr,
                    "zerodrun: nodes '%s': expected 1 to %d hosts (names or addresses) with commas between them\n",
                    said, CONFIG_MAX_NODES);
            return -EX_USAGE;
        }
        nodes->hosts[nodes->n] = strndup(host, n_bytes);
        if (!nodes->hosts[nodes->n])
            return -EX_OSERR;
        nodes->n++;
        if (!host[n_bytes])
            return 0;
    }
}

/* ---- Slurm --------------------------------------------------------------------------------------------- */

static int nodes_take_run_id(struct nodes *nodes, const struct slurm_step *step)
{
    if (asprintf(&nodes->run_id, "slurm-%s.%s", step->job_id, step->id) >= 0)
        return 0;
    nodes->run_id = NULL;
    return -EX_OSERR;
}

static int nodes_from_slurm(struct nodes *nodes, const struct slurm_step *step)
{
    _cleanup_free_ char *hosts = NULL;
    int r = slurm_list_hosts(step, &hosts);

    if (r == 0)
        r = nodes_split(nodes, hosts);
    if (r < 0)
        return r;
    if (nodes->n != step->n_nodes || step->node >= step->n_nodes) {
        fprintf(stderr, "zerodrun: Slurm says that this is node %u of %u, and its list of nodes is %s\n", step->node,
                step->n_nodes, hosts);
        return -EX_CONFIG;
    }
    nodes->node = step->node;
    nodes->is_from_slurm = true;
    return nodes_take_run_id(nodes, step);
}

/* ---- the command line ---------------------------------------------------------------------------------- */

static int nodes_count(struct nodes *nodes, const struct run_options *options)
{
    int r = options->nodes ? nodes_split(nodes, options->nodes) : 0;

    if (r < 0)
        return r;
    if (!options->nodes) {
        nodes->n = options->n_nodes;
    } else if (options->n_nodes > 0 && options->n_nodes != nodes->n) {
        fprintf(stderr, "zerodrun: --nnodes %u, but --nodes has %u host%s\n", options->n_nodes, nodes->n,
                nodes->n == 1 ? "" : "s");
        return -EX_USAGE;
    }
    if (options->node_rank < (int)nodes->n)
        return 0;
    fprintf(stderr, "zerodrun: --node-rank %d, but the nodes are numbered from 0 to %u\n", options->node_rank,
            nodes->n - 1);
    return -EX_USAGE;
}

/* Finds the number of this node. Without --node-rank it is Slurm's, because srun may start zerodrun with --nodes. */
static int nodes_choose_own(struct nodes *nodes, const struct run_options *options)
{
    struct slurm_step step;
    bool is_step = slurm_find_step(&step) && step.n_nodes == nodes->n;

    if (options->node_rank >= 0)
        nodes->node = (unsigned)options->node_rank;
    else if (is_step)
        nodes->node = step.node;
    else {
        fprintf(stderr, "zerodrun: %u nodes: --node-rank is missing, the number of this node from 0 to %u\n", nodes->n,
                nodes->n - 1);
        return -EX_USAGE;
    }
    return is_step ? nodes_take_run_id(nodes, &step) : 0;
}

static int nodes_from_options(struct nodes *nodes, const struct run_options *options)
{
    int r = nodes_count(nodes, options);

    if (r < 0)
        return r;
    if (nodes->n > 1 && !nodes->hosts && !options->no_daemon)
        fprintf(
            stderr,
            "zerodrun: --nnodes %u: --nodes HOST0,HOST1,... is missing, because each node's daemon uses the address "
            "of its own node; --master-addr names only node 0's\n",
            nodes->n);
    else if (nodes->n > 1 && !nodes->hosts && !options->master_addr)
        fprintf(stderr, "zerodrun: --nnodes %u: --master-addr is missing, the host of rank 0\n", nodes->n);
    else
        return nodes->n > 1 ? nodes_choose_own(nodes, options) : 0;
    return -EX_USAGE;
}

int nodes_init(struct nodes *nodes, const struct run_options *options)
{
    struct slurm_step step;
    int r = 0;

    *nodes = (struct nodes){};
    if (options->nodes || options->n_nodes > 0)
        r = nodes_from_options(nodes, options);
    else if (slurm_find_step(&step))
        r = nodes_from_slurm(nodes, &step);
    else if (options->key_path || options->nodes_port > 0) {
        fprintf(stderr,
                "zerodrun: --key-file and --nodes-port are for several nodes: expected --nodes HOST0,HOST1,... and "
                "--node-rank, or that srun starts one zerodrun on each of several nodes\n");
        return -EX_USAGE;
    }
    if (r == 0 && nodes->n == 1)
        nodes_deinit(nodes);
    return r;
}

void nodes_deinit(struct nodes *nodes)
{
    for (unsigned i = 0; nodes->hosts && i < nodes->n; i++)
        free(nodes->hosts[i]);
    free(nodes->hosts);
    free(nodes->run_id);
    *nodes = (struct nodes){};
}

int nodes_find_key(const struct nodes *nodes, const struct run_options *options, char **key_path)
{
    *key_path = NULL;
    if (!options->key_path) {
        fprintf(stderr,
                "zerodrun: %u nodes%s: --key-file is missing, the file with the key that the nodes' daemons share%s\n",
                nodes->n, nodes->is_from_slurm ? ", as Slurm says" : "",
                nodes->is_from_slurm ? "; --nnodes 1 makes a job of each node" : "");
        return -EX_USAGE;
    }
    *key_path = realpath(options->key_path, NULL);
    if (*key_path)
        return 0;
    fprintf(stderr, "zerodrun: --key-file %s: %s\n", options->key_path, strerror(errno));
    return -EX_NOINPUT;
}

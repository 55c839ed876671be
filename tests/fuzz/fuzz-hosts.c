/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Slurm's variables, and scontrol's output for a node list. zerodrun must accept as many nodes as Slurm counts. The
 * nodes that the configuration accepts must have the same names in the configuration that zerodrun writes.
 *
 * An input is six texts, each ended by a NUL: SLURM_STEP_NUM_NODES, _NUM_TASKS, SLURM_NODEID, SLURM_STEP_NODELIST
 * (hosts between commas), SLURM_JOB_ID, SLURM_STEP_ID. Then comes the output of scontrol.
 */

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/run/made-config.h"
#include "client/run/node-list.h"
#include "client/run/options.h"
#include "client/run/slurm.h"
#include "core/base/base.h"
#include "core/config/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { N_TEXTS = 6, MAX_BYTES = 1 << 17 };

static const char *const names[N_TEXTS] = {"SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID",
                                           "SLURM_STEP_NODELIST",  "SLURM_JOB_ID",         "SLURM_STEP_ID"};

/* Return: the list of nodes in scontrol's output, or NULL. */
static char *read_hosts(const char *text, size_t n_bytes)
{
    FILE *file = fmemopen((void *)text, n_bytes, "r");
    char *hosts = NULL;
    int r = file ? slurm_read_hosts(file, &hosts) : -1;

    assert(r == 0 ? hosts && *hosts && !strchr(hosts, '\n') : !hosts);
    if (file)
        fclose(file);
    return hosts;
}

static void check_address(const char *address, const char *host)
{
    const char *colon = strrchr(address, ':');
    size_t n = (size_t)(colon - address), n_host = strlen(host);

    if (n == n_host + 2) { /* an IPv6 address, in brackets */
        address++;
        n -= 2;
    }
    assert(colon && n == n_host && memcmp(address, host, n) == 0);
}

static void check_config(const struct nodes *nodes)
{
    static char path[64];
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config = NULL;
    struct made_config made = {
        .path = path, .socket = "/tmp/fuzz.sock", .n_ranks = 1, .nodes = nodes, .key_path = "/dev/null"};

    snprintf(path, sizeof(path), "/tmp/zerod-fuzz-hosts-%d.yaml", (int)getpid());
    if (made_config_write(&made) == 0 && config_load(&config, path, NULL, &problems) == 0) {
        assert(config->world.nodes.n_items == nodes->n);
        for (unsigned i = 0; i < nodes->n; i++)
            check_address(config->world.nodes.items[i].address, nodes->hosts[i]);
    }
    config_free(config);
    config_problems_deinit(&problems);
    (void)unlink(path);
}

static void take(void)
{
    struct run_options options = {.n_jobs = 1, .node_rank = -1};
    struct slurm_step step;
    struct nodes nodes;

    if (slurm_find_step(&step))
        assert(step.n_nodes > 1);
    if (nodes_init(&nodes, &options) == 0 && nodes.n > 0) {
        assert(nodes.is_from_slurm && nodes.n == step.n_nodes && nodes.node < nodes.n && nodes.run_id);
        check_config(&nodes);
    }
    nodes_deinit(&nodes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    _cleanup_free_ char *text = malloc(size + 1), *hosts = NULL;
    static FILE *nowhere;
    size_t at = 0;

    if (!nowhere)
        stderr = nowhere = fopen("/dev/null", "we"); /* hides zerodrun's messages */
    if (!text || size > MAX_BYTES)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    for (unsigned i = 0; i < N_TEXTS; i++) {
        /* A list with ranges would start scontrol. */
        if (i == 3 && strchr(text + at, '['))
            unsetenv(names[i]);
        else
            setenv(names[i], text + at, 1);
        at = MIN(at + strlen(text + at) + 1, size);
    }
    take();
    hosts = read_hosts(text + at, size - at);
    if (hosts) {
        setenv(names[3], hosts, 1);
        if (!strchr(hosts, '['))
            take();
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */

/* The nodes of a step of Slurm, from srun's variables. */

#include "client/run/slurm.h"

#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include "core/base/base.h"

DEFINE_CLEANUP(FILE *, fclose);

/* Return: is the variable a whole number? */
static bool get_number(const char *name, unsigned *value)
{
    const char *text = getenv(name);
    char *end;

    if (!text || *text < '0' || *text > '9')
        return false;
    *value = (unsigned)strtoul(text, &end, 10);
    return !*end;
}

bool slurm_find_step(struct slurm_step *step)
{
    unsigned n_tasks;

    *step = (struct slurm_step){
        .node_list = getenv("SLURM_STEP_NODELIST"), .job_id = getenv("SLURM_JOB_ID"), .id = getenv("SLURM_STEP_ID")};
    return step->node_list && step->job_id && step->id && get_number("SLURM_STEP_NUM_NODES", &step->n_nodes) &&
           get_number("SLURM_STEP_NUM_TASKS", &n_tasks) && get_number("SLURM_NODEID", &step->node) &&
           step->n_nodes > 1 && n_tasks == step->n_nodes;
}

/* Return: its output, the caller's; or NULL. */
static FILE *start_scontrol(const char *node_list, pid_t *pid)
{
    char *argv[] = {(char *)"scontrol", (char *)"show", (char *)"hostnames", (char *)node_list, NULL};
    posix_spawn_file_actions_t actions;
    int fds[2], r;

    if (pipe2(fds, O_CLOEXEC) < 0)
        return NULL;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
    r = posix_spawnp(pid, argv[0], &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    if (r == 0)
        return fdopen(fds[0], "r");
    close(fds[0]);
    return NULL;
}

/* One host a line becomes one between commas. Return: 0, or -1. */
static int ask_scontrol(const char *node_list, char **hosts)
{
    pid_t pid = 0;
    _cleanup_(fclosep) FILE *file = start_scontrol(node_list, &pid);
    ssize_t n = -1;
    size_t size = 0;
    int status;

    if (file)
        n = getdelim(hosts, &size, '\0', file);
    if (!file || waitpid(pid, &status, 0) < 0 || status != 0 || n <= 1)
        return -1;
    if ((*hosts)[n - 1] == '\n')
        (*hosts)[n - 1] = '\0';
    for (char *end = strchr(*hosts, '\n'); end; end = strchr(end, '\n'))
        *end = ',';
    return 0;
}

int slurm_list_hosts(const struct slurm_step *step, char **hosts)
{
    *hosts = NULL;
    if (!strchr(step->node_list, '[')) {
        *hosts = strdup(step->node_list);
        return *hosts ? 0 : -EX_OSERR;
    }
    if (ask_scontrol(step->node_list, hosts) == 0)
        return 0;
    free(steal_ptr(*hosts));
    fprintf(
        stderr,
        "zerodrun: \"scontrol show hostnames %s\" fails here, so the hosts of the step are not known: give them with "
        "--nodes HOST0,HOST1,...\n",
        step->node_list);
    return -EX_CONFIG;
}

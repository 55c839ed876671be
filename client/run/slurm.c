/* SPDX-License-Identifier: Apache-2.0 */

/* Finds the nodes of a Slurm step from srun's variables. */

#include "client/run/slurm.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include "client/run/plain.h"
#include "core/base/base.h"

enum { HOSTS_BYTES = 1 << 20 }; /* picked: room for far more than CONFIG_MAX_NODES names */

DEFINE_CLEANUP(FILE *, fclose);

/* Sets *value to the variable's. Return: true if the variable is a whole number. */
static bool get_number(const char *name, unsigned *value)
{
    const char *text = getenv(name);
    unsigned long number;
    char *end;

    if (!text || *text < '0' || *text > '9')
        return false;
    errno = 0;
    number = strtoul(text, &end, 10);
    *value = (unsigned)number;
    return !*end && errno == 0 && number <= UINT_MAX;
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

/* Return: the output of scontrol, which the caller closes; or NULL. */
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

/*
 * Reads the output to its end, because scontrol must not wait for room in the pipe. Return: the number of bytes; or -1
 * if the output is too long, or on an error.
 */
static ssize_t read_output(FILE *file, char *text)
{
    size_t n = fread(text, 1, HOSTS_BYTES, file);

    while (getc(file) != EOF)
        n = HOSTS_BYTES;
    return ferror(file) || n == HOSTS_BYTES ? -1 : (ssize_t)n;
}

int slurm_read_hosts(FILE *file, char **hosts)
{
    ssize_t n;

    *hosts = malloc(HOSTS_BYTES);
    n = *hosts ? read_output(file, *hosts) : -1;
    if (n > 0 && (*hosts)[n - 1] == '\n')
        n--;
    if (n <= 0 || memchr(*hosts, '\0', (size_t)n)) {
        free(steal_ptr(*hosts));
        return -1;
    }
    (*hosts)[n] = '\0';
    for (char *end = strchr(*hosts, '\n'); end; end = strchr(end, '\n'))
        *end = ',';
    return 0;
}

static int ask_scontrol(const char *node_list, char **hosts)
{
    pid_t pid = 0;
    _cleanup_(fclosep) FILE *file = start_scontrol(node_list, &pid);
    int status, r = file ? slurm_read_hosts(file, hosts) : -1;

    return file && waitpid(pid, &status, 0) >= 0 && status == 0 ? r : -1;
}

int slurm_list_hosts(const struct slurm_step *step, char **hosts)
{
    char said[256];

    *hosts = NULL;
    if (!strchr(step->node_list, '[')) {
        *hosts = strdup(step->node_list);
        return *hosts ? 0 : -EX_OSERR;
    }
    if (ask_scontrol(step->node_list, hosts) == 0)
        return 0;
    free(steal_ptr(*hosts));
    plain_text(said, sizeof(said), step->node_list, strlen(step->node_list));
    fprintf(
        stderr,
        "zerodrun: \"scontrol show hostnames %s\" fails here, so the hosts of the step are not known: give them with "
        "--nodes HOST0,HOST1,...\n",
        said);
    return -EX_CONFIG;
}

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The main program of a folder's tests. test-core-base runs all groups of tests/core/base, each in a process of its
 * own, so that no group sees what another left behind. "test-core-base json" runs only test-json.c. A group is a file
 * with a TEST_GROUP (group.h). meson.build lists the groups: -DGROUPS="GROUP(json) GROUP(log)".
 */

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/base.h"

#define GROUP(name) int test_group_##name(void);
GROUPS
#undef GROUP

#define GROUP(name) {#name, test_group_##name},
static const struct {
    const char *name;
    int (*run)(void);
} groups[] = {GROUPS};
#undef GROUP

static bool is_asked_for(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return argc == 1;
}

/* Runs group i. Return: whether all its tests passed. */
static bool run(size_t i)
{
    int status = -1;
    pid_t pid;

    printf("== %s\n", groups[i].name);
    fflush(stdout);
    pid = fork();
    if (pid == 0)
        exit(groups[i].run() ? 1 : 0);
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        perror(groups[i].name);
    else if (WIFSIGNALED(status))
        printf("[  FAILED  ] %s: %s\n", groups[i].name, strsignal(WTERMSIG(status)));
    return status == 0;
}

int main(int argc, char **argv)
{
    bool passed = true, ran = false;

    for (size_t i = 0; i < ARRAY_SIZE(groups); i++)
        if (is_asked_for(groups[i].name, argc, argv)) {
            passed = run(i) && passed;
            ran = true;
        }
    return passed && ran ? 0 : 1;
}

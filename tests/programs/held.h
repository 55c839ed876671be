/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Counts the system resources of a process, for tests with cmocka that check for leaks. */

#include <dirent.h>
#include <stdio.h>
#include <string.h>

/* Return: the number of open descriptors plus a constant. */
static inline size_t count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    size_t n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* Return: the number of this process's mappings whose line in /proc/self/maps contains the text. */
static inline unsigned count_maps(const char *text)
{
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512];
    unsigned n = 0;

    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        n += strstr(line, text) != NULL;
    fclose(file);
    return n;
}

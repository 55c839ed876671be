/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What zerod --check finds wrong beside the file: on the machine, for the user whom the daemon will have. */

#include <stdbool.h>

struct config;

/*
 * Root checks a file of the unit, /etc/zerod/JOB.yaml, as the unit's user would: the process is his from now on. user:
 * another one, or NULL. Return: his name; "": nobody's, this process keeps its own; NULL, after a sentence: he cannot
 * be had.
 */
const char *check_become(const char *user, const char *path);
/* Says each thing that is wrong on stderr. Return: whether nothing is. */
bool check_places(const struct config *config);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The checks of zerod --check that need more than the configuration file. They check the machine as the daemon's user.
 */

#include <stdbool.h>

struct config;

/*
 * Changes the user of this process for good. user: the new user. If user is NULL and root checks a file of the unit,
 * /etc/zerod/JOB.yaml, the new user is the unit's user. Return: the new user's name, or "" if the process keeps its
 * user, or NULL after a message on stderr if the user cannot be changed.
 */
const char *check_become(const char *user, const char *path);
/* Prints each problem on stderr. Return: true if there is no problem. */
bool check_places(const struct config *config);

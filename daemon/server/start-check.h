/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The checks of zerod --check beyond the file: of the machine, as the user of the daemon. */

#include <stdbool.h>

struct config;

/*
 * Changes the user of this process for good. user: the new user; NULL: if root checks a file of the unit,
 * /etc/zerod/JOB.yaml, the unit's user. Return: the user's name; "" if the process keeps its user; NULL, after a
 * message on stderr, if the user cannot be changed.
 */
const char *check_become(const char *user, const char *path);
/* Prints each problem on stderr. Return: true if there is none. */
bool check_places(const struct config *config);

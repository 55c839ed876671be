/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Checks whether a daemon answers on a socket. zerodrun starts no daemon on another user's socket or in systemd's
 * folder, because the daemon of that user could then not start again.
 */

#include <stdbool.h>

/* Return: true if a daemon accepts connections on the socket; false also if path is NULL. */
bool answers_now(const char *path);

/* Checks for a daemon before the run starts. may_start: zerodrun is to start a daemon if none answers. Return: 1 if a
 * daemon answers; 0 if none answers, and zerodrun may start one; or -sysexits.h after an error message. */
int answers_or_refuses(const char *path, bool may_start);

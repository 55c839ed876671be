/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Asks whether a daemon answers on a socket. zerodrun starts no daemon where another user's daemon runs or will run,
 * because that user could not start his own again.
 */

#include <stdbool.h>

/* Does a daemon accept connections on the socket? Return: false if path is NULL. */
bool answers_now(const char *path);

/* Asks for a daemon before a start. may_start: zerodrun starts one if no daemon answers. Return: 1 if a daemon answers;
 * 0 if no daemon answers, and zerodrun may start one if may_start is set; or -sysexits.h after an error message. */
int answers_or_refuses(const char *path, bool may_start);

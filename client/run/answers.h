/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Is a daemon there? Where one of another user may be, or is about to be, zerodrun starts none: that user could not
 * start his own again.
 */

#include <stdbool.h>

/* Does a daemon accept connections on the socket? path: NULL: there is no socket, so none does. */
bool answers_now(const char *path);

/* may_start: if no daemon answers, one is to be started there. Return: 1: a daemon answers; 0: none does, and one may
 * be started, if it is to be; or -sysexits.h after a sentence. */
int answers_or_refuses(const char *path, bool may_start);

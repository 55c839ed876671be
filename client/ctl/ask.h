/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* For all commands of zerodctl: asks the daemon one question, reports errors, and flushes the output. */

#include <stdbool.h>

struct json_object;

/* Prints the sentence on stderr. Return: code. */
int ctl_fail(const char *sentence, int code);

/* Return: 0; or EX_IOERR after an error message if the output could not be written. */
int ctl_flush(void);

/*
 * Connects, asks and disconnects. If print is set, the unchanged answer is printed on stdout. Return: 0, and the caller
 * frees *answer; or a code of sysexits.h after an error message.
 */
int ctl_ask(const char *socket, const char *command, bool print, struct json_object **answer);

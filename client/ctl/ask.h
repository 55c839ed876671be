/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* For all commands of zerodctl: asking the daemon one question, saying errors, and flushing the output. */

#include <stdbool.h>

struct json_object;

/* Says the sentence on stderr. Return: code. */
int ctl_fail(const char *sentence, int code);

/* Return: 0, or EX_IOERR after a sentence: the output could not be written. */
int ctl_flush(void);

/*
 * Connects, asks and disconnects. print: the answer goes to stdout as it came. Return: 0 and *answer, the caller's; or
 * a code of sysexits.h after a sentence.
 */
int ctl_ask(const char *socket, const char *command, bool print, struct json_object **answer);

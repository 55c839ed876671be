/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Asks a daemon to change the number of ranks, for zerodctl resize and zerodrun. */

struct json_object;

/*
 * While the daemon writes a checkpoint, this waits and prints that. prefix: of each line on stderr. Return: 0, or a
 * code of sysexits.h after an error message. *answer: the daemon's answer, which the caller frees; NULL if there is
 * none.
 */
int resize_ask(const char *prefix, const char *socket, unsigned n_ranks, struct json_object **answer);

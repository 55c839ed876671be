/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Asks a daemon to change the number of ranks, for zerodctl resize and zerodrun. */

struct json_object;

/*
 * Asks for the resize. While the daemon writes a checkpoint, the function reports that, and waits. prefix: begins each
 * line on stderr. Return: 0, or a code of sysexits.h after an error message. *answer: the daemon's answer, or NULL. The
 * caller frees it.
 */
int resize_ask(const char *prefix, const char *socket, unsigned n_ranks, struct json_object **answer);

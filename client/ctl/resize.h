/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Asks a daemon for another number of ranks: for zerodctl resize, and for zerodrun. */

struct json_object;

/*
 * While a checkpoint is being written it waits, and says so. prefix: of what it says on stderr. Return: 0, or a code of
 * sysexits.h after a sentence. *answer: the daemon's, the caller's; NULL: it gave none.
 */
int resize_ask(const char *prefix, const char *socket, unsigned n_ranks, struct json_object **answer);

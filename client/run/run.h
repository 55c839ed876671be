/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One run from start to end: the daemon if needed, ranks, signals, restarts, and the exit status. Everything runs on
 * one libuv loop.
 *
 *     RUN_STARTING    the daemon is starting; its socket is tried every 20 ms
 *     RUN_RUNNING     ranks run, or with --serve daemons alone; failed processes are restarted within their limits
 *     RUN_ENDING      a rank has failed for good: the others get SIGTERM, later SIGKILL
 *     RUN_STOPPING    no rank is left; the daemons get SIGINT, later SIGKILL
 *     RUN_FLUSHING    no process is left; output waits for its readers
 *
 * The states come in this order; some are skipped.
 */

struct place;
struct run_options;

/* Return: the exit status, 0 to 255. */
int run(const struct run_options *options, const struct place *place);

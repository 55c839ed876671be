/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One run from start to end. It starts the daemon if needed and the ranks, forwards signals, restarts processes, and
 * returns the exit status. Everything runs on one libuv loop.
 *
 *     RUN_STARTING    the daemon is starting; zerodrun tries to connect every 20 ms
 *     RUN_RUNNING     ranks run, or with --serve daemons alone; failed processes are restarted within their limits
 *     RUN_ENDING      a process has failed for good; the running ranks get SIGTERM, later SIGKILL
 *     RUN_STOPPING    all ranks have ended; the daemons get SIGINT, later SIGKILL
 *     RUN_FLUSHING    all processes have ended; output waits for its readers
 *
 * The states follow in this order; some are skipped.
 */

struct place;
struct run_options;

/* Return: the exit status, 0 to 255. */
int run(const struct run_options *options, const struct place *place);

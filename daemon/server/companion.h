/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * When a process that maps gigabytes is killed, the kernel first frees its page tables, which takes 40 to 60 ms for
 * each GiB. Only then the kernel closes the process's sockets and notifies its parent, so trainers and the service
 * manager would notice the death only after that time. The companion is a child process that shares the daemon's
 * address space and only waits. A dying daemon then leaves the address space without freeing it, which takes no time.
 * The companion ends after the last thread of the daemon. Then the kernel frees the page tables while the next daemon
 * already runs.
 *
 * The companion holds one descriptor, the daemon's pidfd, and blocks all signals except SIGKILL and SIGSTOP. If it is
 * killed, the daemon's death takes longer, and nothing else changes. ps shows it as zerod-memory and counts the
 * daemon's memory twice. systemd waits for the companion's end unless the unit sets KillMode=process.
 */

#include <stdatomic.h>
#include <stdint.h>

/*
 * Sets the place where the companion records the time of the daemon's end, in nanoseconds of CLOCK_MONOTONIC, because a
 * sleeping daemon records no heartbeat. NULL: nothing is recorded. The place must stay mapped until the next call.
 */
void companion_note_end(_Atomic(uint64_t) *place);
/* Starts the companion. Return: its pid, or -errno. */
int companion_start(void);
/*
 * Ends the companion and waits for its end. Call it when no other daemon will adopt the run. pid: the result of
 * companion_start().
 */
void companion_stop(int pid);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * When a process that maps gigabytes is killed, the kernel takes its page tables apart, 40 to 60 ms for each GiB. Only
 * then it closes the process's sockets and tells the parent, so trainers and the service manager would learn of the
 * death so much later. The companion is a child process that shares the daemon's address space and does nothing: the
 * dying daemon only leaves the address space, which takes no time. The companion ends when all threads of the daemon
 * have ended, and takes the address space apart while the next daemon goes on.
 *
 * It holds one descriptor, which tells it of the daemon's end, and blocks all signals but SIGKILL and SIGSTOP. If
 * somebody kills it, nothing changes but the time that the daemon's death takes. ps shows it as zerod-memory, with the
 * daemon's memory counted once more. systemd waits for it unless the unit says KillMode=process.
 */

#include <stdatomic.h>
#include <stdint.h>

/*
 * From now on the companion notes there when the daemon has ended, in nanoseconds of CLOCK_MONOTONIC: a daemon that
 * sleeps does not say that it lives. NULL: nowhere. The memory must be mapped until the next call.
 */
void companion_note_end(_Atomic(uint64_t) *place);
/* Return: its pid, or -errno: there is none. */
int companion_start(void);
/* It has ended when this returns. For a daemon that has nothing left to leave behind. pid: of companion_start(). */
void companion_stop(int pid);

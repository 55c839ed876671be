/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The watch of a rank: a thread with a connection of its own. The daemon asks it where the process is. It runs even if
 * the program hangs. The Python package starts it; a C program has none.
 *
 * The stack comes from a thread of Python, which can read it safely, but needs the interpreter lock. If code in C keeps
 * the lock for longer than a second, Python's faulthandler writes the stack without: as its handler of a signal that
 * nothing else uses, on the watch's own thread, so that no call of the program is interrupted. Nothing of Python runs
 * then, so nothing changes what faulthandler reads.
 */

#include <stdint.h>

#include "zerod/client.h"

struct watch;
struct zerod;

/* How Python says where it is. Of the process: all watches use the same, one at a time. _lib.Python has the same
 * fields. */
struct zerod_python {
    int asked;  /* SOCK_SEQPACKET: a number of 8 bytes is asked for, and answered with the number and a text */
    int dump;   /* a file into which faulthandler writes */
    int signal; /* to which faulthandler listens; 0: it does not */
    uint64_t main_thread; /* as faulthandler writes it */
    uint64_t own_thread;  /* that answers, and is left out */
};

/* After zerod_connect(). Return: 0 or negative: there is no watch, which is no error of the program's. */
ZEROD_API int zerod_watch(struct zerod *c, const struct zerod_python *python);

/* Return: a signal that the process neither handles nor ignores; 0: there is none. */
ZEROD_API int zerod_unused_signal(void);

/* NULL is fine. Not in a forked child, where the thread is not. */
void watch_stop(struct watch *watch);

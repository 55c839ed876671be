/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The watch of a rank: a thread with its own connection, over which the daemon asks for the stack of the process. It
 * runs even if the program hangs. The Python package starts it; a C program has none.
 *
 * A thread of Python reads the stack. That is safe, but needs the interpreter lock. If C code holds the lock for longer
 * than a second, Python's faulthandler writes the stack without the lock: as its handler of a signal that is otherwise
 * unused, on the watch's own thread, so that no call of the program is interrupted. Python does not run then, so
 * nothing changes the data that faulthandler reads.
 */

#include <stdint.h>

#include "zerod/client.h"

struct watch;
struct zerod;

/*
 * The access to Python's stack. The whole process has one, which all watches use, one at a time. _lib.Python has the
 * same fields.
 */
struct zerod_python {
    int asked;            /* SOCK_SEQPACKET: the question is a number of 8 bytes; the answer is the number and a text */
    int dump;             /* the file into which faulthandler writes */
    int signal;           /* handled by faulthandler; 0: none */
    uint64_t main_thread; /* as faulthandler writes it */
    uint64_t own_thread;  /* the thread that answers; its stack is left out */
};

/* Starts the watch, after zerod_connect(). Return: 0; or a negative errno if it cannot start. The program can go on
 * without a watch. */
ZEROD_API int zerod_watch(struct zerod *c, const struct zerod_python *python);

/* Return: a signal that the process neither handles nor ignores, or 0. */
ZEROD_API int zerod_unused_signal(void);

/* NULL is fine. Must not be called in a forked child, which does not have the thread. */
void watch_stop(struct watch *watch);

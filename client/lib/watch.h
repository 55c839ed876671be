/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The watch of a rank: a thread with its own connection, over which the daemon asks for the stack of the process. It
 * runs even if the program hangs. The Python package starts it; a C program has none.
 *
 * A Python thread reads the stack, which needs the interpreter lock. If C code holds the lock for longer than a second,
 * the watch raises an otherwise unused signal on its own thread, so that no call of the program is interrupted. The
 * signal's handler is Python's faulthandler, which writes the stack without the lock. This is safe because no Python
 * code runs meanwhile.
 */

#include <stdint.h>

#include "zerod/client.h"

struct watch;
struct zerod;

/*
 * The access to Python's stack. All watches of the process share it, and use it one at a time. _lib.Python has the same
 * fields.
 */
struct zerod_python {
    int asked;            /* SOCK_SEQPACKET: a question is a number of 8 bytes; its answer is the number and a text */
    int dump;             /* the file into which faulthandler writes */
    int signal;           /* number of the signal that faulthandler handles; 0: none */
    uint64_t main_thread; /* id of the main thread, as faulthandler writes it */
    uint64_t own_thread;  /* id of the thread that answers, which is left out */
};

/* Starts the watch. Call it after zerod_connect(). Return: 0; or -errno if the watch cannot start, and the program may
 * continue without it. */
ZEROD_API int zerod_watch(struct zerod *c, const struct zerod_python *python);

/* Return: a signal that the process neither handles nor ignores, or 0. */
ZEROD_API int zerod_unused_signal(void);

/* Stops the watch; NULL is fine. Do not call it in a forked child, which does not have the thread. */
void watch_stop(struct watch *watch);

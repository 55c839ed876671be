/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The descriptor store: descriptors that outlive this process. The service manager (systemd, or zerodrun) keeps copies
 * of the descriptors that keep_put() sends it, and passes them to the next daemon. The protocol is systemd's: datagrams
 * to NOTIFY_SOCKET, and LISTEN_FDS at the start. This code needs no libsystemd. A process has one service manager, so
 * there is one store for the whole process.
 *
 * Names have 1 to 255 printable ASCII characters without ':'. Several descriptors may have the same name.
 *
 * Threads: keep_put(), keep_confirm(), keep_forget(), keep_is_on() and keep_switch_off() may be called by any thread
 * between keep_init() and keep_deinit(); only the thread that called keep_init() may call the other functions.
 */

#include <stdbool.h>
#include <stddef.h>

enum {
    KEEP_MAX_NAME_BYTES = 255,
    KEEP_TIMEOUT_MS = 5000, /* if confirming takes longer, nothing counts as kept; picked, not measured */
};

/* A descriptor that was passed to this process and not taken yet (keep_take()). The store owns name and fd. */
struct keep_passed {
    const char *name;
    int fd;
};

/*
 * Reads the descriptors that the service manager has passed, and its address. Removes LISTEN_* from the environment, so
 * that no child process believes that it got the descriptors. The descriptors are close-on-exec from now on.
 * Return: 0; -EINVAL when LISTEN_FDS or LISTEN_FDNAMES make no sense, -EBADF when a descriptor is not open, -ENOMEM.
 * After a failure the store is off and empty, and keep_deinit() is not needed.
 */
int keep_init(void);
/* Closes the descriptors that were not taken. Without keep_init() it does nothing. */
void keep_deinit(void);

/* Return: true if there is a service manager that may keep descriptors. systemd does not say whether it keeps them. */
bool keep_is_on(void);
/* Switches the store off, until keep_init() is called again. */
void keep_switch_off(void);

bool keep_is_name(const char *name);

/* Return: the first passed descriptor of this name, which the caller then owns, or -1. */
int keep_take(const char *name);
/* Takes the listening SOCK_SEQPACKET unix socket that was passed, under any name. Return: the socket, which the caller
 * then owns; -1 if no socket was passed; -EINVAL, and takes none, if there are two, or one of another kind. */
int keep_listen_fd(void);
/* Return: the i-th passed descriptor that is not taken yet, valid until the next one is taken; NULL after the last. */
const struct keep_passed *keep_passed(size_t i);
/* The name of a listening socket that a daemon has made and stored. A socket of systemd has the name of its socket
 * unit. */
#define KEEP_SOCKET_NAME "listen"
/* Return: true if a descriptor that is no socket was passed. */
bool keep_passed_state(void);

/*
 * Sends a copy of the descriptor to the service manager under this name; fd stays the caller's. Waits while the
 * manager's queue is full. The manager may refuse the descriptor and does not say so.
 * Return: 0, -ENOTCONN when the store is off, -EINVAL for a name that is not allowed, or another -errno.
 */
int keep_put(const char *name, int fd);
/* Waits until the service manager has processed all messages that were sent before. Return: 0, -ETIMEDOUT, -ENOTCONN
 * when the store is off, or another -errno. */
int keep_confirm(unsigned timeout_ms);
/* Makes the service manager close all its descriptors of this name. */
void keep_forget(const char *name);
/* Sends the service manager a text without a descriptor, also when the store is off. For notify.h. */
void keep_tell(const char *text);

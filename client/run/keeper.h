/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * zerodrun as the service manager of one daemon. As systemd does, the keeper keeps the descriptors that the daemon
 * sends to its NOTIFY_SOCKET, and passes them to the next daemon (core/base/keep.h is the daemon's side). It also
 * reports that the daemon is ready, or needs more time to stop. Its socket is in a private directory. It obeys only
 * messages from the daemon's pid and zerodrun's own user.
 *
 * Order of calls: keeper_init(); for each daemon keeper_describe() before its start, keeper_expect() after its start,
 * and keeper_drain() after its end. Everything runs on the loop's thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h has a MIN of its own */

#include <uv.h>

#include "core/base/keep.h"

struct environment;

enum {
    KEEPER_MAX_FDS = 4096,
    KEEPER_MAX_NAMES_BYTES = 96 * 1024, /* size of LISTEN_FDNAMES; the kernel limits a variable to 128 KiB */
    KEEPER_MAX_MESSAGE_BYTES = 4096,    /* systemd's limit */
};

struct keeper_message {
    bool store, remove, barrier, ready;
    uint64_t extend_us;                 /* EXTEND_TIMEOUT_USEC; 0: not in the message */
    char name[KEEP_MAX_NAME_BYTES + 1]; /* "stored" if the message has no name, as in systemd */
};

/* A kept descriptor. keeper.fds has its number, at the same index. */
struct keeper_entry {
    char *name; /* owned */
    dev_t device;
    ino_t inode;
    int access; /* O_ACCMODE */
};

/* Callbacks of a keeper's owner. */
struct keeper_ops {
    /* Called with a sentence about descriptors that are not kept, at most once per daemon. */
    void (*note)(void *userdata, const char *text);
    /* Called when the daemon serves and handles signals. */
    void (*ready)(void *userdata);
    /* Called when the daemon is stopping and needs at least this time. */
    void (*extend)(void *userdata, uint64_t timeout_ms);
};

struct keeper {
    uv_poll_t poll;
    int socket;
    char *directory, *path; /* of the socket; NULL: removed or not made */
    pid_t pid;              /* of the last daemon, also after its end; 0: none yet */
    int fds[KEEPER_MAX_FDS];
    struct keeper_entry entries[KEEPER_MAX_FDS];
    size_t n, n_names_bytes; /* number of kept descriptors; size of LISTEN_FDNAMES */
    bool has_noted;          /* ops->note was called for this daemon */
    const struct keeper_ops *ops;
    void *userdata;
};

/* ops: not consumed. Return: 0 or a negative errno; after an error keeper_close() is not needed. */
int keeper_init(struct keeper *keeper, uv_loop_t *loop, const struct keeper_ops *ops, void *userdata);
/* Closes all kept descriptors and removes the socket. The loop must run once more before the memory is freed. */
void keeper_close(struct keeper *keeper);
/* Removes the socket as keeper_close() does, for a process that exits without keeper_close(). */
void keeper_remove_socket(struct keeper *keeper);

/* Sets NOTIFY_SOCKET, FDSTORE and, when descriptors are kept, LISTEN_FDS and LISTEN_FDNAMES. Return: 0 or -ENOMEM. */
int keeper_describe(const struct keeper *keeper, struct environment *env);
/* Accepts only messages of this daemon from now on. */
void keeper_expect(struct keeper *keeper, pid_t pid);
/* Processes all waiting messages, also those of a daemon that has exited. */
void keeper_drain(struct keeper *keeper);
/*
 * Return: true if the keeper has descriptors other than the listening socket's, so that the next daemon continues the
 * run.
 */
bool keeper_holds_state(const struct keeper *keeper);

/* Parses a message; skips unknown lines. Return: 0, or -EINVAL if the name is not allowed. */
int keeper_parse(struct keeper_message *message, const char *text, size_t n_bytes);

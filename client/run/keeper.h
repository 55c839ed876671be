/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * zerodrun as the service manager of one daemon: it keeps the descriptors that the daemon sends to its NOTIFY_SOCKET,
 * and passes them to the next daemon, as systemd does (core/base/keep.h is the daemon's end). It also notes when the
 * daemon is ready and when it needs more time to stop. A keeper listens in a private directory. It obeys only messages
 * that come from the daemon's pid and from zerodrun's own user.
 *
 * Calls: keeper_init(); for each daemon keeper_describe(), the start, keeper_expect(), and keeper_drain() after its
 * end. Everything runs on the loop's thread.
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
    KEEPER_MAX_NAMES_BYTES = 96 * 1024, /* of LISTEN_FDNAMES: the kernel limits a variable to 128 KiB */
    KEEPER_MAX_MESSAGE_BYTES = 4096,    /* as systemd */
};

struct keeper_message {
    bool store, remove, barrier, ready;
    uint64_t extend_us;                 /* EXTEND_TIMEOUT_USEC; 0: not in the message */
    char name[KEEP_MAX_NAME_BYTES + 1]; /* "stored" if the message has no name, as in systemd */
};

/* A kept descriptor; its number is in keeper.fds. */
struct keeper_entry {
    char *name; /* owned */
    dev_t device;
    ino_t inode;
    int access; /* O_ACCMODE */
};

/* Callbacks of a keeper's owner. */
struct keeper_ops {
    /* Gets a sentence about descriptors that are not kept, at most once per daemon. */
    void (*note)(void *userdata, const char *text);
    /* The daemon serves now and handles signals. */
    void (*ready)(void *userdata);
    /* The daemon is stopping and needs at least this time. */
    void (*extend)(void *userdata, uint64_t timeout_ms);
};

struct keeper {
    uv_poll_t poll;
    int socket;
    char *directory, *path; /* of the socket; NULL: removed, or not made yet */
    pid_t pid;              /* of the last daemon, also after its end; 0: none was started */
    int fds[KEEPER_MAX_FDS];
    struct keeper_entry entries[KEEPER_MAX_FDS];
    size_t n, n_names_bytes; /* of kept descriptors */
    bool has_noted;          /* a note about this daemon was printed: more could flood the output */
    const struct keeper_ops *ops;
    void *userdata;
};

/* ops: not consumed. Return: 0 or a negative errno; after an error keeper_close() is not needed. */
int keeper_init(struct keeper *keeper, uv_loop_t *loop, const struct keeper_ops *ops, void *userdata);
/* Closes all kept descriptors and removes the socket. The loop must run once more before the memory is freed. */
void keeper_close(struct keeper *keeper);
/* Does only that part of keeper_close(), for a process that exits without closing. */
void keeper_remove_socket(struct keeper *keeper);

/* Sets NOTIFY_SOCKET, FDSTORE and, when descriptors are kept, LISTEN_FDS and LISTEN_FDNAMES. Return: 0 or -ENOMEM. */
int keeper_describe(const struct keeper *keeper, struct environment *env);
/* Accepts only messages of this daemon from now on. */
void keeper_expect(struct keeper *keeper, pid_t pid);
/* Processes the waiting messages; their sender may have exited. */
void keeper_drain(struct keeper *keeper);
/* Does the keeper hold anything except the listening socket? Then the next daemon continues the run. */
bool keeper_holds_state(const struct keeper *keeper);

/* Parses a message; skips unknown lines. Return: 0, or -EINVAL if the name is not allowed. */
int keeper_parse(struct keeper_message *message, const char *text, size_t n_bytes);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A child process that receives orders of the daemon over a socketpair, in the framing of frame.h, and may die at any
 * time. This file has the parts that all engines share; engine.c and gpu-engine.c make and read the packets.
 *
 * After a failure the owner closes the child and starts another one. The daemon never waits for a child: each order has
 * a deadline, and a child that misses it is killed. All functions run on the loop's thread. The loop makes the
 * callbacks; only freed() may also be called by child_close().
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/traffic.h"

struct child;

enum {
    CHILD_GRACE_MS = 1000, /* time past a deadline before a silent child is killed */
    CHILD_MAX_WHAT_BYTES = 512,
};

/* An order whose end the child has not reported. */
struct child_order {
    uint64_t tag;
    uint64_t deadline_ms;
    uint64_t expected[2]; /* the owner's own data */
    enum traffic_kind kind;
    uint64_t began_ns; /* set by child_expect() */
};

/* Why a child is no longer of use. Texts are borrowed during the call. */
struct child_failure {
    bool said;        /* `what` is the child's own text; else a predicate, printed after the engine's name */
    const char *what; /* "was killed by signal 9 (Killed)", "missed its deadline" */
    bool has_tag;     /* the order with this tag failed; many failures belong to no order */
    uint64_t tag;
};

struct child_ops {
    /* The child has sent a packet. Descriptors that are not stolen (steal_fd) are closed after the call. */
    void (*packet)(void *userdata, const uint8_t *data, size_t n_bytes, int *fds, size_t n_fds);
    /* Called once, when the process is dead or has been sent SIGKILL. Only late() and freed() are called afterwards. */
    void (*failed)(void *userdata, const struct child_failure *failure);
    /*
     * Called after child_close() and the end of the process, for each packet that the child sent and that was not read
     * before. NULL: such packets are dropped.
     */
    void (*late)(void *userdata, const uint8_t *data, size_t n_bytes);
    /* The last callback, after child_close(): the owner may free the memory that the callbacks use. */
    void (*freed)(void *userdata);
    void *userdata;
};

struct child_options {
    uv_loop_t *loop;
    /*
     * The program. NULL: the value of `variable` in the environment, else the installed `name` in the folder of the
     * running program, else `name` on PATH.
     */
    const char *program;
    const char *variable, *name;
    /*
     * Names of further environment variables that the child gets, if they are set. "X_*" names all variables that begin
     * with X_. NULL: no further ones.
     */
    const char *const *environment;
    size_t n_environment;
    bool gives_fds; /* the child's packets may carry descriptors; else a descriptor is a failure */
    uint32_t ready_timeout_ms;
    struct traffic *traffic; /* N_TRAFFIC counters of the child's orders, used until child_close(); NULL: none */
    struct child_ops ops;
};

/*
 * Makes the child and its socket. Does not start the process; the socket keeps packets that are sent before the start.
 * Return: 0, or -errno with a sentence in why. After a failure, *out is NULL, or a child that the caller must close.
 */
int child_new(struct child **out, const struct child_options *options, char *why, size_t why_size);

/* Starts the process. Return: as child_new(). */
int child_start(struct child *child, char *why, size_t why_size);

/*
 * Kills the process. Afterwards the loop, or child_close() itself, calls late() and freed(), and no other callback.
 * child: may be NULL.
 */
void child_close(struct child *child);

/*
 * Sends a packet. Takes ownership of the descriptors, even on failure. n_bytes < 0: the packet could not be made;
 * child_send() fails with this -errno. Return: 0, or -errno if failed() is called soon, or has been called.
 */
int child_send(struct child *child, const void *data, int n_bytes, int *fds, size_t n_fds);

/* Notes the child's report that it is ready. A second report is a failure. Return: false after a failure. */
bool child_note_ready(struct child *child);
bool child_is_ready(const struct child *child);

/* Adds an order, with its deadline. Return: as child_send(). */
int child_expect(struct child *child, const struct child_order *order, uint32_t timeout_ms);
/* Return: the order with that tag, or NULL. The pointer is valid until the next child_expect() or child_settle(). */
struct child_order *child_find(struct child *child, uint64_t tag);
/* Removes an order that has ended. n_bytes_sent, n_bytes_received: the bytes that the order has moved. */
void child_settle(struct child *child, struct child_order *order, uint64_t n_bytes_sent, uint64_t n_bytes_received);

/*
 * Kills the process; the loop then calls failed(). Only the first failure counts. tag: the order that failed, or NULL.
 */
void child_fail(struct child *child, const uint64_t *tag, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* child_fail() with the child's own text. */
void child_say(struct child *child, const uint64_t *tag, const char *what);

/* Is the child failing or closed? Its packets are then ignored. */
bool child_is_over(const struct child *child);
int64_t child_pid(const struct child *child);

/* Return: when the process was started, in clock ticks since boot, or 0 if no such process runs. */
uint64_t child_start_time(int64_t pid);

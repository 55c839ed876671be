/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A child process that the daemon gives orders, over a socketpair in the framing of frame.h, and that may die at any
 * time. This file has the parts that all engines share; engine.c and gpu-engine.c know the contents of the packets.
 *
 * After a failure the owner closes the child and starts another one. The daemon never waits for a child: each order has
 * a deadline, and a child that misses it is killed. All functions are for the loop's thread; callbacks come from the
 * loop, and none of them from within a function of this file but child_new()'s.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/traffic.h"

struct child;

enum {
    CHILD_GRACE_MS = 1000, /* past a deadline, before a child that says nothing is killed */
    CHILD_MAX_WHAT_BYTES = 512,
};

/* An order that the child has not reported. */
struct child_order {
    uint64_t tag;
    uint64_t deadline_ms;
    uint64_t expected[2]; /* the owner's */
    enum traffic_kind kind;
    uint64_t began_ns; /* set by child_expect() */
};

/* Why a child is no longer of use. Texts are borrowed during the call. */
struct child_failure {
    bool said;        /* `what` is the child's own text; else the end of a sentence that begins with the engine */
    const char *what; /* "was killed by signal 9 (Killed)", "missed its deadline" */
    bool has_tag;     /* one order failed, with this tag; often a failure has no order */
    uint64_t tag;
};

struct child_ops {
    /* One packet. Descriptors that are not stolen (steal_fd) are closed after the call. */
    void (*packet)(void *userdata, const uint8_t *data, size_t n_bytes, int *fds, size_t n_fds);
    /* Called once; the process is dead or has been sent SIGKILL. Nothing but late() and freed() comes after it. */
    void (*failed)(void *userdata, const struct child_failure *failure);
    /* After child_close(), when the process has ended: a packet that was not read before. NULL: it is dropped. */
    void (*late)(void *userdata, const uint8_t *data, size_t n_bytes);
    /* The last callback, after child_close(): the owner may free the memory that the callbacks use. */
    void (*freed)(void *userdata);
    void *userdata;
};

struct child_options {
    uv_loop_t *loop;
    /*
     * NULL: what the environment's variable names, else `name` beside the running program, where it is installed, else
     * the one on PATH.
     */
    const char *program;
    const char *variable, *name;
    /* Names of further variables that it gets, if they are set; "X_*": all that begin so. NULL: none. */
    const char *const *environment;
    size_t n_environment;
    bool gives_fds; /* its packets may bring descriptors; else those are an offence */
    uint32_t ready_timeout_ms;
    struct traffic *traffic; /* N_TRAFFIC, what its orders are counted in; until child_close(); NULL: nowhere */
    struct child_ops ops;
};

/*
 * Makes the socket; nothing runs yet, and what is sent waits in it. Return: 0, or -errno with a sentence in why: then
 * *out is NULL, or what there is of it and to be closed.
 */
int child_new(struct child **out, const struct child_options *options, char *why, size_t why_size);

/* Starts the process. Return: as child_new(). */
int child_start(struct child *child, char *why, size_t why_size);

/* Kills the process; callbacks end at once but freed(), which comes from the loop or from within. NULL is fine. */
void child_close(struct child *child);

/* Takes the descriptors, also on failure. n_bytes < 0: what the packet could not be made for, -errno, is the failure.
 * Return: 0, or -errno: then failed() comes, too, or has come. */
int child_send(struct child *child, const void *data, int n_bytes, int *fds, size_t n_fds);

/* The child has said that it is ready. Return: false, and it fails, if it had said so before. */
bool child_note_ready(struct child *child);
bool child_is_ready(const struct child *child);

/* Return: 0, or -errno: as child_send(). */
int child_expect(struct child *child, const struct child_order *order, uint32_t timeout_ms);
/* The order of that tag, or NULL; until the next child_expect() or child_settle(). */
struct child_order *child_find(struct child *child, uint64_t tag);
/* The order has ended, and has moved that many bytes. */
void child_settle(struct child *child, struct child_order *order, uint64_t n_bytes_sent, uint64_t n_bytes_received);

/* The first failure counts: it kills the process, and failed() comes from the loop. tag: NULL: not of one order. */
void child_fail(struct child *child, const uint64_t *tag, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* As child_fail(), with the child's own text. */
void child_say(struct child *child, const uint64_t *tag, const char *what);

/* Is the child failing or closed? Its packets are then ignored. */
bool child_is_over(const struct child *child);
int64_t child_pid(const struct child *child);

/* When a process was started, in clock ticks since boot. Return: 0: it has ended, or there is none. */
uint64_t child_start_time(int64_t pid);

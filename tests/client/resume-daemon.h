/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A stand-in for daemons that replace each other, for a job of one rank. Each life is a process that serves one
 * connection and exits where its plan says; the next life begins then. A keeper process holds the listening socket. All
 * that a daemon would adopt is in memory that the lives share: the position, the recorded requests, and the segments.
 * If the client does something that it must not do, the life prints a sentence, and the keeper ends as well.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { RESUME_MAX_LIVES = 4, RESUME_MAX_RECORDED = 512, RESUME_MAX_BYTES = 160, RESUME_MAX_PARAMS = 8 };

/* The answer of a life to Hello. */
enum resume_hello {
    HELLO_WELL,
    HELLO_FRESH,    /* the life has adopted nothing */
    HELLO_OTHER,    /* as HELLO_FRESH, with another world size */
    HELLO_FOREIGN,  /* it has received more than the client sent */
    HELLO_TAKEN,    /* E1301 */
    HELLO_DRAINING, /* another refusal */
};

/* The end of a life: it exits when it has received that many packets. */
struct resume_life {
    uint32_t n_packets; /* Hello included; 0: when the client hangs up */
    bool unanswered;    /* without an answer to the last packet */
    enum resume_hello hello;
    uint32_t n_hellos; /* how many connections are greeted like that; the next ones well. 0: all */
    unsigned after_ms; /* the next life begins so much later */
    bool unlinks;      /* its socket is removed, and nobody listens; a later life makes it anew */
    bool deaf;         /* nobody listens until the next life begins */
    bool lives_on;     /* it closes the connection instead of exiting, until seen->end */
};

struct resume_seen {
    _Atomic uint32_t n_lives; /* begun */
    _Atomic bool end;         /* for a life that nobody hangs up on */
    uint32_t n_packets;       /* of the last life */
    uint32_t n_hellos, n_interns, n_held_messages, n_waits, n_formed;
    uint64_t n_recorded; /* of the incarnation */
    struct {
        uint32_t type, n_bytes;
        uint8_t bytes[RESUME_MAX_BYTES]; /* or as many as fit */
    } recorded[RESUME_MAX_RECORDED];
    uint32_t held[RESUME_MAX_PARAMS];
    uint64_t step;
    uint32_t micro_batch, attempt, n_windows, attempt_seen;
    bool formed;
};

struct resume_options {
    struct resume_life lives[RESUME_MAX_LIVES]; /* the last one has n_packets 0 */
    uint32_t stage;
    uint64_t reattach_ms;
};

/* Starts the keeper and the first life. Return: the keeper's pid; *seen is to be unmapped by resume_daemon_end(). */
pid_t resume_daemon_start(const char *path, const struct resume_options *options, struct resume_seen **seen);

/* Waits for the keeper, which ends when the last life does. Return: no life has found a mistake. */
bool resume_daemon_end(pid_t keeper);

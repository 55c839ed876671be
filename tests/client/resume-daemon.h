/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A stand-in for daemons that replace each other, for a job of one rank. Each life is a process that serves one
 * connection and exits where its plan says; then the next life begins. A keeper process holds the listening socket.
 * What a daemon would adopt is in memory that the lives share: the position, the recorded requests, and the segments.
 * If the client does something forbidden, the life prints a sentence, and the keeper ends as well.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { RESUME_MAX_LIVES = 4, RESUME_MAX_RECORDED = 512, RESUME_MAX_BYTES = 160, RESUME_MAX_PARAMS = 8 };

/* How a life answers Hello. */
enum resume_hello {
    HELLO_WELL,
    HELLO_FRESH,    /* the life has adopted nothing */
    HELLO_OTHER,    /* like HELLO_FRESH, with another world size */
    HELLO_FOREIGN,  /* the life has received more than the client sent */
    HELLO_TAKEN,    /* E1301 */
    HELLO_DRAINING, /* another refusal */
};

/* When and how a life ends. */
struct resume_life {
    uint32_t n_packets; /* the life exits after that many packets, including Hello; 0: when the client hangs up */
    bool unanswered;    /* the last packet gets no answer */
    enum resume_hello hello;
    uint32_t n_hellos; /* how many connections get `hello`; later ones get HELLO_WELL. 0: all */
    unsigned after_ms; /* the time until the next life begins */
    bool unlinks;      /* the socket is removed; a later life makes a new one */
    bool deaf;         /* the socket does not listen until the next life begins */
    bool lives_on;     /* closes the connection instead of exiting, and exits at seen->end */
};

struct resume_seen {
    _Atomic uint32_t n_lives; /* how many lives have begun */
    _Atomic bool end;         /* makes a life exit whose client never hangs up */
    uint32_t n_packets;       /* received by the last life */
    uint32_t n_hellos, n_interns, n_held_messages, n_waits, n_formed;
    uint64_t n_recorded; /* requests of the client's incarnation */
    struct {
        uint32_t type, n_bytes;
        uint8_t bytes[RESUME_MAX_BYTES]; /* the first RESUME_MAX_BYTES bytes */
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

/* Starts the keeper and the first life. Return: the keeper's pid. resume_daemon_end() unmaps *seen. */
pid_t resume_daemon_start(const char *path, const struct resume_options *options, struct resume_seen **seen);

/* Waits for the keeper, which ends when the last life does. Return: whether all lives ended without a complaint. */
bool resume_daemon_end(pid_t keeper);

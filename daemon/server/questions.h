/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Questions of control connections (zerodctl's commands), which must not delay the trainers.
 *
 * A connection has one question at work: the next one is read when the answer to this one has been sent. Questions wait
 * in a lane, administrators in one of their own. A lane works in rounds: a round answers and sends for about
 * QUESTIONS_ROUND_NS of processor time, then the lane pauses until its share of the loop's time is QUESTIONS_SHARE. A
 * round begins in a turn of the loop that had nothing of a trainer or a worker to do, or QUESTIONS_PATIENCE_NS later.
 *
 * An answer is built once for all connections that wait for it: each of them asked before it was built, so none gets
 * old data. It is sent as fast as its readers read.
 *
 * Ownership: a question is a part of its connection, which cancels it before it is freed. Answers are
 * reference-counted.
 * One thread, the loop's.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h has a MIN of its own */

#include <uv.h>

#include "core/wire/wire-arena.h"

/* Measured: bench/questions.py; docs/benchmarks.md has the figures. */
#define QUESTIONS_SHARE 50                            /* each lane gets one part in this many of the loop's time */
#define QUESTIONS_ROUND_NS UINT64_C(200000)           /* picked: a part of an answer is sent in 50 us */
#define QUESTIONS_PATIENCE_NS UINT64_C(100000000)     /* picked: a user at a terminal does not notice it */
#define QUESTIONS_MAX_PAUSE_NS UINT64_C(20000000000)  /* zerodctl gives up after 30 s without an answer */
#define QUESTIONS_MAX_KEPT_BYTES (UINT64_C(64) << 20) /* of answers that are not the newest; picked */

struct answer;
struct questions;

enum {
    QUESTION_COMMAND_BYTES = 33, /* with the NUL; no command is so long, and longer texts are cut */
};

enum question_state {
    QUESTION_NONE,
    QUESTION_ASKED,   /* waits to be answered */
    QUESTION_SENDING, /* its answer may be sent on */
    QUESTION_BLOCKED, /* the peer reads too slowly: waits until its socket can take more */
};

struct question_list {
    struct question *first, **end;
};

struct question {
    enum question_state state;
    char command[QUESTION_COMMAND_BYTES];
    bool is_admin;
    int fd; /* the connection's */
    struct question *next;
    struct question_list *list; /* in which it is */
    struct answer *answer;
    size_t next_part;
    uint64_t blocked_ns; /* since when; uv_hrtime() */
};

struct questions_ops {
    /* Return: JSON, to be freed; NULL: no memory. */
    char *(*answer)(void *userdata, const char *command, uint32_t *exit_code);
    /* Its state has changed between being at work, being blocked, and being over. */
    void (*moved)(struct question *question);
    /* Its connection is to be closed; it has been cancelled. */
    void (*failed)(struct question *question);
    /* At the end of a round. */
    void (*after)(void *userdata);
    void *userdata;
};

struct questions_lane {
    struct question_list waiting;
    uint64_t until_ns; /* it pauses */
};

struct questions {
    struct questions_ops ops;
    uv_timer_t timer;
    uv_idle_t idle; /* while a round is due, the loop does not sleep */
    uv_check_t check;
    struct wire_arena arena;
    struct questions_lane lanes[2]; /* administrators, others */
    struct question_list blocked;
    struct answer *oldest, *newest;
    uint64_t kept_bytes; /* of all answers that somebody has not read yet */
    uint64_t due_ns;     /* since when a round is due; 0: none is */
    bool trainers_first; /* this turn of the loop has served a trainer or a worker */
    uint64_t n_built, n_rounds;
};

/* The loop's handles are closed with the loop's others. Return: 0 or -errno. */
int questions_init(struct questions *questions, uv_loop_t *loop, const struct questions_ops *ops);
/* All questions have been cancelled. */
void questions_deinit(struct questions *questions);

/* question is in state QUESTION_NONE; fd stays the caller's. */
void questions_ask(struct questions *questions, struct question *question, int fd, const char *command, bool is_admin);
/* The socket of a question that is blocked can take more. */
void questions_unblock(struct questions *questions, struct question *question);
/* Possible in any state of the question. */
void questions_cancel(struct questions *questions, struct question *question);

/* A trainer or a worker is served in this turn of the loop. */
void questions_give_way(struct questions *questions);

/* How long a lane pauses after so much processor time. */
uint64_t questions_pause_ns(uint64_t spent_ns);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Questions of control connections (zerodctl's commands), which must not delay the trainers.
 *
 * A connection has one question at a time. Its next question is read after the answer has been sent. Questions wait in
 * two lanes, one for administrators and one for other users. A lane works in rounds. A round answers and sends for
 * about QUESTIONS_ROUND_NS of processor time. Then the lane pauses, so that it uses at most 1/QUESTIONS_SHARE of the
 * loop's time. A due round begins when an iteration of the loop has served no trainer and no worker, but at the latest
 * after QUESTIONS_PATIENCE_NS.
 *
 * An answer is built once for all connections that have asked the same command. All of them asked before the answer is
 * built, so the answer is not outdated for any of them. Each connection gets the answer as fast as it reads.
 *
 * A question is a field of its connection's session, and is cancelled before the session is freed. Answers are
 * reference-counted. All functions run on the loop's thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h has a MIN of its own */

#include <uv.h>

#include "core/wire/wire-arena.h"

/* Measured: bench/questions.py; docs/benchmarks.md has the figures. */
#define QUESTIONS_SHARE 50                            /* each lane uses at most 1/50 of the loop's time */
#define QUESTIONS_ROUND_NS UINT64_C(200000)           /* picked: a part of an answer is sent in 50 us */
#define QUESTIONS_PATIENCE_NS UINT64_C(100000000)     /* picked: a user at a terminal does not notice it */
#define QUESTIONS_MAX_PAUSE_NS UINT64_C(20000000000)  /* zerodctl gives up after 30 s without an answer */
#define QUESTIONS_MAX_KEPT_BYTES (UINT64_C(64) << 20) /* picked; memory of all answers except the newest */

struct answer;
struct questions;

enum {
    QUESTION_COMMAND_BYTES = 33, /* with the NUL; longer than any command; longer texts are cut */
};

enum question_state {
    QUESTION_NONE,
    QUESTION_ASKED,   /* waits for an answer to be built */
    QUESTION_SENDING, /* its answer is being sent */
    QUESTION_BLOCKED, /* the socket is full, because the peer reads too slowly */
};

struct question_list {
    struct question *first, **end;
};

struct question {
    enum question_state state;
    char command[QUESTION_COMMAND_BYTES];
    bool is_admin;
    int fd; /* the socket of the connection */
    struct question *next;
    struct question_list *list; /* the list that contains the question */
    struct answer *answer;
    size_t next_part;
    uint64_t blocked_ns; /* uv_hrtime() when it blocked */
};

struct questions_ops {
    /* Answers a command. Return: JSON, which the caller frees, or NULL without memory. */
    char *(*answer)(void *userdata, const char *command, uint32_t *exit_code);
    /* The question was asked, has blocked or unblocked, or has ended. */
    void (*moved)(struct question *question);
    /* The question has failed and was cancelled. The callee closes the connection. */
    void (*failed)(struct question *question);
    /* A round has ended. */
    void (*after)(void *userdata);
    void *userdata;
};

struct questions_lane {
    struct question_list waiting;
    uint64_t until_ns; /* uv_hrtime() at the end of the lane's pause */
};

struct questions {
    struct questions_ops ops;
    uv_timer_t timer;
    uv_idle_t idle; /* active while a round is due, so that the loop does not sleep */
    uv_check_t check;
    struct wire_arena arena;
    struct questions_lane lanes[2]; /* administrators, others */
    struct question_list blocked;
    struct answer *oldest, *newest;
    uint64_t kept_bytes; /* total size of the answers with unread parts */
    uint64_t due_ns;     /* when a round became due; 0: no round is due */
    bool trainers_first; /* this iteration of the loop has served a trainer or a worker */
    uint64_t n_built, n_rounds;
};

/* Opens the handles. The owner of the loop closes them. Return: 0 or -errno. */
int questions_init(struct questions *questions, uv_loop_t *loop, const struct questions_ops *ops);
/* Frees the memory. The caller must have cancelled all questions. */
void questions_deinit(struct questions *questions);

/* Queues a question. question: in state QUESTION_NONE. fd: the connection's socket, which the caller keeps. */
void questions_ask(struct questions *questions, struct question *question, int fd, const char *command, bool is_admin);
/* Continues a blocked question. Call it when the question's socket is writable again. */
void questions_unblock(struct questions *questions, struct question *question);
/* Cancels a question, in any of its states. */
void questions_cancel(struct questions *questions, struct question *question);

/* Notes that this iteration of the loop serves a trainer or a worker. */
void questions_give_way(struct questions *questions);

/* Return: the pause of a lane after spent_ns of processor time. */
uint64_t questions_pause_ns(uint64_t spent_ns);

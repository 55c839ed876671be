/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A job without a server, and trainers without a socket: verbs are called as dispatch calls them, answers come
 * in through job_ops, workers are waited for, and the clock is a number that the test moves. So every order of
 * calls can be had, and nothing depends on time.
 *
 * A peer is one rank. It trains the model of puppet-model.h, whose gradients are a function of where they belong, and
 * maps the segments that it is given as a client does. Each answer must be heard before the next one comes.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "proto/credit.h"
#include "tests/programs/puppet-model.h"

/* No stall is reported, however the test moves the clock. */
#define FIXTURE_QUIET "diagnostics: {stall_warning: 0, stall_timeout: 0}\n"

/* A whole run. */
enum { FIXTURE_STEPS = 3, FIXTURE_MICRO = 2 };

enum { PEERS = 2, FIXTURE_MAX_PEERS = 4, PEER_MAX_PARCELS = 32, PEER_MAX_SEGMENTS = 5 };

struct peer_slot {
    bool open, overflow;
    uint32_t ticket, use, pass;
    uint64_t offset_bytes;
};

struct peer {
    struct fixture *fixture;
    unsigned number;
    enum wire_on_duplicate on_duplicate;
    struct job_rank *rank; /* NULL: not attached */
    uint64_t incarnation, sequence;
    struct wire_position at;
    float (*factor)(const struct peer *p, uint32_t param); /* of its gradients; NULL: 1 */

    bool overlaps; /* wants to hear of decisions, and to map the published page */
    bool finds_inf;
    struct reply_step_done decision; /* the last one */
    unsigned n_decisions;

    unsigned n_answers, n_heard;
    struct reply reply; /* the last one; what it points to is gone, but for what follows */
    unsigned code;      /* of a refusal */
    char text[4096];
    struct wire_segment segments[PEER_MAX_SEGMENTS];
    int fds[PEER_MAX_SEGMENTS];
    size_t n_segments;
    bool dropped;
    unsigned dropped_code; /* 0: dropped without a word */

    uint8_t *ring, *overflow;
    uint64_t ring_bytes, overflow_bytes, credit_bytes;
    const struct credit_page *credit;
    uint32_t n_tickets, next_ticket;
    uint64_t next_place_bytes;
    struct peer_slot slots[PEER_MAX_PARCELS]; /* of the open micro-batch, per parcel: the latest pass */
};

struct fixture {
    struct config *config;
    struct worker_pool *pool;
    struct job *job;
    uint64_t now_ns;
    unsigned n_soon; /* how often a tick was asked for */
    uint64_t n_incarnations;
    unsigned n_answers; /* of all peers */
    struct peer peers[FIXTURE_MAX_PEERS];
    /* Lets something happen, and says whether anything did; NULL: waits for the job's own workers. */
    bool (*advance)(void *userdata);
    void *advance_userdata;
};

struct fixture_options {
    const char *world; /* of the configuration; its value */
    unsigned first, n; /* ranks of this node */
    unsigned stage;
    const char *more; /* appended to the configuration */
};

/* A job of two ranks; more is appended to its configuration. */
struct fixture *fixture_new(const char *more);
struct fixture *fixture_new_with(const struct fixture_options *options);
void fixture_free(struct fixture *f);
/* Waits for all that is under way. */
void fixture_drain(struct fixture *f);
void fixture_tick(struct fixture *f, uint64_t later_ms);
/* Master weights, optimizer state and published weights of all ranks. */
uint64_t fixture_bits(const struct fixture *f);
/* How many diagnostics of a code were kept. */
unsigned fixture_n_kept(const struct fixture *f, unsigned code);

/* Return: 0, or the code of the refusal. As a new process each time. */
unsigned peer_attach(struct peer *p, const char *run_id);
/* Its process is gone. */
void peer_die(struct peer *p);
/* zerod_leave(), and the connection closes. */
void peer_leave(struct peer *p);

void peer_declare(struct peer *p);
void peer_ask_form(struct peer *p);
/* Expects Formed. */
void peer_take_formed(struct peer *p);
void peer_init_weights(struct peer *p);
void peer_ready(struct peer *p);
/* All of it for a rank of a run that has weights. */
void peer_return(struct peer *p, const char *run_id);
/* All of it for a new run. */
void fixture_form(struct fixture *f, const char *run_id);

/* The next answer is of that type; waits for workers, never for time. */
void peer_expect(struct peer *p, enum reply_type type);
/* A refusal of that code; of an abort or not. */
void peer_expect_refused(struct peer *p, unsigned code, bool aborted);
/* There is no answer, and nothing under way that could bring one. */
void peer_expect_silence(struct peer *p);
/* The peer was dropped with that code; 0: without a word. */
void peer_expect_dropped(struct peer *p, unsigned code);

void peer_begin(struct peer *p);
/* The gradient of where the peer stands, in the latest slot of its bucket. */
void peer_push(struct peer *p, uint32_t param);
void peer_push_part(struct peer *p, uint32_t part, bool other);
/* Pushes the parameter with other bits. */
void peer_push_other(struct peer *p, uint32_t param);
void peer_push_bucket(struct peer *p, uint32_t bucket);
void peer_push_all(struct peer *p);
/* Pushes the parameter once more, in a slot of its own: the next pass. */
void peer_push_again(struct peer *p, uint32_t param);
void peer_ask_end(struct peer *p);
void peer_ask_step(struct peer *p);
void peer_ask_slot(struct peer *p, uint32_t bucket);
/* After a refusal that was an abort. */
void peer_see_abort(struct peer *p);
/* Expects the refusal of an aborted step, whose text contains reason, and sends AbortSeen. */
void peer_expect_abort(struct peer *p, const char *reason);

/* One micro-batch, n_micro of them and the step: of all ranks, which stand at the same place. */
void fixture_micro_batch(struct fixture *f);
void fixture_finish_step(struct fixture *f);
void fixture_steps(struct fixture *f, unsigned n_steps, unsigned n_micro);

/* fixture_bits() after a whole run in which nothing went wrong. */
uint64_t fixture_undisturbed(void);
/* Two ranks, formed, one step behind them. */
struct fixture *fixture_start(const char *more);
/* Runs the other steps of a whole run, to its end, and checks that its result is that of an undisturbed run. */
void fixture_finish(struct fixture *f);

/* The first bucket of more than one parameter, or of exactly one. */
uint32_t fixture_bucket(const struct fixture *f, bool several);
uint32_t fixture_first_param(const struct fixture *f, uint32_t bucket);

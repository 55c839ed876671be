/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A job without a server, and trainers without a socket. Tests call verbs as dispatch does, get answers through
 * job_ops, wait for workers, and set the clock. So a test can choose any order of calls, and does not depend on time.
 *
 * A peer is one rank. It trains the model of puppet-model.h, whose gradients depend only on their place, and maps its
 * segments as a client does. Each answer must be expected before the next one arrives.
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

/* Turns off reports of stalls, whatever the clock. */
#define FIXTURE_QUIET "diagnostics: {stall_warning: 0, stall_timeout: 0}\n"

/* The size of a complete run. */
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
    struct job_rank *rank; /* NULL if not attached */
    uint64_t incarnation, sequence;
    struct wire_position at;
    float (*factor)(const struct peer *p, uint32_t param); /* scales its gradients; NULL: 1 */

    bool overlaps; /* wants decisions, and the published page */
    bool finds_inf;
    struct reply_step_done decision; /* the last one */
    unsigned n_decisions;

    unsigned n_answers, n_heard;
    struct reply reply; /* the last one; only the fields below are valid of what it points to */
    unsigned code;      /* of the last refusal */
    char text[4096];
    struct wire_segment segments[PEER_MAX_SEGMENTS];
    int fds[PEER_MAX_SEGMENTS];
    size_t n_segments;
    bool dropped;
    unsigned dropped_code; /* the refusal's code; 0: dropped without a message */

    uint8_t *ring, *overflow;
    uint64_t ring_bytes, overflow_bytes, credit_bytes;
    const struct credit_page *credit;
    uint32_t n_tickets, next_ticket;
    uint64_t next_place_bytes;
    struct peer_slot slots[PEER_MAX_PARCELS]; /* [parcel]: the latest pass in the open micro-batch */
};

struct fixture {
    struct config *config;
    struct worker_pool *pool;
    struct job *job;
    uint64_t now_ns;
    unsigned n_soon; /* how often the job asked for a tick */
    uint64_t n_incarnations;
    unsigned n_answers; /* the sum over all peers */
    struct peer peers[FIXTURE_MAX_PEERS];
    /* Waits for an event. Return: whether there was one. NULL: waits for the job's own workers. */
    bool (*advance)(void *userdata);
    void *advance_userdata;
};

struct fixture_options {
    const char *world; /* the value of the configuration's key `world` */
    unsigned first, n; /* the ranks of this node */
    unsigned stage;
    const char *more; /* appended to the configuration */
};

/* Makes a job of two ranks. `more` is appended to its configuration. */
struct fixture *fixture_new(const char *more);
struct fixture *fixture_new_with(const struct fixture_options *options);
void fixture_free(struct fixture *f);
/* Waits until the job has no more work. */
void fixture_drain(struct fixture *f);
void fixture_tick(struct fixture *f, uint64_t later_ms);
/* Return: a hash of master weights, optimizer state and published weights of all ranks. */
uint64_t fixture_bits(const struct fixture *f);
/* Return: how many diagnostics with this code were kept. */
unsigned fixture_n_kept(const struct fixture *f, unsigned code);

/* Attaches, as a new process. Return: 0, or the code of the refusal. */
unsigned peer_attach(struct peer *p, const char *run_id);
/* The peer's process dies. */
void peer_die(struct peer *p);
/* The peer calls zerod_leave() and closes its connection. */
void peer_leave(struct peer *p);

void peer_declare(struct peer *p);
void peer_ask_form(struct peer *p);
/* Expects Formed. */
void peer_take_formed(struct peer *p);
void peer_init_weights(struct peer *p);
void peer_ready(struct peer *p);
/* Attaches to a run that has weights, and does all until training. */
void peer_return(struct peer *p, const char *run_id);
/* Forms a new run with all peers. */
void fixture_form(struct fixture *f, const char *run_id);

/* Expects an answer of this type next. Waits for workers, but never for time. */
void peer_expect(struct peer *p, enum reply_type type);
/* Expects a refusal with this code. aborted says whether it reports an abort. */
void peer_expect_refused(struct peer *p, unsigned code, bool aborted);
/* Expects that there is no answer, and no work that could cause one. */
void peer_expect_silence(struct peer *p);
/* Expects that the peer was dropped with this code, or without a message if it is 0. */
void peer_expect_dropped(struct peer *p, unsigned code);

void peer_begin(struct peer *p);
/* Pushes the gradient of the peer's position, in the latest slot of its bucket. */
void peer_push(struct peer *p, uint32_t param);
void peer_push_part(struct peer *p, uint32_t part, bool other);
/* Pushes the parameter with wrong bits. */
void peer_push_other(struct peer *p, uint32_t param);
void peer_push_bucket(struct peer *p, uint32_t bucket);
void peer_push_all(struct peer *p);
/* Pushes the parameter again in a new slot, as its next pass. */
void peer_push_again(struct peer *p, uint32_t param);
void peer_ask_end(struct peer *p);
void peer_ask_step(struct peer *p);
void peer_ask_slot(struct peer *p, uint32_t bucket);
/* Sends AbortSeen, after a refusal that reports an abort. */
void peer_see_abort(struct peer *p);
/* Expects the refusal of an aborted step with this reason in its text, and sends AbortSeen. */
void peer_expect_abort(struct peer *p, const char *reason);

/*
 * All ranks, which must be at the same position, do one micro-batch, end the step, or do n_steps steps of n_micro
 * micro-batches.
 */
void fixture_micro_batch(struct fixture *f);
void fixture_finish_step(struct fixture *f);
void fixture_steps(struct fixture *f, unsigned n_steps, unsigned n_micro);

/* Return: fixture_bits() after a complete undisturbed run. */
uint64_t fixture_undisturbed(void);
/* Makes a job of two ranks, forms it, and does one step. */
struct fixture *fixture_start(const char *more);
/* Does the remaining steps of a complete run, and asserts that the result is that of an undisturbed run. */
void fixture_finish(struct fixture *f);

/* Return: the first bucket with several parameters, or with exactly one. */
uint32_t fixture_bucket(const struct fixture *f, bool several);
uint32_t fixture_first_param(const struct fixture *f, uint32_t bucket);

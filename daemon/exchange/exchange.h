/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What a node's engine moves: partial sums of a parcel to their owners, weights to all. Node 0 says what moves next
 * (nodes.h), each such motion under a tag; here it becomes orders to the engine, and what has come in is added or taken
 * over.
 *
 * The way of a parcel between nodes:
 *
 *   this node's ranks have pushed all of it               parcel_complete(): node 0 is told
 *   every node is ready, or has nothing of it             parcel_await(), exchange_parcel()
 *   collect has summed this node's ranks into staging     exchange_summed(): each owner gets its slice of each piece
 *   the others' slices are here                           step_combine() adds all pieces, in rank order; then moved()
 *   they are everywhere                                   collect_settled(): staging may be overwritten
 *
 * Where the slot of the only local rank is the piece (step_sends_slots) it is lent instead, and sent at once; looking
 * at it goes on meanwhile. It is given back when all have it.
 *
 * Where gradients, state and weights lie on GPUs (device: cuda), parcels and the gathering of weights are orders to the
 * engine of the GPUs instead (step-device.h, devices.h), in the order in which node 0 says them, which is one on all
 * nodes: each rank is a source of its own there, and every owner adds. All take part in what is said again, too. The
 * rest, what is rare, goes through the host's memory in the way above: initial weights and windows by the staging copy of the
 * state (state.h), state that is read by copies of it.
 *
 * An engine that fails takes its orders with it (exchange_broken). Node 0 then says again what has not arrived
 * everywhere, and where it has: who has it only sends.
 *
 * Loop thread; the adding and taking over is done by workers.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/wire/engine-wire.h"
#include "daemon/step/fetch.h"
#include "daemon/step/step.h"

struct exchange;
struct job;
struct request_init;
struct state_edits;
struct ring;

/* Segments as the engine knows them. */
enum exchange_segment {
    EXCHANGE_STAGING,  /* of the step: partial sums of this node's pieces */
    EXCHANGE_INCOMING, /* other nodes' pieces of the owned partitions */
    EXCHANGE_WEIGHTS,
    EXCHANGE_STATE,     /* masters and moments of the owned partitions */
    EXCHANGE_POOL,      /* stage 3 */
    EXCHANGE_SERVING,   /* stage 3: weights of 16 bits for other nodes, rounded from masters */
    EXCHANGE_READING,   /* state that a rank reads; or what was written in a window */
    EXCHANGE_SPREADING, /* stage 3: initial weights on their way to their owners; or a window */
    EXCHANGE_N_SEGMENTS,
    /* Not when an engine is set up, but before the first order that needs them: of the ring that is lent. */
    EXCHANGE_RING = EXCHANGE_N_SEGMENTS,
    EXCHANGE_OVERFLOW,
};

/* A fetch, as node 0 says it to all. */
struct exchange_service {
    uint64_t tag, id;
    unsigned node; /* that fetches */
    unsigned rank; /* FETCH_GATHERED: of that node, whose GPU it is for */
    enum fetch_kind kind;
    const uint64_t *params;
    size_t n_params;
};

struct exchange_ops {
    /* Return: 0 or -errno; then the engine is failing, too. */
    int (*order)(void *userdata, const struct engine_order *order);
    /* All that was to be done here under this tag is done. */
    void (*moved)(void *userdata, uint64_t tag, uint32_t parcel);
    /* Node 0 is to say what others are to serve this node (exchange_serve). id: of the fetch, on this node; no tag. */
    void (*fetch)(void *userdata, const struct exchange_service *asked);
    /* Another segment of that number, or none. Return: 0 or -errno. */
    int (*share)(void *userdata, enum exchange_segment number, const struct segment *segment);
    /* What was said cannot be done after all: the generation is broken. why: a static sentence. */
    void (*wrong)(void *userdata, const char *why);
    void *userdata;
};

/* A motion, as node 0 says it. */
struct exchange_said {
    uint64_t tag;
    uint64_t arrived; /* nodes that have the bytes already, as a mask */
    uint32_t parcel, micro_batch, pass;
    const uint64_t *masks; /* per part of the parcel over the pieces of all nodes; n_masks 0: all of all */
    size_t n_masks;
};

/* [*start, *start + n) of the parameter's elements that the node owns; of a frozen one, unless those are partitioned,
 * all are everybody's. Return: n. */
uint64_t exchange_owned(const struct exchange *exchange, unsigned node, uint32_t param, uint64_t *start);

/* For a job of several nodes. Return: 0 or -ENOMEM. */
int exchange_new(struct exchange **out, struct job *job, const struct exchange_ops *ops);
void exchange_free(struct exchange *exchange);

/* The job's layout and step stand. Pages of the incoming segment are the caller's to reserve. Return: 0 or -errno. */
int exchange_form(struct exchange *exchange);
void exchange_drop(struct exchange *exchange);
/* EXCHANGE_N_SEGMENTS of them, valid until exchange_drop(). */
const struct segment *const *exchange_segments(const struct exchange *exchange);

/* This node's gradients of a parcel that was taken lie in that ring, and are sent from there. Holds the ring until
 * exchange_end_loan() or exchange_end_loans(). */
void exchange_lend(struct exchange *exchange, uint32_t parcel, struct ring *ring);
/* All nodes have what they own of the parcel. */
void exchange_end_loan(struct exchange *exchange, uint32_t parcel);
/* The step is committed or aborted. */
void exchange_end_loans(struct exchange *exchange);
/* Does this node own any of the parcel, and so add it up? */
bool exchange_owns_any(const struct exchange *exchange, uint32_t parcel);
/* A ring is about to be freed: the engine lets go of it, too. */
void exchange_ring_is_gone(struct exchange *exchange, const struct ring *ring);

/* Return: NULL, or why it cannot be done: a static sentence. The generation is broken then. */
const char *exchange_parcel(struct exchange *exchange, const struct exchange_said *said);
const char *exchange_spread(struct exchange *exchange, const struct exchange_said *said);
/* Node 0, stage 3: initial weights of rank 0, for their owners. Any thread. Return: 0 or -errno. */
int exchange_init(struct exchange *exchange, const struct request_init *init, const void *weights);
/* They are where they belong: the pages are given back. */
void exchange_spread_is_over(struct exchange *exchange);
const char *exchange_gather(struct exchange *exchange, const struct exchange_said *said);

/*
 * Fetches what other nodes own of the parameters; what this node owns is not touched, but when GPUs gather: that is all
 * of the parameters, and never nothing. Fetches of state are served one after the other. Return: 0 or -ENOMEM (done()
 * will not be called); 1: there is nothing to fetch.
 */
int exchange_fetch(struct exchange *exchange, const struct fetch *fetch);
const char *exchange_serve(struct exchange *exchange, const struct exchange_service *service);
/* Whoever waits for a fetch is told that it will not come. */
void exchange_cancel(struct exchange *exchange);

/* A write window is open, with its segment, or it is gone (NULL). */
void exchange_window(struct exchange *exchange, const struct segment *segment);
/*
 * What rank 0 has written goes to its owners, window to window. written: of the state, each parameter << 8 | enum
 * state_kind; edits: where it lies or goes, NULL if nothing was. Others have their place for it, too.
 */
const char *exchange_write(struct exchange *exchange, const struct exchange_said *said, const uint64_t *written,
                           size_t n_written, const struct state_edits *edits);

/* The engine has done an order. */
void exchange_done(struct exchange *exchange, const struct engine_done *done);
/* Partial sums of the parcel are in staging, or the slot was looked at: what was said of it may have waited for that.
 */
void exchange_summed(struct exchange *exchange, uint32_t parcel);
/* The engine is gone: what had not arrived is forgotten. */
void exchange_broken(struct exchange *exchange);
/* Tags of what has arrived but is not done with. Return: how many there are; no more than max are written. */
size_t exchange_list_arrived(const struct exchange *exchange, uint64_t *tags, size_t max);

/* Is anything of a parcel under way? */
bool exchange_is_busy(const struct exchange *exchange);

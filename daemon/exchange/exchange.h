/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The exchange moves data between nodes through this node's engine: partial sums of a parcel go to their owners,
 * weights to all nodes. Node 0 says what moves next (nodes.h), each such motion under a tag. The exchange turns the
 * motion into orders to the engine, and adds or adopts the data that has come in.
 *
 * The way of a parcel between nodes:
 *
 *   this node's ranks have pushed the whole parcel        parcel_complete(): node 0 is told
 *   every node is ready, or has nothing of it             parcel_await(), exchange_parcel()
 *   collect has summed this node's ranks into staging     exchange_summed(): each owner gets its slice of each piece
 *   the others' slices are here                           step_combine() adds all pieces, in rank order; then moved()
 *   all nodes have their slices                           collect_settled(): staging may be overwritten
 *
 * If the slot of the only local rank is the piece (step_sends_slots), the rank's ring lends the slot instead: the slot
 * is sent at once, while workers still inspect it. The loan ends when all nodes have the slot's data.
 *
 * If gradients, state and weights lie on GPUs (device: cuda), parcels and the gathering of weights are orders to the
 * engine of the GPUs instead (step-device.h, devices.h). All nodes order in the one sequence in which node 0 says the
 * motions. Each rank is a source of its own there, and every owner adds. All nodes also take part in a motion that is
 * said again. The rare rest goes through host memory in the way above: initial weights and windows by the staging copy
 * of the state (state.h), state that is read by copies of it.
 *
 * The orders of an engine that fails are lost (exchange_broken). Node 0 then says each motion again that has not
 * arrived at all nodes, and names the nodes where it has: those nodes only send.
 *
 * Loop thread; workers add and adopt.
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
    EXCHANGE_SERVING,   /* for other nodes: 16-bit weights rounded from masters, moments widened, values of GPUs */
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
    /* This node has done everything for the motion with this tag. */
    void (*moved)(void *userdata, uint64_t tag, uint32_t parcel);
    /* Asks node 0 to have other nodes serve this fetch (exchange_serve). id: of the fetch, on this node; no tag. */
    void (*fetch)(void *userdata, const struct exchange_service *asked);
    /* Replaces the engine's segment of that number. segment: never NULL. Return: 0 or -errno. */
    int (*share)(void *userdata, enum exchange_segment number, const struct segment *segment);
    /* A motion that was accepted cannot be carried out: the generation is broken. why: a static sentence. */
    void (*wrong)(void *userdata, const char *why);
    void *userdata;
};

/* A motion, as node 0 says it. */
struct exchange_said {
    uint64_t tag;
    uint64_t arrived; /* nodes that have the bytes already, as a mask */
    uint32_t parcel, micro_batch, pass;
    const uint64_t *masks; /* per part of the parcel, a mask over the pieces of all nodes; n_masks 0: all pieces */
    size_t n_masks;
};

/*
 * Finds the elements [*start, *start + n) of the parameter that the node owns. Every node owns all elements of a frozen
 * parameter, unless frozen parameters are partitioned. Return: n.
 */
uint64_t exchange_owned(const struct exchange *exchange, unsigned node, uint32_t param, uint64_t *start);

/* For a job of several nodes. Return: 0 or -ENOMEM. */
int exchange_new(struct exchange **out, struct job *job, const struct exchange_ops *ops);
void exchange_free(struct exchange *exchange);

/* The job's layout and step stand. Pages of the incoming segment are the caller's to reserve. Return: 0 or -errno. */
int exchange_form(struct exchange *exchange);
void exchange_drop(struct exchange *exchange);
/* EXCHANGE_N_SEGMENTS of them, valid until exchange_drop(). */
const struct segment *const *exchange_segments(const struct exchange *exchange);

/*
 * This node's gradients of a parcel that was accepted lie in that ring and are sent from there. Holds the ring until
 * exchange_end_loan() or exchange_end_loans().
 */
void exchange_lend(struct exchange *exchange, uint32_t parcel, struct ring *ring);
/* All nodes have what they own of the parcel. */
void exchange_end_loan(struct exchange *exchange, uint32_t parcel);
/* The step is committed or aborted. */
void exchange_end_loans(struct exchange *exchange);
/* Does this node own any elements of the parcel, and so add their pieces? */
bool exchange_owns_any(const struct exchange *exchange, uint32_t parcel);
/* A ring is about to be freed: the engine must unmap it. */
void exchange_ring_is_gone(struct exchange *exchange, const struct ring *ring);

/* Return: NULL, or why it cannot be done: a static sentence. The generation is broken then. */
const char *exchange_parcel(struct exchange *exchange, const struct exchange_said *said);
const char *exchange_spread(struct exchange *exchange, const struct exchange_said *said);
/* Node 0, stage 3: initial weights of rank 0, for their owners. Any thread. Return: 0 or -errno. */
int exchange_init(struct exchange *exchange, const struct request_init *init, const void *weights);
/* The initial weights have reached their owners: frees the pages that held them. */
void exchange_spread_is_over(struct exchange *exchange);
const char *exchange_gather(struct exchange *exchange, const struct exchange_said *said);

/*
 * Fetches the elements of the parameters that other nodes own; this node's own elements are not touched. A gather by
 * GPUs is an exception: it fetches all elements of all parameters, and never returns 1. Fetches of state are served one
 * after the other. Return: 0 or -ENOMEM (done() will not be called); 1: there is nothing to fetch.
 */
int exchange_fetch(struct exchange *exchange, const struct fetch *fetch);
/* Asks node 0 again for all fetches that it was asked for. */
void exchange_ask_again(struct exchange *exchange);
const char *exchange_serve(struct exchange *exchange, const struct exchange_service *service);
/* Ends all fetches of this node: each one's done() gets -ECANCELED. */
void exchange_cancel(struct exchange *exchange);

/* A write window is open, with its segment, or it is gone (NULL). */
void exchange_window(struct exchange *exchange, const struct segment *segment);
/*
 * Sends what rank 0 has written from node 0's window to the owners' windows. written: the state that was written, each
 * entry parameter << 8 | enum state_kind. edits: where that state lies on node 0, and where it goes on the others;
 * NULL: no state was written.
 */
const char *exchange_write(struct exchange *exchange, const struct exchange_said *said, const uint64_t *written,
                           size_t n_written, const struct state_edits *edits);

/* The engine has done an order. */
void exchange_done(struct exchange *exchange, const struct engine_done *done);
/* Partial sums of the parcel are in staging, or its slot was inspected: continues the motions that waited for that. */
void exchange_summed(struct exchange *exchange, uint32_t parcel);
/* The engine is gone: forgets the motions that had not arrived. */
void exchange_broken(struct exchange *exchange);
/* Lists the tags of motions that arrived but are not finished. Return: their number; no more than max are written. */
size_t exchange_list_arrived(const struct exchange *exchange, uint64_t *tags, size_t max);

/* Is anything of a parcel under way? */
bool exchange_is_busy(const struct exchange *exchange);

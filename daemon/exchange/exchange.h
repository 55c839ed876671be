/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The exchange moves data between nodes through this node's engine: partial sums of a parcel go to their owners, and
 * weights go to all nodes. Each such movement is a motion. Node 0 announces it with a tag (nodes.h). The exchange turns
 * the motion into orders to the engine, and adds or adopts the data that has arrived.
 *
 * A parcel moves between nodes in these stages:
 *
 *   this node's ranks have pushed the whole parcel        parcel_complete(), reported to node 0
 *   every node is ready, or has no part of the parcel     parcel_await(), exchange_parcel()
 *   collect has summed this node's ranks into staging     exchange_summed(): each owner gets its slice of each piece
 *   the other nodes' slices have arrived                  step_combine() adds all pieces, in rank order; then moved()
 *   all nodes have their slices                           collect_settled(): staging may be overwritten
 *
 * If the node has one rank whose slot is the piece (step_sends_slots), the rank's ring lends the slot. The slot is sent
 * at once, while workers still inspect it. The loan ends when all nodes have the slot's data.
 *
 * If gradients, state and weights are on GPUs (device: cuda), the engine of the GPUs moves parcels and gathers weights
 * instead (step-device.h, devices.h). All nodes submit these motions in the sequence of node 0's announcements. Each
 * rank is a separate source, and each owner adds the sources. If a motion is announced again, all nodes take part
 * again. Rare motions still go through host memory, as above. Initial weights and windows use the staging copy of the
 * state (state.h). State that a rank reads is copied from the GPUs first.
 *
 * If an engine fails, its orders are lost (exchange_broken). Node 0 then announces again each motion that has not
 * arrived at all nodes. The announcement names the nodes where the motion has arrived. Those nodes only send.
 *
 * All functions run on the loop's thread; workers add and adopt.
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

/* The numbers of the engine's segments. */
enum exchange_segment {
    EXCHANGE_STAGING,  /* the step's partial sums of this node's pieces */
    EXCHANGE_INCOMING, /* other nodes' pieces of the owned partitions */
    EXCHANGE_WEIGHTS,
    EXCHANGE_STATE,     /* masters and moments of the owned partitions */
    EXCHANGE_POOL,      /* stage 3 */
    EXCHANGE_SERVING,   /* for other nodes: rounded weights, widened moments, values from GPUs */
    EXCHANGE_READING,   /* state that a rank reads, or state that a window wrote */
    EXCHANGE_SPREADING, /* stage 3: initial weights for their owners; or the window */
    EXCHANGE_N_SEGMENTS,
    /* The two segments of the ring that lends slots. They are shared before the first order that sends a slot. */
    EXCHANGE_RING = EXCHANGE_N_SEGMENTS,
    EXCHANGE_OVERFLOW,
};

/* A fetch, as node 0 announces it to all nodes. */
struct exchange_service {
    uint64_t tag, id;
    unsigned node; /* the node that fetches */
    unsigned rank; /* FETCH_GATHERED: the rank of that node whose GPU gets the parameters */
    enum fetch_kind kind;
    const uint64_t *params;
    size_t n_params;
};

struct exchange_ops {
    /* Submits an order to the engine. Return: 0, or -errno if the engine is failing. */
    int (*order)(void *userdata, const struct engine_order *order);
    /* This node has done everything for the motion with this tag. */
    void (*moved)(void *userdata, uint64_t tag, uint32_t parcel);
    /* Asks node 0 to announce this fetch (exchange_serve). id: this node's number of the fetch, not a tag. */
    void (*fetch)(void *userdata, const struct exchange_service *asked);
    /* Replaces the engine's segment of that number. segment: never NULL. Return: 0 or -errno. */
    int (*share)(void *userdata, enum exchange_segment number, const struct segment *segment);
    /* Ends the generation, because an accepted motion cannot be carried out. why: a static sentence. */
    void (*wrong)(void *userdata, const char *why);
    void *userdata;
};

/* A motion, as node 0 announces it. */
struct exchange_said {
    uint64_t tag;
    uint64_t arrived; /* mask of the nodes that already have the data */
    uint32_t parcel, micro_batch, pass;
    const uint64_t *masks; /* per part: a mask over the pieces of all nodes; n_masks 0: all pieces */
    size_t n_masks;
};

/*
 * Finds the elements [*start, *start + n) of the parameter that the node owns. Every node owns all elements of a frozen
 * parameter, unless frozen parameters are partitioned. Return: n.
 */
uint64_t exchange_owned(const struct exchange *exchange, unsigned node, uint32_t param, uint64_t *start);

/* Makes the exchange of a job of several nodes. Return: 0 or -ENOMEM. */
int exchange_new(struct exchange **out, struct job *job, const struct exchange_ops *ops);
void exchange_free(struct exchange *exchange);

/* Call it when the job has its layout and step. The caller then reserves the pages of the incoming segment. Return: 0
 * or -errno. */
int exchange_form(struct exchange *exchange);
void exchange_drop(struct exchange *exchange);
/* Return: EXCHANGE_N_SEGMENTS segments, valid until exchange_drop(). */
const struct segment *const *exchange_segments(const struct exchange *exchange);

/*
 * Lends the slot of an accepted parcel, so that this node's gradients are sent from the ring. Holds the ring until
 * exchange_end_loan() or exchange_end_loans().
 */
void exchange_lend(struct exchange *exchange, uint32_t parcel, struct ring *ring);
/* Ends the loan of the parcel's slot. Call it when all nodes have the elements that they own. */
void exchange_end_loan(struct exchange *exchange, uint32_t parcel);
/* Ends all loans. Call it when the step is committed or aborted. */
void exchange_end_loans(struct exchange *exchange);
/* Return: whether this node owns elements of the parcel, and so adds all nodes' pieces of them. */
bool exchange_owns_any(const struct exchange *exchange, uint32_t parcel);
/* Makes the engine unmap the ring. Call it before the ring is freed. */
void exchange_ring_is_gone(struct exchange *exchange, const struct ring *ring);

/* Starts the motion. Return: NULL, or a static sentence why the motion is impossible, and the generation must end. */
const char *exchange_parcel(struct exchange *exchange, const struct exchange_said *said);
const char *exchange_spread(struct exchange *exchange, const struct exchange_said *said);
/* Node 0, stage 3: keeps initial weights of rank 0 for their owners. Any thread. Return: 0 or -errno. */
int exchange_init(struct exchange *exchange, const struct request_init *init, const void *weights);
/* Frees the pages of the initial weights. Call it when all owners have them. */
void exchange_spread_is_over(struct exchange *exchange);
const char *exchange_gather(struct exchange *exchange, const struct exchange_said *said);

/*
 * Fetches the elements of the parameters that other nodes own. This node's elements do not change. A gather by GPUs
 * differs: it fetches all elements of all parameters, and never returns 1. Fetches of state run one after the other.
 * Return: 0; 1 if nothing has to be fetched; or -ENOMEM. done() is called only after 0.
 */
int exchange_fetch(struct exchange *exchange, const struct fetch *fetch);
/* Repeats all requests to node 0 for fetches that have not ended. */
void exchange_ask_again(struct exchange *exchange);
/* Sends this node's elements of the fetch, or receives them if this node fetches. Return: as exchange_parcel(). */
const char *exchange_serve(struct exchange *exchange, const struct exchange_service *service);
/* Ends all fetches of this node. Calls the done() of each with -ECANCELED. */
void exchange_cancel(struct exchange *exchange);

/* Shares the segment of the open write window with the engine. NULL: the window has ended. */
void exchange_window(struct exchange *exchange, const struct segment *segment);
/*
 * Sends rank 0's edits from node 0's window to the owners' windows. written: the edited arrays of the state, each as
 * parameter << 8 | enum state_kind. edits: the memory of the edited state on this node; NULL: no state was edited.
 */
const char *exchange_write(struct exchange *exchange, const struct exchange_said *said, const uint64_t *written,
                           size_t n_written, const struct state_edits *edits);

/* Handles the engine's report that an order is done. */
void exchange_done(struct exchange *exchange, const struct engine_done *done);
/* Continues the parcel's waiting motions. Call it when its partial sums are in staging, or its slot was inspected. */
void exchange_summed(struct exchange *exchange, uint32_t parcel);
/* Drops the motions that have not arrived. Call it when the engine is gone. */
void exchange_broken(struct exchange *exchange);
/* Lists the tags of motions that arrived but are not finished. Writes at most max tags. Return: their number. */
size_t exchange_list_arrived(const struct exchange *exchange, uint64_t *tags, size_t max);

/* Return: whether a parcel is moving. */
bool exchange_is_busy(const struct exchange *exchange);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Internal to exchange.c, exchange-device.c, exchange-weights.c and exchange-fetch.c. */

#include "core/base/worker.h"
#include "core/budget/exchange-plan.h"
#include "core/wire/node-wire.h"
#include "daemon/exchange/exchange.h"

/* A piece of a node. All nodes number the sources alike, in rank order. */
struct source {
    unsigned node, first_rank, piece; /* piece: its number within the node */
};

enum motion_kind { MOTION_PARCEL, MOTION_SPREAD, MOTION_GATHER, MOTION_FETCH, MOTION_WRITE };

/* A motion. Its orders to the engine have the tags [tag, tag + n_orders). */
struct motion {
    enum motion_kind kind;
    struct exchange *exchange;
    uint64_t tag;
    uint32_t parcel, micro_batch, pass, attempt;
    uint32_t n_orders, n_done;
    bool serves;        /* this node already has the data, and only sends */
    bool waits;         /* until this node's partial sums are made, or this node's slot is inspected */
    bool arrived;       /* all orders are done; adding or adopting may still follow */
    bool working;       /* workers add or adopt, or this node's GPUs carry out the motion */
    bool on_devices;    /* moves between GPUs, in the sequence of node 0's announcements */
    bool given;         /* on_devices: submitted to the engine of the GPUs */
    int incoming;       /* MOTION_PARCEL: the slot of `incoming` for other nodes' pieces; -1: no slot */
    uint64_t *masks;    /* MOTION_PARCEL: for each part, a mask of its sources; owned */
    uint64_t elsewhere; /* MOTION_PARCEL: mask of nodes that have the data */
    struct ring *ring;  /* the ring whose slot is being added; held */
    struct pending_fetch *fetch;
    struct device_fetched *gathered; /* a fetch between GPUs: its parameters; owned */
    size_t n_gathered;
    unsigned rank; /* a fetch between GPUs: the rank whose pool gets the parameters */
    struct work work;
    struct motion *next;
};

/* The exchange's data of a parcel. struct parcel has the parcel's state (daemon/step/parcel.h). */
struct moving_parcel {
    struct ring *ring;       /* the ring of the lent slot, held; or NULL */
    uint64_t start, n_elems; /* this node owns [start, start + n_elems), counted from the parcel's start */
};

/* A fetch of this node that has not ended. */
struct pending_fetch {
    uint64_t id;
    struct fetch what; /* params and offsets_bytes are owned */
    uint64_t *ids;     /* what.params in the type of messages; owned */
    bool asked;        /* node 0 was asked; a fetch of state first waits for earlier fetches of state */
    struct pending_fetch *next;
};

/* A parameter's elements that this node owns and another node fetches. */
struct serving {
    struct exchange *exchange;
    uint64_t tag;
    uint32_t param;
    enum fetch_kind kind;
    unsigned node;
    int slot;  /* -1: waits for a slot, or needs no slot */
    bool made; /* rounded, widened or copied from GPUs into a slot before it is sent */
    bool working, dead;
    struct work work;
    struct serving *next;
};

struct exchange {
    struct job *job;
    struct exchange_ops ops;
    unsigned n_nodes, self;
    struct span *spans;
    struct source sources[STEP_MAX_RANKS];
    unsigned n_sources;
    struct segment incoming, serving, spreading;
    uint64_t incoming_elems; /* elements of each slot of `incoming` */
    bool incoming_taken[NODE_MAX_MOVING];
    struct segment nothing; /* shared in place of a removed segment, so that the engine unmaps it */
    const struct segment *segments[EXCHANGE_N_SEGMENTS];
    const struct ring *shared_ring; /* the ring that the engine maps, or NULL */
    struct moving_parcel *parcels;  /* one for each parcel of the layout; owned */
    struct motion *motions;
    struct pending_fetch *fetches; /* oldest first */
    struct serving *servings;      /* oldest first */
    uint64_t slot_bytes;           /* bytes of each slot of `serving` */
    bool slots_taken[SERVING_SLOTS];
    uint64_t last_fetch;
    struct engine_move *moves; /* ENGINE_MAX_MOVES */
    size_t n_moves;
    uint64_t n_waiting_bytes; /* of orders that are not done */
};

/* Why this node cannot carry out an announcement of node 0. */
#define EXCHANGE_NO_MEMORY "out of memory"
#define EXCHANGE_SAID_TWICE "what is under way was said again"

void exchange_add_move(struct exchange *exchange, struct engine_move move);
/*
 * Submits the added moves to the engine as one order with that tag. The timeout grows with the bytes of unfinished
 * orders. Return: false if no move was added.
 */
bool exchange_post(struct exchange *exchange, uint64_t tag, enum traffic_kind traffic);
/* Return: the motion, or NULL if there is no memory. */
struct motion *exchange_add_motion(struct exchange *exchange, enum motion_kind kind, uint64_t tag);
/* exchange_post() for the motion's next order. */
void exchange_post_motion(struct exchange *exchange, struct motion *motion);
/* exchange_add_motion() for a motion that node 0 has announced. */
struct motion *exchange_add_said(struct exchange *exchange, enum motion_kind kind, const struct exchange_said *said);
/* Return: whether the motion is already under way on this node, so that its sums would be added twice. */
bool exchange_is_said_twice(const struct exchange *exchange, const struct exchange_said *said);
/* Adds, adopts or finishes the motion if its orders are done and it does not wait. */
void exchange_progress(struct motion *motion);
/* Ends the motion. Reports it to node 0, unless this node only sent or the parcel's attempt was aborted. */
void exchange_finish(struct motion *motion);
/* Ends the motion without a report. */
void exchange_drop_motion(struct motion *motion);
/* Shares the segment under that number with this engine and later ones. NULL: removes the number's segment. */
void exchange_share(struct exchange *exchange, enum exchange_segment number, const struct segment *segment);

static inline bool exchange_has_arrived(const struct exchange_said *said, unsigned node)
{
    return said->arrived >> node & 1;
}

/* exchange-device.c */
/* Submits the motion to the GPUs' engine after all earlier motions. Return: NULL, or why the generation must end. */
const char *exchange_give_to_devices(struct motion *motion);

/* exchange-weights.c */
/* Sets the owned masters to the exact values of the initial weights, and then finishes the motion. */
void exchange_adopt(struct motion *motion);

/* exchange-fetch.c */
int exchange_form_serving(struct exchange *exchange);
void exchange_drop_serving(struct exchange *exchange);
void exchange_finish_fetch(struct exchange *exchange, struct pending_fetch *fetch, int result);
/* Ends the serving with that tag, because its order is done. */
void exchange_served(struct exchange *exchange, uint64_t tag);
void exchange_break_serving(struct exchange *exchange);

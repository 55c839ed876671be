/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of exchange.c, exchange-device.c, exchange-weights.c and exchange-fetch.c. */

#include "core/base/worker.h"
#include "core/budget/exchange-plan.h"
#include "core/wire/node-wire.h"
#include "daemon/exchange/exchange.h"

/* A piece of a node. Sources are numbered in rank order, so all nodes use the same numbers. */
struct source {
    unsigned node, first_rank, piece; /* piece: within its node */
};

enum motion_kind { MOTION_PARCEL, MOTION_SPREAD, MOTION_GATHER, MOTION_FETCH, MOTION_WRITE };

/* Orders [tag, tag + n_orders) of the engine. */
struct motion {
    enum motion_kind kind;
    struct exchange *exchange;
    uint64_t tag;
    uint32_t parcel, micro_batch, pass, attempt;
    uint32_t n_orders, n_done;
    bool serves;        /* the data arrived here before: this node only sends */
    bool waits;         /* for this node's partial sums of the parcel, or for its slot to be inspected */
    bool arrived;       /* all orders are done; adding or adopting may be still to do */
    bool working;       /* workers add or adopt, or this node's GPUs carry out the motion */
    bool on_devices;    /* between GPUs: ordered in the sequence in which node 0 said the motions */
    bool given;         /* on_devices: the engine of the GPUs has the order */
    int incoming;       /* MOTION_PARCEL: the slot of `incoming` for other nodes' pieces; -1: none come */
    uint64_t *masks;    /* MOTION_PARCEL: per part, over sources; owned */
    uint64_t elsewhere; /* MOTION_PARCEL: nodes that have the data already */
    struct ring *ring;  /* the ring whose slot is being added; held */
    struct pending_fetch *fetch;
    struct device_fetched *gathered; /* a fetch between GPUs: its parameters; owned */
    size_t n_gathered;
    unsigned rank; /* a fetch between GPUs: the rank whose pool gets them */
    struct work work;
    struct motion *next;
};

/* The exchange's view of a parcel. struct parcel has the parcel's state (daemon/step/parcel.h). */
struct moving_parcel {
    struct ring *ring;       /* the ring of the slot that is lent; held; or NULL */
    uint64_t start, n_elems; /* this node owns [start, start + n_elems), counted from the parcel's start */
};

/* A fetch of this node, until its data has come. */
struct pending_fetch {
    uint64_t id;
    struct fetch what; /* params and offsets_bytes are owned */
    bool asked;                 /* node 0 has been asked; a fetch of state waits for earlier fetches of state */
    struct pending_fetch *next;
};

/* A parameter's elements that this node owns and another one fetches. */
struct serving {
    struct exchange *exchange;
    uint64_t tag;
    uint32_t param;
    enum fetch_kind kind;
    unsigned node;
    int slot; /* -1: waits for a slot, or needs none */
    bool made; /* rounded, or copied from GPUs, into a slot before it is sent */
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
    uint64_t incoming_elems; /* of each slot of incoming */
    bool incoming_taken[NODE_MAX_MOVING];
    struct segment nothing; /* takes the number of a segment that is no longer shared, so that the engine unmaps that */
    const struct segment *segments[EXCHANGE_N_SEGMENTS];
    const struct ring *shared_ring; /* the ring that the engine has; NULL: none */
    struct moving_parcel *parcels;  /* of the layout; owned */
    struct motion *motions;
    struct pending_fetch *fetches; /* oldest first */
    struct serving *servings;      /* oldest first */
    uint64_t slot_bytes;           /* of serving */
    bool slots_taken[SERVING_SLOTS];
    uint64_t last_fetch;
    struct engine_move *moves; /* ENGINE_MAX_MOVES */
    size_t n_moves;
    uint64_t n_waiting_bytes; /* of orders under way */
};

/* Why something that node 0 has said cannot be done. */
#define EXCHANGE_NO_MEMORY "out of memory"
#define EXCHANGE_SAID_TWICE "what is under way was said again"

void exchange_add_move(struct exchange *exchange, struct engine_move move);
/*
 * Orders the added moves from the engine under that tag. The timeout grows with the bytes under way. Return: false,
 * nothing was added.
 */
bool exchange_post(struct exchange *exchange, uint64_t tag, enum traffic_kind traffic);
/* NULL: out of memory. */
struct motion *exchange_add_motion(struct exchange *exchange, enum motion_kind kind, uint64_t tag);
/* As exchange_post(), for the motion's next order. */
void exchange_post_motion(struct exchange *exchange, struct motion *motion);
/* As exchange_add_motion(), for a motion that node 0 has said. */
struct motion *exchange_add_said(struct exchange *exchange, enum motion_kind kind, const struct exchange_said *said);
/* Would this node carry out a motion a second time? Its sums would be added twice. */
bool exchange_is_said_twice(const struct exchange *exchange, const struct exchange_said *said);
/* Adds, adopts or finishes the motion once its orders are done and it waits for nothing. */
void exchange_progress(struct motion *motion);
/* Ends the motion, and reports it to node 0 unless this node only sent again or the parcel's attempt was aborted. */
void exchange_finish(struct motion *motion);
/* Ends the motion without a report. */
void exchange_drop_motion(struct motion *motion);
/* Shares the segment under that number with this engine and later ones. NULL: the number's segment is removed. */
void exchange_share(struct exchange *exchange, enum exchange_segment number, const struct segment *segment);

static inline bool exchange_has_arrived(const struct exchange_said *said, unsigned node)
{
    return said->arrived >> node & 1;
}

/* exchange-device.c */
/* Orders the motion when its turn has come. Return: NULL, or why the generation has to end. */
const char *exchange_give_to_devices(struct motion *motion);

/* exchange-weights.c */
/* Initial weights have come: sets the owned masters to their exact values, then finishes the motion. */
void exchange_adopt(struct motion *motion);

/* exchange-fetch.c */
int exchange_form_serving(struct exchange *exchange);
void exchange_drop_serving(struct exchange *exchange);
void exchange_finish_fetch(struct exchange *exchange, struct pending_fetch *fetch, int result);
/* An order that belongs to no motion is done. */
void exchange_served(struct exchange *exchange, uint64_t tag);
void exchange_break_serving(struct exchange *exchange);

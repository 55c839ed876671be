/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of exchange.c, exchange-device.c, exchange-weights.c and exchange-fetch.c. */

#include "core/base/worker.h"
#include "core/budget/exchange-plan.h"
#include "core/wire/node-wire.h"
#include "daemon/exchange/exchange.h"

/* A piece of a node; all nodes number them alike, in rank order. */
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
    bool serves;        /* it has arrived here before: it is only sent again */
    bool waits;         /* for this node's partial sums of the parcel, or for its slot to be looked at */
    bool arrived;       /* all orders are done; what is to be done with it may be not */
    bool working;       /* which is being done; or this node's GPUs are at it */
    bool on_devices;    /* between GPUs: given to the engine in the order in which it was said */
    bool given;         /* and it has been */
    int incoming;       /* of a parcel: where other nodes' pieces come to lie; -1: none come */
    uint64_t *masks;    /* likewise: per part, over sources */
    uint64_t elsewhere; /* nodes that have it */
    struct ring *ring;  /* whose slot is being added; held */
    struct pending_fetch *fetch;
    struct device_fetched *gathered; /* between GPUs, a fetch: what, owned, */
    size_t n_gathered;
    unsigned rank; /* and for whose pool */
    struct work work;
    struct motion *next;
};

/* What of a parcel moves. Its state is struct parcel's (daemon/step/parcel.h). */
struct moving_parcel {
    struct ring *ring;       /* in which the slot lies that is lent, held; or NULL */
    uint64_t start, n_elems; /* what this node owns of the parcel, from the parcel's start */
};

/* A fetch of this node, until it has come. */
struct pending_fetch {
    uint64_t id;
    struct fetch what; /* params and offsets_bytes are owned */
    bool asked;                 /* node 0 has been asked; state waits until what was asked before has come */
    struct pending_fetch *next;
};

/* A parameter's elements that this node owns and another one fetches. */
struct serving {
    struct exchange *exchange;
    uint64_t tag;
    uint32_t param;
    enum fetch_kind kind;
    unsigned node;
    int slot; /* -1: it goes as it is, or waits */
    bool made; /* here first, into a slot */
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
    struct segment nothing; /* in place of what is shared no more, so that the engine lets go of it */
    const struct segment *segments[EXCHANGE_N_SEGMENTS];
    const struct ring *shared_ring; /* that the engine has; NULL: none */
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
/* Gives what was added as the order of that tag; timeout by what is under way. Return: whether there was any. */
bool exchange_post(struct exchange *exchange, uint64_t tag, enum traffic_kind traffic);
/* NULL: out of memory. */
struct motion *exchange_add_motion(struct exchange *exchange, enum motion_kind kind, uint64_t tag);
/* As exchange_post(), for the motion's next order. */
void exchange_post_motion(struct exchange *exchange, struct motion *motion);
/* The same of what node 0 has said. */
struct motion *exchange_add_said(struct exchange *exchange, enum motion_kind kind, const struct exchange_said *said);
/* Is it to be done here a second time? Sums would be added twice. */
bool exchange_is_said_twice(const struct exchange *exchange, const struct exchange_said *said);
/* Goes on with it, if nothing is missing. */
void exchange_progress(struct motion *motion);
/* Done with it: node 0 is told, unless it was only sent again. Ends the motion. */
void exchange_finish(struct motion *motion);
/* Ends it without a word. */
void exchange_drop_motion(struct motion *motion);
/* Engines to come get it, too. NULL: it goes. */
void exchange_share(struct exchange *exchange, enum exchange_segment number, const struct segment *segment);

static inline bool exchange_has_arrived(const struct exchange_said *said, unsigned node)
{
    return said->arrived >> node & 1;
}

/* exchange-device.c */
/* In its turn. Return: NULL, or why the generation has to end. */
const char *exchange_give_to_devices(struct motion *motion);

/* exchange-weights.c */
/* Initial weights are here: masters of what is owned become their exact values. The motion's end follows. */
void exchange_adopt(struct motion *motion);

/* exchange-fetch.c */
int exchange_form_serving(struct exchange *exchange);
void exchange_drop_serving(struct exchange *exchange);
void exchange_finish_fetch(struct exchange *exchange, struct pending_fetch *fetch, int result);
/* An order is done that is none of a motion. */
void exchange_served(struct exchange *exchange, uint64_t tag);
void exchange_break_serving(struct exchange *exchange);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of nodes.c, nodes-report.c, nodes-engine.c and nodes-obey.c. */

#include "daemon/job/model/model.h"
#include "daemon/leader/leader.h"
#include "daemon/nodes/nodes.h"

/* What this node tells itself, in its turn. */
struct packet {
    struct packet *next;
    bool report; /* to the leader; else from it */
    size_t n_bytes;
    uint8_t data[];
};

struct nodes {
    struct job *job;
    struct nodes_ops ops;
    unsigned n, self;
    struct leader *leader; /* node 0's */
    struct exchange *exchange;
    struct packet *first, **last;
    struct wire_arena heard, said; /* what is said while something is heard needs room of its own */
    uint8_t *buffer;               /* NODE_MESSAGE_MAX_BYTES */
    uint32_t generation;
    bool connected;               /* all engines of the generation are */
    bool has_engine, has_devices; /* that of this node's host memory is, that of its GPUs */
    bool said_declared, said_unformed, said_request;
    bool withdraws;   /* and node 0 has not answered */
    bool holds_back;  /* of BACK, until it is answered */
    unsigned back;    /* the rank */
    uint64_t *passed; /* parcels, of passed_micro_batch: reported together */
    uint32_t n_passed, passed_micro_batch;
    uint64_t *masks;            /* scratch, per part of the largest parcel */
    struct wire_hyper *verdict; /* node 0: groups of the last one */
    struct manifest *shown;     /* per node, after SHOW; NULL: none are shown */
    unsigned n_shown;
    char why[640]; /* room for what an engine says */
};

/* nodes.c */
const char *nodes_address_of(const struct nodes *nodes, unsigned node);

/* nodes-report.c */
/* What this node has asked for has come, or is void: it may ask again. */
void nodes_end_request(struct nodes *nodes);
/* NODE_PASSED of what was passed since the last time. */
void nodes_flush_passed(struct nodes *nodes);
/* Of the exchange. */
void nodes_parcel_is_moved(void *userdata, uint64_t tag, uint32_t parcel);
void nodes_ask_fetch(void *userdata, const struct exchange_service *asked);

/* nodes-engine.c */
/* wrong: NULL, or why something that node 0 has said could not be done: then the engines are of no more use. */
void nodes_obeyed(struct nodes *nodes, const char *wrong);
void nodes_cannot_be_done(void *userdata, const char *why);
void nodes_hear_engine(struct nodes *nodes, const struct node_message *message);
void nodes_hear_value(struct nodes *nodes, const struct node_message *message);

/* nodes-obey.c */
/* Return: NULL, or why it makes no sense. */
const char *nodes_obey(struct nodes *nodes, const struct node_message *message);
bool nodes_judge(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                 struct node_message *hold);
void nodes_forget_shown(struct nodes *nodes);

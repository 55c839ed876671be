/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of nodes.c, nodes-coordinator.c, nodes-report.c, nodes-engine.c and nodes-obey.c. */

#include "daemon/job/model/coordinator.h"
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
    struct coordinator coordinator; /* what the job sees of it: nodes-coordinator.c */
    struct job *job;
    struct remote_ranks *remote_ranks;
    struct param_norm *param_norms; /* questions under way */
    uint64_t n_param_norms;         /* asked so far */
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
    bool said_declared, said_formed, said_unformed, said_request;
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

/* Return: 0 or -ENOMEM. */
int nodes_new(struct nodes **out, struct job *job, const struct nodes_ops *ops);
void nodes_free(struct nodes *nodes);

/* nodes.c and nodes-report.c, for the coordinator */
/* The layout stands. Return: 0 or -errno. */
int nodes_form(struct nodes *nodes);
void nodes_drop(struct nodes *nodes);

/* Any report; step, attempt and node are filled in. */
void nodes_report(struct nodes *nodes, struct node_message message);

/* Reports. Those that a settle makes are made once, until what they wait for has come. */
void nodes_declared(struct nodes *nodes, bool declared);
void nodes_formed(struct nodes *nodes);
void nodes_unformed(struct nodes *nodes, unsigned code, const char *why);
/* A node's daemon is configured differently: node 0 refuses the ranks of all others that wait to be formed. */
void nodes_differ(struct nodes *nodes, unsigned node, unsigned code, const char *why);
/* What a node's ranks declare, as it has shown; NULL: not all nodes have. */
const struct manifest *nodes_manifest(const struct nodes *nodes, unsigned node);
void nodes_have_weights(struct nodes *nodes);
void nodes_asked(struct nodes *nodes);
void nodes_want_norm(struct nodes *nodes);
void nodes_want_window(struct nodes *nodes);
/* edits: what of the state was written here, NULL: nothing. */
void nodes_end_window(struct nodes *nodes, const struct state_edits *edits, bool forget);
void nodes_stored(struct nodes *nodes);
void nodes_updated(struct nodes *nodes);
/*
 * What a rank's client says of what it misses; NULL: nothing any more. *digest: of what was told last, 0: nothing. What
 * was told is not told again, and one that is too large for a message is not told: then the texts do without.
 */
void nodes_evidence(struct nodes *nodes, unsigned rank, const struct request_evidence *evidence, uint64_t *digest);
/* A rank of this node is back that had left; all: all of the world had; late: the step was added up without it. */
void nodes_back(struct nodes *nodes, unsigned rank, bool all, bool late);
/* Whoever is back takes part when node 0 has heard of it, and what was asked for without it is settled. */
bool nodes_hold_back(const struct nodes *nodes);
/* reason: NULL, or why in the rank's words; taken. */
void nodes_abort(struct nodes *nodes, int64_t rank, const char *why, struct diagnostic *reason);

/* All that this node has of a parcel is pushed: what the reduction, which is prepared, will sum. */
void nodes_ready(struct nodes *nodes, const struct reduction *reduction);
/* A rank gives up its backward: what was announced and is not awaited is to be taken back; job_withdrawn() comes,
 * unless the step is aborted. Nothing is announced until then. */
void nodes_withdraw(struct nodes *nodes);
bool nodes_withdraws(const struct nodes *nodes);
/* This node has nothing more of the parcel in that micro-batch. */
void nodes_passed(struct nodes *nodes, uint32_t parcel, uint32_t micro_batch);

/* nodes-send.c */
/* Node 0, to all nodes. */
void nodes_say(struct nodes *nodes, const struct node_message *message);
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

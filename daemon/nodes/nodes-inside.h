/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of nodes.c and nodes-*.c. */

#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/leader/leader.h"
#include "daemon/nodes/nodes.h"

/* A queued message: from this node to itself, or a report that waits until the leader has the KEPT of all nodes. */
struct packet {
    struct packet *next;
    bool report;   /* a report to the leader; else a message from the leader */
    unsigned node; /* the node that sent the report */
    size_t n_bytes;
    uint8_t data[];
};

/* nodes-stop.c */
struct nodes_stop {
    bool is_told, others_are; /* this daemon was told to stop; a daemon of the job was */
    bool may;                 /* MAY_STOP was received: all nodes have ended the decided step and window */
    bool is_said;             /* ENDED was reported for this step and n_windows */
    uint64_t step, n_windows;
};

struct nodes {
    struct coordinator coordinator; /* the job's view of this struct: nodes-coordinator.c */
    struct job *job;
    struct remote_ranks *remote_ranks;
    struct param_norm *param_norms; /* questions that wait for answers */
    uint64_t n_param_norms;         /* number of questions asked so far */
    struct nodes_ops ops;
    unsigned n, self;
    struct leader *leader; /* on node 0; else NULL */
    struct exchange *exchange;
    struct packet *first, **last;
    struct packet *held, **last_held; /* reports that wait until the leader has the KEPT of all nodes */
    struct wire_arena heard, said;    /* two arenas, because handling a message sends other messages */
    uint8_t *buffer;                  /* NODE_MESSAGE_MAX_BYTES */
    uint32_t generation;
    bool connected;               /* all engines of the generation are connected */
    bool has_engine, has_devices; /* this node's engine for host memory, for its GPUs, is connected */
    bool said_declared, said_formed, said_unformed, said_request;
    bool updated, stored; /* UPDATED, STORED was reported */
    bool ends;            /* COMMIT or CLOSED is being obeyed, and the job has not left the phase yet */
    bool commits, closes; /* COMMIT, CLOSED came early, because a predecessor had reported UPDATED, STORED */
    bool said_kept;       /* KEPT was reported, and the ENGINE that answers it was not received */
    uint8_t *decided;     /* node 0: the packed DECIDED of the step, or NULL; owned */
    size_t n_decided_bytes;
    bool said_want_save; /* WANT_SAVE was reported, and no SAVE or SAVE_END was received since */
    uint64_t load_tag;   /* tag of the last LOAD; MOVED reports it */
    bool trains;         /* replay: the journal has TRAIN, which is obeyed after all other records */
    struct nodes_stop stop;
    bool withdraws;   /* a withdrawal was reported, and node 0 has not answered */
    bool holds_back;  /* BACK was, or is to be, reported, and node 0 has not answered */
    unsigned back;    /* the rank of the last BACK that was, or is to be, reported */
    bool back_waits;  /* BACK is still to be reported, after ENGINE */
    uint64_t *passed; /* parcels passed over in passed_micro_batch, which are reported together */
    uint32_t n_passed, passed_micro_batch;
    uint64_t *masks;            /* scratch, per part of the largest parcel */
    struct wire_hyper *verdict; /* node 0: groups of the last verdict */
    struct manifest *shown;     /* the manifest of each node, after SHOW; else NULL */
    unsigned n_shown;
    char why[640]; /* large enough for an engine's text */
};

/* Return: 0 or -ENOMEM. */
int nodes_new(struct nodes **out, struct job *job, const struct nodes_ops *ops);
void nodes_free(struct nodes *nodes);

/* nodes.c and nodes-report.c, for the coordinator */
/* Allocates memory for the layout, and forms exchange and leader. The job must have its layout. Return: 0 or -errno. */
int nodes_form(struct nodes *nodes);
void nodes_drop(struct nodes *nodes);

/* Reports the message to node 0. Sets its step, attempt and node. */
void nodes_report(struct nodes *nodes, struct node_message message);

/* Reports to node 0. If job_settle() calls a function again before node 0 has answered, that call reports nothing. */
void nodes_declared(struct nodes *nodes, bool declared);
void nodes_formed(struct nodes *nodes);
void nodes_unformed(struct nodes *nodes, unsigned code, const char *why);
/* Call it when another node's daemon is configured differently. Node 0 then refuses nodes that wait to be formed. */
void nodes_differ(struct nodes *nodes, unsigned node, unsigned code, const char *why);
/* Return: the manifest that the node has shown for its ranks, or NULL if not all nodes have shown theirs. */
const struct manifest *nodes_manifest(const struct nodes *nodes, unsigned node);
void nodes_have_weights(struct nodes *nodes);
void nodes_asked(struct nodes *nodes);
void nodes_want_norm(struct nodes *nodes);
void nodes_want_window(struct nodes *nodes);
/* edits: the state that was written on this node, or NULL. */
void nodes_end_window(struct nodes *nodes, const struct state_edits *edits, bool forget);
void nodes_stored(struct nodes *nodes);
void nodes_updated(struct nodes *nodes);
/*
 * Reports the evidence of a rank's client about missing gradients. evidence: NULL if it is void. *digest: the digest of
 * the evidence that was reported last, or 0. Equal evidence is not reported again. Evidence that is too large for a
 * message counts as void, so that diagnostics lack it.
 */
void nodes_evidence(struct nodes *nodes, unsigned rank, const struct request_evidence *evidence, uint64_t *digest);
/*
 * Reports that a rank of this node is back, after it had left. all: all ranks of the world had left. late: the step was
 * summed without the rank.
 */
void nodes_back(struct nodes *nodes, unsigned rank, bool all, bool late);
/* Must a rank that is back wait? It must until node 0 knows of it, and requests made without the rank are settled. */
bool nodes_hold_back(const struct nodes *nodes);
/* Reports an abort. reason: a diagnostic, whose reference nodes_abort() takes over, or NULL. */
void nodes_abort(struct nodes *nodes, int64_t rank, const char *why, struct diagnostic *reason);
/* Reports again the aborts for which this node's ranks wait, and the abort for which this node has a reason. */
void nodes_abort_again(struct nodes *nodes);

/* Reports what the prepared reduction will sum. Call it when all ranks of this node have pushed the parcel. */
void nodes_ready(struct nodes *nodes, const struct reduction *reduction);
/*
 * Call it when a rank gives up its backward. Asks node 0 to withdraw the parcels that this node has reported ready,
 * except those that an exchange moves. job_withdrawn() is called later, unless the step is aborted; until then no
 * parcel is reported ready.
 */
void nodes_withdraw(struct nodes *nodes);
bool nodes_withdraws(const struct nodes *nodes);
/* Reports that this node pushes nothing more of the parcel in that micro-batch. */
void nodes_passed(struct nodes *nodes, uint32_t parcel, uint32_t micro_batch);

/*
 * nodes_loaded() reports that this node has loaded the checkpoint of the step, or found none. nodes_resumed() reports
 * that it continues from that checkpoint.
 */
void nodes_loaded(struct nodes *nodes, bool found, uint64_t step, uint64_t digest);
void nodes_resumed(struct nodes *nodes);
void nodes_want_save(struct nodes *nodes);

/* nodes-record.c */
/* Does the journal record node 0's messages of this kind? */
bool nodes_records(enum node_kind kind);
/* Records a message of node 0 that is being obeyed. packed: the message as it was received. */
void nodes_record(struct nodes *nodes, const struct node_message *message, const uint8_t *packed, size_t n_bytes);
/* Node 0: records irrevocable messages before they are sent, for the next daemon. Other kinds are not recorded. */
void nodes_record_said(struct nodes *nodes, enum node_kind kind, const uint8_t *packed, size_t n_bytes);
/* Keeps a copy of the packed DECIDED for nodes_decide_again(). */
void nodes_keep_packed(struct nodes *nodes, const uint8_t *packed, size_t n_bytes);

/* nodes-stand.c */
/* nodes_commit() obeys COMMIT after this node has updated. nodes_close() obeys CLOSED after this node has stored. */
void nodes_commit(struct nodes *nodes);
void nodes_close(struct nodes *nodes);
/* Reports this node's position in the run (KEPT). Call it when the leader or the daemon of this node is new. */
void nodes_stand(struct nodes *nodes);
/* Call it when new engines begin. If KEPT was reported, repeats earlier requests, because the leader may lack them. */
void nodes_ask_again(struct nodes *nodes);

/* nodes-stop.c */
/* Reports ENDED if a daemon of the job is told to stop, once for each step and window. */
void nodes_report_end(struct nodes *nodes);
/* Obeys MAY_STOP or WANT_ENDED. */
void nodes_hear_stop(struct nodes *nodes, enum node_kind kind);
/* Forgets ENDED and MAY_STOP, which are sent again. Call it when the leader was replaced, or the run has ended. */
void nodes_forget_stop(struct nodes *nodes);

/* nodes-kept.c */
/* Replays a recorded message of node 0. Return: 0 or -EINVAL. */
int nodes_repeat(struct nodes *nodes, const void *packed, size_t n_bytes);
/* Continues a job that this daemon has adopted from its predecessor. */
void nodes_go_on(struct nodes *nodes);
/*
 * Declares this node's part of a job again. Call it when another node has lost its part, and the job has no weights
 * yet.
 */
void nodes_form_anew(struct nodes *nodes, const char *why);

/* nodes-send.c */
/*
 * Appends a copy of the message to a list. *end: the last link of the list. Return: true; or false if memory is out,
 * which is logged.
 */
bool nodes_append(struct packet ***end, const struct packet *packet, const void *data);
/* Node 0: sends the message to one node. */
void nodes_tell(void *userdata, unsigned node, const struct node_message *message);
/* Node 0: sends a packed message to one node. */
void nodes_send_packed(struct nodes *nodes, unsigned node, const uint8_t *packed, size_t n_bytes);
/* Node 0: sends the last DECIDED to one node again. */
void nodes_decide_again(void *userdata, unsigned node);
/* Node 0: sends the message to all nodes. */
void nodes_say(struct nodes *nodes, const struct node_message *message);
const char *nodes_address_of(const struct nodes *nodes, unsigned node);

/* nodes-report.c */
/* Ends this node's request, which was answered or is void. This node may then ask again. */
void nodes_end_request(struct nodes *nodes);
/* Sends NODE_PASSED for the parcels that were passed over since the last call. */
void nodes_flush_passed(struct nodes *nodes);
/* Callbacks of the exchange: struct exchange_ops. */
void nodes_parcel_is_moved(void *userdata, uint64_t tag, uint32_t parcel);
void nodes_ask_fetch(void *userdata, const struct exchange_service *asked);

/* nodes-engine.c */
/* wrong: why a message of node 0 could not be executed; then ends the generation of engines. NULL: does nothing. */
void nodes_obeyed(struct nodes *nodes, const char *wrong);
void nodes_cannot_be_done(void *userdata, const char *why);
void nodes_hear_engine(struct nodes *nodes, const struct node_message *message);
void nodes_hear_value(struct nodes *nodes, const struct node_message *message);

/* nodes-obey.c */
/* Obeys a message. packed: the message as it was received. Return: NULL, or why the message is not valid. */
const char *nodes_obey(struct nodes *nodes, const struct node_message *message, const uint8_t *packed, size_t n_bytes);
void nodes_train(struct nodes *nodes);
bool nodes_judge(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                 struct node_message *hold);
void nodes_forget_shown(struct nodes *nodes);

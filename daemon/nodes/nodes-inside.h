/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of nodes.c and nodes-*.c. */

#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/leader/leader.h"
#include "daemon/nodes/nodes.h"

/* A message from this node to itself, queued so that it is served in its turn; or a report that the leader hears later.
 */
struct packet {
    struct packet *next;
    bool report;   /* to the leader; else from it */
    unsigned node; /* a report: whose */
    size_t n_bytes;
    uint8_t data[];
};

/* nodes-stop.c */
struct nodes_stop {
    bool is_told, others_are; /* to stop: this daemon; any daemon of the job */
    bool may;                 /* all nodes have ended what was decided */
    bool is_said;             /* ENDED, for the place below */
    uint64_t step, n_windows;
};

struct nodes {
    struct coordinator coordinator; /* the job's view of this struct: nodes-coordinator.c */
    struct job *job;
    struct remote_ranks *remote_ranks;
    struct param_norm *param_norms; /* questions under way */
    uint64_t n_param_norms;         /* asked so far */
    struct nodes_ops ops;
    unsigned n, self;
    struct leader *leader; /* node 0's */
    struct exchange *exchange;
    struct packet *first, **last;
    struct packet *held, **last_held; /* reports, while the leader waits for the KEPT of all nodes */
    struct wire_arena heard, said;    /* two, because messages are sent while one is being served */
    uint8_t *buffer;                  /* NODE_MESSAGE_MAX_BYTES */
    uint32_t generation;
    bool connected;               /* all engines of the generation are connected */
    bool has_engine, has_devices; /* connected: this node's engine for host memory, for its GPUs */
    bool said_declared, said_formed, said_unformed, said_request;
    bool updated, stored; /* the decided step, the window: reported */
    bool ends;            /* COMMIT or CLOSED is being obeyed: what is held for ranks is still brought up to it */
    bool commits, closes; /* COMMIT, CLOSED has come, and this daemon is not done yet: the one before it was */
    bool said_kept;       /* where this node stands, and the ENGINE that answers it has not come */
    uint8_t *decided;     /* node 0: the DECIDED of the step, packed; owned, NULL: none */
    size_t n_decided_bytes;
    bool said_want_save; /* a save was asked for, and node 0 has not said one */
    uint64_t load_tag;   /* of the LOAD that says that all nodes have loaded the same checkpoint */
    bool trains;      /* TRAIN was recorded, and the daemon before had not obeyed it yet */
    struct nodes_stop stop;
    bool withdraws;   /* a withdrawal was reported, and node 0 has not answered */
    bool holds_back;  /* BACK was, or is to be, reported, and node 0 has not answered */
    unsigned back;    /* the rank of that BACK */
    bool back_waits;  /* BACK is still to be reported, after ENGINE */
    uint64_t *passed; /* parcels that were passed over in passed_micro_batch: reported together */
    uint32_t n_passed, passed_micro_batch;
    uint64_t *masks;            /* scratch, per part of the largest parcel */
    struct wire_hyper *verdict; /* node 0: groups of the last verdict */
    struct manifest *shown;     /* per node, after SHOW; NULL: none are shown */
    unsigned n_shown;
    char why[640]; /* large enough for an engine's text */
};

/* Return: 0 or -ENOMEM. */
int nodes_new(struct nodes **out, struct job *job, const struct nodes_ops *ops);
void nodes_free(struct nodes *nodes);

/* nodes.c and nodes-report.c, for the coordinator */
/* The layout is known. Return: 0 or -errno. */
int nodes_form(struct nodes *nodes);
void nodes_drop(struct nodes *nodes);

/* Any report; step, attempt and node are filled in. */
void nodes_report(struct nodes *nodes, struct node_message message);

/* Reports. A report from a settle is made once, until its answer has come. */
void nodes_declared(struct nodes *nodes, bool declared);
void nodes_formed(struct nodes *nodes);
void nodes_unformed(struct nodes *nodes, unsigned code, const char *why);
/* A node's daemon is configured differently: node 0 refuses the ranks of all others that wait to be formed. */
void nodes_differ(struct nodes *nodes, unsigned node, unsigned code, const char *why);
/* The manifest that a node has shown for its ranks. NULL: not all nodes have shown theirs. */
const struct manifest *nodes_manifest(const struct nodes *nodes, unsigned node);
void nodes_have_weights(struct nodes *nodes);
void nodes_asked(struct nodes *nodes);
void nodes_want_norm(struct nodes *nodes);
void nodes_want_window(struct nodes *nodes);
/* edits: the state that was written here; NULL: none. */
void nodes_end_window(struct nodes *nodes, const struct state_edits *edits, bool forget);
void nodes_stored(struct nodes *nodes);
void nodes_updated(struct nodes *nodes);
/*
 * Reports the evidence of a rank's client about missing gradients; NULL: it is void. *digest: of the evidence that was
 * reported last, 0: none. Equal evidence is not reported again, and evidence that is too large for a message is not
 * reported: the texts then do without it.
 */
void nodes_evidence(struct nodes *nodes, unsigned rank, const struct request_evidence *evidence, uint64_t *digest);
/*
 * A rank of this node that had left is back. all: all ranks of the world had left; late: the step was summed without
 * it.
 */
void nodes_back(struct nodes *nodes, unsigned rank, bool all, bool late);
/* Must a rank that is back wait? It takes part once node 0 knows of it, and requests made without it are settled. */
bool nodes_hold_back(const struct nodes *nodes);
/* reason: NULL, or the diagnostic; its reference is passed on. */
void nodes_abort(struct nodes *nodes, int64_t rank, const char *why, struct diagnostic *reason);
/* Reports the aborts again that this node's ranks wait for, or that it has a reason for. */
void nodes_abort_again(struct nodes *nodes);

/* All ranks of this node have pushed the parcel: reports what the prepared reduction will sum. */
void nodes_ready(struct nodes *nodes, const struct reduction *reduction);
/*
 * Called when a rank gives up its backward. Asks node 0 to withdraw the parcels that this node has announced and that
 * nobody waits for. job_withdrawn() follows, unless the step is aborted; until then no parcel is announced.
 */
void nodes_withdraw(struct nodes *nodes);
bool nodes_withdraws(const struct nodes *nodes);
/* This node will push nothing more of the parcel in that micro-batch. */
void nodes_passed(struct nodes *nodes, uint32_t parcel, uint32_t micro_batch);

/* This node has loaded the checkpoint of the step, or found none; and goes on with it. */
void nodes_loaded(struct nodes *nodes, bool found, uint64_t step, uint64_t digest);
void nodes_resumed(struct nodes *nodes);
void nodes_want_save(struct nodes *nodes);

/* nodes-record.c */
/* Are such messages of node 0 recorded? */
bool nodes_records(enum node_kind kind);
/* A message of node 0 that is being obeyed. packed: as it came. */
void nodes_record(struct nodes *nodes, const struct node_message *message, const uint8_t *packed, size_t n_bytes);
/* Node 0 says a message. Of what cannot be taken back the next daemon must know before any node hears of it. */
void nodes_record_said(struct nodes *nodes, enum node_kind kind, const uint8_t *packed, size_t n_bytes);
/* For nodes_decide_again(). */
void nodes_keep_packed(struct nodes *nodes, const uint8_t *packed, size_t n_bytes);

/* nodes-stand.c */
/* The COMMIT that has come, once this node has updated; the CLOSED that has come, once it has stored. */
void nodes_commit(struct nodes *nodes);
void nodes_close(struct nodes *nodes);
/* Reports where this node stands, to a leader that may not know. */
void nodes_stand(struct nodes *nodes);
/* Engines begin again. If this node has said where it stands, the leader may not have heard what was asked before. */
void nodes_ask_again(struct nodes *nodes);

/* nodes-stop.c */
/* If a daemon of the job is told to stop: reports ENDED, once for each step and window. */
void nodes_report_end(struct nodes *nodes);
/* MAY_STOP or WANT_ENDED. */
void nodes_hear_stop(struct nodes *nodes, enum node_kind kind);
/* After the leader was replaced, or the run has ended: drops ENDED and MAY_STOP, which are sent again. */
void nodes_forget_stop(struct nodes *nodes);

/* nodes-kept.c */
/* Obeys a recorded message of node 0, as the daemon before did. Return: 0 or -EINVAL. */
int nodes_repeat(struct nodes *nodes, const void *packed, size_t n_bytes);
/* The job was taken over from the daemon before. */
void nodes_go_on(struct nodes *nodes);
/* Another node has lost what it had of a job that has no weights yet: this one declares again what it has. */
void nodes_form_anew(struct nodes *nodes, const char *why);

/* nodes-send.c */
/* Appends a copy of the message to the list that ends there. Return: false: no memory, which is logged. */
bool nodes_append(struct packet ***end, const struct packet *packet, const void *data);
/* Node 0: sends the message to one node. */
void nodes_tell(void *userdata, unsigned node, const struct node_message *message);
/* Node 0: likewise, of a message that is packed. */
void nodes_send_packed(struct nodes *nodes, unsigned node, const uint8_t *packed, size_t n_bytes);
/* Sends the last DECIDED to one node. */
void nodes_decide_again(void *userdata, unsigned node);
/* Node 0: sends the message to all nodes. */
void nodes_say(struct nodes *nodes, const struct node_message *message);
const char *nodes_address_of(const struct nodes *nodes, unsigned node);

/* nodes-report.c */
/* This node's request was answered, or is void: it may ask again. */
void nodes_end_request(struct nodes *nodes);
/* Sends NODE_PASSED for the parcels that were passed over since the last call. */
void nodes_flush_passed(struct nodes *nodes);
/* Callbacks of the exchange: struct exchange_ops. */
void nodes_parcel_is_moved(void *userdata, uint64_t tag, uint32_t parcel);
void nodes_ask_fetch(void *userdata, const struct exchange_service *asked);

/* nodes-engine.c */
/* wrong: NULL, or why a message from node 0 could not be carried out: then the generation of engines ends. */
void nodes_obeyed(struct nodes *nodes, const char *wrong);
void nodes_cannot_be_done(void *userdata, const char *why);
void nodes_hear_engine(struct nodes *nodes, const struct node_message *message);
void nodes_hear_value(struct nodes *nodes, const struct node_message *message);

/* nodes-obey.c */
/* packed: the message as it came. Return: NULL, or why the message is not valid. */
const char *nodes_obey(struct nodes *nodes, const struct node_message *message, const uint8_t *packed, size_t n_bytes);
void nodes_train(struct nodes *nodes);
bool nodes_judge(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                 struct node_message *hold);
void nodes_forget_shown(struct nodes *nodes);

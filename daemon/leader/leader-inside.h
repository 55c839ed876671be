/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The leader's parts, from bottom to top; each calls only those above it in this list:
 *
 *   leader-inside.c   messages to all nodes, motions, forgotten requests and steps, abort
 *   leader-parcel.c   the positions of nodes in parcels, and exchanges of parcels
 *   leader-step.c     the step: requests, verdict, update, commit
 *   leader-window.c   write windows
 *   leader-recover.c  generations of engines
 *   leader-stop.c     daemons that are told to stop, and may not stop yet
 *   leader-save.c     checkpoints: all nodes save the same step, or begin with the same one
 *   leader-kept.c     nodes, including node 0, whose daemon was replaced
 *   leader.c          life, forming, fetches, reports, nodes that the leader waits for
 */

#include "daemon/leader/leader.h"

enum leader_phase {
    LEADER_DECLARING,
    LEADER_SHOWING,   /* nodes show manifests that differ, before they are refused */
    LEADER_RETURNING, /* the leader is new in the run, and nodes report their positions */
    LEADER_FORMING,
    LEADER_STARTING,  /* engines connect, and rank 0 sends initial weights */
    LEADER_SPREADING, /* initial weights are sent to all nodes */
    LEADER_TRAINING,
    LEADER_MEASURING,
    LEADER_UPDATING, /* the step is decided, and can only be committed */
    LEADER_GATHERING,
    LEADER_WINDOW, /* a write window is open */
    LEADER_WRITING,
    LEADER_STORING,
    LEADER_CLOSING, /* written weights are sent from their owners to all nodes */
};

/* A node's place in a parcel: the micro-batch and pass of its next report. */
struct place {
    uint32_t micro_batch, pass;
    bool ready;      /* the node has reported READY for it */
    uint64_t *masks; /* per part, over the node's pieces; NULL: all pieces of all parts */
};

/* One movement of bytes between nodes: a parcel, or weights. */
struct motion {
    uint64_t tag;            /* 0: nothing moves */
    bool said;               /* its message was sent, in this or an earlier generation */
    uint64_t arrived, moved; /* masks of nodes: the bytes have arrived; the node has finished */
};

struct leader_parcel {
    uint32_t micro_batch, pass; /* the position that is exchanged next */
    struct motion motion;
    bool queued;          /* ready to move, but too many other parcels move */
    bool has_moved;       /* a motion of the parcel has ended in this step */
    struct place *places; /* per node */
};

/* A node's position in the run, from its last KEPT. */
struct kept {
    bool said;
    enum node_stand stand;
    uint64_t step;
    uint32_t attempt;     /* the highest attempt that the node knows */
    uint32_t n_windows;   /* windows that the node has closed since the last commit */
    bool is_empty;        /* the node has nothing of the open step */
    bool waits_to_train;  /* the node has the initial weights, but has not received TRAIN */
    uint32_t n_all_backs; /* number of BACKs of all ranks that the node has received in this run */
};

/* The node's last ENDED. The node has ended all steps before `step`, and then n_windows windows. */
struct ended {
    bool said;
    uint64_t step; /* the open step */
    uint32_t n_windows;
};

/* From the node's last DECLARED. */
struct declaration {
    uint64_t digest;
    uint32_t gpu_room;                      /* the room that the node wants */
    char run_id[WIRE_MAX_RUN_ID_BYTES + 1]; /* empty: any run */
};

/* The checkpoint that the node has found, from its last LOADED. */
struct found_checkpoint {
    bool said;       /* the node has looked for a checkpoint */
    uint64_t digest; /* digest of the checkpoint's description; 0: not known */
    uint64_t step;   /* the step of the checkpoint, plus 1; 0: the node has none */
};

/* The node's requests and reports about the open step or window, reset by leader_forget_request(). */
struct node_step {
    bool asked, wants_norm, summed, updated;
    bool wants_window, ends_window, stored;
    /* From ASKED. */
    struct request_step args; /* groups are owned */
    bool has_args, proceed;
    uint8_t *pushed_any, *pushed_all;
    size_t n_bits_bytes;
};

struct node {
    struct kept kept;
    struct ended ended;
    bool wants_to_stop; /* the node's daemon was told to stop */
    bool may_stop;      /* node 0 has sent MAY_STOP to the node */
    bool shown, declared, formed, connected;
    struct declaration declaration;
    struct found_checkpoint checkpoint;
    struct node_step step;
    /* From SUM. */
    struct exact_sum squares;
    struct node_finding finding;
};

/* The checkpoint that all nodes write, and the next checkpoint, if one is wanted. */
struct leader_save {
    bool wanted, under_way;
    bool was_made; /* the last save succeeded */
    uint64_t wanted_token, token;
    uint64_t step;      /* the step of the last save that was sent */
    uint32_t n_windows; /* windows closed between the last commit and that save */
    uint64_t saved;     /* mask of the nodes that have written what they own */
};

/* A node's fetch from other nodes. It is freed when the node has all data. */
struct leader_fetch {
    uint64_t tag, id;
    unsigned node, rank;
    uint32_t kind;
    struct leader_fetch *next;
    size_t n_params;
    uint64_t params[];
};

/* The sources of parcels' pieces: how many each node has, and the number of its first one. */
struct leader_sources {
    unsigned n[LEADER_MAX_NODES], first[LEADER_MAX_NODES];
    unsigned n_all;
};

/* The checkpoint that the job begins with. */
struct leader_load {
    bool is_on;      /* nodes look for a checkpoint */
    bool has_agreed; /* they have agreed on a checkpoint, or on none */
    bool has_loaded; /* they have agreed on a checkpoint */
};

/* The arrays that the window has changed, as node 0 reported them. */
struct leader_written {
    bool forgets;     /* the window has nothing to store */
    uint64_t *arrays; /* owned */
    size_t n_arrays;
};

/* The exchange of parcels. */
struct leader_exchange {
    struct place *places; /* of all nodes in all parcels */
    unsigned n_moving;    /* parcels with a motion, at most NODE_MAX_MOVING */
    uint32_t *queue;      /* parcels that wait for a free motion; a ring with room for all parcels */
    uint32_t queue_first, n_queued;
    uint64_t *masks; /* scratch: one per part of the largest parcel */
};

struct leader {
    unsigned n_nodes, stage;
    bool partitions_all;
    struct leader_sources sources;
    struct leader_ops ops;
    enum leader_phase phase;
    uint32_t n_all_backs; /* number of BACKs of all ranks in this run; reports of nodes that received fewer are stale */
    const struct layout *layout;
    struct leader_parcel *parcels;
    struct leader_exchange exchange;
    struct node nodes[LEADER_MAX_NODES];
    struct motion weights; /* spread or gathered */
    struct leader_fetch *fetches;
    struct leader_save save;
    struct leader_load load;
    bool has_weights; /* rank 0's initial weights are complete */
    bool applies;     /* whether the decided step is applied */
    struct leader_written written;
    char differ[256]; /* why manifests are shown */
    uint64_t step, last_tag;
    uint32_t n_windows; /* closed since the last commit */
    uint32_t attempt, generation;
};

/* Is the message about the open step, in its open attempt? */
static inline bool leader_is_current(const struct leader *leader, const struct node_message *message)
{
    return message->step == leader->step && message->attempt == leader->attempt;
}

/* Do nodes look for a checkpoint, and have not agreed on one yet? */
static inline bool leader_is_loading(const struct leader *leader)
{
    return leader->load.is_on && !leader->load.has_agreed;
}

/* leader-inside.c */
void leader_say(struct leader *leader, struct node_message message);
bool leader_all_are_connected(const struct leader *leader);
/* Have all ranks of the node left? Such a node has asked for the step, without arguments. */
bool leader_is_gone(const struct node *node);
void leader_start_motion(struct leader *leader, struct motion *motion, uint64_t n_tags);
void leader_forget_request(struct node *node);
/* Forgets everything about the open step. */
void leader_forget_step(struct leader *leader);
/* Aborts the open step. Does nothing if the step is decided. */
void leader_abort_step(struct leader *leader, const struct node_message *message);
/* Aborts the step for a reason that no rank has given. */
void leader_give_up(struct leader *leader, unsigned node, const char *why);

/* Sends a message to one node, about a step that may not be the open one. */
void leader_tell(struct leader *leader, unsigned node, enum node_kind kind, uint64_t step);

/* leader.c */
void leader_say_serve(struct leader *leader, const struct leader_fetch *fetch);
/* Forgets the fetches of a node. node: n_nodes for all nodes. */
void leader_forget_fetches(struct leader *leader, unsigned node);
/* Refuses all nodes. newcomer: a node whose new daemon keeps its declaration; 0: none. */
void leader_refuse(struct leader *leader, unsigned newcomer, const char *text);
/* Refuses all nodes. code: the code of the diagnostic. */
void leader_refuse_with(struct leader *leader, unsigned code, const char *text);

/* leader-kept.c */
void leader_hear_kept(struct leader *leader, unsigned node, const struct node_message *message);

/* leader-recover.c */
/* Starts the first engines when all nodes have their memory. */
void leader_try_start(struct leader *leader);
/* Sends rank 0's initial weights to all nodes, when they are complete and all engines are connected. */
void leader_try_spread(struct leader *leader);
void leader_hear_connected(struct leader *leader, unsigned node, const struct node_message *message);
/* Ends the engines of all nodes and starts new ones. why: the reason, or "". */
void leader_next_generation(struct leader *leader, const char *why);
void leader_hear_broken(struct leader *leader, unsigned node, const struct node_message *message);
/* Starts the next generation of engines. nodes: a mask of the nodes whose KEPT this answers, so that they continue. */
void leader_answer_kept(struct leader *leader, uint64_t nodes);

/* leader-stop.c */
void leader_hear_ended(struct leader *leader, unsigned node, const struct node_message *message);
/* Sends MAY_STOP if all nodes have ended the decided step and window. */
void leader_try_stop(struct leader *leader);
/* Is node 0's daemon about to stop? If so, no further step or window is decided. */
bool leader_ends(const struct leader *leader);
/* Forgets that the node was to stop, because its daemon is new. Sends it WANT_ENDED if another node is to stop. */
void leader_forget_stop(struct leader *leader, unsigned node);

/* leader-save.c */
void leader_hear_want_save(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_saved(struct leader *leader, unsigned node, const struct node_message *message);
/* Sends SAVE if a save is wanted and the step is open. */
void leader_try_save(struct leader *leader);
/*
 * Call it when the node's daemon was replaced. Repeats the last SAVE_END to the node, and ends a save that waits for
 * the old daemon.
 */
void leader_lose_save(struct leader *leader, unsigned node);
void leader_hear_loaded(struct leader *leader, unsigned node, const struct node_message *message);
/* Compares the nodes' checkpoints, when all nodes have looked for one. */
void leader_try_load(struct leader *leader);
void leader_forget_checkpoints(struct leader *leader);

/* leader-parcel.c */
bool leader_is_at(const struct place *place, const struct leader_parcel *parcel);
/* Has the node reported that it is ready for the parcel's position, or has nothing for it? */
bool leader_is_settled(const struct leader *leader, const struct leader_parcel *parcel, unsigned node);
void leader_say_exchange(struct leader *leader, uint32_t index);
void leader_try_parcel(struct leader *leader, uint32_t index);
void leader_parcel_is_settled(struct leader *leader, uint32_t index);
void leader_hear_ready(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_passed(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_withdraw(struct leader *leader, unsigned node, const struct node_message *message);

/* leader-step.c */
void leader_try_step(struct leader *leader);
void leader_hear_request(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_back(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_sum(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_updated(struct leader *leader, unsigned node, const struct node_message *message);
/* Gathers the weights, or commits the step, when all nodes have updated. */
void leader_try_updated(struct leader *leader);
void leader_commit(struct leader *leader);

/* leader-window.c */
void leader_hear_window(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_window_end(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_stored(struct leader *leader, unsigned node, const struct node_message *message);
/* Gathers the weights, or closes the window, when all nodes have stored it. */
void leader_try_stored(struct leader *leader);
void leader_say_write(struct leader *leader);
void leader_close_window(struct leader *leader);

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
 *   leader-stop.c     daemons that are told to stop wait for the others
 *   leader-save.c     checkpoints: all nodes save the same step, or begin with the same one
 *   leader-kept.c     nodes whose daemon was replaced, node 0 among them
 *   leader.c          life, forming, fetches, reports, nodes that the leader waits for
 */

#include "daemon/leader/leader.h"

enum leader_phase {
    LEADER_DECLARING,
    LEADER_SHOWING,   /* manifests that differ, before they are refused */
    LEADER_RETURNING, /* this leader is new to the run: nodes say where they stand */
    LEADER_FORMING,
    LEADER_STARTING,  /* engines connect, rank 0's initial weights come in */
    LEADER_SPREADING, /* which are sent to all */
    LEADER_TRAINING,
    LEADER_MEASURING,
    LEADER_UPDATING, /* decided: it only rolls forward */
    LEADER_GATHERING,
    LEADER_WINDOW, /* open */
    LEADER_WRITING,
    LEADER_STORING,
    LEADER_CLOSING, /* weights that were written go from their owners to all */
};

/* A node's place in a parcel: the position of its next report. */
struct place {
    uint32_t micro_batch, pass;
    bool ready;
    uint64_t *masks; /* per part, over the node's pieces; NULL: all pieces of all parts */
};

/* One movement of bytes between nodes: a parcel, or weights. */
struct motion {
    uint64_t tag;            /* 0: nothing does */
    bool said;               /* in some generation */
    uint64_t arrived, moved; /* nodes that have the bytes; nodes that have done with them */
};

struct leader_parcel {
    uint32_t micro_batch, pass; /* exchanged next */
    struct motion motion;
    bool queued;          /* it could be, and others are */
    bool has_moved;       /* in this step */
    struct place *places; /* per node */
};

/* Where a node stands, as its last KEPT says. */
struct kept {
    bool said;
    enum node_stand stand;
    uint64_t step;
    uint32_t attempt;    /* the highest that it knows of */
    uint32_t n_windows;  /* that it has closed before the step */
    bool is_empty;       /* it has nothing of the open step */
    bool waits_to_train; /* it has the initial weights, and has not heard that all have */
    uint32_t n_all_backs; /* BACK of all ranks that it has heard in this run */
};

/* The node's last ENDED: steps before this one, and so many windows of it, are over there. */
struct ended {
    bool said;
    uint64_t step; /* the open one */
    uint32_t n_windows;
};

struct node {
    struct kept kept;
    struct ended ended;
    bool wants_to_stop; /* its daemon was told to stop, */
    bool may_stop;      /* and node 0 has sent it MAY_STOP */
    bool shown, declared, formed, connected, asked, wants_norm, summed, updated;
    bool wants_window, ends_window, stored;
    bool loaded;          /* it has looked for a checkpoint */
    uint64_t loaded_digest; /* of that checkpoint's description; 0: not known */
    uint64_t loaded_step; /* behind the last one that its checkpoint has; 0: it has found none */
    uint64_t digest;
    uint32_t gpu_room;                      /* that it wants; from DECLARED, as run_id is */
    char run_id[WIRE_MAX_RUN_ID_BYTES + 1]; /* empty: any */
    /* From ASKED. */
    struct request_step args; /* groups are owned */
    bool has_args, proceed;
    uint8_t *pushed_any, *pushed_all;
    size_t n_bits_bytes;
    /* From SUM. */
    struct exact_sum squares;
    struct node_finding finding;
};

/* The checkpoint that all nodes write, and the one that is wanted next. */
struct leader_save {
    bool wanted, under_way;
    bool was_made; /* the last one */
    uint64_t wanted_token, token;
    uint64_t step;      /* of the last one that was said */
    uint32_t n_windows; /* closed before it in that step */
    uint64_t saved;     /* nodes that have written what they own */
};

/* A fetch by one node from the others, until the node has everything. */
struct leader_fetch {
    uint64_t tag, id;
    unsigned node, rank;
    uint32_t kind;
    struct leader_fetch *next;
    size_t n_params;
    uint64_t params[];
};

struct leader {
    unsigned n_nodes, stage;
    bool partitions_all;
    unsigned n_sources[LEADER_MAX_NODES], first_source[LEADER_MAX_NODES];
    unsigned n_all_sources;
    struct leader_ops ops;
    enum leader_phase phase;
    uint32_t n_all_backs; /* in this run, BACK of all ranks: what a node reports that has heard fewer is out of date */
    const struct layout *layout;
    struct leader_parcel *parcels;
    struct place *places;
    unsigned n_moving; /* parcels with a motion, at most NODE_MAX_MOVING */
    uint32_t *queue;   /* parcels that wait for one of them, a ring of as many as there are */
    uint32_t queue_first, n_queued;
    struct node nodes[LEADER_MAX_NODES];
    struct motion weights; /* spread or gathered */
    struct leader_fetch *fetches;
    struct leader_save save;
    bool loads, has_agreed; /* nodes look for a checkpoint; and know that they have the same, or none */
    bool has_loaded;        /* they have one */
    bool has_weights;  /* rank 0's are complete */
    bool applies;      /* the step that was decided */
    bool forgets;      /* the window, says node 0 */
    uint64_t *written; /* of the window, as node 0 says it; owned */
    size_t n_written;
    char differ[256]; /* why manifests are shown */
    uint64_t step, last_tag;
    uint32_t n_windows; /* closed before the step */
    uint32_t attempt, generation;
    uint64_t *masks; /* scratch: of the parcel with the most parts */
};

/* Is the message about the open step, in its open attempt? */
static inline bool leader_is_current(const struct leader *leader, const struct node_message *message)
{
    return message->step == leader->step && message->attempt == leader->attempt;
}

/* leader-inside.c */
void leader_say(struct leader *leader, struct node_message message);
bool leader_all_are_connected(const struct leader *leader);
/* All ranks of the node have left: it has asked for the step and has no arguments. */
bool leader_is_gone(const struct node *node);
void leader_start_motion(struct leader *leader, struct motion *motion, uint64_t n_tags);
void leader_forget_request(struct node *node);
/* Forgets everything about the open step. */
void leader_forget_step(struct leader *leader);
/* Possible until the step is decided; later it does nothing. */
void leader_abort_step(struct leader *leader, const struct node_message *message);
/* Aborts the step for a reason that no rank has given. */
void leader_give_up(struct leader *leader, unsigned node, const char *why);

/* To one node, about a step that may not be the open one. */
void leader_tell(struct leader *leader, unsigned node, enum node_kind kind, uint64_t step);

/* leader.c */
void leader_say_serve(struct leader *leader, const struct leader_fetch *fetch);
/* Forgets the fetches of a node; n_nodes: of all. */
void leader_forget_fetches(struct leader *leader, unsigned node);
/* Refuses all nodes. Not for a newcomer that has begun anew (0: for all): what it has declared since is not refused. */
void leader_refuse(struct leader *leader, unsigned newcomer, const char *text);
/* code: of the diagnostic. */
void leader_refuse_with(struct leader *leader, unsigned code, const char *text);

/* leader-kept.c */
void leader_hear_kept(struct leader *leader, unsigned node, const struct node_message *message);

/* leader-recover.c */
/* All nodes have their memory: the first engines start. */
void leader_try_start(struct leader *leader);
/* Initial weights travel when rank 0 has given them and all engines are connected. */
void leader_try_spread(struct leader *leader);
void leader_hear_connected(struct leader *leader, unsigned node, const struct node_message *message);
/* Ends the engines of all nodes and starts new ones. why: of the end; "": there is none to tell. */
void leader_next_generation(struct leader *leader, const char *why);
void leader_hear_broken(struct leader *leader, unsigned node, const struct node_message *message);
/* Starts the next generation of engines, and tells these nodes that their KEPT was heard: they go on. */
void leader_answer_kept(struct leader *leader, uint64_t nodes);

/* leader-stop.c */
void leader_hear_ended(struct leader *leader, unsigned node, const struct node_message *message);
/* Tells the nodes that they may stop, if all have ended what was decided. */
void leader_try_stop(struct leader *leader);
/* Is node 0's daemon about to stop? Nothing is decided any more. */
bool leader_ends(const struct leader *leader);
/* The node's daemon was replaced: nobody has told the next one to stop yet. */
void leader_forget_stop(struct leader *leader, unsigned node);

/* leader-save.c */
void leader_hear_want_save(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_saved(struct leader *leader, unsigned node, const struct node_message *message);
/* Says it, if one is wanted and the step is open. */
void leader_try_save(struct leader *leader);
/* The node's daemon was replaced. It may not have heard that the last one was made. */
void leader_lose_save(struct leader *leader, unsigned node);
void leader_hear_loaded(struct leader *leader, unsigned node, const struct node_message *message);
/* Goes on when all nodes have looked for a checkpoint. */
void leader_try_load(struct leader *leader);
void leader_forget_checkpoints(struct leader *leader);

/* leader-parcel.c */
bool leader_is_at(const struct place *place, const struct leader_parcel *parcel);
/* Has the node said all that it has to say about the parcel's position? */
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
/* Goes on when all nodes have updated. */
void leader_try_updated(struct leader *leader);
void leader_commit(struct leader *leader);

/* leader-window.c */
void leader_hear_window(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_window_end(struct leader *leader, unsigned node, const struct node_message *message);
void leader_hear_stored(struct leader *leader, unsigned node, const struct node_message *message);
/* Goes on when all nodes have stored. */
void leader_try_stored(struct leader *leader);
void leader_say_write(struct leader *leader);
void leader_close_window(struct leader *leader);

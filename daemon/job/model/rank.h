/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/base/blob.h"
#include "core/config/config.h"
#include "core/diagnosis/evidence.h"
#include "core/layout/manifest.h"
#include "core/wire/journal-wire.h"
#include "core/wire/wire-request.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/phases.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/model/waits.h"

struct job;
struct reading;
struct ring;

enum job_wait {
    WAIT_NONE,
    WAIT_FORM,
    WAIT_INIT,
    WAIT_READY,
    WAIT_SLOT,
    WAIT_END,
    WAIT_OTHERS, /* has asked for the step, but lacks gradients: pushes of other ranks show why */
    WAIT_STEP,
    WAIT_NORM,
    WAIT_GATHER,
    WAIT_READ,
    WAIT_WINDOW_BEGIN,
    WAIT_WINDOW_END,
    WAIT_WRITE,
    WAIT_SAVE,
    WAIT_ABANDON, /* several nodes: until its announced parcels are withdrawn */
    WAIT_ABORTED, /* for the abort that it caused; several nodes: until node 0 announces it */
    WAIT_ABORT,
};

/* The arguments of a request for the step. */
struct step_args {
    struct wire_hyper *groups; /* as sent; owned; n_groups, or NULL: as configured */
    uint32_t n_groups;
    bool has_max_norm;
    double max_norm;
    double loss_scale;
    bool found_inf;
};

/* A gradient of which some parts have been pushed. */
struct partial_push {
    uint32_t param;
    uint32_t next; /* part; 0: nothing is partly pushed */
    bool refused;  /* the first part was refused, and so are the later ones */
    bool torn;     /* an earlier gradient of this micro-batch lacks its last parts */
};

/*
 * The peer of a rank that is away: it was attached to the earlier daemon, and its process has not connected to this one
 * yet. Its answer is kept until it connects.
 */
#define RANK_IS_AWAY ((void *)&rank_is_away)
extern const char rank_is_away;

struct away {
    uint8_t *answer; /* packed; owned; NULL: none */
    size_t n_answer_bytes;
    bool dropped; /* it must be disconnected: it cannot connect again */
};

/* Where the process is, as its watch says: daemon/job/look.h. */
struct rank_look {
    void *watch;       /* its session; NULL: it has none */
    bool owes;         /* was asked, and has not answered: it is not asked again */
    bool for_others;   /* other nodes get the answer, too */
    uint64_t asked_ns; /* when it was last asked; 0: no answer is awaited any more */
    uint64_t seen_ns;  /* when the text came */
    char *text;        /* owned; NULL: none */
};

/* Data of the rank's process, reset when another process replaces it. */
struct rank_process {
    bool declared;
    struct manifest manifest;
    char **strings; /* interned, by id; owned */
    uint32_t n_strings;
    uint64_t string_bytes;
    bool is_last; /* if this process fails, no rank is restarted; sent again at each connection */

    bool wants_published; /* gets the published weights when it is formed */
    bool from_gpu;        /* its model is on a GPU, which copies the gradients into the ring */
    bool wants_decision;  /* gets the decision before the step is committed */

    bool slot_credited;  /* a slot was credited since the client was last told to look */
    bool impatient;      /* a wait for a slot was in vain, in this micro-batch */
    bool waited_in_vain; /* a wait for a slot was in vain, and no later wait has brought a slot */
    struct partial_push partial;
    struct fault fault;
    struct fault again;              /* repeated pushes under on_duplicate: accumulate, for one warning */
    struct diagnostic *abort_notice; /* to be delivered with the next answer */
    uint64_t save_step;              /* it waits for a checkpoint of this step or a later one */
    bool forget;                     /* as its WriteEnd says */

    struct rank_timeline timeline;
    struct rank_look look;
};

/* Data of the open step, reset when the step is committed or aborted. */
struct rank_step {
    bool proceed;        /* the rank cleared a fault of its step request: the next request is not judged */
    bool abandoned;      /* a backward was given up in this step */
    uint32_t n_given_up; /* pushes of that backward */
    char *given_up_why;  /* in the client's words; owned; NULL: it gave no reason */
    struct rank_evidence evidence;
    uint64_t n_forwards_before, n_backwards_before; /* of the process, when the step began */
};

struct job_rank {
    unsigned rank;
    struct rank_kept kept; /* survives a kill of the daemon; the rest does not */
    struct rank_process process;
    struct rank_step step;

    void *peer;               /* the session; NULL while no process is attached; RANK_IS_AWAY */
    struct away away;         /* while it is away */
    const char *last_request; /* static */
    uint64_t attached_ns, last_ns;
    uint64_t refused_secret; /* of the process whose Hello was refused last */
    unsigned refused_code;   /* the code of that refusal; 0: none */
    uint64_t again_ns;       /* the rank has left: since when a process waits to attach again; 0: none does */
    struct ring *rings[2];   /* [0] of this incarnation, [1] of a dead one while its slots are read */

    enum job_wait wait;
    uint64_t wait_ns;
    struct rank_waits waits;
    struct rank_phases phases;
    struct request_slot_request slot_wanted;
    bool reserving; /* an overflow extent is being reserved */

    struct blob blob;      /* the last blob, of a micro-batch or a step */
    struct blob blob_step; /* came with the request for the step */
    struct step_args args;
    uint64_t asked_ns;
    uint32_t n_disconnects; /* counts job_disconnect(): when it changes, a request of several pushes stops */

    struct reading *given; /* the last answer with state, whose memory the rank still has; read-state.c */
    uint32_t *gathered;    /* stage 3: per parameter, how often it is gathered; owned */
    uint64_t live_elems;
    uint32_t *gathering; /* parameters of the request under way; owned */
    uint32_t n_gathering;
};

/* Resets the rank's data of the open step, after a commit or an abort. */
void rank_forget_step(struct job_rank *rank);

/* Frees all memory of the rank. */
void rank_deinit(struct job_rank *rank);

/* Forgets all data of the rank's process, because another process takes its place. */
void rank_forget_incarnation(struct job_rank *rank);

/* Shows on the credit pages of all ranks of this node that weights are being written (odd), or may be read (even). */
void job_set_writing(struct job *job, bool writing);

/* Frees the answer that is kept for a rank that is away. */
void rank_forget_away(struct job_rank *rank);

/* Is any rank of this node attached or away? */
bool job_anybody_is_here(const struct job *job);
/* Have all ranks left? */
bool job_all_left(const struct job *job);
/* Have all ranks of this node left? Then steps of the other nodes must not wait for this node. */
bool job_own_left(const struct job *job);

static inline bool job_rank_is_here(const struct job_rank *rank)
{
    return rank->peer != NULL;
}

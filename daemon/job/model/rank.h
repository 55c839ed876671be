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
    WAIT_OTHERS, /* has sent Step without some gradients, and is judged when ranks that are behind have pushed */
    WAIT_STEP,
    WAIT_NORM,
    WAIT_GATHER,
    WAIT_READ,
    WAIT_WINDOW_BEGIN,
    WAIT_WINDOW_END,
    WAIT_WRITE,
    WAIT_SAVE,
    WAIT_ABANDON, /* several nodes: until the rank's promised parcels are withdrawn */
    WAIT_ABORTED, /* for the abort that the rank has caused */
    WAIT_ABORT,   /* for the abort that the rank has requested */
};

/* The arguments of a request for the step. */
struct step_args {
    struct wire_hyper *groups; /* n_groups entries, as sent; owned; NULL: as configured */
    uint32_t n_groups;
    bool has_max_norm;
    double max_norm;
    double loss_scale;
    bool found_inf;
};

/* A gradient of which some parts have been pushed. */
struct partial_push {
    uint32_t param;
    uint32_t next; /* number of the next part; 0: no gradient is partly pushed */
    bool refused;  /* the first part was refused, so the later parts are refused, too */
    bool torn;     /* an earlier gradient of this micro-batch lacks its last parts */
};

/*
 * The peer of a rank that is away. An away rank was attached to the earlier daemon, and its process has not connected
 * to this daemon yet. Until then, the answer for the rank is kept.
 */
#define RANK_IS_AWAY ((void *)&rank_is_away)
extern const char rank_is_away;

struct away {
    uint8_t *answer; /* the kept answer, packed; owned; NULL: none */
    size_t n_answer_bytes;
    bool dropped; /* the rank was dropped, so its process cannot connect again */
};

/* The stack of the process, as its watch reports it (daemon/job/look.h). */
struct rank_look {
    void *watch;       /* session of the watch; NULL: the process has no watch */
    bool owes;         /* the watch was asked, and is not asked again until it answers */
    bool for_others;   /* the answer is sent to other nodes, too */
    uint64_t asked_ns; /* when the watch was last asked; 0: no answer is awaited */
    uint64_t seen_ns;  /* when the last answer came */
    char *text;        /* the last answer; owned; NULL: none */
};

/* Data of the rank's process, reset when another process replaces it. */
struct rank_process {
    bool declared;
    struct manifest manifest;
    char **strings; /* interned strings, indexed by id; owned */
    uint32_t n_strings;
    uint64_t string_bytes;
    bool is_last; /* if this process fails, no rank is restarted; sent again at each connection */

    bool wants_published; /* the process gets the published weights when it is formed */
    bool from_gpu;        /* the model is on a GPU, which copies the gradients into the ring */
    bool wants_decision;  /* the process gets the decision before the step is committed */

    bool slot_credited;  /* a slot was credited since the last SlotGrant that pointed to the ring */
    bool impatient;      /* a wait for a slot of the ring timed out in this micro-batch */
    bool waited_in_vain; /* a wait for a slot of the ring timed out, and no later wait has brought one */
    struct partial_push partial;
    struct fault fault;
    struct fault again;              /* pushes repeated under on_duplicate: accumulate, for one warning */
    struct diagnostic *abort_notice; /* an abort, to be reported with the next answer */
    uint64_t save_step;              /* the rank waits for a checkpoint of this step or a later step */
    bool forget;                     /* WriteEnd asked to forget the window */

    struct rank_timeline timeline;
    struct rank_look look;
};

/* Data of the open step, reset when the step is committed or aborted. */
struct rank_step {
    bool proceed;        /* a fault of the request for the step was cleared, so the next request is not judged */
    bool abandoned;      /* a backward was given up in this step */
    uint32_t n_given_up; /* number of parameters that were pushed in that backward */
    char *given_up_why;  /* the client's reason; owned; NULL: none */
    struct rank_evidence evidence;
    uint64_t n_forwards_before, n_backwards_before; /* of the process; values when the step began */
};

/* The last Hello that was refused. */
struct rank_refusal {
    uint64_t secret; /* of the process */
    unsigned code;   /* the code of the refusal; 0: none */
};

/* The overflow extent that the rank wants while it waits for a slot. */
struct rank_extent {
    struct request_slot_request wanted;
    bool reserving; /* the extent is being reserved */
};

/* The rank's last request for the step. */
struct rank_request {
    struct step_args args;
    struct blob blob; /* sent with the request */
    uint64_t asked_ns;
};

/* Stage 3: the parameters that the rank has gathered, or gathers. */
struct rank_gathers {
    uint32_t *counts; /* for each parameter, how often the rank has gathered it; owned */
    uint64_t live_elems;
    uint32_t *params; /* parameters of the open request; owned */
    uint32_t n_params;
};

struct job_rank {
    unsigned rank;
    struct rank_kept kept; /* survives a kill of the daemon; the other fields do not */
    struct rank_process process;
    struct rank_step step;

    void *peer;               /* the session; RANK_IS_AWAY; or NULL: no process is attached */
    struct away away;         /* used while the rank is away */
    const char *last_request; /* the last request's type as a static text */
    uint64_t attached_ns, last_ns;
    struct rank_refusal refusal;
    uint64_t again_ns;     /* since when the process of a rank that left waits to attach again; 0: no process does */
    struct ring *rings[2]; /* [0]: of this incarnation; [1]: of a dead incarnation, while the slots are read */

    enum job_wait wait;
    uint64_t wait_ns;
    struct rank_waits waits;
    struct rank_phases phases;
    struct rank_extent extent;

    struct blob blob; /* the client's last blob, sent with a micro-batch or a step */
    struct rank_request request;
    struct step_args expected; /* for the open step; groups is NULL: as those of the request */
    uint32_t n_disconnects; /* number of job_disconnect() calls; when it changes, a request of several pushes stops */

    struct reading *given; /* the last answer with state, whose memory the client may still map; read-state.c */
    struct rank_gathers gathers;
};

/* Resets the rank's data of the open step, after a commit or an abort. */
void rank_forget_step(struct job_rank *rank);

/* Frees all memory of the rank. */
void rank_deinit(struct job_rank *rank);

/* Forgets all data of the rank's process, because another process takes its place. */
void rank_forget_incarnation(struct job_rank *rank);

/*
 * Sets the generation on the credit pages of this node's ranks: odd while weights are being written, even while weights
 * may be read.
 */
void job_set_writing(struct job *job, bool writing);

/* Frees the answer that is kept for a rank that is away. */
void rank_forget_away(struct job_rank *rank);

/* Is any rank of this node attached or away? */
bool job_anybody_is_here(const struct job *job);
/* Have all ranks of the world left? */
bool job_all_left(const struct job *job);
/* Have all ranks of this node left? If so, steps of the other nodes must not wait for this node. */
bool job_own_left(const struct job *job);

static inline bool job_rank_is_here(const struct job_rank *rank)
{
    return rank->peer != NULL;
}

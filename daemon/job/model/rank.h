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
    WAIT_OTHERS, /* has asked for the step and misses gradients: what the others push tells why */
    WAIT_STEP,
    WAIT_NORM,
    WAIT_GATHER,
    WAIT_READ,
    WAIT_WINDOW_BEGIN,
    WAIT_WINDOW_END,
    WAIT_WRITE,
    WAIT_SAVE,
    WAIT_ABANDON, /* several nodes: until what is announced of it is taken back */
    WAIT_ABORTED, /* for the abort that it has caused; several nodes: until node 0 has said it */
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
    bool refused;  /* the first part was refused, and so are the others */
    bool torn;     /* an earlier gradient of this micro-batch lacks its last parts */
};

/*
 * The peer of a rank that is attached, though its process has not connected to this daemon yet: it was attached to the
 * daemon before. What it is answered meanwhile waits for it.
 */
#define RANK_IS_AWAY ((void *)&rank_is_away)
extern const char rank_is_away;

struct away {
    uint8_t *answer; /* packed; owned; NULL: none */
    size_t n_answer_bytes;
    bool dropped; /* it would have been disconnected */
};

/* Where the process is, as its watch says: daemon/job/look.h. */
struct rank_look {
    void *watch;       /* its session; NULL: it has none */
    bool owes;         /* it has been asked, and has not answered: it is not asked again */
    bool for_others;   /* so that other nodes get the answer */
    uint64_t asked_ns; /* the last time; 0: nobody waits for an answer any more */
    uint64_t seen_ns;  /* of the text */
    char *text;        /* owned; NULL: none */
};

/* Of the rank's process: forgotten when another process takes its place. */
struct rank_process {
    bool declared;
    struct manifest manifest;
    char **strings; /* interned, by id; owned */
    uint32_t n_strings;
    uint64_t string_bytes;
    bool is_last; /* if this process fails, no rank is started again; a process says it again when it connects again */

    bool wants_published; /* when it is formed */
    bool from_gpu;        /* its model is on a GPU, which copies the gradients into the ring */
    bool wants_decision;  /* to hear of it before the step is committed */

    bool slot_credited;  /* since the client was last told to look */
    bool impatient;      /* has waited in vain for a slot, in this micro-batch */
    bool waited_in_vain; /* has waited in vain, and no later wait has brought a slot */
    struct partial_push partial;
    struct fault fault;
    struct fault again;              /* on_duplicate: accumulate: repeated pushes, for one warning */
    struct diagnostic *abort_notice; /* to be delivered with the next answer */
    uint64_t save_step;              /* the checkpoint that it waits for is of this step, or of a later one */
    bool forget;                     /* of its WriteEnd */

    struct rank_timeline timeline;
    struct rank_look look;
};

/* Of the open step: forgotten when it is committed or aborted. */
struct rank_step {
    bool proceed;        /* cleared a fault of the step request: ask again without judging it */
    bool abandoned;      /* a backward was given up in this step */
    uint32_t n_given_up; /* pushes of that backward */
    char *given_up_why;  /* in the client's words; owned; NULL: it gave no reason */
    struct rank_evidence evidence;
    uint64_t n_forwards_before, n_backwards_before; /* of the process, when the step began */
};

struct job_rank {
    unsigned rank;
    struct rank_kept kept; /* a kill loses the rest */
    struct rank_process process;
    struct rank_step step;

    void *peer;               /* the session; NULL while no process is attached; RANK_IS_AWAY */
    struct away away;         /* while it is away */
    const char *last_request; /* static */
    uint64_t attached_ns, last_ns;
    uint64_t refused_secret; /* of the process whose Hello was refused last */
    unsigned refused_code;   /* why; 0: none was */
    uint64_t again_ns;     /* since when a process of this rank, which has left, waits to attach again; 0: none does */
    struct ring *rings[2]; /* [0] of this incarnation, [1] of a dead one while its slots are read */

    enum job_wait wait;
    uint64_t wait_ns;
    struct rank_waits waits;
    struct rank_phases phases;
    struct request_slot_request slot_wanted;
    bool reserving; /* an overflow extent */

    struct blob blob;      /* the last blob, of a micro-batch or a step */
    struct blob blob_step; /* came with the request for the step */
    struct step_args args;
    uint64_t asked_ns;
    uint32_t n_disconnects; /* how often its connection was to be closed: a request of several pushes ends then */

    struct reading *given; /* the last answer with state, whose memory it still has; read-state.c */
    uint32_t *gathered;    /* stage 3: per parameter, how often; owned */
    uint64_t live_elems;
    uint32_t *gathering; /* parameters of the request under way; owned */
    uint32_t n_gathering;
};

/* The step is committed or aborted: forgets the rank's pushes, arguments and evidence for it. */
void rank_forget_step(struct job_rank *rank);

/* Frees all memory of the rank. */
void rank_deinit(struct job_rank *rank);

/* Forgets all data of the rank's process, because another process takes its place. */
void rank_forget_incarnation(struct job_rank *rank);

/* Odd while weights are being written, even while they may be read: on the credit pages of all ranks of this node. */
void job_set_writing(struct job *job, bool writing);

/* Forgets what waits for the rank while it is away. */
void rank_forget_away(struct job_rank *rank);

/* Is a rank of this node attached, or away? */
bool job_anybody_is_here(const struct job *job);
/* Have all ranks left? */
bool job_all_left(const struct job *job);
/* Have all ranks of this node left? Then it has nothing more to say, and the others' steps are not to wait for it. */
bool job_own_left(const struct job *job);

static inline bool job_rank_is_here(const struct job_rank *rank)
{
    return rank->peer != NULL;
}

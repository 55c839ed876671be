/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The coordinator decides when the nodes of a job continue together. The job reports its progress, and the coordinator
 * answers by calling a verb of the job: at once, or when all nodes have made the same progress. enum report_kind lists
 * the reports, each with the verb that answers it.
 *
 * In a job of one node, the coordinator decides by itself (alone.c). Among several nodes, node 0 decides
 * (daemon/nodes).
 *
 * All calls are made on the loop thread, except init() and reserve(), which workers call.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/job/model/model.h"

struct coordinator;
struct diagnostic;
struct fetch;
struct job_rank;
struct parcels_ops;
struct request_init;
struct state_edits;
struct segment;

enum report_kind {
    /* Forming. */
    REPORT_DECLARED,     /* have all ranks of this node declared? Sent by every settle of a waiting job:
                            job_form_now() */
    REPORT_FORMED,       /* this node has reserved its memory; sent once, unless REPORT_UNFORMED is sent */
    REPORT_UNFORMED,     /* this node cannot be formed */
    REPORT_HAVE_WEIGHTS, /* rank 0 has sent all initial weights: job_train() */
    REPORT_LOADED,       /* this node has looked for a checkpoint to begin with: resume_is_agreed(), resume_older() */
    REPORT_RESUMED,      /* this node continues with the checkpoint that it has loaded: job_train() */
    REPORT_REPLAYS,      /* replays: whether the replay of a dead daemon's log begins or ends */
    REPORT_ADOPTED,      /* this daemon has adopted the job of a dead daemon */
    REPORT_DROPPING,     /* the job is being dropped, so fetches for its ranks must end */
    REPORT_DROPPED,      /* the job is dropped, and its layout is freed next */
    REPORT_GIVE_UP,      /* an administrator drops the run: drop_all() on this node, drop_begin() on the others */
    /* Ranks. */
    REPORT_BACK,    /* a rank that left is back: job_is_back_late() */
    REPORT_END_RUN, /* all ranks have left, and rank 0, on this node, begins another run: drop_for_next() */
    REPORT_LOOK,    /* asks another node for the stack of one of its ranks: look_answered() */
    REPORT_WHERE,   /* sends the stack of a rank of this node to the nodes that asked for it */
    /* The step. */
    REPORT_WANT_NORM, /* ranks wait for the norm: job_norm_is() */
    REPORT_ASKED,     /* this node's ranks have asked for the step: job_carry_out(), or job_hold() */
    REPORT_UPDATED,   /* the update is done: job_commit() */
    REPORT_ABORT,     /* the step must be aborted: abort_start() */
    /* Write windows. */
    REPORT_WANT_WINDOW,  /* this node's ranks wait for a write window: job_window_open() */
    REPORT_LACKS_MEMORY, /* this node has no memory for the open window */
    REPORT_WINDOW,       /* window: the segment of the open window; NULL: the window is closed */
    REPORT_WINDOW_END,   /* this node's ranks end the window: job_window_store(), or job_window_closed() to forget it */
    REPORT_STORED,       /* the window is stored: job_window_closed() */
    /* Checkpoints. */
    REPORT_WANT_SAVE, /* a checkpoint is due: save_take() */
    REPORT_SAVED,     /* this node has written its part, or has failed: save_publish(), save_end() */
    /* GPUs. */
    REPORT_DEVICE_READY,
    REPORT_DEVICE_PUT,
    REPORT_DEVICE_FAILED,
};

/* Everything is borrowed, except abort.reason. */
struct report {
    enum report_kind kind;
    union {
        bool all_declared;
        bool replays;
        struct {
            unsigned code; /* code of the diagnostic */
            const char *why;
        } unformed;
        struct {
            bool found;
            uint64_t step, digest; /* digest: of the checkpoint's description; 0: not known */
        } loaded;
        struct {
            struct job_rank *rank;
            bool all;  /* all ranks of the world had left */
            bool late; /* the step was summed without the rank */
        } back;
        struct {
            unsigned rank;
            const char *text; /* only for REPORT_WHERE */
        } place;
        struct {
            int64_t rank;
            const char *why;           /* the reason given to zerod_abort_step(); "": none */
            struct diagnostic *reason; /* ownership passes to the coordinator; NULL: none */
        } abort;
        const struct segment *window;
        struct {
            const struct state_edits *edits; /* the state that was written on this node; NULL: none */
            bool forget;
        } window_end;
        struct {
            uint64_t token;
            bool whole;      /* node 0 has joined the parts of all nodes */
            const char *why; /* why this node failed; "": it did not */
        } saved;
        struct {
            const char *key;
            const uint8_t *value;
            size_t n_bytes;
        } put;
        struct {
            uint32_t generation;
            const char *why;
        } failed;
    };
};

struct coordinator_ops {
    void (*free)(struct coordinator *c);
    /*
     * Sends a report. Return: true if other nodes take part; false if the job itself continues after REPORT_LOADED or
     * REPORT_WANT_SAVE.
     */
    bool (*report)(struct coordinator *c, const struct report *report);
    /* Sends the state of this node's ranks to other nodes. tick: includes data that only diagnostics use. */
    void (*tell)(struct coordinator *c, bool tick);

    /* Allocates the buffers between nodes. Call it when the layout is known. Return: 0 or -errno. */
    int (*form)(struct coordinator *c);
    /* reserve() reserves the pages of one of the n_reserve_pieces() pieces of these buffers. Return: 0 or -errno. */
    uint32_t (*n_reserve_pieces)(const struct coordinator *c);
    int (*reserve)(struct coordinator *c, uint32_t piece);
    /* Keeps initial weights of rank 0 for other nodes. Any thread. Return: 0 or -errno. */
    int (*init)(struct coordinator *c, const struct request_init *request, const void *weights);
    /* Return: a diagnostic that compares the manifests of all nodes, or NULL if they are not known. */
    struct diagnostic *(*compare_manifests)(struct coordinator *c);
    /* Replays a JOURNAL_NODE record. Return: 0, or -EINVAL if the record is impossible. */
    int (*repeat)(struct coordinator *c, const void *packed, size_t n_bytes);

    /* Must a rank that left and is back wait before it is formed? */
    bool (*holds_back)(const struct coordinator *c);
    /* Has this rank of another node not yet pushed the parameter in its open backward? */
    bool (*awaits)(const struct coordinator *c, unsigned rank, uint32_t param);
    /* Does this node wait for other nodes? dst: receives the names of these nodes; may be NULL. */
    bool (*waits_elsewhere)(const struct coordinator *c, char *dst, size_t size);
    /* Is node 0 another node, and unreachable? */
    bool (*is_cut_off)(const struct coordinator *c);

    /*
     * Fetches elements that other nodes own. Return: 0, and fetch->done() follows; 1 if there is nothing to fetch; or
     * -ENOMEM.
     */
    int (*fetch)(struct coordinator *c, const struct fetch *fetch);
    /*
     * Finds the norm of a parameter that several nodes own, and answers the waiting rank. Return: 0; 1 if this node
     * owns the whole parameter; or -ENOMEM.
     */
    int (*ask_norm)(struct coordinator *c, struct job_rank *rank, uint32_t param);
};

struct coordinator {
    const struct coordinator_ops *ops;
    const struct parcels_ops *parcels; /* parcels.h */
    bool alone;                        /* the job has one node */
    bool sums_at_once;                 /* on GPUs of several nodes: one sum adds all ranks' gradients from the slots */
};

static inline void coordinator_free(struct coordinator *c)
{
    if (c)
        c->ops->free(c);
}

static inline void coordinator_tell(struct coordinator *c, bool tick)
{
    c->ops->tell(c, tick);
}

static inline int coordinator_form(struct coordinator *c)
{
    return c->ops->form(c);
}

static inline uint32_t coordinator_n_reserve_pieces(const struct coordinator *c)
{
    return c->ops->n_reserve_pieces(c);
}

static inline int coordinator_reserve(struct coordinator *c, uint32_t piece)
{
    return c->ops->reserve(c, piece);
}

static inline int coordinator_init(struct coordinator *c, const struct request_init *request, const void *weights)
{
    return c->ops->init(c, request, weights);
}

static inline struct diagnostic *coordinator_compare_manifests(struct coordinator *c)
{
    return c->ops->compare_manifests(c);
}

static inline int coordinator_repeat(struct coordinator *c, const void *packed, size_t n_bytes)
{
    return c->ops->repeat(c, packed, n_bytes);
}

static inline bool coordinator_holds_back(const struct coordinator *c)
{
    return c->ops->holds_back(c);
}

static inline bool coordinator_awaits(const struct coordinator *c, unsigned rank, uint32_t param)
{
    return c->ops->awaits(c, rank, param);
}

static inline bool coordinator_waits_elsewhere(const struct coordinator *c, char *dst, size_t size)
{
    return c->ops->waits_elsewhere(c, dst, size);
}

static inline bool coordinator_is_cut_off(const struct coordinator *c)
{
    return c->ops->is_cut_off(c);
}

static inline int coordinator_fetch(struct coordinator *c, const struct fetch *fetch)
{
    return c->ops->fetch(c, fetch);
}

static inline int coordinator_ask_norm(struct coordinator *c, struct job_rank *rank, uint32_t param)
{
    return c->ops->ask_norm(c, rank, param);
}

/* Sends a report. Return: the value of report(). */
static inline bool report_progress(struct job *job, struct report report)
{
    return job->coordinator->ops->report(job->coordinator, &report);
}

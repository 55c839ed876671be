/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The coordinator decides when the nodes of a job continue together. The job reports its progress, and the coordinator
 * answers by calling a verb of the job: at once, or when all nodes have made the same progress. enum report_kind has
 * the reports and these verbs.
 *
 * A job of one node is a world of one, whose coordinator decides by itself (alone.c). Among several nodes, node 0
 * decides (daemon/nodes).
 *
 * Loop thread, except init() and reserve(), which workers call.
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
    REPORT_DECLARED,     /* all ranks of this node have declared their parameters, or not all yet; in every settle while
                            the job waits: job_form_now() */
    REPORT_FORMED,       /* this node has its memory; this, or the next one, once */
    REPORT_UNFORMED,     /* it cannot be formed */
    REPORT_HAVE_WEIGHTS, /* rank 0 has given all initial weights: job_train() */
    REPORT_LOADED,       /* it has looked for a checkpoint to begin with: resume_is_agreed(), resume_older() */
    REPORT_RESUMED,      /* it continues with the checkpoint that it has loaded: job_train() */
    REPORT_ADOPTED,      /* the job of a daemon that died was taken over, and continues */
    REPORT_DROPPING,     /* the job is being dropped: fetches of its ranks are to end */
    REPORT_DROPPED,      /* the layout is gone */
    /* Ranks. */
    REPORT_BACK,    /* a rank that had left is back: job_is_back_late() */
    REPORT_END_RUN, /* all ranks have left, and rank 0, which is this node's, begins another run: drop_for_next() */
    REPORT_LOOK,    /* where is that rank of another node? look_answered() */
    REPORT_WHERE,   /* where a rank of this node is, as others have asked */
    /* The step. */
    REPORT_WANT_NORM, /* job_norm_is() */
    REPORT_ASKED,     /* for the step: job_carry_out(), or job_hold() */
    REPORT_UPDATED,   /* job_commit() */
    REPORT_ABORT,     /* abort_start() */
    /* Write windows. */
    REPORT_WANT_WINDOW,  /* job_window_open() */
    REPORT_LACKS_MEMORY, /* for the open window */
    REPORT_WINDOW,       /* the window has this segment; NULL: the window is gone */
    REPORT_WINDOW_END,   /* job_window_store(), or job_window_closed() if it is to be forgotten */
    REPORT_STORED,       /* job_window_closed() */
    /* Checkpoints. */
    REPORT_WANT_SAVE, /* one is due: save_take() */
    REPORT_SAVED,     /* this node has written what it owns: save_publish(), save_end() */
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
        struct {
            unsigned code; /* of the diagnostic */
            const char *why;
        } unformed;
        struct {
            bool found;
            uint64_t step, digest; /* digest: of the checkpoint's description; 0: not known */
        } loaded;
        struct {
            struct job_rank *rank;
            bool all;  /* all ranks of the world had left */
            bool late; /* the step was summed without it */
        } back;
        struct {
            unsigned rank;
            const char *text; /* of REPORT_WHERE */
        } place;
        struct {
            int64_t rank;
            const char *why;           /* of zerod_abort_step; "": none */
            struct diagnostic *reason; /* ownership passes to the coordinator; NULL: none */
        } abort;
        const struct segment *window;
        struct {
            const struct state_edits *edits; /* the state that was written here; NULL: none */
            bool forget;
        } window_end;
        struct {
            uint64_t token;
            bool whole;      /* node 0 has put all parts together */
            const char *why; /* it failed; "": it did not */
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
    /* Return: whether other nodes are concerned. false: LOADED and WANT_SAVE are the job's own affair. */
    bool (*report)(struct coordinator *c, const struct report *report);
    /* Shows this node's ranks to other nodes. tick: also the data that only diagnostics show. */
    void (*tell)(struct coordinator *c, bool tick);

    /* The layout is known: makes the memory for data that moves between nodes. Return: 0 or -errno. */
    int (*form)(struct coordinator *c);
    /* Reserve the pages of that memory, in pieces. Return of reserve: 0 or -errno. */
    uint32_t (*n_reserve_pieces)(const struct coordinator *c);
    int (*reserve)(struct coordinator *c, uint32_t piece);
    /* Initial weights of rank 0 for other nodes. Any thread. Return: 0 or -errno. */
    int (*init)(struct coordinator *c, const struct request_init *request, const void *weights);
    /* Return: the diagnostic that compares the manifests of all nodes, NULL: they are not known. */
    struct diagnostic *(*compare_manifests)(struct coordinator *c);
    /* A record JOURNAL_NODE of the journal. Return: 0, or -EINVAL: there cannot be such a record. */
    int (*repeat)(struct coordinator *c, const void *packed, size_t n_bytes);

    /* Must a rank that is back wait before it takes part? */
    bool (*holds_back)(const struct coordinator *c);
    /* Has another node's rank, inside a backward, not pushed the parameter yet? */
    bool (*awaits)(const struct coordinator *c, unsigned rank, uint32_t param);
    /* Does this node wait for other nodes? dst: receives their names as a text; may be NULL. */
    bool (*waits_elsewhere)(const struct coordinator *c, char *dst, size_t size);
    /* Is the node that decides another one, and not reached? */
    bool (*is_cut_off)(const struct coordinator *c);

    /* Fetches elements that other nodes own. Return: 0: fetch->done() follows; 1: there is nothing to fetch; -ENOMEM.
     */
    int (*fetch)(struct coordinator *c, const struct fetch *fetch);
    /*
     * Finds the norm of a parameter that several nodes own, while the rank waits, and answers the rank. Return: 0; 1:
     * this node owns the whole parameter; -ENOMEM.
     */
    int (*ask_norm)(struct coordinator *c, struct job_rank *rank, uint32_t param);
};

struct coordinator {
    const struct coordinator_ops *ops;
    const struct parcels_ops *parcels; /* parcels.h */
    bool alone;                        /* a job of one node */
    bool sums_at_once;                 /* GPUs of several nodes add all ranks' gradients at once, from the slots */
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

/* Most reports are their kind and nothing else: (struct report){REPORT_ASKED}. Return: as report(). */
static inline bool report_progress(struct job *job, struct report report)
{
    return job->coordinator->ops->report(job->coordinator, &report);
}

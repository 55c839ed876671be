/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The coordinator decides when the nodes of a job continue together. The job reports its progress, and the coordinator
 * answers by calling a verb of the job: at once, or when all nodes have made the same progress.
 *
 *     report                     verb of the job
 *     declared                   job_form_now
 *     have_weights               job_train
 *     want_norm                  job_norm_is
 *     asked (for the step)       job_carry_out, or job_hold
 *     updated                    job_commit
 *     abort                      abort_start
 *     want_window, end_window    job_window_open, job_window_store, job_window_closed
 *     loaded (a checkpoint)      resume_is_agreed, or resume_older
 *     want_save, saved           save_take, save_publish, save_end
 *     stored (a window)          job_window_closed
 *     back (a rank that left)    job_is_back_late
 *     end_run                    drop_for_next
 *
 * A job of one node is a world of one, whose coordinator decides by itself (alone.c). Among several nodes, node 0
 * decides (daemon/nodes). A coordinator leaves functions out of its table that it does not need.
 *
 * Loop thread, except init() and reserve(), which workers call.
 */

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct coordinator;
struct diagnostic;
struct fetch;
struct job_rank;
struct parcels_ops;
struct request_init;
struct state_edits;
struct segment;

struct coordinator_ops {
    void (*free)(struct coordinator *c);

    /* ---- formation ---- */
    /* Have all ranks of this node declared their parameters? Reported in every settle while the job waits. */
    void (*declared)(struct coordinator *c, bool declared);
    /* The layout is known: makes the memory for data that moves between nodes. Return: 0 or -errno. */
    int (*form)(struct coordinator *c);
    /* Reserve the pages of that memory, in pieces. Return of reserve: 0 or -errno. */
    uint32_t (*n_reserve_pieces)(const struct coordinator *c);
    int (*reserve)(struct coordinator *c, uint32_t piece);
    /* This node has its memory, or cannot be formed, with the reason. Only the first of several reports counts. */
    void (*formed)(struct coordinator *c);
    void (*unformed)(struct coordinator *c, unsigned code, const char *why);
    /* Return: the diagnostic that compares the manifests of all nodes, NULL: they are not known. */
    struct diagnostic *(*compare_manifests)(struct coordinator *c);
    /* Initial weights of rank 0 for other nodes. Any thread. Return: 0 or -errno. */
    int (*init)(struct coordinator *c, const struct request_init *request, const void *weights);
    void (*have_weights)(struct coordinator *c);
    /* The job is being dropped: cancels the fetches of its ranks. */
    void (*cancel)(struct coordinator *c);
    /* The layout is dropped. */
    void (*drop)(struct coordinator *c);

    /* ---- the state of a daemon that was replaced ---- */
    /* A record JOURNAL_NODE of its journal. Return: 0, or -EINVAL: there cannot be such a record. */
    int (*repeat)(struct coordinator *c, const void *packed, size_t n_bytes);
    /* The job was taken over, and goes on. */
    void (*go_on)(struct coordinator *c);

    /* ---- ranks ---- */
    /* Reports this node's ranks to other nodes. tick: also the data that only diagnostics show. */
    void (*tell)(struct coordinator *c, bool tick);
    /* A rank that had left is back. all: all ranks of the world had left; late: the step was summed without it. */
    void (*back)(struct coordinator *c, struct job_rank *rank, bool all, bool late);
    /* All ranks of the world have left, and rank 0, which is this node's, begins another run. */
    void (*end_run)(struct coordinator *c);
    /* Must a rank that is back wait before it takes part? */
    bool (*holds_back)(const struct coordinator *c);
    /* Has another node's rank, inside a backward, not pushed the parameter yet? */
    bool (*awaits)(const struct coordinator *c, unsigned rank, uint32_t param);
    /* Asks another node's daemon where its rank is: look_answered() follows. */
    void (*look)(struct coordinator *c, unsigned rank);
    /* Where a rank of this node is, as others have asked. */
    void (*say_where)(struct coordinator *c, unsigned rank, const char *text);
    /* Does this node wait for other nodes? dst: receives their names as a text; may be NULL. */
    bool (*waits_elsewhere)(const struct coordinator *c, char *dst, size_t size);
    /* Is the node that decides another one, and not reached? */
    bool (*is_cut_off)(const struct coordinator *c);

    /* ---- checkpoints ---- */
    /*
     * This node has looked for a checkpoint to begin with, and loaded that of the step, or found none;
     * digest: of its description, 0: not known. resume_is_agreed() or resume_older() follows. Return: false: a job of
     * one node, which goes on by itself.
     */
    bool (*loaded)(struct coordinator *c, bool found, uint64_t step, uint64_t digest);
    /* This node goes on with the checkpoint that it has loaded. job_train() follows when all nodes do. */
    void (*resumed)(struct coordinator *c);
    /* One is due: save_take() follows. Return: false: a job of one node, which begins by itself. */
    bool (*want_save)(struct coordinator *c);
    /*
     * This node has written what it owns. whole: node 0 has put all parts together. why: why this failed; "": it did
     * not.
     */
    void (*saved)(struct coordinator *c, uint64_t token, bool whole, const char *why);

    /* ---- the step ---- */
    void (*want_norm)(struct coordinator *c);
    void (*asked)(struct coordinator *c);
    void (*updated)(struct coordinator *c);
    /* why: of zerod_abort_step, "" for none; reason: ownership passes to the coordinator, may be NULL. */
    void (*abort)(struct coordinator *c, int64_t rank, const char *why, struct diagnostic *reason);

    /* ---- state between steps ---- */
    void (*want_window)(struct coordinator *c);
    /* This node has no memory for the open window. */
    void (*lacks_memory)(struct coordinator *c);
    /* The window has this segment. NULL: the window is gone. */
    void (*window)(struct coordinator *c, const struct segment *segment);
    /* edits: the state that was written here; NULL: none. */
    void (*end_window)(struct coordinator *c, const struct state_edits *edits, bool forget);
    void (*stored)(struct coordinator *c);
    /*
     * Fetches elements that other nodes own. Return: 0: fetch->done() follows; 1: there is nothing to fetch; -ENOMEM.
     */
    int (*fetch)(struct coordinator *c, const struct fetch *fetch);
    /*
     * Finds the norm of a parameter that several nodes own, while the rank waits, and answers the rank. Return: 0; 1:
     * this node owns the whole parameter; -ENOMEM.
     */
    int (*ask_norm)(struct coordinator *c, struct job_rank *rank, uint32_t param);

    /* ---- GPUs ---- */
    void (*device_ready)(struct coordinator *c);
    void (*device_put)(struct coordinator *c, const char *key, const uint8_t *value, size_t n_bytes);
    void (*device_failed)(struct coordinator *c, uint32_t generation, const char *why);
};

struct coordinator {
    const struct coordinator_ops *ops;
    const struct parcels_ops *parcels; /* parcels.h */
    bool alone;                        /* a job of one node */
    bool sums_at_once;                 /* GPUs of several nodes add all ranks' gradients at once, from the slots */
};

/*
 * Each function calls its namesake in the coordinator's table. If that is NULL, it does nothing and returns a default.
 */
static inline void coordinator_free(struct coordinator *c)
{
    if (c)
        c->ops->free(c);
}

static inline void coordinator_declared(struct coordinator *c, bool declared)
{
    if (c->ops->declared)
        c->ops->declared(c, declared);
}

static inline int coordinator_form(struct coordinator *c)
{
    return c->ops->form ? c->ops->form(c) : 0;
}

static inline uint32_t coordinator_n_reserve_pieces(const struct coordinator *c)
{
    return c->ops->n_reserve_pieces ? c->ops->n_reserve_pieces(c) : 0;
}

static inline int coordinator_reserve(struct coordinator *c, uint32_t piece)
{
    return c->ops->reserve ? c->ops->reserve(c, piece) : 0;
}

static inline void coordinator_formed(struct coordinator *c)
{
    if (c->ops->formed)
        c->ops->formed(c);
}

static inline void coordinator_unformed(struct coordinator *c, unsigned code, const char *why)
{
    if (c->ops->unformed)
        c->ops->unformed(c, code, why);
}

static inline struct diagnostic *coordinator_compare_manifests(struct coordinator *c)
{
    return c->ops->compare_manifests ? c->ops->compare_manifests(c) : NULL;
}

static inline int coordinator_init(struct coordinator *c, const struct request_init *request, const void *weights)
{
    return c->ops->init ? c->ops->init(c, request, weights) : 0;
}

static inline void coordinator_have_weights(struct coordinator *c)
{
    if (c->ops->have_weights)
        c->ops->have_weights(c);
}

static inline void coordinator_cancel(struct coordinator *c)
{
    if (c->ops->cancel)
        c->ops->cancel(c);
}

static inline void coordinator_drop(struct coordinator *c)
{
    if (c->ops->drop)
        c->ops->drop(c);
}

static inline int coordinator_repeat(struct coordinator *c, const void *packed, size_t n_bytes)
{
    return c->ops->repeat ? c->ops->repeat(c, packed, n_bytes) : -EINVAL;
}

static inline void coordinator_go_on(struct coordinator *c)
{
    if (c->ops->go_on)
        c->ops->go_on(c);
}

static inline void coordinator_tell(struct coordinator *c, bool tick)
{
    if (c->ops->tell)
        c->ops->tell(c, tick);
}

static inline void coordinator_back(struct coordinator *c, struct job_rank *rank, bool all, bool late)
{
    if (c->ops->back)
        c->ops->back(c, rank, all, late);
}

static inline void coordinator_end_run(struct coordinator *c)
{
    if (c->ops->end_run)
        c->ops->end_run(c);
}

static inline bool coordinator_holds_back(const struct coordinator *c)
{
    return c->ops->holds_back ? c->ops->holds_back(c) : false;
}

static inline bool coordinator_awaits(const struct coordinator *c, unsigned rank, uint32_t param)
{
    return c->ops->awaits ? c->ops->awaits(c, rank, param) : false;
}

static inline void coordinator_look(struct coordinator *c, unsigned rank)
{
    if (c->ops->look)
        c->ops->look(c, rank);
}

static inline void coordinator_say_where(struct coordinator *c, unsigned rank, const char *text)
{
    if (c->ops->say_where)
        c->ops->say_where(c, rank, text);
}

static inline bool coordinator_waits_elsewhere(const struct coordinator *c, char *dst, size_t size)
{
    return c->ops->waits_elsewhere ? c->ops->waits_elsewhere(c, dst, size) : false;
}

static inline bool coordinator_is_cut_off(const struct coordinator *c)
{
    return c->ops->is_cut_off ? c->ops->is_cut_off(c) : false;
}

static inline bool coordinator_loaded(struct coordinator *c, bool found, uint64_t step, uint64_t digest)
{
    return c->ops->loaded ? c->ops->loaded(c, found, step, digest) : false;
}

static inline void coordinator_resumed(struct coordinator *c)
{
    if (c->ops->resumed)
        c->ops->resumed(c);
}

static inline bool coordinator_want_save(struct coordinator *c)
{
    return c->ops->want_save ? c->ops->want_save(c) : false;
}

static inline void coordinator_saved(struct coordinator *c, uint64_t token, bool whole, const char *why)
{
    if (c->ops->saved)
        c->ops->saved(c, token, whole, why);
}

static inline void coordinator_want_norm(struct coordinator *c)
{
    if (c->ops->want_norm)
        c->ops->want_norm(c);
}

static inline void coordinator_asked(struct coordinator *c)
{
    if (c->ops->asked)
        c->ops->asked(c);
}

static inline void coordinator_updated(struct coordinator *c)
{
    if (c->ops->updated)
        c->ops->updated(c);
}

static inline void coordinator_abort(struct coordinator *c, int64_t rank, const char *why, struct diagnostic *reason)
{
    if (c->ops->abort)
        c->ops->abort(c, rank, why, reason);
}

static inline void coordinator_want_window(struct coordinator *c)
{
    if (c->ops->want_window)
        c->ops->want_window(c);
}

static inline void coordinator_lacks_memory(struct coordinator *c)
{
    if (c->ops->lacks_memory)
        c->ops->lacks_memory(c);
}

static inline void coordinator_window(struct coordinator *c, const struct segment *segment)
{
    if (c->ops->window)
        c->ops->window(c, segment);
}

static inline void coordinator_end_window(struct coordinator *c, const struct state_edits *edits, bool forget)
{
    if (c->ops->end_window)
        c->ops->end_window(c, edits, forget);
}

static inline void coordinator_stored(struct coordinator *c)
{
    if (c->ops->stored)
        c->ops->stored(c);
}

static inline int coordinator_fetch(struct coordinator *c, const struct fetch *fetch)
{
    return c->ops->fetch ? c->ops->fetch(c, fetch) : 1;
}

static inline int coordinator_ask_norm(struct coordinator *c, struct job_rank *rank, uint32_t param)
{
    return c->ops->ask_norm ? c->ops->ask_norm(c, rank, param) : 1;
}

static inline void coordinator_device_ready(struct coordinator *c)
{
    if (c->ops->device_ready)
        c->ops->device_ready(c);
}

static inline void coordinator_device_put(struct coordinator *c, const char *key, const uint8_t *value, size_t n_bytes)
{
    if (c->ops->device_put)
        c->ops->device_put(c, key, value, n_bytes);
}

static inline void coordinator_device_failed(struct coordinator *c, uint32_t generation, const char *why)
{
    if (c->ops->device_failed)
        c->ops->device_failed(c, generation, why);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The executor does a job's work in host memory or on GPUs. The job decides when to do which work. The executor does
 * this work, and reports the result by a callback. There are three implementations of the functions below, for data in
 * these places:
 *
 *                       gradients, weights    masters, moments
 *   executor-host.c     host memory           host memory
 *   executor-device.c   GPUs                  GPUs
 *   executor-offload.c  GPUs                  host memory
 *
 * The executor also makes the step (step.h). step_post() and step_update() call functions (struct step_ops) that work
 * where the step's memory is.
 *
 * An executor uses the layout, the configuration, the state, the step, the kernels, the workers and the engines of
 * GPUs. It does not use the job, ranks' requests or other nodes. It gets elements from other nodes by events.fetch().
 *
 * The staging copy is host memory for a state on GPUs (state.h). It has pages only while executor_load() and
 * executor_store() need them. Because of the staging copy, the code that checks and stores edits is the same for all
 * executors.
 *
 * The argument of done() is the result: 0, -ENOMEM, or -ECANCELED. After -ECANCELED the job is being dropped, and the
 * owner only frees the call's arguments. No function calls done() before the function returns. All functions are for
 * the loop thread, except executor_reserve() and executor_reserve_rest().
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/wire-request.h"
#include "daemon/memory/state.h"

struct config;
struct devices;
struct executor;
struct executor_ops;
struct fetch;
struct kernels;
struct ring;
struct ring_slot;
struct segment;
struct step;
struct uv_loop_s;
struct work;
struct worker_pool;

typedef void (*executor_done)(void *userdata, int result);

/* Reports and requests of the executor to its owner, the job. */
struct executor_events {
    /* The memory of this process is reserved. On several nodes, engines may start now. */
    void (*reserved)(void *userdata);
    /* All memory is reserved and zeroed, so executor_init() is allowed now. */
    void (*formed)(void *userdata);
    /* Making the memory has failed. result: -errno. why: a sentence without a full stop; unused for -ECANCELED. */
    void (*unformed)(void *userdata, int result, const char *why);
    /* An engine of the GPUs is ready again. Called only after formed(). */
    void (*ready)(void *userdata);
    /* An engine of the GPUs has failed. generation: the generation of the next engine. */
    void (*failed)(void *userdata, uint32_t generation, const char *why);
    /* Several nodes: sends a value to the engines of the other nodes. */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* A load of parameters into a pool has ended. result: as for done(). */
    void (*loaded)(void *userdata, int result);
    /*
     * Several nodes: starts to fetch elements that other nodes own. Return: 0, or 1 if there are no such elements, or
     * -errno.
     */
    int (*fetch)(void *userdata, const struct fetch *what);
    /* Called at the end of every callback from an engine of the GPUs. */
    void (*after)(void *userdata);
    void *userdata;
};

struct executor_options {
    const struct config *config; /* all pointers are borrowed, and must outlive the executor */
    const struct layout *layout;
    const struct kernels *kernels;
    struct worker_pool *pool;
    struct uv_loop_s *loop; /* serves the engines of GPUs */
    bool several_nodes;     /* this process has the ranks of one node */
    uint64_t gather_bytes;  /* stage 3, in host memory: bound for gathered parameters */
    struct executor_events events;
};

enum { EXECUTOR_SEGMENTS = 5 };

/* The segments that a rank maps. A segment without bytes has no descriptor. */
struct executor_segments {
    struct wire_segment segments[EXECUTOR_SEGMENTS];
    int fds[EXECUTOR_SEGMENTS]; /* each a descriptor that the caller closes, or a negative errno */
    const uint8_t *gpu;         /* id of the rank's GPU, WIRE_GPU_BYTES; NULL: host memory; not owned */
};

/* Initial weights of a parameter, or of a range of its elements, in rank 0's ring. */
struct executor_init {
    struct ring *ring; /* must stay until done() */
    unsigned local_rank;
    struct request_init request;
    /* Several nodes: keeps the bytes for other nodes. Called on a worker. Return: 0 or -errno. May be NULL. */
    int (*keep)(void *userdata, const struct request_init *request, const void *bytes);
    executor_done done;
    void *userdata;
};

/* A request for the 64-bit sum of a part that was pushed again. */
struct executor_verify {
    const struct ring_slot *slot; /* must stay until done() */
    unsigned local_rank;
    uint32_t part;
    void (*done)(void *userdata, int result, uint64_t sum);
    void *userdata;
};

/* Values of a parameter that this node owns. */
struct executor_read {
    uint32_t param;
    enum state_kind kind;
    /*
     * Stage 3: reads weights in the parameter's dtype, and dst has room for the owned ones. Else reads fp32, and dst
     * has room for the whole parameter.
     */
    bool weights;
    void *dst; /* must stay until done() */
    executor_done done;
    void *userdata;
};

enum executor_attendance {
    TRAINER_LOST,     /* the process or its connection has ended */
    TRAINER_FOUND,    /* the process is connected again; only the connection had ended */
    TRAINER_REPLACED, /* another process attached: the previous one's points are not awaited */
};

struct executor {
    const struct executor_ops *ops;
    struct executor_options options;
    struct state *state;     /* owned */
    struct step *step;       /* owned */
    struct devices *devices; /* owned; NULL: no GPUs */
    struct pools *pools;     /* owned; stage 3: NULL until the memory of the GPUs is allocated; else NULL */
    unsigned first_rank, n_local;
    bool several_nodes;
    bool replays;                  /* true between executor_begin_replay() and executor_end_replay() */
    bool gathers;                  /* stage 3: ranks gather weights, and only these have memory */
    bool clears;                   /* new memory of the GPUs is being zeroed, or is not kept yet */
    bool holds_state;              /* masters and moments are in host memory */
    bool publishes;                /* an update writes the weights that all ranks of the job map */
    bool on_gpus;                  /* gradients are on GPUs: pushes may name points (core/wire/progress.h) */
    uint64_t ring_bytes;           /* size of a rank's ring */
    uint64_t copy_bytes;           /* size of the staging copy; 0: no staging copy */
    const struct segment *landing; /* stage 3: receives other nodes' weights; NULL: host memory gets none */
};

/* Makes an executor. The executor's memory has addresses, but no pages, and no work runs yet. Return: 0 or -errno. */
int executor_new(struct executor **out, const struct executor_options *options);
/* Must be called after executor_stop(). NULL is fine. */
void executor_free(struct executor *executor);

/*
 * executor_reserve() reserves the pages of one of executor_n_reserve_pieces() pieces. Any order, any thread. Return: 0
 * or -errno.
 */
uint32_t executor_n_reserve_pieces(const struct executor *executor);
int executor_reserve(struct executor *executor, uint32_t piece);

/*
 * A daemon that adopts the memory of an earlier daemon calls this instead of executor_reserve(): reserves the pages of
 * memory that was not kept. Any thread. Return: 0 or -errno.
 */
int executor_reserve_rest(const struct executor *executor);
/*
 * Call it when the pages are reserved. reserved() follows, and formed() or unformed(). adopted: the memory is that of an
 * earlier daemon, so only events of engines on GPUs follow.
 */
void executor_start(struct executor *executor, bool adopted);
/*
 * Begin and end the replay of a killed daemon's log. During the replay the executor reduces and verifies nothing
 * (step_begin_replay()), and awaits all points, because trainers may still be alive. After executor_end_replay() the
 * caller starts the verifications that have no record.
 */
void executor_begin_replay(struct executor *executor);
void executor_end_replay(struct executor *executor);
/* Cancels all current and later work on GPUs. NULL is fine. */
void executor_cancel(struct executor *executor);
/* Ends all work, so that memory can be freed. Calls done() of all running work. NULL is fine. */
void executor_stop(struct executor *executor);
/*
 * Changes the number of ranks. Only for one node, in host memory, without running work or formed ranks. layout: a
 * layout of the same parameters, which must outlive the executor. The executor no longer uses the previous layout.
 * Return: 0 or -errno. After an error, the executor has not changed.
 */
int executor_repartition(struct executor *executor, const struct layout *layout, uint64_t gather_bytes);
/*
 * Fills in the segments of a formed rank: ring, overflow, weights or pool, and the page of progress (on GPUs) or
 * published parameters. The caller adds the credit page.
 */
void executor_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                       struct executor_segments *segments);
/* Tells the executor that the process of a formed rank is lost, connected again, or replaced. */
void executor_attend(struct executor *executor, unsigned local_rank, enum executor_attendance what,
                     uint64_t incarnation);
/*
 * Only if on_gpus. Return: whether work waits for this point of the local rank's GPU. False if the rank's process is
 * lost.
 */
bool executor_awaits(const struct executor *executor, unsigned local_rank, uint64_t point);
/* Sets masters and weights to the initial values. Return: 0 or -ENOMEM. */
int executor_init(struct executor *executor, const struct executor_init *init);
/*
 * Several nodes: sets the owned masters to the initial weights that node 0 sent. weights: laid out as the weight
 * segment, which it is in stages 1 and 2; must stay until done(). Return: 0 or -errno.
 */
int executor_adopt(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata);
/* Computes the 64-bit sum of a part that was pushed again. Return: 0 or -errno. */
int executor_verify(struct executor *executor, const struct executor_verify *verify);
/* Return: 0 or -ENOMEM. */
int executor_read(struct executor *executor, const struct executor_read *read);
/*
 * Reserves the pages of a write window's segment, and copies to it the committed weights that this node owns. Return: 0
 * or -ENOMEM.
 */
int executor_show(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
/*
 * Copies state and weights to the memory of struct state, so that they can be edited. Return: 0, -ENOMEM, or 1 if the
 * executor always has them in that memory. After 1, done() is not called.
 */
int executor_load(struct executor *executor, executor_done done, void *userdata);
/*
 * Copies state and weights from the memory of struct state to the executor's memory. Return: 0, -ENOMEM, -ECANCELED, or
 * 1 if both are the same memory. After 1, done() is not called.
 */
int executor_store(struct executor *executor, executor_done done, void *userdata);
/* Frees the pages of the staging copy, if there is one. */
void executor_empty(struct executor *executor);
/* Return: whether memory is being cleared or a parameter is being loaded. NULL is idle. */
bool executor_is_busy(const struct executor *executor);

/* Posts work without items, so that the loop calls done(). */
void executor_post_nothing(const struct executor *executor, struct work *work, void (*done)(struct work *work));

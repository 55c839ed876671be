/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The executor does a job's work where the job's memory lies. The job decides which work is done, and when; the
 * executor does it and reports the result by a callback. Each place is one implementation of the same verbs:
 *
 *                       gradients, weights    masters, moments
 *   executor-host.c     host memory           host memory
 *   executor-device.c   GPUs                  GPUs
 *   executor-offload.c  GPUs                  host memory
 *
 * The step itself (step.h) keeps its verbs: the step that an executor makes carries out step_post() and step_update()
 * where the memory lies (struct step_ops).
 *
 * An executor knows the layout, the configuration, the state, the step, the kernels, the workers and the engines of
 * GPUs. It knows no job, no ranks' requests and no other node: it fetches other nodes' elements through events.fetch().
 *
 * Staging copy: the state in host memory of a job whose state lies on GPUs (state.h). It has no pages but
 * while executor_load() and executor_store() need them, so that the code that judges and stores is the same everywhere.
 *
 * done(): result 0; -ENOMEM; or -ECANCELED: the job is being dropped, and the owner only frees the call's arguments. It
 * is never called from within the verb. All functions are for the loop's thread, except executor_reserve().
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

/* Reports of the executor to its owner, and requests. */
struct executor_events {
    /* The memory of this process is reserved. Several nodes: engines may start. */
    void (*reserved)(void *userdata);
    /* All memory is reserved, and holds zeroes: initial weights may come. */
    void (*formed)(void *userdata);
    /* There will be no memory. result: -ECANCELED, or why is a sentence without a full stop. */
    void (*unformed)(void *userdata, int result, const char *why);
    /* An engine of the GPUs is ready, and the job is formed. */
    void (*ready)(void *userdata);
    /* An engine of the GPUs has failed. generation: of the next one. */
    void (*failed)(void *userdata, uint32_t generation, const char *why);
    /* Several nodes: a value for the engines of the others. */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* Parameters have been loaded into a pool, or could not be. result: as done()'s. */
    void (*loaded)(void *userdata, int result);
    /* Several nodes: fetches elements that other nodes own. Return: 0; 1: other nodes own none of them; or -errno. */
    int (*fetch)(void *userdata, const struct fetch *what);
    /* After every callback from an engine of the GPUs. */
    void (*after)(void *userdata);
    void *userdata;
};

struct executor_options {
    const struct config *config; /* not consumed, must outlive the executor; so must the other pointers' targets */
    const struct layout *layout;
    const struct kernels *kernels;
    struct worker_pool *pool;
    struct uv_loop_s *loop; /* of the engines of GPUs */
    bool several_nodes;     /* this process has the ranks of one of them */
    uint64_t gather_bytes;  /* stage 3, in host memory: the most that gathered parameters may use */
    struct executor_events events;
};

enum { EXECUTOR_SEGMENTS = 5 };

/* The segments that a rank maps. A segment without bytes has no descriptor. */
struct executor_segments {
    struct wire_segment segments[EXECUTOR_SEGMENTS];
    int fds[EXECUTOR_SEGMENTS]; /* the caller's; or a negative errno */
    const uint8_t *gpu;         /* WIRE_GPU_BYTES, or NULL: host memory; borrowed */
};

/* Initial weights of a parameter, or of a range of its elements, as rank 0 has put them into its ring. */
struct executor_init {
    struct ring *ring; /* must stay until done */
    unsigned local_rank;
    struct request_init request;
    /* Several nodes: keeps the bytes for other nodes; on a worker. Return: 0 or -errno. May be NULL. */
    int (*keep)(void *userdata, const struct request_init *request, const void *bytes);
    executor_done done;
    void *userdata;
};

/* A part that was pushed again: its 64-bit sum. */
struct executor_verify {
    const struct ring_slot *slot; /* must stay until done */
    unsigned local_rank;
    uint32_t part;
    void (*done)(void *userdata, int result, uint64_t sum);
    void *userdata;
};

enum executor_attendance {
    TRAINER_LOST,     /* the process is gone, or its connection is */
    TRAINER_FOUND,    /* it was only its connection */
    TRAINER_REPLACED, /* another process: points of the one before are not waited for */
};

enum gathered {
    GATHER_LOADS, /* loaded() follows */
    GATHER_THERE,
    GATHER_LOST, /* there is no memory for it */
};

struct executor {
    const struct executor_ops *ops;
    struct executor_options options;
    struct state *state;     /* owned */
    struct step *step;       /* owned */
    struct devices *devices; /* owned; NULL: no GPUs */
    unsigned first_rank, n_local;
    bool several_nodes;
    bool gathers;                  /* stage 3: only weights that ranks gather have memory */
    bool holds_state;              /* masters and moments are in host memory */
    bool publishes;                /* an update writes weights where all ranks of the job map them */
    bool on_gpus;                  /* gradients lie on GPUs: pushes may name points (core/wire/progress.h) */
    uint64_t ring_bytes;           /* of a rank */
    uint64_t copy_bytes;           /* of the staging copy; 0: the state is in host memory */
    const struct segment *landing; /* stage 3: where weights of other nodes come in; NULL: not in host memory */
};

/* Memory has addresses, but no pages, and nothing runs. Return: 0 or -errno. */
int executor_new(struct executor **out, const struct executor_options *options);
/* NULL is fine. After executor_stop(). */
void executor_free(struct executor *executor);

/* Reserving pages, in any order and on any threads. Return: 0 or -errno. */
uint32_t executor_n_reserve_pieces(const struct executor *executor);
int executor_reserve(struct executor *executor, uint32_t piece);

/* All memory of this process has its pages: reserved() follows, and formed() or unformed(). */
void executor_start(struct executor *executor);
/*
 * The memory is an earlier daemon's. executor_reserve_rest(): pages of what is not kept; any thread. Return: 0 or
 * -errno. Then executor_go_on(): GPUs get an engine, and no event follows but those of engines.
 */
int executor_reserve_rest(const struct executor *executor);
void executor_go_on(struct executor *executor);
/* Cancels all work on GPUs, under way and later. NULL is fine. */
void executor_cancel(struct executor *executor);
/* Ends all work, before its memory is freed: done() of all work under way is called from within. NULL is fine. */
void executor_stop(struct executor *executor);
/*
 * Changes the number of ranks: one node, host memory, no work under way, no rank formed. layout: of the same
 * parameters; not consumed, must outlive the executor, which no longer uses the one before. Return: 0; or -errno, then
 * nothing has changed.
 */
int executor_repartition(struct executor *executor, const struct layout *layout, uint64_t gather_bytes);
/* A formed rank's memory: ring, its overflow, its credit page, weights or pool. */
void executor_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                       struct executor_segments *segments);
/* The process of a formed rank is lost, found or replaced. */
void executor_attend(struct executor *executor, unsigned local_rank, enum executor_attendance what,
                     uint64_t incarnation);
/* on_gpus: would work wait for that point of the local rank's GPU? Not if it was lost with its process. */
bool executor_awaits(const struct executor *executor, unsigned local_rank, uint64_t point);
/* Sets masters and weights to the initial values. Return: 0 or -ENOMEM. */
int executor_init(struct executor *executor, const struct executor_init *init);
/*
 * Several nodes: initial weights have come in, laid out as weights; in stages 1 and 2 they are in the state's weights.
 * Sets the owned masters to their values. weights: must stay until done. Return: 0 or -errno.
 */
int executor_adopt(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata);
/* Return: 0 or -errno. */
int executor_verify(struct executor *executor, const struct executor_verify *verify);
/*
 * Reads those of a parameter's values that this node owns, as fp32. dst: of the parameter's start; must stay until
 * done. Return: 0 or -ENOMEM.
 */
int executor_read(struct executor *executor, uint32_t param, enum state_kind kind, float *dst, executor_done done,
                  void *userdata);
/* Stage 3: reads a parameter's owned weights, in their own type. dst: of the first owned one. Return: 0 or -ENOMEM. */
int executor_read_weights(struct executor *executor, uint32_t param, uint8_t *dst, executor_done done, void *userdata);
/*
 * Copies those of the committed weights that this node owns to a write window, and reserves its pages first. Return: 0
 * or -ENOMEM.
 */
int executor_show(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
/*
 * Copies state and weights to the memory of struct state, where they can then be written. Return: 0; 1: they always are
 * there, and done() is not called; or -ENOMEM.
 */
int executor_load(struct executor *executor, executor_done done, void *userdata);
/*
 * Copies state and weights from the memory of struct state to where the executor works. Return: 0; 1: they are there
 * already, and done() is not called; -ENOMEM; or -ECANCELED.
 */
int executor_store(struct executor *executor, executor_done done, void *userdata);
/* Frees the pages of the staging copy, if there is one. */
void executor_empty(struct executor *executor);
/* Can a rank have all of these parameters gathered at once? */
bool executor_fits(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* A rank has gathered the parameter, or no longer has it. */
void executor_hold(struct executor *executor, uint32_t param);
void executor_release(struct executor *executor, uint32_t param);
/* A rank waits for these parameters: starts to load those that are absent. */
void executor_gather(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* Are the parameters that the rank waits for loaded? Call it after executor_gather(), and again after loaded(). */
enum gathered executor_find(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* Finds the parameters' places in the rank's pool. Return: false when their places are those of the layout. */
bool executor_places(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params,
                     uint64_t *offsets_bytes);
/* A rank will gather these parameters next: loads them, if no other load or gather is hindered. */
void executor_hint(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/*
 * The weights have changed: loads the gathered parameters again, or drops them so that ranks gather again. Return:
 * whether done() follows.
 */
bool executor_refresh(struct executor *executor, void (*done)(void *userdata), void *userdata);
/* Is memory being cleared, or a parameter being loaded? NULL is idle. */
bool executor_is_busy(const struct executor *executor);
/* Return: bytes of the pages of gathered parameters in host memory. */
uint64_t executor_held_bytes(const struct executor *executor);
/* Parameters that ranks of an earlier daemon had gathered are held no longer, unless the ranks have said so. */
void executor_let_go(struct executor *executor);

/* Posts something that needs no worker, so that `done` comes from the loop. */
void executor_post_nothing(const struct executor *executor, struct work *work, void (*done)(struct work *work));

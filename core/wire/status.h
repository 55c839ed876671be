/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes the status of the daemon as JSON. Pure: no I/O, no clock. The key names must not change: docs/schema/ has a
 * JSON Schema for each answer, and tests compare answers with it.
 *
 * Ownership. A snapshot owns nothing: its strings and arrays must live until the call returns. A NULL string is JSON
 * null. The caller frees the returned texts; NULL means out of memory.
 *
 * Units. _ns are nanoseconds. Points in time are CLOCK_MONOTONIC, like now_ns. The JSON has only durations, so that it
 * can be read on another machine. Sizes are bytes or elements, as named. Parameters' names are printed as in
 * diagnostics. In other strings, bytes that are not UTF-8 become \xNN.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/traffic.h"
#include "kernels/update.h"

struct diagnostic;
struct layout;

/* Kinds of memory, in the order of printing; the words are those of `zerodctl plan`. */
enum status_memory {
    STATUS_MEMORY_STATE,
    STATUS_MEMORY_GRADIENT,
    STATUS_MEMORY_RING,
    STATUS_MEMORY_OVERFLOW,
    STATUS_MEMORY_STAGING,
    STATUS_MEMORY_WEIGHTS,
    STATUS_MEMORY_POOL,
    STATUS_MEMORY_FIXED,
    N_STATUS_MEMORY,
};

/* The phases of a step's time. Reduce overlaps the trainers' backward; wait and update do not. */
enum status_phase {
    STATUS_PHASE_WAIT,   /* time in which a rank of this node waited for ranks of any node */
    STATUS_PHASE_REDUCE, /* time in which at least one reduction was running */
    STATUS_PHASE_UPDATE, /* from the decision to the commit */
    N_STATUS_PHASES,
};

struct status_bytes {
    uint64_t held_bytes;
    uint64_t planned_bytes; /* 0 before the job is formed */
    bool on_device;         /* memory of the node's GPUs, not of the host */
};

struct status_time {
    uint64_t total_ns; /* over all committed steps; the wait also counts the open step */
    uint64_t last_ns;  /* time in the last committed step */
};

/* The number of refusals with a code since the daemon started. */
struct status_refused {
    unsigned code; /* 1001 for E1001 */
    uint64_t n;
};

struct status_counters {
    uint64_t n_pushes_admitted;
    uint64_t n_pushes_retried;
    uint64_t n_pushes_dropped;     /* pushes of aborted attempts */
    uint64_t n_pushes_accumulated; /* duplicates added as later passes */
    uint64_t n_pushes_redone;      /* a successor's pushes, compared with its predecessor's */
    uint64_t n_aborts;
    uint64_t n_reattaches;
    uint64_t n_overflow_slots; /* overflow slots that were granted */
    uint64_t n_warnings;
    uint64_t n_early_updates;         /* chunks that were updated before the decision, and accepted */
    uint64_t n_early_updates_dropped; /* chunks that were updated before the decision in vain */
};

/* Updates that are made before the step is decided. */
struct status_early {
    uint64_t n_elems, n_elems_last; /* the last applied step: updated early, and in all; n_elems_last 0: not known */
    const char *prevented_by;       /* one word, such as "memory"; NULL: nothing */
    char why[192];                  /* one line; "": prevented_by is NULL */
};

/* A node of a job that runs on several. */
struct status_node {
    const char *address;
    unsigned first_rank, n_ranks;
    bool known;         /* node 0 knows all nodes, any other node knows itself and node 0 */
    bool reached;       /* true for this node, and if the link to the node's daemon is up */
    const char *why;    /* why the node is not reached: a sentence, or the end of one */
    uint64_t silent_ns; /* time since the node's last message; UINT64_MAX: no message yet */
};

struct status_nodes {
    unsigned node; /* number of this node */
    const struct status_node *list;
    size_t n;
    const char *engine; /* such as "gloo" */
    uint32_t generation;
    bool connected;                /* the engines of that generation are connected */
    const struct traffic *traffic; /* N_TRAFFIC entries, of this node's engines */
    uint64_t waits_for;            /* node 0: mask of the nodes for which it waits */
    const char *waits_to;          /* the action that node 0 awaits; NULL on other nodes */
};

/* The engine of a job whose state is on GPUs. */
struct status_device {
    bool ready;
    int64_t pid; /* 0: no engine runs */
    uint32_t generation;
    uint64_t n_failures;           /* number of engines that have failed */
    const struct traffic *traffic; /* N_TRAFFIC entries, between ranks, of all engines so far; NULL: no engine yet */
    const char *versions;          /* reported by the last ready engine; NULL: no engine was ready yet */
};

/* The checkpoint that is being written. */
struct status_saving {
    uint64_t step;
    uint64_t n_bytes_done, n_bytes; /* n_bytes 0: not known yet */
    uint64_t began_ns;
    uint64_t waited_ns; /* time that updates have waited for the disk */
};

/* The last checkpoint that this daemon wrote. */
struct status_saved {
    uint64_t step, n_bytes;
    uint64_t ended_ns, took_ns, waited_ns;
};

struct status_checkpoint {
    const char *dir; /* NULL: no checkpoint is saved */
    bool wanted;     /* a requested checkpoint has not begun */
    bool is_saving, has_last;
    struct status_saving saving;
    struct status_saved last;
    uint64_t n_saved, n_failed;
    const char *why; /* why the last checkpoint failed; NULL: it did not fail */
};

/* An anomaly in a job's gradients or times; in the status while it lasts. */
struct status_finding {
    const char *kind; /* "rank-norm", "zero-gradient", "zero-lr", "slow-rank" */
    int64_t rank;     /* negative: none */
    int64_t param;    /* negative: none */
    const char *text; /* one line */
};

/* An overview of the job. All fields except now_ns, job, state and version may be zero. */
struct status {
    uint64_t now_ns;

    const char *job;
    const char *run_id;      /* NULL: no run yet */
    const char *state;       /* one word: "waiting", "forming", "training", "draining", ... */
    const char *version;     /* "0.1.0" */
    const char *isa;         /* instruction set of the kernels, such as "avx2" */
    const char *config_path; /* NULL: only defaults are used */
    const char *socket_path;
    int64_t pid;
    uint64_t started_ns;
    unsigned n_daemons; /* number of daemons that have served the run; 0: its state ends with this daemon */
    uint64_t found_ns;  /* time at which this daemon adopted the run; 0: it began the run */
    uint64_t away_ns;   /* time without a daemon before the adoption */
    const char *held;   /* why the kept state cannot be adopted; NULL: there is no such state */

    unsigned stage;
    uint64_t bucket_elems; /* most elements of a bucket, as configured */
    unsigned world_size;
    unsigned n_attached;         /* ranks of this node with a connection */
    const struct layout *layout; /* NULL before the job is formed */

    uint64_t step;    /* committed steps, skipped ones included (the epoch) */
    uint32_t attempt; /* number of aborts since the daemon started */
    uint64_t n_applied, n_skipped;
    uint64_t n_missing_steps;  /* this daemon's steps in which a rank missed a gradient that is not declared unused */
    uint32_t n_missing_params; /* parameters that no rank pushed in the last step */
    double loss_scale;
    bool has_grad_norm;         /* at least one step was decided */
    double grad_norm;           /* norm of the last decided step; a non-finite norm becomes null */
    double lr;                  /* learning rate of group 0 in the last step */
    const struct hyper *groups; /* layout->n_groups entries: settings of the last step; NULL: no step yet */
    double steps_per_s;         /* recent rate; 0 before two steps were committed */
    uint64_t last_step_ns;      /* time between the last two commits */
    struct status_time phases[N_STATUS_PHASES];
    uint64_t overlap_reduced_bytes; /* last micro-batch: bytes reduced before the last rank ended its backward */
    uint64_t overlap_bytes;         /* last micro-batch: all reduced bytes */
    struct status_early early;

    struct status_bytes memory[N_STATUS_MEMORY];
    uint64_t limit_bytes; /* limits.memory */

    struct status_counters counters;
    const struct status_refused *refused;
    size_t n_refused;

    int64_t slowest_rank;                     /* others waited longest for this rank in the last step; negative: none */
    uint64_t slowest_behind_ns;               /* how long they waited for the slowest rank */
    const struct diagnostic *last_diagnostic; /* NULL: none */
    const struct status_finding *findings;
    size_t n_findings;
    const struct status_nodes *nodes;         /* NULL: one node */
    bool has_device;                          /* the state is on GPUs; false: in host memory */
    struct status_device device;
    struct status_checkpoint checkpoint;
};

/* The phases of a rank's own time in steps; daemon/job/model/phases.h describes them. */
enum status_rank_phase {
    STATUS_RANK_FORWARD,
    STATUS_RANK_BACKWARD,
    STATUS_RANK_ROOM,
    STATUS_RANK_REST,
    N_STATUS_RANK_PHASES,
};

enum { STATUS_MAX_WAITS = 40 };

/* The time that a rank has waited; daemon/job/model/waits.h describes the kinds. */
struct status_wait {
    const char *state; /* state of the rank while it waits: "step" */
    const char *what;  /* what the rank waits for: "ranks", "nodes", "daemon" */
    uint64_t ns;       /* waiting time since the daemon began */
};

/* One rank, attached or not. */
struct status_rank {
    uint32_t rank;
    bool attached;
    int64_t pid; /* 0: no process has attached yet */
    int64_t uid;
    const char *state;           /* one word: "absent", "declaring", "backward", "step", "lost", ... */
    const char *client;          /* program and version, from the rank's Hello */
    uint64_t incarnation;        /* 0: no process has attached yet */
    uint64_t connected_since_ns; /* 0: not connected */
    uint64_t last_message_ns;    /* 0: no message yet */
    uint64_t step;
    uint32_t micro_batch;    /* the open micro-batch, or the next one */
    uint64_t n_pushes;       /* admitted pushes of this incarnation */
    uint64_t behind_total_ns; /* time that other ranks waited for this rank, since training began */
    struct status_wait waits[STATUS_MAX_WAITS];
    size_t n_waits;
    uint64_t phases_ns[N_STATUS_RANK_PHASES]; /* over all steps that this daemon has served as a whole */
    const char *waiting_for;                  /* "ranks 1, 3 to ask for the step"; NULL: the rank does not wait */
    uint64_t waiting_since_ns;
    const struct diagnostic *fault; /* stays until it is cleared; NULL: none */
};

/* The status of a parameter, beyond its layout. */
struct status_param {
    uint64_t n_steps; /* the parameter's own step count */
    bool has_grad_norm;
    double grad_norm; /* norm in the last decided step, unscaled, before clipping */
};

/* Return: the answer to `zerodctl status`: one object. */
char *status_json(const struct status *status);

/* Return: the answer to `zerodctl ranks`: an array, in the given order. */
char *ranks_json(const struct status_rank *ranks, size_t n, uint64_t now_ns);

/* has_pushed() returns whether a rank has pushed a part in the open step. */
struct status_pushes {
    unsigned first_rank, end_rank;
    bool (*has_pushed)(const void *userdata, unsigned rank, uint32_t part);
    const void *userdata;
};

/* Return: the answer to `zerodctl params`: an array in declaration order; empty if layout is NULL. pushes (pushed_by)
 * and params (layout->n_params entries) may be NULL. */
char *params_json(const struct layout *layout, const struct status_pushes *pushes, const struct status_param *params);

/* Return: the answer to `zerodctl diagnostics`: an array, in the given order. With a layout, every parameter of each
 * diagnostic is named. */
char *diagnostics_json(const struct diagnostic *const *list, size_t n, const struct layout *layout, uint64_t now_ns);

enum { STATUS_MAX_AWAITED = 3 };

/* The stack of a rank's process. */
struct status_stack {
    const struct status_rank *rank;
    const uint32_t *awaited; /* the first parameters of its open micro-batch that the rank has not pushed */
    size_t n_awaited;        /* number of all such parameters */
    const char *process;     /* the kernel's report on a process that cannot answer; NULL: none */
    bool is_pending;         /* the rank's answer has not arrived yet */
    uint64_t seen_ns;        /* when the stack was read; 0: no answer */
    const char *text;        /* threads and their frames; NULL: none */
};

/* Return: the answer to `zerodctl stacks`: an array, in the given order. */
char *stacks_json(const struct status_stack *stacks, size_t n, const struct layout *layout, uint64_t now_ns);

/* The daemon's data for `zerodctl report`. */
struct report {
    const struct status *status; /* its layout is set */
    const struct status_rank *ranks;
    size_t n_ranks;
    const struct status_stack *stacks; /* n_ranks entries */
    const struct status_pushes *pushes;
    const struct status_param *params;
    const struct diagnostic *const *diagnostics;
    size_t n_diagnostics;
    const char *config; /* as `zerod --print-config` prints it */
};

/* Return: the daemon's part of `zerodctl report`. zerodctl adds facts from /proc. */
char *report_json(const struct report *report);

/* The answer to "save". */
struct status_save {
    const char *message, *dir;
    bool is_saved;    /* the checkpoint is already on the disk */
    uint64_t step;    /* committed step at the time of the request; the checkpoint has this step or a later one */
    uint64_t n_ended; /* when n_saved + n_failed has this value, the save has ended */
};
char *save_json(const struct status_save *save);

/* message_json(): {"message": text} answers drain, abort-step and drop. error_json(): {"error": text} answers a command
 * that failed. */
char *message_json(const char *message);
char *error_json(const char *error);

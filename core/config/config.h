/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The configuration of one job: a YAML file as plain structs. Reading is strict: what is not understood is
 * refused (E1601), with every problem of the file in one go, each with file:line:column, what is allowed and
 * the valid key that was probably meant. Every value remembers where it came from.
 *
 * A struct config is constant once loaded and may be read by any thread; all it points to is its own.
 * Units are in the names: _bytes, _ms; counts of elements and steps carry none.
 */

#include "core/config/config-problem.h"
#include "core/config/lossscale.h"
#include "core/config/schedule.h"
#include "kernels/dtype.h"
#include "kernels/update.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum {
    CONFIG_E_INVALID = 1, /* see the problems; the daemon exits with EX_CONFIG (78) */
};

enum {
    CONFIG_MAX_BYTES = 1 << 20,    /* of a file; picked, ours are below 10 KiB */
    CONFIG_MAX_SOCKET_BYTES = 107, /* sun_path without its NUL */
    CONFIG_MAX_RANKS = 1024,       /* picked; what is kept per rank stays small next to the state */
    CONFIG_MAX_LOCAL_RANKS = 64,   /* on one node: who pushed a parameter is one mask */
    CONFIG_MAX_THREADS = 1024,     /* picked */
    CONFIG_MAX_LOCAL_GPUS = 16,    /* likewise, each with a GPU: what an engine is told of in one message */
    CONFIG_MAX_NODES = 64,         /* which of them have something is one mask */
    CONFIG_MAX_PIECES = 64,        /* of all nodes (subtree.h): and so is which of them have pushed */
};

enum config_device { CONFIG_DEVICE_CPU, CONFIG_DEVICE_CUDA };
enum config_collective { CONFIG_COLLECTIVE_LOCAL, CONFIG_COLLECTIVE_GLOO, CONFIG_COLLECTIVE_NCCL };
enum config_stage3 { CONFIG_STAGE3_MAPPED, CONFIG_STAGE3_GATHERED };
enum config_offload { CONFIG_OFFLOAD_NONE, CONFIG_OFFLOAD_CPU };
/*
 * Room for the gradients of models on GPUs, which GPUs copy into the rings of a job in host memory. A GPU computes a
 * micro-batch's gradients faster than the workers reduce them, so the backward waits if a ring is full.
 */
enum config_gpu_room {
    CONFIG_GPU_ROOM_NONE,        /* as for models in host memory */
    CONFIG_GPU_ROOM_BUCKETS,     /* large buckets, and a ring for several of them */
    CONFIG_GPU_ROOM_MICRO_BATCH, /* large buckets, and a ring for all gradients of a micro-batch */
};
enum config_allreduce_op { CONFIG_ALLREDUCE_MEAN, CONFIG_ALLREDUCE_SUM };
enum config_weights { CONFIG_WEIGHTS_SHARED, CONFIG_WEIGHTS_PRIVATE };
enum config_save_on_stop { CONFIG_SAVE_NOT, CONFIG_SAVE_ON_STOP, CONFIG_SAVE_AUTO /* only until it is read */ };
enum config_persist { CONFIG_PERSIST_RESTART, CONFIG_PERSIST_OFF };
enum config_on_duplicate { CONFIG_DUPLICATE_REJECT, CONFIG_DUPLICATE_ACCUMULATE, CONFIG_DUPLICATE_ABORT_STEP };
enum config_on_missing { CONFIG_MISSING_ZERO, CONFIG_MISSING_ERROR, CONFIG_MISSING_SKIP };
enum config_on_nonfinite { CONFIG_NONFINITE_SKIP, CONFIG_NONFINITE_ERROR };
enum config_on_leave { CONFIG_LEAVE_STOP, CONFIG_LEAVE_CONTINUE };

struct config_names {
    char **items;
    size_t n_items;
};

struct config_node {
    char *address; /* host:port */
    unsigned ranks;
};

struct config_nodes {
    struct config_node *items;
    size_t n_items;
};

struct config_listen {
    char *socket; /* absolute, at most CONFIG_MAX_SOCKET_BYTES */
    mode_t mode;
    /* Names or decimal ids, not looked up yet. */
    struct config_names allow_users, allow_groups;
    struct config_names admin_users, admin_groups;
};

struct config_world {
    unsigned size;             /* ranks in all */
    struct config_nodes nodes; /* empty: one node; else their ranks add up to size */
    unsigned node;             /* this one, an index into nodes */
    char *key_file;            /* absolute, or NULL */
};

struct config_zero {
    int stage;                   /* 1, 2, 3: as configured; config_stage() says what is done */
    uint64_t reduce_bucket_size; /* elements */
    bool overlap_comm;
    uint64_t stage3_max_live_parameters; /* elements, per rank */
    enum config_stage3 stage3_on_one_node;
    enum config_offload offload_optimizer;
    enum config_gpu_room gpu_room; /* of the job's ranks, not of the file */
};

struct config_optimizer {
    enum optimizer type; /* OPTIMIZER_ADAM: hyper.adam_w_mode says which Adam it is */
    struct hyper hyper;  /* fields that the type does not use stay 0 */
    unsigned optim_bits; /* of each moment: 8; or 32, which bf16 may make 16 */
    unsigned master_weight_bits; /* of masters of bf16 weights: 32 or 24 */
};

struct config_bf16 {
    bool optimizer_states; /* moments are bf16 */
    bool stochastic_rounding;
};

struct config_fp16 {
    bool enabled;
    struct lossscale_params scale;
};

struct config_diagnostics {
    enum config_on_duplicate on_duplicate;
    enum config_on_missing on_missing;
    enum config_on_nonfinite on_nonfinite;
    enum config_on_leave on_leave;
    struct config_names unused; /* patterns (fnmatch) */
    bool static_graph;
    uint64_t stall_warning_ms; /* 0: never */
    uint64_t stall_timeout_ms; /* 0: never */
    char *trace_dir;           /* NULL: none */
};

#define CONFIG_LOAD_LATEST "latest"
#define CONFIG_LOAD_NEVER "never"

struct config_checkpoint {
    char *dir;                 /* absolute; NULL: nothing is saved or loaded */
    struct config_names allow_groups;
    uint64_t save_steps;       /* 0: not by steps */
    uint64_t save_interval_ms; /* 0: not by time */
    unsigned save_total_limit; /* 0: all stay */
    enum config_save_on_stop save_on_stop;
    char *load; /* an absolute path, CONFIG_LOAD_LATEST or CONFIG_LOAD_NEVER */
    bool strict;
    uint64_t memory_bytes; /* 0: auto */
};

struct config_limits {
    uint64_t memory_bytes; /* 0: bounded only by free memory */
    unsigned clients;
    uint64_t handshake_timeout_ms;
    uint64_t reattach_timeout_ms;
};

/* As Welcome.configured has them. */
enum config_configured {
    CONFIG_GIVES_OPTIMIZER = 1 << 0,
    CONFIG_GIVES_LR = 1 << 1,
    CONFIG_GIVES_BETAS = 1 << 2,
    CONFIG_GIVES_EPS = 1 << 3,
    CONFIG_GIVES_WEIGHT_DECAY = 1 << 4,
    CONFIG_GIVES_MOMENTUM = 1 << 5,
    CONFIG_GIVES_DAMPENING = 1 << 6,
    CONFIG_GIVES_NESTEROV = 1 << 7,
    CONFIG_GIVES_LR_DECAY = 1 << 8,
    CONFIG_GIVES_SCHEDULER = 1 << 9, /* a number of the schedule, not only its type */
    CONFIG_GIVES_NS_COEFFICIENTS = 1 << 10,
    CONFIG_GIVES_NS_STEPS = 1 << 11,
    CONFIG_GIVES_ADJUST_LR_FN = 1 << 12,
    CONFIG_GIVES_MAX_LR = 1 << 13,          /* the schedule does not start from lr: also if its rate is a default */
    CONFIG_GIVES_LEAVE_CONTINUES = 1 << 14, /* diagnostics.on_leave: continue */
};

/* Where a value came from. */
struct config_origin {
    unsigned line, column; /* from 1; meaningless when not given */
    bool given;            /* else the default; in line 0: by the command line */
};

struct config {
    char *job;
    int log_level; /* LOG_ERR to LOG_DEBUG of syslog.h */
    struct config_listen listen;
    struct config_world world;
    struct config_zero zero;
    enum config_device device;
    enum config_collective collective;
    bool deterministic;
    struct config_optimizer optimizer;
    struct schedule scheduler;            /* SCHEDULE_NONE when there is none */
    uint64_t gradient_accumulation_steps; /* 0: auto, step() is the boundary */
    double gradient_clipping;             /* 0: off */
    enum config_allreduce_op gradient_allreduce_op;
    enum dtype communication_data_type; /* of gradients between nodes: DTYPE_F32 or DTYPE_BF16 */
    struct config_fp16 fp16;
    struct config_bf16 bf16;
    enum config_weights weights;
    enum config_persist persist;
    unsigned threads; /* 0: auto */
    struct config_diagnostics diagnostics;
    struct config_checkpoint checkpoint;
    struct config_limits limits;

    bool no_successors;            /* of the command line, not of the file: nobody starts a rank again */
    char *file;                    /* as the caller named it */
    struct config_origin *origins; /* one per row of config_table() */
};

/* Which engines were built; a configuration that needs another is refused. */
struct config_build {
    bool have_gloo;
    bool have_nccl;
};

/* Values of the command line, used for keys that the file lacks, as a DeepSpeed file does. 0 or NULL: not given. */
struct config_given {
    const char *socket;   /* listen.socket */
    unsigned ranks;       /* world.size; counts more than accelerate's num_processes */
    unsigned usual_ranks; /* world.size if nobody gives it */
};

/* A text to read instead of a file. */
struct config_source {
    struct config_text text;
    struct config_given given;
    const struct config_build *build; /* NULL: what this build has */
};

/*
 * Reads a file, or the DeepSpeed file that an accelerate file names; given: NULL, nothing. On success *out is the
 * caller's (config_free) and problems may hold notes; on failure *out is NULL. problems: initialised by the caller,
 * added to, in order of place. Return: 0, CONFIG_E_INVALID, or -ENOMEM.
 */
int config_load(struct config **out, const char *path, const struct config_given *given,
                struct config_problems *problems);
int config_load_string(struct config **out, const struct config_source *source, struct config_problems *problems);
void config_free(struct config *config);

/* The engines that this build has. */
const struct config_build *config_build_own(void);

/* Does the file or the command line have a value for the key, other than "auto"? Does the file itself? */
bool config_gives(const struct config *config, const char *path);
bool config_file_has(const struct config *config, const char *path);
/* Masters and moments are in host memory, and all else on GPUs? */
bool config_offloads(const struct config *config);
/* Stage 3 on GPUs: no state is in host memory, and frozen parameters are partitioned, too. */
bool config_partitions_all(const struct config *config);
/*
 * The stage by which the job's memory is laid out and its trainers work. Stage 3 partitions weights among nodes and
 * GPUs: on one node in host memory there is nothing to gather, so it is the same as stage 2, unless the configuration
 * says otherwise. config_stage_of(): of another stage than the configured one.
 */
unsigned config_stage(const struct config *config);
unsigned config_stage_of(const struct config *config, unsigned stage);
/* How many workers a daemon on this machine has. */
unsigned config_n_threads(const struct config *config);
/* Are gradients and state in one memory, as Muon needs them? */
bool config_can_use_muon(const struct config *config);
/* Does the daemon need OpenBLAS for this optimizer? On GPUs the engine needs cuBLAS. */
bool config_needs_openblas(const struct config *config, enum optimizer optimizer);
/* The moments that the optimizer has, and how they lie in memory. */
struct optimizer_moments config_moments(const struct config *config);
/* Does a job look for a checkpoint to begin with? */
bool config_loads(const struct config *config);
/* reduce_bucket_size where nobody gives one. A running job keeps the one that it was formed with. */
uint64_t config_usual_bucket_elems(const struct config *config);
bool config_chooses_bucket(const struct config *config);
/* Ranks on this node. */
unsigned config_local_ranks(const struct config *config);
/* The first rank of a node, and of this node. */
unsigned config_first_rank_of(const struct config *config, unsigned node);
unsigned config_first_rank(const struct config *config);
/* The name of what the optimizer computes: Adam with decoupled weight decay is AdamW. */
const char *config_optimizer_name(const struct config_optimizer *optimizer);
/*
 * For a configuration without an optimizer: takes the one of that name (as config_optimizer_name() has it), with its
 * own defaults and, if it is SGD, that momentum. Return: whether it was taken; else nothing has changed.
 */
bool config_choose_optimizer(struct config *config, const char *name, double momentum);
/* What the job's ranks need is known: reduce_bucket_size follows where nobody gives one. */
void config_choose_gpu_room(struct config *config, enum config_gpu_room room);
/* Which of these settings the file names: bits of enum config_configured. */
unsigned config_configured(const struct config *config);

/*
 * Every effective value with its origin, as YAML that loads back to the same configuration; origins are
 * comments. Return: 0, or -errno when the stream failed.
 */
int config_print(FILE *file, const struct config *config);

/*
 * The effective values of all keys that every node must have alike, one line "key: value" each, in the order of the
 * table. Return: the caller's (free), or NULL without memory.
 */
char *config_shared_text(const struct config *config);

/*
 * Compares such a text of ours with another node's, which may be of another version and is not trusted to be well
 * formed. sentence names the first keys that differ, with both values: "weights is private there and shared here".
 * Return: how many keys differ; with 0 the sentence is empty.
 */
size_t config_shared_difference(const char *here, const char *there, char *sentence, size_t size);

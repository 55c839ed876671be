/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The configuration of a job: a YAML file, read into plain structs. Reading is strict: it refuses unknown keys and bad
 * values (E1601), and reports all problems of the file at once, each with file:line:column, the allowed values and the
 * nearest valid key. Each value keeps its origin.
 *
 * After loading, a struct config is constant, and any thread may read it. It owns everything that it points to. Names
 * end in their unit (_bytes, _ms); counts of elements and steps have none.
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
    CONFIG_MAX_BYTES = 1 << 20,    /* size of a file; picked: zerod's own files are below 10 KiB */
    CONFIG_MAX_SOCKET_BYTES = 107, /* sun_path without its NUL */
    CONFIG_MAX_RANKS = 1024,       /* picked: data kept per rank stays small compared with the state */
    CONFIG_MAX_LOCAL_RANKS = 64,   /* on one node; a mask has a bit for each rank that pushed a parameter */
    CONFIG_MAX_THREADS = 1024,     /* picked */
    CONFIG_MAX_LOCAL_GPUS = 16,    /* ranks on one node with a GPU each; one message to an engine lists them */
    CONFIG_MAX_NODES = 64,         /* one mask has a bit for each node */
    CONFIG_MAX_PIECES = 64,        /* pieces of all nodes (subtree.h); a mask has a bit for each */
};

enum config_device { CONFIG_DEVICE_CPU, CONFIG_DEVICE_CUDA };
enum config_collective { CONFIG_COLLECTIVE_LOCAL, CONFIG_COLLECTIVE_GLOO, CONFIG_COLLECTIVE_NCCL };
enum config_stage3 { CONFIG_STAGE3_MAPPED, CONFIG_STAGE3_GATHERED };
enum config_offload { CONFIG_OFFLOAD_NONE, CONFIG_OFFLOAD_CPU };
/*
 * Room in the rings of a job in host memory for gradients that GPUs copy there. A GPU computes a micro-batch's
 * gradients faster than the workers reduce them, so the backward waits when a ring is full.
 */
enum config_gpu_room {
    CONFIG_GPU_ROOM_NONE,        /* the same as for models in host memory */
    CONFIG_GPU_ROOM_BUCKETS,     /* large buckets, and a ring for several of them */
    CONFIG_GPU_ROOM_MICRO_BATCH, /* large buckets, and a ring for all gradients of a micro-batch */
};
enum config_speculate { CONFIG_SPECULATE_NOT, CONFIG_SPECULATE, CONFIG_SPECULATE_AUTO };
enum config_allreduce_op { CONFIG_ALLREDUCE_MEAN, CONFIG_ALLREDUCE_SUM };
enum config_weights { CONFIG_WEIGHTS_SHARED, CONFIG_WEIGHTS_PRIVATE };
enum config_save_on_stop { CONFIG_SAVE_NOT, CONFIG_SAVE_ON_STOP, CONFIG_SAVE_AUTO /* replaced on reading */ };
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
    struct config_nodes nodes; /* empty: one node; else the nodes' ranks add up to size */
    unsigned node;             /* index of this node in nodes */
    char *key_file;            /* absolute, or NULL */
};

struct config_zero {
    int stage;                   /* 1 to 3, as configured; config_stage() returns the stage in use */
    uint64_t reduce_bucket_size; /* elements */
    bool overlap_comm;
    uint64_t stage3_max_live_parameters; /* elements, per rank */
    enum config_stage3 stage3_on_one_node;
    enum config_offload offload_optimizer;
    enum config_speculate speculative_update;
    enum config_gpu_room gpu_room; /* chosen by the job's ranks, not by the file */
    uint32_t spare_buckets;        /* so many first buckets have spare places; chosen when the job is formed */
    uint32_t early_buckets;        /* so many have places for copies of their sums; with offload, chosen likewise */
};

struct config_optimizer {
    enum optimizer type; /* OPTIMIZER_ADAM is AdamW if hyper.adam_w_mode is set */
    struct hyper hyper;  /* fields that the type does not use stay 0 */
    unsigned optim_bits; /* size of a moment: 8, or 32 (bf16 may make it 16) */
    unsigned master_weight_bits; /* size of a bf16 weight's master weight: 32 or 24 */
};

struct config_bf16 {
    bool optimizer_states; /* moments are in bf16 */
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
    char *dir; /* absolute; NULL: no checkpoint is saved or loaded */
    struct config_names allow_groups;
    uint64_t save_steps;       /* 0: not by steps */
    uint64_t save_interval_ms; /* 0: not by time */
    unsigned save_total_limit; /* 0: all checkpoints are kept */
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

/* The bits of Welcome.configured. */
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
    CONFIG_GIVES_SCHEDULER = 1 << 9, /* the file has a parameter of the schedule, not only its type */
    CONFIG_GIVES_NS_COEFFICIENTS = 1 << 10,
    CONFIG_GIVES_NS_STEPS = 1 << 11,
    CONFIG_GIVES_ADJUST_LR_FN = 1 << 12,
    CONFIG_GIVES_MAX_LR = 1 << 13,          /* the schedule does not start from lr, even if its rate is a default */
    CONFIG_GIVES_LEAVE_CONTINUES = 1 << 14, /* diagnostics.on_leave: continue */
};

/* Where a value came from. */
struct config_origin {
    unsigned line, column; /* from 1; undefined if not given */
    bool given;            /* false: the value is a default; line 0: given by the command line */
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
    enum dtype communication_data_type; /* type of gradients between nodes: DTYPE_F32 or DTYPE_BF16 */
    struct config_fp16 fp16;
    struct config_bf16 bf16;
    enum config_weights weights;
    enum config_persist persist;
    unsigned threads; /* 0: auto */
    struct config_diagnostics diagnostics;
    struct config_checkpoint checkpoint;
    struct config_limits limits;

    bool no_successors;            /* set by the command line: no program restarts a lost rank */
    char *file;                    /* the name that the caller passed */
    struct config_origin *origins; /* one per row of config_table() */
};

/* The engines that were built. A configuration that needs another engine is refused. */
struct config_build {
    bool have_gloo;
    bool have_nccl;
};

/* Values of the command line, for keys that the file lacks (a DeepSpeed file lacks some). 0 or NULL: not given. */
struct config_given {
    const char *socket;   /* listen.socket */
    unsigned ranks;       /* world.size; replaces accelerate's num_processes */
    unsigned usual_ranks; /* world.size if neither file nor command line has it */
};

/* A text to read instead of a file. */
struct config_source {
    struct config_text text;
    struct config_given given;
    const struct config_build *build; /* NULL: the engines of this build */
};

/*
 * Reads a file, or the DeepSpeed file that an accelerate file names. given may be NULL. The caller initialises
 * problems; the functions append new problems in the order of the file. On success the caller frees *out (config_free),
 * and problems may hold notes. On failure *out is NULL. Return: 0, CONFIG_E_INVALID, or -ENOMEM.
 */
int config_load(struct config **out, const char *path, const struct config_given *given,
                struct config_problems *problems);
int config_load_string(struct config **out, const struct config_source *source, struct config_problems *problems);
void config_free(struct config *config);

/* The engines that this build has. */
const struct config_build *config_build_own(void);

/*
 * config_gives(): does the file or the command line have a value for the key, other than "auto"? config_file_has():
 * does the file have such a value?
 */
bool config_gives(const struct config *config, const char *path);
bool config_file_has(const struct config *config, const char *path);
/* Are master weights and moments in host memory, and all other data on GPUs? */
bool config_offloads(const struct config *config);
/*
 * Does the job use stage 3 on GPUs without offloading? Then host memory has no state, and frozen parameters are
 * partitioned.
 */
bool config_partitions_all(const struct config *config);
/*
 * Return: the stage in use, for the layout of the job's memory and for its trainers. Stage 3 partitions weights among
 * nodes and GPUs. On one node in host memory there is nothing to gather, so stage 3 becomes stage 2, unless
 * zero.stage3_on_one_node says otherwise. config_stage_of() starts from the given stage, config_stage() from the
 * configured one.
 */
unsigned config_stage(const struct config *config);
unsigned config_stage_of(const struct config *config, unsigned stage);
/* Return: the number of workers of a daemon on this machine. */
unsigned config_n_threads(const struct config *config);
/* Are gradients and state in the same memory? Muon needs this. */
bool config_can_use_muon(const struct config *config);
/* Does the daemon need OpenBLAS for this optimizer? On GPUs the engine needs cuBLAS. */
bool config_needs_openblas(const struct config *config, enum optimizer optimizer);
/* Return: the optimizer's moments, and their type in memory. */
struct optimizer_moments config_moments(const struct config *config);
/* Does the job look for a checkpoint when it starts? */
bool config_loads(const struct config *config);
/*
 * config_usual_bucket_elems(): the reduce_bucket_size that zerod chooses. A running job keeps the size with which it
 * was formed. config_chooses_bucket(): does zerod choose the size, because neither file nor command line has one?
 */
uint64_t config_usual_bucket_elems(const struct config *config);
bool config_chooses_bucket(const struct config *config);
/* Return: the number of ranks on this node. */
unsigned config_local_ranks(const struct config *config);
/* Return: the first rank of a node; of this node. */
unsigned config_first_rank_of(const struct config *config, unsigned node);
unsigned config_first_rank(const struct config *config);
/* Return: the name of the algorithm that the optimizer computes. Adam with decoupled weight decay is AdamW. */
const char *config_optimizer_name(const struct config_optimizer *optimizer);
/*
 * Sets the optimizer of a configuration that has none, by its name (see config_optimizer_name()) and with its defaults.
 * momentum is for SGD only. Return: true if the optimizer is set; false if nothing has changed.
 */
bool config_choose_optimizer(struct config *config, const char *name, double momentum);
/* Can the job update chunks before the step is decided (zero_optimization.speculative_update)? */
bool config_can_speculate(const struct config *config);
/* Sets the room in the rings that the job's ranks need. Also sets reduce_bucket_size if zerod chooses that. */
void config_choose_gpu_room(struct config *config, enum config_gpu_room room);
/* Return: bits of enum config_configured for the settings that the file has. */
unsigned config_configured(const struct config *config);

/*
 * Prints every effective value as YAML, with its origin as a comment. The YAML loads back to the same configuration.
 * Return: 0, or -errno if the stream failed.
 */
int config_print(FILE *file, const struct config *config);

/*
 * Return: the effective values of all keys that must be equal on every node, one line "key: value" each, in the order
 * of the table. The caller frees the text. NULL if memory is exhausted.
 */
char *config_shared_text(const struct config *config);

/*
 * Compares this node's shared text with another node's, which may be of another version or malformed. sentence names
 * the first keys that differ, with both values: "weights is private there and shared here". Return: the number of keys
 * that differ. If it is 0, the sentence is empty.
 */
size_t config_shared_difference(const char *here, const char *there, char *sentence, size_t size);

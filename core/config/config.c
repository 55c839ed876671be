/* SPDX-License-Identifier: Apache-2.0 */

/* Answers questions about a configuration: ranks of this node, engines of this build, offloading. */

#include "core/config/config.h"

#include "core/base/base.h"
#include "core/config/config-table.h"
#include "core/config/config-value.h"

#include <assert.h>
#include <limits.h>
#include <sched.h>
#include <string.h>

/* The build files of an engine define its macro as true. */
#ifndef ZEROD_HAVE_GLOO
#define ZEROD_HAVE_GLOO false
#endif
#ifndef ZEROD_HAVE_NCCL
#define ZEROD_HAVE_NCCL false
#endif

const struct config_build *config_build_own(void)
{
    static const struct config_build own = {.have_gloo = ZEROD_HAVE_GLOO, .have_nccl = ZEROD_HAVE_NCCL};

    return &own;
}

void config_free(struct config *config)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    if (!config)
        return;
    for (size_t i = 0; i < n_keys; i++) {
        if (keys[i].kind == CONFIG_OURS && !strstr(keys[i].path, "[]"))
            config_value_deinit(&keys[i], config);
    }
    free(config->file);
    free(config->origins);
    free(config);
}

static const struct config_origin *origin_of(const struct config *config, const char *path)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    assert(config_table_lookup(path, UINT_MAX));
    for (size_t i = 0; i < n_keys; i++)
        if (config->origins[i].given && strcmp(keys[i].path, path) == 0)
            return &config->origins[i];
    return NULL;
}

bool config_gives(const struct config *config, const char *path)
{
    return origin_of(config, path) != NULL;
}

bool config_file_has(const struct config *config, const char *path)
{
    const struct config_origin *origin = origin_of(config, path);

    return origin && origin->line > 0;
}

/*
 * On one node a bucket of 2 MB stays in the cache from a trainer's copy to the reduction. Between nodes a bucket is
 * also the unit of sending, and costs a millisecond in addition to its bytes. docs/benchmarks.md has the measurements.
 * On GPUs each bucket costs kernel launches, and with Muon a GPU receives whole buckets from all other GPUs. The two
 * sizes for GPUs are picked. A model on a GPU pushes a gradient that is larger than a bucket in parts, which costs a
 * copy of the bytes: a step on an H200 took 465 ms with buckets of 50,000,000 elements, and 694 ms with 500,000.
 */
uint64_t config_usual_bucket_elems(const struct config *config)
{
    if (config->device == CONFIG_DEVICE_CUDA || config->zero.gpu_room != CONFIG_GPU_ROOM_NONE)
        return config->optimizer.type == OPTIMIZER_MUON ? 8000000 : 50000000;
    return config->world.nodes.n_items > 1 ? 8000000 : 500000;
}

bool config_chooses_bucket(const struct config *config)
{
    return !config_gives(config, "zero_optimization.reduce_bucket_size");
}

unsigned config_stage_of(const struct config *config, unsigned stage)
{
    bool is_one_memory = config->device == CONFIG_DEVICE_CPU && config->world.nodes.n_items <= 1;

    return stage == 3 && is_one_memory && config->zero.stage3_on_one_node == CONFIG_STAGE3_MAPPED ? 2 : stage;
}

unsigned config_stage(const struct config *config)
{
    assert(config->zero.stage >= 1 && config->zero.stage <= 3);
    return config_stage_of(config, (unsigned)config->zero.stage);
}

bool config_offloads(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CUDA && config->zero.offload_optimizer == CONFIG_OFFLOAD_CPU;
}

bool config_partitions_all(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CUDA && config_stage(config) == 3 && !config_offloads(config);
}

/* sched_getaffinity() is used because sysconf() also counts CPUs that taskset, a cpuset or Slurm keeps from this
 * process. */
unsigned config_n_threads(const struct config *config)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) == 0) /* fails if the machine has more CPUs than a cpu_set_t */
        n = CPU_COUNT(&set);
    return config->threads ? config->threads : (unsigned)MIN(MAX(n, 1L), (long)CONFIG_MAX_THREADS);
}

bool config_can_use_muon(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CPU || !config_offloads(config);
}

bool config_needs_openblas(const struct config *config, enum optimizer optimizer)
{
    return optimizer == OPTIMIZER_MUON && config->device == CONFIG_DEVICE_CPU;
}

struct optimizer_moments config_moments(const struct config *config)
{
    struct optimizer_moments moments = optimizer_moments(config->optimizer.type, &config->optimizer.hyper);

    if (config->optimizer.optim_bits == 8)
        moments.type = (struct moments_type){.dtype = DTYPE_SIGNED8, .stochastic = true};
    else if (config->bf16.optimizer_states)
        moments.type = (struct moments_type){.dtype = DTYPE_BF16, .stochastic = config->bf16.stochastic_rounding};
    moments.master24 = config->optimizer.master_weight_bits == 24;
    return moments;
}

bool config_loads(const struct config *config)
{
    const struct config_checkpoint *checkpoint = &config->checkpoint;

    return strcmp(checkpoint->load, CONFIG_LOAD_NEVER) != 0 &&
           (checkpoint->dir || strcmp(checkpoint->load, CONFIG_LOAD_LATEST) != 0);
}

unsigned config_local_ranks(const struct config *config)
{
    if (config->world.nodes.n_items == 0)
        return config->world.size;
    assert(config->world.node < config->world.nodes.n_items);
    return config->world.nodes.items[config->world.node].ranks;
}

const char *config_optimizer_name(const struct config_optimizer *optimizer)
{
    bool is_adamw = optimizer->type == OPTIMIZER_ADAM && optimizer->hyper.adam_w_mode;

    return optimizer_name(is_adamw ? OPTIMIZER_ADAMW : optimizer->type);
}

unsigned config_first_rank_of(const struct config *config, unsigned node)
{
    unsigned first = 0;

    for (unsigned i = 0; i < node && i < config->world.nodes.n_items; i++)
        first += config->world.nodes.items[i].ranks;
    return first;
}

unsigned config_first_rank(const struct config *config)
{
    return config_first_rank_of(config, config->world.node);
}

/* SPDX-License-Identifier: Apache-2.0 */

/* The configuration answers questions about itself: ranks of this node, engines of this build, offloading. */

#include "core/config/config.h"

#include "core/base/base.h"
#include "core/config/config-table.h"
#include "core/config/config-value.h"

#include <string.h>

/* The build says which engines it has; the build files of a later engine set these. */
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

bool config_file_has(const struct config *config, const char *path)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    for (size_t i = 0; i < n_keys; i++) {
        if (strcmp(keys[i].path, path) == 0 && config->origins[i].given && config->origins[i].line > 0)
            return true;
    }
    return false;
}

bool config_offloads(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CUDA && config->zero.offload_optimizer == CONFIG_OFFLOAD_CPU;
}

bool config_partitions_all(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CUDA && config->zero.stage == 3 && !config_offloads(config);
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
    return config->world.nodes.items[config->world.node].ranks;
}

const char *config_optimizer_name(const struct config_optimizer *optimizer)
{
    static const char *const names[N_OPTIMIZERS] = {
        [OPTIMIZER_ADAMW] = "AdamW", [OPTIMIZER_ADAM] = "Adam",       [OPTIMIZER_SGD] = "SGD",
        [OPTIMIZER_LION] = "Lion",   [OPTIMIZER_ADAGRAD] = "Adagrad",
    };

    return names[optimizer->type == OPTIMIZER_ADAM && optimizer->hyper.adam_w_mode ? OPTIMIZER_ADAMW : optimizer->type];
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

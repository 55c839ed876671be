/* SPDX-License-Identifier: Apache-2.0 */

/* Sets the optimizer and the room for gradients that the job's ranks choose, if the file leaves them open. */

#include "core/base/base.h"
#include "core/config/config-problem.h"
#include "core/config/config-table.h"
#include "core/config/config.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

DEFINE_CLEANUP(struct config *, config_free);

static bool gives_schedule(const struct config *config)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    for (size_t i = 0; i < n_keys && config->scheduler.type != SCHEDULE_NONE; i++)
        if (config->origins[i].given && strncmp(keys[i].path, "scheduler.params.", 17) == 0)
            return true;
    return false;
}

unsigned config_configured(const struct config *config)
{
    static const char *const paths[] = {
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "optimizer.params.momentum",
        "optimizer.params.dampening",
        "optimizer.params.nesterov",
        "optimizer.params.lr_decay",
        NULL, /* the place of CONFIG_GIVES_SCHEDULER */
        "optimizer.params.ns_coefficients",
        "optimizer.params.ns_steps",
        "optimizer.params.adjust_lr_fn",
    };
    unsigned bits = 0;

    _Static_assert(1 << (ARRAY_SIZE(paths) - 1) == CONFIG_GIVES_ADJUST_LR_FN, "a path for each bit up to this");
    for (size_t i = 0; i < ARRAY_SIZE(paths); i++)
        bits |= (unsigned)(paths[i] && config_gives(config, paths[i])) << i;
    if (config->scheduler.type != SCHEDULE_NONE && !schedule_starts_from_lr(&config->scheduler))
        bits |= CONFIG_GIVES_MAX_LR;
    if (config->diagnostics.on_leave == CONFIG_LEAVE_CONTINUE)
        bits |= CONFIG_GIVES_LEAVE_CONTINUES;
    return bits | (gives_schedule(config) ? CONFIG_GIVES_SCHEDULER : 0);
}

/* Return: a configuration with only this optimizer, and the table's defaults. NULL if there is no such optimizer. */
static struct config *config_of(const char *name, double momentum)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config = NULL;
    char text[256], params[64] = "";
    int n;

    if (optimizer_find(name) == N_OPTIMIZERS)
        return NULL;
    if (strcmp(name, "Adam") == 0)
        strcpy(params, "adam_w_mode: false");
    else if (strcmp(name, "SGD") == 0)
        snprintf(params, sizeof(params), "momentum: %.17g", momentum);
    n = snprintf(text, sizeof(text),
                 "job: program\nlisten: {socket: /program}\nworld: {size: 1}\noptimizer: {type: %s, params: {%s}}\n",
                 name, params);
    assert(n > 0 && (size_t)n < sizeof(text));
    (void)config_load_string(
        &config, &(struct config_source){.text = {.name = "program", .text = text, .n_bytes = (size_t)n}}, &problems);
    config_problems_deinit(&problems);
    return config;
}

bool config_choose_optimizer(struct config *config, const char *name, double momentum)
{
    _cleanup_(config_freep) struct config *wanted = NULL;

    if (!name || !*name || config_gives(config, "optimizer") ||
        (strcmp(name, "Muon") == 0 && !config_can_use_muon(config)))
        return false;
    wanted = config_of(name, momentum);
    if (wanted)
        config->optimizer = wanted->optimizer;
    if (wanted && config_chooses_bucket(config))
        config->zero.reduce_bucket_size = config_usual_bucket_elems(config);
    return wanted != NULL;
}

void config_choose_gpu_room(struct config *config, enum config_gpu_room room)
{
    config->zero.gpu_room = room;
    if (config_chooses_bucket(config))
        config->zero.reduce_bucket_size = config_usual_bucket_elems(config);
}

bool config_can_speculate(const struct config *config)
{
    return (config->device == CONFIG_DEVICE_CPU || config_offloads(config)) && config->world.nodes.n_items <= 1 &&
           config_stage(config) <= 2;
}

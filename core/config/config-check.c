/* SPDX-License-Identifier: Apache-2.0 */

/* Checks rules between keys: which values go together, and which values this build supports. */

#include "core/config/config-check.h"

#include "core/base/base.h"
#include "core/config/config-table.h"
#include "core/config/config.h"
#include "core/layout/subtree.h"

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <string.h>

static const struct config_row *row_of(const struct config_check *check, const char *path)
{
    const struct config_key *key = config_table_lookup(path, check->active);
    size_t n_keys;

    /* A path that the table does not have would skip the check. */
    assert(key || config_table_lookup(path, UINT_MAX));
    return key ? &check->rows[key - config_table(&n_keys)] : NULL;
}

/* Was the key read without a problem, or left at its default? */
static bool sound(const struct config_check *check, const char *path)
{
    const struct config_row *row = row_of(check, path);

    return row && !row->bad;
}

static struct config_spot spot_of(const struct config_check *check, const char *path)
{
    const struct config_row *row = row_of(check, path);

    return row && row->seen ? row->spot : (struct config_spot){0};
}

static bool given(const struct config_check *check, const char *path)
{
    const struct config_row *row = row_of(check, path);

    return row && row->given;
}

/* Reports a problem at the first key if the file has it, else at the second key, which then causes the problem. */
#define REFUSE(check, path, other, ...)                                                                                \
    do {                                                                                                               \
        const char *path_ = given(check, path) ? (path) : (other);                                                     \
        struct config_spot spot_ = spot_of(check, path_);                                                              \
        config_problems_add((check)->problems, (check)->text, &spot_, path_, __VA_ARGS__);                             \
    } while (0)

static void check_engine(const struct config_check *check)
{
    const struct config *config = check->config;

    if (!sound(check, "device") || !sound(check, "collective"))
        return;
    if (config->collective == CONFIG_COLLECTIVE_GLOO && !check->build->have_gloo)
        REFUSE(check, "collective", "collective",
               "gloo needs the engine zerod-engine-gloo, which this build does not have; allowed: local");
    else if (config->collective == CONFIG_COLLECTIVE_NCCL && !check->build->have_nccl)
        REFUSE(check, "collective", "collective",
               "nccl needs the engine zerod-engine-nccl, which this build does not have; allowed: local");
    else if (config->collective == CONFIG_COLLECTIVE_NCCL && config->device != CONFIG_DEVICE_CUDA)
        REFUSE(check, "collective", "device", "nccl needs device: cuda; in host memory the collective is gloo");

    if (config->device == CONFIG_DEVICE_CUDA && !check->build->have_nccl)
        REFUSE(check, "device", "device",
               "cuda needs the engine zerod-engine-nccl, which this build does not have; allowed: cpu");
    else if (config->device == CONFIG_DEVICE_CUDA && config->collective != CONFIG_COLLECTIVE_NCCL)
        REFUSE(check, "device", "collective", "cuda needs collective: nccl");
}

/* Refuses settings that GPUs on several nodes do not support. */
static void check_device_nodes(const struct config_check *check)
{
    const struct config *config = check->config;

    if (!check->build->have_gloo)
        REFUSE(check, "device", "world.nodes",
               "cuda on several nodes needs the engine zerod-engine-gloo, too, for what goes through host memory, and "
               "this build does not have it; allowed: one node");
    for (size_t i = 0; i < config->world.nodes.n_items; i++)
        if (config->world.nodes.items[i].ranks > CONFIG_MAX_LOCAL_GPUS) {
            REFUSE(check, "world.nodes", "device", "%u ranks with a GPU each on node %zu; allowed: at most %d",
                   config->world.nodes.items[i].ranks, i, CONFIG_MAX_LOCAL_GPUS);
            break;
        }
    if (sound(check, "world.size") && config->world.size > CONFIG_MAX_PIECES)
        REFUSE(check, "world.size", "device",
               "%u ranks, and with device: cuda each rank's gradients travel by themselves between nodes; allowed: at "
               "most %d",
               config->world.size, CONFIG_MAX_PIECES);
    if (sound(check, "communication_data_type") && config->communication_data_type != DTYPE_F32)
        REFUSE(check, "communication_data_type", "device",
               "with device: cuda gradients travel between nodes in their own type; allowed: fp32");
}

/* Refuses settings that the engine on GPUs does not support. */
static void check_device(const struct config_check *check)
{
    const struct config *config = check->config;

    if (!sound(check, "device") || config->device != CONFIG_DEVICE_CUDA ||
        config->collective != CONFIG_COLLECTIVE_NCCL || !check->build->have_nccl)
        return;
    if (sound(check, "weights") && config->weights == CONFIG_WEIGHTS_PRIVATE)
        REFUSE(check, "weights", "device",
               "with device: cuda each rank has a copy of the weights on its GPU anyway; allowed: shared");
    if (sound(check, "world.nodes") && config->world.nodes.n_items > 1)
        check_device_nodes(check);
    else if (sound(check, "world.size") && config->world.nodes.n_items <= 1 &&
             config->world.size > CONFIG_MAX_LOCAL_GPUS)
        REFUSE(check, "world.size", "device", "%u ranks with a GPU each on one node; allowed: at most %d",
               config->world.size, CONFIG_MAX_LOCAL_GPUS);
}

static void check_addresses(const struct config_check *check)
{
    const struct config_nodes *nodes = &check->config->world.nodes;

    for (size_t i = 1; i < nodes->n_items; i++) {
        for (size_t j = 0; j < i; j++) {
            if (strcmp(nodes->items[i].address, nodes->items[j].address) != 0)
                continue;
            REFUSE(check, "world.nodes", "world.nodes", "nodes %zu and %zu have one address, %s", j, i,
                   nodes->items[i].address);
            return;
        }
    }
}

/* Refuses more pieces than a 64-bit mask has bits. The mask tells which pieces of all nodes have a gradient. */
static void check_pieces(const struct config_check *check)
{
    const struct config_nodes *nodes = &check->config->world.nodes;
    struct subtree pieces[SUBTREE_MAX];
    unsigned n_pieces = 0, first = 0;

    for (size_t i = 0; i < nodes->n_items; i++) {
        n_pieces += subtree_find(check->config->world.size, first, nodes->items[i].ranks, pieces);
        first += nodes->items[i].ranks;
    }
    assert(first == check->config->world.size);
    if (n_pieces > CONFIG_MAX_PIECES)
        REFUSE(check, "world.nodes", "world.nodes",
               "the nodes would send %u partial sums for each gradient; allowed: at most %d. A node sends one if its "
               "ranks are a whole subtree of the sum over all ranks, as with one power of two of ranks on every node, "
               "else one for each subtree that they hold",
               n_pieces, CONFIG_MAX_PIECES);
}

/* Refuses settings that jobs of several nodes do not support. */
static void check_wire(const struct config_check *check)
{
    const struct config *config = check->config;

    if (sound(check, "deterministic") && !config->deterministic && config->collective == CONFIG_COLLECTIVE_GLOO) {
        struct config_spot spot = spot_of(check, "deterministic");

        config_problems_note(
            check->problems, check->text, &spot, "deterministic",
            "false changes nothing with gloo: in stage 1, too, slices travel with every micro-batch and "
            "are added in the order of numerics.md");
    }
}

static void check_several_nodes(const struct config_check *check)
{
    const struct config *config = check->config;
    bool have_engine = check->build->have_gloo || check->build->have_nccl;

    if (!have_engine)
        REFUSE(check, "world.nodes", "world.nodes",
               "%zu nodes need an engine, zerod-engine-gloo or zerod-engine-nccl, and this build has neither; "
               "allowed: one node",
               config->world.nodes.n_items);
    else if (sound(check, "collective") && config->collective == CONFIG_COLLECTIVE_LOCAL)
        REFUSE(check, "collective", "world.nodes", "local does not reach other nodes; %zu nodes need gloo or nccl",
               config->world.nodes.n_items);
    if (sound(check, "world.key_file") && !config->world.key_file)
        REFUSE(check, "world.key_file", "world.nodes", "more than one node needs world.key_file");
    if (sound(check, "communication_data_type") && config->communication_data_type == DTYPE_F16)
        REFUSE(check, "communication_data_type", "communication_data_type",
               "gradients would not fit fp16 between nodes; allowed: fp32, bf16");
    check_addresses(check);
    check_wire(check);
}

static void check_world(const struct config_check *check)
{
    const struct config *config = check->config;
    const struct config_nodes *nodes = &config->world.nodes;
    size_t n_nodes = nodes->n_items > 0 ? nodes->n_items : 1;
    unsigned n_ranks = 0;

    if (!sound(check, "world.nodes"))
        return;
    for (size_t i = 0; i < nodes->n_items; i++)
        n_ranks += nodes->items[i].ranks;
    if (nodes->n_items > 0 && sound(check, "world.size") && n_ranks != config->world.size)
        REFUSE(check, "world.size", "world.nodes", "%u ranks in all, but the ranks of world.nodes add up to %u",
               config->world.size, n_ranks);
    else if (nodes->n_items > 0 && sound(check, "world.size") && config->device != CONFIG_DEVICE_CUDA)
        check_pieces(check);
    if (nodes->n_items == 0 && sound(check, "world.size") && config->world.size > CONFIG_MAX_LOCAL_RANKS)
        REFUSE(check, "world.size", "world.size", "%u ranks on one node; allowed: at most %d", config->world.size,
               CONFIG_MAX_LOCAL_RANKS);
    else if (sound(check, "world.node") && config->world.node >= n_nodes)
        REFUSE(check, "world.node", "world.nodes", "%u is not one of the nodes; allowed: 0 to %zu", config->world.node,
               n_nodes - 1);
    else if (sound(check, "world.size") && sound(check, "limits.clients") && sound(check, "world.node") &&
             config->limits.clients < config_local_ranks(config))
        REFUSE(check, "limits.clients", "world.size", "%u connections are fewer than the %u ranks of this node",
               config->limits.clients, config_local_ranks(config));
    if (n_nodes > 1)
        check_several_nodes(check);
}

static void check_nesterov(const struct config_check *check)
{
    const struct hyper *hyper = &check->config->optimizer.hyper;

    if (check->config->optimizer.type != OPTIMIZER_SGD || !sound(check, "optimizer.params.nesterov") ||
        !hyper->nesterov)
        return;
    if (sound(check, "optimizer.params.momentum") && hyper->momentum == 0)
        REFUSE(check, "optimizer.params.nesterov", "optimizer.params.momentum", "needs momentum above 0");
    if (sound(check, "optimizer.params.dampening") && hyper->dampening != 0)
        REFUSE(check, "optimizer.params.nesterov", "optimizer.params.dampening", "needs dampening 0");
}

static void check_muon(const struct config_check *check)
{
    static const char offload[] = "zero_optimization.offload_optimizer.device";
    const struct config *config = check->config;

    if (config->optimizer.type != OPTIMIZER_MUON || !sound(check, "optimizer.type"))
        return;
    if (sound(check, "device") && sound(check, offload) && !config_can_use_muon(config))
        REFUSE(check, "optimizer.type", offload,
               "Muon needs gradients and state in one memory: leave offload_optimizer out, or set device: cpu");
}

static void check_scheduler(const struct config_check *check)
{
    static const char min_lr[] = "scheduler.params.warmup_min_lr", max_lr[] = "scheduler.params.warmup_max_lr";
    static const char total[] = "scheduler.params.total_num_steps", warmup[] = "scheduler.params.warmup_num_steps";
    const struct schedule *schedule = &check->config->scheduler;
    size_t n_min = schedule->warmup_min_lr.n_items, n_max = schedule->warmup_max_lr.n_items;

    if (schedule->type == SCHEDULE_NONE)
        return;
    if (sound(check, min_lr) && sound(check, max_lr) && n_min > 1 && n_max > 1 && n_min != n_max)
        REFUSE(check, max_lr, min_lr, "has %zu numbers, warmup_min_lr has %zu; both have one for each group", n_max,
               n_min);
    if (sound(check, total) && sound(check, warmup) && schedule->type != SCHEDULE_WARMUP &&
        schedule->total_num_steps < schedule->warmup_num_steps) {
        struct config_spot spot = spot_of(check, total);

        config_problems_note(check->problems, check->text, &spot, total,
                             "%ju steps end before the warm-up of %ju steps does", (uintmax_t)schedule->total_num_steps,
                             (uintmax_t)schedule->warmup_num_steps);
    }
}

/* Refuses saving without a folder. */
static void check_checkpoint(const struct config_check *check)
{
    const struct config_checkpoint *checkpoint = &check->config->checkpoint;

    if (!sound(check, "checkpoint.dir"))
        return;
    if (!checkpoint->dir &&
        (checkpoint->save_steps > 0 || checkpoint->save_interval_ms > 0 || checkpoint->save_on_stop))
        REFUSE(check, "checkpoint.dir", "checkpoint", "is missing; needed to save");
}

static void check_optim_bits(const struct config_check *check)
{
    static const char bits[] = "optimizer.params.optim_bits";

    if (sound(check, bits) && check->config->optimizer.optim_bits == 8 && sound(check, "bf16.bf16_optimizer_states") &&
        check->config->bf16.optimizer_states)
        REFUSE(check, "bf16.bf16_optimizer_states", bits, "moments are bf16 or of 8 bits, not both");
}

static void check_moments(const struct config_check *check)
{
    static const char states[] = "bf16.bf16_optimizer_states";
    const struct config_optimizer *optimizer = &check->config->optimizer;
    const struct config_bf16 *bf16 = &check->config->bf16;
    bool has_beta2 =
        optimizer->type == OPTIMIZER_ADAMW || optimizer->type == OPTIMIZER_ADAM || optimizer->type == OPTIMIZER_MUON;
    struct config_spot spot = spot_of(check, states);

    if (!sound(check, states) || !sound(check, "bf16.stochastic_rounding") ||
        !sound(check, "optimizer.params.optim_bits"))
        return;
    if (bf16->stochastic_rounding && optimizer->optim_bits == 8)
        REFUSE(check, "bf16.stochastic_rounding", "optimizer.params.optim_bits",
               "moments of 8 bits are always rounded at random; leave it out");
    else if (bf16->stochastic_rounding && !bf16->optimizer_states)
        REFUSE(check, "bf16.stochastic_rounding", states,
               "there is nothing to round: needs bf16_optimizer_states: true");
    /* the reason is in numerics.md, section 5 */
    if (bf16->optimizer_states && !bf16->stochastic_rounding && has_beta2 && optimizer->hyper.beta2 > 0.998)
        config_problems_note(
            check->problems, check->text, &spot, states,
            "with the second of betas above 0.998, exp_avg_sq never becomes smaller when it is rounded to "
            "the nearest; bf16: {stochastic_rounding: true} keeps small changes");
}

static void check_rest(const struct config_check *check)
{
    const struct config *config = check->config;
    const struct lossscale_params *scale = &config->fp16.scale;

    if (sound(check, "zero_optimization.stage") && sound(check, "weights") && config->zero.stage == 3 &&
        config->weights == CONFIG_WEIGHTS_PRIVATE)
        REFUSE(check, "weights", "zero_optimization.stage",
               "private copies of the weights are for stages 1 and 2; stage 3 has no whole copy; allowed: "
               "shared");
    if (sound(check, "fp16.min_loss_scale") && sound(check, "fp16.initial_scale_power") &&
        sound(check, "fp16.loss_scale") && scale->static_scale == 0 &&
        scale->min_scale > ldexp(1.0, (int)scale->initial_power))
        REFUSE(check, "fp16.min_loss_scale", "fp16.initial_scale_power",
               "%g is above the scale at the start, 2 to the power of %u", scale->min_scale, scale->initial_power);
    if (sound(check, "diagnostics.stall_warning") && sound(check, "diagnostics.stall_timeout") &&
        config->diagnostics.stall_timeout_ms > 0 &&
        config->diagnostics.stall_timeout_ms < config->diagnostics.stall_warning_ms)
        REFUSE(check, "diagnostics.stall_timeout", "diagnostics.stall_warning",
               "the step would be aborted before the first warning; allowed: at least "
               "diagnostics.stall_warning");
}

void config_check(const struct config_check *check)
{
    check_engine(check);
    check_device(check);
    check_world(check);
    check_nesterov(check);
    check_muon(check);
    check_scheduler(check);
    check_checkpoint(check);
    check_optim_bits(check);
    check_moments(check);
    check_rest(check);
}

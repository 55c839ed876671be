/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/engines/device-mesh.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/memory/weights.h"
#include "kernels/kernels.h"
#include "tests/daemon/engines/device-machine.h"
#include "tests/golden/gradients.h"

enum { TICK_MS = 2, LARGE_ELEMS = 2 * CHUNK_ELEMS + 77 };

/*
 * Parameters of several sizes and types. One has no elements, and one is larger than a bucket. The last three are
 * frozen, and some ranks own no element of the shortest.
 */
static const struct {
    uint64_t n_elems;
    enum dtype grad_dtype, dtype;
} params[GPUS_N_PARAMS] = {
    {LARGE_ELEMS, DTYPE_F32, DTYPE_F32}, {0, DTYPE_F32, DTYPE_F32}, {65, DTYPE_BF16, DTYPE_BF16},
    {130, DTYPE_BF16, DTYPE_BF16},       {1, DTYPE_F16, DTYPE_F16}, {200, DTYPE_BF16, DTYPE_F32},
    {1000, DTYPE_BF16, DTYPE_BF16},      {3, DTYPE_F32, DTYPE_F32}, {LARGE_ELEMS, DTYPE_F16, DTYPE_F16},
};

/* ---- what engines say ------------------------------------------------------------------------------------ */

static void on_ready(void *userdata, const char *versions)
{
    struct gpus_node *node = userdata;

    assert_false(node->ready || node->failed);
    node->ready = true;
    snprintf(node->versions, sizeof(node->versions), "%s", versions);
}

static void on_done(void *userdata, const struct device_done *done)
{
    struct gpus_node *node = userdata;

    assert_true(node->ready && !node->failed && done->tag < GPUS_MAX_DONE && !node->done[done->tag]);
    node->done[done->tag] = 1;
    node->last = *done;
}

static void on_put(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct gpus_node *node = userdata;
    struct gpus *gpus = node->gpus;

    for (unsigned i = 0; i < gpus->options.n_nodes; i++)
        if (i != node->node && gpus->nodes[i].device)
            (void)device_value(gpus->nodes[i].device, key, value, n_bytes);
}

static void on_failed(void *userdata, const struct device_failure *failure)
{
    struct gpus_node *node = userdata;

    assert_false(node->failed);
    node->failed = true;
    node->said = failure->said;
    node->has_tag = failure->has_tag;
    node->tag = failure->tag;
    snprintf(node->what, sizeof(node->what), "%s", failure->what);
}

/* For a report that was sent before the close and is read after it. */
static void on_late(void *userdata, const struct device_done *done)
{
    struct gpus_node *node = userdata;

    assert_true(!node->ended && done->tag < GPUS_MAX_DONE && !node->done[done->tag]);
    node->done[done->tag] = 1;
    node->n_late++;
}

static void on_ended(void *userdata)
{
    struct gpus_node *node = userdata;

    node->ended = true;
}

/* ---- life ------------------------------------------------------------------------------------------------ */

static void on_tick(uv_timer_t *tick)
{
}

static void ignore_notice(void *userdata)
{
}

static void make_layout(struct gpus *gpus)
{
    struct layout_decl decls[GPUS_N_PARAMS];
    char names[GPUS_N_PARAMS][8];
    uint32_t bad;

    for (unsigned p = 0; p < GPUS_N_PARAMS; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){.name = names[p],
                                        .name_len = 2,
                                        .grad_dtype = params[p].grad_dtype,
                                        .dtype = params[p].dtype,
                                        .trainable = p < GPUS_N_TRAINABLE,
                                        .n_dims = 1,
                                        .shape = &params[p].n_elems};
    }
    assert_int_equal(layout_new(&gpus->layout, decls, GPUS_N_PARAMS, gpus->world, gpus->options.bucket_elems, &bad), 0);
}

void gpus_set_weights(const struct gpus *gpus, const struct state *state)
{
    const struct kernels *kernels = gpus->step->kernels;

    for (unsigned p = 0; p < GPUS_N_PARAMS; p++) {
        uint64_t key = gradient_weights_key(7, p);
        size_t elem_bytes = dtype_size(params[p].dtype);
        _cleanup_free_ uint8_t *weights = malloc(params[p].n_elems * elem_bytes + 1);

        assert_non_null(weights);
        for (uint64_t i = 0; i < params[p].n_elems; i++) {
            float value = gradient_value(key, i);

            kernels->convert_from_f32(weights + i * elem_bytes, &value, params[p].dtype, 1);
        }
        weights_adopt(state, kernels, p, weights);
        if (state->stage < 3)
            memcpy(state_weights(state, p, 0), weights, params[p].n_elems * elem_bytes);
    }
}

static void make_core(struct gpus *gpus, struct optimizer_moments moments)
{
    const struct kernels *kernels;
    char why[128];

    assert_int_equal(kernels_select(&kernels, NULL, why, sizeof(why)), 0);
    assert_int_equal(worker_pool_new(&gpus->pool, 1, ignore_notice, NULL), 0);
    assert_int_equal(state_new(&gpus->state, &(struct state_options){.layout = gpus->layout,
                                                                     .stage = gpus->options.stage,
                                                                     .n_ranks = gpus->world,
                                                                     .moments = moments}),
                     0);
    assert_int_equal(step_new(&gpus->step, &(struct step_options){.state = gpus->state,
                                                                  .kernels = kernels,
                                                                  .pool = gpus->pool,
                                                                  .n_local = gpus->world,
                                                                  .optimizer = gpus->options.optimizer}),
                     0);
    gpus_set_weights(gpus, gpus->state);
}

/* Gives each parameter its offset in a pool, in order of declaration. Return: the size of a pool in bytes. */
static uint64_t place_pool(struct gpus *gpus)
{
    uint64_t end = 0;

    for (unsigned p = 0; p < GPUS_N_PARAMS; p++) {
        gpus->pool_offset[p] = end;
        end += round_up(params[p].n_elems * dtype_size(params[p].dtype), DEVICE_POOL_ALIGN);
    }
    return end;
}

static void make_node(struct gpus *gpus, unsigned n, struct optimizer_moments moments)
{
    struct gpus_node *node = &gpus->nodes[n];
    uint64_t end = 0, pool_bytes = gpus->options.stage == 3 ? place_pool(gpus) : 0;

    node->gpus = gpus;
    node->node = n;
    node->ended = true;
    node->done = calloc(GPUS_MAX_DONE, 1);
    assert_non_null(node->done);
    assert_int_equal(
        device_keep_init(&node->keep, &(struct device_plan_options){.layout = gpus->layout,
                                                                    .stage = gpus->options.stage,
                                                                    .first_local = n * gpus->options.n_local,
                                                                    .n_local = gpus->options.n_local,
                                                                    .optimizer = gpus->options.optimizer,
                                                                    .moments = moments,
                                                                    .deterministic = !gpus->options.adds_with_nccl,
                                                                    .offload = gpus->options.offload,
                                                                    .ring_bytes = gpus->layout->arena_bytes,
                                                                    .pool_bytes = pool_bytes}),
        0);
    for (unsigned i = 0; i < gpus->options.n_local; i++)
        for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++) {
            node->mirror_at[i][kind] = end;
            end += node->keep.places[i].piece_bytes[kind];
        }
    assert_int_equal(segment_init(&node->host, "test", end), 0);
}

/* Return: the options, changed to more nodes with fewer ranks each if this machine has fewer GPUs than a node needs. */
static struct gpus_options spread(const struct gpus_options *wanted)
{
    struct gpus_options options = *wanted;

    for (options.n_local = MIN(wanted->n_local, machine_n_gpus()); wanted->n_local % options.n_local; options.n_local--)
        continue;
    options.n_nodes *= wanted->n_local / options.n_local;
    if (options.n_nodes > GPUS_MAX_NODES)
        need_gpus(wanted->n_local);
    return options;
}

void need_gpus(unsigned n)
{
    if (machine_n_gpus() >= n)
        return;
    print_message("needs %u GPUs, and here is %u\n", n, machine_n_gpus());
    skip();
}

void need_faults(void)
{
    if (machine_has_faults())
        return;
    print_message("needs the stand-ins, which fail when they are told to\n");
    skip();
}

void gpus_init(struct gpus *gpus, const struct gpus_options *wanted)
{
    const struct gpus_options spread_options = spread(wanted), *options = &spread_options;
    struct optimizer_moments moments;

    memset(gpus, 0, sizeof(*gpus));
    gpus->options = *options;
    gpus->options.stage = options->stage ? options->stage : 2;
    gpus->options.bucket_elems = options->bucket_elems ? options->bucket_elems : 300;
    gpus->world = options->n_nodes * options->n_local;
    gpus->timeout_ms = gpus->connect_timeout_ms = GPUS_PATIENCE_MS;
    gpus->hyper = (struct hyper){.lr = 1e-3,
                                 .beta1 = 0.9,
                                 .beta2 = 0.95,
                                 .eps = 1e-8,
                                 .weight_decay = 0.1,
                                 .momentum = 0.9,
                                 .adam_w_mode = true};
    moments = optimizer_moments(options->optimizer, &gpus->hyper);
    moments.type = options->moments;
    moments.master24 = options->master24;
    assert_true(gpus->world <= GPUS_MAX_WORLD && options->n_nodes <= GPUS_MAX_NODES);
    assert_int_equal(uv_loop_init(&gpus->loop), 0);
    assert_int_equal(uv_timer_init(&gpus->loop, &gpus->tick), 0);
    assert_int_equal(uv_timer_start(&gpus->tick, on_tick, TICK_MS, TICK_MS), 0);
    make_layout(gpus);
    make_core(gpus, moments);
    for (unsigned rank = 0; rank < gpus->world; rank++) {
        gpus->arenas[rank] = malloc(gpus->layout->arena_bytes);
        assert_non_null(gpus->arenas[rank]);
    }
    for (unsigned n = 0; n < options->n_nodes; n++)
        make_node(gpus, n, moments);
}

void gpus_deinit(struct gpus *gpus)
{
    gpus_stop(gpus);
    uv_close((uv_handle_t *)&gpus->tick, NULL);
    uv_run(&gpus->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&gpus->loop), 0);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++) {
        device_keep_deinit(&gpus->nodes[n].keep);
        segment_deinit(&gpus->nodes[n].host);
        free(gpus->nodes[n].done);
    }
    worker_pool_free(gpus->pool);
    step_free(gpus->step);
    state_free(gpus->state);
    for (unsigned rank = 0; rank < gpus->world; rank++)
        free(gpus->arenas[rank]);
    layout_free(gpus->layout);
}

void gpus_start(struct gpus *gpus)
{
    gpus->generation++;
    gpus->n_collectives = 0;
    for (unsigned n = 0; n < gpus->options.n_nodes; n++) {
        struct gpus_node *node = &gpus->nodes[n];
        struct device_options options = {
            .loop = &gpus->loop,
            .generation = gpus->generation,
            .node = n,
            .n_nodes = gpus->options.n_nodes,
            .connect_timeout_ms = gpus->connect_timeout_ms,
            .keep = &node->keep,
            .ops = {.ready = on_ready,
                    .done = on_done,
                    .put = on_put,
                    .failed = on_failed,
                    .late = on_late,
                    .ended = on_ended,
                    .userdata = node},
        };
        char why[256] = "";

        assert_true(node->ended);
        machine_set(n, gpus->fault && gpus->fault_node == n ? gpus->fault : NULL);
        node->ready = node->failed = node->ended = false;
        if (device_new(&node->device, &options, why, sizeof(why)) != 0)
            fail_msg("%s", why);
    }
}

static bool has_failed(const struct gpus *gpus)
{
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (gpus->nodes[n].failed)
            return true;
    return false;
}

static void fail_if_failed(struct gpus *gpus)
{
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (gpus->nodes[n].failed)
            fail_msg("the engine of node %u: %s", n, gpus->nodes[n].what);
}

static uint64_t now_ms(void)
{
    return uv_hrtime() / 1000000;
}

void gpus_turn(struct gpus *gpus)
{
    uv_run(&gpus->loop, UV_RUN_ONCE);
}

static bool all_ready(const struct gpus *gpus)
{
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (!gpus->nodes[n].ready)
            return false;
    return true;
}

bool gpus_try_ready(struct gpus *gpus)
{
    uint64_t end = now_ms() + GPUS_PATIENCE_MS;

    while (!all_ready(gpus)) {
        gpus_turn(gpus);
        if (has_failed(gpus))
            return false;
        if (now_ms() > end)
            fail_msg("the engines do not get ready");
    }
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        (void)device_share(gpus->nodes[n].device, 0, &gpus->nodes[n].host);
    return true;
}

void gpus_wait_ready(struct gpus *gpus)
{
    if (!gpus_try_ready(gpus))
        fail_if_failed(gpus);
}

void gpus_stop(struct gpus *gpus)
{
    uint64_t end = now_ms() + GPUS_PATIENCE_MS;

    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        device_close(steal_ptr(gpus->nodes[n].device));
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        while (!gpus->nodes[n].ended) {
            gpus_turn(gpus);
            if (now_ms() > end)
                fail_msg("the engine of node %u does not end", n);
        }
}

bool gpus_is_done(const struct gpus *gpus, uint64_t tag)
{
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (!gpus->nodes[n].done[tag])
            return false;
    return true;
}

bool gpus_try_done(struct gpus *gpus, uint64_t tag)
{
    uint64_t end = now_ms() + GPUS_PATIENCE_MS;

    while (!gpus_is_done(gpus, tag)) {
        if (has_failed(gpus))
            return false;
        gpus_turn(gpus);
        if (now_ms() > end)
            fail_msg("order %u does not end", (unsigned)tag);
    }
    return true;
}

void gpus_wait_done(struct gpus *gpus, uint64_t tag)
{
    if (!gpus_try_done(gpus, tag))
        fail_if_failed(gpus);
}

void gpus_wait_failed(struct gpus *gpus, unsigned node)
{
    uint64_t end = now_ms() + GPUS_PATIENCE_MS;

    while (!gpus->nodes[node].failed) {
        gpus_turn(gpus);
        if (now_ms() > end)
            fail_msg("the engine of node %u does not fail", node);
    }
}

/* ---- orders ---------------------------------------------------------------------------------------------- */

uint8_t *gpus_mirror(const struct gpus *gpus, unsigned rank, enum device_piece_kind kind)
{
    const struct gpus_node *node = &gpus->nodes[rank / gpus->options.n_local];

    return node->host.map + node->mirror_at[rank % gpus->options.n_local][kind];
}

/* Return: whether a node has done the order whose tag was `again`. */
static bool has_done(const struct gpus_node *node, uint64_t again)
{
    return again > 0 && node->done[again];
}

static void give_copy(struct gpus *gpus, struct gpus_node *node, bool write, uint32_t kinds, uint64_t tag)
{
    struct device_move moves[DEVICE_MAX_LOCAL * DEVICE_N_PIECES];
    struct device_command command = {.type = DEVICE_COMMAND_COPY,
                                     .copy = {.tag = tag, .timeout_ms = gpus->timeout_ms, .moves = moves}};

    for (unsigned i = 0; i < gpus->options.n_local; i++)
        for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++)
            if (kinds >> kind & 1)
                moves[command.copy.n_moves++] = (struct device_move){.write = write,
                                                                     .local_rank = i,
                                                                     .kind = kind,
                                                                     .segment_offset_bytes = node->mirror_at[i][kind],
                                                                     .n_bytes = node->keep.places[i].piece_bytes[kind]};
    (void)device_order(node->device, &command);
}

uint64_t gpus_order_copy(struct gpus *gpus, bool write, uint32_t kinds, uint64_t again)
{
    uint64_t tag = ++gpus->last_tag;

    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (has_done(&gpus->nodes[n], again))
            gpus->nodes[n].done[tag] = 1;
        else
            give_copy(gpus, &gpus->nodes[n], write, kinds, tag);
    return tag;
}

void gpus_copy(struct gpus *gpus, bool write, uint32_t kinds)
{
    gpus_wait_done(gpus, gpus_order_copy(gpus, write, kinds, 0));
}

void gpus_fill_rings(struct gpus *gpus)
{
    for (unsigned rank = 0; rank < gpus->world; rank++)
        memcpy(gpus_mirror(gpus, rank, DEVICE_RING), gpus->arenas[rank], gpus->layout->arena_bytes);
}

void gpus_push(struct gpus *gpus)
{
    gpus_fill_rings(gpus);
    gpus_copy(gpus, true, 1u << DEVICE_RING);
}

static uint64_t slot_offset(const struct gpus *gpus, uint32_t parcel)
{
    const struct layout_parcel *p = &gpus->layout->parcels[parcel];
    const struct layout_bucket *bucket = &gpus->layout->buckets[p->bucket];

    return bucket->arena_offset_bytes + p->offset_elems * dtype_size(bucket->grad_dtype);
}

static void set_masks(struct gpus *gpus, struct gpus_node *node, uint32_t parcel)
{
    const struct layout_parcel *p = &gpus->layout->parcels[parcel];

    for (uint32_t part = p->first_part; part < p->first_part + p->n_parts; part++) {
        uint64_t mask = 0;

        for (unsigned rank = 0; rank < gpus->world; rank++)
            if (gpus->pushed[rank][gpus->layout->parts[part].param])
                mask |= UINT64_C(1) << rank;
        node->keep.inputs.masks[part] = mask;
    }
}

uint64_t gpus_order_reduce(struct gpus *gpus, uint32_t parcel, uint32_t micro, uint64_t again)
{
    uint64_t tag = ++gpus->last_tag, collective = gpus->n_collectives++;

    for (unsigned n = 0; n < gpus->options.n_nodes; n++) {
        struct gpus_node *node = &gpus->nodes[n];
        struct device_slot slots[DEVICE_MAX_LOCAL];
        struct device_command command = {.type = DEVICE_COMMAND_REDUCE,
                                         .reduce = {.tag = tag,
                                                    .timeout_ms = gpus->timeout_ms,
                                                    .collective = collective,
                                                    .parcel = parcel,
                                                    .micro_batch = micro,
                                                    .slots = slots,
                                                    .n_slots = gpus->options.n_local,
                                                    .give_only = has_done(node, again),
                                                    .op = again ? again : tag}};

        set_masks(gpus, node, parcel);
        for (unsigned i = 0; i < gpus->options.n_local; i++)
            slots[i] = (struct device_slot){
                .local_rank = i, .offset_bytes = slot_offset(gpus, parcel), .point = i == 0 ? gpus->point : 0};
        (void)device_order(node->device, &command);
    }
    return tag;
}

uint64_t gpus_order_update(struct gpus *gpus, uint64_t again)
{
    uint64_t tag = ++gpus->last_tag;

    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (has_done(&gpus->nodes[n], again))
            gpus->nodes[n].done[tag] = 1;
        else
            (void)device_order(gpus->nodes[n].device,
                               &(struct device_command){
                                   .type = DEVICE_COMMAND_UPDATE,
                                   .update = {.tag = tag, .timeout_ms = gpus->timeout_ms, .step = gpus->epoch + 1}});
    return tag;
}

/* All nodes take part again. This changes nothing on a node that has gathered already. */
uint64_t gpus_order_gather(struct gpus *gpus, uint64_t again)
{
    uint64_t tag = ++gpus->last_tag, collective = gpus->n_collectives++;

    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        (void)device_order(gpus->nodes[n].device,
                           &(struct device_command){.type = DEVICE_COMMAND_GATHER,
                                                    .gather = {.tag = tag,
                                                               .timeout_ms = gpus->timeout_ms,
                                                               .collective = collective,
                                                               .n_buckets = gpus->layout->n_buckets}});
    return tag;
}

static bool has_part(const struct gpus *gpus, const struct gpus_node *node, unsigned rank, uint32_t which)
{
    bool has = rank / gpus->options.n_local == node->node;

    for (unsigned p = 0; p < GPUS_N_PARAMS; p++)
        for (unsigned i = 0; which >> p & 1 && i < gpus->options.n_local; i++) {
            uint64_t begin, end;

            device_param_slice(&node->keep.plan, p, node->node * gpus->options.n_local + i, &begin, &end);
            has |= begin < end;
        }
    return has;
}

uint64_t gpus_order_fetch(struct gpus *gpus, unsigned rank, uint32_t which)
{
    uint64_t tag = ++gpus->last_tag, collective = gpus->n_collectives++;
    struct device_fetched fetched[GPUS_N_PARAMS];
    struct device_command command = {
        .type = DEVICE_COMMAND_FETCH,
        .fetch = {
            .tag = tag, .timeout_ms = gpus->timeout_ms, .collective = collective, .rank = rank, .params = fetched}};

    for (unsigned p = 0; p < GPUS_N_PARAMS; p++)
        if (which >> p & 1)
            fetched[command.fetch.n_params++] = (struct device_fetched){p, gpus->pool_offset[p]};
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (has_part(gpus, &gpus->nodes[n], rank, which))
            (void)device_order(gpus->nodes[n].device, &command);
        else
            gpus->nodes[n].done[tag] = 1;
    return tag;
}

/* ---- the same on the CPU --------------------------------------------------------------------------------- */

static uint8_t *gradient_at(const struct gpus *gpus, unsigned rank, unsigned param, uint64_t elem)
{
    const struct layout_param *p = &gpus->layout->params[param];

    return gpus->arenas[rank] + gpus->layout->buckets[p->bucket].arena_offset_bytes +
           (p->offset_elems + elem) * dtype_size(p->grad_dtype);
}

static void make_gradient(struct gpus *gpus, unsigned rank, unsigned param, uint64_t seed)
{
    uint64_t key = gradient_key(&(struct gradient_place){.seed = seed, .rank = rank, .param = param});

    for (uint64_t i = 0; i < params[param].n_elems; i++) {
        uint64_t random = gradient_mix(key + i);
        float value = random % 8 ? gradient_value(key, i) : i % 2 ? -0.0f : 0.0f;

        if (gpus->whole_numbers)
            value = (float)(int)(random % 129) - 64;
        gpus->step->kernels->convert_from_f32(gradient_at(gpus, rank, param, i), &value, params[param].grad_dtype, 1);
    }
}

void gpus_set_gradient(struct gpus *gpus, unsigned rank, unsigned param, uint64_t elem, float value)
{
    gpus->step->kernels->convert_from_f32(gradient_at(gpus, rank, param, elem), &value, params[param].grad_dtype, 1);
}

void gpus_make_gradients(struct gpus *gpus, uint64_t seed, bool all)
{
    for (unsigned rank = 0; rank < gpus->world; rank++) {
        memset(gpus->arenas[rank], 0xff, gpus->layout->arena_bytes); /* NaN, because it must not be read */
        for (unsigned param = 0; param < GPUS_N_TRAINABLE; param++) {
            gpus->pushed[rank][param] = all || gradient_mix(seed * 100 + rank * GPUS_N_TRAINABLE + param) % 3 > 0;
            if (gpus->pushed[rank][param])
                make_gradient(gpus, rank, param, seed);
        }
    }
}

static void note_reduced(void *userdata, struct reduction *reduction)
{
    struct gpus *gpus = userdata;

    gpus->n_reduced++;
}

static void note_updated(void *userdata, int result)
{
    struct gpus *gpus = userdata;

    gpus->n_reduced++;
}

static void wait_for_core(struct gpus *gpus, unsigned n)
{
    while (gpus->n_reduced < n)
        assert_true(worker_pool_wait(gpus->pool) > 0);
}

void gpus_reduced(struct gpus *gpus, uint32_t parcel, uint32_t micro)
{
    const struct layout_parcel *p = &gpus->layout->parcels[parcel];
    struct reduction *reduction = step_prepare(gpus->step, parcel, micro, 0);

    for (unsigned rank = 0; rank < gpus->world; rank++) {
        reduction->sources[rank] = gpus->arenas[rank] + slot_offset(gpus, parcel);
        for (uint32_t k = 0; k < p->n_parts; k++)
            if (gpus->pushed[rank][gpus->layout->parts[p->first_part + k].param])
                reduction->masks[k] |= UINT64_C(1) << rank;
    }
    step_post(reduction, note_reduced, gpus);
    wait_for_core(gpus, gpus->n_reduced + 1);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++) {
        struct device_inputs *inputs = &gpus->nodes[n].keep.inputs;

        for (uint32_t k = 0; k < p->n_parts; k++)
            inputs->begun[p->first_part + k] = gpus->step->begun[p->first_part + k];
        for (uint32_t i = 0; i < GPUS_N_PARAMS; i++)
            inputs->contributed[i] = gpus->step->contributed[i];
    }
}

uint64_t gpus_order_reduce_all(struct gpus *gpus, uint32_t micro)
{
    uint64_t first_tag = gpus->last_tag + 1;

    for (uint32_t i = 0; i < gpus->layout->n_parcels; i++)
        (void)gpus_order_reduce(gpus, i, micro, 0);
    return first_tag;
}

void gpus_finish_reduce_all(struct gpus *gpus, uint32_t micro, uint64_t first_tag)
{
    for (uint32_t i = 0; i < gpus->layout->n_parcels; i++) {
        gpus_wait_done(gpus, first_tag + i);
        gpus_reduced(gpus, i, micro);
        gpus_check_sums(gpus, i);
    }
}

void gpus_reduce_all(struct gpus *gpus, uint32_t micro)
{
    gpus_finish_reduce_all(gpus, micro, gpus_order_reduce_all(gpus, micro));
}

void gpus_open_step(struct gpus *gpus)
{
    step_open(gpus->step);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++) {
        memset(gpus->nodes[n].keep.inputs.begun, 0, gpus->layout->n_parts);
        memset(gpus->nodes[n].keep.inputs.contributed, 0, GPUS_N_PARAMS);
    }
}

void gpus_decide(struct gpus *gpus)
{
    struct exact_sum total = {.n_deferred = 0};
    struct step_update update = {.groups = &gpus->hyper, .s = 1.0 / gpus->world};

    step_norm(gpus->step, &total);
    step_update(gpus->step, &update, note_updated, gpus);
    wait_for_core(gpus, gpus->n_reduced + 1);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        memcpy(gpus->nodes[n].keep.inputs.scalars, gpus->step->scalars, GPUS_N_PARAMS * sizeof(struct update_scalars));
}

void gpus_commit(struct gpus *gpus)
{
    step_commit(gpus->step);
    gpus->epoch++;
}

/* ---- comparing ------------------------------------------------------------------------------------------- */

static void compare(const char *what, unsigned rank, uint32_t index, const void *got, const void *expected,
                    size_t n_bytes)
{
    const uint8_t *a = got, *b = expected;

    for (size_t i = 0; i < n_bytes; i++)
        if (a[i] != b[i])
            fail_msg("%s, rank %u, %u: byte %zu of %zu is %02x, expected %02x", what, rank, index, i, n_bytes, a[i],
                     b[i]);
}

void gpus_check_sums(struct gpus *gpus, uint32_t parcel)
{
    const struct layout_parcel *p = &gpus->layout->parcels[parcel];
    const struct reduction *reduction = &gpus->step->reductions[parcel];

    for (uint32_t part = p->first_part; part < p->first_part + p->n_parts; part++)
        for (unsigned rank = 0; rank < gpus->world; rank++) {
            const struct device_results *results = &gpus->nodes[rank / gpus->options.n_local].keep.results;
            const struct layout_part *q = &gpus->layout->parts[part];
            struct position_sum sum = {.first = {0}};

            if (!gpus->pushed[rank][q->param])
                continue;
            for (uint32_t c = q->first_chunk; c < q->first_chunk + q->n_chunks; c++)
                position_sum_add(&sum,
                                 &results->sums[(size_t)c * gpus->options.n_local + rank % gpus->options.n_local]);
            assert_int_equal(position_sum_finish(&sum, layout_part_bytes(gpus->layout, part)),
                             step_sum(gpus->step, reduction, rank, part));
        }
}

void gpus_check_squares(struct gpus *gpus)
{
    for (uint32_t c = 0; c < gpus->layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &gpus->layout->chunks[c];
        struct exact_sum expected = gpus->step->results[c].squares;

        if (!gpus->step->begun[chunk->part] || chunk->n_elems == 0)
            continue;
        exact_sum_carry(&expected);
        compare("squares", chunk->rank, c, &gpus->nodes[chunk->rank / gpus->options.n_local].keep.results.squares[c],
                &expected, sizeof(expected));
    }
}

static const struct device_rank_places *places_of(const struct gpus *gpus, unsigned rank)
{
    return &gpus->nodes[rank / gpus->options.n_local].keep.places[rank % gpus->options.n_local];
}

void gpus_check_gradients(struct gpus *gpus)
{
    gpus_copy(gpus, false, 1u << DEVICE_GRADIENT);
    for (uint32_t c = 0; c < gpus->layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &gpus->layout->chunks[c];
        const struct layout_param *param = &gpus->layout->params[chunk->param];
        const struct device_places *places = &places_of(gpus, chunk->rank)->buckets[param->bucket];
        uint64_t elem = param->offset_elems + chunk->start_elem;
        const float *acc = (const float *)(gpus_mirror(gpus, chunk->rank, DEVICE_GRADIENT) + places->acc);

        if (gpus->step->begun[chunk->part])
            compare("gradient", chunk->rank, c, acc + (elem - places->start_elem),
                    state_acc(gpus->state, param->bucket, elem), chunk->n_elems * sizeof(float));
    }
}

/*
 * elem is the chunk's first element counted from the bucket's start, own the same from the start of the rank's slice.
 */
static void check_masters(struct gpus *gpus, uint32_t c, uint64_t elem, uint64_t own)
{
    const struct layout_chunk *chunk = &gpus->layout->chunks[c];
    const struct device_plan *plan = &gpus->nodes[0].keep.plan;
    uint32_t bucket = gpus->layout->params[chunk->param].bucket, kind;
    const struct device_places *places = &places_of(gpus, chunk->rank)->buckets[bucket];
    uint64_t at = device_master(plan, places, bucket, &kind);
    const uint8_t *mirror = gpus_mirror(gpus, chunk->rank, kind) + at;

    assert_int_equal(device_is_master24(plan, bucket), state_is_master24(gpus->state, bucket));
    if (!state_is_master24(gpus->state, bucket)) {
        compare("master", chunk->rank, c, mirror + own * sizeof(float), state_master(gpus->state, bucket, elem),
                chunk->n_elems * sizeof(float));
        return;
    }
    compare("weight of a master", chunk->rank, c, mirror + own * sizeof(uint16_t),
            state_master24(gpus->state, bucket, elem).weights, chunk->n_elems * sizeof(uint16_t));
    compare("byte of a master", chunk->rank, c, gpus_mirror(gpus, chunk->rank, DEVICE_STATE) + places->lower + own,
            state_master24(gpus->state, bucket, elem).lower, chunk->n_elems);
}

static void check_chunk(struct gpus *gpus, uint32_t c)
{
    const struct layout_chunk *chunk = &gpus->layout->chunks[c];
    const struct layout_param *param = &gpus->layout->params[chunk->param];
    const struct device_places *places = &places_of(gpus, chunk->rank)->buckets[param->bucket];
    uint64_t elem = param->offset_elems + chunk->start_elem, own = elem - places->start_elem;
    uint64_t moment_at = dtype_bytes(gpus->options.moments.dtype, own);
    size_t moment_bytes = dtype_bytes(gpus->options.moments.dtype, chunk->n_elems);
    const uint8_t *state = gpus_mirror(gpus, chunk->rank, DEVICE_STATE);

    check_masters(gpus, c, elem, own);
    if (places->exp_avg != DEVICE_NONE)
        compare("exp_avg", chunk->rank, c, state + places->exp_avg + moment_at,
                state_exp_avg(gpus->state, param->bucket, elem), moment_bytes);
    if (places->exp_avg_sq != DEVICE_NONE)
        compare("exp_avg_sq", chunk->rank, c, state + places->exp_avg_sq + moment_at,
                state_exp_avg_sq(gpus->state, param->bucket, elem), moment_bytes);
}

/*
 * Finds a rank's slice of a frozen parameter in stage 3, in the mirror and in the CPU's state. Return: its size in
 * bytes.
 */
static size_t find_frozen(const struct gpus *gpus, unsigned rank, uint32_t param, uint8_t **mirror, uint8_t **ours)
{
    const struct device_keep *keep = &gpus->nodes[0].keep;
    size_t elem_bytes = dtype_size(params[param].dtype);
    uint64_t begin, end;

    device_param_slice(&keep->plan, param, rank, &begin, &end);
    *mirror = gpus_mirror(gpus, rank, DEVICE_STATE) + places_of(gpus, rank)->frozen[param];
    *ours = state_frozen(gpus->state, param) + begin * elem_bytes;
    return (end - begin) * elem_bytes;
}

static void check_param(struct gpus *gpus, unsigned rank, uint32_t param)
{
    uint8_t *mirror, *ours;
    size_t n_bytes;

    if (gpus->options.stage < 3) {
        compare("weights", rank, param,
                gpus_mirror(gpus, rank, DEVICE_WEIGHTS) + gpus->layout->params[param].weight_offset_bytes,
                state_weights(gpus->state, param, 0), params[param].n_elems * dtype_size(params[param].dtype));
    } else if (param >= GPUS_N_TRAINABLE && !gpus->options.offload) {
        n_bytes = find_frozen(gpus, rank, param, &mirror, &ours);
        compare("frozen", rank, param, mirror, ours, n_bytes);
    }
}

void gpus_check_state(struct gpus *gpus)
{
    memset(gpus->nodes[0].host.map, 0, gpus->nodes[0].host.n_bytes);
    gpus_copy(gpus, false, 1u << DEVICE_STATE | 1u << DEVICE_WEIGHTS);
    for (uint32_t c = 0; c < gpus->layout->n_chunks && !gpus->options.offload; c++)
        check_chunk(gpus, c);
    for (unsigned rank = 0; rank < gpus->world; rank++)
        for (uint32_t p = 0; p < GPUS_N_PARAMS; p++)
            check_param(gpus, rank, p);
}

void gpus_check_pool(struct gpus *gpus, unsigned rank, uint32_t which)
{
    gpus_copy(gpus, false, 1u << DEVICE_POOL);
    for (unsigned p = 0; p < GPUS_N_PARAMS; p++) {
        size_t n_bytes = params[p].n_elems * dtype_size(params[p].dtype);
        _cleanup_free_ uint8_t *expected = malloc(n_bytes + 1);

        assert_non_null(expected);
        if (!(which >> p & 1))
            continue;
        weights_fetch(gpus->state, gpus->step->kernels, p, 0, params[p].n_elems, expected);
        compare("pool", rank, p, gpus_mirror(gpus, rank, DEVICE_POOL) + gpus->pool_offset[p], expected, n_bytes);
    }
}

static void write_array(struct gpus *gpus, unsigned rank, uint64_t at, const void *from, uint64_t n_bytes)
{
    if (at != DEVICE_NONE && n_bytes > 0)
        memcpy(gpus_mirror(gpus, rank, DEVICE_STATE) + at, from, n_bytes);
}

static void write_masters(struct gpus *gpus, unsigned rank, uint32_t bucket, const struct device_places *places)
{
    struct master24 masters;

    if (!state_is_master24(gpus->state, bucket)) {
        write_array(gpus, rank, places->master, state_master(gpus->state, bucket, places->start_elem),
                    places->slice_elems * sizeof(float));
        return;
    }
    masters = state_master24(gpus->state, bucket, places->start_elem);
    write_array(gpus, rank, places->master, masters.weights, places->slice_elems * sizeof(uint16_t));
    write_array(gpus, rank, places->lower, masters.lower, places->slice_elems);
}

static void fill_weights(struct gpus *gpus, unsigned rank)
{
    if (gpus->options.stage < 3)
        memcpy(gpus_mirror(gpus, rank, DEVICE_WEIGHTS), gpus->state->weights.map, gpus->layout->weight_bytes);
    for (uint32_t p = GPUS_N_TRAINABLE; gpus->options.stage == 3 && !gpus->options.offload && p < GPUS_N_PARAMS; p++) {
        uint8_t *mirror, *ours;
        size_t n_bytes = find_frozen(gpus, rank, p, &mirror, &ours);

        memcpy(mirror, ours, n_bytes);
    }
}

void gpus_fill_state(struct gpus *gpus)
{
    for (unsigned rank = 0; rank < gpus->world; rank++) {
        fill_weights(gpus, rank);
        for (uint32_t b = 0; b < gpus->layout->n_buckets; b++) {
            const struct device_places *places = &places_of(gpus, rank)->buckets[b];
            uint64_t elem = places->start_elem;
            uint64_t moment_bytes = dtype_bytes(gpus->options.moments.dtype, places->slice_elems);

            write_masters(gpus, rank, b, places);
            write_array(gpus, rank, places->exp_avg, state_exp_avg(gpus->state, b, elem), moment_bytes);
            write_array(gpus, rank, places->exp_avg_sq, state_exp_avg_sq(gpus->state, b, elem), moment_bytes);
        }
    }
}

void gpus_write_state(struct gpus *gpus)
{
    gpus_fill_state(gpus);
    gpus_copy(gpus, true, 1u << DEVICE_STATE | 1u << DEVICE_WEIGHTS);
}

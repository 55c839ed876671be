/* SPDX-License-Identifier: Apache-2.0 */

/* The engine that drives GPUs, simulated or real. Its results must have the bits of daemon/step/step.c. */

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/base/base.h"
#include "core/wire/progress.h"
#include "daemon/engines/child.h"
#include "daemon/memory/weights.h"
#include "tests/daemon/engines/device-machine.h"
#include "tests/daemon/engines/device-mesh.h"
#include "tests/tiers.h"

/* A step of two micro-batches and an update. The next step continues with its results. */
static void do_step(struct gpus *gpus, bool all)
{
    gpus_open_step(gpus);
    for (uint32_t micro = 0; micro < 2; micro++) {
        gpus_make_gradients(gpus, gpus->epoch * 2 + micro + 1, all);
        gpus_push(gpus);
        gpus_reduce_all(gpus, micro);
    }
    gpus_check_squares(gpus);
    gpus_check_gradients(gpus);
    gpus_decide(gpus);
    gpus_wait_done(gpus, gpus_order_update(gpus, 0));
    if (gpus->options.stage < 3)
        gpus_wait_done(gpus, gpus_order_gather(gpus, 0));
    gpus_commit(gpus);
    gpus_check_state(gpus);
}

static void check_steps(const struct gpus_options *options)
{
    const char *expected = machine_prefix();
    struct gpus gpus;

    gpus_init(&gpus, options);
    gpus.whole_numbers = options->adds_with_nccl;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    assert_int_equal(strncmp(gpus.nodes[0].versions, expected, strlen(expected)), 0);
    gpus_write_state(&gpus);
    for (unsigned i = 0; i < 2; i++)
        do_step(&gpus, i == 1);
    gpus_deinit(&gpus);
}

static void test_one_gpu(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 1});
}

static void test_two_gpus(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 2});
}

static void test_four_gpus(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 4, .stage = 1});
}

/* Does a step of two micro-batches without its update. */
static void reduce_two(struct gpus *gpus)
{
    gpus_open_step(gpus);
    for (uint32_t micro = 0; micro < 2; micro++) {
        gpus_make_gradients(gpus, micro + 1, true);
        gpus_push(gpus);
        gpus_reduce_all(gpus, micro);
    }
    gpus_decide(gpus);
}

/* An engine may die after an update, before the daemon has its report. The next engine gets the order again. */
static void test_updated_again(void **state)
{
    struct gpus gpus;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = MIN(2, machine_n_gpus())});
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_write_state(&gpus);
    reduce_two(&gpus);
    gpus_wait_done(&gpus, gpus_order_update(&gpus, 0));
    gpus_wait_done(&gpus, gpus_order_update(&gpus, 0));
    gpus_wait_done(&gpus, gpus_order_gather(&gpus, 0));
    gpus_commit(&gpus);
    gpus_check_state(&gpus);
    gpus_deinit(&gpus);
}

/* Replaces the engine. The new one continues with the memory that the old one left. */
static void restart(struct gpus *gpus)
{
    gpus_stop(gpus);
    gpus_start(gpus);
    gpus_wait_ready(gpus);
}

static void check_is_clear(struct gpus *gpus)
{
    const struct device_undo_places undo = device_undo_places(&gpus->nodes[0].keep.plan);

    gpus_copy(gpus, false, 1u << DEVICE_UNDO);
    assert_true(undo.slots > undo.marks);
    for (uint64_t i = undo.marks; i < undo.slots; i++)
        assert_int_equal(gpus_mirror(gpus, 0, DEVICE_UNDO)[i], 0);
}

/* New memory may contain bytes that look like a mark of this step, so it must be cleared. */
static void test_marks_of_new_memory(void **state)
{
    struct device_keep *keep;
    struct gpus gpus;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = 1});
    keep = &gpus.nodes[0].keep;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    check_is_clear(&gpus);
    gpus_write_state(&gpus);
    reduce_two(&gpus);
    gpus_wait_done(&gpus, gpus_order_update(&gpus, 0));
    /* Writes the old state back, although the marks say that it was updated. */
    gpus_copy(&gpus, true, 1u << DEVICE_STATE | 1u << DEVICE_WEIGHTS);
    assert_int_equal(keep->results.cleared[0], 1);
    keep->results.cleared[0] = 0;
    restart(&gpus);
    gpus_wait_done(&gpus, gpus_order_update(&gpus, 0));
    gpus_wait_done(&gpus, gpus_order_gather(&gpus, 0));
    gpus_commit(&gpus);
    gpus_check_state(&gpus);
    /* If the first engine dies before it reports new memory, the next engine allocates it again. */
    gpus_stop(&gpus);
    assert_int_equal(close(keep->fds[0][DEVICE_UNDO]), 0);
    keep->fds[0][DEVICE_UNDO] = -1;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    check_is_clear(&gpus);
    gpus_deinit(&gpus);
}

static uint32_t count_full(const struct gpus *gpus, bool buckets)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < (buckets ? gpus->layout->n_buckets : gpus->layout->n_parcels); i++)
        n += (buckets ? gpus->layout->buckets[i].n_elems : gpus->layout->parcels[i].n_elems) > 0;
    return n;
}

/* Does two micro-batches and an update, with a fault at the first call beyond the expected number. */
static void check_calls(const char *entry, uint32_t of_parcel, uint32_t of_bucket, uint32_t others)
{
    struct gpus gpus;
    char fault[64];
    uint32_t n;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = 1});
    n = count_full(&gpus, false) * of_parcel + count_full(&gpus, true) * of_bucket + others;
    snprintf(fault, sizeof(fault), "%s:error=cudaErrorInvalidValue@%" PRIu32, entry, n + 1);
    gpus.fault = fault;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    reduce_two(&gpus);
    gpus_wait_done(&gpus, gpus_order_update(&gpus, 0));
    gpus_deinit(&gpus);
}

/*
 * The expected calls. Launches: for each parcel a clear and a kernel, and two more that write marks where it is added
 * to an accumulator; for each bucket one update. Copies: for each parcel one of lists to the device, one of results
 * back, and one for undo; for the update one of lists. Two more copies do not depend on the model's size.
 */
static void test_calls(void **state)
{
    need_faults();
    check_calls("sim_launch", 2 + 4, 1, 0);
    check_calls("cudaMemcpyAsync", 2 + 3, 0, 1 + 2);
}

/* Three ranks, whose tree has a leaf at the second level. */
static void test_three_gpus(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 3});
}

static void test_two_nodes(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 2, .n_local = 1});
    check_steps(&(struct gpus_options){.n_nodes = 2, .n_local = 3});
}

static void test_three_nodes(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 3, .n_local = 2});
}

/* Buckets of one chunk, of all parameters of a kind, and larger than all parameters. */
static void test_bucket_sizes(void **state)
{
    static const uint64_t sizes[] = {64, 65536, 1000000};

    for (unsigned i = 0; i < tests_some(ARRAY_SIZE(sizes)); i++)
        check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 2, .bucket_elems = sizes[i]});
}

/* Stochastic rounding depends on an element's place in its parameter, so wrong places would change bits. */
static void test_moments(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 2, .moments = {.dtype = DTYPE_BF16}});
    for (unsigned stage = 2; stage <= 3; stage++)
        check_steps(&(struct gpus_options){
            .n_nodes = 1, .n_local = 2, .stage = stage, .moments = {.dtype = DTYPE_BF16, .stochastic = true}});
    for (unsigned stage = 2; stage <= 3; stage++)
        check_steps(&(struct gpus_options){
            .n_nodes = 1, .n_local = 2, .stage = stage, .moments = {.dtype = DTYPE_SIGNED8, .stochastic = true}});
}

/* Masters of 24 bits. Those of fp32 and fp16 weights are not changed. */
static void test_masters(void **state)
{
    for (unsigned stage = 2; stage <= 3; stage++)
        for (unsigned n_nodes = 1; n_nodes <= 2; n_nodes++)
            check_steps(&(struct gpus_options){
                .n_nodes = n_nodes, .n_local = 2, .stage = stage, .master24 = true, .optimizer = OPTIMIZER_LION});
    check_steps(&(struct gpus_options){
        .n_nodes = 1, .n_local = 2, .master24 = true, .moments = {.dtype = DTYPE_SIGNED8, .stochastic = true}});
}

static void test_optimizers(void **state)
{
    for (enum optimizer optimizer = 0; optimizer < OPTIMIZER_MUON; optimizer += tests_full() ? 1 : 2)
        check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 2, .optimizer = optimizer});
}

/* NCCL adds in its own order, so the gradients are whole numbers, whose sums are the same in every order. */
static void test_nccl_adds(void **state)
{
    check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 2, .adds_with_nccl = true});
    check_steps(&(struct gpus_options){.n_nodes = 1, .n_local = 4, .adds_with_nccl = true, .bucket_elems = 1000000});
    check_steps(&(struct gpus_options){.n_nodes = 3, .n_local = 1, .adds_with_nccl = true, .bucket_elems = 1000000});
}

/* ---- stage 3 --------------------------------------------------------------------------------------------- */

static void fetch(struct gpus *gpus, unsigned rank, uint32_t params)
{
    uint64_t tag = gpus_order_fetch(gpus, rank, params), n_sent = 0, n_received = 0;

    gpus_wait_done(gpus, tag);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        if (gpus->nodes[n].last.tag == tag) {
            n_sent += gpus->nodes[n].last.n_bytes_sent;
            n_received += gpus->nodes[n].last.n_bytes_received;
        }
    assert_true(n_sent == n_received && (n_sent > 0) == (gpus->world > 1));
    gpus_check_pool(gpus, rank, params);
}

/*
 * Fetches some parameters before a step, and all after it, when they must have the new weights. A fetch leaves the
 * places of other parameters unchanged.
 */
static void check_fetches(const struct gpus_options *options, const char *sim)
{
    const uint32_t some = 1u << 0 | 1u << 3 | 1u << 7;
    struct gpus gpus;

    gpus_init(&gpus, options);
    gpus.fault = sim;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_write_state(&gpus);
    for (unsigned rank = 0; rank < gpus.world; rank++)
        fetch(&gpus, rank, some);
    fetch(&gpus, gpus.world - 1, GPUS_ALL_PARAMS & ~some);
    gpus_check_pool(&gpus, gpus.world - 1, GPUS_ALL_PARAMS);
    do_step(&gpus, true);
    fetch(&gpus, gpus.world - 1, GPUS_ALL_PARAMS);
    do_step(&gpus, false);
    fetch(&gpus, 0, GPUS_ALL_PARAMS);
    gpus_stop(&gpus);
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_check_pool(&gpus, 0, GPUS_ALL_PARAMS);
    gpus_deinit(&gpus);
}

static void test_fetches(void **state)
{
    for (unsigned n_local = 1; n_local <= 4; n_local++)
        check_fetches(&(struct gpus_options){.n_nodes = 1, .n_local = n_local, .stage = 3}, NULL);
    check_fetches(&(struct gpus_options){.n_nodes = 1, .n_local = 2, .stage = 3, .bucket_elems = 1000000}, NULL);
}

static void test_fetches_between_nodes(void **state)
{
    check_fetches(&(struct gpus_options){.n_nodes = 2, .n_local = 1, .stage = 3}, NULL);
    check_fetches(&(struct gpus_options){.n_nodes = 2, .n_local = 3, .stage = 3}, NULL);
    check_fetches(&(struct gpus_options){.n_nodes = 3, .n_local = 2, .stage = 3}, NULL);
}

/* If no GPU may write into another's pool, all bytes travel through NCCL. */
static void test_fetches_without_peers(void **state)
{
    check_fetches(&(struct gpus_options){.n_nodes = 1, .n_local = 3, .stage = 3}, "peers=0");
    check_fetches(&(struct gpus_options){.n_nodes = 2, .n_local = 2, .stage = 3}, "peers=0");
}

/* Fetches, reductions and copies are ordered at once, and take effect in the order in which they were given. */
static void test_fetches_among_others(void **state)
{
    struct gpus gpus;
    uint64_t tags[64], last = 0;
    uint32_t n;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 2, .n_local = 2, .stage = 3});
    n = gpus.layout->n_parcels;
    assert_true(n <= ARRAY_SIZE(tags));
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_write_state(&gpus);
    gpus_open_step(&gpus);
    gpus_make_gradients(&gpus, 1, false);
    gpus_push(&gpus);
    for (uint32_t i = 0; i < n; i++) {
        tags[i] = gpus_order_reduce(&gpus, i, 0, 0);
        (void)gpus_order_fetch(&gpus, i % gpus.world, 1u << i % GPUS_N_PARAMS);
        (void)gpus_order_copy(&gpus, false, 1u << DEVICE_POOL, 0);
    }
    for (unsigned rank = 0; rank < gpus.world; rank++)
        last = gpus_order_fetch(&gpus, rank, GPUS_ALL_PARAMS);
    for (uint32_t i = 0; i < n; i++) {
        gpus_wait_done(&gpus, tags[i]);
        gpus_reduced(&gpus, i, 0);
        gpus_check_sums(&gpus, i);
    }
    gpus_wait_done(&gpus, last);
    gpus_check_gradients(&gpus);
    for (unsigned rank = 0; rank < gpus.world; rank++)
        gpus_check_pool(&gpus, rank, GPUS_ALL_PARAMS);
    gpus_deinit(&gpus);
}

/* Orders slow copies from a pool to a rank's mirror, several in one order. */
static void copy_pool(struct gpus *gpus, unsigned source, unsigned mirror, unsigned times)
{
    struct gpus_node *node = &gpus->nodes[0];
    struct device_move moves[8];
    struct device_command command = {
        .type = DEVICE_COMMAND_COPY,
        .copy = {.tag = ++gpus->last_tag, .timeout_ms = GPUS_PATIENCE_MS, .moves = moves, .n_moves = times}};

    assert_true(times <= ARRAY_SIZE(moves));
    for (unsigned i = 0; i < times; i++)
        moves[i] = (struct device_move){.local_rank = source,
                                        .kind = DEVICE_POOL,
                                        .segment_offset_bytes = node->mirror_at[mirror][DEVICE_POOL],
                                        .n_bytes = node->keep.places[source].piece_bytes[DEVICE_POOL]};
    assert_int_equal(device_order(node->device, &command), 0);
}

static void check_mirror(const struct gpus *gpus, unsigned mirror, uint32_t param)
{
    uint64_t n_elems = gpus->layout->params[param].n_elems;
    size_t n_bytes = n_elems * dtype_size(gpus->layout->params[param].dtype);
    _cleanup_free_ uint8_t *expected = malloc(n_bytes);

    assert_non_null(expected);
    weights_fetch(gpus->state, gpus->step->kernels, param, 0, n_elems, expected);
    assert_memory_equal(gpus_mirror(gpus, mirror, DEVICE_POOL), expected, n_bytes);
}

/*
 * GPU 1 writes into GPU 0's pool. A write must not begin before GPU 0 has done its earlier slow copies from the pool.
 * It must end before GPU 0's later copies, although GPU 1 is busy at first.
 */
static void test_pool_of_two(void **state)
{
    const uint32_t first = 0, second = GPUS_N_PARAMS - 1;
    struct gpus gpus;

    need_gpus(2);
    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = 2, .stage = 3});
    gpus.fault = "cudaMemcpyAsync:delay=60@*";
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_write_state(&gpus);
    gpus.pool_offset[first] = gpus.pool_offset[second] = 0;
    copy_pool(&gpus, 1, 1, 5);
    (void)gpus_order_fetch(&gpus, 0, 1u << first);
    copy_pool(&gpus, 0, 0, 5);
    (void)gpus_order_fetch(&gpus, 0, 1u << second);
    copy_pool(&gpus, 0, 1, 1);
    gpus_wait_done(&gpus, gpus.last_tag);
    check_mirror(&gpus, 0, first);
    check_mirror(&gpus, 1, second);
    gpus_deinit(&gpus);
}

/* ---- the state in host memory ---------------------------------------------------------------------------- */

enum { SEGMENT_GRADIENT = 1, SEGMENT_WEIGHTS };

/*
 * What a node's daemon has when the state is in host memory: the partitions of its ranks, and the step that updates
 * them.
 */
struct host {
    struct state *state;
    struct step *step;
    bool updated;
};

static void host_init(struct gpus *gpus, unsigned n, struct host *host)
{
    const struct gpus_options *options = &gpus->options;
    struct gpus_node *node = &gpus->nodes[n];

    *host = (struct host){.updated = false};
    assert_int_equal(state_new(&host->state,
                               &(struct state_options){.layout = gpus->layout,
                                                       .stage = options->stage,
                                                       .first_rank = n * options->n_local,
                                                       .n_ranks = options->n_local,
                                                       .moments = optimizer_moments(options->optimizer, &gpus->hyper)}),
                     0);
    assert_int_equal(step_new(&host->step, &(struct step_options){.state = host->state,
                                                                  .kernels = gpus->step->kernels,
                                                                  .pool = gpus->pool,
                                                                  .first_local = n * options->n_local,
                                                                  .n_local = options->n_local,
                                                                  .optimizer = options->optimizer}),
                     0);
    gpus_set_weights(gpus, host->state);
    assert_int_equal(device_share(node->device, SEGMENT_GRADIENT, &host->state->gradient), 0);
    if (options->stage < 3)
        assert_int_equal(device_share(node->device, SEGMENT_WEIGHTS, &host->state->weights), 0);
}

enum { ASIDE_ROUNDS = 4 };

/*
 * Orders copies of all ranks' slices of all buckets: gradients to the host, or weights from the host. A copy aside
 * copies all slices several times, so that a reduction that does not wait for it is sure to change the last copies.
 */
static void copy_slices(struct gpus *gpus, unsigned n, const struct host *host, bool weights, bool aside, uint64_t tag)
{
    struct gpus_node *node = &gpus->nodes[n];
    struct device_move moves[64];
    struct device_order_copy copy = {.tag = tag, .timeout_ms = GPUS_PATIENCE_MS, .moves = moves, .aside = aside};

    for (uint32_t k = 0; k < gpus->layout->n_buckets * (aside ? ASIDE_ROUNDS : 1); k++)
        for (unsigned i = 0; i < gpus->options.n_local; i++) {
            uint32_t b = k % gpus->layout->n_buckets;
            const struct layout_bucket *bucket = &gpus->layout->buckets[b];
            const struct device_places *places = &node->keep.places[i].buckets[b];
            uint64_t elem = places->start_elem;
            uint64_t at = bucket->weight_offset_bytes + elem * dtype_size(bucket->dtype);
            uint64_t n_bytes = places->slice_elems * (weights ? dtype_size(bucket->dtype) : sizeof(float));

            assert_true(copy.n_moves < ARRAY_SIZE(moves));
            if (!weights)
                moves[copy.n_moves] =
                    (struct device_move){.kind = DEVICE_GRADIENT,
                                         .offset_bytes = places->acc,
                                         .segment = SEGMENT_GRADIENT,
                                         .segment_offset_bytes = (uint64_t)((uint8_t *)state_acc(host->state, b, elem) -
                                                                            host->state->gradient.map)};
            else
                moves[copy.n_moves] = (struct device_move){.write = true,
                                                           .kind = DEVICE_WEIGHTS,
                                                           .offset_bytes = at,
                                                           .segment = SEGMENT_WEIGHTS,
                                                           .segment_offset_bytes = at};
            moves[copy.n_moves].local_rank = i;
            moves[copy.n_moves].n_bytes = n_bytes;
            copy.n_moves += n_bytes > 0;
        }
    assert_int_equal(device_order(node->device, &(struct device_command){.type = DEVICE_COMMAND_COPY, .copy = copy}),
                     0);
}

static void copy_all_slices(struct gpus *gpus, const struct host *hosts, bool weights)
{
    uint64_t tag = ++gpus->last_tag;

    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        copy_slices(gpus, n, &hosts[n], weights, false, tag);
    gpus_wait_done(gpus, tag);
}

/* Copies the engine's results into the host's step. */
static void take_results(const struct gpus *gpus, unsigned n, struct host *host)
{
    const struct device_keep *keep = &gpus->nodes[n].keep;

    step_open(host->step);
    for (uint32_t part = 0; part < gpus->layout->n_parts; part++)
        if (keep->inputs.begun[part])
            step_contribute(host->step, host->step->layout->parts[part].param);
    for (uint32_t c = 0; c < gpus->layout->n_chunks; c++)
        if (keep->inputs.begun[gpus->layout->chunks[c].part])
            host->step->results[c].squares = keep->results.squares[c];
}

static void note_updated(void *userdata, int result)
{
    struct host *host = userdata;

    host->updated = true;
}

/* Computes the norm and updates each node's partitions on the host. The norm must be that of the core on the CPU. */
static void update_hosts(struct gpus *gpus, struct host *hosts)
{
    struct exact_sum total = {.n_deferred = 0}, expected = {.n_deferred = 0};
    struct step_update update = {.groups = &gpus->hyper, .s = 1.0 / gpus->world};

    step_norm(gpus->step, &expected);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++) {
        take_results(gpus, n, &hosts[n]);
        step_norm(hosts[n].step, &total);
    }
    assert_true(exact_sum_round(&total) == exact_sum_round(&expected) && exact_sum_round(&total) > 0);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++) {
        hosts[n].updated = false;
        step_update(hosts[n].step, &update, note_updated, &hosts[n]);
        while (!hosts[n].updated)
            assert_true(worker_pool_wait(gpus->pool) > 0);
        step_commit(hosts[n].step);
    }
}

static void check_host(const struct gpus *gpus, const struct host *host)
{
    for (uint32_t c = 0; c < gpus->layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &gpus->layout->chunks[c];
        const struct layout_param *param = &gpus->layout->params[chunk->param];
        uint64_t elem = param->offset_elems + chunk->start_elem;

        if (!state_owns(host->state, chunk->rank))
            continue;
        for (enum state_kind kind = 0; kind < STATE_N_KINDS; kind++) {
            const float *values = state_values(host->state, kind, param->bucket, elem);

            if (values)
                assert_memory_equal(values, state_values(gpus->state, kind, param->bucket, elem),
                                    chunk->n_elems * sizeof(float));
        }
    }
}

/* Copies all parameters from the host's masters to all pools. For stage 3 on one node. */
static void fill_pools(struct gpus *gpus, const struct host *host)
{
    for (unsigned rank = 0; rank < gpus->world; rank++)
        for (uint32_t p = 0; p < GPUS_N_PARAMS; p++)
            weights_fetch(host->state, gpus->step->kernels, p, 0, gpus->layout->params[p].n_elems,
                          gpus_mirror(gpus, rank, DEVICE_POOL) + gpus->pool_offset[p]);
    gpus_copy(gpus, true, 1u << DEVICE_POOL);
    memset(gpus->nodes[0].host.map, 0, gpus->nodes[0].host.n_bytes);
    for (unsigned rank = 0; rank < gpus->world; rank++)
        gpus_check_pool(gpus, rank, GPUS_ALL_PARAMS);
}

static void do_offloaded_step(struct gpus *gpus, struct host *hosts, bool all)
{
    gpus_open_step(gpus);
    for (uint32_t micro = 0; micro < 2; micro++) {
        gpus_make_gradients(gpus, gpus->epoch * 2 + micro + 1, all);
        gpus_push(gpus);
        gpus_reduce_all(gpus, micro);
    }
    copy_all_slices(gpus, hosts, false);
    update_hosts(gpus, hosts);
    gpus_decide(gpus);
    if (gpus->options.stage < 3) {
        copy_all_slices(gpus, hosts, true);
        gpus_wait_done(gpus, gpus_order_gather(gpus, 0));
    } else {
        fill_pools(gpus, &hosts[0]);
    }
    gpus_commit(gpus);
    gpus_check_state(gpus);
    for (unsigned n = 0; n < gpus->options.n_nodes; n++)
        check_host(gpus, &hosts[n]);
}

static void check_offload(struct gpus_options options)
{
    struct host hosts[GPUS_MAX_NODES];
    struct gpus gpus;

    options.offload = true;
    gpus_init(&gpus, &options);
    assert_int_equal(gpus.nodes[0].keep.places[0].piece_bytes[DEVICE_STATE], DEVICE_ALIGN_BYTES);
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    for (unsigned n = 0; n < gpus.options.n_nodes; n++)
        host_init(&gpus, n, &hosts[n]);
    gpus_write_state(&gpus);
    for (unsigned i = 0; i < 2; i++)
        do_offloaded_step(&gpus, hosts, i == 1);
    gpus_stop(&gpus);
    for (unsigned n = 0; n < gpus.options.n_nodes; n++) {
        step_free(hosts[n].step);
        state_free(hosts[n].state);
    }
    gpus_deinit(&gpus);
}

static void test_offload(void **state)
{
    check_offload((struct gpus_options){.n_nodes = 1, .n_local = 1});
    check_offload((struct gpus_options){.n_nodes = 1, .n_local = 3, .stage = 1});
    check_offload((struct gpus_options){.n_nodes = 2, .n_local = 2});
    check_offload((struct gpus_options){.n_nodes = 1, .n_local = MIN(2, machine_n_gpus()), .stage = 3}); /* 1 node */
    for (enum optimizer optimizer = 0; optimizer < OPTIMIZER_MUON; optimizer++)
        check_offload((struct gpus_options){.n_nodes = 1, .n_local = 2, .optimizer = optimizer});
}

/* Asserts that the host has the sums that the core on the CPU has. */
static void check_copied(const struct gpus *gpus, const struct host *host)
{
    for (uint32_t c = 0; c < gpus->layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &gpus->layout->chunks[c];
        const struct layout_param *param = &gpus->layout->params[chunk->param];
        uint64_t elem = param->offset_elems + chunk->start_elem;

        if (state_owns(host->state, chunk->rank) && gpus->step->begun[chunk->part])
            assert_memory_equal(state_acc(host->state, param->bucket, elem),
                                state_acc(gpus->state, param->bucket, elem), chunk->n_elems * sizeof(float));
    }
}

/*
 * Sums are copied aside while reductions wait for a trainer, and while reductions add to the same sums. The first copy
 * overtakes the reductions. The second copy has the sums from before the reductions, which wait for it.
 */
static void check_copy_aside(const char *fault)
{
    struct host host;
    struct gpus gpus;
    uint64_t first_tag, tag = 0;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = MIN(2, machine_n_gpus()), .offload = true});
    gpus.fault = fault;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    host_init(&gpus, 0, &host);
    gpus_write_state(&gpus);
    gpus_open_step(&gpus);
    for (uint32_t micro = 0; micro < 5; micro++) {
        bool waits = micro % 2 == 1;

        gpus_make_gradients(&gpus, micro + 1, true);
        gpus_push(&gpus);
        gpus.point = waits ? progress_first(5) + micro : 0;
        if (micro > 0 && !waits)
            copy_slices(&gpus, 0, &host, false, true, tag = ++gpus.last_tag);
        first_tag = gpus_order_reduce_all(&gpus, micro);
        if (waits)
            copy_slices(&gpus, 0, &host, false, true, tag = ++gpus.last_tag);
        if (micro > 0) {
            gpus_wait_done(&gpus, tag);
            check_copied(&gpus, &host);
        }
        if (waits) {
            assert_false(gpus_is_done(&gpus, first_tag));
            assert_int_equal(device_release(gpus.nodes[0].device, 0, gpus.point), 0);
        }
        gpus_finish_reduce_all(&gpus, micro, first_tag);
    }
    gpus_check_gradients(&gpus);
    gpus_stop(&gpus);
    step_free(host.step);
    state_free(host.state);
    gpus_deinit(&gpus);
}

static void test_copy_aside(void **state)
{
    check_copy_aside(NULL);
}

/* Copies take so long that the reductions would overtake them. */
static void test_slow_copy_aside(void **state)
{
    need_faults();
    check_copy_aside("cudaMemcpyAsync:delay=10@*");
}

/* ---- what is not finite ---------------------------------------------------------------------------------- */

static void reduce_with(struct gpus *gpus, unsigned rank, unsigned param, uint64_t elem, float value)
{
    gpus_open_step(gpus);
    gpus_make_gradients(gpus, 1, true);
    gpus_set_gradient(gpus, rank, param, elem, value);
    gpus_push(gpus);
    gpus_reduce_all(gpus, 0);
}

static void check_finding(const struct gpus_options *options)
{
    const unsigned rank = 1, param = 2;
    const uint64_t elem = 40;
    struct gpus gpus;
    uint32_t parcel;
    unsigned n_found = 0;

    gpus_init(&gpus, options);
    gpus.whole_numbers = options->adds_with_nccl;
    parcel = gpus.layout->params[param].first_parcel;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    reduce_with(&gpus, rank, param, elem, -INFINITY);
    for (unsigned n = 0; n < gpus.options.n_nodes; n++) {
        const struct device_result_finding *finding = &gpus.nodes[n].keep.results.findings[parcel];

        if (!finding->found || finding->overflowed)
            continue;
        n_found++;
        assert_true(finding->param == param && finding->rank == rank && finding->elem == elem);
        assert_true(isinf(finding->value) && finding->value < 0 && finding->n_inf == 1 && finding->n_nan == 0);
    }
    assert_int_equal(n_found, 1);
    reduce_with(&gpus, rank, param, elem, 1);
    for (unsigned n = 0; n < gpus.options.n_nodes; n++)
        assert_false(gpus.nodes[n].keep.results.findings[parcel].found);
    gpus_deinit(&gpus);
}

static void test_findings(void **state)
{
    check_finding(&(struct gpus_options){.n_nodes = 1, .n_local = 2});
    check_finding(&(struct gpus_options){.n_nodes = 2, .n_local = 1});
    check_finding(&(struct gpus_options){.n_nodes = 2, .n_local = 1, .adds_with_nccl = true});
}

/* ---- a trainer ------------------------------------------------------------------------------------------- */

/* Finds a function of the driver by name, like a program that is not linked with the driver. */
static void find(const char *name, void *function)
{
    enum cudaDriverEntryPointQueryResult result;
    void *found;

    assert_int_equal(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), cudaSuccess);
    assert_int_equal(result, cudaDriverEntryPointSuccess);
    memcpy(function, &found, sizeof(found));
}

/* Maps the ring of local rank 0 as a trainer does: from zerod's descriptor, in another process than the engine's. */
static uint8_t *map_ring(const struct gpus *gpus)
{
    const struct device_keep *keep = &gpus->nodes[0].keep;
    __typeof__(&cuMemImportFromShareableHandle) import;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemSetAccess) set_access;
    __typeof__(&cuMemRelease) release;
    CUmemGenericAllocationHandle handle;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t n_bytes = keep->facts->n_bytes[0][DEVICE_RING];
    CUdeviceptr at;

    find("cuMemImportFromShareableHandle", &import);
    find("cuMemAddressReserve", &reserve);
    find("cuMemMap", &map);
    find("cuMemSetAccess", &set_access);
    find("cuMemRelease", &release);
    assert_int_equal(
        import(&handle, (void *)(intptr_t)keep->fds[0][DEVICE_RING], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        CUDA_SUCCESS);
    assert_int_equal(reserve(&at, n_bytes, 0, 0, 0), CUDA_SUCCESS);
    assert_int_equal(map(at, n_bytes, 0, handle, 0), CUDA_SUCCESS);
    assert_int_equal(set_access(at, n_bytes, &access, 1), CUDA_SUCCESS);
    assert_int_equal(release(handle), CUDA_SUCCESS);
    return (uint8_t *)(uintptr_t)at;
}

/* Opens the page of local rank 0 as a trainer does. Return: its address for the GPU. */
static CUdeviceptr open_progress(const struct gpus *gpus)
{
    __typeof__(&cuMemHostGetDevicePointer) get_pointer;
    void *page = gpus->nodes[0].keep.progress_segments[0].map;
    CUdeviceptr at;

    find("cuMemHostGetDevicePointer", &get_pointer);
    assert_int_equal(cudaHostRegister(page, sizeof(struct progress_page), cudaHostRegisterMapped), cudaSuccess);
    assert_int_equal(get_pointer(&at, page, 0), CUDA_SUCCESS);
    return at;
}

static void write_point(cudaStream_t stream, CUdeviceptr page, uint64_t point)
{
    __typeof__(&cuStreamWriteValue64) write_value;

    find("cuStreamWriteValue64", &write_value);
    assert_int_equal(write_value(stream, page + progress_word(point) * sizeof(point), point, 0), CUDA_SUCCESS);
}

enum { WAITING_TURNS = 30 }; /* of at most 10 ms each, which is long for an engine that need not wait */

static void check_none_is_done(struct gpus *gpus, uint64_t first_tag)
{
    for (unsigned i = 0; i < WAITING_TURNS; i++)
        gpus_turn(gpus);
    for (uint32_t i = 0; i < gpus->layout->n_parcels; i++)
        assert_false(gpus_is_done(gpus, first_tag + i));
}

/* The trainer's copy and point are on a stream, and the trainer itself does not wait for them. */
static void test_points(void **state)
{
    struct gpus gpus;
    uint64_t first_tag;
    CUdeviceptr page;
    cudaStream_t stream;
    uint8_t *ring;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = 1});
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_open_step(&gpus);
    gpus_make_gradients(&gpus, 1, true);

    assert_int_equal(cudaSetDevice(0), cudaSuccess);
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    page = open_progress(&gpus);
    ring = map_ring(&gpus);
    assert_int_equal(cudaHostRegister(gpus.arenas[0], gpus.layout->arena_bytes, cudaHostRegisterDefault), cudaSuccess);
    gpus.point = progress_first(5) + 3;
    write_point(stream, page, gpus.point - 1);
    machine_hold(stream);
    assert_int_equal(cudaMemcpyAsync(ring, gpus.arenas[0], gpus.layout->arena_bytes, cudaMemcpyHostToDevice, stream),
                     cudaSuccess);
    write_point(stream, page, gpus.point);
    /* A late point of the predecessor's GPU does not change the new point. */
    write_point(stream, page, progress_first(4) + 9);
    first_tag = gpus_order_reduce_all(&gpus, 0);
    check_none_is_done(&gpus, first_tag);
    machine_let_go();
    gpus_finish_reduce_all(&gpus, 0, first_tag);
    gpus_check_gradients(&gpus);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    assert_int_equal(cudaHostUnregister(gpus.arenas[0]), cudaSuccess);
    assert_int_equal(cudaHostUnregister(gpus.nodes[0].keep.progress_segments[0].map), cudaSuccess);
    gpus_deinit(&gpus);
}

/* The trainer dies before its GPU reaches the point. Its slot is added when the daemon releases the point. */
static void test_released_points(void **state)
{
    struct gpus gpus;
    uint64_t first_tag;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = 1});
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_open_step(&gpus);
    gpus_make_gradients(&gpus, 1, true);
    gpus_push(&gpus);

    gpus.point = progress_first(5) + 3;
    first_tag = gpus_order_reduce_all(&gpus, 0);
    check_none_is_done(&gpus, first_tag);
    assert_int_equal(device_release(gpus.nodes[0].device, 0, gpus.point - 1), 0);
    check_none_is_done(&gpus, first_tag);
    assert_int_equal(device_release(gpus.nodes[0].device, 0, gpus.point), 0);
    gpus_finish_reduce_all(&gpus, 0, first_tag);
    gpus_check_gradients(&gpus);
    gpus_deinit(&gpus);
}

/* The timeout of an order does not run while it waits for a trainer, nor the timeouts of orders behind it. */
static void test_late_trainer(void **state)
{
#ifdef __SANITIZE_THREAD__
    enum { SHORT_MS = 500 };
#else
    enum { SHORT_MS = 50 };
#endif
    struct gpus gpus;
    struct gpus_node *node = &gpus.nodes[0];
    uint64_t first_tag, behind;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = 1});
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_open_step(&gpus);
    gpus_make_gradients(&gpus, 1, true);
    gpus_push(&gpus);

    gpus.point = progress_first(1) + 1;
    first_tag = gpus_order_reduce_all(&gpus, 0);
    gpus.timeout_ms = SHORT_MS;
    behind = gpus_order_gather(&gpus, 0);
    /* Longer than the daemon's own timeout for the last order. */
    for (uint64_t end = uv_hrtime() + (UINT64_C(2) * SHORT_MS + CHILD_GRACE_MS) * 1000000; uv_hrtime() < end;)
        gpus_turn(&gpus);
    assert_false(node->failed);
    __atomic_store_n(
        &((struct progress_page *)(void *)node->keep.progress_segments[0].map)->words[progress_word(gpus.point)],
        gpus.point, __ATOMIC_RELEASE);
    gpus_finish_reduce_all(&gpus, 0, first_tag);
    while (!gpus_is_done(&gpus, behind))
        gpus_turn(&gpus);
    gpus_check_gradients(&gpus);
    gpus_deinit(&gpus);
}

/*
 * After device_keep_let_go(), other files may get the numbers of the old descriptors, while the old engine still ends.
 */
static void test_let_go(void **state)
{
    int taken[DEVICE_N_PIECES];
    struct gpus gpus;

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 1, .n_local = 1});
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    device_keep_let_go(&gpus.nodes[0].keep);
    for (size_t i = 0; i < ARRAY_SIZE(taken); i++) {
        taken[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        assert_true(taken[i] >= 0);
    }
    gpus_deinit(&gpus);
    for (size_t i = 0; i < ARRAY_SIZE(taken); i++)
        assert_int_equal(close(taken[i]), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_one_gpu),
        cmocka_unit_test(test_two_gpus),
        cmocka_unit_test(test_three_gpus),
        cmocka_unit_test(test_four_gpus),
        cmocka_unit_test(test_two_nodes),
        cmocka_unit_test(test_three_nodes),
        cmocka_unit_test(test_nccl_adds),
        cmocka_unit_test(test_bucket_sizes),
        cmocka_unit_test(test_optimizers),
        cmocka_unit_test(test_moments),
        cmocka_unit_test(test_masters),
        cmocka_unit_test(test_findings),
        cmocka_unit_test(test_updated_again),
        cmocka_unit_test(test_marks_of_new_memory),
        cmocka_unit_test(test_points),
        cmocka_unit_test(test_released_points),
        cmocka_unit_test(test_late_trainer),
        cmocka_unit_test(test_let_go),
        cmocka_unit_test(test_fetches),
        cmocka_unit_test(test_fetches_between_nodes),
        cmocka_unit_test(test_fetches_without_peers),
        cmocka_unit_test(test_fetches_among_others),
        cmocka_unit_test(test_pool_of_two),
        cmocka_unit_test(test_offload),
        cmocka_unit_test(test_copy_aside),
        cmocka_unit_test(test_slow_copy_aside),
    };

    if (!machine_open())
        return 77; /* meson's code for a skipped test */
    return cmocka_run_group_tests(tests, NULL, NULL);
}

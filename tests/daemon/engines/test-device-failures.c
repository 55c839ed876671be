/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Engines that drive GPUs die, or a call fails. ZEROD_SIM tells the simulated GPUs at which call. On real GPUs the
 * tests with faults are skipped, and engines are killed from outside. The next generation continues with the memory of
 * the last one, and the bits must be those of an undisturbed run.
 */

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/base.h"
#include "tests/daemon/engines/device-machine.h"
#include "tests/daemon/engines/device-mesh.h"
#include "tests/tiers.h"

/*
 * How much faster than usual tests move a fault to later calls. Under thread sanitizer an engine takes five times as
 * long, and races do not depend on where it is killed.
 */
static unsigned n_strides(void)
{
#ifdef __SANITIZE_THREAD__
    return 16;
#else
    return tests_full() ? 1 : 3;
#endif
}

static const struct gpus_options two_gpus = {.n_nodes = 1, .n_local = 2};
static const struct gpus_options two_nodes = {.n_nodes = 2, .n_local = 2};

static unsigned n_restarts;

/* Replaces all engines by new ones without faults and with the usual timeout. */
static void start_well(struct gpus *gpus)
{
    gpus_stop(gpus);
    gpus->fault = NULL;
    gpus->timeout_ms = GPUS_PATIENCE_MS;
    gpus_start(gpus);
    gpus_wait_ready(gpus);
}

/* After a failure, replaces all engines, because all end with one. */
static void restart(struct gpus *gpus)
{
    n_restarts++;
    start_well(gpus);
}

static void copy(struct gpus *gpus, uint32_t kinds)
{
    uint64_t tag = gpus_order_copy(gpus, true, kinds, 0);

    while (!gpus_try_done(gpus, tag)) {
        restart(gpus);
        tag = gpus_order_copy(gpus, true, kinds, tag);
    }
}

/* Orders all reductions at once. After a failure, repeats the orders that some node has not done. */
static void reduce_all(struct gpus *gpus, uint32_t micro)
{
    uint32_t n = gpus->layout->n_parcels;
    uint64_t tags[64];

    assert_true(n <= ARRAY_SIZE(tags));
    for (uint32_t i = 0; i < n; i++)
        tags[i] = gpus_order_reduce(gpus, i, micro, 0);
    for (uint32_t i = 0; i < n; i++) {
        if (gpus_try_done(gpus, tags[i]))
            continue;
        restart(gpus);
        for (uint32_t k = i; k < n; k++)
            if (!gpus_is_done(gpus, tags[k]))
                tags[k] = gpus_order_reduce(gpus, k, micro, tags[k]);
        i--;
    }
    for (uint32_t i = 0; i < n; i++) {
        gpus_reduced(gpus, i, micro);
        gpus_check_sums(gpus, i);
    }
}

static void update(struct gpus *gpus)
{
    uint64_t tag = gpus_order_update(gpus, 0);

    while (!gpus_try_done(gpus, tag)) {
        restart(gpus);
        tag = gpus_order_update(gpus, tag);
    }
    if (gpus->options.stage == 3)
        return;
    tag = gpus_order_gather(gpus, 0);
    while (!gpus_try_done(gpus, tag)) {
        restart(gpus);
        tag = gpus_order_gather(gpus, tag);
    }
}

/* Fetches all parameters to all pools at once. */
static void fetch(struct gpus *gpus)
{
    uint64_t tag = 0;

    for (unsigned rank = 0; rank < gpus->world; rank++)
        tag = gpus_order_fetch(gpus, rank, GPUS_ALL_PARAMS);
    while (!gpus_try_done(gpus, tag)) {
        restart(gpus);
        for (unsigned rank = 0; rank < gpus->world; rank++)
            tag = gpus_order_fetch(gpus, rank, GPUS_ALL_PARAMS);
    }
}

static void do_step(struct gpus *gpus)
{
    gpus_open_step(gpus);
    for (uint32_t micro = 0; micro < 2; micro++) {
        gpus_make_gradients(gpus, gpus->epoch * 2 + micro + 1, false);
        gpus_fill_rings(gpus);
        copy(gpus, 1u << DEVICE_RING);
        reduce_all(gpus, micro);
    }
    gpus_decide(gpus);
    update(gpus);
    if (gpus->options.stage == 3)
        fetch(gpus);
    gpus_commit(gpus);
}

static void on_kill(uv_timer_t *timer)
{
    const struct gpus_node *node = timer->data;

    if (node->device && !node->failed)
        (void)kill((pid_t)device_pid(node->device), SIGKILL);
}

/*
 * Does two steps while an engine may die. fault says at which call it dies; NULL for none. kill_ms says when it is
 * killed from outside; 0 for never. timeout_ms is the timeout of its orders; 0 for the usual one. Return: whether it
 * died.
 */
static bool survive(const struct gpus_options *options, const char *fault, uint64_t kill_ms, uint32_t timeout_ms)
{
    struct gpus gpus;
    uv_timer_t timer;
    unsigned before = n_restarts;

    gpus_init(&gpus, options);
    assert_int_equal(uv_timer_init(&gpus.loop, &timer), 0);
    timer.data = &gpus.nodes[gpus.options.n_nodes - 1];
    if (kill_ms > 0)
        assert_int_equal(uv_timer_start(&timer, on_kill, kill_ms, 0), 0);
    gpus.fault = fault;
    gpus.fault_node = gpus.options.n_nodes - 1;
    if (timeout_ms > 0)
        gpus.timeout_ms = timeout_ms;
    gpus_start(&gpus);
    if (!gpus_try_ready(&gpus))
        restart(&gpus);
    gpus_fill_state(&gpus);
    copy(&gpus, 1u << DEVICE_STATE | 1u << DEVICE_WEIGHTS);
    do_step(&gpus);
    do_step(&gpus);
    if (gpus.fault && n_restarts > before)
        fail_msg("%s: a restart that nothing asked for", fault);
    gpus.fault = NULL;
    uv_close((uv_handle_t *)&timer, NULL);
    /* The checks below need engines without faults and with the usual timeout. */
    if (n_restarts == before)
        start_well(&gpus);
    gpus_check_gradients(&gpus);
    gpus_check_squares(&gpus);
    gpus_check_state(&gpus);
    for (unsigned rank = 0; options->stage == 3 && rank < gpus.world; rank++)
        gpus_check_pool(&gpus, rank, GPUS_ALL_PARAMS);
    gpus_deinit(&gpus);
    return n_restarts > before;
}

/* Waits for the results, which are written before the report is sent. */
static void await_results(const struct gpus *gpus)
{
    const struct device_keep *keep = &gpus->nodes[0].keep;
    const struct device_plan *plan = &keep->plan;
    const struct exact_sum zero = {0};
    unsigned waited_ms = 0;

    for (uint32_t c = 0; c < plan->head->n_chunks; c++)
        while (memcmp(&keep->results.squares[c], &zero, sizeof(zero)) == 0) {
            assert_true(waited_ms++ < GPUS_PATIENCE_MS);
            usleep(1000);
        }
}

/*
 * Orders are done, but their reports are not read. Other orders have used their lanes since, so they must not be done
 * again.
 */
static void test_closed_before_it_was_heard(void **state)
{
    const struct gpus_options one_node = {.n_nodes = 1, .n_local = MIN(2, machine_n_gpus())};
    uint64_t tags[64];
    struct gpus gpus;
    uint32_t n;

    gpus_init(&gpus, &one_node);
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_write_state(&gpus);
    gpus_open_step(&gpus);
    n = gpus.layout->n_parcels;
    assert_true(n > DEVICE_LANES && n <= ARRAY_SIZE(tags));
    for (uint32_t micro = 0; micro < 2; micro++) {
        gpus_make_gradients(&gpus, micro + 1, true);
        gpus_push(&gpus);
        memset(gpus.nodes[0].keep.results.squares, 0,
               gpus.nodes[0].keep.plan.head->n_chunks * sizeof(struct exact_sum));
        for (uint32_t i = 0; i < n; i++)
            tags[i] = gpus_order_reduce(&gpus, i, micro, 0);
        if (micro == 1) {
            await_results(&gpus);
            restart(&gpus);
            assert_true(gpus.nodes[0].n_late >= n - 1);
        }
        for (uint32_t i = 0; i < n; i++) {
            if (!gpus_is_done(&gpus, tags[i]))
                gpus_wait_done(&gpus, micro == 1 ? gpus_order_reduce(&gpus, i, micro, tags[i]) : tags[i]);
            gpus_reduced(&gpus, i, micro);
        }
    }
    gpus_check_gradients(&gpus);
    gpus_check_squares(&gpus);
    gpus_deinit(&gpus);
}

/* Kills an engine at the first call of an entry point, then in later runs at later calls, until it survives. */
static void kill_at(const struct gpus_options *options, const char *entry, unsigned stride)
{
    char fault[128];
    unsigned n = 1;

    need_faults();
    stride *= n_strides();
    do {
        snprintf(fault, sizeof(fault), "%s:kill@%u", entry, n);
        n += stride + n / 4;
    } while (survive(options, fault, 0, 0));
    assert_true(n > 1 + stride);
}

static void test_killed_at_copies(void **state)
{
    kill_at(&two_gpus, "cudaMemcpyAsync", 7);
    kill_at(&two_nodes, "cudaMemcpyAsync", 23);
}

static void test_killed_at_kernels(void **state)
{
    kill_at(&two_gpus, "sim_launch", 5);
    kill_at(&two_nodes, "sim_launch", 13);
}

/* Return: the launches on one GPU before the updates. Each parcel has two at first, and four when it is added to. */
static uint32_t count_launches(const struct gpus *gpus)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < gpus->layout->n_parcels; i++)
        n += gpus->layout->parcels[i].n_elems > 0 ? 2 + 4 : 0;
    return n;
}

/*
 * Does a step of two micro-batches. The engine dies inside the update's n-th launch, when the kernel's threads have had
 * that many turns. Return: whether it died.
 */
static bool die_in_update(const struct gpus_options *options, unsigned n, uint64_t turns)
{
    unsigned before = n_restarts;
    struct gpus gpus;
    char fault[128];

    gpus_init(&gpus, options);
    assert_true(gpus.layout->n_buckets > 1);
    snprintf(fault, sizeof(fault), "sim_launch:die=%" PRIu64 "@%" PRIu32, turns, count_launches(&gpus) + n);
    gpus.fault = fault;
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    gpus_write_state(&gpus);
    gpus_open_step(&gpus);
    for (uint32_t micro = 0; micro < 2; micro++) {
        gpus_make_gradients(&gpus, micro + 1, true);
        gpus_push(&gpus);
        gpus_reduce_all(&gpus, micro);
    }
    gpus_decide(&gpus);
    update(&gpus);
    gpus_commit(&gpus);
    gpus_check_state(&gpus);
    gpus_deinit(&gpus);
    return n_restarts > before;
}

/* Kills an engine in the update's n-th launch, later in each run, until the launch ends before. */
static void die_in_launches(const struct gpus_options *options, unsigned n)
{
    uint64_t turns = 1;

    need_faults();
    while (die_in_update(options, n, turns))
        turns += 1 + n_strides() * (100 + turns / 12);
    assert_true(turns > 128); /* a whole phase of the kernel */
}

/* An update with two kinds of masters has two launches. */
static void die_in_updates(const struct gpus_options *options)
{
    for (unsigned n = 1; n <= 1 + (unsigned)options->master24; n++)
        die_in_launches(options, n);
}

static void test_killed_in_updates(void **state)
{
    for (enum optimizer optimizer = 0; optimizer < OPTIMIZER_MUON; optimizer += tests_full() ? 1 : 3)
        die_in_updates(&(struct gpus_options){.n_nodes = 1, .n_local = 1, .optimizer = optimizer});
    die_in_updates(&(struct gpus_options){.n_nodes = 1, .n_local = 1, .stage = 3});
    die_in_updates(
        &(struct gpus_options){.n_nodes = 1, .n_local = 1, .moments = {.dtype = DTYPE_BF16, .stochastic = true}});
    die_in_updates(
        &(struct gpus_options){.n_nodes = 1, .n_local = 1, .moments = {.dtype = DTYPE_SIGNED8, .stochastic = true}});
    for (unsigned stage = 2; stage <= 3; stage++)
        die_in_updates(&(struct gpus_options){.n_nodes = 1, .n_local = 1, .stage = stage, .master24 = true});
}

static void test_killed_at_groups(void **state)
{
    kill_at(&two_gpus, "ncclGroupEnd", 1);
    kill_at(&two_nodes, "ncclGroupEnd", 3);
}

/* Pools are unchanged after a death, or are filled again. */
static void test_killed_in_stage_3(void **state)
{
    const struct gpus_options one_node = {.n_nodes = 1, .n_local = 2, .stage = 3};
    const struct gpus_options nodes = {.n_nodes = 2, .n_local = 2, .stage = 3};

    kill_at(&one_node, "sim_launch", 9);
    kill_at(&one_node, "cudaMemcpyAsync", 19);
    if (!tests_full())
        return;
    kill_at(&nodes, "sim_launch", 23);
    kill_at(&nodes, "ncclSend", 17);
    kill_at(&nodes, "ncclRecv", 17);
    kill_at(&nodes, "ncclGroupEnd", 11);
}

static void test_killed_while_waiting(void **state)
{
    kill_at(&two_gpus, "cudaEventQuery", 37);
}

static void test_killed_at_setup(void **state)
{
    kill_at(&two_gpus, "cuMemCreate", 3);
    kill_at(&two_nodes, "cuMemExportToShareableHandle", 4);
    kill_at(&two_nodes, "ncclCommInitRankConfig", 1);
    kill_at(&two_gpus, "cudaHostRegister", 4);
}

/*
 * An engine hangs at an operation. All earlier operations on the stream are done, and no later one, unlike after a kill
 * at a call. So the test tries each word of the marks that is followed by an operation.
 */
static void hang_at(const char *entry, unsigned stride)
{
#ifdef __SANITIZE_THREAD__
    enum { TIMEOUT_MS = 1000 }; /* one copy may take 100 ms */
#else
    enum { TIMEOUT_MS = 100 };
#endif
    const struct gpus_options one_gpu = {.n_nodes = 1, .n_local = 1};
    char fault[128];
    unsigned n = 1;

    need_faults();
    stride *= n_strides();
    do {
        snprintf(fault, sizeof(fault), "%s:hang@%u", entry, n);
        n += stride;
    } while (survive(&one_gpu, fault, 0, TIMEOUT_MS));
    assert_true(n > 1 + stride);
}

static void test_hangs_at_operations(void **state)
{
    hang_at("cudaMemcpyAsync", 3);
    hang_at("sim_launch", 4);
}

/* Kills an engine from outside, later in each run, until it survives. */
static void kill_after(const struct gpus_options *options)
{
    uint64_t ms = 1;

    while (survive(options, NULL, ms, 0))
        ms += n_strides() * (5 + ms / 3);
    assert_true(ms > 1);
}

static void test_killed_from_outside(void **state)
{
    const struct gpus_options one_gpu = {.n_nodes = 1, .n_local = 1},
                              stage_3 = {.n_nodes = 1, .n_local = 2, .stage = 3};

    kill_after(&one_gpu);
    kill_after(&stage_3);
}

/* ---- what is said ---------------------------------------------------------------------------------------- */

/* Only the timeout that a test must exceed is short, because everything is slow with sanitizers and other programs. */
struct timeouts {
    uint32_t connect_ms, order_ms;
};

static const struct timeouts patient = {GPUS_PATIENCE_MS, GPUS_PATIENCE_MS};

/* Starts engines, and reduces until node 0 fails. */
static void fail_with(const struct gpus_options *options, const char *fault, const struct timeouts *timeouts,
                      struct gpus *gpus)
{
    need_faults();
    gpus_init(gpus, options);
    gpus->fault = fault;
    gpus->connect_timeout_ms = timeouts->connect_ms;
    gpus->timeout_ms = timeouts->order_ms;
    gpus_start(gpus);
    if (gpus_try_ready(gpus)) {
        gpus_open_step(gpus);
        gpus_make_gradients(gpus, 1, true);
        gpus_fill_rings(gpus);
        (void)gpus_order_copy(gpus, true, 1u << DEVICE_RING, 0);
        for (uint32_t i = 0; i < gpus->layout->n_parcels; i++)
            (void)gpus_order_reduce(gpus, i, 0, 0);
    }
    gpus_wait_failed(gpus, 0);
}

static void check_words_of(const struct gpus_options *options, const char *fault, const struct timeouts *timeouts,
                           const char *expected)
{
    struct gpus gpus;

    fail_with(options, fault, timeouts, &gpus);
    assert_string_equal(gpus.nodes[0].what, expected);
    assert_true(gpus.nodes[0].said);
    gpus_deinit(&gpus);
}

static void check_words(const char *fault, const struct timeouts *timeouts, const char *expected)
{
    check_words_of(&two_gpus, fault, timeouts, expected);
}

static void test_what_does_not_fit(void **state)
{
    const struct gpus_options one_gpu = {.n_nodes = 1, .n_local = 1};

    check_words(
        "driver=0", &patient,
        "there is no GPU driver: libcuda.so.1 is not found (install NVIDIA's driver; a container needs --gpus)");
    check_words("driver=12080", &patient, "the GPU driver knows CUDA 12.8, and this program needs 13.0");
    check_words("runtime=12080", &patient, "the CUDA runtime is 12.8, and this program was built with 13.0");
    check_words("nccl=22705", &patient, "NCCL is 2.27.5, and this program was built with 2.28.9");
    check_words("nccl=22203", &patient,
                "NCCL is 2.22.3, and zerod needs 2.23 or later for more than one GPU on a node");
    check_words_of(&one_gpu, "nccl=22203", &patient, "NCCL is 2.22.3, and this program was built with 2.28.9");
    check_words("devices=1", &patient, "this node has 2 ranks, and 1 of its GPUs can be seen");
    check_words("compute-mode=2", &patient,
                "GPU 0 is in compute mode PROHIBITED, in which no process may use it: nvidia-smi -c DEFAULT");
    check_words(
        "compute-mode=3", &patient,
        "GPU 0 is in compute mode EXCLUSIVE_PROCESS, in which its trainer and zerod's engine cannot both use it: "
        "nvidia-smi -c DEFAULT, or start MPS");
    check_words("compute-mode=3,mps=1,sim_load:error=cudaErrorMemoryAllocation", &patient,
                "GPU 0: device_load_kernels: out of memory (cudaErrorMemoryAllocation)");
    check_words("sim_load:error=cudaErrorNoKernelImageForDevice@150", &patient,
                "GPU 1 has compute capability 9.0, and zerod was built for 8.x, 9.x and later: leave it out "
                "(CUDA_VISIBLE_DEVICES), or build zerod with a CUDA that knows it");
    check_words("cuMemCreate:error=CUDA_ERROR_OUT_OF_MEMORY@2", &patient,
                "GPU 0 is full: 1021 MiB of 1.00 GiB are free, and 2.00 MiB more are needed (cuMemCreate)");
}

static void test_errors(void **state)
{
    check_words("cudaStreamCreateWithFlags:error=cudaErrorMemoryAllocation@4", &patient,
                "GPU 1: cudaStreamCreateWithFlags: out of memory (cudaErrorMemoryAllocation)");
    check_words("sim_load:error=cudaErrorMemoryAllocation@3", &patient,
                "GPU 0: device_load_kernels: out of memory (cudaErrorMemoryAllocation)");
    check_words("sim_launch:error=cudaErrorInvalidValue", &patient,
                "GPU 0: device_reduce: invalid argument (cudaErrorInvalidValue)");
}

/* Any later call of NCCL may report the failure of a group. */
static void test_nccl_error(void **state)
{
    static const char begin[] = "NCCL: remote process exited or there was a network error (";
    struct gpus gpus;

    fail_with(&two_gpus, "ncclSend:async=ncclRemoteError", &patient, &gpus);
    gpus.nodes[0].what[strlen(begin)] = '\0';
    assert_string_equal(gpus.nodes[0].what, begin);
    gpus_deinit(&gpus);
}

/* Any later call may report a failed kernel, so the test does not know which. */
static void test_lost_device(void **state)
{
    static const char end[] = "an illegal memory access was encountered (cudaErrorIllegalAddress)";
    struct gpus gpus;
    size_t n;

    fail_with(&two_gpus, "sim_launch:async=cudaErrorIllegalAddress@2", &patient, &gpus);
    n = strlen(gpus.nodes[0].what);
    assert_true(n > strlen(end));
    assert_string_equal(gpus.nodes[0].what + n - strlen(end), end);
    gpus_deinit(&gpus);
}

static void test_deadlines(void **state)
{
    check_words("sim_launch:hang@2", &(struct timeouts){GPUS_PATIENCE_MS, 1500},
                "a reduction took more than 1500 ms: GPU 0 is at it");
    check_words("ncclCommInitRankConfig:hang", &(struct timeouts){8000, GPUS_PATIENCE_MS},
                "not connected to all nodes within 8000 ms: not all engines have connected");
}

/* An engine that hangs in a call sends no report, and is killed. */
static void test_stuck(void **state)
{
    struct gpus gpus;

    fail_with(&two_gpus, "cudaSetDevice:hang@15", &(struct timeouts){GPUS_PATIENCE_MS, 1000}, &gpus);
    assert_string_equal(gpus.nodes[0].what, "missed its deadline");
    assert_false(gpus.nodes[0].said);
    gpus_deinit(&gpus);
}

/* Two engines cannot use the same memory at a time. */
static void test_busy(void **state)
{
    struct gpus gpus;
    struct device *second = NULL;
    char why[256];

    gpus_init(&gpus, &two_gpus);
    gpus_start(&gpus);
    assert_int_equal(device_new(&second, &(struct device_options){.loop = &gpus.loop, .keep = &gpus.nodes[0].keep}, why,
                                sizeof(why)),
                     -EBUSY);
    assert_string_equal(why, "the last engine has not ended");
    gpus_wait_ready(&gpus);
    gpus_deinit(&gpus);
}

/* ---- orders that make no sense --------------------------------------------------------------------------- */

/* An order with values out of range ends the engine, and writes nothing. */
static void check_order_in(const struct gpus_options *options, const struct device_command *command,
                           const char *expected)
{
    struct gpus gpus;

    gpus_init(&gpus, options);
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    assert_int_equal(device_order(gpus.nodes[0].device, command), 0);
    gpus_wait_failed(&gpus, 0);
    assert_string_equal(gpus.nodes[0].what, expected);
    assert_true(gpus.nodes[0].has_tag && gpus.nodes[0].tag == 1);
    gpus_deinit(&gpus);
}

static void check_order(const struct device_command *command, const char *expected)
{
    check_order_in(&two_gpus, command, expected);
}

static void check_reduce(struct device_order_reduce reduce, const char *expected)
{
    reduce.tag = 1;
    reduce.timeout_ms = GPUS_PATIENCE_MS;
    check_order(&(struct device_command){.type = DEVICE_COMMAND_REDUCE, .reduce = reduce}, expected);
}

static void check_move(struct device_move move, const char *expected)
{
    struct device_order_copy copy = {.tag = 1, .timeout_ms = GPUS_PATIENCE_MS, .moves = &move, .n_moves = 1};

    check_order(&(struct device_command){.type = DEVICE_COMMAND_COPY, .copy = copy}, expected);
}

static void check_aside(struct device_move move, const char *expected)
{
    struct device_order_copy copy = {
        .tag = 1, .timeout_ms = GPUS_PATIENCE_MS, .moves = &move, .n_moves = 1, .aside = true};

    check_order(&(struct device_command){.type = DEVICE_COMMAND_COPY, .copy = copy}, expected);
}

static void test_bad_orders(void **state)
{
    struct device_slot slot = {.offset_bytes = UINT64_C(1) << 40}, other = {.local_rank = 2};

    check_reduce((struct device_order_reduce){.parcel = 99}, "an order for parcel 99 of 8");
    check_reduce((struct device_order_reduce){.slots = &slot, .n_slots = 1},
                 "a slot of 512 bytes at 1099511627776 of the ring of local rank 0");
    check_reduce((struct device_order_reduce){.slots = &other, .n_slots = 1},
                 "a slot of 512 bytes at 0 of the ring of local rank 2");
    check_move((struct device_move){.kind = DEVICE_RING, .offset_bytes = 2097152, .n_bytes = 1},
               "move 0 is for 1 bytes at 2097152 of a piece of 2097152");
    check_move((struct device_move){.kind = DEVICE_RING, .segment = 7, .n_bytes = 8},
               "move 0 is for 8 bytes at 0 of a segment of 0");
    check_aside((struct device_move){.write = true, .kind = DEVICE_RING, .n_bytes = 8},
                "move 0 of a copy aside writes to a device, or waits for a trainer");
    check_aside((struct device_move){.kind = DEVICE_RING, .n_bytes = 8, .point = 1},
                "move 0 of a copy aside writes to a device, or waits for a trainer");
    check_order(&(struct device_command){.type = DEVICE_COMMAND_GATHER,
                                         .gather = {.tag = 1, .first_bucket = 2, .n_buckets = 4}},
                "an order for buckets 2 to 5 of 5");
    check_order(
        &(struct device_command){.type = DEVICE_COMMAND_UPDATE, .update = {.tag = 1, .step = DEVICE_UNDO_MAX_TAG + 1}},
        "an update that makes step 1099511627776");
}

/* Orders a fetch to a rank of two nodes with a GPU each. The engine of node 0 gets the order. */
static void check_fetch(unsigned stage, bool offload, uint32_t rank, const struct device_fetched *params,
                        size_t n_params, const char *expected)
{
    const struct gpus_options options = {.n_nodes = 2, .n_local = 1, .stage = stage, .offload = offload};

    check_order_in(
        &options,
        &(struct device_command){
            .type = DEVICE_COMMAND_FETCH,
            .fetch = {.tag = 1, .timeout_ms = GPUS_PATIENCE_MS, .rank = rank, .params = params, .n_params = n_params}},
        expected);
}

static void test_bad_fetches(void **state)
{
    const struct device_fetched twice[] = {{2, 0}, {2, 4096}}, none = {GPUS_N_PARAMS, 0}, far = {0, 2 << 20};
    /* Rank 0 has all three elements of parameter 7. */
    const struct device_fetched other = {7, 0};
    const struct gpus_options stage_3 = {.n_nodes = 1, .n_local = 1, .stage = 3};
    const struct gpus_options offload = {.n_nodes = 1, .n_local = 1, .offload = true};
    struct gpus gpus;

    check_fetch(2, false, 0, twice, 1, "a fetch of parameters, and this is stage 2");
    check_fetch(3, true, 0, twice, 1, "a fetch of parameters, whose masters are in host memory");
    check_fetch(3, false, 2, twice, 1, "a fetch for rank 2 of 2");
    check_fetch(3, false, 0, &none, 1, "a fetch of parameter 9 of 9");
    check_fetch(3, false, 0, twice, 2, "a fetch of parameter 2 twice");
    check_fetch(3, false, 0, &far, 1, "a place of 524596 bytes at 2097152 of a pool of 2097152");
    check_order_in(&stage_3,
                   &(struct device_command){.type = DEVICE_COMMAND_GATHER, .gather = {.tag = 1, .n_buckets = 1}},
                   "a gathering of all weights, and this is stage 3");
    check_order_in(&offload, &(struct device_command){.type = DEVICE_COMMAND_UPDATE, .update = {.tag = 1, .step = 1}},
                   "an update of masters that are in host memory");

    gpus_init(&gpus, &(struct gpus_options){.n_nodes = 2, .n_local = 1, .stage = 3});
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    assert_int_equal(
        device_order(gpus.nodes[1].device,
                     &(struct device_command){
                         .type = DEVICE_COMMAND_FETCH,
                         .fetch = {.tag = 1, .timeout_ms = GPUS_PATIENCE_MS, .params = &other, .n_params = 1}}),
        0);
    gpus_wait_failed(&gpus, 1);
    assert_string_equal(gpus.nodes[1].what, "a fetch for rank 0, in which this node has no part");
    gpus_deinit(&gpus);
}

/* A node may skip numbers of collectives, because others' fetches have numbers, too. No number may be used again. */
static void test_numbers(void **state)
{
    struct gpus gpus;

    gpus_init(&gpus, &two_gpus);
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    for (unsigned i = 0; i < 3; i++) {
        static const uint64_t numbers[] = {0, 5, 5};
        struct device_order_reduce reduce = {.tag = i + 1, .timeout_ms = GPUS_PATIENCE_MS, .collective = numbers[i]};

        assert_int_equal(device_order(gpus.nodes[0].device,
                                      &(struct device_command){.type = DEVICE_COMMAND_REDUCE, .reduce = reduce}),
                         0);
    }
    gpus_wait_failed(&gpus, 0);
    assert_string_equal(gpus.nodes[0].what, "collective 5 is ordered where 6 is due");
    assert_true(gpus.nodes[0].has_tag && gpus.nodes[0].tag == 3);
    gpus_deinit(&gpus);
}

/* ---- programs that are none ------------------------------------------------------------------------------ */

static void note_failed(void *userdata, const struct device_failure *failure)
{
    snprintf(userdata, DEVICE_MAX_WHAT_BYTES, "%s", failure->what);
}

static void note_ended(void *userdata)
{
}

static void test_programs(void **state)
{
    char what[DEVICE_MAX_WHAT_BYTES] = "", why[256] = "";
    struct device *device = NULL;
    struct gpus gpus;
    struct device_options options = {
        .loop = &gpus.loop,
        .program = "/nonexistent/engine",
        .n_nodes = 1,
        .connect_timeout_ms = GPUS_PATIENCE_MS,
        .ops = {.failed = note_failed, .ended = note_ended, .userdata = what},
    };

    gpus_init(&gpus, &two_gpus);
    options.keep = &gpus.nodes[0].keep;
    assert_int_equal(device_new(&device, &options, why, sizeof(why)), -ENOENT);
    assert_string_equal(why, "the engine /nonexistent/engine cannot be started: No such file or directory");
    options.program = "/bin/false";
    assert_int_equal(device_new(&device, &options, why, sizeof(why)), 0);
    while (what[0] == '\0')
        gpus_turn(&gpus);
    assert_string_equal(what, "exited with status 1");
    device_close(device);
    while (gpus.nodes[0].keep.in_use)
        gpus_turn(&gpus);
    gpus_deinit(&gpus);
}

static const char *const passed_on[] = {
    "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "HOME",
    "NCCL_CONF_FILE",    "NCCL_IB_GID_INDEX",       "NCCL_NET_PLUGIN",      "NCCL_SOCKET_IFNAME"};
static const char *const kept_back[] = {"ZEROD_TEST_SECRET", "AWS_SECRET_ACCESS_KEY", "NCCLX",        "MY_NCCL_TOKEN",
                                        "HOMEPAGE",          "SSH_AUTH_SOCK",         "LD_PRELOAD_32"};

/* Return: the environment of the engine, one variable in each line. */
static char *environment_of_engine(struct gpus *gpus)
{
    static char text[16384];
    char program[] = "/tmp/zerod-test-XXXXXX", out[64], what[DEVICE_MAX_WHAT_BYTES] = "", why[256];
    struct device *device = NULL;
    struct device_options options = {
        .loop = &gpus->loop,
        .program = program,
        .n_nodes = 1,
        .connect_timeout_ms = GPUS_PATIENCE_MS,
        .keep = &gpus->nodes[0].keep,
        .ops = {.failed = note_failed, .ended = note_ended, .userdata = what},
    };
    FILE *file = fdopen(mkstemp(program), "w");

    assert_non_null(file);
    fprintf(file, "#!/bin/sh\ntr '\\000' '\\n' </proc/$$/environ >$0.env\n");
    assert_true(fchmod(fileno(file), 0700) == 0 && fclose(file) == 0);
    assert_int_equal(device_new(&device, &options, why, sizeof(why)), 0);
    while (what[0] == '\0')
        gpus_turn(gpus);
    device_close(device);
    while (gpus->nodes[0].keep.in_use)
        gpus_turn(gpus);
    snprintf(out, sizeof(out), "%s.env", program);
    file = fopen(out, "r");
    assert_non_null(file);
    text[0] = '\n';
    text[1 + fread(text + 1, 1, sizeof(text) - 2, file)] = '\0';
    fclose(file);
    unlink(out);
    unlink(program);
    return text;
}

/* The engine gets all settings of CUDA and NCCL, and no variable that it does not need. */
static void test_environment(void **state)
{
    char line[128], *text;
    struct gpus gpus;

    gpus_init(&gpus, &two_gpus);
    for (size_t i = 0; i < ARRAY_SIZE(passed_on); i++)
        setenv(passed_on[i], "passed on", 1);
    for (size_t i = 0; i < ARRAY_SIZE(kept_back); i++)
        setenv(kept_back[i], "kept back", 1);
    text = environment_of_engine(&gpus);
    for (size_t i = 0; i < ARRAY_SIZE(passed_on); i++) {
        snprintf(line, sizeof(line), "\n%s=passed on\n", passed_on[i]);
        if (!strstr(text, line))
            fail_msg("the engine does not get %s", passed_on[i]);
        unsetenv(passed_on[i]);
    }
    assert_null(strstr(text, "kept back"));
    for (size_t i = 0; i < ARRAY_SIZE(kept_back); i++)
        unsetenv(kept_back[i]);
    gpus_deinit(&gpus);
}

/* CUDA_LAUNCH_BLOCKING is not passed to the engine, because an engine whose launches block would hang. */
static void test_launch_blocking(void **state)
{
    struct gpus gpus;

    gpus_init(&gpus, &two_gpus);
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    gpus_start(&gpus);
    gpus_wait_ready(&gpus);
    unsetenv("CUDA_LAUNCH_BLOCKING");
    gpus_deinit(&gpus);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_closed_before_it_was_heard),
        cmocka_unit_test(test_killed_at_setup),
        cmocka_unit_test(test_killed_at_copies),
        cmocka_unit_test(test_killed_at_kernels),
        cmocka_unit_test(test_killed_in_updates),
        cmocka_unit_test(test_killed_at_groups),
        cmocka_unit_test(test_killed_in_stage_3),
        cmocka_unit_test(test_hangs_at_operations),
        cmocka_unit_test(test_killed_from_outside),
        cmocka_unit_test(test_killed_while_waiting),
        cmocka_unit_test(test_what_does_not_fit),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_nccl_error),
        cmocka_unit_test(test_lost_device),
        cmocka_unit_test(test_deadlines),
        cmocka_unit_test(test_stuck),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_bad_orders),
        cmocka_unit_test(test_bad_fetches),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_programs),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_launch_blocking),
    };

    if (!machine_open())
        return 77; /* meson's code for a skipped test */
    return cmocka_run_group_tests(tests, NULL, NULL);
}

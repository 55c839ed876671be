/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/core/wire/device-examples.h"

static const struct device_piece pieces[] = {{DEVICE_RING, UINT64_C(1) << 40, true}, {DEVICE_STATE, 2097152, false}};
static const uint8_t value[] = {0, 1, 0xff, 7};
static const uint8_t gpu[DEVICE_GPU_BYTES] = {0xfe, 1, [15] = 2};
static const struct device_slot slots[] = {{1, 256, UINT64_C(200) << 40}, {0, UINT64_C(1) << 33, 0}};
static const struct device_move moves[] = {{true, 3, DEVICE_WEIGHTS, 4097, 7, 65536, 1, UINT64_MAX},
                                           {false, 1, DEVICE_GRADIENT, 1, 2, 3, UINT64_C(1) << 39}};

static const struct device_fetched fetched[] = {{3, 256}, {70000, UINT64_C(1) << 40}};

const struct device_command device_example_commands[N_DEVICE_COMMAND_TYPES] = {
    [DEVICE_COMMAND_SETUP] = {.type = DEVICE_COMMAND_SETUP,
                              .setup = {.version = DEVICE_WIRE_VERSION,
                                        .generation = 70000,
                                        .node = 2,
                                        .n_nodes = 3,
                                        .connect_timeout_ms = 15000,
                                        .plan_bytes = 4096,
                                        .inputs_bytes = 8192,
                                        .results_bytes = UINT64_C(1) << 33}},
    [DEVICE_COMMAND_MEMORY] = {.type = DEVICE_COMMAND_MEMORY,
                               .memory = {.local_rank = 5, .pieces = pieces, .n_pieces = 2}},
    [DEVICE_COMMAND_VALUE] = {.type = DEVICE_COMMAND_VALUE,
                              .value = {.key = "nccl-id", .value = value, .n_value_bytes = sizeof(value)}},
    [DEVICE_COMMAND_SHARE] = {.type = DEVICE_COMMAND_SHARE, .share = {7, 8192}},
    [DEVICE_COMMAND_REDUCE] = {.type = DEVICE_COMMAND_REDUCE,
                               .reduce = {.tag = UINT64_C(5) << 40,
                                          .timeout_ms = 30000,
                                          .collective = 12,
                                          .parcel = 3,
                                          .micro_batch = 2,
                                          .pass = 1,
                                          .slots = slots,
                                          .n_slots = 2,
                                          .give_only = true,
                                          .op = UINT64_C(6) << 40}},
    [DEVICE_COMMAND_UPDATE] = {.type = DEVICE_COMMAND_UPDATE, .update = {11, 30000, 77}},
    [DEVICE_COMMAND_GATHER] = {.type = DEVICE_COMMAND_GATHER, .gather = {12, 30000, 13, 5, 6}},
    [DEVICE_COMMAND_COPY] = {.type = DEVICE_COMMAND_COPY, .copy = {13, 30000, moves, 2, true}},
    [DEVICE_COMMAND_FETCH] = {.type = DEVICE_COMMAND_FETCH, .fetch = {14, 30000, 15, 1023, fetched, 2}},
    [DEVICE_COMMAND_RELEASE] = {.type = DEVICE_COMMAND_RELEASE, .release = {15, UINT64_C(7) << 40}},
};

const struct device_report device_example_reports[N_DEVICE_REPORT_TYPES] = {
    [DEVICE_REPORT_MEMORY] =
        {.type = DEVICE_REPORT_MEMORY,
         .memory = {.local_rank = 5, .pieces = pieces, .n_pieces = 2, .gpu = gpu, .n_gpu_bytes = sizeof(gpu)}},
    [DEVICE_REPORT_VALUE] = {.type = DEVICE_REPORT_VALUE,
                             .value = {.key = "nccl-id", .value = value, .n_value_bytes = sizeof(value)}},
    [DEVICE_REPORT_READY] = {.type = DEVICE_REPORT_READY, .ready = {"CUDA 13.0, driver 13.0, NCCL 2.28.9"}},
    [DEVICE_REPORT_DONE] = {.type = DEVICE_REPORT_DONE, .done = {9, 4096, 70000}},
    [DEVICE_REPORT_FAILED] = {.type = DEVICE_REPORT_FAILED,
                              .failed = {.what = "GPU 1: cudaMemcpyAsync: out of memory",
                                         .has_tag = true,
                                         .tag = UINT64_C(1) << 63}},
};

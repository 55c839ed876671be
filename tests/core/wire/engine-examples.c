/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/core/wire/engine-examples.h"

static const struct engine_segment segments[] = {{3, 4096}, {1, UINT64_C(1) << 40}};
static const struct engine_move moves[] = {{2, true, 3, 4097, 1}, {1, false, 1, UINT64_C(1) << 39, 65536}};
static const uint8_t value[] = {0, 1, 0xff, 7};

const struct engine_command engine_example_commands[N_ENGINE_COMMAND_TYPES] = {
    [ENGINE_COMMAND_SETUP] = {.type = ENGINE_COMMAND_SETUP,
                              .setup = {.version = ENGINE_WIRE_VERSION,
                                        .generation = 70000,
                                        .node = 2,
                                        .n_nodes = 3,
                                        .address = "node2.example",
                                        .connect_timeout_ms = 15000,
                                        .segments = segments,
                                        .n_segments = 2}},
    [ENGINE_COMMAND_SHARE] = {.type = ENGINE_COMMAND_SHARE, .share = {.segment = {2, 8192}}},
    [ENGINE_COMMAND_ORDER] =
        {.type = ENGINE_COMMAND_ORDER,
         .order = {.tag = UINT64_C(5) << 40, .timeout_ms = 30000, .moves = moves, .n_moves = 2, .lasting = true}},
    [ENGINE_COMMAND_VALUE] = {.type = ENGINE_COMMAND_VALUE,
                              .value = {.key = "g1/rank_0", .value = value, .n_value_bytes = sizeof(value)}},
};

const struct engine_report engine_example_reports[N_ENGINE_REPORT_TYPES] = {
    [ENGINE_REPORT_VALUE] = {.type = ENGINE_REPORT_VALUE,
                             .value = {.key = "g1/0", .value = value, .n_value_bytes = sizeof(value)}},
    [ENGINE_REPORT_READY] = {.type = ENGINE_REPORT_READY},
    [ENGINE_REPORT_DONE] = {.type = ENGINE_REPORT_DONE,
                            .done = {.tag = 9, .n_bytes_sent = 4096, .n_bytes_received = 70000}},
    [ENGINE_REPORT_FAILED] = {.type = ENGINE_REPORT_FAILED,
                              .failed = {.what = "Connection closed by peer [10.0.0.2] (node 1)",
                                         .has_tag = true,
                                         .tag = UINT64_C(1) << 63}},
};

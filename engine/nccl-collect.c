/* SPDX-License-Identifier: Apache-2.0 */

/* Makes the communicators from an id that the daemons exchange, and polls them for errors. */

#include "engine/nccl.h"

#include <poll.h>
#include <string.h>

enum { FIRST_WORD_MS = 100 }; /* picked: within 10 ms a peer's daemon knows why the peer has ended */

/* The key under which the daemons exchange the communicators' id. Each local rank has a communicator; all of them form
 * one group. */
static const char id_key[] = "nccl-id";

void collect_begin(struct nccl_engine *engine)
{
    engine->phase = NCCL_AWAITS_ID;
    if (!engine->groups || engine->setup.node != 0)
        return;
    engine_check_nccl(engine, ncclGetUniqueId(&engine->id), "ncclGetUniqueId");
    engine->has_id = true;
    if (engine->setup.n_nodes > 1)
        engine_report(
            engine,
            &(struct device_report){
                .type = DEVICE_REPORT_VALUE,
                .value = {.key = id_key, .value = (const uint8_t *)&engine->id, .n_value_bytes = sizeof(engine->id)}},
            NULL, 0);
}

void collect_value(struct nccl_engine *engine, const struct device_pair *value)
{
    if (strcmp(value->key, id_key) != 0 || value->n_value_bytes != sizeof(engine->id) || engine->has_id)
        engine_fail(engine, "an unexpected value");
    memcpy(&engine->id, value->value, sizeof(engine->id));
    engine->has_id = true;
}

void collect_connect(struct nccl_engine *engine)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    engine->phase = NCCL_CONNECTS;
    if (!engine->groups)
        return;
    config.blocking = 0;
    engine_check_nccl(engine, ncclGroupStart(), "ncclGroupStart");
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        engine_check_nccl(engine,
                          ncclCommInitRankConfig(&gpu->communicator, (int)engine->plan.head->world_size, engine->id,
                                                 (int)gpu->rank, &config),
                          "ncclCommInitRankConfig");
    }
    engine_check_nccl(engine, ncclGroupEnd(), "ncclGroupEnd");
}

/* Waits before this engine reports a closed connection, because the peer's own daemon reports why that engine has
 * ended. No thread waits for this engine meanwhile. */
static void leave_first_word(void)
{
    (void)poll(NULL, 0, FIRST_WORD_MS);
}

int collect_poll(struct nccl_engine *engine)
{
    int answer = 0;

    for (unsigned i = 0; engine->groups && i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];
        ncclResult_t state = ncclSuccess;
        ncclResult_t r = ncclCommGetAsyncError(gpu->communicator, &state);

        if (r != ncclSuccess && r != ncclInProgress)
            state = r;
        if (state == ncclInProgress)
            answer = NCCL_AGAIN;
        else if (state != ncclSuccess) {
            engine_check_gpus(engine, "ncclCommGetAsyncError");
            if (state == ncclRemoteError)
                leave_first_word();
            engine_fail(engine, "NCCL: %s (rank %u: %s)", ncclGetErrorString(state), gpu->rank,
                        ncclGetLastError(gpu->communicator));
        }
    }
    return answer;
}

ncclDataType_t collect_dtype(enum dtype dtype)
{
    return dtype == DTYPE_F32 ? ncclFloat32 : dtype == DTYPE_BF16 ? ncclBfloat16 : ncclFloat16;
}

/* SPDX-License-Identifier: Apache-2.0 */

/* Names of the tensors of a checkpoint. */

#include "core/checkpoint/tensors.h"

#include <stdio.h>

const char *tensor_moment_key(enum optimizer optimizer, bool second)
{
    static const char *const keys[N_OPTIMIZERS][2] = {
        [OPTIMIZER_ADAMW] = {"exp_avg", "exp_avg_sq"}, [OPTIMIZER_ADAM] = {"exp_avg", "exp_avg_sq"},
        [OPTIMIZER_SGD] = {"momentum_buffer", NULL},   [OPTIMIZER_LION] = {"exp_avg", NULL},
        [OPTIMIZER_ADAGRAD] = {NULL, "sum"},
    };

    return keys[optimizer][second];
}

char *tensor_state_name(const char *param, const char *key)
{
    char *name;

    return asprintf(&name, "state.%s.%s", param, key) < 0 ? NULL : name;
}

bool tensor_is_of_model(const char *param)
{
    return *param != '('; /* which no name of torch's begins with */
}

void tensor_rank_name(char *dst, size_t size, unsigned rank)
{
    snprintf(dst, size, "rank.%u", rank);
}

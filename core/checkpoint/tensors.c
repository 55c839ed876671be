/* SPDX-License-Identifier: Apache-2.0 */

/* Names of the files and tensors of a checkpoint. */

#include "core/checkpoint/tensors.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static const char *const stems[TENSOR_N_FILES] = {"model", "optimizer", "ranks"};

void tensor_file_name(char *dst, enum tensor_file kind, int node, size_t box)
{
    char which[32] = "", further[32] = "";

    assert(kind < TENSOR_N_FILES);
    if (node >= 0)
        snprintf(which, sizeof(which), "-node%d", node);
    if (box > 0)
        snprintf(further, sizeof(further), "-%zu", box + 1);
    snprintf(dst, TENSOR_FILE_BYTES, "%s%s%s.safetensors", stems[kind], which, further);
}

enum tensor_file tensor_file_kind(const char *name)
{
    size_t n = strcspn(name, "-.");

    for (unsigned kind = 0; name[n] && kind < TENSOR_N_FILES; kind++)
        if (n == strlen(stems[kind]) && memcmp(name, stems[kind], n) == 0)
            return (enum tensor_file)kind;
    return TENSOR_N_FILES;
}

const char *tensor_moment_key(enum optimizer optimizer, bool second)
{
    static const char *const keys[N_OPTIMIZERS][2] = {
        [OPTIMIZER_ADAMW] = {"exp_avg", "exp_avg_sq"}, [OPTIMIZER_ADAM] = {"exp_avg", "exp_avg_sq"},
        [OPTIMIZER_SGD] = {"momentum_buffer", NULL},   [OPTIMIZER_LION] = {"exp_avg", NULL},
        [OPTIMIZER_ADAGRAD] = {NULL, "sum"},           [OPTIMIZER_MUON] = {"momentum_buffer", NULL},
    };

    assert(optimizer < N_OPTIMIZERS);
    return keys[optimizer][second];
}

char *tensor_state_name(const char *param, const char *key)
{
    char *name;

    return asprintf(&name, "state.%s.%s", param, key) < 0 ? NULL : name;
}

bool tensor_is_of_model(const char *param)
{
    return *param != '('; /* no parameter's name in torch begins with it */
}

void tensor_rank_name(char *dst, size_t size, unsigned rank)
{
    snprintf(dst, size, "rank.%u", rank);
}

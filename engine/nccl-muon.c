/* SPDX-License-Identifier: Apache-2.0 */

/* Muon on GPUs: a cuBLAS handle for each GPU, and the orthogonalisation of a matrix on the main stream. */

#include "engine/nccl.h"

#include <stdio.h>
#include <string.h>

enum { WHY_BYTES = 256 };

static __attribute__((noreturn)) void fail(struct nccl_engine *engine, const struct nccl_gpu *gpu, const char *why)
{
    /* If a GPU is lost, the calls of cuBLAS fail too, with less information. */
    engine_check_gpus(engine, "cuBLAS");
    engine_fail(engine, "GPU %d: %s", gpu->device, why);
}

static void note_version(struct nccl_engine *engine, const struct cublas *cublas)
{
    const size_t n = strlen(engine->versions);
    int version = 0;

    if (cublas->get_version(NULL, &version) == CUBLAS_STATUS_SUCCESS)
        snprintf(engine->versions + n, sizeof(engine->versions) - n, ", cuBLAS %d.%d.%d", version / 10000,
                 version / 100 % 100, version % 100);
}

void muon_prepare(struct nccl_engine *engine)
{
    const struct cublas *cublas;
    char why[WHY_BYTES];

    if (cublas_load(&cublas, why, sizeof(why)) < 0)
        engine_fail(engine, "%s", why);
    note_version(engine, cublas);
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        if (!orthogonalizer_open(&gpu->orthogonalizer, cublas, gpu->main, why, sizeof(why)))
            fail(engine, gpu, why);
    }
}

void muon_warm(struct nccl_engine *engine, struct nccl_gpu *gpu, struct muon_shape shape, float *scratch)
{
    char why[WHY_BYTES];

    if (!orthogonalizer_warm(&gpu->orthogonalizer, shape, scratch, why, sizeof(why)))
        fail(engine, gpu, why);
}

const float *muon_orthogonalize_on(struct nccl_engine *engine, struct nccl_gpu *gpu, struct muon_shape shape,
                                   const float *matrix, const struct hyper *hyper, float *scratch)
{
    char why[WHY_BYTES];
    const float *result = orthogonalize(&gpu->orthogonalizer, shape, matrix, hyper, scratch, why, sizeof(why));

    if (!result)
        fail(engine, gpu, why);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * muon_orthogonalize() of kernels/muon.h on a GPU, asynchronously on one stream. However, cuBLAS loads the code of a
 * product at its first call, and the driver may then wait until the device is idle. orthogonalizer_warm() makes cuBLAS
 * load the code of a shape early.
 *
 * The current device of the calling thread must be the stream's. After an error, err has a sentence.
 */

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cublas.h"
#include "kernels/device.h"
#include "kernels/muon.h"

/* For one stream. Its memory is freed only when the process ends. */
struct orthogonalizer {
    const struct cublas *cublas;
    struct cublasContext *handle;
    cudaStream_t stream;
    void *workspace; /* for cuBLAS */
    double *sums;    /* for device_normalize() */
};

/* Makes the handle and its memory. During this call, the driver may wait until the device is idle. */
bool orthogonalizer_open(struct orthogonalizer *o, const struct cublas *cublas, cudaStream_t stream, char *err,
                         size_t err_size);

/* Orthogonalises a matrix of zeroes, in one iteration. scratch: as for orthogonalize(). */
bool orthogonalizer_warm(const struct orthogonalizer *o, struct muon_shape shape, float *scratch, char *err,
                         size_t err_size);

/*
 * Orthogonalises a matrix in device memory, stored row after row. hyper: only ns_steps, ns_coefficients and eps are
 * read. scratch: muon_scratch_elems() elements of device memory, at a multiple of 64 bytes. Return: the result, rows x
 * cols, in the scratch memory; or NULL after an error.
 */
const float *orthogonalize(const struct orthogonalizer *o, struct muon_shape shape, const float *matrix,
                           const struct hyper *hyper, float *scratch, char *err, size_t err_size);

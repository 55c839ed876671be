/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Trainers of tests compute in host memory. Of a job on GPUs they have gradients and weights there by these calls,
 * which stand for those of the library of the same names and do the same in host memory. The GPU is the one of the
 * rank's number, or of LOCAL_RANK, of the stand-ins (ZEROD_LIBCUDA). One handle at a time; failures end the program
 * with a sentence.
 */

#include <stddef.h>

#include <zerod/client.h>

/* Before zerod_form(): the job's GPU, if it has one, and device memory for initial weights. */
int memory_declare(struct zerod *c, int rank, const struct zerod_param *param, size_t n_bytes);

/* n_bytes: of the parameter's gradient. Return: host memory, until the push. */
void *memory_slot(struct zerod *c, unsigned param, size_t n_bytes);
int memory_push(struct zerod *c, const struct zerod_push *push, size_t n_bytes);

/* A copy, until the next call. */
const void *memory_weight(struct zerod *c, unsigned param, size_t n_bytes);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Trainers of tests compute in host memory. With these functions their jobs can also be on GPUs: each stands for the
 * libzerod call of the same name and copies gradients and weights to or from the GPU. If the job is not on GPUs, the
 * functions do the same in host memory. The GPU, a stand-in (ZEROD_LIBCUDA), has the rank's number, or LOCAL_RANK. Use
 * one handle at a time. Failures end the program with a sentence.
 */

#include <stddef.h>

#include <zerod/client.h>

/* Call it before zerod_form(). Opens the GPU, if the job is on GPUs, and puts initial weights into device memory. */
int memory_declare(struct zerod *c, int rank, const struct zerod_param *param, size_t n_bytes);

/* n_bytes is the size of the parameter's gradient. Return: host memory, valid until the push. */
void *memory_slot(struct zerod *c, unsigned param, size_t n_bytes);
int memory_push(struct zerod *c, const struct zerod_push *push, size_t n_bytes);

/* Return: a copy of the weight, valid until the next call. */
const void *memory_weight(struct zerod *c, unsigned param, size_t n_bytes);

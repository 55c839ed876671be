/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Names of the files and tensors of a checkpoint. A job on one node writes one file of each kind. With several nodes,
 * each node writes its own files. A node writes several files of a kind if its range of a tensor has several boxes
 * (box.h), because a file has one box of each tensor.
 *
 * The model's file has each parameter under its own name. The optimizer's file has "state.NAME.KEY", with torch's keys:
 * exp_avg, exp_avg_sq, momentum_buffer, sum; step, fp32, without dimensions; and "master", the fp32 value of a
 * parameter whose weights have 16 bits. A parameter that a client declares for its own use, such as "(buffers)", is no
 * part of the model: the optimizer's file has it, under its own name.
 */

#include <stdbool.h>
#include <stddef.h>

#include "kernels/update.h"

#define TENSOR_STEP "step"
#define TENSOR_MASTER "master"

enum tensor_file {
    TENSOR_MODEL,     /* "model.safetensors", "model-node1.safetensors", "model-node1-2.safetensors" */
    TENSOR_OPTIMIZER, /* "optimizer..." */
    TENSOR_RANKS,     /* "ranks...": a U8 tensor "rank.0" for each rank, with its user state */
    TENSOR_N_FILES,
};

enum { TENSOR_FILE_BYTES = 64 }; /* size of a file's name */

/* Prints the name of a file of tensors. node: -1 if the job has one node. box: the number of the box in its range, from
 * 0. */
void tensor_file_name(char *dst, enum tensor_file kind, int node, size_t box);
/* Return: the kind of a file by its name, or TENSOR_N_FILES for another file. */
enum tensor_file tensor_file_kind(const char *name);

/* Return: torch's key of the array that zerod keeps as exp_avg (second: as exp_avg_sq); NULL if the optimizer has no
 * such array. */
const char *tensor_moment_key(enum optimizer optimizer, bool second);

/* Return: "state.NAME.KEY", which the caller frees, or NULL without memory. */
char *tensor_state_name(const char *param, const char *key);
/* Return: true if the parameter belongs to the model. */
bool tensor_is_of_model(const char *param);
/* Prints a name such as "rank.3". */
void tensor_rank_name(char *dst, size_t size, unsigned rank);

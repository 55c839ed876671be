/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Room for the gradients of models on GPUs, in a job in host memory (enum config_gpu_room). If all models of a node's
 * ranks are on GPUs, the node asks for as much room as its memory allows. All nodes get the least room that any node
 * asks for, because all nodes have the same layout. The choice is in the base of the journal, and lasts as long as the
 * run.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/config/config.h"

struct job;

/*
 * Return: the most room that this node's ranks need and its memory allows. All ranks must have declared their
 * parameters.
 */
enum config_gpu_room gpu_room_wanted(struct job *job);

/* Are the models of all ranks of this node on GPUs? */
bool gpu_room_is_for_all(const struct job *job);

/*
 * Does a job fit that needs so many bytes? without: the bytes without what is asked for. The job may use limits.memory
 * completely. Of the machine's memory, as much as is asked for must stay free, because the ranks need memory, too.
 */
bool gpu_room_fits(const struct job *job, uint64_t needed, uint64_t without);

/* Logs the room that the job has, if a rank of this node has its model on a GPU. */
void gpu_room_log(const struct job *job);

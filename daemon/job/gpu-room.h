/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Room for the gradients of models on GPUs, in a job in host memory (enum config_gpu_room). A node wants as much as its
 * memory allows, if all of its ranks' models are on GPUs. All nodes get the least that any of them wants, because the
 * layout of all nodes is one. The choice lasts as long as the run: the base of the journal has it.
 */

#include "core/config/config.h"

struct job;

/* The most room that this node's ranks want and its memory allows. All of them have declared their parameters. */
enum config_gpu_room gpu_room_wanted(struct job *job);

/* One line in the log about what the job has got, if any of this node's ranks has its model on a GPU. */
void gpu_room_log(const struct job *job);

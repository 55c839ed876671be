/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 on GPUs: the contents of the ranks' pools. Each rank has its own pool on its GPU. A rank copies gathered
 * parameters from its pool before it sends another request. So a pool keeps only the parameters of the current request.
 */

#include "daemon/step/pools.h"

/* Call it when the engine has allocated the GPU memory. Sets executor->pools. Return: 0 or -ENOMEM. */
int device_gather_new(struct executor *executor);

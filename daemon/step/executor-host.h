/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Functions of executor-host.c that executor-offload.c also uses, because its masters and moments are in host memory.
 */

#include "daemon/step/executor.h"

int host_read(struct executor *executor, const struct executor_read *read);
int host_show(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
int host_load(struct executor *executor, executor_done done, void *userdata);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * When the daemon starts, it checks the checkpoint folder and grants its readers access, so that errors show before the
 * first save. A libuv thread does this, because a disk may hang while a kept run continues.
 */

#include <stddef.h>
#include <uv.h>

#include "daemon/server/accounts.h"

struct config_checkpoint;
struct job;

struct checkpoint_folder {
    uv_work_t work;
    const struct config_checkpoint *config;
    struct job *job; /* NULL after checkpoint_folder_leave() */
    struct accounts readers;
    int tried, given; /* 0 or -errno */
};

/*
 * Starts the check; E1701 reports a bad folder later. folder: zeroed, valid until the job's loop has ended. Return: 0,
 * or -errno with a message in why, such as for a missing group of checkpoint.allow_groups.
 */
int checkpoint_folder_try(struct checkpoint_folder *folder, struct job *job, char *why, size_t why_size);
/* Forgets the job. The caller calls it before it frees the job. */
void checkpoint_folder_leave(struct checkpoint_folder *folder);

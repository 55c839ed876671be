/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * At its start, the daemon checks the checkpoint folder and grants access to the readers (checkpoint.allow_groups), so
 * that errors appear before the first save. A libuv thread does this, because a hanging disk must not stop an adopted
 * run.
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
 * Starts the check. E1701 reports a bad folder later. folder: zeroed; must stay valid until the event loop ends.
 * Return: 0, or -errno with a message in why, for example if a group of checkpoint.allow_groups does not exist.
 */
int checkpoint_folder_try(struct checkpoint_folder *folder, struct job *job, char *why, size_t why_size);
/* Forgets the job. Call it before the job is freed. */
void checkpoint_folder_leave(struct checkpoint_folder *folder);
